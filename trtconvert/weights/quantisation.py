"""`trtconvert quantize` and `trtconvert dequantize`: a model's weights in INT8, and back."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from trtconvert.errors import UserError
from trtconvert.files import sha256
from trtconvert.progress import Bar
from trtconvert.weights import blocks
from trtconvert.weights.analysis import (
    FALLBACK,
    Rules,
    TensorReport,
    by_name,
    decide,
    outlier_share,
    read_analysis,
    required,
    structure_for,
)
from trtconvert.weights.blocks import as_matrix
from trtconvert.weights.conversion import Conversion, Converted, Outcome, Record, all_records, convert
from trtconvert.weights.finite import is_finite, largest, require_finite
from trtconvert.weights.sources import METADATA, Source, StoredTensor
from trtconvert.weights.structure import Structure
from trtconvert.weights.weight_files import type_name

SCALE = "_scale"
"""Ending of the name of a weight's scales, after the weight's."""

_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_FORMAT = 2  # of the output; a run does not take shards of another format


def quantise_model(source: Source, output: Path, rules: Rules, analysis: Path | None, bar: Bar) -> Outcome:
    """Write a model with its weights in INT8 where the rules decide so, see `analysis.decide`.

    Args:
        analysis: the file that `trtconvert analyze` wrote of this model. Its figures decide, and tensors are not measured again.
    Raises:
        UserError: the model is quantised already, a weight is NaN or Inf, the analysis is of another model, a file is damaged,
            the output's place is taken, or the rules' strategy does not fit the model.
    """
    if any(METADATA in metadata for part in source.parts for metadata in part.metadata.values()):
        raise UserError(
            f"{source.place} is quantised already",
            expected="a model in 16 or 32 bits, FP8 or GGUF",
            got="weights in INT8 that `trtconvert quantize` wrote",
            remedy=f"take the model from before, or `trtconvert dequantize {source.place}` first",
        )
    _refuse_unused_patterns(source, rules)
    structure = structure_for(source, rules)
    reports = read_analysis(analysis, source) if analysis else {}
    conversion = Conversion(
        request={"quantise": rules.model_dump(), "analysis": sha256(analysis) if analysis else "", "format": _FORMAT},
        granularity=rules.granularity,
        names=lambda tensor: (tensor.name, tensor.name + SCALE),
        most=lambda tensor: max(tensor.nbytes, 4 * math.prod(tensor.shape)),
        convert=functools.partial(_quantised, rules=rules, structure=structure, reports=reports, analysis=analysis),
    )
    return convert(source, output, conversion, bar)


def _refuse_unused_patterns(source: Source, rules: Rules) -> None:
    for pattern in rules.fp32:
        one = rules.model_copy(update={"fp32": (pattern,)})
        verdicts = (by_name(tensor, one, floating=True) for tensor in source.tensors)
        if not any(verdict is not None and verdict.reason == f"--fp32 {pattern}" for verdict in verdicts):
            raise UserError(
                f"--fp32 {pattern} matches no tensor of {source.place}",
                expected="a pattern of names, where * stands for anything",
                got=f"names as {next((tensor.path for tensor in source.tensors), 'none')}",
                remedy="correct it, or leave it out; `trtconvert analyze` lists all names",
            )


def _quantised(
    tensor: StoredTensor,
    rules: Rules,
    structure: Structure | None,
    reports: Mapping[str, TensorReport],
    analysis: Path | None,
) -> Converted:
    x = tensor.read()
    floating = x.is_floating_point()
    if floating:
        _refuse_nonfinite(tensor, x)
    if by_name(tensor, rules, structure, floating=floating) is not None:
        return _cast(tensor, x, decide(tensor, rules, structure, x, None, None).stored)
    matrix = as_matrix(x)
    measured = blocks.measure(matrix)
    scale = blocks.scales(measured, rules.granularity)
    if analysis is not None:
        figures = required(analysis, reports[tensor.path], rules.granularity)
        if (stored := decide(tensor, rules, structure, x, *figures).stored) != "int8":
            return _cast(tensor, x, stored)
    whole, error = blocks.quantise(matrix, scale)
    if analysis is None:
        stored = decide(tensor, rules, structure, x, outlier_share(measured, x), error).stored
        if stored != "int8":
            return _cast(tensor, x, stored)
    record = Record(stored="int8", original=type_name(tensor.dtype), relative_error=error)
    parts = [(tensor.name, whole.reshape(x.shape), torch.int8), (tensor.name + SCALE, scale, torch.float32)]
    return Converted(parts, record)


def _refuse_nonfinite(tensor: StoredTensor, x: Tensor) -> None:
    """Infinities of tensors that are no weights, such as masks, are allowed."""
    if (x.dim() > 1 and tensor.name.endswith("weight")) or bool(x.isnan().any()):
        remedy = "get the model again; `trtconvert analyze` lists all tensors with NaN or Inf"
        require_finite(f"the weight {tensor.path} is damaged", x, remedy)


def _cast(tensor: StoredTensor, x: Tensor, stored: str) -> Converted:
    if stored == "kept" or x.dtype == _TYPES[stored] == tensor.dtype:
        return Converted([(tensor.name, x, x.dtype)], None)
    dtype = _TYPES[stored]
    error = _rounding(x, dtype) if dtype.itemsize < x.dtype.itemsize and is_finite(x) else 0.0
    record = Record(stored=stored, original=type_name(tensor.dtype), relative_error=error)
    return Converted([(tensor.name, x, dtype)], record)


def _rounding(x: Tensor, dtype: torch.dtype) -> float:
    """The relative error of another type, in parts; 0 for zeros."""
    errors = powers = 0.0
    for part in x.reshape(-1).split(2**20):
        powers += float(torch.linalg.vector_norm(part, dtype=torch.float64)) ** 2
        errors += float(torch.linalg.vector_norm(part.to(dtype).double() - part.double())) ** 2
    return math.sqrt(errors / powers) if powers else 0.0


def dequantise_model(source: Source, output: Path, dtype: Literal["bf16", "fp16"] | None, bar: Bar) -> Outcome:
    """Write a model that `quantise_model` made with its weights in 16 bits again.

    Args:
        dtype: of tensors whose type was changed; by default the type before, or BF16 where that had not 16 bits.
    Raises:
        UserError: the model is not quantised, a file or a scale is damaged, numbers are beyond FP16, or the output's place is
            taken.
    """
    records = all_records(source)
    if not any(record.stored == "int8" for record in records.values()):
        raise UserError(
            f"there is nothing to dequantise in {source.place}",
            expected="weights in INT8 that `trtconvert quantize` wrote",
            got="none",
            remedy="name the folder that `trtconvert quantize` wrote",
        )
    conversion = Conversion(
        request={"dequantise": dtype, "format": _FORMAT},
        granularity=None,
        names=lambda tensor: (tensor.name,),
        most=lambda tensor: 4 * math.prod(tensor.shape),
        convert=functools.partial(_restored, records=records, dtype=dtype),
    )
    return convert(source, output, conversion, bar)


def _restored(tensor: StoredTensor, records: Mapping[str, Record], dtype: Literal["bf16", "fp16"] | None) -> Converted:
    x, record = tensor.read(), records.get(tensor.path)
    if record is None or (record.stored in ("bf16", "fp16") and dtype is None):
        return Converted([(tensor.name, x, x.dtype)], None)
    if record.stored == "int8":
        _refuse_nonfinite(tensor, x)  # a scale may be damaged
    original = getattr(torch, record.original, None)
    if dtype is not None:
        wanted = FALLBACK[dtype]
    elif isinstance(original, torch.dtype) and original in FALLBACK.values():
        wanted = original
    else:  # FP32 is recorded for other types that 16 bits would not hold
        wanted = torch.float32 if record.stored == "fp32" else torch.bfloat16
    limit = torch.finfo(torch.float16).max
    if wanted is torch.float16 and limit < (most := largest(x)) < math.inf:
        raise UserError(
            f"{tensor.path} does not fit FP16",
            expected=f"numbers up to {limit:g}",
            got=f"{most:g}",
            remedy="give --dtype bf16",
        )
    return Converted([(tensor.name, x, wanted)], None)
