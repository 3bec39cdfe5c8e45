"""Fixtures that several files here share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from forking import Forking
from support import environment


@pytest.fixture(scope="package")
def forking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forking]:
    """One for all tests, as it takes some seconds to begin."""
    forking = Forking(environment(), tmp_path_factory.mktemp("runs") / "log")
    yield forking
    forking.close()
