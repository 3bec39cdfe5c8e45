"""Calls of diffusers pipelines: their steps, and their texts other than the prompts."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import itertools
from pathlib import Path
from typing import Any

import further_pipelines
import pytest
import tiny_pipelines
import torch
from tiny_pipelines import WIDTH, picture

from trtconvert.errors import UserError
from trtconvert.models.diffusers import diffusers_model
from trtconvert.models.pipelines import PipelineCaller
from trtconvert.models.probes import number_of_sample
from trtconvert.models.sample_rows import changed_argument

diffusers = pytest.importorskip("diffusers", reason="needs diffusers")

TWO: dict[str, Any] = {"height": 32, "width": 32, "prompts": ["a cat", "a dog"]}


@pytest.mark.parametrize("strength", [0.07, 0.5])
@pytest.mark.parametrize("kind", ["StableDiffusionImg2ImgPipeline", "FluxImg2ImgPipeline"])
def test_a_pipeline_that_begins_with_an_image_takes_a_step_whatever_its_strength(tmp_path, kind, strength):
    """`evaluate` draws with one step to find out the size of images."""
    make = tiny_pipelines.flux if kind.startswith("Flux") else tiny_pipelines.stable_diffusion
    getattr(diffusers, kind)(**make().components).save_pretrained(tmp_path / "pipeline")
    image, calls = {"image": picture(tmp_path / "image.png", 0)}, []
    sizes: dict[str, Any] = {"height": 32, "width": 32} if kind.startswith("Flux") else {}
    model = diffusers_model(
        tmp_path / "pipeline", tokens=8, batch=1, images=image, call={"strength": strength}, **sizes
    )

    def denoiser(**named):
        calls.append(float(named["timestep"][0]))
        return model.denoiser(**named)

    for steps, taken in ((1, 1), (20, max(1, int(20 * strength)))):
        calls.clear()
        assert model.sample(denoiser, [3], steps=steps, solver="ddim").shape == (1, 3, 32, 32)
        assert taken <= len(set(calls)) <= taken + 1  # some round up the steps that strength leaves


@pytest.mark.parametrize("installed", [False, True])
def test_prompts_are_not_cleaned_where_packages_are_missing(tmp_path, monkeypatch, caplog, installed):
    """The pipeline itself would say so in every call."""
    tiny_pipelines.with_text("pixart").save_pretrained(tmp_path)
    real = importlib.util.find_spec

    def find_spec(name, *rest):
        return (
            importlib.machinery.ModuleSpec(name, None) if installed and name in ("bs4", "ftfy") else real(name, *rest)
        )

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    model = diffusers_model(tmp_path, batch=1, **tiny_pipelines.PIPELINES["pixart"][1])
    told = [text for text in model.notices if "clean_caption" in text]
    missing = [name for name in ("bs4", "ftfy") if real(name) is None]
    assert bool(told) == (bool(missing) and not installed)
    assert all("pip install" in text for text in told)
    assert ("clean_caption" in caplog.text) == (bool(missing) and installed)


@torch.no_grad()
def test_equal_texts_of_a_batch_are_encoded_once(monkeypatch):
    pipe = tiny_pipelines.with_text("stable_diffusion_xl")
    caller = PipelineCaller(pipe, "unet", None, ("a cat", "a dog", "a cat"), {})
    sizes, rows, real = {"height": 32, "width": 32}, [], pipe.text_encoder.forward
    plain = caller.first_call([0, 1, 2], sizes)

    def counted(*args, **kwargs):
        rows.append(len(args[0]))
        return real(*args, **kwargs)

    monkeypatch.setattr(pipe.text_encoder, "forward", counted)
    with caller.encoding_once():
        for _ in range(2):
            found = caller.first_call([0, 1, 2], sizes)
            assert torch.allclose(found["encoder_hidden_states"], plain["encoder_hidden_states"], atol=1e-5)
    assert sum(rows) == 2  # SDXL has zeros for the empty text of guidance


@torch.no_grad()
def test_a_text_of_a_batch_is_not_encoded_again_alone(monkeypatch):
    pipe = tiny_pipelines.with_text("stable_diffusion_xl")
    caller = PipelineCaller(pipe, "unet", None, ("a cat", "a dog"), {})
    sizes, rows, real = {"height": 32, "width": 32}, [], pipe.text_encoder_2.forward
    plain = [caller.first_call([seed], sizes) for seed in (0, 1)]

    def counted(*args, **kwargs):
        rows.append(len(args[0]))
        return real(*args, **kwargs)

    monkeypatch.setattr(pipe.text_encoder_2, "forward", counted)
    with caller.encoding_once():
        caller.first_call([0, 1], sizes)
        for seed, expected in enumerate(plain):
            found = caller.first_call([seed], sizes)
            for name in ("encoder_hidden_states", "added_cond_kwargs"):
                torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-5)
    assert rows == [2]


@pytest.mark.parametrize("kind", ["stable_diffusion", "stable_diffusion_xl", "ltx"])
def test_guidance_by_the_deviation_of_predictions_keeps_samples_apart(tmp_path, kind):
    """It divides by the deviation of a sample's prediction, which must not be 0 where samples are compared."""
    make, options = tiny_pipelines.PIPELINES[kind]
    make().save_pretrained(tmp_path)
    call = {"guidance_rescale": 0.7, **options.get("call", {})}
    model = diffusers_model(tmp_path, **options | {"tokens": 8, "batch": [1, 1, 2], "call": call})
    assert not [text for text in model.notices if "otherwise in a call of several" in text]


@pytest.mark.parametrize("normalize", [False, True])
def test_guidance_by_the_deviation_of_a_batch_is_told(tmp_path, normalize):
    """Bria's deviation is that of all samples of a call. It changes nothing where the halves of guidance are equal."""
    transformer = tiny_pipelines.model(
        diffusers.BriaTransformer2DModel,
        **tiny_pipelines.HEADS,
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        joint_attention_dim=WIDTH,
        axes_dims_rope=[8, 12, 12],
    )
    parts = {"text_encoder": tiny_pipelines.t5(), "tokenizer": tiny_pipelines.t5_tokenizer()}
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
    pipe = diffusers.BriaPipeline(
        transformer=transformer, scheduler=scheduler, vae=tiny_pipelines.vae(4), image_encoder=None, **parts
    )
    pipe.save_pretrained(tmp_path)
    options = {"height": 32, "width": 32, "batch": [1, 1, 2], "call": {"normalize": normalize}}
    told = [text for text in diffusers_model(tmp_path, **options).notices if "give other latents" in text]
    assert bool(told) == normalize


def test_predictions_of_probes_differ_within_a_sample_and_between_samples():
    noisy = torch.randn(3, 4, 2, 2)
    drawn = number_of_sample("timestep", ("batch", 4, 2, 2))(sample=noisy, timestep=torch.zeros(3))
    assert drawn.shape == noisy.shape and bool((drawn.flatten(1).std(1) > 0).all())
    torch.testing.assert_close(drawn / noisy[:, :1, :1, :1], (drawn / noisy[:, :1, :1, :1])[:1].expand(drawn.shape))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_arguments_that_are_no_numbers_are_compared_too(value):
    """Masks that are added to scores may have -Inf."""
    noisy, mask = torch.randn(2, 8), torch.randn(2, 8)
    mask[:, 3:] = value
    both = {"sample": noisy, "mask": mask}
    alone = {name: x[1:].clone() for name, x in both.items()}
    assert changed_argument(both, alone) == ""
    alone["mask"][0, 0] = 7.0
    assert changed_argument(both, alone) == "mask"
    alone["mask"] = torch.zeros(1, 8)
    assert changed_argument(both, alone) == "mask"


def test_a_part_of_the_schedule_has_a_step(tmp_path):
    """SDXL's base may take all but the last fifth of the schedule, or the first fifth alone."""
    tiny_pipelines.stable_diffusion_xl().save_pretrained(tmp_path)
    model = diffusers_model(tmp_path, height=32, width=32, tokens=8, batch=1, call={"denoising_end": 0.2})
    assert model.sample(model.denoiser, [3], steps=1, solver="ddim").isfinite().all()


def test_a_strength_of_nothing_is_refused(tmp_path):
    components = tiny_pipelines.stable_diffusion().components
    diffusers.StableDiffusionImg2ImgPipeline(**components).save_pretrained(tmp_path / "pipeline")
    with pytest.raises(UserError, match=r"(?s)call.strength does not fit.*leaves every image as it is.*0.6"):
        image = {"image": picture(tmp_path / "image.png", 0)}
        diffusers_model(tmp_path / "pipeline", tokens=8, images=image, call={"strength": 0})


def test_an_image_is_encoded_once_for_each_batch(tmp_path, monkeypatch):
    """A pipeline is observed with a few batches, some of them often."""
    components = tiny_pipelines.stable_diffusion().components
    diffusers.StableDiffusionImg2ImgPipeline(**components).save_pretrained(tmp_path / "pipeline")
    shapes, real = [], diffusers.AutoencoderKL.encode

    def counted(self, x, *args, **kwargs):
        shapes.append(tuple(x.shape))
        return real(self, x, *args, **kwargs)

    monkeypatch.setattr(diffusers.AutoencoderKL, "encode", counted)
    image = {"image": picture(tmp_path / "image.png", 0)}
    diffusers_model(tmp_path / "pipeline", tokens=8, batch=[1, 1, 2], images=image)
    assert len(shapes) == len(set(shapes)) < 5


@torch.no_grad()
def samples_beside(folder: Path, pipe: Any, images: dict[str, Any], **options: Any) -> tuple[Any, torch.Tensor]:
    """Saves a pipeline and returns its model, and the second of two samples in one call less the same sample alone."""
    pipe.save_pretrained(folder / "pipeline")
    files = {name: [picture(folder / f"{name}-{i}.png", i) for i in range(count)] for name, count in images.items()}
    given = {name: paths if len(paths) > 1 else paths[0] for name, paths in files.items()}
    model = diffusers_model(folder / "pipeline", images=given, **{"batch": [1, 1, 2], **options})
    both, alone = (model.sample(model.denoiser, seeds, steps=2, solver="ddim") for seeds in ([3, 4], [4]))
    assert len(both) == 2 and both.isfinite().all()
    return model, both[1:] - alone


INPAINTED = {"image": 1, "mask_image": 1}


@pytest.mark.parametrize(
    ("kind", "images", "make"),
    [
        ("FluxInpaintPipeline", INPAINTED, tiny_pipelines.flux),
        ("StableDiffusion3InpaintPipeline", INPAINTED, tiny_pipelines.stable_diffusion_3),
        ("StableDiffusionXLInpaintPipeline", INPAINTED, tiny_pipelines.stable_diffusion_xl),
        ("Kandinsky3Img2ImgPipeline", {"image": 1}, further_pipelines.kandinsky3),
        (
            "KandinskyV22Img2ImgPipeline",
            {"image": 1},
            further_pipelines.kandinsky22,
        ),  # takes embeddings of an image too
        ("ZImageInpaintPipeline", INPAINTED, further_pipelines.z_image),  # takes Optional[List[Tensor]] as embeddings
    ],
)
def test_a_sample_of_several_with_an_image_is_the_sample_alone(tmp_path, kind, images, make):
    """One image for all samples would take noise from the first sample's generator, or draw one sample for Kandinsky 3."""
    pipe = tiny_pipelines.pipeline(getattr(diffusers, kind), **make().components)
    sizes: dict[str, Any] = {} if kind.startswith("Kandinsky3") else {"height": 32, "width": 32}
    model, difference = samples_beside(tmp_path, pipe, images, tokens=8, **sizes)
    assert difference.abs().max() <= 2e-3 and not model.notices


def test_features_of_an_image_are_those_of_each_sample(tmp_path):
    """An adapter's features of one image have rows for both halves of guidance, and none for a second sample."""
    parts = tiny_pipelines.with_text("stable_diffusion").components
    parts.pop("image_encoder")
    adapter = diffusers.T2IAdapter(channels=[32, 64], num_res_blocks=1, downscale_factor=4)
    pipe = tiny_pipelines.pipeline(
        diffusers.StableDiffusionAdapterPipeline,
        **parts,
        adapter=tiny_pipelines.randomised(adapter),
        requires_safety_checker=False,
    )
    _, difference = samples_beside(tmp_path, pipe, {"image": 1}, height=32, width=32, prompts=["a cat"])
    assert difference.abs().max() <= 2e-3


def test_an_image_for_an_ip_adapter_is_refused(saved, tmp_path):
    """A saved pipeline holds no IP-Adapter. Without the image the pipeline converts."""
    image = {"ip_adapter_image": picture(tmp_path / "image.png", 0)}
    with pytest.raises(UserError, match=r"ip_adapter_image through an IP-Adapter") as error:
        diffusers_model(saved, **TWO, images=image)
    assert error.value.remedy.startswith("remove ip_adapter_image from model.images")


def test_a_sample_that_follows_its_batch_is_told_before_the_calibration(tmp_path):
    """LTX draws the latents of one image for all samples of a call, and takes several images for one sample."""
    pipe = tiny_pipelines.pipeline(diffusers.LTXConditionPipeline, **tiny_pipelines.ltx().components)
    options = {"height": 32, "width": 32, "frames": 9, "tokens": 8}
    model, difference = samples_beside(tmp_path, pipe, {"image": 1}, **options)
    assert difference.abs().max() > 1e-2
    assert any("otherwise in a call of several than alone" in notice for notice in model.notices)
    model, difference = samples_beside(tmp_path, pipe, {"image": 1}, **options, batch=1)
    assert difference.abs().max() <= 2e-3 and not model.notices


def test_a_sample_that_meets_prompts_of_another_is_told(tmp_path):
    """Panorama passes noisy samples in the order of samples, and prompts in the order of guidance."""
    parts = tiny_pipelines.with_text("stable_diffusion").components
    pipe = tiny_pipelines.pipeline(diffusers.StableDiffusionPanoramaPipeline, **parts, requires_safety_checker=False)
    model, difference = samples_beside(tmp_path, pipe, {}, height=32, width=32, prompts=["a cat", "a dog"])
    assert difference.abs().max() > 0.1
    assert model.notices[0].endswith("another 'encoder_hidden_states'; model.options.batch: 1 keeps samples apart")
    model, difference = samples_beside(tmp_path, pipe, {}, height=32, width=32, prompts=["a cat", "a dog"], batch=1)
    assert difference.abs().max() <= 2e-3 and not model.notices


def test_a_pipeline_draws_one_sample_where_its_images_are_frames(tmp_path):
    """AnimateDiff with a ControlNet takes a list of frames, or a list of such lists if there are as many lists as frames."""
    parts = tiny_pipelines.animatediff().components
    net = diffusers.ControlNetModel.from_unet(tiny_pipelines.unet(), conditioning_embedding_out_channels=(8, 8, 8))
    pipe = tiny_pipelines.pipeline(
        diffusers.AnimateDiffControlNetPipeline, **parts, controlnet=tiny_pipelines.randomised(net)
    )
    options = {"height": 32, "width": 32, "prompts": ["a cat"]}
    _, difference = samples_beside(tmp_path, pipe, {"conditioning_frames": 2}, frames=2, **options)
    assert difference.abs().max() <= 2e-3
    with pytest.raises(UserError, match="draws one sample in a call") as error:
        samples_beside(tmp_path, pipe, {"conditioning_frames": 4}, frames=4, **options)
    assert error.value.remedy == "give model.options.batch as 1"


def test_noise_outside_the_generators_is_that_of_the_seed(tmp_path):
    """Stable Diffusion 3 draws the latents of a ControlNet's image without the generators of its call."""
    parts = tiny_pipelines.stable_diffusion_3().components
    net = tiny_pipelines.model(
        diffusers.SD3ControlNetModel, **tiny_pipelines.HEADS, sample_size=8, patch_size=2, in_channels=16, num_layers=1,
        joint_attention_dim=WIDTH, caption_projection_dim=64, pooled_projection_dim=WIDTH, out_channels=16,
        pos_embed_max_size=16,
    )  # fmt: skip
    pipe = tiny_pipelines.pipeline(diffusers.StableDiffusion3ControlNetPipeline, **parts, controlnet=net)
    state = torch.random.get_rng_state()
    model, _ = samples_beside(tmp_path, pipe, {"control_image": 1}, height=32, width=32, tokens=8)
    one, again = (model.sample(model.denoiser, [3], steps=2, solver="ddim") for _ in range(2))
    assert torch.equal(one, again) and any("several than alone" in notice for notice in model.notices)
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.as_of(diffusers="0.42")
def test_a_pipeline_that_takes_no_list_of_generators_draws_one_sample(tmp_path):
    parts = tiny_pipelines.wan().components
    transformer = tiny_pipelines.model(
        diffusers.WanVACETransformer3DModel, **tiny_pipelines.HEADS, patch_size=(1, 2, 2), text_dim=WIDTH, ffn_dim=32,
        num_layers=2, cross_attn_norm=True, qk_norm="rms_norm_across_heads", rope_max_seq_len=32, vace_layers=[0],
        vace_in_channels=96,
    )  # fmt: skip
    named = {name: parts[name] for name in ("tokenizer", "text_encoder", "vae", "scheduler")}
    tiny_pipelines.pipeline(diffusers.WanVACEPipeline, **named, transformer=transformer).save_pretrained(tmp_path)
    options = {"height": 32, "width": 32, "frames": 9, "tokens": 8}
    with pytest.raises(
        UserError, match=r"(?s)draws one sample.*list of generators.*remedy: give model.options.batch as 1"
    ):
        diffusers_model(tmp_path, **options)
    model = diffusers_model(tmp_path, **options, batch=1)
    assert len(model.sample(model.denoiser, [0, 1], steps=2, solver="ddim")) == 2


def drawn(folder, seeds=(0, 1, 2), **call):
    model = diffusers_model(folder, **TWO, batch=[1, 2, 3], call=call)
    return model.sample(model.denoiser, list(seeds), steps=2, solver="ddim")


@pytest.mark.slow
def test_negative_prompts_are_those_of_every_sample(saved):
    """One negative prompt for all samples, or several by turns, with any batch."""
    plain, one = drawn(saved), drawn(saved, negative_prompt="blurry")
    assert (one - plain).abs().amax((1, 2, 3)).min() > 1e-3
    torch.testing.assert_close(drawn(saved, negative_prompt=["blurry"]), one)
    turns = drawn(saved, negative_prompt=["blurry", "grey"])
    torch.testing.assert_close(turns[[0, 2]], one[[0, 2]], atol=1e-4, rtol=0)
    assert (turns[1] - one[1]).abs().max() > 1e-3
    torch.testing.assert_close(drawn(saved, seeds=[2], negative_prompt="blurry"), one[2:], atol=1e-4, rtol=0)


def test_prompts_of_further_text_encoders_are_those_of_every_sample(tmp_path):
    tiny_pipelines.with_text("flux").save_pretrained(tmp_path)
    model = diffusers_model(tmp_path, **TWO, batch=[1, 2, 2], call={"prompt_2": "a bird", "max_sequence_length": 8})
    alone = model.sample(model.denoiser, [1], steps=2, solver="ddim")
    torch.testing.assert_close(
        model.sample(model.denoiser, [0, 1], steps=2, solver="ddim")[1:], alone, atol=1e-4, rtol=0
    )


@pytest.mark.parametrize("value", [3, [], ["blurry", 3]])
def test_values_other_than_prompts_are_refused(saved, value):
    with pytest.raises(UserError, match=r"(?s)call.negative_prompt does not fit.*expected: a text for all samples"):
        diffusers_model(saved, **TWO, call={"negative_prompt": value})


def test_a_prompt_that_nothing_reads_is_refused(tmp_path):
    tiny_pipelines.stable_diffusion().save_pretrained(tmp_path)
    with pytest.raises(
        UserError, match=r"(?s)no text encoder reads model.options.call.negative_prompt.*with its text encoders"
    ):
        diffusers_model(tmp_path, height=32, width=32, tokens=8, call={"negative_prompt": "blurry"})
    assert diffusers_model(tmp_path, height=32, width=32, tokens=8, call={"negative_prompt": None}).inputs


@pytest.mark.parametrize("refines", [False, True])
def test_prompts_are_heeded_where_the_first_of_two_text_encoders_is_absent(tmp_path, refines):
    """SDXL's pipeline may lack the first text encoder, and its refiner always does; the refiner takes five numbers, not six."""
    numbers = 5 if refines else 6
    unet = tiny_pipelines.unet(
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=WIDTH + numbers * 8,
        use_linear_projection=True,
    )
    second = tiny_pipelines.clip(width=WIDTH, projection=WIDTH)
    parts = tiny_pipelines.stable_diffusion_xl().components | {
        "unet": unet,
        "text_encoder_2": second,
        "tokenizer_2": tiny_pipelines.clip_tokenizer(),
    }
    kind = diffusers.StableDiffusionXLImg2ImgPipeline if refines else diffusers.StableDiffusionXLPipeline
    pipe = kind(**parts, requires_aesthetics_score=True) if refines else kind(**parts)
    pipe.save_pretrained(tmp_path / "pipeline")
    images: dict[str, Any] = (
        {"images": {"image": picture(tmp_path / "image.png", 0)}} if refines else {"height": 32, "width": 32}
    )
    found = []
    for prompts in (["a cat"], ["dogs and foxes"]):
        model = diffusers_model(tmp_path / "pipeline", batch=1, prompts=prompts, **images)
        found.append(model.sample(model.denoiser, [0], steps=4, solver="ddim"))
    assert (found[0] - found[1]).abs().max() > 1e-3
    assert model.condition is not None and model.components is not None
    encoder = ("vae_encoder",) if refines else ()
    assert model.components.used == ("text_encoder_2", "vae_decoder", *encoder)


def test_a_text_encoder_that_the_pipeline_cannot_do_with_alone_reads_nothing():
    """Flux needs both text encoders."""
    pipe = tiny_pipelines.flux()
    pipe.register_modules(**{k: x for k, x in tiny_pipelines.TEXT["flux"]().items() if k.endswith("_2")})
    assert not PipelineCaller(pipe, "transformer", 8, ("a cat",), {}).has_text_encoder


def test_caches_are_reset_before_each_call_of_a_pipeline(saved):
    """Also for a server's batches: with one step an image begins with as much noise as the one before had at its end."""
    model, events = diffusers_model(saved, **TWO, batch=[1, 1, 1]), []

    class Cached:
        device = torch.device("cpu")

        def __call__(self, **named):
            events.append("call")
            return torch.zeros_like(named[model.sample_input])

        def reset_cache(self):
            events.append("reset")

    for seed in range(2):
        model.sample.draw(Cached(), torch.device("cpu"), [seed], 1)
    assert [kind for kind, _ in itertools.groupby(events)] == ["reset", "call", "reset", "call"]
