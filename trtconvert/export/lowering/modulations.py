"""Splits the products of modulations into products of single rows.

The blocks of PixArt, Sana and Wan add a table [1, 6, C] to an embedding of the timestep [B, 6, C], and split the sum into shifts,
scales and gates. TensorRT splits the embedding in the kernel that modulates the tokens, once per token, which is slow. The blocks
of Flux and SD3 split a product of their own; beside plugins the kernel that modulates the tokens also writes the gates. With a
product for each row TensorRT has nothing to split.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from trtconvert.export.building import NewNodes, cleaned, graph_of
from trtconvert.export.lowering.initializers import rows_of
from trtconvert.export.matching import is_read_once, producer_of


def split_modulations(model: ir.Model) -> int:
    """Replaces rows of sums (table + product)[i] by table[i] + product[i], with products of single rows, in place. Splits
    products without a table too.

    Tables keep their names; rows of weights are renamed: not for refittable engines.

    Returns:
        The number of split products.
    """
    sums: dict[ir.Value, list[_Sum]] = defaultdict(list)
    for node in model.graph:
        if (found := _sum(node)) is not None:
            sums[found.embedding].append(found)
    count = 0
    for embedding, of_embedding in sums.items():
        product = _product(embedding)
        # Other readers need the whole product.
        if product is None or {user for user, _ in embedding.uses()} != {found.add for found in of_embedding}:
            continue
        _split(product, of_embedding)
        count += 1
    return cleaned(model, count + sum(_split_alone(node) for node in list(model.graph)))


_MOST_SAMPLES = 64
"""Products of more rows are products of tokens: one product is faster for tokens."""


@dataclass(frozen=True)
class _Sum:
    """table + embedding [B, n, C], split into n rows [B, 1, C].

    Attributes:
        table: constant [1, n, C], or of the embedding's shape.
        add, split: the nodes of the sum and of its rows.
    """

    embedding: ir.Value
    table: ir.Value
    add: ir.Node
    split: ir.Node


@dataclass(frozen=True)
class _Product:
    """x @ weightᵀ + bias, [B, n·C], reshaped to [B, n, C].

    Attributes:
        gemm: node with a constant weight [n·C, K] and bias [n·C].
        casts: behind the Reshape, the last one first.
    """

    gemm: ir.Node
    casts: tuple[ir.Node, ...]


def _sum(split: ir.Node) -> _Sum | None:
    add = producer_of(split.inputs[0], "Add") if split.op_type == "Split" and not split.domain else None
    if add is None or not is_read_once(add.outputs[0]):
        return None
    rows = len(split.outputs)
    if any(x is None or not _is_rows(x, rows) for x in add.inputs) or not all(_is_rows(x, 1) for x in split.outputs):
        return None
    for embedding, table in (add.inputs, add.inputs[::-1]):
        if embedding is not None and table is not None and _is_constant(table):
            return _Sum(embedding, table, add, split)
    return None


def _is_rows(value: ir.Value, count: int) -> bool:
    """Return whether a value is [B, count, C]."""
    return value.shape is not None and len(value.shape) == 3 and value.shape[1] == count


def _is_constant(value: ir.Value | None) -> bool:
    """Return whether a value is a constant behind casts and Unsqueezes, which the exporter does not fold if they are large."""
    while (same := producer_of(value, "Cast") or producer_of(value, "Unsqueeze")) is not None:
        value = same.inputs[0]
    return value is not None and ir.convenience.get_const_tensor(value) is not None


def _product(embedding: ir.Value) -> _Product | None:
    """Matches the product of an embedding."""
    value: ir.Value | None = embedding
    casts = list[ir.Node]()
    while (cast := producer_of(value, "Cast")) is not None:
        casts.append(cast)
        value = cast.inputs[0]
    reshape = producer_of(value, "Reshape")
    gemm = producer_of(reshape.inputs[0], "Gemm") if reshape is not None else None
    if reshape is None or gemm is None or embedding.is_graph_output() or not _is_linear(gemm):
        return None
    read = (gemm.outputs[0], *(node.outputs[0] for node in (reshape, *casts) if node.outputs[0] is not embedding))
    shape, width = embedding.shape, gemm.outputs[0].shape
    if shape is None or width is None or not all(is_read_once(x) for x in read):
        return None
    # Equal channels imply equal batches.
    sizes = [size for size in shape[1:] if isinstance(size, int)]
    return _Product(gemm, tuple(casts)) if len(sizes) == 2 and width[-1] == sizes[0] * sizes[1] else None


def _is_linear(gemm: ir.Node) -> bool:
    """Return whether a Gemm is a linear layer with constant weight [C, K] and bias [C]."""
    scales = gemm.attributes.get_float("alpha", 1.0), gemm.attributes.get_float("beta", 1.0)
    turned = gemm.attributes.get_int("transA", 0), gemm.attributes.get_int("transB", 0)
    if scales != (1, 1) or turned != (0, 1):
        return False
    tensors = [x.const_value if x is not None else None for x in gemm.inputs[1:]]
    return [len(x.shape) for x in tensors if x is not None] == [2, 1]


def _split_alone(split: ir.Node) -> bool:
    """Replaces a Split of a product [B, n·C] by products [B, C], and returns True if it matches."""
    gemm = producer_of(split.inputs[0], "Gemm") if split.op_type == "Split" and not split.domain else None
    widths = {row.shape[1] for row in split.outputs if row.shape is not None and len(row.shape) == 2}
    along_channels = split.attributes.get_int("axis", 0) in (1, -1)
    if gemm is None or not is_read_once(gemm.outputs[0]) or not _is_linear(gemm) or not along_channels:
        return False
    bias = gemm.inputs[2].const_value if len(gemm.inputs) > 2 and gemm.inputs[2] is not None else None
    (width,) = widths if len(widths) == 1 else (None,)
    if bias is None or not isinstance(width, int) or width * len(split.outputs) != bias.shape[0]:
        return False
    shape = gemm.outputs[0].shape
    samples = shape[0] if shape is not None and len(shape) == 2 else None
    if samples is None or (isinstance(samples, int) and samples > _MOST_SAMPLES):
        return False
    new = NewNodes()
    parts = [_part(new, gemm, index, width) for index in range(len(split.outputs))]
    ir.convenience.replace_nodes_and_values(graph_of(split), split, [split], new.nodes, split.outputs, parts)
    return True


def _part(new: NewNodes, gemm: ir.Node, index: int, width: int) -> ir.Value:
    """Computes a part [B, C] of a linear layer's result [B, n·C]."""
    (x, weight, bias), whole = gemm.inputs, gemm.outputs[0]
    assert weight is not None and bias is not None and whole.shape is not None
    rows = [rows_of(graph_of(gemm), of, index * width, width) for of in (weight, bias)]
    return new.add("Gemm", [x, *rows], whole, [whole.shape[0], width], gemm.attributes)


def _split(product: _Product, sums: Sequence[_Sum]) -> None:
    rows = _rows(product, sums[0].split)
    for found in sums:
        split = found.split
        of_table = ir.node("Split", [found.table, *split.inputs[1:]], split.attributes, num_outputs=len(rows))
        for row in of_table.outputs:
            assert found.table.shape is not None
            row.type, row.shape = found.table.type, ir.Shape([found.table.shape[0], 1, found.table.shape[2]])
        adds = [ir.node("Add", pair) for pair in zip(of_table.outputs, rows, strict=True)]
        results = [add.outputs[0] for add in adds]
        ir.convenience.replace_nodes_and_values(
            graph_of(split), split, [split], [of_table, *adds], split.outputs, results
        )


def _rows(product: _Product, like: ir.Node) -> list[ir.Value]:
    """Computes the rows [B, 1, C] of a product one by one, with the shapes of a Split's outputs."""
    gemm, new, rows = product.gemm, NewNodes(), list[ir.Value]()
    axis = new.constant([1])
    for index, row in enumerate(like.outputs):
        assert row.shape is not None
        width = row.shape[2]
        assert isinstance(width, int)  # see `_product`
        part = _part(new, gemm, index, width)
        value = new.add("Unsqueeze", [part, axis], part, row.shape)
        for cast in reversed(product.casts):
            value = new.add("Cast", [value], cast.outputs[0], row.shape, cast.attributes)
        rows.append(value)
    graph_of(gemm).insert_after(gemm, new.nodes)
    return rows
