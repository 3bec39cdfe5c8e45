"""Group norms of U-Nets: matches, engines, and equal results."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from norm_graphs import as_operators, flags, named, shifts
from tiny_unets import UNETS, unet
from tolerances import PIXELS_AS_TOKENS
from torch import Tensor

from trtconvert.engine import lowered_model, tensorrt
from trtconvert.export import storage
from trtconvert.export.lowering.group_norms import CHANNELS_LAST_ADD, GROUP_NORM, fuse_group_norms, has_group_norms
from trtconvert.export.lowering.native import lower_to_native
from trtconvert.export.lowering.plugin import lower_to_plugin
from trtconvert.export.lowering.residual_norms import RESIDUAL_NORM
from trtconvert.export.nodes.attention import attention_nodes
from trtconvert.export.nodes.common import has_own_nodes
from trtconvert.library import has_group_norm_kernel
from trtconvert.models.recorded_calls import relative_error
from trtconvert.recipe import EngineSection


def run(model: ir.Model, **sizes: int) -> Tensor:
    """Runs a U-Net with native attention in ONNX Runtime, and checks its shapes."""
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto, full_check=True)
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    generator = np.random.default_rng(0)
    feeds = {
        value.name: generator.standard_normal([sizes.get(size, size) for size in value.shape]).astype(np.float16)
        for value in session.get_inputs()
        if value.name != "timestep"
    }
    feeds["timestep"] = np.full(len(feeds["x"]), 400, np.float32)
    return torch.from_numpy(session.run(None, feeds)[0]).float()


@pytest.mark.first_case
@pytest.mark.parametrize(
    ("linear", "varying"),
    [pytest.param(*of, marks=() if len(of[1]) == 3 else pytest.mark.soak) for of in UNETS],
    ids=str,
)
def test_norms_of_unets_are_taken_and_the_function_stays(linear: bool, varying: tuple[str, ...]):
    """Of eight ResNets two each, of four transformers one, and the last one. All have SiLU but those of transformers, and the
    second ones of ResNets have a timestep."""
    model = unet(linear, varying)
    lower_to_native(model, list(attention_nodes(model)))
    before = model.clone()
    assert has_group_norms(model) and fuse_group_norms(model) == 21 + 4 and not has_group_norms(model)
    model = model.clone()  # unused initializers are not serialised
    assert (len(named(model, GROUP_NORM)), len(named(model, CHANNELS_LAST_ADD))) == (21, 4)
    assert (sum(flags(model, "silu")), sum(flags(model, "channels_last")), shifts(model)) == (17, 4, 8)
    assert set(flags(model, "groups")) == {8}
    epsilons = [node.attributes["epsilon"].as_float() for node in named(model, GROUP_NORM)]
    assert sorted(set(epsilons)) == pytest.approx([1e-6, 1e-5]) and min(epsilons.count(e) for e in set(epsilons)) == 4
    kept = {value.name: value for node in before.graph for value in node.outputs}
    for node in model.graph:
        for value in node.outputs:
            if value.name in kept and node.op_type != "Constant":
                assert (value.type, value.shape) == (kept[value.name].type, kept[value.name].shape)
    used = {value for node in model.graph for value in node.inputs}
    assert set(model.graph.initializers.values()) <= used
    for sizes in ({"batch": 2, "height": 8, "width": 12}, {"batch": 3, "height": 10, "width": 8}):
        found, expected = run(as_operators(model.clone()), **sizes), run(before, **sizes)
        if linear:
            assert torch.equal(found, expected)
        else:  # convolutions have become products
            assert relative_error(found, expected) < PIXELS_AS_TOKENS
        if len(varying) < 3:
            break


@pytest.mark.soak
def test_residual_norms_are_taken_as_before():
    """Two in each transformer. Its projections are two products more."""
    plain, model = unet(linear=False, varying=()), unet(linear=False, varying=())
    lower_to_plugin(plain)
    fuse_group_norms(model)
    lower_to_plugin(model)
    assert len(named(model, GROUP_NORM)) == 21
    assert len(named(model, RESIDUAL_NORM)) == len(named(plain, RESIDUAL_NORM)) == 8
    assert len(named(model, "MatMul")) == len(named(plain, "MatMul")) + 8


@pytest.mark.soak
def test_weights_in_files(tmp_path: Path):
    model = unet(linear=False, varying=())
    lower_to_native(model, list(attention_nodes(model)))
    expected = run(model)
    ir.save(model, tmp_path / "model.onnx", external_data="weights", size_threshold_bytes=0)
    model = ir.load(tmp_path / "model.onnx")
    assert fuse_group_norms(model) == 25
    model = model.clone()
    with storage.for_parser(model) as content:  # as for the engine's builder
        assert content
    ir.external_data.load_to_model(model)
    assert relative_error(run(as_operators(model)), expected) < PIXELS_AS_TOKENS


@pytest.mark.slow
@pytest.mark.parametrize("native", [False, True], ids=["plugin", "native"])
@pytest.mark.parametrize(
    ("kernel", "options", "count"),
    [
        (True, {}, 21),
        (True, {"channels_last": False}, 0),
        (False, {}, 0),
        (True, {"refittable": True}, 0),
        (True, {"hardware_compatible": True}, 0),  # other GPUs have no kernel
    ],
    ids=str,
)
def test_engines_have_them_where_they_can(monkeypatch, kernel: bool, options: dict, count: int, native: bool):
    monkeypatch.setattr(lowered_model, "has_linear_kernel", lambda: False)
    monkeypatch.setattr(lowered_model, "has_group_norm_kernel", lambda: kernel)
    sites = list(attention_nodes(unet()))
    lowered = tensorrt.lowered(unet(), sites if native else [], EngineSection(**options), [{}])
    assert len(attention_nodes(lowered)) == (0 if native else len(sites))
    assert len(named(lowered, GROUP_NORM)) == count
    assert len(named(lowered, CHANNELS_LAST_ADD)) == (4 if count else 0)
    assert has_own_nodes(lowered) == (not native or count > 0)


def test_a_model_without_sites_keeps_its_norms(monkeypatch):
    """Like a VAE with images that are too large for the kernel."""
    monkeypatch.setattr(lowered_model, "has_group_norm_kernel", lambda: True)
    model = unet()
    lower_to_native(model, list(attention_nodes(model)))
    assert has_group_norms(model) and not has_own_nodes(tensorrt.lowered(model, [], EngineSection(), [{}]))


def test_a_machine_without_a_gpu_has_no_kernel():
    if torch.cuda.is_available():
        pytest.skip("a GPU is here")
    assert not has_group_norm_kernel()
