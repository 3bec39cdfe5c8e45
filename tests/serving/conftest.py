"""The shipped model as a bundle for ONNX Runtime."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def digits(digits_build) -> Path:
    """The bundle that tests of other folders take as well. Leave its files as they are."""
    return digits_build.bundle
