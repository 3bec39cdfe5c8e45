"""Drop-in replacements of a diffusers pipeline's models: `pipe.transformer = bundle.as_diffusers()`.

Making a drop-in imports diffusers; importing this module does not.
"""

from __future__ import annotations

import copy
import inspect
import math
import re
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from pickle import PicklingError
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from trtconvert.bundle import ComponentRecord, DiffusersRecord
from trtconvert.errors import BackendUnavailable, UserError, kind_and_first_line
from trtconvert.guidance import guidance_of
from trtconvert.reuse.schedule import reuse_of
from trtconvert.runtime.arguments import flat_arguments, is_list_of_samples, tensors_of
from trtconvert.runtime.halves import Halves, Prediction
from trtconvert.runtime.libraries import library_class, no_diffusers
from trtconvert.runtime.reuse import PipelineSteps
from trtconvert.runtime.signature import shape_of
from trtconvert.runtime.unused import UnusedResult
from trtconvert.wrapped import apart, begin

if TYPE_CHECKING:
    from trtconvert.runtime.loras import Loras

PACKING = ("return_dict", "generator")
"""Parameters that do not change the arithmetic: the form of results, and the randomness of sampling."""


_ADVICE = (
    (
        r"encode|_encode",
        "a call of the encoder, which the bundle does not hold",
        "add vae_encoder to components in the recipe and build again: `components: {all: {}, vae_encoder: {}}`; or give the "
        "pipeline a VAE of torch: bundle.pipeline(vae=…)",
    ),
    (
        r"(enable|disable|use)_.*(tiling|slicing)",
        "tiling or slicing; an engine takes whole images, of the sizes that it was built for",
        "leave the setting out: the engine's memory is planned for its sizes; for larger images build with larger "
        "model.options.height and width, or give the pipeline a VAE of torch, which can tile: bundle.pipeline(vae=…)",
    ),
    (
        r".*ip_adapter.*",
        "an IP-Adapter for a model without torch weights",
        "draw without the IP-Adapter; or keep the pipeline's own model, because an engine does not take an IP-Adapter",
    ),
    (
        r".*(lora|adapter|peft).*",
        "a LoRA for a model without torch weights",
        "add the LoRAs to the recipe's section loras and build again; an engine that was built with engine.refittable: true "
        "takes LoRAs by set_loras",
    ),
    (
        r".*attn_processors?|set_.*attention.*|.*qkv.*",
        "a change of the attention, which is part of the engine",
        "leave the change out: the engine has its own kernels; for pipelines that change attention while they draw, such as "
        "perturbed attention guidance, keep the original model",
    ),
)
"""Attributes that pipelines use beside calls: pattern of the name, meaning, and remedy."""


class NotConverted(UserError, AttributeError):
    """The converted model lacks an attribute of the original. An AttributeError too, for `hasattr` and `getattr`."""


class NotPicklable(UserError, PicklingError):
    """A converted model runs on an engine, which cannot leave its process."""


class _DropIn(nn.Module):
    """The attributes that a pipeline needs of any model: `config`, `dtype`, `device`.

    There are no weights, so that a pipeline's `to()` does not move a drop-in.

    Args:
        record: the calls of the pipeline.
        dtype: type of the tensors that the pipeline prepares.
        device: device of the component.
    """

    def __init__(self, record: DiffusersRecord, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        try:
            from diffusers.configuration_utils import FrozenDict
        except ImportError as error:
            raise no_diffusers(error) from error
        self.config = FrozenDict(record.config)
        for name, node in record.attributes.items():
            setattr(self, name, _part_without_weights(record, name) if "part" in node else _attribute(node))
        self.dtype, self.device = dtype, device
        self._record = record

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Yield an empty parameter: pipelines, and accelerate's hooks, read a model's type and device from the first."""
        yield nn.Parameter(torch.empty(0, dtype=self.dtype, device=self.device), requires_grad=False)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            otherwise = (
                "a use of the original model",
                "leave it out; or apply it to the pipeline's own model, save that model, and build a bundle of it",
            )
            got, remedy = next(
                ((got, remedy) for pattern, got, remedy in _ADVICE if re.fullmatch(pattern, name)), otherwise
            )
            error = NotConverted(
                f"the converted {self._record.model} has no '{name}'",
                expected="a pipeline that calls the model, and reads its configuration, type and device",
                got=got,
                remedy=remedy,
            )
            error.name = name
            raise error from None

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raise NotPicklable. `copy` uses `__copy__`."""
        raise NotPicklable(
            f"the converted {self._record.model} cannot be pickled",
            expected="the path of the bundle: each process loads its own engine from there",
            got="an engine or a session of this process",
            remedy="pass the bundle's path to the other process, and call trtconvert.runtime.load(path).as_diffusers() there",
        )

    def __copy__(self) -> _DropIn:
        made = type(self).__new__(type(self))
        made.__dict__.update(self.__dict__)
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> _DropIn:
        """Copy the drop-in but not its engine or session: closing the bundle closes both."""
        made = copy.copy(self)
        made.config = copy.deepcopy(self.config, memo)
        return made


def refuse_misplaced(model: Any, name: str) -> None:
    """Check the place of a drop-in in a pipeline.

    Args:
        model: a part of a pipeline; name: its place there.
    Raises:
        UserError: the drop-in replaces another part, such as Wan 2.2's `transformer_2` in the place of `transformer`: both have
            the same signature, and the wrong one draws noise.
    """
    if isinstance(model, _DropIn) and (own := model._record.component) != name:
        raise UserError(
            f"the pipeline has the converted {own} as its {name}",
            expected=f"a bundle of the {name}",
            got=f"a bundle of the {own}, by its manifest",
            remedy=f"assign the bundle to {own}; build one of the {name} with `denoiser: {name}` in model.options",
        )


def _caller() -> tuple[Any, float, Any]:
    """Return the diffusers pipeline whose call is on this thread's stack, the argument `eta` of the call, and the timestep `t` of
    its loop; None, 0.0 and None where there is none. The pipeline that a model is put into may be another one: a copy, or one of
    several that share the model."""
    from diffusers.pipelines.pipeline_utils import DiffusionPipeline

    frame = sys._getframe(2)
    while frame is not None:
        # Reading a frame's locals keeps them alive until it is read again.
        if frame.f_code.co_name == "__call__" and isinstance(pipe := frame.f_locals.get("self"), DiffusionPipeline):
            eta = frame.f_locals.get("eta")
            return pipe, float(eta) if isinstance(eta, (int, float)) else 0.0, frame.f_locals.get("t")
        frame = frame.f_back
    return None, 0.0, None


def _refuse_misplaced_in(pipe: Any, called: _Denoising, own: str) -> None:
    """Call `refuse_misplaced` for the models of a pipeline with the part `own`."""
    places = {name: x for name, x in pipe.components.items() if getattr(x, "_called", None) is called}
    if own in pipe.components and own not in places:
        for name, model in places.items():
            refuse_misplaced(model, name)


class _Parameters:
    """The parameters of the method that a drop-in replaces."""

    def __init__(self, record: DiffusersRecord) -> None:
        self._record, names = record, [*record.parameters]
        if not any(name == "return_dict" or name.startswith("*") for name in names):
            names.append("return_dict")  # taken by a decorator, as in transformers 4
        self.signature = inspect.Signature([_parameter(name) for name in names])

    def of(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function so that `inspect` sees these parameters."""
        wrapped = partial(function)
        wrapped.__signature__ = self.signature  # type: ignore[attr-defined]
        return wrapped

    def bound(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call by parameter.

        Raises:
            UserError: the method does not have these parameters.
        """
        try:
            return flat_arguments(self.signature.bind(*args, **kwargs))
        except TypeError as error:
            raise UserError(
                f"the call of the converted model does not fit {self._record.model}",
                expected=", ".join(self._record.parameters),
                got=str(error),
                remedy="use the diffusers version of the conversion",
            ) from error


def _parameter(name: str) -> inspect.Parameter:
    """Make the parameter of a name by `trtconvert.runtime.arguments.parameters_of`."""
    if name.startswith("*"):
        kind = inspect.Parameter.VAR_KEYWORD if name.startswith("**") else inspect.Parameter.VAR_POSITIONAL
        return inspect.Parameter(name.lstrip("*"), kind)
    return inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=name == "return_dict" or None)


class DiffusersDenoiser(_DropIn):
    """Replaces a pipeline's `unet` or `transformer`, with the forward parameters of the model.

    The output has the type and the device of the noisy sample. If the denoiser applies guidance inside, the engine runs when the
    pipeline adds both halves, see `trtconvert.runtime.halves`.

    Args:
        denoiser: takes named tensors and returns the prediction.
        timestep_input: name of the timestep among the tensors, [B] FP32.
        of_samples: names of tensors with a row for each sample; a single row is repeated.
        record, dtype, device: see `_DropIn`.
    """

    def __init__(
        self,
        denoiser: Callable[..., Tensor],
        record: DiffusersRecord,
        timestep_input: str,
        *,
        of_samples: Collection[str] = (),
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(record, dtype, device)
        self._denoiser: Any = denoiser
        self._call_by(_Denoising(denoiser, record, timestep_input, of_samples))
        if size := record.config.get("projection_class_embeddings_input_dim"):
            # StableDiffusionXLPipeline checks its time ids against the width of this layer.
            self.add_embedding = SimpleNamespace(linear_1=SimpleNamespace(in_features=size))

    def _call_by(self, called: _Denoising) -> None:
        self._called, self.forward = called, called.parameters.of(called)

    def __deepcopy__(self, memo: dict[int, Any]) -> DiffusersDenoiser:
        """Copy the drop-in, with its own steps and MoDiff caches, but not its engine or session."""
        made = super().__deepcopy__(memo)
        assert isinstance(made, DiffusersDenoiser)
        made._call_by(self._called.apart())
        return made

    is_cache_enabled = False
    """Whether the model uses one of diffusers' caches of steps; read by some pipelines."""

    @contextmanager
    def cache_context(self, name: str | None = None, *_: object, **__: object) -> Iterator[None]:
        """Name the conditional or unconditional call, as pipelines do: each name has its own MoDiff caches."""
        of_thread = self._called.of_thread
        before, of_thread.context = of_thread.context, name
        try:
            yield
        finally:
            of_thread.context = before

    def follow(self, scheduler: Any) -> None:
        """Skip the steps that the bundle's schedule skips, if it has one, in a loop of your own. Calls of a diffusers pipeline
        follow the pipeline's scheduler without this.

        Args:
            scheduler: scheduler of the loop, with its timesteps.
        """
        self._called.scheduler = scheduler

    def reset_cache(self) -> None:
        """Reset MoDiff caches in the next call. Caches also reset at the first step of an image, which has more noise than the
        last step of the image before."""
        self._called.reset_cache()

    def refit(self, weights: Mapping[str, Tensor] | str | Path) -> int:
        """Replace weights of the engine by those of a fine-tuned model, see `TensorRTComponent.refit`.

        Args:
            weights: the model's state dict or a part of it, or a safetensors file.
        """
        from trtconvert.runtime.refit import read_weights

        state = weights if isinstance(weights, Mapping) else read_weights(Path(weights))
        return self._denoiser.refit({f"{self._record.component}.{name}": x for name, x in state.items()})

    def set_loras(self, loras: Loras) -> int:
        """Set LoRA files and their scales, see `TensorRTComponent.set_loras`."""
        return self._denoiser.set_loras(loras)


class _OfThread(threading.local):
    """The context of a thread's calls, see `DiffusersDenoiser.cache_context`."""

    context: str | None = None


class _Denoising:
    """The `forward` of `DiffusersDenoiser`, without a reference to the drop-in: a cycle would keep the engine on the GPU until
    the garbage collector runs. For arguments see `DiffusersDenoiser`.

    Attributes:
        of_thread: the context of the calls.
        scheduler: see `DiffusersDenoiser.follow`.
    """

    def __init__(
        self,
        denoiser: Callable[..., Tensor],
        record: DiffusersRecord,
        timestep_input: str,
        of_samples: Collection[str],
    ) -> None:
        self._denoiser, self._record, self._timestep = denoiser, record, timestep_input
        self._of_samples = frozenset(of_samples) - {timestep_input}
        self._output = _output_class(record)
        self._lists = is_list_of_samples(record.arguments)
        self._shares = record.timestep_shares
        guidance = guidance_of(denoiser)
        self._halves = (
            None
            if guidance is None
            else Halves(
                denoiser, timestep_input, guidance, record.model, lambda **named: self._prediction(denoiser, named)
            )
        )
        reuse = reuse_of(denoiser)
        of_tokens = bool(record.timestep_shares)
        self._steps = None if reuse is None else PipelineSteps(reuse, record.model, of_tokens=of_tokens)
        self.scheduler: Any = None
        self.parameters = _Parameters(record)
        self.of_thread = _OfThread()
        self._contexts: dict[str, Callable[..., Tensor]] = {}
        self._is_placed = False

    def reset_cache(self) -> None:
        """See `DiffusersDenoiser`."""
        for called in (self._denoiser, *self._contexts.values()):
            begin(called)

    def apart(self) -> _Denoising:
        """Return the same for the calls of another pipeline."""
        return _Denoising(apart(self._denoiser), self._record, self._timestep, self._of_samples)

    def _prediction(self, denoiser: Callable[..., Tensor], named: Mapping[str, Tensor]) -> Tensor:
        if self._steps is None:
            return denoiser(**named)
        return self._steps.prediction(self.of_thread.context, denoiser, named)

    def _in_context(self) -> Callable[..., Tensor]:
        """Return the denoiser with the caches of the current context."""
        context = self.of_thread.context
        if context is None:
            return self._denoiser
        if context not in self._contexts:
            self._contexts[context] = apart(self._denoiser)
        return self._contexts[context]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Predict.

        Raises:
            UserError: the arguments differ from the conversion's or lie outside the engine's profiles, or the pipeline uses this
                denoiser in the place of another.
        """
        pipe, eta, of_loop = _caller() if self._steps is not None or not self._is_placed else (None, 0.0, None)
        if not self._is_placed:
            if pipe is not None:
                _refuse_misplaced_in(pipe, self, self._record.component)
            self._is_placed = True
        arguments = self.parameters.bound(args, kwargs)
        return_dict = arguments.pop("return_dict", True)
        named = tensors_of(self._record.arguments, arguments)
        sample = next(x for name, x in named.items() if name != self._timestep)
        passed = named[self._timestep]
        timestep = passed.to(sample.device, torch.float32) / self._record.timestep_factor
        batch = sample.shape[0] if sample.dim() else 1
        if timestep.numel() not in (1, batch):
            raise UserError(
                f"the converted {self._record.model} cannot take these values of '{self._timestep}'",
                expected=f"one value for all samples, or one for each of {batch}",
                got=f"{timestep.numel()}, a tensor of shape {list(timestep.shape)}",
                remedy="use the converted pipeline, or build a bundle of this one, which passes timesteps of tokens or frames",
            )
        named[self._timestep] = timestep.reshape(-1).expand(batch)
        for name in self._shares:
            named[name] = named[name].to(sample.device)
        for name in self._of_samples & named.keys():  # torch's operators would repeat them
            if named[name].dim() and len(named[name]) == 1:
                named[name] = named[name].expand(batch, *named[name].shape[1:])
        if self._steps is not None:
            scheduler = self.scheduler if pipe is None else getattr(pipe, "scheduler", None)
            self._steps.see(scheduler, passed, named[self._timestep], eta, of_loop)
        if self._halves is not None:
            output = self._halves.prediction(_as_engines_take(named), sample, passed)
        else:
            output = self._prediction(self._in_context(), _as_engines_take(named)).to(sample)
        if sizes := self._record.predictions:
            each = output.split([math.prod(size) for size in sizes.values()], dim=1)
            fields = {name: x.unflatten(1, size) for (name, size), x in zip(sizes.items(), each, strict=True)}
        else:
            fields = {"sample": list(output.unbind()) if self._lists else output}
        return self._output(**fields) if return_dict else tuple(fields.values())


class DiffusersComponent(_DropIn):
    """Replaces a pipeline's text encoder, with the model's `forward`, or its `vae`, with `decode` and perhaps `encode`.

    Results that the pipeline did not read during the conversion are `UnusedResult`s.

    Args:
        methods: component and record by method; "forward", or "decode" at least. A component takes named tensors.
        dtype, device: see `_DropIn`.
    """

    def __init__(
        self,
        methods: Mapping[str, tuple[Callable[..., Any], ComponentRecord]],
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        record = methods["forward" if "forward" in methods else "decode"][1].diffusers
        assert record is not None
        super().__init__(record, dtype, device)
        for method, (component, signature) in methods.items():
            called = _Method(component, signature)
            setattr(self, method, called.parameters.of(called))
        if "decode" in methods:
            # StableDiffusionUpscalePipeline reads the type of latents from this layer's first parameter.
            weight = nn.Parameter(torch.empty(0, dtype=dtype, device=device), requires_grad=False)
            self.post_quant_conv = SimpleNamespace(parameters=lambda: iter([weight]))


class _Method:
    """A method of a model that runs a component."""

    def __init__(self, component: Callable[..., Any], signature: ComponentRecord) -> None:
        assert signature.diffusers is not None
        self._component, self._signature, self._record = component, signature, signature.diffusers
        self._output = _output_class(self._record)
        self.parameters = _Parameters(self._record)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the component.

        Raises:
            UserError: the arguments differ from the conversion's or lie outside the engine's profiles.
        """
        arguments = self.parameters.bound(args, kwargs)
        return_dict, _ = (arguments.pop(name, True) for name in PACKING)
        if self._record.method == "forward":  # None means True in transformers, and False in diffusers
            return_dict = return_dict is None or return_dict
        named = _as_engines_take(tensors_of(self._record.arguments, arguments))
        outputs = self._component(**named)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        found = dict(zip((spec.name for spec in self._signature.outputs), outputs, strict=True))
        sizes = {
            dim: size
            for spec in self._signature.inputs
            for dim, size in zip(spec.shape, named[spec.name].shape, strict=True)
            if isinstance(dim, str)
        }

        def value(name: str, node: dict[str, Any]) -> Any:
            if "tensor" in node:
                return found[node["tensor"]]
            if "unused" in node:
                return UnusedResult.of(self._record.component, name, shape_of(node["unused"], sizes))
            return tuple(value(f"{name}.{index}", item) for index, item in enumerate(node["list"]))

        results = {name: value(name, node) for name, node in self._record.results.items()}
        if "latent_dist" in results:
            from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution

            results["latent_dist"] = DiagonalGaussianDistribution(results["latent_dist"])
        return self._output(**results) if return_dict else tuple(results.values())


def _part_without_weights(record: DiffusersRecord, name: str) -> nn.Module:
    """Make a submodule without weights from the model's configuration.

    Args:
        name: name of the submodule, which the pipeline calls, such as the one for LTX-2's positions.
    Raises:
        BackendUnavailable: the installed diffusers cannot make the submodule.
    """
    made = library_class("diffusers", record.model)
    try:
        with torch.device("meta"):
            part = getattr(made.from_config(record.config), name)
    except Exception as error:  # any error of the library's constructors
        found = kind_and_first_line(error)
    else:
        if isinstance(part, nn.Module) and not [*part.parameters(), *part.buffers()]:
            return part
        found = f"{type(part).__name__}, which is not a module or has weights"
    raise BackendUnavailable(
        f"the part '{name}' of {record.model} cannot be made from the bundle's configuration",
        expected=f"a {record.model} with a part '{name}' without weights",
        got=found,
        remedy="pip install 'trtconvert[diffusers]' in the versions of the bundle's manifest, or build the bundle again",
    )


def _attribute(node: Mapping[str, Any]) -> Any:
    """Return the value of a recorded attribute, see `DiffusersRecord.attributes`."""
    if "module" in node:
        return SimpleNamespace(**{name: _attribute(inner) for name, inner in node["module"].items()})
    return torch.tensor(node["tensor"]) if "tensor" in node else node["value"]


def _as_engines_take(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert integers and booleans to int64, and compute predictions of `Halves` before another engine reads them."""
    numbers = {name: x.computed() if isinstance(x, Prediction) else x for name, x in named.items()}
    return {name: x if x.is_floating_point() else x.long() for name, x in numbers.items()}


def _output_class(record: DiffusersRecord) -> Any:
    module, _, name = record.output.partition(":")
    return library_class(module, name)
