"""`trtconvert modiff`: calibrate, sample, evaluate and bench a model whose layers are modulated from step to step.

Imports what a command needs when it runs, as `trtconvert.cli` does.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trtconvert.errors import UserError, did_you_mean
from trtconvert.modiff.methods import METHODS

if TYPE_CHECKING:
    from trtconvert.modiff.study import Study, Variant
    from trtconvert.progress import Output
    from trtconvert.recipe import Recipe

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


_weight_bits = click.option("--weight-bits", type=click.Choice([8, 4]), default=8, show_default=True)
_activation_bits = click.option("--act-bits", type=click.IntRange(3, 8), default=8, show_default=True)


_ANOTHER = "give another folder with -o"


def _seed(first: int) -> Callable[[Command], Command]:
    # As large as numbers of samples added to it keep to 64 bits.
    limits = click.IntRange(0, 2**62)
    return click.option("--seed", type=limits, default=first, show_default=True, help="Seed of the first sample.")


def commands(speaking: Callable[[Command], Command]) -> click.Group:
    """The group.

    Args:
        speaking: gives a command its `out`.
    """

    @click.group()
    def modiff() -> None:
        """Sample with layers that quantise the delta since the step before (MoDiff), calibrated by Q-Diff.

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
    def calibrate(model: str, weight_bits: int, act_bits: int, output: Path, out: Output, **options: Any) -> None:
        """Round MODEL's weights and find the scales of its activations and of their deltas.

        `trtconvert.modiff.Calibration.load` reads the file.
        """
        from trtconvert.files import require_writable

        require_writable(output, "give another file with -o")
        study = _study(model, **options)
        from trtconvert.modiff.study import told

        variant = _variant("qdiff-modiff", weight_bits, act_bits)
        report = out.reporter()
        with report.live(), report.stage("calibrate") as bar:
            found = study.calibration(variant, told(bar))
        found.save(output)
        out.result(
            {"output": output, "layers": len(found.layers), "rounding": found.rounding},
            f"{len(found.layers)} layers calibrated at {variant.bits}; written to {output}",
        )

    @modiff.command()
    @_options
    @click.option("--weight-bits", type=click.Choice([8, 4]), help="8 by default, or those of --calibration.")
    @click.option("--act-bits", type=click.IntRange(3, 8), help="8 by default, or those of --calibration.")
    @click.option("--modulate/--no-modulate", default=True, show_default=True, help="MoDiff, or every step by itself.")
    @click.option(
        "--calibration", type=click.Path(path_type=Path), help="Of `trtconvert modiff calibrate`; made by default."
    )
    @click.option("-n", "--samples", type=click.IntRange(1), default=16, show_default=True)
    @_seed(0)
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
        from trtconvert.modiff.study import told

        given = Calibration.load(calibration) if calibration is not None else None
        if given is not None:
            weight_bits = _bits_of("--weight-bits", weight_bits, given.settings.weight_bits)
            act_bits = _bits_of("--act-bits", act_bits, given.settings.activation_bits)
        study = _study(model, **options)
        variant = _variant("qdiff-modiff" if modulate else "qdiff", weight_bits or 8, act_bits or 8)
        report = out.reporter()
        with report.live():
            with report.stage("calibrate") as bar:
                given = given or study.calibration(variant, told(bar))
            draw = study.drawing(study.prepared(variant, given))
            with report.stage("sample") as bar:
                bar.total(samples)
                for start in range(0, samples, study.batch):
                    seeds = range(seed + start, seed + min(start + study.batch, samples))
                    for at, image in zip(seeds, draw(seeds), strict=True):
                        with whole_file(output / f"{at:06d}.png", _ANOTHER) as partial:
                            picture(image).save(partial)
                        bar.step()
        out.result(
            {"output": output, "samples": samples},
            f"{samples} {'sample' if samples == 1 else 'samples'} written to {output}",
        )

    @modiff.command()
    @_options
    @click.option(
        "--method",
        "methods",
        multiple=True,
        type=click.Choice(list(METHODS)),
        default=("full", "naive", "lcq", "qdiff", "qdiff-modiff"),
        show_default=True,
    )
    @click.option("--bits", multiple=True, default=("8/8", "8/6", "8/4", "4/8"), show_default=True)
    @click.option("-n", "--samples", type=click.IntRange(10), default=50_000, show_default=True)
    @_seed(100_000)
    @click.option("--features", help="digits-classifier, emoji-classifier, inception, or package.module:function.")
    @click.option("--features-weights", type=click.Path(path_type=Path), help="Weights of the feature extractor.")
    @click.option("--reference", help="digits, emoji (both held out), or a folder of images.")
    @click.option(
        "--compile",
        "compiled",
        is_flag=True,
        help="Draw by torch.compile and CUDA graphs: worth its minute for thousands of samples on a GPU.",
    )
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
        from trtconvert.evaluate.sample_sets import asks_for_classes
        from trtconvert.files import require_writable, whole_file
        from trtconvert.modiff import study as studies

        require_writable(output, "give another file with -o")
        variants = studies.parse_variants(methods, bits)
        recipe = _recipe(model)
        features, reference = judges(recipe.model.source, features, reference)
        extractor = load_extractor(features, features_weights, options["device"])
        study = _study(recipe, **options)
        shape = study.model.sample(study.model.denoiser, [seed], steps=1, solver="ddim").shape[1:]
        images = load_reference(reference, shape)
        classes = asks_for_classes(recipe.model.source, extractor)
        rows = studies.evaluate(study, variants, samples, seed, extractor, images, out.reporter(), classes=classes)
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
    def bench(model: str, weight_bits: int, act_bits: int, runs: int, out: Output, **options: Any) -> None:
        """Time a step of MODEL at --batch: FP32, 16 bits, simulated, and in integers without and with MoDiff."""
        from trtconvert.modiff import speed

        study = _study(model, **options)
        variant = _variant("qdiff-modiff", weight_bits, act_bits)
        times = speed.step_times(study, variant, runs, out.reporter())
        out.result({"device": speed.device_name(study.device), "rows": times}, speed.markdown(study, times))

    return modiff


def _variant(method: Any, weight_bits: int, act_bits: int) -> Variant:
    from trtconvert.modiff.study import Variant

    return Variant(method, weight_bits, act_bits)


def _study(
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
    compiled: bool = False,
) -> Study:
    """
    Raises:
        UserError, BackendUnavailable: the work folder, the device or the model cannot be used.
    """
    if compiled and device == "cpu":
        raise UserError(
            "nothing can be recorded in a CUDA graph on a CPU",
            expected="--compile with --device cuda",
            got="--compile --device cpu",
            remedy="leave --compile out, or give --device cuda",
        )
    from trtconvert.cache import default_folder
    from trtconvert.files import require_writable_folder

    work = work or default_folder() / "modiff"
    require_writable_folder(work, "give another folder with --work")
    recipe = _recipe(model) if isinstance(model, str) else model

    import torch

    from trtconvert import models
    from trtconvert.entry_point import names_of_ours
    from trtconvert.models.denoiser import require_device
    from trtconvert.modiff.rounding import AdaRound
    from trtconvert.modiff.study import Study

    require_device(device)
    return Study(
        models.load(recipe.model, recipe.loras),
        device,
        getattr(torch, dtype),
        steps,
        solver,
        batch,
        calibration_samples,
        AdaRound(iterations=rounding_iterations),
        work,
        compiled,
        names_of_ours(recipe.model.source),
    )


def _recipe(model: str) -> Recipe:
    """
    Raises:
        UserError: the name is neither that of a model that ships nor of a recipe.
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
            remedy=f"write its recipe with `trtconvert init {model}`, and give that"
            if shipped_recipe(model).is_file()  # of a published model, whose weights do not ship
            else did_you_mean(model, shipped, "check the path; it is relative to the current folder"),
        )
    return load_recipe(Path(model))


def _bits_of(option: str, asked: int | None, calibrated: int) -> int:
    """Those of a calibration.

    Raises:
        UserError: others are asked for.
    """
    if asked not in (None, calibrated):
        raise UserError(
            "the calibration is for other bits",
            expected=f"{option} {calibrated}, as it was calibrated with",
            got=f"{option} {asked}",
            remedy=f"leave {option} out, or calibrate with it: trtconvert modiff calibrate {option} {asked}",
        )
    return calibrated
