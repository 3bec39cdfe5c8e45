"""Finds layers that read concatenated tensors, such as the skip connections of a U-Net.

The parts have different ranges: Q-Diff (arXiv 2302.04304, section 3.3) gives each part a scale.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


class _Concatenations(TorchFunctionMode):
    """Follows concatenations of two tensors through functions that keep the shape."""

    def __init__(self) -> None:
        super().__init__()
        self._parts: dict[int, tuple[Tensor, tuple[int, ...]]] = {}  # holds the tensor, so that its id stays unique

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if not isinstance(result, Tensor):
            return result
        parts = self._joined(args, kwargs or {}, result) if func in (torch.cat, torch.concat) else None
        if parts is None and args and isinstance(args[0], Tensor) and args[0].shape == result.shape:
            parts = self.of(args[0])
        if parts is not None:
            self._parts[id(result)] = result, parts
        return result

    def of(self, x: Tensor) -> tuple[int, ...] | None:
        """Returns the channels of the two tensors that x concatenates."""
        found = self._parts.get(id(x))
        return None if found is None else found[1]

    def _joined(self, args: tuple[Any, ...], named: dict[str, Any], result: Tensor) -> tuple[int, ...] | None:
        tensors = args[0] if args else named.get("tensors")
        axis = args[1] if len(args) > 1 else named.get("dim", 0)
        if not isinstance(tensors, (tuple, list)) or len(tensors) != 2 or not isinstance(axis, int):
            return None
        channels = 1 if result.dim() == 4 else result.dim() - 1
        return tuple(x.shape[channels] for x in tensors) if axis % result.dim() == channels else None


def find_widths(
    model: nn.Module, layers: Mapping[str, nn.Module], run: Callable[[], object]
) -> dict[str, tuple[int, ...]]:
    """Returns the widths of the two parts of concatenated inputs, by layer.

    Args:
        layers: of the model, by name. run: calls the model once.
    """
    found: dict[str, tuple[int, ...]] = {}
    mode = _Concatenations()

    def see(name: str, x: Tensor) -> None:
        parts = mode.of(x)
        if parts is not None and sum(parts) == layers[name].weight.shape[1]:  # type: ignore[index]
            found[name] = parts

    with inputs_seen(layers, see), mode:
        run()
    return found


@contextmanager
def inputs_seen(layers: Mapping[str, nn.Module], see: Callable[[str, Tensor], None]) -> Iterator[None]:
    """Inside the block, calls `see` with the name and the input of each layer that is called."""

    def hook(name: str, _: nn.Module, args: tuple[Any, ...]) -> None:
        see(name, args[0])

    handles = [module.register_forward_pre_hook(partial(hook, name)) for name, module in layers.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
