"""Further pipelines of diffusers with random weights: those that are no text-to-image pipeline in the plainest form."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
from newest_pipelines import (
    anyflow,
    flux2_klein,
    flux2_klein_kv,
    kandinsky6,
    motif_video,
    nucleus_moe,
)
from tiny_pipelines import (
    PIPELINES,
    WIDTH,
    clip,
    clip_tokenizer,
    flux,
    ltx,
    qwen_image,
    randomised,
    seeded,
    stable_diffusion,
    t5,
    t5_tokenizer,
    unet,
    vae,
    wan,
)

diffusers = pytest.importorskip("diffusers", reason="needs diffusers")
transformers = pytest.importorskip("transformers", reason="needs transformers")


@seeded
def dit() -> Any:
    """Draws classes, and has an odd one for no class."""
    transformer = diffusers.DiTTransformer2DModel(
        sample_size=8,
        num_layers=2,
        patch_size=2,
        attention_head_dim=32,
        num_attention_heads=2,
        in_channels=4,
        out_channels=8,
        num_embeds_ada_norm=1000,
    )
    scheduler = diffusers.DDIMScheduler(clip_sample=False)
    return diffusers.DiTPipeline(transformer=randomised(transformer), vae=vae(4), scheduler=scheduler)


def image_unet(**config: Any) -> Any:
    return randomised(
        diffusers.UNet2DModel(
            sample_size=16,
            block_out_channels=(32, 64),
            layers_per_block=1,
            down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D"),
            attention_head_dim=32,
            norm_num_groups=8,
            **config,
        )
    )


@seeded
def ddpm() -> Any:
    """Draws pixels, of nothing in particular."""
    return diffusers.DDPMPipeline(unet=image_unet(), scheduler=diffusers.DDPMScheduler())


@seeded
def ddim() -> Any:
    return diffusers.DDIMPipeline(unet=image_unet(), scheduler=diffusers.DDIMScheduler())


@seeded
def consistency() -> Any:
    """Draws classes in pixels."""
    unet = image_unet(num_class_embeds=10)
    return diffusers.ConsistencyModelPipeline(unet=unet, scheduler=diffusers.CMStochasticIterativeScheduler())


@seeded
def ldm() -> Any:
    vqvae = diffusers.VQModel(
        block_out_channels=(8, 8),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=3,
        norm_num_groups=4,
        num_vq_embeddings=16,
    )
    return diffusers.LDMPipeline(vqvae=randomised(vqvae), unet=image_unet(), scheduler=diffusers.DDIMScheduler())


def deep_vae(channels: int) -> Any:
    """Eight times smaller latents, which some pipelines take for granted."""
    return randomised(
        diffusers.AutoencoderKL(
            block_out_channels=(8,) * 4,
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
            layers_per_block=1,
            latent_channels=channels,
            norm_num_groups=4,
        )
    )


@seeded
def hunyuan_dit() -> Any:
    transformer = diffusers.HunyuanDiT2DModel(
        sample_size=16,
        num_layers=2,
        patch_size=2,
        attention_head_dim=32,
        num_attention_heads=2,
        in_channels=4,
        cross_attention_dim=WIDTH,
        cross_attention_dim_t5=WIDTH,
        pooled_projection_dim=16,
        hidden_size=64,
        activation_fn="gelu-approximate",
        text_len=8,
        text_len_t5=8,
    )
    return diffusers.HunyuanDiTPipeline(
        vae=deep_vae(4),
        text_encoder=None,
        tokenizer=None,
        transformer=randomised(transformer),
        scheduler=diffusers.DDPMScheduler(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
        text_encoder_2=None,
        tokenizer_2=None,
    )


@seeded
def chroma() -> Any:
    transformer = diffusers.ChromaTransformer2DModel(
        in_channels=64,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=32,
        num_attention_heads=2,
        joint_attention_dim=WIDTH,
        axes_dims_rope=(8, 12, 12),
        approximator_hidden_dim=32,
        approximator_layers=1,
        approximator_num_channels=16,
    )
    return diffusers.ChromaPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        vae=vae(16),
        text_encoder=None,
        tokenizer=None,
        transformer=randomised(transformer),
    )


@seeded
def sdxl_refiner() -> Any:
    model = unet(
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=WIDTH + 5 * 8,
        use_linear_projection=True,
    )
    return diffusers.StableDiffusionXLImg2ImgPipeline(
        vae=vae(4),
        text_encoder=None,
        text_encoder_2=clip(width=WIDTH, projection=WIDTH),
        tokenizer=None,
        tokenizer_2=clip_tokenizer(),
        unet=model,
        scheduler=diffusers.EulerDiscreteScheduler(beta_schedule="scaled_linear"),
        requires_aesthetics_score=True,
        add_watermarker=False,
    )


@seeded
def lumina2() -> Any:
    transformer = diffusers.Lumina2Transformer2DModel(
        sample_size=16,
        patch_size=2,
        in_channels=16,
        hidden_size=64,
        num_layers=2,
        num_refiner_layers=1,
        num_attention_heads=2,
        num_kv_heads=1,
        multiple_of=2,
        ffn_dim_multiplier=1,
        cap_feat_dim=WIDTH,
        axes_dim_rope=(8, 12, 12),
        axes_lens=(64, 64, 64),
    )
    return diffusers.Lumina2Pipeline(
        transformer=randomised(transformer),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        vae=vae(16),
        text_encoder=None,
        tokenizer=None,
    )


@seeded
def z_image() -> Any:
    transformer = diffusers.ZImageTransformer2DModel(
        in_channels=16,
        dim=64,
        n_layers=1,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
        cap_feat_dim=WIDTH,
        axes_dims=[8, 12, 12],
        axes_lens=[128, 64, 64],
    )
    return diffusers.ZImagePipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        vae=vae(16),
        text_encoder=None,
        tokenizer=None,
        transformer=randomised(transformer),
    )


@seeded
def z_image_control_net() -> Any:
    """Its ControlNet makes of the image and the prompt what is added behind layers."""
    parts = z_image().components
    controlnet = diffusers.ZImageControlNetModel(
        control_layers_places=[0],
        control_refiner_layers_places=[0],
        control_in_dim=16,
        dim=64,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
    )
    return diffusers.ZImageControlNetPipeline(**parts, controlnet=randomised(controlnet))


@seeded
def mochi() -> Any:
    transformer = diffusers.MochiTransformer3DModel(
        patch_size=2,
        num_attention_heads=2,
        attention_head_dim=32,
        num_layers=2,
        pooled_projection_dim=16,
        in_channels=12,
        qk_norm="rms_norm",
        text_embed_dim=WIDTH,
        time_embed_dim=4,
        max_sequence_length=16,
    )
    video = diffusers.AutoencoderKLMochi(
        latent_channels=12,
        out_channels=3,
        encoder_block_out_channels=(32, 32, 32, 32),
        decoder_block_out_channels=(32, 32, 32, 32),
        layers_per_block=(1, 1, 1, 1, 1),
    )
    return diffusers.MochiPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        vae=randomised(video),
        text_encoder=None,
        tokenizer=None,
        transformer=randomised(transformer),
    )


@seeded
def stable_audio() -> Any:
    """With a scheduler of its own's kind, which needs no further package."""
    transformer = diffusers.StableAudioDiTModel(
        sample_size=4,
        in_channels=3,
        num_layers=2,
        attention_head_dim=32,
        num_attention_heads=2,
        num_key_value_attention_heads=2,
        out_channels=3,
        cross_attention_dim=WIDTH,
        time_proj_dim=8,
        global_states_input_dim=2 * WIDTH,
        cross_attention_input_dim=WIDTH,
    )
    audio = diffusers.AutoencoderOobleck(
        encoder_hidden_size=6,
        downsampling_ratios=[1, 2],
        decoder_channels=3,
        decoder_input_channels=3,
        audio_channels=2,
        channel_multiples=[2, 4],
        sampling_rate=4,
    )
    projection = diffusers.StableAudioProjectionModel(
        text_encoder_dim=WIDTH, conditioning_dim=WIDTH, min_value=0, max_value=32
    )
    return diffusers.StableAudioPipeline(
        vae=randomised(audio),
        text_encoder=t5(),
        projection_model=randomised(projection),
        tokenizer=t5_tokenizer(),
        transformer=randomised(transformer),
        scheduler=diffusers.EDMDPMSolverMultistepScheduler(),
    )


@seeded
def marigold() -> Any:
    return diffusers.MarigoldDepthPipeline(
        unet=unet(in_channels=8, out_channels=4),
        vae=vae(4),
        scheduler=diffusers.DDIMScheduler(clip_sample=False),
        text_encoder=clip(),
        tokenizer=clip_tokenizer(),
        prediction_type="depth",
        scale_invariant=True,
        shift_invariant=True,
        default_denoising_steps=2,
        default_processing_resolution=32,
    )


@seeded
def kandinsky22() -> Any:
    model = diffusers.UNet2DConditionModel(
        in_channels=4,
        out_channels=8,
        addition_embed_type="image",
        down_block_types=("ResnetDownsampleBlock2D", "SimpleCrossAttnDownBlock2D"),
        up_block_types=("SimpleCrossAttnUpBlock2D", "ResnetUpsampleBlock2D"),
        mid_block_type="UNetMidBlock2DSimpleCrossAttn",
        block_out_channels=(32, 64),
        layers_per_block=1,
        encoder_hid_dim=WIDTH,
        encoder_hid_dim_type="image_proj",
        cross_attention_dim=WIDTH,
        attention_head_dim=32,
        resnet_time_scale_shift="scale_shift",
        class_embed_type=None,
        norm_num_groups=8,
    )
    movq = diffusers.VQModel(
        block_out_channels=(32, 32),
        down_block_types=("DownEncoderBlock2D",) * 2,
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=32,
        norm_type="spatial",
        num_vq_embeddings=12,
        up_block_types=("UpDecoderBlock2D",) * 2,
        vq_embed_dim=4,
    )
    scheduler = diffusers.DDIMScheduler(
        beta_schedule="linear", beta_start=0.00085, beta_end=0.012, clip_sample=False, steps_offset=1
    )
    return diffusers.KandinskyV22Pipeline(unet=randomised(model), scheduler=scheduler, movq=randomised(movq))


@seeded
def kandinsky5() -> Any:
    return diffusers.Kandinsky5T2VPipeline(**kandinsky5_parts())


@seeded
def kandinsky5_i2v() -> Any:
    """Its denoiser reads the latents of an image, and a mask, beside those of the video. It is wider than what it gives, as real
    ones are."""
    return diffusers.Kandinsky5I2VPipeline(**kandinsky5_parts(visual_cond=True, model_dim=96))


def kandinsky5_parts(model_dim: int = 64, **options: Any) -> dict[str, Any]:
    transformer = diffusers.Kandinsky5Transformer3DModel(
        in_visual_dim=16,
        in_text_dim=WIDTH,
        in_text_dim2=WIDTH,
        time_dim=32,
        out_visual_dim=16,
        patch_size=(1, 2, 2),
        model_dim=model_dim,
        ff_dim=128,
        num_text_blocks=1,
        num_visual_blocks=1,
        axes_dims=(8, 12, 12),
        **options,
    )
    video = diffusers.AutoencoderKLHunyuanVideo(
        latent_channels=16,
        block_out_channels=(8, 8, 8, 8),
        layers_per_block=1,
        norm_num_groups=4,
    )
    return {
        "transformer": randomised(transformer),
        "vae": randomised(video),
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(),
    } | dict.fromkeys(("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"))


@seeded
def omnigen() -> Any:
    transformer = diffusers.OmniGenTransformer2DModel(
        hidden_size=64,
        num_attention_heads=2,
        num_key_value_heads=2,
        intermediate_size=64,
        num_layers=1,
        in_channels=4,
        time_step_dim=8,
        rope_scaling={"long_factor": [1.0] * 16, "short_factor": [1.0] * 16},
    )
    return diffusers.OmniGenPipeline(
        transformer=randomised(transformer),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(invert_sigmas=True),
        vae=deep_vae(4),
        tokenizer=clip_tokenizer(),
    )


@seeded
def flux_kontext() -> Any:
    """Edits an image."""
    return diffusers.FluxKontextPipeline(**flux().components)


@seeded
def deepfloyd() -> Any:
    """Denoises pixels."""
    nothing = dict.fromkeys(("tokenizer", "text_encoder", "safety_checker", "feature_extractor", "watermarker"))
    return diffusers.IFPipeline(
        unet=unet(in_channels=3, out_channels=6),
        scheduler=diffusers.DDPMScheduler(variance_type="learned_range"),
        requires_safety_checker=False,
        **nothing,
    )


def _guider() -> Any:
    from diffusers.guiders import ClassifierFreeGuidance

    return ClassifierFreeGuidance()


@seeded
def hunyuan_video_15() -> Any:
    transformer = diffusers.HunyuanVideo15Transformer3DModel(
        in_channels=9,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=32,
        num_layers=1,
        num_refiner_layers=1,
        text_embed_dim=WIDTH,
        text_embed_2_dim=WIDTH,
        image_embed_dim=WIDTH,
        rope_axes_dim=(8, 12, 12),
        target_size=16,
        task_type="t2v",
    )
    video = diffusers.AutoencoderKLHunyuanVideo15(
        latent_channels=4,
        block_out_channels=(16, 16),
        layers_per_block=1,
        spatial_compression_ratio=4,
        temporal_compression_ratio=2,
        downsample_match_channel=False,
        upsample_match_channel=False,
    )
    return diffusers.HunyuanVideo15Pipeline(
        text_encoder=None,
        tokenizer=None,
        transformer=randomised(transformer),
        vae=randomised(video),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        text_encoder_2=None,
        tokenizer_2=None,
        guider=_guider(),
    )


@seeded
def hunyuan_image() -> Any:
    transformer = diffusers.HunyuanImageTransformer2DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=32,
        num_layers=1,
        num_single_layers=1,
        num_refiner_layers=1,
        patch_size=(1, 1),
        text_embed_dim=WIDTH,
        text_embed_2_dim=WIDTH,
        rope_axes_dim=(16, 16),
    )
    image_vae = diffusers.AutoencoderKLHunyuanImage(
        in_channels=3,
        out_channels=3,
        latent_channels=4,
        block_out_channels=(32, 32),
        layers_per_block=1,
        spatial_compression_ratio=2,
        sample_size=32,
        scaling_factor=0.75,
        downsample_match_channel=False,
        upsample_match_channel=False,
    )
    return diffusers.HunyuanImagePipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        vae=randomised(image_vae),
        text_encoder=None,
        tokenizer=None,
        text_encoder_2=None,
        tokenizer_2=None,
        transformer=randomised(transformer),
        guider=_guider(),
        ocr_guider=_guider(),
    )


@seeded
def ltx_2() -> Any:
    """Denoises a video and its sound."""
    from diffusers.pipelines.ltx2 import LTX2TextConnectors, LTX2Vocoder

    transformer = diffusers.LTX2VideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=32,
        cross_attention_dim=64,
        audio_in_channels=4,
        audio_out_channels=4,
        audio_num_attention_heads=2,
        audio_attention_head_dim=32,
        audio_cross_attention_dim=64,
        num_layers=1,
        caption_channels=WIDTH,
        rope_double_precision=False,
    )
    connectors = LTX2TextConnectors(
        caption_channels=WIDTH,
        text_proj_in_factor=1,
        video_connector_num_attention_heads=2,
        video_connector_attention_head_dim=16,
        video_connector_num_layers=1,
        video_connector_num_learnable_registers=None,
        audio_connector_num_attention_heads=2,
        audio_connector_attention_head_dim=16,
        audio_connector_num_layers=1,
        audio_connector_num_learnable_registers=None,
        connector_rope_base_seq_len=32,
        rope_theta=10000.0,
        rope_double_precision=False,
        causal_temporal_positioning=False,
    )
    video = diffusers.AutoencoderKLLTX2Video(
        latent_channels=4,
        block_out_channels=(8,),
        decoder_block_out_channels=(8,),
        layers_per_block=(1,),
        decoder_layers_per_block=(1, 1),
        spatio_temporal_scaling=(True,),
        decoder_spatio_temporal_scaling=(True,),
        decoder_inject_noise=(False, False),
        downsample_type=("spatial",),
        upsample_residual=(False,),
        upsample_factor=(1,),
        patch_size=1,
        encoder_causal=True,
        decoder_causal=False,
    )
    sound = diffusers.AutoencoderKLLTX2Audio(
        base_channels=4,
        ch_mult=(1,),
        num_res_blocks=1,
        latent_channels=2,
        mel_bins=8,
    )
    vocoder = LTX2Vocoder(
        in_channels=16,
        hidden_channels=32,
        out_channels=2,
        upsample_kernel_sizes=[4, 4],
        upsample_factors=[2, 2],
        resnet_kernel_sizes=[3],
        resnet_dilations=[[1, 3, 5]],
        output_sampling_rate=16000,
    )
    return diffusers.LTX2Pipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        vae=randomised(video),
        audio_vae=randomised(sound),
        text_encoder=None,
        tokenizer=None,
        connectors=randomised(connectors),
        transformer=randomised(transformer),
        vocoder=randomised(vocoder),
    )


@seeded
def image_to_image() -> Any:
    return diffusers.StableDiffusionImg2ImgPipeline(**stable_diffusion().components, requires_safety_checker=False)


@seeded
def inpainting() -> Any:
    """The denoiser is given the mask and what is left of the image beside the latents."""
    parts = stable_diffusion().components | {"unet": unet(in_channels=9)}
    return diffusers.StableDiffusionInpaintPipeline(**parts, requires_safety_checker=False)


@seeded
def control_net() -> Any:
    """Follows an image through a second model."""
    parts = stable_diffusion().components
    model = diffusers.ControlNetModel.from_unet(parts["unet"], conditioning_embedding_out_channels=(8, 8, 8))
    parts["controlnet"] = randomised(model)
    return diffusers.StableDiffusionControlNetPipeline(**parts, requires_safety_checker=False)


@seeded
def image_to_video() -> Any:
    """The tokens of the first frame, which is given, have a timestep of their own."""
    return diffusers.LTXImageToVideoPipeline(**ltx().components)


@seeded
def wan_image_to_video() -> Any:
    """As Wan 2.2 of 5B: the tokens of the first frame have the timestep 0."""
    nothing = {"image_encoder": None, "image_processor": None}
    return diffusers.WanImageToVideoPipeline(**wan().components, **nothing, expand_timesteps=True)


@seeded
def sky_reels() -> Any:
    """Frames have timesteps of their own, and later ones lag behind."""
    parts = wan().components
    transformer = diffusers.SkyReelsV2Transformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=32,
        text_dim=WIDTH,
        ffn_dim=32,
        num_layers=2,
        rope_max_seq_len=32,
        inject_sample_info=True,
    )
    kept = {name: parts[name] for name in ("tokenizer", "text_encoder", "vae")}
    return diffusers.SkyReelsV2DiffusionForcingPipeline(
        transformer=randomised(transformer),
        scheduler=diffusers.UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
        ),
        **kept,
    )


@seeded
def ltx_2_image_to_video() -> Any:
    parts = ltx_2().components
    return diffusers.LTX2ImageToVideoPipeline(**{name: part for name, part in parts.items() if name != "processor"})


def sana_parts(**config: Any) -> dict[str, Any]:
    """Linear attention within images, softmax attention to the prompt, and a VAE whose blocks have names of their own."""
    blocks = ("ResBlock", "EfficientViTBlock")
    autoencoder = diffusers.AutoencoderDC(
        latent_channels=4,
        attention_head_dim=2,
        encoder_block_types=blocks,
        decoder_block_types=blocks,
        encoder_block_out_channels=(8, 8),
        decoder_block_out_channels=(8, 8),
        encoder_qkv_multiscales=((), (5,)),
        decoder_qkv_multiscales=((), (5,)),
        encoder_layers_per_block=(1, 1),
        decoder_layers_per_block=(1, 1),
        downsample_block_type="conv",
        upsample_block_type="interpolate",
        scaling_factor=0.41407,
    )
    transformer = diffusers.SanaTransformer2DModel(
        in_channels=4,
        out_channels=4,
        num_layers=1,
        num_attention_heads=2,
        attention_head_dim=32,
        num_cross_attention_heads=2,
        cross_attention_head_dim=32,
        cross_attention_dim=64,
        caption_channels=WIDTH,
        sample_size=16,
        **config,
    )
    return {
        "tokenizer": None,
        "text_encoder": None,
        "vae": randomised(autoencoder),
        "transformer": randomised(transformer),
    }


@seeded
def sana() -> Any:
    return diffusers.SanaPipeline(scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0), **sana_parts())


@seeded
def sana_sprint() -> Any:
    parts = sana_parts(guidance_embeds=True, qk_norm="rms_norm_across_heads")
    return diffusers.SanaSprintPipeline(scheduler=diffusers.SCMScheduler(), **parts)


def llama(kind: str = "LlamaForCausalLM", vocabulary: int = 64) -> Any:
    """In the place of language models that read prompts."""
    config = transformers.LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=WIDTH,
        intermediate_size=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    return randomised(getattr(transformers, kind)(config))


@seeded
def ernie_image() -> Any:
    """Pads prompts to the longest of a call, and takes them as embeddings."""
    transformer = diffusers.ErnieImageTransformer2DModel(
        hidden_size=64,
        num_attention_heads=2,
        num_layers=1,
        ffn_hidden_size=64,
        in_channels=16,
        out_channels=16,
        text_in_dim=WIDTH,
        rope_axes_dim=(8, 12, 12),
    )
    autoencoder = diffusers.AutoencoderKLFlux2(
        block_out_channels=(8, 8),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=4,
    )
    return diffusers.ErnieImagePipeline(
        transformer=randomised(transformer),
        vae=randomised(autoencoder),
        text_encoder=llama("LlamaModel"),
        tokenizer=clip_tokenizer(),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
    )


@seeded
def bria_fibo() -> Any:
    """Takes what every layer of its text encoder makes of a prompt, and pads prompts to the longest of a call."""
    transformer = diffusers.BriaFiboTransformer2DModel(
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=32,
        num_attention_heads=2,
        joint_attention_dim=2 * WIDTH,
        text_encoder_dim=WIDTH,
        axes_dims_rope=[8, 12, 12],
    )
    video_vae = diffusers.AutoencoderKLWan(
        base_dim=4, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True, True]
    )
    return diffusers.BriaFiboPipeline(
        transformer=randomised(transformer),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        vae=randomised(video_vae),
        text_encoder=llama(vocabulary=128001),  # its token for an empty prompt is written into the pipeline
        tokenizer=clip_tokenizer(),
    )


@seeded
def prx() -> Any:
    transformer = diffusers.PRXTransformer2DModel(
        patch_size=1,
        in_channels=4,
        context_in_dim=WIDTH,
        hidden_size=64,
        mlp_ratio=2.0,
        num_heads=2,
        depth=1,
        axes_dim=[16, 16],
    )
    autoencoder = vae(4)
    autoencoder.register_to_config(shift_factor=0.0)
    return diffusers.PRXPipeline(
        transformer=randomised(transformer),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        text_encoder=None,  # type: ignore[arg-type]
        tokenizer=None,  # type: ignore[arg-type]
        vae=autoencoder,
    )


@seeded
def hidream() -> Any:
    """Calls its timestep `timesteps`, and sends each token to some of its experts."""
    transformer = diffusers.HiDreamImageTransformer2DModel(
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=32,
        num_attention_heads=2,
        caption_channels=[WIDTH, WIDTH],
        text_emb_dim=2 * WIDTH,
        axes_dims_rope=(8, 12, 12),
        max_resolution=(32, 32),
        llama_layers=(0, 1),
    )
    autoencoder = vae(4)
    autoencoder.register_to_config(shift_factor=0.0)
    return diffusers.HiDreamImagePipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        vae=autoencoder,
        text_encoder=clip(projection=WIDTH),
        tokenizer=clip_tokenizer(),
        text_encoder_2=clip(projection=WIDTH),
        tokenizer_2=clip_tokenizer(),
        text_encoder_3=t5(),
        tokenizer_3=t5_tokenizer(),
        text_encoder_4=llama(),
        tokenizer_4=clip_tokenizer(),
        transformer=randomised(transformer),
    )


@seeded
def cosmos2(safety_checker: Any) -> Any:
    """Does not draw without its safety checker."""
    transformer = diffusers.CosmosTransformer3DModel(
        in_channels=16,
        out_channels=16,
        num_attention_heads=2,
        attention_head_dim=32,
        num_layers=1,
        mlp_ratio=2,
        text_embed_dim=WIDTH,
        adaln_lora_dim=4,
        max_size=(4, 32, 32),
        patch_size=(1, 2, 2),
        rope_scale=(2.0, 1.0, 1.0),
        concat_padding_mask=True,
        extra_pos_embed_type=None,
    )
    video_vae = diffusers.AutoencoderKLWan(
        base_dim=3, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True, True]
    )
    return diffusers.Cosmos2TextToImagePipeline(
        text_encoder=t5(),
        tokenizer=t5_tokenizer(),
        transformer=randomised(transformer),
        vae=randomised(video_vae),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(use_karras_sigmas=True),
        safety_checker=safety_checker,
    )


@dataclass(frozen=True)
class Convertible:
    """A pipeline that converts.

    Attributes:
        make: it; options: of `diffusers_model`.
        images: arguments of the pipeline's call that are images.
        of: what a sample is of, for people.
        exclude: patterns of attention whose results the pipeline's calls do not use.
    """

    make: Callable[[], Any]
    of: str
    options: Mapping[str, Any] = field(default_factory=dict)
    images: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()


SIZE = {"height": 32, "width": 32}

LTX_2_CALL = {"stg_scale": 0, "audio_stg_scale": 0, "modality_scale": 1, "audio_modality_scale": 1}
"""Without guidance by calls that skip attention or keep video and sound apart: those are other functions."""

CONVERTIBLE = {
    "dit": Convertible(dit, "a class"),
    "ddpm": Convertible(ddpm, "what it was trained on, in pixels"),
    "ddim": Convertible(ddim, "what it was trained on, in pixels"),
    "consistency": Convertible(consistency, "a class, in pixels"),
    "ldm": Convertible(ldm, "what it was trained on"),
    "deepfloyd": Convertible(deepfloyd, "a prompt, in pixels", {"height": 16, "width": 24}),
    "hunyuan_dit": Convertible(
        hunyuan_dit, "a prompt", {"height": 64, "width": 64, "call": {"use_resolution_binning": False}}
    ),
    "chroma": Convertible(chroma, "a prompt", SIZE),
    "sdxl_refiner": Convertible(sdxl_refiner, "a prompt and an image", images=("image",)),
    "marigold": Convertible(marigold, "an image", images=("image",)),
    "flux_kontext": Convertible(
        flux_kontext,
        "a prompt and an image",
        SIZE | {"call": {"_auto_resize": False, "max_area": 32 * 32}},
        images=("image",),
    ),
    "image_to_image": Convertible(image_to_image, "a prompt and an image", images=("image",)),
    "inpainting": Convertible(inpainting, "a prompt, an image and a mask", SIZE, images=("image", "mask_image")),
    "control_net": Convertible(control_net, "a prompt and an image, through a ControlNet", SIZE, images=("image",)),
    "qwen_image": Convertible(qwen_image, "a prompt", SIZE | {"batch": 1}),
    "sana": Convertible(sana, "a prompt", SIZE | {"call": {"use_resolution_binning": False}}),
    "sana_sprint": Convertible(
        sana_sprint,
        "a prompt",
        SIZE | {"call": {"use_resolution_binning": False, "intermediate_timesteps": None}},  # null: any number of steps
    ),
    "ernie_image": Convertible(ernie_image, "a prompt", SIZE | {"tokens": [1, 6, 8]}),
    "bria_fibo": Convertible(
        bria_fibo,
        "prompts of one length, with embeddings for each block",
        SIZE | {"tokens": None, "prompts": ["a cat", "a dog"]},
    ),
    "prx": Convertible(prx, "a prompt", SIZE | {"batch": 1, "call": {"use_resolution_binning": False}}),
    "mochi": Convertible(mochi, "a prompt, a video", SIZE | {"frames": 7}),
    "kandinsky22": Convertible(kandinsky22, "an embedding of an image, from the prior", SIZE),
    "kandinsky5": Convertible(kandinsky5, "a prompt, a video", SIZE | {"frames": 5}),
    "kandinsky5_i2v": Convertible(
        kandinsky5_i2v,
        "a prompt and an image, a video",
        SIZE
        | {"frames": 17},  # of fewer the pipeline makes NaN: it takes the deviation of latent frames from the fifth on
        images=("image",),
    ),
    "image_to_video": Convertible(
        image_to_video,
        "a prompt and an image, a video, with timesteps of tokens",
        PIPELINES["ltx"][1],
        images=("image",),
    ),
    "wan_image_to_video": Convertible(
        wan_image_to_video,
        "a prompt and an image, a video, with timesteps of tokens",
        PIPELINES["wan"][1],
        images=("image",),
    ),
    "sky_reels": Convertible(
        sky_reels,
        "a prompt, a video, with timesteps of frames",
        PIPELINES["wan"][1] | {"batch": 1, "call": {"ar_step": 1, "base_num_frames": 9}},
    ),
    "ltx_2": Convertible(ltx_2, "a prompt, a video and its sound", SIZE | {"frames": 5, "call": LTX_2_CALL}),
    "ltx_2_image_to_video": Convertible(
        ltx_2_image_to_video,
        "a prompt and an image, a video and its sound, with timesteps of tokens",
        SIZE | {"frames": 5, "call": LTX_2_CALL | {"image_crf": 0}},
        images=("image",),
    ),
    "stable_audio": Convertible(stable_audio, "a prompt, a sound", {"tokens": None, "prompts": ["a cat", "a dog"]}),
    "hunyuan_video_15": Convertible(hunyuan_video_15, "a prompt, a video", SIZE | {"frames": 5, "batch": 1}),
    "omnigen": Convertible(omnigen, "a prompt", SIZE | {"tokens": None, "prompts": ["a cat", "a dog"]}),
    "z_image": Convertible(z_image, "a prompt", SIZE),
    "hidream": Convertible(hidream, "a prompt", SIZE | {"tokens": None, "call": {"max_sequence_length": 8}}),
    "flux2_klein": Convertible(flux2_klein, "a prompt", SIZE),
    "flux2_klein_kv": Convertible(flux2_klein_kv, "a prompt, without an image", SIZE),
    "anyflow": Convertible(anyflow, "a prompt, a video, with timesteps of frames", PIPELINES["wan"][1]),
    "motif_video": Convertible(motif_video, "a prompt, a video", PIPELINES["wan"][1]),
    "nucleus_moe": Convertible(nucleus_moe, "a prompt", SIZE | {"batch": 1}),
    "kandinsky6": Convertible(
        kandinsky6,
        "a prompt, a video without sound",
        SIZE | {"frames": 5, "call": {"sample_audio": False}},
        exclude=("*audio*",),
    ),
    "z_image_control_net": Convertible(
        z_image_control_net, "a prompt and an image, through a ControlNet", SIZE, images=("control_image",)
    ),
    "lumina2": Convertible(lumina2, "a prompt", SIZE),
    "hunyuan_image": Convertible(hunyuan_image, "a prompt", SIZE),
}
"""Pipelines that tests convert, beside those of `tiny_pipelines.PIPELINES`."""


@dataclass(frozen=True)
class Refused:
    """A pipeline that is refused before anything is calibrated.

    Attributes:
        make: it; options: of `diffusers_model`.
        told: parts of the message.
        why: for people.
    """

    make: Callable[[], Any]
    why: str
    told: tuple[str, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    images: tuple[str, ...] = ()


REFUSED = {
    "flux2_klein_kv": Refused(
        flux2_klein_kv,
        "with an image, its first step gives keys and values that the others take; without one it converts",
        (
            "returns 'kv_cache' beside its prediction",
            "got: Flux2KVCache",
            "call the pipeline without what asks for kv_cache",
        ),
        SIZE,
        images=("image",),
    ),
}
"""Pipelines that are refused."""
