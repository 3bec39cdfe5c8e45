"""What leaves the range of float16 in a model: told before anything is calibrated, by the module that computes it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from trtconvert.diffusion_model import DiffusionModel
from trtconvert.errors import UserError

LARGEST = torch.finfo(torch.float16).max


@contextmanager
def within_float16(model: DiffusionModel) -> Iterator[None]:
    """Watch what the modules of a denoiser give in the block, a forward of it in full precision.

    Of functions between modules nothing is seen; what they give is what a later module reads, in most models.

    Raises:
        UserError: at the end, where weights or a module's outputs are finite and beyond 65,504, which float16 has no number for.
    """
    beyond: dict[str, float] = {}

    def note(name: str, x: Any) -> None:
        if isinstance(x, Tensor) and x.dtype in (torch.float32, torch.float64) and x.numel():
            largest = float(x.detach().abs().nan_to_num(posinf=0.0).amax())
            if largest > LARGEST:
                beyond[name] = max(largest, beyond.get(name, 0.0))

    handles = [
        module.register_forward_hook(
            lambda _m, _x, out, name=name: note(name, out[0] if isinstance(out, tuple) else out)
        )
        for name, module in model.denoiser.named_modules()
        if not any(module.children())
    ]
    try:
        for name, parameter in model.denoiser.named_parameters():
            note(name, parameter)
        yield
    finally:
        for handle in handles:
            handle.remove()
    if beyond:
        first, others = next(iter(beyond.items())), len(beyond) - 1
        raise UserError(
            f"{model.name} leaves the range of float16",
            expected=f"magnitudes up to {LARGEST:,.0f} in its weights and in what its modules give",
            got=f"{first[1]:.3g} at {first[0]}" + (f", and more at {others} others" if others else ""),
            remedy="set model.dtype to bfloat16, which has the range of float32, or to float32",
        )
