"""Makes a whole diffusers pipeline from a bundle's components and its other files in the bundle."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

from trtconvert.documents import PIPELINE_INDEX, read_json
from trtconvert.errors import BackendUnavailable, UserError, first_line, unknown_name
from trtconvert.runtime.libraries import library_class

_CHANGES_NO_IMAGE = ("safety_checker",)
"""Optional models that do not change images."""

_CONVERTIBLE = ("text_encoder", "vae")
"""Prefixes of the names of models that become components. Others, such as a ControlNet or an image encoder, stay in torch."""


class MissingParts(UserError):
    """A bundle lacks models of its pipeline.

    Args:
        names: of the models, in the pipeline.
        pipeline: its class.
        parts: names of the models that are there.
    """

    def __init__(self, names: Sequence[str], pipeline: str, parts: Collection[str]) -> None:
        self.names = tuple(names)
        convertible = ["vae_decoder" if name == "vae" else name for name in names if name.startswith(_CONVERTIBLE)]
        passed = ", ".join(f"{name}=…" for name in names)
        super().__init__(
            f"the bundle has no {', '.join(names)} for {pipeline}",
            expected="each model of the saved pipeline, from the bundle or from the caller",
            got=", ".join(sorted(parts)),
            remedy=(f"add {', '.join(convertible)} to components in the recipe; or " if convertible else "")
            + f"pass {passed} to bundle.pipeline(), where None leaves one out; or give `trtconvert run --weights` the folder of "
            "the original pipeline",
        )


def make_pipeline(folder: Path, parts: Mapping[str, Any]) -> Any:
    """Make the pipeline of a `save_pretrained` folder without weights.

    Safety checkers are left out unless they are among the parts.

    Args:
        folder: folder with the index, and a folder for each tokenizer, scheduler and processor.
        parts: models, and other parts that replace those of the folder, by the pipeline's names; None leaves a part out.
    Raises:
        UserError: a model of the saved pipeline is not among the parts, a part is unknown to the pipeline, or a file cannot be
            read.
        BackendUnavailable: the installed libraries lack the pipeline or a class of its parts.
    """
    try:
        index: dict[str, Any] = read_json(folder / PIPELINE_INDEX)
        if not isinstance(index, dict) or not isinstance(index.get("_class_name"), str):
            raise ValueError(f"an {PIPELINE_INDEX} without the class of a pipeline")
    except (OSError, ValueError) as error:
        raise UserError(
            f"the pipeline in {folder} cannot be read",
            expected=f"the {PIPELINE_INDEX} of the build",
            got=first_line(error),
            remedy="check the bundle's path, or copy the bundle again",
        ) from error
    title = index["_class_name"]
    kind = library_class("diffusers", title)
    parameters = inspect.signature(kind.__init__).parameters
    if unknown := [name for name in parts if name not in parameters]:
        names = [name for name in parameters if name != "self"]
        raise unknown_name(f"{title} has no part '{unknown[0]}'", unknown[0], names, "leave it out")
    components = component_entries(kind, index)
    given: dict[str, Any] = {}
    missing: list[str] = []
    for name in parameters:
        if name in parts:
            given[name] = parts[name]
        elif name not in components:  # a setting, or a parameter newer than the saved pipeline
            given |= {name: index[name]} if name in index else {}
        elif (entry := components[name]) is not None and (folder / name).is_dir():
            given[name] = _loaded(folder / name, entry)
        elif entry is None or name in _CHANGES_NO_IMAGE:
            given[name] = None
        else:
            missing.append(name)
    if missing:
        raise MissingParts(missing, title, parts)
    if given.get("safety_checker") is None and "requires_safety_checker" in parameters:
        given["requires_safety_checker"] = False
    try:
        return kind(**given)
    except ImportError as error:  # Cosmos always makes a safety checker
        raise BackendUnavailable(
            f"{title} needs a package that is not installed",
            expected="the packages that its parts import",
            got=first_line(error),
            remedy="install the package, if its licence allows your use",
        ) from error
    except TypeError as error:  # the installed version needs parts that the saved pipeline lacks
        raise UserError(
            f"{title} cannot be made from the saved parts",
            expected="the parts that the installed diffusers needs",
            got=first_line(error),
            remedy="pass the missing parts to bundle.pipeline() by name, or install the versions of the bundle's manifest",
        ) from error


def component_names(kind: Any) -> list[str]:
    """Return the names of a pipeline class's components.

    As in diffusers, parameters of the constructor that have a default are settings, except optional components.
    """
    return [
        name
        for name, parameter in inspect.signature(kind.__init__).parameters.items()
        if name != "self"
        and (parameter.default is parameter.empty or name in getattr(kind, "_optional_components", ()))
    ]


def names_class(entry: Any) -> TypeGuard[list[str]]:
    """Return whether an entry of an index is a library and a class, as two texts."""
    return isinstance(entry, list) and len(entry) == 2 and all(isinstance(x, str) for x in entry)


def component_entries(kind: Any, index: Mapping[str, Any]) -> dict[str, tuple[str, str] | None]:
    """Return the library and class of each component in an index; None for a component that was saved as None.

    Settings may be lists of two as well, such as the layers of its text encoder that Krea 2 reads.

    Args:
        kind: class of the pipeline.
        index: content of the file `PIPELINE_INDEX`.
    Raises:
        UserError: the entry of a component is no pair of texts, and not [null, null].
    """
    entries: dict[str, tuple[str, str] | None] = {}
    components = component_names(kind)
    for name, entry in index.items():
        if name not in components:
            continue
        if names_class(entry):
            entries[name] = (entry[0], entry[1])
        elif entry == [None, None]:
            entries[name] = None
        else:
            raise UserError(
                f"the entry '{name}' of {PIPELINE_INDEX} is no component of {kind.__name__}",
                expected=f'"{name}": [LIBRARY, CLASS] as two texts, or [null, null] for none',
                got=f"{entry!r}",
                remedy=f"save the pipeline again, or correct the entry '{name}'",
            )
    return entries


def _loaded(folder: Path, entry: tuple[str, str]) -> Any:
    """Load a tokenizer, scheduler or processor without downloads."""
    kind = library_class(*entry)
    try:
        return kind.from_pretrained(folder, local_files_only=True)
    except ImportError as error:
        raise BackendUnavailable(
            f"the {entry[1]} in {folder} needs a package that is not installed",
            expected="the packages that it imports",
            got=first_line(error),
            remedy="install the package, or pass a replacement to bundle.pipeline() by the name of the folder",
        ) from error
    except (OSError, ValueError) as error:
        raise UserError(
            f"the {entry[1]} in {folder} cannot be read",
            expected="the files of `save_pretrained`",
            got=first_line(error),
            remedy="copy the bundle again, or install the versions of its manifest",
        ) from error
