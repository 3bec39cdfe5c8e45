"""Helpers of tests of rotary embeddings and norms: traced models, and the plugin's arithmetic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import onnx_ir as ir
import onnxruntime
import tiny_models
import tolerances
import torch
from onnx_ir.passes.common import RemoveUnusedNodesPass
from torch import nn

from trtconvert.diffusion_model import InputSpec
from trtconvert.export.lowering.plugin import lower_to_plugin
from trtconvert.export.nodes.attention import attention_nodes
from trtconvert.models.recorded_calls import relative_error

HEADS, CHANNELS, TOKENS = 2, 32, 6


WIDTH = HEADS * CHANNELS


Shapes = Mapping[str, tuple[int | str, ...]]


def traced(denoiser: nn.Module, shapes: Shapes, dtype: torch.dtype = torch.float16) -> ir.Model:
    """A denoiser with random weights, its nodes not lowered yet; dimensions with a name vary."""
    generator = torch.Generator().manual_seed(0)
    for parameter in denoiser.parameters():
        nn.init.normal_(parameter, std=0.2, generator=generator)
    model = replace(
        tiny_models.build(),
        denoiser=denoiser.eval().requires_grad_(False),
        inputs=tuple(InputSpec(name, "float32", shape) for name, shape in shapes.items()),
        output=InputSpec("prediction", "float32", shapes["x"]),
        # More tokens than parts of them, else a slice may be cut short.
        dims={
            size: (4, 6, 8) if size == "tokens" else (2, 3, 8)
            for shape in shapes.values()
            for size in shape
            if isinstance(size, str)
        },
    )
    return tiny_models.traced(model, dtype)


ROTATED: Shapes = {"x": ("batch", TOKENS, WIDTH), "timestep": ("batch",)}


def run(model: ir.Model, **dims: int) -> dict[str, np.ndarray]:
    """Returns the inputs of each node and the model's output, with random outputs of attention."""
    model = model.clone()
    graph, sizes = model.graph, {"batch": 2, "tokens": 5} | dims
    for site, node in attention_nodes(model).items():
        names = [name for name in ("rotary", "norm") if name in node.attributes]
        read = dict(
            zip((*"qk", *names), (*node.inputs[:2], *node.inputs[len(node.inputs) - len(names) :]), strict=True)
        )
        for name, value in read.items():
            same = ir.node("Identity", [value])
            same.outputs[0].name, same.outputs[0].type = f"{site} {name}", value.type
            graph.insert_before(node, same)
            graph.outputs.append(same.outputs[0])
        out = node.outputs[0]
        given = ir.Value(name=f"{site} out", shape=out.shape, type=out.type)
        graph.inputs.append(given)
        if node.attributes["layout"].as_string() == "BHND":  # the same numbers as after folding to BNHD
            given.shape = ir.Shape([out.shape[axis] for axis in (0, 2, 1, 3)])
            back = ir.node("Transpose", [given], {"perm": [0, 2, 1, 3]})
            back.outputs[0].shape, back.outputs[0].type = out.shape, out.type
            graph.insert_before(node, back)
            given = back.outputs[0]
        ir.convenience.replace_all_uses_with(out, given)
    model.functions.clear()
    RemoveUnusedNodesPass()(model)
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    generator, feeds = np.random.default_rng(0), {}
    for value in session.get_inputs():
        # Sizes are numbers, names, or what torch.export derives from these.
        numbers = generator.standard_normal([eval(str(size), {}, sizes) for size in value.shape])
        feeds[value.name] = numbers.astype(np.float16 if "float16" in value.type else np.float32)
    names = [value.name for value in session.get_outputs()]
    return dict(zip(names, session.run(None, feeds), strict=True))


def as_the_plugin(read: Mapping[str, np.ndarray], site: str, index: int, node: ir.Node) -> np.ndarray:
    """Queries (0) or keys (1) after the plugin's norm and rotation."""
    x = read[f"{site} {'qk'[index]}"]
    if x.ndim == 5:  # q, k and v in one
        x = x[:, :, index]
    elif index == 1 and "kv_heads" in node.attributes:  # of the heads of several nodes
        first, count = (node.attributes[name].as_int() for name in ("k_head", "kv_heads"))
        x = x[:, :, first : first + count]
    if (norm := read.get(f"{site} norm")) is not None:
        wide = x.astype(np.float32)
        epsilon, weight = node.attributes["norm_eps"].as_float(), norm[index]
        split = node.attributes.get_int("norm_split", 0)
        of_token = norm.ndim == 3 and not split  # across heads, and then the layout is BNHD
        mean = (wide**2).mean((2, 3) if of_token else 3, keepdims=True)
        if split:  # the first tokens have weights of their own
            heads_first = node.attributes["layout"].as_string() == "BHND"
            assert 0 < split < x.shape[2 if heads_first else 1] and weight.shape == (2, x.shape[3])
            of_tokens = weight[(np.arange(x.shape[2 if heads_first else 1]) >= split).astype(int)]
            weight = of_tokens if heads_first else of_tokens[:, None]
        x = (wide / np.sqrt(mean + epsilon) * weight).astype(x.dtype)
    if (rotary := read.get(f"{site} rotary")) is not None:
        even, odd = x[..., 0::2].astype(np.float32), x[..., 1::2].astype(np.float32)
        of_heads = rotary if node.attributes["layout"].as_string() == "BHND" else rotary[:, None]
        cos, sin = of_heads[..., 0], of_heads[..., 1]
        x = np.stack([even * cos - odd * sin, odd * cos + even * sin], -1).reshape(x.shape).astype(x.dtype)
    return x


def assert_same_after(model: ir.Model, lowered: ir.Model, **dims: int) -> None:
    before, after = run(model, **dims), run(lowered, **dims)
    for site, node in attention_nodes(lowered).items():
        for index, name in enumerate("qk"):
            ours = torch.from_numpy(as_the_plugin(after, site, index, node)).float()
            expected = torch.from_numpy(before[f"{site} {name}"]).float()
            if (
                attention_nodes(model)[site].attributes["layout"].value != node.attributes["layout"].value
            ):  # folded since
                expected = expected.transpose(1, 2)
            joined = "kv_heads" in node.attributes
            limit = tolerances.ROUNDED_PROJECTION if joined else tolerances.ROUNDED_TO_HALF
            assert relative_error(ours, expected) < limit
    np.testing.assert_array_equal(after["prediction"], before["prediction"])


def lowered(model: ir.Model, **options: bool) -> ir.Model:
    model = model.clone()
    lower_to_plugin(model, **options)
    return model


def taken(model: ir.Model) -> dict[str, set[str]]:
    """The optional inputs of each site."""
    return {site: {"rotary", "norm"} & set(node.attributes) for site, node in attention_nodes(model).items()}
