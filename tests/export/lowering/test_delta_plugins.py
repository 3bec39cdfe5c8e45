"""Linear layers that quantise deltas as plugins: an evaluator of their C APIs against the specification."""

from __future__ import annotations

from functools import cached_property
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
import torch
from delta_layers import InOnnxRuntime, InTorch, delta_model, trajectory
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun
from tiny_layers import CHOSEN, Called, model_of, random
from torch import nn
from torch.nn import functional as F

from trtconvert.export.lowering.delta_plugins import QUANTISE_DELTAS, can_fuse_deltas, fuse_deltas
from trtconvert.export.lowering.delta_qdq import lower_deltas
from trtconvert.export.lowering.int8_layers import INT8_LINEAR
from trtconvert.export.lowering.layers import expand_layers, quantise_products
from trtconvert.export.lowering.native import lower_to_native
from trtconvert.export.nodes.attention import attention_nodes
from trtconvert.export.nodes.common import DOMAIN
from trtconvert.export.nodes.deltas import delta_nodes
from trtconvert.models.recorded_calls import relative_error as error

CLOSE = 1.35
"""How much larger an error against full precision may be than the specification's, of a step by itself: FP16 rounds on the
way, and falls on other sides of INT8's edges."""


def of_rows(numbers, x):
    """Expands values per sample to a column of rows."""
    return np.repeat(numbers, x.size // x.shape[-1] // len(numbers)).reshape(*x.shape[:-1], 1)


class QuantiseChangedRows(OpRun):
    """quantise_change.h."""

    op_domain = DOMAIN

    def _run(self, x, a_hat, scales, *given, factor, activation, place, **_):
        wide = torch.from_numpy(x.astype(np.float32))
        if activation:
            wide = F.gelu(wide, approximate={2: "none", 3: "tanh"}[activation])
        xhat = wide.numpy() * (given[0] if factor else np.float32(1))
        signed = of_rows(scales[:, place], x)
        scale, known = np.abs(signed), np.where(signed < 0, np.float32(0), a_hat.astype(np.float32))
        q = np.clip(np.rint((xhat - known) * (1 / scale)), -127, 127)
        return q.astype(np.int8).view(np.int32), signed, (known + q * scale).astype(a_hat.dtype)


class Int8Linear(OpRun):
    """int8_linear.h, with `changes`."""

    op_domain = DOMAIN

    def _run(self, x, *given, mode_set, activation, changes, **_):
        signed, weight, weight_scale, bias, residual = given
        assert changes and mode_set == 8 and not activation
        sums = x.view(np.int8).astype(np.float64) @ weight.view(np.int8).astype(np.float64).T
        known = np.where(signed < 0, bias, residual.astype(np.float32))
        return ((sums * np.abs(signed) * weight_scale + known).astype(residual.dtype),)


class InEvaluator(InOnnxRuntime):
    """A graph with plugins."""

    @cached_property
    def session(self):
        types = {onnx.TensorProto.FLOAT: "tensor(float)", onnx.TensorProto.FLOAT16: "tensor(float16)"}

        def named(values):
            return [
                SimpleNamespace(
                    name=value.name,
                    type=types.get(value.type.tensor_type.elem_type),
                    shape=[d.dim_value or d.dim_param for d in value.type.tensor_type.shape.dim],
                )
                for value in values
            ]

        graph, evaluator = self._proto.graph, ReferenceEvaluator(self._proto, new_ops=[QuantiseChangedRows, Int8Linear])
        return SimpleNamespace(
            run=evaluator.run, get_inputs=lambda: named(graph.input), get_outputs=lambda: named(graph.output)
        )


def lowered(made, dtype=torch.float16):
    """A graph with plugins, and the number of their layers."""
    graph = made.graph(dtype)
    expand_layers(graph)
    if attention_nodes(graph):
        lower_to_native(graph)
    assert can_fuse_deltas(graph) == (dtype == torch.float16)
    count = fuse_deltas(graph)
    assert not can_fuse_deltas(graph)
    lower_deltas(graph)
    quantise_products(graph)
    assert not delta_nodes(graph) and not graph.functions
    graph.graph.sort()
    return graph, count


@pytest.fixture(scope="module")
def changed():
    return delta_model(divisor=1.0)


def kinds(graph):
    return [node.op_type for node in graph.graph if node.domain == DOMAIN]


def test_a_trajectory_is_as_close_to_full_precision_as_the_specification(changed):
    graph, count = lowered(changed)
    operators = kinds(graph)
    assert count == operators.count(INT8_LINEAR) == len(CHOSEN) - 1  # the convolution is between Q and DQ
    assert operators.count(QUANTISE_DELTAS) == len(CHOSEN) - 3  # k and v read what q reads
    ours, theirs = InEvaluator(graph), InTorch(changed, torch.float16)
    for inputs in trajectory(changed, torch.float16):
        with torch.no_grad():
            full = changed.model.denoiser(inputs["x"].float(), inputs["timestep"])
        assert error(ours(**inputs), full) < CLOSE * error(theirs(**inputs), full)


def test_gelu_in_front_of_a_layer_is_computed_where_its_deltas_are(changed):
    graph, _ = lowered(changed)
    activations = [node.attributes["activation"].as_int() for node in graph.graph if node.op_type == QUANTISE_DELTAS]
    assert activations.count(2) == 1 and "Gelu" not in [node.op_type for node in graph.graph]


def test_samples_begin_one_by_one_whatever_their_caches_hold(changed):
    graph, _ = lowered(changed)
    steps = trajectory(changed, torch.float16)
    alone, both = InEvaluator(graph), InEvaluator(graph)
    for inputs in steps[:2]:
        alone(**inputs)
        both(**inputs)
    for cache in both.caches.values():
        cache[1] = torch.nan if cache.dim() > 1 else -torch.inf
    last = steps[-1]
    mixed = {"x": torch.stack([last["x"][0], steps[0]["x"][1]]), "timestep": torch.tensor([100.0, 900.0])}
    got, fresh = both(**mixed), InEvaluator(graph)(**steps[0])
    assert torch.equal(got[1], fresh[1]) and torch.equal(got[0], alone(**last)[0])


def test_caches_of_folded_samples_are_seen_as_rows():
    """Several rows per sample, with equalised inputs."""

    def windows(self, x):
        return self.layer(x.flatten(0, 1)).unflatten(0, (-1, 2))

    made = delta_model(
        model_of(Called(windows, layer=nn.Linear(16, 16)), ("batch", 2, 4, 16)), divisor=1.0, include=["layer"]
    )
    graph, count = lowered(made)
    assert count == 1 and "modiff.layer.o_hat.next" in [value.name for value in graph.graph.outputs]
    ours, theirs = InEvaluator(graph), InTorch(made, torch.float16)
    for timestep in (900.0, 500.0):
        inputs = {"x": random(2, 2, 4, 16).half() * timestep / 900, "timestep": torch.full((2,), timestep)}
        assert error(ours(**inputs), theirs(**inputs)) < 0.01


def test_caches_of_another_type_stay_between_q_and_dq(changed):
    assert lowered(changed, torch.float32)[1] == 0
