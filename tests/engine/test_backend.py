"""Builds of the backend `tensorrt`: attention, group norms and weights in the engine, and its record."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import onnx_ir as ir
import pytest
import torch
from delta_layers import delta_model
from layered_graphs import int8_model
from pydantic import ValidationError
from rtx_builds import Watch
from timed_sites import case, refuse, timed_site
from tiny_layers import LEFT

from trtconvert.attention.modes import Mode
from trtconvert.bundle import TRANSPOSED, LayerRecord, NativeSite, TensorRecord, read_manifest
from trtconvert.engine import engine_timer, lowered_model, tensorrt
from trtconvert.engine.attention_choice import CaseTimes, Choice, SitePlan, choose, one_node_model
from trtconvert.errors import BackendUnavailable, TrtconvertError
from trtconvert.export.lowering import delta_plugins, group_norms, int8_layers
from trtconvert.export.matching import producer_of
from trtconvert.export.nodes.attention import attention_nodes
from trtconvert.export.nodes.common import DOMAIN
from trtconvert.library import library_version
from trtconvert.recipe import EngineSection


@pytest.fixture
def builds(monkeypatch, digits_build):
    """Runs `build_engine` of the shipped model without a GPU: plans are the names of the sites with the plugin.

    Returns the times of engines by plan, the timed plans, and a function that builds.
    """
    found = SimpleNamespace(times={}, timed=[], alone=[], watch=Watch())

    def build_lowered(trt, model, path, inputs, profiles, options, watch, runs):
        sites = attention_nodes(model)
        return ",".join(sites).encode() if sites or options.channels_last else b"plain"

    def time_engine(trt, inputs, timestep_input, profiles, plan, bins):
        found.timed.append((plan, bins))
        assert timestep_input in {spec.name for spec in inputs} and len(profiles) == 1
        return found.times[plan]

    def build(attention="auto", int8_layers=False, caches=(), **fields):
        component = read_manifest(digits_build.bundle).components["denoiser"]
        layer = LayerRecord(
            name="a", kind="linear", in_channels=16, out_channels=8, rows=64, weight="a.weight", modes=[3]
        )
        component = component.model_copy(update={"layers": [layer] if int8_layers else [], "caches": list(caches)})
        onnx, options = (
            digits_build.bundle / component.onnx,
            EngineSection(
                **{"attention": attention, "layers": "exact" if fields.get("refittable") else "native"} | fields
            ),
        )
        return tensorrt.build_engine("denoiser", component, onnx, options, found.watch)

    found.build = build
    monkeypatch.setattr(tensorrt, "load", lambda: SimpleNamespace(__version__="10.6.0"))
    for module in (tensorrt, lowered_model):
        monkeypatch.setattr(module, "device_architecture", lambda: "sm90")
    monkeypatch.setattr(tensorrt, "device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(lowered_model, "compiled_architectures", lambda: ("80", "90a"))
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
    faster = native_us > 80
    # The four bins have the modes precision, balanced, balanced and aggressive. Bins of equal modes are timed once.
    timed = (mixed, b"", ALL)[: 3 if alone and faster else 2]
    assert builds.timed == [(plan, {125.0: 1, 375.0: 2, 875.0: 1}) for plan in timed]
    assert (plan, record.attention) == ((mixed, "plugin") if faster else (b"", "native"))
    assert bool(record.plugin) == faster and record.native_sites == builds.alone
    assert (record.plugin_us, record.native_us) == (80.0, 90.0 if faster else 70.0)
    # The bundle may have engines of other GPUs of the architecture.
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
    monkeypatch.setattr(lowered_model, "compiled_architectures", lambda: compiled)
    for module in (tensorrt, lowered_model):
        monkeypatch.setattr(module, "device_architecture", lambda: gpu)
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
        ("plugin", False, False, {}, None),  # no notice without group norms
        ("plugin", False, True, {"channels_last": False}, None),  # as asked for
        ("native", True, True, {}, None),
        ("native", False, True, {}, "the plugin library has no kernel for them on this GPU"),
        ("native", True, True, {"channels_last": False}, None),
        ("native", True, False, {}, None),
    ],
)
def test_group_norms_that_stay_tensorrts_own_are_told(builds, monkeypatch, attention, kernel, norms, fields, said):
    """The record of an engine with native attention names the plugin library if it has plugins."""
    monkeypatch.setattr(lowered_model, "has_group_norm_kernel", lambda: kernel)
    monkeypatch.setattr(group_norms, "has_group_norms", lambda model: norms)

    def fuse_group_norms(model):
        if norms:
            node = ir.node("GroupNorm", [model.graph.outputs[0]], domain=DOMAIN)
            model.graph.append(node)
            model.graph.outputs[0] = node.outputs[0]

    monkeypatch.setattr(group_norms, "fuse_group_norms", fuse_group_norms)
    record = builds.build(attention, **fields).record
    taken = kernel and norms and not fields
    assert record.plugin == (library_version() if attention == "plugin" or taken else "")
    if said is None:
        assert not builds.watch.notices
    else:
        *others, notice = builds.watch.notices
        assert notice.startswith("group norms stay TensorRT's own") and said in notice
        assert not others


@pytest.mark.parametrize(("exact_us", "kept"), [(70.0, "exact"), (90.0, "native")])
def test_auto_computes_layers_in_16_bits_where_the_whole_engine_is_faster_so(builds, monkeypatch, exact_us, kept):
    """The engine with other layers has the same attention. Only its time differs: plans are the names of sites."""
    times = iter([80.0, 85.0, 80.0, exact_us])
    monkeypatch.setattr(engine_timer, "denoiser_microseconds", lambda *_: next(times))
    record = builds.build(int8_layers=True, layers="auto").record
    assert (record.layers, record.layers_us) == (kept, {"native": 80.0, "exact": exact_us})
    assert any("no INT8 layers" in notice for notice in builds.watch.notices) == (kept == "exact")


CACHE = TensorRecord(name="modiff.timestep", dtype="float32", shape=["batch"])


@pytest.mark.parametrize(("native_us", "kept"), [(70.0, "native"), (90.0, "plugin")])
def test_deltas_are_quantised_by_plugins_where_the_whole_engine_is_faster_so(builds, monkeypatch, native_us, kept):
    monkeypatch.setattr(delta_plugins, "can_fuse_deltas", lambda model: True)
    times = iter([80.0, 85.0, 80.0, native_us])
    monkeypatch.setattr(engine_timer, "denoiser_microseconds", lambda *_: next(times))
    record = builds.build(int8_layers=True, caches=[CACHE], layers="auto").record
    assert (record.layers, record.layers_us) == (kept, {"plugin": 80.0, "native": native_us})
    for fields in ({"hardware_compatible": True}, {"layers": "native"}):
        monkeypatch.setattr(
            lowered_model, "against_plugins", lambda options: "none" if options.hardware_compatible else ""
        )
        times = iter([80.0, 85.0])
        record = builds.build(int8_layers=True, caches=[CACHE], **{"layers": "auto"} | fields).record
        assert (record.layers, record.layers_us) == ("native", {})


def test_an_engine_without_any_plugin_has_none_for_changes_either(builds, monkeypatch):
    monkeypatch.setattr(delta_plugins, "can_fuse_deltas", lambda model: True)
    monkeypatch.setattr(group_norms, "has_group_norms", lambda model: True)
    monkeypatch.setattr(lowered_model, "has_group_norm_kernel", lambda: True)
    built = []

    def build_lowered(trt, model, path, inputs, profiles, options, watch, runs):
        built.append((options.layers, options.channels_last))
        return b"plan"

    monkeypatch.setattr(tensorrt, "build_lowered", build_lowered)
    times = iter([80.0, 85.0, 70.0, 70.0, 75.0])
    monkeypatch.setattr(engine_timer, "denoiser_microseconds", lambda *_: next(times))
    record = builds.build(int8_layers=True, caches=[CACHE], layers="auto").record
    assert built == [("plugin", True), ("plugin", True), ("native", False), ("plugin", False)]
    assert (record.layers, record.layers_us, record.plugin) == ("native", {"native": 70.0, "plugin": 75.0}, "")


@pytest.mark.parametrize("attention", ["auto", "plugin", "native"])
@pytest.mark.parametrize("changes", [True, False])
def test_engines_go_on_without_layers_by_plugins_that_cannot_be_built(builds, monkeypatch, attention, changes):
    """Deltas fall back to Q/DQ, other layers to 16 bits; the attention stays."""
    monkeypatch.setattr(delta_plugins, "can_fuse_deltas", lambda model: True)
    monkeypatch.setattr(group_norms, "has_group_norms", lambda model: not changes)
    for module in (tensorrt, lowered_model):
        monkeypatch.setattr(module, "has_linear_kernel", lambda: True)
    build_lowered = tensorrt.build_lowered

    def lacking(*arguments):
        if arguments[5].layers == "plugin":
            refuse()
        return build_lowered(*arguments)

    monkeypatch.setattr(tensorrt, "build_lowered", lacking)
    builds.times = {ALL: 80.0, b"": 90.0}
    built = builds.build(attention, int8_layers=True, caches=[CACHE] if changes else [], layers="auto")
    instead = "native" if changes else "exact"
    assert (built.plan, built.record.layers) == (b"" if attention == "native" else ALL, instead)
    (told,) = [notice for notice in builds.watch.notices if notice.startswith("layers are ")]
    assert (
        told.startswith(f"layers are {instead}: an engine with layers that are plugin cannot")
        and "node 7 has no" in told
    )


@pytest.mark.parametrize("attention", ["auto", "plugin"])
def test_layers_that_were_asked_for_by_name_have_no_others_instead(builds, monkeypatch, attention):
    monkeypatch.setattr(tensorrt, "build_lowered", refuse)
    with pytest.raises(TrtconvertError):
        builds.build(attention, int8_layers=True, layers="plugin")
    assert not [notice for notice in builds.watch.notices if notice.startswith("layers are ")]


@pytest.mark.parametrize(("layers", "left"), [("plugin", True), ("native", False), ("exact", False)])
def test_products_that_plugins_leave_in_16_bits_are_counted(builds, layers, left):
    made = int8_model(attention=True)
    sizes = {name: (opt, opt, opt) for name, (_, opt, _) in made.model.dims.items()}
    options = EngineSection(layers=layers, channels_last=False)
    lowered = lowered_model.lowered(made.graph(torch.float16), list(made.attention), options, [sizes])
    assert bool(lowered_model.linear_in_16_bits(lowered)) == left


@pytest.mark.parametrize(("layers", "told"), [("plugin", 1), ("native", 0), ("auto", 0)])
def test_products_in_16_bits_are_told_where_plugins_were_asked_for(builds, monkeypatch, layers, told):
    monkeypatch.setattr(lowered_model, "linear_in_16_bits", lambda model: 3)
    builds.build("plugin", int8_layers=True, layers=layers)
    notices = [
        notice for notice in builds.watch.notices if "3 products of INT8 layers are computed in 16 bits" in notice
    ]
    assert len(notices) == told and all("engine.layers: native" in notice for notice in notices)


@pytest.mark.parametrize("lacking", ["", "kernels for sm_80"])
def test_plugins_that_do_not_quantise_deltas_are_told(builds, monkeypatch, lacking):
    monkeypatch.setattr(delta_plugins, "can_fuse_deltas", lambda model: bool(lacking))
    monkeypatch.setattr(lowered_model, "against_plugins", lambda options: lacking)
    builds.build("native", int8_layers=True, caches=[CACHE], layers="plugin")
    (told,) = [notice for notice in builds.watch.notices if "deltas are quantised by Q/DQ" in notice]
    assert (lacking or "FP16 caches") in told


def test_layers_that_cannot_be_compared_stay_int8(builds, monkeypatch):
    monkeypatch.setattr(engine_timer, "denoiser_microseconds", refuse)
    record = builds.build(int8_layers=True, layers="auto").record
    assert (record.layers, record.layers_us) == ("native", {})
    assert any("layers stay native" in notice for notice in builds.watch.notices)


@pytest.mark.parametrize(
    ("lacking", "said"),
    [
        ("file", "does not keep their unquantised weights"),
        ("kernels", "the plugin library has kernels for sm_80"),
        ("sizes", "not faster for any layer"),
        ("", ""),
    ],
)
def test_refittable_engines_have_int8_layers_where_these_can_be_quantised_anew(
    builds, monkeypatch, tmp_path, lacking, said
):
    """They are compared with 16-bit layers, and the build names the missing part."""
    kept = tmp_path / "unquantised"
    if lacking != "file":
        kept.touch()
    monkeypatch.setattr(tensorrt, "unquantised_file", lambda onnx: kept)
    monkeypatch.setattr(int8_layers, "refittable_layers", lambda model, sizes: set() if lacking == "sizes" else {"a"})
    if lacking == "kernels":
        monkeypatch.setattr(lowered_model, "against_plugins", lambda options: "kernels for sm_80")
    times = iter([80.0, 85.0, 80.0, 90.0])
    monkeypatch.setattr(engine_timer, "denoiser_microseconds", lambda *_: next(times))
    record = builds.build(int8_layers=True, layers="auto", refittable=True).record
    assert record.layers == ("exact" if lacking else "plugin")
    told = [notice for notice in builds.watch.notices if "layers run in 16 bits" in notice]
    assert len(told) == bool(lacking) and all(said in notice for notice in told)
    assert record.layers_us == ({} if lacking else {"plugin": 80.0, "exact": 90.0})


def test_models_that_cannot_be_refitted_are_refused_before_calibration():
    with pytest.raises(ValidationError, match=r"false with engine\.layers: native, which has fixed INT8 weights"):
        EngineSection(refittable=True, layers="native")


@pytest.mark.parametrize("plain_us", [79.9, 80.0])
def test_auto_keeps_no_plugin_where_the_whole_engine_is_faster_without_any(builds, monkeypatch, plain_us):
    monkeypatch.setattr(lowered_model, "has_group_norm_kernel", lambda: True)
    monkeypatch.setattr(group_norms, "has_group_norms", lambda model: True)
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
    """Three projections of one tensor, which other engines compute as one product."""
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


@pytest.mark.parametrize("layers", ["plugin", "native"])
def test_layers_beside_those_that_quantise_deltas_are_int8_whoever_computes_these(monkeypatch, layers):
    monkeypatch.setattr(lowered_model, "against_plugins", lambda options: "")
    made = delta_model(unchanged=["mlp.0", "mlp.2", "tied", "tied#2", "skip", "attended", "conv"])
    options = EngineSection(attention="native", layers=layers)
    graph = tensorrt.lowered(made.graph(torch.float16), [], options, [made.model.dims]).graph
    kinds = [node.op_type for node in graph]
    of_plugins = kinds.count("Int8Linear"), kinds.count("QuantiseChangedRows")
    assert of_plugins == ((3, 1) if layers == "plugin" else (0, 0))  # q, k and v
    products = [node for node in graph if node.op_type in ("MatMul", "Gemm", "Conv")]
    in_16_bits = [node for node in products if producer_of(node.inputs[0], "DequantizeLinear") is None]
    # Two of the attention; one convolution without INT8 group norms.
    assert len(in_16_bits) == len(LEFT) + 2 + (layers == "plugin")
