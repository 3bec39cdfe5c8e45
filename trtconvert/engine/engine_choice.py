"""Whether a denoiser's engine keeps the plugin: whole engines, with and without it, against each other.

The comparison of `attention_choice` is one of attentions alone. In a whole network TensorRT's own attention costs less than
alone, since it is fused with the layers around it, and a plugin stands between layers that would be fused: each site may be
faster with the plugin, and the step slower (H200, blocks of SDXL: 4.56 ms with the plugin, 4.18 ms without).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import onnx_ir as ir

from trtconvert.bundle import NativeSite
from trtconvert.engine import BuildWatcher
from trtconvert.engine.attention_choice import bin_modes
from trtconvert.errors import TrtconvertError


@dataclass(frozen=True)
class EngineTimes:
    """Device time of one call in microseconds, summed over the profiles' opt shapes: of the engine with the plugin, where it is
    the mean over the timestep bins, and of the engine with TensorRT's own attention at every site."""

    plugin: float
    native: float


@dataclass(frozen=True)
class ChosenEngine:
    """A plan, and why it is the one.

    Attributes:
        native_sites: the sites at which TensorRT's own attention was the faster alone.
        times: of the whole engines; None where they were not compared.
    """

    plan: bytes
    with_plugin: bool
    native_sites: list[NativeSite]
    times: EngineTimes | None


TimeEngine = Callable[[bytes, Mapping[float, int]], float]
"""Microseconds of a call of a plan: the mean over timesteps, each weighed by the bins that it stands for."""


def distinct_bins(nodes: Iterable[ir.Node]) -> dict[float, int]:
    """The timesteps at which an engine has to be timed, and how many bins each stands for.

    Bins in which every node computes in the same mode take the same time: the middle of the first of them stands for all.

    Args:
        nodes: `Int8Attention` nodes, all with the same bins.
    """
    nodes = list(nodes)
    by_bin = list(zip(*map(bin_modes, nodes), strict=True))
    width = nodes[0].attributes["timestep_max"].as_float() / len(by_bin)
    return {(by_bin.index(modes) + 0.5) * width: by_bin.count(modes) for modes in dict.fromkeys(by_bin)}


def keep_faster(
    engine: ChosenEngine,
    bins: Mapping[float, int],
    build_native: Callable[[], bytes],
    time_engine: TimeEngine,
    watch: BuildWatcher,
) -> ChosenEngine:
    """An engine with the plugin, or the one with TensorRT's own attention at every site where that is the faster.

    Where the two cannot be compared the first stays, and the watcher is told why.

    Args:
        bins: of the plugin's nodes, see `distinct_bins`.
        build_native: builds the other.
    """
    try:
        native = build_native()
        watch.share("timing the engines with and without the plugin", 0.0)
        # Two digits are what the manifest keeps: it must show the choice that was made.
        times = EngineTimes(round(time_engine(engine.plan, bins), 2), round(time_engine(native, bins), 2))
    except TrtconvertError as error:
        watch.notice(
            "the engine with the plugin stays, not compared with TensorRT's own attention at every site: "
            f"{error.problem}: {error.got}"
        )
        return engine
    watch.share(f"whole engines, µs: TensorRT's own attention {times.native:.0f}, the plugin's {times.plugin:.0f}", 0.0)
    if times.plugin <= times.native:
        return ChosenEngine(engine.plan, True, engine.native_sites, times)
    watch.notice(
        f"no INT8 attention: a call of the whole engine takes {times.plugin:.0f} µs with the plugin, {times.native:.0f} µs "
        "with TensorRT's own attention, which stays at every site"
    )
    return ChosenEngine(native, False, engine.native_sites, times)
