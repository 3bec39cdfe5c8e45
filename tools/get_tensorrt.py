#!/usr/bin/env python3
"""Fetch the TensorRT libraries and Python bindings that tests/plugins/test_plugin_registry.py loads.

NVIDIA's own wheels download their libraries from NVIDIA's index. Without access to this index, the libraries come from Maven
Central (``org.bytedeco:tensorrt``) and the bindings from PyPI, through the clients ``mvn`` and ``pip``, with the mirrors and
proxies of these clients.

Layout of the result, for each version::

    DIR/VERSION/lib/libnvinfer.so.*  libnvinfer_plugin.so.*  libnvonnxparser.so.*
    DIR/VERSION/python/tensorrt_bindings/

Builder resources (up to 1.4 GB), which engine builds need but loading a plugin does not, are left out unless ``--builder`` is
given. A version in the folder is not fetched again.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Release:
    """The sources of one TensorRT version: the Maven version of the libraries, the PyPI name of the bindings."""

    maven: str
    bindings: str


RELEASES = {
    "10.6": Release("10.6-1.5.11", "tensorrt_cu12_bindings==10.6.0.post2"),
    "10.15": Release("10.15-1.5.13", "tensorrt_cu13_bindings==10.15.1.29"),
    "11.2": Release("11.2-1.5.14", "tensorrt_cu13_bindings==11.2.1.2"),
}

LIBRARIES = ("libnvinfer.so", "libnvinfer_plugin.so", "libnvonnxparser.so")
BUILDER_LIBRARIES = ("libnvinfer_builder_resource",)

# Maven runs goals only in a folder that holds a project.
POM = """<project><modelVersion>4.0.0</modelVersion>
<groupId>local</groupId><artifactId>get-tensorrt</artifactId><version>1</version></project>
"""


class DownloadError(RuntimeError):
    """A client is missing or failed; the message says which and what to do."""


def run(command: list[str], cwd: Path) -> None:
    """Runs one client. Raises DownloadError with the end of its output."""
    if shutil.which(command[0]) is None:
        raise DownloadError(f"expected the program '{command[0]}' on PATH, found none; install it and call again")
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    if done.returncode != 0:
        tail = (done.stdout + done.stderr)[-800:].strip()
        raise DownloadError(f"'{' '.join(command[:4])} …' ended with status {done.returncode}:\n{tail}")


def fetch_libraries(release: Release, target: Path, work: Path, wanted: tuple[str, ...]) -> None:
    """Copies the jar of one release with Maven and extracts the wanted shared objects, flat, into target."""
    (work / "pom.xml").write_text(POM)
    artifact = f"org.bytedeco:tensorrt:{release.maven}:jar:linux-x86_64-redist"
    # A local repository in the work folder: otherwise the jar (0.5-1.1 GB) would stay in ~/.m2.
    run(
        ["mvn", "-B", "-q", "dependency:copy", f"-Dartifact={artifact}", f"-DoutputDirectory={work}",
         f"-Dmaven.repo.local={work / 'repository'}"],
        work,
    )  # fmt: skip
    target.mkdir(parents=True)
    with zipfile.ZipFile(next(work.glob("tensorrt-*-redist.jar"))) as jar:
        for info in jar.infolist():
            name = Path(info.filename).name
            if name.startswith(wanted):
                with jar.open(info) as source, open(target / name, "wb") as copy:
                    shutil.copyfileobj(source, copy, 1 << 20)
    if not any(target.glob("libnvinfer.so*")):
        raise DownloadError(f"expected libnvinfer.so in {artifact}, found {sorted(p.name for p in target.iterdir())}")


def fetch_bindings(release: Release, target: Path, work: Path) -> None:
    """Downloads the bindings' wheel for this Python and extracts it into target.

    ``--no-deps``: the wheel is complete; the package that it depends on is a downloader.
    """
    run(
        [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", str(work),
         release.bindings],
        work,
    )  # fmt: skip
    with zipfile.ZipFile(next(work.glob("tensorrt_*.whl"))) as wheel:
        wheel.extractall(target)


def get(version: str, root: Path, builder: bool) -> Path:
    """Completes the folder root/version and returns it; a failure leaves no half-written files. root is absolute."""
    done = root / version
    if done.exists():
        return done
    root.mkdir(parents=True, exist_ok=True)
    wanted = LIBRARIES + (BUILDER_LIBRARIES if builder else ())
    with tempfile.TemporaryDirectory(dir=root, prefix=".get-") as name:
        work = Path(name)
        fetch_libraries(RELEASES[version], work / "whole" / "lib", work, wanted)
        fetch_bindings(RELEASES[version], work / "whole" / "python", work)
        (work / "whole").rename(done)
    return done


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("versions", nargs="*", metavar="VERSION", help=f"any of {', '.join(RELEASES)} (default: all)")
    parser.add_argument("--dir", type=Path, default=Path("third_party/tensorrt"), help="default: %(default)s")
    parser.add_argument("--builder", action="store_true", help="also the builder resources, to build engines")
    arguments = parser.parse_args()
    unknown = sorted(set(arguments.versions) - set(RELEASES))
    if unknown:
        parser.error(f"expected versions among {', '.join(RELEASES)}, got {', '.join(unknown)}")
    for version in arguments.versions or RELEASES:
        try:
            print(f"TensorRT {version}: {get(version, arguments.dir.resolve(), arguments.builder)}", flush=True)
        except DownloadError as error:
            print(f"TensorRT {version}: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
