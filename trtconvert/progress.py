"""What a command says while it works, and in the end: bars and tables for people, JSON for programs, or nothing."""

from __future__ import annotations

import datetime
import json
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, redirect_stdout
from typing import Annotated, Any, Literal, TextIO

from pydantic import BaseModel, Field, TypeAdapter
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text

from trtconvert.errors import TrtconvertError, kind_and_first_line

_PROGRESS_SECONDS = 0.5
"""Between two events of a stage's progress."""

_FIRST_LINE, _NEXT_LINES = 2.0, 30.0
"""Seconds from a stage's start to its first line, and from line to line, where the output is no terminal."""

_ALMOST = 0.99
"""The largest share that a stage is said to have done while it goes on."""


def say(console: Console, text: str) -> None:
    """A line that names a file: not broken within the path, whose brackets are no markup of rich's."""
    console.print(text, markup=False, emoji=False, soft_wrap=True)


class StageStarted(BaseModel):
    """A stage begins."""

    event: Literal["started"] = "started"
    stage: str


class StageProgress(BaseModel):
    """How far a stage is, twice a second at most."""

    event: Literal["progress"] = "progress"
    stage: str
    done: float = Field(ge=0, le=1, description="The share that is done.")
    elapsed_s: float
    remaining_s: float | None = Field(None, description="Estimated from the steps before; null until some are done.")
    detail: str = ""


class StageFinished(BaseModel):
    """A stage is done."""

    event: Literal["finished"] = "finished"
    stage: str
    elapsed_s: float
    reused: bool = Field(description="Whether the cache had it.")


class Notice(BaseModel):
    """What a person should know."""

    event: Literal["notice"] = "notice"
    text: str


class Failure(BaseModel):
    """The command ends without a result."""

    event: Literal["error"] = "error"
    kind: Literal["user", "failed", "internal", "interrupted"] = Field(
        description="The user's mistake, exit code 2; what failed here, as a gate that is missed, 1; a fault of trtconvert, 1; "
        "a signal, 128 and its number."
    )
    problem: str
    expected: str = ""
    got: str = ""
    remedy: str = ""
    exit_code: int


Event = Annotated[StageStarted | StageProgress | StageFinished | Notice | Failure, Field(discriminator="event")]


def events_schema() -> dict[str, Any]:
    """JSON schema of a line that `--json` writes to the standard error."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema"} | TypeAdapter(Event).json_schema()


def write_event(event: BaseModel) -> None:
    """One line of JSON on the standard error."""
    print(event.model_dump_json(), file=sys.stderr, flush=True)


def failure(error: BaseException, exit_code: int) -> Failure:
    """What ended a command, as an event."""
    if isinstance(error, TrtconvertError):
        kind = "user" if error.exit_code == 2 else "failed"
        words = {name: getattr(error, name) for name in ("problem", "expected", "got", "remedy")}
        return Failure(kind=kind, **words, exit_code=exit_code)
    if isinstance(error, KeyboardInterrupt):
        return Failure(kind="interrupted", problem="a signal asked the program to stop", exit_code=exit_code)
    return Failure(kind="internal", problem=kind_and_first_line(error), exit_code=exit_code)


class Output:
    """Where a command's words go.

    Args:
        form: "text", for people; "quiet", which leaves errors alone; "json", with events as lines on the standard error and the
            result as one object on the standard output.
        stopped: see `Reporter`.
    """

    def __init__(
        self, form: Literal["text", "quiet", "json"] = "text", stopped: Callable[[], bool] = lambda: False
    ) -> None:
        self.form, self._stopped, self._stdout = form, stopped, sys.stdout
        self.console = Console(highlight=False, quiet=form != "text")

    @contextmanager
    def kept_clean(self) -> Iterator[None]:
        """What libraries print inside this block goes to the standard error, where the standard output is the result's."""
        if self.form == "json":
            with redirect_stdout(sys.stderr):
                yield
        else:
            yield

    def silence(self) -> None:
        """Say nothing more but errors: this process is one of several that share the work."""
        self.form, self.console.quiet = "quiet", True

    def reporter(self) -> Reporter:
        """Of the command's stages."""
        return Reporter(self.console, self._stopped, write_event if self.form == "json" else None)

    def result(self, values: Mapping[str, Any], *lines: str, show: Callable[[Console], None] | None = None) -> None:
        """The end of a command.

        Args:
            values: for programs; paths become text. docs/automation.md lists them.
            lines, show: the same for people: lines, after what a function prints.
        """
        if self.form == "json":
            write_result(self._stdout, values)
        if self.form == "text":
            if show is not None:
                show(self.console)
            for line in lines:
                say(self.console, line)


def write_result(stream: TextIO, values: Mapping[str, Any]) -> None:
    """One line of JSON. Infinities, which JSON has not, become null."""
    text = json.dumps(values, default=str, ensure_ascii=False)
    if "Infinity" in text or "NaN" in text:
        text = json.dumps(json.loads(text, parse_constant=lambda _: None), ensure_ascii=False)
    print(text, file=stream, flush=True)


class Reporter:
    """Shows a bar per stage and keeps the stages' times.

    Args:
        stopped: whether the user asked to stop. Asked at the edges of stages: an interrupt that arrives while a library is
            being imported can get lost on its way up.
        events: told what happens, beside the console.

    Attributes:
        console: where everything goes.
        seconds: time of each stage, in order.
        reused: stages that the cache answered.
    """

    def __init__(
        self,
        console: Console,
        stopped: Callable[[], bool] = lambda: False,
        events: Callable[[BaseModel], None] | None = None,
    ) -> None:
        self.console = console
        self._stopped, self._events = stopped, events
        self.seconds: dict[str, float] = {}
        self.reused: set[str] = set()
        self._lines = False
        self._bars = Progress(
            SpinnerColumn(),
            # Names of layers have brackets, which are no markup of rich's.
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.fields[detail]}", markup=False),
            TimeElapsedColumn(),
            _Remaining(),
            console=console,
        )

    @contextmanager
    def live(self) -> Iterator[None]:
        """Bars are drawn inside this block; where the output is no terminal, lines tell of stages that take their time."""
        self._lines = not self.console.quiet and not self.console.is_interactive
        try:
            with self._bars:
                yield
        finally:
            self._lines = False

    @contextmanager
    def stage(self, name: str) -> Iterator[Bar]:
        """One stage and its bar.

        Raises:
            KeyboardInterrupt: the user asked to stop.
        """
        started = time.perf_counter()
        task = self._bars.add_task(name, total=None, detail="", left=None)
        bar = Bar(self._bars, task, self._events)
        self._stop_if_asked()
        self._tell(StageStarted(stage=name))
        with _lines(bar) if self._lines else nullcontext():
            yield bar
        self._stop_if_asked()
        self.seconds[name] = time.perf_counter() - started
        if bar.reused:
            self.reused.add(name)
        self._bars.update(task, total=1, completed=1, detail="from the cache" if bar.reused else "")
        self._tell(StageFinished(stage=name, elapsed_s=round(self.seconds[name], 3), reused=bar.reused))

    def notice(self, text: str) -> None:
        """What a person should know, above the bars."""
        say(self.console, f"notice: {text}")
        self._tell(Notice(text=text))

    def _tell(self, event: BaseModel) -> None:
        if self._events is not None:
            self._events(event)

    def _stop_if_asked(self) -> None:
        if self._stopped():
            raise KeyboardInterrupt


@contextmanager
def _lines(bar: Bar) -> Iterator[None]:
    """A line about a stage soon after it began, and then now and then, however long its steps take."""
    ended = threading.Event()

    def tell() -> None:
        pause = _FIRST_LINE
        while not ended.wait(pause):
            bar.print_line()
            pause = _NEXT_LINES

    thread = threading.Thread(target=tell, daemon=True, name="progress")
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


class _Remaining(ProgressColumn):
    """The time that is left, of a stage whose steps are counted."""

    def render(self, task: Any) -> Text:
        """See rich."""
        left = task.fields["left"]
        seconds = None if task.finished or left is None else left()
        return Text("" if seconds is None else f"{_clock(seconds)} left", style="progress.remaining")


def _clock(seconds: float) -> str:
    return str(datetime.timedelta(seconds=round(seconds)))


class Bar:
    """The bar of one stage. It is never full before the stage is done: with more steps than it was told of, the total grows.

    Attributes:
        reused: whether the cache had the stage.
    """

    def __init__(self, bars: Progress, task: TaskID, events: Callable[[BaseModel], None] | None = None) -> None:
        self._bars, self._task, self._events = bars, task, events
        self._told = -_PROGRESS_SECONDS
        self._total: float | None = None
        self._expected = self._done = self._within = self._skipped = self._moved = 0.0
        self.reused = False
        bars.update(task, left=self.left)

    def total(self, steps: float) -> None:
        """How many calls of `step` there will be."""
        self._total = self._expected = steps
        self._show()

    def more(self, steps: float) -> None:
        """So many steps more than were told of before."""
        self.total(self._expected + steps)

    def step(self, count: float = 1) -> None:
        """One more step is done, or one that takes as long as several."""
        self._done += count
        self._within = 0.0
        self._show()
        self._tell()

    def skip(self, count: float = 1) -> None:
        """One more step need not be done: it took no time, and says nothing of what the others take."""
        self._skipped += count
        self.step(count)

    def within(self, share: float, count: float = 1) -> None:
        """The share, 0 to 1, of the step that is under way, which takes as long as several."""
        self._within = count * min(share, _ALMOST)
        self._show()
        self._tell()

    def share(self, detail: str, done: float) -> None:
        """The share that is done, 0 to 1, and what is going on."""
        self._total, self._expected, self._done, self._within = 1.0, 1.0, done, 0.0
        self._show(detail=detail)
        self._tell()

    def notice(self, text: str) -> None:
        """A line above the bars."""
        say(self._bars.console, f"notice: {text}")
        if self._events is not None:
            self._events(Notice(text=text))

    def left(self) -> float | None:
        """Seconds that are left, by what the steps before took; None where nobody knows."""
        worked = self._done + self._within - self._skipped
        if not self._total or worked <= 0:
            return None
        left = self._moved * max(0.0, self._total - self._done - self._within) / worked
        return max(0.0, left - (self._elapsed() - self._moved))

    def print_line(self) -> None:
        """Say how far the stage is in a line."""
        task = self._bars.tasks[self._task]
        words = [f"{_clock(self._elapsed())} so far"]
        if self._total is not None:
            share = f"{math.floor(100 * self._share() + 1e-6)} %"
            counted = f"{self._done:.0f} of {self._total:.0f} done, " if self._expected > 1 else ""
            words.insert(0, counted + share)
        if (left := self.left()) is not None:
            words.append(f"about {_clock(left)} left" if round(left) else "finishing")
        if detail := str(task.fields["detail"]):
            words.append(detail)
        say(self._bars.console, f"{task.description}: {', '.join(words)}")

    def _elapsed(self) -> float:
        return self._bars.tasks[self._task].elapsed or 0.0

    def _share(self) -> float:
        return min(_ALMOST, (self._done + self._within) / self._total) if self._total else 0.0

    def _show(self, **fields: Any) -> None:
        while self._total is not None and self._done > self._total:
            self._total += max(1.0, self._expected)
        self._moved = self._elapsed()
        if self._total is not None:
            self._bars.update(self._task, total=1.0, completed=self._share(), **fields)

    def _tell(self) -> None:
        elapsed = self._elapsed()
        if self._events is None or elapsed < self._told + _PROGRESS_SECONDS:
            return
        self._told = elapsed
        task, left = self._bars.tasks[self._task], self.left()
        self._events(
            StageProgress(
                stage=task.description,
                done=round(self._share(), 4),
                elapsed_s=round(elapsed, 3),
                remaining_s=None if left is None else round(left, 1),
                detail=str(task.fields["detail"]),
            )
        )
