"""Exports torch modules to ONNX, and folds constants."""

from __future__ import annotations

import functools
import io
import itertools
import os
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from typing import Any

import onnx_ir as ir
import sympy
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import config
from torch.fx.experimental.symbolic_shapes import ConstraintViolationError
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from trtconvert.diffusion_model import InputSpec
from trtconvert.errors import UserError, first_line
from trtconvert.export.decompositions import decomposed_in_place
from trtconvert.export.nodes.common import OPSET
from trtconvert.export.optimisation import optimise
from trtconvert.export.passes import AFTER_OPTIMISATION, BEFORE_OPTIMISATION
from trtconvert.export.passes.autocast_regions import inline_regions_without_autocast
from trtconvert.export.passes.complex_pairs import complex_as_pairs
from trtconvert.export.weights import (
    mark_weights_in_constants,
    name_weights,
    weights_apart,
    weights_of_constants,
)
from trtconvert.fake_tensors import without_tracebacks
from trtconvert.interception import module_of

_ONE_AT_A_TIME = threading.Lock()
"""Of exports: they change functions and settings of torch and onnxscript, warnings and stderr for all threads."""


def exported_to_onnx(
    module: nn.Module,
    inputs: Mapping[str, Tensor],
    specs: Sequence[InputSpec],
    outputs: Sequence[str],
    dims: Mapping[str, tuple[int, int, int]],
    *,
    title: str,
    prefix: str,
    remedy: str,
) -> ir.Model:
    """Exports a module that takes tensors by position, with constants folded.

    Args:
        inputs: examples by name. specs: of the inputs. outputs: names.
        title: of the model, for messages. remedy: for failures.
        prefix: of the module, before the names of the model's state dict.
    Raises:
        UserError: the module cannot be exported.
    """
    # torch.export has no dynamic size of 1: it would silently turn the range 1 to 2 into the constant 2.
    symbols = {
        name: torch.export.Dim(name, min=low, max=max(high, 3)) for name, (low, _, high) in dims.items() if low < high
    }
    shapes = tuple({axis: symbols[d] for axis, d in enumerate(spec.shape) if d in symbols} for spec in specs)
    values = tuple(inputs.values())

    def to_onnx(exported: nn.Module | ExportedProgram) -> torch.onnx.ONNXProgram:
        program = torch.onnx.export(
            exported,
            values,
            input_names=list(inputs),
            output_names=list(outputs),
            opset_version=OPSET,
            dynamo=True,
            dynamic_shapes=(shapes,),
            optimize=False,  # after the weights have their names
            verbose=False,
        )
        assert program is not None  # None only if it writes a file
        return program

    try:
        with (
            _ONE_AT_A_TIME,
            torch.no_grad(),
            _AsExportersTakeIt(),
            _without_stack_traces(),
            warnings.catch_warnings(),
            _stderr_of_success(),
            decomposed_in_place(),
            without_tracebacks(),
        ):
            # Several inputs share one symbol on purpose.
            warnings.filterwarnings("ignore", message="# The axis name: .* will not be used")
            try:
                program = to_onnx(module.eval())
            except torch.onnx.errors.OnnxExporterError:
                in_pairs = _with_complex_as_pairs(module, values, shapes)
                if in_pairs is None:
                    raise
                program = to_onnx(in_pairs)
    except (torch.onnx.errors.OnnxExporterError, ConstraintViolationError) as error:
        raise UserError(
            f"{title} cannot be exported to ONNX",
            expected="a forward that torch.export can trace, with " + (", ".join(symbols) or "nothing") + " dynamic",
            got=_cause_of(error, module, prefix),
            remedy=remedy,
        ) from error
    # The exporter silently makes a constant of a size that torch.export suggests to fix.
    fixed = {
        f"{dim} = {size}"
        for value, spec in zip(program.model.graph.inputs, specs, strict=True)
        for dim, size in zip(spec.shape, value.shape or (), strict=True)
        if dim in symbols and isinstance(size, int)
    }
    if program.exported_program is not None:
        fixed |= _assumptions(program.exported_program, specs, dims)
    if fixed:
        raise UserError(
            f"{title} can be exported to ONNX for one size only",
            expected="a forward with any size of " + ", ".join(symbols),
            got=", ".join(sorted(fixed)) + ": the forward uses them as Python numbers, as in range(x.shape[0]) or "
            "int(x.shape[1] ** 0.5)",
            remedy=remedy,
        )
    weights = name_weights(program.model, prefix)
    for rewrite in BEFORE_OPTIMISATION:
        rewrite(program.model)
    of_constants = weights_of_constants(program.model, weights)
    with _ONE_AT_A_TIME, warnings.catch_warnings(), weights_apart(program.model, weights):
        # T5's position buckets take log(0) in elements that are not used; numpy would warn while it folds them.
        warnings.filterwarnings("ignore", category=RuntimeWarning, module="onnx.reference")
        optimise(program)
    mark_weights_in_constants(program.model, weights, of_constants)
    for rewrite in AFTER_OPTIMISATION:
        rewrite(program.model)
    return program.model


def _assumptions(
    program: ExportedProgram, specs: Sequence[InputSpec], dims: Mapping[str, tuple[int, int, int]]
) -> set[str]:
    """Returns equations with numbers that a program assumes, and that some sizes violate.

    Such a program has constants for numbers that the forward computes from sizes, such as `int(x.shape[1] ** 0.5)`.
    """
    values = {node.name: node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder"}
    sizes: dict[Any, str] = {}
    environment = None
    for name, spec in zip(program.graph_signature.user_inputs, specs, strict=True):
        for size, dim in zip(values[str(name)].shape, spec.shape, strict=True):
            if isinstance(size, torch.SymInt) and isinstance(dim, str):
                sizes[size.node.expr], environment = dim, size.node.shape_env
    if environment is None:
        return set()
    taken = [assumed.expr for each in environment.deferred_runtime_asserts.values() for assumed in each]
    ends = itertools.product(*({dims[dim][0], dims[dim][2]} for dim in sizes.values()))
    numbers = [dict(zip(sizes, map(sympy.Integer, numbers), strict=True)) for numbers in ends]
    names = {symbol: sympy.Symbol(dim) for symbol, dim in sizes.items()}
    return {
        f"{equation.lhs.xreplace(names)} = {equation.rhs}"
        for equation in taken
        if isinstance(equation, sympy.Eq) and equation.rhs.is_number
        if any(equation.xreplace(at) == sympy.false for at in numbers)
    }


@contextmanager
def _stderr_of_success() -> Iterator[None]:
    """Delays stderr of the block, and drops it on failure: torch.export prints the whole graph of models that it cannot trace."""
    with redirect_stderr(io.StringIO()) as written:
        yield
    sys.stderr.write(written.getvalue())


@contextmanager
def _without_stack_traces() -> Iterator[None]:
    """Graphs get no stack traces inside the block: traces take time, and nothing reads them."""
    if not hasattr(config, "do_not_emit_stack_traces"):  # torch 2.11
        yield
        return
    before, config.do_not_emit_stack_traces = config.do_not_emit_stack_traces, True
    try:
        yield
    finally:
        config.do_not_emit_stack_traces = before


_DATA = Tensor.data.__get__  # pyright: ignore[reportAttributeAccessIssue]
_CONVOLUTIONS = frozenset(
    (torch.conv1d, torch.conv2d, torch.conv3d, torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d)
)
_REWRITTEN = _CONVOLUTIONS | {
    *(scaled_dot_product_attention, _DATA, Tensor.copy_, torch.einsum),
    *(torch.repeat_interleave, Tensor.repeat_interleave, torch.linspace),
}
"""Functions whose calls `_AsExportersTakeIt` rewrites."""


class _AsExportersTakeIt(TorchFunctionMode):
    """Rewrites calls into forms that the exporter supports, with the same results.

    - Attention of three axes gets a fourth one.
    - `linspace` of a symbolic number of steps becomes `arange`: torch.export makes a constant of the number.
    - `repeat_interleave` loses `output_size`, which torch 2.11 makes a constant.
    - `.data` becomes `detach()`: writes to `.data`, as in CogVideoX, are not traced.
    - `copy_` expands its source explicitly.
    - Convolutions get one number in place of a list of one, which the exporter does not repeat for each axis.
    - `einsum` converts operands of several types to their common type, which ONNX's Einsum needs.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func not in _REWRITTEN:  # nearly all of the calls; most of them read properties of tensors
            return func(*args, **(kwargs or {}))
        named = dict(kwargs or {})
        if func is scaled_dot_product_attention:
            named = dict(zip(("query", "key", "value"), args, strict=False)) | named
            tensors = [named.pop(name) for name in ("query", "key", "value")]
            if all(x.dim() == 3 for x in tensors):
                return func(*(x.unsqueeze(0) for x in tensors), *args[3:], **named).squeeze(0)
            return func(*tensors, *args[3:], **named)
        if func == _DATA:
            return args[0].detach()
        if func is Tensor.copy_ and len(args) > 1:
            return func(args[0], args[1].expand_as(args[0]), *args[2:], **named)
        if func is torch.einsum and len(args) > 1 and isinstance(args[0], str):
            operands = args[1] if isinstance(args[1], (list, tuple)) else args[1:]
            common = functools.reduce(torch.promote_types, (x.dtype for x in operands))
            return func(args[0], *(x.to(common) for x in operands))
        if func in _CONVOLUTIONS:
            args = [*args[:3], *map(_number, args[3:])]
            named = {name: _number(x) for name, x in named.items()}
        if func is torch.linspace:
            given = dict(zip(("start", "end", "steps"), args, strict=False)) | named
            if isinstance(given["steps"], torch.SymInt):
                return _linspace(**given)
        if func in (torch.repeat_interleave, Tensor.repeat_interleave):
            repeats = named.get("repeats", args[1] if len(args) > 1 else None)
            if isinstance(repeats, (int, torch.SymInt)):
                named.pop("output_size", None)
        return func(*args, **named)


def _linspace(start: Any, end: Any, steps: torch.SymInt, dtype: torch.dtype | None = None, **options: Any) -> Tensor:
    """Computes `torch.linspace` by functions of a symbolic number of steps."""
    places = torch.arange(steps, dtype=dtype or torch.get_default_dtype(), **options)
    return start + places * ((end - start) / torch.sym_max(steps - 1, 1))


def _number(x: Any) -> Any:
    """Returns the entry of a list of one, and other values as they are."""
    return x[0] if isinstance(x, (list, tuple)) and len(x) == 1 else x


def _with_complex_as_pairs(
    module: nn.Module, values: tuple[Tensor, ...], shapes: tuple[dict[int, torch.export.Dim], ...]
) -> ExportedProgram | None:
    """Exports a module with complex numbers as pairs of real ones. None if that fails or the module has none."""
    try:
        captured = torch.export.export(
            module,
            values,
            dynamic_shapes=(shapes,),
            strict=False,
            prefer_deferred_runtime_asserts_over_guards=True,  # as the exporter: does not fix halves of sizes
        )
        inline_regions_without_autocast(captured)
        return captured if complex_as_pairs(captured) else None
    except Exception:  # undocumented types; the exporter's own error is reported
        return None


def _cause_of(error: BaseException, module: nn.Module, prefix: str) -> str:
    """Returns the first line of the root cause, because the exporter's message names only its step; and its place in the model.

    Args:
        module: was exported. prefix: of the model before the names of the module's parts.
    """
    while error.__cause__ is not None:
        error = error.__cause__
    cause, path = first_line(error), module_of(module, error)
    if not path.startswith(prefix):
        return cause
    ours = os.path.dirname(os.path.dirname(__file__))
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((os.path.dirname(torch.__file__), ours, "<"))
    ]
    line = f", {os.path.basename(frames[-1].filename)}:{frames[-1].lineno}" if frames else ""
    return f"{cause} (in {path.removeprefix(prefix)}{line})"
