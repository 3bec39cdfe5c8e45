"""What attention and layers cost in each mode, from the kernels' measured times."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from trtconvert.attention.modes import MEASURED_SCALES, Mode
from trtconvert.attention.reference import TILE
from trtconvert.attention.sites import Site
from trtconvert.calib.identity import KERNEL_COST
from trtconvert.documents import read_json
from trtconvert.errors import UserError, first_problem, kind_and_first_line
from trtconvert.linear import convs
from trtconvert.linear.modes import LayerMode
from trtconvert.linear.sites import Layer, flops

ALWAYS_MEASURED = tuple(mode for mode in Mode if mode != Mode.FP8)
"""Modes whose times every table holds. FP8 came later: tables that were made before serve plans without it."""


SAME_TIME = 1.02
"""Times that differ by less are the same: two runs on one GPU differ by as much."""


@dataclass(frozen=True)
class AttentionShape:
    """Sizes of one attention call."""

    batch: int
    heads: int
    query_tokens: int
    key_tokens: int
    head_dim: int

    @staticmethod
    def of(site: Site, batch: int) -> AttentionShape:
        """Of a site's call with so many samples."""
        return AttentionShape(batch * site.folds, site.heads, site.query_tokens, site.key_tokens, site.head_dim)

    @property
    def flops(self) -> float:
        """Operations of both products."""
        return 4.0 * self.batch * self.heads * self.query_tokens * self.key_tokens * self.head_dim

    @property
    def to_prompt(self) -> bool:
        """Whether many queries attend to few keys, as an image to its text. A kernel of its own does that."""
        return self.key_tokens <= TILE < self.query_tokens


_Size = Annotated[int, Field(ge=1, lt=2**31, strict=True)]
_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False, strict=True)]
_AttentionSizes = tuple[_Size, _Size, _Size, _Size, _Size]


class _Entry(BaseModel):
    model_config = ConfigDict(frozen=True)


class _TimedAttention(_Entry):
    """Sizes as in `AttentionShape`."""

    mode: Mode
    shape: _AttentionSizes
    seconds: _Positive
    scaling: Literal["dynamic", "calibrated"] = "dynamic"


class _TimedMask(_Entry):
    """The ratio is of the time without a mask."""

    mode: Mode
    shape: _AttentionSizes
    density: Annotated[_Positive, Field(le=1)]
    ratio: _Positive


class _TimedLayer(_Entry):
    """Rows, output and input channels."""

    mode: LayerMode
    shape: tuple[_Size, _Size, _Size]
    seconds: _Positive


class _TimedConv(_Entry):
    """Batch, height, width, input and output channels, window."""

    mode: LayerMode
    shape: tuple[_Size, _Size, _Size, _Size, _Size, _Size]
    seconds: _Positive


class _Table(_Entry):
    """What `trtconvert measure` writes; earlier versions had fewer lists."""

    gpu: str
    date: str
    rows: tuple[_TimedAttention, ...]
    bandwidth: _Positive | None = None
    masked: tuple[_TimedMask, ...] = ()
    layers: tuple[_TimedLayer, ...] = ()
    convs: tuple[_TimedConv, ...] = ()


_Row = tuple[AttentionShape, Mode, float]
"""Shape, mode and seconds of a call."""

_MaskedRow = tuple[AttentionShape, Mode, float, float]
"""Shape, mode, share of blocks of a call with a block mask, and its time in terms of that without one."""


class KernelCost:
    """Times of the measured GPU, interpolated over the amount of work at the nearest head size; of attention to prompts over
    such alone, where they were measured. Scales of queries and keys are measured (`dynamic`) unless a row says otherwise.

    Attributes:
        gpu, date: where and when they were measured.
    """

    def __init__(self, document: Any) -> None:
        """
        Args:
            document: as JSON gives it.
        Raises:
            ValidationError: it is no table of times.
        """
        table = _Table.model_validate(document)
        self.gpu, self.date = table.gpu, table.date
        self._rows: list[_Row] = []
        self._calibrated: list[_Row] = []
        for row in table.rows:
            rows = self._calibrated if row.scaling == "calibrated" else self._rows
            rows.append((AttentionShape(*row.shape), row.mode, row.seconds))
        self._bandwidth = table.bandwidth
        self._masked: list[_MaskedRow] = [
            (AttentionShape(*row.shape), row.mode, row.density, row.ratio) for row in table.masked
        ]
        self._layers = [(2.0 * math.prod(row.shape), row.mode, row.seconds) for row in table.layers]
        self._convs = [(_conv_flops(*row.shape), row.mode, row.seconds) for row in table.convs]

    @staticmethod
    def load(
        path: Path | None = None,
        candidates: Collection[Mode] = (),
        layer_candidates: Collection[LayerMode] = (),
        *,
        masks: bool = False,
        caches: bool = False,
        of_convs: bool = False,
    ) -> KernelCost:
        """Times that `trtconvert measure` wrote, or those that come with the program.

        Args:
            candidates: what the plan may choose; the times of these must be there, beside those of `ALWAYS_MEASURED`.
            layer_candidates: likewise of layers, 16 bits among them.
            masks: whether the plan may choose block masks, of which there must be times too; caches: likewise layers that
                quantise deltas, whose caches are priced by the memory's bandwidth; of_convs: likewise convolutions.
        Raises:
            UserError: not such a file, or one that lacks a mode at some head size, or of layers, or block masks, or bandwidth,
                or convolutions.
        """
        path = path or KERNEL_COST
        try:
            cost = KernelCost(read_json(path))
            if lacking := cost._lacking():
                raise ValueError(lacking)
        except (OSError, ValueError) as error:
            raise UserError(
                f"{path} does not hold times of the kernels",
                expected="a JSON file that `trtconvert measure` wrote: gpu, date, and rows of shape, mode and seconds",
                got=first_problem(error) if isinstance(error, ValidationError) else kind_and_first_line(error),
                remedy="measure again on the GPU that the plan is for, or remove plan.kernel_cost",
            ) from error

        def refuse(what: str, expected: str, got: str, otherwise: str) -> NoReturn:
            raise UserError(
                f"{path} cannot price {what}",
                expected=expected,
                got=f"{got}, measured {cost.date} on an {cost.gpu}",
                remedy="run `trtconvert measure` on the GPU that the plan is for and give its file to plan.kernel_cost, or "
                + otherwise,
            )

        if lacking := cost._lacking(candidates):
            expected = "times of every mode among plan.candidates"
            refuse("a mode that the plan may choose", expected, lacking, "take the mode out of plan.candidates")
        of_layers = {mode for _, mode, _ in cost._layers}
        if unknown := [mode.name.lower() for mode in sorted(layer_candidates) if mode not in of_layers]:
            expected = "times of layers in 16 bits (exact) and in every mode among plan.layer_candidates"
            otherwise = "state layers.modes (off leaves layers in 16 bits)"
            refuse("the layers that the plan may choose", expected, f"none of layers {', '.join(unknown)}", otherwise)
        if of_convs and not any(mode == LayerMode.EXACT for _, mode, _ in cost._convs):
            expected = "times of convolutions behind group norms, in 16 bits (exact) and in INT8"
            otherwise = "leave convolutions out (layers.kinds: [linear], and layers.include without their names), or "
            otherwise += "state layers.modes"
            refuse("the convolutions that the plan may convert", expected, "none in 16 bits", otherwise)
        if masks and not cost._masked:
            expected = "times of attention with block masks"
            refuse("the block masks of attention.sparse", expected, "none", "set attention.sparse to off")
        if caches and cost._bandwidth is None:
            expected = "the bandwidth of the GPU's memory"
            refuse("the caches of layers.modiff: auto", expected, "none", "set layers.modiff to true or false")
        return cost

    def _lacking(self, modes: Collection[Mode] = ALWAYS_MEASURED) -> str:
        """What a table must have for some modes and this one has not; empty if nothing."""
        if not self._rows:
            return "no rows"
        for size, prompt in sorted({(shape.head_dim, shape.to_prompt) for shape, _, _ in self._rows}):
            here = {mode for shape, mode, _ in self._rows if (shape.head_dim, shape.to_prompt) == (size, prompt)}
            if missing := [mode.name.lower() for mode in sorted(modes) if mode not in here]:
                return f"no times of {', '.join(missing)} at head size {size}{' to prompts' if prompt else ''}"
        return ""

    def seconds(self, shape: AttentionShape, mode: Mode, scaling: str = "dynamic") -> float:
        """Time of one call, see `_interpolated`. Infinite for a mode that was not measured; where calibrated scales were not,
        that of measured ones."""
        if scaling == "calibrated" and (points := _points(self._calibrated, shape, mode)):
            return _interpolated(shape.flops, points)
        points = _points(self._rows, shape, mode)
        return _interpolated(shape.flops, points) if points else math.inf

    def scaling(self, shape: AttentionShape, modes: Collection[Mode]) -> str:
        """`calibrated` where measured scales make one of the modes slower, by more than times differ between runs; else, and
        where nobody has measured, `dynamic`, which is closer on inputs unlike the calibration's."""
        for mode in MEASURED_SCALES:
            points = _points(self._calibrated, shape, mode)
            if mode in modes and points and self.seconds(shape, mode) > SAME_TIME * _interpolated(shape.flops, points):
                return "calibrated"
        return "dynamic"

    def masked_ratio(self, shape: AttentionShape, mode: Mode, density: float) -> float:
        """Time of a call that goes through a share of the blocks by a mask, in terms of that without one: above 1 where the mask
        leaves few out. Linear between the densities that were measured at the nearest head size and work; of a mode that was
        not measured with masks, as in `BALANCED`.

        Args:
            density: share of the blocks, more than 0.
        """
        rows = [row for row in self._masked if row[1] == mode] or [
            row for row in self._masked if row[1] == Mode.BALANCED
        ]
        if not rows:
            return math.inf
        size = min({m.head_dim for m, *_ in rows}, key=lambda size: (abs(size - shape.head_dim), size))
        rows = [row for row in rows if row[0].head_dim == size]
        work = min({m.flops for m, *_ in rows}, key=lambda work: abs(math.log(work / shape.flops)))
        points = sorted((d, ratio) for m, _, d, ratio in rows if m.flops == work)
        least, of_least = points[0]
        if density >= least:
            measured, ratios = (np.array(column) for column in zip(*points, strict=True))
            return float(np.interp(density, measured, ratios))
        # Below, the line through the two sparsest, and never less than their share of the blocks.
        slope = (points[1][1] - of_least) / (points[1][0] - least) if len(points) > 1 else math.inf
        return max(of_least - slope * (least - density), of_least * density / least)

    def layer_seconds(self, layer: Layer, batch: int, mode: LayerMode) -> float:
        """Time of one call of a layer, its activations' quantisation inside. Interpolated as attention's is; infinite for
        a mode that was not measured. Of convolutions with the group norm in front: those that engines leave in 16 bits, see
        `convs.left`, take the time of these in all modes, and so do all where there is no kernel for INT8."""
        rows = self._layers
        if layer.kind == "conv":
            rows = self._convs
            measured = mode == LayerMode.STATIC and any(kind == mode for _, kind, _ in rows)
            if not measured or convs.left(layer, batch):
                mode = LayerMode.EXACT
        points = sorted((work, t) for work, kind, t in rows if kind == mode)
        if not points:
            return math.inf
        return _interpolated(flops(layer, batch), points)

    def modulated_seconds(self, layer: Layer, batch: int, bytes_each: int) -> float:
        """Time of one call of a layer that quantises deltas: of its static mode, and of reading and writing its caches, one
        number for each that it reads and gives. Infinite where nobody knows.

        Args:
            bytes_each: of a number in a cache.
        """
        if self._bandwidth is None:
            return math.inf
        numbers = batch * layer.rows * (layer.in_channels + layer.out_channels)
        return self.layer_seconds(layer, batch, LayerMode.STATIC) + 2 * numbers * bytes_each / self._bandwidth


def _conv_flops(batch: int, height: int, width: int, in_channels: int, out_channels: int, kernel: int) -> float:
    """Operations of a convolution whose result is as large as its image."""
    return 2.0 * batch * height * width * in_channels * out_channels * kernel**2


def _points(rows: Sequence[_Row], shape: AttentionShape, mode: Mode) -> list[tuple[float, float]]:
    """Work and time of the rows that tell most of a call in a mode."""
    rows = [row for row in rows if row[0].to_prompt == shape.to_prompt] or rows
    nearest = min({m.head_dim for m, _, _ in rows}, key=lambda size: (abs(size - shape.head_dim), size), default=0)
    return sorted((m.flops, t) for m, kind, t in rows if m.head_dim == nearest and kind == mode)


def _interpolated(work: float, points: Sequence[tuple[float, float]]) -> float:
    """Linear in the logarithms of work and time between measured points (work, time); beyond them, the work's share of the
    largest point, or the smallest point's time, which is launch and latency."""
    measured, times = (np.array(column) for column in zip(*points, strict=True))
    inside = float(np.exp(np.interp(np.log(work), np.log(measured), np.log(times))))
    return inside * max(1.0, work / measured[-1])
