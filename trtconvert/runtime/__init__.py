"""Runs bundles. Imports no diffusers, and no ONNX tooling except for LoRAs of engines."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trtconvert.runtime.bundles import LoadedBundle, load
    from trtconvert.runtime.reuse import follow

__all__ = ["LoadedBundle", "follow", "load"]


def __getattr__(name: str) -> Any:
    # Imported on demand: trtconvert.models imports single modules of this package that need no engines.
    if name == "follow":
        from trtconvert.runtime import reuse

        return reuse.follow
    if name in __all__:
        from trtconvert.runtime import bundles

        return getattr(bundles, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
