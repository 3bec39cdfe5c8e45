"""Text encoders and VAEs of small random pipelines as components compute the same as the models."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tiny_pipelines
import torch
from converted_pipelines import (
    FP32_ON_CPU,
    arguments,
    component_error,
    component_records,
    draw,
    halves_of,
    options,
    recipe_of,
    save,
)
from tiny_pipelines import WIDTH
from tolerances import SAME_ARITHMETIC, SAME_IMAGES_PSNR

from trtconvert.bundle import ComponentRecord
from trtconvert.documents import PIPELINE_INDEX
from trtconvert.engine import tensorrt_rtx
from trtconvert.errors import UserError
from trtconvert.evaluate.verify import psnr
from trtconvert.models.diffusers import diffusers_model
from trtconvert.models.loading import load_pipeline
from trtconvert.models.recorded_calls import relative_error
from trtconvert.recipe import EngineSection, load_recipe
from trtconvert.runtime.diffusers import DiffusersComponent
from trtconvert.runtime.pipeline import make_pipeline
from trtconvert.runtime.session import OnnxRuntimeComponent
from trtconvert.runtime.signature import shape_of
from trtconvert.runtime.unused import UnusedResult

diffusers = pytest.importorskip("diffusers", reason="needs diffusers")


transformers = pytest.importorskip("transformers", reason="needs transformers")


NAMES = [
    "stable_diffusion_3",
    *(pytest.param(name, marks=pytest.mark.soak) for name in ("stable_diffusion_xl", "ltx", "wan")),
]
"""CLIP, T5, UMT5, results that are read in part, settings read off a VAE, and videos; Flux is below."""


@dataclass(frozen=True)
class Converted:
    """A saved pipeline, and its models other than the denoiser on ONNX Runtime: text encoders by name, and the VAE's halves."""

    name: str
    pipeline: Path
    onnx: dict[str, Path]
    errors: dict[str, float]
    text: dict[str, tuple[OnnxRuntimeComponent, ComponentRecord]]
    halves: dict[str, tuple[OnnxRuntimeComponent, ComponentRecord]]


def convert_components(folder: Path, pipeline: str, components: dict[str, Any]) -> Converted:
    save(folder / "pipeline", pipeline)
    recipe = recipe_of(folder, pipeline, components)
    made = Converted(pipeline, folder / "pipeline", {}, {}, {}, {})
    for name, (stage, record) in component_records(folder, recipe).items():
        made.onnx[name] = stage.folder / record.onnx
        made.errors[name] = component_error(stage, record)
        kind, key = (made.text, name) if name.startswith("text") else (made.halves, record.diffusers.method)
        kind[key] = (OnnxRuntimeComponent(made.onnx[name], record), record)
    return made


@pytest.fixture(scope="module", params=NAMES)
def converted(request, tmp_path_factory) -> Converted:
    return convert_components(tmp_path_factory.mktemp(request.param), request.param, {"all": {}, "vae_encoder": {}})


@pytest.mark.slow
def test_components_do_what_the_models_do(converted):
    """With the pipeline's denoiser between them, text encoders and VAE give the pipeline's images."""
    pipe = load_pipeline(converted.pipeline)
    expected = draw(pipe, converted.name)
    assert set(converted.halves) == {"decode", "encode"} and len(converted.text) == len(converted.errors) - 2
    for name, (component, record) in converted.text.items():
        setattr(pipe, name, DiffusersComponent({"forward": (component, record)}, **FP32_ON_CPU))
    pipe.vae = DiffusersComponent(converted.halves, **FP32_ON_CPU)
    assert psnr(draw(pipe, converted.name), expected).min() >= SAME_IMAGES_PSNR
    assert max(converted.errors.values()) <= SAME_ARITHMETIC
    assert expected.std() > 0.05  # images with something on them


def text_in_place(converted: Converted) -> Any:
    """Loads the saved pipeline and replaces its text encoders by converted ones."""
    pipe = load_pipeline(converted.pipeline)
    pipe.set_progress_bar_config(disable=True)
    for name, (component, record) in converted.text.items():
        setattr(pipe, name, DiffusersComponent({"forward": (component, record)}, **FP32_ON_CPU))
    return pipe


def test_a_pipeline_that_offloads_its_models_leaves_converted_ones_where_they_are(converted):
    """accelerate reads the device off a model's first parameter; `to`, and functions that save weights, find no parameter."""
    pipe = text_in_place(converted)
    pipe.vae = DiffusersComponent(converted.halves, **FP32_ON_CPU)
    expected = draw(pipe, converted.name)
    pipe.enable_model_cpu_offload(device="cpu")
    # Not to the bit: offloading copies weights to other addresses, and the rounding of a product depends on their alignment.
    assert psnr(draw(pipe, converted.name), expected).min() >= SAME_IMAGES_PSNR
    for part in (pipe.text_encoder, pipe.vae):
        (only,) = part.parameters()
        assert (only.numel(), only.dtype, only.device) == (0, part.dtype, part.device)
        assert not part.state_dict() and not list(part.named_parameters())
        assert part.to("meta", torch.float16).device.type == "cpu" and part.dtype == torch.float32


def test_reading_an_unconverted_output_of_a_text_encoder_is_refused(tmp_path):
    """With clip_skip SDXL reads another layer of its text encoder; the layer is converted if the recipe's call has clip_skip."""
    converted = convert_components(tmp_path, "stable_diffusion_xl", {"text_encoder": {}, "text_encoder_2": {}})
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
    ours = DiffusersComponent(converted.halves, **FP32_ON_CPU)
    (spec,) = converted.halves["encode"][1].inputs
    images = torch.rand(shape_of(spec.shape, {"batch": 2}), generator=torch.Generator().manual_seed(5)) * 2 - 1
    with torch.no_grad():
        expected = load_pipeline(converted.pipeline).vae.encode(images).latent_dist
    got = ours.encode(images)
    assert relative_error(got.latent_dist.mode(), expected.mode()) <= SAME_ARITHMETIC
    (as_tuple,) = ours.encode(images, return_dict=None)  # no, in diffusers
    assert torch.equal(as_tuple.std, got.latent_dist.std)


@pytest.mark.first_case
@pytest.mark.parametrize(("frames", "batch"), [(20, 1), (12, [1, 1, 2]), (16, [1, 2, 8])])
def test_frames_are_decoded_in_pieces_of_any_length(tmp_path, frames, batch):
    """AnimateDiff decodes 16 frames of a video at a time, and the rest at the end."""
    tiny_pipelines.animatediff().save_pretrained(tmp_path)
    model = diffusers_model(tmp_path, height=32, width=32, frames=frames, batch=batch, prompts=["a cat"])
    decoder = model.components("vae_decoder")
    assert decoder.inputs[0].shape == ("batch", 4, 8, 8) and decoder.outputs[0].shape == ("batch", 3, 32, 32)
    assert decoder.dims == {"batch": (1, min(16, frames * (2 if batch == [1, 2, 8] else 1)), 16)}
    assert model.components("vae_encoder").dims == decoder.dims


@pytest.mark.soak
def test_a_text_encoder_may_be_given_truth_values(tmp_path, monkeypatch):
    """Krea 2 and PRX turn their tokenizers' masks into truth values."""
    pipe = tiny_pipelines.with_text("pixart")
    pipe.save_pretrained(tmp_path)
    tokenize = type(pipe.tokenizer).__call__

    def tokenize_with_truth_values(*arguments, **named):
        encoded = tokenize(*arguments, **named)
        encoded["attention_mask"] = encoded["attention_mask"].bool()
        return encoded

    monkeypatch.setattr(type(pipe.tokenizer), "__call__", tokenize_with_truth_values)
    model = {"source": "diffusers", "weights": ".", "options": options("pixart"), "dtype": "float32"}
    (tmp_path / "recipe.yaml").write_text(json.dumps({"model": model, "components": {"text_encoder": {}}}))
    made = component_records(tmp_path, load_recipe(tmp_path / "recipe.yaml"))
    ((stage, record),) = made.values()
    assert {i.name: i.dtype for i in record.inputs} == {"input_ids": "int64", "attention_mask": "int64"}
    encoder = DiffusersComponent(
        {"forward": (OnnxRuntimeComponent(stage.folder / record.onnx, record), record)}, **FP32_ON_CPU
    )
    tokens = tokenize_with_truth_values(
        pipe.tokenizer, "a cat", padding="max_length", max_length=tiny_pipelines.TOKENS, return_tensors="pt"
    )
    given = {"attention_mask": tokens.attention_mask}
    expected = pipe.text_encoder(tokens.input_ids, **given)[0]
    assert not tokens.attention_mask.all()
    assert relative_error(encoder(tokens.input_ids, **given)[0], expected) <= SAME_ARITHMETIC


def test_one_tensor_may_be_several_results(tmp_path, monkeypatch):
    """The last one of all states is the last state: Krea 2 reads the first, and the encoder returns both."""
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


@pytest.mark.soak
def test_statistics_that_a_pipeline_reads_off_its_vae_are_there(tmp_path):
    """FLUX.2 normalises latents by the statistics of a submodule of its VAE."""
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
    pipe.vae = DiffusersComponent(halves_of(tmp_path, **sizes, tokens=8, batch=1), **FP32_ON_CPU)
    assert torch.equal(pipe.vae.bn.running_mean, vae.bn.running_mean)
    assert psnr(drawn(), expected).min() >= SAME_IMAGES_PSNR and expected.std() > 0.05


def test_lists_of_numbers_in_an_index_are_settings(tmp_path):
    tiny_pipelines.wan().save_pretrained(tmp_path)
    index = json.loads((tmp_path / PIPELINE_INDEX).read_text()) | {"boundary_ratio": [0.5, 0.25]}
    (tmp_path / PIPELINE_INDEX).write_text(json.dumps(index))
    pipe = make_pipeline(tmp_path, {"transformer": None, "vae": None})
    assert pipe.config.boundary_ratio == [0.5, 0.25]


@pytest.mark.soak
def test_the_last_piece_of_a_video_is_decoded_too(tmp_path):
    tiny_pipelines.animatediff().save_pretrained(tmp_path)
    pipe = load_pipeline(tmp_path)
    pipe.set_progress_bar_config(disable=True)
    sizes = {"height": 32, "width": 32}

    def drawn() -> torch.Tensor:
        call = {"num_frames": 20, "num_inference_steps": 2, "output_type": "pt"}
        return pipe("a bird", **sizes, **call, generator=torch.Generator().manual_seed(3))[0]

    expected = drawn()
    pipe.vae = DiffusersComponent(halves_of(tmp_path, **sizes, frames=20, batch=1), **FP32_ON_CPU)
    assert psnr(drawn(), expected).min() >= SAME_IMAGES_PSNR and expected.std() > 0.05


@pytest.mark.soak
def test_the_vae_of_a_denoiser_for_one_image_is_converted(tmp_path):
    """QwenImage's denoiser is called for one batch alone, as it holds the shape of each image as a constant."""
    tiny_pipelines.qwen_image().save_pretrained(tmp_path)
    halves = halves_of(tmp_path, height=32, width=32, tokens=8, batch=1)
    assert all(record.dims == {"batch": (1, 1, 1)} for _, record in halves.values())
    vae, ours = load_pipeline(tmp_path).vae, DiffusersComponent(halves, **FP32_ON_CPU)
    latents = torch.randn(1, 4, 1, 4, 4, generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        expected = vae.decode(latents).sample
        encoded = vae.encode(expected).latent_dist
    got = ours.decode(latents).sample
    assert relative_error(got, expected) <= SAME_ARITHMETIC
    assert relative_error(ours.encode(expected).latent_dist.mode(), encoded.mode()) <= SAME_ARITHMETIC


class Silent:
    """A reporter of builds without output."""

    def share(self, detail: str, done: float) -> None: ...

    def notice(self, text: str) -> None: ...


@pytest.mark.first_case
@pytest.mark.skipif(not tensorrt_rtx.status().available, reason=tensorrt_rtx.status().detail)
def test_nvidias_parser_and_builder_take_the_components(converted):
    """Builds with TensorRT-RTX, which needs no GPU and has TensorRT's parser."""
    records = {record.onnx: record for _, record in (*converted.text.values(), *converted.halves.values())}
    for name, onnx in converted.onnx.items():
        engine = tensorrt_rtx.build_engine(name, records[onnx.name], onnx, EngineSection(), "sm86", Silent())
        assert engine.record.attention == "native" and len(engine.plan) > 1000
