"""A build of a model that calls attention, writes attention out, and writes attention out in a form that is not converted."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType

import tiny_models
import torch
from found_sites import sites_to_convert
from support import run, tiny_recipe
from torch import Tensor, nn
from torch.nn import functional

from trtconvert import runtime
from trtconvert.bundle import read_manifest
from trtconvert.diffusion_model import DiffusionModel
from trtconvert.interception import first_tensor
from trtconvert.models.recorded_calls import relative_error
from trtconvert.recipe import AttentionSection

WIDTH, HEADS = 64, 2


class Fused(nn.Module):
    """`scaled_dot_product_attention`."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Conv1d(WIDTH, 3 * WIDTH, 1), nn.Conv1d(WIDTH, WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, C, N] → [B, C, N]."""
        return x + self.out(self.attended(self.qkv(x)))

    def attended(self, qkv: Tensor) -> Tensor:
        q, k, v = qkv.unflatten(1, (3, HEADS, -1)).transpose(3, 4).unbind(1)
        return functional.scaled_dot_product_attention(q, k, v).transpose(2, 3).flatten(1, 2)


class Unfused(Fused):
    """guided-diffusion's `QKVAttention`."""

    def attended(self, qkv: Tensor) -> Tensor:
        samples, width, length = qkv.shape
        channels = width // (3 * HEADS)
        q, k, v = qkv.chunk(3, dim=1)
        scale = channels**-0.25
        weight = torch.einsum(
            "bct,bcs->bts",
            (q * scale).view(samples * HEADS, channels, length),
            (k * scale).view(samples * HEADS, channels, length),
        )
        weight = torch.softmax(weight.float(), dim=-1).type(weight.dtype)
        a = torch.einsum("bts,bcs->bct", weight, v.reshape(samples * HEADS, channels, length))
        return a.reshape(samples, -1, length)


class Talking(Fused):
    """Mixes the probabilities of heads."""

    def attended(self, qkv: Tensor) -> Tensor:
        q, k, v = qkv.unflatten(1, (3, HEADS, -1)).transpose(3, 4).unbind(1)
        weights = functional.conv2d((q @ k.mT / 8).softmax(-1), torch.full((HEADS, HEADS, 1, 1), 0.5).to(q))
        return (weights @ v).transpose(2, 3).flatten(1, 2)


class Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.embed, self.out = nn.Conv1d(1, WIDTH, 1), nn.Conv1d(WIDTH, 1, 1)
        self.fused, self.unfused, self.talking = Fused(), Unfused(), Talking()
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=parameter[0].numel() ** -0.5, generator=generator)

    def forward(self, x: Tensor, timestep: Tensor) -> Tensor:
        """x [B, 1, H, W], timestep [B] → the same."""
        h = self.embed(x.flatten(2)) + (timestep / 1000).to(x.dtype)[:, None, None]
        return self.out(self.talking(self.unfused(self.fused(h)))).reshape(x.shape)


class HeadsFirst(Fused):
    """Rows of the first head of all samples come first, then those of the second, …"""

    def attended(self, qkv: Tensor) -> Tensor:
        q, k, v = (torch.cat(x.unbind(1)) for x in qkv.unflatten(1, (3, HEADS, -1)).transpose(3, 4).unbind(1))
        return torch.cat(((q @ k.mT).softmax(-1) @ v).transpose(1, 2).unflatten(0, (HEADS, -1)).unbind(0), 1)


def build() -> DiffusionModel:
    tiny = tiny_models.build()
    image = ("batch", 1, "height", 4)
    return replace(
        tiny,
        denoiser=Denoiser().eval().requires_grad_(False),
        inputs=(replace(tiny.inputs[0], shape=image), tiny.inputs[1]),
        output=replace(tiny.output, shape=image),
        dims={"batch": (1, 2, 4), "height": (2, 4, 8)},
    )


def test_rows_of_one_sample_are_told_apart_by_those_of_two() -> None:
    model = build()
    model.denoiser.unfused = HeadsFirst()
    converted, left = sites_to_convert(replace(model, dims=model.dims | {"batch": (1, 1, 4)}), AttentionSection())
    assert [site.name for site in converted] == ["fused"]
    mixed = "heads of its samples do not lie side by side in its batch"
    assert left[0].name == "unfused" and left[0].obstacle == mixed


def test_attention_that_is_written_out_is_int8_beside_calls_of_it(tmp_path, monkeypatch):
    module = ModuleType("an_entry_point")
    module.build = build
    monkeypatch.setitem(sys.modules, "an_entry_point", module)
    recipe = tiny_recipe(
        tmp_path, model={"source": "an_entry_point:build"}, attention={"modes": "precision"}, verify={"min_psnr": 40}
    )
    outcome = run("build", recipe, "-o", tmp_path / "bundle", "--cache", tmp_path / "cache")
    assert outcome.exit_code == 0, outcome.output
    assert "3 found, 2 in INT8" in outcome.output
    sites = {site.name: site for site in read_manifest(tmp_path / "bundle").components["denoiser"].sites}
    reason = "conv2d stands between its softmax and the product with values"
    assert {name: site.reason for name, site in sites.items()} == {"fused": "", "unfused": "", "talking": reason}
    assert [(sites[name].heads, sites[name].head_dim) for name in ("fused", "unfused")] == [(HEADS, 32)] * 2
    model = build()
    with runtime.load(tmp_path / "bundle") as bundle, torch.no_grad():
        for batch, height in ((1, 4), (3, 6)):
            inputs = model.example(3, {"batch": batch, "height": height})
            error = relative_error(bundle["denoiser"](**inputs), first_tensor(model.denoiser(**inputs)))
            assert 1e-6 < error < 0.02
