"""The fastest plan within a limit on its modelled error: a multiple-choice knapsack, solved to proven optimality by HiGHS."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor


def fastest(
    cost: Tensor,
    time: Tensor,
    limit: float,
    forms: Sequence[Sequence[Hashable]],
    of_bins: tuple[Tensor, float] | None = None,
) -> Tensor:
    """Returns the choices of least total time whose total cost is at most `limit`, to proven optimality.

    Args:
        cost, time: [S, T, choices] of each choice of each unit in each timestep bin, not negative; each unit has a choice that
            costs nothing. A choice of infinite cost is never taken; its time may be infinite, too.
        forms: of each unit's choices; a unit takes choices of one form in all bins.
        of_bins: a second cost [S, T, choices], finite, and the limit of its total in each timestep bin.
    Returns:
        [S, T] index of the choice.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_array, eye_array, kron, vstack

    bins, choices = cost.shape[1:]
    count = cost.shape[0] * bins
    time = time.masked_fill(cost.isinf(), 0)
    # Scaled to about 1, so that the solver's tolerances have the same effect for every model.
    weights = [(cost / limit).flatten().numpy()]
    if of_bins is not None:
        of_bin = torch.eye(bins, dtype=torch.float64)[:, None, :, None]  # [T, 1, T, 1]
        weights += [*(of_bin * of_bins[0] / of_bins[1]).flatten(1).numpy()]
    one_each = kron(eye_array(count), np.ones((1, choices)))
    joined = []
    for row, of_unit in enumerate(forms):
        for form in list(dict.fromkeys(of_unit))[:-1]:  # the constraint of the last form follows from the others
            chosen = np.flatnonzero([each == form for each in of_unit])
            for index in range(1, bins):
                columns = np.concatenate([row * bins * choices + chosen, (row * bins + index) * choices + chosen])
                signs = np.repeat([1.0, -1.0], len(chosen))
                joined.append(csr_array((signs, columns, [0, len(columns)]), shape=(1, count * choices)))
    with _printing_on_stderr():
        result = milp(
            (time / time.amax()).flatten().numpy(),
            integrality=np.ones(count * choices),
            # A choice that exceeds a limit alone is excluded here; its weight would only widen the numbers' range.
            bounds=Bounds(0, np.where(np.max(weights, 0) > 1, 0, 1)),  # pyright: ignore[reportArgumentType]
            constraints=LinearConstraint(
                csr_array(vstack([one_each, *(csr_array(np.minimum(row, 2)[None]) for row in weights), *joined])),
                np.concatenate([np.ones(count), np.full(len(weights), -np.inf), np.zeros(len(joined))]),  # pyright: ignore[reportArgumentType]
                np.concatenate([np.ones(count), np.ones(len(weights)), np.zeros(len(joined))]),  # pyright: ignore[reportArgumentType]
            ),
            options={"mip_rel_gap": 0.0},  # the default stops 0.01 % above the optimum
        )
    assert result.success, result.message  # feasible: each unit has a choice that costs nothing
    return torch.from_numpy(result.x).view(*cost.shape).argmax(-1)


@contextmanager
def _printing_on_stderr() -> Iterator[None]:
    """Redirects C's stdout: HiGHS prints by printf, but the standard output is for results (`--json`)."""
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
