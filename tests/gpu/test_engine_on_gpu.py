"""TensorRT engines on a GPU: what their options do, which attention sites get, and what a build says when it cannot go on."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import tiny_models
import torch
from gpu_engines import output_of_plan
from onnx import ModelProto
from rich.console import Console
from support import handled, run, tiny_recipe
from tiny_unets import unet
from tolerances import HALF_DENOISER

from trtconvert import runtime
from trtconvert.attention.modes import Mode
from trtconvert.bundle import MANIFEST, TensorRecord, check_files, read_manifest, write_manifest
from trtconvert.cache import Cache
from trtconvert.compile import compile_bundle
from trtconvert.engine import tensorrt, timing_cache
from trtconvert.engine.attention_choice import AttentionCase, Choice, one_node_model, site_plans
from trtconvert.engine.attention_timer import AttentionTimer
from trtconvert.engine.engine_timer import denoiser_microseconds
from trtconvert.engine.loading import load_engine
from trtconvert.engine.logs import make_log
from trtconvert.errors import TrtconvertError
from trtconvert.export import storage
from trtconvert.export.lowering.native import lower_to_native
from trtconvert.export.lowering.plugin import lower_to_plugin
from trtconvert.export.nodes.attention import attention_nodes
from trtconvert.library import has_group_norm_kernel, has_linear_kernel
from trtconvert.models.recorded_calls import relative_error
from trtconvert.progress import Reporter
from trtconvert.recipe import EngineSection

pytestmark = pytest.mark.gpu
pytest.importorskip("tensorrt_bindings", reason="needs TensorRT")

CASE = AttentionCase((1, 256, 4, 64), (1, 256, 4, 64), "BNHD", ir.DataType.FLOAT16, "calibrated", True)


class Watch:
    """Keeps what it is told."""

    def __init__(self):
        self.details, self.notices = [], []

    def share(self, detail, done):
        self.details.append(detail)

    def notice(self, text):
        self.notices.append(text)


@pytest.fixture(scope="module", autouse=True)
def user_cache(tmp_path_factory):
    """A timing cache of these tests' own, kept from test to test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def trt():
    return tensorrt.load()


def inputs_of(model):
    return [
        TensorRecord(name=x.name, dtype=x.dtype.numpy().name, shape=list(x.shape.numpy())) for x in model.graph.inputs
    ]


def build(trt, lower=lower_to_plugin, case=CASE, watch=None, path=Path("one.onnx"), **options):
    """A plan of one node."""
    model = one_node_model(case)
    lower(model)
    options = EngineSection(**options)
    return tensorrt.build_lowered(trt, model, path, inputs_of(model), [{}], options, watch or Watch())


class Loaded:
    def __init__(self, trt, plan):
        self.runtime, self.engine = load_engine(trt, make_log(trt), plan)


def loaded(trt, plan):
    found = Loaded(trt, plan)
    assert found.engine is not None
    return found


# Options --------------------------------------------------------------------------------------------------------------


def test_refittable(trt):
    assert loaded(trt, build(trt, refittable=True)).engine.refittable
    assert not loaded(trt, build(trt)).engine.refittable


def test_hardware_compatible(trt):
    levels = trt.HardwareCompatibilityLevel
    engine = loaded(trt, build(trt, hardware_compatible=True)).engine
    assert engine.hardware_compatibility_level == levels.AMPERE_PLUS
    assert loaded(trt, build(trt)).engine.hardware_compatibility_level == levels.NONE


def test_weight_streaming(trt):
    """A product with a weight of 1 MiB, which the engine can leave in host memory."""
    x = ir.val("x", ir.DataType.FLOAT16, (64, 1024))
    weight = ir.val("w", const_value=ir.tensor(np.ones((1024, 512), np.float16), name="w"))
    node = ir.node("MatMul", [x, weight])
    node.outputs[0].name, node.outputs[0].dtype = "out", ir.DataType.FLOAT16
    graph = ir.Graph([x], node.outputs, nodes=[node], initializers=[weight], opset_imports={"": 20}, name="g")
    model = ir.Model(graph, ir_version=10)
    sizes = []
    for streaming in (True, False):
        options = EngineSection(weight_streaming=streaming)
        plan = tensorrt.build_lowered(trt, model, Path("m.onnx"), inputs_of(model), [{}], options, Watch())
        sizes.append(loaded(trt, plan).engine.streamable_weights_size)
    assert sizes[0] >= 2**20 and sizes[1] == 0


def test_version_compatible(trt):
    """The lean runtime of the library, which such plans contain, is a separate package."""
    try:
        plan = build(trt, version_compatible=True)
    except TrtconvertError as error:
        assert "lean" in str(error) and "remedy: " in str(error)
    else:
        assert loaded(trt, plan).engine is not None


def test_a_workspace_that_is_too_small_is_named(trt):
    """The plugin's quantised copies alone take more than a MiB."""
    long = AttentionCase((1, 4096, 8, 64), (1, 4096, 8, 64), "BNHD", ir.DataType.FLOAT16, "calibrated", True)
    assert build(trt, case=long, workspace_mb=1024)
    with pytest.raises(TrtconvertError, match=r"(?s)TensorRT .* got: .+remedy: .*"):
        build(trt, case=long, workspace_mb=1)


def test_a_plan_holds_the_plugin_library_where_it_needs_it(trt):
    size = tensorrt.library_path().stat().st_size
    assert len(build(trt)) > size > len(build(trt, lower_to_native))


def test_timings_are_kept_and_a_damaged_file_is_dropped(trt, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path, watch = timing_cache.timing_cache_path(tensorrt.device_name(), trt.__version__), Watch()
    build(trt, lower_to_native, watch=watch)
    first = path.read_bytes()
    build(trt, lower_to_native, watch=watch, case=AttentionCase(**{**vars(CASE), "q": (1, 512, 4, 64)}))
    assert len(path.read_bytes()) > len(first) > 100 and watch.notices == []
    path.write_bytes(first[:-1])
    build(trt, lower_to_native, watch=watch)
    assert any("is damaged" in notice for notice in watch.notices)
    again = Watch()
    build(trt, lower_to_native, watch=again)
    assert again.notices == []


def test_ctrl_c_ends_a_build(trt):
    class Interrupting(Watch):
        def share(self, detail, done):
            os.kill(os.getpid(), signal.SIGINT)

    # A shell has its background jobs ignore it.
    with handled(signal.SIGINT, signal.default_int_handler), pytest.raises(KeyboardInterrupt):
        build(trt, lower_to_native, watch=Interrupting())


def test_an_unsupported_operator_is_named(trt):
    model = one_node_model(CASE)
    node = ir.node("Nothing", [model.graph.outputs[0]], domain="other", name="blocks.3.odd")
    node.outputs[0].name, node.outputs[0].dtype, node.outputs[0].shape = "odd", ir.DataType.FLOAT16, ir.Shape(CASE.q)
    model.graph.append(node)
    model.graph.outputs[0] = node.outputs[0]
    model.graph.opset_imports["other"] = 1
    lower_to_plugin(model)
    with pytest.raises(TrtconvertError, match=r"(?s)node 'blocks\.3\.odd'.*remedy: change the model to avoid Nothing"):
        tensorrt.build_lowered(trt, model, Path("m.onnx"), inputs_of(model), [{}], EngineSection(), Watch())


@pytest.mark.parametrize(("kind", "tensors"), [("biased", 1), ("unbound", 1), ("of another tensor", 2)])
def test_an_engine_with_joined_projections_computes_the_same(trt, kind, tensors):
    """From one tensor or two what it computes from three."""
    outputs = []
    for pack in (True, False):
        model = tiny_models.traced_projections(kind, torch.float16)
        lower_to_plugin(model, refittable=not pack)
        (node,) = attention_nodes(model).values()
        assert len({id(value) for value in node.inputs[:3]}) == (tensors if pack else 3)
        outputs.append(output_of(trt, model))
    assert relative_error(*outputs) <= HALF_DENOISER


@pytest.mark.parametrize("kind", ["normed and rotated", "joined"])
def test_an_engine_that_takes_norms_and_rotations_computes_the_same(trt, monkeypatch, kind):
    outputs = []
    for taken in (True, False):
        model = tiny_models.traced_projections(kind, torch.float16)
        if not taken:
            for rewrite in ("fuse_rotary", "fuse_norms"):
                monkeypatch.setattr(f"trtconvert.export.lowering.plugin.{rewrite}", lambda model: 0)
        lower_to_plugin(model)
        (node,) = attention_nodes(model).values()
        assert ("rotary" in node.attributes, "norm" in node.attributes) == (taken, taken)
        assert ("norm_split" in node.attributes) == (taken and kind == "joined")
        outputs.append(output_of(trt, model))
    assert relative_error(*outputs) <= HALF_DENOISER


@pytest.mark.parametrize("text_first", [True, False])
def test_an_engine_with_tokens_in_two_tensors_computes_the_same(trt, monkeypatch, text_first):
    outputs = []
    for apart in (True, False):
        model = tiny_models.traced_joint("slices", text_first, torch.float16)
        if not apart:
            monkeypatch.setattr("trtconvert.export.lowering.packing.fuse_in_parts", lambda *_: False)
        lower_to_plugin(model)
        (node,) = attention_nodes(model).values()
        assert node.attributes.get_int("parts", 1) == len(node.outputs) == (2 if apart else 1)
        outputs.append(output_of(trt, model))
    assert relative_error(*outputs) <= HALF_DENOISER


def test_an_engine_with_sums_and_norms_of_plugins_computes_the_same(trt, monkeypatch):
    outputs = []
    for taken in (5, 0):
        model = tiny_models.traced_blocks(tiny_models.Blocks(), dtype=torch.float16)
        if not taken:
            monkeypatch.setattr("trtconvert.export.lowering.plugin.fuse_residual_norms", lambda model: 0)
        lower_to_plugin(model)
        assert sum(node.op_type == "ResidualNorm" for node in model.graph) == taken
        outputs.append(output_of(trt, model))
    assert relative_error(*outputs) <= HALF_DENOISER


def test_an_engine_with_linear_layers_of_plugins_computes_the_same(trt):
    """Taken for many rows, and run with few."""
    if not has_linear_kernel():
        pytest.skip("the library has a kernel for linear layers for compute capability 9.0 only")
    outputs = []
    for profiles, taken in (([{"batch": 2048}], 11), ([], 0)):
        model = tiny_models.traced_blocks(tiny_models.GatedBlocks(), dtype=torch.float16)
        lower_to_plugin(model, linear_profiles=profiles)
        assert sum(node.op_type == "Linear" for node in model.graph) == taken
        outputs.append(output_of(trt, model))
    assert relative_error(*outputs) <= HALF_DENOISER


@pytest.mark.parametrize(
    ("attention", "linear"),
    [("plugin", False), ("plugin", True), ("native", False)],
    ids=["convolutions", "linear layers", "TensorRT's own attention"],
)
def test_an_engine_with_group_norms_of_plugins_computes_the_same(trt, attention, linear):
    """With images that become tokens and back through convolutions of single pixels, as in SD 1.5, or through linear layers."""
    if not has_group_norm_kernel():
        pytest.skip("the library has a kernel for group norms for compute capability 9.0 and later only")
    outputs = []
    for taken in (21, 0):
        model, options = unet(linear, ("batch",)), EngineSection(channels_last=bool(taken))
        native = list(attention_nodes(model)) if attention == "native" else []
        model = tensorrt.lowered(model, native, options, [{"batch": (1, 2, 4)}])
        assert sum(node.op_type == "GroupNorm" for node in model.graph) == taken
        outputs.append(output_of(trt, model))
    assert relative_error(*outputs) <= HALF_DENOISER


def output_of(trt, model):
    """Output of an engine of a tiny model for a batch that its profile is not tuned for."""
    generator, shapes = torch.Generator("cuda").manual_seed(0), {x.name: list(x.shape)[1:] for x in model.graph.inputs}
    feed = {name: torch.randn(3, *shape, generator=generator, device="cuda").half() for name, shape in shapes.items()}
    feed["timestep"] = torch.full((3,), 400.0, device="cuda")
    inputs = [
        TensorRecord(name=name, dtype=str(t.dtype).removeprefix("torch."), shape=["batch", *t.shape[1:]])
        for name, t in feed.items()
    ]
    options = EngineSection(optimization_level=1)  # a U-Net has many layers, whose kernels would all be timed
    plan = tensorrt.build_lowered(trt, model, Path("m.onnx"), inputs, [{"batch": (1, 2, 4)}], options, Watch())
    output = output_of_plan(trt, plan, feed)
    assert output.isfinite().all()
    return output


# Which attention ------------------------------------------------------------------------------------------------------


def test_times_are_of_the_device_and_grow_with_the_work(trt):
    timer = AttentionTimer(trt, lambda model: _built(trt, model), pytest.fail)
    sizes = {tokens: (1, tokens, 8, 128) for tokens in (256, 4096)}
    times = {
        tokens: timer(AttentionCase(q, q, "BNHD", ir.DataType.FLOAT16, "calibrated", True), list(Mode))
        for tokens, q in sizes.items()
    }
    for found in (times[256], times[4096]):
        assert found.native > 1 and set(found.plugin) == set(Mode) and min(found.plugin.values()) > 1
    assert times[4096].native > 3 * times[256].native
    assert all(times[4096].plugin[mode] > 3 * times[256].plugin[mode] for mode in Mode)
    # 4·B·H·N²·D operations at no more than an 8-bit tensor core of any GPU of today could do
    assert min(times[4096].plugin.values()) > 4 * 8 * 4096**2 * 128 / 20e15 * 1e6


def _built(trt, model):
    return tensorrt.build_lowered(trt, model, Path("m.onnx"), inputs_of(model), [{}], EngineSection(), Watch())


def test_masked_and_fp32_cases_are_timed_as_well(trt):
    timer = AttentionTimer(trt, lambda model: _built(trt, model), pytest.fail)
    q, k = (2, 4, 128, 64), (2, 2, 77, 64)
    for mask in (((2, 1, 1, 77), ir.DataType.BOOL), ((2, 1, 128, 77), ir.DataType.FLOAT)):
        found = timer(AttentionCase(q, k, "BHND", ir.DataType.FLOAT, "dynamic", False, mask), [Mode.BALANCED])
        assert found.native > 0 and found.plugin[Mode.BALANCED] > 0


def test_an_engine_is_timed_at_the_opt_shape_of_each_profile(trt):
    model = one_node_model(AttentionCase((1, 1, 8, 128), (1, 1, 8, 128), "BNHD", ir.DataType.FLOAT16, "dynamic", True))
    *qkv, timestep = model.graph.inputs
    for value in (*qkv, model.graph.outputs[0]):
        value.shape = ir.Shape([1, "tokens", 8, 128])
    inputs = [TensorRecord(name=x.name, dtype="float16", shape=[1, "tokens", 8, 128]) for x in qkv]
    inputs.append(TensorRecord(name=timestep.name, dtype="float32", shape=[1]))
    profiles = [{"tokens": (64, 256, 512)}, {"tokens": (4096, 4096, 8192)}]
    lower_to_plugin(model)
    plan = tensorrt.build_lowered(trt, model, Path("m.onnx"), inputs, profiles, EngineSection(), Watch())
    short, both = (
        denoiser_microseconds(trt, inputs, "timestep", found, plan, {500.0: 1}) for found in (profiles[:1], profiles)
    )
    assert 1 < short < both / 3


# Bundles --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    """A bundle as a machine without a GPU leaves it, with two profiles. FP32, which the plugin reaches through casts."""
    folder = tmp_path_factory.mktemp("bundle")
    profiles = [{"batch": [1, 1, 2]}, {"batch": [2, 4, 4]}]
    recipe = tiny_recipe(folder, engine={"backend": "onnxruntime", "profiles": profiles})
    outcome = run("build", recipe, "-o", folder / "bundle", "--cache", folder / "cache")
    assert outcome.exit_code == 0, outcome.output
    return folder / "bundle"


@pytest.mark.parametrize("attention", ["auto", "plugin", "native"])
def test_compile_finishes_a_bundle(bundle, tmp_path, attention):
    """Results equal those of ONNX Runtime: the INT8 arithmetic with the plugin, exact attention without."""
    folder = shutil.copytree(bundle, tmp_path / "bundle")
    _with_attention(folder, attention)
    manifest = compile_bundle(folder, Reporter(Console(quiet=True)), Cache(tmp_path / "cache"))
    check_files(folder, manifest)
    component = manifest.components["denoiser"]
    (record,) = component.engines
    assert (record.target, record.gpu) == (tensorrt.device_architecture(), tensorrt.device_name())
    assert record.profiles == component.profiles and len(record.profiles) == 2
    left_to_plugin = attention == "auto" and not record.native_sites
    assert (record.plugin_us is not None) == (record.native_us is not None) == left_to_plugin
    slower = left_to_plugin and record.native_us < record.plugin_us
    native = {"auto": not left_to_plugin or slower, "plugin": False, "native": True}[attention]
    assert record.attention == ("native" if native else "plugin") and bool(record.plugin) != native
    assert all(site.native_us < site.plugin_us for site in record.native_sites)
    with runtime.load(folder, backend="tensorrt") as on_gpu, runtime.load(folder, backend="onnxruntime") as on_cpu:
        for batch in (1, 2, 3, 4):
            generator = torch.Generator().manual_seed(batch)
            x, timestep = torch.randn(batch, 1, 4, 4, generator=generator), torch.full((batch,), 400.0)
            expected = on_cpu["denoiser"](x, timestep)
            assert relative_error(on_gpu["denoiser"](x.cuda(), timestep.cuda()).cpu(), expected) <= HALF_DENOISER
    outcome = run("inspect", folder)
    assert tensorrt.device_name() in outcome.output, outcome.output


def test_the_faster_of_two_whole_engines_goes_into_the_bundle(bundle, tmp_path, monkeypatch):
    """The only site is left to the plugin, whatever it takes alone: whole engines are compared."""
    monkeypatch.setattr(tensorrt, "choose_alone", lambda *_: Choice([], []))
    folder = shutil.copytree(bundle, tmp_path / "bundle")
    _with_attention(folder, "auto")
    manifest = compile_bundle(folder, Reporter(Console(quiet=True)), Cache(tmp_path / "cache"))
    (record,) = manifest.components["denoiser"].engines
    assert min(record.plugin_us, record.native_us) > 1
    assert record.attention == ("plugin" if record.plugin_us <= record.native_us else "native")
    assert bool(record.plugin) == (record.attention == "plugin")
    with runtime.load(folder, backend="tensorrt") as on_gpu:
        assert on_gpu["denoiser"](torch.zeros(3, 1, 4, 4).cuda(), torch.full((3,), 400.0).cuda()).isfinite().all()
    outcome = run("inspect", folder)
    assert "at every site: the faster engine is kept" in " ".join(outcome.output.replace("│", " ").split())


def _with_attention(folder, attention):
    manifest = read_manifest(folder)
    engine = manifest.recipe.engine.model_copy(update={"attention": attention})
    (folder / MANIFEST).unlink()
    write_manifest(
        folder, manifest.model_copy(update={"recipe": manifest.recipe.model_copy(update={"engine": engine})})
    )


def test_weights_beside_the_graph_are_built_in(trt, bundle, tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "INLINE_LIMIT", 100)
    monkeypatch.setattr(storage, "SMALL", 100)
    component = read_manifest(bundle).components["denoiser"]
    path = tmp_path / "denoiser.onnx"
    storage.save(ir.load(bundle / component.onnx), path)
    assert storage.weights_file(path).stat().st_size > 1000
    built = tensorrt.build_engine("denoiser", component, path, EngineSection(attention="plugin"), Watch())
    assert loaded(trt, built.plan).engine.num_optimization_profiles == 2


def test_weights_in_files_that_are_joined_in_another_are_built_in(trt, tmp_path, monkeypatch):
    """They give what the same weights give where the graph holds all of them. The file has a second name, as in a bundle that is
    compiled.
    """
    monkeypatch.setattr(storage, "SMALL", 100)
    held, path = tiny_models.traced_projections("biased", torch.float16), tmp_path / "model.onnx"
    with monkeypatch.context() as patch:
        patch.setattr(storage, "INLINE_LIMIT", 100)
        storage.save(held, path)
    os.link(storage.weights_file(path), tmp_path / "second name")
    in_files = storage.load(path)
    outputs = []
    for model, files in ((held, 0), (in_files, 2)):
        lower_to_plugin(model)
        with storage.for_parser(model) as content:
            locations = {e.value for x in ModelProto.FromString(content).graph.initializer for e in x.external_data[:1]}
            assert len(locations) == files
        outputs.append(output_of(trt, model))
    assert relative_error(*outputs) <= HALF_DENOISER


def test_timing_is_told_and_names_sites_of_the_graph(trt, bundle):
    component = read_manifest(bundle).components["denoiser"]
    model, watch = ir.load(bundle / component.onnx), Watch()
    choice = tensorrt.choose_alone(trt, model, component.profiles, EngineSection(), watch)
    timed = [*choice.native, *(site for group in choice.plugin for site in group)]
    assert any(detail.startswith("timing attention of 16 × 16 tokens") for detail in watch.details)
    assert {site.name for site in timed} == set(site_plans(model, component.profiles)) == {"denoiser"}
