"""Equations of einsum with two factors, which have a letter for each axis."""

from __future__ import annotations

import re
from collections.abc import Sequence

_EQUATION = re.compile(r"([a-zA-Z.]*),([a-zA-Z.]*)->([a-zA-Z.]*)")
_UNNAMED = 0x100
"""First letter for axes that an equation writes as three dots, the last axis first."""


def axes_of(equation: str, ranks: Sequence[int]) -> tuple[str, str, str] | None:
    """Returns the axes of the two factors and of their product.

    Returns:
        None if the equation does not have two factors, takes a diagonal, or does not fit the factors' numbers of axes; also if it
        names no result, as it then sums axes that both factors have, such as samples and heads.
    """
    match = _EQUATION.fullmatch(re.sub(r"\s", "", equation))
    if match is None or len(ranks) != 2:
        return None
    factors = [_named(match[place], rank) for place, rank in zip((1, 2), ranks, strict=True)]
    if None in factors:
        return None
    left, right = (str(factor) for factor in factors)
    dots = max((_unnamed_in(left), _unnamed_in(right)), key=len)
    result = match[3].replace("...", dots)
    whole = all(len(set(axes)) == len(axes) for axes in (left, right, result))
    return (left, right, result) if whole and "." not in result else None


def unnamed(count: int) -> str:
    """Returns letters for axes without one, which are aligned at the last axis, as in torch."""
    return "".join(chr(_UNNAMED + place) for place in reversed(range(count)))


def _named(axes: str, rank: int) -> str | None:
    """Returns the axes of a factor with letters for the dots; None if their number does not fit."""
    before, dots, after = axes.partition("...")
    missing = rank - len(before) - len(after)
    if "." in before + after or missing < 0 or (missing and not dots):
        return None
    return before + unnamed(missing) + after


def _unnamed_in(axes: str) -> str:
    return "".join(letter for letter in axes if ord(letter) >= _UNNAMED)
