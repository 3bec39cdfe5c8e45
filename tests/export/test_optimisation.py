"""The optimiser of all exports."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import onnx
import onnx_ir as ir
import pytest
import torch
from torch import nn
from torch.fx.experimental.symbolic_shapes import ConstraintViolationError

from trtconvert.diffusion_model import InputSpec
from trtconvert.errors import UserError
from trtconvert.export.optimisation import optimise
from trtconvert.export.torch_export import exported_to_onnx


def program(length: int) -> torch.onnx.ONNXProgram:
    """A chain of operations whose result's halves are added."""
    chain = "\n".join(f"x{n + 1} = Sin(x{n})" for n in range(length))
    text = f"""
        <ir_version: 10, opset_import: ["": 20]>
        chain (float[2, 16] x0) => (float[2, 8] y)
        <int64[1] zero = {{0}}, int64[1] half = {{8}}, int64[1] end = {{16}}, int64[1] axis = {{1}}> {{
            {chain}
            second = Slice(x{length}, half, end, axis)
            first = Slice(x{length}, zero, half, axis)
            y = Add(first, second)
        }}"""
    model = ir.from_proto(onnx.shape_inference.infer_shapes(onnx.parser.parse_model(text)))
    return torch.onnx.ONNXProgram(model, None)  # pyright: ignore[reportArgumentType]


def kinds(of: torch.onnx.ONNXProgram) -> list[str]:
    return [node.op_type for node in of.model.graph]


def test_result_equals_that_of_onnxscript_alone():
    ours, theirs = program(5), program(5)
    optimise(ours)
    theirs.optimize()
    assert kinds(ours) == kinds(theirs)
    assert "Split" in kinds(ours)  # by the pattern with two outputs


def test_one_export_runs_at_a_time(monkeypatch):
    """Exports replace functions of torch and onnxscript, for all threads; two at once failed in torch.export."""
    both, running, most = threading.Barrier(2), 0, 0

    def counted(*_: object, **__: object) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        with suppress(threading.BrokenBarrierError):
            both.wait(0.2)
        running -= 1
        raise ConstraintViolationError("seen")

    def export(_: int) -> None:
        spec = InputSpec("x", "float32", (2, 3))
        with pytest.raises(UserError, match="seen"):
            exported_to_onnx(nn.Tanh(), {"x": torch.ones(2, 3)}, [spec], ["y"], {}, title="", prefix="", remedy="")

    monkeypatch.setattr(torch.onnx, "export", counted)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(export, range(2)))
    assert most == 1


def test_its_work_grows_with_the_graph_and_not_with_its_square(monkeypatch):
    asked = 0
    identifier = ir.Node.op_identifier

    def counted(node: ir.Node) -> tuple[str, str, str]:
        nonlocal asked
        asked += 1
        return identifier(node)

    monkeypatch.setattr(ir.Node, "op_identifier", counted)

    def work(length: int) -> int:
        nonlocal asked
        asked = 0
        optimise(program(length))
        return asked

    assert work(800) < 5 * work(200)
