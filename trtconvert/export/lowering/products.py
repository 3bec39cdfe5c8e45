"""Splits products of a concatenation into products of its parts, to avoid the copy.

The single blocks of Flux and HunyuanVideo compute Linear(cat([attention, mlp], dim=2)). TensorRT copies both parts.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from trtconvert.export.building import NewNodes, cleaned, graph_of, replace_nodes
from trtconvert.export.lowering.initializers import rows_of
from trtconvert.export.lowering.projections import bias_behind
from trtconvert.export.matching import is_read_once, producer_of
from trtconvert.export.nodes.common import HALF


@dataclass(frozen=True)
class _Product:
    """concat(parts) @ weight (+ bias).

    Attributes:
        parts: [..., Ki] each, widths: the Ki; weight: [K, C], of 16 bits; bias: [C]. Both are constants.
        last: the node of the result.
    """

    parts: tuple[ir.Value, ...]
    widths: tuple[int, ...]
    weight: ir.Value
    bias: ir.Value | None
    last: ir.Node


def split_products(model: ir.Model) -> int:
    """Computes products of a Concat along the last axis with a constant weight as sums of products, in place.

    Results differ in the last bits: sums of 16-bit products are rounded more often. The narrowest part comes first, with the
    bias, and the widest last, since the first one is rounded most often.

    Parts of the weight are renamed: not for refittable engines. External weights stay in their files.

    Returns:
        The number of split products.
    """
    products = [product for node in model.graph if (product := _product(node)) is not None]
    for product in products:
        _split(product)
    return cleaned(model, len(products))


def _product(matmul: ir.Node) -> _Product | None:
    if matmul.op_type != "MatMul" or matmul.domain:
        return None
    joined, weight = matmul.inputs
    concat = producer_of(joined, "Concat")
    if concat is None or joined is None or joined.shape is None or not is_read_once(joined):
        return None
    if weight is None or weight.const_value is None or weight.dtype not in HALF or len(weight.const_value.shape) != 2:
        return None
    if concat.attributes["axis"].as_int() % len(joined.shape) != len(joined.shape) - 1:
        return None
    parts = tuple(part for part in concat.inputs if part is not None)
    widths = tuple(part.shape[-1] for part in parts if part.shape is not None)
    known = tuple(width for width in widths if isinstance(width, int))
    if len(known) != len(parts) or len(parts) < 2:
        return None
    bias, add = bias_behind(matmul.outputs[0], weight.const_value.shape.numpy()[1])  # type: ignore[union-attr]
    return _Product(parts, known, weight, bias, add or matmul)


def _split(product: _Product) -> None:
    graph, result, new = graph_of(product.last), product.last.outputs[0], NewNodes()
    starts = [sum(product.widths[:index]) for index in range(len(product.widths))]
    total: ir.Value | None = None
    # The narrowest first. Starts are unique, so that sorting never compares parts.
    for width, start, part in sorted(zip(product.widths, starts, product.parts, strict=True)):
        added = new.add("MatMul", [part, rows_of(graph, product.weight, start, width)], result)
        if total is not None:
            added = new.add("Add", [total, added], result)
        elif product.bias is not None:
            added = new.add("Add", [added, product.bias], result)
        total = added
    replace_nodes([product.last], new.nodes)
