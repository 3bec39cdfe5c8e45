"""Sizes and types of engines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from trtconvert.bundle import Dims, covering
from trtconvert.errors import UserError
from trtconvert.recipe import Range, Recipe

if TYPE_CHECKING:
    from trtconvert.models import DiffusionModel


def ranges_read(recipe: Recipe) -> list[dict[str, Any]]:
    """Returns the recipe's shapes as part of a stage's key."""
    return [{name: wanted.model_dump() for name, wanted in ranges.items()} for ranges in recipe.engine.ranges()]


def profiles_of(recipe: Recipe, model: DiffusionModel) -> list[Dims]:
    """Returns the model's ranges, narrowed by the recipe's: one mapping per optimisation profile."""
    return [narrowed(wanted, model.dims, model.name, model.steps) for wanted in recipe.engine.ranges()]


def narrowed(
    ranges: Mapping[str, Range], available: Mapping[str, tuple[int, int, int]], name: str, steps: Mapping[str, int]
) -> Dims:
    """Returns a model's dimensions, with the ranges of an engine section instead of the model's.

    Args:
        ranges: by dimension, of the recipe's engine section.
        available: min, opt and max of each dimension of the model.
        name: of the model, for messages.
        steps: step sizes of dimensions, if not 1.
    Raises:
        UserError: a dimension is unknown, or its range exceeds the model's, or misses the model's steps.
    """
    dims = dict(available)
    for dim, wanted in ranges.items():
        if dim not in dims:
            raise UserError(
                f"the recipe's engine section names the dimension '{dim}', which {name} does not have",
                expected=", ".join(dims),
                got=dim,
                remedy="correct engine.shapes or engine.profiles",
            )
        low, _, high = dims[dim]
        if wanted.min < low or wanted.max > high:
            raise UserError(
                f"the range of '{dim}' in the recipe's engine section exceeds the range of {name}",
                expected=f"{low} to {high}",
                got=f"{wanted.min} to {wanted.max}",
                remedy="narrow engine.shapes or engine.profiles",
            )
        if any((size - low) % steps.get(dim, 1) for size in (wanted.min, wanted.opt, wanted.max)):
            raise UserError(
                f"{name} does not support the sizes of '{dim}' in the recipe's engine section",
                expected=f"{low} to {high} in steps of {steps[dim]}",
                got=f"{wanted.min}, {wanted.opt}, {wanted.max}",
                remedy="correct engine.shapes or engine.profiles",
            )
        dims[dim] = (wanted.min, wanted.opt, wanted.max)
    return dims


def opt_rows(model: DiffusionModel, dims: Mapping[str, tuple[int, int, int]]) -> int:
    """Returns the rows of a call at the opt sizes: samples, doubled if the denoiser applies guidance."""
    from trtconvert.runtime.signature import shape_of

    opt = {name: size for name, (_, size, _) in dims.items()}
    return shape_of(model.inputs[0].shape, opt)[0] * (1 if model.guidance is None else 2)


def priced_rows(recipe: Recipe, model: DiffusionModel) -> int:
    """Returns the rows of a call that plans are priced at: those of the engine's first profile.

    Raises:
        UserError: the engine takes sizes that block masks are not for. The calibrate stage may have checked other sizes.
    """
    profiles = profiles_of(recipe, model)
    if recipe.sparse_shares:
        from trtconvert.calib.block_plan import require_calibrated_size

        require_calibrated_size(model, covering(profiles))
    return opt_rows(model, profiles[0])


def engine_dtype(recipe: Recipe, model: DiffusionModel, name: str, dtype: str) -> str:
    """Returns the type of an input of the exported denoiser, from the name and type of the model's input."""
    return recipe.model.dtype if dtype == "float32" and name not in model.always_float32 else dtype
