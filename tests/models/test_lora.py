"""LoRA files in every layout, merged into models, against merges by hand; and refusals."""

import json
import re
from types import SimpleNamespace

import pytest
import tiny_loras
import tiny_pipelines
import torch
from merged_loras import ATTENTION, BLOCK, CONFIG, HALF, UNET, assert_close, copied, fresh, made, merged, written
from safetensors.torch import load_file, save_file
from tiny_loras import RANK

from trtconvert.errors import UserError
from trtconvert.weights.lora_names import places

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
"""Stability's names of SDXL's modules, in the form of kohya's scripts: this U-Net has two levels of one layer each."""


@pytest.mark.parametrize("mid", [False, True])
def test_sdxl_of_kohya_is_merged_by_the_names_of_the_original_code(tmp_path, mid):
    """Convolutions are merged too, in two parts and in three."""
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
    """One of their layers may hold the rows of several of diffusers' layers."""
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


@pytest.mark.parametrize(("settings", "usual", "of_query"), [({}, 2.0, 0.5), ({"use_rslora": True}, 4.0, 1.0)])
@pytest.mark.parametrize("place", ["beside", "within"])
def test_alphas_of_peft_come_from_its_settings(tmp_path, settings, usual, of_query, place):
    """alpha/rank, or alpha/√rank: peft stores the settings beside the file, diffusers in it."""
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


@pytest.mark.parametrize(
    "options",
    [{}, {"use_rslora": True}, {"use_dora": True}, {"rank_pattern": {"to_q": 2}, "alpha_pattern": {"to_q": 7}}],
    ids=["plain", "rslora", "dora", "patterns"],
)
def test_a_lora_that_a_model_of_diffusers_saves_is_merged_as_peft_does(tmp_path, options):
    """`save_lora_adapter` has peft's settings in the file, without a prefix."""
    peft = pytest.importorskip("peft", reason="needs peft")
    torch.manual_seed(0)
    adapted, module = fresh("stable_diffusion"), fresh("stable_diffusion")
    adapted.add_adapter(peft.LoraConfig(r=3, lora_alpha=5, target_modules=["to_q"], init_lora_weights=False, **options))
    adapted.save_lora_adapter(tmp_path)
    adapted.fuse_lora()
    expected = {name.replace(".base_layer", ""): x for name, x in adapted.state_dict().items() if ".lora_" not in name}
    file = tmp_path / "pytorch_lora_weights.safetensors"
    assert_close(merged(module, {"file": file}), expected)


def test_an_alpha_may_be_an_integer(tmp_path):
    module = fresh("stable_diffusion")
    layers = tiny_loras.layers_of(module, UNET)
    file = written(tmp_path, lambda x: x.update({name: torch.tensor(8) for name in x if name.endswith(".alpha")}))
    expected = tiny_loras.with_deltas(module.state_dict(), {n: layer.delta() for n, layer in layers.items()}, 2.0)
    assert_close(merged(module, {"file": file}), expected)


@pytest.mark.as_of(diffusers="0.42")
def test_names_of_the_original_code_are_those_that_diffusers_has_for_them():
    """Every weight of SDXL in its published size, on meta tensors, against the names of diffusers' loader."""
    conversion = pytest.importorskip("diffusers.loaders.lora_conversion_utils")
    config = dict(
        block_out_channels=(320, 640, 1280),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        transformer_layers_per_block=(1, 2, 10),
        attention_head_dim=(5, 10, 20),
        cross_attention_dim=2048,
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=256,
        projection_class_embeddings_input_dim=2816,
    )
    with torch.device("meta"):
        module = tiny_pipelines.diffusers.UNet2DConditionModel(**config)
    shapes = {n.removesuffix(".weight"): x.shape for n, x in module.state_dict().items() if n.endswith(".weight")}
    theirs = {
        alias: place.modules[0]
        for alias, place in places(shapes).items()
        if alias.startswith(("input_blocks", "middle_block", "output_blocks", "time_embed_", "label_emb", "out_"))
        and len(shapes[place.modules[0]]) > 1
    }
    assert set(theirs.values()) == {name for name, shape in shapes.items() if len(shape) > 1}
    for alias, name in theirs.items():
        key = f"lora_unet_{alias}.lora_down.weight"
        (mapped,) = conversion._maybe_map_sgm_blocks_to_diffusers({key: 0}, SimpleNamespace(layers_per_block=2))
        found = conversion._convert_unet_lora_key(mapped).replace(".processor", "")
        assert re.sub(r"[._]lora\.down\.weight", "", found) == name.removesuffix(".0") or found.startswith(
            f"{name}.lora"
        )


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


# Refusals -------------------------------------------------------------------------------------------------------------


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
        r"does not fit.*down \[4, 48\], up \[32, 4\] for a weight of \[32, 32\] \(1 of 4 layers",
    ),
    "another rank": (
        lambda x: x.update({f"{QUERY}.lora_down.weight": torch.ones(2, 32)}),
        r"does not fit.*down \[2, 32\]",
    ),
    "OFT": (lambda x: x.update({f"{QUERY}.oft_blocks": torch.ones(2, 2)}), r"cannot be merged.*oft_blocks: OFT"),
    "a text encoder's alone": (
        lambda x: change_key(x, "lora_unet_", "lora_te1_"),
        r"nothing for denoiser.*got: names of text_encoder\n",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_an_unmergeable_lora_is_refused_with_its_fault(tmp_path, damage):
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
        UserError, match=r"(?s)is no number.*attn1\.to_q.*remedy: give a smaller scale|attn1\.to_q.*is no number"
    ):
        merged(fresh("stable_diffusion"), {"file": file, "scale": 1e6})


@pytest.mark.parametrize(
    "kind", ["absent", "folder", "pickled", "cut off", "empty", "a model", "peft without its settings"]
)
def test_files_that_are_no_loras_are_refused(tmp_path, kind):
    file = tmp_path / "lora.safetensors"
    layers = tiny_loras.layers_of(made("stable_diffusion"), ATTENTION)
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
        save_file(made("stable_diffusion").state_dict(), file)
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


@pytest.mark.parametrize("name", ["emb_params", "clip_g", "string_to_param.*", "bundle_emb.a_token.string_to_param.*"])
@pytest.mark.parametrize("alone", [True, False])
def test_embeddings_of_tokens_are_told_as_such(tmp_path, name, alone):
    file = tmp_path / "lora.safetensors"
    tiny_loras.save(file, tiny_loras.layers_of(made("stable_diffusion"), ATTENTION), tiny_loras.kohya())
    save_file(({} if alone else copied(file)) | {name: torch.zeros(2, 32)}, file)
    with pytest.raises(
        UserError, match=r"(?s)textual inversion.*remedy: load them .* by diffusers' load_textual_inversion"
    ):
        merged(fresh("stable_diffusion"), {"file": file})


def test_the_remedy_for_a_pickled_file_works(tmp_path):
    module = fresh("stable_diffusion")
    layers = tiny_loras.layers_of(module, UNET)
    file = tiny_loras.save(tmp_path / "lora.safetensors", layers, tiny_loras.kohya())
    torch.save(load_file(file), tmp_path / "lora.bin")
    save_file(torch.load(tmp_path / "lora.bin", weights_only=True), tmp_path / "again.safetensors")
    expected = tiny_loras.with_deltas(module.state_dict(), {n: layer.delta() for n, layer in layers.items()}, HALF)
    assert_close(merged(module, {"file": tmp_path / "again.safetensors"}), expected)
