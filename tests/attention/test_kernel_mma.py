"""The portable kernel (mma.sync) on a GPU against `trtconvert.attention.reference` in float64.

Both compute the same quantised arithmetic, so they differ only by the output's rounding, the 16-bit rounding of P in
modes 0 and 1, and single values that fall on the other side of a rounding edge. `target_arch` 80 runs this kernel on GPUs
with a better kernel, too.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from trtconvert.attention import kernel, reference
from trtconvert.attention.modes import Mode

pytestmark = pytest.mark.gpu

# Relative L2 error over the tensor, and of the worst row. Output rounding alone gives 2^-11 / sqrt(3) = 2.8e-4 in FP16
# and eight times that in BF16; P in 16 bits adds up to as much. The worst row may hold a handful of values of Q, K, V or
# P that were rounded to the other side, each worth up to 1/127 of one of many keys.
LIMITS = {torch.float16: (1e-3, 1e-2), torch.bfloat16: (6e-3, 2e-2)}


def case(
    *,
    mode: Mode | list[int],
    batch: int = 1,
    heads: int = 2,
    kv_heads: int = 2,
    queries: int = 200,
    keys: int = 200,
    dim: int = 64,
    layout: str = "BHND",
    dtype: torch.dtype = torch.float16,
    seed: int = 0,
) -> tuple[list[Tensor], Tensor, reference.AttentionTables]:
    """([q, k, v], timestep, tables). A list of modes makes one timestep bin, and uses it in one batch element, each."""
    generator = torch.Generator("cuda").manual_seed(seed)
    modes = mode if isinstance(mode, list) else [int(mode)]

    def normal(heads: int, tokens: int, mean: float) -> Tensor:
        shape = (batch, heads, tokens, dim) if layout == "BHND" else (batch, tokens, heads, dim)
        channels = torch.randn(dim, generator=generator, device="cuda") * mean
        return (torch.randn(shape, generator=generator, device="cuda") + channels).to(dtype)

    qkv = [normal(heads, queries, 0.0), normal(kv_heads, keys, 2.0), normal(kv_heads, keys, 1.0)]
    one = reference.tables_from_data(*qkv, Mode.BALANCED, layout=layout)
    tables = reference.AttentionTables(
        *(getattr(one, name).repeat_interleave(len(modes), 0) for name in TABLES),
        modes=torch.tensor(modes, dtype=torch.int32, device="cuda"),
    )
    timestep = (torch.arange(batch, device="cuda") % len(modes) + 0.5) * (1000 / len(modes))
    return qkv, timestep, tables


TABLES = ("q_scale", "k_scale", "v_scale", "k_offset", "v_offset")


def run(
    qkv: list[Tensor],
    timestep: Tensor,
    tables: reference.AttentionTables,
    *,
    layout: str = "BHND",
    scaling: str = "calibrated",
    mask: Tensor | None = None,
    key_lengths: Tensor | None = None,
) -> Tensor:
    # Fresh memory holds NaN, so that elements that the kernels do not write, or read before writing, show in the result.
    poison = torch.full((64 << 20,), 0xFF, dtype=torch.uint8, device="cuda")
    del poison
    return kernel._run_cuda(
        *qkv, timestep, tables, layout=layout, scaling=scaling, mask=mask, key_lengths=key_lengths, target_arch=80
    )


def as_computed(tables: reference.AttentionTables) -> reference.AttentionTables:
    """This kernel computes PRECISION in place of FP8."""
    return tables.with_modes(torch.where(tables.modes == Mode.FP8, int(Mode.PRECISION), tables.modes))


def check(
    qkv: list[Tensor],
    timestep: Tensor,
    tables: reference.AttentionTables,
    *,
    layout: str = "BHND",
    scaling: str = "calibrated",
    mask: Tensor | None = None,
    key_lengths: Tensor | None = None,
) -> Tensor:
    """Runs and compares both; returns the kernel's output."""
    options = {"layout": layout, "scaling": scaling, "mask": mask, "key_lengths": key_lengths}
    out = run(qkv, timestep, tables, **options)
    exact = [x.double() for x in qkv]
    expected = reference.attention(*exact, timestep, as_computed(tables), compute_dtype=torch.float64, **options)
    whole, row = LIMITS[qkv[0].dtype]
    assert torch.isfinite(out).all()
    difference = out.double() - expected
    assert difference.norm() <= whole * expected.norm()
    typical = expected.norm(dim=-1).mean()
    assert difference.norm(dim=-1).max() <= row * typical
    return out


DIMS = (32, 40, 48, 64, 72, 80, 88, 96, 104, 128, 136, 160, 184, 192, 200, 256)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("mode", list(Mode))
def test_head_dims(mode: Mode, dim: int) -> None:
    check(*case(mode=mode, dim=dim))


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 77, 128, 129, 1000, 4096])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("mode", list(Mode))
def test_lengths(mode: Mode, dim: int, tokens: int) -> None:
    check(*case(mode=mode, dim=dim, queries=tokens, keys=tokens))


@pytest.mark.parametrize("layout", ["BHND", "BNHD"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("scaling", ["calibrated", "dynamic"])
@pytest.mark.parametrize("mode", list(Mode))
def test_layouts_types_and_scaling(mode: Mode, scaling: str, dtype: torch.dtype, layout: str) -> None:
    data = case(mode=mode, batch=2, heads=6, kv_heads=2, queries=333, keys=150, dim=80, layout=layout, dtype=dtype)
    check(*data, layout=layout, scaling=scaling)


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize(
    "kind",
    ["bool", "bool over heads", "bool over queries", "additive", "additive strided", "additive -inf", "empty rows"],
)
def test_masks(mode: Mode, kind: str) -> None:
    data = case(mode=mode, batch=2, heads=4, kv_heads=2, queries=150, keys=300)
    generator = torch.Generator("cuda").manual_seed(1)
    full = torch.rand(2, 4, 150, 300, generator=generator, device="cuda")
    mask = {
        "bool": full > 0.5,
        "bool over heads": full[:, :1] > 0.5,
        "bool over queries": full[:, 0, :1] > 0.5,
        "additive": (full * 4 - 2).half(),
        "additive strided": (full * 4 - 2).half().transpose(2, 3).contiguous().transpose(2, 3),
        "additive -inf": torch.where(full > 0.7, full, -torch.inf).half(),
        "empty rows": (full > 0.5) & (torch.arange(150, device="cuda") % 3 > 0)[:, None],
    }[kind]
    if kind == "bool over queries":
        mask = mask[:, None]
    out = check(*data, mask=mask)
    if kind == "empty rows":
        assert not out[:, :, ::3].any()
        assert out[:, :, 1].any()


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("masked", [False, True])
def test_key_lengths_hide_whatever_lies_behind(mode: Mode, masked: bool) -> None:
    (q, k, v), timestep, tables = case(mode=mode, batch=4, keys=400, queries=70)
    lengths = torch.tensor([400, 257, 1, 0], dtype=torch.int32, device="cuda")
    mask = torch.rand(70, 400, device="cuda") > 0.3 if masked else None
    if mask is not None:
        mask[:, 0] = True
    for b, length in enumerate(lengths.tolist()):
        k[b, :, length:] = torch.nan
        v[b, :, length:] = torch.inf
    out = check([q, k, v], timestep, tables, key_lengths=lengths, mask=mask)
    assert not out[3].any()


def test_a_batch_of_all_modes() -> None:
    data = case(mode=[int(mode) for mode in Mode], batch=2 * len(Mode), heads=3, kv_heads=3)
    out = check(*data)
    for b, mode in enumerate([*Mode, *Mode]):
        (q, k, v), timestep, tables = data
        alone = run([x[b : b + 1].contiguous() for x in (q, k, v)], timestep[b : b + 1], tables.with_modes(mode))
        torch.testing.assert_close(alone[0], out[b], rtol=0, atol=0)


@pytest.mark.parametrize("mode", list(Mode))
def test_unusable_tables_and_timesteps_give_nan_where_they_belong(mode: Mode) -> None:
    qkv, timestep, tables = case(mode=mode, batch=3)
    timestep[1] = torch.nan
    tables.q_scale[0, 1] = torch.inf
    out = run(qkv, timestep, tables)
    assert out[1].isnan().all()
    assert out[0, 0].isfinite().all() and out[2, 0].isfinite().all()
    assert out[0, 1].isnan().all() == (mode != Mode.FP16)
    unknown = run(qkv, timestep, tables.with_modes(torch.tensor([7], dtype=torch.int32, device="cuda")))
    assert unknown.isnan().all()


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("kind", ["sink", "zero channel", "equal keys", "large", "zeros"])
def test_extreme_values(mode: Mode, kind: str) -> None:
    (q, k, v), timestep, _ = case(mode=mode)
    if kind == "sink":  # one key takes most of the weight and has a small value
        k[:, :, 0] = q.mean(2) * 40
        v[:, :, 0] *= 0.01
    elif kind == "zero channel":
        v[..., 5] = 0
        v[:, :, 7] *= 1000
    elif kind == "equal keys":
        q, k = torch.full_like(q, 200), torch.full_like(k, 200)
    elif kind == "large":  # outputs near FP16's largest number, logits far beyond it
        q, k, v = q * 1000, k * 1000, torch.full_like(v, 60000) - v * 500
    else:
        q, k, v = (torch.zeros_like(x) for x in (q, k, v))
    out = check([q, k, v], timestep, reference.tables_from_data(q, k, v, mode))
    assert bool(out.any()) == (kind != "zeros")


@pytest.mark.parametrize("mode", list(Mode))
def test_offsets_beyond_32_bits(mode: Mode) -> None:
    heads, queries, keys, dim = 24, 128, 800_000, 128
    if torch.cuda.get_device_properties(0).total_memory < 80e9:
        pytest.skip("needs 80 GB of GPU memory")
    assert heads * keys * dim > 2**31
    q = torch.randn(1, heads, queries, dim, device="cuda", dtype=torch.float16) * 3
    k = torch.randn(1, heads, keys, dim, device="cuda", dtype=torch.float16)
    v = torch.randn(1, heads, keys, dim, device="cuda", dtype=torch.float16)
    last = [x[:, -1:].contiguous() for x in (q, k, v)]
    one = reference.tables_from_data(*last, mode)
    tables = reference.AttentionTables(*(getattr(one, name).repeat_interleave(heads, 1) for name in TABLES), one.modes)
    timestep = torch.tensor([500.0], device="cuda")
    out = run([q, k, v], timestep, tables)
    del q, k, v
    expected = reference.attention(*(x.double() for x in last), timestep, as_computed(one), compute_dtype=torch.float64)
    # The average of many random values is small: FP16 has fewer bits for it.
    assert (out[:, -1:].double() - expected).norm() <= 5e-3 * expected.norm()
    assert out.isfinite().all()
