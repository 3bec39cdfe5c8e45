"""Builds a strongly typed plan from ONNX, with TensorRT or TensorRT-RTX.

Their Python bindings are alike. The module is passed as `trt`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trtconvert.bundle import ComponentRecord, Dims, TensorRecord
from trtconvert.engine import BuildWatcher, SerializedEngine
from trtconvert.engine.logs import Log, lacks_memory, make_log
from trtconvert.engine.signals import DeferredSignals
from trtconvert.engine.timing_cache import load_timings, store_timings
from trtconvert.errors import TrtconvertError, several
from trtconvert.files import threads

_NO_KERNEL = "could not find any implementation"
"""Logged if every kernel of a node was skipped. Warnings tell whether memory was the reason."""


def tell_mixed(component: ComponentRecord, why: str, watch: BuildWatcher) -> None:
    """Notifies about layers with different modes in timestep bins: the engine computes these layers in 16 bits."""
    layers = [layer.name for layer in component.layers if layer.is_mixed]
    if layers:
        reason = "as they are INT8 in some timestep bins only, which needs a kernel of ours"
        watch.notice(f"layers in 16 bits, {reason}: {several(layers, 3)}; {why}")


_scopes: list[list[Any]] = []
"""The builder that each open block of `kernels_kept` keeps, the outermost block first."""


@contextmanager
def kernels_kept() -> Iterator[None]:
    """Keeps the first builder of the block until the end of the outermost block. TensorRT loads its library of kernels with the
    first builder of a process, which takes seconds and memory, and unloads the library with the last builder."""
    _scopes.append([])
    try:
        yield
    finally:
        _scopes.pop().clear()


def build_plan(
    trt: Any,
    model: bytes,
    path: Path,
    inputs: Sequence[TensorRecord],
    profiles: Sequence[Dims],
    *,
    configure: Callable[[Any], None],
    watch: BuildWatcher,
    title: str,
    timing_cache: Path | None = None,
) -> SerializedEngine:
    """Parses an ONNX model and builds one serialized engine.

    Args:
        trt: the bindings' module.
        model: serialized ModelProto.
        path: a file in the folder of the model's external weights.
        profiles: sizes of the symbolic dimensions, one optimisation profile each.
        configure: applies the options of the library to the builder's configuration.
        title: of the build, for messages.
        timing_cache: file of kernel timings.
    Raises:
        TrtconvertError: the parser or the builder refuses; the message has the latest log.
        KeyboardInterrupt: Ctrl-C, after the library has returned.
    """
    log = make_log(trt)
    with DeferredSignals() as signals, log:
        try:
            builder = trt.Builder(log.logger)
        except TypeError as error:  # the bindings' error for a null pointer
            raise _builder_refusal(log, title) from error
        builder.max_threads = threads()
        if _scopes and not any(_scopes):
            _scopes[0].append(builder)
        # TensorRT 11 and TensorRT-RTX have no flag: every network is strongly typed.
        flag = getattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)
        network = builder.create_network(0 if flag is None else 1 << int(flag))
        parser = trt.OnnxParser(network, log.logger)
        if not parser.parse(model, str(path)) or network.num_outputs == 0:  # an empty file parses as an empty model
            raise _parser_refusal(parser, log, path, title)
        config = builder.create_builder_config()
        for dims in profiles:
            config.add_optimization_profile(_profile(builder, inputs, dims))
        configure(config)
        loaded = b"" if timing_cache is None else load_timings(config, timing_cache, watch.notice)
        monitor = _monitor(trt, watch, signals)
        config.progress_monitor = monitor
        plan = builder.build_serialized_network(network, config) if signals.caught is None else None
        if timing_cache is not None:  # also after a failed or stopped build
            store_timings(config, timing_cache, loaded, watch.notice)
    if signals.caught is not None:  # the handler raised nothing
        raise KeyboardInterrupt
    if monitor.failure is not None:
        raise monitor.failure
    if plan is None:
        raise _builder_refusal(log, title)
    watch.share("", 1.0)
    return memoryview(plan)


def _profile(builder: Any, inputs: Sequence[TensorRecord], dims: Dims) -> Any:
    profile = builder.create_optimization_profile()
    for tensor in inputs:
        sizes = [tuple(dims[n][i] if isinstance(n, str) else n for n in tensor.shape) for i in range(3)]
        profile.set_shape(tensor.name, *sizes)
    return profile


def _parser_refusal(parser: Any, log: Log, path: Path, title: str) -> TrtconvertError:
    errors = [parser.get_error(i) for i in range(parser.num_errors)]
    found = [
        f"node '{e.node_name() or e.node()}' ({e.node_operator() or 'no operator'}): {e.desc()}"
        + (f", in {' > '.join(e.local_function_stack())}" if e.local_function_stack() else "")
        for e in errors
    ]
    unknown = sorted({e.node_operator() for e in errors if "plugin not found" in e.desc().lower()})
    if unknown:
        remedy = (
            f"change the model to avoid {', '.join(unknown)}, install a later TensorRT, or build the bundle again with another "
            "engine.backend in the recipe"
        )
    elif any("initializer" in e.desc() and not e.node_operator() for e in errors):
        remedy = f"the file of weights beside {path.name} is missing or short: copy or build the bundle again"
    else:
        remedy = "correct the model at that node, or build the bundle again with another engine.backend in the recipe"
    return TrtconvertError(
        f"{title}: the ONNX model cannot be parsed",
        expected="operators, types and ranks that the parser of this version supports",
        got="; ".join(found) or log.last(),
        remedy=remedy,
    )


def _builder_refusal(log: Log, title: str) -> TrtconvertError:
    if lacks_memory(log.text()):
        return TrtconvertError(
            f"{title}: memory ran out while the engine was built",
            expected="device and host memory for the weights, the largest shapes and the kernels that are tried",
            got=log.last(),
            remedy="end other programs on the GPU, or set engine.workspace_mb, a lower engine.optimization_level or narrower "
            "engine.shapes in the recipe or by `trtconvert compile --set`",
        )
    if log.skipped and _NO_KERNEL in log.text().lower():
        return TrtconvertError(
            f"{title}: no kernel for a node works in the memory that the build may use",
            expected="device memory for one of them at the largest shapes, and no engine.workspace_mb below it",
            got=f"{log.last()}; {log.skipped}",
            remedy="raise engine.workspace_mb or leave it out, end other programs on the GPU, or narrow engine.shapes, in the "
            "recipe or by `trtconvert compile --set`",
        )
    return TrtconvertError(
        f"{title}: the engine cannot be built",
        expected="a network that the library can compile for this target with the options of the recipe's engine section",
        got=log.last(),
        remedy="remove the target or the option that the message names; or set engine.attention=native or "
        "engine.channels_last=false, also with `trtconvert compile --set`; or build the bundle again with another model.dtype or "
        "engine.backend in the recipe",
    )


def _monitor(trt: Any, watch: BuildWatcher, signals: DeferredSignals) -> Any:
    class Monitor(trt.IProgressMonitor):
        """Reports progress. Returning False from a step ends the build."""

        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self.failure: Exception | None = None
            self._phases: dict[str, tuple[str | None, int, int]] = {}

        def _share(self, phase: str) -> tuple[float, float]:
            """Returns the start of the phase's next step and the width of a step, as shares of the build."""
            parent, steps, done = self._phases[phase]
            start, width = self._share(parent) if parent in self._phases else (0.0, 1.0)
            step = width / max(steps, 1)
            return start + step * min(done, steps), step

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            self._phases[phase_name] = (parent_phase, num_steps, 0)

        def step_complete(self, phase_name: str, step: int) -> bool:
            try:
                parent, steps, _ = self._phases[phase_name]
                self._phases[phase_name] = (parent, steps, step + 1)
                watch.share(phase_name, self._share(phase_name)[0])
            except Exception as error:  # must not cross C++ code: raised after the build
                self.failure = error
            return self.failure is None and signals.caught is None

        def phase_finish(self, phase_name: str) -> None:
            self._phases.pop(phase_name, None)

    return Monitor()
