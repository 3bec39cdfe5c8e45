"""The steps of a graph as a torch module: scopes are modules, and weights are parameters of the same names."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor, nn

from trtconvert.attention.sites import Site
from trtconvert.errors import TrtconvertError, UserError, first_line
from trtconvert.fake_tensors import shapes_alone
from trtconvert.models.onnx import operators, sizes
from trtconvert.models.onnx.attention import AttentionFinder, Shapes, fuse_attention
from trtconvert.models.onnx.call import Types, Value
from trtconvert.models.onnx.layers import fuse_gelus, fuse_group_norms, fuse_linear
from trtconvert.models.onnx.operators import OPERATORS
from trtconvert.models.onnx.sizes import Numbers, numbers
from trtconvert.models.onnx.steps import Branch, Graph, Step

_NAMED = {
    "Attention",
    "Conv",
    "ConvTranspose",
    "Gemm",
    "MatMul",
    "com.microsoft::Attention",
    "com.microsoft::MultiHeadAttention",
    "trtconvert::attention",
    "trtconvert::linear",
}
"""Operators that the module of their scope computes: the module's path names sites and layers."""

_WEIGHTS = {
    "Conv": (1, 2),
    "ConvTranspose": (1, 2),
    "Gemm": (1, 2),
    "MatMul": (0, 1),
    "com.microsoft::Attention": (1, 2),
    "trtconvert::linear": (1, 2),
}
"""The inputs of products that are weights if they are constant; the product has the weights' type."""


def constant_value(tensor: ir.TensorProtocol) -> Value:
    """Returns a constant as numbers, if it is one number or a few whole ones; else as a tensor, FP32 for floating point."""
    array = tensor.numpy()
    if array.dtype.kind in "fV" or tensor.dtype.is_floating_point():
        array = array.astype(np.float32)
        if array.size == 1:
            return numbers([array.ravel()[0].item()], array.shape)
    elif array.size <= sizes.MOST and array.ndim <= 1:
        return numbers([x.item() for x in array.ravel()], array.shape)
    value = torch.from_numpy(np.array(array, order="C"))  # a copy, as the array reads the file on demand
    if isinstance(tensor, ir.ExternalTensor):
        tensor.release()
    return value


def compute_step(step: Step, types: Types, inputs: Sequence[Value | None]) -> Any:
    """Computes a step; on numbers alone it returns numbers, if it can."""
    given = [x for x in inputs if x is not None]
    if given and all(isinstance(x, np.ndarray) and x.ndim <= 1 for x in given):
        found = sizes.compute(step, inputs)  # type: ignore[arg-type]  # all of them are numbers
        if found is not None:
            return found
    return operators.compute(step, types, inputs)


def run_steps(
    steps: Iterable[Step],
    values: dict[str, Value],
    types: Types,
    last: Mapping[Step, Sequence[str]],
    by: Callable[[str], nn.Module | None] = lambda _: None,
) -> Iterator[tuple[Step, list[Any]]]:
    """Computes steps in their order, and yields each with its outputs.

    Args:
        values: constants and inputs; also holds outputs until their last use.
        last: values that are dropped after a step.
        by: returns the module that computes the products of a scope.
    Raises:
        UserError: a step cannot be computed.
    """
    for step in steps:
        inputs = [values[name] if name else None for name in step.inputs]
        try:
            module = by(step.scope) if step.op in _NAMED else None
            found = compute_step(step, types, inputs) if module is None else module(step, types, inputs)
        except TrtconvertError:
            raise
        except Exception as error:  # of torch, whatever it is
            shapes = ", ".join(str(list(x.shape)) for x in inputs if x is not None)
            error.add_note(f"at {step.title}, of {shapes}")
            raise
        outputs = list(found) if isinstance(found, (list, tuple)) else [found]
        values.update(zip(step.outputs, outputs, strict=False))
        yield step, outputs
        for name in last.get(step, ()):
            values.pop(name, None)


def last_reads(graph: Graph) -> dict[Step, list[str]]:
    """Returns the values whose last use is in each step."""
    seen, last = set(graph.outputs), dict[Step, list[str]]()
    for step in reversed(graph.steps):
        for name in {*step.inputs, *step.outputs} - seen:
            seen.add(name)
            last.setdefault(step, []).append(name)
    return last


def folded(graph: Graph, stored: ir.DataType) -> dict[str, Value]:
    """Returns the constants of a graph, and computes the steps that read constants alone; these steps are removed."""
    values = {name: constant_value(tensor) for name, tensor in graph.constants.items()}
    types = Types(int(stored), torch.float32, torch.device("cpu"))
    left = []
    for step in graph.steps:
        # A constant that an operator expands is read from the file in its small form at every run.
        grows = step.op in ("ConstantOfShape", "Expand", "Tile", "Range")
        if grows or not all(name in values for name in step.inputs if name) or step.op not in OPERATORS:
            left.append(step)
            continue
        with torch.no_grad():
            found = compute_step(step, types, [values[name] if name else None for name in step.inputs])
        outputs = list(found) if isinstance(found, (list, tuple)) else [found]
        values.update(zip(step.outputs, outputs, strict=False))
    graph.steps = [_with_weights(step, values) for step in left]
    for step in graph.steps:
        for name in step.inputs[1:] if step.op in ("Resize", "Upsample") else ():
            if isinstance(scales := values.get(name), Tensor):
                values[name] = numbers(scales.tolist())
    used = {name for step in graph.steps for name in step.inputs} | set(graph.outputs)
    return {name: value for name, value in values.items() if name in used}


def _with_weights(step: Step, values: dict[str, Value]) -> Step:
    """Makes tensors of a step's weights that are single numbers, so that they take the module's type; `values` gets them."""
    inputs = list(step.inputs)
    for place in _WEIGHTS.get(step.op, ()):
        number = values.get(step.input(place))
        if isinstance(number, np.ndarray) and all(isinstance(x, float) for x in number.flat):
            inputs[place] = f"{inputs[place]}:weight"
            values[inputs[place]] = torch.tensor([*number.flat], dtype=torch.float32).reshape(number.shape)
    return step if inputs == list(step.inputs) else replace(step, inputs=tuple(inputs))


def with_branches_taken(
    path: Path, graph: Graph, values: Mapping[str, Value], types: Types, examples: Sequence[Mapping[str, Tensor]]
) -> None:
    """Replaces each If by the branch that sizes or constants choose, in place. Exporters that trace write an If where torch
    squeezes an axis of unknown size.

    Args:
        values: constants.
        examples: inputs of the opt, min and max sizes.
    Raises:
        UserError: a condition depends on values of the inputs, or differs between sizes.
    """
    while (step := next((step for step in graph.steps if step.op == "If"), None)) is not None:
        before = Graph(graph.steps[: graph.steps.index(step)], {}, graph.inputs, (step.inputs[0],))
        before.replace({})
        conditions = [_condition(before, values, types, inputs) for inputs in examples]
        if None in conditions or len(set(conditions)) != 1:
            raise UserError(
                f"{path} decides at run time which branch it computes, which engines cannot follow",
                expected="an If whose condition depends on constant sizes alone",
                got=f"{step.title}, whose condition "
                + ("depends on values" if None in conditions else "differs between sizes"),
                remedy="export the model by tracing it, not scripted, or give one number for each in model.options.sizes",
            )
        branch: Branch = step.attributes["then_branch" if conditions[0] else "else_branch"]
        results = [
            Step("Identity", (name,), (output,), {}, step.scope, step.title)
            for name, output in zip(branch.outputs, step.outputs, strict=True)
        ]
        graph.replace({step: [*branch.steps, *results]})


def _condition(before: Graph, values: Mapping[str, Value], types: Types, inputs: Mapping[str, Tensor]) -> bool | None:
    """Returns the one output of a graph as a truth value; None if it depends on values of the inputs."""
    (name,) = before.outputs
    found = values[name] if name in values else observed(before, values, types, inputs)[1].get(name)
    return bool(found.ravel()[0]) if isinstance(found, np.ndarray) else None


def fused(
    graph: Graph, values: dict[str, Value], types: Types, examples: Sequence[Mapping[str, Tensor]]
) -> tuple[list[Site], list[Shapes]]:
    """Fuses the steps of each attention, linear layer, group norm and GELU, in place.

    Args:
        values: constants; gets weights in other forms.
        examples: inputs of the opt, min and max sizes.
    Returns:
        The softmaxes that are not part of an attention that can be fused, and the shapes of all values in each example.
    Raises:
        UserError: the graph does not take an example.
    """
    runs = [AttentionFinder() for _ in examples]
    for inputs, finder in zip(examples, runs, strict=True):
        observed(graph, values, types, inputs, finder)
    left, shapes = fuse_attention(graph, runs), [run.shapes for run in runs]
    fuse_linear(graph, values)
    fuse_group_norms(graph, shapes[0], values)
    fuse_gelus(graph, values)
    for name in values.keys() - {name for step in graph.steps for name in step.inputs}:
        del values[name]
    return left, shapes


def observed(
    graph: Graph,
    constants: Mapping[str, Value],
    types: Types,
    inputs: Mapping[str, Tensor],
    finder: AttentionFinder | None = None,
) -> tuple[Shapes, dict[str, Numbers]]:
    """Runs a graph on fake tensors. Returns the shapes of all values, and the single numbers that do not depend on the inputs'
    values. finder: follows the run, and gets its results.

    Raises:
        UserError: a step fails.
    """
    steps, last = (graph.steps, last_reads(graph)) if finder is None else (finder.each(graph.steps), {})
    with shapes_alone() as mode, torch.inference_mode(), finder or nullcontext():
        values: dict[str, Value] = dict(constants)
        values |= {name: mode.from_tensor(x) for name, x in inputs.items()}
        shapes = {name: tuple(x.shape) for name, x in values.items()}
        known = {name: x for name, x in constants.items() if isinstance(x, np.ndarray) and x.size == 1}
        try:
            for step, outputs in run_steps(steps, values, types, last):
                for name, x in zip(step.outputs, outputs, strict=False):
                    if finder is not None and any(x is values.get(other) for other in step.inputs):
                        values[name] = x.detach() if isinstance(x, Tensor) else x
                    shapes[name] = tuple(x.shape) if x is not None else ()
                    if isinstance(x, np.ndarray) and x.size == 1:
                        known[name] = x
        except TrtconvertError:
            raise
        except Exception as error:  # whatever torch raises for unfit shapes
            place = (getattr(error, "__notes__", None) or ["in the graph"])[0]
            if isinstance(error, (AttributeError, TypeError, KeyError, AssertionError)):
                raise UserError(
                    "a step of the graph cannot be converted",
                    expected="operators with inputs of the usual kinds",
                    got=f"{first_line(error)}, {place}",
                    remedy="export the model in another way, or convert the original torch model; and please report it",
                ) from error
            raise UserError(
                "the graph cannot be run with these sizes",
                expected="sizes that the graph takes: "
                + ", ".join(f"{name} {list(x.shape)}" for name, x in inputs.items()),
                got=f"{first_line(error)}, {place}",
                remedy="correct model.options.sizes; a graph whose sizes became constants needs the sizes that it was exported "
                "with, or must be exported with dynamic axes",
            ) from error
    if finder is not None:
        finder.values, finder.shapes, finder.known = values, shapes, known
    return shapes, known


class Scope(nn.Module):
    """A module that the graph was traced through: holds its weights, and computes its products."""

    def forward(self, step: Step, types: Types, inputs: Sequence[Value | None]) -> Any:
        return compute_step(step, types, inputs)


class _Kept(dict[str, Tensor]):
    """Constants that never change: copies of a module share them."""

    def __deepcopy__(self, memo: dict[int, Any]) -> _Kept:
        return _Kept(self)


class GraphDenoiser(nn.Module):
    """A graph as a module that takes its inputs by name and returns one of its outputs.

    Args:
        graph: its steps are computed.
        values: the graph's constants.
        stored: type of the graph.
        keep: constants that stay in FP32, whatever the module's type.
        channels: number of the output's first channels that are returned; None for all.
        truths: inputs that are truth values in the graph; they are passed as whole numbers.
    """

    def __init__(
        self,
        graph: Graph,
        values: Mapping[str, Value],
        stored: ir.DataType,
        *,
        keep: set[str],
        channels: int | None = None,
        truths: frozenset[str] = frozenset(),
    ) -> None:
        super().__init__()
        graph = Graph(_with_scopes(graph.steps), graph.constants, graph.inputs, graph.outputs)
        self._steps, self._last = graph.steps, last_reads(graph)
        self._output, self._stored = graph.outputs[0], int(stored)
        self._channels, self._truths = channels, truths
        self._numbers = {name: x for name, x in values.items() if isinstance(x, np.ndarray)}
        self._kept = _Kept()
        self._places: dict[str, str] = {}
        """Names of parameters, by the names of constants."""
        self._scopes = {step.scope: self._scope(step.scope) for step in self._steps if step.op in _NAMED and step.scope}
        names = _weight_names(graph, values)
        for name, value in values.items():
            if isinstance(value, np.ndarray):
                continue
            if name in keep or not value.is_floating_point():
                self._kept[name] = value
            else:
                path, _, attribute = names[name].rpartition(".")
                module = self._scope(path) if path else self
                place = _free_name(module, attribute)
                module.register_parameter(place, nn.Parameter(value, requires_grad=False))
                self._places[name] = f"{path}.{place}" if path else place

    def _scope(self, path: str) -> nn.Module:
        module: nn.Module = self
        for part in path.split("."):
            found = module._modules.get(part)
            if found is None:
                found = Scope()
                module.add_module(_free_name(module, part), found)
            module = found
        return module

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> GraphDenoiser:
        super()._apply(fn, recurse)
        # Kept constants change their device only, because they need the precision of their type.
        self._kept = _Kept({name: x.to(fn(x.flatten()[:0]).device) for name, x in self._kept.items()})
        return self

    def forward(self, **named: Tensor) -> Tensor:
        """Takes the inputs by name; returns the prediction."""
        parameters = dict(self.named_parameters())
        first = next(iter(parameters.values()))
        types = Types(self._stored, first.dtype, first.device)
        values: dict[str, Value] = {name: parameters[place] for name, place in self._places.items()}
        values |= self._numbers
        values |= self._kept
        values |= {name: x.bool() if name in self._truths else x for name, x in named.items()}
        for _ in run_steps(self._steps, values, types, self._last, self._scopes.get):
            pass
        found = values[self._output]
        assert isinstance(found, Tensor)
        found = found.to(first.dtype)
        return found if self._channels is None else found[:, : self._channels]


def kept_constants(graph: Graph, values: Mapping[str, Value], stored: ir.DataType, timestep: str) -> set[str]:
    """Returns the constants that stay in FP32: those that only the timestep and positions meet before their first product.

    In a 16-bit graph these are the FP32 constants. An FP32 graph does not have the distinction: the types of torch's computation
    tell instead.
    """
    if stored != ir.DataType.FLOAT:
        return {
            name
            for name, tensor in graph.constants.items()
            if tensor.dtype in (ir.DataType.FLOAT, ir.DataType.DOUBLE) and isinstance(values.get(name), Tensor)
        }
    of_type = {name: True for name in graph.inputs if name != timestep}
    used: dict[str, set[bool]] = {}
    for step in graph.steps:
        weights = {step.input(place) for place in _WEIGHTS.get(step.op, ())} & values.keys()
        squared = step.op == "Pow" and _is_two(values.get(step.input(1)))
        of_sizes = step.op in ("Shape", "Size")
        typed = bool(weights) or (not (squared or of_sizes) and any(of_type.get(name, False) for name in step.inputs))
        of_type |= dict.fromkeys(step.outputs, typed)
        for name in step.inputs:
            if name in values:
                used.setdefault(name, set()).add(typed or name in weights)
    return {name for name, kinds in used.items() if kinds == {False} and isinstance(values[name], Tensor)}


def _is_two(value: Value | None) -> bool:
    return isinstance(value, np.ndarray) and value.size == 1 and value.ravel()[0] == 2


def _with_scopes(steps: Sequence[Step]) -> list[Step]:
    """Gives each product a scope; without a known one its own name."""
    scopes = Counter(step.scope for step in steps)

    def own(step: Step) -> str:
        name = re.sub(r"\W+", "_", step.title.partition(" ")[2]).strip("_") or "node"
        return name if not scopes[name] else f"{name}_node"

    return [replace(step, scope=own(step)) if step.op in _NAMED and not step.scope else step for step in steps]


def _weight_names(graph: Graph, values: Mapping[str, Value]) -> dict[str, str]:
    """Returns names for parameters: names that exporters kept, or else names by the scope of the step that reads them."""
    read: dict[str, tuple[Step, int]] = {}
    for step in graph.steps:
        for place, name in enumerate(step.inputs):
            read.setdefault(name, (step, place))
    names: dict[str, str] = {}
    for name in values:
        plain = name.removesuffix(".T").removesuffix(":channels").removesuffix(":weight")
        if "." in plain and re.fullmatch(r"[\w.\-]+", plain):
            names[name] = plain.strip(".")
        elif name in read:
            step, place = read[name]
            has_weights = step.op in _WEIGHTS or step.op.endswith(("_norm", "Normalization"))
            kind = {1: "weight", 2: "bias"}.get(place, "") if has_weights else ""
            own = re.sub(r"\W+", "_", plain)
            names[name] = f"{step.scope}.{kind or own}" if step.scope else own
        else:
            names[name] = re.sub(r"\W+", "_", plain)
    taken = Counter[str]()
    for name, place in names.items():
        taken[place] += 1
        if taken[place] > 1:
            names[name] = f"{place}_{taken[place]}"
    return names


def _free_name(module: nn.Module, name: str) -> str:
    name = name or "weight"
    while hasattr(module, name):
        name += "_"
    return name
