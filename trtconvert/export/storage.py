"""ONNX files: one file for small models, else one for the graph and one for the weights beside it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir

INLINE_LIMIT = 500_000_000
"""Bytes of weights up to which they are kept inside the ONNX file. Protobuf takes 2 GiB, but copies all of it at every step from
and to the file: 1.3 GB were written in 20 s, beside the file in 6."""

SMALL = 1024
"""Bytes up to which a tensor stays in the graph whatever the others weigh: parsers want shapes and scales there."""


def save(model: ir.Model, path: Path) -> None:
    """Write a model. Weights over `INLINE_LIMIT` go to the file `weights_file(path)`.

    Weights that a model loaded from the same folder keeps in such a file already stay there, and are shared.
    """
    values = [value for graph in model.graphs() for value in graph.initializers.values()]
    tensors = [value.const_value for value in values]
    inline = sum(
        tensor.nbytes for tensor in tensors if tensor is not None and not isinstance(tensor, ir.ExternalTensor)
    )
    if inline > INLINE_LIMIT:
        try:
            for value, tensor in zip(values, tensors, strict=True):
                value.const_value = _row_by_row(tensor)
            ir.save(model, path, external_data=weights_file(path).name, size_threshold_bytes=SMALL)
        finally:
            for value, tensor in zip(values, tensors, strict=True):
                value.const_value = tensor
    else:
        ir.save(model, path)


def _row_by_row(tensor: ir.TensorProtocol | None) -> ir.TensorProtocol | None:
    """A weight for writing. Folded transposes are views, which numpy writes element by element: they are copied when their turn
    comes, one at a time."""
    if not isinstance(tensor, ir.Tensor) or not isinstance(tensor.raw, np.ndarray) or tensor.raw.flags.c_contiguous:
        return tensor

    def copied() -> ir.Tensor:
        return ir.Tensor(np.ascontiguousarray(tensor.raw), dtype=tensor.dtype)

    return ir.LazyTensor(copied, tensor.dtype, tensor.shape, name=tensor.name)


def weights_file(path: Path) -> Path:
    """Where the weights of a large model lie."""
    return path.with_name(path.name + ".data")
