"""Calibration data: the recipe's source as batches that call a denoiser.

Every source is a stream: a batch loads its samples when it runs, and releases them afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trtconvert.attention.sites import Site
from trtconvert.calib.examples import Example, Examples, dataset_folder, image_folder, load_image, prompts_file
from trtconvert.calib.finite_calls import require_finite_samples
from trtconvert.calib.identity import Kind, data_kind
from trtconvert.calib.recorded_inputs import is_shared, open_inputs, read_inputs, refuse_no_numbers, whole
from trtconvert.diffusion_model import Denoiser, DiffusionModel
from trtconvert.entry_point import import_function
from trtconvert.errors import UserError, first_line, kind_and_first_line
from trtconvert.recipe import CalibrationSection
from trtconvert.runtime.signature import fits
from trtconvert.weights.finite import require_finite
from trtconvert.wrapped import WrappedDenoiser

SITE_SAMPLES, SITE_STEPS_PER_BIN = 16, 2
"""Limits for measuring the errors of sites and layers: samples, and denoising steps per timestep bin."""

ENOUGH_TOKENS = 16384
"""Tokens of every site in one step that suffice. More samples add no information and cost minutes on large models."""

Drive = Callable[[Denoiser], None]
"""Calls a denoiser on calibration data, all of it or a part."""


def batches_of(count: int, size: int) -> list[range]:
    """range(count) in pieces of at most `size`."""
    return [range(start, min(start + size, count)) for start in range(0, count, size)]


def samples_for_errors(sites: Iterable[Site], samples: int) -> int:
    """Returns the number of samples for the errors of converted sites and layers; samples: number in the recipe."""
    fewest = max(1, min((site.query_tokens for site in sites), default=1))
    return min(samples, SITE_SAMPLES, max(2, -(-ENOUGH_TOKENS // fewest)))


class BadSamples:
    """Skips and lists samples that cannot be used; without `skip` the first one is an error."""

    def __init__(self, skip: bool = False) -> None:
        self._skip = skip
        self._found: list[str] = []

    def report(self, error: UserError) -> None:
        """Skips a bad sample, or raises its error."""
        if not self._skip:
            raise error
        self._found.append(f"{error.problem}: {error.got}")

    def take(self) -> list[str]:
        """Returns the skipped samples since the last call."""
        found, self._found = self._found, []
        return found


@dataclass(frozen=True)
class CalibrationData:
    """Batches that can be iterated repeatedly.

    Attributes:
        batches: each calls the denoiser on its samples. A batch that does not run costs next to nothing.
        count: number of batches; None if unknown.
    """

    batches: Iterable[Drive]
    count: int | None


@dataclass(frozen=True)
class _Stream:
    """An iterable over a function's iterators."""

    start: Callable[[], Iterator[Drive]]

    def __iter__(self) -> Iterator[Drive]:
        return self.start()


def open_data(model: DiffusionModel, section: CalibrationSection, bad: BadSamples) -> CalibrationData:
    """Opens the data of a recipe; UserError if it cannot be read, does not fit the model, or has too few samples. A running batch
    raises errors of single samples, depending on `bad`."""
    kind, data = data_kind(section.data), section.data
    pieces = batches_of(section.samples, section.batch)
    if kind is Kind.FUNCTION:
        return CalibrationData(_Stream(lambda: _yielded(model, str(data), section.samples)), None)
    if kind is Kind.DENOISE:
        return CalibrationData([_denoise(model, section, piece) for piece in pieces], len(pieces))
    if kind is Kind.INPUTS:
        return CalibrationData(_recorded(model, section, pieces, bad), len(pieces))
    opened = {Kind.IMAGES: image_folder, Kind.PROMPTS: prompts_file, Kind.DATASET: dataset_folder}[kind](Path(data))
    _refuse_too_few(str(data), opened.count, section.samples)
    return CalibrationData(_Stream(lambda: _from_examples(model, opened, section, bad)), len(pieces))


# Denoising runs and recorded inputs -----------------------------------------------------------------------------------


def _denoise(model: DiffusionModel, section: CalibrationSection, piece: range) -> Drive:
    seeds = [section.seed + i for i in piece]

    def drive(denoiser: Denoiser) -> None:
        denoiser = _Told(denoiser, model, "what its sampler passes")
        require_finite_samples(model.sample(denoiser, seeds, steps=section.steps, solver="ddim"))

    return drive


def _recorded(
    model: DiffusionModel, section: CalibrationSection, pieces: Sequence[range], bad: BadSamples
) -> list[Drive]:
    path = Path(section.data)
    inputs = open_inputs(model, path)
    for spec in model.inputs:
        if not is_shared(model, spec):
            _refuse_too_few(f"'{spec.name}' in {path}", inputs[spec.name].shape[0], section.samples)

    def replay(piece: range, denoiser: Denoiser) -> None:
        batch, errors = read_inputs(model, path, inputs, piece)
        for error in errors:
            bad.report(error)
        if len(batch[model.timestep_input]):
            _run(model, batch, denoiser, f"samples {piece.start} to {piece.stop - 1} of {path}")

    return [lambda denoiser, piece=piece: replay(piece, denoiser) for piece in pieces]


def nothing_observed(left_out: Sequence[str]) -> UserError:
    """Returns the error for a calibration without a call of a site; left_out: the skipped bad samples."""
    return UserError(
        "there is nothing to calibrate on",
        expected="at least one batch of denoiser inputs",
        got=f"{len(left_out)} bad samples, the first: {left_out[0]}" if left_out else "none",
        remedy="raise calibration.samples, or set calibration.data to data that the model accepts",
    )


def _refuse_too_few(place: str, count: int, samples: int) -> None:
    if count < samples:
        raise UserError(
            f"{place} has too few samples",
            expected=f"{samples}, as calibration.samples asks",
            got=str(count),
            remedy=(f"set calibration.samples (or --samples) to {count}, or " if count else "") + "give more samples",
        )


def _run(model: DiffusionModel, batch: Mapping[str, Tensor], denoiser: Denoiser, place: str) -> None:
    """Calls the denoiser on the model's device; UserError if it fails on these inputs."""
    device = model.device
    _Told(denoiser, model, place)(**{name: x.to(device) for name, x in batch.items()})


class _Told(WrappedDenoiser):
    """A denoiser whose failures are told with its inputs.

    Args:
        place: of the inputs, for the message.
    """

    def __init__(self, denoiser: Denoiser, model: DiffusionModel, place: str) -> None:
        super().__init__(denoiser)
        self._model, self._place = model, place

    def __call__(self, *inputs: Tensor, **named: Tensor) -> Any:
        try:
            return self._denoiser(*inputs, **named)
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
            given = self._model.named(inputs, named)
            raise UserError(
                f"{self._model.name} cannot take {self._place}",
                expected="values and sizes that the denoiser's forward takes",
                got=f"{kind_and_first_line(error)}, for " + ", ".join(f"{n} {_shown(x)}" for n, x in given.items()),
                remedy="use inputs of this model, in the types that its `inputs` have; if memory ran out, lower "
                "calibration.batch; --debug shows where it failed",
            ) from error


def _shown(x: Any) -> str:
    return f"{x.dtype} {list(x.shape)}".removeprefix("torch.") if isinstance(x, Tensor) else repr(x)


# A user's own function ------------------------------------------------------------------------------------------------


def _yielded(model: DiffusionModel, name: str, samples: int) -> Iterator[Drive]:
    """Yields batches of `package.module:function`, which receives the model and yields dictionaries of denoiser inputs."""
    function = import_function(name, "calibration.data")
    try:
        produced = iter(function(model))
    except Exception as error:  # the user's code may raise anything
        raise _function_failed(name, error) from error
    left = samples
    while left:
        try:
            inputs = next(produced, None)
        except Exception as error:
            raise _function_failed(name, error) from error
        if inputs is None:
            _refuse_too_few(name, samples - left, samples)
        checked = _checked_inputs(model, name, inputs)
        batch = {s.name: checked[s.name] if is_shared(model, s) else checked[s.name][:left] for s in model.inputs}
        left -= len(batch[model.inputs[0].name])
        yield lambda denoiser, batch=batch: _run(model, batch, denoiser, f"a batch of {name}")


def _function_failed(name: str, error: Exception) -> UserError:
    return UserError(
        f"the calibration data {name} failed",
        expected="a function of the model that yields dictionaries of denoiser inputs",
        got=f"{type(error).__name__}: {error}",
        remedy="correct the function and put its folder on PYTHONPATH; --debug shows where it failed",
    )


def _checked_inputs(model: DiffusionModel, place: str, inputs: object) -> dict[str, Tensor]:
    """Returns the model's inputs in their types; UserError if they do not fit the denoiser."""
    names = [spec.name for spec in model.inputs]
    if not isinstance(inputs, Mapping) or set(inputs) != set(names):
        raise UserError(
            f"{place} does not give the denoiser's inputs",
            expected=", ".join(names),
            got=", ".join(map(str, inputs)) if isinstance(inputs, Mapping) else type(inputs).__name__,
            remedy="give a dictionary with one tensor for each input",
        )
    given = {name: _as_tensor(inputs[name], f"'{name}' from {place}") for name in names}
    for spec in model.inputs:
        if spec.dtype == "int64" and not whole(given[spec.name]).all():
            raise UserError(
                f"'{spec.name}' from {place} has fractions",
                expected="whole numbers",
                got=str(given[spec.name].dtype).removeprefix("torch."),
                remedy="give whole numbers for this input",
            )
    checked = {spec.name: given[spec.name].to(getattr(torch, spec.dtype)) for spec in model.inputs}
    sizes: dict[str, int] = {}
    for spec in model.inputs:
        shape = tuple(checked[spec.name].shape)
        before = dict(sizes)
        if not fits(spec.shape, shape, sizes) or not shape[0]:
            raise UserError(
                f"'{spec.name}' from {place} has the wrong shape",
                expected="["
                + ", ".join(map(str, spec.shape))
                + "], at least one sample"
                + "".join(f", {name} {size}" for name, size in before.items() if name in spec.shape),
                got=str(list(shape)),
                remedy="give arrays of this shape, with equal sizes of the same dimensions",
            )
        require_finite(f"'{spec.name}' from {place} is damaged", checked[spec.name], "correct the source of this input")
    timestep = checked[model.timestep_input]
    if (outside := timestep[~model.covers(timestep)]).numel():
        raise UserError(
            f"'{model.timestep_input}' from {place} leaves the noise schedule",
            expected=model.covered,
            got=f"{outside[0]:g}",
            remedy="give timesteps in the denoiser's own units",
        )
    return checked


def _as_tensor(value: Any, what: str) -> Tensor:
    try:
        x = torch.as_tensor(value)
        refuse_no_numbers(x)
        return x
    except (RuntimeError, TypeError, ValueError) as error:
        raise UserError(
            f"{what} is no tensor of numbers",
            expected="a tensor, or an array of numbers",
            got=f"a {type(value).__name__}: {first_line(error)}",
            remedy="give a dictionary with one tensor for each of the denoiser's inputs",
        ) from error


# Images and captions --------------------------------------------------------------------------------------------------


def _from_examples(
    model: DiffusionModel, examples: Examples, section: CalibrationSection, bad: BadSamples
) -> Iterator[Drive]:
    stream = islice(examples.read(), section.samples)
    first = 0
    while chunk := list(islice(stream, section.batch)):
        yield lambda denoiser, chunk=chunk, first=first: _run_examples(model, chunk, first, section, bad, denoiser)
        first += len(chunk)


def _run_examples(
    model: DiffusionModel,
    chunk: Sequence[Example | UserError],
    first: int,
    section: CalibrationSection,
    bad: BadSamples,
    denoiser: Denoiser,
) -> None:
    """Denoises with a chunk's captions, or calls the denoiser on its noised images at `steps` stratified timesteps each."""
    usable: list[tuple[int, Example]] = []
    images: list[Tensor] = []
    for number, example in enumerate(chunk, first):
        try:
            if isinstance(example, UserError):
                raise example
            if example.image is not None:
                images.append(load_image(example, _encoder(model, example).shape))
            usable.append((number, example))
        except UserError as error:
            bad.report(error)
    kept, conditions = _conditions(model, [example for _, example in usable], bad)
    if not kept:
        return
    if not images:
        seeds = [section.seed + usable[i][0] for i in kept]
        denoiser = _Told(denoiser, model, "what its sampler passes")
        require_finite_samples(model.sample(denoiser, seeds, steps=section.steps, solver="ddim", conditions=conditions))
        return
    clean = _encoder(model, usable[0][1]).encode(torch.stack([images[i] for i in kept]))
    generator = torch.Generator().manual_seed(section.seed + first)
    for stratum in range(section.steps):
        drawn = (stratum + torch.rand(len(kept), dtype=torch.float32, generator=generator)) / section.steps
        timestep = model.timesteps_at(drawn)
        noise = torch.randn(clean.shape, dtype=torch.float32, generator=generator).to(clean.device)
        x = model.noised(clean, noise, timestep)
        inputs = {model.inputs[0].name: x, model.timestep_input: timestep} | conditions
        checked = _checked_inputs(model, "the image encoder", inputs)
        _run(model, checked, denoiser, "the outputs of the image encoder")


def _encoder(model: DiffusionModel, example: Example):
    if model.encoder is None:
        raise UserError(
            f"{model.name} cannot take the image {example.name}",
            expected="a model with an encoder from images to the denoiser's inputs",
            got="a model without one",
            remedy="give DiffusionModel an ImageEncoder, or calibrate with denoise or recorded inputs",
        )
    return model.encoder


def _conditions(
    model: DiffusionModel, examples: Sequence[Example], bad: BadSamples
) -> tuple[list[int], dict[str, Tensor]]:
    """Returns the numbers of the examples whose captions the model accepts, and the denoiser's further inputs for them."""
    if model.condition is None:
        needed = [spec.name for spec in model.inputs[1:] if spec.name != model.timestep_input]
        if needed or any(example.image is None for example in examples):
            raise UserError(
                f"{model.name} cannot take captions",
                expected="a model that makes " + (", ".join(needed) or "conditions") + " from captions",
                got="a model without `condition`",
                remedy="calibrate with `data: denoise` or with recorded inputs; or "
                + (
                    "save the pipeline with its text encoders, if its call takes prompts"
                    if model.diffusers
                    else "give DiffusionModel a `condition`"
                ),
            )
        return list(range(len(examples))), {}
    kept = list(range(len(examples)))
    try:
        return kept, dict(model.condition([example.caption for example in examples])) if kept else {}
    except ValueError:
        # The model refuses a caption: try the captions one by one.
        kept = []
        for number, example in enumerate(examples):
            try:
                model.condition([example.caption])
                kept.append(number)
            except ValueError as error:
                bad.report(
                    UserError(
                        f"{model.name} cannot take the caption of {example.name}",
                        expected=str(error),
                        got=repr(example.caption),
                        remedy="correct the caption, or leave bad samples out with --skip-bad",
                    )
                )
        return kept, dict(model.condition([examples[i].caption for i in kept])) if kept else {}
