"""INT8 layers in engines of TensorRT-RTX: the compiler's choice, read from the text of a plan."""

from __future__ import annotations

import re
from pathlib import Path

import onnx_ir as ir
import pytest
import torch
from layered_graphs import int8_model
from rtx_builds import Watch, trt
from tiny_layers import Called, build, model_of
from torch import nn
from torch.nn import functional as F

from trtconvert.bundle import TensorRecord
from trtconvert.engine.builder import build_plan
from trtconvert.export.lowering.layers import expand_layers, quantise_products
from trtconvert.linear.modes import LayerMode

TENSOR = re.compile(r'tensor=\{.*? name="([^"]+)".*? type=(\w+)')
PRODUCT = re.compile(r'(?:fully_connected|corrltn)=\{ name="([^"]+)" output=\{[^}]*\} input=\{([^}]*)\}')


def plan_of(graph: ir.Model) -> bytes:
    """Builds for sm89 with x in FP16."""
    inputs = [
        TensorRecord(
            name=x.name,
            dtype="float16" if x.name == "x" else "float32",
            shape=[size if isinstance(size, int) else str(size) for size in x.shape],
        )
        for x in graph.graph.inputs
    ]

    def for_ada(config):
        config.num_compute_capabilities = 1
        config.set_compute_capability(trt.ComputeCapability.SM89, 0)

    content = ir.to_proto(graph).SerializeToString()
    profiles = [{"batch": (1, 2, 4)}]
    return bytes(
        build_plan(trt, content, Path("a.onnx"), inputs, profiles, configure=for_ada, watch=Watch(), title="here")
    )


def products_of(plan: bytes) -> dict[str, list[str]]:
    """Returns the types of the operands of each product, from the undocumented text of a plan."""
    text = plan.decode("latin-1")
    types = dict(TENSOR.findall(text))
    found = {
        name: [types.get(tensor, "") for tensor in re.findall(r'"([^"]+)"', inputs)[:2]]
        for name, inputs in PRODUCT.findall(text)
    }
    if not found:
        pytest.skip("this version of TensorRT-RTX does not tell its products in the plan")
    return found


def mlp():
    """Wide enough for products to be worth kernels of their own."""
    parts = {"a": nn.Linear(512, 2048), "b": nn.Linear(2048, 512)}
    denoiser = Called(lambda self, x: x + self.b(F.gelu(self.a(x))), **parts)
    return int8_model(model_of(denoiser, ("batch", 64, 512)), (LayerMode.STATIC,), include=["a", "b"])


@pytest.fixture(scope="module")
def plans():
    """Plans of an MLP, in INT8 and with the same weights in 16 bits."""
    model, found = mlp(), {}
    for exact in (True, False):
        graph = model.graph(torch.float16)
        expand_layers(graph, exact=exact)
        quantise_products(graph)
        found[exact] = plan_of(graph)
    return found


def test_products_of_an_mlp_are_int8_kernels(plans):
    assert list(products_of(plans[False]).values()) == [["int8", "int8"]] * 2


def test_the_plan_holds_the_weights_in_int8(plans):
    assert len(plans[True]) - len(plans[False]) > 0.8 * 2 * 512 * 2048  # one byte less per weight, and other kernels


def test_gelu_and_rounding_before_a_product_are_fused_into_one_kernel(plans):
    """One kernel computes GELU, factors and rounding to INT8."""
    names = set(re.findall(r"fqn=__myl_(\w+?)_0x", plans[False].decode("latin-1")))
    if not names:
        pytest.skip("this version of TensorRT-RTX does not tell its kernels in the plan")
    assert any("Erf" in name and name.endswith("RounCast") for name in names), names


def test_all_layers_of_a_model_are_int8_kernels_and_projections_of_one_tensor_are_joined():
    """With several timestep bins; the ends and the timestep embedding stay in 16 bits."""
    graph = int8_model(build(), (LayerMode.STATIC,) * 2).graph(torch.float16)
    expand_layers(graph)
    count = quantise_products(graph)
    found = products_of(plan_of(graph))
    in_int8 = [name for name, types in found.items() if types == ["int8", "int8"]]
    assert sum(len(name.split("+")) for name in in_int8) == count
    assert sorted(types for name, types in found.items() if name not in in_int8) == [["half", "half"]] * 3
    assert [len(name.split("+")) for name in in_int8 if "+" in name] == [3]
