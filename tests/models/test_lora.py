"""LoRA files in every layout, merged into models, against merges by hand; and what is refused."""

import functools
import json
from dataclasses import replace

import onnx
import pytest
import tiny_loras
import tiny_models
import tiny_pipelines
import torch
from onnx import numpy_helper
from safetensors.torch import load_file, save_file
from support import refusal, reused, run, tiny_recipe
from tiny_loras import ALPHA, RANK
from torch import nn

from trtconvert import models, runtime
from trtconvert.bundle import read_manifest
from trtconvert.errors import BackendUnavailable, UserError
from trtconvert.models.identity import identity
from trtconvert.models.lora import merge_loras
from trtconvert.recipe import LoraSection, ModelSection, load_recipe
from trtconvert.weights.lora import read_lora
from trtconvert.weights.lora_names import flat

HALF = ALPHA / RANK
"""What a file with an alpha multiplies by."""

BLOCK = "down_blocks.0.attentions.0.transformer_blocks.0"
ATTENTION = [f"{BLOCK}.attn1.to_q", f"{BLOCK}.attn2.to_out.0"]
UNET = [*ATTENTION, f"{BLOCK}.ff.net.0.proj", "mid_block.attentions.0.proj_in"]


def model_of(module, root=""):
    """A model whose denoiser holds a module under a name, or is it."""
    return replace(tiny_models.build(), denoiser=nn.ModuleDict({root: module}) if root else module)


@functools.cache
def _made(kind):
    pipe = getattr(tiny_pipelines, kind)()
    return getattr(pipe, "unet", None) or pipe.transformer


def fresh(kind):
    """A denoiser with weights of its own."""
    module = _made(kind)
    made = type(module).from_config(module.config)
    made.load_state_dict(module.state_dict())
    return made.eval().requires_grad_(False)


def merged(module, *sections, root=""):
    merge_loras(model_of(module, root), [LoraSection(**section) for section in sections])
    return module.state_dict()


def assert_close(state, expected):
    assert state.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(
            state[name], tensor, rtol=1e-6, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )


LAYOUTS = {
    "kohya": (tiny_loras.kohya(), UNET, HALF),
    "kohya, bare names of ComfyUI": (tiny_loras.peft("diffusion_model."), UNET, 1.0),
    "peft": (tiny_loras.peft("unet."), UNET, 1.0),
    "peft, of the module alone": (tiny_loras.peft(""), UNET, 1.0),
    "diffusers": (tiny_loras.diffusers("unet."), UNET, 1.0),
    "diffusers, processors": (tiny_loras.old_diffusers("unet."), ATTENTION, 1.0),
    "diffusers, processors alone": (tiny_loras.old_diffusers(""), ATTENTION, 1.0),
}


@pytest.mark.parametrize("root", ["", "unet"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_unet_with_a_lora_is_the_one_merged_by_hand(tmp_path, layout, root):
    write, names, factor = LAYOUTS[layout]
    module = fresh("stable_diffusion")
    layers = tiny_loras.layers_of(module, names)
    file = tiny_loras.save(tmp_path / "lora.safetensors", layers, write)
    expected = tiny_loras.with_deltas(
        module.state_dict(), {name: layer.delta() for name, layer in layers.items()}, 0.7 * factor
    )
    assert_close(merged(module, {"file": file, "scale": 0.7}, root=root), expected)


SGM = {
    "input_blocks_0_0": "conv_in",
    "time_embed_2": "time_embedding.linear_2",
    "label_emb_0_0": "add_embedding.linear_1",
    "input_blocks_1_0_in_layers_2": "down_blocks.0.resnets.0.conv1",
    "input_blocks_1_1_transformer_blocks_0_attn2_to_k": f"{BLOCK}.attn2.to_k",
    "input_blocks_2_0_op": "down_blocks.0.downsamplers.0.conv",
    "input_blocks_3_0_skip_connection": "down_blocks.1.resnets.0.conv_shortcut",
    "middle_block_0_emb_layers_1": "mid_block.resnets.0.time_emb_proj",
    "middle_block_1_proj_out": "mid_block.attentions.0.proj_out",
    "middle_block_2_out_layers_3": "mid_block.resnets.1.conv2",
    "output_blocks_1_1_conv": "up_blocks.0.upsamplers.0.conv",
    "output_blocks_3_1_transformer_blocks_0_ff_net_2": "up_blocks.1.attentions.1.transformer_blocks.0.ff.net.2",
    "out_2": "conv_out",
}
"""Stability's names of SDXL's modules, as kohya's scripts write them: this U-Net has two levels, of one layer each."""


@pytest.mark.parametrize("mid", [False, True])
def test_sdxl_of_kohya_is_merged_by_the_names_of_the_original_code(tmp_path, mid):
    """Convolutions too, in two parts and in three."""
    module = fresh("stable_diffusion_xl")
    layers = {
        theirs: tiny_loras.layer_of(
            module.get_parameter(f"{ours}.weight"), seed, mid=mid and theirs.endswith(("layers_2", "layers_3"))
        )
        for seed, (theirs, ours) in enumerate(SGM.items())
    }
    file = tiny_loras.save(tmp_path / "lora.safetensors", layers, tiny_loras.kohya())
    deltas = {SGM[name]: layer.delta() for name, layer in layers.items()}
    expected = tiny_loras.with_deltas(module.state_dict(), deltas, HALF)
    assert_close(merged(module, {"file": file}, root="unet"), expected)


QKV = ("to_q", "to_k", "to_v")
DOUBLE, SINGLE = "transformer_blocks.0", "single_transformer_blocks.0"
FLUX = {
    "double_blocks_0_img_attn_qkv": [f"{DOUBLE}.attn.{name}" for name in QKV],
    "double_blocks_0_txt_attn_qkv": [f"{DOUBLE}.attn.add_{name}_proj" for name in "qkv"],
    "double_blocks_0_img_attn_proj": [f"{DOUBLE}.attn.to_out.0"],
    "double_blocks_0_txt_attn_proj": [f"{DOUBLE}.attn.to_add_out"],
    "double_blocks_0_img_mlp_0": [f"{DOUBLE}.ff.net.0.proj"],
    "double_blocks_0_txt_mlp_2": [f"{DOUBLE}.ff_context.net.2"],
    "double_blocks_0_txt_mod_lin": [f"{DOUBLE}.norm1_context.linear"],
    "single_blocks_0_linear1": [*(f"{SINGLE}.attn.{name}" for name in QKV), f"{SINGLE}.proj_mlp"],
    "single_blocks_0_linear2": [f"{SINGLE}.proj_out"],
    "single_blocks_0_modulation_lin": [f"{SINGLE}.norm.linear"],
    "guidance_in_in_layer": ["time_text_embed.guidance_embedder.linear_1"],
    "final_layer_linear": ["proj_out"],
}
SD3 = {
    "joint_blocks_1_x_block_attn_qkv": [f"transformer_blocks.1.attn.{name}" for name in QKV],
    "joint_blocks_0_context_block_attn_proj": [f"{DOUBLE}.attn.to_add_out"],
    "joint_blocks_0_x_block_adaLN_modulation_1": [f"{DOUBLE}.norm1.linear"],
    "joint_blocks_1_x_block_mlp_fc1": ["transformer_blocks.1.ff.net.0.proj"],
}
WAN = {
    "blocks_1_self_attn_q": ["blocks.1.attn1.to_q"],
    "blocks_0_cross_attn_o": ["blocks.0.attn2.to_out.0"],
    "blocks_0_ffn_2": ["blocks.0.ffn.net.2"],
    "head_head": ["proj_out"],
}


@pytest.mark.parametrize(
    ("kind", "names"), [("flux", FLUX), ("stable_diffusion_3", SD3), ("wan", WAN)], ids=["flux", "sd3", "wan"]
)
def test_transformers_of_kohya_are_merged_by_the_names_of_the_original_code(tmp_path, kind, names):
    """One of their layers may be several of diffusers', whose rows follow each other."""
    module = fresh(kind)
    layers, deltas = {}, {}
    for seed, (theirs, ours) in enumerate(names.items()):
        weights = [module.get_parameter(f"{name}.weight") for name in ours]
        layers[theirs] = tiny_loras.layer_of(torch.cat(weights), seed)
        rows = layers[theirs].delta().split([len(weight) for weight in weights])
        deltas |= dict(zip(ours, rows, strict=True))
    file = tiny_loras.save(tmp_path / "lora.safetensors", layers, tiny_loras.kohya())
    expected = tiny_loras.with_deltas(module.state_dict(), deltas, HALF)
    assert_close(merged(module, {"file": file}, root="transformer"), expected)


def test_scale_and_shift_of_flux_s_last_norm_change_places(tmp_path):
    module = fresh("flux")
    weight = module.norm_out.linear.weight
    layers = {"final_layer_adaLN_modulation_1": tiny_loras.layer_of(weight, 0)}
    file = tiny_loras.save(tmp_path / "lora.safetensors", layers, tiny_loras.kohya())
    shift, scale = layers["final_layer_adaLN_modulation_1"].delta().chunk(2)
    expected = tiny_loras.with_deltas(module.state_dict(), {"norm_out.linear": torch.cat([scale, shift])}, HALF)
    assert_close(merged(module, {"file": file}), expected)


def test_differences_themselves_are_added(tmp_path):
    module = fresh("wan")
    before = {name: x.clone() for name, x in module.state_dict().items()}
    tensors = {
        "diffusion_model.blocks.0.norm3.diff": torch.randn(64),
        "diffusion_model.blocks.0.self_attn.k.diff": torch.randn(64, 64),
        "diffusion_model.blocks.0.self_attn.k.diff_b": torch.randn(64),
    }
    save_file(tensors, tmp_path / "lora.safetensors")
    after = merged(module, {"file": tmp_path / "lora.safetensors", "scale": -0.5})
    names = ["blocks.0.norm2.weight", "blocks.0.attn1.to_k.weight", "blocks.0.attn1.to_k.bias"]
    for name, difference in zip(names, tensors.values(), strict=True):
        torch.testing.assert_close(after[name], before[name] - 0.5 * difference)


PEFT_ROOT = "base_model.model."
CONFIG = {"lora_alpha": 8, "r": RANK, "alpha_pattern": {"attn1.to_q": 2}}


@pytest.mark.parametrize(("settings", "usual", "of_query"), [({}, 2.0, 0.5), ({"use_rslora": True}, 4.0, 1.0)])
@pytest.mark.parametrize("place", ["beside", "within"])
def test_alphas_of_peft_come_from_its_settings(tmp_path, settings, usual, of_query, place):
    """alpha/rank, or alpha/√rank: the file of peft has them beside it, that of diffusers within."""
    module, config = fresh("stable_diffusion"), CONFIG | settings
    layers = tiny_loras.layers_of(module, ATTENTION)
    file = tmp_path / "adapter_model.safetensors"
    if place == "beside":
        tiny_loras.save(file, layers, tiny_loras.peft(PEFT_ROOT))
        (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    else:
        metadata = {"lora_adapter_metadata": json.dumps({f"unet.{name}": value for name, value in config.items()})}
        tiny_loras.save(file, layers, tiny_loras.peft("unet."), metadata)
    query, out = (layer.delta() for layer in layers.values())
    deltas = {ATTENTION[0]: query * of_query, ATTENTION[1]: out * usual}
    expected = tiny_loras.with_deltas(module.state_dict(), deltas, 1.0)
    assert_close(merged(module, {"file": file}), expected)


def test_several_add_up_and_their_opposites_leave_nothing(tmp_path):
    module = fresh("stable_diffusion")
    before = {name: x.clone() for name, x in module.state_dict().items()}
    files = [
        tiny_loras.save(tmp_path / f"{seed}.safetensors", tiny_loras.layers_of(module, names), tiny_loras.kohya())
        for seed, names in enumerate([UNET, UNET[1:]])
    ]
    up = [{"file": file, "scale": 0.5} for file in files]
    after = merged(module, *up)
    assert not torch.equal(after[f"{UNET[1]}.weight"], before[f"{UNET[1]}.weight"])
    assert_close(merged(module, *[{"file": file, "scale": -0.5} for file in files]), before)


# What is refused ------------------------------------------------------------------------------------------------------


def copied(file):
    """The tensors of a file that will be written over."""
    return {name: tensor.clone() for name, tensor in load_file(file).items()}


def written(tmp_path, change):
    """A file of a U-Net's layers with its tensors changed."""
    layers = tiny_loras.layers_of(_made("stable_diffusion"), UNET)
    file = tiny_loras.save(tmp_path / "lora.safetensors", layers, tiny_loras.kohya())
    tensors = copied(file)
    change(tensors)
    save_file(tensors, file)
    return file


QUERY = "lora_unet_" + ATTENTION[0].replace(".", "_")


def change_key(tensors, old, new):
    for name in [name for name in tensors if name.startswith(old)]:
        tensors[new + name.removeprefix(old)] = tensors.pop(name)


DAMAGES = {
    "a name that is none": (
        lambda x: change_key(x, QUERY, QUERY[:-1] + "x"),
        r"fits no module.*nearest is down_blocks\.0\.attentions\.0\.transformer_blocks\.0\.attn1\.to_[kqv]\n.*attn1_to_x",
    ),
    "no down": (lambda x: x.pop(f"{QUERY}.lora_down.weight"), r"not whole.*expected: down of .*attn1_to_q"),
    "no up": (lambda x: x.pop(f"{QUERY}.lora_up.weight"), r"not whole.*expected: up of .*attn1_to_q"),
    "an alpha alone": (lambda x: x.update({f"{QUERY}x.alpha": torch.ones(())}), r"not whole.*got: its alpha alone"),
    "no alpha that counts": (lambda x: x.update({f"{QUERY}.alpha": torch.zeros(())}), r"alpha above 0.*= 0\.0"),
    "NaN": (lambda x: x[f"{QUERY}.lora_up.weight"].fill_(torch.nan), r"damaged.*NaN or Inf in .*attn1_to_q\.lora_up"),
    "integers": (
        lambda x: x.update({f"{QUERY}.lora_up.weight": torch.ones(32, RANK, dtype=torch.int8)}),
        r"damaged.*got: int8 in",
    ),
    "another width": (
        lambda x: x.update({f"{QUERY}.lora_down.weight": torch.ones(RANK, 48)}),
        r"does not fit.*up \[32, 4\], down \[4, 48\] for a weight of \[32, 32\] \(1 of 4 layers",
    ),
    "another rank": (
        lambda x: x.update({f"{QUERY}.lora_down.weight": torch.ones(2, 32)}),
        r"does not fit.*down \[2, 32\]",
    ),
    "LoHa": (lambda x: x.update({f"{QUERY}.hada_w1_a": torch.ones(2, 2)}), r"cannot be merged.*hada_w1_a: LoHa"),
    "DoRA": (lambda x: x.update({f"{QUERY}.dora_scale": torch.ones(2)}), r"cannot be merged.*dora_scale: DoRA"),
    "a text encoder's alone": (
        lambda x: change_key(x, "lora_unet_", "lora_te1_"),
        r"nothing for denoiser.*got: names of text_encoder\n",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_cannot_be_merged_is_named(tmp_path, damage):
    change, message = DAMAGES[damage]
    with pytest.raises(UserError, match=rf"(?s){message}.*remedy: "):
        merged(fresh("stable_diffusion"), {"file": written(tmp_path, change)})


@pytest.mark.parametrize("kind", ["flux", "wan"])
def test_a_lora_of_another_architecture_is_told_as_such(tmp_path, kind):
    file = written(tmp_path, lambda tensors: None)
    with pytest.raises(
        UserError, match=r"(?s)is for another model.*3 more of 4 that match none.*trained for this model"
    ):
        merged(fresh(kind), {"file": file})


def test_a_lora_that_takes_weights_out_of_range_is_refused(tmp_path):
    file = written(tmp_path, lambda tensors: tensors[f"{QUERY}.lora_up.weight"].fill_(3e38))
    with pytest.raises(
        UserError, match=r"(?s)is no number.*attn1\.to_q.*remedy: take a smaller scale|attn1\.to_q.*is no number"
    ):
        merged(fresh("stable_diffusion"), {"file": file, "scale": 1e6})


@pytest.mark.parametrize(
    "kind", ["absent", "folder", "pickled", "cut off", "empty", "a model", "peft without its settings"]
)
def test_files_that_are_no_loras_are_refused(tmp_path, kind):
    file = tmp_path / "lora.safetensors"
    layers = tiny_loras.layers_of(_made("stable_diffusion"), ATTENTION)
    tiny_loras.save(file, layers, tiny_loras.peft(PEFT_ROOT))
    if kind == "absent":
        file.unlink()
    elif kind == "pickled":
        torch.save(copied(file), file)
    elif kind == "cut off":
        file.write_bytes(file.read_bytes()[:500])
    elif kind == "empty":
        save_file({}, file)
    elif kind == "a model":
        save_file(_made("stable_diffusion").state_dict(), file)
    message = {
        "absent": "there is no LoRA .*no such file",
        "folder": "there is no LoRA .*got: a folder.*lora.safetensors",
        "pickled": "cannot be read.*a pickled file.*weights_only=True",
        "cut off": "cannot be read.*get the file again",
        "empty": "is no LoRA.*got: no tensors",
        "a model": "is no LoRA.*a whole model is model.weights",
        "peft without its settings": "the alpha .* is not known.*adapter_config.json",
    }[kind]
    with pytest.raises(UserError, match=f"(?s){message}"):
        merged(fresh("stable_diffusion"), {"file": file.parent if kind == "folder" else file})


def test_the_remedy_for_a_pickled_file_works(tmp_path):
    module = fresh("stable_diffusion")
    layers = tiny_loras.layers_of(module, UNET)
    file = tiny_loras.save(tmp_path / "lora.safetensors", layers, tiny_loras.kohya())
    torch.save(load_file(file), tmp_path / "lora.bin")
    save_file(torch.load(tmp_path / "lora.bin", weights_only=True), tmp_path / "again.safetensors")
    expected = tiny_loras.with_deltas(module.state_dict(), {n: layer.delta() for n, layer in layers.items()}, HALF)
    assert_close(merged(module, {"file": tmp_path / "again.safetensors"}), expected)


# Through recipes ------------------------------------------------------------------------------------------------------


def recipe_with(folder, *loras, **sections):
    path = tiny_recipe(folder, **sections)
    recipe = json.loads(path.read_text())
    path.write_text(json.dumps(recipe | {"loras": list(loras)}))
    return path


def built(folder, *loras):
    recipe = recipe_with(folder, *loras)
    return run("build", recipe, "-o", folder / "bundle", "--cache", folder / "cache")


def test_builds_follow_the_files_and_scales(tmp_path):
    """Of a model of a user's own function, whose modules have the user's names."""
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
    assert all(reused(again).values())  # the same file by another name

    def bundle_weight():
        weights = {
            w.name: numpy_helper.to_array(w) for w in onnx.load(tmp_path / "bundle" / "denoiser.onnx").graph.initializer
        }
        return torch.tensor(weights["qkv.weight.T"]).T

    expected = tiny_loras.with_deltas(base.state_dict(), {"qkv": layers["qkv"].delta()}, 0.5 * HALF)["qkv.weight"]
    torch.testing.assert_close(bundle_weight(), expected)


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
        tmp_path / "a.safetensors", tiny_loras.layers_of(_made("stable_diffusion"), UNET), tiny_loras.kohya()
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


def test_text_encoders_get_their_parts(tmp_path, with_text):
    """Those of kohya are called text_model.…, whatever transformers calls them now."""
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
    """kohya's scripts call it the third of either, which a file for the second as well tells apart."""
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


@pytest.mark.slow
def test_a_pipeline_is_built_with_its_loras(tmp_path):
    """Half precision: it is merged before it is rounded. On ONNX Runtime they stay as they are."""
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


def test_parts_that_nothing_takes_are_told(tmp_path):
    base = tiny_models.build().denoiser
    layers = {"lora_unet_out": base.out.weight, "lora_te1_q": torch.ones(8, 8), "lora_te3_q": torch.ones(8, 8)}
    layers = {name: tiny_loras.layer_of(weight, 0) for name, weight in layers.items()}
    tiny_loras.save(tmp_path / "a.safetensors", layers, tiny_loras.kohya(""))
    outcome = built(tmp_path, {"file": "a.safetensors"})
    assert outcome.exit_code == 0, outcome.output
    told = " ".join(outcome.output.split())
    assert "a.safetensors has parts for text_encoder, text_encoder_3 or text_encoder_2 too, which are left out" in told
