"""One call for a pipeline that is loaded already: converted once, its engine put in place, and found again afterwards."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtconvert import __version__
from trtconvert.bundle import MANIFEST
from trtconvert.cache import Cache, default_folder
from trtconvert.errors import BackendUnavailable, UserError
from trtconvert.files import temporary_folder
from trtconvert.models.saved import DENOISERS

if TYPE_CHECKING:
    from trtconvert.progress import Reporter
    from trtconvert.runtime import LoadedBundle

_SECTIONS: dict[str, dict[str, Any]] = {
    # Stated: a search draws samples, which takes long where the denoiser does.
    "attention": {"modes": "precision"},
    "layers": {"modes": "static"},
    "calibration": {"samples": 8, "batch": 4, "steps": 10, "bins": 10},
    "verify": {"samples": 2, "steps": 4, "on_gpu": {"samples": 16, "steps": 10}, "min_psnr": 20.0},
}
"""What is asked of a conversion unless the caller says otherwise."""


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
    """Convert a diffusers pipeline's denoiser and put its engine in place.

    The pipeline is written to the temporary folder while it is converted, as it is: with LoRAs that were fused. What was
    converted is found again by the numbers of its weights and what was asked for. Progress is shown as on the command line.

    Args:
        pipe: the pipeline; the same one is returned, with another `transformer` or `unet`, that computes what the bundle's engine
            does. The weights go with the last reference to the old one.
        folder: for bundles, one for each set of weights; in the user's cache by default.
        recipe: sections and fields of a recipe that are to be others, as {"attention": {"modes": "auto"}}.
        device: "cpu" computes with ONNX Runtime, which is for checking and slow; a GPU otherwise, on which the conversion
            computes too.
        offload: let the weights of the model that is converted lie in host memory, and come to the GPU block by block. Without
            it this is done where the model does not fit the GPU otherwise, in what `pipe` leaves free.
        quiet: show no progress.
        options: of `model.options`, as height=1024, width=1024, batch=[1, 1, 2].
    Returns:
        The pipeline.
    Raises:
        UserError: not a pipeline that can be converted, or a field that no recipe has.
        BackendUnavailable: there is no GPU, no TensorRT or no plugin library here, and device is not "cpu".
        GateError: what was converted misses its gates.
    """
    from rich.console import Console

    from trtconvert.engine import tensorrt
    from trtconvert.pipeline import build
    from trtconvert.progress import Reporter
    from trtconvert.recipe import load_recipe
    from trtconvert.runtime.diffusers import follow_scheduler

    name = _denoiser_of(pipe)
    if device != "cpu" and not (state := tensorrt.status()).available:
        raise BackendUnavailable(
            "there is nothing here to build an engine with",
            expected="an NVIDIA GPU, and TensorRT for it",
            got=state.detail,
            remedy=f'{state.remedy}; device="cpu" computes with ONNX Runtime, to check images, slowly',
        )
    sections = _merged(recipe or {}, options, device, offload)
    bundle = Path(folder or default_folder() / "optimized") / _key(pipe, name, sections)
    report = Reporter(Console(highlight=False, stderr=True, quiet=quiet))
    cache = Cache(default_folder())
    if not (bundle / MANIFEST).is_file():
        with temporary_folder() as place:
            pipe.save_pretrained(place / "pipeline")
            (place / "recipe.yaml").write_text(json.dumps(sections))  # JSON is YAML
            build(load_recipe(place / "recipe.yaml"), bundle, cache, report)
    denoiser = _loaded(bundle, device, report, cache).as_diffusers()
    setattr(pipe, name, denoiser)
    follow_scheduler(denoiser, pipe)
    return pipe


def _loaded(bundle: Path, device: str | None, report: Reporter, cache: Cache) -> LoadedBundle:
    """The bundle on the CPU, or on a GPU, compiled for it where no engine fits."""
    from trtconvert import runtime
    from trtconvert.compile import compile_bundle

    if device == "cpu":
        return runtime.load(bundle, backend="onnxruntime")
    try:
        return runtime.load(bundle, backend="tensorrt", device=device)
    except BackendUnavailable:  # another GPU's, or another TensorRT's
        compile_bundle(bundle, report, cache)
        return runtime.load(bundle, backend="tensorrt", device=device)


def _denoiser_of(pipe: Any) -> str:
    parts = getattr(pipe, "components", None)
    name = next((name for name in DENOISERS if isinstance(parts, Mapping) and parts.get(name) is not None), None)
    if name is None or not hasattr(pipe, "save_pretrained"):
        raise UserError(
            "this cannot be optimized",
            expected=f"a pipeline of diffusers with a {' or a '.join(DENOISERS)}",
            got=type(pipe).__name__,
            remedy="give the whole pipeline; a recipe converts other models (`trtconvert build`)",
        )
    if not hasattr(getattr(pipe, name), "state_dict") or type(getattr(pipe, name)).__module__.startswith("trtconvert."):
        raise UserError(
            f"the pipeline's {name} is converted already",
            expected="a model with its weights",
            got=type(getattr(pipe, name)).__name__,
            remedy="load the pipeline anew to convert it otherwise",
        )
    return name


def _merged(
    recipe: Mapping[str, Mapping[str, Any]], options: Mapping[str, Any], device: str | None, offload: bool
) -> dict[str, dict[str, Any]]:
    sections = {name: dict(fields) for name, fields in _SECTIONS.items()}
    sections["engine"] = {"backend": "onnxruntime"}  # what is built for this GPU comes after
    sections["compute"] = {"device": "cpu" if device == "cpu" else "auto"} | ({"offload": "on"} if offload else {})
    sections["model"] = {"source": "diffusers", "weights": "pipeline", "options": dict(options)}
    for name, fields in recipe.items():
        fixed = {"model": ("source", "weights"), "engine": ("backend",)}.get(name, ())
        if wrong := [field for field in fixed if field in fields]:
            raise UserError(
                f"recipe[{name!r}] says what the call says",
                expected="other fields of the section",
                got=", ".join(wrong),
                remedy="leave them out: the pipeline is the model, and `device` says where it runs",
            )
        sections[name] = sections.get(name, {}) | dict(fields)
    asked = recipe.get("verify", {})
    if asked.keys() & {"samples", "steps"} and "on_gpu" not in asked:  # what the caller says counts on a GPU too
        del sections["verify"]["on_gpu"]
    return sections


def _key(pipe: Any, name: str, sections: Mapping[str, Any]) -> str:
    """Of the weights' numbers, the pipeline's class and what is asked for. Weights are read where they lie, one at a time."""
    from trtconvert.weights.tensor_files import raw_bytes

    digest = hashlib.sha256(
        json.dumps([__version__, type(pipe).__name__, sections], sort_keys=True, default=str).encode()
    )
    for key, x in getattr(pipe, name).state_dict().items():
        digest.update(f"{key} {x.dtype} {tuple(x.shape)}".encode())
        digest.update(raw_bytes(x))
    return digest.hexdigest()[:24]
