"""The plugin of residual connections and their norms, without TensorRT and without a GPU; what it computes: tests/gpu."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import pytest
from plugin_driver import (
    BF16,
    FIELD_FLOAT64,
    FIELD_INT32,
    HALF,
    LINEAR,
    Desc,
    Dims,
    DimsExprs,
    Driver,
    array,
    check_shapes_are_refused,
    check_types_and_formats,
    copies_read_back,
    dynamic,
)

X, WEIGHT = (2, 1024, 1280), (1280,)
WRAPS = 1 << 32
"""Is 0 in 32 bits."""
PLUGIN, MADE = "ResidualNorm", ({"epsilon": 0.5},)
"""What `driver` and `plugins` of conftest.py make."""


def tensors(*shapes: Sequence[int], kind: int = HALF) -> list[Desc]:
    """Descriptions of x, residual, weight, bias, and of the two outputs, which have the shape of the first."""
    shapes = shapes or (X, X, WEIGHT, WEIGHT)
    return [Desc(Dims(shape), kind, LINEAR, 1.0) for shape in (*shapes, shapes[0], shapes[0])]


def of_x(*x: int) -> tuple[Sequence[int], ...]:
    """Shapes of the inputs that belong together."""
    return x, x, x[-1:], x[-1:]


def test_attributes_are_serialised_and_read_back(driver: Driver, plugin: ctypes.c_void_p) -> None:
    expected = {"serialization_version": 2, "epsilon": 0.5, "starts_early": 0}
    copies_read_back(driver, plugin, expected)
    assert driver.serialised(driver.create()) == expected | {"epsilon": pytest.approx(1e-5)}
    assert driver.serialised(driver.create(starts_early=1))["starts_early"] == 1
    wide = driver.create(epsilon=(FIELD_FLOAT64, 1, ctypes.c_double(0.25)))
    assert driver.serialised(wide)["epsilon"] == 0.25


@pytest.mark.parametrize(
    ("phase", "attributes", "said"),
    [
        (0, {"epsilon": -1e-5}, "expected a finite number from 0"),
        (0, {"epsilon": float("nan")}, "got nan"),
        (0, {"epsilon": (FIELD_INT32, 1, ctypes.c_int32(1))}, "expected one floating-point number"),
        (0, {"starts_early": 2}, "attribute 'starts_early': expected 0 or 1, got 2"),
        (0, {"axis": 1}, "expected one of the attributes epsilon and starts_early, got 'axis'; remove it"),
        (0, {"serialization_version": 1}, "got 'serialization_version'"),
        (1, {"epsilon": 1e-5}, "expected the 3 fields that this plugin serialises, got 1"),
        (1, {"epsilon": 1e-5, "serialization_version": 2}, "expected the 3 fields that this plugin serialises, got 2"),
        (1, {"serialization_version": 1}, "expected the 2 fields that this plugin serialises, got 1"),
        (1, {"epsilon": 1e-5, "serialization_version": 3}, "serialization version 3, this plugin reads 1 to 2"),
    ],
)
def test_bad_attributes_are_refused_with_a_reason(driver: Driver, phase: int, attributes: dict, said: str) -> None:
    driver.messages()
    assert not driver.create(phase, **attributes)
    messages = driver.messages()
    assert said in messages and "the plugin ResidualNorm of layer 'layer' was not made" in messages


def test_engines_of_an_earlier_version_are_read(driver: Driver) -> None:
    """The field that came later has its default there, and is not among the engine's."""
    made = driver.create(1, serialization_version=1, epsilon=0.5)
    assert driver.serialised(made) == {"serialization_version": 2, "epsilon": 0.5, "starts_early": 0}
    assert not driver.create(1, serialization_version=1, epsilon=0.5, starts_early=1)
    assert "expected the 2 fields that this plugin serialises, got 3" in driver.messages()


def test_types_and_formats(driver: Driver, plugin: ctypes.c_void_p) -> None:
    names = ("x", "residual", "weight", "bias")
    check_types_and_formats(driver, plugin, lambda kind: tensors(kind=kind), names)


def test_outputs_are_as_x(driver: Driver, plugin: ctypes.c_void_p) -> None:
    types = (ctypes.c_int32 * 2)()
    assert driver.lib.driver_output_type(plugin, (ctypes.c_int32 * 4)(*[BF16] * 4), 4, types) == 0
    assert list(types) == [BF16, BF16]
    inputs, outputs = (DimsExprs * 4)(), (DimsExprs * 2)()
    inputs[0].nb = 3
    inputs[0].d[:3] = [0x10, 0x20, 0x30]
    assert driver.lib.driver_output_shape(plugin, inputs, 4, outputs) == 0
    assert [(out.nb, list(out.d)[:3]) for out in outputs] == [(3, [0x10, 0x20, 0x30])] * 2


def test_shapes_that_fit(driver: Driver, plugin: ctypes.c_void_p) -> None:
    for shape in (X, (8,), (5, 4096), (1, 2, 3, 4, 640), (1 << 31, 8), (1 << 16, 1, 1 << 15, 8)):
        descs = tensors(*of_x(*shape))
        assert driver.lib.driver_shape_change(plugin, array(descs), 4) == 0, driver.messages()
        assert driver.lib.driver_configure(plugin, dynamic(descs, descs), 4) == 0, driver.messages()


@pytest.mark.parametrize(
    ("shapes", "said"),
    [
        (
            (X, (2, 1024, 640), WEIGHT, WEIGHT),
            "input 'residual': expected shape [2, 1024, 1280] from x, got [2, 1024, 640]",
        ),
        ((X, X, (640,), WEIGHT), "input 'weight': expected shape [1280] from x, got [640]"),
        ((X, X, WEIGHT, (1, 1280)), "input 'bias': expected shape [1280] from x, got [1, 1280]"),
        (((), (), (1,), (1,)), "input 'x': expected one dimension or more"),
        (of_x(2, 12), "channels: expected 8..4096 in steps of 8, got 12"),
        (of_x(2, 4104), "channels: expected 8..4096 in steps of 8, got 4104"),
        (of_x(1, WRAPS + 8), "channels: expected 8..4096 in steps of 8, got 2147483647"),
        (of_x(2, -8), "channels: expected 8..4096 in steps of 8, got -8"),
        (of_x(2, 8 - WRAPS), "channels: expected 8..4096 in steps of 8, got -2147483648"),
        (of_x(0, 8), "rows: expected 1..2^31, got 0"),
        (of_x((1 << 31) + 1, 8), "rows: expected 1..2^31, got"),
        (of_x(WRAPS, 8), "rows: expected 1..2^31, got"),
        (of_x(WRAPS, WRAPS, 1, 8), "rows: expected 1..2^31, got"),
        (of_x((1 << 62) + 1, 4, 8), "rows: expected 1..2^31, got"),
        (of_x((1 << 63) - 1, 8), "rows: expected 1..2^31, got"),
        (of_x(-1, 8), "rows: expected 1..2^31, got"),
        (of_x(-1, -1, 8), "rows: expected 1..2^31, got"),
    ],
    ids=str,
)
def test_shapes_that_do_not_fit_are_refused(driver: Driver, plugin: ctypes.c_void_p, shapes: tuple, said: str) -> None:
    check_shapes_are_refused(driver, plugin, tensors(*shapes), tensors(), 4, said)


def test_other_numbers_of_inputs_are_refused(driver: Driver, plugin: ctypes.c_void_p) -> None:
    descs = tensors()
    assert driver.lib.driver_shape_change(plugin, array(descs), 3) == 1
    assert "expected 4 inputs (x, residual, weight, bias) and 2 outputs (sum, normed), got 3 and 2" in driver.messages()


def test_addresses_are_checked_before_the_device(driver: Driver, plugin: ctypes.c_void_p) -> None:
    descs = array(tensors(*of_x(1, 8)))
    memory = ctypes.create_string_buffer(256)
    start = ctypes.addressof(memory) + -ctypes.addressof(memory) % 16
    names, right = ("x", "residual", "weight", "bias", "sum", "normed"), [start + 16 * i for i in range(6)]

    def refusal(**changed: int | None) -> str:
        """What is said of these addresses of inputs and outputs."""
        given = list((dict(zip(names, right, strict=True)) | changed).values())
        inputs, outputs = (ctypes.c_void_p * 4)(*given[:4]), (ctypes.c_void_p * 2)(*given[4:])
        assert driver.lib.driver_enqueue(plugin, descs, 4, inputs, outputs, None) == 1
        return driver.messages()

    assert "got 0 and 2" in refusal()  # before any shapes are known
    assert driver.lib.driver_shape_change(plugin, descs, 4) == 0, driver.messages()
    for name, place in zip(names, right, strict=True):
        said = f"{name}: expected a pointer aligned to 16 bytes, got {place + 8:#x}"
        assert said in refusal(**{name: place + 8})
        assert f"{name}: expected a device pointer, got null" in refusal(**{name: None})
    said = f"normed: expected another tensor than sum, got both at {right[4]:#x}"
    assert said in refusal(normed=right[4])
