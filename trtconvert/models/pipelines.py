"""Calls pipelines of diffusers and catches the arguments that they pass to their models.

No pipeline is known by name: it runs up to its first call of a model.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import importlib.util
import inspect
import math
import re
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from PIL.Image import Image
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from trtconvert.diffusion_model import OF_NOISE
from trtconvert.errors import (
    BackendUnavailable,
    TrtconvertError,
    UserError,
    kind_and_first_line,
    unfit_option,
    unknown_name,
)
from trtconvert.models.call_options import (
    BINNING,
    LENGTH,
    PROMPT,
    SET_ELSEWHERE,
    SIZE_ARGUMENTS,
    TIMESTEPS,
    TOKENS,
    refuse_unfit_texts,
)
from trtconvert.models.call_source import ImageArgument, image_arguments
from trtconvert.models.drawings import Stopped
from trtconvert.models.observation import Arguments, DoesNotRun
from trtconvert.models.offloading import move
from trtconvert.models.prompt_masks import takes_rows
from trtconvert.models.sample_rows import is_second_of
from trtconvert.models.stand_ins import EMBEDDINGS, stand_ins
from trtconvert.runtime.arguments import flat_arguments, share_timesteps, signature_of, take_apart
from trtconvert.runtime.diffusers import DiffusersDenoiser

ALL_NOISES = 50
"""Steps of a schedule that is fine enough for each of several denoisers to be called."""

MOST_NEEDED = 10
"""The most steps that a scheduler is taken to need."""

_OPTIONAL = {"ftfy": "ftfy", "bs4": "beautifulsoup4", "BeautifulSoup": "beautifulsoup4"}
"""Names in errors of pipelines that lack an optional package, and the package's name."""


def refuse_missing_package(kind: str, error: BaseException) -> None:
    """
    Args:
        kind: class of the pipeline that failed.
        error: the exception that it raised. diffusers raises a NameError where an optional package such as ftfy is missing.
    Raises:
        BackendUnavailable: the error says that a package is not installed.
    """
    missed = isinstance(error, (NameError, ModuleNotFoundError))
    name = (getattr(error, "name", None) or "").partition(".")[0] if missed else ""
    if name and (name in _OPTIONAL or isinstance(error, ModuleNotFoundError)):
        raise BackendUnavailable(
            f"{name} is not installed, which {kind} uses",
            expected=f"the package {_OPTIONAL.get(name, name)}",
            got=kind_and_first_line(error),
            remedy=f"pip install {_OPTIONAL.get(name, name)}",
        ) from error


_NO_KIND = {"Optional", "None", "NoneType", "Union", "list", "List", "typing", "torch", "class"}
"""Words in an annotation that name no type of a value."""

CLEANING = "clean_caption"
"""Argument of the pipelines of PixArt, IF and others that removes markup from prompts."""

_LONG = 80
"""Characters of a default that messages do not print."""


@dataclass
class PipelineCaller:
    """Calls a pipeline.

    Attributes:
        component: the denoiser's name in the pipeline.
        tokens, prompts, arguments: see `diffusers_model`; tokens is one number, or None for the pipeline's default.
        images: images of the call, by argument; a list where the pipeline takes a list, as for several ControlNets.
        pads: whether the pipeline pads its prompts to the number of tokens that the argument `LENGTH` gives.
    """

    pipe: Any
    component: str
    tokens: int | None
    prompts: tuple[str, ...]
    arguments: dict[str, Any]
    images: Mapping[str, Image | list[Image]] = field(default_factory=dict)
    signature: Mapping[str, inspect.Parameter] = field(init=False)
    parameters: frozenset[str] = field(init=False)
    pads: bool = field(default=False, init=False)
    _image_each: bool | None = field(default=None, init=False)
    """True if several samples of a call get an image each, False if they share one; None before the first such call."""
    _encoders: dict[str, tuple[Any, Callable[..., Any]]] = field(default_factory=dict, init=False, repr=False)
    """By the pipeline's part: its function, and the function of `encoding_once` with all that it encoded."""

    def __post_init__(self) -> None:
        self.signature = inspect.signature(self.pipe.__call__).parameters
        self.parameters = frozenset(self.signature)
        self._refuse_combined()
        self._refuse_unknown(
            self.images, "model.images", "correct it in the recipe, or convert a pipeline that takes images"
        )
        self._refuse_unknown(self.arguments, "model.options.call", "remove it from the recipe")
        self._refuse_ip_adapters()
        self._refuse_lacking()
        if self.cleaning_lacks:
            self.arguments = {CLEANING: False} | self.arguments  # the pipeline does so, and says it in every call
        if not self.parameters & {"prompt", *EMBEDDINGS}:
            self._image_each = True  # the number of images is the number of samples
        refuse_unfit_texts(self.kind, self.arguments, self.has_text_encoder)
        if self.arguments.get("strength") == 0:
            expected = "a share of the schedule above 0, which leaves every image as it is, and up to 1; 0.6 is usual"
            raise unfit_option("call.strength", expected, 0)
        self.pipe.set_progress_bar_config(disable=True)
        for filtering in ("safety_checker", "watermark"):  # they would change the images that are compared
            part = getattr(self.pipe, filtering, None)
            # Cosmos' checker judges prompts too, as the terms of its model demand, and its pipeline fails without it.
            if part is not None and not hasattr(part, "check_text_safety"):
                setattr(self.pipe, filtering, None)

    @property
    def kind(self) -> str:
        """The name of the pipeline's class."""
        return type(self.pipe).__name__

    @property
    def denoiser(self) -> Any:
        """The pipeline's denoiser."""
        return getattr(self.pipe, self.component)

    @property
    def has_text_encoder(self) -> bool:
        """Whether the pipeline turns prompts into embeddings. The first of several text encoders may be absent where the
        pipeline's class calls it optional, as that of SDXL does."""
        components = self.pipe.components.items()
        there = {name for name, part in components if part is not None and name.startswith("text_encoder")}
        return "text_encoder" in there or bool(there and "text_encoder" in type(self.pipe)._optional_components)

    @property
    def bins(self) -> bool:
        """Whether the pipeline draws at the nearest of a list of sizes."""
        return BINNING in self.parameters and bool(self.arguments.get(BINNING, self.signature[BINNING].default))

    @property
    def takes_embeddings(self) -> bool:
        """Whether a call may have embeddings instead of prompts."""
        return bool(self.parameters & EMBEDDINGS.keys())

    @property
    def takes_prompts(self) -> bool:
        """Whether samples show prompts: there is a text encoder, or the pipeline takes no embeddings."""
        return "prompt" in self.parameters and (self.has_text_encoder or not self.takes_embeddings)

    @property
    def decodes(self) -> bool:
        """Whether the pipeline returns images: it decodes latents, or denoises pixels."""
        return self.pipe.components.get("vae", self.pipe) is not None

    def taken_steps(self, steps: int, least: int = 1) -> int:
        """Returns the length of a schedule, `steps` or more, that makes the pipeline take at least `least` steps.

        A pipeline that begins with an image takes the share of the last steps that its strength gives. A pipeline of a part of
        the schedule takes the steps of this part.
        """

        def number(name: str, otherwise: float) -> float:
            parameter = self.signature.get(name)
            value = self.arguments.get(name, None if parameter is None else parameter.default)
            return value if isinstance(value, (int, float)) and 0 <= value <= 1 else otherwise

        share = min(number("strength", 1.0), 1 - number("denoising_start", 0.0), number("denoising_end", 1.0))
        return steps if share <= 0 else max(steps, math.ceil(least / share + 1e-9))

    @cached_property
    def fewest_steps(self) -> int:
        """The fewest steps that the scheduler takes: 4 for PNDM with Runge-Kutta steps. 1 if a number of steps is not enough."""

        def takes(steps: int) -> bool:
            try:
                copy.deepcopy(self.pipe.scheduler).set_timesteps(steps)
            except Exception:  # whatever a scheduler raises
                return False
            return True

        return next(filter(takes, range(1, MOST_NEEDED + 1)), 1)

    def probing_steps(self) -> int:
        """Returns the length of the shortest schedule with two timesteps or more."""
        return self.taken_steps(max(2, self.fewest_steps), least=2)

    def refuse_unfit_sizes(self, ranges: Mapping[str, tuple[int, int, int]]) -> None:
        """
        Raises:
            UserError: the pipeline does not take one of the sizes, or draws at sizes of its own instead of a range.
        """
        for name, parameters in SIZE_ARGUMENTS.items():
            if name in ranges and self.parameters.isdisjoint(parameters):
                raise UserError(
                    f"{self.kind} takes no {name}",
                    expected="options among " + ", ".join(sorted(self.parameters)),
                    got=name,
                    remedy=f"remove model.options.{name}",
                )
        varied = [name for name in ("height", "width") if name in ranges and ranges[name][0] < ranges[name][2]]
        if varied and self.bins:
            raise UserError(
                f"{self.kind} draws at the nearest of sizes of its own ({BINNING})",
                expected="one height and width, or a call that takes every size",
                got=", ".join(f"{name} {list(ranges[name])}" for name in varied),
                remedy=f"give model.options.call as {{{BINNING}: false}}, or height and width as one number each",
            )

    def _refuse_combined(self) -> None:
        """Kandinsky and Stable Cascade have pipelines of a prior and a decoder, which hold models of their own."""
        for name, part in vars(self.pipe).items():
            held = getattr(part, "components", None)
            if isinstance(held, dict) and any(x is self.denoiser for x in held.values()):
                kind = type(part).__name__
                raise UserError(
                    f"{self.kind} is made of several pipelines, and another denoiser in its place would not draw",
                    expected=f"the pipeline that calls the {self.component}",
                    got=f"{self.kind}, which calls it through its {name}, a {kind}",
                    remedy=f"save that pipeline, `pipe.{name}.save_pretrained(FOLDER)`, and convert it; then give a pipeline the "
                    f"converted denoiser as `pipe.{name}.{self.component}`",
                )

    def _refuse_unknown(self, given: Mapping[str, Any], where: str, remedy: str) -> None:
        if unknown := sorted(given.keys() - self.parameters):
            problem = f"{where} has {unknown[0]}, which {self.kind} does not take"
            raise unknown_name(problem, unknown[0], sorted(self.parameters), remedy)

    @property
    def cleaning_lacks(self) -> list[str]:
        """Packages that are missing to clean prompts, if the pipeline cleans them."""
        if CLEANING not in self.parameters:
            return []
        packages = {"bs4": "beautifulsoup4", "ftfy": "ftfy"}
        return [package for module, package in packages.items() if importlib.util.find_spec(module) is None]

    def _refuse_ip_adapters(self) -> None:
        """A saved pipeline holds no IP-Adapter."""
        if given := [name for name in self.images if "ip_adapter" in name]:
            raise UserError(
                f"{self.kind} takes {given[0]} through an IP-Adapter, which an engine does not take",
                expected="images that the pipeline takes as it was saved",
                got=f"model.images.{given[0]}",
                remedy=f"remove {' and '.join(given)} from model.images, or keep the pipeline's own {self.component}",
            )

    @property
    def _required(self) -> list[str]:
        """Names of the call's arguments that have no default."""
        return [
            name
            for name, parameter in self.signature.items()
            if parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        ]

    def _refuse_lacking(self) -> None:
        embeddings = {*EMBEDDINGS, *(f"negative_{name}" for name in EMBEDDINGS)}
        given = {"prompt", "class_labels", "batch_size", *embeddings}
        if self.takes_prompts and (beside := [x for x in self._required if x in embeddings]):
            raise UserError(
                f"{self.kind} takes {' and '.join(beside)} beside its prompts",
                expected="prompts, or embeddings of noise instead of prompts",
                got="embeddings that another pipeline computes from the prompts",
                remedy=f"keep the pipeline's own {self.component}, or convert it through a function of your own, model.source: "
                "package.module:function",
            )
        wanted = [name for name in self._required if name not in given | self.images.keys() | self.arguments.keys()]
        if wanted:
            raise UserError(
                f"{self.kind} is not called without {' and '.join(wanted)}",
                expected=f"{', '.join(wanted)} in the recipe",
                got="images " + (", ".join(self.images) or "none") + ", call " + (", ".join(self.arguments) or "none"),
                remedy=f"name the file of an image under model, `images: {{{wanted[0]}: FILE.png}}`; give a number or a text in "
                "model.options.call",
            )

    def __call__(
        self,
        seeds: Sequence[int],
        steps: int,
        sizes: Mapping[str, int],
        captions: Sequence[str] | None = None,
        *,
        as_latents: bool = False,
    ) -> Tensor:
        """Runs the pipeline for these seeds; a sample depends on its own seed alone.

        Args:
            sizes: height, width and frames, where they differ from the pipeline's defaults; tokens, the length that the pipeline
                pads prompts to, or else the length of embeddings of noise instead of prompts.
            captions: one per seed, instead of the prompts.
            as_latents: whether to return latents as the pipeline has them before it decodes.
        Returns:
            Images in [0, 1], or latents where the pipeline has no decoder. Several images of a sample are as a video's frames.
        Raises:
            UserError: the pipeline refuses its arguments, or fails with them.
        """
        arguments: dict[str, Any] = {
            next(parameter for parameter in SIZE_ARGUMENTS[name] if parameter in self.parameters): size
            for name, size in sizes.items()
            if name in SIZE_ARGUMENTS
        }
        tokens = sizes.get(TOKENS, self.tokens)
        embedded = not self.takes_prompts or (TOKENS in sizes and not self.pads)
        if embedded:
            arguments |= stand_ins(self, seeds, tokens or 77)
        else:
            arguments["prompt"] = list(captions or [self.prompts[seed % len(self.prompts)] for seed in seeds])
        if self.images and len(seeds) > 1 and self._image_each is None:
            self._settle_images(sizes)
        each = len(seeds) > 1 and self._image_each
        arguments |= {name: [image] * len(seeds) if each else image for name, image in self.images.items()}
        left = {"class_labels", *(name for name in self.arguments if embedded and PROMPT.fullmatch(name))}
        arguments |= {name: value for name, value in self._further(seeds).items() if name not in left}
        if self._takes_one_text and len(seeds) == 1:
            texts = (name for name, x in arguments.items() if PROMPT.fullmatch(name) and isinstance(x, list))
            arguments |= {name: arguments[name][0] for name in texts}
        if tokens is not None and (self.pads or (TOKENS in sizes and LENGTH in self.parameters)):
            arguments[LENGTH] = tokens  # a pipeline that does not pad to this length cuts prompts and embeddings at it
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        try:
            with _restored(self.pipe), _seeded(seeds):
                output = self.pipe(
                    **arguments,
                    num_inference_steps=steps,
                    generator=generators if len(seeds) > 1 else generators[0],  # Wan VACE takes no list
                    output_type="latent" if as_latents or not self.decodes else self._output_type,
                )
        except TrtconvertError:
            raise
        except Exception as error:  # whatever the pipeline, its models and its tokenizers raise
            refuse_missing_package(self.kind, error)
            if steps < self.fewest_steps:
                raise DoesNotRun(
                    f"{self.kind} does not take so few steps",
                    expected=f"{self.fewest_steps} or more, which its scheduler needs, {type(self.pipe.scheduler).__name__}",
                    got=str(steps),
                    remedy="take more steps, or save the pipeline with another scheduler",
                ) from error
            raise DoesNotRun(
                f"a call of {self.kind} failed",
                expected="sizes and arguments that the pipeline takes, and a pipeline that runs with them",
                got=kind_and_first_line(error),
                remedy=self._remedy(error),
            ) from error
        drawn = output[0]  # the oldest pipelines ignore "pt" and return arrays [N, H, W, C]
        if as_latents:
            return drawn
        if not isinstance(drawn, Tensor):
            drawn = torch.from_numpy(drawn)
            drawn = drawn.movedim(-1, 1) if drawn.dim() > 3 else drawn
        drawn = drawn[:, None] if drawn.dim() == 2 else drawn  # AudioLDM's sounds of one channel
        # Marigold's intrinsics are several images of a sample, one after the other.
        of_sample = len(drawn) // len(seeds)
        return drawn.unflatten(0, (len(seeds), of_sample)) if of_sample > 1 and drawn.dim() == 4 else drawn

    @cached_property
    def _output_type(self) -> str:
        """The form of the pipeline's images: arrays if it makes no tensors of images, as LDM3D."""

        def fails(form: str) -> bool:
            try:
                self.pipe.image_processor.postprocess(torch.zeros(1, channels, 8, 8), output_type=form)
            except Exception:  # whatever an image processor raises
                return True
            return False

        channels = getattr(getattr(self.pipe, "vae", None), "config", {}).get("out_channels") or 3
        return "np" if fails("pt") and not fails("np") else "pt"

    @property
    def _takes_one_text(self) -> bool:
        """Whether a prompt is declared as a text and not as a list, as in DreamLite."""
        declared = str(self.signature["prompt"].annotation) if "prompt" in self.signature else ""
        return "str" in declared and "list" not in declared.lower()

    def _settle_images(self, sizes: Mapping[str, int]) -> None:
        """Decides whether several samples share an image or get an image each: a sample of two gets what the sample gets alone.

        Where samples share an image, some pipelines draw the noise of its latents with the first sample's generator, so that the
        noise of the other samples changes, and Kandinsky 3 draws one sample. Other pipelines take a list of images for each
        sample, or refuse lists.
        """
        texts, ways = [self.prompts[0]] * 2, []
        for self._image_each in (False, True):
            try:
                both = self.first_call([0, 1], sizes, captions=texts)
                alone = self.first_call([1], sizes, captions=texts[:1])
            except UserError:
                continue
            if is_second_of(both, alone):
                return
            ways.append(self._image_each)
        self._image_each = ways[0] if ways else None

    def _remedy(self, error: Exception) -> str:
        """Returns the remedy for a failed call: give the images that the call lacks, set the arguments that the error names, or
        correct the given ones."""
        lacking = [x for x in image_arguments(self.kind) if x.name not in {*self.images, *self.arguments}]
        if needed := [x for x in lacking if x.needed]:
            return _give_images(needed)
        said = str(error).lower().replace("_", " ")
        defaults = {
            name: parameter.default
            for name, parameter in self.signature.items()
            if name not in SET_ELSEWHERE
            and parameter.default is not parameter.empty
            and not _is_tensor(parameter)  # a recipe has none
        }
        line = _failing_line(error)
        named = [
            name
            for name, default in defaults.items()
            if ("_" in name and name.replace("_", " ") in said) or (default is None and re.search(rf"\b{name}\b", line))
        ]
        given = [name for name in named if self.arguments.get(name) is not None]
        if unset := [
            name for name in named if name not in self.arguments and (defaults[name] is not None or not given)
        ]:
            return "; ".join(f"set {name} in model.options.call{_about_default(defaults[name])}" for name in unset)
        without = f"{_give_images(lacking)}, if the pipeline needs images; or " if lacking and not self.images else ""
        return (
            f"{without}correct model.options in the recipe, where `call` holds further arguments of the pipeline, or the "
            "pipeline itself; --debug shows where it failed"
        )

    def _further(self, seeds: Sequence[int]) -> dict[str, Any]:
        """Returns the call's further arguments. A negative prompt, or a prompt of a further text encoder, is one for all samples,
        or a list that samples take by turns."""
        lists = {name: [x] if isinstance(x, str) else x for name, x in self.arguments.items() if PROMPT.fullmatch(name)}
        turns = {name: [x[seed % len(x)] for seed in seeds] for name, x in lists.items() if x is not None}
        return self.arguments | turns

    def first_call(
        self,
        seeds: Sequence[int],
        sizes: Mapping[str, int],
        model: nn.Module | None = None,
        method: str = "forward",
        captions: Sequence[str] | None = None,
    ) -> dict[str, Any]:
        """Returns the arguments of the pipeline's first call of a model, by parameter; the pipeline ends there.

        Args:
            model: one of the pipeline's models, its denoiser by default.
            method: of the model.
            captions: see `__call__`.
        """
        model = model or self.denoiser
        assert isinstance(model, nn.Module)
        own = getattr(model, method)
        signature = signature_of(own)

        @functools.wraps(own)  # `_settle_images` reads the signature of what it replaces
        def stop(*args: Any, **kwargs: Any) -> None:
            raise Called(flat_arguments(signature.bind(*args, **kwargs)))

        with replaced(model, method, stop):
            arguments = self.until_called(seeds, sizes, captions)
        arguments.pop("return_dict", None)
        return arguments

    def denoiser_arguments(self, sizes: Mapping[str, int], captions: Sequence[str] | None = None) -> Arguments:
        """Returns the arguments of the pipeline's first call of its denoiser."""
        arguments = self.first_call(range(sizes["batch"]), sizes, captions=captions)
        for name in TIMESTEPS:
            if isinstance(arguments.get(name), (int, float)):
                arguments[name] = torch.tensor(arguments[name])
        structure, tensors = self.taken_apart(arguments, sizes.get(TOKENS, self.tokens) or 0)
        timestep = next((name for name in TIMESTEPS if name in tensors), None)
        if timestep is None or not tensors[timestep].numel() or len(tensors) < 2:
            return structure, tensors  # the caller refuses them
        others = [name for name in tensors if OF_NOISE.fullmatch(name)]
        return share_timesteps(structure, tensors, timestep, others)

    def taken_apart(self, arguments: Mapping[str, Any], least: int = 0) -> Arguments:
        """Returns the structure of the denoiser's arguments, and the tensors in them.

        Args:
            least: see `take_apart`, for a denoiser that takes lists.
        Raises:
            UserError: the denoiser takes its samples as a list that cannot be given as one tensor.
        """
        first, samples = next(iter(arguments.items()))
        if isinstance(samples, Tensor):
            return take_apart(arguments)
        listed = isinstance(samples, list) and all(isinstance(x, Tensor) for x in samples)
        if not listed or not takes_rows(self.denoiser):
            raise UserError(
                f"{type(self.denoiser).__name__} takes its samples as a list, each with sizes of its own",
                expected="one tensor of all samples, which an engine takes",
                got=f"'{first}', {type(samples).__name__} of {len(samples) if isinstance(samples, (list, tuple)) else 1}",
                remedy=f"keep the pipeline's own {self.component}, or convert it through a function of your own, model.source: "
                "package.module:function, with a module that takes one tensor and makes the list",
            )
        return take_apart(arguments, least)

    def until_called(
        self, seeds: Sequence[int], sizes: Mapping[str, int], captions: Sequence[str] | None = None
    ) -> dict[str, Any]:
        """Runs the pipeline until one of its models raises `Called`, and returns the arguments of this exception.

        Raises:
            UserError: the pipeline fails, or does not call that model.
        """
        try:
            with torch.no_grad(), self.others_idling() as others:
                self(seeds, self.probing_steps(), sizes, captions)
                if others:  # the denoiser may be one of the last steps
                    self(seeds, self.taken_steps(ALL_NOISES), sizes, captions)
        except Called as called:
            return called.arguments
        raise UserError(
            f"{self.kind} does not call the model that is converted",
            expected="a pipeline that denoises with its model, and uses the components that the recipe names",
            got="a run without a call",
            remedy="convert another pipeline, or remove the component from the recipe",
        )

    @contextmanager
    def encoding_once(self) -> Iterator[None]:
        """Inside such blocks text encoders compute once for equal tokens, and the VAE encodes equal images once: observing a
        pipeline needs the same few prompts and images ten times, and each takes seconds on a CPU."""
        vae: Any = getattr(self.pipe, "vae", None)
        with ExitStack() as caches:

            def once(name: str, part: Any, method: str, wrapped: Callable[..., Any]) -> None:
                own = getattr(part, method)
                function = getattr(own, "__func__", own)
                if name not in self._encoders or self._encoders[name][0] is not function:
                    self._encoders[name] = function, wrapped(own)
                caches.enter_context(replaced(part, method, self._encoders[name][1]))

            for name, part in self.pipe.components.items():
                if name.startswith("text_encoder") and isinstance(part, nn.Module):
                    once(name, part, "forward", _encoding_rows_once)
            if hasattr(vae, "encode"):
                once("vae", vae, "encode", _encoding_once)
            yield

    @contextmanager
    def others_idling(self) -> Iterator[int]:
        """Inside the block the denoisers that are not converted return zeros at once. Wan 2.2 has a `transformer` for high noise
        and a `transformer_2` for low noise. Yields the number of these denoisers."""
        kind = self.component.partition("_")[0]
        others = [
            part
            for name, part in self.pipe.components.items()
            if name.partition("_")[0] == kind and name != self.component and isinstance(part, nn.Module)
        ]
        with ExitStack() as idling:
            for other in others:
                idling.enter_context(replaced(other, "forward", _zeros))
            yield len(others)

    @contextmanager
    def denoising_with(self, denoiser: DiffusersDenoiser) -> Iterator[None]:
        """Inside the block the pipeline has another denoiser, and is on the device of this denoiser."""
        own = self.denoiser
        setattr(self.pipe, self.component, denoiser)
        try:
            for part in self.pipe.components.values():
                if isinstance(part, nn.Module) and part is not denoiser:
                    move(part, denoiser.device)
            yield
        finally:
            setattr(self.pipe, self.component, own)


class _Remembered:
    """A function whose result depends on its arguments alone: equal arguments give a copy of the first result."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function, self._results = function, dict[Any, Any]()

    def of(self, leaves: Sequence[Any], structure: TreeSpec) -> Any:
        key = _key_of(leaves, structure)
        if key not in self._results:
            args, kwargs = tree_unflatten(leaves, structure)
            self._results[key] = self._function(*args, **kwargs)
        return copy.deepcopy(self._results[key])

    def keep(self, leaves: Sequence[Any], structure: TreeSpec, result: Any) -> None:
        """Stores the result of a call, unless one is stored."""
        self._results.setdefault(_key_of(leaves, structure), result)


def _encoding_rows_once(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a text encoder's forward: equal tokens, masks and options give a copy of the first result. The encoder computes equal
    rows of a batch once, and no row alone that it computed in a batch."""
    results = _Remembered(forward)

    @functools.wraps(forward)
    def cached(*args: Any, **kwargs: Any) -> Any:
        leaves, structure = tree_flatten((args, kwargs))
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        if any(type(x) is not Tensor or x.is_floating_point() for x in tensors):
            return forward(*args, **kwargs)
        sizes = {len(x) if x.dim() else 0 for x in tensors}
        if len(sizes) != 1 or max(sizes) < 2:
            return results.of(leaves, structure)

        def rows_of(places: Sequence[int]) -> list[Any]:
            return [x[list(places)] if isinstance(x, Tensor) else x for x in leaves]

        rows = list(zip(*(x.tolist() for x in tensors), strict=True))
        first = [rows.index(row) for row in rows]
        kept = sorted(set(first))
        found = results.of(rows_of(kept), structure)
        outputs, form = tree_flatten(found)
        if not all(isinstance(x, Tensor) and x.dim() and len(x) == len(kept) for x in outputs):
            return found if len(kept) == len(rows) else results.of(leaves, structure)
        if len(kept) > 1:
            for number, place in enumerate(kept):
                alone = tree_unflatten([x[number : number + 1].clone() for x in outputs], form)
                results.keep(rows_of([place]), structure, alone)
        again = torch.tensor([kept.index(place) for place in first])
        return tree_unflatten([x[again.to(x.device)] for x in outputs], form)

    return cached


def _encoding_once(encode: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a VAE's encode: equal images give a copy of the first result."""
    results = _Remembered(encode)

    @functools.wraps(encode)
    def cached(*args: Any, **kwargs: Any) -> Any:
        leaves, structure = tree_flatten((args, kwargs))
        if any(isinstance(x, Tensor) and type(x) is not Tensor for x in leaves):  # shapes alone
            return encode(*args, **kwargs)
        return results.of(leaves, structure)

    return cached


def _key_of(leaves: Sequence[Any], structure: TreeSpec) -> Any:
    """Returns a key of a call's arguments by their values."""

    def value_of(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return repr(x)
        numbers = x.detach().cpu().reshape(-1).view(torch.uint8).numpy()
        return x.dtype, x.device, x.shape, hashlib.sha256(numbers.data).digest()

    return repr(structure), *map(value_of, leaves)


def _zeros(*arguments: Any, **named: Any) -> Any:
    from diffusers.models.modeling_outputs import Transformer2DModelOutput

    x = next(x for x in (*arguments, *named.values()) if isinstance(x, Tensor))
    return Transformer2DModelOutput(sample=torch.zeros_like(x))


@contextmanager
def _restored(pipe: Any) -> Iterator[None]:
    """Restores the pipeline's attributes after a call, so that the next call runs the same models: Marigold keeps the embeddings
    of an empty prompt."""
    before = dict(vars(pipe))
    try:
        yield
    finally:
        vars(pipe).clear()
        vars(pipe).update(before)


@contextmanager
def _seeded(seeds: Sequence[int]) -> Iterator[None]:
    """Seeds torch's own generators in the block: the ControlNet pipelines of Stable Diffusion 3 draw latents of their images
    without the call's generators."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices):
        torch.manual_seed(seeds[0])
        yield


class Called(Stopped):
    """Ends a pipeline at its call of a model.

    Args:
        arguments: of the call, by parameter.
    """

    def __init__(self, arguments: dict[str, Any]) -> None:
        super().__init__()
        self.arguments = arguments


@contextmanager
def replaced(owner: Any, name: str, by: Any) -> Iterator[None]:
    """Replaces a model's method, or a pipeline's model, inside the block."""
    before = vars(owner).get(name)
    setattr(owner, name, by)
    try:
        yield
    finally:
        if before is None:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


def _failing_line(error: BaseException) -> str:
    """Returns the line of a pipeline's code that failed; "" if code that the pipeline calls failed, or if the pipeline raised an
    error of its own, which tells more."""
    *_, last = traceback.extract_tb(error.__traceback__)
    line = last.line or ""
    return "" if "pipelines" not in Path(last.filename).parts or line.startswith("raise") else line


def _is_tensor(parameter: inspect.Parameter) -> bool:
    """Whether an argument is declared as a tensor, such as embeddings or a mask, and nothing else."""
    kinds = {name for name in re.findall(r"\w+", str(parameter.annotation)) if name not in _NO_KIND}
    return bool(kinds) and all(kind.endswith("Tensor") for kind in kinds)


def _give_images(arguments: Sequence[ImageArgument]) -> str:
    files = ", ".join(f"{x.name}: {'[FILE.png, …]' if x.frames else 'FILE.png'}" for x in arguments)
    return f"name files of images under model, `images: {{{files}}}`"


def _about_default(default: Any) -> str:
    """Returns what a message adds about an argument's default."""
    if default is None:
        return ""
    told = f" (the default is {default})" if len(str(default)) < _LONG else " (the default does not fit)"
    return told if isinstance(default, int) else f"{told}, to null for none"
