"""Pipelines of diffusers' newest models with random weights."""

from __future__ import annotations

from typing import Any

import pytest
from tiny_pipelines import WIDTH, randomised, seeded, wan

diffusers = pytest.importorskip("diffusers", reason="needs diffusers")


def flux2_parts() -> dict[str, Any]:
    transformer = diffusers.Flux2Transformer2DModel(
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=32,
        num_attention_heads=2,
        joint_attention_dim=WIDTH,
        timestep_guidance_channels=32,
        axes_dims_rope=(8, 8, 8, 8),
        guidance_embeds=False,
    )
    autoencoder = diffusers.AutoencoderKLFlux2(
        block_out_channels=(8, 8),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=4,
    )
    return {
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(),
        "vae": randomised(autoencoder),
        "text_encoder": None,
        "tokenizer": None,
        "transformer": randomised(transformer),
    }


@seeded
def flux2_klein() -> Any:
    return diffusers.Flux2KleinPipeline(**flux2_parts())


@seeded
def flux2_klein_kv() -> Any:
    """With an image its first step gives keys and values of it, which the others take."""
    return diffusers.Flux2KleinKVPipeline(**flux2_parts())


@seeded
def anyflow() -> Any:
    """Is told for each frame the noise that a step begins with, and that it ends with."""
    transformer = diffusers.AnyFlowTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=32,
        text_dim=WIDTH,
        freq_dim=32,
        ffn_dim=32,
        num_layers=2,
        rope_max_seq_len=32,
    )
    kept = {name: wan().components[name] for name in ("tokenizer", "text_encoder", "vae")}
    scheduler = diffusers.FlowMapEulerDiscreteScheduler()
    return diffusers.AnyFlowPipeline(transformer=randomised(transformer), scheduler=scheduler, **kept)


@seeded
def motif_video() -> Any:
    from diffusers.guiders import ClassifierFreeGuidance

    transformer = diffusers.MotifVideoTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=32,
        num_layers=1,
        num_single_layers=2,
        num_decoder_layers=1,
        text_embed_dim=WIDTH,
        rope_axes_dim=(8, 12, 12),
    )
    return diffusers.MotifVideoPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        vae=wan().vae,
        text_encoder=None,  # type: ignore[arg-type]
        tokenizer=None,  # type: ignore[arg-type]
        transformer=randomised(transformer),
        guider=ClassifierFreeGuidance(),
    )


@seeded
def nucleus_moe() -> Any:
    """Each expert chooses some of the tokens."""
    transformer = diffusers.NucleusMoEImageTransformer2DModel(
        in_channels=16,
        out_channels=4,
        num_layers=2,
        attention_head_dim=32,
        num_attention_heads=2,
        num_key_value_heads=1,
        joint_attention_dim=WIDTH,
        axes_dims_rope=(8, 12, 12),
        dense_moe_strategy="leave_first_block_dense",
        num_experts=4,
        moe_intermediate_dim=32,
        capacity_factors=2.0,
    )
    autoencoder = diffusers.AutoencoderKLQwenImage(
        base_dim=24, z_dim=4, dim_mult=[1, 2, 4], num_res_blocks=1, latents_mean=[0.0] * 4, latents_std=[1.0] * 4
    )
    return diffusers.NucleusMoEImagePipeline(
        transformer=randomised(transformer),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        vae=autoencoder,
        text_encoder=None,  # type: ignore[arg-type]
        processor=None,  # type: ignore[arg-type]
    )


def glm_image_transformer() -> Any:
    """Reads tokens that another model has drawn, some of them dropped."""
    transformer = diffusers.GlmImageTransformer2DModel(
        in_channels=4,
        out_channels=4,
        num_layers=1,
        attention_head_dim=32,
        num_attention_heads=2,
        text_embed_dim=WIDTH,
        time_embed_dim=32,
        condition_dim=8,
        prior_vq_quantizer_codebook_size=16,
    )
    return randomised(transformer)


def kandinsky6_parts() -> dict[str, Any]:
    transformer = diffusers.Kandinsky6Transformer3DModel(
        in_text_dim=WIDTH,
        in_text_dim2=WIDTH,
        time_dim=32,
        model_dim=64,
        ff_dim=128,
        num_text_blocks=1,
        num_visual_blocks=1,
        axes_dims=(8, 12, 12),
    )
    video = diffusers.AutoencoderKLHunyuanVideo(
        latent_channels=16, block_out_channels=(8, 8, 8, 8), layers_per_block=1, norm_num_groups=4
    )
    return {
        "transformer": randomised(transformer),
        "vae": randomised(video),
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(),
    } | dict.fromkeys(("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"))


@seeded
def kandinsky6() -> Any:
    return diffusers.Kandinsky6TI2VAPipeline(**kandinsky6_parts())
