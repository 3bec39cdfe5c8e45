"""Exports of models that take a range of sizes: they compute the same at any of them, or the build says that they do not."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from types import ModuleType

import pytest
import tiny_models
import torch
from layered_graphs import int8_model
from layered_graphs import run as run_graph
from support import refusal, run, tiny_recipe
from torch import Tensor, nn
from torch.nn.functional import pixel_shuffle, pixel_unshuffle, scaled_dot_product_attention

from trtconvert.diffusion_model import DiffusionModel, InputSpec
from trtconvert.errors import UserError
from trtconvert.models.recorded_calls import relative_error

WIDTH, HEADS = 64, 2


class Placed(nn.Module):
    """A transformer block over pixels with axial positions. stretched: whether wide images have larger ones."""

    def __init__(self, stretched: bool) -> None:
        super().__init__()
        self.stretched = stretched
        self.embed, self.qkv, self.out = nn.Linear(3, WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 1)
        generator = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=parameter[0].numel() ** -0.5, generator=generator)

    def forward(self, x: Tensor, timestep: Tensor) -> Tensor:
        """x [B, 1, H, W], timestep [B] → the same."""
        height, width = x.shape[2] // 2 * 2, x.shape[3]
        end = 4.0 if self.stretched and width > height else 1.0
        rows, columns = torch.linspace(-1, 1, height + 1)[1:], torch.linspace(-end, end, width)
        places = torch.stack(torch.meshgrid(rows, columns, indexing="ij"), -1).reshape(1, height * width, 2)
        tokens = torch.cat((x.flatten(2).mT, places.expand(x.shape[0], -1, -1)), -1)
        h = self.embed(tokens) + (timestep / 1000)[:, None, None]
        q, k, v = self.qkv(h).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        return self.out(h + scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)).mT.reshape(x.shape)


def build(stretched: bool = True) -> DiffusionModel:
    tiny, image = tiny_models.build(), ("batch", 1, "height", "width")
    return replace(
        tiny,
        denoiser=Placed(stretched).eval().requires_grad_(False),
        inputs=(InputSpec("x", "float32", image), tiny.inputs[1]),
        output=replace(tiny.output, shape=image),
        dims={"batch": (1, 2, 4), "height": (2, 4, 8), "width": (2, 4, 8)},
    )


def test_places_by_linspace_follow_the_size():
    made = int8_model(build(stretched=False), include=["qkv"], attention=True)
    graph = made.graph()
    for height, width in ((2, 2), (4, 4), (2, 8), (6, 3)):
        inputs = made.model.example(1, {"batch": 3, "height": height, "width": width})
        assert relative_error(run_graph(graph, **inputs), made.torch(**inputs)) < 1e-3


@pytest.mark.parametrize("width", [[2, 4, 8], 4])
def test_a_number_that_follows_the_size_is_told(tmp_path, monkeypatch, width):
    module = ModuleType("an_entry_point_of_sizes")
    module.build = build
    monkeypatch.setitem(sys.modules, module.__name__, module)
    recipe = tiny_recipe(
        tmp_path,
        model={"source": f"{module.__name__}:build"},
        engine={"backend": "onnxruntime", "shapes": {"width": width, "height": 4}},
        verify={"min_psnr": 20},
    )
    outcome = run("build", recipe, "-o", tmp_path / "bundle", "--cache", tmp_path / "cache")
    if width == 4:
        assert outcome.exit_code == 0, outcome.output
    else:
        refusal(outcome, "does not compute the same at all sizes", "width 8 a relative error", "engine.shapes")


@pytest.mark.parametrize(
    ("number", "told"),
    [
        (lambda height, width: math.sqrt(height * width), "height*width = 16"),
        (lambda height, width: int((height * width) ** 0.5), " = 4"),
    ],
    ids=["sqrt", "int"],
)
def test_an_export_with_a_constant_for_a_number_of_sizes_is_refused(number, told, monkeypatch):
    """On a GPU no engine runs at other sizes before the bundle is used."""
    of_pixels = Placed.forward
    monkeypatch.setattr(
        Placed, "forward", lambda self, x, timestep: of_pixels(self, x, timestep) * number(*x.shape[2:])
    )
    with pytest.raises(UserError, match="for one size only") as error:
        int8_model(build(stretched=False), include=["qkv"], attention=True).graph()
    assert told in str(error.value)
    fixed = replace(build(stretched=False), dims={"batch": (1, 2, 4), "height": (4, 4, 4), "width": (4, 4, 4)})
    made = int8_model(fixed, include=["qkv"], attention=True)
    inputs = made.model.example(1, {"batch": 3, "height": 4, "width": 4})
    assert relative_error(run_graph(made.graph(), **inputs), made.torch(**inputs)) < 1e-3


class Patches(nn.Module):
    """Attention over patches of 2 × 2 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.qkv, self.out = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor, timestep: Tensor) -> Tensor:
        """x [B, 1, H, W], timestep [B] → the same."""
        h = self.embed(pixel_unshuffle(x, 2).flatten(2).mT) + (timestep / 1000)[:, None, None]
        q, k, v = self.qkv(h).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        h = self.out(h + scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return pixel_shuffle(h.mT.unflatten(2, (x.shape[2] // 2, x.shape[3] // 2)), 2)


def test_images_as_high_as_their_channels_follow_the_size():
    """The patches of the usual size are 4 × 4, and have four channels."""
    torch.manual_seed(0)
    sizes = {"batch": (2, 2, 2), "height": (8, 8, 16), "width": (8, 8, 16)}
    made = int8_model(replace(build(), denoiser=Patches().eval(), dims=sizes), include=["qkv"], attention=True)
    graph = made.graph()
    for height, width in ((8, 8), (16, 8), (12, 16)):
        inputs = made.model.example(1, {"batch": 2, "height": height, "width": width})
        assert relative_error(run_graph(graph, **inputs), made.torch(**inputs)) < 1e-3
