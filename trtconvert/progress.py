"""Progress and results of commands: bars and tables for people, JSON for programs, or nothing."""

from __future__ import annotations

import datetime
import json
import math
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, redirect_stdout
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

from trtconvert.errors import Advice, TrtconvertError, kind_and_first_line

_PROGRESS_SECONDS = 0.5
"""Shortest time between two progress events of a stage."""

_FIRST_LINE, _NEXT_LINES = 2.0, 30.0
"""Seconds from a stage's start to its first line, and between lines, if the output is not a terminal."""

_ALMOST = 0.99
"""Largest shown share of a running stage."""


def say(console: Console, text: str) -> None:
    """Prints a line without wrapping, and without reading brackets as rich's markup."""
    console.print(text, markup=False, emoji=False, soft_wrap=True)


class StageStarted(BaseModel):
    """A stage starts."""

    event: Literal["started"] = "started"
    stage: str


class StageProgress(BaseModel):
    """Progress of a stage, twice a second at most."""

    event: Literal["progress"] = "progress"
    stage: str
    done: float = Field(ge=0, le=1, description="Finished share of the stage.")
    elapsed_s: float
    remaining_s: float | None = Field(None, description="Estimate from the finished steps; null before the first.")
    detail: str = ""


class StageFinished(BaseModel):
    """A stage ends."""

    event: Literal["finished"] = "finished"
    stage: str
    elapsed_s: float
    reused: bool = Field(description="True if the cache had the stage's result.")
    bytes: int = Field(0, description="Size of the stage's files in the cache.")
    gpu_bytes: int | None = Field(
        None, description="Largest GPU memory that PyTorch allocated in the stage; null if PyTorch used no GPU."
    )


class Notice(BaseModel):
    """A message for people."""

    event: Literal["notice"] = "notice"
    text: str


class Failure(BaseModel):
    """The command ends without a result."""

    event: Literal["error"] = "error"
    kind: Literal["user", "failed", "internal", "interrupted"] = Field(
        description="`user`: a mistake of the user, exit code 2; `failed`: for example a missed gate, 1; `internal`: a bug of "
        "trtconvert, 1; `interrupted`: by signal N, 128 + N."
    )
    problem: str
    expected: str = ""
    got: str = ""
    remedy: str = ""
    exit_code: int


Event = Annotated[StageStarted | StageProgress | StageFinished | Notice | Failure, Field(discriminator="event")]


def events_schema() -> dict[str, Any]:
    """Returns the JSON schema of a line that `--json` prints to stderr."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema"} | TypeAdapter(Event).json_schema()


def write_event(event: BaseModel) -> None:
    """Prints an event as a line of JSON to stderr."""
    print(event.model_dump_json(), file=sys.stderr, flush=True)


def failure(error: BaseException, exit_code: int) -> Failure:
    """Returns the event for the error that ended a command."""
    if isinstance(error, TrtconvertError):
        kind = "user" if error.exit_code == 2 else "failed"
        words = {name: getattr(error, name) for name in ("problem", "expected", "got", "remedy")}
        return Failure(kind=kind, **words, exit_code=exit_code)
    if isinstance(error, KeyboardInterrupt):
        return Failure(kind="interrupted", problem="a signal asked the program to stop", exit_code=exit_code)
    return Failure(kind="internal", problem=kind_and_first_line(error), exit_code=exit_code)


class Output:
    """The output of a command.

    Args:
        form: "text" for people; "quiet" for errors only; "json" for events as lines on stderr and the result as one object on
            stdout.
        stopped: see `Reporter`.
    """

    def __init__(
        self, form: Literal["text", "quiet", "json"] = "text", stopped: Callable[[], bool] = lambda: False
    ) -> None:
        self.form, self._stopped, self._stdout = form, stopped, sys.stdout
        self.console = Console(highlight=False, quiet=form != "text")

    @contextmanager
    def kept_clean(self) -> Iterator[None]:
        """Inside the block, stdout is redirected to stderr if it is reserved for the JSON result, and warnings of this package
        are printed as notices, without a line of code."""
        with ExitStack() as stack:
            if self.form == "json":
                stack.enter_context(redirect_stdout(sys.stderr))
            stack.enter_context(warnings.catch_warnings())
            others = warnings.showwarning

            def show(message: Warning | str, category: type[Warning], *place: Any) -> None:
                if issubclass(category, Advice):
                    self.reporter().notice(str(message))
                else:
                    others(message, category, *place)

            warnings.showwarning = show
            yield

    def silence(self) -> None:
        """Prints errors only from now on, in a process that shares the work with others."""
        self.form, self.console.quiet = "quiet", True

    def reporter(self) -> Reporter:
        """Makes a reporter of the command's stages."""
        return Reporter(self.console, self._stopped, write_event if self.form == "json" else None)

    def result(self, values: Mapping[str, Any], *lines: str, show: Callable[[Console], None] | None = None) -> None:
        """Prints the result of a command.

        Args:
            values: the result for programs, listed in docs/automation.md; paths become text.
            lines: the result for people, printed after `show`.
            show: prints to the console.
        """
        if self.form == "json":
            write_result(self._stdout, values)
        if self.form == "text":
            if show is not None:
                show(self.console)
            for line in lines:
                say(self.console, line)


def write_result(stream: TextIO, values: Mapping[str, Any]) -> None:
    """Prints one line of JSON. Infinities and NaN, which JSON does not have, become null."""
    text = json.dumps(values, default=str, ensure_ascii=False)
    if "Infinity" in text or "NaN" in text:
        text = json.dumps(json.loads(text, parse_constant=lambda _: None), ensure_ascii=False)
    print(text, file=stream, flush=True)


class Reporter:
    """Shows a bar per stage and keeps the stages' times and sizes.

    Args:
        console: the console of bars and lines.
        stopped: returns whether the user asked to stop. Called before and after each stage, because an interrupt during the
            import of a library can get lost.
        events: called with each event.

    Attributes:
        seconds: time of each stage, in order.
        reused: stages whose result came from the cache.
        bytes: size of each stage's files.
        gpu_bytes: largest GPU memory that PyTorch allocated in each stage; only stages since PyTorch uses a GPU.
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
        self.bytes: dict[str, int] = {}
        self.gpu_bytes: dict[str, int] = {}
        self._lines = False
        self._bars = Progress(
            SpinnerColumn(),
            # Names of layers hold brackets, which are not markup.
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.fields[detail]}", markup=False),
            TimeElapsedColumn(),
            _Remaining(),
            console=console,
        )

    @contextmanager
    def live(self) -> Iterator[None]:
        """Draws bars inside the block, or prints lines about long stages if the output is not a terminal."""
        self._lines = not self.console.quiet and not self.console.is_interactive
        try:
            with self._bars:
                yield
        finally:
            self._lines = False

    @contextmanager
    def stage(self, name: str) -> Iterator[Bar]:
        """Runs the block as one stage with a bar.

        Raises:
            KeyboardInterrupt: the user asked to stop.
        """
        started = time.perf_counter()
        if (cuda := _cuda_in_use()) is not None:
            cuda.reset_peak_memory_stats()
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
        self.bytes[name] = bar.bytes
        if (cuda := _cuda_in_use()) is not None:
            self.gpu_bytes[name] = cuda.max_memory_allocated()
        self._bars.update(task, total=1, completed=1, detail="from the cache" if bar.reused else "")
        self._tell(
            StageFinished(
                stage=name,
                elapsed_s=round(self.seconds[name], 3),
                reused=bar.reused,
                bytes=bar.bytes,
                gpu_bytes=self.gpu_bytes.get(name),
            )
        )

    def notice(self, text: str) -> None:
        """Prints a message above the bars."""
        say(self.console, f"notice: {text}")
        self._tell(Notice(text=text))

    def _tell(self, event: BaseModel) -> None:
        if self._events is not None:
            self._events(event)

    def _stop_if_asked(self) -> None:
        if self._stopped():
            raise KeyboardInterrupt


def _cuda_in_use() -> Any | None:
    """Returns torch.cuda if this process uses a GPU through PyTorch. Does not import torch."""
    torch = sys.modules.get("torch")
    return torch.cuda if torch is not None and torch.cuda.is_initialized() else None


@contextmanager
def _lines(bar: Bar) -> Iterator[None]:
    """Prints lines about a stage at intervals, however long its steps take."""
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
    """Column of the remaining time."""

    def render(self, task: Any) -> Text:
        """Renders the remaining time of a task."""
        left = task.fields["left"]
        seconds = None if task.finished or left is None else left()
        return Text("" if seconds is None else f"{_clock(seconds)} left", style="progress.remaining")


def _clock(seconds: float) -> str:
    return str(datetime.timedelta(seconds=round(seconds)))


class Bar:
    """The bar of one stage. If there are more steps than announced, the total grows, so that a running stage is never full.

    Attributes:
        reused: True if the stage's result came from the cache.
        bytes: size of the stage's files.
    """

    def __init__(self, bars: Progress, task: TaskID, events: Callable[[BaseModel], None] | None = None) -> None:
        self._bars, self._task, self._events = bars, task, events
        self._told = -_PROGRESS_SECONDS
        self._total: float | None = None
        self._expected = self._done = self._within = self._skipped = self._moved = 0.0
        self.reused = False
        self.bytes = 0
        bars.update(task, left=self.left)

    def total(self, steps: float) -> None:
        """Sets the number of steps."""
        self._total = self._expected = steps
        self._show()

    def more(self, steps: float) -> None:
        """Adds to the number of steps."""
        self.total(self._expected + steps)

    def step(self, count: float = 1) -> None:
        """Counts a finished step that takes as long as `count` steps."""
        self._done += count
        self._within = 0.0
        self._show()
        self._tell()

    def skip(self, count: float = 1) -> None:
        """Counts a step that was skipped, which does not enter the estimate of the remaining time."""
        self._skipped += count
        self.step(count)

    def within(self, share: float, count: float = 1) -> None:
        """Sets the finished share, 0 to 1, of the running step, which takes as long as `count` steps."""
        self._within = count * min(share, _ALMOST)
        self._show()
        self._tell()

    def share(self, detail: str, done: float) -> None:
        """Sets the finished share of the stage, 0 to 1, and a text about the current work."""
        self._total, self._expected, self._done, self._within = 1.0, 1.0, done, 0.0
        self._show(detail=detail)
        self._tell()

    def notice(self, text: str) -> None:
        """Prints a message above the bars."""
        say(self._bars.console, f"notice: {text}")
        if self._events is not None:
            self._events(Notice(text=text))

    def left(self) -> float | None:
        """Estimates the remaining seconds from the finished steps; None before the first."""
        worked = self._done + self._within - self._skipped
        if not self._total or worked <= 0:
            return None
        left = self._moved * max(0.0, self._total - self._done - self._within) / worked
        return max(0.0, left - (self._elapsed() - self._moved))

    def print_line(self) -> None:
        """Prints the progress as a line."""
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
