"""Small modules as ONNX models, for tests of rewrites."""

from __future__ import annotations

import onnx
import onnx_ir as ir
import onnxruntime
import torch
from torch import Tensor, nn


def export(module: nn.Module, x: Tensor, **dims: int) -> torch.onnx.ONNXProgram:
    """The program before the exporter's optimisation. Named axes vary."""
    program = torch.onnx.export(
        module.eval(),
        (x,),
        dynamo=True,
        optimize=False,
        verbose=False,
        input_names=["x"],
        dynamic_shapes=({axis: torch.export.Dim(name) for name, axis in dims.items()},) if dims else None,
    )
    assert program is not None  # only None where it writes to a file
    return program


def run(model: ir.Model, x: Tensor) -> Tensor:
    """What ONNX Runtime makes of x with a valid model."""
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto, full_check=True)
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(None, {"x": x.detach().numpy()})[0])
