"""Lets pipelines use a denoiser that applies guidance inside.

A pipeline calls its model with the conditions of both halves, in one call or two, and computes u + s · (c − u) itself. Here it
gets uncomputed predictions. The sum reveals, at every step, which half is which and the scale s; then the denoiser runs once. If
the pipeline uses a half in another way, the denoiser runs for that half alone with the scale 1, and the half becomes an ordinary
tensor.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from trtconvert.errors import UserError, warn
from trtconvert.guidance import FusedGuidance
from trtconvert.runtime.batches import AnyBatch
from trtconvert.runtime.signature import rows_each, shape_like

_aten = torch.ops.aten


class Halves:
    """The calls of a pipeline to a denoiser that applies guidance inside.

    Args:
        denoiser: takes named tensors; timestep: name of the timestep; guidance: the denoiser's guidance.
        model: name of the pipeline's model in messages.
        of_steps: the denoiser with skipped steps; default: `denoiser`.
    """

    def __init__(
        self,
        denoiser: Callable[..., Tensor],
        timestep: str,
        guidance: FusedGuidance,
        model: str,
        of_steps: Callable[..., Tensor] | None = None,
    ) -> None:
        self._of_steps = of_steps or denoiser
        self._denoiser, self.timestep, self._guidance, self._model = denoiser, timestep, guidance, model
        # A call without guidance may have more rows than the engine takes samples.
        self._any = AnyBatch(denoiser) if hasattr(denoiser, "signature") else denoiser  # type: ignore[arg-type]
        self._compared: set[tuple[Any, ...]] = set()
        self._told = False

    def prediction(self, named: Mapping[str, Tensor], sample: Tensor, timestep: Tensor) -> Tensor:
        """Return the uncomputed prediction of all rows of a call.

        Args:
            named: the denoiser's inputs, with a timestep for each row.
            sample: the noisy sample as passed, with the type and device of the prediction.
            timestep: the timestep as passed.
        """
        first = next(x for name, x in named.items() if name != self.timestep)
        if first.dim() != len(self._guidance.output) or not len(first):
            return self._denoiser(**self._guidance.inputs(named, named, timestep))  # raises the error
        shape = shape_like(self._guidance.output, first)
        # Inference tensors have no version counter, so the call keeps copies.
        kept = {name: x.clone() if x.is_inference() else x for name, x in named.items()}
        first = next(x for name, x in kept.items() if name != self.timestep)
        call = _Call(self, kept, first, timestep, sample.dtype)
        return Prediction.of(_Half(_Rows(call, 0, shape[0]), tuple(shape), sample.dtype))

    def shared(self, name: str) -> bool:
        """Return whether both halves share an input."""
        return name not in self._guidance.record.negative

    def run(self, negative: _Rows, conditional: _Rows, scale: Tensor) -> Tensor:
        """Compute the guided prediction."""
        return self._called(self._of_steps, negative, conditional, scale)

    def run_alone(self, rows: _Rows) -> Tensor:
        """Compute the prediction of rows without guidance."""
        scale = torch.ones(rows.count, dtype=torch.float32, device=rows.first.device)
        prediction = self._called(self._any, rows, rows, scale)
        if not self._told:
            self._told = True
            warn(
                f"the pipeline uses predictions of the converted {self._model} outside the sum of guidance: each such call "
                "computes both halves; remedy: build with engine.guidance: separate if the pipeline always does so"
            )
        return prediction

    def _called(self, denoiser: Callable[..., Tensor], negative: _Rows, conditional: _Rows, scale: Tensor) -> Tensor:
        for rows in (negative, conditional):
            rows.call.require_unchanged()
        return denoiser(**self._guidance.inputs(negative.named, conditional.named, scale))

    def belong_together(self, negative: _Rows, conditional: _Rows) -> bool:
        """Return whether rows are two halves of the same samples.

        For halves of one call on a GPU this is compared once per shape, because the comparison waits for the device.
        """
        pairs = [(name, x, conditional.named[name]) for name, x in negative.named.items()]
        if any(x.shape != y.shape or x.dtype != y.dtype for _, x, y in pairs):
            return False
        ones = (negative.start, negative.count) == (conditional.start, conditional.count)
        at_once = ones and _is_same(negative.call.timestep, conditional.call.timestep)
        known = {self.timestep} if at_once else set()  # both calls of a step get the same tensor
        common = [(x, y) for name, x, y in pairs if self.shared(name) and name not in known and not _is_same(x, y)]
        if not common:
            return True
        within = (negative.call is conditional.call, negative.start, conditional.start, negative.first.shape)
        if within in self._compared:
            return True
        if negative.first.is_cuda and torch.cuda.is_current_stream_capturing():
            return within[0]
        same = all(torch.equal(x, y) for x, y in common)
        if same and within[0] and negative.first.is_cuda:
            self._compared.add(within)
        return same


@dataclass(eq=False)
class _Call:
    """A call of the pipeline.

    Attributes:
        named: its tensors; first: the noisy samples; timestep: as passed; dtype: type of the prediction.
        alone: computed predictions without guidance, by rows.
        each: rows per sample of inputs that are not shared.

    Raises:
        UserError: an input does not have rows for the noisy samples.
    """

    halves: Halves
    named: dict[str, Tensor]
    first: Tensor
    timestep: Tensor
    dtype: torch.dtype
    alone: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    each: dict[str, int] = field(init=False)
    _versions: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        halves, count = self.halves, self.first.shape[0]
        own = {name: x for name, x in self.named.items() if not halves.shared(name) or x is self.first}
        self.each = {halves.timestep: 1} | {name: rows_each(name, x, count) for name, x in own.items()}
        self._versions = {name: x._version for name, x in self._counted()}

    def _counted(self) -> list[tuple[str, Tensor]]:
        """Return the caller's own tensors, without copies of inference tensors."""
        return [(name, x) for name, x in self.named.items() if not x.is_inference()]

    def require_unchanged(self) -> None:
        """Check that the caller has not written into the inputs since the call."""
        if changed := [name for name, x in self._counted() if self._versions[name] != x._version]:
            raise UserError(
                f"the pipeline wrote into '{changed[0]}' before it added up both halves of guidance",
                expected="unchanged inputs until then",
                got="changed inputs",
                remedy="build with engine.guidance: separate",
            )


@dataclass(frozen=True)
class _Rows:
    """The rows `start` to `stop` of a call. The call does not refer to them: a cycle would keep tensors for many steps."""

    call: _Call
    start: int
    stop: int

    @property
    def count(self) -> int:
        return self.stop - self.start

    @cached_property
    def named(self) -> dict[str, Tensor]:
        """Inputs of the rows."""
        each, whole = self.call.each, self.count == self.call.first.shape[0]
        return {
            name: x if whole or not (n := each.get(name)) else x[self.start * n : self.stop * n]
            for name, x in self.call.named.items()
        }

    @property
    def first(self) -> Tensor:
        """Noisy samples of the rows."""
        return self.call.first[self.start : self.stop]

    def alone(self) -> Tensor:
        """Return the prediction without guidance, computed once."""
        found, place = self.call.alone, (self.start, self.stop)
        if place not in found:
            found[place] = self.call.halves.run_alone(self)
        return found[place]


Slices = tuple[tuple[int, int, int], ...]
"""Slices of a prediction, each with dimension, start and end."""


@dataclass(frozen=True)
class _Half:
    """The prediction of some rows, or a slice of it, times `weight`."""

    rows: _Rows
    shape: tuple[int, ...]
    dtype: torch.dtype
    slices: Slices = ()
    weight: float = 1.0

    @property
    def device(self) -> torch.device:
        return self.rows.first.device

    def value(self) -> Tensor:
        found = self.of(self.rows.alone()).contiguous()  # the uncomputed tensor has contiguous strides
        return found if self.weight == 1 else found * self.weight

    def is_of(self, other: _Half) -> bool:
        """Return whether both are the same slice of the same rows, with any weights."""
        return self.rows == other.rows and self.slices == other.slices

    def pairs_with(self, other: _Half) -> bool:
        """Return whether both are the same slice of two halves of the same samples."""
        fits = self.slices == other.slices and self.shape == other.shape and self.rows != other.rows
        halves = self.rows.call.halves
        return fits and halves is other.rows.call.halves and halves.belong_together(self.rows, other.rows)

    def of(self, prediction: Tensor) -> Tensor:
        """Take the slice of the rows' whole prediction."""
        for dim, start, end in self.slices:
            prediction = prediction.narrow(dim, start, end - start)
        return prediction.to(self.device, self.rows.call.dtype).to(self.dtype)


@dataclass(frozen=True)
class _Shift:
    """The shift of guidance, factor · (c − u).

    Attributes:
        factor: a number, a scalar tensor, or a tensor [B, 1, …].
    """

    negative: _Half
    conditional: _Half
    dtype: torch.dtype
    factor: float | Tensor = 1.0

    @property
    def shape(self) -> tuple[int, ...]:
        return self.negative.shape

    @property
    def device(self) -> torch.device:
        return self.negative.device

    def value(self) -> Tensor:
        return (self.factor * (self.conditional.value() - self.negative.value())).to(self.dtype)

    def added_to(self, half: _Half) -> Tensor | None:
        """Return the guided prediction if `half` is one of the two halves; else None."""
        if half.weight != 1:
            return None
        if half.is_of(self.negative):
            return self._guided(self.factor, half)
        if half.is_of(self.conditional):
            return self._guided(1 + self.factor, half)  # c + s · (c − u) = u + (1 + s) · (c − u)
        return None

    def _guided(self, scale: float | Tensor, half: _Half) -> Tensor:
        negative, conditional = self.negative.rows, self.conditional.rows
        device, count = negative.first.device, negative.count
        if isinstance(scale, Tensor):
            scales = scale.detach().to(device, torch.float32).reshape(-1).expand(count)
        else:
            scales = torch.full((count,), float(scale), dtype=torch.float32, device=device)
        dtype = torch.promote_types(self.dtype, half.dtype)
        return replace(half, dtype=dtype).of(negative.call.halves.run(negative, conditional, scales))


class Prediction(Tensor):
    """An uncomputed prediction."""

    _part: _Half | _Shift
    _numbers: Tensor | None = None

    @classmethod
    def of(cls, part: _Half | _Shift) -> Prediction:
        made: Any = Tensor._make_wrapper_subclass(cls, part.shape, dtype=part.dtype, device=part.device)
        made._part = part
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        """Apply the rule of an operation, or compute the prediction. Raises UserError if the operation writes into it."""
        named = kwargs or {}
        rule = _RULES.get(func)
        if all(x._numbers is None for x in tree_leaves((args, named)) if isinstance(x, Prediction)):
            if rule is not None and (found := rule(*args, **named)) is not None:
                return found
            if rule is None and (found := func.decompose(*args, **named)) is not NotImplemented:
                return found  # operations such as chunk arrive composite in inference mode
        given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | named
        written = [a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        if any(isinstance(x, Prediction) for x in tree_leaves([given.get(name) for name in written])):
            raise UserError(
                "the pipeline writes into a prediction before the sum of guidance",
                expected="a pipeline that computes negative + scale * (conditional - negative)",
                got=str(func),
                remedy="build with engine.guidance: separate",
            )
        args, named = tree_map_only(Prediction, Prediction.computed, (args, named))
        return func(*args, **named)

    def computed(self) -> Tensor:
        """Return the numbers. They are kept, because callers may write into views of them."""
        if self._numbers is None:
            self._numbers = self._part.value()
        return self._numbers

    # Methods that do not pass through __torch_dispatch__. ---------------------------------------------------------------

    def numpy(self, *, force: bool = False) -> Any:
        return self.computed().numpy(force=force)

    def __array__(self, *args: Any) -> Any:
        return self.computed().__array__(*args)

    def tolist(self) -> Any:
        return self.computed().tolist()

    def data_ptr(self) -> int:
        return self.computed().data_ptr()

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return copy.deepcopy(self.computed(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.computed().__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"{type(self).__name__}(shape {list(self.shape)}, not computed)"


# Rules that keep predictions uncomputed. Each returns None if it does not apply. -----------------------------------------


def _narrowed(part: _Half, dim: int, start: int, end: int) -> Prediction:
    dim = dim % len(part.shape)
    shape = (*part.shape[:dim], end - start, *part.shape[dim + 1 :])
    if dim:
        return Prediction.of(replace(part, shape=shape, slices=(*part.slices, (dim, start, end))))
    first = part.rows.start
    return Prediction.of(replace(part, shape=shape, rows=replace(part.rows, start=first + start, stop=first + end)))


def _slice(
    x: Prediction, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Prediction | None:
    if step != 1 or not isinstance(x._part, _Half):
        return None
    low, high, _ = slice(start, end).indices(x._part.shape[dim])
    return _narrowed(x._part, dim, low, high) if low < high else None


def _split_sizes(x: Prediction, sizes: Sequence[int], dim: int = 0) -> list[Prediction] | None:
    if not isinstance(x._part, _Half) or 0 in sizes:
        return None
    starts = [sum(sizes[:place]) for place in range(len(sizes))]
    return [_narrowed(x._part, dim, start, start + size) for start, size in zip(starts, sizes, strict=True)]


def _split(x: Prediction, size: int, dim: int = 0) -> list[Prediction] | None:
    whole = x._part.shape[dim]
    return _split_sizes(x, [min(size, whole - start) for start in range(0, whole, size)], dim) if size > 0 else None


def _to(x: Prediction, **named: Any) -> Prediction | None:
    dtype = named.pop("dtype", None) or x.dtype
    named.pop("non_blocking", None)
    asked = {name: value for name, value in named.items() if value is not None}
    if asked.pop("device", x.device) != x.device or asked or not dtype.is_floating_point:
        return None
    return Prediction.of(replace(x._part, dtype=dtype))


def _same(x: Prediction) -> Prediction:
    return Prediction.of(x._part)


def _subtracted(x: Any, y: Any, *, alpha: float = 1) -> Tensor | None:
    if not _is_half(x) or not isinstance(y, Prediction) or not isinstance(alpha, (int, float)):
        return None
    if isinstance(y._part, _Shift):
        return replace(y._part, factor=-alpha * y._part.factor).added_to(x._part)
    conditional, negative = x._part, replace(y._part, weight=y._part.weight * alpha)
    if conditional.weight != negative.weight:
        return _weighted(conditional, replace(negative, weight=-negative.weight))
    if not conditional.pairs_with(negative):
        return None
    dtype, factor = torch.promote_types(negative.dtype, conditional.dtype), conditional.weight
    one, other = replace(negative, weight=1.0), replace(conditional, weight=1.0)
    return Prediction.of(_Shift(one, other, dtype, factor))


def _weighted(x: _Half, y: _Half) -> Tensor | None:
    """Return the guided prediction a · c + (1 − a) · u = u + a · (c − u) if the weights add to 1."""
    if not math.isclose(x.weight + y.weight, 1.0, rel_tol=1e-6) or not x.pairs_with(y):
        return None
    x, y = (x, y) if x.weight >= y.weight else (y, x)
    negative, conditional = replace(y, weight=1.0), replace(x, weight=1.0)
    shift = _Shift(negative, conditional, torch.promote_types(x.dtype, y.dtype), x.weight)
    return shift.added_to(negative)


def _multiplied(x: Any, y: Any) -> Prediction | None:
    shift, factor = (x, y) if isinstance(x, Prediction) else (y, x)
    if isinstance(factor, Prediction):
        return None
    part = shift._part
    if isinstance(factor, Tensor) and factor.dim() == 0 and factor.device.type == "cpu":
        factor = factor.item()
    if isinstance(part, _Half):
        is_number = isinstance(factor, (int, float))
        return Prediction.of(replace(part, weight=part.weight * factor)) if is_number else None
    if isinstance(factor, Tensor):
        if not _is_of_samples(factor, part.shape):
            return None
        dtype = torch.result_type(torch.empty(part.shape, dtype=part.dtype, device="meta"), factor)
        return Prediction.of(replace(part, factor=part.factor * factor, dtype=dtype))
    return Prediction.of(replace(part, factor=part.factor * factor)) if isinstance(factor, (int, float)) else None


def _added(x: Any, y: Any, *, alpha: float = 1) -> Tensor | None:
    if not (isinstance(x, Prediction) and isinstance(y, Prediction)):
        return None
    one, other = x._part, y._part
    if isinstance(other, _Shift):
        other = replace(other, factor=other.factor * alpha)
    elif isinstance(alpha, (int, float)):
        other = replace(other, weight=other.weight * alpha)
    if isinstance(one, _Half) and isinstance(other, _Half):
        return _weighted(one, other)
    half, shift = (one, other) if isinstance(one, _Half) else (other, one)
    return shift.added_to(half) if isinstance(half, _Half) and isinstance(shift, _Shift) else None


def _between(x: Any, y: Any, weight: Any) -> Tensor | None:
    """Return x + weight · (y − x)."""
    if not (isinstance(x, Prediction) and isinstance(y, Prediction)) or isinstance(weight, Prediction):
        return None
    shift = _subtracted(y, x)
    if not isinstance(shift, Prediction):
        return None
    shift = _multiplied(shift, weight)
    return _added(x, shift) if shift is not None else None


def _is_half(x: Any) -> bool:
    return isinstance(x, Prediction) and isinstance(x._part, _Half)


def _is_of_samples(factor: Tensor, shape: Sequence[int]) -> bool:
    """Return whether a factor has one number for all samples, or one for each."""
    if factor.numel() == 1:
        return factor.dim() <= len(shape)
    return factor.dim() == len(shape) and factor.shape[0] == shape[0] and factor.numel() == shape[0]


def _is_same(x: Tensor, y: Tensor) -> bool:
    """Return whether two tensors are the same memory."""
    return x is y or (x.data_ptr() == y.data_ptr() and x.device == y.device and x.stride() == y.stride())


_RULES: Mapping[Any, Callable[..., Any]] = {
    _aten.slice.Tensor: _slice,
    _aten.split.Tensor: _split,
    _aten.split_with_sizes.default: _split_sizes,
    _aten._to_copy.default: _to,
    _aten.detach.default: _same,
    _aten.alias.default: _same,
    _aten.sub.Tensor: _subtracted,
    _aten.mul.Tensor: _multiplied,
    _aten.mul.Scalar: _multiplied,
    _aten.add.Tensor: _added,
    _aten.lerp.Scalar: _between,
    _aten.lerp.Tensor: _between,
}
