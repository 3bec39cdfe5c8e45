"""Counts plugins of group norms and sums, and replaces them by standard operators."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from trtconvert.export.lowering.group_norms import CHANNELS_LAST_ADD, GROUP_NORM


def named(model: ir.Model, op_type: str) -> list[ir.Node]:
    return [node for node in model.graph if node.op_type == op_type]


def flags(model: ir.Model, name: str) -> list[int]:
    return [node.attributes[name].as_int() for node in named(model, GROUP_NORM)]


def shifts(model: ir.Model) -> int:
    return sum(len(node.inputs) == 4 for node in named(model, GROUP_NORM))


def as_operators(model: ir.Model) -> ir.Model:
    """Replaces plugins by standard operators."""
    for node in [*named(model, GROUP_NORM), *named(model, CHANNELS_LAST_ADD)]:
        new = list[ir.Node]()

        def add(op_type: str, *inputs: ir.Value, new: list[ir.Node] = new, **attributes: object) -> ir.Value:
            new.append(ir.node(op_type, inputs, attributes))  # type: ignore[arg-type]
            new[-1].outputs[0].dtype = ir.DataType.INT64 if op_type == "Shape" else inputs[0].dtype
            return new[-1].outputs[0]

        def constant(values: object, dtype: ir.DataType = ir.DataType.INT64, new: list[ir.Node] = new) -> ir.Value:
            tensor = ir.tensor(np.array(values, dtype.numpy()), dtype)
            new.append(ir.node("Constant", [], {"value": tensor}))
            new[-1].outputs[0].dtype = dtype
            return new[-1].outputs[0]

        if node.op_type == GROUP_NORM:
            x, weight, bias, *shift = node.inputs
            groups, epsilon = node.attributes["groups"].as_int(), node.attributes["epsilon"].as_float()
            last = constant([1, 2])
            if shift:
                x = add("Add", x, add("Unsqueeze", *shift, constant([2, 3])))
            ones, zeros = (constant([number] * groups, x.dtype) for number in (1, 0))
            flat = add("Reshape", x, constant([0, groups, -1]))
            y = add("Reshape", add("InstanceNormalization", flat, ones, zeros, epsilon=epsilon), add("Shape", x))
            y = add("Mul", y, add("Unsqueeze", weight, last))
            y = add("Add", y, add("Unsqueeze", bias, last))
            if node.attributes["silu"].as_int():
                y = add("Mul", y, add("Sigmoid", y))
            if node.attributes["channels_last"].as_int():
                y = add("Transpose", y, perm=[0, 2, 3, 1])
        else:
            x, tokens = node.inputs
            y = add("Add", x, add("Transpose", tokens, perm=[0, 3, 1, 2]))
        y.type, y.shape = node.outputs[0].type, node.outputs[0].shape
        ir.convenience.replace_nodes_and_values(model.graph, node, [node], new, node.outputs, [y])
    return model
