"""Parts of diffusers' models whose operations follow the values or the number of the samples, in a form that exporters take.

Each gives what the part itself gives, and is found by the name of its class.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trtconvert.models.prompt_masks import mask_prompts


def make_exportable(model: nn.Module) -> None:
    """Put these forms into the model in the place of its own parts, and the form of `prompt_masks` in that of its forward."""
    mask_prompts(model)
    for module in model.modules():
        if (forward := _FORWARDS.get(type(module).__name__)) is not None:
            module.forward = MethodType(forward, module)
        processor: Any = getattr(module, "processor", None)
        if (process := _PROCESSORS.get(type(processor).__name__)) is not None:
            module.processor = process  # type: ignore[assignment]  # a callable as any other


def _chroma_modulation_inputs(self: Any, timestep: Tensor) -> Tensor:
    """ChromaCombinedTimestepTextProjEmbeddings, which makes a list with an entry for each sample.

    Args:
        timestep: [B].
    Returns:
        [B, modulations, 4 · channels].
    """
    steps, nothing = self.time_proj(timestep), self.guidance_proj(torch.zeros_like(timestep))
    of_samples = torch.cat([steps, nothing], dim=1)[:, None].to(timestep.dtype)
    of_places = self.mod_proj[None].to(of_samples)
    samples, places = of_samples.shape[0], of_places.shape[1]
    return torch.cat([of_samples.expand(-1, places, -1), of_places.expand(samples, -1, -1)], dim=-1)


def _in_type_of_weights(self: Any, *features: Tensor | None, **named: Tensor | None) -> Tensor:
    """A projection of features, some of which come in the type of the timestep: FP32, whatever the model is in.

    Args:
        features, named: [B, …], in any type.
    Returns:
        What the projection's own forward gives, in the type of its weights.
    """
    dtype = self.linear_1.weight.dtype

    def cast(x: Tensor | None) -> Tensor | None:
        return x if x is None else x.to(dtype)

    return type(self).forward(self, *map(cast, features), **{name: cast(x) for name, x in named.items()})


def _mochi_attention(
    attn: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    attention_mask: Tensor,
    image_rotary_emb: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """MochiAttnProcessor2_0, which leaves out the tokens that pad each prompt, behind its others: here they are masked.

    Args:
        hidden_states: [B, N, C]; encoder_hidden_states: [B, L, C]; attention_mask: [B, L], true for tokens of the prompt.
        image_rotary_emb: cosines and sines, [N, heads, D / 2] each.
    Returns:
        Both, after attention over [N + L] tokens.
    """

    def heads(x: Tensor, norm: nn.Module | None = None) -> Tensor:
        x = x.unflatten(2, (attn.heads, -1))
        return x if norm is None else norm(x)

    def rotated(x: Tensor) -> Tensor:  # [B, N, H, D]
        if image_rotary_emb is None:
            return x
        cosines, sines = image_rotary_emb
        even, odd = x[..., 0::2].float(), x[..., 1::2].float()
        return torch.stack([even * cosines - odd * sines, even * sines + odd * cosines], dim=-1).flatten(-2).to(x.dtype)

    query = rotated(heads(attn.to_q(hidden_states), attn.norm_q))
    key = rotated(heads(attn.to_k(hidden_states), attn.norm_k))
    text_query = heads(attn.add_q_proj(encoder_hidden_states), attn.norm_added_q)
    text_key = heads(attn.add_k_proj(encoder_hidden_states), attn.norm_added_k)
    value, text_value = heads(attn.to_v(hidden_states)), heads(attn.add_v_proj(encoder_hidden_states))
    pairs = ((query, text_query), (key, text_key), (value, text_value))
    of_prompt = attention_mask.bool()
    kept = torch.cat([torch.ones_like(hidden_states[..., 0], dtype=torch.bool), of_prompt], dim=1)
    attended = F.scaled_dot_product_attention(
        *(torch.cat(pair, dim=1).transpose(1, 2) for pair in pairs), attn_mask=kept[:, None, None]
    )
    both = attended.transpose(1, 2).flatten(2)
    length = hidden_states.shape[1]
    text = both[:, length:] * of_prompt[..., None]
    image = attn.to_out[1](attn.to_out[0](both[:, :length]))
    return image, attn.to_add_out(text) if hasattr(attn, "to_add_out") else text


_FORWARDS: Mapping[str, Callable[..., Any]] = {
    "ChromaCombinedTimestepTextProjEmbeddings": _chroma_modulation_inputs,
    "TimestepEmbedding": _in_type_of_weights,
    "PixArtAlphaTextProjection": _in_type_of_weights,
}

_PROCESSORS: Mapping[str, Callable[..., Any]] = {"MochiAttnProcessor2_0": _mochi_attention}
