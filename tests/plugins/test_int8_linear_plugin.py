"""The plugin of INT8 linear layers, without TensorRT and without a GPU; what it computes: tests/gpu."""

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

WEIGHT_ONLY, DYNAMIC, STATIC = 2, 4, 8
GEGLU, GELU = 1, 2
X, ROW_SCALE, WEIGHT, SCALE, RESIDUAL = (2, 1024, 320), (2, 1024, 1), (640, 320), (640,), (2, 1024, 640)
SHAPES = (X, ROW_SCALE, WEIGHT, SCALE, SCALE, RESIDUAL)
GEGLU_SHAPES = (X, ROW_SCALE, (2, *WEIGHT), (2, *SCALE), (2, *SCALE))
NAMES = ("x", "row_scale", "weight", "weight_scale", "bias", "residual")
KINDS = (INT32, FLOAT, INT32, FLOAT, FLOAT, HALF)
DEFAULTS = {
    "activation": 0, "bias": 0, "residual": 0, "bfloat16": 0, "quantised": 0, "out_factor": 0, "out_offset": 0, "timestep": 0,
    "timestep_max": 1000.0, "changes": 0, "parts": 1,
}  # fmt: skip
WRAPS = 1 << 32
"""Is 0 in 32 bits."""
PLUGIN, MADE = (
    "Int8Linear",
    ({"mode_set": DYNAMIC, "bias": 1, "residual": 1}, {"mode_set": DYNAMIC, "bias": 1, "activation": GEGLU}),
)
"""What `driver` and `plugins` of conftest.py make."""


def tensors(*shapes: Sequence[int], kind: int = HALF) -> list[Desc]:
    """Descriptions of the inputs and of the output; `kind` of those in 16 bits."""
    y = (*shapes[0][:-1], *shapes[2][-2:-1])
    kinds = [kind if of == HALF else of for of in KINDS[: len(shapes)]]
    return [Desc(Dims(shape), of, LINEAR, 1.0) for shape, of in ((*zip(shapes, kinds, strict=True), (y, kind)))]


def of(*x: int, width: int = 8, layers: int = 1) -> tuple[Sequence[int], ...]:
    """Shapes of all inputs that belong together."""
    two = (2,) * (layers - 1)
    shapes = (x, (*x[:-1], 1), (*two, width, x[-1]), (*two, width), (*two, width))
    return shapes if layers == 2 else (*shapes, (*x[:-1], width))


def test_attributes_are_serialised_and_read_back(driver: Driver) -> None:
    driver.messages()
    given = DEFAULTS | {"mode_set": 12, "bias": 1, "residual": 1, "bfloat16": 1, "timestep_max": 500.0}
    copies = copies_read_back(driver, driver.create(**given), {"serialization_version": 3} | given)
    for copy in copies:
        assert driver.lib.driver_shape_change(copy, array(tensors(*SHAPES, kind=BF16)), 6) == 0, driver.messages()
        assert driver.lib.driver_shape_change(copy, array(tensors(*SHAPES)), 6) == 1
        assert "input 'residual': expected linear format and BF16; got format 0 and type 1" in driver.messages()
    assert driver.serialised(driver.create(mode_set=4)) == {"serialization_version": 3, "mode_set": 4} | DEFAULTS


@pytest.mark.parametrize(
    ("phase", "attributes", "said"),
    [
        (0, {}, "expected the attribute mode_set, got none"),
        (0, {"mode_set": 1}, "expected a sum of 2 (weights only), 4 (dynamic) and 8 (static), got 1"),
        (0, {"mode_set": 4, "activation": 4}, "expected 0 (none), 1 (GEGLU), 2 (GELU) or 3 (GELU by tanh), got 4"),
        (0, {"mode_set": 4, "activation": -1}, "GELU by tanh), got -1"),
        (0, {"mode_set": 4, "bias": 2}, "attribute 'bias': expected 0 or 1, got 2"),
        (0, {"mode_set": 4, "changes": 2}, "attribute 'changes': expected 0 or 1, got 2"),
        (0, {"mode_set": 2, "parts": 0}, "attribute 'parts': expected 1..8, got 0"),
        (0, {"mode_set": 2, "parts": 9}, "attribute 'parts': expected 1..8, got 9"),
        (0, {"mode_set": 4, "axis": 1}, "changes and parts, got 'axis'; remove it"),
        (1, {"mode_set": 4}, "expected the 13 fields that this plugin serialises, got 1"),
        (
            1,
            DEFAULTS | {"mode_set": 4, "serialization_version": 0},
            "serialization version 0, this plugin reads 1 to 3",
        ),
        (
            1,
            DEFAULTS | {"mode_set": 4, "serialization_version": 4},
            "serialization version 4, this plugin reads 1 to 3",
        ),
        (
            1,
            DEFAULTS | {"mode_set": 4, "serialization_version": 1},
            "expected the 11 fields that this plugin serialises",
        ),
        (1, {"mode_set": 4, "serialization_version": 1}, "expected the 11 fields that this plugin serialises, got 2"),
    ],
)
def test_bad_attributes_are_refused_with_a_reason(driver: Driver, phase: int, attributes: dict, said: str) -> None:
    driver.messages()
    assert not driver.create(phase, **attributes)
    messages = driver.messages()
    assert said in messages and "the plugin Int8Linear of layer 'layer' was not made" in messages


def test_engines_of_an_earlier_version_are_read(driver: Driver) -> None:
    """Version 1 had no layers of deltas, version 2 no results of several parts."""
    given = {name: value for name, value in DEFAULTS.items() if name not in ("changes", "parts")} | {
        "mode_set": 12,
        "bias": 1,
    }
    for version, more in ((1, {}), (2, {"changes": 0})):
        made = driver.create(1, serialization_version=version, **given | more)
        assert driver.serialised(made) == {"serialization_version": 3, "changes": 0, "parts": 1} | given


def test_types_and_formats(driver: Driver, plugins: list[ctypes.c_void_p]) -> None:
    for position in range(7):
        for kind, form in ((HALF, LINEAR), (BF16, LINEAR), (HALF, HWC8), (INT32, LINEAR), (FLOAT, LINEAR)):
            descs = tensors(*SHAPES)
            wanted = descs[position].type
            descs[position].type, descs[position].format = kind, form
            right = form == LINEAR and kind == wanted
            assert driver.lib.driver_supports(plugins[0], position, dynamic(descs, descs), 6) == right
            if position < 6 and not right:
                assert driver.lib.driver_shape_change(plugins[0], array(descs), 6) == 1
                text = {HALF: "FP16", FLOAT: "FP32", INT32: "INT32"}[wanted]
                said = (
                    f"input '{NAMES[position]}': expected linear format and {text}; got format {form} and type {kind}"
                )
                assert said in driver.messages()


@pytest.mark.parametrize("bfloat16", [0, 1])
@pytest.mark.parametrize("geglu", [0, 1])
def test_the_output_is_as_x_with_the_channels_of_weight(driver: Driver, geglu: int, bfloat16: int) -> None:
    made = driver.create(mode_set=DYNAMIC, activation=geglu, bfloat16=bfloat16)
    kind = ctypes.c_int32(-1)
    assert driver.lib.driver_output_type(made, (ctypes.c_int32 * 4)(*KINDS[:4]), 4, ctypes.byref(kind)) == 0
    assert kind.value == (BF16 if bfloat16 else HALF)
    exprs, out = (DimsExprs * 4)(), DimsExprs()
    exprs[0].d[:5] = [0x10, 0x20, 0x30, 0x40, 0x50]
    weight = [*[0x60] * geglu, 0x70, 0x80]
    exprs[2].nb, exprs[2].d[: len(weight)] = len(weight), weight
    for rank in range(1, 6):
        exprs[0].nb = rank
        assert driver.lib.driver_output_shape(made, exprs, 4, ctypes.byref(out)) == 0
        assert list(out.d[: out.nb]) == [*exprs[0].d[: rank - 1], 0x70]
    for ranks in ((0, len(weight)), (3, 0), (3, 1)):
        exprs[0].nb, exprs[2].nb = ranks
        assert driver.lib.driver_output_shape(made, exprs, 4, ctypes.byref(out)) == 1
        assert f"got {ranks[0]} and {ranks[1]}" in driver.messages()
    driver.lib.driver_destroy(made)


@pytest.mark.parametrize("geglu", [0, 1])
@pytest.mark.parametrize(
    ("x", "width"),
    [
        ((2, 1024, 320), 640),
        ((4,), 8),
        ((5, 16384), 8),
        ((2, 1024, 4), 65536),
        ((1, 2, 3, 160), 1280),
        ((1 << 24, 4), 8),
    ],
    ids=str,
)
def test_shapes_that_fit(driver: Driver, plugins: list[ctypes.c_void_p], x: tuple, width: int, geglu: int) -> None:
    descs = tensors(*of(*x, width=width, layers=1 + geglu))
    inputs = len(descs) - 1
    assert driver.lib.driver_shape_change(plugins[geglu], array(descs), inputs) == 0, driver.messages()
    assert driver.lib.driver_configure(plugins[geglu], dynamic(descs, descs), inputs) == 0, driver.messages()


@pytest.mark.parametrize(
    ("geglu", "shapes", "said"),
    [
        (
            0,
            ((2, 1024, 160), *SHAPES[1:]),
            "input 'x': expected shape [2, 1024, 320] from x, weight and the tables, got",
        ),
        (
            0,
            (X, (2, 1024), *SHAPES[2:]),
            "input 'row_scale': expected shape [2, 1024, 1] from x, weight and the tables, got",
        ),
        (
            0,
            (X, (2, 512, 1), *SHAPES[2:]),
            "input 'row_scale': expected shape [2, 1024, 1] from x, weight and the tables, got",
        ),
        (
            0,
            (*SHAPES[:3], (320,), *SHAPES[4:]),
            "input 'weight_scale': expected shape [640] from x, weight and the tables",
        ),
        (
            0,
            (*SHAPES[:4], (1, 640), RESIDUAL),
            "input 'bias': expected shape [640] from x, weight and the tables, got [1, 640]",
        ),
        (
            0,
            (*SHAPES[:5], (2, 1024, 320)),
            "input 'residual': expected shape [2, 1024, 640] from x, weight and the tables",
        ),
        (
            0,
            (X, ROW_SCALE, (2, *WEIGHT), *SHAPES[3:]),
            "input 'weight': expected 2 dimensions, got shape [2, 640, 320]",
        ),
        (1, SHAPES[:5], "input 'weight': expected 3 dimensions, got shape [640, 320]"),
        (1, (X, ROW_SCALE, (3, *WEIGHT), *GEGLU_SHAPES[3:]), "input 'weight': expected shape [2, 640, 320]"),
        (1, (*GEGLU_SHAPES[:3], SCALE, (2, *SCALE)), "input 'weight_scale': expected shape [2, 640]"),
        (0, ((), (1,), WEIGHT, SCALE, SCALE, (640,)), "input 'x': expected one dimension or more"),
        (0, of(2, 6), "in_channels: expected 16..65536 in steps of 16, got 24"),
        (1, of(2, 6, layers=2), "in_channels: expected 16..65536 in steps of 16, got 24"),
        (0, of(2, 16388), "in_channels: expected 16..65536 in steps of 16, got 65552"),
        (0, of(2, (1 << 30) + 4), "in_channels: expected 16..65536 in steps of 16, got 2147483647"),
        (0, of(2, 4, width=12), "out_channels: expected 8..65536 in steps of 8, got 12"),
        (0, of(2, 4, width=WRAPS + 8), "out_channels: expected 8..65536 in steps of 8, got 2147483647"),
        (0, of(0, 4), "rows: expected 1..2^24, got 0"),
        (1, of((1 << 24) + 1, 4, layers=2), "rows: expected 1..2^24, got 16777217"),
    ],
    ids=str,
)
def test_shapes_that_do_not_fit_are_refused(
    driver: Driver, plugins: list[ctypes.c_void_p], geglu: int, shapes: tuple, said: str
) -> None:
    good = GEGLU_SHAPES if geglu else SHAPES
    check_shapes_are_refused(driver, plugins[geglu], tensors(*shapes), tensors(*good), len(shapes), said)


@pytest.mark.parametrize(
    ("attributes", "names"),
    [
        ({}, "x, row_scale, weight, weight_scale"),
        ({"bias": 1}, "x, row_scale, weight, weight_scale, bias"),
        ({"residual": 1}, "x, row_scale, weight, weight_scale, residual"),
        ({"bias": 1, "residual": 1}, ", ".join(NAMES)),
    ],
)
def test_other_numbers_of_inputs_are_refused(driver: Driver, attributes: dict, names: str) -> None:
    made, inputs = driver.create(mode_set=STATIC, **attributes), names.count(",") + 1
    for wrong in (inputs - 1, inputs + 1):
        descs = (tensors(*SHAPES) * 2)[: wrong + 1]
        assert driver.lib.driver_shape_change(made, array(descs), wrong) == 1
        assert f"expected {inputs} inputs ({names}) and 1 output, got {wrong} and 1" in driver.messages()
    driver.lib.driver_destroy(made)


def test_16bit_rows_alone_come_as_they_are(driver: Driver) -> None:
    """[..., K] in 16 bits, without scales; where rows may be either the payload has room for both."""
    made = driver.create(mode_set=WEIGHT_ONLY, bias=1, bfloat16=1)
    x, y = (2, 1024, 1280), (2, 1024, 640)

    def described(kind: int) -> list[Desc]:
        tensors = ((x, kind), (WEIGHT, INT32), (SCALE, FLOAT), (SCALE, FLOAT), (y, BF16))
        return [Desc(Dims(shape), of, LINEAR, 1.0) for shape, of in tensors]

    assert driver.lib.driver_shape_change(made, array(described(BF16)), 4) == 0, driver.messages()
    assert driver.lib.driver_shape_change(made, array(described(HALF)), 4) == 1
    assert "input 'x': expected linear format and BF16; got format 0 and type 1" in driver.messages()
    assert driver.lib.driver_shape_change(made, array(tensors(*SHAPES)), 6) == 1
    assert "expected 4 inputs (x, weight, weight_scale, bias) and 1 output, got 6 and 1" in driver.messages()
    driver.lib.driver_destroy(made)
    either = driver.create(mode_set=WEIGHT_ONLY | DYNAMIC)
    descs = tensors((2, 1024, 640), ROW_SCALE, WEIGHT, SCALE)
    assert driver.lib.driver_shape_change(either, array(descs), 4) == 0, driver.messages()
    assert driver.lib.driver_shape_change(either, array(tensors(*SHAPES[:4])), 4) == 1
    assert "input 'x': expected shape [2, 1024, 640]" in driver.messages()
    driver.lib.driver_destroy(either)


QUANTISED = ("x", "row_scale", "weight", "weight_scale", "out_factor", "out_offset", "timestep", "y_scale")


def quantising(*shapes: Sequence[int]) -> list[Desc]:
    """Descriptions of the inputs of QUANTISED and of both outputs; changed from the last on."""
    of = [X, ROW_SCALE, WEIGHT, SCALE, SCALE, SCALE, (2,), (16,)]
    of[len(of) - len(shapes) :] = shapes
    kinds = (INT32, FLOAT, INT32, *[FLOAT] * 5)
    outputs = (((2, 1024, 160), INT32), (ROW_SCALE, FLOAT))
    return [Desc(Dims(shape), kind, LINEAR, 1.0) for shape, kind in (*zip(of, kinds, strict=True), *outputs)]


def test_quantised_rows_for_the_next_layer(driver: Driver) -> None:
    driver.messages()
    given = {"mode_set": 12, "activation": GELU, "quantised": 1, "out_factor": 1, "out_offset": 1, "timestep": 1}
    made = driver.create(**given)
    copies_read_back(driver, made, {"serialization_version": 3} | DEFAULTS | given)
    assert driver.lib.driver_shape_change(made, array(quantising()), 8) == 0, driver.messages()
    types = (ctypes.c_int32 * 2)()
    assert driver.lib.driver_output_type(made, (ctypes.c_int32 * 8)(INT32), 8, types) == 0
    assert list(types) == [INT32, FLOAT]
    exprs, out = (DimsExprs * 8)(), (DimsExprs * 2)()
    exprs[0].nb, exprs[0].d[:3] = 3, [100, 101, 320]
    exprs[2].nb, exprs[2].d[:2] = 2, [640, 320]
    assert driver.lib.driver_output_shape(made, exprs, 8, out) == 0
    assert [list(of.d[: of.nb]) for of in out] == [[100, 101, 160], [100, 101, 1]]
    for shapes, said in (
        (((8,),), None),
        (((2, 1), (16,)), "input 'timestep': expected shape [2] from x, weight and the tables, got [2, 1]"),
        (((3,), (16,)), "rows: expected as many of each of 3 samples, got 2048 in all"),
        (((320,), (2,), (16,)), "input 'out_offset': expected shape [640] from x, weight and the tables, got [320]"),
    ):
        assert driver.lib.driver_shape_change(made, array(quantising(*shapes)), 8) == (said is not None)
        assert (said or "") in driver.messages()
    assert driver.lib.driver_shape_change(made, array(tensors(*SHAPES[:4])), 4) == 1
    said = f"expected 8 inputs ({', '.join(QUANTISED)}) and 2 outputs (payload, row_scale), got 4 and 2"
    assert said in driver.messages()
    driver.lib.driver_destroy(made)


@pytest.mark.parametrize(
    ("attributes", "shapes", "said"),
    [
        ({"mode_set": 6}, (), "mode_set: expected a sum of 4 (dynamic) and 8 (static) where quantised rows are wanted"),
        ({"timestep": 0}, (), "attribute 'timestep': expected 1 with tables of 16 bins, got 0"),
    ],
)
def test_quantised_rows_that_cannot_be(driver: Driver, attributes: dict, shapes: tuple, said: str) -> None:
    given = {"mode_set": 12, "quantised": 1, "out_factor": 1, "out_offset": 1, "timestep": 1} | attributes
    made = driver.create(**given)
    descs = quantising(*shapes)
    if not given["timestep"]:
        del descs[6]
    if given["mode_set"] & WEIGHT_ONLY:
        descs[0].dims = Dims((2, 1024, 640))
    assert driver.lib.driver_shape_change(made, array(descs), len(descs) - 2) == 1
    assert said in driver.messages()
    driver.lib.driver_destroy(made)


CHANGES = {"mode_set": STATIC, "bias": 1, "residual": 1, "changes": 1}


def test_deltas_are_added_to_what_the_layer_gave(driver: Driver) -> None:
    driver.messages()
    for copy in copies_read_back(driver, driver.create(**CHANGES), {"serialization_version": 3} | DEFAULTS | CHANGES):
        assert driver.lib.driver_shape_change(copy, array(tensors(*SHAPES)), 6) == 0, driver.messages()


@pytest.mark.parametrize(
    ("attributes", "descs", "said"),
    [
        ({"residual": 0}, tensors(*SHAPES[:5]), "attribute 'residual': expected 1 with changes, what the layer gave a"),
        ({"mode_set": 12}, tensors(*SHAPES), "mode_set: expected 8 (static) where rows are changes, got 12"),
        ({"activation": GELU}, tensors(*SHAPES), "activation: expected 0 (none) where rows are changes, got 2"),
        (
            {"quantised": 1},
            [*tensors(*SHAPES)[:-1], *quantising((1,))[7:]],
            "out_table.mode_set: expected 0 (none) where rows are changes, got 8",
        ),
    ],
    ids=["no residual", "modes", "activation", "quantised"],
)
def test_deltas_that_cannot_be(driver: Driver, attributes: dict, descs: list[Desc], said: str) -> None:
    made = driver.create(**CHANGES | attributes)
    outputs = 1 + attributes.get("quantised", 0)
    assert driver.lib.driver_shape_change(made, array(descs), len(descs) - outputs) == 1
    assert said in driver.messages()
    driver.lib.driver_destroy(made)


def test_addresses_are_checked_before_the_device(driver: Driver, plugins: list[ctypes.c_void_p]) -> None:
    descs = array(tensors(*of(1, 4)))
    memory = ctypes.create_string_buffer(1024)
    start = ctypes.addressof(memory) + -ctypes.addressof(memory) % 16
    names, right = (*NAMES, "y"), [start + 128 * i for i in range(7)]

    def refusal(**changed: int | None) -> str:
        """What is said of these addresses of inputs and output."""
        given = list((dict(zip(names, right, strict=True)) | changed).values())
        inputs, outputs = (ctypes.c_void_p * 6)(*given[:6]), (ctypes.c_void_p * 1)(*given[6:])
        assert driver.lib.driver_enqueue(plugins[0], descs, 6, inputs, outputs, None) == 1
        return driver.messages()

    assert "got 0 and 1" in refusal()  # before any shapes are known
    assert driver.lib.driver_shape_change(plugins[0], descs, 6) == 0, driver.messages()
    for name, place in zip(names, right, strict=True):
        assert f"{name}: expected a pointer aligned to 16 bytes, got {place + 8:#x}" in refusal(**{name: place + 8})
        if name not in ("bias", "residual"):
            assert f"{name}: expected a device pointer, got null" in refusal(**{name: None})
