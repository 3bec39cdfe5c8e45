"""Packages of the `evaluate` extra."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from trtconvert.errors import UserError

REMEDY = "pip install 'trtconvert[evaluate]'"


def require(module: str, package: str) -> Any:
    """Imports a module of an optional package.

    Raises:
        UserError: the package is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(
            f"this metric needs {package}", expected=f"the package {package}", got=str(error), remedy=REMEDY
        ) from error


def require_installed(module: str) -> None:
    """Raises UserError if a package is not installed, without importing it."""
    if importlib.util.find_spec(module) is None:
        raise UserError(
            f"a figure of the plan needs {module}",
            expected=f"the package {module.replace('_', '-')}",
            got="not installed",
            remedy=REMEDY,
        )
