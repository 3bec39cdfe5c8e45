"""Fixtures of all plugins' tests. A test module names its plugin in `PLUGIN`, and attributes of the plugins to make in `MADE`."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

import pytest
from plugin_driver import Driver, compiled_driver


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The driver that stands for TensorRT 10."""
    return compiled_driver(tmp_path_factory.mktemp("driver"), 10)


@pytest.fixture(scope="module")
def driver(request: pytest.FixtureRequest, compiled: Path) -> Driver:
    return Driver(compiled, request.module.PLUGIN)


@pytest.fixture
def plugins(request: pytest.FixtureRequest, driver: Driver) -> Iterator[list[ctypes.c_void_p]]:
    driver.messages()
    made = [driver.create(**attributes) for attributes in getattr(request.module, "MADE", ({},))]
    yield made
    for plugin in made:
        driver.lib.driver_destroy(plugin)


@pytest.fixture
def plugin(plugins: list[ctypes.c_void_p]) -> ctypes.c_void_p:
    return plugins[0]
