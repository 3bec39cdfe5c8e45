"""Draws inputs of the attention operator, computes them on a GPU and in float64, and compares."""

from __future__ import annotations

import torch
from torch import Tensor

from trtconvert.attention import kernel, reference
from trtconvert.attention.modes import Mode

# Relative L2 error against the same arithmetic. Rounding the output to FP16 gives 2^-11 / sqrt(3) = 2.8e-4, to BF16 eight
# times that; P in 16 bits as much again. In modes 2 and 3 the exponents' rounding moves some P to the next of 255 steps. In
# mode 3 a sink leaves the outputs small beside the steps of V, and single steps weigh most. In mode 4 the tensor cores cut off
# what is 13 bits below the sum, and a sink makes other weights so small that E4M3 has no more bits for them: the kernel, whose
# references are those of the keys before, is the closer to exact there.
SAME_ARITHMETIC = {
    Mode.FP16: 1e-3,
    Mode.PRECISION: 1.5e-3,
    Mode.BALANCED: 4e-3,
    Mode.AGGRESSIVE: 1e-2,
    Mode.FP8: 1e-2,
}


ROUNDED_TO_BF16 = 5e-3


# Relative L2 error against unquantised attention on N(0, 1) at 4096 keys, D 128, dynamic scales (mode 3: calibrated).
# About a tenth above what was measured: 0.0117, 0.0155, 0.0198, 0.0394.
QUANTISED = {
    Mode.FP16: 1e-3,
    Mode.PRECISION: 0.013,
    Mode.BALANCED: 0.018,
    Mode.AGGRESSIVE: 0.025,
    Mode.FP8: 0.043,
}


TABLES = ("q_scale", "k_scale", "v_scale", "k_offset", "v_offset", "modes")


DIMS = (32, 40, 56, 64, 72, 80, 96, 104, 128, 160, 192, 256)


LENGTHS = (1, 63, 64, 65, 77, 128, 1000, 4096)


KINDS = ("gauss", "sharp", "k-bias", "v-channels", "sink")


def draw(kind: str, batch: int, heads: int, kv_heads: int, queries: int, keys: int, dim: int, dtype=torch.float16):
    """[B, H, Nq, D], [B, Hkv, Nk, D] twice: inputs that stress one thing each."""
    generator = torch.Generator("cuda").manual_seed(keys * dim)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cuda")

    q, k, v = normal(batch, heads, queries, dim), normal(batch, kv_heads, keys, dim), normal(batch, kv_heads, keys, dim)
    if kind == "sharp":  # a peaked softmax
        q = q * 4
    elif kind == "k-bias":  # a large common part, as real keys and values have
        k, v = k + 3 * normal(1, kv_heads, 1, dim), v + normal(1, kv_heads, 1, dim)
    elif kind == "v-channels":  # channels of very different size
        v = v * normal(1, kv_heads, 1, dim).exp()
    elif kind == "sink" and keys > 5:  # one key that every query loves, with a small value
        direction = torch.nn.functional.normalize(normal(1, 1, 1, dim), dim=-1)
        q = q + 6 * direction
        k[:, :, 5:6] = 16 * direction
        v[:, :, 5] *= 0.05
    return q.to(dtype), k.to(dtype), v.to(dtype)


def poison() -> None:
    """Memory that the allocator hands out next holds NaN: what stays unwritten, or is read unwritten, shows in the result."""
    torch.full((256 << 20,), 0xFF, dtype=torch.uint8, device="cuda")


def attend(qkv, timestep, tables, **options) -> Tensor:
    poison()
    return kernel.int8_attention(*qkv, timestep, *(getattr(tables, name) for name in TABLES), **options)


def exact(qkv) -> Tensor:
    q, k, v = (x.double() for x in qkv)
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    return torch.softmax(q @ k.transpose(2, 3) * q.shape[-1] ** -0.5, -1) @ v


def error(out: Tensor, expected: Tensor) -> float:
    return ((out.double() - expected).norm() / expected.norm()).item()


def computed_as(qkv, tables: reference.AttentionTables, *, mask: Tensor | None = None, layout: str = "BHND", **options):
    """The tables whose modes the kernels compute: PRECISION for FP8 where there is no kernel for that."""
    tokens = qkv[1].shape[2 if layout == "BHND" else 1]
    has_fp8 = torch.cuda.get_device_capability() == (9, 0) and options.get("target_arch", 0) == 0
    maskless = mask is None or reference.is_key_mask(mask, qkv[0].shape[2 if layout == "BHND" else 1])
    if has_fp8 and maskless and tokens > 128 and qkv[0].shape[-1] <= 128:
        return tables
    return tables.with_modes(torch.where(tables.modes == Mode.FP8, int(Mode.PRECISION), tables.modes))


def check(qkv, tables, *, timestep=None, kind: str = "", **options) -> Tensor:
    timestep = torch.full((qkv[0].shape[0],), 500.0, device="cuda") if timestep is None else timestep
    out = attend(qkv, timestep, tables, **options)
    tables = computed_as(qkv, tables, **options)
    expected = reference.attention(*(x.double() for x in qkv), timestep, tables, compute_dtype=torch.float64, **options)
    assert torch.isfinite(out).all()
    limit = max(SAME_ARITHMETIC[Mode(int(mode))] for mode in tables.modes)
    if kind == "sink" and Mode.FP8 in tables.modes:
        limit = 6e-2
    assert error(out, expected) <= limit + (ROUNDED_TO_BF16 if out.dtype == torch.bfloat16 else 0)
    return out
