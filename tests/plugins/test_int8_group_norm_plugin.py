"""The plugin of group norms that give INT8, without TensorRT and without a GPU; what it computes: tests/gpu."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence

import pytest
from plugin_driver import (
    BF16,
    FLOAT,
    HALF,
    HWC8,
    INT32,
    LINEAR,
    Desc,
    Dims,
    DimsExprs,
    Driver,
    array,
    check_shapes_are_refused,
    copies_read_back,
    dynamic,
)

X, CHANNELS, TIMESTEP, BINS = (4, 320, 32, 48), (320,), (2,), (16,)
SHAPES = (X, CHANNELS, CHANNELS, (4, 320), CHANNELS, TIMESTEP, BINS)
NAMES = ("x", "weight", "bias", "shift", "factor", "timestep", "x_scale")
KINDS = (*[HALF] * 4, *[FLOAT] * 3)
GIVEN = {"groups": 32, "silu": 1, "shift": 1, "factor": 1, "timestep": 1}
DEFAULTS = {"epsilon": pytest.approx(1e-5), "silu": 0, "timestep_max": 1000.0, "shift": 0, "factor": 0, "timestep": 0}
ENGINE = DEFAULTS | {"groups": 8, "epsilon": 1e-5}
PLUGIN, MADE = "Int8GroupNorm", (GIVEN,)
"""What `driver` and `plugins` of conftest.py make."""


def tensors(*shapes: Sequence[int], kind: int = HALF) -> list[Desc]:
    """Descriptions of the inputs and of the outputs; `kind` of those in 16 bits."""
    batch, channels, height, width = (*shapes[0], 0, 0, 0, 0)[:4]
    kinds = [kind if of == HALF else of for of in KINDS]
    inputs = [(shape, of, HWC8 if i == 0 else LINEAR) for i, (shape, of) in enumerate(zip(shapes, kinds, strict=True))]
    payload = ((batch, height, width, channels // 4), INT32, LINEAR)
    return [Desc(Dims(shape), of, form, 1.0) for shape, of, form in (*inputs, payload, ((batch, 8), INT32, LINEAR))]


def test_attributes_are_serialised_and_read_back(driver: Driver) -> None:
    driver.messages()
    given = DEFAULTS | GIVEN | {"epsilon": 0.5, "timestep_max": 500.0}
    for copy in copies_read_back(driver, driver.create(**given), {"serialization_version": 2} | given):
        assert driver.lib.driver_shape_change(copy, array(tensors(*SHAPES)), 7) == 0, driver.messages()
    assert driver.serialised(driver.create(groups=8)) == {"serialization_version": 2, "groups": 8} | DEFAULTS


@pytest.mark.parametrize(
    ("phase", "attributes", "said"),
    [
        (0, {}, "expected the attribute groups, got none"),
        (0, {"groups": 0}, "attribute 'groups': expected a number from 1 to 2^31 - 1, got 0"),
        (0, {"groups": 8, "factor": 2}, "attribute 'factor': expected 0 or 1, got 2"),
        (0, {"groups": 8, "offset": 0}, "factor and timestep, got 'offset'; remove it"),
        (1, {"groups": 8}, "expected the 8 fields that this plugin serialises, got 1"),
        (1, ENGINE | {"serialization_version": 1}, "serialization version 1, this plugin reads 2"),
    ],
)
def test_bad_attributes_are_refused_with_a_reason(driver: Driver, phase: int, attributes: dict, said: str) -> None:
    driver.messages()
    assert not driver.create(phase, **attributes)
    messages = driver.messages()
    assert said in messages and "the plugin Int8GroupNorm of layer 'layer' was not made" in messages


def test_types_and_formats(driver: Driver, plugin: ctypes.c_void_p) -> None:
    for position, name in enumerate((*NAMES, "payload", "marks")):
        for kind, form in itertools.product((HALF, BF16, INT32, FLOAT), (LINEAR, HWC8)):
            descs = tensors(*SHAPES)
            wanted, in_form = descs[position].type, descs[position].format
            right = form == in_form and (kind == wanted or (position == 0 and kind == BF16))
            descs[position].type, descs[position].format = kind, form
            assert driver.lib.driver_supports(plugin, position, dynamic(descs, descs), 7) == right
            if position < 7 and not right:
                assert driver.lib.driver_shape_change(plugin, array(descs), 7) == 1
                said = f"input '{name}': expected {'HWC8' if in_form == HWC8 else 'linear'} format and"
                assert said in driver.messages() or kind == BF16  # of x: the others are not as it then


def test_outputs_are_four_channels_in_an_integer_and_marks_of_images(driver: Driver, plugin: ctypes.c_void_p) -> None:
    kinds, exprs, out = (ctypes.c_int32 * 2)(), (DimsExprs * 7)(), (DimsExprs * 2)()
    assert driver.lib.driver_output_type(plugin, (ctypes.c_int32 * 7)(*[BF16] * 4), 7, kinds) == 0
    assert list(kinds) == [INT32, INT32]
    exprs[0].nb, exprs[0].d[:4] = 4, [100, 320, 33, 48]
    assert driver.lib.driver_output_shape(plugin, exprs, 7, out) == 0
    assert [list(of.d[: of.nb]) for of in out] == [[100, 33, 48, 80], [100, 8]]
    exprs[0].nb = 3
    assert driver.lib.driver_output_shape(plugin, exprs, 7, out) == 1
    assert "input 'x': expected 4 dimensions" in driver.messages()


@pytest.mark.parametrize(
    ("at", "shape", "said"),
    [
        (0, (4, 320, 32), "input 'x': expected 4 dimensions (batch, channels, height, width), got 3"),
        (3, (1, 320), "input 'shift': expected shape [4, 320] from x and the tables, got [1, 320]"),
        (4, (640,), "input 'factor': expected shape [320] from x and the tables, got [640]"),
        (5, (3,), "rows: expected as many of each of 3 samples, got 4 in all"),
        (6, (2, 8), "input 'x_scale': expected shape [2] from x and the tables, got [2, 8]"),
    ],
    ids=str,
)
def test_shapes_that_do_not_fit_are_refused(
    driver: Driver, plugin: ctypes.c_void_p, at: int, shape: tuple[int, ...], said: str
) -> None:
    shapes = (*SHAPES[:at], shape, *SHAPES[at + 1 :])
    check_shapes_are_refused(driver, plugin, tensors(*shapes), tensors(*SHAPES), 7, said)


def test_without_what_may_be_left_out(driver: Driver) -> None:
    made = driver.create(groups=32)
    descs = [tensors(*SHAPES)[i] for i in (0, 1, 2, 6, 7, 8)]
    descs[3].dims = Dims((1,))
    assert driver.lib.driver_shape_change(made, array(descs), 4) == 0, driver.messages()
    assert driver.lib.driver_shape_change(made, array(tensors(*SHAPES)), 7) == 1
    assert (
        "expected 4 inputs (x, weight, bias, x_scale) and 2 outputs (payload, marks), got 7 and 2" in driver.messages()
    )
    driver.lib.driver_destroy(made)
