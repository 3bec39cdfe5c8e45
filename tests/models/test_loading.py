"""Users' saved pipelines: variants, shards, missing and superfluous weights, FP8; each is reported before the calibration."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tiny_pipelines
import torch
from safetensors.torch import load, load_file, save_file

from trtconvert import models
from trtconvert.errors import UserError
from trtconvert.models.diffusers import diffusers_model
from trtconvert.models.identity import identity
from trtconvert.models.loading import load_parts, load_pipeline
from trtconvert.pipeline import copied_images
from trtconvert.recipe import load_recipe
from trtconvert.runtime.libraries import library_class
from trtconvert.runtime.pipeline import make_pipeline
from trtconvert.weights.weight_files import stored_weights

diffusers = pytest.importorskip("diffusers", reason="needs diffusers")

UNET = "diffusion_pytorch_model.safetensors"


@pytest.fixture
def folder(saved, tmp_path) -> Path:
    """A copy of Stable Diffusion with a text encoder, which tests may change."""
    return Path(shutil.copytree(saved, tmp_path / "pipeline"))


def same_weights(pipe, folder: Path, name: str = "unet") -> bool:
    wanted = getattr(load_pipeline(folder), name).state_dict()
    return all(torch.equal(x, wanted[key]) for key, x in getattr(pipe, name).state_dict().items())


def change(path: Path, **tensors: torch.Tensor) -> None:
    save_file(load_file(path) | tensors, path, {"format": "pt"})


@pytest.mark.parametrize("safetensors", [True, False], ids=["safetensors", "bin"])
@pytest.mark.parametrize("shard", ["10GB", "60KB"], ids=["whole", "sharded"])
@pytest.mark.parametrize("variant", [None, "fp16"])
def test_every_way_of_saving_is_loaded(saved, tmp_path, variant, shard, safetensors):
    """A single variant needs no name."""
    for name, part in load_pipeline(saved).components.items():
        if isinstance(part, torch.nn.Module):
            options = {"variant": variant, "max_shard_size": shard}
            if isinstance(part, diffusers.ModelMixin):
                options["safe_serialization"] = safetensors
            part.save_pretrained(tmp_path / name, **options)  # type: ignore[operator]
        elif (saved / name).is_dir():
            shutil.copytree(saved / name, tmp_path / name)
    shutil.copyfile(saved / "model_index.json", tmp_path / "model_index.json")
    stored = stored_weights(tmp_path / "unet")
    assert stored and (len(stored.files) > 1, stored.variant) == (shard == "60KB", variant)
    pipe = load_pipeline(tmp_path)
    for name in ("unet", "text_encoder", "vae"):
        assert same_weights(pipe, saved, name)


@pytest.mark.parametrize("sharded", [False, True])
def test_a_text_encoder_in_files_of_torch_is_loaded(folder, sharded):
    """Older pipelines are published so."""
    path = folder / "text_encoder" / "model.safetensors"
    state, wanted = load_file(path), load_pipeline(folder)
    path.unlink()
    names = sorted(state)
    shards = [names[::2], names[1::2]] if sharded else [names]
    files = [f"pytorch_model-{i + 1:05}-of-00002.bin" if sharded else "pytorch_model.bin" for i in range(len(shards))]
    for file, shard in zip(files, shards, strict=True):
        torch.save({name: state[name] for name in shard}, path.with_name(file))
    if sharded:
        index = {"metadata": {}, "weight_map": {n: f for f, shard in zip(files, shards, strict=True) for n in shard}}
        path.with_name("pytorch_model.bin.index.json").write_text(json.dumps(index))
    got = load_pipeline(folder).text_encoder.state_dict()
    assert all(torch.equal(x, got[name]) for name, x in wanted.text_encoder.state_dict().items())


def test_a_variant_is_taken_where_it_is_asked_for(folder):
    """Models without this variant, which published pipelines have, are loaded without a variant."""
    plain = load_pipeline(folder)
    state = load_file(folder / "unet" / UNET)
    save_file({name: x * 2 for name, x in state.items()}, folder / "unet" / UNET.replace(".", ".fp16.", 1))
    assert same_weights(load_pipeline(folder), folder)
    name = "conv_in.weight"
    doubled = load_pipeline(folder, variant="fp16")
    assert torch.equal(doubled.unet.state_dict()[name], 2 * plain.unet.state_dict()[name])
    model = diffusers_model(folder, height=32, width=32, variant="fp16")
    assert torch.equal(model.denoiser.state_dict()[f"unet.{name}"], doubled.unet.state_dict()[name])
    with pytest.raises(UserError, match=r"(?s)no variant fp61.*expected: fp16.*did you mean 'fp16'"):
        load_pipeline(folder, variant="fp61")
    (folder / "unet" / UNET).rename(folder / "unet" / UNET.replace(".", ".bf16.", 1))
    with pytest.raises(UserError, match=r"(?s)unet has weights in several variants.*got: bf16, fp16.*variant: bf16"):
        load_pipeline(folder)


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("down_blocks.0.attentions.0.transformer_blocks.0.attn2.processor.to_k_ip.weight", "unload_ip_adapter"),
        ("down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q.lora_A.weight", "fuse_lora"),
        ("mid_block.extra.weight", r"ignore: \['mid_block.extra.weight'\]"),
    ],
)
def test_surplus_tensors_are_refused_by_name(folder, name, remedy):
    change(folder / "unet" / UNET, **{name: torch.zeros(4, 4)})
    with pytest.raises(UserError, match=rf"(?s)weights of unet .* more than.*got: 1 more, {name}.*remedy: .*{remedy}"):
        load_pipeline(folder)
    assert load_pipeline(folder, ignore=["*.to_k_ip.*", "*lora*", "mid_block.extra.*"])


def test_surplus_tensors_of_a_text_encoder_are_refused_except_for_its_heads(folder):
    path = folder / "text_encoder" / "model.safetensors"
    change(path, **{"text_projection.weight": torch.zeros(32, 32), "logit_scale": torch.ones(())})
    assert load_pipeline(folder)
    change(path, **{"encoder.layers.0.self_attn.q_proj.lora_A.weight": torch.zeros(4, 32)})
    with pytest.raises(UserError, match=r"(?s)weights of text_encoder .* more than.*got: 1 more, .*lora_A"):
        load_pipeline(folder)


@pytest.mark.parametrize("part", ["unet", "text_encoder"])
@pytest.mark.parametrize("suffix", ["scale_weight", "weight_scale"])
def test_fp8_is_multiplied_by_its_scales(folder, part, suffix):
    """Scales have the names of ComfyUI and ModelOpt; scales of a layer's inputs, which stay in the model's type, pass."""
    path = next((folder / part).glob("*.safetensors"))
    plain, state = load_pipeline(folder), load(path.read_bytes())
    wanted = {name: x.clone() for name, x in getattr(plain, part).state_dict().items()}
    layers = [name.removesuffix(".weight") for name in state if name.endswith((".to_q.weight", ".fc1.weight"))][:2]
    for layer in layers:
        weight = state[f"{layer}.weight"]
        scale = weight.abs().max() / 448
        state[f"{layer}.weight"] = (weight / scale).to(torch.float8_e4m3fn)
        state[f"{layer}.{suffix}"] = scale
        state[f"{layer}.{'scale_input' if suffix == 'scale_weight' else 'input_scale'}"] = torch.ones(())
    state["scaled_fp8"] = torch.zeros(0).to(torch.float8_e4m3fn)
    save_file(state, path, {"format": "pt"})
    got = getattr(load_pipeline(folder), part).state_dict()
    for name, x in wanted.items():
        if any(name == f"{layer}.weight" for layer in layers):
            assert 0 < (got[name] - x).norm() / x.norm() < 0.04  # E4M3 has 3 bits after the first
        else:
            assert torch.equal(got[name], x)


def test_fp8_without_scales_is_what_it_says(folder):
    path = folder / "unet" / UNET
    state = {name: x.to(torch.float8_e4m3fn) for name, x in load_file(path).items()}
    save_file(state, path, {"format": "pt"})
    got = load_pipeline(folder).unet.state_dict()
    assert all(torch.equal(x.float(), got[name]) for name, x in state.items())


def test_a_safety_checker_that_was_not_fetched_is_not_missed(folder):
    index = json.loads((folder / "model_index.json").read_text())
    index |= {
        "safety_checker": ["stable_diffusion", "StableDiffusionSafetyChecker"],
        "feature_extractor": ["transformers", "CLIPFeatureExtractor"],
        "requires_safety_checker": True,
    }
    (folder / "model_index.json").write_text(json.dumps(index))
    pipe = load_pipeline(folder)
    assert pipe.safety_checker is None and pipe.feature_extractor is None
    shutil.rmtree(folder / "unet")
    with pytest.raises(UserError, match=r"(?s)not whole.*expected: the folder unet.*got: no unet.*\[null, null\]"):
        load_pipeline(folder)


@pytest.mark.as_of(transformers="5")
def test_a_class_is_found_by_the_name_that_it_had(folder):
    transformers = pytest.importorskip("transformers")
    transformers.CLIPImageProcessor().save_pretrained(folder / "feature_extractor")
    index = json.loads((folder / "model_index.json").read_text())
    index["feature_extractor"] = ["transformers", "CLIPFeatureExtractor"]
    (folder / "model_index.json").write_text(json.dumps(index))
    assert isinstance(load_pipeline(folder).feature_extractor, transformers.CLIPImageProcessor)
    assert library_class("transformers", "CLIPFeatureExtractor") is transformers.CLIPImageProcessor  # in a bundle


def test_a_misnamed_weights_file_is_not_called_missing(folder, tmp_path):
    (folder / "unet" / UNET).rename(folder / "unet" / "my-unet.safetensors")
    with pytest.raises(
        UserError, match=r"(?s)no weights of unet.*got: config.json, my-unet.safetensors.*remedy: rename my"
    ):
        load_pipeline(folder)
    (tmp_path / "alone").mkdir()
    (folder / "unet" / "my-unet.safetensors").rename(tmp_path / "alone" / "my-unet.safetensors")
    with pytest.raises(UserError, match=r"(?s)no diffusers pipeline.*got: a folder with my-unet.safetensors.*config"):
        load_pipeline(tmp_path / "alone")
    with pytest.raises(UserError, match=r"(?s)no diffusers pipeline.*got: no such folder"):
        load_pipeline(tmp_path / "nowhere")


def test_a_link_to_weights_that_are_gone_is_told(folder, tmp_path):
    """A cache's file of weights was deleted, or a folder was copied without it."""
    (folder / "unet" / UNET).unlink()
    (folder / "unet" / UNET).symlink_to(tmp_path / "blob")
    with pytest.raises(UserError, match="no weights of unet") as error:
        load_pipeline(folder)
    assert error.value.got == f"no {tmp_path.resolve() / 'blob'}" and "rename" not in error.value.remedy


def test_the_nearest_name_of_a_denoiser_is_told(folder):
    with pytest.raises(UserError, match="no denoiser 'unett'") as error:
        diffusers_model(folder, denoiser="unett")
    assert error.value.remedy == "did you mean 'unet'?"


def test_a_pointer_of_git_lfs_is_told(folder):
    (folder / "unet" / UNET).write_text("version https://git-lfs/spec/v1\noid sha256:0\nsize 3\n")
    with pytest.raises(UserError, match=r"(?s)diffusion_pytorch_model.safetensors have not been fetched.*git lfs pull"):
        load_pipeline(folder)


@pytest.mark.as_of(transformers="5")
def test_names_of_older_versions_are_known(folder):
    """Stable Diffusion 1.5 was published with other names in the VAE's attention, a prefix of CLIP, and a table that models
    compute."""
    pipe = load_pipeline(folder)
    path = folder / "vae" / UNET
    renames = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}
    state = load_file(path)
    for own, older in renames.items():
        state = {name.replace(f"attentions.0.{own}.", f"attentions.0.{older}."): x for name, x in state.items()}
    assert any(".proj_attn." in name for name in state)
    save_file(state, path, {"format": "pt"})
    path = folder / "text_encoder" / "model.safetensors"
    state = {f"text_model.{name}": x for name, x in load_file(path).items()}
    state["text_model.embeddings.position_ids"] = torch.arange(8)[None]
    save_file(state, path, {"format": "pt"})
    got = load_pipeline(folder)
    for name in ("vae", "text_encoder"):
        wanted = getattr(pipe, name).state_dict()
        assert all(torch.equal(x, wanted[key]) for key, x in getattr(got, name).state_dict().items())


def test_an_encoder_in_fp8_by_its_configuration_is_scaled(tmp_path):
    """T5 as transformers saves it in FP8, with settings of the quantiser, which needs a GPU; its embedding has two names."""
    pipe = tiny_pipelines.with_text("pixart")
    pipe.save_pretrained(tmp_path)
    path = tmp_path / "text_encoder" / "model.safetensors"
    state = load_file(path)
    name = "encoder.block.0.layer.0.SelfAttention.q.weight"
    state["encoder.embed_tokens.weight"] = state["shared.weight"].clone()
    scale = state[name].abs().max() / 448
    state[name] = (state[name] / scale).to(torch.float8_e4m3fn)
    state[f"{name}_scale_inv"] = scale[None, None]
    save_file(state, path, {"format": "pt"})
    settings = tmp_path / "text_encoder" / "config.json"
    config = json.loads(settings.read_text()) | {"quantization_config": {"quant_method": "fp8"}}
    settings.write_text(json.dumps(config))
    got, wanted = load_pipeline(tmp_path).text_encoder.state_dict(), pipe.text_encoder.state_dict()
    assert 0 < (got[name] - wanted[name]).norm() / wanted[name].norm() < 0.04
    assert all(torch.equal(x, got[key]) for key, x in wanted.items() if key != name)


def test_code_in_a_file_of_torch_is_not_executed(folder):
    path = folder / "unet" / UNET
    torch.save(load_file(path) | {"more": Path("x")}, path.with_name("diffusion_pytorch_model.bin"))
    path.unlink()
    with pytest.raises(UserError, match=r"(?s)diffusion_pytorch_model.bin holds more than weights.*got: pathlib"):
        load_pipeline(folder)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"ignore": "lora_*"}, "a list of patterns"),
        ({"variant": 16}, "a text"),
        ({"variant": ""}, "a text"),
        ({"denoiser": ""}, "the name of a model"),
    ],
)
def test_options_of_another_kind_are_refused(folder, options, told):
    """A text is a list of letters, and the letter * would match every name."""
    with pytest.raises(UserError, match=rf"(?s)model.options.{next(iter(options))} does not fit.*expected: {told}"):
        load_pipeline(folder, **options)


def control_nets(folder: Path, count: int) -> Any:
    """Saves a pipeline with so many ControlNets."""
    base = tiny_pipelines.with_text("stable_diffusion")
    nets = [
        tiny_pipelines.randomised(
            diffusers.ControlNetModel.from_unet(base.unet, conditioning_embedding_out_channels=(8, 8, 8))
        )
        for _ in range(count)
    ]
    nets[-1].conv_in.weight.mul_(2)
    pipe = diffusers.StableDiffusionControlNetPipeline(
        **base.components, controlnet=nets, requires_safety_checker=False
    )
    pipe.save_pretrained(folder)
    return pipe


def test_a_pipeline_follows_two_images_through_two_control_nets(tmp_path):
    pipe = control_nets(tmp_path / "pipeline", 2)
    got = load_pipeline(tmp_path / "pipeline").controlnet
    for mine, wanted in zip(got.nets, pipe.controlnet.nets, strict=True):
        assert all(torch.equal(x, mine.state_dict()[name]) for name, x in wanted.state_dict().items())
    for seed, name in enumerate(("lines", "depth")):
        tiny_pipelines.picture(tmp_path / f"{name}.png", seed)
    options = {"height": 32, "width": 32, "batch": [1, 1, 2], "prompts": ["a cat"]}
    (tmp_path / "recipe.yaml").write_text(
        json.dumps(
            {
                "model": {
                    "source": "diffusers",
                    "weights": "pipeline",
                    "images": {"image": ["lines.png", "depth.png"]},
                    "options": options,
                }
            }
        )
    )
    section = load_recipe(tmp_path / "recipe.yaml").model
    model = models.load(section)
    drawn = model.sample(model.denoiser, [0, 1], steps=2, solver="ddim")
    (tmp_path / "bundle").mkdir()
    pictures = section.images["image"]
    assert isinstance(pictures, list)
    kept = copied_images("image", pictures, tmp_path / "bundle")
    assert kept == [Path("images/image-0.png"), Path("images/image-1.png")]
    assert sorted(path.name for path in (tmp_path / "bundle" / "images").iterdir()) == ["image-0.png", "image-1.png"]
    swapped = section.model_copy(update={"images": {"image": pictures[::-1]}})
    assert identity(swapped) != identity(section)
    other = models.load(swapped)
    assert not torch.allclose(other.sample(other.denoiser, [0, 1], steps=2, solver="ddim"), drawn, atol=1e-3)
    (tmp_path / "pipeline" / "controlnet_1" / UNET).unlink()
    with pytest.raises(UserError, match=r"(?s)no weights of controlnet.*got: config.json"):
        load_pipeline(tmp_path / "pipeline")


@pytest.mark.parametrize(
    "setting", [[1, 2], [2], [], ["early", "late"], ["diffusers", "AutoencoderKL"], [[1], [2]], None]
)
def test_a_list_in_an_index_may_be_a_setting(tmp_path, setting):
    """A Krea 2 has a list of the text encoder's layers that it reads; a small one has two."""
    tiny_pipelines.pipeline(diffusers.Krea2Pipeline).save_pretrained(tmp_path)
    index = json.loads((tmp_path / "model_index.json").read_text())
    settings = {"text_encoder_select_layers": setting, "of_another_version": setting}
    (tmp_path / "model_index.json").write_text(json.dumps(index | settings))
    for pipe in (load_pipeline(tmp_path), make_pipeline(tmp_path, {})):
        if setting is not None:  # the pipeline replaces null by its default
            assert pipe.text_encoder_select_layers == tuple(setting)
        assert pipe.text_encoder is None and pipe.scheduler is not None


@pytest.mark.parametrize(
    ("entry", "got"),
    [
        ([1, 2], r"\[1, 2\]"),
        (["diffusers", None], "None"),
        ([["diffusers"], ["AutoencoderKL"]], "AutoencoderKL"),
        ("AutoencoderKL", "AutoencoderKL"),
        (["diffusers"], "diffusers"),
    ],
)
def test_an_entry_of_a_component_that_names_no_class_is_refused(folder, entry, got):
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps(index | {"vae": entry}))
    for read in (load_pipeline, lambda folder: make_pipeline(folder, {})):
        with pytest.raises(
            UserError, match=rf"(?s)entry 'vae' of model_index.json.*got: .*{got}.*remedy: save the pipe"
        ):
            read(folder)


def test_two_texts_that_are_no_library_and_class_are_refused(folder):
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps(index | {"vae": ["early", "late"]}))
    with pytest.raises(UserError, match=r"(?s)cannot be loaded.*early.*remedy: save the pipeline again"):
        load_pipeline(folder)


@pytest.mark.parametrize("damage", ["{", "[]", '{"_class_name": "NoPipeline"}', "{}"])
def test_a_damaged_index_is_refused_by_everything_that_reads_it(folder, damage):
    """`trtconvert run` loads the models that a bundle lacks from the original pipeline."""
    (folder / "model_index.json").write_text(damage)
    for read in (load_pipeline, lambda folder: load_parts(["unet"], folder)):
        with pytest.raises(
            UserError, match=r"(?s)the pipeline in .* cannot be loaded.*remedy: save the pipeline again"
        ):
            read(folder)


@pytest.mark.as_of(diffusers="0.42")
@pytest.mark.parametrize("library", ["diffusers", "wuerstchen"])
def test_a_class_that_is_not_installed_is_named_with_its_component(folder, library):
    """diffusers keeps Stable Cascade's decoder where it does not look for it."""
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps(index | {"vae": [library, "PaellaVQModel"]}))
    with pytest.raises(UserError, match=rf"(?s)no class for vae.*got: PaellaVQModel of {library}") as error:
        load_pipeline(folder)
    assert '"vae": [null, null]' in error.value.remedy
    (folder / "model_index.json").write_text(json.dumps(index | {"vae": [None, None]}))
    assert load_pipeline(folder).vae is None
