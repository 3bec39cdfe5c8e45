"""Reads one file with the weights of a whole pipeline, or of its denoiser, in the layout of the code that trained it.

The weights are split by model and renamed by the rules of diffusers' `from_single_file`; configurations come from a folder.
Nothing is downloaded.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from trtconvert.errors import UserError, first_line
from trtconvert.models.saved import denoiser_among, download_of_configurations, is_saved_pipeline
from trtconvert.weights.weight_files import how_without, is_spare, read_tensors

_DENOISER = ("model.diffusion_model.", "diffusion_model.")
"""Prefixes of a denoiser's weights in files with several models, and in some files with the denoiser alone."""

_VAE = ("first_stage_model.", "vae.")

_OPEN_CLIP = ("cond_stage_model.model.", "conditioner.embedders.1.model.", "conditioner.embedders.0.model.")
"""Prefixes of text encoders in OpenCLIP's layout: of Stable Diffusion 2, SDXL, SDXL's refiner."""

_TEXT = {
    ("text_encoder", "CLIP"): (
        "cond_stage_model.transformer.",
        "conditioner.embedders.0.transformer.",
        "text_encoders.clip_l.transformer.",
        "cond_stage_model.model.",
    ),
    ("text_encoder_2", "CLIP"): (
        "conditioner.embedders.1.model.",
        "conditioner.embedders.0.model.",
        "text_encoders.clip_g.transformer.",
    ),
    ("text_encoder_2", "T5"): ("text_encoders.t5xxl.transformer.",),
    ("text_encoder_3", "T5"): ("text_encoders.t5xxl.transformer.",),
}
"""Prefixes of a text encoder's weights, by its name in the pipeline and its class; the first prefix present counts."""

_OF_TRAINING = re.compile(
    r"(model_ema|loss|first_stage_model\.loss)\.|(betas|alphas_cumprod(_prev)?|logvar|global_step|denoiser\.sigmas|edm_mean|edm_std"
    r"|sqrt_\w+|log_one_minus_alphas_cumprod|posterior_\w+|lvlb_weights|v_pred|ztsnr|scale_factor|\w*scaled_fp8)$"
)
"""Left-overs of training: averages, tables of the schedule, marks."""

_TAKEN_OUT = re.compile(
    r"per_channel_statistics\.(channel|mean-of-means|mean-of-stds)$|(^|\.)(logvar|pos_embedder)\.|(^|\.)accum_\w+$|_extra_state$"
    r"|(video|audio)_embeddings_connector\.|(^|\.)norm_final\.weight$|rope\.inv_freq$"
    r"|(^|\.)spiece_model$"
)
"""Names that diffusers' rules remove: tables that its classes compute, counters of training, parts of other models (LTX, Cosmos);
and a tokenizer that ComfyUI stores beside its text encoder."""


def states_of(
    file: Path, folder: Path, kinds: Mapping[str, Any], denoiser: str | None, ignore: Sequence[str]
) -> dict[str, dict[str, Tensor]]:
    """Returns the tensors of each model in a file, by the model's own names.

    Args:
        folder: of the pipeline, with a configuration for each model.
        kinds: the class of each model.
        denoiser: name of the denoiser among them.
        ignore: patterns of names in the file that the models may do without.
    Raises:
        UserError: the file cannot be read, holds another model's weights, or weights that no model takes.
    """
    from diffusers.loaders.single_file_utils import SD_2_TEXT_ENCODER_KEYS_TO_IGNORE

    tensors = read_tensors([file])
    name = denoiser_among(kinds, denoiser, f"the pipeline in {folder}")
    _refuse_other_prediction(file, folder, tensors)
    parts = _taken_apart(tensors, name, kinds)
    states: dict[str, dict[str, Tensor]] = {}
    for part, of in parts.items():
        states[part], used = _renamed(file, folder, part, kinds[part], of)
        if more := sorted(
            key
            for key in of.keys() - used - set(SD_2_TEXT_ENCODER_KEYS_TO_IGNORE)
            if not (_OF_TRAINING.match(key) or _TAKEN_OUT.search(key) or is_spare(key, kinds[part], ignore))
        ):
            raise UserError(
                f"{file} holds more than the models of {folder} take",
                expected=f"for {part} only the weights of {kinds[part].__name__}",
                got=f"{len(more)} more, {more[0]} the first of them",
                remedy=how_without(more[0]),
            )
    return states


def looks_like(file: Path) -> str:
    """Returns the remedy for a file that comes without the configurations of its pipeline.

    Raises:
        UserError: the file cannot be read.
    """
    from diffusers.loaders.single_file_utils import (
        CHECKPOINT_KEY_NAMES,
        DIFFUSERS_DEFAULT_PIPELINE_PATHS,
        infer_diffusers_model_type,
    )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        tensors = _whole_prefix(read_tensors([file]))
        kind = infer_diffusers_model_type(tensors)
        if (
            kind == "v1" and CHECKPOINT_KEY_NAMES[kind] not in tensors
        ):  # diffusers' answer for a layout that it does not know
            raise KeyError(kind)
        repository = DIFFUSERS_DEFAULT_PIPELINE_PATHS[kind]["pretrained_model_name_or_path"]
    except (KeyError, IndexError, AttributeError, UnboundLocalError, ValueError):  # diffusers does not know the layout
        return "add `config: FOLDER` under model, the folder of a pipeline of its kind, as `save_pretrained` wrote it"
    try:
        cached = snapshot_download(repository, local_files_only=True)
    except (LocalEntryNotFoundError, OSError, ValueError):
        cached = ""
    if cached and is_saved_pipeline(Path(cached)):
        return f"add `config: {cached}` under model: it is {repository}, if the file is {kind} as it seems"
    return (
        f"add `config: FOLDER` under model; if the file is {kind} as it seems, `{download_of_configurations(repository)}` gets "
        "one, of small files"
    )


def _whole_prefix(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the tensors with diffusers' prefix of a denoiser, where all have the shorter prefix."""
    short = _DENOISER[1]
    if tensors and all(name.startswith(short) for name in tensors):
        return {f"model.{name}": x for name, x in tensors.items()}
    return dict(tensors)


def _refuse_other_prediction(file: Path, folder: Path, tensors: Mapping[str, Tensor]) -> None:
    path = folder / "scheduler" / "scheduler_config.json"
    if "v_pred" in tensors and path.is_file():
        predicted = json.loads(path.read_text()).get("prediction_type", "epsilon")
        if predicted != "v_prediction":
            raise UserError(
                f"the scheduler of {folder} does not fit the model in {file}",
                expected="prediction_type v_prediction: the file has the mark v_pred",
                got=f"prediction_type {predicted}",
                remedy=f'write "prediction_type": "v_prediction" in {path}'
                + (', and "rescale_betas_zero_snr": true' if "ztsnr" in tensors else ""),
            )


def _taken_apart(
    tensors: Mapping[str, Tensor], denoiser: str, kinds: Mapping[str, Any]
) -> dict[str, dict[str, Tensor]]:
    """Splits a file's tensors by model, with their names in the file. The denoiser gets those of no other model."""
    tensors = _whole_prefix(tensors)
    prefixes: dict[str, tuple[str, ...]] = {"vae": _VAE} if "vae" in kinds else {}
    for (name, kind), candidates in _TEXT.items():
        if name in kinds and kind in kinds[name].__name__:
            found = [prefix for prefix in candidates if any(key.startswith(prefix) for key in tensors)]
            if found:
                prefixes[name] = (found[0],)
    # A pipeline without text encoders or a VAE does not use those in the file.
    unused = tuple(
        prefix for of in (_VAE, *_TEXT.values()) for prefix in of if prefix not in sum(prefixes.values(), ())
    )
    parts: dict[str, dict[str, Tensor]] = {}
    for key, x in tensors.items():
        part = next((name for name, starts in prefixes.items() if key.startswith(starts)), denoiser)
        if part == denoiser and key.startswith(unused):
            continue
        parts.setdefault(part, {})[key] = x
    return parts


def _renamed(
    file: Path, folder: Path, part: str, kind: Any, tensors: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], set[str]]:
    """Returns the tensors by the names of a model of diffusers or transformers, and the names in the file that were used."""
    try:
        if hasattr(kind, "load_config"):
            rename = _diffusers_renaming(kind, dict(kind.load_config(folder / part, local_files_only=True)), tensors)
        else:
            rename = _text_encoder_renaming(
                kind, kind.config_class.from_pretrained(folder / part, local_files_only=True), tensors
            )
        used = _used_names(rename, tensors)
        state = {name: x for name, x in rename(dict(tensors)).items() if x is not None}
    except (KeyError, IndexError, AttributeError, TypeError, ValueError, RuntimeError) as error:
        known = [f"{name} {list(x.shape)}" for name, x in list(tensors.items())[:3]]
        raise UserError(
            f"{file} does not hold the weights of {part} as {kind.__name__} has them",
            expected=f"a layout that diffusers can read, of the size that {folder / part} describes",
            got=f"{', '.join(known)}, …: {first_line(error)}",
            remedy="give the model.config of the pipeline that the file is for, or a file in another layout",
        ) from error
    return state, used


Rename = Callable[[dict[str, Tensor]], dict[str, Any]]


def _diffusers_renaming(kind: Any, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Rename:
    """Returns diffusers' renaming of a file's weights for one of its classes; no renaming where they have the class's names."""
    import diffusers
    from accelerate import init_empty_weights
    from diffusers.loaders.single_file_model import SINGLE_FILE_LOADABLE_CLASSES

    with init_empty_weights():
        own = kind.from_config(config).state_dict()
    stripped = {name.removeprefix(_DENOISER[0]) for name in tensors}
    if len(own.keys() & stripped) > len(own) // 2:
        return lambda given: {name.removeprefix(_DENOISER[0]): x for name, x in given.items()}
    named = next((name for name in SINGLE_FILE_LOADABLE_CLASSES if issubclass(kind, getattr(diffusers, name))), None)
    if named is None:
        raise ValueError(f"diffusers reads no file of another layout for {kind.__name__}")
    convert = SINGLE_FILE_LOADABLE_CLASSES[named]["checkpoint_mapping_fn"]
    takes_config = "config" in inspect.signature(convert).parameters
    return lambda given: convert(checkpoint=given, **({"config": config} if takes_config else {}))


def _text_encoder_renaming(kind: Any, config: Any, tensors: Mapping[str, Tensor]) -> Rename:
    """Returns the renaming for a text encoder: all of its weights have one prefix."""
    from diffusers.loaders.single_file_utils import convert_open_clip_checkpoint

    prefix = next(prefix for of in _TEXT.values() for prefix in of if next(iter(tensors)).startswith(prefix))

    def rename(given: dict[str, Tensor]) -> dict[str, Any]:
        if prefix in _OPEN_CLIP:
            return convert_open_clip_checkpoint(SimpleNamespace(config=config), given, prefix=prefix)
        renamed = {name.removeprefix(prefix): x for name, x in given.items()}
        if kind.__name__.endswith("WithProjection") and "text_projection.weight" not in renamed:
            # All-in-one files of SD 3 leave out CLIP-L's projection, which is the identity.
            renamed["text_projection.weight"] = torch.eye(config.projection_dim, config.hidden_size)
        return renamed

    return rename


class _Named(Tensor):
    """A tensor that records the weights of a file that it was computed from, through splits, joins and transposes."""

    sources: frozenset[str]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = super().__torch_function__(func, types, args, kwargs or {})
        names = frozenset().union(*(x.sources for x in _named_in((args, kwargs or {}))))
        for x in _named_in(made):
            x.sources = names
        return made


def _named_in(values: Any) -> Iterable[_Named]:
    from torch.utils._pytree import tree_leaves

    return [x for x in tree_leaves(values) if isinstance(x, _Named)]


def _used_names(rename: Rename, tensors: Mapping[str, Tensor]) -> set[str]:
    """Returns the names of a file's weights that reach a renaming's result; the rest was dropped. Nothing is computed."""
    named: dict[str, Tensor] = {}
    for name, x in tensors.items():
        named[name] = traced = torch.empty(x.shape, dtype=x.dtype, device="meta").as_subclass(_Named)
        traced.sources = frozenset([name])  # type: ignore[attr-defined]
    return set().union(*(x.sources for x in _named_in(list(rename(named).values()))))
