"""`trtconvert init`: recipes load and contain the findings; those in recipes/ are the same."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file
from support import REPOSITORY, refusal, run

from trtconvert.models.saved_sizes import few_steps, saved_sizes
from trtconvert.recipe import load_recipe
from trtconvert.starter import PUBLISHED, recipe_text

RECIPES = REPOSITORY / "recipes"


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_recipes_of_published_models_are_those_that_init_writes(name):
    """`trtconvert init NAME -o recipes/NAME.yaml --force` writes a recipe again."""
    path = RECIPES / f"{name}.yaml"
    assert path.read_text(encoding="utf-8") == recipe_text(name, path)
    recipe = load_recipe(path)
    assert recipe.model.source == "diffusers" and recipe.model.weights == RECIPES / PUBLISHED[name].folder
    assert recipe.model.dtype == PUBLISHED[name].dtype and recipe.components


def test_every_pipeline_is_a_class_of_diffusers():
    diffusers = pytest.importorskip("diffusers")
    assert [known.pipeline for known in PUBLISHED.values() if not hasattr(diffusers, known.pipeline)] == []


@pytest.fixture
def pipeline(tmp_path):
    """A Flux in BF16 as `save_pretrained` writes it, as far as headers show."""
    folder = tmp_path / "my flux"
    (folder / "transformer").mkdir(parents=True)
    (folder / "model_index.json").write_text(json.dumps({"_class_name": "FluxPipeline"}))
    weights = {"weight": torch.zeros(8, 8, dtype=torch.bfloat16)}
    save_file(weights, folder / "transformer" / "diffusion_pytorch_model.safetensors")
    return folder


def test_a_folder_becomes_a_recipe_with_its_type_prompts_and_loras(pipeline, tmp_path):
    (tmp_path / "prompts.txt").write_text("a cat\n")
    (tmp_path / "style.safetensors").touch()
    arguments = ("--prompts", tmp_path / "prompts.txt", "--lora", tmp_path / "style.safetensors")
    outcome = run("init", pipeline, "-o", tmp_path / "flux.yaml", *arguments)
    assert outcome.exit_code == 0 and "trtconvert build" in outcome.output
    recipe = load_recipe(tmp_path / "flux.yaml")
    assert recipe.model.weights == pipeline and recipe.model.dtype == "bfloat16"
    assert recipe.model.options["height"] == 1024 and recipe.calibration.data == tmp_path / "prompts.txt"
    assert recipe.calibration.samples == 1
    assert [lora.file for lora in recipe.loras] == [tmp_path / "style.safetensors"]
    before = (tmp_path / "flux.yaml").read_text()
    refusal(run("init", "sdxl", "-o", tmp_path / "flux.yaml"), "exists already", "--force")
    assert (tmp_path / "flux.yaml").read_text() == before
    assert run("init", "sdxl", "-o", tmp_path / "flux.yaml", "--force").exit_code == 0
    assert load_recipe(tmp_path / "flux.yaml").model.dtype == "float16"


def test_other_pipelines_and_files_have_what_can_be_told_of_them(pipeline, tmp_path):
    (pipeline / "model_index.json").write_text(json.dumps({"_class_name": "OtherPipeline"}))
    (tmp_path / "other.yaml").write_text(recipe_text(str(pipeline), tmp_path / "other.yaml"))
    recipe = load_recipe(tmp_path / "other.yaml")
    assert recipe.model.dtype == "bfloat16" and recipe.model.options == {}
    weights = pipeline / "transformer" / "diffusion_pytorch_model.safetensors"
    text = recipe_text(str(weights), tmp_path / "other.yaml")
    assert "config: FOLDER # of the pipeline, with model_index.json" in text


def test_prompts_that_nothing_reads_are_refused(tmp_path):
    """A denoiser that embeds tokens itself has a tokenizer alone."""
    pytest.importorskip("diffusers")
    folder, prompts = tmp_path / "pipeline", tmp_path / "prompts.txt"
    prompts.write_text("a cat\n")
    index = {"_class_name": "AnyPipeline", "transformer": ["diffusers", "DiT"]}
    for part in ("transformer", "tokenizer"):
        (folder / part).mkdir(parents=True)
    (folder / "model_index.json").write_text(json.dumps(index))
    outcome = run("init", folder, "-o", tmp_path / "r.yaml", "--prompts", prompts)
    refusal(outcome, "reads no prompts", "leave --prompts out")
    with_tokens = index | {"tokenizer": ["transformers", "T5Tokenizer"]}
    # The text encoder reads an empty prompt.
    (folder / "model_index.json").write_text(json.dumps(with_tokens | {"_class_name": "MarigoldDepthPipeline"}))
    outcome = run("init", folder, "-o", tmp_path / "r.yaml", "--prompts", prompts)
    refusal(outcome, "reads no prompts", "a call without a prompt", "leave --prompts out")
    (folder / "model_index.json").write_text(json.dumps(with_tokens))
    assert run("init", folder, "-o", tmp_path / "r.yaml", "--prompts", prompts).exit_code == 0


def test_models_that_stay_in_torch_are_named(tmp_path):
    folder = tmp_path / "pipeline"
    parts = {"unet": "UNet", "text_encoder": "CLIP", "controlnet": "ControlNet", "scheduler": "DDIM", "vae": "VAE"}
    for part in (*parts, "image_encoder"):
        (folder / part).mkdir(parents=True)
        name = "scheduler_config.json" if part == "scheduler" else "config.json"
        (folder / part / name).write_text("{}")
    index = {"_class_name": "AnyPipeline", **{part: ["diffusers", kind] for part, kind in parts.items()}}
    (folder / "model_index.json").write_text(json.dumps(index))
    text = recipe_text(str(folder), tmp_path / "r.yaml")
    assert "become engines; in torch: controlnet" in text
    (folder / "model_index.json").write_text(json.dumps(index | {"image_encoder": ["transformers", "CLIP"]}))
    assert "; in torch: controlnet, image_encoder" in recipe_text(str(folder), tmp_path / "r.yaml")


def recipe_of_saved(pipe, folder):
    """Return the text and the recipe of `init` for a saved pipeline."""
    pipe.save_pretrained(folder)
    at = folder.parent / "recipe.yaml"
    at.write_text(recipe_text(str(folder), at))
    return at.read_text(), load_recipe(at)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("stable_diffusion", {"height": 32, "width": 32}),
        ("stable_diffusion_xl", {"height": 32, "width": 32}),
        ("stable_diffusion_3", {"height": 32, "width": 32}),
        ("flux", {"height": 512, "width": 512}),  # its pipeline draws 128 latents in a row, whatever its VAE
        ("cogvideox", {"height": 64, "width": 64, "frames": 9}),
        ("wan", {"height": 480, "width": 832, "frames": 81}),  # nothing in the folder says it
    ],
)
def test_sizes_come_from_the_folder(tmp_path, name, sizes):
    tiny = pytest.importorskip("tiny_pipelines")
    text, recipe = recipe_of_saved(tiny.PIPELINES[name][0](), tmp_path / "tiny")
    assert {size: recipe.model.options[size] for size in sizes} == sizes
    assert recipe.attention.modes == "auto" and recipe.verify.steps == 20  # it is small, whatever the published one is
    assert not any(words in text for words in ("sparse", "days on a CPU", "T5", "draws from prompts"))


def test_a_pipeline_like_none_is_told_the_sizes_of_its_folder(tmp_path):
    tiny = pytest.importorskip("tiny_pipelines")
    text, recipe = recipe_of_saved(tiny.pixart(), tmp_path / "tiny")
    assert recipe.model.options == {} and "default: the pipeline's own, here height 32, width 32" in text


def test_sizes_of_two_numbers_other_vaes_and_damaged_configurations(tmp_path):
    for part, config in (("unet", {"sample_size": [4, 6]}), ("vae", {"spatial_compression_ratio": 16})):
        (tmp_path / part).mkdir()
        (tmp_path / part / "config.json").write_text(json.dumps(config))
    assert saved_sizes(tmp_path) == {"height": 64, "width": 96}
    (tmp_path / "vae" / "config.json").write_text(json.dumps({"temperal_downsample": [False, True, True]}))
    assert saved_sizes(tmp_path) == {"height": 32, "width": 48}
    (tmp_path / "vae" / "config.json").write_text("{")
    assert saved_sizes(tmp_path) == {}
    (tmp_path / "unet" / "config.json").write_text(json.dumps({"sample_size": "8"}))
    assert saved_sizes(tmp_path) == {} and few_steps(tmp_path) == ""


def test_models_of_few_steps_get_few(tmp_path):
    tiny = pytest.importorskip("tiny_pipelines")
    pipe = tiny.stable_diffusion()
    _, recipe = recipe_of_saved(pipe, tmp_path / "tiny")
    assert recipe.calibration.steps == recipe.verify.steps == 20
    text, recipe = recipe_of_saved(pipe, tmp_path / "tiny-turbo")
    assert recipe.calibration.steps == recipe.verify.steps == recipe.plan.steps == recipe.calibration.bins == 4
    assert "steps: 4 # as few as in training: its name has turbo in it" in text
    pipe.scheduler = tiny.diffusers.LCMScheduler.from_config(pipe.scheduler.config)
    assert "its scheduler is LCMScheduler" in recipe_of_saved(pipe, tmp_path / "fast")[0]
    flux = tiny.flux()
    flux.save_pretrained(tmp_path / "flow")
    assert few_steps(tmp_path / "flow") == ""
    config = tmp_path / "flow" / "transformer" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"guidance_embeds": False}))
    assert "as schnell" in few_steps(tmp_path / "flow")


@pytest.mark.parametrize(
    ("model", "told"),
    [
        ("sdxll", ["did you mean 'sdxl'?"]),
        ("nowhere", ["one of sd15, sdxl"]),
        ("model.onnx", ["no ONNX model, or damaged", "0 bytes"]),
        ("folder", ["is not a diffusers pipeline", "got: notes.txt"]),
    ],
)
def test_sources_without_a_possible_recipe_are_refused(tmp_path, monkeypatch, model, told):
    (tmp_path / "model.onnx").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "notes.txt").touch()
    monkeypatch.chdir(tmp_path)
    refusal(run("init", model), *told)
    assert not (tmp_path / "recipe.yaml").exists()
    refusal(run("init", "sdxl", "--prompts", "none.txt"), "no file of prompts", "with one prompt a line")
    (tmp_path / "empty.txt").write_text("\n \n")
    refusal(run("init", "sdxl", "--prompts", "empty.txt"), "there are no prompts in", "leave --prompts out")


@pytest.mark.parametrize(
    ("kind", "lines"),
    [
        ("StableDiffusionImg2ImgPipeline", ["    image: photo.png # input image of the calibration"]),
        ("StableDiffusionInpaintPipeline", ["    image: photo.png", "    mask_image: mask.png"]),
        ("StableDiffusionXLControlNetImg2ImgPipeline", ["    image: photo.png", "    control_image: photo.png"]),
        ("WanVideoToVideoPipeline", ["    video: [frame-0.png, frame-1.png] # input frames, all"]),
        pytest.param(
            "Kandinsky6SRPipeline",
            ["    video: [frame-0.png, frame-1.png] # input frames, all"],  # or arrays
            marks=pytest.mark.as_of(diffusers="0.42"),
        ),
        (
            "LTXConditionPipeline",
            ["    image: photo.png", "  # images: {video: [frame-0.png, frame-1.png]} # of these"],
        ),
        ("FluxFillPipeline", ["    image: photo.png", "    mask_image: mask.png"]),  # declared as tensors or None
        ("FluxKontextPipeline", ["    image: photo.png"]),
        ("QwenImageEditPipeline", ["  # images: {image: photo.png} # of these"]),
        ("MarigoldDepthPipeline", ["    image: photo.png"]),
        ("StableVideoDiffusionPipeline", ["    image: photo.png"]),
        ("SanaPipeline", []),
        ("PipelineOfNobody", []),
    ],
)
def test_images_come_from_the_signature_of_the_call(tmp_path, kind, lines):
    """IP-Adapters, latents and embeddings are no images of a recipe."""
    pytest.importorskip("diffusers")
    folder = tmp_path / "pipeline"
    folder.mkdir()
    (folder / "model_index.json").write_text(json.dumps({"_class_name": kind, "vae": ["diffusers", "AutoencoderKL"]}))
    text = recipe_text(str(folder), tmp_path / "r.yaml")
    found = [line for line in text.splitlines() if ".png" in line]
    assert len(found) == len(lines) and all(line.startswith(start) for line, start in zip(found, lines, strict=True))
    (tmp_path / "r.yaml").write_text(text)
    assert set(load_recipe(tmp_path / "r.yaml").model.images) == {
        line.split(":")[0].strip() for line in lines if line.startswith("    ")
    }
