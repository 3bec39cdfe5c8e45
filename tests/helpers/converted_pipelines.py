"""Small pipelines with their components on ONNX Runtime."""

from __future__ import annotations

import inspect
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tiny_pipelines
import torch
from rich.console import Console
from tiny_pipelines import PIPELINES, SMALL_BUILD, TOKENS

from trtconvert.bundle import ComponentRecord
from trtconvert.cache import Cache, Stage
from trtconvert.evaluate.component_example import ComponentExample
from trtconvert.models.pipeline_sampler import as_images
from trtconvert.models.placed import Place
from trtconvert.pipeline import build
from trtconvert.progress import Reporter
from trtconvert.recipe import Recipe, load_recipe
from trtconvert.runtime.session import OnnxRuntimeComponent
from trtconvert.stages.build import Build
from trtconvert.stages.common import EXAMPLE, SIGNATURE
from trtconvert.stages.components import component_stages

diffusers = pytest.importorskip("diffusers", reason="needs diffusers")


@dataclass(frozen=True)
class Whole:
    """A saved pipeline, and a bundle of all its models."""

    pipeline: Path
    bundle: Path


def save(folder: Path, name: str) -> None:
    """Saves a pipeline with its text encoders."""
    tiny_pipelines.with_text(name).save_pretrained(folder)


def options(name: str, **own: Any) -> dict[str, Any]:
    """Returns options of `diffusers_model` with prompts of the tokenizers' length."""
    kind = {
        "stable_diffusion_3": "StableDiffusion3Pipeline",
        "flux": "FluxPipeline",
        "ltx": "LTXPipeline",
        "wan": "WanPipeline",
        "cogvideox": "CogVideoXPipeline",
        "pixart": "PixArtAlphaPipeline",
    }.get(name)
    call = dict(PIPELINES[name][1].get("call", {}))
    if kind and "max_sequence_length" in inspect.signature(getattr(diffusers, kind).__call__).parameters:
        call["max_sequence_length"] = TOKENS
    return PIPELINES[name][1] | {"call": call, "batch": [1, 1, 2], "prompts": ["a cat", "a dog"]} | own


def recipe_of(
    folder: Path, name: str, components: dict[str, Any], model: dict[str, Any] | None = None, **sections: Any
):
    recipe = {
        "model": {"source": "diffusers", "weights": "pipeline", "options": options(name), "dtype": "float32"}
        | (model or {}),
        "components": components,
        "attention": {"modes": "precision"},
        **SMALL_BUILD,
    } | sections
    (folder / "recipe.yaml").write_text(json.dumps(recipe))
    return load_recipe(folder / "recipe.yaml")


def convert(folder: Path, name: str, components: dict[str, Any], **sections: Any) -> Path:
    """Builds a bundle of a pipeline in `folder`."""
    if not (folder / "pipeline").is_dir():
        save(folder / "pipeline", name)
    recipe = recipe_of(folder, name, components, **sections)
    build(recipe, folder / "bundle", Cache(folder / "cache"), Reporter(Console(quiet=True)))
    return folder / "bundle"


def arguments(name: str) -> dict[str, Any]:
    """Returns arguments of a pipeline's call with a prompt that is not in the calibration."""
    chosen = options(name)
    sizes = {"height": "height", "width": "width", "frames": "num_frames"}
    given = {parameter: chosen[option] for option, parameter in sizes.items() if option in chosen}
    fixed = {"prompt": "a bird", "num_inference_steps": 2, "output_type": "pt"}
    return chosen["call"] | given | fixed | {"generator": torch.Generator().manual_seed(3)}


def draw(pipe: Any, name: str) -> torch.Tensor:
    pipe.set_progress_bar_config(disable=True)
    return as_images(pipe(**arguments(name))[0], decoded=True)


def component_records(folder: Path, recipe: Recipe) -> dict[str, tuple[Stage, ComponentRecord]]:
    """Runs the stages of a recipe's components; returns each stage and its record by name."""
    place = Place("cpu", "float32", "")
    stages = component_stages(Build(recipe, "weights", place, Cache(folder / "cache"), Reporter(Console(quiet=True))))
    return {
        name: (stage, ComponentRecord.model_validate_json((stage.folder / SIGNATURE).read_text()))
        for name, stage in stages.items()
    }


def component_error(stage: Stage, record: ComponentRecord) -> float:
    """Returns the largest relative error of a stage's exported model on ONNX Runtime."""
    example = ComponentExample.load(stage.folder / EXAMPLE, record)
    return max(example.errors(OnnxRuntimeComponent(stage.folder / record.onnx, record)).values())


FP32_ON_CPU = {"dtype": torch.float32, "device": torch.device("cpu")}


def halves_of(folder: Path, **options: Any) -> dict[str, tuple[OnnxRuntimeComponent, ComponentRecord]]:
    """Returns the halves of the VAE of a saved pipeline on ONNX Runtime, by method."""
    model = {"source": "diffusers", "weights": ".", "options": options, "dtype": "float32"}
    (folder / "recipe.yaml").write_text(
        json.dumps({"model": model, "components": {"vae_decoder": {}, "vae_encoder": {}}})
    )
    made = component_records(folder, load_recipe(folder / "recipe.yaml"))
    return {
        record.diffusers.method: (OnnxRuntimeComponent(stage.folder / record.onnx, record), record)
        for stage, record in made.values()
    }
