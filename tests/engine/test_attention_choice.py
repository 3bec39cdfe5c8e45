"""The choice of attention for each site, and the timing of both forms alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import onnx_ir as ir
import pytest
import torch
from rtx_builds import Watch, trt
from timed_sites import OnCpu, case, refuse

from trtconvert.attention import reference
from trtconvert.attention.modes import Mode
from trtconvert.attention.reference import tables_from_data
from trtconvert.bundle import TensorRecord
from trtconvert.engine import attention_timer
from trtconvert.engine.attention_choice import (
    AttentionCase,
    CaseTimes,
    SitePlan,
    choose,
    one_node_model,
    site_plans,
    timestep_of,
)
from trtconvert.engine.builder import build_plan
from trtconvert.errors import TrtconvertError
from trtconvert.export.lowering.function import lower_to_function
from trtconvert.export.lowering.native import lower_to_native
from trtconvert.export.nodes.attention import attention_nodes
from trtconvert.export.trace import SiteOptions, trace
from trtconvert.models.denoiser import intercepted
from trtconvert.models.recorded_calls import relative_error


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
    assert set(kept) == {"cross", "first"}  # `both`: the profile of long sequences outweighs
    # Grouped by the lengths of the first profile, the largest gain first: 130 against 200 µs, 164 against 221.
    assert [[site.name for site in group] for group in choice.plugin] == [["self"], ["both"]]
    cross = kept["cross"]
    assert (cross.query_tokens, cross.key_tokens, cross.native_us) == (4096, 77, 21.0)
    assert cross.plugin_us == (22 + 3 * 38) / 4
    assert sorted(found.key_tokens for found, _ in asked) == [77, 4096]  # each case once, with all modes that it needs
    assert all(wanted == {Mode.FP16, Mode.BALANCED} for _, wanted in asked)


@pytest.mark.parametrize("layout", ["BHND", "BNHD"])
@pytest.mark.parametrize("mode", list(Mode))
def test_the_node_that_is_timed_computes_in_the_mode_of_its_timestep(layout, mode):
    """The timestep selects the mode: other modes differ by more than rounding."""
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

    def build(model):  # the shapes identify the plan
        return {str(x.name): tuple(x.shape.numpy()) for x in model.graph.inputs}

    monkeypatch.setattr(attention_timer, "EngineRunner", Runner)
    timer = attention_timer.AttentionTimer(None, build, pytest.fail)
    with OnCpu():
        times = timer(case(100, 77, layout), [Mode.PRECISION, Mode.BALANCED])
    assert times == CaseTimes(3.0, {Mode.PRECISION: 1.0, Mode.BALANCED: 2.0})
    assert runs[0] == runs[1] == runs[2]  # the same memory in another layout


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


def test_the_plugin_and_native_attention_are_timed_with_their_own_masks(monkeypatch):
    """The plugin gets a key mask where the model repeats an additive mask over heads."""
    given, key_mask = ((2, 4, 1, 77), ir.DataType.FLOAT16), (2, 1, 1, 77)
    seen = []

    class Runner:
        def __init__(self, trt, mask):
            self.mask = mask

        def microseconds(self, feeds):
            seen.extend((self.mask, tuple(feed["mask"].shape), feed["mask"].dtype) for feed in feeds[:1])
            return 1.0

    monkeypatch.setattr(attention_timer, "EngineRunner", Runner)
    timer = attention_timer.AttentionTimer(None, lambda model: tuple(model.graph.inputs[-1].shape), pytest.fail)
    with OnCpu():
        timer(replace(case(100, 77), mask=given, key_mask=key_mask), [Mode.BALANCED])
    assert seen == [(key_mask, key_mask, torch.bool), (given[0], given[0], torch.float16)]
