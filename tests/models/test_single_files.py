"""One file of weights in the layout of the training code, read by diffusers' rules, with configurations from a folder."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import original_layouts as layouts
import pytest
import tiny_pipelines
import torch
from converted_pipelines import recipe_of
from rich.console import Console
from safetensors.torch import load_file, save_file
from tolerances import INT8_IMAGES_PSNR
from torch import Tensor

from trtconvert import models, runtime
from trtconvert.cache import Cache
from trtconvert.errors import BackendUnavailable, UserError
from trtconvert.evaluate.verify import psnr
from trtconvert.models.identity import identity
from trtconvert.models.loading import load_pipeline
from trtconvert.models.saved import copy_without_models
from trtconvert.models.single_file import states_of
from trtconvert.pipeline import build
from trtconvert.progress import Reporter
from trtconvert.recipe import ModelSection

diffusers = pytest.importorskip("diffusers", reason="needs diffusers")

UNET, MIDDLE = "model.diffusion_model.", "model.diffusion_model.middle_block.1."


def stable_diffusion(pipe: Any) -> dict[str, Tensor]:
    """All models of Stable Diffusion 1.x in one file, with left-overs of training."""
    position_ids = {"cond_stage_model.transformer.text_model.embeddings.position_ids": torch.arange(8)[None]}
    marks = {"betas": torch.ones(4), "model_ema.decay": torch.ones(()), f"{UNET}accum_iteration": torch.ones(1)}
    return (
        layouts.with_prefix(UNET, layouts.ldm_unet(pipe.unet))
        | layouts.with_prefix("first_stage_model.", layouts.ldm_vae(pipe.vae))
        | layouts.with_prefix("cond_stage_model.transformer.", layouts.clip(pipe.text_encoder))
        | position_ids
        | marks
    )


def stable_diffusion_xl(pipe: Any) -> dict[str, Tensor]:
    return (
        layouts.with_prefix(UNET, layouts.ldm_unet(pipe.unet))
        | layouts.with_prefix("first_stage_model.", layouts.ldm_vae(pipe.vae))
        | layouts.with_prefix("conditioner.embedders.0.transformer.", layouts.clip(pipe.text_encoder))
        | layouts.with_prefix("conditioner.embedders.1.model.", layouts.open_clip(pipe.text_encoder_2))
    )


def stable_diffusion_3(pipe: Any) -> dict[str, Tensor]:
    """The file that is published with all three text encoders."""
    return (
        layouts.with_prefix(UNET, layouts.sd3(pipe.transformer))
        | layouts.with_prefix("first_stage_model.", layouts.ldm_vae(pipe.vae))
        | layouts.with_prefix("text_encoders.clip_l.transformer.", layouts.clip(pipe.text_encoder))
        | layouts.with_prefix("text_encoders.clip_g.transformer.", layouts.clip(pipe.text_encoder_2))
        | layouts.with_prefix("text_encoders.t5xxl.transformer.", pipe.text_encoder_3.state_dict())
    )


def wan(pipe: Any) -> dict[str, Tensor]:
    """The transformer alone; the folder of configurations has the VAE and the text encoder."""
    return layouts.wan(pipe.transformer)


def flux_by_diffusers(pipe: Any) -> dict[str, Tensor]:
    """A file with all models by ComfyUI, with diffusers' names of the transformer."""
    return (
        layouts.with_prefix(UNET, pipe.transformer.state_dict())
        | layouts.with_prefix("vae.", layouts.ldm_vae(pipe.vae))
        | layouts.with_prefix("text_encoders.clip_l.transformer.", layouts.clip(pipe.text_encoder))
        | layouts.with_prefix("text_encoders.t5xxl.transformer.", pipe.text_encoder_2.state_dict())
    )


FILES: dict[str, tuple[Callable[[Any], dict[str, Tensor]], set[str]]] = {
    "stable_diffusion": (stable_diffusion, {"unet", "vae", "text_encoder"}),
    "stable_diffusion_xl": (stable_diffusion_xl, {"unet", "vae", "text_encoder", "text_encoder_2"}),
    "stable_diffusion_3": (
        stable_diffusion_3,
        {"transformer", "vae", "text_encoder", "text_encoder_2", "text_encoder_3"},
    ),
    "wan": (wan, {"transformer"}),
    "flux": (flux_by_diffusers, {"transformer", "vae", "text_encoder", "text_encoder_2"}),
}


def published(folder: Path, name: str) -> tuple[Any, dict[str, Tensor]]:
    """Returns a tiny pipeline and its weights in a layout, and saves everything that this file does not hold in `folder`."""
    pipe = tiny_pipelines.with_text(name)
    make, held = FILES[name]
    pipe.save_pretrained(folder)
    for part in held:
        for weights in (folder / part).glob("*.safetensors"):
            weights.unlink()
    return pipe, {key: x.clone().contiguous() for key, x in make(pipe).items()}


@pytest.fixture(scope="module")
def sd(tmp_path_factory) -> tuple[Path, dict[str, Tensor]]:
    """The folder of configurations and the weights of Stable Diffusion; tests must not change them."""
    folder = tmp_path_factory.mktemp("sd") / "config"
    return folder, published(folder, "stable_diffusion")[1]


def assert_same(got: Any, wanted: Any) -> None:
    for name, part in wanted.components.items():
        if isinstance(part, torch.nn.Module):
            state = getattr(got, name).state_dict()
            for key, x in part.state_dict().items():
                assert torch.equal(state[key], x), f"{name}.{key}"


@pytest.mark.parametrize("name", FILES)
def test_a_file_gives_the_pipeline_that_it_was_made_of(tmp_path, name):
    pipe, weights = published(tmp_path / "config", name)
    save_file(weights, tmp_path / "model.safetensors")
    assert_same(load_pipeline(tmp_path / "model.safetensors", config=tmp_path / "config"), pipe)


def test_the_text_encoder_of_stable_diffusion_2_is_read(sd, tmp_path):
    """The file has OpenCLIP's layout, with a last block that diffusers' text encoder lacks."""
    folder, weights = sd
    pipe = tiny_pipelines.with_text("stable_diffusion")
    encoder = layouts.with_prefix("cond_stage_model.model.", layouts.open_clip(pipe.text_encoder))
    last = {"cond_stage_model.model.transformer.resblocks.23.ln_1.weight": torch.ones(32)}
    others = {name: x for name, x in weights.items() if not name.startswith("cond_stage")}
    save_file(others | encoder | last, tmp_path / "model.safetensors")
    assert_same(load_pipeline(tmp_path / "model.safetensors", config=folder), pipe)


@pytest.mark.parametrize("suffix", [".ckpt", ".bin", ".pt"])
def test_files_of_torch_are_read_without_their_code(sd, tmp_path, suffix):
    folder, weights = sd
    path = tmp_path / f"model{suffix}"
    torch.save({"state_dict": weights, "global_step": 7}, path)
    assert torch.equal(
        load_pipeline(path, config=folder).unet.conv_in.weight, weights[f"{UNET}input_blocks.0.0.weight"]
    )
    torch.save({"state_dict": weights, "callbacks": Path("x")}, path)
    with pytest.raises(UserError, match=r"(?s)holds more than weights.*got: pathlib.*only code.*remedy: .*save_file"):
        load_pipeline(path, config=folder)
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(UserError, match=rf"(?s)model{suffix} cannot be read.*remedy: get the file again"):
        load_pipeline(path, config=folder)


def test_the_folder_of_a_file_is_its_configuration(sd, tmp_path):
    """Published single files lie beside the folders of the pipeline."""
    folder, weights = sd
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    save_file(weights, tmp_path / "v1-5.safetensors")
    assert load_pipeline(tmp_path / "v1-5.safetensors").unet is not None


def test_without_a_configuration_it_is_told_what_the_file_is(tmp_path, monkeypatch):
    """The remedy names cached configurations of diffusers, and works."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "empty"))
    _, weights = published(tmp_path / "config", "wan")
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(
        UserError,
        match=r"(?s)does not say what.*expected: model.config: .*remedy: add `config: FOLDER`.*hf download Wan",
    ):
        load_pipeline(tmp_path / "model.safetensors")
    cached = tmp_path / "cache" / "models--Wan-AI--Wan2.1-I2V-14B-480P-Diffusers"  # diffusers' guess for this width
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("0" * 40)
    shutil.copytree(tmp_path / "config", cached / "snapshots" / ("0" * 40))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    with pytest.raises(UserError) as error:
        load_pipeline(tmp_path / "model.safetensors")
    named = re.search("`config: (.*?)`", str(error.value))
    assert named and load_pipeline(tmp_path / "model.safetensors", config=Path(named[1]))
    save_file({"a.weight": torch.ones(2)}, tmp_path / "unknown.safetensors")
    with pytest.raises(
        UserError, match=r"(?s)does not say what.*remedy: add `config: FOLDER` under model, the folder of"
    ):
        load_pipeline(tmp_path / "unknown.safetensors")
    with pytest.raises(
        UserError, match=r"(?s)does not say what.*got: nothing: there is no such folder.*`config: FOLDER`"
    ):
        load_pipeline(tmp_path / "unknown.safetensors", config=tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"(?s)is a folder, which has its own.*remove model.config"):
        load_pipeline(tmp_path / "config", config=tmp_path / "config")
    (tmp_path / "model.txt").write_text("a cat")
    with pytest.raises(UserError, match=r"(?s)no file of weights.*expected: .*\.safetensors.*got: \.txt"):
        load_pipeline(tmp_path / "model.txt", config=tmp_path / "config")


def test_the_configuration_of_one_model_is_refused_before_anything_is_read(tmp_path):
    """Reading files of gigabytes and importing diffusers would take time."""
    published(tmp_path / "config", "wan")
    (tmp_path / "model.safetensors").write_bytes(b"not read")
    section = {"source": "diffusers", "weights": str(tmp_path / "model.safetensors")}
    asked = section | {"config": str(tmp_path / "config" / "transformer")}
    code = (
        "import sys; from trtconvert import models; from trtconvert.recipe import ModelSection\n"
        f"try: models.load(ModelSection(**{asked!r}))\n"
        "except Exception as error: print(error, 'torch' in sys.modules)"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "got: config.json of one model, without model_index.json" in told and told.rstrip().endswith("False")
    assert f"remedy: give `config: {tmp_path / 'config'}` under model" in told
    alone = tmp_path / "alone"
    shutil.copytree(tmp_path / "config" / "transformer", alone)
    with pytest.raises(UserError, match=r"(?s)config.json of one model.*remedy: get the folder.*hf download"):
        load_pipeline(tmp_path / "model.safetensors", config=alone)


@pytest.mark.parametrize(
    "name",
    [
        f"{MIDDLE}transformer_blocks.0.attn2.processor.to_k_ip.weight",
        f"{UNET}extra.weight",  # diffusers' rule drops unknown names
        "lora_unet_mid_block.lora_up.weight",
        "first_stage_model.extra.weight",
        "cond_stage_model.extra.weight",
        "cond_stage_model.transformer.text_model.encoder.layers.0.extra.weight",
    ],
)
def test_surplus_tensors_are_refused(sd, tmp_path, name):
    folder, weights = sd
    path = tmp_path / "model.safetensors"
    save_file(weights | {name: torch.zeros(4, 4)}, path)
    with pytest.raises(UserError, match=r"(?s) more than .*got: 1 more, \S*(to_k_ip|extra|lora_up)"):
        load_pipeline(path, config=folder)
    assert load_pipeline(path, config=folder, ignore=["*to_k_ip*", "*.extra.*", "lora_*"])


def test_a_weight_that_is_missing_is_told(sd, tmp_path):
    folder, weights = sd
    lost = f"{MIDDLE}norm.weight"
    save_file({name: x for name, x in weights.items() if name != lost}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"(?s)weights of unet in .*incomplete.*1 missing, mid_block.attentions.0.norm"):
        load_pipeline(tmp_path / "model.safetensors", config=folder)
    save_file({n: x for n, x in weights.items() if not n.startswith("first_stage")}, tmp_path / "model.safetensors")
    with pytest.raises(
        UserError, match=r"(?s)no weights of vae.*model.safetensors holds none.*\"vae\": \[null, null\]"
    ):
        load_pipeline(tmp_path / "model.safetensors", config=folder)


def test_a_file_of_another_model_is_refused(sd, tmp_path):
    _, weights = sd
    published(tmp_path / "config", "flux")
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"(?s)does not hold the weights of transformer as FluxTransformer2DModel"):
        load_pipeline(tmp_path / "model.safetensors", config=tmp_path / "config")


def test_fp8_is_scaled_before_it_is_split_and_turned(tmp_path):
    """ComfyUI stores Wan with a scale for each weight, and a mark."""
    pipe, weights = published(tmp_path / "config", "wan")
    stored = dict(weights)
    for name in [name for name in weights if name.endswith("attn.q.weight")]:
        scale = weights[name].abs().max() / 448
        stored[name] = (weights[name] / scale).to(torch.float8_e4m3fn)
        stored[name.replace(".weight", ".scale_weight")] = scale[None]
    stored["scaled_fp8"] = torch.zeros(2).to(torch.float8_e4m3fn)
    save_file(stored, tmp_path / "model.safetensors")
    got = load_pipeline(tmp_path / "model.safetensors", config=tmp_path / "config").transformer.state_dict()
    for name, x in pipe.transformer.state_dict().items():
        limit = 0.04 if name.endswith("to_q.weight") else 0
        assert (got[name] - x).norm() <= limit * x.norm()


def test_a_file_is_of_the_denoiser_that_is_named(tmp_path):
    """Wan 2.2 is published with one file for high noise and one for low noise."""
    pipe, _ = published(tmp_path / "whole", "wan")
    second = tiny_pipelines.wan().transformer
    second.proj_out.weight.neg_()
    both = diffusers.WanPipeline(**pipe.components | {"transformer_2": second}, boundary_ratio=0.3)
    both.save_pretrained(tmp_path / "config")
    (tmp_path / "config" / "transformer_2" / "diffusion_pytorch_model.safetensors").unlink()
    low = tmp_path / "low.safetensors"
    save_file({name: x.contiguous() for name, x in layouts.wan(second).items()}, low)
    assert_same(load_pipeline(low, config=tmp_path / "config", denoiser="transformer_2"), both)
    with pytest.raises(UserError, match=r"(?s)no weights of transformer_2.*denoiser: transformer_2"):
        load_pipeline(low, config=tmp_path / "config")
    with pytest.raises(UserError, match=r"(?s)no denoiser 'transformer_3'.*got: text_encoder, transformer, tr"):
        load_pipeline(low, config=tmp_path / "config", denoiser="transformer_3")


@pytest.mark.parametrize(
    ("name", "tensor", "told"),
    [
        ("middle_block.1.proj_in.absmax", torch.ones(4), "absmax: a part of quantised weights"),
        ("middle_block.1.proj_in.scale_weight", torch.full((), 0.5), "proj_in.weight, which is float32"),
        ("middle_block.1.proj_in.weight", torch.zeros(4, 4, dtype=torch.int8), "proj_in.weight: int8"),
    ],
)
def test_weights_that_are_quantised_otherwise_are_refused(sd, tmp_path, name, tensor, told):
    folder, weights = sd
    save_file(weights | {UNET + name: tensor}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=rf"(?s)quantised in a way.*got: .*{told}"):
        load_pipeline(tmp_path / "model.safetensors", config=folder)


def test_a_model_that_predicts_velocities_wants_a_scheduler_that_does(sd, tmp_path):
    folder, weights = sd
    shutil.copytree(folder, tmp_path / "config")
    save_file(weights | {"v_pred": torch.zeros(0), "ztsnr": torch.zeros(0)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"(?s)v_pred.*got: prediction_type epsilon.*rescale_betas_zero_snr"):
        load_pipeline(tmp_path / "model.safetensors", config=tmp_path / "config")
    settings = tmp_path / "config" / "scheduler" / "scheduler_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"prediction_type": "v_prediction"}))
    assert load_pipeline(tmp_path / "model.safetensors", config=tmp_path / "config")


def test_flux_is_read_as_published(tmp_path, monkeypatch):
    """The published sizes with fewer blocks, on meta tensors: diffusers' rule for this layout supports no other sizes."""
    folder = tmp_path / "config"
    config = {"num_layers": 1, "num_single_layers": 2, "guidance_embeds": True}
    with torch.device("meta"):
        transformer = diffusers.FluxTransformer2DModel(**config)
    transformer.save_config(folder / "transformer")
    weights = layouts.with_prefix(UNET, layouts.flux(transformer)) | {"vae.x": torch.ones(1)}
    monkeypatch.setattr("trtconvert.models.single_file.read_tensors", lambda files: weights)
    kinds = {"transformer": diffusers.FluxTransformer2DModel}
    (state,) = states_of(tmp_path / "flux.safetensors", folder, kinds, None, ()).values()
    assert {name: x.shape for name, x in state.items()} == {
        name: x.shape for name, x in transformer.state_dict().items()
    }


def test_of_a_pipeline_in_one_file_a_bundle_keeps_what_is_no_model(sd, tmp_path):
    copy_without_models(sd[0], tmp_path / "kept")
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == ["model_index.json", "scheduler", "tokenizer"]


def test_a_file_and_its_configurations_are_part_of_the_cache_key(sd, tmp_path):
    folder, weights = sd
    shutil.copytree(folder, tmp_path / "config")
    save_file(weights, tmp_path / "model.safetensors")
    section = ModelSection(source="diffusers", weights=tmp_path / "model.safetensors", config=tmp_path / "config")
    before = identity(section)
    assert identity(section) == before
    settings = tmp_path / "config" / "scheduler" / "scheduler_config.json"
    settings.write_text(settings.read_text().replace("scaled_linear", "linear"))
    assert identity(section) != before


def test_a_recipe_names_a_file_and_its_configurations(sd, tmp_path):
    folder, weights = sd
    save_file(weights, tmp_path / "model.safetensors")
    section = ModelSection(
        source="diffusers",
        weights=tmp_path / "model.safetensors",
        config=folder,
        options={"height": 32, "width": 32, "prompts": ["a cat"]},
    )
    model = models.load(section)
    assert model.sample(model.denoiser, [0], steps=2, solver="ddim").isfinite().all()
    for options, told in (({"heigth": 32}, "height"), ({"vairant": "fp16"}, "variant")):
        with pytest.raises(UserError, match=rf"(?s)model.options.{next(iter(options))}.*did you mean '{told}'"):
            models.load(section.model_copy(update={"options": options}))


@pytest.mark.soak
def test_a_bundle_of_one_file_draws_by_itself(sd, tmp_path):
    """One FP16 file has the text encoder, the denoiser and the VAE; the folder of configurations has the tokenizer."""
    weights = {name: x.half() if x.is_floating_point() else x for name, x in sd[1].items()}
    save_file(weights, tmp_path / "model.safetensors")
    shutil.copytree(sd[0], tmp_path / "config")
    model = {"weights": "model.safetensors", "config": "config", "dtype": "float32"}
    recipe = recipe_of(tmp_path, "stable_diffusion", {"all": {}}, model)
    bundled = build(recipe, tmp_path / "bundle", Cache(tmp_path / "cache"), Reporter(Console(quiet=True)))
    assert bundled.manifest.recipe.model.config == Path("config")
    wanted = load_pipeline(tmp_path / "model.safetensors", config=tmp_path / "config")
    with runtime.load(tmp_path / "bundle") as bundle:
        pictures = [
            pipe(
                prompt="a cat",
                height=32,
                width=32,
                num_inference_steps=4,
                generator=torch.Generator().manual_seed(1),
                output_type="pt",
            )[0]
            for pipe in (bundle.pipeline(), wanted)
        ]
    assert psnr(*pictures).min() >= INT8_IMAGES_PSNR


def write_gguf(path: Path, weights: dict[str, Tensor]) -> None:
    """Writes layers' weights in 8 bits and the rest in FP32, like converters."""
    gguf = pytest.importorskip("gguf", reason="needs gguf")
    writer = gguf.GGUFWriter(path, "wan")
    for name, x in weights.items():
        kind = gguf.GGMLQuantizationType.Q8_0 if x.dim() == 2 and x.shape[1] % 32 == 0 else None
        data = x.numpy()
        if x.dim() > 4:
            writer.add_array(f"comfy.gguf.orig_shape.{name}", list(x.shape))
            data = data.reshape(x.shape[0], -1)
        writer.add_tensor(name, data if kind is None else gguf.quants.quantize(data, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_gguf_is_dequantised(tmp_path):
    pipe, weights = published(tmp_path / "config", "wan")
    write_gguf(tmp_path / "wan-Q8_0.gguf", weights)
    got = load_pipeline(tmp_path / "wan-Q8_0.gguf", config=tmp_path / "config").transformer.state_dict()
    off = {name: float((got[name] - x).norm() / x.norm()) for name, x in pipe.transformer.state_dict().items()}
    assert 0.001 < off["blocks.0.attn1.to_q.weight"] < 0.01 and max(off.values()) < 0.01
    assert off["patch_embedding.weight"] == 0


def test_without_gguf_its_package_is_named(sd, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(BackendUnavailable, match=r"(?s)gguf is not installed.*model.gguf.*pip install gguf"):
        load_pipeline(tmp_path / "model.gguf", config=sd[0])


def test_the_layout_of_a_saved_model_is_read_too(tmp_path):
    """The file has a finetuned U-Net alone, by diffusers' names; a whole pipeline has the rest."""
    pipe = tiny_pipelines.with_text("stable_diffusion")
    pipe.save_pretrained(tmp_path / "whole")
    shutil.copyfile(tmp_path / "whole" / "unet" / "diffusion_pytorch_model.safetensors", tmp_path / "mine.safetensors")
    state = load_file(tmp_path / "mine.safetensors")
    save_file({name: x * 2 for name, x in state.items()}, tmp_path / "mine.safetensors")
    got = load_pipeline(tmp_path / "mine.safetensors", config=tmp_path / "whole")
    assert torch.equal(got.unet.conv_in.weight, 2 * pipe.unet.conv_in.weight)
    assert torch.equal(got.vae.decoder.conv_in.weight, pipe.vae.decoder.conv_in.weight)
