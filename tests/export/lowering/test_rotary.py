"""Fused rotary embeddings and norms: the plugin's results equal the former inputs of attention.

NumPy computes the plugin's part; ONNX Runtime runs the rest of the graph.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import onnx_ir as ir
import pytest
import tiny_models
import torch
from diffusers.models.transformers.transformer_flux import FluxPosEmbed
from rotary_graphs import CHANNELS, HEADS, ROTATED, TOKENS, WIDTH, Shapes, assert_same_after, lowered, taken, traced
from torch import Tensor, nn
from torch.nn import functional as F

from trtconvert.export.lowering.norms import fuse_norms
from trtconvert.export.lowering.rotary import fuse_rotary
from trtconvert.export.nodes.attention import attention_nodes


class Blocks(nn.Module):
    """One block of each kind, one after the other."""

    def __init__(self, *kinds: str):
        super().__init__()
        self.blocks = nn.ModuleList(Parts(kind) if kind in PARTS else Rotated(kind) for kind in kinds)

    def forward(self, x: Tensor, timestep: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, timestep)
        return x


class Rotated(nn.Module):
    """One attention whose queries and keys are rotated in one way or another."""

    def __init__(self, kind: str):
        super().__init__()
        self.kind = kind
        of_k = CHANNELS if kind == "across heads, fewer of k" else WIDTH
        self.q, self.k, self.v = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, of_k), nn.Linear(WIDTH, of_k)
        self.norms = nn.ModuleDict()
        if kind in NORMS:
            channels = [WIDTH, of_k] if "across" in kind else [CHANNELS] * 2
            self.norms["q"] = nn.RMSNorm(channels[0], eps=1e-5)
            self.norms["k"] = nn.RMSNorm(channels[1], eps=1e-6 if "two kinds" in kind else 1e-5)
        self.positions = FluxPosEmbed(100, [CHANNELS])

    def forward(self, x: Tensor, timestep: Tensor) -> Tensor:
        """x [B, N, WIDTH], timestep [B] → [B, N, WIDTH]."""
        q, k, v = self.q(x), self.k(x), self.v(x).unflatten(2, (-1, CHANNELS))
        q, k = (self.normed(name, y, timestep) for name, y in (("q", q), ("k", k)))
        rotated_q, rotated_k = self.rotated(q, x, timestep), self.rotated(k, x, timestep)
        if self.kind == "other angles for k":
            rotated_k = self.rotated(k, x, timestep, theta=50.0)
        if self.kind == "k as it is":
            rotated_k = k
        if "heads first" in self.kind:
            return x + self.attended_heads_first(q, k, v).flatten(2)
        qkv = [y.transpose(1, 2) for y in (rotated_q, rotated_k, v)]
        out = F.scaled_dot_product_attention(*qkv, enable_gqa=k.shape[2] < HEADS).transpose(1, 2)
        return x + (out + rotated_q if self.kind == "read elsewhere" else out).flatten(2)

    def attended_heads_first(self, *qkv: Tensor) -> Tensor:
        """q, k and v [B, N, H, D], rotated as [B, H, N, D]."""
        q, k, v = (y.transpose(1, 2) for y in qkv)
        if self.kind == "heads first, then norm":
            q, k = (F.rms_norm(y, (CHANNELS,), self.norms[name].weight, 1e-5) for name, y in (("q", q), ("k", k)))
        if self.kind == "angles of heads, heads first":
            angles = torch.ones(HEADS, 1, 1) * torch.rand(q.shape[2], CHANNELS // 2)
            q, k = (tiny_models.rotated(y, angles * torch.arange(1, HEADS + 1)[:, None, None]) for y in (q, k))
        else:
            q, k = tiny_models.rotated(q), tiny_models.rotated(k)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)

    def normed(self, name: str, y: Tensor, timestep: Tensor) -> Tensor:
        if "across" in self.kind:
            normed = self.normed_across(self.norms[name], y, timestep, is_key=name == "k")
            return normed.reshape(*y.shape[:2], -1, CHANNELS)
        heads = y.unflatten(2, (HEADS, -1))
        if self.kind == "norm by the timestep":
            weight = (1 + (timestep[:, None, None, None] > 500)) * self.norms[name].weight
            return F.rms_norm(heads, (CHANNELS,), eps=1e-5) * weight
        if self.kind in ("length of another", "mean over heads"):
            wide = heads.float()
            of, axis = (wide + 1, -1) if self.kind == "length of another" else (wide, -2)
            root = torch.rsqrt(of.pow(2).mean(axis, keepdim=True) + 1e-5)
            return (wide * root * self.norms[name].weight.float()).to(y.dtype)
        return self.norms[name](heads) if self.norms and self.kind != "heads first, then norm" else heads

    def normed_across(self, norm: nn.RMSNorm, y: Tensor, timestep: Tensor, is_key: bool) -> Tensor:
        """y [B, N, H·D]; the same numbers in the same order come back."""
        if self.kind == "across heads of rows alone":
            return norm(y.flatten(0, 1))
        if self.kind == "across heads by the timestep":
            return F.rms_norm(y, (WIDTH,), eps=1e-5) * timestep[:, None, None].to(y.dtype) * norm.weight / 500
        if self.kind == "across heads, each of k" and is_key:
            of_heads = F.rms_norm(y.unflatten(2, (HEADS, -1)), (CHANNELS,), eps=1e-5).flatten(2)
            return of_heads * norm.weight
        if self.kind in ("across tokens", "across the first head"):
            wide = y.float()
            of, axis = (wide, 1) if self.kind == "across tokens" else (wide[..., :CHANNELS], 2)
            return (wide * torch.rsqrt(of.pow(2).mean(axis, keepdim=True) + 1e-5) * norm.weight.float()).to(y.dtype)
        return norm(y)

    def rotated(self, y: Tensor, x: Tensor, timestep: Tensor, theta: float = 100.0) -> Tensor:
        """y [B, N, H, D]."""
        kind, pairs = self.kind, CHANNELS // 2
        if "alone" in kind:
            return y
        angles = torch.arange(x.shape[1])[:, None] * theta ** -(torch.arange(pairs) / pairs)
        if "turn" in kind or kind == "unequal neighbours":
            cos, sin = (f(angles).repeat_interleave(2, 1) for f in (torch.cos, torch.sin))
            if kind == "turn of computed positions":
                cos, sin = self.positions(x[0, :, :1] * 5)
            elif kind == "turn by an input":
                cos, sin = x[0, :, :CHANNELS].cos(), x[0, :, :CHANNELS].sin()
            elif kind == "unequal neighbours":
                cos, sin = (f(torch.cat([angles, angles], 1)) for f in (torch.cos, torch.sin))
            even, odd = y.unflatten(3, (-1, 2)).unbind(-1)
            if kind == "half a turn":
                even, odd = odd, even
            turned = torch.stack([-odd, even], -1).flatten(3)
            return (y.float() * cos[:, None] + turned.float() * sin[:, None]).to(y.dtype)
        if kind == "halves of heads":  # of LLaMA: channel i goes with channel i + D/2
            cos, sin = (f(torch.cat([angles, angles], 1))[:, None] for f in (torch.cos, torch.sin))
            first, second = y.chunk(2, -1)
            return (y.float() * cos + torch.cat([-second, first], -1).float() * sin).to(y.dtype)
        if kind == "angles of batch elements":
            angles = angles[None] * timestep[:, None, None] / 100
        angles = angles.unsqueeze(-2)  # for all heads
        if kind == "angles of heads":
            angles = angles[None] * torch.arange(1, HEADS + 1)[:, None]
        cos, sin = angles.cos(), angles.sin()
        if kind == "tables in FP16":
            cos, sin = cos.to(y.dtype), sin.to(y.dtype)
        x0, x1 = y.unflatten(3, (-1, 2)).unbind(-1)
        cos1, sin1 = (cos * 2, sin * 2) if kind == "odd channels otherwise" else (cos, sin)
        if kind == "even channels of odd ones":
            return torch.stack([x1 * cos - x0 * sin, x1 * cos + x0 * sin], -1).flatten(3).to(y.dtype)
        if kind == "the other way round":
            return torch.stack([x0 * cos + x1 * sin, x1 * cos - x0 * sin], -1).flatten(3).to(y.dtype)
        return torch.stack([x0 * cos - x1 * sin, x1 * cos1 + x0 * sin1], -1).flatten(3).to(y.dtype)


Part = tuple[float | None, slice]
"""Tokens, and the theta that they are rotated with, negative for backwards, or that they are not."""


class Parts(nn.Module):
    """One attention that rotates some tokens of its queries and keys. The others may come from another tensor."""

    def __init__(self, kind: str):
        super().__init__()
        self.kind = kind
        self.q, self.k, self.v, self.other = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.heads_first = "heads first" in kind
        self.axis = 3 if kind == "channels" else 2 if self.heads_first or kind == "heads" else 1

    def forward(self, x: Tensor, timestep: Tensor) -> Tensor:
        """x [B, N, WIDTH] → [B, N, WIDTH]."""
        parts, half = PARTS[self.kind], x.shape[1] // 2
        other = self.other(x.flatten(0, 1)).unflatten(0, x.shape[:2])
        if self.kind == "half of the tokens":  # unknown when traced, if the others are
            parts = (100.0, slice(0, half)), (None, slice(half, None))
        q, k = self.joined(parts, self.q(x), other), self.joined(PARTS_OF_K.get(self.kind, parts), self.k(x), other)
        q, k = (y if self.heads_first else y.transpose(1, 2) for y in (q, k))
        v = self.v(x)
        if self.kind not in COVERING:  # some have more tokens, or fewer
            v = torch.cat([v, v], 1)[:, : k.shape[2]]
        v = v.unflatten(2, (HEADS, -1)).transpose(1, 2)
        return x + F.scaled_dot_product_attention(q, k, v).mean(2).flatten(1)[:, None]

    def joined(self, parts: Sequence[Part], y: Tensor, other: Tensor) -> Tensor:
        joined = []
        for theta, tokens in parts:
            source = other if theta is None and "of another tensor" in self.kind else y
            if "cut before heads" in self.kind:
                part = source[:, tokens].unflatten(2, (HEADS, -1))
            else:
                heads = source.unflatten(2, (HEADS, -1))
                heads = heads.transpose(1, 2) if self.heads_first else heads
                part = heads[(slice(None),) * self.axis + (tokens,)]
            joined.append(part if theta is None else self.rotated(part, theta))
        return torch.cat(joined, self.axis)

    def rotated(self, y: Tensor, theta: float) -> Tensor:
        tokens, pairs = y.shape[2 if self.heads_first else 1], y.shape[3] // 2
        angles = torch.arange(tokens)[:, None] * abs(theta) ** -torch.linspace(0, 1, pairs) * math.copysign(1, theta)
        return tiny_models.rotated(y, angles if self.heads_first else angles[:, None])


AFTER: tuple[Part, ...] = (100.0, slice(0, -2)), (None, slice(-2, None))


BEFORE: tuple[Part, ...] = (None, slice(0, 2)), (100.0, slice(2, None))


COVERING: dict[str, tuple[Part, ...]] = {
    "text after": AFTER,
    "text before": BEFORE,
    "text before, heads first": BEFORE,
    "text after, cut before heads": AFTER,
    "mostly text": ((100.0, slice(0, 2)), (None, slice(2, None))),
    "half of the tokens": AFTER,
    "counted from both ends": ((100.0, slice(0, TOKENS - 2)), (None, slice(-2, None))),
    "two rotations": ((100.0, slice(0, 1)), (None, slice(1, 3)), (50.0, slice(3, None))),
}
"""Parts that make up one tensor."""


UNCOVERED: dict[str, tuple[Part, ...]] = {
    "text of another tensor": AFTER,
    "text of another tensor, heads first": BEFORE,
    "text of another tensor, cut before heads": AFTER,
    "all of another tensor": ((100.0, slice(None)), (None, slice(None))),
    "a gap": ((None, slice(0, 2)), (100.0, slice(3, None))),
    "an overlap": ((None, slice(0, 3)), (100.0, slice(2, None))),
    "not the first": ((None, slice(1, 3)), (100.0, slice(3, None))),
    "not the last": ((None, slice(0, 2)), (100.0, slice(2, -1))),
    "in another order": ((100.0, slice(2, None)), (None, slice(0, 2))),
    "every other": ((100.0, slice(0, None, 2)), (None, slice(1, None, 2))),
}
"""Parts that do not."""


PARTS_OF_K: dict[str, tuple[Part, ...]] = {
    "other parts of k": ((None, slice(0, 3)), (100.0, slice(3, None))),
    "other order of k": ((100.0, slice(0, 4)), (None, slice(4, None))),
    "other angles of k": ((None, slice(0, 2)), (50.0, slice(2, None))),
    "opposite angles of k": ((None, slice(0, 2)), (-100.0, slice(2, None))),
    "whole k": ((100.0, slice(None)),),
    "unrotated k": ((None, slice(0, 2)), (None, slice(2, None))),
    "more keys": ((None, slice(0, 2)), (100.0, slice(2, None)), (None, slice(0, 1))),
}


OTHER_PARTS: dict[str, tuple[Part, ...]] = dict.fromkeys(PARTS_OF_K, BEFORE) | {
    "more keys": ((None, slice(0, 2)), (100.0, slice(2, None)), (None, slice(0, 2))),
    "none": ((None, slice(0, 2)), (None, slice(3, None))),
    "channels": ((100.0, slice(0, 8)), (None, slice(8, None))),
    "heads": ((100.0, slice(0, 1)), (None, slice(1, None))),
}


PARTS = COVERING | UNCOVERED | OTHER_PARTS


ROTATIONS = ("halves", "tables in FP16", "turn", "turn of computed positions", "heads first", "read elsewhere")


OTHER_ROTATIONS = (
    "other angles for k",
    "k as it is",
    "turn by an input",
    "unequal neighbours",
    "halves of heads",
    "angles of batch elements",
    "angles of heads",
    "angles of heads, heads first",
    "the other way round",
    "odd channels otherwise",
    "even channels of odd ones",
    "half a turn",
)


OTHER_NORMS = (
    "norms of two kinds",
    "norm by the timestep",
    "length of another",
    "mean over heads",
    "across heads, norms of two kinds",
    "across heads by the timestep",
    "across heads, each of k",
    "across heads, fewer of k",
    "across the first head",
    "across tokens",
)


BOTH = ("norm", "norm, heads first", "heads first, then norm", "across heads", "across heads, heads first")


ALONE = ("norm alone", "across heads alone", "across heads of rows alone")


NORMS = (*BOTH, *ALONE, *OTHER_NORMS)


ANY_NUMBER = pytest.mark.parametrize(
    "any_number",
    [pytest.param(False, marks=pytest.mark.soak, id="as traced"), pytest.param(True, id="any number")],
)


@pytest.mark.soak
@ANY_NUMBER
def test_parts_of_one_tensor(any_number):
    shapes: Shapes = ROTATED | ({"x": ("batch", "tokens", WIDTH)} if any_number else {})
    kinds = [kind for kind in COVERING if not (any_number and kind == "counted from both ends")]
    model = traced(Blocks(*kinds), shapes)
    after = lowered(model)
    assert list(taken(after).values()) == [{"rotary"}] * len(kinds)
    for node in attention_nodes(after).values():
        assert len(set(node.inputs[:3])) == 1  # the plain projections, in one
    for tokens in (5, 8) if any_number else (TOKENS,):
        assert_same_after(model, after, tokens=tokens)


@pytest.mark.soak
@ANY_NUMBER
def test_parts_of_several_tensors(any_number):
    shapes: Shapes = ROTATED | ({"x": ("batch", "tokens", WIDTH)} if any_number else {})
    kinds = [kind for kind in UNCOVERED if not (any_number and kind == "every other")]
    model = traced(Blocks(*kinds), shapes)
    after = lowered(model)
    assert list(taken(after).values()) == [{"rotary"}] * len(kinds)
    assert {x.producer().op_type for node in attention_nodes(after).values() for x in node.inputs[:2]} == {"Concat"}
    for tokens in (5, 8) if any_number else (TOKENS,):
        assert_same_after(model, after, tokens=tokens)


@pytest.mark.soak
def test_rotations_and_norms():
    kinds = (*ROTATIONS, *BOTH, *ALONE)
    model = traced(Blocks(*kinds), ROTATED)
    after = lowered(model)
    of_kind = dict(zip(kinds, taken(after).values(), strict=True))
    both = {kind: {"rotary", "norm"} for kind in BOTH}
    assert of_kind == {kind: {"rotary"} for kind in ROTATIONS} | both | {kind: {"norm"} for kind in ALONE}
    nodes = dict(zip(kinds, attention_nodes(after).values(), strict=True))
    in_one = {kind: len(set(node.inputs[:3])) == 1 for kind, node in nodes.items()}  # the plain projections
    assert in_one == dict.fromkeys(kinds, True) | {"across heads of rows alone": False}
    assert nodes["halves"].inputs[-1] is nodes["read elsewhere"].inputs[-1] is nodes["norm"].inputs[-2]
    assert nodes["norm"].attributes["norm_eps"].as_float() == pytest.approx(1e-5)
    sizes = {kind: [HEADS, CHANNELS] if "across" in kind else [CHANNELS] for kind in (*BOTH, *ALONE)}
    assert {kind: list(nodes[kind].inputs[-1].shape) for kind in sizes} == {kind: [2, *x] for kind, x in sizes.items()}
    assert_same_after(model, after)
    # The rotation is gone unless other nodes read its result.
    left = {node.name for node in after.graph}
    rotated = {kind: node.inputs[0] for kind, node in zip(kinds, attention_nodes(model).values(), strict=True)}
    assert [kind for kind, value in rotated.items() if value.producer().name in left] == ["read elsewhere"]


def test_any_number_of_tokens():
    model = traced(Blocks("halves", "turn of computed positions"), ROTATED | {"x": ("batch", "tokens", WIDTH)})
    after = lowered(model)
    assert list(taken(after).values()) == [{"rotary"}] * 2
    assert_same_after(model, after)


@pytest.mark.soak
def test_bfloat16():
    """ONNX Runtime computes no BF16 on CPUs, so only the structure is looked at."""
    after = lowered(traced(Blocks("norm", "across heads"), ROTATED, torch.bfloat16))
    assert list(taken(after).values()) == [{"rotary", "norm"}] * 2
    for node in attention_nodes(after).values():
        assert [value.dtype for value in node.inputs[-2:]] == [ir.DataType.FLOAT] * 2
        assert node.inputs[0].dtype == ir.DataType.BFLOAT16


def test_masks_stay_before_what_is_taken():
    model = traced(Blocks("norm"), ROTATED)
    (node,) = attention_nodes(model).values()
    mask = ir.Value(name="mask", shape=ir.Shape([1, 1, 1, TOKENS]), type=ir.TensorType(ir.DataType.FLOAT))
    model.graph.inputs.append(mask)
    node.resize_inputs(len(node.inputs) + 1)
    node.replace_input_with(len(node.inputs) - 1, mask)
    (node,) = attention_nodes(lowered(model)).values()
    *_, of_mask, rotary, norm = node.inputs
    assert of_mask.producer().inputs[0].name == "mask" and of_mask.dtype == ir.DataType.FLOAT16
    assert list(rotary.shape) == [TOKENS, CHANNELS // 2, 2] and list(norm.shape) == [2, CHANNELS]


@pytest.mark.soak
def test_other_rotations_are_left():
    model = traced(Blocks(*OTHER_ROTATIONS), ROTATED)
    before = [node.name for node in model.graph]
    assert fuse_rotary(model) == 0
    assert [node.name for node in model.graph] == before


@pytest.mark.soak
def test_other_parts_are_left():
    model = traced(Blocks(*OTHER_PARTS), ROTATED)
    before = [node.name for node in model.graph]
    assert fuse_rotary(model) == 0
    assert [node.name for node in model.graph] == before


@pytest.mark.soak
def test_parts_of_unknown_numbers_of_tokens_are_left():
    model = traced(Blocks("mostly text"), ROTATED | {"x": ("batch", "tokens", WIDTH)})
    (node,) = attention_nodes(model).values()
    for join in (x.producer() for x in node.inputs[:2]):
        text = join.inputs[1]
        text.shape = ir.Shape([text.shape[0], None, *text.shape[2:]])
    assert fuse_rotary(model) == 0


@pytest.mark.first_case
@pytest.mark.parametrize(
    "cuts",
    [
        [([5], [1], [1], [-1]), ([1], [-7], [1], [-1])],  # backwards
        [([0, 0], [-2, HEADS], [1, 2], [1, 1]), ([-2], [TOKENS], [1], [1])],
    ],
    ids=["backwards", "two axes"],
)
def test_other_slices_are_joined(cuts):
    """Starts, ends, axes and steps of both slices of q."""
    model = traced(Blocks("text after"), ROTATED)
    (node,) = attention_nodes(model).values()
    whole = node.inputs[0].producer().inputs[1].producer().inputs[0]
    slices = [next(user for user, _ in whole.uses() if user.outputs[0].shape[1] == count) for count in (4, 2)]
    for cut, numbers in zip(slices, cuts, strict=True):
        bounds = [ir.node("Constant", [], {"value_ints": list(x)}) for x in numbers]
        model.graph.insert_before(cut, bounds)
        cut.resize_inputs(5)
        for index, bound in enumerate(bounds, 1):
            cut.replace_input_with(index, bound.outputs[0])
    after = model.clone()
    assert fuse_rotary(after) == 1
    (node,) = attention_nodes(after).values()
    assert [x.producer().op_type for x in node.inputs[:2]] == ["Concat", "Reshape"]
    assert_same_after(model, after)


@pytest.mark.soak
def test_other_norms_are_left():
    model = traced(Blocks(*OTHER_NORMS), ROTATED)
    assert fuse_rotary(model) == len(OTHER_NORMS)
    before = [node.name for node in model.graph]
    assert fuse_norms(model) == 0
    assert [node.name for node in model.graph] == before


def test_rotations_and_norms_in_fp32_are_left():
    """The plugin would rotate numbers rounded to FP16."""
    model = traced(Blocks("norm", "norm alone", "across heads alone"), ROTATED, torch.float32)
    assert (fuse_rotary(model), fuse_norms(model)) == (0, 0)


@pytest.mark.soak
def test_engines_that_are_refitted_keep_their_norms():
    model = traced(Blocks("norm", "across heads"), ROTATED)
    after = lowered(model, refittable=True)
    assert list(taken(after).values()) == [{"rotary"}] * 2
    assert_same_after(model, after)
