"""Installs the packages of `make wheel` into fresh environments, and converts the demo there: `make check-wheel`.

The environments do not use the checkout. pip installs everything, the sdist compiles its library, and the demo is built
unchanged. With --quick, dependencies and the sdist's library come from the current environment, and only the wheel builds
the demo, on fewer samples.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

import click

from trtconvert.library import library_path

ROOT = Path(__file__).parents[1]
DIST = ROOT / "out" / "dist"

_WHERE = """
import pathlib, sys, trtconvert
from trtconvert.library import library_path, load_library
from trtconvert.shipped import shipped_models
load_library()
for place in (trtconvert.__file__, library_path()):
    assert pathlib.Path(place).is_relative_to(sys.prefix), f"{place} lies outside of {sys.prefix}"
assert "digits-dit" in shipped_models()
"""


@click.command()
@click.option(
    "--quick", is_flag=True, help="With the dependencies and the library of this environment, and few samples."
)
@click.option("--only", type=click.Choice(["wheel", "sdist"]), help="One of the two.")
def main(quick: bool, only: str | None) -> None:
    """Install the packages in out/dist, and use them."""
    for kind, pattern in {"wheel": "*-manylinux*.whl", "sdist": "*.tar.gz"}.items():
        if only in (None, kind):
            found = sorted(DIST.glob(pattern))
            if len(found) != 1:
                sys.exit(f"error: expected one {kind} in {DIST}, got {len(found)}: run `make wheel`")
            started = time.perf_counter()
            with tempfile.TemporaryDirectory(prefix="trtconvert-dist-") as folder:
                _check(found[0], Path(folder), quick)
            print(f"{found[0].name}: installed and tried, {time.perf_counter() - started:.0f} s", flush=True)


def _check(dist: Path, folder: Path, quick: bool) -> None:
    """
    Args:
        folder: an empty one, for the environment, the bundle and the cache.
    """
    # A clean machine lacks the settings of this shell.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    if quick and (bytecode := os.environ.get("PYTHONPYCACHEPREFIX")):
        environment["PYTHONPYCACHEPREFIX"] = bytecode  # of the dependencies, which are those of the current environment

    def run(*command: object) -> None:
        done = subprocess.run(
            list(map(str, command)), cwd=folder, env=environment, text=True, capture_output=True, errors="replace"
        )
        if done.returncode:
            sys.exit(f"error: {' '.join(map(str, command))} ended with {done.returncode}\n{done.stdout}{done.stderr}")

    # pip is one of the dependencies; unpacking one of its own into an environment takes four seconds.
    run(sys.executable, "-m", "venv", *(["--without-pip"] if quick else []), "venv")
    binaries = folder / "venv" / "bin"
    install = (binaries / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    if quick:
        here = sysconfig.get_path("purelib")
        site = next((folder / "venv" / "lib").iterdir()) / "site-packages"
        # A plain path hides editable installations.
        (site / "dependencies.pth").write_text(f"{here}\n")
        options = ("-C", f"cmake.define.TRTCONVERT_LIBRARY={library_path()}") if dist.suffix == ".gz" else ()
        run(*install, "--no-deps", "--no-build-isolation", *options, dist)
    else:
        run(*install, "--constraint", ROOT / "constraints.txt", f"{dist}[rtx]")
    run(binaries / "python", "-c", _WHERE)
    if quick and dist.suffix == ".gz":
        return  # the files equal the wheel's, which was built
    trtconvert, recipe = binaries / "trtconvert", "digits-dit"
    if quick:
        run(trtconvert, "init", recipe, "-o", recipe := "quick.yaml")
        (folder / recipe).write_text(_with_few_samples((folder / recipe).read_text(encoding="utf-8")), encoding="utf-8")
    run(trtconvert, "build", recipe, "-o", "out/demo", "--cache", folder / "cache")
    run(trtconvert, "inspect", "out/demo")
    run(trtconvert, "run", "out/demo", "-n", 4, "--steps", 4, "-o", "samples.png")


def _with_few_samples(recipe: str) -> str:
    for pattern, less in (
        ("modes: auto", "modes: precision"),
        ("samples: 64", "samples: 4"),
        (r"steps: \d+", "steps: 10"),
        (r"targets: .*", "targets: [sm86]"),
        (r"(?s)\nplan:.*?\n\n", "\n"),
    ):
        recipe, found = re.subn(pattern, less, recipe)
        assert found, f"the recipe has no {pattern}"
    return recipe


if __name__ == "__main__":
    main()
