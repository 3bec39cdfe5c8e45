"""ONNX's operators over axes: reductions and norms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trtconvert.models.onnx.call import Call, Table, Value, as_weight, require_one_output


def _reduced(function: Callable[[Tensor, list[int], bool], Tensor]) -> Callable[..., Tensor]:
    def computed(call: Call, x: Value, axes: Value | None = None) -> Tensor:
        tensor, named = call.tensor(x), call.axes(axes)
        if not named:
            if call.get("noop_with_empty_axes", 0):
                return tensor
            named = list(range(tensor.dim()))
        return function(tensor, named, bool(call.get("keepdims", 1)))

    return computed


def _product(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    for axis in sorted((axis % x.dim() for axis in axes), reverse=True):
        x = x.prod(axis, keepdim=keep)
    return x


def _squares(x: Tensor) -> Tensor:
    return x.float() * x.float() if x.is_floating_point() else x * x


def _extreme(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def computed(call: Call, x: Tensor) -> Tensor:
        return function(x, call.get("axis", 0), keepdim=bool(call.get("keepdims", 1)))

    return computed


def _cumulated(call: Call, x: Value, axis: Value) -> Tensor:
    if call.get("exclusive", 0) or call.get("reverse", 0):
        raise call.refused("CumSum that is exclusive or reversed", "a plain one")
    return call.tensor(x).cumsum(int(call.sizes(axis)[0]))


def _softmax(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def computed(call: Call, x: Tensor) -> Tensor:
        if call.step.opset >= 13:
            return function(x, call.get("axis", -1))
        axis = call.get("axis", 1) % x.dim()
        # Before opset 13 all axes from there on count as one.
        return function(x, -1) if axis == x.dim() - 1 else function(x.flatten(axis), -1).reshape(x.shape)

    return computed


def _layer_norm(call: Call, x: Tensor, weight: Value | None = None, bias: Value | None = None) -> Tensor:
    require_one_output(call)
    shape = tuple(x.shape[call.get("axis", -1) :])
    gain, shift = as_weight(x, call, weight), as_weight(x, call, bias)
    eps = call.get("epsilon", 1e-5)
    if _is_whole(gain, shape) and _is_whole(shift, shape):
        return F.layer_norm(x, shape, gain, shift, eps)
    found = F.layer_norm(x, shape, None, None, eps)
    found = found if gain is None else found * gain
    return found if shift is None else found + shift


def _rms_norm(call: Call, x: Tensor, weight: Value) -> Tensor:
    require_one_output(call)
    shape, eps = tuple(x.shape[call.get("axis", -1) :]), call.get("epsilon", 1e-5)
    gain = as_weight(x, call, weight)
    if _is_whole(gain, shape):
        return F.rms_norm(x, shape, gain, eps)
    found = F.rms_norm(x, shape, None, eps)
    return found if gain is None else found * gain


def _is_whole(weight: Tensor | None, shape: Sequence[int]) -> bool:
    """Whether a norm has no such weight, or a number for each place: exporters store modulations, which broadcast, there too."""
    return weight is None or tuple(weight.shape) == tuple(shape)


def _skip_norm(call: Call, x: Tensor, skip: Tensor, weight: Value, *biases: Value | None) -> Any:
    """Computes a (Simplified) LayerNormalization of a sum, and returns the sum as its last output."""
    simple = call.step.op.endswith("SkipSimplifiedLayerNormalization")
    of_norm, of_sum = (None, *biases, None)[:2] if simple else (*biases, None, None)[:2]
    more = as_weight(x, call, of_sum)
    total = x + skip if more is None else x + skip + more
    eps = call.get("epsilon", 1e-5)
    gain = as_weight(x, call, weight)
    norm = (
        F.rms_norm(total, total.shape[-1:], gain, eps)
        if simple
        else F.layer_norm(total, total.shape[-1:], gain, as_weight(x, call, of_norm), eps)
    )
    return [norm, None, None, total][: len(call.step.outputs)]


def _instance_norm(call: Call, x: Tensor, weight: Value, bias: Value) -> Tensor:
    return F.instance_norm(
        x, weight=as_weight(x, call, weight), bias=as_weight(x, call, bias), eps=call.get("epsilon", 1e-5)
    )


def _group_norm(call: Call, x: Tensor, weight: Value | None = None, bias: Value | None = None) -> Tensor:
    groups, gain, shift = call.get("num_groups"), as_weight(x, call, weight), as_weight(x, call, bias)
    if gain is not None and shift is not None and call.step.opset < 21 and gain.numel() == groups != x.shape[1]:
        each = x.shape[1] // groups
        gain, shift = gain.repeat_interleave(each), shift.repeat_interleave(each)
    return F.group_norm(x, groups, gain, shift, call.get("epsilon", 1e-5))


def _batch_norm(call: Call, x: Tensor, weight: Value, bias: Value, mean: Value, variance: Value) -> Tensor:
    require_one_output(call)
    gain, shift = as_weight(x, call, weight), as_weight(x, call, bias)
    return F.batch_norm(
        x, as_weight(x, call, mean), as_weight(x, call, variance), gain, shift, eps=call.get("epsilon", 1e-5)
    )


def _pooled(call: Call, x: Tensor) -> Tensor:
    return x.mean(list(range(2, x.dim())), keepdim=True)


def _length_norm(call: Call, x: Tensor) -> Tensor:
    return F.normalize(x, call.get("p", 2), call.get("axis", -1))


REDUCTIONS: Table = {
    "ArgMax": _extreme(torch.argmax),
    "ArgMin": _extreme(torch.argmin),
    "BatchNormalization": _batch_norm,
    "CumSum": _cumulated,
    "GlobalAveragePool": _pooled,
    "GroupNormalization": _group_norm,
    "InstanceNormalization": _instance_norm,
    "LayerNormalization": _layer_norm,
    "LogSoftmax": _softmax(F.log_softmax),
    "LpNormalization": _length_norm,
    "RMSNormalization": _rms_norm,
    "ReduceL1": _reduced(lambda x, axes, keep: x.abs().sum(axes, keepdim=keep)),
    "ReduceL2": _reduced(lambda x, axes, keep: _squares(x).sum(axes, keepdim=keep).sqrt()),
    "ReduceLogSumExp": _reduced(lambda x, axes, keep: torch.logsumexp(x, axes, keepdim=keep)),
    "ReduceMax": _reduced(lambda x, axes, keep: x.amax(axes, keepdim=keep)),
    "ReduceMean": _reduced(lambda x, axes, keep: x.mean(axes, keepdim=keep)),
    "ReduceMin": _reduced(lambda x, axes, keep: x.amin(axes, keepdim=keep)),
    "ReduceProd": _reduced(_product),
    "ReduceSum": _reduced(lambda x, axes, keep: x.sum(axes, keepdim=keep)),
    "ReduceSumSquare": _reduced(lambda x, axes, keep: _squares(x).sum(axes, keepdim=keep)),
    "SimplifiedLayerNormalization": _rms_norm,
    "Softmax": _softmax(F.softmax),
    "trtconvert::group_norm": _group_norm,  # made by `layers`
    "com.microsoft::SkipLayerNormalization": _skip_norm,
    "com.microsoft::SkipSimplifiedLayerNormalization": _skip_norm,
}
