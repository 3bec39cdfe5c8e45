"""Models in memory with weights that stay in INT8: `load_quantized`, and the layer that it puts in place of linear ones.

The layer keeps half the memory of 16 bits, and multiplies tokens in INT8 with it, see `trtconvert.linear.products`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trtconvert.errors import UserError, did_you_mean
from trtconvert.linear.products import dequantised, float_linear, int8_linear, is_traced
from trtconvert.weights.blocks import block_shape, dequantise
from trtconvert.weights.conversion import StoredGranularity, records_of
from trtconvert.weights.finite import is_finite
from trtconvert.weights.quantisation import SCALE
from trtconvert.weights.sources import METADATA, Part, Source, open_source
from trtconvert.weights.tensor_files import Entry, read_entries, read_entry
from trtconvert.weights.weight_files import is_spare


class Int8Linear(nn.Module):
    """A linear layer whose weight is stored in INT8.

    Args:
        stored: [N, K] INT8; scale: FP32, [⌈N/128⌉, ⌈K/128⌉] or [N], see `blocks`.
        bias: [N] or None; dtype: of `weight`, which follows the module's.

    Attributes:
        stored, scale, bias: as given. The scale stays FP32, whatever type the model is brought to.
    """

    stored: Tensor
    scale: Tensor
    _like: Tensor

    def __init__(self, stored: Tensor, scale: Tensor, bias: nn.Parameter | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.out_features, self.in_features = stored.shape
        self.register_buffer("stored", stored)
        self.register_buffer("scale", scale)
        self.register_buffer("_like", torch.empty(0, dtype=dtype, device=stored.device), persistent=False)
        self.bias = bias

    @property
    def weight(self) -> Tensor:
        """ŵ [N, K] in the model's type, made anew: models ask for its type, and some compute with it themselves."""
        return dequantised(self.stored, self.scale, self._like.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """
        Args:
            x: […, K] of a floating-point type.
        Returns:
            […, N] in its type. Where x or the bias takes gradients, and in a model that is exported or traced, ŵ is multiplied
            with x as it is.
        """
        learns = x.requires_grad or (self.bias is not None and self.bias.requires_grad)
        if (learns and torch.is_grad_enabled()) or is_traced():
            return float_linear(x, self.stored, self.scale, self.bias)
        return int8_linear(x, self.stored, self.scale, self.bias)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Int8Linear:
        scale = self.scale
        super()._apply(fn, recurse)
        self.scale = scale.to(self.stored.device)
        return self

    def extra_repr(self) -> str:
        kind = "block" if self.scale.dim() == 2 else "channel"
        return f"in_features={self.in_features}, out_features={self.out_features}, scales by {kind}"


def load_quantized(model: Any, folder: Path | str) -> Any:
    """Fill a model with what `trtconvert quantize` wrote: linear layers keep INT8, all else is brought to the model's types.

    Every tensor of the model's state is replaced by one without gradients, so that its weights may have been on the meta
    device, as `accelerate.init_empty_weights` has them.

    Args:
        model: a module, or a pipeline of diffusers with modules of the names of the folder's own folders.
        folder: of the same model.
    Returns:
        The model, whose linear layers are `Int8Linear` where INT8 is stored.
    Raises:
        UserError: the folder is not quantised or damaged, or is of another model; the model is as it was then.
    """
    source = open_source(Path(folder))
    if plain := [path for part in source.parts for path in part.files if METADATA not in part.metadata[path]]:
        raise UserError(
            f"{folder} is not quantised",
            expected="weights in INT8 that `trtconvert quantize` wrote",
            got=f"{plain[0].name}, which it has not written",
            remedy=f"run `trtconvert quantize {folder} -o OUT` and load OUT; or load it as any other",
        )
    plans = [_plan(module, part, source) for module, part in _pairs(model, source)]
    for plan in plans:
        plan.load()
    return model


def _pairs(model: Any, source: Source) -> list[tuple[nn.Module, Part]]:
    if isinstance(model, nn.Module):
        if len(source.parts) == 1:
            return [(model, source.parts[0])]
        names = [part.folder for part in source.parts]
        raise UserError(
            f"{source.place} has several models",
            expected=f"the pipeline that they are of, in place of a {type(model).__name__}, or one of the folders",
            got=", ".join(names),
            remedy=f"load_quantized(pipe, …), or load_quantized(pipe.{names[-1]}, …/{names[-1]})",
        )
    pairs = []
    for part in source.parts:
        module = getattr(model, part.folder, None) if part.folder else None
        if not isinstance(module, nn.Module):
            raise UserError(
                f"{type(model).__name__} has no model {part.folder}"
                if part.folder
                else f"{source.place} is no pipeline",
                expected=f"a pipeline's folder for a {type(model).__name__}, and a model for each folder in it",
                got=type(module).__name__ if part.folder else "one model",
                remedy="load the models one by one: load_quantized(pipe.transformer, …/transformer)",
            )
        pairs.append((module, part))
    return pairs


@dataclass(frozen=True)
class _Plan:
    """What goes where in a model.

    Attributes:
        entries: file and place in it of every tensor; int8: the weights among them that are stored so, with what has a scale.
        places: of each tensor of the model, by its name in the files, all modules that hold it, and its name there.
        names: all that it has in the model: modules may be there twice.
    """

    model: nn.Module
    entries: Mapping[str, tuple[Path, Entry]]
    int8: Mapping[str, StoredGranularity]
    places: Mapping[str, list[tuple[nn.Module, str]]]
    names: Mapping[str, list[str]]

    def read(self, name: str) -> Tensor:
        return read_entry(*self.entries[name])

    def load(self) -> None:
        # The layers that take a linear one's place take its bias with them, which has to be there.
        for name, holders in sorted(self.places.items(), key=lambda item: item[0] in self.int8):
            module, attribute = holders[0]
            before: Tensor = getattr(module, attribute)
            device = torch.device("cpu") if before.device.type == "meta" else before.device
            if name in self.int8:
                stored, scale = self.read(name), self.read(name + SCALE)
                if type(module) is nn.Linear and attribute == "weight" and len(holders) == 1:
                    layer = Int8Linear(stored.to(device), scale.to(device), module.bias, before.dtype)
                    for one in self.names[name]:
                        self._replace(one.removesuffix("weight").removesuffix("."), layer)
                    continue
                x = dequantise(stored, scale, before.dtype)
            else:
                x = self.read(name).to(before.dtype)
            x = nn.Parameter(x.to(device), requires_grad=False) if isinstance(before, nn.Parameter) else x.to(device)
            for holder, attribute in holders:  # what was one tensor stays one
                if isinstance(x, nn.Parameter):
                    holder._parameters[attribute] = x
                else:
                    holder._buffers[attribute] = x

    def _replace(self, name: str, layer: nn.Module) -> None:
        parent, _, last = name.rpartition(".")
        layer.train(self.model.training)
        setattr(self.model.get_submodule(parent), last, layer)


def _plan(model: nn.Module, part: Part, source: Source) -> _Plan:
    """
    Raises:
        UserError: names or shapes are not the model's.
    """
    if any(isinstance(module, Int8Linear) for module in model.modules()):
        raise UserError(
            f"{type(model).__name__} has INT8 layers already",
            expected="a model as its class makes it",
            got="one that `load_quantized` has filled",
            remedy="make it anew, also on the meta device, and fill that",
        )
    entries: dict[str, tuple[Path, Entry]] = {}
    int8: dict[str, StoredGranularity] = {}
    for path in part.files:
        found, metadata = read_entries(path)
        entries |= {entry.name: (path, entry) for entry in found}
        if (records := records_of(metadata, path)) is not None:
            int8 |= {name: records.granularity for name, record in records.tensors.items() if record.stored == "int8"}
    for name, granularity in int8.items():
        if flaw := _flaw(entries, name, granularity):
            raise UserError(
                f"{name} in {source.place} is damaged",
                expected=f"INT8 numbers, and finite scales in FP32 for each {granularity}",
                got=flaw,
                remedy="quantise the model again",
            )
    scales = {name + SCALE for name in int8}
    places, aliases = _places(model)
    same: dict[str, list[str]] = {}
    for name, first in aliases.items():
        same.setdefault(first, []).append(name)
    remedy = f"load the model of {source.place}'s own configuration, as `trtconvert quantize` was given it"
    for name in entries.keys() - scales:
        if name not in aliases and not is_spare(name, type(model), ()):
            raise UserError(
                f"{source.place} has {name}, and {type(model).__name__} has no place for it",
                expected=f"tensors of {type(model).__name__}",
                got=f"{len(entries.keys() - scales - aliases.keys())} others",
                remedy=did_you_mean(name, aliases, remedy),
            )
    by_stored: dict[str, list[tuple[nn.Module, str]]] = {}
    for first, holders in places.items():
        stored_as = next((name for name in same[first] if name in entries), None)
        if stored_as is None:
            raise UserError(
                f"{source.place} lacks {first}, which {type(model).__name__} needs",
                expected=f"{len(places)} tensors",
                got=f"{len(entries) - len(scales)}",
                remedy=remedy,
            )
        shape = tuple(getattr(*holders[0]).shape)
        if shape != entries[stored_as][1].shape:
            raise UserError(
                f"{stored_as} in {source.place} does not fit {type(model).__name__}",
                expected=str(list(shape)),
                got=str(list(entries[stored_as][1].shape)),
                remedy=remedy,
            )
        by_stored[stored_as] = holders
    names = {name: same[aliases[name]] for name in by_stored}
    return _Plan(model, entries, int8, by_stored, names)


def _flaw(entries: Mapping[str, tuple[Path, Entry]], name: str, granularity: StoredGranularity) -> str:
    """What a weight in INT8 lacks; empty of one that is whole."""
    if lost := next((part for part in (name, name + SCALE) if part not in entries), ""):
        return f"no {lost}"
    (_, weight), (path, scale) = entries[name], entries[name + SCALE]
    if weight.dtype != torch.int8 or len(weight.shape) < 2:
        return f"{str(weight.dtype).removeprefix('torch.')} {list(weight.shape)}"
    rows, columns = weight.shape[0], math.prod(weight.shape[1:])
    shape = (rows,) if granularity == "channel" else block_shape(rows, columns)
    if scale.dtype != torch.float32 or scale.shape != shape:
        return f"{str(scale.dtype).removeprefix('torch.')} {list(scale.shape)} for {list(weight.shape)}"
    return "" if is_finite(read_entry(path, scale)) else "scales that are NaN or Inf"


def _places(model: nn.Module) -> tuple[dict[str, list[tuple[nn.Module, str]]], dict[str, str]]:
    """By the first name of each tensor that a state dict has, all modules that hold it; and the first name of each name."""
    places: dict[str, list[tuple[nn.Module, str]]] = {}
    aliases: dict[str, str] = {}
    seen: dict[int, str] = {}
    for name, module, attribute in _named(model):
        first = seen.setdefault(id(getattr(module, attribute)), name)
        places.setdefault(first, [])
        if all(holder is not module or other != attribute for holder, other in places[first]):
            places[first].append((module, attribute))
        aliases[name] = first
    return places, aliases


def _named(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    for prefix, module in model.named_modules(remove_duplicate=False):
        own = [name for name, x in module._parameters.items() if x is not None]
        own += [n for n, x in module._buffers.items() if x is not None and n not in module._non_persistent_buffers_set]
        for name in own:
            yield f"{prefix}.{name}" if prefix else name, module, name
