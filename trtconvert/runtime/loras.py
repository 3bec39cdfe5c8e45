"""LoRAs of an engine that was built refittable: its weights are those that it was built with, and what files add to them.

An engine does not give its weights away, so they are read from the bundle's ONNX model, by the names that TensorRT has of them
(see `trtconvert.runtime.refit`). Only those that a change concerns are read, and none is kept.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trtconvert.bundle import NAMESAKE, TRANSPOSED
from trtconvert.errors import UserError
from trtconvert.weights.finite import is_finite
from trtconvert.weights.lora import Update, read_lora

if TYPE_CHECKING:
    import onnx_ir as ir

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


class BuiltWeights:
    """The weights that an engine was built with, by the names of the state dict.

    Those of INT8 layers are the numbers that their integers stand for: refittable engines hold them in 16 bits.

    Args:
        onnx: the component's model in the bundle.

    Attributes:
        shapes: of its floating-point weights.
    """

    def __init__(self, onnx: Path) -> None:
        from trtconvert.export import storage  # ONNX tooling: loading and running a bundle does without
        from trtconvert.export.lowering import expand_layers

        model = storage.load(onnx)
        expand_layers(model, exact=True)
        self._places: dict[str, tuple[ir.TensorProtocol, bool]] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for initialiser, value in model.graph.initializers.items():
            tensor = value.const_value
            if tensor is None or tensor.dtype.name not in ("FLOAT", "FLOAT16", "BFLOAT16"):
                continue
            turned = initialiser.removesuffix(NAMESAKE)
            name = turned.removesuffix(TRANSPOSED)
            shape = tuple(tensor.shape.numpy())
            if turned != name and len(shape) != 2:  # turned otherwise: no layer's
                continue
            self._places[name] = tensor, turned != name
            self.shapes[name] = shape[::-1] if turned != name else shape

    def with_additions(self, name: str, additions: Sequence[Addition], device: torch.device) -> Tensor:
        """A weight with what files add to it, in the engine's type on the CPU.

        Args:
            device: where it is computed, in FP32; on the CPU where there is no memory for it.
        Raises:
            UserError: it leaves the range of its type.
        """
        tensor, turned = self._places[name]
        stored = _as_torch(tensor)
        if not additions:
            return stored.T if turned else stored
        try:
            made, finite = _sum(stored, turned, additions, device)
        except torch.OutOfMemoryError:
            made, finite = _sum(stored, turned, additions, torch.device("cpu"))
        if not finite:
            files = ", ".join(dict.fromkeys(f"{a.source[0]} at {a.source[-1]:g}" for a in additions))
            raise UserError(
                f"with these LoRAs the weight {name} leaves the range of the engine's type",
                expected=f"finite numbers that {str(stored.dtype).removeprefix('torch.')} holds",
                got=files,
                remedy="take smaller scales",
            )
        return made.T if turned else made

    def __contains__(self, name: str) -> bool:
        return name in self._places


def _sum(stored: Tensor, turned: bool, additions: Sequence[Addition], device: torch.device) -> tuple[Tensor, bool]:
    """The sum on the CPU, and whether all of it is finite.

    In the order of the ONNX model's memory, which is the engine's: nothing is turned on the way.
    """
    total = stored.to(device, torch.float32, copy=True)
    for addition in additions:
        addition.update.add_to(total.T if turned else total, addition.source[-1])
    made = total.to(stored.dtype)
    return made.cpu(), is_finite(made)


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
