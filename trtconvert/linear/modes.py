"""How a layer computes in a timestep bin. Free of torch, so that the command line can name the modes without loading it."""

from enum import IntEnum


class LayerMode(IntEnum):
    """The values are the entries of the `modes` table of `Int8Linear` and `Int8Conv`.

    All modes but `EXACT` read one set of INT8 weights with a scale per output channel. They differ in the activations:
    """

    EXACT = 0
    """The layer stays as it is, in the model's own type. It does so in all bins or in none: an engine has one of both weights."""
    WEIGHT_ONLY = 1
    """W8A16: activations in the model's 16-bit type. The weights' error alone, half of their memory, no faster product."""
    DYNAMIC = 2
    """W8A8, a scale per token, measured while the layer runs: closest of the two, whatever the data. Not for convolutions."""
    STATIC = 3
    """W8A8, the calibrated scale of the timestep bin: no reduction over the data, so that it fuses with what comes before."""


INT8_PRODUCTS = (LayerMode.DYNAMIC, LayerMode.STATIC)
"""Modes whose product is INT8 × INT8."""
