"""Pipelines of diffusers: calling one, and finding out what it passes to its models.

No pipeline is known by name. It runs up to its first call of a model, once for each size that may vary; what it passes gives the
inputs, and what changes with a size gives the symbolic dimensions.
"""

from __future__ import annotations

import copy
import functools
import inspect
import json
import math
import re
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from PIL.Image import Image
from torch import Tensor, nn
from torch._export.utils import _compiling_state_context
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)
from torch.utils._pytree import tree_flatten

from trtconvert.diffusion_model import OF_NOISE
from trtconvert.errors import BackendUnavailable, TrtconvertError, UserError, did_you_mean, kind_and_first_line
from trtconvert.fake_tensors import shapes_alone
from trtconvert.models.offloading import move
from trtconvert.models.prompt_masks import takes_rows
from trtconvert.models.size_steps import refuse_rounded
from trtconvert.runtime.arguments import Structure, flat_arguments, share_timesteps, take_apart
from trtconvert.runtime.diffusers import DiffusersDenoiser

BATCH = [1, 2, 8]
"""Images per call of a pipeline, (min, opt, max), unless the recipe says otherwise."""

PROMPTS = (
    "a photograph of a mountain lake at sunrise",
    "a watercolour painting of an old harbour town",
    "a close-up portrait of an elderly man, studio light",
    "an isometric drawing of a small workshop full of tools",
    "a red bicycle leaning against a white wall",
    "two dogs running along a beach, motion blur",
    "a bowl of fruit on a wooden table, oil painting",
    "a city street at night after rain, neon signs",
)

ALL_NOISES = 50
"""Steps that come to every noise closely enough for any of several denoisers to be called."""

_TEXT_WIDTHS = (
    "caption_channels",
    "cap_feat_dim",
    "joint_attention_dim",
    "text_dim",
    "text_embed_dim",
    "text_in_dim",
    "context_in_dim",
    "in_text_dim",
    "cross_attention_dim",
)

_EMBEDDINGS: dict[str, tuple[tuple[str, ...], str | None]] = {
    "prompt_embeds": (_TEXT_WIDTHS, "text_len"),
    "prompt_embeds_2": (("cross_attention_dim_t5", "text_embed_2_dim"), "text_len_t5"),
    "prompt_embeds_qwen": (("in_text_dim",), "text_len"),
    "prompt_embeds_clip": (("in_text_dim2",), None),
    "pooled_prompt_embeds": (("pooled_projection_dim", "in_text_dim2"), None),
    "image_embeds": (("encoder_hid_dim",), None),
}
"""Embeddings that pipelines take in the place of prompts, by argument: what models call their width in their configuration, of
which the first that is there is it, and their number of tokens, where it is the model's own; None for one vector a sample."""

TIMESTEPS = ("timestep", "timesteps", "t")
"""What denoisers call their timestep; HiDream's calls it by the second, Z-Image's by the third."""

TOKENS = "tokens"
"""The size of calls that says how many tokens prompts have, and the dimension that follows it."""

LENGTH = "max_sequence_length"
"""What pipelines call the number of tokens that they pad prompts to, or cut them at."""

BINNING = "use_resolution_binning"
"""What pipelines call that they draw at the nearest of sizes of their own, and resize the result."""

_CLASSES = ("num_class_embeds", "num_embeds_ada_norm")
"""What models call the number of their classes in their configuration; the first that is there is it."""

_OPTIONAL = {"ftfy": "ftfy", "bs4": "beautifulsoup4", "BeautifulSoup": "beautifulsoup4"}
"""Packages that pipelines clean prompts with, by the names under which they miss them."""

_TEXT = re.compile(r"(negative_)?prompt(_\d)?")
"""Arguments of a call that are texts, one for each sample."""

_SET_ELSEWHERE = {
    "num_inference_steps": "calibration.steps, plan.steps and verify.steps",
    "prompt": "model.options.prompts",
    "height": "model.options.height",
    "width": "model.options.width",
    "num_frames": "model.options.frames",
    "generator": "calibration.seed and verify.seed",
    "output_type": "nothing: samples are images, or latents of a pipeline without a VAE",
}
"""Arguments that every call of a pipeline gets here, and what in the recipe decides them."""

Sizes = int | list[int] | None
"""A fixed size, [min, opt, max], or the pipeline's own default."""


def size_range(name: str, size: int | list[int]) -> tuple[int, int, int]:
    """(min, opt, max) of a size in the recipe's model.options.

    Raises:
        UserError: it is none.
    """
    values = list(size) if isinstance(size, (list, tuple)) else [size] * 3
    if len(values) != 3 or not all(type(n) is int and n > 0 for n in values) or values != sorted(values):
        raise UserError(
            f"model.options.{name} is no size",
            expected="a whole number, or [min, opt, max]",
            got=str(size),
            remedy="correct it in the recipe",
        )
    low, opt, high = values
    return low, opt, high


def refuse_unknown(caller: PipelineCaller, ranges: Mapping[str, tuple[int, int, int]]) -> None:
    """
    Raises:
        UserError: the pipeline does not take one of the sizes.
    """
    for name, parameter in (("height", "height"), ("width", "width"), ("frames", "num_frames")):
        if name in ranges and parameter not in caller.parameters:
            raise UserError(
                f"{type(caller.pipe).__name__} takes no {name}",
                expected="options among " + ", ".join(sorted(caller.parameters)),
                got=name,
                remedy=f"remove model.options.{name}",
            )
    varied = [name for name in ("height", "width") if name in ranges and ranges[name][0] < ranges[name][2]]
    if varied and caller.bins:
        raise UserError(
            f"{type(caller.pipe).__name__} draws at the nearest of sizes of its own ({BINNING})",
            expected="one height and width, or a call that takes every size",
            got=", ".join(f"{name} {list(ranges[name])}" for name in varied),
            remedy=f"give model.options.call as {{{BINNING}: false}}, or height and width as one number each",
        )


def refuse_unfit(prompts: Sequence[str], call: Mapping[str, Any]) -> None:
    """
    Raises:
        UserError: prompts are no list of texts, or the call has arguments that other fields of the recipe decide.
    """
    if isinstance(prompts, str) or not prompts or not all(isinstance(prompt, str) for prompt in prompts):
        raise UserError(
            "model.options.prompts is no list of prompts",
            expected="a list of one text or more",
            got=repr(prompts),
            remedy="correct it in the recipe, or leave it out",
        )
    if taken := [name for name in _SET_ELSEWHERE if name in call]:
        raise UserError(
            f"model.options.call sets {taken[0]}",
            expected="arguments of the pipeline but " + ", ".join(_SET_ELSEWHERE),
            got=f"{taken[0]}: {call[taken[0]]!r}",
            remedy=f"remove it there; what decides it is {_SET_ELSEWHERE[taken[0]]}",
        )


def refuse_missing_package(kind: str, error: BaseException) -> None:
    """
    Args:
        kind: of the pipeline that failed; error: what it raised.
    Raises:
        BackendUnavailable: it uses a package that is not installed. Where some are not, as ftfy, diffusers knows no such name.
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


@dataclass
class PipelineCaller:
    """Calls the pipeline.

    Attributes:
        component: the denoiser's name in it.
        tokens, prompts, arguments: see `diffusers_model`; one number of tokens, and none for the pipeline's own.
        images: of the call, by argument; a list where the pipeline takes one, as for several ControlNets.
        pads: whether the pipeline is told a length, by the argument `LENGTH`, that it pads its prompts to.
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
    _image_each: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.signature = inspect.signature(self.pipe.__call__).parameters
        self.parameters = frozenset(self.signature)
        if unknown := sorted(self.images.keys() - self.parameters):
            raise UserError(
                f"{type(self.pipe).__name__} takes no {unknown[0]}",
                expected="arguments among " + ", ".join(sorted(self.parameters)),
                got=", ".join(unknown),
                remedy=did_you_mean(
                    unknown[0],
                    self.parameters,
                    "correct model.images in the recipe, or convert a pipeline that takes images",
                ),
            )
        if unknown := sorted(self.arguments.keys() - self.parameters):
            raise UserError(
                f"model.options.call has {unknown[0]}, which {type(self.pipe).__name__} does not take",
                expected="arguments among " + ", ".join(sorted(self.parameters)),
                got=", ".join(unknown),
                remedy=did_you_mean(unknown[0], self.parameters, "take it out of model.options.call"),
            )
        self._refuse_lacking()
        # Nothing else then says how many samples there are.
        self._image_each = bool(self.images) and not self.parameters & {"prompt", *_EMBEDDINGS}
        self._refuse_unfit_texts()
        self.pipe.set_progress_bar_config(disable=True)
        for filtering in ("safety_checker", "watermark"):  # they would change the images that are compared
            part = getattr(self.pipe, filtering, None)
            # What judges prompts too is asked for by the terms of its model, as that of Cosmos, and its pipeline does not run
            # without it: it stays.
            if part is not None and not hasattr(part, "check_text_safety"):
                setattr(self.pipe, filtering, None)

    @property
    def has_text_encoder(self) -> bool:
        """Whether it turns prompts into embeddings. The first of several text encoders may be absent where the pipeline's class
        calls it optional, as that of SDXL does."""
        components = self.pipe.components.items()
        there = {name for name, part in components if part is not None and name.startswith("text_encoder")}
        return "text_encoder" in there or bool(there and "text_encoder" in type(self.pipe)._optional_components)

    def taken_steps(self, steps: int, least: int = 1) -> int:
        """Steps of a schedule of which the pipeline takes some at least: those that begin with an image take the last of them, as
        many as their strength says, and those of a part of the schedule the ones in it."""

        def number(name: str, otherwise: float) -> float:
            parameter = self.signature.get(name)
            value = self.arguments.get(name, None if parameter is None else parameter.default)
            return value if isinstance(value, (int, float)) and 0 <= value <= 1 else otherwise

        share = min(number("strength", 1.0), 1 - number("denoising_start", 0.0), number("denoising_end", 1.0))
        return steps if share <= 0 else max(steps, math.ceil(least / share + 1e-9))

    @property
    def bins(self) -> bool:
        """Whether it draws at the nearest of sizes of its own."""
        return BINNING in self.parameters and bool(self.arguments.get(BINNING, self.signature[BINNING].default))

    @property
    def takes_embeddings(self) -> bool:
        """Whether a call may have embeddings in the place of prompts."""
        return bool(self.parameters & _EMBEDDINGS.keys())

    @property
    def takes_prompts(self) -> bool:
        """Whether samples are of prompts: there is a text encoder, or the pipeline takes nothing in their place."""
        return "prompt" in self.parameters and (self.has_text_encoder or not self.takes_embeddings)

    def _refuse_lacking(self) -> None:
        """
        Raises:
            UserError: the pipeline cannot be called without an argument that nothing here gives.
        """
        given = {"prompt", "class_labels", "batch_size", *_EMBEDDINGS, *(f"negative_{name}" for name in _EMBEDDINGS)}
        wanted = [
            name
            for name, parameter in inspect.signature(self.pipe.__call__).parameters.items()
            if parameter.default is parameter.empty
            and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
            and name not in given | self.images.keys() | self.arguments.keys()
        ]
        if wanted:
            raise UserError(
                f"{type(self.pipe).__name__} is not called without {' and '.join(wanted)}",
                expected=f"{', '.join(wanted)} in the recipe",
                got="images " + (", ".join(self.images) or "none") + ", call " + (", ".join(self.arguments) or "none"),
                remedy=f"name a file under model, `images: {{{wanted[0]}: FILE.png}}`, where it is an image; numbers and texts "
                "go into model.options.call",
            )

    @property
    def decodes(self) -> bool:
        """Whether the pipeline gives images: it turns latents into them, or denoises pixels."""
        return self.pipe.components.get("vae", self.pipe) is not None

    def __call__(
        self,
        seeds: Sequence[int],
        steps: int,
        sizes: Mapping[str, int],
        captions: Sequence[str] | None = None,
    ) -> Tensor:
        """Run the pipeline for these seeds; a sample depends on its own seed alone.

        Args:
            sizes: height, width and frames where they are not the pipeline's own; and tokens, which prompts are padded to where
                the pipeline pads them, and which embeddings have that otherwise stand in the place of prompts.
            captions: one per seed, instead of the prompts.
        Returns:
            What the pipeline gives: images in [0, 1], or latents where it has no decoder.
        Raises:
            UserError: the pipeline refuses its arguments, or fails with them.
        """
        named = {"height": "height", "width": "width", "frames": "num_frames"}
        arguments: dict[str, Any] = {named[name]: size for name, size in sizes.items() if name in named}
        tokens = sizes.get(TOKENS, self.tokens)
        embedded = not self.takes_prompts or (TOKENS in sizes and not self.pads)
        arguments |= self._stand_ins(seeds, tokens or 77) if embedded else self._prompts(seeds, captions)
        arguments |= {name: [image] * len(seeds) if self._image_each else image for name, image in self.images.items()}
        left = {"class_labels", *(name for name in self.arguments if embedded and _TEXT.fullmatch(name))}
        arguments |= {name: value for name, value in self._further(seeds).items() if name not in left}
        if tokens is not None and (self.pads or (TOKENS in sizes and LENGTH in self.parameters)):
            arguments[LENGTH] = tokens  # what does not pad prompts to it cuts them, and embeddings
        try:
            with _forgetting(self.pipe):
                output = self.pipe(
                    **arguments,
                    num_inference_steps=steps,
                    generator=[torch.Generator().manual_seed(seed) for seed in seeds],
                    output_type="pt" if self.decodes else "latent",
                )
        except TrtconvertError:
            raise
        except Exception as error:  # whatever the pipeline, its models and its tokenizers raise
            if self.images and len(seeds) > 1 and not self._image_each:
                # Some pipelines take one image for all samples, others one for each. Which, they do not say beforehand.
                self._image_each = True
                try:
                    return self(seeds, steps, sizes, captions)
                except UserError:
                    self._image_each = False
            refuse_missing_package(type(self.pipe).__name__, error)
            raise UserError(
                f"a call of {type(self.pipe).__name__} failed",
                expected="sizes and arguments that the pipeline takes, and a pipeline that runs with them",
                got=kind_and_first_line(error),
                remedy=self._remedy(error),
            ) from error
        drawn = output[0]  # the oldest pipelines know no "pt", and give arrays [N, H, W, C]
        return drawn if isinstance(drawn, Tensor) else torch.from_numpy(drawn).movedim(-1, 1)

    def _remedy(self, error: Exception) -> str:
        """What to change where a call failed: arguments whose defaults the error speaks of, else anything that was given."""
        said = str(error).lower().replace("_", " ")
        defaults = {
            name: parameter.default
            for name, parameter in self.signature.items()
            if name not in _SET_ELSEWHERE and parameter.default not in (None, parameter.empty)
        }
        spoken_of = [name for name in defaults if "_" in name and name.replace("_", " ") in said]
        if spoken_of and not self.arguments.keys() & set(spoken_of):
            return "; ".join(
                f"set {name} in model.options.call, to null where the pipeline is to do without (by default it is "
                f"{defaults[name]})"
                for name in spoken_of
            )
        return (
            "correct model.options in the recipe, where `call` holds further arguments of the pipeline, or the "
            "pipeline itself; --debug shows where it failed"
        )

    def _prompts(self, seeds: Sequence[int], captions: Sequence[str] | None) -> dict[str, Any]:
        return {"prompt": list(captions or [self.prompts[seed % len(self.prompts)] for seed in seeds])}

    def _stand_ins(self, seeds: Sequence[int], tokens: int) -> dict[str, Any]:
        """What the samples are of without prompts: classes, embeddings; or how many there are, of pipelines that draw one thing
        only."""
        given: dict[str, Any] = {}
        if "batch_size" in self.parameters:
            given["batch_size"] = len(seeds)
        if "class_labels" in self.parameters and (labels := self._labels(seeds)):
            given["class_labels"] = labels
        return given | (self._embeddings(seeds, tokens) if self.takes_embeddings else {})

    def _labels(self, seeds: Sequence[int]) -> list[int]:
        """A class for each sample: of the recipe's by turns, else seeded by the sample; none where the model knows no classes.

        Raises:
            UserError: the recipe's are no classes of the model.
        """
        config = getattr(self.pipe, self.component).config
        classes = next((config[name] for name in _CLASSES if isinstance(config.get(name), int)), None)
        chosen = self.arguments.get("class_labels")
        if chosen is not None:
            named = list(chosen) if isinstance(chosen, (list, tuple)) else [chosen]
            if not named or not all(type(n) is int and 0 <= n < (classes or n + 1) for n in named):
                raise UserError(
                    "model.options.call.class_labels are no classes of the model",
                    expected="a list of whole numbers from 0" + (f" to {classes - 1}" if classes else ""),
                    got=str(chosen),
                    remedy="correct it in the recipe, or leave it out: classes are then drawn by the seed of each sample",
                )
            return [named[seed % len(named)] for seed in seeds]
        return [int(torch.randint(classes, (), generator=_apart(seed))) for seed in seeds] if classes else []

    def _embeddings(self, seeds: Sequence[int], tokens: int) -> dict[str, Any]:
        """Embeddings of N(0, 1), seeded by the sample, and zeros for no prompt, in the place of what text encoders give."""
        config = getattr(self.pipe, self.component).config
        made: dict[str, Any] = {}
        for name in _EMBEDDINGS:
            if name in self.parameters and (shape := self._embedding_shape(name, config, tokens)):
                drawn = [torch.randn(shape, dtype=torch.float32, generator=_apart(seed)) for seed in seeds]
                made[name] = torch.stack(drawn)
                if f"negative_{name}" in self.parameters and self._guides:
                    made[f"negative_{name}"] = torch.zeros_like(made[name])
                made |= self._masks(name, len(seeds), shape[0], config)
        if "negative_prompt" in self.parameters:
            made["negative_prompt"] = None  # some pipelines have a default, and take one of the two
        if "prompt" in self.parameters and self.signature["prompt"].default is inspect.Parameter.empty:
            made["prompt"] = None
        on_device = {name: x if x is None else x.to(self.pipe.device) for name, x in made.items()}
        return {name: list(x) if x is not None and self._listed(name) else x for name, x in on_device.items()}

    @property
    def _guides(self) -> bool:
        """Whether a call may use negative prompts. AnyFlow's joins their embeddings with the others also where it does not."""
        scale = self.arguments.get("guidance_scale", getattr(self.signature.get("guidance_scale"), "default", None))
        return "true_cfg_scale" in self.parameters or not isinstance(scale, (int, float)) or scale > 1

    def _listed(self, name: str) -> bool:
        """Whether an argument is declared as a list. Pipelines that join lists of two halves would add up their tensors."""
        return str(self.signature[name].annotation).startswith(("list[", "typing.List["))

    def _embedding_shape(self, name: str, config: Mapping[str, Any], number: int) -> tuple[int, ...]:
        """Of one sample's embeddings, (tokens, width) or (width,); none where the model takes no such ones.

        Args:
            number: of tokens, where it is not the model's own.
        Raises:
            UserError: the model takes them, and does not say how wide they are.
        """
        widths, tokens = _EMBEDDINGS[name]
        width = next((config[key] for key in widths if isinstance(config.get(key), int)), None)
        if name == "pooled_prompt_embeds" and config.get("addition_embed_type") == "text_time":
            # SDXL: beside the text there are six numbers, or, with an aesthetic score in the place of two, five.
            numbers = 5 if getattr(self.pipe.config, "requires_aesthetics_score", False) else 6
            width = config["projection_class_embeddings_input_dim"] - numbers * config["addition_time_embed_dim"]
        if (width is None and name == "pooled_prompt_embeds") or (name == "image_embeds" and self.images):
            return ()  # the pipeline makes embeddings of the images that it is given, where its model takes some
        if width is None:
            lacking = not self.has_text_encoder
            raise UserError(
                f"{type(self.pipe).__name__} {'has no text encoder' if lacking else 'is given embeddings of other lengths'}, "
                f"and its denoiser does not say how wide {name} are",
                expected="one of " + ", ".join(widths) + " in the denoiser's configuration",
                got="none",
                remedy="save the pipeline with its text encoder"
                if lacking
                else "take model.options.tokens out of the recipe",
            )
        return (width,) if tokens is None else (config.get(tokens) or number, width)

    def _masks(self, name: str, samples: int, tokens: int, config: Mapping[str, Any]) -> dict[str, Tensor]:
        """That all tokens of some embeddings are of the prompt, in the ways in which pipelines are told."""
        if not name.startswith("prompt_embeds") or _EMBEDDINGS[name][1] is None:
            return {}
        rest = name.removeprefix("prompt_embeds")
        names = (f"prompt_attention_mask{rest}", f"prompt_embeds_mask{rest}", "prompt_cu_seqlens")
        # Chroma adds its mask to the products of queries and keys, where others choose by it.
        kind = torch.float32 if "approximator_layers" in config else torch.int64
        ones = torch.ones(samples, tokens, dtype=kind)
        lengths = torch.arange(samples + 1, dtype=torch.int32) * tokens
        return {
            title: lengths if title.endswith("cu_seqlens") else ones
            for title in (*names, *(f"negative_{name}" for name in names))
            if title in self.parameters
        }

    def _further(self, seeds: Sequence[int]) -> dict[str, Any]:
        """The call's further arguments. Negative prompts, and prompts for further text encoders, are one for all samples, or a
        list that they take by turns."""
        lists = {name: [x] if isinstance(x, str) else x for name, x in self.arguments.items() if _TEXT.fullmatch(name)}
        turns = {name: [x[seed % len(x)] for seed in seeds] for name, x in lists.items() if x is not None}
        return self.arguments | turns

    def _refuse_unfit_texts(self) -> None:
        """
        Raises:
            UserError: a prompt in the call is none, or nothing reads it; or a strength leaves no step to draw with.
        """
        for name, value in self.arguments.items():
            if not _TEXT.fullmatch(name) or value is None:
                continue
            listed = [value] if isinstance(value, str) else value
            if not isinstance(listed, (list, tuple)) or not listed or not all(isinstance(x, str) for x in listed):
                raise UserError(
                    f"model.options.call.{name} is no prompt",
                    expected="a text for all samples, or a list of texts that they take by turns",
                    got=repr(value),
                    remedy="correct it in the recipe, or leave it out",
                )
            if not self.has_text_encoder:
                raise UserError(
                    f"nothing reads model.options.call.{name}",
                    expected=f"a {type(self.pipe).__name__} with its text encoders, in the place of whose prompts noise is taken",
                    got=f"{value!r}, and a pipeline that was saved without them",
                    remedy="save the pipeline with its text encoders and tokenizers, or take it out of model.options.call",
                )
        if self.arguments.get("strength") == 0:
            raise UserError(
                "model.options.call.strength leaves every image as it is",
                expected="a share of the schedule above 0 and up to 1",
                got=str(self.arguments["strength"]),
                remedy="correct it in the recipe; 0.6 is usual",
            )

    def first_call(
        self,
        seeds: Sequence[int],
        sizes: Mapping[str, int],
        model: nn.Module | None = None,
        method: str = "forward",
        captions: Sequence[str] | None = None,
    ) -> dict[str, Any]:
        """The arguments of the pipeline's first call of a model, by parameter; the pipeline ends there.

        Args:
            model: one of the pipeline's, its denoiser by default; method: of it; captions: see `__call__`.
        """
        model = model or getattr(self.pipe, self.component)
        assert isinstance(model, nn.Module)
        signature = inspect.signature(getattr(model, method))

        def stop(*args: Any, **kwargs: Any) -> None:
            raise Called(flat_arguments(signature.bind(*args, **kwargs)))

        with replaced(model, method, stop):
            arguments = self.until_called(seeds, sizes, captions)
        arguments.pop("return_dict", None)
        return arguments

    def denoiser_arguments(
        self, sizes: Mapping[str, int], captions: Sequence[str] | None = None
    ) -> tuple[dict[str, dict[str, Any]], dict[str, Tensor]]:
        """What the pipeline passes to its denoiser at first: the structure, and the tensors in it."""
        arguments = self.first_call(range(sizes["batch"]), sizes, captions=captions)
        for name in TIMESTEPS:
            if isinstance(arguments.get(name), (int, float)):
                arguments[name] = torch.tensor(arguments[name])
        structure, tensors = self.taken_apart(arguments, sizes.get(TOKENS, self.tokens) or 0)
        timestep = next((name for name in TIMESTEPS if name in tensors), None)
        if timestep is None or not tensors[timestep].numel() or len(tensors) < 2:
            return structure, tensors  # which is refused with what there is
        others = [name for name in tensors if OF_NOISE.fullmatch(name)]
        return share_timesteps(structure, tensors, timestep, others)

    def taken_apart(
        self, arguments: Mapping[str, Any], least: int = 0
    ) -> tuple[dict[str, dict[str, Any]], dict[str, Tensor]]:
        """The structure of the arguments of the denoiser, and the tensors in them.

        Args:
            least: see `take_apart`, where the denoiser takes lists.
        Raises:
            UserError: it takes its samples as a list, and nothing here gives it tensors instead.
        """
        model = getattr(self.pipe, self.component)
        first, samples = next(iter(arguments.items()))
        if isinstance(samples, Tensor):
            return take_apart(arguments)
        listed = isinstance(samples, list) and all(isinstance(x, Tensor) for x in samples)
        if not listed or not takes_rows(model):
            raise UserError(
                f"{type(model).__name__} takes its samples as a list, each with sizes of its own",
                expected="one tensor of all samples, which an engine takes",
                got=f"'{first}', {type(samples).__name__} of {len(samples) if isinstance(samples, (list, tuple)) else 1}",
                remedy=f"keep the pipeline's own {self.component}, or convert it through a function of your own, model.source: "
                "package.module:function, whose module takes one tensor and makes the list",
            )
        return take_apart(arguments, least)

    def until_called(
        self, seeds: Sequence[int], sizes: Mapping[str, int], captions: Sequence[str] | None = None
    ) -> dict[str, Any]:
        """Run the pipeline until one of its models raises `Called`, and give what that brings.

        Raises:
            UserError: the pipeline fails, or does not call that model.
        """
        try:
            with torch.no_grad(), self.others_idling() as others:
                self(seeds, self.taken_steps(2, least=2), sizes, captions)
                if others:  # one that takes the last steps alone
                    self(seeds, self.taken_steps(ALL_NOISES), sizes, captions)
        except Called as called:
            return called.arguments
        raise UserError(
            f"{type(self.pipe).__name__} does not call the model that is converted",
            expected="a pipeline that denoises with its model, and uses the components that the recipe names",
            got="a run without a call",
            remedy="convert another pipeline, or take the component out of the recipe",
        )

    @contextmanager
    def encoding_once(self) -> Iterator[None]:
        """Inside the block each text encoder computes once for equal tokens: finding out what a pipeline passes asks for the same
        few prompts ten times, and a large encoder takes seconds for each on a CPU."""
        with ExitStack() as remembering:
            for name, part in self.pipe.components.items():
                if name.startswith("text_encoder") and isinstance(part, nn.Module):
                    remembering.enter_context(replaced(part, "forward", _remembered(part.forward)))
            yield

    @contextmanager
    def others_idling(self) -> Iterator[int]:
        """Denoisers that are not converted cost nothing, and find no noise: Wan 2.2 has a `transformer` for high noise and a
        `transformer_2` for low noise. Gives how many there are."""
        others = self._other_denoisers()
        with ExitStack() as idling:
            for other in others:
                idling.enter_context(replaced(other, "forward", _idle))
            yield len(others)

    def _other_denoisers(self) -> list[nn.Module]:
        kind = self.component.partition("_")[0]
        parts = {name: part for name, part in self.pipe.components.items() if name.partition("_")[0] == kind}
        return [part for name, part in parts.items() if name != self.component and isinstance(part, nn.Module)]

    @contextmanager
    def denoising_with(self, denoiser: DiffusersDenoiser) -> Iterator[None]:
        """Another denoiser in the pipeline, and the pipeline on its device."""
        own = getattr(self.pipe, self.component)
        setattr(self.pipe, self.component, denoiser)
        try:
            for part in self.pipe.components.values():
                if isinstance(part, nn.Module) and part is not denoiser:
                    move(part, denoiser.device)
            yield
        finally:
            setattr(self.pipe, self.component, own)


def _remembered(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A text encoder's forward that gives what it gave before, in tensors of its own, for the same tokens, masks and options."""
    results: dict[Any, Any] = {}

    @functools.wraps(forward)
    def remembering(*args: Any, **kwargs: Any) -> Any:
        leaves, structure = tree_flatten((args, kwargs))
        if any(isinstance(x, Tensor) and (type(x) is not Tensor or x.is_floating_point()) for x in leaves):
            return forward(*args, **kwargs)
        numbers = ((x.dtype, x.shape, x.cpu().numpy().tobytes()) if isinstance(x, Tensor) else repr(x) for x in leaves)
        key = (repr(structure), *numbers)
        if key not in results:
            results[key] = forward(*args, **kwargs)
        return copy.deepcopy(results[key])

    return remembering


def _idle(*arguments: Any, **named: Any) -> Any:
    """Instead of the forward of a denoiser that is not looked at: no noise was found."""
    from diffusers.models.modeling_outputs import Transformer2DModelOutput

    x = next(x for x in (*arguments, *named.values()) if isinstance(x, Tensor))
    return Transformer2DModelOutput(sample=torch.zeros_like(x))


@contextmanager
def _forgetting(pipe: Any) -> Iterator[None]:
    """A call leaves nothing behind in the pipeline, as Marigold keeps what its text encoder makes of an empty prompt: the next
    one calls the same models."""
    before = dict(vars(pipe))
    try:
        yield
    finally:
        vars(pipe).clear()
        vars(pipe).update(before)


def _apart(seed: int) -> torch.Generator:
    """Of what a sample is of; the odd number keeps it apart from the latents, which the seed itself draws."""
    return torch.Generator().manual_seed(seed ^ 0x5EED)


class Called(BaseException):
    """The pipeline has come to the model that is looked for. No `Exception`: nothing that pipelines handle."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        super().__init__()
        self.arguments = arguments


@contextmanager
def replaced(model: nn.Module, method: str, by: Callable[..., Any]) -> Iterator[None]:
    """Another method in the place of a model's own, or of what already stands in its place."""
    before = vars(model).get(method)
    setattr(model, method, by)
    try:
        yield
    finally:
        if before is None:
            delattr(model, method)
        else:
            setattr(model, method, before)


Observe = Callable[[Mapping[str, int]], tuple[dict[str, dict[str, Any]], dict[str, Tensor]]]
"""Sizes to what a pipeline then passes to a model: the structure of the arguments, and the tensors in them."""


@dataclass(frozen=True)
class Observed:
    """What a pipeline passes to a model.

    Attributes:
        structure: of the arguments, see `trtconvert.runtime.arguments`.
        shapes: of each tensor, sizes and symbolic dimensions.
        dims: symbolic dimension: (min, opt, max).
        calls: the tensors of each call that was watched; the first is at the opt sizes.
        symbols: symbolic dimension: its size in each of the calls.
    """

    structure: dict[str, dict[str, Any]]
    shapes: dict[str, tuple[int | str, ...]]
    dims: dict[str, tuple[int, int, int]]
    calls: tuple[dict[str, Tensor], ...]
    symbols: dict[str, tuple[int, ...]]

    @property
    def example(self) -> dict[str, Tensor]:
        """The tensors of a call at the opt sizes."""
        return self.calls[0]

    @property
    def least_rows(self) -> dict[str, int]:
        """The smallest second size of each tensor."""
        second = {name: shape[1] for name, shape in self.shapes.items() if len(shape) > 1}
        return {name: size if isinstance(size, int) else self.dims[size][0] for name, size in second.items()}

    def dimension(self, sizes: Sequence[int]) -> int | str | None:
        """What a dimension with these sizes in the calls is: a constant, a symbol, or a line through one; None where neither."""
        if len(set(sizes)) == 1:
            return sizes[0]
        for name, of in self.symbols.items():
            if tuple(sizes) == of:
                return name
        for name, of in self.symbols.items():
            other = next((i for i, size in enumerate(of) if size != of[0]), None)
            if other is None:
                continue
            factor = (sizes[other] - sizes[0]) // (of[other] - of[0])
            offset = sizes[0] - factor * of[0]
            if factor > 0 and all(size == factor * x + offset for size, x in zip(sizes, of, strict=True)):
                return f"{factor}*{name}" + (f"{offset:+d}" if offset else "")
        return None


def observe_sizes(observe: Observe, ranges: Mapping[str, tuple[int, int, int]]) -> Observed:
    """Find a model's inputs and their symbolic dimensions, from calls of different sizes.

    A dimension that follows one size is named after it, one that follows several is called "tokens", or "positions" where the
    number of a prompt's tokens is one of the sizes.

    Raises:
        UserError: the pipeline passes a number that follows a size, so that an engine for a range cannot be, or as many tokens
            as its longest prompt has, so that an engine would refuse the next one; or it rounds a size.
    """
    opt = {name: middle for name, (_, middle, _) in ranges.items()}
    others = {
        name: opt | {name: middle + 1 if low == high else low if low < middle else high}
        for name, (low, middle, high) in ranges.items()
        if low < high or name == "batch"
    }
    structure, example = observe(opt)
    changed: dict[str, dict[str, Tensor]] = {}
    for name, sizes in others.items():
        varies = ranges[name][0] < ranges[name][2]
        try:
            found, changed[name] = observe(sizes)
        except UserError:
            if varies:
                raise
            # A batch of one size is observed at another to tell what follows it; some pipelines draw one image at a time.
            changed[name] = _of_one_more(example, opt["batch"])
            continue
        if varies:
            refuse_numbers(name, structure, found)
    corners = [{name: size[index] for name, size in ranges.items()} for index in (0, 2)]
    calls = (example, *changed.values(), *(observe(sizes)[1] for sizes in corners))
    batches = [sizes["batch"] for sizes in (opt, *others.values(), *corners)]
    dims: dict[str, tuple[int, int, int]] = {}
    symbols: dict[str, tuple[int, ...]] = {}

    def symbol(name: str, axis: int) -> int | str:
        sizes = tuple(tensors[name].shape[axis] for tensors in calls)
        if len(set(sizes)) == 1:
            return sizes[0]
        follows = [which for which, other in zip(changed, sizes[1:], strict=False) if other != sizes[0]]
        if follows in ([], ["batch"]) and any(
            size * batches[0] != sizes[0] * batch for size, batch in zip(sizes, batches, strict=True)
        ):
            refuse_rounded(lambda sizes: observe(sizes)[1][name].shape[axis], ranges)
            raise UserError(
                f"the pipeline passes '{name}' with as many tokens as its longest prompt has",
                expected="a number of tokens that prompts are padded to",
                got=f"{', '.join(map(str, sizes))} for {', '.join(map(str, batches))} prompts",
                remedy="give model.options.tokens as [min, opt, max]; or pad them, with a parameter of the pipeline in "
                "model.options.call where it has one",
            )
        if (known := next((other for other, of in symbols.items() if of == sizes), None)) is not None:
            return known
        stem = follows[0] if len(follows) == 1 else "positions" if TOKENS in ranges else "tokens"
        number = sum(other.partition("_")[0] == stem for other in dims)
        title = f"{stem}_{number + 1}" if number else stem
        *_, low, high = sizes
        if stem == "batch":
            # A pipeline with guidance calls with twice as many; the same engine serves it without. What has rows for each frame
            # has as many for a sample then: the smallest sizes are those of one call.
            low = ranges["batch"][0] * max(1, sizes[0] // symbols.get("batch", sizes)[0])
        symbols[title] = sizes
        dims[title] = (low, sizes[0], high)
        return title

    shapes = {name: tuple(symbol(name, axis) for axis in range(x.dim())) for name, x in example.items()}
    return Observed(structure, shapes, dims, calls, symbols)


def _of_one_more(tensors: Mapping[str, Tensor], samples: int) -> dict[str, Tensor]:
    """What a model would be passed for one sample more: what has as many rows as its first tensor gets further ones."""
    rows = len(next(iter(tensors.values())))
    return {
        name: torch.cat([x, x[: rows // samples]]) if x.dim() and len(x) == rows else x for name, x in tensors.items()
    }


def refuse_numbers(size: str, structure: Structure, other: Structure) -> None:
    """
    Args:
        size: that differs between two calls of a pipeline; structure, other: what it then passes.
    Raises:
        UserError: numbers among it follow the size.
    """
    for name, node in structure.items():
        if node != other.get(name):
            raise UserError(
                f"the pipeline tells its model '{name}' as a number or a list, which an engine takes in as it is",
                expected=f"one {size}",
                got=f"a range of {size}",
                remedy=f"give model.options.{size} as one number, and build a bundle for each",
            )


def shapes_of(
    function: Callable[[Mapping[str, Tensor]], Any], tensors: Mapping[str, Tensor], title: str, remedy: str
) -> Any:
    """What a function of named tensors returns, with their shapes alone. Nothing is computed.

    Args:
        title, remedy: for the message.
    Raises:
        UserError: the shapes depend on the tensors' values, an operation does not tell shapes beforehand, or the function fails.
    """
    try:
        # While they are exported, models do not keep what they have computed for the next call, as QwenImage keeps its rotations.
        with torch.no_grad(), _compiling_state_context(), shapes_alone() as mode:
            return function({name: mode.from_tensor(x) for name, x in tensors.items()})
    except (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException) as error:
        raise UserError(
            f"{title} cannot be converted",
            expected="a model whose operations depend on the shapes of its inputs alone",
            got=f"values decide what is computed{_place_of(error)}",
            remedy=remedy,
        ) from error
    except TrtconvertError:
        raise
    except Exception as error:  # whatever the model raises
        raise UserError(
            f"{title} cannot be converted",
            expected="a model that takes what its pipeline passes: "
            + ", ".join(f"{name} {list(x.shape)}" for name, x in tensors.items()),
            got=kind_and_first_line(error),
            remedy=remedy,
        ) from error


def _place_of(error: BaseException) -> str:
    """Where in a model's code an operation failed, for a message; empty where that is no library's module."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "site-packages" in frame.filename]
    own = [
        frame
        for frame in frames
        if not frame.filename.partition("site-packages")[2].startswith(("/torch/", "\\torch\\"))
    ]
    if not own:
        return ""
    frame = own[-1]
    return f": `{frame.line}` ({frame.filename.partition('site-packages')[2].strip('/')}, line {frame.lineno})"


def plain_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration as JSON has it, without where it was loaded from."""
    kept = {name: value for name, value in config.items() if name not in ("_name_or_path", "_use_default_values")}
    return json.loads(json.dumps(kept, default=str))
