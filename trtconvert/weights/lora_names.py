"""Names of modules in LoRA files: the model's own, and those of the code that it was published with, which kohya's scripts,
ComfyUI and others train on.

No model is known by its class. A name of the original code counts where the modules that it stands for are there. diffusers has
such tables too, one for each pipeline. They need diffusers and peft, read no shapes, and leave out names that they do not know.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

DENOISER = "denoiser"

Shapes = Mapping[str, Sequence[int]]
"""Shapes of weights, by the names of their modules."""


@dataclass(frozen=True)
class Place:
    """The modules that an update is for. Several, such as q, k and v, share its rows in this order.

    Attributes:
        modules: their names in the model.
        swapped: the halves of the rows change places: diffusers has scale and shift of its last norm in the other order.
    """

    modules: tuple[str, ...]
    swapped: bool = False


def flat(name: str) -> str:
    """A name as kohya's scripts write it."""
    return name.replace(".", "_")


def places(shapes: Shapes) -> dict[str, Place]:
    """The modules of updates, by `flat` names. The name of a module that all others lie in may be left out, such as "unet"."""
    roots = {name.partition(".")[0] for name in shapes}
    root = f"{roots.pop()}." if len(roots) == 1 else ""
    own = {name.removeprefix(root): name for name in shapes}
    found = {flat(name): Place((name,)) for name in shapes}
    for short, name in own.items():
        # transformers 5 left "text_model." out of the names of CLIP's text models, which files have.
        for alias in (short, f"text_model.{short}", short.removeprefix("text_model.")):
            found.setdefault(flat(alias), Place((name,)))
    for alias, names in (*_of_unet(own), *_of_transformers(own)):
        rows, columns = (*shapes[own[names[0]]], 0)[:2]
        swapped = alias.endswith("adaLN_modulation.1") and rows == 2 * columns
        found.setdefault(flat(alias), Place(tuple(own[name] for name in names), swapped))
    return found


_Aliases = Iterator[tuple[str, tuple[str, ...]]]
"""A name of the original code, and the modules that it stands for."""

_OF_RESNETS = {
    "norm1": "in_layers.0",
    "conv1": "in_layers.2",
    "time_emb_proj": "emb_layers.1",
    "norm2": "out_layers.0",
    "conv2": "out_layers.3",
    "conv_shortcut": "skip_connection",
}


def _of_unet(modules: Mapping[str, str]) -> _Aliases:
    """Names of Stable Diffusion 1, 2 and XL: input_blocks, middle_block, output_blocks."""

    def count(prefix: str) -> int:
        return len({name[len(prefix) :].partition(".")[0] for name in modules if name.startswith(prefix)})

    blocks = {"middle_block.0": "mid_block.resnets.0", "middle_block.1": "mid_block.attentions.0"}
    blocks |= {"middle_block.2": "mid_block.resnets.1"}
    number = 1  # input_blocks.0 is the first convolution
    for level in range(count("down_blocks.")):
        block = f"down_blocks.{level}"
        for layer in range(count(f"{block}.resnets.")):
            blocks[f"input_blocks.{number}.0"] = f"{block}.resnets.{layer}"
            blocks[f"input_blocks.{number}.1"] = f"{block}.attentions.{layer}"
            number += 1
        if f"{block}.downsamplers.0.conv" in modules:
            yield f"input_blocks.{number}.0.op", (f"{block}.downsamplers.0.conv",)
            number += 1
    number = 0
    for level in range(count("up_blocks.")):
        block = f"up_blocks.{level}"
        layers, with_attention = count(f"{block}.resnets."), count(f"{block}.attentions.") > 0
        for layer in range(layers):
            blocks[f"output_blocks.{number}.0"] = f"{block}.resnets.{layer}"
            blocks[f"output_blocks.{number}.1"] = f"{block}.attentions.{layer}"
            number += 1
        if f"{block}.upsamplers.0.conv" in modules:
            yield f"output_blocks.{number - 1}.{1 + with_attention}.conv", (f"{block}.upsamplers.0.conv",)
    for alias, block in blocks.items():
        for name in modules:
            if name.startswith(f"{block}."):
                inner = name[len(block) + 1 :]
                yield f"{alias}.{_OF_RESNETS.get(inner, inner)}", (name,)
    for alias, name in {
        "input_blocks.0.0": "conv_in",
        "out.0": "conv_norm_out",
        "out.2": "conv_out",
        "time_embed.0": "time_embedding.linear_1",
        "time_embed.2": "time_embedding.linear_2",
        "label_emb.0.0": "add_embedding.linear_1",
        "label_emb.0.2": "add_embedding.linear_2",
    }.items():
        if name in modules:
            yield alias, (name,)


def _qkv(prefix: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{prefix}.{name}" for name in names or ("to_q", "to_k", "to_v"))


_DOUBLE, _SINGLE = "transformer_blocks.{i}", "single_transformer_blocks.{i}"
_ADDED = _qkv(f"{_DOUBLE}.attn", "add_q_proj", "add_k_proj", "add_v_proj")
_TIMESTEP, _TEXT = "time_text_embed.timestep_embedder", "time_text_embed.text_embedder"

_TRANSFORMERS: dict[str, tuple[str, ...]] = {
    # Flux
    "double_blocks.{i}.img_attn.qkv": _qkv(f"{_DOUBLE}.attn"),
    "double_blocks.{i}.txt_attn.qkv": _ADDED,
    "double_blocks.{i}.img_attn.proj": (f"{_DOUBLE}.attn.to_out.0",),
    "double_blocks.{i}.txt_attn.proj": (f"{_DOUBLE}.attn.to_add_out",),
    "double_blocks.{i}.img_mlp.0": (f"{_DOUBLE}.ff.net.0.proj",),
    "double_blocks.{i}.img_mlp.2": (f"{_DOUBLE}.ff.net.2",),
    "double_blocks.{i}.txt_mlp.0": (f"{_DOUBLE}.ff_context.net.0.proj",),
    "double_blocks.{i}.txt_mlp.2": (f"{_DOUBLE}.ff_context.net.2",),
    "double_blocks.{i}.img_mod.lin": (f"{_DOUBLE}.norm1.linear",),
    "double_blocks.{i}.txt_mod.lin": (f"{_DOUBLE}.norm1_context.linear",),
    "single_blocks.{i}.linear1": (*_qkv(f"{_SINGLE}.attn"), f"{_SINGLE}.proj_mlp"),
    "single_blocks.{i}.linear2": (f"{_SINGLE}.proj_out",),
    "single_blocks.{i}.modulation.lin": (f"{_SINGLE}.norm.linear",),
    "img_in": ("x_embedder",),
    "txt_in": ("context_embedder",),
    **{
        f"{theirs}.{layer}": (f"{ours}.{name}",)
        for theirs, ours in (
            ("time_in", _TIMESTEP),
            ("vector_in", _TEXT),
            ("guidance_in", "time_text_embed.guidance_embedder"),
        )
        for layer, name in (("in_layer", "linear_1"), ("out_layer", "linear_2"))
    },
    # Stable Diffusion 3
    "joint_blocks.{i}.x_block.attn.qkv": _qkv(f"{_DOUBLE}.attn"),
    "joint_blocks.{i}.x_block.attn2.qkv": _qkv(f"{_DOUBLE}.attn2"),
    "joint_blocks.{i}.context_block.attn.qkv": _ADDED,
    "joint_blocks.{i}.x_block.attn.proj": (f"{_DOUBLE}.attn.to_out.0",),
    "joint_blocks.{i}.x_block.attn2.proj": (f"{_DOUBLE}.attn2.to_out.0",),
    "joint_blocks.{i}.context_block.attn.proj": (f"{_DOUBLE}.attn.to_add_out",),
    **{
        f"joint_blocks.{{i}}.{theirs}.{layer}": (f"{_DOUBLE}.{name}",)
        for theirs, end in (("x_block", ""), ("context_block", "_context"))
        for layer, name in (
            ("mlp.fc1", f"ff{end}.net.0.proj"),
            ("mlp.fc2", f"ff{end}.net.2"),
            ("adaLN_modulation.1", f"norm1{end}.linear"),
        )
    },
    "x_embedder.proj": ("pos_embed.proj",),
    **{
        f"{theirs}.mlp.{place}": (f"{ours}.{name}",)
        for theirs, ours in (("t_embedder", _TIMESTEP), ("y_embedder", _TEXT))
        for place, name in (("0", "linear_1"), ("2", "linear_2"))
    },
    # both
    "final_layer.linear": ("proj_out",),
    "final_layer.adaLN_modulation.1": ("norm_out.linear",),
    # Wan
    **{
        f"blocks.{{i}}.{theirs}.{layer}": (f"blocks.{{i}}.{ours}.{name}",)
        for theirs, ours in (("self_attn", "attn1"), ("cross_attn", "attn2"))
        for layer, name in (
            *(("q", "to_q"), ("k", "to_k"), ("v", "to_v"), ("o", "to_out.0")),
            *((norm, norm) for norm in ("norm_q", "norm_k")),
        )
    },
    "blocks.{i}.cross_attn.k_img": ("blocks.{i}.attn2.add_k_proj",),
    "blocks.{i}.cross_attn.v_img": ("blocks.{i}.attn2.add_v_proj",),
    "blocks.{i}.cross_attn.norm_k_img": ("blocks.{i}.attn2.norm_added_k",),
    "blocks.{i}.norm3": ("blocks.{i}.norm2",),
    "blocks.{i}.ffn.0": ("blocks.{i}.ffn.net.0.proj",),
    "blocks.{i}.ffn.2": ("blocks.{i}.ffn.net.2",),
    "time_embedding.0": ("condition_embedder.time_embedder.linear_1",),
    "time_embedding.2": ("condition_embedder.time_embedder.linear_2",),
    "text_embedding.0": ("condition_embedder.text_embedder.linear_1",),
    "text_embedding.2": ("condition_embedder.text_embedder.linear_2",),
    "time_projection.1": ("condition_embedder.time_proj",),
    "img_emb.proj.1": ("condition_embedder.image_embedder.ff.net.0.proj",),
    "img_emb.proj.3": ("condition_embedder.image_embedder.ff.net.2",),
    "head.head": ("proj_out",),
}
"""Names of transformers' original code, where {i} is the number of a block, and diffusers' names."""


def _of_transformers(modules: Mapping[str, str]) -> _Aliases:
    numbers = sorted({part for name in modules for part in name.split(".")[1:2] if part.isdecimal()}, key=int)
    for alias, names in _TRANSFORMERS.items():
        for number in numbers if "{i}" in alias else [""]:
            here = tuple(name.replace("{i}", number) for name in names)
            if all(name in modules for name in here):
                yield alias.replace("{i}", number), here


# Parts of a pipeline ---------------------------------------------------------------------------------------------------

_PREFIXES: tuple[tuple[str, tuple[str, ...]], ...] = (
    *((prefix, (DENOISER,)) for prefix in ("lora_unet_", "lora_transformer_", "lycoris_")),
    *((prefix, (DENOISER,)) for prefix in ("model.diffusion_model.", "diffusion_model.", "unet.", "transformer.")),
    *((prefix, ("text_encoder",)) for prefix in ("lora_te_", "lora_te1_", "text_encoder.")),
    *((prefix, ("text_encoder_2",)) for prefix in ("lora_te2_", "text_encoder_2.")),
    ("text_encoders.clip_l.transformer.", ("text_encoder",)),
    ("text_encoders.clip_g.transformer.", ("text_encoder_2",)),
    # T5 is Flux's second text encoder and the third of Stable Diffusion 3.
    ("lora_te3_", ("text_encoder_3", "text_encoder_2")),
    ("text_encoders.t5xxl.transformer.", ("text_encoder_3", "text_encoder_2")),
    ("text_encoder_3.", ("text_encoder_3",)),
)
"""Prefixes of names, and the components that the names may be of."""

DENOISER_PREFIXES = tuple(prefix for prefix, of in _PREFIXES if of == (DENOISER,))

PEFT_ROOT = "base_model.model."
"""Prefix of names in peft's own files."""

_FURTHER = re.compile(r"((?:transformer|unet)_\d+)\.")
"""Prefix of names of a pipeline's further denoisers, such as transformer_2."""


def further_denoiser(name: str) -> str:
    """The further denoiser that a module's name in a file is of; empty where it is of none."""
    match = _FURTHER.match(name.removeprefix(PEFT_ROOT))
    return "" if match is None else match[1]


def of_one_denoiser(names: Iterable[str], modules: Iterable[str]) -> list[str]:
    """Those of the names that a file has for a pipeline's denoisers that are for one denoiser.

    Args:
        modules: of the denoiser. Where they all lie in one module, such as "transformer_2", its name tells which denoiser it is.
    """
    names, modules = list(names), set(modules)
    roots = {name.partition(".")[0] for name in modules}
    own = further_denoiser(f"{min(roots)}.") if len(roots) == 1 else ""
    denoisers = {
        name: "" if name.removeprefix(PEFT_ROOT) in modules and not own else further_denoiser(name) for name in names
    }
    # A file of one denoiser alone need not say which.
    wanted = own if own in denoisers.values() else ""
    return [name for name in names if denoisers[name] == wanted]


def component_of(name: str) -> tuple[tuple[str, ...], str]:
    """The components that a module's name in a file may be of, none where the name does not tell, and the name without prefix."""
    name = name.removeprefix(PEFT_ROOT)
    if further := further_denoiser(name):
        return (DENOISER,), name[len(further) + 1 :]
    for prefix, components in _PREFIXES:
        if name.startswith(prefix):
            return components, name.removeprefix(prefix)
    return (), name


def named(components: set[tuple[str, ...]]) -> list[str]:
    """Components in the recipe's words, the denoiser first."""
    names = {" or ".join(of) for of in components if of}
    return sorted(names, key=lambda name: (name != DENOISER, name))
