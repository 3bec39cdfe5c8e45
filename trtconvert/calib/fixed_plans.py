"""Plans without a search: a recipe's modes, the σ rule, and the plans that a search compares its own plans with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

from trtconvert.attention.modes import Mode
from trtconvert.attention.schedules import sigma_rule_modes
from trtconvert.linear.modes import LayerMode
from trtconvert.quant.decision import Choice, Decision, Unit
from trtconvert.recipe import AttentionSection


def stated_attention(
    section: AttentionSection, scalings: Mapping[str, str], sigmas: Tensor, bins: int
) -> dict[str, Decision]:
    """Returns the decisions of a recipe with stated modes or the σ rule; for `auto` see `plan.search`.

    Args:
        scalings: of each site, see `search_space.site_scalings`.
        sigmas: [timesteps] noise-to-signal ratio of each timestep, rising, or falling if timesteps do.
        bins: number of timestep bins.
    """
    if section.modes == "sigma-rule":
        choices = _sigma_rule(sigmas, bins)
    else:
        names = section.modes if isinstance(section.modes, list) else [section.modes] * bins
        choices = [Choice(Mode[name.upper()]) for name in names]
    return {site: Decision(tuple(choices), scaling) for site, scaling in scalings.items()}


def _sigma_rule(sigmas: Tensor, bins: int) -> list[Choice]:
    return [Choice(Mode(mode)) for mode in sigma_rule_modes(sigmas, bins).tolist()]


def uniform_plan(mode: int) -> str:
    """Returns the name of the plan with one mode of attention everywhere, and layers in 16 bits."""
    return f"{Mode(mode).name.lower()} everywhere"


def fixed_plans(
    units: Sequence[Unit], seconds: Iterable[Tensor], sigmas: Tensor, steps: Tensor
) -> dict[str, dict[Unit, list[Choice]]]:
    """Returns the choices of each unit by timestep bin, by the name of the plan.

    Attention has one mode everywhere, the modes of the σ rule, or INT8 with FP16 in the last steps. Each plan has three forms:
    all layers in 16 bits, each in the last INT8 mode that it may have, and with deltas. For each share of attention that may be
    lost, a further plan has masks at all sites that gain time, in the fastest mode that a search may take.

    Args:
        seconds: [T, choices] time of the choices of each unit, infinite if unknown.
        sigmas: as in `stated_attention`.
        steps: [T] share of the denoising steps in each bin. Sites are FP16 in bins without steps.
    """
    of_units = zip(units, seconds, strict=True)
    times = {unit: dict(zip(unit.choices, of_unit.T, strict=True)) for unit, of_unit in of_units}
    sites = [unit for unit in units if unit.kind == "attention"]
    bins, unseen = len(steps), (steps == 0).tolist()

    def everywhere(units: Sequence[Unit]) -> list[Choice]:
        """Returns the choices without a mask that all units have, at a known time."""
        dense = [choice for choice in (units[0].choices if units else ()) if choice.mask_share is None]
        return [x for x in dense if all(x in unit.choices and times[unit][x].isfinite().all() for unit in units)]

    def at_site(site: Unit, wanted: Sequence[Choice]) -> list[Choice]:
        """Returns the wanted choices, with share 0 in bins that need all blocks; without a mask if every bin does."""
        known = [x in site.choices and bool(times[site][x][index].isfinite()) for index, x in enumerate(wanted)]
        shares = [choice.mask_share if of_bin else 0.0 for choice, of_bin in zip(wanted, known, strict=True)]
        modes = [Mode.FP16 if skipped else choice.mode for choice, skipped in zip(wanted, unseen, strict=True)]
        if not any(shares):
            return [Choice(mode) for mode in modes]
        masks = [0.0 if skipped else share for share, skipped in zip(shares, unseen, strict=True)]
        return [Choice(mode, mask) for mode, mask in zip(modes, masks, strict=True)]

    modes, rule = everywhere(sites), _sigma_rule(sigmas, bins)
    late = [Choice(Mode.FP16 if choice.mode == Mode.PRECISION else Mode.AGGRESSIVE) for choice in rule]
    rows = {uniform_plan(choice.mode): [choice] * bins for choice in modes}
    rows |= {"sigma rule": rule, "aggressive, late steps fp16": late}
    of_layers = [unit for unit in units if unit.kind == "layer"]
    layers = {"": dict.fromkeys(of_layers, Choice(LayerMode.EXACT))}
    in_int8 = {unit: [x for x in everywhere([unit]) if not x.exact and not x.delta][-1:] for unit in of_layers}
    if of_layers and all(in_int8.values()):
        last = {unit: choice for unit, (choice,) in in_int8.items()}
        names = {choice.mode.name.lower() for choice in last.values()}
        names = names - {"weight_only"} or names  # the only mode of layers of few rows
        layers[f", layers {'in int8' if len(names) > 1 else names.pop()}"] = last
    for choice in [x for x in everywhere(of_layers) if x.delta]:
        layers[f", layers {choice.mode.name.lower()} by deltas"] = dict.fromkeys(of_layers, choice)
    plans = {name + suffix: (row, chosen) for suffix, chosen in layers.items() for name, row in rows.items()}
    allowed = [choice for choice in modes if not any(choice in site.compared for site in sites)]
    fastest = min(allowed, key=lambda choice: sum(float(times[site][choice][0]) for site in sites))
    for share in dict.fromkeys(choice.mask_share for site in sites for choice in site.choices if choice.mask_share):
        name = f"{fastest.mode.name.lower()} everywhere, {share:g} of attention left out"
        plans[name] = ([Choice(fastest.mode, share)] * bins, layers[""])
    return {
        name: {unit: [of_layer[unit]] * bins if unit.kind == "layer" else at_site(unit, row) for unit in units}
        for name, (row, of_layer) in plans.items()
    }
