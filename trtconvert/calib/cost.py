"""What attention costs in each mode, from the kernels' measured times."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trtconvert.attention.modes import Mode

TABLE = "kernel_cost.json"
"""The GPU, the date, and rows of shape (batch, heads, query tokens, key tokens, head size), mode, and seconds of a call with
its quantisation."""


@dataclass(frozen=True)
class AttentionShape:
    """Sizes of one attention call."""

    batch: int
    heads: int
    query_tokens: int
    key_tokens: int
    head_dim: int

    @property
    def flops(self) -> float:
        """Operations of both products."""
        return 4.0 * self.batch * self.heads * self.query_tokens * self.key_tokens * self.head_dim


class KernelCost:
    """Times of the measured GPU, interpolated over the amount of work at the nearest head size.

    Attributes:
        gpu, date: where and when they were measured.
    """

    def __init__(self, table: dict[str, Any]) -> None:
        self.gpu: str = table["gpu"]
        self.date: str = table["date"]
        self._rows = [
            (AttentionShape(*row["shape"]), Mode(row["mode"]), float(row["seconds"])) for row in table["rows"]
        ]

    @staticmethod
    def shipped() -> KernelCost:
        """The times measured for this release."""
        return KernelCost(json.loads(files("trtconvert.calib").joinpath(TABLE).read_text()))

    def seconds(self, shape: AttentionShape, mode: Mode) -> float:
        """Time of one call. Linear in the logarithms of work and time between measured points; beyond them, the work's
        share of the largest point, or the smallest point's time, which is launch and latency."""
        sizes = sorted({measured.head_dim for measured, _, _ in self._rows})
        nearest = min(sizes, key=lambda size: abs(size - shape.head_dim))
        points = sorted((m.flops, t) for m, kind, t in self._rows if m.head_dim == nearest and kind == mode)
        work, times = (np.array(column) for column in zip(*points, strict=True))
        inside = float(np.exp(np.interp(np.log(shape.flops), np.log(work), np.log(times))))
        return inside * max(1.0, shape.flops / work[-1])

    def table(self, shapes: Sequence[AttentionShape]) -> Tensor:
        """[len(shapes), 4] seconds in each mode."""
        return torch.tensor([[self.seconds(shape, mode) for mode in Mode] for shape in shapes], dtype=torch.float64)
