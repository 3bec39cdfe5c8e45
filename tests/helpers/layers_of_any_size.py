"""INT8 layers of tests, which are smaller than those that plugins pay for."""

from __future__ import annotations

import pytest

from trtconvert.export.lowering import int8_layers


def take_any_size(patch: pytest.MonkeyPatch) -> None:
    """Layers of any size become plugins."""
    for name, value in (
        ("_FEWEST_ROWS", 1),
        ("_FEWEST_OUTPUTS", 1),
        ("_LEAST_DEPTH", 1),
        ("_SAVED_PER_OPERATION", 1.0),
    ):
        patch.setattr(int8_layers, name, value)
