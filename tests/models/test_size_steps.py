"""Sizes that pipelines round, and sizes that make models run other operations."""

from __future__ import annotations

from typing import Any

import pytest
import tiny_pipelines
import torch
from converted_pipelines import recipe_of
from rich.console import Console
from tiny_pipelines import PIPELINES

from trtconvert import runtime
from trtconvert.bundle import ComponentRecord, TensorRecord
from trtconvert.cache import Cache
from trtconvert.errors import UserError
from trtconvert.models.diffusers import diffusers_model
from trtconvert.models.size_steps import steps_of
from trtconvert.pipeline import build
from trtconvert.progress import Reporter
from trtconvert.recipe import Range
from trtconvert.runtime.signature import Signature
from trtconvert.stages.shapes import narrowed

diffusers = pytest.importorskip("diffusers", reason="needs diffusers")


@pytest.mark.first_case
@pytest.mark.parametrize(
    ("name", "option", "sizes", "expected", "followed"),
    [
        (
            "flux",
            "height",
            [32, 36, 64],
            ["rounds height", "the same size for 36 as for 32", "from 32 in steps of 8"],
            [32, 32, 64],
        ),
        ("flux", "width", [36, 39, 70], ["the same size for 39 as for 36", "from 36 in steps of 8"], [36, 36, 68]),
        (
            "wan",
            "frames",
            [5, 6, 9],
            ["rounds frames", "the same size for 6 as for 5", "from 5 in steps of 4"],
            [5, 5, 9],
        ),
    ],
)
def test_a_size_that_a_pipeline_rounds_is_named_with_its_multiple(tmp_path, name, option, sizes, expected, followed):
    make, own = PIPELINES[name]
    make().save_pretrained(tmp_path)
    with pytest.raises(UserError) as error:
        diffusers_model(tmp_path, **{"tokens": 8, "batch": 1} | own | {option: sizes})
    for part in (*expected, f"got: {sizes}", f"give model.options.{option} as {followed}"):
        assert part in str(error.value)
    assert diffusers_model(tmp_path, **{"tokens": 8, "batch": 1} | own | {option: followed}).dims


def test_sizes_that_each_become_another_need_no_step(tmp_path):
    """The rounded sizes are still a range."""
    tiny_pipelines.flux().save_pretrained(tmp_path)
    assert diffusers_model(tmp_path, tokens=8, batch=1, width=32, height=[32, 47, 66]).dims["height"] == (16, 20, 32)


def test_steps_are_looked_for_where_sizes_vary():
    calls = []

    def run(sizes):
        calls.append(dict(sizes))
        return [(sizes["tokens"] % 6 == 0, sizes["height"] % 4 == 0)]

    dims = {"batch": (1, 2, 4), "height": (4, 8, 16), "tokens": (6, 12, 24), "width": (8, 8, 8)}
    assert steps_of(run, dims) == {"height": 4, "tokens": 6}
    assert all(call["batch"] == 2 and call["width"] == 8 for call in calls)


@pytest.fixture(scope="module")
def unet(tmp_path_factory):
    """A U-Net that halves its latents once; four pixels are a row of latents."""
    folder = tmp_path_factory.mktemp("unet")
    tiny_pipelines.stable_diffusion().save_pretrained(folder / "pipeline")
    return folder


def loaded(folder, **options: Any):
    return diffusers_model(folder / "pipeline", **{"tokens": 8, "batch": 1, "width": 32} | options)


def test_the_step_of_a_unet_is_found(unet):
    assert loaded(unet, height=[32, 32, 64]).steps == {"height": 2}
    assert loaded(unet, height=32).steps == {}


@pytest.mark.parametrize(
    ("name", "options", "steps"),
    [
        ("flux", {"height": [32, 32, 64]}, {}),  # one more row of tokens
        ("stable_diffusion_3", {"height": [32, 48, 64]}, {"height": 2}),  # patches of two rows
    ],
)
def test_the_steps_of_transformers_are_their_patches(tmp_path, name, options, steps):
    make, own = PIPELINES[name]
    make().save_pretrained(tmp_path)
    assert diffusers_model(tmp_path, **{"tokens": 8, "batch": 1} | own | options).steps == steps


@pytest.mark.first_case
@pytest.mark.parametrize(("sizes", "fitting"), [([40, 48, 64], [48, 48, 64]), ([32, 48, 56], [32, 48, 48])])
def test_a_range_that_begins_or_ends_between_steps_is_refused(tmp_path, sizes, fitting):
    """A U-Net that halves its latents twice: 16 pixels are a row of the smallest ones, and pipelines take steps of 8 pixels."""
    pipe = tiny_pipelines.stable_diffusion()
    deeper = diffusers.UNet2DConditionModel(
        block_out_channels=(32, 64, 64),
        layers_per_block=1,
        sample_size=8,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=32,
        attention_head_dim=1,
        norm_num_groups=8,
    )
    pipe.register_modules(unet=deeper)
    pipe.save_pretrained(tmp_path / "pipeline")
    with pytest.raises(UserError) as error:
        loaded(tmp_path, height=sizes)
    for part in (f"between steps of 16 from a height of {sizes[1]}", f"got: {sizes}", f"options.height as {fitting}"):
        assert part in str(error.value)
    model = loaded(tmp_path, height=fitting)
    assert model.steps == {"height": 4}


@pytest.mark.soak
def test_a_bundle_says_its_steps_and_takes_them_alone(unet):
    """A converted U-Net computes the same as the model at other heights in its steps, and refuses heights between them."""
    options = {"tokens": 8, "batch": 1, "width": 32, "height": [32, 32, 64]}
    recipe = recipe_of(unet, "stable_diffusion", {}, model={"options": options})
    build(recipe, unet / "bundle", Cache(unet / "cache"), Reporter(Console(quiet=True)))
    pipe = loaded(unet).components.caller.pipe
    with runtime.load(unet / "bundle") as bundle:
        component = bundle.manifest.components["denoiser"]
        assert component.steps == {"height": 2}
        dropped_in = bundle.as_diffusers()
        text, timestep = torch.randn(2, 8, 32), torch.tensor(500)
        for rows in (10, 14):
            x = torch.randn(2, 4, rows, 8)
            with torch.no_grad():
                expected = pipe.unet(x, timestep, text).sample
            got = dropped_in(x, timestep, text).sample
            assert (got - expected).norm() <= 0.05 * expected.norm()
        for rows in (9, 11):
            with pytest.raises(UserError, match=r"(?s)height 8\.\.16 in steps of 2.*remedy: .*between the steps"):
                dropped_in(torch.randn(2, 4, rows, 8), timestep, text)


def test_the_engine_section_may_not_ask_for_sizes_between_steps():
    dims = {"height": (8, 8, 16)}
    assert narrowed({"height": Range(min=8, opt=10, max=12)}, dims, "the model", {"height": 2})["height"] == (8, 10, 12)
    with pytest.raises(UserError, match=r"(?s)8 to 16 in steps of 2.*got: 8, 9, 12"):
        narrowed({"height": Range(min=8, opt=9, max=12)}, dims, "the model", {"height": 2})


def test_a_signature_takes_its_steps_alone():
    tensor = TensorRecord(name="sample", dtype="float32", shape=["batch", 4, "height"])
    component = ComponentRecord(
        onnx="x.onnx",
        inputs=[tensor],
        outputs=[tensor],
        dims={"batch": (1, 1, 2), "height": (8, 8, 16)},
        steps={"height": 4},
        engines=[],
    )
    signature = Signature(component)
    for rows in (8, 12, 16):
        assert signature.check([torch.zeros(1, 4, rows)])[1] == {"batch": 1, "height": rows}
    for rows in (9, 10, 20):
        with pytest.raises(UserError, match=r"(?s)batch 1\.\.2, 4, height 8\.\.16 in steps of 4\]"):
            signature.check([torch.zeros(1, 4, rows)])
