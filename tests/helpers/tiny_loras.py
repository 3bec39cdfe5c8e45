"""LoRA files with random numbers, in the layouts that are in use, and what they add to the weights of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

RANK, ALPHA = 4, 2.0


@dataclass(frozen=True)
class Layer:
    """Of one weight: up and down, and between them `mid` where it is a convolution in three parts."""

    up: Tensor
    down: Tensor
    mid: Tensor | None = None

    def delta(self) -> Tensor:
        """up · mid · down, by the convolutions that they are."""
        if self.down.dim() == 2:
            return self.up.double() @ self.down.double()
        image = torch.eye(self.down.shape[1], dtype=torch.float64)
        # What the three do to an impulse in the middle of each channel, turned: a convolution correlates.
        size = 2 * max(self.down.shape[-1], self.mid.shape[-1] if self.mid is not None else 1) - 1
        impulses = torch.zeros(*image.shape, size, size, dtype=torch.float64)
        impulses[:, :, size // 2, size // 2] = image
        seen = nn.functional.conv2d(impulses, self.down.double())
        if self.mid is not None:
            seen = nn.functional.conv2d(seen, self.mid.double())
        return nn.functional.conv2d(seen, self.up.double()).transpose(0, 1).flip(-1, -2)


def layer_of(weight: Tensor, seed: int, *, mid: bool = False, rank: int = RANK) -> Layer:
    generator = torch.Generator().manual_seed(seed)

    def drawn(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator) * 0.2

    rows, columns, *kernel = weight.shape
    ones = [1] * len(kernel)
    if mid:
        return Layer(drawn(rows, rank, *ones), drawn(rank, columns, *ones), drawn(rank, rank, *kernel))
    return Layer(drawn(rows, rank, *ones), drawn(rank, columns, *kernel))


def layers_of(module: nn.Module, names: Iterable[str], **options: bool) -> dict[str, Layer]:
    """A layer for each of some modules."""
    return {name: layer_of(module.get_parameter(f"{name}.weight"), seed, **options) for seed, name in enumerate(names)}


Layout = Callable[[str, Layer], dict[str, Tensor]]


def kohya(prefix: str = "lora_unet_") -> Layout:
    def tensors(name: str, layer: Layer) -> dict[str, Tensor]:
        start = prefix + name.replace(".", "_")
        mid = {} if layer.mid is None else {f"{start}.lora_mid.weight": layer.mid}
        ends = {f"{start}.lora_up.weight": layer.up, f"{start}.lora_down.weight": layer.down}
        return ends | mid | {f"{start}.alpha": torch.tensor(ALPHA)}

    return tensors


def peft(prefix: str) -> Layout:
    return lambda name, layer: {
        f"{prefix}{name}.lora_A.weight": layer.down,
        f"{prefix}{name}.lora_B.weight": layer.up,
    }


def diffusers(prefix: str) -> Layout:
    return lambda name, layer: {
        f"{prefix}{name}.lora.down.weight": layer.down,
        f"{prefix}{name}.lora.up.weight": layer.up,
    }


def old_diffusers(prefix: str) -> Layout:
    """Of processors of attention."""

    def tensors(name: str, layer: Layer) -> dict[str, Tensor]:
        attention, _, last = name.removesuffix(".0").rpartition(".")
        start = f"{prefix}{attention}.processor.{last}_lora"
        return {f"{start}.down.weight": layer.down, f"{start}.up.weight": layer.up}

    return tensors


def save(path: Path, layers: Mapping[str, Layer], layout: Layout, metadata: dict[str, str] | None = None) -> Path:
    tensors = {key: tensor for name, layer in layers.items() for key, tensor in layout(name, layer).items()}
    save_file({key: tensor.contiguous().clone() for key, tensor in tensors.items()}, path, metadata)
    return path


def with_deltas(state: Mapping[str, Tensor], deltas: Mapping[str, Tensor], factor: float) -> dict[str, Tensor]:
    """A state dict with differences added by hand, in double precision.

    Args:
        deltas: by the names of modules.
    """
    added = {f"{name}.weight": factor * delta for name, delta in deltas.items()}
    return {
        name: (x.double() + added[name].reshape(x.shape)).float() if name in added else x for name, x in state.items()
    }
