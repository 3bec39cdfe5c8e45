"""Layers with a quantisation that follows a sampler's trajectory: modulation (MoDiff) and Q-Diff's calibration."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trtconvert.modiff.calibration import Calibration
    from trtconvert.modiff.layers import ModulatedConv2d, ModulatedLinear, State
    from trtconvert.modiff.modulated import Modulated, modulate
    from trtconvert.modiff.qdiff import calibrate, record
    from trtconvert.modiff.rounding import AdaRound
    from trtconvert.modiff.settings import Settings

_PLACES = {
    "Calibration": "calibration",
    "Modulated": "modulated",
    "ModulatedConv2d": "layers",
    "ModulatedLinear": "layers",
    "AdaRound": "rounding",
    "Settings": "settings",
    "State": "layers",
    "calibrate": "qdiff",
    "modulate": "modulated",
    "record": "qdiff",
}

__all__ = [
    "AdaRound", "Calibration", "Modulated", "ModulatedConv2d", "ModulatedLinear", "Settings", "State", "calibrate", "modulate",
    "record",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    # Lazy: commands that only read files do not import torch.
    if name in _PLACES:
        from importlib import import_module

        return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
