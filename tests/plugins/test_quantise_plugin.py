"""The plugin of quantised rows, without TensorRT and without a GPU; what it computes: tests/gpu."""

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

WEIGHT_ONLY, DYNAMIC, STATIC = 2, 4, 8
ALL = WEIGHT_ONLY | DYNAMIC | STATIC
X, CHANNELS, TIMESTEP, BINS = (2, 1024, 1280), (1280,), (2,), (16,)
SHAPES = (X, CHANNELS, CHANNELS, TIMESTEP, BINS, BINS)
NAMES = ("x", "factor", "offset", "timestep", "modes", "x_scale")
KINDS = (HALF, FLOAT, FLOAT, FLOAT, INT32, FLOAT)
EVERYTHING = {"mode_set": ALL, "factor": 1, "offset": 1, "timestep": 1}
DEFAULTS = {"timestep_max": 1000.0, "factor": 0, "offset": 0, "timestep": 0, "starts_early": 0}
WRAPS = 1 << 32
"""Is 0 in 32 bits."""
PLUGIN, MADE = "QuantiseRows", (EVERYTHING,)
"""What `driver` and `plugins` of conftest.py make."""


def tensors(*shapes: Sequence[int], kind: int = HALF, kinds: Sequence[int] = KINDS, divisor: int = 2) -> list[Desc]:
    """Descriptions of the inputs, x of a kind, and of the two outputs."""
    x = shapes[0]
    outputs = (((*x[:-1], x[-1] // divisor if x else 0), INT32), ((*x[:-1], 1), FLOAT))
    inputs = [(shape, kind if i == 0 else kinds[i]) for i, shape in enumerate(shapes)]
    return [Desc(Dims(shape), of, LINEAR, 1.0) for shape, of in (*inputs, *outputs)]


def of_x(*x: int) -> tuple[Sequence[int], ...]:
    """Shapes of all inputs that belong together."""
    return x, x[-1:], x[-1:], (1,), BINS, BINS


def test_attributes_are_serialised_and_read_back(driver: Driver) -> None:
    driver.messages()
    given = {"mode_set": 12, "timestep_max": 500.0, "factor": 1, "offset": 0, "timestep": 1, "starts_early": 1}
    copies = copies_read_back(driver, driver.create(**given), {"serialization_version": 1} | given)
    descs = tensors(X, CHANNELS, TIMESTEP, BINS, BINS, kinds=(HALF, FLOAT, FLOAT, INT32, FLOAT), divisor=4)
    for copy in copies:
        assert driver.lib.driver_shape_change(copy, array(descs), 5) == 0, driver.messages()
    made = driver.create(mode_set=(FIELD_INT64, 1, ctypes.c_int64(4)))
    assert driver.serialised(made) == {"serialization_version": 1, "mode_set": 4} | DEFAULTS


@pytest.mark.parametrize(
    ("phase", "attributes", "said"),
    [
        (0, {}, "expected the attribute mode_set, got none"),
        (0, {"mode_set": 0}, "expected a sum of 2 (weights only), 4 (dynamic) and 8 (static), got 0"),
        (0, {"mode_set": 1}, "expected a sum of 2 (weights only), 4 (dynamic) and 8 (static), got 1"),
        (0, {"mode_set": 16}, "got 16"),
        (0, {"mode_set": -2}, "got -2"),
        (0, {"mode_set": (FIELD_INT64, 1, ctypes.c_int64(WRAPS + 4))}, "got 4294967300"),
        (0, {"mode_set": 4, "timestep_max": 0.0}, "expected the positive finite timestep"),
        (0, {"mode_set": 4, "timestep_max": float("nan")}, "got nan"),
        (0, {"mode_set": 4, "factor": 2}, "attribute 'factor': expected 0 or 1, got 2"),
        (0, {"mode_set": 4, "axis": 1}, "timestep and starts_early, got 'axis'; remove it"),
        (1, {"mode_set": 4}, "expected the 7 fields that this plugin serialises, got 1"),
        (1, DEFAULTS | {"mode_set": 4, "serialization_version": 2}, "serialization version 2, this plugin reads 1"),
    ],
)
def test_bad_attributes_are_refused_with_a_reason(driver: Driver, phase: int, attributes: dict, said: str) -> None:
    driver.messages()
    assert not driver.create(phase, **attributes)
    messages = driver.messages()
    assert said in messages and "the plugin QuantiseRows of layer 'layer' was not made" in messages


def test_types_and_formats(driver: Driver, plugin: ctypes.c_void_p) -> None:
    for kind, taken in ((HALF, True), (BF16, True), (FLOAT, False), (INT32, False)):
        descs = tensors(*SHAPES, kind=kind)
        for position in range(8):
            supported = driver.lib.driver_supports(plugin, position, dynamic(descs, descs), 6)
            assert supported == (taken or position > 0)  # the others have types of their own
    for position in range(8):
        for kind, form in ((BF16, LINEAR), (HALF, HWC8), (INT32, LINEAR), (FLOAT, LINEAR)):
            descs = tensors(*SHAPES)
            wanted = descs[position].type
            descs[position].type, descs[position].format = kind, form
            right = form == LINEAR and (kind == wanted or (position == 0 and kind == BF16))
            assert driver.lib.driver_supports(plugin, position, dynamic(descs, descs), 6) == right
            if position < 6 and not right:
                assert driver.lib.driver_shape_change(plugin, array(descs), 6) == 1
                text = {HALF: "FP16 or BF16, as x", FLOAT: "FP32", INT32: "INT32"}[wanted]
                said = (
                    f"input '{NAMES[position]}': expected linear format and {text}; got format {form} and type {kind}"
                )
                assert said in driver.messages()


@pytest.mark.parametrize(("mode_set", "divisor"), [(WEIGHT_ONLY, 2), (DYNAMIC, 4), (STATIC, 4), (12, 4), (ALL, 2)])
def test_outputs(driver: Driver, mode_set: int, divisor: int) -> None:
    made = driver.create(mode_set=mode_set)
    inputs = 1 + (mode_set in (12, ALL)) + (mode_set >= STATIC)
    types = (ctypes.c_int32 * 2)()
    assert driver.lib.driver_output_type(made, (ctypes.c_int32 * inputs)(BF16), inputs, types) == 0
    assert list(types) == [INT32, FLOAT]
    exprs, out = (DimsExprs * inputs)(), (DimsExprs * 2)()
    for rank in range(1, 6):
        exprs[0].nb, exprs[0].d[:rank] = rank, [*range(100, 100 + rank - 1), 1280]
        assert driver.lib.driver_output_shape(made, exprs, inputs, out) == 0
        leading = list(range(100, 100 + rank - 1))
        assert list(out[0].d[: out[0].nb]) == [*leading, 1280 // divisor]
        assert list(out[1].d[: out[1].nb]) == [*leading, 1]
    exprs[0].nb = 0
    assert driver.lib.driver_output_shape(made, exprs, inputs, out) == 1
    assert "expected rows of one dimension or more, got 0" in driver.messages()
    driver.lib.driver_destroy(made)


def test_shapes_that_fit(driver: Driver, plugin: ctypes.c_void_p) -> None:
    for shape in ((1024, 1280), (16,), (5, 65536), (1, 2, 3, 4, 640), ((1 << 31) - 1, 16), (1 << 16, 1, 1 << 14, 16)):
        descs = tensors(*of_x(*shape))
        assert driver.lib.driver_shape_change(plugin, array(descs), 6) == 0, driver.messages()
        assert driver.lib.driver_configure(plugin, dynamic(descs, descs), 6) == 0, driver.messages()


@pytest.mark.parametrize(
    ("shapes", "said"),
    [
        ((X, (640,), *SHAPES[2:]), "input 'factor': expected shape [1280] from x and the tables, got [640]"),
        ((*SHAPES[:2], (1, 1280), *SHAPES[3:]), "input 'offset': expected shape [1280]"),
        ((*SHAPES[:3], (2, 1), BINS, BINS), "input 'timestep': expected shape [2] from x and the tables, got [2, 1]"),
        ((*SHAPES[:3], (), BINS, BINS), "input 'timestep': expected shape [0]"),
        ((*SHAPES[:4], BINS, (8,)), "input 'x_scale': expected shape [16] from x and the tables, got [8]"),
        ((*SHAPES[:4], (0,), (0,)), "num_bins: expected 1..65536, got 0"),
        ((*SHAPES[:3], (3,), BINS, BINS), "rows: expected as many of each of 3 samples, got 2048 in all"),
        ((*SHAPES[:3], (65537,), BINS, BINS), "batch: expected 1..65536, got 65537"),
        (((), (1,), (1,), (1,), BINS, BINS), "input 'x': expected one dimension or more"),
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
    check_shapes_are_refused(driver, plugin, tensors(*shapes), tensors(*SHAPES), 6, said)


def test_bins_without_a_timestep_are_refused(driver: Driver) -> None:
    made = driver.create(mode_set=STATIC)
    one, many = (tensors(X, bins, kinds=(HALF, FLOAT), divisor=4) for bins in ((1,), BINS))
    assert driver.lib.driver_shape_change(made, array(one), 2) == 0, driver.messages()
    assert driver.lib.driver_shape_change(made, array(many), 2) == 1
    assert "attribute 'timestep': expected 1 with tables of 16 bins, got 0" in driver.messages()
    driver.lib.driver_destroy(made)


@pytest.mark.parametrize(
    ("attributes", "names"),
    [
        ({"mode_set": DYNAMIC}, "x"),
        ({"mode_set": STATIC, "factor": 1}, "x, factor, x_scale"),
        ({"mode_set": 12, "offset": 1, "timestep": 1}, "x, offset, timestep, modes, x_scale"),
        (EVERYTHING, ", ".join(NAMES)),
    ],
)
def test_other_numbers_of_inputs_are_refused(driver: Driver, attributes: dict, names: str) -> None:
    made, inputs = driver.create(**attributes), names.count(",") + 1
    for wrong in (inputs - 1, inputs + 1):
        descs = (tensors(*SHAPES) * 2)[: wrong + 2]
        assert driver.lib.driver_shape_change(made, array(descs), wrong) == 1
        said = f"expected {inputs} inputs ({names}) and 2 outputs (payload, row_scale), got {wrong} and 2"
        assert said in driver.messages()
    driver.lib.driver_destroy(made)


def test_addresses_are_checked_before_the_device(driver: Driver, plugin: ctypes.c_void_p) -> None:
    descs = array(tensors(*of_x(1, 16)))
    memory = ctypes.create_string_buffer(1024)
    start = ctypes.addressof(memory) + -ctypes.addressof(memory) % 16
    names, right = (*NAMES, "payload", "row_scale"), [start + 64 * i for i in range(8)]

    def refusal(**changed: int | None) -> str:
        """What is said of these addresses of inputs and outputs."""
        given = list((dict(zip(names, right, strict=True)) | changed).values())
        inputs, outputs = (ctypes.c_void_p * 6)(*given[:6]), (ctypes.c_void_p * 2)(*given[6:])
        assert driver.lib.driver_enqueue(plugin, descs, 6, inputs, outputs, None) == 1
        return driver.messages()

    assert "got 0 and 2" in refusal()  # before any shapes are known
    assert driver.lib.driver_shape_change(plugin, descs, 6) == 0, driver.messages()
    for name, place in zip(names, right, strict=True):
        aligned = 4 if name in ("timestep", "modes", "x_scale") else 16
        said = f"{name}: expected a pointer aligned to {aligned} bytes, got {place + aligned // 2:#x}"
        assert said in refusal(**{name: place + aligned // 2})
        if name not in ("factor", "offset"):
            assert f"{name}: expected a device pointer, got null" in refusal(**{name: None})
