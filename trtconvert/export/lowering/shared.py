"""Computes the keys and values of all cross-attention of one tensor as one product.

The cross-attentions of a U-Net project the same text. For plugins with inputs of their own TensorRT computes these projections
one by one, and copies each. The plugin reads the heads of its site in a shared tensor [B, Nk, P, D]. The P heads are the keys and
the values of one site after the other. The tensor lives from its first to its last site, so very many sites have several tensors.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from trtconvert.export.building import cleaned
from trtconvert.export.lowering.projections import Projection, join, projection
from trtconvert.export.nodes.attention import attention_nodes

KV_HEADS, K_HEAD, V_HEAD = "kv_heads", "k_head", "v_head"
"""Attributes of a node with shared k and v: number of its heads, first head of its keys, first head of its values."""

WIDEST = 1 << 30
"""Largest bytes of the weights of one product: they are in memory together while they are written. SDXL has 0.7 GB in 70 sites,
Wan 2.1 14B 4.2 GB in 40."""


@dataclass(frozen=True)
class _Site:
    """A cross-attention node: its keys and values are projections of one tensor, its queries are not."""

    node: ir.Node
    keys: Projection
    values: Projection

    @property
    def nbytes(self) -> int:
        tensors = (part.weight.const_value for part in (self.keys, self.values))
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def share_projections(model: ir.Model) -> int:
    """Gives all nodes with keys and values of one tensor a shared projection [B, Nk, P, D], up to `WIDEST`.

    Attributes tell the nodes their heads. Self-attention is skipped: `pack_projections` runs first. Weights are renamed: not for
    refittable engines.

    Returns:
        The number of changed nodes.
    """
    groups: dict[tuple[object, ...], list[_Site]] = defaultdict(list)
    for node in attention_nodes(model).values():
        if (site := _site(node)) is not None:
            groups[node.graph, *_kind(site.keys)].append(site)
    count = 0
    for sites in groups.values():
        for together in _by_size(sites):
            _share(together)
        count += len(sites)
    return cleaned(model, count)


def _site(node: ir.Node) -> _Site | None:
    if node.attributes["layout"].as_string() != "BNHD" or node.inputs[1] is node.inputs[2]:
        return None
    queries, keys, values = (projection(value) for value in node.inputs[:3])
    if keys is None or values is None or _kind(keys) != _kind(values):
        return None
    if queries is not None and queries.x is keys.x:
        return None
    return _Site(node, keys, values) if keys.serves_only(node) and values.serves_only(node) else None


def _kind(part: Projection) -> tuple[object, ...]:
    """Returns the properties that projections of one product must share."""
    return part.x, part.weight.dtype, part.bias is None, part.head_dim


def _by_size(sites: Sequence[_Site]) -> list[list[_Site]]:
    """Groups sites in graph order so that the weights of each group have at most `WIDEST` bytes, if possible."""
    groups, size = list[list[_Site]](), 0
    for site in sites:
        if not groups or size + site.nbytes > WIDEST:
            groups.append([])
            size = 0
        groups[-1].append(site)
        size += site.nbytes
    return groups


def _share(sites: Sequence[_Site]) -> None:
    """Computes the projections of sites, which are in graph order, in front of the first site."""
    parts = [part for site in sites for part in (site.keys, site.values)]
    heads = sum(part.heads for part in parts)
    shared = join(parts, [heads, parts[0].head_dim], before=sites[0].node)
    first = 0
    for site in sites:
        own = {KV_HEADS: site.keys.heads, K_HEAD: first, V_HEAD: first + site.keys.heads}
        first += site.keys.heads + site.values.heads
        for index in (1, 2):
            site.node.replace_input_with(index, shared)
        for name, number in own.items():
            site.node.attributes[name] = ir.AttrInt64(name, number)
