"""Shares of clipped elements equal those of the kernels."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support import WEIGHTS, run

from trtconvert.attention.modes import Mode
from trtconvert.attention.reference import tables_from_data
from trtconvert.attention.sites import SiteCall
from trtconvert.evaluate.clipping import Clipping, shares
from trtconvert.evaluate.records import read_evaluation
from trtconvert.evaluate.table import paired_rows


def call(q, k, v, timestep):
    return SiteCall("a", q, k, v, None, 1.0, timestep, "", lambda: q)


def data(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(2, 3, 16, 8, generator=generator) for _ in range(3)]


def counted(mode, scaling, factor=1.0, modes=None):
    """Clipped shares of inputs that exceed the calibrated ones by a factor."""
    q, k, v = data()
    tables = tables_from_data(q, k, v, mode)
    if modes is not None:  # two bins, alike but for the modes
        tables = replace(tables, **{name: x.repeat(2, *[1] * (x.dim() - 1)) for name, x in vars(tables).items()})
        tables = tables.with_modes(torch.tensor(modes, dtype=torch.int32))
    clipping = Clipping({"a": tables}, scaling, 1000.0, True)
    k_offset, v_offset = (x[0][:, None] for x in (tables.k_offset, tables.v_offset))
    k, v = factor * (k - k_offset) + k_offset, factor * (v - v_offset) + v_offset
    clipping.add(call(factor * q, k, v, torch.tensor([1.0, 999.0])))
    return shares(clipping.take())["a"]


@pytest.mark.parametrize(
    ("mode", "scaling", "tensors"),
    [
        (Mode.FP16, "calibrated", ""),
        (Mode.PRECISION, "calibrated", "qk"),
        (Mode.BALANCED, "calibrated", "qk"),
        (Mode.AGGRESSIVE, "calibrated", "qkv"),
        (Mode.FP8, "calibrated", "qkv"),
        (Mode.PRECISION, "dynamic", ""),
        (Mode.BALANCED, "dynamic", ""),
        (Mode.AGGRESSIVE, "dynamic", "qkv"),
        (Mode.FP8, "dynamic", "v"),
    ],
)
def test_elements_beyond_static_scales_are_clipped(mode, scaling, tensors):
    inside, beyond = counted(mode, scaling), counted(mode, scaling, 10.0)
    assert set(inside) == set(beyond) == set(tensors)
    assert set(inside.values()) <= {0.0}
    assert all(0.3 < share < 1 for share in beyond.values())


def test_values_in_fp8_reach_further():
    assert counted(Mode.FP8, "calibrated", 3.0)["v"] == 0 < counted(Mode.AGGRESSIVE, "calibrated", 3.0)["v"]


def test_samples_count_in_the_mode_of_their_timestep():
    """One of two samples is in 16 bits, and does not count."""
    alone = counted(Mode.PRECISION, "calibrated", 10.0)
    half = counted(Mode.PRECISION, "calibrated", 10.0, modes=[Mode.FP16, Mode.PRECISION])
    assert half.keys() == alone.keys() and half["q"] == pytest.approx(alone["q"], abs=0.1)


def test_the_worst_site_is_told(digits_build, tmp_path):
    arguments = ("evaluate", digits_build.bundle, "-o", tmp_path / "out.json", "--samples", 10, "--steps", 2)
    outcome = run(*arguments, "--weights", WEIGHTS, "--work", tmp_path / "work")
    assert outcome.exit_code == 0, outcome.output
    evaluation = read_evaluation(tmp_path / "out.json")
    found = evaluation.paired.clipped
    assert len(found) == 6 and all(0 <= share < 0.1 for of_site in found.values() for share in of_site.values())
    assert "clipped elements" in outcome.output and "clipped elements" in dict(paired_rows(evaluation))
    worst = {"blocks.0.attn": {"q": 0.5, "v": 0.25}, "blocks.1.attn": {"k": 0.75}}
    paired = evaluation.paired.model_copy(update={"clipped": worst})
    told = dict(paired_rows(evaluation.model_copy(update={"paired": paired})))
    assert told["clipped elements"] == "75.000% of the keys of blocks.1.attn, the worst of 3"
