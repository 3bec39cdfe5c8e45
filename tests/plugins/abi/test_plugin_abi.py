"""The plugin's own ABI header against TensorRT's official headers, wherever those are at hand.

Set TENSORRT_INCLUDE to one or more folders that hold NvInferRuntime.h, separated by ':'; /usr/include is looked at too.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from support import REPOSITORY

HERE = Path(__file__).parent
OWN_HEADERS = REPOSITORY / "plugins"


def official_headers() -> list[Path]:
    named = [Path(p) for p in os.environ.get("TENSORRT_INCLUDE", "").split(":") if p]
    usual = [Path("/usr/include"), Path("/usr/include/x86_64-linux-gnu"), Path("/usr/local/tensorrt/include")]
    return named + [p for p in usual if (p / "NvInferRuntime.h").exists()]


def major_version(include: Path) -> int:
    """TensorRT's major version, which the header spells as a number or, in 10.x, by way of another macro."""
    text = (include / "NvInferVersion.h").read_text()
    return int(re.search(r"#define (?:NV_TENSORRT_MAJOR|TRT_MAJOR_\w+) (\d+)", text)[1])


def table(binary: Path, flags: list[str]) -> list[str]:
    """Compile abi_table.cpp with the given flags, run it, return its lines."""
    source = HERE / "abi_table.cpp"
    subprocess.run(["g++", "-std=c++17", "-Wno-deprecated-declarations", *flags, source, "-o", binary], check=True)
    return subprocess.run([binary], check=True, capture_output=True, text=True).stdout.splitlines()


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize(
    "include",
    official_headers()
    or [pytest.param(None, marks=pytest.mark.skip("TensorRT's headers are not here; name them in TENSORRT_INCLUDE"))],
    ids=str,
)
def test_own_header_matches_official(include: Path, tmp_path: Path) -> None:
    official = table(tmp_path / "official", ["-DOFFICIAL_HEADERS", f"-I{include}", f"-I{HERE / 'stub'}"])
    own = table(tmp_path / "own", [f"-I{OWN_HEADERS}", f"-DTENSORRT_MAJOR={major_version(include)}"])
    assert len(own) > 100
    assert own == official
