"""Finds the inputs of a model and their symbolic dimensions from calls of different sizes."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._export.utils import _compiling_state_context
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)

from trtconvert.diffusion_model import InputSpec
from trtconvert.errors import TrtconvertError, UserError, kind_and_first_line
from trtconvert.fake_tensors import shapes_alone
from trtconvert.models.call_options import TOKENS
from trtconvert.models.size_steps import refuse_rounded
from trtconvert.runtime.arguments import Structure

Arguments = tuple[dict[str, dict[str, Any]], dict[str, Tensor]]
"""The structure of a call's arguments, see `trtconvert.runtime.arguments`, and the tensors in them by name."""

Observe = Callable[[Mapping[str, int]], Arguments]
"""Maps sizes to the arguments that a pipeline passes to a model at these sizes."""


class DoesNotRun(UserError):
    """A pipeline, or one of its models, fails with its arguments."""


@dataclass(frozen=True)
class Observed:
    """The arguments that a pipeline passes to a model.

    Attributes:
        structure: of the arguments, see `trtconvert.runtime.arguments`.
        shapes: sizes and symbolic dimensions of each tensor.
        dims: (min, opt, max) of each symbolic dimension.
        calls: the tensors of each observed call; the first call is at the opt sizes.
        symbols: the size of each symbolic dimension in each of the calls.
    """

    structure: dict[str, dict[str, Any]]
    shapes: dict[str, tuple[int | str, ...]]
    dims: dict[str, tuple[int, int, int]]
    calls: tuple[dict[str, Tensor], ...]
    symbols: dict[str, tuple[int, ...]]

    @property
    def example(self) -> dict[str, Tensor]:
        """The tensors of the call at the opt sizes."""
        return self.calls[0]

    @property
    def specs(self) -> dict[str, InputSpec]:
        """The tensors as inputs of an exported model, by name."""
        return {
            name: InputSpec(name, "float32" if x.is_floating_point() else "int64", self.shapes[name])
            for name, x in self.example.items()
        }

    @property
    def least_rows(self) -> dict[str, int]:
        """The smallest second size of each tensor."""
        second = {name: shape[1] for name, shape in self.shapes.items() if len(shape) > 1}
        return {name: size if isinstance(size, int) else self.dims[size][0] for name, size in second.items()}

    def dimension(self, sizes: Sequence[int]) -> int | str | None:
        """Returns the dimension that has these sizes in the calls: a constant, a symbol, or a linear function of one symbol, such
        as "8*height+1"; None where there is none."""
        if len(set(sizes)) == 1:
            return sizes[0]
        for name, of in self.symbols.items():
            if tuple(sizes) == of:
                return name
        for name, of in self.symbols.items():
            other = next((i for i, size in enumerate(of) if size != of[0]), None)
            if other is None:
                continue
            factor = (sizes[other] - sizes[0]) // (of[other] - of[0])
            offset = sizes[0] - factor * of[0]
            if factor > 0 and all(size == factor * x + offset for size, x in zip(sizes, of, strict=True)):
                return f"{factor}*{name}" + (f"{offset:+d}" if offset else "")
        return None


def observe_sizes(observe: Observe, ranges: Mapping[str, tuple[int, int, int]]) -> Observed:
    """Finds a model's inputs and their symbolic dimensions.

    A dimension that follows one size takes its name. A dimension that follows several is called "tokens", or "positions" where
    the number of a prompt's tokens is one of the sizes.

    Raises:
        UserError: a number in the arguments follows a size, so that one engine cannot serve the range; a tensor is as long as the
            longest prompt, so that an engine would refuse the next prompt; or the pipeline rounds a size.
    """
    opt = {name: middle for name, (_, middle, _) in ranges.items()}
    others = {
        name: opt | {name: middle + 1 if low == high else low if low < middle else high}
        for name, (low, middle, high) in ranges.items()
        if low < high or name == "batch"
    }
    seen: dict[tuple[int, ...], Arguments] = {}

    def observed(sizes: Mapping[str, int]) -> Arguments:
        """Calls the pipeline once for equal sizes: where the batch alone varies, its ends are corners as well."""
        key = tuple(sizes[name] for name in ranges)
        if key not in seen:
            seen[key] = observe(sizes)
        return seen[key]

    structure, example = observed(opt)
    changed: dict[str, dict[str, Tensor]] = {}
    for name, sizes in others.items():
        varies = ranges[name][0] < ranges[name][2]
        try:
            found, changed[name] = observed(sizes)
        except UserError:
            if varies:
                raise
            # A fixed batch is varied only to tell which dimensions follow it; some pipelines draw one image at a time.
            changed[name] = _with_one_more_sample(example, opt["batch"])
            continue
        if varies:
            refuse_numbers(name, structure, found)
    corners = [{name: size[index] for name, size in ranges.items()} for index in (0, 2)]
    calls = (example, *changed.values(), *(observed(sizes)[1] for sizes in corners))
    batches = [sizes["batch"] for sizes in (opt, *others.values(), *corners)]
    dims: dict[str, tuple[int, int, int]] = {}
    symbols: dict[str, tuple[int, ...]] = {}

    def symbol(name: str, axis: int) -> int | str:
        sizes = tuple(tensors[name].shape[axis] for tensors in calls)
        if len(set(sizes)) == 1:
            return sizes[0]
        follows = [which for which, other in zip(changed, sizes[1:], strict=False) if other != sizes[0]]
        if follows in ([], ["batch"]) and any(
            size * batches[0] != sizes[0] * batch for size, batch in zip(sizes, batches, strict=True)
        ):
            refuse_rounded(lambda sizes: observe(sizes)[1][name].shape[axis], ranges)
            raise UserError(
                f"the pipeline passes '{name}' with as many tokens as its longest prompt has",
                expected="a number of tokens that prompts are padded to",
                got=f"{', '.join(map(str, sizes))} for {', '.join(map(str, batches))} prompts",
                remedy="give model.options.tokens as [min, opt, max]; or have the pipeline pad prompts, by an argument in "
                "model.options.call where it has one",
            )
        if (known := next((other for other, of in symbols.items() if of == sizes), None)) is not None:
            return known
        stem = follows[0] if len(follows) == 1 else "positions" if TOKENS in ranges else "tokens"
        number = sum(other.partition("_")[0] == stem for other in dims)
        title = f"{stem}_{number + 1}" if number else stem
        *_, low, high = sizes
        if stem == "batch":
            # Guidance doubles the rows of a call, and the same engine serves calls without guidance: the smallest size is that
            # of one sample without it. A tensor with a row for each frame has several rows for a sample.
            low = ranges["batch"][0] * max(1, sizes[0] // symbols.get("batch", sizes)[0])
        symbols[title] = sizes
        dims[title] = (low, sizes[0], high)
        return title

    shapes = {name: tuple(symbol(name, axis) for axis in range(x.dim())) for name, x in example.items()}
    return Observed(structure, shapes, dims, calls, symbols)


def _with_one_more_sample(tensors: Mapping[str, Tensor], samples: int) -> dict[str, Tensor]:
    """Returns a model's tensors for one more sample: each tensor that has as many rows as the first one gets more."""
    rows = len(next(iter(tensors.values())))
    return {
        name: torch.cat([x, x[: rows // samples]]) if x.dim() and len(x) == rows else x for name, x in tensors.items()
    }


def refuse_numbers(size: str, structure: Structure, other: Structure) -> None:
    """
    Args:
        size: name of the size that differs between two calls.
        structure, other: of the arguments in these calls.
    Raises:
        UserError: a number in the arguments follows the size.
    """
    for name, node in structure.items():
        if node != other.get(name):
            raise UserError(
                f"the pipeline passes '{name}' as a number or a list, which becomes a constant of the engine",
                expected=f"one {size}",
                got=f"a range of {size}",
                remedy=f"give model.options.{size} as one number, and build a bundle for each",
            )


def shapes_of(
    module: nn.Module,
    function: Callable[[Mapping[str, Tensor]], Any],
    tensors: Mapping[str, Tensor],
    title: str,
    remedy: str,
) -> Any:
    """Calls a function of named tensors on shapes alone; nothing is computed. Returns the result, with fake tensors.

    Args:
        module: the function calls it.
        title, remedy: for the message.
    Raises:
        DoesNotRun: the function fails.
        UserError: the shapes depend on the tensors' values, or an operation's shapes are not known beforehand.
    """
    try:
        # In the compiling state models keep no tensors for the next call, as QwenImage keeps its rotations.
        with torch.no_grad(), _compiling_state_context(), shapes_alone(module) as mode:
            return function({name: mode.from_tensor(x) for name, x in tensors.items()})
    except (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException) as error:
        raise UserError(
            f"{title} cannot be converted",
            expected="a model whose operations depend on the shapes of its inputs alone",
            got=f"an operation that depends on values{_place_of(error)}",
            remedy=remedy,
        ) from error
    except TrtconvertError:
        raise
    except Exception as error:  # whatever the model raises
        raise DoesNotRun(
            f"{title} cannot be converted",
            expected="a model that accepts the inputs of its pipeline: "
            + ", ".join(f"{name} {list(x.shape)}" for name, x in tensors.items()),
            got=kind_and_first_line(error),
            remedy=remedy,
        ) from error


def _place_of(error: BaseException) -> str:
    """Returns the line of a library's code, other than torch's, where an operation failed, for a message; "" for none."""
    places = [
        (frame.filename.partition("site-packages")[2].strip("/\\"), frame)
        for frame in traceback.extract_tb(error.__traceback__)
        if "site-packages" in frame.filename
    ]
    own = [(path, frame) for path, frame in places if not path.startswith(("torch/", "torch\\"))]
    return f": `{own[-1][1].line}` ({own[-1][0]}, line {own[-1][1].lineno})" if own else ""
