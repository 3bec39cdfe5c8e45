"""A whole diffusers pipeline on a bundle's components: its models are engines, and the rest of it lies in the bundle."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard

from trtconvert.documents import read_json
from trtconvert.errors import BackendUnavailable, UserError, did_you_mean, first_line
from trtconvert.runtime.libraries import library_class

INDEX = "model_index.json"

_CHANGES_NO_IMAGE = ("safety_checker",)
"""Models that pipelines do without: they judge images, and make none."""


def make_pipeline(folder: Path, parts: Mapping[str, Any]) -> Any:
    """The pipeline of a `save_pretrained` folder whose weights are elsewhere.

    Safety checkers are left out: give one as a part to have it.

    Args:
        folder: with the index, and a folder for each tokenizer, scheduler and processor.
        parts: models, and whatever else should not come from the folder, by the pipeline's names; None to go without.
    Raises:
        UserError: the pipeline was saved with a model that is not among the parts, it takes no such part, or a file of the
            folder cannot be read.
        BackendUnavailable: the installed diffusers has no such pipeline, or lacks a class of it.
    """
    try:
        index: dict[str, Any] = read_json(folder / INDEX)
        if not isinstance(index, dict) or not isinstance(index.get("_class_name"), str):
            raise ValueError(f"an {INDEX} that names no class of a pipeline")
    except (OSError, ValueError) as error:
        raise UserError(
            f"the pipeline in {folder} cannot be read",
            expected=f"the {INDEX} that the bundle was built with",
            got=first_line(error),
            remedy="load the bundle from where it is now, or copy it again",
        ) from error
    title = index["_class_name"]
    kind = library_class("diffusers", title)
    parameters = inspect.signature(kind.__init__).parameters
    if unknown := [name for name in parts if name not in parameters]:
        names = [name for name in parameters if name != "self"]
        raise UserError(
            f"{title} has no part '{unknown[0]}'",
            expected="some of " + ", ".join(names),
            got=", ".join(unknown),
            remedy=did_you_mean(unknown[0], names, "leave it out"),
        )
    given: dict[str, Any] = {}
    missing: list[str] = []
    for name in parameters:
        entry = index.get(name)
        if name in parts:
            given[name] = parts[name]
        elif not _is_part(entry):  # a setting, or something newer than the pipeline that was saved
            given |= {name: entry} if name in index else {}
        elif (folder / name).is_dir():
            given[name] = _loaded(folder / name, entry)
        elif None in entry or name in _CHANGES_NO_IMAGE:
            given[name] = None
        else:
            missing.append(name)
    if missing:
        raise UserError(
            f"the bundle has no {', '.join(missing)} for {title}",
            expected="each model that the pipeline was saved with among the bundle's components",
            got=", ".join(sorted(parts)),
            remedy="add them to components in the recipe, or pass them: "
            + ", ".join(f"{name}=…" for name in missing)
            + ", or None to go without",
        )
    if given.get("safety_checker") is None and "requires_safety_checker" in parameters:
        given["requires_safety_checker"] = False
    try:
        return kind(**given)
    except ImportError as error:  # Cosmos makes its safety checker where it is given none
        raise BackendUnavailable(
            f"{title} needs a package that is not installed",
            expected="what its parts import",
            got=first_line(error),
            remedy="install it: its terms ask for what it is for",
        ) from error
    except TypeError as error:  # of a version that wants parts which the one that saved the pipeline had not
        raise UserError(
            f"{title} cannot be made of the parts that were saved",
            expected="the parts that the installed diffusers wants",
            got=first_line(error),
            remedy="pass those that are missing to bundle.pipeline() by name, or install the versions that the bundle's manifest "
            "has under versions",
        ) from error


def _is_part(entry: Any) -> TypeGuard[list[Any]]:
    """Whether an entry of an index is a part: its library and its class, or None twice where it was saved without."""
    return isinstance(entry, list) and len(entry) == 2 and all(x is None or isinstance(x, str) for x in entry)


def _loaded(folder: Path, entry: list[str]) -> Any:
    """A tokenizer, scheduler or processor. Nothing is downloaded."""
    kind = library_class(*entry)
    try:
        return kind.from_pretrained(folder, local_files_only=True)
    except ImportError as error:
        raise BackendUnavailable(
            f"the {entry[1]} in {folder} needs a package that is not installed",
            expected="what the pipeline's own processors import",
            got=first_line(error),
            remedy="install it, or pass another one to bundle.pipeline() by the name of the folder",
        ) from error
    except (OSError, ValueError) as error:
        raise UserError(
            f"the {entry[1]} in {folder} cannot be read",
            expected="the files that `save_pretrained` wrote",
            got=first_line(error),
            remedy="copy the bundle again, or install the versions that its manifest has under versions",
        ) from error
