"""`Int8Attention` and replaced pipelines on a GPU: what the CPU computes, in CUDA graphs and torch.compile, and nothing waits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import tiny_pipelines
import torch
from gpu_attention import SAME_ARITHMETIC, draw
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from trtconvert.attention import (
    Int8Attention,
    attention_report,
    neighbourhood_mask,
    replace_attention_with_int8,
    restore_attention,
)
from trtconvert.attention.modes import Mode
from trtconvert.errors import UserError
from trtconvert.models.recorded_calls import relative_error as error

pytestmark = pytest.mark.gpu

H, N, D = 4, 1000, 64
NAMES = ("fp16", "precision", "balanced", "aggressive", "fp8")


def tensors(dtype: torch.dtype = torch.float16, batch: int = 2, tokens: int = N, dim: int = D) -> list[Tensor]:
    return list(draw("k-bias", batch, H, H, tokens, tokens, dim, dtype))


@contextmanager
def nothing_waits() -> Iterator[None]:
    """An error where the host waits for the device."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "pruned": {"enable_pruning": True, "pruning_ratio": 0.3},
    "pruned by schedule": {"enable_pruning": True, "pruning_ratio": (0, 0.5)},
    "windows": {"attention_type": "block_sparse", "window_size": 200, "sink_tokens": 8},
    "neighbours": {"attention_type": "block_sparse", "window_size": (5, 9), "grid": (25, 40)},
    "eps": {"softmax_eps": 1e-3},
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("calibrated", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_a_module_agrees_with_the_cpu(name: str, calibrated: bool, dtype: torch.dtype) -> None:
    q, k, v = tensors(dtype, tokens=300)
    timestep = torch.tensor([50.0, 940.0])
    attention = Int8Attention(H, D, precision_mode=name)
    if calibrated:
        attention.calibrate([(q.cpu(), k.cpu(), v.cpu(), 500)])
    expected = attention(q.float().cpu(), k.float().cpu(), v.float().cpu(), timestep)
    found = attention.cuda()(q, k, v, timestep.cuda())
    assert found.dtype == dtype
    mode = Mode[name.upper()]
    # GPUs without a kernel for FP8 compute a closer mode in its place.
    limit = 0.06 if mode == Mode.FP8 else SAME_ARITHMETIC[mode] + (5e-3 if dtype == torch.bfloat16 else 0)
    assert error(found.cpu(), expected) < limit


@pytest.mark.parametrize("options", list(OPTIONS))
def test_options_compute_what_the_cpu_does(options: str) -> None:
    q, k, v = tensors()
    attention = Int8Attention(H, D, precision_mode="precision", **OPTIONS[options])
    expected = attention(q.float().cpu(), k.float().cpu(), v.float().cpu(), torch.tensor([50.0, 940.0]))
    found = attention.cuda()(q, k, v, torch.tensor([50.0, 940.0], device="cuda"))
    # Keys of nearly the same importance may be kept or dropped as FP16 rounds it.
    assert error(found.cpu(), expected) < (3e-2 if "pruned" in options else 3e-3)


@pytest.mark.parametrize("calibrated", [False, True])
@pytest.mark.parametrize("options", list(OPTIONS))
def test_nothing_waits_and_graphs_replay(options: str, calibrated: bool) -> None:
    q, k, v = tensors()
    timestep = torch.tensor([50.0, 940.0], device="cuda")
    attention = Int8Attention(H, D, **OPTIONS[options]).cuda()
    if calibrated:
        attention.calibrate([(q, k, v, timestep)])
    attention(q, k, v, timestep)
    with nothing_waits():
        attention(q, k, v, timestep)
        attention(q, k, v, 500)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention(q, k, v, timestep)
    timestep.copy_(timestep.flip(0))
    q.copy_(torch.randn_like(q))
    graph.replay()
    torch.testing.assert_close(out, attention(q, k, v, timestep), rtol=0, atol=0)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("options", list(OPTIONS))
@pytest.mark.parametrize("how", ["default", "reduce-overhead"])
def test_a_module_compiles_on_a_gpu(options: str, how: str) -> None:
    q, k, v = tensors()
    attention = Int8Attention(H, D, **OPTIONS[options]).cuda()
    torch._dynamo.reset()
    compiled = torch.compile(attention, fullgraph=True, mode=how)
    for first in (10.0, 600.0, 990.0):
        timestep = torch.tensor([first, 500.0], device="cuda")
        # Reductions in another order move a scale by its last bit, and importance likewise.
        limit = 3e-2 if "pruned" in options else 2e-3
        assert error(compiled(q, k, v, timestep), attention(q, k, v, timestep)) < limit


@pytest.mark.parametrize("tokens", [1024, 1000])
def test_fused_guidance_is_two_calls(tokens: int) -> None:
    q, k, v = tensors(tokens=tokens)
    other = torch.randn_like(q)
    attention = Int8Attention(H, D, precision_mode="precision", enable_cfg_fusion=True).cuda()
    with nothing_waits():
        cond, uncond = attention.fused_cfg(q, other, k, v, 500, 7.5)
    assert error(cond, attention(q, k, v, 500)) < 1e-3
    assert error(uncond, attention(other, k, v, 500)) < 1e-3


def test_single_precision_and_other_devices_are_refused() -> None:
    q, k, v = tensors()
    attention = Int8Attention(H, D).cuda()
    with pytest.raises(UserError, match="float16 or bfloat16"):
        attention(q.float(), k.float(), v.float(), 500)
    with pytest.raises(UserError, match="one device"):
        attention(q, k.cpu(), v, 500)
    with pytest.raises(UserError, match="one device"):
        Int8Attention(H, D)(q, k, v, 500)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_backward_needs_no_square_of_memory(dtype: torch.dtype) -> None:
    """FlashAttention's, of the same gradients; 4,096² weights of 4 heads in 16 bits alone would be 128 MiB."""
    q, k, v = (x.requires_grad_() for x in tensors(dtype, batch=1, tokens=4096))
    gradient = torch.randn_like(q)
    attention = Int8Attention(H, D, precision_mode="precision").cuda()
    out = attention(q, k, v, 500)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = torch.autograd.grad(out, (q, k, v), gradient)
    assert torch.cuda.max_memory_allocated() - before < 64 * 2**20
    wide = [x.detach().float().requires_grad_() for x in (q, k, v)]
    expected = torch.autograd.grad(scaled_dot_product_attention(*wide), wide, gradient.float())  # type: ignore[arg-type]
    narrow = [x.detach().requires_grad_() for x in (q, k, v)]
    exact16 = torch.autograd.grad(scaled_dot_product_attention(*narrow), narrow, gradient)  # type: ignore[arg-type]
    for a, b, c in zip(found, expected, exact16, strict=True):
        assert error(a, b) < 1.05 * error(c, b) + 1e-3  # as close as attention in that type is


def test_131072_tokens_in_windows() -> None:
    """Dense, this takes the square of the tokens; a mask of every pair would take 16 GiB."""
    tokens = 131_072
    q, k, v = (torch.randn(1, 2, tokens, 64, device="cuda", dtype=torch.float16) for _ in range(3))
    sparse = Int8Attention(2, 64, precision_mode="precision", attention_type="block_sparse", window_size=512).cuda()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = sparse(q, k, v, 500)
    assert torch.cuda.max_memory_allocated() - before < 2**30
    middle = slice(65_536, 65_536 + 128)  # one block of queries sees the whole blocks around it
    around = slice(65_536 - 256, 65_536 + 128 + 256)
    expected = scaled_dot_product_attention(q[:, :, middle], k[:, :, around], v[:, :, around])
    assert error(out[:, :, middle], expected) < 0.05
    video = neighbourhood_mask((32, 64, 64), (5, 9, 9)).cuda()
    dense = Int8Attention(2, 64, precision_mode="precision").cuda()
    assert dense(q, k, v, 500, block_mask=video).isfinite().all()


# Pipelines ------------------------------------------------------------------------------------------------------------


def latents(pipe: Any, name: str) -> Tensor:
    pipe.set_progress_bar_config(disable=True)
    like = torch.empty(0, dtype=torch.float16, device="cuda")
    given = tiny_pipelines.arguments(pipe, name, like=like)
    return pipe(**given | {"num_inference_steps": 2, "output_type": "latent"})[0].float().cpu()


@pytest.mark.parametrize(
    "name", ["stable_diffusion", "stable_diffusion_xl", "stable_diffusion_3", "flux", "pixart", "wan"]
)
def test_pipelines_draw_on_a_gpu(name: str) -> None:
    pipe = tiny_pipelines.PIPELINES[name][0]().to("cuda", torch.float16)
    exact = latents(pipe, name)
    replace_attention_with_int8(pipe)
    found = latents(pipe, name)
    assert not attention_report(pipe).exceptions
    assert 1e-5 < error(found, exact) < 0.1
    restore_attention(pipe)
    assert error(latents(pipe, name), exact) < 1e-3


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("offload", ["enable_model_cpu_offload", "enable_sequential_cpu_offload"])
def test_models_may_be_offloaded(offload: str, first: bool) -> None:
    name = "stable_diffusion"
    pipe = tiny_pipelines.PIPELINES[name][0]().to(torch.float16)
    if first:
        replace_attention_with_int8(pipe)
    getattr(pipe, offload)()
    if not first:
        replace_attention_with_int8(pipe)
    found = latents(pipe, name)
    assert len(attention_report(pipe).replaced) == 8 and not attention_report(pipe).exceptions
    assert error(latents(pipe, name), found) < 1e-2  # hooks are put on anew for each image
    restore_attention(pipe)
    exact = latents(pipe, name)
    assert 1e-5 < error(found, exact) < 0.1


@pytest.mark.slow
@pytest.mark.first_case
@pytest.mark.parametrize("first", [True, False])
def test_compiled_pipelines_draw_on_a_gpu(first: bool) -> None:
    name = "pixart"
    pipe = tiny_pipelines.PIPELINES[name][0]().to("cuda", torch.float16)
    exact = latents(pipe, name)
    torch._dynamo.reset()
    if first:
        replace_attention_with_int8(pipe, precision_mode="auto")
    pipe.transformer = torch.compile(pipe.transformer, fullgraph=True)
    if not first:
        replace_attention_with_int8(pipe, precision_mode="auto")
    assert 1e-5 < error(latents(pipe, name), exact) < 0.1
