"""Fuses group norms of images, patchify and unpatchify into plugins that keep channels last.

TensorRT convolves images with channels last, but its group norms, SiLU and transposes have channels first: the copies between the
layouts take more time than the norms. The plugin norms images in place of the layout, with the SiLU behind it and the timestep's
shift of channels in front. Tokens that follow need no transpose, and a convolution of single pixels becomes a product of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from trtconvert.c_structs import GROUP_NORM_MOST_CHANNELS
from trtconvert.export.building import NewNodes, Shape, cleaned, graph_of, replace_nodes
from trtconvert.export.lowering.initializers import changed_initializer, columns_of
from trtconvert.export.lowering.patches import is_of_patches
from trtconvert.export.matching import constant_of, is_read_once, is_same_shape, only_reader, perm_of, producer_of
from trtconvert.export.nodes.common import DOMAIN, HALF, PLUGIN
from trtconvert.export.nodes.layers import CONV

GROUP_NORM = "GroupNorm"
"""Operator of the plugin: x [B, C, H, W], weight, bias [C], optional shift [B, C] → the group norm of x + shift, rounded before,
in `groups` of neighbouring channels; with `silu` its SiLU. [B, H, W, C] with `channels_last`, else as x."""
CHANNELS_LAST_ADD = "ChannelsLastAdd"
"""Operator of the plugin: x [B, C, H, W], y [B, H, W, C] → the sum in the layout of x."""

_VECTOR = 8  # channels per vector of the kernels
_CHANNELS_LAST, _CHANNELS_FIRST = [0, 2, 3, 1], [0, 3, 1, 2]


@dataclass(frozen=True)
class _GroupNorm:
    """norm(x + shift), or the SiLU of it.

    Attributes:
        x: [B, C, H, W]; shift: [B, C].
        weight, bias: [C, 1, 1], constants of x's type.
        last: the node of the result.
    """

    x: ir.Value
    shift: ir.Value | None
    weight: ir.Value
    bias: ir.Value
    epsilon: float
    groups: int
    silu: bool
    last: ir.Node

    @property
    def result(self) -> ir.Value:
        return self.last.outputs[0]


@dataclass(frozen=True)
class _Entry:
    """Patchify: image [B, C, H, W] to tokens [B, H·W, O]. O is C without the convolution of single pixels."""

    conv: ir.Node | None
    transpose: ir.Node
    reshape: ir.Node


@dataclass(frozen=True)
class _Exit:
    """Unpatchify: x [B, O, H, W] plus tokens [B, H·W, C] as an image. O is C without the convolution of single pixels."""

    x: ir.Value
    reshape: ir.Node
    transpose: ir.Node
    conv: ir.Node | None
    add: ir.Node


def has_group_norms(model: ir.Model) -> bool:
    """Return whether `fuse_group_norms` would match."""
    return any(_taken(node) is not None for node in model.graph)


def fuse_group_norms(model: ir.Model) -> int:
    """Replaces group norms beside convolutions by `GroupNorm`, in place, and sums of images and tokens by `ChannelsLastAdd`.

    A norm takes the SiLU behind it, and the shift [B, C] in front. If patchify follows, the norm writes channels last, and a
    convolution of single pixels becomes a product of tokens; so does the one of unpatchify.

    Changes only 16-bit images that convolutions write or read, of supported numbers of channels: elsewhere TensorRT copies
    nothing and fuses itself. Weights are renamed: not for refittable engines. Runs before `fuse_residual_norms` and
    `fuse_linear_layers`.

    Returns:
        The number of new nodes. Without a matching norm nothing is changed.
    """
    norms = sum(_fuse_norm(node) for node in list(model.graph))
    if not norms:
        return 0
    sums = sum(_fuse_sum(node) for node in list(model.graph))  # one by one: sums may be nested
    return cleaned(model, norms + sums)


def _taken(candidate: ir.Node) -> tuple[_GroupNorm, _Entry | None] | None:
    """Matches the norm around an InstanceNormalization, and its patchify."""
    norm = _group_norm(candidate)
    if norm is None:
        return None
    entry = _entry(norm)
    return (norm, entry) if entry is not None or _is_beside_convolution(norm) else None


def _fuse_norm(candidate: ir.Node) -> bool:
    found = _taken(candidate)
    if found is None:
        return False
    norm, entry = found
    x, shape = norm.x, norm.x.shape
    assert shape is not None
    if entry is not None:
        shape = [shape[axis] for axis in _CHANNELS_LAST]
    attributes = {
        "epsilon": norm.epsilon, "groups": norm.groups, "silu": int(norm.silu), "channels_last": int(entry is not None),
    }  # fmt: skip
    inputs = [x, _vector(norm.last, norm.weight), _vector(norm.last, norm.bias)]
    if norm.shift is not None:
        inputs.append(norm.shift)
    new = NewNodes()
    normed = new.add(GROUP_NORM, inputs, x, shape, attributes | PLUGIN, domain=DOMAIN)
    last = norm.last
    if entry is not None and entry.conv is None:
        last = entry.transpose
    elif entry is not None and entry.conv is not None:
        last, tokens = entry.reshape, entry.reshape.outputs[0].shape
        assert tokens is not None
        _product(new, _reshaped(new, normed, [*tokens[:2], shape[3]]), entry.conv, tokens)
    replace_nodes([last], new.nodes)
    return True


def _fuse_sum(candidate: ir.Node) -> bool:
    found = _exit(candidate)
    if found is None:
        return False
    x, tokens, image = found.x, found.reshape.inputs[0], found.reshape.outputs[0]
    assert x.shape is not None and tokens is not None and tokens.shape is not None
    new = NewNodes()
    if found.conv is not None:
        product = _product(new, tokens, found.conv, [*tokens.shape[:2], x.shape[1]])
        shape = [x.shape[axis] for axis in _CHANNELS_LAST]
        if _are_known(shape[1:]):
            image = _reshaped(new, product, shape)
        else:
            image = new.add("Reshape", [product, found.reshape.inputs[1]], x, shape, found.reshape.attributes)
    new.add(CHANNELS_LAST_ADD, [x, image], x, attributes=PLUGIN, domain=DOMAIN)
    replace_nodes([found.add], new.nodes)
    return True


# Matching -------------------------------------------------------------------------------------------------------------------


def _group_norm(norm: ir.Node) -> _GroupNorm | None:
    """Matches the exporter's group norm: an InstanceNormalization of the elements of each group."""
    if norm.op_type != "InstanceNormalization" or norm.domain:
        return None
    flat, scale, offset = norm.inputs
    reshape = producer_of(flat, "Reshape")
    back = only_reader(norm.outputs[0], "Reshape")
    scaled = _only_reader_but_casts(back.outputs[0], "Mul") if back is not None else None
    added = _only_reader_but_casts(scaled.outputs[0], "Add") if scaled is not None else None
    if flat is None or reshape is None or back is None or scaled is None or added is None or not is_read_once(flat):
        return None
    x, normed = reshape.inputs[0], added.outputs[0]
    channels = _channels(x)
    # The result has the elements of x, so the value before the weight has x's shape too.
    if x is None or channels is None or not is_same_shape(normed.shape, x.shape):
        return None
    groups = _groups(flat, x)
    if groups is None or channels % groups or not _is_all(scale, 1) or not _is_all(offset, 0):
        return None
    weight, bias = _of_channels(scaled, back.outputs[0], x), _of_channels(added, scaled.outputs[0], x)
    if weight is None or bias is None:
        return None
    epsilon, silu = norm.attributes.get_float("epsilon", 1e-5), _silu(normed)
    source, shift = _shift(x, reshape, back) or (x, None)
    return _GroupNorm(source, shift, weight, bias, epsilon, groups, silu is not None, silu or added)


def _only_reader_but_casts(value: ir.Value, op_type: str) -> ir.Node | None:
    """Like `only_reader`, but ignores CastLike to the value's type, as of BF16 weights."""
    readers = [reader for reader, index in value.uses() if (reader.op_type, index) != ("CastLike", 1)]
    if len(readers) != 1 or value.is_graph_output():
        return None
    return readers[0] if readers[0].op_type == op_type and not readers[0].domain else None


def _channels(image: ir.Value | None) -> int | None:
    """Returns the channels of an image [B, C, H, W] that the kernels support, else None."""
    if image is None or image.dtype not in HALF or image.shape is None or len(image.shape) != 4:
        return None
    channels = image.shape[1]
    if not isinstance(channels, int) or channels % _VECTOR or channels > GROUP_NORM_MOST_CHANNELS:
        return None
    return channels


def _groups(flat: ir.Value, x: ir.Value) -> int | None:
    """Returns G if a value is an image as [B, G, n]."""
    assert x.shape is not None
    if flat.shape is None or len(flat.shape) != 3 or not is_same_shape(flat.shape[:1], x.shape[:1]):
        return None
    groups = flat.shape[1]
    return groups if isinstance(groups, int) else None


def _is_all(value: ir.Value | None, number: float) -> bool:
    """Return whether all elements of a constant are a number."""
    elements = constant_of(value)
    return elements is not None and bool((elements == number).all())


def _of_channels(node: ir.Node, value: ir.Value, x: ir.Value) -> ir.Value | None:
    """Returns the other operand of a node if it is a constant [C, 1, 1] of the image's type."""
    (other,) = (operand for operand in node.inputs if operand is not value)
    cast = producer_of(other, "CastLike")
    constant = other if cast is None else cast.inputs[0]
    assert x.shape is not None
    if constant is None or constant.const_value is None or constant.dtype != x.dtype:
        return None
    return constant if list(constant.const_value.shape) == [x.shape[1], 1, 1] else None


def _silu(value: ir.Value) -> ir.Node | None:
    """Returns the Mul of value · sigmoid(value) if nothing else reads the value."""
    readers = {reader for reader, _ in value.uses()}
    sigmoid = next((reader for reader in readers if reader.op_type == "Sigmoid" and not reader.domain), None)
    product = only_reader(sigmoid.outputs[0], "Mul") if sigmoid is not None else None
    return product if readers == {sigmoid, product} and not value.is_graph_output() else None


def _shift(x: ir.Value, reshape: ir.Node, back: ir.Node) -> tuple[ir.Value, ir.Value] | None:
    """Returns the image and the vector [B, C] of a sum that only the norm reads."""
    add, sizes = producer_of(x, "Add"), back.inputs[1]
    norm = {reshape}
    if sizes is not None and is_read_once(sizes) and (shape := producer_of(sizes, "Shape")) is not None:
        norm.add(shape)  # dynamic sizes
    if add is None or x.shape is None or x.is_graph_output() or not {reader for reader, _ in x.uses()} <= norm:
        return None
    for image, spread in (add.inputs, add.inputs[::-1]):
        view = producer_of(spread, "Unsqueeze") or producer_of(spread, "Reshape")
        shift = view.inputs[0] if view is not None else None
        if image is None or spread is None or shift is None or not is_same_shape(image.shape, x.shape):
            continue
        if is_same_shape(spread.shape, [*x.shape[:2], 1, 1]) and is_same_shape(shift.shape, x.shape[:2]):
            return image, shift
    return None


def _is_beside_convolution(norm: _GroupNorm) -> bool:
    return _is_of_convolution(norm.x) or any(_is_before_convolution(reader) for reader, _ in norm.result.uses())


def _is_before_convolution(reader: ir.Node) -> bool:
    """Return whether a node is a convolution, or the factor in front of an INT8 one."""
    if reader.op_type == "Mul" and not reader.domain and constant_of(reader.inputs[1]) is not None:
        return any(_is_convolution(further) for further, _ in reader.outputs[0].uses())
    return _is_convolution(reader)


def _is_of_convolution(value: ir.Value) -> bool:
    """Return whether a convolution computes a value or a part of a sum or Concat."""
    pending, seen = [value], set[ir.Node]()
    while pending:
        producer = pending.pop().producer()
        if producer is None or producer in seen:
            continue
        seen.add(producer)
        if _is_convolution(producer):
            return True
        if (producer.domain, producer.op_type) in (("", "Add"), ("", "Concat"), (DOMAIN, CHANNELS_LAST_ADD)):
            pending += [source for source in producer.inputs if source is not None]
    return False


def _is_convolution(node: ir.Node) -> bool:
    """Return whether a node is a convolution, or our layer that becomes one."""
    return (node.domain, node.op_type) in (("", "Conv"), (DOMAIN, CONV))


def _entry(norm: _GroupNorm) -> _Entry | None:
    """Matches the patchify of a norm's result."""
    conv = only_reader(norm.result, "Conv")
    if norm.silu or (conv is not None and not _is_of_pixels(conv)):
        return None
    transpose = only_reader(norm.result if conv is None else conv.outputs[0], "Transpose")
    reshape = only_reader(transpose.outputs[0], "Reshape") if transpose is not None else None
    if transpose is None or reshape is None or perm_of(transpose) != _CHANNELS_LAST:
        return None
    are_tokens = _are_tokens(reshape.outputs[0], transpose.outputs[0])
    return _Entry(conv, transpose, reshape) if are_tokens else None


def _exit(add: ir.Node) -> _Exit | None:
    if add.op_type != "Add" or add.domain:
        return None
    for x, image in (add.inputs, add.inputs[::-1]):
        conv = producer_of(image, "Conv")
        first = image if conv is None else conv.inputs[0]
        transpose = producer_of(first, "Transpose")
        reshape = producer_of(transpose.inputs[0], "Reshape") if transpose is not None else None
        if x is None or image is None or first is None or transpose is None or reshape is None:
            continue
        found = _Exit(x, reshape, transpose, conv, add)
        if is_read_once(image) and is_read_once(first) and _is_sum_of_tokens(found) and _is_of_convolution(x):
            return found
    return None


def _is_sum_of_tokens(found: _Exit) -> bool:
    """Return whether the shapes are as in `_Exit`, and the plugin supports them."""
    x, tokens, image = found.x.shape, found.reshape.inputs[0], found.reshape.outputs[0]
    if x is None or _channels(found.x) is None or not is_same_shape(x, found.add.outputs[0].shape):
        return False
    if tokens is None or not _are_tokens(tokens, image) or perm_of(found.transpose) != _CHANNELS_FIRST:
        return False
    assert image.shape is not None
    if not is_same_shape(image.shape[:3], [x[0], *x[2:]]):
        return False
    if found.conv is None:
        return image.shape[3] == x[1]
    if not _is_of_pixels(found.conv) or not is_same_shape(found.conv.outputs[0].shape, x):
        return False
    # The Reshape is reused for equal channels; else all sizes must be known.
    return image.shape[3] == x[1] or _are_known(x[2:])


def _are_known(sizes: Shape) -> bool:
    return all(isinstance(size, int) for size in sizes)


def _are_tokens(tokens: ir.Value, image: ir.Value) -> bool:
    """Return whether tokens [B, H·W, C] are the pixels of an image [B, H, W, C] of as many elements."""
    few, many = tokens.shape, image.shape
    if few is None or many is None or len(few) != 3 or len(many) != 4:
        return False
    return is_same_shape(few[:1], many[:1]) and isinstance(few[2], int) and few[2] == many[3]


def _is_of_pixels(conv: ir.Node) -> bool:
    """Return whether a convolution has a 1 × 1 kernel and constant weights."""
    weights = [value.const_value if value is not None else None for value in conv.inputs[1:]]
    if any(weight is None for weight in weights):
        return False
    assert weights[0] is not None
    return list(weights[0].shape[2:]) == [1, 1] and is_of_patches(conv, (1, 1))


# Replacement ----------------------------------------------------------------------------------------------------------------


def _vector(node: ir.Node, constant: ir.Value) -> ir.Value:
    """Returns a constant [C, 1, 1] as [C]."""
    assert constant.const_value is not None
    return changed_initializer(graph_of(node), constant, "flat", (constant.const_value.size,), np.ravel)


def _product(new: NewNodes, tokens: ir.Value, conv: ir.Node, shape: Shape) -> ir.Value:
    """Computes a 1 × 1 convolution as a product of tokens [B, N, C] → [B, N, O]."""
    weight, *bias = conv.inputs[1:]
    assert weight is not None
    product = new.add("MatMul", [tokens, columns_of(graph_of(conv), weight)], tokens, shape)
    return new.add("Add", [product, *bias], tokens, shape) if bias else product


def _reshaped(new: NewNodes, value: ir.Value, shape: Shape) -> ir.Value:
    """Reshapes a value [B, …]. One size besides the batch may be dynamic."""
    return new.reshaped(value, [0, *(size if isinstance(size, int) else -1 for size in shape[1:])], shape)
