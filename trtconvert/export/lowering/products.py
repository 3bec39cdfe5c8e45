"""Products with constant weights that TensorRT computes faster in parts, because of what stands before or behind them.

Before: the single blocks of Flux and HunyuanVideo project attention and MLP together: Linear(cat([attention, mlp], dim=2)).
TensorRT copies both into one tensor for it: on an H200 53 to 67 µs of the 2,000 that a block of Flux takes at 1024².

Behind: PixArt, Sana and Wan compute the shifts, scales and gates of all blocks as one product, whose result [B, 6, C] is cut into
rows. TensorRT cuts in the kernel that modulates the tokens first, once for every token: on an H200 600 to 1,300 µs of a step of
Wan at 17,160 tokens, and 300 in each block.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from trtconvert.export.matching import producer_of
from trtconvert.export.nodes import HALF


@dataclass(frozen=True)
class _Product:
    """concat(parts) @ weight (+ bias).

    Attributes:
        parts: [..., Ki] each, widths: the Ki; weight: [K, C], of 16 bits; bias: [C]. Both are constants.
        last: the node whose output it is.
    """

    parts: tuple[ir.Value, ...]
    widths: tuple[int, ...]
    weight: ir.Value
    bias: ir.Value | None
    last: ir.Node


def split_products(model: ir.Model) -> int:
    """Compute products of a concatenation along its last axis with a constant as sums of products of its parts, in place.

    Results differ in their last bits: one product of 16 bits is rounded twice, before the bias is added and after, two and their
    sums are rounded four times. For numbers of N(0, 1) in FP16, a part of 768 channels and one of 3072, the relative error goes
    from 2.7e-4 to 3.2e-4, or to 2.6e-4 where the kernels add bias and the sum so far to their own sums in FP32. Where parts
    cancel it is more, as they are larger than their sum. The narrowest part comes first, with the bias, and the widest last,
    since the first is rounded once more: the other way round it is 3.4e-4 or 2.9e-4.

    The parts of the weight get another name: not for engines whose weights are to be replaced. In models that keep their
    weights in files they stay there: rows of a matrix lie one after the other.

    Returns:
        How many products were split.
    """
    products = [product for node in model.graph if (product := _product(node)) is not None]
    for product in products:
        _split(product)
    if products:
        RemoveUnusedNodesPass()(model)
    return len(products)


def split_rows(model: ir.Model) -> int:
    """Compute products that are cut into rows row by row, in place: nothing is left to cut.

    The rows of the weight get another name: not for engines whose weights are to be replaced.

    Returns:
        How many products were split.
    """
    cuts = [rows for node in model.graph if (rows := _rows(node)) is not None]
    for rows in cuts:
        _split_rows(rows)
    if cuts:
        RemoveUnusedNodesPass()(model)
    return len(cuts)


@dataclass(frozen=True)
class _Rows:
    """A product [B, n·C] that is seen as [B, n, C] and cut into n rows [B, 1, C].

    Attributes:
        gemm: x @ weightᵀ + bias, both constant, [n·C, K] and [n·C].
        casts: between the product and the cut, the last one first.
    """

    gemm: ir.Node
    casts: tuple[ir.Node, ...]
    split: ir.Node


def _rows(split: ir.Node) -> _Rows | None:
    if split.op_type != "Split" or split.domain or split.attributes.get_int("axis", 0) % 3 != 1:
        return None
    value, casts = split.inputs[0], list[ir.Node]()
    while (cast := producer_of(value, "Cast")) is not None:
        casts.append(cast)
        value = cast.inputs[0]
    reshape = producer_of(value, "Reshape")
    gemm = producer_of(reshape.inputs[0], "Gemm") if reshape is not None else None
    if reshape is None or gemm is None or len(gemm.inputs) != 3 or not _is_linear(gemm):
        return None
    between = (gemm.outputs[0], reshape.outputs[0], *(cast.outputs[0] for cast in casts))
    if any(x.is_graph_output() or len(x.uses()) > 1 for x in between):
        return None
    count, width, shape = len(split.outputs), gemm.outputs[0].shape, reshape.outputs[0].shape
    if shape is None or width is None or len(shape) != 3 or shape[1] != count or not isinstance(shape[2], int):
        return None
    return _Rows(gemm, tuple(casts), split) if width[-1] == count * shape[2] else None


def _is_linear(gemm: ir.Node) -> bool:
    """Whether it is a linear layer of constant weights, [C, K] and [C]."""
    _, weight, bias = gemm.inputs
    scales = gemm.attributes.get_float("alpha", 1.0), gemm.attributes.get_float("beta", 1.0)
    turned = gemm.attributes.get_int("transA", 0), gemm.attributes.get_int("transB", 0)
    if scales != (1, 1) or turned != (0, 1) or weight is None or weight.const_value is None:
        return False
    return bias is not None and bias.const_value is not None and len(bias.const_value.shape) == 1


def _split_rows(rows: _Rows) -> None:
    graph, (x, weight, bias) = rows.gemm.graph, rows.gemm.inputs
    assert isinstance(graph, ir.Graph) and weight is not None and bias is not None
    axis = ir.node("Constant", [], {"value": ir.tensor([1])})
    axis.outputs[0].dtype = ir.DataType.INT64
    new, results = [axis], list[ir.Value]()
    for index, row in enumerate(rows.split.outputs):
        assert row.shape is not None
        width = row.shape[2]
        assert isinstance(width, int)
        gemm = ir.node(
            "Gemm", [x, *(_part(graph, part, index * width, width) for part in (weight, bias))], rows.gemm.attributes
        )
        gemm.outputs[0].type, gemm.outputs[0].shape = rows.gemm.outputs[0].type, ir.Shape([row.shape[0], width])
        steps = [gemm, ir.node("Unsqueeze", [gemm.outputs[0], axis.outputs[0]])]
        steps[1].outputs[0].type, steps[1].outputs[0].shape = gemm.outputs[0].type, row.shape
        for cast in reversed(rows.casts):
            steps.append(ir.node("Cast", [steps[-1].outputs[0]], cast.attributes))
            steps[-1].outputs[0].type, steps[-1].outputs[0].shape = cast.outputs[0].type, row.shape
        new += steps
        results.append(steps[-1].outputs[0])
    ir.convenience.replace_nodes_and_values(graph, rows.split, [rows.split], new, rows.split.outputs, results)


def _product(matmul: ir.Node) -> _Product | None:
    if matmul.op_type != "MatMul" or matmul.domain:
        return None
    joined, weight = matmul.inputs
    concat = producer_of(joined, "Concat")
    if concat is None or joined is None or joined.shape is None or joined.is_graph_output() or len(joined.uses()) > 1:
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
    bias, add = _bias(matmul)
    return _Product(parts, known, weight, bias, add or matmul)


def _bias(matmul: ir.Node) -> tuple[ir.Value, ir.Node] | tuple[None, None]:
    """A constant [C] that is added to a product, and the node that adds it."""
    product = matmul.outputs[0]
    if product.is_graph_output() or len(product.uses()) != 1:
        return None, None
    ((add, _),) = product.uses()
    if add.op_type != "Add" or add.domain:
        return None, None
    bias = next((x for x in add.inputs if x is not None and x.const_value is not None), None)
    return (bias, add) if bias is not None and bias.shape is not None and len(bias.shape) == 1 else (None, None)


def _split(product: _Product) -> None:
    graph, last = product.last.graph, product.last
    assert isinstance(graph, ir.Graph)
    starts = [sum(product.widths[:index]) for index in range(len(product.widths))]
    new = list[ir.Node]()
    total: ir.Value | None = None
    # The narrowest first. No two start at the same row, so parts themselves are never compared.
    for width, start, part in sorted(zip(product.widths, starts, product.parts, strict=True)):
        new.append(ir.node("MatMul", [part, _part(graph, product.weight, start, width)]))
        if total is not None:
            new.append(ir.node("Add", [total, new[-1].outputs[0]]))
        elif product.bias is not None:
            new.append(ir.node("Add", [new[-1].outputs[0], product.bias]))
        total = new[-1].outputs[0]
    for node in new:
        node.outputs[0].type, node.outputs[0].shape = last.outputs[0].type, last.outputs[0].shape
    ir.convenience.replace_nodes_and_values(graph, last, [last], new, last.outputs, new[-1].outputs)


def _part(graph: ir.Graph, weight: ir.Value, start: int, count: int) -> ir.Value:
    """Rows of a matrix, or numbers of a vector, as an initializer, where these lie: in the model's files, or in memory."""
    tensor = weight.const_value
    assert tensor is not None and tensor.dtype is not None
    name = f"{weight.name}, {count} rows from {start}"
    if name in graph.initializers:  # a module that is called twice
        return graph.initializers[name]
    shape = ir.Shape([count, *tensor.shape[1:]])  # type: ignore[arg-type]
    if isinstance(tensor, ir.ExternalTensor):
        row = tensor.nbytes // tensor.shape.numpy()[0]
        offset = (tensor.offset or 0) + start * row
        rows: ir.TensorProtocol = ir.ExternalTensor(
            tensor.location, offset, count * row, tensor.dtype, shape=shape, name=name, base_dir=tensor.base_dir
        )
    else:
        rows = ir.LazyTensor(
            lambda: ir.Tensor(tensor.numpy()[start : start + count], dtype=tensor.dtype),
            tensor.dtype,
            shape,
            name=name,
        )
    value = ir.Value(name=name, const_value=rows, type=ir.TensorType(tensor.dtype), shape=shape)
    graph.register_initializer(value)
    return value
