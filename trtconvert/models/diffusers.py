"""The denoiser of a diffusers pipeline as a `DiffusionModel`, with the pipeline as its sampler."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from PIL.Image import Image
from torch import Tensor, nn
from torch.nn.functional import pad

from trtconvert.attention.schedules import scheduler_sigmas
from trtconvert.bundle import ComponentRecord, DiffusersRecord
from trtconvert.diffusion_model import OF_NOISE, Denoiser, DiffusionModel, ImageEncoder, InputSpec, resized
from trtconvert.errors import UserError
from trtconvert.fake_tensors import in_float32_shapes
from trtconvert.guidance import FusedGuidance, guidance_of
from trtconvert.images import read_picture
from trtconvert.interception import first_tensor
from trtconvert.models.captions import Captions
from trtconvert.models.components import PipelineComponents, plain_attributes
from trtconvert.models.exportable import make_exportable
from trtconvert.models.loading import load_pipeline
from trtconvert.models.pipelines import (
    BATCH,
    LENGTH,
    PROMPTS,
    TIMESTEPS,
    TOKENS,
    Observed,
    PipelineCaller,
    Sizes,
    observe_sizes,
    plain_config,
    refuse_unfit,
    refuse_unknown,
    shapes_of,
    size_range,
)
from trtconvert.models.probes import first_inputs, first_timesteps
from trtconvert.models.prompt_lengths import prompt_lengths, settled_lengths
from trtconvert.models.saved import DENOISERS
from trtconvert.models.size_steps import OperationLog, Range, refuse_between_steps, steps_of
from trtconvert.noise_input import NoiseInput
from trtconvert.reuse.schedule import Scheduler, reuse_of
from trtconvert.runtime.arguments import parameters_of, put_together, with_least_rows
from trtconvert.runtime.diffusers import DiffusersDenoiser, NotConverted, follow_scheduler
from trtconvert.runtime.signature import shape_of
from trtconvert.runtime.trajectory import apart, begin

SOUND_ROW = 256
"""Amplitudes that lie side by side where a sound is looked at as a picture."""


def diffusers_model(
    weights: Path,
    *,
    height: Sizes = None,
    width: Sizes = None,
    frames: Sizes = None,
    batch: Sizes = None,
    tokens: Sizes = None,
    prompts: Sequence[str] = PROMPTS,
    call: Mapping[str, Any] | None = None,
    denoiser: str | None = None,
    variant: str | None = None,
    ignore: Sequence[str] = (),
    config: Path | None = None,
    images: Mapping[str, Path | list[Path]] | None = None,
) -> DiffusionModel:
    """The denoiser of a pipeline, with the pipeline as its sampler.

    Args:
        weights: folder that the pipeline's `save_pretrained` wrote, or one file of weights, as they are published. Nothing is
            downloaded. Text encoders may be absent: the prompt embeddings are then noise, seeded by the sample.
        height, width: of the images in pixels; frames: of videos. A size, or [min, opt, max] for an engine that takes a range.
        batch: images per call of the pipeline, [1, 2, 8] by default. Pipelines with guidance call the denoiser with twice
            as many.
        tokens: of prompts: a number that the pipeline pads them to, or [min, opt, max], in which embeddings that are given to the
            pipeline, or prompts that it does not pad, may have any length. By default as many as the pipeline gives each prompt,
            and 77 in embeddings that are noise.
        prompts: what samples show, by turns.
        call: further arguments of the pipeline's call, such as guidance_scale.
        denoiser: which of the pipeline's components it is, where there are several: `transformer_2` of Wan 2.2.
        variant: of the files of weights, such as fp16; by default those without one, or the only one that there is.
        ignore: patterns of names in the files that the models may do without.
        config: for a file of weights, the folder of a pipeline with all that the file does not hold.
        images: files of images that the pipeline's call takes, by its arguments, or lists of them. All samples are of them.
    Raises:
        UserError: no such pipeline, or one whose denoiser an engine cannot take.
        BackendUnavailable: diffusers is not installed.
    """
    refuse_unfit(prompts, call or {})
    pipe = load_pipeline(weights, config=config, denoiser=denoiser, variant=variant, ignore=ignore)
    component = _denoiser(pipe, DENOISERS if denoiser is None else (denoiser,))
    length = None if tokens is None else size_range(TOKENS, tokens)
    caller = PipelineCaller(
        pipe, component, length and length[1], tuple(prompts), dict(call or {}), _pictures(images or {})
    )
    wanted = {"batch": BATCH if batch is None else batch, "height": height, "width": width, "frames": frames}
    ranges = {name: size_range(name, size) for name, size in wanted.items() if size is not None}
    with in_float32_shapes(getattr(pipe, component).requires_grad_(False)), caller.encoding_once():
        return _observed(caller, length, ranges)


def _observed(caller: PipelineCaller, length: Range | None, ranges: dict[str, Range]) -> DiffusionModel:
    """What a pipeline passes to its denoiser, as a model.

    Args:
        length: of prompts, see `tokens` of `diffusers_model`; ranges: of the other sizes.
    """
    pipe, component = caller.pipe, caller.component
    refuse_unknown(caller, ranges)
    sizes = {name: opt for name, (_, opt, _) in ranges.items()}
    varied = settled_lengths(caller, length, sizes)
    lengthened = ranges if varied is None else ranges | {TOKENS: varied}
    inputs, schedule = observe_sizes(caller.denoiser_arguments, lengthened), _schedule(pipe)
    timestep = _timestep(inputs)
    first, *others = (name for name in inputs.example if name != timestep)
    model: nn.Module = getattr(pipe, component)
    make_exportable(model)
    record = DiffusersRecord(
        pipeline=type(pipe).__name__,
        component=component,
        model=type(model).__name__,
        config=plain_config(model.config),  # type: ignore[arg-type]  # a diffusers model has one
        output="",
        parameters=parameters_of(model.forward),
        arguments=with_least_rows(inputs.structure, inputs.least_rows),
        timestep_factor=1.0,
        attributes=plain_attributes(model),
        padded_by=LENGTH if caller.pads else "",
        scheduler=type(pipe.scheduler).__name__,
    )
    flat = FlatDenoiser(model, record, timestep).eval().requires_grad_(False)
    batch = inputs.example[first].shape[0]
    named = {**inputs.example, timestep: torch.zeros(batch)}
    shape, flat.record = _output(flat, inputs, named)
    specs = {
        name: InputSpec(name, "float32" if x.is_floating_point() else "int64", inputs.shapes[name])
        for name, x in inputs.example.items()
    }
    specs[timestep] = InputSpec(timestep, "float32", inputs.shapes[first][:1])
    steps = _steps(flat, inputs.dims, specs, named, shape)
    refuse_between_steps(steps, inputs.dims, lengthened, flat.record.model)
    _refuse_largest(flat, inputs.dims, specs, named)
    flat.record = _with_counted_parts(caller, flat.record, timestep, sizes)
    seen = first_timesteps(caller, flat.record, timestep, sizes, shape)
    if schedule.noise_input is None and max(seen) <= 1:  # some flow-matching pipelines divide their timesteps by 1000
        flat.record = flat.record.model_copy(update={"timestep_factor": 1 / schedule.timesteps})
    _refuse_rising_shares(flat.record, seen)
    schedule = schedule.followed(rising=seen[-1] > seen[0])
    # A pipeline that changes its model while it draws is refused now, rather than by the first samples of what was built.
    first_inputs(caller, flat.record, timestep, range(sizes["batch"]), sizes)
    lengths = varied
    if varied is not None and caller.takes_prompts and not caller.pads:
        lengths = prompt_lengths(caller, inputs, flat.record, timestep, varied, sizes, shape)
    components = PipelineComponents(caller, ranges, flat.record, timestep, shape, lengths)
    sampler = PipelineSampler(caller, flat.record, timestep, sizes, ranges["batch"][2])
    shares = flat.record.timestep_shares
    return DiffusionModel(
        name=f"{type(pipe).__name__} {component}",
        denoiser=flat,
        inputs=tuple(specs[name] for name in (first, timestep, *others)),
        output=InputSpec("prediction", "float32", shape),
        timestep_input=timestep,
        timestep_max=float(len(schedule.sigmas)),
        sigmas=schedule.sigmas,
        dims=inputs.dims,
        steps=steps,
        sample=sampler,
        encoder=_encoder(pipe, inputs.example[first]),
        condition=sampler.captions if caller.takes_prompts else None,
        signal=schedule.signal,
        noise_input=schedule.noise_input,
        diffusers=flat.record,
        components=components,
        notices=(*components.drawn(), *_of_sound(pipe)),
        as_passed={
            name: x
            for name, x in inputs.example.items()
            if name not in (first, timestep) and (name in shares or OF_NOISE.fullmatch(name) or _is_set(name, inputs))
        },
    )


def pipeline_sampler(
    pipe: Any,
    component: ComponentRecord,
    options: Mapping[str, Any],
    prompts: Sequence[str] = (),
    images: Mapping[str, Path | list[Path]] | None = None,
) -> PipelineSampler:
    """What samples with a pipeline that is made of a bundle's components.

    Args:
        component: the denoiser's record in the manifest; options: of the recipe, see `diffusers_model`.
        prompts: instead of the recipe's; images: see `diffusers_model`.
    """
    assert component.diffusers is not None
    caller = PipelineCaller(
        pipe,
        component.diffusers.component,
        None if options.get(TOKENS) is None else size_range(TOKENS, options[TOKENS])[1],
        tuple(prompts or options.get("prompts", PROMPTS)),
        dict(options.get("call") or {}),
        _pictures(images or {}),
    )
    caller.pads = bool(component.diffusers.padded_by)
    sizes = {
        name: size_range(name, options[name])[1]
        for name in ("height", "width", "frames")
        if options.get(name) is not None
    }
    batch = size_range("batch", options.get("batch") or BATCH)[2]
    return PipelineSampler(caller, component.diffusers, component.timestep_input, sizes, batch)


def _pictures(files: Mapping[str, Path | list[Path]]) -> dict[str, Image | list[Image]]:
    def read(path: Path) -> Image:
        return read_picture(path, "correct model.images in the recipe")

    return {name: list(map(read, of)) if isinstance(of, list) else read(of) for name, of in files.items()}


class FlatDenoiser(nn.Module):
    """A diffusers model that takes named tensors by name and gives its prediction.

    The model is its one submodule, under the name that the pipeline has for it, so that sites and weights are called as in
    the pipeline.

    Args:
        model: a diffusers model; record: how the pipeline calls it; timestep_input: the timestep's name, [B] FP32.
    """

    def __init__(self, model: nn.Module, record: DiffusersRecord, timestep_input: str) -> None:
        super().__init__()
        self.add_module(record.component, model)
        self.record, self.timestep_input = record, timestep_input

    def forward(self, **named: Tensor) -> Tensor:
        """The tensors of the record's structure by name → the prediction; several side by side, [B, N]."""
        if fields := self.record.predictions:
            output = self.call(named, return_dict=True)
            return torch.cat([output[field].flatten(1) for field in fields], dim=1)
        return first_tensor(self.call(named, return_dict=False))

    def call(self, named: Mapping[str, Tensor], return_dict: bool) -> Any:
        """What the model returns."""
        timestep = named[self.timestep_input] * self.record.timestep_factor
        arguments = put_together(self.record.arguments, {**named, self.timestep_input: timestep})
        return getattr(self, self.record.component)(**arguments, return_dict=return_dict)


@dataclass(frozen=True)
class PipelineSampler:
    """The pipeline's own denoising with any denoiser, see `trtconvert.diffusion_model.Sampler`.

    Args:
        caller: calls the pipeline; record, timestep_input: see `DiffusersDenoiser`.
        sizes: of the samples; batch: samples drawn at once.
    """

    caller: PipelineCaller
    record: DiffusersRecord
    timestep_input: str
    sizes: Mapping[str, int]
    batch: int

    @cached_property
    def captions(self) -> Captions:
        """What the pipeline makes of captions."""
        return Captions(self.caller, self.sizes, self.record, self.timestep_input)

    def __call__(
        self,
        denoiser: Denoiser,
        seeds: Sequence[int],
        *,
        steps: int,
        solver: str,
        conditions: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        """Images, or the channels of latents one below the other where the pipeline has no decoder; frames likewise. Where the
        pipeline's strength leaves none of so few steps, it takes one.

        Raises:
            UserError: another solver than "ddim", which stands for the pipeline's own scheduler; or so few steps that the
                pipeline, which has several denoisers, does not come to this one.
        """
        if solver != "ddim":
            raise UserError(
                "a diffusers pipeline samples with its own scheduler",
                expected=f"ddim, which stands for it: {type(self.caller.pipe.scheduler).__name__}",
                got=solver,
                remedy="leave the solver out, or save the pipeline with another scheduler",
            )
        # An engine has a device, and the pipeline goes there; other denoisers take tensors from the CPU to theirs.
        device = getattr(denoiser, "device", torch.device("cpu"))
        images, counted = [], _Counted(denoiser)
        for start in range(0, len(seeds), self.batch):
            chunk = seeds[start : start + self.batch]
            given = {name: x[start : start + self.batch] for name, x in (conditions or {}).items()}
            captioned = self.captions.given_to(counted, given) if given else counted
            captions = [self.captions.stand_in] * len(chunk) if given else None
            begin(denoiser)
            images.append(self.draw(captioned, device, chunk, steps, captions))
        if not counted.calls:
            raise UserError(
                f"{self.record.pipeline} does not call its {self.record.component} in {steps} steps",
                expected="steps that come to the noise which it is for",
                got="images that it has no part in",
                remedy="take more steps",
            )
        return torch.cat(images)

    def draw(
        self,
        denoiser: Denoiser,
        device: torch.device,
        seeds: Sequence[int],
        steps: int,
        captions: Sequence[str] | None = None,
    ) -> Tensor:
        """Images of one call of the pipeline.

        Args:
            device: of the denoiser's inputs; captions: one per seed, instead of the prompts.
        Raises:
            UserError: see `PipelineCaller`.
        """
        dropped_in = DiffusersDenoiser(denoiser, self.record, self.timestep_input, dtype=torch.float32, device=device)
        follow_scheduler(dropped_in, self.caller.pipe)
        with torch.no_grad(), self.caller.denoising_with(dropped_in):
            drawn = self.caller(seeds, self.caller.taken_steps(steps), self.sizes, captions)
        return as_images(drawn.cpu(), decoded=self.caller.decodes)


@dataclass
class _Counted:
    """A denoiser, and how often it was called."""

    denoiser: Denoiser
    calls: int = 0
    part_of: _Counted | None = None

    @property
    def guidance(self) -> FusedGuidance | None:
        return guidance_of(self.denoiser)

    @property
    def reuse(self) -> Scheduler | None:
        return reuse_of(self.denoiser)

    def __call__(self, **named: Tensor) -> Tensor:
        (self.part_of or self).calls += 1
        return self.denoiser(**named)

    def reset_cache(self) -> None:
        begin(self.denoiser)

    def apart(self) -> _Counted:
        return _Counted(apart(self.denoiser), part_of=self.part_of or self)


def as_images(output: Tensor, *, decoded: bool) -> Tensor:
    """What a pipeline gives as [N, C, H, W] in [0, 1].

    Args:
        output: images [N, C, H, W], videos [N, F, C, H, W], sounds [N, C, S] in [-1, 1], or latents [N, …, H, W] of about unit
            variance.
    """
    if not decoded:
        output = (output.float() / 8 + 0.5).clamp(0, 1)  # four standard deviations to either side
        return output.flatten(1, -2)[:, None]
    if output.dim() == 3:
        amplitudes = output.float() / 2 + 0.5
        filled = pad(amplitudes, (0, -amplitudes.shape[2] % SOUND_ROW), value=0.5)
        return filled.unflatten(2, (-1, SOUND_ROW)).flatten(1, 2)[:, None].clamp(0, 1)
    if output.dim() == 5:
        output = output.transpose(1, 2).flatten(2, 3)
    return output.float().clamp(0, 1)


def _denoiser(pipe: Any, names: Sequence[str]) -> str:
    """The first of the names that is a model of the pipeline.

    Raises:
        UserError: none is.
    """
    models = [name for name, part in pipe.components.items() if isinstance(part, nn.Module)]
    found = next((name for name in names if name in models), None)
    if found is None:
        raise UserError(
            f"{type(pipe).__name__} has no denoiser" + (f" '{names[0]}'" if len(names) == 1 else ""),
            expected=" or ".join(names) + " among its models",
            got=", ".join(models) or "no models",
            remedy="convert a pipeline that denoises with one model, or name it in model.options.denoiser",
        )
    return found


def _of_sound(pipe: Any) -> tuple[str, ...]:
    """What to know of a pipeline that draws sound."""
    if not getattr(getattr(pipe, "vae", None), "config", {}).get("sampling_rate"):
        return ()
    return (
        f"{type(pipe).__name__} draws sound: PSNR is that of its amplitudes at full scale, which pictures show as grey, "
        f"{SOUND_ROW} a row",
    )


# What the pipeline tells ----------------------------------------------------------------------------------------------


def _timestep(inputs: Observed) -> str:
    """The timestep's name.

    Raises:
        UserError: there is none that is of samples.
    """
    named = next((name for name in TIMESTEPS if name in inputs.example), TIMESTEPS[0])
    x = inputs.example.get(named)
    batch = next(x for name, x in inputs.example.items() if name != named).shape[0]
    if x is not None and x.dim() < 2 and x.numel() in (1, batch):
        return named
    raise UserError(
        "the pipeline gives its denoiser no timestep that an engine can follow",
        expected=f"{' or '.join(map(repr, TIMESTEPS))}: one for all samples, one for each, or several for each, [samples, …]",
        got=", ".join(inputs.example) if x is None else f"one of shape {list(x.shape)} for {batch} samples",
        remedy="keep the pipeline as it is, or convert its denoiser through a function of your own, model.source: "
        "package.module:function, whose forward takes one timestep for each sample",
    )


def _refuse_rising_shares(record: DiffusersRecord, timesteps: Sequence[float]) -> None:
    """
    Raises:
        UserError: timesteps of tokens rise while samples are drawn. The noisiest of a sample is taken to have the largest.
    """
    if record.timestep_shares and timesteps[-1] > timesteps[0]:
        raise UserError(
            f"{record.pipeline} passes timesteps of tokens or frames that rise while noise is taken away",
            expected="timesteps that fall, of which the largest of a sample is that of its noisiest token",
            got=f"{timesteps[0]:g}, and then {timesteps[-1]:g}",
            remedy="keep the pipeline as it is, or convert its denoiser through a function of your own, model.source: "
            "package.module:function, whose timesteps fall",
        )


def _with_counted_parts(
    caller: PipelineCaller, record: DiffusersRecord, timestep: str, sizes: Mapping[str, int]
) -> DiffusersRecord:
    """The record with parts that the pipeline asks its model for before it calls it: lists of parts, as BriaFibo's counts blocks
    to have an embedding for each, which are numbers, so that what looks into one is refused when it does; and parts without
    weights, as LTX-2's has its model's rotations make positions of sizes."""
    parts = dict(getattr(caller.pipe, caller.component).named_children())
    while True:
        try:
            first_inputs(caller, record, timestep, [0], sizes)
            return record
        except NotConverted as error:
            part = parts.pop(error.name, None)
            if isinstance(part, nn.ModuleList):
                node: dict[str, Any] = {"value": list(range(len(part)))}
            elif part is not None and not [*part.parameters(), *part.buffers()]:
                node = {"part": True}
            else:
                return record  # what follows tells of it
            record = record.model_copy(update={"attributes": record.attributes | {error.name: node}})


def _is_set(name: str, inputs: Observed) -> bool:
    """Whether an input is nothing that a sample is made of: whole numbers and masks, what samples share, such as rotations, or
    what is the same for all of them, such as sizes and an empty prompt. Noise in its place would leave what a calibration saw."""
    rows, shape = inputs.calls[-1][name], inputs.shapes[name]
    of_samples = any(isinstance(size, str) and size.startswith("batch") for size in shape)
    same = rows.dim() > 0 and len(rows) > 1 and bool((rows == rows[:1]).all())
    whole = not rows.is_floating_point() or bool(((rows == 0) | (rows == 1)).all())
    return whole or not of_samples or same


@dataclass(frozen=True)
class _Schedule:
    """Noise of a pipeline's scheduler.

    Attributes:
        timesteps: of the training.
        sigmas, signal, noise_input: see `DiffusionModel`.
    """

    timesteps: int
    sigmas: Tensor
    signal: Tensor | None
    noise_input: NoiseInput | None = None

    def followed(self, *, rising: bool) -> _Schedule:
        """The schedule of a pipeline whose timesteps rise, or fall, while it draws.

        In flow matching they rise where they stand for the share of the image, as those of Lumina and Mochi do, whose schedulers
        invert sigmas or whose pipelines pass 1 - σ. Timesteps of a diffusion's table mean the same in any order.
        """
        if not rising or self.signal is None or self.noise_input is not None:
            return self
        return _Schedule(self.timesteps, self.sigmas.flip(0), self.signal.flip(0))


def _schedule(pipe: Any) -> _Schedule:
    scheduler = pipe.scheduler
    if (noise := scheduler_sigmas(scheduler)) is not None:
        return _Schedule(int(scheduler.config.num_train_timesteps), noise.sigmas, noise.signal, noise.noise_input)
    raise UserError(
        f"the noise of {type(scheduler).__name__} is not known",
        expected="a scheduler with alphas_cumprod, of flow matching, of EDM or of consistency models",
        got=type(scheduler).__name__,
        remedy="save the pipeline with such a one, where its model was trained for that, or convert it through a function of "
        "your own, model.source: package.module:function, that says how it is told the noise (docs/entry-points.md)",
    )


def _output(
    flat: FlatDenoiser, inputs: Observed, named: Mapping[str, Tensor]
) -> tuple[tuple[int | str, ...], DiffusersRecord]:
    """The output's symbolic shape, and the record with the class that forward returns it in. Nothing is computed."""
    first = next(name for name in named if name != flat.timestep_input)
    output = shapes_of(
        lambda tensors: flat.call(tensors, return_dict=True),
        named,
        flat.record.model,
        f"keep the pipeline's own {flat.record.component}, or convert it through a function of your own, model.source: "
        "package.module:function, whose module computes the same whatever it is given, as with prompts padded to one length",
    )
    _refuse_further_results(flat.record, output)
    sizes, symbolic = named[first].shape, inputs.shapes[first]
    name = f"{type(output).__module__}:{type(output).__qualname__}"
    fields = {field: x for field, x in output.items() if isinstance(x, Tensor)} if isinstance(output, Mapping) else {}
    if len(fields) > 1:
        _refuse_unfit_predictions(flat.record.model, fields, sizes[0], inputs.dims)
        predictions = {field: list(x.shape[1:]) for field, x in fields.items()}
        count = sum(map(math.prod, predictions.values()))
        return (symbolic[0], count), flat.record.model_copy(update={"output": name, "predictions": predictions})
    shape = tuple(first_tensor(output).shape)
    if len(shape) != len(sizes) or isinstance(output, (Tensor, tuple)):
        raise UserError(
            f"what {flat.record.model} returns cannot be used",
            expected=f"an output class with a prediction of {len(sizes)} dimensions, as what it denoises has",
            got=f"{type(output).__name__}, {list(shape)}",
            remedy="convert it through a function of your own, model.source: package.module:function",
        )
    named_shape = tuple(dim if size == given else size for size, given, dim in zip(shape, sizes, symbolic, strict=True))
    return named_shape, flat.record.model_copy(update={"output": name})


def _refuse_further_results(record: DiffusersRecord, output: Any) -> None:
    """
    Raises:
        UserError: the model returns something beside tensors, which a pipeline hands to its next calls.
    """
    fields = output.items() if isinstance(output, Mapping) else ()
    further = {name: type(x).__name__ for name, x in fields if not isinstance(x, (Tensor, list, tuple))}
    if further:
        name, kind = next(iter(further.items()))
        raise UserError(
            f"{record.model} gives '{name}' beside its prediction, which {record.pipeline} hands to its next calls",
            expected="predictions, which are tensors: an engine computes the same in every step",
            got=kind,
            remedy=f"call the pipeline without what asks for {name}, such as an image or a setting in model.options.call, or "
            f"keep the pipeline's own {record.component}",
        )


def _refuse_unfit_predictions(
    model: str, fields: Mapping[str, Tensor], rows: int, dims: Mapping[str, tuple[int, int, int]]
) -> None:
    """
    Args:
        fields: what the model returns, by name; rows: of what it denoises; dims: symbolic dimension: (min, opt, max).
    Raises:
        UserError: a field has no entry for each row, or sizes vary: an engine gives all predictions of a row side by side.
    """
    if unfit := [name for name, x in fields.items() if x.dim() < 2 or len(x) != rows]:
        raise UserError(
            f"what {model} returns cannot be used",
            expected=f"predictions [{rows}, …] of {rows} samples",
            got=f"'{unfit[0]}' of shape {list(fields[unfit[0]].shape)}",
            remedy="convert it through a function of your own, model.source: package.module:function, whose forward gives the "
            "prediction alone",
        )
    varying = [name for name, (low, _, high) in dims.items() if low < high and not name.startswith("batch")]
    if varying:
        raise UserError(
            f"{model} gives several predictions, {', '.join(fields)}, of sizes that vary",
            expected="one size of each",
            got=f"a range of {', '.join(varying)}",
            remedy="give model.options.height, width, frames and tokens as one number each, and build a bundle for each",
        )


def _steps(
    flat: FlatDenoiser,
    dims: Mapping[str, tuple[int, int, int]],
    specs: Mapping[str, InputSpec],
    named: Mapping[str, Tensor],
    output: Sequence[int | str],
) -> dict[str, int]:
    """In which steps sizes may vary, see `steps_of`. Nothing is computed."""

    def run(sizes: Mapping[str, int]) -> list[tuple[Any, ...]]:
        log = OperationLog()

        def logged(tensors: Mapping[str, Tensor]) -> Tensor:
            with log:
                return flat(**tensors)

        tensors = {name: resized(x, specs[name], sizes) for name, x in named.items()}
        shape = shapes_of(logged, tensors, flat.record.model, "give model.options one size instead of a range").shape
        return [*log.operations, ("output", tuple(shape) == shape_of(output, sizes))]

    return steps_of(run, dims)


def _refuse_largest(
    flat: FlatDenoiser,
    dims: Mapping[str, tuple[int, int, int]],
    specs: Mapping[str, InputSpec],
    named: Mapping[str, Tensor],
) -> None:
    """
    Raises:
        UserError: the model does not take the largest sizes, as where it has no positions for them. Nothing is computed.
    """
    if all(low == high for name, (low, _, high) in dims.items() if not name.startswith("batch")):
        return
    largest = {name: high for name, (_, _, high) in dims.items()}
    tensors = {name: resized(x, specs[name], largest) for name, x in named.items()}
    shapes_of(
        lambda tensors: flat.call(tensors, return_dict=True),
        tensors,
        flat.record.model,
        "give model.options.height, width, frames and tokens smaller numbers",
    )


def _encoder(pipe: Any, latents: Tensor) -> ImageEncoder | None:
    """The VAE's encoder, for denoisers of plain latents [B, C, H, W]; what makes pixels of [-1, 1], for those of images."""
    others = [part for part in pipe.components.values() if hasattr(part, "encode") and isinstance(part, nn.Module)]
    if not others and latents.dim() == 4 and latents.shape[1] == 3:
        return ImageEncoder((3, latents.shape[2], latents.shape[3]), lambda images: images * 2 - 1)
    vae = getattr(pipe, "vae", None)
    config = getattr(vae, "config", {})
    if (
        vae is None
        or latents.dim() != 4
        or config.get("latent_channels") != latents.shape[1]
        or "scaling_factor" not in config
    ):
        return None
    smaller = getattr(pipe, "vae_scale_factor", None)
    if (
        smaller is None
    ):  # DiT's pipeline says nothing; where one does, its VAE may name its blocks otherwise, as SANA's does
        smaller = 2 ** (len(config["block_out_channels"]) - 1)
    height, width = (smaller * size for size in latents.shape[2:])
    # Some finetuned SDXL, such as Playground v2.5, have their own of each channel.
    mean, std = (config.get(name) for name in ("latents_mean", "latents_std"))
    if mean is None or std is None:
        mean, std = [config.get("shift_factor") or 0.0], [1.0]
    mean, std = (torch.tensor(numbers).view(1, -1, 1, 1) for numbers in (mean, std))

    def encode(images: Tensor) -> Tensor:
        with torch.no_grad():
            encoded = vae.encode((images * 2 - 1).to(vae.device))
        # Those that draw latents give a Gaussian, the others, as AutoencoderTiny, latents.
        mode = encoded.latent_dist.mode() if hasattr(encoded, "latent_dist") else encoded[0]
        encoded = mode.to(images.device)
        return (encoded - mean.to(encoded)) / std.to(encoded) * config["scaling_factor"]

    return ImageEncoder((3, height, width), encode)
