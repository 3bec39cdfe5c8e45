"""16-bit models widened to FP32: the same graph and weights."""

from __future__ import annotations

import copy

import onnx
import onnx_ir as ir
import pytest
import tolerances
import torch
from layered_graphs import STATIC, int8_model
from onnxruntime import InferenceSession

from trtconvert.export import storage
from trtconvert.export.float32 import in_float32
from trtconvert.models.denoiser import intercepted
from trtconvert.models.recorded_calls import relative_error
from trtconvert.quant.forward import Int8Layers, Int8Sites


@pytest.fixture(scope="module")
def model():
    return int8_model(modes=STATIC, attention=True)


@pytest.fixture(params=[torch.float16, torch.bfloat16], ids=str)
def dtype(request):
    return request.param


@pytest.fixture(params=[False, True], ids=["weights inside", "weights beside"])
def file(request, model, dtype, tmp_path, monkeypatch):
    if request.param:
        monkeypatch.setattr(storage, "INLINE_LIMIT", 1)
    path = tmp_path / "model.onnx"
    storage.save(model.graph(dtype), path)
    assert storage.weights_file(path).exists() == request.param
    return path


def types_of(proto: onnx.ModelProto) -> set[int]:
    values = [*proto.graph.input, *proto.graph.output, *proto.graph.value_info]
    return {x.data_type for x in proto.graph.initializer} | {x.type.tensor_type.elem_type for x in values}


def test_nothing_of_it_is_of_16_bits(file, dtype):
    of_type = {torch.float16: onnx.TensorProto.FLOAT16, torch.bfloat16: onnx.TensorProto.BFLOAT16}[dtype]
    assert of_type in types_of(onnx.load(file))
    with in_float32(file) as path:
        proto = onnx.load(path)
        assert of_type not in types_of(proto)
        assert not any(a.name == "to" and a.i == of_type for n in proto.graph.node for a in n.attribute)
        assert path != file
    assert not path.exists() and of_type in types_of(onnx.load(file))


def test_integers_beside_a_small_model_in_float32_are_copied(model, dtype, tmp_path, monkeypatch):
    def computed(file):
        session = InferenceSession(file)
        return session.run(None, {x.name: model.example()[x.name].numpy() for x in session.get_inputs()})[0]

    inside, beside = tmp_path / "inside.onnx", tmp_path / "beside.onnx"
    storage.save(model.graph(dtype), inside)
    with monkeypatch.context() as limited:
        limited.setattr(storage, "INLINE_LIMIT", 1)
        limited.setattr(storage, "SMALL", 0)
        storage.save(model.graph(dtype), beside)
    with in_float32(inside) as path:
        expected = computed(path)
    with in_float32(beside) as path:
        storage.weights_file(beside).unlink()
        assert (computed(path) == expected).all()


def test_a_graph_with_16_bit_weights_computes_in_float32(file, model, dtype):
    inputs = model.example()
    with in_float32(file) as path:
        names = [x.name for x in ir.load(path).graph.inputs]
        session = InferenceSession(path)
        (found,) = session.run(None, {name: inputs[name].numpy() for name in names})
    rounded = copy.copy(model.model)
    object.__setattr__(rounded, "denoiser", copy.deepcopy(model.model.denoiser).to(dtype).float())
    sites = Int8Sites(model.attention, rounded.timestep_max, "calibrated", True)
    layers = Int8Layers({name: layer.tables for name, layer in model.layers.items()}, rounded.timestep_max)
    with torch.no_grad():
        expected = intercepted(rounded, sites.handler(), layers.handler())(**inputs)
    assert relative_error(torch.from_numpy(found), expected) < tolerances.WHOLE_DENOISER
