"""Structs of the C API in Python: the module equals the headers, and its structs the library's."""

from __future__ import annotations

import ctypes
import importlib.util
import re
from pathlib import Path

import pytest
from support import REPOSITORY

from trtconvert import c_structs as made
from trtconvert.library import library_path, load_library

_SPEC = importlib.util.spec_from_file_location("c_structs_tool", REPOSITORY / "tools" / "c_structs.py")
assert _SPEC is not None and _SPEC.loader is not None
tool = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(tool)

CHECKED = {
    function: struct
    for function, struct in (
        (re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name.removesuffix("Params")).lower(), struct)
        for name, struct in vars(made).items()
        if name.endswith("Params")
    )
}
"""Structs by the name of their functions in the C API."""


def header(folder: Path, text: str) -> Path:
    place = folder / "plugin" / "include" / "trtconvert" / "some.h"
    place.parent.mkdir(parents=True)
    place.write_text(text, encoding="utf-8")
    return folder


def test_the_module_is_made_of_the_headers():
    assert tool.MODULE.read_text(encoding="utf-8") == tool.module(), "python tools/c_structs.py"


def test_fields_of_all_kinds_are_read(tmp_path):
    text = """
        #define TRTCONVERT_SIZE 3
        typedef struct { int64_t a, b[2]; } TrtConvertInner;  /* struct in a comment; */
        typedef struct {
          uint32_t first;        /* a comment; with a semicolon */
          const float* pointer;
          TrtConvertInner inner[TRTCONVERT_SIZE], last;
          size_t size;
        } TrtConvertOuter;
    """
    namespace = dict[str, type[ctypes.Structure]]()
    exec(tool.module(header(tmp_path, text.replace("        #", "#"))), namespace)
    inner, outer = namespace["Inner"], namespace["Outer"]
    assert inner._fields_ == [("a", ctypes.c_int64), ("b", ctypes.c_int64 * 2)]
    assert outer._fields_ == [
        ("first", ctypes.c_uint32),
        ("pointer", ctypes.c_void_p),
        ("inner", inner * 3),
        ("last", inner),
        ("size", ctypes.c_size_t),
    ]


@pytest.mark.parametrize(
    ("text", "got"),
    [
        ("typedef struct { int x; } TrtConvertA;", "'int x'"),
        ("typedef struct { int32_t x : 3; } TrtConvertA;", "'int32_t x : 3'"),
        ("typedef struct { int32_t x[SIZE]; } TrtConvertA;", r"'int32_t x\[SIZE\]'"),
        ("typedef struct { void** x; } TrtConvertA;", r"'void\*\* x'"),
        ("typedef struct { void* x, y; } TrtConvertA;", r"'void\* x, y'"),
        ("typedef struct { void (*call)(void); } TrtConvertA;", "'void "),
        ("typedef struct { TrtConvertB x; } TrtConvertA;", "'TrtConvertB x'"),
        ("typedef struct {\n#ifdef A\n  int32_t x;\n#endif\n} TrtConvertA;", "'#ifdef A int32_t x'"),
        ("typedef struct { struct { int32_t x; } y; } TrtConvertA;", "'struct'"),
        ("typedef union { int32_t x; } TrtConvertA;", "'union'"),
        ("struct A { int32_t x; };", "'struct'"),
        ("typedef struct { int32_t x; } __attribute__((packed)) TrtConvertA;", "'struct'"),
        ("#pragma pack(1)", "'#pragma'"),
        ("typedef struct { int32_t x; } TrtConvertA;\ntypedef struct { int32_t y; } TrtConvertA;", "another one"),
    ],
)
def test_structs_of_other_kinds_are_refused(tmp_path, text, got):
    with pytest.raises(ValueError, match=rf"^some\.h: expected .*, got .*{got}"):
        tool.module(header(tmp_path, text))


@pytest.mark.skipif(library_path() is None, reason="no library is installed; 'pip install .' builds it")
@pytest.mark.parametrize("function", CHECKED)
def test_the_library_has_structs_of_these_sizes_and_versions(function):
    message = ctypes.create_string_buffer(512)
    struct = CHECKED[function]
    getattr(load_library(), f"trtconvert_{function}_check")(ctypes.byref(struct()), message, ctypes.c_size_t(512))
    version = getattr(made, f"{function.upper()}_VERSION")
    assert f"expected version {version} of {ctypes.sizeof(struct)} bytes" in message.value.decode()
