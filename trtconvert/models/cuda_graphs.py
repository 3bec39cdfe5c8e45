"""Denoisers whose calls are recorded in CUDA graphs, for stages that call one denoiser hundreds of times.

In eager PyTorch the host takes several times as long for a call as the GPU, above all where attention and layers go through
handlers. A recorded call costs the host the copies of its inputs and one launch.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trtconvert.diffusion_model import Denoiser, DiffusionModel
from trtconvert.guidance import guidance_of
from trtconvert.noted import Notes

CLOSE = 1e-3
"""Relative L2 error up to which a repeated prediction is that of the eager call. Kernels that sum in any order differ by less."""

_Function = Callable[..., "Tensor | tuple[Tensor, ...]"]
_Inputs = dict[str, Tensor]


def graphed(
    model: DiffusionModel, denoiser: Denoiser, *, notes: Sequence[Notes[Any]] = (), proof: Denoiser | None = None
) -> Denoiser:
    """A denoiser that is recorded in CUDA graphs where the model is on a GPU; elsewhere the denoiser itself.

    Args:
        denoiser: see `Graphed`; called as the model's own. Without state that lies on the host: no caches of layers.
        notes, proof: see `Graphed`.
    """
    if next(model.denoiser.parameters()).device.type != "cuda":
        return denoiser
    return Graphed(denoiser, [spec.name for spec in model.inputs], notes=notes, proof=proof)


class Graphed:
    """A function of tensors on the current GPU, recorded once for each set of shapes and types of its inputs.

    Of each set the first call is eager, which sets kernels up. The second one is eager too, and is watched: a function that makes
    the host wait for the device, or copies from the host, is not recorded. The third call records. Before that graph is used it
    repeats the first call, whose outputs are known: a function whose outputs follow from anything but its inputs is found so.
    What cannot be recorded stays eager. Each graph has memory of its own, which is free when the graph is gone.

    Args:
        function: takes tensors by name, or by position in the order of `names`; gives a tensor or a tuple of tensors, the
            prediction first. Called without gradients of its outputs.
        names: of inputs that are given by position.
        notes: of observers that the function runs; repeated calls add their entries.
        proof: a function of the same inputs and outputs that is watched and repeated instead, where calls of `function` count:
            what observers add up on the device must not be added twice.
    """

    def __init__(
        self,
        function: _Function,
        names: Sequence[str] = (),
        *,
        notes: Sequence[Notes[Any]] = (),
        proof: _Function | None = None,
    ) -> None:
        self._function, self._names, self._notes, self._proof = function, tuple(names), tuple(notes), proof
        self.guidance = guidance_of(function)
        self._calls: dict[tuple[Any, ...], _First | _Graph | None] = {}

    def __call__(self, *inputs: Tensor, **by_name: Tensor) -> Any:
        given = dict(zip(self._names, inputs, strict=False)) | by_name
        if any(x.device.type != "cuda" for x in given.values()):
            return self._function(**given)
        key = tuple((name, x.shape, x.dtype, x.device) for name, x in sorted(given.items()))
        if key not in self._calls:
            outputs = self._function(**given)
            self._calls[key] = _First(_copies(given), [x.detach().clone() for x in tree_leaves(outputs)])
            return outputs
        known = self._calls[key]
        if isinstance(known, _First):
            if not known.watched:
                return self._watched(key, known, given)
            known = self._calls[key] = self._recorded(known, given)
        return self._function(**given) if known is None else known(given)

    def _watched(self, key: tuple[Any, ...], first: _First, given: _Inputs) -> Any:
        """The second call: does it wait for the device?"""
        starts = [len(notes) for notes in self._notes]
        try:
            with _NoWaiting():
                outputs = (self._proof or self._function)(**given)
        except _Waits:
            for notes, start in zip(self._notes, starts, strict=True):
                notes.cut(start)
            self._calls[key] = None
            return self._function(**given)
        first.watched = True
        return outputs if self._proof is None else self._function(**given)

    def _recorded(self, first: _First, given: _Inputs) -> _Graph | None:
        """The graph of a call; None where the function cannot be recorded, or the graph gives something else."""
        starts = [len(notes) for notes in self._notes]
        try:
            proof = _Graph(self._proof or self._function, given, self._notes)
            if not proof.gives(first):
                return None
            return proof if self._proof is None else _Graph(self._function, given, self._notes)
        except (
            Exception
        ):  # a function that runs eagerly may raise anything here; the eager call that follows tells what is wrong
            for notes, start in zip(self._notes, starts, strict=True):
                notes.cut(start)
            return None


@dataclass
class _First:
    """The first call of some shapes.

    Attributes:
        inputs, outputs: copies.
        watched: whether a call was watched that waits for nothing.
    """

    inputs: _Inputs
    outputs: list[Tensor]
    watched: bool = False


class _Graph:
    """A recorded call."""

    def __init__(self, function: _Function, given: _Inputs, notes: Sequence[Notes[Any]]) -> None:
        self._inputs, self._graph = _copies(given), torch.cuda.CUDAGraph()
        starts = [len(one) for one in notes]
        with _unharmed(), torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self._outputs = function(**self._inputs)
        self._noted = [(one, one.cut(start)) for one, start in zip(notes, starts, strict=True)]

    def __call__(self, given: Mapping[str, Tensor]) -> Any:
        self._repeat(given)
        for notes, entries in self._noted:
            notes.add_copies(entries)
        outputs = self._outputs
        return outputs.clone() if isinstance(outputs, Tensor) else tuple(x.clone() for x in outputs)

    def _repeat(self, given: Mapping[str, Tensor]) -> None:
        for name, x in self._inputs.items():
            x.copy_(given[name])
        self._graph.replay()

    def gives(self, first: _First) -> bool:
        """Whether the graph gives the prediction of the first call for its inputs."""
        self._repeat(first.inputs)
        got, expected = tree_leaves(self._outputs)[0].double(), first.outputs[0].double()
        error = float((got - expected).norm() / expected.norm().clamp_min(1e-30))
        return math.isfinite(error) and error <= CLOSE


def _copies(given: Mapping[str, Tensor]) -> _Inputs:
    return {name: x.detach().clone() for name, x in given.items()}


@contextlib.contextmanager
def _unharmed() -> Iterator[None]:
    """Leaves the random numbers of the current GPU usable where a recording fails: torch 2.11 then takes it for unfinished."""
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    seed, offset = generator.initial_seed(), generator.get_offset()
    try:
        yield
    except BaseException:
        other = torch.Generator(generator.device).manual_seed(seed)
        other.set_offset(offset)
        generator.graphsafe_set_state(other.graphsafe_get_state())
        raise


class _Waits(RuntimeError):
    """A call that a CUDA graph cannot repeat."""


class _NoWaiting(TorchDispatchMode):
    """Refuses operations that make the host wait for the device, or read memory of the host."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        on_gpu = any(x.is_cuda for x in given)
        if on_gpu and {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & {*func.tags}:
            raise _Waits(str(func))
        result = func(*args, **(kwargs or {}))
        # Kernels take a number of the host by value, in a tensor of no dimension; a copy of it is a copy.
        counted = [y for y in given if y.dim() or y.is_cuda or func.overloadpacket in _COPIES]
        for x in tree_leaves(result):
            if isinstance(x, Tensor) and any(y.is_cuda != x.is_cuda for y in counted):
                raise _Waits(str(func))
        return result


_COPIES = {torch.ops.aten._to_copy, torch.ops.aten.copy_}
