"""Fixtures for several tests of models."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny_pipelines


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """Stable Diffusion with a text encoder."""
    folder = tmp_path_factory.mktemp("saved")
    tiny_pipelines.with_text("stable_diffusion").save_pretrained(folder)
    return folder
