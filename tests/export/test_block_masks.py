"""Block masks in exported graphs: a table of them, gathered by the timestep, in every lowering."""

from __future__ import annotations

import onnx_ir as ir
import pytest
import tiny_sparse
import tolerances
import torch
from attention_graphs import run
from torch.nn.functional import scaled_dot_product_attention

from trtconvert.attention.modes import Mode
from trtconvert.attention.reference import expand_blocks, tables_from_data
from trtconvert.engine.attention_choice import site_plans
from trtconvert.export.lowering.native import lower_to_native
from trtconvert.export.lowering.plugin import lower_to_plugin
from trtconvert.export.nodes.attention import attention_nodes, block_mask_of
from trtconvert.export.trace import SiteOptions, trace
from trtconvert.models.denoiser import intercepted
from trtconvert.models.recorded_calls import relative_error as error
from trtconvert.quant.forward import Int8Sites

BINS, SIZES = 4, {"batch": 4, "height": 16}


@pytest.fixture(scope="module")
def local():
    return tiny_sparse.build()


@pytest.fixture(scope="module")
def tables(local):
    """A plan of several modes, including FP16."""
    found = {}
    modes = torch.tensor([Mode.PRECISION, Mode.FP16, Mode.BALANCED, Mode.AGGRESSIVE], dtype=torch.int32)

    def attend(call):
        one = tables_from_data(call.q, call.k, call.v, Mode.FP16)
        repeated = {name: x.repeat_interleave(BINS, 0) for name, x in vars(one).items() if name != "modes"}
        found[call.name] = type(one)(**repeated, modes=modes)
        return call.exact()

    with torch.no_grad():
        intercepted(local, attend)(**local.example(0, SIZES))
    return found


@pytest.fixture(scope="module")
def masks():
    """Masks of one site: two bins share a mask, the others differ. Each row has a block."""
    drawn = torch.rand(BINS, 2, 5, 5, generator=torch.Generator().manual_seed(0)) > 0.6
    drawn |= torch.eye(5, dtype=torch.bool)
    drawn[2] = drawn[0]
    return {"denoiser": drawn}


def traced(local, tables, masks):
    return trace(local, tables, SiteOptions(1000.0, "calibrated", True), dims=local.dims, masks=masks)


@pytest.fixture(scope="module")
def model(local, tables, masks):
    return traced(local, tables, masks)


def inputs_of(local, seed=3):
    timesteps = torch.tensor([20.0, 380.0, 610.0, 990.0])  # a bin each
    return local.example(seed, SIZES) | {"timestep": timesteps}


def as_numpy(inputs):
    return {name: x.numpy() for name, x in inputs.items()}


def test_the_body_computes_what_torch_does(local, tables, masks, model):
    sites = Int8Sites(tables, 1000.0, "calibrated", True, masks=masks)
    inputs = inputs_of(local)
    with torch.no_grad():
        expected = intercepted(local, sites.handler())(**inputs)
        dense = intercepted(local, Int8Sites(tables, 1000.0, "calibrated", True).handler())(**inputs)
    got = run(model, as_numpy(inputs))
    assert error(got, expected) < tolerances.SAME_ARITHMETIC
    of_samples = [error(expected[i], dense[i]) for i in range(BINS)]
    assert min(of_samples) > 10 * tolerances.SAME_ARITHMETIC  # all masks have an effect


def test_native_attention_keeps_the_mask(local, tables, masks, model):
    native = model.clone()
    lower_to_native(native)
    inputs = inputs_of(local)

    def attend(call):
        if call.name not in masks:
            return call.exact()
        seen = expand_blocks(masks[call.name], 640, 640)
        return scaled_dot_product_attention(call.q, call.k, call.v, seen, scale=call.scale)

    with torch.no_grad():
        expected = intercepted(local, attend)(**inputs)
    assert error(run(native, as_numpy(inputs)), expected) < 1e-5


def test_masks_are_there_once_and_sites_without_have_no_input(model):
    nodes = attention_nodes(model)
    assert block_mask_of(nodes["denoiser#2"]) is None
    mask = block_mask_of(nodes["denoiser"])
    assert mask is not None and mask.dtype == ir.DataType.BOOL and list(mask.shape)[1:] == [2, 5, 5]
    stored = [x for x in model.graph.initializers.values() if x.dtype == ir.DataType.BOOL]
    assert [list(x.shape) for x in stored] == [[BINS - 1, 2, 5, 5]]


def test_one_mask_for_all_bins_is_a_constant(local, tables, masks):
    model = traced(local, tables, {"denoiser": masks["denoiser"][:1].expand(BINS, -1, -1, -1)})
    mask = block_mask_of(attention_nodes(model)["denoiser"])
    assert mask is not None and mask.producer() is None and list(mask.shape) == [1, 2, 5, 5]


def test_the_plugin_gets_the_mask_and_is_not_timed_without(model):
    assert site_plans(model, [{"batch": (1, 2, 4), "height": (16, 16, 16)}]).keys() == {"denoiser#2"}
    plugin = model.clone()
    assert lower_to_plugin(plugin) == 2
    node = attention_nodes(plugin)["denoiser"]
    assert node.attributes["block_mask"].as_int() == 1 and block_mask_of(node) is not None
