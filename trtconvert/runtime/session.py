"""Runs a component on ONNX Runtime, where function bodies compute the exact INT8 arithmetic of converted sites."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from trtconvert.bundle import NEXT, ComponentRecord
from trtconvert.errors import BackendUnavailable, UserError, first_line
from trtconvert.runtime.component import Component, was_closed
from trtconvert.runtime.signature import Signature, dtype_of
from trtconvert.runtime.trajectory import FORGOTTEN, Trajectory, whose

if TYPE_CHECKING:
    from trtconvert.runtime.loras import Loras

_MEMORY_WORDS = ("allocate memory", "Available memory", "bad_alloc")
"""ONNX Runtime's phrases for a lack of memory; its errors have no class for it."""


class OnnxRuntimeComponent(Component):
    """A callable component on the CPU.

    Takes the inputs of the component's signature as torch tensors, by position or by name, and converts floating-point inputs to
    the signature's types. Returns an output, or a tuple of outputs, on the CPU. BF16, which ONNX Runtime lacks on the CPU, is
    computed in FP32.

    Args:
        path: the component's ONNX file.
        component: the signature.

    Raises:
        BackendUnavailable: ONNX Runtime lacks an operator or a type of the model, or memory.
    """

    device = torch.device("cpu")

    def __init__(self, path: Path, component: ComponentRecord) -> None:
        import onnxruntime

        self.signature = Signature(component)
        self._outputs = [output.name for output in component.outputs]
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        # Samplers alternate with torch: spinning threads would take the cores from torch.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        self._types = [dtype_of(output) for output in component.outputs]
        self._caches = component.caches
        self._trajectory = Trajectory()
        self._kept: WeakKeyDictionary[Trajectory, list[Tensor]] = WeakKeyDictionary()
        self._one_at_a_time = (
            threading.Lock() if self._caches else nullcontext()
        )  # a call reads the caches of the one before
        self._wide = any(spec.dtype == "bfloat16" for spec in (*component.inputs, *component.outputs))

        def session() -> onnxruntime.InferenceSession:
            with _in_float32(path) if self._wide else nullcontext(path) as runnable:
                return onnxruntime.InferenceSession(runnable, options, providers=["CPUExecutionProvider"])

        try:
            try:
                self._session: onnxruntime.InferenceSession | None = session()
            except Exception:
                if self._wide or not _holds_bfloat16(path):
                    raise
                self._wide = True  # parts of the model compute in BF16
                self._session = session()
        except Exception as error:  # ONNX Runtime's errors have no common base class
            _require_memory(error)
            raise BackendUnavailable(
                f"ONNX Runtime {onnxruntime.__version__} cannot run {path.name}",
                expected="operators and types that ONNX Runtime supports on the CPU",
                got=first_line(error),
                remedy="set model.dtype to float32 in the recipe, or install another onnxruntime",
            ) from error

    def call(self, trajectory: Trajectory | None, inputs: tuple[Tensor, ...], named: Mapping[str, Tensor]) -> Any:
        session = self._session  # another thread may close the component meanwhile
        if session is None:
            raise was_closed()
        tensors = self.signature.ordered(inputs, named)
        self.signature.check(tensors)
        if self.signature.watch is not None:
            self.signature.watch(tensors)
        typed = self.signature.typed(tensors)
        feeds = {name: as_numpy(x, self._wide) for name, x in zip(self.signature.names, typed, strict=True)}
        trajectory = trajectory or self._trajectory
        names = self._outputs + [cache.name + NEXT for cache in self._caches]
        try:
            with self._one_at_a_time:
                if self._caches:
                    caches = self._caches_of(trajectory, len(typed[0]))
                    feeds |= {
                        cache.name: as_numpy(x, self._wide) for cache, x in zip(self._caches, caches, strict=True)
                    }
                found = [torch.from_numpy(x) for x in session.run(names, feeds)]
                if self._caches:
                    self._kept[trajectory] = found[len(self._outputs) :]
            outputs = tuple(x.to(dtype) for x, dtype in zip(found, self._types, strict=False))
        except Exception as error:  # see above
            _require_memory(error)
            raise UserError(
                "ONNX Runtime cannot run the component on these inputs",
                expected="values that the model takes, such as indices within its tables of embeddings",
                got=first_line(error),
                remedy="correct the inputs; if the original model takes them, report the message",
            ) from error
        return outputs[0] if len(outputs) == 1 else outputs

    def _caches_of(self, trajectory: Trajectory, batch: int) -> list[Tensor]:
        """Return the caches of the previous call, or reset caches for another batch and before the first call."""
        kept = self._kept.get(trajectory)
        if kept is not None and len(kept[0]) == batch:
            return kept
        shapes = [[batch if isinstance(size, str) else size for size in cache.shape] for cache in self._caches]
        made = [torch.zeros(shape, dtype=dtype_of(of)) for shape, of in zip(shapes, self._caches, strict=True)]
        made[0].fill_(FORGOTTEN)
        return made

    def reset_cache(self, trajectory: Trajectory | None = None) -> None:
        with self._one_at_a_time:
            self._kept.pop(whose(trajectory, self._trajectory), None)

    @property
    def caches(self) -> dict[str, Tensor]:
        kept = self._kept.get(self._trajectory, [])
        return {cache.name: x for cache, x in zip(self._caches, kept, strict=False)}

    def refit(self, weights: Mapping[str, Tensor] | str | Path) -> int:
        """Raise BackendUnavailable: only TensorRT engines take new weights."""
        raise _not_refittable("the weights of a model on ONNX Runtime cannot be replaced", "the new weights")

    def set_loras(self, loras: Loras) -> int:
        """Raise BackendUnavailable: only TensorRT engines take LoRAs."""
        raise _not_refittable("the LoRAs of a model on ONNX Runtime cannot be changed", "other loras in the recipe")

    def close(self) -> None:
        self._session = None
        self._kept.clear()


def _require_memory(error: Exception) -> None:
    """Raise BackendUnavailable if an error of ONNX Runtime is a lack of memory."""
    if isinstance(error, MemoryError) or any(words in str(error) for words in _MEMORY_WORDS):
        raise BackendUnavailable(
            "ONNX Runtime has no memory left for the component",
            expected="host memory for the weights and the intermediate tensors",
            got=first_line(error),
            remedy="free host memory, call with fewer samples or a smaller size, or load the bundle on a GPU",
        ) from error


def _not_refittable(problem: str, by: str) -> BackendUnavailable:
    return BackendUnavailable(
        problem,
        expected="a TensorRT engine that was built with engine.refittable: true",
        got="ONNX Runtime on the CPU",
        remedy=f"load the bundle on a GPU that it was compiled for, or build it again with {by}",
    )


def _in_float32(path: Path) -> AbstractContextManager[Path]:
    from trtconvert.export.float32 import in_float32  # ONNX tooling, which models of other types do not need

    return in_float32(path)


def _holds_bfloat16(path: Path) -> bool:
    import onnx_ir as ir

    from trtconvert.export.float32 import holds_bfloat16

    return holds_bfloat16(ir.load(path))


def as_numpy(x: Tensor, wide: bool = False) -> np.ndarray:
    """Converts a tensor to numpy, BF16 to FP32; wide: all floating types to FP32."""
    return (x.float() if x.dtype == torch.bfloat16 or (wide and x.is_floating_point()) else x).cpu().numpy()
