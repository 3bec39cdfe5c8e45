"""Denoiser steps on one GPU: torch, torch.compile, TensorRT with its own 16-bit attention, with our plugin, with the faster.

    python bench/engine.py [--models sd15 sdxl flux pixart sd3 video video-81]
                           [--peers torch torchao-fp8 torchao-int8 modelopt-fp8 modelopt-int8 plain native group-norms plugin
                                    channels-first auto layers layers-convs convs layers-qdq native-layers]
                           [--dtype float16|bfloat16] [--scaling calibrated|dynamic] [--exports FOLDER]
                           [--modes precision|balanced|aggressive|fp8 …] [--kernels FOLDER] [--json FILE]
                           [--skipping STEPS COMPUTED]

Models are diffusers' own classes in the configurations of published models, with random weights. All models are whole except
Flux, whose 12 billion parameters take long to export: 3 of its 19 double blocks and 6 of its 38 single blocks, with everything
around them. The script measures time, and the error of each output against torch in FP32. Our engines come from one ONNX
export. They differ only in the lowering of attention and of the parts that become plugins with it: norms, rotary embeddings,
projections and the layers between. The plugin's engine has a timestep bin for each mode, so one engine gives the times of all
modes; the mean of some modes is the time of a plan that uses each mode for equally many steps. `--modes` times some of them
alone. In U-Nets group norms are plugins too: `channels-first` leaves them to TensorRT (engine.channels_last), `group-norms`
combines them with TensorRT's own attention (engine.attention: native). `auto` is the engine that `trtconvert compile` keeps,
the fastest of these: the faster attention at each site, the plugin everywhere, TensorRT's own attention everywhere, the plugin
at some lengths, or no plugin. The time of its build includes all engines that it builds and times.

`torchao-fp8` and `torchao-int8` are torch.compile with its linear layers quantised by torchao, activations per token at run
time; they need the package torchao. In transformers the repeated blocks are compiled, each kind once, and the whole model is
recorded in a CUDA graph; U-Nets, which have half of their layers between such blocks, are compiled as a whole. `modelopt-fp8`
and `modelopt-int8` are TensorRT with its own attention and linear layers between the Q and DQ of NVIDIA's Model Optimizer: FP8,
and INT8 with SmoothQuant, by its own configurations, calibrated on the timed inputs (bench/modelopt_layers.py); they need the
package nvidia-modelopt. Peers without their package are skipped with a notice. `layers` is our plugin between INT8 layers as
`trtconvert compile` builds them first. In `layers-convs` the U-Net convolutions of our kernel are INT8 too, as with
layers.kinds: [linear, conv]; in `convs` only these are INT8.

`plain` is TensorRT without trtconvert: the model as torch.onnx.export writes it, built last, with the same options. The engine
with TensorRT's own attention, the reference of the others, comes from our export, and has all graph changes of `trtconvert
compile` besides attention and group norms.

Engines are called through a CUDA graph, as in our runtime, and timed when all are built: in turns, each in a warm loop, so that
all meet the same temperature of the GPU. Latency is the median of CUDA events over repeated calls with rotating inputs; the
latency of an image is the median of the rounds. Memory is the peak on the device beyond its earlier use; for engines it is their
weights and their scratch. A second table has the time of each shape of attention alone, and its share of TensorRT's own step: the
gain if attention cost nothing. Prints Markdown with the date and the GPU; `--json` keeps the figures, model by model.
`--skipping 28 11` adds a table of images of 28 steps, with all steps and with 11 computed ones, by the runtime's skipped steps,
each with an extrapolation and a correction (which steps are computed does not change the time). `--exports` keeps the ONNX
models for further runs. `--kernels` writes a profile of each engine: its kernels in order, in a steady loop. Nothing is
asserted. The host's time per call is measured by bench/runtime.py.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import gc
import itertools
import json
import math
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import onnx_ir as ir
import torch
from architectures import ARCHITECTURES, TIMESTEP_MAX, describe
from modelopt_layers import OPSET, Kind, QdqLinear, quantised_layers, set_apart, with_layers
from reuse import Stated, uniform
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from trtconvert.attention.modes import Mode
from trtconvert.attention.reference import AttentionTables, tables_from_data
from trtconvert.attention.sites import SiteCall
from trtconvert.bundle import TensorRecord
from trtconvert.calib.layer_observer import LayerObserver
from trtconvert.calib.layer_plan import stated_layers
from trtconvert.calib.layer_scales import choose_scales, layer_tables
from trtconvert.diffusion_model import DiffusionModel
from trtconvert.engine import tensorrt
from trtconvert.engine.attention_choice import AttentionCase, Choice, site_plans
from trtconvert.engine.builder import build_plan
from trtconvert.engine.engine_choice import fastest_engine
from trtconvert.engine.engine_timer import denoiser_microseconds
from trtconvert.engine.loading import load_engine
from trtconvert.engine.logs import make_log
from trtconvert.engine.timing_cache import timing_cache_path
from trtconvert.errors import TrtconvertError, first_line
from trtconvert.export import storage
from trtconvert.export.lowering.group_norms import has_group_norms
from trtconvert.export.nodes.attention import attention_nodes
from trtconvert.export.passes.concats import promote_concats
from trtconvert.export.passes.scatters import leave_out_default_reductions
from trtconvert.export.passes.squeezes import drop_idle_squeezes
from trtconvert.export.trace import SiteOptions, trace
from trtconvert.linear import convs
from trtconvert.linear.sites import ConvertedLayer, Layer, LayerFinder, model_tensors, select_layers
from trtconvert.models.denoiser import intercepted
from trtconvert.recipe import EngineSection, LayersSection
from trtconvert.runtime.reuse import Reusable, follow

ROUNDS, REPEATS = 3, 30
WARM_UP_SECONDS = 0.5
STEPS = 50
"""Denoising steps of an image."""
TIMESTEPS = {Mode.PRECISION: 125.0, Mode.BALANCED: 375.0, Mode.AGGRESSIVE: 625.0, Mode.FP8: 875.0}
"""A timestep in the bin of each mode. Flux computes with thousandths of timesteps; FP16 holds the thousandths exactly."""
MODES = tuple(TIMESTEPS)
NATIVE = "TensorRT, its own attention"
PLUGIN = "TensorRT, our plugin"
GROUP_NORMS = f"{NATIVE}, our group norms"
CHANNELS_FIRST = f"{PLUGIN}, group norms TensorRT's own"
PLAIN = "TensorRT of torch.onnx.export"
OF_CONVS = {"layers-convs": ("linear", "conv"), "convs": ("conv",)}
"""Kinds of INT8 layers of peers with convolutions; other peers have linear layers."""
LAYER_PEERS: dict[str, tuple[str, bool, Literal["auto", "native", "plugin"]]] = {
    "layers": (f"{PLUGIN}, INT8 layers", False, "auto"),
    "layers-convs": (f"{PLUGIN}, INT8 layers and convolutions", False, "auto"),
    "convs": (f"{PLUGIN}, INT8 convolutions", False, "auto"),
    "layers-qdq": (f"{PLUGIN}, INT8 layers by Q/DQ alone", False, "native"),
    "native-layers": (f"{NATIVE}, INT8 layers by Q/DQ", True, "native"),
}
"""By peer: the name in tables, whether attention is TensorRT's own, and how layers are computed."""
TORCHAO_PEERS = {
    "torchao-fp8": ("torch.compile, torchao FP8", "Float8DynamicActivationFloat8WeightConfig", 1),
    "torchao-int8": ("torch.compile, torchao INT8", "Int8DynamicActivationInt8WeightConfig", 17),
}
"""By name: the title, the configuration in torchao.quantization, and the least rows of a layer: torch's INT8 product takes more
than 16 rows, so modulations stay in 16 bits."""
MODELOPT_PEERS: dict[str, tuple[str, Kind]] = {
    "modelopt-fp8": ("TensorRT, Model Optimizer's FP8", "fp8"),
    "modelopt-int8": ("TensorRT, Model Optimizer's INT8, SmoothQuant", "int8"),
}
"""By name: the title, and the type of the numbers."""
PACKAGES = {peer: "torchao" for peer in TORCHAO_PEERS} | {peer: "modelopt" for peer in MODELOPT_PEERS}
"""The module of each peer."""
WHEELS = {"torchao": "torchao", "modelopt": "nvidia-modelopt"}
"""The package of each module."""
PEERS = (
    "torch", *TORCHAO_PEERS, *MODELOPT_PEERS, "plain", "native", "group-norms", "plugin", "channels-first", "auto", *LAYER_PEERS
)  # fmt: skip
_NAMES = {torch.float16: "float16", torch.bfloat16: "bfloat16"}
LAYER_CALLS, LAYER_ROWS = 2, 16
"""Calibration calls at the timestep of each mode, and whole rows that are kept of each call."""


def export(
    model: DiffusionModel,
    tables: dict[str, AttentionTables],
    layers: dict[str, ConvertedLayer],
    path: Path,
    dtype: torch.dtype,
    scaling: str,
) -> None:
    """Writes the ONNX model in 16 bits, with scales that are calibrated or dynamic. The denoiser has to be on the CPU."""
    options = SiteOptions(TIMESTEP_MAX, scaling, True)
    exported = trace(model, tables, options, layers=layers, dims={}, dtype=dtype)
    unfinished = path.with_suffix(".partial")
    storage.save(exported, unfinished)
    unfinished.rename(path)


def export_plain(model: DiffusionModel, path: Path, dtype: torch.dtype, opset: int | None = None) -> None:
    """Writes the ONNX model of torch's exporter in 16 bits. The denoiser must be on the CPU.

    The function repairs three faults, because no parser accepts them: SDXL joins 16 bits and FP32 without a cast, PixArt squeezes
    a dimension that is not 1, and Wan's write into a tensor names the default reduction, which TensorRT 10.6 refuses.

    Args:
        opset: the exporter's own by default.
    """
    example = {
        name: torch.randn(shape, dtype=torch.float32 if name == "timestep" else dtype)
        for name, shape in ARCHITECTURES[model.name].shapes.items()
    }
    program = torch.onnx.export(
        model.denoiser, tuple(example.values()), input_names=list(example), output_names=["out"], dynamo=True,
        optimize=False, verbose=False, opset_version=opset,
    )  # fmt: skip
    assert program is not None  # None only if it writes to a file
    promote_concats(program.model)
    drop_idle_squeezes(program.model)
    program.optimize()
    leave_out_default_reductions(program.model)
    set_apart(program.model)
    unfinished = path.with_suffix(".partial")
    program.save(unfinished, external_data=True)
    unfinished.rename(path)  # the model refers to the file of weights by name


def repeated_blocks(denoiser: torch.nn.Module) -> list[torch.nn.Module]:
    """Returns a transformer's blocks: the modules in lists of one class. A U-Net has none, because its lists are mixed."""
    (model,) = denoiser.children()
    lists = [part for part in model.children() if isinstance(part, torch.nn.ModuleList)]
    alike = [part for part in lists if len(part) > 1 and len({type(block) for block in part}) == 1]
    return [block for part in alike for block in part] if len(alike) == len(lists) else []


def _fits_torchao(module: torch.nn.Module, name: str) -> bool:
    """Returns whether torchao's kernels take a layer's channels."""
    return isinstance(module, torch.nn.Linear) and module.in_features % 16 == 0 and module.out_features % 16 == 0


# Measuring --------------------------------------------------------------------------------------------------------------


Inputs = dict[str, Tensor]
Call = Callable[[int], Tensor]


def warm_up(call: Call) -> None:
    """Calls the functions until the GPU's clock is steady."""
    started = time.perf_counter()
    for index in itertools.count():
        call(index)
        torch.cuda.synchronize()
        if time.perf_counter() - started > WARM_UP_SECONDS:
            break


def times_ms(call: Call) -> list[float]:
    """Returns the times of calls in milliseconds, by CUDA events; `call` gets a rotating index."""
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(REPEATS)]
    for i, (start, end) in enumerate(events):
        start.record()
        call(i)
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in events]


def rotating(forward: Callable[..., Tensor], inputs: Sequence[Inputs]) -> Call:
    """Returns calls that take turns with the inputs."""
    return lambda index: forward(**inputs[index % len(inputs)])


def recorded(forward: Callable[..., Tensor], inputs: Sequence[Inputs]) -> Call:
    """Returns calls with some inputs, each in a CUDA graph; the addresses of the outputs stay the same."""
    stream = torch.cuda.Stream()
    graphs, outputs = list[torch.cuda.CUDAGraph](), list[Tensor]()
    stream.wait_stream(torch.cuda.current_stream())
    for feed in inputs:
        with torch.cuda.stream(stream):
            forward(**feed)
        torch.cuda.synchronize()
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1], stream=stream, pool=graphs[0].pool() if len(graphs) > 1 else None):
            outputs.append(forward(**feed))

    def call(index: int) -> Tensor:
        graphs[index % len(graphs)].replay()
        return outputs[index % len(graphs)]

    return call


def image_s(call: Call, steps: int = STEPS) -> float:
    """Returns the seconds of the consecutive steps of one image, without a wait between steps."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for step in range(steps):
        call(step)
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1000


def skipping(call: Call, inputs: Sequence[Inputs], steps: int, computed: int) -> Call:
    """Returns calls of one trajectory that skip steps as the runtime does. Outputs of computed steps are copied, as the runtime
    gives each call an output of its own."""
    schedule = uniform(steps, computed)
    schedule = replace(schedule, factors=((1.4, -0.42, 0.02),) * steps, corrections=(0.3,) * steps)
    sample = next(name for name in inputs[0] if name != "timestep")
    timesteps = [1000 * (1 - step / steps) for step in range(steps)]
    at = 0

    def denoiser(**_feed: Tensor) -> Tensor:
        return call(at).clone()

    following: Callable[..., Tensor] = denoiser

    def follows(step: int) -> Tensor:
        nonlocal at, following
        if step == 0:
            following = follow(Reusable(denoiser, Stated(schedule, sample)), timesteps)
        at = step
        return following(**inputs[step % len(inputs)])

    return follows


@dataclass(frozen=True)
class Kernel:
    """Microseconds of a kernel, and since the end of the previous kernel; negative if the two overlap."""

    name: str
    us: float
    gap_us: float


def kernels_of(call: Call) -> list[Kernel]:
    """Returns the kernels of a call in the order of their starts, by torch's profiler: medians of calls in a warm loop."""
    for i in range(REPEATS):
        call(i)
    torch.cuda.synchronize()
    calls = 6
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for i in range(calls):
            call(i)
        torch.cuda.synchronize()
    found = sorted(
        (event for event in profiled.events() or [] if event.device_type == DeviceType.CUDA),
        key=lambda event: event.time_range.start,
    )
    each = len(found) // calls
    if len(found) != each * calls:
        raise RuntimeError(f"{calls} calls have {len(found)} kernels, so that not all of them have as many")
    ends = [event.time_range.end for event in found]
    gaps = [0.0, *(event.time_range.start - end for event, end in zip(found[1:], ends, strict=False))]
    return [
        Kernel(
            found[i].name,
            statistics.median(event.time_range.elapsed_us() for event in found[i::each]),
            statistics.median(gaps[i::each]),
        )
        for i in range(each)
    ]


def write_kernels(kernels: Sequence[Kernel], path: Path) -> None:
    lines = [f"{kernel.us:8.1f} {kernel.gap_us:7.1f} {kernel.name}" for kernel in kernels]
    path.write_text("\n".join([f"{'us':>8} {'gap, us':>7} kernel", *lines]) + "\n")


class Engine:
    """A plan, with a CUDA graph for each of the inputs."""

    def __init__(self, trt: Any, plan: bytes, inputs: list[Inputs], dtype: torch.dtype) -> None:
        free = torch.cuda.mem_get_info()[0]
        self._runtime, self.engine = load_engine(trt, make_log(trt), plan)
        self.context = self.engine.create_execution_context()
        self.memory = free - torch.cuda.mem_get_info()[0]
        names = {self.engine.get_tensor_name(i) for i in range(self.engine.num_io_tensors)}
        self.out = torch.empty(tuple(self.engine.get_tensor_shape("out")), dtype=dtype, device="cuda")
        self._graphs = [self._recorded({name: feed[name] for name in names - {"out"}}) for feed in inputs]

    def _recorded(self, feed: Inputs) -> torch.cuda.CUDAGraph:
        for name, tensor in (*feed.items(), ("out", self.out)):
            self.context.set_tensor_address(name, tensor.data_ptr())
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.stream(stream):
            assert self.context.execute_async_v3(stream.cuda_stream)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            assert self.context.execute_async_v3(torch.cuda.current_stream().cuda_stream)
        return graph

    def __call__(self, index: int) -> Tensor:
        self._graphs[index % len(self._graphs)].replay()
        return self.out


class Phase:
    """Prints the name of the phase, and the seconds at its end."""

    def __init__(self, what: str) -> None:
        self.what, self.seconds = what, 0.0

    def __enter__(self) -> Phase:
        self._started = time.perf_counter()
        return self

    def __exit__(self, *_exception: object) -> None:
        torch.cuda.synchronize()
        self.seconds = time.perf_counter() - self._started
        print(f"{self.what}: {self.seconds:.1f} s", flush=True)


class Notices:
    """Prints the messages of a build, and the times that decide its choices."""

    def share(self, detail: str, done: float) -> None:
        if "µs" in detail:
            print(detail, flush=True)

    def notice(self, text: str) -> None:
        print(f"notice: {text}", flush=True)


@dataclass(frozen=True)
class Row:
    """A line of the tables. Time of a step in milliseconds, of all steps of an image in seconds, memory and plan in MiB. The
    spread is the largest less the smallest of the middle half. The last two are the seconds of images by `--skipping`."""

    model: str
    what: str
    ms: float
    spread: float
    image_s: float
    error: float
    memory: float
    build_s: float = 0.0
    plan: float = 0.0
    all_steps_s: float = math.nan
    computed_steps_s: float = math.nan


@dataclass(frozen=True)
class Timed:
    """A candidate for timing in turns, at a timestep of a mode's bin. Memory and plan are in bytes."""

    what: str
    call: Call
    mode: Mode
    memory: float
    build_s: float = 0.0
    plan: int = 0


@dataclass(frozen=True)
class Attention:
    """Attention of one shape, timed alone: microseconds of one site; the plugin's time is the mean of its modes.

    Attributes:
        queries, keys: [B, H, N, D].
    """

    model: str
    sites: int
    queries: tuple[int, ...]
    keys: tuple[int, ...]
    native_us: float
    plugin_us: float


def attention_alone(model: str, exported: ir.Model, choice: Choice) -> list[Attention]:
    """Returns the sites of an exported model by their shapes, in the order of the graph."""
    times = {site.name: site for site in (*choice.native, *itertools.chain(*choice.plugin))}
    sites: dict[AttentionCase, list[str]] = {}
    for name, plan in site_plans(exported, [{}]).items():
        sites.setdefault(plan.cases[0].heads_first(), []).append(name)
    return [
        Attention(model, len(names), case.q, case.k, times[names[0]].native_us, times[names[0]].plugin_us)
        for case, names in sites.items()
    ]


def chosen_layers(found: Sequence[Layer], kinds: Collection[str]) -> list[Layer]:
    """Returns the layers of some kinds that the default recipe converts, or would convert if `layers.kinds` named the kind."""
    section = LayersSection()
    return select_layers(found, ["*"], [], section.min_rows, kinds, few_rows=section.few_rows)[0]


class Bench:
    """The figures of one architecture."""

    def __init__(
        self,
        name: str,
        kernels: Path | None = None,
        with_layers: bool = True,
        with_convs: bool = False,
        dtype: torch.dtype = torch.float16,
        scaling: str = "calibrated",
        skipped: tuple[int, int] | None = None,
        modes: Sequence[Mode] = MODES,
    ) -> None:
        """
        Args:
            name: name of the architecture.
            kernels: folder for profiles of engines; None: no profiles.
            with_convs: convolutions that our kernel computes are INT8 layers too.
            dtype: FP16 or BF16.
            scaling: of queries and keys.
            skipped: numbers of steps and of computed steps of further images.
            modes: that are timed of engines with the plugin.
        """
        self._dtype, self._scaling, self._with_convs, self._skipped = dtype, scaling, with_convs, skipped
        self._modes = modes
        self.rows, self.attention = list[Row](), list[Attention]()
        self._engines = list[Timed]()
        self._modelopt = dict[str, dict[str, QdqLinear]]()
        self._kernels = kernels
        with Phase(f"{name}: made"):
            self.model = describe(name, "cuda")
        with Phase(f"{name}: run in FP32"):
            self._run_in_full_precision()
        if with_layers:
            with Phase(f"{name}: layers calibrated"):
                self.calibrate_layers()
        self.model.denoiser.to(dtype)

    def _run_in_full_precision(self) -> None:
        shapes = ARCHITECTURES[self.model.name].shapes
        half = [
            {name: torch.randn(shape, device="cuda", dtype=self._dtype) for name, shape in shapes.items()}
            for _ in range(3)
        ]

        finder, section = LayerFinder(self.model.denoiser), LayersSection()
        bins: dict[str, list[AttentionTables]] = {}  # one table for each bin's timesteps, as in a calibration
        self.expected: dict[Mode, Tensor] = {}
        for mode in MODES:

            def observe(call: SiteCall, mode: Mode = mode) -> Tensor:
                bins.setdefault(call.name, []).append(tables_from_data(call.q, call.k, call.v, mode).to("cpu"))
                return call.exact()

            feed = {name: x.float() for name, x in half[0].items()}
            feed["timestep"].fill_(TIMESTEPS[mode])
            self.expected[mode] = intercepted(self.model, observe, finder if mode == MODES[0] else None)(**feed)
        batch = shapes["timestep"][0]
        self._rows_of = {layer.name: layer.rows * batch for layer in finder.layers()}
        self.layers = chosen_layers(finder.layers(), section.kinds)
        if self._with_convs:
            self.layers += [layer for layer in chosen_layers(finder.layers(), ["conv"]) if not convs.left(layer, batch)]
        self.tables = {
            site: AttentionTables(**{field: torch.cat([getattr(t, field) for t in found]) for field in vars(found[0])})
            for site, found in bins.items()
        }
        self.inputs = [feed | {"timestep": feed["timestep"].float()} for feed in half]

    def calibrate_layers(self) -> None:
        """Finds scales of the layers' inputs, from calibration calls at the timestep of each mode. The denoiser is in FP32."""
        observer = LayerObserver(
            {layer.input_group for layer in self.layers}, TIMESTEP_MAX, len(MODES), rows=LAYER_ROWS
        )
        observed = intercepted(self.model, layers=observer)
        for mode in MODES:
            for _ in range(LAYER_CALLS):
                feed = {
                    n: torch.randn(shape, device="cuda") for n, shape in ARCHITECTURES[self.model.name].shapes.items()
                }
                feed["timestep"].fill_(TIMESTEPS[mode])
                observed(**feed)
        rows, tensors = observer.finish(), model_tensors(self.model.denoiser)
        readers: dict[str, list[Layer]] = {}
        for layer in self.layers:
            readers.setdefault(layer.input_group, []).append(layer)
        section = LayersSection()
        scales = {
            source: choose_scales(
                layers, rows[source].to("cuda"), tensors, len(MODES), statistic=section.scales, percentile=99.0,
                equalise=section.equalise, offsets=section.offsets,
            )
            for source, layers in readers.items()
        }  # fmt: skip
        stated = stated_layers(LayersSection(modes="static"), self.layers, len(MODES))
        modes = {name: decision.modes for name, decision in stated.items()}
        tables = layer_tables(self.model.denoiser, self.layers, scales, modes)
        self.converted = {layer.name: ConvertedLayer(layer, tables[layer.name]) for layer in self.layers}

    def _at(self, mode: Mode) -> None:
        for feed in self.inputs:
            feed["timestep"].fill_(TIMESTEPS[mode])

    def _time(self, timed: Sequence[Timed]) -> None:
        """Times functions in turns, and adds a row for each."""
        steps, images = [[list[float]() for _ in timed] for _ in range(2)]
        for round_ in range(ROUNDS):
            for index, one in enumerate(timed):
                self._at(one.mode)
                warm_up(one.call)
                steps[index] += times_ms(one.call)
                images[index].append(image_s(one.call))
                print(
                    f"{one.what}, round {round_ + 1}: {statistics.median(steps[index][-REPEATS:]):.3f} ms", flush=True
                )
        for one, of_steps, of_images in zip(timed, steps, images, strict=True):
            self._at(one.mode)
            expected = self.expected[one.mode]
            error = float((one.call(0).float() - expected).norm() / expected.norm())
            low, middle, high = statistics.quantiles(of_steps, n=4)
            row = Row(
                self.model.name, one.what, middle, high - low, statistics.median(of_images), error, one.memory / 2**20,
                one.build_s, one.plan / 2**20,
            )  # fmt: skip
            if self._skipped is not None:
                row = replace(row, **self._image_with_skipped_steps(one, *self._skipped))
            self.rows.append(row)
            print(row, flush=True)
            if self._kernels is not None and one.plan:
                name = re.sub(r"[^a-z0-9]+", "-", f"{self.model.name} {one.what}".lower())
                write_kernels(kernels_of(one.call), self._kernels / f"{name}.txt")

    def _image_with_skipped_steps(self, one: Timed, steps: int, computed: int) -> dict[str, float]:
        call = skipping(one.call, self.inputs, steps, computed)
        warm_up(one.call)
        with_all, with_computed = ([image_s(c, steps) for _ in range(ROUNDS)] for c in (one.call, call))
        return {"all_steps_s": statistics.median(with_all), "computed_steps_s": statistics.median(with_computed)}

    def torch_rows(self) -> None:
        self._torch_row("torch eager (SDPA)", self.model.denoiser, 0.0)
        with Phase(f"{self.model.name}: torch.compile") as compiling:
            compiled = torch.compile(self.model.denoiser, mode="reduce-overhead")
            for feed in self.inputs:
                compiled(**feed)
        self._torch_row("torch.compile, with CUDA graphs", compiled, compiling.seconds)
        torch._dynamo.reset()

    def _torch_row(self, what: str, forward: Callable[..., Tensor], built: float) -> None:
        torch.cuda.reset_peak_memory_stats()
        forward(**self.inputs[0])
        held = sum(x.nbytes for named in (*self.inputs, self.expected) for x in named.values())
        memory = torch.cuda.max_memory_allocated() - held
        self._time([Timed(what, rotating(forward, self.inputs), MODES[0], memory, built)])

    def torchao(self, peer: str) -> Timed:
        """Returns the compiled denoiser with linear layers quantised by torchao; the original denoiser does not change.

        If only blocks are compiled, the layers around them stay in 16 bits: torchao's INT8 product without compilation reads its
        input on the host, which no CUDA graph supports.
        """
        from torchao import quantization

        what, configuration, least = TORCHAO_PEERS[peer]
        free = torch.cuda.mem_get_info()[0]
        denoiser = copy.deepcopy(self.model.denoiser)
        blocks = repeated_blocks(denoiser)
        compiled_parts = {part for block in blocks or [denoiser] for part in block.modules()}

        def chosen(module: torch.nn.Module, name: str) -> bool:
            return module in compiled_parts and self._rows_of.get(name, 0) >= least and _fits_torchao(module, name)

        with Phase(f"{self.model.name}: {what}") as compiling:
            quantization.quantize_(denoiser, getattr(quantization, configuration)(), filter_fn=chosen)
            inputs = self.inputs
            if blocks:
                for block in blocks:
                    block.compile()
                call = recorded(denoiser, inputs)
            else:
                compiled = torch.compile(denoiser, mode="reduce-overhead")
                for feed in inputs:
                    compiled(**feed)
                call = rotating(compiled, inputs)
        memory = free - torch.cuda.mem_get_info()[0]
        return Timed(what, call, MODES[0], memory, compiling.seconds)

    def torchao_rows(self, peers: Collection[str]) -> None:
        for peer in TORCHAO_PEERS:
            if peer in peers:
                try:
                    self._time([self.torchao(peer)])
                except RuntimeError as error:  # the other peers keep their rows
                    print(f"notice: no {peer}: {first_line(error)}", flush=True)
                torch._dynamo.reset()
                torch.cuda.empty_cache()

    def calibrate_modelopt(self, peers: Collection[str]) -> None:
        """Makes the layers of Model Optimizer, and keeps them on the CPU until their models are exported."""

        def calls(denoiser: torch.nn.Module) -> None:
            for mode in MODES:
                self._at(mode)
                for feed in self.inputs:
                    denoiser(**feed)

        for peer, (what, kind) in MODELOPT_PEERS.items():
            if peer in peers:
                with Phase(f"{self.model.name}: calibrated, {what}"):
                    layers = quantised_layers(self.model.denoiser, kind, _fits_torchao, calls)
                    self._modelopt[peer] = {name: layer.cpu() for name, layer in layers.items()}
                torch.cuda.empty_cache()

    def to_cpu(self) -> None:
        """Moves the denoiser to the CPU for the exporters; torch's figures come before."""
        self.model.denoiser.cpu()
        torch.cuda.empty_cache()

    @property
    def has_convs(self) -> bool:
        """True if convolutions are among the layers."""
        return any(layer.kind == "conv" for layer in self.layers)

    def export(self, folder: Path, *, kinds: Collection[str]) -> Path:
        """Returns the folder of the ONNX model, with or without INT8 layers; written on the first call."""
        of_kinds = {"": "", "linear": "-int8", "conv": "-convs", "conv-linear": "-int8-convs"}["-".join(sorted(kinds))]
        layers = {name: layer for name, layer in self.converted.items() if layer.layer.kind in kinds} if kinds else {}
        kind = f"{_NAMES[self._dtype]}{of_kinds}{'-dynamic' if self._scaling == 'dynamic' else ''}"
        path = folder / f"{self.model.name}-{kind}.onnx"
        if not path.exists():
            with Phase(f"{path.stem}: exported"):
                export(self.model, self.tables, layers, path, self._dtype, self._scaling)
        return path

    def build_layers(self, path: Path, peers: Collection[str]) -> None:
        """Builds engines with INT8 layers, between our attention or TensorRT's."""
        trt = tensorrt.load()
        exported = ir.load(path)
        sites, inputs = attention_nodes(exported), self._records()
        for peer, (what, native, layers) in LAYER_PEERS.items():
            if peer not in peers:
                continue
            # The first engine of `trtconvert compile`, see `engine.layers`.
            kind = ("plugin" if has_group_norms(exported) else "native") if layers == "auto" else layers
            options = EngineSection(layers=kind)
            with Phase(f"{self.model.name}: built, {what}") as building:
                model = tensorrt.lowered(exported, list(sites) if native else [], options, [{}])
                plan = tensorrt.build_lowered(trt, model, path, inputs, [{}], options, Notices())
            self._load(trt, what, plan, not native, building.seconds)

    def build_plain(self, folder: Path) -> None:
        """Builds the engine of a model of torch.onnx.export, if TensorRT takes the model."""
        path = folder / f"{self.model.name}-{_NAMES[self._dtype]}-plain.onnx"
        if not path.exists():
            with Phase(f"{self.model.name}: exported by torch alone"):
                export_plain(self.model, path, self._dtype)
        self._build_as_it_is(path, PLAIN)

    def build_modelopt(self, folder: Path) -> None:
        """Builds engines with Model Optimizer's layers, where TensorRT takes them."""
        for peer, layers in self._modelopt.items():
            what, _ = MODELOPT_PEERS[peer]
            # Each run exports its own model: calibrations differ between runs.
            path = folder / f"{self.model.name}-{_NAMES[self._dtype]}-{peer}.onnx"
            with Phase(f"{self.model.name}: exported, {what}, {len(layers)} layers"):
                quantised = replace(self.model, denoiser=with_layers(self.model.denoiser, layers))
                export_plain(quantised, path, self._dtype, OPSET)
            self._build_as_it_is(path, what)

    def _build_as_it_is(self, path: Path, what: str) -> None:
        """Builds the engine of an unchanged ONNX model, unless TensorRT refuses the model."""
        trt, options = tensorrt.load(), EngineSection()
        try:
            with Phase(f"{self.model.name}: built, {what}") as building:
                plan = build_plan(
                    trt, path.read_bytes(), path, self._records(), [{}],
                    configure=partial(tensorrt.apply_options, trt, options=options), watch=Notices(), title=what,
                    timing_cache=timing_cache_path(tensorrt.device_name(), trt.__version__),
                )  # fmt: skip
        except TrtconvertError as refusal:  # the other peers keep their rows
            print(refusal, flush=True)
            return
        self._load(trt, what, plan, False, building.seconds)

    def _records(self) -> list[TensorRecord]:
        return [
            TensorRecord(
                name=x.name, dtype="float32" if x.name == "timestep" else _NAMES[self._dtype], shape=list(x.shape)
            )
            for x in self.model.inputs
        ]

    def build_engines(self, path: Path, peers: Collection[str]) -> None:
        """Builds engines of our export; if the plugin is among the peers, also times each shape of attention alone."""
        trt = tensorrt.load()
        exported = ir.load(path)
        sites = attention_nodes(exported)
        inputs, with_group_norms = self._records(), has_group_norms(exported)
        # Plans and seconds, by native sites and by the kernel of group norms.
        plans: dict[tuple[frozenset[str], bool], tuple[bytes, float]] = {}

        def built(native: Collection[str], channels_last: bool) -> tuple[bytes, float]:
            key = frozenset(native), channels_last and with_group_norms
            if key not in plans:  # `auto` may build an engine that exists already
                options = EngineSection(channels_last=channels_last)
                norms = ", group norms ours" if key[1] else ""
                with Phase(f"{self.model.name}: built, {len(native)} of {len(sites)} sites native{norms}") as building:
                    model = tensorrt.lowered(exported, native, options, [{}])
                    plan = tensorrt.build_lowered(trt, model, path, inputs, [{}], options, Notices())
                plans[key] = plan, building.seconds
            return plans[key]

        for peer, what, native, channels_last in (
            ("native", NATIVE, list(sites), False),
            ("group-norms", GROUP_NORMS, list(sites), True),
            ("plugin", PLUGIN, [], True),
            ("channels-first", CHANNELS_FIRST, [], False),
        ):
            if peer in peers and (with_group_norms or peer in ("native", "plugin")):
                plan, seconds = built(native, channels_last)
                self._load(trt, what, plan, not native, seconds)
        if not {"plugin", "auto"} & set(peers):
            return
        with Phase(f"{self.model.name}: attention timed alone") as alone:
            choice = tensorrt.choose_alone(trt, exported, [{}], EngineSection(), Notices())
        self.attention = attention_alone(self.model.name, exported, choice)
        if "auto" not in peers:
            return
        of_auto = [key for key in plans if key[1] == with_group_norms or key == (frozenset(sites), False)]
        before = sum(plans[key][1] for key in of_auto)
        with Phase(f"{self.model.name}: attention chosen") as choosing:
            time_engine = partial(denoiser_microseconds, trt, inputs, "timestep", [{}])
            plain = (lambda: built(list(sites), False)[0]) if with_group_norms else None
            auto = fastest_engine(choice, sites, lambda native: built(native, True)[0], plain, time_engine, Notices())
        kept = f"{len(auto.native_sites) if auto.with_plugin else len(sites)} of {len(sites)} sites native"
        kept += ", no plugin" if auto.is_plain else ""
        seconds = before + alone.seconds + choosing.seconds
        self._load(trt, f"TensorRT, auto: {kept}", auto.plan, auto.with_plugin, seconds)

    def _load(self, trt: Any, what: str, plan: bytes, with_plugin: bool, built: float) -> None:
        """Loads an engine for timing. An engine with the plugin is timed in several modes, by the timestep."""
        torch.cuda.empty_cache()
        engine = Engine(trt, plan, self.inputs, self._dtype)
        for mode in self._modes if with_plugin else MODES[:1]:
            title = f"{what}, {mode.name.lower()}" if with_plugin else what
            self._engines.append(Timed(title, engine, mode, engine.memory, built, len(plan)))

    def engine_rows(self) -> None:
        """Adds the rows of all built engines, and frees the engines."""
        self._time(self._engines)
        self._engines.clear()
        gc.collect()


# Tables -----------------------------------------------------------------------------------------------------------------


def native_ms(rows: Sequence[Row], model: str) -> float:
    """Returns the time of a step with TensorRT's own attention; NaN if unmeasured."""
    return next((row.ms for row in rows if row.model == model and row.what == NATIVE), float("nan"))


def print_steps(rows: Sequence[Row]) -> None:
    print(
        f"| denoiser | what | step, ms | spread | {STEPS} steps, s | against TensorRT | rel. error | memory, MiB "
        "| build, s | plan, MiB |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for row in rows:
        print(
            f"| {ARCHITECTURES[row.model].what} | {row.what} | {row.ms:.3f} | {row.spread:.3f} | {row.image_s:.3f} "
            f"| {native_ms(rows, row.model) / row.ms:.2f}× | {row.error:.4f} | {row.memory:.0f} | {row.build_s:.0f} "
            f"| {row.plan:.0f} |"
        )


def print_skipping(rows: Sequence[Row], steps: int, computed: int) -> None:
    print(f"| denoiser | what | {steps} steps, s | {computed} of them computed, s | against TensorRT with all steps |")
    print("| --- | --- | --- | --- | --- |")
    for row in rows:
        peer = next((other.all_steps_s for other in rows if (other.model, other.what) == (row.model, NATIVE)), math.nan)
        print(
            f"| {ARCHITECTURES[row.model].what} | {row.what} | {row.all_steps_s:.3f} | {row.computed_steps_s:.3f} "
            f"| {peer / row.computed_steps_s:.2f}× |"
        )


def print_attention(found: Sequence[Attention], rows: Sequence[Row]) -> None:
    """Prints the rows of each shape alone, and of TensorRT's step without attention."""
    print("| denoiser | sites | queries: B H N D | keys | TensorRT, µs | our plugin, µs | TensorRT, all sites, ms |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for model, shapes in itertools.groupby(found, key=lambda shape: shape.model):
        total = 0.0
        for shape in shapes:
            all_ms = shape.sites * shape.native_us / 1000
            total += all_ms
            print(
                f"| {ARCHITECTURES[model].what} | {shape.sites} | {' '.join(map(str, shape.queries))} | {shape.keys[2]} "
                f"| {shape.native_us:.1f} | {shape.plugin_us:.1f} | {all_ms:.3f} |"
            )
        step = native_ms(rows, model)
        print(
            f"| {ARCHITECTURES[model].what} | all | {total / step:.0%} of TensorRT's own step; at no cost it would be "
            f"{step / (step - total):.2f}× as fast | | | | {total:.3f} |"
        )


def installed(peers: Sequence[str]) -> list[str]:
    """Returns the peers with an installed package; prints an install command for the others."""
    missing = {peer: module for peer in peers if (module := PACKAGES.get(peer)) and find_spec(module) is None}
    for peer, module in missing.items():
        print(
            f"notice: no {peer}: the package {WHEELS[module]} is not installed; pip install {WHEELS[module]}",
            flush=True,
        )
    return [peer for peer in peers if peer not in missing]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(ARCHITECTURES), default=list(ARCHITECTURES))
    parser.add_argument(
        "--peers",
        nargs="*",
        choices=PEERS,
        default=PEERS,
        help="torch: as it is and compiled; torchao-*: compiled with its quantisation; modelopt-*: TensorRT with NVIDIA's "
        "quantisation; plain: with torch's own export; native: with our export and "
        "TensorRT's own attention; group-norms: between our group norms; plugin: with ours everywhere; channels-first: between "
        "TensorRT's; auto: what the build would keep of group-norms and plugin",
    )
    parser.add_argument("--dtype", choices=list(_NAMES.values()), default="float16")
    parser.add_argument(
        "--scaling", choices=["calibrated", "dynamic"], default="calibrated", help="of queries and keys"
    )
    parser.add_argument(
        "--exports",
        type=Path,
        help="keep the exported models here; they are made for `--peers torch`, or no peers, as well",
    )
    parser.add_argument("--kernels", type=Path, help="leave the kernels of each engine and their times in this folder")
    parser.add_argument("--json", type=Path, help="write the figures here as well, after each model")
    parser.add_argument(
        "--modes",
        nargs="+",
        choices=[mode.name.lower() for mode in MODES],
        default=[mode.name.lower() for mode in MODES],
    )
    parser.add_argument(
        "--skipping", type=int, nargs=2, metavar=("STEPS", "COMPUTED"), help="also time images that skip steps"
    )
    arguments = parser.parse_args()
    torch.backends.cudnn.allow_tf32 = False  # the reference of errors is FP32
    peers = installed(arguments.peers)
    rows, attention = list[Row](), list[Attention]()
    made_on = {
        "gpu": torch.cuda.get_device_name(),
        "date": str(datetime.date.today()),
        "tensorrt": tensorrt.status().detail,
        "torch": torch.__version__,
        "dtype": arguments.dtype,
        "scaling": arguments.scaling,
    }
    with torch.no_grad(), tempfile.TemporaryDirectory() as temporary:
        exports = arguments.exports or Path(temporary)
        exports.mkdir(parents=True, exist_ok=True)
        if arguments.kernels:
            arguments.kernels.mkdir(parents=True, exist_ok=True)
        for name in arguments.models:
            bench = Bench(
                name,
                arguments.kernels,
                bool(LAYER_PEERS.keys() & set(peers)),
                bool(OF_CONVS.keys() & set(peers)),
                getattr(torch, arguments.dtype),
                arguments.scaling,
                tuple(arguments.skipping) if arguments.skipping else None,
                [Mode[mode.upper()] for mode in arguments.modes],
            )
            if "torch" in peers:
                bench.torch_rows()
            bench.torchao_rows(peers)
            bench.calibrate_modelopt(peers)
            engines = set(peers) - {"torch", "plain", *TORCHAO_PEERS, *MODELOPT_PEERS, *LAYER_PEERS}
            bench.to_cpu()
            if arguments.exports or engines:
                path = bench.export(exports, kinds=())
                if engines:
                    bench.build_engines(path, engines)
            if of_layers := LAYER_PEERS.keys() & set(peers) - OF_CONVS.keys():
                bench.build_layers(bench.export(exports, kinds=("linear",)), of_layers)
            for peer, kinds in OF_CONVS.items():
                if peer in peers and bench.has_convs:
                    bench.build_layers(bench.export(exports, kinds=kinds), [peer])
            bench.build_modelopt(exports)
            if "plain" in peers:
                bench.build_plain(exports)
            bench.engine_rows()
            rows += bench.rows
            attention += bench.attention
            if arguments.json:
                figures = {"rows": [asdict(row) for row in rows], "attention": [asdict(shape) for shape in attention]}
                arguments.json.write_text(json.dumps(made_on | figures, indent=1))
            del bench
            gc.collect()
            torch.cuda.empty_cache()
    print(
        f"\n{made_on['date']}, {made_on['gpu']}, TensorRT {made_on['tensorrt']}, torch {made_on['torch']}, {made_on['dtype']}, "
        f"scales {made_on['scaling']}\n"
    )
    print_steps(rows)
    if arguments.skipping:
        print()
        print_skipping(rows, *arguments.skipping)
    if attention:
        print()
        print_attention(attention, rows)


if __name__ == "__main__":
    main()
