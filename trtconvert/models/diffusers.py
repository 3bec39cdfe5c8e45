"""The denoiser of a diffusers pipeline as a `DiffusionModel`, with the pipeline as its sampler."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trtconvert.attention.schedules import SchedulerNoise, log_sigma_noise, scheduler_sigmas
from trtconvert.bundle import DiffusersRecord
from trtconvert.diffusion_model import OF_NOISE, DiffusionModel, ImageEncoder, InputSpec, resized
from trtconvert.errors import UserError
from trtconvert.fake_tensors import in_float32_shapes
from trtconvert.interception import first_tensor
from trtconvert.models.call_options import BATCH, LENGTH, PROMPTS, TIMESTEPS, TOKENS, Sizes, refuse_unfit, size_range
from trtconvert.models.components import PipelineComponents, plain_attributes, plain_config
from trtconvert.models.exportable import make_exportable
from trtconvert.models.loading import load_pipeline
from trtconvert.models.observation import DoesNotRun, Observed, observe_sizes, shapes_of
from trtconvert.models.pipeline_sampler import PipelineSampler, notices_of_sound, read_pictures
from trtconvert.models.pipelines import CLEANING, PipelineCaller
from trtconvert.models.probes import changed_in_batch, first_inputs, first_step
from trtconvert.models.prompt_lengths import prompt_lengths, settled_lengths
from trtconvert.models.saved import denoiser_among
from trtconvert.models.size_steps import OperationLog, Range, refuse_between_steps, steps_of
from trtconvert.noise_input import NoiseInput
from trtconvert.runtime.arguments import parameters_of, put_together, with_least_rows
from trtconvert.runtime.diffusers import NotConverted
from trtconvert.runtime.signature import shape_of

_OWN_FUNCTION = "convert it through a function of your own, model.source: package.module:function"


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
    """Loads a pipeline and returns its denoiser as a model.

    Args:
        weights: folder that the pipeline's `save_pretrained` wrote, or a published file of weights. Nothing is downloaded.
            Without text encoders the prompt embeddings are noise, seeded by the sample.
        height, width: of the images in pixels: a size, or [min, opt, max] for an engine that takes a range.
        frames: of videos, likewise.
        batch: images per call of the pipeline, [1, 2, 8] by default. Guidance doubles the rows of the denoiser's calls.
        tokens: of prompts: the number that the pipeline pads prompts to; or [min, opt, max] for prompts that the pipeline does
            not pad, and for embeddings that are given to the pipeline. By default the number that the pipeline gives each prompt,
            and 77 in embeddings of noise.
        prompts: what the samples show, by turns.
        call: further arguments of the pipeline's call, such as guidance_scale.
        denoiser: name of the component to convert, where there are several denoisers: `transformer_2` of Wan 2.2.
        variant: of the files of weights, such as fp16; by default files without a variant, or the only variant.
        ignore: patterns of names in the files that the models may do without.
        config: for a file of weights, the folder of a pipeline with everything that the file does not hold.
        images: files of images, or lists of files, by argument of the pipeline's call. All samples are made from them.
    Raises:
        UserError: there is no such pipeline, or an engine cannot take its denoiser.
        BackendUnavailable: diffusers is not installed.
    """
    refuse_unfit(prompts, call or {})
    pipe = load_pipeline(weights, config=config, denoiser=denoiser, variant=variant, ignore=ignore)
    models = [name for name, part in pipe.components.items() if isinstance(part, nn.Module)]
    component = denoiser_among(models, denoiser, type(pipe).__name__)
    length = None if tokens is None else size_range(TOKENS, tokens)
    caller = PipelineCaller(
        pipe, component, length and length[1], tuple(prompts), dict(call or {}), read_pictures(images or {})
    )
    wanted = {"batch": BATCH if batch is None else batch, "height": height, "width": width, "frames": frames}
    ranges = {name: size_range(name, size) for name, size in wanted.items() if size is not None}
    with in_float32_shapes(getattr(pipe, component).requires_grad_(False)), caller.encoding_once():
        try:
            return _observed(caller, length, ranges)
        except DoesNotRun as error:
            if ranges["batch"][2] == 1 or not _draws_alone(caller, length, ranges):
                raise
            raise UserError(
                f"{caller.kind} draws one sample in a call",
                expected="batch: 1",
                got=f"batch: {list(ranges['batch'])}, and {error.got}",
                remedy="give model.options.batch as 1",
            ) from error


def _draws_alone(caller: PipelineCaller, length: Range | None, ranges: Mapping[str, Range]) -> bool:
    try:
        _observed(caller, length, {**ranges, "batch": (1, 1, 1)})
    except UserError:
        return False
    return True


def _observed(caller: PipelineCaller, length: Range | None, ranges: dict[str, Range]) -> DiffusionModel:
    """Observes the denoiser's inputs and returns the model. length: of prompts, see `tokens` of `diffusers_model`."""
    pipe, component = caller.pipe, caller.component
    caller.refuse_unfit_sizes(ranges)
    sizes = {name: opt for name, (_, opt, _) in ranges.items()}
    varied = settled_lengths(caller, length, sizes)
    lengthened = ranges if varied is None else ranges | {TOKENS: varied}
    inputs, schedule = observe_sizes(caller.denoiser_arguments, lengthened), _schedule(pipe)
    timestep = _timestep_name(inputs)
    first, *others = (name for name in inputs.example if name != timestep)
    model: nn.Module = caller.denoiser
    make_exportable(model)
    record = DiffusersRecord(
        pipeline=caller.kind,
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
    shape, flat.record = _output(flat, inputs, named, caller.images)
    specs = inputs.specs
    specs[timestep] = InputSpec(timestep, "float32", inputs.shapes[first][:1])
    steps = _steps(flat, inputs.dims, specs, named, shape)
    refuse_between_steps(steps, inputs.dims, lengthened, flat.record.model)
    _refuse_largest(flat, inputs.dims, specs, named)
    flat.record = _with_counted_parts(caller, flat.record, timestep, sizes)
    seen = first_step(caller, flat.record, timestep, sizes, shape).timesteps
    schedule = schedule.passed(caller, seen)
    if schedule.noise_input is None and schedule.is_share(seen):
        flat.record = flat.record.model_copy(update={"timestep_factor": 1 / schedule.timesteps})
    _refuse_rising_shares(flat.record, seen)
    schedule = schedule.followed(rising=seen[-1] > seen[0])
    # Refuses a pipeline that changes its model while it draws, before anything is built.
    first_inputs(caller, flat.record, timestep, range(sizes["batch"]), sizes)
    lengths = varied
    if varied is not None and caller.takes_prompts and not caller.pads:
        lengths = prompt_lengths(caller, inputs, flat.record, timestep, varied, sizes, shape)
    single = ranges["batch"][2] == 1
    changed = "" if single else changed_in_batch(caller, flat.record, timestep, sizes, shape)
    components = PipelineComponents(caller, ranges, flat.record, timestep, shape, lengths)
    sampler = PipelineSampler(caller, flat.record, timestep, sizes, ranges["batch"][2])
    shares = flat.record.timestep_shares
    return DiffusionModel(
        name=f"{caller.kind} {component}",
        denoiser=flat,
        inputs=tuple(specs[name] for name in (first, timestep, *others)),
        output=InputSpec("prediction", "float32", shape),
        timestep_input=timestep,
        timestep_max=float(len(schedule.sigmas)),
        sigmas=schedule.sigmas,
        dims=inputs.dims,
        steps=steps,
        sample=sampler,
        encoder=_image_encoder(pipe, inputs.example[first]),
        condition=sampler.captions if caller.takes_prompts else None,
        signal=schedule.signal,
        noise_input=schedule.noise_input,
        diffusers=flat.record,
        components=components,
        notices=(
            *components.drawn(),
            *notices_of_sound(pipe),
            *_notices_of_batch(caller.kind, changed),
            *_notices_of_cleaning(caller),
        ),
        as_passed={
            name: x
            for name, x in inputs.example.items()
            if name not in (first, timestep)
            and (name in shares or OF_NOISE.fullmatch(name) or _is_constant(name, inputs))
        },
    )


def _notices_of_batch(kind: str, changed: str) -> tuple[str, ...]:
    """changed: see `changed_in_batch`."""
    if not changed:
        return ()
    return (
        f"{kind} draws a sample otherwise in a call of several than alone: {changed}; model.options.batch: 1 keeps samples apart",
    )


def _notices_of_cleaning(caller: PipelineCaller) -> tuple[str, ...]:
    if not caller.takes_prompts or not (missing := caller.cleaning_lacks):
        return ()
    return (
        f"prompts are not cleaned ({CLEANING}), which needs {' and '.join(missing)}: `pip install {' '.join(missing)}`",
    )


class FlatDenoiser(nn.Module):
    """A diffusers model that takes tensors by name and returns its prediction.

    The model is the one submodule, under its name in the pipeline, so that sites and weights are named as in the pipeline.

    Args:
        model: a diffusers model.
        record: how the pipeline calls the model.
        timestep_input: name of the timestep, [B] FP32.
    """

    def __init__(self, model: nn.Module, record: DiffusersRecord, timestep_input: str) -> None:
        super().__init__()
        self.add_module(record.component, model)
        self.record, self.timestep_input = record, timestep_input

    def forward(self, **named: Tensor) -> Tensor:
        """Takes the tensors of the record's structure by name; returns the prediction, several of them joined as [B, N]."""
        if fields := self.record.predictions:
            output = self.call(named, return_dict=True)
            return torch.cat([output[field].flatten(1) for field in fields], dim=1)
        return first_tensor(self.call(named, return_dict=False))

    def call(self, named: Mapping[str, Tensor], return_dict: bool) -> Any:
        """Returns the model's result."""
        timestep = named[self.timestep_input] * self.record.timestep_factor
        arguments = put_together(self.record.arguments, {**named, self.timestep_input: timestep})
        return getattr(self, self.record.component)(**arguments, return_dict=return_dict)


def _timestep_name(inputs: Observed) -> str:
    """Returns the timestep's name."""
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
        "package.module:function, with a forward that takes one timestep for each sample",
    )


def _refuse_rising_shares(record: DiffusersRecord, timesteps: Sequence[float]) -> None:
    """A sample's noisiest token must have the largest timestep."""
    if record.timestep_shares and timesteps[-1] > timesteps[0]:
        raise UserError(
            f"{record.pipeline} passes timesteps of tokens or frames that rise while noise is taken away",
            expected="timesteps that fall, the largest for a sample's noisiest token",
            got=f"{timesteps[0]:g}, and then {timesteps[-1]:g}",
            remedy="keep the pipeline as it is, or convert its denoiser through a function of your own, model.source: "
            "package.module:function, with falling timesteps",
        )


def _with_counted_parts(
    caller: PipelineCaller, record: DiffusersRecord, timestep: str, sizes: Mapping[str, int]
) -> DiffusersRecord:
    """Returns the record with those submodules that the pipeline reads before it calls its model.

    BriaFibo counts a list of blocks, to pass an embedding for each: the record holds the list as numbers, so that a pipeline that
    uses one of the blocks is refused. LTX-2 has its model's rotations, which have no weights, compute positions.
    """
    parts = dict(caller.denoiser.named_children())
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
                return record  # the next call of `first_inputs` raises
            record = record.model_copy(update={"attributes": record.attributes | {error.name: node}})


def _is_constant(name: str, inputs: Observed) -> bool:
    """Whether an input keeps its values in a calibration on noise: whole numbers and masks, inputs that samples share, such as
    rotations, and inputs that are equal for all samples, such as sizes and an empty prompt."""
    rows, shape = inputs.calls[-1][name], inputs.shapes[name]
    of_samples = any(isinstance(size, str) and size.startswith("batch") for size in shape)
    same = rows.dim() > 0 and len(rows) > 1 and bool((rows == rows[:1]).all())
    whole = not rows.is_floating_point() or bool(((rows == 0) | (rows == 1)).all())
    return whole or not of_samples or same


@dataclass(frozen=True)
class _Schedule:
    """Noise levels of a pipeline's scheduler.

    Attributes:
        timesteps: number of timesteps in training.
        sigmas, signal, noise_input: see `DiffusionModel`.
    """

    timesteps: int
    sigmas: Tensor
    signal: Tensor | None
    noise_input: NoiseInput | None = None

    @property
    def is_table(self) -> bool:
        """Whether timesteps are places in a diffusion table."""
        return self.signal is None and self.noise_input is None

    def is_share(self, seen: Sequence[float]) -> bool:
        """Whether timesteps that a pipeline passes are divided by the number of timesteps, as in some of flow matching."""
        return not self.is_table and max(seen) <= 1

    def passed(self, caller: PipelineCaller, seen: Sequence[float]) -> _Schedule:
        """Returns the schedule of the timesteps that a pipeline passes. Stable Diffusion's latent upscaler has a scheduler of a
        diffusion table, and passes ln σ / 4.

        Args:
            seen: the first timesteps of a run, which the scheduler still has.
        Raises:
            UserError: they are neither places in the scheduler's table, nor ln σ / 4.
        """
        if not self.is_table:
            return self
        scheduler = caller.pipe.scheduler
        of_run = torch.as_tensor(scheduler.timesteps, dtype=torch.float64, device="cpu")
        # A pipeline may round timesteps; ln σ / 4 is below 10.
        if float((of_run - seen[0]).abs().min()) < (1 if seen[0] > 10 else 1e-3):
            return self
        sigmas = getattr(scheduler, "sigmas", None)
        if sigmas is not None:
            c_noise = torch.as_tensor(sigmas, dtype=torch.float64, device="cpu").log() / 4
            if bool((c_noise - seen[0]).abs().min() < 1e-4):
                return _schedule_of(log_sigma_noise(float(self.sigmas[0]), float(self.sigmas[-1])), self.timesteps)
        raise UserError(
            f"{caller.kind} passes timesteps to its {caller.component} that its scheduler does not have",
            expected=f"timesteps of {type(scheduler).__name__}, such as {float(of_run[0]):g}, or a quarter of the logarithm of σ",
            got=", ".join(f"{x:g}" for x in seen),
            remedy=f"keep the pipeline as it is, or {_OWN_FUNCTION}, that declares the noise input (docs/entry-points.md)",
        )

    def followed(self, *, rising: bool) -> _Schedule:
        """Returns the schedule of a pipeline whose timesteps rise, or fall, while it draws.

        In flow matching, timesteps that rise are the share of the image: the schedulers of Lumina and Mochi invert sigmas, or
        their pipelines pass 1 - σ. Timesteps of a diffusion table mean the same in any order.
        """
        if not rising or self.signal is None or self.noise_input is not None:
            return self
        return _Schedule(self.timesteps, self.sigmas.flip(0), self.signal.flip(0))


def _schedule_of(noise: SchedulerNoise, timesteps: int) -> _Schedule:
    return _Schedule(timesteps, noise.sigmas, noise.signal, noise.noise_input)


def _schedule(pipe: Any) -> _Schedule:
    scheduler = pipe.scheduler
    if (noise := scheduler_sigmas(scheduler)) is not None:
        return _schedule_of(noise, int(scheduler.config.num_train_timesteps))
    raise UserError(
        f"the noise of {type(scheduler).__name__} is not known",
        expected="a scheduler with alphas_cumprod, of flow matching, of EDM or of consistency models",
        got=type(scheduler).__name__,
        remedy="save the pipeline with such a scheduler, if its model was trained for that; or convert it through a function of "
        "your own, model.source: package.module:function, that declares the noise levels (docs/entry-points.md)",
    )


def _output(
    flat: FlatDenoiser, inputs: Observed, named: Mapping[str, Tensor], images: Collection[str]
) -> tuple[tuple[int | str, ...], DiffusersRecord]:
    """Returns the output's symbolic shape, and the record with the class of the result. Nothing is computed.

    Args:
        images: arguments of the pipeline's call that are images.
    """
    first = next(name for name in named if name != flat.timestep_input)
    output = shapes_of(
        flat,
        lambda tensors: flat.call(tensors, return_dict=True),
        named,
        flat.record.model,
        f"keep the pipeline's own {flat.record.component}, or convert it through a function of your own, model.source: "
        "package.module:function, with operations that do not depend on the inputs' values, as with prompts padded to one length",
    )
    _refuse_further_results(flat.record, output, images)
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
            f"the result of {flat.record.model} cannot be used",
            expected=f"an output class with a prediction of {len(sizes)} dimensions, as its input has",
            got=f"{type(output).__name__}, {list(shape)}",
            remedy=_OWN_FUNCTION,
        )
    named_shape = tuple(dim if size == given else size for size, given, dim in zip(shape, sizes, symbolic, strict=True))
    return named_shape, flat.record.model_copy(update={"output": name})


def _refuse_further_results(record: DiffusersRecord, output: Any, images: Collection[str]) -> None:
    fields = output.items() if isinstance(output, Mapping) else ()
    further = {name: type(x).__name__ for name, x in fields if not isinstance(x, (Tensor, list, tuple))}
    if further:
        name, kind = next(iter(further.items()))
        without = (
            f"remove {' and '.join(images)} from model.images, if the pipeline draws without; or " if images else ""
        )
        raise UserError(
            f"{record.model} returns '{name}' beside its prediction, which {record.pipeline} passes to its next calls",
            expected="predictions, which are tensors: an engine keeps nothing from one call for the next",
            got=f"'{name}', a {kind}",
            remedy=f"{without}keep the pipeline's own {record.component}, and do not convert this pipeline",
        )


def _refuse_unfit_predictions(
    model: str, fields: Mapping[str, Tensor], rows: int, dims: Mapping[str, tuple[int, int, int]]
) -> None:
    """Each field must have an entry for each row, and constant sizes: an engine joins all predictions of a row."""
    if unfit := [name for name, x in fields.items() if x.dim() < 2 or len(x) != rows]:
        raise UserError(
            f"the result of {model} cannot be used",
            expected=f"predictions [{rows}, …] of {rows} samples",
            got=f"'{unfit[0]}' of shape {list(fields[unfit[0]].shape)}",
            remedy=f"{_OWN_FUNCTION}, with a forward that returns the prediction alone",
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
    """Returns the steps between valid sizes, see `steps_of`. Nothing is computed."""

    def run(sizes: Mapping[str, int]) -> list[tuple[Any, ...]]:
        log = OperationLog()

        def logged(tensors: Mapping[str, Tensor]) -> Tensor:
            with log:
                return flat(**tensors)

        tensors = {name: resized(x, specs[name], sizes) for name, x in named.items()}
        shape = shapes_of(
            flat, logged, tensors, flat.record.model, "give model.options one size instead of a range"
        ).shape
        return [*log.operations, ("output", tuple(shape) == shape_of(output, sizes))]

    return steps_of(run, dims)


def _refuse_largest(
    flat: FlatDenoiser,
    dims: Mapping[str, tuple[int, int, int]],
    specs: Mapping[str, InputSpec],
    named: Mapping[str, Tensor],
) -> None:
    """Runs the model on the shapes of the largest sizes, which it may have no positions for."""
    if all(low == high for name, (low, _, high) in dims.items() if not name.startswith("batch")):
        return
    largest = {name: high for name, (_, _, high) in dims.items()}
    tensors = {name: resized(x, specs[name], largest) for name, x in named.items()}
    shapes_of(
        flat,
        lambda tensors: flat.call(tensors, return_dict=True),
        tensors,
        flat.record.model,
        "give model.options.height, width, frames and tokens smaller numbers",
    )


def _image_encoder(pipe: Any, latents: Tensor) -> ImageEncoder | None:
    """Returns the VAE's encoder for denoisers of latents [B, C, H, W], and the scaling to [-1, 1] for denoisers of pixels."""
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
    ):  # as DiT's pipeline; the VAE's configuration is read last, as SANA's VAE names its blocks otherwise
        smaller = 2 ** (len(config["block_out_channels"]) - 1)
    height, width = (smaller * size for size in latents.shape[2:])
    # Some models finetuned from SDXL, such as Playground v2.5, have a mean and a deviation for each channel.
    mean, std = (config.get(name) for name in ("latents_mean", "latents_std"))
    if mean is None or std is None:
        mean, std = [config.get("shift_factor") or 0.0], [1.0]
    mean, std = (torch.tensor(numbers).view(1, -1, 1, 1) for numbers in (mean, std))

    def encode(images: Tensor) -> Tensor:
        with torch.no_grad():
            encoded = vae.encode((images * 2 - 1).to(vae.device))
        # A VAE that samples latents returns a distribution; others, such as AutoencoderTiny, return latents.
        mode = encoded.latent_dist.mode() if hasattr(encoded, "latent_dist") else encoded[0]
        encoded = mode.to(images.device)
        return (encoded - mean.to(encoded)) / std.to(encoded) * config["scaling_factor"]

    return ImageEncoder((3, height, width), encode)
