"""Small modules as ONNX models, for tests of rewrites."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.numpy_helper
import onnx_ir as ir
import onnxruntime
import torch
from torch import Tensor, nn

from trtconvert.export.nodes.layers import WEIGHT_METADATA
from trtconvert.export.storage import ROOT


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


def changed(text: str, changes: dict[str, str]) -> ir.Model:
    """A model as ONNX text, after replacements in the given order."""
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    return ir.from_onnx_text(text)


def run(model: ir.Model, x: Tensor) -> Tensor:
    """What ONNX Runtime makes of x with a valid model."""
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto, full_check=True)
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(None, {"x": x.detach().numpy()})[0])


def run_from_root(content: bytes, feeds: dict[str, np.ndarray]) -> np.ndarray:
    """The first output that ONNX Runtime computes from a model whose files are named from the root.

    Args:
        feeds: the model's inputs, and maybe others.
    """
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(ROOT))
    session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    return session.run(None, {value.name: feeds[value.name] for value in session.get_inputs()})[0]


def int8_weights(path: Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """INT8 weights of layers and their scales in an ONNX file, by their names in the model's state dict."""
    graph = onnx.load(path).graph
    constants = {constant.name: constant for constant in graph.initializer}
    found = {}
    for node in graph.node:
        metadata = {entry.key: entry.value for entry in node.metadata_props}
        if WEIGHT_METADATA in metadata:
            weight, scale = (onnx.numpy_helper.to_array(constants[name]) for name in node.input[1:3])
            found[metadata[WEIGHT_METADATA]] = weight, scale
    return found
