"""`runtime.load(…, check=True)` warns once of inputs unlike the calibration's."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import tiny_models
import torch

from trtconvert import runtime
from trtconvert.bundle import ComponentRecord, TensorRecord, read_manifest, write_manifest
from trtconvert.errors import Advice
from trtconvert.runtime.watch import InputWatch


@pytest.fixture
def bundle(tiny_build) -> Path:
    return tiny_build.bundle


def calls(denoiser, **changed):
    """Return the warnings of a call with usual inputs, some of them changed."""
    model = tiny_models.build()
    inputs = model.example(3, {name: opt for name, (_, opt, _) in model.dims.items()}) | changed
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        denoiser(**inputs)
    return [str(warning.message) for warning in told if issubclass(warning.category, Advice)]


def far(name, factor):
    model = tiny_models.build()
    inputs = model.example(3, {name: opt for name, (_, opt, _) in model.dims.items()})
    return {name: factor * inputs[name]}


def test_manifest_records_calibration_data_of_the_denoiser(bundle):
    component = read_manifest(bundle).components["denoiser"]
    floating = {spec.name for spec in component.inputs if spec.dtype != "int64"} - {component.timestep_input}
    assert component.input_ranges.keys() == floating
    assert all(len(rows) == 2 and min(rows) > 1 and max(rows) < 10 for rows in component.input_ranges.values())


def test_inputs_far_outside_warn_once(bundle):
    name = tiny_models.build().inputs[0].name
    with runtime.load(bundle, check=True) as loaded:
        assert calls(loaded["denoiser"]) == []
        (told,) = calls(loaded["denoiser"], **far(name, 20.0))
        assert f"'{name}'" in told and "in its calibration" in told and "remedy: " in told
        assert calls(loaded["denoiser"], **far(name, 20.0)) == []


def test_inputs_that_are_no_numbers_warn(bundle):
    name = tiny_models.build().inputs[0].name
    with runtime.load(bundle, check=True) as loaded:
        assert any(f"'{name}' nan times" in told for told in calls(loaded["denoiser"], **far(name, float("nan"))))


@pytest.mark.parametrize("timestep", [-1.0, 1500.0, float("nan")])
def test_timesteps_beyond_the_schedule_warn_once(bundle, timestep):
    model = tiny_models.build()
    inputs = model.example(3, {name: opt for name, (_, opt, _) in model.dims.items()})
    beyond = {model.timestep_input: torch.full_like(inputs[model.timestep_input], timestep)}
    with runtime.load(bundle, check=True) as loaded:
        told = [text for text in calls(loaded["denoiser"], **beyond) if "schedule" in text]
        assert len(told) == 1 and "but its schedule has 0 to 1000" in told[0]
        assert calls(loaded["denoiser"], **beyond) == []


def test_checks_are_off_by_default(bundle):
    with runtime.load(bundle) as loaded:
        assert calls(loaded["denoiser"], **far(tiny_models.build().inputs[0].name, 20.0)) == []


def test_a_bundle_without_ranges_is_told_and_its_timesteps_are_checked(bundle, tmp_path):
    import shutil

    shutil.copytree(bundle, tmp_path / "bundle")
    manifest = read_manifest(tmp_path / "bundle")
    denoiser = manifest.components["denoiser"].model_copy(update={"input_ranges": {}})
    write_manifest(tmp_path / "bundle", manifest.model_copy(update={"components": {"denoiser": denoiser}}))
    with pytest.warns(RuntimeWarning, match="only timesteps are checked"):
        loaded = runtime.load(tmp_path / "bundle", check=True)
    with loaded:
        assert calls(loaded["denoiser"], **far(tiny_models.build().inputs[0].name, 20.0)) == []


def record(**ranges):
    """A denoiser of 4 timestep bins with conditions for all samples together."""
    shapes = {"x": ["batch", 4], "timestep": ["batch"], "shared": [3]}
    inputs = [TensorRecord(name=name, dtype="float32", shape=shape) for name, shape in shapes.items()]
    return ComponentRecord(
        onnx="x.onnx", inputs=inputs, outputs=inputs[:1], timestep_input="timestep", timestep_max=1000.0,
        dims={"batch": (1, 2, 4)}, input_ranges=ranges, engines=[],
    )  # fmt: skip


def looked_at(component, x, timestep, shared, device="cpu"):
    watch = InputWatch(component)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        watch(
            [torch.tensor(x, device=device), torch.tensor(timestep, device=device), torch.tensor(shared, device=device)]
        )
        watch.close()
    return [str(warning.message) for warning in told]


CASES = [
    ([[1.0] * 4, [9.0] * 4], [0.0, 999.0], [1.0] * 3, 0),  # each sample against the range of its own timestep
    ([[9.0] * 4, [1.0] * 4], [0.0, 999.0], [1.0] * 3, 1),
    ([[1.0] * 4], [0.0], [7.0] * 3, 1),
    ([[1.0] * 4], [1000.0], [1.0] * 3, 0),  # the first timestep of flow matching
    ([[9.0] * 4], [1001.0], [7.0] * 3, 2),
]


@pytest.mark.parametrize(("x", "timestep", "shared", "expected"), CASES)
def test_each_sample_is_held_to_the_range_of_its_timestep(x, timestep, shared, expected):
    component = record(x=[1.0, 1.0, 5.0, 5.0], shared=[1.0, 2.0, 2.0, 1.0])
    assert len(looked_at(component, x, timestep, shared)) == expected


@pytest.mark.gpu
@pytest.mark.parametrize(("x", "timestep", "shared", "expected"), CASES)
def test_the_same_is_told_of_tensors_on_a_gpu(x, timestep, shared, expected):
    component = record(x=[1.0, 1.0, 5.0, 5.0], shared=[1.0, 2.0, 2.0, 1.0])
    assert len(looked_at(component, x, timestep, shared, "cuda")) == expected


@pytest.mark.gpu
def test_calls_that_are_recorded_into_a_graph_of_the_callers_are_left_alone():
    watch = InputWatch(record(x=[1.0] * 4, shared=[1.0] * 4))
    inputs = [torch.full((1, 4), 9.0), torch.zeros(1), torch.ones(3)]
    inputs = [x.cuda() for x in inputs]
    with pytest.warns(RuntimeWarning, match="'x' 9 times"):
        watch(inputs)
        watch.close()
    watch(inputs)  # something is on its way while the next call is recorded
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        watch(inputs)
        inputs[0].mul_(1)
    graph.replay()
    watch.close()
