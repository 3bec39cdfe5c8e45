"""What a component takes: its inputs' names, types and shapes, checked once at the boundary."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from trtconvert.bundle import ComponentRecord, TensorRecord
from trtconvert.errors import UserError


class Signature:
    """Checks the inputs of a call.

    Args:
        component: the signature in the manifest.
    """

    def __init__(self, component: ComponentRecord) -> None:
        self.component = component

    def check(self, inputs: tuple[Tensor, ...], named: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The inputs by name, floating-point ones in the signature's types.

        Raises:
            UserError: an input is missing, unknown, not a tensor, or of a type or shape outside the signature.
        """
        given = self._by_name(inputs, named)
        sizes: dict[str, int] = {}
        return {spec.name: self._checked(spec, given[spec.name], sizes) for spec in self.component.inputs}

    def _by_name(self, inputs: tuple[Tensor, ...], named: Mapping[str, Tensor]) -> dict[str, Tensor]:
        names = [spec.name for spec in self.component.inputs]
        given = dict(zip(names, inputs, strict=False)) | dict(named)
        if len(inputs) + len(named) != len(names) or given.keys() != set(names):
            raise UserError(
                "the denoiser was called with other inputs than it has",
                expected=", ".join(names),
                got=", ".join([*names[: len(inputs)], *["…"] * (len(inputs) - len(names)), *named]) or "none",
                remedy="pass each input once, by position or by name",
            )
        return given

    def _checked(self, spec: TensorRecord, x: Tensor, sizes: dict[str, int]) -> Tensor:
        if not isinstance(x, Tensor):
            raise UserError(
                f"'{spec.name}' is not a tensor",
                expected=f"a torch.Tensor of {spec.dtype}",
                got=type(x).__name__,
                remedy="convert it with torch.as_tensor",
            )
        dims = self.component.dims
        fits = x.dim() == len(spec.shape)
        for size, dim in zip(x.shape, spec.shape, strict=False):
            if isinstance(dim, str):
                fits = fits and dims[dim][0] <= size <= dims[dim][2] and sizes.setdefault(dim, size) == size
            else:
                fits = fits and size == dim
        if not fits:
            ranges = [f"{d} {dims[d][0]}..{dims[d][2]}" if isinstance(d, str) else str(d) for d in spec.shape]
            raise UserError(
                f"the shape of '{spec.name}' is outside what the bundle was built for",
                expected="[" + ", ".join(ranges) + "], the same size for the same name in every input",
                got=str(list(x.shape)),
                remedy="widen engine.shapes in the recipe and build again",
            )
        wanted = getattr(torch, spec.dtype)
        if x.dtype != wanted and not (x.is_floating_point() and wanted.is_floating_point):
            raise UserError(
                f"'{spec.name}' has the wrong type",
                expected=spec.dtype,
                got=str(x.dtype).removeprefix("torch."),
                remedy=f"convert it with .to(torch.{spec.dtype})",
            )
        return x.detach().to(wanted)
