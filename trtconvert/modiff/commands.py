"""`trtconvert modiff`: calibrate, sample, evaluate and bench a model whose layers are modulated from step to step.

Imports what a command needs when it runs, as `trtconvert.cli` does.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trtconvert.errors import UserError

if TYPE_CHECKING:
    from trtconvert.diffusion_model import DiffusionModel
    from trtconvert.modiff.study import Study, Variant
    from trtconvert.progress import Output

_METHODS = ("full", "naive", "lcq", "lcq-modiff", "qdiff", "qdiff-modiff")
Command = Callable[..., None]


def _options(command: Command) -> Command:
    """Of everything that draws samples."""
    for option in reversed(
        (
            click.argument("model"),
            click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True),
            click.option(
                "--dtype",
                type=click.Choice(["float32", "float16", "bfloat16"]),
                default="float32",
                show_default=True,
                help="Of what is not quantised.",
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
                help="Whose trajectories scales and weights are calibrated on.",
            ),
            click.option(
                "--rounding-iterations",
                type=click.IntRange(0),
                default=2000,
                show_default=True,
                help="Of AdaRound for each block; 0 rounds to the nearest.",
            ),
            click.option(
                "--work",
                type=click.Path(path_type=Path),
                help="Folder of what is done, from which a killed command goes on; in the user's cache by default.",
            ),
        )
    ):
        command = option(command)
    return command


_weight_bits = click.option("--weight-bits", type=click.Choice(["8", "4"]), default="8", show_default=True)
_activation_bits = click.option("--act-bits", type=click.IntRange(3, 8), default=8, show_default=True)


def commands(speaking: Callable[[Command], Command]) -> click.Group:
    """The group.

    Args:
        speaking: gives a command its `out`.
    """

    @click.group()
    def modiff() -> None:
        """Sample with layers that quantise the change since the step before (MoDiff), calibrated by Q-Diff.

        MODEL is the name of a model that ships (emoji-dit, digits-dit) or a recipe, whose `model` section is read.
        """

    @modiff.command()
    @_options
    @_weight_bits
    @_activation_bits
    @click.option(
        "-o", "--output", type=click.Path(path_type=Path), default=Path("modiff.safetensors"), show_default=True
    )
    @speaking
    def calibrate(model: str, weight_bits: str, act_bits: int, output: Path, out: Output, **options: Any) -> None:
        """Round MODEL's weights and find the scales of its activations and of their changes.

        `trtconvert.modiff.Calibration.load` reads the file.
        """
        from trtconvert.files import require_writable

        require_writable(output, "give another file with -o")
        study = _study(model, **options)
        variant = _variant("qdiff-modiff", weight_bits, act_bits)
        report = out.reporter()
        with report.live(), report.stage("calibrate") as bar:
            found = study.calibration(variant, lambda detail, done, of: bar.share(detail, done / max(1, of)))
        found.save(output)
        out.result(
            {"output": output, "layers": len(found.layers), "rounding": found.rounding},
            f"{len(found.layers)} layers calibrated at {variant.bits}; written to {output}",
        )

    @modiff.command()
    @_options
    @_weight_bits
    @_activation_bits
    @click.option("--modulate/--no-modulate", default=True, show_default=True, help="MoDiff, or every step by itself.")
    @click.option(
        "--calibration", type=click.Path(path_type=Path), help="Of `trtconvert modiff calibrate`; made by default."
    )
    @click.option("-n", "--samples", type=click.IntRange(1), default=16, show_default=True)
    @click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Seed of the first sample.")
    @click.option("-o", "--output", type=click.Path(path_type=Path), default=Path("samples"), show_default=True)
    @speaking
    def sample(
        model: str,
        weight_bits: str,
        act_bits: int,
        modulate: bool,
        calibration: Path | None,
        samples: int,
        seed: int,
        output: Path,
        out: Output,
        **options: Any,
    ) -> None:
        """Draw samples as PNG images into a folder."""
        from trtconvert.evaluate.grid import picture
        from trtconvert.modiff.calibration import Calibration

        study = _study(model, **options)
        variant = _variant("qdiff-modiff" if modulate else "qdiff", weight_bits, act_bits)
        given = Calibration.load(calibration) if calibration is not None else None
        _require_folder(output)
        report = out.reporter()
        with report.live():
            with report.stage("calibrate") as bar:
                given = given or study.calibration(
                    variant, lambda detail, done, of: bar.share(detail, done / max(1, of))
                )
            prepared = study.prepared(variant, given)
            with report.stage("sample") as bar:
                bar.total(samples)
                for start in range(0, samples, study.batch):
                    seeds = range(seed + start, seed + min(start + study.batch, samples))
                    for at, image in zip(seeds, study.draw(prepared, seeds), strict=True):
                        picture(image).save(output / f"{at:06d}.png")
                        bar.step()
        out.result({"output": output, "samples": samples}, f"{samples} samples written to {output}")

    @modiff.command()
    @_options
    @click.option(
        "--method",
        "methods",
        multiple=True,
        type=click.Choice(_METHODS),
        default=("full", "naive", "lcq", "qdiff", "qdiff-modiff"),
        show_default=True,
    )
    @click.option("--bits", multiple=True, default=("8/8", "8/6", "8/4", "4/8"), show_default=True)
    @click.option("-n", "--samples", type=click.IntRange(10), default=50_000, show_default=True)
    @click.option(
        "--seed", type=click.IntRange(0), default=100_000, show_default=True, help="Seed of the first sample."
    )
    @click.option("--features", help="digits-classifier, emoji-classifier, inception, or package.module:function.")
    @click.option("--features-weights", type=click.Path(path_type=Path), help="Weights of the feature extractor.")
    @click.option("--reference", help="digits, emoji (both held out), or a folder of images.")
    @click.option("-o", "--output", type=click.Path(path_type=Path), default=Path("modiff.md"), show_default=True)
    @speaking
    def evaluate(
        model: str,
        methods: tuple[Any, ...],
        bits: tuple[str, ...],
        samples: int,
        seed: int,
        features: str | None,
        features_weights: Path | None,
        reference: str | None,
        output: Path,
        out: Output,
        **options: Any,
    ) -> None:
        """Compare MODEL in full precision, naively quantised, by Q-Diff, and by Q-Diff with MoDiff: PSNR, FID, sFID, IS.

        Goes on where it was when it was killed.
        """
        from trtconvert.evaluate.evaluation import judges
        from trtconvert.evaluate.features import load_extractor
        from trtconvert.evaluate.reference_set import load_reference
        from trtconvert.files import require_writable, whole_file
        from trtconvert.modiff import study as studies

        require_writable(output, "give another file with -o")
        variants = studies.parse_variants(methods, bits)
        features, reference = judges(model, features, reference)
        extractor = load_extractor(features, features_weights)
        study = _study(model, **options)
        shape = study.model.sample(study.model.denoiser, [seed], steps=1, solver="ddim").shape[1:]
        images = load_reference(reference, shape)
        rows = studies.evaluate(study, variants, samples, seed, extractor, images, out.reporter())
        table = studies.markdown(rows)
        with whole_file(output, "give another file with -o") as partial:
            partial.write_text(f"{table}\n")
        out.result({"output": output, "samples": samples, "rows": studies.as_json(rows)}, table, f"written to {output}")

    @modiff.command()
    @_options
    @_weight_bits
    @_activation_bits
    @click.option("--runs", type=click.IntRange(1), default=20, show_default=True, help="Of each, the median counts.")
    @speaking
    def bench(model: str, weight_bits: str, act_bits: int, runs: int, out: Output, **options: Any) -> None:
        """Time a step of MODEL at --batch: FP32, 16 bits, simulated, and in integers without and with MoDiff."""
        from trtconvert.modiff import speed

        study = _study(model, **options)
        variant = _variant("qdiff-modiff", weight_bits, act_bits)
        times = speed.step_times(study, variant, runs, out.reporter())
        out.result({"device": speed.device_name(study.device), "rows": times}, speed.markdown(study, times))

    return modiff


def _variant(method: Any, weight_bits: str, act_bits: int) -> Variant:
    from trtconvert.modiff.study import Variant

    return Variant(method, int(weight_bits), act_bits)


def _study(
    model: str,
    *,
    device: Any,
    dtype: str,
    steps: int,
    solver: str,
    batch: int,
    calibration_samples: int,
    rounding_iterations: int,
    work: Path | None,
) -> Study:
    import torch

    from trtconvert.cache import default_folder
    from trtconvert.modiff.rounding import AdaRound
    from trtconvert.modiff.study import Study

    return Study(
        _model(model),
        device,
        getattr(torch, dtype),
        steps,
        solver,
        batch,
        calibration_samples,
        AdaRound(iterations=rounding_iterations),
        work or default_folder() / "modiff",
    )


def _model(name: str) -> DiffusionModel:
    from trtconvert import models
    from trtconvert.recipe import load_recipe
    from trtconvert.shipped import shipped_models, shipped_recipe

    path = shipped_recipe(name) if name in shipped_models() else Path(name)
    recipe = load_recipe(path)
    return models.load(recipe.model, recipe.loras)


def _require_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"cannot write samples to {folder}",
            expected="a folder that can be written",
            got=error.strerror or str(error),
            remedy="give another with -o",
        ) from error
