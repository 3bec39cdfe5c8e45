"""Waits for other processes: messages name the holder, and every wait ends."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from support import environment

from trtconvert import bundle, locks
from trtconvert.errors import UserError
from trtconvert.files import locked, one_at_a_time
from trtconvert.locks import lock

HOLDING = """
import sys
from pathlib import Path
from trtconvert import files
with getattr(files, sys.argv[1])(Path(sys.argv[2])):
    print("holding", flush=True)
    sys.stdin.read()
"""


@contextmanager
def holding(function: str, path) -> Iterator[int]:
    """Run another process inside a block of a function of `files`, and yield its PID."""
    command = [sys.executable, "-c", HOLDING, function, str(path)]
    process = subprocess.Popen(command, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "holding\n"
    try:
        yield process.pid
    finally:
        process.communicate(timeout=30)


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(locks, "_SAID_AFTER", 0.1)
    monkeypatch.setattr("trtconvert.files.DAY", 0.4)


def test_lock_holder_is_named_and_the_wait_ends(impatient, tmp_path, capsys):
    work = tmp_path / "work"
    with holding("one_at_a_time", work) as process, pytest.raises(UserError) as refused, one_at_a_time(work):
        pass
    said = capsys.readouterr().err
    who = rf"process {process} on {re.escape(socket.gethostname())}, since \d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d\S*"
    assert re.search(
        rf"waiting for {who}, which holds the lock of {tmp_path}/work\.lock; for 0\.4 seconds at most\n", said
    )
    assert said.count("waiting") == 1
    text = str(refused.value)
    assert re.search(rf"work\.lock is in use\n.*within 0\.4 seconds\n.*got: {who} still holds the lock\n", text)
    with one_at_a_time(tmp_path / "work"):  # as the remedy says
        pass
    assert os.listdir(tmp_path) == []


def test_a_wait_for_the_lock_of_a_folder_has_a_limit(monkeypatch, tmp_path, capsys):
    """A folder holds no note of its holder."""
    monkeypatch.setattr(locks, "_SAID_AFTER", 0.1)
    with holding("locked", tmp_path):
        handle = os.open(tmp_path, os.O_RDONLY)
        with pytest.raises(UserError, match=r"(?s)is in use.*another process.*remedy: "):
            lock(handle, tmp_path, wait=0.3)
        os.close(handle)
    assert "waiting for another process" in capsys.readouterr().err


def test_a_lock_file_without_a_note_names_another_process(tmp_path):
    (tmp_path / "manifest.json").write_text('{"format": 1}')
    with (tmp_path / "manifest.json").open() as file:
        assert locks.holder(file.fileno()) == "another process, perhaps on another machine"


def test_no_wait_is_none(tmp_path):
    with locked(tmp_path):
        handle = os.open(tmp_path, os.O_RDONLY)
        began = time.monotonic()
        with pytest.raises(BlockingIOError):
            lock(handle, tmp_path, wait=0)
        assert time.monotonic() - began < 0.3
        os.close(handle)


def test_a_lock_that_comes_free_is_taken_at_once(tmp_path, capsys):
    handle = os.open(tmp_path, os.O_RDONLY)
    with holding("locked", tmp_path) as process:
        os.kill(process, signal.SIGKILL)  # the lock goes with it
        assert lock(handle, tmp_path, wait=10)
    os.close(handle)
    assert "waiting" not in capsys.readouterr().err


@pytest.mark.soak
def test_a_build_that_waits_for_another_says_for_which(tiny_build, tmp_path):
    cache = shutil.copytree(tiny_build.cache, tmp_path / "cache")
    (verified,) = cache.glob("verify-*")
    shutil.rmtree(verified)
    command = [
        sys.executable,
        "-m",
        "trtconvert.cli",
        "build",
        tiny_build.recipe,
        "-o",
        tmp_path / "b",
        "--cache",
        cache,
    ]
    with holding("one_at_a_time", cache / f".{verified.name}") as process:
        build = subprocess.Popen(
            command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert build.stdout is not None
        told = next(line for line in build.stdout if "waiting for" in line)
    assert f"waiting for process {process} on " in told
    rest = build.communicate(timeout=120)[0]
    assert build.returncode == 0, rest


def test_a_bundle_that_never_stays_is_refused(tmp_path, monkeypatch):
    states = iter(range(1000))
    monkeypatch.setattr(bundle, "_as_it_lies", lambda _: str(next(states)).encode())
    monkeypatch.setattr(bundle, "read_manifest", lambda folder: folder)
    discarded = []
    with pytest.raises(UserError, match=r"(?s)changes while it is read.*one of 100 attempts.*remedy: "):
        bundle.read_unchanged(tmp_path, lambda manifest: manifest, discarded.append)
    assert len(discarded) == 100


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(86400, "1 day"), (7200, "2 hours"), (90, "1.5 minutes"), (1, "1 second"), (0.5, "0.5 seconds")],
)
def test_durations_in_words(seconds, text):
    assert locks._duration(seconds) == text
