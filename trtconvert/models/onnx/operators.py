"""ONNX's operators in torch, as a denoiser has them. A module in 16 bits computes each in its own type, as engines do.

Sources: ONNX's operator schemas; onnxruntime's ContribOperators.md for those of `com.microsoft`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from trtconvert.models.onnx.call import Call, Types, Value
from trtconvert.models.onnx.elementwise import ELEMENTWISE
from trtconvert.models.onnx.multi_head import ATTENTIONS
from trtconvert.models.onnx.products import PRODUCTS
from trtconvert.models.onnx.reductions import REDUCTIONS
from trtconvert.models.onnx.shapes import SHAPES
from trtconvert.models.onnx.steps import Step

OPERATORS: dict[str, Callable[..., Any]] = {**ELEMENTWISE, **SHAPES, **REDUCTIONS, **PRODUCTS, **ATTENTIONS}
"""By operator. What is constant in any graph (Constant) is no step."""


def _tensors_alone(function: Callable[..., Any]) -> tuple[frozenset[int], int]:
    """Which inputs a function takes as tensors alone, by what it says of its parameters, and from which place on all are so."""
    parameters = [*inspect.signature(function).parameters.values()][1:]
    places = frozenset(place for place, x in enumerate(parameters) if "Tensor" in str(x.annotation).split(" | "))
    last = parameters[-1] if parameters else None
    rest = last is not None and last.kind is last.VAR_POSITIONAL and len(parameters) - 1 in places
    return places, len(parameters) - 1 if rest else 1 << 30


_TENSORS_ALONE = {op: _tensors_alone(function) for op, function in OPERATORS.items()}


def compute(step: Step, types: Types, inputs: Sequence[Value | None]) -> Any:
    """What a step gives: a value, or several. Where its operator wants a tensor, numbers are made one."""
    call, (places, rest) = Call(step, types), _TENSORS_ALONE[step.op]
    given = [
        _as_tensor(call, x, inputs) if isinstance(x, np.ndarray) and (place in places or place >= rest) else x
        for place, x in enumerate(inputs)
    ]
    return OPERATORS[step.op](call, *given)


def _as_tensor(call: Call, x: Value, inputs: Sequence[Value | None]) -> Tensor:
    """Numbers as a tensor, of the floating-point type of the first other input that has one: they do not widen it."""
    tensor = call.tensor(x)
    kinds = (other.dtype for other in inputs if isinstance(other, Tensor) and other.is_floating_point())
    return tensor.to(next(kinds, tensor.dtype)) if tensor.is_floating_point() else tensor
