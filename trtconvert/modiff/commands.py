"""`trtconvert modiff`: calibrates models with modulated layers, and draws samples.

Commands import lazily, as those of `trtconvert.cli` do.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trtconvert.errors import UserError, did_you_mean

if TYPE_CHECKING:
    from trtconvert.modiff.workspace import Workspace
    from trtconvert.progress import Output
    from trtconvert.recipe import Recipe

Command = Callable[..., None]

_ANOTHER = "give another folder with -o"


def drawing_options(command: Command) -> Command:
    """Adds the argument MODEL and the options of all commands that draw samples."""
    for option in reversed(
        (
            click.argument("model"),
            click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True),
            click.option(
                "--dtype",
                type=click.Choice(["float32", "float16", "bfloat16"]),
                default="float32",
                show_default=True,
                help="Of everything that is not quantised.",
            ),
            click.option("--steps", type=click.IntRange(1), default=100, show_default=True),
            click.option("--solver", type=click.Choice(["ddim", "heun", "euler"]), default="ddim", show_default=True),
            click.option(
                "--batch", type=click.IntRange(1, 256), default=64, show_default=True, help="Samples drawn at once."
            ),
            click.option(
                "--calibration-samples",
                type=click.IntRange(1),
                default=32,
                show_default=True,
                help="Samples whose trajectories calibrate scales and weights.",
            ),
            click.option(
                "--rounding-iterations",
                type=click.IntRange(0),
                default=2000,
                show_default=True,
                help="Iterations of AdaRound for each block; 0 rounds to the nearest.",
            ),
            click.option(
                "--work",
                type=click.Path(path_type=Path),
                help="Folder of finished work; a killed command resumes there. Default: in the user's cache.",
            ),
        )
    ):
        command = option(command)
    return command


def bits_options(default: int | None, help: str | None = None) -> Callable[[Command], Command]:
    """Adds --weight-bits and --act-bits."""

    def add(command: Command) -> Command:
        of_activations = click.option(
            "--act-bits", type=click.IntRange(3, 8), default=default, show_default=default is not None, help=help
        )
        of_weights = click.option(
            "--weight-bits", type=click.Choice([8, 4]), default=default, show_default=default is not None, help=help
        )
        return of_weights(of_activations(command))

    return add


def seed_option(first: int) -> Callable[[Command], Command]:
    """Adds --seed. Seeds plus numbers of samples must fit 64 bits."""
    limits = click.IntRange(0, 2**62)
    return click.option("--seed", type=limits, default=first, show_default=True, help="Seed of the first sample.")


def commands(speaking: Callable[[Command], Command]) -> click.Group:
    """Returns the command group.

    Args:
        speaking: decorator that gives a command its argument `out`.
    """

    @click.group()
    def modiff() -> None:
        """Sample with layers that quantise the delta since the step before (MoDiff), calibrated by Q-Diff.

        MODEL is a shipped model (emoji-dit, digits-dit) or a recipe; only its section `model` is read.
        """

    @modiff.command()
    @drawing_options
    @bits_options(8)
    @click.option(
        "-o", "--output", type=click.Path(path_type=Path), default=Path("modiff.safetensors"), show_default=True
    )
    @speaking
    def calibrate(model: str, weight_bits: int, act_bits: int, output: Path, out: Output, **options: Any) -> None:
        """Round MODEL's weights, and find the scales of its activations and their deltas.

        `trtconvert.modiff.Calibration.load` reads the file.
        """
        from trtconvert.files import require_writable

        require_writable(output, "give another file with -o")
        workspace = open_workspace(model, **options)
        from trtconvert.modiff.workspace import Variant, told

        variant = Variant("qdiff-modiff", weight_bits, act_bits)
        report = out.reporter()
        with report.live(), report.stage("calibrate") as bar:
            found = workspace.calibration(variant, told(bar))
        found.save(output)
        out.result(
            {"output": output, "layers": len(found.layers), "rounding": found.rounding},
            f"{len(found.layers)} layers calibrated at {variant.bits}; written to {output}",
        )

    @modiff.command()
    @drawing_options
    @bits_options(None, "8 by default, or those of --calibration.")
    @click.option("--modulate/--no-modulate", default=True, show_default=True, help="MoDiff, or every step by itself.")
    @click.option(
        "--calibration",
        type=click.Path(path_type=Path),
        help="File of `trtconvert modiff calibrate`; without it, the command calibrates.",
    )
    @click.option("-n", "--samples", type=click.IntRange(1), default=16, show_default=True)
    @seed_option(0)
    @click.option("-o", "--output", type=click.Path(path_type=Path), default=Path("samples"), show_default=True)
    @speaking
    def sample(
        model: str,
        weight_bits: int | None,
        act_bits: int | None,
        modulate: bool,
        calibration: Path | None,
        samples: int,
        seed: int,
        output: Path,
        out: Output,
        **options: Any,
    ) -> None:
        """Draw samples as PNG images into a folder."""
        from trtconvert.files import require_writable_folder, whole_file

        require_writable_folder(output, _ANOTHER)
        from trtconvert.evaluate.grid import picture
        from trtconvert.modiff.calibration import Calibration
        from trtconvert.modiff.workspace import Variant, told

        given = Calibration.load(calibration) if calibration is not None else None
        if given is not None:
            weight_bits = _bits_of("--weight-bits", weight_bits, given.settings.weight_bits)
            act_bits = _bits_of("--act-bits", act_bits, given.settings.activation_bits)
        workspace = open_workspace(model, **options)
        variant = Variant("qdiff-modiff" if modulate else "qdiff", weight_bits or 8, act_bits or 8)
        report = out.reporter()
        with report.live():
            with report.stage("calibrate") as bar:
                given = given or workspace.calibration(variant, told(bar))
            draw = workspace.drawing(workspace.prepared(variant, given))
            with report.stage("sample") as bar:
                bar.total(samples)
                for start in range(0, samples, workspace.batch):
                    seeds = range(seed + start, seed + min(start + workspace.batch, samples))
                    for at, image in zip(seeds, draw(seeds), strict=True):
                        with whole_file(output / f"{at:06d}.png", _ANOTHER) as partial:
                            picture(image).save(partial)
                        bar.step()
        out.result(
            {"output": output, "samples": samples},
            f"{samples} {'sample' if samples == 1 else 'samples'} written to {output}",
        )

    return modiff


def open_workspace(
    model: str | Recipe,
    *,
    device: Any,
    dtype: str,
    steps: int,
    solver: str,
    batch: int,
    calibration_samples: int,
    rounding_iterations: int,
    work: Path | None,
) -> Workspace:
    """Loads a model for the options of `drawing_options`.

    Raises:
        UserError, BackendUnavailable: the work folder, the device or the model cannot be used.
    """
    from trtconvert.cache import default_folder
    from trtconvert.files import require_writable_folder

    work = work or default_folder() / "modiff"
    require_writable_folder(work, "give another folder with --work")
    recipe = find_recipe(model) if isinstance(model, str) else model

    import torch

    from trtconvert import models
    from trtconvert.entry_point import names_of_ours
    from trtconvert.models.denoiser import require_device
    from trtconvert.modiff.rounding import AdaRound
    from trtconvert.modiff.workspace import Workspace

    require_device(device)
    return Workspace(
        models.load(recipe.model, recipe.loras),
        device,
        getattr(torch, dtype),
        steps,
        solver,
        batch,
        calibration_samples,
        AdaRound(iterations=rounding_iterations),
        work,
        names_of_ours(recipe.model.source),
    )


def find_recipe(model: str) -> Recipe:
    """Reads the recipe of a shipped model's name, or of a path.

    Raises:
        UserError: there is no such model or file.
    """
    from trtconvert.recipe import load_recipe
    from trtconvert.shipped import shipped_models, shipped_recipe

    shipped = shipped_models()
    if model in shipped:
        return load_recipe(shipped_recipe(model))
    if not Path(model).exists():
        raise UserError(
            f"there is no model '{model}'",
            expected=f"{', '.join(shipped)}, or a recipe, a YAML file",
            got="no such file",
            remedy=f"write its recipe with `trtconvert init {model}`, and give the path of the recipe"
            if shipped_recipe(model).is_file()  # of a published model without shipped weights
            else did_you_mean(model, shipped, "check the path; it is relative to the current folder"),
        )
    return load_recipe(Path(model))


def _bits_of(option: str, asked: int | None, calibrated: int) -> int:
    """Returns the bits of a calibration.

    Raises:
        UserError: the option asks for others.
    """
    if asked not in (None, calibrated):
        raise UserError(
            "the calibration is for other bits",
            expected=f"{option} {calibrated}, as in the calibration",
            got=f"{option} {asked}",
            remedy=f"leave {option} out, or calibrate with it: trtconvert modiff calibrate {option} {asked}",
        )
    return calibrated
