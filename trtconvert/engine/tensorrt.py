"""TensorRT: builds engines on their GPU, with the INT8 attention plugin where it is faster."""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import importlib.util
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from trtconvert.attention.modes import Mode
from trtconvert.bundle import ComponentRecord, Dims, EngineRecord, TensorRecord, opt_sizes, unquantised_file
from trtconvert.engine import (
    BackendStatus,
    BuildWatcher,
    BuiltEngine,
    SerializedEngine,
    lowered_model,
    version_numbers,
)
from trtconvert.engine.builder import build_plan, kernels_kept, tell_mixed
from trtconvert.engine.driver import cuda_problem, device_architecture, device_name, driver_problem
from trtconvert.engine.lowered_model import lowered
from trtconvert.engine.timing_cache import timing_cache_path
from trtconvert.errors import BackendUnavailable, TrtconvertError, UserError, several
from trtconvert.library import (
    REINSTALL,
    has_linear_kernel,
    library_path,
    library_version,
    load_library,
)
from trtconvert.noise_input import at_place
from trtconvert.recipe import EngineSection

if TYPE_CHECKING:
    import onnx_ir as ir

    from trtconvert.engine.attention_choice import Choice
    from trtconvert.engine.engine_choice import ChosenEngine, LayerKind

_PACKAGES = ("tensorrt", "tensorrt_bindings")
_REMEDY = "on a machine with an NVIDIA GPU: pip install tensorrt-cu13"
_ATTENTION = "plugin: INT8"
_PLUGINS = (
    "Int8Attention", "ResidualNorm", "Linear", "GroupNorm", "ChannelsLastAdd", "QuantiseRows", "Int8Linear", "Int8ResidualNorm",
    "Int8GroupNorm", "Int8Conv", "QuantiseChangedRows",
)  # fmt: skip
"""Names of the plugin library's creators."""


# Availability ----------------------------------------------------------------------------------------------------------


def status() -> BackendStatus:
    """Checks for the bindings, the libraries, a GPU and the plugin library."""

    def missing(detail: str, remedy: str) -> BackendStatus:
        return BackendStatus("tensorrt", _ATTENTION, False, detail, remedy)

    if problem := driver_problem():
        return missing(*problem)
    trt, failure = _imported()
    if trt is None:
        if not failure:
            return missing("TensorRT's Python package is not installed", _REMEDY)
        return missing(failure, f"{_REMEDY}; bindings and libraries need the same version")
    try:
        mismatch = version_mismatch(trt)
    except (OSError, AttributeError, LookupError, ValueError) as error:  # no such library, or a foreign package
        mismatch = f"TensorRT's library cannot be found by the package {trt.__name__}: {error}"
    if mismatch:
        return missing(mismatch, "install both in one version, and remove others from LD_LIBRARY_PATH")
    if library_path() is None:
        return missing("libtrtconvert.so, the plugin library, is not installed", REINSTALL)
    if problem := cuda_problem():
        return missing(
            f"torch cannot use the GPU: {problem}",
            "update the NVIDIA driver, or install torch and TensorRT for the CUDA version of the driver",
        )
    return BackendStatus("tensorrt", _ATTENTION, True, trt.__version__)


def _imported() -> tuple[Any | None, str]:
    """Returns TensorRT's Python module, or None and the failure of the installed packages, "" if none is installed."""
    failures = []
    for name in _PACKAGES:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:  # a folder is no package
            continue
        try:
            return importlib.import_module(name), ""
        except Exception as error:  # a broken or foreign package may raise anything
            failures.append(f"{name} cannot be loaded: {error}")
    return None, "; ".join(failures)


def version_mismatch(trt: Any) -> str:
    """Returns the versions of the bindings and of their library in words if they differ, else ""."""
    bindings_version = version_numbers(trt.__version__)
    loaded = ctypes.CDLL(f"libnvinfer.so.{bindings_version[0]}").getInferLibVersion()
    library_version = (loaded // 10_000, loaded // 100 % 100, loaded % 100)
    if library_version == bindings_version:
        return ""
    versions = [".".join(map(str, version)) for version in (bindings_version, library_version)]
    return f"the Python bindings are of TensorRT {versions[0]}, their library is {versions[1]}"


def bindings() -> Any:
    """Returns TensorRT's Python module.

    Raises:
        BackendUnavailable: see `status`.
    """
    state = status()
    if not state.available:
        raise BackendUnavailable(
            "TensorRT cannot be used here",
            expected="a GPU, TensorRT with Python bindings of its version, and the plugin library",
            got=state.detail,
            remedy=state.remedy,
        )
    return _imported()[0]


def load() -> Any:
    """Returns TensorRT's Python module with the plugins registered for building. Plans carry the plugin library themselves.

    Raises:
        BackendUnavailable: see `status`.
        TrtconvertError: the plugin library cannot be registered.
    """
    trt = bindings()
    load_library()  # raises with the reason; the registry would only refuse
    registry = trt.get_plugin_registry()

    def lacking() -> list[str]:
        return [name for name in _PLUGINS if registry.get_creator(name, "1", "") is None]

    if lacking() and (registry.load_library(str(library_path())) is None or lacking()):
        raise TrtconvertError(
            f"the plugin library {library_path()} cannot be registered",
            expected=f"a library that TensorRT {trt.__version__} loads, with the plugins {', '.join(_PLUGINS)}",
            got=f"a refusal, or an older library without {', '.join(lacking())}",
            remedy=f"{REINSTALL}; then run the command again",
        )
    return trt


# Building -------------------------------------------------------------------------------------------------------------


@kernels_kept()
def build_engine(
    name: str, component: ComponentRecord, onnx: Path, options: EngineSection, watch: BuildWatcher
) -> BuiltEngine:
    """Builds the engine of a bundle's component for this machine's GPU.

    `options.attention` chooses the plugin or TensorRT's own attention for each site of a denoiser, and `options.channels_last`
    makes its group norms plugins. With `auto` an engine without plugins may win. Plans with plugins hold the plugin library.
    Other components keep TensorRT's layers.

    Args:
        name: of the component.
        onnx: the exported model, a denoiser's with `Int8Attention` nodes.
    Raises:
        BackendUnavailable: see `load`; or the recipe asks for the plugin, and the library has no kernels for this GPU.
        TrtconvertError, KeyboardInterrupt: see `load` and `build_plan`.
        UserError: a denoiser has no `Int8Attention` node, a weight lies outside the model's folder, the disk of the temporary
            folder is full, or the options ask for 16-bit layers where layers quantise deltas.
    """
    import torch

    from trtconvert.engine.engine_choice import (
        Builds,
        ChosenEngine,
        fastest_engine,
        planned_engines,
        with_fastest_layers,
        with_layers_that_build,
    )
    from trtconvert.engine.engine_timer import denoiser_microseconds
    from trtconvert.export import storage
    from trtconvert.export.lowering.group_norms import has_group_norms
    from trtconvert.export.lowering.int8_layers import refitted_constants
    from trtconvert.export.nodes.attention import require_attention_nodes
    from trtconvert.export.nodes.common import has_own_nodes

    trt = load()
    if component.caches and (options.refittable or options.layers == "exact"):
        asked = "engine.refittable: true" if options.refittable else "engine.layers: exact"
        raise UserError(
            "layers that quantise deltas have no engine of 16-bit layers",
            expected="engine.refittable: false, and engine.layers: auto, plugin or native",
            got=asked,
            remedy="remove that option; or build the bundle with layers.modiff: false",
        )
    profiles = component.profiles or [component.dims]
    model = storage.load(onnx)
    nodes = require_attention_nodes(model) if component.is_denoiser else {}
    timed_runs = _TIMED_RUNS if component.is_denoiser else _TIMED_RUNS_OF_OTHERS

    kinds = _layer_kinds(component, model, onnx, options, watch)

    def build(native: Collection[str], options: EngineSection = options, *, layers: LayerKind) -> SerializedEngine:
        options = options.model_copy(update={"layers": layers})
        here = lowered(model, native, options, profiles)
        with builds.next() as watcher:
            return build_lowered(trt, here, onnx, component.all_inputs, profiles, options, watcher, timed_runs)

    in_int8 = component.has_int8_layers and options.layers != "exact" and not options.refittable
    if in_int8 and (lacking := lowered_model.against_plugins(options)):
        tell_mixed(component, f"the plugin library has {lacking}", watch)
    against = lowered_model.against_channels_last(options)
    with_group_norms = bool(nodes) and options.channels_last and has_group_norms(model)
    if with_group_norms and against:
        watch.notice(f"group norms stay TensorRT's own, with copies around them: {against}")
        with_group_norms = False
    attention = _attention_here(options, watch) if nodes else "native"
    builds = Builds(watch, 1)
    if attention == "auto":

        def time_engine(plan: SerializedEngine, bins: Mapping[float, int]) -> float:
            told = at_place(component.noise_input, torch.tensor([*bins], dtype=torch.float64)).tolist()
            counts = dict(zip(told, bins.values(), strict=True))
            return denoiser_microseconds(trt, component.all_inputs, component.timestep_input, profiles, plan, counts)

        choice = choose_alone(trt, model, profiles, options, watch)
        mixes, most = planned_engines(choice, len(nodes), with_group_norms, len(kinds))
        builds = Builds(watch, most)

        def fastest(layers: LayerKind) -> ChosenEngine:
            # The last kind has no plugins for layers that quantise deltas.
            without = kinds[-1] if component.caches else layers
            plain = partial(build, list(nodes), options.model_copy(update={"channels_last": False}), layers=without)
            with_layers = partial(build, layers=layers)
            without_plugins = plain if with_group_norms else None
            return fastest_engine(choice, nodes, with_layers, without_plugins, time_engine, builds, mixes)

        engine, kinds = with_layers_that_build(kinds, fastest, watch)
        if engine.is_plain and component.caches:
            kinds = kinds[::-1]
        if len(kinds) > 1:
            build_others = partial(build, options=_with_norms_of(engine, options))
            engine = with_fastest_layers(engine, nodes, kinds, build_others, time_engine, builds)
    else:
        native = list(nodes) if attention == "native" else []

        def with_attention(layers: LayerKind) -> ChosenEngine:
            return ChosenEngine(build(native, layers=layers), len(native) < len(nodes), [], None)

        engine, kinds = with_layers_that_build(kinds, with_attention, watch)
    chosen = _with_norms_of(engine, options).model_copy(update={"layers": engine.layers or kinds[0]})
    native = [site.name for site in engine.native_sites] if engine.with_plugin else list(nodes)
    built = lowered(model, native, chosen, profiles)
    if chosen.layers == "plugin" and not options.refittable:
        _tell_convs(lowered_model.convs_in_16_bits(model, chosen, profiles), watch)
        if options.layers == "plugin" and (count := lowered_model.linear_in_16_bits(built)):
            watch.notice(
                f"{count} products of INT8 layers are computed in 16 bits: our kernels compute layers behind plugins and layer "
                "norms, of sizes that gain. TensorRT computes the others in INT8 with engine.layers: native, or auto"
            )
    record = EngineRecord.of(name, "tensorrt", trt.__version__, str(device_architecture()), device_name()).model_copy(
        update={
            "attention": "plugin" if engine.with_plugin else "native",
            "plugin": library_version() if has_own_nodes(built) else "",
            "profiles": profiles,
            "native_sites": engine.native_sites,
            "plugin_us": engine.times.plugin if engine.times else None,
            "native_us": engine.times.native if engine.times else None,
            "with_plugins_us": engine.plain_times.with_plugins if engine.plain_times else None,
            "plain_us": engine.plain_times.plain if engine.plain_times else None,
            "layers": chosen.layers if component.has_int8_layers else "",
            "layers_us": engine.layer_times,
            "refittable": options.refittable,
            "weights": _shapes_by_name(model) if options.refittable else {},
            "int8_constants": refitted_constants(built) if options.refittable else {},
            "version_compatible": options.version_compatible,
            "hardware_compatible": options.hardware_compatible,
            "weight_streaming": options.weight_streaming,
        }
    )
    return BuiltEngine(engine.plan, record)


def _with_norms_of(engine: ChosenEngine, options: EngineSection) -> EngineSection:
    """Returns the options with the group norms of the engine."""
    return options.model_copy(update={"channels_last": options.channels_last and not engine.is_plain})


def _layer_kinds(
    component: ComponentRecord, model: ir.Model, onnx: Path, options: EngineSection, watch: BuildWatcher
) -> list[LayerKind]:
    """Returns the ways to compute the component's INT8 layers, the preferred one first. Timed builds compare all of them.

    In U-Nets nearly all layers are next to plugins, and plugin layers are faster; elsewhere TensorRT's layers fuse more.
    Refittable engines use plugin layers if the bundle keeps the unquantised weights.
    """
    from trtconvert.export.lowering.delta_plugins import can_fuse_deltas
    from trtconvert.export.lowering.group_norms import has_group_norms

    if component.caches:
        lacking = lowered_model.against_plugins(options)
        ours = can_fuse_deltas(model) and not lacking
        if options.layers == "auto":
            return ["plugin", "native"] if ours else ["native"]
        if options.layers == "plugin" and not ours:
            why = (
                f"the plugin library has {lacking}"
                if lacking
                else "our kernels support only linear layers with FP16 caches"
            )
            watch.notice(f"deltas are quantised by Q/DQ: {why}")
        return [options.layers]
    if options.refittable:
        if not component.has_int8_layers or options.layers == "exact":
            return ["exact"]
        if lacking := _against_new_weights(component, model, onnx, options):
            watch.notice(f"layers run in 16 bits, with the weights that INT8 holds: {lacking}")
            return ["exact"]
        return ["plugin"] if options.layers == "plugin" else ["plugin", "exact"]
    if options.layers != "auto":
        return [options.layers]
    if not component.has_int8_layers:
        return ["native"]
    ours = component.is_denoiser and has_group_norms(model) and not options.hardware_compatible and has_linear_kernel()
    return ["plugin", "exact"] if ours else ["native", "exact"]


def _against_new_weights(component: ComponentRecord, model: ir.Model, onnx: Path, options: EngineSection) -> str:
    """Returns why no INT8 layer of a refittable engine can be requantised, "" if one can."""
    from trtconvert.export.lowering.int8_layers import refittable_layers

    if not unquantised_file(onnx).is_file():
        return "the bundle does not keep their unquantised weights, which new weights need; build it with engine.refittable: true"
    if lacking := lowered_model.against_plugins(options):
        return f"the plugin library has {lacking}, not for {_gpus(options)}"
    if not refittable_layers(model, opt_sizes(component.profiles or [component.dims])):
        return "our kernels are not faster for any layer of known size and type"
    return ""


def _shapes_by_name(model: ir.Model) -> dict[str, list[int]]:
    """Returns the shapes of weights of two or more dimensions, by their names in refittable engines."""
    from trtconvert.export.lowering.layers import expand_layers

    model = model.clone()
    expand_layers(model, exact=True)
    weights = {name: value.shape for name, value in model.graph.initializers.items()}
    return {name: list(shape.numpy()) for name, shape in weights.items() if shape is not None and len(shape) > 1}


def _attention_here(options: EngineSection, watch: BuildWatcher) -> Literal["auto", "plugin", "native"]:
    """Returns the requested attention, or "native" where the plugin library has no kernels for the engine's GPUs.

    Raises:
        BackendUnavailable: the library has no kernels, and the recipe asks for the plugin by name.
    """
    against = lowered_model.against_plugins(options)
    if options.attention == "native" or not against:
        return options.attention
    if options.attention == "plugin":
        raise BackendUnavailable(
            "the INT8 plugin does not run on the engine's GPUs",
            expected=f"a plugin library with kernels for {_gpus(options)}",
            got=against,
            remedy="compile the library for them (TRTCONVERT_CUDA_ARCHITECTURES; sm80 is the oldest), or set engine.attention "
            "to native",
        )
    watch.notice(
        f"no INT8 attention: the plugin library has {against}, not for {_gpus(options)}; TensorRT's own stays at every site"
    )
    return "native"


def _gpus(options: EngineSection) -> str:
    """Returns the engine's GPUs in words."""
    if options.hardware_compatible:
        return "sm80 and later, which engine.hardware_compatible asks for"
    return str(device_architecture())


def _tell_convs(left: Mapping[str, str], watch: BuildWatcher) -> None:
    """Notifies about INT8 convolutions that the engine computes in 16 bits, by reason."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in left.items():
        by_reason.setdefault(reason, []).append(name)
    for reason, names in by_reason.items():
        watch.notice(
            f"convolutions in 16 bits, with the weights that INT8 holds: {len(names)} {reason}: {several(names, 3)}"
        )


_TIMED_RUNS = 8
"""Averaged timings of each kernel of a denoiser, as in trtexec. TensorRT's default is one, which is noisier."""

_TIMED_RUNS_OF_OTHERS = 1
"""The same for text encoders and the VAE, which run once for an image: timing the VAE's kernels takes most of its build."""


def build_lowered(
    trt: Any,
    model: ir.Model,
    path: Path,
    inputs: Sequence[TensorRecord],
    profiles: Sequence[Dims],
    options: EngineSection,
    watch: BuildWatcher,
    timed_runs: int = _TIMED_RUNS,
) -> SerializedEngine:
    """Builds a serialized engine for this machine's GPU from a model of `lowered`.

    A plan with plugins holds the plugin library, and runs without trtconvert.

    Args:
        trt: TensorRT's module, see `load`.
        model: its weights may move to a temporary file, see `storage.for_parser`.
        path: of the model, for messages.
        timed_runs: averaged timings of each kernel.
    Raises:
        UserError: the disk of the temporary folder is full.
        TrtconvertError, KeyboardInterrupt: see `build_plan`.
    """
    from trtconvert.export import storage
    from trtconvert.export.nodes.common import has_own_nodes

    def configure(config: Any) -> None:
        apply_options(trt, config, options, timed_runs)
        if has_own_nodes(model):
            config.plugins_to_serialize = [str(library_path())]

    import torch

    torch.cuda.empty_cache()  # frees the memory of timings for the builder
    with storage.for_parser(model) as content:
        return build_plan(
            trt,
            content,
            storage.ROOT / path.name,
            inputs,
            profiles,
            configure=configure,
            watch=watch,
            title=f"TensorRT {trt.__version__}",
            timing_cache=timing_cache_path(device_name(), trt.__version__),
        )


def apply_options(trt: Any, config: Any, options: EngineSection, timed_runs: int = _TIMED_RUNS) -> None:
    """Applies the recipe's engine section to a builder's configuration; timed_runs: averaged timings of each kernel."""
    if options.workspace_mb is not None:
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, options.workspace_mb << 20)
    config.builder_optimization_level = options.optimization_level
    config.avg_timing_iterations = timed_runs
    for flag, wanted in (
        (trt.BuilderFlag.REFIT, options.refittable),
        (trt.BuilderFlag.VERSION_COMPATIBLE, options.version_compatible),
        (trt.BuilderFlag.WEIGHT_STREAMING, options.weight_streaming),
    ):
        if wanted:
            config.set_flag(flag)
    if options.hardware_compatible:
        config.hardware_compatibility_level = trt.HardwareCompatibilityLevel.AMPERE_PLUS


# Choice of attention --------------------------------------------------------------------------------------------------


def choose_alone(
    trt: Any, model: ir.Model, profiles: Sequence[Dims], options: EngineSection, watch: BuildWatcher
) -> Choice:
    """Finds the faster attention of each site, timed alone on this GPU.

    Raises:
        TrtconvertError: a timed engine cannot be built, or memory ran out.
    """
    from trtconvert.engine.attention_choice import AttentionCase, CaseTimes, choose, site_plans
    from trtconvert.engine.attention_timer import AttentionTimer
    from trtconvert.export.nodes.attention import attention_nodes

    # An engine of one node has no weights.
    speed = options.model_copy(update={"refittable": False, "weight_streaming": False})

    def build_one(one: ir.Model) -> SerializedEngine:
        inputs = [
            TensorRecord(name=str(x.name), dtype=str(x.dtype), shape=list(x.shape.numpy()) if x.shape else [])
            for x in one.graph.inputs
        ]
        return build_lowered(trt, one, Path("attention.onnx"), inputs, [{}], speed, _NoticesOf(watch))

    timer = AttentionTimer(trt, build_one, watch.notice)

    def timed(case: AttentionCase, modes: frozenset[Mode]) -> CaseTimes:
        work = f"attention of {case.query_tokens} × {case.key_tokens} tokens"
        watch.share(f"timing {work}", 0.0)
        times = timer(case, modes)
        ours = ", ".join(f"{mode.name.lower()} {times.plugin[mode]:.1f}" for mode in sorted(modes))
        watch.share(f"{work}, µs: TensorRT's own {times.native:.1f}, the plugin's {ours}", 0.0)
        return times

    plans = site_plans(model, profiles)
    if unknown := [site for site in attention_nodes(model) if site not in plans]:
        watch.notice(f"the sizes of {', '.join(unknown)} are unknown: they are not timed, and get the INT8 plugin")
    return choose(plans, timed)


@dataclass(frozen=True)
class _NoticesOf:
    """A watcher of inner builds: passes only notices on."""

    watch: BuildWatcher

    def share(self, detail: str, done: float) -> None:
        pass

    def notice(self, text: str) -> None:
        self.watch.notice(text)
