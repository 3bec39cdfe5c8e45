"""ONNX's operators in torch, as far as denoisers use them. A 16-bit module computes each in its own type, like engines.

Sources: ONNX's operator schemas; onnxruntime's ContribOperators.md for the operators of `com.microsoft`.
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
"""Functions by operator. A Constant is no step."""


def _tensors_alone(function: Callable[..., Any]) -> tuple[frozenset[int], int]:
    """Returns the places of inputs that a function annotates as tensors alone, and the first place of variadic tensors."""
    parameters = [*inspect.signature(function).parameters.values()][1:]
    places = frozenset(place for place, x in enumerate(parameters) if "Tensor" in str(x.annotation).split(" | "))
    last = parameters[-1] if parameters else None
    rest = last is not None and last.kind is last.VAR_POSITIONAL and len(parameters) - 1 in places
    return places, len(parameters) - 1 if rest else 1 << 30


_TENSORS_ALONE = {op: _tensors_alone(function) for op, function in OPERATORS.items()}


def compute(step: Step, types: Types, inputs: Sequence[Value | None]) -> Any:
    """Computes a step: returns a value, or several. Numbers become tensors for operators that need tensors."""
    call, (places, rest) = Call(step, types), _TENSORS_ALONE[step.op]
    given = [
        _as_tensor(call, x, inputs) if isinstance(x, np.ndarray) and (place in places or place >= rest) else x
        for place, x in enumerate(inputs)
    ]
    return OPERATORS[step.op](call, *given)


def _as_tensor(call: Call, x: Value, inputs: Sequence[Value | None]) -> Tensor:
    """Returns numbers as a tensor of the floating-point type of the first other input that has one, which they do not widen."""
    tensor = call.tensor(x)
    kinds = (other.dtype for other in inputs if isinstance(other, Tensor) and other.is_floating_point())
    return tensor.to(next(kinds, tensor.dtype)) if tensor.is_floating_point() else tensor
