"""INT8 products of grouped scales on a GPU: Triton's kernels against what specifies them, and models that are loaded in INT8."""

from __future__ import annotations

import pytest
import torch
from grouped_products import SIZES, compare, tokens, weight
from support import run
from tolerances import ROUNDED_INPUT, SAME_FLOAT
from torch import nn
from torch.nn import functional as F

pytest.importorskip("triton", reason="needs Triton")

from trtconvert.linear import groups, products
from trtconvert.weights import Int8Linear, load_quantized

pytestmark = pytest.mark.gpu

GRANULARITIES = ["block", "channel"]
DTYPES = [torch.float16, torch.bfloat16, torch.float32]


def error(y: torch.Tensor, exact: torch.Tensor) -> float:
    return float((y.double() - exact.double()).norm() / exact.double().norm())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("size", [*SIZES, (300, 1024, 640), (1000, 4096, 392)], ids=str)
def test_kernels_are_what_specifies_them(size, granularity, dtype):
    """With the tiles that are the fastest of all that fit this GPU."""
    found = compare(size, dtype, granularity, None, "cuda")
    assert found["q"] == found["step"] == found["weight"] == 0
    assert max(found["product"], found["no bias"]) < SAME_FLOAT
    assert found["half"] < (SAME_FLOAT if dtype == torch.float32 else ROUNDED_INPUT[dtype])


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("few", [False, True], ids=["many", "few"])
def test_all_tiles_give_the_same(granularity, few):
    from trtconvert.linear import triton_kernels

    every = triton_kernels.FEW_ROWS if few else triton_kernels.MANY_ROWS
    size = (50, 520, 200) if few else (300, 520, 456)
    taken = 0
    for tiles in every:
        try:
            found = compare(size, torch.float16, granularity, tiles, "cuda")
        except triton_kernels.OutOfResources:
            continue
        taken += 1
        assert found["product"] < SAME_FLOAT, tiles
    assert taken


def test_nonfinite_values_stay_in_their_group():
    x = torch.ones(40, 256, device="cuda").half()
    x[0, 3], x[1, 200] = torch.nan, torch.inf
    stored = torch.ones(64, 256, dtype=torch.int8, device="cuda")
    for scale in (torch.ones(64, device="cuda"), torch.ones(1, 2, device="cuda")):
        rows = products.int8_linear(x, stored, scale, None).isnan().all(1)
        assert rows[:2].all() and not rows[2:].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("rows", [1, 16, 300])
def test_layers_by_whichever_is_faster(rows, granularity, dtype):
    """The library's kernel has a scale per token, Triton's one per group: both are near ŵ's own product."""
    x = torch.randn(2, rows, 512, device="cuda").to(dtype)
    stored, scale = weight(264, 512, granularity, "cuda")
    bias = torch.randn(264, device="cuda").to(dtype)
    y = products.int8_linear(x, stored, scale, bias)
    exact = F.linear(x.double(), products.dequantised(stored, scale, torch.float64), bias.double())
    assert y.shape == exact.shape and y.dtype == dtype
    assert error(y, exact) < 0.02
    recorded = torch.cuda.CUDAGraph()
    with torch.cuda.graph(recorded):
        again = products.int8_linear(x, stored, scale, bias)
    recorded.replay()
    assert torch.equal(again, y)
    assert products.int8_linear(x[:0], stored, scale, bias).shape == (0, rows, 264)


def test_sizes_that_were_not_measured_are_recorded_too():
    stored, scale = weight(136, 640, "block", "cuda")
    products.int8_linear(tokens(300, 640, torch.float16, "cuda"), stored, scale, None)  # compiles the kernels
    x = tokens(77, 640, torch.float16, "cuda")
    torch.cuda.synchronize()
    recorded = torch.cuda.CUDAGraph()
    with torch.cuda.graph(recorded):
        y = products.int8_linear(x, stored, scale, None)
    recorded.replay()
    wanted = groups.int8_gemm(*groups.act_quant(x), stored, scale, None, torch.float32)
    assert error(y, wanted) < ROUNDED_INPUT[torch.float16]


def test_layers_are_compiled_whole():
    x = tokens(300, 256, torch.float16, "cuda")
    stored, scale = weight(264, 256, "block", "cuda")
    compiled = torch.compile(products.int8_linear, fullgraph=True)
    y = compiled(x, stored, scale, None)
    assert error(y, products.int8_linear(x, stored, scale, None)) < ROUNDED_INPUT[torch.float16]


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_weights_that_are_traced_are_part_of_the_graph(granularity):
    """Exporters see tensors without numbers, which no kernel of Triton reads."""
    stored, scale = weight(264, 256, granularity, "cuda")
    layer = Int8Linear(stored, scale, None, torch.float16)
    x = tokens(300, 256, torch.float16, "cuda")
    wanted = x.float() @ products.dequantised(stored, scale, torch.float32).T
    with torch.no_grad():
        exported = torch.export.export(layer, (x,)).module()
        traced = torch.jit.trace(layer, (x,), check_trace=False)
        compiled = torch.compile(lambda x: x @ layer.weight.T, fullgraph=True)
        for computed in (exported, traced, compiled):
            assert error(computed(x), wanted) < ROUNDED_INPUT[torch.float16]


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_models_on_the_gpu_keep_half_their_memory(tmp_path, granularity):
    def made() -> nn.Module:
        return nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(1024, 1024), nn.GELU())])

    torch.manual_seed(0)
    model = made()
    (tmp_path / "m").mkdir()
    torch.save(model.state_dict(), tmp_path / "m" / "pytorch_model.bin")
    outcome = run("quantize", tmp_path / "m", "-o", tmp_path / "q", "--granularity", granularity)
    assert outcome.exit_code == 0, outcome.output
    x = torch.randn(300, 1024, device="cuda").half()
    with torch.no_grad():
        wanted = model.to("cuda")(x.float())
        before = torch.cuda.memory_allocated()
        with torch.device("meta"):
            fresh = made().half()
        load_quantized(fresh, tmp_path / "q").to("cuda")
        assert all(type(layer) is Int8Linear for layer in list(fresh)[::2])
        assert torch.cuda.memory_allocated() - before < 0.55 * 2 * 4 * 1024**2
        assert 0 < error(fresh(x), wanted) < 0.03
        assert fresh[0].weight.dtype == torch.float16
        batch = x[:2].clone().requires_grad_()
        with torch.enable_grad():
            fresh(batch).float().sum().backward()
        assert batch.grad is not None and batch.grad.isfinite().all()


@pytest.mark.parametrize(("granularity", "limit"), [("block", ROUNDED_INPUT[torch.float16]), ("channel", 0.02)])
def test_without_triton(monkeypatch, granularity, limit):
    """Blocks in the type of the tokens, channels by the library's kernel."""
    monkeypatch.setattr(products, "_triton", lambda: None)
    x = torch.randn(70, 256, device="cuda").half()
    stored, scale = weight(264, 256, granularity, "cuda")
    exact = F.linear(x.double(), products.dequantised(stored, scale, torch.float64))
    assert error(products.int8_linear(x, stored, scale, None), exact) < limit
