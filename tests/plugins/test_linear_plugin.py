"""The plugin of linear layers, without TensorRT and without a GPU; what it computes: tests/gpu."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import pytest
from plugin_driver import (
    BF16,
    FIELD_INT64,
    HALF,
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

X, WEIGHT, BIAS = (2, 1024, 1280), (320, 1280), (320,)
SHAPES = (X, WEIGHT, BIAS), (X, (2, *WEIGHT), (2, *BIAS))
"""Of a linear layer, and of GEGLU."""
WRAPS = 1 << 32
"""Is 0 in 32 bits."""
PLUGIN, MADE = "Linear", ({"geglu": 0}, {"geglu": 1})
"""What `driver` and `plugins` of conftest.py make."""


def tensors(*shapes: Sequence[int], kind: int = HALF) -> list[Desc]:
    """Descriptions of x, weight, perhaps bias, and of the output, which has the shape of x but for its channels."""
    return [Desc(Dims(shape), kind, LINEAR, 1.0) for shape in (*shapes, (*shapes[0][:-1], *shapes[1][-2:-1]))]


@pytest.mark.parametrize("geglu", [0, 1])
def test_serialised_plugins_are_read_back(driver: Driver, plugins: list[ctypes.c_void_p], geglu: int) -> None:
    expected = {"serialization_version": 1, "geglu": geglu}
    copies = copies_read_back(driver, plugins[geglu], expected)
    descs, others = array(tensors(*SHAPES[geglu])), array(tensors(*SHAPES[1 - geglu]))
    for plugin in copies:
        assert driver.lib.driver_shape_change(plugin, descs, 3) == 0, driver.messages()
        assert driver.lib.driver_shape_change(plugin, others, 3) == 1


def test_one_linear_layer_unless_told(driver: Driver) -> None:
    assert driver.serialised(driver.create()) == {"serialization_version": 1, "geglu": 0}
    assert driver.serialised(driver.create(geglu=(FIELD_INT64, 1, ctypes.c_int64(1))))["geglu"] == 1


@pytest.mark.parametrize(
    ("phase", "attributes", "said"),
    [
        (0, {"geglu": 2}, "attribute 'geglu': expected 0 or 1, got 2"),
        (0, {"geglu": -1}, "attribute 'geglu': expected 0 or 1, got -1"),
        (0, {"geglu": (FIELD_INT64, 1, ctypes.c_int64(WRAPS + 1))}, "expected 0 or 1, got 4294967297"),
        (0, {"geglu": 1.0}, "attribute 'geglu': expected one integer"),
        (0, {"axis": 1}, "expected the attribute geglu, got 'axis'; remove it"),
        (0, {"serialization_version": 1}, "got 'serialization_version'"),
        (1, {}, "expected the 2 fields that this plugin serialises, got 0; build the engine again"),
        (1, {"serialization_version": 1}, "expected the 2 fields that this plugin serialises, got 1"),
        (1, {"geglu": 1}, "expected the 2 fields that this plugin serialises, got 1"),
        (1, {"serialization_version": 1, "geglu": 2}, "attribute 'geglu': expected 0 or 1, got 2"),
        (1, {"serialization_version": 1, "axis": 1}, "expected the attribute geglu, got 'axis'"),
        (1, {"serialization_version": 1.0, "geglu": 1}, "attribute 'serialization_version': expected one integer"),
        (1, {"serialization_version": 2, "geglu": 1}, "serialization version 2, this plugin reads 1"),
    ],
)
def test_bad_attributes_are_refused_with_a_reason(driver: Driver, phase: int, attributes: dict, said: str) -> None:
    driver.messages()
    assert not driver.create(phase, **attributes)
    messages = driver.messages()
    assert said in messages and "the plugin Linear of layer 'layer' was not made" in messages


@pytest.mark.parametrize("inputs", [2, 3])
@pytest.mark.parametrize("geglu", [0, 1])
def test_types_and_formats(driver: Driver, plugins: list[ctypes.c_void_p], geglu: int, inputs: int) -> None:
    shapes, names = SHAPES[geglu][:inputs], ("x", "weight", "bias")[:inputs]
    check_types_and_formats(driver, plugins[geglu], lambda kind: tensors(*shapes, kind=kind), names)


@pytest.mark.parametrize("inputs", [2, 3])
@pytest.mark.parametrize("geglu", [0, 1])
def test_the_output_is_as_x_with_the_channels_of_weight(
    driver: Driver, plugins: list[ctypes.c_void_p], geglu: int, inputs: int
) -> None:
    plugin, kind = plugins[geglu], ctypes.c_int32(-1)
    types = (ctypes.c_int32 * inputs)(*[BF16] * inputs)
    assert driver.lib.driver_output_type(plugin, types, inputs, ctypes.byref(kind)) == 0
    assert kind.value == BF16
    exprs, out = (DimsExprs * inputs)(), DimsExprs()
    exprs[0].d[:5] = [0x10, 0x20, 0x30, 0x40, 0x50]
    weight = [*[0x60] * geglu, 0x70, 0x80]
    exprs[1].nb, exprs[1].d[: len(weight)] = len(weight), weight
    for rank in range(1, 6):
        exprs[0].nb = rank
        assert driver.lib.driver_output_shape(plugin, exprs, inputs, ctypes.byref(out)) == 0
        assert list(out.d[: out.nb]) == [*exprs[0].d[: rank - 1], 0x70]
    for ranks in ((0, len(weight)), (3, 0), (3, 1)):
        exprs[0].nb, exprs[1].nb = ranks
        assert driver.lib.driver_output_shape(plugin, exprs, inputs, ctypes.byref(out)) == 1
        assert f"got {ranks[0]} and {ranks[1]}" in driver.messages()


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("geglu", [0, 1])
@pytest.mark.parametrize(
    ("x", "out_channels"),
    [
        (X, 320),
        ((8,), 8),
        ((5, 65536), 8),
        ((2, 1024, 8), 65536),
        ((1, 2, 3, 640), 1280),
        ((1, 2, 3, 4, 640), 96),
        ((1 << 24, 8), 8),
        ((1 << 12, 1, 1 << 12, 8), 8),
    ],
    ids=str,
)
def test_shapes_that_fit(
    driver: Driver, plugins: list[ctypes.c_void_p], x: tuple, out_channels: int, geglu: int, biased: bool
) -> None:
    layers = (2,) * geglu
    descs = tensors(x, (*layers, out_channels, x[-1]), *[(*layers, out_channels)] * biased)
    assert driver.lib.driver_shape_change(plugins[geglu], array(descs), 2 + biased) == 0, driver.messages()
    assert driver.lib.driver_configure(plugins[geglu], dynamic(descs, descs), 2 + biased) == 0, driver.messages()


@pytest.mark.parametrize(
    ("geglu", "shapes", "said"),
    [
        (0, (X, (320, 640)), "input 'weight': expected shape [320, 1280] from x and weight, got [320, 640]"),
        (0, (X, (320,)), "input 'weight': expected 2 dimensions, got shape [320]"),
        (0, (X, ()), "input 'weight': expected 2 dimensions, got shape []"),
        (0, (X, (320, 1280, 1), BIAS), "input 'weight': expected 2 dimensions, got shape [320, 1280, 1]"),
        (0, (X, (-(1 << 63),) * 8), f"expected 2 dimensions, got shape {[-(1 << 63)] * 8}"),
        (0, SHAPES[1], "input 'weight': expected 2 dimensions, got shape [2, 320, 1280]"),
        (0, (X, WEIGHT, (1280,)), "input 'bias': expected shape [320] from x and weight, got [1280]"),
        (0, (X, WEIGHT, (1, 320)), "input 'bias': expected shape [320] from x and weight, got [1, 320]"),
        (1, SHAPES[0], "input 'weight': expected 3 dimensions, got shape [320, 1280]"),
        (1, (X, (640, 1280), (640,)), "input 'weight': expected 3 dimensions, got shape [640, 1280]"),
        (1, (X, (1, 2, 320, 1280)), "input 'weight': expected 3 dimensions, got shape [1, 2, 320, 1280]"),
        (1, (X, (1, 320, 1280)), "expected shape [2, 320, 1280] from x and weight, got [1, 320, 1280]"),
        (1, (X, (3, 320, 1280)), "expected shape [2, 320, 1280] from x and weight, got [3, 320, 1280]"),
        (1, (X, (320, 2, 1280)), "expected shape [2, 2, 1280] from x and weight, got [320, 2, 1280]"),
        (1, (X, (2, 320, 640)), "expected shape [2, 320, 1280] from x and weight, got [2, 320, 640]"),
        (1, (X, (2, *WEIGHT), BIAS), "input 'bias': expected shape [2, 320] from x and weight, got [320]"),
        (1, (X, (2, *WEIGHT), (640,)), "input 'bias': expected shape [2, 320] from x and weight, got [640]"),
        (1, (X, (2, *WEIGHT), (1, 320)), "input 'bias': expected shape [2, 320] from x and weight, got [1, 320]"),
        (0, ((), WEIGHT, BIAS), "input 'x': expected one dimension or more, got shape []"),
        (1, ((), (2, *WEIGHT)), "input 'x': expected one dimension or more, got shape []"),
        (0, ((2, 12), (8, 12), (8,)), "in_channels: expected 8..65536 in steps of 8, got 12"),
        (1, ((2, 12), (2, 8, 12)), "in_channels: expected 8..65536 in steps of 8, got 12"),
        (0, ((2, 65544), (8, 65544)), "in_channels: expected 8..65536 in steps of 8, got 65544"),
        (0, ((1, WRAPS + 8), (8, WRAPS + 8)), "in_channels: expected 8..65536 in steps of 8, got 2147483647"),
        (0, ((2, -8), (8, -8)), "in_channels: expected 8..65536 in steps of 8, got -8"),
        (0, ((2, 8 - WRAPS), (8, 8 - WRAPS)), "in_channels: expected 8..65536 in steps of 8, got -2147483648"),
        (0, ((2, 8), (12, 8), (12,)), "out_channels: expected 8..65536 in steps of 8, got 12"),
        (1, ((2, 8), (2, 12, 8), (2, 12)), "out_channels: expected 8..65536 in steps of 8, got 12"),
        (0, ((2, 8), (65544, 8)), "out_channels: expected 8..65536 in steps of 8, got 65544"),
        (1, ((2, 8), (2, 65544, 8)), "out_channels: expected 8..65536 in steps of 8, got 65544"),
        (0, ((2, 8), (0, 8), (0,)), "out_channels: expected 8..65536 in steps of 8, got 0"),
        (0, ((2, 8), (WRAPS + 8, 8)), "out_channels: expected 8..65536 in steps of 8, got 2147483647"),
        (1, ((2, 8), (2, WRAPS + 8, 8)), "out_channels: expected 8..65536 in steps of 8, got 2147483647"),
        (0, ((2, 8), (-8, 8)), "out_channels: expected 8..65536 in steps of 8, got -8"),
        (0, ((0, 8), (8, 8)), "rows: expected 1..2^24, got 0"),
        (1, ((0, 8), (2, 8, 8)), "rows: expected 1..2^24, got 0"),
        (0, (((1 << 24) + 1, 8), (8, 8), (8,)), "rows: expected 1..2^24, got 16777217"),
        (0, ((1 << 12, 2, 1 << 12, 8), (8, 8)), "rows: expected 1..2^24, got 33554432"),
        (0, (((1 << 62) + 1, 4, 8), (8, 8)), "rows: expected 1..2^24, got"),
        (1, (((1 << 62) + 1, 4, 8), (2, 8, 8)), "rows: expected 1..2^24, got"),
        (0, ((WRAPS, WRAPS, 1, 8), (8, 8)), "rows: expected 1..2^24, got"),
        (0, (((1 << 63) - 1, 8), (8, 8)), "rows: expected 1..2^24, got"),
        (0, ((-1, 8), (8, 8)), "rows: expected 1..2^24, got"),
        (0, ((-1, -1, 8), (8, 8)), "rows: expected 1..2^24, got"),
        (1, ((-1, -1, 8), (2, 8, 8)), "rows: expected 1..2^24, got"),
    ],
    ids=str,
)
def test_shapes_that_do_not_fit_are_refused(
    driver: Driver, plugins: list[ctypes.c_void_p], geglu: int, shapes: tuple, said: str
) -> None:
    inputs, good = len(shapes), tensors(*SHAPES[geglu][: len(shapes)])
    check_shapes_are_refused(driver, plugins[geglu], tensors(*shapes), good, inputs, said)


@pytest.mark.parametrize("inputs", [1, 4])
@pytest.mark.parametrize("geglu", [0, 1])
def test_other_numbers_of_inputs_are_refused(
    driver: Driver, plugins: list[ctypes.c_void_p], geglu: int, inputs: int
) -> None:
    said = "expected 2 or 3 inputs (x, weight, and perhaps bias) and 1 output"
    check_number_of_inputs_is_refused(driver, plugins[geglu], tensors(*SHAPES[geglu]), inputs, said)


@pytest.mark.parametrize("geglu", [0, 1])
def test_addresses_are_checked_before_the_device(driver: Driver, plugins: list[ctypes.c_void_p], geglu: int) -> None:
    plugin, layers = plugins[geglu], (2,) * geglu
    descs = array(tensors((1, 8), (*layers, 8, 8), (*layers, 8)))
    memory = ctypes.create_string_buffer(512)
    start = ctypes.addressof(memory) + -ctypes.addressof(memory) % 16
    right = [start, start + 16, start + 272, start + 304]

    def refusal(of: ctypes.c_void_p, inputs: int, **changed: int | None) -> str:
        """What is said of these addresses of x, weight, bias and y."""
        x, weight, bias, y = (dict(zip(("x", "weight", "bias", "y"), right, strict=True)) | changed).values()
        given = (ctypes.c_void_p * inputs)(*[x, weight, bias][:inputs])
        assert driver.lib.driver_enqueue(of, descs, inputs, given, (ctypes.c_void_p * 1)(y), None) == 1
        return driver.messages()

    assert "got 0 and 1" in refusal(plugin, 3)  # before any shapes are known
    assert driver.lib.driver_shape_change(plugin, descs, 3) == 0, driver.messages()
    attached = ctypes.c_void_p(driver.lib.driver_attach(plugin))
    for of in (plugin, attached):
        for name, place in zip(("x", "weight", "bias", "y"), right, strict=True):
            assert f"{name}: expected a pointer aligned to 16 bytes, got {place + 8:#x}" in refusal(
                of, 3, **{name: place + 8}
            )
        for name in ("x", "weight", "y"):
            assert f"{name}: expected a device pointer, got null" in refusal(of, 3, **{name: None})
    without = array(tensors((1, 8), (*layers, 8, 8)))
    assert driver.lib.driver_shape_change(plugin, without, 2) == 0, driver.messages()
    assert "y: expected a pointer aligned to 16 bytes" in refusal(plugin, 2, y=start + 312)
