"""Replays a denoiser as a CUDA graph: launching a small model takes longer than running it."""

from __future__ import annotations

import torch
from torch import Tensor

from trtconvert.diffusion_model import Denoiser

_BEFORE = 2
"""Calls before the recording: the first makes caches of modulated layers, the second compiles and measures tiles."""


class Graphed:
    """Calls `denoiser` `_BEFORE` times at a size, then records it and replays the recording until the size changes.

    Args:
        denoiser: on one GPU. Its calls must not wait for the GPU, and its state must keep its addresses.
    """

    def __init__(self, denoiser: Denoiser) -> None:
        self._denoiser = denoiser
        self._sizes: object = None
        self._calls = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: list[Tensor] = []
        self._output = torch.empty(0)

    def __call__(self, *inputs: Tensor, **named: Tensor) -> Tensor:
        tensors = [*inputs, *named.values()]
        sizes = ([(x.shape, x.dtype, x.device) for x in tensors], list(named))
        if sizes != self._sizes:
            self._sizes, self._calls, self._graph = sizes, 0, None
        if self._graph is None:
            self._calls += 1
            if self._calls <= _BEFORE:
                return self._denoiser(*inputs, **named)
            self._graph = self._record(inputs, named)
        for held, given in zip(self._inputs, tensors, strict=True):
            held.copy_(given)
        self._graph.replay()
        return self._output.clone()

    def _record(self, inputs: tuple[Tensor, ...], named: dict[str, Tensor]) -> torch.cuda.CUDAGraph:
        self._inputs = [x.clone() for x in (*inputs, *named.values())]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._output = self._denoiser(
                *self._inputs[: len(inputs)], **dict(zip(named, self._inputs[len(inputs) :], strict=True))
            )
        return graph
