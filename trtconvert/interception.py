"""Hooks into the functions of torch that a model calls: a `TorchFunctionMode` around the forward sees every call.

A hook replaces the calls of one function (attention, linear layers). The name of a call is the path of the calling module.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload, OpOverloadPacket
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from trtconvert.noise_input import NoiseInput, place_of
from trtconvert.unfused import Unfused, UnfusedAttention, left_softmax, unfused_attention

Hook = Callable[["Caller", tuple[Any, ...], dict[str, Any]], Any]
"""Replaces a call: gets the caller, positional and named arguments, and returns the result."""

Hooks = Mapping[Callable[..., Any], Hook]
"""Hooks by function of torch, as `TorchFunctionMode` names it."""


_PRODUCTS = frozenset(("mm", "addmm", "bmm", "baddbmm", "linear", "matmul", "convolution"))


def unseen_product(operator: str) -> None:
    """A key of `Hooks`: its hook gets the name of each product and attention that is called by TorchScript, by C++ or through
    `torch.ops`, and not by a function of torch. Calls in TorchScript are seen inside a `TorchDispatchMode` alone."""


def _is_product(operator: OpOverload | OpOverloadPacket) -> bool:
    _, kind, *_ = str(operator).split(".")
    return kind in _PRODUCTS or "scaled_dot_product" in kind


class Caller:
    """The place of calls in one forward.

    Attributes:
        timestep: [B] FP32 timestep of each sample, or its place if the denoiser's input is no timestep.
        tokens_first: number of samples in the running call of torch's multi-head attention, whose rows are those of the first
            token of each sample, then of the second, …; None outside of such a call.
    """

    def __init__(self, model: nn.Module, timestep: Tensor) -> None:
        self.timestep = timestep
        self.tokens_first: int | None = None
        self._model = model
        self._names: dict[int, str] = {}
        self._calls: dict[str, Counter[str]] = {}

    def calls(self) -> dict[str, Counter[str]]:
        """Returns the number of calls of each kind by module, so far."""
        return {kind: counts.copy() for kind, counts in self._calls.items()}

    def go_on_from(self, calls: Mapping[str, Counter[str]]) -> None:
        """Continues the counts of these calls."""
        self._calls = {kind: counts.copy() for kind, counts in calls.items()}

    def name(self, kind: str) -> str:
        """Returns the calling module's path, with `#2`, `#3`, … for its further calls of a kind in one forward."""
        module = self.module()
        calls = self._calls.setdefault(kind, Counter())
        calls[module] += 1
        name = module or "denoiser"
        return name if calls[module] == 1 else f"{name}#{calls[module]}"

    def module(self) -> str:
        """Returns the path of the module whose forward is running; "" for the model itself.

        The path is read from the stack at each call. Hooks on all modules that track the path would cost a tenth of a small
        model's time, and run for every thread that uses the model.
        """
        if not self._names:
            # By their attributes, as torch.export calls stand-ins of modules with two names, which share the attributes.
            for name, module in self._model.named_modules():
                self._names.setdefault(id(vars(module)), name)
        frame = sys._getframe()
        while frame is not None:
            if frame.f_code is _MODULE_CALL and (name := self._names.get(id(vars(frame.f_locals["self"])))) is not None:
                return name
            frame = frame.f_back
        return ""


_MODULE_CALL = nn.Module._call_impl.__code__
"""The function that every call of a module runs."""


def module_of(model: nn.Module, error: BaseException) -> str:
    """Returns the path of the innermost module that was running when a forward failed; "" for the model itself."""
    names = {id(vars(module)): name for name, module in model.named_modules()}
    found, trace = "", error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code is _MODULE_CALL:
            found = names.get(id(vars(trace.tb_frame.f_locals["self"])), found)
        trace = trace.tb_next
    return found


class Interception(TorchFunctionMode):
    """One forward, on one thread. It leaves nothing on the model, so that forwards may run side by side and may fail.

    With a hook of `unfused_attention`, attention that the model writes out is seen too, see `trtconvert.unfused`. The hook gets
    the `UnfusedAttention` at its product with the values.
    """

    def __init__(self, model: nn.Module, hooks: Hooks, timestep: Tensor) -> None:
        super().__init__()
        self._model, self._hooks, self._caller = model, hooks, Caller(model, timestep)
        self._unfused = (
            Unfused(self._attend, timestep.shape[0], self._caller.module) if unfused_attention in hooks else None
        )

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if self._unfused is None:
            return self._call(func, args, kwargs or {})
        return self._unfused(func, args, kwargs or {}, self._call)

    def module(self) -> str:
        """Returns the path of the module whose forward is running; "" for the model itself."""
        return self._caller.module()

    def end(self) -> None:
        """Ends the forward: passes each softmax without a converted attention to the hook of `left_softmax`."""
        if self._unfused is not None and (hook := self._hooks.get(left_softmax)) is not None:
            for softmax in self._unfused.left():
                hook(self._caller, (softmax,), {})

    def restart(self) -> Callable[[], Interception]:
        """Returns a function that makes interceptions for repetitions of the rest of the forward, whose calls have the same
        names."""
        calls = self._caller.calls()

        def again() -> Interception:
            other = Interception(self._model, self._hooks, self._caller.timestep)
            other._caller.go_on_from(calls)
            return other

        return again

    def _call(self, func: Callable[..., Any], args: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        if func in _COMPOSITE:
            return self._see_through(func, args, named)
        hook = self._hooks.get(func)
        if hook is not None:
            return hook(self._caller, args, dict(named))
        if isinstance(func, (OpOverload, OpOverloadPacket)) and unseen_product in self._hooks and _is_product(func):
            self._hooks[unseen_product](self._caller, (str(func),), {})
        return func(*args, **named)

    def _attend(self, attention: UnfusedAttention) -> Tensor:
        return self._hooks[unfused_attention](self._caller, (attention,), {})

    def _see_through(self, func: Callable[..., Any], args: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        """Runs torch's multi-head attention so that hooks see its calls. When asked for its weights it does not call attention:
        then it is called once for the weights and once for the output. Most models discard the weights."""
        bound = _signature_of(func).bind(*args, **named)
        bound.apply_defaults()
        query = bound.arguments["query"]
        both = bound.arguments["need_weights"] and scaled_dot_product_attention in self._hooks
        weights = func(*bound.args, **bound.kwargs)[1] if both else None
        if both:
            bound.arguments["need_weights"] = False
        self._caller.tokens_first = query.shape[1] if query.dim() == 3 else 1
        try:
            with self:  # a mode that handles a call does not see the calls inside
                output, own = _COMPOSITE[func](*bound.args, **bound.kwargs)
        finally:
            self._caller.tokens_first = None
        return output, weights if both else own


@functools.cache
def _signature_of(func: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(func)


def _transparent(function: FunctionType) -> FunctionType:
    """Returns a copy of a Python function of torch that does not dispatch to modes at its start."""
    unasked = function.__globals__ | {"has_torch_function": lambda _: False}
    copy = FunctionType(function.__code__, unasked, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


_COMPOSITE = {
    nn.functional.multi_head_attention_forward: _transparent(nn.functional.multi_head_attention_forward),
}
"""Functions whose inner calls may have hooks."""


class InterceptedDenoiser(nn.Module):
    """A denoiser with hooks for its calls of torch.

    Takes the denoiser's inputs by position, in the order of `input_names`, or by name, and returns its first output tensor, so
    that samplers can call it and exporters can export it.

    Args:
        denoiser: any module.
        input_names: of forward's parameters.
        timestep_input: name of the timestep, a scalar or [B].
        hooks: of torch's functions.
        noise_input: contents of a timestep input that holds no timestep: hooks see its places.
        around: makes a context for each forward, inside its interception.
    """

    def __init__(
        self,
        denoiser: nn.Module,
        input_names: Iterable[str],
        timestep_input: str,
        hooks: Hooks,
        noise_input: NoiseInput | None = None,
        around: Callable[[Interception], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        super().__init__()
        self.denoiser = denoiser
        self.input_names = tuple(input_names)
        self.timestep_input = timestep_input
        self.hooks = hooks
        self.noise_input = noise_input
        self.around = around

    def forward(self, *inputs: Tensor, **by_name: Tensor) -> Tensor:
        named = dict(zip(self.input_names, inputs, strict=False)) | by_name
        batch = samples_of(named, self.timestep_input)
        timestep = named[self.timestep_input].to(torch.float32).reshape(-1).expand(batch)
        timestep = place_of(self.noise_input, timestep)
        # Hooks do not see the calls of compiled functions.
        with (
            torch.compiler.set_stance("force_eager"),
            Interception(self.denoiser, self.hooks, timestep) as forward,
            self.around(forward),
        ):
            output = first_tensor(self.denoiser(**named))
        forward.end()
        return output


def samples_of(inputs: Mapping[str, Tensor], timestep_input: str) -> int:
    """Returns the number of samples in a call of a denoiser: the rows of its first input other than the timestep."""
    return next(x for name, x in inputs.items() if name != timestep_input).shape[0]


def first_tensor(output: Any) -> Tensor:
    """Returns the tensor of a denoiser's result: the result itself, the first of a tuple, or diffusers' `.sample`."""
    if isinstance(output, Tensor):
        return output
    return output[0] if isinstance(output, (tuple, list)) else output.sample
