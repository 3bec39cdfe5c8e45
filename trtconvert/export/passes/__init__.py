"""Passes that repair torch's export. Each rewrites a model in place and returns the number of its changes.

`torch_export` runs both lists, with the exporter's optimisation between them. If the exporter refuses a model, `autocast_regions`
and `complex_pairs` rewrite torch's program first.
"""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from trtconvert.export.passes.booleans import choose_by_logic
from trtconvert.export.passes.concats import drop_rejoins, promote_concats
from trtconvert.export.passes.epsilons import keep_epsilons
from trtconvert.export.passes.interleaves import join_interleaves
from trtconvert.export.passes.overwrites import join_overwritten
from trtconvert.export.passes.scatters import leave_out_default_reductions
from trtconvert.export.passes.sizes import fold_sizes
from trtconvert.export.passes.squeezes import drop_idle_squeezes

Pass = Callable[[ir.Model], int]

BEFORE_OPTIMISATION: tuple[Pass, ...] = (
    # Independent of each other.
    drop_idle_squeezes,
    promote_concats,
    choose_by_logic,
    fold_sizes,  # gives the optimisation more constants
    keep_epsilons,  # the optimisation would remove them
)
AFTER_OPTIMISATION: tuple[Pass, ...] = (
    # The first three match constant positions, and need cancelled transposes.
    join_interleaves,  # before overwrites, which match the halves of an axis of two
    join_overwritten,
    drop_rejoins,  # also matches the Concats of the two before
    leave_out_default_reductions,  # last: the joins read the attribute
)
