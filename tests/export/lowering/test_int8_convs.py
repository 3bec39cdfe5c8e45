"""INT8 convolutions as plugins: the lowered graph computes what the layers specify, by an evaluator that knows the plugins."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import tiny_models
import tolerances
import torch
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun
from torch import Tensor, nn
from torch.nn import functional as F

from trtconvert.attention.modes import Mode
from trtconvert.attention.reference import tables_from_data
from trtconvert.diffusion_model import DiffusionModel, InputSpec
from trtconvert.evaluate.verify import relative_error
from trtconvert.export.lowering import expand_layers, int8_convs, lower_to_native, quantise_products, take_group_norms
from trtconvert.export.lowering.group_norms import GROUP_NORM
from trtconvert.export.lowering.int8_convs import INT8_CONV, INT8_GROUP_NORM, take_int8_convs
from trtconvert.export.nodes.common import DOMAIN
from trtconvert.export.trace import SiteOptions, trace
from trtconvert.linear.reference import LayerTables, conv, quantise_weight
from trtconvert.linear.sites import ConvertedLayer, LayerFinder, select_layers
from trtconvert.models.denoiser import intercepted

CHANNELS, WIDE, SIZE, BATCH, GROUPS = 16, 32, (6, 10), 2, 4
MAX = 1000.0


class ResNet(nn.Module):
    """As U-Nets have it: two convolutions behind group norms, the timestep between them, the image itself added in the end."""

    def __init__(self, channels: int, wide: int, stride: int = 1) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(GROUPS, channels), nn.GroupNorm(GROUPS, wide)
        self.conv1 = nn.Conv2d(channels, wide, 3, padding=1, stride=stride)
        self.conv2 = nn.Conv2d(wide, wide, 3, padding=1)
        self.time = nn.Linear(8, wide)
        self.shortcut = nn.Conv2d(channels, wide, 1, stride=stride)

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x))) + self.time(embedding)[:, :, None, None]
        return self.shortcut(x) + self.conv2(F.silu(self.norm2(h)))


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.entry, self.exit = nn.Conv2d(4, CHANNELS, 3, padding=1), nn.Conv2d(WIDE, 4, 1)
        self.first, self.second = ResNet(CHANNELS, WIDE), ResNet(WIDE, WIDE, stride=2)
        self.qkv = nn.Linear(WIDE, WIDE)
        for norm in self.modules():
            if isinstance(norm, nn.GroupNorm):
                nn.init.normal_(norm.weight, 1, 0.2)
                nn.init.normal_(norm.bias, 0, 0.2)

    def forward(self, x: Tensor, timestep: Tensor) -> Tensor:
        embedding = torch.sin(timestep[:, None] * torch.arange(8, device=x.device) / 50).to(x.dtype)
        h = self.second(self.first(self.entry(x), embedding), embedding)
        q = self.qkv(h.flatten(2).transpose(1, 2))[:, None]
        attended = F.scaled_dot_product_attention(q, q, q)[:, 0].transpose(1, 2).unflatten(2, h.shape[2:])
        return F.interpolate(self.exit(h + attended), size=x.shape[2:])


def model() -> DiffusionModel:
    torch.manual_seed(0)
    shape = (BATCH, 4, *SIZE)
    return DiffusionModel(
        "unet", UNet().eval().requires_grad_(False),
        (InputSpec("x", "float32", shape), InputSpec("timestep", "float32", (BATCH,))),
        InputSpec("out", "float32", shape), "timestep", MAX, torch.linspace(0.01, 9, int(MAX)), {}, tiny_models.build().sample,
    )  # fmt: skip


def tables(layer, modes, of: DiffusionModel, equalised: bool) -> LayerTables:
    """With factors and scales by which 16-bit numbers are multiplied and divided without rounding."""
    generator = torch.Generator().manual_seed(len(layer.source))
    module = of.denoiser.get_submodule(layer.name)
    exponents = torch.randint(-1, 2, (layer.in_channels,), generator=generator)
    factor = 2.0 ** (exponents if equalised else 0 * exponents)
    weight = module.weight / factor.view(1, -1, *[1] * (module.weight.dim() - 2))
    stored, scale = quantise_weight(weight)
    return LayerTables(
        stored, scale, module.bias, factor, torch.zeros_like(factor), 0.5 ** (5 + torch.arange(len(modes))),
        torch.tensor(modes, dtype=torch.int32),
    )  # fmt: skip


def lowered(modes, equalised: bool = True):
    """A U-Net's graph with INT8 convolutions as plugins, and how many; inputs, and what the layers specify at timesteps."""
    of = model()
    finder = LayerFinder(of.denoiser)
    inputs = of.example(0, {})
    attention = {}

    def observe(call):
        attention[call.name] = tables_from_data(call.q, call.k, call.v, Mode.FP16)
        return call.exact()

    intercepted(of, observe, finder)(**inputs)
    layers, _ = select_layers(finder.layers(), ["*"], ["entry", "exit", "*.shortcut"], 2, kinds=("conv",))
    converted = {layer.name: ConvertedLayer(layer, tables(layer, modes, of, equalised)) for layer in layers}
    assert sorted(converted) == [f"{r}.{c}" for r in ("first", "second") for c in ("conv1", "conv2")]
    graph = trace(of, attention, SiteOptions(MAX, "calibrated", True), layers=converted, dims={}, dtype=torch.float16)
    expand_layers(graph, offsets=True)
    norms = take_group_norms(graph)
    assert norms == 4
    count = take_int8_convs(graph, [{}])
    lower_to_native(graph)

    def computed(call):
        if call.name not in converted:
            return call.exact()
        shape = {"stride": call.stride, "padding": call.padding}
        return conv(call.x, call.timestep, converted[call.name].tables, **shape, timestep_max=MAX)

    def expected(timestep):
        return intercepted(of, layers=computed)(**inputs | {"timestep": timestep})

    return graph, count, inputs, expected


@pytest.fixture
def everywhere(monkeypatch):
    """Convolutions of any size are taken."""
    monkeypatch.setattr(int8_convs, "_FEWEST_PIXELS", 1)
    monkeypatch.setattr(int8_convs, "_FEWEST_OUTPUTS", 1)


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
        payload = np.clip(np.rint(normed * of_factor / scale), -127, 127).astype(np.int8)
        return (np.ascontiguousarray(payload).view(np.int32),)


class Int8Conv(OpRun):
    op_domain = DOMAIN

    def _run(
        self, x, weight, weight_scale, *inputs, stride_y, stride_x, pad_y, pad_x, bias, residual, timestep, timestep_max, **_
    ):  # fmt: skip
        given = list(inputs)
        of_bias = given.pop(0) if bias else np.zeros(1, np.float32)
        added = given.pop(0) if residual else None
        integers = [torch.tensor(v.view(np.int8)).double().permute(0, 3, 1, 2) for v in (x, weight)]
        sums = F.conv2d(*integers, stride=(stride_y, stride_x), padding=(pad_y, pad_x)).numpy()
        scale = of_samples(given, timestep, timestep_max, len(x)).reshape(-1, 1, 1, 1)
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


def test_weights_are_stored_four_channels_in_an_integer(everywhere):
    graph = lowered([3])[0]
    stored = [x for name, x in graph.graph.initializers.items() if name.endswith("channels last")]
    shapes = sorted(tuple(x.shape.numpy()) for x in stored)
    assert shapes == [(WIDE, 3, 3, CHANNELS // 4), *[(WIDE, 3, 3, WIDE // 4)] * 3]


@pytest.mark.parametrize("modes", [[1], [1, 3]], ids=["weights alone", "16 bits late"])
def test_convolutions_with_16_bit_inputs_stay(everywhere, modes):
    graph, count, *_ = lowered(modes)
    assert count == 0 and len(named(graph, GROUP_NORM)) == 4


def test_small_convolutions_stay_and_are_of_16_bits():
    graph, count, *_ = lowered([3])
    assert count == 0 and not named(graph, INT8_CONV)


def test_nothing_is_left_for_tensorrts_own(everywhere):
    assert quantise_products(lowered([3])[0]) == 0
