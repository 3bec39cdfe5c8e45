"""Recorded denoiser calls, and the gate on the predictions of engines."""

from __future__ import annotations

import math

import pytest
import tiny_models
import torch
from safetensors import safe_open
from support import REPOSITORY

from trtconvert.errors import GateError
from trtconvert.evaluate.gates import check_predictions
from trtconvert.guidance import FusedGuidance, GuidedDenoiser
from trtconvert.models.digits import digits_model
from trtconvert.models.guidance import fused_form
from trtconvert.models.recorded_calls import CallRecorder, RecordedCalls, relative_error
from trtconvert.recipe import VerifySection

BINS = 4


@pytest.fixture(scope="module")
def recorded():
    model = digits_model(REPOSITORY / "recipes/digits-dit.safetensors")
    recorder = CallRecorder(model, BINS, rows=3)
    model.sample(recorder.around(model.denoiser), range(4), steps=8, solver="ddim")
    return model, recorder.calls(lambda: None)


def test_a_call_of_every_bin_is_kept(recorded):
    model, calls = recorded
    assert list(calls.inputs) == list(range(BINS))
    for index, inputs in calls.inputs.items():
        assert {len(x) for x in inputs.values()} == {3}
        assert calls.expected[index].shape == inputs[model.inputs[0].name].shape
    assert calls.type_errors == [None] * BINS


def test_the_model_itself_has_no_error_and_another_has_its_own(recorded):
    model, calls = recorded
    assert all(error is not None and error < 1e-5 for error in calls.errors(model.denoiser))
    errors = calls.errors(lambda **named: 1.25 * model.denoiser(**named))
    assert all(error == pytest.approx(0.25, rel=1e-3) for error in errors)


def test_guidance_inside_a_denoiser_is_held_to_the_rows_of_the_model(recorded):
    model, calls = recorded
    form = fused_form(model)
    guided = GuidedDenoiser(model.denoiser, model.timestep_input, form.guidance)
    guided.guidance = FusedGuidance(form.guidance, form.output.shape)
    assert all(error is not None and error < 1e-5 for error in calls.errors(guided))
    # Wrong scales and conditions are found.
    twice = _Changed(guided, guidance_scale=lambda x: 2 * x)
    assert all(error > 0.01 for error in calls.errors(twice))
    others = _Changed(guided, label=lambda x: x.roll(1))
    assert all(error > 0.01 for error in calls.errors(others))


class _Changed:
    """A denoiser with fused guidance and changed inputs."""

    def __init__(self, denoiser, **changes):
        self._denoiser, self._changes, self.guidance = denoiser, changes, denoiser.guidance

    def __call__(self, **inputs):
        return self._denoiser(**inputs | {name: change(inputs[name]) for name, change in self._changes.items()})


def test_calls_come_back_from_a_file_where_what_is_the_same_stands_once(recorded, tmp_path):
    model, calls = recorded
    calls.save(tmp_path / "calls.safetensors")
    loaded = RecordedCalls.load(tmp_path / "calls.safetensors")
    assert loaded.type_errors == calls.type_errors and list(loaded.inputs) == list(calls.inputs)
    for index, inputs in calls.inputs.items():
        assert all(torch.equal(loaded.inputs[index][name], x) for name, x in inputs.items())
        assert torch.equal(loaded.expected[index], calls.expected[index])
    with safe_open(tmp_path / "calls.safetensors", "pt") as file:
        (label,) = {spec.name for spec in model.inputs[2:]}
        assert sum(name.endswith(f"/{label}") for name in list(file.keys())) == 1


def test_a_model_in_float32_is_what_the_type_is_held_to(recorded):
    model, _ = recorded

    class Half(torch.nn.Module):
        def forward(self, *inputs, **named):
            return model.denoiser(*inputs, **named) * 1.01

    recorder = CallRecorder(model, BINS, rows=2)
    model.sample(recorder.around(Half()), range(2), steps=8, solver="ddim")
    calls = recorder.calls(lambda: model.denoiser)
    assert all(error == pytest.approx(0.01, rel=0.05) for error in calls.type_errors)
    assert all(error is not None and error < 1e-5 for error in calls.errors(model.denoiser))


def test_a_prediction_within_the_limit_passes():
    check_predictions("engine.plan", [0.01, None, 0.029], VerifySection(), [0.001, None, 0.002])
    check_predictions("engine.plan", [None, None], VerifySection(), [])
    check_predictions("engine.plan", [1.0], VerifySection(max_prediction_error=None), [])


@pytest.mark.parametrize(("errors", "index"), [([0.01, 0.04], 1), ([math.nan, 0.01], 0), ([0.01, math.inf], 1)])
def test_a_prediction_beyond_the_limit_is_told_with_its_bin_and_what_the_type_loses(errors, index):
    with pytest.raises(GateError) as caught:
        check_predictions("engine.plan", errors, VerifySection(), [0.002, 0.004])
    assert f"timestep bin {index}" in caught.value.problem
    assert caught.value.expected == "<= 0.03"
    assert f"16-bit type alone gives {[0.002, 0.004][index]:g}" in caught.value.got


def test_relative_error():
    zeros = torch.zeros(2)
    assert relative_error(zeros, zeros) == 0 and relative_error(zeros + 1, zeros) == math.inf
    assert math.isnan(relative_error(zeros / 0, zeros))
    assert relative_error(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 0.0])) == pytest.approx(4 / 3)


# Whole calls, as a search records them -----------------------------------------------------------------------------------

WHOLE_BINS = 4


def test_errors_are_those_of_the_first_call_of_each_bin():
    model = tiny_models.build()
    recorder = CallRecorder(model, WHOLE_BINS, None)
    calls = []

    def watched(*inputs, **named):
        calls.append(model.named(inputs, named))
        return model.denoiser(**calls[-1])

    with torch.no_grad():
        model.sample(recorder.around(watched), [3, 4], steps=8, solver="ddim")
    by_bin = {}
    for call in calls:
        index = int(model.bin_of(call[model.timestep_input].reshape(-1)[:1].float(), WHOLE_BINS)[0])
        by_bin.setdefault(index, call)
    assert len(by_bin) == WHOLE_BINS

    def off(**given):
        with torch.no_grad():
            exact = model.denoiser(**given)
        return exact * (1 + 0.01 * (1 + float(given[model.timestep_input].reshape(-1)[0]) / model.timestep_max))

    recorded = recorder.calls(lambda: None)
    found = recorded.errors(off)
    for index, call in by_bin.items():
        share = float(call[model.timestep_input].reshape(-1)[0]) / model.timestep_max
        assert found[index] == pytest.approx(0.01 * (1 + share), rel=1e-4)
    assert recorded.errors(off, [2, 7]) == [None, None, found[2], None]
    assert recorded.errors(model.denoiser, [1]) == [None, 0.0, None, None]

    again = RecordedCalls.of_tensors(recorded.tensors(), [None] * WHOLE_BINS)
    assert again.errors(off) == found


def test_inputs_that_stay_the_same_are_kept_once():
    model = tiny_models.build()
    recorder = CallRecorder(model, WHOLE_BINS, None)
    recorded = recorder.around(lambda **given: given["x"] + 1)
    x = torch.rand(2, *tiny_models.SHAPE)
    timesteps = [torch.full((2,), (index + 0.5) * model.timestep_max / WHOLE_BINS) for index in range(WHOLE_BINS)]
    for timestep in reversed(timesteps):
        recorded(x=x, timestep=timestep)
        recorded(x=x + 1, timestep=timestep)  # not the first call of its bin
    calls = recorder.calls(lambda: None)
    assert len({id(inputs["x"]) for inputs in calls.inputs.values()}) == 1
    kept = calls.tensors()
    predictions = [f"{index}/prediction" for index in range(WHOLE_BINS)]
    assert sorted(kept) == sorted(
        ["0/inputs/x", *(f"{index}/inputs/timestep" for index in range(WHOLE_BINS)), *predictions]
    )
    again = RecordedCalls.of_tensors(kept, [None] * WHOLE_BINS)
    assert again.errors(lambda x, timestep: x + timestep[:, None, None, None], [1]) == calls.errors(
        lambda x, timestep: x + timestep[:, None, None, None], [1]
    )
