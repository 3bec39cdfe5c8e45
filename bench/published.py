"""Pipelines of diffusers in the sizes of published models, with random weights, as folders that `trtconvert build` reads.

    python bench/published.py NAME... -o FOLDER [--device cuda] [--alone]

With `--alone` a pipeline has no text encoders, and draws from random embeddings. Weights pass signals on, in the type of the
published models. Tokenizers know letters only: no measurement depends on words.
"""

from __future__ import annotations

import argparse
import gc
import string
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from architectures import PIXART, SD3_MEDIUM, SDXL, WAN
from torch import nn

PROMPT_TOKENS = 77
CLIP_L = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
CLIP_G = {
    "hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32, "num_attention_heads": 20,
    "projection_dim": 1280, "hidden_act": "gelu",
}  # fmt: skip
T5_XXL = {
    "d_model": 4096,
    "d_kv": 64,
    "d_ff": 10240,
    "num_layers": 24,
    "num_heads": 64,
    "feed_forward_proj": "gated-gelu",
}
VAE = {
    "block_out_channels": (128, 256, 512, 512),
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "layers_per_block": 2,
    "sample_size": 1024,
}


@dataclass(frozen=True)
class Published:
    """One pipeline.

    Attributes:
        make: its parts, on the current device and in the current default type.
        pipeline: diffusers' class.
        dtype: of the weights.
        options: of a recipe's model section.
        embedded: tokens of a prompt's embeddings, as the pipeline makes them by default.
    """

    make: Callable[[], dict[str, Any]]
    pipeline: str
    dtype: str
    options: dict[str, Any] = field(default_factory=dict)
    embedded: int = PROMPT_TOKENS


def clip_tokenizer() -> Any:
    letters = string.ascii_lowercase
    tokens = [*letters, *(letter + "</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    return transformers.CLIPTokenizer(vocab=vocabulary, merges=[], model_max_length=PROMPT_TOKENS)


def clip(projected: bool = False, **config: Any) -> Any:
    tokenizer = clip_tokenizer()
    ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    made = transformers.CLIPTextModelWithProjection if projected else transformers.CLIPTextModel
    return made(transformers.CLIPTextConfig(vocab_size=49408, max_position_embeddings=PROMPT_TOKENS, **ids, **config))


def t5_tokenizer() -> Any:
    letters = string.ascii_lowercase
    pieces = ["<pad>", "</s>", "<unk>", "▁", *letters, *("▁" + letter for letter in letters)]
    return transformers.T5Tokenizer(vocab=[(piece, -1.0) for piece in pieces], extra_ids=0, model_max_length=512)


def t5() -> Any:
    return transformers.T5EncoderModel(transformers.T5Config(vocab_size=32128, **T5_XXL))


def vae(channels: int, scaling: float, **config: Any) -> Any:
    return diffusers.AutoencoderKL(latent_channels=channels, scaling_factor=scaling, **VAE, **config)


def ddim() -> Any:
    return diffusers.DDIMScheduler(
        beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", clip_sample=False, set_alpha_to_one=False,
        steps_offset=1,
    )  # fmt: skip


def sd15() -> dict[str, Any]:
    return {
        "unet": diffusers.UNet2DConditionModel(cross_attention_dim=768, sample_size=64),
        "text_encoder": clip(**CLIP_L),
        "tokenizer": clip_tokenizer(),
        "vae": vae(4, 0.18215),
        "scheduler": ddim(),
        "safety_checker": None,
        "feature_extractor": None,
        "requires_safety_checker": False,
    }


def sdxl() -> dict[str, Any]:
    return {
        "unet": diffusers.UNet2DConditionModel(**SDXL),
        "text_encoder": clip(**CLIP_L),
        "tokenizer": clip_tokenizer(),
        "text_encoder_2": clip(projected=True, **CLIP_G),
        "tokenizer_2": clip_tokenizer(),
        "vae": vae(4, 0.13025),
        "scheduler": ddim(),
    }


def pixart() -> dict[str, Any]:
    return {
        "transformer": diffusers.PixArtTransformer2DModel(**PIXART),
        "text_encoder": t5(),
        "tokenizer": t5_tokenizer(),
        "vae": vae(4, 0.13025),
        "scheduler": diffusers.DPMSolverMultistepScheduler(),
    }


def sd3() -> dict[str, Any]:
    return {
        "transformer": diffusers.SD3Transformer2DModel(**SD3_MEDIUM, num_layers=24),
        "text_encoder": clip(projected=True, **CLIP_L, projection_dim=768),
        "tokenizer": clip_tokenizer(),
        "text_encoder_2": clip(projected=True, **CLIP_G),
        "tokenizer_2": clip_tokenizer(),
        "text_encoder_3": t5(),
        "tokenizer_3": t5_tokenizer(),
        "vae": vae(16, 1.5305, shift_factor=0.0609, use_quant_conv=False, use_post_quant_conv=False),
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
    }


def flux() -> dict[str, Any]:
    return {
        "transformer": diffusers.FluxTransformer2DModel(guidance_embeds=True),
        "text_encoder": clip(**CLIP_L),
        "tokenizer": clip_tokenizer(),
        "text_encoder_2": t5(),
        "tokenizer_2": t5_tokenizer(),
        "vae": vae(16, 0.3611, shift_factor=0.1159, use_quant_conv=False, use_post_quant_conv=False),
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
    }


def wan() -> dict[str, Any]:
    return {
        "transformer": diffusers.WanTransformer3DModel(**WAN),
        "text_encoder": None,
        "tokenizer": None,
        "vae": diffusers.AutoencoderKLWan(),
        "scheduler": diffusers.UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
        ),
    }


SQUARE = {"height": 1024, "width": 1024, "batch": [1, 1, 2]}
PUBLISHED = {
    "sd15": Published(sd15, "StableDiffusionPipeline", "float16", {"height": 512, "width": 512, "batch": [1, 1, 2]}),
    "sdxl": Published(sdxl, "StableDiffusionXLPipeline", "float16", SQUARE),
    "pixart": Published(pixart, "PixArtSigmaPipeline", "float16", SQUARE, 300),
    "sd3": Published(sd3, "StableDiffusion3Pipeline", "float16", SQUARE, 77 + 256),
    "flux": Published(flux, "FluxPipeline", "bfloat16", SQUARE | {"batch": [1, 1, 1]}, 512),
    "wan": Published(
        wan, "WanPipeline", "bfloat16", {"height": 480, "width": 832, "frames": 41, "batch": [1, 1, 1]}, 512
    ),
}


@torch.no_grad()
def randomise(model: nn.Module) -> None:
    """Weights that pass signals on: the zeros of the classes' initialisation would hide attention."""
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=parameter[0].numel() ** -0.5)


def save(name: str, folder: Path, device: str, alone: bool = False) -> None:
    """Writes a pipeline's folder, one model after the other.

    Args:
        alone: without text encoders.
    """
    published = PUBLISHED[name]
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, published.dtype))
    try:
        with torch.device(device):
            parts = published.make()
    finally:
        torch.set_default_dtype(before)
    if alone:
        parts |= {part: None for part in parts if part.startswith(("text_encoder", "tokenizer"))}
    for part in parts.values():
        if isinstance(part, nn.Module):
            randomise(part.to(getattr(torch, published.dtype)))
    pipe = getattr(diffusers, published.pipeline)(**parts)
    pipe.save_pretrained(folder)
    del pipe, parts
    gc.collect()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", choices=PUBLISHED)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--alone", action="store_true")
    given = parser.parse_args()
    for name in given.names:
        save(name, given.output / name, given.device, given.alone)


if __name__ == "__main__":
    main()
