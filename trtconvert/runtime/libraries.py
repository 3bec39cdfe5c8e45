"""Finds classes that bundles name, in diffusers and transformers only: a bundle must not import other modules."""

from __future__ import annotations

import importlib
from typing import Any

from trtconvert.errors import BackendUnavailable

LIBRARIES = ("diffusers", "transformers")


def current_name(library: Any, name: str) -> str:
    """Return the current name of a class: transformers renamed image feature extractors to image processors."""
    renamed = name.replace("FeatureExtractor", "ImageProcessor")
    return renamed if not hasattr(library, name) and hasattr(library, renamed) else name


def no_diffusers(error: ImportError) -> BackendUnavailable:
    return BackendUnavailable(
        "diffusers is not installed",
        expected="the library of the pipeline",
        got=str(error),
        remedy="pip install 'trtconvert[diffusers]'",
    )


def library_class(module: str, name: str) -> Any:
    """Return a class of diffusers or transformers.

    Raises:
        BackendUnavailable: the module belongs to another library, or the installed version lacks the class.
    """
    try:
        if module.partition(".")[0] not in LIBRARIES:
            raise ImportError(f"{module} is not a module of {' or '.join(LIBRARIES)}")
        library = importlib.import_module(module)
        return getattr(library, current_name(library, name))
    except (ImportError, AttributeError) as error:
        raise BackendUnavailable(
            f"{name}, which the bundle names, cannot be imported",
            expected=f"{name} of {module}",
            got=str(error),
            remedy="pip install 'trtconvert[diffusers]' in the versions of the bundle's manifest",
        ) from error
