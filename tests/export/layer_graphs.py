"""Graphs of one `Int8Linear` or `Int8Conv` node, run by ONNX Runtime."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import torch
from onnx import helper, numpy_helper
from torch import Tensor

from trtconvert.export.nodes.common import DOMAIN, OPSET
from trtconvert.export.nodes.layers import CONV, INPUT_GROUP_METADATA, LAYER_METADATA, LINEAR, table_names
from trtconvert.linear.reference import LayerTables

LEVELS = ("ORT_DISABLE_ALL", "ORT_ENABLE_BASIC", "ORT_ENABLE_EXTENDED", "ORT_ENABLE_LAYOUT", "ORT_ENABLE_ALL")
"""ONNX Runtime's levels of graph optimisation."""


def layer_model(
    x: Tensor,
    tables: LayerTables,
    *,
    timed: bool,
    stride: Sequence[int] = (),
    padding: Sequence[int] = (),
    free: Sequence[int] = (0,),
) -> ir.Model:
    """A model of one node, its tables initialisers; the body is attached by the lowering under test.

    Args:
        stride, padding: of a convolution.
        free: axes of x whose size is not fixed.
    """
    op = CONV if stride else LINEAR
    attributes = {"timestep_max": 1000.0} | ({"strides": stride, "pads": [*padding, *padding]} if stride else {})
    names = table_names(op)
    inputs = [("x", x, [f"size_{axis}" if axis in free else size for axis, size in enumerate(x.shape)])]
    if timed:
        inputs.append(("timestep", torch.zeros(1), ["batch"]))
    node = helper.make_node(op, ["x", *names, *["timestep"] * timed], ["out"], "layer", domain=DOMAIN, **attributes)
    for key in (LAYER_METADATA, INPUT_GROUP_METADATA):
        node.metadata_props.add(key=key, value="layer")
    of_x = helper.np_dtype_to_tensor_dtype(x.numpy().dtype)
    graph = helper.make_graph(
        [node],
        "g",
        [helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.numpy().dtype), shape)
         for name, value, shape in inputs],
        [helper.make_tensor_value_info("out", of_x, [None] * x.dim())],
        [numpy_helper.from_array(np.ascontiguousarray(getattr(tables, name).numpy()), name) for name in names],
    )  # fmt: skip
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(DOMAIN, 1)]
    model = ir.from_proto(helper.make_model(graph, opset_imports=opsets, ir_version=10))
    model.graph[0].outputs[0].shape = ir.Shape([None] * x.dim())
    return model


def run(model: ir.Model, x: Tensor, timestep: Tensor | None = None, level: str = "ORT_ENABLE_ALL") -> Tensor:
    """Checks a model, and runs it in ONNX Runtime at a level of graph optimisation."""
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto, full_check=True)
    return run_proto(proto, x, timestep, level)


def run_proto(proto: onnx.ModelProto, x: Tensor, timestep: Tensor | None, level: str) -> Tensor:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
    session = onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    feeds = {"x": x.numpy()} | ({} if timestep is None else {"timestep": timestep.numpy()})
    return torch.from_numpy(session.run(None, feeds)[0])
