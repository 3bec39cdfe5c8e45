"""ONNX files: one file where protobuf's limit of 2 GiB allows, else one for the graph and one for the weights beside it."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir

INLINE_LIMIT = 1_500_000_000
"""Bytes of weights up to which they are kept inside the ONNX file; the graph itself needs room below 2 GiB as well."""

SMALL = 1024
"""Bytes up to which a tensor stays in the graph whatever the others weigh: parsers want shapes and scales there."""


def save(model: ir.Model, path: Path) -> None:
    """Write a model. Weights over `INLINE_LIMIT` go to the file `weights_file(path)`.

    Weights that a model loaded from the same folder keeps in such a file already stay there, and are shared.
    """
    tensors = [value.const_value for graph in model.graphs() for value in graph.initializers.values()]
    inline = sum(
        tensor.nbytes for tensor in tensors if tensor is not None and not isinstance(tensor, ir.ExternalTensor)
    )
    if inline > INLINE_LIMIT:
        ir.save(model, path, external_data=weights_file(path).name, size_threshold_bytes=SMALL)
    else:
        ir.save(model, path)


def weights_file(path: Path) -> Path:
    """Where the weights of a large model lie."""
    return path.with_name(path.name + ".data")
