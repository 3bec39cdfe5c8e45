"""Inlines regions that switch autocast off.

Models such as Z-Image compute rotations in such regions. torch.export makes a function of each region, which hides the nodes from
passes. Without autocast outside, the region computes the same inline.
"""

from __future__ import annotations

from typing import Any

from torch._higher_order_ops.wrap import wrap_with_autocast
from torch.export import ExportedProgram
from torch.fx import Graph, GraphModule, Node

_ENABLED, _BODY = 2, 4
"""Positions of the operator's arguments: the flag, and the function. The function's arguments follow."""


def inline_regions_without_autocast(program: ExportedProgram) -> int:
    """Inlines the regions without autocast, in place.

    Returns:
        The number of inlined regions.
    """
    graph, module = program.graph_module.graph, program.graph_module
    regions = [node for node in graph.nodes if node.target is wrap_with_autocast and not node.args[_ENABLED]]
    for region in regions:
        body: Any = region.args[_BODY]
        _inline(graph, region, getattr(module, body.target))
        graph.erase_node(region)
        if not body.users:
            graph.erase_node(body)
    graph.lint()
    module.recompile()
    return len(regions)


def _inline(graph: Graph, region: Node, body: GraphModule) -> None:
    given = [node for node in body.graph.nodes if node.op == "placeholder"]
    known: dict[Node, Any] = dict(zip(given, region.args[_BODY + 1 :], strict=True))
    with graph.inserting_before(region):
        results: Any = graph.graph_copy(body.graph, known)
    for user in list(region.users):  # each reads one result
        _, index = user.args
        user.replace_all_uses_with(results[index])
        graph.erase_node(user)
