"""Prices of attention and layers in each mode, from measured times of the kernels."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from trtconvert.attention.modes import MEASURED_SCALES, Mode
from trtconvert.attention.reference import TILE
from trtconvert.attention.sites import Site
from trtconvert.calib.identity import KERNEL_COST
from trtconvert.documents import read_json
from trtconvert.errors import UserError, first_problem
from trtconvert.linear import beside_plugins, convs
from trtconvert.linear.modes import INT8_PRODUCTS, LayerMode
from trtconvert.linear.sites import Layer, flops

ALWAYS_MEASURED = tuple(mode for mode in Mode if mode != Mode.FP8)
"""Modes that every table has times of. FP8 is newer: older tables serve plans without it."""

SAME_TIME = 1.02
"""Times within this ratio are equal: two runs on one GPU differ as much."""


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
        """Returns the shape of a site's call with a batch of samples."""
        return AttentionShape(batch * site.folds, site.heads, site.query_tokens, site.key_tokens, site.head_dim)

    @property
    def flops(self) -> float:
        """Operations of both products."""
        return 4.0 * self.batch * self.heads * self.query_tokens * self.key_tokens * self.head_dim

    @property
    def to_prompt(self) -> bool:
        """True if many queries attend to few keys, as an image to its text; such calls have a kernel of their own."""
        return self.key_tokens <= TILE < self.query_tokens


_Size = Annotated[int, Field(ge=1, lt=2**31, strict=True)]
_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False, strict=True)]
_AttentionSizes = tuple[_Size, _Size, _Size, _Size, _Size]


class _Entry(BaseModel):
    model_config = ConfigDict(frozen=True)


class _TimedAttention(_Entry):
    """Attention; sizes as in `AttentionShape`."""

    mode: Mode
    shape: _AttentionSizes
    seconds: _Positive
    scaling: Literal["dynamic", "calibrated"] = "dynamic"


class _TimedMask(_Entry):
    """Attention with a block mask; ratio: to the time without a mask."""

    mode: Mode
    shape: _AttentionSizes
    density: Annotated[_Positive, Field(le=1)]
    ratio: _Positive


class _TimedLayer(_Entry):
    """Layer; shape: rows, output channels, input channels."""

    mode: LayerMode
    shape: tuple[_Size, _Size, _Size]
    seconds: _Positive


class _TimedConv(_Entry):
    """Convolution; shape: batch, height, width, input channels, output channels, kernel size."""

    mode: LayerMode
    shape: tuple[_Size, _Size, _Size, _Size, _Size, _Size]
    seconds: _Positive


class _Table(_Entry):
    """Output of `trtconvert measure`; earlier versions had fewer lists."""

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
"""Shape, mode, density of the block mask, and time relative to that without a mask."""


class KernelCost:
    """Times of the measured GPU, interpolated over the amount of work at the nearest head size. Attention to prompts is
    interpolated over attention to prompts only, if that was measured. Scales of queries and keys are measured (`dynamic`) unless
    a row says otherwise.

    Attributes:
        gpu, date: of the measurement.
    """

    def __init__(self, document: Any) -> None:
        """Reads a JSON document; ValidationError if it is not a table of times."""
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
        """Loads a file of `trtconvert measure`, or the times that come with the program.

        Args:
            candidates: modes that the plan may choose; their times are required beside those of `ALWAYS_MEASURED`.
            layer_candidates: the same for layers, including 16 bits.
            masks: the plan may choose block masks; their times are required.
            caches: the plan may choose layers that quantise deltas; the memory's bandwidth prices their caches.
            of_convs: the plan may choose convolutions; their times are required.
        Raises:
            UserError: the file is not a table of times, or lacks times that are required.
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
                got=first_problem(error),
                remedy="run `trtconvert measure` on the GPU that the plan is for, or remove plan.kernel_cost",
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
            otherwise = "set layers.modes to one mode (off leaves layers in 16 bits)"
            refuse(
                "the layers that the plan may choose", expected, f"no times of layers {', '.join(unknown)}", otherwise
            )
        if of_convs and not any(mode == LayerMode.EXACT for _, mode, _ in cost._convs):
            expected = "times of convolutions after group norms, in 16 bits (exact) and in INT8"
            otherwise = "exclude convolutions (layers.kinds: [linear], and layers.include without their names), or "
            otherwise += "set layers.modes to one mode"
            refuse("the convolutions that the plan may convert", expected, "none in 16 bits", otherwise)
        if masks and not cost._masked:
            expected = "times of attention with block masks"
            refuse("the block masks of attention.sparse", expected, "none", "set attention.sparse to off")
        if caches and cost._bandwidth is None:
            expected = "the bandwidth of the GPU's memory"
            refuse("the caches of layers.modiff: auto", expected, "none", "set layers.modiff to true or false")
        return cost

    def prices(self, mode: Mode) -> bool:
        """Returns whether a plan may choose the mode: its times are known at every head size."""
        return not self._lacking([mode])

    def _lacking(self, modes: Collection[Mode] = ALWAYS_MEASURED) -> str:
        """Returns what the table lacks for some modes; empty if nothing."""
        if not self._rows:
            return "no rows"
        for size, prompt in sorted({(shape.head_dim, shape.to_prompt) for shape, _, _ in self._rows}):
            here = {mode for shape, mode, _ in self._rows if (shape.head_dim, shape.to_prompt) == (size, prompt)}
            if missing := [mode.name.lower() for mode in sorted(modes) if mode not in here]:
                return f"no times of {', '.join(missing)} at head size {size}{' to prompts' if prompt else ''}"
        return ""

    def seconds(self, shape: AttentionShape, mode: Mode, scaling: str = "dynamic") -> float:
        """Returns the time of one call, see `_interpolated`: infinite for a mode that was not measured; the time with measured
        scales if the time with calibrated scales is unknown."""
        if scaling == "calibrated" and (points := _points(self._calibrated, shape, mode)):
            return _interpolated(shape.flops, points)
        points = _points(self._rows, shape, mode)
        return _interpolated(shape.flops, points) if points else math.inf

    def scaling(self, shape: AttentionShape, modes: Collection[Mode]) -> str:
        """Returns `calibrated` if measured scales make one of the modes slower by more than `SAME_TIME`. Otherwise, also if times
        are unknown, returns `dynamic`, which is closer on inputs unlike the calibration's."""
        for mode in MEASURED_SCALES:
            points = _points(self._calibrated, shape, mode)
            if mode in modes and points and self.seconds(shape, mode) > SAME_TIME * _interpolated(shape.flops, points):
                return "calibrated"
        return "dynamic"

    def masked_ratio(self, shape: AttentionShape, mode: Mode, density: float) -> float:
        """Returns the time of a call with a block mask relative to the time without: above 1 if the mask skips few blocks.

        Linear between the measured densities at the nearest head size and work; a mode without measured masks takes those of
        `BALANCED`.

        Args:
            density: share of the computed blocks, more than 0.
        """
        rows = [row for row in self._masked if row[1] == mode]
        rows = rows or [row for row in self._masked if row[1] == Mode.BALANCED]
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
        # Below the sparsest density: the line through the two sparsest, but at least proportional to the density.
        slope = (points[1][1] - of_least) / (points[1][0] - least) if len(points) > 1 else math.inf
        return max(of_least - slope * (least - density), of_least * density / least)

    def layer_seconds(self, layer: Layer, batch: int, mode: LayerMode) -> float:
        """Returns the time of one call of a layer, including the quantisation of its activations. Interpolated like attention;
        infinite for a mode that was not measured. Convolutions include the group norm before them; convolutions without an INT8
        kernel, and those that engines leave in 16 bits (see `convs.left`), take the 16-bit time in all modes. Linear layers
        beside plugins take the 16-bit time less what their INT8 product saves in an engine, where a norm or GEGLU quantises the
        rows. Other linear layers take the measured time, without the kernel that quantises rows where TensorRT fuses it into the
        operator that computes the rows: behind anything but attention, for many rows. Layers of few rows take the time of reading
        their weights.
        """
        if layer.weight_only:
            bytes_each = 1 if mode == LayerMode.WEIGHT_ONLY else 2
            read = bytes_each * layer.in_channels * layer.out_channels
            return read / (_FEW_ROWS_SHARE * (self._bandwidth or _USUAL_BANDWIDTH))
        rows = self._layers
        if mode in INT8_PRODUCTS and self.is_beside_plugins(layer):
            exact = self.layer_seconds(layer, batch, LayerMode.EXACT)
            return max(exact - 1e-6 * _saved_us(layer, batch, mode), exact / _MOST_GAIN)
        if layer.kind == "conv":
            rows = self._convs
            measured = mode == LayerMode.STATIC and any(kind == mode for _, kind, _ in rows)
            if not measured or convs.left(layer, batch):
                mode = LayerMode.EXACT
        points = sorted((work, t) for work, kind, t in rows if kind == mode)
        if not points:
            return math.inf
        seconds = _interpolated(flops(layer, batch), points)
        by_rows = layer.kind == "linear" and mode in INT8_PRODUCTS and batch * layer.rows >= beside_plugins.FEWEST_ROWS
        if by_rows and not layer.behind_attention:
            exact = self.layer_seconds(layer, batch, LayerMode.EXACT)
            apart = 1e-6 * beside_plugins.rows_apart_us(batch * layer.rows, layer.in_channels)
            return max(seconds - apart, min(seconds, exact / _MOST_GAIN))
        return seconds

    def is_beside_plugins(self, layer: Layer) -> bool:
        """Returns whether our plugins compute a linear layer in INT8 on the measured GPU, as in a U-Net on Hopper."""
        measured = {mode for _, mode, _ in self._layers}
        has_plugins = any(mode == LayerMode.STATIC for _, mode, _ in self._convs)
        return layer.beside_plugins and has_plugins and measured.issuperset(INT8_PRODUCTS)

    def modulated_seconds(self, layer: Layer, batch: int, bytes_each: int) -> float:
        """Returns the time of one call of a layer that quantises deltas: its static mode, and reading and writing its caches, one
        number of `bytes_each` for each element of input and output. Infinite if the bandwidth is unknown."""
        if self._bandwidth is None:
            return math.inf
        numbers = batch * layer.rows * (layer.in_channels + layer.out_channels)
        return self.layer_seconds(layer, batch, LayerMode.STATIC) + 2 * numbers * bytes_each / self._bandwidth


_USUAL_BANDWIDTH = 2e12
"""Bytes per second of a data centre's GPU, for tables without the bandwidth."""

_FEW_ROWS_SHARE = 0.25
"""Share of the bandwidth that products of few rows reach in engines. Engines compute the parts of a modulation one by one."""

_MOST_GAIN = 2.0
"""INT8 products do twice the operations of 16-bit products in a time."""


def _saved_us(layer: Layer, batch: int, mode: LayerMode) -> float:
    """Returns the µs that engines save with a linear layer in INT8 beside plugins, 0 if they leave the layer in 16 bits.

    GEGLU quantises rows with static scales alone: its kernel holds a part of a row.
    """
    rows, outputs, depth = batch * layer.rows, layer.out_channels, layer.in_channels
    if not beside_plugins.pays(rows, outputs, depth, normed=layer.normed, geglu=layer.geglu):
        return 0.0
    by_geglu = layer.gated and mode == LayerMode.STATIC
    apart = 0.0 if layer.normed or by_geglu else beside_plugins.rows_apart_us(rows, depth)
    return beside_plugins.saved_us(rows, outputs, depth) - apart


def _conv_flops(batch: int, height: int, width: int, in_channels: int, out_channels: int, kernel: int) -> float:
    """Operations of a convolution with an output as large as its input."""
    return 2.0 * batch * height * width * in_channels * out_channels * kernel**2


def _points(rows: Sequence[_Row], shape: AttentionShape, mode: Mode) -> list[tuple[float, float]]:
    """Returns (work, time) of the rows that are nearest to a call in a mode."""
    rows = [row for row in rows if row[0].to_prompt == shape.to_prompt] or rows
    nearest = min({m.head_dim for m, _, _ in rows}, key=lambda size: (abs(size - shape.head_dim), size), default=0)
    return sorted((m.flops, t) for m, kind, t in rows if m.head_dim == nearest and kind == mode)


def _interpolated(work: float, points: Sequence[tuple[float, float]]) -> float:
    """Interpolates linearly in the logarithms of work and time between measured points (work, time). Above the largest point
    time is proportional to work; below the smallest it is constant, as launch and latency dominate."""
    measured, times = (np.array(column) for column in zip(*points, strict=True))
    inside = float(np.exp(np.interp(np.log(work), np.log(measured), np.log(times))))
    return inside * max(1.0, work / measured[-1])
