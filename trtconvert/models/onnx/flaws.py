"""Finds damage in an ONNX file, and describes it for users, which the libraries that read such files do not."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter

import onnx
import onnx_ir as ir

_KNOWN = frozenset(int(kind) for kind in ir.DataType)
_NUMBER = re.compile(r"[0-9]{1,18}", re.ASCII)  # of bytes in a file
_FIELDS = {
    ir.DataType.FLOAT: "float_data",
    ir.DataType.COMPLEX64: "float_data",
    ir.DataType.DOUBLE: "double_data",
    ir.DataType.COMPLEX128: "double_data",
    ir.DataType.INT64: "int64_data",
    ir.DataType.UINT32: "uint64_data",
    ir.DataType.UINT64: "uint64_data",
    ir.DataType.STRING: "string_data",
}
"""The fields that hold numbers that are not raw, by type; int32_data for all other types."""

_COMPLEX = (ir.DataType.COMPLEX64, ir.DataType.COMPLEX128)

_AGAIN = "export or download the model again, whole"
_NEWER = "pip install --upgrade onnx onnx-ir, where a newer ONNX has this type; else export or download the model again"

Function = tuple[str, str, str]
"""Domain, name and overload."""


@dataclass(frozen=True)
class Flaw:
    """The parts of a message for the user."""

    what: str
    expected: str
    got: str
    remedy: str


def first_flaw(model: onnx.ModelProto) -> Flaw | None:
    """Returns the first flaw of a model, in time proportional to its size."""
    return next(_flaws(model), None)


def _flaws(model: onnx.ModelProto) -> Iterator[Flaw]:
    yield from _flaws_of_graph(model.graph)
    calls: dict[Function, list[Function]] = {}
    for function in model.functions:
        called: list[Function] = []
        calls[function.domain, function.name, function.overload] = called
        yield from _repeated_names(function.input, (), function.node)
        for node in function.node:
            yield from _flaws_of_node(node, called)
    if cycle := _cycle(calls):
        yield Flaw(
            "has a function that calls itself",
            expected="functions that do not repeat, as in a graph without loops",
            got=" calls ".join(f"{domain}::{name}" if domain else name for domain, name, _ in cycle),
            remedy="export the model with torch.onnx.export, which writes no such functions; or remove the call",
        )


def _flaws_of_graph(graph: onnx.GraphProto, called: list[Function] | None = None) -> Iterator[Flaw]:
    """Yields flaws of a graph and of the graphs in its nodes. `called` gets the functions that nodes may call."""
    for tensor in graph.initializer:
        yield from _flaws_of_tensor(tensor, f"the weight '{tensor.name}'")
    yield from _repeated_names((value.name for value in graph.input), (x.name for x in graph.initializer), graph.node)
    for what, values in (("input", graph.input), ("output", graph.output), ("value", graph.value_info)):
        for value in values:
            if value.type.HasField("tensor_type") and (kind := value.type.tensor_type.elem_type) not in _KNOWN:
                yield _unknown_type(f"the {what} '{value.name}'", kind)
    for node in graph.node:
        yield from _flaws_of_node(node, called)


def _flaws_of_node(node: onnx.NodeProto, called: list[Function] | None) -> Iterator[Flaw]:
    if called is not None:
        called.append((node.domain, node.op_type, node.overload))
    for attribute in node.attribute:
        if not attribute.type and not attribute.ref_attr_name:
            yield Flaw(
                f"has an attribute without a type, '{attribute.name}' of {_shown(node)}",
                expected="a type of each attribute, as in ONNX files since version 2",
                got="none",
                remedy=_AGAIN,
            )
        if attribute.HasField("t"):
            yield from _flaws_of_tensor(attribute.t, f"the constant '{attribute.name}' of {_shown(node)}")
        for tensor in attribute.tensors:
            yield from _flaws_of_tensor(tensor, f"a constant of '{attribute.name}' of {_shown(node)}")
        if attribute.HasField("g"):
            yield from _flaws_of_graph(attribute.g, called)
        for graph in attribute.graphs:
            yield from _flaws_of_graph(graph, called)


def _repeated_names(inputs: Iterable[str], weights: Iterable[str], nodes: Sequence[onnx.NodeProto]) -> Iterator[Flaw]:
    made: dict[str, str] = {}
    for name in inputs:
        if name in made:
            yield _same_name(name, "an input", "another input")
        made[name] = "an input"
    made |= {name: made.get(name, "a weight") for name in weights}  # a weight may be the default of an input
    for node in nodes:
        for name in node.output:
            if name and name in made:
                yield _same_name(name, made[name], _shown(node))
            made[name] = _shown(node)


def _same_name(name: str, first: str, second: str) -> Flaw:
    return Flaw(
        f"has two values called '{name}'",
        expected="a name of its own for each input, weight and output of a node",
        got=f"{first} and {second}",
        remedy="export the model again; or rename the second one with onnx, and its uses too",
    )


def _flaws_of_tensor(tensor: onnx.TensorProto, what: str) -> Iterator[Flaw]:
    kind = tensor.data_type
    if kind not in _KNOWN or kind == ir.DataType.UNDEFINED:
        yield _unknown_type(what, kind)
        return
    if any(size < 0 for size in tensor.dims):
        yield Flaw(f"is damaged at {what}", "sizes from 0", str(list(tensor.dims)), _AGAIN)
    elif tensor.data_location == onnx.TensorProto.EXTERNAL:
        yield from _flaws_of_place(tensor, what)
    else:
        yield from _flaws_of_count(tensor, what)


def _flaws_of_place(tensor: onnx.TensorProto, what: str) -> Iterator[Flaw]:
    said = {entry.key: entry.value for entry in tensor.external_data}
    remedy = (
        "export or download the model again, with the files beside it; or save a whole one again: "
        "onnx.save(model, path, save_as_external_data=True)"
    )
    if not said.get("location") or "\0" in said["location"]:
        got = repr(said["location"]) if said.get("location") else "no location"
        yield Flaw(f"does not name the file of {what}", "the name of a file beside the model", got, remedy)
    for name in ("offset", "length"):
        if name in said and not _NUMBER.fullmatch(said[name]):
            yield Flaw(
                f"does not say where {what} lies in {said.get('location')}",
                expected=f"{name}: a whole number of bytes from 0, of at most 18 digits",
                got=repr(said[name][:80]),
                remedy=remedy,
            )


def _flaws_of_count(tensor: onnx.TensorProto, what: str) -> Iterator[Flaw]:
    kind, count = ir.DataType(tensor.data_type), math.prod(tensor.dims)
    if tensor.HasField("raw_data"):
        if kind == ir.DataType.STRING:
            yield Flaw(f"is damaged at {what}", "texts in string_data", "raw bytes", _AGAIN)
            return
        unit, expected, got = "bytes", -(-count * kind.bitwidth // 8), len(tensor.raw_data)
    elif kind.bitwidth < 8 and kind != ir.DataType.STRING:  # several in one entry
        return
    else:
        unit, expected = "numbers", count * (2 if kind in _COMPLEX else 1)
        got = len(getattr(tensor, _FIELDS.get(kind, "int32_data")))
    if expected != got:
        yield Flaw(
            f"is damaged at {what}",
            expected=f"{expected:,} {unit}, as {list(tensor.dims)} in {kind.name} takes",
            got=f"{got:,}",
            remedy=_AGAIN,
        )


def _unknown_type(what: str, kind: int) -> Flaw:
    return Flaw(
        f"gives {what} an unknown type",
        expected="a type of ONNX, as 1 (FLOAT), 10 (FLOAT16), 16 (BFLOAT16) or 7 (INT64)",
        got=str(kind) if kind else "0 (UNDEFINED)",
        remedy=_NEWER if kind > 0 else _AGAIN,
    )


def _cycle(calls: Mapping[Function, Iterable[Function]]) -> list[Function]:
    """Returns functions that call each other in a circle, the first again at the end; nothing without a circle."""
    try:
        TopologicalSorter(calls).prepare()
    except CycleError as error:
        return error.args[1][::-1]  # each function is called by the next one there
    return []


def _shown(node: onnx.NodeProto) -> str:
    return f"{node.op_type} {node.name or next(iter(node.output), '')}".rstrip()
