"""Tiny denoisers and trajectories for the tests of modulated models."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trtconvert.modiff.qdiff import RecordedCall

STEPS = 12


class Block(nn.Module):
    """A residual block with a linear layer between two convolutions."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.mix = nn.Linear(outputs, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.shortcut = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        h = F.silu(self.conv1(F.silu(x)) + condition[:, :, None, None])
        h = self.mix(h.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return self.shortcut(x) + self.conv2(F.silu(h))


class TinyUNet(nn.Module):
    """Two blocks. The second reads the output of the first, concatenated with its input times ten."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(1, 16)
        self.enter = nn.Conv2d(3, 16, 3, padding=1)
        self.blocks = nn.ModuleList([Block(16, 16), Block(32, 16)])
        self.leave = nn.Conv2d(16, 3, 3, padding=1)

    def forward(self, x: Tensor, timestep: Tensor) -> Tensor:
        condition = F.silu(self.embed(timestep[:, None].to(x.dtype) / 1000))
        h = self.enter(x)
        first = self.blocks[0](h, condition)
        return self.leave(self.blocks[1](torch.cat([first, 10 * h], 1), condition))


def tiny() -> TinyUNet:
    torch.manual_seed(0)
    return TinyUNet().eval().requires_grad_(False)


def trajectory(samples: int = 2, seed: int = 0, size: int = 8, steps: int = STEPS) -> list[RecordedCall]:
    """Recorded calls from noise to other noise, for any model."""
    generator = torch.Generator().manual_seed(seed)
    clean, noise = (torch.randn(samples, 3, size, size, generator=generator) for _ in range(2))
    shares = torch.linspace(0.95, 0.05, steps)
    return [
        RecordedCall((clean * (1 - share) + noise * share, torch.full((samples,), float(1000 * share))))
        for share in shares
    ]


def mean_error(model: nn.Module, quantised: nn.Module, calls: list[RecordedCall]) -> float:
    """The mean relative error of a trajectory without its first step."""
    errors = []
    for call in calls:
        wanted = model(*call.args)
        errors.append(float((quantised(*call.args) - wanted).norm() / wanted.norm()))
    return sum(errors[1:]) / len(errors[1:])
