"""Engine builders without a GPU: TensorRT-RTX builds through the same builder as TensorRT, and real TensorRT libraries load."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import os
import signal
import subprocess
import sys
import tempfile
import threading
import weakref
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx_ir as ir
import pytest
import torch
from onnx import TensorProto, helper
from support import REPOSITORY
from torch.overrides import TorchFunctionMode

from trtconvert.attention import reference
from trtconvert.attention.modes import Mode
from trtconvert.attention.reference import tables_from_data
from trtconvert.bundle import TRANSPOSED, NativeSite, TensorRecord, read_manifest
from trtconvert.engine import attention_timer, builder, engine_timer, tensorrt, tensorrt_rtx, timing_cache
from trtconvert.engine.attention_choice import (
    AttentionCase,
    CaseTimes,
    Choice,
    SitePlan,
    choose,
    one_node_model,
    site_plans,
    timestep_of,
)
from trtconvert.engine.builder import build_plan
from trtconvert.engine.engine_choice import EngineTimes, PlainTimes, distinct_bins, fastest_engine
from trtconvert.engine.engine_timer import denoiser_microseconds
from trtconvert.engine.loading import load_engine
from trtconvert.engine.signals import DeferredSignals
from trtconvert.errors import BackendUnavailable, TrtconvertError
from trtconvert.evaluate.verify import relative_error
from trtconvert.export import lowering, storage
from trtconvert.export.lowering import lower_to_function, lower_to_native, lower_to_plugin
from trtconvert.export.lowering.group_norms import GROUP_NORM
from trtconvert.export.nodes.attention import attention_nodes
from trtconvert.export.nodes.common import DOMAIN
from trtconvert.export.trace import SiteOptions, trace
from trtconvert.library import library_version
from trtconvert.models.denoiser import intercepted
from trtconvert.recipe import EngineSection

trt = pytest.importorskip("tensorrt_rtx_bindings", reason="needs the extra 'rtx'")


class Watch:
    """Keeps what it is told."""

    def __init__(self):
        self.shares, self.details, self.notices = [], [], []

    def share(self, detail, done):
        self.shares.append(done)
        self.details.append(detail)

    def notice(self, text):
        self.notices.append(text)


def model_of(*nodes, size=64, opset=20):
    """x [batch, size] to y through some nodes."""
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", size]) for name in "xy")
    weight = helper.make_tensor("weight", TensorProto.FLOAT, [size, size], [0.01] * size**2)
    graph = helper.make_graph(nodes, "g", [x], [y], [weight])
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("other", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


LINEAR = (helper.make_node("MatMul", ["x", "weight"], ["y"], name="product"),)


def build(model, path=Path("model.onnx"), profiles=({"batch": (1, 2, 4)},), watch=None, configure=None, **options):
    def for_ada(config):
        config.num_compute_capabilities = 1
        config.set_compute_capability(trt.ComputeCapability.SM89, 0)
        if configure is not None:
            configure(config)

    inputs = [TensorRecord(name="x", dtype="float32", shape=["batch", 64])]
    content = model if isinstance(model, bytes) else model.SerializeToString()
    return build_plan(
        trt, content, path, inputs, profiles, configure=for_ada, watch=watch or Watch(), title="here", **options
    )


# What is built --------------------------------------------------------------------------------------------------------


def test_an_engine_gets_a_profile_per_range():
    found = []
    profiles = [{"batch": (1, 1, 1)}, {"batch": (2, 4, 8)}]
    plan = build(model_of(*LINEAR), profiles=profiles, configure=lambda c: found.append(c.num_optimization_profiles))
    assert len(plan) > 1000 and found == [2]


def test_progress_goes_from_nothing_to_all():
    watch = Watch()
    build(model_of(*LINEAR), watch=watch)
    assert watch.shares[-1] == 1.0 and all(0 <= share <= 1 for share in watch.shares) and len(watch.shares) > 3


def test_weights_beside_the_graph_are_found_from_its_path(tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "INLINE_LIMIT", 1000)
    path = tmp_path / "model.onnx"
    storage.save(ir.from_proto(model_of(*LINEAR)), path)
    assert storage.weights_file(path).stat().st_size == 4 * 64 * 64
    assert len(build(path.read_bytes(), path)) > 1000
    storage.weights_file(path).unlink()
    with pytest.raises(TrtconvertError, match=r"(?s)cannot be parsed.*weights beside model\.onnx is missing"):
        build(path.read_bytes(), path)


DOUBLED = np.random.default_rng(0).standard_normal((64, 128), np.float32)


@pytest.fixture
def joining(tmp_path, monkeypatch):
    """A model whose weight is in a file, and another weight [64, 128] that is computed when it is written."""
    monkeypatch.setattr(storage, "INLINE_LIMIT", 1000)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    storage.save(ir.from_proto(model_of(*LINEAR)), tmp_path / "model.onnx")
    model = storage.load(tmp_path / "model.onnx")
    tensor = ir.LazyTensor(lambda: ir.Tensor(DOUBLED), ir.DataType.FLOAT, ir.Shape(DOUBLED.shape), name="joined")
    weight = ir.val("joined", const_value=tensor)
    model.graph.register_initializer(weight)
    model.graph.append(ir.node("MatMul", [model.graph.outputs[0], weight]))
    model.graph.outputs[:] = model.graph[-1].outputs
    model.graph.outputs[0].dtype, model.graph.outputs[0].shape = ir.DataType.FLOAT, ir.Shape(["batch", 128])
    return model


def test_the_parser_reads_what_was_joined(joining):
    network = trt.Builder(trt.Logger(trt.Logger.ERROR)).create_network(0)
    parser = trt.OnnxParser(network, trt.Logger(trt.Logger.ERROR))
    with storage.for_parser(joining) as content:
        assert DOUBLED.tobytes() not in content
        assert parser.parse(content, str(storage.ROOT / "model.onnx"))
        found = {}
        for layer in map(network.get_layer, range(network.num_layers)):
            if layer.type == trt.LayerType.CONSTANT:
                layer.__class__ = trt.IConstantLayer
                found[tuple(layer.shape)] = np.array(layer.weights)
    np.testing.assert_array_equal(found[64, 128].reshape(64, 128), DOUBLED)
    np.testing.assert_array_equal(found[64, 64], np.float32(0.01))


@pytest.mark.filterwarnings("ignore:Use Deprecated in TensorRT-RTX")  # timing caches, which it ignores
@pytest.mark.parametrize("stop", [None, KeyboardInterrupt, TrtconvertError])
def test_joined_weights_are_built_and_nothing_is_left(joining, tmp_path, monkeypatch, stop):
    """TensorRT-RTX in TensorRT's place."""
    seen = []

    def for_ada(_, config, __):
        config.num_compute_capabilities = 1
        config.set_compute_capability(trt.ComputeCapability.SM89, 0)
        seen.extend((tmp_path / "temporary").glob("*/*"))
        if stop is not None:
            raise stop("here")

    monkeypatch.setattr(tensorrt, "apply_options", for_ada)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    inputs = [TensorRecord(name="x", dtype="float32", shape=["batch", 64])]
    with contextlib.nullcontext() if stop is None else pytest.raises(stop, match="here"):
        plan = tensorrt.build_lowered(
            trt, joining, Path("model.onnx"), inputs, [{"batch": (1, 2, 4)}], EngineSection(), Watch()
        )
        assert len(plan) > 4 * (64 * 64 + 64 * 128)
    assert len(seen) == 1 and not list((tmp_path / "temporary").iterdir())


def test_a_file_of_weights_that_is_gone_is_named(joining, tmp_path):
    storage.weights_file(tmp_path / "model.onnx").unlink()
    inputs = [TensorRecord(name="x", dtype="float32", shape=["batch", 64])]
    with pytest.raises(TrtconvertError, match=r"(?s)cannot be parsed.*weights beside denoiser\.onnx is missing"):
        tensorrt.build_lowered(trt, joining, Path("a/denoiser.onnx"), inputs, [{}], EngineSection(), Watch())
    assert not list((tmp_path / "temporary").iterdir())


def test_options_of_the_recipe_reach_the_builder():
    builder_, quiet = trt.Builder(trt.Logger(trt.Logger.ERROR)), EngineSection()
    wanted = EngineSection(
        workspace_mb=300, optimization_level=1, refittable=True, version_compatible=True, weight_streaming=True
    )
    flags = (trt.BuilderFlag.REFIT, trt.BuilderFlag.VERSION_COMPATIBLE, trt.BuilderFlag.WEIGHT_STREAMING)
    for options, on in ((wanted, True), (quiet, False)):
        config = builder_.create_builder_config()
        tensorrt.apply_options(trt, config, options)
        assert [config.get_flag(flag) for flag in flags] == [on] * 3
        assert config.builder_optimization_level == (1 if on else 3)
        assert config.avg_timing_iterations == 8  # as trtexec
        assert (config.get_memory_pool_limit(trt.MemoryPoolType.WORKSPACE) == 300 << 20) == on


@pytest.mark.parametrize("wanted", [True, False])
def test_hardware_compatible_engines_are_for_ampere_and_later(wanted):
    """TensorRT-RTX has the name and keeps no level."""
    config = SimpleNamespace(hardware_compatibility_level=None, set_flag=None)
    tensorrt.apply_options(trt, config, EngineSection(hardware_compatible=wanted))
    assert config.hardware_compatibility_level == (trt.HardwareCompatibilityLevel.AMPERE_PLUS if wanted else None)


def lower_beside_a_group_norm(model: ir.Model) -> None:
    """To an engine of TensorRT's own attention."""
    lower_to_native(model)
    image = ir.val("image", ir.DataType.FLOAT16, (2, 64, 8, 8))
    model.graph.inputs.append(image)
    model.graph.append(ir.node(GROUP_NORM, [image], domain=DOMAIN))


@pytest.mark.parametrize(
    ("lower", "held"),
    [
        (lower_to_plugin, ["libtrtconvert.so"]),
        (lower_to_native, []),
        (lower_beside_a_group_norm, ["libtrtconvert.so"]),
    ],
)
def test_a_plan_holds_the_plugin_library_where_a_node_needs_it(monkeypatch, tmp_path, lower, held):
    config = trt.Builder(trt.Logger(trt.Logger.ERROR)).create_builder_config()
    monkeypatch.setattr(tensorrt, "library_path", lambda: tmp_path / "libtrtconvert.so")
    monkeypatch.setattr(tensorrt, "build_plan", lambda *_, configure, **__: configure(config))
    model = one_node_model(case(64, 64))
    lower(model)
    tensorrt.build_lowered(trt, model, Path("m.onnx"), [], [{}], EngineSection(), Watch())
    assert [Path(path).name for path in config.plugins_to_serialize] == held


# What is refused ------------------------------------------------------------------------------------------------------


def refused(*parts, model, **options):
    with pytest.raises(TrtconvertError) as error:
        build(model, **options)
    for part in ("expected: ", "got: ", "remedy: ", *parts):
        assert part in str(error.value), str(error.value)


def test_an_operator_that_the_parser_does_not_know_is_named_with_its_node():
    odd = helper.make_node("Nothing", ["x"], ["y"], name="blocks.3.odd", domain="other")
    refused("blocks.3.odd", "(Nothing)", "remedy: write the model without Nothing", model=model_of(odd))


def test_a_node_that_cannot_be_parsed_is_named():
    bad = helper.make_node("Transpose", ["x"], ["y"], name="blocks.1.turn", perm=[0, 7])
    refused("blocks.1.turn", "remedy: correct the model at that node", model=model_of(bad))


@pytest.mark.parametrize("content", [b"", b"not a model"])
def test_what_is_no_model_is_refused(content):
    refused("cannot be parsed", model=content)


def test_shapes_that_do_not_fit_the_network_are_refused():
    """64 columns meet 64 rows; 32 were asked for."""
    narrow = model_of(*LINEAR)
    narrow.graph.input[0].type.tensor_type.shape.dim[1].dim_param = "columns"
    inputs = [TensorRecord(name="x", dtype="float32", shape=["batch", 32])]
    with pytest.raises(TrtconvertError, match=r"(?s)here: the engine cannot be built.*got: .+remedy: "):
        build_plan(
            trt, narrow.SerializeToString(), Path("m.onnx"), inputs, [{"batch": (1, 2, 4)}],
            configure=lambda config: None, watch=Watch(), title="here",
        )  # fmt: skip


def test_a_lack_of_memory_is_told_from_other_failures():
    log = builder.make_log(trt)
    log.log(trt.ILogger.ERROR, "Error Code 2: OutOfMemory (Requested size was 8589934592 bytes.)")
    log.log(trt.ILogger.ERROR, "[optimizer.cpp] Could not find any implementation for node attention")
    assert "memory ran out" in str(builder._builder_refusal(log, "here"))
    log.errors.pop(0)
    assert "memory" not in str(builder._builder_refusal(log, "here"))
    # TensorRT only warns of kernels that it leaves out.
    log.log(
        trt.ILogger.WARNING,
        "Tactic Device request: 9385MB Available: 7649MB. Device memory is insufficient to use tactic.",
    )
    log.log(trt.ILogger.WARNING, "Running inference in FP16")
    said = str(builder._builder_refusal(log, "here"))
    assert "node attention; Tactic Device request: 9385MB" in said and "raise engine.workspace_mb" in said
    log.errors[:] = ["Unsupported data type"]
    assert "memory" not in str(builder._builder_refusal(log, "here"))


# What interrupts ------------------------------------------------------------------------------------------------------


class Interrupting(Watch):
    """Ctrl-C at the third step."""

    def share(self, detail, done):
        super().share(detail, done)
        if len(self.shares) == 3:
            os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture
def at_ctrl_c():
    """Sets what Ctrl-C does; a process in the background ignores it."""
    before = signal.getsignal(signal.SIGINT)
    yield functools.partial(signal.signal, signal.SIGINT)
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_ends_a_build_and_leaves_the_handler_as_it_was(at_ctrl_c):
    at_ctrl_c(signal.default_int_handler)
    whole, watch = Watch(), Interrupting()
    build(model_of(*LINEAR), watch=whole)
    with pytest.raises(KeyboardInterrupt):
        build(model_of(*LINEAR), watch=watch)
    assert len(watch.shares) == 3 < len(whole.shares)  # the builder stopped at that step
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_build_that_is_stopped_keeps_what_it_has_measured(at_ctrl_c, tmp_path):
    at_ctrl_c(signal.default_int_handler)
    path = tmp_path / "timings.cache"
    with pytest.raises(KeyboardInterrupt):
        build(model_of(*LINEAR), watch=Interrupting(), timing_cache=path)
    watch = Watch()
    assert path.stat().st_size > 0 and build(model_of(*LINEAR), watch=watch, timing_cache=path) and not watch.notices


def test_ctrl_c_while_the_model_is_parsed_ends_the_build(at_ctrl_c, monkeypatch):
    """TensorRT's loggers lose an exception that a handler raises there."""
    at_ctrl_c(signal.default_int_handler)
    parse, watch = trt.OnnxParser.parse, Watch()

    def interrupted(*arguments):
        os.kill(os.getpid(), signal.SIGINT)
        return parse(*arguments)

    monkeypatch.setattr(trt.OnnxParser, "parse", interrupted)
    with pytest.raises(KeyboardInterrupt):
        build(model_of(*LINEAR), watch=watch)
    assert watch.shares == []


def test_a_handler_that_raises_nothing_ends_a_build_all_the_same(at_ctrl_c):
    heard, watch = [], Interrupting()
    at_ctrl_c(lambda *_: heard.append(True))
    with pytest.raises(KeyboardInterrupt):
        build(model_of(*LINEAR), watch=watch)
    assert heard == [True] and len(watch.shares) == 3


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL, None])
def test_signals_without_a_handler_in_python_are_left_alone(monkeypatch, handler):
    """None is one in C, which Python could not put back."""
    taken = []
    monkeypatch.setattr(signal, "getsignal", lambda number: handler)
    monkeypatch.setattr(signal, "signal", lambda *arguments: taken.append(arguments))
    with DeferredSignals() as signals:
        pass
    assert taken == [] and signals.caught is None


def test_ctrl_c_that_is_ignored_ends_no_build(at_ctrl_c):
    at_ctrl_c(signal.SIG_IGN)
    assert build(model_of(*LINEAR), watch=Interrupting())
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_a_watcher_that_fails_ends_the_build_with_its_own_error():
    class Failing(Watch):
        def share(self, detail, done):
            raise BrokenPipeError("the terminal is gone")

    with pytest.raises(BrokenPipeError, match="the terminal is gone"):
        build(model_of(*LINEAR), watch=Failing())


def test_engines_are_built_in_other_threads_as_well():
    """Where Python lets nobody handle signals."""
    plans = []
    thread = threading.Thread(target=lambda: plans.append(build(model_of(*LINEAR))))
    thread.start()
    thread.join()
    assert len(plans) == 1


# The timing cache -----------------------------------------------------------------------------------------------------


def test_timings_are_kept_by_gpu_and_version(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = timing_cache.timing_cache_path("NVIDIA H200", "10.6.0.post2")
    assert path == tmp_path / "trtconvert/timing/nvidia-h200-tensorrt-10.6.0.post2.cache"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # TensorRT-RTX keeps the calls and has nothing to time
def test_a_timing_cache_is_kept_and_read_again(tmp_path):
    path, watch = tmp_path / "deep" / "a.cache", Watch()
    for _ in range(2):
        build(model_of(*LINEAR), watch=watch, timing_cache=path)
    assert path.stat().st_size > 32 and watch.notices == []
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("damage", [lambda b: b[:-1], lambda b: b"", lambda b: b[:40] + b"?" + b[41:]])
def test_a_damaged_timing_cache_is_dropped_with_a_notice(tmp_path, damage):
    path, watch = tmp_path / "a.cache", Watch()
    build(model_of(*LINEAR), timing_cache=path)
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    build(model_of(*LINEAR), watch=watch, timing_cache=path)
    assert any("is damaged: it is dropped" in notice and str(path) in notice for notice in watch.notices)
    assert path.read_bytes() == whole


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_builds_that_end_at_the_same_time_lose_no_timings(tmp_path):
    """What the file has got since this build read it is kept."""

    class Timings:
        def __init__(self, content=b""):
            self.parts = set(content.split(b"+")) - {b""}

        def combine(self, other, ignore_mismatch):
            self.parts |= other.parts
            return True

        def serialize(self):
            return b"+".join(sorted(self.parts))

    path, watch = tmp_path / "a.cache", Watch()
    for mine in (b"first", b"second", b"first"):
        config = SimpleNamespace(get_timing_cache=lambda mine=mine: Timings(mine), create_timing_cache=Timings)
        timing_cache.store_timings(config, path, watch.notice)
    assert timing_cache._read(path, watch.notice) == b"first+second" and watch.notices == []


def test_a_timing_cache_that_cannot_be_kept_ends_no_build(tmp_path):
    (tmp_path / "file").write_text("")
    watch = Watch()
    assert build(model_of(*LINEAR), watch=watch, timing_cache=tmp_path / "file" / "a.cache")
    assert len(watch.notices) == 2 and "is not kept" in watch.notices[1]


# TensorRT itself ------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="looks at a machine without a GPU")
def test_without_a_gpu_tensorrt_says_so():
    state = tensorrt.status()
    assert (state.available, state.detail) == (False, "no NVIDIA GPU") and state.remedy
    assert tensorrt.device_name() == ""


class Driver:
    """The CUDA driver, whose cuInit fails."""

    def __init__(self, failure):
        self.failure = failure

    def cuInit(self, flags):
        return self.failure

    def cuGetErrorString(self, failure, words):
        words._obj.value = b"system has unsupported display driver / cuda driver combination"


@pytest.mark.parametrize(
    ("failure", "visible", "detail", "remedy"),
    [
        (803, None, "fails with error 803: system has unsupported", "restart the machine"),
        (803, "0", "fails with error 803: system has unsupported", "restart the machine"),
        (100, None, "no NVIDIA GPU", "build on the machine that the engine is for"),
        (100, "", "no NVIDIA GPU, with CUDA_VISIBLE_DEVICES=''", "unset it"),
    ],
)
def test_why_the_driver_gives_no_gpu_is_said(monkeypatch, failure, visible, detail, remedy):
    monkeypatch.setattr(tensorrt.ctypes, "CDLL", lambda name: Driver(failure))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    state = tensorrt.status()
    assert not state.available and detail in state.detail and remedy in state.remedy
    assert tensorrt.device_architecture() is None and tensorrt.device_name() == ""


class Registry:
    """TensorRT's, that has some creators, and more after it has loaded a library."""

    def __init__(self, first, loaded):
        self.names, self.loaded, self.loads = first, loaded, 0

    def get_creator(self, name, version, namespace):
        return name if name in self.names else None

    def load_library(self, path):
        self.loads += 1
        self.names = self.loaded
        return None if self.loaded is None else path


@pytest.mark.parametrize(
    ("first", "loaded", "loads", "lacking"),
    [
        (tensorrt._PLUGINS, (), 0, None),
        ((), tensorrt._PLUGINS, 1, None),
        ((), ("Int8Attention",), 1, "ResidualNorm, Linear, GroupNorm, ChannelsLastAdd not there"),
        (
            ("Int8Attention",),
            tuple(name for name in tensorrt._PLUGINS if name != "ResidualNorm"),
            1,
            "ResidualNorm not there",
        ),
    ],
)
def test_every_plugin_of_the_library_is_asked_for(monkeypatch, first, loaded, loads, lacking):
    registry = Registry(first, loaded)
    monkeypatch.setattr(
        tensorrt, "bindings", lambda: SimpleNamespace(__version__="10.6", get_plugin_registry=lambda: registry)
    )
    if lacking is None:
        assert tensorrt.load().__version__ == "10.6"
    else:
        with pytest.raises(TrtconvertError, match=rf"(?s)cannot be registered.*{lacking}.*remedy: pip install"):
            tensorrt.load()
    assert registry.loads == loads


def test_a_plugin_library_that_does_not_load_says_what_it_lacks(monkeypatch):
    def broken():
        raise BackendUnavailable("the kernel library does not load", got="undefined symbol: cudaGetDevice")

    monkeypatch.setattr(tensorrt, "bindings", lambda: None)
    monkeypatch.setattr(tensorrt, "load_library", broken)
    with pytest.raises(BackendUnavailable, match="undefined symbol"):
        tensorrt.load()


def test_without_its_package_tensorrt_says_what_to_install(monkeypatch):
    monkeypatch.setattr(tensorrt, "driver_problem", lambda: None)
    monkeypatch.setattr(tensorrt, "_PACKAGES", ("tensorrt_of_nobody",))
    state = tensorrt.status()
    assert (state.available, state.detail) == (False, "TensorRT's Python package is not installed")
    assert "pip install tensorrt" in state.remedy


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "has no attribute '__version__'"),
        ("raise RuntimeError('no such driver')", "cannot be loaded: no such driver"),
        ("__version__ = '99.1.2'", "libnvinfer.so.99"),
        ("__version__ = 'unknown'", "none that TensorRT's library can be found by"),
    ],
)
def test_a_package_that_is_no_whole_tensorrt_is_told(monkeypatch, tmp_path, text, said):
    name = f"tensorrt_odd_{len(text)}"
    (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(tensorrt, "driver_problem", lambda: None)
    monkeypatch.setattr(tensorrt, "_PACKAGES", (name,))
    state = tensorrt.status()
    assert not state.available and said in state.detail and state.remedy


VERSIONS = ("10.6", "10.15", "11.2")


def with_tensorrt(code, bindings, library=None, first=""):
    """What a process with real TensorRT libraries and a GPU that is not there prints."""
    folder, library = REPOSITORY / "third_party" / "tensorrt", library or bindings
    if not (folder / bindings).exists() or not (folder / library).exists():
        pytest.skip("TensorRT is not here; 'make tensorrt' fetches it")
    environment = os.environ | {
        "LD_LIBRARY_PATH": str(folder / library / "lib"),
        "PYTHONPATH": f"{REPOSITORY}{os.pathsep}{folder / bindings / 'python'}",
    }
    begin = (
        f"from trtconvert.engine import tensorrt; tensorrt.driver_problem = lambda: None\n{first}"
        "tensorrt.cuda_problem = lambda: ''\n"
    )
    done = subprocess.run([sys.executable, "-c", begin + code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


STATUS = "s = tensorrt.status(); print(s.available, s.detail, s.remedy, sep='; ')"


def test_bindings_and_a_library_of_another_version_are_refused():
    found = with_tensorrt(STATUS, "10.6", "10.15")
    assert found.startswith(
        "False; the Python bindings are of TensorRT 10.6.0, the library that they load is 10.15.1; "
    )
    assert "LD_LIBRARY_PATH" in found


def test_bindings_whose_library_does_not_load_are_refused():
    found = with_tensorrt(STATUS, "10.6", "11.2")
    assert found.startswith("False; tensorrt_bindings cannot be loaded: libnvinfer.so.10")


@pytest.mark.parametrize("version", VERSIONS)
def test_without_the_plugin_library_tensorrt_says_so(version):
    found = with_tensorrt(f"tensorrt.library_path = lambda: None\n{STATUS}", version)
    assert found.startswith("False; libtrtconvert.so, the plugin library, is not installed; pip install trtconvert")


@pytest.mark.parametrize("version", VERSIONS)
def test_a_gpu_that_cuda_cannot_use_is_refused_with_its_reason(version):
    """As with a driver that is older than CUDA: TensorRT's Runtime ends the process there."""
    code = "tensorrt.library_path = lambda: 'there'\ntensorrt.cuda_problem = problem\n" + STATUS
    keep = "problem = tensorrt.cuda_problem\n"
    found = with_tensorrt(code, version, first=keep)
    assert found.startswith("False; torch cannot use the GPU: ") and "update the NVIDIA driver" in found


def test_a_builder_that_tensorrt_does_not_make_says_why(monkeypatch):
    """The bindings' word for a null pointer, with the reason in the log."""

    def none_made(log):
        log.log(trt.ILogger.ERROR, "CUDA initialization failure with error: 35")
        raise TypeError("pybind11::init(): factory function returned nullptr")

    monkeypatch.setattr(trt, "Builder", none_made)
    refused("cannot be built", "got: CUDA initialization failure with error: 35", model=model_of(*LINEAR))


@pytest.mark.parametrize("problem", [RuntimeError("driver too old\nmore"), AssertionError("driver too old")])
def test_why_cuda_cannot_be_used_is_one_line(monkeypatch, problem):
    def fail():
        raise problem

    monkeypatch.setattr(torch.cuda, "init", fail)
    assert tensorrt.cuda_problem() == "driver too old"
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert tensorrt.cuda_problem() == ""


def test_a_folder_of_tensorrts_name_is_no_package(monkeypatch, tmp_path):
    (tmp_path / "tensorrt_of_nobody").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(tensorrt, "_PACKAGES", ("tensorrt_of_nobody",))
    assert tensorrt._imported() == (None, "")
    (tmp_path / "tensorrt_broken.py").write_text("raise ImportError('libnvinfer.so.10')")
    (tmp_path / "tensorrt_whole.py").write_text("__version__ = '10.16.0a1'")
    monkeypatch.setattr(tensorrt, "_PACKAGES", ("tensorrt_broken", "tensorrt_whole"))
    assert tensorrt._imported()[0].__version__ == "10.16.0a1"
    monkeypatch.setattr(tensorrt, "_PACKAGES", ("tensorrt_broken",))
    assert tensorrt._imported() == (None, "tensorrt_broken cannot be loaded: libnvinfer.so.10")


def test_tensorrt_rtx_says_what_is_wrong_with_it(monkeypatch):
    assert tensorrt_rtx.status().available and tensorrt_rtx.status().detail == trt.__version__
    monkeypatch.setattr(trt, "__version__", "1.0.0")
    assert "bindings are of TensorRT-RTX 1.0.0, the libraries 1." in tensorrt_rtx.status().detail

    def fail(name):
        raise ImportError("libcudart.so.13")

    monkeypatch.setattr(tensorrt_rtx.importlib, "import_module", fail)
    state = tensorrt_rtx.status()
    assert not state.available and "cannot be loaded: libcudart.so.13" in state.detail and state.remedy


@pytest.mark.parametrize("version", VERSIONS)
def test_a_plugin_library_that_tensorrt_does_not_load_is_refused(version, tmp_path):
    (tmp_path / "libtrtconvert.so").write_bytes(b"no library")
    code = f"""
from pathlib import Path
from trtconvert.errors import BackendUnavailable, TrtconvertError
tensorrt.library_path = lambda: Path({str(tmp_path / "libtrtconvert.so")!r})
try:
    tensorrt.load()
except TrtconvertError as error:
    print(error)
"""
    assert "libtrtconvert.so cannot be registered\n  expected: a library that TensorRT " in with_tensorrt(code, version)


@pytest.mark.parametrize("version", VERSIONS)
def test_every_version_has_what_the_builder_uses(version):
    """TensorRT 11 removed much of 10."""
    used = {
        "BuilderFlag": ("REFIT", "VERSION_COMPATIBLE", "WEIGHT_STREAMING"),
        "HardwareCompatibilityLevel": ("AMPERE_PLUS",),
        "MemoryPoolType": ("WORKSPACE",),
        "IBuilderConfig": (
            "add_optimization_profile", "set_timing_cache", "create_timing_cache", "get_timing_cache", "set_flag",
            "plugins_to_serialize", "progress_monitor", "builder_optimization_level", "hardware_compatibility_level",
            "set_memory_pool_limit", "avg_timing_iterations",
        ),
        "ITimingCache": ("combine", "serialize"),
        "OnnxParser": ("parse", "get_error", "num_errors"),
        "ParserError": ("node", "node_name", "node_operator", "desc", "local_function_stack"),
        "Runtime": ("deserialize_cuda_engine", "engine_host_code_allowed"),
        "ICudaEngine": ("create_execution_context", "get_tensor_mode", "get_tensor_dtype", "num_io_tensors"),
        "IExecutionContext": (
            "set_optimization_profile_async", "set_input_shape", "get_tensor_shape", "set_tensor_address", "execute_async_v3",
        ),
        "TensorIOMode": ("INPUT",),
        "DataType": ("itemsize",),
        "IProgressMonitor": ("phase_start", "step_complete", "phase_finish"),
    }  # fmt: skip
    code = f"""
import tensorrt_bindings as trt
print([f"{{name}}.{{part}}" for name, parts in {used!r}.items() for part in parts if not hasattr(getattr(trt, name), part)])
"""
    assert with_tensorrt(code, version) == "[]"


# Which attention ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def traced(digits):
    tables = {}

    def handler(call):
        tables[call.name] = tables_from_data(call.q, call.k, call.v, Mode.BALANCED)
        return call.exact()

    with torch.no_grad():
        intercepted(digits, handler)(**digits.example(0, {"batch": 2, "height": 8, "width": 8}))
    return trace(digits, tables, SiteOptions(1000.0, "calibrated", True), dims=digits.dims)


def test_sites_have_the_sizes_of_each_profiles_opt(traced):
    profiles = [
        {"batch": (1, 2, 4), "height": (8, 8, 8), "width": (8, 8, 8)},
        {"batch": (1, 3, 4), "height": (4, 12, 16), "width": (4, 10, 16)},
    ]
    plans = site_plans(traced, profiles)
    assert len(plans) == 6 and len(set(plans.values())) == 1
    plan = plans["blocks.0.attn"]
    assert [case.q for case in plan.cases] == [(2, 2, 64, 64), (3, 2, 120, 64)]
    assert plan.cases[1].query_tokens == plan.cases[1].key_tokens == 120
    assert plan.modes == (Mode.BALANCED,) and plan.cases[0].dtype == ir.DataType.FLOAT


def test_a_site_whose_sizes_the_graph_does_not_tell_is_left_out(traced):
    model = ir.from_proto(ir.to_proto(traced))
    node = next(n for n in model.graph if n.op_type == "Int8Attention")
    node.inputs[1].shape = ir.Shape([None, 2, "unk", 64])
    profile = {"batch": (1, 2, 4), "height": (8, 8, 8), "width": (8, 8, 8)}
    assert list(site_plans(model, [profile])) == [f"blocks.{i}.attn" for i in range(1, 6)]


def case(queries, keys, layout="BHND"):
    q, k = ((2, 4, queries, 64), (2, 2, keys, 64))
    if layout == "BNHD":
        q, k = ((b, n, h, d) for b, h, n, d in (q, k))
    return AttentionCase(tuple(q), tuple(k), layout, ir.DataType.FLOAT16, "calibrated", True)


def test_native_attention_is_timed_with_heads_first():
    moved = case(100, 77, "BNHD").heads_first()
    assert moved == case(100, 77) == moved.heads_first()
    assert (moved.query_tokens, moved.key_tokens, moved.heads) == (100, 77, (4, 2))


def test_each_site_keeps_the_faster_attention_over_its_profiles_and_bins():
    long, short = case(4096, 4096), case(4096, 77)
    modes = (Mode.FP16, Mode.BALANCED, Mode.BALANCED, Mode.BALANCED)
    times = {
        long: CaseTimes(200.0, {Mode.FP16: 220.0, Mode.BALANCED: 100.0, Mode.AGGRESSIVE: 90.0}),
        short: CaseTimes(21.0, {Mode.FP16: 22.0, Mode.BALANCED: 38.0, Mode.AGGRESSIVE: 37.0}),
    }
    asked = []

    def time_case(found, wanted):
        asked.append((found, wanted))
        return times[found]

    sites = {
        "self": SitePlan((long,), modes),
        "cross": SitePlan((short,), modes),
        "first": SitePlan((long,), (Mode.FP16,)),
        "both": SitePlan((short, long), modes),
    }
    choice = choose(sites, time_case)
    kept = {site.name: site for site in choice.native}
    assert set(kept) == {"cross", "first"}  # in `both` the profile of long sequences outweighs
    # By the lengths of the first profile, those that gain most first: 130 against 200 µs, 164 against 221.
    assert [[site.name for site in group] for group in choice.plugin] == [["self"], ["both"]]
    cross = kept["cross"]
    assert (cross.query_tokens, cross.key_tokens, cross.native_us) == (4096, 77, 21.0)
    assert cross.plugin_us == (22 + 3 * 38) / 4
    assert sorted(found.key_tokens for found, _ in asked) == [77, 4096]  # each case once, with all modes that it needs
    assert all(wanted == {Mode.FP16, Mode.BALANCED} for _, wanted in asked)


@pytest.mark.parametrize("layout", ["BHND", "BNHD"])
@pytest.mark.parametrize("mode", list(Mode))
def test_the_node_that_is_timed_computes_in_the_mode_of_its_timestep(layout, mode):
    """And tells the modes apart: any other is further away than rounding."""
    import onnxruntime

    timed = AttentionCase((2, 4, 40, 64), (2, 2, 150, 64), "BHND", ir.DataType.FLOAT, "calibrated", True)
    if layout == "BNHD":
        timed = AttentionCase((2, 40, 4, 64), (2, 150, 2, 64), "BNHD", ir.DataType.FLOAT, "calibrated", True)
    assert (timed.query_tokens, timed.key_tokens, timed.heads) == (40, 150, (4, 2))
    model = one_node_model(timed)
    tables = {v.name: torch.from_numpy(v.const_value.numpy().copy()) for v in model.graph.initializers.values()}
    lower_to_function(model)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(shape, generator=generator) for shape in (timed.q, timed.k, timed.k))
    timestep = torch.full((2,), timestep_of(mode))
    feeds = {"q": q, "k": k, "v": v, "timestep": timestep}
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString())
    (out,) = session.run(None, {name: x.numpy() for name, x in feeds.items()})
    fields = reference.AttentionTables(**tables)
    errors = []
    for other in Mode:
        at = torch.full((2,), timestep_of(other))
        errors.append(relative_error(torch.from_numpy(out), reference.attention(q, k, v, at, fields, layout=layout)))
    assert errors[mode] < 1e-4 and errors.index(min(errors)) == mode


@pytest.mark.parametrize("mask", [None, ((1, 1, 64, 64), ir.DataType.BOOL), ((2, 1, 64, 64), ir.DataType.FLOAT16)])
def test_the_node_that_is_timed_becomes_an_engine_of_native_attention(mask):
    timed = AttentionCase((2, 64, 4, 64), (2, 64, 2, 64), "BNHD", ir.DataType.FLOAT16, "dynamic", False, mask)
    model = one_node_model(timed)
    lower_to_native(model)
    inputs = [TensorRecord(name=str(x.name), dtype="", shape=list(x.shape.numpy())) for x in model.graph.inputs]
    plan = build_plan(
        trt, ir.to_proto(model).SerializeToString(), Path("one.onnx"), inputs, [{}],
        configure=lambda config: (
            setattr(config, "num_compute_capabilities", 1), config.set_compute_capability(trt.ComputeCapability.SM89, 0)
        ),
        watch=Watch(), title="here",
    )  # fmt: skip
    assert len(plan) > 1000


# Which engine ---------------------------------------------------------------------------------------------------------


def node_of(*modes):
    """An `Int8Attention` node with a timestep bin per mode, up to a timestep of 1000."""
    (node,) = attention_nodes(one_node_model(case(64, 64))).values()
    table = next(x for x in node.inputs if x.name == "modes")
    table.const_value = ir.tensor([int(mode) for mode in modes], dtype=ir.DataType.INT32)
    return node


def test_bins_in_which_every_site_has_the_same_mode_are_timed_once():
    first = [Mode.PRECISION, Mode.BALANCED, Mode.BALANCED, Mode.AGGRESSIVE, Mode.AGGRESSIVE]
    second = [Mode.PRECISION, Mode.PRECISION, Mode.PRECISION, Mode.AGGRESSIVE, Mode.BALANCED]
    assert distinct_bins([node_of(*first)]) == {100.0: 1, 300.0: 2, 700.0: 2}
    found = distinct_bins([node_of(*first), node_of(*second)])
    assert found == {100.0: 1, 300.0: 2, 700.0: 1, 900.0: 1}
    assert reference.timestep_bin(torch.tensor(list(found)), 1000.0, 5).tolist() == [0, 1, 3, 4]


def timed_site(name, keys=64, native_us=4.0, plugin_us=3.0):
    return NativeSite(name=name, query_tokens=64, key_tokens=keys, native_us=native_us, plugin_us=plugin_us)


# By the letters of the sites that keep the plugin; "d" is faster with TensorRT's own attention alone.
CHOICE = Choice([timed_site("d", 77, 3.0, 4.0)], [[timed_site("a"), timed_site("b")], [timed_site("c", 77)]])


def mix(times, choice=CHOICE, build=None, build_plain=None):
    """The fastest engine of four sites, with what was timed and the watcher."""
    watch, timed = Watch(), []
    nodes = {name: node_of(Mode.BALANCED, Mode.PRECISION) for name in "abcd"}

    def build_mix(native):
        return "".join(name for name in nodes if name not in native).encode()

    def time_engine(plan, bins):
        assert bins == {250.0: 1, 750.0: 1}
        timed.append(plan.decode())
        return times[plan.decode()]

    return fastest_engine(choice, nodes, build or build_mix, build_plain, time_engine, watch), timed, watch


@pytest.mark.parametrize(
    ("times", "kept", "timed"),
    [
        # In the whole network the plugin costs more than alone at some sites, and then at none, at all, and at all but some.
        ({"abc": 90.0, "": 100.0, "abcd": 85.0, "ab": 80.004}, "ab", ["abc", "", "abcd", "ab"]),
        ({"abc": 90.0, "": 100.0, "abcd": 90.0, "ab": 90.0}, "abc", ["abc", "", "abcd", "ab"]),
        ({"abc": 110.0, "": 100.0, "abcd": 103.0, "ab": 105.0, "c": 101.0}, "", ["abc", "", "abcd", "ab", "c"]),
        ({"abc": 110.0, "": 100.0, "abcd": 120.0, "ab": 99.0}, "ab", ["abc", "", "abcd", "ab"]),
        # Plugins at all sites may share their borders.
        ({"abc": 90.0, "": 100.0, "abcd": 80.0, "ab": 85.0}, "abcd", ["abc", "", "abcd", "ab"]),
    ],
)
def test_the_fastest_of_the_whole_engines_is_kept(times, kept, timed):
    chosen, found, watch = mix(times)
    assert (chosen.plan.decode(), chosen.with_plugin, found) == (kept, bool(kept), timed)
    assert chosen.times == EngineTimes(round(min(t for plan, t in times.items() if plan), 2), times[""])
    native = {"ab": ["d", "c"], "abc": ["d"], "abcd": [], "": ["d"]}[
        kept
    ]  # all are native in the last one, for another reason
    assert [site.name for site in chosen.native_sites] == native
    assert any("with the plugin at 64 × 64 tokens only" in line for line in watch.details)
    told = "TensorRT's own attention, which stays at every site"
    assert [told in notice for notice in watch.notices] == ([True] if not kept else [])


@pytest.mark.parametrize(
    ("times", "kept", "timed"),
    [
        # Each length is tried, also past one that costs time; all of them are the first engine.
        ({"b": 98.0, "ab": 97.0, "abc": 96.0}, "abc", ["b", "ab", "abc"]),
        ({"b": 98.0, "ab": 97.0, "abc": 99.0, "abd": 96.5}, "abd", ["b", "ab", "abc", "abd"]),
        ({"b": 98.0, "ab": 98.0, "bc": 99.0, "bd": 98.5}, "b", ["b", "ab", "bc", "bd"]),
        ({"b": 101.0, "a": 100.0, "c": 98.0, "cd": 98.5}, "c", ["b", "a", "c", "cd"]),
        ({"b": 100.0, "a": 100.0, "c": 100.0, "d": 100.0}, "abcd", ["b", "a", "c", "d"]),
    ],
)
def test_the_plugin_is_tried_where_it_saves_most_first(times, kept, timed):
    choice = Choice(
        [], [[timed_site("b", 4096)], [timed_site("a", 1024)], [timed_site("c", 256)], [timed_site("d", 77)]]
    )
    chosen, found, _ = mix(times | {"abcd": 99.0, "": 100.0}, choice)
    assert (chosen.plan.decode(), found) == (kept, ["abcd", "", *timed])
    assert {site.name for site in chosen.native_sites} == set("abcd") - set(kept)


def test_sites_of_one_length_are_compared_with_none_only():
    _, timed, _ = mix({"abcd": 90.0, "": 100.0}, Choice([], [[timed_site(name) for name in "abcd"]]))
    assert timed == ["abcd", ""]


def refuse(*_):
    raise TrtconvertError("no such engine", got="node 7 has no implementation")


def test_a_mix_that_cannot_be_built_does_not_keep_a_slower_engine():
    def build(native):
        names = "".join(name for name in "abcd" if name not in native)
        return refuse() if names == "ab" else names.encode()

    chosen, timed, watch = mix({"abc": 110.0, "": 100.0, "abcd": 105.0}, build=build)
    assert (chosen.plan, chosen.with_plugin, chosen.times) == (b"", False, EngineTimes(105.0, 100.0))
    assert timed == ["abc", "", "abcd"] and len(watch.notices) == 2
    assert "TensorRT's own attention at every site stays, not compared with mixes of the two" in watch.notices[0]


def test_where_the_plugins_engine_cannot_be_built_tensorrts_own_attention_stays():
    with pytest.raises(TrtconvertError, match="no such engine"):
        mix({}, build=refuse)
    chosen, timed, watch = mix({}, build=lambda native: b"" if len(native) == 4 else refuse())
    assert (chosen.plan, chosen.with_plugin, chosen.times, timed) == (b"", False, None, [])
    (notice,) = watch.notices
    assert "no INT8 attention" in notice and "no such engine: node 7 has no implementation" in notice


def plain():
    """An engine without any plugin, where those of all mixes have some for group norms."""
    return b"plain"


EVERYWHERE = Choice([], [[timed_site(name) for name in "abcd"]])
NOWHERE = Choice([timed_site(name, native_us=3.0, plugin_us=4.0) for name in "abcd"], [])


@pytest.mark.parametrize(
    ("choice", "times", "kept", "timed"),
    [
        (EVERYWHERE, {"abcd": 90.0, "": 95.0, "plain": 90.004}, "abcd", ["abcd", "", "plain"]),
        (EVERYWHERE, {"abcd": 90.0, "": 95.0, "plain": 89.9}, "plain", ["abcd", "", "plain"]),
        (EVERYWHERE, {"abcd": 95.0, "": 90.0, "plain": 92.0}, "", ["abcd", "", "plain"]),
        (EVERYWHERE, {"abcd": 95.0, "": 90.0, "plain": 89.9}, "plain", ["abcd", "", "plain"]),
        # Engines of no attention of ours have not been timed before.
        (NOWHERE, {"": 90.0, "plain": 92.0}, "", ["", "plain"]),
        (NOWHERE, {"": 90.0, "plain": 89.9}, "plain", ["", "plain"]),
    ],
)
def test_an_engine_without_any_plugin_is_kept_where_it_is_the_fastest(choice, times, kept, timed):
    chosen, found, watch = mix(times, choice, build_plain=plain)
    assert (chosen.plan.decode(), chosen.with_plugin, chosen.is_plain) == (kept, kept == "abcd", kept == "plain")
    ours = min(us for plan, us in times.items() if plan != "plain")
    assert (chosen.plain_times, found) == (PlainTimes(ours, round(times["plain"], 2)), timed)
    told = "group norms stay TensorRT's own: a call of the whole engine takes 90 µs with plugins, 90 µs without any"
    assert [told in notice for notice in watch.notices].count(True) == (kept == "plain")


def test_an_engine_without_any_plugin_stays_where_no_other_can_be_built():
    chosen, timed, watch = mix({}, EVERYWHERE, refuse, plain)
    assert (chosen.plan, chosen.with_plugin, chosen.is_plain, chosen.plain_times) == (b"plain", False, True, None)
    (notice,) = watch.notices
    assert timed == [] and "no such engine: node 7 has no implementation" in notice
    with pytest.raises(TrtconvertError, match="no such engine"):
        mix({}, EVERYWHERE, refuse, refuse)


def test_plugins_stay_where_an_engine_without_any_cannot_be_built():
    chosen, _, watch = mix({"abcd": 90.0, "": 95.0}, EVERYWHERE, build_plain=refuse)
    assert (chosen.plan, chosen.with_plugin, chosen.is_plain, chosen.plain_times) == (b"abcd", True, False, None)
    (notice,) = watch.notices
    assert "plugins stay, not compared with an engine without any: no such engine" in notice


def test_a_site_of_unknown_lengths_does_not_have_the_first_engine_built_again():
    choice = Choice([], [[timed_site("a", 4096)], [timed_site("b", 256)]])  # c and d are not timed
    _, timed, _ = mix({"abcd": 90.0, "": 100.0, "acd": 95.0}, choice)
    assert timed == ["abcd", "", "acd"]


@pytest.mark.parametrize("native_us", [100.0, 10.0])
def test_of_all_plans_only_the_fastest_is_kept(native_us):
    """A plan is as large as the model."""

    class Plan:
        def __init__(self, names):
            self.names = names

        def decode(self):
            return self.names

    kept, alive = weakref.WeakSet(), []

    def build(native):
        gc.collect()
        alive.append(len(kept))
        plan = Plan("".join(name for name in "abcd" if name not in native))
        kept.add(plan)
        return plan

    chosen, _, _ = mix({"abc": 90.0, "": native_us, "abcd": 85.0, "ab": 80.0, "c": 95.0}, build=build)
    assert alive[0] == 0 and set(alive[1:]) == {1} and chosen.plan.decode() == ("ab" if native_us > 80 else "")


@pytest.mark.parametrize(("times", "kept"), [({}, "abc"), ({"abc": 90.0, "": 100.0}, "abc")])
def test_engines_that_cannot_be_compared_leave_the_best_so_far_and_say_why(times, kept):
    def build(native):
        names = "".join(name for name in "abcd" if name not in native)
        return names.encode() if names in times or names == "abc" else refuse()

    chosen, _, watch = mix(times, build=build)
    assert chosen.plan.decode() == kept and (chosen.times is None) == (not times)
    (notice,) = watch.notices
    assert "the engine with the plugin stays" in notice and "no such engine: node 7 has no implementation" in notice


class OnCpu(TorchFunctionMode):
    """Makes on the CPU what is asked for on a GPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


@pytest.mark.parametrize("layout", ["BHND", "BNHD"])
def test_attention_is_timed_with_inputs_of_the_shapes_that_its_engine_has(monkeypatch, layout):
    runs = []

    class Runner:
        def __init__(self, trt, shapes):
            self.shapes = shapes

        def microseconds(self, feeds):
            for feed in feeds:
                assert {name: tuple(feed[name].shape) for name in self.shapes} == self.shapes
            runs.append({name: feed[name].data_ptr() for name in "qkv" for feed in feeds[:1]})
            return float(len(runs))

    def build(model):  # the shapes stand for the plan
        return {str(x.name): tuple(x.shape.numpy()) for x in model.graph.inputs}

    monkeypatch.setattr(attention_timer, "EngineRunner", Runner)
    timer = attention_timer.AttentionTimer(None, build, pytest.fail)
    with OnCpu():
        times = timer(case(100, 77, layout), [Mode.PRECISION, Mode.BALANCED])
    assert times == CaseTimes(3.0, {Mode.PRECISION: 1.0, Mode.BALANCED: 2.0})
    assert runs[0] == runs[1] == runs[2]  # the same memory, whichever order it is read in


@pytest.mark.parametrize("how", ["not built", "no room"])
@pytest.mark.parametrize("failing", [{"the plugin's"}, {"TensorRT's own"}, {"the plugin's", "TensorRT's own"}])
def test_attention_that_cannot_be_timed_alone_leaves_the_other(monkeypatch, how, failing):
    def build(model):
        whose = "the plugin's" if attention_nodes(model) else "TensorRT's own"
        if whose in failing and how == "not built":
            refuse()
        return whose

    class Runner:
        def __init__(self, trt, plan):
            self.plan = plan

        def microseconds(self, feeds):
            if self.plan in failing:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return 5.0

    monkeypatch.setattr(attention_timer, "EngineRunner", Runner)
    notices = []
    timer = attention_timer.AttentionTimer(None, build, notices.append)
    with OnCpu():
        if len(failing) == 2:
            with pytest.raises(TrtconvertError):
                timer(case(100, 77), [Mode.BALANCED])
            return
        times = timer(case(100, 77), [Mode.BALANCED])
    inf = float("inf")
    assert times == (
        CaseTimes(inf, {Mode.BALANCED: 5.0}) if "TensorRT's own" in failing else CaseTimes(5.0, {Mode.BALANCED: inf})
    )
    (notice,) = notices
    assert f"{failing.copy().pop()} attention for" in notice and "cannot be timed alone" in notice


def test_a_site_where_the_plugin_cannot_be_timed_stays_native():
    """The manifest is JSON, which has no infinity."""
    sites = {"a": SitePlan((case(64, 64),), (Mode.BALANCED,))}
    choice = choose(sites, lambda *_: CaseTimes(5.0, {Mode.BALANCED: float("inf")}))
    (site,) = choice.native
    assert (site.native_us, site.plugin_us, choice.plugin) == (5.0, None, [])


class Device:
    """Stands in for TensorRT's module and one engine: two inputs and an index, at 1 µs per element of x and unit of timestep.

    Attributes:
        calls: profile, batch and timestep of each call, read where the engine was told that its inputs lie.
        x: the first numbers of x in each call.
    """

    ILogger = trt.ILogger
    TensorIOMode = trt.TensorIOMode
    NAMES = ("x", "timestep", "label", "out")

    def __init__(self, loads=True, takes=True):
        self.loads, self.takes, self.calls, self.x = loads, takes, [], []
        self.profile, self.shapes, self.addresses = 0, {}, {}
        self.num_io_tensors = len(self.NAMES)

    def Runtime(self, log):
        self.log = log
        return self

    def deserialize_cuda_engine(self, plan):
        if not self.loads:
            self.log.log(trt.ILogger.ERROR, "the plan is of another GPU")
        return self if self.loads else None

    def create_execution_context(self):
        return self

    def get_tensor_name(self, index):
        return self.NAMES[index]

    def get_tensor_mode(self, name):
        return trt.TensorIOMode.OUTPUT if name == "out" else trt.TensorIOMode.INPUT

    def get_tensor_dtype(self, name):
        return SimpleNamespace(itemsize=4)

    def get_tensor_shape(self, name):
        return self.shapes["x"]

    def set_optimization_profile_async(self, profile, stream):
        self.profile, self.shapes, self.addresses = profile, {}, {}
        return True

    def set_input_shape(self, name, shape):
        self.shapes[name] = shape
        return self.takes

    def set_tensor_address(self, name, address):
        self.addresses[name] = address

    def execute_async_v3(self, stream):
        batch, width = self.shapes["x"]
        timesteps = (ctypes.c_float * batch).from_address(self.addresses["timestep"])
        labels = (ctypes.c_int64 * batch).from_address(self.addresses["label"])
        x = (ctypes.c_float * (batch * width)).from_address(self.addresses["x"])
        ctypes.memset(self.addresses["out"], 1, 4 * batch * width)
        assert len(set(timesteps)) == 1 and set(labels) == {0}
        self.calls.append((self.profile, batch, timesteps[0]))
        self.x.append(list(x))
        return True

    def microseconds(self, calls):
        """In place of `device_microseconds`."""
        before = len(self.calls)
        for call in calls:
            call()
        return sum(batch * timestep for _, batch, timestep in self.calls[before:]) / len(calls)


@pytest.fixture
def device(monkeypatch):
    made = Device()
    monkeypatch.setattr(engine_timer, "device_microseconds", made.microseconds)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    with OnCpu():
        yield made


SIGNATURE = [
    TensorRecord(name="x", dtype="float32", shape=["batch", 8]),
    TensorRecord(name="timestep", dtype="float32", shape=["batch"]),
    TensorRecord(name="label", dtype="int64", shape=["batch"]),
]
BATCHES = [{"batch": (1, 2, 4)}, {"batch": (4, 6, 8)}]


def test_a_denoiser_is_timed_at_the_opt_shape_of_every_profile_and_bins_weigh_by_their_number(device):
    found = denoiser_microseconds(device, SIGNATURE, "timestep", BATCHES, b"plan", {100.0: 3, 500.0: 1})
    assert found == pytest.approx((2 + 6) * (3 * 100 + 500) / 4)
    assert set(device.calls) == {(i, n, t) for i, n in ((0, 2), (1, 6)) for t in (100.0, 500.0)}


def test_inputs_take_turns_and_are_spread_like_noise(device):
    denoiser_microseconds(device, SIGNATURE, "timestep", [{"batch": (1, 64, 64)}], b"plan", {100.0: 1})
    sets = [torch.tensor(x) for x in device.x]
    assert len({tuple(x.tolist()) for x in sets}) == engine_timer.ROTATION == len(sets)
    assert all(abs(float(x.mean())) < 0.3 and 0.8 < float(x.std()) < 1.2 for x in sets)


def timing_refusal(device, *parts):
    with pytest.raises(TrtconvertError) as error:
        denoiser_microseconds(device, SIGNATURE, "timestep", BATCHES, b"plan", {100.0: 1})
    for part in ("expected: ", "remedy: ", "engine.attention", *parts):
        assert part in str(error.value), str(error.value)


def test_an_engine_is_handed_out_when_the_gpu_is_done_with_loading_it(device, monkeypatch):
    """TensorRT returns before: dropped meanwhile, it breaks the process."""
    order = []
    monkeypatch.setattr(device, "deserialize_cuda_engine", lambda plan: order.append("loading") or device)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: order.append("done"))
    runtime, engine = load_engine(device, None, b"plan")
    assert runtime is engine is device and order == ["loading", "done"]
    assert runtime.engine_host_code_allowed


def test_ctrl_c_while_an_engine_is_loaded_waits_for_it(device, monkeypatch, at_ctrl_c):
    at_ctrl_c(signal.default_int_handler)
    done = []
    monkeypatch.setattr(device, "deserialize_cuda_engine", lambda plan: os.kill(os.getpid(), signal.SIGINT))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: done.append(True))
    with pytest.raises(KeyboardInterrupt):
        load_engine(device, None, b"plan")
    assert done == [True]


def test_an_engine_that_cannot_be_timed_says_why(device, monkeypatch):
    timing_refusal(Device(loads=False), "cannot be loaded", "got: the plan is of another GPU")
    timing_refusal(Device(takes=False), "does not take the shapes")
    monkeypatch.setattr(device, "execute_async_v3", lambda stream: False)
    timing_refusal(device, "an engine could not be timed")

    def out_of_memory(calls):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 8 GiB.")

    monkeypatch.setattr(engine_timer, "device_microseconds", out_of_memory)
    timing_refusal(device, "an engine could not be timed", "got: CUDA out of memory.")


@pytest.fixture
def builds(monkeypatch, digits_build):
    """`build_engine` of the shipped model on a GPU that is not there: plans are the names of the sites with the plugin.

    Returns the times that engines take, by plan, what was timed, and a function that builds.
    """
    found = SimpleNamespace(times={}, timed=[], alone=[], watch=Watch())

    def build_lowered(trt, model, path, inputs, profiles, options, watch):
        sites = attention_nodes(model)
        return ",".join(sites).encode() if sites or options.channels_last else b"plain"

    def time_engine(trt, inputs, timestep_input, profiles, plan, bins):
        found.timed.append((plan, bins))
        assert timestep_input in {spec.name for spec in inputs} and len(profiles) == 1
        return found.times[plan]

    def build(attention="auto", **fields):
        component = read_manifest(digits_build.bundle).components["denoiser"]
        onnx, options = digits_build.bundle / component.onnx, EngineSection(attention=attention, **fields)
        return tensorrt.build_engine("denoiser", component, onnx, options, found.watch)

    found.build = build
    monkeypatch.setattr(tensorrt, "load", lambda: SimpleNamespace(__version__="10.6.0"))
    monkeypatch.setattr(tensorrt, "device_architecture", lambda: "sm90")
    monkeypatch.setattr(tensorrt, "device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(tensorrt, "compiled_architectures", lambda: ("80", "90a"))
    monkeypatch.setattr(tensorrt, "build_lowered", build_lowered)
    monkeypatch.setattr(tensorrt, "choose_alone", lambda *_: Choice(found.alone, []))
    monkeypatch.setattr(engine_timer, "denoiser_microseconds", time_engine)
    return found


SITES = [f"blocks.{i}.attn" for i in range(6)]
ALL = ",".join(SITES).encode()
REST = ",".join(SITES[1:]).encode()


def native_sites(*names):
    return [timed_site(name, native_us=3.0, plugin_us=4.0) for name in names]


@pytest.mark.parametrize("alone", [[], SITES[:1]])
@pytest.mark.parametrize("native_us", [70.004, 90.0])
def test_auto_keeps_the_plugin_where_the_whole_engine_is_no_slower_with_it(builds, alone, native_us):
    builds.alone, mixed = native_sites(*alone), REST if alone else ALL
    builds.times = {mixed: 80.0, b"": native_us} | ({ALL: 85.0} if alone else {})
    plan, record = (built := builds.build()).plan, built.record
    # Of the modes precision, balanced, balanced and aggressive.
    assert builds.timed == [(plan, {125.0: 1, 375.0: 2, 875.0: 1}) for plan in (mixed, b"", ALL)[: 3 if alone else 2]]
    faster = native_us > 80
    assert (plan, record.attention) == ((mixed, "plugin") if faster else (b"", "native"))
    assert bool(record.plugin) == faster and record.native_sites == builds.alone
    assert (record.plugin_us, record.native_us) == (80.0, 90.0 if faster else 70.0)
    # Beside engines of other GPUs of the same architecture.
    assert (record.gpu, record.file) == ("NVIDIA H200", "engines/denoiser-tensorrt-sm90-nvidia-h200.plan")


def test_auto_compares_no_engines_where_no_site_is_left_to_the_plugin(builds):
    builds.alone = native_sites(*SITES)
    record = builds.build().record
    assert (record.attention, record.plugin_us, record.native_us, builds.timed) == ("native", None, None, [])


@pytest.mark.parametrize(("attention", "plan"), [("plugin", ALL), ("native", b"")])
def test_one_attention_for_all_sites_is_built_without_timing(builds, attention, plan):
    built = builds.build(attention)
    assert (built.plan, built.record.attention, built.record.plugin_us) == (plan, attention, None)
    assert builds.timed == []


@pytest.mark.parametrize(
    ("compiled", "gpu", "fields", "said"),
    [
        (("80", "90a"), "sm75", {}, "sm75"),
        (("90a",), "sm89", {}, "sm89"),
        (("90a",), "sm90", {"hardware_compatible": True}, "sm80 and later, which engine.hardware_compatible asks for"),
    ],
)
def test_a_gpu_that_the_library_has_no_kernels_for_keeps_tensorrts_own_attention(
    builds, monkeypatch, compiled, gpu, fields, said
):
    monkeypatch.setattr(tensorrt, "compiled_architectures", lambda: compiled)
    monkeypatch.setattr(tensorrt, "device_architecture", lambda: gpu)
    built = builds.build(**fields)
    assert (built.plan, built.record.attention, builds.timed) == (b"", "native", [])
    assert len(builds.watch.notices) == 1 and said in builds.watch.notices[0]
    with pytest.raises(
        BackendUnavailable, match=rf"(?s)for {said}\n.*got: kernels for sm_.*remedy: compile the library"
    ):
        builds.build("plugin", **fields)
    assert builds.build("native", **fields).plan == b"" and len(builds.watch.notices) == 1


@pytest.mark.parametrize(
    ("attention", "kernel", "norms", "fields", "said"),
    [
        ("plugin", True, True, {}, None),
        ("plugin", False, True, {}, "the plugin library has no kernel for them on this GPU"),
        ("plugin", True, True, {"refittable": True}, "engine.refittable"),
        ("plugin", True, True, {"hardware_compatible": True}, "engine.hardware_compatible"),
        ("plugin", False, False, {}, None),  # nothing to tell of a model without any
        ("plugin", False, True, {"channels_last": False}, None),  # as asked for
        ("native", True, True, {}, None),
        ("native", False, True, {}, "the plugin library has no kernel for them on this GPU"),
        ("native", True, True, {"channels_last": False}, None),
        ("native", True, False, {}, None),
    ],
)
def test_group_norms_that_stay_tensorrts_own_are_told(builds, monkeypatch, attention, kernel, norms, fields, said):
    """And an engine of TensorRT's own attention is known by the plugin library where it has some."""
    monkeypatch.setattr(tensorrt, "has_group_norm_kernel", lambda: kernel)
    monkeypatch.setattr(lowering, "has_group_norms", lambda model: norms)
    record = builds.build(attention, **fields).record
    taken = kernel and norms and not fields
    assert record.plugin == (library_version() if attention == "plugin" or taken else "")
    if said is None:
        assert not builds.watch.notices
    else:
        (notice,) = builds.watch.notices
        assert notice.startswith("group norms stay TensorRT's own") and said in notice


@pytest.mark.parametrize("plain_us", [79.9, 80.0])
def test_auto_keeps_no_plugin_where_the_whole_engine_is_faster_without_any(builds, monkeypatch, plain_us):
    monkeypatch.setattr(tensorrt, "has_group_norm_kernel", lambda: True)
    monkeypatch.setattr(lowering, "has_group_norms", lambda model: True)
    builds.times = {ALL: 80.0, b"": 85.0, b"plain": plain_us}
    plan, record = (built := builds.build()).plan, built.record
    faster = plain_us < 80
    assert [timed for timed, _ in builds.timed] == [ALL, b"", b"plain"]
    assert (plan, record.attention, bool(record.plugin)) == (
        (b"plain", "native", False) if faster else (ALL, "plugin", True)
    )
    assert (record.plugin_us, record.native_us) == (80.0, 85.0)
    assert (record.with_plugins_us, record.plain_us) == (80.0, plain_us)


def test_a_refittable_engine_keeps_the_names_of_its_weights():
    """Of three projections of one tensor, which are one product otherwise."""
    model = one_node_model(case(64, 64, "BNHD"))
    (node,) = attention_nodes(model).values()
    x = ir.val("x", ir.DataType.FLOAT16, (2, 64, 256))
    model.graph.inputs[:3] = [x]
    heads = ir.node("Constant", [], {"value": ir.tensor([0, 0, 4, 64])})
    model.graph.insert_before(node, heads)
    for index, name in enumerate("qkv"):
        weight = ir.val(f"to_{name}", const_value=ir.tensor(np.ones((256, 256), np.float16), name=f"to_{name}"))
        model.graph.register_initializer(weight)
        product = ir.node("MatMul", [x, weight])
        split = ir.node("Reshape", [product.outputs[0], heads.outputs[0]])
        split.outputs[0].dtype, split.outputs[0].shape = x.dtype, ir.Shape((2, 64, 4, 64))
        model.graph.insert_before(node, [product, split])
        node.replace_input_with(index, split.outputs[0])
    weights = {"to_q", "to_k", "to_v"}
    for refittable, kept in ((True, weights), (False, set())):
        found = tensorrt.lowered(model, [], EngineSection(refittable=refittable), [{}])
        assert found.graph.initializers.keys() & weights == kept
    assert model.graph.initializers.keys() > weights


def test_a_refittable_engine_records_the_shapes_of_its_weights(builds, digits):
    shapes = builds.build("plugin", refittable=True).record.weights
    state = {name: list(x.shape) for name, x in digits.denoiser.state_dict().items() if x.dim() > 1}
    found = {name.removesuffix(TRANSPOSED): s[::-1] if name.endswith(TRANSPOSED) else s for name, s in shapes.items()}
    assert state.items() <= found.items() and builds.build("plugin").record.weights == {}


def test_a_site_without_an_attention_of_tensorrts_own_keeps_the_plugin():
    """The manifest is JSON, which has no infinity."""
    case_ = case(64, 64, "BNHD")
    times = CaseTimes(float("inf"), {Mode.PRECISION: 5.0})
    choice = choose({"a": SitePlan((case_,), (Mode.PRECISION,))}, lambda *_: times)
    ((site,),) = choice.plugin
    assert (
        choice.native == []
        and site.native_us is None
        and NativeSite.model_validate_json(site.model_dump_json()) == site
    )


def test_an_engine_that_was_not_compared_has_no_times(builds, monkeypatch):
    monkeypatch.setattr(engine_timer, "denoiser_microseconds", refuse)
    record = builds.build().record
    assert (record.attention, record.plugin_us, record.native_us, record.plain_us) == ("plugin", None, None, None)
    assert len(builds.watch.notices) == 1
