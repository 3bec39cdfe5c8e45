"""Finds out whether a model's denoiser can apply classifier-free guidance in the place of its sampler.

The sampler runs for two steps with a stand-in that claims to apply guidance, and the stand-in's calls tell.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from trtconvert.bundle import GuidanceRecord
from trtconvert.diffusion_model import Denoiser, DiffusionModel, Sampler, with_guidance
from trtconvert.errors import TrtconvertError, UserError
from trtconvert.guidance import NEGATIVE, SCALE, FusedGuidance
from trtconvert.models.drawings import Stopped
from trtconvert.models.own_sampler import SamplerError
from trtconvert.models.pipelines import ALL_NOISES, PipelineCaller
from trtconvert.runtime.signature import shape_like

_STEPS = 3
"""Steps of the sampler, which ends in the last of them: it does not decode samples."""

_SEEDS = (0, 1)
"""Seeds of samples with different noise, so that their rows can be told apart."""

_REMEDY = "set engine.guidance to separate"

_Dims = dict[str, tuple[int, int, int]]
_FOUND: WeakKeyDictionary[nn.Module, tuple[ref[Sampler], GuidanceRecord, _Dims]] = WeakKeyDictionary()
"""The results by denoiser, with the sampler that was tried."""


def fused_form(model: DiffusionModel) -> DiffusionModel:
    """Returns the model as it is exported with guidance inside, see `with_guidance`.

    Raises:
        UserError: the sampler applies no guidance, or uses the predictions of both halves for more than their sum.
    """
    found = _FOUND.get(model.denoiser)
    if found is None or found[0]() is not model.sample:
        record = _record(model)
        rows = _rows_per_sample(model)
        _refuse_other_guidance(model, record)
        found = _FOUND[model.denoiser] = ref(model.sample), record, _dims_of_samples(model, rows)
    _, record, dims = found
    return with_guidance(model, record, dims)


def _record(model: DiffusionModel) -> GuidanceRecord:
    """Returns the record of guidance whose conditions are all inputs with an entry for each sample."""
    if model.diffusers is not None and (several := model.diffusers.predictions):
        raise _refusal(
            model, "a denoiser of one prediction, which one scale guides", f"one that returns {', '.join(several)}"
        )
    batch, of_samples = model.inputs[0].shape[0], _batch_dims(model)
    others = [spec for spec in model.inputs[1:] if spec.name != model.timestep_input]
    names = [spec.name for spec in others if spec.shape and isinstance(batch, str) and spec.shape[0] in of_samples]
    record = GuidanceRecord(scale=SCALE, negative={name: NEGATIVE + name for name in names})
    if not names:
        raise _refusal(
            model,
            "a condition with an entry for each sample, and any number of samples",
            f"inputs {', '.join(f'{spec.name} {list(spec.shape)}' for spec in model.inputs)}",
        )
    if taken := sorted(record.added & {spec.name for spec in model.inputs}):
        raise _refusal(model, "a model without an input of that name", f"its own input '{taken[0]}'")
    return record


def _batch_dims(model: DiffusionModel) -> set[int | str]:
    """Returns the dimensions that count samples, or several rows for each sample."""
    return {model.inputs[0].shape[0]} | {dim for dim in model.dims if dim.partition("_")[0] == "batch"}


def _sample(model: DiffusionModel, denoiser: Denoiser, seeds: Sequence[int]) -> None:
    """Runs the sampler. The other denoisers of a pipeline return zeros, and it takes enough steps to call this one."""
    caller = getattr(model.sample, "caller", None)
    if not isinstance(caller, PipelineCaller):
        model.sample(denoiser, seeds, steps=_STEPS, solver="ddim")
        return
    with caller.others_idling() as others:
        model.sample(denoiser, seeds, steps=ALL_NOISES if others else _STEPS, solver="ddim")


def _rows_per_sample(model: DiffusionModel) -> int:
    seen: list[int] = []

    def denoiser(*inputs: Tensor, **named: Tensor) -> Tensor:
        seen.append(model.named(inputs, named)[model.inputs[0].name].shape[0])
        raise Stopped

    with suppress(Stopped):
        _sample(model, denoiser, _SEEDS[:1])
    rows = seen[0] if seen else 0
    if rows not in (1, 2):
        raise _refusal(model, "one or two rows for each sample in a call of the denoiser", str(rows))
    return rows


def _dims_of_samples(model: DiffusionModel, rows: int) -> _Dims:
    """Returns the model's dimensions, with those that count rows counting samples.

    Args:
        rows: for each sample in a pipeline's call; the smallest sizes are those of a call without guidance. Other models have two
            rows for each sample.
    """
    per_sample = rows if model.diffusers is not None else 2
    dims, of_samples = dict(model.dims), _batch_dims(model)
    for dim, (low, opt, high) in model.dims.items():
        if dim in of_samples:
            if high < per_sample:
                raise _refusal(model, f"a denoiser of {per_sample} rows or more", f"{dim} up to {high}")
            low = low if model.diffusers is not None else -(-low // per_sample)
            high //= per_sample
            dims[dim] = (min(low, high), min(max(opt // per_sample, low), high), high)
    return dims


@dataclass
class _StandIn:
    """Replaces a denoiser that applies guidance itself, and counts its calls.

    Attributes:
        guidance: of the denoiser.
        alone: calls for one half alone.
        guided: calls with both halves.
        foreign: calls without the inputs that guidance adds.
    """

    model: DiffusionModel
    guidance: FusedGuidance
    alone: int = 0
    guided: int = 0
    foreign: int = 0
    _timesteps: frozenset[float] = frozenset()

    def __call__(self, *inputs: Tensor, **named: Tensor) -> Tensor:
        given = self.model.named(inputs, named)
        if not self.guidance.record.added <= given.keys():
            self.foreign += 1
            raise Stopped
        if all(given[twin] is given[name] for name, twin in self.guidance.record.negative.items()):
            self.alone += 1
            raise Stopped
        self._timesteps |= {float(given[self.model.timestep_input].flatten()[0])}
        if len(self._timesteps) == _STEPS:
            raise Stopped
        self.guided += 1
        first = given[self.model.inputs[0].name]
        drawn = torch.Generator().manual_seed(self.guided)
        return torch.randn(shape_like(self.guidance.output, first), generator=drawn)


def _refuse_other_guidance(model: DiffusionModel, record: GuidanceRecord) -> None:
    stand_in = _StandIn(model, FusedGuidance(record, model.output.shape))
    try:
        _sample(model, stand_in, _SEEDS)
    except Stopped:
        pass
    except SamplerError:
        raise
    except TrtconvertError as error:
        # A pipeline may fail at its end with the stand-in's predictions; its calls until then tell enough.
        if not stand_in.guided:
            got = error.got if isinstance(error, UserError) else str(error)
            raise _refusal(
                model, "a sampler with guidance, and with a condition for no class or prompt", got
            ) from error
    if stand_in.foreign:
        raise _refusal(
            model,
            "a sampler that calls trtconvert.models.sample with conditions and null_conditions",
            "one that calls the denoiser itself, with the inputs of a denoiser without guidance",
        )
    if stand_in.guided and not stand_in.alone:
        return
    if stand_in.guided:
        raise _refusal(
            model,
            "a sampler that uses nothing but the sum u + s · (c − u) of both predictions",
            "one that also uses the prediction of one half, as for guidance_rescale, norms of guided predictions and variances "
            "of a half",
        )
    raise _refusal(
        model,
        "a sampler that adds up predictions with two conditions of the same samples, as u + s · (c − u)",
        _why_alone(model),
    )


def _why_alone(model: DiffusionModel) -> str:
    config: Mapping[str, object] = model.diffusers.config if model.diffusers is not None else {}
    if config.get("guidance_embeds") or config.get("guidance_embed"):
        return "one that passes the scale of guidance to the denoiser, which is called once for each sample"
    return (
        "one that uses each prediction alone: it draws without guidance, as at guidance_scale 1 in model.options.call, or "
        "both halves differ in more than the conditions"
    )


def _refusal(model: DiffusionModel, expected: str, got: str) -> UserError:
    return UserError(
        f"the denoiser of {model.name} cannot apply guidance inside, as engine.guidance: fused asks",
        expected=expected,
        got=got,
        remedy=_REMEDY,
    )
