"""Summaries of a model's attention sites and layers. Does not import torch."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

from trtconvert.attention.modes import Mode
from trtconvert.bundle import LayerRecord, SiteRecord
from trtconvert.linear.modes import LayerMode

SHOWN_NAMES = 3
"""Names of a group that are shown."""


@dataclass(frozen=True)
class LeftGroup:
    """Sites or layers that were not converted for one reason, in the order of their calls."""

    reason: str
    names: list[str]

    @property
    def shown(self) -> list[str]:
        """The first few names."""
        return self.names[:SHOWN_NAMES]

    @property
    def more(self) -> str:
        """Returns the number of the other names in words."""
        further = len(self.names) - SHOWN_NAMES
        return f" and {further} more" if further > 0 else ""

    def __str__(self) -> str:
        return f"{', '.join(self.shown)}{self.more}: {self.reason}"


def left_groups(records: Iterable[SiteRecord | LayerRecord]) -> list[LeftGroup]:
    """Groups unconverted sites and layers by reason, largest group first. Reasons that differ only in numbers are merged:
    "it has 1 to 77 rows". Layers without a reason are skipped: see `left_by_plan`.
    """
    left = (record for record in records if not record.modes and (record.reason or isinstance(record, SiteRecord)))
    return _grouped((record.name, record.reason) for record in left)


def dense_groups(sites: Iterable[SiteRecord]) -> list[LeftGroup]:
    """Groups the sites that did not get the block mask that the recipe asks for, as `left_groups` does."""
    return _grouped((site.name, site.dense) for site in sites if site.dense)


def _grouped(named: Iterable[tuple[str, str]]) -> list[LeftGroup]:
    groups: dict[str, list[tuple[str, str]]] = {}
    for name, reason in named:
        groups.setdefault(_NUMBER.sub("#", reason), []).append((name, reason))
    found = [LeftGroup(_reason([r for _, r in group]), [name for name, _ in group]) for group in groups.values()]
    return sorted(found, key=lambda group: -len(group.names))


_NUMBER = re.compile(r"\b\d+(?:,\d{3})*(?:\.\d+)?(?:e[+-]\d+)?")  # does not match in "int64"


def _reason(reasons: list[str]) -> str:
    """Merges reasons that differ in numbers: each number becomes "least to largest"."""
    columns = iter(zip(*(_NUMBER.findall(reason) for reason in reasons), strict=True))

    def number(_: re.Match[str]) -> str:
        column = sorted(set(next(columns)), key=lambda text: float(text.replace(",", "")))
        return column[0] if len(column) == 1 else f"{column[0]} to {column[-1]}"

    return _NUMBER.sub(number, reasons[0]) or "no reason was recorded"


def left_by_plan(layers: Iterable[LayerRecord]) -> list[str]:
    """Returns the names of the layers that could be INT8 and that the plan leaves in the model's type."""
    return [layer.name for layer in layers if not layer.modes and not layer.reason]


def layer_counts(layers: Iterable[LayerRecord]) -> dict[str, int]:
    """Counts the layers of each mode. Layers of several modes count as "by timestep"."""
    counts: dict[str, int] = {}
    for layer in layers:
        if modes := set(layer.modes):
            name = mode_name(LayerMode(modes.pop())) if len(modes) == 1 else "by timestep"
            counts[name] = counts.get(name, 0) + 1
    return counts


def mode_name(mode: Mode | LayerMode) -> str:
    return mode.name.lower().replace("_", "-")


def weight_bytes(layers: Iterable[LayerRecord]) -> tuple[int, int]:
    """Returns the bytes of INT8 layers' weights with scales, and their bytes in 16 bits.

    Tied layers count once. Two parts of one tensor with equal sizes count as tied.
    """
    shapes = {(layer.weight, layer.out_channels, layer.in_channels, *layer.kernel) for layer in layers if layer.in_int8}
    elements = sum(math.prod(shape) for _, *shape in shapes)
    scales = sum(outputs for _, outputs, *_ in shapes)
    return elements + 4 * scales, 2 * elements
