"""Saves a pipeline in memory with the weights that it computes with, and refuses changes that saving would lose."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trtconvert.attention.replaced import refuse_replaced
from trtconvert.errors import UserError
from trtconvert.models.pipelines import replaced
from trtconvert.wrapped import uncompiled

_FUSED = ("to_qkv", "to_kv", "to_added_qkv")
"""Layers that `fuse_qkv_projections` makes of others, which stay."""

_EQUIVALENT = re.compile(r"diffusers\.(?!\S*(IPAdapter|CustomDiffusion|PAG))\S+|builtins\.NoneType")
"""Processors of attention that compute what a model's own do."""

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
    return {_path_of(name): x for name, x in state.items()}


def _path_of(name: str) -> str:
    """Returns the name of a module or a tensor without those of torch.compile's wrappers around modules."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def save(pipe: Any, folder: Path) -> None:
    """Saves a pipeline of diffusers as `save_pretrained` does, each model with its `weights_of`."""
    with ExitStack() as stack:
        for name, part in pipe.components.items():
            part = uncompiled(part)
            if isinstance(part, nn.Module) and any(
                _is_adapted(layer) or getattr(layer, "fused_projections", False) or uncompiled(layer) is not layer
                for layer in part.modules()
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
    model: nn.Module = uncompiled(getattr(pipe, name))
    refuse_replaced(model, name)
    for what, remedy in _changes(model):
        raise UserError(
            f"the pipeline's {name} has been changed in a way that its files do not hold",
            expected=f"a {type(model).__name__} as from_pretrained makes it, with any weights and LoRAs",
            got=what,
            remedy=f"{remedy}, and optimize the pipeline without it",
        )


def _changes(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yields changes of a model, and remedies."""
    own = dict(_unchanged(model).named_modules())
    for path, part in model.named_modules():
        if uncompiled(part) is not part:
            continue  # the module inside has the path again
        path = _path_of(path)
        title = path or "the model itself"
        if any(getattr(part, key, None) is not None for key in _FREE_U):
            yield f"FreeU, in {title}", "call pipe.disable_freeu()"
        if part._forward_hooks or part._forward_pre_hooks:
            yield f"a hook of forward, in {title}", "remove the hook by its handle, hook.remove()"
        # Forwards of accelerate and of diffusers' own hooks move or cast weights, or leave out steps.
        if "forward" in vars(part) and not hasattr(part, "_hf_hook") and not hasattr(part, "_diffusers_hook"):
            yield f"another forward, in {title}", "load the model again"
        kinds = [type(getattr(x, "processor", None)) for x in (part, own.get(path))]
        if kinds[0] is not kinds[1] and not _EQUIVALENT.fullmatch(_name_of(kinds[0])):
            reset = "set_default_attn_processor"
            yield (
                f"{_name_of(kinds[0])} in place of {_name_of(kinds[1])}, in {title}",
                f"call {reset}() of the model" if hasattr(model, reset) else "load the model again",
            )
        inner = part.get_base_layer() if _is_adapted(part) else part  # type: ignore[operator]
        if path in own and type(inner) is not type(own[path]):
            yield f"{_name_of(type(inner))} in place of {_name_of(type(own[path]))}, at {title}", "load the model again"


def _name_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


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
