"""ONNX's operators that change shapes and move values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from trtconvert.models.onnx.call import Call, Table, Value, in_narrowest_type
from trtconvert.models.onnx.sizes import Numbers, listed, numbers

_WIDE = 2**31 - 1
"""An end of a slice beyond this means "to the end"."""


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
    return torch.cat(in_narrowest_type([call.tensor(part) for part in parts]), call.get("axis"))


def _split(call: Call, x: Tensor, lengths: Value | None = None) -> Sequence[Tensor]:
    axis, parts = call.get("axis", 0), len(call.step.outputs)
    given = call.get("split") if lengths is None else call.sizes(lengths)
    if given is not None:
        return torch.split(x, given, axis)
    # Equal parts; the last is smaller if the axis is not divisible.
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


SHAPES: Table = {
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
}
