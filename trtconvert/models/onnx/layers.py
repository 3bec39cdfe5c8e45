"""Fuses layers that a graph writes out: products with constant weights and biases, group norms by instance norms, GELUs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np
from torch import Tensor

from trtconvert.models.onnx.attention import Shapes
from trtconvert.models.onnx.call import Value
from trtconvert.models.onnx.steps import Graph, Step

_DEPTH = 8
"""Depth of nested products. A GELU has four; each further one may double the search."""


def fuse_linear(graph: Graph, constants: dict[str, Value]) -> None:
    """Replaces products with constant matrices, and additions of their biases, by `trtconvert::linear` steps, in place.

    Weights become [N, K], as in torch's layers; steps that read one weight in the same way share one copy.
    """
    read = graph.readers()
    changes = dict[Step, Sequence[Step]]()
    turned = dict[str, str]()

    def weight(name: str, is_turned: bool) -> str:
        if is_turned:
            return name
        if name not in turned:
            turned[name] = f"{name}.T"
            constants[turned[name]] = constants[name].T.contiguous()  # type: ignore[union-attr]
        return turned[name]

    for step in graph.steps:
        matrix = constants.get(step.input(1))
        if not isinstance(matrix, Tensor) or matrix.dim() != 2 or step.input(0) in constants:
            continue
        attributes = step.attributes
        if step.op == "MatMul":
            inputs, last = [step.inputs[0], weight(step.inputs[1], False)], step
            added = read[step.outputs[0]]
            if len(added) == 1 and added[0].op == "Add":
                others = [name for name in added[0].inputs if name != step.outputs[0]]
                bias = constants.get(others[0]) if others else None
                if isinstance(bias, Tensor) and bias.shape == (matrix.shape[1],):
                    inputs, last = [*inputs, others[0]], added[0]
                    changes[step] = ()
            changes[last] = [Step("trtconvert::linear", tuple(inputs), last.outputs, {}, step.scope, step.title)]
        elif step.op == "Gemm" and not attributes.get("transA", 0) and attributes.get("alpha", 1.0) == 1:
            bias = constants.get(step.input(2))
            outputs = matrix.shape[0 if attributes.get("transB", 0) else 1]
            fits = isinstance(bias, Tensor) and bias.numel() == outputs and attributes.get("beta", 1.0) == 1
            if step.input(2) and not fits:
                continue
            inputs = [step.inputs[0], weight(step.inputs[1], bool(attributes.get("transB", 0))), *step.inputs[2:]]
            if isinstance(bias, Tensor) and bias.dim() != 1:
                constants[step.inputs[2]] = bias.reshape(-1)
            changes[step] = [Step("trtconvert::linear", tuple(inputs), step.outputs, {}, step.scope, step.title)]
    graph.replace(changes)


def fuse_gelus(graph: Graph, values: Mapping[str, Value]) -> None:
    """Replaces each GELU that is written with Erf or Tanh by one step, in place."""
    made, read = graph.producers(), graph.readers()
    changes = dict[Step, Sequence[Step]]()

    def number(name: str) -> float | None:
        value = values.get(name)
        return float(value.ravel()[0]) if isinstance(value, np.ndarray) and value.size == 1 else None

    def factors(name: str, depth: int = _DEPTH) -> tuple[float, list[str]]:
        """Returns the numeric factor of a product, and its other factors."""
        step, known = made.get(name), number(name)
        if known is not None:
            return known, []
        if step is not None and depth and step.op == "Div" and (divisor := number(step.inputs[1])):
            among, others = factors(step.inputs[0], depth - 1)
            return among / divisor, others
        if step is None or step.op != "Mul" or not depth:
            return 1.0, [name]
        (a, of_a), (b, of_b) = (factors(x, depth - 1) for x in step.inputs)
        return a * b, [*of_a, *of_b]

    def argument(step: Step) -> str:
        """Returns the input of the GELU that an Erf or a Tanh belongs to; "" for none."""
        inner, others = factors(step.inputs[0])
        if step.op == "Erf":
            return others[0] if len(others) == 1 and abs(inner - 0.5**0.5) < 1e-4 else ""
        total = made.get(others[0]) if len(others) == 1 and abs(inner - (2 / math.pi) ** 0.5) < 1e-4 else None
        for x, cubed in itertools.permutations(total.inputs, 2) if total is not None and total.op == "Add" else ():
            share, parts = factors(cubed)
            power = made.get(parts[0]) if len(parts) == 1 else None
            if power is not None and power.op == "Pow" and number(power.inputs[1]) == 3:
                parts = [power.inputs[0]] * 3
            if parts == [x] * 3 and abs(share - 0.044715) < 1e-5:
                return x
        return ""

    for step in graph.steps:
        if step.op not in ("Erf", "Tanh") or not (x := argument(step)):
            continue
        after = read[step.outputs[0]]
        if len(after) != 1 or after[0].op != "Add" or 1 not in map(number, after[0].inputs):
            continue
        last = after[0]
        while len(follows := read[last.outputs[0]]) == 1 and follows[0].op in ("Mul", "Div"):
            last = follows[0]
            share, others = factors(last.outputs[0])
            if sorted(others) == sorted([after[0].outputs[0], x]) and abs(share - 0.5) < 1e-4:
                kind = {"approximate": "tanh" if step.op == "Tanh" else "none"}
                changes[last] = [Step("Gelu", (x,), last.outputs, kind, step.scope, step.title)]
                break
    graph.replace(changes)


def fuse_group_norms(graph: Graph, shapes: Shapes, constants: dict[str, Value]) -> None:
    """Replaces instance norms of [B, groups, …], and the weights after them, by group norms, in place."""
    made, read = graph.producers(), graph.readers()
    changes = dict[Step, Sequence[Step]]()
    for step in graph.steps:
        if step.op != "InstanceNormalization" or not _has_ones_and_zeros(step, constants):
            continue
        before, after = made.get(step.inputs[0]), read[step.outputs[0]]
        if before is None or before.op != "Reshape" or len(after) != 1 or after[0].op != "Reshape":
            continue
        source, last = before.inputs[0], after[0]
        shape, groups = shapes.get(source, ()), shapes.get(step.inputs[0], (0, 0))[1]
        if len(shape) < 3 or shapes.get(last.outputs[0]) != shape or not groups or shape[1] % groups:
            continue
        inputs = [source]
        for op in ("Mul", "Add"):
            follows = read[last.outputs[0]]
            found = follows[0] if len(follows) == 1 and follows[0].op == op else None
            name = next((x for x in found.inputs if x != last.outputs[0]), "") if found is not None else ""
            weight = constants.get(name)
            if found is None or not isinstance(weight, Tensor) or not _has_number_per_channel(weight, shape):
                break
            constants[f"{name}:channels"] = weight.reshape(-1)
            inputs.append(f"{name}:channels")
            last = found
        if len(inputs) == 2:  # a factor without a shift: the shift is 0
            constants[f"{inputs[1]}:none"] = 0 * constants[inputs[1]]  # type: ignore[operator]
            inputs.append(f"{inputs[1]}:none")
        attributes = {"num_groups": groups, "epsilon": step.attributes.get("epsilon", 1e-5)}
        changes[last] = [
            Step("trtconvert::group_norm", tuple(inputs), last.outputs, attributes, step.scope, step.title, 21)
        ]
    graph.replace(changes)


def _has_ones_and_zeros(step: Step, constants: Mapping[str, Value]) -> bool:
    for name, number in zip(step.inputs[1:], (1, 0), strict=False):
        value = constants.get(name)
        if value is None or not np.all(np.asarray(value, dtype=np.float32) == number):
            return False
    return len(step.inputs) == 3


def _has_number_per_channel(weight: Tensor, shape: Sequence[int]) -> bool:
    rank = len(shape) - 2
    return weight.numel() == shape[1] and tuple(weight.shape)[-rank - 1 :] == (shape[1], *[1] * rank)
