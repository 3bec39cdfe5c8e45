"""Replacements for parts of diffusers' models that depend on the values or the number of the samples.

Exporters take the replacements. Each computes the same as the part, and is found by the name of the part's class.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trtconvert.models.prompt_masks import mask_prompts


def make_exportable(model: nn.Module) -> None:
    """Puts the replacements into a model, and the forward of `prompt_masks` in the place of its own."""
    mask_prompts(model)
    for module in model.modules():
        for name, method in _without_caches(type(module)).items():
            setattr(module, name, MethodType(method, module))
        for name, method in _METHODS.get(type(module).__name__, {}).items():
            setattr(module, name, MethodType(method, module))
        processor: Any = getattr(module, "processor", None)
        if (process := _PROCESSORS.get(type(processor).__name__)) is not None:
            module.processor = process  # type: ignore[assignment]  # a callable as any other


def _without_caches(kind: type) -> dict[str, Callable[..., Any]]:
    """Returns a class's methods that cache their results (functools.lru_cache), without the cache: it would keep fake tensors of
    a call on shapes, or tensors of an export."""
    found = {name: x for of in reversed(kind.__mro__) for name, x in vars(of).items() if hasattr(x, "cache_clear")}
    return {name: x.__wrapped__ for name, x in found.items() if hasattr(x, "__wrapped__")}


def _chroma_modulation_inputs(self: Any, timestep: Tensor) -> Tensor:
    """Replaces the forward of ChromaCombinedTimestepTextProjEmbeddings, which makes a list with an entry for each sample.
    timestep [B] → [B, modulations, 4 · channels]."""
    steps, nothing = self.time_proj(timestep), self.guidance_proj(torch.zeros_like(timestep))
    of_samples = torch.cat([steps, nothing], dim=1)[:, None].to(timestep.dtype)
    of_places = self.mod_proj[None].to(of_samples)
    samples, places = of_samples.shape[0], of_places.shape[1]
    return torch.cat([of_samples.expand(-1, places, -1), of_places.expand(samples, -1, -1)], dim=-1)


def _in_type_of_weights(self: Any, *features: Tensor | None, **named: Tensor | None) -> Tensor:
    """Replaces the forward of projections, some of whose features [B, …] come in the type of the timestep: FP32, whatever the
    model's type. The result has the type of the weights."""
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
    """Replaces MochiAttnProcessor2_0, which removes the padding at the end of each prompt; here padding is masked.

    Args:
        hidden_states: [B, N, C]; encoder_hidden_states: [B, L, C]; attention_mask: [B, L], true for tokens of the prompt.
        image_rotary_emb: cosines and sines, [N, heads, D / 2] each.
    Returns:
        Both after attention over [N + L] tokens.
    """

    def rotated(x: Tensor) -> Tensor:  # [B, N, H, D]
        if image_rotary_emb is None:
            return x
        cosines, sines = image_rotary_emb
        even, odd = x[..., 0::2].float(), x[..., 1::2].float()
        return torch.stack([even * cosines - odd * sines, even * sines + odd * cosines], dim=-1).flatten(-2).to(x.dtype)

    of_prompt = attention_mask.bool()
    image, text = _attended(attn, hidden_states, encoder_hidden_states, of_prompt, rotated)
    text = text * of_prompt[..., None]
    return attn.to_out[1](attn.to_out[0](image)), attn.to_add_out(text) if hasattr(attn, "to_add_out") else text


def _attended(
    attn: Any, image: Tensor, text: Tensor, of_prompt: Tensor, rotated: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """Computes attention over the tokens of an image and of a prompt, before the output projections. The prompt's padding is
    masked.

    Args:
        image: [B, N, C]; text: [B, L, C]; of_prompt: [B, L], true for tokens of the prompt.
        rotated: applies the image's rotary embedding to queries or keys [B, N, H, D].
    Returns:
        The image's [B, N, H · D] and the prompt's [B, L, H · D].
    """

    def heads(x: Tensor, norm: nn.Module | None = None) -> Tensor:
        x = x.unflatten(2, (attn.heads, -1))
        return x if norm is None else norm(x)

    query, key = rotated(heads(attn.to_q(image), attn.norm_q)), rotated(heads(attn.to_k(image), attn.norm_k))
    text_query = heads(attn.add_q_proj(text), attn.norm_added_q)
    text_key = heads(attn.add_k_proj(text), attn.norm_added_k)
    value, text_value = heads(attn.to_v(image)), heads(attn.add_v_proj(text))
    kept = torch.cat([torch.ones_like(image[..., 0], dtype=torch.bool), of_prompt], dim=1)
    pairs = ((query, text_query), (key, text_key), (value, text_value))
    attended = F.scaled_dot_product_attention(
        *(torch.cat(pair, dim=1).transpose(1, 2) for pair in pairs), attn_mask=kept[:, None, None]
    )
    both, length = attended.transpose(1, 2).flatten(2), image.shape[1]
    return both[:, :length], both[:, length:]


class _HunyuanVideoAttention:
    """Replaces HunyuanVideo15AttnProcessor2_0: its mask also hides all keys from the padding of a prompt. Padding rows reach no
    other rows, and a mask of keys alone does not grow with the square of the video's tokens.

    This is a class, as diffusers reads the parameters of `__call__`.
    """

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        attention_mask: Tensor,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """
        Args:
            hidden_states: [B, N, C]; encoder_hidden_states: [B, L, C]; attention_mask: [B, L], true for tokens of the prompt.
            image_rotary_emb: cosines and sines, [N, D] each.
        Returns:
            Both after attention over [N + L] tokens.
        """
        from diffusers.models import embeddings

        rotary: Any = embeddings.apply_rotary_emb

        def rotated(x: Tensor) -> Tensor:  # [B, N, H, D]
            return x if image_rotary_emb is None else rotary(x, image_rotary_emb, sequence_dim=1)

        image, text = _attended(attn, hidden_states, encoder_hidden_states, attention_mask.bool(), rotated)
        return attn.to_out[1](attn.to_out[0](image)), attn.to_add_out(text)


def _hunyuan_video_refiner(
    self: Any, hidden_states: Tensor, temb: Tensor, attention_mask: Tensor | None = None
) -> Tensor:
    """Replaces the forward of HunyuanVideo15IndividualTokenRefiner: its mask also hides all keys from the padding of a prompt.

    Args:
        hidden_states: [B, L, C]; temb: [B, C]; attention_mask: [B, L], true for tokens of the prompt.
    """
    kept = None if attention_mask is None else attention_mask.bool()[:, None, None]
    for block in self.refiner_blocks:
        hidden_states = block(hidden_states, temb, kept)
    return hidden_states


def _all_experts(self: Any, x: Tensor) -> Tensor:
    """Replaces the forward of HiDream's MOEFeedForwardSwiGLU, which sorts tokens by expert, so that values decide the number of
    tokens of each expert. Here each expert computes all tokens, and the experts that a token was not sent to have weight 0: with
    2 of 4 experts that is twice the work, in products of one size. x [B, N, C] → [B, N, C]."""
    chosen, weights, _ = self.gate(x)  # [B · N, experts of a token]
    sent = chosen[..., None] == torch.arange(len(self.experts), device=x.device)
    shares = (sent * weights[..., None]).sum(1).unflatten(0, x.shape[:2]).to(x.dtype)
    y = self.shared_experts(x)
    for place, expert in enumerate(self.experts):
        y = y + expert(x) * shares[..., place, None]
    return y


def _experts_of_equal_shares(self: Any, x: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
    """Replaces the forward of NucleusMoE's SwiGLUExperts, which reads the number of tokens of each expert. The experts choose
    tokens, the same number each. x [experts · tokens of each, C] is sorted by expert; num_tokens_per_expert is not read."""
    of_experts = x.unflatten(0, (self.num_experts, -1))
    gate, up = torch.matmul(of_experts, self.gate_up_proj).chunk(2, dim=-1)
    return torch.matmul(F.silu(gate) * up, self.down_proj).flatten(0, 1)


def _glm_image(
    self: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    prior_token_id: Tensor,
    prior_token_drop: Tensor,
    timestep: Tensor,
    target_size: Tensor,
    crop_coords: Tensor,
    attention_kwargs: dict[str, Any] | None = None,
    return_dict: bool = True,
    attention_mask: Tensor | None = None,
    kv_caches: Any = None,
    image_rotary_emb: Any = None,
) -> Any:
    """Replaces the forward of GlmImageTransformer2DModel, which selects the prior tokens that are dropped, so that values decide
    their number. Here all prior tokens are multiplied by the mask. Caches of keys and values are not used, as without an image.

    Args:
        hidden_states: [B, C, H, W]; encoder_hidden_states: [B, L, D]; prior_token_id, prior_token_drop: [B, tokens];
            timestep: [B]; target_size, crop_coords: [B, 2].
    Returns:
        [B, C', H, W].
    """
    from diffusers.models.modeling_outputs import Transformer2DModelOutput

    assert kv_caches is None
    patch = self.config.patch_size
    rows, columns = (size // patch for size in hidden_states.shape[2:])
    rotations = self.rope(hidden_states) if image_rotary_emb is None else image_rotary_emb
    kept = self.prior_token_embedding(prior_token_id) * ~prior_token_drop.bool()[..., None]
    image = self.image_projector(hidden_states) + self.prior_projector(kept)
    text = self.glyph_projector(encoder_hidden_states)
    steps = self.time_condition_embed(timestep, target_size, crop_coords, image.dtype)
    for block in self.transformer_blocks:
        image, text = block(image, text, steps, rotations, attention_mask, attention_kwargs)
    predicted = (
        self.proj_out(self.norm_out(image, steps)).unflatten(2, (-1, patch, patch)).unflatten(1, (rows, columns))
    )
    sample = predicted.permute(0, 3, 1, 4, 2, 5).flatten(4, 5).flatten(2, 3)
    return Transformer2DModelOutput(sample=sample) if return_dict else (sample,)


def _hidream_patches(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor | None, tuple[Any, Any], Tensor]:
    """Replaces HiDream's patchify, which writes the number of patches of an image into a tensor; here it is a number.
    Takes [B, C, H, W]; returns tokens, their mask if H and W differ, rows and columns of patches, positions."""
    tokens, masks, _, positions = type(self).patchify(self, hidden_states)
    rows, columns = (size // self.config.patch_size for size in hidden_states.shape[2:])
    return tokens, masks, (rows, columns), positions


def _hidream_image(self: Any, x: Tensor, img_sizes: tuple[Any, Any], is_training: bool) -> Tensor:
    """Replaces HiDream's unpatchify, for images of one size. x [B, N, patch · patch · C], rows and columns → [B, C, H, W]."""
    rows, columns = img_sizes
    patch = self.config.patch_size
    x = x[:, : rows * columns].reshape(x.shape[0], rows, columns, patch, patch, -1)
    return x.permute(0, 5, 1, 3, 2, 4).reshape(x.shape[0], -1, rows * patch, columns * patch)


def _omnigen_rotations(self: Any, hidden_states: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Replaces the forward of OmniGenSuScaledRotaryEmbedding, which reads the largest position to choose the factors of its
    frequencies. As in the original, all samples are rotated by the positions of the first.

    Args:
        hidden_states: of any shape; position_ids: [B, N].
    Returns:
        Cosines and sines, [N, D] each.
    """
    device, original = hidden_states.device, self.original_max_position_embeddings
    long, short = (torch.tensor(x, dtype=torch.float32, device=device) for x in (self.long_factor, self.short_factor))
    factors = torch.where(position_ids.max() + 1 > original, long, short)
    powers = torch.arange(0, self.dim, 2, dtype=torch.int64, device=device).float() / self.dim
    turns = position_ids[0, :, None].float() / (factors * self.base**powers)
    turns = torch.cat([turns, turns], dim=-1)
    longer = self.max_position_embeddings / original
    scale = math.sqrt(1 + math.log(longer) / math.log(original)) if longer > 1 else 1.0
    return turns.cos() * scale, turns.sin() * scale


_METHODS: Mapping[str, Mapping[str, Callable[..., Any]]] = {
    "ChromaCombinedTimestepTextProjEmbeddings": {"forward": _chroma_modulation_inputs},
    "GlmImageTransformer2DModel": {"forward": _glm_image},
    "HiDreamImageTransformer2DModel": {"patchify": _hidream_patches, "unpatchify": _hidream_image},
    "HunyuanVideo15IndividualTokenRefiner": {"forward": _hunyuan_video_refiner},
    "MOEFeedForwardSwiGLU": {"forward": _all_experts},
    "OmniGenSuScaledRotaryEmbedding": {"forward": _omnigen_rotations},
    "PixArtAlphaTextProjection": {"forward": _in_type_of_weights},
    "SwiGLUExperts": {"forward": _experts_of_equal_shares},
    "TimestepEmbedding": {"forward": _in_type_of_weights},
}
"""Replacements of methods, by class."""

_PROCESSORS: Mapping[str, Callable[..., Any]] = {
    "HunyuanVideo15AttnProcessor2_0": _HunyuanVideoAttention(),
    "MochiAttnProcessor2_0": _mochi_attention,
}
