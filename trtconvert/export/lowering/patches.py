"""Patchify: computes patch embeddings as products.

Diffusion transformers compute Conv(x).flatten(2).transpose(1, 2) with a stride as large as the kernel. TensorRT copies the result
of the convolution twice. A product of patches gives tokens directly.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import onnx_ir as ir

from trtconvert.export.building import NewNodes, cleaned, graph_of, replace_nodes
from trtconvert.export.lowering.initializers import columns_of
from trtconvert.export.matching import is_read_once, perm_of, producer_of


@dataclass(frozen=True)
class _Embedding:
    """x [B, C, *sizes] as tokens [B, N, O].

    Attributes:
        weight: [O, C, *patch]; bias: [O]. Both are constants.
        patches: number of patches along each axis of `sizes`; patch: size of a patch.
        last: the node of the result.
    """

    x: ir.Value
    weight: ir.Value
    bias: ir.Value | None
    patches: tuple[int, ...]
    patch: tuple[int, ...]
    last: ir.Node


def multiply_patches(model: ir.Model) -> int:
    """Computes patch embeddings as products of patches [B, N, C·patch] with the convolution's weights, in place.

    Image sizes must be fixed multiples of the patch; the batch may be dynamic. Weights are renamed: not for refittable engines.

    Returns:
        The number of replaced convolutions.
    """
    embeddings = [found for node in model.graph if (found := _embedding(node)) is not None]
    for embedding in embeddings:
        _multiply(embedding)
    return cleaned(model, len(embeddings))


def _embedding(transpose: ir.Node) -> _Embedding | None:
    if transpose.op_type != "Transpose" or transpose.domain or perm_of(transpose) != [0, 2, 1]:
        return None
    flat = transpose.inputs[0]
    reshape = producer_of(flat, "Reshape")
    conv = producer_of(reshape.inputs[0], "Conv") if reshape is not None else None
    if conv is None or flat is None or not is_read_once(flat) or not is_read_once(conv.outputs[0]):
        return None
    x, weight, *bias = conv.inputs
    tensor = weight.const_value if weight is not None else None
    if x is None or x.shape is None or flat.shape is None or weight is None or tensor is None:
        return None
    if bias and (bias[0] is None or bias[0].const_value is None):
        return None
    sizes = tuple(size for size in x.shape[2:] if isinstance(size, int))
    channels, patch = tensor.shape[1], tuple(int(size) for size in tensor.shape[2:])  # type: ignore[arg-type]
    if len(sizes) != len(patch) or x.shape[1] != channels or not is_of_patches(conv, patch):
        return None
    patches = tuple(size // of_patch for size, of_patch in zip(sizes, patch, strict=True))
    if any(size % of_patch for size, of_patch in zip(sizes, patch, strict=True)):
        return None
    # The Reshape must flatten exactly the positions of [B, O, *patches].
    if len(flat.shape) != 3 or list(flat.shape[1:]) != [tensor.shape[0], math.prod(patches)]:
        return None
    return _Embedding(x, weight, bias[0] if bias else None, patches, patch, transpose)


def is_of_patches(conv: ir.Node, patch: tuple[int, ...]) -> bool:
    """Return whether the windows of a convolution tile its input."""
    attributes = conv.attributes
    expected = {"strides": patch, "dilations": (1,) * len(patch), "pads": (0, 0) * len(patch)}
    given = {name: tuple(attributes[name].as_ints()) for name in expected if name in attributes}
    defaults = {"strides": (1,) * len(patch)}
    return (
        attributes.get_int("group", 1) == 1
        and attributes.get_string("auto_pad", "NOTSET") in ("NOTSET", "VALID")
        and expected | defaults | given == expected
    )


def _multiply(embedding: _Embedding) -> None:
    x, tokens = embedding.x, embedding.last.outputs[0]
    assert x.shape is not None and tokens.shape is not None
    batch, channels, rank = x.shape[0], x.shape[1], len(embedding.patch)
    assert isinstance(channels, int)
    # [B, C, n0, p0, n1, p1, …] to [B, n0, n1, …, C, p0, p1, …]
    apart = [channels, *(size for pair in zip(embedding.patches, embedding.patch, strict=True) for size in pair)]
    perm = [0, *range(2, 2 + 2 * rank, 2), 1, *range(3, 3 + 2 * rank, 2)]
    rows = [math.prod(embedding.patches), channels * math.prod(embedding.patch)]
    new, sizes = NewNodes(), [batch, *apart]
    pixels = new.reshaped(x, [0, *apart], sizes)
    turned = new.add("Transpose", [pixels], x, [sizes[axis] for axis in perm], {"perm": perm})
    weight = columns_of(graph_of(embedding.last), embedding.weight)
    product = new.add("MatMul", [new.reshaped(turned, [0, *rows], [batch, *rows]), weight], x, tokens.shape)
    if embedding.bias is not None:
        new.add("Add", [product, embedding.bias], x, tokens.shape)
    replace_nodes([embedding.last], new.nodes)
