"""Chooses the fastest whole engine of a denoiser: with the plugin at all sites, at some, or at none.

`attention_choice` times attention alone. In a whole network TensorRT fuses its own attention with the layers around it, and a
plugin prevents fusions: each site may be faster with the plugin, and the step slower. The reverse happens too: with plugins at
all sites the layers between them become plugins (`lower_to_plugin`), so that the step is faster although some sites are slower.

Group norms are plugins in all of these engines. The fastest one is compared with an engine without plugins at the end, unless
INT8 attention gains clearly more than group norms could cost.

Building an engine of a large model takes minutes, so `auto` builds `MOST_ENGINES` at most. Mixes of the plugin and TensorRT's own
attention gain least (docs/figures.md, auto-keeps), so the limit drops mixes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Literal, Protocol

import onnx_ir as ir

from trtconvert.bundle import NativeSite
from trtconvert.engine import BuildWatcher, SerializedEngine
from trtconvert.engine.attention_choice import Choice, bin_modes
from trtconvert.errors import TrtconvertError
from trtconvert.export.nodes.attention import block_mask_of

LayerKind = Literal["native", "plugin", "exact"]
"""The way to compute INT8 layers, see `EngineSection.layers`."""

MOST_ENGINES = 4
"""The most engines that `auto` builds and times for one denoiser."""

CLEAR_GAIN = 1.1
"""Gain of the plugin over TensorRT's own attention in whole engines from which no engine without plugins is built: group norms as
plugins gain 4 to 24 % in U-Nets, and cost nothing (docs/figures.md, unet-parts)."""

_LONG = 20.0
"""Seconds of a build that the user is told about."""


@dataclass(frozen=True)
class EngineTimes:
    """Device time of one call in µs, summed over the profiles' opt shapes: of the engine with the plugin (the mean over the
    timestep bins), and of the engine with TensorRT's own attention at every site."""

    plugin: float
    native: float


@dataclass(frozen=True)
class PlainTimes:
    """Device time of one call in µs, as in `EngineTimes`: of the fastest engine with plugins, and of the one without."""

    with_plugins: float
    plain: float


@dataclass(frozen=True)
class ChosenEngine:
    """The chosen plan, with the times that decided.

    Attributes:
        with_plugin: whether a site has the plugin.
        native_sites: sites with TensorRT's own attention.
        times, plain_times: of the whole engines, None without a comparison.
        is_plain: whether the engine has no plugin at all, since that was faster.
        layers: the kind of its INT8 layers, "" without a comparison. layer_times: µs of a call by kind.
    """

    plan: SerializedEngine
    with_plugin: bool
    native_sites: list[NativeSite]
    times: EngineTimes | None
    plain_times: PlainTimes | None = None
    is_plain: bool = False
    layers: str = ""
    layer_times: Mapping[str, float] = field(default_factory=dict)


class BuildWithLayers(Protocol):
    """Builds a plan with TensorRT's own attention at some sites, and INT8 layers of a kind."""

    def __call__(self, native: Collection[str], /, *, layers: LayerKind) -> SerializedEngine: ...


TimeEngine = Callable[[SerializedEngine, Mapping[float, int]], float]
"""Returns µs of a call of a plan: the mean over timesteps, weighted by their numbers of bins."""


def distinct_bins(nodes: Iterable[ir.Node]) -> dict[float, int]:
    """Returns the timesteps for timing an engine, each with its number of timestep bins.

    Bins with equal modes at all nodes take the same time, unless a block mask follows the timestep. The middle of the first such
    bin is the timestep of all.

    Args:
        nodes: `Int8Attention` nodes, all with the same bins.
    """
    nodes = list(nodes)
    by_bin: list[tuple[int, ...]] = list(zip(*map(bin_modes, nodes), strict=True))
    if any(mask is not None and mask.producer() is not None for mask in map(block_mask_of, nodes)):
        by_bin = [(index, *modes) for index, modes in enumerate(by_bin)]
    width = nodes[0].attributes["timestep_max"].as_float() / len(by_bin)
    return {(by_bin.index(modes) + 0.5) * width: by_bin.count(modes) for modes in dict.fromkeys(by_bin)}


class Builds:
    """Shows the builds of several engines as one work. Between builds it is a `BuildWatcher` of the timings.

    Args:
        watch: receives the progress.
        most: number of engines that may be built.
    """

    def __init__(self, watch: BuildWatcher, most: int) -> None:
        self._watch, self._most, self._built = watch, most, 0

    def share(self, detail: str, done: float) -> None:
        """Reports work between two builds. Such work has no share of its own: `done` is ignored."""
        self._watch.share(detail, min(1.0, self._built / self._most))

    def notice(self, text: str) -> None:
        self._watch.notice(text)

    @contextmanager
    def next(self) -> Iterator[BuildWatcher]:
        """Yields the watcher of the next build. Notifies after a long first build about the number of further ones."""
        began = time.monotonic()
        try:
            yield _OneBuild(self._watch, self._built, self._most)
        finally:
            self._built += 1
        seconds = time.monotonic() - began
        if self._built == 1 < self._most and seconds >= _LONG:
            self._watch.notice(
                f"an engine took {seconds:.0f} s to build; up to {self._most - 1} more are built and timed, in less time each "
                "with the timings of the first. To build one engine alone, set engine.attention and engine.layers"
            )


@dataclass(frozen=True)
class _OneBuild:
    """Watches one of several builds."""

    watch: BuildWatcher
    before: int
    most: int

    def share(self, detail: str, done: float) -> None:
        number, most = self.before + 1, max(self.most, self.before + 1)
        of = f"engine {number} of at most {most}: " if most > 1 else ""
        self.watch.share(of + detail if detail else "", min(1.0, (self.before + done) / self.most))

    def notice(self, text: str) -> None:
        self.watch.notice(text)


def planned_engines(choice: Choice, sites: int, has_plain: bool, kinds: int) -> tuple[int, int]:
    """Returns the number of mixes of attention that `MOST_ENGINES` leave, and the number of engines that may be built in all.

    Args:
        sites: number of `Int8Attention` nodes.
        has_plain: whether an engine without any plugin is built.
        kinds: number of ways to compute INT8 layers. Each way beside the first is an engine.
    """
    others = has_plain + kinds - 1
    if len(choice.native) == sites:
        return 0, 1 + others
    lengths = len(choice.plugin) if len(choice.plugin) > 1 else 0
    mixes = max(0, min(MOST_ENGINES - 2 - others, max(lengths, bool(choice.native))))
    return mixes, 2 + mixes + others


def fastest_engine(
    choice: Choice,
    nodes: Mapping[str, ir.Node],
    build: Callable[[Collection[str]], SerializedEngine],
    build_plain: Callable[[], SerializedEngine] | None,
    time_engine: TimeEngine,
    watch: BuildWatcher,
    mixes: int = MOST_ENGINES,
) -> ChosenEngine:
    """Builds and times whole engines, and returns the fastest.

    The engines have the plugin where it is faster alone, and at no site. Then come mixes. If the plugin saves in the whole
    engine at least half of what its sites save alone, the mix has the plugin at every site. Otherwise the plugin prevents
    fusions, and mixes have the plugin at the sites of some lengths: first where it saves most, then at each further length that
    makes the engine faster. The last engine has no plugins at all; see `CLEAR_GAIN`. Engines that cannot be built or timed are
    skipped with a notice. Only the fastest plan is kept: each is as large as the model.

    Args:
        nodes: `Int8Attention` nodes by their site.
        build: builds a plan with TensorRT's own attention at the given sites, the plugin at the others.
        build_plain: builds a plan without plugins. None if `build` with all sites does so.
        time_engine: times a plan.
        mixes: number of mixes that may be built.
    Raises:
        TrtconvertError, KeyboardInterrupt: no engine can be built.
    """
    timed = _timer(time_engine, nodes)
    if build_plain is None:
        return _fastest_mix(choice, nodes, build, timed, watch, mixes)
    try:
        engine = _fastest_mix(choice, nodes, build, timed, watch, mixes)
    except TrtconvertError as error:
        plain = ChosenEngine(build_plain(), False, choice.native, None, is_plain=True)
        watch.notice(
            "no INT8 attention, and group norms stay TensorRT's own: engines with plugins cannot be built: "
            f"{error.problem}: {error.got}"
        )
        return plain
    if engine.with_plugin and engine.times and engine.times.native >= CLEAR_GAIN * engine.times.plugin:
        return engine
    return _unless_plain_is_faster(engine, build_plain, timed, watch)


def with_layers_that_build(
    kinds: Sequence[LayerKind], make: Callable[[LayerKind], ChosenEngine], watch: BuildWatcher
) -> tuple[ChosenEngine, Sequence[LayerKind]]:
    """Returns an engine with the first kind of layers that can be built. Notifies about kinds that cannot.

    Args:
        kinds: of layers, the preferred one first. make: makes an engine with a kind of layers.
    Returns:
        The engine, and the kinds from its own on.
    Raises:
        TrtconvertError, KeyboardInterrupt: no engine can be built.
    """
    for place, kind in enumerate(kinds[:-1]):
        try:
            return make(kind), kinds[place:]
        except TrtconvertError as error:
            watch.notice(
                f"layers are {kinds[place + 1]}: an engine with layers that are {kind} cannot be built: {error.problem}: "
                f"{error.got}"
            )
    return make(kinds[-1]), kinds[-1:]


def with_fastest_layers(
    engine: ChosenEngine,
    nodes: Mapping[str, ir.Node],
    kinds: Sequence[LayerKind],
    build: BuildWithLayers,
    time_engine: TimeEngine,
    watch: BuildWatcher,
) -> ChosenEngine:
    """Returns the engine, or a faster one with the same attention and another kind of INT8 layers.

    Args:
        kinds: of layers; the engine has the first.
        build: builds a plan with TensorRT's own attention at the given sites, and a kind of layers.
    """
    timed = _timer(time_engine, nodes)
    native = _names(engine.native_sites) if engine.with_plugin else list(nodes)
    best, times = replace(engine, layers=kinds[0]), dict[str, float]()
    try:
        times[kinds[0]] = timed(engine.plan)
        for kind in kinds[1:]:
            plan = build(native, layers=kind)
            times[kind] = timed(plan)
            watch.share(
                f"whole engines, µs, by their layers: {', '.join(f'{k} {us:.0f}' for k, us in times.items())}", 0.0
            )
            if times[kind] == min(times.values()):
                best = replace(best, plan=plan, layers=kind)
    except TrtconvertError as error:
        watch.notice(f"layers stay {best.layers}, not compared with all others: {error.problem}: {error.got}")
    if best.layers == "exact":
        watch.notice(
            f"no INT8 layers: a call of the whole engine takes {times['exact']:.0f} µs with these in 16 bits, "
            f"{times[kinds[0]]:.0f} µs in INT8"
        )
    return replace(best, layer_times=times)


def _fastest_mix(
    choice: Choice,
    nodes: Mapping[str, ir.Node],
    build: Callable[[Collection[str]], SerializedEngine],
    timed: Callable[[SerializedEngine], float],
    watch: BuildWatcher,
    mixes: int,
) -> ChosenEngine:
    if len(choice.native) == len(nodes):
        return ChosenEngine(build(list(nodes)), False, choice.native, None)
    try:
        fastest = ChosenEngine(build(_names(choice.native)), True, choice.native, None)
    except TrtconvertError as error:
        all_native = ChosenEngine(build(list(nodes)), False, choice.native, None)
        watch.notice(
            "no INT8 attention: the engine with the plugin cannot be built, and TensorRT's own stays at every site: "
            f"{error.problem}: {error.got}"
        )
        return all_native
    try:
        all_native = ChosenEngine(build(list(nodes)), False, choice.native, None)
        watch.share("timing the engines with and without the plugin", 0.0)
        times = EngineTimes(timed(fastest.plan), timed(all_native.plan))
    except TrtconvertError as error:
        watch.notice(
            "the engine with the plugin stays, not compared with TensorRT's own attention at every site: "
            f"{error.problem}: {error.got}"
        )
        return fastest
    if times.native < times.plugin:
        fastest = all_native
    del all_native

    def try_native(sites: list[NativeSite]) -> float:
        """Times an engine with TensorRT's own attention at the given sites, and keeps it if it is the fastest."""
        nonlocal fastest, times
        plan = build(_names(sites))
        us = timed(plan)
        if us < times.plugin:
            times = replace(times, plugin=us)
            if us <= times.native:
                fastest = ChosenEngine(plan, True, sites, None)
        return us

    saves = times.native - times.plugin >= choice.saved_us / 2
    try:
        if saves and choice.native and mixes:
            alone, us = times.plugin, try_native([])
            watch.share(f"with the plugin at every site, µs: {us:.0f}, where it is the faster alone {alone:.0f}", 0.0)
        before, kept = times.native, list[NativeSite]()
        for group in () if saves else choice.plugin[:mixes]:
            names = {site.name for site in (*kept, *group)}
            others = [site for site in chain.from_iterable(choice.plugin) if site.name not in names]
            if not others:
                break  # equals the first engine
            us, where = try_native([*choice.native, *others]), f"{group[0].query_tokens} × {group[0].key_tokens} tokens"
            also = "too" if kept else "only"
            watch.share(f"with the plugin at {where} {also}, µs: {us:.0f}, before {before:.0f}", 0.0)
            if us < before:
                before, kept = us, [*kept, *group]
    except TrtconvertError as error:
        stays = "the engine with the plugin" if fastest.with_plugin else "TensorRT's own attention at every site"
        watch.notice(f"{stays} stays, not compared with mixes of the two: {error.problem}: {error.got}")
    watch.share(f"whole engines, µs: TensorRT's own attention {times.native:.0f}, the plugin's {times.plugin:.0f}", 0.0)
    if not fastest.with_plugin:
        watch.notice(
            f"no INT8 attention: a call of the whole engine takes {times.plugin:.0f} µs with the plugin, {times.native:.0f} µs "
            "with TensorRT's own attention, which stays at every site"
        )
    return replace(fastest, times=times)


def _unless_plain_is_faster(
    engine: ChosenEngine,
    build_plain: Callable[[], SerializedEngine],
    timed: Callable[[SerializedEngine], float],
    watch: BuildWatcher,
) -> ChosenEngine:
    """Returns the engine, or the one without plugins if that is faster."""
    try:
        plain = build_plain()
        kept = timed(engine.plan) if engine.times is None else min(engine.times.plugin, engine.times.native)
        times = PlainTimes(kept, timed(plain))
    except TrtconvertError as error:
        watch.notice(f"plugins stay, not compared with an engine without any: {error.problem}: {error.got}")
        return engine
    watch.share(f"whole engines, µs: with plugins {times.with_plugins:.0f}, without any {times.plain:.0f}", 0.0)
    if times.with_plugins <= times.plain:
        return replace(engine, plain_times=times)
    watch.notice(
        f"no INT8 attention, and group norms stay TensorRT's own: a call of the whole engine takes {times.with_plugins:.0f} µs "
        f"with plugins, {times.plain:.0f} µs without any"
    )
    return replace(engine, plan=plain, with_plugin=False, plain_times=times, is_plain=True)


def _timer(time_engine: TimeEngine, nodes: Mapping[str, ir.Node]) -> Callable[[SerializedEngine], float]:
    """Returns a timer of plans in µs, rounded as in the manifest, so that the manifest explains the choice."""
    bins = distinct_bins(nodes.values())
    return lambda plan: round(time_engine(plan, bins), 2)


def _names(sites: Iterable[NativeSite]) -> list[str]:
    return [site.name for site in sites]
