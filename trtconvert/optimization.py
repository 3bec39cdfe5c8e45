"""`trtconvert.optimize`: converts a loaded pipeline once and puts its engine in place; later calls find the bundle again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtconvert import __version__
from trtconvert.bundle import MANIFEST
from trtconvert.cache import Cache, default_folder
from trtconvert.errors import BackendUnavailable, UserError
from trtconvert.files import temporary_folder
from trtconvert.models.saved import DENOISERS

if TYPE_CHECKING:
    import torch

    from trtconvert.progress import Reporter
    from trtconvert.runtime import LoadedBundle

_SECTIONS: dict[str, dict[str, Any]] = {
    # Stated modes: a search draws samples, which takes long with a slow denoiser.
    "attention": {"modes": "precision"},
    "layers": {"modes": "static"},
    "calibration": {"samples": 8, "batch": 4, "steps": 10, "bins": 10},
    "verify": {"samples": 2, "steps": 4, "on_gpu": {"samples": 16, "steps": 10}, "min_psnr": 20.0},
}
"""Default sections of the recipe."""


def optimize(
    pipe: Any,
    folder: str | Path | None = None,
    recipe: Mapping[str, Mapping[str, Any]] | None = None,
    *,
    device: str | None = None,
    offload: bool = False,
    quiet: bool = False,
    **options: Any,
) -> Any:
    """Converts a diffusers pipeline's denoiser and puts its engine in place.

    The pipeline is saved to the temporary folder during the conversion, with its LoRAs, fused or active. A later call with
    the same weights and the same arguments finds the bundle again. Progress is shown as on the command line.

    Args:
        pipe: the pipeline. Its `transformer` or `unet` is replaced by one that runs the engine; the old weights are freed with
            the last reference to the old model.
        folder: folder of the bundles, one for each set of weights; default: in the user's cache.
        recipe: sections and fields that replace those of the default recipe, such as {"attention": {"modes": "auto"}}.
        device: "cpu" runs ONNX Runtime, which is slow and for checking; other devices are GPUs, where the conversion computes.
        offload: keep the converted model's weights in host memory and copy them to the GPU block by block. By default models
            that do not fit beside `pipe` are offloaded.
        quiet: show no progress.
        options: fields of `model.options`, such as height=1024, width=1024, batch=[1, 1, 2].
    Returns:
        The pipeline.
    Raises:
        UserError: the pipeline cannot be converted, or a field does not exist in recipes.
        BackendUnavailable: there is no such GPU, no TensorRT or no plugin library, and device is not "cpu".
        GateError: the converted model misses its gates.
    """
    from rich.console import Console

    from trtconvert.engine import tensorrt
    from trtconvert.models.in_memory import refuse_unsaved, save
    from trtconvert.pipeline import build
    from trtconvert.progress import Reporter
    from trtconvert.recipe import load_recipe
    from trtconvert.runtime.bundles import gpu_of

    name = _denoiser_of(pipe)
    if device != "cpu" and not (state := tensorrt.status()).available:
        raise BackendUnavailable(
            "no engine can be built on this machine",
            expected="an NVIDIA GPU, and TensorRT for it",
            got=state.detail,
            remedy=f'{state.remedy}; or check images slowly with device="cpu", which runs ONNX Runtime',
        )
    gpu = None if device == "cpu" else gpu_of(device)
    refuse_unsaved(pipe, name)
    sections = _merged(recipe or {}, options, device, offload)
    bundle = Path(folder or default_folder() / "optimized") / _key(pipe, name, sections)
    report = Reporter(Console(highlight=False, stderr=True, quiet=quiet))
    cache = Cache(default_folder())
    with _usual_defaults(gpu):
        if not (bundle / MANIFEST).is_file():
            with temporary_folder() as place:
                save(pipe, place / "pipeline")
                (place / "recipe.yaml").write_text(json.dumps(sections))  # JSON is YAML
                build(load_recipe(place / "recipe.yaml"), bundle, cache, report)
        denoiser = _loaded(bundle, gpu, report, cache).as_diffusers()
    setattr(pipe, name, denoiser)
    return pipe


@contextmanager
def _usual_defaults(gpu: torch.device | None) -> Iterator[None]:
    """Sets the defaults that builds expect, whatever the program has set: new tensors are FP32, on the CPU and usable by
    autograd, nothing is cast, and `gpu` is the current GPU."""
    import torch

    from trtconvert.mixed_types import WITH_AUTOCAST

    with ExitStack() as stack:
        if gpu is not None:
            stack.enter_context(torch.cuda.device(gpu))
        stack.enter_context(torch.inference_mode(False))
        stack.callback(torch.set_default_dtype, torch.get_default_dtype())
        torch.set_default_dtype(torch.float32)
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        for kind in filter(torch.is_autocast_enabled, WITH_AUTOCAST):
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def _loaded(bundle: Path, gpu: torch.device | None, report: Reporter, cache: Cache) -> LoadedBundle:
    """Loads the bundle on the CPU or the current GPU, and compiles it for the GPU if no engine fits."""
    from trtconvert import runtime
    from trtconvert.compile import compile_bundle

    if gpu is None:
        return runtime.load(bundle, backend="onnxruntime")
    try:
        return runtime.load(bundle, backend="tensorrt", device=gpu)
    except BackendUnavailable:  # the engine is for another GPU or TensorRT
        compile_bundle(bundle, report, cache)
        return runtime.load(bundle, backend="tensorrt", device=gpu)


def _denoiser_of(pipe: Any) -> str:
    parts = getattr(pipe, "components", None)
    name = next((name for name in DENOISERS if isinstance(parts, Mapping) and parts.get(name) is not None), None)
    if name is None or not hasattr(pipe, "save_pretrained"):
        raise UserError(
            "the object cannot be optimized",
            expected=f"a pipeline of diffusers with a {' or a '.join(DENOISERS)}",
            got=type(pipe).__name__,
            remedy="pass the whole pipeline; convert other models by a recipe (`trtconvert build`)",
        )
    if not hasattr(getattr(pipe, name), "state_dict") or type(getattr(pipe, name)).__module__.startswith("trtconvert."):
        raise UserError(
            f"the pipeline's {name} is converted already",
            expected="a model with its weights",
            got=type(getattr(pipe, name)).__name__,
            remedy="load the pipeline again to convert it with other settings",
        )
    return name


def _merged(
    recipe: Mapping[str, Mapping[str, Any]], options: Mapping[str, Any], device: str | None, offload: bool
) -> dict[str, dict[str, Any]]:
    sections = {name: dict(fields) for name, fields in _SECTIONS.items()}
    sections["engine"] = {"backend": "onnxruntime"}  # engines for this GPU are compiled afterwards
    sections["compute"] = {"device": "cpu" if device == "cpu" else "auto"} | ({"offload": "on"} if offload else {})
    sections["model"] = {"source": "diffusers", "weights": "pipeline", "options": dict(options)}
    for name, fields in recipe.items():
        fixed = {"model": ("source", "weights"), "engine": ("backend",)}.get(name, ())
        if wrong := [field for field in fixed if field in fields]:
            raise UserError(
                f"recipe[{name!r}] has fields that the arguments decide",
                expected="other fields of the section",
                got=", ".join(wrong),
                remedy="remove these fields: `pipe` is the model, and `device` selects the backend",
            )
        sections[name] = sections.get(name, {}) | dict(fields)
        if name == "model":
            sections[name]["options"] = {**fields.get("options", {}), **options}
    asked = recipe.get("verify", {})
    if asked.keys() & {"samples", "steps"} and "on_gpu" not in asked:  # the caller's values hold on a GPU too
        del sections["verify"]["on_gpu"]
    return sections


def _key(pipe: Any, name: str, sections: Mapping[str, Any]) -> str:
    """Hashes the weights, the pipeline's class and the recipe."""
    from trtconvert.models.in_memory import weights_of
    from trtconvert.weights.tensor_files import raw_bytes

    digest = hashlib.sha256(
        json.dumps([__version__, type(pipe).__name__, sections], sort_keys=True, default=str).encode()
    )
    for key, x in weights_of(getattr(pipe, name)).items():
        digest.update(f"{key} {x.dtype} {tuple(x.shape)}".encode())
        digest.update(raw_bytes(x))
    return digest.hexdigest()[:24]
