"""A model under several quantisations, judged side by side: what `trtconvert modiff` does.

Each variant draws the same seeds by the model's own sampler; the samples are compared with those of full precision, and by their
features with a set of images. Work is kept in shards, so that a killed command goes on.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from trtconvert.cache import code_identity
from trtconvert.calib.distributed import Ranks
from trtconvert.diffusion_model import Denoiser, DiffusionModel
from trtconvert.errors import UserError
from trtconvert.evaluate import metrics
from trtconvert.evaluate.drawing import features_of
from trtconvert.evaluate.evaluation import SHARD
from trtconvert.evaluate.features import Extractor
from trtconvert.evaluate.reference_set import ReferenceSet
from trtconvert.evaluate.sample_sets import feature_set, quality
from trtconvert.evaluate.shards import ShardSet
from trtconvert.files import sha256
from trtconvert.models.denoiser import on_device
from trtconvert.modiff.calibration import Calibration, digest
from trtconvert.modiff.graphed import Graphed
from trtconvert.modiff.methods import METHODS, Method
from trtconvert.modiff.modulated import Modulated, modulate
from trtconvert.modiff.qdiff import calibrate, record
from trtconvert.modiff.rounding import AdaRound
from trtconvert.modiff.settings import Settings
from trtconvert.progress import Bar, Reporter

CALIBRATION_SEEDS = 1 << 20
"""First seed of the trajectories that calibrations see, far from those of samples."""


@dataclass(frozen=True)
class Variant:
    """A method at some bits.

    Attributes:
        method: see `METHODS`. weight_bits, activation_bits: of integers, or of the floating-point numbers of "full".
    """

    method: Method
    weight_bits: int = 8
    activation_bits: int = 8

    @property
    def bits(self) -> str:
        return f"{self.weight_bits}/{self.activation_bits}"

    @property
    def name(self) -> str:
        """Of its stage."""
        return f"{self.method} {self.bits}"

    @property
    def modulation(self) -> bool:
        return self.method.endswith("modiff")

    def settings(self) -> Settings:
        """
        Raises:
            UserError: there are no such bits.
        """
        return Settings(
            weight_bits=self.weight_bits,
            activation_bits=self.activation_bits,
            modulation=self.modulation,
            bins=1 if self.method == "naive" else Settings.bins,
        )


def parse_variants(methods: Sequence[Method], bits: Sequence[str]) -> list[Variant]:
    """All methods at all bits, each once, and full precision once.

    Args:
        bits: such as "8/6", of weights and of activations.
    Raises:
        UserError: bits that are not two numbers, or that layers do not have.
    """
    variants = [Variant("full")] if "full" in methods else []
    for pair in bits:
        weight, slash, activation = pair.partition("/")
        if not (slash and weight.isdecimal() and activation.isdecimal()):
            raise UserError(
                f"bits cannot be '{pair}'",
                expected="those of weights and of activations, such as 8/6",
                got=repr(pair),
                remedy="give --bits 8/8, or several: --bits 8/8 --bits 4/8",
            )
        found = [Variant(method, int(weight), int(activation)) for method in methods if method != "full"]
        for variant in found:
            variant.settings()
        variants += found
    return list(dict.fromkeys(variants))


@dataclass(frozen=True)
class Study:
    """What all variants of a model have in common.

    Attributes:
        model: in full precision, on the CPU. device: "cpu" or "cuda"; dtype: of everything but what is quantised.
        steps, solver: of the sampler. batch: samples that are drawn, or calibrated on, at once.
        calibration_samples: trajectories' samples; rounding: of Q-Diff.
        work: folder of what is done.
        compiled: samples are drawn by torch.compile and CUDA graphs, on "cuda" alone.
        of_model: what a model's own function imports of this package, see `names_of_ours`.
    Raises:
        UserError: the model's timestep input holds no timesteps. Q-Diff's calibration has bins of timesteps.
    """

    model: DiffusionModel
    device: Literal["cpu", "cuda"]
    dtype: torch.dtype
    steps: int
    solver: str
    batch: int
    calibration_samples: int
    rounding: AdaRound
    work: Path
    compiled: bool = False
    of_model: Collection[str] = ()

    def __post_init__(self) -> None:
        if self.model.noise_input is not None:
            raise UserError(
                f"{self.model.name} is told the noise otherwise than by timesteps, which this study counts",
                expected=f"an input '{self.model.timestep_input}' of timesteps from 0",
                got=self.model.covered,
                remedy="build the model with layers.modiff, which takes any noise input",
            )

    @property
    def code(self) -> set[str]:
        """Names of the code that decides outcomes."""
        return {__name__, "trtconvert.models", *self.of_model}

    @functools.cached_property
    def digest(self) -> str:
        """Of the model, which variants are copies of."""
        return digest(self.model.denoiser)

    @property
    def full(self) -> Variant:
        """Full precision, in the type of everything but what is quantised."""
        bits = 8 * self.dtype.itemsize
        return Variant("full", bits, bits)

    def calibration(self, variant: Variant, progress: Callable[[str, int, int], None] | None = None) -> Calibration:
        """Of a variant, from the work folder where it is done; a damaged file there is made anew.

        Raises:
            UserError: see `trtconvert.modiff.calibrate`.
        """
        path = self.calibration_path(variant)
        if path.is_file():
            with contextlib.suppress(UserError):
                return Calibration.load(path)
        moved = on_device(dataclasses.replace(self.model, denoiser=copy.deepcopy(self.model.denoiser)), self.device)
        seeds = range(CALIBRATION_SEEDS, CALIBRATION_SEEDS + self.calibration_samples)
        paths = [
            record(
                moved.denoiser,
                lambda denoiser, part=part: moved.sample(denoiser, part, steps=self.steps, solver=self.solver),
            )
            for part in _batches(seeds, self.batch)
        ]
        found = calibrate(
            moved.denoiser,
            paths,
            self._calibrated(variant),
            rounding=self._rounding(variant),
            timestep_input=self.model.timestep_input,
            timestep_max=self.model.timestep_max,
            work=path.with_suffix(""),
            on_progress=progress,
        )
        found.save(path)
        return found

    def calibration_path(self, variant: Variant) -> Path:
        """Where a variant's calibration is kept: its name is of everything that decides it."""
        reads = {
            "code": code_identity(*sorted(self.code)),
            "model": self.digest,
            "settings": dataclasses.asdict(self._calibrated(variant)),
            "rounding": dataclasses.asdict(self._rounding(variant)),
            "steps": self.steps,
            "solver": self.solver,
            "samples": self.calibration_samples,
            "batch": self.batch,
            "device": self.device,
        }
        key = hashlib.sha256(json.dumps(reads, sort_keys=True).encode()).hexdigest()[:16]
        return self.work / f"calibration-{key}.safetensors"

    def _calibrated(self, variant: Variant) -> Settings:
        """One calibration is for a variant with and without modulation."""
        return dataclasses.replace(variant.settings(), modulation=True)

    def _rounding(self, variant: Variant) -> AdaRound:
        return self.rounding if variant.method.startswith("qdiff") else AdaRound(iterations=0)

    def prepared(self, variant: Variant, calibration: Calibration | None = None) -> DiffusionModel:
        """The model of a variant on the device; its denoiser is a `Modulated` but in full precision.

        Args:
            calibration: whose settings count, but for the variant's modulation; by default see `calibration`.
        Raises:
            UserError: see `trtconvert.modiff.calibrate`; or the calibration is of another model.
        """
        denoiser = copy.deepcopy(self.model.denoiser)
        if variant.method == "full":
            return on_device(dataclasses.replace(self.model, denoiser=denoiser.to(self.dtype)), self.device)
        calibration = calibration or self.calibration(variant)
        settings = dataclasses.replace(calibration.settings, modulation=variant.modulation)
        moved = on_device(dataclasses.replace(self.model, denoiser=denoiser), self.device)
        modulated = modulate(moved.denoiser, settings, calibration=calibration).to(self.dtype)
        return dataclasses.replace(moved, denoiser=modulated)

    def drawing(self, model: DiffusionModel) -> Callable[[Sequence[int]], Tensor]:
        """What draws the images of seeds, [N, C, H, W] in [0, 1], with a model of `prepared`."""
        denoiser: Denoiser = Graphed(torch.compile(model.denoiser, dynamic=False)) if self.compiled else model.denoiser

        def typed(*inputs: Tensor, **named: Tensor) -> Tensor:  # samplers give FP32, whatever the model computes in
            inputs, named = typed_call(model, self.dtype, inputs, named)
            return denoiser(*inputs, **named).float()

        @torch.no_grad()
        def draw(seeds: Sequence[int]) -> Tensor:
            images = []
            for part in _batches(seeds, self.batch):
                if isinstance(model.denoiser, Modulated):
                    model.denoiser.reset_cache()
                images.append(model.sample(typed, part, steps=self.steps, solver=self.solver))
            return torch.cat(images).cpu()

        return draw


def typed_call(
    model: DiffusionModel, dtype: torch.dtype, inputs: Sequence[Tensor], named: Mapping[str, Tensor]
) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    """A denoiser's call with its floating-point numbers in another type, but for timesteps, which 16 bits do not tell apart."""

    def typed(name: str, x: Tensor) -> Tensor:
        return x.to(dtype) if x.is_floating_point() and name != model.timestep_input else x

    names = [spec.name for spec in model.inputs]
    return (
        tuple(typed(name, x) for name, x in zip(names, inputs, strict=False)),
        {name: typed(name, x) for name, x in named.items()},
    )


@dataclass(frozen=True)
class Row:
    """A variant's figures. None: not to be had from the features, or from so few finite samples.

    Attributes:
        variant: that was drawn. nonfinite: samples with NaN or Inf, which no figure contains.
        psnr: dB against full precision, over all pixels. fid, sfid, inception_score, accuracy: see `SetQuality`;
            fid_full: distance to the samples of full precision.
    """

    variant: Variant
    nonfinite: int
    psnr: float | None
    fid: float | None
    sfid: float | None
    inception_score: float | None
    accuracy: float | None
    fid_full: float | None


def evaluate(
    study: Study,
    variants: Sequence[Variant],
    samples: int,
    seed: int,
    extractor: Extractor,
    reference: ReferenceSet,
    report: Reporter,
    *,
    classes: bool = False,
) -> list[Row]:
    """Draws what is missing in the work folder, and compares. Full precision is always drawn.

    Args:
        samples: of each variant; sample i has the seed `seed + i`.
        classes: whether the extractor's logits are of the classes that the model draws, see `asks_for_classes`.
    Raises:
        UserError: a variant cannot be calibrated, the extractor or reference set cannot be used, or samples of full precision
            are not finite.
    """
    metrics.check_packages()
    ranks = Ranks()
    common = {
        "model": study.digest,
        "features": extractor.identity,
        "steps": study.steps,
        "solver": study.solver,
        "seed": seed,
        "batch": study.batch,
        "device": study.device,
        "dtype": str(study.dtype),
        "compiled": study.compiled,
    }
    full = study.full
    sets: dict[Variant, ShardSet] = {}
    with report.live():
        images_seen = ShardSet.at(
            study.work,
            "reference",
            study.code,
            {"images": reference.identity, "features": extractor.identity},
            reference.count,
            SHARD,
        )
        _make(images_seen, lambda held: features_of(extractor, reference.read(held)), ranks, report, "reference")
        for variant in [full, *(variant for variant in variants if variant.method != "full")]:
            reads = common | {"variant": dataclasses.asdict(variant), "calibration": "none"}
            calibration: Calibration | None = None
            if variant != full:
                with report.stage(f"calibrate {variant.name}") as bar:
                    calibration = study.calibration(variant, told(bar))
                reads["calibration"] = sha256(study.calibration_path(variant))
            shards = sets[variant] = ShardSet.at(
                study.work, f"{variant.method}-{variant.bits.replace('/', '-')}", study.code, reads, samples, SHARD
            )
            drawing: list[Callable[[Sequence[int]], Tensor]] = []

            def make(
                held: range,
                variant: Variant = variant,
                calibration: Calibration | None = calibration,
                drawing: list[Callable[[Sequence[int]], Tensor]] = drawing,
            ) -> dict[str, Tensor]:
                if not drawing:  # not made where all is done
                    drawing.append(study.drawing(study.prepared(variant, calibration)))
                images = drawing[0](range(seed + held.start, seed + held.stop))
                finite = images.flatten(1).isfinite().all(1)
                images = images.nan_to_num(0, 1, 0)
                return features_of(extractor, images) | {"finite": finite, "images": images.half()}

            _make(shards, make, ranks, report, variant.name)
            if variant == full:
                _require_finite(shards, study)
        with report.stage("statistics"):
            return _rows(sets, images_seen, seed, full, classes)


def _make(
    shards: ShardSet, make: Callable[[range], Mapping[str, Tensor]], ranks: Ranks, report: Reporter, name: str
) -> None:
    with report.stage(name) as bar:
        bar.total(len(shards.share(ranks)))
        shards.make(make, ranks, bar.step)


def told(bar: Bar) -> Callable[[str, int, int], None]:
    """What a calibration tells, on a bar."""
    return lambda detail, done, of: bar.share(detail, done / max(1, of))


def _finite(shards: ShardSet) -> Tensor:
    return torch.cat([shard["finite"] for shard in shards.stream(("finite",))])


def _require_finite(full: ShardSet, study: Study) -> None:
    """
    Raises:
        UserError: too few samples of full precision are finite to compare with.
    """
    finite = _finite(full)
    if int(finite.sum()) <= metrics.NEIGHBOURS:
        is_narrow = study.dtype == torch.float16
        raise UserError(
            "the model gives NaN or Inf in full precision",
            expected=f"more than {metrics.NEIGHBOURS} finite samples to compare with",
            got=f"{int(finite.sum())} of {len(finite)} in {str(study.dtype).removeprefix('torch.')}",
            remedy="give --dtype bfloat16 or float32"
            if is_narrow
            else "check the model's weights, --steps and --solver",
        )


def _rows(sets: Mapping[Variant, ShardSet], images_seen: ShardSet, seed: int, full: Variant, asked: bool) -> list[Row]:
    target = feature_set(images_seen, "")
    exact = feature_set(sets[full], "")
    rows = []
    for variant, shards in sets.items():
        finite = _finite(shards)
        nonfinite = int((~finite).sum())
        if len(finite) - nonfinite <= metrics.NEIGHBOURS:
            rows.append(Row(variant, nonfinite, None, None, None, None, None, None))
            continue
        got = exact if variant == full else feature_set(shards, "")
        classes = None if got.logits is None else got.logits.shape[1]
        found = quality(
            got,
            target,
            lambda got, classes=classes: (
                None
                if not asked or got.logits is None or classes is None
                else float((got.logits.argmax(1) == (seed + got.indices) % classes).double().mean())
            ),
            by_sample=False,
        )
        rows.append(
            Row(
                variant,
                nonfinite,
                None if variant == full else _decibels(shards, sets[full]),
                found.fid,
                found.sfid,
                found.inception_score,
                found.accuracy,
                None if variant == full else metrics.frechet_distance(got.moments["pooled"], exact.moments["pooled"]),
            )
        )
    return rows


def _decibels(shards: ShardSet, full: ShardSet) -> float | None:
    """Of all samples that are finite in both; None where none is."""
    error, count = 0.0, 0
    for one, other in zip(*(held.stream(("images", "finite")) for held in (shards, full)), strict=True):
        both = one["finite"] & other["finite"]
        difference = one["images"][both].double() - other["images"][both].double()
        error += float(difference.square_().sum())
        count += difference.numel()
    return float(metrics.decibels(torch.tensor(error / count))) if count else None


def markdown(rows: Sequence[Row]) -> str:
    """A table of `docs/figures.md`."""

    def shown(x: float | None, digits: int = 2) -> str:
        return "" if x is None else f"{x:.{digits}f}"

    lines = [
        "| method | W/A | PSNR, dB | FID | sFID | IS | accuracy | FID to full precision |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        name = f"{METHODS[row.variant.method]} | {row.variant.bits}"
        figures = [shown(row.psnr, 1), *map(shown, (row.fid, row.sfid, row.inception_score))]
        lines.append(f"| {name} | {' | '.join(figures)} | {shown(row.accuracy, 3)} | {shown(row.fid_full)} |")
    broken = [f"{row.nonfinite} of {row.variant.name}" for row in rows if row.nonfinite]
    if broken:
        lines += ["", f"Samples with NaN or Inf, which are in no figure: {', '.join(broken)}."]
    return "\n".join(lines)


def as_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    return [dataclasses.asdict(row) for row in rows]


def _batches(seeds: Sequence[int], size: int) -> list[Sequence[int]]:
    return [seeds[start : start + size] for start in range(0, len(seeds), size)]
