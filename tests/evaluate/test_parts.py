"""Summaries of sites and layers: grouped reasons, counts by mode, sizes."""

import pytest

from trtconvert.bundle import LayerRecord, SiteRecord
from trtconvert.evaluate.parts import layer_counts, left_by_plan, left_groups, weight_bytes
from trtconvert.linear.modes import LayerMode


def layer(name="a", modes=(), reason="", **fields):
    sizes = {"kind": "linear", "in_channels": 64, "out_channels": 32, "rows": 16, "weight": f"{name}.weight"}
    return LayerRecord(name=name, modes=list(modes), reason=reason, **sizes | fields)


def test_equal_reasons_are_one_group_the_largest_first():
    layers = [
        layer("end", reason="it is the last layer"),
        *(layer(f"few.{i}", reason="it has 1 rows") for i in range(5)),
    ]
    assert [str(group) for group in left_groups(layers)] == [
        "few.0, few.1, few.2 and 2 more: it has 1 rows",
        "end: it is the last layer",
    ]


def test_reasons_that_differ_in_numbers_are_one_with_the_least_and_the_largest():
    rows = [layer(f"l{n}", reason=f"it has {n} rows, layers.min_rows asks for 1,024") for n in (77, 1, 9)]
    (group,) = left_groups(rows)
    assert group.reason == "it has 1 to 77 rows, layers.min_rows asks for 1,024" and group.names == ["l77", "l1", "l9"]


def test_numbers_with_decimals_are_whole():
    rows = [layer(f"l{n}", reason=f"it differs by {n} of its norm.") for n in ("0.012", "1.2", "9.5e-06", "0.4")]
    (group,) = left_groups(rows)
    assert group.reason == "it differs by 9.5e-06 to 1.2 of its norm."


def test_types_are_no_numbers():
    groups = left_groups([layer("a", reason="it reads int32"), layer("b", reason="it reads int64")])
    assert [group.reason for group in groups] == ["it reads int32", "it reads int64"]


def test_converted_layers_and_those_left_by_the_plan_have_no_group():
    layers = [layer("a", [3, 3]), layer("b"), layer("c", reason="it has 2 groups")]
    assert [group.names for group in left_groups(layers)] == [["c"]]
    assert left_by_plan(layers) == ["b"]


def test_sites_without_a_recorded_reason_say_so():
    sites = [SiteRecord(name=name, heads=2, head_dim=64, modes=modes) for name, modes in (("a", []), ("b", [0, 1]))]
    assert [str(group) for group in left_groups(sites)] == ["a: no reason was recorded"]


def test_layers_are_counted_by_mode_and_those_that_change_it_apart():
    static, dynamic, weights = (int(mode) for mode in (LayerMode.STATIC, LayerMode.DYNAMIC, LayerMode.WEIGHT_ONLY))
    layers = [
        layer("a", [static] * 2),
        layer("b", [static] * 2),
        layer("c", [weights, static]),
        layer("d", [weights] * 2),
    ]
    layers += [layer("e", [dynamic] * 2), layer("f")]
    assert layer_counts(layers) == {"static": 2, "by timestep": 1, "weight-only": 1, "dynamic": 1}


@pytest.mark.parametrize(
    ("others", "elements", "scales"),
    [
        ([], 64 * 32, 32),
        ([layer("b", [3])], 2 * 64 * 32, 64),
        ([layer("b", [3], weight="a.weight")], 64 * 32, 32),  # tied
        ([layer("b", [3], weight="a.weight", out_channels=8)], 64 * 40, 40),  # another part of the same tensor
        ([layer("b")], 64 * 32, 32),  # not converted
        ([layer("b", [3], kind="conv", kernel=[3, 3])], 10 * 64 * 32, 64),
    ],
)
def test_weights_are_counted_once_with_their_scales(others, elements, scales):
    assert weight_bytes([layer("a", [3]), *others]) == (elements + 4 * scales, 2 * elements)
