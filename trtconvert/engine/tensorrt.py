"""TensorRT: engines whose attention is our INT8 plugin where that is the faster, built on the GPU that they are for."""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import importlib.util
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from trtconvert.attention.modes import Mode
from trtconvert.bundle import ComponentRecord, Dims, EngineRecord, TensorRecord, opt_sizes, unquantised_file
from trtconvert.engine import BackendStatus, BuildWatcher, BuiltEngine, version_numbers
from trtconvert.engine.builder import build_plan, tell_mixed
from trtconvert.engine.timing_cache import timing_cache_path
from trtconvert.errors import BackendUnavailable, TrtconvertError, UserError, first_line, several
from trtconvert.library import (
    REINSTALL,
    compiled_architectures,
    has_group_norm_kernel,
    has_linear_kernel,
    library_path,
    library_version,
    load_library,
    serves,
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
"""The names of the plugin library's creators."""


# What is here ---------------------------------------------------------------------------------------------------------


def status() -> BackendStatus:
    """Whether the bindings, the libraries, a GPU and our plugin are here."""

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
    except (OSError, AttributeError, LookupError, ValueError) as error:  # no such library, or no TensorRT's package
        mismatch = f"{trt.__name__} is none that TensorRT's library can be found by: {error}"
    if mismatch:
        return missing(mismatch, "install both of one version, and take others out of LD_LIBRARY_PATH")
    if library_path() is None:
        return missing("libtrtconvert.so, the plugin library, is not installed", REINSTALL)
    if problem := cuda_problem():
        return missing(
            f"torch cannot use the GPU: {problem}",
            "update the NVIDIA driver, or install torch and TensorRT for the CUDA version that it has",
        )
    return BackendStatus("tensorrt", _ATTENTION, True, trt.__version__)


def _imported() -> tuple[Any | None, str]:
    """TensorRT's Python module, or why none of those that are installed can be loaded; empty where none is installed."""
    failures = []
    for name in _PACKAGES:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:  # a folder of that name is no package
            continue
        try:
            return importlib.import_module(name), ""
        except Exception as error:  # a broken package, or another one of that name
            failures.append(f"{name} cannot be loaded: {error}")
    return None, "; ".join(failures)


def cuda_problem() -> str:
    """Why GPUs cannot be used here, as with a driver older than CUDA; empty where they can.

    TensorRT must not find out: its Runtime then ends the process. Whether a certain GPU has room is for its user to find out:
    nothing is done on one here.
    """
    import torch

    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:  # an assertion, where torch was built without CUDA
        return first_line(error)
    return ""


def version_mismatch(trt: Any) -> str:
    """How the versions of the bindings and of the library that they loaded differ; empty where they do not."""
    bindings_version = version_numbers(trt.__version__)
    loaded = ctypes.CDLL(f"libnvinfer.so.{bindings_version[0]}").getInferLibVersion()
    library_version = (loaded // 10_000, loaded // 100 % 100, loaded % 100)
    if library_version == bindings_version:
        return ""
    versions = [".".join(map(str, version)) for version in (bindings_version, library_version)]
    return f"the Python bindings are of TensorRT {versions[0]}, the library that they load is {versions[1]}"


def device_architecture() -> str | None:
    """Architecture of the first GPU, like "sm90", through the driver, without torch; None where there is no GPU."""
    first = _first_gpu()
    if first is None:
        return None
    driver, device = first
    major, minor = ctypes.c_int(), ctypes.c_int()
    # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR
    for value, attribute in ((major, 75), (minor, 76)):
        if driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device):
            return None
    return f"sm{major.value}{minor.value}"


def device_name() -> str:
    """Name of the first GPU, like "NVIDIA H200"; empty where there is none."""
    first = _first_gpu()
    if first is None:
        return ""
    driver, device = first
    name = ctypes.create_string_buffer(256)
    return "" if driver.cuDeviceGetName(name, len(name), device) else name.value.decode(errors="replace")


def driver_problem() -> tuple[str, str] | None:
    """Why the driver gives no GPU, and what can be done; None where it gives one."""
    driver, _, failure = _asked_driver()
    if driver is not None and failure == 0:
        return None
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if driver is None or failure in (_NO_DEVICE, _INVALID_DEVICE):
        if driver is not None and hidden is not None:
            return (
                f"no NVIDIA GPU, with CUDA_VISIBLE_DEVICES={hidden!r}",
                "name a GPU in CUDA_VISIBLE_DEVICES, or unset it",
            )
        return (
            "no NVIDIA GPU",
            "run `trtconvert compile BUNDLE` on the machine that it is for; bundles are built without one",
        )
    words = ctypes.c_char_p()
    driver.cuGetErrorString(failure, ctypes.byref(words))
    return (
        f"the NVIDIA driver fails with error {failure}: {(words.value or b'unknown').decode(errors='replace')}",
        "see whether nvidia-smi works; after an update of the driver restart the machine, and in a container give it the GPU",
    )


_NO_DEVICE, _INVALID_DEVICE = 100, 101
"""CUDA_ERROR_NO_DEVICE, CUDA_ERROR_INVALID_DEVICE."""


def _first_gpu() -> tuple[ctypes.CDLL, ctypes.c_int] | None:
    """The driver, and its handle of the first GPU."""
    driver, device, failure = _asked_driver()
    return None if driver is None or failure else (driver, device)


def _asked_driver() -> tuple[ctypes.CDLL | None, ctypes.c_int, int]:
    """The driver, None where there is none; its handle of the first GPU; and its error."""
    device = ctypes.c_int()
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None, device, 0
    return driver, device, driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), 0)


def bindings() -> Any:
    """TensorRT's Python module.

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
    """TensorRT's Python module, with our plugin registered, for building. Plans carry the plugin library themselves.

    Raises:
        BackendUnavailable: see `status`.
        TrtconvertError: the plugin library is there and cannot be registered.
    """
    trt = bindings()
    load_library()  # says what it lacks where it does not load; the registry only refuses
    registry = trt.get_plugin_registry()

    def lacking() -> list[str]:
        return [name for name in _PLUGINS if registry.get_creator(name, "1", "") is None]

    if lacking() and (registry.load_library(str(library_path())) is None or lacking()):
        raise TrtconvertError(
            f"the plugin library {library_path()} cannot be registered",
            expected=f"a library that TensorRT {trt.__version__} loads, with the plugins {', '.join(_PLUGINS)}",
            got=f"a refusal by its plugin registry, or an older library: {', '.join(lacking())} not there",
            remedy=f"{REINSTALL}; then run it anew",
        )
    return trt


# Building -------------------------------------------------------------------------------------------------------------


def build_engine(
    name: str, component: ComponentRecord, onnx: Path, options: EngineSection, watch: BuildWatcher
) -> BuiltEngine:
    """An engine of a bundle's component for this machine's GPU.

    Each site of a denoiser gets the plugin or TensorRT's own attention, as `options.attention` says, and its group norms become
    plugins either way, as `options.channels_last` says, unless by `auto` an engine without any plugin is the faster. The plan
    holds the plugin library where it has one. Other components have no sites and keep TensorRT's layers.

    Args:
        name: of the component.
        onnx: the model as it is exported, a denoiser's with `Int8Attention` nodes.
    Raises:
        BackendUnavailable: see `load`; or the plugin library has no kernels for this GPU, and the plugin was asked for.
        TrtconvertError, KeyboardInterrupt: see `load` and `build_plan`.
        UserError: a denoiser has no `Int8Attention` node, a weight lies outside the model's folder, or the disk of the temporary
            folder is full; or 16-bit layers are asked for, and layers quantise deltas.
    """
    import torch

    from trtconvert.engine.engine_choice import (
        ChosenEngine,
        fastest_engine,
        with_fastest_layers,
        with_layers_that_build,
    )
    from trtconvert.engine.engine_timer import denoiser_microseconds
    from trtconvert.export import storage
    from trtconvert.export.lowering import has_group_norms, refitted_constants
    from trtconvert.export.nodes.attention import require_attention_nodes
    from trtconvert.export.nodes.common import has_own_nodes

    trt = load()
    if component.caches and (options.refittable or options.layers == "exact"):
        asked = "engine.refittable: true" if options.refittable else "engine.layers: exact"
        raise UserError(
            "layers that quantise deltas have no engine of 16-bit layers",
            expected="engine.refittable: false, and engine.layers: auto, plugin or native",
            got=asked,
            remedy="leave that out; or build the bundle with layers.modiff: false",
        )
    profiles = component.profiles or [component.dims]
    model = storage.load(onnx)
    nodes = require_attention_nodes(model) if component.is_denoiser else {}

    kinds = _layer_kinds(component, model, onnx, options, watch)

    def build(native: Collection[str], options: EngineSection = options, *, layers: LayerKind) -> bytes:
        options = options.model_copy(update={"layers": layers})
        here = lowered(model, native, options, profiles)
        return build_lowered(trt, here, onnx, component.all_inputs, profiles, options, watch)

    in_int8 = component.has_int8_layers and options.layers != "exact" and not options.refittable
    if in_int8 and (lacking := _against_plugins(options)):
        tell_mixed(component, f"the plugin library has {lacking}", watch)
    against = _against_channels_last(options)
    with_group_norms = bool(nodes) and options.channels_last and has_group_norms(model)
    if with_group_norms and against:
        watch.notice(f"group norms stay TensorRT's own, with copies around them: {against}")
        with_group_norms = False
    attention = _attention_here(options, watch) if nodes else "native"
    if attention == "auto":

        def time_engine(plan: bytes, bins: Mapping[float, int]) -> float:
            told = at_place(component.noise_input, torch.tensor([*bins], dtype=torch.float64)).tolist()
            counts = dict(zip(told, bins.values(), strict=True))
            return denoiser_microseconds(trt, component.all_inputs, component.timestep_input, profiles, plan, counts)

        choice = choose_alone(trt, model, profiles, options, watch)

        def fastest(layers: LayerKind) -> ChosenEngine:
            # The last kind has no plugins for layers that quantise deltas.
            without = kinds[-1] if component.caches else layers
            plain = partial(build, list(nodes), options.model_copy(update={"channels_last": False}), layers=without)
            with_layers = partial(build, layers=layers)
            return fastest_engine(choice, nodes, with_layers, plain if with_group_norms else None, time_engine, watch)

        engine, kinds = with_layers_that_build(kinds, fastest, watch)
        if engine.is_plain and component.caches:
            kinds = kinds[::-1]
        if len(kinds) > 1:
            build_others = partial(build, options=_with_norms_of(engine, options))
            engine = with_fastest_layers(engine, nodes, kinds, build_others, time_engine, watch)
    else:
        native = list(nodes) if attention == "native" else []

        def with_attention(layers: LayerKind) -> ChosenEngine:
            return ChosenEngine(build(native, layers=layers), len(native) < len(nodes), [], None)

        engine, kinds = with_layers_that_build(kinds, with_attention, watch)
    chosen = _with_norms_of(engine, options).model_copy(update={"layers": engine.layers or kinds[0]})
    native = [site.name for site in engine.native_sites] if engine.with_plugin else list(nodes)
    built = lowered(model, native, chosen, profiles)
    if chosen.layers == "plugin" and not options.refittable:
        _tell_convs(_convs_in_16_bits(model, chosen, profiles), watch)
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
    """The options, with group norms as an engine has them."""
    return options.model_copy(update={"channels_last": options.channels_last and not engine.is_plain})


def _layer_kinds(
    component: ComponentRecord, model: ir.Model, onnx: Path, options: EngineSection, watch: BuildWatcher
) -> list[LayerKind]:
    """How a component's INT8 layers may be computed here: what is built, and what it is compared with where engines are timed.

    In U-Nets nearly all layers lie beside plugins, where ours are the faster; elsewhere TensorRT's, which fuse more. Refittable
    engines have ours, whose weights can be replaced, where the bundle keeps what they are quantised from.
    """
    from trtconvert.export.lowering import can_fuse_deltas, has_group_norms

    if component.caches:  # engines without these have other inputs
        lacking = _against_plugins(options)
        ours = can_fuse_deltas(model) and not lacking
        if options.layers == "auto":
            return ["plugin", "native"] if ours else ["native"]
        if options.layers == "plugin" and not ours:
            why = (
                f"the plugin library has {lacking}"
                if lacking
                else "our kernels take linear layers with FP16 caches alone"
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
    """Why no INT8 layer of a refittable engine can be quantised anew; empty where one can."""
    from trtconvert.export.lowering import refittable_layers

    if not unquantised_file(onnx).is_file():
        return (
            "the bundle does not keep what they were quantised from, for other weights to be quantised as well; build it with "
            "engine.refittable: true"
        )
    if lacking := _against_plugins(options):
        return f"the plugin library has {lacking}, not for {_gpus(options)}"
    if not refittable_layers(model, opt_sizes(component.profiles or [component.dims])):
        return "none is of a type, and of a size that is known, for which our kernels gain"
    return ""


def _shapes_by_name(model: ir.Model) -> dict[str, list[int]]:
    """Shapes of the weights of more than one dimension, by their names in refittable engines."""
    from trtconvert.export.lowering import expand_layers

    model = model.clone()
    expand_layers(model, exact=True)
    weights = {name: value.shape for name, value in model.graph.initializers.items()}
    return {name: list(shape.numpy()) for name, shape in weights.items() if shape is not None and len(shape) > 1}


def _against_channels_last(options: EngineSection) -> str:
    """Why a denoiser's engine has no plugins for group norms, whatever `channels_last` says; empty where it can have them."""
    if options.refittable:
        return "engine.refittable keeps weights as they are named"
    if options.hardware_compatible:
        return "not every GPU that engine.hardware_compatible asks for has a kernel for them"
    return "" if has_group_norm_kernel() else "the plugin library has no kernel for them on this GPU"


def _attention_here(options: EngineSection, watch: BuildWatcher) -> Literal["auto", "plugin", "native"]:
    """Which attention was asked for, or TensorRT's own where the plugin library has no kernels for the engine's GPUs.

    Raises:
        BackendUnavailable: it has none, and the plugin was asked for by name.
    """
    against = _against_plugins(options)
    if options.attention == "native" or not against:
        return options.attention
    if options.attention == "plugin":
        raise BackendUnavailable(
            "the INT8 plugin does not run where the engine shall run",
            expected=f"a plugin library with kernels for {_gpus(options)}",
            got=against,
            remedy="compile the library for it (TRTCONVERT_CUDA_ARCHITECTURES; sm80 is the oldest), or set engine.attention "
            "to native",
        )
    watch.notice(
        f"no INT8 attention: the plugin library has {against}, not for {_gpus(options)}; TensorRT's own stays at every site"
    )
    return "native"


def _gpus(options: EngineSection) -> str:
    """Those that an engine shall run on."""
    here = str(device_architecture())
    return "sm80 and later, which engine.hardware_compatible asks for" if options.hardware_compatible else here


def _convs_in_16_bits(model: ir.Model, options: EngineSection, profiles: Sequence[Dims]) -> dict[str, str]:
    """The INT8 convolutions that an engine with our layers has in 16 bits, and why."""
    from trtconvert.export.lowering import left_convs
    from trtconvert.export.nodes.attention import attention_nodes
    from trtconvert.export.nodes.layers import CONV, layer_nodes

    names = [name for name, node in layer_nodes(model).items() if node.op_type == CONV]
    if not names:
        return {}
    if not attention_nodes(model) or not options.channels_last:
        return dict.fromkeys(names, "in an engine whose group norms are TensorRT's own")
    if against := _against_channels_last(options) or ("" if has_linear_kernel() else "no INT8 kernel on this GPU"):
        return dict.fromkeys(names, f"without group norms that give INT8: {against}")
    return left_convs(model, opt_sizes(profiles))


def _tell_convs(left: Mapping[str, str], watch: BuildWatcher) -> None:
    """Say which INT8 convolutions an engine has in 16 bits, and why."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in left.items():
        by_reason.setdefault(reason, []).append(name)
    for reason, names in by_reason.items():
        watch.notice(
            f"convolutions in 16 bits, with the weights that INT8 holds: {len(names)} {reason}: {several(names, 3)}"
        )


def _against_plugins(options: EngineSection) -> str:
    """Which kernels the plugin library has, where none serves the GPUs that an engine shall run on; else empty."""
    compiled, here = compiled_architectures(), device_architecture()
    wanted = "sm80" if options.hardware_compatible else here
    if wanted is not None and serves(wanted, compiled):
        return ""
    return f"kernels for {', '.join(f'sm_{name}' for name in compiled)}"


def lowered(model: ir.Model, native: Collection[str], options: EngineSection, profiles: Sequence[Dims]) -> ir.Model:
    """A copy of an exported model for TensorRT on this GPU: some sites with its own attention, the others with the plugin.

    Refittable engines keep their projections as they are: a weight is replaced by the name that it has in the state dict. Some of
    their INT8 layers are plugins, see `refittable_layers`, and the others 16-bit products.

    Args:
        native: the names of the sites with TensorRT's own attention. A model without any site is no denoiser, and keeps its
            group norms.
    Raises:
        UserError: the model has no site of one of the names.
    """
    from trtconvert.export.lowering import timesteps_kept

    model = model.clone()
    with timesteps_kept(model):
        _lower(model, native, options, profiles)
    # Nodes that read the timestep stand where what they replace stood, which may be before that is known.
    model.graph.sort()
    return model


def _lower(model: ir.Model, native: Collection[str], options: EngineSection, profiles: Sequence[Dims]) -> None:
    """See `lowered`; in place."""
    from trtconvert.export.lowering import (
        expand_layers,
        fuse_deltas,
        fuse_few_row_layers,
        fuse_group_norms,
        fuse_int8_convs,
        fuse_mixed_layers,
        fuse_refittable_layers,
        has_deltas,
        lower_deltas,
        lower_to_native,
        lower_to_plugin,
        multiply_patches,
        quantise_products,
        refittable_layers,
        split_modulations,
        split_products,
    )
    from trtconvert.export.nodes.attention import attention_nodes
    from trtconvert.export.nodes.layers import layer_nodes

    of_deltas = has_deltas(model)
    # First: rewrites look for products.
    if options.refittable and options.layers == "plugin" and not _against_plugins(options):
        ours = refittable_layers(model, opt_sizes(profiles))
        others = layer_nodes(model).keys() - ours
        in_int8 = expand_layers(model, exact=others, offsets=True, refittable=True)
    else:
        exact: bool | Collection[str] = options.layers == "exact" or options.refittable
        if not exact and options.layers == "plugin":
            exact = _convs_in_16_bits(model, options, profiles).keys()
        in_int8 = expand_layers(model, exact=exact, offsets=options.layers == "plugin" and not of_deltas)
    # Of group norms and of linear layers there are kernels for some GPUs only.
    if attention_nodes(model) and options.channels_last and not _against_channels_last(options):
        fuse_group_norms(model)
        if options.layers == "plugin" and has_linear_kernel():
            fuse_int8_convs(model, opt_sizes(profiles))
    if native:
        lower_to_native(model, native)
    if attention_nodes(model):
        with_linear = not options.hardware_compatible and has_linear_kernel()
        lower_to_plugin(
            model,
            refittable=options.refittable,
            linear_profiles=opt_sizes(profiles) if with_linear else (),
            int8_layers=options.layers == "plugin",
        )
    if not options.refittable:
        split_products(model)
        split_modulations(model)
        multiply_patches(model)
    elif in_int8:
        fuse_refittable_layers(model, opt_sizes(profiles))
    if in_int8 and not options.refittable and options.layers != "exact" and not _against_plugins(options):
        fuse_few_row_layers(model, opt_sizes(profiles))
        fuse_mixed_layers(model)
    if options.layers == "plugin" and not _against_plugins(options):
        fuse_deltas(model)
    # Beside plugins Q/DQ gains nothing: what our kernels do not take stays in 16 bits. But linear layers beside those that
    # quantise deltas are INT8 whoever computes these.
    if options.layers != "plugin" or of_deltas:
        quantise_products(model)
    lower_deltas(model)


def build_lowered(
    trt: Any,
    model: ir.Model,
    path: Path,
    inputs: Sequence[TensorRecord],
    profiles: Sequence[Dims],
    options: EngineSection,
    watch: BuildWatcher,
) -> bytes:
    """A serialized engine for this machine's GPU, from a model as `lowered` gives it.

    The plan holds the plugin library where it needs it, so that it runs where no trtconvert is installed.

    Args:
        trt: what `load` gave.
        model: weights that it holds may go to a temporary file (see `storage.for_parser`).
        path: of the model, for messages.
    Raises:
        UserError: the disk of the temporary folder is full.
        TrtconvertError, KeyboardInterrupt: see `build_plan`.
    """
    from trtconvert.export import storage
    from trtconvert.export.nodes.common import has_own_nodes

    def configure(config: Any) -> None:
        apply_options(trt, config, options)
        if has_own_nodes(model):
            config.plugins_to_serialize = [str(library_path())]

    import torch

    torch.cuda.empty_cache()  # what timings have left there is room for the builder
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


_TIMED_RUNS = 8
"""Of each kernel that TensorRT chooses among, averaged, as in its trtexec. Its default of one leaves more to chance."""


def apply_options(trt: Any, config: Any, options: EngineSection) -> None:
    """Set on a builder's configuration what the recipe's engine section asks for."""
    if options.workspace_mb is not None:
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, options.workspace_mb << 20)
    config.builder_optimization_level = options.optimization_level
    config.avg_timing_iterations = _TIMED_RUNS
    for flag, wanted in (
        (trt.BuilderFlag.REFIT, options.refittable),
        (trt.BuilderFlag.VERSION_COMPATIBLE, options.version_compatible),
        (trt.BuilderFlag.WEIGHT_STREAMING, options.weight_streaming),
    ):
        if wanted:
            config.set_flag(flag)
    if options.hardware_compatible:
        config.hardware_compatibility_level = trt.HardwareCompatibilityLevel.AMPERE_PLUS


# Which attention ------------------------------------------------------------------------------------------------------


def choose_alone(
    trt: Any, model: ir.Model, profiles: Sequence[Dims], options: EngineSection, watch: BuildWatcher
) -> Choice:
    """Which attention is the faster at each site of an exported model, timed alone on this GPU.

    Raises:
        TrtconvertError: an engine that is timed cannot be built, or memory ran out.
    """
    from trtconvert.engine.attention_choice import AttentionCase, CaseTimes, choose, site_plans
    from trtconvert.engine.attention_timer import AttentionTimer
    from trtconvert.export.nodes.attention import attention_nodes

    # An engine of one node has no weights to replace or to stream.
    speed = options.model_copy(update={"refittable": False, "weight_streaming": False})

    def build_one(one: ir.Model) -> bytes:
        inputs = [
            TensorRecord(name=str(x.name), dtype=str(x.dtype), shape=list(x.shape.numpy()) if x.shape else [])
            for x in one.graph.inputs
        ]
        return build_lowered(trt, one, Path("attention.onnx"), inputs, [{}], speed, _NoticesOf(watch))

    timer = AttentionTimer(trt, build_one, watch.notice)

    def timed(case: AttentionCase, modes: frozenset[Mode]) -> CaseTimes:
        what = f"attention of {case.query_tokens} × {case.key_tokens} tokens"
        watch.share(f"timing {what}", 0.0)
        times = timer(case, modes)
        ours = ", ".join(f"{mode.name.lower()} {times.plugin[mode]:.1f}" for mode in sorted(modes))
        watch.share(f"{what}, µs: TensorRT's own {times.native:.1f}, the plugin's {ours}", 0.0)
        return times

    plans = site_plans(model, profiles)
    if unknown := [site for site in attention_nodes(model) if site not in plans]:
        watch.notice(f"the graph does not tell the sizes of {', '.join(unknown)}: not timed, INT8 there")
    return choose(plans, timed)


@dataclass(frozen=True)
class _NoticesOf:
    """A watcher of builds that are steps of another one: only their notices are passed on."""

    watch: BuildWatcher

    def share(self, detail: str, done: float) -> None:
        pass

    def notice(self, text: str) -> None:
        self.watch.notice(text)
