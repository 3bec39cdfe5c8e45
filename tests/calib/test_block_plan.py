"""Plans that choose block masks together with modes: prices, measurements, optimality, and the budget."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace

import pytest
import tiny_sparse
import torch
from decided import points_of
from kernel_tables import table_without
from support import Quiet, refusal, run, tiny_recipe

from trtconvert.attention.blocks import BlockRows, SiteBlocks, pack
from trtconvert.attention.modes import Mode
from trtconvert.attention.reference import AttentionTables, expand_blocks
from trtconvert.attention.sites import Site
from trtconvert.calib.block_plan import attention_seconds, stated_blocks
from trtconvert.calib.calibrate import calibrate, parts_to_convert
from trtconvert.calib.candidates import attention_units
from trtconvert.calib.cost import AttentionShape, KernelCost
from trtconvert.calib.frontier import PlanPoint
from trtconvert.calib.identity import KERNEL_COST
from trtconvert.calib.knapsack import fastest
from trtconvert.calib.sensitivity import measure_sensitivity
from trtconvert.errors import UserError
from trtconvert.models.denoiser import intercepted
from trtconvert.quant.decision import Choice, Decision
from trtconvert.quant.forward import Int8Sites
from trtconvert.recipe import AttentionSection, CalibrationSection, LayersSection, PlanSection

BINS, SHARES = 2, (0.01, 0.1)
LEVELS = (None, *SHARES, 0.0)
"""Shares that a mask may lose; no mask first, a mask of all blocks last."""
SHAPE = AttentionShape(1, 24, 16384, 16384, 128)


def blocks_of(density, heads=2, counts=(50, 50)):
    """Blocks of a site: all in the last bin; in the first bin about these shares, by level."""
    kept = torch.zeros(1, len(density), heads, *counts, dtype=torch.bool)
    for level, share in enumerate(density):
        kept[:, level, :, :, : max(1, round(share * counts[1]))] = True
    return SiteBlocks.of(BlockRows(torch.tensor([0]), pack(kept)), SHARES[: len(density)], counts, BINS)


def test_time_follows_the_blocks_and_masks_that_leave_few_out_cost_time():
    cost = KernelCost.load(masks=True)
    for mode in Mode:
        ratios = [cost.masked_ratio(SHAPE, mode, density) for density in (0.01, 0.1, 0.25, 0.5, 0.8, 1.0)]
        assert ratios[0] > 0 and ratios == sorted(ratios) and ratios[-1] > 1
    # As measured: a little more than the density at measured work, and at the nearest work otherwise.
    assert 0.5 < cost.masked_ratio(SHAPE, Mode.BALANCED, 0.5) < 0.6
    of_64 = replace(SHAPE, head_dim=64)
    nearest = AttentionShape(2, 10, 16384, 16384, 64)
    assert cost.masked_ratio(of_64, Mode.FP8, 1.0) == cost.masked_ratio(nearest, Mode.FP8, 1.0)


def test_a_table_of_one_density_prices_by_the_share_of_blocks():
    row = {"mode": 2, "shape": [1, 2, 512, 512, 64], "density": 0.5, "ratio": 0.6}
    cost = KernelCost({"gpu": "g", "date": "d", "rows": [], "masked": [row]})
    assert cost.masked_ratio(SHAPE, Mode.FP16, 0.25) == pytest.approx(0.3)


def test_a_table_without_masks_serves_dense_plans_alone(tmp_path):
    path = table_without(tmp_path / "old.json", "masked")
    KernelCost.load(path)
    with pytest.raises(UserError, match="cannot price the block masks") as refused:
        KernelCost.load(path, masks=True)
    assert "trtconvert measure" in refused.value.remedy and "attention.sparse to off" in refused.value.remedy
    row = {"mode": 2, "shape": [1, 2, 512, 512, 64], "density": 0.0, "ratio": 0.6}
    with pytest.raises(UserError, match="does not hold times"):
        KernelCost.load(table_without(tmp_path / "bad.json", "masked", masked=[row]))


@pytest.mark.parametrize("modes", ["auto", "precision"])
def test_tables_without_masks_are_refused_before_the_calibration(tmp_path, modes):
    path = table_without(tmp_path / "old.json", "masked")
    sparse = "auto" if modes == "auto" else 0.01
    recipe = tiny_recipe(tmp_path, model={"source": "tiny_sparse:build"}, attention={"modes": modes, "sparse": sparse})
    content = json.loads(recipe.read_text()) | {"plan": {"kernel_cost": path.name}}
    recipe.write_text(json.dumps(content))
    outcome = run("build", recipe, "-o", tmp_path / "bundle", "--cache", tmp_path / "cache")
    refusal(outcome, "cannot price the block masks")
    assert not list((tmp_path / "cache").glob("observed-*"))


def test_choices_are_priced_by_their_density():
    cost = KernelCost.load(masks=True)
    seconds = torch.tensor([cost.seconds(SHAPE, mode) for mode in Mode], dtype=torch.float64)
    masked, dense = attention_units({"a": "dynamic", "b": "dynamic"}, Mode, ["a"], SHARES)
    assert masked.choices == tuple(Choice(mode, share) for share in LEVELS for mode in Mode)
    found = attention_seconds(cost, SHAPE, masked, blocks_of((0.8, 0.4)), BINS).view(BINS, len(LEVELS), len(Mode))
    assert torch.equal(found[:, 0], seconds.expand(BINS, -1))
    assert found[0, 2, 2] < found[0, 1, 2] < found[0, 3, 2]
    assert found[0, 2, 2] == pytest.approx(float(seconds[2]) * cost.masked_ratio(SHAPE, Mode.BALANCED, 0.4))
    assert found[1, 1:3].isinf().all()  # no block can be skipped
    assert (found[1, 3] > seconds).all()  # a mask of all blocks takes longer
    assert torch.equal(attention_seconds(cost, SHAPE, dense, None, BINS), seconds.expand(BINS, -1))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("limit", [1e-3, 0.3, 1.5])
def test_no_plan_with_masks_is_faster(seed, limit):
    """Against the enumeration of all plans: a site has a mask in all bins or in none."""
    generator = torch.Generator().manual_seed(seed)
    every = [Choice(mode, share) for share in LEVELS for mode in Mode]
    dense = every[: len(Mode)]
    cost, time = (torch.rand(2, BINS, len(every), generator=generator, dtype=torch.float64) for _ in range(2))
    kept = [index for index, choice in enumerate(every) if choice.mode in (Mode.FP16, Mode.BALANCED)]
    cost[..., [index for index in range(len(every)) if index not in kept]] = math.inf
    cost[..., [choice.exact for choice in every]] = 0
    cost[1, :, len(dense) :] = math.inf  # the second site has no masks
    rows = fastest(cost, time, limit, [[choice.form for choice in choices] for choices in (every, dense)])
    assert len({index >= len(dense) for index in rows[0].tolist()}) == 1

    def total(values, choices):
        return sum(float(values[s, t, choices[s][t]]) for s in range(2) for t in range(BINS))

    pairs = list(itertools.product(kept, repeat=BINS))
    feasible = [
        total(time, (first, second))
        for first in pairs
        if len({index >= len(dense) for index in first}) == 1
        for second in pairs
        if total(cost, (first, second)) <= limit
    ]
    assert total(cost, rows) <= limit * (1 + 1e-6)
    assert total(time, rows) == pytest.approx(min(feasible), rel=1e-6)


def searched(min_psnr, density=(0.6, 0.2), steps=(0.5, 0.5), allowed=(Mode.FP16, Mode.BALANCED)):
    """A search over a site with masks and a site without, with the table's times."""
    cost = KernelCost.load(masks=True)
    blocks = {"a": blocks_of(density)}
    units = attention_units({"a": "dynamic", "b": "dynamic"}, allowed, blocks, SHARES)
    seconds = [attention_seconds(cost, SHAPE, unit, blocks.get(unit.name), BINS) for unit in units]
    error = torch.full((2, BINS, len(units[0].choices)), math.nan, dtype=torch.float64)
    of_modes, of_levels = (0.0, 1e-6, 2e-6, 4e-6, 8e-6), dict(zip(LEVELS, (0.0, 1e-5, 1e-3, 0.0), strict=True))
    for row, unit in enumerate(units):
        for column, choice in enumerate(unit.choices):
            error[row, :, column] = of_modes[choice.mode] + of_levels[choice.mask_share]
    return points_of(units, error, seconds, steps, min_psnr)


def fastest_kept(points) -> PlanPoint:
    return next(point for point in points if point.keeps_budget and point.allowed)


@pytest.mark.parametrize(("min_psnr", "share"), [(25.0, 0.1), (45.0, 0.01), (70.0, None)])
def test_the_search_leaves_out_what_the_budget_allows(min_psnr, share):
    points, _ = searched(min_psnr)
    chosen = fastest_kept(points)
    assert chosen.sparse == ({"a": [share, 0.0]} if share else {})  # in the last bin no block can be skipped
    dense = [point for point in points if point.keeps_budget and point.allowed and not point.sparse]
    assert dense and (chosen.speed > dense[0].speed if share else chosen.speed == dense[0].speed)
    names = [point.name for point in points]
    assert (
        any(name.endswith(", block masks") for name in names)
        and "balanced everywhere, 0.1 of attention left out" in names
    )


def test_masks_that_gain_no_time_are_not_chosen():
    points, _ = searched(25.0, density=(1.0, 0.98))
    assert fastest_kept(points).sparse == {}


def test_bins_without_steps_keep_all_blocks_in_full_precision():
    points, sampled = searched(25.0, steps=(1.0, 0.0))
    assert fastest_kept(points).sparse == {"a": [0.1, 0.0]}
    for plan in sampled:
        assert all(made.choices[1].exact for made in plan.attention.values())


def test_a_stated_share_is_taken_where_it_gains_time():
    sites = [Site(name, 24, 24, 128, 0.1, False, 16384, 16384) for name in ("few", "many", "none")]
    dense_plan = {site.name: Decision((Choice(Mode.PRECISION), Choice(Mode.FP16)), "dynamic") for site in sites}
    blocks = {"few": blocks_of((0.4,)), "many": blocks_of((1.0,))}
    found, dense = stated_blocks(0.01, PlanSection(), sites, dense_plan, blocks, 1, [3, 3])
    masked = Decision((Choice(Mode.PRECISION, 0.01), Choice(Mode.FP16, 0.0)), "dynamic")
    assert found == dense_plan | {"few": masked} and masked.shares == [0.01, 0.0]
    assert dense == {"many": "100% of its blocks are needed, too many to gain time"}


@pytest.mark.parametrize(("calls", "gains"), [([1, 9], False), ([5, 1], True), ([1, 0], True), ([0, 1], False)])
def test_a_stated_share_is_judged_by_the_steps_that_the_calibration_saw(calls, gains):
    """A mask gains a little in the first bin and only costs in the last, where one of two denoisers has no step."""
    site = Site("a", 24, 24, 128, 0.1, False, 16384, 16384)
    plan = {"a": Decision((Choice(Mode.PRECISION),) * BINS)}
    found, dense = stated_blocks(0.01, PlanSection(), [site], plan, {"a": blocks_of((0.8,))}, 1, calls)
    assert bool(found["a"].shares) == gains != bool(dense)


def test_a_mode_that_was_not_measured_is_judged_by_another(tmp_path):
    """Tables that are older than FP8."""
    table = json.loads(KERNEL_COST.read_text(encoding="utf-8"))
    rows = [row for row in table["rows"] if row["mode"] != Mode.FP8]
    (tmp_path / "old.json").write_text(json.dumps(table | {"rows": rows}))
    site, plan = Site("a", 24, 24, 128, 0.1, False, 16384, 16384), {"a": Decision((Choice(Mode.FP8),) * BINS)}
    section = PlanSection(kernel_cost=tmp_path / "old.json")
    found, _ = stated_blocks(0.01, section, [site], plan, {"a": blocks_of((0.2,))}, 1, [1, 1])
    assert found["a"].shares == [0.01, 0.0]


@pytest.fixture(scope="module")
def local():
    return tiny_sparse.build()


@pytest.fixture(scope="module")
def calibration(local, tmp_path_factory):
    sites = parts_to_convert(local, AttentionSection(), LayersSection(modes="off")).sites
    section = CalibrationSection(samples=2, batch=2, steps=4, bins=BINS)
    return calibrate(local, section, "x", sites, tmp_path_factory.mktemp("work"), Quiet(), shares=SHARES)


def test_sensitivities_of_masks_are_the_errors_that_they_make(local, calibration):
    modes = torch.full((BINS,), int(Mode.FP16), dtype=torch.int32)
    tables = {site: AttentionTables(**named, modes=modes) for site, named in calibration.tables.items()}
    sites = Int8Sites(tables, 1000.0, "dynamic", True)
    units = attention_units(dict.fromkeys(tables, "dynamic"), [Mode.FP16, Mode.BALANCED], calibration.blocks, SHARES)
    found = measure_sensitivity(local, units, sites, BINS, blocks=calibration.blocks, seeds=range(7, 8), steps=BINS)
    name = units[0].name

    def error(mode, share=None):
        """[sites, T]"""
        return found.error[..., units[0].choices.index(Choice(mode, share))]

    assert all(torch.equal(error(mode, 0.0), error(mode)) for mode in (Mode.FP16, Mode.BALANCED))
    low, high = (error(Mode.FP16, share) for share in SHARES)
    torch.testing.assert_close(error(Mode.BALANCED, SHARES[0]), error(Mode.BALANCED) + low)
    assert (high[:, 0] > low[:, 0]).all() and (low[:, 0] > 0).all()

    # The error of a mask alone, computed by the specification in mode FP16.
    masked = replace(sites, masks={name: calibration.blocks[name].level(SHARES[1])})
    squares = []

    def watched(*inputs, **named):
        exact = local.denoiser(*inputs, **named)
        alone = intercepted(local, lambda call: masked.attention(call) if call.name == name else call.exact())
        if float(inputs[1][0]) < 500:
            squares.append((alone(*inputs, **named) - exact).double().square().mean())
        return exact

    with torch.no_grad():
        local.sample(watched, range(7, 8), steps=BINS, solver="ddim")
    assert float(torch.stack(squares).mean()) == pytest.approx(float(high[0, 0]), rel=1e-3)


def test_masks_follow_the_plan(local, calibration):
    """Sites with a plan's masks compute exact attention to their blocks."""
    shares = Decision((Choice(Mode.FP16, 0.1), Choice(Mode.FP16, 0.0))).shares
    assert shares == [0.1, 0.0]
    mask = calibration.blocks["denoiser"].mask(shares)
    tables = AttentionTables(**calibration.tables["denoiser"], modes=torch.zeros(BINS, dtype=torch.int32))
    sites = Int8Sites({"denoiser": tables}, 1000.0, "calibrated", True, masks={"denoiser": mask})
    seen = []

    def attend(call):
        if call.name != "denoiser":
            return call.exact()
        chosen = expand_blocks(mask[[1, 0]], 640, 640)
        expected = torch.nn.functional.scaled_dot_product_attention(call.q, call.k, call.v, chosen, scale=call.scale)
        seen.append((sites.attention(call) - expected).abs().max() / expected.abs().max())
        return expected

    with torch.no_grad():
        intercepted(local, attend)(torch.randn(2, 1, 16, 40), torch.tensor([900.0, 100.0]))
    assert seen and max(seen) < 1e-5
