"""Measures a bundle's samples: seed by seed against full precision, and as a set against a reference set.

    pairs ──► INT8 and full precision of the same seeds ─┐
    others ─► full precision of other seeds ─────────────┼─► statistics ─► Evaluation
    reference ► images of the reference set ─────────────┘

Each set is made in shards (`shards.py`) that hold features and errors, never images, so that 50,000 samples of any size fit.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from trtconvert import models, runtime
from trtconvert.bundle import Manifest, model_section
from trtconvert.calib.distributed import Ranks
from trtconvert.diffusion_model import Denoiser, DiffusionModel
from trtconvert.entry_point import names_of_ours
from trtconvert.errors import UserError, warn
from trtconvert.evaluate import metrics
from trtconvert.evaluate.clipping import Clipping
from trtconvert.evaluate.drawing import Drawing, Pairs, features_of
from trtconvert.evaluate.features import load_extractor
from trtconvert.evaluate.records import Evaluation, Request
from trtconvert.evaluate.reference_set import load_reference
from trtconvert.evaluate.sample_sets import SHIPPED_JUDGES, compare_sets
from trtconvert.evaluate.shards import ShardSet
from trtconvert.evaluate.torch_int8 import TorchInt8
from trtconvert.files import sha256
from trtconvert.models.denoiser import on_device
from trtconvert.models.identity import identity
from trtconvert.models.placement import choose_place, tell_place
from trtconvert.progress import Reporter
from trtconvert.recipe import ComputeSection
from trtconvert.reuse.schedule import reuse_of
from trtconvert.runtime.batches import AnyBatch

SHARD = 256
"""Samples per shard. A killed process loses at most one shard."""


def evaluate(folder: Path, request: Request, work: Path, ranks: Ranks, report: Reporter) -> Evaluation | None:
    """Draws the samples that the work folder lacks, and compares the sets.

    Args:
        folder: of the bundle.
        work: folder that keeps the shards.
    Returns:
        The evaluation on rank 0, None on the others.
    Raises:
        UserError: the bundle, the weights, the extractor or the reference set cannot be used, or a package is missing.
        RankLost: another process of torchrun has ended.
    """
    metrics.check_packages()
    bundle = runtime.load(folder)
    features, images = judges(bundle.manifest.recipe.model.source, request.features, request.reference)
    source = full_precision(bundle, request.weights)
    request = _with_device(request, bundle, source, report)
    source = on_device(source, request.device, offload=request.offload) if source else None
    int8, backend = _int8(bundle, source, request)
    extractor = load_extractor(features, request.features_weights, request.device)
    sampler = source.sample if source else models.load_sampler(bundle)
    drawing = Drawing(sampler, _batch(request, bundle.manifest, source), request)
    reference = load_reference(images, drawing.sample_shape(int8))
    clipping = Clipping.of_bundle(folder, bundle.manifest, source.timestep_max) if source else None
    pairs = Pairs(int8, source, drawing, extractor, request.lpips_weights, clipping)

    common = {
        "steps": request.steps,
        "solver": request.solver,
        "features": extractor.identity,
        "batch": drawing.batch,
        "device": request.device,
    }
    full_reads = {"weights": bundle.manifest.weights, "dtype": request.dtype} if source else {}
    bundle_reads = {
        "bundle": bundle.manifest.digest,
        "lpips": _hash_of(request.lpips_weights),
        "int8": request.int8,
        "backend": backend,  # depends on the machine
    }
    # The user's own functions may import modules of this package.
    own = [name for name in (bundle.manifest.recipe.model.source, features, images) if name is not None]
    code = {__name__}.union(*map(names_of_ours, own))
    reference_reads = {"images": reference.identity, "features": extractor.identity}
    pair_reads = common | bundle_reads | full_reads | {"seed": request.seed}
    other_reads = common | full_reads | {"seed": request.seed + request.samples}
    # The reference is first: it takes little time, and a bad image ends the command.
    sets = {
        "reference": (
            ShardSet.at(work, "reference", code, reference_reads, reference.count, SHARD),
            lambda held: features_of(extractor, reference.read(held)),
        ),
        "pairs": (ShardSet.at(work, "pairs", code, pair_reads, request.samples, SHARD), pairs.make),
    }
    if source:
        others = ShardSet.at(work, "others", code, other_reads, request.samples, SHARD)
        sets["others"] = (others, pairs.make_others)
    with report.live():
        for name, (shards, make) in sets.items():
            with report.stage(name) as bar:
                bar.total(len(shards.share(ranks)))
                shards.make(make, ranks, bar.step)
        if ranks.rank:
            return None
        with report.stage("statistics"):
            shards = {name: s for name, (s, _) in sets.items()}
            return compare_sets(bundle.manifest, backend, request, extractor, reference, shards)


def judges(source: str, features: str | None, reference: str | None) -> tuple[str, str]:
    """Returns the feature extractor and the reference set, as given or else those of a shipped model.

    Raises:
        UserError: one is not given, and the model is not a shipped one.
    """
    if features is not None and reference is not None:
        return features, reference
    if source not in SHIPPED_JUDGES:
        raise UserError(
            f"samples of {source} need a feature extractor and a reference set",
            expected="--features and --reference: only the shipped models have defaults",
            got=f"no --{'features' if features is None else 'reference'}",
            remedy="give --features inception --features-weights FILE, and --reference with a folder of images",
        )
    own = SHIPPED_JUDGES[source]
    return features or own[0], reference or own[1]


def _with_device(
    request: Request, bundle: runtime.LoadedBundle, source: DiffusionModel | None, report: Reporter
) -> Request:
    """Resolves device "auto", and turns offloading on where the model fits the GPU only with it."""
    if source is None:
        return replace(request, device="cpu") if request.device == "auto" else request
    if request.device != "auto" and not request.offload:
        return request
    section = bundle.manifest.recipe.model.model_copy(update={"weights": request.weights, "dtype": request.dtype})
    compute = ComputeSection(device=request.device, offload="on" if request.offload else "auto")
    place = choose_place(compute, section)
    tell_place(place, "the full-precision model computes", report)
    return replace(request, device="cuda" if place.on_gpu else "cpu", offload=place.offload)


def _int8(bundle: runtime.LoadedBundle, source: DiffusionModel | None, request: Request) -> tuple[Denoiser, str]:
    """Returns the INT8 denoiser and its backend in words.

    Raises:
        UserError: an option needs the model, and its weights were not given.
    """
    asked = {
        "--int8": request.int8 == "torch",
        "--device": request.device == "cuda",
        "--offload": request.offload,
        "--dtype": request.dtype != "float32",
        "--lpips-weights": request.lpips_weights is not None,
    }
    if source is None and (options := [option for option, given in asked.items() if given]):
        raise UserError(
            f"{options[0]} needs the model that the bundle was made from",
            expected="its weights, and in the current folder the LoRAs that its recipe names",
            got="no --weights",
            remedy=f"give --weights, or leave {' and '.join(options)} out",
        )
    if source is None or request.int8 == "bundle":
        return AnyBatch(bundle["denoiser"]), bundle.backend
    where = "the CPU, the specification"
    if request.device == "cuda":
        layers = any(component.has_int8_layers for component in bundle.manifest.components.values())
        where = torch.cuda.get_device_name() + ", our kernels" + (", layers by the specification" if layers else "")
    in_torch = TorchInt8(source, bundle.folder, bundle.manifest)
    in_torch.reuse = reuse_of(bundle["denoiser"])
    return in_torch, f"torch on {where}"


def full_precision(bundle: runtime.LoadedBundle, weights: Path | None) -> DiffusionModel | None:
    """Loads the model that a bundle was made from, or returns None where its weights are needed and not given. LoRAs of the
    recipe are read from the current folder.

    Raises:
        UserError: the weights belong to another model, or a LoRA is missing.
    """
    section = model_section(bundle.folder, bundle.manifest)
    loras = bundle.manifest.recipe.loras
    missing = [str(lora.file) for lora in loras if not lora.file.is_file()]
    if weights is None and (section.weights is not None or missing):
        return None
    if weights is not None and not weights.exists():
        raise UserError(
            f"there are no weights at {weights}",
            expected="the file or folder that the bundle was made from; the path is relative to the current folder",
            got="no such file",
            remedy="correct --weights, or leave it out",
        )
    if missing:
        raise UserError(
            "a LoRA of the model that the bundle was made from is not here",
            expected="the files of the recipe's LoRAs in the current folder: bundles hold their names only",
            got=f"no {missing[0]}",
            remedy="run the command in the folder of the LoRA, or leave --weights out",
        )
    section = section.model_copy(update={"weights": weights})
    got, code = identity(section, loras), bundle.manifest.code
    if got != bundle.manifest.weights and code and identity(section, loras, code=code) == bundle.manifest.weights:
        warn(
            f"the code of {section.source} has changed since the bundle was built, its weights have not: the figures are "
            "valid only if it still computes the same"
        )
    elif got != bundle.manifest.weights:
        raise UserError(
            f"{weights or section.source} is not what the bundle was made from",
            expected=f"the model {bundle.manifest.weights[:12]}…",
            got=f"{got[:12]}…",
            remedy="give the weights of the recipe that built the bundle, and the same version of the model's code",
        )
    return models.load(section, loras)


def _batch(request: Request, manifest: Manifest, source: DiffusionModel | None) -> int:
    """Returns the number of samples drawn at once."""
    # The sampler of a pipeline splits larger batches, and FiniteWatch could not assign the rows to samples.
    if request.int8 == "torch" and source is not None and source.diffusers is None:
        return request.batch
    component = manifest.components["denoiser"]
    batch = component.inputs[0].shape[0]
    rows = component.dims[batch][2] if isinstance(batch, str) else batch
    # Guidance outside of the engine doubles the batch.
    return min(request.batch, rows if component.guidance is not None else max(1, rows // 2))


def _hash_of(path: Path | None) -> str:
    if path is None:
        return ""
    return sha256(path) if path.is_file() else str(path)
