"""Messages of `trtconvert serve` before it serves."""

from __future__ import annotations

import importlib.util
import json
import socket
import subprocess
import sys

import pytest
from support import environment, refusal, run

LOCAL = ("--port", 0)


def test_without_its_packages_the_extra_is_named(tmp_path, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "ray" else found(name, *more))
    message = refusal(run("serve", tmp_path), "got: no ray")
    assert "pip install 'trtconvert[serve]'" in message


def test_ray_is_imported_by_nothing_else():
    code = """
import sys
from click.testing import CliRunner
from trtconvert.cli import main
assert "serve " in CliRunner().invoke(main, ["--help"]).output
import trtconvert.runtime, trtconvert.serving.drawing
print([name for name in ("ray", "starlette", "uvicorn") if name in sys.modules])
"""
    ended = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, timeout=60)
    assert ended.stdout.strip() == "[]", ended.stderr


@pytest.fixture
def installed():
    for name in ("ray", "starlette", "uvicorn", "prometheus_client"):
        pytest.importorskip(name, reason="needs the extra serve")


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--replicas", "0"), "a number from 1"),
        (("--replicas", "3:2"), "LEAST:MOST"),
        (("--replicas", "two"), "got: two"),
        (("--replicas", "٢"), "LEAST:MOST"),
        (("--steps", 200), "raise --max-steps"),
        (("--max-images", 50, "--queue-limit", 20), "raise --queue-limit"),
        (("--drain-seconds", "nan"), "got: nan"),
        (("--cpus", "inf"), ""),
        ((), "bundle"),
    ],
)
def test_odd_options_are_refused_at_once(tmp_path, options, words):
    outcome = run("serve", tmp_path / "none", *LOCAL, *options)
    assert outcome.exit_code == 2 and words in outcome.output


@pytest.mark.usefixtures("installed")
def test_a_damaged_bundle_and_a_taken_port_are_told_before_a_cluster_starts(digits, tmp_path):
    (tmp_path / "manifest.json").write_text(json.dumps({}))
    refusal(run("serve", tmp_path, *LOCAL))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        refusal(run("serve", digits, "--port", taken.getsockname()[1]), "cannot listen at 127.0.0.1", "--port 0")
    refusal(run("serve", digits, *LOCAL, "--host", "no such host"), "cannot listen")
    refusal(run("serve", digits, *LOCAL, "--host", "192.0.2.77"), "cannot listen")
    refusal(
        run("serve", digits, *LOCAL, "--address", "127.0.0.1:1"), "cannot be reached at 127.0.0.1:1", "ray start --head"
    )
    refusal(
        run("serve", digits, *LOCAL, "--address", "ray://127.0.0.1:1"), "--address is not the address of a Ray cluster"
    )
    assert "ray" not in sys.modules or not sys.modules["ray"].is_initialized()
