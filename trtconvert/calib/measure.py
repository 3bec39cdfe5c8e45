"""`trtconvert measure`: times of the attention kernels on this machine's GPU, for `plan.kernel_cost` in recipes."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from trtconvert.attention import kernel
from trtconvert.attention.device_time import device_microseconds
from trtconvert.attention.modes import Mode
from trtconvert.attention.reference import tables_from_data
from trtconvert.calib.cost import AttentionShape
from trtconvert.errors import BackendUnavailable

_HEADS = ((1, 24, 128), (2, 10, 64), (2, 8, 40))
_PROMPT = 77
"""Tokens of CLIP's prompts."""

SHAPES = (
    *(AttentionShape(b, heads, n, n, dim) for b, heads, dim in _HEADS for n in (256, 1024, 4096, 16384)),
    *(AttentionShape(b, heads, n, _PROMPT, dim) for b, heads, dim in _HEADS for n in (1024, 4096, 16384)),
)
"""The sizes of common diffusion models, to their own tokens and to prompts; what lies between them is interpolated."""

INPUTS = 3
"""Sets of inputs that take turns, so that no call finds its own in the cache."""


def measure_kernels(shapes: Sequence[AttentionShape] = SHAPES, done: Callable[[], None] = lambda: None) -> str:
    """Times of every mode as JSON text, see `KernelCost.load`. FP16, quantisation inside, dynamic scales; see
    `device_microseconds`.

    Args:
        done: called after each shape and mode.
    Raises:
        BackendUnavailable: there is no GPU.
    """
    if not torch.cuda.is_available():
        raise BackendUnavailable(
            "there is no GPU to measure the attention kernels on",
            expected="an NVIDIA GPU of compute capability 8.0 or newer, and a torch that sees it",
            got="none",
            remedy="run this on the machine that the engine is for, and give its file to plan.kernel_cost",
        )
    rows = []
    for shape in shapes:
        for mode in Mode:
            seconds = device_microseconds([_call(shape, mode, seed) for seed in range(INPUTS)]) * 1e-6
            rows.append({"mode": int(mode), "shape": list(vars(shape).values()), "seconds": round(seconds, 9)})
            done()
    table = {"gpu": torch.cuda.get_device_name(), "date": datetime.date.today().isoformat()}
    lines = ",\n".join("  " + json.dumps(row) for row in rows)
    return json.dumps(table, indent=1)[:-2] + f',\n "rows": [\n{lines}\n ]\n}}\n'


def write_kernel_cost(path: Path, done: Callable[[], None]) -> None:
    """Measure the usual shapes, and write the table."""
    path.write_text(measure_kernels(done=done))


def _call(shape: AttentionShape, mode: Mode, seed: int) -> Callable[[], Tensor]:
    generator = torch.Generator("cuda").manual_seed(seed)
    tokens = {"q": shape.query_tokens, "k": shape.key_tokens, "v": shape.key_tokens}
    q, k, v = (
        torch.randn(shape.batch, shape.heads, n, shape.head_dim, device="cuda", generator=generator).half()
        for n in tokens.values()
    )
    tables = tables_from_data(q, k, v, mode)
    timestep = torch.zeros(shape.batch, device="cuda")
    return lambda: kernel.attention(q, k, v, timestep, tables, scaling="dynamic")
