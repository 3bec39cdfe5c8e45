"""Engines of a GPU that is not there: nothing runs, and each prediction is as far from full precision as is said."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from trtconvert.bundle import ComponentRecord, EngineRecord
from trtconvert.models.recorded_calls import RecordedCalls
from trtconvert.runtime import bundles


class PretendEngine:
    """What `engine_component` gives."""

    device = torch.device("cpu")

    def __init__(self, path: Path, record: EngineRecord, component: ComponentRecord) -> None:
        assert path.is_file()

    def close(self) -> None: ...


def pretend_engines(replace: Callable[[Any, str, Any], None], error: float = 0.01) -> None:
    """Let engines run that are none.

    Args:
        replace: as setattr.
        error: of their predictions in every timestep bin.
    """
    replace(bundles, "engine_component", PretendEngine)
    replace(RecordedCalls, "errors", lambda calls, denoiser: [error] * len(calls.type_errors))
