"""The choice among whole engines."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import onnx_ir as ir
import pytest
import torch
from rtx_builds import Watch
from timed_sites import case, refuse, timed_site

from trtconvert.attention import reference
from trtconvert.attention.modes import Mode
from trtconvert.engine import engine_choice
from trtconvert.engine.attention_choice import Choice, one_node_model
from trtconvert.engine.engine_choice import (
    MOST_ENGINES,
    Builds,
    EngineTimes,
    PlainTimes,
    distinct_bins,
    fastest_engine,
    planned_engines,
)
from trtconvert.errors import TrtconvertError
from trtconvert.export.nodes.attention import append_input, attention_nodes


def node_of(*modes):
    """An `Int8Attention` node with a timestep bin per mode, up to a timestep of 1000."""
    (node,) = attention_nodes(one_node_model(case(64, 64))).values()
    table = next(x for x in node.inputs if x.name == "modes")
    table.const_value = ir.tensor([int(mode) for mode in modes], dtype=ir.DataType.INT32)
    return node


def test_bins_in_which_every_site_has_the_same_mode_are_timed_once():
    first = [Mode.PRECISION, Mode.BALANCED, Mode.BALANCED, Mode.AGGRESSIVE, Mode.AGGRESSIVE]
    second = [Mode.PRECISION, Mode.PRECISION, Mode.PRECISION, Mode.AGGRESSIVE, Mode.BALANCED]
    assert distinct_bins([node_of(*first)]) == {100.0: 1, 300.0: 2, 700.0: 2}
    found = distinct_bins([node_of(*first), node_of(*second)])
    assert found == {100.0: 1, 300.0: 2, 700.0: 1, 900.0: 1}
    assert reference.timestep_bin(torch.tensor(list(found)), 1000.0, 5).tolist() == [0, 1, 3, 4]


def test_bins_whose_masks_may_differ_are_timed_each():
    node = node_of(Mode.BALANCED, Mode.BALANCED)
    constant = ir.val("mask", const_value=ir.tensor(np.ones((1, 1, 1, 1), bool), name="mask"))
    append_input(node, "block_mask", constant)
    assert distinct_bins([node]) == {250.0: 2}
    node.replace_input_with(len(node.inputs) - 1, ir.node("Gather", [constant, node.inputs[3]]).outputs[0])
    assert distinct_bins([node]) == {250.0: 1, 750.0: 1}


# By the letters of the sites that keep the plugin; "d" is faster with TensorRT's own attention alone.
CHOICE = Choice([timed_site("d", 77, 3.0, 4.0)], [[timed_site("a"), timed_site("b")], [timed_site("c", 77)]])


EVERYWHERE = Choice([], [[timed_site(name) for name in "abcd"]])
NOWHERE = Choice([timed_site(name, native_us=3.0, plugin_us=4.0) for name in "abcd"], [])


def plain():
    """The engine without plugins, if all mixes have plugins of group norms."""
    return b"plain"


def mix(times, choice=CHOICE, build=None, build_plain=None, mixes=MOST_ENGINES):
    """The fastest engine of four sites, the timed engines, and the watcher."""
    watch, timed = Watch(), []
    nodes = {name: node_of(Mode.BALANCED, Mode.PRECISION) for name in "abcd"}

    def build_mix(native):
        return "".join(name for name in nodes if name not in native).encode()

    def time_engine(plan, bins):
        assert bins == {250.0: 1, 750.0: 1}
        timed.append(plan.decode())
        return times[plan.decode()]

    return fastest_engine(choice, nodes, build or build_mix, build_plain, time_engine, watch, mixes), timed, watch


@pytest.mark.parametrize(
    ("times", "kept", "timed"),
    [
        # The plugin saves half of 3 µs or more: plugins at all sites may save time between them.
        ({"abc": 90.0, "": 100.0, "abcd": 80.004}, "abcd", ["abc", "", "abcd"]),
        ({"abc": 98.5, "": 100.0, "abcd": 98.5}, "abc", ["abc", "", "abcd"]),
        # The plugin saves less: some sites may save more.
        ({"abc": 98.6, "": 100.0, "ab": 97.0}, "ab", ["abc", "", "ab"]),
        ({"abc": 110.0, "": 100.0, "ab": 99.0}, "ab", ["abc", "", "ab"]),
        ({"abc": 110.0, "": 100.0, "ab": 105.0, "c": 101.0}, "", ["abc", "", "ab", "c"]),
    ],
)
def test_the_fastest_of_the_whole_engines_is_kept(times, kept, timed):
    chosen, found, watch = mix(times)
    assert (chosen.plan.decode(), chosen.with_plugin, found) == (kept, bool(kept), timed)
    assert chosen.times == EngineTimes(round(min(t for plan, t in times.items() if plan), 2), times[""])
    native = {"ab": ["d", "c"], "abc": ["d"], "abcd": [], "": ["d"]}[
        kept
    ]  # the last engine is native for another reason
    assert [site.name for site in chosen.native_sites] == native
    assert any("with the plugin at 64 × 64 tokens only" in line for line in watch.details) == ("ab" in timed)
    told = "TensorRT's own attention, which stays at every site"
    assert [told in notice for notice in watch.notices] == ([True] if not kept else [])


@pytest.mark.parametrize(
    ("times", "kept", "timed"),
    [
        # Each length is tried, also after one that is slower; all lengths together are the first engine.
        ({"b": 98.0, "ab": 97.0, "abc": 96.0}, "abc", ["b", "ab", "abc"]),
        ({"b": 98.0, "ab": 97.0, "abc": 99.0, "abd": 96.5}, "abd", ["b", "ab", "abc", "abd"]),
        ({"b": 98.0, "ab": 98.0, "bc": 99.0, "bd": 98.5}, "b", ["b", "ab", "bc", "bd"]),
        ({"b": 101.0, "a": 100.0, "c": 98.0, "cd": 98.5}, "c", ["b", "a", "c", "cd"]),
        ({"b": 100.0, "a": 100.0, "c": 100.0, "d": 100.0}, "abcd", ["b", "a", "c", "d"]),
    ],
)
def test_the_plugin_is_tried_where_it_saves_most_first(times, kept, timed):
    choice = Choice(
        [], [[timed_site("b", 4096)], [timed_site("a", 1024)], [timed_site("c", 256)], [timed_site("d", 77)]]
    )
    chosen, found, _ = mix(times | {"abcd": 99.0, "": 100.0}, choice)
    assert (chosen.plan.decode(), found) == (kept, ["abcd", "", *timed])
    assert {site.name for site in chosen.native_sites} == set("abcd") - set(kept)


LENGTHS = Choice([], [[timed_site(name, keys)] for name, keys in (("b", 4096), ("a", 1024), ("c", 256), ("d", 77))])


@pytest.mark.parametrize(
    ("choice", "has_plain", "kinds", "planned"),
    [
        (NOWHERE, False, 1, (0, 1)),
        (NOWHERE, True, 2, (0, 3)),
        (EVERYWHERE, False, 1, (0, 2)),
        (EVERYWHERE, True, 2, (0, 4)),
        (CHOICE, False, 1, (2, 4)),
        (CHOICE, False, 2, (1, 4)),
        (CHOICE, True, 2, (0, 4)),
        (LENGTHS, True, 1, (1, 4)),
    ],
)
def test_at_most_four_engines_are_built(choice, has_plain, kinds, planned):
    """Engines without any plugin and with other layers come first."""
    assert planned_engines(choice, 4, has_plain, kinds) == planned
    slow = {"abc": 99.0, "abcd": 99.0, "": 100.0, "ab": 98.0, "c": 98.5, "b": 98.0, "plain": 101.0}
    _, timed, _ = mix(slow, choice, build_plain=plain if has_plain else None, mixes=planned[0])
    # An engine that is compared with no other is not timed.
    assert max(1, len(timed)) + kinds - 1 <= planned[1]


def test_builds_are_shown_as_one_work(monkeypatch):
    """The share never falls, and a long first build is told."""
    watch, clock = Watch(), iter([0.0, 90.0, 100.0, 101.0])
    monkeypatch.setattr(engine_choice.time, "monotonic", lambda: next(clock))
    builds = Builds(watch, 2)
    for _ in range(2):
        with builds.next() as one:
            one.share("tactics", 0.5)
            one.share("", 1.0)
        builds.share("timing", 0.0)
    assert watch.shares == [0.25, 0.5, 0.5, 0.75, 1.0, 1.0]
    assert watch.details[0] == "engine 1 of at most 2: tactics"
    (notice,) = watch.notices
    assert "an engine took 90 s to build; up to 1 more are built and timed" in notice


def test_sites_of_one_length_are_compared_with_none_only():
    _, timed, _ = mix({"abcd": 90.0, "": 100.0}, Choice([], [[timed_site(name) for name in "abcd"]]))
    assert timed == ["abcd", ""]


def test_a_mix_that_cannot_be_built_does_not_keep_a_slower_engine():
    def build(native):
        names = "".join(name for name in "abcd" if name not in native)
        return refuse() if names == "ab" else names.encode()

    chosen, timed, watch = mix({"abc": 105.0, "": 100.0}, build=build)
    assert (chosen.plan, chosen.with_plugin, chosen.times) == (b"", False, EngineTimes(105.0, 100.0))
    assert timed == ["abc", ""] and len(watch.notices) == 2
    assert "TensorRT's own attention at every site stays, not compared with mixes of the two" in watch.notices[0]


def test_tensorrts_attention_stays_if_the_plugins_engine_fails():
    with pytest.raises(TrtconvertError, match="no such engine"):
        mix({}, build=refuse)
    chosen, timed, watch = mix({}, build=lambda native: b"" if len(native) == 4 else refuse())
    assert (chosen.plan, chosen.with_plugin, chosen.times, timed) == (b"", False, None, [])
    (notice,) = watch.notices
    assert "no INT8 attention" in notice and "no such engine: node 7 has no implementation" in notice


@pytest.mark.parametrize(
    ("choice", "times", "kept", "timed"),
    [
        (EVERYWHERE, {"abcd": 90.0, "": 95.0, "plain": 90.004}, "abcd", ["abcd", "", "plain"]),
        (EVERYWHERE, {"abcd": 90.0, "": 95.0, "plain": 89.9}, "plain", ["abcd", "", "plain"]),
        (EVERYWHERE, {"abcd": 95.0, "": 90.0, "plain": 92.0}, "", ["abcd", "", "plain"]),
        (EVERYWHERE, {"abcd": 95.0, "": 90.0, "plain": 89.9}, "plain", ["abcd", "", "plain"]),
        # Engines with native attention have no time yet.
        (NOWHERE, {"": 90.0, "plain": 92.0}, "", ["", "plain"]),
        (NOWHERE, {"": 90.0, "plain": 89.9}, "plain", ["", "plain"]),
    ],
)
def test_an_engine_without_any_plugin_is_kept_where_it_is_the_fastest(choice, times, kept, timed):
    chosen, found, watch = mix(times, choice, build_plain=plain)
    assert (chosen.plan.decode(), chosen.with_plugin, chosen.is_plain) == (kept, kept == "abcd", kept == "plain")
    ours = min(us for plan, us in times.items() if plan != "plain")
    assert (chosen.plain_times, found) == (PlainTimes(ours, round(times["plain"], 2)), timed)
    told = "group norms stay TensorRT's own: a call of the whole engine takes 90 µs with plugins, 90 µs without any"
    assert [told in notice for notice in watch.notices].count(True) == (kept == "plain")


def test_no_engine_without_plugins_is_built_where_int8_attention_gains_clearly():
    chosen, timed, _ = mix({"abcd": 90.0, "": 99.0}, EVERYWHERE, build_plain=refuse)
    assert (chosen.plan, chosen.times, chosen.plain_times) == (b"abcd", EngineTimes(90.0, 99.0), None)
    assert timed == ["abcd", ""]
    chosen, timed, _ = mix({"abcd": 90.0, "": 98.9, "plain": 91.0}, EVERYWHERE, build_plain=plain)
    assert chosen.plain_times and timed == ["abcd", "", "plain"]


def test_an_engine_without_any_plugin_stays_where_no_other_can_be_built():
    chosen, timed, watch = mix({}, EVERYWHERE, refuse, plain)
    assert (chosen.plan, chosen.with_plugin, chosen.is_plain, chosen.plain_times) == (b"plain", False, True, None)
    (notice,) = watch.notices
    assert timed == [] and "no such engine: node 7 has no implementation" in notice
    with pytest.raises(TrtconvertError, match="no such engine"):
        mix({}, EVERYWHERE, refuse, refuse)


def test_plugins_stay_where_an_engine_without_any_cannot_be_built():
    chosen, _, watch = mix({"abcd": 90.0, "": 95.0}, EVERYWHERE, build_plain=refuse)
    assert (chosen.plan, chosen.with_plugin, chosen.is_plain, chosen.plain_times) == (b"abcd", True, False, None)
    (notice,) = watch.notices
    assert "plugins stay, not compared with an engine without any: no such engine" in notice


def test_a_site_of_unknown_lengths_does_not_have_the_first_engine_built_again():
    choice = Choice([], [[timed_site("a", 4096)], [timed_site("b", 256)]])  # c and d are not timed
    _, timed, _ = mix({"abcd": 99.5, "": 100.0, "acd": 95.0}, choice)
    assert timed == ["abcd", "", "acd"]


@pytest.mark.usefixtures("searched_once")
@pytest.mark.parametrize("native_us", [100.0, 10.0])
def test_only_the_fastest_plan_is_kept(native_us):
    """A plan is as large as the model."""

    class Plan:
        def __init__(self, names):
            self.names = names

        def decode(self):
            return self.names

    kept, alive = weakref.WeakSet(), []

    def build(native):
        gc.collect()
        alive.append(len(kept))
        plan = Plan("".join(name for name in "abcd" if name not in native))
        kept.add(plan)
        return plan

    chosen, _, _ = mix({"abc": 90.0, "": native_us, "abcd": 85.0, "ab": 80.0, "c": 95.0}, build=build)
    assert alive[0] == 0 and set(alive[1:]) == {1} and chosen.plan.decode() == ("abcd" if native_us > 80 else "")


@pytest.mark.parametrize(("times", "kept"), [({}, "abc"), ({"abc": 90.0, "": 100.0}, "abc")])
def test_engines_that_cannot_be_compared_leave_the_best_so_far_and_say_why(times, kept):
    def build(native):
        names = "".join(name for name in "abcd" if name not in native)
        return names.encode() if names in times or names == "abc" else refuse()

    chosen, _, watch = mix(times, build=build)
    assert chosen.plan.decode() == kept and (chosen.times is None) == (not times)
    (notice,) = watch.notices
    assert "the engine with the plugin stays" in notice and "no such engine: node 7 has no implementation" in notice
