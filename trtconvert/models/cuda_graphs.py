"""Records the calls of a denoiser in CUDA graphs, for stages that call one denoiser hundreds of times.

In eager PyTorch a call takes several times as long on the host as on the GPU, above all with handlers for attention and layers. A
recorded call costs the host the copies of its inputs and one launch.
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
from trtconvert.noted import Notes, PackedEntries

_log = logging.getLogger(__name__)

CLOSE = 1e-3
"""Largest relative L2 error of a replayed prediction. Kernels that sum in any order differ by less."""

_Function = Callable[..., "Tensor | tuple[Tensor, ...]"]
_Inputs = dict[str, Tensor]


def graphed(
    model: DiffusionModel, function: Callable[..., Any], *, notes: Sequence[Notes[Any]] = (), counts: bool = False
) -> Callable[..., Any]:
    """Records a denoiser, or another function of a model's inputs, in CUDA graphs if the model is on a GPU.

    Without a GPU, and with offloaded weights, which move from call to call, it returns the function itself.

    Args:
        function: see `Graphed`. It must not keep state on the host, such as caches of layers.
        notes, counts: see `Graphed`.
    """
    if model.onload is not None or model.device.type != "cuda":
        return function
    return Graphed(function, model, notes=notes, counts=counts)


class Graphed:
    """A function of a model's inputs on the current GPU, recorded once for each set of input shapes and types.

    The first call of a set is eager, which sets kernels up; the second is recorded. Before the first, one call of the model's own
    denoiser is watched: if it makes the host wait for the device, or copies from the host, nothing is recorded. Before its first
    use a graph replays the first call, whose outputs are known; this finds functions whose outputs depend on more than their
    inputs. Functions that cannot be recorded stay eager. Each graph has memory of its own, which is freed with the graph.

    Args:
        function: takes tensors by name, or by position in the order of the model's inputs; returns a tensor, or a tuple of
            tensors that begins with the prediction. It computes the denoiser, and may do further work that does not wait. It is
            called without gradients of its outputs.
        model: on a GPU.
        notes: of observers that the function runs; replays add their entries.
        counts: the function adds its observations up on the device, and returns the denoiser's outputs. The first call must not
            count twice: the denoiser itself is then recorded and compared.
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
        """Whether the model's denoiser can be recorded, by one watched call for each module and set of inputs."""
        if not _on_gpu(given):
            return False
        known, inputs = _watched.setdefault(self._module, {}), self._of_model(given)
        key = _key(inputs)
        if key not in known:
            try:
                with torch.no_grad(), _NoWaiting():
                    self._exact(**inputs)
                known[key] = True
            except Exception as error:  # `_Waits`, or an error of a model that cannot be watched
                _log.debug("%s is not recorded in a CUDA graph: %s", type(self._module).__name__, error)
                known[key] = False
        return known[key]

    def _recorded(self, first: _First, given: _Inputs) -> _Graph | None:
        """Returns the graph of a call; None if the function cannot be recorded, or the graph's prediction differs."""
        name = type(self._module).__name__
        try:
            # A counting function must not count the first call twice: the denoiser alone is compared.
            if not self._counts or _Graph(self._exact, self._of_model(given), ()).gives(first):
                graph = _Graph(self._function, given, self._notes)
                if self._counts or graph.gives(first):
                    return graph
            _log.debug("%s is not recorded in a CUDA graph: the graph gives another prediction", name)
        except Exception as error:
            # The eager call that follows raises the error of a function that is at fault.
            _log.debug("%s is not recorded in a CUDA graph: %s", name, error, exc_info=True)
        return None


_Key = tuple[Any, ...]

_watched: WeakKeyDictionary[nn.Module, dict[_Key, bool]] = WeakKeyDictionary()
"""Whether a watched call did not wait, by module and inputs."""


def _on_gpu(given: Mapping[str, Tensor]) -> bool:
    return all(x.is_cuda for x in given.values())


def _key(given: Mapping[str, Tensor]) -> _Key:
    return tuple((name, x.shape, x.dtype, x.device) for name, x in sorted(given.items()))


@dataclass
class _First:
    """The first call of a set of shapes: copies of its inputs and of its prediction."""

    inputs: _Inputs
    prediction: Tensor


class _Graph:
    def __init__(self, function: _Function, given: _Inputs, notes: Sequence[Notes[Any]]) -> None:
        self._inputs, self._graph = _copies(given), torch.cuda.CUDAGraph()
        starts = [len(one) for one in notes]
        try:
            with _uncollected(), _unharmed(), torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
                self._outputs = function(**self._inputs)
                self._noted = [(one, PackedEntries(one.cut(start))) for one, start in zip(notes, starts, strict=True)]
        finally:
            for one, start in zip(notes, starts, strict=True):
                one.cut(start)  # entries of a recording that failed

    def __call__(self, given: Mapping[str, Tensor]) -> Any:
        self._repeat(given)
        for notes, entries in self._noted:
            entries.add_copies(notes)
        outputs = self._outputs
        return outputs.clone() if isinstance(outputs, Tensor) else tuple(x.clone() for x in outputs)

    def _repeat(self, given: Mapping[str, Tensor]) -> None:
        for name, x in self._inputs.items():
            x.copy_(given[name])
        self._graph.replay()

    def gives(self, first: _First) -> bool:
        """Whether the graph reproduces the prediction of the first call."""
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
    """Keeps Python from collecting garbage: a graph that is destroyed during a recording spoils the recording."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextlib.contextmanager
def _unharmed() -> Iterator[None]:
    """Keeps the current GPU's random generator usable after a failed recording, which torch 2.11 takes for unfinished."""
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
    """The call contains an operation that a CUDA graph cannot repeat."""


class _NoWaiting(TorchDispatchMode):
    """Refuses operations that make the host wait for the device, or read host memory."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        on_gpu = any(x.is_cuda for x in given)
        if on_gpu and {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & {*func.tags}:
            raise _Waits(str(func))
        result = func(*args, **(kwargs or {}))
        # Kernels take a host number, a tensor of no dimension, by value; copies of such a tensor do read host memory.
        counted = [y for y in given if y.dim() or y.is_cuda or func.overloadpacket in _COPIES]
        for x in tree_leaves(result):
            if isinstance(x, Tensor) and any(y.is_cuda != x.is_cuda for y in counted):
                raise _Waits(str(func))
        return result


_COPIES = {torch.ops.aten._to_copy, torch.ops.aten.copy_}
