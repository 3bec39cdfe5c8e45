"""Small models on the disk: layers of every kind with random weights."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor


def weights(seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """Linear layers with sizes that are no multiples of 128, a convolution, tensors that stay in FP32, and odd tensors."""
    drawn = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=drawn) * 0.05).to(dtype)

    return {
        "blocks.0.attn.qkv.weight": normal(384, 128),
        "blocks.0.attn.qkv.bias": normal(384),
        "blocks.0.mlp.fc1.weight": normal(300, 203),
        "blocks.0.norm1.weight": normal(128),
        "blocks.0.norm1.linear.weight": normal(256, 128),
        "blocks.1.conv.weight": normal(64, 16, 3, 3),
        "x_embedder.weight": normal(128, 48),
        "final_layer.linear.weight": normal(77, 129),
        "small.weight": normal(8, 8),
        "scale_shift_table": normal(6, 1024),
        "odd.bias": normal(3),
        "scalar": torch.tensor(2.5, dtype=dtype),
        "nothing.weight": torch.zeros(0, 4, dtype=dtype),
        "steps": torch.arange(5),
        "naïve.名.bias": normal(7),
    }


IN_INT8 = {
    "blocks.0.attn.qkv.weight",
    "blocks.0.mlp.fc1.weight",
    "blocks.0.norm1.linear.weight",
    "blocks.1.conv.weight",
}
IN_FP32 = {"blocks.0.norm1.weight", "x_embedder.weight", "final_layer.linear.weight"}


def save(folder: Path, tensors: dict[str, Tensor], name: str = "diffusion_pytorch_model") -> Path:
    """A folder with a model's weights and configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({key: x.contiguous() for key, x in tensors.items()}, folder / f"{name}.safetensors", {"format": "pt"})
    (folder / "config.json").write_text('{"a": 1}')
    return folder


def save_shards(folder: Path, tensors: dict[str, Tensor], count: int = 2) -> Path:
    """A model's folder with several files and an index."""
    folder.mkdir(parents=True, exist_ok=True)
    names = list(tensors)
    weight_map = {}
    for index in range(count):
        file = f"model-{index + 1:05d}-of-{count:05d}.safetensors"
        part = {name: tensors[name] for name in names[index::count]}
        save_file(part, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map}, ensure_ascii=False), encoding="utf-8"
    )
    return folder


def save_pipeline(folder: Path) -> Path:
    """A pipeline of two models, with a tokenizer."""
    save(folder / "transformer", weights(0))
    save(folder / "text_encoder", weights(1), "model")
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer" / "vocab.json").write_text("{}")
    (folder / "model_index.json").write_text('{"_class_name": "Any"}')
    return folder
