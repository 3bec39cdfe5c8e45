"""Errors and results of users' samplers, and functions beside their recipe."""

from __future__ import annotations

from dataclasses import replace

import pytest
import tiny_models
import torch
from support import run

from trtconvert.diffusion_model import InputSpec
from trtconvert.entry_point import import_function
from trtconvert.errors import TrtconvertError, UserError
from trtconvert.models.own_sampler import OwnSampler, SamplerError


def denoiser(*_inputs, **_named):
    return torch.zeros(1)


def own(sampler):
    of_number = replace(
        tiny_models.build(), inputs=tuple(InputSpec(x, "float32", ("batch",)) for x in ("x", "timestep"))
    )
    return OwnSampler("mine:load", sampler, of_number)


def asked(sampler):
    return own(sampler)(denoiser, [3, 4], steps=5, solver="ddim")


def test_images_come_through():
    images = torch.rand(2, 3, 8, 8)

    def draws(denoiser, seeds, *, steps, solver):
        for step in range(steps):
            denoiser(torch.zeros(2), torch.full((2,), float(step)))
        return images

    assert asked(draws) is images


def giving(samples):
    """A sampler of one step that gives these samples."""

    def draws(denoiser, seeds, *, steps, solver):
        denoiser(torch.zeros(2), torch.full((2,), 900.0))
        return samples

    return draws


@pytest.mark.parametrize(("shape", "as_image"), [((2, 5, 3, 8, 8), (2, 3, 40, 8)), ((2, 2, 300), (2, 1, 4, 256))])
def test_videos_and_sounds_are_laid_out_as_images(shape, as_image):
    samples = torch.rand(shape)
    drawn = own(giving(samples))(denoiser, [3, 4], steps=1, solver="ddim")
    assert drawn.shape == as_image
    rows = samples.flatten(1, 2)[:, :2] if len(shape) == 3 else samples[:, :, 1].flatten(1, 2)
    if len(shape) == 5:
        assert torch.equal(drawn[:, 1], rows)
    else:  # 300 amplitudes of a channel take two rows, filled up
        assert torch.equal(drawn[:, 0, [0, 2]], samples[..., :256]) and torch.equal(
            drawn[:, 0, 1, :44], samples[:, 0, 256:]
        )
        assert (drawn[:, 0, 1::2, 44:] == 0.5).all()


@pytest.mark.parametrize(("low", "high"), [(-1.0, 1.0), (0.0, 255.0)])
def test_samples_outside_of_the_full_scale_are_told(low, high):
    samples = torch.linspace(low, high, 2 * 3 * 8 * 8).view(2, 3, 8, 8)
    with pytest.warns(RuntimeWarning, match=rf"outside of the full scale .*got: {low:.3g} to {high:.3g}; remedy: "):
        own(giving(samples))(denoiser, [3, 4], steps=1, solver="ddim")


def fails(*_inputs, **_named):
    raise KeyError("x")


@pytest.mark.parametrize(
    ("sampler", "got"),
    [
        (fails, "KeyError: 'x'"),
        (lambda *_, **__: [1], "list"),
        (lambda *_, **__: torch.rand(1, 3, 8, 8), "float32 [1, 3, 8, 8]"),
        (lambda *_, **__: torch.zeros(2, 3, 8, 8, dtype=torch.int64), "int64 [2, 3, 8, 8]"),
        (lambda denoiser, seeds: None, "TypeError"),
    ],
)
def test_faults_are_told_as_the_samplers(sampler, got):
    with pytest.raises(SamplerError, match="the sampler of mine:load") as refused:
        asked(sampler)
    assert got in refused.value.got


def test_errors_of_the_denoiser_pass_unchanged():
    def call(denoiser, seeds, *, steps, solver):
        return denoiser(torch.zeros(2), torch.zeros(2))

    def refuses(*_):
        raise TrtconvertError("no memory", expected="some", got="none", remedy="add some")

    with pytest.raises(TrtconvertError, match="no memory") as refused:
        own(call)(refuses, [3], steps=5, solver="ddim")
    assert not isinstance(refused.value, SamplerError)


def test_a_function_lies_beside_its_recipe(tmp_path):
    (tmp_path / "beside_its_recipe.py").write_text("def load():\n    raise ValueError('found')\n")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("model: {source: 'beside_its_recipe:load'}\n")
    outcome = run("build", recipe, "-o", tmp_path / "out", "--no-cache")
    assert outcome.exit_code == 2
    assert "ValueError: found" in outcome.output


def test_a_package_that_the_module_lacks_is_told_as_such(tmp_path, monkeypatch):
    (tmp_path / "needs_another.py").write_text("import no_such_package.part\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match="remedy: install no_such_package, which the module imports"):
        import_function("needs_another:load", "model.source")
    with pytest.raises(UserError, match="remedy: put the module beside the recipe"):
        import_function("no_such_module.part:load", "model.source")


def calls_at(timesteps, each=1):
    """A sampler that calls its denoiser so often at each of so many timesteps, for all samples or for one after the other."""

    def draws(denoiser, seeds, *, steps, solver):
        for timestep in range(timesteps):
            for _ in range(each):
                denoiser(torch.zeros(1), timestep=torch.full((1,), float(timestep)))
        return torch.rand(2, 3, 8, 8)

    return draws


@pytest.mark.parametrize("each", [1, 2, 7])
@pytest.mark.parametrize("timesteps", [4, 5, 6, 9])
def test_as_many_timesteps_as_steps_are_asked_for_are_fine(timesteps, each, recwarn):
    asked(calls_at(timesteps, each))
    assert not recwarn


@pytest.mark.parametrize("timesteps", [1, 3, 7, 10, 15, 50])
def test_a_sampler_that_ignores_its_steps_is_told(timesteps):
    told = rf"sampler of mine:load .*expected: 5, by ddim, got: {timesteps}; remedy: .*`steps`"
    with pytest.warns(RuntimeWarning, match=told):
        asked(calls_at(timesteps))


def test_parts_do_not_hide_a_sampler_that_ignores_its_steps():
    with pytest.warns(RuntimeWarning, match="got: 3; remedy"):
        asked(calls_at(3, each=5))


def test_samplers_see_the_denoiser_as_it_is_and_calls_apart_count(recwarn):
    class Denoiser:
        device = torch.device("cpu")

        def __call__(self, x, timestep):
            return torch.zeros(1)

        def apart(self):
            return Denoiser()

    def draws(denoiser, seeds, *, steps, solver):
        assert denoiser.device == torch.device("cpu") and not hasattr(denoiser, "guidance")
        twin = denoiser.apart()
        for step in range(steps):
            twin(torch.zeros(1), torch.tensor([float(step)]))
        return torch.rand(1, 3, 8, 8)

    own(draws)(Denoiser(), [3], steps=5, solver="ddim")
    assert not recwarn


X, T = torch.zeros(2), torch.full((2,), 500.0)


@pytest.mark.parametrize(
    "timestep", [500, 500.0, T[0], T[:1], T, T.long()], ids=["int", "float", "[]", "[1]", "[B]", "int64"]
)
@pytest.mark.parametrize("by_name", [False, True])
def test_one_timestep_for_all_samples_is_given_to_each(timestep, by_name):
    seen = []

    def records(x, timestep):
        seen.append(timestep)

    def draws(denoiser, seeds, *, steps, solver):
        denoiser(X, timestep=timestep) if by_name else denoiser(X, timestep)
        return torch.rand(2, 3, 8, 8)

    own(draws)(records, [3, 4], steps=1, solver="ddim")
    assert torch.equal(seen[0].float(), T)


@pytest.mark.parametrize(
    ("inputs", "named", "got"),
    [
        ((X, T[:, None]), {}, r"x \[2\], timestep \[2, 1\]"),
        ((X,), {}, r"x \[2\]"),
        ((X,), {"sigma": T}, r"x \[2\], sigma \[2\]"),
        ((X, T, X), {}, r"x \[2\], timestep \[2\], and 1 more"),
        ((X.numpy(), T), {}, r"x ndarray \[0. 0.\], timestep \[2\]"),
        ((X, torch.zeros(3)), {}, r"x \[2\], timestep \[3\]"),
        ((), {}, "no inputs"),
    ],
)
def test_calls_with_other_inputs_are_refused(inputs, named, got):
    with pytest.raises(SamplerError, match=rf"x \[batch\], timestep \[batch\]\n  got: {got}\n  remedy") as refused:
        own(lambda denoiser, *_, **__: denoiser(*inputs, **named))(denoiser, [3, 4], steps=1, solver="ddim")
    assert "with other inputs than the model describes" in refused.value.problem


def test_a_sampler_that_does_not_call_its_denoiser_is_refused():
    with pytest.raises(SamplerError, match="call the denoiser that `sample` gets"):
        asked(lambda *_, **__: torch.rand(2, 3, 8, 8))


@pytest.mark.parametrize("factor", [1e-3, 2.0, -1.0])
def test_timesteps_in_other_units_are_told(factor):
    def draws(denoiser, seeds, *, steps, solver):
        for timestep in torch.linspace(999, 0, steps):
            denoiser(X, factor * timestep)
        return torch.rand(2, 3, 8, 8)

    with pytest.warns(RuntimeWarning, match=r"do not fit its model's timestep_max.*\[0, 1000\).*noise_input"):
        asked(draws)
