"""What keeps a model from computing in a 16-bit type, told before anything is calibrated, by the module: values beyond float16's
range, and layers whose input stays in FP32."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from trtconvert.diffusion_model import DiffusionModel
from trtconvert.errors import UserError, first_line
from trtconvert.fake_tensors import shapes_alone
from trtconvert.interception import module_of

LARGEST = torch.finfo(torch.float16).max

_PRODUCTS = {functional.linear, functional.conv1d, functional.conv2d, functional.conv3d, functional.conv_transpose2d}


class _OneType(TorchFunctionMode):
    """Refuses products of tensors of two types, as kernels do; tensors without numbers are not always asked."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        given = (*args, *(kwargs or {}).values())
        if func in _PRODUCTS and len(found := {x.dtype for x in given if isinstance(x, Tensor)}) > 1:
            raise TypeError("tensors of different dtypes, " + " and ".join(sorted(map(str, found))))
        return func(*args, **(kwargs or {}))


_OF_TYPES = re.compile(r"dtype|scalar type|same type", re.IGNORECASE)
"""In torch's messages of tensors whose types differ."""


def refuse_mixed_types(model: DiffusionModel, dtype: torch.dtype) -> None:
    """Run a denoiser in another type on tensors without numbers, which takes neither time nor memory.

    Weights and floating-point inputs but the timestep are of the type, as when it is exported. What cannot be run so, as where
    values decide what is computed, is left to the export.

    Raises:
        UserError: a module reads a tensor of another type than its weights'.
    """
    sizes = {name: opt for name, (_, opt, _) in model.dims.items()}
    inputs = model.example(0, sizes)
    with shapes_alone(), torch.no_grad():
        weights = [x for x in (*model.denoiser.parameters(), *model.denoiser.buffers()) if x.is_floating_point()]

        def empty(x: Tensor) -> Tensor:
            there = torch.empty(x.shape, dtype=dtype)
            return nn.Parameter(there, False) if isinstance(x, nn.Parameter) else there

        without_numbers = {id(x): empty(x) for x in weights}
        with (
            unset_fake_temporarily()
        ):  # other tensors, such as Lumina's tables of rotations, are copied with their numbers
            denoiser = copy.deepcopy(model.denoiser, without_numbers)
        of_type = {
            name: torch.empty(
                x.shape, dtype=dtype if x.is_floating_point() and name != model.timestep_input else x.dtype
            )
            for name, x in inputs.items()
        }
        try:
            with _OneType():
                denoiser(**of_type)
        except Exception as error:  # whatever the model raises; its own words say whether it is a matter of types
            if not _OF_TYPES.search(str(error)):
                return
            name = str(dtype).removeprefix("torch.")
            raise UserError(
                f"{model.name} does not compute in {name}",
                expected="every module's input in the type of its weights; the timestep comes in float32",
                got=f"{module_of(denoiser, error) or 'its forward'}: {first_line(error)}",
                remedy="cast what it reads where it is computed, as features of the timestep by .to(self.weight.dtype), or set "
                "model.dtype to float32",
            ) from error


@contextmanager
def fitting(model: DiffusionModel, dtype: str, loaded: DiffusionModel) -> Iterator[None]:
    """Around a forward of a denoiser in full precision: whether it computes in a type of engines.

    Args:
        loaded: the model as it was loaded, which was not placed anywhere.
    Raises:
        UserError: see `refuse_mixed_types`, and at the end `within_float16`.
    """
    if dtype in ("float16", "bfloat16"):
        refuse_mixed_types(loaded, getattr(torch, dtype))
    with within_float16(model) if dtype == "float16" else nullcontext():
        yield


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
