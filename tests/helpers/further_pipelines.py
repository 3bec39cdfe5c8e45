"""Further pipelines of diffusers with random weights, beside those of `tiny_pipelines`, in one table with their options."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
from tiny_pipelines import (
    HEADS,
    PIPELINES,
    SIZE,
    WIDTH,
    clip,
    clip_tokenizer,
    flux,
    ltx,
    model,
    pipeline,
    qwen_image,
    qwen_vae,
    randomised,
    sdxl_unet,
    seeded,
    stable_diffusion,
    t5,
    t5_tokenizer,
    unet,
    vae,
    wan,
    wan_scheduler,
    wan_vae,
)

diffusers = pytest.importorskip("diffusers", reason="needs diffusers")
transformers = pytest.importorskip("transformers", reason="needs transformers")


@dataclass(frozen=True)
class Convertible:
    """A pipeline that converts.

    Attributes:
        make: makes the pipeline.
        of: subject of a sample, for people.
        options: of `diffusers_model`.
        images: arguments of the pipeline's call that are images.
        side: of the images, in pixels.
    """

    make: Callable[[], Any]
    of: str
    options: Mapping[str, Any] = field(default_factory=dict)
    images: tuple[str, ...] = ()
    side: int = 32


CONVERTIBLE: dict[str, Convertible] = {}
"""The pipelines by name."""

Make = Callable[[], Any]


def convertible(
    of: str, options: Mapping[str, Any] | None = None, images: tuple[str, ...] = (), side: int = 32
) -> Callable[[Make], Make]:
    """Adds a function that makes a pipeline to the table, see `Convertible`."""

    def added(make: Make) -> Make:
        CONVERTIBLE[make.__name__] = Convertible(seeded(make), of, options or {}, images, side)
        return CONVERTIBLE[make.__name__].make

    return added


# Configurations are written with many entries in a line.
# fmt: off

UNBINNED = {"call": {"use_resolution_binning": False}}
TWO_PROMPTS = {"tokens": None, "prompts": ["a cat", "a dog"]}
WAN, LTX = PIPELINES["wan"][1], PIPELINES["ltx"][1]


@convertible("a class")
def dit() -> Any:
    """Draws classes, with one more label for no class."""
    transformer = model(
        diffusers.DiTTransformer2DModel, **HEADS, sample_size=8, num_layers=2, patch_size=2, in_channels=4,
        out_channels=8, num_embeds_ada_norm=1000,
    )
    scheduler = diffusers.DDIMScheduler(clip_sample=False)
    return pipeline(diffusers.DiTPipeline, transformer=transformer, vae=vae(4), scheduler=scheduler)


def image_unet(**config: Any) -> Any:
    return model(
        diffusers.UNet2DModel, sample_size=16, block_out_channels=(32, 64), layers_per_block=1,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=32, norm_num_groups=8, **config,
    )


@convertible("images like its training data, in pixels")
def ddpm() -> Any:
    return pipeline(diffusers.DDPMPipeline, unet=image_unet(), scheduler=diffusers.DDPMScheduler())


@convertible("images like its training data, in pixels")
def ddim() -> Any:
    return pipeline(diffusers.DDIMPipeline, unet=image_unet(), scheduler=diffusers.DDIMScheduler())


@convertible("a class, in pixels")
def consistency() -> Any:
    scheduler = diffusers.CMStochasticIterativeScheduler()
    return pipeline(diffusers.ConsistencyModelPipeline, unet=image_unet(num_class_embeds=10), scheduler=scheduler)


@convertible("images like its training data")
def ldm() -> Any:
    vqvae = model(
        diffusers.VQModel, block_out_channels=(8, 8), down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2, latent_channels=3, norm_num_groups=4, num_vq_embeddings=16,
    )
    return pipeline(diffusers.LDMPipeline, vqvae=vqvae, unet=image_unet(), scheduler=diffusers.DDIMScheduler())


@convertible("a prompt, in pixels", {"height": 16, "width": 24})
def deepfloyd() -> Any:
    return pipeline(
        diffusers.IFPipeline, unet=unet(in_channels=3, out_channels=6),
        scheduler=diffusers.DDPMScheduler(variance_type="learned_range"), requires_safety_checker=False,
    )


@convertible("a prompt", {"height": 64, "width": 64} | UNBINNED)
def hunyuan_dit() -> Any:
    transformer = model(
        diffusers.HunyuanDiT2DModel, **HEADS, sample_size=16, num_layers=2, patch_size=2, in_channels=4,
        cross_attention_dim=WIDTH, cross_attention_dim_t5=WIDTH, pooled_projection_dim=16, hidden_size=64,
        activation_fn="gelu-approximate", text_len=8, text_len_t5=8,
    )
    return pipeline(
        diffusers.HunyuanDiTPipeline, transformer=transformer, vae=vae(4, blocks=4),
        scheduler=diffusers.DDPMScheduler(), requires_safety_checker=False,
    )


@convertible("a prompt", SIZE)
def chroma() -> Any:
    transformer = model(
        diffusers.ChromaTransformer2DModel, **HEADS, in_channels=64, num_layers=1, num_single_layers=1,
        joint_attention_dim=WIDTH, axes_dims_rope=(8, 12, 12), approximator_hidden_dim=32, approximator_layers=1,
        approximator_num_channels=16,
    )
    return pipeline(diffusers.ChromaPipeline, transformer=transformer, vae=vae(16))


@convertible("a prompt and an image", images=("image",))
def sdxl_refiner() -> Any:
    return pipeline(
        diffusers.StableDiffusionXLImg2ImgPipeline, unet=sdxl_unet(5), vae=vae(4),
        text_encoder_2=clip(projection=WIDTH), tokenizer_2=clip_tokenizer(),
        scheduler=diffusers.EulerDiscreteScheduler(beta_schedule="scaled_linear"), requires_aesthetics_score=True,
        add_watermarker=False,
    )


@convertible("an image", images=("image",))
def marigold() -> Any:
    return pipeline(
        diffusers.MarigoldDepthPipeline, unet=unet(in_channels=8, out_channels=4), vae=vae(4),
        scheduler=diffusers.DDIMScheduler(clip_sample=False), text_encoder=clip(), tokenizer=clip_tokenizer(),
        prediction_type="depth", scale_invariant=True, shift_invariant=True, default_denoising_steps=2,
        default_processing_resolution=32,
    )


@convertible("a prompt and an image", SIZE | {"call": {"_auto_resize": False, "max_area": 32 * 32}}, images=("image",))
def flux_kontext() -> Any:
    return pipeline(diffusers.FluxKontextPipeline, **flux().components)


@convertible("a prompt and an image", images=("image",))
def image_to_image() -> Any:
    parts = stable_diffusion().components
    return pipeline(diffusers.StableDiffusionImg2ImgPipeline, **parts, requires_safety_checker=False)


@convertible("a prompt, an image and a mask", SIZE, images=("image", "mask_image"))
def inpainting() -> Any:
    """The denoiser takes the mask and the rest of the image beside the latents."""
    parts = stable_diffusion().components | {"unet": unet(in_channels=9)}
    return pipeline(diffusers.StableDiffusionInpaintPipeline, **parts, requires_safety_checker=False)


@convertible("a prompt and an image, through a ControlNet", SIZE, images=("image",))
def control_net() -> Any:
    parts = stable_diffusion().components
    added = diffusers.ControlNetModel.from_unet(parts["unet"], conditioning_embedding_out_channels=(8, 8, 8))
    parts["controlnet"] = randomised(added)
    return pipeline(diffusers.StableDiffusionControlNetPipeline, **parts, requires_safety_checker=False)


def with_sd_text(kind: Any, parts: dict[str, Any], **more: Any) -> Any:
    return pipeline(kind, **parts | {"text_encoder": clip(), "tokenizer": clip_tokenizer()} | more)


@convertible("a prompt, a panorama of views", SIZE | {"batch": 1})
def panorama() -> Any:
    parts = stable_diffusion().components
    return with_sd_text(diffusers.StableDiffusionPanoramaPipeline, parts, requires_safety_checker=False)


@convertible("a prompt, an image and its depth", SIZE)
def ldm3d() -> Any:
    """Returns arrays alone, of images and of depths."""
    blocks = {"down_block_types": ("DownEncoderBlock2D",) * 3, "up_block_types": ("UpDecoderBlock2D",) * 3}
    both = model(
        diffusers.AutoencoderKL, in_channels=6, out_channels=6, block_out_channels=(8,) * 3, layers_per_block=1,
        latent_channels=4, norm_num_groups=4, **blocks,
    )
    parts = stable_diffusion().components
    return with_sd_text(diffusers.StableDiffusionLDM3DPipeline, parts, vae=both, requires_safety_checker=False)


@convertible("a prompt and an image of half the size", {"tokens": None}, images=("image",))
def latent_upscale() -> Any:
    """The scheduler has a table of timesteps, and the denoiser gets ln σ / 4. The denoiser predicts one more channel."""
    cross = ("KCrossAttnDownBlock2D",) * 3, ("KCrossAttnUpBlock2D",) * 3
    denoiser = model(
        diffusers.UNet2DConditionModel, act_fn="gelu", attention_head_dim=8, norm_num_groups=None,
        block_out_channels=[32, 32, 64, 64], time_cond_proj_dim=128 + WIDTH, conv_in_kernel=1, conv_out_kernel=1,
        cross_attention_dim=WIDTH, down_block_types=("KDownBlock2D", *cross[0]), in_channels=8, mid_block_type=None,
        out_channels=5, resnet_time_scale_shift="scale_shift", time_embedding_type="fourier",
        timestep_post_act="gelu", up_block_types=(*cross[1], "KUpBlock2D"),
    )
    scheduler = diffusers.EulerDiscreteScheduler(beta_schedule="scaled_linear", prediction_type="sample")
    return with_sd_text(
        diffusers.StableDiffusionLatentUpscalePipeline, {"unet": denoiser, "vae": vae(4), "scheduler": scheduler},
    )


@convertible("an image, several images of a sample", images=("image",))
def marigold_intrinsics() -> Any:
    targets = {"target_names": ["albedo", "roughness"], "albedo": {"prediction_space": "srgb"}}
    return with_sd_text(
        diffusers.MarigoldIntrinsicsPipeline, {"unet": unet(in_channels=12, out_channels=8), "vae": vae(4)},
        scheduler=diffusers.DDIMScheduler(clip_sample=False), prediction_type="intrinsics",
        target_properties=targets | {"roughness": {"prediction_space": "linear"}}, default_denoising_steps=2,
        default_processing_resolution=32,
    )


@convertible(
    "a prompt and an image, through a ControlNet of several modes", SIZE | {"call": {"control_mode": [0]}},
    images=("control_image",),
)
def control_net_union() -> Any:
    denoiser = sdxl_unet(6)
    added = model(
        diffusers.ControlNetUnionModel, down_block_types=denoiser.config.down_block_types, block_out_channels=(32, 64),
        layers_per_block=1, norm_num_groups=8, cross_attention_dim=WIDTH, attention_head_dim=1, num_trans_head=4,
        use_linear_projection=True, addition_embed_type="text_time", addition_time_embed_dim=8, num_trans_channel=32,
        projection_class_embeddings_input_dim=WIDTH + 48, conditioning_embedding_out_channels=(8, 8, 8),
        num_proj_channel=32,
    )
    return pipeline(
        diffusers.StableDiffusionXLControlNetUnionPipeline, unet=denoiser, vae=vae(4), controlnet=added,
        scheduler=diffusers.EulerDiscreteScheduler(beta_schedule="scaled_linear"), add_watermarker=False,
    )


convertible("a prompt", SIZE | {"batch": 1})(qwen_image)


def sana_parts(**config: Any) -> dict[str, Any]:
    """Linear attention within images, softmax attention to the prompt, and a VAE with other names of its blocks."""
    blocks = ("ResBlock", "EfficientViTBlock")
    autoencoder = model(
        diffusers.AutoencoderDC, latent_channels=4, attention_head_dim=2, encoder_block_types=blocks,
        decoder_block_types=blocks, encoder_block_out_channels=(8, 8), decoder_block_out_channels=(8, 8),
        encoder_qkv_multiscales=((), (5,)), decoder_qkv_multiscales=((), (5,)), encoder_layers_per_block=(1, 1),
        decoder_layers_per_block=(1, 1), downsample_block_type="conv", upsample_block_type="interpolate",
        scaling_factor=0.41407,
    )
    transformer = model(
        diffusers.SanaTransformer2DModel, **HEADS, in_channels=4, out_channels=4, num_layers=1,
        num_cross_attention_heads=2, cross_attention_head_dim=32, cross_attention_dim=64, caption_channels=WIDTH,
        sample_size=16, **config,
    )
    return {"vae": autoencoder, "transformer": transformer}


@convertible("a prompt", SIZE | UNBINNED)
def sana() -> Any:
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
    return pipeline(diffusers.SanaPipeline, **sana_parts(), scheduler=scheduler)


@convertible(
    "a prompt",
    SIZE | {"call": {"use_resolution_binning": False, "intermediate_timesteps": None}},  # null: any number of steps
)
def sana_sprint() -> Any:
    parts = sana_parts(guidance_embeds=True, qk_norm="rms_norm_across_heads")
    return pipeline(diffusers.SanaSprintPipeline, **parts, scheduler=diffusers.SCMScheduler())


@convertible("a prompt, a video", SIZE | {"frames": 5} | UNBINNED)
def sana_video() -> Any:
    """Calls the number of frames `frames`."""
    transformer = model(
        diffusers.SanaVideoTransformer3DModel, **HEADS, in_channels=16, out_channels=16, num_layers=2,
        num_cross_attention_heads=2, cross_attention_head_dim=32, cross_attention_dim=64, caption_channels=WIDTH,
        rope_max_seq_len=32, sample_size=8,
    )
    return pipeline(diffusers.SanaVideoPipeline, transformer=transformer, vae=wan_vae())


@convertible("a prompt", SIZE)
def cogview3_plus() -> Any:
    transformer = model(
        diffusers.CogView3PlusTransformer2DModel, **HEADS, patch_size=2, in_channels=4, out_channels=4, num_layers=1,
        text_embed_dim=WIDTH, time_embed_dim=8, condition_dim=2, pos_embed_max_size=8, sample_size=8,
    )
    scheduler = diffusers.CogVideoXDDIMScheduler(beta_schedule="scaled_linear")
    return pipeline(diffusers.CogView3PlusPipeline, transformer=transformer, vae=vae(4), scheduler=scheduler)


@convertible("an image, a video", SIZE | {"frames": 3}, images=("image",))
def stable_video() -> Any:
    """Takes ln σ / 4 as its timestep, and the guidance of each frame."""
    denoiser = model(
        diffusers.UNetSpatioTemporalConditionModel, block_out_channels=(32, 64), layers_per_block=1, sample_size=8,
        down_block_types=("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"), num_attention_heads=2,
        up_block_types=("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"), cross_attention_dim=WIDTH,
        projection_class_embeddings_input_dim=96, addition_time_embed_dim=32,
    )
    frames = model(
        diffusers.AutoencoderKLTemporalDecoder, block_out_channels=(32, 64), latent_channels=4, layers_per_block=1,
        down_block_types=("DownEncoderBlock2D",) * 2,
    )
    reader = transformers.CLIPVisionConfig(
        hidden_size=WIDTH, projection_dim=WIDTH, num_hidden_layers=2, num_attention_heads=2, image_size=224,
        intermediate_size=32, patch_size=56,
    )
    scheduler = diffusers.EulerDiscreteScheduler(
        beta_schedule="scaled_linear", prediction_type="v_prediction", sigma_min=0.002, sigma_max=700.0,
        timestep_spacing="leading", timestep_type="continuous", use_karras_sigmas=True,
    )
    return pipeline(
        diffusers.StableVideoDiffusionPipeline, vae=frames, unet=denoiser, scheduler=scheduler,
        image_encoder=randomised(transformers.CLIPVisionModelWithProjection(reader)),
        feature_extractor=transformers.CLIPImageProcessor(),
    )


def llama(kind: str = "LlamaForCausalLM", vocabulary: int = 64) -> Any:
    """Makes a stand-in for language models that read prompts."""
    config = transformers.LlamaConfig(
        vocab_size=vocabulary, hidden_size=WIDTH, intermediate_size=WIDTH, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64, tie_word_embeddings=True, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )
    return randomised(getattr(transformers, kind)(config))


def flux2_vae() -> Any:
    return model(
        diffusers.AutoencoderKLFlux2, block_out_channels=(8, 8), down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2, layers_per_block=1, latent_channels=4, norm_num_groups=4,
    )


@convertible("a prompt", SIZE | {"tokens": [1, 6, 8]})
def ernie_image() -> Any:
    """Pads prompts to the longest one of a call, and takes embeddings."""
    transformer = model(
        diffusers.ErnieImageTransformer2DModel, hidden_size=64, num_attention_heads=2, num_layers=1, ffn_hidden_size=64,
        in_channels=16, out_channels=16, text_in_dim=WIDTH, rope_axes_dim=(8, 12, 12),
    )
    return pipeline(
        diffusers.ErnieImagePipeline, transformer=transformer, vae=flux2_vae(), text_encoder=llama("LlamaModel"),
        tokenizer=clip_tokenizer(),
    )


@convertible("prompts of one length, with embeddings for each block", SIZE | TWO_PROMPTS)
def bria_fibo() -> Any:
    """Takes the output of every layer of its text encoder, and pads prompts to the longest one of a call."""
    transformer = model(
        diffusers.BriaFiboTransformer2DModel, **HEADS, in_channels=16, num_layers=1, num_single_layers=1,
        joint_attention_dim=2 * WIDTH, text_encoder_dim=WIDTH, axes_dims_rope=[8, 12, 12],
    )
    return pipeline(
        diffusers.BriaFiboPipeline,
        transformer=transformer,
        vae=wan_vae(4),
        text_encoder=llama(vocabulary=128001),  # the pipeline has the token of an empty prompt as a constant
        tokenizer=clip_tokenizer(),
    )


def shifted_vae() -> Any:
    made = vae(4)
    made.register_to_config(shift_factor=0.0)
    return made


@convertible("a prompt", SIZE | {"batch": 1} | UNBINNED)
def prx() -> Any:
    transformer = model(
        diffusers.PRXTransformer2DModel, patch_size=1, in_channels=4, context_in_dim=WIDTH, hidden_size=64,
        mlp_ratio=2.0, num_heads=2, depth=1, axes_dim=[16, 16],
    )
    return pipeline(diffusers.PRXPipeline, transformer=transformer, vae=shifted_vae())


@convertible("a prompt, a video", SIZE | {"frames": 7})
def mochi() -> Any:
    transformer = model(
        diffusers.MochiTransformer3DModel, **HEADS, patch_size=2, num_layers=2, pooled_projection_dim=16,
        in_channels=12, qk_norm="rms_norm", text_embed_dim=WIDTH, time_embed_dim=4, max_sequence_length=16,
    )
    video = model(
        diffusers.AutoencoderKLMochi, latent_channels=12, out_channels=3, encoder_block_out_channels=(32, 32, 32, 32),
        decoder_block_out_channels=(32, 32, 32, 32), layers_per_block=(1, 1, 1, 1, 1),
    )
    return pipeline(diffusers.MochiPipeline, transformer=transformer, vae=video)


@convertible("an embedding of an image, from the prior", SIZE)
def kandinsky22() -> Any:
    denoiser = model(
        diffusers.UNet2DConditionModel, in_channels=4, out_channels=8, addition_embed_type="image",
        down_block_types=("ResnetDownsampleBlock2D", "SimpleCrossAttnDownBlock2D"),
        up_block_types=("SimpleCrossAttnUpBlock2D", "ResnetUpsampleBlock2D"),
        mid_block_type="UNetMidBlock2DSimpleCrossAttn", block_out_channels=(32, 64), layers_per_block=1,
        encoder_hid_dim=WIDTH, encoder_hid_dim_type="image_proj", cross_attention_dim=WIDTH, attention_head_dim=32,
        resnet_time_scale_shift="scale_shift", class_embed_type=None, norm_num_groups=8,
    )
    movq = model(
        diffusers.VQModel, block_out_channels=(32, 32), down_block_types=("DownEncoderBlock2D",) * 2,
        layers_per_block=1, latent_channels=4, norm_num_groups=32, norm_type="spatial", num_vq_embeddings=12,
        up_block_types=("UpDecoderBlock2D",) * 2, vq_embed_dim=4,
    )
    scheduler = diffusers.DDIMScheduler(
        beta_schedule="linear", beta_start=0.00085, beta_end=0.012, clip_sample=False, steps_offset=1
    )
    return pipeline(diffusers.KandinskyV22Pipeline, unet=denoiser, scheduler=scheduler, movq=movq)


@convertible("a prompt", SIZE)
def kandinsky3() -> Any:
    """The scheduler draws noise at each step."""
    denoiser = model(
        diffusers.Kandinsky3UNet, in_channels=4, time_embedding_dim=32, groups=8, attention_head_dim=32,
        layers_per_block=3, block_out_channels=(64, 128), cross_attention_dim=32, encoder_hid_dim=WIDTH,
    )
    movq = model(
        diffusers.VQModel, block_out_channels=(32, 64), down_block_types=("DownEncoderBlock2D", "AttnDownEncoderBlock2D"),
        layers_per_block=1, latent_channels=4, norm_num_groups=8, norm_type="spatial", num_vq_embeddings=12,
        up_block_types=("AttnUpDecoderBlock2D", "UpDecoderBlock2D"), vq_embed_dim=4,
    )
    scheduler = diffusers.DDPMScheduler(beta_schedule="squaredcos_cap_v2", steps_offset=1)
    return pipeline(diffusers.Kandinsky3Pipeline, unet=denoiser, scheduler=scheduler, movq=movq)


def kandinsky_parts(kind: Any, model_dim: int = 64, **options: Any) -> dict[str, Any]:
    transformer = model(
        kind, in_text_dim=WIDTH, in_text_dim2=WIDTH, time_dim=32, model_dim=model_dim, ff_dim=128, num_text_blocks=1,
        num_visual_blocks=1, axes_dims=(8, 12, 12), **options,
    )
    video = model(
        diffusers.AutoencoderKLHunyuanVideo, latent_channels=16, block_out_channels=(8, 8, 8, 8), layers_per_block=1,
        norm_num_groups=4,
    )
    return {"transformer": transformer, "vae": video}


def kandinsky5_parts(**options: Any) -> dict[str, Any]:
    sizes = {"in_visual_dim": 16, "out_visual_dim": 16, "patch_size": (1, 2, 2)}
    return kandinsky_parts(diffusers.Kandinsky5Transformer3DModel, **sizes, **options)


@convertible("a prompt, a video", SIZE | {"frames": 5})
def kandinsky5() -> Any:
    return pipeline(diffusers.Kandinsky5T2VPipeline, **kandinsky5_parts())


@convertible(
    "a prompt and an image, a video",
    SIZE
    | {"frames": 17},  # with fewer the pipeline makes NaN: it takes the deviation of latent frames from the fifth on
    images=("image",),
)
def kandinsky5_i2v() -> Any:
    """The denoiser takes the latents of an image, and a mask, beside those of the video. It is wider than its output, as the
    published ones are."""
    return pipeline(diffusers.Kandinsky5I2VPipeline, **kandinsky5_parts(visual_cond=True, model_dim=96))


@convertible("a prompt and an image, a video, with timesteps of tokens", LTX, images=("image",))
def image_to_video() -> Any:
    """The tokens of the given first frame have a timestep of their own."""
    return pipeline(diffusers.LTXImageToVideoPipeline, **ltx().components)


@convertible("a prompt and an image, a video, with timesteps of tokens", WAN, images=("image",))
def wan_image_to_video() -> Any:
    """The tokens of the first frame have the timestep 0, as in Wan 2.2 of 5B."""
    return pipeline(diffusers.WanImageToVideoPipeline, **wan().components, expand_timesteps=True)


def with_parts_of_wan(kind: Any, transformer: Any, scheduler: Any) -> Any:
    parts = wan().components | {"transformer": transformer, "scheduler": scheduler}
    return pipeline(
        kind, **{name: parts[name] for name in ("tokenizer", "text_encoder", "vae", "transformer", "scheduler")}
    )


@convertible(
    "a prompt, a video, with timesteps of frames", WAN | {"batch": 1, "call": {"ar_step": 1, "base_num_frames": 9}},
)
def sky_reels() -> Any:
    """Frames have timesteps of their own, and later frames lag behind."""
    transformer = model(
        diffusers.SkyReelsV2Transformer3DModel, **HEADS, patch_size=(1, 2, 2), text_dim=WIDTH, ffn_dim=32, num_layers=2,
        rope_max_seq_len=32, inject_sample_info=True,
    )
    return with_parts_of_wan(diffusers.SkyReelsV2DiffusionForcingPipeline, transformer, wan_scheduler())


LTX_2_CALL = {"stg_scale": 0, "audio_stg_scale": 0, "modality_scale": 1, "audio_modality_scale": 1}
"""Turns off guidance by calls that skip attention or keep video and sound apart, which compute other functions."""


@convertible("a prompt, a video and its sound", SIZE | {"frames": 5, "call": LTX_2_CALL})
def ltx_2() -> Any:
    from diffusers.pipelines.ltx2 import LTX2TextConnectors, LTX2Vocoder

    transformer = model(
        diffusers.LTX2VideoTransformer3DModel, **HEADS, in_channels=4, out_channels=4, cross_attention_dim=64,
        audio_in_channels=4, audio_out_channels=4, audio_num_attention_heads=2, audio_attention_head_dim=32,
        audio_cross_attention_dim=64, num_layers=1, caption_channels=WIDTH, rope_double_precision=False,
    )
    connectors = model(
        LTX2TextConnectors, caption_channels=WIDTH, text_proj_in_factor=1, video_connector_num_attention_heads=2,
        video_connector_attention_head_dim=16, video_connector_num_layers=1,
        video_connector_num_learnable_registers=None, audio_connector_num_attention_heads=2,
        audio_connector_attention_head_dim=16, audio_connector_num_layers=1,
        audio_connector_num_learnable_registers=None, connector_rope_base_seq_len=32, rope_theta=10000.0,
        rope_double_precision=False, causal_temporal_positioning=False,
    )
    video = model(
        diffusers.AutoencoderKLLTX2Video, latent_channels=4, block_out_channels=(8,), decoder_block_out_channels=(8,),
        layers_per_block=(1,), decoder_layers_per_block=(1, 1), spatio_temporal_scaling=(True,),
        decoder_spatio_temporal_scaling=(True,), decoder_inject_noise=(False, False), downsample_type=("spatial",),
        upsample_residual=(False,), upsample_factor=(1,), patch_size=1, encoder_causal=True, decoder_causal=False,
    )
    sound = model(
        diffusers.AutoencoderKLLTX2Audio, base_channels=4, ch_mult=(1,), num_res_blocks=1, latent_channels=2,
        mel_bins=8,
    )
    vocoder = model(
        LTX2Vocoder, in_channels=16, hidden_channels=32, out_channels=2, upsample_kernel_sizes=[4, 4],
        upsample_factors=[2, 2], resnet_kernel_sizes=[3], resnet_dilations=[[1, 3, 5]], output_sampling_rate=16000,
    )
    parts = {"transformer": transformer, "connectors": connectors, "vae": video, "audio_vae": sound, "vocoder": vocoder}
    return pipeline(diffusers.LTX2Pipeline, **parts)


@convertible(
    "a prompt and an image, a video and its sound, with timesteps of tokens",
    SIZE | {"frames": 5, "call": LTX_2_CALL | {"image_crf": 0}}, images=("image",),
)
def ltx_2_image_to_video() -> Any:
    parts = {name: part for name, part in ltx_2().components.items() if name != "processor"}
    return pipeline(diffusers.LTX2ImageToVideoPipeline, **parts)


@convertible("a prompt, a sound", TWO_PROMPTS)
def stable_audio() -> Any:
    """Has a scheduler of the published one's kind that needs no further package."""
    transformer = model(
        diffusers.StableAudioDiTModel, **HEADS, sample_size=4, in_channels=3, num_layers=2,
        num_key_value_attention_heads=2, out_channels=3, cross_attention_dim=WIDTH, time_proj_dim=8,
        global_states_input_dim=2 * WIDTH, cross_attention_input_dim=WIDTH,
    )
    audio = model(
        diffusers.AutoencoderOobleck, encoder_hidden_size=6, downsampling_ratios=[1, 2], decoder_channels=3,
        decoder_input_channels=3, audio_channels=2, channel_multiples=[2, 4], sampling_rate=4,
    )
    projection = model(
        diffusers.StableAudioProjectionModel, text_encoder_dim=WIDTH, conditioning_dim=WIDTH, min_value=0, max_value=32,
    )
    return pipeline(
        diffusers.StableAudioPipeline, transformer=transformer, vae=audio, projection_model=projection,
        text_encoder=t5(), tokenizer=t5_tokenizer(), scheduler=diffusers.EDMDPMSolverMultistepScheduler(),
    )


@convertible("a prompt, a sound by a vocoder", TWO_PROMPTS)
def audio_ldm() -> Any:
    """Denoises spectrograms, and returns sounds without an axis of channels."""
    denoiser = model(
        diffusers.UNet2DConditionModel, block_out_channels=(32, 64), layers_per_block=1, sample_size=8,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=(32, 64), class_embed_type="simple_projection", attention_head_dim=1, norm_num_groups=8,
        projection_class_embeddings_input_dim=WIDTH, class_embeddings_concat=True,
    )
    spectrogram = model(
        diffusers.AutoencoderKL, block_out_channels=(32, 64), in_channels=1, out_channels=1, latent_channels=4,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
    )
    reader = transformers.ClapTextConfig(
        hidden_size=16, intermediate_size=32, num_attention_heads=2, num_hidden_layers=2, vocab_size=64,
        projection_dim=WIDTH, pad_token_id=1,
    )
    vocoder = transformers.SpeechT5HifiGanConfig(
        model_in_dim=8, sampling_rate=16000, upsample_initial_channel=16, upsample_rates=[2, 2],
        upsample_kernel_sizes=[4, 4], resblock_kernel_sizes=[3], resblock_dilation_sizes=[[1, 3, 5]],
        normalize_before=False,
    )
    return pipeline(
        diffusers.AudioLDMPipeline, unet=denoiser, vae=spectrogram, tokenizer=clip_tokenizer(),
        text_encoder=randomised(transformers.ClapTextModelWithProjection(reader)),
        vocoder=randomised(transformers.SpeechT5HifiGan(vocoder)),
        scheduler=diffusers.DDIMScheduler(beta_schedule="scaled_linear", clip_sample=False),
    )


def guider() -> Any:
    from diffusers.guiders import ClassifierFreeGuidance

    return ClassifierFreeGuidance()


@convertible("a prompt, a video", SIZE | {"frames": 5, "batch": 1})
def hunyuan_video_15() -> Any:
    transformer = model(
        diffusers.HunyuanVideo15Transformer3DModel, **HEADS, in_channels=9, out_channels=4, num_layers=1,
        num_refiner_layers=1, text_embed_dim=WIDTH, text_embed_2_dim=WIDTH, image_embed_dim=WIDTH,
        rope_axes_dim=(8, 12, 12), target_size=16, task_type="t2v",
    )
    video = model(
        diffusers.AutoencoderKLHunyuanVideo15, latent_channels=4, block_out_channels=(16, 16), layers_per_block=1,
        spatial_compression_ratio=4, temporal_compression_ratio=2, downsample_match_channel=False,
        upsample_match_channel=False,
    )
    return pipeline(diffusers.HunyuanVideo15Pipeline, transformer=transformer, vae=video, guider=guider())


@convertible("a prompt", SIZE | TWO_PROMPTS)
def omnigen() -> Any:
    transformer = model(
        diffusers.OmniGenTransformer2DModel, hidden_size=64, num_attention_heads=2, num_key_value_heads=2,
        intermediate_size=64, num_layers=1, in_channels=4, time_step_dim=8,
        rope_scaling={"long_factor": [1.0] * 16, "short_factor": [1.0] * 16},
    )
    return pipeline(
        diffusers.OmniGenPipeline, transformer=transformer,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(invert_sigmas=True), vae=vae(4, blocks=4),
        tokenizer=clip_tokenizer(),
    )


@convertible("a prompt", SIZE)
def z_image() -> Any:
    transformer = model(
        diffusers.ZImageTransformer2DModel, in_channels=16, dim=64, n_layers=1, n_refiner_layers=1, n_heads=2,
        n_kv_heads=2, cap_feat_dim=WIDTH, axes_dims=[8, 12, 12], axes_lens=[128, 64, 64],
    )
    return pipeline(diffusers.ZImagePipeline, transformer=transformer, vae=vae(16))


@convertible("a prompt", SIZE | {"tokens": None, "call": {"max_sequence_length": 8}})
def hidream() -> Any:
    """Names its timestep `timesteps`, and sends each token to some of its experts."""
    transformer = model(
        diffusers.HiDreamImageTransformer2DModel, **HEADS, patch_size=2, in_channels=4, out_channels=4, num_layers=1,
        num_single_layers=1, caption_channels=[WIDTH, WIDTH], text_emb_dim=2 * WIDTH, axes_dims_rope=(8, 12, 12),
        max_resolution=(32, 32), llama_layers=(0, 1),
    )
    return pipeline(
        diffusers.HiDreamImagePipeline, transformer=transformer, vae=shifted_vae(), text_encoder=clip(projection=WIDTH),
        tokenizer=clip_tokenizer(), text_encoder_2=clip(projection=WIDTH), tokenizer_2=clip_tokenizer(),
        text_encoder_3=t5(), tokenizer_3=t5_tokenizer(), text_encoder_4=llama(), tokenizer_4=clip_tokenizer(),
    )


def flux2_parts() -> dict[str, Any]:
    transformer = model(
        diffusers.Flux2Transformer2DModel, **HEADS, in_channels=16, num_layers=1, num_single_layers=1,
        joint_attention_dim=WIDTH, timestep_guidance_channels=32, axes_dims_rope=(8, 8, 8, 8), guidance_embeds=False,
    )
    return {"transformer": transformer, "vae": flux2_vae()}


@convertible("a prompt", SIZE)
def flux2_klein() -> Any:
    return pipeline(diffusers.Flux2KleinPipeline, **flux2_parts())


@convertible("a prompt and an image", SIZE, images=("image",), side=64)
def flux2_klein_with_image() -> Any:
    """Takes images of 64 pixels and more."""
    return flux2_klein()


@convertible("a prompt, without an image", SIZE)
def flux2_klein_kv() -> Any:
    """With an image the first step returns keys and values of the image, which the other steps take."""
    return pipeline(diffusers.Flux2KleinKVPipeline, **flux2_parts())


@convertible("a prompt, a video, with timesteps of frames", WAN)
def anyflow() -> Any:
    """Takes the noise levels at the begin and the end of a step, for each frame."""
    transformer = model(
        diffusers.AnyFlowTransformer3DModel, **HEADS, text_dim=WIDTH, freq_dim=32, ffn_dim=32, num_layers=2,
        rope_max_seq_len=32,
    )
    return with_parts_of_wan(diffusers.AnyFlowPipeline, transformer, diffusers.FlowMapEulerDiscreteScheduler())


@seeded
def anyflow_far() -> Any:
    """Draws one chunk of frames after another."""
    transformer = model(
        diffusers.AnyFlowFARTransformer3DModel, **HEADS, text_dim=WIDTH, freq_dim=32, ffn_dim=32, num_layers=2,
        rope_max_seq_len=32, chunk_partition=(1, 2), full_chunk_limit=2,
    )
    return with_parts_of_wan(diffusers.AnyFlowFARPipeline, transformer, diffusers.FlowMapEulerDiscreteScheduler())


@convertible("a prompt, a video", WAN)
def motif_video() -> Any:
    transformer = model(
        diffusers.MotifVideoTransformer3DModel, **HEADS, num_layers=1, num_single_layers=2, num_decoder_layers=1,
        text_embed_dim=WIDTH, rope_axes_dim=(8, 12, 12),
    )
    return pipeline(diffusers.MotifVideoPipeline, transformer=transformer, vae=wan().vae, guider=guider())


@convertible("a prompt", SIZE | {"batch": 1})
def nucleus_moe() -> Any:
    """Each expert chooses some of the tokens."""
    transformer = model(
        diffusers.NucleusMoEImageTransformer2DModel, **HEADS, in_channels=16, out_channels=4, num_layers=2,
        num_key_value_heads=1, joint_attention_dim=WIDTH, axes_dims_rope=(8, 12, 12),
        dense_moe_strategy="leave_first_block_dense", num_experts=4, moe_intermediate_dim=32, capacity_factors=2.0,
    )
    return pipeline(diffusers.NucleusMoEImagePipeline, transformer=transformer, vae=qwen_vae())


@convertible("a prompt, a video and its sound", SIZE | {"frames": 5})
def kandinsky6() -> Any:
    from diffusers.models.autoencoders.autoencoder_mmaudio import MMAudioVAE
    from diffusers.models.autoencoders.mmaudio_vocoder import MMAudioVocoder

    sound = model(
        MMAudioVAE, mel_bins=8, latent_channels=20, hidden_channels=8, channel_multipliers=(1, 2), layers_per_block=1,
        sample_rate=800, n_fft=64, hop_length=16,
    )
    vocoder = model(
        MMAudioVocoder, num_mels=8, upsample_initial_channel=16, upsample_rates=(4, 4), upsample_kernel_sizes=(8, 8),
        resblock_kernel_sizes=(3,), resblock_dilation_sizes=((1, 3, 5),),
    )
    parts = kandinsky_parts(diffusers.Kandinsky6Transformer3DModel)
    return pipeline(diffusers.Kandinsky6TI2VAPipeline, **parts, audio_vae=sound, vocoder=vocoder)


@convertible("a prompt, a video without sound", SIZE | {"frames": 5, "call": {"sample_audio": False}})
def kandinsky6_without_sound() -> Any:
    """Computes attention of the sound's text, whose result it does not use."""
    return pipeline(diffusers.Kandinsky6TI2VAPipeline, **kandinsky_parts(diffusers.Kandinsky6Transformer3DModel))


def kandinsky6_upscaler() -> Any:
    """Computes attention of blocks that it chooses, by flex_attention."""
    transformer = model(
        diffusers.Kandinsky6SRTransformer3DModel, in_visual_dim=4, out_visual_dim=4, time_dim=32, model_dim=64,
        ff_dim=64, num_visual_blocks=1, axes_dims=(8, 12, 12), tile_sizes=((128, 128),),
    )
    widths = (8,) * 5
    video = model(
        diffusers.Kandinsky6SRVAE, latent_channels=4, encoder_block_out_channels=widths, layers_per_block=1,
        decoder_block_out_channels=widths,
    )
    return pipeline(diffusers.Kandinsky6SRPipeline, transformer=transformer, vae=video)


def qwen3_vl(layers: int = 2) -> Any:
    text = {
        "vocab_size": 64, "hidden_size": WIDTH, "intermediate_size": WIDTH, "num_hidden_layers": layers,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 128,
        "rope_parameters": {"rope_type": "default", "mrope_section": [4, 2, 2], "rope_theta": 10000.0},
    }
    images = {
        "depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "patch_size": 4,
        "out_hidden_size": WIDTH, "num_position_embeddings": 16, "deepstack_visual_indexes": [0],
    }
    config = transformers.Qwen3VLConfig(text_config=text, vision_config=images)
    return randomised(transformers.Qwen3VLModel(config))


IDEOGRAM_4 = SIZE | TWO_PROMPTS | {
    # The default schedule of the guidance has 48 steps.
    "call": {"max_sequence_length": 8, "guidance_scale": 4.0, "guidance_schedule": None},
}


@convertible("a prompt", IDEOGRAM_4)
def ideogram4() -> Any:
    """Has a second network for the guidance, which computes the image's tokens alone."""
    networks = {
        name: model(
            diffusers.Ideogram4Transformer2DModel, **HEADS, in_channels=16, num_layers=1, intermediate_size=64,
            adaln_dim=32, llm_features_dim=13 * WIDTH, mrope_section=(6, 5, 5),
        )
        for name in ("transformer", "unconditional_transformer")
    }
    tokenizer = clip_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'][0]['text'] }}{% endfor %}"
    return pipeline(
        diffusers.Ideogram4Pipeline, **networks, vae=flux2_vae(), text_encoder=qwen3_vl(layers=36), tokenizer=tokenizer,
    )


@convertible("a prompt, with the second network", IDEOGRAM_4 | {"denoiser": "unconditional_transformer"})
def ideogram4_unconditional() -> Any:
    return ideogram4()


@convertible("a prompt", SIZE | {"tokens": None, "call": {"max_sequence_length": 8}})
def krea2() -> Any:
    """Reads two layers of its text encoder. The index of the pipeline has their numbers as a list."""
    transformer = model(
        diffusers.Krea2Transformer2DModel, **HEADS, in_channels=16, num_layers=1, num_key_value_heads=1,
        intermediate_size=64, timestep_embed_dim=32, text_hidden_dim=WIDTH, num_text_layers=2,
        text_num_attention_heads=2, text_num_key_value_heads=2, text_intermediate_size=64, num_layerwise_text_blocks=1,
        num_refiner_text_blocks=1, axes_dims_rope=(8, 12, 12),
    )
    return pipeline(
        diffusers.Krea2Pipeline, transformer=transformer, vae=qwen_vae(), text_encoder=qwen3_vl(),
        tokenizer=clip_tokenizer(), text_encoder_select_layers=(1, 2),
    )


def z_image_with_control(kind: Any, channels: int, **config: Any) -> Any:
    controlnet = model(
        diffusers.ZImageControlNetModel, control_layers_places=[0], control_refiner_layers_places=[0],
        control_in_dim=channels, dim=64, n_refiner_layers=1, n_heads=2, n_kv_heads=2, **config,
    )
    return pipeline(kind, **z_image().components, controlnet=controlnet)


@convertible("a prompt and an image, through a ControlNet", SIZE, images=("control_image",))
def z_image_control_net() -> Any:
    """The ControlNet computes additions to layers from the image and the prompt."""
    return z_image_with_control(diffusers.ZImageControlNetPipeline, 16)


@convertible(
    "a prompt, an image and a mask, through a ControlNet", SIZE, images=("image", "mask_image", "control_image"),
)
def z_image_control_net_inpainting() -> Any:
    kind = diffusers.ZImageControlNetInpaintPipeline
    return z_image_with_control(kind, 33, add_control_noise_refiner="control_noise_refiner")


@convertible("a prompt", SIZE)
def lumina2() -> Any:
    transformer = model(
        diffusers.Lumina2Transformer2DModel, sample_size=16, patch_size=2, in_channels=16, hidden_size=64, num_layers=2,
        num_refiner_layers=1, num_attention_heads=2, num_kv_heads=1, multiple_of=2, ffn_dim_multiplier=1,
        cap_feat_dim=WIDTH, axes_dim_rope=(8, 12, 12), axes_lens=(64, 64, 64),
    )
    return pipeline(diffusers.Lumina2Pipeline, transformer=transformer, vae=vae(16))


@convertible("a prompt", SIZE)
def hunyuan_image() -> Any:
    transformer = model(
        diffusers.HunyuanImageTransformer2DModel, **HEADS, in_channels=4, out_channels=4, num_layers=1,
        num_single_layers=1, num_refiner_layers=1, patch_size=(1, 1), text_embed_dim=WIDTH, text_embed_2_dim=WIDTH,
        rope_axes_dim=(16, 16),
    )
    autoencoder = model(
        diffusers.AutoencoderKLHunyuanImage, in_channels=3, out_channels=3, latent_channels=4,
        block_out_channels=(32, 32), layers_per_block=1, spatial_compression_ratio=2, sample_size=32,
        scaling_factor=0.75, downsample_match_channel=False, upsample_match_channel=False,
    )
    guiders = {"guider": guider(), "ocr_guider": guider()}
    return pipeline(diffusers.HunyuanImagePipeline, transformer=transformer, vae=autoencoder, **guiders)


@seeded
def cosmos2(safety_checker: Any) -> Any:
    """Does not draw without its safety checker, which needs a package of its own, and is not in the table."""
    transformer = model(
        diffusers.CosmosTransformer3DModel, **HEADS, in_channels=16, out_channels=16, num_layers=1, mlp_ratio=2,
        text_embed_dim=WIDTH, adaln_lora_dim=4, max_size=(4, 32, 32), patch_size=(1, 2, 2), rope_scale=(2.0, 1.0, 1.0),
        concat_padding_mask=True, extra_pos_embed_type=None,
    )
    return pipeline(
        diffusers.Cosmos2TextToImagePipeline, transformer=transformer, vae=wan_vae(), text_encoder=t5(),
        tokenizer=t5_tokenizer(), scheduler=diffusers.FlowMatchEulerDiscreteScheduler(use_karras_sigmas=True),
        safety_checker=safety_checker,
    )


def glm_image_transformer() -> Any:
    """Takes tokens that another model has drawn, some of them dropped."""
    return model(
        diffusers.GlmImageTransformer2DModel, **HEADS, in_channels=4, out_channels=4, num_layers=1,
        text_embed_dim=WIDTH, time_embed_dim=32, condition_dim=8, prior_vq_quantizer_codebook_size=16,
    )


def glm_image_processor(start: int) -> Any:
    """Makes a processor of prompts by letters. start: number of the token that begins an image."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokens = ["<unk>", "<pad>", "<image>", "<grid>", "</grid>", *"abcdefghijklmnopqrstuvwxyz0123456789 "]
    letters = models.WordLevel({x: i for i, x in enumerate(tokens)} | {"<start>": start}, unk_token="<unk>")
    tokenizer = Tokenizer(letters)
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return transformers.GlmImageProcessor(
        transformers.GlmImageImageProcessor(patch_size=8, merge_size=1),
        transformers.PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, unk_token="<unk>", pad_token="<pad>", bos_token="<start>", padding_side="left",
            extra_special_tokens={
                "image_token": "<image>", "grid_bos_token": "<grid>", "grid_eos_token": "</grid>",
            },
        ),
        chat_template="{% for message in messages %}{{ message['content'][0]['text'] }}{% endfor %}",
    )


@convertible("a prompt, and tokens that another model draws from the prompt", SIZE | {"tokens": None, "batch": 1})
def glm_image() -> Any:
    start, codes = 60, 16
    sizes = {"hidden_size": WIDTH, "intermediate_size": WIDTH}
    text = sizes | {
        "vocab_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2,
        "vision_vocab_size": codes, "pad_token_id": 1, "eos_token_id": 63,
        "rope_parameters": {"rope_type": "default", "mrope_section": (4, 2, 2)},
    }
    config = transformers.GlmImageConfig(
        text_config=text, vision_config=sizes | {"depth": 1, "num_heads": 2, "image_size": 32, "patch_size": 8},
        vq_config={"embed_dim": WIDTH, "num_embeddings": codes, "latent_channels": WIDTH}, image_token_id=2,
        image_start_token_id=start, image_end_token_id=start + 1,
    )
    autoencoder = vae(4, blocks=4)
    autoencoder.register_to_config(latents_mean=[0.0] * 4, latents_std=[1.0] * 4)
    bytes_of_text = transformers.T5Config(
        vocab_size=384, d_model=WIDTH, d_kv=8, d_ff=WIDTH, num_layers=2, num_heads=4,
    )
    return pipeline(
        diffusers.GlmImagePipeline, transformer=glm_image_transformer(), vae=autoencoder,
        vision_language_encoder=randomised(transformers.GlmImageForConditionalGeneration(config)),
        processor=glm_image_processor(start), text_encoder=randomised(transformers.T5EncoderModel(bytes_of_text)),
        tokenizer=transformers.ByT5Tokenizer(),
    )


def lumina_next() -> Any:
    transformer = model(
        diffusers.LuminaNextDiT2DModel, sample_size=4, patch_size=2, in_channels=4, hidden_size=64, num_layers=1,
        num_attention_heads=2, num_kv_heads=1, multiple_of=16, cross_attention_dim=WIDTH,
    )
    return pipeline(diffusers.LuminaPipeline, transformer=transformer, vae=vae(4))


def stable_cascade_prior() -> Any:
    kinds = ("SDCascadeResBlock", "SDCascadeTimestepBlock", "SDCascadeAttnBlock")
    prior = model(
        diffusers.StableCascadeUNet, conditioning_dim=32, block_out_channels=(32, 32), num_attention_heads=(1, 1),
        down_num_layers_per_block=(1, 1), up_num_layers_per_block=(1, 1), clip_image_in_channels=WIDTH,
        clip_text_in_channels=WIDTH, clip_text_pooled_in_channels=WIDTH, down_blocks_repeat_mappers=(1, 1),
        up_blocks_repeat_mappers=(1, 1), block_types_per_layer=(kinds, kinds), switch_level=(False,),
        timestep_ratio_embedding_dim=32,
    )
    return pipeline(
        diffusers.StableCascadePriorPipeline, prior=prior, text_encoder=clip(projection=WIDTH),
        tokenizer=clip_tokenizer(), scheduler=diffusers.DDPMWuerstchenScheduler(),
    )

# fmt: on


@dataclass(frozen=True)
class Refused:
    """A pipeline that is refused before anything is calibrated.

    Attributes:
        make: makes the pipeline.
        why: for people.
        told: parts of the message.
        options: of `diffusers_model`.
        images: arguments of the pipeline's call that are images.
    """

    make: Make
    why: str
    told: tuple[str, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    images: tuple[str, ...] = ()


REFUSED = {
    "flux2_klein_kv": Refused(
        flux2_klein_kv,
        "with an image, its first step returns keys and values for the others; without one it converts",
        (
            "returns 'kv_cache' beside its prediction",
            "got: 'kv_cache', a Flux2KVCache",
            "remove image from model.images",
        ),
        SIZE,
        images=("image",),
    ),
    "anyflow_far": Refused(
        anyflow_far,
        "its model returns a cache of keys and values for the next chunk's calls; without the cache its call fails",
        ("returns 'kv_cache' beside its prediction", "got: 'kv_cache', a dict", "keep the pipeline's own transformer"),
        WAN,
    ),
    "lumina_next": Refused(
        lumina_next,
        "its pipeline passes rotations as complex numbers",
        ("passes 'image_rotary_emb' to its model", "got: complex64"),
        SIZE,
    ),
    "stable_cascade_prior": Refused(
        stable_cascade_prior,
        "the noise of its scheduler is not known; the decoder's VQGAN is a class that diffusers 0.42 does not load",
        ("the noise of DDPMWuerstchenScheduler is not known", "save the pipeline with such a scheduler"),
        TWO_PROMPTS | {"denoiser": "prior"},
    ),
}
