"""Components that cannot be converted, and unfit recipes and saved pipelines."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from converted_pipelines import convert, options, recipe_of, save
from rich.console import Console
from safetensors.torch import load_file, save_file
from tiny_pipelines import PIPELINES

from trtconvert.bundle import TensorRecord
from trtconvert.cache import Cache
from trtconvert.documents import PIPELINE_INDEX
from trtconvert.errors import GateError, UserError
from trtconvert.models.diffusers import diffusers_model
from trtconvert.models.observation import Observed
from trtconvert.models.saved import copy_without_models
from trtconvert.pipeline import build
from trtconvert.progress import Reporter
from trtconvert.recipe import load_recipe
from trtconvert.runtime.signature import shape_of


def test_folders_that_are_no_part_of_the_pipeline_are_left(saved, tmp_path):
    shutil.copytree(saved / "pipeline", tmp_path / "pipeline")
    (tmp_path / "pipeline" / "media").mkdir()
    (tmp_path / "pipeline" / "media" / "demonstration.mp4").touch()
    copy_without_models(tmp_path / "pipeline", tmp_path / "kept")
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == [PIPELINE_INDEX, "scheduler", "tokenizer"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A saved Stable Diffusion."""
    folder = tmp_path_factory.mktemp("saved")
    save(folder / "pipeline", "stable_diffusion")
    return folder


@pytest.mark.parametrize(
    ("components", "expected"),
    [
        ({"text_encoder_2": {}}, ["no text_encoder_2", "expected: text_encoder, vae_decoder, vae_encoder"]),
        ({"vae_decoder": {"dtype": "float16"}}, ["vae_decoder is not converted to float16", "force_upcast"]),
        (
            {"text_encodr": {}},
            ["components.text_encodr", "expected: all, text_encoder, text_encoder_2, …, vae_decoder"],
        ),
        ({"text_encoder": {"dtyp": "float16"}}, ["unknown field", "did you mean 'dtype'?"]),
    ],
)
def test_components_that_cannot_be_are_refused_before_the_calibration(saved, tmp_path, components, expected):
    with pytest.raises(UserError) as error:
        shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
        recipe = recipe_of(tmp_path, "stable_diffusion", components)
        build(recipe, tmp_path / "bundle", Cache(tmp_path / "cache"), Reporter(Console(quiet=True)))
    for part in ("remedy: ", *expected):
        assert part in str(error.value)
    assert not (tmp_path / "bundle").exists() and not list((tmp_path).glob("cache/calibrate*"))


def test_components_of_another_source_are_refused(tmp_path):
    recipe = {
        "model": {"source": "tiny_models:build"},
        "components": {"all": {}},
        "engine": {"backend": "onnxruntime"},
    }
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    with pytest.raises(UserError, match=r"(?s)has no components beside the denoiser.*model\.source: diffusers"):
        build(
            load_recipe(tmp_path / "recipe.yaml"), tmp_path / "b", Cache(tmp_path / "c"), Reporter(Console(quiet=True))
        )


def test_a_component_whose_error_is_too_large_fails_the_build(saved, tmp_path):
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    with pytest.raises(GateError, match=r"(?s)'last_hidden_state' of text_encoder against float32.*dtype to float32"):
        convert(
            tmp_path,
            "stable_diffusion",
            {"text_encoder": {"dtype": "float16"}},
            verify={"max_component_error": 1e-5},
        )


@pytest.mark.parametrize("size", [0, 1000])
@pytest.mark.parametrize("part", ["text_encoder", "unet", "vae"])
def test_damaged_weights_are_refused(saved, tmp_path, part, size):
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    (weights,) = (tmp_path / "pipeline" / part).glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:size])
    with pytest.raises(UserError, match=rf"(?s)/{part}/.* cannot be read.*expected: a whole .* file.*got: .*remedy: "):
        diffusers_model(tmp_path / "pipeline", **options("stable_diffusion"))


@pytest.mark.parametrize("part", ["text_encoder", "unet", "vae"])
def test_weights_that_a_file_lacks_are_not_made_up(saved, tmp_path, part):
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    (file,) = (tmp_path / "pipeline" / part).glob("*.safetensors")
    weights = load_file(file)
    lost = min(weights)
    save_file({name: x for name, x in weights.items() if name != lost}, file, {"format": "pt"})
    with pytest.raises(
        UserError, match=rf"(?s)weights of {part} in .* are incomplete.*got: 1 missing, .*{lost}.*remedy: "
    ):
        diffusers_model(tmp_path / "pipeline", **options("stable_diffusion"))


def test_shapes_that_depend_on_values_are_refused(saved, monkeypatch):
    """Text encoders and denoisers that cut prompts to their lengths, and loop over them, have such shapes."""

    def forward(self, input_ids, **_):
        return {"last_hidden_state": input_ids[:, : int(input_ids.max())]}

    model = diffusers_model(saved / "pipeline", **options("stable_diffusion"))
    assert model.components is not None
    monkeypatch.setattr("transformers.CLIPTextModel.forward", forward)
    with pytest.raises(
        UserError, match=r"(?s)CLIPTextModel.forward cannot be.*got: .*values.*remedy: leave the component out"
    ):
        model.components("text_encoder")


def test_a_pipeline_of_its_denoiser_alone_has_no_components(tmp_path):
    PIPELINES["flux"][0]().save_pretrained(tmp_path)
    model = diffusers_model(tmp_path, tokens=8, height=32, width=32)
    assert model.components is not None and model.components.names == ("vae_decoder", "vae_encoder")
    with pytest.raises(UserError, match=r"(?s)FluxPipeline has no component 'text_encoder'.*vae_decoder"):
        model.components("text_encoder")


def test_prompts_that_are_not_padded_are_refused(saved, monkeypatch):
    """An engine of one length would refuse other prompts."""
    given = options("stable_diffusion", prompts=["a", "a bird"], batch=[1, 1, 2])
    model = diffusers_model(saved / "pipeline", **given)
    kind = type(model.components.caller.pipe.tokenizer)
    padded = kind.__call__
    monkeypatch.setattr(kind, "__call__", lambda *args, **kwargs: padded(*args, **kwargs | {"padding": "longest"}))
    with pytest.raises(UserError, match=r"(?s)'input_ids' with as many tokens as its longest prompt.*padded to"):
        model.components("text_encoder")
    with pytest.raises(UserError, match="'encoder_hidden_states' with as many tokens as its longest prompt"):
        diffusers_model(saved / "pipeline", **given | {"call": {"guidance_scale": 1.0}})


def test_the_decoder_is_held_to_latents_of_their_magnitude(saved):
    """With some schedulers noisy latents are a hundred times as large, beyond half precision."""
    model = diffusers_model(saved / "pipeline", **options("stable_diffusion"))
    vae = model.components.caller.pipe.vae
    scale = vae.config.scaling_factor
    (latents,) = model.components("vae_decoder").example.values()
    assert latents.std() == pytest.approx(1 / scale, rel=0.1) and latents.mean().abs() < 0.2 / scale
    means, stds = [10.0, 20.0, 30.0, 40.0], [1.0, 2.0, 3.0, 4.0]
    vae.register_to_config(latents_mean=means, latents_std=stds, scaling_factor=1.0)
    (latents,) = model.components("vae_decoder").example.values()
    by_channel = latents.transpose(0, 1).flatten(1)
    assert by_channel.mean(1).tolist() == pytest.approx(means, rel=0.2)
    assert by_channel.std(1).tolist() == pytest.approx(stds, rel=0.4)  # 64 elements each


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((3, 3, 3), 3),
        ((8, 12, 6), "height"),
        ((64, 96, 48), "8*height"),
        ((29, 45, 21), "4*height-3"),
        ((20, 26, 17), None),  # half a step per step
        ((64, 96, 50), None),
    ],
)
def test_a_dimension_is_a_line_through_another(sizes, expected):
    observed = Observed({}, {}, {}, ({},), {"batch": (2, 2, 2), "height": (8, 12, 6)})
    found = observed.dimension(sizes)
    assert found == expected
    if found is not None:
        record = TensorRecord(name="x", dtype="float32", shape=[found])
        assert [shape_of(record.shape, {"height": size}) for size in (8, 12, 6)] == [(size,) for size in sizes]


def test_a_dimension_that_is_no_line_is_refused_in_a_manifest():
    with pytest.raises(ValueError, match="a line through one: height\\*8"):
        TensorRecord(name="x", dtype="float32", shape=["height*8"])
