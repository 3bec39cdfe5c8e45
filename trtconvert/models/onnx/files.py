"""Reads ONNX files and the weights beside them, and refuses unfit ones. Does not import torch."""

from __future__ import annotations

import os
import shlex
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import onnx
import onnx_ir as ir
from google.protobuf.message import DecodeError
from onnx_ir.passes.common import InlinePass

from trtconvert.errors import UserError, first_line
from trtconvert.files import open_regular
from trtconvert.models.onnx.flaws import first_flaw

OPSETS = range(11, 27)
"""Supported opsets of ONNX's own operators."""

_LOOPS = ("Loop", "Scan", "SequenceMap")

TYPES = {
    ir.DataType.FLOAT: "float32",
    ir.DataType.FLOAT16: "float16",
    ir.DataType.BFLOAT16: "bfloat16",
}
"""Types that a denoiser's weights may have."""

_AGAIN = "export or download the model again, whole"


def read_graph(path: Path) -> ir.Model:
    """Reads a graph, inlines its local functions and sorts its nodes. Weights beside the file are read on demand.

    Raises:
        UserError: the file is no ONNX model or damaged, weights are missing or elsewhere, or the opset is not supported.
    """
    model = load(path)
    if model.functions:
        try:
            InlinePass()(model)
        except (ir.passes.PassError, ir.passes.InvariantError, ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"the functions in {path} cannot be inlined",
                expected="calls with the inputs, outputs and attributes that the functions have",
                got=first_line(_root_cause(error)),
                remedy="export the model with torch.onnx.export; onnx.checker.check_model tells more",
            ) from error
    opset = model.graph.opset_imports.get("", model.opset_imports.get("", 0))
    if opset not in OPSETS:
        raise UserError(
            f"{path} has an opset that is not supported",
            expected=f"operators of ONNX's opset {OPSETS[0]} to {OPSETS[-1]}",
            got=f"opset {opset}",
            remedy=f"export the model with opset_version={min(max(opset, 17), 23)}, or convert it with onnx.version_converter",
        )
    # Converters to FP16 append their casts at the end of the file, and runtimes sort nodes.
    with suppress(ValueError):  # a cycle, which `graph_of` refuses
        model.graph.sort()
    return model


def refuse_loops(path: Path, model: ir.Model) -> None:
    """
    Raises:
        UserError: a node is a loop.
    """
    if loops := [node for node in model.graph if node.op_type in _LOOPS]:
        raise UserError(
            f"{path} has loops, which engines cannot follow",
            expected="a graph without " + ", ".join(_LOOPS),
            got=", ".join(f"{node.op_type} {node.name or node.outputs[0].name}" for node in loops[:4]),
            remedy="export the model by tracing it, not scripted",
        )


def load(path: Path) -> ir.Model:
    """Reads a model as it is in the file, with the places of its weights checked.

    Raises:
        UserError: see `read_graph`.
    """
    model = _read(path)
    for holder, tensor in _external(model):
        tensor.base_dir = path.parent
        _refuse_unfit_place(path, tensor)
        if (moved := _where_it_lies(tensor)) is not tensor:
            if isinstance(holder, ir.Value):
                holder.const_value = moved
            else:
                node, name = holder
                node.attributes[name] = ir.AttrTensor(name, moved)
    return model


def _read(path: Path) -> ir.Model:
    try:
        open_regular(path).close()
        stored = onnx.load(path, load_external_data=False)
    except OSError as error:
        raise UserError(
            f"cannot read the model {path}",
            expected="an ONNX file; the path is relative to the recipe",
            got=error.strerror or type(error).__name__,
            remedy="correct model.source in the recipe",
        ) from error
    except (DecodeError, ValueError, KeyError, TypeError, AttributeError) as error:  # for bytes that are no graph
        raise _no_model(path, error) from error
    if (flaw := first_flaw(stored)) is not None:
        raise UserError(f"{path} {flaw.what}", expected=flaw.expected, got=flaw.got, remedy=flaw.remedy)
    try:
        model = ir.serde.deserialize_model(stored)
    except (ir.serde.SerdeError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _no_model(path, _root_cause(error)) from error
    if not model.graph.outputs or not len(model.graph):
        raise UserError(
            f"{path} is no ONNX model, or damaged",
            expected="a graph with nodes and outputs",
            got=f"{len(model.graph)} nodes and {len(model.graph.outputs)} outputs in {path.stat().st_size} bytes",
            remedy=_AGAIN,
        )
    return model


def _no_model(path: Path, error: BaseException) -> UserError:
    return UserError(
        f"{path} is no ONNX model, or damaged",
        expected="a whole ONNX file",
        got=f"{first_line(error)} ({path.stat().st_size} bytes)",
        remedy=_AGAIN,
    )


def _root_cause(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _external(model: ir.Model) -> Iterator[tuple[ir.Value | tuple[ir.Node, str], ir.ExternalTensor]]:
    """Yields weights in other files with their holder: a value, or a node and an attribute's name."""
    for graph in (*model.graphs(), *(function.graph for function in model.functions.values())):
        for value in [*graph.initializers.values()]:
            if isinstance(value.const_value, ir.ExternalTensor):
                yield value, value.const_value
        for node in graph:
            for name, attribute in [*node.attributes.items()]:
                if attribute.type == ir.AttributeType.TENSOR and isinstance(attribute.value, ir.ExternalTensor):
                    yield (node, name), attribute.value


def _refuse_unfit_place(path: Path, tensor: ir.ExternalTensor) -> None:
    folder, location = path.parent, os.path.normpath(tensor.location)
    file = folder / location
    # Caches have links in the model's folder to files of other names in the folder of the model's own file.
    homes = (folder.resolve(), path.resolve().parent)
    outside = os.path.isabs(location) or location.split(os.sep)[0] == os.pardir
    if outside or not any(file.resolve().is_relative_to(home) for home in homes):
        raise UserError(
            f"{path}: weight '{tensor.name}' lies outside the model's folder",
            expected=f"a file in {folder.resolve()}",
            got=str(tensor.location),
            remedy="save the model with its weights in one folder: onnx.save(model, path, save_as_external_data=True)",
        )
    end = (tensor.offset or 0) + (tensor.length or tensor.nbytes)
    found = file.stat() if file.is_file() else None
    size = None if found is None else found.st_size
    if size is None or size < end:
        raise UserError(
            f"{path}: the weights beside it are not whole",
            expected=f"{file.name} with at least {end:,} bytes, for '{tensor.name}'",
            got="no such file" if size is None else f"{size:,} bytes",
            remedy=f"put {file.name} beside {path.name} as it was exported, or download it again",
        )
    if found is not None and found.st_nlink > 1:
        quoted, copy = shlex.quote(str(file)), shlex.quote(f"{file}.copy")
        raise UserError(
            f"{path}: the weights beside it have other names on this disk (hard links)",
            expected=f"{file.name} with one name: a program that writes under another name would change the model",
            got=f"{found.st_nlink} names",
            remedy=f"replace it by a copy: cp {quoted} {copy} && mv -f {copy} {quoted}",
        )


def _where_it_lies(tensor: ir.ExternalTensor) -> ir.ExternalTensor:
    """Returns a weight at the end of links, which `_refuse_unfit_place` checked: the library does not follow links out of a
    folder."""
    if os.path.realpath(tensor.path) == os.path.join(os.path.realpath(tensor.base_dir), tensor.location):
        return tensor
    return ir.ExternalTensor(
        os.path.realpath(tensor.path),
        tensor.offset,
        tensor.length,
        tensor.dtype,
        shape=tensor.shape,
        name=tensor.name,
        doc_string=tensor.doc_string,
        metadata_props=dict(tensor.metadata_props),
    )


def external_files(path: Path) -> list[Path]:
    """Returns the files of weights beside a model, sorted by name."""
    return sorted({path.parent / os.path.normpath(tensor.location) for _, tensor in _external(read_graph(path))})


def stored_type(model: ir.Model) -> ir.DataType:
    """Returns the type of most bytes of a graph's floating-point weights."""
    sizes = Counter[ir.DataType]()
    for graph in model.graphs():
        for value in graph.initializers.values():
            if value.const_value is not None and value.const_value.dtype in TYPES:
                sizes[value.const_value.dtype] += value.const_value.nbytes
        for node in graph:
            for attribute in node.attributes.values():
                if attribute.type == ir.AttributeType.TENSOR and attribute.value.dtype in TYPES:
                    sizes[attribute.value.dtype] += attribute.value.nbytes
    return max(sizes, key=lambda kind: sizes[kind], default=ir.DataType.FLOAT)
