"""The plugin of residual connections with quantised norms, without TensorRT and without a GPU; what it computes: tests/gpu."""

from __future__ import annotations

import ctypes
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

DYNAMIC, ALL = 4, 14
X, CHANNELS, TIMESTEP, BINS = (2, 1024, 1280), (1280,), (2,), (16,)
SHAPES = (X, X, *[CHANNELS] * 4, TIMESTEP, BINS, BINS)
NAMES = ("x", "residual", "weight", "bias", "factor", "offset", "timestep", "modes", "x_scale")
KINDS = (*[HALF] * 4, *[FLOAT] * 3, INT32, FLOAT)
ROWS = {"mode_set": ALL, "factor": 1, "offset": 1, "timestep": 1}
DEFAULTS = {
    "timestep_max": 1000.0, "factor": 0, "offset": 0, "timestep": 0, "epsilon": pytest.approx(1e-5), "normed": 0,
    "starts_early": 0,
}  # fmt: skip
PLUGIN, MADE = "Int8ResidualNorm", tuple(ROWS | {"normed": normed} for normed in (0, 1))
"""What `driver` and `plugins` of conftest.py make."""


def tensors(*shapes: Sequence[int], kind: int = HALF, normed: int = 0) -> list[Desc]:
    """Descriptions of the inputs and of three or four outputs; `kind` of those in 16 bits."""
    x = shapes[0]
    inputs = [(shape, kind if of == HALF else of) for shape, of in zip(shapes, KINDS, strict=False)]
    outputs = [(x, kind), ((*x[:-1], x[-1] // 2 if x else 0), INT32), ((*x[:-1], 1), FLOAT), *[(x, kind)] * normed]
    return [Desc(Dims(shape), of, LINEAR, 1.0) for shape, of in (*inputs, *outputs)]


def of_x(*x: int) -> tuple[Sequence[int], ...]:
    """Shapes of all inputs that belong together."""
    return (x, x, *[x[-1:]] * 4, (1,), BINS, BINS)


def test_attributes_are_serialised_and_read_back(driver: Driver) -> None:
    driver.messages()
    given = DEFAULTS | {"mode_set": 4, "epsilon": 0.5, "normed": 1, "starts_early": 1}
    copies = copies_read_back(driver, driver.create(**given), {"serialization_version": 1} | given)
    for copy in copies:
        descs = tensors(*SHAPES[:4], normed=1)
        assert driver.lib.driver_shape_change(copy, array(descs), 4) == 0, driver.messages()
    assert driver.serialised(driver.create(mode_set=4)) == {"serialization_version": 1, "mode_set": 4} | DEFAULTS


@pytest.mark.parametrize(
    ("phase", "attributes", "said"),
    [
        (0, {}, "expected the attribute mode_set, got none"),
        (0, {"mode_set": 16}, "expected a sum of 2 (weights only), 4 (dynamic) and 8 (static), got 16"),
        (0, {"mode_set": 4, "epsilon": -1.0}, "attribute 'epsilon': expected a finite number from 0"),
        (0, {"mode_set": 4, "normed": 2}, "attribute 'normed': expected 0 or 1, got 2"),
        (0, {"mode_set": 4, "axis": 1}, "normed and starts_early, got 'axis'; remove it"),
        (1, {"mode_set": 4}, "expected the 9 fields that this plugin serialises, got 1"),
    ],
)
def test_bad_attributes_are_refused_with_a_reason(driver: Driver, phase: int, attributes: dict, said: str) -> None:
    driver.messages()
    assert not driver.create(phase, **attributes)
    messages = driver.messages()
    assert said in messages and "the plugin Int8ResidualNorm of layer 'layer' was not made" in messages


@pytest.mark.parametrize("normed", [0, 1])
def test_types_and_formats(driver: Driver, plugins: list[ctypes.c_void_p], normed: int) -> None:
    names = (*NAMES, "sum", "payload", "row_scale", *["normed"] * normed)
    for position, name in enumerate(names):
        for kind, form in ((HALF, LINEAR), (BF16, LINEAR), (HALF, HWC8), (INT32, LINEAR), (FLOAT, LINEAR)):
            descs = tensors(*SHAPES, normed=normed)
            wanted = descs[position].type
            descs[position].type, descs[position].format = kind, form
            right = form == LINEAR and (kind == wanted or (position == 0 and kind == BF16))
            assert driver.lib.driver_supports(plugins[normed], position, dynamic(descs, descs), 9) == right
            if position < 9 and not right:
                assert driver.lib.driver_shape_change(plugins[normed], array(descs), 9) == 1
                text = {HALF: "FP16 or BF16, as x", FLOAT: "FP32", INT32: "INT32"}[wanted]
                said = f"input '{name}': expected linear format and {text}; got format {form} and type {kind}"
                assert said in driver.messages()


@pytest.mark.parametrize("normed", [0, 1])
def test_outputs(driver: Driver, plugins: list[ctypes.c_void_p], normed: int) -> None:
    types = (ctypes.c_int32 * (3 + normed))()
    assert driver.lib.driver_output_type(plugins[normed], (ctypes.c_int32 * 9)(*[BF16] * 4), 9, types) == 0
    assert list(types) == [BF16, INT32, FLOAT, *[BF16] * normed]
    exprs, out = (DimsExprs * 9)(), (DimsExprs * (3 + normed))()
    exprs[0].nb, exprs[0].d[:3] = 3, [100, 101, 1280]
    assert driver.lib.driver_output_shape(plugins[normed], exprs, 9, out) == 0
    as_x = [100, 101, 1280]
    assert [list(of.d[: of.nb]) for of in out] == [as_x, [100, 101, 640], [100, 101, 1], *[as_x] * normed]


def test_shapes_that_fit(driver: Driver, plugins: list[ctypes.c_void_p]) -> None:
    for shape in ((1024, 1280), (16,), (5, 4096), (1, 2, 3, 4, 640), ((1 << 31) - 1, 16)):
        descs = tensors(*of_x(*shape))
        assert driver.lib.driver_shape_change(plugins[0], array(descs), 9) == 0, driver.messages()
        assert driver.lib.driver_configure(plugins[0], dynamic(descs, descs), 9) == 0, driver.messages()


@pytest.mark.parametrize(
    ("shapes", "said"),
    [
        ((X, (2, 1024, 640), *SHAPES[2:]), "input 'residual': expected shape [2, 1024, 1280] from x and the tables"),
        ((*SHAPES[:3], (640,), *SHAPES[4:]), "input 'bias': expected shape [1280] from x and the tables, got [640]"),
        ((*SHAPES[:4], (640,), *SHAPES[5:]), "input 'factor': expected shape [1280] from x and the tables, got [640]"),
        ((*SHAPES[:8], (8,)), "input 'x_scale': expected shape [16] from x and the tables, got [8]"),
        ((*SHAPES[:6], (3,), BINS, BINS), "rows: expected as many of each of 3 samples, got 2048 in all"),
        (((), (), *[(1,)] * 5, BINS, BINS), "input 'x': expected one dimension or more"),
        (of_x(2, 24), "channels: expected 16..4096 in steps of 16 with quantised rows, got 24"),
        (of_x(2, 4112), "channels: expected 8..4096 in steps of 8, got 4112"),
        (of_x(1 << 31, 16), "rows: expected 1..2^31 - 1 with quantised rows, got 2147483648"),
    ],
    ids=str,
)
def test_shapes_that_do_not_fit_are_refused(
    driver: Driver, plugins: list[ctypes.c_void_p], shapes: tuple, said: str
) -> None:
    check_shapes_are_refused(driver, plugins[0], tensors(*shapes), tensors(*SHAPES), 9, said)


@pytest.mark.parametrize("normed", [0, 1])
def test_other_numbers_of_inputs_are_refused(driver: Driver, normed: int) -> None:
    made = driver.create(mode_set=DYNAMIC, factor=1, normed=normed)
    outputs = "sum, payload, row_scale" + ", normed" * normed
    for wrong in (4, 6):
        assert driver.lib.driver_shape_change(made, array((tensors(*SHAPES) * 2)[: wrong + 4]), wrong) == 1
        said = f"expected 5 inputs (x, residual, weight, bias, factor) and {3 + normed} outputs ({outputs})"
        assert f"{said}, got {wrong} and {3 + normed}" in driver.messages()
    driver.lib.driver_destroy(made)


@pytest.mark.parametrize("normed", [0, 1])
def test_addresses_are_checked_before_the_device(driver: Driver, plugins: list[ctypes.c_void_p], normed: int) -> None:
    descs = array(tensors(*of_x(1, 16), normed=normed))
    memory = ctypes.create_string_buffer(2048)
    start = ctypes.addressof(memory) + -ctypes.addressof(memory) % 16
    names = (*NAMES, "sum", "payload", "row_scale", *["normed"] * normed)
    right = [start + 64 * i for i in range(len(names))]

    def refusal(**changed: int | None) -> str:
        """What is said of these addresses of inputs and outputs."""
        given = list((dict(zip(names, right, strict=True)) | changed).values())
        inputs, outputs = (ctypes.c_void_p * 9)(*given[:9]), (ctypes.c_void_p * 4)(*given[9:])
        assert driver.lib.driver_enqueue(plugins[normed], descs, 9, inputs, outputs, None) == 1
        return driver.messages()

    assert f"got 0 and {3 + normed}" in refusal()  # before any shapes are known
    assert driver.lib.driver_shape_change(plugins[normed], descs, 9) == 0, driver.messages()
    for name, place in zip(names, right, strict=True):
        aligned = 4 if name in ("timestep", "modes", "x_scale") else 16
        said = f"{name}: expected a pointer aligned to {aligned} bytes, got {place + aligned // 2:#x}"
        assert said in refusal(**{name: place + aligned // 2})
