"""The attention operator on a GPU against `trtconvert.attention.reference` in float64.

Kernel and reference compute the same quantised arithmetic: they differ by the output's rounding, by the 16-bit rounding of P
in modes 0 and 1, by the tensor cores' own sums in mode 4, and by single values that fall on the other side of a rounding
edge. On a Hopper GPU these tests run its own kernel, and the portable one where there is a mask;
tests/attention/test_kernel_mma.py runs the portable one everywhere.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from gpu_attention import (
    DIMS,
    KINDS,
    LENGTHS,
    QUANTISED,
    SAME_ARITHMETIC,
    TABLES,
    attend,
    check,
    computed_as,
    draw,
    error,
    exact,
    poison,
)

from trtconvert.attention import kernel, reference
from trtconvert.attention.modes import INT8_VALUES, Mode

pytestmark = pytest.mark.gpu


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


@pytest.mark.one_in(7)
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


@pytest.mark.parametrize("target_arch", [0, 80])
@pytest.mark.parametrize(("keys", "lengths"), [(77, None), (300, [300, 200, 300, 90]), (2500, None)])
@pytest.mark.parametrize("dim", [64, 72, 128, 256])
@pytest.mark.parametrize("mode", list(Mode))
def test_key_masks_leave_keys_out(mode: Mode, dim: int, keys: int, lengths: list[int] | None, target_arch: int) -> None:
    """Bit for bit what the visible keys give as an index, whatever hidden keys hold."""
    q, k, v = draw("k-bias", 4, 4, 2, 150, keys, dim)
    tables = reference.tables_from_data(q, k, v, mode)
    timestep = torch.full((4,), 500.0, device="cuda")
    visible = torch.rand(4, 1, 1, keys, device="cuda") > 0.4
    visible[1], visible[2] = False, True
    visible[3, ..., keys // 3 :] = False
    hidden = ~visible[:, 0, 0]
    k.transpose(1, 2)[hidden] = v.transpose(1, 2)[hidden] = torch.nan
    of_batch = None if lengths is None else torch.tensor(lengths, dtype=torch.int32, device="cuda")
    options = {"scaling": "dynamic", "target_arch": target_arch, "return_lse": True}
    poison()
    out, lse = kernel._run_cuda(q, k, v, timestep, tables, mask=visible, key_lengths=of_batch, **options)
    index, counts = reference.visible_keys(visible, of_batch, k)
    expected = kernel._run_cuda(q, k, v, timestep, tables, key_index=index, key_lengths=counts, **options)
    torch.testing.assert_close((out, lse), expected, rtol=0, atol=0)
    few = kernel._run_cuda(
        q, *reference.gather_keys(k, v, index), timestep, tables, key_lengths=counts, **options | {"return_lse": False}
    )
    out = kernel._run_cuda(
        q, k, v, timestep, tables, mask=visible, key_lengths=of_batch, **options | {"return_lse": False}
    )
    torch.testing.assert_close(out, few, rtol=0, atol=0)
    assert (out[1] == 0).all() and torch.isfinite(out).all()
    tables = computed_as((q, k, v), tables, mask=visible, target_arch=target_arch)
    exact = reference.attention(
        q.double(), k.double(), v.double(), timestep, tables, mask=visible, key_lengths=of_batch, scaling="dynamic",
        compute_dtype=torch.float64,
    )  # fmt: skip
    assert error(out, exact) <= SAME_ARITHMETIC[mode]


def test_each_batch_element_takes_its_own_mode() -> None:
    qkv = draw("gauss", 6, 3, 3, 200, 260, 128)
    one = reference.tables_from_data(*qkv, Mode.FP16)
    tables = reference.AttentionTables(
        *(getattr(one, name).repeat_interleave(5, 0) for name in TABLES[:-1]),
        modes=torch.tensor([3, 2, 1, 4, 0], dtype=torch.int32, device="cuda"),
    )
    timestep = torch.tensor([999.0, 0.0, 200.0, 599.9, 600.0, 1e9], device="cuda")  # the last lies beyond, and clamps
    check(qkv, tables, timestep=timestep)


@pytest.mark.one_in(7)
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
    """Weights are relative to the first keys, and sums cover a thousand keys each; the order of keys does not matter."""
    q, k, v = draw(kind, 1, 4, 4, 200, keys, 128)
    tables, timestep = reference.tables_from_data(q, k, v, Mode.FP8), torch.zeros(1, device="cuda")
    order = (k @ q[:, :, :1].transpose(2, 3)).flatten(1)[0, :keys].argsort()  # the largest logits last
    for turned in (order, order.flip(0)):
        check((q, k[:, :, turned], v[:, :, turned]), tables, timestep=timestep, kind=kind)


def test_fp8_keeps_sums_of_one_sign() -> None:
    """Half of the values are of one sign, and attention finds them: the tensor cores alone would lose the last terms."""
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
