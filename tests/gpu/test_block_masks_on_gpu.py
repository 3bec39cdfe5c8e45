"""TensorRT engines with block masks: their numbers against the specification, and blocks that are not computed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import onnx_ir as ir
import pytest
import tiny_models
import tiny_sparse
import torch
from gpu_attention import QUANTISED
from gpu_engines import output_of_plan
from kernel_tables import table_where_masks_gain
from rich.console import Console
from tolerances import HALF_DENOISER, HALF_LAYERS
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from trtconvert import runtime
from trtconvert.attention.modes import Mode
from trtconvert.attention.reference import AttentionTables, tables_from_data
from trtconvert.bundle import TensorRecord, read_manifest
from trtconvert.cache import Cache
from trtconvert.diffusion_model import InputSpec
from trtconvert.engine import tensorrt
from trtconvert.export.lowering.native import lower_to_native
from trtconvert.export.lowering.plugin import lower_to_plugin
from trtconvert.export.nodes.attention import attention_nodes, block_mask_of
from trtconvert.export.trace import SiteOptions, trace
from trtconvert.models.denoiser import intercepted
from trtconvert.models.recorded_calls import relative_error
from trtconvert.pipeline import build as build_bundle
from trtconvert.progress import Reporter
from trtconvert.quant.forward import Int8Sites
from trtconvert.recipe import EngineSection, load_recipe

pytestmark = pytest.mark.gpu
pytest.importorskip("tensorrt_bindings", reason="needs TensorRT")

HEADS, WIDTH, TOKENS = 2, 64, 640
TIMESTEPS = (50.0, 350.0, 600.0, 950.0)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("sparse")
    sections = {
        "model": {"source": "tiny_sparse:build", "dtype": "float16"},
        "attention": {"modes": ["precision", "fp16", "balanced", "aggressive"], "sparse": 0.2},
        "layers": {"modes": "off"},
        "calibration": {"samples": 2, "batch": 2, "steps": 8, "bins": 4},
        "engine": {"backend": "tensorrt", "attention": "plugin"},
        "verify": {"samples": 2, "steps": 8, "min_psnr": 15, "min_site_sqnr": 5, "max_error": 0.05},
        "output": {"grid": 2},
        "plan": {"kernel_cost": str(table_where_masks_gain(folder / "cost.json", Mode))},
    }
    path = folder / "recipe.yaml"
    path.write_text(json.dumps(sections))
    build_bundle(load_recipe(path), folder / "bundle", Cache(folder / "cache"), Reporter(Console(quiet=True)))
    return folder / "bundle"


@pytest.mark.parametrize("batch", [1, 3])
def test_an_engine_computes_what_onnx_runtime_does(bundle, batch):
    assert all(site.sparse and min(site.density) < 0.8 for site in read_manifest(bundle).sites)
    x = tiny_sparse.build().example(3, {"batch": batch, "height": tiny_sparse.HEIGHT})["x"].half()
    with runtime.load(bundle, backend="tensorrt") as ours, runtime.load(bundle, backend="onnxruntime") as theirs:
        for first in range(len(TIMESTEPS)):  # the samples of a call are in other bins
            timestep = torch.tensor([TIMESTEPS[(first + i) % len(TIMESTEPS)] for i in range(batch)])
            got, expected = (run["denoiser"](x=x, timestep=timestep) for run in (ours, theirs))
            assert relative_error(got.cpu(), expected) < HALF_DENOISER


class Attention(nn.Module):
    """Attention of the thirds of its input, and nothing else."""

    def forward(self, x: Tensor, timestep: Tensor) -> Tensor:
        """x [B, 3 · HEADS, TOKENS, WIDTH] → [B, HEADS, TOKENS, WIDTH]."""
        return scaled_dot_product_attention(*x.chunk(3, 1))


@pytest.fixture(scope="module")
def attention():
    return replace(
        tiny_models.build(),
        denoiser=Attention().eval(),
        inputs=(
            InputSpec("x", "float32", ("batch", 3 * HEADS, TOKENS, WIDTH)),
            InputSpec("timestep", "float32", ("batch",)),
        ),
        output=InputSpec("prediction", "float32", ("batch", HEADS, TOKENS, WIDTH)),
        dims={"batch": (1, 1, 2)},
    )


def built(model: ir.Model, feed: dict[str, Tensor], dims: dict[str, tuple[int, int, int]]) -> bytes:
    """A plan of a lowered model whose inputs all have the dimension "batch" first."""
    inputs = [
        TensorRecord(name=name, dtype=str(x.dtype).removeprefix("torch."), shape=["batch", *x.shape[1:]])
        for name, x in feed.items()
    ]
    with Reporter(Console(quiet=True)).stage("engine") as bar:
        return tensorrt.build_lowered(tensorrt.load(), model, Path("m.onnx"), inputs, [dims], EngineSection(), bar)


@pytest.mark.parametrize("lower", [lower_to_plugin, lower_to_native])
@pytest.mark.parametrize("mode", list(Mode))
def test_blocks_that_are_left_out_are_not_computed(attention, mode, lower):
    """The keys and values of the second block are NaN (10 for TensorRT, which multiplies them by nothing), and
    only the first timestep bin does without them."""
    if lower is lower_to_native and mode is not Mode.FP16:
        pytest.skip("native attention has no modes")
    trt, blocks = tensorrt.load(), TOKENS // 128
    masks = torch.ones(2, HEADS, blocks, blocks, dtype=torch.bool)
    masks[0, :, :, 1] = False
    masks[0, 1, 2:] = torch.tensor([True, False, False, True, False])
    x = torch.randn(1, 3 * HEADS, TOKENS, WIDTH, generator=torch.Generator().manual_seed(0)).half().float()
    one = tables_from_data(*x.chunk(3, 1), mode)
    tables = {"denoiser": AttentionTables(**{name: x.repeat_interleave(2, 0) for name, x in vars(one).items()})}
    options = SiteOptions(1000.0, "dynamic", True)
    model = trace(attention, tables, options, dims=attention.dims, dtype=torch.float16, masks={"denoiser": masks})
    lower(model)
    feed = {"x": x.clone(), "timestep": torch.tensor([100.0])}
    feed["x"][:, HEADS:, 128:256] = torch.nan if lower is lower_to_plugin else 10.0
    feed["x"] = feed["x"].half()
    plan = built(model, feed, {"batch": (1, 1, 2)})
    on_gpu = {name: value.cuda() for name, value in feed.items()}
    got = output_of_plan(trt, plan, on_gpu)
    assert got.isfinite().all()
    sites = Int8Sites(tables, 1000.0, "dynamic", True, masks={"denoiser": masks})
    expected = intercepted(attention, sites.handler())(x, feed["timestep"])
    assert relative_error(got.cpu(), expected) < (QUANTISED[mode] if lower is lower_to_plugin else HALF_DENOISER)
    if mode in (Mode.FP16, Mode.PRECISION) and lower is lower_to_plugin:
        on_gpu["timestep"].fill_(900.0)
        assert output_of_plan(trt, plan, on_gpu).isnan().any()


@pytest.mark.parametrize("text_first", [True, False])
def test_text_and_image_in_tensors_of_their_own_keep_their_masks(text_first):
    """Packed projections, and tokens in two tensors, beside a mask that follows the timestep."""
    sizes = {"x": 512, "text": 128} if text_first else {"x": 128, "text": 512}
    shapes = {"x": ("batch", sizes["x"], 64), "timestep": ("batch",), "text": ("batch", sizes["text"], 64)}
    model = replace(
        tiny_models.build(),
        denoiser=tiny_models.Joint("slices", text_first).eval().requires_grad_(False),
        inputs=tuple(InputSpec(name, "float32", shape) for name, shape in shapes.items()),
        output=InputSpec("prediction", "float32", shapes["x"]),
    )
    inputs = model.example(1, {"batch": 2}) | {"timestep": torch.tensor([100.0, 900.0])}
    tables = {}

    def attend(call):
        one = tables_from_data(call.q, call.k, call.v, Mode.BALANCED)
        tables[call.name] = AttentionTables(**{name: x.repeat_interleave(2, 0) for name, x in vars(one).items()})
        return call.exact()

    intercepted(model, attend)(**inputs)
    masks = torch.rand(2, 2, 5, 5, generator=torch.Generator().manual_seed(0)) > 0.6
    masks = {site: masks | torch.eye(5, dtype=torch.bool) for site in tables}
    options = SiteOptions(1000.0, "dynamic", True)
    traced = trace(model, tables, options, dims=model.dims, dtype=torch.float16, masks=masks)
    lower_to_plugin(traced)
    (node,) = attention_nodes(traced).values()
    assert node.attributes.get_int("parts", 1) == 2 and block_mask_of(node) is not None
    feed = {name: x if name == "timestep" else x.half() for name, x in inputs.items()}
    got = output_of_plan(
        tensorrt.load(), built(traced, feed, {"batch": (1, 2, 4)}), {n: x.cuda() for n, x in feed.items()}
    )
    expected = intercepted(model, Int8Sites(tables, 1000.0, "dynamic", True, masks=masks).handler())(**inputs)
    dense = intercepted(model, Int8Sites(tables, 1000.0, "dynamic", True).handler())(**inputs)
    assert relative_error(got.cpu(), expected) < HALF_LAYERS < relative_error(dense, expected) / 3
