"""Attention over two processes with gloo, against one process with all tokens."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tolerances
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from trtconvert.attention import Int8Attention, SequenceParallelAttention
from trtconvert.attention.sequence_parallel import merged
from trtconvert.errors import UserError
from trtconvert.models.recorded_calls import relative_error as error

PROCESSES = 2
B, H, N, D = 2, 4, 256, 32


def tensors(kv_heads: int = H) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(B, heads, N, D, generator=generator) for heads in (H, kv_heads, kv_heads))
    return [q, k + 2 * torch.randn(1, kv_heads, 1, D, generator=generator), v]


def work(rank: int, place: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{place}/meet", rank=rank, world_size=PROCESSES)
    results: dict[str, Any] = {}
    try:
        for kv_heads in (H, 2):
            q, k, v = tensors(kv_heads)
            own = [x.chunk(PROCESSES, 2)[rank] for x in (q, k, v)]
            for calibrated in (False, True):
                for mode in ("fp16", "precision", "aggressive"):
                    attention = Int8Attention(H, D, num_kv_heads=kv_heads, precision_mode=mode)
                    if calibrated:
                        attention.calibrate([(q, k, v, 500)])
                    for method in ("ulysses", "ring"):
                        made = SequenceParallelAttention(attention, method)
                        name = f"{method} {mode} {kv_heads} {calibrated}"
                        results[name] = made(*own, torch.tensor([500.0, 900.0]))
        q, k, v = tensors()
        made = SequenceParallelAttention(Int8Attention(H, D), "ulysses")
        results["group of one"] = SequenceParallelAttention(Int8Attention(H, D), "ring", dist.new_subgroups(1)[0])(
            q, k, v, 500
        )
        # A process that refuses its arguments does not block the others.
        for step, name in ((5 + 5000 * rank, "a timestep of one"), (5, "none")):
            try:
                results[name] = made(q, k, v, step)
            except UserError as refusal:
                results[name] = str(refusal)
        results["unchecked"] = SequenceParallelAttention(Int8Attention(H, D), check_shapes=False)(q, k, v, 5 + rank)
        for name, call in refusals(rank, made, q, k, v).items():
            try:
                call()
                results[name] = "nothing"
            except UserError as refusal:
                results[name] = str(refusal)
    finally:
        torch.save(results, f"{place}/{rank}.pt")
        dist.destroy_process_group()


def refusals(
    rank: int, made: SequenceParallelAttention, q: Tensor, k: Tensor, v: Tensor
) -> dict[str, Callable[[], Any]]:
    """Calls that every process refuses, by a part of the message."""
    part = q[:, :, : 100 + rank], k[:, :, :100], v[:, :, :100]
    many = q.repeat(6, 1, 1, 1), k.repeat(6, 1, 1, 1), v.repeat(6, 1, 1, 1)
    steps = torch.arange(12.0)
    steps[10] += rank
    return {
        "the tokens of the processes": lambda: made(*part, 5),
        "[5, 5] on rank 0; [6, 6] on rank 1": lambda: made(q, k, v, 5 + rank),
        "[5, 9] on rank 0; [5, 9.5] on rank 1": lambda: made(q, k, v, torch.tensor([5, 9 + rank / 2])),
        "[0, 1, 2, 3, 4, 5, 6, 7, …] with the sum": lambda: made(*many, steps),
        "one shape": lambda: made(q, k, v[:, :, :9], 5),
        "the number of heads": lambda: SequenceParallelAttention(Int8Attention(3, D)),
        "a multiple of 2 processes": lambda: SequenceParallelAttention(Int8Attention(H, D, num_kv_heads=1)),
        "ulysses or ring": lambda: SequenceParallelAttention(Int8Attention(H, D), "star"),
        "without pruning": lambda: SequenceParallelAttention(Int8Attention(H, D, enable_pruning=True)),
        "softmax_eps": lambda: SequenceParallelAttention(Int8Attention(H, D, softmax_eps=1.0), "ring"),
        "requires_grad": lambda: made(q.clone().requires_grad_(), k, v, 5),
    }


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    """The results of each process."""
    with tempfile.TemporaryDirectory() as place:
        # One process imports torch and forks the others.
        mp.get_context("forkserver").set_forkserver_preload(["torch._dynamo", "trtconvert.attention"])
        mp.start_processes(work, (place,), PROCESSES, start_method="forkserver")
        return [torch.load(Path(place) / f"{rank}.pt") for rank in range(PROCESSES)]


@pytest.mark.parametrize("kv_heads", [H, 2])
@pytest.mark.parametrize("calibrated", [False, True])
@pytest.mark.parametrize("mode", ["fp16", "precision", "aggressive"])
@pytest.mark.parametrize("method", ["ulysses", "ring"])
def test_two_processes_compute_what_one_does(results, method: str, mode: str, calibrated: bool, kv_heads: int) -> None:
    q, k, v = tensors(kv_heads)
    attention = Int8Attention(H, D, num_kv_heads=kv_heads, precision_mode=mode)
    if calibrated:
        attention.calibrate([(q, k, v, 500)])
    single = attention(q, k, v, torch.tensor([500.0, 900.0]))
    found = torch.cat([result[f"{method} {mode} {kv_heads} {calibrated}"] for result in results], 2)
    exact = scaled_dot_product_attention(q, k, v, enable_gqa=True)
    if method == "ulysses" or mode == "fp16" or (calibrated and mode == "precision"):
        assert error(found, single) < tolerances.SAME_ARITHMETIC
    # In a ring, each part has its own measured scales, and its own rounding of weights.
    assert error(found, exact) < 1.1 * error(single, exact) + tolerances.SAME_FLOAT


def test_one_process_is_a_ring_too(results) -> None:
    assert torch.equal(results[0]["group of one"], Int8Attention(H, D)(*tensors(), 500))


@pytest.mark.parametrize("said", [*refusals(0, None, *tensors())])  # type: ignore[arg-type]
def test_every_process_refuses_mismatched_inputs(results, said: str) -> None:
    for result in results:
        assert said in result[said] and "remedy" in result[said]


def test_refusal_by_one_process_keeps_none_waiting(results) -> None:
    assert "0 to 1000" in results[1]["a timestep of one"] and "5005" in results[1]["a timestep of one"]
    assert "invalid ones on rank 1" in results[0]["a timestep of one"] and "remedy" in results[0]["a timestep of one"]
    assert all(isinstance(result[name], Tensor) for result in results for name in ("none", "unchecked"))


def test_without_processes_there_is_a_reason() -> None:
    with pytest.raises(UserError, match="init_process_group"):
        SequenceParallelAttention(Int8Attention(H, D))


def test_parts_are_merged_by_their_sums() -> None:
    q, k, v = (x.double() for x in tensors())
    logits = q @ k.transpose(2, 3) * D**-0.5
    out, lse = torch.zeros(B, H, N, D), None
    for part in torch.arange(N).split([1, 100, 155]):
        some = logits[..., part]
        out, lse = merged(out, lse, (some.softmax(-1) @ v[:, :, part]).float(), some.logsumexp(-1).float())
    assert error(out, scaled_dot_product_attention(q, k, v)) < tolerances.SAME_FLOAT
    assert lse is not None and error(lse, logits.logsumexp(-1)) < tolerances.SAME_FLOAT


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < PROCESSES, reason="needs two GPUs")
@pytest.mark.parametrize("method", ["ulysses", "ring"])
def test_two_gpus_compute_what_one_does(method: str, tmp_path) -> None:
    mp.spawn(work_on_gpu, (str(tmp_path), method), PROCESSES)
    found = torch.cat([torch.load(tmp_path / f"{rank}.pt") for rank in range(PROCESSES)], 2)
    q, k, v = (x.half().cuda() for x in tensors())
    single = Int8Attention(H, D, precision_mode="precision").cuda()(q, k, v, 500)
    assert error(found, single.cpu()) < 2e-2
    assert error(found, scaled_dot_product_attention(q, k, v).cpu()) < tolerances.MODE_ERROR[1]


def work_on_gpu(rank: int, place: str, method: str) -> None:
    os.environ["NCCL_NVLS_ENABLE"] = "0"
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{place}/meet", rank=rank, world_size=PROCESSES)
    try:
        own = [x.half().cuda().chunk(PROCESSES, 2)[rank].contiguous() for x in tensors()]
        made = SequenceParallelAttention(Int8Attention(H, D, precision_mode="precision").cuda(), method)
        torch.save(made(*own, 500).cpu(), f"{place}/{rank}.pt")
    finally:
        dist.destroy_process_group()
