"""The plugins as plugin_driver.cpp calls them, the way TensorRT does, without TensorRT and without a GPU."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from support import REPOSITORY

from trtconvert.library import library_path

FLOAT, HALF, INT32, BOOL, BF16 = 0, 1, 3, 4, 7
FIELD_FLOAT32, FIELD_FLOAT64, FIELD_INT32, FIELD_CHAR, FIELD_INT64 = 1, 2, 5, 6, 10
BUILD, RUNTIME = 0, 1
LINEAR, CHW2, HWC8 = 0, 1, 2


class Dims(ctypes.Structure):
    _fields_ = [("nb", ctypes.c_int32), ("d", ctypes.c_int64 * 8)]

    def __init__(self, shape: Sequence[int] = ()) -> None:
        super().__init__(len(shape), (ctypes.c_int64 * 8)(*shape))


class Desc(ctypes.Structure):
    _fields_ = [("dims", Dims), ("type", ctypes.c_int32), ("format", ctypes.c_int32), ("scale", ctypes.c_float)]


class DynamicDesc(ctypes.Structure):
    _fields_ = [("desc", Desc), ("min", Dims), ("max", Dims), ("opt", Dims)]


class DimsExprs(ctypes.Structure):
    _fields_ = [("nb", ctypes.c_int32), ("d", ctypes.c_void_p * 8)]


class Field(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p),
        ("data", ctypes.c_void_p),
        ("type", ctypes.c_int32),
        ("length", ctypes.c_int32),
    ]


class Fields(ctypes.Structure):
    _fields_ = [("count", ctypes.c_int32), ("fields", ctypes.POINTER(Field))]


class Driver:
    """The compiled driver with a plugin of the loaded library. Keeps the memory of fields alive for as long as it lives."""

    def __init__(self, path: Path, plugin: str) -> None:
        self.lib = ctypes.CDLL(str(path))
        for name in ("open", "create", "clone", "attach"):
            getattr(self.lib, f"driver_{name}").restype = ctypes.c_void_p
        self.lib.driver_take_messages.restype = ctypes.c_char_p
        self.lib.driver_fields.restype = ctypes.POINTER(Fields)
        self.lib.driver_supports.restype = ctypes.c_bool
        self.lib.driver_workspace.restype = ctypes.c_size_t
        library = library_path()
        assert library is not None, "expected the shared library, got none; 'pip install .' builds it"
        self.creator = ctypes.c_void_p(self.lib.driver_open(str(library).encode(), plugin.encode()))
        assert self.creator, self.messages()
        self.kept: list[object] = []

    def messages(self) -> str:
        return self.lib.driver_take_messages().decode()

    def create(self, phase: int = BUILD, **attributes: object) -> ctypes.c_void_p:
        fields = [self.field(name, value) for name, value in attributes.items()]
        return self.create_from(Fields(len(fields), (Field * len(fields))(*fields)), phase)

    def create_from(self, fields: Fields, phase: int) -> ctypes.c_void_p:
        return ctypes.c_void_p(self.lib.driver_create(self.creator, ctypes.byref(fields), phase))

    def field(self, name: str, value: object) -> Field:
        """A plugin field as TensorRT's ONNX parser makes it; a tuple (type, length, data) makes any other."""
        if isinstance(value, tuple):
            kind, length, data = value
        elif isinstance(value, str):
            kind, length, data = FIELD_CHAR, len(value), ctypes.create_string_buffer(value.encode())
        elif isinstance(value, float):
            kind, length, data = FIELD_FLOAT32, 1, ctypes.c_float(value)
        else:
            kind, length, data = FIELD_INT32, 1, ctypes.c_int32(value)
        self.kept.append(data)
        address = None if data is None else ctypes.cast(ctypes.byref(data), ctypes.c_void_p)
        return Field(name.encode(), address, kind, length)

    def serialised(self, plugin: ctypes.c_void_p) -> dict[str, object]:
        """The fields of a plugin, read back."""
        collection = self.lib.driver_fields(plugin).contents
        values: dict[str, object] = {}
        for field in collection.fields[: collection.count]:
            pointer = ctypes.c_void_p(field.data)
            if field.type == FIELD_CHAR:
                value: object = ctypes.string_at(pointer, field.length).decode()
            elif field.type == FIELD_FLOAT32:
                value = ctypes.cast(pointer, ctypes.POINTER(ctypes.c_float))[0]
            else:
                assert field.type == FIELD_INT32
                value = ctypes.cast(pointer, ctypes.POINTER(ctypes.c_int32))[0]
            values[field.name.decode()] = value
        return values


def dynamic(smallest: list[Desc], largest: list[Desc]) -> ctypes.Array[DynamicDesc]:
    array = (DynamicDesc * len(smallest))()
    for slot, low, high in zip(array, smallest, largest, strict=True):
        slot.desc, slot.min, slot.max, slot.opt = low, low.dims, high.dims, low.dims
    return array


def array(descs: list[Desc]) -> ctypes.Array[Desc]:
    return (Desc * len(descs))(*descs)


def check_types_and_formats(
    driver: Driver, plugin: ctypes.c_void_p, described: Callable[[int], list[Desc]], names: Sequence[str]
) -> None:
    """FP16 and BF16 are taken, as x has them, in the formats that are described and in no others.

    Args:
        described: inputs and outputs of a type, as the plugin takes them.
        names: of the inputs; x is the first.
    """
    right, inputs = described(HALF), len(names)
    for kind, taken in ((HALF, True), (BF16, True), (FLOAT, False), (INT32, False)):
        descs = described(kind)
        together = dynamic(descs, descs)
        for position in range(len(descs)):
            assert bool(driver.lib.driver_supports(plugin, position, together, inputs)) == taken
    for position, wanted in enumerate(desc.format for desc in right):
        others = [(HALF, form) for form in (LINEAR, CHW2, HWC8) if form != wanted]
        for kind, form in ((BF16, wanted), (FLOAT, wanted), *others):
            descs = described(HALF)
            descs[position].type, descs[position].format = kind, form
            supported = driver.lib.driver_supports(plugin, position, dynamic(descs, descs), inputs)
            assert supported == (position == 0 and kind == BF16)  # the others follow x
            if position < inputs and not supported:
                assert driver.lib.driver_shape_change(plugin, array(descs), inputs) == 1
                name = "HWC8" if wanted == HWC8 else "linear"
                named = f"input '{names[position]}': expected {name} format and FP16 or BF16, as x"
                assert f"{named}; got format {form} and type {kind}" in driver.messages()


def copies_read_back(driver: Driver, plugin: ctypes.c_void_p, expected: dict[str, object]) -> list[ctypes.c_void_p]:
    """Returns a clone and an attached plugin, made from the fields that an engine keeps; both have the expected fields."""
    assert driver.serialised(plugin) == expected
    again = driver.create_from(driver.lib.driver_fields(plugin).contents, RUNTIME)
    copies = [ctypes.c_void_p(copy(again)) for copy in (driver.lib.driver_clone, driver.lib.driver_attach)]
    driver.lib.driver_destroy(again)
    assert [driver.serialised(copy) for copy in copies] == [expected] * 2
    return copies


def check_shapes_are_refused(
    driver: Driver, plugin: ctypes.c_void_p, descs: list[Desc], good: list[Desc], inputs: int, said: str
) -> None:
    """At run time, and as the smallest or the largest of a profile with good ones."""
    assert driver.lib.driver_shape_change(plugin, array(descs), inputs) == 1
    assert said in driver.messages()
    for smallest, largest in ((descs, good), (good, descs)):
        assert driver.lib.driver_configure(plugin, dynamic(smallest, largest), inputs) == 1
        assert said in driver.messages()


def check_number_of_inputs_is_refused(
    driver: Driver, plugin: ctypes.c_void_p, descs: list[Desc], inputs: int, said: str
) -> None:
    """Wherever a plugin of one output is told it.

    Args:
        descs: of inputs and outputs as it takes them, twice as many as are wanted at most.
    """
    descs = (descs * 2)[: inputs + 1]
    together, exprs = dynamic(descs, descs), (DimsExprs * inputs)()
    refusals: list[Callable[[], bool]] = [
        lambda: driver.lib.driver_shape_change(plugin, array(descs), inputs) == 1,
        lambda: driver.lib.driver_configure(plugin, together, inputs) == 1,
        lambda: not driver.lib.driver_supports(plugin, 0, together, inputs),
        lambda: driver.lib.driver_output_type(plugin, (ctypes.c_int32 * inputs)(), inputs, ctypes.c_int32()) == 1,
        lambda: driver.lib.driver_output_shape(plugin, exprs, inputs, ctypes.byref(DimsExprs())) == 1,
    ]
    for refused in refusals:
        assert refused()
        assert f"{said}, got {inputs} and 1" in driver.messages()


def compiled_driver(folder: Path, major: int) -> Path:
    """The library of the driver that stands for one major version of TensorRT."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    headers = REPOSITORY / "plugins"
    source = Path(__file__).with_name("plugin_driver.cpp")
    target = folder / f"libdriver{major}.so"
    # fmt: off
    subprocess.run(
        ["g++", "-std=c++17", "-O1", "-shared", "-fPIC", "-fvisibility-inlines-hidden", f"-I{headers}",
         f"-DTENSORRT_MAJOR={major}", source, "-o", target, "-ldl"],
        check=True,
    )
    # fmt: on
    return target
