"""LoRAs of an engine that was built refittable: its weights are those that it was built with, and what files add to them.

An engine does not give its weights away, so they are read from the bundle's ONNX model, by the names that TensorRT has of them
(see `trtconvert.runtime.refit`). Only those that a change concerns are read, in parts, and none is kept.
"""

from __future__ import annotations

import gc
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from trtconvert.bundle import NAMESAKE, TRANSPOSED, unquantised_file
from trtconvert.errors import UserError
from trtconvert.runtime.int8_layers import Int8Layers, products_of, source_of
from trtconvert.runtime.reading import Source as Numbers
from trtconvert.runtime.reading import Spent, read_ahead
from trtconvert.weights.adapters import Update
from trtconvert.weights.finite import finite, is_finite
from trtconvert.weights.lora import read_lora

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


LEAST_PART, LARGEST_PART = 2**26, 2**28
"""Bytes that TensorRT is given at once, of the device's memory: each time costs something, and more gains little."""

Additions = dict[str, tuple[Addition, ...]]
"""By the names of weights in the state dict."""


@dataclass
class NewWeights:
    """What an engine gets.

    Attributes:
        by_name: by the names of the state dict, as `trtconvert.runtime.refit` finds what the engine has of them.
        constants: of INT8 layers in plugins, by the engine's names, on the device or on the CPU.
        checks: whether numbers are finite, where they were computed, and the error where they are not.
    """

    by_name: dict[str, Tensor] = field(default_factory=dict)
    constants: dict[str, Tensor] = field(default_factory=dict)
    checks: list[tuple[Tensor, Callable[[], UserError]]] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in (*self.by_name.values(), *self.constants.values()))

    def add(self, other: NewWeights) -> None:
        self.by_name |= other.by_name
        self.constants |= other.constants
        self.checks += other.checks

    def check(self) -> None:
        """Waits for the device.

        Raises:
            UserError: some are not finite.
        """
        for is_so, error in self.checks:
            if not is_so:
                raise error()
        self.checks.clear()


@dataclass(frozen=True)
class _Job:
    """Some of an engine's weights.

    Attributes:
        sources: what they are computed from.
        compute: them, of these on one device.
    """

    sources: Sequence[Numbers]
    compute: Callable[[Sequence[Tensor]], NewWeights]

    def done(self, given: Sequence[Tensor]) -> NewWeights:
        """Where the numbers are that are given, or on the CPU where there is no memory for it."""
        try:
            return self.compute(given)
        except torch.OutOfMemoryError:
            return self.compute([x.cpu() for x in given])


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

        with _no_search_for_rings():
            self._open(storage.load(onnx), unquantised_file(onnx), constants)

    def _open(self, model: ir.Model, unquantised: Path, constants: Mapping[str, tuple[str, str]]) -> None:
        from trtconvert.export.lowering import expand_layers

        self.layers = Int8Layers(model, unquantised, constants) if unquantised.is_file() else None
        # What is read by others than INT8 layers has its name already.
        self._in_16_bits = {_state_name(name)[0] for name in model.graph.initializers}
        products = products_of(model, {layer for layer, _ in constants.values()})
        self._products = {name: x for name, x in products.items() if name not in self._in_16_bits}
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
        new = NewWeights()
        for part in _made([self._weight(name, wanted)], device, 0, Spent()):
            new.add(part)
            return new.by_name[name]
        raise AssertionError  # there is one job

    def anew(
        self,
        names: Collection[str],
        wanted: Additions,
        device: torch.device,
        limit: int | None = None,
        spent: Spent | None = None,
    ) -> Generator[NewWeights]:
        """What an engine gets for weights to which something else is added than before, in parts.

        Args:
            names: of the weights; wanted, device: see `with_additions`.
            limit: bytes of a part, about; by default what the device has room for, see `part_bytes`.
            spent: counts bytes and seconds.
        Raises:
            UserError: see `with_additions`.
        """
        return _made(
            self._jobs(names, wanted), device, part_bytes(device) if limit is None else limit, spent or Spent()
        )

    def _jobs(self, names: Collection[str], wanted: Additions) -> Iterator[_Job]:
        layers, given = self.layers, set[str]()
        for name in sorted(names):  # as files have them
            if name in self._places and (layers is None or name not in layers.shapes or name in self._in_16_bits):
                given.add(name)
                yield self._weight(name, wanted)
        if layers is None:
            return
        for layer in layers.readers(names):
            for exact, origin in layers.exact_of(layer).items():
                if origin in names and exact in self._of_layers and exact not in given:
                    given.add(exact)
                    yield self._weight(exact, wanted)
            for together in layers.together(layer, names):
                if any(wanted.get(name) for name in together):
                    yield self._quantised(layer, together, wanted)
                else:
                    yield self._as_built(layer, together)

    def _weight(self, name: str, wanted: Additions) -> _Job:
        """Of one that is not in a plugin, with what is added to it."""
        layers, (tensor, turned) = self.layers, self._places[name]
        if layers is not None and name in self._of_layers and wanted.get(origin := layers.origin(name)):

            def requantised(given: Sequence[Tensor]) -> NewWeights:
                *sources, factor = given
                full = self._full([origin], wanted, sources)
                made = layers.exact_numbers(name, full.by_name, factor)
                check = _check(made, origin, wanted[origin])
                return NewWeights({name: _laid(made, turned)}, {}, [*full.checks, check])

            return _Job([*self._sources([origin], wanted), layers.exact_factor(name)], requantised)
        product, additions = self._products.get(name), wanted.get(name, ())
        sources = [source_of(tensor)] if product is None else product.sources

        def summed(given: Sequence[Tensor]) -> NewWeights:
            rest = iter(given)
            stored = next(rest)
            if product is not None:
                stored = product.numbers(stored, next(rest), next(rest))
            elif turned:
                stored = stored.T
            if not additions:
                return NewWeights({name: _laid(stored, turned)})
            made = _sum(stored, additions, rest)
            return NewWeights({name: _laid(made, turned)}, {}, [_check(made, name, additions)])

        return _Job([*sources, *_tensors(additions)], summed)

    def _quantised(self, layer: str, names: Sequence[str], wanted: Additions) -> _Job:
        """Of a layer in a plugin, with what is added to its weight and bias."""
        assert self.layers is not None
        layers = self.layers

        def compute(given: Sequence[Tensor]) -> NewWeights:
            *sources, factor, offset = given
            full = self._full(names, wanted, sources)
            return NewWeights({}, layers.constants(layer, full.by_name, (factor, offset)), full.checks)

        return _Job([*self._sources(names, wanted), *layers.channels(layer)], compute)

    def _as_built(self, layer: str, names: Sequence[str]) -> _Job:
        """Of a layer in a plugin, as the bundle has it."""
        assert self.layers is not None
        layers, tables = self.layers, self.layers.tables(layer, names)

        def compute(given: Sequence[Tensor]) -> NewWeights:
            return NewWeights({}, layers.as_built(layer, dict(zip(tables, given, strict=True))))

        return _Job(list(tables.values()), compute)

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
                    name: layers.exact_numbers(name, weights, layers.exact_factor(name).to(where))
                    for name, origin in layers.exact_of(layer).items()
                    if origin in weights and name in self._of_layers
                }
                channels = [x.to(where) for x in layers.channels(layer)]
                return NewWeights(exact, layers.constants(layer, weights, channels))

            of_layer = _where_there_is_room(made, device)
            new.by_name = of_layer.by_name | new.by_name  # of tied ones the first counts
            new.constants |= of_layer.constants
        return new

    def _sources(self, names: Sequence[str], wanted: Additions) -> list[Numbers]:
        """Of what INT8 layers are quantised from."""
        assert self.layers is not None
        found: list[Numbers] = []
        for name in names:
            found += [self.layers.place(name), *_tensors(wanted.get(name, ()))]
        return found

    def _full(self, names: Sequence[str], wanted: Additions, given: Sequence[Tensor]) -> NewWeights:
        """What INT8 layers are quantised from, FP32, with what files add to it, of such sources."""
        full, rest = NewWeights(), iter(given)
        for name in names:
            base, additions = next(rest), wanted.get(name, ())
            full.by_name[name] = _sum(base, additions, rest, torch.float32)
            if additions:
                full.checks.append(_check(full.by_name[name], name, additions))
        return full

    def __contains__(self, name: str) -> bool:
        return name in self._places


@contextmanager
def _no_search_for_rings() -> Iterator[None]:
    """Python looks through all objects again and again while so many are made as a model has: it takes as long as making them."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


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


def part_bytes(device: torch.device) -> int:
    """Of what TensorRT is given at once: of a GPU's free memory a small part."""
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
    return min(max(free // 16, LEAST_PART), LARGEST_PART)


def _made(jobs: Iterable[_Job], device: torch.device, limit: int, spent: Spent) -> Generator[NewWeights]:
    """What jobs give, in parts of so many bytes, about."""
    part, size = NewWeights(), 0
    for job, given in read_ahead(((job, job.sources) for job in jobs), device, limit // 4, spent):
        with spent.on("computing"):
            new = job.done(given)
            size += new.nbytes
            part.add(new)
            del given, new
            if size >= limit:
                part.check()
        if size >= limit:
            yield part
            part, size = NewWeights(), 0
    if size:
        part.check()
        yield part


def _sum(
    stored: Tensor, additions: Sequence[Addition], given: Iterator[Tensor], dtype: torch.dtype | None = None
) -> Tensor:
    """A weight with what files add to it, summed in FP32. It lies as the weight does, which may be transposed.

    Args:
        given: the tensors of the additions, on its device.
        dtype: of the sum; by default the weight's.
    """
    total = stored.to(torch.float32, copy=True)
    for addition in additions:
        addition.update.of(given).add_to(total, addition.source[-1])
    return total.to(dtype or stored.dtype)


def _laid(weight: Tensor, turned: bool) -> Tensor:
    """The same as the engine has it in memory."""
    return weight.T.contiguous().T if turned else weight


def _tensors(additions: Iterable[Addition]) -> list[Tensor]:
    return [x for addition in additions for x in addition.update.tensors]


def _check(made: Tensor, name: str, additions: Sequence[Addition]) -> tuple[Tensor, Callable[[], UserError]]:
    """See `NewWeights.checks`."""
    dtype = made.dtype
    return finite(made), lambda: _out_of_range(name, additions, dtype)


def files_of(onnx: Path) -> list[tuple[str, int, int, int]]:
    """What tells whether an ONNX model, or the weights beside it, are still those that were there."""
    states = [(path.name, path.stat()) for path in sorted(onnx.parent.glob(f"{onnx.name}*"))]
    return [(name, state.st_ino, state.st_mtime_ns, state.st_size) for name, state in states]


def additions_of(
    loras: Loras, target: str, shapes: Mapping[str, tuple[int, ...]], title: str, known: Additions | None = None
) -> Additions:
    """What LoRAs add to the weights of a component, in memory of its own: files may change.

    Args:
        target, title: see `LoraFile.updates`.
        known: of files that were read before, which are not read again as long as they are as they were.
    Raises:
        UserError: they are no pairs of a file and a number, a file cannot be read, or it does not fit.
    """
    read: dict[tuple[str, int, int], dict[int, Update]] = defaultdict(dict)
    for addition in (addition for additions in (known or {}).values() for addition in additions):
        read[addition.source[:3]][id(addition.update)] = addition.update  # once, whatever its scales
    found: dict[str, list[Addition]] = defaultdict(list)
    for file, scale in _checked(loras):
        state = file.stat() if file.is_file() else None  # before it is read: what is written later has another
        key: tuple[str, int, int] = (
            ("", 0, 0) if state is None else (str(file.resolve()), state.st_mtime_ns, state.st_size)
        )
        if key not in read:
            updates = read_lora(file).in_memory().updates(target, shapes, title)
            read[key] = {id(update): update for update in updates}
        for update in read[key].values():
            found[update.weight].append(Addition((key[0], key[1], key[2], scale), update))
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


def changed(before: Additions, wanted: Additions) -> set[str]:
    """The weights to which something else is added than before."""

    def sources(additions: Additions, name: str) -> list[Source]:
        return [addition.source for addition in additions.get(name, ())]

    return {name for name in before.keys() | wanted.keys() if sources(before, name) != sources(wanted, name)}
