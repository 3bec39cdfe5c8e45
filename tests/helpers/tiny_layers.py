"""Small models with linear layers and convolutions of every kind: `source: tiny_layers:build` in recipes of tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import tiny_models
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trtconvert.diffusion_model import InputSpec
from trtconvert.interception import InterceptedDenoiser
from trtconvert.linear.sites import Layer, LayerFinder, layer_hooks
from trtconvert.models import DiffusionModel
from trtconvert.weights.weight_files import read_tensors

WIDTH = 32

CHOSEN = ("conv", "q", "k", "v", "attended", "mlp.0", "mlp.2", "tied", "tied#2", "skip")
"""Layers of `Layered` that can be converted, in the order of their calls."""

WITH_CONV = ["*", "conv"]
"""Patterns of all of them: convolutions are taken where they are named."""

LEFT = ("conv_in", "time", "out")


class Called(nn.Module):
    """A denoiser that is a function of itself and x.

    Args:
        function: gets the module and x.
        parts: modules and parameters of it, by name.
    """

    def __init__(self, function: Callable[[Any, Tensor], Tensor], **parts: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self._function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor, timestep: Tensor) -> Tensor:
        return self._function(self, x)


def given(x: Tensor) -> dict[str, Tensor]:
    """The inputs of a denoiser, each sample with a timestep of its own."""
    return {"x": x, "timestep": torch.arange(1.0, 1 + len(x))}


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def layers_of(model: nn.Module, x: Tensor) -> list[Layer]:
    """What the finder finds in one forward."""
    finder, inputs = LayerFinder(model), given(x)
    with torch.no_grad():
        InterceptedDenoiser(model.eval(), inputs, "timestep", layer_hooks(finder))(*inputs.values())
    return finder.layers()


class Layered(nn.Module):
    """A convolution, attention with its projections, an MLP, a layer that is called twice, and one that reads two tensors
    beside each other, over 16 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.conv_in, self.conv = nn.Conv2d(1, WIDTH, 3, padding=1), nn.Conv2d(WIDTH, WIDTH, 3, padding=1)
        self.time = nn.Linear(WIDTH, WIDTH)
        self.q, self.k, self.v, self.attended = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.tied, self.skip = nn.Linear(WIDTH, WIDTH), nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, 1)
        generator = torch.Generator().manual_seed(0)
        for name, parameter in self.named_parameters():
            fan = parameter[0].numel() if parameter.dim() > 1 else 4 * len(parameter)
            nn.init.normal_(parameter, std=0.1 if name == "out.weight" else fan**-0.5, generator=generator)

    def forward(self, x: Tensor, timestep: Tensor) -> Tensor:
        """x [B, 1, 4, 4], timestep [B] → [B, 1, 4, 4]."""
        angles = timestep[:, None] / 1000 * torch.arange(WIDTH, device=x.device)
        image = self.conv(F.silu(self.conv_in(x)))
        tokens = image.flatten(2).transpose(1, 2) + self.time(angles.cos().to(x.dtype))[:, None]
        normed = F.layer_norm(tokens, (WIDTH,))
        q, k, v = (layer(normed)[:, None] for layer in (self.q, self.k, self.v))
        tokens = tokens + self.attended(F.scaled_dot_product_attention(q, k, v)[:, 0])
        before = tokens
        tokens = tokens + self.mlp(F.layer_norm(tokens, (WIDTH,)))
        tokens = tokens + self.tied(F.silu(self.tied(F.layer_norm(tokens, (WIDTH,)))))
        tokens = self.skip(torch.cat([tokens, before], -1))
        return x - self.out(tokens).transpose(1, 2).reshape(x.shape)


def build(denoiser: Callable[[], nn.Module] = Layered) -> DiffusionModel:
    """A model that knows nothing, which is enough: its INT8 samples are compared with its own."""
    return replace(tiny_models.build(), denoiser=denoiser().eval().requires_grad_(False))


def build_from(weights: Path) -> DiffusionModel:
    """The same with weights from a file, as it is read for every recipe."""
    model = build()
    model.denoiser.load_state_dict(read_tensors([weights]))
    return model


def model_of(denoiser: nn.Module, shape: tuple[int | str, ...], output: tuple[int | str, ...] = ()) -> DiffusionModel:
    """A module that takes x of some shape, whose first axis is "batch", and the timestep. It cannot be sampled."""
    return replace(
        tiny_models.build(),
        denoiser=denoiser.eval().requires_grad_(False),
        inputs=(InputSpec("x", "float32", shape), InputSpec("timestep", "float32", ("batch",))),
        output=InputSpec("prediction", "float32", output or shape),
    )


def build_overflowing() -> DiffusionModel:
    """Whose MLP leaves the range of numbers."""
    model = build()
    with torch.no_grad():
        model.denoiser.get_submodule("mlp.0").weight.mul_(3e38)
    return model
