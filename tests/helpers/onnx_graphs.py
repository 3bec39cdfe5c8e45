"""Small denoisers as ONNX files: written node by node, and exported by torch."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import torch
from torch import Tensor, nn
from torch.nn import functional

HEADS, HEAD_DIM = 2, 32
WIDTH = HEADS * HEAD_DIM
TOKENS = 12
SCALE = HEAD_DIM**-0.5

HEADER = """
<ir_version: {ir}, opset_import: ["" : {opset}, "com.microsoft" : 1]>
denoiser ({kind}[batch, {tokens}, 64] sample, float[batch] timestep{inputs}) => ({kind}[batch, {tokens}, 64] out_sample) {{
    one = Constant<value = int64[1] {{1}}> ()
    steps = Unsqueeze(timestep, one)
    waves = Mul(steps, frequencies)
    sines = Sin(waves)
    typed = Cast<to = {number}>(sines)
    shift = Gemm(typed, time_weight, time_bias)
    shift3 = Unsqueeze(shift, one)
    x = Add(sample, shift3)
    {body}
    projected = MatMul(joined, out_weight)
    biased = Add(out_bias, projected)
    out_sample = Add(biased, sample)
}}
"""

TO_HEADS = """
    shape = Constant<value = int64[4] {0, 0, 2, 32}> ()
    q0 = MatMul(x, q_weight)
    k0 = MatMul(x, k_weight)
    v0 = MatMul(x, v_weight)
    q1 = Reshape(q0, shape)
    k1 = Reshape(k0, shape)
    v1 = Reshape(v0, shape)
    q = Transpose<perm = [0, 2, 1, 3]>(q1)
    k = Transpose<perm = [0, 2, 1, 3]>(k1)
    v = Transpose<perm = [0, 2, 1, 3]>(v1)
"""
FROM_HEADS = """
    back = Transpose<perm = [0, 2, 1, 3]>(attended)
    flat = Constant<value = int64[3] {0, 0, 64}> ()
    joined = Reshape(back, flat)
"""

_KINDS = {"float": 1, "float16": 10, "bfloat16": 16}


def denoiser(
    path: Path,
    body: str,
    *,
    opset: int = 17,
    kind: str = "float",
    inputs: str = "",
    tokens: int | str = TOKENS,
    weights: Mapping[str, np.ndarray] | None = None,
    external: str = "",
) -> Path:
    """A file with one attention between projections of tokens.

    Args:
        body: of x [batch, tokens, 64] to `joined`; inputs: further ones, after a comma.
        kind: of weights and tensors; weights: further ones. external: name of a file for weights beside it.
    """
    number = _KINDS[kind]
    text = HEADER.format(
        ir=10 if opset > 21 else 8, opset=opset, kind=kind, tokens=tokens, inputs=inputs, number=number, body=body
    )
    model = onnx.parser.parse_model(text)
    random = np.random.default_rng(0)
    shapes = {f"{name}_weight": (WIDTH, WIDTH) for name in ("q", "k", "v", "out")}
    shapes |= {"qkv_weight": (WIDTH, 3 * WIDTH), "qkv_bias": (3 * WIDTH,), "out_bias": (WIDTH,), "time_bias": (WIDTH,)}
    shapes |= {"time_weight": (16, WIDTH)}
    arrays = {name: (random.normal(size=shape) * shape[0] ** -0.5).astype(np.float32) for name, shape in shapes.items()}
    read = {name for node in model.graph.node for name in node.input}
    for name, array in {**arrays, **(weights or {})}.items():
        if name in read:
            model.graph.initializer.append(_tensor(name, array, number))
    frequencies = np.exp(np.linspace(0, -9, 16)).astype(np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(frequencies[None], "frequencies"))
    if external:
        onnx.save(model, path, save_as_external_data=True, location=external, size_threshold=100)
    else:
        onnx.save(model, path)
    return path


def _tensor(name: str, array: np.ndarray, number: int) -> onnx.TensorProto:
    if array.dtype != np.float32:
        return onnx.numpy_helper.from_array(array, name)
    return ir.to_proto(ir.tensor(array.astype(ir.DataType(number).numpy()), name=name, dtype=ir.DataType(number)))


def plain(scores: str, *, transposed: str = "kt = Transpose<perm = [0, 1, 3, 2]>(k)") -> str:
    """Attention of q, k and v whose logits, of `kt`, are made so, up to a line for `p`."""
    return f"""{TO_HEADS}
    {transposed}
    {scores}
    attended = MatMul(p, v)
    {FROM_HEADS}"""


class UNet(nn.Module):
    """Convolutions, group norms, a level below with attention over its pixels and over a prompt, and a way up."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.time = nn.Linear(16, WIDTH)
        self.conv_in = nn.Conv2d(4, WIDTH, 3, padding=1)
        self.norm = nn.GroupNorm(8, WIDTH)
        self.down = nn.Conv2d(WIDTH, WIDTH, 3, stride=2, padding=1)
        self.attn1 = Attention(WIDTH)
        self.attn2 = Attention(24)
        self.up = nn.Conv2d(WIDTH, WIDTH, 3, padding=1)
        self.conv_out = nn.Conv2d(2 * WIDTH, 4, 3, padding=1)
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            std = 0.5 if parameter.dim() == 1 else parameter[0].numel() ** -0.5
            nn.init.normal_(parameter, std=std, generator=generator)

    def forward(self, sample: Tensor, timestep: Tensor, text: Tensor) -> Tensor:
        """sample [B, 4, H, W], timestep [B], text [B, N, 24] → as sample."""
        waves = timestep[:, None] * torch.exp(torch.linspace(0, -9, 8, device=sample.device))
        features = torch.cat([waves.sin(), waves.cos()], 1).to(sample.dtype)
        above = self.conv_in(sample) + self.time(features)[:, :, None, None]
        x = self.down(functional.silu(self.norm(above)))
        tokens = x.flatten(2).transpose(1, 2)
        tokens = tokens + self.attn1(tokens, tokens)
        tokens = tokens + self.attn2(tokens, text)
        x = tokens.transpose(1, 2).unflatten(2, x.shape[2:])
        x = self.up(functional.interpolate(x, scale_factor=2.0, mode="nearest"))
        return self.conv_out(torch.cat([x, above], 1))


class Attention(nn.Module):
    """[B, N, 64] to tokens of some width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.to_q = nn.Linear(WIDTH, WIDTH, bias=False)
        self.to_k = nn.Linear(width, WIDTH, bias=False)
        self.to_v = nn.Linear(width, WIDTH, bias=False)
        self.to_out = nn.ModuleList([nn.Linear(WIDTH, WIDTH)])

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        parts = (self.to_q(x), self.to_k(context), self.to_v(context))
        q, k, v = (part.unflatten(2, (HEADS, -1)).transpose(1, 2) for part in parts)
        return self.to_out[0](functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def exported(
    path: Path,
    module: nn.Module,
    inputs: Sequence[torch.Tensor],
    names: Sequence[str],
    varying: Mapping[str, Mapping[int, str]],
    *,
    opset: int = 17,
    dynamo: bool = False,
    output: str = "out_sample",
    **options: Any,
) -> Path:
    """What torch's exporters make of a module: the new one, or the one by tracing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if dynamo:
            dims: dict[str, Any] = {}
            shapes = tuple(
                {
                    axis: dims.setdefault(dim, torch.export.Dim(dim, min=1, max=64))
                    for axis, dim in varying.get(name, {}).items()
                }
                for name in names
            )
            torch.onnx.export(
                module, tuple(inputs), path, input_names=list(names), output_names=[output], dynamo=True,
                dynamic_shapes=shapes, opset_version=opset, external_data=False, verbose=False, **options,
            )  # fmt: skip
        else:
            torch.onnx.export(
                module, tuple(inputs), path, input_names=list(names), output_names=[output], dynamo=False,
                dynamic_axes={name: dict(axes) for name, axes in varying.items()}, opset_version=opset, **options,
            )  # fmt: skip
    return path
