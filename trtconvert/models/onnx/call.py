"""A step that is being computed, and the types of the module that computes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
"""Operators by name, each a function of a call and its inputs."""


@dataclass(frozen=True)
class Types:
    """Floating-point types of a module.

    Attributes:
        stored: ONNX's number of the type that the graph is in.
        current: type of the module's weights now.
        device: where its weights are.
    """

    stored: int
    current: torch.dtype
    device: torch.device

    def of(self, kind: int, given: torch.dtype) -> torch.dtype:
        """What a cast to ONNX's type gives of a tensor of a type.

        What a graph computes in float32 on purpose, beside a type of 16 bits, stays in it, and nothing is computed in float64.
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
    """A step that is being computed."""

    step: Step
    types: Types

    def get(self, name: str, default: Any = None) -> Any:
        value = self.step.attributes.get(name, default)
        return value.decode() if isinstance(value, bytes) else value

    def tensor(self, value: Value) -> Tensor:
        """A value as a tensor."""
        if isinstance(value, Tensor):
            return value
        flat = listed(value)
        if all(isinstance(x, (bool, int, float)) for x in flat):
            kind = torch.float32 if any(isinstance(x, float) for x in flat) else None
            return torch.tensor(flat, dtype=kind, device=self.types.device).reshape(value.shape)
        parts = [torch.full((), x, dtype=torch.int64, device=self.types.device) for x in flat]
        return torch.stack(parts).reshape(value.shape)

    def sizes(self, value: Value | None) -> list[Any]:
        """Numbers that decide shapes.

        Raises:
            UserError: they are computed of values.
        """
        if value is None or isinstance(value, np.ndarray):
            return [] if value is None else listed(value)
        raise self.refused(
            "its sizes or places follow the values of the inputs", "sizes that follow those of the inputs"
        )

    def axes(self, value: Value | None, name: str = "axes") -> list[int] | None:
        """Axes from an input, or, in older opsets, an attribute; None where there are none."""
        if value is not None:
            return [int(axis) for axis in self.sizes(value)]
        return self.get(name)

    def refused(self, got: str, expected: str) -> UserError:
        return UserError(
            f"{self.step.title} cannot be converted",
            expected=expected,
            got=got,
            remedy="export the model in another way, or convert the torch model that it came from",
        )


def together(call: Call, *values: Value) -> list[Any]:
    """Operands as torch takes them: of one floating-point type, the narrower one, and single numbers as such."""
    rank = max((x.dim() for x in values if isinstance(x, Tensor)), default=0)
    operands: list[Any] = []
    for x in values:
        if isinstance(x, np.ndarray):
            operands.append(listed(x)[0] if x.size == 1 and x.ndim <= rank else call.tensor(x))
        else:
            operands.append(x.reshape(()) if x.numel() == 1 and x.dim() == 1 and rank > 1 else x)
    if not any(isinstance(x, Tensor) for x in operands):
        operands[0] = call.tensor(numbers([operands[0]], ()))
    kinds = {x.dtype for x in operands if isinstance(x, Tensor) and x.is_floating_point()}
    if len(kinds) > 1:
        kind = min(kinds, key=lambda kind: torch.finfo(kind).bits)
        operands = [
            x.to(kind) if isinstance(x, Tensor) and x.is_floating_point() and x.dtype != kind else x for x in operands
        ]
    return operands


def require_one_output(call: Call) -> None:
    if any(call.step.outputs[1:]):
        raise call.refused("its means or statistics are outputs too", "one output")


def as_weight(x: Tensor, call: Call, value: Value | None) -> Tensor | None:
    """A weight beside a tensor of activations, in its type."""
    return None if value is None else call.tensor(value).to(x.dtype)


def of_one_type(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    if x.dtype == y.dtype:
        return x, y
    kind = min((x.dtype, y.dtype), key=lambda kind: torch.finfo(kind).bits)
    return x.to(kind), y.to(kind)
