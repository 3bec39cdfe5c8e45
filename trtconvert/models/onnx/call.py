"""A step during its computation, and the types of the module that computes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trtconvert.errors import UserError
from trtconvert.models.onnx.sizes import Numbers, listed, numbers
from trtconvert.models.onnx.steps import Step

Value = Tensor | Numbers
Table = Mapping[str, Callable[..., Any]]
"""Operators by name: functions of a call and its inputs."""


@dataclass(frozen=True)
class Types:
    """Floating-point types of a module.

    Attributes:
        stored: ONNX's number of the graph's type.
        current: type of the module's weights.
        device: of the module's weights.
    """

    stored: int
    current: torch.dtype
    device: torch.device

    def of(self, kind: int, given: torch.dtype) -> torch.dtype:
        """Returns the type of a cast from a type to one of ONNX's types.

        FP32 that a 16-bit graph casts to on purpose stays FP32, and nothing is computed in float64.

        Raises:
            KeyError: torch has no such type.
        """
        if kind in _FLOATS:
            if kind == self.stored and kind != _FLOAT:
                return self.current
            return given if given.is_floating_point and kind == self.stored else torch.float32
        if kind not in _OTHERS:
            raise KeyError(kind)
        return _OTHERS[kind]


_FLOAT = 1
_FLOATS = {_FLOAT, 10, 11, 16}
_OTHERS = {2: torch.uint8, 3: torch.int8, 5: torch.int16, 6: torch.int32, 7: torch.int64, 9: torch.bool}


@dataclass(frozen=True)
class Call:
    """A step during its computation."""

    step: Step
    types: Types

    def get(self, name: str, default: Any = None) -> Any:
        value = self.step.attributes.get(name, default)
        return value.decode() if isinstance(value, bytes) else value

    def tensor(self, value: Value) -> Tensor:
        """Returns a value as a tensor."""
        if isinstance(value, Tensor):
            return value
        flat = listed(value)
        if all(isinstance(x, (bool, int, float)) for x in flat):
            kind = torch.float32 if any(isinstance(x, float) for x in flat) else None
            return torch.tensor(flat, dtype=kind, device=self.types.device).reshape(value.shape)
        parts = [torch.full((), x, dtype=torch.int64, device=self.types.device) for x in flat]
        return torch.stack(parts).reshape(value.shape)

    def sizes(self, value: Value | None) -> list[Any]:
        """Returns numbers that decide shapes.

        Raises:
            UserError: they depend on the inputs' values.
        """
        if value is None or isinstance(value, np.ndarray):
            return [] if value is None else listed(value)
        raise self.refused(
            "sizes or places that depend on the inputs' values", "sizes that depend on the inputs' sizes"
        )

    def axes(self, value: Value | None) -> list[int] | None:
        """Returns axes from an input, or, in older opsets, from an attribute; None for none."""
        if value is not None:
            return [int(axis) for axis in self.sizes(value)]
        return self.get("axes")

    def refused(self, got: str, expected: str) -> UserError:
        return UserError(
            f"{self.step.title} cannot be converted",
            expected=expected,
            got=got,
            remedy="export the model in another way, or convert the original torch model",
        )


def together(call: Call, *values: Value) -> list[Any]:
    """Returns operands for torch: tensors in the narrowest of their floating-point types, and single numbers as numbers."""
    rank = max((x.dim() for x in values if isinstance(x, Tensor)), default=0)
    operands: list[Any] = []
    for x in values:
        if isinstance(x, np.ndarray):
            operands.append(listed(x)[0] if x.size == 1 and x.ndim <= rank else call.tensor(x))
        else:
            operands.append(x.reshape(()) if x.numel() == 1 and x.dim() == 1 and rank > 1 else x)
    if not any(isinstance(x, Tensor) for x in operands):
        operands[0] = call.tensor(numbers([operands[0]], ()))
    tensors = iter(in_narrowest_type([x for x in operands if isinstance(x, Tensor)]))
    return [next(tensors) if isinstance(x, Tensor) else x for x in operands]


def require_one_output(call: Call) -> None:
    if any(call.step.outputs[1:]):
        raise call.refused("its means or statistics are outputs too", "one output")


def as_weight(x: Tensor, call: Call, value: Value | None) -> Tensor | None:
    """Returns a weight in the type of the activations that it is used with."""
    return None if value is None else call.tensor(value).to(x.dtype)


def in_narrowest_type(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Casts floating-point tensors to the narrowest of their types."""
    kinds = {x.dtype for x in tensors if x.is_floating_point()}
    if len(kinds) < 2:
        return list(tensors)
    kind = min(kinds, key=lambda kind: torch.finfo(kind).bits)
    return [x.to(kind) if x.is_floating_point() else x for x in tensors]
