"""Pipelines in use have the weights that they draw with when they are saved for a conversion, and other changes are refused."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_loras
import tiny_pipelines
import torch
from merged_loras import ATTENTION, BLOCK
from safetensors.torch import load_file
from torch import nn

from trtconvert import optimization, pipeline
from trtconvert.attention import replace_attention_with_int8
from trtconvert.errors import UserError
from trtconvert.models.in_memory import refuse_unsaved, save, weights_of
from trtconvert.models.loading import load_pipeline

AttnProcessor2_0 = pytest.importorskip("diffusers.models.attention_processor").AttnProcessor2_0
diffusers = pytest.importorskip("diffusers", reason="needs diffusers")
pytest.importorskip("peft", reason="needs peft")


def with_lora(folder: Path, *parts: str) -> Any:
    pipe = tiny_pipelines.with_text("stable_diffusion")
    scales = {"unet": 0.5, "text_encoder": 0.8}
    for name in parts or scales:
        part = getattr(pipe, name)
        layers = ATTENTION if name == "unet" else _of_text(pipe)
        file = tiny_loras.save(
            folder / f"{name}.safetensors", tiny_loras.layers_of(part, layers), tiny_loras.peft(f"{name}.")
        )
        pipe.load_lora_weights(file, adapter_name=name)
    pipe.set_adapters(list(parts or scales), [scales[name] for name in parts or scales])
    return pipe


def _of_text(pipe: Any) -> list[str]:
    return [name for name, _ in pipe.text_encoder.named_modules() if name.endswith("layers.0.self_attn.q_proj")]


def draw(pipe: Any) -> torch.Tensor:
    pipe.set_progress_bar_config(disable=True)
    seeded = torch.Generator().manual_seed(3)
    return pipe("a bird", height=32, width=32, num_inference_steps=2, output_type="pt", generator=seeded)[0]


USES: dict[str, Callable[[Any], Any]] = {
    "active LoRAs": lambda pipe: None,
    "fused LoRAs": lambda pipe: pipe.fuse_lora(),
    "LoRAs that are off": lambda pipe: pipe.disable_lora(),
    "joint projections": lambda pipe: (pipe.fuse_lora(), pipe.unload_lora_weights(), pipe.fuse_qkv_projections()),
    "a compiled model": lambda pipe: setattr(pipe, "unet", torch.compile(pipe.unet, backend="eager")),
}


@pytest.mark.parametrize("use", USES)
def test_a_saved_pipeline_draws_as_the_one_in_use(tmp_path, use):
    pipe = with_lora(tmp_path)
    plain = draw(tiny_pipelines.with_text("stable_diffusion"))
    USES[use](pipe)
    before, parts = draw(pipe), {name: part for name, part in pipe.components.items()}
    assert torch.equal(before, plain) == (use == "LoRAs that are off")
    refuse_unsaved(pipe, "unet")
    save(pipe, tmp_path / "pipeline")
    torch.testing.assert_close(draw(load_pipeline(tmp_path / "pipeline")), before, rtol=0, atol=1e-4)
    assert all(pipe.components[name] is part for name, part in parts.items())
    torch.testing.assert_close(draw(pipe), before)


def test_another_scale_of_a_lora_is_another_model(tmp_path):
    pipe = with_lora(tmp_path)
    key = functools.partial(optimization._key, pipe, "unet", {})
    first = key()
    assert key() == first
    pipe.set_adapters(["unet"], [0.6])
    assert key() != first


def _with_another_forward(pipe: Any) -> None:
    block = pipe.unet.mid_block
    forward = block.forward
    block.forward = lambda *inputs, **named: forward(*inputs, **named) * 2


def _with_another_layer(pipe: Any) -> None:
    class Other(nn.Linear):
        pass

    layer = pipe.unet.get_submodule(f"{BLOCK}.attn1")
    layer.to_q = Other(layer.to_q.in_features, layer.to_q.out_features, bias=False)


def _with_another_layer_compiled(pipe: Any) -> None:
    class Other(nn.Conv2d):
        pass

    block = pipe.unet.mid_block
    old = block.resnets[0].conv1
    block.resnets[0].conv1 = Other(old.in_channels, old.out_channels, old.kernel_size, padding=old.padding)
    pipe.unet.mid_block = torch.compile(block, backend="eager")


class Doubling(AttnProcessor2_0):
    def __call__(self, *inputs: Any, **named: Any) -> torch.Tensor:
        return super().__call__(*inputs, **named) * 2


CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "FreeU": (lambda pipe: pipe.enable_freeu(0.9, 0.2, 1.2, 1.4), "FreeU, in up_blocks.0.*disable_freeu"),
    "a hook": (
        lambda pipe: pipe.unet.mid_block.register_forward_hook(lambda module, inputs, output: output * 2),
        "a hook of forward, in mid_block.*hook.remove",
    ),
    "a forward": (_with_another_forward, "another forward, in mid_block"),
    "attention in INT8": (replace_attention_with_int8, r"attention of unet is INT8 already.*restore_attention\(pipe\)"),
    "a processor": (
        lambda pipe: pipe.unet.set_attn_processor(Doubling()),
        r"Doubling in place of \S+AttnProcessor2_0, in down_blocks\S+attn1.*set_default_attn_processor",
    ),
    "a layer in a compiled block": (_with_another_layer_compiled, "Other in place of .*at mid_block"),
    "a layer": (_with_another_layer, f"Other in place of torch.nn.modules.linear.Linear, at {BLOCK}.attn1.to_q"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changes_that_files_do_not_hold_are_refused(change):
    pipe = tiny_pipelines.with_text("stable_diffusion")
    refuse_unsaved(pipe, "unet")
    make, told = CHANGES[change]
    make(pipe)
    with pytest.raises(UserError, match=f"(?s){told}"):
        refuse_unsaved(pipe, "unet")


@pytest.mark.parametrize(
    ("use", "told"),
    [
        (lambda pipe: None, "saved with a LoRA that is not merged.*base_layer.*unload_lora_weights"),
        (USES["joint projections"], "saved with joint projections.*to_qkv.*unfuse_qkv_projections"),
    ],
)
def test_a_pipeline_that_was_saved_in_use_is_told_as_such(tmp_path, use, told):
    pipe = with_lora(tmp_path, "unet")
    use(pipe)
    pipe.save_pretrained(tmp_path / "pipeline")
    with pytest.raises(UserError, match=f"(?s){told}"):
        load_pipeline(tmp_path / "pipeline")


def test_weights_of_a_model_that_is_not_in_use_are_its_own():
    unet = tiny_pipelines.unet()
    state = unet.state_dict()
    assert all(torch.equal(x, state[name]) for name, x in weights_of(unet).items())


def test_weights_of_compiled_blocks_are_saved_under_their_own_names(tmp_path):
    pipe = tiny_pipelines.stable_diffusion()
    state = dict(pipe.unet.state_dict())
    pipe.unet.mid_block = torch.compile(pipe.unet.mid_block, backend="eager")
    refuse_unsaved(pipe, "unet")
    save(pipe, tmp_path)
    saved = load_file(tmp_path / "unet" / "diffusion_pytorch_model.safetensors")
    assert saved.keys() == state.keys() and all(torch.equal(x, state[name]) for name, x in saved.items())


def test_sizes_hold_beside_options_of_a_recipe():
    sections = optimization._merged({"model": {"options": {"prompts": ["a cat"]}}}, {"height": 64}, "cpu", False)
    assert sections["model"]["options"] == {"prompts": ["a cat"], "height": 64}


def test_a_conversion_computes_in_fp32_on_the_cpu_whatever_the_program_does(tmp_path, monkeypatch):
    seen = []

    def build(*_: Any) -> None:
        seen.append(torch.ones(1, 1))
        seen.append(seen[0] @ seen[0])
        raise KeyboardInterrupt

    monkeypatch.setattr(pipeline, "build", build)
    pipe = tiny_pipelines.with_text("stable_diffusion")
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"), torch.autocast("cpu", torch.bfloat16), pytest.raises(KeyboardInterrupt):
            optimization.optimize(pipe, tmp_path, device="cpu", quiet=True)
        assert torch.get_default_dtype() == torch.bfloat16
    finally:
        torch.set_default_dtype(torch.float32)
    assert [(x.dtype, x.device.type) for x in seen] == [(torch.float32, "cpu")] * 2
