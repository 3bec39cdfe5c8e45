"""The gates: what they measure, and that each of them can fail."""

import copy
import math
from dataclasses import replace

import pytest
import torch

from trtconvert.attention.modes import Mode
from trtconvert.attention.reference import AttentionTables, tables_from_data
from trtconvert.bundle import QualityRecord
from trtconvert.errors import GateError
from trtconvert.evaluate.verify import Int8Sites, check_gates, draw, psnr, relative_error, site_sqnr
from trtconvert.models.denoiser import intercepted
from trtconvert.recipe import VerifySection

BINS = 2
GOOD = QualityRecord(
    samples=4, steps=2, sampler="ddim", psnr=40.0, psnr_worst=35.0, psnr_worst_seed=3,
    site_sqnr={"a": [30.0, 20.0], "b": [None, 25.0]}, error=1e-3, lowering_difference=0.01, lowering_limit=0.1,
)  # fmt: skip
MODES = {"a": [1, 3], "b": [1, 3]}


@pytest.fixture(scope="module")
def sites(digits):
    tables = {}

    def handler(call):
        one_bin = tables_from_data(call.q, call.k, call.v, Mode.AGGRESSIVE)
        tables[call.name] = AttentionTables(*(x.repeat(BINS, *[1] * (x.dim() - 1)) for x in vars(one_bin).values()))
        return call.exact()

    with torch.no_grad():
        intercepted(digits, handler)(**digits.example(0, {"batch": 16, "height": 8, "width": 8}))
    return Int8Sites(tables, digits.timestep_max, "calibrated", True)


def test_psnr_of_a_known_error():
    images = torch.rand(3, 1, 8, 8)
    assert psnr(images + 0.1, images).tolist() == pytest.approx([20.0] * 3, abs=1e-4)
    assert relative_error(images * 1.01, images) == pytest.approx(0.01, rel=1e-4)


def test_the_quality_record_finds_the_worst_site_and_skips_unseen_bins():
    assert GOOD.worst_site() == (20.0, "a", 1)


def test_a_good_build_passes():
    check_gates(GOOD, MODES, VerifySection())


def test_fp8_has_room_for_its_coarser_steps_and_a_recipe_decides():
    rough = GOOD.model_copy(update={"error": 0.02})
    in_fp8 = MODES | {"b": [Mode.PRECISION, Mode.FP8]}
    check_gates(rough, in_fp8, VerifySection())
    check_gates(rough, MODES, VerifySection(max_error=0.02))
    for quality, modes, section in (
        (rough, in_fp8, VerifySection(max_error=0.01)),
        (GOOD.model_copy(update={"error": 0.04}), in_fp8, VerifySection()),
    ):
        with pytest.raises(GateError, match="torch reference"):
            check_gates(quality, modes, section)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"psnr": 32.9}, "PSNR of the samples"),
        ({"psnr": math.nan}, "PSNR of the samples"),
        ({"site_sqnr": {"a": [30.0, 14.0], "b": [None, 25.0]}}, "noise of the worst site"),
        ({"site_sqnr": {"b": [None, 25.0], "a": [30.0, math.nan]}}, "noise of the worst site"),
        ({"error": 0.02}, "torch reference"),
        ({"error": math.nan}, "torch reference"),
        ({"lowering_difference": 0.2}, "native lowering"),
    ],
)
def test_each_gate_fails_and_names_the_worst_site_and_bin(change, named):
    with pytest.raises(GateError, match=named) as raised:
        check_gates(GOOD.model_copy(update=change), MODES, VerifySection())
    assert "a in timestep bin 1, mode aggressive" in raised.value.got
    assert raised.value.exit_code == 1 and "exclude a" in raised.value.remedy


def test_a_site_with_bad_scales_stands_out_where_they_are_used(digits, sites):
    spoiled = dict(sites.tables)
    table = spoiled["blocks.2.attn"]
    scale = table.k_scale.clone()
    scale[1] *= 0.01  # clips nearly every key in the upper half of the schedule
    spoiled["blocks.2.attn"] = AttentionTables(**{**vars(table), "k_scale": scale})
    good = site_sqnr(digits, sites, BINS, seed=0, done=lambda: None)
    bad = site_sqnr(digits, Int8Sites(spoiled, sites.timestep_max, "calibrated", True), BINS, seed=0, done=lambda: None)
    lost = {(s, b): good[s][b] - bad[s][b] for s in good for b in range(BINS) if abs(good[s][b] - bad[s][b]) > 1}
    assert list(lost) == [("blocks.2.attn", 1)]
    assert lost["blocks.2.attn", 1] > 10


def test_nan_at_a_site_is_not_taken_for_a_bin_without_steps(digits, sites):
    broken = replace(digits, denoiser=copy.deepcopy(digits.denoiser))
    broken.denoiser.get_parameter("blocks.1.attn.qkv.bias").data[-1] = torch.inf  # a channel of the values
    of_the_model = site_sqnr(broken, sites, BINS, seed=0, done=lambda: None)
    assert all(math.isnan(db) for db in of_the_model["blocks.1.attn"])
    table = sites.tables["blocks.2.attn"]
    spoiled = {**sites.tables, "blocks.2.attn": replace(table, v_scale=table.v_scale * 0)}
    spoiled = Int8Sites(spoiled, sites.timestep_max, "calibrated", True)
    of_the_scales = site_sqnr(digits, spoiled, BINS, seed=0, done=lambda: None)
    assert all(math.isnan(db) for db in of_the_scales["blocks.2.attn"])


def test_samples_do_not_depend_on_the_batch_they_are_drawn_in(digits):
    few = draw(digits, digits.denoiser, VerifySection(samples=3, steps=2, seed=7), lambda: None)
    many = draw(digits, digits.denoiser, VerifySection(samples=17, steps=2, seed=7), lambda: None)
    torch.testing.assert_close(few, many[:3], rtol=0, atol=1e-5)
