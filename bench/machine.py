"""Helpers of the scripts: the name of the processor, and command lines."""

from __future__ import annotations

import functools
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from trtconvert.entry_point import look_in
from trtconvert.errors import TrtconvertError
from trtconvert.progress import Output


def processor() -> str:
    """Returns the name of the processor."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def speaking(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a click command its argument `out` and the option --json. Refusals are messages with exit code 2."""

    @click.option("--json", "as_json", is_flag=True, help="Print the result as a JSON object.")
    @functools.wraps(command)
    def wrapped(as_json: bool, **named: Any) -> None:
        look_in(Path())
        out = Output("json" if as_json else "text")
        try:
            with out.kept_clean():
                command(out=out, **named)
        except TrtconvertError as error:
            click.echo(f"error: {error}", err=True)
            sys.exit(error.exit_code)

    return wrapped
