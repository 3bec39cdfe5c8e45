"""Inputs that the attention plugin may have beside q, k and v: what is taken, and what is refused."""

from __future__ import annotations

import ctypes

import pytest
from attention_plugin import (
    ACROSS_HEADS,
    LAYERS,
    LAYERS_ATTRIBUTES,
    PACKED,
    PARTS,
    PARTS_ATTRIBUTES,
    SHARED,
    SHARED_ATTRIBUTES,
    SPARSE,
    SPARSE_ATTRIBUTES,
    TWO,
    TWO_ATTRIBUTES,
    tensors,
)
from plugin_driver import BF16, HALF, Desc, DimsExprs, Driver, dynamic


@pytest.mark.parametrize("mask", [None, (77, 77)])
def test_packed_inputs_are_taken(driver: Driver, mask: tuple[int, ...] | None) -> None:
    plugin = driver.create(layout="BNHD")
    packed, apart = (tensors(**(PACKED | {"mask": mask, "packed": value})) for value in (True, False))
    inputs = len(packed) - 1
    assert driver.lib.driver_configure(plugin, dynamic(packed, packed), inputs) == 0, driver.messages()
    assert driver.lib.driver_shape_change(plugin, (Desc * len(packed))(*packed), inputs) == 0, driver.messages()
    sizes = [driver.lib.driver_workspace(plugin, dynamic(descs, descs), inputs) for descs in (packed, apart)]
    assert sizes[0] == sizes[1] > 0


@pytest.mark.parametrize("mask", [None, (77,)])
@pytest.mark.parametrize(
    ("attributes", "shape"),
    [
        (SHARED_ATTRIBUTES, SHARED),
        (LAYERS_ATTRIBUTES, LAYERS),
        ({"rotary": 1}, LAYERS | {"norm": None}),
        ({"norm": 1, "norm_eps": 0.0}, {"norm": (2, 64)}),
        (LAYERS_ATTRIBUTES | {"layout": "BNHD"}, LAYERS | PACKED),
        (LAYERS_ATTRIBUTES, LAYERS | ACROSS_HEADS),
        ({"norm": 1, "norm_eps": 1e-6}, ACROSS_HEADS),
        (LAYERS_ATTRIBUTES | {"layout": "BNHD"}, LAYERS | PACKED | ACROSS_HEADS),
        (SPARSE_ATTRIBUTES, SPARSE),
        (SPARSE_ATTRIBUTES | {"key_index": 0}, SPARSE | {"key_index": None, "block_mask": (2, 1, 3, 4)}),
        (SPARSE_ATTRIBUTES | {"block_mask": 0}, SPARSE | {"block_mask": None}),
        (LAYERS_ATTRIBUTES | {"block_mask": 1}, LAYERS | {"block_mask": (2, 6, 1, 1)}),
        (PARTS_ATTRIBUTES, PARTS),
        (PARTS_ATTRIBUTES | {"rotary": 1, "norm_split": 76}, LAYERS | PARTS),
        (PARTS_ATTRIBUTES | {"layout": "BNHD", "norm_split": 1}, PARTS | PACKED),
    ],
    ids=[
        *("shared", "rotary and norm", "rotary", "norm", "packed, rotary and norm"),
        *("rotary and norm across heads", "norm across heads", "packed, rotary and norm across heads"),
        *("block mask and index", "block mask", "index", "block mask, rotary and norm"),
        *("norms of parts", "rotary and norms of parts", "packed, norms of parts"),
    ],
)
def test_optional_inputs_are_taken(
    driver: Driver, attributes: dict[str, object], shape: dict[str, object], mask: tuple[int, ...] | None
) -> None:
    plugin = driver.create(**attributes)
    keys = shape.get("key_index") or (0, 0, shape.get("keys", 77))
    if mask is not None:
        mask = (*mask[:-1], keys[-1])
    descs = tensors(**(shape | {"mask": mask}))
    inputs = len(descs) - 1
    assert all(driver.lib.driver_supports(plugin, i, dynamic(descs, descs), inputs) for i in range(len(descs)))
    assert driver.lib.driver_configure(plugin, dynamic(descs, descs), inputs) == 0, driver.messages()
    assert driver.lib.driver_shape_change(plugin, (Desc * len(descs))(*descs), inputs) == 0, driver.messages()
    if shape.get("norm") == (2, 6, 64):  # 1 / √mean(x²) of each token lies in the workspace
        apart = tensors(**(shape | {"norm": (2, 64), "mask": mask}))
        sizes = [driver.lib.driver_workspace(plugin, dynamic(these, these), inputs) for these in (descs, apart)]
        assert sizes[0] - sizes[1] >= 4 * 2 * (shape.get("queries", 100) + 77)
    descs[-2].type = HALF  # the last input, a mask of another length or FP32 tables
    assert driver.lib.driver_supports(plugin, inputs - 1, dynamic(descs, descs), inputs) == (
        shape is SHARED and mask is not None
    )


@pytest.mark.parametrize(
    ("attributes", "descs", "said"),
    [
        (SHARED_ATTRIBUTES, tensors(**(SHARED | {"shared_heads": 15})), "P >= 16 heads, got BNHD"),
        (SHARED_ATTRIBUTES | {"layout": "BHND"}, tensors(**(SHARED | {"layout": "BHND"})), "got BHND"),
        (SHARED_ATTRIBUTES, tensors(**PACKED), "expected layout BNHD, q [B, Nq, H, D]"),
        (LAYERS_ATTRIBUTES, tensors(**(LAYERS | {"queries": 100})), "expected as many queries as keys, got 100 and 77"),
        (
            LAYERS_ATTRIBUTES,
            tensors(**(LAYERS | {"rotary": (77, 64, 2)})),
            "input 'rotary': expected shape [77, 32, 2]",
        ),
        (LAYERS_ATTRIBUTES, tensors(**(LAYERS | {"norm": (64,)})), "input 'norm': expected shape [2, 64]"),
        (LAYERS_ATTRIBUTES, tensors(**(LAYERS | {"norm": (2, 32)})), "or [2, 6, 64] for norms across all heads"),
        (LAYERS_ATTRIBUTES, tensors(**(LAYERS | {"norm": (2, 6, 64)})), "got [2, 6, 64] with 6 and 3 heads"),
        (LAYERS_ATTRIBUTES, tensors(**(LAYERS | ACROSS_HEADS | {"norm": (2, 3, 64)})), "got [2, 3, 64] with 6 and 6"),
        (LAYERS_ATTRIBUTES, tensors(**(LAYERS | ACROSS_HEADS | {"norm": (3, 6, 64)})), "got [3, 6, 64]"),
        (LAYERS_ATTRIBUTES, tensors(**(LAYERS | ACROSS_HEADS | {"norm": (2, 6, 64, 1)})), "got [2, 6, 64, 1]"),
        (LAYERS_ATTRIBUTES, tensors(**(LAYERS | {"norm": None})), "expected 12 or 13 inputs"),
        (PARTS_ATTRIBUTES, tensors(**(PARTS | {"norm": (2, 64)})), "with norm_split 33 expected shape [2, 2, 64]"),
        (PARTS_ATTRIBUTES, tensors(**(PARTS | ACROSS_HEADS)), "and of each the two parts, got [2, 6, 64]"),
        (LAYERS_ATTRIBUTES, tensors(**(LAYERS | PARTS)), "got [2, 2, 64] with 6 and 3 heads"),
        (PARTS_ATTRIBUTES, tensors(**(PARTS | {"queries": 78})), "norm_split: expected as many queries as keys"),
        (PARTS_ATTRIBUTES | {"norm_split": 77}, tensors(**PARTS), "after the first of num_queries (77), got 77"),
        ({"rotary": 1}, tensors(), "expected 11 or 12 inputs"),
        (SPARSE_ATTRIBUTES, tensors(), "perhaps mask, block_mask, key_index) and 1 output"),
        (
            SPARSE_ATTRIBUTES,
            tensors(**(SPARSE | {"block_mask": (1, 3, 3, 4)})),
            "input 'block_mask': expected shape [2, 6, 3, 4], of which the first two may be 1, got [1, 3, 3, 4]",
        ),
        (SPARSE_ATTRIBUTES, tensors(**(SPARSE | {"block_mask": (2, 6, 3, 3)})), "may be 1, got [2, 6, 3, 3]"),
        (SPARSE_ATTRIBUTES, tensors(**(SPARSE | {"block_mask": (3, 4)})), "may be 1, got [3, 4]"),
        (
            SPARSE_ATTRIBUTES,
            tensors(**(SPARSE | {"key_index": (2, 6, 400)})),
            "input 'key_index': expected shape [2, 3, 400]",
        ),
        (SPARSE_ATTRIBUTES, tensors(**(SPARSE | {"key_index": (400,)})), "input 'key_index': expected 3 dimensions"),
        (SPARSE_ATTRIBUTES, tensors(**(SPARSE | {"mask": (300, 500)})), "broadcasts to [2, 6, 300, 400]"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_optional_inputs_are_refused_with_a_reason(
    driver: Driver, attributes: dict[str, object], descs: list[Desc], said: str
) -> None:
    plugin = driver.create(**attributes)
    driver.messages()
    assert driver.lib.driver_configure(plugin, dynamic(descs, descs), len(descs) - 1) != 0
    assert said in driver.messages()


def test_the_attribute_tells_two_parts_from_two_heads(driver: Driver) -> None:
    """Weights [2, 2, D] are both; only norms across heads keep something in the workspace."""
    shape = PARTS | {"heads": 2, "kv_heads": 2}
    sizes = []
    for split in (33, 0):
        plugin = driver.create(**(PARTS_ATTRIBUTES | {"norm_split": split}))
        descs = tensors(**shape)
        assert driver.lib.driver_configure(plugin, dynamic(descs, descs), 11) == 0, driver.messages()
        sizes.append(driver.lib.driver_workspace(plugin, dynamic(descs, descs), 11))
    apart = tensors(**(shape | {"norm": (2, 64)}))
    plugin = driver.create(norm=1, norm_eps=1e-6)
    assert sizes[0] == driver.lib.driver_workspace(plugin, dynamic(apart, apart), 11) < sizes[1]


def test_the_parts_lie_within_the_tokens_of_every_call(driver: Driver) -> None:
    plugin = driver.create(**PARTS_ATTRIBUTES)
    driver.messages()
    small, large = (tensors(**(PARTS | {"queries": tokens, "keys": tokens})) for tokens in (33, 100))
    assert driver.lib.driver_configure(plugin, dynamic(small, large), 11) != 0
    assert "norm_split: expected 0, or a token after the first of num_queries (33), got 33" in driver.messages()
    assert driver.lib.driver_shape_change(plugin, (Desc * 12)(*large), 11) == 0, driver.messages()
    assert driver.lib.driver_shape_change(plugin, (Desc * 12)(*small), 11) != 0
    nothing = (ctypes.c_void_p * 11)()
    assert driver.lib.driver_enqueue(plugin, (Desc * 12)(*small), 11, nothing, nothing, None) != 0
    assert driver.messages().count("num_queries (33), got 33") == 2


def test_tokens_in_two_tensors_are_taken(driver: Driver) -> None:
    plugin = driver.create(**TWO_ATTRIBUTES)
    descs, whole = tensors(**TWO), tensors(**(TWO | {"second": 0}))
    assert [list(desc.dims.d[:4]) for desc in descs[-2:]] == [[2, 128, 6, 64], [2, 77, 6, 64]]
    assert all(driver.lib.driver_supports(plugin, i, dynamic(descs, descs), 10) for i in range(12))
    for output in (10, 11):  # both have q's type
        changed = dynamic(descs, descs)
        changed[output].desc.type = BF16
        assert not driver.lib.driver_supports(plugin, output, changed, 10)
    assert driver.lib.driver_configure(plugin, dynamic(descs, descs), 10) == 0, driver.messages()
    assert driver.lib.driver_shape_change(plugin, (Desc * 12)(*descs), 10) == 0, driver.messages()
    of_one = driver.create(layout="BNHD")
    assert driver.lib.driver_workspace(plugin, dynamic(descs, descs), 10) == driver.lib.driver_workspace(
        of_one, dynamic(whole, whole), 10
    )
    types = (ctypes.c_int32 * 2)(-1, -1)
    assert driver.lib.driver_output_type(plugin, (ctypes.c_int32 * 10)(*[BF16] * 3), 10, types) == 0
    assert list(types) == [BF16, BF16]
    exprs = (DimsExprs * 10)(*(DimsExprs(5, (ctypes.c_void_p * 8)(*range(10 * i, 10 * i + 8))) for i in range(10)))
    outs = (DimsExprs * 2)()
    assert driver.lib.driver_output_shape(plugin, exprs, 10, outs) == 0
    assert [list(out.d[: out.nb]) for out in outs] == [[None, 1, 3, 4], [10, 11, 13, 14]]  # ctypes reads a null as None
    exprs[1].nb = 4
    assert driver.lib.driver_output_shape(plugin, exprs, 10, outs) != 0
    assert "input 'k': expected 5 dimensions with parts 2, got 4" in driver.messages()


@pytest.mark.parametrize(
    ("attributes", "descs", "said"),
    [
        (
            {},
            tensors(**(TWO | {"queries": 204})),
            "token_split: expected a multiple of 128 below num_queries (204), got 127",
        ),
        ({}, tensors(**(TWO | {"batch": 1}))[:1] + tensors(**TWO)[1:], "input 'k': expected shape [1, 77, 3, 6, 64]"),
        (
            {},
            [*tensors(**TWO)[:2], *tensors(**(TWO | {"second": 76}))[2:]],
            "input 'v': expected shape [2, 77, 3, 6, 64]",
        ),
        ({}, tensors(**(TWO | {"packed": False})), "with parts 2 expected [B, N, 3, H, D] and kv_heads 0"),
        ({"kv_heads": 6}, tensors(**TWO), "and kv_heads 0, got [2, 128, 3, 6, 64] and 6"),
        ({"layout": "BHND"}, tensors(**TWO), "got [2, 128, 3, 6, 64] and BHND"),
        ({"rotary": 1}, tensors(**(TWO | {"rotary": (128, 32, 2)})), "input 'rotary': expected shape [205, 32, 2]"),
        ({}, tensors(**(TWO | {"mask": (1, 128)})), "broadcasts to [2, 6, 205, 205], got [1, 128]"),
        ({}, tensors(**TWO)[1:], "and 2 outputs, got 9 and 2"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_tokens_in_two_tensors_are_refused(
    driver: Driver, attributes: dict[str, object], descs: list[Desc], said: str
) -> None:
    plugin = driver.create(**(TWO_ATTRIBUTES | attributes))
    driver.messages()
    assert driver.lib.driver_configure(plugin, dynamic(descs, descs), len(descs) - 2) != 0
    assert said in driver.messages()
