"""INT8 linear layers on a GPU: calls the CUDA kernels by ctypes.

The shared library uses neither torch nor Python: one build serves all versions. `trtconvert.linear.reference` is the
specification, and runs on CPUs and for unsupported sizes.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from trtconvert.c_structs import INT8_LINEAR_VERSION, QUANTISE_VERSION, Int8LinearParams, ModeTable, QuantiseParams
from trtconvert.library import run
from trtconvert.linear import reference
from trtconvert.linear.modes import LayerMode
from trtconvert.linear.reference import LayerTables

_DATA_TYPES = {torch.float16: 0, torch.bfloat16: 1}
_IN_STEP, _OUT_STEP = 16, 8


def linear(x: Tensor, timestep: Tensor | None, tables: LayerTables, *, timestep_max: float = 1000.0) -> Tensor:
    """Computes `reference.linear` by the kernels if x is 16-bit on a GPU and the channels fit their vectors.

    Args:
        x, timestep, tables, timestep_max: see `reference.linear`. The host reads modes and offsets once per table: later calls
            may be recorded in a CUDA graph.
    Raises:
        BackendUnavailable: x is on a GPU, and there is no library.
        RuntimeError: the GPU has no kernel, or CUDA failed.
    """
    outputs, channels = tables.weight.shape
    if not x.is_cuda or x.dtype not in _DATA_TYPES or channels % _IN_STEP or outputs % _OUT_STEP:
        return reference.linear(x, timestep, tables, timestep_max=timestep_max)
    held = _Held(x.device)
    rows = x.contiguous().view(-1, channels)
    count = len(rows)
    table = ModeTable(mode_set=_mode_set(tables), num_bins=len(tables.modes), batch=1, timestep_max=timestep_max)
    if timestep is not None:
        table.batch = len(timestep)
        table.timestep = held(timestep.float())
    elif len(tables.modes) > 1:
        raise ValueError("timestep: expected one for each sample with tables of several bins, got none; pass it")
    if table.mode_set & (table.mode_set - 1):
        table.modes = held(tables.modes.to(torch.int32))
    if table.mode_set & 1 << LayerMode.STATIC:
        table.x_scale = held(tables.x_scale)
    wide = 2 if table.mode_set & 1 << LayerMode.WEIGHT_ONLY else 1
    payload = torch.empty(count * channels * wide, dtype=torch.int8, device=x.device)
    row_scale = torch.empty(count, dtype=torch.float32, device=x.device)
    stream = torch.cuda.current_stream(x.device).cuda_stream
    quantise = QuantiseParams(
        struct_size=ctypes.sizeof(QuantiseParams), version=QUANTISE_VERSION, rows=count, channels=channels,
        data_type=_DATA_TYPES[x.dtype], table=table, x=rows.data_ptr(),
        factor=held(tables.x_factor), offset=held(tables.x_offset) if _has_offsets(tables.x_offset) else None,
        payload=payload.data_ptr(), row_scale=row_scale.data_ptr(), stream=stream,
    )  # fmt: skip
    y = torch.empty(count, outputs, dtype=x.dtype, device=x.device)
    product = Int8LinearParams(
        struct_size=ctypes.sizeof(Int8LinearParams), version=INT8_LINEAR_VERSION, rows=count, in_channels=channels,
        out_channels=outputs, data_type=_DATA_TYPES[x.dtype], mode_set=table.mode_set, x=payload.data_ptr(),
        row_scale=row_scale.data_ptr(), weight=held(tables.weight), weight_scale=held(tables.weight_scale),
        bias=held(tables.bias), y=y.data_ptr(), stream=stream,
    )  # fmt: skip
    with torch.cuda.device(x.device):
        run("trtconvert_quantise_run", quantise)
        run("trtconvert_int8_linear_run", product)
    return y.view(*x.shape[:-1], outputs)


class _Held:
    """Moves tensors to a device, and keeps them until the work is enqueued."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._tensors = device, list[Tensor]()

    def __call__(self, tensor: Tensor) -> int:
        there = tensor.to(self._device).contiguous()
        self._tensors.append(there)
        return there.data_ptr()


def _mode_set(tables: LayerTables) -> int:
    return sum(1 << mode for mode in reference.distinct_modes(tables))


def _has_offsets(x_offset: Tensor) -> bool:
    return reference.read_once(x_offset, lambda offset: bool(offset.any()))
