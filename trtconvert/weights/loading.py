"""Models in memory with weights that stay in INT8: `load_quantized`, and the layer that replaces linear layers.

The layer takes half the memory of 16 bits, and multiplies tokens in INT8, see `trtconvert.linear.products`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
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
from trtconvert.weights.weight_files import is_spare, type_name


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
        """ŵ [N, K] in the model's type, computed at each access: models ask for its type, and some compute with it."""
        return dequantised(self.stored, self.scale, self._like.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """
        Args:
            x: […, K] of a floating-point type.
        Returns:
            […, N] in the type of x. Where x or the bias takes gradients, and in a model that is exported or traced, x is not
            quantised.
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
    """Fill a model with the weights of `trtconvert quantize`: linear layers keep INT8, other tensors get the model's types.

    Every tensor of the model's state is replaced by one without gradients. The model's own weights may be on the meta device, as
    `accelerate.init_empty_weights` leaves them.

    Args:
        model: a module, or a pipeline of diffusers with modules of the names of the folder's own folders.
        folder: of the same model.
    Returns:
        The model. Its linear layers are `Int8Linear` where INT8 is stored.
    Raises:
        UserError: the folder is not quantised, damaged, or of another model. The model stays as it was.
    """
    source = open_source(Path(folder))
    if plain := [path for part in source.parts for path in part.files if METADATA not in part.metadata[path]]:
        raise UserError(
            f"{folder} is not quantised",
            expected="weights in INT8 that `trtconvert quantize` wrote",
            got=f"{plain[0].name}, which other programs wrote",
            remedy=f"run `trtconvert quantize {folder} -o OUT` and load OUT; or load {folder} as other weights",
        )
    plans = [_plan(module, part, source) for module, part in _pairs(model, source)]
    for plan in plans:
        plan.load()
    return model


def _pairs(model: Any, source: Source) -> list[tuple[nn.Module, Part]]:
    """Modules with the parts of a source that they are filled from."""
    if isinstance(model, nn.Module):
        if len(source.parts) == 1:
            return [(model, source.parts[0])]
        names = [part.folder for part in source.parts]
        raise UserError(
            f"{source.place} has several models",
            expected=f"the pipeline of these models in place of a {type(model).__name__}, or one of the folders",
            got=", ".join(names),
            remedy=f"load_quantized(pipe, …), or load_quantized(pipe.{names[-1]}, …/{names[-1]})",
        )
    pairs = []
    for part in source.parts:
        module, kind = getattr(model, part.folder, None) if part.folder else None, type(model).__name__
        if not isinstance(module, nn.Module):
            raise UserError(
                f"{kind} has no model {part.folder}" if part.folder else f"{source.place} is no pipeline",
                expected=f"a pipeline's folder for a {kind}, and a model for each folder in it",
                got=type(module).__name__ if part.folder else "one model",
                remedy="load the models one by one: load_quantized(pipe.transformer, …/transformer)",
            )
        pairs.append((module, part))
    return pairs


@dataclass(frozen=True)
class _Plan:
    """Which stored tensor goes where in a model.

    Attributes:
        entries: file and place in the file of every tensor; int8: those that are weights in INT8, with the granularity of scales.
        names: of each stored tensor that the model has, all names in the model: a tensor, and a module, may be there twice.
    """

    model: nn.Module
    entries: Mapping[str, tuple[Path, Entry]]
    int8: Mapping[str, StoredGranularity]
    names: Mapping[str, list[str]]

    def load(self) -> None:
        # An INT8 layer takes over the bias of its linear layer, so that weights come last.
        for stored_as, names in sorted(self.names.items(), key=lambda item: item[0] in self.int8):
            holders = dict.fromkeys(_holder(self.model, name) for name in names)
            (module, attribute), *others = holders
            before: Tensor = getattr(module, attribute)
            device = torch.device("cpu") if before.device.type == "meta" else before.device
            x = read_entry(*self.entries[stored_as])
            if stored_as in self.int8:
                scale = read_entry(*self.entries[stored_as + SCALE])
                if type(module) is nn.Linear and attribute == "weight" and not others:
                    layer = Int8Linear(x.to(device), scale.to(device), module.bias, before.dtype)
                    layer.train(self.model.training)
                    for name in names:
                        parent, _, last = name.removesuffix(".weight").rpartition(".")
                        setattr(self.model.get_submodule(parent), last, layer)
                    continue
                x = dequantise(x, scale, before.dtype)
            x = x.to(device, before.dtype)
            if isinstance(before, nn.Parameter):
                x = nn.Parameter(x, requires_grad=False)
            for holder, attribute in holders:  # a shared tensor stays shared
                if isinstance(x, nn.Parameter):
                    holder._parameters[attribute] = x
                else:
                    holder._buffers[attribute] = x


def _holder(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    module, _, attribute = name.rpartition(".")
    return model.get_submodule(module), attribute


def _plan(model: nn.Module, part: Part, source: Source) -> _Plan:
    kind = type(model).__name__
    if any(isinstance(module, Int8Linear) for module in model.modules()):
        raise UserError(
            f"{kind} has INT8 layers already",
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
    stored = entries.keys() - {name + SCALE for name in int8}
    tensors = _shared_names(model)
    known = {name for names in tensors for name in names}
    remedy = f"load the model of {source.place}'s own configuration, as `trtconvert quantize` was given it"
    for name in stored - known:
        if not is_spare(name, type(model), ()):
            raise UserError(
                f"{source.place} has {name}, and {kind} has no place for it",
                expected=f"tensors of {kind}",
                got=f"{len(stored - known)} others",
                remedy=did_you_mean(name, known, remedy),
            )
    by_stored: dict[str, list[str]] = {}
    for names in tensors:
        stored_as = next((name for name in names if name in stored), None)
        if stored_as is None:
            raise UserError(
                f"{source.place} lacks {names[0]}, which {kind} needs",
                expected=f"{len(tensors)} tensors",
                got=str(len(stored)),
                remedy=remedy,
            )
        shape = tuple(getattr(*_holder(model, names[0])).shape)
        if shape != entries[stored_as][1].shape:
            raise UserError(
                f"{stored_as} in {source.place} does not fit {kind}",
                expected=str(list(shape)),
                got=str(list(entries[stored_as][1].shape)),
                remedy=remedy,
            )
        by_stored[stored_as] = names
    return _Plan(model, entries, int8, by_stored)


def _flaw(entries: Mapping[str, tuple[Path, Entry]], name: str, granularity: StoredGranularity) -> str:
    """What a weight in INT8 lacks; empty where it is whole."""
    if lost := next((part for part in (name, name + SCALE) if part not in entries), ""):
        return f"no {lost}"
    (_, weight), (path, scale) = entries[name], entries[name + SCALE]
    if weight.dtype != torch.int8 or len(weight.shape) < 2:
        return f"{type_name(weight.dtype)} {list(weight.shape)}"
    rows, columns = weight.shape[0], math.prod(weight.shape[1:])
    shape = (rows,) if granularity == "channel" else block_shape(rows, columns)
    if scale.dtype != torch.float32 or scale.shape != shape:
        return f"{type_name(scale.dtype)} {list(scale.shape)} for {list(weight.shape)}"
    return "" if is_finite(read_entry(path, scale)) else "scales that are NaN or Inf"


def _shared_names(model: nn.Module) -> list[list[str]]:
    """The names of each tensor of a model's state."""
    names: dict[int, list[str]] = {}
    for name, x in model.state_dict(keep_vars=True).items():
        names.setdefault(id(x), []).append(name)
    return list(names.values())
