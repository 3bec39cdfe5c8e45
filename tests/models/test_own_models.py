"""Models that users' functions make: unfit ones are refused before anything is computed, others become fit."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import tiny_models
import torch
from found_sites import sites_to_convert
from support import refusal, run, tiny_recipe
from torch import Tensor, nn

from trtconvert.calib.calibrate import parts_to_convert
from trtconvert.diffusion_model import DiffusionModel, InputSpec
from trtconvert.errors import UserError
from trtconvert.evaluate.grid import picture
from trtconvert.models import load
from trtconvert.recipe import AttentionSection, LayersSection, ModelSection


def loaded(monkeypatch, make: Callable[[], Any]) -> DiffusionModel:
    module = ModuleType("an_entry_point")
    module.build = make
    monkeypatch.setitem(sys.modules, "an_entry_point", module)
    return load(ModelSection(source="an_entry_point:build"))


def with_forward(forward: Callable[..., Any], **changes: Any) -> DiffusionModel:
    """Returns the tiny model with another forward, which gets the module's own as its first argument."""

    class Other(tiny_models.Tiny):
        pass

    Other.forward = lambda self, x, timestep: forward(super(Other, self).forward, x, timestep)
    return replace(tiny_models.build(), denoiser=Other().eval().requires_grad_(False), **changes)


def _by_name_alone() -> DiffusionModel:
    model = tiny_models.build()

    class Other(tiny_models.Tiny):
        def forward(self, x: Tensor, *, timestep: Tensor) -> Tensor:
            return super().forward(x, timestep)

    return replace(model, denoiser=Other())


def _in_another_order() -> DiffusionModel:
    model = tiny_models.build()
    return replace(model, inputs=model.inputs[::-1])


def _with_timestep(dtype: str, shape: tuple[int | str, ...]) -> DiffusionModel:
    model = tiny_models.build()
    return replace(model, inputs=(model.inputs[0], InputSpec("timestep", dtype, shape)))


def _traced() -> DiffusionModel:
    model = tiny_models.build()
    example = tuple(model.example(0, {"batch": 2}).values())
    return replace(model, denoiser=torch.jit.trace(model.denoiser, example, check_trace=False))


def _traced_inside() -> DiffusionModel:
    model = tiny_models.build()
    model.denoiser.qkv = torch.jit.trace(model.denoiser.qkv, torch.zeros(2, 16, 32), check_trace=False)
    return model


REFUSED: dict[str, tuple[Callable[[], DiffusionModel], tuple[str, ...]]] = {
    "a function": (lambda: replace(tiny_models.build(), denoiser=lambda x, timestep: x), ("no module", "function")),
    "TorchScript": (_traced, ("no module", "not TorchScript")),
    "TorchScript inside": (_traced_inside, ("not TorchScript", "qkv, a TopLevelTracedModule", "PYTORCH_JIT=0")),
    "names alone": (_by_name_alone, ("in their order", "too many positional arguments")),
    "another order": (_in_another_order, ("in their order", "x, timestep")),
    "another name": (
        lambda: replace(tiny_models.build(), timestep_input="sigma"),
        ("`timestep_input`", "one of x, timestep", "sigma"),
    ),
    "other types": (
        lambda: _with_timestep("int32", ("batch",)),
        ("the type of 'timestep'", "float32 or int64", "int32"),
    ),
    "other shapes": (
        lambda: _with_timestep("float32", ("batch", 1, 1, 1)),
        ("the shape of the timestep", "timestep[:, None]"),
    ),
    "two sizes": (lambda: replace(tiny_models.build(), dims={"batch": (1, 4)}), ("'batch' in `dims`", "(1, 4)")),
    "falling sizes": (lambda: replace(tiny_models.build(), dims={"batch": (4, 2, 1)}), ("(4, 2, 1)",)),
    "other sigmas": (
        lambda: replace(tiny_models.build(), timestep_max=1.0),
        ("`sigmas`", "1 numbers", "1000", "sigma.md"),
    ),
    "one name": (
        lambda: replace(tiny_models.build(), output=InputSpec("x", "float32", ("batch", 1, 4, 4))),
        ("the name of `output`", "another name than x, timestep"),
    ),
    "no sampler": (lambda: replace(tiny_models.build(), sample=None), ("`sample`", "NoneType")),
    "no weights": (
        lambda: replace(tiny_models.build(), denoiser=tiny_models.Tiny().to("meta")),
        ("has no weights", "qkv.weight", "meta device"),
    ),
    "other sizes": (lambda: replace(tiny_models.build(), dims={}), ("the shape of 'x'", "add 'batch' to `dims`")),
    "no names": (
        lambda: replace(tiny_models.build(), dims={"batch size": (1, 2, 4)}),
        ("a Python identifier", "'batch size'"),
    ),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_unfit_models_are_refused_as_they_are_loaded(fault, monkeypatch):
    make, told = REFUSED[fault]
    with pytest.raises(UserError) as error:
        loaded(monkeypatch, make)
    assert all(part in str(error.value) for part in ("an_entry_point:build", "remedy: ", *told)), error.value


def test_parameters_that_are_no_inputs_may_be_left_out(monkeypatch):
    """As `context` in `forward(x, timesteps, context=None, y=None)` of a model of classes."""

    class Other(tiny_models.Tiny):
        def forward(self, x: Tensor, timestep: Tensor, context: Tensor | None = None, label: Tensor | None = None):
            assert context is None and label is not None
            return super().forward(x, timestep) + label[:, None, None, None]

    tiny = tiny_models.build()
    inputs = (*tiny.inputs, InputSpec("label", "int64", ("batch",)))
    model = loaded(monkeypatch, lambda: replace(tiny, denoiser=Other(), inputs=inputs))
    assert len(sites_to_convert(model, AttentionSection())[0]) == 1


@pytest.mark.parametrize(
    ("wrap", "got"),
    [
        (lambda x: {"sample": x}, "dict"),
        (lambda x: (x, None), "tuple"),
        (lambda x: x[:, :, 1:], "a tensor [2, 1, 3, 4]"),
    ],
)
def test_other_results_than_the_described_prediction_are_refused(wrap, got, monkeypatch):
    model = loaded(monkeypatch, lambda: with_forward(lambda forward, *inputs: wrap(forward(*inputs))))
    with pytest.raises(UserError, match="does not give the prediction that it describes") as error:
        sites_to_convert(model, AttentionSection())
    assert f"got: {got}" in str(error.value)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_models_of_another_type_or_in_training_mode_are_evaluated_in_fp32(dtype, monkeypatch):
    def make() -> DiffusionModel:
        model = with_forward(lambda forward, x, t: nn.functional.dropout(forward(x, t), 0.5, model.denoiser.training))
        model.denoiser.to(dtype).train()
        return model

    model, exact = loaded(monkeypatch, make), tiny_models.build()
    inputs = exact.example(0, {"batch": 2})
    torch.testing.assert_close(model.denoiser(**inputs), exact.denoiser(**inputs), rtol=5e-3, atol=5e-3)


@pytest.mark.parametrize(
    "norm",
    [nn.utils.parametrizations.weight_norm, nn.utils.weight_norm, nn.utils.spectral_norm],
    ids=lambda f: f.__module__,
)
def test_layers_whose_weights_are_normalised_are_found(norm, monkeypatch):
    def make() -> DiffusionModel:
        model = tiny_models.build()
        norm(model.denoiser.qkv)
        return model

    made = make().denoiser.eval()
    model = loaded(monkeypatch, make)
    inputs = model.example(0, {"batch": 2})
    if norm is not nn.utils.spectral_norm:  # which begins with a random vector
        torch.testing.assert_close(model.denoiser(**inputs), made(**inputs))
    layers = parts_to_convert(model, AttentionSection(), LayersSection(min_rows=1)).layers
    assert "qkv" in [layer.name for layer in layers]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda images: images.expand(-1, 3, -1, -1).permute(0, 2, 3, 1), ("channels last", "movedim(-1, -3)")),
        (lambda images: images * float("nan"), ("full precision have numbers that are not finite", "32 of 32 are NaN")),
    ],
)
def test_samples_that_are_no_images_are_refused(change, told, monkeypatch, tmp_path):
    tiny, module = tiny_models.build(), ModuleType("an_entry_point")
    module.build = lambda: replace(tiny, sample=lambda *inputs, **named: change(tiny.sample(*inputs, **named)))
    monkeypatch.setitem(sys.modules, "an_entry_point", module)
    recipe = tiny_recipe(tmp_path, model={"source": "an_entry_point:build"}, attention={"modes": "precision"})
    refusal(run("build", recipe, "-o", tmp_path / "bundle", "--cache", tmp_path / "cache"), *told)


def test_samples_of_any_number_of_channels_are_shown():
    images = torch.rand(2, 8, 4, 4)
    assert picture(images[0]).getpixel((1, 2)) == (round(float(images[0, :, 2, 1].mean()) * 255),) * 3


@torch.compile(backend="eager")
def compiled(x: Tensor) -> Tensor:
    return nn.functional.scaled_dot_product_attention(x, x, x)


def test_attention_in_compiled_modules_and_functions_is_found(monkeypatch):
    class Block(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return compiled(x)

    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = torch.compile(Block(), backend="eager"), Block()
            self.second.compile(backend="eager")
            self.scale = nn.Parameter(torch.ones(()), requires_grad=False)

        def forward(self, x: Tensor, timestep: Tensor) -> Tensor:
            tokens = x.expand(-1, 2, -1, -1).repeat(1, 1, 1, 8) * timestep.reshape(-1, 1, 1, 1).to(x.dtype) / 1000
            return (self.first(tokens) + self.second(tokens))[:, :1, :, :4] * self.scale

    make = lambda: replace(tiny_models.build(), denoiser=torch.compile(Other(), backend="eager"))  # noqa: E731
    model = loaded(monkeypatch, make)
    assert [site.name for site in sites_to_convert(model, AttentionSection())[0]] == ["first", "second"]


def test_products_that_torchscript_calls_are_told(monkeypatch):
    """No function of torch calls them, so that they cannot be converted."""
    tiny = tiny_models.build()
    scripted = torch.jit.CompilationUnit("""
        def twice(x, y):
            return x @ (y @ y.transpose(-1, -2))
    """)
    silu = torch.jit.CompilationUnit("""
        def silu(x):
            return x * torch.sigmoid(x)
    """)

    class Other(nn.Module):
        def __init__(self, function: Callable[[Tensor], Tensor], inner: nn.Module) -> None:
            super().__init__()
            self.function, self.inner = function, inner

        def forward(self, x: Tensor, timestep: Tensor) -> Tensor:
            return self.inner(self.function(x), timestep)

    def found(function: Callable[[Tensor], Tensor], inner: nn.Module) -> int:
        model = replace(tiny, denoiser=Other(function, inner).eval())
        return len(sites_to_convert(model, AttentionSection())[0])

    with pytest.warns(RuntimeWarning, match=r"products in the model itself, .*got: aten\.bmm.*PYTORCH_JIT=0"):
        assert found(lambda x: scripted.twice(x, x), tiny.denoiser) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert found(silu.silu, tiny.denoiser) == 1
    with pytest.raises(UserError, match="and no attention beside them"):
        found(lambda x: scripted.twice(x, x), tiny_models.Tiny("none").requires_grad_(False))
