"""Reads Einsum equations of two factors: finds the axes of queries, keys, values and logits, in any order and of any letters.

logits:  (batch, query, channel), (batch, key, channel) → (batch, query, key)
output:  (batch, query, key),     (batch, key, channel) → (batch, query, channel)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trtconvert.unfused.equations import axes_of


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
