"""Follows scores on their way to a softmax, and probabilities after it: scales, masks, casts, orders of axes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from trtconvert.unfused.products import is_number

MASKED = -1e4
"""Largest number that a mask may put in the place of a score; its softmax is 0."""


class NotAttention(Exception):
    """The calls are no attention; the text is the reason."""


@dataclass(eq=False)
class Softmax:
    """One softmax of a forward.

    Attributes:
        module: path of the module that calls it.
        shape: of its result.
        reason: why the calls around it are no attention that can be passed on; "" if they are.
        readers: other functions that read its scores or probabilities.
        handed_over: whether a product of its probabilities and values was passed on.
    """

    module: str
    shape: tuple[int, ...]
    reason: str = ""
    readers: list[str] = field(default_factory=list)
    handed_over: bool = False

    @property
    def obstacle(self) -> str:
        """The reason to leave it as it is, after the whole forward; "" for none."""
        others = ", ".join(dict.fromkeys(self.readers))
        return self.reason or (f"its scores or probabilities are also read by {others}" if others else "")


Kind = Literal["add", "keep", "drop", "times"]


def version_of(x: Tensor) -> int:
    """Returns a number that grows with each write into a tensor or a view of it; 0 where torch does not count."""
    return 0 if x.is_inference() or torch.compiler.is_compiling() else x._version


@dataclass(frozen=True)
class Mark:
    """An operation on scores between their product and their softmax.

    Attributes:
        kind: "add", "keep" (where it is true), "drop" (where it is true) or "times".
        tensor: the other operand.
        axes: of the tensor.
        factor: of a tensor that is added.
        version: of the tensor, see `version_of`.
    """

    kind: Kind
    tensor: Tensor
    axes: str
    factor: float = 1.0
    version: int = 0


@dataclass(frozen=True)
class Scores:
    """A product of two tensors, perhaps of queries and keys.

    Attributes:
        factors: the two tensors.
        of: axes of each factor.
        axes: of the scores, in their present order.
        scale: factor of the product.
        versions: of the factors, see `version_of`.
        readers: see `Softmax`; everything computed from the product shares them.
    """

    factors: tuple[Tensor, Tensor]
    of: tuple[str, str]
    axes: str
    scale: float = 1.0
    marks: tuple[Mark, ...] = ()
    versions: tuple[int, ...] = ()
    readers: list[str] = field(default_factory=list)

    @property
    def is_whole(self) -> bool:
        """True if both factors have all axes of the scores but the other's tokens, unlike products with a table of positions."""
        return all(len({*of} & {*self.axes}) == len(self.axes) - 1 for of in self.of)

    def refuse_changed(self) -> None:
        """
        Raises:
            NotAttention: the model has written into a factor or a mask since.
        """
        read = [*zip(self.factors, self.versions, strict=True), *((mark.tensor, mark.version) for mark in self.marks)]
        if any(version_of(x) != version for x, version in read):
            raise NotAttention("the model writes into its queries, keys or mask before the product with values")

    def times(self, factor: float) -> Scores:
        """Returns the scores multiplied by a number."""
        if not factor > 0:
            raise NotAttention(f"its scores are multiplied by {factor:g}")
        marks = [replace(mark, factor=mark.factor * factor) if mark.kind == "add" else mark for mark in self.marks]
        return replace(self, scale=self.scale * factor, marks=tuple(marks))

    def marked(self, kind: Kind, tensor: Tensor, factor: float = 1.0) -> Scores:
        """Returns the scores with an operation by a tensor that broadcasts to them."""
        if tensor.dim() > len(self.axes):
            raise NotAttention(f"a mask of {tensor.dim()} axes meets its scores, which have {len(self.axes)}")
        if kind == "times" and any(mark.kind == "add" for mark in self.marks):
            raise NotAttention("its scores are multiplied by a tensor after a mask")
        mark = Mark(kind, tensor, self.axes[len(self.axes) - tensor.dim() :], factor, version_of(tensor))
        return replace(self, marks=(*self.marks, mark))


@dataclass(frozen=True)
class _OfScores:
    """A tensor that is computed from scores."""

    scores: Scores

    @property
    def readers(self) -> list[str]:
        return self.scores.readers


class Largest(_OfScores):
    """The largest scores along an axis, which some models subtract before the softmax, without effect on the result."""


class Exponentials(_OfScores):
    """The exponentials of scores; divided by their sums along the keys they are probabilities."""


@dataclass(frozen=True)
class Sums(_OfScores):
    """The sums of exponentials along the axis `key`."""

    key: str


class Quotients(Sums):
    """Exponentials divided by these sums: a softmax."""


@dataclass(frozen=True)
class Probabilities(_OfScores):
    """The result of a softmax over the axis `key` of scores. axes: of the result, in their present order."""

    key: str
    axes: str
    softmax: Softmax


@dataclass(frozen=True)
class Missing(_OfScores):
    """The places of probabilities that are NaN: the rows of queries whose keys are all masked."""

    probabilities: Probabilities


@dataclass(frozen=True)
class Unlike:
    """A tensor that is not scores, or probabilities of a softmax, for a reason.

    Attributes:
        calls: number of calls since then that were not followed.
    """

    reason: str
    readers: list[str]
    softmax: Softmax | None = None
    calls: int = 0


Known = Scores | Largest | Exponentials | Sums | Probabilities | Missing | Unlike
"""The knowledge about a tensor."""

Step = Callable[[Sequence[Known | None], tuple[Any, ...], Mapping[str, Any]], Known | None]
"""Maps knowledge of the positional arguments, these arguments, and the named arguments to knowledge of the result; None for a
call that is not followed. Raises NotAttention."""


def _same(known: Sequence[Known | None], args: tuple[Any, ...], named: Mapping[str, Any]) -> Known | None:
    return known[0] if known else None


def _dropout(known: Sequence[Known | None], args: tuple[Any, ...], named: Mapping[str, Any]) -> Known | None:
    share = named.get("p", args[1] if len(args) > 1 else 0.5)
    drops = named.get("training", named.get("train", args[2] if len(args) > 2 else True))
    if known[0] is not None and drops and share:
        raise NotAttention("it uses dropout")
    return known[0]


def order_of(func: Callable[..., Any], args: tuple[Any, ...], named: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Returns the order of axes that one of `TURNS` gives its first argument, a tensor; None for other forms of the call."""
    if named or not args or not isinstance(args[0], Tensor):
        return None
    axes = [*range(args[0].dim())]
    if func in _PERMUTES:
        order = args[1] if isinstance(args[1], (list, tuple)) else args[1:]
        return tuple(axes[axis] for axis in order)
    one, other = args[1:3] if len(args) == 3 else (-2, -1)
    axes[one], axes[other] = axes[other], axes[one]
    return tuple(axes)


def turned(known: Known | None, order: Sequence[int]) -> Known | None:
    """Returns scores or probabilities in another order of axes."""
    if not isinstance(known, (Scores, Probabilities)):
        return None
    return replace(known, axes="".join(known.axes[axis] for axis in order))


def _times(known: Sequence[Known | None], args: tuple[Any, ...], named: Mapping[str, Any]) -> Known | None:
    scores, factor = _with_other(known, args, named)
    if scores is None:
        return None
    return scores.times(float(factor)) if is_number(factor) else scores.marked("times", factor)


def _divided(known: Sequence[Known | None], args: tuple[Any, ...], named: Mapping[str, Any]) -> Known | None:
    if isinstance(known[0], Exponentials) and isinstance(sums := known[1], Sums) and sums.scores is known[0].scores:
        return Quotients(sums.scores, sums.key)
    scores, factor = _with_other(known, args, named)
    if scores is None or scores is not known[0]:
        return None
    if is_number(factor):
        return scores.times(1 / factor if factor else 0.0)
    return scores.marked("times", 1 / factor)


def _added(
    known: Sequence[Known | None], args: tuple[Any, ...], named: Mapping[str, Any], sign: float = 1.0
) -> Known | None:
    alpha = named.get("alpha", 1)  # of the second operand
    scores, mask = _with_other(known, args, {name: x for name, x in named.items() if name != "alpha"})
    if scores is None or not is_number(alpha):
        return None
    if scores is not known[0]:
        scores, alpha = scores.times(sign * alpha), sign
    return scores if is_number(mask) else scores.marked("add", mask, sign * alpha)


def _subtracted(known: Sequence[Known | None], args: tuple[Any, ...], named: Mapping[str, Any]) -> Known | None:
    return _added(known, args, named, -1.0) if isinstance(known[0], Scores) else None


def _exponential(known: Sequence[Known | None], args: tuple[Any, ...], named: Mapping[str, Any]) -> Known | None:
    return Exponentials(known[0]) if isinstance(known[0], Scores) and not named else None


def _sum(known: Sequence[Known | None], args: tuple[Any, ...], named: Mapping[str, Any]) -> Known | None:
    of = known[0]
    given = dict(zip(("input", "dim", "keepdim"), args, strict=False)) | dict(named)
    dim = given.get("dim")
    dim = dim[0] if isinstance(dim, (list, tuple)) and len(dim) == 1 else dim
    if not isinstance(of, Exponentials) or not given.get("keepdim") or not isinstance(dim, int):
        return None
    return Sums(of.scores, of.scores.axes[dim])


def _with_other(
    known: Sequence[Known | None], args: tuple[Any, ...], named: Mapping[str, Any]
) -> tuple[Scores | None, Any]:
    """Returns the scores and the other operand of an operation; None if no operand is scores."""
    if len(args) != 2 or named:
        return None, None
    place = 0 if isinstance(known[0], Scores) else 1
    scores, other, also = known[place], args[1 - place], known[1 - place]
    if not isinstance(scores, Scores) or not (is_number(other) or isinstance(other, Tensor)):
        return None, None
    if isinstance(also, Scores):
        if scores.is_whole == also.is_whole:
            raise NotAttention("its scores are made of two products")
        return (scores, other) if scores.is_whole else (also, args[place])
    return scores, other


def _filled(known: Sequence[Known | None], args: tuple[Any, ...], named: Mapping[str, Any]) -> Known | None:
    scores = known[0]
    given = dict(zip(("input", "mask", "value"), args, strict=False)) | dict(named)
    if not isinstance(scores, Scores) or "mask" not in given or "value" not in given:
        return None
    return _chosen(scores, "drop", given["mask"], given["value"])


def _where(known: Sequence[Known | None], args: tuple[Any, ...], named: Mapping[str, Any]) -> Known | None:
    if len(args) != 3 or named:
        return None
    if isinstance(missing := known[0], Missing):  # rows without keys give zeros
        zeros = is_number(args[1]) and args[1] == 0
        return missing.probabilities if zeros and known[2] is missing.probabilities else None
    place = 1 if isinstance(known[1], Scores) else 2
    scores = known[place]
    if not isinstance(scores, Scores):
        return None
    return _chosen(scores, "keep" if place == 1 else "drop", args[0], args[3 - place])


def _where_method(known: Sequence[Known | None], args: tuple[Any, ...], named: Mapping[str, Any]) -> Known | None:
    """Follows `scores.where(condition, other)`."""
    return _where([known[1], known[0], known[2]], (args[1], args[0], args[2]), named) if len(args) == 3 else None


def _missing(known: Sequence[Known | None], args: tuple[Any, ...], named: Mapping[str, Any]) -> Known | None:
    return Missing(of.scores, of) if isinstance(of := known[0], Probabilities) else None


def _chosen(scores: Scores, kind: Literal["keep", "drop"], mask: Tensor, fill: Any) -> Scores:
    """Returns scores with a mask that puts a number in the places that are not kept, or are dropped."""
    if is_number(fill):
        if fill > MASKED:
            raise NotAttention(f"its mask puts {fill:g} in the place of scores, which is no large negative number")
        return scores.marked(kind, mask)
    if not isinstance(fill, Tensor) or fill.dim():
        raise NotAttention("its mask puts a tensor in the place of scores")
    return scores.marked("add", torch.where(mask if kind == "keep" else ~mask, torch.zeros_like(fill), fill))


def _largest(known: Sequence[Known | None], args: tuple[Any, ...], named: Mapping[str, Any]) -> Known | None:
    scores = known[0]
    keeps = named.get("keepdim", len(args) > 2 and args[2])
    return Largest(scores) if isinstance(scores, Scores) and keeps else None


_PARAMETERS: Mapping[Callable[..., Any], Sequence[str]] = {
    **dict.fromkeys(
        (torch.matmul, torch.mul, torch.multiply, torch.div, torch.divide, torch.true_divide, torch.add, torch.sub),
        ("input", "other"),
    ),
    **dict.fromkeys((torch.bmm, Tensor.bmm), ("input", "mat2")),
    **dict.fromkeys((torch.baddbmm, Tensor.baddbmm), ("input", "batch1", "batch2")),
    **dict.fromkeys((Tensor.matmul, Tensor.mul, Tensor.mul_, Tensor.div, Tensor.div_), ("self", "other")),
    **dict.fromkeys((Tensor.add, Tensor.add_, Tensor.sub, Tensor.sub_), ("self", "other")),
    **dict.fromkeys((torch.permute, Tensor.permute), ("input", "dims")),
    **dict.fromkeys((torch.transpose, Tensor.transpose), ("input", "dim0", "dim1")),
    **dict.fromkeys((torch.swapaxes, Tensor.swapaxes), ("input", "axis0", "axis1")),
    torch.where: ("condition", "input", "other"),
    Tensor.where: ("self", "condition", "other"),
}
"""The parameters of functions that are followed by the places of their arguments."""


def in_places(
    func: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments of a call with those that were given by name at their places, as far as these are known."""
    for name in _PARAMETERS.get(func, ())[len(args) :]:
        if name not in named:
            break
        args = (*args, named[name])
        named = {other: x for other, x in named.items() if other != name}
    return args, named


_PERMUTES = {torch.permute, Tensor.permute}

TURNS = _PERMUTES | {
    torch.transpose,
    Tensor.transpose,
    torch.swapaxes,
    Tensor.swapaxes,
    torch.swapdims,
    Tensor.swapdims,
    Tensor.mT.__get__,  # pyright: ignore[reportAttributeAccessIssue]
}
"""Functions that change the order of axes."""

STEPS: Mapping[Callable[..., Any], Step] = {
    **dict.fromkeys(
        (
            Tensor.to,
            Tensor.float,
            Tensor.half,
            Tensor.bfloat16,
            Tensor.double,
            Tensor.type,
            Tensor.type_as,
            Tensor.contiguous,
            Tensor.clone,
            torch.clone,
            Tensor.detach,
            torch.detach,
        ),
        _same,
    ),
    **dict.fromkeys((torch.dropout, functional.dropout), _dropout),
    **dict.fromkeys(
        (torch.mul, torch.multiply, Tensor.mul, Tensor.mul_, Tensor.__mul__, Tensor.__rmul__, Tensor.__imul__), _times
    ),
    **dict.fromkeys(
        (
            torch.div,
            torch.divide,
            torch.true_divide,
            Tensor.div,
            Tensor.div_,
            Tensor.true_divide,
            Tensor.__truediv__,
            Tensor.__itruediv__,
        ),
        _divided,
    ),
    **dict.fromkeys((torch.add, Tensor.add, Tensor.add_, Tensor.__add__, Tensor.__radd__, Tensor.__iadd__), _added),
    **dict.fromkeys((torch.sub, torch.subtract, Tensor.sub, Tensor.sub_, Tensor.__sub__, Tensor.__isub__), _subtracted),
    **dict.fromkeys((torch.masked_fill, Tensor.masked_fill, Tensor.masked_fill_), _filled),
    torch.where: _where,
    Tensor.where: _where_method,
    **dict.fromkeys((torch.isnan, Tensor.isnan), _missing),
    **dict.fromkeys((torch.exp, Tensor.exp, Tensor.exp_), _exponential),
    **dict.fromkeys((torch.sum, Tensor.sum), _sum),
    **dict.fromkeys((torch.amax, Tensor.amax, torch.max, Tensor.max), _largest),
}
"""The functions that are followed."""

OF_FIRST = {function for function, step in STEPS.items() if step is _same} | {
    Tensor.expand_as,
    Tensor.view_as,
    Tensor.reshape_as,
}
"""Functions that read the values of their first argument alone."""

OF_SHAPES = {
    torch.zeros_like,
    torch.ones_like,
    torch.empty_like,
    torch.full_like,
    Tensor.new_zeros,
    Tensor.new_ones,
    Tensor.new_empty,
    Tensor.new_full,
    Tensor.new_tensor,
}
"""Functions that read no values."""
