"""Models whose layers quantise deltas from step to step, as graphs, and the same arithmetic in torch."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property

import onnx
import onnx_ir as ir
import onnxruntime
import torch
from layered_graphs import Int8Model, as_written, int8_model
from torch import Tensor

from trtconvert.bundle import NEXT
from trtconvert.diffusion_model import DiffusionModel
from trtconvert.export.delta_caches import LAST
from trtconvert.export.trace import in_type
from trtconvert.models.denoiser import intercepted
from trtconvert.quant.forward import Int8Layers

STEPS = (900.0, 700.0, 400.0, 100.0)
"""Timesteps of a trajectory, in both bins."""


def delta_model(
    model: DiffusionModel | None = None, unchanged: Sequence[str] = (), divisor: float = 4.0, **options
) -> Int8Model:
    """See `int8_model`; deltas have a scale that is so many times smaller than that of whole activations.

    Args:
        unchanged: layers that compute every step by itself.
    """
    if model is None:
        return _of_tiny_layers(tuple(unchanged), divisor, **options)
    return _of_model(int8_model(model, **options), unchanged, divisor)


@functools.cache
def _of_tiny_layers(unchanged: tuple[str, ...], divisor: float, **options) -> Int8Model:
    return _of_model(int8_model(**options), unchanged, divisor)


def _of_model(made: Int8Model, unchanged: Sequence[str], divisor: float) -> Int8Model:
    layers = {
        name: layer if name in unchanged else replace(layer, delta_scale=layer.tables.x_scale / divisor)
        for name, layer in made.layers.items()
    }
    return replace(made, layers=layers, _traced={})


class InTorch:
    """The model in the specification's arithmetic, its caches kept from call to call."""

    def __init__(self, made: Int8Model, dtype: torch.dtype = torch.float32) -> None:
        scales = {name: layer.delta_scale for name, layer in made.layers.items() if layer.delta_scale is not None}
        tables = {name: layer.tables for name, layer in made.layers.items()}
        layers = Int8Layers(tables, made.model.timestep_max, scales, made.model.timesteps_fall)
        self._denoiser = in_type(intercepted(made.model, layers=layers.handler()), dtype)

    @torch.no_grad()
    def __call__(self, **inputs: Tensor) -> Tensor:
        return self._denoiser(**inputs)


class InOnnxRuntime:
    """A graph, its caches kept from call to call."""

    def __init__(self, model: ir.Model) -> None:
        self._proto = ir.to_proto(model)
        onnx.checker.check_model(self._proto, full_check=True)
        self.caches: dict[str, Tensor] = {}

    @cached_property
    def session(self) -> onnxruntime.InferenceSession:
        return as_written(self._proto)

    def __call__(self, **inputs: Tensor) -> Tensor:
        found = self.session.run(None, self._feeds(inputs))
        output, *caches = (torch.from_numpy(x) for x in found)
        names = [value.name.removesuffix(NEXT) for value in self.session.get_outputs()[1:]]
        self.caches = dict(zip(names, caches, strict=True))
        return output

    def _feeds(self, inputs: Mapping[str, Tensor]):
        batch, types = len(inputs["x"]), {"tensor(float)": torch.float32, "tensor(float16)": torch.float16}
        for value in self.session.get_inputs():
            if value.name not in inputs and value.name not in self.caches:
                shape = [size if isinstance(size, int) else batch for size in value.shape]
                # What caches hold before the first call is not read.
                filled = float("-inf") if value.name == LAST else float("nan")
                self.caches[value.name] = torch.full(shape, filled, dtype=types[value.type])
        return {name: x.numpy() for name, x in (self.caches | dict(inputs)).items()}


def trajectory(made: Int8Model, dtype: torch.dtype = torch.float32, batch: int = 2) -> list[dict[str, Tensor]]:
    """Inputs of steps that follow each other: an image that comes out of noise."""
    first, last = (made.example(dtype, batch)["x"], torch.randn(1, generator=torch.Generator().manual_seed(9)))
    image = torch.full_like(first, float(last))
    steps = STEPS if made.model.timesteps_fall else tuple(1000 - t for t in STEPS)
    noise = [t / 1000 if made.model.timesteps_fall else 1 - t / 1000 for t in steps]
    return [
        {"x": (share * first.float() + (1 - share) * image.float()).to(dtype), "timestep": torch.full((batch,), t)}
        for t, share in zip(steps, noise, strict=True)
    ]
