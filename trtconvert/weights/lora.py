"""LoRA files (Hu et al. 2021, arXiv 2106.09685): W + scale · alpha/rank · up · down, read in the layouts that are in use.

| layout | names |
| --- | --- |
| diffusers | `unet.….attn1.to_q.lora.down.weight`, and its older `….attn1.processor.to_q_lora.up.weight` |
| peft | `unet.….to_q.lora_A.weight` (down), `….lora_B.weight` (up); the alpha in the file's metadata or in adapter_config.json |
| kohya | `lora_unet_…_to_q.lora_down.weight`, `….lora_up.weight`, `….alpha`; of convolutions (LoCon) `….lora_mid.weight` too |

Modules are called as diffusers calls them or as the model's original code does (`trtconvert.weights.lora_names`). Differences
themselves, `….diff` and `….diff_b`, are taken as they are. Where a file has no alpha, it is the rank, as those who write such
files mean it; a file of peft's own must have one.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from trtconvert.errors import UserError, first_line
from trtconvert.weights.finite import is_finite
from trtconvert.weights.lora_files import PEFT_CONFIG, refuse_unreadable, settings_beside
from trtconvert.weights.lora_names import (
    DENOISER,
    DENOISER_PREFIXES,
    PEFT_ROOT,
    Place,
    component_of,
    flat,
    further_denoiser,
    named,
    of_one_denoiser,
    places,
)

_METADATA = "lora_adapter_metadata"
"""Where diffusers keeps the same in a file."""

_KEY = re.compile(
    r"(?P<module>.+?)"
    r"(?:(?:_lora|\.lora|\.lora_linear_layer)\.(?P<theirs>down|up)\.weight"
    r"|\.lora_(?P<part>down|up|mid|A|B)(?:\.\w+)??\.weight"  # peft may put an adapter's name between
    r"|(?:_lora)?\.(?P<plain>alpha|diff|diff_b))"
)
_PARTS = {"A": "down", "B": "up"}

_OTHERS = {
    "hada_": "LoHa, a product of two LoRAs",
    "lokr_": "LoKr, a Kronecker product",
    "dora_scale": "DoRA, which norms weights anew",
    "lora_magnitude_vector": "DoRA, which norms weights anew",
    "oft_": "OFT, which turns weights",
    "lora_embedding_": "a LoRA of a table of embeddings",
}
"""Parts of names that tell of what cannot be merged."""

_OWN_NAMES = {"to_q": "q_proj", "to_k": "k_proj", "to_v": "v_proj", "to_out": "out_proj"}
"""What diffusers' older files call the layers of a text encoder's `self_attn`."""


@dataclass(frozen=True)
class Update:
    """What a LoRA adds to a weight, at a scale of 1.

    Attributes:
        weight: its name in the state dict; shape: of it.
        factor: alpha / rank.
        up: [rows, rank, …] and down: [rank, columns, …], of a convolution with kernels; mid: [rank, rank, *kernel] between them.
            Or up is the difference itself, with nothing else.
    """

    weight: str
    shape: tuple[int, ...]
    factor: float
    up: Tensor
    down: Tensor | None = None
    mid: Tensor | None = None

    @property
    def tensors(self) -> list[Tensor]:
        return [x for x in (self.up, self.down, self.mid) if x is not None]

    def of(self, tensors: Iterator[Tensor]) -> Update:
        """The same with the next ones of other tensors, in the order of its own: on another device, say."""
        parts = {name: next(tensors) for name in ("up", "down", "mid") if getattr(self, name) is not None}
        return replace(self, **parts)

    def add_to(self, weight: Tensor, scale: float) -> None:
        """Add so many times the difference to a weight, in place.

        Args:
            weight: FP32 of the shape, contiguous, or a matrix that lies transposed.
        """
        device, dtype = weight.device, torch.float32
        up = self.up.to(device, dtype) * (scale * self.factor)  # which is smaller than the product
        if self.down is None:
            weight += up.reshape(self.shape)
            return
        down = self.down.to(device, dtype)
        if self.mid is not None:  # a convolution 1 × 1, one with the kernel, and one 1 × 1
            down = torch.einsum("om...,mi->oi...", self.mid.to(device, dtype), down.flatten(1))
        matrix = weight if weight.dim() == 2 else weight.view(len(weight), -1)
        if 1 in matrix.shape:  # of a row that lies transposed cuBLAS takes the strides for another matrix's
            matrix += up.flatten(1) @ down.flatten(1)
        else:
            matrix.addmm_(up.flatten(1), down.flatten(1))


@dataclass
class _Layer:
    """What a file has for one module: tensors by part, the alpha, and what the file calls each of them."""

    parts: dict[str, Tensor] = field(default_factory=dict)
    alpha: float | None = None
    keys: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class LoraFile:
    """A file that was read and checked as far as can be told without the model.

    Attributes:
        path: of it.
        layers: by the names of modules as the file has them.
    """

    path: Path
    layers: Mapping[str, _Layer]

    @property
    def components(self) -> list[str]:
        """What names in it begin with, in the recipe's words, the denoiser first."""
        return named({component_of(name)[0] for name in self.layers})

    def in_memory(self) -> LoraFile:
        """The same in memory of its own: what was read is mapped, and follows who writes into the file."""
        layers = {
            name: _Layer({part: _copied(x) for part, x in layer.parts.items()}, layer.alpha, layer.keys)
            for name, layer in self.layers.items()
        }
        return LoraFile(self.path, layers)

    def updates(self, target: str, weights: Mapping[str, Sequence[int]], title: str) -> list[Update]:
        """What the file adds to the weights of a component.

        Args:
            target: the component. Parts for other components, and for another denoiser of the pipeline, are left out.
            weights: its floating-point weights and biases and their shapes, by the names of the state dict.
            title: of the component's model, for messages.
        Raises:
            UserError: it has nothing for the component, or something twice; a module is not there, or has another shape.
        """
        suffix = ".weight"
        modules = {name.removesuffix(suffix): shape for name, shape in weights.items() if name.endswith(suffix)}
        of = {name: component_of(name)[0] for name in self.layers}
        own = (target,) in of.values()
        layers = {
            name: layer
            for name, layer in self.layers.items()
            if of[name] in ((), (target,)) or (target in of[name] and not own)
        }
        if not layers:
            raise UserError(
                f"the LoRA {self.path} has nothing for {target}",
                expected=f"names of modules of {title}",
                got=f"names of {', '.join(self.components)}",
                remedy=f"merge it into {' or '.join(self.components)}: as target in a recipe, or by its own set_loras",
            )
        if target == DENOISER:
            layers = self._of_one_denoiser(layers, modules, title)
        known = places(modules)
        found = {name: _place(name, known) for name in layers}
        if unknown := [name for name, place in found.items() if place is None]:
            raise self._unknown(unknown, len(layers), known, title)
        updates: list[Update] = []
        misfits: list[str] = []
        given: dict[str, _Layer] = {}
        for name, layer in layers.items():
            place = found[name]
            assert place is not None
            made = _updates_of(layer, place, weights)
            if isinstance(made, str):
                misfits.append(f"{name}: {made}")
                continue
            updates += made
            for update in made:
                if (other := given.setdefault(update.weight, layer)) is not layer:
                    raise _twice(self.path, update.weight, *(next(iter(x.keys.values())) for x in (other, layer)))
        if misfits:
            raise UserError(
                f"the LoRA {self.path} does not fit {title}",
                expected="tensors of the shapes that its layers have",
                got=f"{misfits[0]} ({len(misfits)} of {len(layers)} layers do not fit)",
                remedy="take a LoRA that was trained for this model: one of another size has layers of the same names",
            )
        return updates

    def _of_one_denoiser(
        self, layers: Mapping[str, _Layer], modules: Mapping[str, Sequence[int]], title: str
    ) -> dict[str, _Layer]:
        """The layers for one denoiser of a pipeline that may have two.

        Raises:
            UserError: there are none.
        """
        if own := of_one_denoiser(layers, modules):
            return {name: layers[name] for name in own}
        others = sorted({further_denoiser(name) for name in layers})
        raise UserError(
            f"the LoRA {self.path} has nothing for this denoiser",
            expected=f"names of modules of {title}",
            got=f"names of {', '.join(others)} alone, another denoiser of a pipeline",
            remedy=f"merge it where model.options.denoiser is {others[0]}",
        )

    def _unknown(self, unknown: Sequence[str], layers: int, known: Mapping[str, Place], title: str) -> UserError:
        if prefix := _foreign_prefix(unknown, known):
            rest = component_of(unknown[0])[1].removeprefix(prefix)
            return UserError(
                f"names in the LoRA {self.path} begin with '{prefix}', which is not known",
                expected=f"names of modules of {title}, as {rest}, with nothing before them or one of "
                + ", ".join(DENOISER_PREFIXES),
                got=f"{unknown[0]}, of which the rest fits ({len(unknown)} of {layers} layers)",
                remedy=f"take '{prefix}' off the names: safetensors.torch.save_file({{name.replace('{prefix}', '', 1): x for "
                "name, x in safetensors.torch.load_file(FILE).items()}, NEW_FILE); alphas in the file's metadata have to go "
                "along",
            )
        name = component_of(unknown[0])[1]
        near = difflib.get_close_matches(flat(name), known, 1, cutoff=0.0)
        expected = f"modules of {title}" + (f"; the nearest is {known[near[0]].modules[0]}" if near else "")
        many = 2 * len(unknown) > layers
        return UserError(
            f"the LoRA {self.path} is for another model" if many else f"a part of the LoRA {self.path} fits no module",
            expected=expected,
            got=f"{unknown[0]}, and {len(unknown) - 1} more of {layers} that match none"
            if len(unknown) > 1
            else unknown[0],
            remedy="take a LoRA that was trained for this model"
            if many
            else "correct the name in the file, or take a LoRA that was trained for this model",
        )


def read_lora(path: Path) -> LoraFile:
    """A LoRA from a safetensors file.

    Raises:
        UserError: see `refuse_unreadable`; or the file holds something else than a LoRA, half of one, or NaN.
    """
    refuse_unreadable(path)
    layers: dict[str, _Layer] = {}
    with safe_open(path, framework="pt") as file:
        names = list(file.keys())
        if not names:
            raise _no_lora(path, "no tensors", names)
        settings = _settings(path, names, file.metadata() or {})
        for name in names:
            match = _KEY.fullmatch(name)
            if match is None:
                raise _no_lora(path, name, names)
            part = match["theirs"] or match["part"] or match["plain"]
            module = match["module"].replace(".processor.", ".")
            layer = layers.setdefault(module, _Layer())
            if (other := layer.keys.setdefault(_PARTS.get(part, part), name)) != name:
                raise _twice(path, module, other, name)
            tensor = file.get_tensor(name)
            if part != "alpha" and (problem := _damage(tensor)):
                raise UserError(
                    f"the LoRA {path} is damaged",
                    expected="matrices of finite floating-point numbers",
                    got=f"{problem} in {name}",
                    remedy="get the file again, or train it in a type that holds its range",
                )
            if part != "alpha":
                layer.parts[_PARTS.get(part, part)] = tensor
            elif (
                tensor.numel() == 1 and not tensor.is_complex() and 0 < tensor.item() < math.inf
            ):  # of any type: kohya's scripts write integers too
                layer.alpha = float(tensor.item())
            else:
                raise UserError(
                    f"the LoRA {path} is damaged",
                    expected="an alpha above 0 for each layer",
                    got=f"{name} = {tensor.tolist()}",
                    remedy="correct it in the file: the rank, if it was trained without one",
                )
    for module, layer in layers.items():
        _refuse_halves(path, module, layer)
        if "down" in layer.parts and layer.alpha is None:
            layer.alpha = _alpha(path, settings, module, len(layer.parts["down"]))
    return LoraFile(path, layers)


def _copied(x: Tensor) -> Tensor:
    # By numpy: torch's threads take longer than so few numbers.
    return torch.from_numpy(x.contiguous().view(-1).view(torch.uint8).numpy().copy()).view(x.dtype).view(x.shape)


def _damage(tensor: Tensor) -> str:
    if not tensor.is_floating_point():
        return str(tensor.dtype).removeprefix("torch.")
    if not tensor.numel():
        return "nothing"
    if not tensor.dim():
        return "one number without a dimension"
    try:
        finite = is_finite(tensor)
    except RuntimeError:  # of types that torch does not compute with
        return str(tensor.dtype).removeprefix("torch.")
    return "" if finite else "NaN or Inf"


def _twice(path: Path, what: str, *keys: str) -> UserError:
    return UserError(
        f"the LoRA {path} gives {what} twice",
        expected="one update for each weight",
        got=" and ".join(sorted(keys)),
        remedy="take the tensors of one of the two out of the file, or train it again: nothing tells which of them was meant",
    )


def _foreign_prefix(names: Sequence[str], known: Mapping[str, Place]) -> str:
    """What names begin with that fit modules without it, the same for all; empty where there is nothing."""
    found = {_prefix_of(component_of(name)[1], known) for name in names}
    return found.pop() if len(found) == 1 else ""


def _prefix_of(name: str, known: Mapping[str, Place]) -> str:
    for end in re.finditer(r"[._]", name):
        if _place(name[end.end() :], known) is not None:
            return name[: end.end()]
    return ""


def _no_lora(path: Path, name: str, names: Sequence[str]) -> UserError:
    """The error of a file that has a tensor of some name."""
    kind = next((kind for part, kind in _OTHERS.items() if part in name), "")
    is_lora = bool(kind) or any(_KEY.fullmatch(other) for other in names)
    return UserError(
        f"a tensor in the LoRA {path} cannot be merged" if is_lora else f"{path} is no LoRA",
        expected="lora_down and lora_up, lora_A and lora_B, or down and up, and alpha, of each layer",
        got=f"{name}{f': {kind}' if kind else ''}",
        remedy="merge it with the tool that it was trained with, and give the model that comes of it as model.weights"
        if is_lora
        else "give the file of a LoRA; a whole model is model.weights",
    )


def _refuse_halves(path: Path, module: str, layer: _Layer) -> None:
    """
    Raises:
        UserError: a layer has no rank, for want of one of its matrices.
    """
    have = layer.parts.keys()
    missing = {"down", "up"} - have if have & {"down", "up", "mid"} or not have else set()
    if missing:
        raise UserError(
            f"the LoRA {path} is not whole",
            expected=f"{' and '.join(sorted(missing))} of {module}",
            got=", ".join(sorted(have)) or "its alpha alone",
            remedy="get the file again",
        )


@dataclass(frozen=True)
class _Alphas:
    """What a configuration of peft says of the alphas of modules.

    Attributes:
        usual: of those that no pattern names; None for their rank. by_pattern: of names that end so.
        of_root: up · down is multiplied by alpha / √rank instead of alpha / rank.
    """

    usual: float | None
    by_pattern: tuple[tuple[re.Pattern[str], float], ...]
    of_root: bool

    def __call__(self, name: str, rank: int) -> float:
        """The alpha that stands for it in alpha / rank."""
        usual = rank if self.usual is None else self.usual
        alpha = next((alpha for pattern, alpha in self.by_pattern if pattern.fullmatch(name)), usual)
        return alpha * rank**0.5 if self.of_root else float(alpha)


def _settings(path: Path, names: Sequence[str], metadata: Mapping[str, str]) -> dict[str, _Alphas]:
    """What configurations say of alphas, by what the names of their modules begin with.

    Raises:
        UserError: one cannot be read, or asks for something else than plain LoRA.
    """
    found: dict[str, dict[str, Any]] = {}
    try:
        if any(name.startswith(PEFT_ROOT) for name in names) and (beside := settings_beside(path)):
            found[PEFT_ROOT] = dict(json.loads(beside.read_text(encoding="utf-8")))
        for name, value in dict(json.loads(metadata.get(_METADATA, "{}"))).items():
            prefix, _, setting = name.partition(".")
            found.setdefault(f"{prefix}.", {})[setting] = value
        alphas = {
            prefix: _Alphas(
                None if settings.get("lora_alpha") is None else _positive("lora_alpha", settings["lora_alpha"]),
                tuple(
                    (re.compile(rf"(.*\.)?({p})"), _positive(f"alpha_pattern of {p}", a))
                    for p, a in dict(settings.get("alpha_pattern") or {}).items()
                ),
                bool(settings.get("use_rslora")),
            )
            for prefix, settings in found.items()
        }
    except (OSError, ValueError, TypeError, AttributeError, OverflowError, RecursionError, re.error) as error:
        raise UserError(
            f"the settings of the LoRA {path} cannot be read",
            expected=f"peft's, with alphas above 0, as JSON in {PEFT_CONFIG} beside it or in its metadata",
            got=first_line(error),
            remedy="get the file again, with what lies beside it",
        ) from error
    for settings in found.values():
        if asked := [name for name in ("use_dora", "fan_in_fan_out") if settings.get(name)]:
            raise UserError(
                f"the LoRA {path} cannot be merged",
                expected="plain LoRA",
                got=f"{asked[0]} in its settings",
                remedy="merge it with peft (merge_and_unload), and give the model that comes of it as model.weights",
            )
    return alphas


def _positive(name: str, value: Any) -> float:
    """
    Raises:
        ValueError: an alpha is none.
    """
    if not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ValueError(f"{name} = {value!r}, which is no number above 0")
    return float(value)


def _alpha(path: Path, settings: Mapping[str, _Alphas], module: str, rank: int) -> float:
    """The alpha of a layer that has none of its own.

    Raises:
        UserError: the file is peft's own, and what says it does not lie beside it.
    """
    for prefix, alphas in settings.items():
        if module.startswith(prefix):
            return alphas(module.removeprefix(prefix), rank)
    if module.startswith(PEFT_ROOT):
        raise UserError(
            f"the alpha of the LoRA {path} is not known",
            expected=f"{PEFT_CONFIG} beside it, as peft saves both",
            got=f"a file of peft's without it, and without an alpha for {module}",
            remedy=f"copy {PEFT_CONFIG} into its folder",
        )
    return float(rank)


def _place(name: str, known: Mapping[str, Place]) -> Place | None:
    """Where a module of a file is, first by its whole name: a component may be called as a prefix is."""
    _, short = component_of(name)
    for candidate in (name, short, _own_name(short), f"{short}.0"):  # of attention's to_out
        if place := known.get(flat(candidate)):
            return place
    return None


def _own_name(name: str) -> str:
    around, dot, last = name.rpartition("self_attn.")
    return around + dot + _OWN_NAMES.get(last, last)


def _updates_of(layer: _Layer, place: Place, weights: Mapping[str, Sequence[int]]) -> list[Update] | str:
    """What a layer adds to the weights of a place, or why it does not fit them."""
    updates: list[Update] = []
    for part, suffix in (("up", "weight"), ("diff", "weight"), ("diff_b", "bias")):
        if part not in layer.parts:
            continue
        names = [f"{module}.{suffix}" for module in place.modules]
        if missing := [name for name in names if name not in weights]:
            return f"{part} for {missing[0]}, which the model does not have"
        shapes = [tuple(weights[name]) for name in names]
        tensor, down, mid = layer.parts[part], None, None
        if part == "up":
            down, mid = layer.parts["down"], layer.parts.get("mid")
        if problem := _misfit(tensor, down, mid, shapes):
            return problem
        if place.swapped:
            tensor = torch.cat(tensor.chunk(2)[::-1])
        factor = 1.0 if down is None or layer.alpha is None else layer.alpha / len(down)
        rows = tensor.split([shape[0] for shape in shapes])
        updates += [
            Update(*of, factor, up, down, mid) for of, up in zip(zip(names, shapes, strict=True), rows, strict=True)
        ]
    return updates


def _misfit(up: Tensor, down: Tensor | None, mid: Tensor | None, shapes: Sequence[tuple[int, ...]]) -> str:
    """Why matrices do not give differences of weights below each other; empty where they do."""
    rows, inner = sum(shape[0] for shape in shapes), list(shapes[0][1:])
    wanted = f"a weight of {[rows, *inner]}"
    if down is None:
        given, fits = f"a difference of {list(up.shape)}", len(up) == rows and up.numel() == rows * _product(inner)
        return "" if fits else f"{given} for {wanted}"
    given = f"up {list(up.shape)}, down {list(down.shape)}" + ("" if mid is None else f", mid {list(mid.shape)}")
    fits = up.dim() > 1 and down.dim() > 1 and up.numel() == rows * len(down) and len(up) == rows
    if mid is None:
        fits = fits and _kernel_fits(list(down.shape[1:]), inner)
    else:
        fits = fits and list(mid.shape) == [len(down), len(down), *inner[1:]] and down.numel() == len(down) * inner[0]
    return "" if fits else f"{given} for {wanted}"


def _kernel_fits(given: list[int], wanted: list[int]) -> bool:
    """Columns and kernel, of which those of one pixel may be left out: proj_in is a convolution in some U-Nets."""

    def trimmed(sizes: list[int]) -> list[int]:
        return sizes[:1] if all(size == 1 for size in sizes[1:]) else sizes

    return trimmed(given) == trimmed(wanted)


def _product(sizes: Sequence[int]) -> int:
    return int(torch.Size(sizes).numel())
