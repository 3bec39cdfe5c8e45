"""Classifier-free guidance inside a denoiser, which gets samples, both halves of the conditions and scales.

The prediction is u + s · (c − u) (Ho and Salimans 2022, arXiv 2207.12598) with diffusers' weight: 1 is the conditional prediction
alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trtconvert.bundle import ComponentRecord, GuidanceRecord

SCALE = "guidance_scale"
"""The input of the scales."""

NEGATIVE = "negative_"
"""Prefix of the inputs for the negative conditions."""


@dataclass(frozen=True)
class FusedGuidance:
    """The guidance that a denoiser applies, for its callers.

    Attributes:
        record: of the guidance's inputs.
        output: symbolic shape of the prediction.
    """

    record: GuidanceRecord
    output: tuple[int | str, ...]

    @staticmethod
    def of(component: ComponentRecord) -> FusedGuidance | None:
        """Returns the guidance of a bundle's component; None for none."""
        if component.guidance is None:
            return None
        return FusedGuidance(component.guidance, tuple(component.outputs[0].shape))

    def inputs(
        self, negative: Mapping[str, Tensor], conditions: Mapping[str, Tensor], scale: Tensor
    ) -> dict[str, Tensor]:
        """Returns the denoiser's inputs other than the sample and the timestep.

        Args:
            negative: negative conditions, by the names of the conditions.
            scale: [B].
        """
        twins = {twin: negative[name] for name, twin in self.record.negative.items()}
        return {**conditions, **twins, self.record.scale: scale}

    def of_rows(self, rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns inputs that give the predictions of a model without guidance for the rows of a call.

        The scale is 1, so that the negative condition cancels out; the condition of another row serves as one.

        Args:
            rows: inputs of a call of the model by name, with or without both halves of guidance among the rows.
        """
        negative = {name: rows[name].roll(len(rows[name]) // 2, 0) for name in self.record.negative}
        count = len(next(iter(negative.values())))
        return self.inputs(negative, rows, torch.ones(count))


def guidance_of(denoiser: Any) -> FusedGuidance | None:
    """Returns the guidance that a denoiser applies; None for a denoiser that is called with both halves. Wrappers of denoisers
    have it as an attribute `guidance`."""
    signature = getattr(denoiser, "signature", None)
    component = getattr(signature, "component", None)
    if isinstance(component, ComponentRecord):
        return FusedGuidance.of(component)
    found = getattr(denoiser, "guidance", None)
    return found if isinstance(found, FusedGuidance) else None


class GuidedDenoiser(nn.Module):
    """A denoiser of 2·B rows as one of B samples, with guidance inside.

    Args:
        denoiser: takes its own inputs by name.
        timestep, record: see `guided_prediction`.
    """

    def __init__(self, denoiser: nn.Module, timestep: str, record: GuidanceRecord) -> None:
        super().__init__()
        self.denoiser = denoiser
        self._timestep, self._record = timestep, record

    def forward(self, **named: Tensor) -> Tensor:
        return guided_prediction(self.denoiser, named, self._timestep, self._record)


def guided_prediction(
    denoiser: Callable[..., Tensor], inputs: Mapping[str, Tensor], timestep: str, record: GuidanceRecord
) -> Tensor:
    """Computes u + s · (c − u) in FP32 from a denoiser's predictions u and c for both halves of the conditions.

    Args:
        denoiser: takes inputs by name, with 2·B rows, the negative half first.
        inputs: of B samples, with those that guidance adds; the first one other than the timestep is the sample. A condition
            without a negative twin is passed as it is.
        timestep: name of the timestep.
        record: of guidance.
    Returns:
        [B, …], in the type of the denoiser's prediction.
    """
    sample = next(name for name in inputs if name != timestep)
    count = inputs[sample].shape[0]

    def rows(name: str, x: Tensor) -> Tensor:
        if name == sample or (name == timestep and x.dim() and x.shape[0] == count):
            return torch.cat([x, x])
        return torch.cat([inputs[record.negative[name]], x]) if name in record.negative else x

    prediction = denoiser(**{name: rows(name, x) for name, x in inputs.items() if name not in record.added})
    # Slices, as torch.export makes a constant of chunk's batch.
    negative, conditional = prediction[:count].float(), prediction[count:].float()
    scales = inputs[record.scale].reshape(-1, *[1] * (prediction.dim() - 1))
    return (negative + scales * (conditional - negative)).to(prediction.dtype)
