"""Turns captions into inputs of a pipeline's denoiser. The rows of a caption are found by comparing calls with two captions.

With guidance a call of the denoiser has several rows for a sample, mostly one without the prompt and then one with the prompt.
InstructPix2Pix has the prompt in the first of three rows, and Wan calls its denoiser twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from trtconvert.bundle import DiffusersRecord
from trtconvert.diffusion_model import Denoiser
from trtconvert.errors import UserError
from trtconvert.models.call_options import PROMPTS
from trtconvert.models.pipelines import PipelineCaller
from trtconvert.models.probes import first_inputs
from trtconvert.wrapped import WrappedDenoiser

STAND_IN = PROMPTS[0]
"""The prompt of samples whose conditions are given."""

_OTHER = PROMPTS[5]
"""A caption that differs from `STAND_IN` in every word."""

_SAME = 1e-3
"""Largest relative difference between rows of one caption: the same text encoders computed both."""


@dataclass(frozen=True)
class Captions:
    """Turns captions into conditions of the denoiser, see `DiffusionModel.condition`.

    Args:
        caller: calls the pipeline.
        sizes: of the samples.
        record, timestep: see `DiffusersDenoiser`.
    """

    caller: PipelineCaller
    sizes: Mapping[str, int]
    record: DiffusersRecord
    timestep: str

    def __call__(self, captions: Sequence[str]) -> dict[str, Tensor]:
        """
        Raises:
            UserError: the pipeline does not pass one row for each sample.
        """
        tensors, count = self._inputs(captions), len(captions)
        rows = slice(self._place.block * count, (self._place.block + 1) * count)
        return {name: x[rows] for name, x in tensors.items() if name in self._place.of_samples}

    def given_to(self, denoiser: Denoiser, conditions: Mapping[str, Tensor]) -> _Conditioned:
        """Returns a denoiser that gets these conditions in the place of those of `STAND_IN`."""
        count = len(next(iter(conditions.values())))
        own = self([STAND_IN] * count)
        fixed = {name: x for name, x in conditions.items() if name not in self._place.follow_noise}
        return _Conditioned(denoiser, fixed, {name: own[name] for name in self._place.heed if name in own})

    def _inputs(self, captions: Sequence[str], seed: int = 0) -> dict[str, Tensor]:
        tensors = first_inputs(self.caller, self.record, self.timestep, [seed] * len(captions), self.sizes, captions)
        return {name: x for name, x in tensors.items() if name not in (self.timestep, *self.record.timestep_shares)}

    @cached_property
    def _place(self) -> _Place:
        one, other, moved = self._inputs([STAND_IN]), self._inputs([_OTHER]), self._inputs([STAND_IN], seed=1)
        first, *others = one
        batch = len(one[first])
        of_samples = [name for name in others if one[name].dim() and len(one[name]) == batch]
        follow_noise = {name for name in others if not torch.equal(one[name], moved[name])}
        heed = [name for name in others if name not in follow_noise and not torch.equal(one[name], other[name])]
        if unfit := [name for name in heed if name not in of_samples]:
            raise UserError(
                f"{self.record.pipeline} gives its denoiser more or fewer rows of '{unfit[0]}' than samples",
                expected=f"{batch}, as of '{first}', to calibrate on captions",
                got=str(len(one[unfit[0]]) if one[unfit[0]].dim() else 1),
                remedy="give the captions as model.options.prompts, and calibrate on denoise",
            )
        rows = [i for i in range(batch) if any(not torch.equal(one[name][i], other[name][i]) for name in heed)]
        return _Place(
            block=rows[0] if rows else batch - 1,
            of_samples=frozenset(of_samples),
            heed=tuple(heed),
            follow_noise=frozenset(follow_noise),
        )


@dataclass(frozen=True)
class _Place:
    """The place of a caption in the denoiser's inputs.

    Attributes:
        block: index of the caption's rows among blocks with a row for each sample.
        of_samples: inputs with such blocks, other than the first input.
        heed: those of them that change with the caption.
        follow_noise: inputs that change with the sample's noise, such as the additions of a ControlNet.
    """

    block: int
    of_samples: frozenset[str]
    heed: tuple[str, ...]
    follow_noise: frozenset[str]


class _Conditioned(WrappedDenoiser):
    """A denoiser with given inputs in each block of rows of a prompt.

    Args:
        conditions: the given inputs, by name, [samples, …].
        own: the inputs of `STAND_IN`, likewise; they tell the blocks of a prompt.
    """

    def __init__(self, denoiser: Denoiser, conditions: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
        super().__init__(denoiser)
        self._conditions, self._own = conditions, own

    def __call__(self, **named: Tensor) -> Tensor:
        name, x = next(iter(self._conditions.items()))
        blocks = [slice(start, start + len(x)) for start in range(0, len(named[name]), len(x))]
        prompted = [rows for rows in blocks if all(_same(named[name][rows], x) for name, x in self._own.items())]
        given = {name: named[name].clone() for name in self._conditions} if prompted else {}
        for name, x in self._conditions.items() if prompted else ():
            if x.shape[1:] != given[name].shape[1:] and prompted == blocks:
                # The prompts of another length have a call to themselves.
                given[name] = torch.cat([x.to(named[name])] * len(blocks))
                continue
            if x.shape[1:] != given[name].shape[1:]:
                raise UserError(
                    "a caption has another number of tokens than the negative prompt in the same call",
                    expected=f"{given[name].shape[1]} tokens, as the pipeline makes of prompts of one length",
                    got=f"{x.shape[1]} of '{name}'",
                    remedy="give the captions as model.options.prompts, and calibrate on denoise",
                )
            for rows in prompted:
                given[name][rows] = x.to(named[name])
        return self._denoiser(**named | given)


def _same(x: Tensor, own: Tensor) -> bool:
    if x.shape != own.shape:
        return False
    own = own.to(x.device)
    return bool((x.double() - own.double()).norm() <= _SAME * own.double().norm())
