"""Checks on fake tensors, which cost neither time nor memory, that a denoiser takes all sizes that its model describes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from trtconvert.attention.sites import attention_hooks
from trtconvert.diffusion_model import DiffusionModel
from trtconvert.errors import UserError, first_line
from trtconvert.fake_tensors import shapes_alone
from trtconvert.interception import InterceptedDenoiser
from trtconvert.linear.sites import layer_hooks
from trtconvert.runtime.signature import shape_of

_Sizes = Mapping[str, int]


def _failure_at(model: DiffusionModel, sizes: _Sizes) -> str:
    """Returns why the denoiser fails at sizes of the symbolic dimensions; empty if it gives the prediction that it describes."""
    failure, _ = _tried(model, sizes)
    return failure


def refuse_fixed_sizes(model: DiffusionModel, dims: Mapping[str, tuple[int, int, int]]) -> None:
    """Checks a denoiser in FP32 that a pipeline has not been observed with. Denoisers that fail on fake tensors at their usual
    sizes, for example because values decide what is computed, are left to the export.

    Args:
        dims: (min, opt, max) of each symbolic dimension of the engine.
    Raises:
        UserError: the denoiser fails at the smallest or the largest sizes; or it calls other layers there.
    """
    opt = {name: size for name, (_, size, _) in dims.items()}
    varied = {name: (low, high) for name, (low, _, high) in dims.items() if low < high}
    failure, usual = _tried(model, opt)
    if failure or not varied:
        return
    least, most = ({name: size[place] for name, size in varied.items()} for place in (0, 1))
    for sizes in (least, most):
        if failure := _failure_at(model, opt | sizes):
            alone = {name: size for name, size in sizes.items() if _failure_at(model, opt | {name: size})}
            raise _refused(model, alone or sizes, dims, failure)
    # One sample may be computed in another way, but a loop over two samples shows in three.
    more = most | {name: max(size, 3) for name, size in most.items() if name == model.inputs[0].shape[0]}
    failure, calls = _tried(model, opt | more)
    if calls != usual and not failure:
        other = next((name for name in (*calls, *usual) if (name in calls) != (name in usual)), "another order")
        raise _refused(model, more, dims, f"other calls of layers than at {_named(opt)}, such as {other}")


def _refused(model: DiffusionModel, sizes: _Sizes, dims: Mapping[str, tuple[int, int, int]], failure: str) -> UserError:
    name, size = next((name, opt) for name, (_, opt, _) in dims.items() if name in sizes)
    ranges = ", ".join(f"{name} {low} to {high}" for name, (low, _, high) in dims.items() if name in sizes)
    return UserError(
        f"{model.name} does not take the sizes that it describes",
        expected=f"a forward that computes the same for any {ranges}",
        got=f"at {_named(sizes)}: {failure}",
        remedy="take sizes from the inputs in the forward, x.shape[0] instead of a number, and compute all samples at once, "
        f"without a loop over them; or give the one size that it takes in `dims`, as in {name!r}: ({size}, {size}, {size})",
    )


def _named(sizes: _Sizes) -> str:
    return ", ".join(f"{name} {size}" for name, size in sizes.items())


def _tried(model: DiffusionModel, sizes: _Sizes) -> tuple[str, list[str]]:
    """Returns the failure at these sizes, see `_failure_at`, and the names of the calls of attention and layers."""
    calls: list[str] = []

    def note(call: Any) -> Tensor:
        calls.append(call.name)
        return call.exact()

    hooks = {scaled_dot_product_attention: attention_hooks(note)[scaled_dot_product_attention], **layer_hooks(note)}
    names = [spec.name for spec in model.inputs]
    denoiser = InterceptedDenoiser(model.denoiser, names, model.timestep_input, hooks)
    with shapes_alone(model.denoiser), torch.inference_mode():
        empty = {
            spec.name: torch.empty(shape_of(spec.shape, sizes), dtype=getattr(torch, spec.dtype))
            for spec in model.inputs
        }
        try:
            got = list(denoiser(**empty).shape)
        except Exception as error:  # whatever the model and torch raise for unfit shapes
            return "; ".join([first_line(error), *getattr(error, "__notes__", [])]), calls
    fits = got == list(shape_of(model.output.shape, sizes))
    return "" if fits else f"a prediction {got}", calls
