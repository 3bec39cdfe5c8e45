"""Fused rotary embeddings and norms of published models."""

from __future__ import annotations

import pytest
import torch
from diffusers.models.transformers.cogvideox_transformer_3d import CogVideoXTransformer3DModel
from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel
from diffusers.models.transformers.transformer_hunyuan_video import HunyuanVideoTransformer3DModel
from diffusers.models.transformers.transformer_sd3 import SD3Transformer2DModel
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel
from rotary_graphs import CHANNELS, HEADS, ROTATED, TOKENS, WIDTH, Shapes, assert_same_after, lowered, taken, traced
from torch import Tensor, nn
from torch.nn import functional as F

from trtconvert.export.nodes.attention import attention_nodes


class Flux(nn.Module):
    """With positions as inputs, as from the pipeline, or constant."""

    def __init__(self, double_blocks: int):
        super().__init__()
        self.transformer = FluxTransformer2DModel(
            in_channels=4,
            num_layers=double_blocks,
            num_single_layers=1,
            num_attention_heads=HEADS,
            attention_head_dim=CHANNELS,
            axes_dims_rope=(8, 8, 16),
            joint_attention_dim=8,
            pooled_projection_dim=8,
        )

    def forward(
        self,
        x: Tensor,
        timestep: Tensor,
        text: Tensor,
        pooled: Tensor,
        image_positions: Tensor | None = None,
        text_positions: Tensor | None = None,
    ) -> Tensor:
        if image_positions is None or text_positions is None:
            text_positions, image_positions = torch.zeros(3, 3), torch.arange(12.0).reshape(4, 3)
        return self.transformer(
            x, text, pooled, timestep / 1000, image_positions, text_positions, return_dict=False
        )[0]  # fmt: skip


class Wan(nn.Module):
    def __init__(self, layers: int = 1):
        super().__init__()
        self.transformer = WanTransformer3DModel(
            num_layers=layers,
            num_attention_heads=HEADS,
            attention_head_dim=CHANNELS,
            in_channels=4,
            out_channels=4,
            ffn_dim=16,
            text_dim=8,
            freq_dim=8,
            rope_max_seq_len=8,
        )

    def forward(self, x: Tensor, timestep: Tensor, text: Tensor) -> Tensor:
        return self.transformer(x, timestep, text, return_dict=False)[0]


class CogVideoX(nn.Module):
    """With the angles of 2 × 2 × 2 patches, as its pipeline makes them."""

    def __init__(self):
        super().__init__()
        self.transformer = CogVideoXTransformer3DModel(
            num_attention_heads=HEADS,
            attention_head_dim=CHANNELS,
            in_channels=4,
            out_channels=4,
            time_embed_dim=8,
            text_embed_dim=8,
            num_layers=1,
            sample_width=4,
            sample_height=4,
            sample_frames=5,
            max_text_seq_length=3,
            use_rotary_positional_embeddings=True,
        )

    def forward(self, x: Tensor, timestep: Tensor, text: Tensor) -> Tensor:
        angles = (torch.arange(8)[:, None] * 100.0 ** -torch.linspace(0, 1, CHANNELS // 2)).repeat_interleave(2, 1)
        return self.transformer(
            x, text, timestep, image_rotary_emb=(angles.cos(), angles.sin()), return_dict=False
        )[0]  # fmt: skip


class HunyuanVideo(nn.Module):
    def __init__(self):
        super().__init__()
        self.transformer = HunyuanVideoTransformer3DModel(
            in_channels=4,
            out_channels=4,
            num_attention_heads=HEADS,
            attention_head_dim=CHANNELS,
            num_layers=1,
            num_single_layers=1,
            num_refiner_layers=1,
            text_embed_dim=8,
            pooled_projection_dim=8,
            rope_axes_dim=(8, 8, 16),
        )

    def forward(self, x: Tensor, timestep: Tensor, text: Tensor, pooled: Tensor) -> Tensor:
        mask = torch.ones(text.shape[:2], dtype=text.dtype)
        return self.transformer(
            x, timestep, text, mask, pooled, guidance=timestep.to(x.dtype), return_dict=False
        )[0]  # fmt: skip


class StableDiffusion3(nn.Module):
    """Text after the image, heads first, and nothing is rotated. The second block's text is only read."""

    def __init__(self, norm: str | None):
        super().__init__()
        self.transformer = SD3Transformer2DModel(
            sample_size=4,
            patch_size=2,
            in_channels=4,
            out_channels=4,
            num_layers=2,
            num_attention_heads=HEADS,
            attention_head_dim=CHANNELS,
            joint_attention_dim=8,
            caption_projection_dim=HEADS * CHANNELS,
            pooled_projection_dim=8,
            pos_embed_max_size=4,
            qk_norm=norm,
        )

    def forward(self, x: Tensor, timestep: Tensor, text: Tensor, pooled: Tensor) -> Tensor:
        return self.transformer(x, text, pooled, timestep, return_dict=False)[0]


class Joined(nn.Module):
    """Text and image, each with its own projections and norms; unusual variants have a name."""

    def __init__(self, kind: str):
        super().__init__()
        self.kind = kind
        self.projections = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(3))
        self.norms = nn.ModuleList(nn.RMSNorm(CHANNELS, eps=1e-5) for _ in range(6))
        if kind == "another epsilon":
            self.norms[1] = nn.RMSNorm(CHANNELS, eps=1e-3)

    def forward(self, x: Tensor, timestep: Tensor) -> Tensor:
        runs = {"three runs": (2, 3, TOKENS - 5), "as many keys of another split": (2, TOKENS - 2)}
        cuts = runs.get(self.kind, (2, TOKENS - 2))
        heads, projected = [], []
        for index, run in enumerate(x.split(cuts, 1)):
            parts = self.projections[index](run).unflatten(2, (3, HEADS, CHANNELS)).unbind(2)
            projected.append(parts)
            q, k = (self.norms[2 * index + i](parts[i]) for i in range(2))
            heads.append((q if self.kind != "image as it is" or index == 0 else parts[0], k, parts[2]))
        q, k, v = (torch.cat(part, 1) for part in zip(*heads, strict=True))
        if self.kind == "as many keys of another split":
            k = torch.cat(
                [self.norms[4](y) for y in torch.cat([parts[1] for parts in projected], 1).split((3, 3), 1)], 1
            )
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        return x + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


FLUX: Shapes = {"x": (1, 4, 4), "timestep": (1,), "text": (1, 3, 8), "pooled": (1, 8)}


@pytest.mark.parametrize("positions", [pytest.param("constant", marks=pytest.mark.soak), "inputs"])
def test_flux(positions):
    """Double blocks norm and project text and image with separate weights."""
    computed = positions == "inputs"
    shapes = FLUX | ({"image_positions": (4, 3), "text_positions": (3, 3)} if computed else {})
    model = traced(Flux(double_blocks=int(computed)), shapes)
    after = lowered(model)
    double = {"transformer.transformer_blocks.0.attn": {"rotary", "norm"}} if computed else {}
    assert taken(after) == double | {"transformer.single_transformer_blocks.0.attn": {"rotary", "norm"}}
    *first, single = attention_nodes(after).values()
    for node in (*first, single):
        assert list(node.inputs[0].shape) == [1, 7, 3, HEADS, CHANNELS]  # the plain projections, in one
        assert len(set(node.inputs[:3])) == 1
        assert node.attributes["norm_eps"].as_float() == pytest.approx(1e-6)
        assert node.inputs[-2] is single.inputs[-2]  # one table
    for node in first:
        assert node.inputs[0].producer().op_type == "Concat"
        assert node.attributes["norm_split"].as_int() == 3 and list(node.inputs[-1].shape) == [2, 2, CHANNELS]
    assert "norm_split" not in single.attributes
    assert_same_after(model, after)


WAN = {f"transformer.blocks.{i}.attn{j + 1}": ({"rotary", "norm"}, {"norm"})[j] for i in range(2) for j in range(2)}


def test_wan():
    """Its norms are across heads, and its cross-attention is not rotated."""
    model = traced(Wan(layers=2), {"x": (1, 4, 2, 4, 4), "timestep": (1,), "text": (1, 3, 8)})
    after = lowered(model)
    assert taken(after) == WAN
    first, cross, second, cross_too = attention_nodes(after).values()
    for node in (first, cross, second, cross_too):
        assert list(node.inputs[-1].shape) == [2, HEADS, CHANNELS]
    for node in (first, second):
        assert list(node.inputs[0].shape) == [1, 8, 3, HEADS, CHANNELS]  # the plain projections, in one
    assert len({*cross.inputs[1:3], *cross_too.inputs[1:3]}) == 1  # keys and values of the text
    assert {"Pow", "ReduceMean", "Reciprocal"}.isdisjoint(node.op_type for node in after.graph)
    assert_same_after(model, after)


@pytest.mark.soak
def test_cogvideox():
    """The text before the video is not rotated: its rows of the table are 1 and 0. The norms are no RMS norms."""
    model = traced(CogVideoX(), {"x": (1, 2, 4, 4, 4), "timestep": (1,), "text": (1, 3, 8)})
    assert "ScatterND" not in {node.op_type for node in model.graph}
    after = lowered(model)
    assert taken(after) == {"transformer.transformer_blocks.0.attn1": {"rotary"}}
    (node,) = attention_nodes(after).values()
    assert [x.producer().op_type for x in node.inputs[:2]] == ["LayerNormalization"] * 2  # nothing is cut or joined
    assert_same_after(model, after)


@pytest.mark.soak
def test_hunyuan_video():
    """The text after the video is not rotated; the double block has projections and norms of its own for it."""
    model = traced(HunyuanVideo(), {"x": (1, 4, 2, 4, 4), "timestep": (1,), "text": (1, 3, 8), "pooled": (1, 8)})
    after = lowered(model)
    assert taken(after) == {
        "transformer.context_embedder.token_refiner.refiner_blocks.0.attn": set(),
        "transformer.transformer_blocks.0.attn": {"rotary", "norm"},
        "transformer.single_transformer_blocks.0.attn": {"rotary", "norm"},
    }
    _, double, single = attention_nodes(after).values()
    for node in (double, single):
        assert list(node.inputs[0].shape) == [1, 11, 3, HEADS, CHANNELS]  # the plain projections, in one
    assert double.inputs[-2] is single.inputs[-2] and list(double.inputs[-2].shape) == [11, CHANNELS // 2, 2]
    assert double.attributes["norm_split"].as_int() == 8
    assert_same_after(model, after)


@pytest.mark.first_case
@pytest.mark.parametrize("norm", ["rms_norm", None])
def test_stable_diffusion_3(norm):
    shapes: Shapes = {"x": (1, 4, 4, 4), "timestep": (1,), "text": (1, 3, 8), "pooled": (1, 8)}
    model = traced(StableDiffusion3(norm), shapes)
    after = lowered(model)
    assert all(found == ({"norm"} if norm else set()) for found in taken(after).values())
    for node in attention_nodes(after).values():
        assert node.attributes["layout"].as_string() == "BNHD"
        assert list(node.inputs[0].shape) == [1, 7, 3, HEADS, CHANNELS]
        if norm:
            assert node.attributes["norm_split"].as_int() == 4 and list(node.inputs[-1].shape) == [2, 2, CHANNELS]
    assert "Pow" not in {node.op_type for node in after.graph}
    assert_same_after(model, after)


@pytest.mark.first_case
@pytest.mark.parametrize("kind", ["three runs", "another epsilon", "image as it is", "as many keys of another split"])
def test_other_norms_of_joined_tokens_are_left(kind):
    model = traced(Joined(kind), ROTATED)
    after = lowered(model)
    assert list(taken(after).values()) == [set()]
    assert_same_after(model, after)


def test_norms_of_joined_tokens():
    """The projections are one product, split in three: norms are fused, and nothing more is joined."""
    model = traced(Joined("two runs"), ROTATED)
    after = lowered(model)
    assert list(taken(after).values()) == [{"norm"}]
    (node,) = attention_nodes(after).values()
    assert node.attributes["norm_split"].as_int() == 2
    assert_same_after(model, after)


@pytest.mark.soak
def test_wan_of_any_size():
    """Norms and rotation are fused with dynamic batch, frames, height and width."""
    shapes: Shapes = {"x": ("batch", 4, "frames", "height", "width"), "timestep": ("batch",), "text": ("batch", 3, 8)}
    model = traced(Wan(layers=2), shapes)
    assert "ScatterND" not in {node.op_type for node in model.graph}
    after = lowered(model)
    assert taken(after) == WAN
    for batch, frames, height, width in ((2, 3, 4, 4), (3, 2, 8, 4), (1, 5, 2, 6)):
        assert_same_after(model, after, batch=batch, frames=frames, height=height, width=width)
