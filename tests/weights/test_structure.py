"""The purpose of a model's tensors by shapes and places, and `--strategy kandinsky`, which goes by it."""

from __future__ import annotations

import functools
from collections import Counter
from pathlib import Path

import pytest
import torch
from stored_models import save
from support import refusal, run
from torch import nn

from trtconvert.weights import Int8Linear, load_quantized
from trtconvert.weights.analysis import Analysis, Rules, by_name
from trtconvert.weights.sources import Part, Source, StoredTensor, open_source
from trtconvert.weights.structure import Role, structure_of

pytest.importorskip("diffusers", reason="needs diffusers")
pytest.importorskip("transformers", reason="needs transformers")
import diffusers
import further_pipelines
import transformers

KANDINSKY = {
    "in_visual_dim": 16,
    "in_text_dim": 3584,
    "in_text_dim2": 768,
    "out_visual_dim": 16,
    "num_visual_blocks": 2,
}
TEXT = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2}


def source_of(models: dict[str, nn.Module], *, renamed: bool = False) -> Source:
    """Models of a pipeline's folder on the meta device; `renamed` replaces all names but numbers by letters."""

    def name_of(name: str) -> str:
        *module, last = name.split(".")
        return ".".join([part if part.isdigit() else f"m{sum(map(ord, part))}" for part in module] + [last])

    parts = []
    for folder, model in models.items():
        tensors = [
            StoredTensor(
                name_of(name) if renamed else name, folder, tuple(x.shape), x.dtype, x.nbytes, functools.partial(Exception)
            )
            for name, x in model.state_dict().items()
        ]  # fmt: skip
        parts.append(Part(folder, (), (), (), tuple(tensors), {}))
    return Source(Path("m"), tuple(parts))


def made(name: str) -> dict[str, nn.Module]:
    with torch.device("meta"):
        if name in ("t2v", "i2v"):
            return {
                "transformer": diffusers.Kandinsky5Transformer3DModel(**KANDINSKY, visual_cond=name == "i2v"),
                "vae": diffusers.AutoencoderKLHunyuanVideo(),
                "text_encoder": transformers.CLIPTextModel(transformers.CLIPTextConfig(**TEXT)),
            }
        if name == "kandinsky22":
            pipe = further_pipelines.kandinsky22()
            return {"unet": pipe.unet, "movq": pipe.movq}
        if name == "factorised":
            return {"unet": diffusers.UNetMotionModel(cross_attention_dim=768)}
        vision = transformers.CLIPVisionConfig(**TEXT, projection_dim=64)
        return {"image_encoder": transformers.CLIPVisionModelWithProjection(vision)}


ROLES = {
    "t2v": {
        "transformer/visual_transformer_blocks.1.self_attention.to_key.weight": "denoiser, attention",
        "transformer/visual_transformer_blocks.1.cross_attention.out_layer.weight": "denoiser, attention",
        "transformer/text_transformer_blocks.0.feed_forward.in_layer.weight": "denoiser, MLP",
        "transformer/visual_transformer_blocks.0.visual_modulation.out_layer.weight": "denoiser, modulation",
        "transformer/time_embeddings.in_layer.weight": "denoiser, outside of blocks",
        "transformer/out_layer.out_layer.weight": "denoiser, outside of blocks",
        "transformer/visual_transformer_blocks.0.self_attention.query_norm.weight": "denoiser, vector or table",
        "vae/encoder.down_blocks.0.resnets.0.conv1.conv.weight": "VAE encoder, convolution",
        "vae/decoder.mid_block.attentions.0.to_q.weight": "VAE decoder, attention",
        "vae/decoder.conv_out.conv.weight": "VAE decoder, outside of blocks",
        "vae/post_quant_conv.weight": "VAE decoder, outside of blocks",
        "text_encoder/embeddings.token_embedding.weight": "text encoder, vocabulary",
        "text_encoder/encoder.layers.1.self_attn.q_proj.weight": "text encoder, attention",
        "text_encoder/encoder.layers.1.mlp.fc2.weight": "text encoder, MLP",
    },
    "kandinsky22": {
        "unet/down_blocks.1.attentions.0.add_k_proj.weight": "denoiser, attention",
        "unet/mid_block.attentions.0.to_out.0.weight": "denoiser, attention",
        "unet/down_blocks.0.resnets.0.conv1.weight": "denoiser, convolution",
        "unet/down_blocks.0.resnets.0.time_emb_proj.weight": "denoiser, modulation",
        "unet/encoder_hid_proj.image_embeds.weight": "denoiser, outside of blocks",
        "unet/conv_out.weight": "denoiser, outside of blocks",
        "movq/decoder.up_blocks.0.resnets.0.conv1.weight": "VAE decoder, convolution",
        "movq/encoder.conv_in.weight": "VAE encoder, outside of blocks",
    },
    "factorised": {
        "unet/down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q.weight": "denoiser, spatial attention",
        "unet/down_blocks.0.motion_modules.0.transformer_blocks.0.attn1.to_q.weight": "denoiser, temporal attention",
        "unet/down_blocks.3.motion_modules.1.transformer_blocks.0.attn2.to_v.weight": "denoiser, temporal attention",
    },
    "images": {"image_encoder/vision_model.encoder.layers.0.mlp.fc1.weight": "image encoder, MLP"},
}


@pytest.mark.parametrize("name", ROLES)
def test_roles(name):
    found = structure_of(source_of(made(name)))
    assert {path: str(found.roles[path]) for path in ROLES[name]} == ROLES[name]
    assert not found.reads_images


@pytest.mark.parametrize("name", ["t2v", "kandinsky22", "factorised"])
def test_names_do_not_matter(name):
    models = made(name)
    named, renamed = (structure_of(source_of(models, renamed=renamed)) for renamed in (False, True))
    assert list(named.roles.values()) == list(renamed.roles.values())


def test_images_beside_latents():
    found = structure_of(source_of(made("i2v")))
    assert found.reads_images
    assert structure_of(source_of({"unet": inpainting()})).reads_images


def inpainting() -> nn.Module:
    with torch.device("meta"):
        return diffusers.UNet2DConditionModel(in_channels=9, cross_attention_dim=768)


def test_a_file_of_several_models_is_cut_into_them():
    models = made("t2v")
    together = nn.ModuleDict(
        {"net": models["transformer"], "first_stage": models["vae"], "cond": models["text_encoder"]}
    )
    found = structure_of(source_of({"": together}))
    units = Counter((path.partition(".")[0], role.unit) for path, role in found.roles.items())
    assert set(units) == {
        ("net", "denoiser"),
        ("first_stage", "VAE encoder"),
        ("first_stage", "VAE decoder"),
        ("cond", "text encoder"),
    }


@pytest.mark.parametrize(("name", "encoder"), [("t2v", None), ("i2v", "kept")])
def test_verdicts(name, encoder):
    """None: the numbers decide. The VAE's encoder keeps its type in models that read images."""
    source = source_of(made(name))
    structure, rules = structure_of(source), Rules(strategy="kandinsky")
    tensors = {tensor.path: tensor for tensor in source.tensors}

    def stored(path: str) -> str | None:
        verdict = by_name(tensors[path], rules, structure, floating=True)
        return verdict and verdict.stored

    assert stored("transformer/visual_transformer_blocks.1.self_attention.to_key.weight") is None
    assert stored("text_encoder/encoder.layers.1.mlp.fc2.weight") is None
    assert stored("vae/encoder.down_blocks.0.resnets.0.conv1.conv.weight") == encoder
    for path, role in ROLES["t2v"].items():
        if role.startswith("VAE decoder") or role.endswith("vocabulary"):
            assert stored(path) == "kept"
        if role.endswith("modulation"):
            assert stored(path) is None
    assert stored("transformer/time_embeddings.in_layer.weight") == "kept"
    assert stored("transformer/visual_transformer_blocks.0.self_attention.query_norm.weight") == "fp32"


@pytest.mark.parametrize("name", ["kandinsky5", "kandinsky5_i2v", "kandinsky22"])
def test_from_a_pipeline_to_a_loaded_one(tmp_path, name):
    make = getattr(further_pipelines, name)
    pipe = make()
    pipe.save_pretrained(tmp_path / "p")
    options = "--strategy", "kandinsky"
    outcome = run("analyze", tmp_path / "p", "-o", tmp_path / "a.json", *options)
    assert outcome.exit_code == 0, outcome.output
    reads_images = name == "kandinsky5_i2v"
    read = "the denoiser reads images beside latents" if reads_images else "the denoiser reads latents alone"
    for text in (read, "denoiser, attention", "VAE decoder, convolution", "modulation"):
        assert text in outcome.output.replace("\n", " ")
    found = Analysis.model_validate_json((tmp_path / "a.json").read_text(encoding="utf-8"))
    assert found.reads_images is reads_images and {tensor.role for tensor in found.tensors} >= {"denoiser, attention"}
    small = "--min-elements", "256", "--analysis", tmp_path / "a.json"
    outcome = run("quantize", tmp_path / "p", "-o", tmp_path / "q", *options, *small)
    assert outcome.exit_code == 0, outcome.output
    fresh = make()
    component = "unet" if name == "kandinsky22" else "transformer"
    for x in getattr(fresh, component).parameters():
        nn.init.zeros_(x)
    load_quantized(fresh, tmp_path / "q")
    decoder = "movq" if name == "kandinsky22" else "vae"
    in_int8 = {path for path, module in getattr(fresh, component).named_modules() if isinstance(module, Int8Linear)}
    roles = structure_of(open_source(tmp_path / "p")).roles
    wanted = {Role("denoiser", "attention"), Role("denoiser", "MLP"), Role("denoiser", "modulation")}
    before = getattr(pipe, component).state_dict()
    assert in_int8 == {
        path.removeprefix(f"{component}/").removesuffix(".weight")
        for path, role in roles.items()
        if role in wanted and before[path.removeprefix(f"{component}/")].dim() == 2
    }
    for path, x in getattr(pipe, decoder).state_dict().items():
        if roles[f"{decoder}/{path}"].unit == "VAE decoder":
            assert torch.equal(getattr(fresh, decoder).state_dict()[path], x)
    difference = [before[path] - module.weight for path, module in getattr(fresh, component).named_modules()
                  if isinstance(module, Int8Linear) for path in [f"{path}.weight"]]  # fmt: skip
    assert all(float(x.norm()) > 0 for x in difference)


def test_models_without_a_denoiser_are_refused(tmp_path):
    text = transformers.CLIPTextModel(transformers.CLIPTextConfig(**TEXT, vocab_size=1000)).state_dict()
    save(tmp_path / "m", text, "model")
    for command in ("analyze", "quantize"):
        outcome = run(command, tmp_path / "m", "-o", tmp_path / "o.json", "--strategy", "kandinsky")
        refusal(outcome, "finds no denoiser", "text encoder", "leave --strategy out")
    assert not (tmp_path / "o.json").exists()
