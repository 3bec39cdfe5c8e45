"""Weights in files: read, named, converted to INT8; and models in memory that keep them so."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trtconvert.weights.loading import Int8Linear, load_quantized

__all__ = ["Int8Linear", "load_quantized"]


def __getattr__(name: str) -> Any:
    # Imported when it is asked for: commands that look at files alone do without torch.
    if name in __all__:
        from trtconvert.weights import loading

        return getattr(loading, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
