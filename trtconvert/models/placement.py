"""Chooses where the main job computes: on a GPU in the model's own type, or on the CPU in FP32."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from trtconvert.documents import safetensors_header
from trtconvert.engine import tensorrt
from trtconvert.engine.driver import fork_problem
from trtconvert.errors import BackendUnavailable, UserError
from trtconvert.library import library_path
from trtconvert.models.placed import ROOM, Place
from trtconvert.models.saved import DENOISERS
from trtconvert.progress import Reporter
from trtconvert.recipe import ComputeSection, ModelSection

OLDEST = 80
"""Oldest architecture that the kernels support."""

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".ckpt", ".gguf", ".pt", ".onnx")


def choose_place(section: ComputeSection, model: ModelSection) -> Place:
    """Chooses the device and the type by a recipe's `compute` section. `auto` chooses the GPU if the model fits, as a whole or
    with its weights in host memory.

    Args:
        model: of the recipe, without `auto` as dtype.
    Raises:
        UserError: the section asks for offloading and for the CPU.
        BackendUnavailable: the section asks for `cuda` or offloading, and there is no GPU that the kernels support, or a package
            for offloading is not installed.
    """
    dtype = model.dtype if section.precision == "model" else section.precision
    asked = section.offload == "on"
    if section.device == "cpu":
        if asked:
            raise UserError(
                "weights can be offloaded from a GPU alone, and the model computes on the CPU",
                expected="--offload, or compute.offload: on, with a GPU",
                got="device cpu",
                remedy="leave the device out, or leave --offload out",
            )
        return Place("cpu", "float32", "compute.device is cpu")
    problem = _gpu_problem() or (offloading_problem() if asked else "")
    if problem and (asked or section.device == "cuda"):
        raise BackendUnavailable(
            "the model cannot compute on a GPU here" + (" with its weights offloaded" if asked else ""),
            expected="an NVIDIA GPU of compute capability 8.0 or newer, a torch that sees it, and libtrtconvert.so"
            + (", and the packages diffusers and accelerate" if asked else ""),
            got=problem,
            remedy="install what is missing" + (", leave --offload out," if asked else ",") + " or use --device cpu",
        )
    if problem:
        return Place("cpu", "float32", problem)
    on_gpu = f"{tensorrt.device_name()}, in {dtype}"
    if asked:
        return Place("cuda", dtype, f"{on_gpu}, block by block from host memory, as compute.offload is on", True)
    factor = 2 if dtype == "float32" else 1
    lacking = _memory_problem(_weight_bytes(model.weights) * factor, "the weights take")
    if lacking and section.offload == "auto" and not offloading_problem():
        blocks = _memory_problem(_block_bytes(model.weights) * factor, "two blocks and the other layers take")
        if not blocks:
            return Place("cuda", dtype, f"{on_gpu}, block by block from host memory: {lacking}", True)
        lacking += f"; {blocks}"
    if lacking and section.device == "auto":
        return Place("cpu", "float32", lacking)
    return Place("cuda", dtype, on_gpu)


def tell_place(place: Place, who: str, report: Reporter) -> None:
    """Reports where something computes, and why, if there is a GPU to choose.

    Args:
        who: subject and verb, such as "the model computes".
    """
    if place.on_gpu or tensorrt.device_architecture() is not None:
        report.notice(f"{who} on the {place.device}: {place.reason}")


def offloading_problem() -> str:
    """Returns the reason why weights cannot be offloaded; "" if they can. The libraries are not imported."""
    missing = [name for name in ("diffusers", "accelerate") if importlib.util.find_spec(name) is None]
    return f"no {' and no '.join(missing)}" if missing else ""


def _gpu_problem() -> str:
    """Returns the reason why no GPU can compute; "" if one can. Does not import torch without a GPU."""
    if problem := fork_problem():
        return problem[0]
    architecture = tensorrt.device_architecture()
    if architecture is None:
        return "no NVIDIA GPU"
    if int(architecture.removeprefix("sm")) < OLDEST:
        return f"{tensorrt.device_name()} is {architecture}, the kernels need sm{OLDEST}"
    if library_path() is None:
        return "libtrtconvert.so, the library of the kernels, is not installed"
    return tensorrt.cuda_problem()


def _memory_problem(size: int, what: str) -> str:
    """Returns the reason why so many bytes of weights do not fit the GPU; "" if they do. what: subject and verb."""
    import torch

    free, _ = torch.cuda.mem_get_info()
    if size * ROOM <= free:
        return ""
    return (
        f"{what} {size / 2**30:.1f} GiB, and {tensorrt.device_name()} has {free / 2**30:.1f} GiB free, less than "
        f"{ROOM:g} times as much"
    )


def _weight_bytes(weights: Path | None) -> int:
    if weights is None:
        return 0
    if weights.is_file():
        return weights.stat().st_size
    return sum(file.stat().st_size for file in weights.rglob("*") if file.suffix in WEIGHT_SUFFIXES)


def _block_bytes(weights: Path | None) -> int:
    """Returns the bytes of an offloaded denoiser's weights that are on the GPU at once. Only files in safetensors are counted, as
    nothing more is known before the model is loaded."""
    if weights is None:
        return 0
    if weights.is_file():
        files = [weights]
    else:
        files = [file for file in weights.rglob("*.safetensors") if file.parent.name.startswith(DENOISERS)]
    other, blocks = dict[str, int](), dict[str, dict[str, int]]()
    for file in files:
        if file.suffix != ".safetensors":
            continue
        try:
            places = {name: entry["data_offsets"] for name, entry in safetensors_header(file).items() if name[0] != "_"}
            sizes = {name: int(end) - int(start) for name, (start, end) in places.items()}
        except (OSError, ValueError, KeyError, IndexError, TypeError):  # loading the model raises the error
            continue
        for name, size in sizes.items():
            block = _BLOCK.match(name)
            (blocks.setdefault(block[0], {}) if block else other)[name] = size
    return sum(other.values()) + sum(sorted(sum(block.values()) for block in blocks.values())[-2:])


_BLOCK = re.compile(r"(?:[^.]*[^.\d][^.]*\.)+\d+\.")
"""The name of a weight's block: the weight's name up to the first number."""
