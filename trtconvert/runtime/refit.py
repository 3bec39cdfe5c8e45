"""New weights for a loaded engine that was built refittable: a fine-tuned model, or one with a LoRA merged into it.

The ONNX model of a bundle keeps the names of the denoiser's state dict, a constant that was made by transposing a weight is
called `NAME.T`, and where an input or an output of the model has that name, `:weight` follows it. TensorRT keeps the names of the
ONNX model. That is the whole mapping.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from trtconvert.bundle import NAMESAKE, TRANSPOSED
from trtconvert.documents import safetensors_header
from trtconvert.errors import UserError, first_line
from trtconvert.runtime.reading import Spent
from trtconvert.weights.finite import is_finite

if TYPE_CHECKING:
    from trtconvert.runtime.lane import Plan

_THREADS = 8
"""That TensorRT may use."""


class Refitter:
    """Replaces weights of an engine in place, some after the others. Nothing may be running on it meanwhile.

    Args:
        plan: a refittable engine.
        shapes: of the engine's weights of more than one dimension, by TensorRT's names. TensorRT itself only counts elements.
        others: what weights are that stay as they are, as far as that is known, by the names of the state dict: TensorRT may want
            them together with what is replaced.

    Attributes:
        replaced: names of the engine's weights.
    """

    def __init__(
        self,
        plan: Plan,
        shapes: Mapping[str, Sequence[int]],
        others: Callable[[str], Tensor | None] = lambda name: None,
        spent: Spent | None = None,
    ) -> None:
        self._plan, self._shapes, self._others, self._spent = plan, shapes, others, spent or Spent()
        self._refitter = plan.trt.Refitter(plan.engine, plan.log.logger)
        self._names = set(self._refitter.get_all_weights())
        # The numbers are looked at before: TensorRT would copy to the host what is not there.
        self._refitter.weights_validation = False
        self._refitter.max_threads = min(_THREADS, len(os.sched_getaffinity(0)))
        self.replaced = set[str]()

    def replace(
        self, weights: Mapping[str, Tensor], constants: Mapping[str, Tensor] | None = None, *, are_finite: bool = False
    ) -> None:
        """Replace some, and wait until TensorRT has them: what it was given may go then.

        Args:
            weights: by the names of the denoiser's state dict.
            constants: of INT8 layers, by the engine's names, in the types that it has, on its device or on the CPU.
            are_finite: whether the weights are known to be, in the types that they have.
        Raises:
            UserError: a name, shape or value does not fit, or TensorRT needs weights that are not given. Nothing is replaced.
            BackendUnavailable: TensorRT failed half way; load the bundle again.
        """
        plan, refitter, kept = self._plan, self._refitter, dict[str, Tensor]()  # TensorRT reads them when it refits
        try:
            with self._spent.on("giving"), plan.log:
                self._give(kept, weights, constants or {}, are_finite)
                if any(tensor.is_cuda for tensor in kept.values()):
                    torch.cuda.current_stream().synchronize()  # TensorRT has a stream of its own
            self.replaced |= kept.keys()  # from here on, whatever ends it
            with self._spent.on("refitting"), plan.log:
                done = refitter.refit_cuda_engine()
            if not done:
                raise plan.failure(
                    "TensorRT failed while it replaced weights: some may be new and others old; load the bundle again"
                )
        finally:
            for target in kept:  # before their memory goes
                refitter.unset_named_weights(target)
        self._spent.parts += 1
        self._spent.given += sum(tensor.nbytes for tensor in kept.values())

    def _give(
        self,
        kept: dict[str, Tensor],
        weights: Mapping[str, Tensor],
        constants: Mapping[str, Tensor],
        are_finite: bool,
    ) -> None:
        plan, refitter, names = self._plan, self._refitter, self._names
        for target, tensor in constants.items():
            kept[target] = _set_constant(plan, refitter, target, tensor, target in names)
        for name, tensor in weights.items():
            turned = name + TRANSPOSED
            targets = [target for target in (name, name + NAMESAKE, turned, turned + NAMESAKE) if target in names]
            if not targets:
                known = [_name_of(n) for n in names]
                near = difflib.get_close_matches(name, known, 1)
                raise UserError(
                    f"the engine has no weight '{name}' to replace",
                    expected=f"names of the denoiser's state dict{f', perhaps {near[0]}' if near else ''}",
                    got=name,
                    remedy="give the state dict of the module that was converted; leave out what its forward does not use",
                )
            for target in targets:
                kept[target] = _set(plan, refitter, target, name, tensor, self._shapes.get(target), are_finite)
        # Fused with what is replaced.
        for target in refitter.get_missing_weights():
            name = _name_of(target)
            if (tensor := self._others(name)) is not None:
                kept[target] = _set(plan, refitter, target, name, tensor, self._shapes.get(target), are_finite)
        if missing := refitter.get_missing_weights():
            raise UserError(
                "the weights to replace are not enough",
                expected="these too, which TensorRT has fused with them: " + ", ".join(missing),
                got=f"{len(weights)} weights",
                remedy="give the whole state dict",
            )


def _set_constant(plan: Plan, refitter: Any, target: str, tensor: Tensor, is_known: bool) -> Tensor:
    value = tensor.contiguous()
    dtype = plan.trt.DataType.INT32 if value.dtype == torch.int32 else plan.trt.DataType.FLOAT
    if not is_known or not _given(plan.trt, refitter, target, dtype, value):
        raise UserError(
            f"TensorRT does not take a new '{target}'",
            expected=f"an engine in which it is a constant of {value.numel()} numbers",
            got=plan.log.last() if is_known else "an engine without it",
            remedy="compile the bundle again; with engine.layers: exact, INT8 layers have no such constants",
        )
    return value


def _given(trt: Any, refitter: Any, target: str, dtype: Any, value: Tensor) -> bool:
    """Whether TensorRT takes a tensor, which it reads when it refits, from the engine's device or from the CPU."""
    where = trt.TensorLocation.DEVICE if value.is_cuda else trt.TensorLocation.HOST
    return refitter.set_named_weights(target, trt.Weights(dtype, value.data_ptr(), value.numel()), where)


def _name_of(target: str) -> str:
    """The name in the state dict of a weight that TensorRT has."""
    return target.removesuffix(NAMESAKE).removesuffix(TRANSPOSED)


def _set(
    plan: Plan, refitter: Any, target: str, name: str, tensor: Tensor, shape: Sequence[int] | None, is_known_finite: bool
) -> Tensor:  # fmt: skip
    trt = plan.trt
    transposed = target.removesuffix(NAMESAKE) != name
    prototype = refitter.get_weights_prototype(target)
    dtype = {
        trt.DataType.FLOAT: torch.float32,
        trt.DataType.HALF: torch.float16,
        trt.DataType.BF16: torch.bfloat16,
        trt.DataType.INT64: torch.int64,
        trt.DataType.INT32: torch.int32,
    }[prototype.dtype]
    known = is_known_finite or is_finite(tensor.detach())
    if not known or (tensor.dtype != dtype and not is_finite(tensor.detach().to(dtype))):
        raise UserError(
            f"the new weight '{name}' cannot be used",
            expected=f"finite numbers that {str(dtype).removeprefix('torch.')} holds",
            got="NaN, Inf or too large a number",
            remedy="correct the weights",
        )
    fits = prototype.size == tensor.numel() and (tensor.dim() == 2 or not transposed)
    value = tensor.detach().T if transposed and fits else tensor.detach()
    if not fits or (shape is not None and list(value.shape) != list(shape)):
        wanted = None if shape is None else list(reversed(shape) if transposed else shape)
        raise UserError(
            f"the new weight '{name}' does not fit",
            expected=f"{prototype.size} elements" if wanted is None else f"shape {wanted}",
            got=str(list(tensor.shape)),
            remedy="give the state dict of the module that was converted",
        )
    try:
        value = value.to(plan.device if value.device == plan.device else "cpu", dtype).contiguous()
    except torch.OutOfMemoryError:
        value = value.to("cpu", dtype).contiguous()
    if not _given(trt, refitter, target, prototype.dtype, value):
        raise UserError(
            f"TensorRT does not take the new weight '{name}'",
            expected=f"{prototype.size} elements of {prototype.dtype}",
            got=f"{list(value.shape)} {value.dtype}",
            remedy="give the state dict of the module that was converted",
        )
    return value


def read_weights(path: Path) -> Mapping[str, Tensor]:
    """The tensors of a safetensors file by name.

    Raises:
        UserError: there is no such file, or it is damaged.
    """
    try:
        safetensors_header(path)
        return load_file(path)
    except (OSError, SafetensorError, ValueError) as error:
        raise UserError(
            f"cannot read the weights {path}",
            expected="a safetensors file",
            got=first_line(error),
            remedy="check the path, or save the state dict again with safetensors.torch.save_file",
        ) from error
