"""Fixtures of all tests of loaded TensorRT engines."""

from __future__ import annotations

from pathlib import Path

import pytest
from gpu_runtime import digits_bundle

from trtconvert import runtime
from trtconvert.runtime.tensorrt import TensorRTComponent


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    """The shipped model in FP16 as a refittable engine with two profiles."""
    return digits_bundle(tmp_path_factory.mktemp("engine"))


@pytest.fixture
def loaded(folder):
    with runtime.load(folder, backend="tensorrt") as bundle:
        yield bundle


@pytest.fixture
def denoiser(loaded) -> TensorRTComponent:
    return loaded["denoiser"]
