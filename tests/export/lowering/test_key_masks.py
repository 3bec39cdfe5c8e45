"""Masks that become key masks: all forms that models write, those of pipelines, and masks that stay."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import tiny_models
import tolerances
import torch
from further_pipelines import CONVERTIBLE
from tiny_pipelines import PIPELINES, with_text
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from trtconvert.diffusion_model import InputSpec
from trtconvert.engine.attention_choice import site_plans
from trtconvert.export.lowering.function import lower_to_function
from trtconvert.export.lowering.key_masks import use_key_masks
from trtconvert.export.lowering.plugin import lower_to_plugin
from trtconvert.export.nodes.attention import attention_nodes, mask_of
from trtconvert.models.diffusers import diffusers_model
from trtconvert.models.recorded_calls import relative_error

HEADS, CHANNELS = 2, 32
WIDTH = HEADS * CHANNELS
NEVER = float("-inf")

Form = Callable[[Tensor], Tensor]


def repeated(mask: Tensor) -> Tensor:
    """[B, N] → [B, H, 1, N], as diffusers repeats masks over heads."""
    return mask[:, None].repeat_interleave(HEADS, 0).view(mask.shape[0], HEADS, 1, mask.shape[-1])


def filled(hidden: Tensor, number: float) -> Tensor:
    return torch.zeros(hidden.shape).masked_fill(hidden, number)


FINITE: dict[str, Form] = {
    "product": lambda kept: repeated((1 - kept.float()) * -10000.0),
    "product of booleans": lambda kept: repeated((1 - kept.bool().float()) * -10000.0),
    "difference": lambda kept: (kept.float()[:, None, None] - 1) * 1e9,
    "negated": lambda kept: -(1 - kept.float())[:, None, None].expand(-1, HEADS, -1, -1) * 5000.0,
    "filled": lambda kept: filled(~kept.bool()[:, None, None], torch.finfo(torch.float32).min),
    "filled after a repeat": lambda kept: (m := 1 - repeated(kept.float())).masked_fill(m.bool(), -60000.0),
    "hidden": lambda kept: repeated(kept.eq(0).float() * -2000.0),
}
"""Additive masks: a row without a visible key sees all keys."""

NEGATIVE: dict[str, Form] = {
    "infinite": lambda kept: filled(repeated(kept).eq(0), NEVER),
    "logarithm": lambda kept: repeated(kept.float().log()),
    "expanded": lambda kept: kept.bool()[:, None, None].expand(-1, HEADS, kept.shape[1], -1),
    "repeated": lambda kept: kept.bool()[:, None, None].repeat(1, HEADS, 1, 1),
    "chosen": lambda kept: torch.where(kept.bool()[:, None, None], 0.0, NEVER).expand(-1, -1, kept.shape[1], -1),
    "joined": lambda kept: repeated(torch.cat([torch.ones_like(kept[:, :1]), kept[:, 1:]], 1).bool()),
}
"""Boolean masks, and additive ones with infinite numbers: a row without a visible key is 0."""


def of_batch_and_head(kept: Tensor) -> Tensor:
    """Repeats the batch where diffusers repeats each sample: heads of one sample have masks of several."""
    return kept.bool().repeat(HEADS, 1).view(kept.shape[0], HEADS, 1, kept.shape[1])


def of_queries(kept: Tensor) -> Tensor:
    return kept.bool()[:, None, :, None].expand(-1, -1, -1, kept.shape[1])


def of_heads(kept: Tensor) -> Tensor:
    slopes = torch.tensor([1000.0, 2000.0])[:, None, None]
    return (kept.float()[:, None, None] - 1) * slopes


OTHERS: dict[str, Form] = {
    "queries": of_queries,
    "pairs": lambda kept: kept.bool()[:, None, None] & kept.bool()[:, None, :, None],
    "both": lambda kept: kept.bool()[:, None, None] & repeated(kept.eq(0)),
    "heads": of_heads,
    "order": of_batch_and_head,
    "weak": lambda kept: repeated(kept.float()) * -10.0,
    "rewards": lambda kept: repeated(kept.float() + 1),
    "three": lambda kept: repeated((kept.float() + kept.cumsum(1).clamp(max=1).float() - 2) * 5000.0),
    "not a number": lambda kept: (1 - kept.float())[:, None, None] * NEVER,
    "soft": lambda kept: kept.float().softmax(1)[:, None, None],
    "small": lambda kept: kept.bool()[:, None, None],
}


class Attend(nn.Module):
    def __init__(self, form: Form):
        super().__init__()
        self.form = form

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        heads = x.unflatten(2, (HEADS, CHANNELS)).transpose(1, 2)
        return scaled_dot_product_attention(heads, heads, heads, self.form(mask)).transpose(1, 2).flatten(2)


class Attends(nn.Module):
    """Attention with each of several masks, side by side."""

    def __init__(self, forms: dict[str, Form]):
        super().__init__()
        self.of = nn.ModuleDict({name: Attend(form) for name, form in forms.items()})

    def forward(self, x: Tensor, timestep: Tensor, kept: Tensor) -> Tensor:
        return torch.cat([attend(x, kept) for attend in self.of.values()], 2)


def traced(forms: dict[str, Form], kept: InputSpec | None = None) -> ir.Model:
    model = replace(
        tiny_models.build(),
        denoiser=Attends(forms).eval(),
        inputs=(
            InputSpec("x", "float32", ("batch", "tokens", WIDTH)),
            InputSpec("timestep", "float32", ("batch",)),
            kept or InputSpec("kept", "int64", ("batch", "tokens")),
        ),
        output=InputSpec("prediction", "float32", ("batch", "tokens", len(forms) * WIDTH)),
        dims={"batch": (1, 2, 4), "tokens": (4, 6, 12)},
    )
    return tiny_models.traced(model)


def masks(model: ir.Model) -> dict[str, ir.Value]:
    found = {site: mask_of(node) for site, node in attention_nodes(model).items()}
    return {site: mask for site, mask in found.items() if mask is not None}


def with_key_masks(model: ir.Model) -> ir.Model:
    """A copy whose nodes have bodies for their new masks."""
    after = model.clone()
    use_key_masks(after)
    lower_to_function(after)
    return after


def run(model: ir.Model, feeds: dict[str, np.ndarray]) -> Tensor:
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(None, {x.name: feeds[x.name] for x in session.get_inputs()})[0])


@pytest.fixture(scope="module")
def all_forms() -> ir.Model:
    return traced(FINITE | NEGATIVE)


def test_all_forms_become_key_masks(all_forms):
    """Nodes whose masks have the same root and values share one."""
    after = with_key_masks(all_forms)
    found = masks(after)
    assert len(found) == len(FINITE | NEGATIVE)
    for mask in found.values():
        assert mask.dtype == ir.DataType.BOOL and list(mask.shape) == ["batch", 1, 1, "tokens"]
    assert len({found[f"of.{name}"] for name in ("product", "difference", "negated")}) == 1
    assert found["of.product"] is not found["of.logarithm"]  # rows without a visible key differ


def test_samples_of_all_lengths_stay_the_same(all_forms):
    """The third sample sees no key: with finite numbers all of them."""
    after = with_key_masks(all_forms)
    generator = np.random.default_rng(0)
    kept = np.array([[1, 1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1, 0], [0, 0, 0, 0, 0, 0, 0], [0, 1, 0, 1, 1, 0, 1]])
    feeds = {"x": generator.standard_normal((4, 7, WIDTH), np.float32), "timestep": np.full(4, 500, np.float32)}
    before, got = (run(model, feeds | {"kept": kept}) for model in (all_forms, after))
    seen = run(all_forms, feeds | {"kept": np.ones_like(kept)})
    for index, name in enumerate(FINITE | NEGATIVE):
        ours, expected, of_all = (x[..., index * WIDTH :][..., :WIDTH] for x in (got, before, seen))
        assert torch.equal(ours[[0, 1, 3]], expected[[0, 1, 3]]), name
        if name == "joined":
            assert torch.equal(ours[2], expected[2])
        elif name in FINITE:
            assert torch.equal(ours[2], of_all[2]), name
        else:
            assert not ours[2].any() and not expected[2].any(), name


def test_other_masks_stay():
    model = traced(OTHERS)
    before = masks(model)
    assert len(before) == len(OTHERS)
    assert use_key_masks(model) == 0 and masks(model) == before


def test_floating_point_inputs_and_biases_of_positions_stay():
    """A floating-point input may hold weights."""
    bias = torch.randn(1, HEADS, 6, 6, generator=torch.Generator().manual_seed(0))
    forms: dict[str, Form] = {
        "weights": lambda kept: (1 - kept[:, None, None]) * -10000.0,
        "bias": lambda kept: bias[..., :1, :] - 1000,
    }
    model = traced(forms, InputSpec("kept", "float32", ("batch", "tokens")))
    model_masks = masks(model)
    assert use_key_masks(model) == 0 and masks(model) == model_masks


def test_the_plugin_is_timed_with_the_key_mask(all_forms):
    plans = site_plans(all_forms, [{"batch": (1, 2, 4), "tokens": (4, 6, 12)}])
    (case,) = plans["of.product"].cases
    assert case.mask == ((2, HEADS, 1, 6), ir.DataType.FLOAT)
    assert case.with_key_mask().mask == ((2, 1, 1, 6), ir.DataType.BOOL)
    (whole,) = plans["of.expanded"].cases
    assert whole.mask == ((2, HEADS, 6, 6), ir.DataType.BOOL) and whole.key_mask == (2, 1, 1, 6)
    model = traced({"small": OTHERS["small"]})
    (case,) = site_plans(model, [{"batch": (1, 2, 4), "tokens": (4, 6, 12)}])["of.small"].cases
    assert case.key_mask is None and case.with_key_mask() is case


@pytest.mark.parametrize(
    "name", ["pixart", *(pytest.param(name, marks=pytest.mark.soak) for name in ("ltx", "sana", "kandinsky3", "ltx_2"))]
)
def test_masks_of_pipelines(tmp_path, name):
    pipe, given = (
        (with_text(name), PIPELINES[name][1])
        if name in PIPELINES
        else (CONVERTIBLE[name].make(), CONVERTIBLE[name].options)
    )
    pipe.save_pretrained(tmp_path / "pipeline")
    options = {"tokens": 8, "prompts": ["a cat", "a dog"]} | dict(given)
    model = diffusers_model(tmp_path / "pipeline", **options)
    exported = tiny_models.traced(model)
    named = [spec.name for spec in model.inputs if spec.name.endswith("attention_mask")]
    feeds = {
        key: x.numpy() for key, x in model.example(0, {size: opt for size, (_, opt, _) in model.dims.items()}).items()
    }
    for key in named:
        feeds[key][...] = np.arange(8) < np.arange(3, 3 + len(feeds[key]))[:, None]
    after = with_key_masks(exported)
    assert relative_error(run(after, feeds), run(exported, feeds)) < tolerances.ROUNDED_TO_HALF
    lower_to_plugin(exported)
    found = masks(exported)
    assert found and len(set(found.values())) == len(named)
    for mask in found.values():
        assert mask.dtype == ir.DataType.BOOL and list(mask.shape) == ["batch", 1, 1, 8]
