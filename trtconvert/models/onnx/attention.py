"""Finds attention that a graph writes out: a softmax between two products, in the forms of several exporters.

The steps run on fake tensors, and `trtconvert.unfused` follows their calls. A softmax that is not fused gets a reason, which
tells the exporter's user what to change.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
from torch import Tensor
from torch.overrides import TorchFunctionMode

from trtconvert.attention.sites import Site
from trtconvert.models.onnx.call import Value
from trtconvert.models.onnx.sizes import Numbers
from trtconvert.models.onnx.steps import Graph, Step
from trtconvert.unfused import Unfused, UnfusedAttention
from trtconvert.unfused.layout import CHANNEL, HEAD

Shapes = Mapping[str, tuple[int, ...]]
"""Shapes of values in one run."""

_MOVES = ("Reshape", "Transpose", "Identity", "Squeeze", "Unsqueeze", "Flatten")
"""Operators that only change shapes: a factor may move from before to behind them."""


class AttentionFinder(TorchFunctionMode):
    """Follows one run of a graph on fake tensors.

    Attributes:
        attentions: the last step of each attention that was found, and the attention.
        values: of the run; each tensor has one name.
        shapes: of all values.
        known: single numbers, constant or computed from sizes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.attentions: list[tuple[Step, UnfusedAttention]] = []
        self.values: Mapping[str, Value] = {}
        self.shapes: Shapes = {}
        self.known: Mapping[str, Numbers] = {}
        self._step = Step("", (), ())
        self._unfused = Unfused(self._attend, 1, lambda: self._step.outputs[0])

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return self._unfused(func, args, kwargs or {}, lambda func, args, named: func(*args, **named))

    def _attend(self, attention: UnfusedAttention) -> Tensor:
        self.attentions.append((self._step, attention))
        return attention.attention.exact()

    def each(self, steps: Iterable[Step]) -> Iterator[Step]:
        """Yields the steps of the run, each before it is computed."""
        for self._step in steps:
            yield self._step

    def fused(self, graph: Graph) -> tuple[dict[str, tuple[Step, list[Step]]], dict[str, str]]:
        """Returns the last step of each attention with the steps that replace it, and reasons to leave others, by the values that
        their softmaxes compute."""
        fuser, found = _Fuser(graph, self), dict[str, tuple[Step, list[Step]]]()
        reasons = {softmax.module: softmax.reason for softmax in self._unfused.left()}
        products = Counter(attention.softmax for _, attention in self.attentions)
        for last, attention in self.attentions:
            softmax = attention.softmax
            reason = softmax.obstacle
            if products[softmax] > 1:
                reason = f"its probabilities are also read by {_called(last)}"
            elif last.op not in ("MatMul", "Einsum"):
                reason = f"{_called(last)} after it computes more than a product with values"
            elif not fuser.has_names(attention):
                reason = "its mask is a list of single numbers"
            if reason:
                reasons[softmax.module] = reason
            else:
                found[softmax.module] = last, fuser.steps(last, attention)
        return found, reasons


def fuse_attention(graph: Graph, runs: Sequence[AttentionFinder]) -> list[Site]:
    """Replaces the steps of each attention by one step, in place.

    Args:
        runs: of different sizes of the inputs.
    Returns:
        The softmaxes that were not matched.
    """
    (found, reasons), *others = [run.fused(graph) for run in runs]
    for other, _ in others:
        for name in [*found]:
            if name not in other or found[name][1][-1].attributes != other[name][1][-1].attributes:
                del found[name]
                reasons[name] = "its scale differs between the sizes of the inputs"
    made, readers = graph.producers(), graph.readers()
    left = list[Site]()
    for step in graph.steps:
        if step.op == "Softmax" and (name := step.outputs[0]) not in found:
            before = _called(made[step.inputs[0]]) if step.inputs[0] in made else "an input"
            reason = reasons.get(name, "no product of queries and keys before it, or no product with values after it")
            around = f"it stands between {before} and {', '.join(map(_called, readers[name]))}"
            left.append(_left_site(step, runs[0].shapes.get(name, ()), f"{reason}; {around}"))
    graph.replace(dict(found.values()))
    return left


def _left_site(softmax: Step, shape: tuple[int, ...], reason: str) -> Site:
    """Returns the entry in the list of sites for a softmax of logits of this shape that is not converted."""
    heads, (queries, keys) = (shape[1] if len(shape) == 4 else 1), shape[-2:] if len(shape) > 1 else (1, 1)
    name = softmax.title.partition(" ")[2]
    return Site(name, heads, heads, 1, 1.0, False, queries, keys, f"Softmax: {reason}")


def _called(step: Step) -> str:
    """Describes a step for messages, an Einsum with its equation."""
    equation = step.attributes.get("equation", "")
    text = equation.decode() if isinstance(equation, bytes) else str(equation)
    return f"{step.title} ({text})" if step.op == "Einsum" else step.title or "the graph's output"


class _Fuser:
    def __init__(self, graph: Graph, run: AttentionFinder) -> None:
        self._made, self._shapes, self._known = graph.producers(), dict(run.shapes), run.known
        self._names = {id(x): name for name, x in run.values.items()}

    def has_names(self, attention: UnfusedAttention) -> bool:
        """Whether the graph has the tensors of an attention."""
        tensors = (*attention.scores.factors, attention.values, *(mark.tensor for mark in attention.scores.marks))
        return all(id(x) in self._names for x in tensors)

    def steps(self, product: Step, attention: UnfusedAttention) -> list[Step]:
        """Returns the steps that replace the last product of an attention."""
        scores, layout, softmax = attention.scores, attention.layout, self._made[attention.softmax.module]
        marks = [mark for mark in scores.marks if not self._is_nothing(self._name(mark.tensor))]
        (a, by_a, moved_a), (b, by_b, moved_b) = (self._unscaled(self._name(x)) for x in scores.factors)
        operands = [
            (a, scores.of[0], layout.depth),
            (b, scores.of[1], layout.depth),
            (self._name(attention.values), layout.values, CHANNEL),
        ]
        apart = [self._apart(*operand) for operand in operands] if layout.heads in ("", HEAD) else []
        counts = {heads for _, _, heads in apart}
        heads = counts.pop() if len(counts) == 1 else 1
        (a, of_a, _), (b, of_b, _), (values, of_values, _) = apart if heads > 1 else operands
        attributes = {
            "of": (of_a, of_b),
            "layout": replace(layout.of_any_size(heads), values=of_values),
            "marks": [(mark.kind, mark.axes, mark.factor) for mark in marks],
            "scale": scores.scale * by_a * by_b,
        }
        inputs = (a, b, values, *(self._name(mark.tensor) for mark in marks))
        fused = Step("trtconvert::attention", inputs, product.outputs, attributes, softmax.scope, softmax.title)
        return [*moved_a, *moved_b, fused]

    def _name(self, x: Tensor) -> str:
        return self._names[id(x)]

    def _is_nothing(self, value: str) -> bool:
        """Whether a mask is all zeros, as torch's baddbmm leaves one."""
        left, seen = [value], set[str]()
        while left:
            value = left.pop()
            step = self._made.get(value)
            if value in seen:
                continue
            seen.add(value)
            if value in self._known:
                if not self._known[value].ravel()[0]:
                    return True
            elif step is not None and step.op == "ConstantOfShape":
                filled = step.attributes.get("value")
                if filled is None or not np.any(filled):
                    return True
            elif step is not None and step.op in ("Expand", "Cast", "Identity"):
                left.append(step.inputs[0])
            elif step is not None and step.op == "Mul":  # zero if any factor is zero
                left.extend(step.inputs)
        return False

    def _unscaled(self, value: str) -> tuple[str, float, list[Step]]:
        """Returns the value without its positive constant factors, their product, and steps that repeat moves of the scaled
        value unscaled."""
        moves, name, product, steps = list[Step](), value, 1.0, list[Step]()
        while (step := self._made.get(name)) is not None:
            if (found := self._scaled(step)) is not None:
                name, factor = found
                product *= factor
                for move in reversed(moves):
                    output = f"{move.outputs[0]}:unscaled"
                    moved = replace(move, inputs=(name, *move.inputs[1:]), outputs=(output,))
                    self._made[output], self._shapes[output] = moved, self._shapes[move.outputs[0]]
                    steps.append(moved)
                    name = output
                value, moves = name, []
            elif step.op in _MOVES:
                moves.append(step)
                name = step.inputs[0]
            else:
                break
        return value, product, steps

    def _scaled(self, step: Step) -> tuple[str, float] | None:
        """Returns the value that a step multiplies by a positive number, and this number."""
        orders = {"Mul": (step.inputs, step.inputs[::-1]), "Div": (step.inputs,)}.get(step.op, ())
        for value, factor in orders:
            if factor in self._known and self._shapes[value] == self._shapes[step.outputs[0]]:
                number = float(self._known[factor].ravel()[0])
                return (value, number if step.op == "Mul" else 1 / number) if number > 0 else None
        return None

    def _apart(self, value: str, axes: str, channel: str) -> tuple[str, str, int]:
        """Returns the value with an axis of heads that a value of three axes was reshaped from, or itself if there is none; its
        axes; and the number of heads that share the first axis with samples, 1 for none.

        A reshape before tells the number: of [B, H, …, …], or of [B, H·D, N] with channels first, perhaps with queries, keys and
        values together. Tokens that are split are windows, which are samples of their own.
        """
        step, shape = self._made.get(value), self._shapes[value]
        before = self._shapes.get(step.input(0), ()) if step is not None else ()
        if step is None or len(shape) != 3 or len(before) < 3:
            return value, axes, 1
        if step.op == "Transpose" and step.attributes.get("perm") == [0, 2, 1]:
            return self._apart(step.inputs[0], axes[0] + axes[2] + axes[1], channel)
        if step.op in ("Split", "Slice") and (before[0], *before[2:]) == (shape[0], shape[2]):
            return value, axes, self._apart(step.inputs[0], axes, channel)[2]
        if step.op == "Reshape" and (before[0] * before[1], *before[2:]) == shape:
            return step.inputs[0], axes[0] + HEAD + axes[1:], before[1]
        heads = before[1] // shape[1] if step.op == "Reshape" and axes[1] == channel and shape[1] else 1
        whole = (before[0] * heads, before[1], math.prod(before[2:])) == (shape[0], shape[1] * heads, shape[2])
        return value, axes, heads if whole else 1
