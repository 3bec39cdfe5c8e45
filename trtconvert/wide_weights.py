"""Finds weights that only features of timesteps and positions meet, in FP32: frequencies, for example. A 16-bit type would round
them, and a product with a position of a thousand turns that into an error of a radian."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils.weak import WeakIdKeyDictionary

from trtconvert.fake_tensors import shapes_alone
from trtconvert.mixed_types import OF_WEIGHTS, OneType, is_matrix_product, tensors_in

_found: WeakKeyDictionary[nn.Module, frozenset[str]] = WeakKeyDictionary()
"""The names by denoiser."""


_OF_TYPE = (Tensor.type_as, Tensor.to)


def wide_weights(denoiser: nn.Module, inputs: Mapping[str, Tensor], timestep_input: str) -> frozenset[str]:
    """Returns the names of parameters and buffers that stay in FP32 where others get a 16-bit type.

    They are found on fake tensors. Empty for denoisers that cannot run on fake tensors.

    Args:
        inputs: examples by name.
    """
    if denoiser not in _found:
        _found[denoiser] = _wide_weights(denoiser, inputs, timestep_input)
    return _found[denoiser]


def in_16_bits(
    denoiser: nn.Module, inputs: Mapping[str, Tensor], timestep_input: str, dtype: torch.dtype
) -> tuple[nn.Module, dict[str, Tensor]]:
    """Returns a copy of a denoiser and its inputs in another type, without values. The timestep keeps its type.

    Call it on fake tensors, see `shapes_alone`.
    """
    weights = [x for x in (*denoiser.parameters(), *denoiser.buffers()) if x.is_floating_point()]

    def empty(x: Tensor) -> Tensor:
        there = torch.empty(x.shape, dtype=dtype)
        return nn.Parameter(there, False) if isinstance(x, nn.Parameter) else there

    without_values = {id(x): empty(x) for x in weights}
    with unset_fake_temporarily():  # other tensors, such as Lumina's tables of rotations, keep their values
        copied = copy.deepcopy(denoiser, without_values)
    of_type = {
        name: torch.empty(x.shape, dtype=dtype if x.is_floating_point() and name != timestep_input else x.dtype)
        for name, x in inputs.items()
    }
    return copied, of_type


def _wide_weights(denoiser: nn.Module, inputs: Mapping[str, Tensor], timestep_input: str) -> frozenset[str]:
    with shapes_alone(), torch.no_grad():
        copied, of_type = in_16_bits(denoiser, inputs, timestep_input, torch.float16)
        named = (*copied.named_parameters(), *copied.named_buffers())
        follow = _Features({name: x for name, x in named if x.is_floating_point()}, of_type[timestep_input])
        try:
            with follow:
                copied(**of_type)
        except Exception:  # the check of types tells it
            return frozenset()
    return frozenset(follow.met - follow.narrow)


class _Features(OneType):
    """Follows tensors of one forward that only the timestep, positions and weights decide.

    Attributes:
        met: names of weights that features in FP32 meet, other than in layers; narrow: of those that meet other tensors.
    """

    def __init__(self, weights: Mapping[str, Tensor], timestep: Tensor) -> None:
        super().__init__()
        self.met: set[str] = set()
        self.narrow: set[str] = set()
        self._features = WeakIdKeyDictionary()
        self._features[timestep] = True
        self._of = WeakIdKeyDictionary()
        for name, x in weights.items():
            self._of[x] = frozenset([name])

    def __torch_function__(self, func, types, args=(), kwargs=None):
        read = [*tensors_in([*args, *(kwargs or {}).values()], floating=False)]
        result = super().__torch_function__(func, types, args, kwargs)
        floating = [x for x in read if x.is_floating_point()]
        names = frozenset[str]().union(*(self._of[x] for x in floating if x in self._of))
        # Numbers that get the type of a weight are computed with it next.
        of_type = func in _OF_TYPE and len(read) > 1 and read[0] not in self._of
        others = [x for x in floating if x not in self._of]
        features = all(x in self._features for x in others)
        layer = func in OF_WEIGHTS or is_matrix_product(func, floating)
        if names and (layer or not features):
            self.narrow |= names
        elif names and (others or of_type):
            self.met |= names
        for x in tensors_in([result]):
            if names and not others and not layer and not of_type:
                self._of[x] = names
            elif features and not layer and (read or x.dtype == torch.float32):
                self._features[x] = True
        return result
