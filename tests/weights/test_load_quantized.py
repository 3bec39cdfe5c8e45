"""Models in memory with weights in INT8, and recipes that read the same folders."""

from __future__ import annotations

import copy
import json
import warnings

import onnxruntime
import pytest
import tiny_pipelines
import torch
from safetensors import safe_open
from safetensors.torch import load, save_file
from support import run
from torch import nn

from trtconvert.errors import UserError
from trtconvert.linear.products import MOST_FEW_ROWS
from trtconvert.models.loading import load_pipeline
from trtconvert.models.saved import with_dtype
from trtconvert.recipe import ModelSection
from trtconvert.weights import Int8Linear, load_quantized
from trtconvert.weights.blocks import dequantise, measure, quantise, scales


class Tied(nn.Module):
    """Layers of every kind, a module with two names, and two modules that share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(130, 200)
        self.again = self.first
        self.shared = nn.Linear(130, 200, bias=False)
        self.sharing = nn.Linear(130, 200, bias=False)
        self.sharing.weight = self.shared.weight
        self.conv = nn.Conv1d(200, 32, 3)
        self.norm = nn.LayerNorm(200)
        self.register_buffer("table", torch.arange(3.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.first(x) + self.again(x) + self.shared(x) - 0.5 * self.sharing(x))
        return self.conv(y.mT) * self.table.sum()


def quantised(model, folder, *options):
    """The model's folder after `trtconvert quantize`."""
    folder.mkdir()
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    outcome = run("quantize", folder, "-o", folder.with_name(f"{folder.name}-int8"), *options)
    assert outcome.exit_code == 0, outcome.output
    return folder.with_name(f"{folder.name}-int8")


@pytest.mark.parametrize("granularity", ["block", "channel"])
@pytest.mark.parametrize("empty", [False, True], ids=["filled", "meta"])
def test_layers_keep_int8(tmp_path, granularity, empty):
    torch.manual_seed(0)
    model = Tied()
    folder = quantised(model, tmp_path / "m", "--granularity", granularity)
    with torch.device("meta" if empty else "cpu"):
        fresh = Tied()
    assert load_quantized(fresh, folder) is fresh
    assert isinstance(fresh.first, Int8Linear) and fresh.again is fresh.first
    assert fresh.first.stored.dtype == torch.int8
    assert type(fresh.shared) is nn.Linear and fresh.sharing.weight is fresh.shared.weight
    assert {p.dtype for p in fresh.parameters()} == {torch.float32}
    x = torch.randn(MOST_FEW_ROWS + 1, 130)
    with torch.no_grad():
        wanted, got = model(x[None]), fresh(x[None])
    assert 0 < float((got - wanted).norm() / wanted.norm()) < 0.03
    exact = nn.functional.linear(x, fresh.first.weight, fresh.first.bias)
    assert 0 < float((fresh.first(x) - exact).norm() / exact.norm()) < 0.02  # of tokens in INT8
    few = nn.functional.linear(x[:-1], fresh.first.weight, fresh.first.bias)
    assert torch.equal(fresh.first(x[:-1]), few)  # as modulations have, which stay as they are
    with torch.enable_grad():  # where x takes gradients, ŵ is all that differs
        assert torch.equal(fresh.first(x.clone().requires_grad_()), exact)
    assert "Int8Linear(in_features=130, out_features=200" in repr(fresh)
    batch = x[None].requires_grad_()
    fresh(batch).square().sum().backward()  # gradients of inputs, as some guidance takes them
    assert batch.grad is not None and float(batch.grad.norm()) > 0


def test_scales_stay_what_they_are_in_other_types(tmp_path):
    x = torch.randn(200, 130)
    stored, _ = quantise(x, scale := scales(measure(x), "block"))
    layer = Int8Linear(stored, scale, nn.Parameter(torch.zeros(200)), torch.float32).to(torch.bfloat16)
    assert torch.equal(layer.scale, scale) and layer.bias is not None and layer.bias.dtype == torch.bfloat16
    assert torch.equal(layer.weight, dequantise(stored, scale, torch.bfloat16))
    assert layer(torch.ones(2, 130, dtype=torch.bfloat16)).dtype == torch.bfloat16
    again = copy.deepcopy(layer)
    again.load_state_dict(layer.state_dict())
    assert torch.equal(again.scale, scale)


def layer_of(granularity: str, *, learns: bool = False) -> Int8Linear:
    x = torch.randn(200, 130, generator=torch.Generator().manual_seed(0))
    stored, _ = quantise(x, scale := scales(measure(x), granularity))
    bias = nn.Parameter(torch.arange(200) / 200, requires_grad=learns)
    return Int8Linear(stored, scale, bias, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_layers_in_fp32_of_models_in_16_bits_take_gradients(dtype):
    """Some models keep modulations in FP32, see `_keep_in_fp32_modules` of diffusers."""
    layer = layer_of("block")
    x = torch.randn(MOST_FEW_ROWS + 1, 130, dtype=dtype)
    given = x.clone().requires_grad_()
    y = layer(given)
    assert y.dtype == layer(x).dtype == dtype
    torch.testing.assert_close(y, layer(x), rtol=0, atol=0.05 * float(layer(x).std()))  # of tokens in INT8
    y.sum().backward()
    assert given.grad is not None
    torch.testing.assert_close(given.grad, layer.weight.to(dtype).sum(0).expand_as(x), rtol=0.05, atol=0.1)


def test_biases_take_gradients_in_compiled_layers_too():
    layer = layer_of("channel", learns=True)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    compiled(torch.randn(MOST_FEW_ROWS + 1, 130)).sum().backward()
    assert layer.bias is not None and layer.bias.grad is not None
    assert torch.equal(layer.bias.grad, torch.full((200,), MOST_FEW_ROWS + 1.0))


@pytest.mark.parametrize("granularity", ["block", "channel"])
@pytest.mark.parametrize("rows", [2, MOST_FEW_ROWS + 4])
def test_traced_layers_multiply_any_number_of_rows_as_they_are(tmp_path, granularity, rows):
    """By TorchScript, which does not record the choice of a branch, and by ONNX's older exporter."""
    layer = layer_of(granularity)
    x, others = torch.randn(rows, 130), torch.randn(MOST_FEW_ROWS + 20, 130)
    exact = nn.functional.linear(others, layer.weight, layer.bias)
    with torch.no_grad():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # both are deprecated, and in use
            traced = torch.jit.trace(layer, (x,), check_trace=False)
            torch.onnx.export(layer, (x,), str(tmp_path / "x.onnx"), dynamo=False, input_names=["x"],
                              dynamic_axes={"x": {0: "rows"}})  # fmt: skip
        torch.testing.assert_close(traced(others), exact)
    (got,) = onnxruntime.InferenceSession(tmp_path / "x.onnx").run(None, {"x": others.numpy()})
    torch.testing.assert_close(torch.from_numpy(got), exact, rtol=1e-4, atol=1e-4)


def test_other_folders_leave_the_model_as_it_was(tmp_path):
    model = Tied()
    folder = quantised(model, tmp_path / "m")
    before = {name: x.clone() for name, x in model.state_dict().items()}
    with pytest.raises(UserError, match=r"(?s)is not quantised.*trtconvert quantize"):
        load_quantized(model, tmp_path / "m")
    larger = Tied()
    larger.more = nn.Linear(2, 2)
    with pytest.raises(UserError, match=r"lacks more\.weight"):
        load_quantized(larger, folder)
    smaller = Tied()
    del smaller.conv
    with pytest.raises(UserError, match=r"has conv\.(weight|bias), and Tied has no place"):
        load_quantized(smaller, folder)
    other = Tied()
    other.norm = nn.LayerNorm(100)
    with pytest.raises(UserError, match=r"(?s)norm\.(weight|bias) in .* does not fit.*\[100\].*\[200\]"):
        load_quantized(other, folder)
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())


def test_models_that_are_filled_are_not_filled_again(tmp_path):
    folder = quantised(Tied(), tmp_path / "m")
    model = load_quantized(Tied(), folder)
    with pytest.raises(UserError, match=r"(?s)Tied has INT8 layers already.*make it anew"):
        load_quantized(model, folder)


@pytest.mark.parametrize("granularity", ["block", "channel"])
def test_damaged_weights_leave_the_model_as_it_was(tmp_path, granularity):
    (file,) = quantised(Tied(), tmp_path / "m", "--granularity", granularity).glob("*.safetensors")
    tensors = load(file.read_bytes())  # `load_file` maps the file, which the test writes again
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    scale = tensors["first.weight_scale"]
    for changed, got in (
        ({"first.weight_scale": None}, r"no first\.weight_scale"),
        ({"first.weight_scale": torch.ones(5, 5)}, r"float32 \[5, 5\] for \[200, 130\]"),
        ({"first.weight_scale": scale.half()}, "float16"),
        ({"first.weight_scale": scale * torch.nan}, "NaN"),
        ({"first.weight": tensors["first.weight"].float()}, r"float32 \[200, 130\]"),
    ):
        save_file({name: x for name, x in (tensors | changed).items() if x is not None}, file, metadata)
        model = Tied()
        with pytest.raises(
            UserError, match=rf"(?s)first\.weight in .* is damaged.*got: .*{got}.*quantise the model again"
        ):
            load_quantized(model, file.parent)
        assert type(model.first) is nn.Linear
    for wrong in ({"version": 2}, {"granularity": "row"}):
        save_file(tensors, file, {"trtconvert": json.dumps(json.loads(metadata["trtconvert"]) | wrong)})
        with pytest.raises(UserError, match=r"metadata of .* cannot be read"):
            load_quantized(Tied(), file.parent)


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory):
    """A pipeline with a text encoder, and its folder in INT8."""
    folder = tmp_path_factory.mktemp("pipeline")
    pipe = tiny_pipelines.with_text("stable_diffusion")
    pipe.save_pretrained(folder / "p")
    outcome = run("quantize", folder / "p", "-o", folder / "q", "--min-elements", "256")
    assert outcome.exit_code == 0, outcome.output
    return pipe, folder / "q"


def test_pipelines_are_loaded_whole(pipeline):
    pipe, folder = pipeline
    fresh = tiny_pipelines.with_text("stable_diffusion")
    for x in fresh.unet.parameters():
        nn.init.zeros_(x)
    assert load_quantized(fresh, folder) is fresh
    assert any(isinstance(module, Int8Linear) for module in fresh.unet.modules())
    assert any(isinstance(module, Int8Linear) for module in fresh.text_encoder.modules())
    calls = dict(height=16, width=16, num_inference_steps=2, output_type="pt")
    images = [
        model(prompt="a", generator=torch.Generator().manual_seed(0), **calls).images.float() for model in (pipe, fresh)
    ]
    assert 0 < float((images[0] - images[1]).square().mean().sqrt()) < 0.05
    with pytest.raises(UserError, match=r"has several models"):
        load_quantized(fresh.unet, folder)
    with pytest.raises(UserError, match=r"is no pipeline"):
        load_quantized(fresh, folder / "unet")
    load_quantized(pipe.unet.__class__.from_config(pipe.unet.config), folder / "unet")


def test_recipes_read_such_folders(pipeline):
    pipe, folder = pipeline
    got, wanted = load_pipeline(folder).unet.state_dict(), pipe.unet.state_dict()
    assert got.keys() == wanted.keys()
    off = {name: float((got[name] - x).norm() / x.norm()) for name, x in wanted.items() if float(x.norm())}
    assert 0.001 < max(off.values()) < 0.03


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_recipes_take_the_type_that_weights_had(tmp_path, dtype):
    folder = quantised(Tied().to(getattr(torch, dtype)), tmp_path / "m") / "model.safetensors"
    section = ModelSection(source="diffusers", weights=folder)
    assert with_dtype(section).dtype == dtype
