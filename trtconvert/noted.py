"""What observers note of the calls of a forward, in the order of the calls."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, replace
from typing import Any, Generic, TypeVar

from torch import Tensor

Entry = TypeVar("Entry")


class Notes(Generic[Entry]):
    """Entries by the name of what was called. An entry is a dataclass of tensors, dicts of tensors and plain values.

    A forward that a CUDA graph repeats runs no Python. Whoever repeats the forward takes the entries of the recorded forward by
    `cut`, and gives copies of them after each repetition by `add_copies`.
    """

    def __init__(self) -> None:
        self._entries: list[tuple[str, Entry]] = []

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, name: str, entry: Entry) -> None:
        self._entries.append((name, entry))

    def take(self) -> dict[str, list[tuple[int, Entry]]]:
        """By name, the entries since the last `take`, each with its place among the entries of all names."""
        found: dict[str, list[tuple[int, Entry]]] = {}
        for place, (name, entry) in enumerate(self._entries):
            found.setdefault(name, []).append((place, entry))
        self._entries = []
        return found

    def cut(self, start: int) -> list[tuple[str, Entry]]:
        """Remove and return the entries from place `start` on."""
        cut = self._entries[start:]
        del self._entries[start:]
        return cut

    def add_copies(self, entries: Iterable[tuple[str, Entry]]) -> None:
        """Add entries with copies of their tensors. A tensor that several entries share is copied once."""
        copies: dict[int, Tensor] = {}

        def copied(x: Any) -> Any:
            if isinstance(x, Tensor):
                if id(x) not in copies:
                    copies[id(x)] = x.clone()
                return copies[id(x)]
            return {name: copied(y) for name, y in x.items()} if isinstance(x, dict) else x

        for name, entry in entries:
            values = {f.name: copied(getattr(entry, f.name)) for f in fields(entry)}  # type: ignore[arg-type]
            self.add(name, replace(entry, **values))  # type: ignore[type-var]
