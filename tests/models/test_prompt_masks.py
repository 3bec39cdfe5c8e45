"""Models that cut each prompt to its length, with the length as data: predictions, and pipelines with different prompts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import further_pipelines
import pytest
import tiny_pipelines
import torch
from rich.console import Console
from tiny_pipelines import SMALL_BUILD, WIDTH, errors_beside
from tolerances import INT8_CALL
from torch import Tensor

from trtconvert import runtime
from trtconvert.cache import Cache
from trtconvert.errors import UserError
from trtconvert.models.diffusers import diffusers_model
from trtconvert.models.exportable import make_exportable
from trtconvert.models.loading import load_pipeline
from trtconvert.pipeline import build
from trtconvert.progress import Reporter
from trtconvert.recipe import load_recipe
from trtconvert.runtime.arguments import (
    PaddedRows,
    padded_rows,
    put_together,
    take_apart,
    tensors_of,
    with_least_rows,
)

diffusers = pytest.importorskip("diffusers", reason="needs diffusers")
transformers = pytest.importorskip("transformers", reason="needs transformers")

SIZES: dict[str, Any] = {"height": 32, "width": 32, "batch": 1}


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def masked(lengths: Sequence[int], space: int) -> Tensor:
    return torch.arange(space) < torch.tensor(lengths)[:, None]


def same(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert expected.std() > 0.1


# Forwards -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(8, 8), (6, 10), (16, 8)])  # 16, 15 and 32 tokens
@pytest.mark.parametrize("lengths", [(8, 8), (3, 40, 33), (32,), (1, 64)])
def test_z_image_takes_tensors_for_lists(sizes, lengths):
    model = further_pipelines.z_image().transformer
    images, times = drawn(len(lengths), 16, 1, *sizes), torch.linspace(0.1, 0.9, len(lengths))
    prompts = [drawn(length, WIDTH, seed=length) for length in lengths]
    with torch.no_grad():
        expected = torch.stack(model(list(images), times, prompts, return_dict=False)[0])
        make_exportable(model)
        for least in (0, 70):
            rows, mask = padded_rows(prompts, least)
            rows[~mask] = 7.0  # padding changes nothing
            same(model(images, times, PaddedRows(rows, mask)).sample, expected)
        same(torch.stack(model(list(images), times, prompts, return_dict=False)[0]), expected)


@pytest.mark.parametrize("sizes", [(8, 8), (6, 10)])
@pytest.mark.parametrize("lengths", [(10, 10), (3, 8, 5), (1,)])
def test_lumina_2_has_one_place_for_the_tokens_of_every_image(sizes, lengths):
    model = further_pipelines.lumina2().transformer
    images, times = drawn(len(lengths), 16, *sizes), torch.linspace(0.1, 0.9, len(lengths))
    prompts, mask = drawn(len(lengths), 10, WIDTH, seed=1), masked(lengths, 10)
    with torch.no_grad():
        expected = model(images, times, prompts, mask.long(), return_dict=False)[0]
        make_exportable(model)
        prompts[~mask] = 7.0
        same(model(images, times, prompts, mask.long()).sample, expected)


@pytest.mark.parametrize("lengths", [(10, 10), (3, 8, 5), (1,)])
@pytest.mark.parametrize("config", [{}, {"text_embed_2_dim": None}, {"guidance_embeds": True, "use_meanflow": True}])
def test_hunyuan_image_need_not_sort_its_tokens(lengths, config):
    own = further_pipelines.hunyuan_image().transformer
    settings = {name: value for name, value in own.config.items() if not name.startswith("_")}
    model = tiny_pipelines.randomised(type(own)(**settings | config))
    images, times = drawn(len(lengths), 4, 6, 10), torch.linspace(10, 900, len(lengths))
    given: dict[str, Any] = {
        "encoder_hidden_states": drawn(len(lengths), 10, WIDTH, seed=1),
        "encoder_attention_mask": masked(lengths, 10),
    }
    if "text_embed_2_dim" not in config:
        given["encoder_hidden_states_2"] = drawn(len(lengths), 6, WIDTH, seed=2)
        given["encoder_attention_mask_2"] = masked([3 * length % 5 for length in lengths], 6)  # some have no tokens
    if config.get("use_meanflow"):
        given |= {"timestep_r": times / 2, "guidance": times * 3}
    with torch.no_grad():
        expected = model(images, times, **given, return_dict=False)[0]
        make_exportable(model)
        same(model(images, times, **given).sample, expected)


@pytest.mark.parametrize("lengths", [(10, 10), (3, 8, 5), (1,)])
@pytest.mark.parametrize("of_image", [False, True])
def test_hunyuan_video_15_need_not_sort_its_tokens(lengths, of_image):
    model = further_pipelines.hunyuan_video_15().transformer
    videos, times = drawn(len(lengths), 9, 3, 4, 6), torch.linspace(10, 900, len(lengths))
    given: dict[str, Any] = {
        "encoder_hidden_states": drawn(len(lengths), 10, WIDTH, seed=1),
        "encoder_attention_mask": masked(lengths, 10),
        "encoder_hidden_states_2": drawn(len(lengths), 6, WIDTH, seed=2),
        "encoder_attention_mask_2": masked([3 * length % 5 for length in lengths], 6),  # some have no tokens
        "image_embeds": drawn(len(lengths), 4, WIDTH, seed=3) * of_image,
    }
    with torch.no_grad():
        expected = model(videos, times, **given, return_dict=False)[0]
        make_exportable(model)
        same(model(videos, times, **given).sample, expected)
        other = model(videos, times, **given | {"image_embeds": drawn(len(lengths), 4, WIDTH, seed=4)}).sample
        assert (other - expected).abs().max() > 1e-3  # an image has an effect


@pytest.mark.parametrize("sizes", [(8, 8), (6, 10)])
@pytest.mark.parametrize("lengths", [(8, 8), (3, 40, 33)])
def test_z_image_adds_what_its_control_net_gives_to_the_same_tokens(sizes, lengths):
    pipe = further_pipelines.z_image_control_net()
    model, controlnet = pipe.transformer, pipe.controlnet
    images, times = drawn(len(lengths), 16, 1, *sizes), torch.linspace(0.1, 0.9, len(lengths))
    prompts = [drawn(length, WIDTH, seed=length) for length in lengths]
    with torch.no_grad():
        added = controlnet(list(images), times, prompts, list(drawn(len(lengths), 16, 1, *sizes, seed=5)))
        listed = model(list(images), times, prompts, controlnet_block_samples=added, return_dict=False)[0]
        plain = torch.stack(model(list(images), times, prompts, return_dict=False)[0])
        make_exportable(model)
        call = {"x": list(images), "t": times, "cap_feats": prompts, "controlnet_block_samples": added}
        structure, _ = take_apart(call, least=70)
        structure = with_least_rows(structure, {"cap_feats": 70, "controlnet_block_samples.0": 128})
        structure = json.loads(json.dumps(structure))  # as stored in a bundle
        named = tensors_of(structure, call)
        assert named["controlnet_block_samples.0"].shape[1] == 128
        found = model(**put_together(structure, named)).sample
    same(found, torch.stack(listed))
    assert (found - plain).abs().max() > 0.01


# Other values that decided shapes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("original", [4, 64])
def test_omnigen_chooses_its_factors_by_the_largest_position(original):
    model = further_pipelines.omnigen().transformer
    rope = model.rope
    rope.original_max_position_embeddings = original
    rope.long_factor = [2.0] * 16
    positions = torch.arange(10).expand(2, -1)
    expected = rope(torch.zeros(2, 10, 64), positions)
    make_exportable(model)
    for found, wanted in zip(rope(torch.zeros(2, 10, 64), positions), expected, strict=True):
        same(found, wanted)


def test_experts_compute_what_they_are_sent():
    block = further_pipelines.hidream().transformer.double_stream_blocks[0].block.ff_i
    x = drawn(2, 12, 64)
    with torch.no_grad():
        expected = block(x)
        make_exportable(block)
        same(block(x), expected)
    layer = further_pipelines.nucleus_moe().transformer.transformer_blocks[1].img_mlp
    given = (drawn(2, 12, 64), drawn(2, 12, 64, seed=1), drawn(2, 64, seed=2))
    with torch.no_grad():
        expected = layer(*given)
        make_exportable(layer)
        same(layer(*given), expected)


def test_glm_image_multiplies_what_it_drops():
    model = further_pipelines.glm_image_transformer()
    ids = torch.arange(12).remainder(16).expand(2, -1)
    given: dict[str, Any] = {
        "hidden_states": drawn(2, 4, 6, 8),
        "encoder_hidden_states": drawn(2, 5, WIDTH, seed=1),
        "prior_token_id": ids,
        "prior_token_drop": (ids + torch.tensor([[0], [1]])) % 3 == 0,
        "timestep": torch.tensor([10.0, 900.0]),
        "target_size": torch.tensor([[64.0, 48.0]] * 2),
        "crop_coords": torch.zeros(2, 2),
    }
    with torch.no_grad():
        expected = model(**given, return_dict=False)[0]
        make_exportable(model)
        same(model(**given).sample, expected)
        assert (model(**given | {"prior_token_drop": ids > 99}).sample - expected).abs().max() > 1e-3


def test_hidream_gives_images_of_any_shape():
    model = further_pipelines.hidream().transformer
    given = {
        "timesteps": torch.tensor([10.0, 900.0]),
        "encoder_hidden_states_t5": drawn(2, 8, WIDTH, seed=1),
        "encoder_hidden_states_llama3": drawn(2, 2, 8, WIDTH, seed=2),
        "pooled_embeds": drawn(2, 64, seed=3),
    }
    for sizes in ((8, 8), (8, 12)):
        own = further_pipelines.hidream().transformer
        images = drawn(2, 4, *sizes)
        with torch.no_grad():
            expected = own(images, **given, return_dict=False)[0]
            make_exportable(model)
            same(model(images, **given).sample, expected)


def test_arguments_that_an_exportable_forward_ignores_are_refused():
    model = further_pipelines.z_image().transformer
    make_exportable(model)
    rows = padded_rows([drawn(3, WIDTH)])
    with pytest.raises(UserError, match=r"(?s)converted without 'siglip_feats'.*left to the pipeline's own"):
        model(drawn(1, 16, 1, 8, 8), torch.tensor([0.5]), rows, siglip_feats=[[drawn(4, 64)]])


@pytest.mark.parametrize("name", ["z_image", "lumina2"])
def test_prompts_and_images_beyond_the_tables_are_refused_and_the_remedy_works(tmp_path, name):
    """An engine would read beyond the tables without an error."""
    getattr(further_pipelines, name)().save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"(?s)no positions for so many.*remedy: give smaller numbers as model.options"):
        diffusers_model(tmp_path, **SIZES, tokens=[8, 8, 128])
    model = diffusers_model(tmp_path, **SIZES, tokens=[8, 8, 60])
    assert model.dims["tokens"] == (8, 8, 60)


# Lists ----------------------------------------------------------------------------------------------------------------


def test_lists_with_an_entry_for_each_sample_are_tensors_and_a_mask():
    given = {"x": [drawn(4, 6)] * 2, "t": drawn(2), "text": [drawn(3, 8), drawn(5, 8)], "kept": [1, 2]}
    structure, tensors = take_apart(given, least=4)
    assert {name: tuple(x.shape) for name, x in tensors.items()} == {
        "x": (2, 4, 6), "t": (2,), "text": (2, 5, 8), "text.mask": (2, 5),
    }  # fmt: skip
    assert tensors["text.mask"].sum(1).tolist() == [3, 5] and not tensors["text"][0, 3:].any()
    again = put_together(structure, tensors | {"text.mask": tensors["text.mask"].long()})
    assert torch.equal(again["x"], tensors["x"]) and again["kept"] == [1, 2]
    assert torch.equal(again["text"].mask, tensors["text.mask"]) and again["text"].mask.dtype == torch.bool
    structure = with_least_rows(structure, {"text": 9})
    found = tensors_of(structure, given)
    assert found["text"].shape == (2, 9, 8) and found["text.mask"].sum(1).tolist() == [3, 5]
    assert structure["kept"] == {"list": [{"value": 1}, {"value": 2}]}
    with pytest.raises(UserError, match="samples of different sizes"):
        take_apart(given | {"x": [drawn(4, 6), drawn(4, 7)]}, least=0)
    for unfit in (drawn(2, 4, 6), [], [drawn(4, 6), drawn(4, 7)]):
        with pytest.raises(UserError, match=r"(?s)converted for another 'x'.*expected: (a list with|tensors of one)"):
            tensors_of(structure, given | {"x": unfit})


def test_other_models_that_take_lists_are_refused(tmp_path, monkeypatch):
    further_pipelines.z_image().save_pretrained(tmp_path)
    monkeypatch.setattr("trtconvert.models.prompt_masks._OF_LISTS", {})
    with pytest.raises(UserError, match=r"(?s)ZImageTransformer2DModel takes its samples as a list.*'x', list of 2"):
        diffusers_model(tmp_path, **SIZES, tokens=8)


# Pipelines ------------------------------------------------------------------------------------------------------------


def z_image_with_text() -> Any:
    """Z-Image with its text encoder, which returns each prompt's own tokens."""
    letters = {chr(number if 32 < number < 127 else 256 + number): number for number in range(256)}
    tokenizer = transformers.Qwen2Tokenizer(vocab=letters, merges=[])
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    config = transformers.Qwen3Config(
        vocab_size=len(tokenizer) + 8,
        hidden_size=WIDTH,
        intermediate_size=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
    )
    pipe = further_pipelines.z_image()
    pipe.register_modules(text_encoder=tiny_pipelines.randomised(transformers.Qwen3Model(config)), tokenizer=tokenizer)
    return pipe


def recipe_of(folder, dtype: str = "float32", components: Any = None, **options: Any):
    recipe = {
        "model": {"source": "diffusers", "weights": "pipeline", "dtype": dtype, "options": SIZES | options},
        "attention": {"modes": "precision"},
        "components": components or {},
        **SMALL_BUILD,
    }
    (folder / "recipe.yaml").write_text(json.dumps(recipe))
    return load_recipe(folder / "recipe.yaml")


@pytest.mark.as_of(transformers="5")
def test_prompts_of_z_image_need_a_number_of_tokens_that_they_are_padded_to(tmp_path):
    z_image_with_text().save_pretrained(tmp_path)
    prompts = ["a cat", "a dog in a garden"]
    with pytest.raises(
        UserError, match=r"(?s)'cap_feats' with as many tokens as its longest.*give model.options.tokens"
    ):
        diffusers_model(tmp_path, **SIZES, prompts=prompts)
    for tokens, dims in ((20, {}), ([4, 20, 40], {"tokens": (4, 20, 40)})):
        model = diffusers_model(tmp_path, **SIZES, prompts=prompts, tokens=tokens)
        assert {name: size for name, size in model.dims.items() if name != "batch"} == dims
        assert model.components is not None and model.components("text_encoder").dims.get("tokens") == dims.get(
            "tokens"
        )
        assert model.condition is not None
        conditions = model.condition(prompts)
        assert conditions["cap_feats.mask"].sum(1).tolist() == [5, 17]
        images = model.sample(model.denoiser, [0, 1], steps=2, solver="ddim")
        assert images.shape[0] == 2 and images.isfinite().all()


@pytest.mark.soak
@pytest.mark.slow
def test_a_bundle_of_z_image_draws_prompts_of_any_length_up_to_its_own(tmp_path):
    """Prompts are padded to the number of tokens: shorter ones are masked, longer ones refused with a remedy that works."""
    z_image_with_text().save_pretrained(tmp_path / "pipeline")
    recipe = recipe_of(tmp_path, components={"text_encoder": {}}, tokens=20, prompts=["a cat", "a dog"])
    build(recipe, tmp_path / "bundle", Cache(tmp_path / "cache"), Reporter(Console(quiet=True)))
    pipe = load_pipeline(tmp_path / "pipeline")
    pipe.set_progress_bar_config(disable=True)
    call: dict[str, Any] = {"height": 32, "width": 32, "num_inference_steps": 2, "output_type": "latent"}
    with runtime.load(tmp_path / "bundle") as bundle:
        dropped_in, original = bundle.as_diffusers(), pipe.transformer
        errors = errors_beside(dropped_in, original)
        pipe.transformer = dropped_in
        for prompt in ("a", "a bird in a tree", ["a bird"]):
            assert pipe(prompt, **call, negative_prompt="b").images.isfinite().all()
        assert len(errors) == 6 and max(errors) <= INT8_CALL
        longer = "a bird in a very tall tree"
        with pytest.raises(
            UserError, match=r"(?s)'cap_feats'.*20.*remedy: .*model.options.tokens.*max_sequence_length"
        ):
            pipe(longer, **call)
        pipe.text_encoder = bundle.as_diffusers("text_encoder")
        assert pipe(longer, **call, max_sequence_length=20).images.isfinite().all()


@pytest.mark.soak
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("name", ["z_image", "lumina2", "hunyuan_image"])
def test_sizes_and_lengths_vary_in_one_bundle(tmp_path, name, dtype):
    getattr(further_pipelines, name)().save_pretrained(tmp_path / "pipeline")
    recipe = recipe_of(tmp_path, dtype, batch=2, tokens=[4, 40, 60], height=[32, 48, 64])
    build(recipe, tmp_path / "bundle", Cache(tmp_path / "cache"), Reporter(Console(quiet=True)))
    pipe = load_pipeline(tmp_path / "pipeline")
    pipe.set_progress_bar_config(disable=True)
    with runtime.load(tmp_path / "bundle") as bundle:
        dropped_in, original = bundle.as_diffusers(), pipe.transformer
        errors = errors_beside(dropped_in, original)
        pipe.transformer = dropped_in
        for lengths, height in (((3, 8), 32), ((33, 2), 48), ((60, 31), 64)):
            call = _embeddings(name, lengths, dropped_in.dtype)
            images = pipe(**call, height=height, width=32, num_inference_steps=2, output_type="latent").images
            assert images.isfinite().all()
    assert len(errors) >= 6 and max(errors) <= INT8_CALL


def _embeddings(name: str, lengths: Sequence[int], dtype: torch.dtype) -> dict[str, Any]:
    """Returns embeddings of prompts and negative prompts of different lengths, as the pipeline takes them."""
    if name == "z_image":
        texts = [drawn(length, WIDTH, seed=length).to(dtype) for length in lengths]
        return {"prompt_embeds": texts, "negative_prompt_embeds": [x[:2] for x in texts]}
    space, mask = max(lengths), masked(lengths, max(lengths)).long()
    text = drawn(len(lengths), space, WIDTH).to(dtype)
    given = {"prompt_embeds": text, "prompt_attention_mask" if name == "lumina2" else "prompt_embeds_mask": mask}
    if name == "hunyuan_image":
        given |= {"prompt_embeds_2": text.flip(0), "prompt_embeds_mask_2": mask.flip(0)}
    return given | {f"negative_{key}": x.clone() for key, x in given.items()}
