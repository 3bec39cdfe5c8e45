"""Runs a component's TensorRT engine on torch tensors, without copies."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trtconvert.bundle import NEXT, ComponentRecord, EngineRecord, unquantised_file
from trtconvert.errors import BackendUnavailable, UserError, first_line
from trtconvert.runtime.component import Component, was_closed
from trtconvert.runtime.lane import CallShapes, Lane, LoadedEngine, unready
from trtconvert.runtime.loras import Additions, BuiltWeights, Loras, NewWeights, additions_of, changed, files_of
from trtconvert.runtime.reading import Spent, one_ahead, read_whole
from trtconvert.runtime.refit import Refitter, read_weights
from trtconvert.runtime.reuse import warn_of_other_weights
from trtconvert.runtime.scratch import Scratch, out_of_memory
from trtconvert.runtime.signature import Signature, dtype_of, shape_of
from trtconvert.runtime.trajectory import Trajectory, whose

_PER_THREAD = 2
"""Handle of cudaStreamPerThread."""

_KNOWN_CALLS = 256
"""Number of combinations of shapes, types and devices that are remembered as checked."""


def _target(component: ComponentRecord) -> str:
    """Return the name of a component in LoRA files."""
    return "denoiser" if component.is_denoiser or component.diffusers is None else component.diffusers.component


def _title(component: ComponentRecord) -> str:
    return component.diffusers.model if component.diffusers is not None else "the denoiser"


def _wait_for(lanes: Mapping[int, Lane]) -> None:
    """Wait for lanes of an unreachable component, without their locks, which the current thread may hold."""
    with suppress(RuntimeError):  # the next use of the device meets its errors too
        if lanes and not torch.cuda.is_current_stream_capturing():  # waiting would break a capture
            for lane in lanes.values():
                lane.wait()


@dataclass(frozen=True)
class _Known:
    """The checked properties of inputs with certain shapes, types and devices.

    Attributes:
        call: shapes of the call.
        as_is: the inputs have the engine's types and device.
        origin: the device of the outputs; None for the engine's.
    """

    call: CallShapes
    as_is: bool
    origin: torch.device | None


@dataclass(frozen=True)
class _Change:
    """Weights to replace.

    Attributes:
        parts: yields the weights in parts, each freed after the engine has taken it.
        others: see `Refitter`; are_finite: see `Refitter.replace`.
    """

    parts: Generator[NewWeights]
    others: Callable[[str], Tensor | None] = lambda name: None
    are_finite: bool = True


class TensorRTComponent(Component):
    """A callable component on a GPU.

    Takes the inputs of the component's signature by position or by name. Contiguous tensors on the engine's device with the
    signature's type and an address that is a multiple of 256 bytes are read in place; other tensors are copied. Work is enqueued
    on the caller's current stream. The output, a new tensor in the signature's type or a tuple of tensors, is ready in stream
    order, on the device of the first input; for inputs on the CPU the call waits.

    The first call of a shape on a stream runs plainly, the second captures a CUDA graph, and further calls launch the graph, with
    the same results. A graph copies inputs and outputs on the device. Calls are safe from several threads; calls on different
    streams run concurrently, each stream with its own execution contexts.

    To capture a call into your own CUDA graph, call the component with the same shapes on that stream just before the capture.
    (`torch.cuda.graph` captures on its own stream unless it gets one.) The stream keeps its memory, and the graph stays valid
    until `close` or `refit`, which wait for that stream only: wait for launches on other streams before. The graph has its own
    scratch memory, so that it may be launched on any stream beside calls. Graphs that share a memory pool, or hold calls of one
    shape captured on one stream, must not run concurrently.

    Args:
        path: the serialized engine, with a checked hash; record: its entry in the manifest; component: the signature.
        onnx: the component's ONNX model, with the base weights of `set_loras`.
        device: the GPU.
        scratch: memory of execution contexts, shared with other engines.
        graphs: number of CUDA graphs per stream, see `Lane`; 0 for none.
        streams: number of streams that keep their contexts and memory; a further stream replaces the least recently used one.
        weight_budget: bytes of weights that stay on the GPU; other weights are streamed from host memory during calls. For
            engines built with engine.weight_streaming.

    Attributes:
        last_change: time and memory of the last `refit` or `set_loras`.

    Raises:
        BackendUnavailable: TensorRT refuses the engine; the message has TensorRT's log.
        UserError: a weight budget for an engine that cannot stream its weights.
    """

    def __init__(
        self,
        path: Path,
        record: EngineRecord,
        component: ComponentRecord,
        *,
        onnx: Path | None = None,
        device: torch.device,
        scratch: Scratch,
        graphs: int = 4,
        streams: int = 4,
        weight_budget: int | None = None,
    ) -> None:
        from trtconvert.engine.loading import load_engine
        from trtconvert.engine.logs import lacks_memory, make_log
        from trtconvert.engine.tensorrt import bindings

        if weight_budget is not None and not record.weight_streaming:
            raise UserError(
                f"{path.name} cannot stream its weights",
                expected="an engine built with engine.weight_streaming: true",
                got=f"a weight_budget of {weight_budget} bytes",
                remedy="load it without a weight_budget, or set engine.weight_streaming in the recipe and build again",
            )
        trt = bindings()
        log = make_log(trt)
        self.signature = Signature(component, record.profiles)
        self.device, self.record = device, record
        self._count, self._graphs, self._streams = len(component.inputs), graphs, streams
        with torch.cuda.device(device):
            free, _ = torch.cuda.mem_get_info()
            plan = read_whole(path)
            self._runtime, engine = load_engine(trt, log, plan)
            if engine is None:
                size, why = len(plan), log.last()
                if lacks_memory(why):
                    raise out_of_memory(f"{path.name}: {why}", size, device)
                raise BackendUnavailable(
                    f"TensorRT cannot load {path.name}",
                    expected=f"TensorRT {record.library} on a GPU of {record.target}",
                    got=f"TensorRT {trt.__version__}: {why}",
                    remedy="run `trtconvert compile` on this machine",
                )
            if weight_budget is not None:
                engine.weight_streaming_budget_v2 = min(weight_budget, engine.streamable_weights_size)
                torch.cuda.synchronize()  # until the weights are loaded
            self._weights_memory = max(0, free - torch.cuda.mem_get_info()[0])
        found = {engine.get_tensor_name(i) for i in range(engine.num_io_tensors)}
        outputs, caches = (tuple(spec.name for spec in specs) for specs in (component.outputs, component.caches))
        wanted = [*self.signature.names, *outputs, *caches, *(name + NEXT for name in caches)]
        if found != set(wanted):
            raise BackendUnavailable(
                f"{path.name} has other inputs and outputs than the manifest",
                expected=", ".join(wanted),
                got=", ".join(sorted(found)),
                remedy="run `trtconvert compile` on this machine",
            )
        scratch.reserve(engine.device_memory_size_v2)
        dtypes, output_dtypes = (tuple(map(dtype_of, specs)) for specs in (component.inputs, component.outputs))
        names = tuple(self.signature.names)
        self._loaded: LoadedEngine | None = LoadedEngine(
            trt, engine, log, names, dtypes, outputs, output_dtypes, device, scratch, caches,
            tuple(map(dtype_of, component.caches)),
        )  # fmt: skip
        self._trajectory = Trajectory()
        self._known: dict[tuple, _Known] = {}  # by shapes, types and devices
        # By shapes. Graphs of lanes keep their calls alive, which are found here again after `_known` was cleared.
        self._calls: weakref.WeakValueDictionary[tuple, CallShapes] = weakref.WeakValueDictionary()
        self._lanes: dict[int, Lane] = {}
        # Running calls need the engine after the last reference was dropped.
        weakref.finalize(self, _wait_for, self._lanes).atexit = False
        self._lock = threading.Lock()
        self._onnx, self._onnx_files = onnx, files_of(onnx) if onnx is not None else []
        self._built_weights: BuiltWeights | None = None
        self._loras: Additions = {}  # current LoRAs of the weights
        self.last_change = Spent()
        self._replaced = False  # by `refit`
        self._changing = threading.Lock()

    @property
    def engine(self) -> Any:
        """TensorRT's ICudaEngine, for inspection."""
        return self._opened().engine

    @property
    def device_memory(self) -> int:
        """Device memory of one execution context in bytes, without the weights."""
        return int(self.engine.device_memory_size_v2)

    @property
    def graphs_memory(self) -> int:
        return sum(lane.graphs_memory for lane in list(self._lanes.values()))

    @property
    def graphs_recorded(self) -> int:
        return sum(lane.recorded for lane in list(self._lanes.values()))

    def call(self, trajectory: Trajectory | None, inputs: tuple[Tensor, ...], named: Mapping[str, Tensor]) -> Any:
        if torch.compiler.is_dynamo_compiling():
            # Dynamo cannot trace addresses and captures.
            untraced: Any = torch.compiler.disable(self._call)
            return untraced(trajectory, inputs, named)
        return self._call(trajectory, inputs, named)

    def _call(self, trajectory: Trajectory | None, inputs: tuple[Tensor, ...], named: Mapping[str, Tensor]) -> Any:
        tensors = inputs if not named and len(inputs) == self._count else self.signature.ordered(inputs, named)
        if torch.cuda.current_device() == self.device.index:
            return self._run(tensors, trajectory or self._trajectory)
        with torch.cuda.device(self.device):
            return self._run(tensors, trajectory or self._trajectory)

    def reset_cache(self, trajectory: Trajectory | None = None) -> None:
        """Reset MoDiff caches on each stream, in stream order.

        Caches also reset if the batch changes, or timesteps go back to more noise. Only a sampler that starts with less noise
        than the last call of the sampler before needs this call. Captured into a graph, it resets at every launch.

        Raises:
            UserError: the argument is not a trajectory.
        """
        forgotten = whose(trajectory, self._trajectory)
        for lane in list(self._lanes.values()):
            with lane.lock, torch.cuda.device(self.device):
                if not lane.closed:
                    lane.forget_caches(forgotten)

    @property
    def caches(self) -> dict[str, Tensor]:
        lane = self._lanes.get(torch._C._cuda_getCurrentRawStream(self.device.index))
        return {} if lane is None else dict(zip(self._opened().caches, lane.caches_of(self._trajectory), strict=False))

    @property
    def caches_memory(self) -> int:
        return sum(lane.caches_memory for lane in list(self._lanes.values()))

    def refit(self, weights: Mapping[str, Tensor] | str | Path) -> int:
        """Replace weights of the engine by those of a fine-tuned model. Waits for running calls.

        INT8 layers are quantised again with the bundle's calibration. If the bundle does not keep unquantised weights, these
        layers run in 16 bits with the given weights.

        Args:
            weights: weights by the names of the denoiser's state dict, all or some of them; or a safetensors file.
        Returns:
            Number of replaced weights of the engine.
        Raises:
            UserError: the engine is not refittable or has LoRAs, the weights do not fit, or the bundle was built again.
            BackendUnavailable: TensorRT failed half way; load the bundle again.
        """
        with self._changing:
            self._refuse_fixed_weights()
            if self._loras:
                raise UserError(
                    "weights cannot be replaced while LoRAs are set",
                    expected="an engine without LoRAs from set_loras",
                    got=f"LoRAs in {len(self._loras)} weights",
                    remedy="call set_loras([]) first",
                )
            state = weights if isinstance(weights, Mapping) else read_weights(Path(weights))
            keeps = self._onnx is not None and unquantised_file(self._onnx).is_file()
            self.last_change = Spent()
            new = self._built().of_state(state, self.device) if keeps else NewWeights(dict(state))
            warn_of_other_weights(self.reuse)
            count = self._replace(_Change((part for part in (new,)), are_finite=False))
            self._replaced = True
            return count

    def set_loras(self, loras: Loras) -> int:
        """Add LoRAs to the engine's built weights, in place of LoRAs that were set before. Waits for running calls.

        Changed weights become W + scale · alpha/rank · up · down, summed in FP32 on the engine's device and cast to the engine's
        type, where W is the bundle's weight with the recipe's own `loras`. INT8 layers are quantised again, exactly as in a build
        with these LoRAs and the same calibration; layers without LoRAs get the bundle's bits. Weights whose files and scales stay
        the same are not touched. The first call reads the bundle's ONNX model. Weights are replaced in parts: a call needs up to
        about 0.8 GiB of device memory, less if less is free, or host memory if none is free. The set LoRAs stay in host memory.
        `last_change` has time and memory of the call.

        Args:
            loras: safetensors files, in the layouts of the recipe's section `loras`, each with its scale; empty restores the
                built weights.
        Returns:
            Number of replaced weights of the engine.
        Raises:
            UserError: the engine is not refittable or was refitted, or a file cannot be read or does not fit. The engine is
                unchanged.
            BackendUnavailable: TensorRT failed half way, or the change could not be undone; load the bundle again.
        """
        with self._changing:
            self._refuse_fixed_weights()
            if self._replaced or self._onnx is None:
                raise UserError(
                    "LoRAs cannot be added to replaced weights",
                    expected="an engine with its built weights",
                    got="an engine after refit",
                    remedy="load the bundle again; or merge the LoRAs into the weights and refit with the result",
                )
            self.last_change = spent = Spent()
            with spent.on("opening"):
                built = self._built()
            component, before = self.signature.component, self._loras
            with spent.on("checking"):
                wanted = additions_of(loras, _target(component), built.shapes, _title(component), before)
                built.refuse_in_constants(wanted)
            names = changed(before, wanted)
            if wanted:
                warn_of_other_weights(self.reuse)

            def new(additions: Additions) -> _Change:
                def weight(name: str) -> Tensor | None:
                    return built.with_additions(name, additions, self.device) if name in built else None

                return _Change(built.anew(names, additions, self.device, spent=spent), weight)

            count = self._replace(new(wanted), lambda: new(before)) if names else 0
            self._loras = wanted
            return count

    def _built(self) -> BuiltWeights:
        """Return the weights in the bundle's files.

        Raises:
            UserError: the files changed after loading.
        """
        assert self._onnx is not None
        if files_of(self._onnx) != self._onnx_files:
            raise UserError(
                f"{self._onnx} changed after the bundle was loaded",
                expected="the files of the loaded bundle",
                got="a bundle that was built or copied again, or no files",
                remedy="load the bundle again",
            )
        if self._built_weights is None:
            self._built_weights = BuiltWeights(self._onnx, self.record.int8_constants)
        return self._built_weights

    def _refuse_fixed_weights(self) -> None:
        self._opened()
        if not self.record.refittable:
            raise UserError(
                f"the weights in {self.record.file} cannot be replaced",
                expected="an engine built with engine.refittable: true",
                got="an engine without this setting",
                remedy="set engine.refittable in the recipe, and build or compile the bundle again",
            )

    def _replace(self, change: _Change, undo: Callable[[], _Change] | None = None) -> int:
        """Replace weights while no call runs.

        Args:
            undo: makes the change that restores the current weights if the replacement fails half way.
        """
        try:
            with self._lock, ExitStack() as held:
                # Other engines of the bundle take the same locks in the same order, which avoids deadlocks.
                for handle, lane in sorted(self._lanes.items(), key=lambda item: id(item[1].lock)):
                    held.enter_context(lane.lock)
                    try:
                        lane.forget_graphs()
                    except RuntimeError:  # a destroyed stream
                        del self._lanes[handle]
                        lane.close()
                try:
                    with torch.cuda.device(self.device):
                        return self._replace_all(change, undo)
                except BackendUnavailable:
                    # Some weights may be new and others old: threads that wait for a lane must not run the engine.
                    self._loaded = None
                    for lane in self._lanes.values():
                        lane.closed = True
                    raise
        except BackendUnavailable:
            self.close()
            raise

    def _replace_all(self, change: _Change, undo: Callable[[], _Change] | None) -> int:
        spent = self.last_change
        refitter = Refitter(self._opened(), self.record.weights, change.others, spent)
        try:
            with closing(one_ahead(change.parts, self.device)) as parts:
                while True:
                    with spent.on("waiting"):
                        part = next(parts, None)
                    if part is None:
                        return len(refitter.replaced)
                    refitter.replace(part.by_name, part.constants, are_finite=change.are_finite)
                    del part  # freed before the next part is made
        except BackendUnavailable:
            raise
        except BaseException as error:
            if refitter.replaced and not self._is_undone(undo):
                raise BackendUnavailable(
                    "weights were replaced half way: some are new and others old",
                    expected="all weights replaced, or none",
                    got=first_line(error),
                    remedy="load the bundle again",
                ) from error
            raise

    def _is_undone(self, undo: Callable[[], _Change] | None) -> bool:
        if undo is None:
            return False
        try:
            self._replace_all(undo(), None)
        except BaseException:  # the caller reports that the engine has old and new weights
            return False
        return True

    def close(self) -> None:
        """Wait for running calls and free the engine and its memory. Further calls are refused."""
        with self._lock:
            try:
                with ExitStack() as closing:  # closes all of them, even if one raises
                    while self._lanes:
                        closing.callback(self._close_lane, self._lanes.popitem()[1])
            finally:
                # The engine must be freed before its runtime.
                self._loaded = None
                self._runtime = None
                self._weights_memory = 0

    def _close_idle_lane(self) -> None:
        """Close the lane that was idle longest and that no capture needs, if there is one."""
        for handle, lane in sorted(self._lanes.items(), key=lambda item: item[1].used):
            with lane.lock:
                if not lane.is_needed:
                    del self._lanes[handle]
                    lane.close()
                    return

    @staticmethod
    def _close_lane(lane: Lane) -> None:
        with lane.lock:
            lane.close()

    def _opened(self) -> LoadedEngine:
        if self._loaded is None:
            raise was_closed()
        return self._loaded

    def _run(self, tensors: tuple[Tensor, ...], trajectory: Trajectory) -> Any:
        try:
            known = self._known[tuple([(x.shape, x.dtype, x.device) for x in tensors])]
        except (KeyError, AttributeError, TypeError):  # not seen before, or not a tensor
            known = self._learn(tensors)
        try:
            if self.signature.watch is not None:
                self.signature.watch(tensors)
            if not known.as_is:
                dtypes = self._opened().input_dtypes
                tensors = tuple([x.detach().to(self.device, dtype) for x, dtype in zip(tensors, dtypes, strict=True)])
            # The handle takes a tenth of the time of torch.cuda.current_stream().
            stream = torch._C._cuda_getCurrentRawStream(self.device.index)
            while True:
                lane = self._lanes.get(stream) or self._open_lane()
                with lane.lock:
                    if not lane.closed:
                        outputs = lane.run(known.call, tensors, trajectory)
                        break
                self._opened()  # raises if the component is closed; otherwise the closed lane is replaced
            if known.origin is not None:
                outputs = [x.to(known.origin) for x in outputs]
        except torch.OutOfMemoryError as error:
            where = self.device if known.origin is None or known.origin.type != "cuda" else known.origin
            raise out_of_memory("the tensors of a call", self._opened().bytes_of(known.call), where) from error
        except RuntimeError:
            if any(x.layout != torch.strided for x in tensors):
                self._learn(tensors)  # refuses sparse tensors, which have the same key
            raise
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def _learn(self, tensors: tuple[Tensor, ...]) -> _Known:
        """Check inputs with new shapes, types and devices.

        Raises:
            UserError: see `__call__`.
        """
        profile, sizes = self.signature.check(tensors)
        if len(self._known) >= _KNOWN_CALLS:
            self._known.clear()
        shapes = tuple(tuple(x.shape) for x in tensors)
        outputs = tuple(shape_of(spec.shape, sizes) for spec in self.signature.component.outputs)
        caches = tuple(shape_of(spec.shape, sizes) for spec in self.signature.component.caches)
        call = self._calls.setdefault(
            shapes, CallShapes(profile, shapes, outputs, caches)
        )  # graphs serve every type and device
        dtypes = self._opened().input_dtypes
        as_is = all(x.dtype == dtype and x.device == self.device for x, dtype in zip(tensors, dtypes, strict=True))
        first = tensors[0].device
        known = _Known(call, as_is, None if first == self.device else first)
        self._known[tuple([(x.shape, x.dtype, x.device) for x in tensors])] = known
        return known

    def _open_lane(self) -> Lane:
        """Return the current stream's lane, a new one in place of the least recently used if there are too many.

        Raises:
            UserError: the component was closed, the stream is being captured, or it is CUDA's per-thread default stream.
        """
        stream = torch.cuda.current_stream()
        if stream.cuda_stream == _PER_THREAD:
            raise UserError(
                "a component cannot be called on CUDA's per-thread default stream",
                expected="torch's default stream, or a torch.cuda.Stream",
                got="cudaStreamPerThread",
                remedy="with torch.cuda.stream(torch.cuda.Stream()): …",
            )
        with self._lock:
            loaded = self._opened()
            if lane := self._lanes.get(stream.cuda_stream):
                return lane
            if torch.cuda.is_current_stream_capturing():
                raise unready("no call on this stream so far")
            if len(self._lanes) >= self._streams:
                self._close_idle_lane()
            lane = self._lanes[stream.cuda_stream] = Lane(loaded, stream, self._graphs)
            return lane
