"""Forwards of diffusers' transformers that treat the length of each prompt as data.

The models' own forwards read the length of each prompt and build tokens, positions and masks sample by sample, which an exported
graph cannot do. Attention does not depend on the order of its tokens if rotations and masks go with them, and rotations depend on
differences of positions alone (Su et al. 2021, RoFormer, arXiv:2104.09864, equation 16). Therefore the tokens of a prompt are put
at the end of the space for prompts, right before the positions of the image: all samples then have the same positions, whatever
the length of their prompts, and a mask hides the rest of the space.

Each forward is found by the class of its model, and computes the same up to the order of sums.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trtconvert.errors import UserError

_MULTIPLE = 32
"""Z-Image pads images and prompts to multiples of this number of tokens."""


def mask_prompts(model: nn.Module) -> None:
    """Replaces the model's forward if there is one for its class here."""
    name = type(model).__name__
    if (forward := _OF_TENSORS.get(name) or _OF_LISTS.get(name)) is not None:
        model.forward = MethodType(forward, model)


def takes_rows(model: nn.Module) -> bool:
    """Whether the model takes lists with an entry for each sample, and `mask_prompts` gives it a forward for tensors: samples
    [B, …], and prompts as `PaddedRows`."""
    return type(model).__name__ in _OF_LISTS


def _z_image(
    self: Any,
    x: Any,
    t: Tensor,
    cap_feats: Any,
    return_dict: bool = True,
    controlnet_block_samples: Any = None,
    siglip_feats: Any = None,
    image_noise_mask: Any = None,
    patch_size: int = 2,
    f_patch_size: int = 1,
    joint_attention_kwargs: dict[str, Any] | None = None,
) -> Any:
    """Replaces the forward of ZImageTransformer2DModel, which takes lists. Calls with lists go to the model's own forward.

    The tokens of the image, and those of the prompt, are padded to a multiple of 32 by learned tokens. The image follows the
    prompt on the first axis of positions; the padding of the image is at position 0 on all axes.
    Args:
        x: [B, C, F, H, W]; t: [B], 0 for noise and 1 for images; cap_feats: rows [B, T, D] with their mask.
        controlnet_block_samples: by layer, the ControlNet's addition to its output, [B, tokens, D], first the image's tokens.
    Returns:
        [B, C, F, H, W].
    """
    further = {
        "siglip_feats": siglip_feats,
        "image_noise_mask": image_noise_mask,
        "joint_attention_kwargs": joint_attention_kwargs,
    }
    if not isinstance(x, Tensor):
        own = {"controlnet_block_samples": controlnet_block_samples, "return_dict": return_dict, **further}
        return type(self).forward(self, x, t, cap_feats, patch_size=patch_size, f_patch_size=f_patch_size, **own)
    _refuse_further(self, further)
    prompts, of_prompt = cap_feats
    batch, channels = x.shape[:2]
    patch = (f_patch_size, patch_size, patch_size)
    grid = _grid(x, patch)
    kind = f"{patch_size}-{f_patch_size}"

    steps = self.t_embedder(t * self.t_scale).type_as(x)
    image = self.all_x_embedder[kind](_patches(x, grid, patch))
    length = image.shape[1]
    lengths, space = of_prompt.sum(1), _up_to_multiple(prompts.shape[1])
    attended = _up_to_multiple(lengths)
    text, place = _at_the_end(self.cap_embedder(prompts), attended, space)
    text = torch.where((place < lengths[:, None])[..., None], text, self.cap_pad_token)
    kept = place >= 0

    tables = self.rope_embedder.precompute_freqs_cis(self.axes_dims, self.axes_lens, self.rope_theta)
    tables = [torch.view_as_real(table).to(x.device) for table in tables]
    text_turns, image_turns = _turns(self, tables, first=1, space=space, grid=grid)
    if not isinstance(length, int) or length % _MULTIPLE:
        image = _filled_up(image, self.x_pad_token)
        zero = torch.stack([space - attended, *[torch.zeros_like(attended)] * 2], dim=1)
        at_zero = torch.cat([F.embedding(zero[:, i], x.flatten(1)) for i, x in enumerate(tables)], dim=1)
        image_turns = _filled_up(image_turns.expand(batch, -1, -1, -1), at_zero.unflatten(1, (-1, 2)))
        text_turns = text_turns.expand(batch, -1, -1, -1)
    text_rotations, image_rotations, rotations = _as_complex(text_turns, image_turns)

    for layer in self.noise_refiner:
        image = layer(image, None, image_rotations, steps)
    for layer in self.context_refiner:
        text = layer(text, kept, text_rotations)
    both = torch.cat([image, text], dim=1)
    kept = torch.cat([torch.ones_like(image[..., 0], dtype=torch.bool), kept], dim=1)
    added = dict(controlnet_block_samples or {})
    for index, layer in enumerate(self.layers):
        both = layer(both, kept, rotations, steps)
        if index in added:
            of_text, _ = _at_the_end(added[index][:, image.shape[1] :], attended, space)
            both = both + torch.cat([added[index][:, : image.shape[1]], of_text], dim=1)
    predicted = self.all_final_layer[kind](both[:, :length], c=steps)
    return _returned(_unpatched(predicted, grid, patch, channels), return_dict)


def _lumina_2(
    self: Any,
    hidden_states: Tensor,
    timestep: Tensor,
    encoder_hidden_states: Tensor,
    encoder_attention_mask: Tensor,
    attention_kwargs: dict[str, Any] | None = None,
    return_dict: bool = True,
) -> Any:
    """Replaces the forward of Lumina2Transformer2DModel, which puts an image's tokens right after those of its prompt, in
    positions too.

    Args:
        hidden_states: [B, C, H, W]; timestep: [B]; encoder_hidden_states: [B, L, D].
        encoder_attention_mask: [B, L], nonzero for tokens of the prompt, which come first.
    Returns:
        [B, C, H, W].
    """
    _refuse_further(self, {"attention_kwargs": attention_kwargs})
    patch = (self.config.patch_size,) * 2
    grid = _grid(hidden_states, patch)

    steps, text = self.time_caption_embed(hidden_states, timestep, encoder_hidden_states)
    image = self.x_embedder(_patches(hidden_states, grid, patch))
    space = text.shape[1]
    text, place = _at_the_end(text, encoder_attention_mask.bool().sum(1), space)
    kept = place >= 0
    tables = [torch.view_as_real(x.to(image.device, torch.complex64)) for x in self.rope_embedder.freqs_cis]
    text_rotations, image_rotations, rotations = _as_complex(
        *_turns(self, tables, first=0, space=space, grid=[1, *grid])
    )

    for layer in self.context_refiner:
        text = layer(text, kept, text_rotations)
    for layer in self.noise_refiner:
        image = layer(image, None, image_rotations, steps)
    both = torch.cat([image, text], dim=1)
    kept = torch.cat([torch.ones_like(image[..., 0], dtype=torch.bool), kept], dim=1)
    for layer in self.layers:
        both = layer(both, kept, rotations, steps)
    predicted = self.norm_out(both[:, : image.shape[1]], steps)
    return _returned(_unpatched(predicted, grid, patch, self.out_channels), return_dict)


def _hunyuan_image(
    self: Any,
    hidden_states: Tensor,
    timestep: Tensor,
    encoder_hidden_states: Tensor,
    encoder_attention_mask: Tensor,
    timestep_r: Tensor | None = None,
    encoder_hidden_states_2: Tensor | None = None,
    encoder_attention_mask_2: Tensor | None = None,
    guidance: Tensor | None = None,
    attention_kwargs: dict[str, Any] | None = None,
    return_dict: bool = True,
) -> Any:
    """Replaces the forward of HunyuanImageTransformer2DModel, which sorts the tokens of both text encoders into tokens of the
    prompt and padding. They have no positions, so that their order does not matter.

    Args:
        hidden_states: [B, C, H, W] or [B, C, F, H, W]; timestep, timestep_r, guidance: [B].
        encoder_hidden_states: [B, L, D], and encoder_hidden_states_2: [B, M, E], with their masks, nonzero for tokens of the
            prompt.
    Returns:
        The shape of `hidden_states`.
    """
    _refuse_further(self, {"attention_kwargs": attention_kwargs})
    of_prompt = encoder_attention_mask.bool()
    patch = tuple(self.config.patch_size)
    grid = _grid(hidden_states, patch)

    rotations = self.rope(hidden_states)
    steps = self.time_guidance_embed(timestep, guidance=guidance, timestep_r=timestep_r)
    text = self.context_embedder(encoder_hidden_states, timestep, of_prompt)
    if self.context_embedder_2 is not None and encoder_hidden_states_2 is not None:
        assert encoder_attention_mask_2 is not None
        text = torch.cat([self.context_embedder_2(encoder_hidden_states_2), text], dim=1)
        of_prompt = torch.cat([encoder_attention_mask_2.bool(), of_prompt], dim=1)
    image = self.x_embedder(hidden_states)
    kept = torch.cat([torch.ones_like(image[..., 0], dtype=torch.bool), of_prompt], dim=1)[:, None, None]
    for block in (*self.transformer_blocks, *self.single_transformer_blocks):
        image, text = block(image, text, steps, attention_mask=kept, image_rotary_emb=rotations)
    return _returned(_image_of_hunyuan(self, self.norm_out(image, steps), grid, patch), return_dict)


def _hunyuan_video_15(
    self: Any,
    hidden_states: Tensor,
    timestep: Tensor,
    encoder_hidden_states: Tensor,
    encoder_attention_mask: Tensor,
    timestep_r: Tensor | None = None,
    encoder_hidden_states_2: Tensor | None = None,
    encoder_attention_mask_2: Tensor | None = None,
    image_embeds: Tensor | None = None,
    attention_kwargs: dict[str, Any] | None = None,
    return_dict: bool = True,
) -> Any:
    """Replaces the forward of HunyuanVideo15Transformer3DModel, which sorts the tokens of both text encoders and of an image into
    given tokens and padding. They have no positions, so that their order does not matter. An image's embeddings that are zero in
    all samples count as absent.

    Args:
        hidden_states: [B, C, F, H, W]; timestep, timestep_r: [B].
        encoder_hidden_states: [B, L, D], and encoder_hidden_states_2: [B, M, E], with their masks, nonzero for tokens of the
            prompt.
        image_embeds: [B, I, V].
    Returns:
        [B, C', F, H, W].
    """
    _refuse_further(self, {"attention_kwargs": attention_kwargs})
    assert encoder_hidden_states_2 is not None and encoder_attention_mask_2 is not None and image_embeds is not None
    of_prompt = encoder_attention_mask.bool()
    patch = (self.config.patch_size_t, self.config.patch_size, self.config.patch_size)
    grid = _grid(hidden_states, patch)

    rotations = self.rope(hidden_states)
    steps = self.time_embed(timestep, timestep_r=timestep_r)
    # Without an image these tokens are masked, whatever their values.
    parts = (
        self.image_embedder(image_embeds),
        self.context_embedder_2(encoder_hidden_states_2),
        self.context_embedder(encoder_hidden_states, timestep, of_prompt),
    )
    numbers = (torch.full_like(x[..., 0], kind, dtype=torch.long) for x, kind in zip(parts, (2, 1, 0), strict=True))
    text = torch.cat([x + self.cond_type_embed(kind) for x, kind in zip(parts, numbers, strict=True)], dim=1)
    of_image = (image_embeds != 0).any().expand(image_embeds.shape[:2])
    kept = torch.cat([of_image, encoder_attention_mask_2.bool(), of_prompt], dim=1)
    video = self.x_embedder(hidden_states)
    for block in self.transformer_blocks:
        video, text = block(video, text, steps, kept, rotations)
    return _returned(_image_of_hunyuan(self, self.norm_out(video, steps), grid, patch), return_dict)


_OF_LISTS: Mapping[str, Callable[..., Any]] = {"ZImageTransformer2DModel": _z_image}

_OF_TENSORS: Mapping[str, Callable[..., Any]] = {
    "Lumina2Transformer2DModel": _lumina_2,
    "HunyuanImageTransformer2DModel": _hunyuan_image,
    "HunyuanVideo15Transformer3DModel": _hunyuan_video_15,
}


# Parts of the forwards -----------------------------------------------------------------------------------------------


def _patches(x: Tensor, grid: Sequence[int], patch: Sequence[int]) -> Tensor:
    """Patchifies: [B, C, …sizes] → [B, tokens, patch · C], tokens in the order of the grid's axes."""
    batch, channels = x.shape[:2]
    axes = len(grid)
    split = x.reshape(batch, channels, *(n for pair in zip(grid, patch, strict=True) for n in pair))
    of_grid, of_patch = range(2, 2 + 2 * axes, 2), range(3, 3 + 2 * axes, 2)
    return split.permute(0, *of_grid, *of_patch, 1).flatten(1 + axes).flatten(1, axes)


def _unpatched(tokens: Tensor, grid: Sequence[int], patch: Sequence[int], channels: int) -> Tensor:
    """Unpatchifies: the inverse of `_patches`."""
    axes = len(grid)
    split = tokens.reshape(tokens.shape[0], *grid, *patch, channels)
    order = (axis for pair in zip(range(1, 1 + axes), range(1 + axes, 1 + 2 * axes), strict=True) for axis in pair)
    sizes = (count * step for count, step in zip(grid, patch, strict=True))
    return split.permute(0, 1 + 2 * axes, *order).reshape(tokens.shape[0], channels, *sizes)


def _grid(x: Tensor, patch: Sequence[int]) -> list[Any]:
    return [size // step for size, step in zip(x.shape[2:], patch, strict=True)]


def _image_of_hunyuan(model: Any, tokens: Tensor, grid: Sequence[int], patch: Sequence[int]) -> Tensor:
    """Projects tokens to patches and unpatchifies them. The patches of these models are channels-first."""
    channels = model.config.out_channels
    patches = model.proj_out(tokens).unflatten(2, (channels, -1)).transpose(2, 3).flatten(2)
    return _unpatched(patches, grid, patch, channels)


def _up_to_multiple(count: Any) -> Any:
    return (count + _MULTIPLE - 1) // _MULTIPLE * _MULTIPLE


def _filled_up(rows: Tensor, by: Tensor) -> Tensor:
    """Pads [B, N, …] with copies of a row [B or 1, …] to a multiple of 32 rows.

    The row is appended once and gathered: torch.export would fix whether the number of rows to append is zero.
    """
    with_one = torch.cat([rows, by.to(rows)[:, None].expand(rows.shape[0], -1, *rows.shape[2:])], dim=1)
    places = torch.arange(_up_to_multiple(rows.shape[1]), device=rows.device)
    return with_one.index_select(1, places.clamp(max=rows.shape[1]))


def _at_the_end(rows: Tensor, lengths: Tensor, space: Any) -> tuple[Tensor, Tensor]:
    """Puts the first rows [B, N, D] of each sample, as many as lengths [B] has, at the end of a space.

    Returns:
        [B, space, D], and the index of each of its rows among the sample's rows, [B, space], negative before the first. Rows of a
        negative index hold any other row.
    """
    batch, count = rows.shape[:2]
    place = torch.arange(space, device=rows.device) - space + lengths[:, None]
    of_all = place.clamp(0, count - 1) + count * torch.arange(batch, device=rows.device)[:, None]
    return F.embedding(of_all, rows.flatten(0, 1)), place  # exporters turn this into a plain Gather


def _turns(
    model: nn.Module, tables: Sequence[Tensor], *, first: int, space: Any, grid: Sequence[Any]
) -> tuple[Tensor, Tensor]:
    """Returns cosines and sines for the tokens of prompts, which vary on the first axis of positions alone, and for those of the
    image after them.

    Args:
        tables: by axis, [positions, pairs of channels, 2].
        first: position of the first place for prompts.
        space: number of places for prompts.
        grid: number of the image's tokens on each axis.
    Returns:
        [1, space, pairs of channels of all axes, 2], and [1, tokens, pairs, 2].
    """
    axes = [(first + space, grid[0]), *((0, count) for count in grid[1:])]
    _refuse_beyond(model, tables, [start + count - 1 for start, count in axes])

    def of_grid(ranges: Sequence[tuple[Any, Any]]) -> Tensor:
        sizes = [count for _, count in ranges]
        parts = []
        for axis, (table, (start, count)) in enumerate(zip(tables, ranges, strict=True)):
            others = [count if i == axis else 1 for i in range(len(ranges))]
            part = table[start : start + count].reshape(*others, *table.shape[1:])
            parts.append(part.expand(*sizes, *table.shape[1:]))
        return torch.cat(parts, dim=-2).flatten(0, len(ranges) - 1)[None]

    return of_grid([(first, space), *[(0, 1)] * (len(tables) - 1)]), of_grid(axes)


def _as_complex(text: Tensor, image: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    text, image = (torch.view_as_complex(x.contiguous()) for x in (text, image))
    return text, image, torch.cat([image, text], dim=1)


def _refuse_beyond(model: nn.Module, tables: Sequence[Tensor], largest: Sequence[Any]) -> None:
    """Checks positions against the tables: an engine would read beyond a table, where torch raises an error. Sizes that are
    symbols in torch.export pass."""
    if any(isinstance(place, int) and place >= len(table) for place, table in zip(largest, tables, strict=True)):
        raise UserError(
            f"{type(model).__name__} has no positions for so many tokens",
            expected=f"largest positions below {', '.join(str(len(table)) for table in tables)}: of prompts, then of rows and "
            "columns of patches",
            got=", ".join(map(str, largest)),
            remedy="give smaller numbers as model.options.tokens, height or width, whichever is too large",
        )


def _refuse_further(model: nn.Module, arguments: Mapping[str, Any]) -> None:
    if given := [name for name, value in arguments.items() if value is not None and value != {}]:
        raise UserError(
            f"{type(model).__name__} is converted without '{given[0]}'",
            expected="a call with its samples, timesteps and prompts alone",
            got=", ".join(given),
            remedy="call the pipeline without the setting in model.options.call that gives it; LoRAs go into the section "
            "loras of the recipe, and further images are left to the pipeline's own model",
        )


def _returned(sample: Tensor, return_dict: bool) -> Any:
    from diffusers.models.modeling_outputs import Transformer2DModelOutput

    return Transformer2DModelOutput(sample=sample) if return_dict else (sample,)
