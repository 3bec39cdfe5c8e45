"""Linear layers as NVIDIA's Model Optimizer quantises them (the package nvidia-modelopt), written to ONNX between Q and DQ.

Model Optimizer supplies the numbers: ranges of activations by its calibration, SmoothQuant's factors, scales of weights, read
from the modules of its PyTorch API. Its ONNX exporter uses TorchScript, which does not support all of these models. torch's own
exporter writes the nodes, so TensorRT gets the same kind of graph as for the other peers.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal

import onnx_ir as ir
import torch
from torch import Tensor, nn

LEFT = re.compile(
    r".*(time_emb_proj|time_embedding|time_text_embed|time_embed|condition_embedder|conv_in|conv_out|conv_shortcut|add_embedding"
    r"|pos_embed|context_embedder|caption_projection|x_embedder|adaln_single|norm_out).*|[^.]+\.proj_out"
)
"""Names of layers that stay in 16 bits, as in Model Optimizer's examples for diffusers; of convolutions all do."""

CONFIGURATIONS = {"int8": "INT8_SMOOTHQUANT_CFG", "fp8": "FP8_DEFAULT_CFG"}
RULES = ("*", "*weight_quantizer", "*input_quantizer")
LEVELS = {"int8": 127.0, "fp8": 448.0}
OPSET = 20
"""Opset of the ONNX model: Q and DQ take 16-bit scales since opset 19."""

Kind = Literal["int8", "fp8"]


class QdqLinear(nn.Module):
    """A linear layer with Q and DQ for its input and weight.

    Args:
        layer: of Model Optimizer, calibrated.
        kind: of its numbers.
    """

    factor: Tensor | None
    bias: Tensor | None
    x_scale: Tensor
    x_zero: Tensor
    weight: Tensor
    weight_scale: Tensor
    weight_zero: Tensor

    def __init__(self, layer: Any, kind: Kind) -> None:
        super().__init__()
        self._kind, dtype = kind, layer.weight.dtype
        of_input, of_weight = layer.input_quantizer, layer.weight_quantizer
        factor = getattr(of_input, "pre_quant_scale", None)
        self.register_buffer("factor", None if factor is None else factor.detach().to(dtype).reshape(-1))
        self.register_buffer("x_scale", (of_input.amax.detach().float().reshape(()) / LEVELS[kind]).to(dtype))
        scale = (of_weight.amax.detach().float().reshape(-1) / LEVELS[kind]).to(dtype)
        weight = layer.weight.detach()
        if kind == "int8":  # integers, with a scale for each output channel
            weight = (weight.float() / scale.float()[:, None]).round().clamp(-127, 127).to(torch.int8)
        self.register_buffer("weight", weight.T.contiguous())
        self.register_buffer("weight_scale", scale if kind == "int8" else scale.reshape(()))
        self.register_buffer("bias", None if layer.bias is None else layer.bias.detach())
        stored = torch.int8 if kind == "int8" else torch.float8_e4m3fn
        self.register_buffer("x_zero", torch.zeros((), dtype=stored))
        self.register_buffer("weight_zero", torch.zeros(self.weight_scale.shape, dtype=stored))

    def forward(self, x: Tensor) -> Tensor:
        moved = x if self.factor is None else x * self.factor
        rows = _dequantised(_quantised(moved, self.x_scale, self.x_zero), self.x_scale, self.x_zero)
        if self._kind == "int8":
            weight = _dequantised(self.weight, self.weight_scale, self.weight_zero, axis=1)
        else:
            stored = _quantised(self.weight, self.weight_scale, self.weight_zero)
            weight = _dequantised(stored, self.weight_scale, self.weight_zero)
        product = rows @ weight
        return product if self.bias is None else product + self.bias


def _quantised(x: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    return torch.onnx.ops.symbolic("QuantizeLinear", (x, scale, zero), dtype=zero.dtype, shape=x.shape, version=OPSET)


def _dequantised(q: Tensor, scale: Tensor, zero: Tensor, **attributes: int) -> Tensor:
    return torch.onnx.ops.symbolic(
        "DequantizeLinear", (q, scale, zero), dict(attributes), dtype=scale.dtype, shape=q.shape, version=OPSET
    )


def quantised_layers(
    denoiser: nn.Module, kind: Kind, fits: Callable[[nn.Module, str], bool], calibrate: Callable[[nn.Module], object]
) -> dict[str, QdqLinear]:
    """Returns calibrated linear layers of a denoiser by name; the denoiser does not change.

    Args:
        fits: whether a layer of a name is to be quantised, `LEFT` aside.
        calibrate: calls a denoiser of the same form with calibration inputs.
    Raises:
        ImportError: nvidia-modelopt is not installed.
    """
    from modelopt.torch import quantization  # pyright: ignore[reportMissingImports]  # optional, for this bench only

    names = {
        name for name, module in denoiser.named_modules()
        if isinstance(module, nn.Linear) and fits(module, name) and not LEFT.fullmatch(name)
    }  # fmt: skip
    configuration = copy.deepcopy(getattr(quantization, CONFIGURATIONS[kind]))
    # Drops rules by name for language models, such as "proj_out" of Whisper, like ModelOpt's own examples for diffusers.
    configuration["quant_cfg"] = [
        rule for rule in configuration["quant_cfg"] if rule["quantizer_name"] in RULES and "parent_class" not in rule
    ]
    # Nothing is quantised during the calibration, so rules for other layers make no difference.
    layers = dict(quantization.quantize(copy.deepcopy(denoiser), configuration, calibrate).named_modules())
    seen: dict[str, Any] = {name: layers[name] for name in sorted(names)}
    return {name: QdqLinear(layer, kind) for name, layer in seen.items() if layer.input_quantizer.amax is not None}


def with_layers(denoiser: nn.Module, layers: Mapping[str, nn.Module]) -> nn.Module:
    """Returns a copy of a denoiser with other layers of some names."""
    found = copy.deepcopy(denoiser, {id(denoiser.get_submodule(name)): layer for name, layer in layers.items()})
    return found.eval()


def set_apart(model: ir.Model) -> int:
    """Gives each product its own Q and DQ, in place: the exporter merges equal ones.

    TensorRT computes equal pairs once anyway. For a DQ with two readers TensorRT computes the 16-bit tensor, and leaves one of
    the products in 16 bits.

    Returns:
        How many pairs were added.
    """
    count = 0
    for dq in [node for node in model.graph if node.op_type == "DequantizeLinear"]:
        q = dq.inputs[0].producer() if dq.inputs[0] is not None else None
        if q is None or q.op_type != "QuantizeLinear":  # of a weight
            continue
        for reader, index in list(dq.outputs[0].uses())[1:]:
            value = q.inputs[0]
            for node in (q, dq):
                made = ir.node(node.op_type, [value, *node.inputs[1:]])
                made.outputs[0].type, made.outputs[0].shape = node.outputs[0].type, node.outputs[0].shape
                model.graph.insert_before(reader, made)
                value = made.outputs[0]
            reader.replace_input_with(index, value)
            count += 1
    return count
