"""Denoisers around other denoisers, and modules around other modules."""

from __future__ import annotations

import copy
from typing import Any, Self


class WrappedDenoiser:
    """A denoiser around another one.

    Samplers read attributes of denoisers: the guidance that they apply, the steps that they may skip, their device and their
    caches. Attributes that the wrapper does not define are those of the denoiser inside.
    """

    def __init__(self, denoiser: Any) -> None:
        self._denoiser = denoiser

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        return self._denoiser(*inputs, **named)

    def apart(self) -> Self:
        """Returns the same wrapper around a denoiser with its own caches; itself if the denoiser has no caches."""
        inside = apart(self._denoiser)
        if inside is self._denoiser:
            return self
        copied = copy.copy(self)
        copied._denoiser = inside
        return copied

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._denoiser, name)


def apart(denoiser: Any) -> Any:
    """Returns a denoiser with its own caches, or the denoiser itself if it has none."""
    return denoiser.apart() if hasattr(denoiser, "apart") else denoiser


def begin(denoiser: Any) -> None:
    """Tells a denoiser with caches that a sampler begins."""
    reset = getattr(denoiser, "reset_cache", None)
    if callable(reset):
        reset()


def uncompiled(module: Any) -> Any:
    """Returns the module that torch.compile wraps; other modules as they are."""
    return getattr(module, "_orig_mod", module)
