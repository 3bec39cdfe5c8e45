"""The attention operator on a GPU against `trtconvert.attention.reference` in float64.

Kernel and reference compute the same quantised arithmetic: they differ by the output's rounding, by the 16-bit rounding of P
in modes 0 and 1, by the tensor cores' own sums in mode 4, and by single values that fall on the other side of a rounding
edge. On a Hopper GPU these tests run its own kernel, and the portable one where there is a mask;
tests/attention/test_kernel_mma.py runs the portable one everywhere.
"""

from __future__ import annotations

import ctypes
import threading
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from trtconvert.attention import kernel, reference
from trtconvert.attention.modes import INT8_VALUES, Mode

pytestmark = pytest.mark.gpu

# Relative L2 error against the same arithmetic. Rounding the output to FP16 gives 2^-11 / sqrt(3) = 2.8e-4, to BF16 eight
# times that; P in 16 bits as much again. In modes 2 and 3 the exponents' rounding moves some P to the next of 255 steps. In
# mode 3 a sink leaves the outputs small beside the steps of V, and single steps weigh most. In mode 4 the tensor cores cut off
# what is 13 bits below the sum, and a sink makes other weights so small that E4M3 has no more bits for them: the kernel, whose
# references are those of the keys before, is the closer to exact there.
SAME_ARITHMETIC = {
    Mode.FP16: 1e-3,
    Mode.PRECISION: 1.5e-3,
    Mode.BALANCED: 4e-3,
    Mode.AGGRESSIVE: 1e-2,
    Mode.FP8: 1e-2,
}
ROUNDED_TO_BF16 = 5e-3

# Relative L2 error against unquantised attention on N(0, 1) at 4096 keys, D 128, dynamic scales (mode 3: calibrated).
# About a tenth above what was measured: 0.0117, 0.0155, 0.0198, 0.0394.
QUANTISED = {
    Mode.FP16: 1e-3,
    Mode.PRECISION: 0.013,
    Mode.BALANCED: 0.018,
    Mode.AGGRESSIVE: 0.025,
    Mode.FP8: 0.043,
}

TABLES = ("q_scale", "k_scale", "v_scale", "k_offset", "v_offset", "modes")
DIMS = (32, 40, 56, 64, 72, 80, 96, 104, 128, 160, 192, 256)
LENGTHS = (1, 63, 64, 65, 77, 128, 1000, 4096)
KINDS = ("gauss", "sharp", "k-bias", "v-channels", "sink")


def draw(kind: str, batch: int, heads: int, kv_heads: int, queries: int, keys: int, dim: int, dtype=torch.float16):
    """[B, H, Nq, D], [B, Hkv, Nk, D] twice: inputs that stress one thing each."""
    generator = torch.Generator("cuda").manual_seed(keys * dim)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cuda")

    q, k, v = normal(batch, heads, queries, dim), normal(batch, kv_heads, keys, dim), normal(batch, kv_heads, keys, dim)
    if kind == "sharp":  # a peaked softmax
        q = q * 4
    elif kind == "k-bias":  # a large common part, as real keys and values have
        k, v = k + 3 * normal(1, kv_heads, 1, dim), v + normal(1, kv_heads, 1, dim)
    elif kind == "v-channels":  # channels of very different size
        v = v * normal(1, kv_heads, 1, dim).exp()
    elif kind == "sink" and keys > 5:  # one key that every query loves, with a small value
        direction = torch.nn.functional.normalize(normal(1, 1, 1, dim), dim=-1)
        q = q + 6 * direction
        k[:, :, 5:6] = 16 * direction
        v[:, :, 5] *= 0.05
    return q.to(dtype), k.to(dtype), v.to(dtype)


def poison() -> None:
    """Memory that the allocator hands out next holds NaN: what stays unwritten, or is read unwritten, shows in the result."""
    torch.full((256 << 20,), 0xFF, dtype=torch.uint8, device="cuda")


def attend(qkv, timestep, tables, **options) -> Tensor:
    poison()
    return kernel.int8_attention(*qkv, timestep, *(getattr(tables, name) for name in TABLES), **options)


def exact(qkv) -> Tensor:
    q, k, v = (x.double() for x in qkv)
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    return torch.softmax(q @ k.transpose(2, 3) * q.shape[-1] ** -0.5, -1) @ v


def error(out: Tensor, expected: Tensor) -> float:
    return ((out.double() - expected).norm() / expected.norm()).item()


def computed_as(qkv, tables: reference.AttentionTables, *, mask: Tensor | None = None, layout: str = "BHND", **options):
    """The tables whose modes the kernels compute: PRECISION for FP8 where there is no kernel for that."""
    tokens = qkv[1].shape[2 if layout == "BHND" else 1]
    has_fp8 = torch.cuda.get_device_capability() == (9, 0) and options.get("target_arch", 0) == 0
    if has_fp8 and mask is None and tokens > 128 and qkv[0].shape[-1] <= 128:
        return tables
    return tables.with_modes(torch.where(tables.modes == Mode.FP8, int(Mode.PRECISION), tables.modes))


def check(qkv, tables, *, timestep=None, kind: str = "", **options) -> Tensor:
    timestep = torch.full((qkv[0].shape[0],), 500.0, device="cuda") if timestep is None else timestep
    out = attend(qkv, timestep, tables, **options)
    tables = computed_as(qkv, tables, **options)
    expected = reference.attention(*(x.double() for x in qkv), timestep, tables, compute_dtype=torch.float64, **options)
    assert torch.isfinite(out).all()
    limit = max(SAME_ARITHMETIC[Mode(int(mode))] for mode in tables.modes)
    if kind == "sink" and Mode.FP8 in tables.modes:
        limit = 6e-2
    assert error(out, expected) <= limit + (ROUNDED_TO_BF16 if out.dtype == torch.bfloat16 else 0)
    return out


@pytest.mark.parametrize("tokens", LENGTHS)
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("mode", list(Mode))
def test_every_mode_head_dim_and_length(mode: Mode, dim: int, tokens: int) -> None:
    # The other properties take turns, so that each meets each within the sweep.
    turn = LENGTHS.index(tokens) + DIMS.index(dim)
    dtype = (torch.float16, torch.bfloat16)[turn % 2]
    layout = ("BHND", "BNHD")[turn // 2 % 2]
    kind = KINDS[turn % len(KINDS)]
    qkv = draw(kind, 1, 2, 1 + turn % 2, tokens, tokens, dim, dtype)
    tables = reference.tables_from_data(*qkv, mode)
    if layout == "BNHD":
        qkv = [x.transpose(1, 2).contiguous() for x in qkv]
    check(qkv, tables, kind=kind, layout=layout, scaling=("calibrated", "dynamic")[turn // 3 % 2])


@pytest.mark.parametrize("queries", [1, 15, 64, 65, 1000])
@pytest.mark.parametrize("keys", [1, 8, 16, 17, 77, 80, 81, 120, 127, 128, 129, 200])
@pytest.mark.parametrize("dim", [32, 40, 64, 72, 96, 128, 160, 256])
@pytest.mark.parametrize("mode", list(Mode))
def test_few_keys(mode: Mode, dim: int, keys: int, queries: int) -> None:
    """The kernel of one tile, that needs no pre-pass; with the largest head dims, and a second tile, the others."""
    turn = keys + dim // 8 + queries
    dtype, layout = (torch.float16, torch.bfloat16)[turn % 2], ("BHND", "BNHD")[turn // 2 % 2]
    kind = KINDS[turn % len(KINDS)]
    qkv = draw(kind, 2, 4, (1, 2, 4)[turn % 3], queries, keys, dim, dtype)
    tables = reference.tables_from_data(*qkv, mode)
    if layout == "BNHD":
        qkv = [x.transpose(1, 2).contiguous() for x in qkv]
    check(qkv, tables, kind=kind, layout=layout, scaling=("calibrated", "dynamic")[turn // 3 % 2])


@pytest.mark.parametrize("mode", list(Mode))
def test_thousands_of_places_of_a_video(mode: Mode) -> None:
    """At each place, to the same place of all frames."""
    qkv = draw("gauss", 2 * 72 * 128, 2, 2, 16, 16, 40)
    check(qkv, reference.tables_from_data(*qkv, mode))


@pytest.mark.parametrize("keys", [16, 77, 128])
@pytest.mark.parametrize("dim", [40, 64, 128])
@pytest.mark.parametrize("mode", list(Mode))
def test_one_tile_is_what_the_general_kernel_computes(mode: Mode, dim: int, keys: int) -> None:
    """Many heads, several steps of each thread block: closer to the portable kernel than the reference's tolerance."""
    q, k, v = draw("gauss", 2, 20, 20, 4000, keys, dim)
    tables, timestep = reference.tables_from_data(q, k, v, mode), torch.full((2,), 500.0, device="cuda")
    ours, general = (kernel._run_cuda(q, k, v, timestep, tables, target_arch=target) for target in (0, 80))
    assert error(ours, general.double()) < (2e-3 if mode in INT8_VALUES else 6e-4)


@pytest.mark.parametrize("target_arch", [0, 80])
@pytest.mark.parametrize("keys", [77, 80, 100, 128, 200])
@pytest.mark.parametrize("mode", [mode for mode in Mode if mode is not Mode.FP16])
def test_scales_whose_product_underflows(mode: Mode, keys: int, target_arch: int) -> None:
    """All logits are zero then, and keys that do not exist still have no weight."""
    q, k, v = draw("v-channels", 1, 2, 2, 100, keys, 64)
    tables, timestep = reference.tables_from_data(q, k, v, mode), torch.full((1,), 500.0, device="cuda")
    tiny = {name: torch.full_like(getattr(tables, name), 1e-30) for name in ("q_scale", "k_scale")}
    tables = replace(tables, **tiny)
    out = kernel._run_cuda(q, k, v, timestep, tables, scaling="calibrated", target_arch=target_arch)
    tables = computed_as((q, k, v), tables, target_arch=target_arch)
    qkv = (x.double() for x in (q, k, v))
    expected = reference.attention(*qkv, timestep, tables, compute_dtype=torch.float64, scaling="calibrated")
    assert torch.isfinite(out).all()
    assert error(out, expected) <= SAME_ARITHMETIC[mode]


@pytest.mark.parametrize("dtype", [torch.bool, torch.float16])
@pytest.mark.parametrize("keys", [9, 77, 128])
@pytest.mark.parametrize("mode", list(Mode))
def test_masks_of_one_tile(mode: Mode, keys: int, dtype: torch.dtype) -> None:
    qkv = draw("gauss", 2, 4, 2, 150, keys, 64)
    visible = torch.rand(1, 4, 150, keys, device="cuda") > 0.3
    visible[..., 3, :] = False  # a row without a visible key is zero
    mask = visible if dtype == torch.bool else torch.where(visible, torch.randn_like(visible, dtype=dtype), -torch.inf)
    out = check(qkv, reference.tables_from_data(*qkv, mode), mask=mask)
    assert (out[:, :, 3] == 0).all()


@pytest.mark.parametrize("lengths", [[77, 40, 0], [1, 64, 33]])
@pytest.mark.parametrize("dim", [40, 64, 128])
@pytest.mark.parametrize("mode", list(Mode))
def test_one_tile_with_keys_beyond_the_length(mode: Mode, dim: int, lengths: list[int]) -> None:
    q, k, v = draw("k-bias", 3, 4, 2, 70, 77, dim)
    tables = reference.tables_from_data(q, k, v, mode)
    for b, length in enumerate(lengths):
        k[b, :, length:] = v[b, :, length:] = torch.nan
    key_lengths = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    out = check((q, k, v), tables, scaling="dynamic", key_lengths=key_lengths)
    assert (out[[n == 0 for n in lengths]] == 0).all()


@pytest.mark.parametrize("lengths", [[300, 300, 300], [300, 129, 128], [1, 127, 0]])
@pytest.mark.parametrize("dim", [40, 64, 128, 256])
@pytest.mark.parametrize("mode", list(Mode))
def test_keys_beyond_the_length_do_not_exist(mode: Mode, dim: int, lengths: list[int]) -> None:
    q, k, v = draw("k-bias", 3, 4, 2, 70, 300, dim)
    tables = reference.tables_from_data(q, k, v, mode)
    key_lengths = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    for b, length in enumerate(lengths):
        k[b, :, length:] = torch.nan
        v[b, :, length:] = torch.nan
    out = check((q, k, v), tables, scaling="dynamic", key_lengths=key_lengths)
    assert (out[[n == 0 for n in lengths]] == 0).all()


@pytest.mark.parametrize("dtype", [torch.bool, torch.float16])
@pytest.mark.parametrize("mode", list(Mode))
def test_masks(mode: Mode, dtype: torch.dtype) -> None:
    qkv = draw("gauss", 2, 4, 2, 150, 333, 64)
    visible = torch.rand(1, 4, 150, 333, device="cuda") > 0.3
    mask = visible if dtype == torch.bool else torch.where(visible, torch.randn_like(visible, dtype=dtype), -torch.inf)
    check(qkv, reference.tables_from_data(*qkv, mode), mask=mask)


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


def test_each_batch_element_takes_its_own_mode() -> None:
    qkv = draw("gauss", 6, 3, 3, 200, 260, 128)
    one = reference.tables_from_data(*qkv, Mode.FP16)
    tables = reference.AttentionTables(
        *(getattr(one, name).repeat_interleave(5, 0) for name in TABLES[:-1]),
        modes=torch.tensor([3, 2, 1, 4, 0], dtype=torch.int32, device="cuda"),
    )
    timestep = torch.tensor([999.0, 0.0, 200.0, 599.9, 600.0, 1e9], device="cuda")  # the last lies beyond, and clamps
    check(qkv, tables, timestep=timestep)


@pytest.mark.parametrize("keys", [0, 77, 300, 1000])
@pytest.mark.parametrize("queries", [60, 200, 600])
@pytest.mark.parametrize("dim", [40, 64, 80, 96, 128, 160, 192, 256])
@pytest.mark.parametrize("mode", list(Mode))
def test_thread_blocks_go_from_task_to_task(mode: Mode, dim: int, queries: int, keys: int) -> None:
    # Several tasks per multiprocessor, of all and of some of a thread block's consumers; batch elements of other lengths, of
    # which one has no keys, leave barriers in any phase.
    qkv = draw("k-bias", 4, 40, 20, queries, max(keys, 1), dim)
    tables = reference.tables_from_data(*qkv, mode)
    timestep = torch.full((4,), 500.0, device="cuda")
    lengths = torch.tensor([keys, keys // 2, 0, keys], dtype=torch.int32, device="cuda")
    options = {"scaling": "dynamic", "key_lengths": lengths}
    out = check(qkv, tables, **options) if keys else attend(qkv, timestep, tables, **options)
    assert (out[lengths == 0] == 0).all()
    if keys:  # values by the copy engine, which key lengths exclude
        out = check(qkv, tables, scaling="dynamic")
        assert torch.equal(out, attend(qkv, timestep, tables, scaling="dynamic"))


@pytest.mark.parametrize("dim", [40, 64, 80, 128, 160])
@pytest.mark.parametrize("batch, heads, queries", [(2, 24, 1000), (5, 3, 200), (40, 5, 130), (300, 1, 64)])
def test_batch_elements_of_several_modes_share_the_thread_blocks(
    batch: int, heads: int, queries: int, dim: int
) -> None:
    qkv = draw("gauss", batch, heads, heads, queries, 260, dim)
    one = reference.tables_from_data(*qkv, Mode.FP16)
    tables = reference.AttentionTables(
        *(getattr(one, name).repeat_interleave(5, 0) for name in TABLES[:-1]),
        modes=torch.tensor([3, 2, 4, 0, 1], dtype=torch.int32, device="cuda"),
    )
    generator = torch.Generator("cuda").manual_seed(batch)
    for timestep in (
        torch.rand(batch, generator=generator, device="cuda") * 1000,
        torch.where(torch.arange(batch, device="cuda") == batch - 1, 100.0, 900.0),  # one of another mode, at the end
    ):
        out = check(qkv, tables, timestep=timestep)
        for b in (0, batch - 1):
            alone = check([x[b : b + 1] for x in qkv], tables, timestep=timestep[b : b + 1])
            in_fp8 = tables.modes[reference.timestep_bin(timestep[b], 1000.0, 5)] == Mode.FP8
            assert error(out[b : b + 1], alone.double()) < (SAME_ARITHMETIC[Mode.FP8] if in_fp8 else 1e-3)


@pytest.mark.parametrize("mode", list(Mode))
def test_error_against_unquantised_attention(mode: Mode) -> None:
    qkv = draw("gauss", 1, 8, 8, 4096, 4096, 128)
    timestep = torch.zeros(1, device="cuda")
    out = attend(qkv, timestep, reference.tables_from_data(*qkv, mode), scaling="dynamic")
    assert error(out, exact(qkv)) <= QUANTISED[mode]


def test_sinks_do_not_drown_other_values_in_balanced_mode() -> None:
    qkv = draw("sink", 1, 8, 8, 4096, 4096, 128)
    timestep = torch.zeros(1, device="cuda")
    out = attend(qkv, timestep, reference.tables_from_data(*qkv, Mode.BALANCED), scaling="dynamic")
    assert error(out, exact(qkv)) <= 0.02


@pytest.mark.parametrize("kind", ["gauss", "sharp", "sink"])
@pytest.mark.parametrize("keys", [129, 1000, 1152, 9000])
def test_fp8_is_computed_alike_whatever_comes_first(kind: str, keys: int) -> None:
    """Weights are relative to what the first keys held, sums taken over every thousand keys: their order does not matter."""
    q, k, v = draw(kind, 1, 4, 4, 200, keys, 128)
    tables, timestep = reference.tables_from_data(q, k, v, Mode.FP8), torch.zeros(1, device="cuda")
    order = (k @ q[:, :, :1].transpose(2, 3)).flatten(1)[0, :keys].argsort()  # the largest logits last
    for turned in (order, order.flip(0)):
        check((q, k[:, :, turned], v[:, :, turned]), tables, timestep=timestep, kind=kind)


def test_fp8_keeps_sums_of_one_sign() -> None:
    """Half of the values are of one sign, and attention finds them: the tensor cores alone would lose what is added last."""
    q, k, v = draw("gauss", 1, 4, 4, 200, 17160, 128)
    direction = torch.nn.functional.normalize(torch.randn(1, 4, 1, 128, device="cuda"), dim=-1) * 128**0.5 / 4
    sign = torch.where(torch.rand(1, 4, 17160, 1, device="cuda") < 0.5, 1.0, -1.0)
    q, k = (q + 2 * direction).half(), (k + 3 * sign * direction).half()
    v = (v * 0.3 + sign * torch.rand(1, 4, 1, 128, device="cuda")).half()
    out = attend(
        (q, k, v), torch.zeros(1, device="cuda"), reference.tables_from_data(q, k, v, Mode.FP8), scaling="dynamic"
    )
    assert error(out, exact((q, k, v))) < 1e-2


@pytest.mark.parametrize("case", ["mask", "few keys", "portable", "wide"])
def test_fp8_is_precision_where_there_is_no_kernel_for_it(case: str) -> None:
    q, k, v = draw("k-bias", 2, 4, 2, 200, 77 if case == "few keys" else 300, 160 if case == "wide" else 64)
    mask = torch.rand(1, 1, 200, 300, device="cuda") > 0.3 if case == "mask" else None
    tables, timestep = reference.tables_from_data(q, k, v, Mode.FP8), torch.zeros(2, device="cuda")
    options = {"mask": mask, "scaling": "dynamic", "target_arch": 80 if case == "portable" else 0}
    out, expected = (
        kernel._run_cuda(q, k, v, timestep, tables.with_modes(mode), **options) for mode in (Mode.FP8, Mode.PRECISION)
    )
    assert torch.equal(out, expected)


@pytest.mark.parametrize("scaling", ["calibrated", "dynamic"])
@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize(
    "case", ["limit of FP16", "rows of all sizes", "zero queries", "zero values", "one-hot", "constant channels"]
)
def test_extreme_inputs(case: str, mode: Mode, scaling: str) -> None:
    q, k, v = draw("gauss", 1, 2, 2, 300, 600, 64)
    if case == "limit of FP16":
        q, k = ((x.float() * 2e4).clamp(-65504, 65504).half() for x in (q, k))
        v = (v.float() * 1e4).half()
    elif case == "rows of all sizes":
        q = (q.float() * torch.logspace(-6, 1, 300, device="cuda")[:, None]).half()
        v = (v.float() * torch.logspace(-5, 2, 600, device="cuda")[:, None]).half()
    elif case == "zero queries":
        q = torch.zeros_like(q)
    elif case == "zero values":
        v = torch.zeros_like(v)
    elif case == "one-hot":
        q, k = torch.zeros_like(q), torch.zeros_like(k)
        q[..., 3], k[:, :, 77, 3] = 100.0, 100.0
    elif case == "constant channels":  # their scale is the smallest there is
        q[..., 5], k[..., 7], v[..., 9] = -3.0, 2.7, 1.1
    tables = reference.tables_from_data(q, k, v, mode)
    timestep = torch.zeros(1, device="cuda")
    out = attend((q, k, v), timestep, tables, scaling=scaling)
    expected = reference.attention(
        *(x.double() for x in (q, k, v)), timestep, tables, scaling=scaling, compute_dtype=torch.float64
    )
    assert torch.isfinite(out).all()
    # Rows of all sizes give averages of values that mostly cancel: single roundings weigh more.
    limit = SAME_ARITHMETIC[mode] if mode == Mode.FP8 else 4e-3
    assert (out.double() - expected).norm() <= limit * expected.norm() + 1e-6


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("table", ["q_scale", "k_scale", "v_scale"])
def test_unusable_scales_give_nan_in_their_heads_only(table: str, bad: float) -> None:
    qkv = draw("gauss", 1, 4, 2, 100, 200, 64)
    tables = reference.tables_from_data(*qkv, Mode.AGGRESSIVE)
    getattr(tables, table)[0, 1] = bad  # query head 1, or K/V head 1 and with it query heads 2 and 3
    out = attend(qkv, torch.zeros(1, device="cuda"), tables)
    spoilt = [h for h in range(4) if out[:, h].isnan().all()]
    assert spoilt == ([1] if table == "q_scale" else [2, 3])
    assert out[:, [h for h in range(4) if h not in spoilt]].isfinite().all()


@pytest.mark.parametrize("mode, timestep", [(7, 0.0), (-1, 0.0), (2, float("nan"))])
def test_unusable_modes_and_timesteps_give_nan_in_their_elements_only(mode: int, timestep: float) -> None:
    qkv = draw("gauss", 2, 2, 2, 100, 200, 64)
    one = reference.tables_from_data(*qkv, Mode.BALANCED)
    tables = reference.AttentionTables(
        *(getattr(one, name).repeat_interleave(2, 0) for name in TABLES[:-1]),
        modes=torch.tensor([mode, 2], dtype=torch.int32, device="cuda"),
    )
    out = attend(qkv, torch.tensor([timestep, 999.0], device="cuda"), tables)
    assert out[0].isnan().all()
    assert out[1].isfinite().all()


@pytest.mark.parametrize("dim", [40, 64, 128, 256])
@pytest.mark.parametrize("target_arch", [0, 80])
def test_memory_that_holds_anything_harms_nobody(target_arch: int, dim: int) -> None:
    """TensorRT times plugins on tensors that nobody has written: tables, timesteps, modes and lengths of any bits."""
    generator = torch.Generator("cuda").manual_seed(dim)

    def anything(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        size = [*shape[:-1], shape[-1] * dtype.itemsize]
        return torch.randint(0, 256, size, generator=generator, device="cuda", dtype=torch.uint8).view(dtype)

    good = draw("gauss", 2, 4, 4, 200, 200, dim)
    tables, timestep = reference.tables_from_data(*good, Mode.BALANCED), torch.full((2,), 500.0, device="cuda")
    before = kernel._run_cuda(*good, timestep, tables, target_arch=target_arch)
    for turn in range(100):
        batch, heads, tokens, bins = 1 + turn % 3, 4, 1 + 67 * (turn % 7), 1 + turn % 4
        q, k, v = (anything(batch, heads, tokens, dim, dtype=torch.float16) for _ in "qkv")
        scales = [anything(bins, heads) for _ in "qk"] + [anything(bins, heads, dim) for _ in range(3)]
        modes = anything(bins, dtype=torch.int32)
        kernel._run_cuda(
            *(q, k, v) if turn % 2 else (x.nan_to_num(1, 1, 1) for x in (q, k, v)),
            anything(batch) if turn % 3 else torch.full((batch,), 500.0, device="cuda"),
            reference.AttentionTables(*scales, modes=modes if turn % 5 == 0 else modes.remainder(len(Mode))),
            scaling=("calibrated", "dynamic")[turn // 2 % 2],
            key_lengths=anything(batch, dtype=torch.int32) if turn % 4 == 3 else None,
            target_arch=target_arch,
        )
        torch.cuda.synchronize()
    assert torch.equal(kernel._run_cuda(*good, timestep, tables, target_arch=target_arch), before)


def test_offsets_beyond_32_bits() -> None:
    q, k, v = draw("gauss", 1, 1, 1, 128, 300, 64)
    far = torch.empty((1 << 31) + 4096, dtype=torch.float16, device="cuda")
    stride = (1 << 31) // 299 // 8 * 8
    spread = far.as_strided((1, 1, 300, 64), (0, 0, stride, 1))
    spread.copy_(k)
    tables = reference.tables_from_data(q, k, v, Mode.BALANCED)
    out = attend((q, spread, v), torch.zeros(1, device="cuda"), tables)
    near = attend((q, k, v), torch.zeros(1, device="cuda"), tables)
    assert torch.equal(out, near)


def test_a_cuda_graph_follows_the_timestep() -> None:
    qkv = draw("gauss", 1, 4, 4, 512, 512, 128)
    one = reference.tables_from_data(*qkv, Mode.FP16)
    tables = reference.AttentionTables(
        *(getattr(one, name).repeat_interleave(2, 0) for name in TABLES[:-1]),
        modes=torch.tensor([1, 3], dtype=torch.int32, device="cuda"),
    )
    timestep = torch.zeros(1, device="cuda")
    attend(qkv, timestep, tables)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = kernel.int8_attention(*qkv, timestep, *(getattr(tables, name) for name in TABLES))
    for t in (0.0, 999.0, 100.0):
        timestep.fill_(t)
        graph.replay()
        assert torch.equal(out, attend(qkv, timestep, tables))


def test_threads_and_streams_do_not_disturb_each_other() -> None:
    cases = []
    for i in range(8):
        qkv = draw("gauss", 1, 2, 2, 256 + 64 * i, 300, (64, 128)[i % 2])
        tables = reference.tables_from_data(*qkv, Mode(i % len(Mode)))
        cases.append((qkv, tables, attend(qkv, torch.zeros(1, device="cuda"), tables)))
    torch.cuda.synchronize()
    wrong = []

    def work(i: int) -> None:
        streams = [torch.cuda.Stream() for _ in range(4)]
        for round in range(40):
            qkv, tables, expected = cases[(i + round) % len(cases)]
            with torch.cuda.stream(streams[round % 4]):
                timestep = torch.zeros(1, device="cuda")
                out = kernel.int8_attention(*qkv, timestep, *(getattr(tables, name) for name in TABLES))
                if not torch.equal(out, expected):
                    wrong.append((i, round))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def parameters() -> kernel._Params:
    """Parameters that check() accepts. Their pointers are valid memory that is never used: nothing is launched."""
    memory = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
    params = kernel._Params(struct_size=ctypes.sizeof(kernel._Params), version=kernel._PARAMS_VERSION)
    params.batch, params.num_heads, params.num_kv_heads = 1, 4, 2
    params.num_queries, params.num_keys, params.head_dim, params.num_bins = 256, 256, 64, 1
    params.softmax_scale, params.timestep_max = 0.125, 1000.0
    pointers = ("q", "k", "v", "out", *kernel._TABLES, "modes", "workspace")
    for i, name in enumerate(pointers):
        setattr(params, name, memory.data_ptr() + i * (1 << 20))
    params.workspace_size = 32 << 20
    for name in ("q", "k", "v", "out"):
        setattr(params, f"{name}_strides", kernel._Strides(batch=65536, token=64, head=16384))
    params.memory = memory
    return params


def check_status(params: kernel._Params) -> tuple[int, str]:
    message = ctypes.create_string_buffer(512)
    status = kernel._library().trtconvert_attention_check(ctypes.byref(params), message, ctypes.c_size_t(512))
    return status, message.value.decode()


def test_good_parameters_pass_the_checks() -> None:
    assert check_status(parameters()) == (0, "")


def test_a_workspace_for_large_shapes_fits_small_ones() -> None:
    """TensorRT allocates once, for the largest shapes of a profile."""

    def size(**shapes: int) -> int:
        params, bytes_, message = parameters(), ctypes.c_size_t(), ctypes.create_string_buffer(512)
        for name, value in shapes.items():
            setattr(params, name, value)
        assert kernel._library().trtconvert_attention_workspace_size(params, bytes_, message, 512) == 0, message.value
        return bytes_.value

    tokens = (1, 64, 129, 192, 1000, 1024, 4096, 4097)
    sizes = [size(batch=batch, num_queries=n, num_keys=n) for batch in (1, 2, 3) for n in tokens]
    largest = [size(batch=3, num_queries=n, num_keys=n) for n in tokens]
    assert sizes[-len(tokens) :] == largest == sorted(largest)
    across_heads = [size(batch=3, num_queries=n, num_keys=n, norm_across_heads=1) for n in tokens]
    assert across_heads == sorted(across_heads) and min(x - y for x, y in zip(across_heads, largest, strict=True)) > 0
    assert all(x <= y for x, y in zip(sizes, sizes[len(tokens) :], strict=False))  # each against the next batch size


@pytest.mark.parametrize(
    "field, value, status",
    [
        ("struct_size", 8, 1), ("version", 99, 1), ("batch", 0, 1), ("num_heads", 0, 1), ("num_kv_heads", 3, 1),
        ("num_queries", 0, 1), ("num_keys", -5, 1), ("num_keys", (1 << 31) - 1, 1), ("head_dim", 24, 1),
        ("head_dim", 264, 1), ("head_dim", 65, 1), ("num_bins", 0, 1), ("data_type", 2, 1), ("scaling", 5, 1),
        ("mask_kind", 3, 1), ("mask_kind", 1, 1), ("target_arch", 90, 1), ("softmax_scale", 0.0, 1),
        ("softmax_scale", float("nan"), 1), ("timestep_max", -1.0, 1), ("q", None, 1), ("k", 8, 1), ("out", None, 1),
        ("timestep", None, 1), ("q_scale", 2, 1), ("v_scale", 4, 1), ("modes", None, 1), ("workspace", None, 1),
        ("workspace_size", 1000, 3), ("rotary", 8, 1), ("q_norm", 64, 1), ("k_norm", 64, 1),
        ("norm_across_heads", 1, 1), ("norm_split", 1, 1), ("norm_split", -1, 1), ("norm_split", 256, 1),
        ("token_split", 64, 1), ("token_split", -128, 1), ("token_split", 256, 1), ("second_q", 64, 1), ("second_out", 64, 1),
    ],
)  # fmt: skip
def test_bad_parameters_are_named(field: str, value: float | None, status: int) -> None:
    params = parameters()
    setattr(params, field, value)
    got, message = check_status(params)
    assert got == status
    others = {"num_kv_heads": "num_heads", "struct_size": "params", "version": "params"}
    name = (others | {"q_norm": "k_norm", "k_norm": "q_norm"}).get(field, field)  # one without the other
    if field == "mask_kind" and value == 1:
        name = "mask"  # a kind without a mask
    assert message.startswith(name)
