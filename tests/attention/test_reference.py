"""The torch reference: against plain attention and closed forms, and its refusal of invalid tables."""

import math

import pytest
import tolerances
import torch
from torch.nn.functional import scaled_dot_product_attention

from trtconvert.attention.modes import Mode
from trtconvert.attention.pruning import key_importance, needed_blocks
from trtconvert.attention.reference import (
    FP8_TOP,
    TILE,
    AttentionTables,
    attention,
    expand_blocks,
    gather_keys,
    tables_from_data,
    timestep_bin,
)
from trtconvert.models.recorded_calls import relative_error as error


def tensors(heads=4, kv_heads=2, queries=33, keys=200, dim=40, batch=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((heads, queries), (kv_heads, keys), (kv_heads, keys))
    q, k, v = (torch.randn(batch, h, n, dim, generator=generator) for h, n in shapes)
    return q, k + 2 * torch.randn(1, kv_heads, 1, dim, generator=generator), v + 0.5


def exact(q, k, v, mask=None):
    return scaled_dot_product_attention(q.double(), k.double(), v.double(), mask, enable_gqa=True)


ZERO = torch.zeros(2)

MODE_ERROR = tolerances.MODE_ERROR | {Mode.FP8: 0.06}
"""FP8 rounds weights and values by up to 2**-4: relative errors of 0.041 at 2,048 keys, 0.049 with 200 keys and a sink."""


def sink(q, k, v):
    """The same with an attention sink as in trained models: all queries attend to the first key, whose value is small."""
    direction = torch.nn.functional.normalize(
        torch.randn(q.shape[-1], generator=torch.Generator().manual_seed(1)), dim=0
    )
    k, v = k.clone(), v.clone()
    k[:, :, 0], v[:, :, 0] = 2.2 * q.shape[-1] ** 0.5 * direction, 0.05 * v[:, :, 0]
    return q + 4 * direction, k, v


@pytest.mark.parametrize("scaling", ["calibrated", "dynamic"])
@pytest.mark.parametrize("mode", list(Mode))
def test_each_mode_is_close_to_exact_attention(mode, scaling):
    q, k, v = tensors()
    out = attention(q, k, v, ZERO, tables_from_data(q, k, v, mode), scaling=scaling)
    assert error(out, exact(q, k, v)) < MODE_ERROR[mode]


@pytest.mark.parametrize("mode", list(Mode))
def test_single_precision_computes_what_double_does(mode):
    q, k, v = tensors()
    tables = tables_from_data(q, k, v, mode)
    wide = attention(*(x.double() for x in (q, k, v)), ZERO, tables, compute_dtype=torch.float64)
    assert error(attention(q, k, v, ZERO, tables), wide) < tolerances.SAME_ARITHMETIC


@pytest.mark.parametrize("mode", list(Mode))
def test_autocast_changes_nothing(mode):
    q, k, v = tensors()
    tables = tables_from_data(q, k, v, mode)
    with torch.autocast("cpu", torch.bfloat16):
        out = attention(q, k, v, ZERO, tables)
        importance, blocks = key_importance(q, k), needed_blocks(q, k, [0.1], 0.2)
    assert torch.equal(out, attention(q, k, v, ZERO, tables))
    assert torch.equal(importance, key_importance(q, k)) and torch.equal(blocks, needed_blocks(q, k, [0.1], 0.2))


def test_quantised_products_match_a_loop_over_tiles():
    """One head and one query in Python integers, as DESIGN's table defines modes 2 and 3."""
    q, k, v = tensors(heads=1, kv_heads=1, queries=1, keys=TILE + 30, dim=32, batch=1)
    for mode in (Mode.BALANCED, Mode.AGGRESSIVE):
        tables = tables_from_data(q, k, v, mode)
        sq, sk = float(tables.q_scale), float(tables.k_scale)
        q8 = [max(-127, min(127, round(x / sq))) for x in q[0, 0, 0].tolist()]
        keys = ((k[0, 0] - tables.k_offset[0, 0]) / sk).round().clamp(-127, 127).int().tolist()
        values = ((v[0, 0] - tables.v_offset[0, 0]) / tables.v_scale[0, 0]).tolist()
        logits = [sum(a * b for a, b in zip(q8, key, strict=True)) * sq * sk / math.sqrt(32) for key in keys]
        token = [max(abs(x) for x in row) / 127 if mode == Mode.BALANCED else 1.0 for row in values]
        w = [z + math.log(s) for z, s in zip(logits, token, strict=True)]
        top = max(w)
        total, rounded_sum = [0.0] * 32, 0.0
        for start in range(0, len(w), TILE):
            tile = range(start, min(start + TILE, len(w)))
            peak = max(w[j] for j in tile)
            weights = {j: round(255 * math.exp(w[j] - peak)) for j in tile}
            rounded_sum += math.exp(peak - top) * sum(weights.values())
            for d in range(32):
                integer = sum(weights[j] * max(-127, min(127, round(values[j][d] / token[j]))) for j in tile)
                total[d] += math.exp(peak - top) * integer
        exact_sum = 255 * sum(math.exp(x - top) / s for x, s in zip(w, token, strict=True))
        row_sum = rounded_sum if mode == Mode.AGGRESSIVE else exact_sum
        expected = torch.tensor(total) / row_sum * tables.v_scale[0, 0] + tables.v_offset[0, 0]
        assert error(attention(q, k, v, ZERO[:1], tables)[0, 0, 0], expected) < tolerances.SAME_ARITHMETIC


def e4m3(x):
    """Rounds to E4M3, ties to even, by its definition: 3 bits of fraction, least exponent -6, at most 448."""
    step = 2.0 ** (max(math.frexp(x)[1] - 1, -6) - 3) if x else 1.0
    return max(-448.0, min(448.0, round(x / step) * step))


@pytest.mark.parametrize("compute_dtype", [torch.float32, torch.float64])
def test_fp8_products_match_a_loop_over_keys(compute_dtype):
    """One head, one query, and logits with a spread that makes some weights subnormal and some zero."""
    q, k, v = tensors(heads=1, kv_heads=1, queries=1, keys=TILE + 30, dim=32, batch=1)
    q = 5 * q
    tables = tables_from_data(q, k, v, Mode.FP8)
    sq, sk = float(tables.q_scale), float(tables.k_scale)
    q8 = [max(-127, min(127, round(x / sq))) for x in q[0, 0, 0].tolist()]
    keys = ((k[0, 0] - tables.k_offset[0, 0]) / sk).round().clamp(-127, 127).int().tolist()
    values = ((v[0, 0].double() - tables.v_offset[0, 0]) / tables.v_scale[0, 0]).tolist()
    logits = [sum(a * b for a, b in zip(q8, key, strict=True)) * sq * sk / math.sqrt(32) for key in keys]
    reference = math.ceil(max(logits) / math.log(2)) - 5
    lifted = [2.0 ** (z / math.log(2) - reference) for z in logits]
    assert 16 < max(lifted) <= 32 and any(w < 2**-6 for w in lifted) and any(e4m3(w) == 0 for w in lifted)
    weights = [e4m3(w) for w in lifted]
    total = [sum(w * e4m3(x[d]) for w, x in zip(weights, values, strict=True)) for d in range(32)]
    expected = torch.tensor(total) / sum(weights) * tables.v_scale[0, 0] + tables.v_offset[0, 0]
    out = attention(q, k, v, ZERO[:1], tables, compute_dtype=compute_dtype)[0, 0, 0]
    assert error(out, expected) < tolerances.SAME_ARITHMETIC


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("make", [lambda *qkv: qkv, sink], ids=["normal", "sink"])
def test_a_mode_is_as_far_from_exact_attention_with_a_sink_as_without(make, mode):
    generator = torch.Generator().manual_seed(0)
    q, k, v = make(*(torch.randn(1, 4, 1024, 64, generator=generator) for _ in "qkv"))
    out = attention(q, k, v, ZERO[:1], tables_from_data(q, k, v, mode))
    assert error(out, exact(q, k, v)) < MODE_ERROR[mode]


def test_aggressive_gives_scales_to_the_tokens_of_tiles_with_a_small_token():
    q, k, v = (torch.randn(1, 2, 256, 64, generator=torch.Generator().manual_seed(seed)) for seed in range(3))
    of_whole = tables_from_data(q, k, v, Mode.AGGRESSIVE)
    small = v.clone()
    small[:, 1, 3] = 15 * of_whole.v_scale[:, 1]
    large = v.clone()
    large[:, 1, 3] = 17 * of_whole.v_scale[:, 1]
    own_block = torch.eye(2, dtype=torch.bool)[None, None]  # each tile alone

    def of(v, mode):
        return attention(q, k, v, ZERO[:1], of_whole.with_modes(mode), block_mask=own_block)

    found, balanced, whole = of(small, Mode.AGGRESSIVE), of(small, Mode.BALANCED), of(v, Mode.AGGRESSIVE)
    assert torch.equal(found[:, 1, :128], balanced[:, 1, :128])
    assert torch.equal(found[:, 0], whole[:, 0]) and torch.equal(found[:, 1, 128:], whole[:, 1, 128:])
    assert not torch.equal(of(large, Mode.AGGRESSIVE)[:, 1, :128], of(large, Mode.BALANCED)[:, 1, :128])


@pytest.mark.parametrize("keys", [77, 1024])
def test_a_sink_among_values_with_offsets_keeps_its_precision(keys):
    """A sink's value is small, and far from the offsets of the other values' channels."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = sink(*(torch.randn(1, 4, n, 64, generator=generator) for n in (512, keys, keys)))
    offsets = torch.randn(1, 4, 1, 64, generator=generator)
    v = torch.where((torch.arange(keys) == 0)[:, None], v, v + offsets)
    out = attention(q, k, v, ZERO[:1], tables_from_data(q, k, v, Mode.AGGRESSIVE))
    assert error(out, exact(q, k, v)) < 0.05


def test_a_token_beyond_the_length_is_no_small_token():
    q, k, v = (torch.randn(1, 2, 128, 64, generator=torch.Generator().manual_seed(seed)) for seed in range(3))
    tables, lengths = tables_from_data(q, k, v, Mode.AGGRESSIVE), torch.tensor([100])
    whole = attention(q, k, v, ZERO[:1], tables, key_lengths=lengths)
    v[:, :, 110] = 0
    assert torch.equal(attention(q, k, v, ZERO[:1], tables, key_lengths=lengths), whole)


@pytest.mark.parametrize("octaves", [-40, -1, 3, 100])
def test_whole_octaves_between_rows_change_nothing_in_fp8(octaves):
    """A constant added to a row's logits changes nothing; whole octaves, as FP8's references differ by octaves."""
    q, k, v = (x.double() for x in tensors())
    tables = tables_from_data(q, k, v, Mode.FP8)
    shift = torch.zeros(1, 1, 33, 1, dtype=torch.float64)
    shift[:, :, ::2] = octaves * math.log(2)
    out, moved = (attention(q, k, v, ZERO, tables, mask=mask, compute_dtype=torch.float64) for mask in (None, shift))
    assert error(moved, out) < 1e-6


def test_fp8_saturates_at_448_steps_of_the_calibrated_scale():
    q, k, v = tensors()
    tables = tables_from_data(q, k, v, Mode.FP8)
    top = tables.v_offset[0] + FP8_TOP * tables.v_scale[0]
    capped, beyond = v.clone(), v.clone()
    capped[:, :, 7], beyond[:, :, 7] = top, top + 1000 * tables.v_scale[0]
    out = attention(q, k, beyond, ZERO, tables)
    assert error(out, attention(q, k, capped, ZERO, tables)) < tolerances.SAME_ARITHMETIC
    beyond[:, :, 7] = math.nan  # although NaN is not large
    assert attention(q, k, beyond, ZERO, tables).isnan().all()


def test_modes_follow_each_elements_timestep():
    q, k, v = tensors(batch=5)
    per_mode = [tables_from_data(q, k, v, mode) for mode in Mode]
    names = ("q_scale", "k_scale", "v_scale", "k_offset", "v_offset", "modes")
    table = AttentionTables(*(torch.cat([getattr(t, name) for t in per_mode]) for name in names))
    together = attention(q, k, v, torch.tensor([999.0, 10.0, 500.0, 300.0, 700.0]), table)
    for row, mode in enumerate((4, 0, 2, 1, 3)):
        alone = attention(q, k, v, torch.zeros(5), per_mode[mode])
        assert torch.equal(together[row], alone[row])


@pytest.mark.parametrize(
    ("timestep", "expected"),
    [
        (-5.0, 0),
        (0.0, 0),
        (99.999, 0),
        (100.0, 1),
        (300.0, 3),
        (700.0, 7),
        (999.0, 9),
        (1000.0, 9),
        (math.inf, 9),
        (math.nan, 0),
    ],
)
def test_bins_are_exact_at_their_edges(timestep, expected):
    assert timestep_bin(torch.tensor([timestep]), 1000.0, 10).item() == expected


def test_a_constant_added_to_keys_changes_nothing_when_smoothed():
    q, k, v = tensors()
    tables = tables_from_data(q, k, v, Mode.BALANCED)
    shift = torch.full_like(tables.k_offset, 7.0)
    moved = AttentionTables(**{**vars(tables), "k_offset": tables.k_offset + shift})
    shifted = attention(q, k + 7.0, v, ZERO, moved)
    assert error(shifted, attention(q, k, v, ZERO, tables)) < tolerances.ROUNDED_SHIFT


@pytest.mark.parametrize("mode", list(Mode))
def test_layouts_agree(mode):
    q, k, v = tensors()
    tables = tables_from_data(q, k, v, mode)
    tokens_first = attention(*(x.transpose(1, 2) for x in (q, k, v)), ZERO, tables, layout="BNHD")
    assert torch.equal(tokens_first.transpose(1, 2), attention(q, k, v, ZERO, tables))


@pytest.mark.parametrize("mode", list(Mode))
def test_masks_hide_and_a_row_that_sees_nothing_is_zero(mode):
    q, k, v = tensors()
    mask = torch.rand(2, 1, 33, 200, generator=torch.Generator().manual_seed(1)) < 0.5
    mask[0, :, 4] = False
    tables = tables_from_data(q, k, v, mode)
    out = attention(q, k, v, ZERO, tables, mask=mask)
    additive = torch.zeros(mask.shape).masked_fill(~mask, -math.inf)
    assert torch.equal(out, attention(q, k, v, ZERO, tables, mask=additive))
    assert not out[0, :, 4].any()
    seen = torch.ones(33, dtype=torch.bool)
    seen[4] = False
    assert error(out[:, :, seen], exact(q, k, v, mask)[:, :, seen]) < MODE_ERROR[mode]


@pytest.mark.parametrize("scaling", ["calibrated", "dynamic"])
@pytest.mark.parametrize("mode", list(Mode))
def test_keys_beyond_the_length_do_not_exist(mode, scaling):
    q, k, v = tensors()
    tables = tables_from_data(q[:, :, :], k[:, :, :150], v[:, :, :150], mode)
    poisoned_k, poisoned_v = k.clone(), v.clone()
    poisoned_k[:, :, 150:], poisoned_v[:, :, 150:] = math.nan, math.inf
    lengths = torch.tensor([150, 150])
    out = attention(q, poisoned_k, poisoned_v, ZERO, tables, scaling=scaling, key_lengths=lengths)
    short = attention(q, k[:, :, :150], v[:, :, :150], ZERO, tables, scaling=scaling)
    assert error(out, short) < tolerances.SAME_ARITHMETIC


@pytest.mark.parametrize(
    ("name", "value"), [("q_scale", 0.0), ("k_scale", -1.0), ("v_scale", math.nan), ("k_offset", math.inf)]
)
@pytest.mark.parametrize("mode", [Mode.AGGRESSIVE, Mode.FP8])
def test_unusable_tables_poison_their_head_alone(name, value, mode):
    q, k, v = tensors(kv_heads=4)
    tables = tables_from_data(q, k, v, mode)
    getattr(tables, name)[0, 2] = value
    out = attention(q, k, v, ZERO, tables)
    assert out[:, 2].isnan().all()
    assert out[:, [0, 1, 3]].isfinite().all()


def test_a_table_that_the_mode_does_not_read_may_hold_anything():
    q, k, v = tensors()
    tables = tables_from_data(q, k, v, Mode.BALANCED)
    tables.q_scale[:], tables.k_scale[:] = math.nan, -1.0
    assert attention(q, k, v, ZERO, tables, scaling="dynamic").isfinite().all()
    fp8 = tables.with_modes(Mode.FP8)
    assert attention(q, k, v, ZERO, fp8, scaling="dynamic").isfinite().all()
    assert attention(q, k, v, ZERO, fp8).isnan().all()
    assert attention(q, k, v, ZERO, tables.with_modes(Mode.AGGRESSIVE), scaling="dynamic").isnan().all()


def test_unusable_timesteps_and_modes_give_nan():
    q, k, v = tensors()
    tables = tables_from_data(q, k, v, Mode.BALANCED)
    out = attention(q, k, v, torch.tensor([math.nan, 0.0]), tables)
    assert out[0].isnan().all() and out[1].isfinite().all()
    assert attention(q, k, v, ZERO, tables.with_modes(torch.tensor([len(Mode)]))).isnan().all()
    assert attention(q, k, v, ZERO, tables.with_modes(torch.tensor([-1]))).isnan().all()


def test_a_channel_of_zeros_stays_zero():
    q, k, v = tensors()
    v[..., 3] = 0
    for mode in Mode:
        out = attention(q, k, v, ZERO, tables_from_data(q, k, v, mode))
        assert out.isfinite().all()
        assert out[..., 3].abs().max() < 1e-9


@pytest.mark.parametrize("mode", list(Mode))
def test_blocks_hide_whole_tiles(mode):
    """Each row of blocks equals attention to the keys of its blocks only."""
    q, k, v = tensors(queries=300, keys=300)
    tables = tables_from_data(q, k, v, mode)
    blocks = torch.tensor([[1, 0, 1], [0, 1, 0], [1, 1, 1]], dtype=torch.bool)
    out, lse = attention(q, k, v, ZERO, tables, block_mask=blocks[None, None], scaling="dynamic", return_lse=True)
    for row, kept in enumerate(blocks):
        queries = slice(row * TILE, (row + 1) * TILE)
        keys = expand_blocks(kept[None], 1, 300)[0]
        alone, lse_alone = attention(
            q[:, :, queries], k[:, :, keys], v[:, :, keys], ZERO, tables, scaling="dynamic", return_lse=True
        )
        assert error(out[:, :, queries], alone) < tolerances.SAME_ARITHMETIC
        torch.testing.assert_close(lse[:, :, queries], lse_alone, rtol=1e-5, atol=1e-4)


def test_heads_and_elements_have_blocks_of_their_own_or_share_them():
    q, k, v = tensors(queries=200, keys=300)
    tables = tables_from_data(q, k, v, Mode.FP16)
    generator = torch.Generator().manual_seed(0)
    for batch, heads in ((1, 1), (2, 1), (1, 4), (2, 4)):
        blocks = torch.rand(batch, heads, 2, 3, generator=generator) > 0.5
        blocks[..., 1] = True
        out = attention(q, k, v, ZERO, tables, block_mask=blocks)
        assert error(out, exact(q, k, v, expand_blocks(blocks, 200, 300))) < 1e-5


@pytest.mark.parametrize("layout", ["BHND", "BNHD"])
@pytest.mark.parametrize("mode", list(Mode))
def test_gathered_keys_are_the_keys(mode, layout):
    """Lengths, masks and tiles count the indexed rows."""
    q, k, v = tensors(keys=300)
    tables, lengths = tables_from_data(q, k, v, mode), torch.tensor([180, 100])
    index = torch.randint(300, (2, 2, 180), generator=torch.Generator().manual_seed(0)).int()
    options = {
        "key_lengths": lengths,
        "scaling": "dynamic",
        "mask": (torch.arange(180) % 7 != 0).expand(33, -1),
        "layout": layout,
    }
    few = gather_keys(k, v, index)
    whole, few = ([x if layout == "BHND" else x.transpose(1, 2) for x in (q, *kv)] for kv in ((k, v), few))
    torch.testing.assert_close(
        attention(*whole, ZERO, tables, key_index=index, **options), attention(*few, ZERO, tables, **options)
    )


@pytest.mark.parametrize("mode", list(Mode))
def test_a_mask_of_keys_leaves_keys_out(mode):
    q, k, v = tensors(keys=300)
    tables = tables_from_data(q, k, v, mode)
    visible = torch.rand(2, 1, 1, 300, generator=torch.Generator().manual_seed(0)) > 0.4
    lengths = torch.tensor([300, 200])
    rows = [visible[b, 0, 0, : lengths[b]].nonzero()[:, 0] for b in range(2)]
    for b in range(2):
        k[b, :, ~visible[b, 0, 0]] = torch.nan
    options = {"scaling": "dynamic", "return_lse": True}
    out, lse = attention(q, k, v, ZERO, tables, mask=visible, key_lengths=lengths, **options)
    for b in range(2):
        alone = (q[b : b + 1], k[b : b + 1, :, rows[b]], v[b : b + 1, :, rows[b]])
        expected, expected_lse = attention(*alone, ZERO[b : b + 1], tables, **options)
        torch.testing.assert_close((out[b : b + 1], lse[b : b + 1]), (expected, expected_lse))


@pytest.mark.parametrize("smooth_k", [True, False])
@pytest.mark.parametrize("mode", list(Mode))
def test_the_log_sum_exp_is_that_of_the_scaled_logits(mode, smooth_k):
    q, k, v = tensors()
    if not smooth_k:
        k = k - k.mean((0, 2), keepdim=True)
    _, lse = attention(q, k, v, ZERO, tables_from_data(q, k, v, mode), smooth_k=smooth_k, return_lse=True)
    logits = q @ k.repeat_interleave(2, 1).transpose(2, 3) * 40**-0.5
    assert lse.shape == (2, 4, 33) and lse.dtype == torch.float32
    torch.testing.assert_close(lse, logits.logsumexp(-1), rtol=0, atol=1e-5 if mode == Mode.FP16 else 0.05)


@pytest.mark.parametrize("mode", list(Mode))
def test_outputs_for_disjoint_keys_merge(mode):
    q, k, v = tensors(keys=3 * TILE)
    tables = tables_from_data(q, k, v, mode)
    parts = [
        attention(q, k[:, :, keys], v[:, :, keys], ZERO, tables, return_lse=True)
        for keys in (slice(0, TILE), slice(TILE, None))
    ]
    lse = torch.stack([part_lse for _, part_lse in parts])
    merged = sum(((part_lse - lse.logsumexp(0)).exp()[..., None] * out for out, part_lse in parts), torch.zeros(()))
    assert (
        error(merged, attention(q, k, v, ZERO, tables)) < 2e-3
    )  # modes 2 and 3 merge tiles in the same way; FP8 rounds elsewhere


def test_rows_that_see_nothing_have_no_sum():
    q, k, v = tensors(queries=200, keys=300)
    tables = tables_from_data(q, k, v, Mode.BALANCED)
    blocks = torch.tensor([[True, False, False], [False, False, True]])
    lengths = torch.tensor([300, 100])
    out, lse = attention(q, k, v, ZERO, tables, block_mask=blocks[None, None], key_lengths=lengths, return_lse=True)
    assert lse[0].isfinite().all() and lse[1, :, :TILE].isfinite().all()
    assert (lse[1, :, TILE:] == -math.inf).all() and not out[1, :, TILE:].any()


def test_a_timestep_that_is_nan_gives_no_sum():
    q, k, v = tensors()
    _, lse = attention(
        q, k, v, torch.tensor([0.0, math.nan]), tables_from_data(q, k, v, Mode.AGGRESSIVE), return_lse=True
    )
    assert lse[0].isfinite().all() and lse[1].isnan().all()
