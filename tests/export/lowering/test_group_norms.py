"""Single group norms, patchify and unpatchify: matches, and equal results."""

from __future__ import annotations

import onnx_ir as ir
import pytest
import torch
from exports import export
from exports import run as run_images
from norm_graphs import as_operators, flags, named, shifts
from tolerances import PIXELS_AS_TOKENS
from torch import Tensor, nn
from torch.nn import functional as F

from trtconvert.export.lowering.group_norms import CHANNELS_LAST_ADD, GROUP_NORM, fuse_group_norms
from trtconvert.models.recorded_calls import relative_error


class Images(nn.Module):
    """A convolution, a norm, SiLU, and another convolution."""

    def __init__(self, channels: int = 16, groups: int = 4) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(channels, channels, 3, padding=1, groups=channels) for _ in range(2))
        self.norm = nn.GroupNorm(groups, channels, eps=0.5)
        self.vector = nn.Linear(channels, channels)
        self.into, self.out = nn.Conv2d(channels, channels, 1), nn.Conv2d(channels, channels, 1)
        generator = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.5, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] → [B, C, H, W]."""
        return self.second(F.silu(self.norm(self.first(x))))

    def shifted(self, x: Tensor) -> Tensor:
        return self.first(x) + self.vector(x.mean((2, 3)))[:, :, None, None]

    def tokens(self, image: Tensor) -> Tensor:
        """[B, C, H, W] → [B, H·W, C]."""
        return image.permute(0, 2, 3, 1).reshape(len(image), -1, image.shape[1])

    def image(self, tokens: Tensor, like: Tensor) -> Tensor:
        """[B, H·W, C] → [B, C, H, W]."""
        return tokens.reshape(len(tokens), *like.shape[2:], tokens.shape[2]).permute(0, 3, 1, 2).contiguous()


class Shifted(Images):
    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.silu(self.norm(self.shifted(x))))


class ShiftedTheOtherWayRound(Images):
    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.norm(self.vector(x.mean((2, 3)))[..., None, None] + self.first(x)))


class ShiftedForOthersToo(Images):
    def forward(self, x: Tensor) -> Tensor:
        shifted = self.shifted(x)
        return self.second(F.silu(self.norm(shifted))) + shifted


class ShiftedBySizes(Images):
    """Another node reads the sum's sizes, so that the sum stays."""

    def forward(self, x: Tensor) -> Tensor:
        shifted = self.shifted(x)
        return self.second(self.norm(shifted)) + shifted.sum((2, 3), keepdim=True)


class ShiftedAlike(Images):
    """One vector for all images."""

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.silu(self.norm(self.first(x) + self.vector(x.mean((0, 2, 3)))[None, :, None, None])))


class NormedForOthersToo(Images):
    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(self.first(x))
        return self.second(F.silu(normed)) + normed


class GatedForOthersToo(Images):
    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(self.first(x))
        gate = normed.sigmoid()
        return self.second(normed * gate) + gate


class GatedByAnother(Images):
    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(self.first(x))
        return self.second(normed) * normed.sigmoid()


class Joined(Images):
    """No convolution reads the norm. The input concatenates a sum with a convolution's output."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Conv2d(16, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(torch.cat([x[:, :8], x[:, 8:].exp() + self.part(x)], 1))


class BehindAnother(Images):
    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.first(x).exp())


class Alone(Images):
    def forward(self, x: Tensor) -> Tensor:
        return F.silu(self.norm(x.exp())).exp()


class InFrontOfOne(Images):
    def forward(self, x: Tensor) -> Tensor:
        return self.first(F.silu(self.norm(x.exp())))


class Tokens(Images):
    """Only 1 × 1 convolutions: a norm, tokens, and an image that they are added to."""

    def __init__(self, kind: str = "plain", width: int = 16, bias: bool = True) -> None:
        super().__init__()
        self.kind = kind
        kernel = 3 if kind == "wide kernel" else 1
        options = {"stride": 2} if kind == "strides" else {"groups": 2} if kind == "groups" else {}
        self.into = nn.Conv2d(16, width, kernel, bias=bias, **options)  # type: ignore[arg-type]
        self.out = nn.Conv2d(width, 1 if kind == "one channel" else 16, 1, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        x = x.exp() if self.kind == "no convolution" else self.first(x)
        image = self.norm(x)
        if self.kind == "silu":
            image = F.silu(image)
        if self.kind != "linear":
            image = self.into(image)
        tokens = self.tokens(image.transpose(2, 3) if self.kind == "turned" else image)
        if self.kind == "batch in a row":
            row = image.permute(0, 2, 3, 1).reshape(1, -1, image.shape[1]).tanh()
            return x + self.out(row.reshape(len(x), *x.shape[2:], -1).permute(0, 3, 1, 2))
        if self.kind in ("strides", "wide kernel"):  # another size
            return tokens
        back = self.image(tokens.tanh(), like=x)
        back = back if self.kind == "linear" else self.out(back)
        if self.kind == "image read twice":
            return (back + x) * image.mean() * back.mean()
        return back + x if self.kind == "image first" else x + back


def images(
    module: nn.Module, dtype: torch.dtype = torch.float16, channels: int = 16, width: int = 6, **dims: int
) -> tuple[ir.Model, Tensor]:
    """A traced module of images [3, C, 4, W], and images. Named axes are dynamic."""
    x = torch.randn(3, channels, 4, width, generator=torch.Generator().manual_seed(0)).to(dtype)
    program = export(module.to(dtype), x, **dims)
    program.optimize()
    return program.model, x


def same_function(model: ir.Model, before: ir.Model, x: Tensor) -> bool:
    found, expected = (run_images(each, x).float() for each in (as_operators(model.clone()), before))
    return relative_error(found, expected) < PIXELS_AS_TOKENS


@pytest.mark.first_case
@pytest.mark.parametrize("dims", [{}, {"batch": 0, "rows": 2, "columns": 3}], ids=str)
@pytest.mark.parametrize(
    ("make", "silu", "shift"),
    [
        (Images, 1, 0),
        (Shifted, 1, 1),
        (ShiftedTheOtherWayRound, 0, 1),
        (ShiftedForOthersToo, 1, 0),
        (ShiftedBySizes, 0, 0),
        (ShiftedAlike, 1, 0),
        (NormedForOthersToo, 0, 0),
        (GatedForOthersToo, 0, 0),
        (GatedByAnother, 0, 0),
        (Joined, 0, 0),
        (InFrontOfOne, 1, 0),
    ],
)
def test_operations_that_a_norm_absorbs(make: type[Images], silu: int, shift: int, dims: dict[str, int]):
    model, x = images(make(), **dims)
    before = model.clone()
    assert fuse_group_norms(model) == 1
    assert (flags(model, "silu"), shifts(model), flags(model, "channels_last")) == ([silu], shift, [0])
    assert not named(model, "InstanceNormalization")
    assert same_function(model, before, x)


@pytest.mark.first_case
@pytest.mark.parametrize(
    ("make", "channels", "dtype"),
    [
        (Images, 16, torch.float32),
        (lambda: Images(12), 12, torch.float16),  # no whole 16 bytes
        (lambda: Images(4104, 8), 4104, torch.float16),  # more than the kernel takes
        (Alone, 16, torch.float16),
        (BehindAnother, 16, torch.float16),
    ],
    ids=["FP32", "12 channels", "4104 channels", "no convolution", "behind another operator"],
)
def test_other_norms_are_left(make, channels: int, dtype: torch.dtype):
    model, _ = images(make(), dtype, channels, batch=0)
    before = [(node.op_type, node.name) for node in model.graph]
    assert fuse_group_norms(model) == 0
    assert [(node.op_type, node.name) for node in model.graph] == before


@pytest.mark.first_case
@pytest.mark.parametrize("lacking", ["weight", "bias", "ones", "zeros"])
def test_norms_that_are_written_in_another_way_are_left(lacking: str):
    model, _ = images(Images(), batch=0)
    (norm,) = named(model, "InstanceNormalization")
    (scaled,) = (node for node in named(model, "Mul") if list(node.inputs[1].shape) == [16, 1, 1])
    ((added, _),) = scaled.outputs[0].uses()
    if lacking in ("weight", "bias"):
        node = scaled if lacking == "weight" else added
        ir.convenience.replace_all_uses_with(node.outputs[0], node.inputs[0])
        model.graph.remove(node, safe=True)
    else:
        norm.replace_input_with(1 if lacking == "ones" else 2, norm.inputs[2 if lacking == "ones" else 1])
    assert fuse_group_norms(model) == 0


@pytest.mark.soak
def test_other_16_bits_and_the_most_channels():
    model, _ = images(Images(4096, 32), torch.bfloat16, 4096)
    assert fuse_group_norms(model) == 1
    assert len(model.graph) == 3 and flags(model, "silu") == [1]
    assert all(value.dtype == ir.DataType.BFLOAT16 for value in named(model, GROUP_NORM)[0].inputs)


def test_a_norm_that_is_a_result_stays_one():
    """Such norms have no SiLU, and no tokens."""
    for module in (Images(), Tokens("linear")):
        model, x = images(module)
        (last,) = (
            reader for node in named(model, "Mul") for reader, _ in node.outputs[0].uses() if reader.op_type == "Add"
        )
        before = model.clone()
        model.graph.outputs.append(last.outputs[0])
        name = last.outputs[0].name
        fuse_group_norms(model)
        assert (flags(model, "silu"), flags(model, "channels_last")) == ([0], [0])
        assert named(model, GROUP_NORM)[0].outputs[0] is model.graph.outputs[1]
        assert model.graph.outputs[1].name == name
        assert same_function(model, before, x)


def test_a_norm_that_is_called_twice_has_its_weights_once():
    class Twice(Images):
        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.second(self.norm(self.first(x))))

    model, x = images(Twice())
    before = model.clone()
    assert fuse_group_norms(model) == 2
    first, second = named(model, GROUP_NORM)
    assert first.inputs[1:] == second.inputs[1:] and first.inputs[1] is not first.inputs[2]
    assert same_function(model, before, x)


@pytest.mark.first_case
@pytest.mark.parametrize("dims", [{"batch": 0}, {"batch": 0, "rows": 2, "columns": 3}], ids=str)
@pytest.mark.parametrize(
    ("kind", "width", "bias", "last", "sums", "convolutions"),
    [
        # One convolution computes x. The others are products, in patchify and unpatchify.
        ("linear", 16, True, 1, 1, 1),
        ("plain", 16, True, 1, 1, 1),
        ("plain", 16, False, 1, 1, 1),
        ("image first", 16, True, 1, 1, 1),
        ("plain", 24, True, 1, 1, 1),
        ("no convolution", 16, True, 1, 0, 1),
        ("silu", 16, True, 0, 1, 2),
        ("turned", 16, True, 0, 1, 2),
        ("wide kernel", 16, True, 0, 0, 2),
        ("groups", 16, True, 0, 1, 2),
        ("strides", 16, True, 0, 0, 2),
        ("batch in a row", 16, True, 0, 0, 3),
        ("one channel", 16, True, 1, 0, 2),  # the same one is added to all
        ("image read twice", 16, True, 0, 0, 3),
    ],
)  # fmt: skip
def test_images_become_tokens_and_back(
    kind: str, width: int, bias: bool, last: int, sums: int, convolutions: int, dims: dict[str, int]
):
    model, x = images(Tokens(kind, width, bias), **dims)
    before = model.clone()
    if width != 16 and "rows" in dims:  # other channels need fixed sizes
        sums, convolutions = 0, convolutions + 1
    assert fuse_group_norms(model) == 1 + sums
    assert flags(model, "channels_last") == [last] and len(named(model, CHANNELS_LAST_ADD)) == sums
    assert len(named(model, "Conv")) == convolutions
    assert same_function(model, before, x)


def test_one_transformer_behind_another():
    class Two(Images):
        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            for scale in (1, 2):
                x = x + self.image(self.tokens(self.norm(x)) * scale, like=x)
            return x

    model, x = images(Two(), batch=0)
    before = model.clone()
    assert fuse_group_norms(model) == 4 and flags(model, "channels_last") == [1, 1]
    assert same_function(model, before, x)


def test_square_images_that_are_turned_back_are_left():
    class Turned(Images):
        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            return x + self.image(self.tokens(self.norm(x)).exp(), like=x).transpose(2, 3)

    model, x = images(Turned(), width=4)
    before = model.clone()
    assert fuse_group_norms(model) == 1 and flags(model, "channels_last") == [1]
    assert same_function(model, before, x)


def test_tokens_are_added_as_before_where_no_norm_is_taken():
    class Unnormed(Images):
        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            return x + self.image(self.tokens(x).exp(), like=x)

    model, _ = images(Unnormed())
    before = [(node.op_type, node.name) for node in model.graph]
    assert fuse_group_norms(model) == 0
    assert [(node.op_type, node.name) for node in model.graph] == before
