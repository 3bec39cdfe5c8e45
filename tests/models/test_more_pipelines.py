"""Pipelines other than plain text-to-image: each converts, or is refused with its reason."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_pipelines
import torch
from exports import int8_weights
from further_pipelines import CONVERTIBLE, REFUSED, cosmos2, kandinsky6_upscaler
from models_page import PAGE, page
from PIL import Image
from rich.console import Console
from safetensors.torch import load_file
from support import run
from tiny_pipelines import SIZE, SMALL_BUILD, WIDTH, errors_beside, picture, unet
from tolerances import INT8_CALL

from trtconvert import models, runtime
from trtconvert.cache import Cache
from trtconvert.calib.calibrate import parts_to_convert
from trtconvert.data_flow import UNUSED
from trtconvert.documents import PIPELINE_INDEX
from trtconvert.errors import BackendUnavailable, UserError
from trtconvert.models.diffusers import diffusers_model
from trtconvert.models.exportable import make_exportable
from trtconvert.models.loading import load_pipeline
from trtconvert.models.pipelines import PipelineCaller
from trtconvert.pipeline import build
from trtconvert.progress import Reporter
from trtconvert.recipe import AttentionSection, LayersSection, load_recipe
from trtconvert.stages.components import component_names

diffusers = pytest.importorskip("diffusers", reason="needs diffusers")

QUICK = ("dit",)
# Each takes one to five seconds; but for GLM and HiDream, a pipeline of the same models is tried in every run.
SLOW = (
    "glm_image", "hidream", "sky_reels", "ltx_2_image_to_video", "kandinsky6", "ideogram4_unconditional", "marigold_intrinsics",
    "z_image_control_net_inpainting",
)  # fmt: skip


def save(folder: Path, name: str, **sections: Any) -> Path:
    """Saves a pipeline and a recipe for it with the default batches."""
    tiny = CONVERTIBLE[name]
    tiny.make().save_pretrained(folder / "pipeline")
    recipe = {
        "model": {
            "source": "diffusers",
            "weights": "pipeline",
            "dtype": "float32",
            "options": {"tokens": 8, "prompts": ["a cat", "a dog"]} | tiny.options,
            "images": {image: str(picture(folder / f"{image}.png", 0, tiny.side)) for image in tiny.images},
        },
        "attention": {"modes": ["precision", "balanced"]},
        **SMALL_BUILD,
    } | sections
    (folder / "recipe.yaml").write_text(json.dumps(recipe))
    return folder / "recipe.yaml"


def model_of(folder: Path, name: str, **options):
    """Loads the model of a pipeline in the folder's `pipeline`, which is saved there first."""
    tiny = CONVERTIBLE[name]
    if not (folder / "pipeline").is_dir():
        tiny.make().save_pretrained(folder / "pipeline")
    images = {image: picture(folder / f"{image}.png", 0, tiny.side) for image in tiny.images}
    given: dict[str, Any] = {"tokens": 8, **tiny.options, **options}
    return diffusers_model(folder / "pipeline", images=images, **given)


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.soak) for name in CONVERTIBLE]
)
def test_a_pipeline_draws_with_its_converted_denoiser(tmp_path, name):
    """The pipeline's call gets new prompts and seeds: every prediction is close to that of the pipeline's model."""
    recipe = load_recipe(save(tmp_path, name))
    build(recipe, tmp_path / "bundle", Cache(tmp_path / "cache"), Reporter(Console(quiet=True)))
    sampler = models.load(recipe.model).sample
    caller = PipelineCaller(
        load_pipeline(tmp_path / "pipeline"),
        sampler.record.component,
        8,
        ("a fox",),
        sampler.caller.arguments,
        sampler.caller.images,
    )
    original = getattr(caller.pipe, caller.component)
    seeds = [101] if sampler.batch == 1 else [101, 102]
    with runtime.load(tmp_path / "bundle") as bundle, torch.no_grad():
        dropped_in = bundle.as_diffusers()
        errors = errors_beside(dropped_in, original)
        if caller.images:
            caller.first_call(seeds, sampler.sizes)  # the model decides whether samples share an image
        setattr(caller.pipe, caller.component, dropped_in)
        drawn = caller(seeds, 4, sampler.sizes)
    assert len(drawn) == len(seeds) and drawn.isfinite().all()
    assert errors and max(errors) <= INT8_CALL


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.soak) if name in SLOW else name for name in CONVERTIBLE]
)
def test_a_sample_depends_on_its_seed_alone(tmp_path, name):
    """There are as many samples as seeds, whatever argument of the pipeline counts samples."""
    model = model_of(tmp_path, name)
    both, alone = (model.sample(model.denoiser, seeds, steps=2, solver="ddim") for seeds in ([3, 4], [4]))
    assert len(both) == 2 and both.dim() == 4 and both.min() >= 0 and both.max() <= 1
    # Kandinsky 5 scales the first frames to the mean and deviation of all samples' later frames.
    told = [notice for notice in model.notices if "in a call of several than alone" in notice]
    assert ((both[1:] - alone).abs().max() <= 2e-3) == (not told) == (name != "kandinsky5_i2v")
    assert (both[0] - both[1]).abs().max() > 0.01


@pytest.mark.parametrize("name", REFUSED)
def test_pipelines_without_a_conversion_are_refused_with_a_reason(tmp_path, name):
    refused = REFUSED[name]
    refused.make().save_pretrained(tmp_path)
    images = {image: picture(tmp_path / f"{image}.png", 0, 64) for image in refused.images}
    given: dict[str, Any] = {"tokens": 8, "images": images, **refused.options}
    with pytest.raises(UserError) as error:
        diffusers_model(tmp_path, **given)
    for part in ("expected: ", "got: ", "remedy: ", *refused.told):
        assert part in str(error.value)


def test_classes_are_drawn_by_the_seed_or_taken_from_the_recipe_by_turns(tmp_path):
    model = model_of(tmp_path, "dit")
    taken = []

    def denoiser(**named):
        taken.append(named["class_labels"].tolist())
        return model.denoiser(**named)

    model.sample(denoiser, [3, 4], steps=2, solver="ddim")
    model.sample(denoiser, [4, 5], steps=2, solver="ddim")
    assert taken[0][1] == taken[2][0] and taken[0][0] != taken[0][1]  # by the seed
    assert taken[0][2:] == [1000, 1000]  # guidance's label for no class
    assert {label for labels in taken for label in labels[:2]} <= {*range(1000)}
    chosen = model_of(tmp_path, "dit", call={"class_labels": [207, 360, 387], "guidance_scale": 1.0})
    taken.clear()
    chosen.sample(denoiser, [3, 4, 5], steps=2, solver="ddim")
    assert taken[0] == [207, 360, 387]
    for unfit in ([1000], [-1], "cat", []):
        with pytest.raises(UserError, match=r"(?s)class_labels does not fit.*from 0 to 999.*remedy: .*leave it out"):
            model_of(tmp_path, "dit", call={"class_labels": unfit})


def test_inputs_shared_by_all_samples_are_no_noise(tmp_path):
    """Rotations beyond ±1 would take queries out of their ranges, and engines would be timed on inputs that no pipeline
    passes."""
    model = model_of(tmp_path, "hunyuan_dit")
    example = model.example(0, {"batch": 3})
    assert example["image_rotary_emb.0"].abs().max() <= 1 and example["image_meta_size"][0, 0] == 1024
    assert len(example["image_meta_size"]) == 3 and example["encoder_hidden_states"][0].std() > 0.5
    assert not torch.equal(example["hidden_states"][0], example["hidden_states"][1])


def test_a_pipeline_without_its_image_is_told_so(tmp_path):
    CONVERTIBLE["marigold"].make().save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"(?s)not called without image.*remedy: .*images: \{image: FILE.png\}"):
        diffusers_model(tmp_path)


@pytest.mark.parametrize(
    ("kind", "remedy"),
    [
        ("StableDiffusionImg2ImgPipeline", "`images: {image: FILE.png}`"),
        ("StableDiffusionInpaintPipeline", "`images: {image: FILE.png, mask_image: FILE.png}`"),
    ],
)
def test_a_call_that_fails_without_its_images_names_them(tmp_path, kind, remedy):
    """Their signatures have a default, and the call fails with it."""
    parts = tiny_pipelines.with_text("stable_diffusion").components
    made = tiny_pipelines.pipeline(getattr(diffusers, kind), **parts, requires_safety_checker=False)
    made.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"call of .* failed") as error:
        diffusers_model(tmp_path, prompts=["a cat"])
    assert error.value.remedy == f"name files of images under model, {remedy}"


class Guardrail(torch.nn.Module):
    """A stand-in for the package that judges prompts and videos for Cosmos, and for its models."""

    dtype, device = torch.float32, torch.device("cpu")

    def __init__(self) -> None:
        super().__init__()
        self.judged: list[str] = []

    def check_text_safety(self, prompt):
        self.judged.append(prompt)
        return True

    def check_video_safety(self, frames):
        self.judged.append("frames")
        return frames


def test_a_pipeline_that_does_not_draw_without_its_safety_checker_keeps_it(tmp_path, monkeypatch):
    pipe = cosmos2(Guardrail())
    pipe.register_modules(safety_checker=None)
    pipe.save_pretrained(tmp_path)
    given: dict[str, Any] = {"tokens": None, "prompts": ["a cat", "a dog"], "call": {"max_sequence_length": 8}}
    with pytest.raises(
        BackendUnavailable, match=r"(?s)cosmos_guardrail is not installed.*pip install cosmos_guardrail"
    ):
        diffusers_model(tmp_path, height=32, width=32, **given)
    monkeypatch.setattr("diffusers.pipelines.cosmos.pipeline_cosmos2_text2image.CosmosSafetyChecker", Guardrail)
    model = diffusers_model(tmp_path, height=32, width=32, **given)
    drawn = model.sample(model.denoiser, [0, 1], steps=2, solver="ddim")
    assert drawn.shape[:2] == (2, 3) and drawn.isfinite().all()
    judged = model.sample.caller.pipe.safety_checker.judged
    assert {"a cat", "a dog", "frames"} <= set(judged)


@pytest.mark.parametrize(
    ("scale", "told"),
    [("modality_scale", "modality_scale: 1 and audio_modality"), ("stg_scale", "stg_scale: 0 and audio_stg_scale: 0")],
)
def test_guidance_that_calls_otherwise_is_named_with_its_settings(tmp_path, scale, told):
    """The pipeline guides in this way by default."""
    ltx = CONVERTIBLE["ltx_2"]
    ltx.make().save_pretrained(tmp_path)
    call = {name: value for name, value in ltx.options["call"].items() if not name.endswith(scale)}
    with pytest.raises(UserError, match=rf"remedy: call the pipeline with {told}"):
        diffusers_model(tmp_path, tokens=8, **{**ltx.options, "call": call})


def test_prompts_of_other_lengths_are_refused_with_a_remedy_that_leads_out(tmp_path):
    """BriaFibo takes no embeddings, and no length to pad prompts to: no remedy may recommend either."""
    options = {"prompts": ["a cat", "a dog on a hill"]}
    with pytest.raises(
        UserError, match=r"(?s)as many tokens as its longest prompt.*remedy: give model.options.prompts"
    ):
        model_of(tmp_path, "bria_fibo", **options)
    with pytest.raises(UserError, match=r"(?s)does not let its caller say.*take model.options.tokens out.*as one text"):
        model_of(tmp_path, "bria_fibo", **options, tokens=[2, 8, 16])
    with pytest.raises(
        UserError, match=r"6 for 'a b c d', 8 for 'abcdef'"
    ):  # the shortest and the longest text are alike
        model_of(tmp_path, "bria_fibo", prompts=["a b c d", "abcdef", "abcd"])
    inputs = {spec.name for spec in model_of(tmp_path, "bria_fibo", prompts=["a dog on a hill"]).inputs}
    assert {"text_encoder_layers.0", "text_encoder_layers.1"} <= inputs


def test_embeddings_that_need_prompts_beside_them_are_no_remedy(tmp_path, monkeypatch):
    """GLM-Image draws tokens from its prompt, and takes embeddings beside the prompt alone."""
    own = diffusers.ErnieImagePipeline.__call__

    @functools.wraps(own)
    def with_prompt(self, **named):
        if named.get("prompt") is None:
            raise ValueError("Provide `prompt`.")
        return own(self, **named)

    monkeypatch.setattr(diffusers.ErnieImagePipeline, "__call__", with_prompt)
    options = {"prompts": ["a cat", "a dog on a hill"]}
    with pytest.raises(
        UserError, match=r"(?s)as many tokens as its longest prompt.*remedy: give model.options.prompts"
    ):
        model_of(tmp_path, "ernie_image", **options, tokens=None)
    with pytest.raises(UserError, match=r"(?s)does not let its caller say.*take model.options.tokens out.*as one text"):
        model_of(tmp_path, "ernie_image", **options)


def test_tensors_are_no_remedy_in_a_recipe(tmp_path, monkeypatch):
    """diffusers names embeddings and masks in its errors."""

    def failing(self, prompt=None, prompt_embeds: torch.Tensor | None = None, max_steps: int = 3, **named):
        raise ValueError("provide `prompt_embeds`, or fewer `max_steps`")

    tiny_pipelines.with_text("stable_diffusion").save_pretrained(tmp_path)
    monkeypatch.setattr(diffusers.StableDiffusionPipeline, "__call__", failing)
    with pytest.raises(UserError) as error:
        diffusers_model(tmp_path)
    assert error.value.remedy == "set max_steps in model.options.call (the default is 3)"


def test_embeddings_that_a_pipeline_takes_beside_prompts_are_refused(tmp_path, monkeypatch):
    """Kandinsky 2.1 takes those of its prior."""
    own = diffusers.StableDiffusionPipeline.__call__

    def with_embeddings(self, prompt, image_embeds: torch.Tensor, **named):
        return own(self, prompt, **named)

    tiny_pipelines.with_text("stable_diffusion").save_pretrained(tmp_path)
    monkeypatch.setattr(diffusers.StableDiffusionPipeline, "__call__", with_embeddings)
    with pytest.raises(UserError, match=r"takes image_embeds beside its prompts") as error:
        diffusers_model(tmp_path)
    assert "images:" not in error.value.remedy and "unet" in error.value.remedy


def test_a_vae_that_does_not_decode_is_told_without_a_component(tmp_path, monkeypatch):
    """Allegro's decodes in tiles alone, which is a setting that is not saved. The remedy works."""

    def decode(self, z, return_dict=True, generator=None):
        raise NotImplementedError("Decoding without tiling has not been implemented yet.")

    tiny_pipelines.stable_diffusion().save_pretrained(tmp_path)
    monkeypatch.setattr(diffusers.AutoencoderKL, "decode", decode)
    with pytest.raises(UserError, match=r"(?s)cannot draw.*without tiling") as error:
        diffusers_model(tmp_path, **SIZE, tokens=8)
    assert '"vae": [null, null]' in error.value.remedy and "component" not in error.value.remedy
    index = json.loads((tmp_path / PIPELINE_INDEX).read_text())
    (tmp_path / PIPELINE_INDEX).write_text(json.dumps(index | {"vae": [None, None]}))
    model = diffusers_model(tmp_path, **SIZE, tokens=8)
    assert model.sample(model.denoiser, [0], steps=1, solver="ddim").isfinite().all()


def test_embeddings_that_a_unet_projects_have_the_width_before(tmp_path):
    """As those of Kolors, DeepFloyd IF and Kandinsky 3."""
    made = unet(in_channels=3, out_channels=6, encoder_hid_dim=48, encoder_hid_dim_type="text_proj")
    parts = CONVERTIBLE["deepfloyd"].make().components | {"unet": made}
    diffusers.IFPipeline(**parts, requires_safety_checker=False).save_pretrained(tmp_path)
    model = diffusers_model(tmp_path, height=16, width=24, tokens=8)
    assert {spec.name: spec.shape for spec in model.inputs}["encoder_hidden_states"] == ("batch", 8, 48)


def test_a_size_that_kandinsky_rounds_is_told(tmp_path):
    """Its decoder is no component. It draws multiples of 64 with the published decoder, and of 4 with a small one."""
    assert model_of(tmp_path, "kandinsky22", height=32, width=36).notices == ()
    (notice,) = model_of(tmp_path, "kandinsky22", height=34, width=36).notices
    assert notice == "KandinskyV22Pipeline draws height 34 as 36"
    model = model_of(tmp_path, "kandinsky22", height=34, width=36)
    assert model.sample(model.denoiser, [0], steps=1, solver="ddim").shape[2:] == (36, 36)


def test_a_failed_call_names_the_argument_that_it_lacks(tmp_path):
    """The error of diffusers does not: "'>=' not supported between instances of 'NoneType' and 'int'"."""
    with pytest.raises(UserError, match="NoneType") as error:
        model_of(tmp_path, "control_net_union", call={})
    assert error.value.remedy == "set control_mode in model.options.call"


def test_an_argument_whose_default_does_not_fit_is_named(tmp_path):
    with pytest.raises(
        UserError, match=r"(?s)call of SanaSprintPipeline failed.*remedy: set intermediate_timesteps in"
    ):
        model_of(tmp_path, "sana_sprint", call={"use_resolution_binning": False})


def test_a_pipeline_that_draws_one_image_at_a_time_is_not_asked_for_two(tmp_path, monkeypatch):
    """Qwen-Image-Edit-Plus refuses two images."""
    own = PipelineCaller.__call__

    def one_at_a_time(self, seeds, *arguments, **named):
        if len(seeds) > 1:
            raise UserError("one image", expected="1", got=str(len(seeds)), remedy="batch: 1")
        return own(self, seeds, *arguments, **named)

    expected = model_of(tmp_path, "chroma", batch=1)
    monkeypatch.setattr(PipelineCaller, "__call__", one_at_a_time)
    model = model_of(tmp_path, "chroma", batch=1)
    assert {spec.name: spec.shape[:1] for spec in model.inputs} == {
        spec.name: spec.shape[:1] for spec in expected.inputs
    }
    assert model.dims == expected.dims and model.output == expected.output
    with pytest.raises(UserError, match="remedy: batch: 1"):
        model_of(tmp_path, "chroma", batch=[1, 1, 2])


@pytest.mark.first_case
@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("inpainting", ("batch", 3, 32, 32)),
        ("image_to_video", ("batch", 3, 1, 32, 32)),  # the first frame alone
        ("control_net", None),  # the ControlNet takes pixels
        ("chroma", None),
    ],
)
def test_all_components_include_the_encoder_that_images_go_through(tmp_path, name, shape):
    components = model_of(tmp_path, name).components
    assert components is not None
    used = ["vae_decoder"] + (["vae_encoder"] if shape else [])
    recipe = load_recipe(save(tmp_path, name, components={"all": {}}))
    assert [*components.used] == component_names(recipe, models.load(recipe.model)) == used
    if shape:
        assert [spec.shape for spec in components("vae_encoder").inputs] == [shape]


def test_pixels_are_calibrated_on_images(tmp_path):
    encoder = model_of(tmp_path, "ddpm").encoder
    assert encoder is not None and encoder.shape == (3, 16, 16)
    assert encoder.encode(torch.tensor([0.0, 0.5, 1.0])).tolist() == [-1, 0, 1]


def test_exportable_parts_give_what_their_own_do():
    transformer = CONVERTIBLE["chroma"].make().transformer
    timestep = torch.tensor([0.25, 0.5, 999.0])
    expected = transformer.time_text_embed(timestep)
    make_exportable(transformer)
    assert torch.equal(transformer.time_text_embed(timestep), expected)


def test_prompts_of_any_length_are_masked_where_mochi_leaves_out_what_pads_them():
    transformer = CONVERTIBLE["mochi"].make().transformer
    generator = torch.Generator().manual_seed(0)
    latents, text = (torch.randn(shape, generator=generator) for shape in ((3, 12, 2, 4, 4), (3, 8, WIDTH)))
    inputs = (latents, text, torch.tensor([10.0, 500.0, 700.0]), torch.arange(8) < torch.tensor([[3], [8], [1]]))
    with torch.no_grad():
        expected = transformer(*inputs, return_dict=False)[0]
        make_exportable(transformer)
        torch.testing.assert_close(transformer(*inputs, return_dict=False)[0], expected, atol=1e-5, rtol=1e-5)
        inputs[1][0, 3:] = 7.0  # padding changes nothing
        torch.testing.assert_close(transformer(*inputs, return_dict=False)[0], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.soak
@pytest.mark.parametrize("name", ["hidream", "krea2", "ideogram4"])
def test_without_int8_a_bundle_predicts_as_the_model_does(tmp_path, name):
    """Only roundings of FP32 remain. A token that is sent to other experts makes a larger error."""
    recipe = save(tmp_path, name, attention={"modes": "fp16"}, verify=SMALL_BUILD["verify"] | {"max_error": 1e-4})
    outcome = run("build", recipe, "-o", tmp_path / "bundle", "--cache", tmp_path / "cache")
    assert outcome.exit_code == 0, outcome.output
    sampler = models.load(load_recipe(recipe).model).sample
    pipe = load_pipeline(tmp_path / "pipeline")
    caller = PipelineCaller(pipe, "transformer", 8, ("a fox",), sampler.caller.arguments)
    original = pipe.transformer
    with runtime.load(tmp_path / "bundle") as bundle, torch.no_grad():
        pipe.transformer = bundle.as_diffusers()
        errors = errors_beside(pipe.transformer, original)
        assert caller([101, 102], 4, sampler.sizes).isfinite().all()
    assert len(errors) >= 4 and max(errors) <= 1e-4


@pytest.mark.soak
def test_the_command_line_converts_and_draws_classes(tmp_path, monkeypatch):
    outcome = run("build", save(tmp_path, "dit", components={"all": {}}), "-o", tmp_path / "bundle")
    assert outcome.exit_code == 0, outcome.output
    monkeypatch.chdir(tmp_path / "bundle")  # a folder without the pipeline's weights
    outcome = run("run", ".", "-n", 3, "--steps", 2, "-o", tmp_path / "grid.png")
    assert outcome.exit_code == 0 and (tmp_path / "grid.png").is_file(), outcome.output
    with runtime.load(tmp_path / "bundle") as bundle:
        pipe = bundle.pipeline()
        pipe.set_progress_bar_config(disable=True)
        drawn = pipe(class_labels=[207, 360], num_inference_steps=2, output_type="pt")[0]
    assert drawn.shape == (2, 3, 32, 32) and drawn.isfinite().all()


@pytest.mark.soak
def test_a_bundle_of_marigold_looks_at_images_by_itself(tmp_path):
    """Marigold keeps the embeddings of an empty prompt, so that a second call would not run the text encoder."""
    recipe = load_recipe(save(tmp_path, "marigold", components={"all": {}, "vae_encoder": {}}))
    build(recipe, tmp_path / "bundle", Cache(tmp_path / "cache"), Reporter(Console(quiet=True)))
    with runtime.load(tmp_path / "bundle") as bundle, torch.no_grad():
        pipe = bundle.pipeline()
        pipe.set_progress_bar_config(disable=True)
        drawn = pipe(torch.rand(1, 3, 32, 32), num_inference_steps=2, output_type="pt")[0]
    assert drawn.shape == (1, 1, 32, 32) and drawn.std() > 0.01


@pytest.mark.parametrize(("name", "left"), [("kandinsky6", set()), ("kandinsky6_without_sound", {"attn"})])
def test_attention_of_a_sound_that_is_not_drawn_is_left_before_the_calibration(tmp_path, name, left):
    parts = parts_to_convert(model_of(tmp_path, name), AttentionSection(), LayersSection(modes="dynamic"))
    text = "transformer.audio_text_transformer_blocks.0"
    unused = {site.name for site in parts.left_sites if site.obstacle == UNUSED}
    assert unused == {f"{text}.{part}" for part in left}
    of_layers = {layer.name for layer in parts.left_layers if layer.obstacle == UNUSED}
    assert (f"{text}.attn.to_query" in of_layers) == bool(left)
    assert all("audio" in layer for layer in of_layers)


@pytest.mark.soak  # flex_attention is slow on a CPU
def test_attention_by_an_operator_that_takes_functions_is_refused_by_name(tmp_path):
    kandinsky6_upscaler().save_pretrained(tmp_path / "pipeline")
    frames = {"video": [picture(tmp_path / "frame.png", 0, 64)]}
    model = diffusers_model(tmp_path / "pipeline", images=frames, batch=1, call={"resolution_scale": 2})
    with pytest.raises(UserError, match=r"computes flex_attention, which is not converted") as error:
        parts_to_convert(model, AttentionSection(), LayersSection())
    assert error.value.got == "flex_attention in transformer.visual_transformer_blocks.0.self_attention"


def test_the_page_of_models_is_what_the_tests_convert():
    assert PAGE.read_text(encoding="utf-8") == page(), "python tests/helpers/models_page.py writes it"


@pytest.mark.soak
@pytest.mark.parametrize("name", ["kandinsky5", "kandinsky5_i2v", "kandinsky22"])
def test_kandinsky_in_int8_becomes_an_engine_with_the_same_integers(tmp_path, name):
    recipe = save(tmp_path, name, layers={"modes": "dynamic", "exclude": ["*embed*"]}, attention={"modes": "precision"})
    outcome = run(
        "quantize", tmp_path / "pipeline", "-o", tmp_path / "q", "--strategy", "kandinsky", "--granularity", "channel",
        "--min-elements", "256",
    )  # fmt: skip
    assert outcome.exit_code == 0, outcome.output
    sections = json.loads(recipe.read_text())
    sections["model"]["weights"] = "q"
    recipe.write_text(json.dumps(sections))
    outcome = run("build", recipe, "-o", tmp_path / "bundle", "--cache", tmp_path / "cache")
    assert outcome.exit_code == 0, outcome.output
    (weights,) = (tmp_path / "q" / ("unet" if name == "kandinsky22" else "transformer")).glob("*.safetensors")
    stored = load_file(weights)
    taken = 0
    for named, (weight, scale) in int8_weights(tmp_path / "bundle" / "denoiser.onnx").items():
        name_in_file = named.partition(".")[2]
        if stored[name_in_file].dtype == torch.int8:
            taken += 1
            assert np.array_equal(weight, stored[name_in_file].numpy())
            assert np.array_equal(scale, stored[f"{name_in_file}_scale"].numpy())
    assert taken >= 10


@pytest.mark.soak
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_denoiser_behind_a_controlnet_takes_16_bits(tmp_path, dtype):
    """The ControlNet's additions arrive in the pipeline's type, and the engine takes this type."""
    name = next(name for name in CONVERTIBLE if "control" in name)
    document = json.loads(save(tmp_path, name).read_text())
    document["model"]["dtype"] = dtype
    (tmp_path / "recipe.yaml").write_text(json.dumps(document))
    build(
        load_recipe(tmp_path / "recipe.yaml"),
        tmp_path / "bundle",
        Cache(tmp_path / "cache"),
        Reporter(Console(quiet=True)),
    )
    pipe = CONVERTIBLE[name].make().to(getattr(torch, dtype))
    original = CONVERTIBLE[name].make().unet
    with runtime.load(tmp_path / "bundle") as bundle:
        denoiser = bundle.as_diffusers()
        errors = errors_beside(denoiser, original)
        pipe.unet = denoiser
        text = torch.randn(1, 8, WIDTH, generator=torch.Generator().manual_seed(1)).to(denoiser.dtype)
        image = Image.open(document["model"]["images"]["image"])
        drawn = pipe(
            prompt_embeds=text, negative_prompt_embeds=torch.zeros_like(text), image=image, height=32, width=32,
            num_inference_steps=2, output_type="latent",
        )[0]  # fmt: skip
    assert drawn.dtype == denoiser.dtype == getattr(torch, dtype) and drawn.isfinite().all()
    assert errors and max(errors) <= INT8_CALL
