"""Observations of layers: extremes of each channel and some rows, per call and timestep bin."""

import math

import pytest
import torch
from safetensors import safe_open
from tiny_layers import CHOSEN, build, random

from trtconvert.calib import shards
from trtconvert.calib.layer_observer import ROWS, LayerObserver, LayerRows
from trtconvert.calib.shards import Shards
from trtconvert.errors import UserError
from trtconvert.linear.sites import LayerCall
from trtconvert.models.denoiser import intercepted

MAX, BINS = 10.0, 4


def call(x, timestep, kind="linear", name="layer"):
    weight = random(8, x.shape[1 if kind == "conv" else -1])
    return LayerCall(name, kind, x, weight, None, torch.as_tensor(timestep), lambda: x)


def observed(*calls, layers=("layer",)):
    observer = LayerObserver(layers, MAX, BINS)
    for one in calls:
        observer(one)
    return observer.finish()


def assert_equal(one: LayerRows, other: LayerRows):
    assert all(torch.equal(tensor, other.tensors()[name]) for name, tensor in one.tensors().items())


@pytest.mark.parametrize("folds", [1, 3])
def test_samples_of_one_call_go_to_their_own_bins(folds):
    x = random(4 * folds, 5, 16)
    rows = observed(call(x, [1.0, 9.0, 2.0, 8.0]))["layer"]
    assert rows.bin.tolist() == [0, 3] and rows.rows.tolist() == [10 * folds] * 2
    of_samples = x.reshape(4, 5 * folds, 16)
    for entry, members in enumerate(([0, 2], [1, 3])):
        seen = of_samples[members].flatten(0, 1)
        assert torch.equal(rows.low[entry], seen.amin(0)) and torch.equal(rows.high[entry], seen.amax(0))
        # The stored rows belong to the bin, one row of each sample.
        owners = [next(m for m in members if (of_samples[m] == row).all(1).any()) for row in rows.sample[entry]]
        assert owners == members[:ROWS]


def test_pixels_of_an_image_are_its_rows():
    x = random(2, 16, 3, 5)
    rows = observed(call(x, [1.0, 1.0], "conv"))["layer"]
    assert rows.rows.tolist() == [30]
    assert torch.equal(rows.low[0], x.amin((0, 2, 3))) and torch.equal(rows.high[0], x.amax((0, 2, 3)))
    pixels = x.movedim(1, -1).flatten(0, -2)
    assert all((pixels == row).all(1).any() for row in rows.sample[0])


@pytest.mark.parametrize("tokens", [1, 2, 3, 64])
def test_rows_are_kept_however_few_there_are(tokens):
    x = random(1, tokens, 16)
    sample = observed(call(x, [1.0]))["layer"].sample
    assert sample.shape == (1, ROWS, 16)
    assert len(sample[0].unique(dim=0)) == min(tokens, ROWS)


def test_successive_calls_keep_rows_of_other_places():
    x = random(1, 1024, 16)
    samples = observed(*(call(x, [1.0]) for _ in range(8)))["layer"].sample
    assert len(samples.flatten(0, 1).unique(dim=0)) == 8 * ROWS


def test_calls_may_have_different_numbers_of_samples():
    few, more = random(2, 8, 16), random(3, 8, 16, seed=1)
    rows = observed(call(few, [1.0, 9.0]), call(more, [1.0, 1.0, 9.0]))["layer"]
    assert rows.bin.tolist() == [0, 3, 0, 3] and rows.rows.tolist() == [8, 8, 16, 8]
    assert torch.equal(rows.low, torch.stack([x.amin((0, 1)) for x in (few[:1], few[1:], more[:2], more[2:])]))


def test_half_precision_is_kept_as_it_is():
    x = random(1, 8, 16).half()
    rows = observed(call(x, [1.0]))["layer"]
    assert rows.high.dtype == rows.sample.dtype == torch.float32
    assert torch.equal(rows.high[0], x.amax((0, 1)).float())


def test_layers_that_nobody_asked_for_are_computed_and_forgotten():
    x = random(1, 8, 16)
    observer = LayerObserver(["layer"], MAX, BINS)
    assert observer(call(x, [1.0], name="another")) is x
    assert observer.finish() == {}


def test_nothing_is_seen_twice():
    observer = LayerObserver(["layer"], MAX, BINS)
    observer(call(random(1, 8, 16), [1.0]))
    assert len(observer.finish()["layer"].bin) == 1
    assert observer.finish() == {}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nan_and_inf_name_the_first_layer_and_its_timestep(value):
    good, bad = random(2, 8, 16), random(2, 8, 16)
    bad[1, 3, 5] = value
    observer = LayerObserver(["a", "b"], MAX, BINS)
    # "a" was called first, but the input of "b" broke first.
    for name, x, timestep in (("a", good, 1.0), ("b", bad, 7.5), ("a", bad, 2.0)):
        observer(call(x, [0.5, timestep], name=name))
    with pytest.raises(UserError, match=r"NaN or Inf at the input of b at timestep 7\.5"):
        observer.finish()
    observer(call(good, [1.0, 1.0], name="a"))
    assert len(observer.finish()["a"].bin) == 1  # the refused calls are gone


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_batches_merge_to_the_same_rows_whoever_observed_them(tmp_path, ranks):
    """Batches are observed separately and merged in order, whatever processes and interruptions there were."""
    model, expected = build(), Shards(tmp_path / "alone")
    observers = [LayerObserver(CHOSEN, model.timestep_max, 2) for _ in range(ranks)]

    def batch(index, observer, shards):
        with torch.no_grad():
            model.sample(intercepted(model, layers=observer), [index, index + 10], steps=4, solver="ddim")
        shards.write(index, {}, [], observer.finish())

    shared = Shards(tmp_path / "shared")
    for index in (2, 0, 1):
        batch(index, observers[index % ranks], shared)
    alone = LayerObserver(CHOSEN, model.timestep_max, 2)
    for index in range(3):
        batch(index, alone, expected)
    for name in CHOSEN:
        assert_equal(shared.layer(name), expected.layer(name))
        assert len(expected.layer(name).bin) == 3 * 4
    assert list(shared) == []  # layers do not count as attention sites


def test_extremes_do_not_depend_on_how_samples_were_batched():
    x = random(4, 5, 16)
    timesteps = [1.0, 9.0, 2.0, 8.0]
    together = observed(call(x, timesteps))["layer"]
    apart = observed(*(call(x[i : i + 1], timesteps[i : i + 1]) for i in range(4)))["layer"]
    assert apart.rows.sum() == together.rows.sum()
    for entry, index in enumerate((0, 3)):
        here = apart.bin == index
        assert torch.equal(apart.low[here].amin(0), together.low[entry])
        assert torch.equal(apart.high[here].amax(0), together.high[entry])


def test_a_layer_that_is_called_twice_is_two():
    model = build()
    observer = LayerObserver(["tied", "tied#2"], model.timestep_max, 1)
    with torch.no_grad():
        model.sample(intercepted(model, layers=observer), [0], steps=3, solver="ddim")
    found = observer.finish()
    assert [len(found[name].bin) for name in ("tied", "tied#2")] == [3, 3]
    assert not torch.equal(found["tied"].high, found["tied#2"].high)


def test_a_missing_layer_is_no_empty_one(tmp_path):
    kept = Shards(tmp_path)
    kept.write(0, {}, [], observed(call(random(1, 8, 16), [1.0])))
    with pytest.raises(KeyError, match="another"):
        kept.layer("another")


def test_a_batch_that_another_process_replaced_is_read_anew(tmp_path):
    """Like a run that observes a batch again after an earlier run skipped samples of the batch."""
    writing, reading = Shards(tmp_path), Shards(tmp_path)
    for value in (1.0, 2.0):
        writing.write(0, {}, [], observed(call(torch.full((1, 8, 16), value), [1.0])))
        assert float(reading.layer("layer").high.max()) == value
    writing.write(1, {}, [], observed(call(torch.full((1, 8, 16), 3.0), [1.0])))
    assert reading.layer("layer").high.amax(1).tolist() == [2, 3]


def test_rows_that_memory_has_room_for_are_not_read_from_their_files(tmp_path, monkeypatch):
    rows = [observed(call(torch.full((1, 8, 16), value), [1.0])) for value in (1.0, 2.0, 3.0)]
    size = sum(x.nbytes for x in rows[0]["layer"].tensors().values())
    own, opened = Shards(tmp_path, room=2 * size), []
    for index, of_batch in enumerate(rows):
        own.write(index, {}, [], of_batch)
    monkeypatch.setattr(shards, "safe_open", lambda path, **how: opened.append(path.stem) or safe_open(path, **how))
    assert_equal(own.layer("layer"), LayerRows.cat([of_batch["layer"] for of_batch in rows]))
    assert opened == ["rows-000002"]
    Shards(tmp_path).write(0, {}, [], observed(call(torch.full((1, 8, 16), 4.0), [1.0])))
    assert own.layer("layer").high.amax(1).tolist() == [4, 2, 3] and opened[1:] == ["rows-000000"]
