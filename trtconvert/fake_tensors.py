"""Runs models on fake tensors, which have shapes but no values."""

from __future__ import annotations

import logging
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from trtconvert.mixed_types import tensors_in, writes_in_place


@contextmanager
def shapes_alone(module: nn.Module | None = None) -> Iterator[FakeTensorMode]:
    """Computes with fake tensors inside the block. Existing tensors may take part. Results of small existing tensors have values,
    unless a parameter takes part, see `_Values`.

    Args:
        module: its parameters are fake inside the block. A U-Net takes half the time then, as torch remembers the shapes of an
            operation's result only if all arguments are fake. Buffers stay: models read numbers from them. Tensors that the
            module keeps for its next call, such as a table of positions, are removed at the end: they would be fake.
    """

    def faked(x: Tensor) -> Tensor:
        return mode.from_tensor(x) if isinstance(x, nn.Parameter) else x

    with (
        without_tracebacks(),
        torch.compiler.set_stance("force_eager"),  # compiled functions would read the memory that fake tensors lack
        FakeTensorMode(allow_non_fake_inputs=True) as mode,
        nullcontext() if module is None else _restored(module),
        nullcontext() if module is None else _weights_replaced(module, faked),
        _Values(),
    ):
        yield mode


_FEW = 1024
"""Size limit, in elements, of tensors whose results have values. Models read numbers from such buffers, and branch on them."""


class _Values(TorchFunctionMode):
    """Gives results values if all tensor arguments are small, have values, and are not parameters. Layers are identified by their
    parameters, which therefore stay fake.

    Each result is a copy. A function in place writes into such a copy, never into a tensor of the model.
    """

    def __init__(self) -> None:
        super().__init__()
        self._made = WeakIdKeyDictionary()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        named = kwargs or {}
        read = [*tensors_in([*args, *named.values()], floating=False)]
        known = bool(read) and all(type(x) is Tensor and x.numel() <= _FEW for x in read)
        writes = writes_in_place(func) or getattr(func, "__name__", "") == "__set__"
        if not known or (writes and read[0] not in self._made):
            return func(*args, **named)
        with unset_fake_temporarily():
            result = func(*args, **named)
            return result if writes else tree_map_only(Tensor, self._copied, result)

    def _copied(self, x: Tensor) -> Tensor:
        copied = x.clone()
        self._made[copied] = True
        return copied


@contextmanager
def in_float32_shapes(module: nn.Module) -> Iterator[None]:
    """Replaces a module's 16-bit weights by expanded FP32 zeros, which take no memory, inside a block with fake tensors."""

    def zeros(x: Tensor) -> Tensor:
        if not (x.is_floating_point() and x.itemsize == 2):
            return x
        expanded = torch.zeros((), dtype=torch.float32).expand(x.shape)
        return nn.Parameter(expanded, requires_grad=False) if isinstance(x, nn.Parameter) else expanded

    with _weights_replaced(module, zeros):
        yield


@contextmanager
def _weights_replaced(module: nn.Module, by: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Replaces a module's parameters and buffers inside the block."""
    replaced = [
        (tensors, name, x, other)
        for part in module.modules()
        for tensors in cast(tuple[dict[str, Any], ...], (part._parameters, part._buffers))
        for name, x in tensors.items()
        if x is not None and (other := by(x)) is not x
    ]
    for tensors, name, _, other in replaced:
        tensors[name] = other
    try:
        yield
    finally:
        for tensors, name, x, _ in replaced:
            tensors[name] = x


_CONTAINERS = (dict, OrderedDict, defaultdict, list)
"""Types that can be written to, unlike some of their subclasses, such as diffusers' FrozenDict."""


@contextmanager
def _restored(module: nn.Module) -> Iterator[None]:
    """Restores the attributes of a module's parts at the end of the block, and the entries of their lists and dictionaries."""
    containers: list[Any] = [vars(part) for part in module.modules()]
    containers += [x for attributes in containers for x in attributes.values() if type(x) in _CONTAINERS]
    before = [(container, container.copy()) for container in containers]
    try:
        yield
    finally:
        for container, entries in before:
            container.clear()
            if isinstance(container, list):
                container.extend(entries)
            else:
                container.update(entries)


@contextmanager
def without_tracebacks() -> Iterator[None]:
    """Suppresses the traceback that torch logs when shapes do not fit, before it raises the error. Callers print the error."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    log.addFilter(_below_error)
    try:
        yield
    finally:
        log.removeFilter(_below_error)


def _below_error(record: logging.LogRecord) -> bool:
    return record.levelno < logging.ERROR
