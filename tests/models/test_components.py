"""Whole pipelines: text encoders and VAEs of small random pipelines as components, and a bundle that draws prompts."""

from __future__ import annotations

import functools
import inspect
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from rich.console import Console
from safetensors.torch import load_file, save_file
from support import refusal, run

diffusers = pytest.importorskip("diffusers", reason="needs diffusers")
transformers = pytest.importorskip("transformers", reason="needs transformers")
import tiny_pipelines  # noqa: E402
from tiny_pipelines import PIPELINES, TOKENS, WIDTH, errors_beside, picture  # noqa: E402
from tolerances import HALF_DENOISER, INT8_CALL, INT8_IMAGES_PSNR, SAME_ARITHMETIC, SAME_IMAGES_PSNR  # noqa: E402

from trtconvert import models, runtime  # noqa: E402
from trtconvert.bundle import ComponentRecord, TensorRecord  # noqa: E402
from trtconvert.cache import Cache, Stage  # noqa: E402
from trtconvert.engine import tensorrt_rtx  # noqa: E402
from trtconvert.errors import BackendUnavailable, GateError, UserError  # noqa: E402
from trtconvert.evaluate.evaluation import full_precision  # noqa: E402
from trtconvert.evaluate.verify import psnr, relative_error  # noqa: E402
from trtconvert.models.diffusers import as_images, diffusers_model  # noqa: E402
from trtconvert.models.pipelines import Observed, load_pipeline  # noqa: E402
from trtconvert.models.saved import INDEX, copy_without_models  # noqa: E402
from trtconvert.pipeline import build  # noqa: E402
from trtconvert.progress import Reporter  # noqa: E402
from trtconvert.recipe import EngineSection, Recipe, load_recipe  # noqa: E402
from trtconvert.runtime import pipeline as pipeline_module  # noqa: E402
from trtconvert.runtime.diffusers import DiffusersAutoencoder, DiffusersTextEncoder  # noqa: E402
from trtconvert.runtime.pipeline import make_pipeline  # noqa: E402
from trtconvert.runtime.session import OnnxRuntimeComponent  # noqa: E402
from trtconvert.runtime.signature import shape_of  # noqa: E402
from trtconvert.runtime.unused import UnusedResult  # noqa: E402
from trtconvert.stages import ERROR, SIGNATURE, component_stages  # noqa: E402

NAMES = ["stable_diffusion_xl", "stable_diffusion_3", "ltx", "wan"]
"""CLIP, T5, UMT5, results that are looked into in part, settings read off a VAE, and videos; Flux is below."""


def save(folder: Path, name: str) -> None:
    """A pipeline with its text encoders."""
    tiny_pipelines.with_text(name).save_pretrained(folder)


def options(name: str, **own: Any) -> dict[str, Any]:
    """Of `diffusers_model`, with prompts as short as the tokenizers want them."""
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
        "model": {"source": "diffusers", "weights": "pipeline", "options": options(name)} | (model or {}),
        "components": components,
        "attention": {"modes": "precision"},
        "calibration": {"samples": 2, "batch": 2, "steps": 4, "bins": 2},
        "engine": {"backend": "onnxruntime"},
        "verify": {"samples": 2, "steps": 4, "min_psnr": 15},
        "output": {"grid": 2},
    } | sections
    (folder / "recipe.yaml").write_text(json.dumps(recipe))
    return load_recipe(folder / "recipe.yaml")


def convert(folder: Path, name: str, components: dict[str, Any], **sections: Any) -> Path:
    """The bundle of a pipeline in `folder`."""
    if not (folder / "pipeline").is_dir():
        save(folder / "pipeline", name)
    recipe = recipe_of(folder, name, components, **sections)
    build(recipe, folder / "bundle", Cache(folder / "cache"), Reporter(Console(quiet=True)))
    return folder / "bundle"


def arguments(name: str) -> dict[str, Any]:
    """Of a pipeline's call with a prompt that no calibration saw."""
    chosen = options(name)
    sizes = {"height": "height", "width": "width", "frames": "num_frames"}
    given = {parameter: chosen[option] for option, parameter in sizes.items() if option in chosen}
    fixed = {"prompt": "a bird", "num_inference_steps": 2, "output_type": "pt"}
    return chosen["call"] | given | fixed | {"generator": torch.Generator().manual_seed(3)}


def draw(pipe: Any, name: str) -> torch.Tensor:
    pipe.set_progress_bar_config(disable=True)
    return as_images(pipe(**arguments(name))[0], decoded=True)


@dataclass(frozen=True)
class Converted:
    """A saved pipeline, and all its models but the denoiser on ONNX Runtime: text encoders by name, and the VAE's halves."""

    name: str
    pipeline: Path
    onnx: dict[str, Path]
    errors: dict[str, float]
    text: dict[str, tuple[OnnxRuntimeComponent, ComponentRecord]]
    halves: dict[str, tuple[OnnxRuntimeComponent, ComponentRecord]]


def component_records(folder: Path, recipe: Recipe) -> dict[str, tuple[Stage, ComponentRecord]]:
    """What the stages of a recipe's components leave, by their names."""
    model = functools.cache(lambda: models.load(recipe.model))
    stages = component_stages(recipe, "weights", model, Cache(folder / "cache"), Reporter(Console(quiet=True)))
    return {
        name: (stage, ComponentRecord.model_validate_json((stage.folder / SIGNATURE).read_text()))
        for name, stage in stages.items()
    }


@pytest.fixture(scope="module", params=NAMES)
def converted(request, tmp_path_factory) -> Converted:
    folder = tmp_path_factory.mktemp(request.param)
    save(folder / "pipeline", request.param)
    recipe = recipe_of(folder, request.param, {"all": {}, "vae_encoder": {}})
    made = Converted(request.param, folder / "pipeline", {}, {}, {}, {})
    for name, (stage, record) in component_records(folder, recipe).items():
        made.onnx[name] = stage.folder / record.onnx
        made.errors[name] = json.loads((stage.folder / ERROR).read_text())
        kind, key = (made.text, name) if name.startswith("text") else (made.halves, record.diffusers.method)
        kind[key] = (OnnxRuntimeComponent(made.onnx[name], record), record)
    return made


@dataclass(frozen=True)
class Whole:
    """A saved pipeline, and the bundle of all its models."""

    pipeline: Path
    bundle: Path


@pytest.fixture(scope="module")
def half(tmp_path_factory) -> Whole:
    """Flux for a range of heights, in half precision but for its VAE."""
    folder = tmp_path_factory.mktemp("half")
    model = {"dtype": "float16", "options": options("flux", height=[32, 32, 64])}
    return Whole(folder / "pipeline", convert(folder, "flux", {"all": {}}, model=model))


FP32_ON_CPU = {"dtype": torch.float32, "device": torch.device("cpu")}


def test_components_do_what_the_models_do(converted):
    """With the pipeline's own denoiser between them, text encoders and VAE give the pipeline's own images."""
    pipe = load_pipeline(converted.pipeline)
    expected = draw(pipe, converted.name)
    assert set(converted.halves) == {"decode", "encode"} and len(converted.text) == len(converted.errors) - 2
    for name, (component, record) in converted.text.items():
        setattr(pipe, name, DiffusersTextEncoder(component, record, **FP32_ON_CPU))
    pipe.vae = DiffusersAutoencoder(converted.halves, **FP32_ON_CPU)
    assert psnr(draw(pipe, converted.name), expected).min() >= SAME_IMAGES_PSNR
    assert max(converted.errors.values()) <= SAME_ARITHMETIC
    assert expected.std() > 0.05  # images with something on them


def text_in_place(converted: Converted) -> Any:
    """The saved pipeline with its text encoders converted."""
    pipe = load_pipeline(converted.pipeline)
    pipe.set_progress_bar_config(disable=True)
    for name, (component, record) in converted.text.items():
        setattr(pipe, name, DiffusersTextEncoder(component, record, **FP32_ON_CPU))
    return pipe


def test_a_pipeline_that_offloads_its_models_leaves_converted_ones_where_they_are(converted):
    """accelerate reads the device off a model's first parameter. `to` and whatever saves weights finds none."""
    pipe = text_in_place(converted)
    pipe.vae = DiffusersAutoencoder(converted.halves, **FP32_ON_CPU)
    expected = draw(pipe, converted.name)
    pipe.enable_model_cpu_offload(device="cpu")
    # not bit for bit: offloading copies weights to other addresses, and how a product rounds follows its operands' alignment
    assert psnr(draw(pipe, converted.name), expected).min() >= SAME_IMAGES_PSNR
    for part in (pipe.text_encoder, pipe.vae):
        (only,) = part.parameters()
        assert (only.numel(), only.dtype, only.device) == (0, part.dtype, part.device)
        assert not part.state_dict() and not list(part.named_parameters())
        assert part.to("meta", torch.float16).device.type == "cpu" and part.dtype == torch.float32


@pytest.mark.parametrize("converted", ["stable_diffusion_xl"], indirect=True, scope="module")
def test_what_was_not_looked_into_says_so_when_it_is(converted):
    """SDXL takes a text from another layer with clip_skip, which converts that layer when it is among the call's arguments."""
    pipe = text_in_place(converted)
    with pytest.raises(UserError) as error:
        pipe(**arguments(converted.name) | {"clip_skip": 1})
    for part in ("'hidden_states.0' of text_encoder", "expected: ", "got: 'con", "clip_skip", "model.options.call"):
        assert part in str(error.value)
    chosen = options(converted.name)
    for call, looked in ((chosen["call"], 1), (chosen["call"] | {"clip_skip": 1}, 0)):
        model = diffusers_model(converted.pipeline, **chosen | {"call": call})
        layers = model.components("text_encoder").diffusers.results["hidden_states"]["list"]
        assert [index for index, node in enumerate(layers) if "tensor" in node] == [looked]


def test_a_result_with_nothing_in_it_has_a_shape():
    unused = UnusedResult.of("text_encoder", "hidden_states.1", (2, 8))
    assert (unused.shape, unused.size(1), unused.dim(), unused.numel(), len(unused)) == ((2, 8), 8, 2, 16, 2)
    assert unused.dtype == torch.float32 and unused.is_meta and unused.is_floating_point()
    assert repr(unused) == f"{unused}" == "UnusedResult('hidden_states.1' of text_encoder, shape [2, 8])"
    assert unused.to("cpu") is unused.cpu() is unused  # hooks of accelerate move every result
    for look in (lambda x: x[0], lambda x: torch.cat([x, x]), lambda x: x.data, bool):
        with pytest.raises(UserError, match=r"(?s)'hidden_states\.1' of text_encoder.*remedy: "):
            look(unused)


def test_the_encoder_gives_the_models_latents(converted):
    ours = DiffusersAutoencoder(converted.halves, **FP32_ON_CPU)
    (spec,) = converted.halves["encode"][1].inputs
    images = torch.rand(shape_of(spec.shape, {"batch": 2}), generator=torch.Generator().manual_seed(5)) * 2 - 1
    with torch.no_grad():
        expected = load_pipeline(converted.pipeline).vae.encode(images).latent_dist
    got = ours.encode(images)
    assert relative_error(got.latent_dist.mode(), expected.mode()) <= SAME_ARITHMETIC
    (as_tuple,) = ours.encode(images, return_dict=None)  # no, in diffusers
    assert torch.equal(as_tuple.std, got.latent_dist.std)


@pytest.mark.parametrize(("frames", "batch"), [(20, 1), (12, [1, 1, 2]), (16, [1, 2, 8])])
def test_frames_are_decoded_in_pieces_of_any_length(tmp_path, frames, batch):
    """AnimateDiff passes 16 frames of whatever video at once, and in the end what is left."""
    tiny_pipelines.animatediff().save_pretrained(tmp_path)
    model = diffusers_model(tmp_path, height=32, width=32, frames=frames, batch=batch, prompts=["a cat"])
    decoder = model.components("vae_decoder")
    assert decoder.inputs[0].shape == ("batch", 4, 8, 8) and decoder.outputs[0].shape == ("batch", 3, 32, 32)
    assert decoder.dims == {"batch": (1, min(16, frames * (2 if batch == [1, 2, 8] else 1)), 16)}
    assert model.components("vae_encoder").dims == decoder.dims


def halves_of(folder: Path, **options: Any) -> dict[str, tuple[OnnxRuntimeComponent, ComponentRecord]]:
    """The halves of the VAE of a saved pipeline on ONNX Runtime, by method."""
    model = {"source": "diffusers", "weights": ".", "options": options}
    (folder / "recipe.yaml").write_text(
        json.dumps({"model": model, "components": {"vae_decoder": {}, "vae_encoder": {}}})
    )
    made = component_records(folder, load_recipe(folder / "recipe.yaml"))
    return {
        record.diffusers.method: (OnnxRuntimeComponent(stage.folder / record.onnx, record), record)
        for stage, record in made.values()
    }


def test_a_text_encoder_may_be_given_truth_values(tmp_path, monkeypatch):
    """Krea 2 and PRX make truth values of the mask that their tokenizers give."""
    pipe = tiny_pipelines.with_text("pixart")
    pipe.save_pretrained(tmp_path)
    tokenize = type(pipe.tokenizer).__call__

    def tokenize_with_truth_values(*arguments, **named):
        encoded = tokenize(*arguments, **named)
        encoded["attention_mask"] = encoded["attention_mask"].bool()
        return encoded

    monkeypatch.setattr(type(pipe.tokenizer), "__call__", tokenize_with_truth_values)
    model = {"source": "diffusers", "weights": ".", "options": options("pixart")}
    (tmp_path / "recipe.yaml").write_text(json.dumps({"model": model, "components": {"text_encoder": {}}}))
    made = component_records(tmp_path, load_recipe(tmp_path / "recipe.yaml"))
    ((stage, record),) = made.values()
    assert {i.name: i.dtype for i in record.inputs} == {"input_ids": "int64", "attention_mask": "int64"}
    encoder = DiffusersTextEncoder(OnnxRuntimeComponent(stage.folder / record.onnx, record), record, **FP32_ON_CPU)
    tokens = tokenize_with_truth_values(
        pipe.tokenizer, "a cat", padding="max_length", max_length=tiny_pipelines.TOKENS, return_tensors="pt"
    )
    given = {"attention_mask": tokens.attention_mask}
    expected = pipe.text_encoder(tokens.input_ids, **given)[0]
    assert not tokens.attention_mask.all()
    assert relative_error(encoder(tokens.input_ids, **given)[0], expected) <= SAME_ARITHMETIC


def test_one_tensor_may_be_several_results(tmp_path, monkeypatch):
    """The last of all states is the last state: Krea 2 looks at the one, and the encoder gives both."""
    tiny_pipelines.with_text("pixart").save_pretrained(tmp_path)
    call = transformers.T5EncoderModel.__call__

    def last_of_all(*arguments, **named):
        return (call(*arguments, **named, output_hidden_states=True).hidden_states[-1],)

    monkeypatch.setattr(transformers.T5EncoderModel, "__call__", last_of_all)
    encoder = diffusers_model(tmp_path, **options("pixart")).components("text_encoder")
    results = encoder.diffusers.results
    assert [output.name for output in encoder.outputs] == ["last_hidden_state"]
    *before, last = results["hidden_states"]["list"]
    assert results["last_hidden_state"] == last == {"tensor": "last_hidden_state"}
    assert before and all("unused" in node for node in before)


def test_statistics_that_a_pipeline_reads_off_its_vae_are_there(tmp_path):
    """FLUX.2 norms latents by those of a part of its VAE."""
    transformer = diffusers.Flux2Transformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=32,
        num_attention_heads=2,
        joint_attention_dim=WIDTH,
        axes_dims_rope=(8, 8, 8, 8),
        guidance_embeds=False,
    )
    vae = diffusers.AutoencoderKLFlux2(
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(8, 8),
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=4,
    )
    vae.bn.running_mean.uniform_(-1, 1, generator=torch.Generator().manual_seed(0))
    parts = {"vae": tiny_pipelines.randomised(vae), "transformer": tiny_pipelines.randomised(transformer)}
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    pipe = diffusers.Flux2KleinPipeline(
        scheduler=scheduler, **parts, text_encoder=None, tokenizer=None, is_distilled=True
    )
    pipe.save_pretrained(tmp_path)
    pipe.set_progress_bar_config(disable=True)
    sizes = {"height": 32, "width": 32}
    text = torch.randn(1, 8, WIDTH, generator=torch.Generator().manual_seed(1))

    def drawn() -> torch.Tensor:
        generator = torch.Generator().manual_seed(3)
        return pipe(prompt_embeds=text, **sizes, num_inference_steps=2, output_type="pt", generator=generator)[0]

    expected = drawn()
    pipe.vae = DiffusersAutoencoder(halves_of(tmp_path, **sizes, tokens=8, batch=1), **FP32_ON_CPU)
    assert torch.equal(pipe.vae.bn.running_mean, vae.bn.running_mean)
    assert psnr(drawn(), expected).min() >= SAME_IMAGES_PSNR and expected.std() > 0.05


def test_lists_of_numbers_in_an_index_are_settings(tmp_path):
    tiny_pipelines.wan().save_pretrained(tmp_path)
    index = json.loads((tmp_path / INDEX).read_text()) | {"boundary_ratio": [0.5, 0.25]}
    (tmp_path / INDEX).write_text(json.dumps(index))
    pipe = make_pipeline(tmp_path, {"transformer": None, "vae": None})
    assert pipe.config.boundary_ratio == [0.5, 0.25]


def test_the_last_piece_of_a_video_is_decoded_too(tmp_path):
    tiny_pipelines.animatediff().save_pretrained(tmp_path)
    pipe = load_pipeline(tmp_path)
    pipe.set_progress_bar_config(disable=True)
    sizes = {"height": 32, "width": 32}

    def drawn() -> torch.Tensor:
        call = {"num_frames": 20, "num_inference_steps": 2, "output_type": "pt"}
        return pipe("a bird", **sizes, **call, generator=torch.Generator().manual_seed(3))[0]

    expected = drawn()
    pipe.vae = DiffusersAutoencoder(halves_of(tmp_path, **sizes, frames=20, batch=1), **FP32_ON_CPU)
    assert psnr(drawn(), expected).min() >= SAME_IMAGES_PSNR and expected.std() > 0.05


def test_the_vae_of_a_denoiser_for_one_image_is_converted(tmp_path):
    """QwenImage's denoiser is called for its batch alone: it has taken in the shape of each image."""
    tiny_pipelines.qwen_image().save_pretrained(tmp_path)
    halves = halves_of(tmp_path, height=32, width=32, tokens=8, batch=1)
    assert all(record.dims == {"batch": (1, 1, 1)} for _, record in halves.values())
    vae, ours = load_pipeline(tmp_path).vae, DiffusersAutoencoder(halves, **FP32_ON_CPU)
    latents = torch.randn(1, 4, 1, 4, 4, generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        expected = vae.decode(latents).sample
        encoded = vae.encode(expected).latent_dist
    got = ours.decode(latents).sample
    assert relative_error(got, expected) <= SAME_ARITHMETIC
    assert relative_error(ours.encode(expected).latent_dist.mode(), encoded.mode()) <= SAME_ARITHMETIC


class Silent:
    """A watcher of builds."""

    def share(self, detail: str, done: float) -> None: ...

    def notice(self, text: str) -> None: ...


@pytest.mark.skipif(not tensorrt_rtx.status().available, reason=tensorrt_rtx.status().detail)
def test_nvidias_parser_and_builder_take_the_components(converted):
    """TensorRT-RTX, which builds without a GPU, stands for TensorRT; both have the same parser."""
    records = {record.onnx: record for _, record in (*converted.text.values(), *converted.halves.values())}
    for name, onnx in converted.onnx.items():
        engine = tensorrt_rtx.build_engine(name, records[onnx.name], onnx, EngineSection(), "sm86", Silent())
        assert engine.record.attention == "native" and len(engine.plan) > 1000


def test_a_bundle_draws_from_a_prompt_by_itself(half, tmp_path):
    """The pipeline's weights are not there: every model is a component, and what else it needs lies in the bundle."""
    moved = shutil.copytree(half.bundle, tmp_path / "bundle")
    with runtime.load(moved) as bundle:
        pipe = bundle.pipeline()
        assert type(pipe) is diffusers.FluxPipeline
        drawn = draw(pipe, "flux")
        parts = [part for part in pipe.components.values() if isinstance(part, torch.nn.Module)]
        assert len(parts) == 4 and not any(x.numel() for part in parts for x in part.parameters())
        assert drawn.isfinite().all() and drawn.std() > 0.05
        left = {
            path.relative_to(moved / bundle.manifest.pipeline) for path in (moved / bundle.manifest.pipeline).iterdir()
        }
    assert {str(path) for path in left} == {"model_index.json", "scheduler", "tokenizer", "tokenizer_2"}


def test_a_bundle_that_was_named_from_another_folder_has_its_pipeline(half, tmp_path, monkeypatch):
    moved = shutil.copytree(half.bundle, tmp_path / "bundle")
    monkeypatch.chdir(tmp_path)
    with runtime.load("bundle") as bundle:
        monkeypatch.chdir("/")
        assert type(bundle.pipeline()) is diffusers.FluxPipeline
        moved.rename(tmp_path / "elsewhere")
        with pytest.raises(UserError, match=r"(?s)pipeline in .* cannot be read.*remedy: load the bundle from"):
            bundle.pipeline()


def test_heights_within_the_range_are_drawn(half, one_noise):
    """In half precision, by the components alone; the decoder's output is a line through its input."""
    pipe = load_pipeline(half.pipeline)
    with runtime.load(half.bundle) as bundle:
        components = bundle.manifest.components
        assert [spec.shape for spec in components["vae_decoder"].outputs] == [["batch", 3, "4*height", 32]]
        assert {name: of.outputs[0].dtype for name, of in components.items()} == {
            "denoiser": "float16",
            "text_encoder": "float16",
            "text_encoder_2": "float16",
            "vae_decoder": "float32",
        }
        ours = bundle.pipeline()
        errors = errors_beside(ours.transformer, pipe.transformer)
        for height in (32, 48, 64):
            drawn, expected = (p(**arguments("flux") | {"height": height})[0] for p in (ours, pipe))
            assert drawn.shape == (1, 3, height, 32)
            assert psnr(drawn.float(), expected).min() >= INT8_IMAGES_PSNR
        assert len(errors) == 6 and max(errors) <= INT8_CALL
        with pytest.raises(UserError, match=r"(?s)'z' is outside.*height 8\.\.16.*the sizes in model\.options"):
            ours.vae.decode(torch.zeros(1, 16, 32, 8))


def test_text_encoders_return_what_the_model_does(half):
    """What the pipeline does not look into has its shape and nothing in it."""
    encoder = load_pipeline(half.pipeline).text_encoder
    ids = torch.randint(0, 50, (2, TOKENS), generator=torch.Generator().manual_seed(1))
    with runtime.load(half.bundle) as bundle:
        ours = bundle.as_diffusers("text_encoder")
        assert ours.dtype == torch.float16 and ours.config.hidden_size == WIDTH
        with torch.no_grad():
            expected = encoder(ids)
        got = ours(ids, output_hidden_states=False)
        assert type(got) is type(expected) and list(got) == list(expected)
        assert relative_error(got.pooler_output, expected.pooler_output) <= HALF_DENOISER
        assert got.last_hidden_state.is_meta and got.last_hidden_state.shape == expected.last_hidden_state.shape
        assert type(ours(ids, output_hidden_states=False, return_dict=None)) is type(expected)  # as in transformers
        assert type(ours(ids, output_hidden_states=False, return_dict=False)) is tuple
        with pytest.raises(UserError, match=r"(?s)another 'output_hidden_states'.*got: True"):
            ours(ids, output_hidden_states=True)
        with pytest.raises(UserError, match=r"(?s)'attention_mask'.*a tensor of shape \[2, 8\]"):
            ours(ids, attention_mask=torch.ones(2, TOKENS), output_hidden_states=False)


def test_the_command_line_draws_prompts(half, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rest = ("--steps", 2, "--seed", 1, "-o", tmp_path / "images.png")
    outcome = run("run", half.bundle, "-p", "a cat", "-p", "a dog", *rest)
    assert outcome.exit_code == 0 and "2 samples in" in outcome.output, outcome.output
    both = Image.open(tmp_path / "images.png")
    outcome = run("run", half.bundle, "-p", "a cat", *rest)
    assert outcome.exit_code == 0 and "1 sample in" in outcome.output, outcome.output
    one = Image.open(tmp_path / "images.png")
    # The first seed shows the first prompt, whatever the seed.
    assert one.crop((0, 0, 70, 70)).tobytes() == both.crop((0, 0, 70, 70)).tobytes() and both.width > one.width
    outcome = run("run", half.bundle, "-p", "a dog", *rest)
    assert outcome.exit_code == 0, outcome.output
    assert Image.open(tmp_path / "images.png").tobytes() != one.tobytes()  # the same seed
    shown = " ".join(run("inspect", half.bundle).output.split())
    for part in ("vae_decoder", "text_encoder", "ONNX, text_encoder", "relative error against float32", "-p"):
        assert part in shown


def test_a_bundle_holds_the_images_that_its_pipeline_edits(tmp_path, monkeypatch):
    """Two of one name, from folders that the machine it goes to does not have."""
    pipe = diffusers.StableDiffusionInpaintPipeline(**tiny_pipelines.with_text("stable_diffusion").components)
    pipe.save_pretrained(tmp_path / "pipeline")
    images = {}
    for seed, argument in enumerate(("image", "mask_image")):
        (tmp_path / argument).mkdir()
        images[argument] = str(picture(tmp_path / argument / "photo.png", seed).relative_to(tmp_path))
    model = {"images": images, "options": options("stable_diffusion")}
    built = convert(tmp_path, "stable_diffusion", {"all": {}, "vae_encoder": {}}, model=model)
    bundle = shutil.copytree(built, tmp_path / "elsewhere" / "bundle")
    for argument in images:
        held = bundle / "images" / f"{argument}.png"
        assert held.read_bytes() == (tmp_path / images[argument]).read_bytes()
        shutil.rmtree(tmp_path / argument)
    rest = ("-p", "a cat", "-n", 1, "--steps", 2, "-o", tmp_path / "drawn.png")
    monkeypatch.chdir(tmp_path / "elsewhere")
    outcome = run("run", "bundle", *rest)
    assert outcome.exit_code == 0, outcome.output
    # It is what the full-precision model of the bundle draws with them, whose weights are all that is asked for.
    with runtime.load(bundle) as loaded:
        assert full_precision(loaded, tmp_path / "pipeline") is not None
    (bundle / "images" / "mask_image.png").unlink()
    refusal(run("run", "bundle", *rest), "images/mask_image.png")


def test_prompts_need_a_pipeline(tiny_build, tmp_path):
    outcome = run("run", tiny_build.bundle, "-p", "a cat", "-o", tmp_path / "x.png")
    refusal(outcome, "does not turn prompts into images", "components: {all: {}}")


def test_prompts_need_a_text_encoder(half, tmp_path, monkeypatch):
    """A pipeline that was saved without them draws with embeddings of N(0, 1)."""
    monkeypatch.setattr(runtime.LoadedBundle, "pipeline", lambda _: PIPELINES["flux"][0]())
    outcome = run("run", half.bundle, "-p", "a cat", "-o", tmp_path / "x.png")
    refusal(outcome, "does not turn prompts into images", "got: a pipeline that was saved without text encoders")


@pytest.mark.parametrize(
    ("name", "optional"),
    [("stable_diffusion_xl", ["text_encoder", "text_encoder_2"]), ("pixart", ["text_encoder"])],
)
def test_what_diffusers_calls_optional_is_missed_where_it_was_saved(tmp_path, name, optional):
    """Without it such pipelines take a prompt and draw something else."""
    pipe = tiny_pipelines.with_text(name)
    pipe.save_pretrained(tmp_path / "saved")
    copy_without_models(tmp_path / "saved", tmp_path / "kept")
    assert set(optional) <= set(type(pipe)._optional_components)
    others = {
        key: part for key, part in pipe.components.items() if isinstance(part, torch.nn.Module) and key not in optional
    }
    with pytest.raises(UserError, match=rf"(?s)has no {', '.join(optional)} for.*text_encoder=….*None to go without"):
        make_pipeline(tmp_path / "kept", others)
    assert make_pipeline(tmp_path / "kept", others | dict.fromkeys(optional)).text_encoder is None


def test_folders_that_are_no_part_of_the_pipeline_are_left(saved, tmp_path):
    shutil.copytree(saved / "pipeline", tmp_path / "pipeline")
    (tmp_path / "pipeline" / "media").mkdir()
    (tmp_path / "pipeline" / "media" / "demonstration.mp4").touch()
    copy_without_models(tmp_path / "pipeline", tmp_path / "kept")
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == [INDEX, "scheduler", "tokenizer"]


@pytest.fixture
def kept(tmp_path):
    """A pipeline's folder without its models, and these by name."""
    pipe = tiny_pipelines.with_text("stable_diffusion")
    pipe.save_pretrained(tmp_path / "saved")
    copy_without_models(tmp_path / "saved", tmp_path / "kept")
    return tmp_path / "kept", {name: x for name, x in pipe.components.items() if isinstance(x, torch.nn.Module)}


def test_the_safety_checker_is_not_missed(kept):
    folder, models_of = kept
    index = json.loads((folder / INDEX).read_text())
    index["safety_checker"] = ["stable_diffusion", "StableDiffusionSafetyChecker"]
    (folder / INDEX).write_text(json.dumps(index))
    made = make_pipeline(folder, models_of)
    assert made.safety_checker is None and not made.config.requires_safety_checker


def test_a_processor_whose_package_is_missing_is_named(kept, monkeypatch):
    """As transformers has it: a class in its place, which raises when it is used."""
    folder, models_of = kept

    class Missing:
        @classmethod
        def from_pretrained(cls, *_, **__):
            raise ImportError("CLIPTokenizer requires the protobuf library but it was not found")

    found = pipeline_module.library_class
    monkeypatch.setattr(
        pipeline_module, "library_class", lambda library, name: Missing if "Tokenizer" in name else found(library, name)
    )
    with pytest.raises(
        BackendUnavailable, match=r"(?s)needs a package.*got: .*requires the protobuf.*remedy: install it"
    ):
        make_pipeline(folder, models_of)


def test_a_part_that_the_installed_diffusers_wants_and_the_saved_pipeline_lacks_is_named(kept):
    folder, models_of = kept
    index = json.loads((folder / INDEX).read_text())
    del index["tokenizer"]
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(UserError, match=r"(?s)cannot be made of the parts.*'tokenizer'.*remedy: pass those"):
        make_pipeline(folder, models_of)


def test_a_part_that_the_pipeline_does_not_take_is_refused(half):
    with runtime.load(half.bundle) as bundle:
        with pytest.raises(UserError, match=r"(?s)FluxPipeline has no part 'schedulr'.*did you mean 'scheduler'\?"):
            bundle.pipeline(schedulr=None)
        with pytest.raises(UserError, match=r"(?s)'zzz'.*expected: some of .*text_encoder_2.*leave it out"):
            bundle.pipeline(zzz=None)


def test_a_bundle_without_a_pipeline_makes_none(tiny_build):
    with (
        runtime.load(tiny_build.bundle) as bundle,
        pytest.raises(UserError, match=r"(?s)holds no pipeline.*components"),
    ):
        bundle.pipeline()


def test_what_a_bundle_lacks_is_named_and_may_be_given(half, tmp_path):
    model = {"dtype": "float16", "options": options("flux", height=[32, 32, 64])}
    folder = half.pipeline.parent  # whose cache has all of it
    text = {"text_encoder": {}, "text_encoder_2": {}}
    recipe = recipe_of(folder, "flux", text, model)
    build(recipe, tmp_path / "bundle", Cache(folder / "cache"), Reporter(Console(quiet=True)))
    pipe = load_pipeline(half.pipeline)
    with runtime.load(tmp_path / "bundle") as loaded:
        with pytest.raises(
            UserError, match=r"(?s)has no vae for FluxPipeline.*got: text_encoder, .*transformer.*vae=…"
        ):
            loaded.pipeline()
        assert loaded.pipeline(vae=pipe.vae).vae is pipe.vae
        with pytest.raises(UserError, match=r"(?s)no component 'vae'.*expected: denoiser, text_encoder"):
            loaded.as_diffusers("vae")


# Bad recipes ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A folder with Stable Diffusion in it."""
    folder = tmp_path_factory.mktemp("saved")
    save(folder / "pipeline", "stable_diffusion")
    return folder


@pytest.mark.parametrize(
    ("components", "expected"),
    [
        ({"text_encoder_2": {}}, ["no text_encoder_2", "expected: text_encoder, vae_decoder, vae_encoder"]),
        ({"vae_decoder": {"dtype": "float16"}}, ["vae_decoder is not converted to float16", "force_upcast"]),
        (
            {"text_encodr": {}},
            ["components.text_encodr", "expected: all, text_encoder, text_encoder_2, …, vae_decoder"],
        ),
        ({"text_encoder": {"dtyp": "float16"}}, ["unknown field", "did you mean 'dtype'?"]),
    ],
)
def test_components_that_cannot_be_are_refused_before_the_calibration(saved, tmp_path, components, expected):
    with pytest.raises(UserError) as error:
        shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
        recipe = recipe_of(tmp_path, "stable_diffusion", components)
        build(recipe, tmp_path / "bundle", Cache(tmp_path / "cache"), Reporter(Console(quiet=True)))
    for part in ("remedy: ", *expected):
        assert part in str(error.value)
    assert not (tmp_path / "bundle").exists() and not list((tmp_path).glob("cache/calibrate*"))


def test_components_of_another_source_are_refused(tmp_path):
    recipe = {
        "model": {"source": "tiny_models:build"},
        "components": {"all": {}},
        "engine": {"backend": "onnxruntime"},
    }
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    with pytest.raises(UserError, match=r"(?s)has no components beside the denoiser.*model\.source: diffusers"):
        build(
            load_recipe(tmp_path / "recipe.yaml"), tmp_path / "b", Cache(tmp_path / "c"), Reporter(Console(quiet=True))
        )


def test_a_component_whose_error_is_too_large_fails_the_build(saved, tmp_path):
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    with pytest.raises(GateError, match=r"(?s)'last_hidden_state' of text_encoder against float32.*dtype to float32"):
        convert(
            tmp_path,
            "stable_diffusion",
            {"text_encoder": {"dtype": "float16"}},
            verify={"max_component_error": 1e-5},
        )


@pytest.mark.parametrize("size", [0, 1000])
@pytest.mark.parametrize("part", ["text_encoder", "unet", "vae"])
def test_damaged_weights_are_refused(saved, tmp_path, part, size):
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    (weights,) = (tmp_path / "pipeline" / part).glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:size])
    with pytest.raises(UserError, match=r"(?s)cannot be loaded.*expected: a whole folder.*got: .*remedy: "):
        diffusers_model(tmp_path / "pipeline", **options("stable_diffusion"))


@pytest.mark.parametrize("part", ["text_encoder", "unet", "vae"])
def test_weights_that_a_file_lacks_are_not_made_up(saved, tmp_path, part):
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    (file,) = (tmp_path / "pipeline" / part).glob("*.safetensors")
    weights = load_file(file)
    lost = min(weights)
    save_file({name: x for name, x in weights.items() if name != lost}, file, {"format": "pt"})
    with pytest.raises(
        UserError, match=rf"(?s)weights of {part} in .* are incomplete.*got: 1 missing, .*{lost}.*remedy: "
    ):
        diffusers_model(tmp_path / "pipeline", **options("stable_diffusion"))


def test_shapes_that_depend_on_values_are_refused(saved, monkeypatch):
    """As those of text encoders and denoisers that cut prompts to their lengths, and loop over them."""

    def forward(self, input_ids, **_):
        return {"last_hidden_state": input_ids[:, : int(input_ids.max())]}

    model = diffusers_model(saved / "pipeline", **options("stable_diffusion"))
    assert model.components is not None
    monkeypatch.setattr("transformers.CLIPTextModel.forward", forward)
    with pytest.raises(
        UserError, match=r"(?s)CLIPTextModel.forward cannot be.*got: .*values.*remedy: take the component out"
    ):
        model.components("text_encoder")


def test_a_pipeline_of_its_denoiser_alone_has_no_components(tmp_path):
    PIPELINES["flux"][0]().save_pretrained(tmp_path)
    model = diffusers_model(tmp_path, tokens=8, height=32, width=32)
    assert model.components is not None and model.components.names == ("vae_decoder", "vae_encoder")
    with pytest.raises(UserError, match=r"(?s)FluxPipeline has no component 'text_encoder'.*vae_decoder"):
        model.components("text_encoder")


def test_prompts_that_are_not_padded_are_refused(saved, monkeypatch):
    """An engine of one length would refuse the next prompt."""
    given = options("stable_diffusion", prompts=["a", "a bird"], batch=[1, 1, 2])
    model = diffusers_model(saved / "pipeline", **given)
    kind = type(model.components.caller.pipe.tokenizer)
    padded = kind.__call__
    monkeypatch.setattr(kind, "__call__", lambda *args, **kwargs: padded(*args, **kwargs | {"padding": "longest"}))
    with pytest.raises(UserError, match=r"(?s)'input_ids' with as many tokens as its longest prompt.*padded to"):
        model.components("text_encoder")
    with pytest.raises(UserError, match="'encoder_hidden_states' with as many tokens as its longest prompt"):
        diffusers_model(saved / "pipeline", **given | {"call": {"guidance_scale": 1.0}})


def test_the_decoder_is_held_to_latents_of_their_magnitude(saved):
    """Latents that nobody denoised are some hundred times as large with some schedulers, which half precision does not hold."""
    model = diffusers_model(saved / "pipeline", **options("stable_diffusion"))
    vae = model.components.caller.pipe.vae
    scale = vae.config.scaling_factor
    (latents,) = model.components("vae_decoder").example.values()
    assert latents.std() == pytest.approx(1 / scale, rel=0.1) and latents.mean().abs() < 0.2 / scale
    means, stds = [10.0, 20.0, 30.0, 40.0], [1.0, 2.0, 3.0, 4.0]
    vae.register_to_config(latents_mean=means, latents_std=stds, scaling_factor=1.0)
    (latents,) = model.components("vae_decoder").example.values()
    by_channel = latents.transpose(0, 1).flatten(1)
    assert by_channel.mean(1).tolist() == pytest.approx(means, rel=0.2)
    assert by_channel.std(1).tolist() == pytest.approx(stds, rel=0.4)  # of 64 elements each


# Sizes that follow others ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((3, 3, 3), 3),
        ((8, 12, 6), "height"),
        ((64, 96, 48), "8*height"),
        ((29, 45, 21), "4*height-3"),
        ((20, 26, 17), None),  # half a step per step
        ((64, 96, 50), None),
    ],
)
def test_a_dimension_is_a_line_through_another(sizes, expected):
    observed = Observed({}, {}, {}, ({},), {"batch": (2, 2, 2), "height": (8, 12, 6)})
    found = observed.dimension(sizes)
    assert found == expected
    if found is not None:
        record = TensorRecord(name="x", dtype="float32", shape=[found])
        assert [shape_of(record.shape, {"height": size}) for size in (8, 12, 6)] == [(size,) for size in sizes]


def test_a_dimension_that_is_no_line_is_refused_in_a_manifest():
    with pytest.raises(ValueError, match="a line through one: height\\*8"):
        TensorRecord(name="x", dtype="float32", shape=["height*8"])
