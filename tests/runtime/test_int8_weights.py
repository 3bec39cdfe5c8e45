"""INT8 layers of refittable engines, on the host: LoRAs and new weights give the same as a build with them."""

import functools
from dataclasses import replace

import pytest
import tiny_layers
import tiny_loras
import torch
from host_runtime import HostRefitter, engine_graph, engine_weights
from layered_graphs import STATIC, Int8Model, int8_model
from layers_of_any_size import take_any_size
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F

from trtconvert.calib.layer_scales import LayerScales, layer_tables
from trtconvert.diffusion_model import DiffusionModel
from trtconvert.engine import lowered_model
from trtconvert.errors import UserError
from trtconvert.linear import beside_plugins
from trtconvert.linear.modes import LayerMode
from trtconvert.linear.sites import ConvertedLayer
from trtconvert.models.lora import merge_loras
from trtconvert.recipe import LoraSection

TOUCHED = ["conv_in", "conv", "q", "mlp.0", "mlp.2", "tied", "skip", "out"]
"""Layers in 16 bits and in INT8: equalised, called twice, without a bias."""


@pytest.fixture(autouse=True)
def everywhere(monkeypatch):
    """Makes layers of any size plugins."""
    take_any_size(monkeypatch)


class WithGeglu(nn.Module):
    """A GEGLU, which kernels compute in one product, a modulation of one row, and a layer without a bias plus a vector."""

    def __init__(self) -> None:
        super().__init__()
        self.conv_in, self.time = nn.Conv2d(1, 32, 1), nn.Linear(32, 32)
        self.up, self.down = nn.Linear(32, 128), nn.Linear(64, 32, bias=False)
        self.shift, self.out = nn.Parameter(torch.randn(32)), nn.Linear(32, 1)

    def forward(self, x, timestep):
        of_time = self.time(torch.arange(32.0, device=x.device).to(x.dtype) / 32 + 0 * timestep[:, None].to(x.dtype))
        tokens = self.conv_in(x).flatten(2).transpose(1, 2) + of_time[:, None]
        value, gate = self.up(tokens).chunk(2, -1)
        tokens = self.down(value * F.gelu(gate)) + self.shift
        return x - self.out(tokens).transpose(1, 2).reshape(x.shape)


def as_stored(model: DiffusionModel, dtype: torch.dtype) -> DiffusionModel:
    """With weights that a 16-bit type holds exactly, like those of published models."""
    with torch.no_grad():
        for parameter in model.denoiser.parameters():
            parameter.copy_(parameter.to(dtype).float())
    return model


def of_module(made: Int8Model):
    return made.model.denoiser, [layer.layer for layer in made.layers.values()]


def rebuilt(made: Int8Model, denoiser: nn.Module) -> Int8Model:
    """Return the constants of a build with other weights and the same calibration."""
    scales = {
        layer.layer.input_group: LayerScales(layer.tables.x_factor, layer.tables.x_offset, layer.tables.x_scale)
        for layer in made.layers.values()
    }
    layers, modes = [], {}
    for name, layer in made.layers.items():
        layers.append(layer.layer)
        modes[name] = layer.tables.modes
    tables = layer_tables(denoiser, layers, scales, modes)
    converted = {name: ConvertedLayer(layer.layer, tables[name]) for name, layer in made.layers.items()}
    return Int8Model(replace(made.model, denoiser=denoiser), converted, made.attention)


def copied(made: Int8Model) -> nn.Module:
    denoiser = type(made.model.denoiser)()
    denoiser.load_state_dict(made.model.denoiser.state_dict())
    return denoiser.eval().requires_grad_(False)


def merged(made: Int8Model, *loras) -> Int8Model:
    """Return the weights of a build with LoRAs in its recipe."""
    denoiser = copied(made)
    merge_loras(replace(made.model, denoiser=denoiser), [LoraSection(file=file, scale=scale) for file, scale in loras])
    return rebuilt(made, denoiser)


def assert_engine_is_of(made: Int8Model, dtype, layers):
    expected = engine_weights(engine_graph(made.graph(dtype), layers))
    found = HostRefitter.engine
    assert found.keys() == expected.keys()
    assert not [name for name, x in found.items() if not torch.equal(x, expected[name])]


def engine():
    return {name: x.clone() for name, x in HostRefitter.engine.items()}


def file_of(made: Int8Model, folder, names, name="a"):
    layers = tiny_loras.layers_of(made.model.denoiser, names)
    return tiny_loras.save(folder / f"{name}.safetensors", layers, tiny_loras.kohya())


@pytest.mark.first_case
@pytest.mark.parametrize(
    ("dtype", "layers", "moved"),
    [(torch.float16, "plugin", True), (torch.bfloat16, "exact", False)],
    ids=str,
)
def test_layers_are_those_of_a_build_with_the_loras(load, tmp_path, dtype, layers, moved):
    made = int8_model(as_stored(tiny_layers.build(), dtype), moved=moved)
    loaded = load(made.graph(dtype), layers=layers, of=of_module(made))
    before = engine()
    assert any(x.dtype == torch.int32 and "packed" in name for name, x in before.items()) == (layers == "plugin")
    one, two = (file_of(made, tmp_path, names, name) for name, names in (("a", TOUCHED), ("b", ["q", "k", "mlp.0"])))
    loaded.set_loras([(one, 1.0), (two, -0.5)])
    assert_engine_is_of(merged(made, (one, 1.0), (two, -0.5)), dtype, layers)
    loaded.set_loras([(two, -0.5)])
    assert sum(not torch.equal(x, before[name]) for name, x in engine().items()) >= 3
    loaded.set_loras([])
    assert all(torch.equal(x, before[name]) for name, x in engine().items())
    assert loaded.set_loras([]) == 0


def test_nodes_stand_behind_what_they_read(monkeypatch):
    """Includes a layer whose mode follows the timestep; copies for TensorRT's parser have this order."""
    monkeypatch.setattr(lowered_model, "against_plugins", lambda options: "")
    modes = [LayerMode.DYNAMIC, LayerMode.WEIGHT_ONLY]
    made = int8_model(as_stored(tiny_layers.build(), torch.float16), modes, exclude=["conv*"])
    graph = engine_graph(made.graph(torch.float16), "plugin")
    assert any(node.op_type == "QuantiseRows" for node in graph.graph)
    graph.clone()  # raises where the order is another


class Zeros(nn.Module):
    """Layers with the same weights as yet, so small that exporters make one constant of them, and one that is called where it
    is a plugin and where it is none."""

    def __init__(self) -> None:
        super().__init__()
        self.conv_in = nn.Conv2d(1, 32, 1)
        self.a, self.b, self.tied, self.out = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 1)
        for layer in (self.a, self.b):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, x, timestep):
        tokens = self.conv_in(x).flatten(2).transpose(1, 2)
        tokens = tokens + self.a(tokens) + self.b(tokens.sin()) + self.tied(tokens.cos())
        tokens = tokens + self.tied(tokens[:, :2].mean(1))[:, None]
        return x - self.out(tokens).transpose(1, 2).reshape(x.shape)


@pytest.mark.soak
def test_equal_weights_are_apart_and_shared_ones_are_not(load, tmp_path, monkeypatch):
    monkeypatch.setattr(beside_plugins, "FEWEST_ROWS", 64)  # the second call of `tied` has 4 rows
    made = int8_model(as_stored(tiny_layers.build(Zeros), torch.float16), include=["*", "tied#2"], moved=True)
    loaded = load(made.graph(torch.float16), layers="plugin", of=of_module(made))
    assert {layer for layer, _ in loaded.record.int8_constants.values()} == {"a", "b", "tied"}
    file = file_of(made, tmp_path, ["b", "tied"])
    loaded.set_loras([(file, 1.0)])
    assert "tied.weight" in HostRefitter.given or "tied.weight.T" in HostRefitter.given
    assert_engine_is_of(merged(made, (file, 1.0)), torch.float16, "plugin")


@functools.cache
def with_geglu() -> Int8Model:
    """In INT8 at low noise, in 16 bits at high noise."""
    model, modes = tiny_layers.build(WithGeglu), (LayerMode.STATIC, LayerMode.WEIGHT_ONLY)
    return int8_model(as_stored(model, torch.float16), modes, include=["*", "time"], moved=True)


@pytest.fixture
def geglu(load):
    """Return the model and its engine."""
    made = with_geglu()
    return made, load(made.graph(torch.float16), layers="plugin", of=of_module(made))


def test_joined_layers_and_layers_of_few_rows(geglu, tmp_path):
    made, loaded = geglu
    assert {name for name, _ in loaded.record.int8_constants.values()} == {"time", "up", "down"}
    file = file_of(made, tmp_path, ["up", "down", "time"])
    assert loaded.set_loras([(file, 1.0)]) == 9  # weight, scale and bias of each
    assert_engine_is_of(merged(made, (file, 1.0)), torch.float16, "plugin")


def test_other_weights_are_quantised_as_a_build_with_them_does_it(geglu, tmp_path):
    made, loaded = geglu
    tuned = copied(made)
    with torch.no_grad():
        for parameter in tuned.parameters():
            parameter.add_(0.01).copy_(parameter.half())
    save_file(tuned.state_dict(), tmp_path / "tuned.safetensors")
    loaded.refit(tmp_path / "tuned.safetensors")
    assert "shift" in HostRefitter.given  # added to a layer's output, it is not that layer's bias
    assert_engine_is_of(rebuilt(made, tuned), torch.float16, "plugin")
    with pytest.raises(UserError, match="LoRAs cannot be added to replaced weights"):
        loaded.set_loras([])


def test_some_weights_of_int8_layers(load):
    """Layers without offsets take a weight or a bias alone; with offsets the INT8 bias depends on both."""
    made = int8_model(as_stored(tiny_layers.build(), torch.float16), STATIC)
    loaded = load(made.graph(torch.float16), layers="plugin", of=of_module(made))
    before, state = engine(), made.model.denoiser.state_dict()
    changed = {name: x for name, x in loaded.record.int8_constants.items() if x[0] == "q"}
    assert loaded.refit({"q.weight": state["q.weight"] / 2}) == 2 and HostRefitter.given == [
        name for table in ("weight", "weight_scale") for name, x in changed.items() if x[1] == table
    ]
    (scale,) = (name for name, x in changed.items() if x[1] == "weight_scale")
    assert torch.equal(engine()[scale], before[scale] / 2)
    assert loaded.refit({"q.bias": state["q.bias"] + 1}) == 1
    (bias,) = (name for name, x in changed.items() if x[1] == "bias")
    assert torch.equal(engine()[bias], (state["q.bias"] + 1).half().float())
    for wrong, message in (
        (torch.ones(4, 4), r"does not fit.*shape \[32, 32\].*\[4, 4\]"),
        (torch.full((32, 32), torch.nan), "does not fit.*finite numbers"),
        (torch.ones(32, 32, dtype=torch.int8), "does not fit.*int8"),
    ):
        with pytest.raises(UserError, match=f"(?s)'q.weight' {message}.*remedy: "):
            loaded.refit({"q.weight": wrong})


def test_a_bias_that_stays_is_not_given(load, tmp_path):
    """Without offsets the bias does not depend on the weight."""
    made = int8_model(as_stored(tiny_layers.build(), torch.float16), STATIC)
    loaded = load(made.graph(torch.float16), layers="plugin", of=of_module(made))
    file = file_of(made, tmp_path, ["q"])
    for loras in ([(file, 1.0)], []):
        assert loaded.set_loras(loras) == 2
        tables = {loaded.record.int8_constants[name] for name in HostRefitter.given}
        assert tables == {("q", "weight"), ("q", "weight_scale")}


def test_a_weight_without_the_bias_that_follows_from_it(geglu):
    made, loaded = geglu
    state = made.model.denoiser.state_dict()
    with pytest.raises(UserError, match=r"(?s)layer up .*up.weight and up.bias.*got: +up.weight.*pass both"):
        loaded.refit({"up.weight": state["up.weight"]})
    assert loaded.refit({name: state[name] for name in ("up.weight", "up.bias")}) == 3
    assert loaded.refit({"down.weight": state["down.weight"]}) == 3  # it has none of its own


@pytest.mark.soak
def test_without_memory_on_the_device_the_host_quantises(geglu, tmp_path, monkeypatch):
    made, loaded = geglu
    file = file_of(made, tmp_path, ["up", "down"])
    empty, refused = torch.empty, []

    def full(*of, device=None, **options):
        if device == torch.device("cpu", 0):
            refused.append(of)
            raise torch.OutOfMemoryError
        return empty(*of, device=device, **options)

    monkeypatch.setattr(torch, "empty", full)
    loaded.set_loras([(file, 1.0)])
    assert refused
    assert_engine_is_of(merged(made, (file, 1.0)), torch.float16, "plugin")


def test_a_refused_lora_leaves_the_engine_unchanged(geglu, tmp_path, monkeypatch):
    made, loaded = geglu
    file, before = file_of(made, tmp_path, ["up"]), engine()
    with pytest.raises(UserError, match=r"(?s)up.weight leaves the range.*at 1e\+39"):
        loaded.set_loras([(file, 1e39)])
    monkeypatch.setattr(HostRefitter, "set_named_weights", lambda *of: False)
    with pytest.raises(UserError, match=r"(?s)does not take a new '.*up.*engine.layers: exact"):
        loaded.set_loras([(file, 1.0)])
    assert all(torch.equal(x, before[name]) for name, x in engine().items())
