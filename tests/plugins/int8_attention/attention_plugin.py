"""Tensors of the attention plugin's inputs and outputs, as TensorRT describes them."""

from __future__ import annotations

from plugin_driver import BOOL, FLOAT, HALF, INT32, LINEAR, Desc, Dims


def tensors(
    batch: int = 2,
    heads: int = 6,
    kv_heads: int = 3,
    queries: int = 100,
    keys: int = 77,
    dim: int = 64,
    bins: int = 4,
    dtype: int = HALF,
    layout: str = "BHND",
    mask: tuple[int, ...] | None = None,
    mask_type: int = BOOL,
    block_mask: tuple[int, ...] | None = None,
    key_index: tuple[int, ...] | None = None,
    packed: bool = False,
    shared_heads: int = 0,
    rotary: tuple[int, ...] | None = None,
    norm: tuple[int, ...] | None = None,
    second: int = 0,
) -> list[Desc]:
    """Descriptions of the node's inputs and outputs for one shape.

    `packed`: of one tensor of q, k and v; `shared_heads`: of those in the one tensor of k and v of several nodes; `second`:
    that many of the packed tokens, the last ones, lie in a tensor of their own.
    """

    def tokens(heads: int, count: int) -> tuple[int, ...]:
        return (batch, heads, count, dim) if layout == "BHND" else (batch, count, heads, dim)

    outs = [tokens(heads, count) for count in ([queries - second, second] if second else [queries])]
    q, k = outs[0], tokens(shared_heads or kv_heads, keys)
    if packed:
        q, k = ((batch, count, 3, heads, dim) for count in (queries - second, second or queries))
    shapes = [(q, dtype), (k, dtype), (k, dtype), ((batch,), FLOAT), ((bins, heads), FLOAT), ((bins, kv_heads), FLOAT)]
    shapes += [((bins, kv_heads, dim), FLOAT)] * 3 + [((bins,), INT32)]
    if mask is not None:
        shapes.append((mask, mask_type))
    if block_mask is not None:
        shapes.append((block_mask, BOOL))
    if key_index is not None:
        shapes.append((key_index, INT32))
    shapes += [(shape, FLOAT) for shape in (rotary, norm) if shape is not None]
    return [Desc(Dims(shape), kind, LINEAR, 1.0) for shape, kind in [*shapes, *((out, dtype) for out in outs)]]


PACKED = {"heads": 6, "kv_heads": 6, "queries": 77, "keys": 77, "layout": "BNHD", "packed": True}


SHARED = {"layout": "BNHD", "shared_heads": 16}


SHARED_ATTRIBUTES = {"layout": "BNHD", "kv_heads": 3, "k_head": 10, "v_head": 13}


SHARED_ACROSS_HEADS = {"layout": "BNHD", "kv_heads": 6, "shared_heads": 19, "norm": (2, 6, 64)}


SHARED_ACROSS_HEADS_ATTRIBUTES = {
    "layout": "BNHD",
    "kv_heads": 6,
    "k_head": 7,
    "v_head": 13,
    "norm": 1,
    "norm_eps": 1e-6,
}


SPARSE = {"queries": 300, "keys": 500, "block_mask": (1, 6, 3, 4), "key_index": (2, 3, 400)}


SPARSE_ATTRIBUTES = {"block_mask": 1, "key_index": 1}


LAYERS = {"queries": 77, "rotary": (77, 32, 2), "norm": (2, 64)}


ACROSS_HEADS = {"kv_heads": 6, "norm": (2, 6, 64)}


LAYERS_ATTRIBUTES = {"rotary": 1, "norm": 1, "norm_eps": 1e-6}


PARTS = {"queries": 77, "norm": (2, 2, 64)}


PARTS_ATTRIBUTES = {"norm": 1, "norm_eps": 1e-6, "norm_split": 33}


TWO = PACKED | {"queries": 205, "keys": 205, "second": 77}


TWO_ATTRIBUTES = {"layout": "BNHD", "parts": 2}


def replaced(position: int, shape: tuple[int, ...], **options: object) -> list[Desc]:
    descs = tensors(**options)
    descs[position].dims = Dims(shape)
    return descs
