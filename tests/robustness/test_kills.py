"""Commands that are killed at any moment leave nothing half-written; run again, they end as if nothing had been."""

from __future__ import annotations

import random
import shutil
import signal

import pytest
from commands import COMMANDS, Command, left, undisturbed
from damage import ROUNDS

KILLS = min(ROUNDS, 200)
"""Kills of each command in `make soak`."""
FEW = {"quantize": 2}
"""Kills of quick commands in every test run."""


@pytest.mark.parametrize("command", [c for c in COMMANDS if KILLS or c.name in FEW], ids=lambda c: c.name)
def test_a_killed_command_is_run_again(command: Command, tiny_build, forking, tmp_path):
    folder = tmp_path / "job"

    def place():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        return command.place(folder, tiny_build)

    seconds, finished = undisturbed(command, forking, place)

    moments, kills = random.Random(command.name), 0
    while kills < (KILLS or FEW[command.name]):
        moment = moments.uniform(0, seconds)
        if command.run(forking, place(), moment).code != -signal.SIGKILL:
            continue  # it had ended
        kills += 1
        command.check_output(folder, finished)
        if not (command.is_once and (folder / command.output).exists()):
            ended = command.run(forking, folder)
            assert ended.code == 0, f"killed after {moment:.4f} s, then:\n{ended.output}"
        assert left(folder) == finished, f"killed after {moment:.4f} s"
    print(f"{command.name}: {kills} kills, each followed by a run that ended as an undisturbed one")
