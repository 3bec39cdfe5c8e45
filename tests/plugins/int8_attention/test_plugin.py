"""The TensorRT plugin without TensorRT: tests/helpers/plugin_driver.cpp calls it the way TensorRT does. No GPU is needed.

tests/plugins/test_plugin_registry.py loads the same library into the real TensorRT versions.
"""

from __future__ import annotations

import ctypes
import itertools
import re
import threading

import pytest
import torch
from attention_plugin import (
    ACROSS_HEADS,
    LAYERS,
    LAYERS_ATTRIBUTES,
    PACKED,
    PARTS,
    PARTS_ATTRIBUTES,
    SHARED,
    SHARED_ACROSS_HEADS,
    SHARED_ACROSS_HEADS_ATTRIBUTES,
    SHARED_ATTRIBUTES,
    TWO,
    TWO_ATTRIBUTES,
    replaced,
    tensors,
)
from plugin_driver import (
    BF16,
    BOOL,
    BUILD,
    CHW2,
    FIELD_CHAR,
    FIELD_FLOAT32,
    FIELD_FLOAT64,
    FIELD_INT32,
    FIELD_INT64,
    FLOAT,
    HALF,
    INT32,
    LINEAR,
    RUNTIME,
    Desc,
    DimsExprs,
    Driver,
    Field,
    Fields,
    dynamic,
)

from trtconvert.attention import kernel
from trtconvert.attention.reference import AttentionTables


def test_attributes_are_serialised_and_read_back(driver: Driver) -> None:
    given = {"layout": "BNHD", "softmax_scale": 0.125, "timestep_max": 1.0, "scaling": "dynamic", "smooth_k": 0}
    given |= {"rotary": 1, "norm": 1, "norm_eps": 0.25, "norm_split": 512, "kv_heads": 3, "k_head": 7, "v_head": 20}
    given |= {"parts": 2, "block_mask": 1, "key_index": 0}
    plugin = driver.create(**given)
    expected = given | {"serialization_version": 5}
    assert driver.serialised(plugin) == expected
    again = driver.create_from(driver.lib.driver_fields(plugin).contents, RUNTIME)
    driver.lib.driver_destroy(plugin)  # what the copy serialises must be its own
    clone = ctypes.c_void_p(driver.lib.driver_clone(again))
    attached = ctypes.c_void_p(driver.lib.driver_attach(again))
    driver.lib.driver_destroy(again)
    assert driver.serialised(clone) == driver.serialised(attached) == expected


def test_defaults(driver: Driver, plugin: ctypes.c_void_p) -> None:
    assert driver.serialised(plugin) == {
        "serialization_version": 5,
        "layout": "BHND",
        "softmax_scale": 0.0,
        "timestep_max": 1000.0,
        "scaling": "calibrated",
        "smooth_k": 1,
        "block_mask": 0,
        "key_index": 0,
        "rotary": 0,
        "norm": 0,
        "norm_eps": 0.0,
        "norm_split": 0,
        "kv_heads": 0,
        "k_head": 0,
        "v_head": 0,
        "parts": 1,
    }


def test_other_widths_and_terminated_text_are_accepted(driver: Driver) -> None:
    plugin = driver.create(
        layout=(FIELD_CHAR, 5, ctypes.create_string_buffer(b"BNHD")),  # counts the final zero
        softmax_scale=(FIELD_FLOAT64, 1, ctypes.c_double(0.5)),
        smooth_k=(FIELD_INT64, 1, ctypes.c_int64(0)),
    )
    values = driver.serialised(plugin)
    assert (values["layout"], values["softmax_scale"], values["smooth_k"]) == ("BNHD", 0.5, 0)


@pytest.mark.parametrize(
    ("attributes", "said"),
    [
        ({"layout": "BDNH"}, "expected 'BHND' or 'BNHD', got 'BDNH'"),
        ({"layout": 3}, "expected text"),
        ({"layout": (FIELD_CHAR, -1, ctypes.create_string_buffer(4))}, "expected text"),
        ({"layout": (FIELD_CHAR, 1 << 30, ctypes.create_string_buffer(4))}, "expected text"),
        ({"layout": (FIELD_CHAR, 4, None)}, "expected text"),
        ({"scaling": ""}, "expected 'calibrated' or 'dynamic', got ''"),
        ({"softmax_scale": -1.0}, "expected a positive finite factor"),
        ({"softmax_scale": float("nan")}, "got nan"),
        ({"softmax_scale": (FIELD_FLOAT32, 2, (ctypes.c_float * 2)())}, "expected one floating-point number"),
        ({"timestep_max": 0.0}, "expected the positive finite timestep"),
        ({"timestep_max": float("inf")}, "got inf"),
        ({"timestep_max": (FIELD_FLOAT64, 1, ctypes.c_double(1e300))}, "got inf"),
        ({"smooth_k": 2}, "expected 0 or 1, got 2"),
        ({"smooth_k": 1.0}, "expected one integer"),
        ({"smooth_k": (FIELD_INT32, 1, None)}, "expected one integer"),
        ({"rotary": 2}, "expected 0 or 1, got 2"),
        ({"norm_eps": -1e-6}, "expected a finite number from 0"),
        ({"norm_eps": float("nan")}, "got nan"),
        ({"norm": 1, "norm_split": -1}, "expected a number of tokens from 0"),
        ({"norm": 1, "norm_split": 0.5}, "expected one integer"),
        ({"norm_split": 7}, "attribute 'norm_split': expected 0 without an input 'norm', got 7"),
        ({"block_mask": 2}, "expected 0 or 1, got 2"),
        (
            {"key_index": 1, "rotary": 1},
            "attribute 'key_index': expected 0 with inputs 'rotary' or 'norm' or with parts 2",
        ),
        (
            {"key_index": 1, "parts": 2},
            "attribute 'key_index': expected 0 with inputs 'rotary' or 'norm' or with parts 2",
        ),
        ({"kv_heads": -1}, "expected a number of heads from 0"),
        ({"v_head": (FIELD_INT64, 1, ctypes.c_int64(1 << 31))}, "got 2147483648"),
        ({"colour": 1}, "got 'colour'"),
        ({"parts": 0}, "attribute 'parts': expected 1 or 2, got 0"),
        ({"parts": 3}, "got 3"),
        ({"serialization_version": 5}, "got 'serialization_version'"),
    ],
    ids=lambda value: re.sub(" object at 0x[0-9a-f]+", "", str(value)),  # the same in every process of pytest-xdist
)
def test_bad_attributes_are_refused_with_a_reason(driver: Driver, attributes: dict[str, object], said: str) -> None:
    driver.messages()
    assert not driver.create(**attributes)
    messages = driver.messages()
    assert said in messages
    assert all(line.startswith("1 trtconvert: ") for line in messages.splitlines())  # severity 1: an error


def test_broken_collections_are_refused(driver: Driver) -> None:
    layout = driver.field("layout", "BHND")
    nameless = Field(None, layout.data, layout.type, layout.length)
    twice = (Field * 2)(layout, layout)
    for broken, said in [
        (Fields(1, None), "a broken one"),
        (Fields(-1, None), "a broken one"),
        (Fields(1, (Field * 1)(nameless)), "got null"),
        (Fields(2, twice), "got it twice"),
    ]:
        assert not driver.create_from(broken, BUILD)
        assert said in driver.messages()
    assert not driver.lib.driver_create(driver.creator, None, BUILD)
    assert "got null" in driver.messages()


def test_engines_of_other_versions_are_refused(driver: Driver) -> None:
    whole = {"layout": "BHND", "softmax_scale": 0.0, "timestep_max": 1.0, "scaling": "dynamic", "smooth_k": 0}
    whole |= {"rotary": 0, "norm": 0, "norm_eps": 0.0, "norm_split": 0, "kv_heads": 0, "k_head": 0, "v_head": 0}
    whole |= {"parts": 1, "block_mask": 0, "key_index": 0}
    assert not driver.create(RUNTIME, serialization_version=4, **whole)
    assert "build the engine again" in driver.messages()
    assert not driver.create(RUNTIME, **whole)  # no version at all
    assert "expected the 16 fields" in driver.messages()
    assert driver.create(RUNTIME, serialization_version=5, **whole)


@pytest.mark.parametrize("dtype", [HALF, BF16])
@pytest.mark.parametrize("mask_type", [None, BOOL, HALF, BF16, FLOAT])
def test_format_combinations(driver: Driver, plugin: ctypes.c_void_p, dtype: int, mask_type: int | None) -> None:
    mask = None if mask_type is None else (1, 1, 1, 77)
    descs = tensors(dtype=dtype, mask=mask, mask_type=mask_type or 0)
    inputs, mask_fits = len(descs) - 1, mask_type in (BOOL, dtype)
    answers = [driver.lib.driver_supports(plugin, i, dynamic(descs, descs), inputs) for i in range(len(descs))]
    assert answers == [True] * 10 + ([mask_fits] if mask is not None else []) + [True]
    # One tensor at a time gets a type that it cannot have (FP32 for the tables' INT32 and so on), or another format.
    for position, (kind, form) in itertools.product(range(len(descs)), [(2, LINEAR), (None, CHW2)]):
        changed = dynamic(descs, descs)
        changed[position].desc.type = changed[position].desc.type if kind is None else kind
        changed[position].desc.format = form
        assert not driver.lib.driver_supports(plugin, position, changed, inputs)


def test_output_follows_q(driver: Driver, plugin: ctypes.c_void_p) -> None:
    descs = tensors(dtype=BF16)
    types = (ctypes.c_int32 * 10)(*(d.type for d in descs[:10]))
    out_type = ctypes.c_int32(-1)
    assert driver.lib.driver_output_type(plugin, types, 10, ctypes.byref(out_type)) == 0
    assert out_type.value == BF16
    exprs = (DimsExprs * 10)(*(DimsExprs(d.dims.nb, (ctypes.c_void_p * 8)(*range(1, 9))) for d in descs[:10]))
    exprs[0].d[2] = 0x1234
    out = DimsExprs()
    assert driver.lib.driver_output_shape(plugin, exprs, 10, ctypes.byref(out)) == 0
    assert (out.nb, list(out.d[:4])) == (4, [1, 2, 0x1234, 4])
    exprs[0].nb = 5  # packed: without the axis of q, k and v
    assert driver.lib.driver_output_shape(plugin, exprs, 10, ctypes.byref(out)) == 0
    assert (out.nb, list(out.d[:4])) == (4, [1, 2, 4, 5])
    exprs[0].nb = 6
    assert driver.lib.driver_output_shape(plugin, exprs, 10, ctypes.byref(out)) != 0
    assert "expected 4 dimensions, or 5 where q, k and v are packed, got 6" in driver.messages()


def test_workspace_is_that_of_the_largest_shapes(driver: Driver, plugin: ctypes.c_void_p) -> None:
    small, large = tensors(batch=1, queries=1, keys=1), tensors(batch=4, queries=4096, keys=8192)
    size = driver.lib.driver_workspace(plugin, dynamic(small, large), 10)
    assert size == driver.lib.driver_workspace(plugin, dynamic(large, large), 10)
    # Each of q, k and v needs at least a byte an element.
    assert size > 4 * 64 * (6 * 4096 + 2 * 3 * 8192)
    assert driver.messages() == ""


@pytest.mark.parametrize("layout", ["BHND", "BNHD"])
@pytest.mark.parametrize("mask", [None, (77,), (100, 77), (2, 1, 1, 77), (6, 1, 77), (2, 6, 100, 1)])
def test_good_shapes_are_taken(driver: Driver, layout: str, mask: tuple[int, ...] | None) -> None:
    plugin = driver.create(layout=layout)
    descs = tensors(layout=layout, mask=mask)
    inputs = len(descs) - 1
    assert driver.lib.driver_configure(plugin, dynamic(descs, descs), inputs) == 0, driver.messages()
    assert driver.lib.driver_shape_change(plugin, (Desc * len(descs))(*descs), inputs) == 0, driver.messages()


@pytest.mark.parametrize(
    ("descs", "said"),
    [
        (tensors(dim=28), "head_dim"),
        (tensors(dim=264), "head_dim"),
        (tensors(heads=5), "num_heads"),
        (tensors(queries=0), "expected dimensions from 1"),
        (tensors(keys=1 << 31), "expected dimensions from 1"),
        (tensors(dtype=FLOAT), "input 'q': expected linear format and FP16 or BF16"),
        (tensors(mask=(2, 6, 99, 77)), "input 'mask': expected a shape that broadcasts to [2, 6, 100, 77]"),
        (tensors(mask=(1, 2, 6, 100, 77)), "input 'mask'"),
        (tensors(mask=()), "input 'mask'"),
        (replaced(0, (2, 6, 100)), "input 'q': expected 4 dimensions, got shape [2, 6, 100]"),
        (replaced(1, (1, 3, 77, 64)), "input 'k': expected the batch and head_dim of q"),
        (replaced(2, (2, 3, 78, 64)), "input 'v': expected shape [2, 3, 77, 64]"),
        (replaced(3, (1,)), "input 'timestep': expected shape [2]"),
        (replaced(4, (4, 3)), "input 'q_scale': expected shape [4, 6]"),
        (replaced(5, (4, 6)), "input 'k_scale': expected shape [4, 3]"),
        (replaced(6, (4, 3)), "input 'v_scale': expected shape [4, 3, 64]"),
        (replaced(7, (4, 6, 64)), "input 'k_offset': expected shape [4, 3, 64]"),
        (replaced(8, (1, 3, 64)), "input 'v_offset': expected shape [4, 3, 64]"),
        (replaced(9, (3,)), "expected shape [3, 6]"),
        (tensors(**PACKED), "input 'q': expected [B, N, 3, H, D] and layout BNHD where q, k and v are packed"),
        (replaced(1, (2, 77, 2, 6, 64), **PACKED), "got [2, 77, 3, 6, 64] and BHND"),
        (replaced(0, (2, 77, 2, 6, 64), **PACKED), "got [2, 77, 2, 6, 64] and BHND"),
        (replaced(1, (2, 77, 6, 64), **PACKED), "input 'k': expected 5 dimensions"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_shapes_are_refused_with_a_reason(
    driver: Driver, plugin: ctypes.c_void_p, descs: list[Desc], said: str
) -> None:
    inputs = len(descs) - 1
    array = dynamic(descs, descs)
    static = (Desc * len(descs))(*descs)
    refusals = [
        lambda: driver.lib.driver_configure(plugin, array, inputs) != 0,
        lambda: driver.lib.driver_shape_change(plugin, static, inputs) != 0,
        lambda: driver.lib.driver_workspace(plugin, array, inputs) == 0,
    ]
    for refused in refusals:
        assert refused()
        assert said in driver.messages()


def test_wrong_counts_are_refused(driver: Driver, plugin: ctypes.c_void_p) -> None:
    descs = tensors(mask=(77,))
    for inputs in (0, 9, 12):
        many = (descs * 2)[: inputs + 1]
        assert driver.lib.driver_configure(plugin, dynamic(many, many), inputs) != 0
        assert f"got {inputs} and 1" in driver.messages()


def test_enqueue_refuses_null_pointers_and_a_missing_gpu(driver: Driver, plugin: ctypes.c_void_p) -> None:
    descs = (Desc * 11)(*tensors())
    nothing = (ctypes.c_void_p * 11)()
    assert driver.lib.driver_enqueue(plugin, descs, 10, nothing, nothing, None) != 0  # before any shapes are known
    assert "got 0 and 1" in driver.messages()
    assert driver.lib.driver_shape_change(plugin, descs, 10) == 0
    assert driver.lib.driver_enqueue(plugin, descs, 10, nothing, nothing, None) != 0
    assert driver.messages()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("shape", "attributes"),
    [
        ({"layout": "BHND"}, {}),
        ({"layout": "BNHD"}, {}),
        (PACKED, {}),
        (SHARED, SHARED_ATTRIBUTES),
        (LAYERS | {"layout": "BHND"}, LAYERS_ATTRIBUTES),
        (LAYERS | PACKED, LAYERS_ATTRIBUTES),
        (LAYERS | ACROSS_HEADS | {"layout": "BHND"}, LAYERS_ATTRIBUTES),
        (LAYERS | ACROSS_HEADS | PACKED, LAYERS_ATTRIBUTES),
        (SHARED_ACROSS_HEADS, SHARED_ACROSS_HEADS_ATTRIBUTES),
        (PARTS | {"layout": "BHND"}, PARTS_ATTRIBUTES),
        (LAYERS | PARTS | PACKED, LAYERS_ATTRIBUTES | PARTS_ATTRIBUTES),
        (TWO, TWO_ATTRIBUTES),
        (
            TWO | {"rotary": (205, 32, 2), "norm": (2, 2, 64)},
            LAYERS_ATTRIBUTES | PARTS_ATTRIBUTES | TWO_ATTRIBUTES | {"norm_split": 128},
        ),
    ],
    ids=[
        *("BHND", "BNHD", "packed", "shared", "rotary and norm", "packed, rotary and norm"),
        *("rotary and norm across heads", "packed, rotary and norm across heads", "shared, norm across heads"),
        *(
            "norms of parts",
            "packed, rotary and norms of parts",
            "two tensors",
            "two tensors, rotary and norms of parts",
        ),
    ],
)
@pytest.mark.parametrize("masked", [False, True])
def test_enqueue_computes_what_the_operator_does(
    driver: Driver, shape: dict[str, object], attributes: dict[str, object], masked: bool
) -> None:
    layout, packed, second = shape["layout"], "packed" in shape, shape.get("second", 0)
    given = {"layout": layout, "scaling": "dynamic", "softmax_scale": 0.2, "timestep_max": 500.0, "smooth_k": 0}
    plugin = driver.create(**(given | attributes))
    mask = (1, shape.get("queries", 100), shape.get("keys", 77)) if masked else None
    every = tensors(**shape, mask=mask)
    descs, inputs = (Desc * len(every))(*every), len(every) - (2 if second else 1)
    generator = torch.Generator("cuda").manual_seed(0)

    def random(desc: Desc) -> torch.Tensor:
        shape = desc.dims.d[: desc.dims.nb]
        positive = torch.rand(shape, generator=generator, device="cuda")
        if desc.type == BOOL:
            return positive > 0.3
        if desc.type == INT32:
            return torch.arange(shape[0], dtype=torch.int32, device="cuda")  # modes: one of each
        return torch.randn(shape, generator=generator, device="cuda").half() if desc.type == HALF else positive + 0.02

    data = [random(desc) for desc in descs[:inputs]]
    data[3] = torch.tensor([60.0, 450.0], device="cuda")  # the first and the last bin
    if packed and not second:
        data[1] = data[2] = data[0]
    if "shared_heads" in shape or second:
        data[2] = data[1]
    sizes = [desc.dims.d[: desc.dims.nb] for desc in descs[inputs:]]
    outs = [torch.full(size, torch.nan, dtype=torch.float16, device="cuda") for size in sizes]
    workspace = torch.full(
        (driver.lib.driver_workspace(plugin, dynamic(descs, descs), inputs),), 0xFF, dtype=torch.uint8
    )
    workspace = workspace.cuda()
    pointers = (ctypes.c_void_p * inputs)(*(x.data_ptr() for x in data))
    outputs = (ctypes.c_void_p * len(outs))(*(out.data_ptr() for out in outs))
    assert driver.lib.driver_shape_change(plugin, descs, inputs) == 0, driver.messages()
    status = driver.lib.driver_enqueue(plugin, descs, inputs, pointers, outputs, ctypes.c_void_p(workspace.data_ptr()))
    assert status == 0, driver.messages()
    qkv = torch.cat(data[:2] if second else data[:1], 1).unbind(2) if packed else data[:3]
    if "shared_heads" in shape:
        k, v, count = (attributes[name] for name in ("k_head", "v_head", "kv_heads"))
        qkv = [data[0], data[1][:, :, k : k + count], data[1][:, :, v : v + count]]
    options = given | {"smooth_k": False, "mask": data[10] if masked else None}
    options |= {"rotary": data[-2]} if "rotary" in attributes else {}
    options |= {"norm": (*data[-1], 1e-6)} if "norm" in attributes else {}
    options |= {"norm_split": attributes.get("norm_split", 0)}
    expected = kernel._run_cuda(*qkv, data[3], AttentionTables(*data[4:10]), **options)
    out = torch.cat(outs, 1) if second else outs[0]
    assert out.isfinite().all()
    torch.testing.assert_close(out, expected, rtol=0, atol=0)


def test_threads_share_nothing(driver: Driver, plugin: ctypes.c_void_p) -> None:
    """Contexts attach, change shapes and go away at once, each on a copy of its own."""
    descs = (Desc * 11)(*tensors())
    failures: list[str] = []

    def context() -> None:
        for _ in range(200):
            copy = ctypes.c_void_p(driver.lib.driver_attach(plugin))
            if driver.lib.driver_shape_change(copy, descs, 10) != 0 or not driver.serialised(copy):
                failures.append("a context failed")
            driver.lib.driver_destroy(copy)

    threads = [threading.Thread(target=context) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
