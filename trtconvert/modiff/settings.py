"""Settings of modulated layers, shared by calibrations and models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from trtconvert.errors import UserError

WEIGHT_BITS, ACTIVATION_BITS = (4, 8), (3, 4, 5, 6, 7, 8)
CACHE_DTYPES = {"float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True)
class Settings:
    """Bits, granularities, and patterns of layers.

    Attributes:
        weight_bits: 4 or 8. activation_bits: 3 to 8, of the delta since the step before, or, without `modulation`, of the
            activation.
        first_bits: of the activations of a sample's first step, which are quantised whole. Use 8: an error of the first step
            stays in the cache until later steps correct it.
        modulation: quantise deltas, and add their products to a cache (MoDiff). Otherwise every step is quantised by itself.
        symmetric: of activations; asymmetric ones have a zero point. weight_symmetric: of weights; only 4 bits may be
            asymmetric.
        weight_granularity: a scale per output channel, or one for the weight.
        scales: "calibrated" needs a calibration; "dynamic" measures every tensor, and reads it twice.
        granularity: of dynamic scales: one for all samples, per sample, or per row of a linear layer ("token"; of convolutions
            per sample). Calibrated scales hold for all samples at one timestep.
        bins: of timesteps, with calibrated scales of their own.
        cache_dtype: of both caches. By default float16 in FP16 models, float32 in others.
        min_rows: least rows per sample of a linear layer; smaller layers, such as a timestep's embedding, take no time.
            min_channels: least input and output channels; smaller layers read or write images.
        include, exclude: patterns (fnmatch) of names of layers.
        shared_outputs: a layer's output is its cache if both have one type. Models that change outputs in place, or keep them
            until the next step, need copies.
        check_timesteps: whether to refuse a sampler that goes back in time. None: only if the timesteps are on the CPU, since
            reading them from a GPU waits.

    Raises:
        UserError: an invalid value.
    """

    weight_bits: int = 8
    activation_bits: int = 8
    first_bits: int = 8
    modulation: bool = True
    symmetric: bool = True
    weight_symmetric: bool = True
    weight_granularity: Literal["channel", "tensor"] = "channel"
    scales: Literal["calibrated", "dynamic"] = "calibrated"
    granularity: Literal["tensor", "sample", "token"] = "tensor"
    bins: int = 10
    cache_dtype: Literal["float16", "float32"] | None = None
    min_rows: int = 2
    min_channels: int = 16
    include: tuple[str, ...] = ("*",)
    exclude: tuple[str, ...] = ()
    shared_outputs: bool = True
    check_timesteps: bool | None = None

    def __post_init__(self) -> None:
        for name, valid in (
            ("weight_bits", WEIGHT_BITS),
            ("activation_bits", ACTIVATION_BITS),
            ("first_bits", ACTIVATION_BITS),
            ("weight_granularity", ("channel", "tensor")),
            ("scales", ("calibrated", "dynamic")),
            ("granularity", ("tensor", "sample", "token")),
            ("cache_dtype", (None, *CACHE_DTYPES)),
        ):
            self._require(getattr(self, name) in valid, name, f"one of {', '.join(map(str, valid))}")
        for name in ("bins", "min_rows", "min_channels"):
            value = getattr(self, name)
            self._require(isinstance(value, int) and value >= 1, name, "a whole number from 1 up")
        for name in ("include", "exclude"):
            value = getattr(self, name)
            is_tuple = not isinstance(value, str) and all(isinstance(x, str) for x in value)
            self._require(is_tuple, name, "a tuple of patterns")
        if self.weight_bits == 8 and not self.weight_symmetric:
            raise UserError(
                "weights of 8 bits cannot be asymmetric",
                expected="symmetric weights, or 4 bits: differences from a zero point of 8 bits leave the range of INT8",
                got="weight_bits=8, weight_symmetric=False",
                remedy="Settings(weight_symmetric=True), which is as close at 8 bits; or weight_bits=4",
            )
        if self.scales == "calibrated" and self.granularity != "tensor":
            raise UserError(
                f"calibrated scales cannot be for each {self.granularity}",
                expected="granularity='tensor': a calibration holds for all samples at one timestep",
                got=f"scales='calibrated', granularity={self.granularity!r}",
                remedy=f"Settings(scales='dynamic', granularity={self.granularity!r})",
            )

    def _require(self, is_valid: bool, name: str, expected: str) -> None:
        if not is_valid:
            value, usual = getattr(self, name), Settings.__dataclass_fields__[name].default
            raise UserError(
                f"{name} cannot be {value!r}",
                expected=expected,
                got=repr(value),
                remedy=f"Settings({name}={usual!r}), or another valid value",
            )
