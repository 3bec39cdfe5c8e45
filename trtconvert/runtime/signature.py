"""What a component takes: its inputs' names, types and shapes, checked once at the boundary."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from trtconvert.bundle import LINE, ComponentRecord, TensorRecord, in_steps
from trtconvert.errors import UserError
from trtconvert.runtime.watch import InputWatch

Ranges = Mapping[str, tuple[int, int, int]]
"""Symbolic dimension: (min, opt, max)."""


class Signature:
    """Checks the inputs of a call.

    Args:
        component: the signature in the manifest.
        profiles: optimisation profiles of the engine that runs it, in the engine's order; without any, the component's own
            ranges are the only one.

    Attributes:
        watch: is given the inputs of every call, where somebody wants that.
    """

    def __init__(self, component: ComponentRecord, profiles: Sequence[Ranges] = ()) -> None:
        self.component = component
        self.watch: InputWatch | None = None
        self.names = [spec.name for spec in component.inputs]
        # Of diffusers' models, engine.shapes can only narrow what model.options gave.
        self._of_options = component.diffusers is not None or not component.is_denoiser
        # A profile may leave out dimensions that it takes as the component does.
        self.profiles = [dict(component.dims) | dict(profile) for profile in profiles] or [dict(component.dims)]

    def ordered(self, inputs: tuple[Tensor, ...], named: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """The inputs in the signature's order, unchecked but for their names.

        Raises:
            UserError: an input is missing, unknown, or given twice.
        """
        given = dict(zip(self.names, inputs, strict=False)) | dict(named)
        if len(inputs) + len(named) != len(self.names) or given.keys() != set(self.names):
            names = self.names[: len(inputs)] + ["…"] * (len(inputs) - len(self.names))
            raise UserError(
                "the component was called with other inputs than it has",
                expected=", ".join(self.names),
                got=", ".join([*names, *named]) or "none",
                remedy="pass each input once, by position or by name",
            )
        return tuple(given[name] for name in self.names)

    def check(self, tensors: Sequence[Tensor]) -> tuple[int, dict[str, int]]:
        """Check the types and shapes of inputs in the signature's order.

        Returns:
            The profile to run them with, of several the one whose opt shape is nearest, and a size for each symbolic
            dimension of the inputs.
        Raises:
            UserError: an input is not a tensor, or of a type or shape outside the signature.
        """
        sizes: dict[str, int] = {}
        for spec, x in zip(self.component.inputs, tensors, strict=True):
            self._check(spec, x, sizes)
        fitting = [i for i, profile in enumerate(self.profiles) if _holds(profile, sizes)]
        if not fitting:
            listed = (
                " × ".join(f"{name} {low}..{high}" for name, (low, _, high) in profile.items() if name in sizes)
                for profile in self.profiles
            )
            raise UserError(
                "no optimisation profile of the engine holds these sizes together",
                expected="; or ".join(listed),
                got=", ".join(f"{name} {size}" for name, size in sizes.items()),
                remedy="add a profile under engine.profiles in the recipe and build again",
            )
        return min(fitting, key=lambda i: _distance(self.profiles[i], sizes)), sizes

    def of_samples(self) -> list[bool]:
        """Which inputs have an entry for each sample: those that begin with the dimension that the first one begins with."""
        first = self.component.inputs[0].shape[:1]
        return [bool(first) and spec.shape[:1] == first for spec in self.component.inputs]

    def batches(self, tensors: Sequence[Tensor]) -> tuple[int, int] | None:
        """The smallest and the largest number of samples that inputs of such sizes may have; of several profiles that hold the
        other sizes, of the one that takes the most. None where none does."""
        batch = self.component.inputs[0].shape[0]
        if isinstance(batch, int):
            return batch, batch
        specs = zip(self.component.inputs, tensors, strict=True)
        pairs = [pair for spec, x in specs for pair in zip(spec.shape, x.shape, strict=False)]
        others = {dim: size for dim, size in pairs if isinstance(dim, str) and dim != batch}
        holding = [profile[batch] for profile in self.profiles if _holds(profile, others)]
        return max(((low, high) for low, _, high in holding), key=lambda sizes: sizes[1], default=None)

    def typed(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Inputs that were checked, detached, floating-point ones in the signature's types."""
        return [x.detach().to(dtype_of(spec)) for spec, x in zip(self.component.inputs, tensors, strict=True)]

    def _check(self, spec: TensorRecord, x: Tensor, sizes: dict[str, int]) -> None:
        if not isinstance(x, Tensor):
            raise UserError(
                f"'{spec.name}' is not a tensor",
                expected=f"a torch.Tensor of {spec.dtype}",
                got=type(x).__name__,
                remedy="convert it with torch.as_tensor",
            )
        if x.is_meta or x.layout != torch.strided:
            raise UserError(
                f"'{spec.name}' has no numbers to read one after the other",
                expected="a tensor with memory of its own, in torch's strided layout",
                got="a tensor on the meta device" if x.is_meta else f"one in the layout {x.layout}",
                remedy="load its numbers, or convert it with .to_dense()",
            )
        fits, others = x.dim() == len(spec.shape), list[str]()
        for size, dim in zip(x.shape, spec.shape, strict=False):
            if isinstance(dim, str):
                low, high = self._range(dim)
                fits = fits and low <= size <= high and (size - low) % self.component.steps.get(dim, 1) == 0
                if sizes.setdefault(dim, size) != size:
                    others.append(f"{dim} {sizes[dim]}")
            else:
                fits = fits and size == dim
        if fits and others:
            raise UserError(
                f"the shape of '{spec.name}' is another than that of the inputs before it",
                expected=", ".join(others),
                got=f"{list(x.shape)}, which is [{', '.join(map(str, spec.shape))}]",
                remedy="give inputs of one size for each name; one sample's for all can be repeated by .expand()",
            )
        if not fits:
            ranges = [f"{d} {self._described(d)}" if isinstance(d, str) else str(d) for d in spec.shape]
            stepped = any(d in self.component.steps for d in spec.shape)
            between = "; between its steps a model computes otherwise, and takes a bundle of its own" if stepped else ""
            pairs = zip(x.shape, spec.shape, strict=False)
            own = x.dim() != len(spec.shape) or any(isinstance(dim, int) and size != dim for size, dim in pairs)
            if self._of_options:
                remedy = self._widening(spec, x)
            else:
                remedy = "give it in that shape" if own else "widen engine.shapes in the recipe and build again"
            raise UserError(
                f"the shape of '{spec.name}' is outside what the bundle was built for",
                expected="[" + ", ".join(ranges) + "], the same size for the same name in every input",
                got=str(list(x.shape)),
                remedy=f"{remedy}{between}",
            )
        wanted = dtype_of(spec)
        if x.dtype != wanted and not (x.is_floating_point() and wanted.is_floating_point):
            raise UserError(
                f"'{spec.name}' has the wrong type",
                expected=spec.dtype,
                got=str(x.dtype).removeprefix("torch."),
                remedy=f"convert it with .to(torch.{spec.dtype})",
            )

    def _widening(self, spec: TensorRecord, x: Tensor) -> str:
        """Which of a pipeline's options holds the shape of an input."""
        if x.dim() != len(spec.shape):
            return "call the model as its pipeline does"
        sample, named = self.component.inputs[0], set[str]()
        of_images = self.component.is_denoiser or getattr(self.component.diffusers, "method", "") != "forward"
        for axis, (size, dim) in enumerate(zip(x.shape, spec.shape, strict=True)):
            low, high = self._range(dim) if isinstance(dim, str) else (dim, dim)
            if low <= size <= high and (size - low) % self.component.steps.get(str(dim), 1) == 0:
                continue
            stem = dim.partition("_")[0] if isinstance(dim, str) else "batch" if axis == 0 else ""
            of_tokens = axis == 1 and x.dim() == (3 if x.is_floating_point() else 2)
            at_places = axis > 1 or isinstance(dim, str) or (axis == 1 and x.dim() == 3)  # not the channels of images
            if of_images and at_places and (spec is sample or (isinstance(dim, str) and dim in sample.shape)):
                named.add(stem if stem in ("batch", "height", "width", "frames") else "height, width or frames")
            elif stem in ("batch", "height", "width", "frames", "tokens"):
                named.add(stem)
            elif of_tokens:
                named.add("tokens")
        if "tokens" in named:
            length = self.component.diffusers.padded_by if self.component.diffusers else ""
            shorter = f", or call the pipeline with {length} within it" if length else ""
            return f"give model.options.tokens in the recipe as [min, opt, max] that holds it and build again{shorter}"
        if named:
            return f"widen model.options.{sorted(named)[0]} in the recipe and build again"
        return "give what the pipeline gives its model: this size is the model's own"

    def _described(self, dim: str) -> str:
        return in_steps(*self._range(dim), self.component.steps.get(dim))

    def _range(self, dim: str) -> tuple[int, int]:
        """The smallest and the largest size that any profile takes."""
        return min(profile[dim][0] for profile in self.profiles), max(profile[dim][2] for profile in self.profiles)


def rows_each(name: str, x: Tensor, samples: int) -> int:
    """Rows of an input for each sample; several as for frames.

    Raises:
        UserError: they cannot be shared out evenly.
    """
    rows = x.shape[0] if x.dim() else 0
    if not rows or rows % samples:
        raise UserError(
            f"'{name}' has rows for other samples than what is denoised",
            expected=f"{samples} rows, or a multiple of them",
            got=str(list(x.shape)),
            remedy="give an entry for each sample; one sample's for all can be repeated by .expand()",
        )
    return rows // samples


def dtype_of(spec: TensorRecord) -> torch.dtype:
    """Torch's type of a record's."""
    return getattr(torch, spec.dtype)


def shape_like(shape: Sequence[int | str], x: Tensor) -> list[int]:
    """A shape with symbolic dimensions, as large as a tensor's at the same places; the tensor may have further ones."""
    return [size if isinstance(size, int) else x.shape[place] for place, size in enumerate(shape)]


def shape_of(shape: Sequence[int | str], sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The shape that a symbolic one becomes for given sizes."""
    return tuple(_size(dim, sizes) if isinstance(dim, str) else dim for dim in shape)


def _size(dim: str, sizes: Mapping[str, int]) -> int:
    """A symbolic dimension for given sizes: "height", or a line through one, "8*height" or "4*frames-3"."""
    if dim in sizes:
        return sizes[dim]
    factor, name, offset = LINE.fullmatch(dim).groups()  # type: ignore[union-attr]  # the manifest's records check it
    return int(factor) * sizes[name] + int(offset or 0)


def _holds(profile: Ranges, sizes: Mapping[str, int]) -> bool:
    return all(profile[name][0] <= size <= profile[name][2] for name, size in sizes.items())


def _distance(profile: Ranges, sizes: Mapping[str, int]) -> float:
    """How far sizes are from what a profile's kernels were chosen for, in octaves over all dimensions."""
    return sum(abs(math.log2(size / profile[name][1])) for name, size in sizes.items())
