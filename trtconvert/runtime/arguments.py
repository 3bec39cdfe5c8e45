"""Arguments and results of a diffusers model, which may hold tensors in dictionaries and lists, as named tensors and back.

A structure says which parameter holds what; `trtconvert.bundle.DiffusersRecord` describes it. It travels in the bundle.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from numbers import Number
from typing import Any

import torch
from torch import Tensor

from trtconvert.errors import UserError

Structure = Mapping[str, dict[str, Any]]
"""By parameter, what it holds."""


def parameters_of(function: Callable[..., Any]) -> list[str]:
    """Names of a function's parameters, in order; "**kwargs" where it takes any keyword."""
    prefix = {inspect.Parameter.VAR_KEYWORD: "**", inspect.Parameter.VAR_POSITIONAL: "*"}
    return [prefix.get(p.kind, "") + name for name, p in inspect.signature(function).parameters.items()]


def flat_arguments(bound: inspect.BoundArguments) -> dict[str, Any]:
    """The arguments of a call by name, those that `**kwargs` took among the others."""
    arguments = dict(bound.arguments)
    for name, parameter in bound.signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            arguments |= arguments.pop(name, {})
    return arguments


def take_apart(arguments: Mapping[str, Any]) -> tuple[dict[str, dict[str, Any]], dict[str, Tensor]]:
    """The structure of a call's arguments, and the tensors in them: `a.b` is entry b of argument a.

    Raises:
        UserError: an argument holds something that is neither a tensor, a number, text, None, nor a collection of those.
    """
    tensors: dict[str, Tensor] = {}

    def node(name: str, value: Any) -> dict[str, Any]:
        if isinstance(value, Tensor):
            tensors[name] = value
            plain = value.is_floating_point() or value.dtype == torch.int64
            return {"tensor": name} if plain else {"tensor": name, "dtype": str(value.dtype).removeprefix("torch.")}
        if isinstance(value, Mapping):
            return {"dict": {key: node(f"{name}.{key}", item) for key, item in value.items()}}
        if isinstance(value, (list, tuple)):
            return {"list": [node(f"{name}.{index}", item) for index, item in enumerate(value)]}
        if value is None or isinstance(value, (bool, int, float, str)):
            return {"value": value}
        raise UserError(
            f"the pipeline passes '{name}' to its model, which an engine cannot take",
            expected="tensors, numbers, text, None, and dictionaries and lists of them",
            got=type(value).__name__,
            remedy="call the pipeline without what sets it, in model.options.call",
        )

    return {name: node(name, value) for name, value in arguments.items()}, tensors


def put_together(structure: Structure, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The arguments of a structure with given tensors in it."""

    def value(node: dict[str, Any]) -> Any:
        if "tensor" in node:
            x = tensors[node["tensor"]]
            return x.to(getattr(torch, node["dtype"])) if "dtype" in node else x
        if "dict" in node:
            return {key: value(item) for key, item in node["dict"].items()}
        if "list" in node:
            return [value(item) for item in node["list"]]
        return node["value"]

    return {name: value(node) for name, node in structure.items()}


def tensors_of(structure: Structure, arguments: Mapping[str, Any]) -> dict[str, Tensor]:
    """The named tensors in a call's arguments, which must be what the structure says.

    Arguments that are None or empty may come and go. A number may stand where a tensor is expected.

    Raises:
        UserError: a tensor is missing, or a constant differs from the one that the exported model has taken in.
    """
    found: dict[str, Tensor] = {}

    def match(name: str, node: dict[str, Any], value: Any) -> None:
        if "tensor" in node:
            if isinstance(value, (int, float)):
                value = torch.tensor(value)
            if not isinstance(value, Tensor):
                raise _different(name, "a tensor", value)
            found[node["tensor"]] = value
        elif "dict" in node:
            given = value if isinstance(value, Mapping) else {}
            if not isinstance(value, Mapping) and value is not None:
                raise _different(name, "a dictionary", value)
            for key in {**node["dict"], **given}:
                match(f"{name}.{key}", node["dict"].get(key, {"value": None}), given.get(key))
        elif "list" in node:
            if not isinstance(value, Sequence) or len(value) != len(node["list"]):
                raise _different(name, f"{len(node['list'])} values", value)
            for index, item in enumerate(node["list"]):
                match(f"{name}.{index}", item, value[index])
        elif not (_nothing(value) and _nothing(node["value"])) and not (_plain(value) and value == node["value"]):
            raise _different(name, repr(node["value"]), value)

    for name in {**structure, **arguments}:
        match(name, structure.get(name, {"value": None}), arguments.get(name))
    return found


def _nothing(value: Any) -> bool:
    return value is None or (isinstance(value, (Mapping, list, tuple)) and not value)


def _plain(value: Any) -> bool:
    """Whether it is a number, numpy's among them, or text. Arrays compare element by element."""
    return isinstance(value, (Number, str))


def _different(name: str, expected: str, value: Any) -> UserError:
    shape = None if _plain(value) else getattr(value, "shape", None)
    kind = "a tensor" if isinstance(value, Tensor) else "an array"
    return UserError(
        f"the model was converted for another '{name}'",
        expected=expected,
        got=repr(value) if shape is None else f"{kind} of shape {list(shape)}",
        remedy="call the pipeline as it was called for the conversion, or convert it for this call (model.options in the recipe)",
    )
