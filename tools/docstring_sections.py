"""Docstrings as the API reference reads them: its parser wants an empty line before `Args`, `Returns` and `Raises`."""

from __future__ import annotations

import re
from typing import Any

import griffe

_SECTION = re.compile(r"\n(?=(?:Args|Attributes|Returns|Raises|Yields):)")


class DocstringSections(griffe.Extension):
    """Separates the sections of every docstring."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = _SECTION.sub("\n\n", obj.docstring.value)
