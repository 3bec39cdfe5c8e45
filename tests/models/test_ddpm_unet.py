"""The U-Net of DDPM: names and sizes of the published model, its computation, and the checkpoints that it loads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from trtconvert.errors import UserError
from trtconvert.models.ddpm import ddpm_model
from trtconvert.models.ddpm_unet import IMAGE_SHAPE, DDPMUNet, build, load, timestep_embedding

TINY = {"channels": 32, "multipliers": (1, 2), "blocks": 1, "attention": (1,), "dropout": 0.0}


def tiny(seed: int = 0) -> DDPMUNet:
    torch.manual_seed(seed)
    return build(**TINY).eval().requires_grad_(False)


def published_names() -> dict[str, list[int]]:
    """Returns names and shapes of the weights in the published CIFAR-10 checkpoint, level by level."""
    shapes: dict[str, list[int]] = {}

    def layer(name: str, *weight: int) -> None:
        shapes[f"{name}.weight"], shapes[f"{name}.bias"] = list(weight), [weight[0]]

    def block(name: str, inputs: int, outputs: int) -> None:
        layer(f"{name}.norm1", inputs)
        layer(f"{name}.conv1", outputs, inputs, 3, 3)
        layer(f"{name}.temb_proj", outputs, 512)
        layer(f"{name}.norm2", outputs)
        layer(f"{name}.conv2", outputs, outputs, 3, 3)
        if inputs != outputs:
            layer(f"{name}.nin_shortcut", outputs, inputs, 1, 1)

    def attention(name: str) -> None:
        layer(f"{name}.norm", 256)
        for part in ("q", "k", "v", "proj_out"):
            layer(f"{name}.{part}", 256, 256, 1, 1)

    layer("temb.dense.0", 512, 128)
    layer("temb.dense.1", 512, 512)
    layer("conv_in", 128, 3, 3, 3)
    for level, (first, second) in enumerate([(128, 128), (128, 256), (256, 256), (256, 256)]):
        block(f"down.{level}.block.0", first, second)
        block(f"down.{level}.block.1", second, second)
    for level, width in enumerate([128, 256, 256]):
        layer(f"down.{level}.downsample.conv", width, width, 3, 3)
    block("mid.block_1", 256, 256)
    attention("mid.attn_1")
    block("mid.block_2", 256, 256)
    for level, (inputs, width) in enumerate(
        [((384, 256, 256), 128), ((512, 512, 384), 256), ((512, 512, 512), 256), ((512, 512, 512), 256)]
    ):
        for at, size in enumerate(inputs):
            block(f"up.{level}.block.{at}", size, width)
    for level in (1, 2, 3):
        layer(f"up.{level}.upsample.conv", 256, 256, 3, 3)
    for name in ("down.1.attn.0", "down.1.attn.1", "up.1.attn.0", "up.1.attn.1", "up.1.attn.2"):
        attention(name)
    layer("norm_out", 128)
    layer("conv_out", 3, 128, 3, 3)
    return shapes


def test_names_and_shapes_are_those_of_the_published_checkpoint():
    with torch.device("meta"):
        model = build()
    assert {name: list(x.shape) for name, x in model.state_dict().items()} == published_names()
    assert sum(x.numel() for x in model.parameters()) == 35_746_307
    assert model(torch.empty(2, *IMAGE_SHAPE, device="meta"), torch.empty(2, device="meta")).shape == (2, *IMAGE_SHAPE)


def test_timesteps_are_embedded_as_by_ddpm():
    at = timestep_embedding(torch.tensor([0, 7]), 8)
    frequencies = 10000.0 ** -(torch.arange(4) / 3)
    torch.testing.assert_close(at[0], torch.tensor([0.0] * 4 + [1.0] * 4))
    torch.testing.assert_close(at[1], torch.cat([(7 * frequencies).sin(), (7 * frequencies).cos()]))


def test_attention_and_padding_are_those_of_the_original():
    model = tiny()
    attention, down = model.mid.attn_1, model.down[0].downsample  # type: ignore[union-attr]
    x = torch.randn(2, 64, 4, 4)
    h = attention.norm(x)
    q, k, v = (project(h).flatten(2) for project in (attention.q, attention.k, attention.v))
    weights = (torch.einsum("bci,bcj->bij", q, k) * 64**-0.5).softmax(2)  # of queries i
    expected = x + attention.proj_out(torch.einsum("bcj,bij->bci", v, weights).view_as(x))
    torch.testing.assert_close(attention(x), expected, rtol=1e-4, atol=1e-5)
    y = torch.randn(1, 32, 8, 8)
    expected = F.conv2d(F.pad(y, (0, 1, 0, 1)), down.conv.weight, down.conv.bias, stride=2)  # type: ignore[union-attr]
    torch.testing.assert_close(down(y), expected)  # type: ignore[operator]


def plain(state: dict[str, Tensor], other: dict[str, Tensor]) -> Any:
    return state


def ddim_list(state: dict[str, Tensor], other: dict[str, Tensor]) -> Any:
    optimizer = {"state": {0: {"step": 3, "exp_avg": torch.ones(2)}}, "param_groups": [{"lr": 1e-4}]}
    return [{f"module.{name}": x for name, x in other.items()}, optimizer, 7, 1000, state]


def list_without_averages(state: dict[str, Tensor], other: dict[str, Tensor]) -> Any:
    return [{f"module.{name}": x for name, x in state.items()}, {"state": {}, "param_groups": []}, 7, 1000]


def under_ema(state: dict[str, Tensor], other: dict[str, Tensor]) -> Any:
    return {"model": other, "ema": {"shadow": state}, "step": 5}


def half_under_state_dict(state: dict[str, Tensor], other: dict[str, Tensor]) -> Any:
    return {"state_dict": {name: x.half() for name, x in state.items()}}


@pytest.mark.parametrize("wrap", [plain, ddim_list, list_without_averages, under_ema, half_under_state_dict])
def test_checkpoints_of_training_scripts_load(tmp_path: Path, wrap: Callable[..., Any]):
    wanted = tiny()
    torch.save(wrap(wanted.state_dict(), tiny(1).state_dict()), tmp_path / "model-790000.ckpt")
    loaded = load(tmp_path / "model-790000.ckpt")
    x, t = torch.randn(2, 3, 8, 8), torch.tensor([3, 999])
    tolerance = 1e-2 if wrap is half_under_state_dict else 0.0
    torch.testing.assert_close(loaded(x, t), wanted(x, t), rtol=tolerance, atol=tolerance)
    assert not loaded.training


def test_safetensors_load(tmp_path: Path):
    wanted = tiny()
    save_file(wanted.state_dict(), tmp_path / "unet.safetensors")
    x, t = torch.randn(1, 3, 8, 8), torch.tensor([500.0])
    assert torch.equal(load(tmp_path / "unet.safetensors")(x, t), wanted(x, t))


@pytest.mark.parametrize(
    ("checkpoint", "said"),
    [
        ({"down_blocks.0.resnets.0.conv1.weight": torch.ones(1)}, "UNet2DModel of diffusers"),
        ({"state_dict": {"input_blocks.0.0.weight": torch.ones(1)}}, "guided-diffusion"),
        ({"model": {"module.all_modules.0.weight": torch.ones(1)}}, "score SDE"),
        ({"some.weight": torch.ones(1)}, "some.weight"),
        ({"epoch": 3}, "dict of epoch"),
        ([], "dict of nothing"),
        (torch.ones(3), "Tensor of nothing"),
    ],
)
def test_another_layout_is_named(tmp_path: Path, checkpoint: Any, said: str):
    torch.save(checkpoint, tmp_path / "x.ckpt")
    with pytest.raises(UserError, match=said):
        load(tmp_path / "x.ckpt")


def missing(state: dict[str, Tensor]) -> None:
    del state["mid.block_1.conv1.weight"]


def further(state: dict[str, Tensor]) -> None:
    state["class_embedding.weight"] = torch.ones(10, 128)


def of_another_shape(state: dict[str, Tensor]) -> None:
    state["conv_out.weight"] = torch.ones(6, 32, 3, 3)


def not_finite(state: dict[str, Tensor]) -> None:
    state["norm_out.weight"] = state["norm_out.weight"].clone().fill_(torch.nan)


def of_integers(state: dict[str, Tensor]) -> None:
    state["conv_out.bias"] = state["conv_out.bias"].to(torch.int32)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (missing, "1 missing, mid.block_1.conv1.weight"),
        (further, "1 more, class_embedding.weight"),
        (of_another_shape, r"\[6, 32, 3, 3\]"),
        (not_finite, "32 of 32 are NaN or Inf"),
        (of_integers, "torch.int32"),
    ],
)
def test_weights_that_do_not_fit_are_named(tmp_path: Path, spoil: Callable[[dict[str, Tensor]], None], said: str):
    state = dict(tiny().state_dict())
    spoil(state)
    torch.save(state, tmp_path / "x.ckpt")
    with pytest.raises(UserError, match=said):
        load(tmp_path / "x.ckpt")


def test_a_missing_file_is_named(tmp_path: Path):
    with pytest.raises(UserError, match="no such file"):
        load(tmp_path / "no.ckpt")


def test_images_have_the_size_of_the_recipe_and_the_channels_of_the_weights(tmp_path: Path):
    grey = build(**TINY, image_channels=1)
    torch.save(grey.state_dict(), tmp_path / "x.ckpt")
    model = ddpm_model(tmp_path / "x.ckpt", size=8)
    assert model.inputs[0].shape == ("batch", 1, 8, 8)
    assert model.sample(model.denoiser, [0, 1], steps=1, solver="ddim").shape == (2, 1, 8, 8)
    with pytest.raises(UserError, match="a multiple of 2, because its levels halve images 1 times"):
        ddpm_model(tmp_path / "x.ckpt", size=7)
