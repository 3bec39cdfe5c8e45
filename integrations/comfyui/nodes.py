"""The loader node: a bundle in `models/trtconvert` becomes a MODEL that samplers take as any other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import comfy.model_base
import comfy.model_management
import comfy.model_patcher
import comfy.supported_models
import folder_paths
import torch

from trtconvert import runtime
from trtconvert.bundle import MANIFEST
from trtconvert.errors import UserError

from .denoiser import ComfyDenoiser, Family, family_of

KIND = "trtconvert"
"""ComfyUI's kind of these models, and their folder among ComfyUI's models."""

if KIND not in folder_paths.folder_names_and_paths:
    folder_paths.folder_names_and_paths[KIND] = ([str(Path(folder_paths.models_dir) / KIND)], set())

_SCHEDULER = Path("pipeline", "scheduler", "scheduler_config.json")
"""In a bundle that was built with components."""


def bundles() -> dict[str, Path]:
    """The bundles in ComfyUI's folders for them, by relative path."""
    found: dict[str, Path] = {}
    for root in map(Path, folder_paths.get_folder_paths(KIND)):
        for manifest in sorted(root.glob(f"**/{MANIFEST}")):
            found.setdefault(manifest.parent.relative_to(root).as_posix(), manifest.parent)
    return found


class TrtconvertLoader:
    """Loads a bundle. The bundle itself says what kind of model it is."""

    RETURN_TYPES = ("MODEL",)
    FUNCTION = "load"
    CATEGORY = "loaders"
    DESCRIPTION = "Loads a denoiser that trtconvert has converted, with INT8 attention in a TensorRT engine."

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {"bundle": (sorted(bundles()),)},
            "optional": {
                "prediction": (
                    ["auto", "eps", "v_prediction"],
                    {"tooltip": "What a U-Net predicts. auto: what the bundle's scheduler says, else eps."},
                ),
                "check": (
                    "BOOLEAN",
                    {"default": False, "tooltip": "Warn once of inputs that are unlike those of the calibration."},
                ),
            },
        }

    @classmethod
    def IS_CHANGED(cls, bundle: str, **_: Any) -> str:
        """Changes when a bundle is built or compiled again, so that ComfyUI loads it again."""
        folder = bundles().get(bundle)
        return "" if folder is None else str((folder / MANIFEST).stat().st_mtime_ns)

    def load(self, bundle: str, prediction: str = "auto", check: bool = False) -> tuple[Any]:
        """
        Raises:
            UserError: there is no such bundle, or ComfyUI has no model for its denoiser.
        """
        folder = bundles().get(bundle)
        if folder is None:
            raise UserError(
                f"there is no bundle '{bundle}'",
                expected=", ".join(sorted(bundles())) or f"a bundle in {folder_paths.get_folder_paths(KIND)[0]}",
                got=bundle,
                remedy="put the folder that `trtconvert build` wrote there, and refresh",
            )
        device = comfy.model_management.get_torch_device()
        loaded = runtime.load(folder, device=device if device.type == "cuda" else None, check=check)
        record = loaded.manifest.components["denoiser"]
        family = family_of(loaded)
        model = _model(family, record.diffusers.config, _prediction(folder, prediction))  # type: ignore[union-attr]
        model.diffusion_model = ComfyDenoiser(loaded, family)
        # The denoiser splits batches, and an engine's memory is taken already.
        model.memory_required = lambda *_, **__: 0
        patcher = comfy.model_patcher.ModelPatcher(
            model, load_device=device, offload_device=comfy.model_management.unet_offload_device()
        )
        add_wrappers(patcher, model.diffusion_model)
        return (patcher,)


def add_wrappers(patcher: Any, denoiser: ComfyDenoiser) -> None:
    """Let ComfyUI tell a denoiser that leaves steps out its place in a trajectory. Without wrappers it computes all steps."""
    if denoiser.steps is not None and hasattr(patcher, "add_wrapper_with_key"):
        patcher.add_wrapper_with_key("sampler_sample", KIND, denoiser.steps.sampling)
        patcher.add_wrapper_with_key("predict_noise", KIND, denoiser.steps.step)


def _prediction(folder: Path, asked: str) -> str:
    """The prediction of a U-Net, in ComfyUI's words."""
    if asked == "auto" and (folder / _SCHEDULER).is_file():
        asked = json.loads((folder / _SCHEDULER).read_text(encoding="utf-8")).get("prediction_type", "epsilon")
    return "v_prediction" if asked == "v_prediction" else "eps"


def _model(family: Family, config: dict[str, Any], prediction: str) -> Any:
    """ComfyUI's model of a family, with its sampling and latents, and without a network."""
    predicts = (
        comfy.model_base.ModelType.V_PREDICTION if prediction == "v_prediction" else comfy.model_base.ModelType.EPS
    )
    kinds: dict[Family, tuple[str, dict[str, Any]]] = {
        Family.SD1: ("SD15", {}),
        Family.SD2: ("SD20", {}),
        Family.SDXL: ("SDXL", {"adm_in_channels": 2816}),
        Family.REFINER: ("SDXLRefiner", {"adm_in_channels": 2560}),
        Family.SD3: ("SD3", {}),
        Family.FLUX: (
            "Flux" if config.get("guidance_embeds") else "FluxSchnell",
            {"in_channels": 16, "out_channels": 16},
        ),
    }
    name, unet = kinds[family]
    settings = getattr(comfy.supported_models, name)(unet)
    settings.unet_config["disable_unet_model_creation"] = True
    if family in (Family.SD3, Family.FLUX):
        return settings.get_model({})
    made = {Family.SDXL: comfy.model_base.SDXL, Family.REFINER: comfy.model_base.SDXLRefiner}
    model = made.get(family, comfy.model_base.BaseModel)(settings, model_type=predicts)
    if hasattr(model, "embedder"):
        # The denoiser embeds the sizes itself.
        model.embedder = torch.nn.Identity()
    if config.get("in_channels") == 9:
        model.set_inpaint()
    return model


NODE_CLASS_MAPPINGS = {"TrtconvertLoader": TrtconvertLoader}
NODE_DISPLAY_NAME_MAPPINGS = {"TrtconvertLoader": "Load trtconvert bundle"}
