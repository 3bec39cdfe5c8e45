"""Checks before a calibration that a model can compute in a 16-bit type: values within float16's range, and no types that torch
cannot compute with. Errors name the module."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from trtconvert.attention.ranges import Rows
from trtconvert.calib.layer_observer import LayerRows
from trtconvert.diffusion_model import DiffusionModel
from trtconvert.errors import UserError, first_line
from trtconvert.fake_tensors import shapes_alone
from trtconvert.interception import module_of
from trtconvert.mixed_types import OneType, tensors_in
from trtconvert.wide_weights import in_16_bits

LARGEST = torch.finfo(torch.float16).max

_OF_TYPES = re.compile(r"dtype|scalar type|same type", re.IGNORECASE)
"""Matches torch's messages about tensors of different types."""


class _NotCopied(Exception):
    """A copy of a model computes with a weight of the model; the text is the weight's name."""


class _OfCopy(OneType):
    """Raises `_NotCopied` at the first function that reads one of these tensors."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._names = {id(x): name for name, x in weights.items()}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        for x in tensors_in([*args, *(kwargs or {}).values()]):
            if id(x) in self._names:
                raise _NotCopied(self._names[id(x)])
        return super().__torch_function__(func, types, args, kwargs)


def refuse_mixed_types(model: DiffusionModel, dtype: torch.dtype) -> None:
    """Runs a denoiser in another type on fake tensors, which costs neither time nor memory.

    Weights and floating-point inputs have the type, except the timestep, and `OneType` converts tensors, as in an export. Models
    that cannot run on fake tensors, for example because values decide what is computed, are left to the export.

    Raises:
        UserError: a module computes with tensors of several types that neither torch nor `OneType` converts, or a copy of the
            model computes with the weights of the model.
    """
    failed = _failure_in(model, dtype)
    if (
        failed is None or _failure_in(model, torch.float32) is not None
    ):  # the forward in full precision tells the latter
        return
    name = str(dtype).removeprefix("torch.")
    raise UserError(
        f"{model.name} does not compute in {name}",
        expected="operations on tensors of one type, or products and norms, whose tensors are converted; the timestep in float32",
        got=failed,
        remedy="convert the tensors of this operation to one type in the model's forward, or set model.dtype to float32",
    )


def _failure_in(model: DiffusionModel, dtype: torch.dtype) -> str | None:
    """Returns the module and the message of a failure that has to do with types, in a type; None without one."""
    sizes = {name: opt for name, (_, opt, _) in model.dims.items()}
    inputs = model.example(0, sizes)
    with shapes_alone(), torch.no_grad():
        denoiser, of_type = in_16_bits(model.denoiser, inputs, model.timestep_input, dtype)
        weights = dict(model.denoiser.named_parameters())
        try:
            with _OfCopy(weights):
                denoiser(**of_type)
        except _NotCopied as error:
            raise UserError(
                f"{model.name} cannot be copied, and engines in {str(dtype).removeprefix('torch.')} need a copy of its weights",
                expected="a forward that finds modules by its own attributes, self.layer",
                got=f"a copy that computes with the original's {error}, as functions do that are made in __init__",
                remedy="set model.dtype to float32, or make the function a method of the module",
            ) from None
        except Exception as error:  # the model may raise anything; the message tells whether types are the reason
            if _OF_TYPES.search(str(error)):
                return f"{module_of(denoiser, error) or 'its forward'}: {first_line(error)}"
    return None


@contextmanager
def fitting(model: DiffusionModel, dtype: str, loaded: DiffusionModel) -> Iterator[None]:
    """Checks, around a forward of a denoiser in full precision, that the denoiser can compute in an engine's type; raises as
    `refuse_mixed_types` and `within_float16`. loaded: the model as loaded, on no device yet."""
    if dtype in ("float16", "bfloat16"):
        refuse_mixed_types(loaded, getattr(torch, dtype))
    with within_float16(model) if dtype == "float16" else nullcontext():
        yield


@contextmanager
def within_float16(model: DiffusionModel) -> Iterator[None]:
    """Observes the outputs of a denoiser's modules in the block, a forward in full precision.

    Functions between modules are not observed; their results are inputs of later modules, in most models.

    Raises:
        UserError: at the end, if weights or a module's outputs are finite and beyond 65,504, the largest float16 number.
    """
    beyond: dict[str, float] = {}

    def note(name: str, x: Any) -> None:
        with torch._C.DisableTorchFunction():  # modes that follow the model's calls must not see these
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
    _refuse(model, "its weights and its modules' outputs", beyond)


def refuse_beyond_float16(model: DiffusionModel, sites: Mapping[str, Rows], layers: Mapping[str, LayerRows]) -> None:
    """Raises a UserError if the inputs of attention or layers in a calibration are beyond 65,504, the largest float16 number."""
    read = {name: max(map(_largest, (rows.low, rows.high))) for name, rows in layers.items()}
    for name, rows in sites.items():
        read[name] = max(map(_largest, (rows.q_amax, rows.k_low, rows.k_high, rows.v_low, rows.v_high)))
    beyond = {name: largest for name, largest in read.items() if largest > LARGEST}
    _refuse(model, "the inputs of its attention and layers, in the calibration", beyond)


def _largest(x: Tensor) -> float:
    """Returns the largest magnitude of a tensor on the CPU. There are thousands of small tensors: NumPy takes one thread and no
    copy, while threads of torch wait for each other."""
    numbers = x.numpy()
    return max(-float(numbers.min()), float(numbers.max()))


def _refuse(model: DiffusionModel, where: str, beyond: Mapping[str, float]) -> None:
    """Raises a UserError for magnitudes beyond float16's range, by name, if there are any."""
    if beyond:
        first, others = next(iter(beyond.items())), len(beyond) - 1
        raise UserError(
            f"{model.name} exceeds the range of float16",
            expected=f"magnitudes up to {LARGEST:,.0f} in {where}",
            got=f"{first[1]:.3g} at {first[0]}" + (f", and more at {others} others" if others else ""),
            remedy="set model.dtype to bfloat16, which has the range of float32, or to float32",
        )
