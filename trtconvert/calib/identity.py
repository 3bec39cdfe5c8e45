"""Kind and hash of calibration data without loading it. Free of torch, so that builds from the cache do not import torch."""

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
"""The kernels' times that come with the program, see `KernelCost`."""

SHIPPED_CLASSIFIERS = ("digits-classifier", "emoji-classifier")
"""Feature extractors that come with the program, with their weights."""

EXTRACTOR = "the feature extractor"
"""Name of a user's feature function in messages."""


class Kind(StrEnum):
    """Kinds of calibration data."""

    DENOISE = "seeded denoising runs"
    FUNCTION = "a function that yields inputs"
    INPUTS = "recorded denoiser inputs"
    PROMPTS = "prompts"
    DATASET = "a Hugging Face dataset"
    IMAGES = "images"


def data_kind(data: str | Path) -> Kind:
    """Returns the kind of `calibration.data`; UserError if the data does not exist or is of no known kind."""
    try:
        return _kind(data)
    except OSError as error:  # for example a name that is too long, or a folder without permission
        raise _unreadable(data, error) from error


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
    """Returns the SHA-256 of the data: of a file, of the names and contents in a folder, or of a function's code. Empty for
    "denoise", which the rest of the recipe determines.

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
        raise _unreadable(path, error) from error


def _unreadable(data: str | Path, error: OSError) -> UserError:
    return UserError(
        f"cannot read the calibration data {data}",
        expected="a file or a folder that this user may read",
        got=f"{error.strerror or type(error).__name__}: {error.filename or data}",
        remedy="correct calibration.data in the recipe (or --data), or the permissions",
    )


def calibration_reads(recipe: Recipe, weights: str) -> dict[str, Any]:
    """Returns everything that determines a calibration, as JSON values.

    Args:
        weights: see `trtconvert.models.identity`.
    Raises:
        UserError: the data, or the calibration file of the recipe, cannot be read.
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
    """Returns the SHA-256 of a file; empty if it cannot be read: the reader of the file raises the error."""
    try:
        return sha256(path)
    except OSError:
        return ""


PLAN_FILES = ("lpips_weights", "features_weights", "kernel_cost")
"""Fields of the plan section that name files."""


def kernel_cost_hash(section: PlanSection) -> str:
    """Returns the SHA-256 of the kernel times that price a plan; UserError if they cannot be read."""
    return named_file("plan.kernel_cost", section.kernel_cost) or sha256(KERNEL_COST)


def named_file(field: str, path: Path | None) -> str:
    """Returns the SHA-256 of the file in a recipe's field, empty for an empty field; UserError if it cannot be read."""
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
    """Returns everything in the plan section that determines a search, as JSON values.

    A user's feature extractor is imported, as its name does not tell where its code is.

    Raises:
        UserError: a file cannot be read, or the function cannot be imported.
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


OF_LIMITS = ("min_psnr", "min_ssim", "max_lpips", "max_feature_distance", "max_prediction_error")
"""Fields of the plan section that limit the quality."""

OF_CHOICES = ("candidates", "layer_candidates", "sparse_candidates", "kernel_cost")
"""Fields of the plan section with the choices of a search and their prices."""


def measured_reads(reads: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the part of `search_reads` that determines what a search measures of a choice or a plan."""
    figures = [name for name in OF_LIMITS if reads[name] is not None]
    return {name: value for name, value in reads.items() if name not in {*OF_LIMITS, *OF_CHOICES}} | {
        "figures": figures
    }


def classifier_weights(name: str) -> Path:
    """Returns the file of one of `SHIPPED_CLASSIFIERS`."""
    return shipped_folder() / f"{name}.safetensors"


def data_name(data: str | Path) -> str:
    """Returns the data's name in the provenance: "denoise", the function, or the name of the file or folder."""
    return data.name if isinstance(data, Path) else data
