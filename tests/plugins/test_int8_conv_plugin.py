"""The plugin of INT8 convolutions, without TensorRT and without a GPU; what it computes: tests/gpu."""

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

X, MARKS, WEIGHT, OUT, TIMESTEP, BINS = (4, 32, 48, 80), (4, 8), (640, 3, 3, 80), (640,), (2,), (16,)
Y = (4, 640, 16, 24)
SHAPES = (X, MARKS, WEIGHT, OUT, OUT, Y, TIMESTEP, BINS)
NAMES = ("x", "marks", "weight", "weight_scale", "bias", "residual", "timestep", "x_scale")
KINDS = (INT32, INT32, INT32, FLOAT, FLOAT, HALF, FLOAT, FLOAT)
GIVEN = {"stride_y": 2, "stride_x": 2, "pad_y": 1, "pad_x": 1, "bias": 1, "residual": 1, "timestep": 1}
DEFAULTS = {
    "stride_y": 1, "stride_x": 1, "pad_y": 0, "pad_x": 0, "bias": 0, "residual": 0, "timestep": 0, "bfloat16": 0,
    "timestep_max": 1000.0,
}  # fmt: skip
PLUGIN, MADE = "Int8Conv", (GIVEN,)
"""What `driver` and `plugins` of conftest.py make."""


def tensors(*shapes: Sequence[int], kind: int = HALF, y: Sequence[int] = Y) -> list[Desc]:
    """Descriptions of all inputs, and of the output; `kind` of those in 16 bits."""
    kinds = [kind if of == HALF else of for of in KINDS]
    inputs = [(shape, of, HWC8 if of == kind else LINEAR) for shape, of in zip(shapes, kinds, strict=True)]
    return [Desc(Dims(shape), of, form, 1.0) for shape, of, form in (*inputs, (y, kind, HWC8))]


def test_attributes_are_serialised_and_read_back(driver: Driver) -> None:
    driver.messages()
    given = DEFAULTS | GIVEN | {"bfloat16": 1, "timestep_max": 500.0}
    for copy in copies_read_back(driver, driver.create(**given), {"serialization_version": 2} | given):
        assert driver.lib.driver_shape_change(copy, array(tensors(*SHAPES, kind=BF16)), 8) == 0, driver.messages()
        assert driver.lib.driver_shape_change(copy, array(tensors(*SHAPES)), 8) == 1
        assert "input 'residual': expected HWC8 format and BF16; got format 2 and type 1" in driver.messages()
    assert driver.serialised(driver.create()) == {"serialization_version": 2} | DEFAULTS


@pytest.mark.parametrize(
    ("phase", "attributes", "said"),
    [
        (0, {"stride_y": 0}, "attribute 'stride_y': expected 1 to 8, got 0"),
        (0, {"stride_x": 9}, "attribute 'stride_x': expected 1 to 8, got 9"),
        (0, {"pad_y": -1}, "attribute 'pad_y': expected 0 to 14, got -1"),
        (0, {"pad_x": 15}, "attribute 'pad_x': expected 0 to 14, got 15"),
        (0, {"residual": 2}, "attribute 'residual': expected 0 or 1, got 2"),
        (0, {"timestep_max": 0.0}, "attribute 'timestep_max': expected"),
        (0, {"groups": 1}, "bfloat16 and timestep_max, got 'groups'; remove it"),
        (1, {}, "expected the 10 fields that this plugin serialises, got 0"),
        (1, DEFAULTS | {"serialization_version": 1}, "serialization version 1, this plugin reads 2"),
    ],
)
def test_bad_attributes_are_refused_with_a_reason(driver: Driver, phase: int, attributes: dict, said: str) -> None:
    driver.messages()
    assert not driver.create(phase, **attributes)
    messages = driver.messages()
    assert said in messages and "the plugin Int8Conv of layer 'layer' was not made" in messages


def test_types_and_formats(driver: Driver, plugin: ctypes.c_void_p) -> None:
    for position, name in enumerate((*NAMES, "y")):
        for kind, form in itertools.product((HALF, BF16, INT32, FLOAT), (LINEAR, HWC8)):
            descs = tensors(*SHAPES)
            right = (kind, form) == (descs[position].type, descs[position].format)
            wanted = "HWC8" if descs[position].format == HWC8 else "linear"
            descs[position].type, descs[position].format = kind, form
            assert driver.lib.driver_supports(plugin, position, dynamic(descs, descs), 8) == right
            if position < 8 and not right:
                assert driver.lib.driver_shape_change(plugin, array(descs), 8) == 1
                assert f"input '{name}': expected {wanted} format and" in driver.messages()


def test_the_output_has_the_size_that_is_left(driver: Driver, plugin: ctypes.c_void_p) -> None:
    kind, exprs, out = ctypes.c_int32(-1), (DimsExprs * 8)(), DimsExprs()
    assert driver.lib.driver_output_type(plugin, (ctypes.c_int32 * 8)(*KINDS), 8, ctypes.byref(kind)) == 0
    assert kind.value == HALF
    exprs[0].nb, exprs[0].d[:4] = 4, [100, 33, 48, 80]
    exprs[2].nb, exprs[2].d[:4] = 4, [640, 3, 4, 80]
    assert driver.lib.driver_output_shape(plugin, exprs, 8, ctypes.byref(out)) == 0
    assert list(out.d[: out.nb]) == [100, 640, 17, 24]
    exprs[2].nb = 2
    assert driver.lib.driver_output_shape(plugin, exprs, 8, ctypes.byref(out)) == 1
    assert "expected x and weight of 4 dimensions, got 4 and 2" in driver.messages()


@pytest.mark.parametrize(
    ("attributes", "inputs"),
    [({}, 5), ({"bias": 1}, 6), ({"residual": 1}, 6), ({"timestep": 1}, 6), (GIVEN, 8)],
    ids=str,
)
def test_inputs_that_may_be_left_out(driver: Driver, attributes: dict, inputs: int) -> None:
    made = driver.create(**GIVEN | {"bias": 0, "residual": 0, "timestep": 0} | attributes)
    given = dict(zip(NAMES, tensors(*SHAPES), strict=False))
    for name in ("bias", "residual", "timestep"):
        if not attributes.get(name):
            del given[name]
    if not attributes.get("timestep"):
        given["x_scale"].dims = Dims((1,))
    descs = [*given.values(), tensors(*SHAPES)[-1]]
    assert len(given) == inputs
    assert driver.lib.driver_shape_change(made, array(descs), inputs) == 0, driver.messages()
    assert driver.lib.driver_shape_change(made, array(descs), inputs - 1) == 1
    assert f"expected {inputs} inputs ({', '.join(given)}) and 1 output, got {inputs - 1} and 1" in driver.messages()
    driver.lib.driver_destroy(made)


def changed(**shapes: Sequence[int]) -> tuple[Sequence[int], ...]:
    return tuple((dict(zip(NAMES, SHAPES, strict=True)) | shapes).values())


@pytest.mark.parametrize(
    ("shapes", "said"),
    [
        (changed(x=(4, 32, 48, 40)), "input 'x': expected shape [4, 32, 48, 80] from x, weight and the tables, got"),
        (changed(x=(4, 32, 48)), "input 'x': expected 4 dimensions, got shape [4, 32, 48]"),
        (changed(weight=(640, 3, 80)), "input 'weight': expected 4 dimensions, got shape [640, 3, 80]"),
        (changed(marks=(4, 32)), "input 'marks': expected shape [4, 8] from x, weight and the tables, got [4, 32]"),
        (changed(weight_scale=(320,)), "input 'weight_scale': expected shape [640] from x, weight and the tables"),
        (changed(bias=(1, 640)), "input 'bias': expected shape [640] from x, weight and the tables, got [1, 640]"),
        (changed(residual=(4, 640, 32, 48)), "input 'residual': expected shape [4, 640, 16, 24] from x, weight"),
        (changed(timestep=(3,)), "rows: expected as many of each of 3 samples, got 4 in all"),
        (changed(weight=(640, 3, 3, 6), x=(4, 32, 48, 6)), "in_channels: expected 16..16384 in steps of 16, got 24"),
        (changed(weight=(640, 16, 3, 80), residual=(4, 640, 10, 24)), "kernel_h: expected 1..15, got 16"),
        (
            changed(weight=(640, 1, 3, 80), residual=(4, 640, 17, 24)),
            "pad_y: expected 0 or more, and less than the kernel, got 1",
        ),
        (
            changed(x=(4, 1 << 40, 48, 80), residual=(4, 640, (1 << 39), 24)),
            "height: expected 1..16384, got 2147483647",
        ),
        (
            changed(x=(1 << 20, 32, 48, 80), marks=(1 << 20, 8), residual=(1 << 20, 640, 16, 24)),
            "batch: expected 1..65536, got 1048576",
        ),
    ],
    ids=str,
)
def test_shapes_that_do_not_fit_are_refused(
    driver: Driver, plugin: ctypes.c_void_p, shapes: tuple[Sequence[int], ...], said: str
) -> None:
    check_shapes_are_refused(driver, plugin, tensors(*shapes), tensors(*SHAPES), 8, said)


def test_addresses_are_checked_before_the_device(driver: Driver, plugin: ctypes.c_void_p) -> None:
    descs = array(tensors(*SHAPES))
    memory = ctypes.create_string_buffer(2048)
    start = ctypes.addressof(memory) + -ctypes.addressof(memory) % 16
    right = [start + 128 * i for i in range(9)]
    assert driver.lib.driver_shape_change(plugin, descs, 8) == 0, driver.messages()
    for position, name in enumerate((*NAMES[:6], None, None, "y")):
        if name is None:
            continue
        for wrong, said in ((right[position] + 8, "aligned to 16 bytes"), (None, "got null")):
            places = [*right[:position], wrong, *right[position + 1 :]]
            pointers, out = (ctypes.c_void_p * 8)(*places[:8]), (ctypes.c_void_p * 1)(places[8])
            if wrong is None and name in ("bias", "residual"):
                continue  # the C API takes none
            assert driver.lib.driver_enqueue(plugin, descs, 8, pointers, out, None) == 1
            message = driver.messages()
            assert f"{name}: expected a" in message and said in message
