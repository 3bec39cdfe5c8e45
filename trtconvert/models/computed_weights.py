"""Keeps weights that a forward computes from other weights, so that layers can refer to them: weights of EDM2, equalised learning
rates, weight standardisation, biases that are joined from parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from trtconvert.diffusion_model import DiffusionModel
from trtconvert.fake_tensors import shapes_alone
from trtconvert.interception import InterceptedDenoiser
from trtconvert.linear.sites import LayerCall, computed_name, layer_hooks, model_tensors
from trtconvert.mixed_types import tensors_in
from trtconvert.runtime.signature import shape_of

Made = Callable[[], Tensor]
"""Computes a tensor from a model's weights."""


def keep_computed_weights(model: DiffusionModel) -> None:
    """Registers weights and biases of layers that are computed from weights alone as buffers of the calling modules, by their
    `computed_name`.

    They are found on fake tensors. Models that cannot run on fake tensors stay as they are.
    """
    weights, found = model_tensors(model.denoiser), dict[str, Made]()
    sizes = {name: opt for name, (_, opt, _) in model.dims.items()}
    with shapes_alone(model.denoiser), torch.no_grad():
        own = (*model.denoiser.named_parameters(), *model.denoiser.named_buffers())
        follow = _FromWeights({name: x for name, x in own}, weights)

        def note(call: LayerCall) -> Tensor:
            for what, x in (("weight", call.weight), ("bias", call.bias)):
                if (made := follow.made(x)) is not None:
                    found[computed_name(model.denoiser, call.name, what)] = made
            return call.exact()

        names = [spec.name for spec in model.inputs]
        denoiser = InterceptedDenoiser(
            model.denoiser, names, model.timestep_input, layer_hooks(note), around=lambda _: follow
        )
        inputs = {
            spec.name: torch.empty(shape_of(spec.shape, sizes), dtype=getattr(torch, spec.dtype))
            for spec in model.inputs
        }
        try:
            denoiser(**inputs)
        except Exception:  # whatever models raise on fake tensors, or at all: the build tells it later
            return
    storages = {x.untyped_storage().data_ptr() for x in weights.values()}
    for name, made in found.items():
        with torch.no_grad():
            value = made()
        if value.untyped_storage().data_ptr() not in storages:  # layers refer to views of weights themselves
            path, _, buffer = name.rpartition(".")
            model.denoiser.get_submodule(path).register_buffer(buffer, value.contiguous(), persistent=False)


class _FromWeights(TorchFunctionMode):
    """Follows tensors that are computed from weights alone. Functions in place are not followed: `LayerFinder` compares what is
    kept with the weights of a forward.

    Args:
        own: tensors of the model by name, without values; weights: the same with values.
    """

    def __init__(self, own: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._made = WeakIdKeyDictionary()
        self._computed = WeakIdKeyDictionary()
        for name, x in own.items():
            self._made[x] = lambda name=name: weights[name]

    def __torch_function__(self, func, types, args=(), kwargs=None):
        named = kwargs or {}
        result = func(*args, **named)
        read = [*tensors_in([*args, *named.values()], floating=False)]
        if read and all(x in self._made for x in read):
            several = isinstance(result, (tuple, list))
            for place, x in enumerate(result if several else [result]):
                if isinstance(x, Tensor) and not any(x is other for other in read):
                    self._made[x] = self._later(func, args, named, place if several else None)
                    self._computed[x] = True
        return result

    def made(self, x: Tensor | None) -> Made | None:
        """Returns the computation of a tensor from weights; None if it is a weight, or if more than weights decides it."""
        return self._made.get(x) if x is not None and x in self._computed else None

    def _later(self, func: Callable[..., Any], args: Any, named: Mapping[str, Any], place: int | None) -> Made:
        later = {id(x): self._made[x] for x in tensors_in([*args, *named.values()], floating=False)}

        def value(x: Any) -> Any:
            if isinstance(x, (tuple, list)):
                entries = [value(entry) for entry in x]
                return tuple(entries) if isinstance(x, tuple) else entries
            return later[id(x)]() if isinstance(x, Tensor) else x

        def compute() -> Tensor:
            result = func(*map(value, args), **{name: value(x) for name, x in named.items()})
            return result if place is None else result[place]

        return compute
