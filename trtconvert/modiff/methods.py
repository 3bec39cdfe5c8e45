"""What a model is compared as. Without torch: the command line names the methods in its help."""

from __future__ import annotations

from typing import Literal

Method = Literal["full", "naive", "lcq", "lcq-modiff", "qdiff", "qdiff-modiff"]
METHODS: dict[Method, str] = {
    "full": "full precision",
    "naive": "one scale for all timesteps",
    "lcq": "LCQ-like: calibrated layer by layer",
    "lcq-modiff": "LCQ-like + MoDiff",
    "qdiff": "Q-Diff",
    "qdiff-modiff": "Q-Diff + MoDiff",
}
"""What a model is compared as, and its name in tables. All but the first have scales of least squared error, of weights for each
output channel, of activations for the tensor; `lcq` and `naive` round weights to the nearest, Q-Diff by AdaRound; `naive` has one
scale of activations for all timesteps, the others one for each bin."""
