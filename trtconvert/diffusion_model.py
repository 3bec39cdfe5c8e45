"""The description of a diffusion model for a conversion, the same for all sources of models."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from trtconvert.attention.reference import timestep_bin
from trtconvert.attention.schedules import check_sigmas
from trtconvert.attention.sites import Site
from trtconvert.bundle import DiffusersRecord, GuidanceRecord
from trtconvert.errors import UserError
from trtconvert.noise_input import NoiseInput, at_place, place_of
from trtconvert.wide_weights import wide_weights
from trtconvert.wrapped import WrappedDenoiser

OF_NOISE = re.compile(r"(\w+_)?(timestep|sigma)s?(_\w+)?")
"""The pipelines' names of inputs that tell a denoiser the noise level: the timestep, that of a video's sound, and the end of a
flow map."""

_PRECISE = re.compile(rf"{OF_NOISE.pattern}|(\w+_)?coords")
"""Inputs that need more than 16 bits: these, and coordinates of a video's tokens, in pixels and seconds."""

Denoiser = Callable[..., Tensor]
"""denoiser(x, timestep, **conditions) returns the prediction: a torch module, an ONNX Runtime session, an engine."""


class Sampler(Protocol):
    """Draws samples with any denoiser that has the inputs and the output of the model's own."""

    def __call__(
        self,
        denoiser: Denoiser,
        seeds: Sequence[int],
        *,
        steps: int,
        solver: str,
        conditions: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        """Draws one image per seed.

        Args:
            seeds: one per sample; a sample depends on its seed only, whatever the batch.
            steps: denoising steps.
            solver: "ddim", "heun" or "euler".
            conditions: of the samples, from the model's `condition`, instead of those of the seeds. Never passed to the sampler
                of a model without conditions.
        Returns:
            [len(seeds), C, H, W] in [0, 1]. The sampler of a user's function may return videos [len(seeds), F, C, H, W] or sounds
            [len(seeds), C, S] in [0, 1], see `trtconvert.images.laid_out`.
        """
        ...


@dataclass(frozen=True)
class InputSpec:
    """One input of the denoiser.

    Attributes:
        name: of forward's parameter.
        dtype: "float32" or "int64". Floating-point inputs other than the timestep take the recipe's dtype in the engine.
        shape: sizes, and names of symbolic dimensions ("batch", "height", …).
    """

    name: str
    dtype: str
    shape: tuple[int | str, ...]


@dataclass(frozen=True)
class ImageEncoder:
    """Turns images into the clean input of a denoiser.

    Attributes:
        shape: of an image, (C, H, W).
        encode: maps [B, C, H, W] FP32 in [0, 1] to the denoiser's first input without noise: pixels, or a VAE's latents.
    """

    shape: tuple[int, int, int]
    encode: Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class ModelComponent:
    """A further model of a pipeline: a text encoder, or a half of its VAE.

    Attributes:
        name: among the bundle's components.
        title: for people.
        module: takes tensors in the order of `inputs` and returns a tuple of tensors in the order of `outputs`; in evaluation
            mode, full precision.
        inputs, outputs: as in `DiffusionModel`; a dimension of an output may be a linear function of an input's dimension,
            "8*height".
        dims: (min, opt, max) of each symbolic dimension.
        example: tensors by input, at the opt sizes, as the pipeline passes them; integers and truth values as int64.
        high_precision: whether it is FP32 unless the recipe has another type.
        overflows: whether its values leave the range of FP16.
        diffusers: how the pipeline calls it.
    """

    name: str
    title: str
    module: nn.Module
    inputs: tuple[InputSpec, ...]
    outputs: tuple[InputSpec, ...]
    dims: Mapping[str, tuple[int, int, int]]
    example: Mapping[str, Tensor]
    high_precision: bool
    overflows: bool
    diffusers: DiffusersRecord


class Components(Protocol):
    """A pipeline's models other than the denoiser.

    Attributes:
        names: of all of them.
        used: names of those that the way from prompts to images uses.
    """

    @property
    def names(self) -> tuple[str, ...]: ...

    @property
    def used(self) -> tuple[str, ...]: ...

    def module(self, name: str) -> nn.Module:
        """Returns one of the pipeline's models."""
        ...

    def __call__(self, name: str) -> ModelComponent:
        """Returns a component. Raises UserError if there is none of this name, or an engine cannot take it."""
        ...


@dataclass(frozen=True)
class DiffusionModel:
    """A denoiser, its schedule and its sampler.

    Attributes:
        name: of the model, for people.
        denoiser: the module, in evaluation mode, full precision. Its attention calls
            `torch.nn.functional.scaled_dot_product_attention`.
        inputs: forward's inputs, in order; the first is the noisy sample.
        output: of forward.
        timestep_input: name of the timestep among the inputs.
        timestep_max: timesteps lie in [0, timestep_max), and rise with the noise, or fall where they are the share of the image.
            With a `noise_input`, its places count as timesteps here and below.
        sigmas: [timestep_max] noise-to-signal ratio of each timestep, rising, or falling.
        dims: (min, opt, max) that the model supports, of each symbolic dimension.
        sample: see `Sampler`.
        encoder: for calibration on images.
        condition: maps captions to the denoiser's inputs other than the first and the timestep, by name; the empty caption stands
            for no condition. Raises ValueError, with the valid captions, for another one. For calibration on prompts and
            captions.
        diffusers: how pipelines of diffusers call the denoiser, for one of diffusers.
        components: the other models of its pipeline.
        signal: [timestep_max] factor of x₀ + σ·n in the denoiser's input; by default 1/√(1+σ²), which preserves variance.
        as_passed: values of inputs that noise must not replace, of any sizes, by name: masks, labels, positions that are looked
            up in tables, rotations that all samples share.
        steps: the step of a symbolic dimension's values, counted from its opt, where this is not 1.
        left_sites: attention that does not call `scaled_dot_product_attention` and is not converted, with the reason.
        notices: for the recipe's author, before anything is built.
        guidance: the guidance that the denoiser applies itself, see `with_guidance`. The first input, the timestep and the batch
            are then of samples, and the denoiser is called with twice as many rows.
        noise_input: contents of a timestep input that holds no timestep but σ, its logarithm, or a share of noise.
        onload: the device that weights in host memory come to while they are needed, see `trtconvert.models.offloading`; None for
            weights that stay in place.
    Raises:
        UserError: `timestep_max` and `noise_input` do not fit together, or an input of whole numbers holds no timesteps; a σ is
            NaN, infinite or negative.
    """

    name: str
    denoiser: nn.Module
    inputs: tuple[InputSpec, ...]
    output: InputSpec
    timestep_input: str
    timestep_max: float
    sigmas: Tensor
    dims: Mapping[str, tuple[int, int, int]]
    sample: Sampler
    encoder: ImageEncoder | None = None
    condition: Callable[[Sequence[str]], Mapping[str, Tensor]] | None = None
    signal: Tensor | None = None
    diffusers: DiffusersRecord | None = None
    components: Components | None = None
    as_passed: Mapping[str, Tensor] = field(default_factory=dict)
    steps: Mapping[str, int] = field(default_factory=dict)
    left_sites: tuple[Site, ...] = ()
    notices: tuple[str, ...] = ()
    guidance: GuidanceRecord | None = None
    noise_input: NoiseInput | None = None
    onload: torch.device | None = None

    def __post_init__(self) -> None:
        check_sigmas(self.sigmas)
        self._refuse_unfit_noise_input()
        place = next((i for i, spec in enumerate(self.inputs) if spec.name == self.timestep_input), None)
        if place is not None and self.inputs[place].dtype == "int64" and not isinstance(self.sample, WholeTimesteps):
            object.__setattr__(self, "sample", WholeTimesteps(self.sample, place, self.timestep_input))

    def _refuse_unfit_noise_input(self) -> None:
        if (told := self.noise_input) is None:
            return
        whole = any(spec.name == self.timestep_input and spec.dtype == "int64" for spec in self.inputs)
        if whole or told.timestep_max != self.timestep_max:
            raise UserError(
                f"the descriptions of the input '{self.timestep_input}' of {self.name} do not fit together",
                expected=f"an input of float32 and timestep_max={told.timestep_max:g}, as in its noise_input",
                got="an input of int64" if whole else f"timestep_max={self.timestep_max:g}",
                remedy="leave noise_input out, if the input holds timesteps" if whole else "give both the same",
            )

    @property
    def device(self) -> torch.device:
        """The device that the denoiser computes on."""
        return self.onload or next(self.denoiser.parameters()).device

    @property
    def sample_spec(self) -> InputSpec:
        """The input with the noisy sample, the first one other than the timestep."""
        return next(spec for spec in self.inputs if spec.name != self.timestep_input)

    @property
    def sample_input(self) -> str:
        """The name of the input with the noisy sample."""
        return self.sample_spec.name

    @property
    def timestep_place(self) -> int:
        """The index of the timestep among the inputs."""
        return [spec.name for spec in self.inputs].index(self.timestep_input)

    @property
    def always_float32(self) -> frozenset[str]:
        """Inputs that are FP32 in engines of every type: timesteps, coordinates, shares of
        timesteps, and the scale of guidance. Their fractions need more than 16 bits."""
        shares = self.diffusers.timestep_shares if self.diffusers else []
        told = {spec.name for spec in self.inputs if self.diffusers and _PRECISE.fullmatch(spec.name)}
        return frozenset({self.timestep_input, *shares, *told} | ({self.guidance.scale} if self.guidance else set()))

    def named(self, inputs: Sequence[Tensor], by_name: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns the inputs of a call of the denoiser by name, whether they were passed by position or by name."""
        return dict(zip((spec.name for spec in self.inputs), inputs, strict=False)) | dict(by_name)

    @property
    def timesteps_fall(self) -> bool:
        """True if timesteps fall while a sample is denoised, False if they rise."""
        return bool(self.sigmas[0] <= self.sigmas[-1])

    def noised(self, clean: Tensor, noise: Tensor, timestep: Tensor) -> Tensor:
        """Returns the denoiser's first input at given timesteps: signal · (x₀ + σ·n).

        Args:
            clean, noise: [B, …].
            timestep: [B], of `timesteps_at`.
        """
        place = place_of(self.noise_input, timestep.double()).round().long().clamp_max(len(self.sigmas) - 1)
        sigma = self.sigmas[place]
        signal = (1 + sigma**2).rsqrt() if self.signal is None else self.signal[place]
        shape = [-1] + [1] * (clean.dim() - 1)
        x = clean * signal.to(clean.device).view(shape) + noise * (signal * sigma).to(clean.device).view(shape)
        return x.to(clean.dtype)

    def timesteps_at(self, shares: Tensor) -> Tensor:
        """Returns whole timesteps, FP32, at shares of the schedule; or the noise input there.

        Args:
            shares: FP32 in [0, 1]. FP32 rounds a share that is drawn below 1 up to 1 near the end.
        """
        return at_place(self.noise_input, (shares * self.timestep_max).floor().clamp_max(self.timestep_max - 1))

    def bin_of(self, timestep: Tensor, bins: int) -> Tensor:
        """Returns the timestep bin of each timestep input, of any shape."""
        return timestep_bin(place_of(self.noise_input, timestep), self.timestep_max, bins)

    def covers(self, timestep: Tensor) -> Tensor:
        """Returns whether each timestep input is in the schedule."""
        if self.noise_input is not None:
            return self.noise_input.covers(timestep)
        return (timestep >= 0) & (timestep < self.timestep_max)

    @property
    def covered(self) -> str:
        """The inputs that `covers` accepts, for messages."""
        if self.noise_input is not None:
            return f"numbers from {self.noise_input.low:g} to {self.noise_input.high:g}"
        return f"timesteps in [0, {self.timestep_max:g})"

    def example(self, seed: int, sizes: Mapping[str, int]) -> dict[str, Tensor]:
        """Returns inputs of the given sizes: N(0, 1), timesteps spread over the schedule, `as_passed`, and 0 and 1 for other
        integers. With a noise input the first input is N(0, 1) with the input's noise, as σ spans decades.

        Args:
            sizes: of every symbolic dimension.
        """
        generator = torch.Generator().manual_seed(seed)
        inputs = {}
        for spec in self.inputs:
            shape = [sizes[n] if isinstance(n, str) else n for n in spec.shape]
            if spec.name == self.timestep_input:
                # Stratified, so that any batch covers the schedule.
                count = max(1, int(torch.Size(shape).numel()))
                drawn = torch.rand(count, dtype=torch.float32, generator=generator)
                strata = (torch.arange(count) + drawn) / count
                inputs[spec.name] = self.timesteps_at(strata).reshape(shape).to(getattr(torch, spec.dtype))
            elif spec.name in self.as_passed:
                inputs[spec.name] = resized(self.as_passed[spec.name], spec, sizes).to(getattr(torch, spec.dtype))
            elif spec.dtype == "int64":
                inputs[spec.name] = torch.randint(0, 2, shape, generator=generator)
            else:
                inputs[spec.name] = torch.randn(shape, dtype=torch.float32, generator=generator)
        if self.noise_input is not None and inputs[self.timestep_input].dim() == 1:
            first, timestep = self.inputs[0].name, inputs[self.timestep_input]
            clean = torch.randn(inputs[first].shape, dtype=torch.float32, generator=generator)
            if self.signal is not None:  # at next to no noise the signal is one over the deviation of the data
                clean = clean / float(self.signal[self.sigmas.argmin()])
            inputs[first] = self.noised(clean, inputs[first], timestep)
        return inputs


def with_guidance(
    model: DiffusionModel, record: GuidanceRecord, dims: Mapping[str, tuple[int, int, int]]
) -> DiffusionModel:
    """Returns a model as it is exported with guidance inside. Its denoiser is the model's own, called with twice the batch.

    Args:
        dims: (min, opt, max) of each symbolic dimension; the batch counts samples.
    """
    specs = {spec.name: spec for spec in model.inputs}
    twins = [replace(specs[name], name=twin) for name, twin in record.negative.items()]
    scale = InputSpec(record.scale, "float32", model.inputs[0].shape[:1])
    passed = {twin: model.as_passed[name] for name, twin in record.negative.items() if name in model.as_passed}
    # Scales up to 1: both halves count, and larger scales would multiply the errors of both.
    scales = torch.tensor([0.5, 1.0, 0.75])
    return replace(
        model,
        inputs=(*model.inputs, *twins, scale),
        dims=dims,
        as_passed={**model.as_passed, **passed, record.scale: scales},
        guidance=record,
    )


@dataclass(frozen=True)
class WholeTimesteps:
    """A sampler whose denoisers get whole timesteps, for denoisers that look them up in a table."""

    sampler: Sampler
    place: int
    name: str

    def __call__(self, denoiser: Denoiser, seeds: Sequence[int], **named: Any) -> Tensor:
        return self.sampler(_OfWholeTimesteps(denoiser, self.place, self.name), seeds, **named)


class _OfWholeTimesteps(WrappedDenoiser):
    def __init__(self, denoiser: Denoiser, place: int, name: str) -> None:
        super().__init__(denoiser)
        self._place, self._name = place, name

    def __call__(self, *inputs: Tensor, **named: Tensor) -> Tensor:
        if self._name in named:
            named[self._name] = named[self._name].round().long()
        else:
            inputs = (*inputs[: self._place], inputs[self._place].round().long(), *inputs[self._place + 1 :])
        return self._denoiser(*inputs, **named)


def copied_with(module: nn.Module, change: Callable[[str, Tensor], Tensor]) -> nn.Module:
    """Returns a copy of a module with other parameters and buffers, which are made one by one: the old ones are not copied.

    Args:
        change: maps (name, tensor) to the tensor of the copy; it is called once for a tensor that several modules share.
    """
    named = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    changed: dict[int, Tensor] = {}
    for name, x in named:
        if id(x) not in changed:
            there = change(name, x.detach())
            changed[id(x)] = nn.Parameter(there, x.requires_grad) if isinstance(x, nn.Parameter) else there
    return copy.deepcopy(module, changed)


def weights_in_float32(model: DiffusionModel, dtype: torch.dtype) -> frozenset[str]:
    """Returns the names of parameters and buffers that stay in FP32 in an engine of a type, see `wide_weights`. None of a
    pipeline: `_keep_in_fp32_modules` names those of diffusers."""
    if model.diffusers is not None or dtype == torch.float32:
        return frozenset()
    sizes = {name: opt for name, (_, opt, _) in model.dims.items()}
    return wide_weights(model.denoiser, model.example(0, sizes), model.timestep_input)


def require_one_size(
    model: DiffusionModel, dims: Mapping[str, tuple[int, int, int]], problem: str, otherwise: str
) -> None:
    """
    Args:
        dims: (min, opt, max) of each symbolic dimension of an engine.
        problem: of a feature that needs one size of everything but the batch.
        otherwise: the remedy without it.
    Raises:
        UserError: a dimension other than that of the samples may vary.
    """
    batch = model.inputs[0].shape[0]
    varying = {name: (low, high) for name, (low, _, high) in dims.items() if low < high and name != batch}
    if varying:
        name = next(iter(varying))
        of_options = "model.options" if model.diffusers is not None else "engine.shapes"
        raise UserError(
            problem,
            expected=f"one size of {', '.join(varying)}",
            got=", ".join(f"{name} {low}..{high}" for name, (low, high) in varying.items()),
            remedy=f"give each one size in {of_options}, such as {name}: {dims[name][1]}; or {otherwise}",
        )


def resized(x: Tensor, spec: InputSpec, sizes: Mapping[str, int]) -> Tensor:
    """Returns a tensor with new sizes of its symbolic dimensions; rows are repeated or left out."""
    for axis, dim in enumerate(spec.shape):
        if isinstance(dim, str):
            x = x.index_select(axis, torch.arange(sizes[dim]) % x.shape[axis])
    return x
