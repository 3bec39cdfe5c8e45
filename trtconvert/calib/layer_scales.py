"""From observations of a layer to its INT8 tables: offsets and factors of channels, scales of activations, INT8 weights.

All choices minimise the squared error that rounding and clipping add to the layer's output,

    E = Σₖ ‖Wₖ‖² · E[eₖ²]  +  Σₖ E[x̂ₖ²] · ‖δWₖ‖²

where e is the error of x̂, δW the error of its weight, k an input channel. Rounding errors of different channels count as
independent, so that no product with the weights is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache

import torch
from torch import Tensor

from trtconvert.attention.ranges import nearest_bins
from trtconvert.calib.layer_observer import LayerRows
from trtconvert.linear.compensation import DIRECTIONS, Moments, compensated_weight, moments_of
from trtconvert.linear.reference import (
    LEVELS,
    LayerTables,
    is_quantised,
    layer_bias,
    layer_weight,
    quantise_weight,
    short_scale,
)
from trtconvert.linear.sites import Layer, model_tensors
from trtconvert.recipe import LayersSection

EXPONENTS = (0.25, 0.4, 0.5, 0.6, 0.75)
"""SmoothQuant's exponents α to try: x̂ = x · max|W|^(1−α) / max|x|^α; SmoothQuant's default is 0.5."""

CLIPS = tuple(1 - step / 20 for step in range(11))
"""Shares of the largest magnitude to try as limits of x̂."""

FACTOR_GAIN, OFFSET_GAIN = 0.9, 0.9
"""Factors and offsets must reduce the error to this share: before a fused product each costs one more operation per element."""

GELU_FACTOR_GAIN = 0.5
"""The same for factors behind a GELU: with them TensorRT takes another kernel for the product before the GELU, of nearly twice
the time."""

LEAST_DELTA = 2.0**-12
"""Least scale of deltas relative to the largest scale of whole activations: FP16 holds no finer steps of deltas, and no smaller
ratio of the two scales. Inputs that stay the same, such as a prompt's tokens, have this scale."""

MOST_NUMBERS = 2**25
"""Numbers per chunk when several limits are evaluated together: 128 MiB in FP32."""

_OF_ANY_SIGN = "x_offset", "directions"
"""Tensors of `LayerScales` that may hold negative numbers."""

WEIGHT_ROWS = 512
"""Number of output channels that estimate the error of weights during the choice of factors."""


@dataclass(frozen=True)
class LayerScales:
    """Calibrated scales of one input group, which all layers that read the same tensor share. K input channels, T timestep bins.

    Attributes:
        x_factor, x_offset, x_scale: as in `LayerTables`.
        change_scale: [T] scale of the deltas of x̂ from step to step, like x_scale; None if deltas were not observed.
        directions, remainder: `Moments` of x; None in older calibrations and with too few observed rows: weights are rounded
            to the nearest.
    """

    x_factor: Tensor
    x_offset: Tensor
    x_scale: Tensor
    change_scale: Tensor | None = None
    directions: Tensor | None = None
    remainder: Tensor | None = None

    @property
    def moments(self) -> Moments | None:
        """Second moments of x."""
        if self.directions is None or self.remainder is None:
            return None
        return Moments(self.directions, self.remainder)

    def rounded_to_nearest(self) -> LayerScales:
        """Returns the scales without second moments."""
        return replace(self, directions=None, remainder=None)

    def tensors(self) -> dict[str, Tensor]:
        """Returns the tensors that are present, by name."""
        return {name: x for name, x in vars(self).items() if x is not None}

    def flaw(self, channels: int, bins: int) -> str:
        """Returns why the scales cannot be used for an input with this many channels; empty if they can."""
        if (self.directions is None) != (self.remainder is None):
            return "one of directions and remainder without the other"
        shapes = {"x_factor": (channels,), "x_offset": (channels,), "x_scale": (bins,), "change_scale": (bins,)}
        if self.directions is not None:
            count = min(max(len(self.directions) if self.directions.dim() else 0, 1), DIRECTIONS)
            shapes |= {"directions": (count, channels), "remainder": (channels,)}
        for name, tensor in self.tensors().items():
            dtype, kind = (torch.float16, "FP16") if name == "directions" else (torch.float32, "FP32")
            if tensor.shape != shapes[name] or tensor.dtype != dtype:
                return f"{name} of {list(tensor.shape)} {tensor.dtype}, where {kind} {list(shapes[name])} is needed"
            if not tensor.isfinite().all() or (name not in _OF_ANY_SIGN and (tensor <= 0).any()):
                return f"NaN, Inf, or numbers that are not positive in {name}"
        if self.change_scale is not None and (self.change_scale < LEAST_DELTA * self.x_scale.max()).any():
            return f"numbers in change_scale below {LEAST_DELTA:g} of the largest x_scale"
        return ""


def by_input_group(layers: Iterable[Layer]) -> dict[str, list[Layer]]:
    """Returns the layers of each input group."""
    groups: dict[str, list[Layer]] = {}
    for layer in layers:
        groups.setdefault(layer.input_group, []).append(layer)
    return groups


def layer_tables(
    model: torch.nn.Module,
    layers: Sequence[Layer],
    scales: Mapping[str, LayerScales],
    modes: Mapping[str, Sequence[int] | Tensor],
    device: torch.device | None = None,
    computed_on: torch.device | None = None,
) -> dict[str, LayerTables]:
    """Returns the op's tables of layers by name. Tied layers with equal factors share one weight.

    Args:
        layers: layers to convert.
        scales: by input group.
        modes: modes of each layer by timestep bin.
        device: device of the tables; None: the device of the weights.
        computed_on: device that computes the tables, one layer after the other; None: `device`.
    """
    tensors = model_tensors(model)
    found: dict[str, LayerTables] = {}
    stored: dict[tuple[object, ...], tuple[Tensor, Tensor]] = {}
    for layer in layers:
        of_input = scales[layer.input_group]
        key = (layer.weight, of_input.x_factor.numpy().tobytes())
        own = layer.weight.of(tensors)
        there = device or own.device
        here = computed_on or there
        factor, offset = of_input.x_factor.to(here), of_input.x_offset.to(here)
        if key in stored:
            weight, scale = (x.to(here) for x in stored[key])
        else:
            wide, moments = own.to(here).float(), of_input.moments
            weight, scale = compensated_weight(wide, factor, moments) if moments else layer_weight(wide, factor)
        bias = None if layer.bias is None else layer.bias.of(tensors).to(here).float()
        bias = layer_bias(bias, weight, scale, factor, offset)
        if key not in stored:
            stored[key] = weight.to(there), scale.to(there)
        modes_of_layer = torch.as_tensor(modes[layer.name], dtype=torch.int32)
        rest = (bias, factor, offset, of_input.x_scale, modes_of_layer)
        found[layer.name] = LayerTables(*stored[key], *(x.to(there) for x in rest))
    return found


def modiff_patterns(section: LayersSection) -> list[str]:
    """Returns the patterns of the layers whose deltas are calibrated."""
    return section.modiff if isinstance(section.modiff, list) else ["*"] if section.modiff else []


def is_modulated(layer: Layer, section: LayersSection) -> bool:
    """True if a recipe quantises the deltas of a layer's input from step to step (MoDiff), or lets the plan choose."""
    patterns = modiff_patterns(section)
    return not layer.weight_only and any(fnmatchcase(layer.name, pattern) for pattern in patterns)


def choose_scales(
    layers: Sequence[Layer],
    rows: LayerRows,
    tensors: Mapping[str, Tensor],
    bins: int,
    *,
    statistic: str,
    percentile: float,
    equalise: bool,
    offsets: bool,
    deltas: LayerRows | None = None,
) -> LayerScales:
    """Chooses the scales of one input group.

    Args:
        layers: all layers of the input group; of one kind.
        rows: observations of their input.
        tensors: the model's parameters and buffers by name.
        bins: T.
        statistic: "least-error": the scale of least squared error; "maxima": the percentile of the calls' maxima.
        percentile: for "maxima".
        equalise: allow factors; offsets: allow offsets. Neither applies if all layers keep 16-bit activations.
        deltas: observations of the input's deltas from step to step.
    """
    in_16bit = all(layer.weight_only for layer in layers)
    equalise, offsets = equalise and not in_16bit, offsets and not in_16bit
    # Weights that `trtconvert quantize` stored keep their codes: factors would change them.
    equalise = equalise and not any(is_quantised(layer.weight.of(tensors)) for layer in layers)
    weight = _joined([layer.weight.of(tensors) for layer in layers]).to(rows.low.device)
    seen = _Points(rows)
    halves, moments = seen.halves(), moments_of(seen.x)
    met = torch.ones_like(weight[0]) if moments is None else moments.remainder_share

    def errors(choices: Sequence[_Choice]) -> list[list[float]]:
        """Errors of each choice on each half of the points, fitted to the other half. Waits for a GPU once."""
        of_halves = [
            _fitted(choices, mine, weight).errors_on(other, mine, met) for mine, other in (halves, halves[::-1])
        ]
        return torch.stack(of_halves, 1).tolist()

    def best_of(choices: Iterable[_Choice], plain: _Choice, gain: float) -> _Choice:
        """Returns the best of the choices that pay in both halves, else `plain`."""
        tried = (plain, *choices)
        found = dict(zip(tried, errors(tried), strict=True))
        pays = [
            choice
            for choice, here in found.items()
            if all(mine < gain * without for mine, without in zip(here, found[plain], strict=True))
        ]
        return min(pays, key=lambda choice: sum(found[choice]), default=plain)

    def scale_by_bin(points: _Points, moved: _Moved) -> Tensor:
        scales: dict[int, Tensor] = {}
        for alike, indices in points.by_bin():
            scales |= zip(indices, moved.scales_for(alike, statistic, percentile / 100), strict=True)
        return torch.stack([scales[index] for index in nearest_bins(sorted(scales), bins)])

    best = _Choice()
    if offsets and layers[0].kind == "linear":
        best = best_of((_Choice(_Points.middle), _Choice(_Points.middles)), best, OFFSET_GAIN)
    if equalise:
        gain = GELU_FACTOR_GAIN if any(layer.behind_gelu for layer in layers) else FACTOR_GAIN
        best = best_of((replace(best, exponent=exponent) for exponent in EXPONENTS), best, gain)
    chosen = _fitted([best], seen, weight)
    scale = scale_by_bin(seen, chosen)
    of_deltas = None
    if deltas is not None:
        of_deltas = scale_by_bin(_Points(deltas), replace(chosen, offset=torch.zeros_like(chosen.offset)))
        of_deltas = short_scale(of_deltas.clamp_min(float(scale.max()) * LEAST_DELTA)).cpu()
    directions, remainder = (None, None) if moments is None else (moments.directions.cpu(), moments.remainder.cpu())
    in_bins = short_scale(scale).cpu()
    return LayerScales(chosen.factor[0].cpu(), chosen.offset[0].cpu(), in_bins, of_deltas, directions, remainder)


def _joined(weights: Sequence[Tensor]) -> Tensor:
    """[N', K] FP32 of at most about `WEIGHT_ROWS` output channels, and of all places of a convolution's kernel."""
    parts = []
    for weight in weights:
        step = max(1, len(weights) * weight.shape[0] // WEIGHT_ROWS)
        part = weight[::step].float()
        parts.append(part.movedim(1, -1).reshape(-1, part.shape[1]))
    return torch.cat(parts)


def _factors(of_x: Tensor, of_weight: Tensor, exponents: Sequence[float | None]) -> Tensor:
    """[C, K] factors of activations with eight significant bits and a geometric mean of about 1, from [C, K] and [K] largest
    magnitudes; 1 for an exponent of None."""
    of_x = of_x.clamp_min(of_x.amax(1, keepdim=True) * 1e-5 + 1e-12)
    of_weight = of_weight.clamp_min(of_weight.amax() * 1e-5 + 1e-12)
    factors = [
        torch.ones_like(of_weight) if exponent is None else of_weight ** (1 - exponent) / x**exponent
        for x, exponent in zip(of_x, exponents, strict=True)
    ]
    factor = torch.stack(factors)
    factor = factor / factor.log().mean(1, keepdim=True).exp()
    return short_scale(factor.clamp(2.0**-10, 2.0**10))


class _Points:
    """Whole rows, and the extremes of every call that the rows miss; extremes count by their frequency.

    Args:
        rows: of all calls; or of some timestep bins with equally many calls, as a first dimension.
    """

    def __init__(self, rows: LayerRows) -> None:
        self._rows = rows
        self.x = rows.sample.flatten(-3, -2)
        self.share_of_extremes = 1 / rows.rows.to(self.x.dtype).unsqueeze(-1)
        """[…, R, 1] frequency of an extreme among the rows of its call."""

    def by_bin(self) -> Iterator[tuple[_Points, list[int]]]:
        """Yields the points of all observed bins that have equally many calls, and these bins."""
        places: dict[int, list[int]] = {}
        for place, index in enumerate(self._rows.bin.tolist()):
            places.setdefault(index, []).append(place)
        for count in {len(of_bin): None for of_bin in places.values()}:
            indices = [index for index, of_bin in places.items() if len(of_bin) == count]
            chosen = torch.tensor([places[index] for index in indices], device=self.x.device)
            yield _Points(self._rows.select(chosen)), indices

    def halves(self) -> tuple[_Points, _Points]:
        """Splits the calls into every other call and the rest: channels that are large by chance in a few calls are so in one
        half only. A single call is both halves."""
        if len(self._rows.bin) < 2:
            return self, self
        return _Points(self._rows.select(slice(0, None, 2))), _Points(self._rows.select(slice(1, None, 2)))

    def middle(self) -> Tensor:
        """[K] the middle of the range of all channels."""
        low, high = self._rows.low.amin(0), self._rows.high.amax(0)
        return torch.full_like(low, float(low.amin() + high.amax()) / 2)

    def middles(self) -> Tensor:
        """[K] the middle of each channel's range."""
        return (self._rows.low.amin(0) + self._rows.high.amax(0)) / 2

    def amax_of_calls(self, offset: Tensor) -> Tensor:
        """[C, R, K] largest magnitude of x minus offsets [C, K] for each call and bin. C counts choices or bins."""
        offset = offset[:, None]
        return torch.maximum(self._rows.high - offset, offset - self._rows.low)


@dataclass(frozen=True)
class _Choice:
    """A way to choose an offset (None: no offset) and SmoothQuant's exponent α (None: no factors)."""

    offset: Callable[[_Points], Tensor] | None = None
    exponent: float | None = None


def _fitted(choices: Sequence[_Choice], seen: _Points, weight: Tensor) -> _Moved:
    of_weight = weight.abs().amax(0)
    offset = torch.stack(
        [torch.zeros_like(of_weight) if choice.offset is None else choice.offset(seen) for choice in choices]
    )
    of_x = seen.amax_of_calls(offset).amax(1)
    factor = _factors(of_x, of_weight, [choice.exponent for choice in choices])
    scaled = weight / factor[:, None]
    return _Moved(offset, factor, scaled, scaled.double().square().sum(1))


@dataclass(frozen=True)
class _Moved:
    """Offsets and factors [C, K] of C choices; weights of x̂ [C, N', K], and squared norms [C, K] of each channel's weights."""

    offset: Tensor
    factor: Tensor
    weight: Tensor
    squares: Tensor

    def errors_on(self, held: _Points, fitted: _Points, met: Tensor) -> Tensor:
        """Returns the errors [C] on `held` with the scales that are best for `fitted`.

        Args:
            met: [K] share of each channel's second moment that errors of weights meet.
        """
        # The weights' error multiplies x, not x̂: see `layer_tables`.
        squares = (held.x * self.factor[:, None]).double().square().mean(1) * met
        limits = self._scaled(fitted).best_limits()
        return self._scaled(held).errors_at(limits[:, None])[:, 0] + (squares * self._weight_errors()).sum(1)

    def _weight_errors(self) -> Tensor:
        """[C, K] squared norms of the change of each channel's weights by quantisation."""
        stored, scale = quantise_weight(self.weight.flatten(0, 1))
        difference = (stored.float() * scale[:, None]).view_as(self.weight) - self.weight
        return difference.double().square().sum(1)

    def scales_for(self, points: _Points, statistic: str, quantile: float) -> Tensor:
        """Returns the scales [T] of the only choice for T bins."""
        scaled = self._scaled(points)
        if statistic == "maxima":
            return torch.quantile(scaled.extremes.amax(2), quantile, dim=1) / LEVELS
        return (scaled.best_limits() / LEVELS).float()

    def _scaled(self, points: _Points) -> _Scaled:
        factor = self.factor[:, None]
        x, extremes = (points.x - self.offset[:, None]) * factor, points.amax_of_calls(self.offset) * factor
        shares = points.share_of_extremes.expand(len(x), -1, -1)
        return _Scaled(x, extremes, shares, self.squares.expand(len(x), -1))


@dataclass(frozen=True)
class _Scaled:
    """C choices or timestep bins: x̂ [C, n, K], extremes of calls [C, R, K] and their frequencies [C, R, 1], and squared norms of
    the weights of each channel [C, K]."""

    x: Tensor
    extremes: Tensor
    shares: Tensor
    squares: Tensor

    def best_limits(self) -> Tensor:
        """Returns the limits [C] of least error, in FP64."""
        top = self.extremes.amax((1, 2)).clamp_min(1e-12).double()
        limits = top[:, None] * _clips(top.device)
        return limits.gather(1, self.errors_at(limits).argmin(1, keepdim=True))[:, 0]

    def errors_at(self, limits: Tensor) -> Tensor:
        """Returns the errors [C, L] in FP64 of activations with x̂ clipped at each of the limits [C, L]. They are evaluated
        together, as many as memory allows."""
        numbers = max(1, self.x.numel(), self.extremes.numel())
        if len(limits) > 1 and numbers * limits.shape[1] > MOST_NUMBERS:
            each = (_Scaled(*(x[None] for x in one)) for one in zip(*vars(self).values(), strict=True))
            return torch.cat([one.errors_at(limit[None]) for one, limit in zip(each, limits, strict=True)])
        return torch.cat([self._errors_at(some) for some in limits.split(max(1, MOST_NUMBERS // numbers), 1)], 1)

    def _errors_at(self, limits: Tensor) -> Tensor:
        limit = limits.to(self.x.dtype)[..., None, None]
        # In units of a step, so that no square leaves the range of FP32.
        steps = self.x[:, None] / (limit / LEVELS)
        error = (steps - steps.round().clamp_(-LEVELS, LEVELS)).square_().mean(2).double()
        above = (self.extremes[:, None] / limit).sub_(1).clamp_min_(0).square_()
        beyond = (above * self.shares[:, None]).mean(2).double()
        squared = error * (limits / LEVELS).square()[..., None] + beyond * limits.square()[..., None]
        return (squared * self.squares[:, None]).sum(2)


@cache
def _clips(device: torch.device) -> Tensor:
    return torch.tensor(CLIPS, dtype=torch.float64, device=device)
