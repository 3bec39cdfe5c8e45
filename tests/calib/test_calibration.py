"""Calibration: ranges of tensors, percentiles, bins, the file, and refused data."""

import json
import math
import os
import re

import pytest
import tolerances
import torch
from found_sites import sites_to_convert

from trtconvert.attention.modes import Mode
from trtconvert.attention.ranges import CHANNEL_FLOOR, RangeObserver, Rows, offsets
from trtconvert.attention.reference import timestep_bin
from trtconvert.attention.sites import SiteCall
from trtconvert.bars import NoBar
from trtconvert.calib.calibrate import calibrate, load_calibration
from trtconvert.calib.calibration import Calibration, scales
from trtconvert.calib.candidates import attention_units
from trtconvert.calib.coverage import CoverageObserver
from trtconvert.calib.data import Drive
from trtconvert.calib.fixed_plans import stated_attention
from trtconvert.calib.frontier import Frontier, PlanPoint, read_frontier
from trtconvert.calib.histogram import (
    CHANNEL_BITS,
    HEAD_BITS,
    LEVELS,
    OCTAVES,
    Histogram,
    HistogramObserver,
    SiteHistograms,
)
from trtconvert.calib.knapsack import fastest
from trtconvert.calib.sensitivity import Sensitivity
from trtconvert.calib.shards import Shards
from trtconvert.diffusion_model import DiffusionModel
from trtconvert.errors import UserError
from trtconvert.models.denoiser import intercepted
from trtconvert.provenance import Provenance, read_provenance
from trtconvert.recipe import AttentionSection, CalibrationSection

SITE = "blocks.3.attn"
BINS = 4


def observe(model: DiffusionModel, drive: Drive, *, sites: list[str], bins: int) -> dict[str, Rows]:
    """Returns the rows of the named sites while `drive` runs the model once."""
    observer = RangeObserver(sites, model.timestep_max, bins)
    with torch.no_grad():
        drive(intercepted(model, observer))
    return observer.finish()


@pytest.fixture(scope="module")
def calls(digits):
    """Whole tensors of one site over a few denoising steps."""
    kept = []

    def handler(call):
        if call.name == SITE:
            kept.append((call.timestep, call.q, call.k, call.v))
        return call.exact()

    with torch.no_grad():
        digits.sample(intercepted(digits, handler), range(6), steps=8, solver="ddim")
    return kept


@pytest.fixture(scope="module")
def records(digits):
    def drive(denoiser):
        digits.sample(denoiser, range(6), steps=8, solver="ddim")

    return observe(digits, drive, sites=[SITE], bins=BINS), drive


def of_bin(calls, index):
    chosen = [(q, k, v) for t, q, k, v in calls if timestep_bin(t[:1], 1000.0, BINS).item() == index]
    assert chosen
    return chosen


@pytest.mark.parametrize("percentile", [100.0, 50.0])
def test_scales_are_percentiles_of_the_batches_maxima(calls, records, percentile):
    tables = scales(records[0], percentile, BINS)[SITE]
    for index in range(BINS):
        batches = of_bin(calls, index)
        k_mean = torch.cat([k for _, k, _ in batches]).double().mean((0, 2)).float()
        v_mean = torch.cat([v for _, _, v in batches]).double().mean((0, 2)).float()
        torch.testing.assert_close(tables["k_offset"][index], k_mean)
        torch.testing.assert_close(tables["v_offset"][index], v_mean)
        expected = {
            "q_scale": [q.abs().amax((0, 2, 3)) for q, _, _ in batches],
            "k_scale": [(k - k_mean[:, None]).abs().amax((0, 2, 3)) for _, k, _ in batches],
            "v_scale": [(v - v_mean[:, None]).abs().amax((0, 2)) for _, _, v in batches],
        }
        for name, rows in expected.items():
            ranges = torch.quantile(torch.stack(rows), percentile / 100, dim=0)
            torch.testing.assert_close(tables[name][index] * 127, ranges, rtol=1e-5, atol=1e-5)


@pytest.fixture(scope="module")
def histograms(digits, records):
    means = offsets(records[0], BINS)
    counter = HistogramObserver(means, {SITE: 2}, digits.timestep_max)
    with torch.no_grad():
        records[1](intercepted(digits, counter))
    return counter.histograms


def test_elementwise_percentiles_are_those_of_the_elements(calls, records, histograms):
    tables = scales(records[0], 99.0, BINS, statistic="elements", histograms=histograms)[SITE]
    for index in range(BINS):
        q, k, v = (torch.cat(x) for x in zip(*of_bin(calls, index), strict=True))
        elements = {
            "q": q.transpose(0, 1).flatten(1),
            "k": (k - tables["k_offset"][index][:, None]).transpose(0, 1).flatten(1),
            "v": (v - tables["v_offset"][index][:, None]).permute(1, 3, 0, 2).flatten(2),
        }
        for name, x in elements.items():
            # Any value between two elements is a percentile.
            low, high = (torch.quantile(x.abs(), 0.99, dim=-1, interpolation=side) for side in ("lower", "higher"))
            found, step = tables[f"{name}_scale"][index] * LEVELS, tolerances.HISTOGRAM_STEP[name]
            assert (found > low / step).all() and (found < high * step).all()


@pytest.fixture(scope="module")
def coverage(digits, records):
    """Coverage by tables that are far too small for the data, so that much is clipped."""
    tables = scales(records[0], 1.0, BINS)
    tables[SITE] = {name: x / 2 if name.endswith("_scale") else x for name, x in tables[SITE].items()}
    observer = CoverageObserver(tables, digits.timestep_max)
    with torch.no_grad():
        records[1](intercepted(digits, observer))
    return tables[SITE], observer


def relative_to_ranges(calls, tables, index):
    """The elements of one bin divided by their ranges, [N, H, tokens, D] each."""
    q, k, v = (torch.cat(x) for x in zip(*of_bin(calls, index), strict=True))
    return {
        "q": q / (tables["q_scale"][index][:, None, None] * LEVELS),
        "k": (k - tables["k_offset"][index][:, None]) / (tables["k_scale"][index][:, None, None] * LEVELS),
        "v": (v - tables["v_offset"][index][:, None]) / (tables["v_scale"][index][:, None] * LEVELS),
    }


def test_clipped_shares_are_those_of_the_elements(calls, coverage):
    tables, observer = coverage
    shares = observer.outliers()[SITE]
    assert set(observer.outliers()) == {SITE}
    for index in range(BINS):
        for name, x in relative_to_ranges(calls, tables, index).items():
            clipped = x.abs() > 1
            assert clipped.any()
            torch.testing.assert_close(shares[f"{name}_outliers"][index], clipped.double().mean((0, 2, 3)).float())


def test_magnitudes_are_counted_by_octave_of_the_range(calls, coverage):
    tables, observer = coverage
    expected = {name: torch.zeros(2, len(OCTAVES), dtype=torch.int64) for name in ("q", "k", "v")}
    for index in range(BINS):
        for name, x in relative_to_ranges(calls, tables, index).items():
            octave = x.abs().log2().floor().clamp(OCTAVES[0], OCTAVES[-1]).long() - OCTAVES[0]
            for head in range(2):
                expected[name][head] += octave[:, head].flatten().bincount(minlength=len(OCTAVES))
    for name, count in expected.items():
        found = observer.magnitudes()[SITE][f"{name}_octaves"]
        assert found.sum() == count.sum()
        # An element on the edge of two octaves may fall on either side, as its logarithm is rounded.
        assert (found - count).abs().sum() <= 4


def test_the_element_that_a_range_was_made_of_is_inside(digits, records):
    observer = CoverageObserver(scales(records[0], 100.0, BINS), digits.timestep_max)
    with torch.no_grad():
        records[1](intercepted(digits, observer))
    assert all(not share.any() for share in observer.outliers()[SITE].values())


def test_ranges_of_a_ramp_are_its_closed_forms():
    # Tokens n/N, n = -N .. N-1, times the channel's number, times the timestep's sign.
    n, heads, dim, bins = 500, 2, 8, 2
    ramp = torch.arange(-n, n) / n
    x = (ramp[:, None] * torch.arange(1, dim + 1)).expand(1, heads, 2 * n, dim)
    observer = RangeObserver(["site"], 10.0, bins)
    for timestep in (2.0, 7.0):
        observer(call(x, x, -x, timestep))
    rows = observer.finish()["site"]
    assert rows.bin.tolist() == [0, 1] and rows.tokens.tolist() == [2 * n, 2 * n]
    channel = torch.arange(1.0, dim + 1)
    assert torch.equal(rows.q_amax, torch.full((2, heads), float(dim)))
    assert torch.equal(rows.k_low[0, 0], -channel) and torch.equal(rows.v_high[1, 1], channel)
    torch.testing.assert_close(rows.k_high[0, 0], channel * (n - 1) / n)
    torch.testing.assert_close(rows.mean("k")[0], -channel / (2 * n), atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(rows.amax("v", channel.expand(heads, dim))[0, 0], channel * (2 * n - 1) / n)


@pytest.mark.parametrize("bits", [HEAD_BITS, CHANNEL_BITS])
def test_histograms_of_a_ramp_are_its_closed_forms(bits):
    # |x| is uniform on (0, a): the percentile p is a·p, and clipping does not pay.
    limits = torch.tensor([0.3, 1.0, 777.0])
    x = (torch.arange(200_000) + 0.5) / 200_000 * limits[:, None] * torch.tensor([1, -1]).repeat(100_000)
    histogram = Histogram(3, bits)
    histogram.add(x, torch.arange(3)[:, None])
    # Interpolation is exact for a uniform density. The last step is an exception: the ramp ends there.
    torch.testing.assert_close(histogram.percentile(50.0), limits / 2, rtol=1e-3, atol=0)
    assert ((histogram.least_error_range() / limits).log2().abs() <= 2**-bits * math.log2(math.e)).all()


def test_the_range_of_least_error_is_the_closed_form_of_a_laplace_distribution():
    # Exact quantiles of |x| with density e^(-x/b)/b. The clipping error 2b²e^(-r/b) and the rounding error r²/(12·127²) are
    # least together where e^(-r/b) = (r/b)/(12·127²): r/b = 9.88.
    b, count = 0.05, 4_000_000
    magnitudes = -b * torch.log((torch.arange(count, dtype=torch.float64) + 0.5) / count)
    ratio = 9.0
    for _ in range(50):
        ratio = -math.log(ratio / (12 * LEVELS**2))
    histogram = Histogram(1, HEAD_BITS)
    histogram.add(magnitudes.float(), torch.zeros(1, dtype=torch.int64))
    assert histogram.least_error_range().item() == pytest.approx(ratio * b, rel=tolerances.LEAST_ERROR_RANGE)


def test_histograms_merge_by_addition_and_count_everything():
    x = torch.randn(3, 2, 50, 8, generator=torch.Generator().manual_seed(0)) * 10
    whole, parts = Histogram(2, HEAD_BITS), Histogram(2, HEAD_BITS)
    head = torch.arange(2)[:, None, None]
    whole.add(x, head)
    for part in x.split(1):
        parts.add(part, head)
    assert torch.equal(whole.counts, parts.counts)
    assert whole.counts.sum() == x.numel()


def test_magnitudes_beyond_the_grid_count_in_its_ends():
    histogram = Histogram(2, CHANNEL_BITS)
    histogram.add(torch.tensor([[0.0, 1e-30], [1e30, 3e38]]), torch.arange(2)[:, None])
    assert histogram.counts[0, 0] == 2 and histogram.counts[1, -1] == 2
    assert histogram.percentile(99)[0].item() < 1e-6


@pytest.mark.parametrize("most", [0, 2**15 - 1, 2**15, 2**31, 2**40])
def test_kept_counts_are_exact_however_large_they_are(most, tmp_path):
    written, read = ({"site": SiteHistograms.empty(BINS, 4, 2, 8)} for _ in range(2))
    written["site"].v.counts[3, 70:80] = torch.arange(most - 9, most + 1).clamp_min(0)
    Shards(tmp_path).write_counts([0], written)
    for _ in range(2):
        Shards(tmp_path).add_counts(read)
    assert torch.equal(read["site"].v.counts, 2 * written["site"].v.counts)
    assert not read["site"].q.counts.any()


def call(q, k, v, timestep):
    """A call of one site at one timestep."""
    return SiteCall("site", q, k, v, None, 1.0, torch.full((len(q),), timestep), "", lambda: q)


def observed(*batches, timestep=5.0, bins=1):
    observer = RangeObserver(["site"], 10.0, bins)
    for batch in batches:
        observer(call(*batch, timestep))
    return observer.finish()


def test_samples_of_one_call_go_to_their_own_bins():
    x = torch.tensor([1.0, 2.0, 3.0, 4.0])[:, None, None, None].expand(4, 1, 2, 8)
    observer = RangeObserver(["site"], 10.0, 2)
    observer(SiteCall("site", x, x, x, None, 1.0, torch.tensor([1.0, 9.0, 2.0, 8.0]), "", lambda: x))
    rows = observer.finish()["site"]
    assert rows.bin.tolist() == [0, 1]
    assert rows.q_amax.flatten().tolist() == [3.0, 4.0]
    assert rows.by_bin()[1].mean("v").unique().tolist() == [3.0]
    assert rows.tokens.tolist() == [4, 4]


def test_frames_of_a_sample_are_observed_together():
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(6, 2, 5, 8, generator=generator) for _ in range(3))
    observer = RangeObserver(["site"], 10.0, 2)
    observer(SiteCall("site", q, k, v, None, 1.0, torch.tensor([1.0, 1.0, 1.0, 9.0, 9.0, 9.0]), "", lambda: q, 3))
    folded = observer.finish()["site"]
    # The same tokens with one batch element per sample.
    (joined,) = observed([x.unflatten(0, (2, 3)).transpose(1, 2).flatten(2, 3)[:1] for x in (q, k, v)]).values()
    assert folded.bin.tolist() == [0, 1] and folded.tokens.tolist() == [15, 15]
    for name, x in joined.tensors().items():
        if name != "bin":
            torch.testing.assert_close(folded.by_bin()[0].tensors()[name], x, rtol=1e-5, atol=1e-5)


def test_rows_merge_by_concatenation():
    generator = torch.Generator().manual_seed(0)
    batches = [[torch.randn(2, 2, 5, 8, generator=generator) for _ in range(3)] for _ in range(4)]
    whole, left, right = (observed(*some)["site"] for some in (batches, batches[:2], batches[2:]))
    merged = Rows.cat([left, right])
    for name, tensor in whole.tensors().items():
        assert torch.equal(tensor, getattr(merged, name))


def test_a_bin_without_observations_takes_its_neighbours_ranges():
    rows = observed((torch.ones(1, 1, 2, 8), torch.ones(1, 1, 2, 8), torch.randn(1, 1, 2, 8)), bins=3)
    tables = scales(rows, 99.0, 3)["site"]
    assert rows["site"].bin.tolist() == [1]
    for table in tables.values():
        assert torch.equal(table[0], table[1]) and torch.equal(table[2], table[1])


def test_dead_channels_and_heads_get_positive_scales():
    v = torch.randn(1, 2, 9, 8, generator=torch.Generator().manual_seed(0))
    v[:, 0, :, 2] = 0.0
    v[:, 1] = 3.0  # a constant head is zero after subtracting its mean
    tables = scales(observed((torch.zeros(1, 2, 9, 8), torch.zeros(1, 2, 9, 8), v)), 99.0, 1)["site"]
    assert all((tables[name] > 0).all() for name in ("q_scale", "k_scale", "v_scale"))
    assert tables["v_scale"][0, 0, 2] == pytest.approx(tables["v_scale"][0, 0].max().item() * CHANNEL_FLOOR)


def provenance():
    return Provenance(
        model="m", weights="w", data="denoise", data_hash="", samples=1, batch=1, steps=1, seed=0, percentile=99.0,
        statistic="batch-max", bins=BINS, timestep_max=1000.0, observed=[1] * BINS, versions={"torch": "2"},
    )  # fmt: skip


def test_the_file_gives_back_exactly_what_was_saved(records, histograms, coverage, tmp_path):
    tables = scales(records[0], 99.0, BINS, statistic="mse", histograms=histograms)
    made = Calibration(tables, provenance(), coverage[1].outliers(), coverage[1].magnitudes())
    made.save(tmp_path / "c.safetensors")
    loaded = Calibration.load(tmp_path / "c.safetensors")
    assert loaded.provenance == made.provenance == read_provenance(tmp_path / "c.safetensors")
    assert loaded.tables.keys() == made.tables.keys()
    for name, tensor in made.tables[SITE].items():
        assert torch.equal(loaded.tables[SITE][name], tensor)
    for name, tensor in made.outliers[SITE].items():
        assert torch.equal(loaded.outliers[SITE][name], tensor)
    for name, tensor in made.magnitudes[SITE].items():
        assert torch.equal(loaded.magnitudes[SITE][name], tensor)


@pytest.mark.parametrize("damage", ["missing", "truncated", "other"])
def test_a_damaged_file_is_refused(records, tmp_path, damage):
    path = tmp_path / "c.safetensors"
    if damage == "truncated":
        Calibration(scales(records[0], 99.0, BINS), provenance()).save(path)
        path.write_bytes(path.read_bytes()[:-100])
    elif damage == "other":
        path.write_bytes(b"not safetensors")
    with pytest.raises(UserError, match="not a calibration"):
        Calibration.load(path)


@pytest.mark.parametrize(
    ("change", "got"),
    [
        ({"v_scale": None}, "without v_scale"),
        ({"v_scael": torch.ones(BINS, 1, 8)}, "with unknown v_scael"),
        ({"q_scale": torch.full((BINS, 2), math.nan)}, "NaN"),
        ({"k_scale": torch.zeros(BINS, 2)}, "not positive"),
        ({"k_scale": torch.ones(BINS, 4)}, "k_scale of [4, 4] torch.float32, where FP32 [4, 2] is needed"),
        ({"q_scale": torch.ones(BINS, 4)}, "q_scale of [4, 4] torch.float32, where FP32 [4, 2]"),
        ({"q_scale": torch.ones(BINS, 2, 1)}, "q_scale of [4, 2, 1]"),
        ({"q_scale": torch.tensor(1.0)}, "other timestep bins"),
        ({"v_offset": torch.ones(BINS, 2, 32)}, "v_offset of [4, 2, 32]"),
        ({"k_offset": torch.ones(BINS, 2, 64, dtype=torch.float64)}, "torch.float64, where FP32"),
        ({"q_scale": torch.ones(BINS, 2, dtype=torch.int64)}, "torch.int64"),
        ({"q_scale": torch.ones(BINS + 1, 4)}, "other timestep bins"),
    ],
)
def test_tables_that_cannot_be_used_are_refused(digits, records, tmp_path, change, got):
    tables = scales(records[0], 99.0, BINS)
    tables[SITE] = {name: x for name, x in (tables[SITE] | change).items() if x is not None}
    Calibration(tables, provenance()).save(tmp_path / "c.safetensors")
    (site,) = (site for site in sites_to_convert(digits, AttentionSection())[0] if site.name == SITE)
    with pytest.raises(UserError, match="tables that cannot be used") as refused:
        load_calibration(tmp_path / "c.safetensors", digits, provenance().weights, BINS, [site])
    assert got in refused.value.got and SITE in refused.value.got


@pytest.mark.parametrize(
    ("group", "change", "got"),
    [
        ("outliers", {"q_outliers": torch.full((BINS, 2), math.nan)}, "q_outliers outside 0 to 1"),
        ("outliers", {"q_outliers": torch.full((BINS, 2), 1.5)}, "q_outliers outside 0 to 1"),
        ("outliers", {"v_outliers": torch.ones(BINS + 1, 2)}, "v_outliers of [5, 2]"),
        ("outliers", {"k_outliers": None}, "where q_outliers, k_outliers, v_outliers are needed"),
        ("magnitudes", {"q_octaves": torch.ones(2, len(OCTAVES))}, "torch.int64 is needed"),
        ("magnitudes", {"q_octaves": torch.full((2, len(OCTAVES)), -1)}, "q_octaves outside 0 to inf"),
    ],
)
def test_coverage_that_cannot_be_shown_is_refused(records, coverage, tmp_path, group, change, got):
    made = {"outliers": coverage[1].outliers(), "magnitudes": coverage[1].magnitudes()}
    made[group][SITE] = {name: x for name, x in (made[group][SITE] | change).items() if x is not None}
    Calibration(scales(records[0], 99.0, BINS), provenance(), **made).save(tmp_path / "c.safetensors")
    with pytest.raises(UserError, match="tables that cannot be used") as refused:
        Calibration.load(tmp_path / "c.safetensors")
    assert got in refused.value.got and SITE in refused.value.got


@pytest.mark.parametrize("damage", ["twice", "pipe", "device", "type", "provenance", "unseen"])
def test_other_files_than_calibrations_are_refused_by_their_header(records, tmp_path, damage):
    path = tmp_path / "c.safetensors"
    Calibration(scales(records[0], 99.0, BINS), provenance()).save(path)
    content = path.read_bytes()
    header = content[8 : 8 + int.from_bytes(content[:8], "little")]
    path.unlink()
    if damage == "pipe":
        os.mkfifo(path)
    elif damage == "device":
        path.symlink_to("/dev/zero")
    else:
        name = f'"{SITE}/q_scale":'.encode()
        first = header.index(name)
        entry = header[first : header.index(b"}", first) + 1]
        changed = {
            "twice": header.replace(entry, entry + b"," + entry),
            "type": header.replace(entry, entry.replace(b"F32", b"F8_E4M3")),
            "provenance": header.replace(b'\\"observed\\":[1,', b'\\"observed\\":[-1,'),
            "unseen": re.sub(rb'(\\"observed\\":)\[[1,]+', lambda m: m[0].replace(b"1", b"0"), header),
        }[damage]
        assert changed != header
        path.write_bytes(len(changed).to_bytes(8, "little") + changed + content[8 + len(header) :])
    got = {
        "twice": f"the key '{SITE}/q_scale' twice in one object",
        "pipe": "a pipe, not a file",
        "device": "a device, not a file",
        "type": "has the type F8_E4M3",
        "provenance": "the provenance: observed.0: ",
        "unseen": "no call in any timestep bin",
    }[damage]
    readers = (Calibration.load,) if damage == "type" else (Calibration.load, read_provenance)
    for read in readers:
        with pytest.raises(UserError, match="is not a calibration") as refused:
            read(path)
        assert got in refused.value.got


@pytest.mark.parametrize("site_value", [math.nan, math.inf])
def test_nan_and_inf_name_the_site(digits, site_value):
    def drive(denoiser):
        inputs = digits.example(5, {"batch": 2, "height": 8, "width": 8})
        inputs["x"][0, 0, 0, 0] = site_value
        denoiser(**inputs)

    with pytest.raises(UserError, match=r"NaN or Inf among the queries of blocks\.0\.attn"):
        observe(digits, drive, sites=["blocks.0.attn"], bins=BINS)


def test_no_calls_at_all_are_an_error(digits, tmp_path):
    section = CalibrationSection(samples=1, batch=1, steps=1, bins=1)
    with pytest.raises(UserError, match="nothing to calibrate on"):
        calibrate(digits, section, "weights", [], tmp_path, NoBar())


def test_plans_follow_the_recipe(digits):
    def modes_of(stated, bins):
        plan = stated_attention(AttentionSection(modes=stated), {"a": "dynamic", "b": "dynamic"}, digits.sigmas, bins)
        assert plan["a"] == plan["b"]
        return plan["a"].modes

    by_noise = modes_of("sigma-rule", 10)
    assert by_noise == sorted(by_noise) and by_noise[0] == Mode.PRECISION and by_noise[-1] == Mode.AGGRESSIVE
    assert modes_of("fp16", 3) == [Mode.FP16] * 3
    assert modes_of(["precision", "aggressive"], 2) == [Mode.PRECISION, Mode.AGGRESSIVE]
    assert modes_of("fp8", 3) == [Mode.FP8] * 3


def test_unmeasured_modes_and_bins_stay_in_full_precision():
    """A bin without steps, a bin with diverging samples, a mode that gives NaN, and an excluded mode."""
    error = torch.full((1, 4, len(Mode)), 1e-6, dtype=torch.float64)
    error[..., Mode.FP16] = 0
    error[0, 0] = 0
    error[0, 2, Mode.AGGRESSIVE] = math.nan
    error[..., Mode.FP8] = math.nan
    gain = torch.tensor([0.0, math.inf, 1.0, 1.0], dtype=torch.float64)
    steps = torch.tensor([0.0, 0.4, 0.3, 0.3], dtype=torch.float64)
    cost = Sensitivity(attention_units({"a": "dynamic"}, Mode), error, gain, steps, torch.ones_like(gain)).cost()
    time = torch.tensor([4.0, 3.0, 2.0, 1.0, math.inf], dtype=torch.float64).expand(1, 4, len(Mode))
    assert fastest(cost, time, 1e-3, [[""] * len(Mode)])[0].tolist() == [
        Mode.FP16,
        Mode.FP16,
        Mode.BALANCED,
        Mode.AGGRESSIVE,
    ]


def test_a_plan_whose_samples_are_nan_can_be_read_back(tmp_path):
    """It exceeds the budget, and must not prevent the choice of others."""
    broken, exact = (
        PlanPoint(name=name, speed=s, figures={"psnr": db}, keeps_budget=s == 1, int8_values=0.0, modes={"a": [mode]})
        for name, s, db, mode in (("broken", 2.0, math.nan, 3), ("exact", 1.0, 120.0, 0))
    )
    written = Frontier(gpu="", date="", limits={"psnr": 36.0}, points=[broken, exact])
    (tmp_path / "frontier.json").write_text(written.model_dump_json())
    found = read_frontier(tmp_path / "frontier.json")
    assert math.isnan(found.points[0].psnr) and found.choose(None) == exact


@pytest.mark.parametrize(
    ("change", "got"),
    [
        ({"points": []}, "points: "),
        ({"points.0.figures": {"ssim": 1.0}}, "points.0.figures: psnr is missing"),
        ({"points.0.modes": {"a": [65]}}, "points.0.modes.a.0: "),
        ({"points.0.modes": {"b": [1]}}, "points of different sites or layers"),
        ({"points.0.speed": "NaN"}, "points.0.speed: "),
        ({"chosen": "none of them"}, "chosen is 'none of them'"),
    ],
    ids=lambda change: next(iter(change)) if isinstance(change, dict) else "",
)
def test_a_frontier_that_cannot_be_shown_is_refused(tmp_path, change, got):
    points = [
        {
            "name": name,
            "speed": 1.0,
            "figures": {"psnr": 40.0},
            "keeps_budget": True,
            "int8_values": 0,
            "modes": {"a": [1]},
        }
        for name in ("one", "two")
    ]
    frontier = {"gpu": "", "date": "", "limits": {}, "points": points, "chosen": "one"}
    path = tmp_path / "frontier.json"
    path.write_text(json.dumps(frontier))
    read_frontier(path)
    for place, value in change.items():
        *above, last = place.split(".")
        node = frontier
        for key in above:
            node = node[int(key) if isinstance(node, list) else key]
        node[last] = value
    path.write_text(json.dumps(frontier))
    with pytest.raises(UserError, match="is not a frontier") as refused:
        read_frontier(path)
    assert got in refused.value.got


def test_a_frontier_is_a_file_of_json(tmp_path):
    path = tmp_path / "frontier.json"
    for content, got in (("[" * 100_000, "deep within each other"), ('{"gpu": "", "gpu": ""}', "the key 'gpu' twice")):
        path.write_text(content)
        with pytest.raises(UserError, match=got):
            read_frontier(path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(UserError, match="a pipe, not a file"):
        read_frontier(path)
