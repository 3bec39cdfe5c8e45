"""The plugin of group norms, without TensorRT and without a GPU; what it computes: tests/gpu."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import pytest
from plugin_driver import (
    BF16,
    FIELD_FLOAT64,
    FIELD_INT32,
    FIELD_INT64,
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

X, CHANNELS, SHIFT = (2, 320, 64, 96), (320,), (2, 320)
SHAPES = X, CHANNELS, CHANNELS, SHIFT
NAMES = ("x", "weight", "bias", "shift")
WRAPS = 1 << 32
"""Is 0 in 32 bits."""
PLUGIN, MADE = "GroupNorm", tuple({"groups": 32, "channels_last": last} for last in (0, 1))
"""What `driver` and `plugins` of conftest.py make."""


def tensors(*shapes: Sequence[int], kind: int = HALF, last: int = 0) -> list[Desc]:
    """Descriptions of x, weight, bias, perhaps shift, and of the output."""
    x = shapes[0]
    normed, form = ((*x[:1], *x[2:], *x[1:2]), LINEAR) if last else (x, HWC8)
    formats = (HWC8, *[LINEAR] * (len(shapes) - 1), form)
    return [Desc(Dims(shape), kind, form, 1.0) for shape, form in zip((*shapes, normed), formats, strict=True)]


def of_x(*x: int) -> tuple[Sequence[int], ...]:
    """Shapes of the inputs that belong together."""
    return x, x[1:2], x[1:2], x[:2]


@pytest.mark.parametrize("last", [0, 1])
def test_serialised_plugins_are_read_back(driver: Driver, last: int) -> None:
    driver.messages()
    made = driver.create(epsilon=0.5, groups=16, silu=1, channels_last=last)
    expected = {"serialization_version": 1, "epsilon": 0.5, "groups": 16, "silu": 1, "channels_last": last}
    copies = copies_read_back(driver, made, expected)
    together, other = (
        dynamic(descs, descs) for descs in (tensors(*SHAPES, last=last), tensors(*SHAPES, last=1 - last))
    )
    fits, fits_not = array(tensors(*of_x(1, 16, 1, 1))), array(tensors(*of_x(1, 24, 1, 1)))
    for plugin in copies:  # copies act by their attributes
        assert driver.lib.driver_supports(plugin, 4, together, 4)
        assert not driver.lib.driver_supports(plugin, 4, other, 4)
        assert driver.lib.driver_shape_change(plugin, fits, 4) == 0, driver.messages()
        assert driver.lib.driver_shape_change(plugin, fits_not, 4) == 1


def test_attributes_that_may_be_left_out(driver: Driver) -> None:
    expected = {"serialization_version": 1, "groups": 32, "silu": 0, "channels_last": 0}
    assert driver.serialised(driver.create(groups=32)) == expected | {"epsilon": pytest.approx(1e-5)}
    wide = driver.create(
        groups=(FIELD_INT64, 1, ctypes.c_int64(32)),
        epsilon=(FIELD_FLOAT64, 1, ctypes.c_double(0.25)),
    )
    assert driver.serialised(wide) == expected | {"epsilon": 0.25}


KEPT = {"serialization_version": 1, "epsilon": 1e-5, "groups": 32, "silu": 0, "channels_last": 0}


@pytest.mark.parametrize(
    ("phase", "attributes", "said"),
    [
        (0, {}, "expected the attribute groups, got none"),
        (0, {"epsilon": 1e-5, "silu": 1, "channels_last": 1}, "expected the attribute groups, got none"),
        (0, {"groups": 0}, "attribute 'groups': expected a number from 1 to 2^31 - 1, got 0"),
        (0, {"groups": -1}, "attribute 'groups': expected a number from 1 to 2^31 - 1, got -1"),
        (0, {"groups": (FIELD_INT64, 1, ctypes.c_int64(WRAPS + 32))}, "from 1 to 2^31 - 1, got 4294967328"),
        (0, {"groups": (FIELD_INT64, 1, ctypes.c_int64(32 - WRAPS))}, "from 1 to 2^31 - 1, got -4294967264"),
        (0, {"groups": 32.0}, "attribute 'groups': expected one integer"),
        (0, {"groups": (FIELD_INT32, 2, (ctypes.c_int32 * 2)(32, 32))}, "attribute 'groups': expected one integer"),
        (0, {"groups": 32, "silu": 2}, "attribute 'silu': expected 0 or 1, got 2"),
        (0, {"groups": 32, "channels_last": -1}, "attribute 'channels_last': expected 0 or 1, got -1"),
        (0, {"groups": 32, "epsilon": -1e-5}, "expected a finite number from 0"),
        (0, {"groups": 32, "epsilon": float("nan")}, "got nan"),
        (
            0,
            {"groups": 32, "num_groups": 32},
            "expected one of the attributes epsilon, groups, silu and channels_last, got 'num_groups'; remove it",
        ),
        (0, KEPT, "got 'serialization_version'"),
        (1, {}, "expected the 5 fields that this plugin serialises, got 0; build the engine again"),
        *[
            (1, {name: KEPT[name] for name in KEPT if name != missing}, "expected the 5 fields that this plugin")
            for missing in KEPT
        ],
        (1, KEPT | {"groups": 0}, "attribute 'groups': expected a number from 1 to 2^31 - 1, got 0"),
        (1, KEPT | {"axis": 1}, "expected one of the attributes epsilon, groups, silu and channels_last, got 'axis'"),
        (1, KEPT | {"serialization_version": 2}, "serialization version 2, this plugin reads 1"),
    ],
)
def test_bad_attributes_are_refused_with_a_reason(driver: Driver, phase: int, attributes: dict, said: str) -> None:
    driver.messages()
    assert not driver.create(phase, **attributes)
    messages = driver.messages()
    assert said in messages and "the plugin GroupNorm of layer 'layer' was not made" in messages


@pytest.mark.parametrize("inputs", [3, 4])
@pytest.mark.parametrize("last", [0, 1])
def test_types_and_formats(driver: Driver, plugins: list[ctypes.c_void_p], last: int, inputs: int) -> None:
    check_types_and_formats(
        driver, plugins[last], lambda kind: tensors(*SHAPES[:inputs], kind=kind, last=last), NAMES[:inputs]
    )


@pytest.mark.parametrize("inputs", [3, 4])
@pytest.mark.parametrize("last", [0, 1])
def test_the_output_is_as_x_or_has_its_channels_last(
    driver: Driver, plugins: list[ctypes.c_void_p], last: int, inputs: int
) -> None:
    plugin, kind = plugins[last], ctypes.c_int32(-1)
    types = (ctypes.c_int32 * inputs)(*[BF16] * inputs)
    assert driver.lib.driver_output_type(plugin, types, inputs, ctypes.byref(kind)) == 0
    assert kind.value == BF16
    exprs, out = (DimsExprs * inputs)(), DimsExprs()
    exprs[0].nb, exprs[0].d[:5] = 4, [0x10, 0x20, 0x30, 0x40, 0x50]
    assert driver.lib.driver_output_shape(plugin, exprs, inputs, ctypes.byref(out)) == 0
    assert list(out.d[: out.nb]) == ([0x10, 0x30, 0x40, 0x20] if last else [0x10, 0x20, 0x30, 0x40])
    for rank in (0, 3, 5):
        exprs[0].nb = rank
        assert driver.lib.driver_output_shape(plugin, exprs, inputs, ctypes.byref(out)) == 1
        said = "input 'x': expected 4 dimensions (batch, channels, height, width), got"
        assert f"{said} {rank}" in driver.messages()


@pytest.mark.parametrize("inputs", [3, 4])
@pytest.mark.parametrize("last", [0, 1])
@pytest.mark.parametrize(
    "x",
    [
        X,
        (1, 32, 1, 1),
        (65535, 32, 1, 1),
        (2, 4096, 8, 8),
        (1, 320, 1 << 24, 1),
        (1, 320, 1, 1 << 24),
        (1, 320, 4096, 4096),
    ],
    ids=str,
)
def test_shapes_that_fit(driver: Driver, plugins: list[ctypes.c_void_p], x: tuple, last: int, inputs: int) -> None:
    descs = tensors(*of_x(*x)[:inputs], last=last)
    assert driver.lib.driver_shape_change(plugins[last], array(descs), inputs) == 0, driver.messages()
    assert driver.lib.driver_configure(plugins[last], dynamic(descs, descs), inputs) == 0, driver.messages()


PIXELS = "pixels: expected 1..2^24, got"


@pytest.mark.parametrize(
    ("shapes", "said"),
    [
        (((2, 320, 6144), CHANNELS, CHANNELS), "expected 4 dimensions (batch, channels, height, width), got 3"),
        (((2, 320, 1, 64, 96), *SHAPES[1:]), "expected 4 dimensions (batch, channels, height, width), got 5"),
        (((), CHANNELS, CHANNELS), "input 'x': expected 4 dimensions (batch, channels, height, width), got 0"),
        ((X, (640,), CHANNELS), "input 'weight': expected shape [320] from x, got [640]"),
        ((X, (96,), (96,)), "input 'weight': expected shape [320] from x, got [96]"),
        ((X, (1, 320), CHANNELS, SHIFT), "input 'weight': expected shape [320] from x, got [1, 320]"),
        ((X, CHANNELS, (32,), SHIFT), "input 'bias': expected shape [320] from x, got [32]"),
        ((X, CHANNELS, CHANNELS, (1, 320)), "input 'shift': expected shape [2, 320] from x, got [1, 320]"),
        ((X, CHANNELS, CHANNELS, (2, 640)), "input 'shift': expected shape [2, 320] from x, got [2, 640]"),
        ((X, CHANNELS, CHANNELS, (2, 320, 1, 1)), "input 'shift': expected shape [2, 320] from x, got [2, 320, 1, 1]"),
        ((X, CHANNELS, CHANNELS, CHANNELS), "input 'shift': expected shape [2, 320] from x, got [320]"),
        (of_x(2, 36, 8, 8), "channels: expected 8..4096 in steps of 8, got 36"),
        (of_x(2, 4128, 8, 8), "channels: expected 8..4096 in steps of 8, got 4128"),
        (of_x(1, WRAPS + 32, 1, 1), "channels: expected 8..4096 in steps of 8, got 2147483647"),
        (of_x(2, -32, 8, 8), "channels: expected 8..4096 in steps of 8, got -32"),
        (of_x(2, 32 - WRAPS, 8, 8), "channels: expected 8..4096 in steps of 8, got -2147483648"),
        (of_x(2, 0, 8, 8), "channels: expected 8..4096 in steps of 8, got 0"),
        (of_x(2, 328, 8, 8), "groups: expected a divisor of 328 channels, got 32"),
        (of_x(2, 16, 8, 8), "groups: expected a divisor of 16 channels, got 32"),
        (of_x(0, 320, 8, 8), "batch: expected 1..65535, got 0"),
        (of_x(-1, 320, 8, 8), "batch: expected 1..65535, got -1"),
        (of_x(65536, 320, 8, 8), "batch: expected 1..65535, got 65536"),
        (of_x(WRAPS + 1, 320, 8, 8), "batch: expected 1..65535, got 4294967297"),
        (of_x(1, 320, 0, 8), f"{PIXELS} 0"),
        (of_x(1, 320, 8, 0), f"{PIXELS} 0"),
        (of_x(1, 320, -1, -8), f"{PIXELS} 0"),
        (of_x(1, 320, 8, -1), f"{PIXELS} 0"),
        (of_x(1, 320, 1, (1 << 24) + 1), f"{PIXELS} 16777217"),
        (of_x(1, 320, (1 << 24) + 1, 1), f"{PIXELS} 16777217"),
        (of_x(1, 320, 4096, 4097), f"{PIXELS} 16781312"),
        (of_x(1, 320, 1 << 16, 1 << 16), f"{PIXELS} 4294967296"),
        (of_x(1, 320, WRAPS, WRAPS), PIXELS),
        (of_x(1, 320, WRAPS, 1 << 33), PIXELS),
        (of_x(1, 320, (1 << 62) + 1, 4), PIXELS),
        (of_x(1, 320, 4, (1 << 62) + 1), PIXELS),
        (of_x(1, 320, (1 << 63) - 1, (1 << 63) - 1), PIXELS),
    ],
    ids=str,
)
def test_shapes_that_do_not_fit_are_refused(driver: Driver, plugin: ctypes.c_void_p, shapes: tuple, said: str) -> None:
    inputs = len(shapes)
    check_shapes_are_refused(driver, plugin, tensors(*shapes), tensors(*SHAPES[:inputs]), inputs, said)


@pytest.mark.parametrize("inputs", [2, 5])
def test_other_numbers_of_inputs_are_refused(driver: Driver, plugin: ctypes.c_void_p, inputs: int) -> None:
    said = "expected 3 or 4 inputs (x, weight, bias, and perhaps shift) and 1 output"
    check_number_of_inputs_is_refused(driver, plugin, tensors(*SHAPES), inputs, said)


def test_addresses_are_checked_before_the_device(driver: Driver, plugin: ctypes.c_void_p) -> None:
    descs = array(tensors(*of_x(1, 32, 1, 1)))
    memory = ctypes.create_string_buffer(512)
    start = ctypes.addressof(memory) + -ctypes.addressof(memory) % 16
    names, right = (*NAMES, "normed"), [start + 64 * i for i in range(5)]

    def refusal(of: ctypes.c_void_p, inputs: int, **changed: int | None) -> str:
        """What is said of these addresses of inputs and output."""
        *given, normed = (dict(zip(names, right, strict=True)) | changed).values()
        pointers = (ctypes.c_void_p * 4)(*given)  # of more than there are inputs, to see that the rest is left alone
        assert driver.lib.driver_enqueue(of, descs, inputs, pointers, (ctypes.c_void_p * 1)(normed), None) == 1
        return driver.messages()

    assert "got 0 and 1" in refusal(plugin, 4)  # before any shapes are known
    assert driver.lib.driver_shape_change(plugin, descs, 4) == 0, driver.messages()
    attached = ctypes.c_void_p(driver.lib.driver_attach(plugin))
    for of in (plugin, attached):
        for name, place in zip(names, right, strict=True):
            said = f"{name}: expected a pointer aligned to 16 bytes, got {place + 8:#x}"
            assert said in refusal(of, 4, **{name: place + 8})
        for name in ("x", "weight", "bias", "normed"):
            assert f"{name}: expected a device pointer, got null" in refusal(of, 4, **{name: None})
    without = array(tensors(*of_x(1, 32, 1, 1)[:3]))
    assert driver.lib.driver_shape_change(plugin, without, 3) == 0, driver.messages()
    said = f"normed: expected a pointer aligned to 16 bytes, got {right[4] + 8:#x}"
    assert said in refusal(plugin, 3, shift=right[3] + 8, normed=right[4] + 8)
