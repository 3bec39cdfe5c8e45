"""Precision modes of one attention call. Free of torch, so that the command line can name them without loading it."""

from enum import IntEnum


class Mode(IntEnum):
    """How one timestep bin of one attention site computes. The values are the entries of the op's `modes` table.

    All modes keep the softmax in FP32. They differ in the two products:
    """

    FP16 = 0
    """Both products in the model's 16-bit type: the fallback for a site that cannot be quantised."""
    PRECISION = 1
    """INT8 QKᵀ, 16-bit PV: for the last, low-noise steps, which draw the fine detail."""
    BALANCED = 2
    """INT8 QKᵀ and INT8 PV with one scale per value token."""
    AGGRESSIVE = 3
    """INT8 QKᵀ and INT8 PV with calibrated scales only: for the first, high-noise steps."""
