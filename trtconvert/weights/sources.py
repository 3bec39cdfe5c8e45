"""Models on the disk, for commands that go through all of their tensors: a file, a folder of shards, or a pipeline.

Names and headers are checked when a source is opened; tensors are read one by one.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from trtconvert.documents import PIPELINE_INDEX, read_json, text_flaw
from trtconvert.errors import UserError, several
from trtconvert.files import open_regular
from trtconvert.weights.tensor_files import TYPES, read_entries, read_entry
from trtconvert.weights.weight_files import (
    GGUF,
    READABLE,
    SAFETENSORS,
    TORCH,
    damaged,
    dequantised,
    gguf_tensors,
    is_mark,
    layer_of,
    read_torch,
    refuse_missing_scales,
    refuse_other_formats,
    refuse_pointer,
    stored_weights,
    unknown_kind,
)

METADATA = "trtconvert"
"""Key in the metadata of safetensors files that `trtconvert quantize` wrote: how each weight in them is stored."""

_INDEX = re.compile(r".+\.(safetensors|bin)\.index(\.[\w-]+)?\.json")
_SHARD = re.compile(r"-\d{5}-of-(\d{5})$")
_SAMPLES, _SAMPLE = 256, 4096  # pieces of a file that its fingerprint reads, and the bytes of one


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a model.

    Attributes:
        name: in its part; part: folder of the pipeline, empty elsewhere.
        shape: of the tensor; nbytes: in the file, with its scales.
        dtype: in the file; FP32 for GGUF, which has types of its own.
        read: gives the tensor in memory of its own, as FP32 where it was stored with scales.
    """

    name: str
    part: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int
    read: Callable[[], Tensor]

    @property
    def path(self) -> str:
        """The name in the whole model."""
        return f"{self.part}/{self.name}" if self.part else self.name


@dataclass(frozen=True)
class Part:
    """The files of one model: a whole source, or a part of a pipeline.

    Attributes:
        folder: relative to the pipeline, empty elsewhere.
        files: of weights; indexes: that name them; others: files beside them that hold the same weights in other variants.
        tensors: in the files' order.
        metadata: of each safetensors file.
    """

    folder: str
    files: tuple[Path, ...]
    indexes: tuple[Path, ...]
    others: tuple[Path, ...]
    tensors: tuple[StoredTensor, ...]
    metadata: dict[Path, dict[str, str]]

    def path_of(self, name: str) -> str:
        """The name in the whole model of a tensor of this part."""
        return f"{self.folder}/{name}" if self.folder else name

    @property
    def stem(self) -> str:
        """The beginning of its files' names."""
        first = _SHARD.sub("", self.files[0].stem)
        plain = next((name for name in ("diffusion_pytorch_model", "pytorch_model") if first.startswith(name)), first)
        return {"pytorch_model": "model"}.get(plain, plain)  # as save_pretrained calls it in safetensors


@dataclass(frozen=True)
class Source:
    """A model on the disk.

    Attributes:
        place: file or folder; parts: its models.
    """

    place: Path
    parts: tuple[Part, ...]

    @property
    def tensors(self) -> Iterator[StoredTensor]:
        for part in self.parts:
            yield from part.tensors

    @functools.cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the files' names and sizes, and of pieces all over them. Reading all of a large model would take as long as
        converting it."""
        found = hashlib.sha256()
        for part in self.parts:
            for path in part.files:
                found.update(f"{part.folder}\0{path.name}\0{path.stat().st_size}\0".encode("utf-8", "surrogateescape"))
                with open_regular(path) as file:
                    size = os.fstat(file.fileno()).st_size
                    for index in range(_SAMPLES):
                        file.seek(max(0, size - _SAMPLE) * index // (_SAMPLES - 1))
                        found.update(file.read(_SAMPLE))
        return found.hexdigest()


def open_source(place: Path) -> Source:
    """
    Args:
        place: a file of weights; a folder of such files, with or without an index; or a pipeline's folder.
    Raises:
        UserError: there is no model, a file of it is missing or damaged, two files hold one name, or weights are in a form that
            this program does not read.
        BackendUnavailable: a file is GGUF, and `gguf` is not installed.
    """
    try:
        return _open(place)
    except OSError as error:
        raise UserError(
            f"{place} cannot be read",
            expected="files and folders that this user may read",
            got=f"{error.strerror}: {error.filename}",
            remedy="change its permissions, or give another place",
        ) from error


def _open(place: Path) -> Source:
    if place.is_file():
        return Source(place, (_part("", place, (place,)),))
    if not place.is_dir():
        raise UserError(
            f"there is no model at {place}",
            expected="a folder, or a file that ends with " + ", ".join(READABLE),
            got="something else" if place.exists() else "nothing of this name",
            remedy="correct the path",
        )
    if (place / PIPELINE_INDEX).is_file():
        folders = sorted(folder for folder in place.iterdir() if folder.is_dir() and not folder.name.startswith("."))
        parts = [_part(folder.name, folder, files) for folder in folders if (files := _files(folder))]
    else:
        parts = [_part("", place, files)] if (files := _files(place)) else []
    if not parts:
        raise UserError(
            f"there are no weights in {place}",
            expected="files that end with " + ", ".join(READABLE),
            got=several(sorted(path.name for path in place.iterdir()), 8) or "nothing",
            remedy="name the folder that they are in, or get them again",
        )
    return Source(place, tuple(parts))


def _files(folder: Path) -> tuple[Path, ...]:
    """The weights of a folder's model: the files that `save_pretrained` names so, else those of an index, else all of the first
    kind that is there."""
    try:
        stored = stored_weights(folder)
    except UserError as error:  # there are several variants
        remedy = "name the file itself, or move the files of the others away"
        raise UserError(error.problem, expected=error.expected, got=error.got, remedy=remedy) from error
    if stored is not None:
        return stored.files
    if indexes := _indexes(folder):
        return tuple(dict.fromkeys(folder / name for name in _weight_map(indexes[0]).values()))
    for kinds in (SAFETENSORS, TORCH, GGUF):
        if found := sorted(path for path in folder.iterdir() if path.suffix.lower() in kinds and path.is_file()):
            return tuple(found)
    return ()


def _indexes(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if _INDEX.fullmatch(path.name) and path.is_file())


def _weight_map(index: Path) -> dict[str, str]:
    """The file of each tensor, by an index."""
    try:
        found = read_json(index)
        names = found.get("weight_map") if isinstance(found, dict) else None
        if not isinstance(names, dict) or not names or not all(isinstance(name, str) for name in names.values()):
            raise ValueError("no mapping of tensors to files in weight_map")
        if outside := next((name for name in names.values() if Path(name).name != name), ""):
            raise ValueError(f"a file outside of the folder, {outside}")
    except (OSError, ValueError) as error:
        raise damaged(index, error) from error
    return names


def _part(name: str, place: Path, files: tuple[Path, ...]) -> Part:
    """A model of files: those of a folder, or one file that the user named."""
    indexes = _indexes(place) if place.is_dir() else []
    maps = {index: _weight_map(index) for index in indexes}
    taken = [index for index, names in maps.items() if {path.name for path in files} & set(names.values())]
    for index in taken:
        if lost := sorted(file for file in set(maps[index].values()) if not (place / file).is_file()):
            raise UserError(
                f"a shard that {index} names is missing",
                expected=f"{len(set(maps[index].values()))} files",
                got=f"no {several(lost, 5)}",
                remedy="get the missing files again",
            )
    if place.is_dir() and not taken:
        _refuse_missing_shards(files)
    found: dict[str, tuple[StoredTensor, Path]] = {}
    metadata: dict[Path, dict[str, str]] = {}
    for path in files:
        tensors, metadata[path] = _tensors_of(path, name)
        for tensor in tensors:
            if tensor.name in found:
                raise UserError(
                    f"two files have the tensor {tensor.name}",
                    expected="each tensor once",
                    got=f"{found[tensor.name][1].name} and {path.name} in {path.parent}",
                    remedy="name one of the files, or move the other away",
                )
            found[tensor.name] = tensor, path
    for index in taken:
        if absent := sorted(
            tensor
            for tensor, file in maps[index].items()
            if (place / file) in metadata and (tensor not in found or found[tensor][1] != place / file)
        ):
            raise UserError(
                f"{index} does not fit the files beside it",
                expected=f"{absent[0]} in {maps[index][absent[0]]}",
                got="no such tensor there",
                remedy="get the index and its files again",
            )
    refuse_other_formats(found, str(place))
    beside = {*files, *taken}
    others = [
        path
        for path in (place.iterdir() if place.is_dir() else ())
        if path not in beside and (path in indexes or _is_variant(path))
    ]
    tensors = _with_scales({name: tensor for name, (tensor, _) in found.items()}, str(place))
    return Part(name, files, tuple(taken), tuple(sorted(others)), tuple(tensors), metadata)


def _refuse_missing_shards(files: Iterable[Path]) -> None:
    counted: dict[tuple[str, int], list[str]] = {}
    for path in files:
        if shard := _SHARD.search(path.stem):
            counted.setdefault((path.stem[: shard.start()], int(shard[1])), []).append(path.name)
    for (stem, count), names in counted.items():
        if len(names) < count:
            raise UserError(
                f"shards of {stem} are missing",
                expected=f"{count} files, as their names count them",
                got=several(sorted(names), 5),
                remedy="get the missing files again",
            )


def _is_variant(path: Path) -> bool:
    """Whether `save_pretrained` gives a model's weights such a name."""
    stem = path.name.split(".")[0].split("-")[0]
    known = stem in ("diffusion_pytorch_model", "pytorch_model", "model")
    return known and path.suffix in (".safetensors", ".bin", ".msgpack", ".h5") and path.is_file()


def _with_scales(found: dict[str, StoredTensor], source: str) -> list[StoredTensor]:
    """The tensors, each joined with its scales. Descriptions of scales are left out."""
    refuse_missing_scales(found, source)
    beside: dict[str, list[str]] = {}
    for name in found:
        if (layer := layer_of(name)) is not None and f"{layer}.weight" in found:
            beside.setdefault(f"{layer}.weight", []).append(name)
    joined = {name for names in beside.values() for name in names}
    joined |= {name for name in found if is_mark(name)}

    def read(names: list[str]) -> Tensor:
        return dequantised({name: found[name].read() for name in names}, source)[names[0]]

    def with_scales(name: str, tensor: StoredTensor) -> StoredTensor:
        names = beside.get(name, [])
        # FP8 without a scale is read so too, and integers are refused there.
        single = tensor.dtype.itemsize == 1 and tensor.dtype is not torch.bool and name.endswith(".weight")
        if not names and not single:
            return tensor
        size = tensor.nbytes + sum(found[other].nbytes for other in names)
        return replace(tensor, nbytes=size, read=functools.partial(read, [name, *names]))

    return [with_scales(name, tensor) for name, tensor in found.items() if name not in joined]


def _tensors_of(path: Path, part: str) -> tuple[list[StoredTensor], dict[str, str]]:
    """The tensors of one file, and its metadata."""
    refuse_pointer(path)
    suffix = path.suffix.lower()
    if suffix in SAFETENSORS:
        entries, metadata = read_entries(path)
        return [
            StoredTensor(e.name, part, e.shape, e.dtype, e.nbytes, functools.partial(read_entry, path, e))
            for e in entries
        ], metadata
    if suffix in TORCH:
        return [
            StoredTensor(name, part, tuple(x.shape), x.dtype, x.nbytes, functools.partial(_from_disk, x))
            for name, x in _refuse_unreadable(read_torch(path), path).items()
        ], {}
    if suffix in GGUF:
        return [
            StoredTensor(name, part, tuple(shape), torch.float32, nbytes, read)
            for name, (shape, nbytes, read) in gguf_tensors(path).items()
        ], {}
    raise unknown_kind(path)


def _refuse_unreadable(tensors: dict[str, Tensor], path: Path) -> dict[str, Tensor]:
    for name, x in tensors.items():
        if (flaw := text_flaw(name)) or name == "__metadata__":
            raise UserError(
                f"a tensor in {path} has a name that safetensors files cannot have",
                expected="text",
                got=flaw or name,
                remedy="load the file with torch, rename the tensor, and save the file again",
            )
        if x.layout is not torch.strided or x.dtype not in TYPES.values() or x.device.type != "cpu":
            raise UserError(
                f"{name} in {path} cannot be read",
                expected="plain tensors of " + ", ".join(TYPES),
                got=f"{x.layout} of {x.dtype} on {x.device}".replace("torch.", ""),
                remedy="take the model in another form, as safetensors in FP32, FP16 or BF16",
            )
    return tensors


def _from_disk(x: Tensor) -> Tensor:
    """A copy of a tensor of a mapped file. The file's pages are given back, or all of it would stay in memory."""
    copy = x.clone(memory_format=torch.contiguous_format)
    page, storage, page_out = os.sysconf("SC_PAGE_SIZE"), x.untyped_storage(), 21  # MADV_PAGEOUT, linux/mman-common.h
    start = storage.data_ptr() // page * page
    length = storage.data_ptr() + storage.nbytes() - start
    ctypes.CDLL(None).madvise(
        ctypes.c_void_p(start), ctypes.c_size_t(length), page_out
    )  # older kernels refuse the advice
    return copy
