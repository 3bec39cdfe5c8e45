"""The example of docs/production.md, as it stands there, on a TensorRT engine."""

from __future__ import annotations

import pytest
import torch
from documented import blocks
from gpu_runtime import make_inputs
from support import WEIGHTS

from trtconvert.engine import tensorrt

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not tensorrt.status().available, reason=tensorrt.status().detail)]


def test_the_example_of_production_runs(folder, tmp_path, monkeypatch, capsys):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "my-pipeline").symlink_to(folder)
    (tmp_path / "finetuned.safetensors").symlink_to(WEIGHTS)
    monkeypatch.chdir(tmp_path)
    (block,) = [block for block in blocks("python") if block.page.name == "production.md"]
    names = dict(zip(("latents", "timestep", "text"), make_inputs(), strict=True))
    block.run(names)
    noise = names["noise"]
    assert noise.shape == names["latents"].shape and noise.device == torch.device("cuda:0")
    assert noise.isfinite().all() and "DeviceMemory(weights=" in capsys.readouterr().out
