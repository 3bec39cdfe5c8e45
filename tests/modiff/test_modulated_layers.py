"""Single modulated layers: caches, resets, bounded errors, and refusals."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from tolerances import SAME_ARITHMETIC
from torch import Tensor, nn
from torch.nn import functional as F

from trtconvert.errors import UserError
from trtconvert.modiff import ModulatedConv2d, ModulatedLinear, Settings, State
from trtconvert.modiff.reference import quantiser

DYNAMIC = Settings(scales="dynamic", activation_bits=4)


def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(64, 48).requires_grad_(False)


def conv() -> nn.Conv2d:
    torch.manual_seed(1)
    return nn.Conv2d(32, 24, 3, stride=2, padding=1).requires_grad_(False)


def walk(shape: tuple[int, ...], steps: int, change: float = 0.05) -> list[Tensor]:
    """Inputs with small deltas between steps."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(shape, generator=generator) + 0.5
    found = [x]
    for _ in range(steps - 1):
        found.append(found[-1] + change * torch.randn(shape, generator=generator))
    return found


def relative(y: Tensor, wanted: Tensor) -> float:
    return float((y - wanted).norm() / wanted.norm())


SETTINGS = [
    DYNAMIC,
    dataclasses.replace(DYNAMIC, symmetric=False),
    dataclasses.replace(DYNAMIC, granularity="sample", weight_bits=4),
    dataclasses.replace(DYNAMIC, granularity="token", weight_bits=4, weight_symmetric=False, activation_bits=3),
    dataclasses.replace(DYNAMIC, weight_granularity="tensor", activation_bits=8, shared_outputs=False),
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("kind", ["linear", "conv"])
def test_caches_are_the_input_and_its_product(kind, settings):
    """ô is the product of Ŵ and â after any number of steps, and â is within a quantisation step of a."""
    layer = ModulatedLinear.of(linear(), settings) if kind == "linear" else ModulatedConv2d.of(conv(), settings)
    inputs = walk((3, 7, 64), 30) if kind == "linear" else walk((3, 32, 9, 8), 30)
    state, errors = None, []
    for x in inputs:
        y, state = layer(x, state)
        assert state is not None
        known = state.a_hat if kind == "linear" else state.a_hat.permute(0, 3, 1, 2)
        wanted = (
            F.linear(known, layer.weight, layer.bias)
            if kind == "linear"
            else F.conv2d(known, layer.weight, layer.bias, 2, 1)
        )
        assert y.shape == wanted.shape and relative(y, wanted) < SAME_ARITHMETIC
        errors.append(relative(known, x))
    assert max(errors[20:]) < 1.5 * max(errors[1:10]) < 0.15


def test_constant_inputs_are_exact_after_some_steps():
    layer, x = ModulatedLinear.of(linear(), DYNAMIC), walk((2, 5, 64), 1)[0]
    state, errors = None, []
    for _ in range(6):
        y, state = layer(x, state)
        errors.append(relative(y, F.linear(x, layer.weight, layer.bias)))
    assert errors[0] > 1e-3 and errors[-1] < 1e-5 and errors == sorted(errors, reverse=True)


def test_samples_that_begin_at_different_times():
    """A mask gives the same as steps of each sample alone."""
    layer = ModulatedConv2d.of(conv(), dataclasses.replace(DYNAMIC, granularity="sample"))
    inputs = walk((2, 32, 8, 8), 5)
    alone: list[Tensor] = []
    state = None
    for x in inputs[2:]:  # the second sample is reset in the third step
        y, state = layer(x[1:], state)
        alone.append(y)
    state = None
    for step, x in enumerate(inputs):
        spoilt = state if step != 2 or state is None else State(state.a_hat.clone(), state.o_hat.clone())
        if step == 2 and spoilt is not None:
            spoilt.a_hat[1], spoilt.o_hat[1] = torch.nan, torch.nan  # unread caches may hold anything
        y, state = layer(x, spoilt, reset=torch.tensor([step == 0, step in (0, 2)]))
        assert y.isfinite().all()
        if step >= 2:
            torch.testing.assert_close(y[1:], alone[step - 2], rtol=1e-5, atol=1e-5)


def test_tables_are_read_by_timestep_bin():
    one = torch.ones(1)
    bins = [quantiser(-one * reach, one * reach, 4, True, False)[0] for reach in (0.1, 10.0)]
    table = torch.stack([*bins, quantiser(-one * 4, one * 4, 8, True, True)[0]])
    layer = ModulatedLinear.of(linear(), Settings(activation_bits=4, bins=2), table=table[None])
    x = walk((2, 5, 64), 2)
    _, state = layer(x[0])
    _, after = layer(x[1], state, timestep_bin=torch.tensor([0, 1]))
    assert state is not None and after is not None
    fine, coarse = (after.a_hat - x[1]).flatten(1).norm(dim=1)
    assert float(coarse) > 2 * float(fine)


def test_without_modulation_every_step_is_by_itself():
    layer = ModulatedLinear.of(linear(), dataclasses.replace(DYNAMIC, modulation=False, activation_bits=8))
    x = walk((2, 5, 64), 2)
    y, state = layer(x[1])
    assert state is None and torch.equal(y, layer(x[1], None)[0])
    assert 1e-3 < relative(y, F.linear(x[1], layer.weight, layer.bias)) < 0.02


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_types_of_models_are_those_of_outputs(dtype):
    layer = ModulatedLinear.of(linear(), DYNAMIC).to(dtype)
    assert layer.scale.dtype == layer.table.dtype == torch.float32 and layer.codes.dtype == torch.int8
    y, state = layer(walk((2, 5, 64), 1)[0].to(dtype))
    assert state is not None and y.dtype == dtype
    assert state.o_hat.dtype == (torch.float16 if dtype == torch.float16 else torch.float32)


def test_inputs_of_two_parts_have_scales_of_their_own():
    full = linear()
    x = torch.cat([torch.randn(4, 6, 24), 50 * torch.randn(4, 6, 40)], 2)
    with torch.no_grad():
        full.weight[:, :24] *= 50
    errors = [
        relative(ModulatedLinear.of(full, dataclasses.replace(DYNAMIC, first_bits=6), widths=widths)(x)[0], full(x))
        for widths in ((64,), (24, 40))
    ]
    assert errors[1] < errors[0] / 4


def test_other_layers_and_parts_are_refused():
    reflected, same = nn.Conv2d(8, 8, 3, padding_mode="reflect"), nn.Conv2d(8, 8, 3, padding="same")
    for layer in (nn.Conv2d(8, 8, 3, groups=2), reflected, same, nn.Conv1d(8, 8, 3)):
        with pytest.raises(UserError, match="cannot be modulated"):
            ModulatedConv2d.of(layer)
    with pytest.raises(UserError, match="whose sum is 64"):
        ModulatedLinear.of(linear(), DYNAMIC, widths=(60, 5))
    with pytest.raises(UserError, match="has no calibration"):
        ModulatedLinear.of(linear(), Settings())


def test_caches_of_another_shape_are_refused():
    layer = ModulatedLinear.of(linear(), DYNAMIC)
    _, state = layer(torch.randn(2, 5, 64))
    with pytest.raises(UserError, match=r"\[3, 5, 64\].*\n.*\[2, 5, 64\]"):
        layer(torch.randn(3, 5, 64), state)


@pytest.mark.parametrize(
    "given",
    [
        {"weight_bits": 5}, {"activation_bits": 2}, {"first_bits": 9}, {"granularity": "row"}, {"bins": 0}, {"include": "x"},
        {"weight_symmetric": False}, {"granularity": "token"}, {"cache_dtype": "bfloat16"}, {"scales": "static"},
    ],
    ids=str,
)  # fmt: skip
def test_settings_that_there_are_not_are_refused(given):
    with pytest.raises(UserError, match="remedy"):
        Settings(**given)
