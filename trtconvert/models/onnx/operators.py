"""ONNX's operators in torch, as a denoiser has them. A module in 16 bits computes each in its own type, as engines do.

Sources: ONNX's operator schemas; onnxruntime's ContribOperators.md for those of `com.microsoft`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from trtconvert.errors import UserError
from trtconvert.models.onnx.sizes import Numbers, listed, numbers
from trtconvert.models.onnx.steps import Step

Value = Tensor | Numbers

_WIDE = 2**31 - 1
"""Beyond this an end of a slice means "to the end"."""


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


def compute(step: Step, types: Types, inputs: Sequence[Value | None]) -> Any:
    """What a step gives: a value, or several."""
    return OPERATORS[step.op](Call(step, types), *inputs)


# Numbers one by one ---------------------------------------------------------------------------------------------------


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


def _each(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def computed(call: Call, *values: Value) -> Tensor:
        operands = together(call, *values)
        if not isinstance(operands[0], Tensor):  # of functions that want one first
            like = next(x for x in operands if isinstance(x, Tensor))
            operands[0] = torch.full((), operands[0], dtype=_type_beside(operands[0], like), device=like.device)
        return function(*operands)

    return computed


def _type_beside(number: Any, like: Tensor) -> torch.dtype:
    """The type of a number beside a tensor, which it does not widen."""
    return like.dtype if like.is_floating_point() or not isinstance(number, (float, torch.SymFloat)) else torch.float32


def _operator(function: Callable[[Any, Any], Any]) -> Callable[..., Tensor]:
    """Of Python's operators, which take numbers on either side."""
    return lambda call, a, b: function(*together(call, a, b))


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
    return torch.div(x, y, rounding_mode="trunc") if whole else x / y


def _power(call: Call, x: Value, exponent: Value) -> Tensor:
    base, by = together(call, x, exponent)
    if isinstance(by, (int, float)) and by == 2 and isinstance(base, Tensor):
        # The squares of norms leave float16 early: as torch's norms do, these are computed in float32.
        base = base.float() if base.is_floating_point() else base
        return base * base
    return torch.pow(base, by)


def _modulo(call: Call, a: Value, b: Value) -> Tensor:
    x, y = together(call, a, b)
    return torch.fmod(x, y) if call.get("fmod", 0) else torch.remainder(x, y)


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


def _cast_like(call: Call, x: Value, like: Value) -> Tensor:
    return call.tensor(x).to(call.tensor(like).dtype)


def _gelu(call: Call, x: Tensor) -> Tensor:
    return F.gelu(x, approximate=call.get("approximate", "none"))


def _biased_gelu(call: Call, x: Tensor, bias: Value | None = None) -> Tensor:
    given = x if bias is None else _operator(lambda a, b: a + b)(call, x, bias)
    return F.gelu(given, approximate="tanh" if call.step.op.endswith("FastGelu") else "none")


def _rounded_shift(call: Call, x: Tensor) -> Tensor:
    return torch.clamp(x * call.get("alpha", 0.2) + call.get("beta", 0.5), 0, 1)


# Shapes ---------------------------------------------------------------------------------------------------------------


def _shape(call: Call, x: Value) -> Numbers:
    found = numbers(x.shape)
    return found[call.get("start", 0) : call.get("end", None)]


def _size(_: Call, x: Value) -> Numbers:
    return numbers([math.prod(x.shape)], ())


def _reshape(call: Call, x: Value, shape: Value) -> Tensor:
    tensor, wanted = call.tensor(x), call.sizes(shape)
    if not call.get("allowzero", 0):
        wanted = [
            tensor.shape[axis] if isinstance(size, int) and size == 0 else size for axis, size in enumerate(wanted)
        ]
    return tensor.reshape(wanted)


def _flatten(call: Call, x: Tensor) -> Tensor:
    axis = call.get("axis", 1) % (x.dim() + 1)
    return x.reshape(math.prod(x.shape[:axis]), -1)


def _squeeze(call: Call, x: Value, axes: Value | None = None) -> Tensor:
    tensor, named = call.tensor(x), call.axes(axes)
    return tensor.squeeze() if named is None else tensor.squeeze(tuple(named)) if named else tensor


def _unsqueeze(call: Call, x: Value, axes: Value | None = None) -> Tensor:
    tensor, named = call.tensor(x), call.axes(axes) or []
    rank = tensor.dim() + len(named)
    for axis in sorted(axis % rank for axis in named):
        tensor = tensor.unsqueeze(axis)
    return tensor


def _transpose(call: Call, x: Value) -> Tensor:
    tensor = call.tensor(x)
    return tensor.permute(call.get("perm") or list(range(tensor.dim()))[::-1])


def _concat(call: Call, *parts: Value) -> Tensor:
    tensors = [call.tensor(part) for part in parts]
    kinds = {x.dtype for x in tensors if x.is_floating_point()}
    if len(kinds) > 1:
        kind = min(kinds, key=lambda kind: torch.finfo(kind).bits)
        tensors = [x.to(kind) for x in tensors]
    return torch.cat(tensors, call.get("axis"))


def _split(call: Call, x: Tensor, lengths: Value | None = None) -> Sequence[Tensor]:
    axis, parts = call.get("axis", 0), len(call.step.outputs)
    given = call.get("split") if lengths is None else call.sizes(lengths)
    if given is not None:
        return torch.split(x, given, axis)
    # As many as there are; the last is the smaller one where they do not divide the axis.
    return torch.split(x, (x.shape[axis] + parts - 1) // parts, axis)


def _slice(
    call: Call, x: Value, starts: Value, ends: Value, axes: Value | None = None, steps: Value | None = None
) -> Tensor:
    tensor, first, last = call.tensor(x), call.sizes(starts), call.sizes(ends)
    named = call.axes(axes) or list(range(len(first)))
    for axis, start, end, step in zip(named, first, last, call.sizes(steps) or [1] * len(first), strict=True):
        cut: list[Any] = [slice(None)] * tensor.dim()
        if step > 0:
            cut[axis] = slice(start, None if isinstance(end, int) and end > _WIDE else end, step)
            tensor = tensor[tuple(cut)]
            continue
        places = list(range(int(tensor.shape[axis])))[slice(start, None if end < -_WIDE else end, step)]
        tensor = tensor.index_select(axis, torch.tensor(places, device=tensor.device))
    return tensor


def _gather(call: Call, x: Value, index: Value) -> Tensor:
    tensor, axis = call.tensor(x), call.get("axis", 0)
    if isinstance(index, np.ndarray):
        if index.ndim == 0:
            return tensor.select(axis, listed(index)[0])
        places = [int(place) % int(tensor.shape[axis]) if place < 0 else place for place in listed(index)]
        index = call.tensor(numbers(places, index.shape))
    if axis == 0 and tensor.dim() == 2:
        return F.embedding(index.long(), tensor)
    shape = [*tensor.shape[: axis % tensor.dim()], *index.shape, *tensor.shape[axis % tensor.dim() + 1 :]]
    return tensor.index_select(axis, index.reshape(-1).long()).reshape(shape)


def _gather_elements(call: Call, x: Tensor, index: Value) -> Tensor:
    return x.gather(call.get("axis", 0), call.tensor(index).long())


def _gather_nd(call: Call, x: Value, index: Value) -> Tensor:
    tensor, places = call.tensor(x), call.tensor(index).long()
    if call.get("batch_dims", 0):
        raise call.refused("GatherND with batch_dims", "without")
    return tensor[tuple(places.unbind(-1))]


def _scatter_nd(call: Call, x: Value, index: Value, updates: Value) -> Tensor:
    if call.get("reduction", "none") != "none":
        raise call.refused(f"ScatterND with reduction {call.get('reduction')}", "none")
    tensor, places, new = call.tensor(x), call.tensor(index).long(), call.tensor(updates)
    return torch.index_put(tensor, tuple(places.unbind(-1)), new.to(tensor.dtype))


def _scatter_elements(call: Call, x: Tensor, index: Value, updates: Value) -> Tensor:
    if call.get("reduction", "none") != "none":
        raise call.refused(f"ScatterElements with reduction {call.get('reduction')}", "none")
    return torch.scatter(x, call.get("axis", 0), call.tensor(index).long(), call.tensor(updates).to(x.dtype))


def _expand(call: Call, x: Value, shape: Value) -> Tensor:
    tensor, wanted = call.tensor(x), call.sizes(shape)
    missing = len(wanted) - tensor.dim()
    sizes = [1] * -missing + wanted if missing < 0 else wanted
    own = [1] * max(missing, 0) + list(tensor.shape)
    return tensor.expand(
        [has if isinstance(size, int) and size == 1 else size for size, has in zip(sizes, own, strict=True)]
    )


def _tile(call: Call, x: Value, repeats: Value) -> Tensor:
    return call.tensor(x).repeat(call.sizes(repeats))


def _filled(call: Call, shape: Value) -> Tensor:
    value = call.get("value")
    number = 0.0 if value is None else value.ravel()[0].item()
    kind = (
        None if value is None or isinstance(number, float) else torch.bool if isinstance(number, bool) else torch.int64
    )
    return torch.full(call.sizes(shape), number, dtype=kind or torch.float32, device=call.types.device)


def _range(call: Call, start: Value, end: Value, step: Value) -> Tensor:
    low, high, by = (call.sizes(x)[0] for x in (start, end, step))
    return torch.arange(low, high, by, device=call.types.device)


def _triangle(call: Call, x: Tensor, diagonal: Value | None = None) -> Tensor:
    offset = int(call.sizes(diagonal)[0]) if diagonal is not None else 0
    return torch.triu(x, offset) if call.get("upper", 1) else torch.tril(x, offset)


def _one_hot(call: Call, index: Value, depth: Value, values: Value) -> Tensor:
    if call.get("axis", -1) != -1:
        raise call.refused(f"OneHot along axis {call.get('axis')}", "along the last")
    off, on = call.tensor(values).unbind(0)
    count = int(call.sizes(depth)[0])
    hot = call.tensor(index).long()[..., None] == torch.arange(count, device=call.types.device)
    return torch.where(hot, on, off)


def _pad(
    call: Call, x: Tensor, pads: Value | None = None, value: Value | None = None, axes: Value | None = None
) -> Tensor:
    given = call.get("pads") if pads is None else call.sizes(pads)
    named = call.axes(axes) or list(range(x.dim()))
    half = len(given) // 2
    sides: list[Any] = [0] * (2 * x.dim())
    for place, axis in enumerate(named):
        reverse = x.dim() - 1 - axis % x.dim()
        sides[2 * reverse], sides[2 * reverse + 1] = given[place], given[half + place]
    while len(sides) > 2 and sides[-1] == 0 and sides[-2] == 0:
        sides = sides[:-2]
    modes = {"constant": "constant", "reflect": "reflect", "edge": "replicate", "wrap": "circular"}
    mode = modes[call.get("mode", "constant")]
    if mode != "constant":
        return F.pad(x, sides, mode)
    fill = 0.0 if value is None else value.item() if isinstance(value, Tensor) else listed(value)[0]
    return F.pad(x, sides, value=fill)


def _depth_to_space(call: Call, x: Tensor) -> Tensor:
    size = call.get("blocksize")
    if call.get("mode", "DCR") == "CRD":
        return F.pixel_shuffle(x, size)
    b, c, h, w = x.shape
    return (
        x.reshape(b, size, size, c // size**2, h, w)
        .permute(0, 3, 4, 1, 5, 2)
        .reshape(b, c // size**2, h * size, w * size)
    )


def _space_to_depth(call: Call, x: Tensor) -> Tensor:
    size = call.get("blocksize")
    b, c, h, w = x.shape
    return x.reshape(b, c, h // size, size, w // size, size).permute(0, 3, 5, 1, 2, 4).reshape(
        b, c * size**2, h // size, w // size
    )  # fmt: skip


# Over axes ------------------------------------------------------------------------------------------------------------


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
    """In float32, see `_power`."""
    return x.float() * x.float() if x.is_floating_point() else x * x


def _extreme(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda call, x: function(x, call.get("axis", 0), keepdim=bool(call.get("keepdims", 1)))


def _cumulated(call: Call, x: Value, axis: Value) -> Tensor:
    if call.get("exclusive", 0) or call.get("reverse", 0):
        raise call.refused("CumSum that is exclusive or reversed", "a plain one")
    return call.tensor(x).cumsum(int(call.sizes(axis)[0]))


def _softmax(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def computed(call: Call, x: Tensor) -> Tensor:
        if call.step.opset >= 13:
            return function(x, call.get("axis", -1))
        axis = call.get("axis", 1) % x.dim()
        # Older ones take all axes from there on for one.
        return function(x, -1) if axis == x.dim() - 1 else function(x.flatten(axis), -1).reshape(x.shape)

    return computed


def _layer_norm(call: Call, x: Tensor, weight: Value | None = None, bias: Value | None = None) -> Tensor:
    _one_output(call)
    shape = x.shape[call.get("axis", -1) :]
    return F.layer_norm(x, shape, _as(x, call, weight), _as(x, call, bias), call.get("epsilon", 1e-5))


def _rms_norm(call: Call, x: Tensor, weight: Value) -> Tensor:
    _one_output(call)
    return F.rms_norm(x, x.shape[call.get("axis", -1) :], _as(x, call, weight), call.get("epsilon", 1e-5))


def _skip_norm(call: Call, x: Tensor, skip: Tensor, weight: Value, *biases: Value | None) -> Any:
    """(Simplified) LayerNormalization of a sum, which is its last output."""
    simple = call.step.op.endswith("SkipSimplifiedLayerNormalization")
    of_norm, of_sum = (None, *biases, None)[:2] if simple else (*biases, None, None)[:2]
    more = _as(x, call, of_sum)
    total = x + skip if more is None else x + skip + more
    eps = call.get("epsilon", 1e-5)
    gain = _as(x, call, weight)
    norm = (
        F.rms_norm(total, total.shape[-1:], gain, eps)
        if simple
        else F.layer_norm(total, total.shape[-1:], gain, _as(x, call, of_norm), eps)
    )
    return [norm, None, None, total][: len(call.step.outputs)]


def _instance_norm(call: Call, x: Tensor, weight: Value, bias: Value) -> Tensor:
    return F.instance_norm(x, weight=_as(x, call, weight), bias=_as(x, call, bias), eps=call.get("epsilon", 1e-5))


def _group_norm(call: Call, x: Tensor, weight: Value | None = None, bias: Value | None = None) -> Tensor:
    groups, gain, shift = call.get("num_groups"), _as(x, call, weight), _as(x, call, bias)
    if gain is not None and shift is not None and call.step.opset < 21 and gain.numel() == groups != x.shape[1]:
        each = x.shape[1] // groups
        gain, shift = gain.repeat_interleave(each), shift.repeat_interleave(each)
    return F.group_norm(x, groups, gain, shift, call.get("epsilon", 1e-5))


def _batch_norm(call: Call, x: Tensor, weight: Value, bias: Value, mean: Value, variance: Value) -> Tensor:
    _one_output(call)
    gain, shift = _as(x, call, weight), _as(x, call, bias)
    return F.batch_norm(x, _as(x, call, mean), _as(x, call, variance), gain, shift, eps=call.get("epsilon", 1e-5))


def _length_norm(call: Call, x: Tensor) -> Tensor:
    return F.normalize(x, call.get("p", 2), call.get("axis", -1))


def _one_output(call: Call) -> None:
    if any(call.step.outputs[1:]):
        raise call.refused("its means or statistics are outputs too", "one output")


def _as(x: Tensor, call: Call, value: Value | None) -> Tensor | None:
    """A weight beside a tensor of activations, in its type."""
    return None if value is None else call.tensor(value).to(x.dtype)


# Products -------------------------------------------------------------------------------------------------------------


def _product_of(call: Call, a: Value, b: Value) -> Tensor:
    x, y = (call.tensor(value) for value in (a, b))
    x, y = _of_one_type(x, y)
    return torch.matmul(x, y)


def _of_one_type(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    if x.dtype == y.dtype:
        return x, y
    kind = min((x.dtype, y.dtype), key=lambda kind: torch.finfo(kind).bits)
    return x.to(kind), y.to(kind)


def _gemm(call: Call, a: Value, b: Value, c: Value | None = None) -> Tensor:
    x, y = _of_one_type(call.tensor(a), call.tensor(b))
    found = (x.T if call.get("transA", 0) else x) @ (y.T if call.get("transB", 0) else y)
    found = found * call.get("alpha", 1.0) if call.get("alpha", 1.0) != 1 else found
    if c is None:
        return found
    bias = call.tensor(c).to(found.dtype)
    return found + (bias * call.get("beta", 1.0) if call.get("beta", 1.0) != 1 else bias)


def _linear(call: Call, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Of our own: a product with a constant, as torch's layers have it. weight [N, K]."""
    return F.linear(x.to(weight.dtype), weight, None if bias is None else bias.to(weight.dtype))


def _fused_product(call: Call, a: Tensor, b: Tensor) -> Tensor:
    if call.get("transBatchA", 0) or call.get("transBatchB", 0):
        raise call.refused("FusedMatMul with transBatch", "without")
    x = a.transpose(-1, -2) if call.get("transA", 0) else a
    y = b.transpose(-1, -2) if call.get("transB", 0) else b
    return torch.matmul(*_of_one_type(x, y)) * call.get("alpha", 1.0)


def _einsum(call: Call, *operands: Tensor) -> Tensor:
    kinds = {x.dtype for x in operands}
    kind = min(kinds, key=lambda kind: torch.finfo(kind).bits)
    return torch.einsum(call.get("equation"), *(x.to(kind) for x in operands))


def _padding(call: Call, x: Tensor, kernel: Sequence[int], strides: Sequence[int]) -> tuple[Tensor, list[int]]:
    """A tensor and the padding on both sides that is left to do: uneven padding is done."""
    count = len(kernel)
    auto = call.get("auto_pad", "NOTSET")
    pads = call.get("pads") or [0] * (2 * count)
    if auto in ("SAME_UPPER", "SAME_LOWER"):
        pads = [0] * (2 * count)
        for i, (size, k, s) in enumerate(zip(x.shape[2:], kernel, strides, strict=True)):
            total = max(
                (-(-int(size) // s) - 1) * s + (k - 1) * call.get("dilations", [1] * count)[i] + 1 - int(size), 0
            )
            small = total // 2
            pads[i], pads[count + i] = (small, total - small) if auto == "SAME_UPPER" else (total - small, small)
    if pads[:count] == pads[count:]:
        return x, list(pads[:count])
    sides = [side for i in reversed(range(count)) for side in (pads[i], pads[count + i])]
    return F.pad(x, sides), [0] * count


_CONVOLUTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


def _conv(call: Call, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    count = weight.dim() - 2
    strides, dilations = call.get("strides", [1] * count), call.get("dilations", [1] * count)
    x, pads = _padding(call, x.to(weight.dtype), weight.shape[2:], strides)
    bias = None if bias is None else bias.to(weight.dtype)
    return _CONVOLUTIONS[count](
        x, weight, bias, stride=strides, padding=pads, dilation=dilations, groups=call.get("group", 1)
    )


def _conv_transposed(call: Call, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    count = weight.dim() - 2
    pads = call.get("pads") or [0] * (2 * count)
    if pads[:count] != pads[count:] or call.get("output_shape") or call.get("auto_pad", "NOTSET") != "NOTSET":
        raise call.refused("uneven or automatic padding", "a transposed convolution with even padding")
    return _TRANSPOSED[count](
        x.to(weight.dtype), weight, bias, stride=call.get("strides", [1] * count), padding=pads[:count],
        output_padding=call.get("output_padding", [0] * count), groups=call.get("group", 1),
        dilation=call.get("dilations", [1] * count),
    )  # fmt: skip


def _pooled(functions: Mapping[int, Callable[..., Tensor]]) -> Callable[..., Tensor]:
    def computed(call: Call, x: Tensor) -> Tensor:
        _one_output(call)
        kernel = call.get("kernel_shape")
        strides = call.get("strides", [1] * len(kernel))
        pads = call.get("pads") or [0] * (2 * len(kernel))
        if pads[: len(kernel)] != pads[len(kernel) :] or call.get("auto_pad", "NOTSET") not in ("NOTSET", "VALID"):
            raise call.refused("uneven padding", "pooling with even padding")
        more = {"count_include_pad": bool(call.get("count_include_pad", 0))} if functions is _AVERAGES else {}
        ceil = bool(call.get("ceil_mode", 0))
        return functions[len(kernel)](x, kernel, strides, pads[: len(kernel)], ceil_mode=ceil, **more)

    return computed


_AVERAGES = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}
_MAXIMA = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}


def _resize(call: Call, x: Tensor, *given: Value | None) -> Tensor:
    """Of images, as torch resizes them; checked against onnxruntime as all of a graph is."""
    scales, sizes = (given[0], None) if call.step.op == "Upsample" else ((*given, None, None, None)[1:3])
    count = x.dim() - 2
    mode, of = call.get("mode", "nearest"), call.get("coordinate_transformation_mode", "half_pixel")
    named = call.get("axes") or list(range(x.dim()))
    wanted: list[Any] = list(x.shape)
    if sizes is not None and (not isinstance(sizes, np.ndarray) or sizes.size):
        for axis, size in zip(named, call.sizes(sizes), strict=True):
            wanted[axis] = size
    else:
        for axis, scale in zip(named, call.sizes(scales), strict=True):
            whole = isinstance(scale, (int, float)) and float(scale).is_integer()
            wanted[axis] = wanted[axis] * int(scale) if whole else math.floor(wanted[axis] * scale)
    if any(isinstance(a, int) and isinstance(b, int) and a != b for a, b in zip(wanted[:2], x.shape[:2], strict=True)):
        raise call.refused("samples or channels are resized", "height and width alone")
    if mode == "nearest":
        exact = of in ("half_pixel", "pytorch_half_pixel") and call.get("nearest_mode", "round_prefer_floor") != "floor"
        return F.interpolate(x, wanted[2:], mode="nearest-exact" if exact else "nearest")
    modes = {("linear", 1): "linear", ("linear", 2): "bilinear", ("linear", 3): "trilinear", ("cubic", 2): "bicubic"}
    aligned = {"align_corners": True, "half_pixel": False, "pytorch_half_pixel": False}
    if (mode, count) not in modes or of not in aligned:
        raise call.refused(
            f"Resize with mode {mode} and {of}", "nearest, linear or cubic, with half_pixel or align_corners"
        )
    antialias = {"antialias": True} if call.get("antialias", 0) else {}
    return F.interpolate(x, wanted[2:], mode=modes[mode, count], align_corners=aligned[of], **antialias)


# Attention ------------------------------------------------------------------------------------------------------------


def _attended(call: Call, q: Tensor, k: Tensor, v: Tensor, mask: Value | None = None, *factors: Value) -> Tensor:
    """Of our own: what `attention` found of several steps.

    Args:
        q, k, v: [B, H, N, D], or [B, N, D].
        factors: of the logits; those that `divided` names divide.
    """
    scale = float(call.get("scale", 1.0))
    for value, divides in zip(factors, call.get("divided", []), strict=True):
        number = float(value.item() if isinstance(value, Tensor) else listed(value)[0])
        scale = scale / number if divides else scale * number
    kind = min((x.dtype for x in (q, k, v)), key=lambda kind: torch.finfo(kind).bits)
    q, k, v = (x.to(kind) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, _mask_beside(call, q, mask), scale=scale)


def _mask_beside(call: Call, q: Tensor, mask: Value | None) -> Tensor | None:
    if mask is None:
        return None
    tensor = call.tensor(mask)
    while tensor.dim() < q.dim():
        tensor = tensor.unsqueeze(0)
    return tensor.to(q.dtype) if tensor.is_floating_point() else tensor


def _split_mask(call: Call, mask: Value) -> Tensor:
    """A mask of [B·H, N, M], or of one for all, beside logits [B, H, N, M]."""
    tensor = call.tensor(mask)
    if tensor.dim() < 3:
        return tensor
    shared = isinstance(tensor.shape[0], int) and tensor.shape[0] == 1
    return tensor.unsqueeze(1) if shared else tensor.unflatten(0, (-1, call.get("heads")))


def _as_added(call: Call, mask: Value) -> Tensor:
    """A mask of truth values as what is added to logits."""
    tensor = call.tensor(mask)
    kept = tensor if call.get("kept") else ~tensor
    return torch.zeros_like(tensor, dtype=call.types.current).masked_fill(~kept, -math.inf)


def _attention(call: Call, q: Tensor, k: Tensor, v: Tensor, mask: Value | None = None, *past: Value | None) -> Tensor:
    """ONNX's Attention, since opset 23. [B, H, N, D], or [B, N, H·D]."""
    _one_output(call)
    if any(x is not None for x in past) or call.get("softcap", 0.0):
        raise call.refused("Attention with a cache or a softcap", "without")
    flat = q.dim() == 3
    if flat:
        heads, of_keys = call.get("q_num_heads"), call.get("kv_num_heads")
        q, k, v = _split_heads(q, heads), _split_heads(k, of_keys), _split_heads(v, of_keys)
    found = _heads_attended(call, q, k, v, _mask_beside(call, q, mask), bool(call.get("is_causal", 0)))
    return found.transpose(1, 2).flatten(2) if flat else found


def _heads_attended(call: Call, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    kind = min((x.dtype for x in (q, k, v)), key=lambda kind: torch.finfo(kind).bits)
    q, k, v = (x.to(kind) for x in (q, k, v))
    grouped = {"enable_gqa": True} if q.shape[1] != k.shape[1] else {}
    return F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=call.get("scale") or None, **grouped)


def _split_heads(x: Tensor, heads: int) -> Tensor:
    """[B, N, H·D] → [B, H, N, D]."""
    return x.unflatten(2, (heads, -1)).transpose(1, 2)


def _multi_head(
    call: Call, q: Tensor, k: Value | None = None, v: Value | None = None, bias: Value | None = None,
    padding: Value | None = None, added: Value | None = None, *past: Value | None,
) -> Tensor:  # fmt: skip
    """com.microsoft's MultiHeadAttention, of three-dimensional queries, keys and values, or packed ones, [B, N, H, 3, D]."""
    _one_output(call)
    heads = call.get("num_heads")
    if any(x is not None for x in past) or padding is not None:
        raise call.refused("MultiHeadAttention with a cache or a key_padding_mask", "without")
    if q.dim() == 5 and k is None:
        queries, keys, values = (x.transpose(1, 2) for x in q.unbind(3))
    elif isinstance(k, Tensor) and k.dim() == 3 and isinstance(v, Tensor):
        parts = [q, k, v]
        if bias is not None:
            whole = call.tensor(bias).to(q.dtype)
            parts = [x + part for x, part in zip(parts, whole.split([x.shape[-1] for x in parts]), strict=True)]
        queries, keys, values = (_split_heads(x, heads) for x in parts)
    elif isinstance(k, Tensor) and k.dim() == 5 and v is None:  # packed keys and values
        queries = _split_heads(q, heads)
        keys, values = (x.transpose(1, 2) for x in k.unbind(3))
    else:
        raise call.refused("MultiHeadAttention of other shapes", "queries, keys and values [B, N, H·D]")
    found = _heads_attended(
        call, queries, keys, values, _mask_beside(call, queries, added), bool(call.get("unidirectional", 0))
    )
    return found.transpose(1, 2).flatten(2)


def _packed_attention(call: Call, x: Tensor, weight: Tensor, bias: Value | None = None, *more: Value | None) -> Tensor:
    """com.microsoft's Attention, which holds the projections too. weight [K, 3·N]."""
    _one_output(call)
    if any(value is not None for value in more):
        raise call.refused("com.microsoft's Attention with a mask or a cache", "without")
    projected = F.linear(x.to(weight.dtype), weight.T, _as(weight, call, bias))
    sizes = call.get("qkv_hidden_sizes") or [projected.shape[-1] // 3] * 3
    q, k, v = (_split_heads(part, call.get("num_heads")) for part in projected.split(sizes, -1))
    return _heads_attended(call, q, k, v, None, bool(call.get("unidirectional", 0))).transpose(1, 2).flatten(2)


def _rotary(call: Call, x: Tensor, cosines: Value, sines: Value, positions: Value | None = None) -> Tensor:
    """ONNX's RotaryEmbedding, since opset 23. [B, H, N, D], or [B, N, H·D]."""
    flat = x.dim() == 3
    heads = x.unflatten(2, (call.get("num_heads"), -1)) if flat else x.transpose(1, 2)  # [B, N, H, D]
    cos, sin = (call.tensor(value).to(x.dtype) for value in (cosines, sines))
    if positions is not None:
        cos, sin = (F.embedding(call.tensor(positions).long(), table) for table in (cos, sin))
    size = call.get("rotary_embedding_dim", 0) or heads.shape[-1]
    turned, left = heads[..., :size], heads[..., size:]
    cos, sin = cos[..., None, : size // 2], sin[..., None, : size // 2]
    if call.get("interleaved", 0):
        a, b = turned[..., 0::2], turned[..., 1::2]
        turned = torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)
    else:
        a, b = turned.chunk(2, -1)
        turned = torch.cat([a * cos - b * sin, a * sin + b * cos], -1)
    found = torch.cat([turned, left], -1) if left.shape[-1] else turned
    return found.flatten(2) if flat else found.transpose(1, 2)


def _dequantised(call: Call, x: Tensor, scale: Value, zero: Value | None = None) -> Tensor:
    """Of constants: weights that were stored in 8 bits."""
    factor = call.tensor(scale).float()
    shape = [1] * x.dim()
    if factor.dim() == 1 and factor.numel() > 1:
        shape[call.get("axis", 1)] = -1
    elif factor.dim() > 1:
        raise call.refused("scales by blocks", "one scale, or one for each channel")
    offset = 0 if zero is None else call.tensor(zero).float().reshape(shape)
    return (x.float() - offset) * factor.reshape(shape)


OPERATORS: Mapping[str, Callable[..., Any]] = {
    # one by one
    "Abs": _unary(torch.abs),
    "Acos": _unary(torch.acos),
    "Add": _operator(lambda a, b: a + b),
    "And": _each(torch.logical_and),
    "Asin": _unary(torch.asin),
    "Atan": _unary(torch.atan),
    "Cast": _cast,
    "CastLike": _cast_like,
    "Ceil": _unary(torch.ceil),
    "Clip": _clip,
    "Cos": _unary(torch.cos),
    "Cosh": _unary(torch.cosh),
    "Div": _divided,
    "Dropout": lambda call, x, *_: x,
    "Elu": lambda call, x: F.elu(x, call.get("alpha", 1.0)),
    "Equal": _each(torch.eq),
    "Erf": _unary(torch.erf),
    "Exp": _unary(torch.exp),
    "Floor": _unary(torch.floor),
    "Gelu": _gelu,
    "Greater": _each(torch.gt),
    "GreaterOrEqual": _each(torch.ge),
    "HardSigmoid": _rounded_shift,
    "HardSwish": _unary(F.hardswish),
    "Identity": lambda call, x: x,
    "IsInf": _unary(torch.isinf),
    "IsNaN": _unary(torch.isnan),
    "LeakyRelu": lambda call, x: F.leaky_relu(x, call.get("alpha", 0.01)),
    "Less": _each(torch.lt),
    "LessOrEqual": _each(torch.le),
    "Log": _unary(torch.log),
    "Max": _folded(torch.maximum),
    "Mean": lambda call, *values: _folded(torch.add)(call, *values) / len(values),
    "Min": _folded(torch.minimum),
    "Mish": _unary(F.mish),
    "Mod": _modulo,
    "Mul": _operator(lambda a, b: a * b),
    "Neg": _unary(torch.neg),
    "Not": _unary(torch.logical_not),
    "Or": _each(torch.logical_or),
    "PRelu": lambda call, x, slope: torch.where(x < 0, x * _as(x, call, slope), x),
    "Pow": _power,
    "Reciprocal": _unary(torch.reciprocal),
    "Relu": _unary(torch.relu),
    "Round": _unary(torch.round),
    "Selu": _unary(torch.selu),
    "Sigmoid": _unary(torch.sigmoid),
    "Sign": _unary(torch.sign),
    "Sin": _unary(torch.sin),
    "Sinh": _unary(torch.sinh),
    "Softplus": _unary(F.softplus),
    "Softsign": _unary(F.softsign),
    "Sqrt": _unary(torch.sqrt),
    "Sub": _operator(lambda a, b: a - b),
    "Sum": _folded(torch.add),
    "Swish": lambda call, x: x * torch.sigmoid(x * call.get("alpha", 1.0)),
    "Tan": _unary(torch.tan),
    "Tanh": _unary(torch.tanh),
    "Where": _where,
    "Xor": _each(torch.logical_xor),
    "com.microsoft::BiasGelu": _biased_gelu,
    "com.microsoft::FastGelu": _biased_gelu,
    "com.microsoft::Gelu": _biased_gelu,
    "com.microsoft::QuickGelu": lambda call, x: x * torch.sigmoid(x * call.get("alpha", 1.702)),
    # shapes
    "ConstantOfShape": _filled,
    "Concat": _concat,
    "DepthToSpace": _depth_to_space,
    "Expand": _expand,
    "Flatten": _flatten,
    "Gather": _gather,
    "GatherElements": _gather_elements,
    "GatherND": _gather_nd,
    "OneHot": _one_hot,
    "Pad": _pad,
    "Range": _range,
    "Reshape": _reshape,
    "Resize": _resize,
    "ScatterElements": _scatter_elements,
    "ScatterND": _scatter_nd,
    "Shape": _shape,
    "Size": _size,
    "Slice": _slice,
    "SpaceToDepth": _space_to_depth,
    "Split": _split,
    "Squeeze": _squeeze,
    "Tile": _tile,
    "Transpose": _transpose,
    "Trilu": _triangle,
    "Unsqueeze": _unsqueeze,
    "Upsample": _resize,
    # over axes
    "ArgMax": _extreme(torch.argmax),
    "ArgMin": _extreme(torch.argmin),
    "BatchNormalization": _batch_norm,
    "CumSum": _cumulated,
    "GlobalAveragePool": lambda call, x: x.mean(list(range(2, x.dim())), keepdim=True),
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
    "com.microsoft::SkipLayerNormalization": _skip_norm,
    "com.microsoft::SkipSimplifiedLayerNormalization": _skip_norm,
    # products
    "AveragePool": _pooled(_AVERAGES),
    "Conv": _conv,
    "ConvTranspose": _conv_transposed,
    "DequantizeLinear": _dequantised,
    "Einsum": _einsum,
    "Gemm": _gemm,
    "MatMul": _product_of,
    "MaxPool": _pooled(_MAXIMA),
    "com.microsoft::FusedMatMul": _fused_product,
    # attention
    "Attention": _attention,
    "RotaryEmbedding": _rotary,
    "com.microsoft::Attention": _packed_attention,
    "com.microsoft::MultiHeadAttention": _multi_head,
    # what patterns make
    "trtconvert::as_added": _as_added,
    "trtconvert::attention": _attended,
    "trtconvert::group_norm": _group_norm,
    "trtconvert::join_heads": lambda call, x: x.flatten(0, 1),
    "trtconvert::linear": _linear,
    "trtconvert::split_heads": _split_mask,
}
"""By operator. What is constant in any graph (Constant) is no step."""
