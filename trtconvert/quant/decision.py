"""What may be decided about the operations of a model, and what was: choices, units that are decided together, and plans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from trtconvert.attention.modes import Mode
from trtconvert.linear.modes import LayerMode


@dataclass(frozen=True)
class Choice:
    """What one operation does in one timestep bin.

    Attributes:
        mode: of an attention site, or of a layer.
        mask_share: share of attention that a block mask may lose; 0 for a mask of all blocks, None for no mask.
        delta: whether a layer quantises deltas from step to step (MoDiff).
    """

    mode: Mode | LayerMode
    mask_share: float | None = None
    delta: bool = False

    @property
    def exact(self) -> bool:
        """Whether the operation computes what full precision does."""
        return not self.mode and not self.mask_share

    @property
    def form(self) -> tuple[bool, ...]:
        """What an engine's node has in all timestep bins or in none: 16-bit weights of a layer, a block mask, caches."""
        return self.mode is LayerMode.EXACT, self.mask_share is not None, self.delta

    @property
    def parts(self) -> tuple[Choice, ...]:
        """Choices whose errors add up to that of this one: its mode without a mask, and its mask in full precision."""
        alone = replace(self, mask_share=None), Choice(Mode.FP16, self.mask_share)
        return tuple(part for part in alone if not part.exact)


@dataclass(frozen=True)
class Unit:
    """What is decided together: one attention site, or the layers that read one tensor.

    Attributes:
        kind: of its operations.
        name: of the site, or of the first layer that reads the tensor.
        members: names of the operations.
        choices: what they may do in a timestep bin, the exact choice first. All bins have choices of one `Choice.form`.
        compared: those choices that no search may take. Plans without a search have them, to compare with.
        scaling: of queries and keys at a site, `calibrated` or `dynamic`.
    """

    kind: Literal["attention", "layer"]
    name: str
    members: tuple[str, ...]
    choices: tuple[Choice, ...]
    compared: frozenset[Choice] = frozenset()
    scaling: str = ""


@dataclass(frozen=True)
class Decision:
    """What was decided about one operation.

    Attributes:
        choices: by timestep bin.
        scaling: as in `Unit`.
    """

    choices: tuple[Choice, ...]
    scaling: str = ""

    @property
    def modes(self) -> Tensor:
        """[T] INT32, as the operation's table has them."""
        return torch.tensor([choice.mode for choice in self.choices], dtype=torch.int32)

    @property
    def shares(self) -> list[float]:
        """Shares of attention that a block mask may lose, by timestep bin; none without a mask."""
        masked = any(choice.mask_share is not None for choice in self.choices)
        return [choice.mask_share or 0.0 for choice in self.choices] if masked else []

    @property
    def delta(self) -> bool:
        """Whether a layer quantises deltas."""
        return all(choice.delta for choice in self.choices)


@dataclass(frozen=True)
class Plan:
    """What was decided about a model: stated by a recipe, ruled by noise levels, or searched.

    Attributes:
        attention, layers: decisions by the names of sites and of layers.
    """

    attention: dict[str, Decision]
    layers: dict[str, Decision]

    @staticmethod
    def of(decided: Mapping[Unit, Sequence[Choice]], stated: Mapping[str, Decision] | None = None) -> Plan:
        """
        Args:
            decided: what each unit does by timestep bin; stated: decisions about the layers of no unit.
        """
        plan = Plan({}, dict(stated or {}))
        for unit, choices in decided.items():
            of_kind = plan.attention if unit.kind == "attention" else plan.layers
            of_kind |= dict.fromkeys(unit.members, Decision(tuple(choices), unit.scaling))
        return plan

    def record(self) -> dict[str, Any]:
        """The plan as JSON values by the names of operations: `sites` and `layers` with their modes by timestep bin, `scalings`
        of sites, `sparse` with the shares that block masks may lose, and `modulated`, the layers that quantise deltas."""
        return {
            "sites": {name: decision.modes.tolist() for name, decision in self.attention.items()},
            "layers": {name: decision.modes.tolist() for name, decision in self.layers.items()},
            "scalings": {name: decision.scaling for name, decision in self.attention.items()},
            "sparse": {name: shares for name, decision in self.attention.items() if (shares := decision.shares)},
            "modulated": [name for name, decision in self.layers.items() if decision.delta],
        }
