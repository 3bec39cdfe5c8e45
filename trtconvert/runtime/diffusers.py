"""A bundle's components in the place of a diffusers pipeline's models: `pipe.transformer = bundle.as_diffusers()`.

diffusers is imported when one is made, not with this module.
"""

from __future__ import annotations

import copy
import inspect
import math
import re
import sys
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
from trtconvert.runtime.libraries import library_class
from trtconvert.runtime.reuse import PipelineSteps
from trtconvert.runtime.signature import shape_of
from trtconvert.runtime.trajectory import apart, begin
from trtconvert.runtime.unused import UnusedResult

if TYPE_CHECKING:
    from trtconvert.runtime.loras import Loras

PACKING = ("return_dict", "generator")
"""Parameters that change no arithmetic: how results are packed, and randomness that a text encoder or a VAE does not draw."""


_ADVICE = (
    (
        r"encode|_encode",
        "a use of its encoder, which the bundle does not hold",
        "add vae_encoder to components in the recipe and build again: `components: {all: {}, vae_encoder: {}}`; or give the "
        "pipeline a VAE of torch: bundle.pipeline(vae=…)",
    ),
    (
        r"(enable|disable|use)_.*(tiling|slicing)",
        "a wish to work piece by piece: an engine takes whole images, of the sizes that it was built for",
        "leave it out, for the engine's memory is planned for its sizes; for larger images build with them in "
        "model.options.height and width, or give the pipeline a VAE of torch, which can work in tiles: bundle.pipeline(vae=…)",
    ),
    (
        r".*(lora|adapter|peft).*",
        "a LoRA for a model without weights of its own",
        "give LoRAs in the recipe's section loras and build again; an engine that was built with engine.refittable: true takes "
        "them by set_loras",
    ),
    (
        r".*attn_processors?|set_.*attention.*|.*qkv.*",
        "a change of its attention, which is part of the engine",
        "leave it out: the engine has kernels of its own; where a pipeline changes attention while it draws, as for perturbed "
        "attention guidance, keep the model as it is",
    ),
)
"""What pipelines ask of their models beside calling them: pattern of the name, what that is, and what to do instead."""


class NotConverted(UserError, AttributeError):
    """What a model had, and its converted one has not. `hasattr` and `getattr` with a default take it for what it is."""


class NotPicklable(UserError, PicklingError):
    """What stands for a model runs on an engine, which cannot leave its process."""


class _DropIn(nn.Module):
    """What a pipeline needs of any of its models: `config`, `dtype`, `device`.

    It has no weights, so a pipeline's `to()` leaves it where it is.

    Args:
        record: how the pipeline calls the model.
        dtype: the type that the pipeline should prepare its tensors in.
        device: where the component runs.
    """

    def __init__(self, record: DiffusersRecord, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        try:
            from diffusers.configuration_utils import FrozenDict
        except ImportError as error:
            raise BackendUnavailable(
                "diffusers is not installed",
                expected="the library whose pipeline the model goes into",
                got=str(error),
                remedy="pip install 'trtconvert[diffusers]'",
            ) from error
        self.config = FrozenDict(record.config)
        for name, node in record.attributes.items():
            setattr(self, name, _part_without_weights(record, name) if "part" in node else _attribute(node))
        self.dtype, self.device = dtype, device
        self._record = record

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """One without elements: pipelines, and accelerate's hooks, read a model's type and device off the first."""
        yield nn.Parameter(torch.empty(0, dtype=self.dtype, device=self.device), requires_grad=False)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            otherwise = (
                "a use of the model itself: it runs as it was converted",
                "leave it out; or do it to the pipeline's own model, save that, and build a bundle of it",
            )
            got, remedy = next(
                ((got, remedy) for pattern, got, remedy in _ADVICE if re.fullmatch(pattern, name)), otherwise
            )
            error = NotConverted(
                f"the converted {self._record.model} has no '{name}'",
                expected="a pipeline that calls its model, and reads its configuration, type and device",
                got=got,
                remedy=remedy,
            )
            error.name = name
            raise error from None

    def __reduce_ex__(self, protocol: Any) -> Any:
        """
        Raises:
            NotPicklable: always; `copy` has a way of its own.
        """
        raise NotPicklable(
            f"the converted {self._record.model} cannot be pickled",
            expected="a bundle's folder, which a process opens for itself",
            got="an engine or a session, which belong to this process",
            remedy="give the other process the bundle's path, and call trtconvert.runtime.load(path).as_diffusers() in it",
        )

    def __copy__(self) -> _DropIn:
        made = type(self).__new__(type(self))
        made.__dict__.update(self.__dict__)
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> _DropIn:
        """Another one on the same component: engines and sessions are not copied, and closing the bundle closes it for both."""
        made = copy.copy(self)
        made.config = copy.deepcopy(self.config, memo)
        return made


def refuse_misplaced(model: Any, name: str) -> None:
    """
    Args:
        model: a part of a pipeline; name: that it has there.
    Raises:
        UserError: it stands for another part, as a bundle of Wan 2.2's `transformer_2` in the place of its `transformer`: both
            take and give the same, and draw noise.
    """
    if isinstance(model, _DropIn) and (own := model._record.component) != name:
        raise UserError(
            f"the pipeline has the converted {own} as its {name}",
            expected=f"a bundle of its {name}, whose weights others are not",
            got=f"one of {own}, by its manifest",
            remedy=f"put it into the place of {own}; a bundle of the other is built with `denoiser: {name}` in model.options",
        )


def _refuse_misplaced_caller(called: _Denoising, own: str) -> None:
    """
    Args:
        called: what the pipeline calls, on this thread's stack; own: the part that it stands for.
    Raises:
        UserError: see `refuse_misplaced`. What is not called by a pipeline of diffusers with such a part passes.
    """
    from diffusers.pipelines.pipeline_utils import DiffusionPipeline

    frame = sys._getframe()
    while frame is not None:
        pipe = frame.f_locals.get("self")
        if isinstance(pipe, DiffusionPipeline):
            places = {name: x for name, x in pipe.components.items() if getattr(x, "_called", None) is called}
            if own in pipe.components and own not in places:
                for name, model in places.items():
                    refuse_misplaced(model, name)
            return
        frame = frame.f_back


class _Parameters:
    """The parameters of the method that a drop-in stands for.

    Args:
        record: how the pipeline calls it.
    """

    def __init__(self, record: DiffusersRecord) -> None:
        self._record = record
        self.signature = inspect.Signature([_parameter(name) for name in record.parameters])

    def of(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function that seems to have these parameters."""
        seeming = partial(function)
        seeming.__signature__ = self.signature  # type: ignore[attr-defined]
        return seeming

    def bound(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of a call by parameter.

        Raises:
            UserError: the method has no such parameters.
        """
        try:
            return flat_arguments(self.signature.bind(*args, **kwargs))
        except TypeError as error:
            raise UserError(
                f"the converted model is called otherwise than {self._record.model}",
                expected=", ".join(self._record.parameters),
                got=str(error),
                remedy="use a diffusers version whose pipeline calls the model as the one that converted it did",
            ) from error


def _parameter(name: str) -> inspect.Parameter:
    """A parameter as the record names it, see `trtconvert.runtime.arguments.parameters_of`."""
    if name.startswith("*"):
        kind = inspect.Parameter.VAR_KEYWORD if name.startswith("**") else inspect.Parameter.VAR_POSITIONAL
        return inspect.Parameter(name.lstrip("*"), kind)
    return inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=name == "return_dict" or None)


class DiffusersDenoiser(_DropIn):
    """A pipeline's `unet` or `transformer`: forward with the model's parameters; the output has the type and the device of what
    is denoised. Where the denoiser applies guidance inside, nothing is computed before the pipeline adds up both halves, see
    `trtconvert.runtime.halves`.

    Args:
        denoiser: takes named tensors and gives the prediction.
        timestep_input: the name of the timestep among them, which it takes as [B] FP32.
        of_samples: the names of those that have an entry for each sample; one that a caller gives for all is repeated.
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
        called = self._called = _Denoising(denoiser, record, timestep_input, of_samples)
        self.forward = called.parameters.of(called)
        if size := record.config.get("projection_class_embeddings_input_dim"):
            # StableDiffusionXLPipeline checks its time ids against the width of this layer.
            self.add_embedding = SimpleNamespace(linear_1=SimpleNamespace(in_features=size))

    is_cache_enabled = False
    """Whether one of diffusers' caches of steps is in the model, which some pipelines ask."""

    @contextmanager
    def cache_context(self, name: str | None = None, *_: object, **__: object) -> Iterator[None]:
        """Pipelines name the conditional and the unconditional call: each has caches of its own, where layers quantise deltas
        from step to step."""
        before, self._called.context = self._called.context, name
        try:
            yield
        finally:
            self._called.context = before

    def follow(self, scheduler: Any) -> None:
        """Leave out the steps that the bundle's schedule leaves out, where it has one. `LoadedBundle.pipeline` and
        `trtconvert.optimize` do this by themselves.

        Args:
            scheduler: of the pipeline that this model is in, which knows its timesteps.
        """
        self._called.follow(scheduler)

    def reset_cache(self) -> None:
        """All samples begin anew in the next call, where layers quantise deltas. They do so by themselves at the first step of
        an image, which has more noise than the last step of the one before."""
        self._called.reset_cache()

    def refit(self, weights: Mapping[str, Tensor] | str | Path) -> int:
        """Replace weights of the engine by those of a model like the one that it was made of, see `TensorRTComponent.refit`.

        Args:
            weights: the model's state dict, some or all of it, or a safetensors file of it.
        """
        from trtconvert.runtime.refit import read_weights

        state = weights if isinstance(weights, Mapping) else read_weights(Path(weights))
        return self._denoiser.refit({f"{self._record.component}.{name}": x for name, x in state.items()})

    def set_loras(self, loras: Loras) -> int:
        """LoRA files and their scales, see `TensorRTComponent.set_loras`."""
        return self._denoiser.set_loras(loras)


def follow_scheduler(model: Any, pipe: Any) -> None:
    """Let a model in a pipeline leave out the steps that its bundle leaves out, where it is a denoiser and the pipeline has a
    scheduler."""
    if isinstance(model, DiffusersDenoiser) and hasattr(pipe, "scheduler"):
        model.follow(pipe.scheduler)


class _Denoising:
    """What a denoiser's `forward` does. It knows nothing of the drop-in that has it: what refers to itself would keep an engine
    on the GPU until Python looks for such rings.

    Args:
        denoiser, record, timestep_input, of_samples: see `DiffusersDenoiser`.
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
        self._steps: PipelineSteps | None = None
        self.parameters = _Parameters(record)
        self.context: str | None = None
        self._contexts: dict[str, Callable[..., Tensor]] = {}
        self._is_placed = False

    def reset_cache(self) -> None:
        """See `DiffusersDenoiser`."""
        for called in (self._denoiser, *self._contexts.values()):
            begin(called)

    def follow(self, scheduler: Any) -> None:
        """See `DiffusersDenoiser`."""
        if (reuse := reuse_of(self._denoiser)) is not None:
            self._steps = PipelineSteps(scheduler, reuse, self._record.model)

    def _prediction(self, denoiser: Callable[..., Tensor], named: Mapping[str, Tensor]) -> Tensor:
        if self._steps is None:
            return denoiser(**named)
        return self._steps.prediction(self.context, denoiser, named)

    def _in_context(self) -> Callable[..., Tensor]:
        """The denoiser with the caches of the context that a pipeline calls it in."""
        if self.context is None:
            return self._denoiser
        if self.context not in self._contexts:
            self._contexts[self.context] = apart(self._denoiser)
        return self._contexts[self.context]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """
        Raises:
            UserError: the arguments are not those that the denoiser was converted for, or outside its engine's profiles; or the
                pipeline has it in the place of another denoiser.
        """
        if not self._is_placed:  # once: frames keep what is read of them
            _refuse_misplaced_caller(self, self._record.component)
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
                expected=f"one for all samples, or one for each of {batch}",
                got=f"{timestep.numel()}, a tensor of shape {list(timestep.shape)}",
                remedy="use the pipeline that was converted, or build a bundle of the pipeline that passes timesteps of tokens "
                "or frames",
            )
        named[self._timestep] = timestep.reshape(-1).expand(batch)
        for name in self._shares:
            named[name] = named[name].to(sample.device)
        for name in self._of_samples & named.keys():  # which torch's operators would repeat
            if named[name].dim() and len(named[name]) == 1:
                named[name] = named[name].expand(batch, *named[name].shape[1:])
        if self._steps is not None:
            self._steps.see(passed, named[self._timestep])
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


class DiffusersTextEncoder(_DropIn):
    """A pipeline's text encoder: forward with the model's parameters. What the pipeline did not look into when it was converted
    comes back as `UnusedResult`.

    Args:
        component: takes named tensors; signature: of it.
        dtype, device: see `_DropIn`.
    """

    def __init__(
        self, component: Callable[..., Any], signature: ComponentRecord, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        assert signature.diffusers is not None
        super().__init__(signature.diffusers, dtype, device)
        self._method = _Method(component, signature)
        self.forward = self._method.parameters.of(self._method)


class DiffusersAutoencoder(_DropIn):
    """A pipeline's `vae`: `decode`, and `encode` where the bundle has both.

    Args:
        halves: by method, the component that takes named tensors, and its signature; "decode" at least.
        dtype, device: see `_DropIn`.
    """

    def __init__(
        self,
        halves: Mapping[str, tuple[Callable[..., Any], ComponentRecord]],
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        record = halves["decode"][1].diffusers
        assert record is not None
        super().__init__(record, dtype, device)
        for method, (component, signature) in halves.items():
            called = _Method(component, signature)
            setattr(self, method, called.parameters.of(called))


class _Method:
    """A method of a model, by a component.

    Args:
        component: takes named tensors and gives its outputs; signature: of it.
    """

    def __init__(self, component: Callable[..., Any], signature: ComponentRecord) -> None:
        assert signature.diffusers is not None
        self._component, self._signature, self._record = component, signature, signature.diffusers
        self._output = _output_class(self._record)
        self.parameters = _Parameters(self._record)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """
        Raises:
            UserError: the arguments are not those that the model was converted for, or outside its engine's profiles.
        """
        arguments = self.parameters.bound(args, kwargs)
        return_dict, _ = (arguments.pop(name, True) for name in PACKING)
        if self._record.method == "forward":  # transformers takes None as yes, diffusers as no
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
    """A part of a model that has no weights, made of the model's configuration: what it does follows from that alone.

    Args:
        name: of the part, which pipelines call by themselves, as what makes positions of LTX-2's sizes.
    Raises:
        BackendUnavailable: the installed diffusers makes no such part of the configuration.
    """
    made = library_class("diffusers", record.model)
    try:
        with torch.device("meta"):
            part = getattr(made.from_config(record.config), name)
    except Exception as error:  # of the library's constructors, whatever it is
        found = kind_and_first_line(error)
    else:
        if isinstance(part, nn.Module) and not [*part.parameters(), *part.buffers()]:
            return part
        found = f"{type(part).__name__}, which is no module or has weights"
    raise BackendUnavailable(
        f"the part '{name}' of {record.model}, which the pipeline calls, cannot be made of the bundle's configuration",
        expected=f"a {record.model} that has a part '{name}' without weights",
        got=found,
        remedy="pip install 'trtconvert[diffusers]', in the versions that the bundle's manifest has under versions; or build "
        "the bundle again",
    )


def _attribute(node: Mapping[str, Any]) -> Any:
    """What a record keeps of an attribute, see `DiffusersRecord.attributes`."""
    if "module" in node:
        return SimpleNamespace(**{name: _attribute(inner) for name, inner in node["module"].items()})
    return torch.tensor(node["tensor"]) if "tensor" in node else node["value"]


def _as_engines_take(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Integers and booleans as int64, and numbers in the place of a denoiser's predictions: an engine must not wait for another
    one, or for itself, when it reads them."""
    numbers = {name: x.computed() if isinstance(x, Prediction) else x for name, x in named.items()}
    return {name: x if x.is_floating_point() else x.long() for name, x in numbers.items()}


def _output_class(record: DiffusersRecord) -> Any:
    module, _, name = record.output.partition(":")
    return library_class(module, name)
