"""Weights of INT8 layers in a graph of 16-bit products.

`expand_layers` replaces `Int8Linear` and `Int8Conv` nodes by ordinary products, which other rewrites match, join and split. The
weights keep their integers. In the end products become INT8 (`quantise_products`), plugins, or stay in 16 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from trtconvert.export.storage import blocks_of
from trtconvert.linear.modes import LayerMode

Integers = Callable[[], np.ndarray]
"""Computes a weight's integers on demand, in any order of memory. Threads may call it at once."""


@dataclass(frozen=True)
class Activation:
    """The quantisation of a layer's input, equal for all layers of an input group.

    Attributes:
        input_group: name of the first layer of the group.
        scales: of each timestep bin.
        modes: `LayerMode` of each bin.
        timestep: [B] FP32; None for one bin.
        timestep_max: end of the last bin.
    """

    input_group: str
    scales: tuple[float, ...]
    modes: tuple[LayerMode, ...]
    timestep: ir.Value | None
    timestep_max: float

    @property
    def is_int8(self) -> bool:
        """True if activations are INT8 in some bin."""
        return any(mode != LayerMode.WEIGHT_ONLY for mode in self.modes)

    @property
    def is_mixed(self) -> bool:
        """True if activations are INT8 in some bins and 16-bit in others."""
        return self.is_int8 and LayerMode.WEIGHT_ONLY in self.modes


class Int8Weight(ir.LazyTensor):
    """A lazy 16-bit weight: integers times scales.

    Args:
        integers: INT8, of the weight's shape.
        scale: [N] FP32.
        axis: of the output channels.
        activation: of the input.
        dtype: of the 16-bit numbers.

    Attributes:
        integers_name: name of the integers. Tied weights with differently quantised inputs share it.
    """

    __slots__ = ("activation", "axis", "integers", "integers_name", "scale")

    def __init__(
        self,
        name: str,
        integers: Integers,
        shape: Sequence[int],
        scale: np.ndarray,
        axis: int,
        activation: Activation,
        dtype: ir.DataType,
    ) -> None:
        super().__init__(self._computed, dtype, ir.Shape(shape), name=name)
        self.integers, self.scale, self.axis, self.activation = integers, scale, axis, activation
        self.integers_name = f"{name}, INT8"

    def _computed(self) -> ir.Tensor:
        integers, shape = self.integers(), [1] * len(self.shape)
        shape[self.axis] = -1
        scale = np.broadcast_to(self.scale.reshape(shape), integers.shape)
        numbers = np.empty(integers.shape, self.dtype.numpy())
        for block in blocks_of(integers) if integers.ndim == 2 else (...,):
            numbers[block] = integers[block].astype(np.float32) * scale[block]
        return ir.Tensor(numbers, dtype=self.dtype)

    def part(self, name: str, axis: int, start: int, count: int) -> Int8Weight:
        """Returns a slice along an axis."""
        chosen = [slice(None)] * len(self.shape)
        chosen[axis] = slice(start, start + count)
        shape = list(self.shape.numpy())
        shape[axis] = count
        scale = self.scale[start : start + count] if axis == self.axis else self.scale
        integers = self.integers
        return Int8Weight(name, lambda: integers()[tuple(chosen)], shape, scale, self.axis, self.activation, self.dtype)

    def changed(
        self, name: str, change: Callable[[np.ndarray], np.ndarray], shape: Sequence[int], axis: int
    ) -> Int8Weight:
        """Returns the weight with rearranged integers.

        Args:
            axis: of the output channels in the result.
        """
        integers = self.integers
        # A view: plugins take linear layers transposed back.
        return Int8Weight(
            name, lambda: change(integers()).reshape(shape), shape, self.scale, axis, self.activation, self.dtype
        )

    @staticmethod
    def beside(name: str, weights: Sequence[Int8Weight]) -> Int8Weight:
        """Concatenates weights of one activation along their output channels."""
        first = weights[0]
        shape = list(first.shape.numpy())
        shape[first.axis] = sum(len(weight.scale) for weight in weights)
        parts = [weight.integers for weight in weights]

        def together() -> np.ndarray:
            return np.concatenate([part() for part in parts], axis=first.axis)

        scale = np.concatenate([weight.scale for weight in weights])
        return Int8Weight(name, together, shape, scale, first.axis, first.activation, first.dtype)


def int8_weight_of(value: ir.Value | None) -> Int8Weight | None:
    """Returns the INT8 weight of a value, if any."""
    tensor = value.const_value if value is not None else None
    return tensor if isinstance(tensor, Int8Weight) else None


def all_of_one_activation(tensors: Sequence[ir.TensorProtocol]) -> list[Int8Weight] | None:
    """Returns the tensors if all are INT8 weights of one activation, else None."""
    weights = [tensor for tensor in tensors if isinstance(tensor, Int8Weight)]
    alike = len(weights) == len(tensors) and len({(weight.activation, weight.axis) for weight in weights}) == 1
    return weights if alike else None
