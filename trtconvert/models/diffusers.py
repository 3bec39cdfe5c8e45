"""The denoiser of a diffusers pipeline as a `DiffusionModel`, found out by watching the pipeline call it.

No pipeline is known by name. The pipeline runs up to its first call of the denoiser, once for each size that may vary; what it
passes gives the inputs, and what changes with a size gives the symbolic dimensions.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from trtconvert.attention.schedules import ddpm_sigmas
from trtconvert.attention.sites import first_tensor
from trtconvert.bundle import DiffusersRecord
from trtconvert.errors import BackendUnavailable, UserError
from trtconvert.models.base import Denoiser, DiffusionModel, ImageEncoder, InputSpec
from trtconvert.runtime.arguments import Structure, put_together, take_apart
from trtconvert.runtime.diffusers import DiffusersDenoiser

COMPONENTS = ("transformer", "unet")
"""Where pipelines keep what denoises."""

PROMPTS = (
    "a photograph of a mountain lake at sunrise",
    "a watercolour painting of an old harbour town",
    "a close-up portrait of an elderly man, studio light",
    "an isometric drawing of a small workshop full of tools",
    "a red bicycle leaning against a white wall",
    "two dogs running along a beach, motion blur",
    "a bowl of fruit on a wooden table, oil painting",
    "a city street at night after rain, neon signs",
)

_TEXT_WIDTHS = ("caption_channels", "joint_attention_dim", "text_dim", "text_embed_dim", "cross_attention_dim")
"""What models call the width of prompt embeddings in their configuration; the first that is there is it."""

_TEXT_COMPONENTS = ("text_encoder", "tokenizer")
"""What the names of a pipeline's components for prompts begin with; a pipeline may be saved without them."""

Sizes = int | list[int] | None
"""A fixed size, [min, opt, max], or the pipeline's own default."""


def diffusers_model(
    weights: Path,
    *,
    height: Sizes = None,
    width: Sizes = None,
    frames: Sizes = None,
    batch: Sizes = None,
    tokens: int = 77,
    prompts: Sequence[str] = PROMPTS,
    call: Mapping[str, Any] | None = None,
) -> DiffusionModel:
    """The denoiser of a pipeline, with the pipeline as its sampler.

    Args:
        weights: folder that the pipeline's `save_pretrained` wrote. Nothing is downloaded. Text encoders may be absent: the
            prompt embeddings are then noise, seeded by the sample.
        height, width: of the images in pixels; frames: of videos. A size, or [min, opt, max] for an engine that takes a range.
        batch: images per call of the pipeline, [1, 2, 8] by default. Pipelines with guidance call the denoiser with twice
            as many.
        tokens: of seeded prompt embeddings.
        prompts: what samples show, by turns.
        call: further arguments of the pipeline's call, such as guidance_scale.
    Raises:
        UserError: no such pipeline, or one whose denoiser an engine cannot take.
        BackendUnavailable: diffusers is not installed.
    """
    pipe = load_pipeline(weights)
    component = next((name for name in COMPONENTS if isinstance(getattr(pipe, name, None), nn.Module)), None)
    if component is None:
        raise UserError(
            f"{type(pipe).__name__} has no denoiser",
            expected=" or ".join(COMPONENTS) + " among its components",
            got=", ".join(pipe.components),
            remedy="convert a pipeline that denoises with one model",
        )
    caller = _Caller(pipe, component, tokens, tuple(prompts), dict(call or {}))
    wanted = {"batch": [1, 2, 8] if batch is None else batch, "height": height, "width": width, "frames": frames}
    ranges = {name: _range(name, size) for name, size in wanted.items() if size is not None}
    _refuse_unknown(caller, ranges)
    inputs, schedule = _inputs(caller, ranges), _schedule(pipe)
    timestep = _timestep_name(inputs.example)
    first, *others = (name for name in inputs.example if name != timestep)
    model: nn.Module = getattr(pipe, component)
    record = DiffusersRecord(
        pipeline=type(pipe).__name__,
        component=component,
        model=type(model).__name__,
        config=_plain(model.config),  # type: ignore[arg-type]  # a diffusers model has one
        output="",
        parameters=list(inspect.signature(model.forward).parameters),
        arguments=inputs.structure,
        # Some flow-matching pipelines divide their timesteps by 1000 and begin with 1.
        timestep_factor=1 / schedule.timesteps if inputs.example[timestep].max() <= 1 else 1.0,
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
    sizes = {name: opt for name, (_, opt, _) in ranges.items()}
    return DiffusionModel(
        name=f"{type(pipe).__name__} {component}",
        denoiser=flat,
        inputs=tuple(specs[name] for name in (first, timestep, *others)),
        output=InputSpec("prediction", "float32", shape),
        timestep_input=timestep,
        timestep_max=float(len(schedule.sigmas)),
        sigmas=schedule.sigmas,
        dims=inputs.dims,
        sample=PipelineSampler(caller, flat.record, timestep, sizes, ranges["batch"][2]),
        encoder=_encoder(pipe, inputs.example[first]),
        condition=_Condition(caller, sizes, flat.record, first, timestep) if caller.has_text_encoder else None,
        signal=schedule.signal,
        diffusers=flat.record,
    )


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
        """The tensors of the record's structure by name → the prediction."""
        return first_tensor(self.call(named, return_dict=False))

    def call(self, named: Mapping[str, Tensor], return_dict: bool) -> Any:
        """What the model returns."""
        timestep = named[self.timestep_input] * self.record.timestep_factor
        arguments = put_together(self.record.arguments, {**named, self.timestep_input: timestep})
        return getattr(self, self.record.component)(**arguments, return_dict=return_dict)


@dataclass
class _Caller:
    """Calls the pipeline.

    Attributes:
        component: the denoiser's name in it.
        tokens, prompts, arguments: see `diffusers_model`.
    """

    pipe: Any
    component: str
    tokens: int
    prompts: tuple[str, ...]
    arguments: dict[str, Any]
    parameters: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        self.parameters = frozenset(inspect.signature(self.pipe.__call__).parameters)
        self.pipe.set_progress_bar_config(disable=True)
        for filtering in ("safety_checker", "watermark"):  # they would change the images that are compared
            if getattr(self.pipe, filtering, None) is not None:
                setattr(self.pipe, filtering, None)

    @property
    def has_text_encoder(self) -> bool:
        return getattr(self.pipe, "text_encoder", None) is not None

    def __call__(
        self,
        seeds: Sequence[int],
        steps: int,
        sizes: Mapping[str, int],
        captions: Sequence[str] | None = None,
    ) -> Tensor:
        """Run the pipeline for these seeds; a sample depends on its own seed alone.

        Args:
            sizes: height, width and frames where they are not the pipeline's own.
            captions: one per seed, instead of the prompts.
        Returns:
            What the pipeline gives: images in [0, 1], or latents where it has no decoder.
        """
        named = {"height": "height", "width": "width", "frames": "num_frames"}
        arguments: dict[str, Any] = {named[name]: size for name, size in sizes.items() if name in named}
        if self.has_text_encoder:
            arguments["prompt"] = list(captions or [self.prompts[seed % len(self.prompts)] for seed in seeds])
        else:
            arguments |= self._embeddings(seeds)
        output = self.pipe(
            **arguments,
            num_inference_steps=steps,
            generator=[torch.Generator().manual_seed(seed) for seed in seeds],
            output_type="pt" if getattr(self.pipe, "vae", None) is not None else "latent",
            **self.arguments,
        )
        return output[0]

    def _embeddings(self, seeds: Sequence[int]) -> dict[str, Tensor | None]:
        """Prompt embeddings of N(0, 1), seeded by the sample, and zeros for no prompt, for a pipeline without text encoders."""
        config = getattr(self.pipe, self.component).config
        width = next((config[name] for name in _TEXT_WIDTHS if isinstance(config.get(name), int)), None)
        if width is None:
            raise UserError(
                f"{type(self.pipe).__name__} has no text encoder, and its denoiser does not say how wide embeddings are",
                expected="one of " + ", ".join(_TEXT_WIDTHS) + " in the denoiser's configuration",
                got="none",
                remedy="save the pipeline with its text encoder",
            )
        pooled = config.get("pooled_projection_dim")
        if config.get("addition_embed_type") == "text_time":  # SDXL: beside the text there are six numbers
            pooled = config["projection_class_embeddings_input_dim"] - 6 * config["addition_time_embed_dim"]
        shapes = {"prompt_embeds": (self.tokens, width), "pooled_prompt_embeds": (pooled,)}
        made: dict[str, Tensor | None] = {}
        for name, shape in shapes.items():
            if name in self.parameters:
                # The odd number keeps them apart from the latents, which the seed itself draws.
                drawn = [torch.randn(shape, generator=torch.Generator().manual_seed(seed ^ 0x5EED)) for seed in seeds]
                made[name] = embeddings = torch.stack(drawn)
                if f"negative_{name}" in self.parameters:
                    made[f"negative_{name}"] = torch.zeros_like(embeddings)
        if "negative_prompt" in self.parameters:
            made["negative_prompt"] = None  # some pipelines have a default, and take one of the two
        for name in ("prompt_attention_mask", "negative_prompt_attention_mask"):
            if name in self.parameters:
                made[name] = torch.ones(len(seeds), self.tokens, dtype=torch.int64)
        return {name: x if x is None else x.to(self.pipe.device) for name, x in made.items()}

    def first_call(self, seeds: Sequence[int], sizes: Mapping[str, int]) -> dict[str, Any]:
        """The arguments of the pipeline's first call of its denoiser, by parameter; the pipeline ends there."""
        model = getattr(self.pipe, self.component)
        signature = inspect.signature(model.forward)

        def stop(*args: Any, **kwargs: Any) -> None:
            raise _Called(dict(signature.bind(*args, **kwargs).arguments))

        model.forward = stop
        try:
            arguments = self.until_called(seeds, sizes)
        finally:
            del model.forward
        arguments.pop("return_dict", None)
        return arguments

    def until_called(
        self, seeds: Sequence[int], sizes: Mapping[str, int], captions: Sequence[str] | None = None
    ) -> dict[str, Any]:
        """Run the pipeline until its denoiser raises `_Called`, and give what that brings.

        Raises:
            UserError: the pipeline refuses its arguments, or does not call its denoiser.
        """
        try:
            with torch.no_grad():
                self(seeds, 2, sizes, captions)
        except _Called as called:
            return called.arguments
        except (ValueError, TypeError) as error:
            raise UserError(
                f"{type(self.pipe).__name__} cannot be called",
                expected="sizes and arguments that the pipeline takes",
                got=str(error).splitlines()[0],
                remedy="correct model.options in the recipe; `call` there holds further arguments of the pipeline",
            ) from error
        raise UserError(
            f"{type(self.pipe).__name__} does not call its {self.component}",
            expected="a pipeline that denoises with it",
            got="a run without a call",
            remedy="convert another pipeline",
        )

    @contextmanager
    def denoising_with(self, denoiser: DiffusersDenoiser) -> Iterator[None]:
        """Another denoiser in the pipeline, and the pipeline on its device."""
        own = getattr(self.pipe, self.component)
        setattr(self.pipe, self.component, denoiser)
        try:
            for part in self.pipe.components.values():
                if isinstance(part, nn.Module) and part is not denoiser:
                    part.to(denoiser.device)
            yield
        finally:
            setattr(self.pipe, self.component, own)


class _Called(Exception):
    """The pipeline has come to its denoiser."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        super().__init__()
        self.arguments = arguments


@dataclass(frozen=True)
class PipelineSampler:
    """The pipeline's own denoising with any denoiser, see `trtconvert.models.base.Sampler`.

    Args:
        caller: calls the pipeline; record, timestep_input: see `DiffusersDenoiser`.
        sizes: of the samples; batch: samples drawn at once.
    """

    caller: _Caller
    record: DiffusersRecord
    timestep_input: str
    sizes: Mapping[str, int]
    batch: int

    def __call__(
        self,
        denoiser: Denoiser,
        seeds: Sequence[int],
        *,
        steps: int,
        solver: str,
        conditions: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        """Images, or the channels of latents one below the other where the pipeline has no decoder; frames likewise.

        Raises:
            UserError: another solver than "ddim", which stands for the pipeline's own scheduler.
        """
        if solver != "ddim":
            raise UserError(
                "a diffusers pipeline samples with its own scheduler",
                expected="ddim, which stands for it",
                got=solver,
                remedy="leave the solver out, or save the pipeline with another scheduler",
            )
        # An engine has a device, and the pipeline goes there; other denoisers take tensors from the CPU to theirs.
        device = getattr(denoiser, "device", torch.device("cpu"))
        images = []
        for start in range(0, len(seeds), self.batch):
            chunk = seeds[start : start + self.batch]
            given = {name: x[start : start + self.batch] for name, x in (conditions or {}).items()}
            dropped_in = DiffusersDenoiser(
                _Conditioned(denoiser, given) if given else denoiser,
                self.record,
                self.timestep_input,
                dtype=torch.float32,
                device=device,
            )
            with torch.no_grad(), self.caller.denoising_with(dropped_in):
                images.append(as_images(self.caller(chunk, steps, self.sizes).cpu(), decoded=self.decodes))
        return torch.cat(images)

    @property
    def decodes(self) -> bool:
        """Whether the pipeline turns latents into images."""
        return getattr(self.caller.pipe, "vae", None) is not None


@dataclass(frozen=True)
class _Conditioned:
    """A denoiser some of whose inputs are given; with guidance, those of the second half of the batch."""

    denoiser: Denoiser
    conditions: Mapping[str, Tensor]

    def __call__(self, **named: Tensor) -> Tensor:
        given = {
            name: torch.cat([named[name][: len(named[name]) - len(x)], x.to(named[name])])
            for name, x in self.conditions.items()
        }
        return self.denoiser(**named | given)


@dataclass(frozen=True)
class _Condition:
    """Captions to the denoiser's inputs, see `DiffusionModel.condition`: what the pipeline makes of them."""

    caller: _Caller
    sizes: Mapping[str, int]
    record: DiffusersRecord
    first: str
    timestep: str

    def __call__(self, captions: Sequence[str]) -> dict[str, Tensor]:
        def stop(**named: Tensor) -> Tensor:
            raise _Called(named)

        cpu = torch.device("cpu")
        stopping = DiffusersDenoiser(stop, self.record, self.timestep, dtype=torch.float32, device=cpu)
        with self.caller.denoising_with(stopping):
            tensors = self.caller.until_called([0] * len(captions), self.sizes, captions)
        batch = len(tensors[self.first])
        return {
            name: x[-len(captions) :]
            for name, x in tensors.items()
            if name not in (self.first, self.timestep) and x.dim() and len(x) == batch
        }


def as_images(output: Tensor, *, decoded: bool) -> Tensor:
    """What a pipeline gives as [N, C, H, W] in [0, 1].

    Args:
        output: images [N, C, H, W], videos [N, F, C, H, W], or latents [N, …, H, W] of about unit variance.
    """
    if not decoded:
        output = (output.float() / 8 + 0.5).clamp(0, 1)  # four standard deviations to either side
        return output.flatten(1, -2)[:, None]
    if output.dim() == 5:
        output = output.transpose(1, 2).flatten(2, 3)
    return output.float().clamp(0, 1)


# What the pipeline tells ----------------------------------------------------------------------------------------------


def load_pipeline(folder: Path) -> Any:
    """A pipeline that `save_pretrained` wrote, in FP32, with or without its text encoders. Nothing is downloaded.

    Raises:
        UserError: no pipeline, or a damaged one.
        BackendUnavailable: diffusers is not installed.
    """
    try:
        import diffusers
        from diffusers.utils import logging
    except ImportError as error:
        raise BackendUnavailable(
            "diffusers is not installed",
            expected="the library that reads model.weights",
            got=str(error),
            remedy="pip install 'trtconvert[diffusers]'",
        ) from error
    if not (folder / "model_index.json").is_file():
        raise UserError(
            f"{folder} holds no diffusers pipeline",
            expected="a folder with model_index.json, as `pipeline.save_pretrained(folder)` writes it",
            got="a single component" if (folder / "config.json").is_file() else "no such file",
            remedy="save the whole pipeline; its text encoders and its VAE may be None",
        )
    logging.disable_progress_bar()  # this program shows its own
    try:
        # `save_pretrained` leaves out what is None, and loading wants to be told.
        index = json.loads((folder / "model_index.json").read_text())
        pipeline = getattr(diffusers, index["_class_name"])
        parameters = inspect.signature(pipeline.__init__).parameters
        absent = {
            name: None
            for name in parameters
            if name.startswith(_TEXT_COMPONENTS) and index.get(name, [None, None])[0] is None
        }
        loaded = pipeline.from_pretrained(folder, local_files_only=True, **absent)
        for part in loaded.components.values():
            if isinstance(part, nn.Module) and part.dtype != torch.float32:
                part.to(torch.float32)
        return loaded
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise UserError(
            f"the pipeline in {folder} cannot be loaded",
            expected="a whole folder that `save_pretrained` of an installed pipeline class wrote",
            got=str(error).strip().splitlines()[0],
            remedy="save the pipeline again, or install the diffusers that wrote it",
        ) from error
    finally:
        logging.enable_progress_bar()


def _range(name: str, size: int | list[int]) -> tuple[int, int, int]:
    values = [size] * 3 if isinstance(size, int) else list(size)
    if len(values) != 3 or not all(isinstance(n, int) and n > 0 for n in values) or values != sorted(values):
        raise UserError(
            f"model.options.{name} is no size",
            expected="a whole number, or [min, opt, max]",
            got=str(size),
            remedy="correct it in the recipe",
        )
    low, opt, high = values
    return low, opt, high


def _refuse_unknown(caller: _Caller, ranges: Mapping[str, tuple[int, int, int]]) -> None:
    for name, parameter in (("height", "height"), ("width", "width"), ("frames", "num_frames")):
        if name in ranges and parameter not in caller.parameters:
            raise UserError(
                f"{type(caller.pipe).__name__} takes no {name}",
                expected="options among " + ", ".join(sorted(caller.parameters)),
                got=name,
                remedy=f"remove model.options.{name}",
            )


@dataclass(frozen=True)
class _Inputs:
    """What the pipeline passes to its denoiser.

    Attributes:
        structure: of the arguments, see `trtconvert.runtime.arguments`.
        example: the tensors of a call at the opt sizes.
        shapes: of each, sizes and symbolic dimensions.
        dims: symbolic dimension: (min, opt, max).
    """

    structure: dict[str, dict[str, Any]]
    example: dict[str, Tensor]
    shapes: dict[str, tuple[int | str, ...]]
    dims: dict[str, tuple[int, int, int]]


def _inputs(caller: _Caller, ranges: Mapping[str, tuple[int, int, int]]) -> _Inputs:
    """Find the inputs and their symbolic dimensions, from calls of different sizes.

    A dimension that follows one size is named after it, one that follows several is called "tokens".

    Raises:
        UserError: the pipeline passes a number that follows a size, so that an engine for a range cannot be.
    """
    opt = {name: middle for name, (_, middle, _) in ranges.items()}
    structure, example = _arguments(caller, opt)
    changed: dict[str, dict[str, Tensor]] = {}
    for name, (low, middle, high) in ranges.items():
        if low < high or name == "batch":
            other = middle + 1 if low == high else low if low < middle else high
            found, changed[name] = _arguments(caller, opt | {name: other})
            _refuse_numbers(name, structure, found)
    corners = []
    for index in (0, 2):
        corners.append(_arguments(caller, {name: size[index] for name, size in ranges.items()})[1])
    dims: dict[str, tuple[int, int, int]] = {}
    symbols: dict[tuple[int, ...], str] = {}

    def symbol(name: str, axis: int) -> int | str:
        size = example[name].shape[axis]
        sizes = tuple(tensors[name].shape[axis] for tensors in changed.values())
        follows = [which for which, other in zip(changed, sizes, strict=True) if other != size]
        if not follows:
            return size
        if (size, *sizes) not in symbols:
            stem = follows[0] if len(follows) == 1 else "tokens"
            number = sum(known.partition("_")[0] == stem for known in dims)
            symbols[size, *sizes] = title = f"{stem}_{number + 1}" if number else stem
            low, high = (tensors[name].shape[axis] for tensors in corners)
            # A pipeline with guidance calls with twice as many; the same engine serves it without.
            low = ranges["batch"][0] if stem == "batch" else low
            dims[title] = (low, size, high)
        return symbols[size, *sizes]

    shapes = {name: tuple(symbol(name, axis) for axis in range(x.dim())) for name, x in example.items()}
    return _Inputs(structure, example, shapes, dims)


def _arguments(caller: _Caller, sizes: Mapping[str, int]) -> tuple[dict[str, dict[str, Any]], dict[str, Tensor]]:
    arguments = caller.first_call(range(sizes["batch"]), sizes)
    if isinstance(arguments.get("timestep"), (int, float)):
        arguments["timestep"] = torch.tensor(arguments["timestep"])
    return take_apart(arguments)


def _refuse_numbers(size: str, structure: Structure, other: Structure) -> None:
    for name, node in structure.items():
        if node != other.get(name):
            raise UserError(
                f"the pipeline tells its denoiser '{name}' as a number, which an engine takes in as it is",
                expected=f"one {size}",
                got=f"a range of {size}",
                remedy=f"give model.options.{size} as one number, and build a bundle for each",
            )


def _timestep_name(example: Mapping[str, Tensor]) -> str:
    batch = next(x for name, x in example.items() if name != "timestep").shape[0]
    if "timestep" not in example or example["timestep"].numel() not in (1, batch):
        raise UserError(
            "the pipeline gives its denoiser no timestep that an engine can follow",
            expected="'timestep', one for all samples or one for each",
            got=f"{list(example['timestep'].shape)}" if "timestep" in example else ", ".join(example),
            remedy="convert a pipeline whose samples are denoised as a whole",
        )
    return "timestep"


@dataclass(frozen=True)
class _Schedule:
    """Noise of a pipeline's scheduler.

    Attributes:
        timesteps: of the training.
        sigmas, signal: see `DiffusionModel`.
    """

    timesteps: int
    sigmas: Tensor
    signal: Tensor | None


def _schedule(pipe: Any) -> _Schedule:
    scheduler = pipe.scheduler
    timesteps = int(scheduler.config.num_train_timesteps)
    if "FlowMatch" in type(scheduler).__name__ or scheduler.config.get("use_flow_sigmas"):
        # x = (1 - σ)·x₀ + σ·n with σ = t / timesteps (Lipman et al. 2023, arXiv 2210.02747, the path of section 4.1). The ends,
        # where the ratio is 0 or infinite, move by half a timestep.
        sigma = torch.arange(timesteps + 1, dtype=torch.float64).clamp(0.5, timesteps - 0.5) / timesteps
        return _Schedule(timesteps, sigma / (1 - sigma), 1 - sigma)
    if getattr(scheduler, "alphas_cumprod", None) is not None:
        # Schedules with zero terminal SNR end at 0.
        return _Schedule(timesteps, ddpm_sigmas(scheduler.alphas_cumprod.double().clamp_min(1e-8)), None)
    raise UserError(
        f"the noise of {type(scheduler).__name__} is not known",
        expected="a scheduler with alphas_cumprod, or of flow matching",
        got=type(scheduler).__name__,
        remedy="save the pipeline with the scheduler that its model was trained with",
    )


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration as JSON has it, without where it was loaded from."""
    kept = {name: value for name, value in config.items() if name not in ("_name_or_path", "_use_default_values")}
    return json.loads(json.dumps(kept, default=str))


def _output(
    flat: FlatDenoiser, inputs: _Inputs, named: Mapping[str, Tensor]
) -> tuple[tuple[int | str, ...], DiffusersRecord]:
    """The output's symbolic shape, and the record with the class that forward returns it in. Nothing is computed."""
    first = next(name for name in named if name != flat.timestep_input)
    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True) as mode:
        output = flat.call({name: mode.from_tensor(x) for name, x in named.items()}, return_dict=True)
    sizes, symbolic = named[first].shape, inputs.shapes[first]
    shape = tuple(first_tensor(output).shape)
    if len(shape) != len(sizes) or isinstance(output, (Tensor, tuple)):
        raise UserError(
            f"what {flat.record.model} returns cannot be used",
            expected=f"an output class with a prediction of {len(sizes)} dimensions, as what it denoises has",
            got=f"{type(output).__name__}, {list(shape)}",
            remedy="convert it through a function of your own, model.source: package.module:function",
        )
    named_shape = tuple(dim if size == given else size for size, given, dim in zip(shape, sizes, symbolic, strict=True))
    name = f"{type(output).__module__}:{type(output).__qualname__}"
    return named_shape, flat.record.model_copy(update={"output": name})


def _encoder(pipe: Any, latents: Tensor) -> ImageEncoder | None:
    """The VAE's encoder, for denoisers of plain latents [B, C, H, W]."""
    vae = getattr(pipe, "vae", None)
    config = getattr(vae, "config", {})
    if (
        vae is None
        or latents.dim() != 4
        or config.get("latent_channels") != latents.shape[1]
        or "scaling_factor" not in config
    ):
        return None
    height, width = (pipe.vae_scale_factor * size for size in latents.shape[2:])

    def encode(images: Tensor) -> Tensor:
        with torch.no_grad():
            encoded = vae.encode((images * 2 - 1).to(vae.device)).latent_dist.mode().to(images.device)
        return (encoded - (config.get("shift_factor") or 0)) * config["scaling_factor"]

    return ImageEncoder((3, height, width), encode)
