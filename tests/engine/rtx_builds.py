"""Small networks for builds by TensorRT-RTX, which needs no GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from onnx import TensorProto, helper

from trtconvert.bundle import TensorRecord
from trtconvert.engine.builder import build_plan
from trtconvert.errors import TrtconvertError

trt = pytest.importorskip("tensorrt_rtx_bindings", reason="needs the extra 'rtx'")


class Watch:
    """Collects shares and notices."""

    def __init__(self):
        self.shares, self.details, self.notices = [], [], []

    def share(self, detail, done):
        self.shares.append(done)
        self.details.append(detail)

    def notice(self, text):
        self.notices.append(text)


def model_of(*nodes, size=64, opset=20):
    """Makes a model x [batch, size] → y of nodes."""
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", size]) for name in "xy")
    weight = helper.make_tensor("weight", TensorProto.FLOAT, [size, size], [0.01] * size**2)
    graph = helper.make_graph(nodes, "g", [x], [y], [weight])
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("other", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


LINEAR = (helper.make_node("MatMul", ["x", "weight"], ["y"], name="product"),)


def build(model, path=Path("model.onnx"), profiles=({"batch": (1, 2, 4)},), watch=None, configure=None, **options):
    def for_ada(config):
        config.num_compute_capabilities = 1
        config.set_compute_capability(trt.ComputeCapability.SM89, 0)
        if configure is not None:
            configure(config)

    inputs = [TensorRecord(name="x", dtype="float32", shape=["batch", 64])]
    content = model if isinstance(model, bytes) else model.SerializeToString()
    return build_plan(
        trt, content, path, inputs, profiles, configure=for_ada, watch=watch or Watch(), title="here", **options
    )


def refused(*parts, model, **options):
    with pytest.raises(TrtconvertError) as error:
        build(model, **options)
    for part in ("expected: ", "got: ", "remedy: ", *parts):
        assert part in str(error.value), str(error.value)
