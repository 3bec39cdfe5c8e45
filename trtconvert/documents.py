"""Reads JSON, YAML and safetensors headers from users, within limits of size. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

from trtconvert.errors import first_line
from trtconvert.files import open_regular, read_limited

PIPELINE_INDEX = "model_index.json"
"""The index file in a diffusers pipeline's folder."""

JSON_BYTES = 64 * 2**20
"""Limit of a JSON file. The manifest of a model with thousands of layers has a few megabytes."""

JSON_DEPTH = 64
"""Limit of nested brackets. Recipes and configurations have some ten levels; Python's parser fails near a thousand."""

HEADER_BYTES = 100_000_000
"""Limit of a safetensors header, as the format states it."""

YAML_CHARACTERS, YAML_NODES, YAML_DEPTH = 256 * 2**10, 10_000, 32
"""Limits of a YAML text. Nodes are counted with every alias replaced by its value."""

YAML_NUMBER = 100
"""Limit of a number's characters: Python refuses to print longer numbers that it reads."""

_STANDARD = "tag:yaml.org,2002:"
_STANDARD_TAGS = {
    "mapping": ("map",),
    "sequence": ("seq",),
    "scalar": ("str", "int", "float", "bool", "null", "timestamp", "merge"),
}
"""YAML's own tags by the kind of a node."""

PLAIN_TYPES = ("BOOL", "U8", "I8", "I16", "I32", "I64", "F16", "BF16", "F32", "F64")
"""Tensor types that all of torch's operators take, by their names in safetensors."""


# JSON -----------------------------------------------------------------------------------------------------------------


def read_json(path: Path, limit: int = JSON_BYTES) -> Any:
    """Reads the JSON value in a regular file.

    Raises:
        OSError: the file cannot be read, or is larger than `limit` bytes.
        ValueError: see `parse_json`.
    """
    return parse_json(read_limited(path, limit))


def parse_json(text: str | bytes) -> Any:
    """Reads a JSON text.

    Raises:
        ValueError: the text is not JSON in UTF-8, has a key twice in one object, nests brackets deeper than `JSON_DEPTH`, or
            holds a lone surrogate or NUL, which paths cannot have.
    """
    try:
        value = json.loads(text if isinstance(text, str) else text.decode("utf-8"), object_pairs_hook=_without_twins)
    except RecursionError:
        raise ValueError(f"brackets more than {JSON_DEPTH} deep within each other") from None
    left: list[tuple[Any, int]] = [(value, 0)]
    while left:
        part, depth = left.pop()
        if isinstance(part, str):
            if flaw := text_flaw(part):
                raise ValueError(flaw)
        elif isinstance(part, (dict, list)):
            if depth == JSON_DEPTH:
                raise ValueError(f"brackets more than {JSON_DEPTH} deep within each other")
            left += ((x, depth + 1) for x in (part if isinstance(part, list) else (*part, *part.values())))
    return value


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twin = next(name for name in found if names.count(name) > 1)
        raise ValueError(f"the key {twin!r} twice in one object")
    return found


def text_flaw(text: str) -> str:
    """Returns why a text can be neither printed nor a path; empty if the text can."""
    if "\0" in text:
        flaw = "a NUL character"
    elif any("\ud800" <= character <= "\udfff" for character in text):
        flaw = "half of a surrogate pair"
    else:
        return ""
    return f"{flaw} in {text[:80]!a}"


def safetensors_header(path: Path) -> dict[str, Any]:
    """Reads the header of a regular safetensors file: the entry of each tensor, and `__metadata__`.

    The header's length stands in the first 8 bytes, and the header follows in JSON. The safetensors library checks the tensors'
    offsets, and of two tensors with one name it takes the last.

    Raises:
        OSError: the file cannot be read.
        ValueError: the header is cut off, too large, not a JSON object, or names a tensor twice.
    """
    with open_regular(path) as file:
        length = int.from_bytes(file.read(8), "little")
        if length > HEADER_BYTES:
            raise ValueError(f"a header of {length} bytes; the limit is {HEADER_BYTES}")
        text = file.read(length)
    if len(text) < length or not length:
        raise ValueError("a header that is cut off")
    header = parse_json(text)
    if not isinstance(header, dict):
        raise ValueError("a header that is not a JSON object")
    return header


def require_plain_types(header: Mapping[str, Any], names: Container[str] | None = None) -> None:
    """Checks the types of a safetensors file's tensors.

    Args:
        header: see `safetensors_header`.
        names: the tensors to check; all by default.
    Raises:
        ValueError: a tensor has a type that not all operators take.
    """
    for name, entry in header.items():
        if name != "__metadata__" and (names is None or name in names):
            dtype = entry.get("dtype") if isinstance(entry, dict) else entry
            if dtype not in PLAIN_TYPES:
                raise ValueError(f"{name} has the type {dtype}; supported are {', '.join(PLAIN_TYPES)}")


# YAML -----------------------------------------------------------------------------------------------------------------


class YamlError(Exception):
    """A text that cannot be read as YAML, with the fields of `trtconvert.errors.TrtconvertError`.

    Attributes:
        line: line of the text, counted from 1; None if the error concerns the whole text.
    """

    def __init__(self, line: int | None, problem: str, *, expected: str, got: str, remedy: str) -> None:
        super().__init__(problem)
        self.line, self.problem, self.expected, self.got, self.remedy = line, problem, expected, got, remedy


def parse_yaml(text: str) -> Any:
    """Reads a YAML text with ruamel: its mappings and lists know their lines.

    Raises:
        YamlError: the text is not YAML, is larger than the limits, or holds a value that JSON cannot hold.
    """
    from ruamel.yaml import YAML
    from ruamel.yaml import YAMLError as ParserError

    if len(text) > YAML_CHARACTERS:
        raise _too_much(None, f"{len(text)} characters; the limit is {YAML_CHARACTERS}")
    try:
        if (root := YAML().compose(text)) is not None:
            _check_nodes(root, YAML().constructor)
        return YAML().load(text)
    except ParserError as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        line = mark.line + 1 if mark else None
        raise _not_yaml(line, str(problem).splitlines()[0] if problem else first_line(error)) from error
    except RecursionError:
        raise _too_much(None, "brackets too deep within each other") from None
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:  # ruamel raises any of these
        raise _not_yaml(None, first_line(error)) from error


def _not_yaml(line: int | None, got: str) -> YamlError:
    return YamlError(
        line,
        "not valid YAML",
        expected="YAML",
        got=got,
        remedy="correct the line: check the indentation, the space after ':', and quotes",
    )


def _too_much(line: int | None, got: str) -> YamlError:
    return YamlError(
        line,
        "the text is too large",
        expected=f"up to {YAML_NODES} keys and values, {YAML_DEPTH} levels of brackets and indentation",
        got=got,
        remedy="remove repetitions and aliases, and move long lists such as prompts into files of their own",
    )


def _check_nodes(root: Any, constructor: Any) -> None:
    """Checks composed nodes before ruamel makes values: nested keys would take it exponential time."""
    left, count = [(root, 0)], 0
    while left:
        node, depth = left.pop()
        line, count = node.start_mark.line + 1, count + 1
        if depth > YAML_DEPTH or count > YAML_NODES:
            raise _too_much(
                line, f"over {YAML_NODES} keys and values, or over {YAML_DEPTH} levels, with aliases replaced"
            )
        if flaw := _flaw(node, constructor):
            raise YamlError(
                line,
                "a value cannot be read",
                expected="text, numbers, true, false, null, lists and mappings, with text as keys",
                got=flaw,
                remedy="correct the value, remove its tag, or put it in quotes",
            )
        if isinstance(node.value, list):
            parts = (part for item in node.value for part in (item if isinstance(item, tuple) else (item,)))
            left += ((part, depth + 1) for part in parts)


def _flaw(node: Any, constructor: Any) -> str:
    tag = str(node.tag)
    kind = tag.removeprefix(_STANDARD)
    if kind == tag or kind not in _STANDARD_TAGS[node.id]:
        return f"the tag {tag.replace(_STANDARD, '!!')}"
    if isinstance(node.value, list):
        keys = [item[0] for item in node.value if isinstance(item, tuple)]
        return "a list or a mapping as a key" if any(isinstance(key.value, list) for key in keys) else ""
    if flaw := text_flaw(node.value):
        return flaw
    if kind in ("int", "float") and len(node.value) > YAML_NUMBER:
        return f"a number of {len(node.value)} characters"
    try:
        constructor.construct_document(node)
    except (ValueError, LookupError) as error:  # 2026-02-30, !!int x
        return f"{node.value[:80]}: {first_line(error)}"
    return ""
