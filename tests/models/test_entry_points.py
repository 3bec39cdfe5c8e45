"""Builds of users' models: modules with two names, timesteps that are looked up, default types that stay set."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType

import pytest
import tiny_layers
import tiny_models
import torch
from safetensors.torch import save_file
from support import refusal, run, tiny_recipe
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from trtconvert import runtime
from trtconvert.bundle import read_manifest
from trtconvert.errors import UserError
from trtconvert.models.observation import shapes_of
from trtconvert.models.recorded_calls import relative_error


class Block(nn.Module):
    def __init__(self, act: nn.Module) -> None:
        super().__init__()
        self.q, self.act, self.act2 = nn.Linear(32, 32), act, act

    def forward(self, x):
        q = self.q(x)[:, None]
        return x + self.act2(self.act(F.scaled_dot_product_attention(q, q, q)[:, 0]))


class Blocks(nn.Module):
    """Two blocks whose activation is one module under several names, with a table of timesteps or features of timesteps."""

    def __init__(self, table: bool = False, again: bool = False) -> None:
        super().__init__()
        act = nn.GELU()
        self.blocks = nn.ModuleList([Block(act), Block(act)])
        if again:
            self.first = self.blocks[0]
        self.embed, self.out = nn.Linear(1, 32), nn.Linear(32, 1)
        self.table = nn.Embedding(1000, 32) if table else None

    def forward(self, x, timestep):
        features = torch.cos(timestep)[:, None] if self.table is None else self.table(timestep)
        h = self.embed(x.flatten(2).transpose(1, 2)) + features.to(x.dtype)[:, None]
        for block in self.blocks:
            h = block(h)
        return self.out(h).transpose(1, 2).reshape(x.shape)


@pytest.fixture
def built(tmp_path, monkeypatch):
    """Builds the model of a function, and returns the bundle's folder."""

    def build(make):
        module = ModuleType("an_entry_point")
        module.build = make
        monkeypatch.setitem(sys.modules, "an_entry_point", module)
        recipe = tiny_recipe(tmp_path, model={"source": "an_entry_point:build"})
        outcome = run("build", recipe, "-o", tmp_path / "bundle", "--cache", tmp_path / "cache")
        assert outcome.exit_code == 0, outcome.output
        return tmp_path / "bundle"

    return build


@pytest.mark.parametrize(
    "again", [pytest.param(False, marks=pytest.mark.soak), True], ids=["an activation", "a whole block"]
)
def test_modules_with_two_names_are_converted_under_the_first(built, again):
    """torch.export calls stand-ins of all modules then."""
    folder = built(lambda: tiny_layers.build(lambda: Blocks(again=again)))
    sites = read_manifest(folder).components["denoiser"].sites
    assert [site.name for site in sites] == ["blocks.0", "blocks.1"] and all(site.in_int8 for site in sites)


def test_timesteps_that_are_looked_up_reach_the_model_as_integers(built):
    def looked_up():
        torch.manual_seed(0)
        model = tiny_layers.build(lambda: Blocks(table=True))
        inputs = tuple(replace(x, dtype="int64") if x.name == "timestep" else x for x in model.inputs)
        return replace(model, inputs=inputs)

    folder, model = built(looked_up), looked_up()
    inputs = model.example(0, {name: opt for name, (_, opt, _) in model.dims.items()})
    with runtime.load(folder) as bundle, torch.no_grad():
        assert relative_error(bundle["denoiser"](**inputs), model.denoiser(**inputs)) < 0.05
        assert model.sample(bundle["denoiser"], range(2), steps=3, solver="ddim").isfinite().all()


@pytest.mark.soak
def test_a_default_type_that_a_model_sets_is_not_that_of_what_is_drawn(built):
    def careless():
        torch.set_default_dtype(torch.float64)
        model = tiny_layers.build(Blocks)
        return replace(model, denoiser=model.denoiser.float())

    assert read_manifest(built(careless)).quality.psnr > 20
    assert torch.get_default_dtype() == torch.float32


def test_drawn_inputs_are_fp32_whatever_the_default():
    model = tiny_layers.build()
    before = model.example(0, {"batch": 2})
    torch.set_default_dtype(torch.float64)
    try:
        after = model.example(0, {"batch": 2})
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(x.dtype == torch.float32 and torch.equal(x, before[name]) for name, x in after.items())


def test_a_sampler_with_weights_of_its_own_is_given_them(tmp_path, monkeypatch):
    """Bundles hold the denoiser alone: the weights of the user's sampler are named again, from any folder."""
    weights, other = tmp_path / "weights.safetensors", tmp_path / "other.safetensors"
    save_file(tiny_models.build().denoiser.state_dict(), weights)
    save_file({name: tensor + 1 for name, tensor in tiny_models.build().denoiser.state_dict().items()}, other)
    recipe = tiny_recipe(tmp_path, model={"weights": str(weights)})
    outcome = run("build", recipe, "-o", tmp_path / "bundle", "--cache", tmp_path / "cache")
    assert outcome.exit_code == 0, outcome.output
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    drawn = ("run", tmp_path / "bundle", "-n", 1, "--steps", 2)
    refusal(run(*drawn), "samples with its original weights", "trtconvert run --weights")
    refusal(run(*drawn, "--weights", other), "is not what the bundle was made from")
    outcome = run(*drawn, "--weights", weights)
    assert outcome.exit_code == 0 and (elsewhere / "samples.png").is_file(), outcome.output


def test_a_forward_that_fails_is_told_without_the_traceback_of_torch(caplog, capfd):
    """torch logs the traceback before it raises the error of the message."""
    product = nn.Linear(4, 4)
    with pytest.raises(UserError, match="same reduction dim"):
        shapes_of(product, lambda tensors: product(tensors["x"]), {"x": torch.zeros(2, 5)}, "it", "mend it")
    assert "Traceback" not in caplog.text + capfd.readouterr().err
    with FakeTensorMode() as mode, pytest.raises(RuntimeError):  # other code still sees its own
        torch.mm(mode.from_tensor(torch.zeros(2, 5)), mode.from_tensor(torch.zeros(4, 4)))
    assert "failed while attempting to run meta" in caplog.text + capfd.readouterr().err
