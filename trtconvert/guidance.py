"""Classifier-free guidance inside a denoiser: of samples, conditions of both halves and scales it makes one prediction.

u + s · (c − u), classifier-free guidance (Ho and Salimans 2022, arXiv 2207.12598) with diffusers' weight: 1 is the conditional
prediction alone.
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
"""What the name of an input begins with that has what guidance leads away from."""


@dataclass(frozen=True)
class FusedGuidance:
    """What somebody needs to know who calls a denoiser that applies guidance inside.

    Attributes:
        record: its inputs; output: the symbolic shape of its prediction.
    """

    record: GuidanceRecord
    output: tuple[int | str, ...]

    @staticmethod
    def of(component: ComponentRecord) -> FusedGuidance | None:
        """Of a bundle's component; None where it does not apply guidance."""
        if component.guidance is None:
            return None
        return FusedGuidance(component.guidance, tuple(component.outputs[0].shape))

    def inputs(
        self, negative: Mapping[str, Tensor], conditions: Mapping[str, Tensor], scale: Tensor
    ) -> dict[str, Tensor]:
        """The denoiser's inputs beside what is denoised and the timestep.

        Args:
            negative: what guidance leads away from, by the names of the conditions; scale: [B].
        """
        twins = {twin: negative[name] for name, twin in self.record.negative.items()}
        return {**conditions, **twins, self.record.scale: scale}

    def of_rows(self, rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Inputs with which the denoiser predicts rows of a call as the model without guidance predicts them.

        The scale is 1, so that what guidance leads away from cancels out; it is the condition of another row.

        Args:
            rows: inputs by name of a call of the model, with both halves of guidance among its rows or not.
        """
        negative = {name: rows[name].roll(len(rows[name]) // 2, 0) for name in self.record.negative}
        count = len(next(iter(negative.values())))
        return self.inputs(negative, rows, torch.ones(count))


def guidance_of(denoiser: Any) -> FusedGuidance | None:
    """The guidance that a denoiser applies inside; None for one that is called with both halves. What wraps a denoiser says it
    in an attribute `guidance`."""
    signature = getattr(denoiser, "signature", None)
    component = getattr(signature, "component", None)
    if isinstance(component, ComponentRecord):
        return FusedGuidance.of(component)
    found = getattr(denoiser, "guidance", None)
    return found if isinstance(found, FusedGuidance) else None


class GuidedDenoiser(nn.Module):
    """A denoiser of 2·B rows as one of B samples, with guidance inside.

    Args:
        denoiser: takes its own inputs by name; names, timestep, record: see `guided_prediction`.
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
    """u + s · (c − u) of a denoiser's predictions u and c with both halves of the conditions, computed in FP32.

    Args:
        denoiser: takes inputs by name, with 2·B rows: first those with what guidance leads away from.
        inputs: of B samples, those that guidance adds among them; what is denoised is the first but the timestep. What has no
            twin beside these is for all samples.
        timestep: which of them is the timestep; record: of guidance.
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
    # Not by chunk, of whose batch torch.export makes a constant.
    negative, conditional = prediction[:count].float(), prediction[count:].float()
    scales = inputs[record.scale].reshape(-1, *[1] * (prediction.dim() - 1))
    return (negative + scales * (conditional - negative)).to(prediction.dtype)
