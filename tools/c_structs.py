"""Writes `trtconvert/c_structs.py` from the headers of the C API: `python tools/c_structs.py`.

Reads structs of plain fields, and integer macros. Everything else of a struct is refused: a layout that is read wrongly would
send wrong pointers to the kernels.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
HEADERS = ROOT / "plugins"
MODULE = ROOT / "trtconvert" / "c_structs.py"

_HEAD = '''"""Structs and integer macros of the C API, written by `python tools/c_structs.py`. The headers document the fields."""

from ctypes import Structure, c_float, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
'''
_TYPES = {
    "float": "c_float",
    "int32_t": "c_int32",
    "int64_t": "c_int64",
    "size_t": "c_size_t",
    "uint32_t": "c_uint32",
    "uint64_t": "c_uint64",
}
_COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
_MACRO = re.compile(r"^#define TRTCONVERT_(\w+) (\d+)\s*$", re.MULTILINE)
_STRUCT = re.compile(r"\btypedef struct \{([^{}]*)\} TrtConvert(\w+);")
_LAYOUT = re.compile(r"\b(struct|union|class)\b|#\s*pragma|//")
"""What may lay out memory, or hide it, outside the structs that are read."""
_FIELDS = re.compile(r"(?:const )?(\w+)(\*?) (\w+(?:\[\w+\])?(?:, \w+(?:\[\w+\])?)*)")


def module(folder: Path = HEADERS) -> str:
    """Returns the text of the module for the headers in a folder.

    Raises:
        ValueError: a header has a struct that is not understood.
    """
    headers = sorted(folder.glob("*/include/trtconvert/*.h"))
    texts = {header.name: _COMMENT.sub(" ", header.read_text(encoding="utf-8")) for header in headers}
    macros = {name: int(value) for text in texts.values() for name, value in _MACRO.findall(text)}
    structs = dict[str, str]()
    for header, text in texts.items():
        if found := _LAYOUT.search(_STRUCT.sub("", text)):
            raise ValueError(
                f"{header}: expected `typedef struct {{…}} TrtConvert…;` and no comment by //, got {found[0]!r}"
            )
        for body, name in _STRUCT.findall(text):
            if name in structs:
                raise ValueError(f"{header}: expected one TrtConvert{name}, got another one")
            fields = "".join(
                f'        ("{field}", {kind}),\n' for field, kind in _fields(header, body, structs, macros)
            )
            doc = f'    """TrtConvert{name} of {header}."""\n\n'
            structs[name] = f"class {name}(Structure):\n{doc}    _fields_ = [\n{fields}    ]\n"
    constants = "".join(f"{name} = {value}\n" for name, value in macros.items())
    return "\n\n".join([f"{_HEAD}\n{constants}", *structs.values()])


def _fields(header: str, body: str, structs: dict[str, str], macros: dict[str, int]) -> Iterator[tuple[str, str]]:
    """Yields name and ctypes type of each field. `structs`: names that were read before."""
    *declarations, rest = (" ".join(declaration.split()) for declaration in body.split(";"))
    for declaration in [*declarations, *filter(None, [rest])]:
        found = _FIELDS.fullmatch(declaration)
        given = found[1].removeprefix("TrtConvert") if found else ""
        kind = "c_void_p" if found and found[2] else given if given in structs else _TYPES.get(given)
        if found is None or kind is None or (found[2] and "," in found[3]):
            raise ValueError(f"{header}: expected fields of a known type, or a pointer alone, got {declaration!r}")
        for declared in found[3].split(", "):
            name, _, size = declared.removesuffix("]").partition("[")
            size = size.removeprefix("TRTCONVERT_")
            if size and not size.isdecimal() and size not in macros:
                raise ValueError(f"{header}: expected an array of a known size, got {declaration!r}")
            yield name, f"{kind} * {size}" if size else kind


if __name__ == "__main__":
    MODULE.write_text(module(), encoding="utf-8")
