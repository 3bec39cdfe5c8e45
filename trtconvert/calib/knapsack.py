"""The fastest plan within a limit on its modelled error: a multiple-choice knapsack, which HiGHS solves to proven optimality."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from trtconvert.attention.modes import Mode
from trtconvert.calib.candidates import MODULATED
from trtconvert.linear.modes import LayerMode

Plan = dict[str, Tensor]
"""Site: [T] INT32 `Mode` per timestep bin; group of layers, whose name begins with `LAYERS_OF`: `LayerMode` or `MODULATED`. Where
sites may have block masks, the choice of a mode and a level, see `choice_of`."""


def fastest_plan(
    sites: list[str],
    cost: Tensor,
    time: Tensor,
    limit: float,
    whole: Sequence[int] = (),
    masked: Sequence[int] = (),
) -> Plan:
    """The plan of least total time whose total cost is at most `limit`, to proven optimality.

    Args:
        cost, time: [S, T, choices] of each choice, not negative; FP16 costs nothing. What costs infinity is not chosen, whatever
            its time, which may be infinite too.
        whole: rows of layers, which have mode 0 in all bins or in none, as an engine holds one of both weights, and likewise
            `MODULATED`, as every step has to add to the caches.
        masked: rows of sites with levels, which are `DENSE` in all bins or in none: an engine's node has a mask or none.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_array, eye_array, kron, vstack

    count = cost.shape[0] * cost.shape[1]
    choices = cost.shape[-1]
    time = time.masked_fill(cost.isinf(), 0)
    # Scaled to about one, so that the solver's tolerances mean the same for every model.
    weights = (cost / limit).flatten().numpy()
    one_each = kron(eye_array(count), np.ones((1, choices)))
    # Choices of a row that are taken, together, in all bins or in none.
    bins, first = cost.shape[1], np.arange(choices)
    together = [(row, first[[mode]]) for row in whole for mode in (LayerMode.EXACT, MODULATED)]
    together += [(row, first[: len(Mode)]) for row in masked]
    joined = []
    for row, chosen in together:
        for index in range(1, bins):
            columns = np.concatenate([row * bins * choices + chosen, (row * bins + index) * choices + chosen])
            signs = np.repeat([1.0, -1.0], len(chosen))
            joined.append(csr_array((signs, columns, [0, len(columns)]), shape=(1, count * choices)))
    with _printing_on_stderr():
        result = milp(
            (time / time.amax()).flatten().numpy(),
            integrality=np.ones(count * choices),
            # A choice that breaks the limit alone is no choice; it would only widen the numbers' range.
            bounds=Bounds(0, np.where(weights > 1, 0, 1)),  # pyright: ignore[reportArgumentType]
            constraints=LinearConstraint(
                csr_array(vstack([one_each, csr_array(np.minimum(weights, 2)[None]), *joined])),
                np.concatenate([np.ones(count), [-np.inf], np.zeros(len(joined))]),  # pyright: ignore[reportArgumentType]
                np.concatenate([np.ones(count), [1.0], np.zeros(len(joined))]),  # pyright: ignore[reportArgumentType]
            ),
            options={"mip_rel_gap": 0.0},  # the default stops 0.01 % above the optimum
        )
    assert result.success, result.message  # FP16 everywhere is always feasible
    chosen = torch.from_numpy(result.x).view(*cost.shape).argmax(-1).int()
    return dict(zip(sites, chosen, strict=True))


@contextmanager
def _printing_on_stderr() -> Iterator[None]:
    """HiGHS prints some lines of its own by C's printf, and the standard output is the result's (`--json`)."""
    sys.stdout.flush()
    kept, flush = os.dup(1), ctypes.CDLL(None).fflush
    flush(None)
    try:
        os.dup2(2, 1)
        yield
    finally:
        flush(None)
        os.dup2(kept, 1)
        os.close(kept)
