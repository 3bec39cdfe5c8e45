"""Packages and settings that pipelines lack, and attributes that pipelines read off converted models."""

from __future__ import annotations

import copy
import pickle

import pytest
import tiny_pipelines
import torch
from tiny_pipelines import PIPELINES

from trtconvert import models
from trtconvert.errors import BackendUnavailable, UserError
from trtconvert.models.diffusers import diffusers_model
from trtconvert.models.loading import load_pipeline
from trtconvert.recipe import ModelSection
from trtconvert.runtime.diffusers import DiffusersDenoiser

diffusers = pytest.importorskip("diffusers", reason="needs diffusers")


def test_a_package_that_cleans_prompts_is_named(tmp_path, monkeypatch):
    """diffusers does not define the name if the package is not installed."""
    tiny_pipelines.with_text("wan").save_pretrained(tmp_path)
    monkeypatch.delattr("diffusers.pipelines.wan.pipeline_wan.ftfy", raising=False)
    monkeypatch.setattr(
        "diffusers.pipelines.wan.pipeline_wan.is_ftfy_available", lambda: True
    )  # the other pipelines do not ask
    section = ModelSection(source="diffusers", weights=tmp_path, options={"tokens": 8, **PIPELINES["wan"][1]})
    with pytest.raises(BackendUnavailable, match=r"^ftfy is not installed, which WanPipeline uses") as error:
        models.load(section)
    assert error.value.remedy == "pip install ftfy"


def test_a_component_is_not_pickled_and_is_copied(tmp_path):
    make, options = PIPELINES["stable_diffusion"]
    make().save_pretrained(tmp_path)
    record = diffusers_model(tmp_path, tokens=8, **options).diffusers
    denoiser = DiffusersDenoiser(
        lambda **named: named["sample"], record, "timestep", dtype=torch.float32, device=torch.device("cpu")
    )
    shallow, deep = copy.copy(denoiser), copy.deepcopy(denoiser)
    assert shallow.config == deep.config == denoiser.config and shallow.forward is denoiser.forward
    # With its own steps and caches.
    assert deep._denoiser is denoiser._denoiser and deep.forward is not denoiser.forward
    with pytest.raises(pickle.PicklingError) as error:
        pickle.dumps(denoiser)
    assert isinstance(error.value, UserError)
    assert "remedy: pass the bundle's path to the other process" in str(error.value)


@pytest.mark.parametrize("backend", ["flex", "sage", "xformers", "nonsense"])
def test_another_attention_of_the_environment_is_refused_by_the_variables_name(tmp_path, monkeypatch, backend):
    monkeypatch.setenv("DIFFUSERS_ATTN_BACKEND", backend)
    with pytest.raises(
        UserError, match=rf"(?s)got: DIFFUSERS_ATTN_BACKEND={backend}.*remedy: unset DIFFUSERS_ATTN_BACKEND"
    ):
        load_pipeline(tmp_path)
    for own in ("native", "_native_math"):
        monkeypatch.setenv("DIFFUSERS_ATTN_BACKEND", own)
        with pytest.raises(UserError, match="holds no diffusers pipeline"):
            load_pipeline(tmp_path)
