"""ONNX models as stages leave them: checked, without plugins too, and with what LoRAs of refittable engines need."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtconvert.recipe import Recipe

if TYPE_CHECKING:
    from torch import nn

    from trtconvert.linear.sites import ConvertedLayer


def check_onnx(path: Path, dtype: str) -> None:
    """Let ONNX check a model, its types and shapes too; one in BF16 as FP32: operators of its opset lack BF16 where those of
    TensorRT have it (convolutions, sines)."""
    import onnx

    from trtconvert.export.float32 import without_bfloat16

    with without_bfloat16(path, dtype) as checked:
        onnx.checker.check_model(checked, full_check=True)


def save_native(onnx_file: Path, path: Path, dtype: str) -> None:
    """Write a model of a type for engines that host no plugin: attention in its own type, INT8 layers between Q/DQ."""
    import onnx_ir as ir

    from trtconvert.export import storage
    from trtconvert.export.lowering import expand_layers, lower_deltas, lower_to_native, quantise_products
    from trtconvert.export.nodes.attention import attention_nodes

    native = ir.load(onnx_file)
    if attention_nodes(native):
        lower_to_native(native)
    expand_layers(native)
    quantise_products(native)
    lower_deltas(native)
    storage.save(native, path)
    check_onnx(path, dtype)


def unquantised_reads(recipe: Recipe) -> dict[str, Any]:
    """What an export reads of the engine section, where it matters."""
    return {"unquantised": True} if recipe.engine.refittable else {}


def keep_unquantised(
    module: nn.Module, layers: Mapping[str, ConvertedLayer], onnx_file: Path, prefix: str = ""
) -> None:
    """Keep what INT8 layers are quantised from, for LoRAs and new weights of refittable engines."""
    from trtconvert.weights.unquantised import save_unquantised

    save_unquantised(module, [layer.layer for layer in layers.values()], onnx_file, prefix)
