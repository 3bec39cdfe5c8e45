"""The errors a user can act on. Every message says what was expected, what came, and what to do about it."""

from __future__ import annotations

import difflib
import sys
import warnings
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import ValidationError


class TrtconvertError(Exception):
    """A failure with a remedy.

    Args:
        problem: one sentence naming the thing that is wrong.
        expected: what would have been right.
        got: what was found instead.
        remedy: what the user can do.
    """

    exit_code = 1

    def __init__(self, problem: str, *, expected: str = "", got: str = "", remedy: str = "") -> None:
        self.problem, self.expected, self.got, self.remedy = problem, expected, got, remedy
        lines = [problem]
        lines += [
            f"  {label}: {text}" for label, text in (("expected", expected), ("got", got), ("remedy", remedy)) if text
        ]
        super().__init__("\n".join(lines))


class UserError(TrtconvertError):
    """The input is wrong: a recipe, a path, a shape, a bundle, a command line. Exit code 2."""

    exit_code = 2


class GateError(TrtconvertError):
    """The build ran, and what it made is not good enough. Exit code 1."""


class BackendUnavailable(TrtconvertError):
    """A backend cannot build or run on this machine. Exit code 2: another machine, package or backend is needed."""

    exit_code = 2


def warn(text: str) -> None:
    """A RuntimeWarning of the line outside of this package that called into it."""
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(f"{__package__}."):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, RuntimeWarning, stacklevel=level)


def did_you_mean(got: str, valid: Iterable[str], otherwise: str) -> str:
    """A remedy for a name that is none of the valid ones: the nearest of them, or something else where none is near."""
    near = difflib.get_close_matches(got, list(valid), n=1, cutoff=0.5)
    return f"did you mean '{near[0]}'?" if near else otherwise


def several(names: Sequence[str], most: int) -> str:
    """The first few of some names, and how many there are beside them."""
    further = len(names) - most
    return ", ".join(names[:most]) + (f" and {further} more" if further > 0 else "")


def first_line(error: BaseException) -> str:
    """What an error of another library says first, for `got`; the name of its class where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def first_problem(error: ValidationError) -> str:
    """What pydantic found first, with its place where that is not the whole."""
    first = error.errors()[0]
    place = ".".join(map(str, first["loc"]))
    return f"{place}: {first['msg']}" if place else first["msg"]


def kind_and_first_line(error: BaseException) -> str:
    """The same after its class, for what may be anything: of `KeyError("x")` the first line alone is `'x'`."""
    kind, line = type(error).__name__, first_line(error)
    return kind if line == kind else f"{kind}: {line}"
