"""LoRA files with parts for several denoisers, with unknown prefixes, and with one layer twice."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import tiny_loras
import torch
from merged_loras import ATTENTION, HALF, UNET, assert_close, copied, fresh, made, merged, written
from safetensors.torch import save_file
from support import run, tiny_recipe

from trtconvert.errors import UserError
from trtconvert.weights.lora_files import left_over

WAN = ["blocks.0.attn1.to_q", "blocks.1.attn2.to_out.0"]


def _of_two(folder: Path) -> tuple[Path, dict[str, dict]]:
    """Returns a file for both denoisers of Wan 2.2, and the part of each by name."""
    module = made("wan")
    file, layers, tensors = folder / "both.safetensors", {}, {}
    for seed, name in enumerate(["transformer", "transformer_2"]):
        layers[name] = {
            layer: tiny_loras.layer_of(module.get_parameter(f"{layer}.weight"), 10 * seed + place)
            for place, layer in enumerate(WAN)
        }
        tiny_loras.save(file, layers[name], tiny_loras.peft(f"{name}."))
        tensors |= copied(file)
    save_file(tensors, file)
    return file, layers


@pytest.mark.parametrize("name", ["transformer", "transformer_2"])
def test_each_denoiser_of_a_pipeline_gets_its_own_part(tmp_path, name):
    file, layers = _of_two(tmp_path)
    module = fresh("wan")
    deltas = {layer: of.delta() for layer, of in layers[name].items()}
    expected = tiny_loras.with_deltas(module.state_dict(), deltas, 1.0)
    merged(module, {"file": file}, root=name)
    assert_close(module.state_dict(), expected)


def test_a_denoiser_whose_name_is_not_known_gets_the_first_part(tmp_path):
    file, layers = _of_two(tmp_path)
    module = fresh("wan")
    deltas = {layer: of.delta() for layer, of in layers["transformer"].items()}
    expected = tiny_loras.with_deltas(module.state_dict(), deltas, 1.0)
    assert_close(merged(module, {"file": file}), expected)


def test_a_file_of_one_denoiser_is_for_the_one_that_it_is_merged_into(tmp_path):
    module = fresh("wan")
    layers = tiny_loras.layers_of(module, WAN)
    file = tiny_loras.save(tmp_path / "lora.safetensors", layers, tiny_loras.peft("transformer."))
    expected = tiny_loras.with_deltas(module.state_dict(), {n: layer.delta() for n, layer in layers.items()}, 1.0)
    merged(module, {"file": file}, root="transformer_2")
    assert_close(module.state_dict(), expected)


def test_a_file_of_the_second_denoiser_alone_is_not_for_the_first(tmp_path):
    module = fresh("wan")
    layers = tiny_loras.layers_of(module, WAN)
    file = tiny_loras.save(tmp_path / "lora.safetensors", layers, tiny_loras.peft("transformer_2."))
    with pytest.raises(
        UserError, match=r"(?s)nothing for this denoiser.*got: names of transformer_2 alone.*options\.denoiser"
    ):
        merged(module, {"file": file}, root="transformer")


def test_the_part_of_the_other_denoiser_is_told(tmp_path):
    file, _ = _of_two(tmp_path)
    ((path, missing),) = left_over([(file, "denoiser")])
    assert path == file
    assert missing == [
        "the denoiser that is not this recipe's (the first or transformer_2; a recipe of its own takes them)"
    ]
    layers = tiny_loras.layers_of(made("wan"), WAN)
    for prefix in ("transformer.", "transformer_2."):
        one = tiny_loras.save(tmp_path / "one.safetensors", layers, tiny_loras.peft(prefix))
        assert not [*left_over([(one, "denoiser")])]


@pytest.mark.parametrize(
    "prefix",
    [
        "model.diffusion_model.",
        "diffusion_model.",
        "base_model.model.diffusion_model.",
        "base_model.model.model.diffusion_model.",
    ],
)
def test_prefixes_of_checkpoints_are_known(tmp_path, prefix):
    module = fresh("stable_diffusion")
    layers = tiny_loras.layers_of(module, UNET)
    factor = 2.0 if prefix.startswith("base_model.") else 1.0
    (tmp_path / "adapter_config.json").write_text(json.dumps({"lora_alpha": factor * tiny_loras.RANK}))
    file = tiny_loras.save(tmp_path / "lora.safetensors", layers, tiny_loras.peft(prefix))
    expected = tiny_loras.with_deltas(module.state_dict(), {n: layer.delta() for n, layer in layers.items()}, factor)
    assert_close(merged(module, {"file": file}, root="unet"), expected)


@pytest.mark.parametrize(
    ("layout", "prefix"),
    [
        (tiny_loras.peft("net."), "net."),
        (tiny_loras.peft("model.inner.net."), "model.inner.net."),
        (tiny_loras.kohya("wrapped_net_"), "wrapped_net_"),
    ],
)
def test_an_unknown_prefix_is_told_as_such_and_its_remedy_works(tmp_path, layout, prefix):
    module = fresh("stable_diffusion")
    layers = tiny_loras.layers_of(module, UNET)
    file = tiny_loras.save(tmp_path / "lora.safetensors", layers, layout)
    told = rf"(?s)begin with '{prefix}', which is not known.*diffusion_model\..*fits \(4 of 4 layers\).*remedy: take '{prefix}'"
    with pytest.raises(UserError, match=told) as refused:
        merged(module, {"file": file})
    assert "for another model" not in str(refused.value)
    save_file({name.replace(prefix, "", 1): x for name, x in copied(file).items()}, tmp_path / "new.safetensors")
    deltas = {name: layer.delta() for name, layer in layers.items()}
    factor = HALF if "lora_down" in "".join(copied(file)) else 1.0
    expected = tiny_loras.with_deltas(module.state_dict(), deltas, factor)
    assert_close(merged(module, {"file": tmp_path / "new.safetensors"}), expected)


# One layer twice ------------------------------------------------------------------------------------------------------

_QUERY = ATTENTION[0]


_UP = re.compile(r"lora_A|(?<=lora[._])down"), lambda match: {"lora_A": "lora_B", "down": "up"}[match[0]]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (f"unet.{_QUERY}.lora_A.weight", f"unet.{_QUERY}.lora_down.weight"),
        (f"unet.{_QUERY}.lora_A.weight", f"unet.{_QUERY}.lora_A.other.weight"),
        (f"unet.{_QUERY}.lora_A.weight", f"unet.{_QUERY}.lora.down.weight"),
        (f"transformer.{_QUERY}.lora_A.weight", f"unet.{_QUERY}.lora_A.weight"),
        (f"{_QUERY}.lora_A.weight", f"unet.{_QUERY}.lora_A.weight"),
        (f"diffusion_model.{_QUERY}.lora_A.weight", f"lora_unet_{_QUERY.replace('.', '_')}.lora_down.weight"),
        (
            f"unet.{_QUERY}.lora_A.weight",
            "diffusion_model.input_blocks.1.1.transformer_blocks.0.attn1.to_q.lora_down.weight",
        ),
    ],
)
def test_one_layer_that_is_given_twice_is_refused_with_both_names(tmp_path, first, second):
    module = fresh("stable_diffusion")
    layer = tiny_loras.layer_of(module.get_parameter(f"{_QUERY}.weight"), 0)
    tensors = {}
    for name in (first, second):
        tensors |= {name: layer.down.clone(), _UP[0].sub(_UP[1], name): layer.up.clone()}
    save_file(tensors, tmp_path / "lora.safetensors")
    with pytest.raises(UserError, match=r"(?s)gives .*attn1.to_q.* twice.*got: .*remedy: take") as refused:
        merged(module, {"file": tmp_path / "lora.safetensors"})
    assert all(name in str(refused.value) for name in (first, second))


def test_two_alphas_of_one_layer_are_refused(tmp_path):
    name = f"lora_unet_{_QUERY.replace('.', '_')}"
    file = written(tmp_path, lambda x: x.update({f"{name}_lora.alpha": torch.tensor(3.0)}))
    with pytest.raises(UserError, match=rf"(?s)twice.*{name}.alpha and {name}_lora.alpha"):
        merged(fresh("stable_diffusion"), {"file": file})


# Damaged files --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {"lora_alpha": -8},
        {"lora_alpha": 0},
        {"lora_alpha": float("nan")},
        {"lora_alpha": 10**400},
        {"lora_alpha": [8]},
        {"alpha_pattern": {"to_q": -1}},
        {"alpha_pattern": [1]},
        {"alpha_pattern": {"to_q": float("inf")}},
    ],
    ids=["negative", "zero", "nan", "huge", "list", "negative_pattern", "no_pattern", "infinite_pattern"],
)
@pytest.mark.parametrize("place", ["beside", "within"])
def test_alphas_of_peft_that_are_none_are_refused(tmp_path, settings, place):
    module = fresh("stable_diffusion")
    layers, file = tiny_loras.layers_of(module, ATTENTION), tmp_path / "lora.safetensors"
    if place == "beside":
        tiny_loras.save(file, layers, tiny_loras.peft("base_model.model."))
        (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    else:
        metadata = {"lora_adapter_metadata": json.dumps({f"unet.{name}": x for name, x in settings.items()})}
        tiny_loras.save(file, layers, tiny_loras.peft("unet."), metadata)
    with pytest.raises(UserError, match=r"(?s)settings of the LoRA .* cannot be read.*alphas above 0.*got: .*remedy: "):
        merged(module, {"file": file})


_FLAT = "lora_unet_" + _QUERY.replace(".", "_")
_DAMAGES = {
    "no dimension of down": (
        {f"{_FLAT}.lora_down.weight": torch.ones(())},
        "one number without a dimension in .*lora_down",
    ),
    "no dimension of up": ({f"{_FLAT}.lora_up.weight": torch.ones(())}, "one number without a dimension in .*lora_up"),
    "no dimension of a difference": ({f"{_FLAT}x.diff": torch.ones(())}, "one number without a dimension in .*diff"),
    "complex numbers": ({f"{_FLAT}.lora_up.weight": torch.ones(4, 4, dtype=torch.complex64)}, "complex64 in .*lora_up"),
    "a complex alpha": ({f"{_FLAT}.alpha": torch.ones((), dtype=torch.complex64)}, "alpha above 0"),
    "an alpha of no number": ({f"{_FLAT}.alpha": torch.zeros(0)}, "alpha above 0"),
}


@pytest.mark.parametrize("damage", _DAMAGES)
def test_tensors_that_are_no_matrices_are_refused(tmp_path, damage):
    tensors, message = _DAMAGES[damage]
    file = written(tmp_path, lambda x: x.update(tensors))
    with pytest.raises(UserError, match=rf"(?s)is damaged.*{message}.*remedy: "):
        merged(fresh("stable_diffusion"), {"file": file})


def test_a_build_tells_what_it_leaves_out_of_a_file_for_two_denoisers(tmp_path):
    import tiny_models

    layers = tiny_loras.layers_of(tiny_models.build().denoiser, ["qkv"])
    file, tensors = tmp_path / "a.safetensors", {}
    for prefix in ("transformer.", "transformer_2."):
        tiny_loras.save(file, layers, tiny_loras.peft(prefix))
        tensors |= copied(file)
    save_file(tensors, file)
    recipe = tiny_recipe(tmp_path)
    recipe.write_text(json.dumps(json.loads(recipe.read_text()) | {"loras": [{"file": "a.safetensors"}]}))
    outcome = run("build", recipe, "-o", tmp_path / "bundle", "--cache", tmp_path / "cache")
    assert outcome.exit_code == 0, outcome.output
    assert "the denoiser that is not this recipe's" in " ".join(outcome.output.split())
