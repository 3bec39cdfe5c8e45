"""A model with modulated linear layers and convolutions, which holds their caches."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from trtconvert.attention.reference import timestep_bin
from trtconvert.errors import UserError, several
from trtconvert.modiff.held_layers import HeldLayer, Step, kind_of, require_unmodulated
from trtconvert.modiff.layers import ModulatedConv2d, ModulatedLayer, ModulatedLinear, dynamic_table, obstacle
from trtconvert.modiff.settings import Settings
from trtconvert.weights.finite import require_finite

if TYPE_CHECKING:
    from trtconvert.modiff.calibration import Calibration

TIMESTEP_NAMES = ("timestep", "timesteps", "t", "time", "sigma", "noise_level")
"""Names of the timestep in denoisers."""


Method = TypeVar("Method", bound=Callable[..., Any])


def _not_compiled(method: Method) -> Method:
    """Excludes a method from torch.compile."""
    return torch.compiler.disable(method)  # type: ignore[return-value]


class Modulated(nn.Module):
    """A denoiser with modulated layers, made by `modulate`. It is called like the model, by any sampler, without gradients.

    `reset_cache()` starts all samples of a batch anew, `reset_cache(samples)` some of them. A sampler may skip steps and repeat
    timesteps: a layer quantises the delta since its last call.

    Attributes:
        model: the denoiser with replaced layers. settings: see `Settings`.
        layers: replaced layers by name. left: reasons why other layers stay, by name.
    """

    tables: Tensor
    reset: Tensor

    def __init__(
        self,
        model: nn.Module,
        settings: Settings,
        layers: Mapping[str, ModulatedLayer],
        left: Mapping[str, str],
        timestep_input: str | None,
        timestep_max: float,
    ) -> None:
        super().__init__()
        self.model = model
        self.settings, self.left = settings, dict(left)
        self.timestep_max = timestep_max
        self._names = list(inspect.signature(model.forward).parameters)
        self._timestep_input = find_timestep_input(model, self._names, timestep_input, settings)
        self._step = Step()
        self._latest: Tensor | None = None
        self._direction, self._fresh = 0, True
        self._made_for: tuple[torch.Size, torch.dtype, torch.device] | None = None
        self.layers: dict[str, HeldLayer] = {}
        first = 0
        for name, layer in layers.items():
            self.layers[name] = HeldLayer(name, layer, first, self._step)
            first += len(layer.widths)
        _replace(model, {name: held.layer.full for name, held in self.layers.items()}, self.layers)
        self.register_buffer("tables", torch.cat([layer.table for layer in layers.values()]), persistent=False)
        self.register_buffer("reset", torch.zeros(0, dtype=torch.bool, device=self.tables.device), persistent=False)

    @torch.no_grad()
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the model's outputs.

        Raises:
            UserError: without `reset_cache()`, the batch differs from the step before or goes back in time; a cache has another
                shape; the model writes into the outputs of its layers.
        """
        x, timestep = batch_and_timestep(self._names, self._timestep_input, args, kwargs)
        if self._begin(x, timestep):
            return self._with_new_caches(x, timestep, args, kwargs)
        return self._run(x, timestep, args, kwargs)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Modulated:
        tables = self.tables
        super()._apply(fn, recurse)
        self.tables = tables.to(self.tables.device)  # stays FP32
        return self

    def _run(self, x: Tensor, timestep: Tensor | None, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        step = self._step
        step.batch = x.shape[0]
        bins = self.tables.shape[1] - 1
        if timestep is None:
            index = torch.zeros(step.batch, dtype=torch.long, device=x.device)
        else:
            index = timestep_bin(timestep.to(x.device, non_blocking=True), self.timestep_max, bins)
        if self.settings.modulation:
            index = torch.where(self.reset, bins, index)
        for layer in self.layers.values():
            layer.calls = 0
        step.rows = self.tables.index_select(1, index)
        try:
            output = self.model(*args, **kwargs)
        finally:
            step.rows = None
        self.reset.fill_(False)
        return self._apart(output) if self.settings.modulation and self.settings.shared_outputs else output

    @_not_compiled
    def _with_new_caches(
        self, x: Tensor, timestep: Tensor | None, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Runs the first step of a batch of a new size, without torch.compile."""
        for layer in self.layers.values():
            layer.forget()
        self._step.makes = True
        try:
            output = self._run(x, timestep, args, kwargs)
        finally:
            self._step.makes = False
        self._made_for = kind_of(x)
        return output

    @_not_compiled
    def _begin(self, x: Tensor, timestep: Tensor | None) -> bool:
        """Return whether the step must make caches. Refuses a batch that does not continue the step before."""
        if not self.settings.modulation:
            return False
        if self._made_for != kind_of(x):
            if self._made_for is not None and not self._fresh:
                shape, dtype, device = self._made_for
                raise UserError(
                    "the batch differs from the step before",
                    expected=f"{list(shape)} {dtype} on {device}, as in the step before",
                    got=f"{list(x.shape)} {x.dtype} on {x.device}",
                    remedy="call reset_cache() before the first step of a batch",
                )
            self.reset = torch.ones(len(x), dtype=torch.bool, device=x.device)
            self._made_for = None
        self._fresh = False
        self._check_time(timestep)
        return self._made_for is None

    def _check_time(self, timestep: Tensor | None) -> None:
        """
        Raises:
            UserError: the sampler goes back in time.
        """
        check = self.settings.check_timesteps
        if timestep is None or check is False or (check is None and timestep.is_cuda):
            return
        now = timestep.detach().float().cpu()
        if self._latest is not None and len(self._latest) == len(now):
            moved = (now - self._latest)[~self.reset.cpu()]
            if self._direction and bool((moved * self._direction < 0).any()):
                sample = int((moved * self._direction < 0).nonzero()[0])
                raise UserError(
                    "the sampler goes back in time",
                    expected=f"timesteps that {'rise' if self._direction > 0 else 'fall'}, as in the steps before",
                    got=f"{float(now[sample]):g} after {float(self._latest[sample]):g} of sample {sample}",
                    remedy="call reset_cache() before a new trajectory; or Settings(check_timesteps=False) for a sampler that "
                    "alternates: its deltas are larger than the calibrated ones",
                )
            if not self._direction and bool(moved.any()):
                self._direction = 1 if float(moved[moved != 0][0]) > 0 else -1
        self._latest = now

    def _apart(self, output: Any) -> Any:
        """Copies the parts of the output that share memory with caches."""
        compiling = torch.compiler.is_compiling()
        caches = () if compiling else {state.o_hat.data_ptr() for held in self.layers.values() for state in held.states}

        def apart(x: Any) -> Any:
            is_cache = isinstance(x, Tensor) and (compiling or x.untyped_storage().data_ptr() in caches)
            return x.clone() if is_cache else x

        return pytree.tree_map(apart, output)

    def reset_cache(self, samples: Tensor | Sequence[int] | None = None) -> None:
        """Resets samples: their next step is a first step.

        Args:
            samples: [B] bool, or indices. None: all, and the next step may have another batch, size or type.
        Raises:
            UserError: there are no such samples.
        """
        if samples is None:
            self._fresh, self._latest, self._direction = True, None, 0
            self.reset.fill_(True)
            return
        chosen = torch.as_tensor(samples, device=self.reset.device)
        fits = chosen.shape == self.reset.shape if chosen.dtype == torch.bool else True
        try:
            if not fits:
                raise IndexError(f"a mask of {list(chosen.shape)}")
            self.reset[chosen if chosen.dtype == torch.bool else chosen.long()] = True
        except (IndexError, RuntimeError) as error:
            raise UserError(
                "there are no such samples to reset",
                expected=f"a mask or indices of the {len(self.reset)} samples of the step before",
                got=str(error),
                remedy="give samples of the last batch, or reset_cache() for a new batch",
            ) from error

    def set_quant_state(self, weights: bool = True, activations: bool = True) -> None:
        """Chooses what is quantised from now on, and resets the caches. With neither, the model computes in full precision."""
        for held in self.layers.values():
            held.layer.quantises_weights, held.layer.quantises_activations = weights, activations
        self.reset_cache()

    def simulate(self, simulated: bool = True) -> None:
        """Simulates products in the model's type, for comparisons of speed."""
        for held in self.layers.values():
            held.layer.simulated = simulated
        self.reset_cache()

    def named_states(self) -> Iterator[tuple[str, Tensor]]:
        """Yields all caches as `layer.a_hat` and `layer.o_hat`; those of a layer's second call in a step as `layer#2.…`.

        Raises:
            UserError: there was no step yet.
        """
        self._require_states()
        for name, held in self.layers.items():
            for call, state in enumerate(held.states):
                for kind, cache in state._asdict().items():
                    yield f"{name}{f'#{call + 1}' if call else ''}.{kind}", cache

    def load_states(self, states: Mapping[str, Tensor]) -> None:
        """Copies caches of `named_states` into the model. The next step continues from them.

        Raises:
            UserError: names, shapes or types differ from the model's last batch, or a cache has NaN or Inf.
        """
        own = dict(self.named_states())
        remedy = "give the caches of named_states() of the same model, settings, batch and size"
        if odd := sorted(own.keys() ^ states.keys()):
            raise UserError(
                "the caches are not those of this model",
                expected=f"{len(own)} caches by name",
                got=f"{several(odd, 3)} {'missing' if odd[0] in own else 'unknown'}",
                remedy=remedy,
            )
        for name, cache in states.items():
            if cache.shape != own[name].shape or cache.dtype != own[name].dtype:
                raise UserError(
                    f"the cache {name} is of another input",
                    expected=f"{list(own[name].shape)} {own[name].dtype}",
                    got=f"{list(cache.shape)} {cache.dtype}",
                    remedy=remedy,
                )
            _require_finite(name, cache)
        for name, cache in states.items():
            own[name].copy_(cache)
        for held in self.layers.values():
            for call, state in enumerate(held.states):
                held.set_state(call, state)
        self.reset.fill_(False)
        self._fresh, self._latest = False, None

    def check_caches(self) -> None:
        """Checks the caches for NaN and Inf. Waits for the GPU.

        Raises:
            UserError: NaN or Inf is in a cache of a sample that was not reset.
        """
        for name, cache in self.named_states():
            _require_finite(name, cache[~self.reset] if len(cache) == len(self.reset) else cache)

    def _require_states(self) -> None:
        if not any(held.states for held in self.layers.values()):
            raise UserError(
                "there are no caches yet",
                expected="an earlier step, which gives the shapes of caches",
                got="no step" if self.settings.modulation else "a model without modulation, which has none",
                remedy="call the model once with inputs of the batch, then reset_cache()",
            )


def modulate(
    model: nn.Module,
    settings: Settings | None = None,
    *,
    calibration: Calibration | None = None,
    widths: Mapping[str, Sequence[int]] | None = None,
    timestep_input: str | None = None,
    timestep_max: float | None = None,
) -> Modulated:
    """Replaces linear layers and convolutions of a model by modulated layers.

    Args:
        model: any denoiser; is changed. settings: by default those of the calibration, or dynamic scales.
        calibration: of the same weights and bits, see `trtconvert.modiff.calibrate`.
        widths: channels of each part of concatenated inputs, by layer. A calibration has them.
        timestep_input: name of the model's timestep; by default found by `TIMESTEP_NAMES`.
        timestep_max: end of the timesteps, by default the calibration's, or 1,000.
    Raises:
        UserError: the model has no layers to replace, was modulated before, or is not the calibrated one; a pattern matches no
            layer; a weight is NaN or Inf.
    """
    require_unmodulated(
        model, "load the model again, or use the result of modulate() with set_quant_state() and reset_cache()"
    )
    if calibration is not None:
        settings = calibration.require_fitting(model, settings)
    settings = settings or Settings(scales="dynamic")
    if settings.scales == "calibrated" and calibration is None:
        raise UserError(
            "calibrated scales need a calibration",
            expected="modulate(model, calibration=…)",
            got="settings alone",
            remedy="calibrate the model (trtconvert.modiff.calibrate), or Settings(scales='dynamic')",
        )
    chosen, left = candidates(model, settings)
    if calibration is not None:
        left |= {name: "the calibration saw no call of it" for name in chosen if name not in calibration.layers}
        chosen = {name: module for name, module in chosen.items() if name in calibration.layers}
    if not chosen:
        raise UserError(
            "the model has no layers to modulate",
            expected="linear layers or convolutions",
            got="; ".join(f"{name}: {why}" for name, why in list(left.items())[:3]) or "none",
            remedy="widen Settings.include, or lower Settings.min_channels",
        )
    layers: dict[str, ModulatedLayer] = {}
    for name, module in chosen.items():
        _require_finite(f"{name}.weight", module.weight.detach())
        kind = ModulatedLinear if isinstance(module, nn.Linear) else ModulatedConv2d
        if calibration is not None:
            layers[name] = calibration.layers[name].layer(kind, module, settings)
        else:
            parts = tuple((widths or {}).get(name, (module.weight.shape[1],)))
            layers[name] = kind.of(
                module, settings, widths=parts, table=dynamic_table(len(parts), settings).to(module.weight.device)
            )
    return Modulated(
        model,
        settings,
        layers,
        left,
        timestep_input or (calibration.timestep_input if calibration else None),
        timestep_max or (calibration.timestep_max if calibration else 1000.0),
    )


def batch_and_timestep(
    names: Sequence[str], timestep_input: str | None, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Tensor, Tensor | None]:
    """Returns the denoised tensor [B, …] of a call, and [B] timesteps.

    Raises:
        UserError: there is no tensor to denoise, or the number of timesteps does not fit.
    """
    named = dict(zip(names, args, strict=False)) | dict(kwargs)
    timestep = named.pop(timestep_input, None) if timestep_input is not None else None
    x = next((value for value in named.values() if isinstance(value, Tensor) and value.dim()), None)
    if x is None:
        raise UserError(
            "the model is called without a tensor to denoise",
            expected="a tensor whose first axis is the batch",
            got=f"arguments {', '.join(named) or 'none'}",
            remedy="call it like the model in full precision",
        )
    if timestep is None:
        return x, None
    timestep = torch.as_tensor(timestep).reshape(-1)
    if timestep.numel() == 1:
        return x, timestep.expand(x.shape[0])
    if timestep.numel() % x.shape[0]:
        raise UserError(
            "the number of timesteps does not fit the samples",
            expected=f"one, or {x.shape[0]}",
            got=str(timestep.numel()),
            remedy="give one timestep for each sample",
        )
    return x, timestep.view(x.shape[0], -1).amax(1)  # timesteps per token: the noisiest one


def candidates(model: nn.Module, settings: Settings) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns the layers to replace by name, and the reasons why others stay.

    Raises:
        UserError: a pattern matches no layer.
    """
    chosen: dict[str, Any] = {}
    left: dict[str, str] = {}
    for name, module in model.named_modules():
        if not name or not isinstance(module, (nn.Linear, nn.modules.conv._ConvNd)):
            continue
        reason = obstacle(module)
        weight = module.weight
        if not any(fnmatchcase(name, p) for p in settings.include) or any(
            fnmatchcase(name, p) for p in settings.exclude
        ):
            reason = "the settings exclude it"
        elif not reason and min(weight.shape[:2]) < settings.min_channels:
            reason = f"it has {min(weight.shape[:2])} channels, min_channels asks for {settings.min_channels}"
        if reason:
            left[name] = reason
        else:
            chosen[name] = module
    for pattern in (*settings.include, *settings.exclude):
        if pattern != "*" and not any(fnmatchcase(name, pattern) for name in [*chosen, *left]):
            raise UserError(
                f"the layer pattern '{pattern}' matches no layer",
                expected=f"a pattern of one of: {several([*chosen, *left], 8) or 'none: the model has no linear layer'}",
                got=f"'{pattern}'",
                remedy="correct Settings.include or Settings.exclude",
            )
    return chosen, left


def find_timestep_input(model: nn.Module, names: Sequence[str], given: str | None, settings: Settings) -> str | None:
    """Returns the name of a model's timestep, None if nothing depends on it.

    Args:
        names: of all inputs. given: by the user.
    Raises:
        UserError: no input has a known name, or the given one does not exist.
    """
    if given is not None and given in names:
        return given
    found = next((name for name in TIMESTEP_NAMES if name in names), None)
    if given is None and (found is not None or settings.scales == "dynamic" or settings.bins == 1):
        return found
    raise UserError(
        f"which input of {type(model).__name__} is the timestep?",
        expected=f"one of {', '.join(names)}",
        got=repr(given) if given is not None else f"no input named {', '.join(TIMESTEP_NAMES)}",
        remedy="name it: timestep_input=…; or Settings(bins=1), which needs none",
    )


def _replace(model: nn.Module, old: Mapping[str, nn.Module], new: Mapping[str, nn.Module]) -> None:
    """Replaces modules under all of their names."""
    by_id = {id(module): new[name] for name, module in old.items()}
    for module in list(model.modules()):
        for name, child in list(module._modules.items()):
            if child is not None and id(child) in by_id:
                module._modules[name] = by_id[id(child)]


def _require_finite(name: str, x: Tensor) -> None:
    remedy = (
        "reset_cache() for a cache, and find the overflow (FP16 models: try float32 or bfloat16); load a weight again"
    )
    require_finite(f"{name} has NaN or Inf", x, remedy)
