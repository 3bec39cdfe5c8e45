"""Compares a model in full precision, naively quantised, by Q-Diff, and by Q-Diff with MoDiff: PSNR, FID, sFID, IS.

    python bench/modiff_study.py MODEL [--method METHOD …] [--bits W/A …] [-n SAMPLES] [--compile] [--device cuda] [-o FILE]

MODEL is a shipped model (emoji-dit, digits-dit) or a recipe. Each variant draws the same seeds by the model's own sampler.
Samples are compared with those of full precision, and by features with a reference set. Work is kept in shards: a killed command
goes on. `--help` lists the options.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch
from graphed import Graphed
from machine import speaking
from torch import Tensor

from trtconvert.calib.distributed import Ranks
from trtconvert.diffusion_model import DiffusionModel
from trtconvert.errors import UserError
from trtconvert.evaluate import metrics
from trtconvert.evaluate.drawing import features_of
from trtconvert.evaluate.evaluation import SHARD, judges
from trtconvert.evaluate.features import Extractor, load_extractor
from trtconvert.evaluate.reference_set import ReferenceSet, load_reference
from trtconvert.evaluate.sample_sets import asks_for_classes, feature_set, quality
from trtconvert.evaluate.shards import ShardSet
from trtconvert.files import require_writable, sha256, whole_file
from trtconvert.modiff.calibration import Calibration
from trtconvert.modiff.commands import drawing_options, find_recipe, open_workspace, seed_option
from trtconvert.modiff.workspace import METHODS, Method, Variant, Workspace, told
from trtconvert.progress import Output, Reporter


def parse_variants(methods: Sequence[Method], bits: Sequence[str]) -> list[Variant]:
    """Returns all methods at all bits, each once, and full precision once.

    Args:
        bits: such as "8/6", of weights and of activations.
    Raises:
        UserError: bits are not two numbers, or layers do not support them.
    """
    variants = [Variant("full")] if "full" in methods else []
    for pair in bits:
        weight, slash, activation = pair.partition("/")
        if not (slash and weight.isdecimal() and activation.isdecimal()):
            raise UserError(
                f"bits cannot be '{pair}'",
                expected="those of weights and of activations, such as 8/6",
                got=repr(pair),
                remedy="give --bits 8/8, or several: --bits 8/8 --bits 4/8",
            )
        found = [Variant(method, int(weight), int(activation)) for method in methods if method != "full"]
        for variant in found:
            variant.settings()
        variants += found
    return list(dict.fromkeys(variants))


@dataclass(frozen=True)
class Row:
    """A variant's figures. None: the features do not allow the figure, or too few samples are finite.

    Attributes:
        nonfinite: number of samples with NaN or Inf; no figure contains them.
        psnr: dB against full precision, over all pixels. fid, sfid, inception_score, accuracy: see `SetQuality`.
        fid_full: distance to the samples of full precision.
    """

    variant: Variant
    nonfinite: int
    psnr: float | None
    fid: float | None
    sfid: float | None
    inception_score: float | None
    accuracy: float | None
    fid_full: float | None


def compare(
    workspace: Workspace,
    variants: Sequence[Variant],
    samples: int,
    seed: int,
    extractor: Extractor,
    reference: ReferenceSet,
    report: Reporter,
    *,
    classes: bool = False,
    compiled: bool = False,
) -> list[Row]:
    """Draws the samples that the work folder lacks, and compares. Full precision is always drawn.

    Args:
        samples: of each variant; sample i has the seed `seed + i`.
        classes: whether the extractor's logits are of the classes that the model draws, see `asks_for_classes`.
        compiled: draw by torch.compile and CUDA graphs; only on a GPU.
    Raises:
        UserError: a variant cannot be calibrated, the extractor or reference set cannot be used, or samples of full precision
            are not finite.
    """
    metrics.check_packages()
    ranks, code = Ranks(), workspace.code | {features_of.__module__}
    script = sha256(Path(__file__))
    common = {
        "script": script,
        "model": workspace.digest,
        "features": extractor.identity,
        "steps": workspace.steps,
        "solver": workspace.solver,
        "seed": seed,
        "batch": workspace.batch,
        "device": workspace.device,
        "dtype": str(workspace.dtype),
        "compiled": compiled,
    }
    full = workspace.full
    sets: dict[Variant, ShardSet] = {}
    with report.live():
        images_seen = ShardSet.at(
            workspace.work,
            "reference",
            code,
            {"script": script, "images": reference.identity, "features": extractor.identity},
            reference.count,
            SHARD,
        )
        _make(images_seen, lambda held: features_of(extractor, reference.read(held)), ranks, report, "reference")
        for variant in [full, *(variant for variant in variants if variant.method != "full")]:
            reads = common | {"variant": dataclasses.asdict(variant), "calibration": "none"}
            calibration: Calibration | None = None
            if variant != full:
                with report.stage(f"calibrate {variant.name}") as bar:
                    calibration = workspace.calibration(variant, told(bar))
                reads["calibration"] = sha256(workspace.calibration_path(variant))
            shards = sets[variant] = ShardSet.at(
                workspace.work, f"{variant.method}-{variant.bits.replace('/', '-')}", code, reads, samples, SHARD
            )
            drawing: list[Callable[[Sequence[int]], Tensor]] = []

            def make(
                held: range,
                variant: Variant = variant,
                calibration: Calibration | None = calibration,
                drawing: list[Callable[[Sequence[int]], Tensor]] = drawing,
            ) -> dict[str, Tensor]:
                if not drawing:  # only if samples are missing
                    model = workspace.prepared(variant, calibration)
                    drawing.append(drawing_compiled(workspace, model) if compiled else workspace.drawing(model))
                images = drawing[0](range(seed + held.start, seed + held.stop))
                finite = images.flatten(1).isfinite().all(1)
                images = images.nan_to_num(0, 1, 0)
                return features_of(extractor, images) | {"finite": finite, "images": images.half()}

            _make(shards, make, ranks, report, variant.name)
            if variant == full:
                _require_finite(shards, workspace)
        with report.stage("statistics"):
            return _rows(sets, images_seen, seed, full, classes)


def drawing_compiled(workspace: Workspace, model: DiffusionModel) -> Callable[[Sequence[int]], Tensor]:
    """Returns `workspace.drawing` by torch.compile and CUDA graphs."""
    return workspace.drawing(model, Graphed(torch.compile(model.denoiser, dynamic=False)))


def _make(
    shards: ShardSet, make: Callable[[range], Mapping[str, Tensor]], ranks: Ranks, report: Reporter, name: str
) -> None:
    with report.stage(name) as bar:
        bar.total(len(shards.share(ranks)))
        shards.make(make, ranks, bar.step)


def _finite(shards: ShardSet) -> Tensor:
    return torch.cat([shard["finite"] for shard in shards.stream(("finite",))])


def _require_finite(full: ShardSet, workspace: Workspace) -> None:
    """
    Raises:
        UserError: too few samples of full precision are finite.
    """
    finite = _finite(full)
    if int(finite.sum()) <= metrics.NEIGHBOURS:
        is_narrow = workspace.dtype == torch.float16
        raise UserError(
            "the model gives NaN or Inf in full precision",
            expected=f"more than {metrics.NEIGHBOURS} finite samples to compare with",
            got=f"{int(finite.sum())} of {len(finite)} in {str(workspace.dtype).removeprefix('torch.')}",
            remedy="give --dtype bfloat16 or float32"
            if is_narrow
            else "check the model's weights, --steps and --solver",
        )


def _rows(sets: Mapping[Variant, ShardSet], images_seen: ShardSet, seed: int, full: Variant, asked: bool) -> list[Row]:
    target = feature_set(images_seen, "")
    exact = feature_set(sets[full], "")
    rows = []
    for variant, shards in sets.items():
        finite = _finite(shards)
        nonfinite = int((~finite).sum())
        if len(finite) - nonfinite <= metrics.NEIGHBOURS:
            rows.append(Row(variant, nonfinite, None, None, None, None, None, None))
            continue
        got = exact if variant == full else feature_set(shards, "")
        classes = None if got.logits is None else got.logits.shape[1]
        found = quality(
            got,
            target,
            lambda got, classes=classes: (
                None
                if not asked or got.logits is None or classes is None
                else float((got.logits.argmax(1) == (seed + got.indices) % classes).double().mean())
            ),
            by_sample=False,
        )
        rows.append(
            Row(
                variant,
                nonfinite,
                None if variant == full else _decibels(shards, sets[full]),
                found.fid,
                found.sfid,
                found.inception_score,
                found.accuracy,
                None if variant == full else metrics.frechet_distance(got.moments["pooled"], exact.moments["pooled"]),
            )
        )
    return rows


def _decibels(shards: ShardSet, full: ShardSet) -> float | None:
    """Returns the PSNR over the samples that are finite in both sets, None without any."""
    error, count = 0.0, 0
    for one, other in zip(*(held.stream(("images", "finite")) for held in (shards, full)), strict=True):
        both = one["finite"] & other["finite"]
        difference = one["images"][both].double() - other["images"][both].double()
        error += float(difference.square_().sum())
        count += difference.numel()
    return float(metrics.decibels(torch.tensor(error / count))) if count else None


def markdown(rows: Sequence[Row]) -> str:
    """Returns a table as in `docs/figures.md`."""

    def shown(x: float | None, digits: int = 2) -> str:
        return "" if x is None else f"{x:.{digits}f}"

    lines = [
        "| method | W/A | PSNR, dB | FID | sFID | IS | accuracy | FID to full precision |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        name = f"{METHODS[row.variant.method]} | {row.variant.bits}"
        figures = [shown(row.psnr, 1), *map(shown, (row.fid, row.sfid, row.inception_score))]
        lines.append(f"| {name} | {' | '.join(figures)} | {shown(row.accuracy, 3)} | {shown(row.fid_full)} |")
    broken = [f"{row.nonfinite} of {row.variant.name}" for row in rows if row.nonfinite]
    if broken:
        lines += ["", f"Samples with NaN or Inf, which are in no figure: {', '.join(broken)}."]
    return "\n".join(lines)


@click.command()
@drawing_options
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
@seed_option(100_000)
@click.option("--features", help="digits-classifier, emoji-classifier, inception, or package.module:function.")
@click.option("--features-weights", type=click.Path(path_type=Path), help="Weights of the feature extractor.")
@click.option("--reference", help="digits, emoji (both held out), or a folder of images.")
@click.option("--compile", "compiled", is_flag=True, help="Draw by torch.compile and CUDA graphs, on a GPU.")
@click.option("-o", "--output", type=click.Path(path_type=Path), default=Path("modiff.md"), show_default=True)
@speaking
def main(
    model: str,
    methods: tuple[Any, ...],
    bits: tuple[str, ...],
    samples: int,
    seed: int,
    features: str | None,
    features_weights: Path | None,
    reference: str | None,
    compiled: bool,
    output: Path,
    out: Output,
    **options: Any,
) -> None:
    """Compare MODEL in full precision and under several quantisations."""
    require_writable(output, "give another file with -o")
    if compiled and options["device"] == "cpu":
        raise UserError(
            "a CPU has no CUDA graphs",
            expected="--compile with --device cuda",
            got="--compile --device cpu",
            remedy="leave --compile out, or give --device cuda",
        )
    variants = parse_variants(methods, bits)
    recipe = find_recipe(model)
    features, reference = judges(recipe.model.source, features, reference)
    extractor = load_extractor(features, features_weights, options["device"])
    workspace = open_workspace(recipe, **options)
    shape = workspace.model.sample(workspace.model.denoiser, [seed], steps=1, solver="ddim").shape[1:]
    images = load_reference(reference, shape)
    classes = asks_for_classes(recipe.model.source, extractor)
    report = out.reporter()
    rows = compare(workspace, variants, samples, seed, extractor, images, report, classes=classes, compiled=compiled)
    table = markdown(rows)
    with whole_file(output, "give another file with -o") as partial:
        partial.write_text(f"{table}\n")
    found = [dataclasses.asdict(row) for row in rows]
    out.result({"output": output, "samples": samples, "rows": found}, table, f"written to {output}")


if __name__ == "__main__":
    main()
