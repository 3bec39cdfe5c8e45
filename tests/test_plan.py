"""The plan's search: optimal for its error model, faithful to its budget, and its sensitivities true to the model."""

import itertools

import pytest
import torch

from trtconvert.attention.modes import Mode
from trtconvert.attention.reference import AttentionTables, tables_from_data
from trtconvert.attention.schedules import compute_sigma_schedule
from trtconvert.calib.cost import AttentionShape, KernelCost
from trtconvert.calib.plan import fastest_plan, search_plan
from trtconvert.calib.sensitivity import Int8Sites, Sensitivity, measure_sensitivity
from trtconvert.models.base import intercepted

SITES = ["a", "b"]
BINS = 2


def random_choices(seed):
    generator = torch.Generator().manual_seed(seed)
    cost = torch.rand(len(SITES), BINS, 4, generator=generator, dtype=torch.float64)
    cost[..., Mode.FP16] = 0
    time = 1 + torch.rand(len(SITES), BINS, 4, generator=generator, dtype=torch.float64)
    return cost, time


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("limit", [1e-3, 0.5, 1.5, 10.0])
def test_no_plan_within_the_limit_is_faster(seed, limit):
    cost, time = random_choices(seed)
    plan = fastest_plan(SITES, cost, time, limit)
    chosen = torch.stack([plan[site] for site in SITES]).long()[..., None]
    assert cost.gather(-1, chosen).sum() <= limit * (1 + 1e-6)
    feasible = [
        sum(time[s, t, modes[s * BINS + t]] for s in range(2) for t in range(BINS))
        for modes in itertools.product(range(4), repeat=len(SITES) * BINS)
        if sum(cost[s, t, modes[s * BINS + t]] for s in range(2) for t in range(BINS)) <= limit
    ]
    assert float(time.gather(-1, chosen).sum()) == pytest.approx(float(min(feasible)), rel=1e-6)


def test_limits_far_from_one_are_kept():
    cost, time = random_choices(0)
    for scale in (1e-9, 1e9):
        plan = fastest_plan(SITES, cost * scale, time, 0.5 * scale)
        assert all(torch.equal(plan[s], fastest_plan(SITES, cost, time, 0.5)[s]) for s in SITES)


@pytest.mark.parametrize("budget", [20.0, 35.0, 200.0])
def test_the_chosen_plan_is_the_fastest_sampled_one_that_keeps_the_budget(budget):
    cost, _ = random_choices(1)
    seconds = torch.tensor([[4.0, 3.0, 2.0, 1.0], [8.0, 7.0, 5.0, 4.0]], dtype=torch.float64)
    sensitivity = Sensitivity(SITES, cost * 1e-3, torch.ones(BINS, dtype=torch.float64), torch.full((BINS,), 0.5))
    sampled = []

    def sample_psnr(plan):
        # An error model that is off by a factor of three, as real ones are.
        chosen = torch.stack([plan[site] for site in SITES]).long()[..., None]
        error = 3 * float((cost * 1e-3).gather(-1, chosen).sum())
        sampled.append(plan)
        return 150.0 if error == 0 else float(-10 * torch.tensor(error).log10())

    sigmas = compute_sigma_schedule(1000, "linear")
    plan, points = search_plan(sensitivity, seconds, sigmas, budget, sample_psnr)
    best = next(p for p in points if p.plan is plan)
    if budget > 150:  # more than equal samples reach
        assert not any(modes.any() for modes in plan.values())
    else:
        assert best.psnr >= budget
    assert all(p.psnr < budget for p in points if p.speed > best.speed)
    assert points == sorted(points, key=lambda p: (-p.speed, -p.psnr))
    assert next(p for p in points if p.name == "fp16 everywhere").speed == 1.0


def test_the_cost_table_orders_modes_by_work_and_interpolates():
    costs = KernelCost.shipped()
    assert costs.gpu and costs.date

    def at(tokens, mode):
        return costs.seconds(AttentionShape(1, 24, tokens, tokens, 128), mode)

    for mode in Mode:
        assert at(4096, mode) < at(8192, mode) < at(16384, mode)
        assert at(32768, mode) == pytest.approx(4 * at(16384, mode))
        assert at(16, mode) == at(8, mode)  # launch and latency
    assert at(16384, Mode.AGGRESSIVE) < at(16384, Mode.FP16)


def test_sensitivities_are_the_errors_that_single_choices_make(digits):
    tables = {}

    def handler(call):
        one = tables_from_data(call.q, call.k, call.v, Mode.FP16)
        tables[call.name] = AttentionTables(*(x.repeat(BINS, *[1] * (x.dim() - 1)) for x in vars(one).values()))
        return call.exact()

    with torch.no_grad():
        intercepted(digits, handler)(**digits.example(0, {"batch": 16, "height": 8, "width": 8}))
    chosen = {name: tables[name] for name in ("blocks.1.attn", "blocks.4.attn")}
    sites = Int8Sites(chosen, digits.timestep_max, "calibrated", True)
    calls = []
    measured = measure_sensitivity(digits, sites, BINS, seeds=range(4), steps=4, done=lambda: calls.append(1))
    assert len(calls) == 4 + BINS
    assert not measured.error[..., Mode.FP16].any()
    assert (measured.error[..., Mode.PRECISION :] > 0).all() and (measured.gain > 0).all()
    assert measured.steps.sum() == 1

    # The sum over single choices foretells what all of them together do to the samples, to a factor of a few.
    everything = Int8Sites(
        {n: t.with_modes(Mode.AGGRESSIVE) for n, t in chosen.items()}, digits.timestep_max, "calibrated", True
    )
    with torch.no_grad():
        full = digits.sample(digits.denoiser, range(4), steps=4, solver="ddim")
        int8 = digits.sample(intercepted(digits, everything.handler()), range(4), steps=4, solver="ddim")
    seen = float((full - int8).double().square().mean())
    foretold = float(measured.cost()[..., Mode.AGGRESSIVE].sum())
    assert 0.1 < seen / foretold < 10
