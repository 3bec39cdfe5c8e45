"""Tells the inputs of a graph apart, and their sizes, by the recipe or by names and shapes."""

from __future__ import annotations

import keyword
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir

from trtconvert.attention.schedules import SIGMA_DATA, SIGMA_MAX, SIGMA_MIN
from trtconvert.diffusion_model import InputSpec
from trtconvert.errors import UserError, unknown_name
from trtconvert.models.call_options import size_range

BATCH = (1, 2, 4)
"""Samples of a call, unless the recipe has them: guidance doubles the rows for each image."""

_TIMESTEPS = re.compile(
    r"t|ts|times?|timesteps?|(\w+[._])?timesteps?([._]\w+)?|((log|ln)_?)?sigmas?|c_?noise|noise_labels?|t_?emb",
    re.IGNORECASE,
)
_OF_SIGMA = {
    "sigma": re.compile(r"sigmas?", re.IGNORECASE),
    "log_sigma": re.compile(r"(log|ln)_?sigmas?", re.IGNORECASE),
    "c_noise": re.compile(r"c_?noise|noise_labels?", re.IGNORECASE),  # its name in the networks of Karras et al. 2022
}
"""Names of timestep inputs that hold no timestep, by their contents, see `NOISE_INPUTS`."""

_IMAGES = re.compile(r"denoised(_\w+)?|(pred_)?x_?0(_pred)?|x_?start|pred_original_sample", re.IGNORECASE)
"""Names of outputs that are the denoised image."""

ASSUMED = "assumed"
"""Begins the description of an option that neither the file nor its names tell."""

_SAMPLES = (
    "sample",
    "x",
    "latents",
    "latent",
    "noisy_latents",
    "latent_model_input",
    "hidden_states",
    "img",
    "images",
    "z",
)
_OUTPUTS = ("out_sample", "sample_out", "output", "out", "prediction", "noise_pred", "latent", "velocity")

_OF_BATCH = re.compile(r"batch|^\d*b(s|sz)?$|^bs|samples?$|^n$|steps?$", re.IGNORECASE)
"""Names of dimensions that count samples, or the timesteps of samples."""

_FLOATS = {ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.DOUBLE}
_INTEGERS = {ir.DataType.INT64, ir.DataType.INT32, ir.DataType.BOOL}


@dataclass(frozen=True)
class Inputs:
    """The inputs and the output of a graph.

    Attributes:
        sample, timestep, output: names.
        specs: the sample, the timestep and the others, in this order. The timestep is [batch], whatever its shape in the graph.
        timestep_shape: shape of the timestep in the graph.
        truths: inputs that are truth values in the graph.
        dims: see `DiffusionModel`; dimensions whose names are no identifiers have other names than in the graph.
    """

    sample: str
    timestep: str
    output: str
    specs: tuple[InputSpec, ...]
    timestep_shape: tuple[int | str, ...]
    truths: frozenset[str]
    dims: Mapping[str, tuple[int, int, int]]

    @property
    def conditions(self) -> tuple[InputSpec, ...]:
        return self.specs[2:]


def read_inputs(
    path: Path,
    model: ir.Model,
    *,
    sample: str | None,
    timestep: str | None,
    output: str | None,
    sizes: Mapping[str, Any],
) -> Inputs:
    """Tells the inputs of a graph apart.

    Args:
        sample, timestep, output: names in the recipe.
        sizes: of symbolic dimensions, a number or [min, opt, max].
    Raises:
        UserError: an input or the output cannot be told, or a size is missing.
    """
    values = _inputs_but_weights(model)
    _refuse_unfit(path, values)
    timestep = _timestep(path, values, timestep)
    outputs = {value.name or "": value for value in model.graph.outputs}
    output = _output(path, outputs, output)
    sample = _sample(path, values, timestep, outputs[output], sample)
    shapes = {name: _shape(value) for name, value in values.items()}
    batch = shapes[sample][0]
    shapes = {name: _of_batch(shape, batch) if name != timestep else shape for name, shape in shapes.items()}
    own = shapes[timestep]
    if any(size != 1 for size in own[1:]) or any(isinstance(size, int) and size not in (1, batch) for size in own[:1]):
        raise UserError(
            f"{path} takes a timestep of the shape {list(own)}",
            expected="one timestep, or one for each sample: [], [batch], or [batch, 1] with any number of ones",
            got=f"'{timestep}' of {len(own)} dimensions" if len(own) > 1 else f"timesteps {list(own)}",
            remedy="export the model with one timestep for each sample, or name another input in model.options.timestep",
        )
    order = [sample, timestep, *(name for name in values if name not in (sample, timestep))]
    shapes = {name: (batch,) if name == timestep else shapes[name] for name in order}
    dims = _dims(path, shapes.values(), sizes, batch, guessed_sizes(model, sample))
    called = _identifiers(dims)
    kinds = {name: "float32" if value.dtype in _FLOATS else "int64" for name, value in values.items()}
    specs = tuple(
        InputSpec(name, kinds[name], tuple(called[size] if isinstance(size, str) else size for size in shape))
        for name, shape in shapes.items()
    )
    return Inputs(
        sample,
        timestep,
        output,
        specs,
        own,
        frozenset(name for name, value in values.items() if value.dtype == ir.DataType.BOOL),
        {called[name]: size for name, size in dims.items()},
    )


def _identifiers(names: Iterable[str]) -> dict[str, str]:
    """Returns an identifier for each name of a dimension, as exports and engines need them."""
    made: dict[str, str] = {}
    for name in names:
        word = re.sub(r"\W", "_", name)
        word = word if word.isidentifier() and not keyword.iskeyword(word) else f"_{word}"
        while word in made.values():
            word += "_"
        made[name] = word
    return made


def _inputs_but_weights(model: ir.Model) -> dict[str, ir.Value]:
    return {value.name or "": value for value in model.graph.inputs if value.name not in model.graph.initializers}


def proposed_options(path: Path, model: ir.Model) -> dict[str, tuple[Any, str]]:
    """Returns options for a first recipe: values, and their descriptions. A description of an option that cannot be told lists
    the choices."""
    options: dict[str, tuple[Any, str]] = {}
    values, outputs = _inputs_but_weights(model), {value.name or "": value for value in model.graph.outputs}
    found: dict[str, str] = {}
    for what, find in (
        ("timestep", lambda: _timestep(path, values, None)),
        ("output", lambda: _output(path, outputs, None)),
        ("sample", lambda: _sample(path, values, found["timestep"], outputs[found["output"]], None)),
    ):
        among = outputs if what == "output" else values
        try:
            found[what] = find()
        except (UserError, KeyError):  # names do not tell it, or did not tell an earlier one
            options[what] = (next(iter(among)), "could not be told; one of " + ", ".join(among))
            found[what] = str(options[what][0])
    symbols = dict.fromkeys(
        size for value in values.values() for size in _shape_or_none(value) if isinstance(size, str)
    )
    batch = next(iter(_shape_or_none(values[found["sample"]])), None)
    guessed = guessed_sizes(model, found["sample"])
    sizes = {
        name: list(BATCH) if name == batch else guessed[name]
        for name in symbols
        if name == batch
        or not (isinstance(batch, str) and _OF_BATCH.search(name) and name not in _inner_dimensions(values))
    }
    if sizes:
        options["sizes"] = (sizes, "of the inputs' dimensions: a number, or [min, opt, max]")
    options |= _proposed_training(path, found["timestep"], found["output"])
    others = [name for name in values if name not in (found["sample"], found["timestep"])]
    if others:
        options["conditions"] = (
            "random",
            f"{ASSUMED}: seeded noise for {', '.join(others)}; better a .safetensors or .npz file with some samples' rows",
        )
    return options


def _proposed_training(path: Path, timestep: str, output: str) -> dict[str, tuple[Any, str]]:
    """Returns options for the model's training, as far as names tell."""
    told, is_image = _noise_input_named(timestep), _IMAGES.fullmatch(output) is not None
    by_output = f"by the name of the output, {output}"
    options: dict[str, tuple[Any, str]] = {}
    if told is not None:
        options["noise_input"] = (
            told,
            f"contents of {timestep}, by its name: sigma, log_sigma, c_noise, fraction or timestep",
        )
        options["schedule"] = ("edm", f"{ASSUMED}: all noise levels of a range; or linear, scaled_linear, cosine, flow")
        options["sigma_min"] = (SIGMA_MIN, f"{ASSUMED}: EDM's, the least noise of the training")
        options["sigma_max"] = (SIGMA_MAX, f"{ASSUMED}: EDM's, the most")
        prediction, otherwise = "denoised", "or raw, epsilon, v_prediction, sample"
        if told == "c_noise" and not is_image:
            # EDM's preconditioning passes c_noise to its network; a network with preconditioning inside takes σ.
            prediction, otherwise = "raw", "or denoised, epsilon, v_prediction, sample"
            options["sigma_data"] = (
                SIGMA_DATA,
                f"{ASSUMED}: EDM's, the deviation of the images in training",
            )
    else:
        options["schedule"] = ("scaled_linear", f"{ASSUMED}: or linear, cosine, flow, edm")
        prediction = "sample" if is_image else "epsilon"
        otherwise = (
            "or epsilon, v_prediction, denoised" if is_image else "or v_prediction, sample; flow with the schedule flow"
        )
    options["prediction"] = (prediction, f"{by_output if is_image else ASSUMED}: {otherwise}")
    if is_consistency(path):
        options["sampling"] = ("consistency", "by the file's name: few steps, with new noise between them; or ode")
    return options


def is_consistency(path: Path) -> bool:
    """Whether a file's name says that it holds a consistency model."""
    return "consistency" in path.stem.lower()


def _noise_input_named(timestep: str) -> str | None:
    """Returns the contents of a timestep input whose name is not that of a timestep; None for others."""
    return next((told for told, names in _OF_SIGMA.items() if names.fullmatch(timestep)), None)


def refuse_what_names_contradict(
    path: Path, inputs: Inputs, noise_input: str | None, prediction: str | None, taken: str
) -> None:
    """
    Args:
        noise_input, prediction: in the recipe.
        taken: the prediction that is used where the recipe has none.
    Raises:
        UserError: a name suggests another noise input or prediction than the default, and the recipe has none.
    """
    told = _noise_input_named(inputs.timestep)
    if told is not None and noise_input is None:
        raise UserError(
            f"the input '{inputs.timestep}' of {path} holds no timestep, by its name",
            expected=f"model.options.noise_input: {told}, or its contents: sigma, log_sigma, c_noise, fraction, timestep",
            got="none",
            remedy=f"add `noise_input: {told}` under model.options, with `schedule: edm` and `prediction: denoised` for a model "
            "with preconditioning inside, or `prediction: raw` for EDM's network without it; or `noise_input: timestep`, if it "
            "holds timesteps nevertheless",
        )
    if told == "c_noise" and prediction is None and not _IMAGES.fullmatch(inputs.output):
        raise UserError(
            f"the input '{inputs.timestep}' of {path} is an input of EDM's network, by its name",
            expected="model.options.prediction: raw for such a network; denoised for one with preconditioning inside; or another "
            "prediction",
            got="none",
            remedy="add `prediction: raw`, with `sigma_data: 0.5` or that of the training, or `prediction: denoised` under "
            "model.options",
        )
    if prediction is None and _IMAGES.fullmatch(inputs.output) and taken not in ("sample", "denoised"):
        raise UserError(
            f"the output '{inputs.output}' of {path} is no {taken}, by its name",
            expected="model.options.prediction: sample, of √ᾱ·x₀ + √(1-ᾱ)·n; denoised, of x₀ + σ·n; or another prediction",
            got="none",
            remedy=f"add `prediction: sample` or `prediction: denoised` under model.options, or `prediction: {taken}`",
        )


def _shape_or_none(value: ir.Value) -> tuple[int | str, ...]:
    return _shape(value) if value.shape is not None else ()


def _inner_dimensions(values: Mapping[str, ir.Value]) -> set[int | str]:
    return {size for value in values.values() for size in _shape_or_none(value)[1:]}


def _refuse_unfit(path: Path, values: Mapping[str, ir.Value]) -> None:
    for name, value in values.items():
        weighs = [node for node, place in value.uses() if (node.op_type, place) in _WEIGHT_PLACES]
        static = value.shape is not None and all(isinstance(size, int) for size in value.shape) and len(value.shape) > 1
        if weighs and static and len(value.uses()) == len(weighs) and len(values) > 2:
            raise UserError(
                f"{path} takes its weights as inputs",
                expected="weights that the file holds",
                got=f"'{name}' {list(value.shape or ())}, which {weighs[0].op_type} {weighs[0].name} multiplies with",
                remedy="export the model with its parameters (export_params=True, no keep_initializers_as_inputs)",
            )
        if value.shape is None or value.dtype not in _FLOATS | _INTEGERS:
            raise UserError(
                f"the input '{name}' of {path} cannot be used",
                expected="an input with a shape, of floating-point, whole or truth values",
                got="no shape" if value.shape is None else str(value.dtype),
                remedy="export the model again with torch.onnx.export, or set the input's shape and type with onnx",
            )


_WEIGHT_PLACES = {("Conv", 1), ("Gemm", 1), ("MatMul", 1)}


def _shape(value: ir.Value) -> tuple[int | str, ...]:
    """Returns the sizes and names of dimensions; a dimension with neither is named after its place."""
    assert value.shape is not None
    return tuple(
        size if isinstance(size, int) else size.value or f"{value.name}_{axis}" for axis, size in enumerate(value.shape)
    )


def _of_batch(shape: tuple[int | str, ...], batch: int | str) -> tuple[int | str, ...]:
    """Renames the first dimension of a shape to that of the samples, if its name is one of samples."""
    if shape and isinstance(shape[0], str) and isinstance(batch, str) and _OF_BATCH.search(shape[0]):
        return (batch, *shape[1:])
    return shape


def _named(path: Path, what: str, given: str, values: Mapping[str, Any]) -> str:
    if given not in values:
        problem = f"{path} has no {'output' if what == 'output' else 'input'} '{given}'"
        raise unknown_name(problem, given, values, f"correct model.options.{what}")
    return given


def _unclear(path: Path, what: str, found: Sequence[str], values: Mapping[str, ir.Value]) -> UserError:
    described = ", ".join(
        f"{name} {list(_shape(value)) if value.shape is not None else ''}" for name, value in values.items()
    )
    return UserError(
        f"which {'output' if what == 'output' else 'input'} of {path} is the {what} cannot be told",
        expected=f"model.options.{what} in the recipe, with one of: {described}",
        got=", ".join(found) or "no usual name",
        remedy=f"add `{what}: {(found or list(values))[0]}` under model.options, with the right name",
    )


def _timestep(path: Path, values: Mapping[str, ir.Value], given: str | None) -> str:
    if given is not None:
        return _named(path, "timestep", given, values)
    found = [name for name in values if _TIMESTEPS.fullmatch(name)]
    exact = [name for name in found if name.lower() in ("timestep", "timesteps", "t")]
    found = exact if len(exact) == 1 and len(found) > 1 and exact[0].lower() == "t" else found
    if len(found) != 1:
        raise _unclear(path, "timestep", found, values)
    return found[0]


def _output(path: Path, outputs: Mapping[str, ir.Value], given: str | None) -> str:
    if given is not None:
        return _named(path, "output", given, outputs)
    found = [name for name in outputs if name in _OUTPUTS] if len(outputs) > 1 else list(outputs)
    if len(found) != 1:
        raise _unclear(path, "output", list(outputs), outputs)
    return found[0]


def _sample(path: Path, values: Mapping[str, ir.Value], timestep: str, output: ir.Value, given: str | None) -> str:
    if given is not None:
        return _named(path, "sample", given, values)
    floats = {
        name: value
        for name, value in values.items()
        if name != timestep and value.dtype in _FLOATS and len(value.shape or ()) >= 3
    }
    named = [name for name in floats if name.lower() in _SAMPLES]
    if len(named) == 1:
        return named[0]
    alike = [name for name, value in floats.items() if output.shape is not None and _shape(value) == _shape(output)]
    images = [name for name, value in floats.items() if len(value.shape or ()) >= 4]
    for found in (alike, images, list(floats)):
        if len(found) == 1:
            return found[0]
    raise _unclear(path, "sample", named or list(floats), values)


def _dims(
    path: Path,
    shapes: Iterable[Sequence[int | str]],
    sizes: Mapping[str, Any],
    batch: int | str,
    guessed: Mapping[str, Any],
) -> dict[str, tuple[int, int, int]]:
    symbols = dict.fromkeys(size for shape in shapes for size in shape if isinstance(size, str))
    if unknown := [name for name in sizes if name not in symbols]:
        problem, remedy = f"{path} has no dimension '{unknown[0]}'", "remove it from model.options.sizes"
        raise unknown_name(problem, unknown[0], symbols, remedy, "no sizes: all of them are constants of the graph")
    known = ({batch: list(BATCH)} if isinstance(batch, str) else {}) | dict(sizes)
    if missing := [name for name in symbols if name not in known]:
        proposed = ", ".join(f"{name}: {guessed.get(name, 77)}" for name in missing)
        raise UserError(
            f"sizes of {path} are not known",
            expected="a number, or [min, opt, max], for " + ", ".join(missing) + " in model.options.sizes",
            got=", ".join(sizes) or "none",
            remedy=f"add `sizes: {{{proposed}}}` under model.options, with the sizes that you need",
        )
    return {name: size_range(f"sizes.{name}", known[name]) for name in symbols}


def guessed_sizes(model: ir.Model, sample: str) -> dict[str, int]:
    """Returns sizes to begin with, by dimension: the channels of a first convolution, images of 64, prompts of 77."""
    guessed: dict[str, int] = {}
    for value in model.graph.inputs:
        shape = list(_shape_or_none(value))
        image = value.name == sample and len(shape) > 3
        for axis, size in enumerate(shape):
            if isinstance(size, str):
                guessed.setdefault(size, 2 if axis == 0 else 64 if image else 77)
        if image and isinstance(shape[1], str):
            weights = [node.inputs[1] for node, place in value.uses() if node.op_type == "Conv" and place == 0]
            known = next((w.shape for w in weights if w is not None and w.shape is not None), None)
            channels = known[1] if known is not None else None
            guessed[shape[1]] = channels if isinstance(channels, int) else 4
    return guessed
