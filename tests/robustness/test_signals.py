"""Signals where a command has not begun, or has ended: the exit code says so, and nothing else is said."""

import os
import signal
import subprocess
import sys

import pytest
from support import environment

AT_IMPORTS = """
import os, sys

class Finder:
    def find_spec(name, path=None, target=None):
        if name == "click":
            os.kill(os.getpid(), {number})

sys.meta_path.insert(0, Finder)
"""
AT_THE_END = """
import atexit, os

atexit.register(os.kill, os.getpid(), {number})
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
@pytest.mark.parametrize(
    ("moment", "output"), [(AT_IMPORTS, ""), (AT_THE_END, "trtconvert, version")], ids=["imports", "end"]
)
def test_a_signal_before_or_after_a_command_ends_the_process_with_its_number(tmp_path, number, moment, output):
    (tmp_path / "sitecustomize.py").write_text(moment.format(number=int(number)))
    variables = environment()
    variables["PYTHONPATH"] = os.pathsep.join([str(tmp_path), variables["PYTHONPATH"]])
    command = [sys.executable, "-m", "trtconvert.cli", "--version"]
    ended = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 128 + number, ended.stderr
    assert ended.stdout.startswith(output) and not ended.stderr


def test_without_a_signal_the_exit_code_is_the_commands(tmp_path):
    for arguments, code in ((["--version"], 0), (["inspect", str(tmp_path)], 2), (["nothing"], 2)):
        ended = subprocess.run(
            [sys.executable, "-m", "trtconvert.cli", *arguments], env=environment(), capture_output=True
        )
        assert ended.returncode == code and (ended.stdout or ended.stderr)
