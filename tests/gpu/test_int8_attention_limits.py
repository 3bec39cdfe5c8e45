"""The attention operator on a GPU at its limits: extreme inputs, memory, graphs, threads, and parameters that are refused."""

from __future__ import annotations

import ctypes
import threading

import pytest
import torch
from gpu_attention import SAME_ARITHMETIC, TABLES, attend, draw
from torch import Tensor

from trtconvert.attention import kernel, reference
from trtconvert.attention.modes import Mode
from trtconvert.c_structs import ATTENTION_VERSION, AttentionParams, Strides

pytestmark = pytest.mark.gpu


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


def parameters() -> AttentionParams:
    """Parameters that check() accepts. Their pointers are valid memory that is never used: nothing is launched."""
    memory = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
    params = AttentionParams(struct_size=ctypes.sizeof(AttentionParams), version=ATTENTION_VERSION)
    params.batch, params.num_heads, params.num_kv_heads = 1, 4, 2
    params.num_queries, params.num_keys, params.head_dim, params.num_bins = 256, 256, 64, 1
    params.softmax_scale, params.timestep_max = 0.125, 1000.0
    pointers = ("q", "k", "v", "out", *kernel._TABLES, "modes", "workspace")
    for i, name in enumerate(pointers):
        setattr(params, name, memory.data_ptr() + i * (1 << 20))
    params.workspace_size = 32 << 20
    for name in ("q", "k", "v", "out"):
        setattr(params, f"{name}_strides", Strides(batch=65536, token=64, head=16384))
    params.memory = memory
    return params


def check_status(params: AttentionParams) -> tuple[int, str]:
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
