"""What became of a model's attention sites and layers, in words and numbers. Free of torch."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

from trtconvert.bundle import LayerRecord, SiteRecord
from trtconvert.linear.modes import LayerMode

SHOWN_NAMES = 3
"""Names of a group that are written out."""


@dataclass(frozen=True)
class LeftGroup:
    """Sites or layers that were left for one reason, in the order of their calls."""

    reason: str
    names: list[str]

    @property
    def shown(self) -> list[str]:
        """The first few names."""
        return self.names[:SHOWN_NAMES]

    @property
    def more(self) -> str:
        """How many there are beside these, in words."""
        further = len(self.names) - SHOWN_NAMES
        return f" and {further} more" if further > 0 else ""

    def __str__(self) -> str:
        return f"{', '.join(self.shown)}{self.more}: {self.reason}"


def left_groups(records: Iterable[SiteRecord | LayerRecord]) -> list[LeftGroup]:
    """What was left as it is, by reason, most first. Reasons that differ in their numbers are one: "it has 1 to 77 rows".

    Layers without a reason are left by the plan, see `left_by_plan`.
    """
    left = (record for record in records if not record.modes and (record.reason or isinstance(record, SiteRecord)))
    return _grouped((record.name, record.reason) for record in left)


def dense_groups(sites: Iterable[SiteRecord]) -> list[LeftGroup]:
    """Sites that have no block mask although the recipe asked for some, by reason, as `left_groups` has those that were left."""
    return _grouped((site.name, site.dense) for site in sites if site.dense)


def _grouped(named: Iterable[tuple[str, str]]) -> list[LeftGroup]:
    """Names by their reasons, most first."""
    groups: dict[str, list[tuple[str, str]]] = {}
    for name, reason in named:
        groups.setdefault(_NUMBER.sub("#", reason), []).append((name, reason))
    found = [LeftGroup(_reason([r for _, r in group]), [name for name, _ in group]) for group in groups.values()]
    return sorted(found, key=lambda group: -len(group.names))


_NUMBER = re.compile(r"\b\d+(?:,\d{3})*")  # not that of "int64"


def _reason(reasons: list[str]) -> str:
    """The reason of a group, with each number, or the least and the largest of those that differ."""
    columns = iter(zip(*(_NUMBER.findall(reason) for reason in reasons), strict=True))

    def number(_: re.Match[str]) -> str:
        column = sorted(set(next(columns)), key=lambda text: int(text.replace(",", "")))
        return column[0] if len(column) == 1 else f"{column[0]} to {column[-1]}"

    return _NUMBER.sub(number, reasons[0]) or "no reason was recorded"


def left_by_plan(layers: Iterable[LayerRecord]) -> list[str]:
    """Names of the layers that could be INT8 and that the plan leaves in the model's type."""
    return [layer.name for layer in layers if not layer.modes and not layer.reason]


def layer_counts(layers: Iterable[LayerRecord]) -> dict[str, int]:
    """How many layers compute in each mode; those that change it are counted as "by timestep"."""
    counts: dict[str, int] = {}
    for layer in layers:
        if modes := set(layer.modes):
            name = mode_name(LayerMode(modes.pop())) if len(modes) == 1 else "by timestep"
            counts[name] = counts.get(name, 0) + 1
    return counts


def mode_name(mode: LayerMode) -> str:
    """For people."""
    return mode.name.lower().replace("_", "-")


def weight_bytes(layers: Iterable[LayerRecord]) -> tuple[int, int]:
    """Bytes that the weights of INT8 layers take, with their scales, and that they would take in 16 bits.

    Tied layers count once. Two parts of one tensor that have the same sizes are taken for tied.
    """
    shapes = {(layer.weight, layer.out_channels, layer.in_channels, *layer.kernel) for layer in layers if layer.in_int8}
    elements = sum(math.prod(shape) for _, *shape in shapes)
    scales = sum(outputs for _, outputs, *_ in shapes)
    return elements + 4 * scales, 2 * elements
