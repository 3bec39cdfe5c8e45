"""Models for tests' recipes: `source: tiny_models:build` with this folder on the path."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from trtconvert.attention.schedules import NoiseSchedule, ddpm_betas
from trtconvert.diffusion_model import InputSpec
from trtconvert.models import DiffusionModel
from trtconvert.models.denoiser import intercepted
from trtconvert.models.samplers import initial_noise, sample

if TYPE_CHECKING:
    import onnx_ir as ir

    from trtconvert.attention.sites import SiteCall

SHAPE, WIDTH = (1, 4, 4), 32
TEXT_WIDTH = 32
SCHEDULE = NoiseSchedule(ddpm_betas(1000))


class Tiny(nn.Module):
    """One attention over 16 pixels: the smallest thing that can be converted.

    Args:
        attention: "fused", "unfused", or "none", with another function than softmax.
    """

    def __init__(self, attention: str = "fused") -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.embed = nn.Linear(1, WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, 1)
        self.attention = attention
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=WIDTH**-0.5, generator=generator)

    def forward(self, x: Tensor, timestep: Tensor) -> Tensor:
        """x [B, 1, 4, 4], timestep [B] → [B, 1, 4, 4]."""
        tokens = self.embed(x.flatten(2).transpose(1, 2)) + (timestep / 1000).to(x.dtype)[:, None, None]
        q, k, v = self.qkv(tokens)[:, None].chunk(3, -1)  # each [B, 1, 16, WIDTH]
        if self.attention == "fused":
            attended = F.scaled_dot_product_attention(q, k, v)
        else:
            scores = q @ k.transpose(-1, -2) / WIDTH**0.5
            attended = (scores.softmax(-1) if self.attention == "unfused" else scores.sigmoid() / 16) @ v
        return x - self.out(attended[:, 0]).transpose(1, 2).reshape(x.shape)


def build(attention: str = "fused", weights: Path | None = None) -> DiffusionModel:
    """Makes an untrained model: its INT8 samples are compared with its own."""
    denoiser = Tiny(attention).eval().requires_grad_(False)
    if weights is not None:
        denoiser.load_state_dict(load_file(weights))
    image = ("batch", *SHAPE)
    return DiffusionModel(
        name="tiny",
        denoiser=denoiser,
        inputs=(InputSpec("x", "float32", image), InputSpec("timestep", "float32", ("batch",))),
        output=InputSpec("prediction", "float32", image),
        timestep_input="timestep",
        timestep_max=1000.0,
        sigmas=SCHEDULE.sigmas,
        dims={"batch": (1, 2, 4)},
        sample=draw,
    )


class Projected(nn.Module):
    """Attention of 2 heads of 32 channels over 16 tokens, with projections of a kind."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        bias = kind == "biased"
        self.q, self.k, self.v = (nn.Linear(64, 64, bias=bias) for _ in range(3))
        self.qkv, self.out = nn.Linear(64, 192), nn.Linear(64, 1)
        self.narrow = nn.ModuleList(nn.Linear(64, 32) for _ in "kv")
        self.norms = nn.ModuleList(nn.RMSNorm(32, eps=1e-5) for _ in "qk")
        self.of_image = nn.ModuleList(nn.Linear(64, 64) for _ in "qkv")
        self.norms_of_image = nn.ModuleList(nn.RMSNorm(32, eps=1e-5) for _ in "qk")
        generator = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.2, generator=generator)

    def forward(self, x: Tensor, timestep: Tensor) -> Tensor:
        """x [B, 1, 4, 4], timestep [B] → [B, 1, 4, 4]."""
        shift = (timestep[:, None, None] / 1000).to(x.dtype)
        tokens = x.flatten(2).transpose(1, 2) * self.out.weight + shift
        if self.kind in ("unbound", "another order"):
            q, k, v = self.qkv(tokens).view(-1, 16, 3, 2, 32).permute(2, 0, 3, 1, 4).unbind(0)
            if self.kind == "another order":
                q, k = k, q
        else:
            context = tokens.square() if self.kind == "of another tensor" else tokens
            k, v = (
                self.narrow if self.kind == "grouped" else (self.k, self.k if self.kind == "called twice" else self.v)
            )
            length = 4 if self.kind == "in windows" else 16
            q, k, v = (
                f(y).reshape(-1, length, f.out_features // 32, 32).transpose(1, 2)
                for f, y in ((self.q, tokens), (k, context), (v, context))
            )
        if self.kind == "normed and rotated":
            q, k = (rotated(norm(y)) for norm, y in zip(self.norms, (q, k), strict=True))
        if self.kind == "joined":
            q, k, v = self.joined(tokens[:, :5], tokens[:, 5:])
        grouped = self.kind == "grouped"
        attended = F.scaled_dot_product_attention(q, k, v, enable_gqa=grouped).transpose(1, 2)
        return x - self.out(attended.flatten(2)).transpose(1, 2).reshape(x.shape)

    def joined(self, text: Tensor, image: Tensor) -> list[Tensor]:
        """Returns q, k and v of all tokens; text and image have separate projections and norms."""
        runs = []
        for tokens, layers, norms in (
            (text, (self.q, self.k, self.v), self.norms),
            (image, self.of_image, self.norms_of_image),
        ):
            q, k, v = (f(tokens).unflatten(2, (2, 32)).transpose(1, 2) for f in layers)
            runs.append((norms[0](q), norms[1](k), v))
        q, k, v = (torch.cat(parts, 2) for parts in zip(*runs, strict=True))
        return [rotated(q), rotated(k), v]


def rotated(x: Tensor, angles: Tensor | None = None) -> Tensor:
    """Applies rotary embeddings to [B, H, N, D] in Flux' form; angles [..., N, D / 2]."""
    if angles is None:
        tokens, channels = x.shape[-2:]
        angles = torch.arange(tokens)[:, None] * 100.0 ** -torch.linspace(0, 1, channels // 2)
    cos, sin = (f(angles).repeat_interleave(2, -1).to(x.device) for f in (torch.cos, torch.sin))
    first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack([-second, first], -1).flatten(-2)
    return (x.float() * cos + turned.float() * sin).to(x.dtype)


def traced_projections(kind: str, dtype: torch.dtype = torch.float32) -> ir.Model:
    """Returns a copy of `Projected`, which is traced once."""
    return _traced_projections(kind, dtype).clone()


@functools.cache
def _traced_projections(kind: str, dtype: torch.dtype) -> ir.Model:
    return traced(replace(build(), denoiser=Projected(kind).eval().requires_grad_(False)), dtype)


class Joint(nn.Module):
    """Text and image that attend to each other, with separate projections, and several ways to read the result."""

    def __init__(self, read: str, text_first: bool) -> None:
        super().__init__()
        self.read, self.text_first = read, text_first
        self.of_text, self.of_image = (nn.ModuleList(nn.Linear(64, 64) for _ in "qkv") for _ in range(2))
        self.to_text, self.to_image = nn.Linear(64, 64), nn.Linear(64, 64)
        generator = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.2, generator=generator)

    def forward(self, x: Tensor, timestep: Tensor, text: Tensor) -> Tensor:
        """x [B, N, 64], timestep [B], text [B, T, 64] → [B, about N, 64]."""
        runs = [(text, self.of_text), (x, self.of_image)]
        runs = runs if self.text_first else runs[::-1]
        if self.read == "three runs":
            runs.append(runs[0])
        qkv = [[f(tokens).unflatten(2, (2, 32)).transpose(1, 2) for f in layers] for tokens, layers in runs]
        attended = F.scaled_dot_product_attention(*(torch.cat(parts, 2) for parts in zip(*qkv, strict=True)))
        attended = attended.transpose(1, 2)
        first, whole = runs[0][0].shape[1], attended.shape[1]
        if self.read != "by heads":
            attended = attended.flatten(2)
        if self.read == "split":
            parts = attended.split([first, whole - first], 1)
        elif self.read == "elsewhere":
            parts = attended[:, : first - 1], attended[:, first - 1 :]
        elif self.read == "overlapping":
            parts = attended[:, :first], attended[:, first - 1 :]
        elif self.read == "stepping":
            parts = attended[:, :first], attended[:, first::2]
        else:
            parts = attended[:, :first], attended[:, first:]
        if self.read == "by heads":
            parts = [part.flatten(2) for part in parts]
        if self.read == "result":
            return parts[0]
        if self.read == "whole":
            return self.to_text(parts[0]).sum(1, keepdim=True) + attended
        of_text, of_image = parts if self.text_first else parts[::-1]
        out = x.mean(1, keepdim=True) + self.to_image(of_image)
        return out if self.read == "image alone" else out.mean(1, keepdim=True) + self.to_text(of_text).square()


JOINT = {"x": ("batch", 20, 64), "timestep": ("batch",), "text": ("batch", 128, 64)}


def traced_joint(
    read: str, text_first: bool = True, dtype: torch.dtype = torch.float32, **changed: tuple[int | str, ...]
) -> ir.Model:
    """Traces `Joint` with a text of 128 tokens and an image of 20, or the other way round if the image comes first."""
    shapes = dict(JOINT) if text_first else JOINT | {"x": JOINT["text"], "text": JOINT["x"]}
    shapes |= changed
    dims = {"batch": (1, 2, 4), "tokens": (20, 40, 128)}
    used = {size for shape in shapes.values() for size in shape}
    inputs = tuple(InputSpec(name, "float32", shape) for name, shape in shapes.items())
    model = replace(
        build(), denoiser=Joint(read, text_first).eval().requires_grad_(False), inputs=inputs,
        output=InputSpec("prediction", "float32", shapes["x"]), dims={name: dims[name] for name in dims if name in used},
    )  # fmt: skip
    return traced(model, dtype)


class Attention(nn.Module):
    """Attention of 2 heads of 32 channels, with its projections."""

    def __init__(self, width: int, context: int) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(width, 64), nn.Linear(context, 64), nn.Linear(context, 64)
        self.out = nn.Linear(64, width)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        q, k, v = (
            f(y).unflatten(2, (2, 32)).transpose(1, 2) for f, y in ((self.q, x), (self.k, context), (self.v, context))
        )
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Blocks(nn.Module):
    """Blocks of Stable Diffusion: self-attention, attention to a text, an MLP; each with a norm before and a residual after."""

    def __init__(self, width: int = 64, bias: bool = True, epsilon: float = 1e-5) -> None:
        super().__init__()
        self.to_itself = nn.ModuleList(Attention(width, width) for _ in range(2))
        self.to_text = nn.ModuleList(Attention(width, TEXT_WIDTH) for _ in range(2))
        self.mlps = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 96), nn.GELU(), nn.Linear(96, width)) for _ in range(2)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(width, eps=epsilon, bias=bias) for _ in range(6))
        generator = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.2, generator=generator)

    def forward(self, x: Tensor, timestep: Tensor, text: Tensor) -> Tensor:
        """x [B, 16, C], timestep [B], text [B, 7, 32] → [B, 16, C]."""
        for block in range(2):
            norms = self.norms[3 * block : 3 * block + 3]
            normed = norms[0](x)
            x = self.to_itself[block](normed, normed) + x
            x = x + self.to_text[block](norms[1](x), text)
            x = self.mlps[block](norms[2](x)) + x
        return x


class Geglu(nn.Module):
    """diffusers' gated projection, or a variant with other operators."""

    def __init__(self, width: int, gate: nn.Module, first: int = 1) -> None:
        super().__init__()
        self.proj, self.gate, self.first = nn.Linear(width, 256), gate, first

    def forward(self, x: Tensor) -> Tensor:
        halves = self.proj(x).chunk(2, dim=-1)
        return halves[1 - self.first] * self.gate(halves[self.first])


class GatedBlocks(Blocks):
    """Blocks with gated MLPs."""

    def __init__(self, gate: Callable[[], nn.Module] = nn.GELU, first: int = 1, width: int = 64) -> None:
        super().__init__(width)
        self.mlps = nn.ModuleList(nn.Sequential(Geglu(width, gate(), first), nn.Linear(128, width)) for _ in range(2))
        generator = torch.Generator().manual_seed(1)
        for parameter in self.mlps.parameters():
            nn.init.normal_(parameter, std=0.2, generator=generator)


def traced_blocks(module: nn.Module, width: int = 64, dtype: torch.dtype = torch.float32) -> ir.Model:
    """Traces a module with the inputs of `Blocks`."""
    shapes = {"x": ("batch", 16, width), "timestep": ("batch",), "text": ("batch", 7, TEXT_WIDTH)}
    model = replace(
        build(), denoiser=module.eval().requires_grad_(False),
        inputs=tuple(InputSpec(name, "float32", shape) for name, shape in shapes.items()),
        output=InputSpec("prediction", "float32", shapes["x"]),
    )  # fmt: skip
    return traced(model, dtype)


def traced(model: DiffusionModel, dtype: torch.dtype = torch.float32, like: DiffusionModel | None = None) -> ir.Model:
    """Traces a model with an INT8 node at every site, with tables from its own data, or from those of a similar model."""
    from trtconvert.attention.modes import Mode
    from trtconvert.attention.reference import tables_from_data
    from trtconvert.export.trace import SiteOptions, trace

    tables = {}

    def handler(call: SiteCall) -> Tensor:
        tables[call.name] = tables_from_data(call.q, call.k, call.v, Mode.BALANCED)
        return call.exact()

    with torch.no_grad():
        sizes = {name: size for name, (_, size, _) in model.dims.items()}
        intercepted(like or model, handler)(**model.example(0, sizes))
    return trace(model, tables, SiteOptions(1000.0, "calibrated", True), dims=model.dims, dtype=dtype)


def draw(denoiser, seeds, *, steps, solver):
    return sample(
        denoiser, initial_noise(seeds, SHAPE), SCHEDULE, prediction="v_prediction", solver=solver, steps=steps
    )


def another_build() -> DiffusionModel:
    """Makes the same model under another name, which the hash of its source distinguishes."""
    return build()


def fails() -> DiffusionModel:
    raise RuntimeError("no such checkpoint")


def another_thing() -> nn.Module:
    return nn.Identity()


NOT_A_FUNCTION = 3
