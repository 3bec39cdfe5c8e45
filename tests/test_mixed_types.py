"""Models with 16-bit weights that compute features in FP32, as code that is run with torch.autocast does."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import tiny_models
import torch
from layered_graphs import int8_model, run
from support import Outcome, tiny_recipe
from support import run as run_command
from tiny_layers import model_of, random
from torch import Tensor, nn
from torch.nn import functional

from trtconvert import runtime
from trtconvert.calib.dtype_checks import refuse_mixed_types
from trtconvert.diffusion_model import DiffusionModel, weights_in_float32
from trtconvert.export.float32 import widen
from trtconvert.mixed_types import OneType, compute_in_one_type
from trtconvert.models import NoiseSchedule, ddpm_betas, initial_noise, sample
from trtconvert.models.denoiser import DenoiserInType
from trtconvert.models.recorded_calls import relative_error

WIDTH, HEADS = 64, 2
SCHEDULE = NoiseSchedule(ddpm_betas(1000, "linear"))


class Timed(nn.Module):
    """Sinusoidal features of the timestep, and rotations of queries and keys, in FP32."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.time = nn.Linear(32, WIDTH), nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU())
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.out, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 32)

    def forward(self, x: Tensor, timestep: Tensor) -> Tensor:
        """x [B, N, 32], timestep [B] → [B, N, 32]."""
        angles = timestep[:, None] * torch.exp(-torch.arange(WIDTH // 2) / 4)
        h = self.embed(x) + self.time(torch.cat((angles.sin(), angles.cos()), 1))[:, None]
        q, k, v = self.qkv(self.norm(h.float())).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        turns = torch.einsum("n,d->nd", torch.arange(x.shape[1]).float(), torch.exp(-torch.arange(WIDTH // HEADS) / 8))
        q, k = (y * turns.cos() for y in (q, k))
        attended = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.head(h + self.out(attended))


def test_int8_layers_and_attention_get_tensors_of_the_type_of_the_weights():
    torch.manual_seed(0)
    model = model_of(Timed(), ("batch", 16, 32))
    refuse_mixed_types(model, torch.float16)
    made = int8_model(model, include=["*"], attention=True)
    assert {"qkv", "out"} <= made.layers.keys() and len(made.attention) == 1
    inputs = made.example()
    expected = made.torch(**inputs)
    got = run(made.graph(torch.float16), **made.example(torch.float16))
    assert got.dtype == torch.float16
    assert relative_error(got, expected) < 0.02


class Frequencies(Timed):
    """Timed, with learned frequencies of the timestep and a rotary table over positions that start at a thousand."""

    def __init__(self) -> None:
        super().__init__()
        self.fourier = nn.Parameter(random(1, WIDTH // 2, seed=1))
        self.scale = nn.Parameter(torch.ones(32))
        self.register_buffer("inv_freq", torch.exp(-torch.arange(8) / 3.0))

    def forward(self, x: Tensor, timestep: Tensor) -> Tensor:
        """x [B, N, 32], timestep [B] → [B, N, 32]."""
        x = x.float() * self.scale
        angles = timestep[:, None] @ self.fourier.abs()
        h = self.embed(x) + self.time(torch.cat((angles.sin(), angles.cos()), 1))[:, None]
        q, k, v = self.qkv(h).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        turns = (1000 + torch.arange(x.shape[1])).type_as(self.inv_freq)[:, None] * self.inv_freq[None]
        turned = torch.cat((turns.cos(), turns.sin()), 1).repeat(1, 2)
        attended = functional.scaled_dot_product_attention(q * turned, k * turned, v).transpose(1, 2).flatten(2)
        return self.head(h + self.out(attended))


def test_frequencies_stay_in_fp32():
    torch.manual_seed(0)
    model = model_of(Frequencies(), ("batch", 16, 32))
    assert weights_in_float32(model, torch.float16) == {"fourier", "inv_freq"}
    made = int8_model(model, include=["*"], attention=True)
    inputs = {name: x if name == "x" else 900 + x / 20 for name, x in made.example().items()}
    typed = {name: x.half() if name == "x" else x for name, x in inputs.items()}
    assert relative_error(run(made.graph(torch.float16), **typed), made.torch(**inputs)) < 0.02
    with torch.no_grad():
        exact = model.denoiser(**inputs)
        assert relative_error(DenoiserInType(model, torch.float16, {})(**inputs), exact) < 0.005
        with OneType():
            rounded = copy.deepcopy(model.denoiser).half()(**typed)
    assert relative_error(rounded, exact) > 0.03


class Image(Timed):
    """Over the rows of an image."""

    def forward(self, x: Tensor, timestep: Tensor) -> Tensor:
        return super().forward(x.flatten(1, 2), timestep)[:, None]


def _of_rows(denoiser: Callable[[], nn.Module]) -> DiffusionModel:
    torch.manual_seed(0)
    tiny = tiny_models.build()
    shape = ("batch", 1, 16, 32)
    return replace(
        tiny,
        denoiser=denoiser().eval(),
        inputs=(replace(tiny.inputs[0], shape=shape), tiny.inputs[1]),
        output=replace(tiny.output, shape=shape),
        sample=lambda denoiser, seeds, *, steps, solver: sample(
            denoiser, initial_noise(seeds, (1, 16, 32)), SCHEDULE, prediction="epsilon", solver=solver, steps=steps
        ),
    )


def _built(denoiser: Callable[[], nn.Module], dtype: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Outcome:
    module = ModuleType("an_entry_point_of_types")
    module.build = lambda: _of_rows(denoiser)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    recipe = tiny_recipe(
        folder,
        model={"source": f"{module.__name__}:build", "dtype": dtype},
        layers={"modes": "dynamic", "min_rows": 1},
        verify={"min_psnr": -50},
    )
    return run_command("build", recipe, "-o", folder / "bundle", "--cache", folder / "cache")


def test_a_build_in_16_bits_compares_the_export_with_the_same_arithmetic(tmp_path, monkeypatch):
    outcome = _built(Image, "float16", tmp_path, monkeypatch)
    assert outcome.exit_code == 0, outcome.output


def test_a_forward_that_fails_ends_the_conversion():
    linear = nn.Linear(4, 4).half()
    compute_in_one_type(linear)
    assert linear(torch.rand(2, 4)).dtype == torch.float16
    with pytest.raises(RuntimeError):
        linear(torch.rand(2, 3))
    with pytest.raises(RuntimeError, match="dtype"):
        functional.linear(torch.rand(2, 4), linear.weight)


A, B, ROWS, WEIGHT = random(2, 4, 8), random(2, 8, 4, seed=1), random(3, 8, seed=2), random(8, 8, seed=3)
HEADS_OF_ROWS = random(2, 2, 4, 8, seed=4)
FORMS: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...], torch.dtype]] = {
    "linear": (functional.linear, (ROWS, WEIGHT, WEIGHT[0]), torch.float16),
    "conv1d": (functional.conv1d, (A, random(8, 4, 3), WEIGHT[0]), torch.float16),
    "addmm": (torch.addmm, (WEIGHT[0], ROWS, WEIGHT), torch.float16),
    "matrix": (torch.matmul, (random(2, 4, 16), random(16, 8)), torch.float16),
    "frequencies": (torch.matmul, (A, WEIGHT), torch.float32),
    "attention": (functional.scaled_dot_product_attention, (HEADS_OF_ROWS,) * 3, torch.float16),
    "bmm": (torch.bmm, (A, B), torch.float32),
    "matmul": (lambda x, y: x @ y, (A, B), torch.float32),
    "einsum": (lambda x, y: torch.einsum("bij,bjk->bik", x, y), (A, B), torch.float32),
    "layer_norm": (lambda x, w: functional.layer_norm(x, (8,), w, w), (A, WEIGHT[0]), torch.float32),
    "group_norm": (lambda x, w: functional.group_norm(x, 2, weight=w, bias=w), (A, WEIGHT[0, :4]), torch.float32),
}
"""Functions with their arguments, the first in FP32 and the others in FP16, and the type of the result."""


@pytest.mark.parametrize("name", FORMS)
def test_functions_take_tensors_of_two_types(name):
    function, (first, *others), dtype = FORMS[name]
    with pytest.raises((RuntimeError, ValueError)):
        function(first, *(x.half() for x in others))
    with OneType():
        got = function(first, *(x.half() for x in others))
    assert got.dtype == dtype
    assert relative_error(got, function(first, *others)) < 2e-3


def test_modules_of_torch_with_attention_take_fp32():
    attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True).eval()
    x = random(2, 4, WIDTH)
    with torch.no_grad(), OneType():
        got = copy.deepcopy(attention).half()(x, x, x, need_weights=False)[0]
        assert relative_error(got, attention(x, x, x, need_weights=False)[0]) < 5e-3


class Bfloat16Parts(Image):
    """Computes attention and a convolution in BF16, whatever the type of the model: as wrappers of attention kernels do."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(32, 32, 3, padding=1)

    def forward(self, x: Tensor, timestep: Tensor) -> Tensor:
        q, k, v = self.qkv(self.embed(x[:, 0])).to(torch.bfloat16).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2).to(x.dtype)
        with torch.autocast("cpu", torch.bfloat16):
            mixed = self.conv(x[:, 0].mT).mT
        return (self.head(attended + (timestep / 1000).to(x.dtype)[:, None, None]) + mixed.to(x.dtype))[:, None]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_models_of_other_types_may_compute_parts_in_bfloat16(dtype, tmp_path, monkeypatch):
    outcome = _built(Bfloat16Parts, dtype, tmp_path, monkeypatch)
    assert outcome.exit_code == 0, outcome.output
    with runtime.load(tmp_path / "bundle") as bundle, torch.no_grad():
        model = _of_rows(Bfloat16Parts)
        inputs = model.example(1, {"batch": 3})
        assert relative_error(bundle["denoiser"](**inputs), model.denoiser(**inputs)) < 0.02


class Region(Timed):
    """Computes all layers in a region of autocast, on FP32 inputs, and queries and keys in FP32."""

    def forward(self, x: Tensor, timestep: Tensor) -> Tensor:
        """x [B, N, 32], timestep [B] → [B, N, 32]."""
        with torch.autocast("cpu", torch.bfloat16):
            h = self.embed(x) + timestep[:, None, None] / 1000
            q, k, v = self.qkv(h.float()).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
            attended = functional.scaled_dot_product_attention(q.float(), k.float(), v)
            out = self.out(attended.transpose(1, 2).flatten(2).float())
            assert attended.dtype == out.dtype == torch.bfloat16
        return self.head(out.float())


def test_int8_in_a_region_of_autocast_has_the_type_of_the_model():
    torch.manual_seed(0)
    made = int8_model(model_of(Region(), ("batch", 16, 32)), include=["*"], attention=True)
    assert {"qkv", "out"} <= made.layers.keys() and len(made.attention) == 1
    inputs = made.example()
    expected = made.torch(**inputs)
    with torch.no_grad():
        assert relative_error(expected, made.model.denoiser(**inputs)) < 0.03
    graph = made.graph()
    widen(graph)  # ONNX Runtime has no BF16 on a CPU
    assert relative_error(run(graph, **inputs), expected) < 0.02
