"""Progress of a build on the terminal."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn


def say(console: Console, text: str) -> None:
    """A line that names a file: not broken within the path, whose brackets are no markup of rich's."""
    console.print(text, markup=False, soft_wrap=True)


class Reporter:
    """Shows a bar per stage and keeps the stages' times.

    Args:
        stopped: whether the user asked to stop. Asked at the edges of stages: an interrupt that arrives while a library is
            being imported can get lost on its way up.

    Attributes:
        console: where everything goes.
        seconds: time of each stage, in order.
        reused: stages that the cache answered.
    """

    def __init__(self, console: Console, stopped: Callable[[], bool] = lambda: False) -> None:
        self.console = console
        self._stopped = stopped
        self.seconds: dict[str, float] = {}
        self.reused: set[str] = set()
        self._bars = Progress(
            SpinnerColumn(),
            # Names of layers have brackets, which are no markup of rich's.
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.fields[detail]}", markup=False),
            TimeElapsedColumn(),
            console=console,
        )

    @contextmanager
    def live(self) -> Iterator[None]:
        """Bars are drawn inside this block."""
        with self._bars:
            yield

    @contextmanager
    def stage(self, name: str) -> Iterator[Bar]:
        """One stage and its bar.

        Raises:
            KeyboardInterrupt: the user asked to stop.
        """
        started = time.perf_counter()
        task = self._bars.add_task(name, total=None, detail="")
        bar = Bar(self._bars, task)
        self._stop_if_asked()
        yield bar
        self._stop_if_asked()
        self.seconds[name] = time.perf_counter() - started
        if bar.reused:
            self.reused.add(name)
        self._bars.update(task, total=1, completed=1, detail="from the cache" if bar.reused else "")

    def _stop_if_asked(self) -> None:
        if self._stopped():
            raise KeyboardInterrupt


class Bar:
    """The bar of one stage."""

    def __init__(self, bars: Progress, task: TaskID) -> None:
        self._bars, self._task = bars, task
        self.reused = False

    def total(self, steps: int) -> None:
        """How many calls of `step` there will be."""
        self._bars.update(self._task, total=steps, completed=0)

    def step(self) -> None:
        """One more step is done."""
        self._bars.advance(self._task)

    def share(self, detail: str, done: float) -> None:
        """The share that is done, 0 to 1, and what is going on."""
        self._bars.update(self._task, total=1, completed=done, detail=detail)

    def notice(self, text: str) -> None:
        """A line above the bars."""
        self._bars.console.print(f"notice: {text}", markup=False)
