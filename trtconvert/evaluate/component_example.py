"""What the engine of a text encoder or of a half of the VAE is compared with, wherever the engine is built."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from trtconvert.diffusion_model import ModelComponent
from trtconvert.evaluate.recorded_calls import relative_error

MOST_KEPT = 2**22
"""Values of an output that are kept: the outputs of a video's VAE would make a bundle larger by hundreds of megabytes."""

_INPUTS, _OUTPUTS = "inputs/", "outputs/"


@dataclass(frozen=True)
class ComponentExample:
    """One call of a component.

    Attributes:
        inputs: by name, in the order of the signature, as the pipeline passes them.
        outputs: by name, in the order of the signature, in FP32 as torch computes them: flat, and of more than `MOST_KEPT` values
            every n-th.
    """

    inputs: Mapping[str, Tensor]
    outputs: Mapping[str, Tensor]

    @staticmethod
    def of(source: ModelComponent, device: torch.device) -> ComponentExample:
        """Compute the outputs in FP32.

        Args:
            device: where the component computes meanwhile; a component that does not fit a GPU computes on the CPU.
        """
        try:
            outputs = _computed(source, device)
        except torch.cuda.OutOfMemoryError:
            outputs = _computed(source, torch.device("cpu"))
        inputs = {spec.name: source.example[spec.name] for spec in source.inputs}
        return ComponentExample(inputs, {spec.name: _kept(x) for spec, x in zip(source.outputs, outputs, strict=True)})

    def save(self, path: Path) -> None:
        """Write the call to a safetensors file. Names carry the order, which the format does not keep."""
        tensors = dict[str, Tensor]()
        for prefix, part in ((_INPUTS, self.inputs), (_OUTPUTS, self.outputs)):
            # A copy: tensors of one call may share memory, which the format refuses.
            tensors |= {
                f"{prefix}{place}/{name}": x.clone(memory_format=torch.contiguous_format)
                for place, (name, x) in enumerate(part.items())
            }
        save_file(tensors, path)

    @staticmethod
    def load(path: Path) -> ComponentExample:
        """The call of a file that `save` wrote."""
        tensors = load_file(path)

        def part(prefix: str) -> dict[str, Tensor]:
            found = dict[int, tuple[str, Tensor]]()
            for key, x in tensors.items():
                if key.startswith(prefix):
                    place, _, name = key.removeprefix(prefix).partition("/")
                    found[int(place)] = name, x
            return dict(found[place] for place in sorted(found))

        return ComponentExample(part(_INPUTS), part(_OUTPUTS))

    def errors(self, converted: Callable[..., Any]) -> dict[str, float]:
        """Relative L2 error of each output; NaN where an output is not finite.

        Args:
            converted: takes the inputs by position and gives one tensor, or a tuple of several in the order of the outputs.
        """
        got = converted(*self.inputs.values())
        got = got if isinstance(got, tuple) else (got,)
        return {
            name: relative_error(_kept(ours.float().cpu()), expected) if bool(ours.isfinite().all()) else math.nan
            for (name, expected), ours in zip(self.outputs.items(), got, strict=True)
        }


def _kept(x: Tensor) -> Tensor:
    """What is kept of an output."""
    return x.flatten()[:: max(1, math.ceil(x.numel() / MOST_KEPT))]


def _computed(source: ModelComponent, device: torch.device) -> list[Tensor]:
    """The outputs on the CPU. The component is on the CPU before and after."""
    inputs = [source.example[spec.name].to(device) for spec in source.inputs]
    try:
        with torch.no_grad():
            return [x.float().cpu() for x in source.module.to(device)(*inputs)]
    finally:
        source.module.to("cpu")
        if device.type == "cuda":
            torch.cuda.empty_cache()
