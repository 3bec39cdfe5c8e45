"""ONNX's operators in torch, as a denoiser has them. A module in 16 bits computes each in its own type, as engines do.

Sources: ONNX's operator schemas; onnxruntime's ContribOperators.md for those of `com.microsoft`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from trtconvert.models.onnx.call import Call, Types, Value
from trtconvert.models.onnx.elementwise import ELEMENTWISE
from trtconvert.models.onnx.multi_head import ATTENTIONS
from trtconvert.models.onnx.products import PRODUCTS
from trtconvert.models.onnx.reductions import REDUCTIONS
from trtconvert.models.onnx.shapes import SHAPES
from trtconvert.models.onnx.steps import Step

OPERATORS: dict[str, Callable[..., Any]] = {**ELEMENTWISE, **SHAPES, **REDUCTIONS, **PRODUCTS, **ATTENTIONS}
"""By operator. What is constant in any graph (Constant) is no step."""


def compute(step: Step, types: Types, inputs: Sequence[Value | None]) -> Any:
    """What a step gives: a value, or several."""
    return OPERATORS[step.op](Call(step, types), *inputs)
