"""Recipes and models that come with the program."""

from __future__ import annotations

from pathlib import Path

from trtconvert.documents import parse_yaml

_PACKAGE = Path(__file__).parent


def shipped_folder() -> Path:
    """Returns the folder of recipes: inside an installed package, or beside the package in a checkout."""
    installed = _PACKAGE / "recipes"
    return installed if installed.is_dir() else _PACKAGE.parent / "recipes"


def shipped_models() -> list[str]:
    """Returns the names of the recipes whose weights come with the program."""
    return [path.stem for path in sorted(shipped_folder().glob("*.yaml")) if _weights(path).is_file()]


def shipped_recipe(name: str) -> Path:
    """Returns the recipe of one of `shipped_models`."""
    return shipped_folder() / f"{name}.yaml"


def _weights(recipe: Path) -> Path:
    return recipe.parent / str(parse_yaml(recipe.read_text(encoding="utf-8"))["model"]["weights"])
