"""Fixtures that several test files share."""

from pathlib import Path

import pytest
import torch

from trtconvert.models.digits import digits_model

RECIPES = Path(__file__).parents[1] / "recipes"


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU, and torch sees none")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(scope="session")
def digits():
    """The shipped model."""
    return digits_model(RECIPES / "digits-dit.safetensors")
