"""Fixtures of all tests of the attention plugin."""

from __future__ import annotations

import pytest
from plugin_driver import Driver, compiled_driver


@pytest.fixture(scope="module", params=[10, 11], ids=["logger-of-10", "logger-of-11"])
def driver(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Driver:
    return Driver(compiled_driver(tmp_path_factory.mktemp("driver"), request.param), "Int8Attention")
