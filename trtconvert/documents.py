"""JSON, YAML and headers of safetensors as they come from outside: read within limits, before anything in them is expanded, and
without what can be read in two ways. Free of torch."""

from __future__ import annotations

import json
from collections.abc import Container, Iterable, Mapping
from pathlib import Path
from typing import Any

from trtconvert.errors import first_line
from trtconvert.files import open_regular, read_limited

JSON_BYTES = 64 * 2**20
"""Of a file: manifests of models with thousands of layers take a few megabytes."""

JSON_DEPTH = 64
"""Brackets within each other. Recipes and configurations of models have some ten, Python gives up near a thousand."""

HEADER_BYTES = 100_000_000
"""Of a safetensors header: the format's own limit."""

YAML_CHARACTERS, YAML_NODES, YAML_DEPTH = 256 * 2**10, 10_000, 32
"""Of one YAML text. Nodes are counted as written, and again with every alias replaced by what it names. The parser takes half
a second for so many."""

YAML_NUMBER = 100
"""Characters of a number: Python reads larger ones, and refuses to print them."""

PLAIN_TYPES = ("BOOL", "U8", "I8", "I16", "I32", "I64", "F16", "BF16", "F32", "F64")
"""Types of tensors that all of torch's operators take, as safetensors call them."""

_STANDARD = "tag:yaml.org,2002:"
_SCALARS = {_STANDARD + name for name in ("str", "int", "float", "bool", "null", "timestamp", "merge")}
_NUMBERS = {_STANDARD + "int", _STANDARD + "float"}
_MAPPING, _SEQUENCE = _STANDARD + "map", _STANDARD + "seq"


# JSON -----------------------------------------------------------------------------------------------------------------


def read_json(path: Path, limit: int = JSON_BYTES) -> Any:
    """The JSON value in a regular file.

    Raises:
        OSError: the file cannot be read, or is too large.
        ValueError: see `parse_json`.
    """
    return parse_json(read_limited(path, limit))


def parse_json(text: str | bytes) -> Any:
    """
    Raises:
        ValueError: it is no JSON in UTF-8, has a key twice in one object, has brackets too deep within each other, or text
            that is none: lone surrogates, and NUL, which no path can have.
    """
    try:
        value = json.loads(text if isinstance(text, str) else text.decode("utf-8"), object_pairs_hook=_without_twins)
    except RecursionError:
        raise ValueError(f"brackets more than {JSON_DEPTH} deep within each other") from None
    left: list[tuple[Any, int]] = [(value, 0)]
    while left:
        part, depth = left.pop()
        if isinstance(part, str):
            _require_text(part)
        elif isinstance(part, (dict, list)):
            if depth == JSON_DEPTH:
                raise ValueError(f"brackets more than {JSON_DEPTH} deep within each other")
            left += ((x, depth + 1) for x in (part if isinstance(part, list) else (*part, *part.values())))
    return value


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError(f"the key {_first_twin(name for name, _ in pairs)!r} twice in one object")
    return found


def _first_twin(names: Iterable[str]) -> str:
    seen = set[str]()
    return next(name for name in names if name in seen or seen.add(name))


def text_flaw(text: str) -> str:
    """What keeps a text from being written, or from being a path; empty if nothing."""
    if "\0" in text:
        return "a NUL character"
    if any("\ud800" <= character <= "\udfff" for character in text):
        return "half of a surrogate pair, which is no character"
    return ""


def _require_text(text: str) -> None:
    if found := text_flaw(text):
        raise ValueError(f"{found} in {text[:80]!a}")


def safetensors_header(path: Path) -> dict[str, Any]:
    """The header of a regular safetensors file: what it says of each tensor, and `__metadata__`. No tensor is read.

    The library that reads the tensors checks their places; of two with one name it would take the last.

    Source: the description of the format: the header's length in 8 bytes, the header in JSON.

    Raises:
        OSError: the file cannot be read.
        ValueError: the header is not whole, too large, no JSON object, or names a tensor twice.
    """
    with open_regular(path) as file:
        length = int.from_bytes(file.read(8), "little")
        if length > HEADER_BYTES:
            raise ValueError(f"a header of {length} bytes, where {HEADER_BYTES} are the most")
        text = file.read(length)
    if len(text) < length or not length:
        raise ValueError("a header that ends before its end")
    header = parse_json(text)
    if not isinstance(header, dict):
        raise ValueError("a header that is no JSON object")
    return header


def require_plain_types(header: Mapping[str, Any], names: Container[str] | None = None) -> None:
    """
    Args:
        header: see `safetensors_header`; names: of the tensors that shall be read, all by default.
    Raises:
        ValueError: one of them is of a type that not all operators take, or that torch may not have.
    """
    for name, entry in header.items():
        if name != "__metadata__" and (names is None or name in names):
            dtype = entry.get("dtype") if isinstance(entry, dict) else entry
            if dtype not in PLAIN_TYPES:
                raise ValueError(f"{name} is of the type {dtype}, where one of {', '.join(PLAIN_TYPES)} is needed")


# YAML -----------------------------------------------------------------------------------------------------------------


class YamlError(Exception):
    """A text that is not read as YAML, in the terms of `trtconvert.errors.TrtconvertError`.

    Attributes:
        line: where, from 1 up; None where it is the whole.
    """

    def __init__(self, line: int | None, problem: str, *, expected: str, got: str, remedy: str) -> None:
        super().__init__(problem)
        self.line, self.problem, self.expected, self.got, self.remedy = line, problem, expected, got, remedy


def parse_yaml(text: str) -> Any:
    """A YAML text as ruamel reads it: its mappings and lists know their lines.

    Raises:
        YamlError: it is no YAML; it is too large, too deep, or would be with its aliases replaced; an alias stands inside the
            value that it names, where the loader would put null; a key is no single value; a tag stands for a kind of value
            that JSON has not; a value looks like a date or a number and is none; or text is none.
    """
    from ruamel.yaml import YAML
    from ruamel.yaml import YAMLError as ParserError

    if len(text) > YAML_CHARACTERS:
        raise _too_much(None, f"{len(text)} characters, where {YAML_CHARACTERS} are the most")
    try:
        _require_few_events(text)
        if (root := YAML().compose(text)) is not None:
            _Nodes().visit(root)
        return YAML(typ="rt").load(text)
    except ParserError as error:
        mark = getattr(error, "problem_mark", None)
        raise _not_yaml(mark.line + 1 if mark else None, _parser_problem(error)) from error
    # What the checks have not foreseen of a parser that stumbles over its input.
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise _not_yaml(None, first_line(error)) from error


def _not_yaml(line: int | None, got: str) -> YamlError:
    return YamlError(
        line,
        "not valid YAML",
        expected="YAML",
        got=got,
        remedy="correct the line; a wrong indentation or a missing space after ':' is the usual cause",
    )


def _too_much(line: int | None, got: str) -> YamlError:
    return YamlError(
        line,
        "more than is read",
        expected=f"up to {YAML_NODES} keys and values, {YAML_DEPTH} levels of brackets and indentation",
        got=got,
        remedy="leave out what is repeated; long lists, as of prompts, belong into files of their own",
    )


def _parser_problem(error: Exception) -> str:
    """What a YAML parser has found, without the lines that say where."""
    problem = getattr(error, "problem", None)
    return str(problem).splitlines()[0] if problem else first_line(error)


def _require_few_events(text: str) -> None:
    """
    Raises:
        YamlError: there are too many, or they are too deep within each other. The parser goes no further then.
    """
    from ruamel.yaml import YAML
    from ruamel.yaml.events import CollectionEndEvent, CollectionStartEvent

    depth = 0
    for count, event in enumerate(YAML().parse(text)):
        depth += isinstance(event, CollectionStartEvent) - isinstance(event, CollectionEndEvent)
        if depth > YAML_DEPTH:
            raise _too_much(event.start_mark.line + 1, f"brackets in brackets, too many to follow: over {YAML_DEPTH}")
        if count > YAML_NODES:
            raise _too_much(event.start_mark.line + 1, f"over {YAML_NODES} keys and values")


class _Nodes:
    """Checks the nodes of a text, each once however many aliases name it."""

    def __init__(self) -> None:
        from ruamel.yaml import YAML

        self._constructor = YAML().constructor
        self._around: set[int] = set()
        self._measured: dict[int, tuple[int, int]] = {}

    def visit(self, node: Any) -> tuple[int, int]:
        """How many nodes there are in one, and how deep, with every alias replaced.

        Raises:
            YamlError: see `parse_yaml`.
        """
        from ruamel.yaml import ScalarNode

        if id(node) in self._measured:
            return self._measured[id(node)]
        if id(node) in self._around:
            raise YamlError(
                _line(node),
                f"the anchor '{node.anchor}' is used inside the value that it names",
                expected="aliases (*name) of values that end before them",
                got=f"*{node.anchor} within &{node.anchor}",
                remedy="write the value out",
            )
        if isinstance(node, ScalarNode):
            self._visit_scalar(node)
            size, depth = 1, 0
        else:
            self._around.add(id(node))
            inner = [self.visit(child) for child in self._children(node)]
            self._around.remove(id(node))
            size, depth = 1 + sum(size for size, _ in inner), 1 + max((depth for _, depth in inner), default=0)
            if size > YAML_NODES or depth > YAML_DEPTH:
                raise _too_much(_line(node), f"{size} keys and values, {depth} levels, once aliases are replaced")
        self._measured[id(node)] = size, depth
        return size, depth

    def _children(self, node: Any) -> list[Any]:
        from ruamel.yaml import MappingNode, ScalarNode

        is_mapping = isinstance(node, MappingNode)
        if (tag := str(node.tag)) != (_MAPPING if is_mapping else _SEQUENCE):
            raise _odd_tag(node, tag)
        if not is_mapping:
            return node.value
        for key, value in node.value:
            if not isinstance(key, ScalarNode):
                raise YamlError(
                    _line(key),
                    "a key is a list or a mapping",
                    expected="text",
                    got="brackets, or '?', in front of a ':'",
                    remedy="put it in quotes, or correct it",
                )
            if key.tag == _STANDARD + "merge" and isinstance(value, ScalarNode):
                raise YamlError(
                    _line(value),
                    "'<<' takes in fields of another mapping",
                    expected="an alias of a mapping, or a list of such",
                    got=str(value.value)[:80],
                    remedy="give *name of a mapping with the anchor &name",
                )
        return [part for pair in node.value for part in pair]

    def _visit_scalar(self, node: Any) -> None:
        tag = str(node.tag)
        if tag.startswith(_STANDARD) and tag not in _SCALARS:
            raise _odd_tag(node, tag)
        if found := text_flaw(node.value):
            raise YamlError(
                _line(node),
                "a text cannot be used",
                expected="characters",
                got=f"{found} in {node.value[:80]!a}",
                remedy="leave it out; characters beyond 16 bits are written \\U and eight digits",
            )
        try:
            if tag in _NUMBERS and len(node.value) > YAML_NUMBER:
                raise ValueError(f"a number of {len(node.value)} characters")
            self._constructor.construct_document(node)
        except (ValueError, LookupError) as error:  # the 30th of February, !!int x, !!bool x, !!int ''
            raise YamlError(
                _line(node),
                "a value cannot be read",
                expected=f"a {tag.rpartition(':')[2]}, which it looks like, or text in quotes",
                got=f"{node.value[:80]}: {first_line(error)}",
                remedy="correct it, or put it in quotes",
            ) from error


def _odd_tag(node: Any, tag: str) -> YamlError:
    return YamlError(
        _line(node),
        "a tag that is not read here",
        expected="mappings, lists, text, numbers, true, false and null, which need none",
        got=tag.replace(_STANDARD, "!!"),
        remedy="remove the tag, and write the value as YAML has it without",
    )


def _line(node: Any) -> int:
    return node.start_mark.line + 1
