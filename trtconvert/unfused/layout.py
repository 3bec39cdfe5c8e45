"""The places of an attention's axes in its tensors, and their conversion to those of `scaled_dot_product_attention`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trtconvert.unfused.products import Product
from trtconvert.unfused.steps import Mark, NotAttention, Probabilities, Scores

CHANNEL, HEAD = "*+"
"""The axes of the values' channels, and of heads that share an axis with the samples in the model."""

MOST_HEADS = 256
"""Largest number of heads that share an axis with the samples, if the model's reshapes do not tell the number. Larger numbers are
windows, places or frames; their number follows the size."""

Unmerged = Callable[[Tensor], Tensor | None]
"""Returns the tensor [B, H, …] that a tensor [B·H, …] of three axes was reshaped from; None if it is not known."""


@dataclass(frozen=True)
class Layout:
    """The axes of an attention, a letter each.

    Attributes:
        samples: axes that become the first axis.
        heads: axes that become the second; those of heads that share keys are the last.
        query, key: axes of the scores.
        depth: the axis that the product of queries and keys sums over.
        queries: place of the queries among the factors of the scores.
        values: axes of the values.
        result: axes of the product of probabilities and values.
        sizes: of the axes of the probabilities.
        unmerged: for the attention's tensors.
    """

    samples: str
    heads: str
    query: str
    key: str
    depth: str
    queries: int
    values: str
    result: str
    sizes: Mapping[str, int]
    unmerged: Unmerged

    @staticmethod
    def of(product: Product, place: int, probabilities: Probabilities, unmerged: Unmerged) -> Layout:
        """Returns the layout of a product with values.

        Args:
            place: of the probabilities among its factors.
        Raises:
            NotAttention: the product is not part of an attention.
        """
        scores, key = probabilities.scores, probabilities.key
        names = dict(zip(product.of[place], probabilities.axes, strict=True))
        new = [letter for letter in product.of[1 - place] if letter not in names]
        names |= dict.fromkeys(new, CHANNEL)
        values, result = ("".join(map(names.__getitem__, axes)) for axes in (product.of[1 - place], product.result))
        queries = int(key in scores.of[0])
        of_queries, of_keys = scores.of[queries], scores.of[1 - queries]
        lead = [axis for axis in of_queries if axis in probabilities.axes]
        query = max((axis for axis in lead if axis not in of_keys), key=probabilities.axes.index)
        lead.remove(query)
        if len(new) != 1 or key in result or key not in values:
            raise NotAttention("the product after its softmax does not sum over the axis of the softmax")
        if product.alpha != 1 or product.added is not None:
            raise NotAttention("the product after its softmax adds or multiplies something else")
        (depth,) = set(of_queries) & set(of_keys) - set(probabilities.axes)
        if {*of_keys} - {key, depth, *lead} or query in values or {*result} != {*lead, query, CHANNEL}:
            raise NotAttention("its queries, keys and values have axes that attention does not have")
        shared = [axis for axis in lead if axis in of_keys or axis in values]
        if not shared:
            raise NotAttention("its samples share keys")
        order, count = "".join(shared + [axis for axis in lead if axis not in shared]), max(1, len(shared) - 1)
        sizes = dict(zip(probabilities.axes, product.factors[place].shape, strict=True))
        return Layout(order[:count], order[count:], query, key, depth, queries, values, result, sizes, unmerged)

    def of_any_size(self, heads: int) -> Layout:
        """Returns the layout without the sizes and tensors of one forward. heads: their number, if they share an axis with
        samples."""
        return replace(self, heads=self.heads or HEAD, sizes={HEAD: heads}, unmerged=_not_known)

    def with_heads(self, tensors: Sequence[Tensor], samples: int) -> tuple[Layout, str]:
        """Returns the layout with samples and heads apart, which share an axis; and the reason why they cannot be told apart, or
        "".

        Args:
            tensors: queries, keys and values.
            samples: number of samples of the forward.
        """
        rows = self.sizes[self.samples]
        known = [x.shape[1] for tensor in tensors if (x := self.unmerged(tensor)) is not None]
        if not known and (rows % samples or rows // samples > MOST_HEADS):
            return self, f"its {rows} rows are not {samples} samples of up to {MOST_HEADS} heads"
        heads = known[0] if known else rows // samples
        return replace(self, heads=HEAD, sizes={**self.sizes, self.samples: rows // heads, HEAD: heads}), ""

    def at(self, scores: Scores) -> Layout:
        """Returns the layout of scores of other sizes; see `of_any_size`."""
        sizes: dict[str, int] = {}
        for axes, factor in zip(scores.of, scores.factors, strict=True):
            for axis, size in zip(axes, factor.shape, strict=True):
                # Symbolic sizes are not compared: that would add constraints to an export.
                if axis not in sizes or not isinstance(size, int) or size != 1:
                    merged = axis == self.samples and self.heads == HEAD and HEAD not in axes
                    sizes[axis] = size // self.sizes[HEAD] if merged else size
        return replace(self, sizes={**self.sizes, **sizes})

    @property
    def split(self) -> bool:
        """True if samples and heads share an axis in the model, and not here."""
        return self.heads == HEAD and self.sizes[HEAD] != 1

    def tensors(self, scores: Scores, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns queries, keys and values, [B, H, Nq, D], [B, Hkv, Nk, D] and [B, Hkv, Nk, Dv], of one type; or [B·H, …]."""
        q = self._arranged(scores.factors[self.queries], scores.of[self.queries], self.query, self.depth)
        for mark in scores.marks:
            if mark.kind == "times":
                factor = self._arranged(mark.tensor, mark.axes, self.query, self.key)
                if factor.shape[-1] != 1:
                    raise NotAttention("its scores are multiplied by a tensor that differs between keys")
                q = q * factor
        k = self._arranged(scores.factors[1 - self.queries], scores.of[1 - self.queries], self.key, self.depth)
        v = self._arranged(values, self.values, self.key, CHANNEL)
        k, v = self._of_key_heads(k.to(v.dtype), v)
        return self._merged(self._expanded(q).to(v.dtype)), self._merged(k), self._merged(v)

    def mask(self, marks: Sequence[Mark], dtype: torch.dtype) -> Tensor | None:
        """Returns the mask, broadcastable to [B, H, Nq, Nk]: numbers that are added to the scores, or truth values; None for
        none.

        Args:
            dtype: of the queries.
        """
        kept: Tensor | None = None
        added: Tensor | None = None
        for mark in marks:
            if mark.kind == "times":
                continue
            x = self._arranged(mark.tensor, mark.axes, self.query, self.key)
            if mark.kind in ("keep", "drop"):
                x = x if mark.kind == "keep" else ~x
                kept = x if kept is None else kept & x
            elif x.shape[-1] != 1:  # softmax ignores a number that is added for all keys
                x = x if mark.factor == 1 else x * mark.factor
                added = x if added is None else added + x
        mask = kept
        if added is not None:
            mask = added.to(dtype)
            if kept is not None:
                mask = torch.where(kept, mask, -math.inf)
        return None if mask is None else self._merged(self._even(mask))

    def in_order(self, written: Tensor) -> Tensor:
        """Returns the product as the model wrote it, in the order of the queries."""
        return self._merged(self._arranged(written, self.result, self.query, CHANNEL))

    def as_written(self, output: Tensor) -> Tensor:
        """Returns an output in the order of the queries as the model writes the product."""
        if self.heads == HEAD:
            output = output.flatten(0, 1)
        elif len(self.samples) > 1 or len(self.heads) > 1:
            output = output.reshape(*(self.sizes[axis] for axis in self.samples + self.heads), *output.shape[-2:])
        made = self.samples + self.heads.replace(HEAD, "") + self.query + CHANNEL
        return output if made == self.result else output.permute([made.index(axis) for axis in self.result])

    def _arranged(self, x: Tensor, axes: str, *last: str) -> Tensor:
        """Returns a tensor with the axes [*samples, *heads, *last]; missing axes have size 1."""
        if self.heads == HEAD and self.samples in axes and HEAD not in axes:
            x, axes = self._split_samples(x, axes.index(self.samples)), axes.replace(self.samples, self.samples + HEAD)
        order = [*self.samples, *self.heads, *last]
        places = [axes.index(axis) for axis in order if axis in axes]
        if places != sorted(places):
            x = x.permute(places)
        for place, axis in enumerate(order):
            if axis not in axes:
                x = x.unsqueeze(place)
        return x

    def _split_samples(self, x: Tensor, place: int) -> Tensor:
        made_of = self.unmerged(x) if place == 0 else None
        if made_of is not None and made_of.shape[1] == self.sizes[HEAD]:
            return made_of
        heads = 1 if x.shape[place] == 1 else self.sizes[HEAD]
        return x.unflatten(place, (-1, heads))

    def _expanded(self, x: Tensor, axes: str | None = None) -> Tensor:
        """Returns an arranged tensor expanded to the probabilities' sizes of samples and heads, or of some of these axes."""
        axes = self.samples + self.heads if axes is None else axes
        order = self.samples + self.heads
        short = [axis for axis, size in zip(order, x.shape, strict=False) if axis in axes and size == 1]
        if all(self.sizes[axis] == 1 for axis in short):
            return x
        return x.expand(*(self.sizes[axis] if axis in short else -1 for axis in order), -1, -1)

    def _of_key_heads(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Returns arranged keys and values with the same heads; heads that queries share are not repeated."""
        own = [
            axis
            for place, axis in enumerate(self.heads, len(self.samples))
            if k.shape[place] != 1 or v.shape[place] != 1
        ]
        if self.heads[: len(own)] != "".join(own):
            own = [*self.heads]
        axes = self.samples + "".join(own) if len(self.samples) > 1 else "".join(own)
        return self._expanded(k, axes), self._expanded(v, axes)

    def _even(self, x: Tensor) -> Tensor:
        """Expands an arranged tensor so that among axes that will be merged either all broadcast or none."""
        start = 0
        for part in (self.samples, self.heads):
            ones = [size == 1 for size in x.shape[start : start + len(part)]]
            if any(ones) and not all(ones):
                x = self._expanded(x, part)
            start += len(part)
        return x

    def _merged(self, x: Tensor) -> Tensor:
        """Returns an arranged tensor [*samples, *heads, M, N] as [B, H, M, N], or as [B, M, N] without heads."""
        if len(self.heads) > 1:
            x = x.flatten(len(self.samples), len(self.samples) + len(self.heads) - 1)
        return x.flatten(0, len(self.samples) - 1) if len(self.samples) > 1 else x


def _not_known(_: Tensor) -> Tensor | None:
    return None
