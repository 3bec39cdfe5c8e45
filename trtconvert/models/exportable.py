"""Parts of diffusers' models whose operations follow the values or the number of the samples, in a form that exporters take.

Each gives what the part itself gives, and is found by the name of its class.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn


def make_exportable(model: nn.Module) -> None:
    """Put these forms into the model in the place of its own parts."""
    for module in model.modules():
        if (forward := _FORWARDS.get(type(module).__name__)) is not None:
            module.forward = MethodType(forward, module)


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


_FORWARDS: Mapping[str, Callable[..., Any]] = {
    "ChromaCombinedTimestepTextProjEmbeddings": _chroma_modulation_inputs,
}
