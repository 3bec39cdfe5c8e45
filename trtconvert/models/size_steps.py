"""Finds sizes that a pipeline rounds, and the steps between sizes that run the same operations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trtconvert.errors import TrtconvertError, UserError

_FURTHEST = 64
"""The largest step that is tried: U-Nets halve their latents up to six times."""

_STEPS = (*(2**n for n in range(_FURTHEST.bit_length())), 3, 6, 12, 24)
"""The steps that are tried, halvings first. Each try runs a large model's Python code, which takes seconds."""

Range = tuple[int, int, int]


def refuse_rounded(size_of: Callable[[Mapping[str, int]], int], ranges: Mapping[str, Range]) -> None:
    """
    Args:
        size_of: maps the sizes of a pipeline's call to the size of a tensor that it passes to its model.
        ranges: (min, opt, max) of each size of the call, with "batch" for the number of images.
    Raises:
        UserError: the pipeline rounds one of the sizes: the tensor's size differs at the max, and is the same at opt and min.
    """
    opt = {name: middle for name, (_, middle, _) in ranges.items()}
    for name, (low, middle, high) in ranges.items():
        if name == "batch" or low == high:
            continue

        def at(size: int, name: str = name) -> int:
            return size_of(opt | {name: size})

        if at(high) == at(middle) or at(low) != at(middle):
            continue
        first = _first_change(at, middle, high)
        further = 1
        while further < 16 * _FURTHEST and at(first + further) == at(first):
            further *= 2
        step = _first_change(at, first, first + further) - first
        fitting = [low + (size - low) // step * step for size in (low, middle, high)]
        raise UserError(
            f"the pipeline rounds {name}: its model gets the same size for {middle} as for {low}",
            expected=f"model.options.{name} from {low} in steps of {step}",
            got=str([low, middle, high]),
            remedy=f"give model.options.{name} as {fitting}",
        )


def _first_change(at: Callable[[int], int], same: int, other: int) -> int:
    """Returns the smallest size in (same, other] with a result that differs from that of `same`; results do not fall."""
    usual = at(same)
    while other - same > 1:
        between = (same + other) // 2
        same, other = (between, other) if at(between) == usual else (same, between)
    return other


def refuse_between_steps(
    steps: Mapping[str, int], dims: Mapping[str, Range], ranges: Mapping[str, Range], model: str
) -> None:
    """
    Args:
        steps: of symbolic dimensions, see `DiffusionModel`.
        dims: (min, opt, max) of each symbolic dimension.
        ranges: (min, opt, max) of the recipe's sizes.
        model: name of its class.
    Raises:
        UserError: the smallest or the largest size of a range is not a whole number of steps away from the opt.
    """
    for dim, step in steps.items():
        low, middle, high = dims[dim]
        if (middle - low) % step == (high - middle) % step == 0:
            continue
        name, factor = dim, 1
        if dim in ranges and (ranges[dim][2] - ranges[dim][0]) % (high - low) == 0:
            factor = (ranges[dim][2] - ranges[dim][0]) // (high - low)  # pixels for a row of latents
            low, middle, high = ranges[dim]
        given, step = [low, middle, high], step * factor
        fitting = [middle - (middle - low) // step * step, middle, middle + (high - middle) // step * step]
        raise UserError(
            f"{model} runs other operations between steps of {step} from a {name} of {middle}",
            expected=f"sizes of one kind, such as {fitting}",
            got=str(given),
            remedy=f"give model.options.{name} as {fitting}"
            if name in ranges
            else "give model.options.height, width and frames as one number each, and build a bundle for each",
        )


def steps_of(
    run: Callable[[Mapping[str, int]], Iterable[tuple[Any, ...]]], dims: Mapping[str, Range]
) -> dict[str, int]:
    """Returns the steps between sizes that run the same operations as the opt, by symbolic dimension; without steps of 1.

    An exported graph holds the operations of one size. U-Nets, for example, upsample to twice the size if the latents can be
    halved often enough, and otherwise to the stored sizes of the way down.

    Args:
        run: returns the operations at given sizes, in comparable form; may raise a UserError.
        dims: (min, opt, max) of each symbolic dimension.
    """
    opt = {name: middle for name, (_, middle, _) in dims.items()}
    wanted = {name for name, (low, _, high) in dims.items() if low < high and not name.startswith("batch")}
    found: dict[str, int] = {}
    usual = list(run(opt)) if wanted else []
    for name in sorted(wanted):

        def same(step: int, name: str = name) -> bool:
            try:
                return list(run(opt | {name: opt[name] + step})) == usual
            except TrtconvertError:
                return False

        step = next((step for step in _STEPS if same(step)), 1)
        if step > 1:
            found[name] = step
    return found


class OperationLog(TorchDispatchMode):
    """Records the operations that run while it is on, with the kinds of their arguments; the values of sizes do not count."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, ...]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kinds = tuple(_kind(x) for x in tree_leaves((args, kwargs or {})))
        self.operations.append((str(func), kinds))
        return func(*args, **(kwargs or {}))


def _kind(x: Any) -> str:
    if isinstance(x, Tensor):
        return f"{x.dtype} of {x.dim()}"
    if isinstance(x, (bool, str, torch.dtype)) or x is None:
        return str(x)
    return type(x).__name__
