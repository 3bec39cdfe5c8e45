"""AdaRound: rounds each weight up or down by the output error of its layer or block.

Sources: Nagel et al. 2020 (arXiv 2004.10568, equations 21 to 24); reconstruction of whole blocks: Li et al. 2021 (BRECQ,
arXiv 2102.05426), as in Q-Diff.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from trtconvert.interception import first_tensor
from trtconvert.modiff.weights import Grid

_STRETCH, _SHIFT = 1.2, -0.1  # of the sigmoid, so that it reaches 0 and 1
_FIRST_BETA, _LAST_BETA = 20.0, 2.0
_WARMUP = 0.2  # share of the iterations without the term that draws to 0 or 1


@dataclass(frozen=True)
class AdaRound:
    """Options of the rounding.

    Attributes:
        iterations: of Adam for each layer or block; 0 rounds to the nearest. by_block: reconstruct residual and transformer
            blocks as wholes, other layers by themselves; False: every layer by itself.
        rate: learning rate. weight: of the mean term that draws to 0 or 1, relative to the error of rounding to the nearest.
        batch: samples of an iteration.
    """

    iterations: int = 2000
    by_block: bool = True
    rate: float = 2e-2
    weight: float = 10.0
    batch: int = 32

    def __str__(self) -> str:
        if not self.iterations:
            return "nearest"
        return f"AdaRound by {'block' if self.by_block else 'layer'}, {self.iterations} iterations"


@dataclass(frozen=True)
class Example:
    """A call of a unit: inputs from quantised layers before it, and the output in full precision."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    wanted: Tensor


def adaround(
    unit: nn.Module,
    layers: Mapping[str, Any],
    grids: Mapping[str, Grid],
    widths: Mapping[str, Sequence[int]],
    examples: Sequence[Example],
    how: AdaRound,
    generator: torch.Generator,
) -> dict[str, Tensor]:
    """Returns the INT8 codes [N, C, …] of the weights of a unit's layers.

    Args:
        layers: of the unit, by their names in it; "" if the unit is a layer. grids, widths: by layer.
        generator: chooses examples.
    """
    positions = {name: grids[name].position(layer.weight.detach(), widths[name]) for name, layer in layers.items()}
    below = {name: position.floor() for name, position in positions.items()}
    # The first weights are those of full precision: h(v) is the fraction of the position.
    logits = {name: _inverse(positions[name] - below[name]).requires_grad_() for name in layers}
    on_gpu = any(v.is_cuda for v in logits.values())
    # One kernel for all layers: launches dominate on a GPU.
    optimizer = torch.optim.Adam(list(logits.values()), lr=how.rate, fused=on_gpu)
    scales = {name: grids[name].spread(grids[name].scale, below[name], widths[name]) for name in layers}
    nearest = {name: grids[name].values(position.round(), widths[name]) for name, position in positions.items()}
    scale = 1 / max(_error(unit, nearest, layers, examples), 1e-20)
    with torch.enable_grad():
        for step in range(how.iterations):
            example = examples[int(torch.randint(len(examples), (1,), generator=generator))]
            up = {name: _up(v) for name, v in logits.items()}
            soft = {name: (below[name] + share) * scales[name] for name, share in up.items()}
            loss = scale * _squared_error(unit, soft, layers, *_some(example, how.batch, generator))
            done = (step / how.iterations - _WARMUP) / (1 - _WARMUP)
            if done >= 0:
                beta = _LAST_BETA + (_FIRST_BETA - _LAST_BETA) * 0.5 * (1 + math.cos(math.pi * done))
                undecided = sum((1 - (2 * share - 1).abs().pow(beta)).mean() for share in up.values())
                loss = loss + how.weight * undecided
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return {name: grids[name].codes(below[name] + (_up(v.detach()) >= 0.5), widths[name]) for name, v in logits.items()}


def _squared_error(
    unit: nn.Module,
    weights: Mapping[str, Tensor],
    layers: Mapping[str, Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    wanted: Tensor,
) -> Tensor:
    named = {f"{name}.weight".lstrip("."): x.to(layers[name].weight.dtype) for name, x in weights.items()}
    return (first_tensor(functional_call(unit, named, args, kwargs)).float() - wanted.float()).square().mean()


def _error(
    unit: nn.Module, weights: Mapping[str, Tensor], layers: Mapping[str, Any], examples: Sequence[Example]
) -> float:
    errors = [_squared_error(unit, weights, layers, each.args, each.kwargs, each.wanted) for each in examples]
    return float(torch.stack(errors).mean())


def _up(v: Tensor) -> Tensor:
    return (torch.sigmoid(v) * _STRETCH + _SHIFT).clamp(0, 1)


def _inverse(share: Tensor) -> Tensor:
    inner = ((share - _SHIFT) / _STRETCH).clamp(1e-3, 1 - 1e-3)
    return torch.log(inner / (1 - inner))


def _some(example: Example, batch: int, generator: torch.Generator) -> tuple[tuple[Any, ...], dict[str, Any], Tensor]:
    """Returns a batch of an example's samples, if all its tensors have them as first axis."""
    count = len(example.wanted)
    tensors = [x for x in (*example.args, *example.kwargs.values()) if isinstance(x, Tensor) and x.dim()]
    if count <= batch or any(len(x) != count for x in tensors):
        return example.args, example.kwargs, example.wanted
    chosen = torch.randperm(count, generator=generator)[:batch].to(example.wanted.device)

    def some(x: Any) -> Any:
        return x[chosen] if isinstance(x, Tensor) and x.dim() else x

    return tuple(map(some, example.args)), {k: some(x) for k, x in example.kwargs.items()}, example.wanted[chosen]
