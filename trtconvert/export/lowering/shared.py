"""One product for the keys and values of all cross-attention of one tensor.

The cross-attentions of a U-Net project one text, and TensorRT computes projections of one tensor as few wide products. For
plugins that want tensors of their own it computes them one by one and copies each out: on an H200 three kernels of 14 µs
together at each of SDXL's 70 sites, and the time between them. The plugin reads the heads of its site where they lie, in [B,
Nk, P, D]: P heads, the keys and the values of site after site. That tensor stays in memory from its first site to its last, so
very many sites have more than one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from trtconvert.export.lowering.projections import Projection, join, projection
from trtconvert.export.nodes.attention import attention_nodes

KV_HEADS, K_HEAD, V_HEAD = "kv_heads", "k_head", "v_head"
"""Attributes of a node whose k and v are one tensor: of how many heads its keys and its values are, and the first of each."""

WIDEST = 1 << 30
"""Bytes of the weights of one product, which are in memory together while they are written, and whose result is from its first
site to its last. The 70 sites of SDXL have 0.7 GB. The 40 of Wan 2.1 14B have 4.2, whose result for 512 tokens of text is 0.4."""


@dataclass(frozen=True)
class _Site:
    """A node with keys and values of its own: projections of one tensor, which its queries are not of."""

    node: ir.Node
    keys: Projection
    values: Projection

    @property
    def nbytes(self) -> int:
        """Bytes of the weights."""
        tensors = (part.weight.const_value for part in (self.keys, self.values))
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def share_projections(model: ir.Model) -> int:
    """Give nodes one tensor [B, Nk, P, D] for the keys and values of all that project the same tensor, up to `WIDEST`, with
    attributes that tell which of its P heads are theirs.

    Nodes whose queries are of that tensor as well, self-attention, are left: `pack_projections` comes first. The weights get
    another name: not for engines whose weights are to be replaced.

    Returns:
        How many nodes read such a tensor.
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
    if count:
        RemoveUnusedNodesPass()(model)
    return count


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
    """What projections agree in that one product can compute, as heads of one size."""
    return part.x, part.weight.dtype, part.bias is None, part.head_dim


def _by_size(sites: Sequence[_Site]) -> list[list[_Site]]:
    """Sites in graph order, those together whose weights are `WIDEST` at most; a site that has more is alone."""
    groups, size = list[list[_Site]](), 0
    for site in sites:
        if not groups or size + site.nbytes > WIDEST:
            groups.append([])
            size = 0
        groups[-1].append(site)
        size += site.nbytes
    return groups


def _share(sites: Sequence[_Site]) -> None:
    """Compute what sites in graph order project in front of the first of them."""
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
