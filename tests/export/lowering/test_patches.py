"""Patch embeddings as products: equal tokens and weights, and graphs that stay."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir
import pytest
import torch
from exports import export, run
from torch import Tensor, nn

from trtconvert.bundle import TensorRecord
from trtconvert.engine import tensorrt
from trtconvert.engine.builder import build_plan
from trtconvert.export.lowering.patches import multiply_patches
from trtconvert.recipe import EngineSection


class Embeds(nn.Module):
    """Like diffusers' transformers, for images or videos."""

    def __init__(self, patch: tuple[int, ...], **options: object) -> None:
        super().__init__()
        conv = nn.Conv2d if len(patch) == 2 else nn.Conv3d
        self.proj = conv(3, 8, patch, **({"stride": patch} | options))  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x).flatten(2).transpose(1, 2)


class ReadsPatchesTwice(Embeds):
    def forward(self, x: Tensor) -> Tensor:
        flat = self.proj(x).flatten(2)
        return flat.transpose(1, 2) + flat.sum()


class KeepsRows(Embeds):
    """Flattens one axis less, so that there are no rows of tokens."""

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x).flatten(1, 2).transpose(1, 2)


def exported(module: nn.Module, x: Tensor, **dims: int) -> ir.Model:
    program = export(module, x, **dims)
    program.optimize()
    return program.model


def operators(model: ir.Model) -> list[str]:
    return [node.op_type for node in model.graph]


@pytest.mark.first_case
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("patch", "size"), [((2, 2), (4, 6)), ((1, 1), (3, 5)), ((1, 2, 2), (3, 4, 6)), ((2, 1, 3), (4, 5, 3))]
)
def test_tokens_are_products_of_patches(patch, size, bias):
    module, x = Embeds(patch, bias=bias), torch.randn(2, 3, *size)
    model = exported(module, x)
    assert multiply_patches(model) == 1
    assert "Conv" not in operators(model) and operators(model).count("MatMul") == 1
    assert list(model.graph.outputs[0].shape) == list(module(x).shape)
    torch.testing.assert_close(run(model, x), module(x))
    assert multiply_patches(model) == 0


def test_batches_may_vary():
    module = Embeds((2, 2))
    model = exported(module, torch.randn(2, 3, 4, 4), batch=0)
    assert multiply_patches(model) == 1
    x = torch.randn(5, 3, 4, 4)
    torch.testing.assert_close(run(model, x), module(x))


@pytest.mark.first_case
@pytest.mark.parametrize(
    "module",
    [
        Embeds((2, 2), stride=1),
        Embeds((2, 2), stride=(2, 1)),
        Embeds((2, 2), padding=2),
        Embeds((2, 2), dilation=2),
        Embeds((4, 4)),  # of 6 columns two are left out
        ReadsPatchesTwice((2, 2)),
        KeepsRows((2, 2)),
    ],
    ids=["overlap", "overlap-columns", "padding", "dilation", "remainder", "read-twice", "rows"],
)
def test_other_convolutions_stay(module):
    x = torch.randn(2, 3, 8, 6)
    model = exported(module, x)
    assert multiply_patches(model) == 0
    torch.testing.assert_close(run(model, x), module(x))


def test_groups_stay():
    module, x = Embeds((2, 2)), torch.randn(2, 4, 4, 4)
    module.proj = nn.Conv2d(4, 8, 2, stride=2, groups=2)
    assert multiply_patches(exported(module, x)) == 0


def test_images_of_any_size_stay():
    """A convolution drops incomplete patches; a reshape would fail."""
    module = Embeds((2, 2))
    model = exported(module, torch.randn(2, 3, 4, 6), height=2)
    assert multiply_patches(model) == 0
    x = torch.randn(2, 3, 7, 6)
    torch.testing.assert_close(run(model, x), module(x))


@pytest.mark.parametrize("refittable", [False, True])
def test_engines_multiply_unless_their_weights_are_to_be_replaced(refittable):
    model = exported(Embeds((2, 2)), torch.randn(1, 3, 4, 4))
    lowered = tensorrt.lowered(model, [], EngineSection(refittable=refittable), [{}])
    assert ("Conv" in operators(lowered)) == refittable
    assert "Conv" in operators(model)


class Silent:
    def share(self, detail: str, done: float) -> None:
        pass

    def notice(self, text: str) -> None:
        pass


def test_tensorrt_takes_patches_of_videos():
    """With three axes of patches there are eight, as many as TensorRT's tensors may have. Its parser here is TensorRT-RTX's."""
    trt = pytest.importorskip("tensorrt_rtx_bindings", reason="needs the extra 'rtx'")
    model = exported(Embeds((1, 2, 2)), torch.randn(2, 3, 2, 4, 6), batch=0)
    assert multiply_patches(model) == 1
    assert max(len(node.outputs[0].shape or ()) for node in model.graph) == 8

    def for_ada(config):
        config.num_compute_capabilities = 1
        config.set_compute_capability(trt.ComputeCapability.SM89, 0)

    content = ir.to_proto(model).SerializeToString()
    inputs = [TensorRecord(name="x", dtype="float32", shape=["batch", 3, 2, 4, 6])]
    profiles = [{"batch": (1, 2, 4)}]
    plan = build_plan(
        trt, content, Path("m.onnx"), inputs, profiles, configure=for_ada, watch=Silent(), title="patches"
    )
    assert len(plan) > 1000
