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
"""The factor of a file with an alpha."""

BLOCK = "down_blocks.0.attentions.0.transformer_blocks.0"
ATTENTION = [f"{BLOCK}.attn1.to_q", f"{BLOCK}.attn2.to_out.0"]
UNET = [*ATTENTION, f"{BLOCK}.ff.net.0.proj", "mid_block.attentions.0.proj_in"]

CONFIG = {"lora_alpha": 8, "r": RANK, "alpha_pattern": {"attn1.to_q": 2}}
"""Prefix of peft."""


def model_of(module: nn.Module, root: str = "") -> DiffusionModel:
    """Makes a model whose denoiser is a module, or holds it under a name."""
    return replace(tiny_models.build(), denoiser=nn.ModuleDict({root: module}) if root else module)


@functools.cache
def made(kind: str) -> Any:
    """Returns a pipeline's denoiser; tests do not change it."""
    pipe = getattr(tiny_pipelines, kind)()
    return getattr(pipe, "unet", None) or pipe.transformer


def fresh(kind: str) -> Any:
    """Returns a copy of a denoiser."""
    module = made(kind)
    new = type(module).from_config(module.config)
    new.load_state_dict(module.state_dict())
    return new.eval().requires_grad_(False)


def merged(module: nn.Module, *sections: dict[str, Any], root: str = "") -> dict[str, Tensor]:
    """Merges LoRAs, given by the fields of their sections, into a module; returns its state dict."""
    merge_loras(model_of(module, root), [LoraSection(**section) for section in sections])
    return module.state_dict()


def assert_close(state: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert state.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(
            state[name], tensor, rtol=1e-6, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )


def copied(file: Path) -> dict[str, Tensor]:
    """Returns copies of the tensors of a file that will be overwritten."""
    return {name: tensor.clone() for name, tensor in load_file(file).items()}


def written(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> Path:
    """Writes a file of a U-Net's layers with changed tensors."""
    layers = tiny_loras.layers_of(made("stable_diffusion"), UNET)
    file = tiny_loras.save(folder / "lora.safetensors", layers, tiny_loras.kohya())
    tensors = copied(file)
    change(tensors)
    save_file(tensors, file)
    return file
