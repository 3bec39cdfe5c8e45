"""`trtconvert analyze`: figures, verdicts with their reasons, the table, the schema and the page."""

from __future__ import annotations

import json

import pytest
import torch
from stored_models import IN_FP32, IN_INT8, save, save_pipeline, weights
from support import refusal, run

from trtconvert.evaluate.weights_page import render
from trtconvert.weights.analysis import Analysis, Rules, by_name
from trtconvert.weights.sources import StoredTensor


def analysed(model, tmp_path):
    outcome = run("analyze", model, "-o", tmp_path / "a.json")
    assert outcome.exit_code == 0, outcome.output
    return Analysis.model_validate_json((tmp_path / "a.json").read_text(encoding="utf-8")), outcome.output


def test_figures_of_each_tensor(tmp_path):
    before = weights()
    found, output = analysed(save(tmp_path / "m", before), tmp_path)
    by_path = {tensor.name: tensor for tensor in found.tensors}
    assert by_path.keys() == before.keys()
    x, report = before["blocks.0.mlp.fc1.weight"].float(), by_path["blocks.0.mlp.fc1.weight"]
    assert (report.shape, report.elements, report.bytes, report.dtype) == ((300, 203), 60_900, 121_800, "bfloat16")
    assert report.bytes_after == report.bytes_int8 == 60_900 + 4 * 3 * 2
    assert report.blocks is not None and (report.blocks.rows, report.blocks.columns) == (3, 2)
    assert report.blocks.amax_max == float(x.abs().amax())
    assert report.blocks.rms_median == pytest.approx(0.05, rel=0.1)
    step = x.abs().amax() / 127
    error = float(((x / step).round() * step - x).norm() / x.norm())
    assert report.quality["tensor"].relative_error == pytest.approx(error, rel=1e-3)
    assert report.quality["tensor"].sqnr == pytest.approx(-20 * torch.tensor(error).log10().item(), rel=1e-3)
    assert report.quality["channel"].relative_error < report.quality["tensor"].relative_error
    assert sum(report.histogram) == 60_900
    assert {name for name, t in by_path.items() if t.verdict.stored == "int8"} == IN_INT8
    assert {name for name, t in by_path.items() if t.verdict.stored == "fp32"} == IN_FP32
    assert all(tensor.verdict.reason for tensor in found.tensors)
    assert found.in_int8 == sum(before[name].numel() for name in IN_INT8)
    for text in (f"{found.parameters:,} parameters", f"{found.in_int8:,}", "less", "final layer", "8"):
        assert text in output


def test_tensors_that_are_not_finite_are_listed(tmp_path):
    tensors = weights()
    tensors["blocks.0.mlp.fc1.weight"][0, :3] = torch.nan
    found, output = analysed(save(tmp_path / "m", tensors), tmp_path)
    report = next(tensor for tensor in found.tensors if tensor.nonfinite)
    assert (report.nonfinite, report.quality, report.verdict.stored) == (3, {}, "kept")
    assert "1 tensors with NaN or Inf, blocks.0.mlp.fc1.weight" in output


def test_the_page_shows_every_tensor(tmp_path):
    save_pipeline(tmp_path / "p")
    found, _ = analysed(tmp_path / "p", tmp_path)
    page = (tmp_path / "a.html").read_text(encoding="utf-8")
    assert page == render(found)
    for tensor in found.tensors:
        assert f"<code>{tensor.name}</code>" in page
    for text in ("Distribution of each layer", "Error of each layer", "default-src 'none'"):
        assert text in page


@pytest.mark.parametrize(
    "tensors", [{"a": torch.arange(3)}, {"a.weight": torch.zeros(128, 128)}], ids=["none", "zeros"]
)
def test_models_with_nothing_to_draw(tmp_path, tensors):
    found, _ = analysed(save(tmp_path / "m", tensors), tmp_path)
    assert len(found.tensors) == 1


def test_names_of_tensors_are_no_markup(tmp_path):
    name = "<b>[bold]x.weight"
    _, output = analysed(save(tmp_path / "m", {name: torch.randn(128, 128)}), tmp_path)
    assert "[bold]" in output and "<b>" not in (tmp_path / "a.html").read_text(encoding="utf-8")


def test_the_schema_describes_the_file(tmp_path):
    schema = json.loads(run("schema", "analysis").output)
    found, _ = analysed(save(tmp_path / "m", weights()), tmp_path)
    assert schema["properties"].keys() == found.model_dump().keys()
    assert "recipe" not in json.dumps(schema).lower() and "attention" in run("schema").output


def test_files_that_cannot_be_written(tmp_path):
    save(tmp_path / "m", weights())
    refusal(run("analyze", tmp_path / "m", "-o", tmp_path / "a.txt"), ".json", "-o")
    (tmp_path / "b.html").mkdir()
    refusal(run("analyze", tmp_path / "m", "-o", tmp_path / "b.json"), "b.html")
    assert not (tmp_path / "b.json").exists()


@pytest.mark.parametrize(
    ("name", "shape", "stored"),
    [
        # Flux, Wan, Stable Diffusion, T5, CLIP, and single files: what is a norm, an embedding or the last layer, and what not.
        ("transformer_blocks.0.norm1.linear.weight", (18432, 3072), None),
        ("single_transformer_blocks.3.proj_out.weight", (3072, 15360), None),
        ("proj_out.weight", (64, 3072), "fp32"),
        ("transformer_blocks.0.attn.norm_q.weight", (128,), "fp32"),
        ("norm_out.linear.weight", (6144, 3072), "fp32"),
        ("blocks.0.ffn.net.0.proj.weight", (8960, 1536), None),
        ("down_blocks.0.resnets.0.norm1.weight", (320,), "fp32"),
        ("down_blocks.0.resnets.0.conv1.weight", (320, 320, 3, 3), None),
        ("down_blocks.0.resnets.0.time_emb_proj.weight", (320, 1280), None),
        ("model.diffusion_model.input_blocks.1.0.in_layers.0.weight", (320,), "fp32"),
        ("model.diffusion_model.input_blocks.1.0.in_layers.0.bias", (320,), "bf16"),
        ("weight", (320, 320), "bf16"),
        ("conv_out.weight", (4, 320, 3, 3), "fp32"),
        ("encoder.block.0.layer.0.SelfAttention.q.weight", (4096, 4096), None),
        ("shared.weight", (32128, 4096), "fp32"),
        ("encoder.block.0.layer.0.layer_norm.weight", (4096,), "fp32"),
        ("text_model.embeddings.token_embedding.weight", (49408, 768), "fp32"),
        ("model.diffusion_model.out.2.weight", (4, 320, 3, 3), "fp32"),
        ("model.diffusion_model.output_blocks.0.0.out_layers.3.weight", (1280, 1280, 3, 3), None),
        ("blocks.0.attn.to_out.0.bias", (3072,), "bf16"),
        ("model.layers.0.self_attn.o_proj.weight", (4096, 4096), None),
    ],
)
def test_names_of_published_models(name, shape, stored):
    tensor = StoredTensor(name, "", shape, torch.bfloat16, 0, lambda: torch.zeros(shape))
    verdict = by_name(tensor, Rules(), floating=True)
    assert (verdict and verdict.stored) == stored


def test_scales_that_take_more_than_int8_saves():
    thin = StoredTensor("thin.weight", "", (100_000, 1), torch.bfloat16, 0, lambda: torch.zeros(100_000, 1))
    verdict = by_name(thin, Rules(granularity="channel"), floating=True)
    assert verdict is not None and verdict.stored == "bf16" and "scales" in verdict.reason
    assert by_name(thin, Rules(), floating=True) is None
