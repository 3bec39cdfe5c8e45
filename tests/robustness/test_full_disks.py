"""Commands whose disk is full at any moment say so and leave nothing half-written; with room, they end as if nothing had been."""

from __future__ import annotations

import random
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from commands import COMMANDS, Command, left, undisturbed
from damage import ROUNDS
from support import PARTIAL

MOMENTS = min(ROUNDS, 20)
"""Rounds of each command in `make soak`."""
FEW = {"quantize": 1}
"""Rounds of quick commands in every test run."""
PAGE, LARGE = 4096, 64 * 2**20


@pytest.fixture
def disk(tmp_path) -> Iterator[Callable[[int], Path]]:
    """Makes a disk of so many bytes, empty, in the place of the one before."""
    place = tmp_path / "disk"
    place.mkdir()

    def mount(size: int) -> Path:
        subprocess.run(["umount", place], capture_output=True)
        if subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", place], capture_output=True
        ).returncode:
            pytest.skip("mounting a small disk needs root")
        return place

    yield mount
    subprocess.run(["umount", place], capture_output=True)


@pytest.mark.parametrize("command", [c for c in COMMANDS if MOMENTS or c.name in FEW], ids=lambda c: c.name)
def test_a_command_whose_disk_was_full_is_run_again(command: Command, tiny_build, forking, disk):
    _, finished = undisturbed(command, forking, lambda: command.place(disk(LARGE), tiny_build))
    folder = command.place(disk(LARGE), tiny_build)
    before = sum(-(-path.stat().st_size // PAGE) * PAGE for path in folder.rglob("*") if path.is_file())
    most, sizes, moments = before + 8 * PAGE, random.Random(command.name), 0
    while command.run(forking, command.place(disk(most), tiny_build)).code:
        most = before + 2 * (most - before)
    while moments < (MOMENTS or FEW[command.name]):
        size = before + sizes.randrange(1, (most - before) // PAGE) * PAGE
        folder = command.place(disk(size), tiny_build)
        ended = command.run(forking, folder)
        if ended.code == 0:
            continue  # there was room enough
        moments += 1
        assert ended.code == 2 and "is full" in ended.output, f"{size} bytes:\n{ended.output}"
        command.check_output(folder, finished)
        halves = [str(path) for path in folder.rglob("*") if PARTIAL in path.name]
        assert not halves, f"{size} bytes: {halves}"
        subprocess.run(["mount", "-o", f"remount,size={LARGE}", folder], check=True)
        ended = command.run(forking, folder)
        assert ended.code == 0, f"{size} bytes, then with room:\n{ended.output}"
        assert left(folder) == finished, f"{size} bytes"
    print(f"{command.name}: {moments} full disks, each followed by a run that ended as an undisturbed one")
