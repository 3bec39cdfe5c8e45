"""A pipeline whose attention processors write attention out, as in diffusers before torch had its function."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("diffusers", reason="needs diffusers")
import tiny_pipelines
from diffusers.models.attention_processor import AttnProcessor, SlicedAttnProcessor
from found_sites import sites_to_convert

from trtconvert.models.diffusers import diffusers_model
from trtconvert.recipe import AttentionSection


def test_sites_are_those_of_the_same_pipeline_with_fused_attention(tmp_path) -> None:
    """Frames, heads and samples share an axis in the motion modules, and are separated."""
    make, options = tiny_pipelines.PIPELINES["animatediff"]
    make().save_pretrained(tmp_path)
    model = diffusers_model(tmp_path, **options)
    fused, nothing = sites_to_convert(model, AttentionSection())
    assert len({site.folds for site in fused}) > 1 and not nothing

    (unet,) = (part for part in model.denoiser.modules() if hasattr(part, "set_attn_processor"))
    unet.set_attn_processor(AttnProcessor())
    unfused, nothing = sites_to_convert(model, AttentionSection())
    assert all(site.unfused for site in unfused) and not nothing
    assert [replace(site, unfused=False) for site in unfused] == fused

    in_slices = unet.mid_block.attentions[0].transformer_blocks[0].attn1
    in_slices.set_processor(SlicedAttnProcessor(1))
    converted, left = sites_to_convert(model, AttentionSection())
    assert len(converted) == len(fused) - 1
    assert {site.name.partition("#")[0].rpartition(".mid_block.")[2] for site in left} == {
        "attentions.0.transformer_blocks.0.attn1"
    }
    assert all("rows are not" in site.obstacle for site in left)
