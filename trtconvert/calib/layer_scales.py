"""From what was observed of a layer to its INT8 tables: offsets and factors of channels, scales of activations, INT8 weights.

Everything is chosen by one measure, the squared error that rounding and clipping add to the layer's output,

    E = Σₖ ‖Wₖ‖² · E[eₖ²]  +  Σₖ E[x̂ₖ²] · ‖δWₖ‖²

with e the error of x̂ and δW that of its weight, k an input channel. It takes rounding errors of different channels for
independent, so that no product with the weights is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from trtconvert.calib.layer_observer import LayerRows
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
"""Of SmoothQuant that are tried: x̂ = x · max|W|^(1−α) / max|x|^α; its authors take 0.5."""

CLIPS = tuple(1 - step / 20 for step in range(11))
"""Shares of the largest magnitude at which x̂ may be clipped."""

FACTOR_GAIN, OFFSET_GAIN = 0.9, 0.9
"""Of the error without them: what factors and offsets have to come to. In front of a fused product each is one more
operation on every element, so that they have to pay."""

LEAST_DELTA = 2.0**-12
"""Least scale of deltas relative to the largest scale of whole activations: FP16 holds no finer steps of deltas, and no smaller
ratio of the two scales. Inputs that stay the same, such as a prompt's tokens, have this scale."""

MOST_NUMBERS = 2**25
"""Of activations that are looked at together, over several limits: 256 MiB in FP64."""

WEIGHT_ROWS = 512
"""Output channels on which the error of weights is estimated while factors are chosen."""


@dataclass(frozen=True)
class LayerScales:
    """What calibration knows of the input of a layer: of all that read the same tensor. K input channels, T timestep bins.

    Attributes:
        x_factor, x_offset, x_scale: as in `LayerTables`.
        change_scale: [T] of the deltas of x̂ from step to step, as x_scale; None where they were not observed.
    """

    x_factor: Tensor
    x_offset: Tensor
    x_scale: Tensor
    change_scale: Tensor | None = None

    def tensors(self) -> dict[str, Tensor]:
        """Those that there are, by name."""
        return {name: x for name, x in vars(self).items() if x is not None}

    def flaw(self, channels: int, bins: int) -> str:
        """What keeps them from being used for an input of so many channels; empty if nothing."""
        shapes = {"x_factor": (channels,), "x_offset": (channels,), "x_scale": (bins,), "change_scale": (bins,)}
        for name, tensor in self.tensors().items():
            shape = shapes[name]
            if tuple(tensor.shape) != shape or tensor.dtype != torch.float32:
                return f"{name} of {list(tensor.shape)} {tensor.dtype}, where FP32 {list(shape)} is needed"
            if not tensor.isfinite().all() or (name != "x_offset" and (tensor <= 0).any()):
                return f"NaN, Inf, or numbers that are not positive in {name}"
        if self.change_scale is not None and (self.change_scale < LEAST_DELTA * self.x_scale.max()).any():
            return f"numbers in change_scale below {LEAST_DELTA:g} of the largest x_scale"
        return ""


def layer_tables(
    model: torch.nn.Module,
    layers: Sequence[Layer],
    scales: Mapping[str, LayerScales],
    modes: Mapping[str, Sequence[int] | Tensor],
    device: torch.device | None = None,
    computed_on: torch.device | None = None,
) -> dict[str, LayerTables]:
    """The op's tables of layers by name. Tied layers with equal factors have one weight.

    Args:
        layers: to convert.
        scales: by the layers' input groups.
        modes: modes of each layer by timestep bin.
        device: where they lie; by default that of the weights.
        computed_on: where they are computed, one layer after the other; by default where they lie.
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
            weight, scale = layer_weight(own.to(here).float(), factor)
        bias = None if layer.bias is None else layer.bias.of(tensors).to(here).float()
        bias = layer_bias(bias, weight, scale, factor, offset)
        if key not in stored:
            stored[key] = weight.to(there), scale.to(there)
        modes_of_layer = torch.as_tensor(modes[layer.name], dtype=torch.int32)
        rest = (bias, factor, offset, of_input.x_scale, modes_of_layer)
        found[layer.name] = LayerTables(*stored[key], *(x.to(there) for x in rest))
    return found


def modiff_patterns(section: LayersSection) -> list[str]:
    """Of the layers whose deltas are calibrated."""
    return section.modiff if isinstance(section.modiff, list) else ["*"] if section.modiff else []


def is_modulated(layer: Layer, section: LayersSection) -> bool:
    """Whether a recipe asks for the deltas of a layer's input from step to step (MoDiff), or lets the plan choose them."""
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
    """Scales for the layers that read one tensor.

    Args:
        layers: all of them; of one kind.
        rows: of their input.
        tensors: the model's parameters and buffers by name.
        bins: T.
        statistic: "least-error": the scale of least squared error; "maxima": the percentile of the calls' maxima.
        percentile: of "maxima".
        equalise: whether factors may be used; offsets: whether offsets may. Neither is where activations stay in 16 bits.
        deltas: of what they read, from step to step.
    """
    in_16bit = all(layer.weight_only for layer in layers)
    equalise, offsets = equalise and not in_16bit, offsets and not in_16bit
    # Weights that `trtconvert quantize` stored by channel are taken as they are: factors would make others of them.
    equalise = equalise and not any(is_quantised(layer.weight.of(tensors)) for layer in layers)
    weight = _joined([layer.weight.of(tensors) for layer in layers]).to(rows.low.device)
    seen = _Points(rows)
    halves = seen.halves()

    def errors(choice: _Choice) -> list[float]:
        """Of what is fitted to one half, on the other one, both ways."""
        return [choice.fitted(mine, weight).error_on(other, mine) for mine, other in (halves, halves[::-1])]

    def best_of(choices: Iterable[_Choice], plain: _Choice, gain: float) -> _Choice:
        """The best of those that pay in both halves."""
        found = {choice: errors(choice) for choice in (plain, *choices)}
        pays = [
            choice
            for choice, here in found.items()
            if all(mine < gain * without for mine, without in zip(here, found[plain], strict=True))
        ]
        return min(pays, key=lambda choice: sum(found[choice]), default=plain)

    best = _Choice()
    if offsets and layers[0].kind == "linear":
        best = best_of((_Choice(_Points.middle), _Choice(_Points.middles)), best, OFFSET_GAIN)
    if equalise:
        best = best_of((replace(best, exponent=exponent) for exponent in EXPONENTS), best, FACTOR_GAIN)
    chosen = best.fitted(seen, weight)
    scale = torch.stack(
        [_scale_of(seen.of_bin(index), chosen, statistic, percentile / 100) for index in seen.nearest(bins)]
    )
    of_deltas = None
    if deltas is not None:
        steps, not_moved = _Points(deltas), replace(chosen, offset=torch.zeros_like(chosen.offset))
        found = [
            _scale_of(steps.of_bin(index), not_moved, statistic, percentile / 100) for index in steps.nearest(bins)
        ]
        of_deltas = short_scale(torch.stack(found).clamp_min(float(scale.max()) * LEAST_DELTA)).cpu()
    return LayerScales(chosen.factor.cpu(), chosen.offset.cpu(), short_scale(scale).cpu(), of_deltas)


def _joined(weights: Sequence[Tensor]) -> Tensor:
    """[N', K] FP32 of all output channels, or of some of them, and of all places of a convolution's kernel."""
    parts = []
    for weight in weights:
        step = max(1, len(weights) * weight.shape[0] // WEIGHT_ROWS)
        part = weight[::step].float()
        parts.append(part.movedim(1, -1).reshape(-1, part.shape[1]))
    return torch.cat(parts)


def _factor(of_x: Tensor, of_weight: Tensor, exponent: float) -> Tensor:
    """[K] factors of activations, of eight significant bits, with a geometric mean of about one."""
    floor_x, floor_weight = of_x.amax() * 1e-5 + 1e-12, of_weight.amax() * 1e-5 + 1e-12
    factor = of_weight.clamp_min(floor_weight) ** (1 - exponent) / of_x.clamp_min(floor_x) ** exponent
    factor = factor / factor.log().mean().exp()
    return short_scale(factor.clamp(2.0**-10, 2.0**10))


class _Points:
    """Rows that were kept and, for what they miss, the extremes of every call, which count as little as they are seldom."""

    def __init__(self, rows: LayerRows) -> None:
        self._rows = rows
        self.x = rows.sample.flatten(0, 1)

    def of_bin(self, index: int) -> _Points:
        return self._of(self._rows.bin == index)

    def halves(self) -> tuple[_Points, _Points]:
        """Every other call, and the rest: channels that were large by chance in a few calls are so in half of them only. Of a
        single call, twice the same."""
        if len(self._rows.bin) < 2:
            return self, self
        return self._of(slice(0, None, 2)), self._of(slice(1, None, 2))

    def _of(self, chosen: Tensor | slice) -> _Points:
        return _Points(LayerRows(**{name: x[chosen] for name, x in self._rows.tensors().items()}))

    def nearest(self, bins: int) -> list[int]:
        """For each bin the nearest one that was seen."""
        seen = self._rows.bin.unique().tolist()
        return [min(seen, key=lambda j, i=i: abs(j - i)) for i in range(bins)]

    def middle(self) -> Tensor:
        """[K] the middle of the whole range, in every channel."""
        low, high = self._rows.low.amin(0), self._rows.high.amax(0)
        return torch.full_like(low, float(low.amin() + high.amax()) / 2)

    def middles(self) -> Tensor:
        """[K] the middle of each channel's range."""
        return (self._rows.low.amin(0) + self._rows.high.amax(0)) / 2

    def amax(self, offset: Tensor) -> Tensor:
        """[K] largest magnitude of x less an offset."""
        return self.amax_of_calls(offset).amax(0)

    def amax_of_calls(self, offset: Tensor) -> Tensor:
        """[R, K] likewise, of each call and bin."""
        return torch.maximum(self._rows.high - offset, offset - self._rows.low)

    @property
    def share_of_extremes(self) -> Tensor:
        """[R, 1] how often an extreme occurs, of the rows that its call has."""
        return 1 / self._rows.rows.double().unsqueeze(1)


@dataclass(frozen=True)
class _Choice:
    """How an offset and factors are made of points.

    Attributes:
        offset: gives it; None for none.
        exponent: of SmoothQuant; None for no factors.
    """

    offset: Callable[[_Points], Tensor] | None = None
    exponent: float | None = None

    def fitted(self, seen: _Points, weight: Tensor) -> _Moved:
        of_weight = weight.abs().amax(0)
        offset = torch.zeros_like(of_weight) if self.offset is None else self.offset(seen)
        factor = torch.ones_like(of_weight)
        if self.exponent is not None:
            factor = _factor(seen.amax(offset), of_weight, self.exponent)
        scaled = weight / factor
        stored, scale = quantise_weight(scaled)
        difference = (stored.float() * scale[:, None] - scaled).double().square().sum(0)
        return _Moved(offset, factor, scaled.double().square().sum(0), difference)


@dataclass(frozen=True)
class _Moved:
    """An offset and factors.

    Attributes:
        squares: [K] squared norms of the weight of each channel of x̂; differences: of what quantising it changes.
    """

    offset: Tensor
    factor: Tensor
    squares: Tensor
    differences: Tensor

    def error_on(self, held: _Points, fitted: _Points) -> float:
        """On some points, with the scale that is the best of others."""
        # The weights' error meets x, not x̂: see `layer_tables`.
        of_weight = ((held.x * self.factor).double().square().mean(0) * self.differences).sum()
        return self.error_at(held, self.best_limit(fitted)) + float(of_weight)

    def best_limit(self, seen: _Points) -> float:
        """The range of least error."""
        top = float((seen.amax_of_calls(self.offset) * self.factor).amax().clamp_min(1e-12))
        limits = [clip * top for clip in CLIPS]
        return limits[int(self.errors_at(seen, limits).argmin())]

    def error_at(self, seen: _Points, limit: float) -> float:
        """Of activations, where x̂ is clipped at a limit."""
        return float(self.errors_at(seen, [limit])[0])

    def errors_at(self, seen: _Points, limits: Sequence[float]) -> Tensor:
        """[limits] FP64 errors of activations, where x̂ is clipped at each. Together: on a GPU one after the other would wait."""
        x = (seen.x - self.offset) * self.factor
        extremes = seen.amax_of_calls(self.offset) * self.factor
        at_once = max(1, MOST_NUMBERS // max(1, x.numel(), extremes.numel()))
        found = []
        for some in torch.tensor(limits, dtype=torch.float64, device=x.device).split(at_once):
            limit = some.to(x.dtype).view(-1, 1, 1)
            step = limit / LEVELS
            error = (x - (x / step).round().clamp(-LEVELS, LEVELS) * step).double().square().mean(1)
            beyond = (extremes - limit).clamp_min(0).double().square() * seen.share_of_extremes
            found.append(((error + beyond.mean(1)) * self.squares).sum(1))
        return torch.cat(found)


def _scale_of(seen: _Points, moved: _Moved, statistic: str, quantile: float) -> Tensor:
    if statistic == "maxima":
        maxima = (seen.amax_of_calls(moved.offset) * moved.factor).amax(1)
        return torch.quantile(maxima, quantile) / LEVELS
    return torch.tensor(moved.best_limit(seen) / LEVELS, device=seen.x.device)
