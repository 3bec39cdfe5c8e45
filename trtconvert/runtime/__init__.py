"""Running bundles. Imports neither diffusers nor ONNX tooling, but for what LoRAs of an engine begin with."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trtconvert.runtime.bundles import LoadedBundle, load
    from trtconvert.runtime.reuse import follow

__all__ = ["LoadedBundle", "follow", "load"]


def __getattr__(name: str) -> Any:
    # Imported when it is asked for: modules of models take single modules from here, which do without engines.
    if name == "follow":
        from trtconvert.runtime import reuse

        return reuse.follow
    if name in __all__:
        from trtconvert.runtime import bundles

        return getattr(bundles, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
