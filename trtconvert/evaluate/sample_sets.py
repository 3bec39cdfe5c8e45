"""Compares the sets of samples that an evaluation has drawn."""

from __future__ import annotations

import datetime
import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from trtconvert import models
from trtconvert.bundle import Manifest
from trtconvert.cache import versions
from trtconvert.errors import UserError
from trtconvert.evaluate import metrics
from trtconvert.evaluate.clipping import shares
from trtconvert.evaluate.features import Extractor
from trtconvert.evaluate.metrics import Moments
from trtconvert.evaluate.records import Evaluation, PairedQuality, Request, SetQuality
from trtconvert.evaluate.reference_set import ReferenceSet
from trtconvert.evaluate.shards import ShardSet

SHIPPED_JUDGES = {models.DIGITS: ("digits-classifier", "digits"), models.EMOJI: ("emoji-classifier", "emoji")}
"""By shipped model: its feature extractor and its reference set."""


def asks_for_classes(source: str, extractor: Extractor) -> bool:
    """Whether the extractor's logits are the classes that the model draws. Shipped models draw class `seed mod classes`."""
    return SHIPPED_JUDGES.get(source, ("", ""))[0] == extractor.name


@dataclass(frozen=True)
class FeatureSet:
    """The finite samples of one set.

    Attributes:
        moments: by kind of features, "pooled" and, if the extractor has them, "spatial".
        pooled, logits: [N, D], [N, classes] or None.
        indices: [N] numbers of the samples. nonfinite: number of samples left out.
    """

    moments: dict[str, Moments]
    pooled: Tensor
    logits: Tensor | None
    indices: Tensor
    nonfinite: int

    @functools.cached_property
    def radii(self) -> Tensor:
        """See `metrics.ball_radii`."""
        return metrics.ball_radii(self.pooled)


def feature_set(shards: ShardSet, prefix: str) -> FeatureSet:
    """Reads the finite samples of the tensors whose names start with the prefix.

    Raises:
        UserError: too few samples are finite.
    """
    moments: dict[str, Moments] = {}
    pooled, logits, indices, start = [], [], [], 0
    for shard in shards.stream([prefix + name for name in ("pooled", "spatial", "logits", "finite")]):
        everything = torch.ones(len(shard[prefix + "pooled"]), dtype=torch.bool)
        keep = shard.get(prefix + "finite", everything)
        indices.append(start + keep.nonzero()[:, 0])
        start += len(keep)
        if not keep.any():
            continue
        for kind in ("pooled", "spatial"):
            if (x := shard.get(prefix + kind)) is not None:
                here = Moments.of(x[keep])
                moments[kind] = moments[kind].merge(here) if kind in moments else here
        pooled.append(shard[prefix + "pooled"][keep])
        if (x := shard.get(prefix + "logits")) is not None:
            logits.append(x[keep])
    kept = torch.cat(indices)
    if len(kept) <= metrics.NEIGHBOURS:
        raise UserError(
            "too few finite samples to compare",
            expected=f"more than {metrics.NEIGHBOURS}",
            got=f"{len(kept)} of {start}",
            remedy="ask for more with --samples; if many are NaN or Inf, `trtconvert inspect` shows the precision of each site",
        )
    return FeatureSet(moments, torch.cat(pooled), torch.cat(logits) if logits else None, kept, start - len(kept))


def quality(
    got: FeatureSet, reference: FeatureSet, accuracy: Callable[[FeatureSet], float | None], *, by_sample: bool = True
) -> SetQuality:
    """Compares a set with the reference set.

    Args:
        by_sample: also compute KID, precision and recall, which compare single samples and take most of the time.
    """
    distance = {
        kind: metrics.frechet_distance(got.moments[kind], reference.moments[kind]) for kind in reference.moments
    }
    score, score_std = (None, None) if got.logits is None else metrics.inception_score(got.logits)
    kid = kid_std = precision = recall = None
    if by_sample:
        kid, kid_std = metrics.kernel_distance(got.pooled, reference.pooled)
        precision, recall = metrics.precision_recall(got.pooled, reference.pooled, (got.radii, reference.radii))
    return SetQuality(
        nonfinite=got.nonfinite,
        fid=distance["pooled"],
        sfid=distance.get("spatial"),
        kid=kid,
        kid_std=kid_std,
        inception_score=score,
        inception_score_std=score_std,
        precision=precision,
        recall=recall,
        accuracy=accuracy(got),
    )


def compare_sets(
    manifest: Manifest,
    backend: str,
    request: Request,
    extractor: Extractor,
    reference: ReferenceSet,
    sets: dict[str, ShardSet],
) -> Evaluation:
    asked = asks_for_classes(manifest.recipe.model.source, extractor)

    def accuracy_from(seed: int) -> Callable[[FeatureSet], float | None]:
        def accuracy(got: FeatureSet) -> float | None:
            if not asked or got.logits is None:
                return None
            return float((got.logits.argmax(1) == (seed + got.indices) % got.logits.shape[1]).double().mean())

        return accuracy

    target = feature_set(sets["reference"], "")
    int8 = feature_set(sets["pairs"], "int8.")
    same = accuracy_from(request.seed)
    full = other = paired = None
    if "others" in sets:
        full_set, other_set = feature_set(sets["pairs"], "full."), feature_set(sets["others"], "full.")
        full = quality(full_set, target, same)
        other = quality(other_set, target, accuracy_from(request.seed + request.samples))
        paired = _paired(sets["pairs"], request.seed, int8, full_set, other_set)
    return Evaluation(
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        bundle=manifest.digest,
        model=manifest.model,
        weights=manifest.weights,
        samples=request.samples,
        steps=request.steps,
        solver=manifest.sampler_name(request.solver),
        seed=request.seed,
        dtype=request.dtype if "others" in sets else None,
        features=extractor.name,
        features_identity=extractor.identity,
        reference=reference.name,
        reference_count=reference.count,
        reference_identity=reference.identity,
        backend=backend,
        int8=quality(int8, target, same),
        full=full,
        other=other,
        paired=paired,
        versions=versions(),
    )


def _paired(pairs: ShardSet, seed: int, int8: FeatureSet, full: FeatureSet, other: FeatureSet) -> PairedQuality:
    errors, indices, start = [], [], 0
    measured: dict[str, list[Tensor]] = {"ssim": [], "lpips": []}
    of_steps: dict[str, list[Tensor]] = {"squared_error_all_steps": [], "squared_error_of_steps": []}
    broken: dict[str, dict[str, int]] = {"site": {}, "int8-site": {}, "int8-layer": {}}
    clipped: dict[tuple[str, str], Tensor] = {}
    for shard in pairs.stream():
        keep = shard["int8.finite"] & shard["full.finite"]
        indices.append(start + keep.nonzero()[:, 0])
        start += len(keep)
        errors.append(shard["squared_error"][keep])
        for name, values in (measured | of_steps).items():
            if name in shard:
                values.append(shard[name][keep])
        for name, x in shard.items():
            kind, _, site = name.partition(".")
            if kind.startswith("clipped-"):
                key = site, kind.removeprefix("clipped-")
                clipped[key] = clipped.get(key, torch.zeros_like(x)) + x
            if kind in broken:
                broken[kind][site] = broken[kind].get(site, 0) + int(x)
    error = torch.cat(errors)
    ssim, lpips = (torch.cat(values) if values else None for values in measured.values())
    worst = int(error.argmax())
    all_steps, left_out = (
        float(metrics.decibels(torch.cat(values).mean())) if values else None for values in of_steps.values()
    )
    return PairedQuality(
        psnr=float(metrics.decibels(error.mean())),
        psnr_worst=float(metrics.decibels(error[worst])),
        psnr_worst_seed=seed + int(torch.cat(indices)[worst]),
        ssim=None if ssim is None else float(ssim.mean()),
        ssim_worst=None if ssim is None else float(ssim.min()),
        lpips=None if lpips is None else float(lpips.mean()),
        lpips_worst=None if lpips is None else float(lpips.max()),
        fid_int8=metrics.frechet_distance(int8.moments["pooled"], other.moments["pooled"]),
        fid_full=metrics.frechet_distance(full.moments["pooled"], other.moments["pooled"]),
        psnr_all_steps=all_steps,
        psnr_of_steps=left_out,
        nonfinite_sites=broken["site"],
        nonfinite_int8_sites=broken["int8-site"],
        nonfinite_int8_layers=broken["int8-layer"],
        clipped=shares(clipped),
    )
