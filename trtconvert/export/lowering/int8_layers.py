"""Fuses INT8 layers next to plugins into plugins, GEGLU included. The norm in front or a kernel of its own quantises the rows.

Next to plugins TensorRT cannot fuse a Q with a product, and Q/DQ gains nothing. The quantising kernel holds whole rows, and gives
each row a scale of its own data: that costs no time and is more exact (`LayerMode.DYNAMIC` in place of `STATIC`). Only the output
of GEGLU keeps its calibrated scale: the kernel holds a tile of a row.

Layers of few rows, such as modulations, are bound by reading their weights: INT8 weights halve the time (`fuse_few_row_layers`).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import onnx_ir as ir

from trtconvert.export.building import cleaned, graph_of, replace_nodes
from trtconvert.export.lowering.initializers import named_constant, packed, scales_of_bins
from trtconvert.export.lowering.int8_weights import Activation, Int8Weight, int8_weight_of
from trtconvert.export.lowering.layers import REFIT_METADATA, bias_name, expand_layers
from trtconvert.export.lowering.projections import bias_behind
from trtconvert.export.lowering.residual_norms import RESIDUAL_NORM
from trtconvert.export.matching import constant_of, geglu_behind, producer_behind_reshapes, producer_of
from trtconvert.export.nodes.attention import is_attention
from trtconvert.export.nodes.common import DOMAIN, HALF, PLUGIN
from trtconvert.linear import beside_plugins
from trtconvert.linear.modes import LayerMode

INT8_LINEAR, QUANTISE_ROWS, INT8_RESIDUAL_NORM = "Int8Linear", "QuantiseRows", "Int8ResidualNorm"
"""Operators of the plugins."""

Table = Literal["weight", "weight_scale", "bias"]
"""A table of a layer that is computed from its weights."""

_OWN = (RESIDUAL_NORM, INT8_LINEAR, INT8_RESIDUAL_NORM, "Linear", "GroupNorm")
"""Plugins that compute rows."""

_GEGLU = 1  # TRTCONVERT_GEGLU of int8_linear.h
_MOST_FEW_ROWS = 16  # limit of the kernel for few rows
_NORMED, _SUM = 1, 0  # outputs of ResidualNorm


@dataclass(frozen=True)
class _Layer:
    """x̂ @ weight (+ bias), or GEGLU of it.

    Attributes:
        x: rows [..., K]; factor, offset: [K] or None, of x̂.
        weight: of x̂, [K, N], or [N, K] of a Gemm; with geglu 2 N output channels.
        bias: [N] FP32 or None.
        nodes: that compute the result, the last one last.
        refitted: the layer's name if its weights can be replaced.
    """

    x: ir.Value
    factor: np.ndarray | None
    offset: np.ndarray | None
    weight: Int8Weight
    bias: np.ndarray | None
    nodes: tuple[ir.Node, ...]
    geglu: bool = False
    refitted: str = ""

    @property
    def result(self) -> ir.Value:
        return self.nodes[-1].outputs[0]

    @property
    def rows_of(self) -> tuple[ir.Value, str]:
        """Key of rows that several layers share."""
        return self.x, self.weight.activation.input_group


def fuse_int8_layers(model: ir.Model, profiles: Sequence[Mapping[str, int]]) -> int:
    """Replaces products with INT8 weights, and their GEGLU, by nodes `Int8Linear` on quantised rows, in place.

    Only layers behind a plugin or a layer norm, and of sizes that pay. Runs after `fuse_residual_norms`: their nodes quantise
    rows for INT8 layers.

    Args:
        profiles: opt sizes of the dynamic dimensions in each optimisation profile.
    Returns:
        The number of replaced layers.
    """
    return _fuse(model, lambda layer: _is_border(layer.x) and _pays(layer, profiles))


def fuse_mixed_layers(model: ir.Model) -> int:
    """Replaces products with INT8 activations in some timestep bins and 16 bits in others by nodes `Int8Linear`, in place.

    Q/DQ cannot follow the timestep; the kernel that quantises the rows does.

    Returns:
        The number of replaced layers.
    """
    return _fuse(model, lambda layer: layer.weight.activation.is_mixed)


def _fuse(model: ir.Model, fits: Callable[[_Layer], bool]) -> int:
    rows: dict[tuple[ir.Value, str], tuple[ir.Value, ir.Value]] = {}
    count = 0
    for geglu in (True, False):  # layers may read GEGLU
        layers = [layer for node in model.graph if (layer := _layer(node)) is not None and fits(layer)]
        found = [layer for layer in layers if layer.geglu == geglu]
        for layer in found:
            if layer.rows_of not in rows:
                rows[layer.rows_of] = _quantised(layer, layers)
            _replace(layer, rows[layer.rows_of])
        count += len(found)
    if cleaned(model, count):
        for node in model.graph:
            of_rows = node.domain == DOMAIN and node.op_type in (RESIDUAL_NORM, INT8_RESIDUAL_NORM, QUANTISE_ROWS)
            if of_rows and any(map(_is_int8_linear, node.inputs[:2])):
                # The layer's kernel leaves little room.
                node.attributes["starts_early"] = ir.AttrInt64("starts_early", 1)
    return count


def refittable_layers(model: ir.Model, profiles: Sequence[Mapping[str, int]]) -> set[str]:
    """Returns the INT8 layers that pay as plugins in refittable engines.

    Only plugins read INT8 weights unchanged, so that new weights can replace them.

    Args:
        model: with `Int8Linear` nodes; is not changed.
        profiles: as in `fuse_int8_layers`.
    """
    model = model.clone()
    expand_layers(model, offsets=True, refittable=True)
    found: set[str] = set()
    for node in model.graph:
        layer = _of_few_rows(node, profiles)
        if layer is None and (larger := _layer(node)) is not None and _pays(larger, profiles):
            layer = larger
        if layer is not None:
            found.add(layer.refitted)
    return found


def fuse_refittable_layers(model: ir.Model, profiles: Sequence[Mapping[str, int]]) -> int:
    """Replaces the remaining products of INT8 layers by nodes `Int8Linear`, in place.

    Args:
        model: all its layers but `refittable_layers` are 16-bit products.
    Returns:
        The number of replaced layers.
    """
    count = fuse_few_row_layers(model, profiles) + _fuse(model, lambda layer: True)
    # The weight of a remaining product could not be replaced by name.
    assert not any(int8_weight_of(value) is not None and value.uses() for value in model.graph.initializers.values())
    return count


def refitted_constants(model: ir.Model) -> dict[str, tuple[str, Table]]:
    """Returns (layer, table) of the constants that are computed from a layer's weights, by their names.

    Weights are INT32 with four channels each. Scales and biases are FP32, biases rounded to the model's type.
    """
    found: dict[str, tuple[str, Table]] = {}
    for node in model.graph:
        layer = node.metadata_props.get(REFIT_METADATA)
        if layer is None or node.domain != DOMAIN or node.op_type != INT8_LINEAR:
            continue
        quantised = node.inputs[1] is not None and node.inputs[1].const_value is None  # the scales of the rows
        constants = node.inputs[2 if quantised else 1 :]
        tables: tuple[Table, ...] = ("weight", "weight_scale", *(("bias",) if node.attributes["bias"].as_int() else ()))
        for value, table in zip(constants, tables, strict=False):
            assert value is not None and value.name is not None
            found[value.name] = layer, table
    return found


def fuse_few_row_layers(model: ir.Model, profiles: Sequence[Mapping[str, int]]) -> int:
    """Replaces products of few 16-bit rows with INT8 weights by nodes `Int8Linear`, in place. Runs after `split_modulations`.

    Args:
        profiles: as in `fuse_int8_layers`.
    Returns:
        The number of replaced layers.
    """
    layers = [layer for node in model.graph if (layer := _of_few_rows(node, profiles)) is not None]
    for layer in layers:
        _replace(layer, [layer.x])
    return cleaned(model, len(layers))


def _of_few_rows(node: ir.Node, profiles: Sequence[Mapping[str, int]]) -> _Layer | None:
    found = _product(node)
    if found is None or found.weight.activation.is_int8 or found.x.dtype not in HALF or found.result.shape is None:
        return None
    return found if has_few_rows(found.result.shape, profiles) else None


def has_few_rows(shape: ir.Shape, profiles: Sequence[Mapping[str, int]]) -> bool:
    """Whether the kernel for few rows computes a result [..., N], at the sizes of the dynamic dimensions in each profile."""
    sizes = [shape.evaluate(profile) for profile in profiles]
    return all(known.is_static() and math.prod(known.numpy()[:-1]) <= _MOST_FEW_ROWS for known in sizes)


def _layer(node: ir.Node) -> _Layer | None:
    found = _product(node)
    if found is None or not found.weight.activation.is_int8:
        return None
    x, factor, offset = _before_moving(found.x)
    if x.dtype not in HALF:
        return None
    layer, geglu = replace(found, x=x, factor=factor, offset=offset), geglu_behind(found.result)
    return layer if geglu is None else replace(layer, nodes=(*layer.nodes, *geglu), geglu=True)


def _product(node: ir.Node) -> _Layer | None:
    """Matches a product with INT8 weights, and its bias."""
    weight = int8_weight_of(node.inputs[1]) if node.op_type in ("MatMul", "Gemm") and not node.domain else None
    refitted = node.metadata_props.get(REFIT_METADATA, "")
    moved, product = node.inputs[0] if node.inputs else None, node.outputs[0]
    if weight is None or moved is None:
        return None
    outputs = len(weight.scale)
    bias: np.ndarray | None = None
    nodes: tuple[ir.Node, ...] = (node,)
    if node.op_type == "Gemm":
        bias = constant_of(node.inputs[2]) if len(node.inputs) > 2 else None
    else:
        added, add = bias_behind(product, outputs)
        if added is not None and add is not None and (not refitted or _is_bias_of(added, refitted)):
            bias, nodes = constant_of(added), (node, add)
    of_bias = None if bias is None else bias.astype(np.float32)
    return _Layer(moved, None, None, weight, of_bias, nodes, refitted=refitted)


def _is_bias_of(added: ir.Value, layer: str) -> bool:
    """Return whether a vector is the bias of a refitted layer. Other vectors of the model are replaced by their own names."""
    return added.dtype is not None and added.name == bias_name(layer, added.dtype)


def _before_moving(moved: ir.Value) -> tuple[ir.Value, np.ndarray | None, np.ndarray | None]:
    """Matches x̂ = (x − offset) · factor of `expand_layers`, and returns x, factor and offset."""
    x, factor, offset = moved, None, None
    for op_type in ("Mul", "Sub"):
        node = producer_of(x, op_type)
        numbers = constant_of(node.inputs[1]) if node is not None else None
        if node is None or numbers is None or numbers.ndim != 1 or node.inputs[0] is None:
            continue
        if op_type == "Mul":
            factor = numbers.astype(np.float32)
        else:
            offset = numbers.astype(np.float32)
        x = node.inputs[0]
    return x, factor, offset


def _is_border(value: ir.Value) -> bool:
    """Return whether a plugin or a layer norm computes rows."""
    producer = producer_behind_reshapes(value)
    if producer is None:
        return False
    own = is_attention(producer) or (producer.domain == DOMAIN and producer.op_type in _OWN)
    geglu = producer.op_type == "Mul" and producer_of(producer.inputs[1], "Gelu") is not None
    return own or producer.op_type == "LayerNormalization" or geglu


def _pays(layer: _Layer, profiles: Sequence[Mapping[str, int]]) -> bool:
    """Return whether in each profile the kernel fills the GPU, and saves more than quantising its rows costs."""
    shape, depth = layer.result.shape, int(layer.weight.shape.numpy()[1 - layer.weight.axis])
    if shape is None:
        return False
    for sizes in profiles:
        known = shape.evaluate(sizes)
        if not known.is_static():
            return False
        rows, outputs = math.prod(known.numpy()[:-1]), len(layer.weight.scale)
        if not beside_plugins.pays(rows, outputs, depth, normed=_comes_from_norm(layer), geglu=layer.geglu):
            return False
    return True


def _comes_from_norm(layer: _Layer) -> bool:
    """Return whether a plugin norms the rows, and can quantise them."""
    norm = layer.x.producer()
    return norm is not None and norm.op_type == RESIDUAL_NORM and layer.x is norm.outputs[_NORMED]


def _quantised(layer: _Layer, layers: Sequence[_Layer]) -> tuple[ir.Value, ir.Value]:
    """Returns the payload and the scales of a layer's rows, from the norm or GEGLU in front, or from a kernel of their own."""
    producer = layer.x.producer()
    if producer is not None and _comes_from_norm(layer):
        return _from_norm(layer, layers, producer)
    if producer is not None and _takes_static_rows(layer, layers, producer):
        return _from_geglu(layer, producer)
    first = layer.nodes[0]
    graph = graph_of(first)
    inputs, attributes = _rows_inputs(graph, layer)
    node = ir.node(QUANTISE_ROWS, [layer.x, *inputs], attributes, domain=DOMAIN, num_outputs=2)
    _type_rows(node.outputs[0], node.outputs[1], layer)
    graph.insert_before(first, node)
    return node.outputs[0], node.outputs[1]


def _from_norm(layer: _Layer, layers: Sequence[_Layer], norm: ir.Node) -> tuple[ir.Value, ir.Value]:
    """Replaces a residual norm by one with quantised rows. Normed rows stay an output if other nodes read them."""
    graph = graph_of(norm)
    inputs, attributes = _rows_inputs(graph, layer)
    alike = {other.nodes[0] for other in layers if other.rows_of == layer.rows_of}
    others = layer.x.is_graph_output() or any(reader not in alike for reader in _readers(layer.x))
    attributes |= {"epsilon": norm.attributes["epsilon"].as_float(), "normed": int(others)}
    if "starts_early" in norm.attributes:
        attributes["starts_early"] = norm.attributes["starts_early"].as_int()
    node = ir.node(
        INT8_RESIDUAL_NORM, [*norm.inputs, *inputs], attributes, domain=DOMAIN, num_outputs=4 if others else 3
    )
    total, payload, row_scale, *normed = node.outputs
    _type_rows(payload, row_scale, layer)
    replaced, by = [norm.outputs[_SUM]], [total]
    if normed:
        replaced.append(norm.outputs[_NORMED])
        by.append(normed[0])
    for new, old in zip(by, replaced, strict=True):
        new.type, new.shape = copy.copy(old.type), old.shape
    if normed:
        ir.convenience.replace_nodes_and_values(graph, norm, [norm], [node], replaced, by)
    else:
        # The layers will replace the readers of the normed rows.
        graph.insert_after(norm, node)
        ir.convenience.replace_all_uses_with(replaced, by, replace_graph_outputs=True)
    return payload, row_scale


def _takes_static_rows(layer: _Layer, layers: Sequence[_Layer], producer: ir.Node) -> bool:
    """Return whether rows come from an INT8 GEGLU, only such layers read them, and all modes are static."""
    if producer.domain != DOMAIN or producer.op_type != INT8_LINEAR or layer.x.is_graph_output():
        return False
    attributes = producer.attributes
    of_geglu = attributes["activation"].as_int() == _GEGLU
    may_be_16bit = attributes["mode_set"].as_int() & 1 << LayerMode.WEIGHT_ONLY
    alike = {other.nodes[0] for other in layers if other.rows_of == layer.rows_of}
    is_static = all(mode == LayerMode.STATIC for mode in layer.weight.activation.modes)
    return of_geglu and not may_be_16bit and is_static and all(reader in alike for reader in _readers(layer.x))


def _from_geglu(layer: _Layer, geglu: ir.Node) -> tuple[ir.Value, ir.Value]:
    """Adds a GEGLU with quantised rows."""
    graph = graph_of(geglu)
    inputs, attributes = _rows_inputs(graph, layer)
    del inputs[int(layer.factor is not None) + int(layer.offset is not None) :]  # no modes: there is one
    table = scales_of_bins(graph, layer.weight.activation)
    inputs += table
    names = {"factor": "out_factor", "offset": "out_offset", "timestep_max": "timestep_max"}
    given: dict[str, Any] = {of_layer: attributes[of_rows] for of_rows, of_layer in names.items()}
    given |= {"quantised": 1, "timestep": int(len(table) > 1)}
    node = ir.node(INT8_LINEAR, [*geglu.inputs, *inputs], dict(geglu.attributes) | given, domain=DOMAIN, num_outputs=2)
    node.metadata_props.update(geglu.metadata_props)
    payload, row_scale = node.outputs
    _type_rows(payload, row_scale, layer)
    graph.insert_after(geglu, node)
    # The layers will replace the readers of the old GEGLU.
    return payload, row_scale


def _readers(value: ir.Value) -> Iterator[ir.Node]:
    """Yields the readers of a value, through offsets and factors."""
    for reader, _ in value.uses():
        if reader.op_type in ("Sub", "Mul") and not reader.domain and constant_of(reader.inputs[1]) is not None:
            yield from _readers(reader.outputs[0])
        else:
            yield reader


def _rows_inputs(graph: ir.Graph, layer: _Layer) -> tuple[list[ir.Value], dict[str, Any]]:
    """Returns the inputs and attributes that all plugins with quantised rows share."""
    activation, input_group = layer.weight.activation, layer.weight.activation.input_group
    modes = _modes(activation)
    timed = len(set(modes)) > 1
    attributes: dict[str, Any] = {
        "mode_set": _mode_set(activation),
        "timestep_max": float(activation.timestep_max),
        "factor": int(layer.factor is not None),
        "offset": int(layer.offset is not None),
        "timestep": int(timed),
        **PLUGIN,
    }
    inputs = []
    if layer.factor is not None:
        inputs.append(named_constant(graph, f"{input_group}: factor", layer.factor))
    if layer.offset is not None:
        inputs.append(named_constant(graph, f"{input_group}: offset", layer.offset))
    if timed:
        assert activation.timestep is not None
        inputs += [activation.timestep, named_constant(graph, f"{input_group}: modes", np.array(modes, np.int32))]
    return inputs, attributes


def _modes(activation: Activation) -> tuple[int, ...]:
    """Returns the plugins' mode of each bin: static becomes dynamic."""
    return tuple(int(LayerMode.DYNAMIC if mode == LayerMode.STATIC else mode) for mode in activation.modes)


def _mode_set(activation: Activation) -> int:
    return sum(1 << mode for mode in set(_modes(activation)))


def _type_rows(payload: ir.Value, row_scale: ir.Value, layer: _Layer) -> None:
    shape = layer.x.shape
    assert shape is not None and isinstance(shape[-1], int)
    divisor = 2 if int(LayerMode.WEIGHT_ONLY) in _modes(layer.weight.activation) else 4
    payload.type, payload.shape = ir.TensorType(ir.DataType.INT32), ir.Shape([*shape[:-1], shape[-1] // divisor])
    row_scale.type, row_scale.shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape([*shape[:-1], 1])


def _replace(layer: _Layer, rows: Sequence[ir.Value]) -> None:
    """Replaces a layer by a node on rows: payload and scales, or 16-bit rows."""
    last, old = layer.nodes[-1], layer.result
    graph, weight, scale, bias = graph_of(last), layer.weight, layer.weight.scale, layer.bias
    # Equal weights share a constant unless refits may change them.
    outputs, name = len(scale), layer.refitted or weight.name
    in_two = (2, outputs // 2) if layer.geglu else (outputs,)
    shape = (*in_two, int(weight.shape.numpy()[1 - weight.axis]) // 4)
    inputs = [
        *rows,
        packed(graph, f"trtconvert/{name}, packed", shape, lambda: np.moveaxis(weight.integers(), weight.axis, 0)),
        named_constant(graph, f"{name}: scale", scale.reshape(in_two)),
    ]
    if bias is not None:
        inputs.append(named_constant(graph, f"{name}: bias of {last.name or old.name}", bias.reshape(in_two)))
    attributes = {
        "mode_set": _mode_set(weight.activation),
        "activation": _GEGLU if layer.geglu else 0,
        "bias": int(bias is not None),
        "residual": 0,
        "bfloat16": int(old.dtype == ir.DataType.BFLOAT16),
        **PLUGIN,
    }
    node = ir.node(INT8_LINEAR, inputs, attributes, domain=DOMAIN)
    if layer.refitted:
        node.metadata_props[REFIT_METADATA] = layer.refitted
    replace_nodes(layer.nodes, [node])


def _is_int8_linear(value: ir.Value | None) -> bool:
    producer = producer_behind_reshapes(value)
    return producer is not None and producer.domain == DOMAIN and producer.op_type == INT8_LINEAR
