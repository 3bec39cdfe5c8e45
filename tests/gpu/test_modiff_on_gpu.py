"""Modulated layers on a GPU: Triton's kernels against what specifies them, whole models, CUDA graphs and torch.compile."""

from __future__ import annotations

import dataclasses
import sys

import pytest
import torch
from modiff_kernels import CASES, Case, compare
from support import REPOSITORY, WEIGHTS
from tolerances import SAME_FLOAT

pytest.importorskip("triton", reason="needs Triton")

from trtconvert.evaluate.metrics import decibels
from trtconvert.models.ddpm_unet import build
from trtconvert.models.digits import digits_model
from trtconvert.modiff import Settings, modulate
from trtconvert.modiff.reference import Geometry
from trtconvert.modiff.rounding import AdaRound
from trtconvert.modiff.workspace import Variant, Workspace

sys.path.append(str(REPOSITORY / "bench"))

from graphed import Graphed
from modiff_study import drawing_compiled

pytestmark = pytest.mark.gpu

LARGE = (
    Case((4, 32, 32), (128,), 128, Geometry((3, 3), (1, 1), (1, 1))),
    Case((3, 16, 16), (256, 128), 256, Geometry((3, 3), (1, 1), (1, 1)), symmetric=False),
    Case((4, 33, 33), (128,), 128, Geometry((3, 3), (2, 2), (0, 0)), bits=8),
    Case((5, 16, 16), (256,), 256),
)
DYNAMIC = Settings(scales="dynamic", granularity="sample", check_timesteps=False)


def unet() -> torch.nn.Module:
    torch.manual_seed(0)
    model = build(channels=64, multipliers=(1, 2), blocks=1, dropout=0.0).eval().requires_grad_(False)
    return model.cuda().to(memory_format=torch.channels_last)


def steps(count: int, dtype: torch.dtype = torch.float32) -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(1)
    clean, noise = (torch.randn(3, 3, 16, 16, device="cuda") for _ in range(2))
    shares = torch.linspace(0.9, 0.1, count).tolist()
    return [((clean * (1 - s) + noise * s).to(dtype), torch.full((3,), 1000 * s, device="cuda")) for s in shares]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("case", [*CASES, *LARGE], ids=str)
def test_kernels_are_what_specifies_them(case, dtype):
    """With the tiles that are the fastest of all that fit this GPU; caches have the input's type."""
    for spoilt in (False, True):
        found = compare(case, dtype, None, "cuda", spoilt)
        assert found["codes"] == found["rows"] == found["a_hat"] == found["nan"] == 0 and found["spoilt"] == spoilt
        assert max(found["y"], found["measured"]) < SAME_FLOAT
        assert found["o_hat"] < {torch.float32: SAME_FLOAT, torch.float16: 5e-5, torch.bfloat16: 4e-4}[dtype]  # ties


@pytest.mark.parametrize("index", range(10))
def test_all_tiles_give_the_same(index):
    from trtconvert.modiff import triton_kernels

    for case in LARGE[:2]:
        found = compare(case, torch.float16, triton_kernels.TILES[index], "cuda")
        assert found["y"] < SAME_FLOAT


def error(y: torch.Tensor, exact: torch.Tensor) -> float:
    return float((y.cpu() - exact.cpu()).norm() / exact.cpu().norm())


@pytest.mark.parametrize("bits", [(8, 8), (8, 4), (4, 8)], ids=str)
def test_models_give_what_they_give_on_the_cpu(bits):
    """Another rounding in a layer moves all later layers: two correct results differ by the error of quantisation."""
    settings = dataclasses.replace(DYNAMIC, weight_bits=bits[0], activation_bits=bits[1])
    there, here, exact = modulate(unet(), settings), modulate(unet().cpu(), settings), unet().cpu()
    for x, t in steps(6):
        y, wanted, full = there(x, t), here(x.cpu(), t.cpu()), exact(x.cpu(), t.cpu())
        assert error(y, full) < 1.2 * error(wanted, full) and error(y, wanted) < 1.5 * error(wanted, full)


def test_steps_are_recorded_in_cuda_graphs():
    """One graph serves the first step and all others, and begins anew after a reset."""
    found, wanted = (modulate(unet().half(), DYNAMIC) for _ in range(2))
    calls = steps(6, torch.float16)
    x, t = calls[0][0].clone(), calls[0][1].clone()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):  # makes caches, compiles the kernels and measures their tiles
            found(x, t)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = found(x, t)
    for _ in range(2):
        found.reset_cache()
        wanted.reset_cache()
        for own_x, own_t in calls:
            x.copy_(own_x)
            t.copy_(own_t)
            graph.replay()
            assert torch.equal(y, wanted(own_x, own_t))


def test_compiled_models_compute_the_same():
    torch._dynamo.reset()
    found, wanted = (modulate(unet(), dataclasses.replace(DYNAMIC, granularity="tensor")) for _ in range(2))
    compiled, exact = torch.compile(found), unet()
    for _ in range(2):
        for x, t in steps(4):
            y, eager, full = compiled(x, t), wanted(x, t), exact(x, t)
            assert error(y, full) < 1.2 * error(eager, full) and error(y, eager) < 1.5 * error(eager, full)
        found.reset_cache()
        wanted.reset_cache()


@pytest.mark.parametrize("modulated", [True, False])
def test_recorded_calls_are_the_denoisers(modulated):
    """Two sizes in turns, and after each reset."""
    found, wanted = (modulate(unet(), DYNAMIC) if modulated else unet() for _ in range(2))
    recorded = Graphed(found)
    for count in (3, 2, 3):
        if modulated:
            found.reset_cache()
            wanted.reset_cache()
        for x, t in steps(5):
            assert torch.equal(recorded(x[:count], t[:count]), wanted(x[:count], t[:count]))


def test_samples_drawn_compiled_are_those_drawn_eager(tmp_path):
    """Samples of the shipped model in two batches, the second smaller; the sampler works on the GPU."""
    workspace = Workspace(
        digits_model(WEIGHTS), "cuda", torch.float32, 6, "ddim", 4, 4, AdaRound(iterations=0), tmp_path
    )
    for method in ("full", "lcq-modiff"):
        model = workspace.prepared(Variant(method) if method != "full" else workspace.full)
        eager, fast = workspace.drawing(model)(range(6)), drawing_compiled(workspace, model)(range(6))
        assert eager.device.type == "cpu" and float(decibels((eager - fast).square().mean())) > 40


def test_nothing_waits_for_the_gpu():
    found = modulate(unet().half(), DYNAMIC)
    calls = steps(4, torch.float16)
    for x, t in calls[:2]:
        found(x, t)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for x, t in calls[2:]:
            found(x, t)
    finally:
        torch.cuda.set_sync_debug_mode("default")
