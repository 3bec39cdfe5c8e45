"""INT8 convolutions as plugins: the lowered graph, in an evaluator of the plugins, equals the specification."""

from __future__ import annotations

import math

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import tiny_convs
import tolerances
import torch
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun
from support import Quiet
from tiny_convs import CHANNELS, WIDE, Odd, traced
from torch.nn import functional as F

from trtconvert.c_structs import IMAGE_MARKS
from trtconvert.engine import lowered_model, tensorrt
from trtconvert.export.lowering.group_norms import GROUP_NORM, fuse_group_norms
from trtconvert.export.lowering.int8_convs import INT8_CONV, INT8_GROUP_NORM, fuse_int8_convs
from trtconvert.export.lowering.layers import expand_layers, quantise_products
from trtconvert.export.lowering.native import lower_to_native
from trtconvert.export.nodes.attention import attention_nodes
from trtconvert.export.nodes.common import DOMAIN
from trtconvert.linear.sites import LayerFinder
from trtconvert.models.denoiser import intercepted
from trtconvert.models.recorded_calls import relative_error
from trtconvert.recipe import EngineSection


def lowered(modes, equalised: bool = True):
    """A U-Net's graph with plugins, their number, inputs, and the specified outputs at timesteps."""
    graph, inputs, expected, _ = traced(modes, equalised)
    expand_layers(graph, offsets=True)
    assert fuse_group_norms(graph) == 4
    count = fuse_int8_convs(graph, [{}])
    lower_to_native(graph)
    return graph, count, inputs, expected


@pytest.fixture
def everywhere(monkeypatch):
    """Fuses convolutions of any size."""
    tiny_convs.take_any_size(monkeypatch)


def of_samples(given, timestep, timestep_max, count):
    """[count] the scales of images, as layer_modes.h has them."""
    t, scales = given.pop(0) if timestep else np.zeros(1, np.float32), given.pop(0)
    found = scales[np.clip(np.floor(t * len(scales) / timestep_max), 0, len(scales) - 1).astype(int)]
    return np.repeat(found, count // len(found)).astype(np.float32)


def norm(x, weight, bias, given, groups, epsilon, silu, shift):
    y = torch.tensor(x) + (torch.tensor(given.pop(0))[:, :, None, None] if shift else 0)
    normed = F.group_norm(y.float(), groups, *(torch.tensor(v).float() for v in (weight, bias)), epsilon)
    return (F.silu(normed) if silu else normed).half()


class GroupNorm(OpRun):
    op_domain = DOMAIN

    def _run(self, x, weight, bias, *shift, epsilon, groups, silu, **_):
        return (norm(x, weight, bias, list(shift), groups, epsilon, silu, bool(shift)).numpy(),)


class Int8GroupNorm(OpRun):
    op_domain = DOMAIN

    def _run(self, x, weight, bias, *inputs, epsilon, groups, silu, shift, factor, timestep, timestep_max, **_):
        given = list(inputs)
        normed = norm(x, weight, bias, given, groups, epsilon, silu, shift).float().permute(0, 2, 3, 1).numpy()
        of_factor = given.pop(0) if factor else np.ones(1, np.float32)
        scale = of_samples(given, timestep, timestep_max, len(x)).reshape(-1, 1, 1, 1)
        payload = np.clip(np.rint(np.nan_to_num(normed) * of_factor / scale), -127, 127).astype(np.int8)
        marks = np.zeros((len(x), IMAGE_MARKS), np.uint8)
        marks[:, -1] = ~np.isfinite(normed).all((1, 2, 3))
        return np.ascontiguousarray(payload).view(np.int32), marks.view(np.int32)


class Int8Conv(OpRun):
    op_domain = DOMAIN

    def _run(
        self, x, marks, weight, weight_scale, *inputs, stride_y, stride_x, pad_y, pad_x, bias, residual, timestep, timestep_max,
        **_,
    ):  # fmt: skip
        given = list(inputs)
        of_bias = given.pop(0) if bias else np.zeros(1, np.float32)
        added = given.pop(0) if residual else None
        integers = [torch.tensor(v.view(np.int8)).double().permute(0, 3, 1, 2) for v in (x, weight)]
        sums = F.conv2d(*integers, stride=(stride_y, stride_x), padding=(pad_y, pad_x)).numpy()
        scale = of_samples(given, timestep, timestep_max, len(x)).reshape(-1, 1, 1, 1)
        scale = np.where(marks.any(1).reshape(-1, 1, 1, 1), np.nan, scale)
        y = sums * scale * weight_scale.reshape(1, -1, 1, 1) + of_bias.reshape(1, -1, 1, 1)
        return ((y if added is None else y + added).astype(np.float16),)


def run(graph, inputs, timestep):
    proto = ir.to_proto(graph)
    if not any(x.domain == DOMAIN for x in proto.opset_import):
        proto.opset_import.append(onnx.helper.make_opsetid(DOMAIN, 1))
    feed = {"x": inputs["x"].half().numpy(), "timestep": timestep.numpy()}
    evaluator = ReferenceEvaluator(proto, new_ops=[GroupNorm, Int8GroupNorm, Int8Conv])
    return torch.from_numpy(evaluator.run(None, feed)[0]).float()


def named(graph, op_type):
    return [node for node in graph.graph if node.domain == DOMAIN and node.op_type == op_type]


@pytest.mark.first_case
@pytest.mark.parametrize("equalised", [True, False])
@pytest.mark.parametrize("modes", [[3], [3, 3]], ids=["one scale", "a scale for each bin"])
def test_plugins_compute_what_the_layers_specify(everywhere, modes, equalised):
    graph, count, inputs, expected = lowered(modes, equalised)
    convs, norms = named(graph, INT8_CONV), named(graph, INT8_GROUP_NORM)
    assert count == len(convs) == len(norms) == 4 and not named(graph, GROUP_NORM)
    assert [node.attributes["residual"].as_int() for node in convs] == [0, 1, 0, 1]
    assert [node.attributes["stride_y"].as_int() for node in convs] == [1, 1, 2, 1]
    assert {node.attributes["factor"].as_int() for node in norms} == {int(equalised)}
    assert {node.attributes["timestep"].as_int() for node in (*convs, *norms)} == {int(len(modes) > 1)}
    assert [node.attributes["shift"].as_int() for node in norms] == [0, 1, 0, 1]
    for timestep in (torch.tensor([100.0, 900.0]), torch.tensor([900.0, 900.0])):
        assert relative_error(run(graph, inputs, timestep), expected(timestep)) < tolerances.INT8_CONVS_OF_A_UNET


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_an_image_that_is_not_finite_stays_so(everywhere, value):
    """INT8 has no NaN: each norm passes marks to its convolution."""
    graph, _, inputs, _ = lowered([3])
    assert [node.inputs[1] for node in named(graph, INT8_CONV)] == [x.outputs[1] for x in named(graph, INT8_GROUP_NORM)]
    timestep = torch.tensor([100.0, 900.0])
    whole = run(graph, inputs, timestep)
    x = inputs["x"].clone()
    x[1, 0, 0, 0] = value
    broken = run(graph, inputs | {"x": x}, timestep)
    assert torch.equal(broken[0], whole[0]) and not broken[1].isfinite().any()


def test_weights_are_stored_four_channels_in_an_integer(everywhere):
    graph = lowered([3])[0]
    stored = [x for name, x in graph.graph.initializers.items() if name.endswith("channels last")]
    shapes = sorted(tuple(x.shape.numpy()) for x in stored)
    assert shapes == [(WIDE, 3, 3, CHANNELS // 4), *[(WIDE, 3, 3, WIDE // 4)] * 3]


@pytest.mark.first_case
@pytest.mark.parametrize("modes", [[1], [1, 3]], ids=["weights alone", "16 bits late"])
def test_convolutions_with_16_bit_inputs_stay(everywhere, modes):
    graph, count, *_ = lowered(modes)
    assert count == 0 and len(named(graph, GROUP_NORM)) == 4


def test_small_convolutions_stay_and_are_of_16_bits():
    graph, count, *_ = lowered([3])
    assert count == 0 and not named(graph, INT8_CONV)


def test_no_product_is_left_for_tensorrts_own_kernels(everywhere):
    assert quantise_products(lowered([3])[0]) == 0


@pytest.mark.parametrize(
    ("options", "taken"),
    [({"layers": "plugin"}, 4), ({"layers": "native"}, 0), ({"layers": "plugin", "channels_last": False}, 0)],
    ids=str,
)
def test_engines_have_them_where_they_can(everywhere, monkeypatch, options, taken):
    monkeypatch.setattr(lowered_model, "has_group_norm_kernel", lambda: True)
    monkeypatch.setattr(lowered_model, "has_linear_kernel", lambda: True)
    graph = traced([3]).graph
    model = tensorrt.lowered(graph, list(attention_nodes(graph)), EngineSection(**options), [{}])
    assert len(named(model, INT8_CONV)) == taken and len(named(model, GROUP_NORM)) in (0, 4)


def lowered_for_engines(monkeypatch, graph, **options):
    monkeypatch.setattr(lowered_model, "has_group_norm_kernel", lambda: True)
    monkeypatch.setattr(lowered_model, "has_linear_kernel", lambda: True)
    sections = EngineSection(layers="plugin", **options)
    left = lowered_model.convs_in_16_bits(graph, sections, [{}])
    return tensorrt.lowered(graph, list(attention_nodes(graph)), sections, [{}]), left


def test_each_convolution_is_int8_or_has_a_reason(everywhere, monkeypatch):
    graph, inputs, expected, left = traced([3, 3], denoiser=Odd, exclude=("entry", "exit"))
    assert left == {
        "entry": "the recipe excludes it",
        "exit": "the recipe excludes it",
        "groups": "it has 2 groups",
        "dilated": "it is dilated",
        "transposed": "it is a transposed convolution",
        "twelve": "its 12 output channels are not a multiple of 8 up to 65,536",
        "uneven": "its padding differs from side to side",
    }
    model, in_16_bits = lowered_for_engines(monkeypatch, graph)
    assert in_16_bits == {
        "wide": "with padding as wide as the window",
        "pixels": "of single pixels, which are products",
        "raw": "without a group norm in front that writes INT8",
        "padded": "without a group norm in front that writes INT8",
        "video": "over 3 dimensions, our kernel supports two",
        "one": "with an input that other nodes read too",
        "other": "with an input that other nodes read too",
    }
    assert len(named(model, INT8_CONV)) == 4  # plain, shared twice, zeros
    shared = [node.inputs[2] for node in named(model, INT8_CONV) if "shared" in str(node.inputs[2].name)]
    assert len(shared) == 2
    timestep = torch.tensor([100.0, 900.0])
    right = expected(timestep, in_16_bits)
    assert relative_error(run(model, inputs, timestep), right) < tolerances.INT8_CONVS_OF_A_UNET


def test_the_finder_knows_which_convolutions_lie_behind_group_norms():
    of = tiny_convs.model(Odd)
    finder = LayerFinder(of.denoiser)
    intercepted(of, layers=finder)(**of.example(0, {}))
    behind = {layer.name for layer in finder.layers() if layer.kind == "conv" and layer.normed}
    assert behind == {
        "plain", "groups", "dilated", "transposed", "twelve", "uneven", "wide", "pixels", "shared", "shared#2", "zeros", "one",
        "other",
    }  # fmt: skip


def test_convolutions_that_stay_are_products_of_their_own_inputs(monkeypatch):
    """All are too small: no factor remains in front of them, which would cost a kernel."""
    graph = traced([3]).graph
    model, in_16_bits = lowered_for_engines(monkeypatch, graph)
    assert set(in_16_bits.values()) == {"of too few pixels to be faster in INT8"} and len(in_16_bits) == 4
    assert len(named(model, GROUP_NORM)) == 4
    exact = tensorrt.lowered(graph, list(attention_nodes(graph)), EngineSection(layers="exact"), [{}])
    assert [node.op_type for node in model.graph] == [node.op_type for node in exact.graph]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"channels_last": False}, "in an engine with TensorRT's own group norms"),
        ({"hardware_compatible": True}, "without INT8 group norms: not every GPU that engine.hardware_compatible asks "
         "for has a kernel for them"),
    ],
    ids=["channels_last", "hardware_compatible"],
)  # fmt: skip
def test_engines_without_norms_of_ours_say_why(everywhere, monkeypatch, options, reason):
    model, in_16_bits = lowered_for_engines(monkeypatch, traced([3]).graph, **options)
    assert not named(model, INT8_CONV) and set(in_16_bits.values()) == {reason}
    told = []
    monkeypatch.setattr(Quiet, "notice", lambda self, text: told.append(text), raising=False)
    tensorrt._tell_convs(in_16_bits, Quiet())
    (text,) = told
    assert text.startswith("convolutions in 16 bits") and "4 " + reason in text and "first.conv1" in text


@pytest.mark.soak
def test_in_bf16_too(everywhere, monkeypatch):
    model, in_16_bits = lowered_for_engines(monkeypatch, traced([3], dtype=torch.bfloat16).graph)
    assert not in_16_bits and [node.attributes["bfloat16"].as_int() for node in named(model, INT8_CONV)] == [1] * 4
