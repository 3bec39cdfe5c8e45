"""INT8 layers of tests, which are smaller than those that plugins pay for."""

from __future__ import annotations

import pytest

from trtconvert.linear import beside_plugins


def take_any_size(patch: pytest.MonkeyPatch) -> None:
    """Layers of any size become plugins."""
    for name, value in (
        ("FEWEST_ROWS", 1),
        ("FEWEST_OUTPUTS", 1),
        ("LEAST_DEPTH", 1),
        ("SAVED_PER_OPERATION", 1.0),
    ):
        patch.setattr(beside_plugins, name, value)
