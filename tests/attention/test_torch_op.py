"""`torch.ops.trtconvert.int8_attention`: the operator on a CPU, where it runs the reference, and on a GPU.

tests/gpu/test_int8_attention.py tests the kernels' numerics. This file tests the operator in torch: schema, shape
inference, gradients, compilation, graphs, errors.
"""

from __future__ import annotations

import ctypes
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from trtconvert.attention import kernel, reference
from trtconvert.attention.modes import Mode
from trtconvert.c_structs import ATTENTION_VERSION, AttentionParams
from trtconvert.library import library_path

OP = torch.ops.trtconvert.int8_attention.default
SEED = 20


def inputs(
    *,
    layout: str = "BHND",
    mode: Mode = Mode.BALANCED,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    grad: bool = False,
    queries: int = 40,
    keys: int = 150,
    dim: int = 64,
) -> list[Tensor]:
    """q, k, v, timestep and the tables for batch 2, 4 query heads and 2 key heads."""
    generator = torch.Generator().manual_seed(SEED)

    def normal(heads: int, tokens: int) -> Tensor:
        shape = (2, heads, tokens, dim) if layout == "BHND" else (2, tokens, heads, dim)
        return torch.randn(shape, generator=generator).to(device, dtype)

    q, k, v = normal(4, queries), normal(2, keys), normal(2, keys)
    tables = reference.tables_from_data(q, k, v, mode, layout=layout)
    for x in (q, k, v):
        x.requires_grad_(grad)
    return [q, k, v, torch.tensor([10.0, 900.0], device=device), *_tables(tables)]


def _tables(tables: reference.AttentionTables) -> list[Tensor]:
    return [tables.q_scale, tables.k_scale, tables.v_scale, tables.k_offset, tables.v_offset, tables.modes]


def sdpa(q: Tensor, k: Tensor, v: Tensor, layout: str = "BHND", mask: Tensor | None = None) -> Tensor:
    if layout == "BNHD":
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    return out if layout == "BHND" else out.transpose(1, 2)


@pytest.mark.parametrize("layout", ["BHND", "BNHD"])
@pytest.mark.parametrize("masked", [False, True])
def test_opcheck(layout: str, masked: bool) -> None:
    """Schema, fake kernel, autograd registration and AOT dispatch with dynamic shapes, as torch itself checks them."""
    mask = torch.ones(40, 150, dtype=torch.bool).tril(30) if masked else None
    lengths = torch.tensor([150, 90], dtype=torch.int32) if masked else None
    torch.library.opcheck(OP, (*inputs(layout=layout, grad=True), mask, lengths, layout))


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("layout", ["BHND", "BNHD"])
def test_cpu_runs_the_reference(mode: Mode, layout: str) -> None:
    args = inputs(mode=mode, layout=layout)
    out = OP(*args, layout=layout, scaling="dynamic", smooth_k=False, timestep_max=500.0, softmax_scale=0.2)
    q, k, v, timestep, *tables = args
    expected = reference.attention(
        q, k, v, timestep, reference.AttentionTables(*tables), layout=layout, scaling="dynamic", smooth_k=False,
        timestep_max=500.0, softmax_scale=0.2,
    )  # fmt: skip
    assert out.is_contiguous()
    torch.testing.assert_close(out, expected, rtol=0, atol=0)
    # The result is attention up to quantisation, not a constant.
    plain = sdpa(q * (0.2 * 8), k, v, layout)
    assert (out - plain).norm() < 0.05 * plain.norm()


@pytest.mark.parametrize("layout", ["BHND", "BNHD"])
@pytest.mark.parametrize("kind", ["none", "bool", "additive", "lengths", "bool and lengths"])
def test_gradients_are_those_of_unquantised_attention(layout: str, kind: str) -> None:
    args = inputs(layout=layout, grad=True)
    lengths = torch.tensor([150, 90], dtype=torch.int32) if "lengths" in kind else None
    visible = torch.ones(2, 1, 40, 150, dtype=torch.bool)
    mask: Tensor | None = None
    if "bool" in kind:
        mask = torch.ones(40, 150, dtype=torch.bool).tril(30)
        visible = visible & mask
    if lengths is not None:
        visible = visible & (torch.arange(150) < lengths[:, None])[:, None, None]
    full = visible
    if kind == "additive":
        full = mask = torch.randn(2, 1, 1, 150, generator=torch.Generator().manual_seed(SEED))
    weights = torch.randn(args[0].shape, generator=torch.Generator().manual_seed(SEED))
    got = torch.autograd.grad((OP(*args, mask, lengths, layout) * weights).sum(), args[:3])
    expected = torch.autograd.grad((sdpa(*args[:3], layout, full) * weights).sum(), args[:3])
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


BIASES = {
    "of rows": (40, 150),
    "of heads": (1, 4, 40, 150),
    "of keys": (2, 1, 1, 150),
    "of one axis": (150,),
    "of one": (1, 1),
}


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("lengths", [None, [150, 90]])
@pytest.mark.parametrize("shape", BIASES)
def test_a_learned_mask_has_its_gradient(shape: str, lengths: list[int] | None, autocast: bool) -> None:
    args = inputs(grad=True)
    key_lengths = None if lengths is None else torch.tensor(lengths, dtype=torch.int32)
    bias = torch.randn(BIASES[shape], generator=torch.Generator().manual_seed(SEED)).requires_grad_()
    full = bias.expand(2, 4, 40, 150)
    if key_lengths is not None:
        full = full.masked_fill(torch.arange(150) >= key_lengths[:, None, None, None], -torch.inf)
    q, k, v = args[0], *(x.repeat_interleave(2, 1) for x in args[1:3])
    logits = q @ k.transpose(2, 3) / 8 + full
    tables = reference.AttentionTables(*args[4:])
    weights, lse_weights = (
        torch.randn(shape, generator=torch.Generator().manual_seed(SEED)) for shape in (q.shape, q.shape[:3])
    )
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out, lse = kernel.attention(*args[:4], tables, mask=bias, key_lengths=key_lengths, return_lse=True)
        got = torch.autograd.grad(
            (out * weights).sum() + (lse * lse_weights).sum(), (bias, *args[:3]), retain_graph=True
        )
    plain = (logits.softmax(-1) @ v * weights).sum() + (logits.logsumexp(-1) * lse_weights).sum()
    for a, b in zip(got, torch.autograd.grad(plain, (bias, *args[:3])), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_a_learned_mask_under_blocks_has_its_gradient_in_all_chunks() -> None:
    args = inputs(grad=True, queries=1100, keys=130, dim=32)
    block_mask = torch.rand(2, 1, 9, 2, generator=torch.Generator().manual_seed(SEED)) > 0.5
    block_mask[..., 0] = True
    bias = torch.zeros(4, 1100, 130, requires_grad=True)
    (got,) = torch.autograd.grad((OP(*args, bias, block_mask=block_mask) ** 2).sum(), bias)
    mask = bias.masked_fill(~reference.expand_blocks(block_mask, 1100, 130), -torch.inf)
    (expected,) = torch.autograd.grad((sdpa(*args[:3], mask=mask) ** 2).sum(), bias)
    assert (got - expected).norm() < 0.05 * expected.norm()


def test_keys_beyond_the_length_have_no_gradient_and_no_effect() -> None:
    args = inputs(grad=True)
    lengths = torch.tensor([100, 128], dtype=torch.int32)
    clean = OP(*args, None, lengths)
    with torch.no_grad():
        args[1][0, :, 100:] = torch.nan
        args[2][1, :, 128:] = torch.inf
    out = OP(*args, None, lengths)
    torch.testing.assert_close(out, clean, rtol=0, atol=0)
    out.sum().backward()
    assert all(x.grad is not None and x.grad.isfinite().all() for x in args[:3])
    assert args[1].grad is not None and not args[1].grad[0, :, 100:].any()


def test_compiles_whole_and_keeps_dynamic_shapes() -> None:
    compiled = torch.compile(lambda *args: OP(*args) * 2, backend="aot_eager", fullgraph=True, dynamic=True)
    for queries in (40, 33):
        args = inputs(queries=queries)
        torch.testing.assert_close(compiled(*args), OP(*args) * 2, rtol=0, atol=0)


def test_exports() -> None:
    class Site(torch.nn.Module):
        def forward(self, *args: Tensor) -> Tensor:
            return OP(*args)

    args = tuple(inputs())
    program = torch.export.export(Site(), args)
    assert any(node.target is OP for node in program.graph.nodes)
    torch.testing.assert_close(program.module()(*args), OP(*args), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("position", "change", "said"),
    [
        (0, lambda x: x[0], "q: expected 4 dimensions"),
        (0, lambda x: x[:, :3], "k: expected a number of heads that divides q's 3, got 2"),
        (1, lambda x: x[:1], "k: expected shape [2, 2, 150, 64], got [1, 2, 150, 64]"),
        (1, lambda x: x[..., :32], "k: expected shape [2, 2, 150, 64]"),
        (2, lambda x: x[:, :, :9], "v: expected shape [2, 2, 150, 64], got [2, 2, 9, 64]"),
        (2, lambda x: x.half(), "expected one floating-point type"),
        (3, lambda x: x[:1], "timestep: expected shape [2]"),
        (4, lambda x: x[:, :2], "q_scale: expected shape [1, 4], got [1, 2]"),
        (5, lambda x: x.expand(3, 2), "k_scale: expected shape [1, 2]"),
        (6, lambda x: x[..., 0], "v_scale: expected shape [1, 2, 64]"),
        (9, lambda x: x[:0], "modes: expected one mode per timestep bin"),
        (
            10,
            lambda _: torch.ones(3, 150, dtype=torch.bool),
            "mask: expected a shape that broadcasts to [2, 4, 40, 150]",
        ),
        (10, lambda _: torch.ones(1, 2, 4, 40, 150), "mask: expected a shape"),
        (10, lambda _: torch.ones(40, 150, dtype=torch.int32), "mask: expected bool or a floating-point type"),
        (11, lambda _: torch.ones(1, dtype=torch.int32), "key_lengths: expected shape [2]"),
        (12, lambda _: "NHBD", "layout: expected one of BHND, BNHD, got 'NHBD'"),
        (15, lambda _: "static", "scaling: expected one of calibrated, dynamic, got 'static'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_input_is_refused_with_a_reason(position: int, change, said: str) -> None:
    args = [*inputs(), None, None, "BHND", None, 1000.0, "calibrated", True]
    args[position] = change(args[position])
    with pytest.raises(ValueError, match=said.replace("[", r"\[").replace("]", r"\]")):
        OP(*args)


def sparse_options(index: bool = True) -> dict[str, Tensor]:
    """A block mask and rows of the keys for `inputs(queries=300, keys=400)`."""
    generator = torch.Generator().manual_seed(SEED)
    rows = torch.stack([torch.randperm(400, generator=generator)[:260] for _ in range(4)]).view(2, 2, 260).int()
    block_mask = torch.rand(1, 4, 3, 3 if index else 4, generator=generator) > 0.5
    block_mask[..., 1] = True
    return {"block_mask": block_mask} | ({"key_index": rows} if index else {})


@pytest.mark.parametrize(("op", "layout"), [("int8_attention", "BNHD"), ("int8_attention_lse", "BHND")])
def test_opcheck_of_block_masks_and_indices(op: str, layout: str) -> None:
    args = inputs(layout=layout, grad=True, queries=300, keys=400)
    torch.library.opcheck(getattr(torch.ops.trtconvert, op).default, (*args, None, None, layout), sparse_options())


@pytest.mark.parametrize("return_lse", [False, True])
def test_cpu_runs_the_reference_with_block_masks_and_indices(return_lse: bool) -> None:
    args = inputs(queries=300, keys=400)
    tables = reference.AttentionTables(*args[4:])
    got, expected = (
        attend(*args[:4], tables, return_lse=return_lse, **sparse_options())  # type: ignore[call-overload]
        for attend in (kernel.attention, reference.attention)
    )
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("layout", ["BHND", "BNHD"])
@pytest.mark.parametrize("lengths", [None, [260, 200]])
def test_gradients_through_blocks_and_indices_and_of_the_log_sum_exp(layout: str, lengths: list[int] | None) -> None:
    args = inputs(layout=layout, grad=True, queries=300, keys=400, dim=32)
    options = sparse_options()
    key_lengths = None if lengths is None else torch.tensor(lengths, dtype=torch.int32)
    tables = reference.AttentionTables(*args[4:])
    out, lse = kernel.attention(*args[:4], tables, layout=layout, key_lengths=key_lengths, return_lse=True, **options)
    q, k, v = (x if layout == "BHND" else x.transpose(1, 2) for x in args[:3])
    k, v = (x.repeat_interleave(2, 1) for x in reference.gather_keys(k, v, options["key_index"]))
    visible = reference.expand_blocks(options["block_mask"], 300, 260)
    if key_lengths is not None:
        visible = visible & (torch.arange(260) < key_lengths[:, None])[:, None, None]
    logits = (q @ k.transpose(2, 3) * 32**-0.5).masked_fill(~visible, -torch.inf)
    plain, plain_lse = logits.softmax(-1) @ v, logits.logsumexp(-1)
    plain = plain if layout == "BHND" else plain.transpose(1, 2)
    torch.testing.assert_close(lse, plain_lse, rtol=0, atol=0.1)
    generator = torch.Generator().manual_seed(SEED)
    weights, lse_weights = (torch.randn(x.shape, generator=generator) for x in (out, lse))
    got, expected = (
        torch.autograd.grad((a * weights).sum() + (b * lse_weights).sum(), args[:3])
        for a, b in ((out, lse), (plain, plain_lse))
    )
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=2e-5)


def test_the_gradient_of_many_queries_under_a_block_mask() -> None:
    """More queries than one chunk of the backward."""
    args = inputs(grad=True, queries=1100, keys=130, dim=32)
    block_mask = torch.rand(2, 1, 9, 2, generator=torch.Generator().manual_seed(SEED)) > 0.5
    block_mask[..., 0] = True
    got = torch.autograd.grad(OP(*args, block_mask=block_mask).sum(), args[:3])
    mask = reference.expand_blocks(block_mask, 1100, 130)
    expected = torch.autograd.grad(sdpa(*args[:3], mask=mask).sum(), args[:3])
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"block_mask": torch.ones(3, 4, dtype=torch.bool)},
            "block_mask: expected shape [1 or 2, 1 or 4, 3, 4], one entry",
        ),
        ({"block_mask": torch.ones(1, 2, 3, 4, dtype=torch.bool)}, "128 queries and 128 keys, got [1, 2, 3, 4]"),
        ({"block_mask": torch.ones(1, 1, 3, 4)}, "block_mask: expected bool, got torch.float32"),
        ({"block_mask": torch.eye(3, 4).bool()[None, None] & (torch.arange(4) != 1)}, "got none at [0, 0, 1]"),
        ({"key_index": torch.zeros(2, 4, 9, dtype=torch.int32)}, "key_index: expected shape [2, 2, 9], got [2, 4, 9]"),
        ({"key_index": torch.zeros(2, 2, 0, dtype=torch.int32)}, "key_index: expected shape [2, 2, K], K at least 1"),
        (
            {"key_index": torch.zeros(9, dtype=torch.int32)},
            "key_index: expected shape [2, 2, K], K at least 1, got [9]",
        ),
        ({"key_index": torch.zeros(2, 2, 9)}, "key_index: expected int32, got torch.float32"),
        ({"key_index": torch.full((2, 2, 9), 400)}, "key_index: expected rows of k, 0 to 399, got 400 to 400"),
        ({"key_index": torch.full((2, 2, 9), -1)}, "key_index: expected rows of k, 0 to 399, got -1 to -1"),
        (
            {
                "block_mask": torch.ones(1, 1, 3, 4, dtype=torch.bool),
                "key_index": torch.zeros(2, 2, 9, dtype=torch.int32),
            },
            "block_mask: expected shape [1 or 2, 1 or 4, 3, 1]",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_block_masks_and_indices_are_refused(change: dict[str, Tensor], said: str) -> None:
    args = inputs(queries=300, keys=400)
    with pytest.raises(ValueError, match=re.escape(said)):
        OP(*args, **change)


@pytest.mark.skipif(library_path() is None, reason="no kernel library is installed; 'pip install .' builds it")
def test_the_library_and_this_file_agree_on_the_struct() -> None:
    """The C API refuses a struct of another size, so a workspace query shows that the two declarations match."""
    params = AttentionParams(struct_size=ctypes.sizeof(AttentionParams), version=ATTENTION_VERSION)
    for name in ("batch", "num_heads", "num_kv_heads", "num_queries", "num_keys", "num_bins"):
        setattr(params, name, 1)
    params.head_dim, params.softmax_scale, params.timestep_max = 64, 0.125, 1000.0
    size, message = ctypes.c_size_t(), ctypes.create_string_buffer(256)
    assert kernel._library().trtconvert_attention_workspace_size(params, size, message, 256) == 0, message.value
    assert size.value >= 3 * 64
    params.head_dim = 60
    assert kernel._library().trtconvert_attention_workspace_size(params, size, message, 256) == 1
    assert b"head_dim" in message.value


@pytest.mark.skipif(library_path() is None, reason="no kernel library is installed; 'pip install .' builds it")
@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"norm_split": 77}, ""),
        ({"norm_split": -1}, "norm_split: expected 0, or a token after the first of num_queries (200), got -1"),
        ({"norm_split": 200}, "norm_split: expected 0, or a token after the first of num_queries (200), got 200"),
        ({"norm_split": 77, "norm_across_heads": 1}, "norm_split: expected 0 with norm_across_heads, got 77"),
        ({"norm_split": 77, "num_keys": 201}, "norm_split: expected as many queries as keys, got 200 and 201"),
        ({"token_split": 128}, ""),
        ({"token_split": 77}, "token_split: expected a multiple of 128 below num_queries (200), got 77"),
        ({"token_split": -128}, "token_split: expected a multiple of 128 below num_queries (200), got -128"),
        ({"token_split": 256}, "token_split: expected a multiple of 128 below num_queries (200), got 256"),
        (
            {"token_split": 128, "num_queries": 128, "num_keys": 128},
            "token_split: expected a multiple of 128 below num_queries (128), got 128",
        ),
        ({"token_split": 128, "num_keys": 201}, "token_split: expected as many queries as keys, got 200 and 201"),
    ],
    ids=str,
)
def test_two_parts_are_checked_without_a_gpu(fields: dict[str, int], said: str) -> None:
    params = AttentionParams(struct_size=ctypes.sizeof(AttentionParams), version=ATTENTION_VERSION)
    shape = {"batch": 1, "num_heads": 2, "num_kv_heads": 2, "num_queries": 200, "num_keys": 200, "num_bins": 1}
    for name, value in (shape | {"head_dim": 64} | fields).items():
        setattr(params, name, value)
    size, message = ctypes.c_size_t(), ctypes.create_string_buffer(256)
    status = kernel._library().trtconvert_attention_workspace_size(params, size, message, 256)
    assert (status, message.value.decode()) == ((1, said) if said else (0, ""))


@pytest.mark.skipif(library_path() is None, reason="no kernel library is installed; 'pip install .' builds it")
@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"block_mask_batch": 1, "block_mask_heads": 1}, ""),
        ({"block_mask_batch": 3, "block_mask_heads": 2}, ""),
        ({"source_keys": 150}, ""),
        ({"source_keys": 1, "block_mask_batch": 1, "block_mask_heads": 2}, ""),
        ({"block_mask_batch": 2, "block_mask_heads": 1}, "block_mask_batch: expected 0, 1 or batch (3), got 2"),
        ({"block_mask_batch": 1, "block_mask_heads": 3}, "block_mask_heads: expected 0, 1 or num_heads (2), got 3"),
        ({"block_mask_heads": 1}, "block_mask_heads: expected 0 with block_mask_batch 0 only, got 1 and 0"),
        ({"block_mask_batch": 1}, "block_mask_heads: expected 0 with block_mask_batch 0 only, got 0 and 1"),
        ({"source_keys": -1}, "source_keys: expected 0..1073741824, got -1"),
        ({"source_keys": 9, "norm_across_heads": 1}, "norm_across_heads: expected 0 with source_keys, got 1"),
        ({"source_keys": 9, "norm_split": 77}, "norm_split: expected 0 with source_keys, got 77"),
        ({"source_keys": 9, "token_split": 128}, "token_split: expected 0 with source_keys, got 128"),
    ],
    ids=str,
)
def test_block_masks_and_indices_are_checked_without_a_gpu(fields: dict[str, int], said: str) -> None:
    size, status, message = _workspace(fields)
    assert (status, message) == ((1, said) if said else (0, ""))
    assert said or size > 0


@pytest.mark.skipif(library_path() is None, reason="no kernel library is installed; 'pip install .' builds it")
def test_a_block_mask_takes_little_memory() -> None:
    """Four bytes per block and some per row, for every batch element and head with its own blocks."""
    long = {"num_queries": 1 << 17, "num_keys": 1 << 17}
    without, *_ = _workspace(long)
    shared, *_ = _workspace(long | {"block_mask_batch": 1, "block_mask_heads": 1})
    own, *_ = _workspace(long | {"block_mask_batch": 3, "block_mask_heads": 2})
    assert 3 * 4 * 1024 * 1024 <= shared - without < 3 * 4 * 1024 * 1024 + (1 << 17)
    assert 6 * 4 * 1024 * 1024 <= own - without < 6 * 4 * 1024 * 1024 + (1 << 17)


def _workspace(fields: dict[str, int]) -> tuple[int, int, str]:
    """Bytes, status and message of the query for batch 3, 2 heads, 200 tokens of 64 channels."""
    params = AttentionParams(struct_size=ctypes.sizeof(AttentionParams), version=ATTENTION_VERSION)
    shape = {"batch": 3, "num_heads": 2, "num_kv_heads": 2, "num_queries": 200, "num_keys": 200, "num_bins": 1}
    for name, value in (shape | {"head_dim": 64} | fields).items():
        setattr(params, name, value)
    size, message = ctypes.c_size_t(), ctypes.create_string_buffer(256)
    status = kernel._library().trtconvert_attention_workspace_size(params, size, message, 256)
    return size.value, status, message.value.decode()


@pytest.mark.skipif(library_path() is None, reason="no kernel library is installed; 'pip install .' builds it")
@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"block_mask": 64}, "block_mask: expected null with block_mask_batch 0"),
        ({"block_mask_batch": 1, "block_mask_heads": 1}, "block_mask: expected a device pointer, got null"),
        ({"key_index": 64}, "key_index: expected null with source_keys 0"),
        ({"source_keys": 300}, "key_index: expected a device pointer, got null"),
        ({"source_keys": 300, "key_index": 66}, "key_index: expected a pointer aligned to 4 bytes"),
        ({"source_keys": 300, "key_index": 64, "rotary": 64}, "rotary: expected null with source_keys"),
        ({"source_keys": 300, "key_index": 64, "q_norm": 64, "k_norm": 64}, "q_norm: expected null with source_keys"),
        ({"lse": 66}, "lse: expected a pointer aligned to 4 bytes"),
    ],
    ids=str,
)
def test_pointers_of_block_masks_and_indices_are_checked(fields: dict[str, int], said: str) -> None:
    params = AttentionParams(struct_size=ctypes.sizeof(AttentionParams), version=ATTENTION_VERSION)
    shape = {"batch": 3, "num_heads": 2, "num_kv_heads": 2, "num_queries": 200, "num_keys": 200, "num_bins": 1}
    tensors = dict.fromkeys(("q", "k", "v", "out", "timestep", *kernel._TABLES[1:], "modes", "workspace"), 256)
    for name, value in (shape | tensors | {"head_dim": 64, "softmax_scale": 0.1, "timestep_max": 1.0} | fields).items():
        setattr(params, name, value)
    message = ctypes.create_string_buffer(256)
    assert kernel._library().trtconvert_attention_run(params, message, 256) == 1
    assert message.value.decode().startswith(said)


@pytest.mark.skipif(library_path() is None, reason="no kernel library is installed; 'pip install .' builds it")
@pytest.mark.parametrize(
    ("fields", "named"),
    [
        (
            {"batch": 4837, "num_heads": 7913, "num_kv_heads": 7913, "num_keys": 7239103 * 128, "head_dim": 128},
            "num_keys",
        ),
        ({"num_heads": 65535, "num_kv_heads": 65535, "source_keys": 1 << 30}, "source_keys"),
        (
            dict.fromkeys(("batch", "num_heads", "block_mask_batch", "block_mask_heads"), 16384)
            | {"num_keys": 1 << 22, "num_queries": 1 << 10},
            "block_mask",
        ),
        ({"batch": 65535, "num_heads": 65535, "num_queries": 1 << 30, "head_dim": 256}, "num_queries"),
        ({"num_heads": 65535, "num_bins": 1 << 30}, "num_bins"),
        ({"num_heads": 65535, "num_queries": 1 << 20, "num_keys": 1 << 30}, ""),
    ],
)
def test_sizes_beyond_64_bits_are_refused_by_name(fields: dict[str, int], named: str) -> None:
    """The products once overflowed, so that a few megabytes passed as enough."""
    params = AttentionParams(struct_size=ctypes.sizeof(AttentionParams), version=ATTENTION_VERSION)
    shape = dict.fromkeys(("batch", "num_heads", "num_kv_heads", "num_queries", "num_keys", "num_bins"), 1)
    for name, value in (shape | {"head_dim": 64} | fields).items():
        setattr(params, name, value)
    size, message = ctypes.c_size_t(), ctypes.create_string_buffer(256)
    status = kernel._library().trtconvert_attention_workspace_size(params, size, message, 256)
    if named:
        assert status == 1 and message.value.decode().startswith(f"{named}: expected a tensor of at most 2^44 elements")
    else:
        assert status == 0 and size.value > 65535 * (1 << 20) * 64


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("layout", ["BHND", "BNHD"])
def test_opcheck_on_a_gpu(dtype: torch.dtype, layout: str) -> None:
    torch.library.opcheck(OP, (*inputs(layout=layout, dtype=dtype, device="cuda", grad=True), None, None, layout))


@pytest.mark.gpu
@pytest.mark.parametrize("mode", list(Mode))
def test_cuda_graphs_replay_with_new_inputs(mode: Mode) -> None:
    """A replay follows the data, including the timestep: launch and workspace do not depend on host values."""
    args = inputs(mode=mode, dtype=torch.float16, device="cuda")
    OP(*args)  # loads the kernels outside the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = OP(*args)
    fresh = [x.clone() for x in args]
    fresh[0] = torch.randn_like(fresh[0])
    fresh[3] = fresh[3].flip(0)
    for old, new in zip(args, fresh, strict=True):
        old.copy_(new)
    graph.replay()
    torch.testing.assert_close(out, OP(*fresh), rtol=0, atol=0)


@pytest.mark.gpu
def test_compiles_on_a_gpu() -> None:
    compiled = torch.compile(lambda *args: OP(*args) * 2, fullgraph=True, mode="reduce-overhead")
    args = inputs(dtype=torch.float16, device="cuda")
    for _ in range(3):
        torch.testing.assert_close(compiled(*args), OP(*args) * 2, rtol=0, atol=0)


@pytest.mark.gpu
def test_threads_and_streams_share_nothing() -> None:
    """8 threads with 4 streams each, against the same calls in sequence."""
    cases = [inputs(mode=mode, dtype=torch.float16, device="cuda", keys=500 + 128 * i) for i, mode in enumerate(Mode)]
    expected = [OP(*args) for args in cases]
    torch.cuda.synchronize()

    def work(_: int) -> bool:
        results = []
        for args in cases * 5:
            with torch.cuda.stream(torch.cuda.Stream()):
                results.append(OP(*args))
        torch.cuda.synchronize()
        return all(torch.equal(a, b) for a, b in zip(results, expected * 5, strict=True))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))


@pytest.mark.gpu
def test_misaligned_views_and_single_precision() -> None:
    args = inputs(dtype=torch.float16, device="cuda")
    expected = OP(*args)
    padded = torch.empty(2, 4, 40, 67, dtype=torch.float16, device="cuda")
    view = padded[..., 3:]
    view.copy_(args[0])
    torch.testing.assert_close(OP(view, *args[1:]), expected, rtol=0, atol=0)
    shifted = [torch.cat([x.new_zeros(1), x.flatten()])[1:].view_as(x) for x in args[4:9]]  # tables 4 bytes off
    torch.testing.assert_close(OP(*args[:4], *shifted, args[9]), expected, rtol=0, atol=0)
    with pytest.raises(ValueError, match="expected float16 or bfloat16 on a GPU"):
        OP(*(x.float() for x in args[:3]), *args[3:])
    with pytest.raises(ValueError, match="on q's device"):
        OP(args[0], args[1], args[2], args[3].cpu(), *args[4:])
