"""Published files of weights: safetensors, torch's own (.bin, .ckpt, .pt, .pth) and GGUF, whole or in shards, in variants, in FP8
or INT8 with scales. No code in a file is executed."""

from __future__ import annotations

import functools
import importlib
import json
import math
import pickle
import re
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from trtconvert.documents import safetensors_header
from trtconvert.errors import BackendUnavailable, UserError, first_problem
from trtconvert.weights.blocks import block_shape, dequantise

SAFETENSORS, TORCH, GGUF = (".safetensors", ".sft"), (".bin", ".ckpt", ".pt", ".pth"), (".gguf",)
READABLE = (*SAFETENSORS, *TORCH, *GGUF)
"""Endings of files of weights."""

_STORED = re.compile(
    r"(?:diffusion_pytorch_model|pytorch_model|model)(?:\.(?P<variant>[\w-]+?))?(?:-\d{5}-of-\d{5})?"
    r"(?:\.(?P<old_variant>[\w-]+))?\.(?P<kind>safetensors|bin)"
)
"""Names that `save_pretrained` of a model gives; older libraries put the variant behind the number of the shard."""

_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
_SCALED = (*_FP8, torch.int8)
"""Types of weights with scales; INT8 as `trtconvert quantize` writes it."""

_SCALES = (".scale_weight", ".weight_scale", ".weight_scale_inv")
"""Endings of the names of scales, after the layer's. A scale multiplies the stored weight; the last is by blocks as well."""

_OF_ACTIVATIONS = (".scale_input", ".input_scale")
"""Scales of a layer's inputs. They are for products in FP8, which this program does not make."""

_MARK = "scaled_fp8"
"""Last part of the name of a mark: the weights in FP8 beside it and below it have scales."""

_QUANTISED_OTHERWISE = (
    ".weight_scale_2",
    ".absmax",
    ".quant_map",
    ".nested_absmax",
    ".nested_quant_map",
    ".qweight",
    ".qzeros",
    ".SCB",
    ".weight_format",
)
"""Parts of weights in NVFP4, of bitsandbytes, GPTQ, AWQ and SVDQuant."""

_MADE_BY_MODELS = re.compile(r"(^|\.)(position_ids|inv_freq|masked_bias|attn_mask|num_batches_tracked|y_embedding)$")
"""Tables that models make themselves, and PixArt's embedding of no caption, which only its training uses."""

_HEADS = re.compile(r"^(lm_head|text_projection|visual_projection|vision_model|decoder)\.|(^|\.)logit_scale$")
"""Parts of models of transformers that pipelines' encoders do without."""


@dataclass(frozen=True)
class StoredWeights:
    """The files of weights in a model's folder.

    Attributes:
        files: in order; variant: in their names, or None; safetensors: False for torch's own format.
    """

    files: tuple[Path, ...]
    variant: str | None
    safetensors: bool


def stored_weights(folder: Path, variant: str | None = None) -> StoredWeights | None:
    """The weights that `save_pretrained` of a model left in a folder, None where there are none. Takes the variant that is asked
    for, else files without a variant, else the only variant; safetensors before torch's own format.

    Raises:
        UserError: there are several variants, and none was asked for.
    """
    found = _stored(folder)
    variants = list(dict.fromkeys(name for name, _ in found))
    if not variants:
        return None
    taken = next((name for name in (variant, None) if name in variants), variants[0])
    if taken not in (variant, None) and len(variants) > 1:
        raise UserError(
            f"{folder} has weights in several variants",
            expected="one of them, or files without a variant",
            got=", ".join(map(str, variants)),
            remedy=f"name one: `options: {{variant: {variants[0]}}}` under model in the recipe",
        )
    safetensors = (taken, True) in found
    return StoredWeights(tuple(found[taken, safetensors]), taken, safetensors)


def variants_of(folder: Path) -> set[str]:
    """The variants of the weights in a folder, see `stored_weights`."""
    return {variant for variant, _ in _stored(folder) if variant is not None}


def _stored(folder: Path) -> dict[tuple[str | None, bool], list[Path]]:
    """The files of `save_pretrained`, by variant and by whether they are safetensors."""
    found: dict[tuple[str | None, bool], list[Path]] = {}
    for path in sorted(folder.iterdir()):
        if (named := _STORED.fullmatch(path.name)) and path.is_file():
            key = named["variant"] or named["old_variant"], named["kind"] == "safetensors"
            found.setdefault(key, []).append(path)
    return found


def read_tensors(files: Iterable[Path]) -> dict[str, Tensor]:
    """All tensors of files of weights, on the CPU: GGUF, FP8 and INT8 as FP32 with their scales applied, others as they are.

    Raises:
        UserError: a file is missing or damaged, of an unknown kind, holds code, or is quantised in an unknown way.
        BackendUnavailable: a file is GGUF, and `gguf` is not installed.
    """
    tensors: dict[str, Tensor] = {}
    for path in files:
        tensors |= _read(path)
    return dequantised(tensors, ", ".join(dict.fromkeys(str(path) for path in files)))


def is_spare(name: str, kind: Any, ignore: Sequence[str]) -> bool:
    """Whether a model draws the same images without a tensor of its file.

    Args:
        kind: the model's class; ignore: patterns (fnmatch) of names that the user says the model does without.
    """
    head = not hasattr(kind, "load_config") and _HEADS.search(name)
    return bool(_MADE_BY_MODELS.search(name) or head) or any(fnmatch(name, pattern) for pattern in ignore)


def how_without(name: str) -> str:
    """The remedy for a weight that a model has no place for."""
    if "lora" in name:
        return (
            "save the pipeline without the LoRA (`pipe.unload_lora_weights()`), and name the LoRA's own file under loras in the "
            "recipe; or fuse it before (`pipe.fuse_lora()`)"
        )
    if "_ip." in name or "ip_adapter" in name:
        return "take the adapter out (`pipe.unload_ip_adapter()`) and save the pipeline again"
    return (
        "correct config.json or model_index.json, so that the model has a place for it; or, if it draws the same without, name "
        f"it under model: `options: {{ignore: ['{name}']}}`, where * stands for anything"
    )


def holds_scaled(files: Sequence[Path]) -> bool:
    """Whether safetensors files hold weights in FP8 or INT8, by their headers."""
    for path in files:
        if path.suffix in SAFETENSORS:
            with safe_open(path, framework="pt") as file:
                types = [file.get_slice(name).get_dtype() for name in file.keys()]  # noqa: SIM118
            if any(name == "I8" or name.startswith("F8_") for name in types):
                return True
    return False


def _read(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise UserError(
            f"there are no weights at {path}",
            expected="a file that ends with " + ", ".join(READABLE),
            got="a folder" if path.is_dir() else "no such file",
            remedy="correct the path (model.weights in a recipe), or get the file again",
        )
    refuse_pointer(path)
    suffix = path.suffix.lower()
    if suffix in SAFETENSORS:
        return _read_safetensors(path)
    if suffix in TORCH:
        return read_torch(path)
    if suffix in GGUF:
        return {name: read() for name, (_, _, read) in gguf_tensors(path).items()}
    raise unknown_kind(path)


def unknown_kind(path: Path) -> UserError:
    return UserError(
        f"{path} is no file of weights that can be read",
        expected="a name that ends with " + ", ".join(READABLE),
        got=path.suffix or "a name without an ending",
        remedy="give another file, or the folder of a model or a pipeline",
    )


def refuse_pointer(path: Path) -> None:
    """
    Raises:
        UserError: the file is a pointer to one that git has not fetched.
    """
    with path.open("rb") as file:
        if file.read(24).startswith(b"version https://git-lfs"):
            raise UserError(
                f"the weights {path} have not been fetched",
                expected="the file itself",
                got="a pointer of Git LFS to it",
                remedy="run `git lfs pull` in its folder",
            )


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        safetensors_header(path)
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except (OSError, SafetensorError, ValueError) as error:
        raise damaged(path, error) from error


def load_torch(path: Path) -> Any:
    """The content of a file that torch wrote, on the CPU. Tensors of the format since torch 1.6 are read from the disk when used.

    Raises:
        UserError: it is damaged, or holds more than tensors, numbers, texts and their containers.
    """
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        # torch names a class as `Unsupported global: GLOBAL package.Class`, and says something else of a damaged file.
        named = re.search(r"GLOBAL ([\w.]+)|(?:class|function) ([\w.]+)", str(error))
        if named is None:
            raise damaged(path, error) from error
        raise UserError(
            f"{path} holds more than weights",
            expected="tensors, numbers and texts: no code of a file is executed",
            got=f"{named[1] or named[2]}, which only code in the file can make",
            remedy="take the safetensors file of the same model; or, where you trust this one, load it with torch and save its "
            "weights alone with safetensors.torch.save_file",
        ) from error
    except (RuntimeError, EOFError, OSError, ValueError, KeyError, AttributeError) as error:
        raise damaged(path, error) from error


def read_torch(path: Path) -> dict[str, Tensor]:
    """The tensors of a file that torch wrote, see `load_torch`.

    Raises:
        UserError: it is damaged, holds more than weights, or none.
    """
    loaded = load_torch(path)
    while isinstance(loaded, Mapping) and isinstance(inner := loaded.get("state_dict"), Mapping):
        loaded = inner
    if not isinstance(loaded, Mapping) or not any(isinstance(x, Tensor) for x in loaded.values()):
        raise UserError(
            f"{path} holds no weights",
            expected="tensors by name, or a state_dict of them",
            got=f"{type(loaded).__name__} of {', '.join(map(str, list(loaded)[:5]))}"
            if isinstance(loaded, Mapping)
            else type(loaded).__name__,
            remedy="give the file of the model itself",
        )
    return {str(name): x.detach() for name, x in loaded.items() if isinstance(x, Tensor)}


def gguf_tensors(path: Path) -> dict[str, tuple[list[int], int, Callable[[], Tensor]]]:
    """The shape of each tensor of a GGUF file, its bytes in the file, and a function that reads it as FP32.

    Raises:
        BackendUnavailable: `gguf` is not installed.
        UserError: the file is damaged, or gives a tensor a shape that does not fit it. A function raises it for a quantisation
            that the installed package does not know.
    """
    try:
        gguf: Any = importlib.import_module("gguf")
    except ImportError as error:
        raise BackendUnavailable(
            "gguf is not installed",
            expected=f"the package that reads {path.name}",
            got=str(error),
            remedy="pip install gguf",
        ) from error
    try:
        reader: Any = gguf.GGUFReader(path)
    except (ValueError, OSError, IndexError, KeyError, TypeError) as error:
        raise damaged(path, error) from error

    def read(stored: Any, shape: list[int]) -> Tensor:
        try:
            x = torch.from_numpy(gguf.quants.dequantize(stored.data, stored.tensor_type).copy())
        except NotImplementedError as error:
            raise UserError(
                f"the weight {stored.name} in {path} cannot be dequantised",
                expected="a quantisation that the installed gguf knows",
                got=stored.tensor_type.name,
                remedy="pip install --upgrade gguf, or take the model in another quantisation",
            ) from error
        return x.reshape(shape)

    found: dict[str, tuple[list[int], int, Callable[[], Tensor]]] = {}
    for stored in reader.tensors:
        shape = _gguf_shape(gguf, reader, stored, path)
        found[stored.name] = shape, int(stored.n_bytes), functools.partial(read, stored, shape)
    return found


def _gguf_shape(gguf: Any, reader: Any, stored: Any, path: Path) -> list[int]:
    """The shape before the model became GGUF. A field has it where GGUF's limits forbid the shape: four dimensions, and rows of
    whole blocks."""
    own = [int(size) for size in reversed(stored.shape)]
    name = f"comfy.gguf.orig_shape.{stored.name}"
    if (said := reader.fields.get(name)) is None:
        return own
    kind = gguf.GGUFValueType
    whole = (kind.UINT8, kind.INT8, kind.UINT16, kind.INT16, kind.UINT32, kind.INT32, kind.UINT64, kind.INT64)
    of_array = said.types[1:] if said.types[0] == kind.ARRAY else said.types
    numbers = all(of in whole for of in of_array)
    shape = [int(said.parts[place][0]) for place in said.data] if numbers else []
    if not numbers or any(size < 0 for size in shape) or math.prod(shape) != math.prod(own):
        raise UserError(
            f"the shape that {path} gives for {stored.name} does not fit it",
            expected=f"whole numbers whose product is {math.prod(own):,}, as that of {own} is, in {name}",
            got=str(shape) if numbers else " of ".join(of.name.lower() for of in said.types),
            remedy="get the file again, or take the model in another form, as safetensors; or correct that field, or leave it "
            "out where the tensor has its own shape",
        )
    return shape


def damaged(path: Path, error: Exception) -> UserError:
    """The error for a file of weights that its library cannot read."""
    return UserError(
        f"the weights in {path} cannot be read",
        expected=f"a whole {path.suffix.removeprefix('.')} file",
        got=first_problem(error),
        remedy="get the file again; it is damaged, or of another kind than its name says",
    )


def dequantised(tensors: Mapping[str, Tensor], source: str) -> dict[str, Tensor]:
    """Weights in FP8 and INT8 as FP32, multiplied by their scales, which are left out. FP8 without a scale and without a mark is
    taken as it is.

    Scales are one number, one for each row of the weight, or one for each block of 128 × 128. A weight of more dimensions is the
    matrix of its first dimension and all others.

    Args:
        source: of the tensors, for messages.
    Raises:
        UserError: weights are quantised in an unknown way, or a scale is missing or does not fit its weight.
    """
    left = dict(tensors)
    refuse_other_formats(tensors, source)
    refuse_missing_scales(tensors, source)
    for name in tensors:
        if name.endswith(".comfy_quant"):
            _refuse_format(source, name, left.pop(name))
    for name, scale in tensors.items():
        weight = next((name.removesuffix(end) + ".weight" for end in _SCALES if name.endswith(end)), "")
        if weight not in tensors:
            continue
        if tensors[weight].dtype in _SCALED:
            left[weight] = _scaled(weight, tensors[weight], scale, source)
        elif not bool((scale.float() == 1).all()):
            raise _not_dequantised(source, name, f"a scale of {weight}, which is {type_name(tensors[weight].dtype)}")
        del left[name]
    for name in tensors:
        of_inputs = name.endswith(_OF_ACTIVATIONS) and name.rpartition(".")[0] + ".weight" in tensors
        if of_inputs or is_mark(name):
            left.pop(name, None)
    for name, x in left.items():
        if x.dtype in _FP8:
            left[name] = x.float()
        elif name.endswith(".weight") and not x.is_floating_point():
            raise _not_dequantised(source, name, type_name(x.dtype))
    return left


def refuse_other_formats(names: Iterable[str], source: str) -> None:
    """
    Raises:
        UserError: a name is that of a part of weights that are quantised in an unknown way.
    """
    for name in names:
        if name.endswith(_QUANTISED_OTHERWISE) or ".quant_state." in name:
            raise _not_dequantised(source, name, "a part of quantised weights")


def is_mark(name: str) -> bool:
    """Whether a tensor only says that other weights have scales."""
    return name.rpartition(".")[2] == _MARK


def refuse_missing_scales(tensors: Mapping[str, Any], source: str) -> None:
    """
    Args:
        tensors: by name, each with a `dtype` and a `shape`.
    Raises:
        UserError: a weight in FP8 lacks the scale that a mark promises.
    """
    marked = tuple(name.removesuffix(_MARK) for name in tensors if is_mark(name))
    scaled = {name.removesuffix(end) for name in tensors for end in _SCALES if name.endswith(end)}
    lacking = [
        name
        for name, x in tensors.items()
        if x.dtype in _FP8 and len(x.shape) > 1 and name.startswith(marked) and name.endswith(".weight")
        if name.removesuffix(".weight") not in scaled
    ]
    if lacking:
        layer, many = lacking[0].removesuffix(".weight"), f", and {len(lacking) - 1} more" if len(lacking) > 1 else ""
        raise UserError(
            f"a scale is missing in {source}",
            expected=f"{layer}.scale_weight or {layer}.weight_scale: the mark {_MARK} says that weights in FP8 have scales",
            got=f"{lacking[0]} in FP8 without one{many}",
            remedy="get the file again, or take the model in FP16 or BF16",
        )


def layer_of(name: str) -> str | None:
    """The layer that a scale, or a description of a weight, belongs to; None for other tensors."""
    end = next((end for end in (*_SCALES, *_OF_ACTIVATIONS, ".comfy_quant") if name.endswith(end)), None)
    return None if end is None else name.removesuffix(end)


def _scaled(name: str, weight: Tensor, scale: Tensor, source: str) -> Tensor:
    factor = scale.float()
    if factor.numel() == 1 or weight.dim() < 2:
        if factor.numel() == 1 or factor.shape == weight.shape:
            return weight.float() * (factor.reshape(()) if factor.numel() == 1 else factor)
    elif factor.numel() == factor.shape[0] == weight.shape[0]:
        return dequantise(weight, factor.reshape(-1), torch.float32)
    elif tuple(factor.shape) == block_shape(weight.shape[0], weight.shape[1:].numel()):
        return dequantise(weight, factor, torch.float32)
    raise _not_dequantised(source, name, f"{list(weight.shape)} with scales {list(scale.shape)}")


def _refuse_format(source: str, name: str, described: Tensor) -> None:
    try:
        format = json.loads(bytes(described.tolist()).decode())["format"]
    except (ValueError, KeyError, TypeError) as error:
        raise _not_dequantised(source, name, "a description that is none") from error
    if not str(format).startswith("float8_"):
        raise _not_dequantised(source, name, str(format))


def _not_dequantised(source: str, name: str, got: str) -> UserError:
    return UserError(
        f"the weights in {source} are quantised in a way that cannot be undone here",
        expected="FP32, FP16, BF16, or FP8 or INT8 with scales for a weight, its rows or its blocks of 128 × 128",
        got=f"{name}: {got}",
        remedy="take the model in one of these, or as GGUF",
    )


def type_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
