"""Complex numbers as pairs of real ones: equal results in ONNX Runtime, and Qwen-Image."""

from __future__ import annotations

from dataclasses import replace

import onnx_ir as ir
import onnxruntime
import pytest
import tiny_models
import tolerances
import torch
from diffusers.models.transformers.transformer_qwenimage import QwenImageTransformer2DModel
from torch import Tensor, nn

from trtconvert.diffusion_model import InputSpec
from trtconvert.errors import UserError
from trtconvert.export.lowering.native import lower_to_native
from trtconvert.export.passes.complex_pairs import complex_as_pairs
from trtconvert.models.recorded_calls import relative_error

ANGLES = torch.arange(12.0)[:, None] * torch.tensor([1.0, 0.1, 0.01, 0.001])


class Turned(nn.Module):
    """x [B, N, 8] as complex numbers [B, N, 4], in one way or another."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.register_buffer("turns", torch.polar(torch.ones_like(ANGLES), ANGLES), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        z = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
        tokens = x.shape[1]
        if self.kind == "constant turns, cut and joined":
            first, second = self.turns.split([1, 3], dim=1)
            z = z * torch.cat([first[:tokens], second[1 : tokens + 1]], dim=-1).unsqueeze(0).expand(x.shape[0], -1, -1)
        elif self.kind == "computed turns":
            z = z * torch.polar(x[..., :4].exp(), x[..., 4:])
        elif self.kind == "sums and stacks":
            z = (
                torch.stack([z, self.turns[:tokens].to(torch.complex64) - z], dim=0)
                .unbind(0)[1]
                .transpose(1, 2)
                .reshape(z.shape)
            )
        elif self.kind == "a length":
            return z.abs()
        elif self.kind == "a number more":
            z = z + 1.0
        elif self.kind == "beside real ones":
            z = torch.cat([z, x], dim=-1)
        return torch.view_as_real(z).flatten(-2)


@pytest.mark.first_case
@pytest.mark.parametrize("kind", ["constant turns, cut and joined", "computed turns", "sums and stacks", "as it is"])
@pytest.mark.parametrize("tokens", [5, "any"])
def test_the_same_numbers(kind, tokens):
    module, example = Turned(kind), torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
    axes = {0: torch.export.Dim("batch", min=2, max=8)}
    if tokens == "any":
        axes[1] = torch.export.Dim("tokens", min=5, max=11)
    program = torch.export.export(module, (example,), dynamic_shapes=(axes,), strict=False)
    assert complex_as_pairs(program) > 0
    onnx = torch.onnx.export(program, (example,), input_names=["x"], verbose=False)
    session = onnxruntime.InferenceSession(onnx.model_proto.SerializeToString())
    for x in (example, torch.randn(3, 9 if tokens == "any" else 5, 8)):
        (out,) = session.run(None, {"x": x.numpy()})
        torch.testing.assert_close(torch.from_numpy(out), module(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "operation"), [("a length", "abs"), ("a number more", "add"), ("beside real ones", "cat")]
)
def test_an_unknown_operation_is_named(kind, operation):
    program = torch.export.export(Turned(kind), (torch.randn(2, 5, 8),))
    with pytest.raises(NotImplementedError, match=rf"aten\.{operation}\..* of complex numbers"):
        complex_as_pairs(program)


def test_real_programs_stay_as_they_are():
    program = torch.export.export(nn.Linear(8, 8), (torch.randn(2, 8),))
    before = str(program.graph)
    assert complex_as_pairs(program) == 0 and str(program.graph) == before


class Denoiser(nn.Module):
    """Calls `QwenImageTransformer2DModel` as its pipeline does, optionally with an unsupported operation."""

    def __init__(self, known: bool) -> None:
        super().__init__()
        self.known = known
        self.transformer = QwenImageTransformer2DModel(
            patch_size=2,
            in_channels=16,
            out_channels=4,
            num_layers=1,
            attention_head_dim=32,
            num_attention_heads=2,
            joint_attention_dim=16,
            axes_dims_rope=(8, 12, 12),
        )
        generator = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.2, generator=generator)

    def forward(self, x: Tensor, timestep: Tensor, text: Tensor) -> Tensor:
        if not self.known:
            x = x * torch.view_as_complex(x.float().unflatten(-1, (-1, 2))).abs().mean()
        return self.transformer(x, text, None, timestep / 1000, img_shapes=[[(1, 4, 4)]], return_dict=False)[0]


def described(known: bool):
    denoiser = Denoiser(known).eval().requires_grad_(False)
    shapes = {"x": (1, 16, 16), "timestep": (1,), "text": (1, 8, 16)}
    inputs = tuple(InputSpec(name, "float32", shape) for name, shape in shapes.items())
    return replace(
        tiny_models.build(), denoiser=denoiser, inputs=inputs, output=replace(inputs[0], name="out"), dims={}
    )


@pytest.mark.as_of(diffusers="0.42")
@pytest.mark.slow
@pytest.mark.first_case
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_qwen_image(dtype):
    model = described(known=True)
    traced = tiny_models.traced(model, dtype)
    assert lower_to_native(traced) == 1
    feed = {name: x if name == "timestep" else x.to(dtype) for name, x in model.example(0, {}).items()}
    session = onnxruntime.InferenceSession(ir.to_proto(traced).SerializeToString())
    (out,) = session.run(None, {name: x.numpy() for name, x in feed.items()})
    expected = model.denoiser(**{name: x.float() for name, x in feed.items()})
    limit = tolerances.SAME_ARITHMETIC if dtype == torch.float32 else tolerances.HALF_DENOISER
    assert relative_error(torch.from_numpy(out).float(), expected) < limit


@pytest.mark.as_of(diffusers="0.42")
def test_unsupported_operations_are_named():
    with pytest.raises(UserError, match=r"cannot be exported to ONNX(?s:.*)got: No ONNX function found for .*complex"):
        tiny_models.traced(described(known=False))
