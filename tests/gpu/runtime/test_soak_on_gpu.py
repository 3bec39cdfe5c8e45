"""A minute of `make soak-gpu`."""

from __future__ import annotations

import pytest
from soak import soak

from trtconvert.engine import tensorrt

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.soak,
    pytest.mark.skipif(not tensorrt.status().available, reason=tensorrt.status().detail),
]


def test_an_engine_stands_it(folder):
    found = soak(folder, seconds=20, calls=2_000, cycles=20)
    assert not found["faults"], found["faults"]
    assert found["threads"]["calls"] > 1_000 and found["processes"]["processes"] == 2
