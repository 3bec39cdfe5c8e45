"""TensorRT engines with INT8 convolutions by our plugins compute what the layers specify."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny_convs
import tolerances
import torch
from gpu_engines import output_of_plan
from test_engine_on_gpu import Watch, inputs_of

from trtconvert.engine import tensorrt
from trtconvert.export.lowering.int8_convs import INT8_CONV
from trtconvert.export.nodes.attention import attention_nodes
from trtconvert.library import has_group_norm_kernel, has_linear_kernel
from trtconvert.models.recorded_calls import relative_error
from trtconvert.recipe import EngineSection

pytestmark = pytest.mark.gpu
pytest.importorskip("tensorrt_bindings", reason="needs TensorRT")


@pytest.mark.parametrize("equalised", [True, False])
@pytest.mark.parametrize("modes", [[3], [3, 3]], ids=["one scale", "a scale for each bin"])
def test_an_engine_with_int8_convolutions_computes_what_they_specify(monkeypatch, modes, equalised):
    if not (has_group_norm_kernel() and has_linear_kernel()):
        pytest.skip("needs kernels for group norms and layers")
    tiny_convs.take_any_size(monkeypatch)
    trt = tensorrt.load()
    graph, inputs, expected, _ = tiny_convs.traced(modes, equalised)
    options = EngineSection(layers="plugin", attention="native")
    model = tensorrt.lowered(graph, list(attention_nodes(graph)), options, [{}])
    assert sum(node.op_type == INT8_CONV for node in model.graph) == 4
    specs = inputs_of(model)
    plan = tensorrt.build_lowered(trt, model, Path("unet.onnx"), specs, [{}], options, Watch())
    for timestep in (torch.tensor([100.0, 900.0]), torch.tensor([900.0, 900.0])):
        feed = {"x": inputs["x"].half(), "timestep": timestep}
        found = output_of_plan(trt, plan, {name: x.cuda() for name, x in feed.items()})
        assert relative_error(found.float().cpu(), expected(timestep)) < tolerances.INT8_CONVS_OF_A_UNET
