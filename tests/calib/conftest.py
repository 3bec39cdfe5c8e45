"""Fixtures shared by tests of calibration."""

import pytest


@pytest.fixture
def inputs(digits):
    return digits.example(5, {"batch": 7, "height": 8, "width": 8})
