"""Builds by TensorRT-RTX on a machine without a GPU, and refusals."""

from __future__ import annotations

import contextlib
import gc
import tempfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx_ir as ir
import pytest
from onnx import helper
from rtx_builds import LINEAR, Watch, build, model_of, refused, trt
from timed_sites import case

from trtconvert.bundle import TensorRecord
from trtconvert.engine import builder, tensorrt
from trtconvert.engine.attention_choice import one_node_model
from trtconvert.engine.builder import build_plan, kernels_kept
from trtconvert.engine.logs import make_log
from trtconvert.errors import TrtconvertError
from trtconvert.export import storage
from trtconvert.export.lowering.group_norms import GROUP_NORM
from trtconvert.export.lowering.native import lower_to_native
from trtconvert.export.lowering.plugin import lower_to_plugin
from trtconvert.export.nodes.common import DOMAIN
from trtconvert.recipe import EngineSection


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
    """A model with an external weight, and a lazy weight [64, 128]."""
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
    """TensorRT-RTX stands in for TensorRT."""
    seen = []

    def for_ada(_, config, __, runs):
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


@pytest.mark.usefixtures("searched_once")
def test_one_builder_stays_until_the_outermost_block_ends(tmp_path, monkeypatch):
    """TensorRT drops its library of kernels with the last builder."""
    alive, plain = set(), trt.Builder

    class Watched(plain):
        def __init__(self, logger):
            plain.__init__(self, logger)
            alive.add(id(self))

        def __del__(self):
            alive.discard(id(self))

    def build():
        with pytest.raises(TrtconvertError, match="cannot be parsed"):
            build_plan(trt, b"", tmp_path / "model.onnx", [], [], configure=lambda _: None, watch=Watch(), title="RTX")
        gc.collect()
        return set(alive)

    monkeypatch.setattr(trt, "Builder", Watched)
    assert not build()
    with kernels_kept():
        first = build()
        with kernels_kept():
            assert build() == first and len(first) == 1
        assert build() == first
    gc.collect()
    assert not alive
    with kernels_kept(), kernels_kept():
        assert len(build()) == 1
    gc.collect()
    assert not alive


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
    """TensorRT-RTX has the attribute, but ignores it."""
    config = SimpleNamespace(hardware_compatibility_level=None, set_flag=None)
    tensorrt.apply_options(trt, config, EngineSection(hardware_compatible=wanted))
    assert config.hardware_compatibility_level == (trt.HardwareCompatibilityLevel.AMPERE_PLUS if wanted else None)


def lower_beside_a_group_norm(model: ir.Model) -> None:
    """For an engine with native attention."""
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


def test_an_operator_that_the_parser_does_not_know_is_named_with_its_node():
    odd = helper.make_node("Nothing", ["x"], ["y"], name="blocks.3.odd", domain="other")
    refused("blocks.3.odd", "(Nothing)", "remedy: change the model to avoid Nothing", model=model_of(odd))


def test_a_node_that_cannot_be_parsed_is_named():
    bad = helper.make_node("Transpose", ["x"], ["y"], name="blocks.1.turn", perm=[0, 7])
    refused("blocks.1.turn", "remedy: correct the model at that node", model=model_of(bad))


@pytest.mark.parametrize("content", [b"", b"not a model"])
def test_files_that_are_not_models_are_refused(content):
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
    log = make_log(trt)
    log.logger.log(trt.ILogger.ERROR, "Error Code 2: OutOfMemory (Requested size was 8589934592 bytes.)")
    log.logger.log(trt.ILogger.ERROR, "[optimizer.cpp] Could not find any implementation for node attention")
    assert "memory ran out" in str(builder._builder_refusal(log, "here"))
    log.errors.pop(0)
    assert "memory" not in str(builder._builder_refusal(log, "here"))
    # TensorRT only warns of skipped kernels.
    log.logger.log(
        trt.ILogger.WARNING,
        "Tactic Device request: 9385MB Available: 7649MB. Device memory is insufficient to use tactic.",
    )
    log.logger.log(trt.ILogger.WARNING, "Running inference in FP16")
    said = str(builder._builder_refusal(log, "here"))
    assert "node attention; Tactic Device request: 9385MB" in said and "raise engine.workspace_mb" in said
    log.errors[:] = ["Unsupported data type"]
    assert "memory" not in str(builder._builder_refusal(log, "here"))
