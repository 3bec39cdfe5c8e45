"""Models for tests of CUDA graphs: a model of one line, and digits with its calibration and its sensitivities."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from support import REPOSITORY
from torch import Tensor, nn

from trtconvert.attention.modes import Mode
from trtconvert.attention.reference import AttentionTables
from trtconvert.bars import NoBar
from trtconvert.calib.calibrate import Parts, calibrate, parts_to_convert
from trtconvert.calib.calibration import Calibration
from trtconvert.calib.candidates import attention_units
from trtconvert.calib.layer_plan import SearchedLayers
from trtconvert.calib.sensitivity import Sensitivity, measure_sensitivity
from trtconvert.diffusion_model import DiffusionModel, InputSpec
from trtconvert.linear.modes import LayerMode
from trtconvert.models.digits import digits_model
from trtconvert.noted import Notes
from trtconvert.quant.forward import Int8Sites
from trtconvert.recipe import Recipe, load_recipe

BINS = 5


@dataclass(frozen=True)
class Model:
    """What `Graphed` asks of a model."""

    denoiser: nn.Module
    inputs: tuple[InputSpec, ...] = (
        InputSpec("x", "float32", ("batch", 8)),
        InputSpec("timestep", "float32", ("batch",)),
    )
    timestep_input: str = "timestep"
    noise_input: None = None


class Doubling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(2.0), requires_grad=False)

    def forward(self, x: Tensor, timestep: Tensor) -> Tensor:
        return x * self.factor + timestep[:, None]


@dataclass(frozen=True)
class Entry:
    """What a call of `Noting` notes: a tensor, and others by name, one of them the same."""

    x: Tensor
    of: dict[str, Tensor]


class Noting:
    """A denoiser that notes the extremes of its samples."""

    def __init__(self, denoiser: nn.Module) -> None:
        self.notes: Notes[Entry] = Notes()
        self._denoiser = denoiser

    def __call__(self, x: Tensor, timestep: Tensor) -> Tensor:
        low = x.amin(0)
        self.notes.add("a", Entry(low, {"high": x.amax(0), "low": low}))
        return self._denoiser(x, timestep)

    def assert_noted(self, given: list[tuple[Tensor, Tensor]]) -> None:
        """The notes are those of these calls."""
        found = self.notes.take()["a"]
        assert [place for noted in found for place in noted.places] == [*range(len(given))]
        low, high = (torch.cat([of(noted.entry) for noted in found]) for of in (lambda e: e.x, lambda e: e.of["high"]))
        for (x, _), of_low, of_high in zip(given, low, high, strict=True):
            assert torch.equal(of_low, x.amin(0)) and torch.equal(of_high, x.amax(0))


def calls(count: int, rows: int = 3, device: str = "cpu") -> list[tuple[Tensor, Tensor]]:
    """Samples and timesteps."""
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(rows, 8, generator=generator).to(device), torch.full((rows,), float(n), device=device))
        for n in range(count)
    ]


@dataclass(frozen=True)
class Digits:
    """The digits model, and what is converted of it."""

    recipe: Recipe
    model: DiffusionModel
    parts: Parts

    @staticmethod
    def load(place=lambda model: model) -> Digits:
        recipe = load_recipe(REPOSITORY / "recipes/digits-dit.yaml")
        recipe = recipe.model_copy(update={"layers": recipe.layers.model_copy(update={"modes": "auto"})})
        model = place(digits_model(REPOSITORY / "recipes/digits-dit.safetensors"))
        return Digits(recipe, model, parts_to_convert(model, recipe.attention, recipe.layers))

    def calibrated(self, folder: Path) -> Calibration:
        section = self.recipe.calibration.model_copy(update={"samples": 6, "batch": 3, "steps": 6, "bins": BINS})
        parts = self.parts
        return calibrate(
            self.model, section, "", parts.sites, folder, NoBar(), layers=parts.layers, of_layers=self.recipe.layers
        )

    def sensitivity(self, made: Calibration, steps: int = 5) -> Sensitivity:
        """By probes."""
        of_layers = self.recipe.layers
        layers = SearchedLayers.of(self.model, self.parts.layers, made, of_layers, lambda _: [LayerMode.STATIC], BINS)
        exact = torch.zeros(BINS, dtype=torch.int32)
        tables = {site.name: AttentionTables(**made.tables[site.name], modes=exact) for site in self.parts.sites}
        device = next(self.model.denoiser.parameters()).device
        sites = Int8Sites(tables, self.model.timestep_max, "dynamic", True).to(device)
        units = [*attention_units(dict.fromkeys(sites.tables, "dynamic"), Mode), *layers.groups]
        return measure_sensitivity(
            self.model, units, sites, BINS, layers=layers.int8, seeds=range(2), steps=steps, method="probes"
        )


def assert_same_calibration(made: Calibration, expected: Calibration) -> None:
    for name, tables in expected.tables.items():
        for key, table in tables.items():
            torch.testing.assert_close(made.tables[name][key], table, msg=f"{name} {key}")
    for input_group, scales in expected.layers.items():
        torch.testing.assert_close(made.layers[input_group].x_scale, scales.x_scale)
    assert made.provenance == expected.provenance
    for site, shares in expected.outliers.items():
        for name, x in shares.items():
            torch.testing.assert_close(made.outliers[site][name], x)


def assert_same_sensitivity(found: Sensitivity, expected: Sensitivity, rtol: float) -> None:
    known = expected.error.isfinite()
    assert torch.equal(found.error.isfinite(), known)
    torch.testing.assert_close(found.error[known], expected.error[known], rtol=rtol, atol=0)
    torch.testing.assert_close(found.gain, expected.gain, rtol=0.1, atol=0)
