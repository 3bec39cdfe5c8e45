"""Recipes of `trtconvert init`, for published models by short names, and for folders and files.

Imports no torch, and reads only the headers of files of weights.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from trtconvert.documents import PIPELINE_INDEX
from trtconvert.errors import UserError, did_you_mean
from trtconvert.files import temporary_folder
from trtconvert.models.call_source import ImageArgument, image_arguments, takes_prompt
from trtconvert.models.saved import is_saved_pipeline, pipeline_folder, stored_bytes, with_dtype
from trtconvert.models.saved_sizes import FEW_STEPS, few_steps, models_in_torch, parts_of, saved_sizes
from trtconvert.recipe import ONNX, ONNX_SUFFIX, ModelSection, PlanSection
from trtconvert.shipped import shipped_folder, shipped_models, shipped_recipe


@dataclass(frozen=True)
class Published:
    """A published model.

    Attributes:
        title: name for people; pipeline: class in diffusers; folder: name of the repository without its owner.
        options: `model.options`, each with its meaning.
        dtype: type of the saved weights.
        notes: comment lines at the top of the recipe.
        images: arguments of the pipeline's call that take an image.
        is_large: True if a step takes minutes on a CPU.
        second_encoder: True if there is a large second text encoder.
    """

    title: str
    pipeline: str
    folder: str
    options: Mapping[str, tuple[Any, str]]
    dtype: str = "bfloat16"
    notes: Sequence[str] = ()
    images: Sequence[str] = ()
    is_large: bool = True
    second_encoder: bool = False


def _square(side: int, more: str = "") -> dict[str, tuple[Any, str]]:
    pixels = f"pixels; or [min, opt, max] for one engine that takes a range{more}"
    return {"height": (side, pixels), "width": (side, "")}


def _video(height: int, width: int, frames: int, step: str) -> dict[str, tuple[Any, str]]:
    return {"height": (height, "pixels"), "width": (width, ""), "frames": (frames, step)}


PUBLISHED: dict[str, Published] = {
    "sd15": Published(
        "Stable Diffusion 1.5",
        "StableDiffusionPipeline",
        "stable-diffusion-v1-5",
        _square(512),
        "float16",
        is_large=False,
    ),
    "sdxl": Published(
        "SDXL", "StableDiffusionXLPipeline", "stable-diffusion-xl-base-1.0", _square(1024), "float16", is_large=False
    ),
    "sd35": Published("Stable Diffusion 3.5", "StableDiffusion3Pipeline", "stable-diffusion-3.5-medium", _square(1024)),
    "flux1": Published("Flux.1", "FluxPipeline", "FLUX.1-dev", _square(1024, ", in steps of 16"), second_encoder=True),
    "flux1-kontext": Published(
        "Flux.1 Kontext",
        "FluxKontextPipeline",
        "FLUX.1-Kontext-dev",
        _square(1024, ", in steps of 16"),
        images=("image",),
        second_encoder=True,
    ),
    "pixart-sigma": Published(
        "PixArt-Σ", "PixArtSigmaPipeline", "PixArt-Sigma-XL-2-1024-MS", _square(1024), "float16", is_large=False
    ),
    "wan21": Published(
        "Wan 2.1, 1.3B",
        "WanPipeline",
        "Wan2.1-T2V-1.3B-Diffusers",
        _video(480, 832, 81, "4·n + 1"),
    ),
    "wan22": Published(
        "Wan 2.2, A14B",
        "WanPipeline",
        "Wan2.2-T2V-A14B-Diffusers",
        _video(720, 1280, 81, "4·n + 1")
        | {"denoiser": ("transformer", "for high noise; a second bundle has transformer_2")},
        notes=("Two denoisers take turns: build a bundle for each, named in model.options.denoiser.",),
    ),
    "qwen-image": Published(
        "Qwen-Image",
        "QwenImagePipeline",
        "Qwen-Image",
        {
            "height": (1328, "pixels; one size, because the model takes sizes as numbers"),
            "width": (1328, ""),
            "batch": (1, "images per call, because the model takes the shape of each"),
            "tokens": ([4, 64, 512], "min, opt, max of a prompt, because prompts are not padded"),
        },
    ),
    "ltx": Published("LTX-Video", "LTXPipeline", "LTX-Video", _video(512, 704, 97, "8·n + 1")),
    "cogvideox": Published("CogVideoX, 2B", "CogVideoXPipeline", "CogVideoX-2b", _video(480, 720, 49, ""), "float16"),
    "hunyuanvideo": Published("HunyuanVideo", "HunyuanVideoPipeline", "HunyuanVideo", _video(544, 960, 61, "4·n + 1")),
}
"""Published models by short names."""

_LARGE = 1_000_000_000
"""Denoisers of this many bytes or more take minutes per step on a CPU."""

_LONG = 4096
"""Attention of this many tokens or more counts as long."""

_HEADER = "`trtconvert schema` prints every field with its meaning. Next: trtconvert build {name}"


@dataclass(frozen=True)
class _Found:
    """The model of a recipe.

    Attributes:
        known: the published model of the same kind, with the options of the model's own folder; None if there is none.
        sizes: default sizes of an unknown model's pipeline.
        few_steps: why the model takes few steps; empty if it does not.
        has_text: True if the model has text encoders, or may have some.
        has_tokens: True if there are tokenizers: some denoisers embed tokens themselves.
        others: models that stay in torch.
        takes_prompt: False if the pipeline's call has no prompt.
        images: arguments of the pipeline's call that take images.
    """

    title: str
    weights: str
    known: Published | None
    config: str = ""
    dtype: str = ""
    sizes: Mapping[str, int] = field(default_factory=dict)
    is_large: bool = True
    few_steps: str = ""
    has_text: bool = True
    has_tokens: bool = True
    others: Sequence[str] = ()
    takes_prompt: bool = True
    images: Sequence[ImageArgument] = ()


def recipe_text(model: str, at: Path, prompts: Path | None = None, loras: Sequence[Path] = ()) -> str:
    """Writes a commented recipe.

    Args:
        model: a short name of `PUBLISHED` or of a model that comes with the program, a pipeline's folder, a file of weights, or
            an ONNX file.
        at: path of the recipe; paths in the recipe are relative to its folder.
        prompts: a text file with one calibration prompt a line.
        loras: LoRA files to merge.
    Raises:
        UserError: the model is unknown, or a file does not exist.
    """
    for what, path in (("prompts", prompts), *(("LoRA", path) for path in loras)):
        if path is not None and not path.is_file():
            raise UserError(
                f"there is no file of {what} at {path}",
                expected="a text file with one prompt a line" if what == "prompts" else "a safetensors file",
                got="no such file",
                remedy="check the path, which is relative to the current folder",
            )
    if model.endswith(ONNX_SUFFIX) and Path(model).is_file():
        return _of_onnx(Path(model), _beside(Path(model), at), at, prompts, loras)
    if model in shipped_models() and not Path(model).exists():
        return _shipped(model, prompts, loras)
    found = _published(model) if model in PUBLISHED and not Path(model).exists() else _looked_at(Path(model), at)
    encodes = found.has_text or found.has_tokens
    if prompts is not None and not (encodes and found.takes_prompt):
        lacking = "a call without a prompt" if encodes else "a folder without text encoders and tokenizers"
        otherwise = "" if encodes else "save the whole pipeline, or "
        raise UserError(
            f"{model} reads no prompts",
            expected="a pipeline whose call takes a prompt, saved with its text encoders and tokenizers",
            got=f"--prompts {prompts}, and {lacking}",
            remedy=f"{otherwise}leave --prompts out to calibrate on the model's own runs",
        )
    known = found.known
    lines = [f"# {found.title}. {_HEADER.format(name=at.name)}"]
    lines += [f"# {note}" for note in (known.notes if known else ())]
    where = (
        " # folder of the downloaded model, relative to this file" if known and found.weights == known.folder else ""
    )
    lines += ["model:", "  source: diffusers", f"  weights: {_quoted(found.weights)}{where}"]
    if found.config:
        lines.append(f"  config: {found.config}")
    dtype = found.dtype or (known.dtype if known else "float16")
    lines.append(f"  dtype: {dtype} # type of the saved weights; float32, float16 or bfloat16")
    lines += _images(found.images)
    lines += _options(known, found.sizes)
    lines += _loras(loras, at)
    lines += _components(known is not None and known.second_encoder, found.has_text, found.others)
    is_large = found.is_large if known is None else known.is_large
    lines += _quality(is_large, prompts, at, known is not None and _has_long_sequences(known), found.few_steps)
    return "\n".join(lines) + "\n"


def _shipped(name: str, prompts: Path | None, loras: Sequence[Path]) -> str:
    """Returns the recipe of a model that comes with the program, with the installed paths of its files.

    Raises:
        UserError: prompts or LoRAs were given, which are for diffusers pipelines.
    """
    for option, given in (("--prompts", [prompts] if prompts else []), ("--lora", loras)):
        if given:
            raise UserError(
                f"{name} takes no {option}",
                expected=f"{name} as it comes with the program",
                got=f"{option} {given[0]}",
                remedy="leave the option out",
            )
    text = shipped_recipe(name).read_text(encoding="utf-8")
    for file in shipped_folder().glob("*.safetensors"):
        text = text.replace(f": {file.name}", f": {_quoted(str(file))}")
    return text


def _published(name: str) -> _Found:
    known = PUBLISHED[name]
    return _Found(f"{known.title}, from its folder", known.folder, known, images=_of_known(known))


def _of_known(known: Published) -> list[ImageArgument]:
    return [ImageArgument(name, needed=True, frames=False) for name in known.images]


def _looked_at(place: Path, at: Path) -> _Found:
    if place.is_dir() and is_saved_pipeline(place):
        return _of_pipeline(place, place, at)
    if place.is_file():
        folder = pipeline_folder(place)
        if folder is not None:
            return _of_pipeline(folder, place, at)
        return _Found(
            f"The weights in {place.name}",
            _relative(place, at),
            None,
            "FOLDER # of the pipeline, with model_index.json",
        )
    if place.is_dir():
        raise UserError(
            f"{place} is not a diffusers pipeline",
            expected=f"a folder with {PIPELINE_INDEX}, written by `pipeline.save_pretrained(folder)`",
            got=", ".join(sorted(path.name for path in place.iterdir())[:8]) or "an empty folder",
            remedy="save the whole pipeline there",
        )
    names = [*PUBLISHED, *shipped_models()]
    raise UserError(
        f"'{place}' is neither a folder, a file, nor the name of a model with a recipe",
        expected="a pipeline's folder, a file of weights, or one of " + ", ".join(names),
        got=str(place),
        remedy=did_you_mean(str(place), names, "check the path"),
    )


def _of_pipeline(folder: Path, weights: Path, at: Path) -> _Found:
    try:
        kind = str(json.loads((folder / PIPELINE_INDEX).read_text(encoding="utf-8"))["_class_name"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{folder / PIPELINE_INDEX} cannot be read",
            expected="the index of a pipeline, with the name of its class",
            got=f"{type(error).__name__}: {error}",
            remedy="save the pipeline again",
        ) from error
    name = folder.resolve().name
    alike = [known for known in PUBLISHED.values() if known.pipeline == kind]
    known = next((known for known in alike if known.folder == name), alike[0] if alike else None)
    section = ModelSection(source="diffusers", weights=weights)
    sizes, parts, stored = saved_sizes(folder), parts_of(folder), stored_bytes(section)
    is_large = not stored or stored > _LARGE
    if known is not None:
        known = replace(
            known,
            options={name: (sizes.get(name, value), meaning) for name, (value, meaning) in known.options.items()},
            is_large=known.is_large and is_large,
            second_encoder=known.second_encoder and "text_encoder_2" in parts,
        )
    return _Found(
        f"{kind} of {weights.name}",
        _relative(weights, at),
        known,
        dtype=with_dtype(section).dtype,
        sizes=sizes,
        is_large=is_large,
        few_steps=few_steps(folder),
        has_text=not parts or any(part.startswith("text_encoder") for part in parts),
        has_tokens=any(part.startswith(("tokenizer", "processor")) for part in parts),
        others=models_in_torch(folder),
        takes_prompt=takes_prompt(kind),
        images=image_arguments(kind) if known is None else _of_known(known),
    )


def _has_long_sequences(known: Published) -> bool:
    """Returns whether the model draws videos of so many tokens that block masks may pay."""
    # HunyuanVideo's attention has a mask of its own.
    if "frames" not in known.options or known.pipeline == "HunyuanVideoPipeline":
        return False
    height, width, frames = (known.options[name][0] for name in ("height", "width", "frames"))
    return (height // 16) * (width // 16) * (1 + frames // 4) >= _LONG


def _beside(place: Path, at: Path) -> str:
    """Returns a file's path for a recipe as `_relative` does, without following links: external weights lie beside the link."""
    return _near(Path(os.path.abspath(place)), at)


def _of_onnx(place: Path, source: str, at: Path, prompts: Path | None, loras: Sequence[Path]) -> str:
    """Writes the recipe of an ONNX file.

    Args:
        source: the recipe's `model.source`; at: path of the recipe.
    Raises:
        UserError: the file cannot be used, or prompts were given.
    """
    from trtconvert.models.onnx.files import external_files, read_graph
    from trtconvert.models.onnx.inputs import is_consistency, proposed_options

    if prompts is not None:
        raise UserError(
            f"{place} does not take prompts",
            expected="the embeddings of a text encoder as inputs of the ONNX denoiser",
            got=f"--prompts {prompts}",
            remedy="leave --prompts out, and put rows of these inputs into the file model.options.conditions",
        )
    section = with_dtype(ModelSection(source=ONNX, weights=place))
    lines = [f"# {place.name}. {_HEADER.format(name=at.name)}", "model:", f"  source: {_quoted(source)}"]
    lines += [f"  dtype: {section.dtype} # type of the saved weights; float32, float16 or bfloat16", "  options:"]
    for name, (value, meaning) in proposed_options(place, read_graph(place)).items():
        if isinstance(value, dict):
            lines.append(f"    {name}: # {meaning}")
            lines += [f"      {_quoted(key)}: {size}" for key, size in value.items()]
        else:
            lines.append(f"    {name}: {_quoted(str(value))} # {meaning}")
    lines += _loras(loras, at)
    stored = sum(path.stat().st_size for path in (place, *external_files(place)))
    few = "a consistency model, judging by its name" if is_consistency(place) else ""
    return "\n".join([*lines, *_quality(stored > _LARGE, None, at, few=few, few_count=1)]) + "\n"


def assumptions(recipe: str) -> list[str]:
    """Returns the assumptions in a recipe of `recipe_text`, as "model.options.…: value"."""
    from trtconvert.models.onnx.inputs import ASSUMED

    stated = (line.partition(f" # {ASSUMED}")[::2] for line in recipe.splitlines())
    return [f"model.options.{option.strip()}" for option, meaning in stated if meaning]


def named_recipe(name: Path) -> Path:
    """Returns the recipe of a model that comes with the program.

    Raises:
        UserError: no such model comes with the program.
    """
    models = shipped_models()
    if str(name) in models:
        return shipped_recipe(str(name))
    known = str(name) in PUBLISHED
    raise UserError(
        f"there is no recipe {name}",
        expected="a YAML file, an ONNX file, or a model that comes with the program: " + ", ".join(models),
        got=f"the name of {PUBLISHED[str(name)].title}: its weights do not come with the program"
        if known
        else "No such file or directory",
        remedy=f"`trtconvert init {name} -o recipe.yaml` writes a recipe for its weights"
        if known
        else did_you_mean(str(name), models, "check the path"),
    )


@contextmanager
def recipe_of(place: Path) -> Iterator[Path]:
    """Yields a temporary file with the default recipe of an ONNX file."""
    with temporary_folder() as folder:
        file = folder / "recipe.yaml"
        file.write_text(_of_onnx(place, os.path.abspath(place), file, None, ()), encoding="utf-8")
        yield file


def _relative(path: Path, at: Path) -> str:
    """Returns a path relative to the recipe's folder if it is at most two levels up; else absolute."""
    return _near(path.resolve(), at)


def _near(path: Path, at: Path) -> str:
    relative = os.path.relpath(path, at.resolve().parent)
    return relative if relative.count("..") <= 2 else str(path)


def _loras(files: Sequence[Path], at: Path) -> list[str]:
    entries = [f"  - {{file: {_quoted(_relative(path, at))}, scale: 1.0}}" for path in files]
    return ["", "loras:", *entries] if entries else []


def _quoted(text: str) -> str:
    """Quotes a text with characters that may have a meaning in YAML."""
    return text if re.sub(r"[/_.-]", "", text).isalnum() else json.dumps(text)


def _images(arguments: Sequence[ImageArgument]) -> list[str]:
    files = {
        argument.name: "[frame-0.png, frame-1.png]"
        if argument.frames
        else ("mask.png" if "mask" in argument.name else "photo.png")
        for argument in arguments
    }
    lines = ["  images:"] if any(argument.needed for argument in arguments) else []
    for argument in arguments:
        if argument.needed:
            what = "input frames, all of them in order" if argument.frames else "input image"
            lines.append(f"    {argument.name}: {files[argument.name]} # {what} of the calibration")
    if others := [f"{argument.name}: {files[argument.name]}" for argument in arguments if not argument.needed]:
        lines.append(f"  # images: {{{', '.join(others)}}} # of these, those that the pipeline is to draw from")
    return lines


def _options(known: Published | None, sizes: Mapping[str, int]) -> list[str]:
    if known is None:
        own = ", ".join(f"{name} {size}" for name, size in sizes.items())
        own = f"default: the pipeline's own{', here ' + own if own else ''}"
        return [f"  options: {{}} # height and width in pixels, frames, call: {{guidance_scale: …}}; {own}"]
    lines = ["  options:"]
    for name, (value, meaning) in known.options.items():
        lines.append(f"    {name}: {value}" + (f" # {meaning}" if meaning else ""))
    if "batch" not in known.options:
        lines.append("    batch: [1, 1, 2] # images per call; guidance calls the denoiser with twice as many")
    return lines


def _components(second_encoder: bool, has_text: bool, others: Sequence[str]) -> list[str]:
    what = "text encoders and the VAE's decoder become engines, and the bundle draws from prompts alone"
    if not has_text:
        what = "the VAE's decoder becomes an engine; the folder has no text encoder"
    elif others:
        what = f"text encoders and the VAE's decoder become engines; in torch: {', '.join(others)}"
    lines = ["", "components:", f"  all: {{}} # {what}"]
    return (
        [*lines, "  text_encoder_2: {layers: int8} # T5; INT8 layers take half the memory"] if second_encoder else lines
    )


def _prompts(file: Path) -> int:
    """Returns the number of prompts in a file.

    Raises:
        UserError: the file has none.
    """
    count = sum(bool(line.strip()) for line in file.read_text(encoding="utf-8", errors="replace").splitlines())
    if not count:
        raise UserError(
            f"there are no prompts in {file}",
            expected="one prompt a line",
            got="an empty file",
            remedy="write prompts, or leave --prompts out to calibrate on the model's own runs",
        )
    return count


def _quality(
    large: bool,
    prompts: Path | None,
    at: Path,
    long_sequences: bool = False,
    few: str = "",
    few_count: int = FEW_STEPS,
) -> list[str]:
    """Writes the sections of calibration, plan and gates, with samples and steps that a CPU computes in reasonable time.

    Args:
        few: why the model takes few steps; empty if it does not. few_count: that number of steps.
    """
    data = "denoise # or a file of prompts, one a line (.txt), or a folder of images"
    if prompts is not None:
        data = _quoted(_relative(prompts, at))
    modes, budget = ("precision", "static") if large else ("auto", "auto"), PlanSection().min_psnr
    why = (
        ["  # Stated modes: a search (auto) takes days on a CPU for this model. Use auto on a machine with a GPU."]
        if large
        else [
            f"  # auto: a search over sites, layers and timesteps, within the budget plan.min_psnr ({budget:g} dB by default)."
        ]
    )
    samples, steps, drawn, verified = (4, 8, 2, 4) if large else (16, 20, 8, 20)
    if few:
        steps = verified = few_count
    if prompts is not None:
        samples = min(samples, _prompts(prompts))
    lines = [
        "",
        "attention:",
        *why,
        f"  modes: {modes[0]} # auto, fp16, precision, aggressive or fp8",
        *(
            ["  # sparse: 0.03 # skips blocks that hold at most 3 % of the attention"]
            if long_sequences and large
            else []
        ),
        "",
        "layers:",
        f"  modes: {modes[1]} # of linear layers: auto, static, dynamic, weight_only or off",
        "",
        "calibration:",
        f"  data: {data}",
        f"  samples: {samples} # more samples are better and take longer",
        f"  batch: {min(samples, 4)}",
        f"  steps: {steps}" + (f" # as few as in training: {few}" if few else ""),
        f"  bins: {min(steps, 10)} # equal parts of the schedule, each with its own scales and modes",
    ]
    if few and not large:  # a search draws too
        lines += ["", "plan:", f"  steps: {few_count}"]
    lines += [
        "",
        "verify:",
        f"  samples: {drawn} # drawn in full precision and in INT8 and compared",
        f"  steps: {verified}",
        f"  on_gpu: {{samples: {4 if long_sequences else 16}, steps: {few_count if few else 20}}} "
        "# in builds that compute on a GPU",
        "  min_psnr: 20 # PSNR in dB against full precision; a build below this fails",
    ]
    return lines
