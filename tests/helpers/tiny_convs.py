"""A small U-Net whose convolutions are INT8 layers, as the graph that is exported of it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import onnx_ir as ir
import pytest
import tiny_models
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trtconvert.attention.modes import Mode
from trtconvert.attention.reference import tables_from_data
from trtconvert.diffusion_model import DiffusionModel, InputSpec
from trtconvert.export.trace import SiteOptions, trace
from trtconvert.linear import convs
from trtconvert.linear.modes import LayerMode
from trtconvert.linear.reference import LayerTables, conv, quantise_weight
from trtconvert.linear.sites import ConvertedLayer, Layer, LayerFinder, select_layers
from trtconvert.models.denoiser import intercepted

CHANNELS, WIDE, SIZE, BATCH, GROUPS = 16, 32, (6, 10), 2, 4
MAX = 1000.0


def take_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Convolutions of any size are taken."""
    for name in ("FEWEST_PIXELS", "FEWEST_OUTPUTS", "LEAST_DEPTH"):
        monkeypatch.setattr(convs, name, 1)


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


class Odd(nn.Module):
    """Convolutions of all kinds beside each other, most of them behind group norms of their own."""

    def __init__(self) -> None:
        super().__init__()
        wide = CHANNELS, WIDE, 3
        self.entry, self.exit = nn.Conv2d(4, CHANNELS, 3, padding=1), nn.Conv2d(CHANNELS, 4, 1)
        self.qkv = nn.Linear(CHANNELS, CHANNELS)
        self.plain = nn.Conv2d(*wide, padding=1)
        self.groups = nn.Conv2d(*wide, padding=1, groups=2)
        self.dilated = nn.Conv2d(*wide, padding=2, dilation=2)
        self.transposed = nn.ConvTranspose2d(*wide, padding=1)
        self.twelve = nn.Conv2d(CHANNELS, 12, 3, padding=1)
        self.padded = nn.Conv2d(*wide, stride=2)
        self.uneven = nn.Conv2d(CHANNELS, WIDE, 2, padding="same")
        self.wide = nn.Conv2d(*wide, padding=3)
        self.pixels = nn.Conv2d(CHANNELS, WIDE, 1)
        self.raw = nn.Conv2d(*wide, padding=1)
        self.video = nn.Conv3d(CHANNELS, WIDE, (1, 3, 3), padding=(0, 1, 1))
        self.shared = nn.Conv2d(*wide, padding=1)
        self.one, self.other = nn.Conv2d(*wide, padding=1), nn.Conv2d(*wide, padding=1)
        self.zeros = nn.Conv2d(*wide, padding=1)
        with torch.no_grad():
            self.zeros.weight[:8] = 0
        self.norms = nn.ModuleList(nn.GroupNorm(GROUPS, CHANNELS) for _ in range(14))
        for norm in self.norms:
            nn.init.normal_(norm.weight, 1, 0.2)  # type: ignore[arg-type]

    def forward(self, x: Tensor, timestep: Tensor) -> Tensor:
        h = self.entry(x)
        q = self.qkv(h.flatten(2).transpose(1, 2))[:, None]
        h = h + F.scaled_dot_product_attention(q, q, q)[:, 0].transpose(1, 2).unflatten(2, h.shape[2:])
        # Each of an image of its own: of equal norms exporters make one.
        normed = (F.silu(norm(h * (1 + i / 10))) for i, norm in enumerate(self.norms))
        of_one = (
            self.plain, self.groups, self.dilated, self.transposed, self.twelve, self.uneven, self.wide, self.pixels,
            self.shared, self.shared, self.zeros,
        )  # fmt: skip
        results = [conv(next(normed)) for conv in of_one]
        results += [
            self.padded(F.pad(next(normed), (0, 1, 0, 1))),
            self.raw(h),
            self.video(next(normed)[:, :, None])[:, :, 0],
        ]
        both = next(normed)
        results += [self.one(both), self.other(both)]
        return self.exit(h) + sum(y.mean((1, 2, 3)) for y in results)[:, None, None, None]


def model(denoiser: Callable[[], nn.Module] = UNet) -> DiffusionModel:
    torch.manual_seed(0)
    shape = (BATCH, 4, *SIZE)
    return DiffusionModel(
        "unet", denoiser().eval().requires_grad_(False),
        (InputSpec("x", "float32", shape), InputSpec("timestep", "float32", (BATCH,))),
        InputSpec("out", "float32", shape), "timestep", MAX, torch.linspace(0.01, 9, int(MAX)), {}, tiny_models.build().sample,
    )  # fmt: skip


def tables(layer: Layer, modes: Sequence[int], of: DiffusionModel, equalised: bool) -> LayerTables:
    """With factors and scales that multiply and divide 16-bit numbers without rounding."""
    generator = torch.Generator().manual_seed(len(layer.input_group))
    module = of.denoiser.get_submodule(layer.name.split("#")[0])
    exponents = torch.randint(-1, 2, (layer.in_channels,), generator=generator)
    factor = 2.0 ** (exponents if equalised else 0 * exponents)
    weight = module.weight / factor.view(1, -1, *[1] * (module.weight.dim() - 2))
    stored, scale = quantise_weight(weight)
    return LayerTables(
        stored, scale, module.bias, factor, torch.zeros_like(factor), 0.5 ** (5 + torch.arange(len(modes))),
        torch.tensor(modes, dtype=torch.int32),
    )  # fmt: skip


class Traced(NamedTuple):
    """
    Attributes:
        graph: in FP16, with `Int8Conv` nodes; inputs: of a call, FP32.
        left: the other convolutions, with the reason.
        expected: what the layers specify at timesteps [B], some of them with INT8 weights alone.
    """

    graph: ir.Model
    inputs: dict[str, Tensor]
    expected: Callable[..., Tensor]
    left: dict[str, str]


def traced(
    modes: Sequence[int],
    equalised: bool = True,
    denoiser: Callable[[], nn.Module] = UNet,
    exclude: Sequence[str] = ("entry", "exit", "*.shortcut"),
    dtype: torch.dtype = torch.float16,
) -> Traced:
    """Args: modes: of all layers in each timestep bin; equalised: whether their inputs' channels have factors."""
    made = _traced(tuple(modes), equalised, denoiser, exclude, dtype)
    return made._replace(graph=made.graph.clone())


@functools.cache
def _traced(
    modes: tuple[int, ...],
    equalised: bool,
    denoiser: Callable[[], nn.Module],
    exclude: Sequence[str],
    dtype: torch.dtype,
) -> Traced:
    of = model(denoiser)
    finder = LayerFinder(of.denoiser)
    inputs = of.example(0, {})
    attention = {}

    def observe(call):
        attention[call.name] = tables_from_data(call.q, call.k, call.v, Mode.FP16)
        return call.exact()

    intercepted(of, observe, finder)(**inputs)
    layers, left = select_layers(finder.layers(), ["*"], exclude, 2, kinds=("conv",))
    converted = {layer.name: ConvertedLayer(layer, tables(layer, modes, of, equalised)) for layer in layers}
    graph = trace(of, attention, SiteOptions(MAX, "calibrated", True), layers=converted, dims={}, dtype=dtype)

    def expected(timestep: Tensor, in_16_bits: Collection[str] = ()) -> Tensor:
        def computed(call):
            if call.name not in converted:
                return call.exact()
            given = converted[call.name].tables
            if call.name in in_16_bits:
                given = given.with_modes(LayerMode.WEIGHT_ONLY)
            shape = {"stride": call.stride, "padding": call.padding}
            return conv(call.x, call.timestep, given, **shape, timestep_max=MAX)

        return intercepted(of, layers=computed)(**inputs | {"timestep": timestep})

    return Traced(graph, inputs, expected, {layer.name: layer.obstacle for layer in left if layer.kind == "conv"})
