"""Block masks in calibrations: search, storage, resumption, loading from files, and refusals."""

from __future__ import annotations

from dataclasses import replace

import pytest
import tiny_sparse
import torch
from support import Quiet, refusal, run, tiny_recipe, torchrun

from trtconvert.attention.blocks import pack
from trtconvert.attention.pruning import needed_blocks
from trtconvert.attention.reference import timestep_bin
from trtconvert.calib import calibrate as module
from trtconvert.calib.calibrate import calibrate, load_calibration, parts_to_convert, refuse_without_blocks
from trtconvert.calib.calibration import Calibration
from trtconvert.calib.data import batches_of
from trtconvert.errors import UserError
from trtconvert.models.denoiser import intercepted
from trtconvert.recipe import AttentionSection, CalibrationSection, LayersSection

BINS, SHARES = 2, (0.01, 0.1)
SECTION = CalibrationSection(samples=3, batch=2, steps=4, bins=BINS)


@pytest.fixture(scope="module")
def local():
    return tiny_sparse.build()


@pytest.fixture(scope="module")
def sites(local):
    return parts_to_convert(local, AttentionSection(), LayersSection(modes="off")).sites


@pytest.fixture(scope="module")
def made(local, sites, tmp_path_factory):
    return calibrate(local, SECTION, "x", sites, tmp_path_factory.mktemp("work"), Quiet(), shares=SHARES)


def test_masks_are_what_any_sample_needs_in_any_step(local, sites, made):
    expected = {site.name: torch.zeros(BINS, len(SHARES), 2, 5, 5, dtype=torch.bool) for site in sites}

    def attend(call):
        needed = needed_blocks(call.q, call.k, SHARES, call.scale)
        for index, of_sample in zip(timestep_bin(call.timestep, 1000.0, BINS), needed, strict=True):
            expected[call.name][index] |= of_sample
        return call.exact()

    with torch.no_grad():
        for batch in batches_of(SECTION.samples, SECTION.batch):
            local.sample(intercepted(local, attend), list(batch), steps=SECTION.steps, solver="ddim")
    assert made.blocks.keys() == expected.keys()
    for name, masks in expected.items():
        for level, share in enumerate(SHARES):
            assert torch.equal(made.blocks[name].level(share), masks[:, level])
    early, late = made.blocks["denoiser"].densities()[[1, 0], 0].tolist()
    assert late < 0.8 < early  # attention is more local at less noise


def test_the_file_gives_back_the_blocks_and_older_files_have_none(made, tmp_path):
    made.save(tmp_path / "new.safetensors")
    loaded = Calibration.load(tmp_path / "new.safetensors").blocks
    for name, blocks in made.blocks.items():
        for tensor, value in blocks.tensors().items():
            assert torch.equal(loaded[name].tensors()[tensor], value)
    replace(made, blocks={}).save(tmp_path / "old.safetensors")
    old = Calibration.load(tmp_path / "old.safetensors")
    assert old.blocks == {} and old.tables.keys() == made.tables.keys()


def every_bit(heads):
    return pack(torch.ones(BINS, len(SHARES), heads, 5, 5, dtype=torch.bool))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"block_bits": torch.zeros(BINS, 2, 2, 4, dtype=torch.uint8)}, "leave queries without a key"),
        ({"block_bits": every_bit(3)}, "3 heads"),
        ({"block_bits": every_bit(2) | 1}, "beyond the last block"),
    ],
)
def test_damaged_blocks_are_refused(made, tmp_path, change, said):
    broken = {
        name: replace(blocks, **{field: x.clone() for field, x in change.items()})
        for name, blocks in made.blocks.items()
    }
    replace(made, blocks=broken).save(tmp_path / "broken.safetensors")
    with pytest.raises(UserError, match="cannot be used") as refused:
        Calibration.load(tmp_path / "broken.safetensors")
    assert said in refused.value.got


def test_a_killed_calibration_ends_the_same(local, sites, made, tmp_path, monkeypatch):
    run_batch, done = module._run, []

    def killed(batch, denoiser):
        if done:
            raise KeyboardInterrupt
        done.append(batch)
        run_batch(batch, denoiser)

    monkeypatch.setattr(module, "_run", killed)
    with pytest.raises(KeyboardInterrupt):
        calibrate(local, SECTION, "x", sites, tmp_path, Quiet(), shares=SHARES)
    monkeypatch.undo()
    again = calibrate(local, SECTION, "x", sites, tmp_path, Quiet(), shares=SHARES)
    for name, blocks in made.blocks.items():
        assert torch.equal(again.blocks[name].block_bits, blocks.block_bits)
    assert again.tables["denoiser"]["q_scale"].equal(made.tables["denoiser"]["q_scale"])


@pytest.mark.soak
def test_two_ranks_find_what_one_does(tmp_path):
    recipe = tiny_recipe(
        tmp_path,
        model={"source": "tiny_sparse:build"},
        attention={"sparse": 0.1},
        calibration={"samples": 3, "batch": 1},
    )

    both, one = tmp_path / "both.safetensors", tmp_path / "one.safetensors"
    torchrun(2, "calibrate", recipe, "-o", both, "--cache", tmp_path / "both")
    outcome = run("calibrate", recipe, "-o", one, "--cache", tmp_path / "one")
    assert outcome.exit_code == 0, outcome.output
    assert "blocks that 2 sites need, by the share of attention that may be lost: " in outcome.output
    found, expected = Calibration.load(both).blocks, Calibration.load(one).blocks
    for name, blocks in expected.items():
        assert torch.equal(found[name].block_bits, blocks.block_bits)
    assert expected["denoiser"].densities().min() < 0.8


def test_a_file_without_the_blocks_is_refused(local, sites, made, tmp_path):
    path = tmp_path / "calibration.safetensors"
    made.save(path)
    assert load_calibration(path, local, "x", BINS, sites, shares=(0.1,)).blocks.keys() == {site.name for site in sites}
    assert load_calibration(path, local, "x", BINS, sites).blocks == {}
    with pytest.raises(UserError, match="lacks the blocks") as refused:
        load_calibration(path, local, "x", BINS, sites, shares=(0.02, 0.1))
    assert "0.02" in refused.value.expected and "0.01, 0.1" in refused.value.got
    assert "use the shares 0.01, 0.1" in refused.value.remedy
    larger = [replace(site, query_tokens=1000, key_tokens=1000) for site in sites]
    with pytest.raises(UserError, match="blocks of other sizes"):
        load_calibration(path, local, "x", BINS, larger, shares=(0.1,))
    replace(made, blocks={}).save(path)
    with pytest.raises(UserError, match="lacks the blocks") as refused:
        load_calibration(path, local, "x", BINS, sites, shares=(0.1,))
    assert "remove calibration.from" in refused.value.remedy


@pytest.mark.parametrize(
    ("options", "dims", "problem", "remedy"),
    [
        ({"varying": True}, {}, "needs one size", "such as height: 16"),
        ({}, {"height": (24, 24, 24)}, "the size that the model is calibrated at", "set height to 16"),
        ({"masked": True}, {}, "no attention site can have a block mask", "attention.sparse to off"),
        ({"windows": 4}, {}, "no attention site can have a block mask", "attention.sparse to off"),
        ({"height": 8}, {}, "no attention site can have a block mask", "a larger size"),
    ],
)
def test_models_without_block_masks_are_refused(options, dims, problem, remedy):
    model = tiny_sparse.build(**options)
    found = parts_to_convert(model, AttentionSection(), LayersSection(modes="off")).sites
    with pytest.raises(UserError, match=problem) as refused:
        refuse_without_blocks(model, found, {**model.dims, **dims}, BINS)
    assert remedy in refused.value.remedy
    assert ("larger size" in refused.value.remedy) == (remedy == "a larger size")


def test_masks_of_gigabytes_are_refused_before_the_calibration(local, sites):
    """A video of 131,072 tokens, 24 heads and 40 sites; the remedy works."""
    large = [replace(site, heads=24, query_tokens=131072, key_tokens=131072) for site in sites[:1] * 40]
    with pytest.raises(UserError, match="too large for a graph") as refused:
        refuse_without_blocks(local, large, local.dims, 10)
    assert (
        refused.value.got == "9.4 GiB for 10 timestep bins" and "calibration.bins to 4 or less" in refused.value.remedy
    )
    refuse_without_blocks(local, large, local.dims, 4)
    with pytest.raises(UserError) as refused:
        refuse_without_blocks(local, large * 5, local.dims, 1)
    assert "calibration.bins" not in refused.value.remedy


def test_samples_of_another_size_are_refused(tmp_path):
    model = tiny_sparse.build(height=24, pixels=16)
    found = parts_to_convert(model, AttentionSection(), LayersSection(modes="off")).sites
    with pytest.raises(UserError, match="called with other numbers of tokens"):
        calibrate(model, SECTION, "x", found, tmp_path, Quiet(), shares=SHARES)


@pytest.mark.parametrize("command", ["build", "calibrate"])
def test_commands_refuse_varying_sizes_before_they_calibrate(tmp_path, command):
    recipe = tiny_recipe(
        tmp_path, model={"source": "tiny_sparse:build", "options": {"varying": True}}, attention={"sparse": 0.01}
    )
    output = tmp_path / ("bundle" if command == "build" else "calibration.safetensors")
    outcome = run(command, recipe, "-o", output, "--cache", tmp_path / "cache")
    refusal(outcome, "attention.sparse needs one size", "height 16..24", "give each one size in engine.shapes")
    assert not list((tmp_path / "cache").glob("observed-*"))


def test_varying_sizes_are_refused_behind_a_calibration_of_one_size(tmp_path):
    model = {"source": "tiny_sparse:build", "options": {"varying": True}}
    for shapes in ({"height": 16}, {}):
        recipe = tiny_recipe(tmp_path, model=model, attention={"sparse": 0.01}, engine={"shapes": shapes})
        outcome = run("build", recipe, "-o", tmp_path / "bundle", "--cache", tmp_path / "cache")
        assert outcome.exit_code == 0 or not shapes, outcome.output
    refusal(outcome, "attention.sparse needs one size", "height 16..24", "give each one size in engine.shapes")
