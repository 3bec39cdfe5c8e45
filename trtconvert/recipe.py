"""Recipes: what to convert, how to calibrate it, what to build, and which quality it must keep.

A recipe is YAML. Every field has a default but `model`; unknown fields are refused with the nearest valid name, and every
error names its line.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from trtconvert.errors import UserError

ModeName = Literal["fp16", "precision", "balanced", "aggressive"]
Target = Literal["sm75", "sm80", "sm86", "sm89", "sm120"]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelSection(_Section):
    """Where the denoiser comes from."""

    source: str = Field(
        description="`digits-dit`, the model that ships with the project, or `package.module:function`, a function that "
        "returns a trtconvert.models.DiffusionModel."
    )
    weights: Path | None = Field(default=None, description="Safetensors file, relative to the recipe.")
    options: dict[str, Any] = Field(
        default_factory=dict, description="Keyword arguments for a `package.module:function`."
    )
    dtype: Literal["float32", "float16", "bfloat16"] = Field(
        default="float32", description="Type of the engine's weights and inputs."
    )


class AttentionSection(_Section):
    """Which attention runs in INT8, and how."""

    include: list[str] = Field(default=["*"], min_length=1, description="Patterns (fnmatch) of site names to convert.")
    exclude: list[str] = Field(default=[], description="Patterns of site names to leave as they are.")
    modes: Literal["auto"] | ModeName | list[ModeName] = Field(
        default="auto",
        description="One mode for every timestep, one per timestep bin from low noise up, or `auto`: by each bin's noise "
        "level, aggressive where σ/σ_mid > 5, precision where σ/σ_mid < 0.1, balanced between.",
    )
    scaling: Literal["calibrated", "dynamic"] = Field(
        default="calibrated",
        description="`calibrated`: static per-head scales. `dynamic`: modes precision and balanced measure the scales of "
        "queries (per token) and keys (per 128) while they run.",
    )
    smooth_k: bool = Field(
        default=True, description="Subtract the calibrated mean key before quantising; softmax does not see it."
    )


class CalibrationSection(_Section):
    """What is observed, and how ranges become scales."""

    data: Literal["denoise"] | Path = Field(
        default="denoise",
        description="`denoise`: seeded denoising runs of the model. Or a .safetensors or .npz file of denoiser inputs.",
    )
    samples: Annotated[int, Field(ge=1)] = Field(
        default=64, description="Samples to denoise, or recorded inputs to use."
    )
    batch: Annotated[int, Field(ge=1)] = Field(
        default=16, description="Samples per batch; percentiles are taken over batches."
    )
    steps: Annotated[int, Field(ge=1)] = Field(default=20, description="Denoising steps of each run.")
    seed: Annotated[int, Field(ge=0)] = 0
    percentile: Annotated[float, Field(gt=0, le=100)] = 99.0
    statistic: Literal["batch-max", "elements"] = Field(
        default="batch-max",
        description="What the percentile is taken of: the maxima of the batches, or the magnitudes of all elements.",
    )
    bins: Annotated[int, Field(ge=1, le=64)] = Field(
        default=10, description="Timestep bins; each has its own scales and mode."
    )


class Range(_Section):
    """Sizes that an engine accepts in one symbolic dimension."""

    min: Annotated[int, Field(ge=1)]
    opt: Annotated[int, Field(ge=1)]
    max: Annotated[int, Field(ge=1)]

    @model_validator(mode="before")
    @classmethod
    def _from_list(cls, value: Any) -> Any:
        if isinstance(value, int):
            return {"min": value, "opt": value, "max": value}
        if isinstance(value, (list, tuple)) and len(value) == 3:
            return dict(zip(("min", "opt", "max"), value, strict=True))
        return value

    @model_validator(mode="after")
    def _ordered(self) -> Range:
        if not self.min <= self.opt <= self.max:
            raise ValueError(f"min <= opt <= max is needed, got {self.min}, {self.opt}, {self.max}")
        return self


class EngineSection(_Section):
    """What is built."""

    backend: Literal["auto", "tensorrt", "tensorrt_rtx", "onnxruntime"] = Field(
        default="auto",
        description="`auto` takes the first of tensorrt, tensorrt_rtx and onnxruntime that this machine can build with.",
    )
    shapes: dict[str, Range] = Field(
        default_factory=dict,
        description="Symbolic dimension: [min, opt, max]. What is absent takes the model's own range.",
    )
    targets: list[Target] = Field(
        default=["sm75", "sm80", "sm86", "sm89", "sm120"],
        min_length=1,
        description="GPUs that TensorRT-RTX builds for, an engine each.",
    )

    @field_validator("targets")
    @classmethod
    def _distinct(cls, targets: list[str]) -> list[str]:
        if len(set(targets)) != len(targets):
            raise ValueError("each target once is needed")
        return targets


class VerifySection(_Section):
    """The gates: a build whose images or outputs miss one of them fails."""

    samples: Annotated[int, Field(ge=1)] = Field(
        default=64, description="Seeds sampled by the full-precision and by the INT8 model."
    )
    steps: Annotated[int, Field(ge=1)] = 50
    sampler: Literal["ddim", "heun", "euler"] = "ddim"
    seed: Annotated[int, Field(ge=0)] = Field(
        default=1000, description="First seed; keep it apart from the calibration's."
    )
    min_psnr: float = Field(
        default=33.0, description="dB, of the final samples against the full-precision model's, over all seeds."
    )
    min_site_sqnr: float = Field(
        default=15.0, description="dB, of each site's output in each timestep bin against exact attention."
    )
    max_error: Annotated[float, Field(gt=0)] = Field(
        default=0.01,
        description="Relative L2 error of the exported denoiser against the torch reference of the same INT8 arithmetic.",
    )


class OutputSection(_Section):
    """What the bundle holds beside the engines."""

    grid: Annotated[int, Field(ge=1, le=64)] = Field(default=16, description="Samples shown in samples.png.")


class Recipe(_Section):
    """A conversion from end to end."""

    model: ModelSection
    attention: AttentionSection = AttentionSection()
    calibration: CalibrationSection = CalibrationSection()
    engine: EngineSection = EngineSection()
    verify: VerifySection = VerifySection()
    output: OutputSection = OutputSection()

    @model_validator(mode="after")
    def _a_mode_per_bin(self) -> Recipe:
        modes, bins = self.attention.modes, self.calibration.bins
        if isinstance(modes, list) and len(modes) != bins:
            raise ValueError(
                f"attention.modes has {len(modes)} entries, calibration.bins is {bins}: one mode per bin is needed"
            )
        return self


def load_recipe(path: Path) -> Recipe:
    """Read and check a recipe; relative paths in it become relative to the recipe's folder.

    Raises:
        UserError: the file cannot be read, is not YAML, or does not fit the schema. Names the line and the nearest name.
    """
    from ruamel.yaml import YAML, YAMLError

    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"cannot read the recipe {path}",
            expected="a YAML file in UTF-8",
            got=_reason(error),
            remedy="check the path",
        ) from error
    try:
        document = YAML(typ="rt").load(text)
    except YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        raise UserError(
            f"{where}: not valid YAML",
            expected="YAML",
            got=str(getattr(error, "problem", None) or error).splitlines()[0],
            remedy="correct the line; a wrong indentation or a missing space after ':' is the usual cause",
        ) from error
    if not isinstance(document, dict):
        raise UserError(
            f"{path}: a recipe is a mapping of sections",
            expected=f"sections {', '.join(Recipe.model_fields)}",
            got=f"a {type(document).__name__}" if document is not None else "an empty file",
            remedy="start from recipes/digits-dit.yaml",
        )
    try:
        recipe = Recipe.model_validate(_plain(document))
    except ValidationError as error:
        raise UserError("\n".join(_describe(path, document, e) for e in error.errors())) from error
    return _anchored(recipe, path.parent)


def json_schema() -> dict[str, Any]:
    """JSON schema of recipes, for editors."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema"} | Recipe.model_json_schema()


def _reason(error: Exception) -> str:
    return error.strerror or type(error).__name__ if isinstance(error, OSError) else "bytes that are not UTF-8"


def _plain(node: Any) -> Any:
    if isinstance(node, dict):
        return {str(key): _plain(value) for key, value in node.items()}
    if isinstance(node, list):
        return [_plain(value) for value in node]
    return node


def _anchored(recipe: Recipe, folder: Path) -> Recipe:
    model, calibration = recipe.model, recipe.calibration
    if model.weights is not None:
        model = model.model_copy(update={"weights": folder / model.weights})
    if isinstance(calibration.data, Path):
        calibration = calibration.model_copy(update={"data": folder / calibration.data})
    return recipe.model_copy(update={"model": model, "calibration": calibration})


def _describe(path: Path, document: Any, error: Any) -> str:
    """One pydantic error as expected, got, remedy, with the line in the file."""
    keys = [part for part in error["loc"] if _is_place(document, error["loc"], part)]
    line, field = _line(document, keys), ".".join(str(key) for key in keys)
    if error["type"] == "extra_forbidden":
        valid = sorted(_fields_at(keys[:-1]))
        near = difflib.get_close_matches(str(keys[-1]), valid, n=1, cutoff=0.5)
        remedy = f"did you mean '{near[0]}'?" if near else "remove it"
        return f"{path}:{line}: unknown field '{field}'\n  expected: one of {', '.join(valid)}\n  remedy: {remedy}"
    if error["type"] == "missing":
        return f"{path}:{line}: '{'.'.join(str(p) for p in error['loc'])}' is missing\n  remedy: add it"
    got = error["input"]
    shown = f"\n  got: {got!r}" if isinstance(got, (str, int, float, bool, list, type(None))) else ""
    message = error["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
    return f"{path}:{line}: '{field or 'recipe'}' does not fit\n  expected: {message}{shown}"


def _is_place(document: Any, loc: tuple, part: Any) -> bool:
    """Whether a part of pydantic's location is a key of the document (unions add the names of their branches)."""
    node = document
    for step in loc:
        inside = (isinstance(node, dict) and step in node) or (isinstance(node, list) and isinstance(step, int))
        if step is part:
            return inside
        if inside:
            node = node[step]
    return False


def _line(document: Any, keys: list[Any]) -> int:
    node, line = document, 1
    for key in keys:
        places = node.lc  # ruamel keeps (line, column) of keys and of items
        line = (places.key(key) if isinstance(node, Mapping) else places.item(key))[0] + 1
        node = node[key]
    return line


def _fields_at(keys: list[Any]) -> Iterator[str]:
    section: Any = Recipe
    for key in keys:
        annotation = section.model_fields[key].annotation
        section = annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else Range
    yield from section.model_fields
