"""Errors of candidates at the prediction, by what they change at their own output and random projections carried backwards.

A candidate that changes the output of an operation by δ changes the prediction by J·δ, to first order, J being the Jacobian of
the prediction by that output. For r of independent components of mean 0 and variance 1, E[⟨r, J·δ⟩²] = ‖J·δ‖², and ⟨r, J·δ⟩ is
⟨Jᵀ·r, δ⟩, where Jᵀ·r is the gradient of ⟨r, prediction⟩ (Hutchinson's estimator). So one backward pass serves all candidates of
all operations. The layers of a group add their ⟨Jᵀ·r, δ⟩ before they are squared, since they change the prediction together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from trtconvert.attention.sites import SiteCall, own_channels
from trtconvert.calib.candidates import Candidate
from trtconvert.diffusion_model import Denoiser, DiffusionModel
from trtconvert.linear.sites import LayerCall
from trtconvert.models.denoiser import intercepted

MOST_PROBES = 8
"""Backward passes of one call at most."""


@dataclass
class _Pass:
    """One forward and its backward passes.

    Attributes:
        projections: [B] Jᵀ·r times δ of each candidate in the backward pass that is under way.
        anchor: makes every output that is watched part of the graph, also where it does not depend on the inputs.
    """

    samples: int
    anchor: Tensor
    projections: dict[int, Tensor] = field(default_factory=dict)

    def add(self, candidate: int, gradient: Tensor, delta: Tensor) -> None:
        products = (gradient.float() * delta.float()).reshape(self.samples, -1).sum(1)
        before = self.projections.get(candidate)
        self.projections[candidate] = products if before is None else before + products


class _Watched(torch.autograd.Function):
    """An operation's output as it is. In the backward pass its gradient meets what candidates change.

    Inputs of the operation are saved as autograd saves tensors, so that they may be offloaded or computed again.
    """

    @staticmethod
    def forward(ctx: Any, output: Tensor, anchor: Tensor, meet: Callable[..., None], *inputs: Tensor) -> Tensor:
        ctx.meet = meet
        ctx.save_for_backward(output, *inputs)
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (gradient,) = gradients
        with torch.no_grad():
            ctx.meet(gradient, *ctx.saved_tensors)
        return gradient, None, None, *[None] * (len(ctx.saved_tensors) - 1)


class Probes:
    """Measures all candidates of one model by probes.

    Args:
        model: whose denoiser is differentiable in its activations.
        candidates: to measure.
        draws: projections that are wanted of each call, over its samples together.
    """

    def __init__(self, model: DiffusionModel, candidates: Sequence[Candidate], draws: float) -> None:
        self._model, self._candidates, self._draws = model, candidates, draws
        self._of_name: dict[str, list[int]] = {}
        for number, candidate in enumerate(self._candidates):
            for name in candidate.unit.members:
                self._of_name.setdefault(name, []).append(number)
        self._with_layers = any(candidate.unit.kind == "layer" for candidate in self._candidates)
        self._chunk = 0  # rows that fit the device's memory, once a chunk did not
        self._generator = torch.Generator().manual_seed(0)

    def errors(self, exact: Denoiser, given: Mapping[str, Tensor]) -> tuple[Tensor, list[Tensor]]:
        """The output for inputs by name, and each candidate's mean squared error, [B] FP32, estimated for every sample."""
        spec = self._model.inputs[0]
        samples = given[spec.name].shape[0]
        by_sample = {s.name for s in self._model.inputs if s.shape and s.shape[0] == spec.shape[0]}
        by_sample &= {name for name, x in given.items() if x.dim() and x.shape[0] == samples}
        outputs, errors = [], []
        stateful = any(candidate.choice.delta for candidate in self._candidates)
        start = 0
        while start < samples:
            # Candidates with caches see all samples in one call.
            size = samples if stateful else min(self._chunk or samples, samples - start)
            part = {name: x[start : start + size] if name in by_sample else x for name, x in given.items()}
            try:
                output, found = self._of_chunk(part, size, samples)
            except torch.cuda.OutOfMemoryError:
                if size == 1 or stateful:
                    raise
                self._chunk = max(1, size // 2)
                torch.cuda.empty_cache()
                continue
            outputs.append(output)
            errors.append(found)
            start += size
        of_candidates = [torch.cat([part[number] for part in errors]) for number in range(len(self._candidates))]
        return torch.cat(outputs), of_candidates

    def _of_chunk(self, given: Mapping[str, Tensor], samples: int, of: int) -> tuple[Tensor, list[Tensor]]:
        device = given[self._model.inputs[0].name].device
        here = _Pass(samples, torch.zeros((), device=device, requires_grad=True))
        handler = self._watching(here)
        denoiser = intercepted(self._model, handler, handler if self._with_layers else None)
        with torch.enable_grad():
            output = denoiser(**given)
        squares = [torch.zeros(samples, device=device) for _ in self._candidates]
        if not output.requires_grad:  # nothing that is watched leads to it
            return output, squares
        probes = min(MOST_PROBES, max(1, round(self._draws / of)))
        for number in range(probes):
            r = torch.randn(output.shape, generator=self._generator).to(output)
            here.projections.clear()
            torch.autograd.backward(output, r, retain_graph=number + 1 < probes, inputs=[here.anchor])
            for candidate, projected in here.projections.items():
                squares[candidate] += projected.square()
        each = output[0].numel() * probes
        return output.detach(), [x / each for x in squares]

    def _watching(self, here: _Pass) -> Callable[[Any], Tensor]:
        """A handler that computes what the model does, and notes in backward passes what candidates change."""

        def handle(call: SiteCall | LayerCall) -> Tensor:
            numbers = self._of_name.get(call.name, [])
            output = call.exact()
            if not numbers:
                return output
            # A candidate whose caches go on from call to call computes once, in the forward pass.
            kept = {}
            with torch.no_grad():
                for number in numbers:
                    if self._candidates[number].choice.delta:
                        kept[number] = own_channels(self._candidates[number].output(call), output) - output
            inputs = (call.q, call.k, call.v) if isinstance(call, SiteCall) else (call.x,)
            bare = _without_tensors(call)

            def meet(gradient: Tensor, output: Tensor, *inputs: Tensor) -> None:
                given = _with_tensors(bare, inputs)
                for number in numbers:
                    candidate = self._candidates[number]
                    changed = kept[number] + output if number in kept else candidate.output(given)
                    here.add(number, gradient, own_channels(changed, output) - output)

            return _Watched.apply(output, here.anchor, meet, *inputs)  # pyright: ignore[reportReturnType]

        return handle


def _without_tensors(call: SiteCall | LayerCall) -> SiteCall | LayerCall:
    """A call that holds no activations: a graph holds them for it."""
    nothing = torch.empty(0)
    if isinstance(call, SiteCall):
        return replace(call, q=nothing, k=nothing, v=nothing, exact=_not_kept)
    return replace(call, x=nothing, exact=_not_kept)


def _with_tensors(call: SiteCall | LayerCall, inputs: Sequence[Tensor]) -> SiteCall | LayerCall:
    if isinstance(call, SiteCall):
        q, k, v = inputs
        return replace(call, q=q, k=k, v=v)
    return replace(call, x=inputs[0])


def _not_kept() -> Tensor:
    raise RuntimeError("a call whose activations were let go of computes nothing exactly")
