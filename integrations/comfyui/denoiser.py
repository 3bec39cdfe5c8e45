"""A bundle's denoiser in place of the network of ComfyUI's models. This module only knows how ComfyUI calls a network."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pixel_shuffle, pixel_unshuffle

from trtconvert.bundle import ComponentRecord
from trtconvert.errors import UserError
from trtconvert.reuse.schedule import reuse_of
from trtconvert.runtime import LoadedBundle
from trtconvert.runtime.batches import AnyBatch

from .steps import ComfySteps

_TEXT_EMBEDS, _TIME_IDS = "added_cond_kwargs.text_embeds", "added_cond_kwargs.time_ids"


class Family(Enum):
    """Models that ComfyUI samples with."""

    SD1 = "Stable Diffusion 1"
    SD2 = "Stable Diffusion 2"
    SDXL = "SDXL"
    REFINER = "SDXL's refiner"
    SD3 = "Stable Diffusion 3"
    FLUX = "Flux"


_INPUTS: dict[Family, frozenset[str]] = {
    Family.SD1: frozenset({"sample", "encoder_hidden_states"}),
    Family.SD2: frozenset({"sample", "encoder_hidden_states"}),
    Family.SDXL: frozenset({"sample", "encoder_hidden_states", _TEXT_EMBEDS, _TIME_IDS}),
    Family.REFINER: frozenset({"sample", "encoder_hidden_states", _TEXT_EMBEDS, _TIME_IDS}),
    Family.SD3: frozenset({"hidden_states", "encoder_hidden_states", "pooled_projections"}),
    Family.FLUX: frozenset(
        {"hidden_states", "encoder_hidden_states", "pooled_projections", "guidance", "img_ids", "txt_ids"}
    ),
}
"""Inputs that are made of the arguments of ComfyUI's calls, beside the timestep."""

_CHANNELS = {
    Family.SD1: (4, 9),
    Family.SD2: (4, 9),
    Family.SDXL: (4, 9),
    Family.REFINER: (4,),
    Family.SD3: (16,),
    Family.FLUX: (64,),
}
"""Channels that are denoised: of latents, with those of a masked image, or of Flux's patches of 2 × 2."""


def family_of(bundle: LoadedBundle) -> Family:
    """The family that ComfyUI samples a bundle's denoiser as.

    Raises:
        UserError: this node knows none.
    """
    record = bundle.manifest.components["denoiser"]
    of = record.diffusers
    family = None
    if of is not None and of.model == "UNet2DConditionModel":
        ids = next((spec.shape[-1] for spec in record.inputs if spec.name == _TIME_IDS), None)
        plain = Family.SD2 if of.config.get("cross_attention_dim") == 1024 else Family.SD1
        family = {None: plain, 6: Family.SDXL, 5: Family.REFINER}.get(ids)  # type: ignore[call-overload]
    elif of is not None:
        family = {"SD3Transformer2DModel": Family.SD3, "FluxTransformer2DModel": Family.FLUX}.get(of.model)
    names = {spec.name for spec in record.inputs} - {record.timestep_input}
    known = "bundles of diffusers pipelines of " + ", ".join(kind.value for kind in Family)
    if family is None or of is None:
        raise UserError(
            f"this node has no ComfyUI model for {bundle.folder}",
            expected=known,
            got=bundle.manifest.model,
            remedy="draw samples by `trtconvert run`, or in Python: bundle.pipeline()",
        )
    if record.guidance is not None:
        raise UserError(
            f"{bundle.folder} applies guidance inside, and ComfyUI applies it too",
            expected="a bundle with a denoiser that takes both halves",
            got="engine.guidance: fused",
            remedy="build it with engine.guidance: separate",
        )
    if unknown := sorted(names - _INPUTS[family]):
        raise UserError(
            f"{bundle.folder} has inputs that ComfyUI's {family.value} does not give",
            expected=", ".join(sorted(_INPUTS[family])),
            got=", ".join(unknown),
            remedy="build the plain pipeline, without a ControlNet or a reference image",
        )
    channels = of.config.get("in_channels")
    if channels not in _CHANNELS[family]:
        raise UserError(
            f"{bundle.folder} denoises other channels than ComfyUI's {family.value}",
            expected=" or ".join(map(str, _CHANNELS[family])),
            got=str(channels),
            remedy="build the plain pipeline, or one for inpainting of Stable Diffusion or SDXL",
        )
    return family


class ComfyDenoiser:
    """The `diffusion_model` of ComfyUI's models.

    No `nn.Module`: without weights ComfyUI moves, counts and patches none.

    Args:
        bundle: with the denoiser; family: see `family_of`.

    Attributes:
        dtype: of ComfyUI's tensors: FP32 holds sizes exactly, and engines change the type themselves.
        patch_size: pixels of latents along a side of a token, which ComfyUI asks Flux for.
        steps: the steps that are left out; None where all are computed.
    """

    dtype = torch.float32
    patch_size = 2

    def __init__(self, bundle: LoadedBundle, family: Family) -> None:
        self.bundle = bundle  # the last reference closes the engine
        component: ComponentRecord = bundle.manifest.components["denoiser"]
        assert component.diffusers is not None
        self._family, self._timestep = family, component.timestep_input
        self._factor = component.diffusers.timestep_factor
        self._names = {spec.name for spec in component.inputs}
        self._denoiser = AnyBatch(bundle["denoiser"])
        reuse = reuse_of(self._denoiser)
        self.steps = None if reuse is None else ComfySteps(self._denoiser, reuse, self._factor)
        self._named: Callable[..., dict[str, Tensor]] = {
            Family.SD3: self._of_sd3,
            Family.FLUX: self._of_flux,
        }.get(family, self._of_unet)

    def __call__(
        self,
        x: Tensor,
        timesteps: Tensor,
        context: Tensor | None = None,
        y: Tensor | None = None,
        control: Any = None,
        transformer_options: Mapping[str, Any] | None = None,
        **others: Any,
    ) -> Tensor:
        """
        Args:
            x: [B, C, H, W] latents; timesteps: [B] as the original model takes them; context: [B, tokens, width].
            y: [B, width] pooled text, followed by SDXL's sizes.
        Raises:
            UserError: the bundle was not built for these sizes, or its engine cannot do what the workflow asks for.
        """
        guidance = others.pop("guidance", None)
        options = transformer_options or {}
        _refuse_unfit(control, options, others)
        if context is None:
            raise _unfit("the conditioning has no text", "connect a CLIP Text Encode node", "none")
        named = self._named(x, context.expand(len(x), -1, -1), y, guidance)
        named[self._timestep] = (timesteps.float() / self._factor).expand(len(x))
        named = {name: value for name, value in named.items() if name in self._names}
        prediction = self._denoiser(**named) if self.steps is None else self.steps.prediction(options, timesteps, named)
        output = prediction.to(x)
        return _latents(output, x) if self._family is Family.FLUX else output

    def _of_unet(self, x: Tensor, context: Tensor, y: Tensor | None, guidance: Any) -> dict[str, Tensor]:
        named = {"sample": x, "encoder_hidden_states": context}
        if _TIME_IDS in self._names:
            ids = 6 if self._family is Family.SDXL else 5
            pooled = self._pooled(x, y)
            named |= {_TEXT_EMBEDS: pooled[:, :-ids], _TIME_IDS: pooled[:, -ids:]}
        return named

    def _of_sd3(self, x: Tensor, context: Tensor, y: Tensor | None, guidance: Any) -> dict[str, Tensor]:
        return {"hidden_states": x, "encoder_hidden_states": context, "pooled_projections": self._pooled(x, y)}

    def _of_flux(self, x: Tensor, context: Tensor, y: Tensor | None, guidance: Any) -> dict[str, Tensor]:
        batch, _, height, width = x.shape
        if height % 2 or width % 2:
            raise _unfit(
                f"latents of {height} × {width} cannot be cut into patches",
                "take a width and a height in steps of 16 pixels",
                f"{8 * width} × {8 * height} pixels",
            )
        ids = torch.zeros(height // 2, width // 2, 3, device=x.device)
        ids[..., 1], ids[..., 2] = torch.arange(height // 2)[:, None], torch.arange(width // 2)[None]
        strength = torch.as_tensor(3.5 if guidance is None else guidance, dtype=torch.float32, device=x.device)
        return {
            "hidden_states": _patches(x),
            "encoder_hidden_states": context,
            "pooled_projections": self._pooled(x, y),
            "guidance": strength.reshape(-1).expand(batch),
            "img_ids": ids.flatten(0, 1),
            "txt_ids": torch.zeros(context.shape[1], 3, device=x.device),
        }

    def _pooled(self, x: Tensor, y: Tensor | None) -> Tensor:
        if y is None:
            raise _unfit(
                f"the conditioning has no pooled text, which {self._family.value} takes",
                f"encode the prompt with the text encoders of {self._family.value}",
                "none",
            )
        return y.expand(len(x), -1)

    def state_dict(self, *_: Any, **__: Any) -> dict[str, Tensor]:
        """Empty: the weights are in the engine."""
        return {}


def _refuse_unfit(control: Any, options: Mapping[str, Any], others: Mapping[str, Any]) -> None:
    """
    Raises:
        UserError: the workflow changes the inside of the network, or gives the network unknown inputs.
    """
    if control is not None:
        raise _unfit(
            "a ControlNet reaches into the network, which is an engine", "take the ControlNet out", "a ControlNet"
        )
    for name in ("patches", "patches_replace"):
        if patched := options.get(name):
            raise _unfit(
                "a node patches the inside of the network, which is an engine",
                "take out the nodes that patch the model, such as IP-Adapter, FreeU or perturbed attention",
                f"{name} of {', '.join(map(str, patched))}",
            )
    if inside := (options.get("wrappers") or {}).get("diffusion_model"):
        raise _unfit(
            "a node wraps the network, and skips or changes its steps",
            "take out the nodes that cache or change the model's steps",
            ", ".join(map(str, inside)),
        )
    if given := sorted(name for name, value in others.items() if value is not None):
        raise _unfit(
            "the conditioning holds inputs that this bundle was not built for",
            "take out the nodes that add them",
            ", ".join(given),
        )


def _unfit(what: str, remedy: str, got: str) -> UserError:
    return UserError(
        what,
        expected="a call that the bundle was built for",
        got=got,
        remedy=f"{remedy}; or load the original model for this workflow",
    )


def _patches(x: Tensor) -> Tensor:
    """[B, C, H, W] → [B, H/2 · W/2, 4 · C], channels first in each patch, as in Flux."""
    return pixel_unshuffle(x, 2).flatten(2).transpose(1, 2)


def _latents(tokens: Tensor, like: Tensor) -> Tensor:
    """The inverse of `_patches`, for latents of a shape."""
    return pixel_shuffle(tokens.transpose(1, 2).unflatten(2, (like.shape[2] // 2, -1)), 2)
