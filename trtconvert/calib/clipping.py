"""What scales clip: shares of elements beyond the calibrated ranges, counted one by one."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from trtconvert.attention.reference import timestep_bin
from trtconvert.attention.sites import SiteCall
from trtconvert.calib.histogram import LEVELS


class ClippingObserver:
    """A handler that counts the elements that INT8 would clip, and runs the model's own attention.

    Args:
        tables: site: the scales and offsets of `AttentionTables`.
        timestep_max: see `timestep_bin`.
    """

    def __init__(self, tables: Mapping[str, Mapping[str, Tensor]], timestep_max: float) -> None:
        self._tables, self._timestep_max = tables, timestep_max
        self._clipped: dict[str, dict[str, Tensor]] = {}
        self._seen: dict[str, dict[str, Tensor]] = {}

    def __call__(self, call: SiteCall) -> Tensor:
        if call.name in self._tables:
            table = {name: x.to(call.q.device) for name, x in self._tables[call.name].items()}
            bins, kv_heads = table["k_scale"].shape
            index = timestep_bin(call.timestep, self._timestep_max, bins).to(call.q.device)

            def beyond(x: Tensor, scale: Tensor) -> Tensor:
                return (x.abs() > LEVELS * scale[index].view(len(x), x.shape[1], 1, -1)).sum((2, 3))

            clipped = {
                "q": beyond(call.q, table["q_scale"]),
                "k": beyond(call.k - table["k_offset"][index][:, :, None], table["k_scale"]),
                "v": beyond(call.v - table["v_offset"][index][:, :, None], table["v_scale"]),
            }
            elements = {"q": call.q[0, 0].numel(), "k": call.k[0, 0].numel(), "v": call.v[0, 0].numel()}
            heads = {"q": call.q.shape[1], "k": kv_heads, "v": kv_heads}
            for into, counts in ((self._clipped, clipped), (self._seen, elements)):
                sums = into.setdefault(call.name, {n: torch.zeros(bins, heads[n], dtype=torch.int64) for n in heads})
                for name, count in counts.items():
                    rows = count if isinstance(count, Tensor) else torch.full((len(index), heads[name]), count)
                    sums[name].index_add_(0, index.cpu(), rows.cpu())
        return call.exact()

    def shares(self) -> dict[str, dict[str, Tensor]]:
        """As `calibration.outliers` gives them; of sites that were called."""
        return {
            site: {
                f"{name}_outliers": (clipped[name] / self._seen[site][name].clamp_min(1)).float() for name in clipped
            }
            for site, clipped in self._clipped.items()
        }
