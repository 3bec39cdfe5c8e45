"""The choice where the main job computes: on a GPU in the model's own type, or on the CPU in FP32."""

from __future__ import annotations

from pathlib import Path

from trtconvert.engine import tensorrt
from trtconvert.errors import BackendUnavailable
from trtconvert.library import library_path
from trtconvert.models.placed import ROOM, Place
from trtconvert.progress import Reporter
from trtconvert.recipe import ComputeSection, ModelSection

OLDEST = 80
"""Architecture from which on the kernels run."""

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".ckpt", ".gguf", ".pt", ".onnx")


def choose_place(section: ComputeSection, model: ModelSection) -> Place:
    """The device and the type that a recipe's `compute` section asks for; `auto` takes the GPU where the model fits.

    Args:
        model: of the recipe, its dtype settled.
    Raises:
        BackendUnavailable: `cuda` is asked for, and there is no GPU that the kernels run on.
    """
    dtype = model.dtype if section.precision == "model" else section.precision
    if section.device == "cpu":
        return Place("cpu", "float32", "compute.device is cpu")
    problem = _gpu_problem()
    size = 0 if problem else round(_weight_bytes(model.weights) * (2 if dtype == "float32" else 1))
    if not problem and section.device == "auto":
        problem = _memory_problem(size)
    if not problem:
        name = tensorrt.device_name()
        return Place("cuda", dtype, f"{name}, in {dtype}")
    if section.device == "cuda":
        raise BackendUnavailable(
            "the model cannot compute on a GPU here",
            expected="an NVIDIA GPU of compute capability 8.0 or newer, a torch that sees it, and libtrtconvert.so",
            got=problem,
            remedy="install what is missing, or take --device cpu",
        )
    return Place("cpu", "float32", problem)


def tell_place(place: Place, who: str, report: Reporter) -> None:
    """Say where something computes, and why, where there is a GPU to choose.

    Args:
        who: subject and verb, such as "the model computes".
    """
    if place.on_gpu or tensorrt.device_architecture() is not None:
        report.notice(f"{who} on the {place.device}: {place.reason}")


def _gpu_problem() -> str:
    """Why no GPU can compute; empty where one can. Without a GPU, torch is not imported."""
    architecture = tensorrt.device_architecture()
    if architecture is None:
        return "no NVIDIA GPU"
    if int(architecture.removeprefix("sm")) < OLDEST:
        return f"{tensorrt.device_name()} is {architecture}, the kernels need sm{OLDEST}"
    if library_path() is None:
        return "libtrtconvert.so, the library of the kernels, is not installed"
    return tensorrt.cuda_problem()


def _memory_problem(size: int) -> str:
    import torch

    free, _ = torch.cuda.mem_get_info()
    if size * ROOM <= free:
        return ""
    return (
        f"the weights take {size / 2**30:.1f} GiB, and {tensorrt.device_name()} has {free / 2**30:.1f} GiB free, less than "
        f"{ROOM:g} times as much"
    )


def _weight_bytes(weights: Path | None) -> int:
    """Bytes of the files of weights; 0 for models that an entry point makes."""
    if weights is None:
        return 0
    if weights.is_file():
        return weights.stat().st_size
    return sum(file.stat().st_size for file in weights.rglob("*") if file.suffix in WEIGHT_SUFFIXES)
