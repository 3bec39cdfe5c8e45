"""Manifest records of pipeline calls, damaged at random by a seed: read and called, or refused with a user error."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from damage import Watch, mutated, rounds
from pydantic import ValidationError

from trtconvert.bundle import ComponentRecord, DiffusersRecord
from trtconvert.errors import TrtconvertError, UserError, first_problem
from trtconvert.manifest_checks import _of_diffusers
from trtconvert.runtime.diffusers import DiffusersDenoiser

pytest.importorskip("diffusers", reason="needs diffusers")

SHAPES = {
    "hidden_states": ["batch", 4, 8],
    "timestep": ["batch"],
    "timestep.share": ["batch", 4],
    "captions": ["batch", "tokens", 8],
    "captions.mask": ["batch", "tokens"],
    "controls.0": ["batch", 4, 8],
    "controls.5": ["batch", 4, 8],
    "sizes.0": ["batch"],
    "text": ["batch", "words", 8],
}

CALL: dict[str, Any] = {
    "hidden_states": torch.zeros(2, 4, 8),
    "timestep": torch.tensor([[0.0, 500.0, 500.0, 1000.0]] * 2),
    "audio_timestep": torch.tensor([1000.0, 1000.0]),
    "captions": [torch.zeros(3, 8), torch.zeros(2, 8)],
    "controls": {0: torch.zeros(2, 4, 8), 5: torch.zeros(2, 4, 8)},
    "sizes": (torch.ones(2), 3),
    "text": torch.zeros(2, 3, 8),
    "return_dict": False,
}

RECORD: dict[str, Any] = {
    "pipeline": "LTX2Pipeline",
    "component": "transformer",
    "model": "CogVideoXDDIMScheduler",  # makes no part: the class is of diffusers, and quick to make
    "config": {},
    "output": "diffusers.models.transformers.transformer_ltx2:AudioVisualModelOutput",
    "parameters": [*CALL, "**kwargs"],
    "arguments": {
        "hidden_states": {"tensor": "hidden_states"},
        "timestep": {"share": "timestep.share", "of": "timestep"},
        "audio_timestep": {"tensor": "timestep"},
        "captions": {"rows": "captions", "least": 2},
        "controls": {
            "dict": {"0": {"tensor": "controls.0"}, "5": {"tensor": "controls.5", "least": 1}},
            "numbered": True,
        },
        "sizes": {"list": [{"tensor": "sizes.0", "dtype": "int32"}, {"value": 3}], "tuple": True},
        "text": {"tensor": "text", "least": 4},
    },
    "predictions": {"sample": [4, 8], "audio_sample": [2, 3]},
    "attributes": {"mean": {"value": 1.5}, "bn": {"module": {"running_mean": {"tensor": [1.0, 2.0]}}}},
}


def component(record: Any) -> ComponentRecord:
    """
    Raises:
        UserError: the record is none, or contradicts the component.
    """
    inputs = [{"name": name, "dtype": "float32", "shape": shape} for name, shape in SHAPES.items()]
    fields = {
        "onnx": "denoiser.onnx",
        "inputs": inputs,
        "outputs": [{"name": "out", "dtype": "float32", "shape": ["batch", 38]}],
        "timestep_input": "timestep",
        "timestep_max": 1000.0,
        "dims": {"batch": [1, 2, 4], "tokens": [1, 3, 8], "words": [4, 4, 8]},
        "engines": [],
        "diffusers": record,
    }
    try:
        made = ComponentRecord.model_validate(fields)
    except ValidationError as error:
        raise UserError("damaged", expected="fields", got=first_problem(error), remedy="none") from error
    for found in _of_diffusers(made):
        raise UserError("damaged", expected="fields that fit", got=found, remedy="none")
    return made


def called(record: Any) -> tuple[torch.Tensor, ...]:
    """Output of a denoiser that predicts zeros, for a pipeline."""
    made = component(record)
    assert made.diffusers is not None
    denoiser = DiffusersDenoiser(
        lambda **named: torch.zeros(len(named["hidden_states"]), 38),
        made.diffusers,
        made.timestep_input,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    return denoiser.forward(**CALL)


@pytest.mark.as_of(diffusers="0.42")
def test_mutated_records_are_called_or_refused():
    watch = Watch()
    called(RECORD)  # diffusers' modules are imported before anything is timed
    for seed in rounds(200):
        generator, record = random.Random(seed), copy.deepcopy(RECORD)
        for _ in range(generator.choice([1, 1, 2])):
            record = mutated(record, generator)
        if record is not None:
            watch(lambda record=record: called(record), seed)
    assert watch.read and watch.refused


@pytest.mark.as_of(diffusers="0.42")
def test_the_whole_vocabulary_is_read():
    video, sound = called(RECORD)
    assert video.shape == (2, 4, 8) and sound.shape == (2, 2, 3)


@pytest.mark.parametrize(
    ("place", "node", "got"),
    [
        (("arguments", "timestep"), {"share": "timestep.share"}, "arguments.timestep: neither"),
        (("arguments", "timestep"), {"share": "timestep.share", "of": {}}, "arguments.timestep: neither"),
        (("arguments", "sizes", "list", 1), {"share": "s", "of": "timestep"}, "arguments.sizes.1: neither"),
        (("arguments", "captions", "least"), 10**40, "rows of captions, which has at most 8"),
        (("arguments", "text", "least"), 9, "at least 9 rows of text, which has at most 8"),
        (("arguments", "controls", "dict", "x"), {"value": 1}, "arguments.controls: neither"),
        (("arguments", "sizes", "tuple"), False, "arguments.sizes: neither"),
        (("predictions", "sample"), [4, 9], "42 numbers of sample, audio_sample, but the output is"),
        (("attributes", "mean"), {"tensor": ["x"]}, "attributes.mean: no number"),
        (("attributes", "mean"), {"tensor": [[1.0], [1.0, 2.0]]}, "attributes.mean: no number"),
        (("attributes", "bn"), {"module": {"mean": {"tensor": {}}}}, "attributes.bn: no number"),
        (("attributes", "_modules"), {"value": 1}, "'_modules' is not the name of an attribute"),
        (("attributes", "rope"), {"part": True}, "the part 'rope' of CogVideoXDDIMScheduler"),
    ],
)
def test_inconsistent_records_are_named(place, node, got):
    record = copy.deepcopy(RECORD)
    *above, last = place
    inner: Any = record
    for key in above:
        inner = inner[key]
    inner[last] = node
    with pytest.raises(TrtconvertError) as error:
        called(record)
    assert got in str(error.value)


def test_bundles_of_before_say_how_many_timesteps_a_sample_has():
    """They are read where a sample has one, and refused where a sample has one for each token."""
    assert DiffusersRecord.model_validate(RECORD | {"timestep_sizes": []}) == DiffusersRecord.model_validate(RECORD)
    with pytest.raises(ValidationError, match="timestep_sizes"):
        DiffusersRecord.model_validate(RECORD | {"timestep_sizes": [4]})
