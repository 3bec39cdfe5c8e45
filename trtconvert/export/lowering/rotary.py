"""Fuses rotary embeddings of queries and keys into the attention plugin.

TensorRT computes them in slow FP32 kernels of their own. A match rotates each pair of neighbouring channels of a head by an angle
of the token and the pair (Su et al. 2021, RoFormer, arXiv:2104.09864, equation 34). Models write this in two ways:

- as halves: y₀ = x₀·cos − x₁·sin, y₁ = x₁·cos + x₀·sin, interleaved, with cos and sin of each pair (Wan);
- as a turn: y = x·cos + turned·sin, where turned has the pairs (−x₁, x₀), with cos and sin of each channel (Flux). Neighbouring
  numbers of cos and sin must be equal: constants, or made by `repeat_interleave`.

A rotation of some of the tokens, joined with others such as text (CogVideoX, HunyuanVideo), is a rotation of all tokens, with
cos = 1 and sin = 0 for the others.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from trtconvert.export.building import NewNodes, cleaned, graph_of
from trtconvert.export.lowering.tokens import one_after_another, runs_of
from trtconvert.export.matching import (
    axes_of,
    before_widening,
    constant_of,
    cuts_of,
    element_of,
    factors_of,
    is_same_shape,
    producer_of,
    without_casts,
)
from trtconvert.export.nodes.attention import append_input, attention_nodes, key_index_of
from trtconvert.export.nodes.common import HALF


def fuse_rotary(model: ir.Model) -> int:
    """Replaces q and k of nodes by the inputs of their rotation, and appends its table as the input `rotary`.

    The table is FP32 [N, D/2, 2]: (cos, sin) of each token and pair of channels. Nodes with the same cos and sin share a table.
    Changes 16-bit nodes with equal rotations of q and k.

    Returns:
        The number of changed nodes.
    """
    tables: dict[tuple[object, ...], ir.Value] = {}
    count = 0
    for node in attention_nodes(model).values():
        rotated = _rotated(node) if key_index_of(node) is None else None  # the plugin gathers rotated keys
        if rotated is None:
            continue
        key = (node.graph, *(part.angles for part in rotated[0].parts))
        if key not in tables:
            tables[key] = _table(node, rotated[0])
        for index, tokens in enumerate(rotated):
            node.replace_input_with(index, _source_of(node, tokens))
        append_input(node, "rotary", tables[key])
        count += 1
    return cleaned(model, count)


@dataclass(frozen=True)
class _Heads:
    """The shape of rotated tensors: [B, N, H, D], or [B, H, N, D] if heads come first."""

    shape: tuple[int | ir.SymbolicDim, ...]
    first: bool

    @property
    def token_axis(self) -> int:
        return 2 if self.first else 1

    @property
    def tokens(self) -> int | ir.SymbolicDim:
        return self.shape[self.token_axis]

    @property
    def pairs(self) -> int:
        """Pairs of channels in each head."""
        channels = self.shape[3]
        assert isinstance(channels, int)  # see `_heads_of`
        return channels // 2


@dataclass(frozen=True)
class _Rotation:
    """A matched rotation.

    Attributes:
        source: the input, [B, N, H, D], [B, H, N, D] or [B, N, H·D].
        heads: its shape as heads.
        cos, sin: [1, N, 1, copies · D/2] or [1, 1, N, copies · D/2], possibly without leading axes of 1.
        copies: 1, or 2 if neighbours hold equal numbers.
    """

    source: ir.Value
    heads: _Heads
    cos: ir.Value
    sin: ir.Value
    copies: int

    @property
    def angles(self) -> tuple[ir.Value, ir.Value, int]:
        """Key of the table's rows."""
        return self.cos, self.sin, self.copies


@dataclass(frozen=True)
class _Unrotated:
    """Tokens without rotation, next to rotated ones."""

    source: ir.Value
    heads: _Heads

    @property
    def angles(self) -> int | ir.SymbolicDim:
        """Key of the table's rows: only their number matters."""
        return self.heads.tokens


@dataclass(frozen=True)
class _Tokens:
    """All tokens of q or k in consecutive parts. At least one part is rotated."""

    parts: tuple[_Rotation | _Unrotated, ...]
    heads: _Heads


def _rotated(node: ir.Node) -> tuple[_Tokens, _Tokens] | None:
    """Matches the rotations of q and k, if these are equal."""
    q, k = node.inputs[:2]
    if q is None or k is None or q.dtype not in HALF:
        return None
    heads_first = node.attributes["layout"].as_string() == "BHND"
    of_q, of_k = _tokens(q, heads_first), _tokens(k, heads_first)
    if of_q is None or of_k is None or [part.angles for part in of_q.parts] != [part.angles for part in of_k.parts]:
        return None
    return of_q, of_k


def _tokens(value: ir.Value, heads_first: bool) -> _Tokens | None:
    """Matches the rotation of a value, as a whole or in parts."""
    heads = _heads_of(value, heads_first)
    if heads is None:
        return None
    whole = _rotation(value, heads)
    if whole is not None:
        return _Tokens((whole,), heads)
    runs = runs_of(value, heads.token_axis)
    parts = [_part(run, heads_first) for run in runs] if len(runs) > 1 else []
    known = tuple(part for part in parts if part is not None)
    some = len(known) == len(parts) and any(isinstance(part, _Rotation) for part in known)
    return _Tokens(known, heads) if some else None


def _part(value: ir.Value | None, heads_first: bool) -> _Rotation | _Unrotated | None:
    """Matches a part of the tokens; None if their number is unknown."""
    heads = _heads_of(value, heads_first)
    if value is None or heads is None or (isinstance(heads.tokens, ir.SymbolicDim) and heads.tokens.value is None):
        return None
    rotation = _rotation(value, heads)
    if rotation is not None:
        return rotation
    source = _source(value)
    return _Unrotated(source if _is_seen_as(source, heads) else value, heads)


def _rotation(value: ir.Value, heads: _Heads) -> _Rotation | None:
    """Matches a rotation that the plugin supports."""
    found = _as_halves(value, heads) or _as_turn(value, heads)
    if found is None or not all(_is_of_tokens(table, heads, found.copies) for table in (found.cos, found.sin)):
        return None
    # The plugin does not widen its inputs.
    return found if found.source.dtype == value.dtype and _is_seen_as(found.source, heads) else None


def _heads_of(value: ir.Value | None, heads_first: bool) -> _Heads | None:
    if value is None or value.shape is None or len(value.shape) != 4:
        return None
    sizes = value.shape[1 if heads_first else 2], value.shape[3]  # heads and channels
    return _Heads(tuple(value.shape), heads_first) if all(isinstance(size, int) for size in sizes) else None


def _is_of_tokens(table: ir.Value, heads: _Heads, copies: int) -> bool:
    """Return whether a table has one row per token, shared by heads and batch, with copies of each number."""
    if copies > 1 and not _holds_pairs(table):
        return False
    whole = [1, *((1, heads.tokens) if heads.first else (heads.tokens, 1)), copies * heads.pairs]
    return any(is_same_shape(table.shape, whole[axis:]) for axis in range(4) if all(size == 1 for size in whole[:axis]))


def _is_seen_as(source: ir.Value, heads: _Heads) -> bool:
    batch, tokens, number, channels = heads.shape
    return is_same_shape(source.shape, heads.shape) or (
        not heads.first and is_same_shape(source.shape, [batch, tokens, number * channels])
    )


# As halves --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Term:
    """One element of each pair of channels times a table."""

    source: ir.Value
    element: int
    table: ir.Value


def _as_halves(value: ir.Value, heads: _Heads) -> _Rotation | None:
    """Matches pairs of x₀·cos − x₁·sin and x₁·cos + x₀·sin."""
    even, odd = _pairs(value, heads)
    difference, total = producer_of(without_casts(even), "Sub"), producer_of(without_casts(odd), "Add")
    if difference is None or total is None:
        return None
    terms = [_term(product, heads) for product in (*difference.inputs, *total.inputs)]
    known = [term for term in terms if term is not None]
    if len(known) < len(terms) or len({id(term.source) for term in known}) > 1:
        return None
    straight, crossed = known[:2]
    crossed_too, straight_too = sorted(known[2:], key=lambda term: term.element)
    if [term.element for term in (straight, crossed, crossed_too, straight_too)] != [0, 1, 0, 1]:
        return None
    if straight.table is not straight_too.table or crossed.table is not crossed_too.table:
        return None
    return _Rotation(straight.source, heads, straight.table, crossed.table, copies=1)


def _term(value: ir.Value | None, heads: _Heads) -> _Term | None:
    for x, table in factors_of(value):
        half = _half(x, heads)
        if half is not None:
            return _Term(*half, table)
    return None


# As a turn --------------------------------------------------------------------------------------------------------------


def _as_turn(value: ir.Value, heads: _Heads) -> _Rotation | None:
    """Matches x·cos + turned·sin."""
    total = producer_of(without_casts(value), "Add")
    for straight, crossed in itertools.permutations(total.inputs if total is not None else (), 2):
        for turned, sin in factors_of(crossed):
            source = _before_turn(turned, heads)
            if source is None:
                continue
            for x, cos in factors_of(straight):
                if is_same_shape(x.shape, heads.shape) and _source(x) is source:
                    return _Rotation(source, heads, cos, sin, copies=2)
    return None


def _before_turn(value: ir.Value, heads: _Heads) -> ir.Value | None:
    """Returns x if a value has the pairs (−x₁, x₀)."""
    even, odd = _pairs(value, heads)
    negative = producer_of(without_casts(even), "Neg")
    if negative is None or odd is None:
        return None
    first, second = _half(negative.inputs[0], heads), _half(odd, heads)
    if first is None or second is None or first[0] is not second[0] or (first[1], second[1]) != (1, 0):
        return None
    return first[0]


def _holds_pairs(value: ir.Value | None) -> bool:
    """Return whether neighbours 2i and 2i + 1 along the last axis are certainly equal."""
    if value is None or not _has_even_width(value):
        return False
    numbers = constant_of(value)
    if numbers is not None:
        return bool((numbers[..., 0::2] == numbers[..., 1::2]).all())
    node = value.producer()
    if node is None or node.domain:
        return False
    if node.op_type == "Concat":  # along any axis: all widths are even
        return all(_holds_pairs(part) for part in node.inputs)
    source = node.inputs[0] if node.inputs else None
    if node.op_type == "Expand":  # of a single number
        return source is not None and source.shape is not None and list(source.shape[-1:]) == [1]
    # Elementwise operators and views keep pairs, as all widths are even.
    return node.op_type in ("Cast", "Cos", "Sin", "Reshape", "Squeeze", "Unsqueeze") and _holds_pairs(source)


def _has_even_width(value: ir.Value) -> bool:
    width = value.shape[-1] if value.shape is not None and len(value.shape) else None
    return isinstance(width, int) and width % 2 == 0


# Pairs ------------------------------------------------------------------------------------------------------------------


def _pairs(value: ir.Value | None, heads: _Heads) -> tuple[ir.Value | None, ir.Value | None]:
    """Returns the even and odd channels of a value that interleaves two tensors, else None twice."""
    value = without_casts(value)
    reshape = producer_of(value, "Reshape")
    if value is None or reshape is None or not is_same_shape(value.shape, heads.shape):
        return None, None
    last = len(heads.shape)  # axis of the two in a pair
    join = producer_of(without_casts(reshape.inputs[0]), "Concat")
    if join is None or len(join.inputs) != 2 or join.attributes["axis"].as_int() not in (-1, last):
        return None, None
    columns = [producer_of(without_casts(column), "Unsqueeze") for column in join.inputs]
    halves = [c.inputs[0] for c in columns if c is not None and axes_of(c.inputs[1], last + 1) == [last]]
    return (halves[0], halves[1]) if len(halves) == 2 else (None, None)


def _half(value: ir.Value | None, heads: _Heads) -> tuple[ir.Value, int] | None:
    """Returns the tensor, and 0 or 1, if a value holds the even (0) or odd (1) channels of the tensor."""
    found = element_of(before_widening(value))
    if found is None:
        return None
    pairs, axis, element = found
    if axis != len(heads.shape) or not is_same_shape(pairs.shape, [*heads.shape[:3], heads.pairs, 2]):
        return None
    return _source(pairs), element


def _source(value: ir.Value) -> ir.Value:
    """Returns a value before reshapes and lossless casts."""
    while (reshape := producer_of(before_widening(value), "Reshape")) is not None and reshape.inputs[0] is not None:
        value = reshape.inputs[0]
    widened = before_widening(value)
    assert widened is not None
    return widened


# Inputs of the plugin ---------------------------------------------------------------------------------------------------


def _source_of(node: ir.Node, tokens: _Tokens) -> ir.Value:
    """Returns the unrotated tokens in the shape of the result, in front of a node."""
    heads = tokens.heads
    if len(tokens.parts) == 1:
        return _as_heads(node, tokens.parts[0].source, heads)
    whole = _cut_in_parts(tokens)
    if whole is not None:
        return _as_heads(node, whole, heads)
    sources = [_as_heads(node, part.source, part.heads) for part in tokens.parts]
    joined = one_after_another(sources, heads.token_axis, before=node)
    joined.shape = ir.Shape(heads.shape)
    return joined


def _cut_in_parts(tokens: _Tokens) -> ir.Value | None:
    """Returns the tensor that has all of the parts as consecutive slices."""
    cuts = cuts_of([part.source for part in tokens.parts], tokens.heads.token_axis)
    return cuts[0][0] if cuts and _is_seen_as(cuts[0][0], tokens.heads) else None


def _as_heads(node: ir.Node, source: ir.Value, heads: _Heads) -> ir.Value:
    """Reshapes a source to heads, in front of a node."""
    if is_same_shape(source.shape, heads.shape):
        return source
    new, sizes = NewNodes(), [size for size in heads.shape[2:] if isinstance(size, int)]  # both, see `_heads_of`
    seen = new.reshaped(source, [0, 0, *sizes], heads.shape)
    graph_of(node).insert_before(node, new.nodes)
    return seen


def _table(node: ir.Node, tokens: _Tokens) -> ir.Value:
    """Computes the table, FP32 [N, D/2, 2], in front of a node."""
    new, shape = NewNodes(), [tokens.heads.tokens, tokens.heads.pairs, 2]
    parts = [
        _rows(new, part) if isinstance(part, _Rotation) else _rows_of_no_rotation(new, part) for part in tokens.parts
    ]
    table = new.add("Concat", parts, parts[0], attributes={"axis": 0}) if len(parts) > 1 else parts[0]
    table.shape = ir.Shape(shape)
    graph_of(node).insert_before(node, new.nodes)
    return table


def _rows(new: NewNodes, rotation: _Rotation) -> ir.Value:
    """Computes the table's rows of a rotation."""
    pairs, columns = rotation.heads.pairs, []
    for numbers in (rotation.cos, rotation.sin):
        column = new.reshaped(numbers, [-1, pairs, rotation.copies], [None, pairs, rotation.copies])
        if rotation.copies > 1:
            column = new.add("Slice", [column, *(new.constant([at]) for at in (0, 1, -1))], column, [None, pairs, 1])
        if column.dtype != ir.DataType.FLOAT:
            column = new.op("Cast", [column], {"to": ir.DataType.FLOAT})
            column.type = ir.TensorType(ir.DataType.FLOAT)
        columns.append(column)
    return new.add("Concat", columns, columns[0], [None, pairs, 2], {"axis": -1})


def _rows_of_no_rotation(new: NewNodes, part: _Unrotated) -> ir.Value:
    """Returns rows of cos = 1 and sin = 0, constant if the number of tokens is fixed."""
    heads, count = part.heads, part.heads.tokens
    row = np.tile(np.array([1, 0], np.float32), (1, heads.pairs, 1))
    if isinstance(count, int):
        return new.constant(row.repeat(count, 0))
    axis, rest = heads.token_axis, new.constant(row.shape[1:])
    of_tokens = new.add("Shape", [part.source], rest, [1], {"start": axis, "end": axis + 1})
    sizes = new.add("Concat", [of_tokens, rest], rest, [3], {"axis": 0})
    ones = new.constant(row)
    return new.add("Expand", [ones, sizes], ones, [count, *row.shape[1:]])
