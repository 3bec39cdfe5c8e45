"""Checks of ONNX files by stages: weights beside the model are not read."""

from __future__ import annotations

import onnx
import pytest
import torch
from layered_graphs import STATIC, int8_model

from trtconvert.export import storage
from trtconvert.stages.onnx_files import check_onnx

TYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


@pytest.fixture(scope="module")
def model():
    return int8_model(modes=STATIC, attention=True)


@pytest.fixture(params=sorted(TYPES))
def dtype(request):
    return request.param


@pytest.fixture
def file(model, dtype, tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "INLINE_LIMIT", 1)
    path = tmp_path / "model.onnx"
    storage.save(model.graph(TYPES[dtype]), path)
    storage.weights_file(path).write_bytes(b"")
    return path


def test_a_whole_model_passes_without_its_weights(file):
    check_onnx(file)


def test_a_weight_of_another_shape_is_refused(file):
    proto = onnx.load(file, load_external_data=False)
    standard = {name for node in proto.graph.node if not node.domain for name in node.input}
    weight = next(x for x in proto.graph.initializer if x.name in standard and x.external_data)
    weight.dims[-1] += 1
    file.write_bytes(proto.SerializeToString())
    with pytest.raises(onnx.shape_inference.InferenceError):
        check_onnx(file)
