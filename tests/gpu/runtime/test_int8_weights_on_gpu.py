"""INT8 layers of a refittable TensorRT engine: quantised anew on the GPU with LoRAs and other weights, and as they were again."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny_layers
import tiny_loras
import torch
from layers_of_any_size import take_any_size
from rich.console import Console
from safetensors.torch import save_file
from support import tiny_recipe

from trtconvert import runtime
from trtconvert.cache import Cache
from trtconvert.engine import tensorrt
from trtconvert.errors import UserError
from trtconvert.linear.reference import layer_bias, layer_weight
from trtconvert.models.recorded_calls import relative_error
from trtconvert.pipeline import build
from trtconvert.progress import Reporter
from trtconvert.recipe import load_recipe
from trtconvert.runtime import loras as runtime_loras
from trtconvert.runtime import reading
from trtconvert.weights.tensor_files import read_entries

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not tensorrt.status().available, reason=tensorrt.status().detail)]

TOUCHED = ["conv", "q", "k", "mlp.0", "mlp.2", "tied", "out"]
"""In plugins, and in 16 bits: the convolution and the last layer."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A small model whose linear layers are INT8 in plugins, whatever their size."""
    place = tmp_path_factory.mktemp("int8")
    recipe = tiny_recipe(
        place,
        model={"source": "tiny_layers:build", "dtype": "float16"},
        layers={"modes": ["static", "weight_only"], "include": tiny_layers.WITH_CONV},
        engine={"backend": "tensorrt", "attention": "native", "layers": "plugin", "refittable": True},
        verify={"min_psnr": 5},
    )
    with pytest.MonkeyPatch.context() as patch:
        take_any_size(patch)
        build(load_recipe(recipe), place / "bundle", Cache(place / "cache"), Reporter(Console(quiet=True)))
    return place / "bundle"


@pytest.fixture
def denoiser(folder):
    with runtime.load(folder, backend="tensorrt") as bundle:
        yield bundle["denoiser"]


def inputs_at(timestep: float) -> list[torch.Tensor]:
    x = torch.randn(4, 1, 4, 4, generator=torch.Generator().manual_seed(1))
    return [x.half().cuda(), torch.full((4,), timestep).cuda()]


def expected_of(state: dict[str, torch.Tensor], timestep: float) -> torch.Tensor:
    model = tiny_layers.build().denoiser
    model.load_state_dict(state)
    return model(*(x.float().cpu() for x in inputs_at(timestep)))


@pytest.mark.parametrize("timestep", [100.0, 900.0], ids=["INT8", "16 bits"])
def test_loras_of_int8_layers(denoiser, tmp_path, timestep):
    assert denoiser.record.layers == "plugin"
    assert {layer for layer, _ in denoiser.record.int8_constants.values()} == set(tiny_layers.CHOSEN) - {"conv"}
    module, inputs = tiny_layers.build().denoiser, inputs_at(timestep)
    for _ in range(3):  # the graph must not keep the old weights
        before = denoiser(*inputs)
    layers = tiny_loras.layers_of(module, TOUCHED)
    file = tiny_loras.save(tmp_path / "lora.safetensors", layers, tiny_loras.peft(""))
    assert denoiser.set_loras([(file, 1.0)])
    changed = [denoiser(*inputs) for _ in range(3)][-1].cpu()
    merged = tiny_loras.with_deltas(module.state_dict(), {name: layer.delta() for name, layer in layers.items()}, 1.0)
    expected = expected_of(merged, timestep)
    assert relative_error(changed, expected) < relative_error(before.cpu(), expected) / 3
    # What the host computes of the same weights differs where a sum falls on the other side of an edge.
    assert denoiser.set_loras([]) and torch.equal(denoiser(*inputs), before)
    denoiser.refit(merged)
    assert relative_error(denoiser(*inputs).cpu(), changed) < relative_error(changed, expected) / 2
    denoiser.refit(module.state_dict())
    torch.testing.assert_close(denoiser(*inputs), before, rtol=1e-2, atol=1e-2)


def test_parts_give_what_the_whole_gives(denoiser, tmp_path, monkeypatch):
    """Each is computed while TensorRT takes the one before, and goes then."""
    module, inputs = tiny_layers.build().denoiser, inputs_at(100.0)
    before = denoiser(*inputs)
    file = tiny_loras.save(tmp_path / "lora.safetensors", tiny_loras.layers_of(module, TOUCHED), tiny_loras.peft(""))
    count = denoiser.set_loras([(file, 1.0)])
    assert denoiser.last_change.parts == 1
    whole = denoiser(*inputs)
    monkeypatch.setattr(runtime_loras, "LEAST_PART", 1)
    monkeypatch.setattr(runtime_loras, "LARGEST_PART", 1)
    denoiser.set_loras([])
    assert torch.equal(denoiser(*inputs), before)
    assert denoiser.set_loras([(file, 1.0)]) == count and denoiser.last_change.parts > 4
    assert torch.equal(denoiser(*inputs), whole)
    large = tiny_loras.save(tmp_path / "large.safetensors", tiny_loras.layers_of(module, ["tied"]), tiny_loras.peft(""))
    with pytest.raises(UserError, match=r"tied\.weight leaves the range"):  # and what was given before it is taken back
        denoiser.set_loras([(file, 0.5), (large, 1e39)])
    assert denoiser.last_change.parts > 4
    assert torch.equal(denoiser(*inputs), whole)


@pytest.mark.parametrize("inference", [False, True])
def test_numbers_are_read_to_the_gpu(tmp_path, monkeypatch, inference):
    """Into memory that kernels before may still read, in pieces of many threads."""
    monkeypatch.setattr(reading, "_PIECE", 2**16)
    tensors = {str(index): torch.randn(300, 1001 + index).half() for index in range(40)}
    save_file(tensors, tmp_path / "numbers.safetensors")
    entries, _ = read_entries(tmp_path / "numbers.safetensors")
    places = [(x.name, [reading.Place(tmp_path / "numbers.safetensors", x.start, x.dtype, x.shape)]) for x in entries]
    with torch.inference_mode(inference):
        sums = dict[str, torch.Tensor]()
        for name, (found,) in reading.read_ahead(places, torch.device("cuda", 0), 2**22):
            torch.cuda._sleep(1_000_000)  # so that what follows runs after the memory was given back
            sums[name] = (found.double() * 1).sum()
    for name, found in sums.items():
        torch.testing.assert_close(found.cpu(), tensors[name].double().sum())


@pytest.mark.parametrize("shape", [(320, 640), (64, 32, 3, 3), (7, 5)], ids=str)
def test_devices_quantise_alike(shape):
    """Bit for bit: what a LoRA that is taken away leaves is what the build has made."""
    generator = torch.Generator().manual_seed(0)
    weight, factor = torch.randn(shape, generator=generator), torch.rand(shape[1], generator=generator) + 0.5
    weight[0] = 0
    expected = layer_weight(weight, factor)
    found = layer_weight(weight.cuda(), factor.cuda())
    assert all(torch.equal(x.cpu(), y) for x, y in zip(found, expected, strict=True))
    whole = expected[0].float() * expected[1].view(-1, *[1] * (len(shape) - 1))  # rows of whole numbers of a scale
    again = layer_weight(whole.cuda(), torch.ones_like(factor).cuda())
    assert all(
        torch.equal(x.cpu(), y) for x, y in zip(again, layer_weight(whole, torch.ones_like(factor)), strict=True)
    )
    if len(shape) == 2:
        offset = torch.randn(shape[1], generator=generator)
        biases = [
            layer_bias(weight[:, 0].to(d), *(x.to(d) for x in (*expected, factor, offset))).cpu()
            for d in ("cpu", "cuda")
        ]
        torch.testing.assert_close(*biases, rtol=1e-6, atol=1e-6)
