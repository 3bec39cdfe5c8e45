"""Files of weights: reading, names of LoRAs, conversion to INT8, and models in memory with weights in INT8."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trtconvert.weights.loading import Int8Linear, load_quantized

__all__ = ["Int8Linear", "load_quantized"]


def __getattr__(name: str) -> Any:
    # Commands that only read headers of files need no torch.
    if name in __all__:
        from trtconvert.weights import loading

        return getattr(loading, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
