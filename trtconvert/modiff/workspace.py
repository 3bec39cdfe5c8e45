"""Calibrates and prepares variants of a model: a quantisation method at some bits. Finished calibrations are kept."""

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
from typing import Literal

import torch
from torch import Tensor

from trtconvert.cache import code_identity
from trtconvert.diffusion_model import Denoiser, DiffusionModel
from trtconvert.errors import UserError
from trtconvert.models.denoiser import on_device
from trtconvert.modiff.calibration import Calibration, digest
from trtconvert.modiff.modulated import Modulated, modulate
from trtconvert.modiff.qdiff import calibrate, record
from trtconvert.modiff.rounding import AdaRound
from trtconvert.modiff.settings import Settings
from trtconvert.progress import Bar

CALIBRATION_SEEDS = 1 << 20
"""First seed of the calibration's trajectories, far from those of samples."""


Method = Literal["full", "naive", "lcq", "lcq-modiff", "qdiff", "qdiff-modiff"]
METHODS: dict[Method, str] = {
    "full": "full precision",
    "naive": "one scale for all timesteps",
    "lcq": "LCQ-like: calibrated layer by layer",
    "lcq-modiff": "LCQ-like + MoDiff",
    "qdiff": "Q-Diff",
    "qdiff-modiff": "Q-Diff + MoDiff",
}
"""Methods, and their names in tables. All but the first have scales of least squared error: of weights by output channel, of
activations by tensor. `lcq` and `naive` round weights to the nearest, Q-Diff by AdaRound. `naive` has one scale of activations
for all timesteps, the others have one per bin."""


@dataclass(frozen=True)
class Variant:
    """A method at some bits.

    Attributes:
        method: see `METHODS`. weight_bits, activation_bits: of integers; of "full", of floating-point numbers.
    """

    method: Method
    weight_bits: int = 8
    activation_bits: int = 8

    @property
    def bits(self) -> str:
        return f"{self.weight_bits}/{self.activation_bits}"

    @property
    def name(self) -> str:
        return f"{self.method} {self.bits}"

    @property
    def modulation(self) -> bool:
        return self.method.endswith("modiff")

    def settings(self) -> Settings:
        """Returns the settings of the layers.

        Raises:
            UserError: layers do not support the bits.
        """
        return Settings(
            weight_bits=self.weight_bits,
            activation_bits=self.activation_bits,
            modulation=self.modulation,
            bins=1 if self.method == "naive" else Settings.bins,
        )


@dataclass(frozen=True)
class Workspace:
    """A model, with the options that all of its variants share.

    Attributes:
        model: in full precision, on the CPU. device: "cpu" or "cuda". dtype: of everything that is not quantised.
        steps, solver: of the sampler. batch: samples that are drawn, or calibrated on, at once.
        calibration_samples: number of trajectories. rounding: of Q-Diff.
        work: folder of finished work.
        of_model: modules of this package that the model's own function imports, see `names_of_ours`.
    Raises:
        UserError: the model's noise input is no timestep. Q-Diff calibrates bins of timesteps.
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
    of_model: Collection[str] = ()

    def __post_init__(self) -> None:
        if self.model.noise_input is not None:
            raise UserError(
                f"the noise input of {self.model.name} is no timestep, which Q-Diff needs",
                expected=f"an input '{self.model.timestep_input}' of timesteps from 0",
                got=self.model.covered,
                remedy="build the model with layers.modiff, which takes any noise input",
            )

    @property
    def code(self) -> set[str]:
        """Modules whose code affects the results."""
        return {__name__, "trtconvert.models", *self.of_model}

    @functools.cached_property
    def digest(self) -> str:
        """Digest of the model."""
        return digest(self.model.denoiser)

    @property
    def full(self) -> Variant:
        """The variant of full precision."""
        bits = 8 * self.dtype.itemsize
        return Variant("full", bits, bits)

    def calibration(self, variant: Variant, progress: Callable[[str, int, int], None] | None = None) -> Calibration:
        """Returns the calibration of a variant, from the work folder if it has a whole one.

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
            for part in batches(seeds, self.batch)
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
        """Returns the path of a variant's calibration; the name hashes all inputs."""
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
        """Returns settings with modulation: variants with and without modulation share a calibration."""
        return dataclasses.replace(variant.settings(), modulation=True)

    def _rounding(self, variant: Variant) -> AdaRound:
        return self.rounding if variant.method.startswith("qdiff") else AdaRound(iterations=0)

    def prepared(self, variant: Variant, calibration: Calibration | None = None) -> DiffusionModel:
        """Returns the model of a variant on the device. Its denoiser is a `Modulated`, except for full precision.

        Args:
            calibration: its settings apply, except for the modulation. None: see `calibration`.
        Raises:
            UserError: see `trtconvert.modiff.calibrate`; or the calibration belongs to another model.
        """
        denoiser = copy.deepcopy(self.model.denoiser)
        if variant.method == "full":
            return on_device(dataclasses.replace(self.model, denoiser=denoiser.to(self.dtype)), self.device)
        calibration = calibration or self.calibration(variant)
        settings = dataclasses.replace(calibration.settings, modulation=variant.modulation)
        moved = on_device(dataclasses.replace(self.model, denoiser=denoiser), self.device)
        modulated = modulate(moved.denoiser, settings, calibration=calibration).to(self.dtype)
        return dataclasses.replace(moved, denoiser=modulated)

    def drawing(self, model: DiffusionModel, denoiser: Denoiser | None = None) -> Callable[[Sequence[int]], Tensor]:
        """Returns a function that draws the images [N, C, H, W] in [0, 1] of seeds with a model of `prepared`.

        Args:
            denoiser: calls the model's own, by default that itself.
        """
        denoiser = denoiser or model.denoiser

        def typed(*inputs: Tensor, **named: Tensor) -> Tensor:  # samplers compute in FP32
            inputs, named = typed_call(model, self.dtype, inputs, named)
            return denoiser(*inputs, **named).float()

        @torch.no_grad()
        def draw(seeds: Sequence[int]) -> Tensor:
            images = []
            for part in batches(seeds, self.batch):
                if isinstance(model.denoiser, Modulated):
                    model.denoiser.reset_cache()
                images.append(model.sample(typed, part, steps=self.steps, solver=self.solver))
            return torch.cat(images).cpu()

        return draw


def typed_call(
    model: DiffusionModel, dtype: torch.dtype, inputs: Sequence[Tensor], named: Mapping[str, Tensor]
) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    """Casts the floating-point inputs of a call, except for timesteps, which 16 bits cannot distinguish."""

    def typed(name: str, x: Tensor) -> Tensor:
        return x.to(dtype) if x.is_floating_point() and name != model.timestep_input else x

    names = [spec.name for spec in model.inputs]
    return (
        tuple(typed(name, x) for name, x in zip(names, inputs, strict=False)),
        {name: typed(name, x) for name, x in named.items()},
    )


def told(bar: Bar) -> Callable[[str, int, int], None]:
    """Returns a callback that shows the progress of a calibration on a bar."""
    return lambda detail, done, of: bar.share(detail, done / max(1, of))


def batches(seeds: Sequence[int], size: int) -> list[Sequence[int]]:
    return [seeds[start : start + size] for start in range(0, len(seeds), size)]
