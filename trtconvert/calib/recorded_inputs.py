"""Recorded denoiser inputs: one array per input, samples first, read a batch at a time. Inputs that belong to no sample, such as
the positions of tokens, are stored once, without a dimension of samples.

.safetensors, .pt and uncompressed .npz are memory-mapped. No pickled code is executed.
"""

from __future__ import annotations

import math
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Protocol

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from trtconvert.diffusion_model import DiffusionModel, InputSpec
from trtconvert.documents import require_plain_types, safetensors_header
from trtconvert.errors import UserError, first_line
from trtconvert.files import open_regular

_DTYPES = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
)
"""Types that can be compared and converted. A conversion of complex numbers would silently drop a half."""


class RowReader(Protocol):
    """An array on disk; shape: samples first, () for a number that belongs to no sample, which counts as row 0."""

    shape: tuple[int, ...]

    def rows(self, start: int, stop: int) -> Tensor:
        """Returns samples [start, stop)."""
        ...


class _Tensor:
    """Rows of a tensor, which may be memory-mapped."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self.shape = tensor, tuple(tensor.shape)

    def rows(self, start: int, stop: int) -> Tensor:
        return self._tensor[start:stop].clone() if self.shape else self._tensor.clone()


class _Safetensor:
    """Rows of one tensor of a safetensors file."""

    def __init__(self, path: Path, name: str) -> None:
        self._path, self._name = path, name
        header = safetensors_header(path)
        require_plain_types(header, {name})
        self.shape = tuple(header[name]["shape"])

    def rows(self, start: int, stop: int) -> Tensor:
        with safe_open(self._path, framework="pt") as file:
            return file.get_slice(self._name)[start:stop] if self.shape else file.get_tensor(self._name)


class _ZippedNpy:
    """Rows of one compressed array of an .npz file; earlier rows are decompressed and dropped."""

    def __init__(self, path: Path, member: str) -> None:
        self._path, self._member = path, member
        with zipfile.ZipFile(path) as archive, archive.open(member) as file:
            self.shape, fortran, self._dtype = _npy_header(file)
            self._data = file.tell()
        if fortran:
            raise ValueError(f"'{member}' is stored by columns; save np.ascontiguousarray of it")

    def rows(self, start: int, stop: int) -> Tensor:
        row = math.prod(self.shape[1:]) * self._dtype.itemsize
        shape = (min(stop, self.shape[0]) - start, *self.shape[1:]) if self.shape else ()
        with zipfile.ZipFile(self._path) as archive, archive.open(self._member) as file:
            file.seek(self._data + start * row)
            content = bytearray(file.read(math.prod(shape) * self._dtype.itemsize))
        return torch.from_numpy(np.frombuffer(content, self._dtype).reshape(shape))


def _npy_header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Returns the shape, whether the array is stored by columns, and the type; leaves the file at the first element."""
    version = np.lib.format.read_magic(file)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, fortran, dtype = read(file)
    if dtype.hasobject:
        raise ValueError("it holds Python objects, which are not supported")
    if torch.from_numpy(np.empty(0, dtype)).dtype not in _DTYPES:  # raises for types that torch lacks
        raise ValueError(f"an array of {dtype}, which is no supported type of real numbers")
    if any(size < 0 for size in shape):
        raise ValueError(f"an array of the shape {list(shape)}")
    return shape, fortran, dtype


def _npz(path: Path) -> dict[str, Callable[[], RowReader]]:
    with zipfile.ZipFile(path) as archive:
        return {info.filename.removesuffix(".npy"): partial(_npz_member, path, info) for info in archive.infolist()}


def _npz_member(path: Path, info: zipfile.ZipInfo) -> RowReader:
    if info.compress_type != zipfile.ZIP_STORED:
        return _ZippedNpy(path, info.filename)
    with zipfile.ZipFile(path) as archive, archive.open(info) as file:
        shape, fortran, dtype = _npy_header(file)
        header = file.tell()
    with path.open("rb") as raw:  # the local header gives the offset of the member's bytes (PKWARE APPNOTE 4.3.7)
        raw.seek(info.header_offset + 26)
        name_length, extra_length = np.frombuffer(raw.read(4), "<u2")
    offset = info.header_offset + 30 + int(name_length) + int(extra_length) + header
    if 0 in shape:
        return _Tensor(torch.from_numpy(np.empty(shape, dtype)))
    # "c": copy on write, as torch requires writable memory.
    mapped = np.memmap(path, dtype, "c", offset, shape, order="F" if fortran else "C")
    return _Tensor(torch.from_numpy(mapped))


def _safetensors(path: Path) -> dict[str, Callable[[], RowReader]]:
    header = safetensors_header(path)
    with safe_open(path, framework="pt"):  # checks the tensors' offsets
        pass
    return {name: partial(_Safetensor, path, name) for name in header if name != "__metadata__"}


def _pt(path: Path) -> dict[str, Callable[[], RowReader]]:
    loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    if not isinstance(loaded, Mapping) or not all(isinstance(x, Tensor) for x in loaded.values()):
        raise ValueError(f"it holds a {type(loaded).__name__} instead of a dictionary of tensors")
    if odd := [name for name in loaded if not isinstance(name, str)]:
        raise ValueError(f"it holds a tensor under {odd[0]!r}, which is no name")
    return {name: partial(_stored, x) for name, x in loaded.items()}


def refuse_no_numbers(tensor: Tensor) -> None:
    """Raises a ValueError if a tensor is no dense tensor of real numbers."""
    kinds = {
        "on the meta device, without data": tensor.is_meta,
        "quantised": tensor.is_quantized,
        "nested": tensor.is_nested,
        f"in the layout {tensor.layout}": tensor.layout != torch.strided,
        f"of {tensor.dtype}, which is no supported type of real numbers": tensor.dtype not in _DTYPES,
    }
    if found := [kind for kind, is_so in kinds.items() if is_so]:
        raise ValueError(f"a tensor that is {found[0]}; take .dequantize(), .to_dense() or .float() of it")


def _stored(tensor: Tensor) -> RowReader:
    """Opens a tensor of a .pt file, which may hold tensors of every kind."""
    refuse_no_numbers(tensor)
    return _Tensor(tensor.detach())


_OPEN = {".npz": _npz, ".safetensors": _safetensors, ".pt": _pt}
"""By suffix: functions that list the arrays of a file, each with a function that opens it."""


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Converts any error of the block to a UserError."""
    try:
        yield
    # Damaged files raise errors of zlib, the unpickler and others.
    except Exception as error:
        raise UserError(
            f"cannot read the calibration data {path}",
            expected="a .safetensors, .npz or .pt file of arrays, without pickled objects",
            got=first_line(error),
            remedy="save it again: safetensors.torch.save_file, numpy.savez, or torch.save of a dictionary of tensors",
        ) from error


def is_shared(model: DiffusionModel, spec: InputSpec) -> bool:
    """True if an input serves all samples of a call: its first dimension is not the dimension of samples."""
    return spec.name != model.timestep_input and spec.shape[:1] != model.inputs[0].shape[:1]


def open_inputs(model: DiffusionModel, path: Path) -> dict[str, RowReader]:
    """Opens the model's inputs in a file, and checks names, shapes and counts. Other arrays (`prev_x`, …) are ignored.

    Raises:
        UserError: the file cannot be read, or does not fit the model.
    """
    with _readable(path):
        open_regular(path).close()
        found = _OPEN[path.suffix](path)
    inputs: dict[str, RowReader] = {}
    sizes: dict[str, int] = {}
    for spec in model.inputs:
        if spec.name not in found:
            raise UserError(
                f"{path} has no '{spec.name}'",
                expected="arrays " + ", ".join(s.name for s in model.inputs),
                got=", ".join(sorted(found)) or "none",
                remedy="record every input of the denoiser; `trtconvert record` does",
            )
        with _readable(path):
            inputs[spec.name] = found[spec.name]()
        _refuse_shape(model, path, spec, inputs[spec.name].shape, sizes)
    return inputs


def _refuse_shape(
    model: DiffusionModel, path: Path, spec: InputSpec, shape: tuple[int, ...], sizes: dict[str, int]
) -> None:
    """Raises a UserError if the model does not take the shape. `sizes` receives the sizes of symbolic dimensions, which inputs
    share; the number of samples is free."""
    fits = len(shape) == len(spec.shape)
    first = 0 if is_shared(model, spec) else 1
    for wanted, size in zip(spec.shape[first:], shape[first:], strict=False):
        if isinstance(wanted, int):
            fits &= size == wanted
        else:
            low, _, high = model.dims[wanted]
            fits &= low <= size <= high and sizes.setdefault(wanted, size) == size
    if not fits:
        dims = [n for n in spec.shape[first:] if isinstance(n, str)]
        expected = [f"{n} {model.dims[n][0]} to {model.dims[n][2]}" for n in dims]
        raise UserError(
            f"'{spec.name}' in {path} has the wrong shape",
            expected=", ".join(["[" + ", ".join(map(str, spec.shape)) + "]", *expected]),
            got=str(list(shape)),
            remedy="record the inputs of this model, with equal sizes in all arrays",
        )


def whole(x: Tensor) -> Tensor:
    """True for elements that are whole numbers."""
    return x == x.round() if x.is_floating_point() else torch.ones_like(x, dtype=torch.bool)


def read_inputs(
    model: DiffusionModel, path: Path, inputs: Mapping[str, RowReader], samples: range
) -> tuple[dict[str, Tensor], list[UserError]]:
    """Reads a batch of the model's inputs, in the model's types.

    Returns:
        The inputs without damaged samples, and the errors of the damaged ones.
    Raises:
        UserError: an input that all samples share is damaged, or the file is.
    """
    shared = {spec.name for spec in model.inputs if is_shared(model, spec)}
    with _readable(path):
        read = {
            name: reader.rows(0, *(reader.shape[:1] or (1,)))
            if name in shared
            else reader.rows(samples.start, samples.stop)
            for name, reader in inputs.items()
        }
    batch = {spec.name: read[spec.name].to(getattr(torch, spec.dtype)) for spec in model.inputs}
    good = torch.ones(len(samples), dtype=torch.bool)
    errors = []
    for spec in model.inputs:
        name = spec.name
        # Integers are checked before the conversion, which hides fractions and NaN; FP32 after it, as large numbers become Inf.
        x = read[name] if spec.dtype == "int64" else batch[name]
        usable = whole(x) & x.isfinite() if spec.dtype == "int64" else x.isfinite()
        if name in shared:
            _refuse_damaged(path, name, x, usable)
            continue
        finite = usable.flatten(1).all(1) if x.dim() > 1 else usable
        if name == model.timestep_input:
            finite &= model.covers(batch[name])
        for row in (~finite & good).nonzero().flatten().tolist():
            bad = int((~x[row].isfinite()).sum())
            fits = model.covered if name == model.timestep_input else "whole numbers"
            errors.append(
                UserError(
                    f"'{name}' in {path} is damaged at sample {samples[row]}",
                    expected="finite numbers" if bad else fits,
                    got=f"{bad} of {x[row].numel()} are NaN or Inf" if bad else f"{x[row].flatten()[0].item():g}",
                    remedy="record the inputs again, or leave bad samples out with --skip-bad",
                )
            )
        good &= finite
    return {name: x if name in shared else x[good] for name, x in batch.items()}, errors


def _refuse_damaged(path: Path, name: str, x: Tensor, usable: Tensor) -> None:
    if not usable.all():
        raise UserError(
            f"'{name}' in {path} is damaged",
            expected="finite numbers, and whole numbers for integer inputs",
            got=f"{int((~usable).sum())} of {x.numel()} are damaged",
            remedy="record the inputs again",
        )
