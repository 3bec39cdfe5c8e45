"""NaN and ±Inf in attention's inputs: which results they affect, and that all others stay bit-identical."""

import math
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from trtconvert.attention import Int8Attention, compute_adaptive_scales, int4_attention
from trtconvert.attention.kernel import int8_attention
from trtconvert.attention.measured import measured_tables
from trtconvert.attention.modes import INT8_VALUES, Mode
from trtconvert.attention.pruning import block_mask_of_data, key_importance, needed_blocks
from trtconvert.attention.reference import attention, tables_from_data
from trtconvert.attention.schedules import NoiseSchedule, compute_sigma_schedule, sigma_rule_modes
from trtconvert.errors import UserError

NAN, INF = math.nan, math.inf
BROKEN = (NAN, INF, -INF)
MODES = list(Mode)
TIMESTEP = torch.zeros(1)
BATCH, HEADS, KV_HEADS, QUERIES, KEYS, DIM = 1, 4, 2, 150, 300, 32
GROUP = slice(2, 4)
"""Query heads that share the second key head."""


def tensors(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    shapes = ((HEADS, QUERIES), (KV_HEADS, KEYS), (KV_HEADS, KEYS))
    return [torch.randn(BATCH, heads, tokens, DIM, generator=generator).to(dtype) for heads, tokens in shapes]


def struck(x, place, value):
    changed = x.clone()
    changed[place] = value
    return changed


def compare(broken, whole, reached):
    """Exactly the results in `mask` are not finite; the others equal those without the fault, bit by bit."""
    assert torch.equal(~broken.isfinite(), reached.expand_as(broken))
    assert torch.equal(broken[~reached.expand_as(broken)], whole[~reached.expand_as(broken)])


def nothing():
    return torch.zeros(BATCH, HEADS, QUERIES, DIM, dtype=torch.bool)


@pytest.mark.parametrize("scaling", ["calibrated", "dynamic"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("value", BROKEN)
def test_a_query_is_its_row(value, mode, scaling):
    q, k, v = tensors()
    tables = tables_from_data(q, k, v, mode)
    whole = attention(q, k, v, TIMESTEP, tables, scaling=scaling)
    reached = nothing()
    reached[0, 3, 7] = True
    compare(attention(struck(q, (0, 3, 7, 5), value), k, v, TIMESTEP, tables, scaling=scaling), whole, reached)


@pytest.mark.parametrize("scaling", ["calibrated", "dynamic"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("value", BROKEN)
def test_a_key_is_all_rows_of_its_heads(value, mode, scaling):
    q, k, v = tensors()
    tables = tables_from_data(q, k, v, mode)
    whole = attention(q, k, v, TIMESTEP, tables, scaling=scaling)
    reached = nothing()
    reached[:, GROUP] = True
    compare(attention(q, struck(k, (0, 1, 200, 5), value), v, TIMESTEP, tables, scaling=scaling), whole, reached)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("value", BROKEN)
def test_a_value_is_its_channel_or_with_scales_of_tokens_all_channels(value, mode):
    q, k, v = tensors()
    tables = tables_from_data(q, k, v, mode)
    whole = attention(q, k, v, TIMESTEP, tables)
    reached = nothing()
    reached[:, GROUP, :, slice(None) if mode in INT8_VALUES else 5] = True
    compare(attention(q, k, struck(v, (0, 1, 200, 5), value), TIMESTEP, tables), whole, reached)


@pytest.mark.parametrize("mode", MODES)
def test_a_broken_key_that_a_mask_hides_counts_as_in_torch(mode):
    q, k, v = tensors()
    tables = tables_from_data(q, k, v, mode)
    visible = torch.ones(QUERIES, KEYS, dtype=torch.bool)
    visible[:, 200], visible[3] = False, False
    for mask in (visible, torch.zeros(QUERIES, KEYS).masked_fill(~visible, -INF)):
        assert (attention(q, k, v, TIMESTEP, tables, mask=mask)[:, :, 3] == 0).all()
        broken = struck(k, (0, 1, 200, 5), NAN)
        out = attention(q, broken, v, TIMESTEP, tables, mask=mask)
        exact = scaled_dot_product_attention(q, broken, v, mask, enable_gqa=True)
        assert out[:, GROUP].isnan().all() and out[:, :2].isfinite().all()
        assert exact[:, GROUP].isnan().all()
        broken = struck(v, (0, 1, 200, 5), NAN)
        out = attention(q, k, broken, TIMESTEP, tables, mask=mask)
        exact = scaled_dot_product_attention(q, k, broken, mask, enable_gqa=True)
        assert exact[:, GROUP, :, 5].isnan().all() and out[:, GROUP, :, 5].isnan().all()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("value", [NAN, INF])
def test_an_additive_mask_is_its_row(value, mode):
    q, k, v = tensors()
    tables = tables_from_data(q, k, v, mode)
    mask = torch.randn(QUERIES, KEYS, generator=torch.Generator().manual_seed(1))
    mask[:, 10:20] = -INF
    whole = attention(q, k, v, TIMESTEP, tables, mask=mask)
    reached = nothing()
    reached[:, :, 9] = True
    compare(attention(q, k, v, TIMESTEP, tables, mask=struck(mask, (9, 250), value)), whole, reached)


@pytest.mark.parametrize("mode", MODES)
def test_keys_that_do_not_exist_and_blocks_that_are_left_out_count_for_nothing(mode):
    q, k, v = tensors()
    tables = tables_from_data(q, k, v, mode)
    broken_k, broken_v = (struck(x, (0, slice(None), slice(260, None)), NAN) for x in (k, v))
    lengths = torch.tensor([260], dtype=torch.int32)
    compare(
        attention(q, broken_k, broken_v, TIMESTEP, tables, key_lengths=lengths, scaling="dynamic"),
        attention(q, k, v, TIMESTEP, tables, key_lengths=lengths, scaling="dynamic"),
        nothing(),
    )
    index = torch.randperm(260, generator=torch.Generator().manual_seed(2))[:200].int().expand(BATCH, KV_HEADS, -1)
    compare(
        attention(q, broken_k, broken_v, TIMESTEP, tables, key_index=index),
        attention(q, k, v, TIMESTEP, tables, key_index=index),
        nothing(),
    )
    blocks = torch.tensor(
        [[[[True, True, False], [True, False, True]]]]
    )  # only the last queries attend to the last keys
    whole = attention(q, k, v, TIMESTEP, tables, block_mask=blocks, scaling="dynamic")
    reached = nothing()
    reached[:, GROUP, 128:] = True
    broken = struck(k, (0, 1, 290, 5), NAN)
    compare(attention(q, broken, v, TIMESTEP, tables, block_mask=blocks, scaling="dynamic"), whole, reached)
    reached = nothing()
    reached[:, GROUP, 128:, slice(None) if mode in INT8_VALUES else 5] = True
    broken = struck(v, (0, 1, 290, 5), NAN)
    compare(attention(q, k, broken, TIMESTEP, tables, block_mask=blocks, scaling="dynamic"), whole, reached)


@pytest.mark.parametrize("mode", MODES)
def test_the_log_sum_exp_is_nan_where_the_weights_are(mode):
    q, k, v = tensors()
    tables = tables_from_data(q, k, v, mode)
    _, lse = attention(struck(q, (0, 3, 7, 5), INF), k, v, TIMESTEP, tables, return_lse=True)
    assert lse.isnan().nonzero().tolist() == [[0, 3, 7]]
    _, lse = attention(q, struck(k, (0, 1, 200, 5), INF), v, TIMESTEP, tables, return_lse=True)
    assert lse[:, GROUP].isnan().all() and lse[:, :2].isfinite().all()


@pytest.mark.parametrize("table", ["q_scale", "k_scale", "v_scale", "k_offset", "v_offset"])
@pytest.mark.parametrize("value", BROKEN)
def test_tables_of_no_use_are_nan(table, value):
    """In the modes that use the scales."""
    q, k, v = tensors()
    tables = tables_from_data(q, k, v, Mode.AGGRESSIVE)
    getattr(tables, table)[0, 1] = value
    out = attention(q, k, v, TIMESTEP, tables)
    heads = [1] if table == "q_scale" else [2, 3]
    assert out.isnan().all(-1).all(-1)[0].nonzero().flatten().tolist() == heads
    assert out[:, [h for h in range(HEADS) if h not in heads]].isfinite().all()


@pytest.mark.parametrize("mode", ["fp16", "precision", "balanced", "aggressive", "fp8", "auto"])
@pytest.mark.parametrize("value", BROKEN)
def test_a_module_with_measured_scales(mode, value):
    """A broken query does not affect the others: measured scales exclude it."""
    q, k, v = tensors()
    module = Int8Attention(HEADS, DIM, num_kv_heads=KV_HEADS, precision_mode=mode)
    whole = module(q, k, v, 900)
    reached = nothing()
    reached[0, 3, 7] = True
    # A query of average size, which is not the largest.
    compare(module(struck(q, (0, 3, 7, 5), value), k, v, 900), whole, reached)
    assert not module(q, struck(k, (0, 1, 200, 5), value), v, 900)[:, GROUP].isfinite().any()
    assert not module(q, k, struck(v, (0, 1, 200, 5), value), 900)[:, GROUP, :, 5].isfinite().any()


def test_queries_without_a_finite_one_have_a_scale():
    q, k, v = tensors()
    q[:, 1] = NAN
    tables = measured_tables(q, k, v, torch.tensor([int(Mode.AGGRESSIVE)]), {Mode.AGGRESSIVE})
    assert tables.q_scale.isfinite().all() and (tables.q_scale > 0).all()


@pytest.mark.parametrize("mask", [None, "boolean", "blocks", "lengths"])
@pytest.mark.parametrize("value", BROKEN)
def test_gradients_that_depend_on_it_are_nan(value, mask):
    options = {
        None: {},
        "boolean": {"mask": torch.rand(QUERIES, KEYS, generator=torch.Generator().manual_seed(3)) > 0.3},
        "blocks": {"block_mask": torch.ones(1, 1, 2, 3, dtype=torch.bool)},
        "lengths": {"key_lengths": torch.tensor([290], dtype=torch.int32)},
    }[mask]

    def gradients(*given):
        leaves = [x.clone().requires_grad_() for x in given]
        tables = vars(tables_from_data(*tensors(), Mode.PRECISION))
        out = int8_attention(*leaves, TIMESTEP, **tables, **options)
        return torch.autograd.grad(out.sum(), leaves)

    q, k, v = tensors()
    whole = gradients(q, k, v)
    exists = slice(290 if mask == "lengths" else None)
    of_q, of_k, of_v = gradients(struck(q, (0, 3, 7, 5), value), k, v)
    assert of_q[0, 3, 7].isnan().all() and of_k[:, 1, exists].isnan().all() and of_v[:, 1, exists].isnan().all()
    rows = torch.ones(HEADS, QUERIES, dtype=torch.bool).index_put(
        (torch.tensor(3), torch.tensor(7)), torch.tensor(False)
    )
    assert torch.allclose(of_q[0][rows], whole[0][0][rows], atol=1e-5)
    assert torch.allclose(of_k[:, 0], whole[1][:, 0], atol=1e-5) and of_v[:, 0].isfinite().all()
    of_q, of_k, of_v = gradients(q, struck(k, (0, 1, 200, 5), value), v)
    assert of_q[:, GROUP].isnan().all() and of_k[:, 1, exists].isnan().all() and of_v[:, 1, exists].isnan().all()
    assert all(x.isfinite().all() for x in (of_q[:, :2], of_k[:, 0], of_v[:, 0]))
    of_q, of_k, of_v = gradients(q, k, struck(v, (0, 1, 200, 5), value))
    assert of_q[:, GROUP].isnan().all() and of_k[:, 1, exists].isnan().all()
    assert all(x.isfinite().all() for x in (of_q[:, :2], of_k[:, 0], of_v[:, 0]))


@pytest.mark.parametrize("value", BROKEN)
def test_pruning_keeps_what_is_broken(value):
    q, k, v = tensors()
    module = Int8Attention(HEADS, DIM, num_kv_heads=KV_HEADS, precision_mode="precision", enable_pruning=True)
    module.pruning_ratio = (0.9,)
    whole = module(q, k, v, 900)
    assert module(q, struck(k, (0, 1, 200, 5), value), v, 900)[:, GROUP].isnan().all()
    reached = nothing()
    reached[0, 3, 7] = True
    compare(module(struck(q, (0, 3, 7, 5), value), k, v, 900), whole, reached)
    out = module(struck(q, (0, 3, 32, 5), value), k, v, 900)  # one of the queries that pruning samples
    assert out.isnan().all(-1).nonzero().tolist() == [[0, 3, 32]]


def test_blocks_whose_share_is_not_known_are_needed():
    q, k, _ = tensors()
    assert needed_blocks(struck(q, (0, 3, 7, 5), NAN), k, [0.2], 1.0)[0, 0, 3, 0].all()


SIGMAS = compute_sigma_schedule(100)


@pytest.mark.parametrize("value", [NAN, INF, -1.0])
def test_noise_that_is_none_is_refused(value):
    sigmas = struck(SIGMAS, 40, value)
    for taken in (
        lambda: Int8Attention(4, num_timesteps=100, sigmas=sigmas),
        lambda: compute_adaptive_scales(sigmas),
        lambda: sigma_rule_modes(sigmas, 5),
    ):
        with pytest.raises(UserError, match="finite sigmas of 0 or more") as refused:
            taken()
        assert f"{value:g}; 1 of 100" in refused.value.got and refused.value.remedy
    with pytest.raises(UserError, match="sigma_data of 0 or more"):
        compute_adaptive_scales(SIGMAS, value)
    with pytest.raises(UserError, match="finite sigmas"):
        NoiseSchedule(torch.tensor([0.1, NAN, 0.2]))


@pytest.mark.parametrize("value", [NAN, INF, -1.0])
def test_a_model_with_such_noise_is_refused(value, digits):
    with pytest.raises(UserError, match="finite sigmas of 0 or more"):
        replace(digits, sigmas=struck(digits.sigmas, 40, value))


@pytest.mark.parametrize("value", [NAN, INF, 0.0, -1.0])
def test_softmax_scales_that_are_none_are_refused(value):
    q, k, v = tensors()
    tables = vars(tables_from_data(q, k, v, Mode.FP16))
    for taken in (
        lambda: Int8Attention(4, softmax_scale=value),
        lambda: int4_attention(q, k, v, softmax_scale=value),
        lambda: key_importance(q, k, softmax_scale=value),
        lambda: block_mask_of_data([(q, k, v, 0)], softmax_scale=value),
    ):
        with pytest.raises(UserError, match="positive") as refused:
            taken()
        assert str(value) in refused.value.got and refused.value.remedy == "leave it out for 1/√D"
    with pytest.raises(ValueError, match="softmax_scale: expected a positive finite number, got"):
        int8_attention(q, k, v, TIMESTEP, **tables, softmax_scale=value)
    with pytest.raises(ValueError, match="timestep_max: expected the positive finite end of the schedule"):
        int8_attention(q, k, v, TIMESTEP, **tables, timestep_max=value)
