"""Precision modes of one attention call. Free of torch, so that the command line can name them without loading it."""

from collections.abc import Mapping
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
    FP8 = 4
    """INT8 QKᵀ as in `PRECISION`, PV in FP8 (E4M3) with calibrated scales of the values: fastest for long sequences on Hopper.
    Its relative error is 0.04, or 0.09 with an attention sink, where those of `AGGRESSIVE` are 0.02 and 0.15. Where there is no
    kernel for it (on GPUs other than sm_90a, with at most 128 keys, more than 128 channels, a general mask) a GPU computes
    `PRECISION`, which is closer to exact attention; the specification and the ONNX function body always compute FP8."""


INT8_VALUES = (Mode.BALANCED, Mode.AGGRESSIVE)
"""Modes whose second product is INT8 too."""

MEASURED_SCALES = (Mode.PRECISION, Mode.BALANCED, Mode.FP8)
"""Modes in which the scales of queries and keys may be measured while they run (`scaling: dynamic`)."""

Scaling = str | Mapping[str, str]
"""`calibrated` or `dynamic`, of all sites or by site."""


def scaling_at(scaling: Scaling, site: str) -> str:
    """That of one site."""
    return scaling if isinstance(scaling, str) else scaling[site]
