"""Steps that are left out in ComfyUI: which samplers they are left out for, and that all else is computed."""

from __future__ import annotations

import sys
import warnings
from types import SimpleNamespace

import pytest
import tiny_pipelines
import torch
from comfy_stand_in import Guider, Sampler, comfy_ui, in_memory, sample_euler, sample_euler_ancestral, sample_heun
from stated_steps import StatedSteps
from tiny_pipelines import WIDTH

from trtconvert.models.diffusers import diffusers_model
from trtconvert.runtime import follow

SIGMAS = torch.tensor([14.0, 9, 6, 4, 2.5, 1.5, 0.8, 0.3, 0])
COMPUTED = (True, True, False, False, True, False, True, False)


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


NOISE, TEXTS = noise(2, 4, 8, 8) * 14, [noise(1, 8, WIDTH, seed=1), noise(1, 8, WIDTH, seed=2)]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """A denoiser that leaves steps out, in ComfyUI's model of it with the loader's wrappers."""
    folder = tmp_path_factory.mktemp("comfyui")
    tiny_pipelines.stable_diffusion().save_pretrained(folder / "pipeline")
    made = diffusers_model(folder / "pipeline", height=32, width=32, batch=[1, 1, 2], tokens=8)
    calls = []

    def counted(**named):
        calls.append(None)
        return made.denoiser(**named)

    bundle = in_memory(made, counted)
    bundle["denoiser"].reuse = StatedSteps(COMPUTED)
    bundle.manifest.components["denoiser"].diffusers.config.setdefault("in_channels", 4)
    with comfy_ui(folder / "models") as node:
        nodes = sys.modules[f"{node.__name__}.nodes"]
        (folder / "models" / "trtconvert" / "sd").mkdir(parents=True)
        (folder / "models" / "trtconvert" / "sd" / "manifest.json").touch()
        nodes.runtime = SimpleNamespace(load=lambda *_, **__: bundle)
        yield SimpleNamespace(load=lambda: nodes.TrtconvertLoader().load("sd")[0], bundle=bundle, calls=calls)


def drawn(loaded, sampler, texts=TEXTS, sigmas=SIGMAS, patcher=None, **model_options):
    """What is drawn, how often the network was called, and what was warned of."""
    guider = Guider(patcher or loaded.load(), [(f"text {number}", text.expand(2, -1, -1)) for number, text in enumerate(texts)])
    loaded.calls.clear()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch.manual_seed(0)
        x = guider.sample(sampler, NOISE, sigmas, model_options)
    return x, len(loaded.calls), [str(warning.message) for warning in told]


def test_euler_leaves_steps_out_for_each_conditioning(loaded):
    x, calls, told = drawn(loaded, Sampler(sample_euler))
    assert calls == len(TEXTS) * sum(COMPUTED) and not told
    model = loaded.load().model
    timesteps = model.model_sampling.timestep(SIGMAS[:-1]).double()
    followed = [follow(loaded.bundle["denoiser"], timesteps) for _ in TEXTS]
    expected = NOISE
    for step, sigma in enumerate(SIGMAS[:-1]):
        given = model.model_sampling.calculate_input(sigma.expand(2), expected)
        first, second = (
            of(given, timesteps[step].float().expand(2), text.expand(2, -1, -1))
            for of, text in zip(followed, TEXTS, strict=True)
        )
        expected = expected + (first + 2 * (second - first)) * (SIGMAS[step + 1] - sigma)
    torch.testing.assert_close(x, expected, atol=1e-4, rtol=1e-4)


def own_euler(*arguments, **options):
    return sample_euler(*arguments, **options)


own_euler.__name__ = "sample_euler"


@pytest.mark.parametrize(
    ("sampler", "options", "calls", "why"),
    [
        (Sampler(sample_heun), {}, 15, "heun is not known to call the model once a step"),
        (Sampler(sample_euler_ancestral), {}, 8, "euler_ancestral is not known"),
        (Sampler(sample_euler, s_churn=0.1), {}, 8, "adds noise, by s_churn"),
        (Sampler(own_euler), {}, 8, "euler is not known"),
        (Sampler(sample_euler), {"context_handler": object()}, 8, "draws in windows"),
        (Sampler(sample_euler), {"model_function_wrapper": len}, 8, "a node wraps the model's calls"),
        (Sampler(sample_euler), {"denoise_mask_function": len}, 8, "changes the mask"),
    ],
    ids=["two calls", "ancestral", "churn", "another's", "windows", "wrapped", "mask"],
)
def test_what_else_draws_is_computed_and_told_once(loaded, sampler, options, calls, why):
    patcher = loaded.load()
    x, made, told = drawn(loaded, sampler, TEXTS[:1], patcher=patcher, **options)
    assert made == calls and len(told) == 1 and why in told[0]
    bundle_steps, patcher.wrappers = patcher.wrappers, {}
    assert torch.equal(x, drawn(loaded, sampler, TEXTS[:1], patcher=patcher, **options)[0])
    patcher.wrappers = bundle_steps
    assert not drawn(loaded, sampler, TEXTS[:1], patcher=patcher, **options)[2]


def test_other_noise_on_the_way_to_the_model_is_computed(loaded):
    patcher = loaded.load()
    patcher.add_wrapper_with_key(
        "predict_noise", "other", lambda executor, x, sigma, *others: executor(x, sigma * 0.5, *others)
    )
    assert drawn(loaded, Sampler(sample_euler), TEXTS[:1], patcher=patcher)[1] == 8


def test_a_conditioning_that_comes_back_begins_anew(loaded):
    patcher = loaded.load()
    guider, steps = Guider(patcher, []), []

    def switched(executor, *arguments):
        guider.conditionings = [("one" if len(steps) in (2, 3, 4) else "other", TEXTS[0].expand(2, -1, -1))]
        before = len(loaded.calls)
        prediction = executor(*arguments)
        steps.append(len(loaded.calls) - before)
        return prediction

    patcher.add_wrapper_with_key("predict_noise", "switch", switched)
    loaded.calls.clear()
    guider.sample(Sampler(sample_euler), NOISE, SIGMAS, {})
    # Two predictions of its own are computed before any is left out.
    assert steps == [1, 1, 1, 1, 1, 1, 1, 0]


def test_nothing_of_a_run_that_fails_is_left(loaded):
    patcher = loaded.load()

    def failing(model, x, sigmas):
        sample_euler(model, x, sigmas[:4])
        raise RuntimeError("interrupted")

    failing.__name__, failing.__module__ = "sample_euler", sample_euler.__module__
    with pytest.raises(RuntimeError, match="interrupted"):
        drawn(loaded, Sampler(failing), TEXTS[:1], patcher=patcher)
    assert len(loaded.calls) == 2
    loaded.calls.clear()
    patcher.model.apply_model(NOISE, SIGMAS[3].expand(2), c_crossattn=TEXTS[0].expand(2, -1, -1))
    assert len(loaded.calls) == 1
    first, again = (drawn(loaded, Sampler(sample_euler), TEXTS[:1], patcher=patcher) for _ in range(2))
    assert torch.equal(first[0], again[0]) and first[1] == again[1] == sum(COMPUTED)
