"""Layers whose weights a forward computes from other weights."""

from __future__ import annotations

from dataclasses import replace

import tiny_models
import torch
from layered_graphs import int8_model, run
from tiny_layers import model_of, random
from torch import Tensor, nn
from torch.nn import functional

from trtconvert.calib.calibrate import parts_to_convert
from trtconvert.linear.sites import model_tensors
from trtconvert.models.computed_weights import keep_computed_weights
from trtconvert.models.recorded_calls import relative_error
from trtconvert.recipe import AttentionSection, LayersSection

WIDTH, HEADS = 64, 2


class Normalised(nn.Module):
    """A layer of EDM2: its weight has rows of one length."""

    def __init__(self, inputs: int, outputs: int, *kernel: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(random(outputs, inputs, *kernel, seed=outputs))
        self.gain = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        weight = functional.normalize(self.weight.flatten(1), dim=1).view_as(self.weight) * self.gain
        return functional.linear(x, weight) if weight.dim() == 2 else functional.conv1d(x, weight, padding="same")


class Joined(nn.Linear):
    """A layer whose bias lacks that of the keys, as in Swin V2 and BEiT, and of which some rows serve in a second call."""

    def forward(self, x: Tensor) -> Tensor:
        query, _, value = self.bias.chunk(3)
        bias = torch.cat((query, torch.zeros_like(query), value))
        return functional.linear(x, self.weight, bias) + functional.linear(x, self.weight[: 3 * WIDTH])


class Scaled(nn.Linear):
    """A layer whose weight follows the input, which is none."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight * x.mean())


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Linear(32, WIDTH), nn.Linear(WIDTH, 32)
        self.mixed, self.conv = Normalised(WIDTH, WIDTH), Normalised(WIDTH, WIDTH, 3)
        self.qkv, self.scaled = Joined(WIDTH, 3 * WIDTH), Scaled(WIDTH, WIDTH)

    def forward(self, x: Tensor, timestep: Tensor) -> Tensor:
        h = self.mixed(self.embed(x))
        h = h + self.conv(h.mT).mT
        q, k, v = self.qkv(h).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        h = h + functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.out(h + self.scaled(h))


def test_layers_with_computed_weights_are_int8_layers():
    torch.manual_seed(0)
    model = model_of(Block(), ("batch", 16, 32))
    before, inputs = set(model.denoiser.state_dict()), model.example(0, {"batch": 2})
    expected = model.denoiser(**inputs)
    keep_computed_weights(model)
    assert set(model.denoiser.state_dict()) == before and torch.equal(model.denoiser(**inputs), expected)
    kept = {name for name in model_tensors(model.denoiser) if "computed" in name}
    assert {name.partition(".")[0] for name in kept} == {"mixed", "conv", "qkv"} and len(kept) == 3
    made = int8_model(model, include=["*", "conv"], attention=True)
    assert {"mixed", "conv", "qkv", "qkv#2"} <= made.layers.keys() and "scaled" not in made.layers
    assert relative_error(made.torch(**inputs), expected) < 0.05
    for dtype in (torch.float32, torch.float16):
        got = run(made.graph(dtype), **made.example(dtype))
        assert relative_error(got, made.torch(**made.example())) < 0.01


class Changed(nn.Linear):
    """A layer whose weight is changed in place, and differs from call to call."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight * 1
        weight[0] += torch.rand(())
        return functional.linear(x, weight)


def test_weights_that_differ_from_call_to_call_are_none_of_a_layer():
    class Mixed(Block):
        def __init__(self) -> None:
            super().__init__()
            self.mixed = Changed(WIDTH, WIDTH)

    model = model_of(Mixed(), ("batch", 16, 32))
    keep_computed_weights(model)
    layers = {layer.name for layer in parts_to_convert(model, AttentionSection(), LayersSection(min_rows=1)).layers}
    assert "qkv" in layers and "mixed" not in layers


def test_models_that_need_numbers_stay_as_they_are():
    class Deciding(tiny_models.Tiny):
        def forward(self, x: Tensor, timestep: Tensor) -> Tensor:
            return super().forward(x, timestep) if float(x.sum()) > 0 else x

    model = replace(tiny_models.build(), denoiser=Deciding())
    before = set(model_tensors(model.denoiser))
    keep_computed_weights(model)
    assert set(model_tensors(model.denoiser)) == before
