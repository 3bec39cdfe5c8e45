"""How layers are quantised between the steps of a sampler: one plain description, which calibrations and models share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from trtconvert.errors import UserError

WEIGHT_BITS, ACTIVATION_BITS = (4, 8), (3, 4, 5, 6, 7, 8)
CACHE_DTYPES = {"float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True)
class Settings:
    """Bits, granularities, and which layers they are for.

    Attributes:
        weight_bits: 4 or 8. activation_bits: 3 to 8, of what is quantised in a step: the delta since the step before, or,
            without `modulation`, the activation itself.
        first_bits: of the activations of a sample's first step, which are quantised whole. 8 whatever the deltas have: an error
            of the first step stays in the cache until later steps have made up for it, and one step of many costs nothing.
        modulation: quantise deltas, and add their products to a cache (MoDiff). Without it every step is quantised by itself.
        symmetric: activations; asymmetric ones have a zero point of their own. weight_symmetric: weights; those of 4 bits may be
            asymmetric.
        weight_granularity: a scale for each output channel, or one for the weight.
        scales: "calibrated" needs a calibration; "dynamic" measures every tensor as it comes, which reads it twice.
        granularity: of dynamic scales: one for all samples, for each sample, or for each row of a linear layer ("token"; of
            convolutions each sample). Calibrated ones are for all samples at one timestep.
        bins: of timesteps, each with scales of its own where they are calibrated.
        cache_dtype: of both caches. By default float16 in FP16 models, and float32 in all others.
        min_rows: rows that a linear layer's sample has at least to be quantised; those with fewer, such as a timestep's
            embedding, take no time. min_channels: of inputs and of outputs; layers with fewer read or make images.
        include, exclude: patterns (fnmatch) of names of layers.
        shared_outputs: a layer's output is its cache, where both have one type. A model that writes into outputs in place, or
            keeps them for its next step, needs copies.
        check_timesteps: whether a sampler that goes back in time is refused. None: where the timesteps are on the CPU, since
            reading them from a GPU makes the host wait.

    Raises:
        UserError: a value that is none of these.
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
            if getattr(self, name) not in valid:
                raise UserError(
                    f"{name} cannot be {getattr(self, name)!r}",
                    expected=f"one of {', '.join(map(str, valid))}",
                    got=repr(getattr(self, name)),
                    remedy=f"Settings({name}={valid[-1]!r}) or another of these",
                )
        for name in ("bins", "min_rows", "min_channels"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise UserError(
                    f"{name} cannot be {getattr(self, name)!r}",
                    expected="a whole number from 1 up",
                    got=repr(getattr(self, name)),
                    remedy=f"Settings({name}={Settings.__dataclass_fields__[name].default})",
                )
        for name in ("include", "exclude"):
            if isinstance(getattr(self, name), str) or not all(isinstance(x, str) for x in getattr(self, name)):
                raise UserError(
                    f"{name} cannot be {getattr(self, name)!r}",
                    expected="a tuple of patterns",
                    got=type(getattr(self, name)).__name__,
                    remedy=f"Settings({name}=('*',))",
                )
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
                expected="granularity='tensor': what a calibration finds holds for all samples at one timestep",
                got=f"scales='calibrated', granularity={self.granularity!r}",
                remedy=f"Settings(scales='dynamic', granularity={self.granularity!r})",
            )
