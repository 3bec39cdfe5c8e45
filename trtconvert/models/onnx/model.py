"""An ONNX graph as a `DiffusionModel`, checked against ONNX Runtime."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor

from trtconvert.attention.sites import Site
from trtconvert.diffusion_model import DiffusionModel, ImageEncoder, InputSpec
from trtconvert.errors import UserError, did_you_mean, first_line, unfit_option
from trtconvert.export import storage
from trtconvert.export.float32 import widen
from trtconvert.export.nodes.common import HALF
from trtconvert.files import temporary_folder
from trtconvert.models.fixed_sizes import failure_at
from trtconvert.models.onnx.call import Types
from trtconvert.models.onnx.denoiser import GraphDenoiser, folded, fused, kept_constants, observed, with_branches_taken
from trtconvert.models.onnx.files import load, read_graph, refuse_loops, stored_type
from trtconvert.models.onnx.inputs import Inputs, read_inputs, refuse_what_names_contradict
from trtconvert.models.onnx.operators import OPERATORS
from trtconvert.models.onnx.sampling import ODE, GraphSampler, Trained, read_conditions
from trtconvert.models.onnx.steps import Graph, Step, graph_of
from trtconvert.runtime.signature import shape_of

LARGEST_ERROR = 1e-3
"""Largest relative L2 distance of the module's output from ONNX Runtime's, both in FP32. They differ in orders of summation
alone, by 1e-6, or 1e-4 through a hundred layers."""


def onnx_model(
    weights: Path,
    *,
    sample: str | None = None,
    timestep: str | None = None,
    output: str | None = None,
    sizes: Mapping[str, Any] | None = None,
    schedule: str | None = None,
    prediction: str | None = None,
    noise_input: str | None = None,
    timesteps: int | None = None,
    timestep_factor: float = 1.0,
    shift: float | None = None,
    sigma_min: float | None = None,
    sigma_max: float | None = None,
    sigma_data: float | None = None,
    sampling: str = ODE,
    conditions: str | None = None,
    values: Mapping[str, Any] | None = None,
) -> DiffusionModel:
    """Loads the denoiser in an ONNX file.

    Args:
        weights: the file; weights beside it are found by their names in the file.
        sample, timestep, output: names of the denoiser's input, of the timestep and of the prediction, where they cannot be told.
        sizes: of symbolic dimensions of the inputs, by name: a number, or [min, opt, max].
        schedule, prediction, timesteps: of the training: linear, scaled_linear, cosine, flow or edm; epsilon, v_prediction,
            sample, flow, denoised or raw; and the number of timesteps.
        noise_input: contents of the timestep input: timestep, fraction, sigma, log_sigma or c_noise.
        timestep_factor: multiplies these contents.
        shift: of flow matching's steps.
        sigma_min, sigma_max: of edm's noise levels.
        sigma_data: deviation of the images that the input is scaled for.
        sampling: ode or consistency.
        conditions: values of the other inputs in samples: a file with a row for each of some samples, or "random".
        values: inputs that hold one number everywhere.
    Raises:
        UserError: the file is no ONNX model or damaged, the graph cannot be converted, or an option does not fit.
    """
    _refuse_unfit_options(
        texts={"sample": sample, "timestep": timestep, "output": output, "conditions": conditions},
        mappings={"sizes": sizes, "values": values},
    )
    numbers = (timestep_factor, timesteps, shift, sigma_min, sigma_max)
    said = Trained(schedule, prediction, noise_input, *numbers, sampling, sigma_data)
    trained = said.parametrisation()
    model = read_graph(weights)
    refuse_loops(weights, model)
    inputs = read_inputs(weights, model, sample=sample, timestep=timestep, output=output, sizes=dict(sizes or {}))
    refuse_what_names_contradict(weights, inputs, noise_input, prediction, trained.prediction)
    opt = {name: size for name, (_, size, _) in inputs.dims.items()}
    first = inputs.specs[0]
    batch = first.shape[0]
    given = read_conditions(weights, inputs.conditions, opt, batch, conditions, dict(values or {}))
    denoiser, shape, left = _denoiser(weights, model, inputs, opt)
    low, _, high = inputs.dims[batch] if isinstance(batch, str) else (batch, batch, batch)
    of_sample = shape_of(first.shape[1:], opt)
    pixels = len(of_sample) == 3 and of_sample[0] in (1, 3)
    found = DiffusionModel(
        name=weights.name,
        denoiser=denoiser,
        inputs=inputs.specs,
        output=InputSpec(
            "prediction" if inputs.output in (s.name for s in inputs.specs) else inputs.output, "float32", shape
        ),
        timestep_input=inputs.timestep,
        timestep_max=trained.timestep_max,
        sigmas=trained.sigmas,
        signal=trained.signal,
        noise_input=trained.noise_input,
        dims=inputs.dims,
        sample=GraphSampler(trained, inputs.sample, inputs.timestep, tuple(of_sample), high, low == high, given),
        encoder=ImageEncoder((of_sample[0], of_sample[1], of_sample[2]), lambda x: x * 2 - 1) if pixels else None,
        as_passed=given.as_passed(),
        left_sites=tuple(left),
    )
    _check_sizes(weights, found)
    _check_numbers(weights, model, inputs, found, opt)
    return found


def _refuse_unfit_options(texts: Mapping[str, Any], mappings: Mapping[str, Any]) -> None:
    wrong = [(name, "text", value) for name, value in texts.items() if value is not None and not isinstance(value, str)]
    wrong += [
        (name, "a mapping of names to numbers", value)
        for name, value in mappings.items()
        if value is not None and not isinstance(value, Mapping)
    ]
    for name, expected, got in wrong:
        raise unfit_option(name, expected, got)


def _denoiser(
    path: Path, model: ir.Model, inputs: Inputs, opt: Mapping[str, int]
) -> tuple[GraphDenoiser, tuple[int | str, ...], list[Site]]:
    """Returns the graph as a module, the shape of its prediction, and the softmaxes that are not part of an attention."""
    graph, stored = graph_of(model), stored_type(model)
    graph.outputs = (inputs.output,)
    _with_timesteps(graph, inputs)
    graph.replace({})
    _refuse_unknown(path, graph)
    with torch.no_grad():
        values = folded(graph, stored)
    types = Types(int(stored), torch.float32, torch.device("cpu"))
    ends = [{name: size[place] for name, size in inputs.dims.items()} for place in (1, 0, 2)]
    examples = [{spec.name: _empty(spec, inputs, sizes) for spec in inputs.specs} for sizes in ends]
    example = examples[0]
    with_branches_taken(path, graph, values, types, examples)
    _refuse_unknown(path, graph)
    shapes, _ = observed(graph, values, types, example)
    left = fused(graph, values, types, example)
    if not any(step.op in _ATTENTION for step in graph.steps):
        raise UserError(
            f"no attention was found in {path}",
            expected="a MatMul, a Softmax and a MatMul that form attention, or Attention of opset 23",
            got="; ".join(f"{site.obstacle}, at {site.name}" for site in left) or "no Softmax in the graph",
            remedy="export the model without fusions of other runtimes, with torch's scaled_dot_product_attention in it",
        )
    keep = kept_constants(graph, values, stored, inputs.timestep)
    shape, channels = _prediction(path, inputs, shapes[inputs.output], opt)
    denoiser = GraphDenoiser(
        graph,
        values,
        stored,
        keep=keep,
        channels=channels,
        truths=inputs.truths,
    )
    return denoiser.eval().requires_grad_(False), shape, left


_ATTENTION = {"Attention", "com.microsoft::Attention", "com.microsoft::MultiHeadAttention", "trtconvert::attention"}


def _empty(spec: InputSpec, inputs: Inputs, sizes: Mapping[str, int]) -> Tensor:
    kind = torch.bool if spec.name in inputs.truths else getattr(torch, spec.dtype)
    return torch.zeros(shape_of(spec.shape, sizes), dtype=kind)


def _with_timesteps(graph: Graph, inputs: Inputs) -> None:
    """Makes a graph whose timestep is a number, or [batch, 1, …], take [batch], in place: steps that give the number an axis are
    removed, and axes of size 1 are added."""
    if own := inputs.timestep_shape:
        if len(own) > 1:
            shaped = f"{inputs.timestep}/shaped"
            graph.steps = [
                replace(step, inputs=tuple(shaped if name == inputs.timestep else name for name in step.inputs))
                for step in graph.steps
            ]
            axes = {"axes": [*range(1, len(own))]}
            graph.steps.insert(0, Step("Unsqueeze", (inputs.timestep,), (shaped,), axes, title="Unsqueeze timestep"))
        return
    scalars, changes = {inputs.timestep}, dict[Step, Sequence[Step]]()
    for step in graph.steps:
        if step.input(0) in scalars and step.op in ("Cast", "Identity"):
            scalars.update(step.outputs)
        elif step.input(0) in scalars and step.op in ("Unsqueeze", "Reshape", "Flatten"):
            changes[step] = [Step("Identity", step.inputs[:1], step.outputs, {}, step.scope, step.title)]
    graph.replace(changes)


def _refuse_unknown(path: Path, graph: Graph) -> None:
    unknown = {step.op: step for step in graph.steps if step.op not in OPERATORS and step.op != "If"}
    if not unknown:
        return
    quantised = any("Quantize" in op for op in unknown)
    op = next(iter(unknown))
    raise UserError(
        f"{path} has operators that are not converted",
        expected="a model that is not quantised yet"
        if quantised
        else "ONNX's own operators, as far as denoisers use them",
        got=", ".join(f"{op} (at {step.title.partition(' ')[2]})" for op, step in list(unknown.items())[:6]),
        remedy="give the model before it was quantised: INT8 is made here"
        if quantised
        else did_you_mean(op, (), "export the model from torch without fusions or plugins of other runtimes"),
    )


def _prediction(
    path: Path, inputs: Inputs, found: tuple[int, ...], opt: Mapping[str, int]
) -> tuple[tuple[int | str, ...], int | None]:
    """Returns the prediction's shape, and the number of the output's channels that belong to it, None for all."""
    spec = inputs.specs[0]
    wanted = tuple(shape_of(spec.shape, opt))
    if found == wanted:
        return spec.shape, None
    if len(found) == len(wanted) > 3 and found == (wanted[0], 2 * wanted[1], *wanted[2:]):
        return spec.shape, wanted[1]  # the other channels are the variance, as in DiT
    raise UserError(
        f"the output of {path} is not a prediction for its sample",
        expected=f"'{inputs.output}' of the shape of '{inputs.sample}', {list(wanted)}, or with twice as many channels",
        got=str(list(found)),
        remedy="name the right ones in model.options.sample and model.options.output",
    )


def _check_sizes(path: Path, model: DiffusionModel) -> None:
    """Runs the module on fake tensors of the smallest and of the largest sizes."""
    for place in (0, 2):
        sizes = {name: size[place] for name, size in model.dims.items()}
        if failed := failure_at(model, sizes):
            raise UserError(
                f"{path} does not take the sizes in model.options.sizes",
                expected="a graph that takes " + ", ".join(f"{name} {size}" for name, size in sizes.items()),
                got=failed,
                remedy="give one number for each in model.options.sizes, the one that the graph was exported with, or export it "
                "with dynamic axes",
            )


def _check_numbers(path: Path, model: ir.Model, inputs: Inputs, found: DiffusionModel, opt: Mapping[str, int]) -> None:
    """Compares the module's output with ONNX Runtime's, in FP32."""
    import onnxruntime

    example = found.example(0, opt)
    own = inputs.timestep_shape
    alone = not own or own[0] == 1
    if alone:  # one timestep for all samples
        example[inputs.timestep] = example[inputs.timestep][:1].expand_as(example[inputs.timestep]).contiguous()
    denoiser = found.denoiser
    assert isinstance(denoiser, GraphDenoiser)
    feeds = {name: _array(x, name in inputs.truths) for name, x in example.items()}
    timestep = feeds[inputs.timestep]
    feeds[inputs.timestep] = (timestep[:1] if alone else timestep).reshape((-1, *(1 for _ in own[1:])) if own else ())
    types = {value.name: value.dtype for value in model.graph.inputs}
    feeds = {name: x.astype(_FED.get(types[name], x.dtype)) for name, x in feeds.items()}
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    try:
        with _as_runtime_takes_it(path) as file:
            session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
            names = {value.name for value in session.get_inputs()}
            feeds = {name: x for name, x in feeds.items() if name in names}
            (expected,) = session.run([inputs.output], feeds)
    except Exception as error:  # ONNX Runtime's own kinds
        raise UserError(
            f"ONNX Runtime does not run {path}",
            expected="a model that it runs on the CPU with "
            + ", ".join(f"{n} {list(x.shape)}" for n, x in feeds.items()),
            got=first_line(error),
            remedy="correct model.options.sizes, or export the model again; onnx.checker.check_model tells more",
        ) from error
    with torch.inference_mode():
        got = denoiser(**example).double()
    exact = torch.from_numpy(np.asarray(expected, dtype=np.float64))[:, : got.shape[1]]
    error = float((got - exact).norm() / exact.norm().clamp_min(1e-30)) if got.shape == exact.shape else float("inf")
    if not error <= LARGEST_ERROR:
        raise UserError(
            f"{path} computes something else in ONNX Runtime than in torch",
            expected=f"outputs that differ by {LARGEST_ERROR:g} at most, relative to them",
            got=f"{error:.3g}",
            remedy="please report it with the model; or convert the original torch model",
        )


_FED: dict[ir.DataType | None, type[np.generic]] = {ir.DataType.INT32: np.int32, ir.DataType.DOUBLE: np.float64}
"""Types of inputs that the module takes in another type."""


def _array(x: Tensor, is_truth: bool) -> np.ndarray:
    return (x.bool() if is_truth else x).numpy()


@contextmanager
def _as_runtime_takes_it(path: Path) -> Iterator[Path]:
    """Yields a file that ONNX Runtime can compute on a CPU: the file itself, or a temporary copy in FP32, with masks of Attention
    expanded to a row for each query, as ONNX Runtime does not broadcast them."""
    model = load(path)
    masked = [node for node in model.graph if node.op_type == "Attention" and not node.domain and len(node.inputs) > 3]
    for node in masked:
        q, mask = node.inputs[0], node.inputs[3]
        if q is None or mask is None:
            continue
        flat = len(q.shape) == 3 if q.shape is not None else "q_num_heads" in node.attributes
        axis = 1 if flat else 2
        queries = ir.node("Shape", [q], {"start": axis, "end": axis + 1})
        one = ir.node("Constant", [], {"value_ints": [1]})
        shape = ir.node("Concat", [queries.outputs[0], one.outputs[0]], {"axis": 0})
        rows = ir.node("Expand", [mask, shape.outputs[0]])
        model.graph.insert_before(node, [queries, one, shape, rows])
        node.replace_input_with(3, rows.outputs[0])
    in_16_bits = any(value.dtype in HALF for value in _values(model))
    if not masked and not in_16_bits:
        yield path
        return
    if in_16_bits:
        widen(model)
    with temporary_folder() as folder:
        storage.save(model, folder / path.name)
        yield folder / path.name


def _values(model: ir.Model) -> list[ir.Value]:
    return [*model.graph.inputs, *model.graph.initializers.values(), *(v for node in model.graph for v in node.outputs)]
