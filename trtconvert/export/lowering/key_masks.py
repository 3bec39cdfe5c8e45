"""Key masks: boolean masks [B or 1, 1, 1, Nk] in place of masks that models repeat over heads and queries, or add to logits.

The plugin attends to the visible keys alone where every head and query has the same ones. A mask becomes a key mask if each of
its elements is computed from one element of a smaller tensor, its root, that belongs to a batch element and a key. The proof
follows the numbered elements of the root through the graph at sizes of its own, and the two values that an element may have:

- A boolean root is false or true.
- An integer input of the model is 0 or 1, as masks of tokenizers. diffusers' pipelines pass such masks as integers or booleans,
  which are integers in exported models.

A floating-point input is no root: its numbers may be weights between 0 and 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from trtconvert.export.building import NewNodes, cleaned, graph_of
from trtconvert.export.matching import constant_of, perm_of, producer_of
from trtconvert.export.nodes.attention import attention_nodes, block_mask_of, key_index_of, mask_of
from trtconvert.export.nodes.attention_body import INPUTS

HIDING = -1000.0
"""The largest number of an additive mask that hides a key: exp(-1000) is 0 in FP32, beside logits of any trained model."""

_MOST_ELEMENTS = 1 << 27
"""Limit of the elements of a mask, for the memory of the proof."""

_POINTWISE: dict[str, Callable[..., Any]] = {
    "Add": np.add,
    "Div": np.divide,
    "Equal": np.equal,
    "Log": np.log,
    "Mul": np.multiply,
    "Neg": np.negative,
    "Not": np.logical_not,
    "Sub": np.subtract,
    "Where": np.where,
}
_RESHAPES = ("Flatten", "Reshape", "Squeeze", "Unsqueeze")
_MOVES = (*_RESHAPES, "Concat", "Expand", "Identity", "Tile", "Transpose")


@dataclass(frozen=True)
class KeyMask:
    """How a mask follows from its root.

    Attributes:
        root: BOOL, or an integer input of the model, with one element for each key, or for each batch element and key in this
            order.
        by_sample: whether the root has batch elements.
        hides: whether true elements hide keys, instead of showing them.
        keeps_empty: whether queries without a visible key see all keys: their logits have the same number added to each.
        keys: number of keys.
    """

    root: ir.Value
    by_sample: bool
    hides: bool
    keeps_empty: bool
    keys: int | ir.SymbolicDim

    @property
    def shape(self) -> ir.Shape:
        """[B or 1, 1, 1, Nk]."""
        assert self.root.shape is not None  # see `_key_mask`
        return ir.Shape([self.root.shape[0] if self.by_sample else 1, 1, 1, self.keys])


def use_key_masks(model: ir.Model) -> int:
    """Replaces masks of nodes by key masks, where these are other tensors. Nodes with the same root share one.

    Returns:
        The number of changed nodes.
    """
    made: dict[tuple[ir.Graph, KeyMask], ir.Value] = {}
    nodes, found = attention_nodes(model), key_masks(model)
    for site, mask in found.items():
        node = nodes[site]
        key = graph_of(node), mask
        if key not in made:
            made[key] = _made(node, mask)
        node.replace_input_with(len(INPUTS), made[key])
    return cleaned(model, len(found))


def key_masks(model: ir.Model) -> dict[str, KeyMask]:
    """Returns the key masks that can replace masks of nodes, by site.

    Nodes with a block mask or an index keep their masks: an additive mask leaves a query that sees no key in its blocks other
    keys than a boolean mask.
    """
    by_mask: dict[ir.Value, KeyMask | None] = {}
    found = {}
    for site, node in attention_nodes(model).items():
        mask = mask_of(node)
        if mask is None or block_mask_of(node) is not None or key_index_of(node) is not None:
            continue
        if mask not in by_mask:
            by_mask[mask] = _key_mask(mask)
        if (key_mask := by_mask[mask]) is not None:
            found[site] = key_mask
    return found


def _made(node: ir.Node, mask: KeyMask) -> ir.Value:
    """Computes a key mask in front of a node."""
    new = NewNodes()
    seen = new.reshaped(mask.root, [0 if mask.by_sample else 1, 1, 1, -1], mask.shape)
    if seen.dtype != ir.DataType.BOOL:
        seen = _cast(new, seen, ir.DataType.BOOL)
    if mask.hides:
        seen = new.add("Not", [seen], seen)
    if mask.keeps_empty:
        number = _cast(new, seen, ir.DataType.FLOAT)  # TensorRT does not reduce booleans
        most = new.add("ReduceMax", [number, new.constant([-1])], number, [*mask.shape[:3], 1], {"keepdims": 1})
        some = _cast(new, most, ir.DataType.BOOL)
        seen = new.add("Or", [seen, new.add("Not", [some], some)], seen)
    graph_of(node).insert_before(node, new.nodes)
    return seen


def _cast(new: NewNodes, x: ir.Value, dtype: ir.DataType) -> ir.Value:
    cast = new.add("Cast", [x], x, attributes={"to": dtype})
    cast.dtype = dtype
    return cast


# Proof ------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Followed:
    """A tensor computed from a root.

    Attributes:
        numbers: of the root's element that each element is computed from.
        pair: the element's value where the root's element is 0 or false, and where it is 1 or true.
    """

    numbers: np.ndarray
    pair: np.ndarray


def _key_mask(mask: ir.Value) -> KeyMask | None:
    """Returns the key mask that can replace a mask, None if there is none or the mask is one."""
    symbols: dict[str, int] = {}
    sizes = _sizes(mask, symbols)
    if not sizes or len(sizes) > 4 or sizes[-1] == 1 or math.prod(sizes) > _MOST_ELEMENTS:
        return None
    whole = [1] * (4 - len(sizes)) + sizes
    for root in _roots(mask):
        of_root = _sizes(root, symbols)
        for by_sample in (True, False):
            first = of_root[0] if by_sample and of_root else 1
            if not of_root or first not in (1, whole[0]) or math.prod(of_root) != first * sizes[-1]:
                continue
            if root is mask and sizes == [first, 1, 1, sizes[-1]]:
                return None
            followed = _followed(mask, root, of_root, symbols)
            by_key = np.arange(first * sizes[-1]).reshape(first, 1, 1, -1)
            if followed is None or not (followed.numbers.reshape(whole) == by_key).all():
                continue
            assert mask.shape is not None  # as it has sizes
            kind = _kind(followed.pair)
            return None if kind is None else KeyMask(root, by_sample, *kind, mask.shape[-1])
    return None


def _kind(pair: np.ndarray) -> tuple[bool, bool] | None:
    """Returns `KeyMask.hides` and `keeps_empty` for the two values of a mask; None if these are not those of a mask of keys."""
    shown = pair if pair.dtype == bool else pair == 0
    if shown[0] == shown[1]:
        return None
    hidden = pair[0] if shown[1] else pair[1]
    if pair.dtype != bool and not hidden <= HIDING:
        return None
    return bool(shown[0]), pair.dtype != bool and bool(np.isfinite(hidden))


def _sizes(value: ir.Value, symbols: dict[str, int]) -> list[int] | None:
    """Returns sizes of a value, with a different number for each symbol (added to `symbols`); None if a size is unknown."""
    if value.shape is None or value.shape.has_unknown_dim():
        return None
    for symbol in sorted(value.shape.free_symbols()):
        # Halves and quarters of symbols are whole.
        symbols.setdefault(symbol, 4 * (len(symbols) + 1))
    shape = value.shape.evaluate(symbols)
    return [int(size) for size in shape.numpy()] if shape.is_static() else None


def _roots(mask: ir.Value) -> Iterator[ir.Value]:
    """Yields values that may be the root, the nearest first."""
    value: ir.Value | None = mask
    while value is not None:
        integer = value.dtype in (ir.DataType.INT32, ir.DataType.INT64)
        if value.dtype == ir.DataType.BOOL or (integer and value.is_graph_input()):
            yield value
        node = value.producer()
        value = next((x for x in _operands(node) if _number(x) is None), None) if node is not None else None


def _operands(node: ir.Node) -> list[ir.Value]:
    """Returns the inputs of a node that its elements come from; [] if this is not known."""
    if node.domain or not (node.op_type in _MOVES or node.op_type in _POINTWISE or node.op_type == "Cast"):
        return []
    has_sizes = node.op_type in (*_RESHAPES, "Expand", "Tile")
    return [x for x in node.inputs[: 1 if has_sizes else None] if x is not None]


def _number(value: ir.Value) -> np.ndarray | None:
    """Returns the number of a constant with one number, else None."""
    while (expand := producer_of(value, "Expand")) is not None and expand.inputs[0] is not None:
        value = expand.inputs[0]
    numbers = constant_of(value)
    return numbers.reshape(()) if numbers is not None and numbers.size == 1 else None


def _followed(mask: ir.Value, root: ir.Value, sizes: list[int], symbols: dict[str, int]) -> _Followed | None:
    """Follows the elements of a root of given sizes to a mask; None if the mask is not computed from these alone."""
    assert root.dtype is not None  # see `_roots`
    start = _Followed(np.arange(math.prod(sizes)).reshape(sizes), np.array([0, 1]).astype(root.dtype.numpy()))
    known: dict[ir.Value, _Followed | None] = {root: start}

    def follow(value: ir.Value) -> _Followed | None:
        if value not in known:
            known[value] = computed(value)
        return known[value]

    def computed(value: ir.Value) -> _Followed | None:
        node, sizes = value.producer(), _sizes(value, symbols)
        operands = _operands(node) if node is not None else []
        numbers = [_number(x) for x in operands]
        followed = [follow(x) for x, number in zip(operands, numbers, strict=True) if number is None]
        if node is None or sizes is None or not followed or None in followed:
            return None
        sources = [x for x in followed if x is not None]
        if node.op_type in _MOVES:
            same = all(x is sources[0] for x in sources) and len(sources) == len(operands)
            return _Followed(_moved(node, sources[0].numbers, sizes), sources[0].pair) if same else None
        places = [np.broadcast_to(x.numbers, sizes) for x in sources]
        if not all((x == places[0]).all() for x in places[1:]):
            return None
        pairs = iter(sources)
        values = [next(pairs).pair if number is None else number for number in numbers]
        if node.op_type == "Cast":
            assert value.dtype is not None  # the exporter types every value
            return _Followed(places[0], values[0].astype(value.dtype.numpy()))
        return _Followed(places[0], _POINTWISE[node.op_type](*values))

    with np.errstate(all="ignore"):  # log(0) hides
        try:
            return follow(mask)
        except ValueError:  # a Reshape to sizes that only fit other sizes of the symbols
            return None
        except RecursionError:  # a mask that is computed from the model's activations
            return None


def _moved(node: ir.Node, numbers: np.ndarray, sizes: list[int]) -> np.ndarray:
    """Applies one of `_MOVES` to elements, given the sizes of the result."""
    if node.op_type == "Concat":
        return np.concatenate([numbers] * len(node.inputs), node.attributes["axis"].as_int())
    if node.op_type == "Transpose":
        return numbers.transpose(perm_of(node))
    if node.op_type == "Tile":
        return np.tile(numbers, [size // before for size, before in zip(sizes, numbers.shape, strict=True)])
    return np.broadcast_to(numbers, sizes) if node.op_type == "Expand" else numbers.reshape(sizes)
