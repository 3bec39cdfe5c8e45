"""A model at the place where it computes: on a GPU in its own type, or on the CPU in FP32."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn

    from trtconvert.diffusion_model import Denoiser, DiffusionModel

ROOM = 1.3
"""Device memory that is wanted, in terms of the model's weights: activations, and the engine that is compared with the model."""


@dataclass(frozen=True)
class Place:
    """Where a model computes.

    Attributes:
        device: "cpu" or "cuda".
        dtype: of weights and activations, by torch's name. FP32 on a CPU.
        reason: why this device, for people.
    """

    device: str
    dtype: str
    reason: str

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"

    def reads(self) -> dict[str, str]:
        """What a stage's key reads of the place: devices and types round differently."""
        return {"device": self.device, "precision": self.dtype} if self.on_gpu else {}


def placed(model: DiffusionModel, place: Place) -> DiffusionModel:
    """A model whose denoiser computes at a place. On a GPU it is a copy; inputs are cast to its type, outputs are FP32.

    Modules that diffusers keeps in FP32 (`_keep_in_fp32_modules`) stay in FP32. The sampler and the pipeline's other models
    compute on the denoiser's device.
    """
    if not place.on_gpu:
        return model
    import torch

    from trtconvert.models.denoiser import on_device

    device, dtype = torch.device("cuda", torch.cuda.current_device()), getattr(torch, place.dtype)
    denoiser = _copied(model.denoiser, device, dtype)
    floating = {spec.name for spec in model.inputs if spec.dtype == "float32" and spec.name not in model.always_float32}
    names = [spec.name for spec in model.inputs]
    denoiser.register_forward_pre_hook(_casting(names, floating, dtype), with_kwargs=True)
    denoiser.register_forward_hook(_in_float32)
    return on_device(replace(model, denoiser=denoiser), "cuda")


def _copied(module: nn.Module, device: Any, dtype: Any) -> nn.Module:
    """A copy on a device, in a type."""
    import torch

    from trtconvert.diffusion_model import copied_with

    kept = {
        name
        for part in module.modules()
        for name in getattr(part, "_keep_in_fp32_modules", None) or ()
        if dtype != torch.float32
    }

    def there(name: str, x: Tensor) -> Tensor:
        if not x.is_floating_point():
            return x.to(device, copy=True)
        return x.to(device, torch.float32 if kept & {*name.split(".")} else dtype, copy=True)

    return copied_with(module, there).requires_grad_(False)


def _casting(names: Sequence[str], floating: set[str], dtype: Any) -> Callable[..., Any]:
    """A hook that casts a denoiser's inputs to its type, but for timesteps and whole numbers."""

    def cast(name: str, x: Any) -> Any:
        return x.to(dtype) if name in floating else x

    def hook(_: nn.Module, inputs: tuple[Any, ...], named: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        by_place = tuple(cast(name, x) for name, x in zip(names, inputs, strict=False))
        return by_place, {name: cast(name, x) for name, x in named.items()}

    return hook


def _in_float32(_: nn.Module, inputs: Any, output: Any) -> Tensor:
    from trtconvert.interception import first_tensor

    return first_tensor(output).float()


def denoiser_in_float32(model: DiffusionModel) -> Denoiser | None:
    """The denoiser in FP32 on the current GPU, to tell what its own type loses; None where it does not fit there.

    Args:
        model: not placed.
    """
    import torch

    from trtconvert.models.denoiser import intercepted

    size = sum(x.numel() * 4 for x in model.denoiser.parameters())
    if size * ROOM > torch.cuda.mem_get_info()[0]:
        return None
    device = torch.device("cuda", torch.cuda.current_device())
    return intercepted(replace(model, denoiser=_copied(model.denoiser, device, torch.float32)))


def empty_gpu(model: DiffusionModel) -> None:
    """Give back the device memory that a placed copy of a model took, and move the pipeline's other models to the CPU."""
    import gc

    import torch

    pipe = getattr(getattr(model.sample, "caller", None), "pipe", None)
    for part in pipe.components.values() if pipe is not None else ():
        if isinstance(part, torch.nn.Module):
            part.to("cpu")
    gc.collect()
    torch.cuda.empty_cache()
