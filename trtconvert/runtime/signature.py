"""Checks the names, types and shapes of a component's inputs."""

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
        profiles: optimisation profiles in the engine's order; default: one profile, the component's ranges.

    Attributes:
        watch: gets the inputs of every call, if set.
    """

    def __init__(self, component: ComponentRecord, profiles: Sequence[Ranges] = ()) -> None:
        self.component = component
        self.watch: InputWatch | None = None
        self.names = [spec.name for spec in component.inputs]
        # For models of diffusers, engine.shapes can only narrow model.options.
        self._of_options = component.diffusers is not None or not component.is_denoiser
        # Dimensions that a profile omits have the component's range.
        self.profiles = [dict(component.dims) | dict(profile) for profile in profiles] or [dict(component.dims)]

    def ordered(self, inputs: tuple[Tensor, ...], named: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """Return the inputs in the signature's order, and check their names only.

        Raises:
            UserError: an input is missing, unknown, or given twice.
        """
        given = dict(zip(self.names, inputs, strict=False)) | dict(named)
        if len(inputs) + len(named) != len(self.names) or given.keys() != set(self.names):
            names = self.names[: len(inputs)] + ["…"] * (len(inputs) - len(self.names))
            raise UserError(
                "the call does not have the component's inputs",
                expected=", ".join(self.names),
                got=", ".join([*names, *named]) or "none",
                remedy="pass each input once, by position or by name",
            )
        return tuple(given[name] for name in self.names)

    def check(self, tensors: Sequence[Tensor]) -> tuple[int, dict[str, int]]:
        """Check the types and shapes of inputs in the signature's order.

        Returns:
            The fitting profile with the nearest opt shape, and the size of each symbolic dimension of the inputs.
        Raises:
            UserError: an input is not a tensor, or has a type or shape outside the signature.
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
        """Return, for each input, whether it has a row or several, such as one for each frame, for each sample: its first
        dimension is that of the first input, or is named after it."""
        first = [_stem(dim) for dim in self.component.inputs[0].shape[:1]]
        return [bool(first) and [_stem(dim) for dim in spec.shape[:1]] == first for spec in self.component.inputs]

    def batches(self, tensors: Sequence[Tensor]) -> tuple[int, int] | None:
        """Return the smallest and the largest batch for inputs with these other sizes, of the profile with the largest batch.

        Returns None if no profile holds the sizes.
        """
        batch = self.component.inputs[0].shape[0]
        if isinstance(batch, int):
            return batch, batch
        specs = zip(self.component.inputs, tensors, self.of_samples(), strict=True)
        pairs = [pair for spec, x, own in specs for pair in [*zip(spec.shape, x.shape, strict=False)][own:]]
        others = {dim: size for dim, size in pairs if isinstance(dim, str)}
        holding = [profile[batch] for profile in self.profiles if _holds(profile, others)]
        return max(((low, high) for low, _, high in holding), key=lambda sizes: sizes[1], default=None)

    def typed(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Detach checked inputs and convert them to the signature's types."""
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
                f"'{spec.name}' is not a dense tensor with values",
                expected="a tensor with memory, in torch's strided layout",
                got="a tensor on the meta device" if x.is_meta else f"a tensor in the layout {x.layout}",
                remedy="load the tensor's values, or convert it with .to_dense()",
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
                f"the shape of '{spec.name}' does not fit the inputs before it",
                expected=", ".join(others),
                got=f"{list(x.shape)} for [{', '.join(map(str, spec.shape))}]",
                remedy="pass inputs of one size for each name; repeat a single sample by .expand()",
            )
        if not fits:
            ranges = [f"{d} {self._described(d)}" if isinstance(d, str) else str(d) for d in spec.shape]
            stepped = any(d in self.component.steps for d in spec.shape)
            between = (
                "; sizes between the steps need another bundle, because the model computes differently"
                if stepped
                else ""
            )
            pairs = zip(x.shape, spec.shape, strict=False)
            own = x.dim() != len(spec.shape) or any(isinstance(dim, int) and size != dim for size, dim in pairs)
            if self._of_options:
                remedy = self._widening(spec, x)
            else:
                remedy = "pass a tensor of that shape" if own else "widen engine.shapes in the recipe and build again"
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
        """Return the remedy with the option of a pipeline that decides the shape of an input."""
        if x.dim() != len(spec.shape):
            return "call the model like its pipeline"
        sample, named = self.component.inputs[0], set[str]()
        of_images = self.component.is_denoiser or getattr(self.component.diffusers, "method", "") != "forward"
        for axis, (size, dim) in enumerate(zip(x.shape, spec.shape, strict=True)):
            low, high = self._range(dim) if isinstance(dim, str) else (dim, dim)
            if low <= size <= high and (size - low) % self.component.steps.get(str(dim), 1) == 0:
                continue
            stem = _stem(dim) if isinstance(dim, str) else "batch" if axis == 0 else ""
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
            shorter = f", or call the pipeline with {length} within the range" if length else ""
            return (
                f"set model.options.tokens in the recipe to a [min, opt, max] with this length and build again{shorter}"
            )
        if named:
            return f"widen model.options.{sorted(named)[0]} in the recipe and build again"
        return "pass the size that the pipeline passes: the model fixes this size"

    def _described(self, dim: str) -> str:
        return in_steps(*self._range(dim), self.component.steps.get(dim))

    def _range(self, dim: str) -> tuple[int, int]:
        """Return the smallest and the largest size over all profiles."""
        return min(profile[dim][0] for profile in self.profiles), max(profile[dim][2] for profile in self.profiles)


def rows_each(name: str, x: Tensor, samples: int) -> int:
    """Return the number of rows per sample of an input, which may be several, for example for frames.

    Raises:
        UserError: the rows are not a multiple of the samples.
    """
    rows = x.shape[0] if x.dim() else 0
    if not rows or rows % samples:
        raise UserError(
            f"'{name}' does not have a row for each noisy sample",
            expected=f"{samples} rows, or a multiple of them",
            got=str(list(x.shape)),
            remedy="pass a row for each sample; repeat a single row by .expand()",
        )
    return rows // samples


def dtype_of(spec: TensorRecord) -> torch.dtype:
    """Return the torch type of a record."""
    return getattr(torch, spec.dtype)


def shape_like(shape: Sequence[int | str], x: Tensor) -> list[int]:
    """Replace symbolic dimensions by a tensor's sizes at the same positions; the tensor may have further dimensions."""
    return [size if isinstance(size, int) else x.shape[place] for place, size in enumerate(shape)]


def shape_of(shape: Sequence[int | str], sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Evaluate a shape for the sizes of its symbolic dimensions."""
    return tuple(_size(dim, sizes) if isinstance(dim, str) else dim for dim in shape)


def fits(shape: Sequence[int | str], got: Sequence[int], sizes: dict[str, int]) -> bool:
    """Return whether a tensor's shape is the described one. `sizes` of symbolic dimensions gains those that it lacks."""
    wanted = [sizes.setdefault(d, n) if isinstance(d, str) else d for d, n in zip(shape, got, strict=False)]
    return len(shape) == len(got) and list(got) == wanted


def _stem(dim: int | str) -> int | str:
    """Return what a dimension follows: "batch" for "batch_2", the number of all samples' frames."""
    return dim.partition("_")[0] if isinstance(dim, str) else dim


def _size(dim: str, sizes: Mapping[str, int]) -> int:
    """Evaluate a dimension: "height", or a linear function of it, such as "8*height" or "4*frames-3"."""
    if dim in sizes:
        return sizes[dim]
    factor, name, offset = LINE.fullmatch(dim).groups()  # type: ignore[union-attr]  # the manifest's records check it
    return int(factor) * sizes[name] + int(offset or 0)


def _holds(profile: Ranges, sizes: Mapping[str, int]) -> bool:
    return all(profile[name][0] <= size <= profile[name][2] for name, size in sizes.items())


def _distance(profile: Ranges, sizes: Mapping[str, int]) -> float:
    """Return the distance of sizes from a profile's opt sizes, in octaves over all dimensions."""
    return sum(abs(math.log2(size / profile[name][1])) for name, size in sizes.items())
