"""ONNX's elementwise operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trtconvert.models.onnx.call import Call, Table, Value, together
from trtconvert.models.onnx.sizes import listed


def _each(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def computed(call: Call, *values: Value) -> Tensor:
        first, *others = together(call, *values)
        return function(_first_as_tensor(first, *others), *others)

    return computed


def _first_as_tensor(first: Any, *others: Any) -> Tensor:
    """Returns the first operand as a tensor, for functions that need one; a number gets the type that others give it."""
    if isinstance(first, Tensor):
        return first
    like = next(x for x in others if isinstance(x, Tensor))
    return torch.full((), first, dtype=_type_beside(first, like), device=like.device)


def _type_beside(number: Any, like: Tensor) -> torch.dtype:
    """Returns the type of a number beside a tensor, which it does not widen."""
    return like.dtype if like.is_floating_point() or not isinstance(number, (float, torch.SymFloat)) else torch.float32


def _operator(function: Callable[[Any, Any], Any]) -> Callable[..., Tensor]:
    """Wraps an operator of Python, which takes numbers on either side."""
    return lambda call, a, b: function(*together(call, a, b))


def _of_tensor(function: Callable[[Call, Tensor], Tensor]) -> Callable[..., Tensor]:
    def computed(call: Call, x: Tensor) -> Tensor:
        return function(call, x)

    return computed


def _unary(function: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    return lambda call, x, *_: function(call.tensor(x))


def _folded(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    def computed(call: Call, *values: Value) -> Tensor:
        found = call.tensor(values[0])
        for value in values[1:]:
            a, b = together(call, found, value)
            found = function(
                a, b if isinstance(b, Tensor) else torch.full((), b, dtype=_type_beside(b, a), device=a.device)
            )
        return found

    return computed


def _divided(call: Call, a: Value, b: Value) -> Tensor:
    x, y = together(call, a, b)
    whole = all(isinstance(v, int) or (isinstance(v, Tensor) and not v.is_floating_point()) for v in (x, y))
    return torch.div(_first_as_tensor(x, y), y, rounding_mode="trunc") if whole else x / y


def _power(call: Call, x: Value, exponent: Value) -> Tensor:
    base, by = together(call, x, exponent)
    if isinstance(by, (int, float)) and by == 2 and isinstance(base, Tensor):
        # Squares in norms overflow float16 early: they are computed in float32, as in torch's norms.
        base = base.float() if base.is_floating_point() else base
        return base * base
    return torch.pow(base, by)


def _modulo(call: Call, a: Value, b: Value) -> Tensor:
    x, y = together(call, a, b)
    return torch.fmod(_first_as_tensor(x, y), y) if call.get("fmod", 0) else torch.remainder(x, y)


def _where(call: Call, condition: Value, a: Value, b: Value) -> Tensor:
    x, y = together(call, a, b)
    return torch.where(call.tensor(condition), x, y)


def _clip(call: Call, x: Value, low: Value | None = None, high: Value | None = None) -> Tensor:
    bounds = []
    for bound in (low, high):
        bounds.append(bound.item() if isinstance(bound, Tensor) else listed(bound)[0] if bound is not None else None)
    return torch.clamp(call.tensor(x), *bounds)


def _cast(call: Call, x: Value) -> Value:
    tensor = call.tensor(x)
    try:
        return tensor.to(call.types.of(call.get("to"), tensor.dtype))
    except KeyError as error:
        raise call.refused(f"a cast to ONNX's type {call.get('to')}", "types that torch computes with") from error


def _biased_gelu(call: Call, x: Tensor, bias: Value | None = None) -> Tensor:
    given = x if bias is None else _operator(lambda a, b: a + b)(call, x, bias)
    return F.gelu(given, approximate="tanh" if call.step.op.endswith("FastGelu") else "none")


def _sloped(call: Call, x: Tensor, slope: Value) -> Tensor:
    return torch.where(x < 0, x * call.tensor(slope).to(x.dtype), x)


_OF_TORCH = (
    "Abs", "Acos", "Asin", "Atan", "Ceil", "Cos", "Cosh", "Erf", "Exp", "Floor", "IsInf", "IsNaN", "Log", "Neg", "Reciprocal",
    "Relu", "Round", "Selu", "Sigmoid", "Sign", "Sin", "Sinh", "Sqrt", "Tan", "Tanh",
)  # fmt: skip
"""Operators that torch has under the same name."""

ELEMENTWISE: Table = {
    **{name: _unary(getattr(torch, name.lower())) for name in _OF_TORCH},
    "Add": _operator(lambda a, b: a + b),
    "And": _each(torch.logical_and),
    "Cast": _cast,
    "CastLike": lambda call, x, like: call.tensor(x).to(call.tensor(like).dtype),
    "Clip": _clip,
    "Div": _divided,
    "Dropout": lambda call, x, *_: x,
    "Elu": _of_tensor(lambda call, x: F.elu(x, call.get("alpha", 1.0))),
    "Equal": _each(torch.eq),
    "Gelu": _of_tensor(lambda call, x: F.gelu(x, approximate=call.get("approximate", "none"))),
    "Greater": _each(torch.gt),
    "GreaterOrEqual": _each(torch.ge),
    "HardSigmoid": _of_tensor(lambda call, x: (x * call.get("alpha", 0.2) + call.get("beta", 0.5)).clamp(0, 1)),
    "HardSwish": _unary(F.hardswish),
    "Identity": lambda call, x: x,
    "LeakyRelu": _of_tensor(lambda call, x: F.leaky_relu(x, call.get("alpha", 0.01))),
    "Less": _each(torch.lt),
    "LessOrEqual": _each(torch.le),
    "Max": _folded(torch.maximum),
    "Mean": lambda call, *values: _folded(torch.add)(call, *values) / len(values),
    "Min": _folded(torch.minimum),
    "Mish": _unary(F.mish),
    "Mod": _modulo,
    "Mul": _operator(lambda a, b: a * b),
    "Not": _unary(torch.logical_not),
    "Or": _each(torch.logical_or),
    "PRelu": _sloped,
    "Pow": _power,
    "Softplus": _unary(F.softplus),
    "Softsign": _unary(F.softsign),
    "Sub": _operator(lambda a, b: a - b),
    "Sum": _folded(torch.add),
    "Swish": _of_tensor(lambda call, x: x * torch.sigmoid(x * call.get("alpha", 1.0))),
    "Where": _where,
    "Xor": _each(torch.logical_xor),
    "com.microsoft::BiasGelu": _biased_gelu,
    "com.microsoft::FastGelu": _biased_gelu,
    "com.microsoft::Gelu": _biased_gelu,
    "com.microsoft::QuickGelu": _of_tensor(lambda call, x: x * torch.sigmoid(x * call.get("alpha", 1.702))),
}
