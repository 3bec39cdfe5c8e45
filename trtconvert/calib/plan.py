"""The precision plan: one mode per site and timestep bin."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from trtconvert.attention.modes import Mode
from trtconvert.attention.schedules import sigma_rule_modes
from trtconvert.recipe import AttentionSection

Plan = dict[str, Tensor]
"""Site: [T] INT32 `Mode` per timestep bin."""


def make_plan(section: AttentionSection, sites: Iterable[str], sigmas: Tensor, bins: int) -> Plan:
    """The modes that a recipe asks for; `auto` follows each bin's noise level.

    Args:
        sigmas: [timesteps] noise-to-signal ratio of each timestep, rising.
        bins: timestep bins.
    """
    if section.modes == "auto":
        modes = sigma_rule_modes(sigmas, bins)
    else:
        names = section.modes if isinstance(section.modes, list) else [section.modes] * bins
        modes = torch.tensor([Mode[name.upper()] for name in names], dtype=torch.int32)
    return {site: modes.clone() for site in sites}
