"""Weights in host memory: forward and backward passes with the hooks of diffusers' group offloading compute the same as without
them, and the device holds as few weights as expected.

The CPU is the device here. Weights that the hooks offload become NaN, so that a stale read shows, unless weights are read
between calls.
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from graphed_models import Digits, assert_same_calibration, assert_same_sensitivity
from rich.console import Console
from support import REPOSITORY
from torch import nn

from trtconvert import pipeline
from trtconvert.cache import Cache
from trtconvert.calib import probes
from trtconvert.calib.calibrate import parts_to_convert
from trtconvert.calib.candidates import Candidate
from trtconvert.calib.probes import Probes
from trtconvert.models import offloading
from trtconvert.models.cuda_graphs import graphed
from trtconvert.models.denoiser import DenoiserInType, intercepted
from trtconvert.models.digits import digits_model
from trtconvert.models.offloading import move, offload, offload_large_parts, pins, resident_bytes
from trtconvert.models.placed import offloaded
from trtconvert.progress import Reporter
from trtconvert.quant.decision import Choice, Unit
from trtconvert.recipe import AttentionSection, LayersSection, load_recipe
from trtconvert.stages import build as stage_builds
from trtconvert.stages.common import CALIBRATION

pytest.importorskip("diffusers", reason="needs diffusers")
import tiny_pipelines
from diffusers.hooks import group_offloading
from diffusers.hooks.group_offloading import GroupOffloadingConfig, GroupOffloadingType, ModuleGroup

from trtconvert.models.diffusers import diffusers_model

CPU = torch.device("cpu")
WEIGHTS = REPOSITORY / "recipes/digits-dit.safetensors"


class Moves:
    """Counts the weights on the device, the largest count, and the moves of groups."""

    def __init__(self) -> None:
        self.nan = True
        self.here: dict[int, int] = {}
        self.most = self.count = 0
        self.numbers: dict[torch.Tensor, torch.Tensor] = {}

    def tensors(self, group: ModuleGroup) -> list[torch.Tensor]:
        of_modules = [x for part in group.modules for x in (*part.parameters(), *part.buffers())]
        return [*{id(x): x for x in (*of_modules, *group.parameters, *group.buffers)}.values()]

    def onload(self, group: ModuleGroup) -> None:
        for x in self.tensors(group):
            x.data = self.numbers[x].clone()
        self.here[id(group)] = sum(x.nbytes for x in self.tensors(group))
        self.count, self.most = self.count + 1, max(self.most, sum(self.here.values()))

    def offload(self, group: ModuleGroup) -> None:
        for x in self.tensors(group):
            numbers = self.numbers.setdefault(x, x.data)
            x.data = torch.full_like(x, torch.nan) if self.nan and x.is_floating_point() else numbers
        self.here.pop(id(group), None)


@pytest.fixture
def moves(monkeypatch):
    found = Moves()
    monkeypatch.setattr(ModuleGroup, "_onload_from_memory", lambda group: found.onload(group))
    monkeypatch.setattr(ModuleGroup, "_offload_to_memory", lambda group: found.offload(group))
    return found


class Stream:
    def synchronize(self) -> None:
        pass


@pytest.fixture(params=["alone", "prefetched"])
def prefetching(request, monkeypatch):
    """Blocks are brought one at a time, as without a stream, or prefetched during the block before, as on a GPU."""

    def apply(module, *, onload_device, offload_device, **_):
        group_offloading._apply_group_offloading(
            module,
            GroupOffloadingConfig(
                onload_device, offload_device, GroupOffloadingType.BLOCK_LEVEL, False, False, True, 1, stream=Stream()
            ),
        )

    apply.__module__ = group_offloading.__name__
    if request.param == "prefetched":
        monkeypatch.setattr(group_offloading, "apply_group_offloading", apply)
    return request.param == "prefetched"


def in_host_memory(model):
    return offloaded(model, CPU, torch.float32, lambda _: None)


def test_a_forward_gives_what_it_gives_without(moves, prefetching):
    model = digits_model(WEIGHTS)
    inputs = model.example(0, {name: 4 for name in model.dims})
    there = in_host_memory(model)
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(there.denoiser(**inputs), model.denoiser(**inputs))
    assert moves.count > 2 and not moves.here
    assert there.device == CPU == there.onload
    assert graphed(there, there.denoiser) is there.denoiser


def test_resident_bytes_bound_the_weights_on_the_device(moves, prefetching):
    model = digits_model(WEIGHTS)
    there = in_host_memory(model)
    expected = resident_bytes(there.denoiser)
    with torch.no_grad():
        for _ in range(2):
            there.denoiser(**model.example(0, {name: 2 for name in model.dims}))
    assert moves.most == expected if prefetching else moves.most < expected
    assert expected < sum(x.nbytes for x in model.denoiser.parameters())


@pytest.fixture(scope="module")
def beside():
    """The digits model with the ranges of its calibration, without offloading."""
    return Digits.load()


@pytest.mark.soak
def test_layers_are_found_calibrated_and_measured_by_probes_as_without(moves, beside, tmp_path):
    moves.nan = False
    there = Digits.load(in_host_memory)
    assert there.parts == beside.parts
    made, expected = there.calibrated(tmp_path / "a"), beside.calibrated(tmp_path / "b")
    assert_same_calibration(made, expected)
    assert all(torch.equal(made.layers[name].x_scale, of.x_scale) for name, of in expected.layers.items())
    count = moves.count
    assert_same_sensitivity(there.sensitivity(made, 2), beside.sensitivity(expected, 2), rtol=0)
    assert moves.count > count and not moves.here


def pipeline_model(folder, name):
    make, options = tiny_pipelines.PIPELINES[name]
    make().save_pretrained(folder)
    return diffusers_model(folder, **{"tokens": 8, "batch": [1, 2, 2]} | options)


@pytest.mark.first_case
@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", ["flux", "stable_diffusion_xl"])
@pytest.mark.parametrize("kept", [True, False])
def test_gradients_of_pipelines_go_through_blocks_that_are_computed_again(
    moves, prefetching, tmp_path, monkeypatch, name, kept
):
    """Double and single blocks; blocks with skip connections and convolutions, whose weights autograd keeps."""
    monkeypatch.setattr(probes, "_KEPT_ON_CPU", 2**20 if kept else 0)  # for some sites, and for none
    model = pipeline_model(tmp_path, name)
    there = in_host_memory(model)
    found = []
    for one in (model, there):
        parts = parts_to_convert(one, AttentionSection(), LayersSection())
        noisy = [
            Candidate(
                Unit("layer", layer.name, (layer.name,), (Choice(1),)), Choice(1), lambda call: call.x.sum() * 1e-3
            )
            for layer in parts.layers
        ]
        monkeypatch.setattr(probes, "own_channels", lambda changed, output: output * 1.01 + changed)
        inputs = one.example(0, {size: opt for size, (_, opt, _) in one.dims.items()})
        exact = intercepted(one, lambda call: call.exact())
        with torch.no_grad():
            output, errors = Probes(one, noisy, draws=6).errors(exact, inputs)
        found.append((parts, output, torch.stack(errors)))
    (parts, output, errors), (same_parts, same_output, same_errors) = found
    assert same_parts == parts and len(parts.layers) > 10
    assert torch.equal(output, same_output)
    assert torch.equal(errors, same_errors) and errors.isfinite().all() and (errors > 0).any()
    assert not moves.here
    # A backward pass has as many blocks on the device as a forward.
    assert moves.most <= resident_bytes(there.denoiser)


def test_an_evaluation_offloads_the_copies_that_it_makes(moves):
    model = digits_model(WEIGHTS)
    inputs = model.example(0, {name: 2 for name in model.dims})
    for dtype in (torch.float32, torch.bfloat16):
        expected = DenoiserInType(model, dtype, {})(**inputs)
        count, there = moves.count, DenoiserInType(replace(model, onload=CPU), dtype, {})
        assert torch.equal(there(**inputs), expected) and moves.count > count
    assert not any(x.isnan().any() for x in model.denoiser.parameters())


@pytest.mark.as_of(diffusers="0.42")
def test_hooks_prefetch_as_before_when_a_backward_pass_is_over():
    module = nn.ModuleDict({"blocks": nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))})
    offload(module, CPU)
    hooks = [hook for _, hook in offloading._hooks(module)]
    assert len(hooks) == 2
    hooks[0].next_group, hooks[1].group.onload_self, hooks[1].group.non_blocking = hooks[1].group, False, True
    with offloading.in_backward(module):
        assert hooks[0].next_group is None and hooks[1].group.onload_self and not hooks[1].group.non_blocking
    assert hooks[0].next_group is hooks[1].group and not hooks[1].group.onload_self and hooks[1].group.non_blocking


def test_large_models_of_the_pipeline_are_offloaded_where_they_compute_on_the_device(moves, monkeypatch):
    monkeypatch.setattr(offloading, "LARGE", 100)
    monkeypatch.setattr(offloading, "offload", lambda part, device, leaves: offload(part, CPU, leaves=leaves))
    large, small = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)), nn.Linear(2, 2)
    x = torch.randn(3, 8)
    expected = large(x)
    offload_large_parts([large, small, None], pinning=False, notice=lambda _: None)
    move(large, "cuda")
    assert large[0].weight.isnan().all() and torch.equal(large(x), expected)
    assert small.weight.device == CPU and large[0].weight.device == CPU
    assert len(offloading._hooks(large)) == 2
    moves.nan = False
    large(x)
    move(large, "cpu")
    assert not offloading._hooks(large)
    assert torch.equal(large(x), expected)


def test_a_text_encoder_with_tied_weights_computes_layer_by_layer(moves, monkeypatch, caplog):
    def prefetched(module, *, onload_device, offload_device, **_):
        leaves = GroupOffloadingType.LEAF_LEVEL
        config = GroupOffloadingConfig(onload_device, offload_device, leaves, False, False, True, stream=Stream())
        group_offloading._apply_group_offloading(module, config)

    prefetched.__module__ = group_offloading.__name__
    monkeypatch.setattr(group_offloading, "apply_group_offloading", prefetched)
    encoder, ids = tiny_pipelines.t5(), torch.arange(16).view(2, 8)
    expected = encoder(ids)[0]
    offload(encoder, CPU, leaves=True)
    for _ in range(3):
        assert torch.equal(encoder(ids)[0], expected) and not moves.here
    assert not caplog.records
    assert all(x.isnan().any() for x in encoder.parameters())


def test_host_memory_that_is_short_is_said(monkeypatch):
    said = []
    monkeypatch.setattr(offloading, "host_memory_free", lambda: 2**30)
    assert pins([2**20, 2**20 + 1], "Flux", said.append) and not said
    assert not pins([2**29, 2**29 + 1], "Flux", said.append)
    assert said[0].startswith("the weights of Flux are not pinned as a whole: this needs 1.5 GiB of host memory")


def test_host_memory_is_that_of_the_machine_or_less():
    assert 0 < offloading.host_memory_free() < 2**50


@pytest.mark.soak
def test_a_pipeline_with_text_encoders_is_built_as_without(moves, tmp_path, monkeypatch):
    """The build runs from the calibration to the gates; the exported model is traced from the model as loaded."""
    moves.nan = False
    monkeypatch.setattr(offloading, "LARGE", 1000)
    tiny_pipelines.with_text("flux").save_pretrained(tmp_path / "pipeline")
    recipe = tiny_pipelines.SMALL_BUILD | {
        "model": {
            "source": "diffusers",
            "weights": str(tmp_path / "pipeline"),
            "options": {"height": 32, "width": 32, "batch": [1, 1, 2], "prompts": ["a cat", "a dog"]},
        },
        "attention": {"modes": "auto"},
        "plan": {"samples": 1, "steps": 2, "sensitivity": "probes"},
        "layers": {"modes": "auto", "min_rows": 1},
        "compute": {"device": "cpu"},
    }
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    found, plan_stages = [], pipeline.plan_stages

    def noted(started, calibrated, searched):
        (planned,) = plans = plan_stages(started, calibrated, searched)
        found.append(
            ((calibrated.stage.folder / CALIBRATION).read_bytes(), planned.plan.attention, planned.plan.layers)
        )
        if not moves.count:
            raise InterruptedError  # the calibration and the plan without offloading are all that is compared
        return plans

    def built(name):
        recipe, cache = load_recipe(tmp_path / "recipe.yaml"), Cache(tmp_path / f"cache-{name}")
        return pipeline.build(recipe, tmp_path / name, cache, Reporter(Console(quiet=True)))

    monkeypatch.setattr(pipeline, "plan_stages", noted)
    with pytest.raises(InterruptedError):
        built("whole")
    assert not moves.count
    monkeypatch.setattr(stage_builds, "placed", lambda model, _, notice: in_host_memory(model))
    built("offloaded")
    assert moves.count and found[0] == found[1]
