"""Graphs of one `Int8Attention` node, run by ONNX Runtime."""

import onnx
import onnx_ir as ir
import onnxruntime
import torch
from onnx import TensorProto, helper

from trtconvert.export.nodes.attention_body import OP
from trtconvert.export.nodes.common import DOMAIN, OPSET

TABLES = ("q_scale", "k_scale", "v_scale", "k_offset", "v_offset", "modes")


def node_model(variant, feeds, dtype=TensorProto.FLOAT):
    """A model of one node and its inputs; the body is attached by the lowering under test or by the caller."""
    attributes = {
        "layout": variant.layout,
        "softmax_scale": 40**-0.5,
        "timestep_max": 1000.0,
        "scaling": variant.scaling,
        "smooth_k": int(variant.smooth_k),
    } | dict.fromkeys(variant.flags, 1)
    node = helper.make_node(OP, list(feeds), ["out"], domain=DOMAIN, **attributes)
    inputs = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(x.dtype), list(x.shape))
        for name, x in feeds.items()
    ]
    out = helper.make_tensor_value_info("out", dtype, list(feeds["q"].shape))
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(DOMAIN, 1)]
    return ir.from_proto(
        helper.make_model(helper.make_graph([node], "g", inputs, [out]), opset_imports=opsets, ir_version=10)
    )


def run(model, feeds):
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto)
    return torch.from_numpy(onnxruntime.InferenceSession(proto.SerializeToString()).run(None, feeds)[0])
