"""The steps of a graph as a torch module: its scopes are modules, its weights parameters under the names that they have."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor, nn

from trtconvert.errors import TrtconvertError, UserError, first_line
from trtconvert.fake_tensors import shapes_alone
from trtconvert.models.onnx import operators, sizes
from trtconvert.models.onnx.attention import Left, Shapes, fuse_attention
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
"""Operators that are computed by the module of their scope, by whose path sites and layers are called."""

_WEIGHTS = {
    "Conv": (1, 2),
    "ConvTranspose": (1, 2),
    "Gemm": (1, 2),
    "MatMul": (0, 1),
    "com.microsoft::Attention": (1, 2),
    "trtconvert::linear": (1, 2),
}
"""Which inputs of products are weights, where they are constant: the product is of their type, whatever it reads."""


def constant_value(tensor: ir.TensorProtocol) -> Value:
    """A constant: numbers, where there are few whole ones or one; else a tensor, FP32 where it is floating-point."""
    array = tensor.numpy()
    if array.dtype.kind in "fV" or tensor.dtype.is_floating_point():
        array = array.astype(np.float32)
        if array.size == 1:
            return numbers([array.ravel()[0].item()], array.shape)
    elif array.size <= sizes.MOST and array.ndim <= 1:
        return numbers([x.item() for x in array.ravel()], array.shape)
    value = torch.from_numpy(np.array(array, order="C"))  # of its own: the file's is read as it is needed
    if isinstance(tensor, ir.ExternalTensor):
        tensor.release()
    return value


def compute_step(step: Step, types: Types, inputs: Sequence[Value | None]) -> Any:
    """What a step gives: of numbers alone numbers, where it can be."""
    given = [x for x in inputs if x is not None]
    if given and all(isinstance(x, np.ndarray) and x.ndim <= 1 for x in given):
        found = sizes.compute(step, inputs)  # type: ignore[arg-type]  # all of them are numbers
        if found is not None:
            return found
    return operators.compute(step, types, inputs)


def run_steps(
    steps: Sequence[Step],
    values: dict[str, Value],
    types: Types,
    last: Mapping[Step, Sequence[str]],
    by: Callable[[str], nn.Module | None] = lambda _: None,
) -> Iterator[tuple[Step, list[Any]]]:
    """Compute steps in their order.

    Args:
        values: constants and inputs; takes up what is computed until it is no longer read.
        last: what is no longer read after a step.
        by: of a scope the module that computes its products.
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
    """After which step a value is no longer read."""
    seen, last = set(graph.outputs), dict[Step, list[str]]()
    for step in reversed(graph.steps):
        for name in {*step.inputs, *step.outputs} - seen:
            seen.add(name)
            last.setdefault(step, []).append(name)
    return last


def folded(graph: Graph, stored: ir.DataType) -> dict[str, Value]:
    """The constants of a graph, with what steps compute of constants alone; those steps go."""
    values = {name: constant_value(tensor) for name, tensor in graph.constants.items()}
    types = Types(int(stored), torch.float32, torch.device("cpu"))
    left = []
    for step in graph.steps:
        # A size that was expanded is read from the file at every run; a constant that grows would be kept.
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
    """A step whose weights of one number are tensors too, which are of the module's type wherever it is; takes them up."""
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
    """Put what an If computes into its place, where sizes or constants say which branch that is, in place. Exporters that trace
    write one where torch squeezes an axis whose size they do not know.

    Args:
        values: constants; examples: inputs of all sizes that matter.
    Raises:
        UserError: a condition follows the values of the inputs, or is not the same for all sizes.
    """
    while (step := next((step for step in graph.steps if step.op == "If"), None)) is not None:
        before = Graph(graph.steps[: graph.steps.index(step)], {}, graph.inputs, (step.inputs[0],))
        before.replace({})
        conditions = [_condition(before, values, types, inputs) for inputs in examples]
        if None in conditions or len(set(conditions)) != 1:
            raise UserError(
                f"{path} decides while it runs what it computes, which engines cannot follow",
                expected="an If whose condition follows from sizes that do not vary",
                got=f"{step.title}, whose condition "
                + ("follows values" if None in conditions else "is not the same for all sizes"),
                remedy="export the model by tracing it, not scripted, or give one number for each in model.options.sizes",
            )
        branch: Branch = step.attributes["then_branch" if conditions[0] else "else_branch"]
        results = [
            Step("Identity", (name,), (output,), {}, step.scope, step.title)
            for name, output in zip(branch.outputs, step.outputs, strict=True)
        ]
        graph.replace({step: [*branch.steps, *results]})


def _condition(before: Graph, values: Mapping[str, Value], types: Types, inputs: Mapping[str, Tensor]) -> bool | None:
    """The one output of a graph as a truth value; None where it follows the values of the inputs."""
    (name,) = before.outputs
    found = values[name] if name in values else observed(before, values, types, inputs)[1].get(name)
    return bool(found.ravel()[0]) if isinstance(found, np.ndarray) else None


def fused(graph: Graph, values: dict[str, Value], types: Types, inputs: Mapping[str, Tensor]) -> list[Left]:
    """Make one step of each attention, linear layer, group norm and GELU, in place.

    Args:
        values: constants; takes up weights in other forms. inputs: an example of each.
    Returns:
        What looks like attention, and is not matched.
    """
    shapes, known = observed(graph, values, types, inputs)
    left = fuse_attention(graph, shapes, known)
    fuse_linear(graph, values)
    fuse_group_norms(graph, shapes, values)
    fuse_gelus(graph, values)
    for name in values.keys() - {name for step in graph.steps for name in step.inputs}:
        del values[name]
    return left


def observed(
    graph: Graph, constants: Mapping[str, Value], types: Types, inputs: Mapping[str, Tensor]
) -> tuple[Shapes, dict[str, Numbers]]:
    """Shapes of all values in a run on tensors without numbers, and what is a single number whatever the inputs hold.

    Raises:
        UserError: the graph cannot be run so.
    """
    with shapes_alone() as mode, torch.inference_mode():
        values: dict[str, Value] = dict(constants)
        values |= {name: mode.from_tensor(x) for name, x in inputs.items()}
        shapes = {name: tuple(x.shape) for name, x in values.items()}
        known = {name: x for name, x in constants.items() if isinstance(x, np.ndarray) and x.size == 1}
        try:
            for step, outputs in run_steps(graph.steps, values, types, last_reads(graph)):
                for name, x in zip(step.outputs, outputs, strict=False):
                    shapes[name] = tuple(x.shape) if x is not None else ()
                    if isinstance(x, np.ndarray) and x.size == 1:
                        known[name] = x
        except TrtconvertError:
            raise
        except Exception as error:  # whatever torch raises for shapes that do not fit
            place = (getattr(error, "__notes__", None) or ["in the graph"])[0]
            if isinstance(error, (AttributeError, TypeError, KeyError, AssertionError)):
                raise UserError(
                    "a step of the graph cannot be converted",
                    expected="operators with inputs of the kinds that denoisers have",
                    got=f"{first_line(error)}, {place}",
                    remedy="export the model in another way, or convert the torch model that it came from; and please report it",
                ) from error
            raise UserError(
                "the graph cannot be run with these sizes",
                expected="sizes that it takes: " + ", ".join(f"{name} {list(x.shape)}" for name, x in inputs.items()),
                got=f"{first_line(error)}, {place}",
                remedy="correct model.options.sizes; where the graph has made constants of sizes, give those that it was "
                "exported with, or export it with dynamic axes",
            ) from error
    return shapes, known


class Scope(nn.Module):
    """A module that a graph was traced through: holds its weights, and computes its products."""

    def forward(self, step: Step, types: Types, inputs: Sequence[Value | None]) -> Any:
        return compute_step(step, types, inputs)


class _Kept(dict[str, Tensor]):
    """Constants that nothing changes: copies of a module share them."""

    def __deepcopy__(self, memo: dict[int, Any]) -> _Kept:
        return _Kept(self)


class GraphDenoiser(nn.Module):
    """A graph as a module that takes its inputs by name and gives one of its outputs.

    Args:
        graph: of which steps are computed; values: its constants.
        stored: the type that it is in.
        keep: constants that stay in FP32 whatever type the module is made of.
        truths: inputs that are truth values in the graph, and come as whole numbers.
        channels: of the output that are given, the first ones; None for all.
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
        """Names of parameters, by those of constants."""
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
                place = _free(module, attribute)
                module.register_parameter(place, nn.Parameter(value, requires_grad=False))
                self._places[name] = f"{path}.{place}" if path else place

    def _scope(self, path: str) -> nn.Module:
        module: nn.Module = self
        for part in path.split("."):
            found = module._modules.get(part)
            if found is None:
                found = Scope()
                module.add_module(_free(module, part), found)
            module = found
        return module

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> GraphDenoiser:
        super()._apply(fn, recurse)
        # To another device; their type, whose precision another would lose, is theirs.
        self._kept = _Kept({name: x.to(fn(x.flatten()[:0]).device) for name, x in self._kept.items()})
        return self

    def forward(self, **named: Tensor) -> Tensor:
        """The inputs by name → the prediction."""
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
    """Constants that are not of the denoiser's type, and stay in FP32: those that only the timestep and positions meet before
    they come to the first product.

    In a graph of 16 bits they are those of FP32; one of FP32 does not tell, and is looked at as torch computes it.
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
    """Steps of which each product has a scope: its own name where nothing tells."""
    scopes = Counter(step.scope for step in steps)

    def own(step: Step) -> str:
        name = re.sub(r"\W+", "_", step.title.partition(" ")[2]).strip("_") or "node"
        return name if not scopes[name] else f"{name}_node"

    return [replace(step, scope=own(step)) if step.op in _NAMED and not step.scope else step for step in steps]


def _weight_names(graph: Graph, values: Mapping[str, Value]) -> dict[str, str]:
    """Names of parameters: those that exporters have kept, else by the scope of the step that reads them."""
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


def _free(module: nn.Module, name: str) -> str:
    """A name for a part of a module that is not taken by what it has."""
    name = name or "weight"
    while hasattr(module, name):
        name += "_"
    return name
