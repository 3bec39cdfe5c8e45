"""Calibration: ranges against what the tensors hold, percentiles, bins, the file, and refused data."""

import math

import pytest
import tolerances
import torch

from trtconvert.attention.modes import Mode
from trtconvert.attention.reference import timestep_bin
from trtconvert.calib.calibration import CHANNEL_FLOOR, Calibration, Provenance, scales
from trtconvert.calib.data import calibration_drive
from trtconvert.calib.observer import BinRecords, Histogram, observe, observe_histograms
from trtconvert.calib.plan import make_plan
from trtconvert.errors import UserError
from trtconvert.models.base import intercepted
from trtconvert.recipe import AttentionSection, CalibrationSection

SITE = "blocks.3.attn"
BINS = 4


@pytest.fixture(scope="module")
def calls(digits):
    """What happens at one site over a few denoising steps, kept whole."""
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
    tables = scales(records[0], percentile)[SITE]
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


def test_elementwise_percentiles_are_those_of_the_elements(calls, records, digits):
    histograms = observe_histograms(digits, records[1], records[0])
    tables = scales(records[0], 99.0, histograms)[SITE]
    for index in range(BINS):
        q = torch.cat([q for q, _, _ in of_bin(calls, index)]).transpose(0, 1).flatten(1).abs()
        expected = torch.quantile(q, 0.99, dim=1)
        got = tables["q_scale"][index] * 127
        assert ((got / expected).log2().abs() < tolerances.HISTOGRAM_OCTAVES).all()


def test_histograms_merge_by_addition_and_count_everything():
    x = torch.randn(3, 2, 50, 8, generator=torch.Generator().manual_seed(0)) * 10
    whole, parts = Histogram(2), Histogram(2)
    whole.add(x)
    for part in x.split(1):
        parts.add(part)
    assert torch.equal(whole.counts, parts.counts)
    assert whole.counts.sum() == x.numel()
    zeros = Histogram(1)
    zeros.add(torch.zeros(1, 1, 4, 4))
    assert zeros.percentile(99).item() < 1e-6


def test_records_merge_by_concatenation():
    generator = torch.Generator().manual_seed(0)
    batches = [[torch.randn(2, 2, 5, 8, generator=generator) for _ in range(3)] for _ in range(4)]
    whole, left, right = BinRecords(), BinRecords(), BinRecords()
    for number, batch in enumerate(batches):
        whole.add(*batch)
        (left if number < 2 else right).add(*batch)
    left.merge(right)
    assert torch.equal(whole.mean("k"), left.mean("k"))
    assert torch.equal(whole.amax("v", whole.mean("v")), left.amax("v", left.mean("v")))


def test_a_bin_without_observations_takes_its_neighbours_ranges():
    seen, unseen = BinRecords(), BinRecords()
    seen.add(torch.ones(1, 1, 2, 8), torch.ones(1, 1, 2, 8), torch.randn(1, 1, 2, 8))
    tables = scales({"site": [unseen, seen, unseen]}, 99.0)["site"]
    assert torch.equal(tables["q_scale"][0], tables["q_scale"][1])
    assert torch.equal(tables["q_scale"][2], tables["q_scale"][1])


def test_dead_channels_and_heads_get_positive_scales():
    v = torch.randn(1, 2, 9, 8, generator=torch.Generator().manual_seed(0))
    v[:, 0, :, 2] = 0.0
    v[:, 1] = 3.0  # a constant head: nothing is left after its mean
    record = BinRecords()
    record.add(torch.zeros(1, 2, 9, 8), torch.zeros(1, 2, 9, 8), v)
    tables = scales({"site": [record]}, 99.0)["site"]
    assert all((tables[name] > 0).all() for name in ("q_scale", "k_scale", "v_scale"))
    assert tables["v_scale"][0, 0, 2] == pytest.approx(tables["v_scale"][0, 0].max().item() * CHANNEL_FLOOR)


def provenance():
    return Provenance(
        model="m", weights="w", data="denoise", data_hash="", samples=1, batch=1, steps=1, seed=0, percentile=99.0,
        statistic="batch-max", bins=BINS, timestep_max=1000.0, observed=[1] * BINS, versions={"torch": "2"},
    )  # fmt: skip


def test_the_file_gives_back_exactly_what_was_saved(records, tmp_path):
    made = Calibration(scales(records[0], 99.0), provenance())
    made.save(tmp_path / "c.safetensors")
    loaded = Calibration.load(tmp_path / "c.safetensors")
    assert loaded.provenance == made.provenance
    assert loaded.tables.keys() == made.tables.keys()
    for name, tensor in made.tables[SITE].items():
        assert torch.equal(loaded.tables[SITE][name], tensor)


@pytest.mark.parametrize("damage", ["missing", "truncated", "other"])
def test_a_damaged_file_is_refused(records, tmp_path, damage):
    path = tmp_path / "c.safetensors"
    if damage == "truncated":
        Calibration(scales(records[0], 99.0), provenance()).save(path)
        path.write_bytes(path.read_bytes()[:-100])
    elif damage == "other":
        path.write_bytes(b"not safetensors")
    with pytest.raises(UserError, match="not a calibration"):
        Calibration.load(path)


def test_recorded_inputs_are_replayed_in_order(digits, tmp_path):
    inputs = digits.example(5, {"batch": 7, "height": 8, "width": 8})
    import numpy as np

    np.savez(tmp_path / "inputs.npz", **{name: x.numpy() for name, x in inputs.items()})
    section = CalibrationSection(data=tmp_path / "inputs.npz", samples=5, batch=3)
    seen, steps = [], []
    calibration_drive(digits, section, lambda: steps.append(1))(lambda **batch: seen.append(batch))
    assert len(steps) == 2
    assert torch.equal(torch.cat([batch["x"] for batch in seen]), inputs["x"][:5])


@pytest.mark.parametrize("site_value", [math.nan, math.inf])
def test_nan_and_inf_name_the_site(digits, site_value):
    def drive(denoiser):
        inputs = digits.example(5, {"batch": 2, "height": 8, "width": 8})
        inputs["x"][0, 0, 0, 0] = site_value
        denoiser(**inputs)

    with pytest.raises(UserError, match=r"NaN or Inf among the queries of blocks\.0\.attn"):
        observe(digits, drive, sites=["blocks.0.attn"], bins=BINS)


def test_no_calls_at_all_are_an_error(digits):
    with pytest.raises(UserError, match="nothing to calibrate on"):
        observe(digits, lambda denoiser: None, sites=[SITE], bins=BINS)


def test_plans_follow_the_recipe(digits):
    sites, sigmas = ["a", "b"], digits.sigmas
    by_noise = make_plan(AttentionSection(modes="auto"), sites, sigmas, 10)["a"].tolist()
    assert by_noise == sorted(by_noise) and by_noise[0] == Mode.PRECISION and by_noise[-1] == Mode.AGGRESSIVE
    assert make_plan(AttentionSection(modes="fp16"), sites, sigmas, 3)["b"].tolist() == [Mode.FP16] * 3
    listed = make_plan(AttentionSection(modes=["precision", "aggressive"]), sites, sigmas, 2)
    assert listed["a"].tolist() == [Mode.PRECISION, Mode.AGGRESSIVE]
