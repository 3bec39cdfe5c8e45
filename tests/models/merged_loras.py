"""Denoisers with LoRAs merged into them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import tiny_loras
import tiny_models
import tiny_pipelines
import torch
from safetensors.torch import load_file, save_file
from tiny_loras import ALPHA, RANK
from torch import Tensor, nn

from trtconvert.models import DiffusionModel
from trtconvert.models.lora import merge_loras
from trtconvert.recipe import LoraSection

HALF = ALPHA / RANK
"""What a file with an alpha multiplies by."""

BLOCK = "down_blocks.0.attentions.0.transformer_blocks.0"
ATTENTION = [f"{BLOCK}.attn1.to_q", f"{BLOCK}.attn2.to_out.0"]
UNET = [*ATTENTION, f"{BLOCK}.ff.net.0.proj", "mid_block.attentions.0.proj_in"]

CONFIG = {"lora_alpha": 8, "r": RANK, "alpha_pattern": {"attn1.to_q": 2}}
"""Of peft."""


def model_of(module: nn.Module, root: str = "") -> DiffusionModel:
    """A model whose denoiser holds a module under a name, or is it."""
    return replace(tiny_models.build(), denoiser=nn.ModuleDict({root: module}) if root else module)


@functools.cache
def made(kind: str) -> Any:
    """A pipeline's denoiser, which stays as it is."""
    pipe = getattr(tiny_pipelines, kind)()
    return getattr(pipe, "unet", None) or pipe.transformer


def fresh(kind: str) -> Any:
    """A denoiser with weights of its own."""
    module = made(kind)
    new = type(module).from_config(module.config)
    new.load_state_dict(module.state_dict())
    return new.eval().requires_grad_(False)


def merged(module: nn.Module, *sections: dict[str, Any], root: str = "") -> dict[str, Tensor]:
    """The state dict of a module into which LoRAs were merged, by the fields of their sections."""
    merge_loras(model_of(module, root), [LoraSection(**section) for section in sections])
    return module.state_dict()


def assert_close(state: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert state.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(
            state[name], tensor, rtol=1e-6, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )


def copied(file: Path) -> dict[str, Tensor]:
    """The tensors of a file that will be written over."""
    return {name: tensor.clone() for name, tensor in load_file(file).items()}


def written(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> Path:
    """A file of a U-Net's layers with its tensors changed."""
    layers = tiny_loras.layers_of(made("stable_diffusion"), UNET)
    file = tiny_loras.save(folder / "lora.safetensors", layers, tiny_loras.kohya())
    tensors = copied(file)
    change(tensors)
    save_file(tensors, file)
    return file
