"""Weights of diffusers' models in the layouts of published single files: the inverse of diffusers' rules for reading them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

_RESNET = {
    "norm1": "in_layers.0",
    "conv1": "in_layers.2",
    "norm2": "out_layers.0",
    "conv2": "out_layers.3",
    "time_emb_proj": "emb_layers.1",
    "conv_shortcut": "skip_connection",
}

_AROUND = {
    "conv_in.": "input_blocks.0.0.",
    "time_embedding.linear_1.": "time_embed.0.",
    "time_embedding.linear_2.": "time_embed.2.",
    "add_embedding.linear_1.": "label_emb.0.0.",
    "add_embedding.linear_2.": "label_emb.0.2.",
    "conv_norm_out.": "out.0.",
    "conv_out.": "out.2.",
    "mid_block.resnets.0.": "middle_block.0.",
    "mid_block.attentions.0.": "middle_block.1.",
    "mid_block.resnets.1.": "middle_block.2.",
}


def ldm_unet(unet: Any) -> dict[str, Tensor]:
    """Returns a `UNet2DConditionModel` in the layout of Stable Diffusion and SDXL."""
    state, layers = unet.state_dict(), unet.config.layers_per_block
    with_attention = {match[0] for name in state if (match := re.match(r"up_blocks\.\d+(?=\.attentions)", name))}

    def renamed(name: str) -> str:
        for own, ldm in _AROUND.items():
            if name.startswith(own):
                return ldm + name.removeprefix(own)
        side, block, kind, number, rest = name.split(".", 4)
        down, first = side == "down_blocks", int(block) * (layers + 1)
        stem = f"{'input' if down else 'output'}_blocks"
        if kind == "downsamplers":
            return f"{stem}.{1 + first + layers}.0.op.{rest.removeprefix('conv.')}"
        if kind == "upsamplers":
            return f"{stem}.{first + layers}.{2 if f'{side}.{block}' in with_attention else 1}.{rest}"
        return f"{stem}.{first + int(number) + down}.{1 if kind == 'attentions' else 0}.{rest}"

    def in_resnet(name: str) -> str:
        for own, ldm in _RESNET.items():
            name = name.replace(f".{own}.", f".{ldm}.")
        return name

    return {in_resnet(renamed(name)) if ".resnets." in name else renamed(name): x for name, x in state.items()}


def ldm_vae(vae: nn.Module) -> dict[str, Tensor]:
    """Returns an `AutoencoderKL` in the layout of Stable Diffusion and SDXL, whose attention's layers are 1 × 1 convolutions."""
    state = vae.state_dict()
    last = max(int(name.split(".")[2]) for name in state if name.startswith("decoder.up_blocks"))
    attention = {"group_norm": "norm", "to_q": "q", "to_k": "k", "to_v": "v", "to_out.0": "proj_out"}
    found: dict[str, Tensor] = {}
    for own, x in state.items():
        name = own.replace("conv_norm_out", "norm_out").replace("conv_shortcut", "nin_shortcut")
        name = re.sub(r"down_blocks\.(\d+)\.resnets\.(\d+)", r"down.\1.block.\2", name)
        name = re.sub(r"down_blocks\.(\d+)\.downsamplers\.0", r"down.\1.downsample", name)
        name = re.sub(r"up_blocks\.(\d+)\.resnets\.(\d+)", lambda m: f"up.{last - int(m[1])}.block.{m[2]}", name)
        name = re.sub(r"up_blocks\.(\d+)\.upsamplers\.0", lambda m: f"up.{last - int(m[1])}.upsample", name)
        name = re.sub(r"mid_block\.resnets\.(\d)", lambda m: f"mid.block_{int(m[1]) + 1}", name)
        if "mid_block.attentions.0." in name:
            layer, kind = name.partition("mid_block.attentions.0.")[2].rsplit(".", 1)
            name = f"{name.partition('mid_block')[0]}mid.attn_1.{attention[layer]}.{kind}"
            x = x[..., None, None] if x.dim() == 2 else x
        found[name] = x
    return found


def clip(encoder: nn.Module) -> dict[str, Tensor]:
    """Returns a CLIP text model in the layout of transformers before 5.6."""
    return {name if name.startswith("text_") else f"text_model.{name}": x for name, x in encoder.state_dict().items()}


def open_clip(encoder: nn.Module) -> dict[str, Tensor]:
    """Returns a `CLIPTextModel`, with its projection if it has one, in OpenCLIP's layout."""
    state = {name.removeprefix("text_model."): x for name, x in encoder.state_dict().items()}
    found = {
        "positional_embedding": state.pop("embeddings.position_embedding.weight"),
        "token_embedding.weight": state.pop("embeddings.token_embedding.weight"),
        "ln_final.weight": state.pop("final_layer_norm.weight"),
        "ln_final.bias": state.pop("final_layer_norm.bias"),
        "logit_scale": torch.ones(()),
    }
    if "text_projection.weight" in state:
        found["text_projection"] = state.pop("text_projection.weight").T.contiguous()
    renames = {"layer_norm1": "ln_1", "layer_norm2": "ln_2", "mlp.fc1": "mlp.c_fc", "mlp.fc2": "mlp.c_proj"}
    for name, x in state.items():
        short = name.replace("encoder.layers.", "transformer.resblocks.").replace("self_attn", "attn")
        for own, theirs in renames.items():
            short = short.replace(own, theirs)
        if ".q_proj." in short:
            kind = name.rpartition(".")[2]
            joined = torch.cat([state[name.replace("q_proj", f"{which}_proj")] for which in "qkv"])
            found[short.replace(f"q_proj.{kind}", f"in_proj_{kind}")] = joined
        elif ".k_proj." not in short and ".v_proj." not in short:
            found[short] = x
    return found


def with_prefix(prefix: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {prefix + name: x for name, x in state.items()}


def _renamed(state: Mapping[str, Tensor], renames: Mapping[str, str]) -> dict[str, Tensor]:
    found = {}
    for name, x in state.items():
        for own, original in renames.items():
            name = re.sub(own, original, name)
        found[name] = x
    return found


def _joined(state: dict[str, Tensor], parts: Sequence[str], whole: str) -> None:
    """Joins the rows of several layers, in every block that has them."""
    for name in [name for name in state if parts[0] in name]:
        state[name.replace(parts[0], whole)] = torch.cat([state.pop(name.replace(parts[0], part)) for part in parts])


def _swapped(x: Tensor) -> Tensor:
    """Swaps the shift and the scale of the last modulation, whose order is the reverse in diffusers."""
    return torch.cat(x.chunk(2)[::-1])


def sd3(transformer: Any) -> dict[str, Tensor]:
    """Returns an `SD3Transformer2DModel` in Stability's layout."""
    last = transformer.config.num_layers - 1
    state = transformer.state_dict()
    for name in state:
        if name.startswith(("norm_out.linear", f"transformer_blocks.{last}.norm1_context.linear")):
            state[name] = _swapped(state[name])
    found = _renamed(
        state,
        {
            r"^pos_embed\.pos_embed": "pos_embed",
            r"^pos_embed\.proj": "x_embedder.proj",
            r"^time_text_embed\.timestep_embedder\.linear_1": "t_embedder.mlp.0",
            r"^time_text_embed\.timestep_embedder\.linear_2": "t_embedder.mlp.2",
            r"^time_text_embed\.text_embedder\.linear_1": "y_embedder.mlp.0",
            r"^time_text_embed\.text_embedder\.linear_2": "y_embedder.mlp.2",
            r"^proj_out": "final_layer.linear",
            r"^norm_out\.linear": "final_layer.adaLN_modulation.1",
            r"^transformer_blocks": "joint_blocks",
            r"\.ff\.net\.0\.proj": ".x_block.mlp.fc1",
            r"\.ff\.net\.2": ".x_block.mlp.fc2",
            r"\.ff_context\.net\.0\.proj": ".context_block.mlp.fc1",
            r"\.ff_context\.net\.2": ".context_block.mlp.fc2",
            r"\.norm1\.linear": ".x_block.adaLN_modulation.1",
            r"\.norm1_context\.linear": ".context_block.adaLN_modulation.1",
            r"\.attn\.to_out\.0": ".x_block.attn.proj",
            r"\.attn\.to_add_out": ".context_block.attn.proj",
        },
    )
    _joined(found, [".attn.to_q.", ".attn.to_k.", ".attn.to_v."], ".x_block.attn.qkv.")
    _joined(found, [".attn.add_q_proj.", ".attn.add_k_proj.", ".attn.add_v_proj."], ".context_block.attn.qkv.")
    return found


def flux(transformer: nn.Module) -> dict[str, Tensor]:
    """Returns a `FluxTransformer2DModel` in Black Forest Labs' layout."""
    state = transformer.state_dict()
    for name in state:
        if name.startswith("norm_out.linear"):
            state[name] = _swapped(state[name])
    embedders = {"timestep_embedder": "time_in", "text_embedder": "vector_in", "guidance_embedder": "guidance_in"}
    layers = {"linear_1": "in_layer", "linear_2": "out_layer"}
    found = _renamed(
        state,
        {
            rf"^time_text_embed\.{own}\.{layer}": f"{original}.{theirs}"
            for own, original in embedders.items()
            for layer, theirs in layers.items()
        }
        | {
            r"^context_embedder": "txt_in",
            r"^x_embedder": "img_in",
            r"^single_transformer_blocks": "single_blocks",
            r"^transformer_blocks": "double_blocks",
            r"(?<=\d)\.norm\.linear": ".modulation.lin",
            r"\.norm1\.linear": ".img_mod.lin",
            r"\.norm1_context\.linear": ".txt_mod.lin",
            r"\.ff\.net\.0\.proj": ".img_mlp.0",
            r"\.ff\.net\.2": ".img_mlp.2",
            r"\.ff_context\.net\.0\.proj": ".txt_mlp.0",
            r"\.ff_context\.net\.2": ".txt_mlp.2",
            r"\.attn\.to_out\.0": ".img_attn.proj",
            r"\.attn\.to_add_out": ".txt_attn.proj",
            r"^(single_blocks\.\d+)\.proj_out": r"\1.linear2",
            r"^(single_blocks\.\d+)\.attn\.norm_q\.weight": r"\1.norm.query_norm.scale",
            r"^(single_blocks\.\d+)\.attn\.norm_k\.weight": r"\1.norm.key_norm.scale",
            r"\.attn\.norm_q\.weight": ".img_attn.norm.query_norm.scale",
            r"\.attn\.norm_k\.weight": ".img_attn.norm.key_norm.scale",
            r"\.attn\.norm_added_q\.weight": ".txt_attn.norm.query_norm.scale",
            r"\.attn\.norm_added_k\.weight": ".txt_attn.norm.key_norm.scale",
            r"^proj_out": "final_layer.linear",
            r"^norm_out\.linear": "final_layer.adaLN_modulation.1",
            r"^(single_blocks\.\d+)\.attn\.to_": r"\1.single.to_",
        },
    )
    _joined(found, [".single.to_q.", ".single.to_k.", ".single.to_v.", ".proj_mlp."], ".linear1.")
    _joined(found, [".attn.to_q.", ".attn.to_k.", ".attn.to_v."], ".img_attn.qkv.")
    _joined(found, [".attn.add_q_proj.", ".attn.add_k_proj.", ".attn.add_v_proj."], ".txt_attn.qkv.")
    return found


def wan(transformer: nn.Module) -> dict[str, Tensor]:
    """Returns a `WanTransformer3DModel` in Wan's published layout."""
    return _renamed(
        transformer.state_dict(),
        {
            r"^condition_embedder\.time_embedder\.linear_1": "time_embedding.0",
            r"^condition_embedder\.time_embedder\.linear_2": "time_embedding.2",
            r"^condition_embedder\.text_embedder\.linear_1": "text_embedding.0",
            r"^condition_embedder\.text_embedder\.linear_2": "text_embedding.2",
            r"^condition_embedder\.time_proj": "time_projection.1",
            r"^scale_shift_table": "head.modulation",
            r"^proj_out": "head.head",
            r"\.scale_shift_table": ".modulation",
            r"\.attn1\.": ".self_attn.",
            r"\.attn2\.": ".cross_attn.",
            r"\.to_out\.0\.": ".o.",
            r"\.to_([qkv])\.": r".\1.",
            r"\.ffn\.net\.0\.proj": ".ffn.0",
            r"\.ffn\.net\.2": ".ffn.2",
            r"\.norm2\.": ".norm3.",
        },
    )
