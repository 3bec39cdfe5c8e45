"""LoRAs in recipes: builds, their cache, text encoders, notices and refusals."""

import json
from dataclasses import replace

import onnx
import pytest
import tiny_loras
import tiny_models
import tiny_pipelines
import torch
from merged_loras import CONFIG, HALF, UNET, assert_close, made, model_of
from onnx import numpy_helper
from safetensors.torch import save_file
from support import refusal, reused, run, tiny_recipe

from trtconvert import models, runtime
from trtconvert.bundle import read_manifest
from trtconvert.errors import BackendUnavailable, UserError
from trtconvert.evaluate.evaluation import full_precision
from trtconvert.models.identity import identity
from trtconvert.models.lora import merge_loras
from trtconvert.recipe import LoraSection, ModelSection, load_recipe
from trtconvert.weights.lora import read_lora
from trtconvert.weights.lora_names import flat


def recipe_with(folder, *loras, **sections):
    path = tiny_recipe(folder, **sections)
    recipe = json.loads(path.read_text())
    path.write_text(json.dumps(recipe | {"loras": list(loras)}))
    return path


def built(folder, *loras):
    recipe = recipe_with(folder, *loras)
    return run("build", recipe, "-o", folder / "bundle", "--cache", folder / "cache")


def test_builds_follow_the_files_and_scales(tmp_path, monkeypatch):
    """The model comes from a user's function, and its modules have the user's names."""
    base = tiny_models.build().denoiser
    layers = tiny_loras.layers_of(base, ["qkv", "out"])
    for name in ("a", "b"):
        tiny_loras.save(tmp_path / f"{name}.safetensors", layers, tiny_loras.kohya())
    first = built(tmp_path, {"file": "a.safetensors", "scale": 0.5})
    assert first.exit_code == 0, first.output
    manifest = read_manifest(tmp_path / "bundle")
    assert [(str(lora.file), lora.scale) for lora in manifest.recipe.loras] == [("a.safetensors", 0.5)]
    assert "LoRA" in run("inspect", tmp_path / "bundle").output
    again = built(tmp_path, {"file": "b.safetensors", "scale": 0.5})
    assert all(reused(again).values())  # the same file under another name

    weights = onnx.load(tmp_path / "bundle" / "denoiser.onnx").graph.initializer
    found = next(numpy_helper.to_array(weight) for weight in weights if weight.name == "qkv.weight.T")
    deltas = {name: layer.delta() for name, layer in layers.items()}
    expected = tiny_loras.with_deltas(base.state_dict(), deltas, 0.5 * HALF)
    torch.testing.assert_close(torch.tensor(found).T, expected["qkv.weight"])

    # The model that a bundle is compared with has the LoRAs too. They are looked for in the current folder.
    loaded = runtime.load(tmp_path / "bundle")
    with pytest.raises(BackendUnavailable, match=r"(?s)LoRAs.*cannot be changed.*other loras in the recipe"):
        loaded["denoiser"].set_loras([(tmp_path / "a.safetensors", 1.0)])
    monkeypatch.chdir(tmp_path / "cache")
    assert full_precision(loaded, None) is None
    with pytest.raises(UserError, match=r"(?s)LoRA of the model.*no b\.safetensors.*in the folder of the LoRA"):
        full_precision(loaded, tmp_path / "a.safetensors")
    monkeypatch.chdir(tmp_path)
    source = full_precision(loaded, None)
    assert source is not None
    assert_close(source.denoiser.state_dict(), expected)


def test_an_identity_counts_files_scales_targets_and_settings(tmp_path):
    section = ModelSection(source="tiny_models:build")
    layers = tiny_loras.layers_of(tiny_models.build().denoiser, ["qkv"])
    for name, layout in (("a", tiny_loras.kohya()), ("b", tiny_loras.peft(""))):
        tiny_loras.save(tmp_path / f"{name}.safetensors", layers, layout)

    def found(file="a", **fields):
        return identity(section, [LoraSection(file=tmp_path / f"{file}.safetensors", **fields)])

    identities = [identity(section), found(), found("b"), found(scale=0.5), found(target="text_encoder")]
    assert identities[0] == identity(section, [])
    (tmp_path / "adapter_config.json").write_text(json.dumps(CONFIG))
    identities.append(found())
    assert len(set(identities)) == len(identities)


def test_builds_refuse_what_does_not_fit_before_they_calibrate(tmp_path):
    tiny_loras.save(
        tmp_path / "a.safetensors", tiny_loras.layers_of(made("stable_diffusion"), UNET), tiny_loras.kohya()
    )
    outcome = built(tmp_path, {"file": "a.safetensors"})
    refusal(outcome, "a.safetensors is for another model", "modules of tiny; the nearest is")
    assert not list((tmp_path / "cache").glob("observed-*"))
    refusal(
        built(tmp_path, {"file": "none.safetensors"}), "there is no LoRA", "none.safetensors", "relative to the recipe"
    )
    refusal(built(tmp_path, {"file": "a.safetensors", "target": "text_encoder"}), "tiny has no text_encoder")
    refusal(built(tmp_path, {"file": "a.safetensors", "target": "vae"}), "recipe.yaml:1", "loras.0.target")
    refusal(built(tmp_path, {"file": "a.safetensors", "scal": 1}), "'loras.0.scal'", "did you mean 'scale'?")


@pytest.fixture(scope="module")
def with_text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sdxl")
    tiny_pipelines.with_text("stable_diffusion_xl").save_pretrained(folder)
    return folder


TEXT = "encoder.layers.0.self_attn.q_proj"


@pytest.mark.as_of(transformers="5")
def test_text_encoders_get_their_parts(tmp_path, with_text):
    """kohya's names begin with text_model, unlike those of newer transformers."""
    options = tiny_pipelines.PIPELINES["stable_diffusion_xl"][1]
    section = {"source": "diffusers", "weights": str(with_text), "options": options}
    recipe = recipe_with(tmp_path, model=section)
    chosen = load_recipe(recipe).model
    before = models.load(chosen)
    assert before.components is not None
    encoders = {name: before.components.module(name) for name in ("text_encoder", "text_encoder_2")}
    own = {"text_encoder": TEXT, "text_encoder_2": f"text_model.{TEXT}"}
    layers = {
        "lora_te1_text_model_" + TEXT.replace(".", "_"): encoders["text_encoder"].get_parameter(f"{TEXT}.weight"),
        "lora_te2_text_model_" + TEXT.replace(".", "_"): encoders["text_encoder_2"].get_parameter(
            f"text_model.{TEXT}.weight"
        ),
        "lora_unet_" + UNET[0].replace(".", "_"): before.denoiser.get_parameter(f"unet.{UNET[0]}.weight"),
    }
    layers = {name: tiny_loras.layer_of(weight, seed) for seed, (name, weight) in enumerate(layers.items())}
    file = tiny_loras.save(tmp_path / "lora.safetensors", layers, tiny_loras.kohya(""))
    after = models.load(chosen, [LoraSection(file=file, target=name, scale=2.0) for name in encoders])
    assert after.components is not None
    for (name, module), layer in zip(encoders.items(), layers.values(), strict=False):
        expected = tiny_loras.with_deltas(module.state_dict(), {own[name]: layer.delta()}, 2 * HALF)
        assert_close(after.components.module(name).state_dict(), expected)
    assert_close(after.denoiser.state_dict(), dict(before.denoiser.state_dict()))
    with pytest.raises(
        UserError, match=r"(?s)no text_encoder_3.*denoiser, text_encoder, text_encoder_2\n.*correct target"
    ):
        models.load(chosen, [LoraSection(file=file, target="text_encoder_3")])


@pytest.mark.as_of(transformers="5")
def test_older_names_of_text_encoders_are_known(tmp_path, with_text):
    module = tiny_pipelines.clip()
    holder = model_of(module)
    layers = tiny_loras.layers_of(module, [TEXT])
    start = f"text_encoder.text_model.{TEXT.replace('q_proj', 'to_q_lora')}"
    tensors = {f"{start}.up.weight": layers[TEXT].up, f"{start}.down.weight": layers[TEXT].down}
    save_file(tensors, tmp_path / "lora.safetensors")
    expected = tiny_loras.with_deltas(module.state_dict(), {TEXT: layers[TEXT].delta()}, 1.0)

    class Text:
        names = ("text_encoder",)

        def module(self, name):
            return module

    merge_loras(
        replace(holder, components=Text()), [LoraSection(file=tmp_path / "lora.safetensors", target="text_encoder")]
    )
    assert_close(module.state_dict(), expected)


def test_t5_is_the_second_text_encoder_of_flux_and_the_third_of_stable_diffusion_3(tmp_path):
    """kohya's scripts name it the third in both; a file with parts for the second too tells them apart."""
    module = tiny_pipelines.t5()
    query = "encoder.block.0.layer.0.SelfAttention.q"
    layer = tiny_loras.layer_of(module.get_parameter(f"{query}.weight"), 0)
    names = {"lora_te3_" + flat(query): layer}
    shapes = {name: tuple(x.shape) for name, x in module.state_dict().items()}
    flux = read_lora(tiny_loras.save(tmp_path / "flux.safetensors", names, tiny_loras.kohya("")))
    sd3 = {"lora_te2_" + flat(query): layer, f"text_encoders.t5xxl.transformer.{query}": layer}
    both = read_lora(tiny_loras.save(tmp_path / "sd3.safetensors", sd3, tiny_loras.peft("")))
    found = [
        [update.weight for update in lora.updates(target, shapes, "T5")]
        for lora, target in ((flux, "text_encoder_2"), (both, "text_encoder_2"), (both, "text_encoder_3"))
    ]
    assert found == [[f"{query}.weight"]] * 3
    assert both.components == ["text_encoder_2", "text_encoder_3 or text_encoder_2"]


@pytest.mark.soak
def test_a_pipeline_is_built_with_its_loras(tmp_path):
    """In half precision the LoRA is merged before weights are rounded. ONNX Runtime cannot change LoRAs later."""
    pipe = tiny_pipelines.stable_diffusion()
    pipe.save_pretrained(tmp_path / "pipeline")
    layers = tiny_loras.layers_of(pipe.unet, UNET)
    tiny_loras.save(tmp_path / "style.safetensors", layers, tiny_loras.kohya())
    options = tiny_pipelines.PIPELINES["stable_diffusion"][1] | {"batch": [1, 1, 2]}
    model = {"source": "diffusers", "weights": "pipeline", "dtype": "float16", "options": options}
    verify = {"samples": 1, "steps": 2, "min_psnr": 15}
    recipe = recipe_with(tmp_path, {"file": "style.safetensors", "scale": 0.8}, model=model, verify=verify)
    outcome = run("build", recipe, "-o", tmp_path / "bundle", "--cache", tmp_path / "cache")
    assert outcome.exit_code == 0, outcome.output
    weights = {
        w.name: numpy_helper.to_array(w) for w in onnx.load(tmp_path / "bundle" / "denoiser.onnx").graph.initializer
    }
    deltas = {name: layer.delta() for name, layer in layers.items()}
    for name, expected in tiny_loras.with_deltas(pipe.unet.state_dict(), deltas, 0.8 * HALF).items():
        if name.removesuffix(".weight") in layers:
            turned = weights.get(f"unet.{name}.T")
            found = torch.tensor(weights[f"unet.{name}"] if turned is None else turned.T)
            torch.testing.assert_close(found, expected.half(), rtol=1e-3, atol=1e-6)
    with runtime.load(tmp_path / "bundle") as bundle:
        for called in (bundle["denoiser"], bundle.as_diffusers()):
            with pytest.raises(BackendUnavailable, match=r"(?s)LoRAs.*cannot be changed.*other loras in the recipe"):
                called.set_loras([(tmp_path / "style.safetensors", 1.0)])


@pytest.mark.soak
def test_parts_that_nothing_takes_are_told(tmp_path):
    base = tiny_models.build().denoiser
    layers = {"lora_unet_out": base.out.weight, "lora_te1_q": torch.ones(8, 8), "lora_te3_q": torch.ones(8, 8)}
    layers = {name: tiny_loras.layer_of(weight, 0) for name, weight in layers.items()}
    tiny_loras.save(tmp_path / "a.safetensors", layers, tiny_loras.kohya(""))
    outcome = built(tmp_path, {"file": "a.safetensors"})
    assert outcome.exit_code == 0, outcome.output
    told = " ".join(outcome.output.split())
    assert "a.safetensors has parts for text_encoder, text_encoder_3 or text_encoder_2 too, which are ignored" in told
