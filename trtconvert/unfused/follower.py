"""Follows the calls of a forward from products of queries and keys to products with values; see `trtconvert.unfused`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.weak import WeakTensorKeyDictionary

from trtconvert.mixed_types import writes_in_place
from trtconvert.unfused.layout import Layout
from trtconvert.unfused.products import PRODUCTS, Product, product_of
from trtconvert.unfused.steps import (
    OF_FIRST,
    OF_SHAPES,
    STEPS,
    TURNS,
    Exponentials,
    Known,
    NotAttention,
    Probabilities,
    Quotients,
    Scores,
    Softmax,
    Unlike,
    in_places,
    order_of,
    turned,
    version_of,
)

_SOFTMAXES = {torch.softmax, Tensor.softmax, functional.softmax, torch.special.softmax}

_RESHAPES = {Tensor.reshape, torch.reshape, Tensor.view, Tensor.flatten, torch.flatten}

_BEGIN = PRODUCTS | _SOFTMAXES | _RESHAPES | TURNS
"""Functions that are followed as long as no tensor is known: they start an attention."""

_FARTHEST = 3
"""After this number of calls that are not followed a tensor no longer counts as scores or probabilities."""


class Attention(NamedTuple):
    """One attention as a model computes it.

    Attributes:
        query, key, value: [B, H, Nq, D], [B, Hkv, Nk, D], [B, Hkv, Nk, Dv], where Hkv divides H.
        mask: broadcastable to [B, H, Nq, Nk]; boolean, true where scores count, or added to them; or None.
        scale: factor of the scores.
        obstacle: why it cannot become INT8 attention; empty if it can. Attention whose samples and heads still share an axis,
            [B·H, Nq, D] and so on, cannot.
        exact: computes it as the model wrote it, [B, H, Nq, Dv].
        softmax: of attention that the model writes out; None for `scaled_dot_product_attention`.
        split: true if samples and heads shared an axis in the model.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    scale: float
    obstacle: str
    exact: Callable[[], Tensor]
    softmax: Softmax | None = None
    split: bool = False


@dataclass(frozen=True)
class UnfusedAttention:
    """An attention that a model writes out: scores, values and layout are the tensors as the model multiplies them, and their
    axes."""

    attention: Attention
    softmax: Softmax
    scores: Scores
    values: Tensor
    layout: Layout


def unfused_attention(attention: UnfusedAttention) -> Tensor:
    """Computes the attention as the model wrote it. Hooks of this function may compute it in another way, see
    `trtconvert.interception`."""
    return attention.attention.exact()


def left_softmax(softmax: Softmax) -> None:
    """Gets, by its hook, each softmax that is not part of a converted attention, at the end of a forward."""


Proceed = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""Computes a call as usual: gets the function, positional and named arguments."""


class Unfused:
    """Follows the calls of one forward.

    Args:
        attend: computes an attention; a result of `Attention.exact` that it returns stays the same to the bit.
        samples: number of samples of the forward.
        module: returns the path of the module that is running.
    """

    def __init__(
        self, attend: Callable[[UnfusedAttention], Tensor], samples: int, module: Callable[[], str] = lambda: ""
    ) -> None:
        self._attend, self._samples, self._module = attend, samples, module
        self._known: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._unmerged: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        """The tensors [M, N, …] that tensors [M·N, …] of three axes were reshaped from."""
        self._softmaxes: list[Softmax] = []

    def __call__(self, func: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any], proceed: Proceed) -> Any:
        """Follows and computes one call of the forward."""
        if not self._known and func not in _BEGIN:
            return proceed(func, args, named)
        if named:
            args, named = in_places(func, args, named)
        if func in PRODUCTS:
            return self._multiply(func, args, named, proceed)
        if func in _SOFTMAXES:
            return self._softmax(func, args, named, proceed(func, args, named))
        order = order_of(func, args, named) if func in TURNS else None
        known = self._stepped(func, args, named, order) if self._known else None
        result = proceed(func, args, named)
        if func in _RESHAPES or order is not None:
            self._note_merge(args, result, order)
        if isinstance(known, Quotients):
            known = self._probabilities(known.scores, known.key, tuple(result.shape))
        if known is not None:
            self._known[result if isinstance(result, Tensor) else result[0]] = known
        elif self._known:
            self._read(func, args, named, result)
        return result

    def left(self) -> list[Softmax]:
        """Returns each softmax whose product was not passed on, with the reason, at the end of a forward."""
        left = [softmax for softmax in self._softmaxes if not softmax.handed_over]
        for softmax in left:
            others = f", but {softmax.readers[0]}" if softmax.readers else ""
            softmax.reason = softmax.reason or f"no product with values follows its softmax{others}"
        return left

    def _of(self, x: Any) -> Known | None:
        return self._known.get(x) if isinstance(x, Tensor) else None

    def _stepped(
        self, func: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any], order: Sequence[int] | None
    ) -> Known | None:
        """Returns what is known of the result of a call."""
        if order is not None:
            return turned(self._of(args[0]), order)
        if func not in STEPS or not any(known := [self._of(x) for x in args]):
            return None
        try:
            return STEPS[func](known, args, named)
        except NotAttention as reason:
            of = next(x for x in known if x is not None)
            return Unlike(str(reason), of.readers, getattr(of, "softmax", None))

    def _read(self, func: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any], result: Any) -> None:
        """Records that a call which is not followed reads or writes a known tensor."""
        if func in OF_SHAPES:
            return
        results = [x for x in _with_entries_of_lists([result]) if isinstance(x, Tensor)]
        name = _name_of(func)
        writes = writes_in_place(func)
        for place, x in enumerate(_with_entries_of_lists([*args, *named.values()])):
            known = self._of(x)
            if known is None or not (results or writes) or (place and func in OF_FIRST):
                continue
            calls, reason = (known.calls, known.reason) if isinstance(known, Unlike) else (0, "")
            softmax = known.softmax if isinstance(known, (Probabilities, Unlike)) else None
            between = (
                "softmax and the product with values" if softmax else "product of queries and keys and its softmax"
            )
            found = Unlike(reason or f"{name} stands between its {between}", known.readers, softmax, calls + 1)
            if not isinstance(known, Unlike):
                known.readers.append(name)
            if writes and not place:
                self._known[x] = found
            for other in results:
                if other.dim() >= 3 and calls < _FARTHEST:
                    self._known[other] = found

    # Softmax and products -------------------------------------------------------------------------------------------

    def _softmax(
        self, func: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any], result: Tensor
    ) -> Tensor:
        given = dict(zip(("input", "dim"), args, strict=False)) | named
        known, dim = self._of(given["input"]), given.get("dim")
        if result.dim() < 3 or not isinstance(dim, int):
            if self._known:
                self._read(func, args, named, result)
            return result
        if isinstance(known, Scores):
            self._known[result] = self._probabilities(known, known.axes[dim], tuple(result.shape))
        else:
            softmax = Softmax(self._module(), tuple(result.shape))
            reason = "no product of queries and keys of one sample comes before its softmax, as in linear attention"
            if isinstance(known, Unlike) and known.softmax is None:
                reason = known.reason
            self._known[result] = Unlike(reason, softmax.readers, softmax)
        return result

    def _probabilities(self, scores: Scores, key: str, shape: tuple[int, ...]) -> Probabilities | Unlike:
        """Returns what is known of a softmax of scores over an axis."""
        softmax = Softmax(self._module(), shape, readers=scores.readers)
        self._softmaxes.append(softmax)
        if (key in scores.of[0]) != (key in scores.of[1]):
            return Probabilities(scores, key, scores.axes, softmax)
        return Unlike("its softmax is over samples or heads, not over keys", scores.readers, softmax)

    def _multiply(
        self, func: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any], proceed: Proceed
    ) -> Tensor:
        def written() -> Tensor:
            return proceed(func, args, named)

        product = product_of(func, args, named)
        factors = product.factors if product is not None else ()
        for place, x in enumerate(factors):
            known = self._of(x)
            if product is not None and isinstance(known, Probabilities):
                return self._with_values(product, place, known, written)
            if isinstance(known, Unlike) and known.softmax is not None:
                self._leave(known.softmax, known.reason)
                return written()
            if isinstance(known, Exponentials):
                reason = "its exponentials are not divided by their sums before the product with values"
                self._leave(Softmax(self._module(), tuple(x.shape)), reason)
        result = written()
        if self._known:
            self._read(func, args, named, result)
        if product is not None and product.is_of_samples:
            versions = tuple(version_of(x) for x in product.factors)
            scores = Scores(product.factors, product.of, product.result, versions=versions)
            try:
                scores = scores.times(product.alpha)
                self._known[result] = scores if product.added is None else scores.marked("add", *product.added)
            except NotAttention as reason:
                self._known[result] = Unlike(str(reason), scores.readers)
        return result

    def _leave(self, softmax: Softmax, reason: str) -> None:
        softmax.reason = softmax.reason or reason
        if softmax not in self._softmaxes:
            self._softmaxes.append(softmax)

    def _with_values(
        self, product: Product, place: int, probabilities: Probabilities, written: Callable[[], Tensor]
    ) -> Tensor:
        values, scores, softmax = product.factors[1 - place], probabilities.scores, probabilities.softmax
        try:
            scores.refuse_changed()
            layout = Layout.of(product, place, probabilities, self._made_of)
            obstacle = ""
            if not layout.heads:
                layout, obstacle = layout.with_heads((*scores.factors, values), self._samples)
            q, k, v = layout.tensors(scores, values)
            mask = layout.mask(scores.marks, q.dtype)
        except NotAttention as reason:
            self._leave(softmax, str(reason))
            return written()
        made: list[Tensor] = []

        def in_order() -> Tensor:
            made[:] = (result := written(), layout.in_order(result))
            return made[1]

        softmax.handed_over = True
        attention = Attention(q, k, v, mask, scores.scale, obstacle, in_order, softmax, layout.split)
        output = self._attend(UnfusedAttention(attention, softmax, scores, values, layout))
        return made[0] if made and output is made[1] else layout.as_written(output)

    def _note_merge(self, args: tuple[Any, ...], result: Tensor, order: Sequence[int] | None) -> None:
        """Records a reshape that may merge samples and heads, or a transpose of its result."""
        if not args or result.dim() != 3:
            return
        if order is None:
            # A reshape that keeps the first axis does not merge samples with heads: `flatten(2)` of an image is one. Its sizes
            # are not compared: a height that equals the channels by chance would become a constant of an export.
            if args[0].dim() == 4 and args[0].shape[1] != 1 and args[0].shape[0] == result.shape[0]:
                return
            # Only known sizes are compared: comparing symbolic sizes would add constraints to an export.
            sizes = [*zip(args[0].shape[2:], result.shape[1:], strict=False)]
            if args[0].dim() == 4 and not any(isinstance(a * b, int) and a != b for a, b in sizes):
                self._unmerged[result] = args[0]
        elif tuple(order) == (0, 2, 1) and (made_of := self._made_of(args[0])) is not None:
            self._unmerged[result] = made_of.transpose(2, 3)

    def _made_of(self, x: Tensor) -> Tensor | None:
        """Returns the tensor [B, H, …] that a tensor [B·H, …] of three axes was reshaped from; None if it is not known."""
        made_of = self._unmerged.get(x) if x.dim() == 3 else None
        return made_of if made_of is not None and made_of.shape[2:] == x.shape[1:] else None


def _with_entries_of_lists(values: Iterable[Any]) -> Iterator[Any]:
    for x in values:
        if isinstance(x, (list, tuple)):
            yield from x
        else:
            yield x


def _name_of(func: Callable[..., Any]) -> str:
    """Returns the usual name of a function of torch, and the attribute's name for the access of an attribute."""
    name = getattr(func, "__name__", str(func))
    return func.__self__.__name__ if name in ("__get__", "__set__") else name  # type: ignore[attr-defined]
