"""Errors for users. Every message says what was expected, what came, and what to do."""

from __future__ import annotations

import difflib
import sys
import warnings
from collections.abc import Iterable, Sequence
from typing import Self


class TrtconvertError(Exception):
    """A failure with a remedy.

    Args:
        problem: one sentence that names the fault.
        expected: the right input or state.
        got: the actual input or state.
        remedy: the user's next step.
    """

    exit_code = 1

    def __init__(self, problem: str, *, expected: str = "", got: str = "", remedy: str = "") -> None:
        self.problem, self.expected, self.got, self.remedy = problem, expected, got, remedy
        lines = [problem]
        lines += [
            f"  {label}: {text}" for label, text in (("expected", expected), ("got", got), ("remedy", remedy)) if text
        ]
        super().__init__("\n".join(lines))

    def about(self, what: str) -> Self:
        """Returns the same error with its subject before the problem."""
        return type(self)(f"{what}: {self.problem}", expected=self.expected, got=self.got, remedy=self.remedy)


class UserError(TrtconvertError):
    """A wrong input: recipe, path, shape, bundle or command line. Exit code 2."""

    exit_code = 2


class GateError(TrtconvertError):
    """The build ran, but its result misses a quality gate. Exit code 1."""


class BackendUnavailable(TrtconvertError):
    """A backend cannot build or run on this machine; another machine, package or backend is needed. Exit code 2."""

    exit_code = 2


class Advice(RuntimeWarning):
    """A warning with a remedy. Commands print its text alone."""


def warn(text: str) -> None:
    """Issues `Advice` at the line outside this package that called the package."""
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(f"{__package__}."):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, Advice, stacklevel=level)


def did_you_mean(got: str, valid: Iterable[str], otherwise: str) -> str:
    """Returns a remedy for an invalid name: the nearest valid name, or `otherwise` if none is near."""
    near = difflib.get_close_matches(got, list(valid), n=1, cutoff=0.5)
    return f"did you mean '{near[0]}'?" if near else otherwise


def unknown_name(problem: str, got: str, valid: Iterable[str], otherwise: str, none: str = "none") -> UserError:
    """Returns the error for a name that is not among the valid ones.

    Args:
        otherwise: the remedy if no valid name is near.
        none: what to expect where no name is valid.
    """
    names = list(valid)
    return UserError(problem, expected=", ".join(names) or none, got=got, remedy=did_you_mean(got, names, otherwise))


def unfit_option(
    option: str, expected: str, got: object, remedy: str = "correct it in the recipe, or leave it out"
) -> UserError:
    """Returns the error for a value of `model.options`."""
    return UserError(f"model.options.{option} does not fit", expected=expected, got=repr(got), remedy=remedy)


def several(names: Sequence[str], most: int) -> str:
    """Joins the first `most` names and the number of further names."""
    further = len(names) - most
    return ", ".join(names[:most]) + (f" and {further} more" if further > 0 else "")


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message, or the name of its class if the message is empty."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def first_problem(error: Exception) -> str:
    """Returns the first problem of pydantic's errors with its location; of another error the first line."""
    from pydantic import ValidationError

    if not isinstance(error, ValidationError):
        return first_line(error)
    first = error.errors()[0]
    place, problem = ".".join(map(str, first["loc"])), first["msg"].removeprefix("Value error, ")
    return f"{place}: {problem}" if place else problem


def kind_and_first_line(error: BaseException) -> str:
    """Returns an error's class and first line: the first line of `KeyError("x")` alone is `'x'`."""
    kind, line = type(error).__name__, first_line(error)
    return kind if line == kind else f"{kind}: {line}"
