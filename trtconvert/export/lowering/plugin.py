"""The `plugin` lowering: TensorRT's parser maps nodes to our plugins by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx_ir as ir

from trtconvert.export.lowering.int8_layers import fuse_int8_layers
from trtconvert.export.lowering.key_masks import use_key_masks
from trtconvert.export.lowering.layout import fold_transposes
from trtconvert.export.lowering.linear_layers import fuse_linear_layers
from trtconvert.export.lowering.norms import fuse_norms
from trtconvert.export.lowering.packing import pack_projections
from trtconvert.export.lowering.residual_norms import fuse_residual_norms
from trtconvert.export.lowering.rotary import fuse_rotary
from trtconvert.export.lowering.shared import share_projections
from trtconvert.export.nodes.attention import mask_of, require_attention_nodes
from trtconvert.export.nodes.attention_body import INPUTS, OP
from trtconvert.export.nodes.common import DOMAIN, HALF, PLUGIN


def lower_to_plugin(
    model: ir.Model,
    *,
    refittable: bool = False,
    linear_profiles: Sequence[Mapping[str, int]] = (),
    int8_layers: bool = False,
) -> int:
    """Removes the bodies, which the parser would prefer to a plugin, and sets the plugin's attributes on each node.

    The plugin takes over rotary embeddings (`fuse_rotary`), norms of q and k (`fuse_norms`), and the splitting of one product
    into q, k and v (`pack_projections`) or into the keys and values of many nodes (`share_projections`). Such nodes have no other
    lowering. Residual connections with their layer norms become plugins too (`fuse_residual_norms`), and so do linear layers
    between them (`fuse_linear_layers`). Masks that hide keys from all heads and queries become boolean and small
    (`use_key_masks`); bundles and the other lowerings keep the model's masks, which TensorRT and ONNX Runtime add in one
    operation. Kernels take one 16-bit type for q, k, v and additive masks: FP32 nodes are cast to FP16 and back, and masks to
    the type of q.

    Args:
        refittable: keep norms and projections, so that their weights keep their names.
        linear_profiles: opt sizes of the dynamic dimensions in each optimisation profile, if the GPU has a kernel of linear
            layers.
            Empty: linear layers are not fused.
        int8_layers: also fuse INT8 layers (`fuse_int8_layers`).
    Returns:
        The number of lowered nodes.
    Raises:
        UserError: the model has no `Int8Attention` node.
    """
    nodes = require_attention_nodes(model)
    use_key_masks(model)
    fuse_rotary(model)  # first: norms are behind rotations, and projections behind norms
    fold_transposes(model)  # of q and k that were rotated heads first
    if not refittable:
        fuse_norms(model)
        fold_transposes(model)
        pack_projections(model)
        share_projections(model)
        fuse_residual_norms(model)
        if linear_profiles and int8_layers:
            fuse_int8_layers(model, linear_profiles)
        if linear_profiles:
            fuse_linear_layers(model, linear_profiles, beside_int8=int8_layers)
    casts: _Casts = {}
    for node in nodes.values():
        node.overload = ""
        node.attributes.update({name: ir.AttrString(name, text) for name, text in PLUGIN.items()})
        _cast_to_half(node, casts)
    for key in [key for key in model.functions if key[:2] == (DOMAIN, OP)]:
        del model.functions[key]
    return len(nodes)


_Casts = dict[tuple[ir.Graph | ir.Function, ir.Value, ir.DataType], ir.Value]
"""Casts by (graph, value, type): nodes may share tensors."""


def _cast_to_half(node: ir.Node, casts: _Casts) -> None:
    graph, q = node.graph, node.inputs[0]
    assert graph is not None and q is not None
    dtype = q.dtype if q.dtype is not None and q.dtype in HALF else ir.DataType.FLOAT16
    mask = mask_of(node)
    for index in (0, 1, 2, *([len(INPUTS)] if mask is not None and mask.dtype != ir.DataType.BOOL else [])):
        value = node.inputs[index]
        if value is None or value.dtype == dtype:
            continue
        if (graph, value, dtype) not in casts:
            cast = ir.node("Cast", [value], {"to": dtype})
            cast.outputs[0].shape, cast.outputs[0].dtype = value.shape, dtype
            graph.insert_before(node, cast)
            casts[graph, value, dtype] = cast.outputs[0]
        node.replace_input_with(index, casts[graph, value, dtype])
    for out in node.outputs:
        _cast_back(node, out, dtype)


def _cast_back(node: ir.Node, out: ir.Value, dtype: ir.DataType) -> None:
    graph = node.graph
    assert graph is not None
    if out.dtype is None or out.dtype == dtype:  # the exporter types every value
        return
    back = ir.node("Cast", [out], {"to": out.dtype})
    result = back.outputs[0]
    result.name, result.shape, result.dtype = out.name, out.shape, out.dtype
    out.name, out.dtype = f"{out.name}_half", dtype
    ir.convenience.replace_all_uses_with(out, result, replace_graph_outputs=True)
    back.replace_input_with(0, out)
    graph.insert_after(node, back)
