"""Denoisers load in the type of their files."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import tiny_pipelines
import torch
from diffusers import PixArtTransformer2DModel
from tiny_models import traced

from trtconvert import models
from trtconvert.diffusion_model import DiffusionModel
from trtconvert.models.loading import load_pipeline
from trtconvert.models.placed import _copied
from trtconvert.recipe import ModelSection


@pytest.fixture(scope="module", params=["flux", pytest.param("wan", marks=pytest.mark.soak)])
def stored(request, tmp_path_factory) -> ModelSection:
    """A pipeline in BF16."""
    folder = tmp_path_factory.mktemp(request.param)
    getattr(tiny_pipelines, request.param)().to(torch.bfloat16).save_pretrained(folder)
    options = {"batch": [1, 1, 2]} | tiny_pipelines.PIPELINES[request.param][1]
    return ModelSection(source="diffusers", weights=folder, dtype="bfloat16", options=options)


def types(model: DiffusionModel) -> set[torch.dtype]:
    return {x.dtype for x in model.denoiser.parameters()}


def test_weights_are_as_stored_where_it_is_asked_for_and_float32_otherwise(stored):
    kept = {torch.float32} if "Wan" in models.load(stored).name else set()  # as in diffusers
    assert types(models.load(stored, as_stored=True)) == {torch.bfloat16} | kept
    assert types(models.load(stored)) == {torch.float32}


@pytest.mark.first_case
def test_weights_of_another_type_than_the_recipe_has_are_float32(stored):
    other = stored.model_copy(update={"dtype": "float16"})
    assert types(models.load(other, as_stored=True)) == {torch.float32}


@pytest.mark.soak
def test_exports_in_float32_equal_those_of_a_model_in_float32(stored):
    narrow, wide = models.load(stored, as_stored=True), models.load(stored)
    ours, theirs = (traced(model, torch.bfloat16, like=wide).graph.initializers for model in (narrow, wide))
    assert {name: x.const_value.tobytes() for name, x in ours.items()} == {
        name: x.const_value.tobytes() for name, x in theirs.items()
    }


@pytest.mark.first_case
def test_copies_in_float32_compute_what_a_model_in_float32_does(stored):
    narrow, wide = models.load(stored, as_stored=True), models.load(stored)
    copied = _copied(narrow.denoiser, torch.device("cpu"), torch.float32)
    inputs = narrow.example(0, {name: opt for name, (_, opt, _) in narrow.dims.items()})
    with torch.no_grad():
        torch.testing.assert_close(copied(**inputs), wide.denoiser(**inputs), rtol=0, atol=0)


def test_tables_of_positions_are_computed_in_float32(tmp_path):
    tiny_pipelines.pixart().to(torch.bfloat16).save_pretrained(tmp_path)
    denoiser = load_pipeline(tmp_path).transformer
    exact: Any = PixArtTransformer2DModel.from_config(denoiser.config)
    assert denoiser.dtype == torch.bfloat16
    assert torch.equal(denoiser.pos_embed.pos_embed, exact.pos_embed.pos_embed)
    assert not torch.equal(exact.pos_embed.pos_embed, exact.pos_embed.pos_embed.bfloat16().float())


def test_weights_of_several_types_are_loaded_in_float32(tmp_path):
    pipe: Any = tiny_pipelines.pixart()
    pipe.transformer.to(torch.bfloat16)
    pipe.transformer.scale_shift_table.data = pipe.transformer.scale_shift_table.data.float()
    pipe.save_pretrained(tmp_path)
    assert load_pipeline(tmp_path).transformer.dtype == torch.float32


def test_text_encoders_compute_each_prompt_once(tmp_path, monkeypatch):
    calls = Counter[bytes]()
    pipe = tiny_pipelines.with_text("stable_diffusion")
    pipe.save_pretrained(tmp_path)
    kind = type(pipe.text_encoder)
    forward = kind.forward

    def counting(self, input_ids, *args, **kwargs):
        calls[input_ids.numpy().tobytes()] += 1
        return forward(self, input_ids, *args, **kwargs)

    monkeypatch.setattr(kind, "forward", counting)
    models.load(
        ModelSection(source="diffusers", weights=tmp_path, options={"height": 64, "width": 64, "batch": [1, 1, 2]})
    )
    assert calls
    assert set(calls.values()) == {1}
