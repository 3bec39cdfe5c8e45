"""Bundles of whole pipelines, which draw prompts without the original, and messages about parts that they lack."""

from __future__ import annotations

import copy
import io
import json
import shutil

import numpy as np
import pytest
import tiny_pipelines
import torch
from converted_pipelines import Whole, arguments, convert, draw, options, recipe_of
from PIL import Image
from rich.console import Console
from support import refusal, run
from tiny_pipelines import PIPELINES, TOKENS, WIDTH, errors_beside, picture
from tolerances import HALF_DENOISER, INT8_CALL, INT8_IMAGES_PSNR

from trtconvert import runtime
from trtconvert.cache import Cache
from trtconvert.documents import PIPELINE_INDEX
from trtconvert.errors import BackendUnavailable, UserError
from trtconvert.evaluate.evaluation import full_precision
from trtconvert.evaluate.verify import psnr
from trtconvert.models.loading import load_pipeline
from trtconvert.models.recorded_calls import relative_error
from trtconvert.models.saved import copy_without_models
from trtconvert.pipeline import build
from trtconvert.progress import Reporter
from trtconvert.runtime import pipeline as pipeline_module
from trtconvert.runtime.pipeline import MissingParts, make_pipeline
from trtconvert.serving.drawing import Drawer
from trtconvert.serving.jobs import Batch, Offer, Order, Range, Refusal, Shape

diffusers = pytest.importorskip("diffusers", reason="needs diffusers")


@pytest.fixture
def half(flux_build) -> Whole:
    return flux_build


def test_a_bundle_draws_from_a_prompt_by_itself(half, tmp_path):
    """Without the pipeline's weights: every model is a component, and the bundle has everything else."""
    moved = shutil.copytree(half.bundle, tmp_path / "bundle")
    with runtime.load(moved) as bundle:
        pipe = bundle.pipeline()
        assert type(pipe) is diffusers.FluxPipeline
        drawn = draw(pipe, "flux")
        parts = [part for part in pipe.components.values() if isinstance(part, torch.nn.Module)]
        assert len(parts) == 4 and not any(x.numel() for part in parts for x in part.parameters())
        # StableDiffusionUpscalePipeline reads the type of latents so.
        assert next(iter(pipe.vae.post_quant_conv.parameters())).dtype == pipe.vae.dtype
        assert drawn.isfinite().all() and drawn.std() > 0.05
        left = {
            path.relative_to(moved / bundle.manifest.pipeline) for path in (moved / bundle.manifest.pipeline).iterdir()
        }
    assert {str(path) for path in left} == {"model_index.json", "scheduler", "tokenizer", "tokenizer_2"}


def test_a_bundle_is_served_by_its_prompts_and_sizes(half):
    drawer = Drawer(half.bundle, "cpu")
    assert drawer.offer == Offer("prompt", Range(32, 32, 64), Range(32, 32, 32), 2, drawer.offer.backend)

    def drawn(height: int, *orders: Order) -> list[np.ndarray]:
        answers = drawer(Batch(Shape(height, 32, 2, True), orders))
        return [np.asarray(Image.open(io.BytesIO(answer.image)), dtype=np.int16) for answer in answers]

    one, other = Order(1, "a cat", "png"), Order(1, "two dogs", "png")
    pair, (alone,) = drawn(32, one, other), drawn(32, other)
    near, far = np.abs(pair[1] - alone).mean(), np.abs(pair[1] - pair[0]).mean()
    assert near < far / 10, "prompts are read, each for its own image"
    assert drawn(64, one)[0].shape == (64, 32, 3)
    (odd,) = drawer(Batch(Shape(41, 32, 2, True), (one,)))
    assert isinstance(odd, Refusal) and odd.whose == "client", "the pipeline would draw another size"
    drawer.close()


def test_a_bundle_that_was_named_from_another_folder_has_its_pipeline(half, tmp_path, monkeypatch):
    moved = shutil.copytree(half.bundle, tmp_path / "bundle")
    monkeypatch.chdir(tmp_path)
    with runtime.load("bundle") as bundle:
        monkeypatch.chdir("/")
        assert type(bundle.pipeline()) is diffusers.FluxPipeline
        moved.rename(tmp_path / "elsewhere")
        with pytest.raises(UserError, match=r"(?s)pipeline in .* cannot be read.*remedy: check the bundle's path"):
            bundle.pipeline()


def test_a_copy_of_a_pipeline_shares_its_sessions(half):
    """Sessions are not copied; parts that the copy gets do not change the original."""
    with runtime.load(half.bundle) as bundle:
        pipe = bundle.pipeline()
        again = copy.deepcopy(pipe)
        assert again.transformer is not pipe.transformer
        assert torch.equal(draw(again, "flux"), draw(pipe, "flux"))
        again.vae.config["scaling_factor"] = 1.0
        assert pipe.vae.config["scaling_factor"] != 1.0


def test_pipelines_of_other_tasks_say_what_their_bundle_lacks(half, tmp_path):
    """The bundle lacks the encoder for initial images, and its decoder cannot work in tiles."""
    with runtime.load(half.bundle) as bundle:
        pipe = diffusers.AutoPipelineForImage2Image.from_pipe(bundle.pipeline())
        image = Image.open(picture(tmp_path / "image.png", 0))
        for function, expected in (
            (lambda: pipe(**arguments("flux"), image=image), r"(?s)no 'encode'.*remedy: add vae_encoder to components"),
            (
                lambda: pipe.vae.enable_tiling(),
                r"(?s)no 'enable_tiling'.*got: .*whole images.*remedy: .*model.options.height",
            ),
            (lambda: pipe.vae.disable_slicing(), r"(?s)no 'disable_slicing'.*remedy: leave the setting out"),
        ):
            with pytest.raises(UserError, match=expected) as error:
                function()
            assert "LoRA" not in str(error.value)


def test_heights_within_the_range_are_drawn(half, one_noise):
    """In half precision, with the components alone; the decoder's output size is a linear function of its input size."""
    pipe = load_pipeline(half.pipeline)
    with runtime.load(half.bundle) as bundle:
        components = bundle.manifest.components
        assert [spec.shape for spec in components["vae_decoder"].outputs] == [["batch", 3, "4*height", 32]]
        assert {name: of.outputs[0].dtype for name, of in components.items()} == {
            "denoiser": "float16",
            "text_encoder": "float16",
            "text_encoder_2": "float16",
            "vae_decoder": "float32",
        }
        ours = bundle.pipeline()
        errors = errors_beside(ours.transformer, pipe.transformer)
        for height in (32, 48, 64):
            drawn, expected = (p(**arguments("flux") | {"height": height})[0] for p in (ours, pipe))
            assert drawn.shape == (1, 3, height, 32)
            assert psnr(drawn.float(), expected).min() >= INT8_IMAGES_PSNR
        assert len(errors) == 6 and max(errors) <= INT8_CALL
        with pytest.raises(UserError, match=r"(?s)'z' is outside.*height 8\.\.16.*widen model\.options\.height"):
            ours.vae.decode(torch.zeros(1, 16, 32, 8))


def test_text_encoders_return_what_the_model_does(half):
    """Results that the pipeline does not read have their shape and no values."""
    encoder = load_pipeline(half.pipeline).text_encoder
    ids = torch.randint(0, 50, (2, TOKENS), generator=torch.Generator().manual_seed(1))
    with runtime.load(half.bundle) as bundle:
        ours = bundle.as_diffusers("text_encoder")
        assert ours.dtype == torch.float16 and ours.config.hidden_size == WIDTH
        with torch.no_grad():
            expected = encoder(ids)
        got = ours(ids, output_hidden_states=False)
        assert type(got) is type(expected) and list(got) == list(expected)
        assert relative_error(got.pooler_output, expected.pooler_output) <= HALF_DENOISER
        assert got.last_hidden_state.is_meta and got.last_hidden_state.shape == expected.last_hidden_state.shape
        assert type(ours(ids, output_hidden_states=False, return_dict=None)) is type(expected)  # as in transformers
        assert type(ours(ids, output_hidden_states=False, return_dict=False)) is tuple
        with pytest.raises(UserError, match=r"(?s)another 'output_hidden_states'.*got: True"):
            ours(ids, output_hidden_states=True)
        with pytest.raises(UserError, match=r"(?s)'attention_mask'.*a tensor of shape \[2, 8\]"):
            ours(ids, attention_mask=torch.ones(2, TOKENS), output_hidden_states=False)


def test_the_command_line_draws_prompts(half, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rest = ("--steps", 2, "--seed", 1, "-o", tmp_path / "images.png")
    outcome = run("run", half.bundle, "-p", "a cat", "-p", "a dog", *rest)
    assert outcome.exit_code == 0 and "2 samples in" in outcome.output, outcome.output
    both = Image.open(tmp_path / "images.png")
    outcome = run("run", half.bundle, "-p", "a cat", *rest)
    assert outcome.exit_code == 0 and "1 sample in" in outcome.output, outcome.output
    one = Image.open(tmp_path / "images.png")
    # The first sample shows the first prompt for any seed.
    assert one.crop((0, 0, 70, 70)).tobytes() == both.crop((0, 0, 70, 70)).tobytes() and both.width > one.width
    outcome = run("run", half.bundle, "-p", "a dog", *rest)
    assert outcome.exit_code == 0, outcome.output
    assert Image.open(tmp_path / "images.png").tobytes() != one.tobytes()  # the same seed
    shown = " ".join(run("inspect", half.bundle).output.split())
    for part in ("vae_decoder", "text_encoder", "ONNX, text_encoder", "relative error against float32", "-p"):
        assert part in shown


@pytest.mark.soak
def test_a_bundle_holds_the_images_that_its_pipeline_edits(tmp_path, monkeypatch):
    """Two images have one name, in folders that the bundle's user does not have."""
    pipe = diffusers.StableDiffusionInpaintPipeline(**tiny_pipelines.with_text("stable_diffusion").components)
    pipe.save_pretrained(tmp_path / "pipeline")
    images = {}
    for seed, argument in enumerate(("image", "mask_image")):
        (tmp_path / argument).mkdir()
        images[argument] = str(picture(tmp_path / argument / "photo.png", seed).relative_to(tmp_path))
    model = {"images": images, "options": options("stable_diffusion")}
    built = convert(tmp_path, "stable_diffusion", {"all": {}, "vae_encoder": {}}, model=model)
    bundle = shutil.copytree(built, tmp_path / "elsewhere" / "bundle")
    for argument in images:
        held = bundle / "images" / f"{argument}.png"
        assert held.read_bytes() == (tmp_path / images[argument]).read_bytes()
        shutil.rmtree(tmp_path / argument)
    rest = ("-p", "a cat", "-n", 1, "--steps", 2, "-o", tmp_path / "drawn.png")
    monkeypatch.chdir(tmp_path / "elsewhere")
    outcome = run("run", "bundle", *rest)
    assert outcome.exit_code == 0, outcome.output
    # The full-precision model draws the same with the bundle's images, and needs its weights alone.
    with runtime.load(bundle) as loaded:
        assert full_precision(loaded, tmp_path / "pipeline") is not None
    (bundle / "images" / "mask_image.png").unlink()
    refusal(run("run", "bundle", *rest), "images/mask_image.png")


def test_prompts_need_a_pipeline(tiny_build, tmp_path):
    outcome = run("run", tiny_build.bundle, "-p", "a cat", "-o", tmp_path / "x.png")
    refusal(outcome, "does not turn prompts into images", "components: {all: {}}")


def test_prompts_need_a_text_encoder(half, tmp_path, monkeypatch):
    """A pipeline without text encoders draws from embeddings of N(0, 1)."""
    monkeypatch.setattr(runtime.LoadedBundle, "pipeline", lambda _: PIPELINES["flux"][0]())
    outcome = run("run", half.bundle, "-p", "a cat", "-o", tmp_path / "x.png")
    refusal(outcome, "does not turn prompts into images", "got: a pipeline that was saved without text encoders")


@pytest.mark.parametrize(
    ("name", "optional"),
    [("stable_diffusion_xl", ["text_encoder", "text_encoder_2"]), ("pixart", ["text_encoder"])],
)
def test_a_saved_optional_part_must_not_be_missing(tmp_path, name, optional):
    """Without the part such pipelines take a prompt and draw something else."""
    pipe = tiny_pipelines.with_text(name)
    pipe.save_pretrained(tmp_path / "saved")
    copy_without_models(tmp_path / "saved", tmp_path / "kept")
    assert set(optional) <= set(type(pipe)._optional_components)
    others = {
        key: part for key, part in pipe.components.items() if isinstance(part, torch.nn.Module) and key not in optional
    }
    with pytest.raises(UserError, match=rf"(?s)has no {', '.join(optional)} for.*text_encoder=….*None leaves one out"):
        make_pipeline(tmp_path / "kept", others)
    assert make_pipeline(tmp_path / "kept", others | dict.fromkeys(optional)).text_encoder is None


@pytest.fixture
def kept(tmp_path):
    """Returns a pipeline's folder without its models, and the models by name."""
    pipe = tiny_pipelines.with_text("stable_diffusion")
    pipe.save_pretrained(tmp_path / "saved")
    copy_without_models(tmp_path / "saved", tmp_path / "kept")
    return tmp_path / "kept", {name: x for name, x in pipe.components.items() if isinstance(x, torch.nn.Module)}


def test_the_safety_checker_is_not_missed(kept):
    folder, models_of = kept
    index = json.loads((folder / PIPELINE_INDEX).read_text())
    index["safety_checker"] = ["stable_diffusion", "StableDiffusionSafetyChecker"]
    (folder / PIPELINE_INDEX).write_text(json.dumps(index))
    made = make_pipeline(folder, models_of)
    assert made.safety_checker is None and not made.config.requires_safety_checker


def test_a_processor_whose_package_is_missing_is_named(kept, monkeypatch):
    """transformers has a dummy class in its place, which raises when it is used."""
    folder, models_of = kept

    class Missing:
        @classmethod
        def from_pretrained(cls, *_, **__):
            raise ImportError("CLIPTokenizer requires the protobuf library but it was not found")

    found = pipeline_module.library_class
    monkeypatch.setattr(
        pipeline_module, "library_class", lambda library, name: Missing if "Tokenizer" in name else found(library, name)
    )
    with pytest.raises(
        BackendUnavailable, match=r"(?s)needs a package.*got: .*requires the protobuf.*remedy: install the package"
    ):
        make_pipeline(folder, models_of)


def test_a_part_that_the_installed_diffusers_wants_and_the_saved_pipeline_lacks_is_named(kept):
    folder, models_of = kept
    index = json.loads((folder / PIPELINE_INDEX).read_text())
    del index["tokenizer"]
    (folder / PIPELINE_INDEX).write_text(json.dumps(index))
    with pytest.raises(
        UserError, match=r"(?s)cannot be made from the saved parts.*'tokenizer'.*remedy: pass the missing"
    ):
        make_pipeline(folder, models_of)


def test_a_part_that_the_pipeline_does_not_take_is_refused(half):
    with runtime.load(half.bundle) as bundle:
        with pytest.raises(UserError, match=r"(?s)FluxPipeline has no part 'schedulr'.*did you mean 'scheduler'\?"):
            bundle.pipeline(schedulr=None)
        with pytest.raises(UserError, match=r"(?s)'zzz'.*expected: .*text_encoder_2.*leave it out"):
            bundle.pipeline(zzz=None)


def test_a_bundle_without_a_pipeline_makes_none(tiny_build):
    with (
        runtime.load(tiny_build.bundle) as bundle,
        pytest.raises(UserError, match=r"(?s)holds no pipeline.*components"),
    ):
        bundle.pipeline()


def test_missing_parts_of_a_bundle_are_named_and_may_be_given(half, tmp_path, monkeypatch):
    model = {"dtype": "float16", "options": options("flux", height=[32, 32, 64])}
    folder = half.pipeline.parent  # its cache has all stages
    text = {"text_encoder": {}, "text_encoder_2": {}}
    recipe = recipe_of(folder, "flux", text, model)
    build(recipe, tmp_path / "bundle", Cache(folder / "cache"), Reporter(Console(quiet=True)))
    pipe = load_pipeline(half.pipeline)
    with runtime.load(tmp_path / "bundle") as loaded:
        with pytest.raises(
            UserError, match=r"(?s)has no vae for FluxPipeline.*got: text_encoder, .*transformer.*vae=…"
        ):
            loaded.pipeline()
        assert loaded.pipeline(vae=pipe.vae).vae is pipe.vae
        with pytest.raises(UserError, match=r"(?s)no component 'vae'.*expected: denoiser, text_encoder"):
            loaded.as_diffusers("vae")
    drawn = tmp_path / "x.png"
    rest = ("-p", "a cat", "--steps", 1, "-o", drawn)
    monkeypatch.chdir(tmp_path)  # a folder without the original pipeline
    outcome = run("run", "bundle", *rest)
    refusal(outcome, "has no vae for FluxPipeline", "add vae_decoder to components", "`trtconvert run --weights`")
    outcome = run("run", "bundle", *rest, "--weights", half.pipeline)
    assert outcome.exit_code == 0, outcome.output
    given = drawn.read_bytes()
    monkeypatch.chdir(folder)
    outcome = run("run", tmp_path / "bundle", *rest)
    assert outcome.exit_code == 0 and drawn.read_bytes() == given, outcome.output
    refusal(run("run", half.bundle, *rest, "--weights", half.pipeline), "needs no weights")


def test_models_that_are_no_components_have_no_remedy_in_the_recipe():
    error = MissingParts(["controlnet", "image_encoder"], "AnyPipeline", ["unet", "vae"])
    assert "components" not in error.remedy and "controlnet=…, image_encoder=…" in error.remedy
