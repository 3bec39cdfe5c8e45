"""The request of an evaluation, and its result as it is written to JSON."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from trtconvert.documents import read_json
from trtconvert.errors import UserError, first_problem

BATCH = 64
"""Samples drawn at once by default. A bundle may allow fewer."""

FIRST_SEED = 100_000
"""Far from the seeds of calibration, plan and gates: the scales were chosen on those."""


@dataclass(frozen=True)
class Request:
    """The options of an evaluation.

    Attributes:
        weights: of the full-precision model; None leaves out the comparisons with it.
        samples, steps, solver, seed: of the samples; sample i has the seed `seed + i`.
        features, features_weights: see `load_extractor`; reference: see `load_reference`. None: the defaults of a shipped model.
        lpips_weights: AlexNet's weights; None leaves out LPIPS.
        device: of the full-precision model, see `on_device`; "auto" takes the GPU if there is one and the model fits.
        offload: keep the weights of torch models in host memory, see `trtconvert.models.offloading`.
        dtype: that the full-precision model computes in.
        int8: "bundle" runs the backend that `runtime.load` finds, "torch" runs `TorchInt8`.
        batch: samples drawn at once, at most one shard.
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
    """One set of samples against the reference set, over the finite samples. None: the features do not allow the figure.

    Attributes:
        nonfinite: number of samples that met NaN or Inf; no figure contains them.
        fid, sfid, kid, kid_std, inception_score, inception_score_std, precision, recall: see `metrics`.
        accuracy: share of samples that the classifier assigns to the requested class.
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
        psnr: dB over all pixels of all samples. psnr_worst: of the worst sample, which has the seed psnr_worst_seed.
        ssim, ssim_worst, lpips, lpips_worst: mean and worst; None where they were not computed.
        fid_int8, fid_full: distance of the INT8 and of the full-precision samples to those of other seeds.
        psnr_all_steps: dB with all steps computed. psnr_of_steps: dB of the INT8 samples against INT8 samples with all steps.
            Both are None where the bundle reuses no steps.
        nonfinite_sites: by site, samples whose attention gave NaN or Inf in full precision.
        nonfinite_int8_sites: the same in INT8, where torch runs it: the inside of an engine cannot be observed.
        nonfinite_int8_layers: the same of INT8 layers.
        clipped: by site, share of the elements of "q", "k" and "v" that the bundle's scales clip, see `Clipping`.
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
    """The result of `trtconvert evaluate`.

    Attributes:
        created: UTC time; bundle: digest of its manifest; model, weights: as in the manifest.
        samples, steps, seed: as in the request; solver: likewise, or the scheduler of a pipeline, see `Manifest.sampler_name`.
        dtype: of the full-precision model; None without one.
        features, features_identity, reference, reference_count, reference_identity: the extractor and the reference set.
        backend: that ran INT8, in words.
        int8, full, other: the bundle's samples; full-precision samples of the same seeds; full-precision samples of other
            seeds. The difference between the last two is the noise of each figure.
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
    """Reads the JSON file of an evaluation.

    Raises:
        UserError: `trtconvert evaluate` did not write the file.
    """
    try:
        return Evaluation.model_validate(read_json(path))
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path} is not an evaluation",
            expected="a JSON file written by `trtconvert evaluate`",
            got=error.strerror or type(error).__name__ if isinstance(error, OSError) else first_problem(error),
            remedy="correct the path, or write the file with `trtconvert evaluate BUNDLE -o FILE`",
        ) from error
