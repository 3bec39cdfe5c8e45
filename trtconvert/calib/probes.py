"""Errors of candidates at the prediction, from their errors at the operation's output and random projections carried backwards.

A candidate that changes the output of an operation by δ changes the prediction by J·δ to first order, where J is the Jacobian of
the prediction by that output. For r with independent components of mean 0 and variance 1, E[⟨r, J·δ⟩²] = ‖J·δ‖², and ⟨r, J·δ⟩ is
⟨Jᵀ·r, δ⟩, where Jᵀ·r is the gradient of ⟨r, prediction⟩ (Hutchinson's estimator). One backward pass therefore serves all
candidates of all operations. The ⟨Jᵀ·r, δ⟩ of the layers of a group are summed before the square, as the layers change the
prediction together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from trtconvert.attention.sites import SiteCall, own_channels
from trtconvert.calib.candidates import Candidate
from trtconvert.diffusion_model import Denoiser, DiffusionModel
from trtconvert.linear.sites import LayerCall
from trtconvert.models.cuda_graphs import graphed
from trtconvert.models.denoiser import intercepted
from trtconvert.models.offloading import computed_again, in_backward

MOST_PROBES = 8
"""Largest number of backward passes per call."""

_KEPT_ON_CPU = 2 * 2**30
_KEPT_SHARE = 0.4
"""Bytes on a CPU, and share of a GPU's free memory, for the candidates' errors δ in a call with several probes: stored errors
are computed once instead of once per probe."""

_DIFFERENTIATED = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""Backends of attention for backward passes. cuDNN's gradients are NaN at some shapes (pytorch, issue 196678)."""

_DRAWN = "trtconvert.drawn"
"""Input name of the projections in a recorded call."""


@dataclass
class _Pass:
    """One forward and its backward passes.

    Attributes:
        projections: [B] ⟨Jᵀ·r, δ⟩ of each candidate in the current backward pass.
        anchor: connects every watched output to the graph, even if the output does not depend on the inputs.
        room: bytes left for storing errors δ.
        complete: names of calls with stored errors of all candidates.
        forward_over: true if a further call is a recomputation by a backward pass.
    """

    samples: int
    anchor: Tensor
    room: int
    projections: dict[int, Tensor] = field(default_factory=dict)
    complete: set[str] = field(default_factory=set)
    forward_over: bool = False

    def add(self, candidate: int, gradient: Tensor, delta: Tensor) -> None:
        products = dot_products(gradient.reshape(self.samples, -1), delta.reshape(self.samples, -1))
        before = self.projections.get(candidate)
        self.projections[candidate] = products if before is None else before + products

    def keeps(self, delta: Tensor) -> bool:
        """True if there is room to store an error; takes the room."""
        if delta.nbytes > self.room:
            return False
        self.room -= delta.nbytes
        return True


_PIECE = 1024
_MOST_PIECES = 65535
"""Length of the pieces of a dot product of 16-bit numbers, and the number that one batch of products takes."""


def dot_products(x: Tensor, y: Tensor) -> Tensor:
    """[B] FP32 dot products of the rows of two [B, N] tensors, summed in FP32."""
    in_pieces = x.shape[1] % _PIECE == 0 and x.numel() // _PIECE <= _MOST_PIECES
    if x.is_cuda and x.dtype == y.dtype and x.dtype.itemsize == 2 and in_pieces:
        # cuBLAS reads both once; copies in FP32 and their product would be written and read again.
        of_pieces = torch.bmm(x.reshape(-1, 1, _PIECE), y.reshape(-1, _PIECE, 1), out_dtype=torch.float32)
        return of_pieces.view(len(x), -1).sum(1)
    return (x.float() * y.float()).sum(1)


class _Watched(torch.autograd.Function):
    """The identity on an operation's output. The backward pass hands the output's gradient to `meet`.

    Inputs of candidates are saved as autograd saves tensors, so that they may be offloaded or recomputed.
    """

    @staticmethod
    def forward(ctx: Any, output: Tensor, anchor: Tensor, meet: Callable[..., None], *saved: Tensor) -> Tensor:
        ctx.meet, ctx.count = meet, len(saved)
        ctx.save_for_backward(*saved)
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (gradient,) = gradients
        with torch.no_grad():
            ctx.meet(gradient, *ctx.saved_tensors)
        return gradient, None, None, *[None] * ctx.count


class Probes:
    """Measures all candidates of one model by probes.

    On a GPU the calls are recorded in CUDA graphs, forward and backward passes together.

    Args:
        model: its denoiser must be differentiable in its activations.
        candidates: candidates to measure.
        draws: projections per call, over all its samples.
    """

    def __init__(self, model: DiffusionModel, candidates: Sequence[Candidate], draws: float) -> None:
        self._model, self._draws = model, draws
        self._stateful = any(candidate.choice.delta for candidate in candidates)
        self._chunk = 0  # rows per call after the GPU's memory ran out; 0: all
        self._shapes: dict[int, torch.Size] = {}  # of the prediction, by number of rows
        self._generator = torch.Generator().manual_seed(0)
        self._projection = _Projection(model, candidates)
        self._projected: Callable[..., Any] = self._projection if self._stateful else graphed(model, self._projection)

    def errors(self, exact: Denoiser, given: Mapping[str, Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Returns the output for inputs by name, and each candidate's estimated mean squared error per sample, [B] FP32."""
        spec = self._model.inputs[0]
        samples = given[spec.name].shape[0]
        by_sample = {s.name for s in self._model.inputs if s.shape and s.shape[0] == spec.shape[0]}
        by_sample &= {name for name, x in given.items() if x.dim() and x.shape[0] == samples}
        probes = min(MOST_PROBES, max(1, round(self._draws / samples)))
        outputs, errors = [], []
        start = 0
        while start < samples:
            # Candidates with caches need all samples in one call.
            size = samples if self._stateful else min(self._chunk or samples, samples - start)
            part = {name: x[start : start + size] if name in by_sample else x for name, x in given.items()}
            try:
                shape = self._shape(exact, part, size)
                drawn = torch.randn(probes, *shape, generator=self._generator).to(part[spec.name].device)
                output, found = self._projected(**part, **{_DRAWN: drawn})
            except torch.cuda.OutOfMemoryError:
                if not self._take_less(size):
                    raise
                continue
            outputs.append(output)
            errors.append(found)
            start += size
        return torch.cat(outputs), [*torch.cat(errors, 1)]

    def _shape(self, exact: Denoiser, given: Mapping[str, Tensor], samples: int) -> torch.Size:
        """Returns the shape of the prediction for a number of rows."""
        if samples not in self._shapes:
            known = next(iter(self._shapes.values()), None)
            self._shapes[samples] = torch.Size([samples, *known[1:]]) if known else exact(**given).shape
        return self._shapes[samples]

    def _take_less(self, size: int) -> bool:
        """Reduces memory after a call with `size` rows ran out: stores no errors, or halves the rows. False if neither helps."""
        torch.cuda.empty_cache()
        if self._projection.room:
            self._projection.room = 0
            return True
        if size == 1 or self._stateful:
            return False
        self._chunk = max(1, size // 2)
        return True


class _Projection:
    """Projects the errors of candidates; room: bytes for storing errors in a call with several probes, None before the first."""

    def __init__(self, model: DiffusionModel, candidates: Sequence[Candidate]) -> None:
        self._model, self._candidates = model, candidates
        self._of_name: dict[str, list[int]] = {}
        for number, candidate in enumerate(candidates):
            for name in candidate.unit.members:
                self._of_name.setdefault(name, []).append(number)
        self._with_layers = any(candidate.unit.kind == "layer" for candidate in candidates)
        self.room: int | None = None

    def _most_kept(self, device: torch.device) -> int:
        if self.room is None:
            if device.type != "cuda":
                self.room = _KEPT_ON_CPU
            else:
                idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
                self.room = int(_KEPT_SHARE * (torch.cuda.mem_get_info(device)[0] + idle))
        return self.room

    def __call__(self, **given: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the prediction of a call, and [candidates, B] means over its projections, [probes, *prediction]."""
        drawn = given.pop(_DRAWN)
        probes, samples, device = drawn.shape[0], drawn.shape[1], drawn.device
        room = self._most_kept(device) if probes > 1 else 0
        here = _Pass(samples, torch.zeros((), device=device, requires_grad=True), room)
        handler = self._watching(here)
        offloaded, module = self._model.onload is not None, self._model.denoiser
        around = partial(computed_again, module) if offloaded else nullcontext
        denoiser = intercepted(self._model, handler, handler if self._with_layers else None, around)
        squares = [torch.zeros(samples, device=device) for _ in self._candidates]
        with sdpa_kernel(_DIFFERENTIATED):
            with torch.enable_grad():
                output = denoiser(**given)
            here.forward_over = True
            if output.requires_grad:  # otherwise the output depends on no watched operation
                with in_backward(module) if offloaded else nullcontext():
                    for number, r in enumerate(drawn):
                        here.projections.clear()
                        torch.autograd.backward(
                            output, r.to(output), retain_graph=number + 1 < probes, inputs=[here.anchor]
                        )
                        for candidate, projected in here.projections.items():
                            squares[candidate] = squares[candidate] + projected.square()
        each = output[0].numel() * probes
        return output.detach(), torch.stack(squares) / each if squares else drawn.new_zeros(0, samples)

    def _watching(self, here: _Pass) -> Callable[[Any], Tensor]:
        """Returns a handler that computes the model's own operation and projects the candidates' errors in backward passes."""

        def handle(call: SiteCall | LayerCall) -> Tensor:
            numbers = self._of_name.get(call.name, [])
            output = call.exact()
            if not numbers:
                return output
            # Candidates with caches must compute exactly once, in the forward pass; the others do so while there is room.
            kept: dict[int, Tensor] = {}
            with torch.no_grad():
                for number in () if here.forward_over else numbers:
                    if self._candidates[number].choice.delta or here.keeps(output):
                        kept[number] = own_channels(self._candidates[number].output(call), output) - output
            if len(kept) == len(numbers):
                here.complete.add(call.name)
            inputs = (call.q, call.k, call.v) if isinstance(call, SiteCall) else (call.x,)
            saved = () if call.name in here.complete else (output, *inputs)
            bare = _without_tensors(call)

            def meet(gradient: Tensor, *saved: Tensor) -> None:
                for number in numbers:
                    if number in kept:
                        here.add(number, gradient, kept[number])
                        continue
                    output, *inputs = saved
                    changed = self._candidates[number].output(_with_tensors(bare, inputs))
                    here.add(number, gradient, own_channels(changed, output) - output)

            return _Watched.apply(output, here.anchor, meet, *saved)  # pyright: ignore[reportReturnType]

        return handle


def _without_tensors(call: SiteCall | LayerCall) -> SiteCall | LayerCall:
    """Returns a call without activations, which the autograd graph saves, and without weights, which candidates do not read."""
    nothing = torch.empty(0)
    if isinstance(call, SiteCall):
        return replace(call, q=nothing, k=nothing, v=nothing, exact=_not_kept)
    return replace(call, x=nothing, weight=nothing, bias=None, exact=_not_kept)


def _with_tensors(call: SiteCall | LayerCall, inputs: Sequence[Tensor]) -> SiteCall | LayerCall:
    if isinstance(call, SiteCall):
        q, k, v = inputs
        return replace(call, q=q, k=k, v=v)
    return replace(call, x=inputs[0])


def _not_kept() -> Tensor:
    raise RuntimeError("a call without its activations cannot be computed exactly")
