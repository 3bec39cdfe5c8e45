"""The text encoders and the VAE of a diffusers pipeline as components, observed while the pipeline calls them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from trtconvert.bundle import DiffusersRecord
from trtconvert.diffusion_model import InputSpec, ModelComponent
from trtconvert.documents import PIPELINE_INDEX
from trtconvert.errors import UserError, unknown_name
from trtconvert.models.call_options import BINNING, LENGTH, SIZE_ARGUMENTS, TOKENS
from trtconvert.models.observation import (
    Arguments,
    DoesNotRun,
    Observe,
    Observed,
    observe_sizes,
    refuse_numbers,
    shapes_of,
)
from trtconvert.models.pipelines import PipelineCaller, replaced
from trtconvert.models.probes import number_of_sample, stand_in
from trtconvert.models.prompt_lengths import REMOVE_COMPONENT, PromptLengths
from trtconvert.runtime.arguments import Structure, parameters_of, put_together, signature_of, take_apart
from trtconvert.runtime.diffusers import PACKING
from trtconvert.runtime.unused import looks_into

DECODER, ENCODER = "vae_decoder", "vae_encoder"

_SMALL = 1024
"""Most elements of a tensor among a model's attributes that counts as a setting, such as LTX's latents_mean. Settings are stored
in the manifest."""


@dataclass(frozen=True)
class PipelineComponents:
    """The models beside the denoiser, see `DiffusionModel.components`.

    Args:
        caller: calls the pipeline.
        ranges: (min, opt, max) of each size but the number of a prompt's tokens.
        record, timestep_input: of the denoiser, see `DiffusersDenoiser`.
        prediction: symbolic shape of the denoiser's output.
        lengths: (min, opt, max) of tokens that the pipeline pads prompts to, or the lengths of its prompts; None where all
            prompts have one length.
    """

    caller: PipelineCaller
    ranges: Mapping[str, tuple[int, int, int]]
    record: DiffusersRecord
    timestep_input: str
    prediction: tuple[int | str, ...]
    lengths: PromptLengths | tuple[int, int, int] | None = None
    _calls: dict[tuple[str, tuple[int, ...]], dict[str, Any]] = field(default_factory=dict, init=False)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the components: text encoders in the pipeline's order, then the halves of the VAE."""
        parts = self.caller.pipe.components.items()
        text = (name for name, part in parts if name.startswith("text_encoder") and isinstance(part, nn.Module))
        vae = isinstance(getattr(self.caller.pipe, "vae", None), nn.Module)
        return (*text, *((DECODER, ENCODER) if vae else ()))

    @property
    def used(self) -> tuple[str, ...]:
        """Names of the components that draw images from prompts and from the recipe's images."""
        return tuple(name for name in self.names if name != ENCODER or self._encoding(self._opt_but({})) is not None)

    def _encoding(self, sizes: Mapping[str, int]) -> dict[str, Any] | None:
        """Returns the arguments of the pipeline's first call of the VAE's encoder; None if it encodes no image of the recipe."""
        if not self.caller.images:
            return None
        try:
            return self._first_call("encode", sizes)
        except UserError:
            return None

    def _first_call(self, method: str, sizes: Mapping[str, int]) -> dict[str, Any]:
        """Returns the arguments of the pipeline's first call of a method of the VAE, by name. Computing them runs the text
        encoders, so that they are kept."""
        key = method, tuple(sizes.values())
        if key not in self._calls:
            predicted = number_of_sample(self.timestep_input, self.prediction)
            with self.caller.denoising_with(stand_in(predicted, self.record, self.timestep_input)):
                self._calls[key] = self.caller.first_call(range(sizes["batch"]), sizes, self.caller.pipe.vae, method)
        return self._calls[key]

    def module(self, name: str) -> nn.Module:
        """Returns the pipeline's model that a component belongs to."""
        return getattr(self.caller.pipe, "vae" if name in (DECODER, ENCODER) else name)

    def __call__(self, name: str) -> ModelComponent:
        """Returns a component.

        Raises:
            UserError: there is no such component, or an engine cannot take it.
        """
        if name not in self.names:
            raise unknown_name(
                f"{self.caller.kind} has no component '{name}'",
                name,
                self.names,
                "correct components in the recipe, or save the pipeline with this component",
                none="none: the pipeline was saved with its denoiser alone",
            )
        with self.caller.encoding_once():
            return self._observed(name)

    def _observed(self, name: str) -> ModelComponent:
        if name == DECODER:
            return self._component(name, self.caller.pipe.vae, "decode", self._observe_rows(self._decoder_arguments))
        if name == ENCODER:
            return self._component(name, self.caller.pipe.vae, "encode", self._observe_rows(self._encoder_arguments))
        model = getattr(self.caller.pipe, name)
        ranges = {"batch": self.ranges["batch"]}
        lengths = self.lengths
        if isinstance(lengths, PromptLengths):
            lengths = lengths.of_encoder(self.caller, self._opt_but({}), model)
        if lengths is not None:
            ranges[TOKENS] = lengths
        return self._component(
            name, model, "forward", observe_sizes(lambda sizes: self._text_arguments(model, sizes), ranges)
        )

    def _component(
        self, name: str, model: nn.Module, method: Literal["forward", "decode", "encode"], inputs: Observed
    ) -> ModelComponent:
        flat = FlatComponent(model, method, inputs.structure).eval().requires_grad_(False)
        output, per_call = _results_of_calls(flat, inputs)
        used = self._read_results(model) if method == "forward" else None
        results, kept = _results(name, per_call, inputs, used)
        flat.kept = tuple(kept)
        return ModelComponent(
            name=name,
            title=f"{type(model).__name__} of {self.caller.kind}",
            module=flat,
            inputs=tuple(inputs.specs.values()),
            outputs=tuple(InputSpec(key, "float32", shape) for key, shape in kept.items()),
            dims=inputs.dims,
            example={key: x if x.is_floating_point() else x.long() for key, x in inputs.example.items()},
            high_precision=method != "forward",
            overflows=bool(getattr(model.config, "force_upcast", False)),
            diffusers=DiffusersRecord(
                pipeline=self.caller.kind,
                component=name if method == "forward" else "vae",
                model=type(model).__name__,
                config=plain_config(_config(model)),
                method=method,
                output=f"{type(output).__module__}:{type(output).__qualname__}",
                parameters=parameters_of(getattr(model, method)),
                arguments=inputs.structure,
                results=results,
                attributes=_attributes(model),
                padded_by=LENGTH if self.caller.pads and method == "forward" else "",
            ),
        )

    def _text_arguments(self, model: nn.Module, sizes: Mapping[str, int]) -> Arguments:
        named = self._opt_but(sizes) | dict(sizes)
        length = None if self.caller.pads else named.pop(TOKENS, None)
        structure, tensors = take_apart(_without_packing(self.caller.first_call(range(sizes["batch"]), named, model)))
        return structure, tensors if length is None else _repeated_to_length(tensors, length)

    def _decoder_arguments(self, sizes: Mapping[str, int]) -> Arguments:
        structure, tensors = take_apart(_without_packing(self._first_call("decode", sizes)))
        first = next(iter(tensors))
        # Without a denoiser, the decoded latents have the right shapes, and not the right magnitude.
        return structure, tensors | {first: _latents_like(self.caller.pipe.vae, tensors[first])}

    def _encoder_arguments(self, sizes: Mapping[str, int]) -> Arguments:
        if (arguments := self._encoding(sizes)) is not None:  # of a video, the given frames may be one or all
            return take_apart(_without_packing(arguments))
        name = next(iter(signature_of(self.caller.pipe.vae.encode).parameters))
        shape = self._decoded_shapes(sizes)["sample"].shape
        images = torch.rand(shape, generator=torch.Generator().manual_seed(0)) * 2 - 1
        return take_apart({name: images})

    def _decoded_shapes(self, sizes: Mapping[str, int]) -> dict[str, Tensor]:
        """Returns the decoder's results as fake tensors."""
        structure, latents = self._decoder_arguments(sizes)
        return _tensors(_result_shapes(FlatComponent(self.caller.pipe.vae, "decode", structure), latents))

    def drawn(self) -> tuple[str, ...]:
        """Returns notices about sizes of the recipe that the pipeline draws as other sizes, for opt, min and max."""
        asked = [name for name in SIZE_ARGUMENTS if name in self.ranges]
        if not (DECODER in self.names or self._movq_factor) or not asked:
            return ()
        notices: dict[str, None] = {}
        opt, low, high = (
            {name: size[index] for name, size in self.ranges.items()} | {"batch": self.ranges["batch"][1]}
            for index in (1, 0, 2)
        )
        for wanted in [opt] if opt == low == high else [opt, low, high]:
            sizes = self._drawn_sizes(wanted)
            if others := [name for name in asked if name in sizes and sizes[name] != wanted[name]]:
                given = " × ".join(f"{name} {wanted[name]}" for name in others)
                got = " × ".join(str(sizes[name]) for name in others)
                notices[f"{self.caller.kind} draws {given} as {got}"] = None
        binned = f" ({BINNING})" if self.caller.bins else ""
        return tuple(text + binned for text in notices)

    def _drawn_sizes(self, wanted: Mapping[str, int]) -> dict[str, int]:
        """Returns the sizes of the image that the pipeline draws for sizes of the recipe."""
        if DECODER not in self.names:
            latents = next(iter(self.caller.denoiser_arguments(wanted)[1].values()))
            return {"height": latents.shape[-2] * self._movq_factor, "width": latents.shape[-1] * self._movq_factor}
        try:
            image = next(iter(self._decoded_shapes(wanted).values()))
        except DoesNotRun as error:
            raise DoesNotRun(
                f"{self.caller.kind} cannot draw: {error.problem}",
                expected="a VAE that decodes as it was loaded: settings such as tiling are not saved",
                got=error.got,
                remedy=f'write "vae": [null, null] in the pipeline\'s {PIPELINE_INDEX} to convert and compare latents',
            ) from error
        sizes: dict[str, int] = {"height": image.shape[-2], "width": image.shape[-1]}
        return sizes | ({"frames": image.shape[2]} if image.dim() == 5 else {})

    @property
    def _movq_factor(self) -> int:
        """Pixels for a latent of Kandinsky's decoder, which is no component; 0 for other pipelines."""
        movq: Any = getattr(self.caller.pipe, "movq", None)
        return 2 ** (len(movq.config.block_out_channels) - 1) if movq is not None else 0

    def _observe_rows(self, observe: Observe) -> Observed:
        """Observes a half of the VAE. The rows of its inputs are independent.

        The pipeline is called with the recipe's batches alone, as a denoiser may hold the number of images as a constant, like
        that of QwenImage; other numbers of rows are made from these calls. Rows may be frames, and the pipeline may pass a chunk
        of frames at a time and the rest at the end, as AnimateDiff does: then every number of rows up to the largest can come.
        """
        opt, high = ({name: size[index] for name, size in self.ranges.items()} for index in (1, 2))
        (structure, example), (_, largest) = observe(opt), observe(high)
        for batch in {*self.ranges["batch"]} - {opt["batch"]}:
            refuse_numbers("batch", structure, observe(opt | {"batch": batch})[0])
        usual, most = (len(next(iter(tensors.values()))) for tensors in (example, largest))
        least = self.ranges["batch"][0] if (usual, most) == (opt["batch"], high["batch"]) else 1
        by_row = {name for name, x in example.items() if x.dim() and (len(x), len(largest[name])) == (usual, most)}

        def of_rows(sizes: Mapping[str, int]) -> Arguments:
            structure, tensors = observe({**sizes, "batch": opt["batch"]})
            rows = torch.arange(sizes["batch"])
            return structure, {name: x[rows % len(x)] if name in by_row else x for name, x in tensors.items()}

        return observe_sizes(of_rows, {**self.ranges, "batch": (least, usual, most)})

    def _opt_but(self, sizes: Mapping[str, int]) -> dict[str, int]:
        return {name: opt for name, (_, opt, _) in self.ranges.items() if name not in sizes}

    def _read_results(self, model: nn.Module) -> set[str]:
        """Returns the names of the tensors in a text encoder's results that the pipeline reads on its way to the denoiser."""
        watch, forward = _Watch(), model.forward

        def watched(*args: Any, **kwargs: Any) -> Any:
            with watch.paused():
                output = forward(*args, **kwargs)
            watch.add(_tensors(output))
            return output

        sizes = self._opt_but({})
        with replaced(model, "forward", watched), watch:
            arguments = self.caller.first_call(range(sizes["batch"]), sizes)
        watch.look(arguments)
        return watch.used


class FlatComponent(nn.Module):
    """A model's method with named tensors for its arguments.

    The model is the one submodule, so that its weights are named as in the model, after "model.".

    Args:
        model, method: the method that is called.
        structure: of the arguments.

    Attributes:
        kept: names of the tensors in the results that are outputs, in order.
    """

    def __init__(self, model: nn.Module, method: str, structure: Structure) -> None:
        super().__init__()
        self.model, self.method, self.structure = model, method, structure
        self.kept: tuple[str, ...] = ()

    def call(self, named: Mapping[str, Tensor]) -> Any:
        """Returns the method's result."""
        return getattr(self.model, self.method)(**put_together(self.structure, named), return_dict=True)

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Takes the tensors of the structure, in order; returns the outputs."""
        names = [name for name, _ in _tensor_nodes(self.structure)]
        results = _tensors(self.call(dict(zip(names, inputs, strict=True))))
        return tuple(results[name] for name in self.kept)


class _Watch(TorchFunctionMode):
    """Records which of some tensors are read while the mode is on."""

    def __init__(self) -> None:
        super().__init__()
        self.used: set[str] = set()
        self._names: dict[int, tuple[set[str], Tensor]] = {}
        self._paused = False

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        """Watches these tensors as well; a tensor may have several names."""
        for name, x in tensors.items():
            self._names.setdefault(id(x), (set(), x))[0].add(name)  # the tensor is kept, so that its id stays its own

    def look(self, values: Any) -> None:
        """Records all tensors in the values as read."""
        self.used.update(*(self._names[id(x)][0] for x in tree_leaves(values) if id(x) in self._names))

    @contextmanager
    def paused(self) -> Iterator[None]:
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if not self._paused and looks_into(func):
            self.look((args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def _repeated_to_length(tensors: Mapping[str, Tensor], length: int) -> dict[str, Tensor]:
    own = next(x.shape[1] for x in tensors.values() if x.dim() == 2)
    places = torch.arange(length) % own
    return {name: x[:, places] if x.dim() == 2 and x.shape[1] == own else x for name, x in tensors.items()}


def _latents_like(vae: nn.Module, x: Tensor) -> Tensor:
    """Returns noise like x [B, C, …] with the mean and the deviation of the VAE's latents, as pipelines scale them."""
    settings = {**_config(vae), **dict(vae.named_buffers(recurse=False))}

    def setting(name: str, otherwise: float) -> Tensor:
        value = settings.get(name)
        found = torch.as_tensor(otherwise if value is None else value, dtype=x.dtype).flatten()
        if found.numel() not in (1, x.shape[1]):
            found = torch.as_tensor(otherwise, dtype=x.dtype).flatten()
        return found.view(1, -1, *[1] * (x.dim() - 2))

    mean, std = setting("shift_factor", 0.0) + setting("latents_mean", 0.0), setting("latents_std", 1.0)
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(0), dtype=x.dtype)
    return noise * std / setting("scaling_factor", 1.0) + mean


def _without_packing(arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if name not in PACKING}


def _tensor_nodes(structure: Structure) -> list[tuple[str, dict[str, Any]]]:
    found: list[tuple[str, dict[str, Any]]] = []

    def visit(node: dict[str, Any]) -> None:
        if "tensor" in node:
            found.append((node["tensor"], node))
        for child in node.get("list", ()) if "list" in node else node.get("dict", {}).values():
            visit(child)

    for node in structure.values():
        visit(node)
    return found


def _fields(output: Any) -> dict[str, Any]:
    """Returns the tensors in a result, and collections of tensors, by field. Caches and other objects are left out."""
    if hasattr(output, "latent_dist"):
        return {"latent_dist": output.latent_dist.parameters}
    plain = (Tensor, tuple, list)
    return {name: value for name, value in output.items() if isinstance(value, plain)}


def _tensors(output: Any) -> dict[str, Tensor]:
    return take_apart(_fields(output))[1]


def _result_shapes(flat: FlatComponent, tensors: Mapping[str, Tensor]) -> Any:
    """Returns the method's result with fake tensors. Nothing is computed."""
    title = f"{type(flat.model).__name__}.{flat.method}"
    return shapes_of(flat, flat.call, tensors, title, REMOVE_COMPONENT)


def _results_of_calls(flat: FlatComponent, inputs: Observed) -> tuple[Any, list[dict[str, Any]]]:
    """Returns the result of the first observed call, and the fields of the results of all of them, with fake tensors."""

    def shapes(tensors: Mapping[str, Tensor]) -> tuple[torch.Size, ...]:
        return tuple(x.shape for x in tensors.values())

    different = {shapes(tensors): tensors for tensors in inputs.calls}
    results = {of: _result_shapes(flat, tensors) for of, tensors in different.items()}
    outputs = [results[shapes(tensors)] for tensors in inputs.calls]
    if not (isinstance(outputs[0], Mapping) and (hasattr(outputs[0], "latent_dist") or _tensors(outputs[0]))):
        raise UserError(
            f"the result of {type(flat.model).__name__}.{flat.method} cannot be used",
            expected="an output class of transformers or diffusers with tensors in it, or a Gaussian of latents",
            got=type(outputs[0]).__name__,
            remedy=REMOVE_COMPONENT,
        )
    return outputs[0], [_fields(output) for output in outputs]


def _results(
    name: str, per_call: Sequence[Mapping[str, Any]], inputs: Observed, used: set[str] | None
) -> tuple[dict[str, dict[str, Any]], dict[str, tuple[int | str, ...]]]:
    """Returns the structure of the results, and the symbolic shape of each tensor in them that is an output. used: names of the
    tensors that the pipeline reads; None for all."""
    structure, _ = take_apart(per_call[0])
    tensors = [take_apart(fields)[1] for fields in per_call]
    kept: dict[str, tuple[int | str, ...]] = {}
    outputs: dict[int, str] = {}  # by tensor, as several results may be one tensor: the last state is one of all states
    for key, node in _tensor_nodes(structure):
        dims = [inputs.dimension(sizes) for sizes in zip(*(t[key].shape for t in tensors), strict=True)]
        if None in dims:
            raise UserError(
                f"the sizes of '{key}', which {name} returns, do not follow from those of its inputs",
                expected="each a constant, or a multiple of one size and a constant",
                got=", ".join(str(list(t[key].shape)) for t in tensors),
                remedy="give model.options one size instead of a range",
            )
        shape = tuple(dim for dim in dims if dim is not None)
        if used is None or key in used:
            node["tensor"] = outputs.setdefault(id(tensors[0][key]), key)
            kept[node["tensor"]] = shape
        else:
            node.clear()
            node["unused"] = list(shape)
    if not kept:
        raise UserError(
            f"the pipeline does not use the results of {name}",
            expected="a model that it denoises with or decodes with",
            got="none of " + ", ".join(tensors[0]),
            remedy=f"take {name} out of the recipe",
        )
    return structure, kept


def _config(model: nn.Module) -> Mapping[str, Any]:
    config: Any = model.config
    return config if isinstance(config, Mapping) else config.to_dict()


def plain_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a configuration as JSON values, without the place that it was loaded from."""
    kept = {name: value for name, value in config.items() if name not in ("_name_or_path", "_use_default_values")}
    return json.loads(json.dumps(kept, default=str))


def plain_attributes(model: nn.Module) -> dict[str, Any]:
    """Returns the numbers, texts and lists of numbers that the model's class sets as attributes. Pipelines may read them, as
    HunyuanDiT's `inner_dim`."""
    found: dict[str, Any] = {}
    for name, value in vars(model).items():
        if name.startswith("_") or name in ("training", "name_or_path"):
            continue
        if isinstance(value, (bool, int, float, str)):
            found[name] = {"value": value}
        elif isinstance(value, (list, tuple)) and all(isinstance(x, (bool, int, float)) for x in value):
            found[name] = {"value": list(value)}
    return found


def _attributes(model: nn.Module) -> dict[str, Any]:
    """Returns the plain attributes, small tensors among the model's own, and the tensors of submodules without parameters."""
    found = plain_attributes(model)
    for name, value in {**vars(model), **dict(model.named_buffers(recurse=False))}.items():
        small = isinstance(value, Tensor) and value.numel() <= _SMALL and value.is_floating_point()
        if small and not name.startswith("_"):
            found[name] = {"tensor": value.tolist()}
    for name, part in model.named_children():
        # FLUX.2's pipeline normalises latents with the statistics of its VAE's `bn`.
        inner = _attributes(part) if not list(part.parameters()) else {}
        tensors = {key: value for key, value in inner.items() if "tensor" in value}
        if tensors:
            found[name] = {"module": tensors}
    return found
