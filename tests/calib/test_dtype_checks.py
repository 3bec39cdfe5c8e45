"""Models that cannot compute in a 16-bit type are refused with the module's name, before the calibration."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest
import tiny_models
import torch
from support import Quiet, refusal, run, tiny_recipe
from tiny_layers import Called, model_of
from torch import nn

from trtconvert.calib.calibrate import calibrate, parts_to_convert
from trtconvert.calib.dtype_checks import refuse_mixed_types, within_float16
from trtconvert.errors import UserError
from trtconvert.recipe import AttentionSection, CalibrationSection, LayersSection


def scaled(up: float, down: float):
    """Modules with large values inside and small ones at the ends."""
    denoiser = Called(
        lambda self, x: x + self.down(self.up(x)), up=nn.Linear(32, 32), down=nn.Linear(32, 32, bias=False)
    )
    with torch.no_grad():
        denoiser.up.weight.mul_(up)
        denoiser.down.weight.mul_(down)
    return model_of(denoiser, ("batch", 16, 32))


def watched(model):
    with within_float16(model), torch.no_grad():
        model.denoiser(**model.example(0, {"batch": 2}))


def test_values_beyond_it_are_named():
    with pytest.raises(
        UserError, match=r"(?s)exceeds the range of float16.*at up\n.*remedy: set model.dtype to bfloat16"
    ):
        watched(scaled(3e5, 3e-6))


def test_weights_beyond_it_are_named():
    with pytest.raises(UserError, match=r"got: .* at up.weight, and more at \d others"):
        watched(scaled(1e7, 1e-7))


def test_others_pass_and_nothing_stays_on_the_model():
    model = scaled(100.0, 0.01)
    watched(model)
    assert not any(module._forward_hooks for module in model.denoiser.modules())


@pytest.mark.parametrize(("dtype", "fits"), [("float16", False), ("bfloat16", True)])
def test_a_build_says_so_before_the_calibration(tmp_path, monkeypatch, dtype, fits):
    import tiny_layers

    build = tiny_layers.build

    def large():
        model = build()
        with torch.no_grad():
            model.denoiser.mlp[0].weight.mul_(1e6)
            model.denoiser.mlp[2].weight.mul_(1e-6)
        return model

    monkeypatch.setattr(tiny_layers, "build", large)
    recipe = tiny_recipe(
        tmp_path, model={"source": "tiny_layers:build", "dtype": dtype}, verify={"min_psnr": -50, "min_site_sqnr": -50}
    )
    outcome = run("build", recipe, "-o", tmp_path / "bundle", "--cache", tmp_path / "cache")
    if fits:
        assert outcome.exit_code == 0, outcome.output
    else:
        refusal(outcome, "exceeds the range of float16", "mlp.0", "bfloat16")


class Dropping(nn.Module):
    """Attention that is written out with a module for dropout, whose output the check reads."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.dropout = nn.Linear(32, 32), nn.Dropout(0.1)

    def forward(self, x, timestep):
        q = self.embed(x).unflatten(-1, (1, 32)).transpose(1, 2)
        return (self.dropout((q @ q.mT).softmax(-1)) @ q).transpose(1, 2).flatten(2)


def test_the_check_leaves_attention_as_it_is():
    model = model_of(Dropping(), ("batch", 16, 32))
    with within_float16(model):
        assert len(parts_to_convert(model, AttentionSection(), LayersSection()).sites) == 1


# Types ----------------------------------------------------------------------------------------------------------------


class Mixing(nn.Module):
    def __init__(self, cast: bool) -> None:
        super().__init__()
        self.embed, self.cast = nn.ModuleList([nn.Linear(32, 32)]), cast

    def forward(self, x, timestep):
        features = torch.sin(timestep[:, None] * torch.arange(32) / 50)[:, None].expand_as(x)
        return self.embed[0](torch.lerp(x, features.to(x.dtype) if self.cast else features, 0.5))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_operations_on_several_types_are_named(dtype):
    model = model_of(Mixing(False), ("batch", 16, 32))
    with pytest.raises(
        UserError, match=r"(?s)does not compute in .*float16.*got: its forward: .*remedy: convert the tensors"
    ):
        refuse_mixed_types(model, dtype)
    refuse_mixed_types(model_of(Mixing(True), ("batch", 16, 32)), dtype)
    assert model.denoiser.embed[0].weight.dtype == torch.float32 and model.denoiser.embed[0].weight.isfinite().all()


def test_models_whose_copies_compute_with_their_weights_are_refused():
    class Closed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList([layer := nn.Linear(32, 32)])
            self.function = lambda x: layer(x)

        def forward(self, x, timestep):
            return self.function(x)

    with pytest.raises(
        UserError, match=r"(?s)cannot be copied.*the original's parts\.0\.weight.*model.dtype to float32"
    ):
        refuse_mixed_types(model_of(Closed(), ("batch", 16, 32)), torch.float16)


def test_models_that_need_numbers_are_left_to_the_export():
    class Deciding(Mixing):
        def forward(self, x, timestep):
            return x if float(x.sum()) > 0 else super().forward(x, timestep)

    refuse_mixed_types(model_of(Deciding(False), ("batch", 16, 32)), torch.float16)


def test_what_fails_in_fp32_too_is_left_to_the_forward():
    """A timestep in FP32 that is looked up in a table: its type is wrong, whatever the model's type."""

    class OfTable(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(1000, 32)

        def forward(self, x, timestep):
            return x + self.table(timestep)[:, None]

    model = model_of(OfTable(), ("batch", 16, 32))
    refuse_mixed_types(model, torch.float16)
    with pytest.raises(UserError, match=r"remedy: declare an input that is looked up in a table .* as int64"):
        parts_to_convert(model, AttentionSection(), LayersSection())


def _scaled(scale):
    """The tiny model with a sampler that scales what the denoiser gets."""
    tiny = tiny_models.build()

    def sample(denoiser, seeds, **named):
        return tiny.sample(lambda x, timestep: denoiser(x * scale, timestep), seeds, **named)

    return replace(tiny, sample=sample)


def test_the_command_observes_the_range_of_the_stored_type(tmp_path, monkeypatch):
    monkeypatch.setattr(tiny_models, "scaled", lambda: _scaled(1e6), raising=False)
    of_files = "trtconvert.calib.command.with_dtype"
    monkeypatch.setattr(of_files, lambda section: section.model_copy(update={"dtype": "float16"}))
    recipe = tiny_recipe(tmp_path, model={"source": "tiny_models:scaled"}, calibration={"steps": 2})
    outcome = run("calibrate", recipe, "-o", tmp_path / "of.safetensors", "--cache", tmp_path / "cache")
    refusal(outcome, "exceeds the range of float16", "in the calibration")


@pytest.mark.parametrize("scale", [1e2, 1e6])
def test_a_calibration_in_which_numbers_grow_beyond_it_names_what_reads_them(tmp_path, scale):
    """Discovery sees one call, and its outputs of modules alone."""
    model = _scaled(scale)
    parts = parts_to_convert(model, AttentionSection(), LayersSection(min_rows=1))
    told = r"range of float16\n.*in the calibration\n  got: \S+ at qkv, and more at 1 others" if scale > 1e5 else None
    with nullcontext() if told is None else pytest.raises(UserError, match=told):
        calibrate(
            model, CalibrationSection(samples=1, batch=1, steps=2), "weights", parts.sites, tmp_path, Quiet(),
            layers=parts.layers, dtype="float16",
        )  # fmt: skip
