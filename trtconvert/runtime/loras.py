"""LoRAs of an engine that was built refittable: its weights are those that it was built with, and what files add to them.

An engine does not give its weights away, so they are read from the bundle's ONNX model, by the names that TensorRT has of them
(see `trtconvert.runtime.refit`). Only those that a change concerns are read, and none is kept.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from trtconvert.bundle import NAMESAKE, TRANSPOSED, unquantised_file
from trtconvert.errors import UserError
from trtconvert.runtime.int8_layers import Int8Layers
from trtconvert.weights.finite import is_finite
from trtconvert.weights.lora import Update, read_lora

if TYPE_CHECKING:
    import onnx_ir as ir

_T = TypeVar("_T")

Loras = Sequence[tuple[str | Path, float]]
"""Files, and what their differences are multiplied by."""

Source = tuple[str, int, int, float]
"""Which file, as it was, and its scale: what tells whether a weight has to be made anew."""


@dataclass(frozen=True)
class Addition:
    """What one file adds to a weight."""

    source: Source
    update: Update


Additions = dict[str, tuple[Addition, ...]]
"""By the names of weights in the state dict."""


@dataclass
class NewWeights:
    """What an engine gets.

    Attributes:
        by_name: by the names of the state dict, as `trtconvert.runtime.refit` finds what the engine has of them.
        constants: of INT8 layers in plugins, by the engine's names, on the device or on the CPU.
    """

    by_name: dict[str, Tensor] = field(default_factory=dict)
    constants: dict[str, Tensor] = field(default_factory=dict)


class BuiltWeights:
    """The weights that an engine was built with, by the names of the state dict.

    INT8 layers are quantised anew from what they were quantised from. Bundles that do not keep it, as they were built without
    engine.refittable, have 16-bit layers in refittable engines: the numbers that their integers stand for.

    Args:
        onnx: the component's model in the bundle.
        constants: of the engine, see `EngineRecord.int8_constants`.

    Attributes:
        shapes: of its floating-point weights.
        layers: the INT8 ones; None where the bundle does not keep what they were quantised from.
    """

    def __init__(self, onnx: Path, constants: Mapping[str, tuple[str, str]]) -> None:
        from trtconvert.export import storage  # ONNX tooling: loading and running a bundle does without
        from trtconvert.export.lowering import expand_layers

        model, unquantised = storage.load(onnx), unquantised_file(onnx)
        self.layers = Int8Layers(model, unquantised, constants) if unquantised.is_file() else None
        # What is read by others than INT8 layers has its name already.
        self._in_16_bits = {_state_name(name)[0] for name in model.graph.initializers}
        expand_layers(model, exact=True)
        self._places: dict[str, tuple[ir.TensorProtocol, bool]] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for initialiser, value in model.graph.initializers.items():
            tensor = value.const_value
            if tensor is None or tensor.dtype.name not in ("FLOAT", "FLOAT16", "BFLOAT16"):
                continue
            name, turned = _state_name(initialiser)
            shape = tuple(tensor.shape.numpy())
            if turned and len(shape) != 2:  # turned otherwise: no layer's
                continue
            self._places[name] = tensor, turned
            self.shapes[name] = shape[::-1] if turned else shape
        self._of_layers = set[str]()
        if self.layers is not None:
            self.shapes |= self.layers.shapes
            self._of_layers = {name for name in self.layers.exact if name in self._places} - self._in_16_bits

    def with_additions(self, name: str, wanted: Additions, device: torch.device) -> Tensor:
        """A weight with what files add to it, in the engine's type.

        Args:
            wanted: what they add, to all weights.
            device: where it is computed, in FP32; on the CPU where there is no memory for it.
        Raises:
            UserError: it leaves the range of its type.
        """
        layers, (tensor, turned) = self.layers, self._places[name]
        if layers is not None and name in self._of_layers and wanted.get(origin := layers.origin(name)):
            made = _where_there_is_room(
                lambda where: layers.exact_numbers(name, self._full([origin], wanted, where)), device
            )
            if not is_finite(made):
                raise _out_of_range(origin, wanted[origin], made.dtype)
            return made
        stored, additions = _as_torch(tensor), wanted.get(name, ())
        if not additions:
            return stored.T if turned else stored
        made, finite = _where_there_is_room(lambda where: _sum(stored, turned, additions, where), device)
        if not finite:
            raise _out_of_range(name, additions, stored.dtype)
        return made.T if turned else made

    def anew(self, names: Collection[str], wanted: Additions, device: torch.device) -> NewWeights:
        """What an engine gets for weights to which something else is added than before.

        Args:
            names: of the weights; wanted, device: see `with_additions`.
        Raises:
            UserError: see `with_additions`.
        """
        new, layers = NewWeights(), self.layers
        for name in names:
            if name in self._places and (layers is None or name not in layers.shapes or name in self._in_16_bits):
                new.by_name[name] = self.with_additions(name, wanted, device)
        if layers is None:
            return new
        for layer in layers.readers(names):
            for exact, origin in layers.exact_of(layer).items():
                if origin in names and exact in self._of_layers and exact not in new.by_name:
                    new.by_name[exact] = self.with_additions(exact, wanted, device)
            of = layers.names_of(layer)
            if any(wanted.get(name) for name in of):
                new.constants |= _where_there_is_room(
                    lambda where, layer=layer, of=of: layers.constants(layer, self._full(of, wanted, where)), device
                )
            else:
                new.constants |= layers.as_built(layer)
        return new

    def of_state(self, state: Mapping[str, Tensor], device: torch.device) -> NewWeights:
        """What an engine gets for the weights of another model like the one that it was made of.

        Args:
            state: by the names of its state dict, some or all of them; device: see `with_additions`.
        Raises:
            UserError: a weight of an INT8 layer has another shape, or is no number.
        """
        layers = self.layers
        assert layers is not None  # else nobody asks: other weights go into an engine as they are
        of_layers = {name: x.detach() for name, x in state.items() if name in layers.shapes}
        for name, x in of_layers.items():
            _refuse_unfit(name, x, layers.shapes[name])
        new = NewWeights({name: x for name, x in state.items() if name not in of_layers or name in self._in_16_bits})
        for layer in layers.readers(of_layers):
            given = [name for name in layers.names_of(layer) if name in of_layers]

            def made(where: torch.device, layer: str = layer, given: Sequence[str] = given) -> NewWeights:
                weights = {name: of_layers[name].to(where, torch.float32).contiguous() for name in given}
                exact = {
                    name: layers.exact_numbers(name, weights)
                    for name, origin in layers.exact_of(layer).items()
                    if origin in weights and name in self._of_layers
                }
                return NewWeights(exact, layers.constants(layer, weights))

            of_layer = _where_there_is_room(made, device)
            new.by_name = of_layer.by_name | new.by_name  # of tied ones the first counts
            new.constants |= of_layer.constants
        return new

    def _full(self, names: Sequence[str], wanted: Additions, device: torch.device) -> dict[str, Tensor]:
        """What INT8 layers are quantised from, FP32, with what files add to it."""
        assert self.layers is not None
        found: dict[str, Tensor] = {}
        for name in names:
            found[name] = self.layers.base(name, device)
            additions = wanted.get(name, ())
            for addition in additions:
                addition.update.add_to(found[name], addition.source[-1])
            if additions and not is_finite(found[name]):
                raise _out_of_range(name, additions, torch.float32)
        return found

    def __contains__(self, name: str) -> bool:
        return name in self._places


def _refuse_unfit(name: str, x: Tensor, shape: tuple[int, ...]) -> None:
    """
    Raises:
        UserError: a new weight of an INT8 layer has another shape, or holds what is no number.
    """
    remedy = "give the state dict of the module that was converted"
    if tuple(x.shape) != shape:
        raise UserError(
            f"the new weight '{name}' does not fit",
            expected=f"shape {list(shape)}",
            got=str(list(x.shape)),
            remedy=remedy,
        )
    if not x.is_floating_point() or not is_finite(x):
        raise UserError(
            f"the new weight '{name}' cannot be used",
            expected="finite numbers",
            got="NaN or Inf" if x.is_floating_point() else str(x.dtype).removeprefix("torch."),
            remedy=remedy,
        )


def _out_of_range(name: str, additions: Sequence[Addition], dtype: torch.dtype) -> UserError:
    return UserError(
        f"with these LoRAs the weight {name} leaves the range of the engine's type",
        expected=f"finite numbers that {str(dtype).removeprefix('torch.')} holds",
        got=", ".join(dict.fromkeys(f"{a.source[0]} at {a.source[-1]:g}" for a in additions)),
        remedy="take smaller scales",
    )


def _where_there_is_room(compute: Callable[[torch.device], _T], device: torch.device) -> _T:
    """What is computed on a device, or on the CPU where the device has no memory for it."""
    try:
        return compute(device)
    except torch.OutOfMemoryError:
        return compute(torch.device("cpu"))


def _state_name(initialiser: str) -> tuple[str, bool]:
    """The name in the state dict of a weight, and whether it lies transposed."""
    name = initialiser.removesuffix(NAMESAKE)
    return name.removesuffix(TRANSPOSED), name.endswith(TRANSPOSED)


def _sum(stored: Tensor, turned: bool, additions: Sequence[Addition], device: torch.device) -> tuple[Tensor, bool]:
    """The sum, and whether all of it is finite.

    In the order of the ONNX model's memory, which is the engine's: nothing is turned on the way.
    """
    total = stored.to(device, torch.float32, copy=True)
    for addition in additions:
        addition.update.add_to(total.T if turned else total, addition.source[-1])
    made = total.to(stored.dtype)
    return made, is_finite(made)


def files_of(onnx: Path) -> list[tuple[str, int, int, int]]:
    """What tells whether an ONNX model, or the weights beside it, are still those that were there."""
    states = [(path.name, path.stat()) for path in sorted(onnx.parent.glob(f"{onnx.name}*"))]
    return [(name, state.st_ino, state.st_mtime_ns, state.st_size) for name, state in states]


def _as_torch(tensor: ir.TensorProtocol) -> Tensor:
    array = tensor.numpy()
    if tensor.dtype.name == "BFLOAT16":
        return torch.from_numpy(array.view("int16").copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())


def additions_of(loras: Loras, target: str, shapes: Mapping[str, tuple[int, ...]], title: str) -> Additions:
    """What LoRAs add to the weights of a component.

    Args:
        target, title: see `LoraFile.updates`.
    Raises:
        UserError: they are no pairs of a file and a number, a file cannot be read, or it does not fit.
    """
    found: dict[str, list[Addition]] = defaultdict(list)
    for file, scale in _checked(loras):
        lora = read_lora(file)
        state = file.stat()
        source = (str(file.resolve()), state.st_mtime_ns, state.st_size, scale)
        for update in lora.updates(target, shapes, title):
            found[update.weight].append(Addition(source, update))
    return {name: tuple(additions) for name, additions in found.items()}


def _checked(loras: Loras) -> Iterator[tuple[Path, float]]:
    for entry in loras:
        pair: Any = entry
        try:
            file, scale = pair
            checked = Path(file), float(scale)
            if isinstance(pair, str) or not math.isfinite(checked[1]):
                raise ValueError
        except (TypeError, ValueError):
            raise UserError(
                "LoRAs are set as files with their scales",
                expected="[(file, scale), …], with numbers for scales",
                got=repr(entry),
                remedy='set_loras([("style.safetensors", 0.8)]), or set_loras([]) for none',
            ) from None
        yield checked


def changed(before: Mapping[str, Collection[Source]], wanted: Additions) -> list[str]:
    """The weights to which something else is added than before."""
    return [
        name for name in before.keys() | wanted.keys() if tuple(before.get(name, ())) != sources(wanted.get(name, ()))
    ]


def sources(additions: Sequence[Addition]) -> tuple[Source, ...]:
    """Which files, in order."""
    return tuple(addition.source for addition in additions)
