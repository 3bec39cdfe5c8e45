"""A graph as a list of steps, which patterns rewrite and a module runs."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import onnx_ir as ir

from trtconvert.errors import UserError

_SCOPES = "pkg.torch.onnx.name_scopes"
"""Metadata of torch's exporter: paths of the modules around a node, from the outermost, and the node's own name."""


@dataclass(frozen=True, eq=False)
class Step:
    """A node.

    Attributes:
        op: operator, with its domain unless it is ONNX's own: "com.microsoft::Gelu".
        inputs, outputs: names of values; "" for one that is left out.
        attributes: Python values; tensors as numpy arrays, 16-bit ones as float32.
        scope: path of the module that the node comes from, as far as it is known.
        title: for people.
        opset: of the operator's domain.
    """

    op: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    scope: str = ""
    title: str = ""
    opset: int = 20

    def input(self, place: int) -> str:
        """Returns the name of an input; "" for none."""
        return self.inputs[place] if place < len(self.inputs) else ""


@dataclass(frozen=True)
class Branch:
    """A graph in an If. `captured` are the values that it reads from the graph around it, and constants."""

    steps: tuple[Step, ...]
    outputs: tuple[str, ...]
    captured: tuple[str, ...]


@dataclass
class Graph:
    """Steps in the order of their computation.

    Attributes:
        constants: values that are neither computed nor inputs.
        inputs, outputs: names.
    """

    steps: list[Step]
    constants: dict[str, ir.TensorProtocol]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    def producers(self) -> dict[str, Step]:
        return {name: step for step in self.steps for name in step.outputs}

    def readers(self) -> dict[str, list[Step]]:
        """Returns the steps that read each value; the graph itself reads its outputs as a step without a name."""
        found = defaultdict[str, list[Step]](list)
        for step in (*self.steps, Step("", self.outputs, ())):
            for name in step.inputs:
                found[name].append(step)
        return found

    def replace(self, changes: Mapping[Step, Sequence[Step]]) -> None:
        """Replaces steps by others, and removes steps whose results are not read."""
        changed = [new for step in self.steps for new in changes.get(step, (step,))]
        needed, kept = set(self.outputs), list[Step]()
        for step in reversed(changed):
            if needed.intersection(step.outputs):
                needed.update(step.inputs)
                kept.append(step)
        self.steps = kept[::-1]


def graph_of(model: ir.Model) -> Graph:
    """Returns the main graph of a model without local functions, with steps that read constants alone."""
    graph = model.graph
    constants: dict[str, ir.TensorProtocol] = {
        name: value.const_value for name, value in graph.initializers.items() if value.const_value is not None
    }
    opsets = {**model.opset_imports, **graph.opset_imports}
    steps = _steps_of(graph, constants, opsets, _Scopes(constants))
    _refuse_unordered(steps, {*constants, *(value.name or "" for value in graph.inputs), ""})
    given = tuple(value.name or "" for value in graph.inputs if value.name not in constants)
    return Graph(steps, constants, given, tuple(value.name or "" for value in graph.outputs))


def _steps_of(
    nodes: ir.Graph, constants: dict[str, ir.TensorProtocol], opsets: Mapping[str, int], scopes: _Scopes
) -> list[Step]:
    """Returns the steps of a graph or of a branch; `constants` gets the constants in nodes."""
    steps = list[Step]()
    for node in nodes:
        op = node.op_type if node.domain in ("", "ai.onnx") else f"{node.domain}::{node.op_type}"
        inputs = tuple(value.name or "" if value is not None else "" for value in node.inputs)
        while inputs and not inputs[-1]:
            inputs = inputs[:-1]
        outputs = tuple(value.name or "" for value in node.outputs)
        title = f"{node.op_type} {node.name or outputs[0]}"
        if op == "Constant" and (tensor := _tensor(node)) is not None:
            constants[outputs[0]] = tensor
            continue
        attributes: dict[str, Any] = {}
        for name, attribute in node.attributes.items():
            if attribute.type == ir.AttributeType.GRAPH:
                branch = _branch(attribute.value, constants, opsets, scopes)
                attributes[name] = branch
                inputs = (*inputs, *branch.captured)
            else:
                attributes[name] = _value(attribute)
        steps.append(Step(op, inputs, outputs, attributes, scopes.of(node, inputs), title, opsets.get(node.domain, 1)))
    return steps


def _branch(
    graph: ir.Graph, constants: dict[str, ir.TensorProtocol], opsets: Mapping[str, int], scopes: _Scopes
) -> Branch:
    for name, value in graph.initializers.items():
        if value.const_value is not None:
            constants[name] = value.const_value
    steps, outputs = _steps_of(graph, constants, opsets, scopes), tuple(value.name or "" for value in graph.outputs)
    made = {name for step in steps for name in step.outputs}
    read = dict.fromkeys(name for step in (*steps, Step("", outputs, ())) for name in step.inputs if name)
    return Branch(tuple(steps), outputs, tuple(name for name in read if name not in made))


def _refuse_unordered(steps: Sequence[Step], known: set[str]) -> None:
    known = set(known)
    for step in steps:
        if missing := [name for name in step.inputs if name not in known]:
            raise UserError(
                f"{step.title} reads a value that nothing before it computes",
                expected="a graph in the order of its computation, with all of its weights",
                got=missing[0],
                remedy="export the model again; onnx.checker.check_model tells more",
            )
        known.update(step.outputs)


def _tensor(node: ir.Node) -> ir.TensorProtocol | None:
    ((name, attribute),) = node.attributes.items()
    value = attribute.value
    if name == "value":
        return value
    kinds = {
        "value_int": ir.DataType.INT64,
        "value_ints": ir.DataType.INT64,
        "value_float": ir.DataType.FLOAT,
        "value_floats": ir.DataType.FLOAT,
    }
    return ir.tensor(value, dtype=kinds[name]) if name in kinds else None


def _value(attribute: ir.Attr) -> Any:
    if attribute.type == ir.AttributeType.TENSOR:
        return attribute.value.numpy()
    return list(attribute.value) if isinstance(attribute.value, tuple) else attribute.value


class _Scopes:
    """Returns the paths of the modules that nodes come from, by torch's exporters or by the names of weights."""

    def __init__(self, constants: Mapping[str, ir.TensorProtocol]) -> None:
        self._constants = constants

    def of(self, node: ir.Node, inputs: Sequence[str]) -> str:
        scopes = node.metadata_props.get(_SCOPES, "")
        if scopes.startswith("["):
            path = [*ast.literal_eval(scopes)][:-1]
            if path and path[-1] and path[-1] != "_empty_nn_module_stack_from_metadata_hook":
                return _valid(path[-1])
        if (node.name or "").startswith("/"):  # torch's older exporter
            return _valid(_joined((node.name or "").split("/")[1:-1]))
        for name in inputs[1:]:
            if name in self._constants and name.endswith(".weight"):
                return _valid(name.removesuffix(".weight"))
        return ""


def _joined(parts: Sequence[str]) -> str:
    """Joins parts to a path; a part that the next one begins with is dropped: "mlp", "mlp.0"."""
    kept = [part for part, after in zip(parts, [*parts[1:], ""], strict=False) if not after.startswith(f"{part}.")]
    return ".".join(kept)


def _valid(path: str) -> str:
    parts = [re.sub(r"[^\w-]", "_", part) for part in path.split(".") if part]
    return ".".join(parts)
