"""Heads of unsupported sizes: padded in the exported graph, and unpadded in the native lowering."""

from __future__ import annotations

from dataclasses import replace

import pytest
import tiny_models
import tolerances
import torch
from attention_graphs import run
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from trtconvert.attention import reference
from trtconvert.attention.modes import Mode
from trtconvert.attention.reference import tables_from_data
from trtconvert.bars import NoBar
from trtconvert.diffusion_model import InputSpec
from trtconvert.evaluate.verify import output_sqnr
from trtconvert.export.lowering.native import lower_to_native
from trtconvert.export.nodes.attention import attention_nodes
from trtconvert.models.denoiser import intercepted
from trtconvert.models.recorded_calls import relative_error as error
from trtconvert.quant.forward import Int8Layers, Int8Sites


class Heads(nn.Module):
    """Four heads of a size, with a projection on either side."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim
        self.qkv, self.out = nn.Linear(4 * dim, 12 * dim), nn.Linear(4 * dim, 4 * dim)

    def forward(self, x, timestep):
        q, k, v = (
            part.unflatten(-1, (4, self.dim)).transpose(1, 2)
            for part in self.qkv(x + timestep.view(-1, 1, 1) / 1000).chunk(3, -1)
        )
        return x + self.out(scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def model_of(dim: int):
    torch.manual_seed(0)
    shape = ("batch", 24, 4 * dim)
    return replace(
        tiny_models.build(),
        denoiser=Heads(dim).eval().requires_grad_(False),
        inputs=(InputSpec("x", "float32", shape), InputSpec("timestep", "float32", ("batch",))),
        output=InputSpec("prediction", "float32", shape),
    )


@pytest.mark.parametrize(("dim", "taken"), [(8, 32), (44, 48)])
def test_a_graph_with_filled_heads_computes_what_the_model_does(dim, taken):
    model = model_of(dim)
    graph = tiny_models.traced(model)
    (node,) = attention_nodes(graph).values()
    assert node.outputs[0].shape[-1] == taken
    assert node.attributes["softmax_scale"].as_float() == pytest.approx(dim**-0.5)
    inputs = model.example(5, {"batch": 3})

    def int8(call):
        tables = tables_from_data(call.q, call.k, call.v, Mode.BALANCED)
        return reference.attention(call.q, call.k, call.v, call.timestep, tables, softmax_scale=call.scale)

    with torch.no_grad():
        exact, close = model.denoiser(**inputs), intercepted(model, int8)(**inputs)
    got = run(graph, {name: x.numpy() for name, x in inputs.items()})
    assert error(got, exact) < 0.05 and error(close, exact) < 0.05

    lower_to_native(graph)
    assert not {"Pad", "Int8Attention"} & {node.op_type for node in graph.graph}
    got = run(graph, {name: x.numpy() for name, x in inputs.items()})
    assert error(got, exact) < tolerances.WHOLE_DENOISER


def test_the_noise_of_filled_heads_is_measured_in_the_models_own_channels():
    shape, tables, seen = (24, 4 * 44), {}, []

    def draw(denoiser, seeds, *, steps, solver):
        noise = torch.stack([torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for seed in seeds])
        return denoiser(noise, torch.full((len(seeds),), 300.0))

    model = replace(model_of(44), sample=draw)

    def observe(call):
        tables[call.name] = tables_from_data(call.q, call.k, call.v, Mode.BALANCED)
        sites = Int8Sites(tables, model.timestep_max, "calibrated", True)
        exact = call.exact()
        noise = sites.attention(call)[..., :44] - exact
        seen.append(20 * float(torch.log10(exact.norm() / noise.norm())))
        return exact

    with torch.no_grad():
        draw(intercepted(model, observe), [0, 1], steps=1, solver="ddim")
    sites = Int8Sites(tables, model.timestep_max, "calibrated", True)
    measured, _ = output_sqnr(model, sites, Int8Layers({}, model.timestep_max), 1, 0, 2, NoBar())
    assert measured == {name: [pytest.approx(seen[0], abs=0.01)] for name in tables} and seen[0] > 20
