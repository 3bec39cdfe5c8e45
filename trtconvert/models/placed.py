"""Puts a model where it computes: on a GPU in its own type, or on the CPU in FP32."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from trtconvert.errors import BackendUnavailable

if TYPE_CHECKING:
    from torch import Tensor, nn

    from trtconvert.diffusion_model import Denoiser, DiffusionModel

ROOM = 1.3
"""Device memory for a model in terms of its weights, with activations, and the engine that is compared with it."""


@dataclass(frozen=True)
class Place:
    """The place of a model's computation.

    Attributes:
        device: "cpu" or "cuda".
        dtype: of weights and activations, by torch's name. FP32 on a CPU.
        reason: for this device, for people.
        offload: whether weights stay in host memory and come to the GPU block by block. This changes no result.
    """

    device: str
    dtype: str
    reason: str
    offload: bool = False

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"

    def reads(self) -> dict[str, str]:
        """Returns the part of the place that stages' keys hold: devices and types round differently."""
        return {"device": self.device, "precision": self.dtype} if self.on_gpu else {}


def placed(model: DiffusionModel, place: Place, notice: Callable[[str], None] = lambda _: None) -> DiffusionModel:
    """Returns a model whose denoiser computes at a place. On a GPU it is a copy; inputs are cast to its type, outputs are FP32.

    Modules that diffusers keeps in FP32 (`_keep_in_fp32_modules`) stay in FP32. The sampler and the pipeline's other models
    compute on the denoiser's device. With `place.offload` the copy stays in host memory and is offloaded, and so are large ones
    of the other models, see `trtconvert.models.offloading`.

    Args:
        notice: gets a message where host memory is short.
    Raises:
        BackendUnavailable: the blocks that an offloaded model needs at once do not fit the GPU.
    """
    if not place.on_gpu:
        return model
    import torch

    from trtconvert.diffusion_model import weights_in_float32

    device = torch.device("cuda", torch.cuda.current_device())
    if place.offload:
        return offloaded(model, device, getattr(torch, place.dtype), notice)
    dtype = getattr(torch, place.dtype)
    denoiser = _copied(model.denoiser, device, dtype, wide=weights_in_float32(model, dtype))
    return _with_denoiser(model, denoiser, device, place.dtype)


def offloaded(model: DiffusionModel, device: Any, dtype: Any, notice: Callable[[str], None]) -> DiffusionModel:
    """Offloads a model, see `placed`.

    Args:
        device, dtype: of torch.
    """
    import torch

    from trtconvert.diffusion_model import weights_in_float32
    from trtconvert.models.denoiser import others_of
    from trtconvert.models.offloading import offload, offload_large_parts, pins, resident_bytes

    sizes = (x.numel() * (dtype.itemsize if x.is_floating_point() else x.itemsize) for x in model.denoiser.parameters())
    pinned = device.type == "cuda" and pins(sizes, model.name, notice)
    denoiser = _copied(model.denoiser, torch.device("cpu"), dtype, pinned, weights_in_float32(model, dtype))
    offload(denoiser, device)
    need = resident_bytes(denoiser) * ROOM
    if device.type == "cuda" and need > (free := torch.cuda.mem_get_info(device)[0]):
        raise BackendUnavailable(
            f"{model.name} does not fit the GPU, even with its weights in host memory",
            expected=f"{need / 2**30:.1f} GiB free: {ROOM:g} times its two largest blocks and its other layers",
            got=f"{free / 2**30:.1f} GiB free",
            remedy="end other programs on the GPU, take a larger one, or compute with --device cpu",
        )
    offload_large_parts(others_of(model), device.type == "cuda", notice)
    return replace(_with_denoiser(model, denoiser, device, str(dtype).removeprefix("torch.")), onload=device)


def _with_denoiser(model: DiffusionModel, denoiser: nn.Module, device: Any, dtype: str) -> DiffusionModel:
    import torch

    from trtconvert.mixed_types import compute_in_one_type
    from trtconvert.models.denoiser import sampled_from

    floating = {spec.name for spec in model.inputs if spec.dtype == "float32" and spec.name not in model.always_float32}
    names = [spec.name for spec in model.inputs]
    denoiser.register_forward_pre_hook(_casting(names, floating, getattr(torch, dtype)), with_kwargs=True)
    denoiser.register_forward_hook(_in_float32)
    if dtype != "float32":
        compute_in_one_type(denoiser)
    return sampled_from(replace(model, denoiser=denoiser), device)


def _copied(module: nn.Module, device: Any, dtype: Any, pinned: bool = False, wide: Collection[str] = ()) -> nn.Module:
    """Returns a copy on a device, in a type; a GPU copies from pinned host memory at full speed.

    Args:
        wide: names of weights in FP32.
    """
    import torch

    from trtconvert.diffusion_model import copied_with

    kept = {
        name
        for part in module.modules()
        for name in getattr(part, "_keep_in_fp32_modules", None) or ()
        if dtype != torch.float32
    }

    def there(name: str, x: Tensor) -> Tensor:
        there = x.to(device, copy=True)
        if x.is_floating_point():  # on the device, as the CPU would widen numbers and then copy more
            there = there.to(torch.float32 if name in wide or kept & {*name.split(".")} else dtype)
        return there.pin_memory() if pinned else there

    return copied_with(module, there).requires_grad_(False)


def _casting(names: Sequence[str], floating: set[str], dtype: Any) -> Callable[..., Any]:
    def cast(name: str, x: Any) -> Any:
        return x.to(dtype) if name in floating else x

    def hook(_: nn.Module, inputs: tuple[Any, ...], named: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        by_place = tuple(cast(name, x) for name, x in zip(names, inputs, strict=False))
        return by_place, {name: cast(name, x) for name, x in named.items()}

    return hook


def _in_float32(_: nn.Module, inputs: Any, output: Any) -> Tensor:
    from trtconvert.interception import first_tensor

    return first_tensor(output).float()


def fits_in_float32(model: DiffusionModel) -> bool:
    """Whether the current GPU has free memory for a copy of the denoiser in FP32, with activations."""
    import torch

    return sum(x.numel() * 4 for x in model.denoiser.parameters()) * ROOM <= torch.cuda.mem_get_info()[0]


def denoiser_in_float32(model: DiffusionModel) -> Denoiser | None:
    """Returns the denoiser in FP32 on the current GPU, to measure the error of its own type; None where it does not fit.

    Args:
        model: as loaded, not a copy of `placed`.
    """
    import torch

    from trtconvert.models.denoiser import intercepted

    if not fits_in_float32(model):
        return None
    device = torch.device("cuda", torch.cuda.current_device())
    return intercepted(replace(model, denoiser=_copied(model.denoiser, device, torch.float32)))


def empty_gpu(model: DiffusionModel) -> None:
    """Frees the device memory of a placed copy of a model, and moves the pipeline's other models to the CPU."""
    import torch

    from trtconvert.models.denoiser import others_of
    from trtconvert.models.offloading import move

    for part in others_of(model):
        if isinstance(part, torch.nn.Module):
            move(part, "cpu")
    collect_garbage()
    if hasattr(torch.accelerator, "empty_host_cache"):  # older torch keeps pinned memory until the process ends
        torch.accelerator.empty_host_cache()


def collect_garbage() -> None:
    """Frees the device memory of models without references. Models with hooks are reference cycles."""
    import gc

    import torch

    gc.collect()
    torch.cuda.empty_cache()
