"""Recordings of real diffusers pipelines: every row is a call of the pipeline, and its replay gives the same output."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from safetensors.torch import load_file, save_file
from support import Quiet, run
from torch import Tensor, nn

pytest.importorskip("diffusers", reason="needs diffusers")
pytest.importorskip("transformers", reason="needs transformers")
from tiny_pipelines import PIPELINES, TOKENS

from trtconvert.calib.calibration import Calibration
from trtconvert.calib.data import BadSamples, open_data
from trtconvert.calib.record import PREVIOUS, record
from trtconvert.diffusion_model import DiffusionModel, InputSpec
from trtconvert.errors import UserError
from trtconvert.interception import first_tensor
from trtconvert.models.diffusers import diffusers_model
from trtconvert.recipe import CalibrationSection

STEPS, PER_RUN, SAMPLES = 4, 2, 3
SHARED = {"flux": {"img_ids", "txt_ids"}, "cogvideox": {"image_rotary_emb.0", "image_rotary_emb.1"}}
"""Inputs that belong to no sample."""
WITHOUT_GUIDANCE = ("flux",)
CALLS_PER_STEP = {"wan": 2}
PROMPTS_FOR_EACH_FRAME = "animatediff"
"""Its denoiser takes the prompt once per frame of each sample: neither a row per sample nor one for all."""


class Watched(nn.Module):
    """A denoiser that stores its calls."""

    def __init__(self, denoiser: nn.Module) -> None:
        super().__init__()
        self.denoiser = denoiser
        self.calls: list[tuple[dict[str, Tensor], Tensor]] = []

    def forward(self, **inputs: Tensor) -> Any:
        output = self.denoiser(**inputs)
        self.calls.append(({name: x.clone() for name, x in inputs.items()}, first_tensor(output).clone()))
        return output


@dataclass(frozen=True)
class Recording:
    """A recording, and the recorded calls."""

    name: str
    model: DiffusionModel
    path: Path
    calls: list[tuple[dict[str, Tensor], Tensor]]

    @property
    def shared(self) -> set[str]:
        return SHARED.get(self.name, set())


@pytest.fixture(scope="module", params=[name for name in PIPELINES if name != PROMPTS_FOR_EACH_FRAME])
def recording(request, tmp_path_factory) -> Recording:
    folder = tmp_path_factory.mktemp(request.param)
    make, options = PIPELINES[request.param]
    make().save_pretrained(folder / "pipeline")
    model = diffusers_model(folder / "pipeline", tokens=TOKENS, **options)
    watched = replace(model, denoiser=Watched(model.denoiser))
    section = CalibrationSection(samples=SAMPLES, batch=2, steps=STEPS)
    rows = record(watched, section, PER_RUN, "weights", folder / "i.safetensors", Quiet())  # type: ignore[arg-type]
    assert rows == SAMPLES * PER_RUN * (1 if request.param in WITHOUT_GUIDANCE else 2)
    return Recording(request.param, model, folder / "i.safetensors", watched.denoiser.calls)


def found(recording: Recording, inputs: dict[str, Tensor], row: int, prefix: str = "") -> tuple[int, int]:
    """The call of a row's inputs, and the row's place in the call."""
    own = [spec.name for spec in recording.model.inputs if spec.name not in recording.shared]
    for number, (call, _) in enumerate(recording.calls):
        for place in range(len(call[recording.model.inputs[0].name])):
            values = {name: x.expand(place + 1) if x.dim() == 0 else x for name, x in call.items()}
            if all(torch.equal(values[name][place % len(values[name])], inputs[prefix + name][row]) for name in own):
                return number, place
    raise AssertionError(f"row {row} is of no call")


def test_rows_are_calls_with_those_of_the_step_before(recording):
    inputs = load_file(recording.path)
    names = {spec.name for spec in recording.model.inputs}
    assert set(inputs) == names | {PREVIOUS + name for name in names - recording.shared}
    rows = len(inputs[recording.model.timestep_input])
    places = [found(recording, inputs, row) for row in range(rows)]
    assert len(set(places)) == rows
    for row, (number, place) in enumerate(places):
        before = number - CALLS_PER_STEP.get(recording.name, 1)
        assert found(recording, inputs, row, PREVIOUS) == (before, place)
    for name in recording.shared:
        assert torch.equal(inputs[name], recording.calls[0][0][name])


def test_replayed_rows_give_what_the_pipeline_s_calls_gave(recording):
    inputs = load_file(recording.path)
    section = CalibrationSection(data=str(recording.path), samples=len(inputs[recording.model.timestep_input]), batch=4)
    outputs: list[Tensor] = []
    with torch.no_grad():
        for batch in open_data(recording.model, section, BadSamples()).batches:
            batch(lambda **named: outputs.append(first_tensor(recording.model.denoiser(**named))) or outputs[-1])
    for row, output in enumerate(torch.cat(outputs)):
        number, place = found(recording, inputs, row)
        torch.testing.assert_close(output, recording.calls[number][1][place], rtol=1e-4, atol=1e-4)


def test_a_recorded_video_pipeline_is_calibrated(tmp_path):
    make, options = PIPELINES["wan"]
    make().save_pretrained(tmp_path / "pipeline")
    recipe = {
        "model": {"source": "diffusers", "weights": "pipeline", "options": {"tokens": TOKENS} | options},
        "calibration": {"samples": SAMPLES, "batch": 2, "steps": STEPS, "bins": 2},
    }
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    recorded = run("record", tmp_path / "recipe.yaml", "-o", tmp_path / "i.safetensors", "--per-run", PER_RUN)
    assert recorded.exit_code == 0, recorded.output
    rows = 2 * SAMPLES * PER_RUN
    data = ("--data", tmp_path / "i.safetensors", "-n", rows, "--cache", tmp_path / "cache")
    calibrated = run("calibrate", tmp_path / "recipe.yaml", *data, "-o", tmp_path / "c.safetensors")
    assert calibrated.exit_code == 0, calibrated.output
    tables = Calibration.load(tmp_path / "c.safetensors").tables
    assert set(tables) == {f"transformer.blocks.{i}.attn{j}" for i in range(2) for j in (1, 2)}


# Refused recordings and replays ----------------------------------------------------------------------------------------


def test_prompts_for_each_frame_are_refused_with_what_to_do(tmp_path):
    make, options = PIPELINES[PROMPTS_FOR_EACH_FRAME]
    make().save_pretrained(tmp_path / "pipeline")
    model = diffusers_model(tmp_path / "pipeline", tokens=TOKENS, **options)
    section = CalibrationSection(samples=SAMPLES, batch=2, steps=STEPS)
    with pytest.raises(UserError, match=r"(?s)cannot be recorded.*encoder_hidden_states.*calibration.data: denoise"):
        record(model, section, PER_RUN, "weights", tmp_path / "i.safetensors", Quiet())  # type: ignore[arg-type]


class Positioned(nn.Module):
    """A denoiser with an input that belongs to no sample."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor, timestep: Tensor, positions: Tensor) -> Tensor:
        return x + positions.sum() * self.weight


def positioned(calls: Sequence[Sequence[tuple[float, float]]]) -> DiffusionModel:
    """A model whose sampler makes the given calls, (timestep, positions) each, step by step."""

    def sample(denoiser, seeds, **_: object) -> Tensor:
        x = torch.stack([torch.full((2,), float(seed)) for seed in seeds])
        for timestep, position in (call for step in calls for call in step):
            x = denoiser(x=x, timestep=torch.tensor(timestep), positions=torch.full((3,), position))
        return x

    inputs = (
        InputSpec("x", "float32", ("batch", 2)),
        InputSpec("timestep", "float32", ("batch",)),
        InputSpec("positions", "float32", (3,)),
    )
    return replace(tiny_models.build(), denoiser=Positioned(), inputs=inputs, output=inputs[0], sample=sample)


def recorded(model: DiffusionModel, path: Path, steps: int = 3) -> Path:
    record(model, CalibrationSection(samples=2, batch=2, steps=steps), 1, "weights", path, Quiet())  # type: ignore[arg-type]
    return path


@pytest.mark.parametrize(
    ("calls", "got"),
    [
        ([[(9, 0)], [(5, 0), (5, 0)], [(1, 0)]], "1, then 2 calls at a timestep"),
        ([[(9, 0), (9, 0)], [(5, 0)], [(1, 0), (1, 0)]], "2, then 1 calls at a timestep"),
        ([[(9, 0), (9, 0)], [(5, 0), (5, 0)], [(1, 0)]], "2, then 1 calls at a timestep"),
        ([[(9, 0), (7, 0)], [(5, 0), (3, 0)], [(1, 0)]], "5 timesteps, where 3 were asked for"),
        ([[(9, 0)], [(5, 0)]], "2 timesteps, where 3 were asked for"),
        ([[(9, 0)], [(5, 0)], [(1, 7)]], "another value than in the first call"),
    ],
)
def test_samplers_without_steps_are_refused(calls, got, tmp_path):
    with pytest.raises(UserError, match="the sampler of tiny cannot be recorded") as raised:
        recorded(positioned(calls), tmp_path / "i.safetensors")
    assert raised.value.got == got


@pytest.mark.parametrize(
    ("positions", "problem"),
    [
        (torch.zeros(4), "'positions' in {} has the wrong shape"),
        (torch.zeros(4, 3), "'positions' in {} has the wrong shape"),
        (torch.tensor([0.0, torch.nan, 0.0]), "'positions' in {} is damaged"),
    ],
)
def test_damaged_inputs_of_all_samples_are_never_skipped(positions, problem, tmp_path):
    model = positioned([[(9, 2)], [(5, 2)], [(1, 2)]])
    path = recorded(model, tmp_path / "i.safetensors")
    arrays = load_file(path)
    assert arrays["positions"].tolist() == [2, 2, 2]
    save_file(arrays | {"positions": positions}, path)
    with pytest.raises(UserError) as raised:
        for batch in open_data(model, CalibrationSection(data=str(path), samples=2), BadSamples(skip=True)).batches:
            batch(model.denoiser)
    assert raised.value.problem == problem.format(path)


def of_a_function(model: DiffusionModel) -> Iterator[dict[str, Tensor]]:
    yield {"x": torch.zeros(2, 2), "timestep": torch.zeros(2), "positions": torch.arange(3)}


def test_a_function_s_inputs_of_all_samples_are_not_cut(tmp_path):
    given = []
    section = CalibrationSection(data="test_recording:of_a_function", samples=1)
    for batch in open_data(positioned([]), section, BadSamples()).batches:
        batch(lambda **inputs: given.append({name: list(x.shape) for name, x in inputs.items()}))
    assert given == [{"x": [1, 2], "timestep": [1], "positions": [3]}]
