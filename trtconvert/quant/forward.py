"""INT8 attention and layers in torch, for searches, verification and evaluation without an engine.

A GPU runs the engine's kernels through the C API; a CPU runs their specifications.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from trtconvert.attention import kernel as attention_kernel
from trtconvert.attention import reference
from trtconvert.attention.blocks import mask_at
from trtconvert.attention.modes import Scaling, scaling_at
from trtconvert.attention.reference import AttentionTables
from trtconvert.attention.sites import SiteCall
from trtconvert.convolutions import cudnn_convolutions
from trtconvert.linear import deltas
from trtconvert.linear import kernel as layer_kernel
from trtconvert.linear import reference as linear
from trtconvert.linear.reference import LayerTables
from trtconvert.linear.sites import LayerCall, LayerHandler
from trtconvert.quant.decision import Decision

KERNEL_TYPES = (torch.float16, torch.bfloat16)
"""Types of activations that the kernels support."""


@dataclass(frozen=True)
class Int8Sites:
    """Converted attention sites.

    Attributes:
        tables: by site.
        timestep_max, scaling, smooth_k: as the op's attributes; one scaling for all sites, or by site.
        masks: [T, H, Bq, Bk] block masks by timestep bin, of sites with a block mask.
    """

    tables: Mapping[str, AttentionTables]
    timestep_max: float
    scaling: Scaling
    smooth_k: bool
    masks: Mapping[str, Tensor] = field(default_factory=dict)

    def to(self, device: torch.device | str) -> Int8Sites:
        """Returns the same sites with tables and masks on a device."""
        tables = {name: of.to(device) for name, of in self.tables.items()}
        return replace(self, tables=tables, masks={name: mask.to(device) for name, mask in self.masks.items()})

    def attention(self, call: SiteCall, tables: AttentionTables | None = None) -> Tensor:
        """Computes a call as the `Int8Attention` op defines it, with the site's own or other tables."""
        masks = self.masks.get(call.name)
        tables = tables or self.tables[call.name]
        q, k, v, compute = call.q, call.k, call.v, reference.attention
        if q.is_cuda:
            # The kernels lack FP32; FP32 engines give the plugin FP16, too.
            typed = q.dtype if q.dtype in KERNEL_TYPES else torch.float16
            q, k, v = (x.to(typed) for x in (q, k, v))
            tables, compute = tables.to(q.device), attention_kernel.attention
        output = compute(
            q,
            k,
            v,
            call.timestep,
            tables,
            softmax_scale=call.scale,
            timestep_max=self.timestep_max,
            scaling=scaling_at(self.scaling, call.name),
            smooth_k=self.smooth_k,
            mask=call.mask,
            block_mask=None if masks is None else mask_at(masks, call.timestep, self.timestep_max),
        )
        return output.to(call.q.dtype)

    def handler(self) -> Callable[[SiteCall], Tensor]:
        """Returns a handler that runs INT8 attention at converted sites and the model's own elsewhere."""
        return lambda call: self.attention(call) if call.name in self.tables else call.exact()


def _beside(call: LayerCall, tables: LayerTables) -> LayerTables:
    """Returns the tables on the call's device; tables in host memory are copied for the call."""
    return tables if tables.weight.device == call.x.device else tables.to(call.x.device)


@dataclass(frozen=True)
class _Caches:
    """Caches of a layer, see `trtconvert.linear.deltas`; o_hat is None if all samples start."""

    last: Tensor
    a_hat: Tensor
    o_hat: Tensor | None


@dataclass(frozen=True)
class Int8Layers:
    """Converted layers.

    Attributes:
        tables: by layer.
        timestep_max: as the op's attribute.
        delta_scales: [T] by layer that quantises deltas. Their caches persist from call to call of one trajectory.
        falls: see `trtconvert.linear.deltas.steps_of`.
    """

    tables: Mapping[str, LayerTables]
    timestep_max: float
    delta_scales: Mapping[str, Tensor] = field(default_factory=dict)
    falls: bool = True
    _caches: dict[str, _Caches] = field(default_factory=dict, init=False, repr=False, compare=False)

    def to(self, device: torch.device | str) -> Int8Layers:
        """Returns the same layers with tables on a device, and empty caches."""
        return replace(self, tables={name: of.to(device) for name, of in self.tables.items()})

    def in_plan(self, decisions: Mapping[str, Decision]) -> Int8Layers:
        """Returns those of the layers that a plan converts, with the plan's modes and empty caches."""
        converted = {name: decision for name, decision in decisions.items() if decision.in_int8}
        tables = {name: self.tables[name].with_modes(decision.modes) for name, decision in converted.items()}
        scales = {name: self.delta_scales[name] for name, decision in converted.items() if decision.delta}
        return replace(self, tables=tables, delta_scales=scales)

    def reset_cache(self) -> None:
        """Clears the caches: the next call starts all samples."""
        self._caches.clear()

    def output(self, call: LayerCall, tables: LayerTables | None = None) -> Tensor:
        """Computes a call as its op defines it, with the layer's own tables, or with other tables, which quantise no deltas."""
        if tables is None and call.name in self.delta_scales:
            output = self._output_of_delta(call)
        else:
            output = self._output_of_rows(call, _beside(call, tables or self.tables[call.name]))
        return output.to(call.dtype)

    def _output_of_rows(self, call: LayerCall, tables: LayerTables) -> Tensor:
        if call.kind == "linear":
            return layer_kernel.linear(call.x, call.timestep, tables, timestep_max=self.timestep_max)
        # TF32 holds whole numbers up to 127 and their products exactly: only sums are rounded, as in FP32.
        with cudnn_convolutions(tf32=True):
            return linear.conv(
                call.x, call.timestep, tables, stride=call.stride, padding=call.padding, timestep_max=self.timestep_max
            )

    def _output_of_delta(self, call: LayerCall) -> Tensor:
        tables, x = _beside(call, self.tables[call.name]), call.x
        before, dtype = self._caches.get(call.name), deltas.cache_dtype(x.dtype)
        if before is None or before.a_hat.shape != x.shape or before.a_hat.dtype != dtype:
            never = torch.full_like(call.timestep, -math.inf, dtype=torch.float32)
            before = _Caches(never, torch.zeros_like(x, dtype=dtype), None)
        reset, last = deltas.steps_of(call.timestep, before.last, self.falls)
        first, later = (table.to(x.device)[:, None] for table in (tables.x_scale, self.delta_scales[call.name]))
        scale = deltas.scales_of(reset, call.timestep, first, later, self.timestep_max)
        factor = tables.x_factor.to(x.device).view(-1, *[1] * (x.dim() - 1 - call.channel_axis))
        q, a_hat = deltas.quantise_delta(x, factor, before.a_hat, reset, scale)
        o_hat = deltas.add_product(
            q, scale, reset, tables, before.o_hat, dtype, stride=call.stride, padding=call.padding
        )
        self._caches[call.name] = _Caches(last, a_hat, o_hat)
        return o_hat

    def handler(self) -> LayerHandler:
        """Returns a handler that runs converted layers in INT8 and the model's own elsewhere."""
        return lambda call: self.output(call) if call.name in self.tables else call.exact()
