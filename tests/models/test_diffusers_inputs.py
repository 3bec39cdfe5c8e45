"""The inputs that pipelines of diffusers pass to their denoisers, and refusals of those that cannot be converted."""

from __future__ import annotations

import inspect
import json
from dataclasses import replace
from typing import cast

import numpy as np
import pytest
import tiny_models
import tiny_pipelines
import torch
from found_sites import sites_to_convert
from further_pipelines import CONVERTIBLE
from tiny_pipelines import PIPELINES, SIZE, picture

from trtconvert import models
from trtconvert.diffusion_model import InputSpec
from trtconvert.errors import UserError
from trtconvert.evaluate.verify import psnr
from trtconvert.images import read_picture
from trtconvert.models.call_options import PROMPTS
from trtconvert.models.diffusers import diffusers_model
from trtconvert.models.identity import identity
from trtconvert.models.pipeline_sampler import as_images
from trtconvert.models.pipelines import PipelineCaller
from trtconvert.recipe import AttentionSection, ModelSection, load_recipe
from trtconvert.runtime.arguments import parameters_of, put_together, take_apart, tensors_of
from trtconvert.runtime.bundles import LoadedBundle
from trtconvert.runtime.diffusers import DiffusersDenoiser

diffusers = pytest.importorskip("diffusers", reason="needs diffusers")


def test_captions_become_the_inputs_that_the_pipeline_makes_of_them(saved):
    model = diffusers_model(saved, height=32, width=32, prompts=["a cat", "a dog"])
    assert model.condition is not None
    conditions = model.condition(["a dog", "a cat", ""])
    assert {name: tuple(x.shape) for name, x in conditions.items()} == {"encoder_hidden_states": (3, 8, 32)}
    by_prompt = model.sample(model.denoiser, [0, 1], steps=2, solver="ddim")
    given = {name: x[[1, 0]] for name, x in conditions.items()}
    assert psnr(model.sample(model.denoiser, [0, 1], steps=2, solver="ddim", conditions=given), by_prompt).min() > 80
    swapped = {name: x[:2] for name, x in conditions.items()}
    assert psnr(model.sample(model.denoiser, [0, 1], steps=2, solver="ddim", conditions=swapped), by_prompt).max() < 60


def test_methods_keep_their_parameters_behind_decorators_that_hide_them(monkeypatch):
    """diffusers 0.35 decorates methods of VAEs without `functools.wraps`."""
    pipe = tiny_pipelines.stable_diffusion()
    caller = PipelineCaller(pipe, "unet", 8, PROMPTS, {})
    expected = caller.first_call([0], SIZE, pipe.vae, "decode").keys()

    def hiding(method):
        def wrapper(self, *args, **kwargs):
            return method(self, *args, **kwargs)

        return wrapper

    monkeypatch.setattr(diffusers.AutoencoderKL, "decode", hiding(inspect.unwrap(diffusers.AutoencoderKL.decode)))
    assert parameters_of(pipe.vae.decode) == ["z", "return_dict", "generator"]
    assert caller.first_call([0], SIZE, pipe.vae, "decode").keys() == expected >= {"z"}


def test_images_become_latents(saved):
    model = diffusers_model(saved, height=32, width=32, prompts=["a cat"])
    assert model.encoder is not None and model.encoder.shape == (3, 32, 32)
    encoded = model.encoder.encode(torch.rand(2, 3, 32, 32))
    assert encoded.shape == (2, 4, 8, 8)


def test_latents_of_a_vae_that_centres_its_channels_are_those_that_its_decoder_takes(tmp_path):
    pipe = tiny_pipelines.stable_diffusion_xl()
    mean, std = [0.5, -1.0, 2.0, 0.0], [2.0, 3.0, 0.5, 1.0]
    pipe.vae.register_to_config(latents_mean=mean, latents_std=std)
    pipe.save_pretrained(tmp_path)
    model, images = diffusers_model(tmp_path, tokens=8, height=32, width=32), torch.rand(2, 3, 32, 32)
    assert model.encoder is not None
    with torch.no_grad():
        latents = pipe.vae.encode(images * 2 - 1).latent_dist.mode()
    mean, std = (torch.tensor(numbers).view(1, 4, 1, 1) for numbers in (mean, std))
    again = (
        model.encoder.encode(images) * std / pipe.vae.config.scaling_factor + mean
    )  # as the pipeline does before it decodes
    torch.testing.assert_close(again, latents)


def test_a_model_behind_a_link_counts_for_what_is_cached(tmp_path):
    """One model of the pipeline's folder is a link to another folder, which has a link back."""
    pipeline, finetuned = tmp_path / "pipeline", tmp_path / "finetuned"
    for folder in (pipeline, finetuned):
        folder.mkdir()
    (pipeline / "unet").symlink_to(finetuned)
    (finetuned / "pipeline").symlink_to(pipeline)
    identities = []
    for weights in (b"before", b"after"):
        (finetuned / "model.safetensors").write_bytes(weights)
        identities.append(identity(ModelSection(source="diffusers", weights=pipeline)))
    assert identities[0] != identities[1]


def test_a_sample_depends_on_its_seed_alone(saved):
    model = diffusers_model(saved, height=32, width=32, batch=[1, 2, 2], prompts=["a cat", "a dog"])
    together = model.sample(model.denoiser, [3, 4, 5], steps=3, solver="ddim")  # in two calls of the pipeline
    (alone,) = model.sample(model.denoiser, [4], steps=3, solver="ddim")
    assert torch.allclose(together[1], alone, atol=1e-4)
    assert not torch.allclose(together[0], together[1], atol=1e-2)


def test_symbolic_dimensions_follow_the_sizes(tmp_path):
    tiny_pipelines.stable_diffusion_3().save_pretrained(tmp_path)
    model = diffusers_model(tmp_path, height=[32, 48, 64], width=32, batch=[1, 2, 4], tokens=8)
    assert {spec.name: spec.shape for spec in model.inputs} == {
        "hidden_states": ("batch", 16, "height", 8),
        "timestep": ("batch",),
        "encoder_hidden_states": ("batch", 8, 32),
        "pooled_projections": ("batch", 32),
    }
    # Guidance doubles the batch; without guidance the smallest batch is 1.
    assert dict(model.dims) == {"batch": (1, 4, 8), "height": (8, 12, 16)}
    assert model.output.shape == ("batch", 16, "height", 8)


def test_the_smallest_sizes_of_what_is_repeated_for_each_frame_go_together(tmp_path):
    """AnimateDiff passes a prompt for each of 4 frames, and guidance doubles prompts and frames."""
    tiny_pipelines.animatediff().save_pretrained(tmp_path)
    model = diffusers_model(tmp_path, height=32, width=32, frames=4, tokens=8, batch=[1, 1, 2])
    assert [spec.shape[0] for spec in model.inputs] == ["batch", "batch", "batch_2"]
    assert model.dims == {"batch": (1, 2, 4), "batch_2": (4, 8, 16)}
    smallest = model.example(0, {name: low for name, (low, _, _) in model.dims.items()})
    assert model.denoiser(**smallest).shape == (1, 4, 4, 8, 8)


def test_a_list_with_an_entry_for_each_image_is_taken_in_for_one_batch(tmp_path):
    """QwenImage passes the shape of each image to its model, which keeps rotations for the next call; fake tensors must not be
    kept."""
    tiny_pipelines.qwen_image().save_pretrained(tmp_path)
    sizes = {"tokens": 8, "height": 32, "width": 32}
    with pytest.raises(UserError, match=r"(?s)'img_shapes' as a number.*give model\.options\.batch as one number"):
        diffusers_model(tmp_path, **sizes)
    model = diffusers_model(tmp_path, **sizes, batch=1)
    assert model.dims == {"batch": (1, 1, 1)}
    assert model.denoiser(**model.example(0, {"batch": 1})).isfinite().all()


def test_a_vae_that_decodes_one_video_is_told_by_the_batch(tmp_path):
    tiny = CONVERTIBLE["hunyuan_video_15"]
    tiny.make().save_pretrained(tmp_path)
    options = {**tiny.options, "tokens": 8}
    assert options.pop("batch") == 1
    with pytest.raises(UserError, match="HunyuanVideo15Pipeline draws one sample in a call") as error:
        diffusers_model(tmp_path, **options)
    assert error.value.remedy == "give model.options.batch as 1"


def test_a_pipeline_that_takes_a_text_and_no_list_draws_one_sample_at_a_time(tmp_path, monkeypatch):
    """DreamLite takes one text, whatever the number of seeds."""
    tiny_pipelines.with_text("stable_diffusion").save_pretrained(tmp_path)
    own, taken = diffusers.StableDiffusionPipeline.__call__, []

    def of_texts(self, prompt: str, height=None, width=None, negative_prompt: str | None = None, **named):
        if not isinstance(prompt, str):
            raise ValueError(f"`prompt` has to be of type `str` but is {type(prompt)}")
        taken.append((prompt, negative_prompt))
        return own(self, prompt=prompt, height=height, width=width, negative_prompt=negative_prompt, **named)

    monkeypatch.setattr(diffusers.StableDiffusionPipeline, "__call__", of_texts)
    options = {"height": 32, "width": 32, "prompts": ["a cat", "a dog"], "call": {"negative_prompt": ["a", "b"]}}
    with pytest.raises(UserError, match=r"(?s)draws one sample in a call.*has to be of type `str`") as error:
        diffusers_model(tmp_path, **options)
    assert error.value.remedy == "give model.options.batch as 1"
    model = diffusers_model(tmp_path, **options, batch=1)
    taken.clear()
    drawn = model.sample(model.denoiser, [0, 1], steps=2, solver="ddim")
    assert taken == [("a cat", "a"), ("a dog", "b")] and (drawn[0] - drawn[1]).abs().max() > 0.01


def test_a_fault_of_every_batch_keeps_its_remedy(tmp_path):
    CONVERTIBLE["sana_sprint"].make().save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"^a call of SanaSprintPipeline failed") as error:
        diffusers_model(tmp_path, **SIZE, tokens=8, call={"use_resolution_binning": False})
    assert "intermediate_timesteps" in error.value.remedy and "batch" not in error.value.remedy


def test_a_pipeline_of_pipelines_is_refused_with_the_one_that_denoises(tmp_path):
    """The inner pipeline keeps its denoiser where the outer one gets another."""
    parts = CONVERTIBLE["kandinsky22"].make().components
    combined = tiny_pipelines.pipeline(diffusers.KandinskyV22CombinedPipeline, **parts)
    combined.save_pretrained(tmp_path / "combined")
    with pytest.raises(UserError, match=r"calls it through its decoder_pipe, a KandinskyV22Pipeline") as error:
        diffusers_model(tmp_path / "combined", **SIZE)
    assert "`pipe.decoder_pipe.save_pretrained(FOLDER)`" in error.value.remedy
    combined.decoder_pipe.save_pretrained(tmp_path / "decoder")
    assert diffusers_model(tmp_path / "decoder", **SIZE, batch=1).diffusers.pipeline == "KandinskyV22Pipeline"


def test_attention_of_frames_and_of_places_is_converted(tmp_path):
    """AnimateDiff attends within each of 4 frames, and between the same places of all frames."""
    tiny_pipelines.animatediff().save_pretrained(tmp_path)
    model = diffusers_model(tmp_path, height=32, width=32, frames=4, tokens=8, batch=[1, 1, 2])
    sites, left = sites_to_convert(model, AttentionSection())
    assert not left
    folds = {("motion" in site.name, site.folds, site.query_tokens) for site in sites}
    assert folds == {(False, 4, 64), (True, 64, 4), (False, 4, 16), (True, 16, 4)}


def test_each_of_two_denoisers_is_converted_by_its_name(tmp_path):
    """The second denoiser of Wan 2.2 is for the little noise of the last steps: two steps do not call it."""
    make, options = PIPELINES["wan"]
    second = make().transformer
    second.proj_out.weight.neg_()
    pipe = diffusers.WanPipeline(**make().components | {"transformer_2": second}, boundary_ratio=0.3)
    pipe.save_pretrained(tmp_path)

    def drawn(name, timesteps):
        model = diffusers_model(tmp_path, denoiser=name, tokens=8, batch=1, **options)
        assert model.diffusers.component == name

        def denoiser(**named):
            timesteps.append(float(named["timestep"]))
            return model.denoiser(**named)

        return model.sample(denoiser, [3], steps=10, solver="ddim")

    high, low = [], []
    assert torch.equal(drawn("transformer", high), drawn("transformer_2", low))
    assert high and low and min(high) >= 300 > max(low)
    model = diffusers_model(tmp_path, denoiser="transformer_2", tokens=8, batch=1, **options)
    with pytest.raises(UserError, match=r"(?s)does not call its transformer_2 in 2 steps.*remedy: take more steps"):
        model.sample(model.denoiser, [3], steps=2, solver="ddim")
    with pytest.raises(UserError, match=r"(?s)no denoiser 'unet'.*got: vae, transformer, .*model.options.denoiser"):
        diffusers_model(tmp_path, denoiser="unet", tokens=8, **options)


def test_bundles_of_two_denoisers_refuse_each_other_s_place(tmp_path):
    """Both have the same inputs and outputs, so that a swap would go unnoticed and draw noise."""
    make, options = PIPELINES["wan"]
    pipe = diffusers.WanPipeline(**make().components | {"transformer_2": make().transformer}, boundary_ratio=0.5)
    pipe.save_pretrained(tmp_path)
    pipe.set_progress_bar_config(disable=True)
    stand_ins = {}
    for name in ("transformer", "transformer_2"):
        model = diffusers_model(tmp_path, denoiser=name, tokens=8, batch=1, **options)
        assert model.diffusers is not None
        stand_ins[name] = DiffusersDenoiser(
            model.denoiser, model.diffusers, "timestep", dtype=torch.float32, device=torch.device("cpu")
        )
    high, low = stand_ins.values()
    text = torch.randn(1, 8, 32)
    call = {"prompt_embeds": text, "negative_prompt_embeds": text, "height": 32, "width": 32, "num_frames": 9}
    pipe.transformer, pipe.transformer_2 = low, high
    told = r"(?s)has the converted transformer_2 as its transformer.*remedy: assign the bundle to transformer_2"
    for _ in range(2):  # every time, not only at first
        with pytest.raises(UserError, match=told):
            pipe(**call, num_inference_steps=4, output_type="latent")
    with pytest.raises(UserError, match=told):
        LoadedBundle.pipeline(cast(LoadedBundle, None), transformer=low)
    pipe.transformer, pipe.transformer_2 = high, low  # as the remedy says
    assert pipe(**call, num_inference_steps=4, output_type="latent")[0].isfinite().all()
    low(**diffusers_model(tmp_path, denoiser="transformer_2", tokens=8, batch=1, **options).example(0, {"batch": 1}))


def test_timesteps_of_tokens_are_shares_of_their_sample_s(tmp_path):
    """Wan 2.2 of 5B has a timestep for each token, as a given first frame has no noise; without one all are the same."""
    make, options = PIPELINES["wan"]
    diffusers.WanPipeline(**make().components, expand_timesteps=True).save_pretrained(tmp_path)
    model = diffusers_model(tmp_path, tokens=8, **options)
    record, timestep = model.diffusers, next(spec for spec in model.inputs if spec.name == "timestep")
    shares = next(spec for spec in model.inputs if spec.name == "timestep.share")
    assert timestep.shape == ("batch",) and shares.shape == ("batch", 3 * 2 * 2)
    assert record.timestep_shares == ["timestep.share"] and "timestep.share" in model.always_float32
    assert bool((model.example(0, {"batch": 2})["timestep.share"] == 1).all())
    expected = as_images(model.sample.caller([3, 4], 2, model.sample.sizes), decoded=True)
    torch.testing.assert_close(model.sample(model.denoiser, [3, 4], steps=2, solver="ddim"), expected)

    taken = []
    dropped_in = DiffusersDenoiser(
        lambda **named: taken.append((named["timestep"], named["timestep.share"])) or named["hidden_states"],
        record,
        "timestep",
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    named = model.example(0, {"batch": 2})
    del named["timestep.share"]
    dropped_in(**named | {"timestep": torch.arange(24.0).reshape(2, 12)})
    noisiest, shares = taken.pop()
    assert noisiest.tolist() == [11.0, 23.0]
    torch.testing.assert_close(shares * noisiest[:, None], torch.arange(24.0).reshape(2, 12))
    dropped_in(**named | {"timestep": torch.zeros(2, 12)})
    assert taken.pop()[1].tolist() == [[1.0] * 12] * 2  # the timestep 0 divides nothing
    with pytest.raises(UserError, match=r"(?s)another 'timestep'.*expected: a tensor with a timestep for each token"):
        dropped_in(**named | {"timestep": torch.tensor([7.0, 7.0])})
    ranged = diffusers_model(tmp_path, tokens=8, **options | {"height": [32, 32, 64]})
    (of_tokens,) = (spec.shape[1] for spec in ranged.inputs if spec.name == "timestep.share")
    assert ranged.dims[of_tokens] == (12, 12, 24)


def test_timesteps_of_tokens_that_rise_are_refused(tmp_path):
    """The noisiest token of a sample would have the smallest timestep."""
    make, options = PIPELINES["wan"]
    rising = diffusers.FlowMatchEulerDiscreteScheduler(invert_sigmas=True)
    parts = make().components | {"scheduler": rising}
    diffusers.WanPipeline(**parts, expand_timesteps=True).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"(?s)timesteps of tokens or frames that rise.*expected: timesteps that fall"):
        diffusers_model(tmp_path, tokens=8, **options)


def test_images_are_passed_to_a_pipeline_that_edits_them(tmp_path):
    pipe = diffusers.FluxKontextPipeline(**PIPELINES["flux"][0]().components)
    pipe.save_pretrained(tmp_path / "pipeline")
    options = {"tokens": 8, "height": 32, "width": 32, "call": {"_auto_resize": False, "max_area": 32 * 32}}
    drawn = []
    for seed in (0, 1):
        files = {"image": picture(tmp_path / f"{seed}.png", seed)}
        model = diffusers_model(tmp_path / "pipeline", images=files, **options)
        assert model.inputs[0].shape[:2] == ("batch", 2 * 16)  # tokens of the latents, and of the image
        drawn.append(model.sample(model.denoiser, [3, 4], steps=2, solver="ddim"))
        alone = model.sample(model.denoiser, [4], steps=2, solver="ddim")
        torch.testing.assert_close(drawn[-1][1:], alone, atol=1e-4, rtol=0)
    assert (drawn[0] - drawn[1]).abs().max() > 0.01
    for given, expected in (
        ({"picture": tmp_path / "0.png"}, r"(?s)model.images has picture.*expected: .*image"),
        ({"image": tmp_path / "2.png"}, r"(?s)cannot read the image .*2.png.*got: No such file.*model.images"),
    ):
        with pytest.raises(UserError, match=expected):
            diffusers_model(tmp_path / "pipeline", images=given, **options)


def test_each_sample_gets_an_image_where_a_pipeline_wants_that(tmp_path):
    """LTX takes one image for one sample, and a list of images for several."""
    pipe, options = diffusers.LTXImageToVideoPipeline(**PIPELINES["ltx"][0]().components), PIPELINES["ltx"][1]
    image = read_picture(picture(tmp_path / "image.png", 0), "")
    caller = PipelineCaller(pipe, "transformer", 8, PROMPTS, options["call"], {"image": image})
    sizes = {name: options[name] for name in ("height", "width", "frames")}
    with torch.no_grad():
        both, alone = caller([3, 4], 2, sizes), caller([4], 2, sizes)
        torch.testing.assert_close(both[1:], alone, atol=1e-4, rtol=0)
        with pytest.raises(UserError, match="a call of LTXImageToVideoPipeline failed"):
            caller([3, 4], 2, sizes | {"height": 33})


def test_images_are_part_of_what_a_model_is(tmp_path):
    (tmp_path / "recipe.yaml").write_text(
        "model: {source: diffusers, weights: pipeline, images: {image: a.png}}\nverify: {min_psnr: 33}\n"
    )
    (tmp_path / "pipeline").mkdir()
    section = load_recipe(tmp_path / "recipe.yaml").model
    assert section.images == {"image": tmp_path / "a.png"}
    with pytest.raises(UserError, match=r"(?s)cannot read the image .*a.png.*No such file.*model.images"):
        identity(section)
    found = {identity(section) for seed in (0, 1) if picture(tmp_path / "a.png", seed)}
    assert len(found | {identity(section.model_copy(update={"images": {}}))}) == 3
    with pytest.raises(UserError, match=r"(?s)digits-dit takes no images.*remove model.images"):
        models.load(section.model_copy(update={"source": "digits-dit"}))


def test_a_pipeline_without_a_vae_denoises_images(tmp_path):
    """The latents of DeepFloyd IF are pixels."""
    unet = tiny_pipelines.unet(in_channels=3, out_channels=6)
    scheduler = diffusers.DDPMScheduler(variance_type="learned_range")
    nothing = dict.fromkeys(("tokenizer", "text_encoder", "safety_checker", "feature_extractor", "watermarker"))
    pipe = diffusers.IFPipeline(unet=unet, scheduler=scheduler, requires_safety_checker=False, **nothing)
    pipe.save_pretrained(tmp_path)
    model = diffusers_model(tmp_path, height=16, width=24, tokens=8)
    images = model.sample(model.denoiser, [3, 4], steps=2, solver="ddim")
    assert images.shape == (2, 3, 16, 24) and images.min() >= 0 and images.max() <= 1 and len(images.unique()) > 100


def test_a_pipeline_that_changes_its_model_is_refused_before_anything_is_made_of_it(tmp_path):
    make, options = PIPELINES["pixart"]
    diffusers.PixArtSigmaPAGPipeline(**make().components).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"(?s)has no 'attn_processors'.*remedy: .*perturbed attention"):
        diffusers_model(tmp_path, **{"tokens": 8} | options)
    unguided = {"call": options["call"] | {"pag_scale": 0.0}}
    assert diffusers_model(tmp_path, **{"tokens": 8} | options | unguided).inputs


def test_a_pipeline_that_fails_by_itself_is_told_from_a_fault_of_ours(tmp_path, saved, monkeypatch):
    def fails(*_, **__):
        raise IndexError("index out of range in self")

    model = diffusers_model(saved, height=32, width=32)
    monkeypatch.setattr(diffusers.AutoencoderKL, "decode", fails)
    with pytest.raises(UserError, match=r"(?s)a call of StableDiffusionPipeline failed.*got: IndexError: index out of"):
        model.sample(model.denoiser, [0], steps=2, solver="ddim")
    monkeypatch.setattr(diffusers.UNet2DConditionModel, "forward", fails)
    with pytest.raises(UserError, match=r"(?s)unet cannot be run.*expected: .*sample \[.*got: IndexError: .*remedy"):
        sites_to_convert(model, AttentionSection())


def test_integers_of_an_example_are_what_the_pipeline_passes():
    """Random numbers must not replace positions, which are looked up in tables, and masks of tokens."""
    shapes = {"sample": ("batch", 4), "timestep": ("batch",), "positions": (1, "tokens"), "labels": ("batch",)}
    kinds = {"positions": "int64", "labels": "int64"}
    model = replace(
        tiny_models.build(),
        inputs=tuple(InputSpec(name, kinds.get(name, "float32"), shape) for name, shape in shapes.items()),
        as_passed={"positions": torch.tensor([[7, 8, 9]])},
    )
    example = model.example(0, {"batch": 2, "tokens": 5})
    assert example["positions"].tolist() == [[7, 8, 9, 7, 8]] and set(example["labels"].tolist()) <= {0, 1}


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("ltx", {"height": [32, 32, 64]}, ["'height' as a number", "expected: one height", "a bundle for each"]),
        ("flux", {"frames": 9}, ["FluxPipeline takes no frames", "remove model.options.frames"]),
        ("flux", {"height": [64, 32, 32]}, ["model.options.height does not fit", "got: [64, 32, 32]"]),
        ("flux", {"height": 32.0}, ["model.options.height does not fit", "got: 32.0"]),
        ("flux", {"call": {"no_such": 1}}, ["options.call has no_such", "guidance_scale", "remove it"]),
        (
            "flux",
            {"call": {"guidence_scale": 1}},
            ["options.call has guidence_scale", "did you mean 'guidance_scale'?"],
        ),
        ("flux", {"call": {"num_inference_steps": 4}}, ["options.call sets num_inference_steps", "verify.steps"]),
        ("flux", {"prompts": "a cat"}, ["options.prompts does not fit", "got: 'a cat'"]),
        ("flux", {"prompts": []}, ["options.prompts does not fit", "got: []"]),
    ],
)
def test_options_that_do_not_fit_are_refused(tmp_path, name, options, expected):
    make, own = PIPELINES[name]
    make().save_pretrained(tmp_path)
    with pytest.raises(UserError) as error:
        diffusers_model(tmp_path, **{"tokens": 8} | own | options)
    for part in ("expected: ", "got: ", "remedy: ", *expected):
        assert part in str(error.value)


def test_a_folder_without_a_whole_pipeline_is_refused(tmp_path, saved):
    with pytest.raises(UserError, match=r"(?s)holds no diffusers pipeline.*got: a folder with nothing in it.*remedy: "):
        diffusers_model(tmp_path)
    with pytest.raises(UserError, match=r"(?s)holds no diffusers pipeline.*got: a single component"):
        diffusers_model(saved / "unet")
    for index, got in (('{"_class_name": "NoSuchPipeline"}', "NoSuchPipeline"), ("[]", "list indices")):
        (tmp_path / "model_index.json").write_text(index)
        with pytest.raises(UserError, match=rf"(?s)cannot be loaded.*got: .*{got}.*remedy: "):
            diffusers_model(tmp_path)


def test_another_solver_is_refused(saved):
    model = diffusers_model(saved, height=32, width=32)
    with pytest.raises(UserError, match=r"(?s)own scheduler.*expected: ddim.*got: heun"):
        model.sample(model.denoiser, [0], steps=2, solver="heun")


def test_arguments_are_taken_apart_and_put_together():
    mask = torch.tensor([True, False])
    given = {"x": torch.ones(2), "more": {"ids": torch.zeros(2, 6), "size": None}, "pair": [mask, 3], "scale": 0.5}
    structure, tensors = take_apart(given)
    assert sorted(tensors) == ["more.ids", "pair.0", "x"]
    assert json.loads(json.dumps(structure)) == structure  # the manifest stores it
    again = put_together(structure, tensors | {"pair.0": mask.long()})
    assert again["more"]["ids"] is given["more"]["ids"] and again["scale"] == 0.5 and again["pair"][1] == 3
    assert again["pair"][0].dtype == torch.bool and torch.equal(again["pair"][0], mask)
    assert tensors_of(structure, given).keys() == tensors.keys()


def test_constants_are_plain_numbers_and_text():
    """Arrays compare element by element, without one truth value."""
    structure, _ = take_apart({"scale": 0.5, "mode": "full"})
    assert not tensors_of(structure, {"scale": np.float32(0.5), "mode": "full"})
    for scale, got in ((np.full(3, 0.5), "an array of shape [3]"), (torch.tensor(0.5), "a tensor of shape []")):
        with pytest.raises(UserError) as error:
            tensors_of(structure, {"scale": scale, "mode": "full"})
        assert f"another 'scale'\n  expected: 0.5\n  got: {got}" in str(error.value)


def test_an_object_among_the_arguments_is_refused():
    with pytest.raises(UserError, match=r"(?s)passes 'cache' to its model.*got: object.*model\.options\.call"):
        take_apart({"x": torch.ones(1), "cache": object()})


def test_complex_numbers_among_the_arguments_are_refused():
    with pytest.raises(UserError, match=r"(?s)passes 'turns.0' to its model.*real numbers.*got: complex64"):
        take_apart({"x": torch.ones(1), "turns": [torch.ones(2, dtype=torch.complex64)]})
