"""The inputs of stages: the recipe, the model that stages compute with, the cache."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtconvert.cache import Cache, Stage
from trtconvert.calib.distributed import Crew, Ranks
from trtconvert.entry_point import names_of_ours
from trtconvert.files import sha256
from trtconvert.library import library_path
from trtconvert.models.placed import Place, collect_garbage, empty_gpu, placed
from trtconvert.recipe import Recipe
from trtconvert.stages.common import run_stage

if TYPE_CHECKING:
    from trtconvert.calib.calibrate import Parts
    from trtconvert.models import DiffusionModel
    from trtconvert.progress import Bar, Reporter


class Source:
    """The model of a recipe, loaded and placed on first use."""

    def __init__(self, recipe: Recipe, place: Place, report: Reporter) -> None:
        self._recipe, self._place, self._report = recipe, place, report
        self._model: DiffusionModel | None = None
        self._placed: DiffusionModel | None = None

    def model(self) -> DiffusionModel:
        """Returns the model on the CPU: in FP32, or as stored if a GPU computes, see `trtconvert.models.load`."""
        if self._model is None:
            from trtconvert import models

            self._model = models.load(self._recipe.model, self._recipe.loras, as_stored=self._place.on_gpu)
            for text in self._model.notices:
                self._report.notice(text)
        return self._model

    def placed(self) -> DiffusionModel:
        """Returns the model on the recipe's device, in the recipe's type."""
        if self._placed is None:
            self._placed = placed(self.model(), self._place, self._report.notice)
        return self._placed

    def leave_gpu(self) -> None:
        """Frees the copy on the GPU."""
        self._placed = None
        if self._place.on_gpu and self._model is not None:
            empty_gpu(self._model)


@dataclass(frozen=True)
class Build:
    """The inputs of stages.

    Attributes:
        weights: hash of the model's weights, see `trtconvert.models.identity`.
        place: where the model computes.
        cache: holds the outputs of stages.
        report: receives progress and notices.
        skip_bad: leave bad calibration samples out.
        native: also write each exported model for engines without plugins. TensorRT-RTX and the verification on a CPU read it.
        timed: wraps the model for the calibration of the given sites and layers. The first calls give a forecast of the
            build's time.
        crew: processes that share the samples. Only rank 0 runs stages; the others run the tasks that stages share.
    """

    recipe: Recipe
    weights: str
    place: Place
    cache: Cache
    report: Reporter
    skip_bad: bool = False
    native: bool = True
    timed: Callable[[DiffusionModel, Parts], DiffusionModel] = lambda model, _: model
    crew: Crew = field(default_factory=Crew)

    @cached_property
    def source(self) -> Source:
        return Source(self.recipe, self.place, self.report)

    @property
    def ranks(self) -> Ranks:
        return self.crew.ranks

    def stage(self, name: str, reads: Mapping[str, Any], make: Callable[[Path, Bar], None]) -> Stage:
        """Runs a stage that may load the model, or takes it from the cache; see `run_stage`."""

        @functools.wraps(make)  # keeps the module, which is part of the stage's key
        def made(folder: Path, bar: Bar) -> None:
            make(folder, bar)
            if self.place.on_gpu:
                collect_garbage()

        return run_stage(name, reads, made, self.cache, self.report, self.code)

    @cached_property
    def code(self) -> set[str]:
        """Modules for the keys of stages: those that load the model, and those that the user's functions import."""
        recipe = self.recipe
        named = (recipe.model.source, recipe.calibration.data, recipe.plan.features)
        return {__name__}.union(*(names_of_ours(name) for name in named if isinstance(name, str)))

    def guidance_reads(self) -> dict[str, str]:
        """Returns the part of a stage's key about guidance, if the denoiser applies guidance."""
        return {"guidance": "fused"} if self.recipe.engine.guidance == "fused" else {}

    def kernel_reads(self) -> dict[str, str]:
        """Returns the part of a stage's key about the compiled kernels, if INT8 uses the kernels in torch."""
        library = library_path() if self.place.on_gpu else None
        return {"kernels": sha256(library)} if library is not None else {}

    def as_exported(self, model: DiffusionModel) -> DiffusionModel:
        """Returns a model with the inputs and dimensions of its export; with `engine.guidance: fused`, see `fused_form`."""
        from trtconvert.models.guidance import fused_form

        return fused_form(model) if self.recipe.engine.guidance == "fused" else model
