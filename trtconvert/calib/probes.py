"""Errors of candidates at the prediction, by what they change at their own output and random projections carried backwards.

A candidate that changes the output of an operation by δ changes the prediction by J·δ, to first order, J being the Jacobian of
the prediction by that output. For r of independent components of mean 0 and variance 1, E[⟨r, J·δ⟩²] = ‖J·δ‖², and ⟨r, J·δ⟩ is
⟨Jᵀ·r, δ⟩, where Jᵀ·r is the gradient of ⟨r, prediction⟩ (Hutchinson's estimator). So one backward pass serves all candidates of
all operations. The layers of a group add their ⟨Jᵀ·r, δ⟩ before they are squared, since they change the prediction together.
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
"""Backward passes of one call at most."""

_KEPT_ON_CPU = 2 * 2**30
_KEPT_SHARE = 0.4
"""Bytes on a CPU, and share of a GPU's free memory, up to which a call of several probes keeps what candidates change: computed
once, and not for each probe."""

_DIFFERENTIATED = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""Backends of attention that backward passes go through. cuDNN's gradients are NaN at some shapes
(pytorch, issue 196678)."""

_DRAWN = "trtconvert.drawn"
"""The projections among the inputs of a recorded call."""


@dataclass
class _Pass:
    """One forward and its backward passes.

    Attributes:
        projections: [B] Jᵀ·r times δ of each candidate in the backward pass that is under way.
        anchor: makes every output that is watched part of the graph, also where it does not depend on the inputs.
        room: bytes that what candidates change may still take.
        complete: names of calls all of whose candidates are kept.
        forward_over: whether a call that comes now is one that a backward pass computes again.
    """

    samples: int
    anchor: Tensor
    room: int
    projections: dict[int, Tensor] = field(default_factory=dict)
    complete: set[str] = field(default_factory=set)
    forward_over: bool = False

    def add(self, candidate: int, gradient: Tensor, delta: Tensor) -> None:
        products = (gradient.float() * delta.float()).reshape(self.samples, -1).sum(1)
        before = self.projections.get(candidate)
        self.projections[candidate] = products if before is None else before + products

    def keeps(self, delta: Tensor) -> bool:
        """Whether there is room to keep what a candidate changes; takes the room."""
        if delta.nbytes > self.room:
            return False
        self.room -= delta.nbytes
        return True


class _Watched(torch.autograd.Function):
    """An operation's output as it is. In the backward pass its gradient meets what candidates change.

    What candidates are computed from then is saved as autograd saves tensors, so that it may be offloaded or computed again.
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
        model: whose denoiser is differentiable in its activations.
        candidates: to measure.
        draws: projections that are wanted of each call, over its samples together.
    """

    def __init__(self, model: DiffusionModel, candidates: Sequence[Candidate], draws: float) -> None:
        self._model, self._draws = model, draws
        self._stateful = any(candidate.choice.delta for candidate in candidates)
        self._chunk = 0  # rows that fit the device's memory, once a chunk did not
        self._shapes: dict[int, torch.Size] = {}  # of the prediction, by rows
        self._generator = torch.Generator().manual_seed(0)
        self._projection = _Projection(model, candidates)
        self._projected: Callable[..., Any] = self._projection if self._stateful else graphed(model, self._projection)

    def errors(self, exact: Denoiser, given: Mapping[str, Tensor]) -> tuple[Tensor, list[Tensor]]:
        """The output for inputs by name, and each candidate's mean squared error, [B] FP32, estimated for every sample."""
        spec = self._model.inputs[0]
        samples = given[spec.name].shape[0]
        by_sample = {s.name for s in self._model.inputs if s.shape and s.shape[0] == spec.shape[0]}
        by_sample &= {name for name, x in given.items() if x.dim() and x.shape[0] == samples}
        probes = min(MOST_PROBES, max(1, round(self._draws / samples)))
        outputs, errors = [], []
        start = 0
        while start < samples:
            # Candidates with caches see all samples in one call.
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
        """Of the prediction for so many rows."""
        if samples not in self._shapes:
            known = next(iter(self._shapes.values()), None)
            self._shapes[samples] = torch.Size([samples, *known[1:]]) if known else exact(**given).shape
        return self._shapes[samples]

    def _take_less(self, size: int) -> bool:
        """After a call of so many rows that did not fit the GPU: keep less, or take fewer. False where nothing is left to do."""
        torch.cuda.empty_cache()
        if self._projection.room:
            self._projection.room = 0
            return True
        if size == 1 or self._stateful:
            return False
        self._chunk = max(1, size // 2)
        return True


class _Projection:
    """Projects what candidates change.

    Args:
        model, candidates: see `Probes`.

    Attributes:
        room: bytes up to which a call of several probes keeps what candidates change; None before the first one.
    """

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
        """The prediction of a call, and [candidates, B] the mean over its projections, [probes, *prediction]."""
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
            if output.requires_grad:  # else nothing that is watched leads to it
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
        """A handler that computes what the model does, and notes in backward passes what candidates change."""

        def handle(call: SiteCall | LayerCall) -> Tensor:
            numbers = self._of_name.get(call.name, [])
            output = call.exact()
            if not numbers:
                return output
            # A candidate whose caches go on from call to call computes once, in the forward pass; others do where there is room.
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
    """A call that holds no activations, which a graph holds for it, and no weights, which candidates do not read."""
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
    raise RuntimeError("a call whose activations were let go of computes nothing exactly")
