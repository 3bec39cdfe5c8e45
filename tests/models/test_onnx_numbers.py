"""Constants of one number as inputs of operators that take tensors: each computes the same as ONNX Runtime."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import onnxruntime
import pytest
import torch

from trtconvert.errors import UserError
from trtconvert.models.onnx.call import Types
from trtconvert.models.onnx.denoiser import GraphDenoiser, folded, observed
from trtconvert.models.onnx.steps import graph_of

_TEXT = """
<ir_version: 8, opset_import: ["" : {opset}, "com.microsoft" : 1]>
one_step (float[{shape}] x) => (float[?] y) {{
    {body}
}}
"""


def _model(body: str, shape: str, opset: int, numbers: dict[str, tuple[int, ...]]) -> onnx.ModelProto:
    """Returns a step of x and of constants with one number each, given by their shapes."""
    model = onnx.parser.parse_model(_TEXT.format(opset=opset, shape=shape, body=body))
    for name, sizes in numbers.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.full(sizes, 0.75, np.float32), name))
    del model.graph.output[0].type.tensor_type.shape.dim[:]
    model.graph.output[0].type.tensor_type.ClearField("shape")
    return model


_IMAGE = "2, 3, 4, 4"
_STEPS: dict[str, tuple[str, str, dict[str, tuple[int, ...]]]] = {
    "a bias of Conv": ("w = Constant<value = float[1, 1, 1, 1] {2.0}> ()\ny = Conv(x, w, c)", "2, 1, 4, 4", {"c": (1,)}),
    "a weight of Conv": ("y = Conv(x, c)", "2, 1, 4, 4", {"c": (1, 1, 1, 1)}),
    "both of ConvTranspose": ("y = ConvTranspose(x, c, b)", "2, 1, 4, 4", {"c": (1, 1, 1, 1), "b": (1,)}),
    "a bias of Gemm": ("y = Gemm(x, w, c)", "2, 1", {"w": (1, 1), "c": (1,)}),
    "a matrix of Gemm": ("y = Gemm<transB = 1>(x, c)", "2, 1", {"c": (1, 1)}),
    "a factor of MatMul": ("y = MatMul(x, c)", "2, 3, 1", {"c": (1, 1)}),
    "the first factor of MatMul": ("y = MatMul(c, x)", "2, 1, 3", {"c": (1, 1)}),
    "a factor of FusedMatMul": ("y = com.microsoft.FusedMatMul<alpha = 0.5>(x, c)", "2, 3, 1", {"c": (1, 1)}),
    "a factor of Einsum": ('y = Einsum<equation = "bnd,de->bne">(x, c)', "2, 3, 1", {"c": (1, 1)}),
    "the first factor of Einsum": ('y = Einsum<equation = "de,bnd->bne">(c, x)', "2, 3, 1", {"c": (1, 1)}),
    "a slope of PRelu": ("y = PRelu(x, c)", _IMAGE, {"c": (1,)}),
    "what PRelu takes": ("n = Neg(c)\nz = PRelu(n, c)\ny = Add(x, z)", _IMAGE, {"c": (1,)}),
    "what Pow takes": ("y = Pow(c, x)", _IMAGE, {"c": (1,)}),
    "what Mod takes": ("y = Mod<fmod = 1>(c, x)", _IMAGE, {"c": (1,)}),
    "what Mod divides by": ("y = Mod<fmod = 1>(x, c)", _IMAGE, {"c": (1,)}),
    "what Div takes": ("y = Div(c, x)", _IMAGE, {"c": (1,)}),
    "what Where chooses": ("low = Less(x, c)\ny = Where(low, c, x)", _IMAGE, {"c": (1, 1)}),
    "what Clip holds to": ("y = Clip(x, c)", _IMAGE, {"c": ()}),
    "what Max takes": ("y = Max(c, x)", _IMAGE, {"c": (1,)}),
    "what Min takes last": ("y = Min(x, c)", _IMAGE, {"c": (1,)}),
    "what Mean takes": ("y = Mean(c, x)", _IMAGE, {"c": (1,)}),
    "a truth value of Less": ("low = Less(c, x)\ny = Cast<to = 1>(low)", _IMAGE, {"c": (1,)}),
    "a part of Concat": ("y = Concat<axis = 1>(x, c)", "1, 3", {"c": (1, 1)}),
    "what Expand expands": ("s = Shape(x)\nz = Expand(c, s)\ny = Add(x, z)", _IMAGE, {"c": (1,)}),
    "what Tile repeats": ("s = Constant<value = int64[1] {4}> ()\nz = Tile(c, s)\ny = Add(x, z)", _IMAGE, {"c": (1,)}),
    "what Pad fills with": ("p = Constant<value = int64[2] {1, 1}> ()\ny = Pad(x, p, c)", "4", {"c": ()}),
    "what Pad surrounds": ("p = Constant<value = int64[2] {1, 2}> ()\nz = Pad(c, p)\ny = Add(x, z)", "4", {"c": (1,)}),
    "what Flatten takes": ("z = Flatten(c)\ny = Add(x, z)", "2, 3", {"c": (1, 1, 1)}),
    "what Transpose takes": ("z = Transpose(c)\ny = Add(x, z)", "2, 3", {"c": (1, 1)}),
    "what Gather takes": ("i = Constant<value = int64[2] {0, 0}> ()\nz = Gather(c, i)\ny = Add(x, z)", "2, 2", {"c": (1,)}),
    "what GatherElements takes": (
        "i = Constant<value = int64[3] {0, 0, 0}> ()\nz = GatherElements(c, i)\ny = Add(x, z)", "2, 3", {"c": (1,)}
    ),
    "what ScatterND writes": (
        "i = Constant<value = int64[1, 1] {2}> ()\ny = ScatterND(x, i, c)", "4", {"c": (1,)}
    ),
    "what ScatterElements writes": (
        "i = Constant<value = int64[1] {2}> ()\ny = ScatterElements(x, i, c)", "4", {"c": (1,)}
    ),
    "what Trilu takes": ("z = Trilu(c)\ny = Add(x, z)", "2, 3", {"c": (1, 1)}),
    "what Split takes": ("s = Split<axis = 0, num_outputs = 1>(c)\ny = Add(x, s)", "2, 3", {"c": (1, 1)}),
    "what AveragePool takes": (
        "z = AveragePool<kernel_shape = [1, 1]>(c)\ny = Add(x, z)", _IMAGE, {"c": (1, 1, 1, 1)}
    ),
    "what GlobalAveragePool takes": ("z = GlobalAveragePool(c)\ny = Add(x, z)", _IMAGE, {"c": (1, 1, 1, 1)}),
    "what Softmax takes": ("z = Softmax(c)\ny = Add(x, z)", _IMAGE, {"c": (1, 1)}),
    "what ArgMax takes": ("i = ArgMax<axis = 1>(c)\nz = Cast<to = 1>(i)\ny = Add(x, z)", _IMAGE, {"c": (1, 1)}),
    "what CumSum takes": ("i = Constant<value = int64 {0}> ()\nz = CumSum(c, i)\ny = Add(x, z)", _IMAGE, {"c": (1,)}),
    "what ReduceMean takes": ("z = ReduceMean(c)\ny = Add(x, z)", _IMAGE, {"c": (1, 1)}),
    "what LpNormalization takes": ("z = LpNormalization(c)\ny = Add(x, z)", _IMAGE, {"c": (1, 1)}),
    "weights of LayerNormalization": ("y = LayerNormalization(x, c, b)", "2, 3, 1", {"c": (1,), "b": (1,)}),
    "what LayerNormalization takes": (
        "z = LayerNormalization(c, c)\ny = Add(x, z)", "2, 3, 1", {"c": (1,)}
    ),
    "weights of InstanceNormalization": ("y = InstanceNormalization(x, c, b)", "2, 1, 4", {"c": (1,), "b": (1,)}),
    "weights of BatchNormalization": (
        "y = BatchNormalization(x, c, b, m, v)", "2, 1, 4", {"c": (1,), "b": (1,), "m": (1,), "v": (1,)}
    ),
    "weights of SkipLayerNormalization": (
        "y = com.microsoft.SkipLayerNormalization(x, x, c, b)", "2, 3, 1", {"c": (1,), "b": (1,)}
    ),
    "what Elu takes": ("z = Elu(c)\ny = Add(x, z)", _IMAGE, {"c": (1,)}),
    "what LeakyRelu takes": ("z = LeakyRelu(c)\ny = Add(x, z)", _IMAGE, {"c": (1,)}),
    "what HardSigmoid takes": ("z = HardSigmoid(c)\ny = Add(x, z)", _IMAGE, {"c": (1,)}),
    "what Gelu takes": ("z = com.microsoft.Gelu(c)\ny = Add(x, z)", _IMAGE, {"c": (1,)}),
    "what QuickGelu takes": ("z = com.microsoft.QuickGelu(c)\ny = Add(x, z)", _IMAGE, {"c": (1,)}),
    "what BiasGelu adds": ("y = com.microsoft.BiasGelu(x, c)", "2, 1", {"c": (1,)}),
    "what Sigmoid takes": ("z = Sigmoid(c)\ny = Add(x, z)", _IMAGE, {"c": (1,)}),
    "a scale of DequantizeLinear": (
        "w = Constant<value = int8[1, 1] {3}> ()\nz = DequantizeLinear(w, c)\ny = Add(x, z)", _IMAGE, {"c": ()}
    ),
    "what DequantizeLinear takes": (
        "w = Constant<value = int8[1] {3}> ()\nz = DequantizeLinear(w, c)\ny = Add(x, z)", _IMAGE, {"c": ()}
    ),
}  # fmt: skip


@pytest.mark.parametrize("step", _STEPS)
def test_a_constant_of_one_number_is_what_any_operator_takes(step):
    body, shape, numbers = _STEPS[step]
    proto = _model(body, shape, 18, numbers)
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    x = np.random.default_rng(0).normal(size=[int(size) for size in shape.split(",")]).astype(np.float32)
    (expected,) = session.run(None, {"x": x})
    denoiser = _denoiser(proto)
    with torch.no_grad():
        got = denoiser(x=torch.from_numpy(x)).numpy()
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("step", ["a bias of Conv", "a weight of Conv", "both of ConvTranspose", "a matrix of Gemm"])
def test_a_weight_of_one_number_is_of_the_module_s_type(step):
    """Numbers neither widen computations in 16 bits nor clash with their type."""
    body, shape, numbers = _STEPS[step]
    denoiser = _denoiser(_model(body, shape, 18, numbers)).bfloat16()
    x = torch.randn([int(size) for size in shape.split(",")], dtype=torch.bfloat16)
    with torch.no_grad():
        assert denoiser(x=x).dtype == torch.bfloat16
    assert all(parameter.dtype == torch.bfloat16 for parameter in denoiser.parameters())


def _denoiser(proto: onnx.ModelProto) -> GraphDenoiser:
    graph = graph_of(ir.serde.deserialize_model(proto))
    with torch.no_grad():
        values = folded(graph, ir.DataType.FLOAT)
    values["unused"] = torch.zeros(2)  # without a parameter the module has no type
    return GraphDenoiser(graph, values, ir.DataType.FLOAT, keep=set())


def test_a_step_that_cannot_be_computed_is_no_matter_of_sizes(monkeypatch):
    """The message for an operator that fails for another reason than its shapes does not ask for other sizes."""
    from trtconvert.models.onnx import operators

    def broken(call, x):
        return x.no_such_thing

    monkeypatch.setitem(operators.OPERATORS, "Abs", broken)
    graph = graph_of(ir.serde.deserialize_model(_model("y = Abs(x)", "2, 3", 18, {})))
    types = Types(1, torch.float32, torch.device("cpu"))
    with pytest.raises(UserError, match=r"(?s)Abs.*remedy: export the model in another way") as refused:
        observed(graph, {}, types, {"x": torch.zeros(2, 3)})
    assert "sizes" not in str(refused.value)
