"""Replaces the weights of a loaded refittable engine.

TensorRT keeps the names of the ONNX model, which has those of the denoiser's state dict: `NAME`, or `NAME.T` for a transposed
weight, with the suffix `:weight` if an input or output has that name.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from trtconvert.bundle import IN_CONSTANTS, NAMESAKE, TRANSPOSED, weight_of
from trtconvert.documents import safetensors_header
from trtconvert.errors import UserError, first_line
from trtconvert.files import threads
from trtconvert.runtime.reading import Spent
from trtconvert.weights.finite import is_finite

if TYPE_CHECKING:
    from trtconvert.runtime.lane import LoadedEngine

_THREADS = 8
"""Number of threads for TensorRT."""


class Refitter:
    """Replaces weights of an engine in place, in parts. No call may run meanwhile.

    Args:
        loaded: a refittable engine.
        shapes: shapes of the engine's weights with more than one dimension, by TensorRT's names; TensorRT checks only sizes.
        others: returns an unchanged weight by its name in the state dict, or None if it is unknown: TensorRT may need weights
            that are fused with replaced ones.

    Attributes:
        replaced: names of the replaced weights.
    """

    def __init__(
        self,
        loaded: LoadedEngine,
        shapes: Mapping[str, Sequence[int]],
        others: Callable[[str], Tensor | None] = lambda name: None,
        spent: Spent | None = None,
    ) -> None:
        self._loaded, self._shapes, self._others, self._spent = loaded, shapes, others, spent or Spent()
        self._refitter = loaded.trt.Refitter(loaded.engine, loaded.log.logger)
        self._names = set(self._refitter.get_all_weights())
        # Values are checked before: TensorRT would copy tensors from the device for its validation.
        self._refitter.weights_validation = False
        self._refitter.max_threads = threads(_THREADS)
        self.replaced = set[str]()

    def replace(
        self, weights: Mapping[str, Tensor], constants: Mapping[str, Tensor] | None = None, *, are_finite: bool = False
    ) -> None:
        """Replace weights and wait for TensorRT; the tensors may be freed afterwards.

        Args:
            weights: weights by the names of the denoiser's state dict.
            constants: constants of INT8 layers, by the engine's names, in the engine's types, on its device or on the CPU.
            are_finite: True if the weights are known to be finite in their types.
        Raises:
            UserError: a name, shape or value does not fit, or TensorRT needs further weights. Nothing is replaced.
            BackendUnavailable: TensorRT failed half way; load the bundle again.
        """
        loaded, refitter, kept = self._loaded, self._refitter, dict[str, Tensor]()  # TensorRT reads them when it refits
        try:
            with self._spent.on("giving"), loaded.log:
                self._give(kept, weights, constants or {}, are_finite)
                if any(tensor.is_cuda for tensor in kept.values()):
                    torch.cuda.current_stream().synchronize()  # TensorRT uses its own stream
            self.replaced |= kept.keys()  # also if the refit fails
            with self._spent.on("refitting"), loaded.log:
                done = refitter.refit_cuda_engine()
            if not done:
                raise loaded.failure(
                    "TensorRT failed while it replaced weights: some may be new and others old; load the bundle again"
                )
        finally:
            for target in kept:  # before their memory is freed
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
        loaded, refitter, names = self._loaded, self._refitter, self._names
        for target, tensor in constants.items():
            kept[target] = _set_constant(loaded, refitter, target, tensor, target in names)
        for name, tensor in weights.items():
            turned = name + TRANSPOSED
            targets = [target for target in (name, name + NAMESAKE, turned, turned + NAMESAKE) if target in names]
            if not targets and any(other.endswith(IN_CONSTANTS) and weight_of(other)[0] == name for other in names):
                raise weight_in_constants(name)
            if not targets:
                known = [weight_of(n)[0] for n in names]
                near = difflib.get_close_matches(name, known, 1)
                raise UserError(
                    f"the engine has no weight '{name}' to replace",
                    expected=f"names of the denoiser's state dict{f', perhaps {near[0]}' if near else ''}",
                    got=name,
                    remedy="pass the state dict of the converted module, without weights that its forward does not use; build a "
                    "bundle with the new weights if the forward computes other weights from this one",
                )
            for target in targets:
                kept[target] = _set(loaded, refitter, target, name, tensor, self._shapes.get(target), are_finite)
        # Weights that TensorRT has fused with replaced ones.
        for target in refitter.get_missing_weights():
            name = weight_of(target)[0]
            if (tensor := self._others(name)) is not None:
                kept[target] = _set(loaded, refitter, target, name, tensor, self._shapes.get(target), are_finite)
        if missing := refitter.get_missing_weights():
            raise UserError(
                "further weights must be replaced too",
                expected="these weights, which TensorRT has fused with the given ones: " + ", ".join(missing),
                got=f"{len(weights)} weights",
                remedy="pass the whole state dict",
            )


def _set_constant(loaded: LoadedEngine, refitter: Any, target: str, tensor: Tensor, is_known: bool) -> Tensor:
    value = tensor.contiguous()
    dtype = loaded.trt.DataType.INT32 if value.dtype == torch.int32 else loaded.trt.DataType.FLOAT
    if not is_known or not _given(loaded.trt, refitter, target, dtype, value):
        raise UserError(
            f"TensorRT does not take a new '{target}'",
            expected=f"an engine with this constant of {value.numel()} numbers",
            got=loaded.log.last() if is_known else "an engine without the constant",
            remedy="compile the bundle again; with engine.layers: exact, INT8 layers have no such constants",
        )
    return value


def _given(trt: Any, refitter: Any, target: str, dtype: Any, value: Tensor) -> bool:
    """Hand a tensor on the engine's device or the CPU to TensorRT, which reads the tensor at the refit; False if refused."""
    where = trt.TensorLocation.DEVICE if value.is_cuda else trt.TensorLocation.HOST
    return refitter.set_named_weights(target, trt.Weights(dtype, value.data_ptr(), value.numel()), where)


def _set(
    loaded: LoadedEngine, refitter: Any, target: str, name: str, tensor: Tensor, shape: Sequence[int] | None, is_known_finite:
        bool
) -> Tensor:  # fmt: skip
    trt = loaded.trt
    transposed = target.removesuffix(NAMESAKE) != name
    prototype = refitter.get_weights_prototype(target)
    dtype = {
        trt.DataType.FLOAT: torch.float32,
        trt.DataType.HALF: torch.float16,
        trt.DataType.BF16: torch.bfloat16,
        trt.DataType.INT64: torch.int64,
        trt.DataType.INT32: torch.int32,
    }.get(prototype.dtype)
    if dtype is None:
        raise UserError(
            f"the engine's '{name}' cannot be replaced",
            expected="a weight that the engine keeps in FP32, FP16, BF16, INT32 or INT64",
            got=str(prototype.dtype),
            remedy="leave it out of the new weights; if it differs from the engine's, build a bundle with the new weights",
        )
    known = is_known_finite or is_finite(tensor.detach())
    if not known or (tensor.dtype != dtype and not is_finite(tensor.detach().to(dtype))):
        expected = f"finite numbers in the range of {str(dtype).removeprefix('torch.')}"
        raise unfit_weight(name, expected, "NaN, Inf or a larger number")
    fits = prototype.size == tensor.numel() and (tensor.dim() == 2 or not transposed)
    value = tensor.detach().T if transposed and fits else tensor.detach()
    if not fits or (shape is not None and list(value.shape) != list(shape)):
        wanted = None if shape is None else list(reversed(shape) if transposed else shape)
        expected = f"{prototype.size} elements" if wanted is None else f"shape {wanted}"
        raise unfit_weight(name, expected, str(list(tensor.shape)))
    try:
        value = value.to(loaded.device if value.device == loaded.device else "cpu", dtype).contiguous()
    except torch.OutOfMemoryError:
        value = value.to("cpu", dtype).contiguous()
    if not _given(trt, refitter, target, prototype.dtype, value):
        raise UserError(
            f"TensorRT does not take the new weight '{name}'",
            expected=f"{prototype.size} elements of {prototype.dtype}",
            got=f"{list(value.shape)} {value.dtype}",
            remedy="pass the state dict of the converted module",
        )
    return value


def weight_in_constants(name: str) -> UserError:
    """Return the error for a weight that constants of the engine were computed from too."""
    return UserError(
        f"the weight '{name}' cannot be replaced alone",
        expected="a weight that the forward multiplies or adds itself",
        got="constants in the engine that were computed from this weight too, and would keep its old values",
        remedy="build a bundle with the new weights or LoRAs",
    )


def unfit_weight(name: str, expected: str, got: str) -> UserError:
    return UserError(
        f"the new weight '{name}' does not fit",
        expected=expected,
        got=got,
        remedy="pass the state dict of the converted module, or correct the weight",
    )


def read_weights(path: Path) -> Mapping[str, Tensor]:
    """Read the tensors of a safetensors file by name.

    Raises:
        UserError: the file is missing or damaged.
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
