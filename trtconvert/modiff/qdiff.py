"""Q-Diff's calibration of modulated layers, on the model's own trajectories.

Weights come first, block by block in running order, with inputs from the quantised blocks before. Then the scales of activations
and deltas. Source: Li et al. 2023 (arXiv 2302.04304); MoDiff uses deltas instead of activations.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from trtconvert.attention.reference import timestep_bin
from trtconvert.errors import UserError
from trtconvert.files import whole_file
from trtconvert.interception import first_tensor
from trtconvert.modiff.calibration import Calibration, LayerCalibration, digest
from trtconvert.modiff.held_layers import require_unmodulated
from trtconvert.modiff.layers import first_bits
from trtconvert.modiff.modulated import batch_and_timestep, candidates, find_timestep_input
from trtconvert.modiff.rounding import AdaRound, Example, adaround
from trtconvert.modiff.scales import Seen, least_error
from trtconvert.modiff.settings import Settings
from trtconvert.modiff.splits import find_widths, inputs_seen
from trtconvert.modiff.weights import Grid, round_to_nearest, search_grid
from trtconvert.weights.tensor_files import raw_bytes

_PER_CALL = 1024  # kept numbers of a layer's input in a call
_IDENTITY = "calibration.json"


@dataclass(frozen=True)
class RecordedCall:
    """The arguments of a denoiser's call."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)


Trajectory = Sequence[RecordedCall]
"""The calls of a denoiser that draw one batch, in order."""


def record(model: nn.Module, sample: Callable[[Callable[..., Any]], object]) -> list[RecordedCall]:
    """Records a trajectory of a model in full precision.

    Args:
        sample: draws one batch with the given denoiser, which records its calls.
    """
    calls: list[RecordedCall] = []

    def denoiser(*args: Any, **kwargs: Any) -> Any:
        calls.append(RecordedCall(pytree.tree_map(_copied, args), pytree.tree_map(_copied, kwargs)))
        return model(*args, **kwargs)

    sample(denoiser)
    return calls


def _copied(x: Any) -> Any:
    return x.detach().clone() if isinstance(x, Tensor) else x


@torch.no_grad()
def calibrate(
    model: nn.Module,
    trajectories: Iterable[Trajectory],
    settings: Settings | None = None,
    *,
    rounding: AdaRound | None = None,
    blocks: Sequence[type[nn.Module]] | None = None,
    widths: Mapping[str, Sequence[int]] | None = None,
    calls: int = 16,
    timestep_input: str | None = None,
    timestep_max: float = 1000.0,
    work: Path | str | None = None,
    seed: int = 0,
    on_progress: Callable[[str, int, int], None] | None = None,
) -> Calibration:
    """Rounds weights and finds scales. The model is unchanged afterwards.

    `AdaRound(iterations=0)` rounds every layer to the nearest, with scales of least squared error: a baseline like the LCQ of
    MoDiff's paper.

    Args:
        model: in full precision and evaluation mode.
        trajectories: see `record`; calls in the order of the sampler. Two consecutive steps suffice.
        settings: of the layers. Scales are calibrated, and may still be dynamic at run time.
        rounding: by default blocks are reconstructed. blocks: classes of blocks; by default those of modules in lists that have
            several of the layers.
        widths: see `modulate`; by default found by following concatenations.
        calls: number of calls for the rounding, spread evenly over all calls.
        timestep_input, timestep_max: see `modulate`.
        work: folder of finished work; a killed calibration resumes there.
        seed: of all random numbers.
        on_progress: gets the stage, the number of finished steps, and their total.
    Raises:
        UserError: there is no trajectory; the model has no layers to calibrate, or gives NaN or Inf; the folder belongs to
            another calibration.
    """
    settings = replace(settings or Settings(), scales="calibrated", granularity="tensor")
    rounding = rounding or AdaRound()
    paths = [list(path) for path in trajectories]
    every = [call for path in paths for call in path]
    if not every:
        raise UserError(
            "there is nothing to calibrate with",
            expected="one trajectory or more",
            got="no call of the denoiser",
            remedy="record one: trtconvert.modiff.record(model, lambda denoiser: sampler(denoiser, …))",
        )
    require_unmodulated(model, "load the model again, and calibrate it before modulate()")
    chosen, _ = candidates(model, settings)
    names = list(inspect.signature(model.forward).parameters)
    timestep = find_timestep_input(model, names, timestep_input, settings)
    order = _in_order(model, chosen, every[0], settings, names, timestep)
    if not order:
        raise UserError(
            "the model has no layers to calibrate",
            expected="linear layers or convolutions",
            got=f"{len(chosen)} that the settings name; no call has min_rows",
            remedy="widen Settings.include, or lower Settings.min_channels and Settings.min_rows",
        )
    layers = {name: chosen[name] for name in order}
    said = on_progress or (lambda what, done, of: None)
    if widths is None:
        widths = find_widths(model, layers, lambda: model(*every[0].args, **every[0].kwargs))
    parts = {name: tuple(widths.get(name, (module.weight.shape[1],))) for name, module in layers.items()}
    kept = _Work(
        Path(work) if work is not None else None, _identity(model, settings, rounding, paths, parts, calls, seed)
    )

    grids = {
        name: search_grid(
            module.weight.detach(), parts[name], settings.weight_bits,
            symmetric=settings.weight_symmetric, by_channel=settings.weight_granularity == "channel",
        )
        for name, module in layers.items()
    }  # fmt: skip
    units = _units(model, layers, rounding, blocks)
    picked = [every[int(i)] for i in torch.linspace(0, len(every) - 1, min(calls, len(every)))]
    codes: dict[str, Tensor] = {}
    with _weights(layers) as put:
        for index, (name, members) in enumerate(units.items()):
            done = kept.read(index)
            if done is None:
                if rounding.iterations:
                    done = _round(
                        model, name, members, layers, grids, parts, picked, put, codes, rounding, seed + index
                    )
                else:
                    done = {each: round_to_nearest(layers[each].weight, grids[each], parts[each]) for each in members}
                kept.write(index, done)
            codes |= {each: x.to(layers[each].weight.device) for each, x in done.items()}
            said("weights", index + 1, len(units))
        for each in layers:
            put(each, grids[each].values(codes[each], parts[each]))
        tables = _scales(model, layers, parts, paths, settings, names, timestep, timestep_max, seed, said)
    times = sorted({t for call in every for t in _timesteps(call, names, timestep)}, reverse=True)
    calibrated = {
        name: LayerCalibration(parts[name], codes[name].cpu(), grids[name].scale.cpu().contiguous(), *tables[name])
        for name in order
    }
    return Calibration(settings, digest(model), timestep, timestep_max, tuple(times), str(rounding), calibrated)


def _timesteps(call: RecordedCall, names: Sequence[str], timestep_input: str | None) -> list[float]:
    _, timestep = batch_and_timestep(names, timestep_input, call.args, call.kwargs)
    return [] if timestep is None else timestep.float().tolist()


def _in_order(
    model: nn.Module,
    chosen: Mapping[str, nn.Module],
    call: RecordedCall,
    settings: Settings,
    names: Sequence[str],
    timestep: str | None,
) -> list[str]:
    """Returns the layers in running order, without those with too few rows per sample."""
    batch = len(batch_and_timestep(names, timestep, call.args, call.kwargs)[0])
    order: dict[str, bool] = {}

    def see(name: str, x: Tensor) -> None:
        is_image = x.dim() == 4 and isinstance(chosen[name], nn.Conv2d)
        is_worth_it = is_image or x[..., 0].numel() >= settings.min_rows * batch
        order[name] = order.get(name, True) and is_worth_it and x.shape[0] % batch == 0

    with inputs_seen(chosen, see):
        model(*call.args, **call.kwargs)
    return [name for name, taken in order.items() if taken]


@contextmanager
def _weights(layers: Mapping[str, Any]) -> Iterator[Callable[[str, Tensor | None], None]]:
    """Yields a function that replaces a layer's weight, or restores it (None). Restores all weights at the end."""
    own = {name: layer.weight.data for name, layer in layers.items()}

    def put(name: str, weight: Tensor | None) -> None:
        layers[name].weight.data = own[name] if weight is None else weight.to(own[name].dtype)

    try:
        yield put
    finally:
        for name in layers:
            put(name, None)


def _units(
    model: nn.Module, layers: Mapping[str, nn.Module], rounding: AdaRound, classes: Sequence[type[nn.Module]] | None
) -> dict[str, list[str]]:
    """Returns the names of the reconstructed modules in running order, with their layers."""
    found: dict[str, list[str]] = {}
    if not rounding.iterations or not rounding.by_block:
        return {name: [name] for name in layers}

    def inside(name: str) -> list[str]:
        return [layer for layer in layers if layer.startswith(f"{name}.")]

    if classes is None:
        listed = {
            f"{name}.{index}": child
            for name, module in model.named_modules()
            if isinstance(module, nn.ModuleList)
            for index, child in module.named_children()
            if type(child).forward is not nn.Module.forward and len(inside(f"{name}.{index}" if name else index)) > 1
        }
        innermost = [x for n, x in listed.items() if not any(other.startswith(f"{n.lstrip('.')}.") for other in listed)]
        classes = tuple({type(child) for child in innermost})
    modules = {
        name: module for name, module in model.named_modules() if isinstance(module, tuple(classes)) and inside(name)
    }
    for layer in layers:
        block = max((name for name in modules if layer.startswith(f"{name}.")), key=len, default=layer)
        found.setdefault(block, []).append(layer)
    return found


def _round(
    model: nn.Module, name: str, members: Sequence[str], layers: Mapping[str, nn.Module], grids: Mapping[str, Grid],
    widths: Mapping[str, Sequence[int]], calls: Sequence[RecordedCall], put: Callable[[str, Tensor | None], None],
    codes: Mapping[str, Tensor], how: AdaRound, seed: int,
) -> dict[str, Tensor]:  # fmt: skip
    """Rounds the layers of a unit, given the codes of the units before."""
    unit = model.get_submodule(name)
    wanted = [outputs for _, _, outputs in _calls_of(model, unit, calls)]
    for each, known in codes.items():
        put(each, grids[each].values(known, widths[each]))
    try:
        inputs = _calls_of(model, unit, calls)
    finally:
        for each in codes:
            put(each, None)
    examples = [Example(args, kwargs, out) for (args, kwargs, _), out in zip(inputs, wanted, strict=True)]
    inner = {each: "" if each == name else each.removeprefix(f"{name}.") for each in members}
    rounded = adaround(
        unit,
        {inner[each]: layers[each] for each in members},
        {inner[each]: grids[each] for each in members},
        {inner[each]: widths[each] for each in members},
        examples,
        how,
        torch.Generator().manual_seed(seed),
    )
    return {each: rounded[inner[each]] for each in members}


class _Reached(Exception):
    """Ends a forward behind the unit."""


def _calls_of(
    model: nn.Module, unit: nn.Module, calls: Sequence[RecordedCall]
) -> list[tuple[tuple[Any, ...], dict[str, Any], Tensor]]:
    """Returns the inputs and outputs of a unit in calls of the model."""
    seen: list[tuple[tuple[Any, ...], dict[str, Any], Tensor]] = []

    def see(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        seen.append((pytree.tree_map(_copied, args), pytree.tree_map(_copied, kwargs), _copied(first_tensor(output))))
        raise _Reached

    handle = unit.register_forward_hook(see, with_kwargs=True)
    try:
        for call in calls:
            try:
                model(*call.args, **call.kwargs)
            except _Reached:
                continue
    finally:
        handle.remove()
    return seen


def _scales(
    model: nn.Module, layers: Mapping[str, nn.Module], widths: Mapping[str, Sequence[int]], paths: Sequence[Trajectory],
    settings: Settings, names: Sequence[str], timestep_input: str | None, timestep_max: float, seed: int,
    said: Callable[[str, int, int], None],
) -> dict[str, tuple[Tensor, Tensor]]:  # fmt: skip
    """Returns, by layer, tables [P, T + 1, 6] of quantisers of deltas and of whole activations."""
    generator = torch.Generator().manual_seed(seed)
    bins = settings.bins
    seen: dict[tuple[str, int, str, int], Seen] = {}  # layer, part, kind, bin
    before: dict[str, list[Tensor]] = {}
    calls: dict[str, int] = {}
    ends: list[tuple[str, Tensor]] = []  # least and largest inputs of the step
    place: tuple[int, bool] = (0, True)  # bin, and whether a trajectory starts

    def add(name: str, kind: str, at: int, x: Tensor) -> list[Tensor]:
        axis = 1 if x.dim() == 4 and isinstance(layers[name], nn.Conv2d) else -1
        return [
            seen.setdefault((name, part, kind, at), Seen()).add(values, generator, _PER_CALL)
            for part, values in enumerate(x.split(list(widths[name]), axis))
        ]

    def see(name: str, x: Tensor) -> None:
        x = x.detach()
        at, reset = place
        call = calls.get(name, 0)
        calls[name] = call + 1
        held = before.setdefault(name, [])
        ends.extend((name, each) for each in add(name, "activations", at, x))
        if reset or call >= len(held) or held[call].shape != x.shape:
            add(name, "first", 0, x)
            held[call:] = [x.clone()]
        else:
            add(name, "changes", at, x - held[call])
            held[call] = x.clone()

    done, total = 0, sum(map(len, paths))
    with inputs_seen(layers, see):
        for path in paths:
            for index, call in enumerate(path):
                _, timestep = batch_and_timestep(names, timestep_input, call.args, call.kwargs)
                at = 0 if timestep is None else int(timestep_bin(timestep, timestep_max, bins).max())
                place = at, index == 0
                calls.clear()
                model(*call.args, **call.kwargs)
                _require_finite(ends, index)
                ends.clear()
                done += 1
                said("activations", done, total)
            for each in seen.values():
                each.settle()

    def row(name: str, part: int, kind: str, at: int, bits: int, reset: bool) -> Tensor:
        near = sorted((b for n, p, k, b in seen if (n, p, k) == (name, part, kind)), key=lambda b: (abs(b - at), b))
        if not near:  # a single step has no delta: use whole activations
            return row(name, part, "activations", at, bits, reset)
        key = (name, part, kind, near[0])
        return least_error(seen[key], bits, settings.symmetric, reset, kind == "changes", generator)

    def table(name: str, kind: str, usual: int, first: int) -> Tensor:
        reset = kind != "changes"
        return torch.stack([
            torch.stack([
                *(row(name, part, kind, at, usual, reset) for at in range(bins)),
                row(name, part, "first", 0, first, True),
            ])
            for part in range(len(widths[name]))
        ])  # fmt: skip

    bits, first = settings.activation_bits, first_bits(replace(settings, modulation=True))
    return {name: (table(name, "changes", bits, first), table(name, "activations", bits, bits)) for name in layers}


def _require_finite(ends: Sequence[tuple[str, Tensor]], step: int) -> None:
    """
    Args:
        ends: least and largest input [2] of the layers in running order. One check for all: each waits for the GPU.
    Raises:
        UserError: one of them is NaN or Inf.
    """
    finite = torch.stack([each for _, each in ends]).isfinite().all(1).tolist() if ends else []
    if not all(finite):
        raise UserError(
            f"{ends[finite.index(False)][0]} reads NaN or Inf",
            expected="finite activations on the model's own trajectory",
            got=f"NaN or Inf in step {step + 1} of a trajectory",
            remedy="calibrate in float32, or find the overflow",
        )


def _identity(
    model: nn.Module, settings: Settings, rounding: AdaRound, paths: Sequence[Trajectory], widths: Mapping[str, Sequence[int]],
    calls: int, seed: int,
) -> dict[str, Any]:  # fmt: skip
    """Returns all inputs of the rounding as JSON values."""
    inputs = hashlib.sha256()
    for path in paths:
        for call in path:
            for x in pytree.tree_leaves((call.args, call.kwargs)):
                inputs.update(repr((x.shape, x.dtype) if isinstance(x, Tensor) else x).encode())
                if isinstance(x, Tensor):
                    inputs.update(raw_bytes(x))
        inputs.update(b"\n")
    said = {
        "model": digest(model), "settings": asdict(settings), "rounding": asdict(rounding), "trajectories": inputs.hexdigest(),
        "widths": {name: list(each) for name, each in widths.items()}, "calls": calls, "seed": seed,
    }  # fmt: skip
    return json.loads(json.dumps(said))


class _Work:
    """Finished work of a calibration in a folder."""

    def __init__(self, folder: Path | None, identity: Mapping[str, Any]) -> None:
        self._folder = folder
        if folder is None:
            return
        try:
            folder.mkdir(parents=True, exist_ok=True)
            known = json.loads((folder / _IDENTITY).read_text()) if (folder / _IDENTITY).exists() else None
        except (OSError, ValueError) as error:
            raise UserError(
                f"cannot go on with the calibration in {folder}",
                expected="a folder of its own, which this user may write",
                got=str(error),
                remedy="give another folder as work",
            ) from error
        if known is None:
            with whole_file(folder / _IDENTITY) as file:
                file.write_text(json.dumps(identity))
        elif known != identity:
            odd = sorted(key for key in identity if not isinstance(known, dict) or known.get(key) != identity[key])
            raise UserError(
                f"{folder} has another calibration's work",
                expected="the same model, settings, trajectories and rounding",
                got=f"another {', '.join(odd) or 'kind of file'}",
                remedy="give another folder as work, or remove this one",
            )

    def read(self, index: int) -> dict[str, Tensor] | None:
        """Returns the codes of a finished unit, None if they are missing or damaged."""
        if self._folder is None or not (path := self._path(index)).is_file():
            return None
        try:
            return load_file(path)
        except (OSError, SafetensorError, ValueError):
            return None

    def write(self, index: int, codes: Mapping[str, Tensor]) -> None:
        if self._folder is not None:
            with whole_file(self._path(index)) as file:
                save_file({name: x.cpu().contiguous() for name, x in codes.items()}, file)

    def _path(self, index: int) -> Path:
        assert self._folder is not None
        return self._folder / f"unit-{index:04}.safetensors"
