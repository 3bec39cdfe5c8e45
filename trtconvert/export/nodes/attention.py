"""Queries of the `Int8Attention` nodes of a graph."""

from __future__ import annotations

from collections.abc import Collection

import onnx_ir as ir

from trtconvert.errors import UserError
from trtconvert.export.nodes.attention_body import BLOCK_MASK, INPUTS, KEY_INDEX, OP, Variant
from trtconvert.export.nodes.common import DOMAIN, SITE_METADATA

APPENDED = (BLOCK_MASK, KEY_INDEX, "rotary", "norm")
"""Optional inputs after the mask, in order. A node with one has an attribute of its name. Only the plugin has the last two."""


def attention_nodes(model: ir.Model) -> dict[str, ir.Node]:
    """Returns the nodes by site, in graph order."""
    return {
        node.metadata_props.get(SITE_METADATA) or node.name or f"node {index}": node
        for index, node in enumerate(ir.traversal.RecursiveGraphIterator(model.graph))
        if is_attention(node)
    }


def is_attention(node: ir.Node | None) -> bool:
    """Return whether a node is an `Int8Attention` node."""
    return node is not None and node.domain == DOMAIN and node.op_type == OP


def require_attention_nodes(model: ir.Model, sites: Collection[str] | None = None) -> dict[str, ir.Node]:
    """Returns `attention_nodes`, or the nodes of given sites.

    Raises:
        UserError: the graph has no such node, or lacks a site.
    """
    nodes = attention_nodes(model)
    if not nodes:
        raise UserError(
            f"the ONNX model holds no {DOMAIN}::{OP} node",
            expected="a model exported by trtconvert, before the native lowering",
            got=f"{sum(1 for _ in model.graph)} other nodes",
            remedy="build the model with `trtconvert build`, and use the denoiser.onnx of the bundle",
        )
    if sites is None:
        return nodes
    if missing := [site for site in sites if site not in nodes]:
        raise UserError(
            f"the ONNX model holds no {DOMAIN}::{OP} node for {', '.join(missing)}",
            expected="sites of the model: " + ", ".join(nodes),
            got=", ".join(missing),
            remedy="take names from `trtconvert inspect`",
        )
    return {site: node for site, node in nodes.items() if site in sites}


def mask_of(node: ir.Node) -> ir.Value | None:
    """Returns the node's mask, if any."""
    return node.inputs[len(INPUTS)] if len(node.inputs) > len(INPUTS) + len(_appended(node)) else None


def block_mask_of(node: ir.Node) -> ir.Value | None:
    """Returns the node's block mask [B or 1, H or 1, ⌈Nq/128⌉, ⌈Nk/128⌉], if any."""
    return _appended_input(node, BLOCK_MASK)


def key_index_of(node: ir.Node) -> ir.Value | None:
    """Returns the indices [B, Hkv, K] of the rows of k and v that the node attends to, if any."""
    return _appended_input(node, KEY_INDEX)


def _appended(node: ir.Node) -> list[str]:
    return [name for name in APPENDED if name in node.attributes]


def _appended_input(node: ir.Node, name: str) -> ir.Value | None:
    names = _appended(node)
    return node.inputs[len(node.inputs) - len(names) + names.index(name)] if name in names else None


def append_input(node: ir.Node, name: str, value: ir.Value) -> None:
    """Appends one of the inputs `APPENDED` with its attribute. The node must not have a later one."""
    position = len(node.inputs)
    node.resize_inputs(position + 1)
    node.replace_input_with(position, value)
    node.attributes[name] = ir.AttrInt64(name, 1)


def variant_of(node: ir.Node) -> Variant:
    """Returns the variant of the body of a node."""
    mask = mask_of(node)
    kind = "none" if mask is None else "boolean" if mask.dtype == ir.DataType.BOOL else "additive"
    layout, scaling = (node.attributes[name].as_string() for name in ("layout", "scaling"))
    smooth_k = bool(node.attributes["smooth_k"].as_int())
    return Variant(
        layout,  # type: ignore[arg-type]
        scaling,  # type: ignore[arg-type]
        smooth_k,
        kind,
        block_mask=block_mask_of(node) is not None,
        key_index=key_index_of(node) is not None,
    )
