"""Computes the weights of a refittable engine with LoRAs: the built weights plus the differences in LoRA files.

An engine does not return its weights, so they are read from the bundle's ONNX model, by TensorRT's names (see
`trtconvert.runtime.refit`). Only changed weights are read, in parts, and none is kept.
"""

from __future__ import annotations

import gc
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trtconvert.bundle import unquantised_file, weight_of
from trtconvert.errors import UserError
from trtconvert.runtime.int8_layers import Int8Layers, products_of, source_of, weights_in_constants
from trtconvert.runtime.reading import Source as Numbers
from trtconvert.runtime.reading import Spent, read_ahead
from trtconvert.runtime.refit import unfit_weight, weight_in_constants
from trtconvert.weights.adapters import Update
from trtconvert.weights.finite import finite, is_finite
from trtconvert.weights.lora import read_lora

if TYPE_CHECKING:
    import onnx_ir as ir

Loras = Sequence[tuple[str | Path, float]]
"""LoRA files with their scales."""

Source = tuple[str, int, int, float]
"""Path, modification time, size and scale of a LoRA; a weight whose sources stay the same is not computed again."""


@dataclass(frozen=True)
class Addition:
    """The difference that one file adds to a weight."""

    source: Source
    update: Update


LEAST_PART, LARGEST_PART = 2**26, 2**28
"""Bounds of a part in bytes of device memory: every refit has a cost, and larger parts gain little."""

Additions = dict[str, tuple[Addition, ...]]
"""Additions by the names of weights in the state dict."""


@dataclass
class NewWeights:
    """New weights for an engine.

    Attributes:
        by_name: weights by the names of the state dict.
        constants: constants of INT8 layers in plugins, by the engine's names, on the device or on the CPU.
        checks: a tensor that is True for finite weights, on their device, and the error for other weights.
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
        """Wait for the device and check the weights.

        Raises:
            UserError: a weight is not finite.
        """
        for is_finite_, error in self.checks:
            if not is_finite_:
                raise error()
        self.checks.clear()


@dataclass(frozen=True)
class _Job:
    """The computation of some weights.

    Attributes:
        sources: its inputs.
        compute: computes the weights from the inputs on one device.
    """

    sources: Sequence[Numbers]
    compute: Callable[[Sequence[Tensor]], NewWeights]

    def done(self, given: Sequence[Tensor]) -> NewWeights:
        """Compute on the device of the inputs, or on the CPU if the device has no memory."""
        try:
            return self.compute(given)
        except torch.OutOfMemoryError:
            return self.compute([x.cpu() for x in given])


class BuiltWeights:
    """The built weights of an engine, by the names of the state dict.

    INT8 layers are quantised again from unquantised weights. Bundles that were built without engine.refittable do not keep those;
    their refittable engines compute these layers in 16 bits from dequantised weights.

    Args:
        onnx: the component's model in the bundle.
        constants: see `EngineRecord.int8_constants`.

    Attributes:
        shapes: shapes of the floating-point weights.
        layers: the INT8 layers; None if the bundle does not keep their unquantised weights.
    """

    def __init__(self, onnx: Path, constants: Mapping[str, tuple[str, str]]) -> None:
        from trtconvert.export import storage  # ONNX tooling, which loading and running a bundle do not need

        with _without_garbage_collection():
            self._open(storage.load(onnx), unquantised_file(onnx), constants)

    def _open(self, model: ir.Model, unquantised: Path, constants: Mapping[str, tuple[str, str]]) -> None:
        from trtconvert.export.lowering.layers import expand_layers

        self.layers = Int8Layers(model, unquantised, constants) if unquantised.is_file() else None
        self._in_constants = weights_in_constants(model, unquantised)
        # Weights that other nodes than INT8 layers read are initialisers already.
        self._in_16_bits = {weight_of(name)[0] for name in model.graph.initializers}
        products = products_of(model, {layer for layer, _ in constants.values()})
        self._products = {name: x for name, x in products.items() if name not in self._in_16_bits}
        expand_layers(model, exact=True)
        self._places: dict[str, tuple[ir.TensorProtocol, bool]] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for initialiser, value in model.graph.initializers.items():
            tensor = value.const_value
            if tensor is None or tensor.dtype.name not in ("FLOAT", "FLOAT16", "BFLOAT16"):
                continue
            name, turned = weight_of(initialiser)
            shape = tuple(tensor.shape.numpy())
            if turned and len(shape) != 2:  # not the transposed weight of a layer
                continue
            self._places[name] = tensor, turned
            self.shapes[name] = shape[::-1] if turned else shape
        self._of_layers = set[str]()
        if self.layers is not None:
            self.shapes |= self.layers.shapes
            self._of_layers = {name for name in self.layers.exact if name in self._places} - self._in_16_bits
        self.shapes |= self._in_constants

    def refuse_in_constants(self, names: Iterable[str]) -> None:
        """Raise UserError for a weight of an INT8 layer that constants of the engine were computed from too."""
        for name in names:
            if name in self._in_constants:
                raise weight_in_constants(name)

    def with_additions(self, name: str, wanted: Additions, device: torch.device) -> Tensor:
        """Return a weight with its additions, in the engine's type.

        Args:
            wanted: additions of all weights.
            device: device of the FP32 sum; the CPU is used if the device has no memory.
        Raises:
            UserError: the weight leaves the range of its type.
        """
        (new,) = _made([self._weight(name, wanted)], device, 0, Spent())
        return new.by_name[name]

    def anew(
        self, names: Collection[str], wanted: Additions, device: torch.device, spent: Spent | None = None
    ) -> Generator[NewWeights]:
        """Yield new weights with changed additions, in parts.

        Args:
            names: names of the weights; wanted, device: see `with_additions`.
            spent: counts bytes and seconds.
        Raises:
            UserError: see `with_additions`.
        """
        return _made(self._jobs(names, wanted), device, part_bytes(device), spent or Spent())

    def _jobs(self, names: Collection[str], wanted: Additions) -> Iterator[_Job]:
        layers, given = self.layers, set[str]()
        for name in sorted(names):  # in the order of the file
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
        """Make the job of a weight outside of plugins, with its additions."""
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
        """Make the job of a layer in a plugin, with additions to its weight and bias."""
        assert self.layers is not None
        layers = self.layers

        def compute(given: Sequence[Tensor]) -> NewWeights:
            *sources, factor, offset = given
            full = self._full(names, wanted, sources)
            return NewWeights({}, layers.constants(layer, full.by_name, (factor, offset)), full.checks)

        return _Job([*self._sources(names, wanted), *layers.channels(layer)], compute)

    def _as_built(self, layer: str, names: Sequence[str]) -> _Job:
        """Make the job of a layer in a plugin with the bundle's tables."""
        assert self.layers is not None
        layers, tables = self.layers, self.layers.tables(layer, names)

        def compute(given: Sequence[Tensor]) -> NewWeights:
            return NewWeights({}, layers.as_built(layer, dict(zip(tables, given, strict=True))))

        return _Job(list(tables.values()), compute)

    def of_state(self, state: Mapping[str, Tensor], device: torch.device) -> NewWeights:
        """Return new weights of an engine for the state dict of a fine-tuned model.

        Args:
            state: all or some weights of the state dict; device: see `with_additions`.
        Raises:
            UserError: a weight of an INT8 layer has another shape, is not finite, or cannot be replaced alone.
        """
        self.refuse_in_constants(state)
        layers = self.layers
        assert layers is not None  # callers check this
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

            try:
                of_layer = made(device)
            except torch.OutOfMemoryError:
                of_layer = made(torch.device("cpu"))
            new.by_name = of_layer.by_name | new.by_name  # the first of tied weights counts
            new.constants |= of_layer.constants
        return new

    def _sources(self, names: Sequence[str], wanted: Additions) -> list[Numbers]:
        """Return the sources of unquantised weights and their additions."""
        assert self.layers is not None
        found: list[Numbers] = []
        for name in names:
            found += [self.layers.place(name), *_tensors(wanted.get(name, ()))]
        return found

    def _full(self, names: Sequence[str], wanted: Additions, given: Sequence[Tensor]) -> NewWeights:
        """Compute unquantised FP32 weights with their additions from the sources."""
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
def _without_garbage_collection() -> Iterator[None]:
    """Turn off the garbage collector, which takes as long as reading a model with many objects."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def _refuse_unfit(name: str, x: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(x.shape) != shape:
        raise unfit_weight(name, f"shape {list(shape)}", str(list(x.shape)))
    if not x.is_floating_point() or not is_finite(x):
        got = "NaN or Inf" if x.is_floating_point() else str(x.dtype).removeprefix("torch.")
        raise unfit_weight(name, "finite numbers", got)


def _out_of_range(name: str, additions: Sequence[Addition], dtype: torch.dtype) -> UserError:
    return UserError(
        f"with these LoRAs the weight {name} leaves the range of the engine's type",
        expected=f"finite numbers in the range of {str(dtype).removeprefix('torch.')}",
        got=", ".join(dict.fromkeys(f"{a.source[0]} at {a.source[-1]:g}" for a in additions)),
        remedy="take smaller scales",
    )


def part_bytes(device: torch.device) -> int:
    """Return the size of a part: a small share of the GPU's free memory."""
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
    return min(max(free // 16, LEAST_PART), LARGEST_PART)


def _made(jobs: Iterable[_Job], device: torch.device, limit: int, spent: Spent) -> Generator[NewWeights]:
    """Run jobs and yield their weights in parts of about `limit` bytes."""
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
    """Add the additions to a weight in FP32. The memory layout stays that of the weight, which may be transposed.

    Args:
        given: tensors of the additions, on the weight's device.
        dtype: type of the result; default: the weight's.
    """
    total = stored.to(torch.float32, copy=True)
    for addition in additions:
        addition.update.of(given).add_to(total, addition.source[-1])
    return total.to(dtype or stored.dtype)


def _laid(weight: Tensor, turned: bool) -> Tensor:
    """Return a weight in the memory layout of the engine."""
    return weight.T.contiguous().T if turned else weight


def _tensors(additions: Iterable[Addition]) -> list[Tensor]:
    return [x for addition in additions for x in addition.update.tensors]


def _check(made: Tensor, name: str, additions: Sequence[Addition]) -> tuple[Tensor, Callable[[], UserError]]:
    """See `NewWeights.checks`."""
    dtype = made.dtype
    return finite(made), lambda: _out_of_range(name, additions, dtype)


def files_of(onnx: Path) -> list[tuple[str, int, int, int]]:
    """Return the identities of an ONNX model's files, to find out whether they were replaced."""
    states = [(path.name, path.stat()) for path in sorted(onnx.parent.glob(f"{onnx.name}*"))]
    return [(name, state.st_ino, state.st_mtime_ns, state.st_size) for name, state in states]


def additions_of(
    loras: Loras, target: str, shapes: Mapping[str, tuple[int, ...]], title: str, known: Additions | None = None
) -> Additions:
    """Read the additions of LoRA files to a component's weights into memory.

    Args:
        target, title: see `LoraFile.updates`.
        known: additions of files that were read before; unchanged files are not read again.
    Raises:
        UserError: `loras` is not a list of pairs of file and number, or a file cannot be read or does not fit.
    """
    read: dict[tuple[str, int, int], dict[int, Update]] = defaultdict(dict)
    for addition in (addition for additions in (known or {}).values() for addition in additions):
        read[addition.source[:3]][id(addition.update)] = addition.update  # one update for all scales
    found: dict[str, list[Addition]] = defaultdict(list)
    for file, scale in _checked(loras):
        state = file.stat() if file.is_file() else None  # taken before reading, so that later writes are noticed
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
    entries: Any = loras
    for pair in entries if isinstance(entries, Iterable) else [entries]:
        try:
            file, scale = pair
            checked = Path(file), float(scale)
            if isinstance(pair, str) or not math.isfinite(checked[1]):
                raise ValueError
        except (TypeError, ValueError):
            raise UserError(
                "set_loras takes files with their scales",
                expected="[(file, scale), …] with numbers as scales",
                got=repr(pair),
                remedy='call set_loras([("style.safetensors", 0.8)]), or set_loras([]) for no LoRA',
            ) from None
        yield checked


def changed(before: Additions, wanted: Additions) -> set[str]:
    """Return the weights whose additions differ."""

    def sources(additions: Additions, name: str) -> list[Source]:
        return [addition.source for addition in additions.get(name, ())]

    return {name for name in before.keys() | wanted.keys() if sources(before, name) != sources(wanted, name)}
