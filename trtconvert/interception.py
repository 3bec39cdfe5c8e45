"""What a model calls while it runs, whatever its classes are: a `TorchFunctionMode` around the forward sees every call.

Whoever is interested in some functions (attention, linear layers) says what happens at their calls. Each call has a name:
the path of the module that makes it.
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
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from trtconvert.noise_input import NoiseInput, place_of
from trtconvert.unfused import Unfused, UnfusedAttention, left_softmax, unfused_attention

Hook = Callable[["Caller", tuple[Any, ...], dict[str, Any]], Any]
"""What is done instead of a call: gets the caller, positional and named arguments, and returns what the function would."""

Hooks = Mapping[Callable[..., Any], Hook]
"""Function of torch, as `TorchFunctionMode` names it: its hook."""


class Caller:
    """Who makes a call, in one forward.

    Attributes:
        timestep: [B] FP32, what the denoiser was given for each sample; its place, where that is no timestep.
        tokens_first: samples of the call of torch's multi-head attention that is running, whose rows are those of the first token
            of each sample, of the second, …; None outside of one.
    """

    def __init__(self, model: nn.Module, timestep: Tensor) -> None:
        self.timestep = timestep
        self.tokens_first: int | None = None
        self._model = model
        self._names: dict[int, str] = {}
        self._calls: dict[str, Counter[str]] = {}

    def calls(self) -> dict[str, Counter[str]]:
        """How many calls of each kind each module has made so far."""
        return {kind: counts.copy() for kind, counts in self._calls.items()}

    def go_on_from(self, calls: Mapping[str, Counter[str]]) -> None:
        """Name calls as after these ones."""
        self._calls = {kind: counts.copy() for kind, counts in calls.items()}

    def name(self, kind: str) -> str:
        """The calling module's path, with `#2`, `#3`, … for its further calls of a kind in one forward."""
        module = self.module()
        calls = self._calls.setdefault(kind, Counter())
        calls[module] += 1
        name = module or "denoiser"
        return name if calls[module] == 1 else f"{name}#{calls[module]}"

    def module(self) -> str:
        """Path of the module whose forward is running; "" is the model itself.

        Read from the stack at each call. Hooks on all modules, which would keep the path up to date, cost a tenth of a small
        model's time, and run for every thread that uses the model.
        """
        if not self._names:
            # By their attributes: of models that have a module under two names torch.export calls stand-ins, which share them.
            for name, module in self._model.named_modules():
                self._names.setdefault(id(vars(module)), name)
        frame = sys._getframe()
        while frame is not None:
            if frame.f_code is _MODULE_CALL and (name := self._names.get(id(vars(frame.f_locals["self"])))) is not None:
                return name
            frame = frame.f_back
        return ""


_MODULE_CALL = nn.Module._call_impl.__code__
"""The function that every call of a module goes through."""


def module_of(model: nn.Module, error: BaseException) -> str:
    """Path of the innermost module that was running when a forward failed; empty for the model itself."""
    names = {id(vars(module)): name for name, module in model.named_modules()}
    found, trace = "", error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code is _MODULE_CALL:
            found = names.get(id(vars(trace.tb_frame.f_locals["self"])), found)
        trace = trace.tb_next
    return found


class Interception(TorchFunctionMode):
    """One forward, on one thread: leaves nothing on the model, so that forwards may run side by side and may fail.

    With a hook of `unfused_attention` attention is seen that the model writes out, see `trtconvert.unfused`. The hook gets the
    `UnfusedAttention` at its product with the values.
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

    def end(self) -> None:
        """The forward has ended: what it left of attention that it writes out goes to the hook of `left_softmax`."""
        if self._unfused is not None and (hook := self._hooks.get(left_softmax)) is not None:
            for softmax in self._unfused.left():
                hook(self._caller, (softmax,), {})

    def restart(self) -> Callable[[], Interception]:
        """Gives interceptions for what follows now, each time that it is computed again: its calls have the same names."""
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
        return func(*args, **named) if hook is None else hook(self._caller, args, dict(named))

    def _attend(self, attention: UnfusedAttention) -> Tensor:
        return self._hooks[unfused_attention](self._caller, (attention,), {})

    def _see_through(self, func: Callable[..., Any], args: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        """What torch's multi-head attention does, so that its own calls are seen. Where it gives its weights it calls no
        attention: then it is asked for its output alone, and for the weights by themselves, which most models throw away."""
        bound = _signature_of(func).bind(*args, **named)
        bound.apply_defaults()
        query = bound.arguments["query"]
        both = bound.arguments["need_weights"] and scaled_dot_product_attention in self._hooks
        weights = func(*bound.args, **bound.kwargs)[1] if both else None
        if both:
            bound.arguments["need_weights"] = False
        self._caller.tokens_first = query.shape[1] if query.dim() == 3 else 1
        try:
            with self:  # while a mode handles a call it sees none of those within
                output, own = _COMPOSITE[func](*bound.args, **bound.kwargs)
        finally:
            self._caller.tokens_first = None
        return output, weights if both else own


@functools.cache
def _signature_of(func: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(func)


def _transparent(function: FunctionType) -> FunctionType:
    """A function of torch that is written in Python, without the question at its start who handles it instead."""
    unasked = function.__globals__ | {"has_torch_function": lambda _: False}
    copy = FunctionType(function.__code__, unasked, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


_COMPOSITE = {
    nn.functional.multi_head_attention_forward: _transparent(nn.functional.multi_head_attention_forward),
}
"""Functions that call others which are of interest."""


class InterceptedDenoiser(nn.Module):
    """A denoiser some of whose calls of torch are hooked.

    Takes the denoiser's inputs by position, in the order of `input_names`, or by name, and returns its first output
    tensor, so that it can be exported as it is and driven by a sampler.

    Args:
        denoiser: any module.
        input_names: names of forward's parameters.
        timestep_input: which of them is the timestep; a scalar or [B].
        hooks: what happens at calls of torch's functions.
        noise_input: what the timestep input holds, where it is no timestep: callers see its places.
        around: what surrounds each forward, within its interception.
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
        with Interception(self.denoiser, self.hooks, timestep) as forward, self.around(forward):
            output = first_tensor(self.denoiser(**named))
        forward.end()
        return output


def samples_of(inputs: Mapping[str, Tensor], timestep_input: str) -> int:
    """How many samples a call of a denoiser is for: as many as its first input has, but the timestep."""
    return next(x for name, x in inputs.items() if name != timestep_input).shape[0]


def first_tensor(output: Any) -> Tensor:
    """The tensor in what a denoiser returns: itself, the first of a tuple, or diffusers' `.sample`."""
    if isinstance(output, Tensor):
        return output
    return output[0] if isinstance(output, (tuple, list)) else output.sample
