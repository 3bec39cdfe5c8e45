"""LoRA files in the layouts that are in use, with LoHa and LoKr. `trtconvert.weights.adapters` has the arithmetic.

| layout | names |
| --- | --- |
| diffusers | `unet.….attn1.to_q.lora.down.weight`, and its older `….attn1.processor.to_q_lora.up.weight` |
| peft | `unet.….to_q.lora_A.weight` (down), `….lora_B.weight` (up), `….hada_w1_a`, `….lokr_w1` |
| kohya, lycoris | `lora_unet_…_to_q.lora_down.weight`, `….lora_up.weight`, `….lora_mid.weight`, `….lokr_w1`, `….alpha` |

Modules have diffusers' names or those of the model's original code (`trtconvert.weights.lora_names`). Differences themselves are
`….diff` and `….diff_b`, or lycoris' `….w_norm` and `….b_norm`. peft's `….lora_B.bias` is added to a bias at the scale of the
weights. The alphas of peft are in the file's metadata or beside it in adapter_config.json, which a file of peft's own must have.
In other files without alphas they are the ranks. Settings of peft under which a weight gets more than its LoRA are refused.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import AliasChoices, BaseModel, Field
from safetensors import safe_open
from torch import Tensor

from trtconvert.errors import UserError, first_problem
from trtconvert.weights.adapters import (
    MAGNITUDES,
    PARTS,
    Update,
    difference,
    kind_of,
    missing_parts,
    of_columns,
    rank_of,
)
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
"""Where diffusers keeps peft's settings in a file."""

_KEY = re.compile(
    r"(?P<module>.+?)"
    r"(?:(?:_lora|\.lora|\.lora_linear_layer)\.(?P<theirs>down|up)\.weight"
    r"|\.lora_(?P<part>down|up|mid|A|B)(?:\.\w+)??\.weight"  # peft may put an adapter's name between or behind
    r"|\.lora_(?:up|B)(?:\.\w+)??\.(?P<bias>bias)"
    rf"|\.(?P<lycoris>{'|'.join(part for part in sorted(PARTS) if part.startswith(('hada_', 'lokr_')))})(?:\.\w+)?"
    r"|\.(?P<dora>dora_scale|lora_magnitude_vector)(?:\.\w+){0,2}"
    r"|(?:_lora)?\.(?P<plain>alpha|diff|diff_b|w_norm|b_norm))"
)
_PARTS = {"A": "down", "B": "up", "w_norm": "diff", "b_norm": "diff_b"}
_PARTS["bias"] = "up_b"
_PARTS |= dict.fromkeys(("dora_scale", "lora_magnitude_vector"), MAGNITUDES)

_TOKENS = re.compile(r"(.+\.)?string_to_param\..*|emb_params|clip_[lg]|bundle_emb\..+")
"""Tensors of textual inversions, in files of their own, and beside a LoRA."""

_OTHERS = {
    "oft_": "OFT, which rotates weights",
    "lora_embedding_": "a LoRA of a table of embeddings",
}
"""Adapters that are no sum of a weight and a difference, or not of a layer's weight, by parts of their tensors' names."""

_AS_WEIGHTS = "give the merged model as model.weights"
_BY_PEFT = f"merge it with peft (merge_and_unload), and {_AS_WEIGHTS}"

_BESIDES = {
    "fan_in_fan_out": _BY_PEFT,
    "layer_replication": _BY_PEFT,
    "target_parameters": _BY_PEFT,
    "use_bdlora": _BY_PEFT,
    "kasa_config": _BY_PEFT,
    "monteclora_config": _BY_PEFT,
    "use_qalora": "train it without use_qalora: peft cannot merge it either",
    "alora_invocation_tokens": "train it without alora_invocation_tokens: it changes some tokens alone, which no weight can",
    "arrow_config": "train it without arrow_config: it chooses among several adapters by the tokens, which no weight can",
}
"""Settings of peft under which the difference of a weight is not alpha / rank · up · down, and remedies."""

_REPEATABLE = {"pissa", "olora"}
"""Initialisations of peft that change the weights of the model, and that peft computes again as it loads the LoRA."""

_CHANGING = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Prefixes of the names of all initialisations that change the weights of the model."""

_OWN_NAMES = {"to_q": "q_proj", "to_k": "k_proj", "to_v": "v_proj", "to_out": "out_proj"}
"""Layers of a text encoder's `self_attn` in diffusers' older files."""


@dataclass
class _Layer:
    """The tensors of a file for one module, and their names in the file, by `trtconvert.weights.adapters.PARTS`.

    Attributes:
        alpha: by the file or its settings; None for the rank. rank: by the settings, where the tensors do not show it.
    """

    parts: dict[str, Tensor] = field(default_factory=dict)
    alpha: float | None = None
    rank: int | None = None
    keys: dict[str, str] = field(default_factory=dict)

    @property
    def factor(self) -> float:
        rank = rank_of(self.parts) or self.rank
        return 1.0 if rank is None or self.alpha is None else self.alpha / rank


@dataclass(frozen=True)
class LoraFile:
    """A file that was read, and checked as far as possible without the model.

    Attributes:
        path: of the file.
        layers: by the names of modules as the file has them.
    """

    path: Path
    layers: Mapping[str, _Layer]

    @property
    def components(self) -> list[str]:
        """The components that its names begin with, in the recipe's words, the denoiser first."""
        return named({component_of(name)[0] for name in self.layers})

    def in_memory(self) -> LoraFile:
        """The same in memory of its own. Tensors that were read are mapped, and change with the file."""
        layers = {
            name: _Layer({part: _copied(x) for part, x in layer.parts.items()}, layer.alpha, layer.rank, layer.keys)
            for name, layer in self.layers.items()
        }
        return LoraFile(self.path, layers)

    def updates(self, target: str, weights: Mapping[str, Sequence[int]], title: str) -> list[Update]:
        """The differences that the file adds to the weights of a component.

        Args:
            target: the component. Parts for other components, and for another denoiser of the pipeline, are left out.
            weights: its floating-point weights and biases and their shapes, by the names of the state dict.
            title: of the component's model, for messages.
        Raises:
            UserError: the file has nothing for the component, or something twice; a module is not there, or has another shape.
        """
        modules = {name.removesuffix(".weight"): shape for name, shape in weights.items() if name.endswith(".weight")}
        layers = self._of_component(target, modules, title)
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

    def _of_component(self, target: str, modules: Mapping[str, Sequence[int]], title: str) -> Mapping[str, _Layer]:
        """The layers for a component, or for one of two denoisers."""
        of = {name: component_of(name)[0] for name in self.layers}
        # Names that may be of several components are the target's, unless other names are the target's alone.
        wanted = {(), (target,)} if (target,) in of.values() else {(), *(x for x in of.values() if target in x)}
        layers = {name: layer for name, layer in self.layers.items() if of[name] in wanted}
        if not layers:
            raise UserError(
                f"the LoRA {self.path} has nothing for {target}",
                expected=f"names of modules of {title}",
                got=f"names of {', '.join(self.components)}",
                remedy=f"merge it into {' or '.join(self.components)}: as target in a recipe, or by its own set_loras",
            )
        if target != DENOISER:
            return layers
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
                got=f"{unknown[0]}; the rest of the name fits ({len(unknown)} of {layers} layers)",
                remedy=f"take '{prefix}' off the names: safetensors.torch.save_file({{name.replace('{prefix}', '', 1): x for "
                "name, x in safetensors.torch.load_file(FILE).items()}, NEW_FILE); alphas in the file's metadata have to go "
                "along",
            )
        near = difflib.get_close_matches(flat(component_of(unknown[0])[1]), known, 1, cutoff=0.0)
        many = 2 * len(unknown) > layers
        others = f", and {len(unknown) - 1} more of {layers} that match none" if len(unknown) > 1 else ""
        remedy = "take a LoRA that was trained for this model"
        return UserError(
            f"the LoRA {self.path} is for another model" if many else f"a part of the LoRA {self.path} fits no module",
            expected=f"modules of {title}" + (f"; the nearest is {known[near[0]].modules[0]}" if near else ""),
            got=unknown[0] + others,
            remedy=remedy if many else f"correct the name in the file, or {remedy}",
        )


def read_lora(path: Path) -> LoraFile:
    """A LoRA from a safetensors file.

    Raises:
        UserError: see `refuse_unreadable`; or the file is no LoRA, lacks tensors of a layer, or holds NaN.
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
            found = (
                match["theirs"] or match["part"] or match["bias"] or match["lycoris"] or match["dora"] or match["plain"]
            )
            part = _PARTS.get(found, found)
            module = match["module"].replace(".processor.", ".")
            layer = layers.setdefault(module, _Layer())
            if (other := layer.keys.setdefault(part, name)) != name:
                raise _twice(path, module, other, name)
            tensor = file.get_tensor(name)
            if part == "alpha":
                layer.alpha = _alpha(path, name, tensor)
            elif problem := _damage(tensor):
                raise UserError(
                    f"the LoRA {path} is damaged",
                    expected="matrices of finite floating-point numbers",
                    got=f"{problem} in {name}",
                    remedy="get the file again, or train it in a type that holds its range",
                )
            else:
                # peft's lengths are of rows, [1, rows, 1, 1] of a convolution.
                layer.parts[part] = tensor.flatten() if found == "lora_magnitude_vector" else tensor
    for module, layer in layers.items():
        _refuse_halves(path, module, layer)
        if layer.alpha is None and not layer.parts.keys() <= {"diff", "diff_b"}:
            layer.alpha, layer.rank = _settings_of(path, settings, module, layer.parts)
    if not settings and (beside := settings_beside(path)) is not None:
        _refuse_doubtful(path, beside, layers)
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
    """Returns the unknown prefix that all names share; empty if there is none. Without the prefix the names fit modules."""
    found = {_prefix_of(component_of(name)[1], known) for name in names}
    return found.pop() if len(found) == 1 else ""


def _prefix_of(name: str, known: Mapping[str, Place]) -> str:
    ends = (end.end() for end in re.finditer(r"[._]", name))
    return next((name[:end] for end in ends if _place(name[end:], known) is not None), "")


def _no_lora(path: Path, name: str, names: Collection[str]) -> UserError:
    if _TOKENS.fullmatch(name):
        raise UserError(
            f"{path} has embeddings of tokens (textual inversion), which are no LoRA",
            expected="updates of layers",
            got=name,
            remedy="load them into the pipeline by diffusers' load_textual_inversion, save the pipeline, and give its folder as "
            "model.weights; and take them out of this file, if it has a LoRA, too",
        )
    kind = next((kind for part, kind in _OTHERS.items() if part in name), "")
    is_lora = bool(kind) or any(_KEY.fullmatch(other) for other in names)
    return UserError(
        f"a tensor in the LoRA {path} cannot be merged" if is_lora else f"{path} is no LoRA",
        expected="lora_down and lora_up, lora_A and lora_B, or down and up, or those of LoHa or LoKr, and alpha, of each layer",
        got=f"{name}{f': {kind}' if kind else ''}",
        remedy="merge it with the tool that trained it, and give the merged model as model.weights"
        if is_lora
        else "give the file of a LoRA; a whole model is model.weights",
    )


def _refuse_halves(path: Path, module: str, layer: _Layer) -> None:
    adapter = [part for part in layer.parts if kind_of(part) != "diff" and part != MAGNITUDES]
    kinds = {kind_of(part): layer.keys[part] for part in adapter}
    if len(kinds) > 1:
        raise _twice(path, module, *kinds.values())
    of_dora = MAGNITUDES in layer.parts
    if missing := missing_parts(adapter if of_dora else layer.parts):
        raise UserError(
            f"the LoRA {path} is not whole",
            expected=f"{' and '.join(sorted(missing))} of {module}",
            got=", ".join(sorted(layer.parts)) or "its alpha alone",
            remedy="get the file again",
        )


# Alphas -----------------------------------------------------------------------------------------------------------------


_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False, strict=True)]


class _Settings(BaseModel):
    """A configuration of peft, with peft's defaults. LoHa and LoKr have `alpha` in place of `lora_alpha`; patterns are of the
    ends of modules' names."""

    alpha: _Positive = Field(8.0, validation_alias=AliasChoices("lora_alpha", "alpha"))
    r: _Positive = 8.0
    alpha_pattern: dict[re.Pattern[str], _Positive] | None = None
    rank_pattern: dict[re.Pattern[str], _Positive] | None = None
    use_rslora: bool | None = None
    use_dora: bool | None = None
    init_lora_weights: bool | str | None = None

    def alpha_and_rank(self, name: str, rank: int | None) -> tuple[float, int]:
        """Of a module, for alpha / rank.

        Args:
            rank: by the module's tensors, where they show it.
        """

        def of(patterns: Mapping[re.Pattern[str], float] | None, usual: float) -> float:
            found = (x for pattern, x in (patterns or {}).items() if re.fullmatch(rf"(.*\.)?({pattern.pattern})", name))
            return next(found, usual)

        if rank is None:
            rank = round(of(self.rank_pattern, self.r))
        alpha = of(self.alpha_pattern, self.alpha)
        # use_rslora: up · down is multiplied by alpha / √rank.
        return (alpha * rank**0.5 if self.use_rslora else alpha), rank


def _settings(path: Path, names: Sequence[str], metadata: Mapping[str, str]) -> dict[str, _Settings]:
    """Configurations of peft beside and in a file, by the prefix of the names that they are for, the longest first.

    diffusers' `save_lora_weights` has a prefix in the metadata, its `save_lora_adapter` has none.
    """
    found: dict[str, dict[str, Any]] = {}
    try:
        if any(name.startswith(PEFT_ROOT) for name in names) and (beside := settings_beside(path)):
            found[PEFT_ROOT] = _read_beside(beside)
        for name, value in dict(json.loads(metadata.get(_METADATA, "{}"))).items():
            prefix, dot, setting = name.rpartition(".")
            found.setdefault(prefix + dot, {})[setting] = value
        settings = {prefix: _Settings.model_validate(found[prefix]) for prefix in sorted(found, key=len, reverse=True)}
    except (OSError, ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise UserError(
            f"the settings of the LoRA {path} cannot be read",
            expected=f"peft's, with alphas above 0, as JSON in {PEFT_CONFIG} beside it or in its metadata",
            got=first_problem(error),
            remedy="get the file again, with the files beside it",
        ) from error
    for prefix, of in settings.items():
        _refuse_besides(path, found[prefix], of.init_lora_weights)
    return settings


def _read_beside(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text(encoding="utf-8")))


def _refuse_doubtful(path: Path, beside: Path, layers: Mapping[str, _Layer]) -> None:
    """
    Args:
        path: of a file in peft's layout that is not peft's own, without settings. beside: settings of peft.
    Raises:
        UserError: the settings have other alphas than the ranks. peft follows such settings, diffusers does not read them.
    """
    try:
        found = _read_beside(beside)
        settings = _Settings.model_validate(found)
    except (OSError, ValueError, TypeError, RecursionError):  # of another program
        return
    for module, layer in layers.items():
        if layer.alpha is not None or ".lora_A." not in layer.keys.get("down", ""):
            continue
        _refuse_besides(path, found, settings.init_lora_weights)
        alpha, rank = settings.alpha_and_rank(module, rank_of(layer.parts))
        if alpha != rank:
            raise UserError(
                f"the alphas of the LoRA {path} are in doubt",
                expected=f"alphas in the file; or no {PEFT_CONFIG} beside it, for alphas that are the ranks",
                got=f"{PEFT_CONFIG} beside it with an alpha of {alpha:g} for {module} of rank {rank}, which peft follows and "
                "diffusers does not read",
                remedy=f"write it into the file, safetensors.torch.save_file(safetensors.torch.load_file(FILE), NEW_FILE, "
                f"{{'{_METADATA}': open('{PEFT_CONFIG}').read()}}); or move it away, if alphas are the ranks",
            )


def _refuse_besides(path: Path, settings: Mapping[str, Any], initialisation: bool | str | None) -> None:
    """
    Raises:
        UserError: peft's model has more than the LoRA in its weights.
    """
    for name, remedy in _BESIDES.items():
        if settings.get(name):
            raise UserError(
                f"the LoRA {path} cannot be merged",
                expected="differences of weights [rows, columns] by alpha / rank · up · down",
                got=f"{name} in its settings",
                remedy=remedy,
            )
    if isinstance(initialisation, str) and initialisation.lower().startswith(_CHANGING):
        raise UserError(
            f"the LoRA {path} is for other weights than those of the model",
            expected="a LoRA of the model's own weights",
            got=f"init_lora_weights '{initialisation}' in its settings, which changes the weights before the training",
            remedy=_BY_PEFT
            if initialisation.lower() in _REPEATABLE
            else "save it in the program that trained it, by peft's save_pretrained(FOLDER, "
            "path_initial_model_for_weight_conversion=FOLDER_BEFORE_TRAINING), and take the file in FOLDER; or merge it there "
            f"(merge_and_unload), and {_AS_WEIGHTS}",
        )


def _alpha(path: Path, name: str, tensor: Tensor) -> float:
    """The alpha in a tensor of any type: kohya's scripts write integers too."""
    if tensor.numel() == 1 and not tensor.is_complex() and 0 < tensor.item() < math.inf:
        return float(tensor.item())
    raise UserError(
        f"the LoRA {path} is damaged",
        expected="an alpha above 0 for each layer",
        got=f"{name} = {tensor.tolist()}",
        remedy="correct it in the file: the rank, if it was trained without one",
    )


def _settings_of(
    path: Path, settings: Mapping[str, _Settings], module: str, parts: Mapping[str, Tensor]
) -> tuple[float | None, int | None]:
    """The alpha and the rank of a layer without an alpha of its own."""
    for prefix, of_prefix in settings.items():
        if module.startswith(prefix):
            if of_prefix.use_dora and MAGNITUDES not in parts:
                raise UserError(
                    f"the LoRA {path} is not whole",
                    expected=f"lora_magnitude_vector of {module}, as its settings have use_dora",
                    got=", ".join(sorted(parts)),
                    remedy="get the file again",
                )
            if "lokr_w2" in parts and parts["lokr_w2"].dim() == 3:
                raise UserError(
                    f"the LoRA {path} cannot be merged",
                    expected="a LoKr whose difference is a Kronecker product",
                    got=f"{module}, a convolution of one axis: peft puts its blocks elsewhere",
                    remedy=_BY_PEFT,
                )
            return of_prefix.alpha_and_rank(module.removeprefix(prefix), rank_of(parts))
    if module.startswith(PEFT_ROOT):
        raise UserError(
            f"the alpha of the LoRA {path} is not known",
            expected=f"{PEFT_CONFIG} beside it, as peft saves both",
            got=f"a file of peft's without it, and without an alpha for {module}",
            remedy=f"copy {PEFT_CONFIG} into its folder",
        )
    return None, None


# Places -----------------------------------------------------------------------------------------------------------------


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
    """The updates of the weights of a place by a layer, or why the layer does not fit them."""
    updates: list[Update] = []
    parts = layer.parts
    alone = ("diff", "diff_b", "up_b")
    adapter = {part: x for part, x in parts.items() if part not in alone}
    of_weight, of_bias, of_up = ({"diff": parts[name]} if name in parts else {} for name in alone)
    for given, suffix, factor in (
        (adapter, "weight", layer.factor),
        (of_weight, "weight", 1.0),
        (of_bias, "bias", 1.0),
        (of_up, "bias", layer.factor),
    ):
        if not given:
            continue
        names = [f"{module}.{suffix}" for module in place.modules]
        if missing := [name for name in names if name not in weights]:
            return f"{next(iter(given))} for {missing[0]}, which the model does not have"
        shapes = [tuple(weights[name]) for name in names]
        total = sum(shape[0] for shape in shapes)
        wanted = [total, *shapes[0][1:]]
        if problem := _misfit(given, wanted) or _misfit_of_lengths(given.get(MAGNITUDES), wanted, len(names)):
            return problem
        end = 0
        for name, shape in zip(names, shapes, strict=True):
            start, end = end, end + shape[0]
            half = (start + end) // 2
            rows = (slice(half, end), slice(start, half)) if place.swapped else (slice(start, end),)
            updates.append(Update(name, shape, factor, given, rows))
    return updates


def _misfit_of_lengths(lengths: Tensor | None, wanted: Sequence[int], modules: int) -> str:
    """Why DoRA's lengths do not fit a weight; empty where they do, or where there are none."""
    if lengths is None:
        return ""
    if of_columns(lengths, wanted[0]):
        if modules > 1:
            return f"lengths of columns, by DoRA, of {modules} weights in one"
        number = wanted[1] if len(wanted) > 1 else 0
    else:
        number = wanted[0]
    fits = lengths.numel() == number and lengths.numel() == max(lengths.shape)
    return "" if fits else f"{MAGNITUDES} {list(lengths.shape)} for a weight of {list(wanted)}"


def _misfit(parts: Mapping[str, Tensor], wanted: list[int]) -> str:
    """Why tensors do not give a difference of such a shape; empty where they do."""
    try:
        of_sum = {name: x.to("meta", torch.float32) for name, x in parts.items() if name != MAGNITUDES}
        given = list(difference(of_sum).shape)
    except (RuntimeError, IndexError):
        given = []

    def trimmed(shape: list[int]) -> list[int]:
        """Without axes of 1 at the end: proj_in is a convolution in some U-Nets, and peft's kernels have two axes."""
        while len(shape) > 2 and shape[-1] == 1:
            shape = shape[:-1]
        return shape

    flattened = [wanted[0], math.prod(wanted[1:])]
    if given and (trimmed(given) == trimmed(wanted) or (len(wanted) > 1 and given == flattened)):
        return ""
    return ", ".join(f"{name} {list(parts[name].shape)}" for name in sorted(parts)) + f" for a weight of {wanted}"
