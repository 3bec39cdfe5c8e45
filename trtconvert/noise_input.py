"""The contents of a denoiser's timestep input."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trtconvert.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

PLACES = 1000
"""Number of places of inputs that are no timesteps: that of DDPM's timesteps, so that bins and tables are as fine."""

_ROOM = 1e-4
"""An input may exceed the ends of the range by this share of the range, because FP32 rounds σ and its logarithm."""


@dataclass(frozen=True)
class NoiseInput:
    """A timestep input that holds no DDPM timestep, but σ, ln σ, EDM's c_noise = ln σ / 4, the share of noise t / T, ….

    Scales, modes, block masks and schedules of steps are tables over *places*: numbers in [0, timestep_max) that rise with the
    input. Timestep bins are even in places. A DDPM timestep is a place itself, and needs no such record. A linear function maps
    any other input, or its logarithm, to a place,

        place = (f(input) - f(low)) / (f(high) - f(low)) · timestep_max,      f(x) = x or ln x,

    so that bins, the exported nodes, the sampler and the runtime need these four fields alone. An engine takes the model's own
    input. The map is two or three elementwise operators before the operators that read places, in torch and in ONNX.

    Attributes:
        low, high: the input at the least noise, and at the most.
        logarithmic: whether places are even in the input's logarithm, as for σ.
        timestep_max: end of the places.
    Raises:
        UserError: the ends are no range.
    Source: c_noise of Karras et al. 2022 (arXiv 2206.00364), table 1; consistency models take 250 · ln σ (Song et al. 2023,
        arXiv 2303.01469, appendix C).
    """

    low: float
    high: float
    logarithmic: bool = False
    timestep_max: float = PLACES

    def __post_init__(self) -> None:
        ends = (self.low, self.high, self.timestep_max)
        if not all(map(math.isfinite, ends)) or not self.low < self.high or (self.logarithmic and self.low <= 0):
            raise UserError(
                "the range of a denoiser's noise input does not fit",
                expected="finite numbers, low below high" + (", and above 0 for a logarithm" * self.logarithmic),
                got=f"low {self.low:g}, high {self.high:g}",
                remedy="give the least and the most noise of the model's training",
            )

    @property
    def _line(self) -> tuple[float, float]:
        """The first place, in f's units, and the number of places in a unit."""
        low, high = (math.log(x) if self.logarithmic else x for x in (self.low, self.high))
        return low, self.timestep_max / (high - low)

    def place(self, given: Tensor) -> Tensor:
        """Returns the places of inputs, of any shape and floating-point type."""
        low, slope = self._line
        return ((given.log() if self.logarithmic else given) - low) * slope

    def at(self, place: Tensor) -> Tensor:
        """Returns the input at each place, computed in float64, in the type of the places."""
        low, slope = self._line
        value = place.double() / slope + low
        return (value.exp() if self.logarithmic else value).to(place.dtype)

    def covers(self, given: Tensor) -> Tensor:
        """Returns whether each input lies in the range, up to FP32's rounding of its ends."""
        room = _ROOM * self.timestep_max
        place = self.place(given)
        return (place >= -room) & (place <= self.timestep_max + room)


def place_of(noise_input: NoiseInput | None, given: Tensor) -> Tensor:
    """Returns the places of timestep inputs; DDPM's timesteps, without a record, are places."""
    return given if noise_input is None else noise_input.place(given)


def at_place(noise_input: NoiseInput | None, place: Tensor) -> Tensor:
    """Returns the timestep input at each place."""
    return place if noise_input is None else noise_input.at(place)
