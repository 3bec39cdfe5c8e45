"""Reads a pipeline's sizes and steps off the configurations in its folder, without loading it. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard

from trtconvert.documents import PIPELINE_INDEX, parse_json
from trtconvert.models.saved import DENOISERS
from trtconvert.runtime.pipeline import names_class

FEW_STEPS = 4
"""Steps of models that are distilled to few steps."""

_FEW = ("turbo", "schnell", "lcm", "lightning", "hyper-", "hypersd", "dmd2")
"""Parts of such models' names."""

_OF_CLASSES = {"FluxTransformer2DModel": 128}
"""Latents in a row for models whose configurations do not have the number."""

_FEW_SCHEDULERS = ("LCMScheduler", "TCDScheduler", "FlowMatchLCMScheduler", "CMStochasticIterativeScheduler")


def saved_config(folder: Path, part: str) -> Mapping[str, Any]:
    """Returns the configuration of a pipeline's model or scheduler; an empty one where none can be read."""
    for name in ("config.json", "scheduler_config.json"):
        try:
            found = parse_json((folder / part / name).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(found, dict):
            return found
    return {}


def parts_of(folder: Path) -> dict[str, str]:
    """Returns the classes of a pipeline's components by name, without components that were saved as None."""
    try:
        index = parse_json((folder / PIPELINE_INDEX).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    named = index.items() if isinstance(index, dict) else ()
    return {name: entry[1] for name, entry in named if names_class(entry) and (folder / name).is_dir()}


def models_in_torch(folder: Path) -> list[str]:
    """Returns the names of a pipeline's models that a build does not convert, such as a ControlNet. Safety checkers are left out:
    a bundle needs none."""
    return [
        name
        for name in parts_of(folder)
        if name not in (*DENOISERS, "vae", "safety_checker")
        and not name.startswith("text_encoder")
        and (folder / name / "config.json").is_file()
    ]


def denoiser_config(folder: Path) -> Mapping[str, Any]:
    """Returns the denoiser's configuration; an empty one where none can be read."""
    return next(filter(None, (saved_config(folder, name) for name in DENOISERS)), {})


def saved_sizes(folder: Path) -> dict[str, int]:
    """Returns the height and width in pixels, and the frames, that a pipeline draws by default: the sizes of its denoiser's
    latents times the VAE's factor. Sizes that the folder does not have, such as those of a pipeline's class, are absent.
    """
    denoiser = denoiser_config(folder)
    size = denoiser.get("sample_size", _OF_CLASSES.get(str(denoiser.get("_class_name"))))
    height, width = size if isinstance(size, list) and len(size) == 2 else (size, size)
    height, width = denoiser.get("sample_height", height), denoiser.get("sample_width", width)
    spatial = _pixels_per_latent(saved_config(folder, "vae")) if (folder / "vae").is_dir() else 1
    found: dict[str, int] = {}
    if spatial and _is_count(height) and _is_count(width):
        found = {"height": height * spatial, "width": width * spatial}
    # CogVideoX counts frames of the video, rather than of latents.
    frames = denoiser.get("sample_frames")
    return found | ({"frames": frames} if _is_count(frames) else {})


def _pixels_per_latent(vae: Mapping[str, Any]) -> int | None:
    for name in ("scale_factor_spatial", "spatial_compression_ratio"):
        if _is_count(vae.get(name)):
            return vae[name]
    if isinstance(scaled := vae.get("spatio_temporal_scaling"), list) and _is_count(vae.get("patch_size")):
        return vae["patch_size"] * 2 ** sum(map(bool, scaled))  # LTX
    if isinstance(scaled := vae.get("temperal_downsample"), list):
        return 2 ** len(scaled)  # Wan, Qwen-Image
    for name in ("block_out_channels", "encoder_block_out_channels"):
        if isinstance(blocks := vae.get(name), list) and blocks:
            return 2 ** (len(blocks) - 1)
    return None


def _is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def few_steps(folder: Path) -> str:
    """Returns the reason to expect few steps, in words; "" for a pipeline without one, as far as its folder tells."""
    parts, denoiser = parts_of(folder), denoiser_config(folder)
    if (scheduler := parts.get("scheduler", "")) in _FEW_SCHEDULERS:
        return f"its scheduler is {scheduler}"
    for name in (folder.resolve().name, str(denoiser.get("_name_or_path", ""))):
        if word := next((word for word in _FEW if word in name.lower()), ""):
            return f"its name has {word.strip('-')} in it"
    if denoiser.get("_class_name") == "FluxTransformer2DModel" and denoiser.get("guidance_embeds") is False:
        return "it is a Flux without guidance, as schnell"
    if denoiser.get("_class_name") == "UNet2DConditionModel" and _is_count(denoiser.get("time_cond_proj_dim")):
        return "its UNet takes the guidance scale, as latent consistency models do"
    return ""
