"""The plugin of deltas of rows, without TensorRT and without a GPU; what it computes: tests/gpu."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import pytest
from plugin_driver import (
    BF16,
    FIELD_INT64,
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

GEGLU, GELU = 1, 2
X, SCALES, CHANNELS = (2, 1024, 1280), (2, 7), (1280,)
SHAPES = (X, X, SCALES, CHANNELS)
NAMES, OUTPUTS = ("x", "a_hat", "scales", "factor"), ("payload", "row_scale", "a_next")
EVERYTHING = {"factor": 1, "activation": GELU, "place": 2}
DEFAULTS = {"factor": 0, "activation": 0}
WRAPS = 1 << 32
"""Is 0 in 32 bits."""
PLUGIN, MADE = "QuantiseChangedRows", (EVERYTHING,)
"""What `driver` and `plugins` of conftest.py make."""


def tensors(*shapes: Sequence[int], kind: int = HALF) -> list[Desc]:
    """Descriptions of the inputs, those in 16 bits of a kind, and of the three outputs."""
    x = shapes[0]
    outputs = (((*x[:-1], x[-1] // 4 if x else 0), INT32), ((*x[:-1], 1), FLOAT), (x, kind))
    inputs = zip(shapes, (kind, kind, FLOAT, FLOAT), strict=False)
    return [Desc(Dims(shape), of, LINEAR, 1.0) for shape, of in (*inputs, *outputs)]


def of_x(*x: int) -> tuple[Sequence[int], ...]:
    """Shapes of all inputs that belong together."""
    return x, x, (1, 7), x[-1:]


def test_attributes_are_serialised_and_read_back(driver: Driver) -> None:
    driver.messages()
    copies = copies_read_back(driver, driver.create(**EVERYTHING), {"serialization_version": 1} | EVERYTHING)
    for copy in copies:
        assert driver.lib.driver_shape_change(copy, array(tensors(*SHAPES)), 4) == 0, driver.messages()
    made = driver.create(place=(FIELD_INT64, 1, ctypes.c_int64(WRAPS // 2 - 1)))
    assert driver.serialised(made) == {"serialization_version": 1, "place": WRAPS // 2 - 1} | DEFAULTS


@pytest.mark.parametrize(
    ("phase", "attributes", "said"),
    [
        (0, {}, "expected the attribute place, got none"),
        (0, {"place": -1}, "attribute 'place': expected a number from 0 to 2^31 - 1, got -1"),
        (0, {"place": (FIELD_INT64, 1, ctypes.c_int64(WRAPS))}, "got 4294967296"),
        (0, {"place": 0, "factor": 2}, "attribute 'factor': expected 0 or 1, got 2"),
        (0, {"place": 0, "activation": 4}, "expected 0 (none), 1 (GEGLU), 2 (GELU) or 3 (GELU by tanh), got 4"),
        (0, {"place": 0, "axis": 1}, "activation and place, got 'axis'; remove it"),
        (1, {"place": 0}, "expected the 4 fields that this plugin serialises, got 1"),
        (1, DEFAULTS | {"place": 0, "serialization_version": 2}, "serialization version 2, this plugin reads 1"),
    ],
)
def test_bad_attributes_are_refused_with_a_reason(driver: Driver, phase: int, attributes: dict, said: str) -> None:
    driver.messages()
    assert not driver.create(phase, **attributes)
    messages = driver.messages()
    assert said in messages and "the plugin QuantiseChangedRows of layer 'layer' was not made" in messages


def test_types_and_formats(driver: Driver, plugin: ctypes.c_void_p) -> None:
    in_16_bits = (0, 1, 6)
    for kind, taken in ((HALF, True), (BF16, True), (FLOAT, False), (INT32, False)):
        descs = tensors(*SHAPES, kind=kind)
        for position in range(7):
            supported = driver.lib.driver_supports(plugin, position, dynamic(descs, descs), 4)
            assert supported == (taken or position not in in_16_bits)
    for position in range(7):
        for kind, form in ((BF16, LINEAR), (HALF, HWC8), (INT32, LINEAR), (FLOAT, LINEAR)):
            descs = tensors(*SHAPES)
            wanted = descs[position].type
            descs[position].type, descs[position].format = kind, form
            right = form == LINEAR and (kind == wanted or (position == 0 and kind == BF16))
            assert driver.lib.driver_supports(plugin, position, dynamic(descs, descs), 4) == right
            if position < 4 and not right:
                assert driver.lib.driver_shape_change(plugin, array(descs), 4) == 1
                text = {HALF: "FP16 or BF16, as x", FLOAT: "FP32"}[wanted]
                said = (
                    f"input '{NAMES[position]}': expected linear format and {text}; got format {form} and type {kind}"
                )
                assert said in driver.messages()


@pytest.mark.parametrize("factor", [0, 1])
def test_outputs(driver: Driver, factor: int) -> None:
    made, inputs = driver.create(place=0, factor=factor), 3 + factor
    types = (ctypes.c_int32 * 3)()
    assert driver.lib.driver_output_type(made, (ctypes.c_int32 * inputs)(BF16), inputs, types) == 0
    assert list(types) == [INT32, FLOAT, BF16]
    exprs, out = (DimsExprs * inputs)(), (DimsExprs * 3)()
    for rank in range(1, 6):
        leading = list(range(100, 100 + rank - 1))
        exprs[0].nb, exprs[0].d[:rank] = rank, [*leading, 1280]
        assert driver.lib.driver_output_shape(made, exprs, inputs, out) == 0
        assert [list(of.d[: of.nb]) for of in out] == [[*leading, 320], [*leading, 1], [*leading, 1280]]
    exprs[0].nb = 0
    assert driver.lib.driver_output_shape(made, exprs, inputs, out) == 1
    assert "expected rows of one dimension or more, got 0" in driver.messages()
    driver.lib.driver_destroy(made)


def test_shapes_that_fit(driver: Driver, plugin: ctypes.c_void_p) -> None:
    for shape in ((1024, 1280), (16,), (5, 65536), (1, 2, 3, 4, 640), ((1 << 31) - 1, 16), (1 << 16, 1, 1 << 14, 16)):
        descs = tensors(*of_x(*shape))
        assert driver.lib.driver_shape_change(plugin, array(descs), 4) == 0, driver.messages()
        assert driver.lib.driver_configure(plugin, dynamic(descs, descs), 4) == 0, driver.messages()


@pytest.mark.parametrize(
    ("shapes", "said"),
    [
        ((X, (2, 1024, 640), *SHAPES[2:]), "input 'a_hat': expected shape [2, 1024, 1280] from x and scales, got [2,"),
        ((X, (2048, 1280), *SHAPES[2:]), "input 'a_hat': expected shape [2, 1024, 1280] from x and scales, got [2048,"),
        ((X, X, (2,), CHANNELS), "input 'scales': expected 2 dimensions, samples and places, got shape [2]"),
        ((X, X, SCALES, (640,)), "input 'factor': expected shape [1280] from x and scales, got [640]"),
        ((X, X, (3, 7), CHANNELS), "rows: expected as many of each of 3 samples, got 2048 in all"),
        ((X, X, (0, 7), CHANNELS), "batch: expected 1..65536, got 0"),
        ((X, X, (65537, 7), CHANNELS), "batch: expected 1..65536, got 65537"),
        ((X, X, (WRAPS + 2, 7), CHANNELS), "batch: expected 1..65536, got 2147483647"),
        ((X, X, (2, 65537), CHANNELS), "places: expected 1..65536, got 65537"),
        ((X, X, (2, WRAPS + 7), CHANNELS), "places: expected 1..65536, got 2147483647"),
        ((X, X, (2, 2), CHANNELS), "place: expected one of 2 columns of scales, from 0, got 2"),
        (((), (), SCALES, (1,)), "input 'x': expected one dimension or more"),
        (of_x(2, 24), "channels: expected 16..65536 in steps of 16, got 24"),
        (of_x(2, 65552), "channels: expected 16..65536 in steps of 16, got 65552"),
        (of_x(1, WRAPS + 16), "channels: expected 16..65536 in steps of 16, got 2147483647"),
        (of_x(2, -16), "channels: expected 16..65536 in steps of 16, got -16"),
        (of_x(0, 16), "rows: expected 1..2^31 - 1, got 0"),
        (of_x(1 << 31, 16), "rows: expected 1..2^31 - 1, got 2147483648"),
        (of_x((1 << 62) + 1, 4, 16), "rows: expected 1..2^31 - 1, got"),
    ],
    ids=str,
)
def test_shapes_that_do_not_fit_are_refused(driver: Driver, plugin: ctypes.c_void_p, shapes: tuple, said: str) -> None:
    check_shapes_are_refused(driver, plugin, tensors(*shapes), tensors(*SHAPES), 4, said)


def test_a_gate_is_refused(driver: Driver) -> None:
    made = driver.create(place=0, activation=GEGLU)
    assert driver.lib.driver_shape_change(made, array(tensors(*SHAPES[:3])), 3) == 1
    assert "activation: expected 0 (none), 2 (GELU) or 3 (GELU by tanh), got 1" in driver.messages()
    driver.lib.driver_destroy(made)


@pytest.mark.parametrize("factor", [0, 1])
def test_other_numbers_of_inputs_are_refused(driver: Driver, factor: int) -> None:
    made, inputs = driver.create(place=0, factor=factor), 3 + factor
    for wrong in (inputs - 1, inputs + 1):
        descs = (tensors(*SHAPES) * 2)[: wrong + 3]
        assert driver.lib.driver_shape_change(made, array(descs), wrong) == 1
        said = f"expected {inputs} inputs ({', '.join(NAMES[:inputs])}) and 3 outputs ({', '.join(OUTPUTS)}), got"
        assert f"{said} {wrong} and 3" in driver.messages()
    driver.lib.driver_destroy(made)


def test_addresses_are_checked_before_the_device(driver: Driver, plugin: ctypes.c_void_p) -> None:
    descs = array(tensors(*of_x(1, 16)))
    memory = ctypes.create_string_buffer(1024)
    start = ctypes.addressof(memory) + -ctypes.addressof(memory) % 16
    names, right = (*NAMES, *OUTPUTS), [start + 64 * i for i in range(7)]

    def refusal(**changed: int | None) -> str:
        """What is said of these addresses of inputs and outputs."""
        given = list((dict(zip(names, right, strict=True)) | changed).values())
        inputs, outputs = (ctypes.c_void_p * 4)(*given[:4]), (ctypes.c_void_p * 3)(*given[4:])
        assert driver.lib.driver_enqueue(plugin, descs, 4, inputs, outputs, None) == 1
        return driver.messages()

    assert "got 0 and 3" in refusal()  # before any shapes are known
    assert driver.lib.driver_shape_change(plugin, descs, 4) == 0, driver.messages()
    for name, place in zip(names, right, strict=True):
        assert f"{name}: expected a pointer aligned to 16 bytes, got {place + 8:#x}" in refusal(**{name: place + 8})
        if name != "factor":
            assert f"{name}: expected a device pointer, got null" in refusal(**{name: None})
