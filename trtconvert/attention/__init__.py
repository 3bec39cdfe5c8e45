"""Attention in INT8: the operator and its specification, timestep schedules, and the interception of sites.

This package exports the API for users of torch: `Int8Attention`, `fused_cfg`, `replace_attention_with_int8` and others.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trtconvert.attention.int4 import int4_attention
    from trtconvert.attention.masks import neighbourhood_mask, window_mask
    from trtconvert.attention.module import Int8Attention, fused_cfg
    from trtconvert.attention.pruning import block_mask_of_data, pruning_schedule
    from trtconvert.attention.replace import attention_report, replace_attention_with_int8, restore_attention
    from trtconvert.attention.schedules import compute_adaptive_scales, compute_sigma_schedule
    from trtconvert.attention.sequence_parallel import SequenceParallelAttention

__all__ = [
    "Int8Attention",
    "SequenceParallelAttention",
    "attention_report",
    "block_mask_of_data",
    "compute_adaptive_scales",
    "compute_sigma_schedule",
    "fused_cfg",
    "int4_attention",
    "neighbourhood_mask",
    "pruning_schedule",
    "replace_attention_with_int8",
    "restore_attention",
    "window_mask",
]

_PLACES = {
    "int4": ("int4_attention",),
    "masks": ("neighbourhood_mask", "window_mask"),
    "module": ("Int8Attention", "fused_cfg"),
    "pruning": ("block_mask_of_data", "pruning_schedule"),
    "replace": ("attention_report", "replace_attention_with_int8", "restore_attention"),
    "schedules": ("compute_adaptive_scales", "compute_sigma_schedule"),
    "sequence_parallel": ("SequenceParallelAttention",),
}
"""Exports by module. Imported on first access, so that the command line starts without torch."""


def __getattr__(name: str) -> Any:
    for module, names in _PLACES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
