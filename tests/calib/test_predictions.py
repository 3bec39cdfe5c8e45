"""Errors of predictions on the calls of a drawing."""

import pytest
import tiny_models
import torch

from trtconvert.calib.predictions import Predictions

BINS = 4


def test_errors_are_those_of_the_first_call_of_each_bin():
    model = tiny_models.build()
    predictions = Predictions(model, BINS)
    calls = []

    def watched(*inputs, **named):
        calls.append(model.named(inputs, named))
        return model.denoiser(**calls[-1])

    with torch.no_grad():
        model.sample(predictions.around(watched), [3, 4], steps=8, solver="ddim")
    by_bin = {}
    for call in calls:
        index = int(model.bin_of(call[model.timestep_input].reshape(-1)[:1].float(), BINS)[0])
        by_bin.setdefault(index, call)
    assert len(by_bin) == BINS

    def off(**given):
        with torch.no_grad():
            exact = model.denoiser(**given)
        return exact * (1 + 0.01 * (1 + float(given[model.timestep_input].reshape(-1)[0]) / model.timestep_max))

    found = predictions.errors(off, range(BINS))
    for index, call in by_bin.items():
        share = float(call[model.timestep_input].reshape(-1)[0]) / model.timestep_max
        assert found[index] == pytest.approx(0.01 * (1 + share), rel=1e-4)
    assert predictions.errors(off, [2, 7]) == {2: found[2]}
    assert predictions.errors(model.denoiser, [1]) == {1: 0.0}

    again = Predictions(model, BINS)
    again.read(predictions.tensors())
    assert again.errors(off, range(BINS)) == found


def test_inputs_that_stay_the_same_are_kept_once():
    model = tiny_models.build()
    predictions = Predictions(model, BINS)
    recorded = predictions.around(lambda **given: given["x"] + 1)
    x = torch.rand(2, *tiny_models.SHAPE)
    timesteps = [torch.full((2,), (index + 0.5) * model.timestep_max / BINS) for index in range(BINS)]
    for timestep in reversed(timesteps):
        recorded(x=x, timestep=timestep)
        recorded(x=x + 1, timestep=timestep)  # not the first call of its bin
    kept = predictions.tensors()
    assert sorted(name.rpartition("/")[2] for name in kept) == ["prediction", *["timestep"] * BINS, "x"]
    again = Predictions(model, BINS)
    again.read(kept)
    assert again.errors(lambda x, timestep: x + timestep[:, None, None, None], [1]) == predictions.errors(
        lambda x, timestep: x + timestep[:, None, None, None], [1]
    )
