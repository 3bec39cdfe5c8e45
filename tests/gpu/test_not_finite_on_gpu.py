"""NaN and ±Inf in what kernels are given, on a GPU: they reach what they reach in the specification, and all other results are
bit by bit what they are without them."""

from __future__ import annotations

import math

import delta_rows
import int8_rows
import pytest
import test_group_norm
import test_int8_conv
import test_int8_linear
import test_residual_norm
import torch
from gpu_attention import computed_as, draw, error
from int8_rows import DYNAMIC, STATIC, WEIGHT_ONLY, Rows, Table
from torch import Tensor

from trtconvert.attention import Int8Attention, kernel, reference
from trtconvert.attention.modes import INT8_VALUES, Mode
from trtconvert.library import has_group_norm_kernel
from trtconvert.linear import kernel as layer_kernel
from trtconvert.linear import reference as layers
from trtconvert.linear.modes import LayerMode

pytestmark = pytest.mark.gpu

VALUES = (math.nan, math.inf, -math.inf)
HEADS, KV_HEADS, QUERIES = 4, 2, 200
SHARED = slice(2, 4)
"""The query heads of the second key head."""

KERNELS = {  # keys, head_dim and target_arch
    "hopper": (300, 64, 0),
    "hopper, 128 channels": (300, 128, 0),
    "hopper, 160 channels": (300, 160, 0),
    "portable": (300, 64, 80),
    "portable, 128 channels": (300, 128, 80),
    "one tile": (77, 64, 0),
    "one tile, 128 channels": (128, 128, 0),
}
"""On a GPU that is no Hopper the first three are the portable one too."""


def is_same(got: Tensor, expected: Tensor) -> bool:
    """Bit by bit."""
    return torch.equal(got, expected) and bool(got.isfinite().all())


class Attention:
    """A call of attention, and what becomes of it where something is broken."""

    def __init__(self, name: str, mode: Mode, scaling: str, queries: int = QUERIES, **options) -> None:
        keys, dim, arch = KERNELS[name]
        dtype = torch.bfloat16 if name == "one tile" or "128" in name else torch.float16
        self.qkv = draw("gauss", 1, HEADS, KV_HEADS, queries, keys, dim, dtype)
        self.tables = reference.tables_from_data(*self.qkv, mode)
        self.options, self.arch = {"scaling": scaling, **options}, arch
        self.timestep = torch.zeros(1, device="cuda")
        self.whole = self(self.qkv)

    def __call__(self, qkv) -> Tensor:
        return kernel._run_cuda(*qkv, self.timestep, self.tables, target_arch=self.arch, **self.options)

    def reached(self, qkv) -> Tensor:
        """By the specification. Where a GPU has no kernel for FP8, that of PRECISION counts."""
        mask = self.options.get("mask")
        tables = computed_as(qkv, self.tables, mask=mask, target_arch=self.arch)
        given = (x.double() for x in qkv)
        return ~reference.attention(*given, self.timestep, tables, **self.options).isfinite()

    def struck(self, tensor: int, place: tuple, value: float) -> tuple[Tensor, ...]:
        qkv = [x.clone() for x in self.qkv]
        qkv[tensor][place] = value
        return tuple(qkv)

    def check(self, qkv, warps: Tensor | None = None) -> Tensor:
        """
        Args:
            warps: rows [Nq] whose warp of 16 a broken row is in: kernels choose references for all of them, so that other
                rows are rounded otherwise.
        """
        out, reached = self(qkv), self.reached(qkv)
        assert torch.equal(~out.isfinite(), reached)
        beside = torch.zeros_like(reached)
        if warps is not None:
            beside[:, :, warps] = True
            assert error(out[beside & ~reached], self.whole[beside & ~reached].double()) < 2e-2
        left = ~reached & ~beside
        assert torch.equal(out[left], self.whole[left])
        return reached


def warp_of(row: int, queries: int = QUERIES) -> Tensor:
    """[Nq] bool."""
    return torch.arange(queries, device="cuda") // 16 == row // 16


@pytest.mark.parametrize("scaling", ["calibrated", "dynamic"])
@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("name", KERNELS)
def test_queries_keys_and_values(name: str, mode: Mode, scaling: str) -> None:
    call = Attention(name, mode, scaling)
    last = KERNELS[name][0] - 1
    for value in VALUES:
        reached = call.check(call.struck(0, (0, 3, 7, 5), value), warp_of(7))
        assert reached.sum() == reached[0, 3, 7].sum() == reached.shape[-1]
        # All channels of a query that are alike have logits of one sign, which may be minus infinity.
        call.check(call.struck(0, (0, 1, QUERIES - 1), value), warp_of(QUERIES - 1))
        for key in (0, 70, last):
            reached = call.check(call.struck(1, (0, 1, key, 5), value))
            assert reached[:, SHARED].all() and not reached[:, :2].any()
            reached = call.check(call.struck(2, (0, 1, key, 5), value))
            assert reached[:, SHARED, :, 5].all() and not reached[:, :2].any()
            assert reached[:, SHARED].all() == (mode in INT8_VALUES)


@pytest.mark.parametrize("keys", [300, 77])
@pytest.mark.parametrize("mode", list(Mode))
def test_masks(mode: Mode, keys: int) -> None:
    """Additive ones that are broken, and keys that a mask hides: these count, as in torch."""
    name = "hopper" if keys == 300 else "one tile"
    visible = torch.rand(1, 1, QUERIES, keys, device="cuda") > 0.3
    visible[..., 60], visible[:, :, 3] = False, False
    dtype = torch.bfloat16 if name == "one tile" else torch.float16
    additive = torch.where(visible, torch.randn(visible.shape, device="cuda", dtype=dtype), -torch.inf)
    for mask in (visible, additive):
        call = Attention(name, mode, "dynamic", mask=mask)
        assert (call.whole[:, :, 3] == 0).all()
        reached = call.check(call.struck(1, (0, 1, 60, 5), math.nan))
        assert reached[:, SHARED].all() and not reached[:, :2].any()
        assert call.check(call.struck(2, (0, 1, 60, 5), math.nan))[:, SHARED, :, 5].all()
        assert call.check(call.struck(0, (0, 3, 7, 5), math.inf))[0, 3, 7].all()
    call = Attention(name, mode, "calibrated", mask=additive)
    for value in (math.nan, math.inf):
        call.options["mask"] = additive.clone()
        call.options["mask"][..., 9, keys - 1] = value
        reached = call.check(call.qkv)
        assert reached[:, :, 9].all() and reached.sum() == reached[:, :, 9].sum()


@pytest.mark.parametrize("name", ["hopper", "portable"])
@pytest.mark.parametrize("mode", list(Mode))
def test_blocks_that_are_left_out_count_for_nothing(mode: Mode, name: str) -> None:
    blocks = torch.tensor([[[[True, True, False], [True, False, True]]]], device="cuda")
    call = Attention(name, mode, "dynamic", block_mask=blocks)
    for tensor in (1, 2):
        reached = call.check(call.struck(tensor, (0, 1, 299, 5), math.inf))
        assert reached[:, SHARED, 128:, 5].all() and not reached[:, :, :128].any()


@pytest.mark.parametrize("mode", list(Mode))
def test_rows_that_are_not_gathered_count_for_nothing(mode: Mode) -> None:
    index = torch.randperm(290, device="cuda")[:200].int().expand(1, KV_HEADS, -1).contiguous()
    call = Attention("hopper", mode, "dynamic", key_index=index)
    qkv = call.struck(1, (slice(None), slice(None), slice(290, None)), math.nan)
    qkv[2][:, :, 290:] = math.inf
    assert is_same(call(qkv), call.whole)


@pytest.mark.parametrize("name", ["hopper", "portable"])
@pytest.mark.parametrize("mode", list(Mode))
def test_the_log_sum_exp(mode: Mode, name: str) -> None:
    call = Attention(name, mode, "dynamic")
    for tensor, place in ((0, (0, 3, 7, 5)), (1, (0, 1, 60, 5)), (2, (0, 1, 60, 5))):
        qkv = call.struck(tensor, place, math.inf)
        _, lse = kernel._run_cuda(
            *qkv, call.timestep, call.tables, target_arch=call.arch, return_lse=True, scaling="dynamic"
        )
        tables = computed_as(qkv, call.tables, target_arch=call.arch)
        given = (x.double() for x in qkv)
        _, expected = reference.attention(*given, call.timestep, tables, return_lse=True, scaling="dynamic")
        assert torch.equal(lse.isnan(), expected.isnan())


@pytest.mark.parametrize("name", ["hopper", "portable"])
@pytest.mark.parametrize("mode", list(Mode))
def test_norms_and_rotations_in_front(mode: Mode, name: str) -> None:
    """Also of the last row: those behind it, which do not exist, take what it is multiplied by."""
    keys, dim, _ = KERNELS[name]
    turns = torch.rand(keys, dim // 2, device="cuda") * 100
    rotary = torch.stack([turns.cos(), turns.sin()], -1)
    of_heads = (torch.ones(dim, device="cuda"), torch.ones(dim, device="cuda"), 0.1)
    across = (torch.ones(HEADS, dim, device="cuda"), torch.ones(KV_HEADS, dim, device="cuda"), 0.1)
    for options in ({"norm": of_heads}, {"rotary": rotary}, {"norm": of_heads, "rotary": rotary}, {"norm": across}):
        call = Attention(name, mode, "dynamic", keys, **options)
        for row in (7, keys - 1):
            out = call(call.struck(0, (0, 3, row, 5), math.nan))
            reached = torch.zeros_like(out, dtype=torch.bool)
            reached[:, slice(None) if options.get("norm") is across else 3, row] = True
            assert torch.equal(out.isnan(), reached) and torch.equal(~out.isfinite(), reached)
            others = ~warp_of(row, keys)
            assert is_same(out[:, :, others], call.whole[:, :, others])
        out = call(call.struck(1, (0, 1, keys - 1, 5), math.nan))
        heads = slice(None) if options.get("norm") is across else SHARED
        assert out[:, heads].isnan().all() and out.isnan().sum() == out[:, heads].numel()


@pytest.mark.parametrize("mode", ["fp16", "precision", "balanced", "aggressive", "fp8"])
def test_a_module_with_measured_scales_and_its_gradients(mode: str) -> None:
    q, k, v = draw("gauss", 1, HEADS, KV_HEADS, QUERIES, 300, 64)
    q[0, 3, 7] *= 0.1  # it is not what the scale of aggressive mode is of
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    module = Int8Attention(HEADS, 64, num_kv_heads=KV_HEADS, precision_mode=mode).cuda()
    whole = module(q, k, v, 500)
    with torch.no_grad():
        q[0, 3, 7, 5] = math.inf
    out = module(q, k, v, 500)
    others = ~warp_of(7)
    assert out[0, 3, 7].isnan().all() and (~out.isfinite()).sum() == out.shape[-1]
    assert is_same(out[:, :, others], whole[:, :, others])
    of_q, of_k, of_v = torch.autograd.grad(out.sum(), (q, k, v))
    assert of_q[0, 3, 7].isnan().all() and of_k[:, 1].isnan().all() and of_v[:, 1].isnan().all()
    assert of_q[:, :3].isfinite().all() and of_k[:, 0].isfinite().all() and of_v[:, 0].isfinite().all()


# Rows of layers ---------------------------------------------------------------------------------------------------------

ROWS = 300
STRUCK = [0, 127, 128, 299]
PLACES = [0, 7, 20, 3]
"""The channels of these rows."""


def broken_rows(x: Tensor, value: float) -> Tensor:
    changed = x.clone()
    changed[STRUCK, PLACES] = value
    return changed


def only_struck(y: Tensor, whole: Tensor) -> bool:
    """True if no number of the affected rows is finite, and the others equal those of `whole` bit for bit."""
    others = torch.ones(len(y), dtype=torch.bool, device=y.device)
    others[STRUCK] = False
    return not y[STRUCK].isfinite().any() and is_same(y[others], whole[others])


def of_mode(mode: int) -> Table:
    return Table(1 << mode, x_scale=torch.tensor([0.02], device="cuda") if mode == STATIC else None)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("channels", [64, 320, 3072, 20480])
@pytest.mark.parametrize("mode", [DYNAMIC, STATIC])
def test_quantised_rows(mode, channels, dtype):
    x = torch.randn(ROWS, channels, device="cuda").to(dtype)
    factor = torch.rand(channels, device="cuda") + 0.5
    for equalised in ((None, None), (factor, factor)):
        whole = int8_rows.quantised(x, of_mode(mode), *equalised)
        for value in VALUES:
            out = int8_rows.quantised(broken_rows(x, value), of_mode(mode), *equalised)
            assert only_struck(out.scale, whole.scale)
            good = ~out.scale.isnan()
            assert torch.equal(out.int8(channels)[good], whole.int8(channels)[good])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("channels", [64, 320, 640, 4608])
def test_deltas_of_rows_stay_broken(channels, dtype):
    x = torch.randn(ROWS, channels, device="cuda").to(dtype)
    scales = torch.tensor([-0.02, 0.02, 0.02], device="cuda")
    a_hat = torch.randn(ROWS, channels, device="cuda").to(dtype)
    whole = delta_rows.quantised(x, a_hat, scales)
    later = delta_rows.quantised(x, whole.a_next, scales.abs())
    for value in VALUES:
        out = delta_rows.quantised(broken_rows(x, value), a_hat, scales)
        expected = torch.zeros(ROWS, channels, dtype=torch.bool, device="cuda")
        expected[STRUCK, PLACES] = True
        assert only_struck(out.rows.scale, whole.rows.scale)
        assert torch.equal(~out.a_next.isfinite(), expected) and torch.equal(
            out.a_next[~expected], whole.a_next[~expected]
        )
        _, a_next = delta_rows.specified(broken_rows(x, value), a_hat, scales)
        assert torch.equal(out.a_next.isnan(), a_next.isnan())
        after = delta_rows.quantised(x, out.a_next, scales.abs())
        assert only_struck(after.rows.scale, later.rows.scale)
        again = delta_rows.quantised(x, out.a_next, -scales.abs())
        assert again.rows.scale.isfinite().all() and again.a_next.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("channels", [64, 320, 1280, 4096])
def test_residual_norms(channels, dtype):
    x, residual, weight, bias = test_residual_norm.draw(ROWS, channels, dtype)

    def normed(*given: Tensor) -> Tensor:
        total, out = test_residual_norm.blank(given[0])
        assert test_residual_norm.run(test_residual_norm.params(*given, total, out)) == (0, "")
        return out

    whole = normed(x, residual, weight, bias)
    for value in VALUES:
        for given in ((broken_rows(x, value), residual), (x, broken_rows(residual, value))):
            assert only_struck(normed(*given, weight, bias), whole)
            for mode in (DYNAMIC, STATIC):
                rows, total = int8_rows.blank(ROWS, channels, 1 << mode), torch.empty_like(x)
                of = of_mode(mode)
                called = test_residual_norm.params(
                    *given, weight, bias, total, total, normed=None, table=of.given(),
                    payload=rows.payload.data_ptr(), row_scale=rows.scale.data_ptr(),
                )  # fmt: skip
                assert test_residual_norm.run(called) == (0, "")
                assert rows.scale.isnan().nonzero().flatten().tolist() == STRUCK


@pytest.mark.parametrize("arch", [0, 80], ids=["best", "mma"])
@pytest.mark.parametrize("mode", [WEIGHT_ONLY, DYNAMIC, STATIC])
@pytest.mark.parametrize("activation", range(4))
def test_layers_of_rows(activation, mode, arch):
    """Includes the epilogues: GEGLU, GELU, a residual, and quantised rows for the next layer."""
    geglu = activation == test_int8_linear.GEGLU
    _, weight, scale, bias = test_int8_linear.draw(ROWS, (80, 208), 1 + geglu)
    x = torch.randn(ROWS, 80, device="cuda").half()

    def result(given: Tensor, **changed: object) -> Tensor:
        y = test_int8_linear.blank(ROWS, weight)
        rows = int8_rows.quantised(given, of_mode(mode))
        called = test_int8_linear.params(
            rows, weight, scale, bias, y, activation=activation, mode_set=1 << mode, target_arch=arch, **changed
        )
        assert test_int8_linear.run(called) == (0, "")
        return y

    whole = result(x)
    for value in VALUES:
        broken = broken_rows(x, value)
        assert only_struck(result(broken), whole)
        if activation == test_int8_linear.NO_ACTIVATION:
            residual = torch.randn(ROWS, 208, device="cuda").half()
            assert only_struck(result(broken, residual=residual), result(x, residual=residual))
        if mode == WEIGHT_ONLY:
            continue
        out, of = int8_rows.blank(ROWS, 208, 1 << STATIC), of_mode(STATIC)
        result(
            broken, y=None, out_table=of.given(), out_payload=out.payload.data_ptr(), out_row_scale=out.scale.data_ptr()
        )
        assert out.scale.isnan().nonzero().flatten().tolist() == STRUCK


@pytest.mark.parametrize("rows", [8, 16])
def test_few_rows_of_16_bits(rows):
    _, weight, scale, bias = test_int8_linear.draw(rows, (640, 1280))
    x = torch.randn(rows, 640, device="cuda").half()

    def result(given: Tensor) -> Tensor:
        y = test_int8_linear.blank(rows, weight)
        assert test_int8_linear.run(test_int8_linear.params_16bit(given, weight, scale, bias, y)) == (0, "")
        return y

    whole = result(x)
    for value in VALUES:
        broken = x.clone()
        broken[3, 7] = value
        y = result(broken)
        assert not y[3].isfinite().any()
        y[3] = whole[3]
        assert is_same(y, whole)


@pytest.mark.parametrize("arch", [0, 80], ids=["best", "mma"])
def test_deltas_of_layers(arch):
    given, weight, scale, bias = test_int8_linear.draw(ROWS, (80, 200))
    before = torch.randn(ROWS, 200, device="cuda").half()

    def result(row_scale: Tensor, known: Tensor) -> Tensor:
        y = test_int8_linear.blank(ROWS, weight)
        called = test_int8_linear.params(
            Rows(given.payload, row_scale), weight, scale, bias, y, residual=known, target_arch=arch,
            **test_int8_linear.CHANGES,
        )  # fmt: skip
        assert test_int8_linear.run(called) == (0, "")
        return y

    whole = result(given.scale, before)
    marked = given.scale.clone()
    marked[STRUCK] = math.nan
    assert only_struck(result(marked, before), whole)
    broken = before.clone()
    broken[STRUCK] = math.nan  # what a layer gave before stays
    assert only_struck(result(given.scale, broken), whole)


@pytest.mark.parametrize("mode", list(LayerMode)[1:])
def test_layers_in_torch(mode):
    """`quant.forward` computes with these where a model is evaluated."""
    x = torch.randn(4, 75, 64, device="cuda").half()
    weight, weight_scale = layers.quantise_weight(torch.randn(128, 64))
    tables = layers.LayerTables(
        weight, weight_scale, torch.randn(128), torch.ones(64), torch.zeros(64), torch.tensor([0.03]),
        torch.tensor([int(mode)], dtype=torch.int32),
    )  # fmt: skip
    whole = layer_kernel.linear(x, None, tables)
    for value in VALUES:
        broken = x.clone()
        broken[2, 70, 5] = value
        out, expected = layer_kernel.linear(broken, None, tables), layers.linear(broken, None, tables)
        assert torch.equal(out.isfinite(), expected.isfinite())
        assert torch.equal(out[out.isfinite()], whole[out.isfinite()])
        assert not out[2, 70].isfinite().any()


# Images -----------------------------------------------------------------------------------------------------------------

needs_group_norms = pytest.mark.skipif(
    not (torch.cuda.is_available() and has_group_norm_kernel()),
    reason="needs a GPU of compute capability 9.0 or later, and a library compiled for it",
)


def groups_of(x: Tensor, place: tuple[int, int, int], groups: int) -> Tensor:
    """Where a number of [B, pixels, C] is normed with another one."""
    size = x.shape[2] // groups
    reached = torch.zeros(x.shape, dtype=torch.bool, device="cuda")
    reached[place[0], :, place[2] // size * size : (place[2] // size + 1) * size] = True
    return reached


@needs_group_norms
@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize(
    ("pixels", "channels", "groups"), [(1, 64, 8), (256, 320, 32), (4096, 320, 32), (9216, 960, 32)]
)
def test_group_norms(pixels, channels, groups, silu):
    x, shift, weight, bias = test_group_norm.draw(2, pixels, channels, torch.float16)

    def normed(given: Tensor, added: Tensor) -> Tensor:
        out = torch.full_like(given, torch.nan)
        called = test_group_norm.params(given, added, weight, bias, out, groups, silu=silu)
        assert test_group_norm.run(called) == (0, "")
        return out

    whole = normed(x, shift)
    for value in VALUES:
        for place in ((0, 0, 3), (1, pixels - 1, channels - 1), (1, pixels // 2, channels // 2)):
            broken = x.clone()
            broken[place] = value
            out, reached = normed(broken, shift), groups_of(x, place, groups)
            assert torch.equal(~out.isfinite(), reached)
            assert torch.equal(out[~reached], whole[~reached])
        broken = shift.clone()
        broken[1, 5] = value
        assert torch.equal(~normed(x, broken).isfinite(), groups_of(x, (1, 0, 5), groups))


def quantised_norm(x: Tensor, shift: Tensor, weight: Tensor, bias: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """The payload of [B, pixels, C], and its images' marks, both filled with other codes before."""
    payload = torch.full(x.shape, -128, dtype=torch.int8, device="cuda")
    marks = test_int8_conv.set_marks(len(x))
    called = test_group_norm.params(
        x, shift, weight, bias, x, groups, silu=1, normed=None, table=test_int8_conv.one_scale(0.03).given(),
        payload=payload.data_ptr(), marks=marks.data_ptr(),
    )  # fmt: skip
    assert test_group_norm.run(called) == (0, "")
    return payload, marks


@needs_group_norms
@pytest.mark.parametrize(
    ("pixels", "channels", "groups"),
    [
        (1, 8, 1),
        (16, 64, 8),
        (64, 1280, 32),
        (4096, 320, 32),
        (9216, 960, 32),
        (50, 536, 67),  # more groups than marks, and no width of slabs between one group and all of them
        (7, 4096, 512),
    ],
)
def test_group_norms_mark_images(pixels, channels, groups):
    """INT8 has no NaN. A group norm marks the image, whichever group is not finite."""
    x, shift, weight, bias = test_group_norm.draw(3, pixels, channels, torch.float16)
    whole, marks = quantised_norm(x, shift, weight, bias, groups)
    assert whole.min() >= -127 and not marks.any()
    for value in VALUES:
        for channel in (0, channels // 2, channels - 1):
            broken = x.clone()
            broken[1, pixels // 2, channel] = value
            payload, marks = quantised_norm(broken, shift, weight, bias, groups)
            assert marks.any(1).tolist() == [False, True, False]
            assert torch.equal(payload[[0, 2]], whole[[0, 2]])
            broken = shift.clone()
            broken[2, channel] = value
            assert quantised_norm(x, broken, weight, bias, groups)[1].any(1).tolist() == [False, False, True]
            for place in range(2):
                factors = [weight.clone(), bias.clone()]
                factors[place][channel] = value
                assert quantised_norm(x, shift, *factors, groups)[1].any(1).all()


@needs_group_norms
@pytest.mark.parametrize("arch", [0, 80], ids=["best", "mma"])
@pytest.mark.parametrize(
    ("size", "channels", "outputs"), [((4, 4), 64, 320), ((32, 32), 320, 320), ((20, 12), 1920, 640)]
)
def test_convolutions_behind_group_norms(size, channels, outputs, arch):
    """The convolution turns an image that its group norm has marked into NaN."""
    batch, pixels = 3, size[0] * size[1]
    x, *factors = test_group_norm.draw(batch, pixels, channels, torch.float16)
    _, weight, scale, bias = test_int8_conv.draw(batch, size, (channels, outputs), (3, 3))
    of = test_int8_conv.one_scale(0.03)

    def convolved(given: Tensor, stride: int) -> Tensor:
        payload, marks = quantised_norm(given, *factors, 32)
        y = torch.full((batch, -(-size[0] // stride), -(-size[1] // stride), outputs), torch.nan, device="cuda").half()
        called = test_int8_conv.params(
            payload.view(batch, *size, channels), weight, scale, bias, of, y, (stride, stride), (1, 1), target_arch=arch,
            marks=marks.data_ptr(),
        )  # fmt: skip
        assert test_int8_conv.run(called) == (0, "")
        return y

    for stride in (1, 2):
        whole = convolved(x, stride)
        assert whole.isfinite().all()
        for value in VALUES:
            broken = x.clone()
            broken[1, pixels // 2, 5] = value
            out = convolved(broken, stride)
            assert out[1].isnan().all() and is_same(out[[0, 2]], whole[[0, 2]])


def test_scales_of_no_use_are_nan():
    """In the modes that use them; of rows tests/gpu/test_quantise.py says so."""
    q, k, v = draw("gauss", 1, HEADS, KV_HEADS, QUERIES, 300, 64)
    timestep = torch.zeros(1, device="cuda")
    for mode in (Mode.PRECISION, Mode.BALANCED, Mode.AGGRESSIVE, Mode.FP8):
        for name in ("q_scale", "k_scale", "v_scale", "k_offset", "v_offset"):
            for value in (*VALUES, 0.0) if name.endswith("scale") else VALUES:
                tables = reference.tables_from_data(q, k, v, mode)
                getattr(tables, name)[0, 1] = value
                for arch in (0, 80):
                    out = kernel._run_cuda(q, k, v, timestep, tables, target_arch=arch)
                    as_computed = computed_as((q, k, v), tables, target_arch=arch)
                    expected = reference.attention(*(x.double() for x in (q, k, v)), timestep, as_computed)
                    assert torch.equal(out.isnan(), expected.isnan())
