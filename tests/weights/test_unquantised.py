"""The weights that INT8 layers were quantised from, beside a model: every number, in the smallest type that holds it."""

import pytest
import tiny_layers
import torch
from safetensors.torch import save_file
from torch import nn

from trtconvert.bundle import unquantised_file
from trtconvert.errors import UserError
from trtconvert.linear.sites import model_tensors
from trtconvert.weights.unquantised import Unquantised, save_unquantised


def kept(model, layers, folder, prefix=""):
    save_unquantised(model, layers, folder / "x.onnx", prefix)
    return Unquantised(unquantised_file(folder / "x.onnx"))


@pytest.mark.parametrize(
    ("numbers", "dtype"),
    [
        (lambda x: x.half(), torch.float16),
        (lambda x: x.bfloat16(), torch.bfloat16),
        (lambda x: x, torch.float32),
        (lambda x: 0 * x, torch.float16),
    ],
)
def test_each_weight_has_the_smallest_type_that_holds_it(tmp_path, numbers, dtype):
    model = nn.Linear(32, 32)
    with torch.no_grad():
        model.weight.copy_(numbers(model.weight * 1e-3).float())  # in FP16, small ones have fewer bits
        model.bias.copy_(model.bias.half().float())
    layers = tiny_layers.layers_of(tiny_layers.Called(lambda m, x: m.layer(x), layer=model), torch.randn(2, 32))
    found = kept(tiny_layers.Called(lambda m, x: m.layer(x), layer=model), layers, tmp_path)
    assert found["layer.weight"].dtype == dtype and found["layer.bias"].dtype == torch.float16
    assert torch.equal(found["layer.weight"].float(), model.weight)


def test_parts_of_one_parameter_and_transposed_ones(tmp_path):
    """Like the three projections of `nn.MultiheadAttention`."""
    joined, turned = nn.Parameter(torch.randn(64, 32)), nn.Parameter(torch.randn(32, 16))

    def forward(module, x):
        first, second = module.joined.chunk(2)
        return nn.functional.linear(x, first) @ module.turned + nn.functional.linear(x, second) @ module.turned

    model = tiny_layers.Called(forward, joined=joined, turned=turned)
    layers = tiny_layers.layers_of(model, torch.randn(3, 32))
    found = kept(model, layers, tmp_path)
    assert set(found.shapes) == {"joined", "turned"} and found.shapes["joined"] == (64, 32)
    stored = {name: found[name].float() for name in found.shapes}
    for layer in layers:
        ref = found.refs[layer.name]["weight"]
        assert ref is not None and found.refs[layer.name]["bias"] is None
        assert torch.equal(ref.of(stored), layer.weight.of(model_tensors(model)))


def test_tensors_that_do_not_lie_row_by_row(tmp_path):
    """Convolutions with channels last, and parts of a transposed parameter."""
    conv = nn.Conv2d(16, 16, 3, padding=1, bias=False).to(memory_format=torch.channels_last)
    turned = nn.Parameter(torch.randn(32, 64).T)

    def forward(module, x):
        rows = module.conv(x).flatten(2).sum(-1).repeat(1, 2)
        return nn.functional.linear(rows, module.turned[32:])

    model = tiny_layers.Called(forward, conv=conv, turned=turned)
    layers = tiny_layers.layers_of(model, torch.randn(3, 16, 4, 4))
    assert [layer.kind for layer in layers] == ["conv", "linear"] and not model.conv.weight.is_contiguous()
    found = kept(model, layers, tmp_path)
    stored = {name: found[name].float() for name in found.shapes}
    assert all(x.is_contiguous() for x in stored.values())
    for layer in layers:
        ref = found.refs[layer.name]["weight"]
        assert ref is not None and torch.equal(ref.of(stored), layer.weight.of(model_tensors(model)))


def test_a_prefix_that_the_state_dict_has_not(tmp_path):
    inner = tiny_layers.Called(lambda m, x: m.layer(x), layer=nn.Linear(32, 32))
    outer = tiny_layers.Called(lambda m, x: m.model(x, x), model=inner)
    found = kept(outer, tiny_layers.layers_of(outer, torch.randn(2, 32)), tmp_path, "model.")
    assert set(found.shapes) == {"layer.weight", "layer.bias"}
    (of,) = found.refs.values()
    assert of["weight"] is not None and of["weight"].name == "layer.weight"


@pytest.mark.parametrize(
    "metadata",
    [
        None,
        {"trtconvert": "[1]"},
        {"trtconvert": '{"a": {"weight": {"name": "b", "offset": 0, "shape": [1], "stride": [1]}}}'},
    ],
)
def test_other_files_are_refused(tmp_path, metadata):
    save_file({"a": torch.ones(1)}, tmp_path / "x.safetensors", metadata)
    with pytest.raises(UserError, match="cannot be read"):
        Unquantised(tmp_path / "x.safetensors")
