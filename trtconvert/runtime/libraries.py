"""Classes of the libraries that bundles name. A bundle must not choose what is imported."""

from __future__ import annotations

import importlib
from typing import Any

from trtconvert.errors import BackendUnavailable

LIBRARIES = ("diffusers", "transformers")


def current_name(library: Any, name: str) -> str:
    """What a library now calls a class: transformers renamed its feature extractors of images to image processors."""
    renamed = name.replace("FeatureExtractor", "ImageProcessor")
    return renamed if not hasattr(library, name) and hasattr(library, renamed) else name


def library_class(module: str, name: str) -> Any:
    """A class of diffusers or transformers.

    Raises:
        BackendUnavailable: the module is of another library, or what is installed has no such class.
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
            remedy="pip install 'trtconvert[diffusers]', in the versions that the bundle's manifest has under versions",
        ) from error
