"""Modulated layers that hold their own caches, in the place of layers in full precision."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from trtconvert.errors import UserError
from trtconvert.modiff.layers import ModulatedConv2d, ModulatedLayer, State


class Step:
    """The running step.

    Attributes:
        rows: [S, B, 6] quantisers of the parts of all layers; None outside of a step.
        batch: number of samples. makes: whether the step makes caches.
    """

    def __init__(self) -> None:
        self.rows: Tensor | None = None
        self.batch = 0
        self.makes = False


def require_unmodulated(model: nn.Module, remedy: str) -> None:
    """
    Raises:
        UserError: the model has modulated layers.
    """
    if any(isinstance(module, HeldLayer) for module in model.modules()):
        raise UserError(
            "the model has been modulated already",
            expected="a model in full precision",
            got="modulated layers in it",
            remedy=remedy,
        )


class HeldLayer(nn.Module):
    """A modulated layer with caches for each of its calls in a step.

    Attributes:
        layer: the modulated layer. states: caches by call. calls: number of calls in the running step.
    """

    def __init__(self, name: str, layer: ModulatedLayer, first: int, step: Step) -> None:
        super().__init__()
        self.layer = layer
        self.name, self.states, self.calls = name, list[State](), 0
        self._first, self._step = first, step
        self._versions: list[int] = []
        self._kinds: list[tuple[torch.Size, torch.dtype, torch.device]] = []  # of inputs

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:  # such as in_channels or weight of the replaced layer
            return getattr(self._modules["layer"].full, name)  # type: ignore[union-attr]

    def forward(self, x: Tensor) -> Tensor:
        step, layer = self._step, self.layer
        if step.rows is None or not (layer.quantises_weights or layer.quantises_activations) or self._is_left(x):
            return layer.full(x)
        if x.shape[0] % step.batch:
            raise UserError(
                f"the input of {self.name} does not have whole rows for each sample",
                expected=f"a first axis of {step.batch} samples, or a multiple of it",
                got=str(list(x.shape)),
                remedy=f"leave the layer as it is: Settings(exclude=('{self.name}',))",
            )
        rows = step.rows[self._first : self._first + len(layer.widths)]
        if not layer.settings.modulation or not layer.quantises_activations:
            return layer.step(x, rows, None)
        call = self.calls
        self.calls += 1
        if torch.compiler.is_compiling():
            return layer.step(x, rows, self.states[call])
        state = self._state(x, call)
        y = layer.step(x, rows, state)
        self._versions[call] = state.o_hat._version
        return y

    def _is_left(self, x: Tensor) -> bool:
        """Return whether a sample has too few rows to gain."""
        if isinstance(self.layer, ModulatedConv2d):
            return False
        return x.numel() // x.shape[-1] < self.layer.settings.min_rows * self._step.batch

    def _state(self, x: Tensor, call: int) -> State:
        if self._step.makes:
            with torch.inference_mode(False):  # inference tensors cannot be changed outside
                self.states.append(self.layer.empty_state(x))
            self._versions.append(0)
            self._kinds.append(kind_of(x))
            return self.states[call]
        if call >= len(self.states):
            raise UserError(
                f"{self.name} is called more often than in the first step",
                expected=f"{len(self.states)} calls in a step",
                got=str(call + 1),
                remedy=f"leave the layer as it is: Settings(exclude=('{self.name}',))",
            )
        state = self.states[call]
        if self._kinds[call] != kind_of(x):
            self.layer.require_fitting(x, state, self.name)
        if state.o_hat._version != self._versions[call]:
            raise UserError(
                f"the model writes into the output of {self.name}, which is its cache",
                expected="a model that does not change outputs in place",
                got="an output that was changed in place since the step before",
                remedy="Settings(shared_outputs=False), which copies outputs",
            )
        return state

    def forget(self) -> None:
        """Drops all caches."""
        for held in (self.states, self._versions, self._kinds):
            held.clear()

    def set_state(self, call: int, state: State) -> None:
        """Replaces the caches of a call."""
        self.states[call] = state
        self._versions[call] = state.o_hat._version


def kind_of(x: Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return x.shape, x.dtype, x.device
