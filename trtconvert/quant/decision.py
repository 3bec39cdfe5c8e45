"""Choices for the operations of a model, the units that are decided together, and plans. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from trtconvert.attention.modes import Mode
from trtconvert.linear.modes import LayerMode


@dataclass(frozen=True)
class Choice:
    """The computation of one operation in one timestep bin.

    Attributes:
        mode: `Mode` of an attention site, `LayerMode` of a layer.
        mask_share: share of attention that a block mask may lose; 0 for a mask of all blocks, None for no mask.
        delta: the layer quantises the delta to the previous step (MoDiff).
    """

    mode: Mode | LayerMode
    mask_share: float | None = None
    delta: bool = False

    @property
    def exact(self) -> bool:
        """True if the operation computes in full precision and without a mask."""
        return not self.mode and not self.mask_share

    @property
    def form(self) -> tuple[bool, ...]:
        """Properties that an engine's node has in all timestep bins or in none: 16-bit weights, a block mask, delta caches."""
        return self.mode is LayerMode.EXACT, self.mask_share is not None, self.delta

    @property
    def parts(self) -> tuple[Choice, ...]:
        """The mode without a mask, and the mask in full precision: their errors add up to the error of this choice."""
        alone = replace(self, mask_share=None), Choice(Mode.FP16, self.mask_share)
        return tuple(part for part in alone if not part.exact)


@dataclass(frozen=True)
class Unit:
    """Operations that get one decision: one attention site, or all layers that read one tensor.

    Attributes:
        kind: of the operations.
        name: name of the site, or of the first layer that reads the tensor.
        members: names of the operations.
        choices: candidates in a timestep bin, the exact choice first. All bins have choices of one `Choice.form`.
        compared: choices that no search may take. Fixed plans have them, for comparison.
        scaling: scales of queries and keys at a site, `calibrated` or `dynamic`.
    """

    kind: Literal["attention", "layer"]
    name: str
    members: tuple[str, ...]
    choices: tuple[Choice, ...]
    compared: frozenset[Choice] = frozenset()
    scaling: str = ""


@dataclass(frozen=True)
class Decision:
    """The decision about one operation: choices by timestep bin, and the scaling as in `Unit`."""

    choices: tuple[Choice, ...]
    scaling: str = ""

    @property
    def modes(self) -> list[int]:
        """Modes by timestep bin, as the operation's table holds them."""
        return [int(choice.mode) for choice in self.choices]

    @property
    def in_int8(self) -> bool:
        """True if a timestep bin has another mode than full precision."""
        return any(self.modes)

    @property
    def shares(self) -> list[float]:
        """Shares of attention that a block mask may lose, by timestep bin; empty without a mask."""
        masked = any(choice.mask_share is not None for choice in self.choices)
        return [choice.mask_share or 0.0 for choice in self.choices] if masked else []

    @property
    def delta(self) -> bool:
        """True if the layer quantises deltas."""
        return all(choice.delta for choice in self.choices)


@dataclass(frozen=True)
class Plan:
    """The decisions about a model: stated by a recipe, ruled by noise levels, or searched.

    Attributes:
        attention, layers: decisions by the names of sites and of layers.
        dense: reasons why sites that were asked for a block mask have none.
        name, speed: name of the searched plan, and its speed-up of attention and layers over full precision; "" and 1 for a
            plan without a search.
    """

    attention: dict[str, Decision]
    layers: dict[str, Decision]
    dense: dict[str, str] = field(default_factory=dict)
    name: str = ""
    speed: float = 1.0

    @staticmethod
    def of(decided: Mapping[Unit, Sequence[Choice]], stated: Mapping[str, Decision] | None = None) -> Plan:
        """Makes a plan of the choices of units by timestep bin, and of stated decisions about layers outside of all units."""
        plan = Plan({}, dict(stated or {}))
        for unit, choices in decided.items():
            of_kind = plan.attention if unit.kind == "attention" else plan.layers
            of_kind |= dict.fromkeys(unit.members, Decision(tuple(choices), unit.scaling))
        return plan

    def choices_of(self, unit: Unit) -> Sequence[Choice]:
        """Returns the choices of a unit by timestep bin."""
        return (self.attention if unit.kind == "attention" else self.layers)[unit.members[0]].choices

    @staticmethod
    def of_record(record: Mapping[str, Any]) -> Plan:
        """Makes the plan of a `record`."""

        def of_site(name: str, modes: Sequence[int]) -> Decision:
            shares = record["sparse"].get(name, [None] * len(modes))
            choices = [Choice(Mode(mode), share) for mode, share in zip(modes, shares, strict=True)]
            return Decision(tuple(choices), record["scalings"].get(name, ""))

        def of_layer(name: str, modes: Sequence[int]) -> Decision:
            delta = name in record["modulated"]
            return Decision(tuple(Choice(LayerMode(mode), delta=delta) for mode in modes))

        return Plan(
            {name: of_site(name, modes) for name, modes in record["sites"].items()},
            {name: of_layer(name, modes) for name, modes in record["layers"].items()},
            record.get("dense", {}),
            record.get("name", ""),
            record.get("speed", 1.0),
        )

    def record(self) -> dict[str, Any]:
        """Returns the plan as JSON values by the names of operations: `sites` and `layers` with their modes by timestep bin,
        `scalings` of sites, `sparse` with the shares that block masks may lose, `modulated` with the layers that quantise deltas,
        `dense`, `name` and `speed`."""
        return {
            "sites": self.site_modes,
            "layers": self.layer_modes,
            "scalings": self.scalings,
            "sparse": self.shares,
            "modulated": self.modulated,
            "dense": self.dense,
            "name": self.name,
            "speed": self.speed,
        }

    @property
    def exact(self) -> bool:
        """True if every operation computes in full precision, without a block mask."""
        return not any(decision.in_int8 or decision.shares for decision in (self.attention | self.layers).values())

    @property
    def site_modes(self) -> dict[str, list[int]]:
        """Modes of the attention sites by timestep bin."""
        return {name: decision.modes for name, decision in self.attention.items()}

    @property
    def layer_modes(self) -> dict[str, list[int]]:
        """Modes of the layers by timestep bin."""
        return {name: decision.modes for name, decision in self.layers.items()}

    @property
    def scalings(self) -> dict[str, str]:
        """Scales of queries and keys of the attention sites, `calibrated` or `dynamic`."""
        return {name: decision.scaling for name, decision in self.attention.items()}

    @property
    def modulated(self) -> list[str]:
        """Names of the layers that quantise deltas."""
        return [name for name, decision in self.layers.items() if decision.delta]

    @property
    def shares(self) -> dict[str, list[float]]:
        """`Decision.shares` of the sites with a block mask."""
        return {name: shares for name, decision in self.attention.items() if (shares := decision.shares)}
