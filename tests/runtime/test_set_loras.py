"""LoRAs of loaded engines, on the host: the weights for TensorRT, and the results of a model with them."""

import functools

import onnx_ir as ir
import pytest
import tiny_layers
import tiny_loras
import tiny_models
import torch
from host_runtime import HostRefitter as Refitter
from host_runtime import computes
from layered_graphs import int8_model, run
from safetensors.torch import save_file
from tiny_loras import ALPHA, RANK
from torch import Tensor, nn

from trtconvert.bundle import DiffusersRecord
from trtconvert.errors import BackendUnavailable, UserError
from trtconvert.export import storage
from trtconvert.export.nodes.layers import LAYER_METADATA, WEIGHT_METADATA
from trtconvert.export.trace import SiteOptions, trace
from trtconvert.models.recorded_calls import relative_error
from trtconvert.runtime import loras as runtime_loras

HALF = ALPHA / RANK


def file_of(folder, module, names, name="a", layout=None):
    layers = tiny_loras.layers_of(module, names)
    return layers, tiny_loras.save(folder / f"{name}.safetensors", layers, layout or tiny_loras.kohya())


def engine():
    return {name: x.clone() for name, x in Refitter.engine.items()}


@functools.cache
def traced():
    return tiny_models.traced(tiny_models.build())


@pytest.fixture
def tiny(load):
    """The tiny model in FP32, and its engine."""
    return tiny_models.build().denoiser, load(traced().clone())


def merged(module, layers, factor):
    return tiny_loras.with_deltas(module.state_dict(), {n: layer.delta() for n, layer in layers.items()}, factor)


def assert_engine_has(state):
    for name, tensor in Refitter.engine.items():
        if (weight := name.removesuffix(".T")) in state:
            torch.testing.assert_close(tensor.T if weight != name else tensor, state[weight], rtol=1e-6, atol=1e-6)


def test_weights_are_those_of_the_build_with_the_loras(tiny, tmp_path):
    module, loaded = tiny
    layers, file = file_of(tmp_path, module, ["qkv", "out"])
    built = engine()
    assert loaded.set_loras([(file, 0.5)]) == 2
    assert set(Refitter.given) == {"qkv.weight.T", "out.weight.T"}
    assert_engine_has(merged(module, layers, 0.5 * HALF))
    assert loaded.set_loras([(str(file), -2)]) == 2  # instead of the one before
    assert_engine_has(merged(module, layers, -2 * HALF))
    assert loaded.set_loras([]) == 2
    assert all(torch.equal(x, built[name]) for name, x in engine().items())
    assert loaded.set_loras([]) == 0 and computes(loaded)


@pytest.mark.parametrize("kind", ["LoHa", "LoKr"])
def test_products_of_other_kinds_are_added_too(tiny, tmp_path, kind):
    """By the weights that lie transposed."""
    module, loaded = tiny
    built = engine()
    torch.manual_seed(0)
    rows, columns = module.qkv.weight.shape
    if kind == "LoHa":
        sizes = {f"hada_w{side}_{end}": (rows, 2) if end == "a" else (2, columns) for side in "12" for end in "ab"}
        parts = {name: torch.randn(*of) for name, of in sizes.items()}
        delta = (parts["hada_w1_a"] @ parts["hada_w1_b"]) * (parts["hada_w2_a"] @ parts["hada_w2_b"])
    else:
        parts = {"lokr_w1": torch.randn(2, 4), "lokr_w2": torch.randn(rows // 2, columns // 4)}
        delta = torch.kron(*parts.values())
    save_file({f"diffusion_model.qkv.{name}": x for name, x in parts.items()}, tmp_path / "a.safetensors")
    assert loaded.set_loras([(tmp_path / "a.safetensors", 0.5)]) == 1
    assert_engine_has(tiny_loras.with_deltas(module.state_dict(), {"qkv": delta}, 0.5))
    assert loaded.set_loras([]) == 1 and all(torch.equal(x, built[name]) for name, x in engine().items())


def test_only_what_changes_is_replaced(tiny, tmp_path):
    module, loaded = tiny
    _, of_both = file_of(tmp_path, module, ["qkv", "out"])
    one, of_one = file_of(tmp_path, module, ["embed"], "b")
    assert loaded.set_loras([(of_both, 1.0), (of_one, 0.5)]) == 3
    assert loaded.set_loras([(of_both, 1.0), (of_one, 0.5)]) == 0
    assert loaded.set_loras([(of_both, 1.0), (of_one, 1.0)]) == 1 and Refitter.given == ["embed.weight.T"]
    assert loaded.set_loras([(of_one, 1.0)]) == 2 and "embed.weight.T" not in Refitter.given
    assert_engine_has(merged(module, one, HALF))
    file_of(tmp_path, module, ["embed"], "b", tiny_loras.peft(""))  # another file of that name: with no alpha
    assert loaded.set_loras([(of_one, 1.0)]) == 1
    assert_engine_has(merged(module, one, 1.0))


def test_the_model_computes_what_the_merged_one_does(tiny, tmp_path):
    """Runs ONNX Runtime with TensorRT's new weights in the bundle's model, whose attention is INT8."""
    module, loaded = tiny
    layers, file = file_of(tmp_path, module, ["embed", "qkv", "out"])
    loaded.set_loras([(file, 0.7)])
    model, inputs = traced().clone(), tiny_models.build().example(3, {"batch": 2})
    before, exact = run(model, **inputs), module(**inputs)
    for name, weight in Refitter.engine.items():
        model.graph.initializers[name].const_value = ir.tensor(weight.numpy(), name=name)
    module.load_state_dict(merged(module, layers, 0.7 * HALF))
    assert relative_error(run(model, **inputs) - before, module(**inputs) - exact) < 0.1  # INT8 attention's own


def test_weights_that_tensorrt_fused_are_refitted_together(tiny, tmp_path, monkeypatch):
    module, loaded = tiny
    _, file = file_of(tmp_path, module, ["qkv"])
    _, other = file_of(tmp_path, module, ["out"], "b")
    monkeypatch.setattr(Refitter, "fused", ("qkv.weight.T", "qkv.bias", "out.weight.T"))
    assert loaded.set_loras([(other, 1.0)]) == 3
    before = engine()
    assert loaded.set_loras([(other, 1.0), (file, 1.0)]) == 3
    assert torch.equal(Refitter.engine["out.weight.T"], before["out.weight.T"])  # with its own LoRA still
    assert not torch.equal(Refitter.engine["qkv.weight.T"], before["qkv.weight.T"])


def test_int8_layers_have_the_numbers_of_their_integers_and_the_lora(load, tmp_path):
    model = tiny_layers.build()
    loaded = load(int8_model(model).graph(torch.float16))
    before = engine()
    layers, file = file_of(tmp_path, model.denoiser, ["q", "mlp.0", "tied", "conv", "conv_in"])
    assert loaded.set_loras([(file, 1.0)]) == 5
    after = engine()
    for name, layer in layers.items():
        key = next(key for key in (f"{name}.weight.T", f"{name}.weight") if key in after)
        delta = HALF * layer.delta().float()
        expected = (before[key].float() + (delta.T if key.endswith(".T") else delta)).half()
        torch.testing.assert_close(after[key], expected, rtol=2e-3, atol=1e-6)
        weight = model.denoiser.get_parameter(f"{name}.weight")
        rounding = (before[key] - (weight.T if key.endswith(".T") else weight)).abs().max()
        assert rounding < weight.abs().max() / 100  # a hundredth and not more: they are of the layer's own input


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_sums_are_rounded_once_to_the_engine_s_type(load, tmp_path, dtype):
    model = tiny_models.build()
    loaded = load(tiny_models.traced(model, dtype))
    before = engine()["qkv.weight.T"]
    layers, file = file_of(tmp_path, model.denoiser, ["qkv"])
    loaded.set_loras([(file, 1.0)])
    after = engine()["qkv.weight.T"]
    assert before.dtype == after.dtype == dtype
    exact = before.double() + HALF * layers["qkv"].delta().T
    assert (after.double() - exact).abs().max() <= torch.finfo(dtype).eps / 2 * exact.abs().max()
    assert loaded.set_loras([]) == 1 and torch.equal(engine()["qkv.weight.T"], before)


class Tied(nn.Module):
    """The forward multiplies by one weight, and computes a constant from it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix, self.head = (nn.Linear(32, 32) for _ in range(3))

    def forward(self, x: Tensor, timestep: Tensor) -> Tensor:
        y = (self.mix(self.embed(x)) + timestep[:, None, None] / 1000)[:, None]
        y = nn.functional.scaled_dot_product_attention(y, y, y)[:, 0]
        return self.head(y * (1 + self.embed.weight.square().mean(1)))


@functools.cache
def tied():
    torch.manual_seed(0)
    return int8_model(tiny_layers.model_of(Tied(), ("batch", 16, 32)), include=["embed", "mix"], attention=True)


def test_weights_that_constants_were_computed_from_are_refused(load, tmp_path):
    """The constants would keep the old values."""
    made = tied()
    in_int8 = {node.metadata_props.get(LAYER_METADATA): node.metadata_props for node in made.graph().graph}
    assert WEIGHT_METADATA in in_int8["mix"] and WEIGHT_METADATA not in in_int8["embed"]
    model = made.model
    loaded = load(trace(model, made.attention, SiteOptions(model.timestep_max, "calibrated", True), dims=model.dims))
    before = engine()
    with pytest.raises(UserError, match=r"(?s)'embed.weight' cannot be replaced alone.*constants.*remedy: build"):
        loaded.refit({"embed.weight": torch.ones(32, 32)})
    with pytest.raises(UserError, match=r"(?s)'embed.weight' cannot be replaced alone.*or LoRAs"):
        loaded.set_loras([(file_of(tmp_path, model.denoiser, ["embed"])[1], 1.0)])
    assert all(torch.equal(x, before[name]) for name, x in Refitter.engine.items())
    assert loaded.set_loras([(file_of(tmp_path, model.denoiser, ["mix"], "b")[1], 1.0)]) == 1


@pytest.mark.parametrize("keeps", [False, True], ids=["dequantised", "unquantised"])
def test_int8_weights_that_constants_were_computed_from_are_refused(load, tmp_path, keeps):
    """With unquantised weights, the layer alone took the new ones; without, no module seemed to be there."""
    made = tied()
    of = (made.model.denoiser, [layer.layer for layer in made.layers.values()]) if keeps else None
    loaded = load(made.graph(), of=of)
    before = engine()
    if keeps:
        with pytest.raises(UserError, match=r"(?s)'embed.weight' cannot be replaced alone.*remedy: build"):
            loaded.refit({"embed.weight": torch.ones(32, 32)})
    with pytest.raises(UserError, match=r"(?s)'embed.weight' cannot be replaced alone.*constants.*or LoRAs"):
        loaded.set_loras([(file_of(tmp_path, made.model.denoiser, ["embed"])[1], 1.0)])
    assert all(torch.equal(x, before[name]) for name, x in Refitter.engine.items())
    assert loaded.set_loras([(file_of(tmp_path, made.model.denoiser, ["mix"], "b")[1], 1.0)]) == 1


def test_a_text_encoder_takes_its_own_parts(tiny, tmp_path):
    module, loaded = tiny
    encoder = DiffusersRecord(
        pipeline="", component="text_encoder", model="CLIPTextModel", config={}, output="", parameters=[], arguments={}
    )
    record = loaded.signature.component.model_copy(update={"timestep_input": "", "diffusers": encoder})
    loaded.signature.component = record
    layers, file = file_of(tmp_path, module, ["qkv"], layout=tiny_loras.kohya("lora_te1_"))
    assert loaded.set_loras([(file, 1.0)]) == 1
    assert_engine_has(merged(module, layers, HALF))
    _, of_denoiser = file_of(tmp_path, module, ["qkv"], "b")
    with pytest.raises(UserError, match=r"(?s)nothing for text_encoder.*modules of CLIPTextModel.*names of denoiser"):
        loaded.set_loras([(of_denoiser, 1.0)])


def test_a_refused_lora_leaves_the_engine_unchanged(tiny, tmp_path):
    module, loaded = tiny
    _, file = file_of(tmp_path, module, ["qkv"])
    loaded.set_loras([(file, 1.0)])
    before = engine()
    save_file({"lora_unet_qkw.lora_up.weight": torch.ones(2, 2)}, tmp_path / "half.safetensors")
    _, foreign = file_of(tmp_path, tiny_layers.build().denoiser, ["mlp.0"], "foreign")
    text = {"lora_te_q": tiny_loras.layer_of(torch.ones(4, 4), 0)}
    tiny_loras.save(tmp_path / "text.safetensors", text, tiny_loras.kohya(""))
    for wanted, message in (
        ([(foreign, 1.0)], r"another model.*modules of the denoiser; the nearest is.*mlp_0"),
        ([(tmp_path / "half.safetensors", 1.0)], "not whole"),
        ([(tmp_path / "text.safetensors", 1.0)], "nothing for denoiser"),
        ([(tmp_path / "none.safetensors", 1.0)], "there is no LoRA"),
        ([file], r"\[\(file, scale\), …\]"),
        (file, r"\[\(file, scale\), …\]"),
        (None, "got: None"),
        ([str(file)], r"\[\(file, scale\), …\]"),
        ([(file, "x")], r"\[\(file, scale\), …\]"),
        ([(file, float("nan"))], r"\[\(file, scale\), …\]"),
        ([(file, 1e39)], r"qkv.weight leaves the range.*at 1e\+39"),
    ):
        with pytest.raises(UserError, match=rf"(?s){message}.*remedy: "):
            loaded.set_loras(wanted)
    assert all(torch.equal(x, before[name]) for name, x in engine().items())
    assert loaded.set_loras([(file, 1.0)]) == 0


def test_loras_and_other_weights_do_not_mix(tiny, tmp_path):
    """The remedies work too."""
    module, loaded = tiny
    _, file = file_of(tmp_path, module, ["qkv"])
    loaded.set_loras([(file, 1.0)])
    with pytest.raises(UserError, match=r"(?s)LoRAs in 1 weights.*set_loras\(\[\]\)"):
        loaded.refit(module.state_dict())
    loaded.set_loras([])
    assert loaded.refit({"qkv.weight": module.qkv.weight}) == 1
    with pytest.raises(UserError, match=r"(?s)built weights.*refit.*load the bundle again"):
        loaded.set_loras([(file, 1.0)])


def test_a_bundle_that_was_built_again_is_not_read(tiny, tmp_path):
    module, loaded = tiny
    _, file = file_of(tmp_path, module, ["qkv"])
    (tmp_path / "x.onnx").write_bytes((tmp_path / "x.onnx").read_bytes())
    with pytest.raises(UserError, match=r"(?s)changed after the bundle was loaded.*load the bundle again"):
        loaded.set_loras([(file, 1.0)])


def test_an_engine_with_fixed_weights_takes_none(load, tmp_path):
    model = tiny_models.build()
    loaded = load(traced().clone(), refittable=False)
    _, file = file_of(tmp_path, model.denoiser, ["qkv"])
    with pytest.raises(UserError, match=r"(?s)cannot be replaced.*engine.refittable"):
        loaded.set_loras([(file, 1.0)])
    loaded.close()
    with pytest.raises(UserError, match="was closed"):
        loaded.set_loras([])


def test_an_engine_with_some_of_them_is_not_called(tiny, tmp_path, monkeypatch):
    module, loaded = tiny
    _, file = file_of(tmp_path, module, ["qkv"])
    monkeypatch.setattr(Refitter, "works", False)
    with pytest.raises(BackendUnavailable, match=r"(?s)some may be new.*load the bundle again"):
        loaded.set_loras([(file, 1.0)])
    with pytest.raises(UserError, match="was closed"):
        computes(loaded)


def test_without_memory_on_the_device_the_host_computes(tiny, tmp_path, monkeypatch):
    module, loaded = tiny
    layers, file = file_of(tmp_path, module, ["qkv"])
    compute, failed = runtime_loras._sum, []

    def full(*of):
        if not failed:
            failed.append(True)
            raise torch.OutOfMemoryError
        return compute(*of)

    monkeypatch.setattr(runtime_loras, "_sum", full)
    loaded.set_loras([(file, 1.0)])
    assert_engine_has(merged(module, layers, HALF))


def test_weights_beside_the_model_are_read_where_they_lie(load, tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "INLINE_LIMIT", 0)
    model = tiny_models.build()
    loaded = load(traced().clone())
    assert storage.weights_file(tmp_path / "x.onnx").is_file()
    layers, file = file_of(tmp_path, model.denoiser, ["qkv"])
    loaded.set_loras([(file, 1.0)])
    assert_engine_has(merged(model.denoiser, layers, HALF))
    storage.weights_file(tmp_path / "x.onnx").unlink()
    with pytest.raises(UserError, match="changed after the bundle was loaded"):
        loaded.set_loras([])


@pytest.fixture
def small_parts(monkeypatch):
    """TensorRT gets one weight at a time."""
    monkeypatch.setattr(runtime_loras, "LEAST_PART", 1)
    monkeypatch.setattr(runtime_loras, "LARGEST_PART", 1)


def test_weights_are_given_in_parts(tiny, tmp_path, small_parts):
    module, loaded = tiny
    built = engine()
    layers, file = file_of(tmp_path, module, ["embed", "qkv", "out"])
    assert loaded.set_loras([(file, 1.0)]) == 3
    assert loaded.last_change.parts == 3 and Refitter.given[-1:] == ["qkv.weight.T"]
    assert loaded.last_change.given == sum(built[f"{name}.weight.T"].nbytes for name in layers)
    assert_engine_has(merged(module, layers, HALF))
    assert loaded.set_loras([]) == 3 and all(torch.equal(x, built[name]) for name, x in engine().items())


def test_failed_weight_changes_are_undone(tiny, tmp_path, small_parts):
    """The LoRAs from before are restored, even if their files were replaced."""
    module, loaded = tiny
    layers, file = file_of(tmp_path, module, ["embed", "out"])
    loaded.set_loras([(file, 1.0)])
    before = engine()
    save_file({"of": torch.ones(1)}, file)
    other, wrong = file_of(tmp_path, module, ["embed", "qkv"], "b")
    _, large = file_of(tmp_path, module, ["qkv"], "c")
    with pytest.raises(UserError, match=r"(?s)qkv.weight leaves the range.*at 1e\+39"):
        loaded.set_loras([(wrong, 1.0), (large, 1e39)])
    assert loaded.last_change.parts > 1
    assert all(torch.equal(x, before[name]) for name, x in engine().items())
    assert_engine_has(merged(module, layers, HALF))
    loaded.set_loras([(wrong, 1.0)])
    assert_engine_has(merged(module, other, HALF))


def test_an_engine_that_cannot_be_undone_is_not_called(tiny, tmp_path, small_parts, monkeypatch):
    module, loaded = tiny
    _, file = file_of(tmp_path, module, ["embed", "qkv"])

    def given(refitter, name, weights, where="host"):
        return name == "embed.weight.T" and bool(monkeypatch.setattr(Refitter, "set_named_weights", refuse) or True)

    def refuse(*of):
        return False

    monkeypatch.setattr(Refitter, "set_named_weights", given)
    with pytest.raises(BackendUnavailable, match=r"(?s)half way.*got: TensorRT does not take.*load the bundle again"):
        loaded.set_loras([(file, 1.0)])
    with pytest.raises(UserError, match="was closed"):
        computes(loaded)


def test_a_file_is_read_again_when_it_is_another(tiny, tmp_path, monkeypatch):
    module, loaded = tiny
    layers, file = file_of(tmp_path, module, ["qkv"])
    read, times = runtime_loras.read_lora, []
    monkeypatch.setattr(runtime_loras, "read_lora", lambda path: times.append(path) or read(path))
    loaded.set_loras([(file, 1.0)])
    loaded.set_loras([(file, 0.5), (file, 0.25)])
    assert len(times) == 1
    assert_engine_has(merged(module, layers, 0.75 * HALF))
    layers, file = file_of(tmp_path, module, ["qkv"], layout=tiny_loras.peft(""))
    loaded.set_loras([(file, 0.5)])
    assert len(times) == 2
    assert_engine_has(merged(module, layers, 0.5))
