"""NaN and Inf are refused with the first call that brings them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import tiny_models
import torch
from support import Quiet
from torch import Tensor

from trtconvert.calib.calibrate import calibrate, parts_to_convert
from trtconvert.calib.finite_calls import FiniteCalls
from trtconvert.diffusion_model import DiffusionModel, InputSpec
from trtconvert.errors import UserError
from trtconvert.recipe import AttentionSection, CalibrationSection, LayersSection


def calls_until_refused(model: DiffusionModel, folder, told: str) -> int:
    """Returns the number of calls of the denoiser in a calibration that is refused."""
    parts = parts_to_convert(model, AttentionSection(), LayersSection(min_rows=1))
    section, calls = CalibrationSection(samples=2, batch=2, steps=50), 0

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1

    model.denoiser.register_forward_hook(count)
    with pytest.raises(UserError, match=told):
        calibrate(model, section, "weights", parts.sites, folder, Quiet(), layers=parts.layers)
    return calls


def spoilt(call: int, change: Callable[[Tensor], Tensor]) -> DiffusionModel:
    """Returns the tiny model with another sampler: it changes the sample before a call."""
    tiny = tiny_models.build()

    def sample(denoiser, seeds, **named):
        calls = 0

        def changed(x: Tensor, timestep: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            return denoiser(change(x) if calls == call else x, timestep)

        return tiny.sample(changed, seeds, **named)

    return replace(tiny, sample=sample)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_sampler_that_passes_them_is_refused_before_its_call(tmp_path, value):
    model = spoilt(3, lambda x: x.index_fill(3, torch.tensor([1]), value))
    told = "called with numbers that are not finite\n.*in 'x'\n  got: 8 of 32 are NaN or Inf, at timestep"
    assert calls_until_refused(model, tmp_path, told) == 2


def test_a_module_that_makes_them_is_named_after_its_first_call(tmp_path):
    model = tiny_models.build()
    model.denoiser.qkv.bias[3] = torch.nan
    assert calls_until_refused(model, tmp_path, "NaN or Inf among the queries of denoiser at timestep") == 1


def test_a_prediction_with_them_is_refused_where_no_module_read_them(tmp_path):
    model = tiny_models.build()
    model.denoiser.out.bias[:] = torch.inf
    told = "tiny predicts numbers that are not finite\n.*\n  got: 32 of 32 are NaN or Inf, at timestep"
    assert calls_until_refused(model, tmp_path, told) == 1


def test_samples_with_them_are_refused_after_the_first_batch(tmp_path):
    tiny = tiny_models.build()
    model = replace(tiny, sample=lambda *inputs, **named: tiny.sample(*inputs, **named) * torch.nan)
    assert calls_until_refused(model, tmp_path, "samples in full precision have numbers that are not finite") == 50


def test_masks_may_have_negative_infinity():
    tiny = tiny_models.build()
    model = replace(tiny, inputs=(*tiny.inputs, InputSpec("mask", "float32", ("batch", 16))))
    refusing = FiniteCalls(lambda x, timestep, mask: x, model, lambda: None)
    x, timestep, mask = torch.zeros(2, 1, 4, 4), torch.zeros(2), torch.zeros(2, 16)
    mask[:, 3] = -torch.inf
    assert refusing(x, timestep, mask) is x
    mask[:, 4] = torch.nan
    with pytest.raises(UserError, match="in 'mask'"):
        refusing(x, timestep, mask=mask)
