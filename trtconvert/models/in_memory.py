"""Saves a pipeline in memory with the weights that it computes with, and refuses changes that saving would lose."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trtconvert.errors import UserError
from trtconvert.models.pipelines import replaced

_FUSED = ("to_qkv", "to_kv", "to_added_qkv")
"""Layers that `fuse_qkv_projections` makes of others, which stay."""

_FREE_U = ("s1", "s2", "b1", "b2")


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Returns a model's state dict under the names that its class has: adapters of peft are merged as they are set, and joint
    projections that other weights already hold are left out."""
    state: dict[str, Tensor] = dict(model.state_dict())
    for path, layer in [*model.named_modules()]:
        inside = f"{path}." if path else ""
        if _is_adapted(layer):
            state = {name: x for name, x in state.items() if not name.startswith(inside)}
            state |= {f"{inside}{name}": x for name, x in _merged(layer).state_dict().items()}
        elif getattr(layer, "fused_projections", False):
            joint = tuple(f"{inside}{name}." for name in _FUSED)
            state = {name: x for name, x in state.items() if not name.startswith(joint)}
    return state


def save(pipe: Any, folder: Path) -> None:
    """Saves a pipeline of diffusers as `save_pretrained` does, each model with its `weights_of`."""
    with ExitStack() as stack:
        for name, part in pipe.components.items():
            part = getattr(part, "_orig_mod", part)
            if isinstance(part, nn.Module) and any(
                _is_adapted(layer) or getattr(layer, "fused_projections", False) for layer in part.modules()
            ):
                plain = _unchanged(part)
                plain.load_state_dict(weights_of(part), assign=True)
                stack.enter_context(replaced(pipe, name, plain))
        pipe.save_pretrained(folder)


def refuse_unsaved(pipe: Any, name: str) -> None:
    """
    Args:
        name: of the denoiser among the pipeline's components.
    Raises:
        UserError: the denoiser has changes that `save` does not save, so that the engine would draw other images.
    """
    model: nn.Module = getattr(pipe, name)
    model = getattr(model, "_orig_mod", model)
    for what, remedy in _changes(model):
        raise UserError(
            f"the pipeline's {name} has been changed in a way that its files do not hold",
            expected=f"a {type(model).__name__} as from_pretrained makes it, with any weights and LoRAs",
            got=what,
            remedy=f"{remedy}, and optimize the pipeline without it",
        )


def _changes(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yields changes of a model, and remedies."""
    for path, part in model.named_modules():
        title = path or "the model itself"
        if any(getattr(part, key, None) is not None for key in _FREE_U):
            yield f"FreeU, in {title}", "call pipe.disable_freeu()"
        if part._forward_hooks or part._forward_pre_hooks:
            yield f"a hook of forward, in {title}", "remove the hook by its handle, hook.remove()"
        # Forwards of accelerate and of diffusers' own hooks move or cast weights, or leave out steps.
        if "forward" in vars(part) and not hasattr(part, "_hf_hook") and not hasattr(part, "_diffusers_hook"):
            yield f"another forward, in {title}", "load the model again"
    own = {path: type(part) for path, part in _unchanged(model).named_modules()}
    for path, part in model.named_modules():
        if _is_adapted(part):
            part = part.get_base_layer()  # type: ignore[operator]
        if path in own and type(part) is not own[path] and not hasattr(part, "_orig_mod"):
            kinds = (f"{kind.__module__}.{kind.__qualname__}" for kind in (type(part), own[path]))
            yield f"{' in place of '.join(kinds)}, at {path or 'the model itself'}", "load the model again"


def _is_adapted(layer: nn.Module) -> bool:
    return hasattr(layer, "base_layer") and hasattr(layer, "get_base_layer") and hasattr(layer, "merge")


def _merged(layer: Any) -> nn.Module:
    """Returns the layer inside an adapter of peft, with the active adapters; `layer` stays as it is."""
    if not layer.disable_adapters and set(layer.active_adapters) - set(layer.merged_adapters):
        layer = copy.deepcopy(layer)
        layer.merge()
    return layer.get_base_layer()


def _unchanged(model: nn.Module) -> nn.Module:
    """Returns a model of the same class and configuration, without weights."""
    config: Any = model.config
    with torch.device("meta"):
        made = type(model).from_config(config) if isinstance(config, Mapping) else type(model)(config)  # type: ignore[attr-defined]
    return made.eval()
