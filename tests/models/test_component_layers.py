"""INT8 layers of text encoders and VAEs: each component meets its error limit by excluding its most sensitive layers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from converted_pipelines import component_error, component_records, recipe_of, save
from onnx import numpy_helper

from trtconvert.bundle import unquantised_file
from trtconvert.engine import tensorrt
from trtconvert.errors import GateError, UserError
from trtconvert.linear.modes import LayerMode
from trtconvert.recipe import EngineSection
from trtconvert.runtime.loras import BuiltWeights
from trtconvert.stages.common import NATIVE
from trtconvert.weights.unquantised import Unquantised

pytest.importorskip("diffusers", reason="needs diffusers")
pytest.importorskip("transformers", reason="needs transformers")

INT8 = {"text_encoder": {"layers": "int8"}}
LIMIT = 0.08
"""Limit for small random encoders: few errors average out in layers of 32 channels."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A saved PixArt pipeline, whose text encoder is T5."""
    folder = tmp_path_factory.mktemp("saved")
    save(folder / "pipeline", "pixart")
    return folder


def stages(folder: Path, components: dict, limit: float = LIMIT):
    recipe = recipe_of(folder, "pixart", components, verify={"max_component_error": limit})
    return component_records(folder, recipe)["text_encoder"]


def test_a_text_encoder_in_int8_keeps_its_limit_and_is_smaller(saved):
    (exact, before), (stage, record) = stages(saved, {"text_encoder": {}}), stages(saved, INT8)
    in_int8 = [layer for layer in record.layers if layer.in_int8]
    assert len(in_int8) >= 10 and all(layer.modes == [LayerMode.STATIC] for layer in in_int8) and not before.layers
    assert all(layer.reason for layer in record.layers if not layer.in_int8)
    assert component_error(exact, before) < component_error(stage, record) <= LIMIT
    weights = sum(layer.in_channels * layer.out_channels for layer in in_int8)
    sizes = [
        sum(numpy_helper.to_array(x).nbytes for x in onnx.load(s.folder / r.onnx).graph.initializer)
        for s, r in ((exact, before), (stage, record))
    ]
    assert sizes[0] - sizes[1] > 2 * weights  # INT8 saves three of FP32's four bytes, up to the scales


def test_engines_of_components_get_their_layers_between_q_and_dq(saved):
    stage, record = stages(saved, INT8)
    native = onnx.load(stage.folder / NATIVE)
    in_int8 = [layer for layer in record.layers if layer.in_int8]
    for model in (
        native,
        ir.to_proto(tensorrt.lowered(ir.load(stage.folder / record.onnx), [], EngineSection(), [{}])),
    ):
        stored = [x for x in model.graph.initializer if numpy_helper.to_array(x).dtype == np.int8 and len(x.dims) == 2]
        assert len(stored) == len(in_int8) and not model.functions
        assert sum(node.op_type == "QuantizeLinear" for node in model.graph.node) == len(in_int8)


@pytest.mark.soak
def test_a_refittable_encoder_keeps_what_its_layers_were_quantised_from(saved):
    """Weights have the names of the encoder's state dict, which LoRA files use."""
    recipe = recipe_of(saved, "pixart", INT8, verify={"max_component_error": LIMIT}, engine={"refittable": True})
    stage, record = component_records(saved, recipe)["text_encoder"]
    kept = Unquantised(unquantised_file(stage.folder / record.onnx))
    assert kept.refs.keys() == {layer.name for layer in record.layers if layer.in_int8}
    found = built_weights(stage.folder / record.onnx)
    names = {ref.name for of in kept.refs.values() for ref in of.values() if ref is not None}
    assert all(name.startswith("encoder.block.") for name in names)
    assert names <= found.shapes.keys() and {found.layers.origin(name) for name in names} == names


def built_weights(onnx):
    found = BuiltWeights(onnx, {})
    assert found.layers is not None
    return found


@pytest.mark.soak
def test_a_tighter_limit_leaves_the_layers_that_suffer_most(saved):
    stage, record = stages(saved, INT8, limit := 0.02)
    left = [layer for layer in record.layers if "INT8 would leave" in layer.reason]
    assert left and any(layer.in_int8 for layer in record.layers)
    assert component_error(stage, record) <= limit


def test_a_limit_that_no_layer_keeps_is_a_gate_that_says_so(saved):
    with pytest.raises(GateError, match="no layer of text_encoder can be INT8") as error:
        stages(saved, INT8, 1e-5)
    assert "components.text_encoder.layers to exact" in error.value.remedy


def test_a_component_of_few_channels_is_refused_with_the_reasons(saved):
    with pytest.raises(UserError, match="vae_decoder has no layer that can be INT8") as error:
        recipe = recipe_of(saved, "pixart", {"vae_decoder": {"layers": "int8"}})
        component_records(saved, recipe)
    assert "8 input channels" in error.value.got and "vae_decoder.layers to exact" in error.value.remedy
