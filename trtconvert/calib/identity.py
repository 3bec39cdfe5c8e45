"""What calibration data is, and its hash, without loading it: a build that the cache answers does without torch."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

from trtconvert.entry_point import function_identity, import_function, source_identity
from trtconvert.errors import UserError
from trtconvert.files import sha256
from trtconvert.recipe import PlanSection, Recipe
from trtconvert.shipped import shipped_folder

INPUT_SUFFIXES = (".safetensors", ".npz", ".pt")
PROMPT_SUFFIXES = (".txt",)

KERNEL_COST = Path(__file__).with_name("kernel_cost.json")
"""The kernels' times that come with the program: the GPU, the date, and rows of shape (batch, heads, query tokens, key tokens,
head size), mode, and seconds of a call with its quantisation."""


SHIPPED_CLASSIFIERS = ("digits-classifier", "emoji-classifier")
"""Feature extractors that come with the program, and know their own weights."""

EXTRACTOR = "the feature extractor"
"""What a user's function for features is, in messages."""


class Kind(StrEnum):
    """Kinds of calibration data."""

    DENOISE = "seeded denoising runs"
    FUNCTION = "a function that yields inputs"
    INPUTS = "recorded denoiser inputs"
    PROMPTS = "prompts"
    DATASET = "a Hugging Face dataset"
    IMAGES = "images"


def data_kind(data: str | Path) -> Kind:
    """What `calibration.data` names.

    Raises:
        UserError: nothing is there, or nothing that can be used.
    """
    try:
        return _kind(data)
    except OSError as error:  # a name that is too long, a folder that this user may not enter
        raise UserError(
            f"cannot read the calibration data {data}",
            expected="a file or a folder that this user may read",
            got=error.strerror or type(error).__name__,
            remedy="correct calibration.data in the recipe, or --data",
        ) from error


def _kind(data: str | Path) -> Kind:
    if data == "denoise":
        return Kind.DENOISE
    if isinstance(data, str):
        return Kind.FUNCTION
    if data.is_dir():
        is_dataset = any((data / name).is_file() for name in ("state.json", "dataset_dict.json"))
        return Kind.DATASET if is_dataset else Kind.IMAGES
    if data.suffix in PROMPT_SUFFIXES and data.is_file():
        return Kind.PROMPTS
    if data.suffix in INPUT_SUFFIXES and data.is_file():
        return Kind.INPUTS
    raise UserError(
        f"cannot read the calibration data {data}",
        expected="denoise, package.module:function, a folder of images, a folder that datasets.save_to_disk wrote, prompts "
        f"({', '.join(PROMPT_SUFFIXES)}) or recorded inputs ({', '.join(INPUT_SUFFIXES)})",
        got=f"a file that ends in '{data.suffix}'" if data.exists() else "No such file or folder",
        remedy="correct calibration.data in the recipe, or --data",
    )


def data_identity(data: str | Path) -> str:
    """SHA-256 of the data: of a file, of the names and contents in a folder, or of a function's code. Empty for
    "denoise", which the rest of the recipe decides.

    Raises:
        UserError: as `data_kind`, or it cannot be read.
    """
    kind = data_kind(data)
    if kind is Kind.DENOISE:
        return ""
    if kind is Kind.FUNCTION:
        return hashlib.sha256(f"{data} {source_identity(str(data))}".encode()).hexdigest()
    path = Path(data)
    try:
        if path.is_file():
            return sha256(path)
        digest = hashlib.sha256()
        for file in sorted(p for p in path.rglob("*") if p.is_file()):
            digest.update(f"{file.relative_to(path).as_posix()} {sha256(file)}\n".encode())
        return digest.hexdigest()
    except OSError as error:
        raise UserError(
            f"cannot read the calibration data {path}",
            expected="files that this user may read",
            got=f"{error.strerror}: {error.filename}",
            remedy="correct calibration.data in the recipe, or the permissions",
        ) from error


def calibration_reads(recipe: Recipe, weights: str) -> dict[str, Any]:
    """Everything that decides a calibration, as JSON values.

    Args:
        weights: see `trtconvert.models.identity`.
    Raises:
        UserError: the data, or the calibration to take, cannot be read.
    """
    section = recipe.calibration
    return {
        "weights": weights,
        "model": recipe.model.model_dump(mode="json", exclude={"dtype", "weights", "images"}),
        "calibration": section.model_dump(mode="json", exclude={"data", "from_"}),
        "data": data_identity(section.data) or "denoise",
        "from": _hash(section.from_) if section.from_ is not None else "",
        "sites": recipe.attention.model_dump(mode="json", include={"include", "exclude"}),
        "sparse": list(recipe.sparse_shares),
        "layers": {} if recipe.layers.off else recipe.layers.model_dump(mode="json", exclude={"modes"}),
    }


def _hash(path: Path) -> str:
    """SHA-256 of a file; empty where it cannot be read, which who reads it tells."""
    try:
        return sha256(path)
    except OSError:
        return ""


PLAN_FILES = ("lpips_weights", "features_weights", "kernel_cost")
"""Fields of the plan section that name files."""


def kernel_cost_hash(section: PlanSection) -> str:
    """SHA-256 of the times that a plan is priced by.

    Raises:
        UserError: they cannot be read.
    """
    return named_file("plan.kernel_cost", section.kernel_cost) or sha256(KERNEL_COST)


def named_file(field: str, path: Path | None) -> str:
    """SHA-256 of a file that a recipe's field names; empty where it names none.

    Raises:
        UserError: the file cannot be read.
    """
    try:
        return sha256(path) if path is not None else ""
    except OSError as error:
        raise UserError(
            f"cannot read {field}",
            expected="a file; the path is relative to the recipe",
            got=f"{error.strerror}: {path}",
            remedy=f"correct {field} in the recipe",
        ) from error


def search_reads(section: PlanSection) -> dict[str, Any]:
    """Everything in the plan section that decides a search, as JSON values.

    A feature extractor of the user's own is imported: where it is written is not told by its name.

    Raises:
        UserError: a file cannot be read, or that function cannot be imported.
    """
    reads = section.model_dump(mode="json", exclude={*PLAN_FILES, "point"})
    reads |= {name: named_file(f"plan.{name}", getattr(section, name)) for name in PLAN_FILES}
    reads["kernel_cost"] = kernel_cost_hash(section)
    if section.features is not None and ":" in section.features:
        reads["extractor"] = function_identity(section.features, import_function(section.features, EXTRACTOR))
    if section.features in SHIPPED_CLASSIFIERS and section.features_weights is None:
        weights = classifier_weights(section.features)
        if weights.is_file():
            reads["features_weights"] = sha256(weights)
    return reads


OF_LIMITS = ("min_psnr", "min_ssim", "max_lpips", "max_feature_distance")
"""Fields of the plan section that say how good samples must be."""

OF_CHOICES = ("candidates", "layer_candidates", "sparse_candidates", "kernel_cost")
"""Fields of the plan section that say between which choices a search decides, and what each costs in time."""


def measured_reads(reads: Mapping[str, Any]) -> dict[str, Any]:
    """The part of `search_reads` that decides what a search measures of a choice and of a plan."""
    figures = [name for name in OF_LIMITS if reads[name] is not None]
    return {name: value for name, value in reads.items() if name not in {*OF_LIMITS, *OF_CHOICES}} | {
        "figures": figures
    }


def classifier_weights(name: str) -> Path:
    """The file of one of `SHIPPED_CLASSIFIERS`."""
    return shipped_folder() / f"{name}.safetensors"


def data_name(data: str | Path) -> str:
    """What the provenance calls the data: "denoise", the function, or the name of the file or folder."""
    return data.name if isinstance(data, Path) else data
