"""Prints the requirements of the package and of the named extras, one a line. pip does not install requirements alone."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

PROJECT = Path(__file__).parents[1] / "pyproject.toml"


def requirements(*extras: str) -> list[str]:
    """Returns the requirements as pyproject.toml states them. Raises KeyError for an extra that it does not have."""
    project = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]
    return [*project["dependencies"], *(line for extra in extras for line in project["optional-dependencies"][extra])]


if __name__ == "__main__":
    sys.stdout.write("\n".join(requirements(*sys.argv[1:])) + "\n")
