"""The shipped model's engine, its inputs, and memory in use."""

from __future__ import annotations

import importlib
import json
import os
from pathlib import Path

import torch
from rich.console import Console

from trtconvert.cache import Cache
from trtconvert.pipeline import build
from trtconvert.progress import Reporter
from trtconvert.recipe import load_recipe

WEIGHTS = Path(__file__).parents[3] / "recipes" / "digits-dit.safetensors"


def digits_bundle(folder: Path) -> Path:
    """Build the shipped model in FP16 in a folder: a refittable engine with two profiles, of 1 and 2 and of 3 to 16 samples."""
    recipe = folder / "recipe.yaml"
    sides = {"height": 8, "width": 8}
    sections = {
        "model": {"source": "digits-dit", "weights": str(WEIGHTS), "dtype": "float16"},
        "attention": {"modes": ["precision", "balanced"]},
        "layers": {"modes": "off"},
        "calibration": {"samples": 4, "batch": 2, "steps": 4, "bins": 2},
        "engine": {
            "backend": "tensorrt",
            "attention": "plugin",
            "refittable": True,
            "profiles": [{"batch": [1, 1, 2], **sides}, {"batch": [3, 8, 16], **sides}],
        },
        "verify": {"samples": 2, "steps": 4, "min_psnr": 20},
        "output": {"grid": 2},
    }
    recipe.write_text(json.dumps(sections))
    build(load_recipe(recipe), folder / "bundle", Cache(folder / "cache"), Reporter(Console(quiet=True)))
    return folder / "bundle"


def make_inputs(batch: int = 2, seed: int = 0, dtype: torch.dtype = torch.float16) -> list[torch.Tensor]:
    """In the signature's order, on the GPU."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, 1, 8, 8, generator=generator).to("cuda", dtype)
    timestep = (torch.rand(batch, generator=generator) * 999).cuda()
    return [x, timestep, torch.randint(0, 10, (batch,), generator=generator).cuda()]


def resident() -> int:
    """Bytes of host memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def held() -> int:
    """Bytes of device memory in use by this process; where the driver does not tell processes apart, by all of them."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    own = _of_this_process()
    free, total = torch.cuda.mem_get_info()
    return total - free if own is None else own


def _of_this_process() -> int | None:
    """By NVML, if it is there and knows."""
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
        uuid = f"GPU-{torch.cuda.get_device_properties().uuid}"
        for process in nvml.nvmlDeviceGetComputeRunningProcesses(nvml.nvmlDeviceGetHandleByUUID(uuid)):
            if process.pid == os.getpid():
                return process.usedGpuMemory
    except Exception:  # no module, no driver library, a container that hides processes
        return None
    return None
