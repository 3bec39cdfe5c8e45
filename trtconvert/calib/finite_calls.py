"""Refuses NaN and Inf in the calls of a denoiser before a calibration has spent its time on them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from trtconvert.diffusion_model import Denoiser, DiffusionModel
from trtconvert.errors import UserError
from trtconvert.weights.finite import count_not_finite, finite, require_finite
from trtconvert.wrapped import WrappedDenoiser


def require_finite_samples(samples: Tensor) -> None:
    """Raises a UserError if samples that were drawn in full precision have NaN or Inf. Waits for their device."""
    require_finite(
        "samples in full precision have numbers that are not finite",
        samples,
        "correct the model, its weights or its sampler; or give model.dtype a type that holds its range, such as float32",
    )


class FiniteCalls(WrappedDenoiser):
    """A denoiser that refuses NaN and Inf. Every call waits for the device, so that it serves for one batch.

    Args:
        denoiser: in full precision, with observers. model: its model.
        refuse: raises the error of the observer that met NaN or Inf, which names a module.
    """

    def __init__(self, denoiser: Denoiser, model: DiffusionModel, refuse: Callable[[], object]) -> None:
        super().__init__(denoiser)
        self._model, self._refuse = model, refuse

    def __call__(self, *inputs: Tensor, **named: Tensor) -> Any:
        """
        Raises:
            UserError: an input or the prediction has NaN, or the sample, the timestep or the prediction has Inf.
        """
        model = self._model
        given = model.named(inputs, named)
        for name, x in given.items():
            of_noise = name in (model.sample_input, model.timestep_input)  # additive masks may have -Inf
            if not (finite(x) if of_noise else ~x.isnan().any()):
                raise UserError(
                    f"the denoiser of {model.name} is called with numbers that are not finite",
                    expected=f"finite numbers in '{name}'",
                    got=f"{count_not_finite(x)}, {self._place(given)}",
                    remedy="correct the sampler or the source of this input",
                )
        output = self._denoiser(*inputs, **named)
        if not finite(output):
            self._refuse()
            raise UserError(
                f"{model.name} predicts numbers that are not finite",
                expected="finite numbers from finite inputs",
                got=f"{count_not_finite(output)}, {self._place(given)}",
                remedy="check the weights; or give model.dtype a type that holds the model's range, such as float32",
            )
        return output

    def _place(self, given: dict[str, Tensor]) -> str:
        timestep = given[self._model.timestep_input]
        return f"at timestep {float(timestep.flatten()[0]):g}" if timestep.numel() else "without a timestep"
