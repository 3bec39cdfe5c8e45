"""Arguments of a pipeline's call instead of prompts: classes, and embeddings of noise if text encoders are absent."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trtconvert.errors import UserError, unfit_option
from trtconvert.models.call_source import LIST

if TYPE_CHECKING:
    from trtconvert.models.pipelines import PipelineCaller

_TEXT_WIDTHS = (
    "encoder_hid_dim",  # Kolors, DeepFloyd IF and Kandinsky 3 project embeddings to cross_attention_dim
    "caption_channels",
    "cap_feat_dim",
    "joint_attention_dim",
    "text_dim",
    "text_embed_dim",
    "text_in_dim",
    "context_in_dim",
    "in_text_dim",
    "cross_attention_dim",
)

EMBEDDINGS: dict[str, tuple[tuple[str, ...], str | None]] = {
    "prompt_embeds": (_TEXT_WIDTHS, "text_len"),
    "prompt_embeds_2": (("cross_attention_dim_t5", "text_embed_2_dim"), "text_len_t5"),
    "prompt_embeds_qwen": (("in_text_dim",), "text_len"),
    "prompt_embeds_clip": (("in_text_dim2",), None),
    "pooled_prompt_embeds": (("pooled_projection_dim", "in_text_dim2"), None),
    "image_embeds": (("encoder_hid_dim",), None),
}
"""A pipeline's arguments for embeddings: entries of the denoiser's configuration that may hold the width, the first one present
counts; and the entry that may hold the number of tokens, None for one vector a sample."""

_CLASSES = ("num_class_embeds", "num_embeds_ada_norm")
"""Entries of a denoiser's configuration that may hold the number of classes; the first one present counts."""


def stand_ins(caller: PipelineCaller, seeds: Sequence[int], tokens: int) -> dict[str, Any]:
    """Returns the arguments of a call that decide what samples show without prompts: classes, embeddings, or only the number of
    samples."""
    given: dict[str, Any] = {}
    if "batch_size" in caller.parameters:
        given["batch_size"] = len(seeds)
    if "class_labels" in caller.parameters and (labels := _labels(caller, seeds)):
        given["class_labels"] = labels
    return given | (_embeddings(caller, seeds, tokens) if caller.takes_embeddings else {})


def _labels(caller: PipelineCaller, seeds: Sequence[int]) -> list[int]:
    """Returns a class for each sample: the recipe's by turns, else drawn by the sample's seed; none without classes."""
    config = caller.denoiser.config
    classes = next((config[name] for name in _CLASSES if isinstance(config.get(name), int)), None)
    chosen = caller.arguments.get("class_labels")
    if chosen is None:
        return [int(torch.randint(classes, (), generator=_generator(seed))) for seed in seeds] if classes else []
    named = list(chosen) if isinstance(chosen, (list, tuple)) else [chosen]
    if not named or not all(type(n) is int and 0 <= n < (classes or n + 1) for n in named):
        expected = "a list of whole numbers from 0" + (f" to {classes - 1}" if classes else "")
        remedy = "correct it in the recipe, or leave it out: the seed of each sample then draws its class"
        raise unfit_option("call.class_labels", expected, chosen, remedy)
    return [named[seed % len(named)] for seed in seeds]


def _embeddings(caller: PipelineCaller, seeds: Sequence[int], tokens: int) -> dict[str, Any]:
    """Returns embeddings of N(0, 1), seeded by the sample, and zeros for the negative prompt."""
    made: dict[str, Any] = {}
    for name in EMBEDDINGS:
        if name in caller.parameters and (shape := _embedding_shape(caller, name, tokens)):
            drawn = [torch.randn(shape, dtype=torch.float32, generator=_generator(seed)) for seed in seeds]
            made[name] = torch.stack(drawn)
            if f"negative_{name}" in caller.parameters and _guides(caller):
                made[f"negative_{name}"] = torch.zeros_like(made[name])
            made |= _masks(caller, name, len(seeds), shape[0])
    if "negative_prompt" in caller.parameters:
        made["negative_prompt"] = None  # a default prompt would exclude negative embeddings
    if "prompt" in caller.parameters and caller.signature["prompt"].default is inspect.Parameter.empty:
        made["prompt"] = None
    device = caller.pipe.device  # diffusers searches all modules for it
    on_device = {name: x if x is None else x.to(device) for name, x in made.items()}
    return {name: list(x) if x is not None and _is_list(caller, name) else x for name, x in on_device.items()}


def _guides(caller: PipelineCaller) -> bool:
    """Whether a call may use negative prompts. AnyFlow joins negative embeddings to the others even where it does not."""
    scale = caller.arguments.get("guidance_scale", getattr(caller.signature.get("guidance_scale"), "default", None))
    return "true_cfg_scale" in caller.parameters or not isinstance(scale, (int, float)) or scale > 1


def _is_list(caller: PipelineCaller, name: str) -> bool:
    """Whether an argument is declared as a list. Such pipelines join the lists of both halves with +, which would add tensors."""
    return LIST.match(str(caller.signature[name].annotation)) is not None


def _embedding_shape(caller: PipelineCaller, name: str, number: int) -> tuple[int, ...]:
    """Returns the shape of one sample's embeddings, (tokens, width) or (width,); () if the model takes none of this name. number:
    of tokens, unless the model's configuration has it."""
    config = caller.denoiser.config
    widths, tokens = EMBEDDINGS[name]
    width = next((config[key] for key in widths if isinstance(config.get(key), int)), None)
    if name == "pooled_prompt_embeds" and config.get("addition_embed_type") == "text_time":
        # SDXL joins the text's vector with six numbers, or with five where an aesthetic score replaces two.
        numbers = 5 if getattr(caller.pipe.config, "requires_aesthetics_score", False) else 6
        width = config["projection_class_embeddings_input_dim"] - numbers * config["addition_time_embed_dim"]
    has_default = caller.signature[name].default is not inspect.Parameter.empty
    if (width is None and name == "pooled_prompt_embeds") or (name == "image_embeds" and caller.images and has_default):
        return ()  # the pipeline computes image embeddings from the images of its call
    if width is None:
        lacking = not caller.has_text_encoder
        raise UserError(
            f"the width of {name} is not known: {type(caller.pipe).__name__} "
            + ("has no text encoder" if lacking else "gets embeddings of several lengths")
            + ", and its denoiser's configuration does not have the width",
            expected="one of " + ", ".join(widths) + " in the denoiser's configuration",
            got="none",
            remedy="save the pipeline with its text encoder"
            if lacking
            else "remove model.options.tokens from the recipe",
        )
    return (width,) if tokens is None else (config.get(tokens) or number, width)


def _masks(caller: PipelineCaller, name: str, samples: int, tokens: int) -> dict[str, Tensor]:
    """Returns the masks, by argument, which say that all tokens of some embeddings belong to the prompt."""
    if not name.startswith("prompt_embeds") or EMBEDDINGS[name][1] is None:
        return {}
    rest = name.removeprefix("prompt_embeds")
    names = (
        f"prompt_attention_mask{rest}",
        f"prompt_embeds_mask{rest}",
        f"attention_mask{rest}",
        "prompt_cu_seqlens",
    )
    # Chroma adds its mask to the products of queries and keys; the others select keys by it.
    dtype = torch.float32 if "approximator_layers" in caller.denoiser.config else torch.int64
    ones = torch.ones(samples, tokens, dtype=dtype)
    lengths = torch.arange(samples + 1, dtype=torch.int32) * tokens
    return {
        title: lengths if title.endswith("cu_seqlens") else ones
        for title in (*names, *(f"negative_{name}" for name in names))
        if title in caller.parameters
    }


def _generator(seed: int) -> torch.Generator:
    """Returns a generator that differs from that of the latents, which the seed itself draws."""
    return torch.Generator().manual_seed(seed ^ 0x5EED)
