"""Norms and rotations that the attention operator takes along, on a GPU against the same layers before it."""

from __future__ import annotations

import pytest
import torch
from gpu_attention import draw, error, poison
from torch import Tensor

from trtconvert.attention import kernel, reference
from trtconvert.attention.modes import Mode

pytestmark = pytest.mark.gpu


def normalised(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """RMS norm of [B, H, N, D], of each row by a weight [D] or of each token across heads by [H, D], rounded to x's type."""
    wide, of_token = x.float(), weight.dim() == 2
    mean = wide.square().mean((1, 3) if of_token else 3, keepdim=True)
    return (wide * torch.rsqrt(mean + epsilon) * (weight[:, None] if of_token else weight)).to(x.dtype)


def rotated(x: Tensor, rotary: Tensor) -> Tensor:
    """Neighbouring channels of [B, H, N, D] turned by [N, D / 2, 2], rounded to x's type."""
    turned = torch.view_as_complex(x.float().unflatten(-1, (-1, 2))) * torch.view_as_complex(rotary)
    return torch.view_as_real(turned).flatten(-2).to(x.dtype)


EPSILON = 0.1  # of norms: large, so that it shows


def angles(tokens: int, dim: int) -> Tensor:
    """A table of rotations, [N, D / 2, 2]."""
    turns = torch.rand(tokens, dim // 2, device="cuda") * 100
    return torch.stack([turns.cos(), turns.sin()], -1)


def check_layers_before(
    qkv,
    mode: Mode,
    weights: list[Tensor] | None,
    rotary: Tensor | None,
    layout: str = "BHND",
    norm_split: int = 0,
    **options,
) -> None:
    """The kernels' own norm and rotation of [B, H, N, D] against the same layers before them: a value may round to its other
    neighbour. With norm_split the weights are [2, D], of the tokens before it and of those from it on."""
    q, k, v = qkv
    before = [q, k]
    if norm_split:
        parts = [
            zip(x.split([norm_split, x.shape[2] - norm_split], 2), w, strict=True)
            for x, w in zip(before, weights, strict=True)
        ]
        before = [torch.cat([normalised(part, weight, EPSILON) for part, weight in pairs], 2) for pairs in parts]
    elif weights is not None:
        before = [normalised(x, weight, EPSILON) for x, weight in zip(before, weights, strict=True)]
    if rotary is not None:
        before = [rotated(x, rotary) for x in before]
    tables, timestep = reference.tables_from_data(*before, v, mode), torch.full((q.shape[0],), 500.0, device="cuda")
    expected = kernel._run_cuda(*before, v, timestep, tables, **options)
    if layout == "packed":  # [B, N, 3, H, D]
        given = torch.stack([x.transpose(1, 2) for x in qkv], 2).unbind(2)
    else:
        given = qkv if layout == "BHND" else [x.transpose(1, 2).contiguous() for x in qkv]
    options |= {"rotary": rotary, "norm": None if weights is None else (*weights, EPSILON), "norm_split": norm_split}
    poison()
    out = kernel._run_cuda(*given, timestep, tables, layout="BHND" if layout == "BHND" else "BNHD", **options)
    out = out if layout == "BHND" else out.transpose(1, 2)
    limit = 4e-3 if mode == Mode.FP8 else 1e-3  # the other neighbour is up to a sixteenth away
    assert error(out, expected.double()) <= (limit if out.dtype == torch.float16 else 8e-3)


@pytest.mark.one_in(7)
@pytest.mark.parametrize("target_arch", [0, 80])
@pytest.mark.parametrize("layers", ["norm", "rotary", "both"])
@pytest.mark.parametrize("tokens", [1, 127, 1000])
@pytest.mark.parametrize("dim", [40, 64, 128, 192])
@pytest.mark.parametrize("mode", list(Mode))
def test_norm_and_rotation_in_the_same_trip(mode: Mode, dim: int, tokens: int, layers: str, target_arch: int) -> None:
    dtype = torch.bfloat16 if dim == 64 else torch.float16
    check_layers_before(
        draw("k-bias", 2, 4, 2, tokens, tokens, dim, dtype),
        mode,
        None if layers == "rotary" else [torch.rand(dim, device="cuda") + 0.5 for _ in range(2)],
        None if layers == "norm" else angles(tokens, dim),
        scaling=("calibrated", "dynamic")[tokens % 2],
        target_arch=target_arch,
    )


@pytest.mark.one_in(7)
@pytest.mark.parametrize("target_arch", [0, 80])
@pytest.mark.parametrize("layers", ["norm", "both"])
@pytest.mark.parametrize("layout", ["BHND", "BNHD", "packed"])
@pytest.mark.parametrize("tokens", [1, 127, 1000])
@pytest.mark.parametrize("dim", [40, 64, 128, 160])
@pytest.mark.parametrize("mode", list(Mode))
def test_norm_across_heads(mode: Mode, dim: int, tokens: int, layout: str, layers: str, target_arch: int) -> None:
    """As above. A token's heads are less than the warp that reads them takes at once, as much, and more."""
    heads, kv_heads = 12, 12 if layout == "packed" else 4
    keys = 77 if layers == "norm" and layout != "packed" else tokens
    check_layers_before(
        draw("k-bias", 2, heads, kv_heads, tokens, keys, dim, torch.bfloat16 if dim == 64 else torch.float16),
        mode,
        [torch.rand(number, dim, device="cuda") + 0.5 for number in (heads, kv_heads)],
        angles(tokens, dim) if layers == "both" else None,
        layout,
        scaling=("calibrated", "dynamic")[tokens % 2],
        target_arch=target_arch,
    )


@pytest.mark.one_in(7)
@pytest.mark.parametrize("target_arch", [0, 80])
@pytest.mark.parametrize("layers", ["norm", "both"])
@pytest.mark.parametrize("layout", ["BHND", "packed"])
@pytest.mark.parametrize("split", [1, 64, 77, 128, 199])
@pytest.mark.parametrize("dim", [40, 128, 160])
@pytest.mark.parametrize("mode", list(Mode))
def test_norms_of_two_parts(mode: Mode, dim: int, split: int, layout: str, layers: str, target_arch: int) -> None:
    """Joint attention of text and image: the parts meet within a tile of 128 tokens, between two, and at the ends."""
    heads, kv_heads = 4, 4 if layout == "packed" else 2
    check_layers_before(
        draw("gauss", 2, heads, kv_heads, 200, 200, dim, (torch.bfloat16, torch.float16)[split % 2]),
        mode,
        [torch.rand(2, dim, device="cuda") + 0.5 for _ in range(2)],
        angles(200, dim) if layers == "both" else None,
        layout,
        norm_split=split,
        scaling=("calibrated", "dynamic")[split // 64 % 2],
        target_arch=target_arch,
    )


@pytest.mark.parametrize("target_arch", [0, 80])
@pytest.mark.parametrize("dim", [40, 128, 160])
def test_queries_of_each_part_take_its_weights_and_no_others(dim: int, target_arch: int) -> None:
    """Bit for bit what one norm of all tokens gives them, where keys have but one."""
    qkv, rotary = draw("gauss", 1, 4, 4, 1000, 1000, dim), angles(1000, dim)
    first, second, of_keys = (torch.rand(dim, device="cuda") + 0.5 for _ in range(3))
    tables, timestep = reference.tables_from_data(*qkv, Mode.PRECISION), torch.zeros(1, device="cuda")

    def run(of_queries: Tensor, of_keys: Tensor, split: int = 0) -> Tensor:
        options = {"norm": (of_queries, of_keys, EPSILON), "norm_split": split, "target_arch": target_arch}
        return kernel._run_cuda(*qkv, timestep, tables, rotary=rotary, scaling="dynamic", **options)

    whole = [run(weights, of_keys) for weights in (first, second)]
    for split in (1, 300, 512, 999):
        out = run(torch.stack([first, second]), torch.stack([of_keys, of_keys]), split)
        expected = torch.cat([whole[0][:, :, :split], whole[1][:, :, split:]], 2)
        torch.testing.assert_close(out, expected, rtol=0, atol=0)


@pytest.mark.one_in(7)
@pytest.mark.parametrize("target_arch", [0, 80])
@pytest.mark.parametrize("layout", ["BHND", "BNHD"])
@pytest.mark.parametrize("split", [128, 512, 896])
@pytest.mark.parametrize("dim", [40, 64, 128, 160, 192, 256])
@pytest.mark.parametrize("mode", list(Mode))
def test_tokens_in_two_tensors(mode: Mode, dim: int, split: int, layout: str, target_arch: int) -> None:
    """Bit for bit what one tensor gives: with layers before attention, lengths that end in either part, and masks."""
    axes = (0, 1, 2, 3) if layout == "BHND" else (0, 2, 1, 3)
    drawn = draw("k-bias", 3, 4, 4, 1000, 1000, dim, torch.bfloat16 if split == 512 else torch.float16)
    tables, timestep = reference.tables_from_data(*drawn, mode), torch.zeros(3, device="cuda")
    qkv = [x.permute(axes).contiguous() for x in drawn]
    weights = [torch.rand(dim, device="cuda") + 0.5 for _ in range(2)]
    across_heads = [torch.rand(4, dim, device="cuda") + 0.5 for _ in range(2)]
    of_parts = [torch.rand(2, dim, device="cuda") + 0.5 for _ in range(2)]
    cases = [
        {},
        {"rotary": angles(1000, dim), "norm": (*weights, EPSILON)},
        {"rotary": angles(1000, dim), "norm": (*of_parts, EPSILON), "norm_split": split},
        {"norm": (*across_heads, EPSILON)},
        {"key_lengths": torch.tensor([1000, split, 77], dtype=torch.int32, device="cuda")},
        {"mask": torch.rand(1, 4, 1000, 1000, device="cuda") > 0.3},
        {
            "mask": torch.rand(3, 1, 1, 1000, device="cuda") > 0.3,
            "rotary": angles(1000, dim),
            "norm": (*weights, EPSILON),
        },
    ]
    for case in cases:
        options = case | {
            "layout": layout,
            "scaling": ("calibrated", "dynamic")[split // 128 % 2],
            "target_arch": target_arch,
        }
        expected = kernel._run_cuda(*qkv, timestep, tables, **options)
        poison()
        out = kernel._run_cuda(*qkv, timestep, tables, token_split=split, **options)
        torch.testing.assert_close(out, expected, rtol=0, atol=0)


@pytest.mark.parametrize("target_arch", [0, 80])
@pytest.mark.parametrize("dim", [40, 128, 160])
@pytest.mark.parametrize("mode", list(Mode))
def test_key_masks_behind_layers(mode: Mode, dim: int, target_arch: int) -> None:
    """Gathered keys keep the norms and angles of their tokens."""
    visible = torch.rand(2, 1, 1, 500, device="cuda") > 0.3
    visible[1, ..., :150] = False
    options = {"scaling": "dynamic", "target_arch": target_arch, "mask": visible}
    for weights, rotary, split in (
        (None, True, 0),
        ([torch.rand(dim, device="cuda") + 0.5 for _ in range(2)], True, 0),
        ([torch.rand(4, dim, device="cuda") + 0.5 for _ in range(2)], False, 0),
        ([torch.rand(2, dim, device="cuda") + 0.5 for _ in range(2)], True, 200),
    ):
        qkv, table = draw("k-bias", 2, 4, 4, 500, 500, dim), angles(500, dim) if rotary else None
        if target_arch == 80 or dim > 128:  # a mask like others, which all keys of a tile scale
            options |= {"mask": visible.expand(-1, 4, 500, -1).contiguous()}
        check_layers_before(qkv, mode, weights, table, norm_split=split, **options)


def test_norm_across_heads_of_keys_beyond_the_length() -> None:
    qkv = draw("k-bias", 2, 4, 4, 70, 300, 64)
    key_lengths = torch.tensor([300, 129], dtype=torch.int32, device="cuda")
    for x in qkv[1:]:
        x[1, :, 129:] = torch.nan
    weights = [torch.rand(4, 64, device="cuda") + 0.5 for _ in range(2)]
    tables, timestep = (
        reference.tables_from_data(*(x.nan_to_num() for x in qkv), Mode.BALANCED),
        torch.zeros(2, device="cuda"),
    )
    options = {"key_lengths": key_lengths, "scaling": "dynamic"}
    out = kernel._run_cuda(*qkv, timestep, tables, norm=(*weights, EPSILON), **options)
    before = [normalised(x, weight, EPSILON) for x, weight in zip(qkv[:2], weights, strict=True)]
    expected = kernel._run_cuda(*before, qkv[2], timestep, tables, **options)
    assert error(out, expected.double()) <= 1e-3


@pytest.mark.parametrize("target_arch", [0, 80])
def test_calls_in_a_row_keep_their_norms_apart(target_arch: int) -> None:
    """The allocator gives them one workspace, and nothing waits between them."""
    calls = [[x * 1.5**i for x in draw("k-bias", 1, 8, 8, 1000, 1000, 64)] for i in range(12)]
    weights = [torch.rand(8, 64, device="cuda") + 0.5 for _ in range(2)]
    tables, timestep = reference.tables_from_data(*calls[0], Mode.PRECISION), torch.zeros(1, device="cuda")

    def run(qkv) -> Tensor:
        norm = (*weights, EPSILON)
        return kernel._run_cuda(*qkv, timestep, tables, norm=norm, scaling="dynamic", target_arch=target_arch)

    in_a_row = [run(qkv) for qkv in calls]
    for qkv, out in zip(calls, in_a_row, strict=True):
        torch.cuda.synchronize()
        torch.testing.assert_close(out, run(qkv), rtol=0, atol=0)
