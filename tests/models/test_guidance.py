"""Classifier-free guidance inside a denoiser: the models that support it, and samples that equal those of both halves."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support import refusal, run, tiny_recipe
from tolerances import FLIPPED_CALL, SAME_ARITHMETIC, WHOLE_DENOISER
from torch import Tensor

from trtconvert import models, runtime
from trtconvert.bundle import read_manifest
from trtconvert.diffusion_model import DiffusionModel
from trtconvert.errors import UserError
from trtconvert.guidance import FusedGuidance, GuidedDenoiser
from trtconvert.manifest_checks import contradiction
from trtconvert.models.denoiser import sampled_from
from trtconvert.models.digits import _SCHEDULE
from trtconvert.models.guidance import fused_form
from trtconvert.models.recorded_calls import relative_error
from trtconvert.models.samplers import initial_noise, sample
from trtconvert.recipe import ModelSection
from trtconvert.runtime.session import OnnxRuntimeComponent

pytest.importorskip("diffusers", reason="needs diffusers")
import diffusers
import further_pipelines
import tiny_pipelines

from trtconvert.models.diffusers import diffusers_model
from trtconvert.models.loading import load_pipeline
from trtconvert.models.pipeline_sampler import PipelineSampler

SEEDS = [3, 4]


class Engine:
    """A model in torch with guidance inside, which records the scales and rows of its calls."""

    def __init__(self, form: DiffusionModel) -> None:
        assert form.guidance is not None
        self._denoiser = GuidedDenoiser(form.denoiser, form.timestep_input, form.guidance)
        self.guidance = FusedGuidance(form.guidance, form.output.shape)
        self._names = [spec.name for spec in form.inputs]
        self.scales: list[list[float]] = []
        self.rows: list[int] = []

    def __call__(self, *inputs: Tensor, **named: Tensor) -> Tensor:
        given = dict(zip(self._names, inputs, strict=False)) | named
        self.scales.append(given[self.guidance.record.scale].tolist())
        self.rows.append(len(given[self._names[0]]))
        with torch.no_grad():
            return self._denoiser(**{name: given[name] for name in self._names})


@functools.cache
def pipeline_of(name: str, folder: Path) -> Path:
    make = (
        tiny_pipelines.PIPELINES[name][0]
        if name in tiny_pipelines.PIPELINES
        else further_pipelines.CONVERTIBLE[name].make
    )
    make().save_pretrained(folder / name)
    return folder / name


@pytest.fixture(scope="module")
def model_of(tmp_path_factory):
    """Loads a pipeline's denoiser as a model."""
    folder = tmp_path_factory.mktemp("pipelines")

    def made(name: str, **call: Any) -> DiffusionModel:
        known = tiny_pipelines.PIPELINES.get(name)
        options = dict(known[1] if known else further_pipelines.CONVERTIBLE[name].options)
        options["call"] = options.get("call", {}) | call
        return diffusers_model(pipeline_of(name, folder), **options)

    return made


# Samples --------------------------------------------------------------------------------------------------------------


@pytest.mark.first_case
@pytest.mark.parametrize(
    ("name", "calls"),
    [
        ("stable_diffusion", 1),
        ("stable_diffusion_3", 1),
        ("pixart", 1),  # its output includes the channels of a variance
        ("cogvideox", 1),  # the scale changes from step to step
        ("hunyuan_dit", 1),  # it removes the variance before the sum
        ("wan", 2),  # a call for each half
        ("chroma", 2),
    ],
)
def test_pipelines_draw_the_same_with_one_prediction(model_of, name, calls):
    """The pipeline computes the sum itself, with its own scale, in either order of the halves."""
    model = model_of(name, **({"use_dynamic_cfg": True} if name == "cogvideox" else {}))
    engine, plain = Engine(fused_form(model)), list[int]()

    def unfused(**named: Tensor) -> Tensor:
        plain.append(len(next(iter(named.values()))))
        with torch.no_grad():
            return model.denoiser(**named)

    expected = model.sample(unfused, SEEDS, steps=4, solver="ddim")
    assert relative_error(model.sample(engine, SEEDS, steps=4, solver="ddim"), expected) < SAME_ARITHMETIC
    assert len(engine.rows) * calls == len(plain)
    assert set(engine.rows) == {len(SEEDS)} and set(plain) == {2 * len(SEEDS) // calls}
    assert len({tuple(scales) for scales in engine.scales}) == (4 if name == "cogvideox" else 1)


def with_pipeline(model: DiffusionModel, engine: Any, **arguments: Any) -> Tensor:
    """Draws with the model's pipeline and a denoiser; the call has further arguments."""
    sampler = model.sample
    assert isinstance(sampler, PipelineSampler)
    before = dict(sampler.caller.arguments)
    sampler.caller.arguments |= arguments
    try:
        return sampler(engine, SEEDS, steps=4, solver="ddim")
    finally:
        sampler.caller.arguments = before


@pytest.mark.parametrize("arguments", [{"guidance_rescale": 0.7}, {"guidance_scale": 1.0}])
def test_pipelines_that_use_a_half_by_itself_draw_the_same(model_of, arguments):
    """This takes more calls, with a warning, and changes nothing else."""
    model = model_of("stable_diffusion")
    engine = Engine(fused_form(model))
    expected = with_pipeline(model, model.denoiser, **arguments)
    with pytest.warns(RuntimeWarning, match="outside the sum of guidance.*remedy: .*engine.guidance: separate"):
        drawn = with_pipeline(model, engine, **arguments)
    assert relative_error(drawn, expected) < SAME_ARITHMETIC
    if "guidance_scale" in arguments:  # without guidance each row is a sample
        assert engine.rows == [len(SEEDS)] * 4 and engine.scales == [[1.0] * len(SEEDS)] * 4


def test_the_second_of_two_denoisers_has_a_scale_of_its_own(tmp_path):
    """Three steps do not call the second denoiser of Wan 2.2; the first one must cost nothing meanwhile."""
    make, options = tiny_pipelines.PIPELINES["wan"]
    parts = make().components | {"transformer_2": make().transformer}
    diffusers.WanPipeline(**parts, boundary_ratio=0.3).save_pretrained(tmp_path)
    call = options.get("call", {}) | {"guidance_scale": 5.0, "guidance_scale_2": 2.5}
    model = diffusers_model(tmp_path, **options | {"denoiser": "transformer_2", "call": call})
    engine = Engine(fused_form(model))
    expected = model.sample(model.denoiser, SEEDS, steps=10, solver="ddim")
    assert relative_error(model.sample(engine, SEEDS, steps=10, solver="ddim"), expected) < SAME_ARITHMETIC
    assert {scale for scales in engine.scales for scale in scales} == {2.5}


def test_shares_of_timesteps_are_guided_beside_the_prompts(tmp_path):
    """Wan 2.2 of 5B has a timestep for each token, the same for both halves."""
    make, options = tiny_pipelines.PIPELINES["wan"]
    diffusers.WanPipeline(**make().components, expand_timesteps=True).save_pretrained(tmp_path)
    model = diffusers_model(tmp_path, **options)
    form = fused_form(model)
    assert form.guidance is not None and "timestep.share" in form.guidance.negative
    engine = Engine(form)
    expected = model.sample(model.denoiser, SEEDS, steps=4, solver="ddim")
    assert relative_error(model.sample(engine, SEEDS, steps=4, solver="ddim"), expected) < SAME_ARITHMETIC
    assert engine.rows == [len(SEEDS)] * 4


def test_inference_mode_changes_nothing(model_of):
    """In inference mode torch dispatches the operations that are called, and not those that they consist of."""
    model = model_of("hunyuan_dit")
    engine = Engine(fused_form(model))
    expected = model.sample(model.denoiser, SEEDS, steps=2, solver="ddim")
    with torch.inference_mode():
        assert relative_error(model.sample(engine, SEEDS, steps=2, solver="ddim"), expected) < SAME_ARITHMETIC
    assert engine.rows == [len(SEEDS)] * 2


def test_a_scale_that_changes_during_a_call_is_followed(model_of):
    model = model_of("stable_diffusion")
    engine = Engine(fused_form(model))

    def halve(pipe: Any, step: int, timestep: Any, state: dict[str, Any]) -> dict[str, Any]:
        pipe._guidance_scale = 16.0 / 2 ** (step + 1)
        return state

    options = {"guidance_scale": 16.0, "callback_on_step_end": halve}
    expected = with_pipeline(model, model.denoiser, **options)
    drawn = with_pipeline(model, engine, **options)
    assert relative_error(drawn, expected) < SAME_ARITHMETIC
    assert engine.scales == [[scale] * len(SEEDS) for scale in (16.0, 8.0, 4.0, 2.0)]


@pytest.mark.parametrize("source", ["digits-dit", "emoji-dit"])
def test_own_samplers_hand_over_the_scale(source, digits):
    weights = Path(__file__).parents[2] / "recipes" / f"{source}.safetensors"
    model = digits if source == "digits-dit" else models.load(ModelSection(source=source, weights=weights))
    form = fused_form(model)
    engine = Engine(form)
    expected = model.sample(model.denoiser, SEEDS, steps=1, solver="ddim")
    drawn = model.sample(engine, SEEDS, steps=1, solver="ddim")
    assert relative_error(drawn, expected) < SAME_ARITHMETIC
    assert engine.scales == [[1.0 if source == "digits-dit" else 2.0] * 2]
    assert form.dims["batch"] == (1, model.dims["batch"][1] // 2, model.dims["batch"][2] // 2)


@pytest.mark.parametrize("name", ["digits", "stable_diffusion"])
def test_models_whose_denoiser_is_on_another_device_have_the_form_too(model_of, digits, name):
    """As for builds on a GPU."""
    model = digits if name == "digits" else model_of(name)
    moved = sampled_from(model, torch.device("cpu"))
    engine = Engine(fused_form(moved))
    drawn = moved.sample(engine, SEEDS, steps=2, solver="ddim")
    assert engine.rows == [len(SEEDS)] * 2
    assert relative_error(drawn, model.sample(model.denoiser, SEEDS, steps=2, solver="ddim")) < SAME_ARITHMETIC


# Bundles --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fused_build(digits_build, tmp_path_factory) -> Path:
    """The shipped model with the calibration and the plan of `digits_build`, with guidance inside."""
    folder = tmp_path_factory.mktemp("fused")
    recipe = json.loads(digits_build.recipe.read_text())
    recipe["engine"] |= {"guidance": "fused"}
    (folder / "recipe.yaml").write_text(json.dumps(recipe))
    outcome = run("build", folder / "recipe.yaml", "-o", folder / "bundle", "--cache", digits_build.cache)
    assert outcome.exit_code == 0, outcome.output
    return folder / "bundle"


def test_a_bundle_gives_the_sum_with_a_scale_for_each_sample(digits_build, fused_build):
    separate, fused = (runtime.load(folder, backend="onnxruntime") for folder in (digits_build.bundle, fused_build))
    before, after = (bundle.manifest.components["denoiser"] for bundle in (separate, fused))
    assert [site.model_dump() for site in after.sites] == [site.model_dump() for site in before.sites]
    assert after.input_ranges == before.input_ranges and after.dims == before.dims

    x, timestep = initial_noise(range(3), (1, 8, 8)), torch.tensor([900.0, 500.0, 20.0])
    label, negative, scale = torch.tensor([1, 2, 3]), torch.tensor([10, 10, 7]), torch.tensor([1.0, 3.0, 0.0])
    both = separate["denoiser"](torch.cat([x, x]), torch.cat([timestep] * 2), torch.cat([negative, label]))
    found = fused["denoiser"](x, timestep, label=label, negative_label=negative, guidance_scale=scale)
    expected = both[:3] + scale.view(-1, 1, 1, 1) * (both[3:] - both[:3])
    assert relative_error(found, expected) < WHOLE_DENOISER
    assert relative_error(found[0], both[3]) < WHOLE_DENOISER  # 1 is the conditional prediction alone
    with pytest.raises(UserError, match=r"does not have the component's inputs.*\n.*negative_label, guidance_scale"):
        fused["denoiser"](x, timestep, label)


def test_a_manifest_of_guidance_that_cannot_be_is_told(fused_build):
    manifest = read_manifest(fused_build)
    component = manifest.components["denoiser"]
    assert component.guidance is not None and contradiction(manifest) == ""
    for changes, told in (
        ({"scale": "timesteps"}, "guidance.scale: timesteps, which is not an input"),
        ({"scale": "label"}, "guidance.scale: label, which is not an input with a float32 number"),
        ({"negative": {}}, "guidance.negative: none"),
        ({"negative": {"label": "label"}}, "guidance.negative.label: label; both must be inputs"),
        ({"negative": {"label": "x"}}, "guidance.negative.label: x, of another type or shape"),
        (
            {"negative": {"label": "negative_label", "negative_label": "label"}},
            "guidance: label in several roles",
        ),
        ({"scale": "timestep"}, "guidance: timestep in several roles"),
    ):
        other = component.model_copy(update={"guidance": component.guidance.model_copy(update=changes)})
        assert told in contradiction(manifest.model_copy(update={"components": {"denoiser": other}}))
    further = component.inputs[-1].model_copy(update={"name": "style"})
    other = component.model_copy(update={"inputs": [*component.inputs, further]})
    assert "guidance: style has a row for each sample, but no role" in contradiction(
        manifest.model_copy(update={"components": {"denoiser": other}})
    )
    other = component.model_copy(update={"inputs": []})
    assert "inputs: none" in contradiction(manifest.model_copy(update={"components": {"denoiser": other}}))


def test_samplers_draw_the_same_from_both_bundles(digits_build, fused_build):
    def drawn(folder: Path) -> Tensor:
        denoiser = runtime.load(folder, backend="onnxruntime")["denoiser"]
        labels = torch.tensor([1, 2])
        return sample(
            denoiser, initial_noise(SEEDS, (1, 8, 8)), _SCHEDULE, prediction="v_prediction", steps=4, guidance=3.0,
            conditions={"label": labels}, null_conditions={"label": torch.full_like(labels, 10)},
        )  # fmt: skip

    # Each of four steps may round differently.
    assert relative_error(drawn(fused_build), drawn(digits_build.bundle)) < FLIPPED_CALL


def test_commands_tell_of_guidance_and_draw(fused_build, tmp_path):
    assert "inside, with the input guidance_scale" in " ".join(run("inspect", fused_build).output.split())
    outcome = run("run", fused_build, "-o", tmp_path / "grid.png", "--samples", 3, "--steps", 2)
    assert outcome.exit_code == 0, outcome.output


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore:the pipeline uses predictions")
def test_a_bundle_of_a_pipeline_is_dropped_in(tmp_path, monkeypatch):
    """PixArt on ONNX Runtime: the drop-in draws the same as the bundle with both halves."""
    import converted_pipelines as converted

    given = list[type]()

    def seeing(component: OnnxRuntimeComponent, trajectory: Any, inputs: tuple[Tensor, ...], named: Any) -> Any:
        given.extend(type(x) for x in (*inputs, *named.values()))
        return call(component, trajectory, inputs, named)

    call = OnnxRuntimeComponent.call
    monkeypatch.setattr(OnnxRuntimeComponent, "call", seeing)

    def drawn(guidance: str) -> tuple[Tensor, tuple[int, int, int]]:
        engine = {"backend": "onnxruntime", "guidance": guidance}
        bundle = runtime.load(converted.convert(tmp_path, "pixart", {}, engine=engine))
        pipe = load_pipeline(tmp_path / "pipeline")
        pipe.transformer = bundle.as_diffusers()
        prompt = {
            "encoder_hidden_states": torch.randn(2, converted.TOKENS, tiny_pipelines.WIDTH),
            "encoder_attention_mask": torch.ones(2, converted.TOKENS, dtype=torch.int64),
        }
        noise = torch.randn(2, 4, 8, 8)
        for _ in range(2):  # some samplers denoise a prediction again
            noise = pipe.transformer(noise, timestep=torch.ones(1), **prompt).sample[:, :4]
        noise.sum()
        return converted.draw(pipe, "pixart"), bundle.manifest.components["denoiser"].dims["batch"]

    (expected, rows), (found, samples) = drawn("separate"), drawn("fused")
    assert (rows, samples) == ((1, 2, 4), (1, 1, 2)) and set(given) == {Tensor}
    assert relative_error(found, expected) < WHOLE_DENOISER


# Refusals -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "call", "told"),
    [
        ("flux", {}, "passes the scale of guidance to the denoiser"),
        ("stable_diffusion", {"guidance_rescale": 0.7}, "uses the prediction of one half, as for guidance_rescale"),
        ("stable_diffusion", {"guidance_scale": 1.0}, "draws without guidance"),
        ("dit", {}, "variances of a half"),
        ("ltx_2", {}, "got: one that returns sample, audio_sample"),
        ("ddpm", {}, r"inputs sample \['batch', 3, 16, 16\], timestep \['batch'\]"),
    ],
)
def test_pipelines_without_the_sum_alone_are_refused(model_of, name, call, told):
    with pytest.raises(
        UserError, match=rf"cannot apply guidance inside(.|\n)*{told}(.|\n)*set engine.guidance to separate"
    ):
        fused_form(model_of(name, **call))


def with_own_halves(denoiser, seeds, *, steps, solver, conditions=None):
    """A user's sampler that doubles the batch and computes the sum itself."""
    x, label = initial_noise(seeds, (1, 8, 8)), torch.tensor([seed % 10 for seed in seeds])
    negative, conditional = denoiser(
        torch.cat([x, x]), torch.full((2 * len(x),), 900.0), label=torch.cat([torch.full_like(label, 10), label])
    ).chunk(2)
    return negative + 3 * (conditional - negative)


def of_the_label_alone(denoiser, seeds, *, steps, solver, conditions=None):
    """A user's sampler without a label for no class."""
    labels = {"label": torch.tensor([seed % 10 for seed in seeds])}
    noise = initial_noise(seeds, (1, 8, 8))
    return sample(denoiser, noise, _SCHEDULE, prediction="v_prediction", steps=steps, conditions=labels)


@pytest.mark.parametrize(
    ("sampler", "told"),
    [
        (with_own_halves, "calls trtconvert.models.sample with conditions and null_conditions"),
        (of_the_label_alone, "with a condition for no class"),
    ],
)
def test_own_samplers_that_keep_the_sum_to_themselves_are_refused(digits, sampler, told):
    with pytest.raises(
        UserError, match=rf"cannot apply guidance inside(.|\n)*{told}(.|\n)*set engine.guidance to separate"
    ):
        fused_form(replace(digits, sample=sampler))


def test_a_model_without_conditions_is_refused_before_anything_is_calibrated(tmp_path):
    recipe = tiny_recipe(tmp_path, engine={"guidance": "fused"})
    outcome = run("build", recipe, "-o", tmp_path / "bundle", "--cache", tmp_path / "cache")
    refusal(
        outcome, "cannot apply guidance inside", "a condition with an entry for each sample", "set engine.guidance to"
    )
    assert not (tmp_path / "bundle").exists()


def test_caches_of_deltas_are_refused_beside_guidance_inside(tmp_path):
    recipe = {
        "model": {"source": "tiny_models:build"},
        "layers": {"modes": "static", "modiff": True},
        "engine": {"guidance": "fused"},
    }
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    outcome = run("build", tmp_path / "recipe.yaml", "-o", tmp_path / "bundle", "--cache", tmp_path / "cache")
    refusal(outcome, "'engine.guidance' does not fit", "separate with layers.modiff")
