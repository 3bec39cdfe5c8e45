"""Merges LoRA files into a loaded model in full precision, before it is observed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from trtconvert.diffusion_model import DiffusionModel
from trtconvert.errors import UserError
from trtconvert.recipe import LoraSection
from trtconvert.weights.finite import is_finite
from trtconvert.weights.lora import read_lora
from trtconvert.weights.lora_names import DENOISER


def merge_loras(model: DiffusionModel, loras: Sequence[LoraSection]) -> None:
    """Merges LoRAs into a model's weights in place, one after the other: W + scale · alpha/rank · up · down, in FP32.

    Raises:
        UserError: a file cannot be read or does not fit; the model has no such component; or a merged weight is NaN or Inf.
    """
    for section in loras:
        lora = read_lora(section.file)
        module, title = _target(model, section.target)
        weights = {name: tensor for name, tensor in module.state_dict().items() if tensor.is_floating_point()}
        updates = lora.updates(section.target, {name: tuple(x.shape) for name, x in weights.items()}, title)
        with torch.no_grad():
            for update in updates:
                weight = weights[update.weight]
                exact = weight.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
                update.add_to(exact, section.scale)
                merged = exact.to(weight.dtype)
                if not is_finite(merged):
                    raise UserError(
                        f"with the LoRA {section.file} the weight {update.weight} of {title} is no number",
                        expected=f"numbers that {str(weight.dtype).removeprefix('torch.')} holds",
                        got=f"NaN or Inf at a scale of {section.scale:g}",
                        remedy="give a smaller scale, or another file",
                    )
                weight.copy_(merged)


def _target(model: DiffusionModel, target: str) -> tuple[nn.Module, str]:
    """Returns the module of a component, and its name in messages."""
    if target == DENOISER:
        return model.denoiser, model.diffusers.model if model.diffusers is not None else model.name
    components = model.components
    if components is None or target not in components.names:
        known = [DENOISER, *(name for name in (components.names if components else ()) if name.startswith("text_"))]
        raise UserError(
            f"{model.diffusers.pipeline if model.diffusers else model.name} has no {target} that a LoRA could be merged into",
            expected=", ".join(known),
            got=target,
            remedy="correct target under loras in the recipe"
            + (", or save the pipeline with it" if components else ""),
        )
    module = components.module(target)
    return module, type(module).__name__
