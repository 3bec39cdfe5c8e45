"""Steps that are left out in ComfyUI: the samplers that leave steps out, and those that compute all steps."""

from __future__ import annotations

import sys
import warnings
from types import SimpleNamespace

import pytest
import tiny_pipelines
import torch
from comfy_stand_in import Guider, KSampler, comfy_ui, in_memory, sample_euler, sample_heun
from stated_steps import StatedSteps
from tiny_pipelines import WIDTH

from trtconvert.models.diffusers import diffusers_model
from trtconvert.runtime import follow

SIGMAS = torch.tensor([14.0, 9, 6, 4, 2.5, 1.5, 0.8, 0.3, 0])
COMPUTED = (True, True, False, False, True, False, True, False)


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


NOISE = noise(2, 4, 8, 8)
TEXTS = {"one": noise(1, 8, WIDTH, seed=1), "other": noise(1, 8, WIDTH, seed=2)}
ONE = {"one": TEXTS["one"]}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """A denoiser that leaves steps out, in ComfyUI's model of it with the loader's wrappers."""
    folder = tmp_path_factory.mktemp("comfyui")
    tiny_pipelines.stable_diffusion().save_pretrained(folder / "pipeline")
    made = diffusers_model(folder / "pipeline", height=32, width=32, batch=[1, 1, 2], tokens=8)
    bundle = in_memory(made, made.denoiser, StatedSteps(COMPUTED))
    with comfy_ui(folder / "models") as node:
        nodes = sys.modules[f"{node.__name__}.nodes"]
        (folder / "models" / "trtconvert" / "sd").mkdir(parents=True)
        (folder / "models" / "trtconvert" / "sd" / "manifest.json").touch()
        nodes.runtime = SimpleNamespace(load=lambda *_, **__: bundle)
        yield SimpleNamespace(load=lambda: nodes.TrtconvertLoader().load("sd")[0], denoiser=bundle["denoiser"])


def drawn(loaded, sampler, texts=ONE, patcher=None, together=False, **model_options):
    """The samples, the number of the network's calls, and the warnings."""
    guider, loaded.denoiser.calls = Guider(patcher or loaded.load(), texts, together), 0
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch.manual_seed(0)
        x = guider.sample(sampler, NOISE, SIGMAS, **model_options)
    return x, loaded.denoiser.calls, [str(warning.message) for warning in told]


@pytest.mark.parametrize("together", [False, True], ids=["each alone", "in a batch"])
def test_euler_leaves_steps_out_for_each_conditioning(loaded, together):
    x, calls, told = drawn(loaded, KSampler(sample_euler), TEXTS, together=together)
    assert calls == (1 if together else 2) * sum(COMPUTED) and not told
    model = loaded.load().model
    timesteps = model.model_sampling.timestep(SIGMAS[:-1])
    followed = [follow(loaded.denoiser, timesteps) for _ in TEXTS]
    expected = NOISE * SIGMAS[0]
    for step, sigma in enumerate(SIGMAS[:-1]):
        given = model.model_sampling.calculate_input(sigma.expand(2), expected)
        first, second = (
            of(given, timesteps[step].float().expand(2), text.expand(2, -1, -1))
            for of, text in zip(followed, TEXTS.values(), strict=True)
        )
        expected = expected + (second + 2 * (first - second)) * (SIGMAS[step + 1] - sigma)
    torch.testing.assert_close(x, expected, atol=1e-4, rtol=1e-4)


def own_euler(*arguments, **options):
    return sample_euler(*arguments, **options)


own_euler.__name__ = "sample_euler"


@pytest.mark.parametrize(
    ("sampler", "options", "calls", "why"),
    [
        (KSampler(sample_heun), {}, 15, "heun is not known to call the model once a step"),
        (KSampler(sample_euler, s_churn=0.1), {}, 8, "adds noise, by s_churn"),
        (KSampler(own_euler), {}, 8, "euler is not known"),
        (KSampler(sample_euler), {"context_handler": object()}, 8, "draws in windows"),
        (KSampler(sample_euler), {"model_function_wrapper": len}, 8, "a node wraps the model's calls"),
        (KSampler(sample_euler), {"denoise_mask_function": len}, 8, "changes the mask"),
    ],
    ids=["two calls", "churn", "another's", "windows", "wrapped", "mask"],
)
def test_other_samplers_compute_all_steps_and_warn_once(loaded, sampler, options, calls, why):
    patcher = loaded.load()
    x, made, told = drawn(loaded, sampler, patcher=patcher, **options)
    assert made == calls and len(told) == 1 and why in told[0]
    of_loader, patcher.wrappers = patcher.wrappers, {}
    assert torch.equal(x, drawn(loaded, sampler, patcher=patcher, **options)[0])
    patcher.wrappers = of_loader
    assert not drawn(loaded, sampler, patcher=patcher, **options)[2]


def test_other_noise_on_the_way_to_the_model_is_computed(loaded):
    patcher = loaded.load()
    patcher.add_wrapper_with_key(
        "predict_noise", "other", lambda executor, x, sigma, *others: executor(x, sigma / 2, *others)
    )
    _, calls, told = drawn(loaded, KSampler(sample_euler), patcher=patcher)
    assert calls == 8 and len(told) == 1 and "other noise levels" in told[0]


def test_a_conditioning_that_comes_back_begins_anew(loaded):
    patcher, computed = loaded.load(), []
    guider = Guider(patcher, ONE, False)

    def switched(executor, *arguments):
        guider.conditions = {"other" if len(computed) in (2, 3) else "one": TEXTS["one"]}
        before = loaded.denoiser.calls
        prediction = executor(*arguments)
        computed.append(loaded.denoiser.calls - before)
        return prediction

    patcher.add_wrapper_with_key("predict_noise", "switch", switched)
    guider.sample(KSampler(sample_euler), NOISE, SIGMAS)
    # The first two predictions would serve the step at 5 if they were followed.
    assert computed == [1, 1, 1, 1, 1, 1, 1, 0]


def test_failed_runs_leave_nothing_behind(loaded):
    patcher = loaded.load()

    def failing(model, x, sigmas, extra_args):
        sample_euler(model, x, sigmas[:4], extra_args)
        raise RuntimeError("interrupted")

    failing.__name__, failing.__module__ = "sample_euler", sample_euler.__module__
    with pytest.raises(RuntimeError, match="interrupted"):
        drawn(loaded, KSampler(failing), patcher=patcher)
    assert loaded.denoiser.calls == 2
    loaded.denoiser.calls = 0
    patcher.model.apply_model(NOISE, SIGMAS[3].expand(2), c_crossattn=TEXTS["one"].expand(2, -1, -1))
    assert loaded.denoiser.calls == 1
    first, again = (drawn(loaded, KSampler(sample_euler), patcher=patcher) for _ in range(2))
    assert torch.equal(first[0], again[0]) and first[1] == again[1] == sum(COMPUTED)
