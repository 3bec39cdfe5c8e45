"""ONNX files: one file for small models, else a second one for the weights."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypedDict

import numpy as np
import onnx_ir as ir

from trtconvert.errors import UserError
from trtconvert.files import free_space, is_disk_full, temporary_folder, threads

INLINE_LIMIT = 500_000_000
"""Bytes of weights kept inside the ONNX file. Protobuf allows 2 GiB, but is slow: it copies everything several times."""

SMALL = 1024
"""Tensors of at most this many bytes always stay in the graph: parsers need shapes and scales there."""

ROOT = Path("/")
"""Base of the names of external files for parsers."""

_PAGE = 4096
"""Bytes."""

_BLOCK = 256
"""Rows and columns of a block."""

_BYTES_AT_ONCE = 2**30
"""Size of the weights that are computed at the same time."""


def save(model: ir.Model, path: Path) -> None:
    """Writes a model. Weights over `INLINE_LIMIT` go to the file `weights_file(path)`.

    External weights of a model from the same folder stay in their file. Those from other folders are copied.
    """
    weights, folder = _weights(model), path.parent.resolve()
    elsewhere = [(value, tensor) for value, tensor in weights if _lies_outside(tensor, folder)]
    beside = _bytes(_in_memory(weights)) + _bytes(elsewhere) > INLINE_LIMIT
    try:
        if beside:
            for value, tensor in weights:
                value.const_value = _row_by_row(tensor)
            name = weights_file(path).name
            ir.save(model, path, external_data=name, size_threshold_bytes=SMALL, **_at_once())
        else:
            read = ir.external_data.convert_tensors_from_external([tensor for _, tensor in elsewhere])
            for (value, _), tensor in zip(elsewhere, read, strict=True):
                value.const_value = tensor
            ir.save(model, path)
    finally:
        for value, tensor in weights:
            value.const_value = tensor


def load(path: Path) -> ir.Model:
    """Reads a model for a build. External weights are read on use.

    External files get absolute names. `ir.load` keeps relative names, but refuses files with hard links, which bundles have while
    they are compiled.

    Raises:
        UserError: a weight lies outside the model's folder.
    """
    model, folder = ir.load(path), path.parent.resolve()
    for value, tensor in _weights(model):
        if isinstance(tensor, ir.ExternalTensor):
            location = os.path.normpath(tensor.location)
            if os.path.isabs(location) or location.split(os.sep)[0] == os.pardir:
                raise UserError(
                    f"{path}: weight '{tensor.name}' lies outside the model's folder",
                    expected=f"a file in {folder}",
                    got=str(tensor.location),
                    remedy="copy the bundle again, or build it again",
                )
            value.const_value = _moved(tensor, folder / location)
    return model


@contextmanager
def for_parser(model: ir.Model) -> Iterator[bytes]:
    """Serializes a model for a parser with the base folder `ROOT`.

    Models with external weights, or with more than `INLINE_LIMIT` in memory, get a second file in a temporary folder for the
    weights in memory over `SMALL`, which are computed one at a time. TensorRT's parser wants all files below one folder and
    refuses "..": files are named from the root of the file system.

    Raises:
        UserError: the disk of the temporary folder is full.
    """
    model = model.clone()  # shares the tensors
    weights = _weights(model)
    in_memory = _in_memory(weights)
    if len(in_memory) == len(weights) and _bytes(in_memory) <= INLINE_LIMIT:
        yield _serialized(model)
        return
    with temporary_folder() as folder:
        large = [(value, tensor) for value, tensor in in_memory if tensor.nbytes > SMALL]
        written = _written([tensor for _, tensor in large], folder)
        for (value, _), tensor in zip(large, written, strict=True):
            value.const_value = tensor
        for value, tensor in _weights(model):
            if isinstance(tensor, ir.ExternalTensor):
                value.const_value = _moved(tensor, Path(tensor.path).resolve().relative_to(ROOT))
        yield _serialized(model)


def _written(tensors: Sequence[ir.TensorProtocol], folder: Path) -> list[ir.ExternalTensor]:
    """Writes tensors to a new file, aligned to pages for parsers that map files."""
    try:
        return ir.external_data.convert_tensors_to_external(
            [_row_by_row(tensor) for tensor in tensors],
            folder,
            "joined.data",
            alignment=_PAGE,
            align_threshold=0,
            **_at_once(),
        )
    except OSError as error:
        if not is_disk_full(error):
            raise
        needed = sum(tensor.nbytes for tensor in tensors)
        raise UserError(
            f"the disk is full while weights for TensorRT are written to {folder.parent}",
            expected=f"{needed / 2**20:.0f} MiB of free space while an engine is built",
            got=f"{error.strerror or error}, {free_space(folder) / 2**20:.0f} MiB free",
            remedy="free some space there, or set TMPDIR to a folder on a larger disk",
        ) from error


def _serialized(model: ir.Model) -> bytes:
    return ir.to_proto(model).SerializeToString()


_Weights = list[tuple[ir.Value, ir.TensorProtocol]]


def _weights(model: ir.Model) -> _Weights:
    """Returns the initializers of all graphs of a model."""
    values = [value for graph in model.graphs() for value in graph.initializers.values()]
    return [(value, value.const_value) for value in values if value.const_value is not None]


def _in_memory(weights: _Weights) -> _Weights:
    return [(value, tensor) for value, tensor in weights if not isinstance(tensor, ir.ExternalTensor)]


def _lies_outside(tensor: ir.TensorProtocol, folder: Path) -> bool:
    return isinstance(tensor, ir.ExternalTensor) and Path(tensor.path).resolve().parent != folder


def _bytes(weights: _Weights) -> int:
    return sum(tensor.nbytes for _, tensor in weights)


def _moved(tensor: ir.ExternalTensor, location: Path) -> ir.ExternalTensor:
    """Returns a tensor with another file name, without a base folder."""
    return ir.ExternalTensor(
        str(location), tensor.offset, tensor.length, tensor.dtype, shape=tensor.shape, name=tensor.name
    )


def _row_by_row(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
    """Returns a weight for fast writing. Views, such as folded transposes, are copied lazily: numpy would write single
    elements."""
    if not isinstance(tensor, ir.Tensor) or not isinstance(tensor.raw, np.ndarray) or tensor.raw.flags.c_contiguous:
        return tensor

    def copied() -> ir.Tensor:
        return ir.Tensor(row_major(tensor.raw), dtype=tensor.dtype)

    return ir.LazyTensor(copied, tensor.dtype, tensor.shape, name=tensor.name)


def numbers_of(tensor: ir.TensorProtocol) -> np.ndarray:
    """Returns a tensor's numbers. A file is mapped anew for each array, until the array is freed: threads share no mapping."""
    if isinstance(tensor, ir.ExternalTensor):
        tensor = _moved(tensor, Path(tensor.path))
    return tensor.numpy()


def blocks_of(matrix: np.ndarray) -> Iterator[tuple[slice, slice]]:
    """Yields the places of blocks that fit the processor's cache, where numpy reads rows and columns equally fast."""
    for row in range(0, matrix.shape[0], _BLOCK):
        for column in range(0, matrix.shape[1], _BLOCK):
            yield slice(row, row + _BLOCK), slice(column, column + _BLOCK)


def row_major(array: np.ndarray) -> np.ndarray:
    """Returns an array in C order; as `np.ascontiguousarray`, but several times as fast for transposed matrices."""
    if array.ndim != 2 or array.flags.c_contiguous:
        return np.ascontiguousarray(array)
    copy = np.empty(array.shape, array.dtype)
    for block in blocks_of(array):
        copy[block] = array[block]
    return copy


class _AtOnce(TypedDict):
    max_workers: int
    max_in_flight_bytes: int


def _at_once() -> _AtOnce:
    """Returns onnx_ir's limits of the weights that are computed and written at the same time."""
    return {"max_workers": threads(), "max_in_flight_bytes": _BYTES_AT_ONCE}


def weights_file(path: Path) -> Path:
    """Returns the file of the weights of a large model."""
    return path.with_name(path.name + ".data")
