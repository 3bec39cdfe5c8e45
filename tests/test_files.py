"""Files are complete or absent, however a build ends."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
import signal
import stat
import subprocess
import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest
from support import contents, files_of_at_most, partials

from trtconvert import files
from trtconvert.errors import UserError
from trtconvert.files import (
    locked,
    one_at_a_time,
    require_writable,
    settled,
    sha256,
    temporary_folder,
    whole_file,
    whole_folder,
)


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


def test_a_file_is_written_through_a_link_or_takes_its_place(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "folder").symlink_to("real")
    (tmp_path / "real" / "link").symlink_to(tmp_path / "file")
    with whole_file(tmp_path / "folder" / "link") as path:
        path.write_text("1")
    assert (tmp_path / "real" / "link").is_symlink()
    with whole_file(tmp_path / "folder" / "link", through_link=False) as path:
        path.write_text("2")
    assert (tmp_path / "file").read_text() == "1"
    assert not (tmp_path / "real" / "link").is_symlink() and (tmp_path / "folder").is_symlink()
    assert contents(tmp_path / "folder") == {"link": b"2"}


def test_outputs_that_are_not_files_keep_their_place(tmp_path):
    """A pipe stands in for devices: a failing test must not replace a device."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    for name in ("pipe", "link"):
        with (
            pytest.raises(UserError, match=r"cannot be replaced(.|\n)*the path of a file"),
            whole_file(tmp_path / name) as path,
        ):
            path.write_text("1")
    assert (tmp_path / "pipe").is_fifo()
    with whole_file(tmp_path / "link", through_link=False) as path:
        path.write_text("2")
    assert (tmp_path / "pipe").is_fifo() and (tmp_path / "link").read_text() == "2"


@pytest.mark.parametrize("whole", [whole_file, whole_folder, require_writable])
def test_a_link_that_leads_in_a_circle_is_told(tmp_path, whole):
    (tmp_path / "link").symlink_to("link")
    with pytest.raises(UserError, match="link"), whole(tmp_path / "link"):
        pytest.fail("the work began")
    assert (tmp_path / "link").is_symlink() and settled(tmp_path / "link") == tmp_path / "link"


@pytest.mark.parametrize("whole", [whole_file, whole_folder, require_writable])
@pytest.mark.parametrize("name", ["../file/target", "link", "link/target"])
def test_a_place_that_cannot_be_written_is_told_by_any_of_its_names(tmp_path, monkeypatch, whole, name):
    for folder in ("here", "elsewhere"):
        (tmp_path / folder).mkdir()
    (tmp_path / "file").write_text("")
    (tmp_path / "elsewhere" / "file").write_text("")
    (tmp_path / "here" / "link").symlink_to(tmp_path / "elsewhere" / "file" / "inside")
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(UserError, match=f"cannot write {name}\n"), whole(Path(name)):
        pytest.fail("the work began")


def test_a_folder_does_not_replace_a_file(tmp_path):
    (tmp_path / "file").write_text("1")
    with pytest.raises(UserError, match="Not a directory"), whole_folder(tmp_path / "file"):
        pytest.fail("the work began")
    assert contents(tmp_path) == {"file": b"1"}


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


def test_folders_that_are_made_for_a_target_go_with_it(tmp_path):
    target = tmp_path / "not" / "yet" / "there"
    require_writable(target)
    with pytest.raises(ValueError), whole_folder(target):
        raise ValueError
    assert list(tmp_path.iterdir()) == []


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
    """numpy's error has no number."""
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


def test_an_error_without_a_file_is_not_blamed_on_the_target(tmp_path):
    with pytest.raises(FileNotFoundError), whole_folder(tmp_path / "target"):
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")


def test_a_temporary_folder_that_cannot_be_used_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "file"))
    with pytest.raises(UserError, match=r"no temporary folder can be used\n(.*\n)+.*TMPDIR"), temporary_folder():
        pass


def test_messages_name_the_options_of_the_caller_and_no_others(tmp_path):
    (tmp_path / "file").write_text("")
    for write in (whole_folder, whole_file):
        with pytest.raises(UserError) as error, write(tmp_path / "file" / "target", "give another with --here"):
            pass
        assert "give another with --here" in error.value.remedy
        with pytest.raises(UserError) as error, write(tmp_path / "file" / "target"):
            pass
        assert " -" not in error.value.remedy


def test_the_last_callback_may_refuse_the_replacement(tmp_path):
    write(tmp_path / "target", "1")
    (tmp_path / "file").write_text("1")

    def refuse(new: Path) -> None:
        assert new.exists()
        raise ValueError

    with pytest.raises(ValueError), whole_folder(tmp_path / "target", ready=refuse) as folder:
        fill(folder, "2")
    with pytest.raises(ValueError), whole_file(tmp_path / "file", ready=refuse) as path:
        path.write_text("2")
    assert contents(tmp_path) == {"target/a": b"1", "target/b": b"1", "file": b"1"}


def test_a_folder_is_not_replaced_while_another_process_changes_it(tmp_path):
    write(tmp_path / "target", "1")
    taking = threading.Event()

    def replace() -> None:
        with whole_folder(tmp_path / "target") as folder:
            fill(folder, "2")
            taking.set()

    with locked(tmp_path / "target"):
        thread = threading.Thread(target=replace)
        thread.start()
        assert taking.wait(30)
        thread.join(0.2)  # it would take a fraction of this
        assert (tmp_path / "target" / "a").read_text() == "1"
        (tmp_path / "target" / "b").write_text("changed")
    thread.join(30)
    assert contents(tmp_path) == {"target/a": b"2", "target/b": b"2"}


@pytest.fixture
def mount_point(tmp_path):
    place = tmp_path / "mounted"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "tmpfs", place], capture_output=True).returncode:
        pytest.skip("mounting needs root")
    yield place
    subprocess.run(["umount", place], check=True)


def test_a_mount_point_is_refused_before_the_work(mount_point):
    with pytest.raises(UserError, match=r"cannot be replaced\n.*\n  got: a mount point"), whole_folder(mount_point):
        pytest.fail("the work began")
    assert partials(mount_point.parent) == []


def test_a_folder_that_an_image_brings_is_refused_before_the_work(tmp_path, monkeypatch):
    """overlayfs does not rename folders of its lower layers."""
    write(tmp_path / "target", "1")

    def rename(self: Path, to: Path) -> Path:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), str(self))

    monkeypatch.setattr(Path, "rename", rename)
    refused = pytest.raises(UserError, match=r"cannot be replaced\n.*\n  got: Invalid cross-device link")
    with refused, whole_folder(tmp_path / "target"):
        pytest.fail("the work began")


def test_folders_that_nobody_may_write_are_removed():
    with tempfile.TemporaryDirectory() as parent:  # whose parents everybody may enter
        Path(parent).chmod(0o777)
        process = multiprocessing.get_context("fork").Process(target=leave_read_only_folders, args=(Path(parent),))
        process.start()
        process.join(60)
        assert process.exitcode == 0
        assert contents(Path(parent)) == {"target/a": b"2", "target/b": b"2"} and partials(Path(parent)) == []


def leave_read_only_folders(parent: Path) -> None:
    """The old folder, and the remains of a killed process."""
    if os.getuid() == 0:  # who may write everything
        os.setuid(65534)
    write(parent / "target", "1")
    for place in (parent / "target", parent / ".target.partial-killed_1"):
        (place / "inner").mkdir(parents=True)
        fill(place / "inner", "1")
        (place / "inner").chmod(0o555)
        place.chmod(0o555)
    write(parent / "target", "2")


def test_the_current_folder_keeps_a_name_that_leads_to_what_replaces_it(tmp_path, monkeypatch):
    write(tmp_path / "target" / "inner", "1")
    monkeypatch.chdir(tmp_path / "target" / "inner")
    for name in (".", ".."):
        assert settled(Path(name)) == Path(name).resolve()
    assert settled(Path("other")) == Path("other")
    found = settled(Path("."))
    write(found, "2")
    assert contents(found) == {"a": b"2", "b": b"2"}
    with pytest.raises(UserError, match="enter the folder again"):
        settled(Path("."))
    assert settled(tmp_path) == tmp_path


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


def test_temporary_files_of_a_killed_process_are_removed_by_the_next(tmp_path, monkeypatch):
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


def test_unfinished_files_are_swept_whatever_their_names_unless_they_are_in_use(tmp_path):
    (tmp_path / ".one.partial-killed_1").mkdir()
    (tmp_path / ".one.partial-killed_1" / "one").write_text("half")
    (tmp_path / ".mine").mkdir()
    with whole_file(tmp_path / "two") as path:
        path.write_text("2")
        files.sweep_files(tmp_path)
        assert len(partials(tmp_path)) == 1
    assert contents(tmp_path) == {"two": b"2"} and (tmp_path / ".mine").is_dir()


def test_a_user_s_folder_of_nearly_such_a_name_stays(tmp_path):
    names = [".two.partial-2024", ".two.partial-Backup_1", ".two.partial-of_2024", "two.partial-12345678"]
    for name in names:
        (tmp_path / name).mkdir()
    write(tmp_path / "two", "2")
    files.sweep_files(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*names, "two"])


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


def test_a_lock_whose_file_goes_is_taken_again(tmp_path, monkeypatch):
    """The last holder removes the file while another process checks for it."""
    flock, left = fcntl.flock, [tmp_path / "work.lock"]

    def flock_and_lose(handle: int, operation: int) -> None:
        flock(handle, operation)
        if left and os.path.samestat(os.fstat(handle), left[0].stat()):
            left.pop().unlink()

    monkeypatch.setattr(fcntl, "flock", flock_and_lose)
    monkeypatch.setattr(Path, "exists", lambda _: True)  # so it was a moment ago
    with one_at_a_time(tmp_path / "work"):
        assert os.listdir(tmp_path) == ["work.lock"]
    assert os.listdir(tmp_path) == [] and left == []


def test_a_lock_that_is_not_got_leaves_no_open_file(tmp_path, monkeypatch):
    def stop(*_: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(fcntl, "flock", stop)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(KeyboardInterrupt), one_at_a_time(tmp_path / "work"):
        pass
    assert os.listdir("/proc/self/fd") == before


def replace_often(target: Path, value: str) -> None:
    for _ in range(100):
        write(target, value)


@pytest.mark.soak
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
