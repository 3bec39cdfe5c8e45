"""The denoiser on ONNX Runtime: the op's function body computes every converted site, so the numerics are the INT8 ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from trtconvert.bundle import ComponentRecord, TensorRecord
from trtconvert.errors import BackendUnavailable, UserError


class OnnxRuntimeDenoiser:
    """A callable denoiser.

    Takes the inputs of the component's signature by position or by name, as torch tensors on the CPU. Floating-point inputs
    are converted to the signature's types; the output is returned in its own.

    Args:
        path: the component's ONNX file.
        component: its signature.

    Raises:
        BackendUnavailable: ONNX Runtime lacks an operator or a type that the model uses.
    """

    def __init__(self, path: Path, component: ComponentRecord) -> None:
        import onnxruntime

        self.component = component
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        # Samplers take turns with torch: threads that spin while they wait would take the cores from it.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        try:
            self._session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # ONNX Runtime has a class of its own for each status, and no common one
            raise BackendUnavailable(
                f"ONNX Runtime {onnxruntime.__version__} cannot run {path.name}",
                expected="operators in types that it has on the CPU",
                got=str(error).splitlines()[0],
                remedy="set model.dtype to float32 or float16 in the recipe, or install another onnxruntime",
            ) from error

    def __call__(self, *inputs: Tensor, **named: Tensor) -> Tensor:
        """
        Raises:
            UserError: an input is missing, unknown, or of a type or shape outside the signature.
        """
        given = self._by_name(inputs, named)
        sizes: dict[str, int] = {}
        feeds = {spec.name: self._checked(spec, given[spec.name], sizes) for spec in self.component.inputs}
        (output,) = self._session.run([self.component.outputs[0].name], feeds)
        return torch.from_numpy(output)

    def _by_name(self, inputs: tuple[Tensor, ...], named: dict[str, Tensor]) -> dict[str, Tensor]:
        names = [spec.name for spec in self.component.inputs]
        given = dict(zip(names, inputs, strict=False)) | named
        if len(inputs) + len(named) != len(names) or given.keys() != set(names):
            raise UserError(
                "the denoiser was called with other inputs than it has",
                expected=", ".join(names),
                got=", ".join([*names[: len(inputs)], *["…"] * (len(inputs) - len(names)), *named]) or "none",
                remedy="pass each input once, by position or by name",
            )
        return given

    def _checked(self, spec: TensorRecord, x: Tensor, sizes: dict[str, int]) -> np.ndarray:
        if not isinstance(x, Tensor):
            raise UserError(
                f"'{spec.name}' is not a tensor",
                expected=f"a torch.Tensor of {spec.dtype}",
                got=type(x).__name__,
                remedy="convert it with torch.as_tensor",
            )
        dims = self.component.dims
        fits = x.dim() == len(spec.shape)
        for size, dim in zip(x.shape, spec.shape, strict=False):
            if isinstance(dim, str):
                fits = fits and dims[dim][0] <= size <= dims[dim][2] and sizes.setdefault(dim, size) == size
            else:
                fits = fits and size == dim
        if not fits:
            ranges = [f"{d} {dims[d][0]}..{dims[d][2]}" if isinstance(d, str) else str(d) for d in spec.shape]
            raise UserError(
                f"the shape of '{spec.name}' is outside what the bundle was built for",
                expected="[" + ", ".join(ranges) + "], the same size for the same name in every input",
                got=str(list(x.shape)),
                remedy="widen engine.shapes in the recipe and build again",
            )
        wanted = getattr(torch, spec.dtype)
        if x.dtype != wanted and not (x.is_floating_point() and wanted.is_floating_point):
            raise UserError(
                f"'{spec.name}' has the wrong type",
                expected=spec.dtype,
                got=str(x.dtype).removeprefix("torch."),
                remedy=f"convert it with .to(torch.{spec.dtype})",
            )
        return x.detach().cpu().to(wanted).numpy()
