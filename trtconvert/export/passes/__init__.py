"""What mends torch's export, one pass a file: each rewrites a model in place and counts what it changed.

`trace` runs the two lists in their order, with the exporter's own optimisation between them. Ahead of both, and only where the
exporter refuses a model, `autocast_regions` and `complex_pairs` rewrite torch's program.
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
    # None of these changes what another one looks at: any order would do.
    drop_idle_squeezes,
    promote_concats,
    choose_by_logic,
    fold_sizes,  # constants that the optimisation folds on from
    keep_epsilons,  # which the optimisation would leave out
)
AFTER_OPTIMISATION: tuple[Pass, ...] = (
    # The first three match positions that are constants, and transposes none of which undoes another.
    join_interleaves,  # before overwrites: of an axis of two, each half is also a run of rows
    join_overwritten,
    drop_rejoins,  # of the concatenations that the two before leave as well
    leave_out_default_reductions,  # last: joining reads the attribute
)
