"""The plugin of sums of images, without TensorRT and without a GPU; what it computes: tests/gpu."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import pytest
from plugin_driver import (
    BF16,
    HALF,
    HWC8,
    LINEAR,
    Desc,
    Dims,
    DimsExprs,
    Driver,
    array,
    check_number_of_inputs_is_refused,
    check_shapes_are_refused,
    check_types_and_formats,
    copies_read_back,
    dynamic,
)

X, Y = (2, 320, 64, 96), (2, 64, 96, 320)
FORMATS = (HWC8, LINEAR, HWC8)
"""Of x, y and the output."""
WRAPS = 1 << 32
"""Is 0 in 32 bits."""
PLUGIN = "ChannelsLastAdd"


def tensors(x: Sequence[int] = X, y: Sequence[int] = Y, kind: int = HALF) -> list[Desc]:
    """Descriptions of x, y, and of the output, which is as x."""
    return [Desc(Dims(shape), kind, form, 1.0) for shape, form in zip((x, y, x), FORMATS, strict=True)]


def of_x(b: int, c: int, h: int, w: int) -> tuple[Sequence[int], Sequence[int]]:
    """Shapes of the inputs that belong together."""
    return (b, c, h, w), (b, h, w, c)


def test_serialised_plugins_are_read_back(driver: Driver, plugin: ctypes.c_void_p) -> None:
    expected = {"serialization_version": 1}
    copies_read_back(driver, plugin, expected)


@pytest.mark.parametrize(
    ("phase", "attributes", "said"),
    [
        (0, {"axis": 1}, "expected no attributes, got 'axis'; remove it"),
        (0, {"serialization_version": 1}, "expected no attributes, got 'serialization_version'"),
        (1, {}, "expected the 1 fields that this plugin serialises, got 0; build the engine again"),
        (1, {"serialization_version": 1, "axis": 1}, "expected no attributes, got 'axis'"),
        (1, {"serialization_version": 2}, "serialization version 2, this plugin reads 1"),
    ],
)
def test_bad_attributes_are_refused_with_a_reason(driver: Driver, phase: int, attributes: dict, said: str) -> None:
    driver.messages()
    assert not driver.create(phase, **attributes)
    messages = driver.messages()
    assert said in messages and "the plugin ChannelsLastAdd of layer 'layer' was not made" in messages


def test_types_and_formats(driver: Driver, plugin: ctypes.c_void_p) -> None:
    check_types_and_formats(driver, plugin, lambda kind: tensors(kind=kind), "xy")


def test_the_output_is_as_x(driver: Driver, plugin: ctypes.c_void_p) -> None:
    kind = ctypes.c_int32(-1)
    assert driver.lib.driver_output_type(plugin, (ctypes.c_int32 * 2)(BF16, BF16), 2, ctypes.byref(kind)) == 0
    assert kind.value == BF16
    exprs, out = (DimsExprs * 2)(), DimsExprs()
    exprs[0].nb, exprs[0].d[:4] = 4, [0x10, 0x20, 0x30, 0x40]
    exprs[1].nb, exprs[1].d[:4] = 4, [0x50, 0x60, 0x70, 0x80]
    assert driver.lib.driver_output_shape(plugin, exprs, 2, ctypes.byref(out)) == 0
    assert list(out.d[: out.nb]) == [0x10, 0x20, 0x30, 0x40]
    exprs[0].nb = 3
    assert driver.lib.driver_output_shape(plugin, exprs, 2, ctypes.byref(out)) == 1
    assert "input 'x': expected 4 dimensions (batch, channels, height, width), got 3" in driver.messages()


@pytest.mark.parametrize(
    "x",
    [X, (1, 8, 1, 1), (1, 65536, 1, 1), (1 << 31, 8, 1, 1), (1, 8, 1 << 16, 1 << 15), (1 << 11, 8, 1 << 10, 1 << 10)],
    ids=str,
)
def test_shapes_that_fit(driver: Driver, plugin: ctypes.c_void_p, x: tuple) -> None:
    descs = tensors(*of_x(*x))
    assert driver.lib.driver_shape_change(plugin, array(descs), 2) == 0, driver.messages()
    assert driver.lib.driver_configure(plugin, dynamic(descs, descs), 2) == 0, driver.messages()


PIXELS = "pixels: expected 1..2^31, got"


@pytest.mark.parametrize(
    ("shapes", "said"),
    [
        (((2, 320, 6144), Y), "input 'x': expected 4 dimensions (batch, channels, height, width), got 3"),
        (((2, 320, 1, 64, 96), Y), "input 'x': expected 4 dimensions (batch, channels, height, width), got 5"),
        (((), ()), "input 'x': expected 4 dimensions (batch, channels, height, width), got 0"),
        ((X, X), "input 'y': expected shape [2, 64, 96, 320] from x, got [2, 320, 64, 96]"),
        ((X, (2, 96, 64, 320)), "input 'y': expected shape [2, 64, 96, 320] from x, got [2, 96, 64, 320]"),
        ((X, (1, 64, 96, 320)), "input 'y': expected shape [2, 64, 96, 320] from x, got [1, 64, 96, 320]"),
        ((X, (2, 64, 96, 640)), "input 'y': expected shape [2, 64, 96, 320] from x, got [2, 64, 96, 640]"),
        ((X, (2, 6144, 320)), "input 'y': expected shape [2, 64, 96, 320] from x, got [2, 6144, 320]"),
        (of_x(2, 12, 8, 8), "channels: expected 8..65536 in steps of 8, got 12"),
        (of_x(2, 65544, 8, 8), "channels: expected 8..65536 in steps of 8, got 65544"),
        (of_x(1, WRAPS + 8, 1, 1), "channels: expected 8..65536 in steps of 8, got 2147483647"),
        (of_x(2, -8, 8, 8), "channels: expected 8..65536 in steps of 8, got -8"),
        (of_x(2, 8 - WRAPS, 8, 8), "channels: expected 8..65536 in steps of 8, got -2147483648"),
        (of_x(0, 8, 8, 8), f"{PIXELS} 0"),
        (of_x(1, 8, 0, 8), f"{PIXELS} 0"),
        (of_x(1, 8, 8, 0), f"{PIXELS} 0"),
        (of_x(-1, 8, -1, 8), f"{PIXELS} 0"),
        (of_x((1 << 31) + 1, 8, 1, 1), f"{PIXELS} 2147483649"),
        (of_x(1 << 12, 8, 1 << 10, 1 << 10), f"{PIXELS} 4294967296"),
        (of_x(1, 8, WRAPS, WRAPS), PIXELS),
        (of_x(WRAPS, 8, 1, WRAPS), PIXELS),
        (of_x(4, 8, (1 << 62) + 1, 1), PIXELS),
        (of_x(1, 8, (1 << 63) - 1, (1 << 63) - 1), PIXELS),
    ],
    ids=str,
)
def test_shapes_that_do_not_fit_are_refused(driver: Driver, plugin: ctypes.c_void_p, shapes: tuple, said: str) -> None:
    check_shapes_are_refused(driver, plugin, tensors(*shapes), tensors(), 2, said)


@pytest.mark.parametrize("inputs", [1, 3])
def test_other_numbers_of_inputs_are_refused(driver: Driver, plugin: ctypes.c_void_p, inputs: int) -> None:
    said = "expected 2 inputs (x, y) and 1 output"
    check_number_of_inputs_is_refused(driver, plugin, tensors(), inputs, said)


def test_addresses_are_checked_before_the_device(driver: Driver, plugin: ctypes.c_void_p) -> None:
    descs = array(tensors(*of_x(1, 8, 1, 1)))
    memory = ctypes.create_string_buffer(256)
    start = ctypes.addressof(memory) + -ctypes.addressof(memory) % 16
    names, right = ("x", "y", "sum"), [start + 16 * i for i in range(3)]

    def refusal(of: ctypes.c_void_p, **changed: int | None) -> str:
        """What is said of these addresses of inputs and output."""
        x, y, total = (dict(zip(names, right, strict=True)) | changed).values()
        assert (
            driver.lib.driver_enqueue(of, descs, 2, (ctypes.c_void_p * 2)(x, y), (ctypes.c_void_p * 1)(total), None)
            == 1
        )
        return driver.messages()

    assert "got 0 and 1" in refusal(plugin)  # before any shapes are known
    assert driver.lib.driver_shape_change(plugin, descs, 2) == 0, driver.messages()
    attached = ctypes.c_void_p(driver.lib.driver_attach(plugin))
    for of in (plugin, attached):
        for name, place in zip(names, right, strict=True):
            said = f"{name}: expected a pointer aligned to 16 bytes, got {place + 8:#x}"
            assert said in refusal(of, **{name: place + 8})
            assert f"{name}: expected a device pointer, got null" in refusal(of, **{name: None})
