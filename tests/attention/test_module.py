"""`Int8Attention`: each option has its documented effect, refusals name the argument, and torch's module functions work."""

from __future__ import annotations

import subprocess
import sys

import pytest
import tolerances
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from trtconvert.attention import (
    Int8Attention,
    block_mask_of_data,
    compute_adaptive_scales,
    compute_sigma_schedule,
    fused_cfg,
    pruning_schedule,
)
from trtconvert.attention.modes import Mode
from trtconvert.attention.module import PRECISION_MODES
from trtconvert.attention.reference import attention as reference
from trtconvert.errors import UserError
from trtconvert.models.recorded_calls import relative_error as error

B, H, N, D = 2, 4, 200, 40

NAMES = [name for name in PRECISION_MODES if name != "auto" and not name.startswith("int4")]

LIMITS = tolerances.MODE_ERROR | {Mode.FP8: 0.06}


def tensors(
    seed: int = 0,
    batch: int = B,
    heads: int = H,
    kv_heads: int | None = None,
    queries: int = N,
    keys: int = N,
    dim: int = D,
) -> list[Tensor]:
    """Q, K and V with biased keys and values."""
    generator = torch.Generator().manual_seed(seed)
    kv = heads if kv_heads is None else kv_heads
    q, k, v = (
        torch.randn(batch, h, n, dim, generator=generator) for h, n in ((heads, queries), (kv, keys), (kv, keys))
    )
    return [q, k + 2 * torch.randn(1, kv, 1, dim, generator=generator), v + 0.5]


def exact(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    return scaled_dot_product_attention(q.double(), k.double(), v.double(), mask, enable_gqa=True)


# Precision and timesteps ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("calibrated", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_each_precision_mode_is_close_to_exact_attention(name: str, calibrated: bool) -> None:
    q, k, v = tensors(kv_heads=2)
    attention = Int8Attention(H, D, num_kv_heads=2, precision_mode=name)
    if calibrated:
        attention.calibrate([(q, k, v, 100), (q, k, v, 900)])
    assert error(attention(q, k, v, 500), exact(q, k, v)) < LIMITS[Mode[name.upper()]]


@pytest.mark.parametrize("name", NAMES)
def test_a_module_computes_its_mode(name: str) -> None:
    """Against the operator with the calibrated tables in this mode, and in the other modes."""
    q, k, v = tensors()
    attention = Int8Attention(H, D, precision_mode=name, timestep_bins=3).calibrate([(q, k, v, 10), (q, k, v, 900)])
    tables = attention.tables
    assert tables is not None and tables.q_scale.shape == (3, H)
    found = attention(q, k, v, torch.tensor([5, 980]))
    for mode in Mode:
        of_mode = reference(q, k, v, torch.tensor([5.0, 980.0]), tables.with_modes(mode))
        assert torch.equal(found, of_mode) == (mode == Mode[name.upper()])


def test_auto_follows_the_noise() -> None:
    q, k, v = tensors(batch=3)
    attention = Int8Attention(H, D)
    modes = attention.modes.tolist()
    assert modes[0] == Mode.PRECISION and modes[5] == Mode.BALANCED and modes[-1] == Mode.AGGRESSIVE
    together = attention(q, k, v, torch.tensor([0.0, 500.0, 1000.0]))
    for index, timestep in enumerate((0, 500, 1000)):
        mode = Mode(int(attention.modes[min(timestep * 10 // 1000, 9)])).name.lower()
        one = Int8Attention(H, D, precision_mode=mode)
        part = [x[index : index + 1] for x in (q, k, v)]
        assert error(together[index : index + 1], one(*part, timestep)) < tolerances.SAME_FLOAT
    fixed = Int8Attention(H, D, use_adaptive_scaling=False)
    assert fixed.modes.tolist() == [Mode.BALANCED]
    assert torch.equal(fixed(q, k, v, 0), fixed(q, k, v, 1000))
    flat = Int8Attention(H, D, sigmas=torch.ones(1000))
    assert set(flat.modes.tolist()) == {Mode.BALANCED}


def test_a_number_and_a_tensor_are_one_timestep() -> None:
    q, k, v = tensors()
    attention = Int8Attention(H, D)
    for timestep in (0, 99, 100, 500, 999, 1000, 333.3):
        expected = attention(q, k, v, timestep)
        for given in (torch.tensor(timestep), torch.tensor([timestep]), torch.tensor([timestep] * B)):
            assert torch.equal(attention(q, k, v, given), expected)


def test_samples_do_not_depend_on_their_neighbours() -> None:
    q, k, v = tensors()
    attention = Int8Attention(H, D, precision_mode="aggressive")
    alone = attention(q[:1], k[:1], v[:1], 700)
    others = [torch.cat([x[:1], 50 * x[1:]]) for x in (q, k, v)]
    assert torch.equal(attention(*others, 700)[:1], alone)


def test_scales_follow_the_timestep_where_they_are_adaptive() -> None:
    q, k, v = tensors()
    data = [(q, k, v, 50), (8 * q, 8 * k, 8 * v, 950)]
    adaptive = Int8Attention(H, D, precision_mode="precision").calibrate(data)
    fixed = Int8Attention(H, D, precision_mode="precision", use_adaptive_scaling=False).calibrate(data)
    assert adaptive.tables is not None and fixed.tables is not None
    assert len(adaptive.tables.q_scale) == 10 and len(fixed.tables.q_scale) == 1
    torch.testing.assert_close(adaptive.tables.q_scale[-1], 8 * adaptive.tables.q_scale[0])
    assert error(adaptive(q, k, v, 50), exact(q, k, v)) < 0.5 * error(fixed(q, k, v, 50), exact(q, k, v))


def test_timestep_scales_carry_a_calibration_to_other_timesteps() -> None:
    """The guide's example: a table from the noise."""
    q, k, v = tensors()
    scales = compute_adaptive_scales(compute_sigma_schedule(timesteps=1000))
    attention = Int8Attention(H, D, timestep_scales=scales, precision_mode="precision").calibrate([(q, k, v, 500)])
    tables = attention.tables
    assert tables is not None
    largest = scales.view(10, 100).amax(1).float()
    torch.testing.assert_close(tables.q_scale / tables.q_scale[5], (largest / largest[5])[:, None].expand(-1, H))
    torch.testing.assert_close(tables.k_offset[9] / largest[9], tables.k_offset[5] / largest[5])
    # Queries that grow by the table's factors are quantised as well as calibrated ones.
    grown = [x * (largest[8] / largest[5]) for x in (q, k, v)]
    plain = Int8Attention(H, D, precision_mode="precision").calibrate([(q, k, v, 500)])
    assert error(attention(*grown, 850), exact(*grown)) < error(plain(*grown, 850), exact(*grown))


def test_scales_of_repeated_batches_are_percentiles() -> None:
    q, k, v = tensors()
    data = [(q, k, v, 500)] * 9 + [(100 * q, k, v, 500)]
    whole, part = (Int8Attention(H, D).calibrate(data, percentile=p).tables for p in (100, 80))
    assert whole is not None and part is not None
    torch.testing.assert_close(whole.q_scale, 100 * part.q_scale)


def test_softmax_eps_lessens_rows_of_small_logits() -> None:
    q, k, v = tensors()
    eps = 10.0
    weights = (q.double() @ k.double().transpose(2, 3) * D**-0.5).exp()
    expected = weights @ v.double() / (weights.sum(-1, keepdim=True) + eps)
    plain, lessened = (Int8Attention(H, D, precision_mode="fp16", softmax_eps=e)(q, k, v, 5) for e in (0.0, eps))
    assert error(lessened, expected) < tolerances.SAME_FLOAT < error(plain, expected)


def test_softmax_scale_is_the_factor_of_logits() -> None:
    q, k, v = tensors()
    attention = Int8Attention(H, D, softmax_scale=0.5, precision_mode="fp16")
    assert error(attention(q, k, v, 5), exact(q * (0.5 * D**0.5), k, v)) < tolerances.SAME_FLOAT


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_goes_in_and_comes_out(dtype: torch.dtype) -> None:
    q, k, v = (x.to(dtype) for x in tensors())
    out = Int8Attention(H, D, precision_mode="precision")(q, k, v, 500)
    assert out.dtype == dtype and out.shape == q.shape
    assert error(out, exact(q, k, v)) < LIMITS[Mode.PRECISION]


@pytest.mark.parametrize("name", NAMES)
def test_autocast_gives_its_type_as_to_torch_s_attention(name: str) -> None:
    attention, (q, k, v) = Int8Attention(H, D, precision_mode=name, enable_cfg_fusion=True), tensors()
    narrow = [x.bfloat16() for x in (q, k, v)]
    with torch.autocast("cpu", torch.bfloat16):
        out, (first, _) = attention(q, narrow[1], v, 500), attention.fused_cfg(q, q, k, v, 500)
        assert out.dtype == scaled_dot_product_attention(q, k, v).dtype
    assert torch.equal(out, attention(*narrow, 500)) and torch.equal(first, out)


def test_masks_reach_the_operator() -> None:
    q, k, v = tensors()
    mask = torch.ones(N, N, dtype=torch.bool).tril()
    assert error(Int8Attention(H, D, precision_mode="precision")(q, k, v, 500, mask=mask), exact(q, k, v, mask)) < 0.03


def test_heads_dim_may_be_left_to_the_tensors() -> None:
    q, k, v = tensors()
    attention = Int8Attention(num_heads=H, block_q=64, block_k=64)
    assert torch.equal(attention(q, k, v, 500), Int8Attention(H, D)(q, k, v, 500))
    attention.calibrate([(q, k, v, 500)])
    assert attention.head_dim == D
    with pytest.raises(UserError, match="Q does not fit"):
        attention(q[..., :32], k[..., :32], v[..., :32], 500)


# Guidance -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["precision", "balanced", "aggressive"])
def test_fused_guidance_is_two_calls(name: str) -> None:
    q, k, v = tensors()
    other = tensors(seed=1)[0]
    attention = Int8Attention(H, D, precision_mode=name, enable_cfg_fusion=True).calibrate([(q, k, v, 500)])
    cond, uncond = outputs = attention.fused_cfg(q, other, k, v, 500, 7.5)
    assert error(cond, attention(q, k, v, 500)) < tolerances.SAME_ARITHMETIC
    assert error(uncond, attention(other, k, v, 500)) < tolerances.SAME_ARITHMETIC
    torch.testing.assert_close(outputs.guided, uncond + 7.5 * (cond - uncond))
    # A guided batch whose halves share keys gives the same result.
    both = attention(torch.cat([q, other]), k, v, 500)
    assert torch.equal(both, torch.cat([cond, uncond]))
    of_function = fused_cfg(q, other, k, v, 500, 7.5, precision_mode=name)
    assert error(of_function.guided, Int8Attention(H, D, precision_mode=name)(q, k, v, 500) * 7.5
                 - 6.5 * Int8Attention(H, D, precision_mode=name)(other, k, v, 500)) < 5e-2  # fmt: skip


def test_fused_guidance_keeps_block_sparse_windows() -> None:
    q, k, v = tensors(queries=256, keys=256)
    options = {"attention_type": "block_sparse", "window_size": 64, "precision_mode": "precision"}
    attention = Int8Attention(H, D, enable_cfg_fusion=True, **options)
    cond, uncond = attention.fused_cfg(q, -q, k, v, 500)
    assert error(cond, attention(q, k, v, 500)) < tolerances.SAME_ARITHMETIC
    assert error(uncond, attention(-q, k, v, 500)) < tolerances.SAME_ARITHMETIC


def test_guidance_needs_its_option_and_its_scale() -> None:
    q, k, v = tensors()
    with pytest.raises(UserError, match="enable_cfg_fusion"):
        Int8Attention(H, D).fused_cfg(q, q, k, v, 500, 7.5)
    with pytest.raises(UserError, match="K and V does not fit"):
        Int8Attention(H, D)(torch.cat([q, q]), k, v, 500)
    fusing = Int8Attention(H, D, enable_cfg_fusion=True)
    with pytest.raises(UserError, match="do not fit each other"):
        fusing.fused_cfg(q, q[:, :, :9], k, v, 500, 7.5)
    with pytest.raises(UserError, match="guidance_scale"):
        _ = fusing.fused_cfg(q, q, k, v, 500).guided


# Pruning --------------------------------------------------------------------------------------------------------------


def focused(kept: int) -> list[Tensor]:
    """Q, K and V where all queries attend to the first `kept` keys."""
    q, k, v = tensors()
    direction = torch.nn.functional.normalize(torch.ones(D), dim=0)
    k = k - k.mean(2, keepdim=True)
    k[:, :, :kept] += 30 * direction
    return [q + 6 * direction, k, v]


def test_pruning_drops_what_nobody_attends_to() -> None:
    q, k, v = focused(kept=120)
    attention = Int8Attention(H, D, enable_pruning=True, pruning_ratio=0.4, precision_mode="precision")
    out, kept = attention(q, k, v, 500, return_mask=True)
    assert kept.shape == (B, H, N) and kept.dtype == torch.bool
    assert (kept == (torch.arange(N) < 120)).all()
    assert error(out, exact(q, k, v)) < LIMITS[Mode.PRECISION]
    assert torch.equal(attention(q, k, v, 500), out)


def test_pruned_attention_is_attention_to_the_keys_that_are_kept() -> None:
    q, k, v = tensors(kv_heads=2)
    attention = Int8Attention(H, D, num_kv_heads=2, enable_pruning=True, pruning_ratio=0.25, precision_mode="fp16")
    out, kept = attention(q, k, v, 500, return_mask=True)
    assert (kept.sum(-1) == N - N // 4).all() and torch.equal(kept[:, 0], kept[:, 1])
    assert error(out, exact(q, k, v, kept[:, :, None])) < tolerances.SAME_FLOAT
    # Pruning of one call only, as in the guide.
    same, mask = Int8Attention(H, D, num_kv_heads=2, precision_mode="fp16")(
        q, k, v, 500, enable_pruning=True, pruning_ratio=0.25
    )
    assert torch.equal(same, out) and torch.equal(mask, kept)


def test_pruning_follows_a_schedule() -> None:
    q, k, v = tensors(batch=4)
    attention = Int8Attention(H, D, enable_pruning=True, pruning_ratio=(0, 0, 0.1, 0.5), precision_mode="fp16")
    timesteps = torch.tensor([0.0, 499.0, 500.0, 1000.0])
    out, kept = attention(q, k, v, timesteps, return_mask=True)
    assert kept.sum(-1)[:, 0].tolist() == [N, N, N - N // 10, N // 2]
    assert error(out, exact(q, k, v, kept[:, :, None])) < tolerances.SAME_FLOAT
    for index, timestep in enumerate(timesteps.tolist()):  # a number, which the host can read
        part = [x[index : index + 1] for x in (q, k, v)]
        one, mask = attention(*part, timestep, return_mask=True)
        assert torch.equal(mask, kept[index : index + 1])
        assert error(one, out[index : index + 1]) < tolerances.SAME_FLOAT


def test_block_q_is_how_far_apart_queries_are_asked() -> None:
    q, k, v = tensors()
    masks = [
        Int8Attention(H, D, block_q=block)(q, k, v, 500, enable_pruning=True, pruning_ratio=0.3)[1]
        for block in (16, 128)
    ]
    assert not torch.equal(*masks)


def test_data_tells_how_many_keys_may_go() -> None:
    q, k, v = focused(kept=120)
    even = tensors()
    ratios = pruning_schedule([(q, k, v, torch.tensor([150, 350])), (*even, 350), (q, k, v, 950)], lost=0.01, bins=4)
    # Keys without attention, and some of the keys with least attention.
    assert 0.4 <= ratios[0] < 0.5 and ratios[1] < 0.1 and ratios[2] == 0 and 0.4 <= ratios[3] < 0.5
    pruning = Int8Attention(H, D, enable_pruning=True, pruning_ratio=ratios, precision_mode="fp16")
    out, kept = pruning(q, k, v, 950, return_mask=True)
    assert not kept.all() and error(out, exact(q, k, v)) < 0.02
    for data, lost, named in (([], 0.1, "nothing to find"), ([(q, k, v, 5)], 1.0, "share of lost attention")):
        for find in (pruning_schedule, block_mask_of_data):
            with pytest.raises(UserError, match=named):
                find(data, lost)


def test_data_tells_which_blocks_hold_attention() -> None:
    """Tokens attend to their own block in one of two heads."""
    tokens = 300
    place = torch.nn.functional.one_hot(torch.arange(tokens) // 128, 32).float()
    q = torch.stack([place, torch.zeros_like(place)])[None] * 60
    k, v = q[:, :1].clone(), tensors(1, 1, 1, queries=tokens, keys=tokens, dim=32)[2]
    found = block_mask_of_data([(q, k, v, 500)], lost=0.01)
    assert torch.equal(found[0, 0], torch.eye(3, dtype=torch.bool)) and found[0, 1].all()
    attention = Int8Attention(2, 32, num_kv_heads=1, precision_mode="fp16")
    assert error(attention(q, k, v, 500, block_mask=found), exact(q, k, v)) < 0.01
    both = block_mask_of_data([(q, k, v, 500), (q.flip(2), k, v, 500)], lost=0.01)
    assert (both >= found).all() and both.sum() > found.sum()
    with pytest.raises(UserError, match="different block masks"):
        block_mask_of_data([(q, k, v, 5), (q[:, :, :100], k, v, 5)])


@pytest.mark.parametrize("ratio", [1.0, 1.5, -0.1, float("nan"), (), (0.1, 1), "0.2"])
def test_pruning_keeps_something(ratio) -> None:
    with pytest.raises(UserError, match="pruning_ratio"):
        Int8Attention(H, D, enable_pruning=True, pruning_ratio=ratio)


# Functions of torch.nn.Module -----------------------------------------------------------------------------------------


def test_state_dict_makes_another_module_the_same() -> None:
    q, k, v = tensors()
    made = Int8Attention(H, D).calibrate([(q, k, v, 100), (2 * q, k, v, 900)])
    assert set(made.state_dict()) == {"q_scale", "k_scale", "v_scale", "k_offset", "v_offset"}
    for other in (Int8Attention(H, D), Int8Attention(H), Int8Attention(H, D).calibrate([(3 * q, k, v, 1)])):
        other.load_state_dict(made.state_dict())
        assert other.calibrated and torch.equal(other(q, k, v, 800), made(q, k, v, 800))
    assert not Int8Attention(H, D).state_dict()
    Int8Attention(H, D).load_state_dict({})
    for misfit in (Int8Attention(2 * H, D), Int8Attention(H, D, timestep_bins=3)):
        with pytest.raises(RuntimeError, match="size mismatch for q_scale"):
            misfit.load_state_dict(made.state_dict())
    with pytest.raises(RuntimeError, match="Missing key"):
        made.load_state_dict({})


def test_tables_stay_in_single_precision() -> None:
    q, k, v = (x.half() for x in tensors())
    made = Int8Attention(H, D).calibrate([(q * 1e-3, k, v, 500)])
    before = made(q, k, v, 500)
    cast = made.half().to(torch.bfloat16)
    assert cast.q_scale is not None and cast.q_scale.dtype == torch.float32
    assert torch.equal(cast(q, k, v, 500), before)


def test_a_failed_calibration_changes_nothing() -> None:
    q, k, v = tensors()
    made = Int8Attention(H, D).calibrate([(q, k, v, 500)])
    before = {name: x.clone() for name, x in made.state_dict().items()}
    bad = q.clone()
    bad[0, 0, 0, 0] = torch.nan
    with pytest.raises(UserError, match="NaN or Inf among the queries"):
        made.calibrate([(5 * q, k, v, 500), (bad, k, v, 500)])
    with pytest.raises(UserError, match="nothing to calibrate on"):
        made.calibrate([])
    for data in ((q, k, v, 500), [(q, k, v)]):
        with pytest.raises(UserError, match="data does not fit"):
            made.calibrate(data)  # type: ignore[arg-type]
    assert all(torch.equal(x, before[name]) for name, x in made.state_dict().items())


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"enable_pruning": True},
        {"enable_pruning": True, "pruning_ratio": (0, 0.5)},
        {"attention_type": "block_sparse", "window_size": 64, "sink_tokens": 5},
        {"attention_type": "block_sparse", "window_size": (3, 5), "grid": (10, 20)},
        {"softmax_eps": 1e-6},
    ],
    ids=str,
)
@pytest.mark.parametrize("calibrated", [False, True])
def test_a_module_compiles_without_graph_breaks(options: dict, calibrated: bool) -> None:
    q, k, v = tensors()
    attention = Int8Attention(H, D, **options)
    if calibrated:
        attention.calibrate([(q, k, v, 500)])
    torch._dynamo.reset()
    compiled = torch.compile(attention, backend="aot_eager", fullgraph=True)
    for timestep in (torch.tensor([10.0, 990.0]), torch.tensor([500.0, 20.0])):
        torch.testing.assert_close(compiled(q, k, v, timestep), attention(q, k, v, timestep), rtol=1e-5, atol=1e-5)


def test_numbers_as_timesteps_compile() -> None:
    q, k, v = tensors()
    attention = Int8Attention(H, D, enable_cfg_fusion=True)
    torch._dynamo.reset()
    compiled = torch.compile(attention, backend="aot_eager", fullgraph=True)
    for timestep in (500, 40, 990):
        assert torch.equal(compiled(q, k, v, timestep), attention(q, k, v, timestep))
    guided = torch.compile(lambda *args: attention.fused_cfg(*args).guided, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(guided(q, -q, k, v, 500, 7.5), attention.fused_cfg(q, -q, k, v, 500, 7.5).guided)


def test_gradients_go_straight_through() -> None:
    """Measured scales are constants: the gradients are those of exact attention."""
    q, k, v = (x.double().float().requires_grad_() for x in tensors(queries=30, keys=50))
    found = torch.autograd.grad(Int8Attention(H, D, precision_mode="aggressive")(q, k, v, 500).sum(), (q, k, v))
    expected = torch.autograd.grad(scaled_dot_product_attention(q, k, v).sum(), (q, k, v))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_training_with_block_masks_and_pruned_keys_has_gradients_of_what_is_seen() -> None:
    q, k, v = (x.requires_grad_() for x in tensors(queries=256, keys=256))
    attention = Int8Attention(H, D, enable_pruning=True, pruning_ratio=0.5, precision_mode="fp16")
    out, kept = attention(q, k, v, 500, return_mask=True)
    out.sum().backward()
    assert k.grad is not None and v.grad is not None and q.grad is not None
    assert not k.grad[~kept].any() and not v.grad[~kept].any() and v.grad[kept].any()


def test_the_package_is_imported_without_torch() -> None:
    code = (
        "import sys, trtconvert.attention as a; assert 'torch' not in sys.modules; assert 'Int8Attention' in dir(a)\n"
        "assert a.Int8Attention.__name__ == 'Int8Attention' and all(callable(getattr(a, name)) for name in a.__all__)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    with pytest.raises(ImportError):
        from trtconvert.attention import Int4Attention  # type: ignore[attr-defined]  # noqa: F401


# Refusals -------------------------------------------------------------------------------------------------------------

SPARSE = {"attention_type": "block_sparse"}


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"num_heads": 0}, "num_heads"),
        ({"num_kv_heads": 3}, "num_kv_heads"),
        ({"head_dim": 33}, "head_dim"),
        ({"head_dim": 264}, "head_dim"),
        ({"num_timesteps": 0}, "num_timesteps"),
        ({"timestep_bins": 0}, "timestep_bins"),
        ({"precision_mode": "int3"}, "precision_mode"),
        ({"block_q": 48}, "block_q"),
        ({"block_k": 0}, "block_k"),
        ({"softmax_eps": -1.0}, "softmax_eps"),
        ({"softmax_eps": float("nan")}, "softmax_eps"),
        ({"attention_type": "sparse"}, "attention_type"),
        ({"timestep_scales": torch.ones(999)}, "timestep_scales"),
        ({"timestep_scales": torch.zeros(1000)}, "timestep_scales"),
        ({"timestep_scales": torch.ones(1000), "use_adaptive_scaling": False}, "timestep_scales"),
        ({"sigmas": torch.ones(9)}, "sigmas"),
        ({"sigmas": torch.ones(1000), "precision_mode": "balanced"}, "sigmas"),
        ({"window_size": 512}, "window_size"),
        ({"block_size": 64}, "block_size"),
        ({"grid": (8, 8)}, "grid"),
        ({"sink_tokens": 4}, "sink_tokens"),
        ({"text_tokens": 4}, "text_tokens"),
        (SPARSE, "window_size"),
        (SPARSE | {"window_size": 64, "block_size": 48}, "the block size of block-sparse attention is not valid"),
        (SPARSE | {"window_size": 64, "block_size": 192}, "the block size of block-sparse attention is not valid"),
        (SPARSE | {"window_size": (3, 3)}, "window_size"),
        (SPARSE | {"window_size": 3, "text_tokens": 4}, "text_tokens"),
        (SPARSE | {"window_size": 9, "grid": (8, 8)}, "window"),
        (SPARSE | {"window_size": 64, "enable_pruning": True}, "enable_pruning"),
    ],
    ids=str,
)
def test_bad_options_are_refused_by_name(options: dict, named: str) -> None:
    with pytest.raises(UserError, match=named) as refusal:
        Int8Attention(**({"num_heads": H, "head_dim": D} | options))
    assert refusal.value.expected and refusal.value.got and refusal.value.remedy


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda q, k, v: (q[:, :3], k, v, 5), "Q does not fit"),
        (lambda q, k, v: (q, k[:, :2], v[:, :2], 5), "K does not fit"),
        (lambda q, k, v: (q[..., :32], k, v, 5), "Q does not fit"),
        (lambda q, k, v: (q[0], k, v, 5), "Q does not fit"),
        (lambda q, k, v: (q, k, v[:, :, :9], 5), "K and V"),
        (lambda q, k, v: (q, k[:1], v[:1], 5), "K and V"),
        (lambda q, k, v: (q, k[:, :, :0], v[:, :, :0], 5), "Q and K"),
        (lambda q, k, v: (q[:0], k[:0], v[:0], 5), "Q and K"),
        (lambda q, k, v: (q.half(), k, v, 5), "Q, K and V"),
        (lambda q, k, v: (q.double(), k.double(), v.double(), 5), "Q, K and V"),
        (lambda q, k, v: (q, k, v.to("meta"), 5), "one device"),
        (lambda q, k, v: (q, k, v, "500"), "timestep"),
        (lambda q, k, v: (q, k, v, None), "timestep"),
        (lambda q, k, v: (q, k, v, -1), "timestep"),
        (lambda q, k, v: (q, k, v, 1001), "timestep"),
        (lambda q, k, v: (q, k, v, float("nan")), "timestep"),
        (lambda q, k, v: (q, k, v, torch.tensor([5.0, 1200.0])), "timestep"),
        (lambda q, k, v: (q, k, v, torch.tensor([1.0, 2.0, 3.0])), "timestep"),
        (lambda q, k, v: (q, k, v, torch.tensor([[1.0], [2.0]])), "timestep"),
    ],
)
def test_bad_tensors_are_refused_by_name(change, named: str) -> None:
    with pytest.raises(UserError, match=named):
        Int8Attention(H, D)(*change(*tensors()))


@pytest.mark.parametrize(
    "mask",
    [
        torch.ones(N, N + 1, dtype=torch.bool),
        torch.ones(3, N, dtype=torch.bool),
        torch.ones(1, 1, 1, 1, N, dtype=torch.bool),
        torch.ones(N, N, dtype=torch.int32),
        torch.ones(N, N, dtype=torch.bool, device="meta"),
    ],
    ids=lambda mask: f"{list(mask.shape)} {mask.dtype} {mask.device}",
)
def test_bad_masks_are_refused(mask: Tensor) -> None:
    with pytest.raises(UserError, match="mask does not fit"):
        Int8Attention(H, D)(*tensors(), 5, mask=mask)


def test_options_of_a_call_that_do_not_fit_each_other() -> None:
    q, k, v = tensors()
    attention = Int8Attention(H, D)
    with pytest.raises(UserError, match="return_mask"):
        attention(q, k, v, 5, return_mask=True)
    with pytest.raises(UserError, match="pruning_ratio"):
        attention(q, k, v, 5, pruning_ratio=0.1)
    with pytest.raises(UserError, match="pruning"):
        attention(q, k, v, 5, enable_pruning=True, mask=torch.ones(N, N, dtype=torch.bool))
    sparse = Int8Attention(H, D, attention_type="block_sparse", window_size=(3, 3), grid=(5, 5))
    with pytest.raises(UserError, match="grid"):
        sparse(q, k, v, 5)
    with pytest.raises(UserError, match="window_size"):
        Int8Attention(H, D, attention_type="block_sparse", window_size=N + 1)(q, k, v, 5)
