"""The plan's search: optimal for its error model, faithful to its budget, and its sensitivities true to the model."""

import ctypes
import importlib.util
import itertools
import json
import math

import pytest
import scipy.optimize
import torch
from decided import layer_unit, points_of
from found_sites import sites_to_convert
from support import Quiet, refusal, reused, run, tiny_recipe

from trtconvert.attention.modes import Mode
from trtconvert.attention.reference import AttentionTables, tables_from_data
from trtconvert.attention.schedules import compute_sigma_schedule
from trtconvert.bundle import read_manifest
from trtconvert.calib.budget import Measure, limits
from trtconvert.calib.candidates import attention_units
from trtconvert.calib.cost import ALWAYS_MEASURED, AttentionShape, KernelCost
from trtconvert.calib.frontier import Frontier, PlanPoint, read_frontier, usual_drawings
from trtconvert.calib.identity import KERNEL_COST
from trtconvert.calib.knapsack import fastest
from trtconvert.calib.plan import search_plan
from trtconvert.calib.search_space import site_scalings
from trtconvert.calib.sensitivity import Sensitivity, measure_sensitivity
from trtconvert.errors import UserError
from trtconvert.evaluate.metrics import feature_distance
from trtconvert.models.denoiser import intercepted
from trtconvert.quant.forward import Int8Sites
from trtconvert.recipe import AttentionSection, PlanSection

SITES = {"a": "dynamic", "b": "dynamic"}
"""Sites and their scalings."""
BINS = 2
ONE_FORM = [["dense"] * len(Mode)] * len(SITES)


def random_choices(seed):
    generator = torch.Generator().manual_seed(seed)
    cost = torch.rand(len(SITES), BINS, len(Mode), generator=generator, dtype=torch.float64)
    cost[..., Mode.FP16] = 0
    time = 1 + torch.rand(len(SITES), BINS, len(Mode), generator=generator, dtype=torch.float64)
    return cost, time


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("limit", [1e-3, 0.5, 1.5, 10.0])
def test_no_plan_within_the_limit_is_faster(seed, limit):
    cost, time = random_choices(seed)
    chosen = fastest(cost, time, limit, ONE_FORM)[..., None]
    assert cost.gather(-1, chosen).sum() <= limit * (1 + 1e-6)
    feasible = [
        sum(time[s, t, modes[s * BINS + t]] for s in range(2) for t in range(BINS))
        for modes in itertools.product(Mode, repeat=len(SITES) * BINS)
        if sum(cost[s, t, modes[s * BINS + t]] for s in range(2) for t in range(BINS)) <= limit
    ]
    assert float(time.gather(-1, chosen).sum()) == pytest.approx(float(min(feasible)), rel=1e-6)


@pytest.mark.parametrize("most", [0.1, 0.5, 1.0])
def test_no_plan_within_the_limit_of_each_bin_is_faster(most):
    cost, time = random_choices(0)
    second, _ = random_choices(1)
    chosen = fastest(cost, time, 1.5, ONE_FORM, (second, most))[..., None]
    assert (second.gather(-1, chosen).sum((0, 2)) <= most * (1 + 1e-6)).all()
    feasible = []
    for modes in itertools.product(Mode, repeat=len(SITES) * BINS):
        taken = torch.tensor(modes).view(len(SITES), BINS, 1)
        of_bins = second.gather(-1, taken).sum((0, 2))
        if cost.gather(-1, taken).sum() <= 1.5 and (of_bins <= most).all():
            feasible.append(float(time.gather(-1, taken).sum()))
    assert float(time.gather(-1, chosen).sum()) == pytest.approx(min(feasible), rel=1e-6)


def test_limits_far_from_one_are_kept():
    cost, time = random_choices(0)
    for scale in (1e-9, 1e9):
        scaled = fastest(cost * scale, time, 0.5 * scale, ONE_FORM)
        assert torch.equal(scaled, fastest(cost, time, 0.5, ONE_FORM))


def test_the_solver_leaves_the_standard_output_to_results(capfd, monkeypatch):
    """On larger problems HiGHS prints lines through C's stdout."""
    solve = scipy.optimize.milp

    def noisy(*given, **options):
        ctypes.CDLL(None).puts(b"of the solver")
        return solve(*given, **options)

    monkeypatch.setattr(scipy.optimize, "milp", noisy)
    fastest(*random_choices(0), 0.5, ONE_FORM)
    print("result", flush=True)
    found = capfd.readouterr()
    assert found.out == "result\n" and "of the solver" in found.err


def searched(*budget, distance=0.0, allowed=tuple(Mode), steps=(0.5,) * BINS, fp8=math.inf, together=1, named=None):
    """A search over two sites whose error model is off by a factor of three, as real ones may be.

    Args:
        budget: limits of PSNR, and perhaps of a second figure, which is `distance` for every plan with an aggressive mode.
        steps: share of the steps in each bin. Samples do not depend on the modes of a bin without steps.
        fp8: time of both sites in this mode; None: unknown, as in older tables.
        together: number of plans that are measured at once, ahead of the search; 1: none.
        named: of a fixed plan to sample.
    """
    cost, _ = random_choices(1)
    seconds = torch.tensor([[4.0, 3.0, 2.0, 1.0, fp8], [8.0, 7.0, 5.0, 4.0, fp8]], dtype=torch.float64)
    seen = torch.tensor(steps, dtype=torch.float64)
    cost = cost * (seen > 0)[:, None]
    units = attention_units(SITES, allowed)
    ones = torch.ones(BINS, dtype=torch.float64)
    sensitivity = Sensitivity(units, cost * 1e-3, ones, seen, ones)
    kinds = (("psnr", True), ("lpips", False))
    measures = [
        Measure(name, lambda *_: 0.0, higher, limit) for (name, higher), limit in zip(kinds, budget, strict=False)
    ]

    known, expected, calls = [], usual_drawings(masks=False), 0

    def ahead(plans, needed):
        known.extend(plans)
        assert needed <= len(plans) <= max(needed, together)

    def more(count):
        nonlocal expected
        expected += count

    def measure(plan):
        nonlocal calls
        calls += 1
        assert together <= 2 or plan in known  # two processes bisect once at a time
        chosen = torch.tensor([plan.attention[site].modes for site in SITES])
        error = 3 * float((cost * 1e-3).gather(-1, chosen.long()[..., None]).sum())
        psnr = 150.0 if error == 0 else float(-10 * torch.tensor(error).log10())
        return {"psnr": psnr, "lpips": distance if (chosen == Mode.AGGRESSIVE).any() else 0.0}

    times = list(seconds[:, None].expand(-1, BINS, -1))
    points = search_plan(
        sensitivity, times, compute_sigma_schedule(1000, "linear"), measures, measure, named=named, more=more,
        ahead=ahead, together=together,
    )  # fmt: skip
    # The last plans that are measured at once may not all be needed.
    assert calls <= expected < calls + together
    return Frontier(gpu="", date="", limits=limits(measures), points=points)


@pytest.mark.parametrize("together", [2, 3, 7, 8])
@pytest.mark.parametrize("psnr", [20.0, 35.0, 200.0])
def test_plans_that_are_measured_at_once_are_those_of_one_after_the_other(psnr, together):
    assert searched(psnr, together=together) == searched(psnr)


@pytest.mark.parametrize("psnr", [20.0, 35.0, 200.0])
def test_the_chosen_plan_is_the_fastest_sampled_one_that_keeps_the_budget(psnr):
    frontier = searched(psnr)
    best = frontier.choose(None)
    if psnr > 150:  # above the PSNR of equal samples
        assert best.name == "fp16 everywhere"
    else:
        assert best.psnr >= psnr
    assert all(p.psnr < psnr for p in frontier.points if p.speed > best.speed)
    assert frontier.points == sorted(frontier.points, key=lambda p: (-p.speed, -p.psnr))
    assert next(p for p in frontier.points if p.name == "fp16 everywhere").speed == 1.0


@pytest.mark.parametrize("factor", [0.3, 1.0, 3.0], ids=["modelled too large", "as modelled", "modelled too small"])
def test_the_search_finds_the_fastest_plan_within_a_limit_on_predictions(factor):
    """The limit is kept although modelled errors are off by a factor, and no slower than with a model that is right."""
    units = [*attention_units({"site": "dynamic"}, {Mode.FP16}), *(layer_unit(f"layer {index}") for index in range(12))]
    error = torch.full((len(units), BINS, len(Mode)), math.inf, dtype=torch.float64)
    error[..., 0] = 0
    generator = torch.Generator().manual_seed(2)
    error[1:, :, 1] = 1e-4 * torch.rand(12, BINS, generator=generator, dtype=torch.float64)
    power, ones = torch.tensor([1.0, 0.25], dtype=torch.float64), torch.ones(BINS, dtype=torch.float64)
    sensitivity = Sensitivity(units, error, ones, ones / BINS, power)
    seconds = [torch.tensor([[4.0] + [math.inf] * (len(Mode) - 1)] * BINS, dtype=torch.float64)]
    seconds += [torch.tensor([[4.0, 1.0 + index / 8]] * BINS, dtype=torch.float64) for index in range(12)]

    def measured(plan):
        return {"psnr": 50.0, "prediction_error": factor * float(sensitivity.prediction_error(plan).max())}

    budget = [Measure("psnr", lambda *_: 0.0, True, 30.0), Measure("prediction_error", None, False, 0.02)]
    points = search_plan(sensitivity, seconds, compute_sigma_schedule(1000, "linear"), budget, measured)
    best = Frontier(gpu="", date="", limits=limits(budget), points=points).choose(None)
    assert best.figures["prediction_error"] <= 0.02

    def feasible(taken):  # a layer is INT8 in both bins or in none
        of_bins = torch.stack([error[1 + i, :, 1] for i in taken]).sum(0) / power if taken else torch.zeros(BINS)
        return factor * float(of_bins.max().sqrt()) <= 0.02

    subsets = itertools.chain.from_iterable(itertools.combinations(range(12), count) for count in range(13))
    saved = max(sum(3 - i / 8 for i in taken) for taken in subsets if feasible(taken))
    of_search = sum(3 - index / 8 for index in range(12) if any(best.layers[f"layer {index}"]))
    assert of_search == pytest.approx(saved)


@pytest.mark.parametrize("psnr", [20.0, 35.0, 200.0])
def test_fixed_plans_that_cannot_be_chosen_are_not_sampled(psnr):
    frontier = searched(psnr)
    best = frontier.choose(None)
    of_search = ("model", "search", *(f"{mode.name.lower()} everywhere" for mode in Mode))
    others = [point for point in frontier.points if not point.name.startswith(of_search)]
    assert all(point.speed >= best.speed for point in others)
    assert any(point.name == "sigma rule" for point in searched(psnr, named="sigma rule").points)


@pytest.mark.parametrize("psnr", [15.0, 33.0, 48.0, 70.0])
def test_the_chosen_plan_is_as_fast_as_the_fastest_of_a_modelled_error_that_is_little_smaller(psnr):
    """Little is 0.2 decades, wherever the budget lies."""
    generator = torch.Generator().manual_seed(0)
    units = [*attention_units({"site": "dynamic"}, {Mode.FP16}), *(layer_unit(f"layer {index}") for index in range(24))]
    error = torch.full((len(units), 1, len(Mode)), math.inf, dtype=torch.float64)
    error[..., 0] = 0
    error[1:, 0, 1] = 10 ** (-8 + 6 * torch.rand(24, generator=generator, dtype=torch.float64))
    seconds = torch.full((len(units), 1, len(Mode)), math.inf, dtype=torch.float64)
    seconds[..., 0] = 4
    seconds[1:, 0, 1] = 3 * torch.rand(24, generator=generator, dtype=torch.float64)
    of_units = [of_unit[:, : len(unit.choices)] for unit, of_unit in zip(units, seconds, strict=True)]
    points, _ = points_of(units, error, of_units, [1.0], psnr)
    chosen = Frontier(gpu="", date="", limits={"psnr": psnr}, points=points).choose(None)
    forms = [[choice.form for choice in unit.choices] for unit in units]
    best = fastest(error, seconds, 10 ** (-psnr / 10 - 0.2), forms)
    assert chosen.psnr >= psnr
    assert chosen.speed >= float(seconds[..., 0].sum() / seconds.gather(-1, best[..., None]).sum()) - 1e-9


@pytest.mark.parametrize("mode", [Mode.PRECISION, Mode.BALANCED])
def test_a_search_chooses_among_its_candidates(mode):
    """Aggressive is the fastest and within the budget, but only a named plan may have modes that are no candidates."""
    assert "aggressive" not in {p.name.split()[0] for p in searched(20.0, allowed=(Mode.FP16, mode)).points}
    frontier = searched(20.0, allowed=(Mode.FP16, mode), named="aggressive everywhere")
    chosen = frontier.choose(None)
    assert {m for row in chosen.modes.values() for m in row} == {int(mode)}
    assert next(p for p in frontier.points if p.name == "aggressive everywhere").keeps_budget
    of_the_search = [p for p in frontier.points if p.name.startswith(("model", "search"))]
    assert of_the_search and all({m for row in p.modes.values() for m in row} <= {0, int(mode)} for p in of_the_search)
    assert frontier.choose("aggressive everywhere").speed > chosen.speed


def test_fp8_is_chosen_where_it_is_a_candidate_and_has_a_time():
    without = tuple(mode for mode in Mode if mode != Mode.FP8)
    chosen = searched(20.0, fp8=0.5).choose(None)
    assert {m for row in chosen.modes.values() for m in row} == {int(Mode.FP8)} and chosen.allowed
    assert chosen.int8_values == 0  # its second product is not in INT8
    assert searched(20.0, fp8=0.5, allowed=(Mode.FP16, Mode.AGGRESSIVE)).choose(None).int8_values == 1

    # Not a candidate, but of known time: sampled if it is named.
    compared = searched(20.0, fp8=0.5, allowed=without, named="fp8 everywhere")
    uniform = next(point for point in compared.points if point.name == "fp8 everywhere")
    assert uniform.keeps_budget and not uniform.allowed and uniform.speed > compared.choose(None).speed
    others = [point for point in compared.points if point is not uniform]
    assert others and not any(int(Mode.FP8) in row for point in others for row in point.modes.values())

    # A mode of unknown time is never sampled, candidate or not.
    for allowed in (without, tuple(Mode)):
        unknown = searched(20.0, allowed=allowed, named="fp8 everywhere")
        assert not any(int(Mode.FP8) in row for point in unknown.points for row in point.modes.values())
        assert all(math.isfinite(point.speed) for point in unknown.points) and unknown.choose(None).speed > 1


@pytest.mark.parametrize("unseen", range(BINS))
def test_no_plan_leaves_fp16_where_no_step_was_measured(unseen):
    """Fixed plans are FP16 there, too: with other steps the model reaches the bin, where no mode was measured."""
    frontier = searched(20.0, steps=[float(index != unseen) for index in range(BINS)])
    names = {point.name for point in frontier.points}
    assert {"fp16 everywhere", "balanced everywhere", "aggressive everywhere"} <= names
    assert all(row[unseen] == Mode.FP16 for point in frontier.points for row in point.modes.values())
    fastest = frontier.choose(None)
    assert all(row[1 - unseen] == Mode.AGGRESSIVE for row in fastest.modes.values())


def test_every_figure_of_the_budget_must_be_kept():
    free, strict = searched(20.0, 0.01, distance=0.005), searched(20.0, 0.01, distance=0.02)
    aggressive = int(Mode.AGGRESSIVE)
    assert any(aggressive in row for row in free.choose(None).modes.values())
    kept = strict.choose(None)
    assert not any(aggressive in row for row in kept.modes.values()) and kept.speed > 1
    assert strict.limits == {"psnr": 20.0, "lpips": 0.01}


def test_a_named_plan_is_chosen_if_it_keeps_the_budget():
    frontier = searched(35.0)
    assert frontier.choose("fp16 everywhere").name == "fp16 everywhere"
    with pytest.raises(UserError, match="'nothing' was not tried") as refused:
        frontier.choose("nothing")
    assert "fp16 everywhere (1.000×" in refused.value.expected
    missed = next(p for p in frontier.points if not p.keeps_budget)
    with pytest.raises(UserError, match="exceeds the budget") as refused:
        frontier.choose(missed.name)
    assert refused.value.got.startswith("psnr ") and "psnr 35" in refused.value.expected


def test_nan_keeps_no_limit():
    assert not Measure("psnr", lambda *_: 0.0, True, 30.0).keeps(float("nan"))
    assert not Measure("lpips", lambda *_: 0.0, False, 0.1).keeps(float("nan"))
    assert Measure("lpips", lambda *_: 0.0, False, None).keeps(0.3)


@pytest.mark.parametrize(
    ("content", "got"),
    [
        ("{", "Expecting property name"),
        ('{"gpu": "x", "date": "y", "rows": []}', "no rows"),
        ('{"gpu": "x", "rows": []}', "date: Field required"),
        ("null", "valid dictionary"),
        (
            '{"gpu": "x", "date": "y", "rows": [{"mode": 0, "shape": [1, 1, 8, 8, 64], "seconds": 1}]}',
            "no times of precision",
        ),
        ('{"gpu": "x", "date": "y", "rows": [{"mode": 7, "shape": [1, 1, 8, 8, 64], "seconds": 1}]}', "rows.0.mode"),
        ('{"gpu": "x", "date": "y", "rows": [1]}', "rows.0"),
    ],
)
def test_other_files_than_tables_of_costs_are_refused(tmp_path, content, got):
    path = tmp_path / "cost.json"
    path.write_text(content)
    with pytest.raises(UserError, match=r"cost\.json does not hold times") as refused:
        KernelCost.load(path)
    assert got in refused.value.got and "trtconvert measure" in refused.value.expected


@pytest.mark.parametrize(
    ("field", "wrong"),
    [("shape", wrong) for wrong in ([], [0] * 7, [-1] * 6, [10**200] * 3, ["64"] * 5)]
    + [("time", wrong) for wrong in (math.nan, math.inf, -1, "1e-5", True, 10**400)]
    + [("mode", None)],
)
def test_damaged_rows_of_costs_are_named(tmp_path, field, wrong):
    path = tmp_path / "cost.json"
    whole = json.loads(KERNEL_COST.read_text(encoding="utf-8"))
    for name, time in (("rows", "seconds"), ("masked", "ratio"), ("layers", "seconds"), ("convs", "seconds")):
        damaged = time if field == "time" else field
        first, *others = whole[name]
        path.write_text(json.dumps(whole | {name: [first | {damaged: wrong}, *others]}))
        with pytest.raises(UserError, match=r"cost\.json does not hold times") as refused:
            KernelCost.load(path)
        assert f"{name}.0.{damaged}" in refused.value.got


def test_the_cost_table_orders_modes_by_work_and_interpolates():
    costs = KernelCost.load()
    assert costs.gpu and costs.date

    def at(tokens, mode):
        return costs.seconds(AttentionShape(1, 24, tokens, tokens, 128), mode)

    for mode in (mode for mode in Mode if math.isfinite(at(4096, mode))):
        assert at(4096, mode) < at(8192, mode) < at(16384, mode)
        assert at(32768, mode) == pytest.approx(4 * at(16384, mode))
        assert at(16, mode) == at(8, mode)  # launch and latency
    assert at(16384, Mode.AGGRESSIVE) < at(16384, Mode.FP16)
    assert all(math.isfinite(at(4096, mode)) for mode in ALWAYS_MEASURED)


def old_table(path, *, fp8=()):
    """The program's own times, with FP8 only at some head sizes."""
    table = json.loads(KERNEL_COST.read_text(encoding="utf-8"))
    old = [row for row in table["rows"] if row["mode"] != Mode.FP8]
    new = [row | {"mode": int(Mode.FP8)} for row in old if row["mode"] == Mode.AGGRESSIVE and row["shape"][-1] in fp8]
    path.write_text(json.dumps(table | {"rows": old + new}))
    return path


def test_a_table_without_fp8_serves_plans_without_it(tmp_path):
    shapes = [AttentionShape(1, 8, 4096, 4096, dim) for dim in (64, 128)]
    old = KernelCost.load(old_table(tmp_path / "old.json"), ALWAYS_MEASURED)
    assert [math.isinf(old.seconds(shape, mode)) for shape in shapes for mode in Mode] == [
        m == Mode.FP8 for m in Mode
    ] * 2
    part = KernelCost.load(old_table(tmp_path / "part.json", fp8=(128,)))
    assert [math.isfinite(part.seconds(shape, Mode.FP8)) for shape in shapes] == [False, True]
    new = KernelCost.load(old_table(tmp_path / "new.json", fp8=(40, 64, 128)), tuple(Mode))
    assert all(math.isfinite(new.seconds(shape, mode)) for shape in shapes for mode in Mode)
    for name, got in (("old", "no times of fp8 at head size 40"), ("part", "no times of fp8 at head size 40")):
        with pytest.raises(UserError, match=rf"{name}\.json cannot price a mode") as refused:
            KernelCost.load(tmp_path / f"{name}.json", (Mode.FP16, Mode.FP8))
        assert got in refused.value.got and "trtconvert measure" in refused.value.remedy


def test_attention_to_a_prompt_has_times_of_its_own_where_they_were_measured():
    own = [
        {"mode": int(mode), "shape": [1, 8, n, n, 64], "seconds": n * 1e-8 / (1 + mode)}
        for mode in ALWAYS_MEASURED
        for n in (256, 4096)
    ]
    prompts = [
        {"mode": int(mode), "shape": [1, 8, n, 77, 64], "seconds": n * 1e-9 * (1 + mode)}
        for mode in ALWAYS_MEASURED
        for n in (1024, 4096)
    ]
    both, without = (KernelCost({"gpu": "", "date": "", "rows": rows}) for rows in (own + prompts, own))

    def fastest(costs, queries, keys):
        shape = AttentionShape(1, 8, queries, keys, 64)
        return min(Mode, key=lambda mode: costs.seconds(shape, mode))

    assert fastest(both, 2048, 77) == fastest(both, 2048, 128) == Mode.FP16
    # More keys, few tokens, and older tables.
    assert {fastest(both, 2048, 129), fastest(both, 64, 64), fastest(without, 2048, 77)} == {Mode.AGGRESSIVE}
    assert both.seconds(AttentionShape(1, 8, 4096, 77, 64), Mode.PRECISION) == pytest.approx(4096 * 2e-9)
    assert "to prompts" in KernelCost({"gpu": "", "date": "", "rows": own + prompts[:2]})._lacking()


def timed(calibrated):
    """Times of self-attention with 256 and 4,096 tokens; BALANCED also with calibrated scales."""
    rows = [
        {"mode": int(mode), "shape": [1, 8, n, n, 64], "seconds": n * 1e-8}
        for mode in ALWAYS_MEASURED
        for n in (256, 4096)
    ]
    also = [
        {"mode": 2, "shape": [1, 8, n, n, 64], "seconds": seconds, "scaling": "calibrated"}
        for n, seconds in calibrated.items()
    ]
    return {"gpu": "", "date": "", "rows": rows + also}


def test_scales_are_measured_where_that_is_no_slower():
    shapes = [AttentionShape(1, 8, n, n, 64) for n in (256, 4096)]
    costs = KernelCost(timed({256: 256e-8 * 0.99, 4096: 4096e-8 * 0.9}))  # a percent is noise
    assert [costs.scaling(shape, [Mode.FP16, Mode.BALANCED]) for shape in shapes] == ["dynamic", "calibrated"]
    assert [costs.scaling(shape, [Mode.PRECISION, Mode.AGGRESSIVE]) for shape in shapes] == ["dynamic", "dynamic"]
    both = [costs.seconds(shapes[1], Mode.BALANCED, scaling) for scaling in ("dynamic", "calibrated")]
    assert both == pytest.approx([4096e-8, 4096e-8 * 0.9])


@pytest.mark.parametrize(
    ("scaling", "modes", "expected"),
    [
        ("auto", "auto", "calibrated"),
        ("auto", "precision", "dynamic"),  # without times of calibrated scales
        ("auto", ["precision", "balanced"], "calibrated"),
        ("auto", "sigma-rule", "calibrated"),
        ("dynamic", "balanced", "dynamic"),
        ("calibrated", "balanced", "calibrated"),
    ],
)
def test_each_site_has_its_scaling(tmp_path, digits, scaling, modes, expected):
    (tmp_path / "cost.json").write_text(json.dumps(timed({256: 1e-9, 4096: 1e-9})))
    section = PlanSection(kernel_cost=tmp_path / "cost.json", candidates=["balanced"])
    sites, _ = sites_to_convert(digits, AttentionSection())
    found = site_scalings(AttentionSection(scaling=scaling, modes=modes), section, sites, 1)
    assert found == {site.name: expected for site in sites}


def test_scales_are_chosen_at_the_batch_of_the_engine(tmp_path):
    """Between one and eight samples measured scales become slower; the model's own opt batch is 2."""
    rows = [
        {"mode": int(mode), "shape": [batch, 1, 16, 16, 32], "seconds": batch * 1e-6}
        for mode in ALWAYS_MEASURED
        for batch in (1, 8)
    ]
    rows += [
        {"mode": 2, "shape": [batch, 1, 16, 16, 32], "seconds": batch * 1e-6 * ratio, "scaling": "calibrated"}
        for batch, ratio in ((1, 0.99), (8, 0.9))
    ]
    (tmp_path / "cost.json").write_text(json.dumps({"gpu": "", "date": "", "rows": rows}))
    found = []
    for batch in (2, 1):
        recipe = tiny_recipe(
            tmp_path,
            attention={"modes": "balanced", "scaling": "auto"},
            plan={"kernel_cost": "cost.json"},
            engine={"shapes": {"batch": batch}},
        )
        outcome = run("build", recipe, "-o", tmp_path / "bundle", "--cache", tmp_path / "cache")
        assert outcome.exit_code == 0, outcome.output
        found += [site.scaling for site in read_manifest(tmp_path / "bundle").components["denoiser"].sites]
    assert found == ["calibrated", "dynamic"]


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
    bar = Quiet()
    scalings = dict.fromkeys(chosen, "calibrated")
    measured = measure_sensitivity(
        digits, attention_units(scalings, Mode), sites, BINS, seeds=range(4), steps=4, bar=bar
    )
    assert bar.done == bar.told == BINS + 1 + 2 * (len(Mode) - 1)
    assert not measured.error[..., Mode.FP16].any()
    assert (measured.error[..., Mode.PRECISION :] > 0).all() and (measured.gain > 0).all()
    assert measured.steps.sum() == 1

    # Excluded modes are neither measured nor chosen.
    units = attention_units(scalings, [Mode.FP16, Mode.BALANCED])
    some = measure_sensitivity(digits, units, sites, BINS, seeds=range(4), steps=4)
    assert torch.equal(some.error[..., Mode.BALANCED], measured.error[..., Mode.BALANCED])
    assert some.cost().isfinite().all((0, 1)).tolist() == [mode in (Mode.FP16, Mode.BALANCED) for mode in Mode]

    # The sum over single choices predicts the samples' error of all choices together within a factor of a few.
    everything = Int8Sites(
        {n: t.with_modes(Mode.AGGRESSIVE) for n, t in chosen.items()}, digits.timestep_max, "calibrated", True
    )
    with torch.no_grad():
        full = digits.sample(digits.denoiser, range(4), steps=4, solver="ddim")
        int8 = digits.sample(intercepted(digits, everything.handler()), range(4), steps=4, solver="ddim")
    seen = float((full - int8).double().square().mean())
    foretold = float(measured.cost()[..., Mode.AGGRESSIVE].sum())
    assert 0.1 < seen / foretold < 10


def planned(folder, **plan):
    """A build of the tiny model that searches its plan."""
    document = json.loads(tiny_recipe(folder, attention={"modes": "auto"}).read_text())
    document["plan"] = {"min_psnr": 25, "samples": 2, "steps": 4} | plan
    (folder / "recipe.yaml").write_text(json.dumps(document))
    outcome = run("build", folder / "recipe.yaml", "-o", folder / "bundle", "--cache", folder / "cache")
    modes = read_manifest(folder / "bundle").components["denoiser"].sites[0].modes if outcome.exit_code == 0 else []
    return outcome, modes


def test_a_recipe_sets_the_budget_and_chooses_among_the_plans(tmp_path):
    outcome, modes = planned(tmp_path, features="tiny_features:pixels")
    assert outcome.exit_code == 0, outcome.output
    frontier = read_frontier(tmp_path / "bundle" / "frontier.json")
    assert frontier.limits == {"psnr": 25.0, "prediction_error": 0.025} and frontier.gpu
    fastest = frontier.choose(None)
    assert frontier.chosen == fastest.name and fastest.modes["denoiser"] == modes
    assert all(point.figures.keys() == {"psnr", "feature_distance", "prediction_error"} for point in frontier.points)

    # A fixed plan that the search did not sample.
    outcome, modes = planned(tmp_path, features="tiny_features:pixels", point="balanced everywhere")
    assert modes == [Mode.BALANCED] * 2 and reused(outcome)["calibrate"]
    named = read_frontier(tmp_path / "bundle" / "frontier.json")
    assert named.chosen == "balanced everywhere" and len(named.points) == len(frontier.points) + 1

    # Another plan of the same search samples nothing again.
    slower = frontier.points[frontier.points.index(fastest) + 1].name
    outcome, _ = planned(tmp_path, features="tiny_features:pixels", point=slower)
    assert reused(outcome)["search"] == slower.startswith(("model", "search"))

    # A limit that this plan exceeds.
    (missed,) = (p.figures["feature_distance"] for p in named.points if p.name == "balanced everywhere")
    strict = {"features": "tiny_features:pixels", "max_feature_distance": missed / 2}
    outcome, _ = planned(tmp_path, **strict)
    assert outcome.exit_code == 0, outcome.output
    kept = read_frontier(tmp_path / "bundle" / "frontier.json").choose(None)
    assert kept.figures["feature_distance"] <= missed / 2 and kept.speed <= fastest.speed
    outcome, _ = planned(tmp_path, **strict, point="balanced everywhere")
    refusal(outcome, "'balanced everywhere' exceeds the budget", "feature_distance", "plan.point")


def test_a_plan_follows_the_times_of_the_gpu_that_it_is_for(tmp_path):
    fast = {"one": [4, 3, 0.5, 1], "other": [4, 1, 0.5, 3]}  # balanced is not among the default candidates
    for name, seconds in fast.items():
        rows = [{"mode": m, "shape": [1, 1, 16, 16, 32], "seconds": s * 1e-5} for m, s in enumerate(seconds)]
        (tmp_path / f"{name}.json").write_text(json.dumps({"gpu": name, "date": "2026-01-01", "rows": rows}))
        outcome, modes = planned(tmp_path, kernel_cost=f"{name}.json", min_psnr=10)
        assert modes == [seconds.index(1)] * 2, outcome.output
        assert read_frontier(tmp_path / "bundle" / "frontier.json").gpu == name


def test_fp8_is_chosen_by_times_that_hold_it_and_refused_without_them_before_the_calibration(tmp_path):
    candidates = ["precision", "fp8"]
    old_table(tmp_path / "old.json")
    outcome, _ = planned(tmp_path, candidates=candidates, kernel_cost="old.json")
    refusal(outcome, "cannot price a mode that the plan may choose", "no times of fp8", "trtconvert measure")
    rows = [{"mode": m, "shape": [1, 1, 16, 16, 32], "seconds": s * 1e-5} for m, s in enumerate((5, 3, 4, 2, 1))]
    (tmp_path / "new.json").write_text(json.dumps({"gpu": "", "date": "", "rows": rows}))
    outcome, modes = planned(tmp_path, candidates=candidates, kernel_cost="new.json", min_psnr=10)
    assert modes == [Mode.FP8] * 2, outcome.output
    assert not reused(outcome)["calibrate"]


def test_requirements_of_the_budget_are_checked_before_the_build(tmp_path, monkeypatch):
    refusal(planned(tmp_path, lpips_weights="none.pth")[0], "cannot read plan.lpips_weights", "none.pth")
    refusal(planned(tmp_path, kernel_cost="none.json")[0], "cannot read plan.kernel_cost", "none.json")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    refusal(planned(tmp_path, min_ssim=0.9)[0], "needs torchmetrics", "trtconvert[evaluate]")
    assert not (tmp_path / "cache").exists()
    monkeypatch.undo()
    refusal(planned(tmp_path, min_ssim=0.9)[0], "too small for SSIM", "got: 4 × 4")


def test_lpips_is_a_limit_when_its_weights_are_there(tmp_path, alexnet):
    outcome, _ = planned(tmp_path, lpips_weights=str(alexnet), max_lpips=0.5)
    assert outcome.exit_code == 0, outcome.output
    frontier = read_frontier(tmp_path / "bundle" / "frontier.json")
    assert frontier.limits == {"psnr": 25.0, "lpips": 0.5, "prediction_error": 0.025}
    assert all(0 <= point.figures["lpips"] < 2 for point in frontier.points)


def test_lpips_of_the_samples_is_a_gate(tmp_path, alexnet):
    def verified(**section):
        recipe = tiny_recipe(tmp_path, verify={"samples": 2, "steps": 2, "min_psnr": 1} | section)
        return run("build", recipe, "-o", tmp_path / "bundle", "--cache", tmp_path / "cache")

    refusal(verified(lpips_weights="none.pth"), "cannot read verify.lpips_weights", "none.pth")
    assert not (tmp_path / "cache").exists()
    missed = verified(lpips_weights=str(alexnet), max_lpips=1e-12)
    assert missed.exit_code == 1 and "gate missed: mean LPIPS of the samples" in missed.output
    passed = verified(lpips_weights=str(alexnet), max_lpips=1)
    assert passed.exit_code == 0 and "LPIPS of the samples" in passed.output, passed.output
    assert reused(passed)["verify"]
    quality = read_manifest(tmp_path / "bundle").quality
    assert 0 < quality.lpips <= quality.lpips_worst < 1


def test_feature_distance_is_that_of_unit_vectors():
    x = torch.tensor([[3.0, 0.0], [0.0, 2.0]])
    assert feature_distance(x, 5 * x) == 0
    assert feature_distance(x, -x) == pytest.approx(4)
    assert feature_distance(x, x.flip(1)) == pytest.approx(2)


def test_rivals_of_the_fastest_plan_leave_some_of_the_budget_to_steps():
    def point(name, speed, psnr, **named):
        return PlanPoint(
            name=name, speed=speed, figures={"psnr": psnr}, keeps_budget=psnr >= 30, int8_values=1.0, modes={"a": [1]}, **named
        )  # fmt: skip

    points = [
        point("misses", 2.5, 29),
        point("compared", 2.2, 50, allowed=False),
        point("fastest", 2.0, 31),
        point("slower", 1.9, 32),
        point("half", 1.8, 33.1),
        point("tenth", 1.5, 41),
        point("exact", 1.0, 99),
    ]
    frontier = Frontier(gpu="", date="", limits={"psnr": 30.0}, points=points)
    assert [rival.name for rival in frontier.rivals()] == ["fastest", "half", "tenth"]
    assert [rival.name for rival in frontier.model_copy(update={"limits": {"ssim": 0.9}}).rivals()] == ["fastest"]
    exact = frontier.model_copy(update={"points": points[-1:]})
    assert [rival.name for rival in exact.rivals()] == ["exact"]
