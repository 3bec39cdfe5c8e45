"""A reference call of a text encoder or of a part of the VAE. Engines of the component are compared with it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from trtconvert.bundle import ComponentRecord
from trtconvert.diffusion_model import ModelComponent
from trtconvert.documents import require_plain_types, safetensors_header
from trtconvert.errors import UserError, first_line
from trtconvert.models.recorded_calls import relative_error
from trtconvert.weights.finite import count_not_finite, is_finite

MOST_KEPT = 2**22
"""Values kept of an output: the whole output of a video VAE has hundreds of megabytes."""

_INPUTS, _OUTPUTS = "inputs/", "outputs/"


@dataclass(frozen=True)
class ComponentExample:
    """One call of a component.

    Attributes:
        inputs: by name, in the order of the signature, as the pipeline passes them.
        outputs: by name, in the order of the signature, from torch in FP32. Flat; outputs of more than `MOST_KEPT` values are
            subsampled.
    """

    inputs: Mapping[str, Tensor]
    outputs: Mapping[str, Tensor]

    @staticmethod
    def of(source: ModelComponent, device: torch.device) -> ComponentExample:
        """Computes the outputs in FP32.

        Args:
            device: to compute on; falls back to the CPU if the GPU runs out of memory.
        Raises:
            UserError: an output is not finite in FP32, so that no engine could pass.
        """
        try:
            outputs = _computed(source, device)
        except torch.cuda.OutOfMemoryError:
            outputs = _computed(source, torch.device("cpu"))
        inputs = {spec.name: source.example[spec.name] for spec in source.inputs}
        by_name = {spec.name: x for spec, x in zip(source.outputs, outputs, strict=True)}
        for name, x in by_name.items():
            if not is_finite(x):
                raise UserError(
                    f"{source.name} cannot be converted: its output '{name}' is not finite in FP32",
                    expected="finite numbers from the inputs that the pipeline passes",
                    got=count_not_finite(x),
                    remedy=f"get the weights of {source.name} again; or leave {source.name} out of the recipe's section "
                    "components (name the others in place of `all`), and pass the model itself to the bundle's pipeline",
                )
        return ComponentExample(inputs, {name: _kept(x) for name, x in by_name.items()})

    def save(self, path: Path) -> None:
        """Writes a safetensors file. Names hold the order, which the format does not keep."""
        tensors = dict[str, Tensor]()
        for prefix, part in ((_INPUTS, self.inputs), (_OUTPUTS, self.outputs)):
            # Copies: safetensors refuses views of one memory.
            tensors |= {
                f"{prefix}{place}/{name}": x.clone(memory_format=torch.contiguous_format)
                for place, (name, x) in enumerate(part.items())
            }
        save_file(tensors, path)

    @staticmethod
    def load(path: Path, component: ComponentRecord) -> ComponentExample:
        """Reads a file that `save` wrote.

        Args:
            component: of the call.
        Raises:
            UserError: `save` did not write the file for this component, or the file is damaged.
        """
        try:
            require_plain_types(safetensors_header(path))
            tensors = load_file(path)
            inputs, outputs = (
                {spec.name: f"{prefix}{place}/{spec.name}" for place, spec in enumerate(specs)}
                for prefix, specs in ((_INPUTS, component.inputs), (_OUTPUTS, component.outputs))
            )
            if tensors.keys() != {*inputs.values(), *outputs.values()}:
                raise ValueError(f"tensors {', '.join(sorted(tensors)) or 'none'}")
        except (OSError, ValueError, SafetensorError) as error:
            raise _no_example(path, first_line(error)) from error
        for name, key in outputs.items():
            x = tensors[key]
            if x.dim() != 1 or x.dtype != torch.float32 or not is_finite(x):
                raise _no_example(path, f"an output '{name}' that is no list of finite numbers in FP32")
        return ComponentExample(*({name: tensors[key] for name, key in part.items()} for part in (inputs, outputs)))

    def errors(self, converted: Callable[..., Any]) -> dict[str, float]:
        """Returns the relative L2 error of each output, NaN where an output is not finite.

        Args:
            converted: takes the inputs by position, and returns a tensor or a tuple of tensors in the order of the outputs.
        Raises:
            UserError: an output has another size than the kept one.
        """
        got = converted(*self.inputs.values())
        got = got if isinstance(got, tuple) else (got,)
        errors = dict[str, float]()
        for (name, expected), ours in zip(self.outputs.items(), got, strict=True):
            kept = _kept(ours)
            if len(kept) != len(expected):
                raise UserError(
                    f"the output '{name}' cannot be compared with the one that the bundle holds",
                    expected=f"{len(expected)} values of the output of a recorded call",
                    got=f"{len(kept)}, of an output of shape {list(ours.shape)}",
                    remedy="build the bundle again",
                )
            errors[name] = relative_error(kept.float().cpu(), expected) if is_finite(ours) else math.nan
        return errors


def _kept(x: Tensor) -> Tensor:
    # An odd step: widths are even, and an even step would sample only some positions of the VAE's patches.
    return x.flatten()[:: max(1, math.ceil(x.numel() / MOST_KEPT)) | 1]


def _no_example(path: Path, got: str) -> UserError:
    return UserError(
        f"{path} does not hold the call of a component",
        expected="its inputs, and its outputs in FP32, as a build writes them",
        got=got,
        remedy="build the bundle again",
    )


def _computed(source: ModelComponent, device: torch.device) -> list[Tensor]:
    """Returns the outputs on the CPU. The component starts and ends on the CPU."""
    inputs = [source.example[spec.name].to(device) for spec in source.inputs]
    try:
        with torch.no_grad():
            return [x.float().cpu() for x in source.module.to(device)(*inputs)]
    finally:
        source.module.to("cpu")
        if device.type == "cuda":
            torch.cuda.empty_cache()
