"""Block masks, gathered keys and the log-sum-exp on a GPU, against `trtconvert.attention.reference` in float64."""

from __future__ import annotations

import math

import pytest
import torch
from gpu_attention import ROUNDED_TO_BF16, SAME_ARITHMETIC, TABLES, computed_as, draw, error, poison
from torch import Tensor

from trtconvert.attention import kernel, reference
from trtconvert.attention.modes import Mode
from trtconvert.attention.reference import BLOCK

pytestmark = pytest.mark.gpu

DIMS = (40, 64, 80, 96, 128, 160, 192, 256)
SHAPES = ((1, 1), (2, 1), (1, 4), (2, 4))
"""Batch and heads of a block mask, for batch 2 and 4 heads."""

# Largest and typical error of the log-sum-exp: of sums of 16-bit weights and of unrounded ones, and of sums of weights that were
# rounded to 8 bits. Where one weight of a row is most of its sum and falls on the other side of a rounding edge, the sum changes
# by the rounding's step: 1/255, or a sixteenth in FP8.
LSE = {Mode.FP16: 2e-3, Mode.PRECISION: 2e-3, Mode.BALANCED: 2e-3, Mode.AGGRESSIVE: 1e-2, Mode.FP8: 7e-2}
TYPICAL_LSE = 4e-3
FEW_KEYS = 1.5
"""Factor of an output's limit: a number that is rounded up here and down there weighs more in a row of one block of keys."""


def blocks(batch: int, heads: int, queries: int, keys: int, density: float = 0.5, empty: bool = False) -> Tensor:
    """A random block mask with at least one block in each row, but for one row in `empty`."""
    generator = torch.Generator("cuda").manual_seed(queries + keys)
    rows, columns = math.ceil(queries / BLOCK), math.ceil(keys / BLOCK)
    mask = torch.rand(batch, heads, rows, columns, generator=generator, device="cuda") < density
    mask.scatter_(3, torch.randint(columns, (batch, heads, rows, 1), generator=generator, device="cuda"), True)
    if empty:
        mask[..., rows // 2, :] = False
    return mask


def kept_rows(batch: int, kv_heads: int, keys: int, kept: int) -> Tensor:
    """A random index of rows, in no order; each once where there are enough."""
    generator = torch.Generator("cuda").manual_seed(keys + kept)
    order = torch.rand(batch, kv_heads, max(keys, kept), generator=generator, device="cuda").argsort(-1)
    return (order[..., :kept] % keys).int()


def given_keys(k: Tensor) -> Tensor:
    """The elements that are numbers: tests set keys behind a length to NaN."""
    return k.nan_to_num(0)


def compare(qkv, tables, *, timestep: Tensor | None = None, target_arch: int = 0, **options) -> tuple[Tensor, Tensor]:
    """Runs kernel and reference and compares outputs and log-sum-exps; returns the kernel's."""
    q = qkv[0]
    timestep = torch.full((q.shape[0],), 500.0, device="cuda") if timestep is None else timestep
    poison()
    out, lse = kernel._run_cuda(*qkv, timestep, tables, target_arch=target_arch, return_lse=True, **options)
    index = options.get("key_index")
    layout, mask = options.get("layout", "BHND"), options.get("mask")
    given = list(qkv)
    if index is not None:  # the number of keys, which tells whether there is a kernel for FP8
        given[1] = q.new_empty((1, 1, index.shape[2], 1) if layout == "BHND" else (1, index.shape[2], 1, 1))
    tables = computed_as(given, tables, mask=mask, layout=layout, target_arch=target_arch)
    expected, expected_lse = reference.attention(
        *(x.double() for x in qkv), timestep, tables, compute_dtype=torch.float64, return_lse=True, **options
    )
    modes = [Mode(int(mode)) for mode in tables.modes]
    rounding = ROUNDED_TO_BF16 if q.dtype == torch.bfloat16 else 0
    assert out.isfinite().all()
    assert error(out, expected) <= FEW_KEYS * max(SAME_ARITHMETIC[mode] for mode in modes) + rounding
    unseen = expected_lse == -torch.inf
    assert torch.equal(lse == -torch.inf, unseen)
    difference = (lse - expected_lse).masked_fill(unseen, 0).abs()
    # One number of a query, or of a key, that lies between two levels may be rounded either way, and moves a logit by as much.
    levels = 2 * q.shape[-1] ** -0.5 * float(q.abs().max() * given_keys(qkv[1]).abs().max()) / 127
    assert difference.max() <= max(LSE[mode] for mode in modes) + rounding + levels * any(
        mode != Mode.FP16 for mode in modes
    )
    assert difference.square().mean().sqrt() <= TYPICAL_LSE + rounding
    rows = out if layout == "BHND" else out.transpose(1, 2)
    assert not rows[unseen].any()
    return out, lse


@pytest.mark.parametrize("target_arch", [0, 80])
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("mode", list(Mode))
def test_block_masks(mode: Mode, dim: int, target_arch: int) -> None:
    turn = DIMS.index(dim) + mode
    dtype, layout = (torch.float16, torch.bfloat16)[turn % 2], ("BHND", "BNHD")[turn // 2 % 2]
    # Rows of blocks with one query block and with two; last tiles that are full, nearly, and not half.
    queries, keys = ((1000, 700), (1030, 768), (128, 1000), (64, 850))[turn % 4]
    qkv = draw("k-bias", 2, 4, 2, queries, keys, dim, dtype)
    tables = reference.tables_from_data(*qkv, mode)
    if layout == "BNHD":
        qkv = [x.transpose(1, 2).contiguous() for x in qkv]
    mask = blocks(*SHAPES[turn % 4], queries, keys, empty=queries > BLOCK)
    scaling = ("calibrated", "dynamic")[turn // 3 % 2]
    compare(qkv, tables, block_mask=mask, layout=layout, scaling=scaling, target_arch=target_arch)


@pytest.mark.one_in(7)
@pytest.mark.parametrize("target_arch", [0, 80])
@pytest.mark.parametrize("queries", [1, 64, 65, 128, 129, 300])
@pytest.mark.parametrize("keys", [1, 64, 65, 128, 129, 192, 193, 400])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("mode", list(Mode))
def test_block_masks_of_few_tokens(mode: Mode, dim: int, keys: int, queries: int, target_arch: int) -> None:
    qkv = draw("gauss", 2, 4, 4, queries, keys, dim)
    mask = blocks(2, 4, queries, keys)
    compare(qkv, reference.tables_from_data(*qkv, mode), block_mask=mask, target_arch=target_arch)


@pytest.mark.parametrize("target_arch", [0, 80])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("mode", list(Mode))
def test_block_masks_and_key_lengths(mode: Mode, dim: int, shape: tuple[int, int], target_arch: int) -> None:
    """A row whose blocks lie behind the length sees nothing."""
    q, k, v = draw("k-bias", 2, 4, 2, 400, 600, dim)
    tables = reference.tables_from_data(q, k, v, mode)
    lengths = torch.tensor([333, 128], dtype=torch.int32, device="cuda")
    for b, length in enumerate(lengths.tolist()):
        k[b, :, length:] = v[b, :, length:] = torch.nan
    mask = blocks(*shape, 400, 600, density=0.3)
    mask[..., 1, :2], mask[..., 1, 3] = False, True
    _, lse = compare((q, k, v), tables, block_mask=mask, key_lengths=lengths, target_arch=target_arch)
    assert (lse == -torch.inf).any()


@pytest.mark.parametrize("dtype", [torch.bool, torch.float16])
@pytest.mark.parametrize("mode", list(Mode))
def test_block_masks_and_masks(mode: Mode, dtype: torch.dtype) -> None:
    qkv = draw("gauss", 2, 4, 2, 300, 500, 64)
    mask = torch.rand(2, 1, 300, 500, device="cuda") > 0.3
    if dtype != torch.bool:
        mask = torch.where(mask, torch.randn(mask.shape, device="cuda", dtype=dtype), -torch.inf)
    compare(qkv, reference.tables_from_data(*qkv, mode), mask=mask, block_mask=blocks(2, 4, 300, 500))


@pytest.mark.parametrize("target_arch", [0, 80])
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("mode", list(Mode))
def test_gathered_keys(mode: Mode, dim: int, target_arch: int) -> None:
    turn = DIMS.index(dim) + mode
    dtype, layout = (torch.float16, torch.bfloat16)[turn % 2], ("BHND", "BNHD")[turn // 2 % 2]
    keys, kept = ((700, 500), (300, 129), (200, 100), (100, 400))[turn % 4]  # the last names some twice
    qkv = draw("v-channels", 2, 4, 2, 300, keys, dim, dtype)
    tables = reference.tables_from_data(*qkv, mode)
    if layout == "BNHD":
        qkv = [x.transpose(1, 2).contiguous() for x in qkv]
    index = kept_rows(2, 2, keys, kept)
    scaling = ("calibrated", "dynamic")[turn // 3 % 2]
    compare(qkv, tables, key_index=index, layout=layout, scaling=scaling, target_arch=target_arch)


@pytest.mark.parametrize("target_arch", [0, 80])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("mode", list(Mode))
def test_gathered_keys_are_keys(mode: Mode, dim: int, target_arch: int) -> None:
    """Bit for bit what the same keys give when they are gathered before, with masks and lengths that count them."""
    q, k, v = draw("gauss", 2, 4, 2, 300, 900, dim)
    tables, timestep = reference.tables_from_data(q, k, v, mode), torch.full((2,), 500.0, device="cuda")
    index = kept_rows(2, 2, 900, 600)
    options = {
        "block_mask": blocks(1, 4, 300, 600),
        "key_lengths": torch.tensor([600, 450], dtype=torch.int32, device="cuda"),
        "scaling": "dynamic",
        "target_arch": target_arch,
        "return_lse": True,
    }
    got = kernel._run_cuda(q, k, v, timestep, tables, key_index=index, **options)
    expected = kernel._run_cuda(q, *reference.gather_keys(k, v, index), timestep, tables, **options)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("target_arch", [0, 80])
@pytest.mark.parametrize("mode", list(Mode))
def test_an_index_outside_the_keys_is_clamped(mode: Mode, target_arch: int) -> None:
    q, k, v = draw("gauss", 1, 2, 2, 200, 300, 64)
    tables, timestep = reference.tables_from_data(q, k, v, mode), torch.full((1,), 500.0, device="cuda")
    index = kept_rows(1, 2, 300, 200)
    index[..., ::7] = torch.tensor([-(2**31), -1, 300, 2**31 - 1], dtype=torch.int32, device="cuda").repeat(8)[:29]
    got, clamped = (
        kernel._run_cuda(q, k, v, timestep, tables, key_index=rows, target_arch=target_arch)
        for rows in (index, index.clamp(0, 299))
    )
    torch.testing.assert_close(got, clamped, rtol=0, atol=0)


@pytest.mark.one_in(7)
@pytest.mark.parametrize("target_arch", [0, 80])
@pytest.mark.parametrize("kind", ["gauss", "sharp", "k-bias"])
@pytest.mark.parametrize(("heads", "queries", "keys"), [(2, 64, 77), (2, 300, 1000), (3, 4096, 4096), (9, 1024, 1300)])
@pytest.mark.parametrize("dim", [40, 64, 128])
@pytest.mark.parametrize("mode", list(Mode))
def test_log_sum_exp(mode: Mode, dim: int, heads: int, queries: int, keys: int, kind: str, target_arch: int) -> None:
    """Of all keys: whole units, gathered ones, and those whose keys several thread blocks share."""
    qkv = draw(kind, 1, heads, heads, queries, keys, dim)
    compare(qkv, reference.tables_from_data(*qkv, mode), scaling="dynamic", target_arch=target_arch)


@pytest.mark.parametrize("mode", list(Mode))
def test_log_sum_exp_is_that_of_the_logits(mode: Mode) -> None:
    """Near that of exact attention, although the mean is taken from the keys before they are quantised."""
    q, k, v = draw("k-bias", 2, 4, 2, 500, 700, 64)
    tables, timestep = reference.tables_from_data(q, k, v, mode), torch.full((2,), 500.0, device="cuda")
    _, lse = kernel._run_cuda(q, k, v, timestep, tables, return_lse=True)
    logits = q.double() @ k.double().repeat_interleave(2, 1).transpose(2, 3) / 8
    assert (lse - logits.logsumexp(-1)).abs().max() < 0.15


@pytest.mark.parametrize("mode", list(Mode))
def test_outputs_for_disjoint_keys_are_merged(mode: Mode) -> None:
    q, k, v = draw("gauss", 2, 4, 4, 500, 1024, 64)
    tables, timestep = reference.tables_from_data(q, k, v, mode), torch.full((2,), 500.0, device="cuda")
    halves = [
        kernel.attention(q, k[:, :, part], v[:, :, part], timestep, tables, return_lse=True)
        for part in (slice(0, 384), slice(384, None))
    ]
    lse = torch.stack([half[1] for half in halves])
    weights = (lse - lse.logsumexp(0)).exp()
    merged = sum(weight[..., None] * half[0].float() for weight, half in zip(weights, halves, strict=True))
    whole = kernel.attention(q, k, v, timestep, tables)
    assert error(merged, whole.double()) < 2 * SAME_ARITHMETIC[mode]


@pytest.mark.one_in(7)
@pytest.mark.parametrize(("heads", "tokens"), [(20, 2000), (6, 9000)])
@pytest.mark.parametrize("density", [0.02, 0.3, 1.0])
@pytest.mark.parametrize("dim", [40, 64, 96, 128, 160])
@pytest.mark.parametrize("mode", [mode for mode in Mode if mode is not Mode.FP8])
def test_thread_blocks_go_from_row_to_row(mode: Mode, dim: int, density: float, heads: int, tokens: int) -> None:
    """More rows of blocks than thread blocks, of very different lengths: both kernels compute the same."""
    q, k, v = draw("gauss", 2, heads, heads, tokens, tokens, dim)
    tables, timestep = reference.tables_from_data(q, k, v, mode), torch.full((2,), 500.0, device="cuda")
    mask = blocks(2, heads, tokens, tokens, density)
    mask[:, :, 3] = True
    mask[:, 1, 5] = False
    runs = [
        kernel._run_cuda(q, k, v, timestep, tables, block_mask=mask, return_lse=True, target_arch=target)
        for target in (0, 0, 80)
    ]
    for a, b in zip(runs[0], runs[1], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)  # whoever took which row
    assert error(runs[0][0], runs[2][0].double()) < SAME_ARITHMETIC[mode]
    assert (runs[0][1] - runs[2][1]).nan_to_num(0).abs().max() < LSE[mode]


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("mode", list(Mode))
def test_all_blocks_are_no_mask(mode: Mode, dim: int) -> None:
    q, k, v = draw("gauss", 2, 4, 2, 1000, 900, dim)
    tables, timestep = reference.tables_from_data(q, k, v, mode), torch.full((2,), 500.0, device="cuda")
    every = torch.ones(1, 1, 8, 8, dtype=torch.bool, device="cuda")
    dense, all_blocks = (kernel.attention(q, k, v, timestep, tables, block_mask=mask) for mask in (None, every))
    assert error(all_blocks, dense.double()) < SAME_ARITHMETIC[mode]


def test_batch_elements_of_several_modes() -> None:
    qkv = draw("gauss", 5, 4, 2, 1000, 1000, 64)
    one = reference.tables_from_data(*qkv, Mode.FP16)
    tables = reference.AttentionTables(*(getattr(one, name).repeat_interleave(5, 0) for name in TABLES[:-1]), one.modes)
    tables = tables.with_modes(torch.tensor(list(Mode), dtype=torch.int32, device="cuda"))
    timestep = torch.arange(5, device="cuda") * 200.0 + 100
    compare(qkv, tables, timestep=timestep, block_mask=blocks(5, 4, 1000, 1000), scaling="dynamic")


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("dim", [64, 128])
def test_a_window_over_long_sequences(mode: Mode, dim: int) -> None:
    """131,072 tokens: rows at the ends and in the middle, each against the keys of its own blocks."""
    tokens, reach = 1 << 17, 2
    q, k, v = draw("gauss", 1, 2, 1, tokens, tokens, dim)
    tables, timestep = reference.tables_from_data(q, k, v, mode), torch.full((1,), 500.0, device="cuda")
    at = torch.arange(tokens // BLOCK, device="cuda")
    mask = ((at[:, None] - at).abs() <= reach)[None, None]
    out, lse = kernel.attention(q, k, v, timestep, tables, block_mask=mask, return_lse=True)
    for row in (0, 1, 511, 1022, 1023):
        first, last = max(row - reach, 0) * BLOCK, (min(row + reach, 1023) + 1) * BLOCK
        queries = slice(row * BLOCK, (row + 1) * BLOCK)
        expected, expected_lse = reference.attention(
            *(x.double() for x in (q[:, :, queries], k[:, :, first:last], v[:, :, first:last])), timestep,
            computed_as((q, k, v), tables), compute_dtype=torch.float64, return_lse=True,
        )  # fmt: skip
        assert error(out[:, :, queries], expected) <= SAME_ARITHMETIC[mode]
        assert (lse[:, :, queries] - expected_lse).abs().max() <= LSE[mode]


@pytest.mark.parametrize("mode", list(Mode))
def test_a_cuda_graph_follows_mask_and_index(mode: Mode) -> None:
    q, k, v = draw("gauss", 2, 4, 2, 600, 900, 64)
    tables, timestep = reference.tables_from_data(q, k, v, mode), torch.full((2,), 500.0, device="cuda")
    mask, index = blocks(2, 1, 600, 700), kept_rows(2, 2, 900, 700)

    def run() -> tuple[Tensor, Tensor]:
        return kernel.attention(q, k, v, timestep, tables, block_mask=mask, key_index=index, return_lse=True)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    mask.copy_(~mask | (torch.arange(6, device="cuda") == 0))
    index.copy_(index.flip(-1))
    graph.replay()
    for a, b in zip(captured, run(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("layout", ["BHND", "BNHD"])
def test_opcheck(layout: str) -> None:
    q, k, v = draw("gauss", 2, 4, 2, 300, 400, 64)
    tables = reference.tables_from_data(q, k, v, Mode.BALANCED)
    qkv = [(x if layout == "BHND" else x.transpose(1, 2).contiguous()).requires_grad_() for x in (q, k, v)]
    rest = (torch.zeros(2, device="cuda"), *(getattr(tables, name) for name in TABLES), None, None, layout)
    sparse = {"block_mask": blocks(1, 4, 300, 200), "key_index": kept_rows(2, 2, 400, 200)}
    for op in (torch.ops.trtconvert.int8_attention, torch.ops.trtconvert.int8_attention_lse):
        torch.library.opcheck(op.default, (*qkv, *rest), sparse)


def test_a_mask_without_blocks_is_zeros() -> None:
    q, k, v = draw("gauss", 2, 4, 2, 300, 400, 64)
    tables, timestep = reference.tables_from_data(q, k, v, Mode.PRECISION), torch.full((2,), 500.0, device="cuda")
    none = torch.zeros(1, 1, 3, 4, dtype=torch.bool, device="cuda")
    out, lse = kernel.attention(q, k, v, timestep, tables, block_mask=none, return_lse=True)
    assert not out.any() and (lse == -torch.inf).all()
