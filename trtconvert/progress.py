"""What a command says while it works, and in the end: bars and tables for people, JSON for programs, or nothing."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from typing import Annotated, Any, Literal, TextIO

from pydantic import BaseModel, Field, TypeAdapter
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from trtconvert.errors import TrtconvertError, kind_and_first_line

_PROGRESS_SECONDS = 0.5
"""Between two events of a stage's progress."""


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
        bar = Bar(self._bars, task, self._events)
        self._stop_if_asked()
        self._tell(StageStarted(stage=name))
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


class _Remaining(TimeRemainingColumn):
    """The time that is left, of a stage whose steps are counted."""

    def render(self, task: Any) -> Any:
        left = super().render(task)
        if task.finished or task.time_remaining is None:
            left.plain = ""
        else:
            left.append(" left")
        return left


class Bar:
    """The bar of one stage."""

    def __init__(self, bars: Progress, task: TaskID, events: Callable[[BaseModel], None] | None = None) -> None:
        self._bars, self._task, self._events = bars, task, events
        self._told = -_PROGRESS_SECONDS
        self.reused = False

    def total(self, steps: int) -> None:
        """How many calls of `step` there will be."""
        self._bars.update(self._task, total=steps, completed=0)

    def step(self) -> None:
        """One more step is done."""
        self._bars.advance(self._task)
        self._tell()

    def share(self, detail: str, done: float) -> None:
        """The share that is done, 0 to 1, and what is going on."""
        self._bars.update(self._task, total=1, completed=done, detail=detail)
        self._tell()

    def notice(self, text: str) -> None:
        """A line above the bars."""
        say(self._bars.console, f"notice: {text}")
        if self._events is not None:
            self._events(Notice(text=text))

    def _tell(self) -> None:
        task = self._bars.tasks[self._task]
        elapsed = task.elapsed or 0.0
        if self._events is None or elapsed < self._told + _PROGRESS_SECONDS:
            return
        self._told = elapsed
        done = min(1.0, task.completed / task.total) if task.total else 0.0
        self._events(
            StageProgress(
                stage=task.description,
                done=round(done, 4),
                elapsed_s=round(elapsed, 3),
                remaining_s=round(elapsed * (1 - done) / done, 1) if done else None,
                detail=str(task.fields["detail"]),
            )
        )
