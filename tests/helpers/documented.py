"""The pages of the documentation and their blocks of code."""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support import REPOSITORY

PAGES = [REPOSITORY / "README.md", *sorted(REPOSITORY.glob("docs/**/*.md"))]
BLOCK = re.compile(r"^ *```(\w*)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
"""What the fence names, and the text."""


@dataclass(frozen=True)
class Block:
    """A block of code.

    Attributes:
        line: of the fence, from 1.
        kind: what the fence names: python, yaml, or nothing.
    """

    page: Path
    line: int
    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"

    def run(self, names: dict[str, Any]) -> None:
        """Run it as it is printed, among these names. Tracebacks and syntax errors name the page and its line."""
        exec(compile("\n" * self.line + self.text, str(self.page), "exec"), names)


def blocks(kind: str) -> list[Block]:
    found = list[Block]()
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        found += [
            Block(page, text.count("\n", 0, m.start()) + 1, m[1], textwrap.dedent(m[2])) for m in BLOCK.finditer(text)
        ]
    return [block for block in found if block.kind == kind]
