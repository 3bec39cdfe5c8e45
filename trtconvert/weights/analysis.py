"""The effect of INT8 on each tensor of a model: `trtconvert analyze`, and the rules of `trtconvert quantize`."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from trtconvert.documents import read_json
from trtconvert.errors import UserError, first_problem
from trtconvert.progress import Bar
from trtconvert.weights import blocks
from trtconvert.weights.blocks import Granularity, Measured, as_matrix, block_shape
from trtconvert.weights.finite import largest
from trtconvert.weights.sources import Source, StoredTensor
from trtconvert.weights.structure import Role, Structure, structure_of
from trtconvert.weights.weight_files import type_name

MIN_SQNR = 30.0
"""dB of a weight in INT8, at least: 3 % relative error. Normally distributed weights have 40."""

GRANULARITIES: tuple[Granularity, ...] = get_args(Granularity)

FALLBACK = {"bf16": torch.bfloat16, "fp16": torch.float16}

NORMS = re.compile(r"(^|[._])(\w*norm\w*|ln(_?\w+)?|q_ln|k_ln)$")
"""Modules that normalise. Only their vectors count, not the layers that make these vectors from the timestep."""

EMBEDDINGS = re.compile(r"(^|[._])(\w*embed\w*|wte|wpe|shared|relative_attention_bias)([._]|$)")
FINAL = re.compile(
    r"^(model\.diffusion_model\.)?(proj_out|conv_out|norm_out|final_layer|out_layer|lm_head|head|out)(\.|$)"
    r"|(^|\.)(final_layer|decoder\.conv_out)\."
)
"""The last layers of denoisers and decoders, not layers of these names within blocks."""

NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Rules(_Record):
    """The rules that decide about each tensor.

    Attributes:
        granularity: of the scales; fallback: type of tensors that are neither INT8 nor FP32.
        strategy: "names": embeddings and final layers have certain names; "kandinsky": they have a certain place in the model, as
            have its blocks, modulations, encoders and its VAE, see `structure`.
        fp32: patterns (fnmatch) of names that stay in FP32, beside norms, embeddings and final layers.
        max_outliers: share of elements, see `blocks.OUTLIER`; min_elements: of a weight in INT8.
    """

    granularity: Literal["block", "channel"] = "block"
    fallback: Literal["bf16", "fp16"] = "bf16"
    strategy: Literal["names", "kandinsky"] = "names"
    fp32: tuple[str, ...] = ()
    max_outliers: Annotated[float, Field(ge=0, le=1)] = 0.01
    min_elements: Annotated[int, Field(ge=0)] = 4096


class Verdict(_Record):
    """The type that a tensor gets, and the reason. "kept" is the type that it has."""

    stored: Literal["int8", "bf16", "fp16", "fp32", "kept"]
    reason: str


class BlockStatistics(_Record):
    """Statistics of a tensor's blocks of 128 × 128: their number in each direction, the least, median and largest of their peaks
    and of their root mean squares, and the largest share of outliers."""

    rows: int
    columns: int
    amax_min: NonNegative
    amax_median: NonNegative
    amax_max: NonNegative
    rms_min: NonNegative
    rms_median: NonNegative
    rms_max: NonNegative
    worst_outliers: NonNegative


class Quality(_Record):
    """‖ŵ − w‖ / ‖w‖ of a tensor in INT8, and the same as signal to noise in dB; None where there is no error."""

    relative_error: NonNegative
    sqnr: float | None


class TensorReport(_Record):
    """A tensor.

    Attributes:
        name: as `StoredTensor.path`; dtype, elements, bytes: in the file.
        bytes_after: with its verdict; bytes_int8: in INT8 with scales of blocks, None for tensors that are no matrix.
        nonfinite: how many are NaN or Inf. With any, or without elements, the attributes below are None.
        role: in the model, where the rules' strategy asks for it.
        outliers: share of elements; histogram: elements by octave of magnitude, the largest's first.
        quality: by granularity of the scales.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    elements: int
    bytes: int
    bytes_after: int
    bytes_int8: int | None
    nonfinite: int
    verdict: Verdict
    role: str = ""
    outliers: NonNegative | None = None
    blocks: BlockStatistics | None = None
    quality: dict[Granularity, Quality] = {}
    histogram: list[int] = []


class Analysis(_Record):
    """A model's tensors.

    Attributes:
        model: name of its file or folder; fingerprint: see `Source.fingerprint`.
        rules: of the verdicts.
        reads_images: see `Structure`; None where the rules' strategy does not ask.
    """

    version: Literal[1] = 1
    model: str
    fingerprint: str
    rules: Rules
    tensors: list[TensorReport]
    reads_images: bool | None = None

    @property
    def parameters(self) -> int:
        return sum(tensor.elements for tensor in self.tensors)

    @property
    def in_int8(self) -> int:
        """Parameters that become INT8."""
        return sum(tensor.elements for tensor in self.tensors if tensor.verdict.stored == "int8")

    @property
    def bytes(self) -> int:
        return sum(tensor.bytes for tensor in self.tensors)

    @property
    def bytes_after(self) -> int:
        return sum(tensor.bytes_after for tensor in self.tensors)

    def candidates(self) -> list[TensorReport]:
        """Tensors that become INT8, those that save most first."""
        found = [tensor for tensor in self.tensors if tensor.verdict.stored == "int8"]
        return sorted(found, key=lambda tensor: tensor.bytes_after - tensor.bytes)


def analyse(source: Source, bar: Bar, rules: Rules | None = None) -> Analysis:
    """Analyse all tensors, one in memory at a time.

    Raises:
        UserError: a file is damaged, a tensor cannot be read, or the strategy does not fit the model.
    """
    rules = rules or Rules()
    structure = structure_for(source, rules)
    tensors = list(source.tensors)
    bar.total(len(tensors))
    reports = []
    with blocks.threads_by_tile():
        for tensor in tensors:
            reports.append(_report(tensor, rules, structure))
            bar.step()
    name = os.fsencode(source.place.resolve().name).decode("utf-8", "replace")
    return Analysis(
        model=name,
        fingerprint=source.fingerprint,
        rules=rules,
        tensors=reports,
        reads_images=structure and structure.reads_images,
    )


def structure_for(source: Source, rules: Rules) -> Structure | None:
    """The model's structure, None where the rules do not need it.

    Raises:
        UserError: the model has no denoiser.
    """
    if rules.strategy == "names":
        return None
    structure = structure_of(source)
    if not structure.has("denoiser"):
        found = sorted({role.unit for role in structure.roles.values()})
        raise UserError(
            f"--strategy {rules.strategy} finds no denoiser in {source.place}",
            expected="blocks with attention outside of text encoders, image encoders and VAEs",
            got=", ".join(found) or "no tensors",
            remedy="name the pipeline's folder or the denoiser's; or leave --strategy out",
        )
    return structure


def _report(tensor: StoredTensor, rules: Rules, structure: Structure | None) -> TensorReport:
    x = tensor.read()
    nonfinite, outliers, error = 0, None, None
    figures: dict[str, Any] = {}
    if x.is_floating_point() and x.numel():
        matrix = as_matrix(x)
        measured = blocks.measure(matrix, histogram=True)
        if not (nonfinite := measured.nonfinite):
            errors = {kind: blocks.relative_error(matrix, blocks.scales(measured, kind)) for kind in GRANULARITIES}
            outliers, error = outlier_share(measured, x), errors[rules.granularity]
            figures = {
                "outliers": outliers,
                "blocks": _block_statistics(measured, matrix),
                "quality": {kind: Quality(relative_error=of, sqnr=sqnr(of)) for kind, of in errors.items()},
                "histogram": measured.histogram,
            }
    if nonfinite:
        verdict = Verdict(stored="kept", reason=f"{nonfinite:,} of its numbers are NaN or Inf")
    else:
        verdict = decide(tensor, rules, structure, x, outliers, error)
    return TensorReport(
        name=tensor.path,
        shape=tensor.shape,
        dtype=type_name(tensor.dtype),
        elements=x.numel(),
        bytes=tensor.nbytes,
        bytes_after=bytes_of(tensor, verdict, rules),
        bytes_int8=int8_bytes(tensor.shape, "block") if len(tensor.shape) > 1 else None,
        nonfinite=nonfinite,
        verdict=verdict,
        role=str(structure.roles[tensor.path]) if structure else "",
        **figures,
    )


def sqnr(error: float) -> float | None:
    """Signal to quantisation noise in dB of a relative error."""
    return -20 * math.log10(error) if error else None


def outlier_share(measured: Measured, x: Tensor) -> float:
    return int(measured.outliers.sum()) / x.numel()


def _block_statistics(measured: Measured, matrix: Tensor) -> BlockStatistics:
    rows, columns = measured.blocks.shape
    # The last blocks in each direction are smaller.
    heights, widths = (
        torch.tensor([blocks.BLOCK] * (count - 1) + [(size - 1) % blocks.BLOCK + 1])
        for count, size in zip((rows, columns), matrix.shape, strict=True)
    )
    sizes = heights[:, None] * widths
    rms = (measured.squares / sizes).sqrt()
    return BlockStatistics(
        rows=rows,
        columns=columns,
        amax_min=float(measured.blocks.min()),
        amax_median=float(measured.blocks.median()),
        amax_max=measured.amax,
        rms_min=float(rms.min()),
        rms_median=float(rms.median()),
        rms_max=float(rms.max()),
        worst_outliers=float((measured.outliers / sizes).max()),
    )


def by_name(
    tensor: StoredTensor, rules: Rules, structure: Structure | None = None, *, floating: bool
) -> Verdict | None:
    """The verdict by a tensor's name, shape and type, or by its role; None where its numbers decide."""
    if not floating:
        return Verdict(stored="kept", reason="no floating-point numbers")
    module, _, last = tensor.name.rpartition(".")
    elements = math.prod(tensor.shape)
    if pattern := next((p for p in rules.fp32 if fnmatchcase(tensor.path, p) or fnmatchcase(tensor.name, p)), None):
        return Verdict(stored="fp32", reason=f"--fp32 {pattern}")
    role = structure.roles[tensor.path] if structure else None
    if role is not None and (verdict := _by_role(tensor, rules, role, structure)) is not None:
        return verdict
    # Norms have weights of one dimension, also where they are called by a number.
    if len(tensor.shape) < 2 and (NORMS.search(module) or (len(tensor.shape) == 1 and last == "weight")):
        return Verdict(stored="fp32", reason="norm")
    if role is None and EMBEDDINGS.search(tensor.name):
        return Verdict(stored="fp32", reason="embedding")
    if role is None and FINAL.search(tensor.name):
        return Verdict(stored="fp32", reason="final layer")
    if len(tensor.shape) < 2 or last != "weight" or not module:
        return Verdict(stored=rules.fallback, reason="no weight of a linear layer or a convolution")
    if elements < max(1, rules.min_elements):
        return Verdict(stored=rules.fallback, reason=f"{elements:,} elements, under {rules.min_elements:,}")
    if int8_bytes(tensor.shape, rules.granularity) >= 2 * elements:
        return Verdict(stored=rules.fallback, reason="its scales would take as much as INT8 saves")
    return None


def _by_role(tensor: StoredTensor, rules: Rules, role: Role, structure: Structure | None) -> Verdict | None:
    """The verdict by a tensor's role."""
    if role.unit == "VAE decoder":
        return Verdict(stored="kept", reason="VAE decoder")
    if role.unit == "VAE encoder" and structure and structure.reads_images:
        return Verdict(stored="kept", reason="VAE encoder, of images that the denoiser reads")
    is_weight = len(tensor.shape) > 1 and tensor.name.endswith(".weight")
    if role.unit == "denoiser" and is_weight and role.kind == "outside of blocks":
        return Verdict(stored="kept", reason="embedding, first or last layer")
    if role.kind == "vocabulary":  # a table, which is not multiplied
        return Verdict(stored="kept", reason="vocabulary")
    return None


def decide(
    tensor: StoredTensor,
    rules: Rules,
    structure: Structure | None,
    x: Tensor,
    outliers: float | None,
    error: float | None,
) -> Verdict:
    """The verdict on a tensor.

    Args:
        structure: of the model, see `structure_for`; x: the tensor's numbers.
        outliers, error: share of elements, and relative error with the rules' granularity, where numbers decide.
    """
    verdict = by_name(tensor, rules, structure, floating=x.is_floating_point())
    if verdict is None:
        assert outliers is not None and error is not None
        if outliers > rules.max_outliers:
            reason = f"{outliers:.2%} outliers, over {rules.max_outliers:.2%}"
            verdict = Verdict(stored=rules.fallback, reason=reason)
        elif (db := sqnr(error)) is not None and db < MIN_SQNR:
            verdict = Verdict(stored=rules.fallback, reason=f"{db:.1f} dB in INT8, under {MIN_SQNR:g}")
        else:
            text = "no error" if db is None else f"{db:.1f} dB"
            verdict = Verdict(stored="int8", reason=f"{text}, {outliers:.2%} outliers")
    dtype = FALLBACK.get(verdict.stored)
    if dtype is not None and tensor.dtype is not dtype:
        most, range_of = largest(x), torch.finfo(dtype)
        if range_of.max < most < math.inf:
            text = f"beyond {verdict.stored.upper()}'s {range_of.max:g}"
            return Verdict(stored="fp32", reason=f"{text}; otherwise {verdict.reason}")
        if 0 < most < range_of.smallest_normal:  # smaller numbers lose bits
            text = f"below {verdict.stored.upper()}'s {range_of.smallest_normal:.2g}"
            return Verdict(stored="fp32", reason=f"{text}; otherwise {verdict.reason}")
    return verdict


def int8_bytes(shape: tuple[int, ...], granularity: Literal["block", "channel"]) -> int:
    """Bytes of a matrix in INT8 with its scales."""
    rows, columns = shape[0], math.prod(shape[1:])
    return rows * columns + 4 * (rows if granularity == "channel" else math.prod(block_shape(rows, columns)))


def bytes_of(tensor: StoredTensor, verdict: Verdict, rules: Rules) -> int:
    """Bytes of a tensor after its verdict."""
    elements = math.prod(tensor.shape)
    if verdict.stored == "int8":
        return int8_bytes(tensor.shape, rules.granularity)
    return {"bf16": 2 * elements, "fp16": 2 * elements, "fp32": 4 * elements}.get(verdict.stored, tensor.nbytes)


def read_analysis(path: Path, source: Source) -> Mapping[str, TensorReport]:
    """The tensors of an analysis of this model, by their paths.

    Raises:
        UserError: the file is no analysis, or that of another model.
    """
    remedy = f"run `trtconvert analyze {source.place}`"
    try:
        found = Analysis.model_validate(read_json(path))
    except (OSError, ValueError) as error:
        raise UserError(
            f"the analysis {path} cannot be read",
            expected="a file that `trtconvert analyze` wrote",
            got=first_problem(error),
            remedy=remedy,
        ) from error
    reports = {tensor.name: tensor for tensor in found.tensors}
    if found.fingerprint != source.fingerprint or reports.keys() != {tensor.path for tensor in source.tensors}:
        raise UserError(
            f"{path} is the analysis of another model",
            expected=f"one of {source.place}, {source.fingerprint[:12]}…",
            got=f"one of {found.model}, {found.fingerprint[:12]}…",
            remedy=remedy,
        )
    return reports


def required(path: Path, report: TensorReport, granularity: Granularity) -> tuple[float, float]:
    """The share of outliers and the relative error that an analysis has of a tensor.

    Raises:
        UserError: it has none.
    """
    if report.outliers is None or granularity not in report.quality:
        raise UserError(
            f"{path} lacks figures of {report.name}",
            expected="outliers and quality of each tensor with finite numbers",
            got=f"{report.nonfinite} that are not finite" if report.nonfinite else "none",
            remedy="run `trtconvert analyze` again, or leave --analysis out",
        )
    return report.outliers, report.quality[granularity].relative_error
