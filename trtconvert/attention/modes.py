"""Precision modes of one attention call. Does not import torch, so that the command line can name the modes quickly."""

from collections.abc import Mapping
from enum import IntEnum


class Mode(IntEnum):
    """Precision mode of one timestep bin at one attention site. The values are the entries of the op's `modes` table.

    All modes keep the softmax in FP32. The modes differ in the two products.
    """

    FP16 = 0
    """Both products in the model's 16-bit type: the fallback for sites that cannot be quantised."""
    PRECISION = 1
    """INT8 QKᵀ, 16-bit PV: for the last, low-noise steps, which add fine detail."""
    BALANCED = 2
    """INT8 QKᵀ and INT8 PV with one scale per value token."""
    AGGRESSIVE = 3
    """INT8 QKᵀ and INT8 PV with calibrated scales, for the first, high-noise steps. Tiles of 128 keys with a small value token
    have the arithmetic of `BALANCED`: an attention sink, whose value is small, keeps its precision."""
    FP8 = 4
    """INT8 QKᵀ as in `PRECISION`, PV in FP8 (E4M3) with calibrated value scales: fastest for long sequences on Hopper.
    Relative error 0.04, or 0.1 with an attention sink among 16,384 keys (`AGGRESSIVE`: 0.02 and 0.016). A GPU computes
    `PRECISION`, which is closer to exact attention, where there is no FP8 kernel: on GPUs other than sm_90a, with at most 128
    keys, more than 128 channels, or a general mask. The specification and the ONNX function body always compute FP8."""


PRECISION_MODES = ("auto", *(mode.name.lower() for mode in Mode))
"""Values of the option `precision_mode`."""


INT8_VALUES = (Mode.BALANCED, Mode.AGGRESSIVE)
"""Modes with an INT8 second product."""

MEASURED_SCALES = (Mode.PRECISION, Mode.BALANCED, Mode.FP8)
"""Modes that may measure the scales of queries and keys at run time (`scaling: dynamic`)."""

Scaling = str | Mapping[str, str]
"""`calibrated` or `dynamic`, for all sites or by site."""


def scaling_at(scaling: Scaling, site: str) -> str:
    """Returns the scaling of one site."""
    return scaling if isinstance(scaling, str) else scaling[site]
