"""Chooses the INT8 plugin or TensorRT's own attention for each site, by times measured on the GPU.

INT8 pays for long sequences. With 77 text tokens or small heads TensorRT's FP16 attention is faster. The limit depends on the
GPU: each distinct shape of a model is timed in both forms as an engine of one node, and each site keeps the faster form. The
plugin is timed in the layout of the model, TensorRT's own attention with heads first: in a whole network other layers absorb
transposes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from trtconvert.attention.modes import Mode
from trtconvert.bundle import Dims, NativeSite, opt_sizes
from trtconvert.export.lowering.key_masks import KeyMask, key_masks
from trtconvert.export.nodes.attention import attention_nodes, block_mask_of, key_index_of, mask_of
from trtconvert.export.nodes.attention_body import INPUTS, MASK, OP
from trtconvert.export.nodes.common import DOMAIN, OPSET, SITE_METADATA, VERSION

TIMESTEP_MAX = 1000.0
TABLES = INPUTS[4:]


@dataclass(frozen=True)
class AttentionCase:
    """The properties of a node that affect its speed, at fixed sizes.

    Attributes:
        q, k: shapes of queries and of keys and values, in `layout`.
        dtype: of queries, keys and values.
        mask: shape and type of the mask, if there is one.
        key_mask: shape of the boolean mask that the plugin gets in its place (`key_masks`), if there is one.
    """

    q: tuple[int, ...]
    k: tuple[int, ...]
    layout: str
    dtype: ir.DataType
    scaling: str
    smooth_k: bool
    mask: tuple[tuple[int, ...], ir.DataType] | None = None
    key_mask: tuple[int, ...] | None = None

    @property
    def _tokens_axis(self) -> int:
        return 2 if self.layout == "BHND" else 1

    @property
    def query_tokens(self) -> int:
        return self.q[self._tokens_axis]

    @property
    def key_tokens(self) -> int:
        return self.k[self._tokens_axis]

    @property
    def heads(self) -> tuple[int, int]:
        """Number of heads of queries, and of keys and values."""
        axis = 3 - self._tokens_axis
        return self.q[axis], self.k[axis]

    def heads_first(self) -> AttentionCase:
        """Returns the case in layout BHND."""
        if self.layout == "BHND":
            return self
        q, k = ((b, h, n, d) for b, n, h, d in (self.q, self.k))
        return replace(self, q=q, k=k, layout="BHND")

    def with_key_mask(self) -> AttentionCase:
        """Returns the case with the mask that the plugin gets."""
        return self if self.key_mask is None else replace(self, mask=(self.key_mask, ir.DataType.BOOL), key_mask=None)


@dataclass(frozen=True)
class CaseTimes:
    """Device time of one call in µs: with TensorRT's own attention, and with the plugin in each mode. Infinite if a form cannot
    be built or run."""

    native: float
    plugin: Mapping[Mode, float]


@dataclass(frozen=True)
class SitePlan:
    """A site: its case in each optimisation profile, and its mode in each timestep bin."""

    cases: tuple[AttentionCase, ...]
    modes: tuple[Mode, ...]


def site_plans(model: ir.Model, profiles: Sequence[Dims]) -> dict[str, SitePlan]:
    """Returns the model's sites with their sizes at the opt shape of each profile.

    Sites of unknown sizes, with a block mask or with an index are left out: they cannot be timed alone.
    """
    sizes, masks = opt_sizes(profiles), key_masks(model)
    found = {}
    for site, node in attention_nodes(model).items():
        cases = [_case(node, masks.get(site), opt) for opt in sizes]
        if all(cases):
            found[site] = SitePlan(tuple(case for case in cases if case), bin_modes(node))
    return found


def bin_modes(node: ir.Node) -> tuple[Mode, ...]:
    """Returns the mode of each timestep bin of an `Int8Attention` node."""
    modes = node.inputs[INPUTS.index("modes")]
    assert modes is not None and modes.const_value is not None  # the exporter makes tables initializers
    return tuple(Mode(int(mode)) for mode in modes.const_value.numpy())


def _case(node: ir.Node, key_mask: KeyMask | None, sizes: Mapping[str, int]) -> AttentionCase | None:
    q, k = (_fixed(value, sizes) for value in node.inputs[:2])
    mask = mask_of(node)
    fixed_mask = _fixed(mask, sizes)
    if block_mask_of(node) is not None or key_index_of(node) is not None:
        return None  # the time depends on their contents
    if not q or not k or (mask is not None and fixed_mask is None):
        return None
    text = {name: node.attributes[name].as_string() for name in ("layout", "scaling")}
    return AttentionCase(
        q,
        k,
        text["layout"],
        _dtype(node.inputs[0]),
        text["scaling"],
        bool(node.attributes["smooth_k"].as_int()),
        None if fixed_mask is None else (fixed_mask, _dtype(mask)),
        _fixed(key_mask, sizes),
    )


def _fixed(value: ir.Value | KeyMask | None, sizes: Mapping[str, int]) -> tuple[int, ...] | None:
    """Evaluates the shape of a value; None if it stays symbolic."""
    if value is None or value.shape is None:
        return None
    shape = value.shape.evaluate(sizes)
    return tuple(shape.numpy()) if shape.is_static() else None


def _dtype(value: ir.Value | None) -> ir.DataType:
    assert value is not None and value.dtype is not None  # the exporter types every value
    return value.dtype


@dataclass(frozen=True)
class Choice:
    """The faster attention of each site, timed alone.

    Attributes:
        native: sites with TensorRT's own attention.
        plugin: the other sites, grouped by lengths. Groups with the largest saving per site come first: the cost of a plugin for
            the layers around it is about the same at every site.
    """

    native: list[NativeSite]
    plugin: list[list[NativeSite]]

    @property
    def saved_us(self) -> float:
        """The µs that the plugin saves, by the sites' times alone. Sites that only the plugin computes count nothing."""
        sites = (site for group in self.plugin for site in group)
        return sum(site.native_us - site.plugin_us for site in sites if site.native_us and site.plugin_us)


def choose(sites: Mapping[str, SitePlan], time_case: Callable[[AttentionCase, frozenset[Mode]], CaseTimes]) -> Choice:
    """Times the attention of every site in both forms.

    Args:
        time_case: times a case, with the plugin in the given modes. Called once per distinct case.
    """
    needed: dict[AttentionCase, set[Mode]] = {}
    for plan in sites.values():
        for case in plan.cases:
            needed.setdefault(case, set()).update(plan.modes)
    times = {case: time_case(case, frozenset(modes)) for case, modes in needed.items()}
    native: list[NativeSite] = []
    plugin: dict[tuple[int, int], list[NativeSite]] = {}
    for name, plan in sites.items():
        first = plan.cases[0]
        native_us = sum(times[case].native for case in plan.cases)
        plugin_us = sum(times[case].plugin[mode] for case in plan.cases for mode in plan.modes) / len(plan.modes)
        lengths = first.query_tokens, first.key_tokens
        site = NativeSite(
            name=name,
            query_tokens=lengths[0],
            key_tokens=lengths[1],
            native_us=_recorded(native_us),
            plugin_us=_recorded(plugin_us),
        )
        (native if native_us < plugin_us else plugin.setdefault(lengths, [])).append(site)

    def saved(group: list[NativeSite]) -> float:
        of_each = (math.inf if site.native_us is None else site.native_us - (site.plugin_us or 0.0) for site in group)
        return sum(of_each) / len(group)

    return Choice(native, sorted(plugin.values(), key=saved, reverse=True))


def _recorded(us: float) -> float | None:
    return round(us, 2) if math.isfinite(us) else None


def one_node_model(case: AttentionCase) -> ir.Model:
    """Makes a model of one `Int8Attention` node with one timestep bin per `Mode`, in their order.

    Inputs are q, k, v, timestep [B] and, if the case has one, mask. The output is out.
    """
    (heads, kv_heads), dim = case.heads, case.q[3]
    bins = len(Mode)
    # Samples of N(0, 1) lie within ±4.
    tables = {
        "q_scale": np.full((bins, heads), 4 / 127, np.float32),
        "k_scale": np.full((bins, kv_heads), 4 / 127, np.float32),
        "v_scale": np.full((bins, kv_heads, dim), 4 / 127, np.float32),
        "k_offset": np.zeros((bins, kv_heads, dim), np.float32),
        "v_offset": np.zeros((bins, kv_heads, dim), np.float32),
        "modes": np.array(list(Mode), np.int32),
    }
    inputs = [ir.val(name, case.dtype, shape) for name, shape in zip("qkv", (case.q, case.k, case.k), strict=True)]
    inputs.append(ir.val("timestep", ir.DataType.FLOAT, (case.q[0],)))
    initializers = [ir.val(name, const_value=ir.tensor(tables[name], name=name)) for name in TABLES]
    mask = [] if case.mask is None else [ir.val(MASK, case.mask[1], case.mask[0])]
    node = ir.node(
        OP,
        [*inputs, *initializers, *mask],
        {
            "layout": case.layout,
            "softmax_scale": dim**-0.5,
            "timestep_max": TIMESTEP_MAX,
            "scaling": case.scaling,
            "smooth_k": int(case.smooth_k),
        },
        domain=DOMAIN,
        name="attention",
        metadata_props={SITE_METADATA: "attention"},
    )
    out = node.outputs[0]
    out.name, out.dtype, out.shape = "out", case.dtype, ir.Shape(case.q)
    graph = ir.Graph(
        [*inputs, *mask],
        [out],
        nodes=[node],
        initializers=initializers,
        opset_imports={"": OPSET, DOMAIN: VERSION},
        name="attention",
    )
    return ir.Model(graph, ir_version=10)


def timestep_of(mode: Mode) -> float:
    """Returns the timestep in the middle of the bin of a mode of `one_node_model`."""
    return (mode + 0.5) / len(Mode) * TIMESTEP_MAX
