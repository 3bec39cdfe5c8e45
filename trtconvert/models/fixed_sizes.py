"""Checks on fake tensors, which cost neither time nor memory, that a denoiser takes all sizes that its model describes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from trtconvert.attention.sites import attention_hooks
from trtconvert.diffusion_model import DiffusionModel
from trtconvert.errors import UserError, first_line
from trtconvert.fake_tensors import shapes_alone
from trtconvert.interception import InterceptedDenoiser, Interception
from trtconvert.linear.sites import layer_hooks
from trtconvert.runtime.signature import shape_of

_Sizes = Mapping[str, int]

_OF_MEMORY = frozenset(("contiguous", "clone", "to"))
"""Functions whose calls may depend on the places of a tensor in memory, and compute nothing."""


@dataclass(frozen=True)
class _Tried:
    """A forward of a denoiser at some sizes.

    Attributes:
        failure: why the denoiser does not give the prediction that it describes; "" if it does.
        layers: names of the calls of attention and layers.
        functions: all functions of torch that the model calls for a tensor, with their modules.
    """

    failure: str = ""
    layers: list[str] = field(default_factory=list)
    functions: list[str] = field(default_factory=list)


class _Functions(TorchFunctionMode):
    """Notes the functions that a model calls."""

    def __init__(self, forward: Interception, found: list[str]) -> None:
        super().__init__()
        self._forward, self._found = forward, found

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", str(func))
        if isinstance(result, (Tensor, list, tuple)) and name not in ("__get__", *_OF_MEMORY):
            self._found.append(f"{name} in {self._forward.module() or 'its forward'}")
        return result


def refuse_fixed_sizes(model: DiffusionModel, dims: Mapping[str, tuple[int, int, int]]) -> None:
    """Checks a denoiser in FP32 that a pipeline has not been observed with. Denoisers that fail on fake tensors at their usual
    sizes, for example because values decide what is computed, are left to the export.

    Args:
        dims: (min, opt, max) of each symbolic dimension of the engine.
    Raises:
        UserError: the denoiser fails at the smallest or the largest sizes; or it calls other layers or functions at other sizes,
            which an exported model cannot do.
    """
    opt = {name: size for name, (_, size, _) in dims.items()}
    varied = {name: (low, high) for name, (low, _, high) in dims.items() if low < high}
    usual = _tried(model, opt)
    if usual.failure or not varied:
        return
    least, most = ({name: size[place] for name, size in varied.items()} for place in (0, 1))
    for sizes in (least, most):
        if failure := _tried(model, opt | sizes).failure:
            alone = {name: size for name, size in sizes.items() if _tried(model, opt | {name: size}).failure}
            raise _refused(model, alone or sizes, dims, failure)
    # One sample may be computed in another way, but a loop over two samples shows in three.
    batch = model.inputs[0].shape[0]
    more = most | {name: max(size, 3) for name, size in most.items() if name == batch}
    tried = _tried(model, opt | more)
    if tried.layers != usual.layers and not tried.failure:
        other = _first_of_one(tried.layers, usual.layers)
        raise _refused(model, more, dims, f"other calls of layers than at {_named(opt)}, such as {other}")
    for sizes in _of_one_batch(least, most, batch):
        tried = _tried(model, opt | sizes)
        if tried.functions != usual.functions and not tried.failure:
            got, instead = next(pair for pair in zip_longest(tried.functions, usual.functions) if pair[0] != pair[1])
            calls = f"the forward calls {got or 'nothing more'}, and at {_named(opt)} {instead or 'nothing more'}"
            raise _refused(model, sizes, dims, calls)


def _of_one_batch(least: _Sizes, most: _Sizes, batch: int | str) -> list[dict[str, int]]:
    """Returns sizes that differ in other dimensions than the batch: the smallest, the largest, and others of each."""
    low, high = ({name: size for name, size in sizes.items() if name != batch} for sizes in (least, most))
    mixed = [low | {name: high[name]} for name in high] if len(high) > 1 else []
    return [low, high, *mixed] if high else []


def _first_of_one(calls: list[str], others: list[str]) -> str:
    """Returns the first call that one list lacks."""
    return next((name for name in (*calls, *others) if (name in calls) != (name in others)), "another order")


def _refused(model: DiffusionModel, sizes: _Sizes, dims: Mapping[str, tuple[int, int, int]], failure: str) -> UserError:
    name, size = next((name, opt) for name, (_, opt, _) in dims.items() if name in sizes)
    ranges = ", ".join(f"{name} {low} to {high}" for name, (low, _, high) in dims.items() if name in sizes)
    return UserError(
        f"{model.name} does not take the sizes that it describes",
        expected=f"a forward that computes the same for any {ranges}",
        got=f"at {_named(sizes)}: {failure}",
        remedy="take sizes from the inputs in the forward, x.shape[0] instead of a number, and compute all samples at once, "
        "without a loop over them or a branch on sizes; or give the one size that it takes in `dims`, as in "
        f"{name!r}: ({size}, {size}, {size})",
    )


def _named(sizes: _Sizes) -> str:
    return ", ".join(f"{name} {size}" for name, size in sizes.items())


def _tried(model: DiffusionModel, sizes: _Sizes) -> _Tried:
    """Runs the denoiser at sizes of the symbolic dimensions."""
    tried = _Tried()

    def note(call: Any) -> Tensor:
        tried.layers.append(call.name)
        return call.exact()

    hooks = {scaled_dot_product_attention: attention_hooks(note)[scaled_dot_product_attention], **layer_hooks(note)}
    names = [spec.name for spec in model.inputs]
    denoiser = InterceptedDenoiser(
        model.denoiser,
        names,
        model.timestep_input,
        hooks,
        around=lambda forward: _Functions(forward, tried.functions),
    )
    with shapes_alone(model.denoiser), torch.inference_mode():
        empty = {
            spec.name: torch.empty(shape_of(spec.shape, sizes), dtype=getattr(torch, spec.dtype))
            for spec in model.inputs
        }
        try:
            got = list(denoiser(**empty).shape)
        except Exception as error:  # whatever the model and torch raise for unfit shapes
            return replace(tried, failure="; ".join([first_line(error), *getattr(error, "__notes__", [])]))
    fits = got == list(shape_of(model.output.shape, sizes))
    return tried if fits else replace(tried, failure=f"a prediction {got}")
