"""Noise schedules against closed forms, and their modes."""

import math

import pytest
import torch

from trtconvert.attention.modes import Mode
from trtconvert.attention.reference import timestep_bin
from trtconvert.attention.schedules import (
    SIGMA_SCHEDULES,
    NoiseSchedule,
    alphas_cumprod,
    compute_adaptive_scales,
    compute_sigma_schedule,
    ddpm_betas,
    flow_noise_fractions,
    karras_sigmas,
    sigma_rule_modes,
)
from trtconvert.errors import UserError


def test_karras_runs_evenly_in_the_seventh_root():
    sigmas = karras_sigmas(18)
    assert sigmas[0].item() == pytest.approx(80, rel=1e-12)
    assert sigmas[-1].item() == pytest.approx(0.002, rel=1e-12)
    gaps = (sigmas ** (1 / 7)).diff()
    torch.testing.assert_close(gaps, gaps[:1].expand(17), rtol=1e-9, atol=0)
    assert karras_sigmas(1).tolist() == pytest.approx([80])


@pytest.mark.parametrize(
    ("kind", "first", "last"), [("linear", 1e-4, 0.02), ("scaled_linear", 0.00085, 0.012), ("cosine", 4.1285e-5, 0.999)]
)
def test_ddpm_betas_start_and_end_where_the_papers_say(kind, first, last):
    betas = ddpm_betas(1000, kind)
    assert betas[0].item() == pytest.approx(first, rel=1e-4)
    assert betas[-1].item() == pytest.approx(last, rel=1e-9)
    assert (betas.diff() >= 0).all()


def test_linear_alphas_match_a_product_by_hand():
    product = 1.0
    for t in range(1000):
        product *= 1 - (1e-4 + (0.02 - 1e-4) * t / 999)
        if t in (0, 499, 999):
            assert alphas_cumprod(ddpm_betas())[t].item() == pytest.approx(product, rel=1e-12)


def test_cosine_alphas_follow_a_squared_cosine_until_beta_is_capped():
    alpha_bar = alphas_cumprod(ddpm_betas(1000, "cosine"))

    def expected(t: float) -> float:
        return math.cos((t + 0.008) / 1.008 * math.pi / 2) ** 2 / math.cos(0.008 / 1.008 * math.pi / 2) ** 2

    for t in (0, 250, 500, 998):
        assert alpha_bar[t].item() == pytest.approx(expected((t + 1) / 1000), rel=1e-9)
    assert alpha_bar[999] > 0


@pytest.mark.parametrize("kind", SIGMA_SCHEDULES)
def test_sigma_rises_with_the_timestep(kind):
    sigmas = compute_sigma_schedule(1000, kind)
    assert sigmas.shape == (1000,)
    assert (sigmas.diff() > 0).all()
    assert sigmas.isfinite().all()


def test_sigma_is_the_noise_to_signal_ratio():
    """Measured on x: √ᾱ·x₀ + √(1-ᾱ)·n and (1-s)·x₀ + s·n contain σ times as much noise as signal."""
    t = 700
    alpha_bar = alphas_cumprod(ddpm_betas())[t].item()
    assert compute_sigma_schedule(1000, "linear")[t].item() == pytest.approx(
        math.sqrt(1 - alpha_bar) / math.sqrt(alpha_bar)
    )
    assert compute_sigma_schedule(1000, "flow")[t].item() == pytest.approx(0.7 / 0.3)


def test_flow_shift_keeps_the_start_and_raises_the_rest():
    plain, shifted = flow_noise_fractions(28), flow_noise_fractions(28, shift=3.0)
    assert plain[0] == shifted[0] == 1
    assert plain[-1].item() == pytest.approx(1 / 28)
    # Esser et al. 2024, section 5.3.2: the shift multiplies the noise-to-signal ratio.
    torch.testing.assert_close((shifted / (1 - shifted))[1:], 3 * (plain / (1 - plain))[1:])


def test_adaptive_scales_follow_the_magnitude_of_noisy_images():
    sigmas = compute_sigma_schedule(1000, "karras")
    scales = compute_adaptive_scales(sigmas)
    assert scales[500] == 1
    generator = torch.Generator().manual_seed(0)
    image, noise = (torch.randn(200_000, generator=generator, dtype=torch.float64) for _ in range(2))
    middle = (0.5 * image + sigmas[500] * noise).std()
    for t in (0, 300, 999):
        measured = (0.5 * image + sigmas[t] * noise).std() / middle
        assert scales[t].item() == pytest.approx(measured.item(), rel=0.01)


def test_rule_takes_precision_at_low_noise_and_aggressive_at_high_noise():
    sigmas = torch.tensor([0.09, 0.11, 1.0, 4.9, 5.1])  # relative to the middle, 1.0
    assert sigma_rule_modes(sigmas, 5).tolist() == [
        Mode.PRECISION,
        Mode.BALANCED,
        Mode.BALANCED,
        Mode.BALANCED,
        Mode.AGGRESSIVE,
    ]


def test_a_bin_that_spans_a_limit_takes_the_careful_mode():
    sigmas = torch.tensor([0.05, 0.5, 0.9, 1.0, 2.0, 9.0])
    assert sigma_rule_modes(sigmas, 3).tolist() == [Mode.PRECISION, Mode.BALANCED, Mode.BALANCED]
    assert sigma_rule_modes(sigmas, 1).tolist() == [Mode.PRECISION]


def test_rule_on_the_shipped_schedule():
    """σ_mid is 3.44 for DDPM's linear schedule: precision to t ≈ 111, aggressive from t ≈ 770."""
    modes = sigma_rule_modes(compute_sigma_schedule(1000, "linear"), 1000)
    first_balanced = (modes == Mode.BALANCED).nonzero()[0].item()
    first_aggressive = (modes == Mode.AGGRESSIVE).nonzero()[0].item()
    ratio = compute_sigma_schedule(1000, "linear") / compute_sigma_schedule(1000, "linear")[500]
    assert ratio[first_balanced - 1] < 0.1 <= ratio[first_balanced]
    assert ratio[first_aggressive - 1] <= 5 < ratio[first_aggressive]
    assert (modes.diff() >= 0).all()
    assert modes.max() == Mode.AGGRESSIVE  # the rule never gives FP8


def test_timestep_bins_at_their_edges():
    timestep = torch.tensor([-1.0, 0.0, 99.999, 100.0, 899.99, 900.0, 999.0, 1000.0, 5000.0, math.inf, math.nan])
    assert timestep_bin(timestep, 1000, 10).tolist() == [0, 0, 0, 1, 8, 9, 9, 9, 9, 9, 0]


def test_noise_schedule_is_exact_at_timesteps_and_inverts_between_them():
    schedule = NoiseSchedule(ddpm_betas())
    whole = torch.tensor([0.0, 1.0, 437.0, 998.0, 999.0])
    torch.testing.assert_close(schedule.sigma(whole), schedule.sigmas[whole.long()], rtol=1e-12, atol=0)
    fractions = torch.linspace(0, 999, 777, dtype=torch.float64)
    torch.testing.assert_close(schedule.timestep(schedule.sigma(fractions)), fractions, rtol=0, atol=1e-7)


def test_noise_schedule_stops_at_its_ends():
    schedule = NoiseSchedule(ddpm_betas())
    assert schedule.timestep(torch.tensor([1e-9, 1e9])).tolist() == [0, 999]
    torch.testing.assert_close(schedule.sigma(torch.tensor([-5.0, 2000.0])), schedule.sigmas[[0, -1]])


@pytest.mark.parametrize(
    "call",
    [
        lambda: compute_sigma_schedule(1000, "quadratic"),
        lambda: compute_sigma_schedule(0),
        lambda: ddpm_betas(1000, "karras"),
        lambda: karras_sigmas(10, sigma_min=0.0),
        lambda: karras_sigmas(10, sigma_min=1.0, sigma_max=0.5),
        lambda: flow_noise_fractions(10, shift=0.0),
        lambda: flow_noise_fractions(10, shift=math.nan),
        lambda: sigma_rule_modes(compute_sigma_schedule(10), 11),
        lambda: sigma_rule_modes(compute_sigma_schedule(10), 0),
        lambda: NoiseSchedule(torch.tensor([0.1])),
    ],
)
def test_bad_arguments_are_refused_with_a_remedy(call):
    with pytest.raises(UserError) as caught:
        call()
    assert caught.value.expected and caught.value.got and caught.value.remedy
