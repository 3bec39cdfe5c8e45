"""Converts arguments and results of a diffusers model, with tensors in dictionaries and lists, to named tensors and back.

A structure, kept in the bundle, describes the content of each parameter; see `trtconvert.bundle.DiffusersRecord`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from numbers import Number
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from trtconvert.errors import UserError

Structure = Mapping[str, dict[str, Any]]
"""Description of each parameter's content."""

SHARE = ".share"
"""Suffix of the input with the shares of an argument that holds a timestep for each token or frame."""

MASK = ".mask"
"""Suffix of the mask that marks the given rows of padded rows."""


class PaddedRows(NamedTuple):
    """Tensors of different lengths, one for each sample, padded to one tensor.

    Attributes:
        rows: [B, N, …], padded with zeros; mask: [B, N], True for the sample's own rows.
    """

    rows: Tensor
    mask: Tensor


def padded_rows(tensors: Sequence[Tensor], least: int = 0) -> PaddedRows:
    """Pad tensors [n, …] to the length of the longest, and at least to `least` rows."""
    rows = _with_rows(pad_sequence(list(tensors), batch_first=True), least)
    lengths = torch.tensor([len(x) for x in tensors], device=rows.device)
    return PaddedRows(rows, torch.arange(rows.shape[1], device=rows.device) < lengths[:, None])


def _with_rows(x: Tensor, least: int) -> Tensor:
    """Pad [B, N, …] with zeros to at least `least` rows."""
    if x.shape[1] >= least:
        return x
    return torch.cat([x, x.new_zeros(x.shape[0], least - x.shape[1], *x.shape[2:])], dim=1)


def signature_of(function: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of a function or method.

    Some decorators take `*args, **kwargs` and do not name the decorated function (`apply_forward_hook` of diffusers 0.35): its
    signature is that of the only function in their closure.
    """
    signature = inspect.signature(function)
    kinds = {parameter.kind for parameter in signature.parameters.values()}
    if kinds == {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}:
        own = getattr(function := inspect.unwrap(function), "__func__", function)
        cells = [cell.cell_contents for cell in getattr(own, "__closure__", None) or ()]
        decorated = [x for x in cells if inspect.isfunction(x)]
        if len(decorated) == 1:
            bound = getattr(function, "__self__", None)
            return signature_of(decorated[0] if bound is None else decorated[0].__get__(bound))
    return signature


def parameters_of(function: Callable[..., Any]) -> list[str]:
    """Return the names of a function's parameters, in order; "**kwargs" if it takes any keyword."""
    prefix = {inspect.Parameter.VAR_KEYWORD: "**", inspect.Parameter.VAR_POSITIONAL: "*"}
    return [prefix.get(p.kind, "") + name for name, p in signature_of(function).parameters.items()]


def flat_arguments(bound: inspect.BoundArguments) -> dict[str, Any]:
    """Return the arguments of a call by name, including those in `**kwargs`."""
    arguments = dict(bound.arguments)
    for name, parameter in bound.signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            arguments |= arguments.pop(name, {})
    return arguments


def take_apart(
    arguments: Mapping[str, Any], least: int | None = None
) -> tuple[dict[str, dict[str, Any]], dict[str, Tensor]]:
    """Return the structure of a call's arguments and their tensors by name: `a.b` is entry b of argument a.

    Args:
        least: for models that take lists with an entry for each sample: the least padded length of prompts. The first argument
            becomes one tensor of all samples, other lists of as many tensors become `PaddedRows`, and tensors in dictionaries,
            such as a ControlNet's, are padded likewise. None for other models.
    Raises:
        UserError: an argument holds something other than tensors, numbers, text, None and collections of these; or samples of a
            list have different sizes.
    """
    tensors: dict[str, Tensor] = {}
    first = next(iter(arguments), "")

    def rows(name: str, value: Sequence[Tensor], least: int) -> dict[str, Any]:
        if name != first:
            tensors[name], tensors[name + MASK] = padded_rows(value, least)
            return {"rows": name, "least": 0}  # `with_least_rows` sets the number after all calls
        if len({x.shape for x in value}) > 1:
            raise UserError(
                f"the pipeline passes samples of different sizes to its model in one call, in '{name}'",
                expected="samples of one size, which an engine takes as one tensor",
                got=", ".join(str(list(x.shape)) for x in value),
                remedy="call the pipeline for one size at a time",
            )
        tensors[name] = torch.stack(list(value))
        return {"rows": name}

    def node(name: str, value: Any) -> dict[str, Any]:
        if isinstance(value, Tensor):
            if value.is_complex():
                raise UserError(
                    f"the pipeline passes '{name}' to its model, which an engine cannot take",
                    expected="tensors of real numbers",
                    got=f"{value.dtype}".removeprefix("torch."),
                    remedy="keep the pipeline's own model; or convert it through a function of your own, model.source: "
                    "package.module:function, whose forward takes real and imaginary parts",
                )
            tensors[name] = value
            plain = value.is_floating_point() or value.dtype == torch.int64
            return {"tensor": name} if plain else {"tensor": name, "dtype": str(value.dtype).removeprefix("torch.")}
        if isinstance(value, Mapping):
            inner = {str(key): node(f"{name}.{key}", item) for key, item in value.items()}
            if least is not None:
                rows = [key for key, of in inner.items() if "tensor" in of and tensors[of["tensor"]].dim() > 2]
                inner |= {key: inner[key] | {"least": 0} for key in rows}
            numbered = bool(value) and all(type(key) is int for key in value)
            return {"dict": inner, "numbered": True} if numbered else {"dict": inner}
        if isinstance(value, (list, tuple)):
            inside = {"list": [node(f"{name}.{index}", item) for index, item in enumerate(value)]}
            return inside | {"tuple": True} if isinstance(value, tuple) else inside
        if value is None or isinstance(value, (bool, int, float, str)):
            return {"value": value}
        if _is_unused_cache(value):
            return {"value": None}
        raise UserError(
            f"the pipeline passes '{name}' to its model, which an engine cannot take",
            expected="tensors, numbers, text, None, and dictionaries and lists of them",
            got=type(value).__name__,
            remedy=f"call the pipeline without the image or setting that causes '{name}' (model.options.call), or keep the "
            "pipeline's own model",
        )

    structure = {
        name: node(name, value)
        if least is None or not _tensors_of_samples(value, len(arguments[first]))
        else rows(name, value, least)
        for name, value in arguments.items()
    }
    return structure, tensors


def _tensors_of_samples(value: Any, samples: int) -> bool:
    return isinstance(value, (list, tuple)) and len(value) == samples and all(isinstance(x, Tensor) for x in value)


def with_least_rows(structure: Structure, least: Mapping[str, int]) -> dict[str, dict[str, Any]]:
    """Set the least numbers of padded rows, by name, in a structure."""

    def filled(node: dict[str, Any]) -> dict[str, Any]:
        if "dict" in node:
            return node | {"dict": {key: filled(item) for key, item in node["dict"].items()}}
        return node | {"least": least[node.get("rows") or node["tensor"]]} if "least" in node else node

    return {name: filled(node) for name, node in structure.items()}


def share_timesteps(
    structure: Structure, tensors: Mapping[str, Tensor], timestep: str, others: Collection[str]
) -> tuple[dict[str, dict[str, Any]], dict[str, Tensor]]:
    """Split timesteps of tokens or frames into the timestep of each sample, that of its noisiest token, and shares of it.

    Bins, plans and schedules follow the sample's timestep. Shares of a given image are 0 at every step, so that examples remain
    valid at any timestep.

    Args:
        structure, tensors: of the arguments; timestep: name of the denoiser's timestep.
        others: arguments that may hold the same timestep, or 0.
    Returns:
        Structure and tensors with `timestep` [B], and with NAME.share [B, …] for each argument with several timesteps per
        sample. {"share": NAME.share, "of": timestep} is their product.
    """
    own = tensors[timestep]
    rows = next(x for name, x in tensors.items() if name != timestep).shape[0]
    largest = float(own.max())
    told = [timestep]
    if largest not in (0, 1):  # masks hold 0 and 1 too
        told += [
            name
            for name in others
            if (x := tensors.get(name)) is not None
            and bool(torch.isin(x.float(), torch.tensor([0.0, largest], device=x.device)).all())
            and float(x.max()) == largest
        ]
    kept = {name: x for name, x in tensors.items() if name == timestep or name not in told}
    changed = dict(structure)
    shared: dict[str, Tensor] = {}
    for name in told:
        x = tensors[name]
        if x.dim() > 1 and len(x) == rows:
            shared[name] = x
            changed[name] = {"share": name + SHARE, "of": timestep}
        elif name != timestep and x.numel() in (1, rows):
            changed[name] = {"tensor": timestep}
        else:
            kept[name] = x
    if shared:
        kept[timestep], shares = shares_of(shared, own if timestep not in shared else None)
        kept |= shares
    return changed, kept


def shares_of(timesteps: Mapping[str, Tensor], own: Tensor | None) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the largest timestep of each sample, [B], and all timesteps as shares of it, named with `SHARE`.

    Shares of a sample without noise are 1.

    Args:
        timesteps: timesteps [B, …] by argument; own: further timesteps, one for each sample.
    """
    noisiest = torch.stack([x.flatten(1).amax(1).float() for x in timesteps.values()]).amax(0)
    if own is not None:
        noisiest = torch.maximum(noisiest, own.to(noisiest).reshape(-1).expand_as(noisiest))
    shares = {}
    for name, x in timesteps.items():
        of = noisiest.reshape(-1, *[1] * (x.dim() - 1))
        shares[name + SHARE] = torch.where(of > 0, x.float() / of, 1.0)
    return noisiest, shares


def is_list_of_samples(structure: Structure) -> bool:
    """Return whether a denoiser takes its samples, and returns its predictions, as a list."""
    return "rows" in next(iter(structure.values()), {})


def put_together(structure: Structure, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Rebuild the arguments of a structure from tensors; lists with an entry for each sample become tensors or `PaddedRows`."""

    def value(node: dict[str, Any]) -> Any:
        if "tensor" in node:
            x = tensors[node["tensor"]]
            return x.to(getattr(torch, node["dtype"])) if "dtype" in node else x
        if "share" in node:
            share = tensors[node["share"]]
            return tensors[node["of"]].reshape(-1, *[1] * (share.dim() - 1)) * share
        if "rows" in node:
            x = tensors[node["rows"]]
            return PaddedRows(x, tensors[node["rows"] + MASK].bool()) if "least" in node else x
        if "dict" in node:
            return {int(key) if "numbered" in node else key: value(item) for key, item in node["dict"].items()}
        if "list" in node:
            items = [value(item) for item in node["list"]]
            return tuple(items) if "tuple" in node else items
        return node["value"]

    return {name: value(node) for name, node in structure.items()}


def tensors_of(structure: Structure, arguments: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the named tensors in a call's arguments, which must fit the structure.

    Arguments that are None or empty may be missing or added. A number may replace a tensor.

    Raises:
        UserError: a tensor is missing, or a constant differs from the exported model's.
    """
    found: dict[str, Tensor] = {}
    shared: dict[str, Tensor] = {}

    def match(name: str, node: dict[str, Any], value: Any) -> None:
        if "tensor" in node:
            if isinstance(value, (int, float)):
                value = torch.tensor(value)
            if not isinstance(value, Tensor):
                raise _different(name, "a tensor", value)
            if "least" in node and value.dim() > 1:
                value = _with_rows(value, node["least"])
            if (known := found.setdefault(node["tensor"], value)) is not value and not _all_equal(known, value):
                raise _different(name, f"the same numbers as '{node['tensor']}'", value)
        elif "share" in node:
            if not isinstance(value, Tensor) or value.dim() < 2:
                raise _different(name, "a tensor with a timestep for each token or frame", value)
            shared[name] = value
        elif "rows" in node:
            if not isinstance(value, Sequence) or not value or not all(isinstance(x, Tensor) for x in value):
                raise _different(name, "a list with a tensor for each sample", value)
            if "least" in node:
                found[node["rows"]], found[node["rows"] + MASK] = padded_rows(value, node["least"])
            elif len({x.shape for x in value}) > 1:
                raise _different(name, "tensors of one size", [list(x.shape) for x in value])
            else:
                found[node["rows"]] = torch.stack(list(value))
        elif "dict" in node:
            given = {str(key): item for key, item in value.items()} if isinstance(value, Mapping) else {}
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
    if shared:
        timestep = structure[next(iter(shared))]["of"]
        own = found.get(timestep)
        found[timestep], shares = shares_of(shared, own)
        if own is not None and not _all_equal(found[timestep], own):
            raise _different(timestep, "the timestep of each sample's noisiest token or frame", own)
        found |= shares
    return found


def _all_equal(x: Tensor, y: Tensor) -> bool:
    """Return whether two tensors hold the same numbers, or one number equals all of the other. Waits for the device."""
    return x.numel() in (1, y.numel()) and bool((x.reshape(-1) == y.to(x.device).reshape(-1)).all())


def _nothing(value: Any) -> bool:
    return value is None or (isinstance(value, (Mapping, list, tuple)) and not value) or _is_unused_cache(value)


def _is_unused_cache(value: Any) -> bool:
    """Return whether a value is a cache of keys and values that is turned off, as GLM-Image's without an image."""
    caches = getattr(value, "caches", None)
    return isinstance(caches, list) and all(getattr(cache, "mode", "") is None for cache in caches)


def _plain(value: Any) -> bool:
    """Return whether a value is a number, also of numpy, or text. Arrays would compare element by element."""
    return isinstance(value, (Number, str))


_TURNED_OFF = {
    "isolate_modalities": "modality_scale: 1 and audio_modality_scale: 1",
    "spatio_temporal_guidance_blocks": "stg_scale: 0 and audio_stg_scale: 0",
}
"""Settings that turn off LTX-2's guidance, by the arguments that it changes within a call."""


def _different(name: str, expected: str, value: Any) -> UserError:
    shape = None if _plain(value) else getattr(value, "shape", None)
    kind = "a tensor" if isinstance(value, Tensor) else "an array"
    remedy = "call the pipeline as in the conversion, or convert it for this call (model.options in the recipe)"
    if settings := _TURNED_OFF.get(name):
        remedy = f"call the pipeline with {settings}, and set model.options.call of the recipe likewise"
    return UserError(
        f"the model was converted for another '{name}'",
        expected=expected,
        got=repr(value) if shape is None else f"{kind} of shape {list(shape)}",
        remedy=remedy,
    )
