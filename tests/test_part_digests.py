"""Digests of large files in parts: their values, damage, and bundles of earlier versions."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest

from trtconvert import files
from trtconvert.bundle import (
    MANIFEST,
    FileRecord,
    check_files,
    file_record,
    read_manifest,
    write_manifest,
    write_sealed,
)
from trtconvert.cache import Cache
from trtconvert.compile import _placed
from trtconvert.errors import UserError
from trtconvert.files import PART_BYTES, copy_files, digests, sha256

PART = 1000
CONTENT = bytes(index * 7 % 251 for index in range(3 * PART + 10))


def by_hand(content: bytes, part: int) -> str:
    hashes = [hashlib.sha256(content[at : at + part]).digest() for at in range(0, len(content), part)]
    return hashlib.sha256(b"".join(hashes)).hexdigest()


def hashed(paths, part_bytes):
    return list(digests((path, part_bytes) for path in paths))


def large(path, size=PART_BYTES + 5, at=0):
    """Write a sparse file of two parts with one byte that is not zero."""
    with path.open("wb") as file:
        file.truncate(size)
        file.seek(at)
        file.write(b"x")
    return path


@pytest.mark.parametrize("size", [PART + 1, 2 * PART, 3 * PART + 10])
def test_a_large_file_has_the_hash_of_the_hashes_of_its_parts(tmp_path, size):
    (path := tmp_path / "file").write_bytes(CONTENT[:size])
    (found,) = hashed([path], PART)
    assert (found.size, found.sha256, found.part_bytes) == (size, by_hand(CONTENT[:size], PART), PART)


@pytest.mark.parametrize("size", [0, 1, PART])
def test_a_file_of_one_part_keeps_the_plain_hash(tmp_path, size):
    (path := tmp_path / "file").write_bytes(CONTENT[:size])
    (found,) = hashed([path], PART)
    assert (found.size, found.sha256, found.part_bytes) == (size, sha256(path), None)


def test_parts_larger_than_a_buffer_are_read_to_their_end(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_BUFFER", 7)
    (path := tmp_path / "file").write_bytes(CONTENT)
    assert [hashed([path], size)[0].sha256 for size in (PART, None)] == [by_hand(CONTENT, PART), sha256(path)]


def test_files_of_all_sizes_share_the_threads_in_their_order(tmp_path):
    paths = [tmp_path / str(index) for index in range(60)]
    for index, path in enumerate(paths):
        path.write_bytes(CONTENT[: index * 53])
    assert [found.size for found in hashed(paths, PART)] == [path.stat().st_size for path in paths]
    assert [found.sha256 for found in hashed(paths, PART)] == [
        sha256(path) if index * 53 <= PART else by_hand(path.read_bytes(), PART) for index, path in enumerate(paths)
    ]


def test_a_real_file_just_above_a_part_is_hashed_in_two(tmp_path):
    path = large(tmp_path / "file", PART_BYTES + 1, PART_BYTES)
    first = hashlib.sha256(bytes(PART_BYTES)).digest()
    record = file_record(path)
    assert record.sha256 == hashlib.sha256(first + hashlib.sha256(b"x").digest()).hexdigest()
    assert record.model_dump() == {"size": PART_BYTES + 1, "sha256": record.sha256, "part_bytes": PART_BYTES}


@pytest.mark.parametrize("size", [PART, 10 * PART])
def test_a_file_that_changes_its_size_meanwhile_is_refused(tmp_path, monkeypatch, size):
    (path := tmp_path / "file").write_bytes(CONTENT)
    of_part, once = files._sha256_of_part, threading.Lock()

    def changed_first(*arguments):
        if once.acquire(blocking=False):
            os.truncate(path, size)
        return of_part(*arguments)

    monkeypatch.setattr(files, "_sha256_of_part", changed_first)
    with pytest.raises(OSError, match="size changed") as refused:
        hashed([path], PART)
    assert refused.value.filename == str(path)


@pytest.mark.parametrize("kind", ["pipe", "folder", "missing"])
def test_what_is_no_file_is_refused(tmp_path, kind):
    path = tmp_path / kind
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    with pytest.raises(OSError) as refused:
        hashed([path], PART)
    assert refused.value.filename == str(path)


def test_the_end_of_a_hashing_cancels_pending_parts(tmp_path, monkeypatch):
    begun = []

    def slow(path, *arguments):
        begun.append(path)
        time.sleep(0.05)
        return b""

    monkeypatch.setattr(files, "_sha256_of_part", slow)
    (path := tmp_path / "file").write_bytes(CONTENT)
    with closing(digests([(path, None), (path, 1)])) as found:
        next(found)
    assert len(begun) < 100


def test_the_first_unreadable_file_in_order_is_reported(tmp_path):
    (path := tmp_path / "file").write_bytes(CONTENT)
    found = digests([(path, PART), (tmp_path / "b", PART), (tmp_path / "a", PART)])
    assert next(found).size == len(CONTENT)
    with pytest.raises(FileNotFoundError, match="/b'"):
        next(found)


@pytest.fixture
def bundle(tiny_build, tmp_path):
    """A bundle with a large file, and a file of its own size."""
    folder = shutil.copytree(tiny_build.bundle, tmp_path / "bundle")
    large(folder / "large.bin")
    manifest = read_manifest(folder)
    (folder / MANIFEST).unlink()
    write_manifest(folder, manifest)
    return folder


def resealed(folder, **records):
    """Change records of files in a manifest."""
    manifest = read_manifest(folder)
    changed = manifest.files | {name.replace("__", "."): record for name, record in records.items()}
    write_sealed(folder / MANIFEST, manifest.model_copy(update={"files": changed}))
    return read_manifest(folder)


def test_only_records_of_large_files_name_parts(bundle):
    listed = json.loads((bundle / MANIFEST).read_text())["files"]
    assert listed.pop("large.bin")["part_bytes"] == PART_BYTES
    assert listed and all(record.keys() == {"size", "sha256"} for record in listed.values())
    check_files(bundle, read_manifest(bundle))


def test_a_manifest_of_small_files_keeps_its_text(tiny_build, tmp_path):
    folder = shutil.copytree(tiny_build.bundle, tmp_path / "bundle")
    before = json.loads((folder / MANIFEST).read_text())
    assert before["files"] == {
        name: {"size": (folder / name).stat().st_size, "sha256": sha256(folder / name)} for name in before["files"]
    }
    write_sealed(folder / MANIFEST, read_manifest(folder))
    assert json.loads((folder / MANIFEST).read_text()) == before


def test_a_bundle_of_an_earlier_version_is_checked_by_its_plain_hashes(bundle):
    """The other files stay, so both kinds lie in one bundle."""
    (other := bundle / "other.bin").write_bytes((bundle / "large.bin").read_bytes())
    plain = FileRecord(size=other.stat().st_size, sha256=sha256(other))
    manifest = resealed(bundle, other__bin=plain)
    check_files(bundle, manifest)
    large(other, at=PART_BYTES)
    with pytest.raises(UserError, match=r"(?s)other\.bin.*damaged"):
        check_files(bundle, manifest)


@pytest.mark.parametrize("at", [1, PART_BYTES - 1, PART_BYTES, PART_BYTES + 4])
def test_one_changed_byte_in_any_part_is_found(bundle, at):
    with (bundle / "large.bin").open("r+b") as file:
        file.seek(at)
        file.write(b"y")
    with pytest.raises(UserError, match=r"(?s)large\.bin.*damaged.*SHA-256"):
        check_files(bundle, read_manifest(bundle))


@pytest.mark.parametrize("size", [PART_BYTES + 4, PART_BYTES + 6])
def test_another_size_is_found_before_any_file_is_hashed(bundle, monkeypatch, size):
    os.truncate(bundle / "large.bin", size)
    monkeypatch.setattr(files, "_sha256_of_part", lambda *_: pytest.fail("a file was hashed"))
    with pytest.raises(UserError, match=rf"(?s)large\.bin.*damaged.*{size} bytes"):
        check_files(bundle, read_manifest(bundle))


@pytest.mark.parametrize("size", [0, 2**20 - 1, -PART_BYTES])
def test_parts_too_small_to_be_written_by_a_build_are_refused(bundle, size):
    content = json.loads((bundle / MANIFEST).read_text())
    content["files"]["large.bin"]["part_bytes"] = size
    (bundle / MANIFEST).write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"(?s)damaged.*part_bytes"):
        read_manifest(bundle)


def test_stages_of_the_cache_with_large_files_are_checked(tmp_path):
    cache = Cache(tmp_path / "cache")

    def make(folder):
        large(folder / "large.bin")

    stage = cache.stage("one", ["trtconvert.cache"], {}, make)
    assert stage.hashes == {"large.bin": file_record(stage.folder / "large.bin").sha256}
    again = cache.stage("one", ["trtconvert.cache"], {}, make)
    assert again.reused and again.hashes == stage.hashes
    large(stage.folder / "large.bin", at=PART_BYTES)
    assert not cache.stage("one", ["trtconvert.cache"], {}, make).reused


def test_a_large_plan_is_placed_once(tmp_path):
    from trtconvert.stages.common import ENGINE

    (folder := tmp_path / "bundle").mkdir()
    stage = Cache(tmp_path / "cache").stage("one", ["trtconvert.cache"], {}, lambda made: large(made / ENGINE) and None)
    first, record = _placed(folder, Path("a.plan"), stage)
    assert (folder / first).stat().st_size == record.size and record.part_bytes == PART_BYTES
    assert record.sha256 == stage.hashes[ENGINE]
    inode = (folder / first).stat().st_ino
    assert _placed(folder, Path("a.plan"), stage) == (first, record)
    assert (folder / first).stat().st_ino == inode


def test_copies_are_whole(tmp_path):
    for index in range(5):
        (tmp_path / str(index)).write_bytes(CONTENT[: index * PART])
    copy_files({tmp_path / f"{index}.copy": tmp_path / str(index) for index in range(5)})
    assert all((tmp_path / f"{index}.copy").read_bytes() == CONTENT[: index * PART] for index in range(5))


def test_a_failed_copy_is_reported(tmp_path):
    with pytest.raises(FileNotFoundError, match="absent"):
        copy_files({tmp_path / "b": tmp_path / "absent"})
