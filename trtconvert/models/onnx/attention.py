"""Attention that is written out: a softmax between two products, in the forms that exporters give it.

    logits = Q·Kᵀ, scaled before (Q, K, or both) or after, or both; a mask added, or chosen by a truth value; perhaps in float32
    output = softmax(logits)·V, perhaps with what is no number left out, as torch writes rows that are masked whole

What is left as it is has a reason, by which whoever exported the model can tell what to change.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from trtconvert.models.onnx.sizes import Numbers
from trtconvert.models.onnx.steps import Graph, Step

Shapes = Mapping[str, tuple[int, ...]]
"""Of values, in one run."""

_PRODUCTS = {"bhid,bhjd->bhij": True, "bid,bjd->bij": True, "bhij,bhjd->bhid": False, "bij,bjd->bid": False,
             "bhid,bhdj->bhij": False, "bid,bdj->bij": False}  # fmt: skip
"""Equations of Einsum, and whether the second factor is transposed. Letters are those of their first use."""

_LEAST = -1e4
"""What masks put in the place of a logit is at most this: softmax makes 0 of it."""


@dataclass(frozen=True)
class Left:
    """A softmax that is no attention that can be converted.

    Attributes:
        name: of its node; shape: of its logits.
        reason: what is missing.
    """

    name: str
    shape: tuple[int, ...]
    reason: str


class _Unlike(Exception):
    """Why it is no attention."""


def fuse_attention(graph: Graph, shapes: Shapes, known: Mapping[str, Numbers]) -> list[Left]:
    """Put one step in the place of those of each attention, in place.

    Args:
        shapes: of values, and known: single numbers, constant or of sizes.
    Returns:
        What was not matched.
    """
    left, changes = [], dict[Step, Sequence[Step]]()
    finder = _Finder(graph, shapes, known)
    for step in graph.steps:
        if step.op == "Softmax":
            try:
                last, steps = finder.around(step)
                changes[last] = steps
            except _Unlike as reason:
                left.append(Left(step.title.partition(" ")[2], shapes.get(step.outputs[0], ()), str(reason)))
    graph.replace(changes)
    return left


class _Finder:
    def __init__(self, graph: Graph, shapes: Shapes, known: Mapping[str, Numbers]) -> None:
        self._made, self._read = graph.producers(), graph.readers()
        self._shapes, self._known = shapes, known

    def around(self, softmax: Step) -> tuple[Step, list[Step]]:
        """The last product of the attention around a softmax, and the steps that take its place.

        Raises:
            _Unlike: there is none.
        """
        shape = self._shapes.get(softmax.outputs[0], ())
        axis = softmax.attributes.get("axis", -1 if softmax.opset >= 13 else 1)
        if len(shape) < 3 or axis % len(shape) != len(shape) - 1:
            raise _Unlike(f"its axis is {axis} of {len(shape)}, the last of three or more is needed")
        product, values = self._after(softmax)
        logits = _Logits(self, softmax)
        return product, logits.steps(product, values)

    def _after(self, softmax: Step) -> tuple[Step, str]:
        """The product that reads the probabilities, and the values in it."""
        value = softmax.outputs[0]
        while True:
            readers = self._read[value]
            passing = [step for step in readers if step.op in ("Cast", "Identity", "Dropout")]
            ops = sorted(step.op for step in readers)
            if ops == ["IsNaN", "Where"]:  # torch: rows that are masked whole give zeros
                chosen = next(step for step in readers if step.op == "Where")
                value = chosen.outputs[0]
            elif len(readers) == 1 and passing:
                value = passing[0].outputs[0]
            else:
                break
        products = [step for step in readers if self._is_product(step, transposed=False) and step.inputs[0] == value]
        if len(readers) > 1 and products:
            further = [step for step in readers if step not in products] or products[1:]
            others = ", ".join(step.title or "the graph's output" for step in further)
            raise _Unlike(f"its probabilities are also read by {others}")
        if not products:
            raise _Unlike(
                "no MatMul after it, but " + (", ".join(step.title or "the graph's output" for step in readers))
            )
        return products[0], products[0].inputs[1]

    def _is_product(self, step: Step | None, *, transposed: bool | None = None) -> bool:
        if step is None or step.op not in ("MatMul", "Einsum"):
            return False
        if step.op == "MatMul":
            return transposed is not True
        turned = _PRODUCTS.get(_renamed(str(step.attributes.get("equation", ""))))
        return turned is not None and transposed in (None, turned)

    # Read by _Logits ----------------------------------------------------------------------------------------------

    def made(self, value: str) -> Step | None:
        return self._made.get(value)

    def shape(self, value: str) -> tuple[int, ...]:
        return self._shapes.get(value, ())

    def is_number(self, value: str) -> bool:
        return value in self._known

    def number(self, value: str) -> float:
        return float(self._known[value].ravel()[0])

    def is_nothing(self, value: str) -> bool:
        """Whether a mask is zeros alone, as torch's baddbmm leaves one."""
        step = self.made(value)
        if self.is_number(value):
            return self.number(value) == 0
        if step is not None and step.op == "ConstantOfShape":
            filled = step.attributes.get("value")
            return filled is None or not np.any(filled)
        if step is not None and step.op in ("Expand", "Cast", "Identity"):
            return self.is_nothing(step.inputs[0])
        return step is not None and step.op == "Mul" and any(self.is_nothing(name) for name in step.inputs)

    def scaled(self, value: str) -> Iterator[tuple[str, str, bool]]:
        """What a value is a multiple of, the factor, and whether it divides."""
        step = self.made(value)
        if step is not None and step.op in ("Mul", "Div"):
            a, b = step.inputs
            if self.is_number(b):
                yield a, b, step.op == "Div"
            elif self.is_number(a) and step.op == "Mul":
                yield b, a, False

    def transposed(self, value: str) -> str | None:
        """What a value is the transpose of, in its last two axes."""
        step, shape = self.made(value), self.shape(value)
        if step is None:
            return None
        if step.op == "Transpose" and step.attributes.get("perm") == _swapped(len(shape)):
            return step.inputs[0]
        # torch's exporter: three axes for the transpose, four around it
        turn = self.made(step.inputs[0]) if step.op == "Reshape" else None
        flat = self.made(turn.inputs[0]) if turn is not None and turn.op == "Transpose" else None
        if turn is not None and flat is not None and flat.op == "Reshape" and turn.attributes.get("perm") == [0, 2, 1]:
            before = self.shape(flat.inputs[0])
            if len(before) == 4 and (*before[:2], before[3], before[2]) == shape:
                return flat.inputs[0]
        return None

    def with_heads(self, value: str) -> str | None:
        """Of a value [B·H, N, D], the one [B, H, N, D] that it was made of."""
        step, shape = self.made(value), self.shape(value)
        if step is None or step.op != "Reshape":
            return None
        before = self.shape(step.inputs[0])
        fits = len(before) == 4 and len(shape) == 3 and (before[0] * before[1], *before[2:]) == shape
        return step.inputs[0] if fits else None

    def is_product(self, step: Step | None) -> bool:
        return self._is_product(step)

    def is_transposed(self, step: Step) -> bool:
        """Whether a product takes its second factor transposed."""
        return step.op == "Einsum" and _PRODUCTS[_renamed(str(step.attributes["equation"]))]


class _Logits:
    """How the logits before a softmax are made."""

    def __init__(self, finder: _Finder, softmax: Step) -> None:
        self._finder, self._softmax = finder, softmax
        self._factors: list[tuple[str, bool]] = []
        """Of the logits, and whether each divides."""
        self._masks: list[tuple[str, str, int]] = []
        """Kind ("added", "kept", "dropped"), value, and how many of the factors it stands behind."""
        self._new: list[Step] = []
        self._fill = 0.0
        value = softmax.inputs[0]
        while True:
            step = finder.made(value)
            if step is None or finder.is_product(step):
                break
            value = self._before(step, value)
        if step is None:
            raise _Unlike("no MatMul before it, but an input of the graph")
        self._product = step

    def _before(self, step: Step, value: str) -> str:
        """What a step does with logits is noted; where they come from."""
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
            raise _Unlike(f"{step.title} before it puts no large negative number in the places that are masked")
        raise _Unlike(f"no MatMul before it, but {step.title}")

    def _leads_to_product(self, value: str) -> bool:
        """Whether a value is logits: a product of their shape, behind steps that keep it."""
        finder, shape = self._finder, self._finder.shape(self._softmax.outputs[0])
        while (step := finder.made(value)) is not None and finder.shape(value) == shape:
            if finder.is_product(step):
                return True
            scaled = next(finder.scaled(value), None)
            if scaled is not None:
                value = scaled[0]
            elif step.op in ("Cast", "Identity"):
                value = step.inputs[0]
            elif step.op == "Add":
                return any(self._leads_to_product(name) for name in step.inputs)
            elif step.op == "Where":
                return any(self._leads_to_product(name) for name in step.inputs[1:])
            else:
                return False
        return False

    def steps(self, last: Step, values: str) -> list[Step]:
        finder, product = self._finder, self._product
        q, k = product.inputs
        for source, factor, divides in finder.scaled(q):
            q = source
            self._factors.append((factor, divides))
        if finder.is_transposed(product):
            for source, factor, divides in finder.scaled(k):
                k = source
                self._factors.append((factor, divides))
        else:
            k = self._keys(k)
        output = last.outputs[0]
        heads = [finder.with_heads(x) for x in (q, k, values)] if len(finder.shape(q)) == 3 else []
        unflatten = bool(heads) and all(heads)
        if unflatten:
            q, k, values = (str(x) for x in heads)
            output = f"{last.outputs[0]}:heads"
        inputs = [q, k, values, self._mask(finder.shape(q) if unflatten else ()), *(name for name, _ in self._factors)]
        attention = Step(
            "trtconvert::attention",
            tuple(inputs),
            (output,),
            {"divided": [divides for _, divides in self._factors]},
            self._softmax.scope,
            self._softmax.title,
        )
        joined = [Step("trtconvert::join_heads", (output,), last.outputs, {}, "", last.title)] if unflatten else []
        return [*self._new, attention, *joined]

    def _keys(self, value: str) -> str:
        """Keys of which a value is the transpose, perhaps scaled, before or after."""
        finder = self._finder
        for source, factor, divides in finder.scaled(value):
            value = source
            self._factors.append((factor, divides))
        found = finder.transposed(value)
        if found is None:
            return self._step("Transpose", [value], {"perm": _swapped(len(finder.shape(value)))})
        for source, factor, divides in finder.scaled(found):
            found = source
            self._factors.append((factor, divides))
        return found

    def _mask(self, heads: tuple[int, ...]) -> str:
        """One mask, of all; empty where there is none.

        Args:
            heads: shape of the queries whose heads the logits have not, [B, H, N, D].
        """
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
                    for factor, divides in self._factors[:before]:  # they scale what was added before them too
                        added = self._step("Div" if divides else "Mul", [added, factor], {})
                else:
                    added = self._step("trtconvert::as_added", [value], {"kept": kind == "kept"})
                mask = added if not mask else self._step("Add", [mask, added], {})
        return self._step("trtconvert::split_heads", [mask], {"heads": heads[1]}) if heads else mask

    def _step(self, op: str, inputs: Sequence[str], attributes: Mapping[str, object]) -> str:
        name = f"{self._softmax.outputs[0]}:{op.rpartition(':')[2].lower()}{len(self._new)}"
        self._new.append(Step(op, tuple(inputs), (name,), attributes, "", self._softmax.title))
        return name


def _swapped(rank: int) -> list[int]:
    return [*range(rank - 2), rank - 1, rank - 2]


def _renamed(equation: str) -> str:
    """An equation with the letters of `_PRODUCTS`."""
    flat = equation.replace(" ", "")
    for known in _PRODUCTS:
        if len(known) == len(flat):
            letters = dict(zip(flat, known, strict=True))
            if "".join(letters[letter] for letter in flat) == known and len(set(letters.values())) == len(letters):
                return known
    return flat
