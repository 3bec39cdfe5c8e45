"""A component as a TensorRT engine: INT8 attention in our plugin, torch tensors in and out without copies."""

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
from trtconvert.reuse.schedule import Reuse
from trtconvert.runtime.component import was_closed
from trtconvert.runtime.lane import Call, Lane, Plan, unready
from trtconvert.runtime.loras import Additions, BuiltWeights, Loras, NewWeights, additions_of, changed, files_of
from trtconvert.runtime.reading import Spent, one_ahead
from trtconvert.runtime.refit import Refitter, read_weights
from trtconvert.runtime.reuse import warn_of_other_weights
from trtconvert.runtime.scratch import Scratch, out_of_memory
from trtconvert.runtime.signature import Signature, dtype_of, shape_of
from trtconvert.runtime.trajectory import Apart, Trajectory, require_finite, whose

_PER_THREAD = 2
"""Handle of cudaStreamPerThread."""

_KNOWN_CALLS = 256
"""Combinations of shapes, types and devices whose checks are remembered."""


def _target(component: ComponentRecord) -> str:
    """What LoRA files call a component."""
    return "denoiser" if component.is_denoiser or component.diffusers is None else component.diffusers.component


def _title(component: ComponentRecord) -> str:
    return component.diffusers.model if component.diffusers is not None else "the denoiser"


def _wait_for(lanes: Mapping[int, Lane]) -> None:
    """Without their locks: nobody can call the component any more, and who lets go of it may hold one."""
    with suppress(RuntimeError):  # of the device, which the next use of it meets with as well
        if lanes and not torch.cuda.is_current_stream_capturing():  # which waiting would spoil
            for lane in lanes.values():
                lane.wait()


@dataclass(frozen=True)
class _Known:
    """What is known of inputs of certain shapes, types and devices, which were checked once.

    Attributes:
        call: what runs them.
        as_is: they have the engine's types and lie on its device.
        origin: the device that the outputs go to; None for the engine's.
    """

    call: Call
    as_is: bool
    origin: torch.device | None


@dataclass(frozen=True)
class _Change:
    """Weights to replace.

    Attributes:
        parts: one after the other; each may go when the engine has it.
        others: see `Refitter`; are_finite: see `Refitter.replace`.
    """

    parts: Generator[NewWeights]
    others: Callable[[str], Tensor | None] = lambda name: None
    are_finite: bool = True


class TensorRTComponent:
    """A callable component on a GPU.

    Takes the inputs of the component's signature by position or by name. Tensors on the engine's device, contiguous, of the
    signature's type and at a multiple of 256 bytes are read where they lie; others are copied first. Work is enqueued on
    the caller's current stream, and the output, a fresh tensor in the signature's type or a tuple of several, is ready in
    stream order. It lies on the device of the first input, so a caller whose tensors are on the CPU waits for it.

    The first call of a shape on a stream runs plainly, the second records a CUDA graph, and further ones launch it: what is
    computed is the same, and the host is done sooner. A graph copies inputs and outputs, on the device. Safe from several
    threads; calls on different streams run concurrently, each stream with execution contexts of its own.

    To record a call into a CUDA graph of one's own, call it with the same shapes on that stream just before, once more where
    the message asks for it. (`torch.cuda.graph` records on a stream of its own unless it is given one.) Such a stream keeps
    its memory, and the recording is good as long as the component lives, until `close` or `refit`, which wait for that stream:
    for launches on others wait before. It computes in memory of the graph, so that it may be launched on any stream beside calls,
    as long as it shares its pool with no other graph. Of several graphs with calls of one shape on one stream launch one after
    the other: they have one execution context.

    Args:
        path: the serialized engine, its bytes checked; record: its entry in the manifest; component: the signature.
        onnx: the component's ONNX model, whose weights `set_loras` begins with.
        device: the GPU.
        scratch: memory for execution contexts, shared with other engines.
        graphs: CUDA graphs kept per stream, see `Lane`; 0 for none.
        streams: streams that keep their contexts and memory; the least recently used one loses them to a further one.
        weight_budget: bytes of weights that stay on the GPU, the others are streamed from host memory while it runs; for
            engines built with engine.weight_streaming.

    Attributes:
        signature: what it takes.
        weights_memory: bytes of device memory that loading took, as the driver reports it for all processes of the GPU.
        last_change: what the last `refit` or `set_loras` took.

    Raises:
        BackendUnavailable: TensorRT refuses the engine here; the message carries what it logged.
        UserError: a weight budget for an engine that cannot stream its weights.
    """

    reuse: Reuse | None = None

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
                f"{path.name} keeps all its weights on the GPU",
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
            plan = path.read_bytes()
            self._runtime, engine = load_engine(trt, log, plan)
            if engine is None:
                size, why = len(plan), log.last()
                if lacks_memory(why):
                    raise out_of_memory(f"{path.name}: {why}", size, device)
                raise BackendUnavailable(
                    f"TensorRT cannot load {path.name}",
                    expected=f"TensorRT {record.library} on a GPU of {record.target}, which it was built for",
                    got=f"TensorRT {trt.__version__}: {why}",
                    remedy="run `trtconvert compile` on this machine",
                )
            if weight_budget is not None:
                engine.weight_streaming_budget_v2 = min(weight_budget, engine.streamable_weights_size)
                torch.cuda.synchronize()  # the weights are there, as load_engine has it for the rest
            self.weights_memory = max(0, free - torch.cuda.mem_get_info()[0])
        found = {engine.get_tensor_name(i) for i in range(engine.num_io_tensors)}
        outputs, caches = (tuple(spec.name for spec in specs) for specs in (component.outputs, component.caches))
        wanted = [*self.signature.names, *outputs, *caches, *(name + NEXT for name in caches)]
        if found != set(wanted):
            raise BackendUnavailable(
                f"{path.name} is not the engine that the manifest describes",
                expected=", ".join(wanted),
                got=", ".join(sorted(found)),
                remedy="run `trtconvert compile` on this machine",
            )
        scratch.reserve(engine.device_memory_size_v2)
        dtypes, output_dtypes = (tuple(map(dtype_of, specs)) for specs in (component.inputs, component.outputs))
        names = tuple(self.signature.names)
        self._plan: Plan | None = Plan(
            trt, engine, log, names, dtypes, outputs, output_dtypes, device, scratch, caches,
            tuple(map(dtype_of, component.caches)),
        )  # fmt: skip
        self._trajectory = Trajectory()
        self._known: dict[tuple, _Known] = {}  # by shapes, types and devices
        # By shapes. What lanes have recorded keeps its call, which is found again when what is known is forgotten.
        self._calls: weakref.WeakValueDictionary[tuple, Call] = weakref.WeakValueDictionary()
        self._lanes: dict[int, Lane] = {}
        # Whoever lets go of the last reference may have calls under way, which need the engine until they are done.
        weakref.finalize(self, _wait_for, self._lanes).atexit = False
        self._lock = threading.Lock()
        self._onnx, self._onnx_files = onnx, files_of(onnx) if onnx is not None else []
        self._built_weights: BuiltWeights | None = None
        self._loras: Additions = {}  # what weights have now
        self.last_change = Spent()
        self._replaced = False  # by `refit`: the engine has other weights than it was built with
        self._changing = threading.Lock()

    @property
    def engine(self) -> Any:
        """TensorRT's ICudaEngine, to inspect it."""
        return self._opened().engine

    @property
    def device_memory(self) -> int:
        """Bytes of device memory that one execution context takes beside the weights."""
        return int(self.engine.device_memory_size_v2)

    @property
    def graphs_memory(self) -> int:
        """Bytes of the inputs and outputs that CUDA graphs have to themselves."""
        return sum(lane.graphs_memory for lane in list(self._lanes.values()))

    @property
    def graphs_recorded(self) -> int:
        """CUDA graphs that were recorded on the streams that are kept now."""
        return sum(lane.recorded for lane in list(self._lanes.values()))

    def __call__(self, *inputs: Tensor, **named: Tensor) -> Any:
        """
        Raises:
            UserError: an input is missing, unknown, or of a type or shape outside the signature and the engine's profiles.
            BackendUnavailable: the device is out of memory, or TensorRT fails.
        """
        return self.call(None, inputs, named)

    def call(self, trajectory: Trajectory | None, inputs: tuple[Tensor, ...], named: Mapping[str, Tensor]) -> Any:
        """As `__call__`, with the caches of a trajectory; None for the component's own."""
        if torch.compiler.is_dynamo_compiling():
            # Of a function around this: addresses and recordings are nothing that it could trace.
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
        """All samples begin anew in the next call on each stream, in the order of its work. They do so by themselves where the
        batch is another, or timesteps go back to more noise: only a sampler that begins with less noise than the one before it
        had left has to say so. Recorded into a graph of the caller's, the graph begins anew whenever it is launched.

        Raises:
            UserError: an argument that is no trajectory.
        """
        forgotten = whose(trajectory, self._trajectory)
        for lane in list(self._lanes.values()):
            with lane.lock, torch.cuda.device(self.device):
                if not lane.closed:
                    lane.forget_caches(forgotten)

    @property
    def caches(self) -> dict[str, Tensor]:
        """What layers that quantise deltas keep from step to step on the current stream, by the signature's names; empty before
        the first call. The next call but one writes there."""
        lane = self._lanes.get(torch._C._cuda_getCurrentRawStream(self.device.index))
        return {} if lane is None else dict(zip(self._opened().caches, lane.caches_of(self._trajectory), strict=False))

    @property
    def caches_memory(self) -> int:
        """Bytes of the caches of all streams that are kept now."""
        return sum(lane.caches_memory for lane in list(self._lanes.values()))

    def apart(self) -> Apart:
        """The component with caches of its own, for other samples between those of its calls."""
        return Apart(self)

    def check_caches(self) -> None:
        """Waits for the GPU.

        Raises:
            UserError: NaN or Inf is in a cache of the current stream.
        """
        require_finite(self.caches.items())

    def refit(self, weights: Mapping[str, Tensor] | str | Path) -> int:
        """Replace weights of the engine by those of a fine-tuned model. Waits for what is running.

        INT8 layers are quantised anew, with the factors and offsets of the bundle's calibration. Of a bundle that does not keep
        what they were quantised from, they are computed in 16 bits, with the weights as they are given.

        Args:
            weights: by the names of the denoiser's state dict, some or all of them; or a safetensors file.
        Returns:
            How many of the engine's weights were replaced.
        Raises:
            UserError: the engine is not refittable, has LoRAs, or the weights do not fit it; or the bundle was built again.
            BackendUnavailable: TensorRT failed half way; load the bundle again.
        """
        with self._changing:
            self._refuse_fixed_weights()
            if self._loras:
                raise UserError(
                    "weights with LoRAs in them are not replaced",
                    expected="an engine with the weights that it was built with",
                    got=f"one with LoRAs in {len(self._loras)} weights",
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
        """Add LoRAs to the weights that the engine was built with, instead of those that were set before.

        Waits for what is running.
        Weights to which the same files add at the same scales as before stay. The others are W + scale · alpha/rank · up · down,
        summed in FP32 on the engine's device, in the engine's type, with W as the bundle has it, the recipe's own `loras` in it.
        INT8 layers are quantised anew: they are what a build with these LoRAs and the same calibration gives, and one to which
        nothing is added any more is the bundle's bit for bit. The first call reads the bundle's ONNX model. Weights are made and
        replaced in parts: a call takes up to some 0.8 GiB of the device's memory, less where less is free, and of the host's
        where there is none; on the host, the LoRAs that are set stay in memory. `last_change` tells what it took.

        Args:
            loras: safetensors files, in the layouts that the recipe's section `loras` takes, and what their differences are
                multiplied by. None of them for the weights that the engine was built with.
        Returns:
            How many of the engine's weights were replaced.
        Raises:
            UserError: the engine is not refittable, has other weights than it was built with, or a file cannot be read or does
                not fit. The engine is as before.
            BackendUnavailable: TensorRT failed half way, or what was replaced could not be taken back; load the bundle again.
        """
        with self._changing:
            self._refuse_fixed_weights()
            if self._replaced or self._onnx is None:
                raise UserError(
                    "LoRAs are added to the weights that the engine was built with",
                    expected="an engine whose weights were not replaced by refit",
                    got="one with other weights",
                    remedy="load the bundle again; or merge the LoRAs into the weights and refit with those",
                )
            self.last_change = spent = Spent()
            with spent.on("opening"):
                built = self._built()
            component, before = self.signature.component, self._loras
            with spent.on("checking"):
                wanted = additions_of(loras, _target(component), built.shapes, _title(component), before)
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
        """
        Raises:
            UserError: the bundle's files are others than when it was loaded.
        """
        assert self._onnx is not None
        if files_of(self._onnx) != self._onnx_files:
            raise UserError(
                f"{self._onnx} is no longer what the engine was built from",
                expected="the bundle that was loaded",
                got="one that was built or copied again, or none",
                remedy="load the bundle again",
            )
        if self._built_weights is None:
            self._built_weights = BuiltWeights(self._onnx, self.record.int8_constants)
        return self._built_weights

    def _refuse_fixed_weights(self) -> None:
        """
        Raises:
            UserError: the component was closed, or its engine is not refittable.
        """
        self._opened()
        if not self.record.refittable:
            raise UserError(
                f"the weights in {self.record.file} cannot be replaced",
                expected="an engine built with engine.refittable: true",
                got="one that was not",
                remedy="set engine.refittable in the recipe, and build or compile the bundle again",
            )

    def _replace(self, change: _Change, undo: Callable[[], _Change] | None = None) -> int:
        """Replace weights, with nothing running.

        Args:
            undo: what gives the weights back as they are, where a change of several parts ends half way.
        """
        try:
            with self._lock, ExitStack() as held:
                # Other engines of the bundle take the same locks: in one order, so that none waits for the other.
                for handle, lane in sorted(self._lanes.items(), key=lambda item: id(item[1].lock)):
                    held.enter_context(lane.lock)
                    try:
                        lane.forget_graphs()
                    except RuntimeError:  # a stream that its owner has destroyed
                        del self._lanes[handle]
                        lane.close()
                try:
                    with torch.cuda.device(self.device):
                        return self._replace_all(change, undo)
                except BackendUnavailable:
                    # Some weights may be new and others old: nobody shall see what they compute, whoever waits for a lane.
                    self._plan = None
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
                    del part  # before the next one is waited for
        except BackendUnavailable:
            raise
        except BaseException as error:
            if refitter.replaced and not self._is_undone(undo):
                raise BackendUnavailable(
                    "weights were replaced half way: some are new and others old",
                    expected="all of them replaced, or none",
                    got=first_line(error),
                    remedy="load the bundle again",
                ) from error
            raise

    def _is_undone(self, undo: Callable[[], _Change] | None) -> bool:
        if undo is None:
            return False
        try:
            self._replace_all(undo(), None)
        except BaseException:  # whatever it is, the engine has some of both, and who asked for the change is told so
            return False
        return True

    def close(self) -> None:
        """Wait for what is running, and let go of the engine and its memory. Further calls are refused."""
        with self._lock:
            try:
                with ExitStack() as closing:  # all of them, whatever one says
                    while self._lanes:
                        closing.callback(self._close_lane, self._lanes.popitem()[1])
            finally:
                # The engine goes before the runtime that made it.
                self._plan = None
                self._runtime = None
                self.weights_memory = 0

    def _close_idle_lane(self) -> None:
        """Take the memory from the stream that was idle longest, if there is one that nobody records or has recorded."""
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

    def _opened(self) -> Plan:
        if self._plan is None:
            raise was_closed()
        return self._plan

    def _run(self, tensors: tuple[Tensor, ...], trajectory: Trajectory) -> Any:
        try:
            known = self._known[tuple([(x.shape, x.dtype, x.device) for x in tensors])]
        except (KeyError, AttributeError, TypeError):  # never seen, or no tensor at all
            known = self._learn(tensors)
        try:
            if self.signature.watch is not None:
                self.signature.watch(tensors)
            if not known.as_is:
                dtypes = self._opened().input_dtypes
                tensors = tuple([x.detach().to(self.device, dtype) for x, dtype in zip(tensors, dtypes, strict=True)])
            # The handle alone takes a tenth of the time of torch.cuda.current_stream(). Torch's own launchers take it too.
            stream = torch._C._cuda_getCurrentRawStream(self.device.index)
            while True:
                lane = self._lanes.get(stream) or self._open_lane()
                with lane.lock:
                    if not lane.closed:
                        outputs = lane.run(known.call, tensors, trajectory)
                        break
                self._opened()  # a closed lane goes soon, or the component is closed
            if known.origin is not None:
                outputs = [x.to(known.origin) for x in outputs]
        except torch.OutOfMemoryError as error:
            where = self.device if known.origin is None or known.origin.type != "cuda" else known.origin
            raise out_of_memory("the tensors of a call", self._opened().bytes_of(known.call), where) from error
        except RuntimeError:
            if any(x.layout != torch.strided for x in tensors):
                self._learn(tensors)  # refuses what the key does not tell from others
            raise
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def _learn(self, tensors: tuple[Tensor, ...]) -> _Known:
        """Check inputs of shapes, types and devices that were not seen before.

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
            shapes, Call(profile, shapes, outputs, caches)
        )  # graphs serve every type and device
        dtypes = self._opened().input_dtypes
        as_is = all(x.dtype == dtype and x.device == self.device for x, dtype in zip(tensors, dtypes, strict=True))
        first = tensors[0].device
        known = _Known(call, as_is, None if first == self.device else first)
        self._known[tuple([(x.shape, x.dtype, x.device) for x in tensors])] = known
        return known

    def _open_lane(self) -> Lane:
        """The current stream's lane, a new one in place of the least recently used where there are too many.

        Raises:
            UserError: the component was closed, the stream is being recorded, or it stands for another one in each thread.
        """
        stream = torch.cuda.current_stream()
        if stream.cuda_stream == _PER_THREAD:
            raise UserError(
                "a component cannot be called on CUDA's per-thread default stream",
                expected="a stream that is the same for every thread: torch's default stream, or a torch.cuda.Stream",
                got="cudaStreamPerThread",
                remedy="with torch.cuda.stream(torch.cuda.Stream()): …",
            )
        with self._lock:
            plan = self._opened()
            if lane := self._lanes.get(stream.cuda_stream):
                return lane
            if torch.cuda.is_current_stream_capturing():
                raise unready("no call on this stream so far")
            if len(self._lanes) >= self._streams:
                self._close_idle_lane()
            lane = self._lanes[stream.cuda_stream] = Lane(plan, stream, self._graphs)
            return lane
