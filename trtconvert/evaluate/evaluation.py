"""How good a bundle's samples are: against full precision seed by seed, and against a reference set as a whole.

    pairs ──► INT8 and full precision of the same seeds ─┐
    others ─► full precision of other seeds ─────────────┼─► statistics ─► Evaluation
    reference ► the images to resemble ──────────────────┘

Each set is made in shards (`shards.py`) that hold features and errors, never images, so that 50,000 samples of any size fit.
"""

from __future__ import annotations

import datetime
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor

from trtconvert import models, runtime
from trtconvert.attention.sites import SiteCall, attention_hooks
from trtconvert.bundle import Manifest, model_section
from trtconvert.cache import versions
from trtconvert.calib.budget import squared_error
from trtconvert.calib.data import batches_of
from trtconvert.calib.distributed import Ranks
from trtconvert.diffusion_model import Denoiser, DiffusionModel, Sampler
from trtconvert.documents import read_json
from trtconvert.entry_point import names_of_ours
from trtconvert.errors import UserError, first_line, warn
from trtconvert.evaluate import metrics
from trtconvert.evaluate.clipping import Clipping, shares
from trtconvert.evaluate.features import Extractor, load_extractor
from trtconvert.evaluate.metrics import Moments
from trtconvert.evaluate.reference_set import ReferenceSet, load_reference
from trtconvert.evaluate.shards import ShardSet
from trtconvert.evaluate.torch_int8 import NonfiniteCounts, TorchInt8
from trtconvert.files import sha256
from trtconvert.guidance import guidance_of
from trtconvert.models.denoiser import DenoiserInType, on_device
from trtconvert.models.identity import identity
from trtconvert.models.placement import choose_place, tell_place
from trtconvert.progress import Reporter
from trtconvert.recipe import ComputeSection
from trtconvert.reuse.schedule import reuse_of
from trtconvert.runtime.batches import AnyBatch

SHARD = 256
"""Samples per shard: what a kill costs each process at most."""

BATCH = 64
"""Samples drawn at once by default, or as many as the bundle takes."""

FIRST_SEED = 100_000
"""Far from the seeds of calibration, plan and gates, which the scales were chosen on."""


@dataclass(frozen=True)
class Request:
    """What to evaluate.

    Attributes:
        weights: of the full-precision model; None leaves out what compares with it.
        samples, steps, solver, seed: how samples are drawn; sample i has the seed `seed + i`.
        features, features_weights: see `load_extractor`; reference: see `load_reference`. None: those of a model that ships.
        lpips_weights: AlexNet's weights; None leaves out LPIPS.
        device: of the full-precision model, see `on_device`; "auto" takes the GPU where there is one and the model fits.
        offload: whether the weights of models in torch lie in host memory, see `trtconvert.models.offloading`.
        dtype: what the full-precision model computes in: "float32", or the 16 bits that it runs in today.
        int8: "bundle" runs what `runtime.load` finds; "torch" the model with the bundle's scales and modes, see `TorchInt8`.
        batch: samples drawn at once, at most `SHARD`.
    """

    weights: Path | None = None
    samples: int = 10_000
    steps: int = 100
    solver: Literal["ddim", "heun", "euler"] = "ddim"
    seed: int = FIRST_SEED
    features: str | None = None
    features_weights: Path | None = None
    reference: str | None = None
    lpips_weights: Path | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    offload: bool = False
    dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    int8: Literal["bundle", "torch"] = "bundle"
    batch: int = BATCH


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class SetQuality(_Record):
    """One set of samples against the reference set, over its finite samples. None: not to be had from these features.

    Attributes:
        nonfinite: samples in whose making a NaN or Inf occurred; no figure contains them.
        fid, sfid, kid, kid_std, inception_score, inception_score_std, precision, recall: see `metrics`.
        accuracy: share of samples that the classifier takes for what was asked of the model.
    """

    nonfinite: int
    fid: float | None = None
    sfid: float | None = None
    kid: float | None = None
    kid_std: float | None = None
    inception_score: float | None = None
    inception_score_std: float | None = None
    precision: float | None = None
    recall: float | None = None
    accuracy: float | None = None


class PairedQuality(_Record):
    """INT8 against full precision of the same seeds, over pairs that are both finite.

    Attributes:
        psnr: dB over all pixels of all samples; psnr_worst: of the worst sample, seed psnr_worst_seed.
        ssim, ssim_worst, lpips, lpips_worst: mean and worst; None where they were not computed.
        fid_int8, fid_full: distance of the INT8 and of the full-precision samples to those of other seeds.
        psnr_all_steps: dB of the same with all steps computed; psnr_of_steps: of the samples against those with all steps, both
            in INT8. None where the bundle leaves no steps out.
        nonfinite_sites: site: samples for which its attention gave a NaN or Inf in full precision.
        nonfinite_int8_sites: the same in INT8, where torch runs it; what a bundle computes inside cannot be seen.
        nonfinite_int8_layers: likewise of INT8 layers.
        clipped: site: share of the elements of "q", "k" and "v" that the bundle's scales clip, see `Clipping`.
    """

    psnr: float
    psnr_worst: float
    psnr_worst_seed: int
    ssim: float | None
    ssim_worst: float | None
    lpips: float | None
    lpips_worst: float | None
    fid_int8: float
    fid_full: float
    psnr_all_steps: float | None = None
    psnr_of_steps: float | None = None
    nonfinite_sites: dict[str, int]
    nonfinite_int8_sites: dict[str, int] = {}
    nonfinite_int8_layers: dict[str, int] = {}
    clipped: dict[str, dict[str, float]] = {}


class Evaluation(_Record):
    """What `trtconvert evaluate` found.

    Attributes:
        created: UTC time; bundle: digest of its manifest; model, weights: as in the manifest.
        samples, steps, seed: as in the request; solver: likewise, or the scheduler of a pipeline, see `Manifest.sampler_name`.
        dtype: of the full-precision model; None without one.
        features, features_identity, reference, reference_count, reference_identity: what was compared, and how.
        backend: what ran INT8, in words.
        int8, full, other: the bundle's samples, those of full precision from the same seeds, and from other seeds. The
            difference between the last two is the noise of every figure.
        paired: INT8 against full precision, sample by sample.
        versions: of the libraries.
    """

    format: Literal[1] = 1
    created: str
    bundle: str
    model: str
    weights: str
    samples: int
    steps: int
    solver: str
    seed: int
    dtype: Literal["float32", "float16", "bfloat16"] | None = None
    features: str
    features_identity: str
    reference: str
    reference_count: int
    reference_identity: str
    backend: str
    int8: SetQuality
    full: SetQuality | None
    other: SetQuality | None
    paired: PairedQuality | None
    versions: dict[str, str]


def read_evaluation(path: Path) -> Evaluation:
    """
    Raises:
        UserError: not a file that `trtconvert evaluate` wrote.
    """
    try:
        return Evaluation.model_validate(read_json(path))
    except (OSError, ValueError, ValidationError) as error:
        raise UserError(
            f"{path} is not an evaluation",
            expected="a JSON file written by `trtconvert evaluate`",
            got=error.strerror or type(error).__name__ if isinstance(error, OSError) else first_line(error),
            remedy="evaluate the bundle again",
        ) from error


def evaluate(folder: Path, request: Request, work: Path, ranks: Ranks, report: Reporter) -> Evaluation | None:
    """Draw what is missing in the work folder, and compare.

    Args:
        folder: of the bundle.
        work: folder of the shards.
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
    drawing = _Drawing(
        source.sample if source else models.load_sampler(bundle),
        _batch(request, bundle.manifest, source),
        request,
    )
    reference = load_reference(images, drawing.sample_shape(int8))
    clipping = Clipping.of_bundle(folder, bundle.manifest, source.timestep_max) if source else None
    pairs = _Pairs(int8, source, drawing, extractor, request.lpips_weights, clipping)

    common = {
        "steps": request.steps,
        "solver": request.solver,
        "features": extractor.identity,
        "batch": drawing.batch,
        "device": request.device,
    }
    seeds, other_seeds = request.seed, request.seed + request.samples
    full_reads = {"weights": bundle.manifest.weights, "dtype": request.dtype} if source else {}
    bundle_reads = {
        "bundle": bundle.manifest.digest,
        "lpips": _hash_of(request.lpips_weights),
        "int8": request.int8,
        "backend": backend,  # a bundle runs on whatever the machine has
    }
    # What the user's own functions import of this package decides as well.
    own = [name for name in (bundle.manifest.recipe.model.source, features, images) if name is not None]
    code = {__name__}.union(*map(names_of_ours, own))
    # The reference first: it takes little time, and its images may not fit.
    sets = {
        "reference": (
            ShardSet.at(
                work,
                "reference",
                code,
                {"images": reference.identity, "features": extractor.identity},
                reference.count,
                SHARD,
            ),
            lambda held: features_of(extractor, reference.read(held)),
        ),
        "pairs": (
            ShardSet.at(
                work, "pairs", code, common | bundle_reads | full_reads | {"seed": seeds}, request.samples, SHARD
            ),
            pairs.make,
        ),
    }
    if source:
        other = ShardSet.at(work, "others", code, common | full_reads | {"seed": other_seeds}, request.samples, SHARD)
        sets["others"] = (other, pairs.make_others)
    with report.live():
        for name, (shards, make) in sets.items():
            with report.stage(name) as bar:
                bar.total(len(shards.share(ranks)))
                shards.make(make, ranks, bar.step)
        if ranks.rank:
            return None
        with report.stage("statistics"):
            shards = {name: s for name, (s, _) in sets.items()}
            return _compare(bundle.manifest, backend, request, extractor, reference, shards)


_OWN = {models.DIGITS: ("digits-classifier", "digits"), models.EMOJI: ("emoji-classifier", "emoji")}


def judges(source: str, features: str | None, reference: str | None) -> tuple[str, str]:
    """The feature extractor and the reference set of a model, as they are given, or its own where it ships.

    Raises:
        UserError: the model has none of its own.
    """
    if features is not None and reference is not None:
        return features, reference
    if source not in _OWN:
        raise UserError(
            f"samples of {source} need features and images to be judged by",
            expected="--features and --reference, which only the models that ship have of their own",
            got=f"no --{'features' if features is None else 'reference'}",
            remedy="give --features inception --features-weights FILE, and --reference with a folder of images",
        )
    own = _OWN[source]
    return features or own[0], reference or own[1]


def asks_for_classes(source: str, extractor: Extractor) -> bool:
    """Whether an extractor's logits are of the classes that a model draws: the shipped ones do so by turns with the seeds."""
    return _OWN.get(source, ("", ""))[0] == extractor.name


def _with_device(
    request: Request, bundle: runtime.LoadedBundle, source: DiffusionModel | None, report: Reporter
) -> Request:
    """The request with the device that its "auto" stands for, and with offloading where the model fits the GPU with it alone."""
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
    """What runs INT8, and in words.

    Raises:
        UserError: the model is needed and not there.
    """
    asked = {
        "--int8": request.int8 == "torch",
        "--device": request.device == "cuda",
        "--offload": request.offload,
        "--dtype": request.dtype != "float32",
    }
    if source is None and any(asked.values()):
        raise UserError(
            "running in torch needs the model that the bundle was made from",
            expected="its weights, and in the current folder the LoRAs that its recipe names",
            got="no --weights",
            remedy=f"give --weights, or leave {' and '.join(option for option, given in asked.items() if given)} out",
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
    """The model that a bundle was made from, None where its weights are needed and not given. LoRAs of its recipe are looked for
    in the current folder.

    Raises:
        UserError: the weights are another model's, or a LoRA is not there.
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
            expected="the files of the recipe's LoRAs in the current folder: bundles do not hold them",
            got=f"no {missing[0]}",
            remedy="run this where it is, or leave --weights out",
        )
    section = section.model_copy(update={"weights": weights})
    got, code = identity(section, loras), bundle.manifest.code
    if got != bundle.manifest.weights and code and identity(section, loras, code=code) == bundle.manifest.weights:
        warn(
            f"the code of {section.source} has changed since the bundle was built, its weights have not: figures hold if it "
            "still computes the same"
        )
    elif got != bundle.manifest.weights:
        raise UserError(
            f"{weights or section.source} is not what the bundle was made from",
            expected=f"the model {bundle.manifest.weights[:12]}…",
            got=f"{got[:12]}…",
            remedy="give the weights file of the recipe that built the bundle, and the code of the model as it was then",
        )
    return models.load(section, loras)


def _batch(request: Request, manifest: Manifest, source: DiffusionModel | None) -> int:
    """Samples drawn at once. A model in torch takes any number; but the sampler of a pipeline would draw larger batches in
    parts, whose rows the watch for NaN could not tell from others."""
    if request.int8 == "torch" and source is not None and source.diffusers is None:
        return request.batch
    return min(request.batch, _largest_batch(manifest))


def _largest_batch(manifest: Manifest) -> int:
    """Of the denoiser's first input; guidance doubles the batch, so half of what fits is taken, but where it is inside."""
    component = manifest.components["denoiser"]
    batch = component.inputs[0].shape[0]
    rows = component.dims[batch][2] if isinstance(batch, str) else batch
    return rows if component.guidance is not None else max(1, rows // 2)


def _hash_of(path: Path | None) -> str:
    if path is None:
        return ""
    return sha256(path) if path.is_file() else str(path)


# Drawing --------------------------------------------------------------------------------------------------------------


class _FiniteWatch:
    """A denoiser that remembers for which samples of its batch it ever gave a NaN or Inf."""

    def __init__(self, denoiser: Denoiser, samples: int) -> None:
        self._denoiser, self.guidance, self.reuse = denoiser, guidance_of(denoiser), reuse_of(denoiser)
        self.device = getattr(denoiser, "device", None)
        self.finite = torch.ones(samples, dtype=torch.bool)

    def __call__(self, *inputs: Tensor, **named: Tensor) -> Tensor:
        output = self._denoiser(*inputs, **named)
        # With guidance, row i and row i + samples belong to the same sample.
        self.finite &= output.detach().flatten(1).isfinite().all(1).cpu().view(-1, len(self.finite)).all(0)
        return output


class _AllSteps:
    """A denoiser that leaves no steps out."""

    def __init__(self, denoiser: Denoiser) -> None:
        self._denoiser, self.guidance = denoiser, guidance_of(denoiser)
        self.device = getattr(denoiser, "device", None)

    def __call__(self, *inputs: Tensor, **named: Tensor) -> Tensor:
        return self._denoiser(*inputs, **named)


@dataclass(frozen=True)
class _Drawing:
    sampler: Sampler
    batch: int
    request: Request

    def draw(self, denoiser: Denoiser, seeds: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Samples [N, C, H, W] in [0, 1], and which of them came without NaN or Inf, [N]."""
        images, finite = [], []
        for part in batches_of(len(seeds), self.batch):
            here = seeds[part.start : part.stop]
            watch = _FiniteWatch(denoiser, len(here))
            images.append(self.sampler(watch, here, steps=self.request.steps, solver=self.request.solver))
            # What decodes them may overflow as well.
            finite.append(watch.finite & images[-1].flatten(1).isfinite().all(1).cpu())
        return torch.cat(images), torch.cat(finite)

    def sample_shape(self, denoiser: Denoiser) -> torch.Size:
        """[C, H, W], from a sample of one step."""
        return self.sampler(denoiser, [self.request.seed], steps=1, solver="ddim").shape[1:]


class _Pairs:
    """Makes the shards of samples: features, errors and finiteness."""

    def __init__(
        self,
        int8: Denoiser,
        source: DiffusionModel | None,
        drawing: _Drawing,
        extractor: Extractor,
        lpips_weights: Path | None,
        clipping: Clipping | None,
    ) -> None:
        self._clipping = clipping
        self._int8, self._drawing, self._extractor = int8, drawing, extractor
        self._full_denoiser: DenoiserInType | None = None
        if source is not None:
            self._full_denoiser = DenoiserInType(
                source, getattr(torch, drawing.request.dtype), attention_hooks(self._attend)
            )
        self._nonfinite = NonfiniteCounts()
        self._lpips = metrics.load_lpips(lpips_weights) if lpips_weights and source else None

    def make(self, held: range) -> dict[str, Tensor]:
        """One shard of INT8 samples, and of full-precision samples of the same seeds if the model is there."""
        first = self._drawing.request.seed
        seeds = range(first + held.start, first + held.stop)
        int8, finite = self._drawing.draw(self._int8, seeds)
        shard = self._seen("int8", int8, finite)
        if isinstance(self._int8, TorchInt8):
            for kind, counts in self._int8.take_nonfinite().items():
                shard |= {f"int8-{kind}.{name}": torch.tensor(n) for name, n in counts.items()}
        if self._full_denoiser is None:
            return shard
        full, finite, broken = self._full(seeds)
        if self._clipping is not None:
            shard |= {f"clipped-{tensor}.{site}": x for (site, tensor), x in self._clipping.take().items()}
        shard |= self._seen("full", full, finite) | {f"site.{name}": x for name, x in broken.items()}
        shard["squared_error"] = squared_error(int8, full)
        if reuse_of(self._int8) is not None:
            every, _ = self._drawing.draw(_AllSteps(self._int8), seeds)
            shard["squared_error_all_steps"] = squared_error(every, full)
            shard["squared_error_of_steps"] = squared_error(int8, every)
        if min(int8.shape[-2:]) >= metrics.SSIM_SMALLEST:
            shard["ssim"] = metrics.ssim(int8, full)
        if self._lpips is not None:
            shard["lpips"] = metrics.lpips(self._lpips, int8, full)
        return shard

    def make_others(self, held: range) -> dict[str, Tensor]:
        """One shard of full-precision samples of the seeds after those of the pairs."""
        first = self._drawing.request.seed + self._drawing.request.samples
        images, finite, _ = self._full(range(first + held.start, first + held.stop))
        if self._clipping is not None:
            self._clipping.take()  # pairs alone are counted
        return self._seen("full", images, finite)

    def _full(self, seeds: range) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Samples, which are finite, and per site for how many calls on a sample its attention was not."""
        assert self._full_denoiser is not None
        images, finite = self._drawing.draw(self._full_denoiser, seeds)
        return images, finite, self._nonfinite.take()

    def _attend(self, call: SiteCall) -> Tensor:
        """Full precision's own attention, under the watch."""
        if self._clipping is not None:
            self._clipping.add(call)
        out = call.exact()
        self._nonfinite.add(call.name, out)
        return out

    def _seen(self, name: str, images: Tensor, finite: Tensor) -> dict[str, Tensor]:
        features = features_of(self._extractor, images.nan_to_num(0, 1, 0))  # a row that is not finite is never read
        return {f"{name}.{kind}": x for kind, x in features.items()} | {f"{name}.finite": finite}


def features_of(extractor: Extractor, images: Tensor) -> dict[str, Tensor]:
    """What an extractor sees in finite images, see `Features.tensors`.

    Raises:
        UserError: NaN or Inf, which no distance could be made of.
    """
    found = extractor(images).tensors()
    if broken := [kind for kind, x in found.items() if not x.isfinite().all()]:
        raise UserError(
            f"the feature extractor '{extractor.name}' gives NaN or Inf",
            expected="finite features of finite images",
            got=f"NaN or Inf among its {', '.join(broken)} features",
            remedy="correct the extractor, for example by running it in float32, or choose another with --features",
        )
    return found


# Comparing ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FeatureSet:
    """The finite samples of one set.

    Attributes:
        moments: by kind of features, "pooled" and perhaps "spatial".
        pooled, logits: [N, D], [N, classes] or None.
        indices: [N] numbers of the samples; nonfinite: how many were left out.
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
            remedy="ask for more with --samples; if many are NaN or Inf, `trtconvert inspect` shows the sites' precision",
        )
    return FeatureSet(moments, torch.cat(pooled), torch.cat(logits) if logits else None, kept, start - len(kept))


def quality(
    got: FeatureSet, reference: FeatureSet, accuracy: Callable[[FeatureSet], float | None], *, by_sample: bool = True
) -> SetQuality:
    """
    Args:
        by_sample: with KID, precision and recall, which compare samples one by one and take longer than all else.
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


def _compare(
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
