"""Files are whole or not there, whatever ends a build."""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import stat
import tempfile
from pathlib import Path

import numpy as np
import pytest
from support import contents, files_of_at_most, partials

from trtconvert import files
from trtconvert.errors import UserError
from trtconvert.files import sha256, temporary_folder, whole_file, whole_folder


def fill(folder: Path, value: str) -> None:
    (folder / "a").write_text(value)
    (folder / "b").write_text(value)


def write(target: Path, value: str) -> None:
    with whole_folder(target) as folder:
        fill(folder, value)


def test_a_folder_appears_when_it_is_whole(tmp_path):
    target = tmp_path / "not" / "yet" / "there"
    with whole_folder(target) as folder:
        fill(folder, "1")
        assert not target.exists()
    assert contents(target) == {"a": b"1", "b": b"1"}
    assert partials(target.parent) == []


def test_a_folder_replaces_another_whole(tmp_path):
    target = tmp_path / "target"
    write(target, "1")
    (target / "only in the old one").write_text("")
    with whole_folder(target) as folder:
        fill(folder, "2")
        assert (target / "a").read_text() == "1"
    assert contents(target) == {"a": b"2", "b": b"2"}
    assert partials(tmp_path) == []


def test_a_folder_replaces_another_where_names_cannot_be_exchanged(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_exchange", lambda *_: False)
    for value in ("1", "2", "3"):
        write(tmp_path / "target", value)
    assert contents(tmp_path / "target") == {"a": b"3", "b": b"3"}
    assert partials(tmp_path) == []


def test_a_link_keeps_its_place_and_what_it_points_to_is_replaced(tmp_path):
    write(tmp_path / "real", "1")
    (tmp_path / "link").symlink_to("real")
    write(tmp_path / "link", "2")
    assert (tmp_path / "link").is_symlink()
    assert contents(tmp_path / "real") == {"a": b"2", "b": b"2"}


def test_the_current_folder_can_be_the_target(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    write(Path("."), "1")
    assert contents(tmp_path / "here") == {"a": b"1", "b": b"1"}


@pytest.mark.parametrize("failure", [ValueError, KeyboardInterrupt, SystemExit])
def test_a_block_that_fails_leaves_what_was_there(tmp_path, failure):
    write(tmp_path / "target", "1")
    (tmp_path / "file").write_text("1")
    with pytest.raises(failure), whole_folder(tmp_path / "target") as folder:
        fill(folder, "2")
        raise failure
    with pytest.raises(failure), whole_file(tmp_path / "file") as path:
        path.write_text("2")
        raise failure
    assert contents(tmp_path) == {"target/a": b"1", "target/b": b"1", "file": b"1"}
    assert partials(tmp_path) == []


def test_a_file_replaces_another_and_keeps_its_ending_on_the_way(tmp_path):
    for value in ("1", "2"):
        with whole_file(tmp_path / "new" / "picture.png") as path:
            assert path.suffix == ".png"
            path.write_text(value)
    assert contents(tmp_path) == {"new/picture.png": b"2"}


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_is_named_and_nothing_is_left(tmp_path, number):
    with pytest.raises(UserError) as error, whole_folder(tmp_path / "target") as folder:
        fill(folder, "1")
        raise OSError(number, os.strerror(number))
    for part in ("the disk is full", "expected: free space", f"got: {os.strerror(number)}", "MiB free", "remedy: "):
        assert part in str(error.value)
    assert contents(tmp_path) == {}
    assert partials(tmp_path) == []


def test_a_full_disk_is_named_where_numpy_writes(tmp_path):
    """Its error has no number."""
    full_disk = pytest.raises(UserError, match=r"the disk is full")
    with full_disk, whole_file(tmp_path / "array") as path, files_of_at_most(1000), path.open("wb") as file:
        np.zeros(1000).tofile(file)
    assert contents(tmp_path) == {}


@pytest.mark.parametrize(
    "place",
    ["/proc/here", "/proc/here/and/there", "file/target", "file", "name" * 100],
    ids=["proc", "in proc", "under a file", "a file", "a long name"],
)
def test_a_place_that_cannot_be_written_is_named(tmp_path, place):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UserError) as error, whole_folder(tmp_path / place) as folder:
        fill(folder, "1")
    for part in (f"cannot write {tmp_path / place}", "expected: ", "got: ", "remedy: "):
        assert part in str(error.value)
    assert contents(tmp_path) == {"file": b"mine"}


def test_a_file_cannot_take_the_place_of_a_folder(tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(UserError, match=r"cannot write .*folder"), whole_file(tmp_path / "folder") as path:
        path.write_text("1")
    assert partials(tmp_path) == []


def test_an_error_about_another_file_is_not_blamed_on_the_target(tmp_path):
    with pytest.raises(FileNotFoundError), whole_folder(tmp_path / "out" / "target"):
        (tmp_path / "input").read_text()


# Other processes ----------------------------------------------------------------------------------------------------------

# Fork would copy the locks that this process may hold, and its threads' state.
SPAWN = multiprocessing.get_context("spawn")


def begin_and_hang(target: Path, ready) -> None:
    with whole_folder(target) as folder:
        fill(folder, "2")
        ready.set()
        signal.pause()


def die_between_the_renames(target: Path) -> None:
    files._exchange = lambda *_: False
    rename = Path.rename

    def rename_and_die(self: Path, to: Path) -> Path:
        moved = rename(self, to)
        if self == target:
            os.kill(os.getpid(), signal.SIGKILL)
        return moved

    Path.rename = rename_and_die
    write(target, "2")


def test_a_killed_build_leaves_the_old_folder_and_the_next_sweeps(tmp_path):
    target = tmp_path / "target"
    write(target, "1")
    ready = SPAWN.Event()
    process = SPAWN.Process(target=begin_and_hang, args=(target, ready))
    process.start()
    assert ready.wait(60)
    assert len(partials(tmp_path)) == 1
    write(target, "3")  # beside a build that runs: its folder is left alone
    assert len(partials(tmp_path)) == 1
    process.kill()
    process.join()
    assert contents(target) == {"a": b"3", "b": b"3"}
    write(target, "4")
    assert contents(tmp_path) == {"target/a": b"4", "target/b": b"4"}
    assert partials(tmp_path) == []


def hold_a_temporary_folder(parent: Path, ready) -> None:
    tempfile.tempdir = str(parent)
    with temporary_folder() as folder:
        (folder / "joined.data").write_bytes(b"weights")
        ready.set()
        signal.pause()


def test_what_a_killed_process_left_among_temporary_files_is_swept_by_the_next(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "another's").write_bytes(b"stays")
    ready = SPAWN.Event()
    process = SPAWN.Process(target=hold_a_temporary_folder, args=(tmp_path, ready))
    process.start()
    assert ready.wait(60)
    with temporary_folder() as folder:  # beside one that runs
        assert len(list(tmp_path.glob("*/joined.data"))) == 1
        assert folder.parent == tmp_path
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700  # a model's weights are their owner's
    process.kill()
    process.join()
    assert len(list(tmp_path.glob("*/joined.data"))) == 1
    with temporary_folder() as folder:
        assert list(folder.iterdir()) == []
        assert list(tmp_path.glob("*/joined.data")) == []
    assert [path.name for path in tmp_path.iterdir()] == ["another's"]


def test_a_folder_that_a_killed_build_moved_aside_is_put_back(tmp_path):
    target = tmp_path / "target"
    write(target, "1")
    process = SPAWN.Process(target=die_between_the_renames, args=(target,))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert not target.exists()
    with pytest.raises(ValueError), whole_folder(target):
        raise ValueError
    assert contents(target) == {"a": b"1", "b": b"1"}
    assert partials(tmp_path) == []


def replace_often(target: Path, value: str) -> None:
    for _ in range(100):
        write(target, value)


def test_builds_that_race_for_one_folder_leave_one_of_theirs_whole_at_every_moment(tmp_path):
    target = tmp_path / "target"
    write(target, "0")
    processes = [SPAWN.Process(target=replace_often, args=(target, str(i))) for i in range(3)]
    for process in processes:
        process.start()
    seen = set()
    while any(process.is_alive() for process in processes):
        handle = os.open(target, os.O_RDONLY)  # there at every moment
        os.close(handle)
        seen.add((target / "a").read_text())
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert len(seen) > 1, "the processes did not race"
    left = contents(tmp_path)
    assert left.keys() == {"target/a", "target/b"} and left["target/a"] == left["target/b"]


def test_sha256_is_the_published_one(tmp_path):
    """FIPS 180-2, appendix B.1."""
    (tmp_path / "abc").write_text("abc")
    assert sha256(tmp_path / "abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
