"""The interface of long work for progress reports."""

from __future__ import annotations

from typing import Protocol


class Steps(Protocol):
    """Receives progress."""

    def total(self, steps: float) -> None:
        """See `trtconvert.progress.Bar`."""

    def more(self, steps: float) -> None:
        """See `trtconvert.progress.Bar`."""

    def step(self, count: float = 1) -> None:
        """See `trtconvert.progress.Bar`."""

    def skip(self, count: float = 1) -> None:
        """See `trtconvert.progress.Bar`."""

    def within(self, share: float, count: float = 1) -> None:
        """See `trtconvert.progress.Bar`."""


class NoBar(Steps):
    """Ignores progress."""
