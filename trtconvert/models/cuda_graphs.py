"""Denoisers whose calls are recorded in CUDA graphs, for stages that call one denoiser hundreds of times.

In eager PyTorch the host takes several times as long for a call as the GPU, above all where attention and layers go through
handlers. A recorded call costs the host the copies of its inputs and one launch.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trtconvert.diffusion_model import DiffusionModel
from trtconvert.guidance import guidance_of
from trtconvert.models.denoiser import intercepted
from trtconvert.noted import Notes

_log = logging.getLogger(__name__)

CLOSE = 1e-3
"""Relative L2 error up to which a repeated prediction is that of the eager call. Kernels that sum in any order differ by less."""

_Function = Callable[..., "Tensor | tuple[Tensor, ...]"]
_Inputs = dict[str, Tensor]


def graphed(
    model: DiffusionModel, function: Callable[..., Any], *, notes: Sequence[Notes[Any]] = (), counts: bool = False
) -> Callable[..., Any]:
    """A denoiser, or another function of a model's inputs, that is recorded in CUDA graphs where the model is on a GPU.

    Elsewhere, and where weights are offloaded, whose places change from call to call, it is the function itself.

    Args:
        function: see `Graphed`. Without state that lies on the host: no caches of layers.
        notes, counts: see `Graphed`.
    """
    if model.onload is not None or model.device.type != "cuda":
        return function
    return Graphed(function, model, notes=notes, counts=counts)


class Graphed:
    """A function of a model's inputs on the current GPU, recorded once for each set of shapes and types of its inputs.

    Of each set the first call is eager, which sets kernels up; the second one records. Beforehand the model's own denoiser is
    called once and watched: where it makes the host wait for the device, or copies from the host, nothing is recorded. Before a
    graph is used it repeats the first call, whose outputs are known: a function whose outputs follow from anything but its inputs
    is found so. What cannot be recorded stays eager. Each graph has memory of its own, which is free when the graph is gone.

    Args:
        function: takes tensors by name, or by position in the order of the model's inputs; gives a tensor or a tuple of tensors,
            the prediction first. Called without gradients of its outputs. It computes the denoiser, beside what does not wait.
        model: on a GPU.
        notes: of observers that the function runs; repeated calls add their entries.
        counts: the function adds up what it sees on the device, and gives what the denoiser gives. Then the denoiser itself is
            repeated in the place of the first call, which must not count twice.
    """

    def __init__(
        self, function: _Function, model: DiffusionModel, *, notes: Sequence[Notes[Any]] = (), counts: bool = False
    ) -> None:
        self._function, self._notes, self._counts = function, tuple(notes), counts
        self._names, self._module = [spec.name for spec in model.inputs], model.denoiser
        self._exact = intercepted(model, lambda call: call.exact())
        self._calls: dict[_Key, _First | _Graph | None] = {}
        self.guidance = guidance_of(function)

    def __call__(self, *inputs: Tensor, **by_name: Tensor) -> Any:
        given = dict(zip(self._names, inputs, strict=False)) | by_name
        key = _key(given)
        if key not in self._calls:
            recordable = self._waits_for_nothing(given)
            outputs = self._function(**given)
            self._calls[key] = _First(_copies(given), _prediction(outputs).clone()) if recordable else None
            return outputs
        known = self._calls[key]
        if isinstance(known, _First):
            known = self._calls[key] = self._recorded(known, given)
        return self._function(**given) if known is None else known(given)

    def _of_model(self, given: _Inputs) -> _Inputs:
        return {name: given[name] for name in self._names if name in given}

    def _waits_for_nothing(self, given: _Inputs) -> bool:
        """Whether the model's denoiser can be recorded, as far as a call shows that is watched. Asked once of each module."""
        if not _on_gpu(given):
            return False
        known, inputs = _watched.setdefault(self._module, {}), self._of_model(given)
        key = _key(inputs)
        if key not in known:
            try:
                with torch.no_grad(), _NoWaiting():
                    self._exact(**inputs)
                known[key] = True
            except Exception as error:  # `_Waits`, or what a model raises only where it is watched
                _log.debug("%s is not recorded in a CUDA graph: %s", type(self._module).__name__, error)
                known[key] = False
        return known[key]

    def _recorded(self, first: _First, given: _Inputs) -> _Graph | None:
        """The graph of a call; None where the function cannot be recorded, or the graph gives something else."""
        name = type(self._module).__name__
        try:
            # A function that counts must not count the first call twice: the denoiser repeats it.
            if not self._counts or _Graph(self._exact, self._of_model(given), ()).gives(first):
                graph = _Graph(self._function, given, self._notes)
                if self._counts or graph.gives(first):
                    return graph
            _log.debug("%s is not recorded in a CUDA graph: the graph gives another prediction", name)
        except Exception as error:
            # A function that runs eagerly may raise anything here. The eager call that follows tells what is wrong.
            _log.debug("%s is not recorded in a CUDA graph: %s", name, error, exc_info=True)
        return None


_Key = tuple[Any, ...]

_watched: WeakKeyDictionary[nn.Module, dict[_Key, bool]] = WeakKeyDictionary()
"""By module and inputs, whether a call that was watched waited for nothing."""


def _on_gpu(given: Mapping[str, Tensor]) -> bool:
    return all(x.is_cuda for x in given.values())


def _key(given: Mapping[str, Tensor]) -> _Key:
    return tuple((name, x.shape, x.dtype, x.device) for name, x in sorted(given.items()))


@dataclass
class _First:
    """The first call of some shapes: copies of its inputs and of its prediction."""

    inputs: _Inputs
    prediction: Tensor


class _Graph:
    """A recorded call."""

    def __init__(self, function: _Function, given: _Inputs, notes: Sequence[Notes[Any]]) -> None:
        self._inputs, self._graph = _copies(given), torch.cuda.CUDAGraph()
        starts = [len(one) for one in notes]
        try:
            with _uncollected(), _unharmed(), torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
                self._outputs = function(**self._inputs)
        finally:
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
        got, expected = _prediction(self._outputs).double(), first.prediction.double()
        error = float((got - expected).norm() / expected.norm().clamp_min(1e-30))
        return math.isfinite(error) and error <= CLOSE


def _prediction(outputs: Tensor | tuple[Tensor, ...]) -> Tensor:
    return outputs if isinstance(outputs, Tensor) else outputs[0]


def _copies(given: Mapping[str, Tensor]) -> _Inputs:
    return {name: x.detach().clone() for name, x in given.items()}


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Keeps Python from collecting garbage: a graph that is destroyed while another is recorded spoils the recording."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


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
