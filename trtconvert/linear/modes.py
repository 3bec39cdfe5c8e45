"""Modes of layers in a timestep bin. Does not import torch: the command line names the modes."""

from enum import IntEnum


class LayerMode(IntEnum):
    """Entries of the `modes` table of `Int8Linear` and `Int8Conv`.

    All modes but `EXACT` read the same INT8 weights with a scale per output channel. They differ in the activations:
    """

    EXACT = 0
    """The layer in the model's own type, in all bins or in none: an engine has one set of weights."""
    WEIGHT_ONLY = 1
    """W8A16: activations in the model's 16-bit type. Only weights have errors and halve their memory; products are not faster."""
    DYNAMIC = 2
    """W8A8 with a scale per token, measured at run time: the more exact W8A8 mode. Not for convolutions."""
    STATIC = 3
    """W8A8 with the calibrated scale of the timestep bin: without a reduction, it fuses with the layer before."""


INT8_PRODUCTS = (LayerMode.DYNAMIC, LayerMode.STATIC)
"""Modes whose product is INT8 × INT8."""
