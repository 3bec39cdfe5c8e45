"""Files of builds beside manifests, damaged at random by a seed: measurements in the cache, finished stages, recorded calls,
trajectories; and a recipe's parametrisation of noise."""

from __future__ import annotations

import json
import random
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from damage import ODD, Watch, damage_file, fresh_copy, mutated, rounds, seal
from safetensors.torch import load, load_file, save_file
from torch import Tensor

from trtconvert import runtime
from trtconvert.attention.modes import Mode
from trtconvert.bundle import MANIFEST, file_record, read_manifest
from trtconvert.cache import Cache
from trtconvert.calib.kept_search import KeptSearch
from trtconvert.calib.sensitivity import Sensitivity
from trtconvert.models.onnx.sampling import SCHEDULES, Trained
from trtconvert.models.parametrisation import NOISE_INPUTS, PREDICTIONS, SOLVERS
from trtconvert.models.recorded_calls import RecordedCalls
from trtconvert.quant.decision import Choice, Decision, Plan, Unit

# The cache ------------------------------------------------------------------------------------------------------------

UNITS = (Unit("attention", "a", ("a",), (Choice(Mode.FP16), Choice(Mode.BALANCED))),)
PLAN = Plan({"a": Decision((Choice(Mode.BALANCED),))}, {})
MEASURED = Sensitivity(UNITS, torch.rand(1, 1, 2), torch.rand(1), torch.ones(1), torch.ones(1))
IMAGES = torch.rand(2, 3, 4, 4)
FIGURES = {"psnr": 31.5}


def all_kept(kept: KeptSearch) -> tuple[list[Tensor], dict[str, float] | None]:
    found = kept.sensitivity(UNITS, lambda: MEASURED)
    drawn = kept.full(lambda: {"images": IMAGES})["images"]
    return [found.error, found.gain, found.steps, found.power, drawn], kept.figures(PLAN)


def test_damaged_searches_are_measured_again(tmp_path: Path):
    """Damaged files give the measured values or nothing."""
    whole, watch = tmp_path / "whole", Watch()
    all_kept(kept := KeptSearch(whole))
    kept.keep_figures(PLAN, FIGURES)
    expected, _ = all_kept(KeptSearch(whole))
    for seed in rounds(150):
        generator, folder = random.Random(seed), fresh_copy(whole, tmp_path / "searched")
        files = sorted(folder.iterdir())
        assert len(files) == 3
        damaged = generator.choice(files)
        damage_file(damaged, files, generator, devices=False)
        found = watch(lambda folder=folder: all_kept(KeptSearch(folder)), seed)
        if found is None:
            assert damaged.is_dir() or damaged.is_fifo(), seed  # no file takes its place
            continue
        assert all(map(torch.equal, found[0], expected)), seed
        assert found[1] in (FIGURES, None), seed
    assert watch.read


def test_damaged_stages_are_made_again(tmp_path: Path):
    def make(folder: Path) -> None:
        for name in "ab":
            (folder / name).write_text(name * 1000)

    cache, watch = Cache(tmp_path / "cache"), Watch()
    whole = cache.stage("tried", [], {}, make).folder
    kept = fresh_copy(whole, tmp_path / "kept")
    for seed in rounds(150):
        generator, folder = random.Random(seed), fresh_copy(kept, whole)
        files = sorted(folder.iterdir())
        index = folder / "stage.json"
        if generator.random() < 0.3:
            index.write_text(json.dumps(mutated(json.loads(index.read_text()), generator)))
        elif generator.random() < 0.1:
            index.write_text("[" * generator.choice([50, 100_000]))
        else:
            damage_file(generator.choice(files), files, generator, devices=False)
        stage = watch(lambda: cache.stage("tried", [], {}, make), seed)
        listed = stage.hashes.keys()  # an index without a file is whole, too
        assert all((stage.folder / name).read_text() == name * 1000 for name in listed if name in "ab"), seed
    assert not watch.refused


# Bundles --------------------------------------------------------------------------------------------------------------


def mutated_tensors(tensors: dict[str, Tensor], generator: random.Random) -> dict[str, Tensor]:
    """The same with one tensor removed, renamed, swapped, reshaped, of another type, or with odd numbers."""
    changed = dict(tensors)
    name = generator.choice(sorted(changed))
    x = changed[name]
    match generator.randrange(6):
        case 0:
            del changed[name]
        case 1:
            other = [name + "x", "", "0/inputs/", "x/prediction", f"-1/{name}", f"9/{name}"]
            changed[generator.choice(other)] = changed.pop(name)
        case 2:
            changed[name] = changed[generator.choice(sorted(changed))].clone()
        case 3:
            changed[name] = generator.choice([x.flatten()[:1], x[None], x.flatten()[:0], x.new_zeros(())]).clone()
        case 4:
            changed[name] = x.to(generator.choice([torch.float16, torch.int32, torch.bool, torch.float64, torch.uint8]))
        case _ if x.is_floating_point() and x.numel():
            changed[name] = x.clone()
            changed[name].view(-1)[generator.randrange(x.numel())] = generator.choice(
                [torch.nan, torch.inf, 1e30, -1.0]
            )
    return changed


def test_damaged_recorded_calls(stepped_build, tmp_path: Path):
    """Accepted files have a prediction for each call."""
    source, path, watch = stepped_build.bundle / "verify.safetensors", tmp_path / "calls.safetensors", Watch()
    content, tensors = source.read_bytes(), load_file(source)
    others = [stepped_build.bundle / "calibration.safetensors", source]
    bins = len(RecordedCalls.load(source).type_errors)
    for seed in rounds(150):
        generator = random.Random(seed)
        if path.is_dir():
            path.rmdir()
        path.unlink(missing_ok=True)
        path.write_bytes(content)
        if generator.random() < 0.3:
            damage_file(path, others, generator, devices=False)
        else:
            told: Any = json.dumps(mutated([None] * bins, generator) if generator.random() < 0.5 else [None] * bins)
            metadata = {} if generator.random() < 0.1 else {"type_errors": told}
            save_file(mutated_tensors(tensors, generator), path, metadata)
        calls = watch(lambda: RecordedCalls.load(path), seed)
        if calls is not None:
            assert calls.inputs.keys() == calls.expected.keys() <= set(range(len(calls.type_errors))), seed
    assert watch.read and watch.refused


def test_damaged_trajectories(stepped_build, tmp_path: Path):
    """Manifests fit the damaged files. A loaded schedule names the computed steps for any timesteps."""
    folder, watch = fresh_copy(stepped_build.bundle, tmp_path / "bundle"), Watch()
    component = read_manifest(folder).components["denoiser"]
    assert component.reuse is not None
    path, content = folder / component.reuse.file, json.loads((folder / MANIFEST).read_text())
    whole = path.read_bytes()
    tensors = load(whole)
    for seed in rounds(60):
        generator = random.Random(seed)
        if generator.random() < 0.3:
            place = generator.randrange(len(whole))
            path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << generator.randrange(8)]) + whole[place + 1 :])
        else:
            save_file(mutated_tensors(tensors, generator), path)
        content["files"][path.name] = file_record(path).model_dump()
        seal(folder, content)
        loaded = watch(lambda: runtime.load(folder, backend="onnxruntime"), seed)
        if loaded is None:
            continue
        with loaded:
            steps = loaded["denoiser"].reuse.schedule(torch.linspace(900, 10, 6))
            assert len(steps.computed) == 6 and steps.computed[0], seed
    assert watch.read and watch.refused


def test_mutated_manifests_of_steps_that_are_left_out(stepped_build, tmp_path: Path):
    folder, watch = fresh_copy(stepped_build.bundle, tmp_path / "bundle"), Watch()
    content = json.loads((folder / MANIFEST).read_text())
    reuse = content["components"]["denoiser"]["reuse"]
    for seed in rounds(100):
        generator = random.Random(seed)
        content["components"]["denoiser"]["reuse"] = mutated(reuse, generator)
        seal(folder, content)
        manifest = watch(lambda: read_manifest(folder), seed)
        if manifest is not None:
            watch(lambda: runtime.load(folder, backend="onnxruntime").close(), seed)
    assert watch.refused


# Noise ----------------------------------------------------------------------------------------------------------------

CHOICES: dict[str, tuple[Any, ...]] = {
    "schedule": (*SCHEDULES, None),
    "prediction": (*PREDICTIONS, None),
    "noise_input": (*NOISE_INPUTS, None),
    "sampling": ("ode", "consistency"),
    "timesteps": (None, 2, 3, 20, 1000, 1_000_000),
    "shift": (None, 1.0, 3.0, 1e-6, 999_999),
    "sigma_min": (None, 0.002, 1e-300, 1e-9, 80, 1e8),
    "sigma_max": (None, 80, 0.002, 1e-300, 1e8, 1e9),
    "sigma_data": (0.5, 1.0, 16.0, 1e-300, 1e-9, 1e8),
    "timestep_factor": (1.0, 1000, 250.0, 1e-300, 1e-9, 1e8),
}
"""Usual values of a recipe's fields about the training, and values at the ends of the allowed ranges."""


def test_parametrisations(tmp_path: Path):
    """Accepted recipes have finite noise levels, and inputs for them."""
    assert CHOICES.keys() == {field.name for field in fields(Trained)}
    watch = Watch()
    for seed in rounds(400):
        generator = random.Random(seed)
        given = {name: generator.choice(values) for name, values in CHOICES.items() if generator.random() < 0.5}
        if generator.random() < 0.3:
            given[generator.choice(sorted(CHOICES))] = generator.choice(ODD)
        trained = watch(lambda given=given: Trained(**given).parametrisation(), seed)
        if trained is None:
            continue
        assert trained.sigmas.isfinite().all() and (trained.sigmas >= 0).all(), (seed, given)
        assert trained.timestep_max > 0, (seed, given)
        solver = generator.choice(SOLVERS), generator.choice([1, 2, 7])
        levels = watch(lambda trained=trained, solver=solver: trained.levels(*solver), seed)
        if levels is not None:
            assert levels.isfinite().all() and (levels.diff() <= 0).all(), (seed, given)
            inputs = trained.input_at(levels[0])
            assert inputs.isfinite().all(), (seed, given)
    assert watch.read and watch.refused
