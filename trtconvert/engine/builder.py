"""Building a strongly typed plan from ONNX: what TensorRT and TensorRT-RTX have in common.

Both are used through their Python bindings, which are alike; the module is passed as `trt`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtconvert.engine import BuildProgress
from trtconvert.errors import TrtconvertError

Dims = Mapping[str, tuple[int, int, int]]
"""Symbolic dimension: (min, opt, max)."""


@dataclass(frozen=True)
class PlanInput:
    """An input of the network: its name, and its sizes or names of symbolic dimensions."""

    name: str
    shape: Sequence[int | str]


def build_plan(
    trt: Any,
    onnx: Path,
    inputs: Sequence[PlanInput],
    dims: Dims,
    *,
    configure: Callable[[Any], None],
    progress: BuildProgress,
    title: str,
) -> bytes:
    """Parse an ONNX file and build one serialized engine with one optimisation profile.

    Args:
        trt: the bindings' module.
        configure: sets what differs between the libraries on the builder's configuration.
        title: what is being built, for messages.
    Raises:
        TrtconvertError: the parser or the builder refuses; the message carries what the library logged last.
        KeyboardInterrupt: Ctrl-C while building, after the builder has let go.
    """
    log = make_log(trt)
    builder = trt.Builder(log)
    # From TensorRT 11 and in TensorRT-RTX every network is strongly typed and the flag is gone.
    flag = getattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)
    network = builder.create_network(0 if flag is None else 1 << int(flag))
    parser = trt.OnnxParser(network, log)
    if not parser.parse_from_file(str(onnx)):
        errors = [parser.get_error(i) for i in range(parser.num_errors)]
        raise TrtconvertError(
            f"{title}: the ONNX model cannot be parsed",
            expected="operators that this version of the parser knows",
            got="; ".join(f"node {e.node_name() or e.node()} ({e.node_operator()}): {e.desc()}" for e in errors)
            or log.last(),
            remedy="exclude the operator from the model, or build with another backend",
        )
    config = builder.create_builder_config()
    profile = builder.create_optimization_profile()
    for tensor in inputs:
        sizes = [tuple(dims[n][i] if isinstance(n, str) else n for n in tensor.shape) for i in range(3)]
        profile.set_shape(tensor.name, *sizes)
    config.add_optimization_profile(profile)
    configure(config)
    monitor = _monitor(trt, progress)
    config.progress_monitor = monitor
    plan = builder.build_serialized_network(network, config)
    if monitor.interrupted:
        raise KeyboardInterrupt
    if plan is None:
        raise TrtconvertError(
            f"{title}: the engine cannot be built",
            expected="a network that the library can compile for this target",
            got=log.last(),
            remedy="leave the target out of engine.targets, change model.dtype, or build with another backend",
        )
    progress("", 1.0)
    return bytes(plan)


def make_log(trt: Any) -> Any:
    """A logger of the library that keeps its errors; `last()` gives the latest ones."""

    class Log(trt.ILogger):
        """Keeps errors for the message to the user instead of printing them."""

        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.errors: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if severity in (trt.ILogger.ERROR, trt.ILogger.INTERNAL_ERROR):
                self.errors.append(message)

        def last(self) -> str:
            return "; ".join(self.errors[-2:]) or "no reason was logged"

    return Log()


def _monitor(trt: Any, progress: BuildProgress) -> Any:
    class Monitor(trt.IProgressMonitor):
        """Progress of the outermost phases; a false step ends the build."""

        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self.interrupted = False
            self._phases: dict[str, tuple[str | None, int, int]] = {}

        def _share(self, phase: str) -> tuple[float, float]:
            """Where a phase begins in the whole build, and how much of it one of its steps is."""
            parent, steps, done = self._phases[phase]
            start, width = self._share(parent) if parent in self._phases else (0.0, 1.0)
            step = width / max(steps, 1)
            return start + step * min(done, steps), step

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            self._phases[phase_name] = (parent_phase, num_steps, 0)

        def step_complete(self, phase_name: str, step: int) -> bool:
            # An exception must not cross into the library's C++ code.
            try:
                parent, steps, _ = self._phases[phase_name]
                self._phases[phase_name] = (parent, steps, step + 1)
                progress(phase_name, self._share(phase_name)[0])
            except KeyboardInterrupt:
                self.interrupted = True
            return not self.interrupted

        def phase_finish(self, phase_name: str) -> None:
            self._phases.pop(phase_name, None)

    return Monitor()
