"""How a denoiser is told the noise: what its timestep input holds."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trtconvert.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

PLACES = 1000
"""Places of inputs that are no timesteps: as many as DDPM has timesteps, so that bins and tables are as fine."""

_ROOM = 1e-4
"""Of the range, how far beyond its ends an input may lie: FP32 rounds σ, and its logarithm."""


@dataclass(frozen=True)
class NoiseInput:
    """A timestep input that holds no DDPM timestep, but σ, ln σ, EDM's c_noise = ln σ / 4, the share of noise t / T, ….

    Scales, modes, block masks and schedules of steps are tables over *places*: numbers in [0, timestep_max) that rise with the
    input. Timestep bins are even in places. A DDPM timestep is a place itself, and needs no such record. A line maps any other
    input, or its logarithm, to a place,

        place = (f(input) - f(low)) / (f(high) - f(low)) · timestep_max,      f(x) = x or ln x,

    so these four fields are all that bins, the exported nodes, the sampler and the runtime have to know. An engine takes the
    input as the model does. The map is two or three elementwise operators in front of what reads places, in torch and in ONNX.

    Attributes:
        low, high: of the input: at the least noise, and at the most.
        logarithmic: whether places are even in the input's logarithm, as for σ.
        timestep_max: where places end.
    Raises:
        UserError: there is no such range.
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
                "A denoiser's noise input has no such range.",
                expected="finite numbers, low below high"
                + (", and above 0, where the logarithm counts" * self.logarithmic),
                got=f"low {self.low:g}, high {self.high:g}",
                remedy="take the least and the most noise that the model was trained with",
            )

    @property
    def _line(self) -> tuple[float, float]:
        """Where places begin, in f's units, and places of a unit."""
        low, high = (math.log(x) if self.logarithmic else x for x in (self.low, self.high))
        return low, self.timestep_max / (high - low)

    def place(self, given: Tensor) -> Tensor:
        """Inputs as places, of any shape and floating-point type."""
        low, slope = self._line
        return ((given.log() if self.logarithmic else given) - low) * slope

    def at(self, place: Tensor) -> Tensor:
        """The input at each place; computed in float64, in the type of the places."""
        low, slope = self._line
        value = place.double() / slope + low
        return (value.exp() if self.logarithmic else value).to(place.dtype)

    def covers(self, given: Tensor) -> Tensor:
        """Whether each input lies in the range, whose ends FP32 may have rounded."""
        room = _ROOM * self.timestep_max
        place = self.place(given)
        return (place >= -room) & (place <= self.timestep_max + room)


def place_of(noise_input: NoiseInput | None, given: Tensor) -> Tensor:
    """Timestep inputs as places; DDPM's timesteps, without a record, are places."""
    return given if noise_input is None else noise_input.place(given)


def at_place(noise_input: NoiseInput | None, place: Tensor) -> Tensor:
    """The timestep input at each place."""
    return place if noise_input is None else noise_input.at(place)
