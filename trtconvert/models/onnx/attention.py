"""Finds attention that a graph writes out: a softmax between two products, in the forms of several exporters.

    logits = Q·Kᵀ, scaled before (Q, K, or both) or after, or both; a mask is added, or selects by a truth value; perhaps in FP32
    output = softmax(logits)·V, perhaps with NaN replaced, as torch writes rows whose keys are all masked

A softmax that is not fused gets a reason, which tells the exporter's user what to change.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from trtconvert.attention.sites import Site
from trtconvert.models.onnx.sizes import Numbers
from trtconvert.models.onnx.steps import Graph, Step
from trtconvert.unfused.equations import axes_of

Shapes = Mapping[str, tuple[int, ...]]
"""Shapes of values in one run."""

_MOVES = ("Reshape", "Transpose", "Identity", "Squeeze", "Unsqueeze", "Flatten")
"""Operators that only change shapes: a factor may move from before to behind them."""

_LEAST = -1e4
"""Largest value that a mask puts in the place of a logit; its softmax is 0."""


class _Unlike(Exception):
    """The steps are no attention; the text is the reason."""


def fuse_attention(graph: Graph, shapes: Shapes, known: Mapping[str, Numbers]) -> list[Site]:
    """Replaces the steps of each attention by one step, in place.

    Args:
        shapes: of values.
        known: single numbers, constant or computed from sizes.
    Returns:
        The softmaxes that were not matched.
    """
    left, changes = [], dict[Step, Sequence[Step]]()
    finder = _Finder(graph, shapes, known)
    for step in graph.steps:
        if step.op == "Softmax":
            try:
                last, steps = finder.around(step)
                changes[last] = steps
            except _Unlike as reason:
                left.append(_left_site(step.title.partition(" ")[2], shapes.get(step.outputs[0], ()), str(reason)))
    graph.replace(changes)
    return left


def _left_site(name: str, shape: tuple[int, ...], reason: str) -> Site:
    """Returns the entry in the list of sites for a softmax of logits of this shape that is not converted."""
    heads, (queries, keys) = (shape[1] if len(shape) == 4 else 1), shape[-2:] if len(shape) > 1 else (1, 1)
    return Site(name, heads, heads, 1, 1.0, False, queries, keys, f"Softmax: {reason}")


class _Finder:
    def __init__(self, graph: Graph, shapes: Shapes, known: Mapping[str, Numbers]) -> None:
        self._made, self._read = graph.producers(), graph.readers()
        self._shapes, self._known = dict(shapes), known

    def around(self, softmax: Step) -> tuple[Step, list[Step]]:
        """Returns the last product of the attention around a softmax, and the steps that replace it.

        Raises:
            _Unlike: there is no attention.
        """
        shape = self._shapes.get(softmax.outputs[0], ())
        axis = softmax.attributes.get("axis", -1 if softmax.opset >= 13 else 1)
        if len(shape) < 3:
            raise _Unlike(f"its axis is {axis} of {len(shape)}, the last of three or more is needed")
        place, last = axis % len(shape), len(shape) - 1
        if place != last and (softmax.opset < 13 or not self._by_einsum(softmax)):
            raise _Unlike(f"its axis is {axis} of {len(shape)}, the last of three or more is needed")
        product, probabilities = self._after(softmax)
        logits = _Logits(self, softmax, place)
        return product, logits.steps(product, probabilities)

    def _by_einsum(self, softmax: Step) -> bool:
        """Whether the logits come from an Einsum, directly or through steps that keep the order of their axes."""
        shape, value = self.shape(softmax.outputs[0]), softmax.inputs[0]
        while (step := self.made(value)) is not None and step.op != "Einsum" and self.shape(value) == shape:
            if not (value := next((name for name in step.inputs if self.shape(name) == shape), "")):
                return False
        return step is not None and step.op == "Einsum"

    def _after(self, softmax: Step) -> tuple[Step, int]:
        """Returns the product that reads the probabilities, and the place of the probabilities among its factors."""
        value = softmax.outputs[0]
        while True:
            readers = self._read[value]
            passing = [step for step in readers if step.op in ("Cast", "Identity", "Dropout")]
            ops = sorted(step.op for step in readers)
            if ops == ["IsNaN", "Where"]:  # torch: rows whose keys are all masked give zeros
                chosen = next(step for step in readers if step.op == "Where")
                value = chosen.outputs[0]
            elif len(readers) == 1 and passing:
                value = passing[0].outputs[0]
            else:
                break
        products = [
            step
            for step in readers
            if (step.op == "MatMul" and step.inputs[0] == value)
            or (self.equation(step) and step.inputs.count(value) == 1)
        ]
        if len(readers) > 1 and products:
            further = [step for step in readers if step not in products] or products[1:]
            others = ", ".join(_called(step) for step in further)
            raise _Unlike(f"its probabilities are also read by {others}")
        if not products:
            raise _Unlike("no MatMul after it, but " + ", ".join(map(_called, readers)))
        return products[0], products[0].inputs.index(value)

    # Used by _Logits ----------------------------------------------------------------------------------------------

    def made(self, value: str) -> Step | None:
        return self._made.get(value)

    def learn(self, step: Step, shape: tuple[int, ...]) -> None:
        """Adds a new step of one output."""
        self._made[step.outputs[0]] = step
        self._shapes[step.outputs[0]] = shape

    def equation(self, step: Step) -> Product | None:
        """Returns the product of an Einsum; None for other steps, and for other equations."""
        if step.op != "Einsum":
            return None
        equation = step.attributes.get("equation", "")
        text = equation.decode() if isinstance(equation, bytes) else str(equation)
        return product_of(text, [len(self.shape(name)) for name in step.inputs])

    def shape(self, value: str) -> tuple[int, ...]:
        return self._shapes.get(value, ())

    def is_number(self, value: str) -> bool:
        return value in self._known

    def number(self, value: str) -> float:
        return float(self._known[value].ravel()[0])

    def is_nothing(self, value: str) -> bool:
        """Whether a mask is all zeros, as torch's baddbmm leaves one."""
        left, seen = [value], set[str]()
        while left:
            value = left.pop()
            step = self.made(value)
            if value in seen:
                continue
            seen.add(value)
            if self.is_number(value):
                if self.number(value) == 0:
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

    def scaled(self, value: str) -> Iterator[tuple[str, str, bool]]:
        """Yields the value that is multiplied, its factor, and whether the factor divides."""
        step = self.made(value)
        if step is not None and step.op in ("Mul", "Div"):
            a, b = step.inputs
            if self.is_number(b):
                yield a, b, step.op == "Div"
            elif self.is_number(a) and step.op == "Mul":
                yield b, a, False

    def transposed(self, value: str) -> str | None:
        """Returns the value whose transpose, in the last two axes, a value is."""
        step, shape = self.made(value), self.shape(value)
        if step is None:
            return None
        if step.op == "Transpose" and step.attributes.get("perm") == [*_swapped(len(shape))]:
            return step.inputs[0]
        # torch's exporter reshapes to three axes for the transpose
        turn = self.made(step.inputs[0]) if step.op == "Reshape" else None
        flat = self.made(turn.inputs[0]) if turn is not None and turn.op == "Transpose" else None
        if turn is not None and flat is not None and flat.op == "Reshape" and turn.attributes.get("perm") == [0, 2, 1]:
            before = self.shape(flat.inputs[0])
            if len(before) == 4 and (*before[:2], before[3], before[2]) == shape:
                return flat.inputs[0]
        return None

    def with_heads(self, value: str) -> str | None:
        """Returns the value [B, H, …, …] that was reshaped to a value [B·H, …, …]."""
        step, shape = self.made(value), self.shape(value)
        if step is None or step.op != "Reshape":
            return None
        before = self.shape(step.inputs[0])
        fits = len(before) == 4 and len(shape) == 3 and (before[0] * before[1], *before[2:]) == shape
        return step.inputs[0] if fits else None

    def heads_within(self, value: str) -> int:
        """Returns the number of heads into which [B, H·D, N] was split to give a value [B·H, D, N], or to give a tensor that the
        value is a part of, such as improved diffusion's [B·H, 3·D, N] of queries, keys and values; 1 for none."""
        step, shape = self.made(value), self.shape(value)
        if step is not None and step.op in ("Split", "Slice"):
            whole = self.shape(step.inputs[0])
            cut = len(whole) == len(shape) == 3 and (whole[0], whole[2]) == (shape[0], shape[2])
            return self.heads_within(step.inputs[0]) if cut else 1
        before = self.shape(step.inputs[0]) if step is not None and step.op == "Reshape" else ()
        if len(before) < 3 or len(shape) != 3 or shape[1] == 0 or before[1] % shape[1]:
            return 1
        heads = before[1] // shape[1]
        return heads if before[0] * heads == shape[0] and math.prod(before[2:]) == shape[2] else 1

    def logits(self, step: Step | None, axis: int) -> LogitsFactors | None:
        """Returns the factors of a step that multiplies queries and keys; None for another step.

        Args:
            axis: of the softmax, in the logits.
        """
        rank = len(self.shape(step.outputs[0])) if step is not None else 0
        if step is None or not 0 <= axis < rank:
            return None
        if step.op == "MatMul":
            axes = LogitsAxes(tuple(range(rank - 2)), rank - 2, rank - 1)
            return LogitsFactors(axes, 0, _same(rank), (*range(rank - 2), rank - 1, rank - 2))
        product = self.equation(step)
        return None if product is None else logits_of(product, axis)


class _Logits:
    """The steps that compute the logits before a softmax over an axis, counted from the first."""

    def __init__(self, finder: _Finder, softmax: Step, axis: int) -> None:
        self._finder, self._softmax, self._axis = finder, softmax, axis
        self._shape = finder.shape(softmax.outputs[0])
        self._leading: dict[str, bool] = {}
        """Whether values are logits."""
        self._factors: list[tuple[str, bool]] = []
        """Factors of the logits, and whether each divides."""
        self._masks: list[tuple[str, str, int]] = []
        """Kind ("added", "kept", "dropped"), value, and the number of factors that are applied after the mask."""
        self._new: list[Step] = []
        value = softmax.inputs[0]
        while (factors := finder.logits(step := finder.made(value), axis)) is None:
            if step is None:
                raise _Unlike("no MatMul before it, but an input of the graph")
            value = self._before(step, value)
        assert step is not None
        self._product, self._of = step, factors

    def _before(self, step: Step, value: str) -> str:
        """Records the effect of a step on the logits; returns the logits before it."""
        finder = self._finder
        for source, factor, divides in finder.scaled(value):
            self._factors.append((factor, divides))
            return source
        if step.op in ("Cast", "Identity"):
            return step.inputs[0]
        if step.op == "Add":
            a, b = step.inputs
            of_a, of_b = (self._leads_to_product(x) for x in (a, b))
            if of_a == of_b:
                raise _Unlike(
                    f"{step.title} before it adds " + ("two products" if of_a else "no product of queries and keys")
                )
            logits, mask = (a, b) if of_a else (b, a)
            if not finder.is_nothing(mask):
                self._masks.append(("added", mask, len(self._factors)))
            return logits
        if step.op == "Where":
            condition, a, b = step.inputs
            for kind, logits, fill in (("kept", a, b), ("dropped", b, a)):
                if finder.is_number(fill) and finder.number(fill) <= _LEAST:
                    self._masks.append((kind, condition, len(self._factors)))
                    return logits
            raise _Unlike(f"{step.title} before it puts no large negative number in the masked places")
        raise _Unlike(f"no MatMul before it, but {_called(step)}")

    def _leads_to_product(self, value: str) -> bool:
        """Whether a value is logits: a product of their shape, perhaps behind steps that keep the shape."""
        found, way = self._leading, [value]
        while way:
            last = way[-1]
            before = self._same_shape(last)
            if unknown := [name for name in before if name not in found]:
                way.extend(unknown)
                continue
            found[last] = any(found[name] for name in before) or self._is_logits(last)
            way.pop()
        return found[value]

    def _is_logits(self, value: str) -> bool:
        finder = self._finder
        return finder.shape(value) == self._shape and finder.logits(finder.made(value), self._axis) is not None

    def _same_shape(self, value: str) -> Sequence[str]:
        """Returns the inputs of a step that keeps the shape of logits; nothing for a product."""
        finder, step = self._finder, self._finder.made(value)
        if step is None or finder.shape(value) != self._shape or finder.logits(step, self._axis) is not None:
            return ()
        for source, _, _ in finder.scaled(value):
            return (source,)
        if step.op in ("Cast", "Identity"):
            return step.inputs[:1]
        return step.inputs if step.op == "Add" else step.inputs[1:] if step.op == "Where" else ()

    def steps(self, last: Step, probabilities: int) -> list[Step]:
        """Returns the steps that replace the last product, whose factor at `probabilities` holds the probabilities."""
        of, rank = self._of, len(self._of.axes.order)
        values, (of_values, of_output) = last.inputs[1 - probabilities], self._output(last, probabilities)
        q = self._unscaled(self._product.inputs[of.queries])
        k, of_keys = self._keys(self._product.inputs[1 - of.queries])
        operands, heads = [(q, of.of_queries), (k, of_keys), (values, of_values)], 0
        if all(len(self._finder.shape(value)) == 3 for value, _ in operands):
            heads, operands = self._with_heads(operands)
        inputs = [self._in_order(value, order) for value, order in operands]
        inputs += [self._mask(heads), *(name for name, _ in self._factors)]
        turned = of_output != _same(rank)
        names = [last.outputs[0], *([f"{last.outputs[0]}:order"] if turned else [])]
        names += [f"{last.outputs[0]}:heads"] if heads else []
        attributes = {"divided": [divides for _, divides in self._factors]}
        title, scope = self._softmax.title, self._softmax.scope
        steps = [*self._new, Step("trtconvert::attention", tuple(inputs), (names.pop(),), attributes, scope, title)]
        if heads:
            steps.append(Step("trtconvert::join_heads", steps[-1].outputs, (names.pop(),), {}, "", last.title))
        if turned:
            steps.append(Step("Transpose", steps[-1].outputs, (names.pop(),), {"perm": [*of_output]}, "", last.title))
        return steps

    def _output(self, last: Step, probabilities: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns the orders of `output_of` for the last product."""
        axes, rank = self._of.axes, len(self._of.axes.order)
        if last.op == "MatMul" and axes.order == _same(rank):
            return _same(rank), _same(rank)
        product = self._finder.equation(last)
        found = None if product is None else output_of(product, probabilities, axes)
        if found is None:
            raise _Unlike(f"{_called(last)} after it does not multiply its probabilities by values")
        return found

    def _unscaled(self, value: str) -> str:
        """Returns the value without its factors, which are recorded. Steps that move the scaled value are repeated unscaled."""
        finder, moves, name = self._finder, list[Step](), value
        while (step := finder.made(name)) is not None:
            found = next(finder.scaled(name), None)
            if found is not None and finder.shape(found[0]) == finder.shape(name):
                name, factor, divides = found
                self._factors.append((factor, divides))
                for move in reversed(moves):
                    inputs = (name, *move.inputs[1:])
                    name = self._step(move.op, inputs, move.attributes, finder.shape(move.outputs[0]), move.opset)
                value, moves = name, []
            elif step.op in _MOVES:
                moves.append(step)
                name = step.inputs[0]
            else:
                break
        return value

    def _keys(self, value: str) -> tuple[str, tuple[int, ...]]:
        """Returns the keys, before a transpose if there is one, and their order as [batch, …, tokens, channels]."""
        value, order = self._unscaled(value), self._of.of_keys
        if self._product.op == "MatMul":  # keys that samples share may lack the axis of samples
            order = _swapped(len(self._finder.shape(value)))
        if order == _swapped(len(order)) and (found := self._finder.transposed(value)) is not None:
            return self._unscaled(found), _same(len(order))
        return value, order

    def _with_heads(
        self, operands: Sequence[tuple[str, tuple[int, ...]]]
    ) -> tuple[int, list[tuple[str, tuple[int, ...]]]]:
        """Returns the number of heads among the samples, and the operands with an axis of heads."""
        finder, found = self._finder, list[tuple[int, str | None]]()
        for value, order in operands:
            whole = finder.with_heads(value) if order[0] == 0 else None
            # Tokens that are split are windows, which are samples of their own.
            within = finder.heads_within(value) if order == (0, 2, 1) else 1
            found.append((within if whole is None else finder.shape(whole)[1], whole))
        heads = found[0][0] if len({count for count, _ in found}) == 1 else 1
        apart: list[tuple[str, tuple[int, ...]]] = []
        for (value, order), (_, whole) in zip(operands, found, strict=True):
            if whole is None or heads != finder.shape(whole)[1]:
                flat = self._in_order(value, order) if order[0] else value
                order = _same(3) if order[0] else order
                whole = self._step("trtconvert::split_heads", [flat], {"heads": heads})
            apart.append((whole, (0, 1, *(place + 1 for place in order[1:]))))
        return heads, apart

    def _in_order(self, value: str, order: tuple[int, ...]) -> str:
        return value if order == _same(len(order)) else self._step("Transpose", [value], {"perm": [*order]})

    def _mask(self, heads: int) -> str:
        """Returns all masks as one; "" for none. heads: of logits without an axis for them; 0 if they have one."""
        if not self._masks:
            return ""
        if len(self._masks) == 1 and self._masks[0][0] != "added":
            kind, value, _ = self._masks[0]
            mask = value if kind == "kept" else self._step("Not", [value], {})
        else:
            mask = ""
            for kind, value, before in self._masks:
                added = value
                if kind == "added":
                    for factor, divides in self._factors[:before]:  # they scale the mask too
                        added = self._step("Div" if divides else "Mul", [added, factor], {})
                else:
                    added = self._step("trtconvert::as_added", [value], {"kept": kind == "kept"})
                mask = added if not mask else self._step("Add", [mask, added], {})
        order = self._of.axes.order
        if order != _same(len(order)):
            if missing := len(order) - max(len(self._finder.shape(value)) for _, value, _ in self._masks):
                mask = self._step("Unsqueeze", [mask], {"axes": [*range(missing)]})
            mask = self._step("Transpose", [mask], {"perm": [*order]})
        return self._step("trtconvert::split_heads", [mask], {"heads": heads}) if heads else mask

    def _step(
        self,
        op: str,
        inputs: Sequence[str],
        attributes: Mapping[str, object],
        shape: tuple[int, ...] = (),
        opset: int = 20,
    ) -> str:
        name = f"{self._softmax.outputs[0]}:{op.rpartition(':')[2].lower()}{len(self._new)}"
        self._new.append(Step(op, tuple(inputs), (name,), attributes, "", self._softmax.title, opset))
        self._finder.learn(self._new[-1], shape)
        return name


def _same(rank: int) -> tuple[int, ...]:
    return tuple(range(rank))


def _swapped(rank: int) -> tuple[int, ...]:
    return (*range(rank - 2), rank - 1, rank - 2)


def _called(step: Step) -> str:
    """Describes a step for messages, an Einsum with its equation."""
    equation = step.attributes.get("equation", "")
    text = equation.decode() if isinstance(equation, bytes) else str(equation)
    return f"{step.title} ({text})" if step.op == "Einsum" else step.title or "the graph's output"


# Einsum equations of two factors, whose axes may be in any order and of any letters -------------------------------------
#
# logits:  (batch, query, channel), (batch, key, channel) → (batch, query, key)
# output:  (batch, query, key),     (batch, key, channel) → (batch, query, channel)


@dataclass(frozen=True)
class Product:
    """Axes of two factors and of their product, a letter for each."""

    factors: tuple[str, str]
    result: str


@dataclass(frozen=True)
class LogitsAxes:
    """Places of axes in logits: of samples and heads, of queries, and of keys, which the softmax runs over."""

    batch: tuple[int, ...]
    query: int
    key: int

    @property
    def order(self) -> tuple[int, ...]:
        """The places as [batch, …, query, key]."""
        return (*self.batch, self.query, self.key)


@dataclass(frozen=True)
class LogitsFactors:
    """The factor that holds the queries, and the orders of axes that turn queries and keys into [batch, …, tokens, channels]."""

    axes: LogitsAxes
    queries: int
    of_queries: tuple[int, ...]
    of_keys: tuple[int, ...]


def product_of(equation: str, ranks: Sequence[int]) -> Product | None:
    """Returns the axes of an equation; None if `axes_of` cannot read it."""
    axes = axes_of(equation, ranks)
    return None if axes is None else Product(axes[:2], axes[2])


def logits_of(product: Product, axis: int) -> LogitsFactors | None:
    """Returns the factors of an equation that multiplies queries and keys; None for other equations.

    Args:
        axis: of the result, which the softmax runs over.
    """
    key = product.result[axis]
    if (key in product.factors[0]) == (key in product.factors[1]):
        return None
    queries = int(key in product.factors[0])
    q, k, result = product.factors[queries], product.factors[1 - queries], product.result
    batch = [letter for letter in result if letter in q and letter in k]
    of_query = [letter for letter in result if letter in q and letter not in k]
    channel = [letter for letter in q if letter in k and letter not in result]
    if len(of_query) != 1 or len(channel) != 1 or not batch or {*q} != {*batch, *of_query, *channel}:
        return None
    if {*k} != {*batch, key, *channel} or {*result} != {*batch, *of_query, key}:
        return None
    axes = LogitsAxes(tuple(map(result.index, batch)), result.index(of_query[0]), axis)
    return LogitsFactors(axes, queries, _order(q, [*batch, *of_query, *channel]), _order(k, [*batch, key, *channel]))


def output_of(product: Product, probabilities: int, axes: LogitsAxes) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Returns two permutations: of the values to [batch, …, keys, channels], and of [batch, …, queries, channels] to the result.
    None if the equation does not multiply probabilities by values.

    Args:
        probabilities: place of their factor.
        axes: of the logits that the probabilities come from.
    """
    p, v, result = product.factors[probabilities], product.factors[1 - probabilities], product.result
    if len(p) != len(axes.order):
        return None
    batch, query, key = [p[place] for place in axes.batch], p[axes.query], p[axes.key]
    channel = [letter for letter in v if letter not in p]
    if len(channel) != 1 or {*v} != {*batch, key, *channel} or {*result} != {*batch, query, *channel}:
        return None
    made = [*batch, query, *channel]
    return _order(v, [*batch, key, *channel]), tuple(made.index(letter) for letter in result)


def _order(axes: str, wanted: Sequence[str]) -> tuple[int, ...]:
    return tuple(map(axes.index, wanted))
