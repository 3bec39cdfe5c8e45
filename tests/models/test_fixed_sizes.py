"""Denoisers that take one size alone: told before the calibration, or drawn with that many samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import tiny_models
import torch
from support import Quiet, refusal, run, tiny_recipe
from torch import Tensor

from trtconvert.calib.calibrate import calibrate
from trtconvert.diffusion_model import DiffusionModel, InputSpec
from trtconvert.errors import UserError
from trtconvert.models.fixed_sizes import refuse_fixed_sizes
from trtconvert.models.own_model import prepared
from trtconvert.recipe import CalibrationSection


class Tiny(tiny_models.Tiny):
    """The tiny model with another forward, which gets the model's own."""

    def __init__(self, change: Callable[..., Tensor]) -> None:
        super().__init__()
        self.change = change
        self.register_buffer("places", torch.zeros(2, 1, 4, 4))

    def forward(self, x: Tensor, timestep: Tensor) -> Tensor:
        return self.change(super().forward, x, timestep, self.places)


def _in_a_loop(forward: Callable[..., Tensor], x: Tensor, timestep: Tensor, _: Tensor) -> Tensor:
    return torch.cat([forward(x[i : i + 1], timestep[i : i + 1]) for i in range(x.shape[0])])


def _of_values(forward: Callable[..., Tensor], x: Tensor, timestep: Tensor, _: Tensor) -> Tensor:
    return forward(x.view(2, 1, 4, 4), timestep) if timestep.max() > 0 else x


BAKED: dict[str, tuple[Callable[..., Tensor], str]] = {
    "a view": (lambda forward, x, t, _: forward(x.view(2, 1, 4, 4), t), "at batch 1: shape '[2, 1, 4, 4]' is invalid"),
    "a buffer": (lambda forward, x, t, places: forward(x + places, t), "at batch 1: a prediction [2, 1, 4, 4]"),
    "a loop": (_in_a_loop, "at batch 4: other calls of layers than at batch 2, such as embed#3"),
}


def model_of(change: Callable[..., Tensor], **changes) -> DiffusionModel:
    return replace(tiny_models.build(), denoiser=Tiny(change).eval().requires_grad_(False), **changes)


@pytest.mark.parametrize("kind", BAKED)
def test_a_batch_in_the_forward_is_told(kind):
    change, got = BAKED[kind]
    model = model_of(change)
    with pytest.raises(UserError, match="any batch 1 to 4") as error:
        refuse_fixed_sizes(model, model.dims)
    assert got in error.value.got and "'batch': (2, 2, 2)" in error.value.remedy


@pytest.mark.parametrize("dims", [(1, 2, 2), (1, 1, 2)])
def test_a_loop_over_two_samples_is_told(dims):
    with pytest.raises(UserError, match="other calls of layers"):
        refuse_fixed_sizes(model_of(_in_a_loop), {"batch": dims})


class Wide(tiny_models.Tiny):
    """Adds another table of positions to wide images than to others."""

    def forward(self, x: Tensor, timestep: Tensor) -> Tensor:
        h = x.flatten(2).transpose(1, 2)
        places = torch.linspace(-1, 1, x.shape[2])[:, None].expand(-1, x.shape[3])
        places = places.mul(x.shape[3]) if x.shape[3] > x.shape[2] else places
        return (h + places.flatten()[:, None] + timestep[:, None, None]).transpose(1, 2).reshape(x.shape)


def test_a_branch_on_sizes_is_told():
    """A trace takes one branch, without a word."""
    tiny, image = tiny_models.build(), ("batch", 1, "height", "width")
    model = replace(
        tiny,
        denoiser=Wide().eval().requires_grad_(False),
        inputs=(replace(tiny.inputs[0], shape=image), tiny.inputs[1]),
        output=replace(tiny.output, shape=image),
    )
    sizes = (4, 8, 16)
    with pytest.raises(UserError, match="a branch on sizes") as error:
        refuse_fixed_sizes(model, {"batch": (1, 2, 4), "height": sizes, "width": sizes})
    assert "at height 4, width 16: the forward calls mul in its forward, and at" in error.value.got
    refuse_fixed_sizes(model, {"batch": (1, 2, 4), "height": sizes, "width": (4, 4, 4)})


def test_models_of_any_size_pass_and_those_that_read_values_are_left_to_the_export():
    for model in (tiny_models.build(), tiny_models.build("unfused"), model_of(_of_values)):
        refuse_fixed_sizes(model, model.dims)


@pytest.mark.parametrize("command", ["build", "calibrate"])
def test_commands_tell_it_before_the_calibration(tmp_path, monkeypatch, command):
    monkeypatch.setattr(tiny_models, "baked", lambda: model_of(BAKED["a view"][0]), raising=False)
    recipe = tiny_recipe(tmp_path, model={"source": "tiny_models:baked"}, attention={"modes": "precision"})
    monkeypatch.setattr("trtconvert.calib.command.calibrate", None)  # first: this imports the other module's function
    monkeypatch.setattr("trtconvert.calib.calibrate.calibrate", None)
    apart = ["--no-cache"] if command == "build" else ["--cache", tmp_path / "cache"]
    refusal(run(command, recipe, "-o", tmp_path / "o", *apart), "does not take the sizes", "at batch 1")


def _one_size(form: str) -> DiffusionModel:
    model = model_of(BAKED["a view"][0])
    if form == "dims":
        return replace(model, dims={"batch": (2, 2, 2)})
    inputs = (InputSpec("x", "float32", (2, 1, 4, 4)), InputSpec("timestep", "float32", (2,)))
    return replace(model, dims={}, inputs=inputs, output=InputSpec("prediction", "float32", (2, 1, 4, 4)))


@pytest.mark.parametrize("form", ["dims", "shapes"])
def test_a_model_of_one_batch_draws_each_seed_as_in_any_other_batch(form):
    model, tiny = prepared("mine:load", _one_size(form)), tiny_models.build()
    drawn = model.sample(model.denoiser, [5, 6, 7], steps=2, solver="ddim")
    torch.testing.assert_close(drawn, tiny.sample(tiny.denoiser, [5, 6, 7], steps=2, solver="ddim"))


def test_conditions_are_repeated_with_their_seeds():
    seen = []

    def sample(denoiser, seeds, *, steps, solver, conditions):
        seen.append((seeds, conditions["label"].tolist()))
        denoiser(torch.zeros(2, 1, 4, 4), 900)
        return torch.zeros(len(seeds), 1, 4, 4)

    model = prepared("mine:load", replace(_one_size("dims"), sample=sample))
    model.sample(model.denoiser, [5, 6, 7], steps=1, solver="ddim", conditions={"label": torch.tensor([1, 2, 3])})
    assert seen == [([5, 6], [1, 2]), ([7, 7], [3, 3])]


def test_a_call_that_the_denoiser_does_not_take_is_told(tmp_path):
    model = model_of(BAKED["a view"][0])  # its sampler passes one sample
    with pytest.raises(UserError, match="tiny cannot take what its sampler passes") as error:
        calibrate(model, CalibrationSection(samples=1, batch=1, steps=2), "weights", [], tmp_path, Quiet())
    assert (
        "RuntimeError: shape '[2, 1, 4, 4]' is invalid for input of size 16, for x float32 [1, 1, 4, 4]"
        in error.value.got
    )
