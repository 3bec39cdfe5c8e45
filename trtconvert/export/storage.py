"""ONNX files: one file for small models, else one for the graph and one for the weights beside it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import onnx_ir as ir

from trtconvert.errors import UserError
from trtconvert.files import free_space, is_disk_full, temporary_folder

INLINE_LIMIT = 500_000_000
"""Bytes of weights up to which they are kept inside the ONNX file. Protobuf takes 2 GiB, but copies all of it at every step from
and to the file: 1.3 GB were written in 20 s, beside the file in 6."""

SMALL = 1024
"""Bytes up to which a tensor stays in the graph whatever the others weigh: parsers want shapes and scales there."""

ROOT = Path("/")
"""What the files of a model that is built are named from."""

_PAGE = 4096
"""Bytes."""


def save(model: ir.Model, path: Path) -> None:
    """Write a model. Weights over `INLINE_LIMIT` go to the file `weights_file(path)`.

    Weights that a model loaded from the same folder keeps in such a file already stay there, and are shared.
    """
    weights = _weights(model)
    if _bytes(_in_memory(weights)) > INLINE_LIMIT:
        try:
            for value, tensor in weights:
                value.const_value = _row_by_row(tensor)
            ir.save(model, path, external_data=weights_file(path).name, size_threshold_bytes=SMALL)
        finally:
            for value, tensor in weights:
                value.const_value = tensor
    else:
        ir.save(model, path)


def load(path: Path) -> ir.Model:
    """Read a model that is to be built; weights beside it are read when they are used.

    They are named by their absolute paths, also in what would be saved. `ir.load` keeps the model's own names, but then refuses
    to read files that have a second name (hard links), as those of a bundle have while it is compiled.

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
                    remedy="copy or build the bundle again",
                )
            value.const_value = _moved(tensor, folder / location)
    return model


@contextmanager
def for_parser(model: ir.Model) -> Iterator[bytes]:
    """A model, serialized for a parser that takes `ROOT` for its folder.

    Protobuf takes 2 GiB. Where a model keeps weights in files, or holds more than `INLINE_LIMIT`, those in memory that are larger
    than `SMALL`, which lowerings have joined, go to a file too, computed one at a time, in a temporary folder that is there until
    the block ends. TensorRT's parser looks for all files below one folder and refuses "..", and nothing is to be written to the
    model's own: so files are named from the root of the file system, which is above both.

    Raises:
        UserError: the disk of the temporary folder is full.
    """
    model = model.clone()  # has values of its own, and the same tensors
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
    """Tensors in a new file, each from the beginning of a page, for parsers that map files."""
    try:
        return ir.external_data.convert_tensors_to_external(
            [_row_by_row(tensor) for tensor in tensors], folder, "joined.data", alignment=_PAGE, align_threshold=0
        )
    except OSError as error:
        if not is_disk_full(error):
            raise
        needed = sum(tensor.nbytes for tensor in tensors)
        raise UserError(
            f"the disk is full while weights that are joined for TensorRT are written to {folder.parent}",
            expected=f"{needed / 2**20:.0f} MiB of free space while an engine is built",
            got=f"{error.strerror or error}, {free_space(folder) / 2**20:.0f} MiB free",
            remedy="free some space there, or set TMPDIR to a folder on a disk that has it",
        ) from error


def _serialized(model: ir.Model) -> bytes:
    return ir.to_proto(model).SerializeToString()


_Weights = list[tuple[ir.Value, ir.TensorProtocol]]


def _weights(model: ir.Model) -> _Weights:
    """The initializers of all graphs of a model."""
    values = [value for graph in model.graphs() for value in graph.initializers.values()]
    return [(value, value.const_value) for value in values if value.const_value is not None]


def _in_memory(weights: _Weights) -> _Weights:
    """Those that are not in files, or are yet to be computed."""
    return [(value, tensor) for value, tensor in weights if not isinstance(tensor, ir.ExternalTensor)]


def _bytes(weights: _Weights) -> int:
    return sum(tensor.nbytes for _, tensor in weights)


def _moved(tensor: ir.ExternalTensor, location: Path) -> ir.ExternalTensor:
    """A tensor whose file has another name, with no base: that is for what reads it to know."""
    return ir.ExternalTensor(
        str(location), tensor.offset, tensor.length, tensor.dtype, shape=tensor.shape, name=tensor.name
    )


def _row_by_row(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
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
