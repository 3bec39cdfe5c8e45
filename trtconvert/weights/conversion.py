"""Conversion of a model, tensor by tensor, into a new folder of shards with an index and of the model's other files.

    source ─► shards in a folder beside the output, each verified as it is finished ─► linked into a new folder ─► the output

A kill costs one shard at most: the next run with the same source and request takes the finished ones.

huggingface_hub splits state dicts into shards too. It comes with optional libraries alone, and this module plans shards before
it reads a tensor, with room for tensors that do not become INT8.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor

from trtconvert.errors import UserError, first_line, first_problem
from trtconvert.files import is_disk_full, link_files, one_at_a_time, path_of, whole_file, whole_folder
from trtconvert.progress import Bar
from trtconvert.weights.blocks import threads_by_tile
from trtconvert.weights.sources import METADATA, Part, Source, StoredTensor
from trtconvert.weights.tensor_files import TensorWriter, read_entries

StoredGranularity = Literal["block", "channel"]

SHARD_BYTES = 4 * 10**9
"""The largest file, counted as if no tensor became INT8. One larger tensor has a file of its own."""

_INSTEAD = "give another place with -o"
_AHEAD_ELEMENTS = 2**25  # of a tensor that is read while another one is converted
_RECORD_BYTES = 300  # of a tensor's record in JSON, without its name
_NOT_COPIED = {".git", ".cache"}


class Record(BaseModel):
    """How a tensor is stored whose type was changed.

    Attributes:
        stored: INT8 or another type; original: the type before.
        relative_error: of the stored numbers; 0 where a wider type holds all.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    stored: str
    original: str
    relative_error: float


class Records(BaseModel):
    """The content of `METADATA` in a safetensors file's metadata.

    A weight in INT8 has its scales beside it, `NAME_scale`: FP32 [⌈N/128⌉, ⌈K/128⌉] with granularity "block", [N] with
    "channel", where the weight is the matrix [N, K].
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: Literal[1] = 1
    granularity: StoredGranularity
    tensors: dict[str, Record]


@dataclass(frozen=True)
class Converted:
    """The tensors that are written for one tensor, with their types, and its record if its type changed."""

    tensors: Sequence[tuple[str, Tensor, torch.dtype]]
    record: Record | None


@dataclass(frozen=True)
class Conversion:
    """How a model is converted.

    Attributes:
        request: all that the result depends on beside the source, in JSON. Another request does not take an earlier run's shards.
        granularity: of the records; None for a result without records.
        names: that the tensors written for a tensor may have; most: bytes that they may take.
        convert: reads and converts a tensor.
    """

    request: Mapping[str, Any]
    granularity: StoredGranularity | None
    names: Callable[[StoredTensor], Sequence[str]]
    most: Callable[[StoredTensor], int]
    convert: Callable[[StoredTensor], Converted]


@dataclass(frozen=True)
class Outcome:
    """The result of a conversion.

    Attributes:
        folder: the output; files: how many hold weights; bytes: of these files.
        records: of all tensors whose type changed, by their paths.
        left_out: files of the source that hold the same weights in another form.
    """

    folder: Path
    files: int
    bytes: int
    records: dict[str, Record]
    left_out: tuple[Path, ...]


@dataclass(frozen=True)
class _Shard:
    part: Part
    name: str
    tensors: Sequence[StoredTensor]


def records_of(metadata: Mapping[str, str], path: Path) -> Records | None:
    """The records in a file's metadata; None where the file was not converted.

    Raises:
        UserError: they are damaged, or of another version.
    """
    if METADATA not in metadata:
        return None
    try:
        return Records.model_validate_json(metadata[METADATA])
    except ValidationError as error:
        raise UserError(
            f"the metadata of {path} cannot be read",
            expected="records that `trtconvert quantize` of this version writes",
            got=first_problem(error),
            remedy="quantise the model again",
        ) from error


def all_records(source: Source) -> dict[str, Record]:
    """The records of all of a source's tensors, by their paths. Raises UserError, see `records_of`."""
    return {
        part.path_of(name): record
        for part in source.parts
        for path, metadata in part.metadata.items()
        if (found := records_of(metadata, path)) is not None
        for name, record in found.tensors.items()
    }


def refuse_output(source: Source, output: Path) -> None:
    """
    Raises:
        UserError: there is something at the output's place, or it and the source lie within each other.
    """
    if output.is_symlink() or (output.exists() and not (output.is_dir() and not any(output.iterdir()))):
        raise UserError(
            f"{output} is there already",
            expected="a folder that is not there, or is empty",
            got="a folder with files" if output.is_dir() else "a file",
            remedy=f"{_INSTEAD}, or remove it",
        )
    place, model = output.resolve(), source.place.resolve()
    if place.is_relative_to(model) or model.is_relative_to(place):
        raise UserError(
            f"{output} and the model {source.place} lie within each other",
            expected="a place outside of the model, which stays as it is",
            got=str(place),
            remedy=_INSTEAD,
        )


def convert(source: Source, output: Path, conversion: Conversion, bar: Bar) -> Outcome:
    """Write a converted model, whole or not at all. After a kill, a full disk or a lack of memory, the same conversion takes the
    shards that the earlier run finished.

    Raises:
        UserError: there is something at the output's place, it cannot be written, or a file of the source is damaged.
        TrtconvertError: the disk does not hold the bytes that were written.
    """
    refuse_output(source, output)
    output = output.resolve()
    work = output.with_name(f".{output.name}.unfinished")
    shards = list(_shards(source, conversion))
    bar.total(sum(len(shard.tensors) for shard in shards))

    def sweep(_partial: Path) -> None:
        # Before the output is there: a second run refuses to write then, and would never remove the finished shards.
        shutil.rmtree(work, ignore_errors=True)

    with one_at_a_time(work, _INSTEAD):
        refuse_output(source, output)  # another process may have written it
        try:
            with whole_folder(output, _INSTEAD, ready=sweep) as partial, threads_by_tile():
                records = _write_all(shards, work, conversion, source, bar)
                names = [str(Path(shard.part.folder, shard.name)) for shard in shards]
                link_files(names, work, partial)
                total = _write_indexes(shards, partial)
                left_out = _copy_others(source, partial)
        except (Exception, KeyboardInterrupt) as error:
            may_go_on = isinstance(error, (KeyboardInterrupt, MemoryError)) or (
                isinstance(error.__cause__, OSError) and is_disk_full(error.__cause__)
            )
            if may_go_on and any(work.rglob("*.safetensors")):
                bar.notice(f"finished files are in {work}: the same command goes on from there")
            else:
                shutil.rmtree(work, ignore_errors=True)
            raise
    return Outcome(output, len(shards), total, records, left_out)


def _shards(source: Source, conversion: Conversion) -> Iterator[_Shard]:
    for part in source.parts:
        groups: list[list[StoredTensor]] = [[]]
        size = 0
        for tensor in part.tensors:
            most = conversion.most(tensor)
            if groups[-1] and size + most > SHARD_BYTES:
                groups.append([])
                size = 0
            groups[-1].append(tensor)
            size += most
        stem = part.stem.encode("utf-8", "replace").decode()
        for index, group in enumerate(groups):
            number = "" if len(groups) == 1 else f"-{index + 1:05d}-of-{len(groups):05d}"
            yield _Shard(part, f"{stem}{number}.safetensors", group)


def _write_all(
    shards: Sequence[_Shard], work: Path, conversion: Conversion, source: Source, bar: Bar
) -> dict[str, Record]:
    said = json.dumps({"source": source.fingerprint, "shard": SHARD_BYTES} | dict(conversion.request), sort_keys=True)
    key, job = hashlib.sha256(said.encode()).hexdigest(), work / "job"
    if not (job.is_file() and job.read_text(encoding="utf-8") == key):
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir()
        with whole_file(job) as partial:
            partial.write_text(key, encoding="utf-8")
    records: dict[str, Record] = {}
    finished = 0
    for shard in shards:
        path = work / shard.part.folder / shard.name
        if path.is_file():
            finished += 1
            _, metadata = read_entries(path)
            found = records_of(metadata, path)
            of_shard = found.tensors if found else {}
            bar.skip(len(shard.tensors))
        else:
            of_shard = _write(shard, path, conversion, bar)
        records |= {shard.part.path_of(name): record for name, record in of_shard.items()}
    if finished:
        bar.notice(f"{finished} of {len(shards)} files were finished before")
    return records


def _write(shard: _Shard, path: Path, conversion: Conversion, bar: Bar) -> dict[str, Record]:
    path.parent.mkdir(exist_ok=True)
    names = [name for tensor in shard.tensors for name in conversion.names(tensor)]
    kept = {k: v for said in shard.part.metadata.values() for k, v in said.items() if k != METADATA} | {"format": "pt"}
    # JSON within JSON: quotes take two bytes, and letters beyond ASCII up to six.
    room = (
        len(json.dumps(kept)) + 1000 + sum(_RECORD_BYTES + 2 * len(json.dumps(tensor.name)) for tensor in shard.tensors)
    )
    records: dict[str, Record] = {}
    partial = path.with_name(path.name + ".partial")
    try:
        with TensorWriter(partial, names, room) as writer:
            for tensor in _read_ahead(shard.tensors):
                made = conversion.convert(tensor)
                for name, x, dtype in made.tensors:
                    writer.add(name, x, dtype)
                if made.record is not None:
                    records[tensor.name] = made.record
                bar.step()
                made = None  # before the next one is there
            said = {}
            if conversion.granularity is not None:
                said[METADATA] = Records(granularity=conversion.granularity, tensors=records).model_dump_json()
            writer.close(kept | said)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return records


def _read_ahead(tensors: Sequence[StoredTensor]) -> Iterator[StoredTensor]:
    """The tensors. While one is converted, the next is read from the disk, unless it is large."""
    ahead: dict[int, Future[Tensor]] = {}

    def read(index: int) -> Tensor:
        place = ahead.pop(index, None)
        x = place.result() if place else tensors[index].read()
        following = index + 1
        if following < len(tensors) and math.prod(tensors[following].shape) <= _AHEAD_ELEMENTS:
            ahead[following] = pool.submit(tensors[following].read)
        return x

    with ThreadPoolExecutor(1, "read-ahead") as pool:
        for index, tensor in enumerate(tensors):
            yield dataclasses.replace(tensor, read=functools.partial(read, index))


def _write_indexes(shards: Sequence[_Shard], folder: Path) -> int:
    """Writes an index for each part with several files. Returns the bytes of all files."""
    total = 0
    of_part: dict[str, list[_Shard]] = {}
    for shard in shards:
        of_part.setdefault(shard.part.folder, []).append(shard)
    for name, group in of_part.items():
        weight_map: dict[str, str] = {}
        tensors = 0
        for shard in group:
            path = folder / name / shard.name
            total += path.stat().st_size
            entries, _ = read_entries(path)
            weight_map |= {entry.name: shard.name for entry in entries}
            tensors += sum(entry.nbytes for entry in entries)
        if len(group) > 1:
            stem = group[0].name.removesuffix(f"-00001-of-{len(group):05d}.safetensors")
            index = {"metadata": {"total_size": tensors}, "weight_map": dict(sorted(weight_map.items()))}
            (folder / name / f"{stem}.safetensors.index.json").write_text(
                json.dumps(index, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
            )
    return total


def _copy(path: Path, target: Path) -> None:
    try:
        shutil.copy2(path, target)
    except OSError as error:
        if path_of(error) != path.absolute():
            raise
        raise _not_copied(path, error) from error


def _not_copied(path: Path, error: OSError) -> UserError:
    return UserError(
        f"{path} cannot be copied",
        expected="files that this user may read, as all of the model's folder",
        got=first_line(error),
        remedy="change its permissions, or move it away",
    )


def _folders(place: Path, around: frozenset[Path] = frozenset()) -> Iterator[Path]:
    """A folder and all folders in it. Links are followed, except those that lead to a folder around them."""
    yield place
    inside = around | {place.resolve()}
    try:
        found = sorted(path for path in place.iterdir() if path.is_dir() and path.name not in _NOT_COPIED)
    except OSError as error:
        raise _not_copied(place, error) from error
    for path in found:
        target = path.resolve()
        if not any(folder.is_relative_to(target) for folder in inside):
            yield from _folders(path, inside)


def _copy_others(source: Source, folder: Path) -> tuple[Path, ...]:
    """Copies the source's files that hold no weights. Returns the others that were left out: other variants and formats."""
    if not source.place.is_dir():
        return ()
    left_out = tuple(path for part in source.parts for path in part.others)
    skipped = {path for part in source.parts for path in (*part.files, *part.indexes)} | set(left_out)
    for place in _folders(source.place):
        target = folder / place.relative_to(source.place)
        for path in place.iterdir():
            # Links are followed, as those of download caches; pipes and broken links are no files of a model.
            if path not in skipped and path.is_file() and not (target / path.name).exists():
                target.mkdir(parents=True, exist_ok=True)
                _copy(path, target / path.name)
    return left_out
