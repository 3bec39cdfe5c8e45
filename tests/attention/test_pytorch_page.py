"""The examples of docs/pytorch.md, as they stand there but for their device and sizes."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from support import REPOSITORY
from torch import Tensor

pytest.importorskip("diffusers", reason="needs diffusers")
import tiny_pipelines

from trtconvert.attention import Int8Attention


def test_examples_run(tmp_path, monkeypatch, capsys) -> None:
    page = (REPOSITORY / "docs/pytorch.md").read_text(encoding="utf-8")
    code = "\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL))
    on_cpu = code.replace(".cuda()", "").replace('device="cuda"', 'device="cpu"')
    # Fewer tokens, in grids that have as many.
    small = on_cpu.replace("4096", "576").replace("(64, 64)", "(18, 32)").replace("(4, 32, 32)", "(4, 12, 12)")
    small = small.replace('pipe("a photo of an astronaut riding a horse")', "draw()")
    pipe = tiny_pipelines.stable_diffusion()
    pipe.set_progress_bar_config(disable=True)

    def draw() -> Any:
        given = tiny_pipelines.arguments(pipe, "stable_diffusion")
        return pipe(**given | {"num_inference_steps": 2, "output_type": "pil"})

    monkeypatch.chdir(tmp_path)
    found: dict[str, Any] = {"pipe": pipe, "draw": draw}
    exec(small, found)
    assert "8 attention modules compute in INT8, 0 do not" in capsys.readouterr().out
    cond, uncond = found["output_cond"], found["output_uncond"]
    torch.testing.assert_close(found["guided"], uncond + 7.5 * (cond - uncond), rtol=1e-2, atol=1e-2)
    assert isinstance(found["Q"].grad, Tensor) and found["kept_mask"].float().mean() == pytest.approx(0.8, abs=0.01)
    loaded = Int8Attention(8, 64)
    loaded.load_state_dict(torch.load(tmp_path / "attention.pt"))
    assert loaded.calibrated
