"""ONNX models of stages: checks, forms without plugins, and the unquantised weights that LoRAs of refittable engines need."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

    from trtconvert.linear.sites import ConvertedLayer


def check_onnx(path: Path) -> None:
    """Checks a model with ONNX's checker, including types and shapes.

    Weights outside the file are checked as inputs of their types and shapes: the checker does not read their values. A model
    with BF16 is checked as FP32: in its opset, operators such as convolutions and sines lack BF16, which TensorRT supports.
    """
    import onnx
    import onnx_ir as ir

    from trtconvert.export.float32 import holds_bfloat16, widen

    model = ir.load(path)
    for value in list(model.graph.initializers.values()):
        if isinstance(tensor := value.const_value, ir.ExternalTensor):
            del model.graph.initializers[value.name]  # type: ignore[arg-type]
            value.const_value, value.dtype, value.shape = None, tensor.dtype, tensor.shape  # type: ignore[assignment]
            model.graph.inputs.append(value)
    if holds_bfloat16(model):
        widen(model)
    onnx.checker.check_model(ir.to_proto(model), full_check=True)


def save_native(onnx_file: Path, path: Path) -> None:
    """Writes a model for engines without plugins: native attention operators, INT8 layers between Q/DQ nodes."""
    import onnx_ir as ir

    from trtconvert.export import storage
    from trtconvert.export.lowering.delta_qdq import lower_deltas
    from trtconvert.export.lowering.layers import expand_layers, quantise_products
    from trtconvert.export.lowering.native import lower_to_native
    from trtconvert.export.nodes.attention import attention_nodes

    native = ir.load(onnx_file)
    if attention_nodes(native):
        lower_to_native(native)
    expand_layers(native)
    quantise_products(native)
    lower_deltas(native)
    storage.save(native, path)
    check_onnx(path)


def keep_unquantised(
    module: nn.Module, layers: Mapping[str, ConvertedLayer], onnx_file: Path, prefix: str = ""
) -> None:
    """Writes the unquantised weights of INT8 layers, for LoRAs and new weights of refittable engines."""
    from trtconvert.weights.unquantised import save_unquantised

    save_unquantised(module, [layer.layer for layer in layers.values()], onnx_file, prefix)
