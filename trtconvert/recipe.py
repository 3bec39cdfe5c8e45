"""Recipes: what to convert, how to calibrate it, what to build, and which quality it must keep.

A recipe is YAML. Every field has a default but `model`; unknown fields are refused with the nearest valid name, and every
error names its line.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    StrictBool,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from trtconvert.documents import YAML_CHARACTERS, YamlError, parse_yaml
from trtconvert.entry_point import look_in
from trtconvert.errors import UserError, did_you_mean
from trtconvert.files import read_limited

ONNX, ONNX_SUFFIX = "onnx", ".onnx"
"""What model.source is called where it is a file of this suffix, which model.weights names then."""

ModeName = Literal["fp16", "precision", "balanced", "aggressive", "fp8"]
LayerModeName = Literal["weight_only", "dynamic", "static"]
EntryPoint = Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")]
Target = Literal["sm75", "sm80", "sm86", "sm89", "sm120"]


def computes(target: str, dtype: str) -> bool:
    """Whether TensorRT-RTX computes in a type on a target: Turing has no BF16, and the library no FP32 products for it."""
    return target != "sm75" or dtype not in ("float32", "bfloat16")


def _component_name(name: str) -> str:
    if not re.fullmatch(r"all|text_encoder(_\d+)?|vae_(de|en)coder", name):
        raise ValueError("all, text_encoder, text_encoder_2, …, vae_decoder or vae_encoder")
    return name


def _lora_target(name: str) -> str:
    if not re.fullmatch(r"denoiser|text_encoder(_\d+)?", name):
        raise ValueError("denoiser, text_encoder, text_encoder_2, …")
    return name


ComponentName = Annotated[str, AfterValidator(_component_name)]
LoraTarget = Annotated[str, AfterValidator(_lora_target)]
Count = Annotated[int, Field(ge=1, strict=True)]
Seed = Annotated[int, Field(ge=0, lt=2**62, strict=True)]
"""torch takes 64 bits, and samples count up from here."""
Number = Annotated[float, Field(strict=True)]
"""Strict: true is no number, and as 1 it would open a gate."""
Share = Annotated[Number, Field(gt=0, lt=1)]


class _Section(BaseModel):
    # NaN would pass or fail every gate, and JSON, in which bundles keep the recipe, has neither NaN nor infinity.
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class ModelSection(_Section):
    """Where the denoiser comes from."""

    source: str = Field(
        description="`digits-dit` or `emoji-dit`, the models that ship with the project; `diffusers`, the denoiser of a "
        "pipeline that `save_pretrained` wrote; an ONNX file, relative to the recipe; or `package.module:function`, a function "
        "that returns a trtconvert.models.DiffusionModel."
    )
    weights: Path | None = Field(
        default=None,
        description="Pipeline folder, or file of weights (safetensors, .bin, .ckpt, GGUF), relative to the recipe.",
    )
    config: Path | None = Field(
        default=None,
        description="For one file of weights of a diffusers pipeline: a folder with model_index.json and all that the file does "
        "not hold; of models that it holds, config.json is enough. By default the folder that the file lies in.",
    )
    images: dict[str, Path | list[Path]] = Field(
        default_factory=dict,
        description="Images that the pipeline's call takes, by its arguments, such as `image` and `mask_image`, or lists of "
        "them, as for several ControlNets; relative to the recipe. Other images may be given to the pipeline later; they decide "
        "what the model is calibrated and verified on.",
    )
    options: dict[str, JsonValue] = Field(
        default_factory=dict,
        description="Keyword arguments for a `package.module:function`, or of "
        "trtconvert.models.diffusers.diffusers_model: `height`, `width`, `frames`, `prompts`, …; or, of an ONNX file, of "
        "trtconvert.models.onnx.model.onnx_model: `sizes`, `conditions`, `schedule`, …",
    )
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = Field(
        default="auto",
        description="Type of the engine's weights and inputs. `auto`: that in which a diffusers pipeline's denoiser was saved, "
        "float32 for other models. bfloat16 has the range of float32, which many models of today need, "
        "and an eighth of float16's precision; ONNX Runtime computes it in float32.",
    )

    @model_validator(mode="before")
    @classmethod
    def _of_onnx(cls, section: Any) -> Any:
        """An ONNX file that stands for a source: it is where the weights are."""
        source = section.get("source") if isinstance(section, dict) else None
        if not isinstance(source, str) or not source.endswith(ONNX_SUFFIX):
            return section
        if section.get("weights") is not None:
            raise ValueError("an ONNX file holds its weights: remove model.weights")
        return {**section, "source": ONNX, "weights": source}

    @field_validator("images")
    @classmethod
    def _by_argument(cls, images: dict[str, Path | list[Path]]) -> dict[str, Path | list[Path]]:
        """Files of bundles are named after them."""
        if bad := [name for name in images if not name.isidentifier()]:
            raise ValueError(f"arguments of the pipeline's call, not {', '.join(map(repr, bad))}")
        return images


class LoraSection(_Section):
    """A LoRA that is merged into the model before anything is observed."""

    file: Path = Field(
        description="Safetensors file in the layout of diffusers, of peft or of kohya's scripts, relative to the recipe."
    )
    scale: Number = Field(default=1.0, description="What its difference from the weights is multiplied by.")
    target: LoraTarget = Field(
        default="denoiser",
        description="What it is merged into: `denoiser`, `text_encoder`, `text_encoder_2`, …; what the file has for others is "
        "left out. A file for several has an entry for each.",
    )


class AttentionSection(_Section):
    """Which attention runs in INT8, and how."""

    include: list[str] = Field(default=["*"], min_length=1, description="Patterns (fnmatch) of site names to convert.")
    exclude: list[str] = Field(default=[], description="Patterns of site names to leave as they are.")
    modes: Literal["auto", "sigma-rule"] | ModeName | list[ModeName] = Field(
        default="auto",
        description="One mode for every timestep, or one per timestep bin from low noise up. `sigma-rule`: aggressive "
        "where σ/σ_mid > 5, precision where σ/σ_mid < 0.1, balanced between. `auto`: the fastest modes per site and bin "
        "that keep the budget of the plan section. `fp8`: as precision, but the second product in FP8 on Hopper.",
    )
    scaling: Literal["auto", "calibrated", "dynamic"] = Field(
        default="auto",
        description="`calibrated`: static per-head scales. `dynamic`: modes precision, balanced and fp8 measure the scales "
        "of queries (per token) and keys (per 128) while they run, which is closer on inputs unlike the calibration's. `auto`: "
        "dynamic at each site where plan.kernel_cost, or the times that come with the program, show it no slower, or do not "
        "tell.",
    )
    smooth_k: bool = Field(
        default=True, description="Subtract the calibrated mean key before quantising; softmax does not see it."
    )
    sparse: Literal["off", "auto"] | Share = Field(
        default="off",
        description="Leave out the blocks of 128 queries × 128 keys that hold almost no attention, as the calibration finds them "
        "for each site, timestep bin and head. A number is the share of each query block's attention that may be lost, in all "
        "bins: 0.01 for a hundredth. `auto`: the plan's search chooses one of plan.sparse_candidates, or none, per site and bin, "
        "with the modes. For sites with 385 tokens or more that attend to themselves, and one size of everything but the batch.",
    )


class LayersSection(_Section):
    """Which linear layers and convolutions run in INT8, and how."""

    include: list[str] = Field(
        default=["*"],
        min_length=1,
        description="Patterns (fnmatch) of layer names to convert. `*` leaves the first and the last layer out, which "
        "patterns of their own names take in.",
    )
    exclude: list[str] = Field(default=[], description="Patterns of layer names to leave as they are.")
    kinds: list[Literal["linear", "conv"]] = Field(
        default=["linear"],
        min_length=1,
        description="`linear` layers, and convolutions (`conv`). Those of U-Nets that lie behind group norms are kernels of ours "
        "on Hopper; the others are INT8 in ONNX Runtime and Q/DQ engines alone.",
    )
    min_rows: Count = Field(
        default=2,
        description="Rows (tokens, pixels) for each sample below which activations stay in 16 bits, see few_rows. 1 takes in "
        "modulations and embeddings of the timestep, whose errors meet every token.",
    )
    few_rows: Literal["weight_only", "exact"] = Field(
        default="weight_only",
        description="What layers of fewer rows become: with `weight_only` those of at least four million weights, as modulations "
        "of large transformers, have INT8 weights, half the memory; with `exact` they stay as they are.",
    )
    modes: Literal["auto", "off"] | LayerModeName | list[LayerModeName] = Field(
        default="auto",
        description="One mode for every timestep, or one per timestep bin from low noise up. `static`: INT8 weights and "
        "activations, calibrated scales. `dynamic`: scales of activations measured per token. `weight_only`: "
        "INT8 weights, activations in 16 bits. `off`: no layer. `auto`: what the plan's search decides together "
        "with attention where attention.modes is auto, else static.",
    )
    equalise: bool = Field(
        default=True,
        description="SmoothQuant: channels of activations are scaled, and weights the other way, where that lowers the error.",
    )
    offsets: bool = Field(
        default=False,
        description="Subtract the middle of each channel's range from activations where that lowers the error, as behind a "
        "GELU, and add its product with the weights to the bias. For ONNX Runtime and our kernels; TensorRT's "
        "own (Q/DQ) take a wider scale instead.",
    )
    scales: Literal["least-error", "maxima"] = Field(
        default="least-error",
        description="Scales of activations: those of least squared error, or the calibration's percentile of the calls' maxima.",
    )
    modiff: StrictBool | Literal["auto"] | Annotated[list[str], Field(min_length=1)] = Field(
        default=False,
        description="MoDiff: layers with static scales in all timestep bins quantise how their inputs change from step to step, "
        "and add the products to caches, which the runtime holds. true for all of them, or patterns of layer names; `auto`: "
        "those that the plan's search chooses, by what caches cost in time and save in error, where layers.modes is auto. Needs "
        "calibration.data that is denoised step by step (denoise, prompts), and one height and width in engine.shapes.",
    )

    @property
    def off(self) -> bool:
        return self.modes == "off"

    @model_validator(mode="after")
    def _modulated_are_static(self) -> LayersSection:
        if self.modiff is False:
            return self
        modes = {self.modes} if isinstance(self.modes, str) else set(self.modes)
        problems = (
            (not {"auto", "static"} & modes, "modes",
             "static or auto with layers.modiff, which is for static layers; or layers.modiff: false"),
            (isinstance(self.modes, list) and modes != {"static"}, "modes",
             "static with layers.modiff, which is for layers that are static in all timestep bins"),
            (self.modiff == "auto" and self.modes != "auto", "modiff",
             "true or patterns where layers.modes are stated: auto is for the search of layers.modes: auto"),
            (self.offsets, "offsets", "false with layers.modiff: changes have no offsets"),
        )  # fmt: skip
        for wrong, field, expected in problems:
            if wrong:
                context = {"expected": expected, "place": ("layers", field), "got": getattr(self, field)}
                raise PydanticCustomError("modiff", "{expected}", context)
        return self


class CalibrationSection(_Section):
    """What is observed, and how ranges become scales."""

    model_config = ConfigDict(serialize_by_alias=True)

    from_: Path | None = Field(
        default=None,
        alias="from",
        description="A file that `trtconvert calibrate` wrote for this model, instead of calibrating; `bins` must be its own.",
    )
    data: Literal["denoise"] | EntryPoint | Path = Field(
        default="denoise",
        description="`denoise`: seeded denoising runs of the model. Or denoiser inputs (.safetensors, .npz, .pt), a folder of "
        "images with or without captions, prompts (.txt), a dataset that datasets.save_to_disk wrote, or "
        "`package.module:function`, which yields dictionaries of denoiser inputs.",
    )
    samples: Count = Field(default=64, description="Samples to denoise, or images, prompts or recorded inputs to use.")
    batch: Count = Field(default=16, description="Samples per batch; percentiles are taken over batches.")
    steps: Count = Field(
        default=20, description="Denoising steps of each run, or timesteps at which each image is shown."
    )
    seed: Seed = Field(
        default=0, description="First seed of the denoising runs, or of the noise that images are shown with."
    )
    percentile: Annotated[Number, Field(gt=0, le=100)] = Field(
        default=99.0, description="Of `statistic`; what is larger is clipped."
    )
    statistic: Literal["batch-max", "elements", "mse"] = Field(
        default="batch-max",
        description="What the percentile is taken of: the maxima of the batches, or the magnitudes of all elements. Or `mse`: "
        "the ranges of least squared error, without a percentile. The last two run the data twice.",
    )
    bins: Annotated[Count, Field(le=64)] = Field(
        default=10, description="Timestep bins; each has its own scales and mode."
    )

    @model_validator(mode="after")
    def _made_or_taken(self) -> CalibrationSection:
        fields = type(self).model_fields.items()
        also = [n for n, f in fields if n not in ("from_", "bins") and getattr(self, n) != f.default]
        if self.from_ is not None and also:
            raise ValueError(f"'from' takes a calibration as it is: remove {', '.join(also)}")
        return self


class PlanSection(_Section):
    """The budget of `modes: auto`, and the samples on which the search measures."""

    min_psnr: Number = Field(
        default=36.0, description="dB, against full precision; 3 dB above the gate leave room for other seeds."
    )
    min_ssim: Annotated[Number, Field(gt=0, le=1)] | None = Field(
        default=None, description="Mean structural similarity to full precision, for images of 5 pixels and more."
    )
    lpips_weights: Path | None = Field(
        default=None, description="torchvision's AlexNet weights: the plans' LPIPS is measured; relative to the recipe."
    )
    max_lpips: Annotated[Number, Field(gt=0)] | None = Field(
        default=None, description="Mean LPIPS against full precision; needs lpips_weights."
    )
    features: Literal["digits-classifier", "emoji-classifier", "inception"] | EntryPoint | None = Field(
        default=None,
        description="A feature extractor, as for `trtconvert evaluate --features`: the plans' feature distance is measured.",
    )
    features_weights: Path | None = Field(
        default=None, description="Weights of the feature extractor, relative to the recipe."
    )
    max_feature_distance: Annotated[Number, Field(gt=0)] | None = Field(
        default=None,
        description="Mean squared distance between unit vectors of features of INT8 and of full-precision samples, 0 to 4. "
        "Not LPIPS, whose layers are weighted to agree with people. Needs features.",
    )
    kernel_cost: Path | None = Field(
        default=None,
        description="Times of the attention kernels on the GPU that the plan is for, as `trtconvert measure` writes them "
        "there; relative to the recipe. attention.scaling: auto reads them too. The "
        "times that come with the program, of an H100, by default.",
    )
    candidates: list[ModeName] = Field(
        default=["precision", "balanced", "aggressive"],
        min_length=1,
        description="Modes that the search may choose, beside fp16, which serves what none of them can: [balanced, aggressive] "
        "for a plan of INT8 in both products. fp8 may be added for long sequences on Hopper, where it is 14 % faster than "
        "aggressive. Its relative error is 0.04, or 0.09 if all queries attend to one token; those of aggressive are 0.02 and "
        "0.15, of precision 0.01 and 0.01. A kernel_cost that was measured before fp8 existed has to be measured again.",
    )
    layer_candidates: list[LayerModeName] = Field(
        default=["static"],
        min_length=1,
        description="Modes of layers that the search may choose, beside their own type, where layers.modes is auto.",
    )
    sparse_candidates: list[Share] = Field(
        default=[0.01, 0.03, 0.1],
        min_length=1,
        max_length=8,
        description="Shares of attention that the search may leave out, where attention.sparse is auto.",
    )
    point: str | None = Field(
        default=None,
        description="Name of a plan that the search tried, as the bundle's frontier.json and report list them, to be built "
        "instead of the fastest one. It must keep the budget too.",
    )
    samples: Count = Field(default=8, description="Seeds sampled with every plan that is tried.")
    steps: Count = Field(
        default=20, description="Denoising steps; at least calibration.bins, so that every bin is seen."
    )
    seed: Seed = Field(default=500, description="First seed; apart from calibration's and verify's.")

    sensitivity: Literal["auto", "exact", "probes"] = Field(
        default="auto",
        description="How the error of each choice is measured. `exact`: the model runs once for each choice in every step. "
        "`probes`: random projections of the prediction are carried back to all choices at once, so that the cost does not grow "
        "with the number of sites. `auto`: exact for up to 64 choices. The plans that are found are sampled in any case.",
    )

    @field_validator("sparse_candidates")
    @classmethod
    def _distinct(cls, shares: list[float]) -> list[float]:
        if len(set(shares)) != len(shares):
            raise ValueError("each share once")
        return sorted(shares)

    @model_validator(mode="after")
    def _measurable(self) -> PlanSection:
        for limit, needed in (("max_lpips", "lpips_weights"), ("max_feature_distance", "features")):
            if getattr(self, limit) is not None and getattr(self, needed) is None:
                raise ValueError(f"{needed} as well: {limit} is measured with it")
        if self.features_weights is not None and self.features is None:
            raise ValueError("features as well: features_weights are its weights")
        return self


class Range(_Section):
    """Sizes that an engine accepts in one symbolic dimension."""

    min: Count = Field(description="The smallest size.")
    opt: Count = Field(description="The size that the engine is tuned for.")
    max: Count = Field(description="The largest size.")

    @model_validator(mode="before")
    @classmethod
    def _from_list(cls, value: Any) -> Any:
        if isinstance(value, int):
            return {"min": value, "opt": value, "max": value}
        if isinstance(value, (list, tuple)) and len(value) == 3:
            return dict(zip(("min", "opt", "max"), value, strict=True))
        if not isinstance(value, (dict, Range)):
            raise ValueError("a size, or [min, opt, max]")
        return value

    @model_validator(mode="after")
    def _ordered(self) -> Range:
        if not self.min <= self.opt <= self.max:
            raise ValueError("min <= opt <= max")
        return self


class ComputeSection(_Section):
    """Where calibration, search and verification compute."""

    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto",
        description="`auto` takes the GPU where there is one and the model fits, and says which and why. On a GPU the "
        "engine's own kernels compute INT8; on a CPU their specification does in FP32, which takes hours for models of published "
        "sizes.",
    )
    offload: Literal["auto", "on", "off"] = Field(
        default="auto",
        description="Whether the model's weights lie in host memory and come to the GPU block by block, by diffusers' group "
        "offloading. That changes no number and takes longer. `auto` does so where the model does not fit the GPU otherwise. "
        "With `off` such a model computes on the CPU, unless device is cuda.",
    )
    precision: Literal["model", "float32"] = Field(
        default="model",
        description="Of what is called full precision, on a GPU: model.dtype, with FP32 where the model asks for it, or float32. "
        "On a CPU it is float32.",
    )


class EngineSection(_Section):
    """What is built."""

    backend: Literal["auto", "tensorrt", "tensorrt_rtx", "onnxruntime"] = Field(
        default="auto",
        description="`auto` takes the first of tensorrt, tensorrt_rtx and onnxruntime that this machine can build with.",
    )
    shapes: dict[str, Range] = Field(
        default_factory=dict,
        description="Symbolic dimension: [min, opt, max]. What is absent takes the model's own range.",
    )
    profiles: list[dict[str, Range]] = Field(
        default=[],
        description="Instead of shapes: several such mappings, an optimisation profile each. One engine serves all of them "
        "and is tuned for the opt of each.",
    )
    targets: list[Target] = Field(
        default=["sm75", "sm80", "sm86", "sm89", "sm120"],
        min_length=1,
        description="GPUs that TensorRT-RTX builds for, an engine each.",
    )
    attention: Literal["auto", "plugin", "native"] = Field(
        default="auto",
        description="tensorrt: `auto` times both on the GPU that builds, at each distinct shape, and keeps TensorRT's own "
        "attention where it is the faster. It then times whole engines, also with the plugin at every site, with TensorRT's own "
        "attention at further ones and at every one, and without any plugin, and keeps the fastest. `plugin` and `native` take "
        "one at every site and time nothing.",
    )
    layers: Literal["auto", "plugin", "native", "exact"] = Field(
        default="auto",
        description="tensorrt: how INT8 layers are computed. `native`: by TensorRT's own kernels (Q/DQ). `plugin`: by ours "
        "where there is one. `exact`: in 16 bits, with the weights that INT8 holds. `auto` takes what is the "
        "faster, by rules that were measured for each size, and by whole engines where attention is auto too. Layers that "
        "quantise changes (`layers.modiff`) are computed by Q/DQ or, with FP16 caches, by plugins: by these where nothing is "
        "timed.",
    )
    workspace_mb: Annotated[Count, Field(le=2**20)] | None = Field(
        default=None, description="MiB of scratch memory that a layer may take; the library's own limit by default."
    )
    optimization_level: Annotated[int, Field(ge=0, le=5, strict=True)] = Field(
        default=3, description="tensorrt: how many kernels the builder tries, 0 to 5; more takes longer."
    )
    refittable: bool = Field(
        default=False,
        description="tensorrt: weights of the engine can be replaced. The bundle then keeps what INT8 layers are quantised from.",
    )
    version_compatible: bool = Field(
        default=False, description="tensorrt: later versions of it load the engine as well."
    )
    hardware_compatible: bool = Field(
        default=False, description="tensorrt: every GPU from sm80 on runs the engine, some speed aside."
    )
    weight_streaming: bool = Field(
        default=False, description="tensorrt: weights may stay in host memory and travel while the engine runs."
    )
    guidance: Literal["separate", "fused"] = Field(
        default="separate",
        description="Classifier-free guidance. `separate`: the sampler or pipeline calls the denoiser with both halves, and adds "
        "them up. `fused`: the denoiser takes samples once, the conditions of both halves, and a scale for each sample, "
        "`guidance_scale`; it gives one prediction. The batch in shapes and profiles is then the number of samples.",
    )
    channels_last: bool = Field(
        default=True,
        description="tensorrt: group norms of U-Nets, and what turns images into tokens and back, are plugins that keep channels "
        "last as convolutions do, on Hopper and later, with either attention.",
    )

    @field_validator("targets")
    @classmethod
    def _distinct(cls, targets: list[str]) -> list[str]:
        if len(set(targets)) != len(targets):
            raise ValueError("each target once")
        return targets

    @model_validator(mode="after")
    def _one_form_of_shapes(self) -> EngineSection:
        if self.shapes and self.profiles:
            raise ValueError("shapes or profiles, not both")
        return self

    @field_validator("refittable")
    @classmethod
    def _replaceable(cls, refittable: bool, info: ValidationInfo) -> bool:
        if refittable and info.data.get("layers") == "native":
            raise ValueError(
                "false with engine.layers: native, whose INT8 weights cannot be replaced; or engine.layers: auto, plugin or exact"
            )
        return refittable

    def ranges(self) -> list[dict[str, Range]]:
        """What each optimisation profile asks for, at least one."""
        return self.profiles or [self.shapes]


class VerifyOnGpu(_Section):
    """What the gates draw where the build computes on a GPU."""

    samples: Count = Field(default=16, description="Seeds, in the place of verify.samples.")
    steps: Count = Field(default=20, description="Denoising steps, in the place of verify.steps.")


class VerifySection(_Section):
    """The gates: a build whose images or outputs miss one of them fails."""

    samples: Count = Field(default=64, description="Seeds sampled by the full-precision and by the INT8 model.")
    steps: Count = Field(default=50, description="Denoising steps.")
    on_gpu: VerifyOnGpu | None = Field(
        default=None,
        description="Other samples and steps where the build computes on a GPU, which draws more in less time.",
    )
    sampler: Literal["ddim", "heun", "euler"] = Field(
        default="ddim", description="How the samples are drawn; `ddim` with a pipeline stands for its own scheduler."
    )
    seed: Seed = Field(default=1000, description="First seed; keep it apart from the calibration's.")
    min_psnr: Number = Field(
        default=33.0, description="dB, of the final samples against the full-precision model's, over all seeds."
    )
    lpips_weights: Path | None = Field(
        default=None,
        description="torchvision's AlexNet weights: LPIPS of the samples is measured, and is a gate; relative to the recipe.",
    )
    max_lpips: Annotated[Number, Field(gt=0)] | None = Field(
        default=0.1,
        description="Mean LPIPS of the final samples against the full-precision model's, where lpips_weights are given. People "
        "seldom see a difference below 0.1; null for no such gate.",
    )
    min_site_sqnr: Number = Field(
        default=15.0, description="dB, of each site's output in each timestep bin against exact attention."
    )
    max_error: Annotated[Number, Field(gt=0)] | None = Field(
        default=None,
        description="Relative L2 error of the exported denoiser against the torch reference of the same arithmetic. By default "
        "0.01, or 0.03 where a site runs in fp8 or a layer multiplies in INT8: it counts what falls on the other side of a "
        "rounding edge.",
    )
    max_prediction_error: Annotated[Number, Field(gt=0)] | None = Field(
        default=0.03,
        description="Relative L2 error of the engine's prediction against full precision in every timestep bin, on inputs of "
        "full-precision trajectories. Measured where an engine is built on this machine's GPU, by `trtconvert compile` too; null "
        "for no such gate.",
    )
    max_component_error: Annotated[Number, Field(gt=0)] = Field(
        default=0.02,
        description="Relative L2 error of each output of a text encoder or VAE, in its engine's type, against float32 in torch.",
    )


class StepsSection(_Section):
    """Denoising steps that need not be computed: predictions are extrapolated from the last two that were."""

    computed: Literal["all", "auto"] | Annotated[Number, Field(gt=0, le=1)] = Field(
        default="all",
        description="`all` computes every step. `auto` leaves out as many as the budget of the section plan allows. A number is "
        "the share of the steps that may be computed, as 0.4. What is chosen at calibrated steps holds for other numbers of "
        "steps and other schedulers by its modelled error: few steps leave none out.",
    )
    calibrated: Annotated[int, Field(ge=4, strict=True)] = Field(
        default=50,
        description="Denoising steps on which schedules are measured: as many as are usual for the model, or more.",
    )
    samples: Count = Field(default=8, description="Seeds of the samples that schedules are measured on.")
    seed: Seed = Field(default=700, description="First seed; apart from those of the other sections.")


class ComponentSection(_Section):
    """How one of the pipeline's other models is converted. Its attention stays in its own precision."""

    dtype: Literal["float32", "float16", "bfloat16"] | None = Field(
        default=None,
        description="Type of the engine's weights and inputs; model.dtype for text encoders and float32 for the VAE by default.",
    )
    layers: Literal["int8", "exact"] | None = Field(
        default=None,
        description="`int8`: its linear layers and convolutions run in INT8, as `layers` says for the denoiser, calibrated "
        "on what the pipeline passes; as they are by default.",
    )


class OutputSection(_Section):
    """What the bundle holds beside the engines."""

    grid: Annotated[Count, Field(le=64)] = Field(default=16, description="Samples shown in samples.png.")


class Recipe(_Section):
    """A conversion from end to end."""

    model: ModelSection
    loras: list[LoraSection] = Field(
        default=[],
        description="LoRA files that are merged into the model's weights. Engines that are refittable can change them later.",
    )
    attention: AttentionSection = AttentionSection()
    layers: LayersSection = LayersSection()
    calibration: CalibrationSection = CalibrationSection()
    plan: PlanSection = PlanSection()
    steps: StepsSection = StepsSection()
    components: dict[ComponentName, ComponentSection] = Field(
        default_factory=dict,
        description="With model.source diffusers: models of the pipeline to convert beside the denoiser, `text_encoder`, "
        "`text_encoder_2`, …, `vae_decoder`, `vae_encoder`. `all` stands for those that turn prompts into images, and holds "
        "what they do not say themselves.",
    )
    compute: ComputeSection = ComputeSection()
    engine: EngineSection = EngineSection()
    verify: VerifySection = VerifySection()
    output: OutputSection = OutputSection()

    @model_validator(mode="after")
    def _a_mode_per_bin(self) -> Recipe:
        bins = self.calibration.bins
        for name, modes in (("attention", self.attention.modes), ("layers", self.layers.modes)):
            if isinstance(modes, list) and len(modes) != bins:
                raise PydanticCustomError(
                    "modes",
                    "one entry of {section}.modes per timestep bin: calibration.bins is {bins}, the modes are {count}",
                    {"section": name, "bins": bins, "count": len(modes), "place": (name, "modes"), "got": modes},
                )
        return self

    @model_validator(mode="after")
    def _shares_are_chosen_or_stated(self) -> Recipe:
        """Levels of block masks are the search's choice, as modes are, or stated beside stated modes."""
        sparse, searched = self.attention.sparse, self.attention.modes == "auto"
        expected = ""
        if sparse == "auto" and not searched:
            expected = (
                "a share such as 0.01, or off, where attention.modes are stated: auto is for the search of modes: auto"
            )
        if not isinstance(sparse, str) and searched:
            expected = f"auto with attention.modes: auto, and plan.sparse_candidates: [{sparse:g}]"
        if expected:
            raise PydanticCustomError(
                "sparse",
                "{expected}",
                {"expected": expected, "place": ("attention", "sparse"), "got": sparse},
            )
        return self

    @property
    def sparse_shares(self) -> tuple[float, ...]:
        """Shares of attention that may be left out, rising, of which masks are needed; none where attention stays dense."""
        sparse = self.attention.sparse
        if isinstance(sparse, str):
            return tuple(self.plan.sparse_candidates) if sparse == "auto" else ()
        return (sparse,)

    @property
    def plan_follows_steps(self) -> bool:
        """Whether the plan is chosen together with the denoising steps that are computed."""
        return self.steps.computed == "auto" and self.attention.modes == "auto" and self.plan.point is None

    @model_validator(mode="after")
    def _changes_can_be_seen(self) -> Recipe:
        """What changes from step to step needs steps in order, and layers that the engine computes in INT8."""
        if self.layers.modiff is False:
            return self
        calibration, engine = self.calibration, self.engine
        problems = (
            (calibration.from_ is None and calibration.steps < 2, ("calibration", "steps"), calibration.steps,
             "2 steps or more: layers.modiff is calibrated on changes from step to step"),
            (self.layers.modiff == "auto" and self.attention.modes != "auto", ("layers", "modiff"), "auto",
             "true or patterns where attention.modes are stated: auto is for the search of attention.modes: auto"),
            (self.layers.modiff == "auto" and "static" not in self.plan.layer_candidates, ("layers", "modiff"), "auto",
             "static among plan.layer_candidates with layers.modiff: auto"),
            (engine.refittable, ("engine", "refittable"), True,
             "false with layers.modiff: TensorRT's own INT8 layers compute changes, whose weights cannot be replaced"),
            (engine.layers == "exact", ("engine", "layers"), engine.layers,
             "auto or native with layers.modiff: 16-bit layers have no caches"),
            (engine.guidance == "fused", ("engine", "guidance"), engine.guidance,
             "separate with layers.modiff: caches have a row for each row of the denoiser, and both halves are two of them"),
            (self.steps.computed != "all", ("steps", "computed"), self.steps.computed,
             "all with layers.modiff, whose scales are of changes from one step to the next"),
        )  # fmt: skip
        for wrong, place, got, expected in problems:
            if wrong:
                raise PydanticCustomError(
                    "modiff", "{expected}", {"expected": expected, "place": place, "got": str(got)}
                )
        return self


def load_recipe(path: Path) -> Recipe:
    """Read and check a recipe; relative paths in it become relative to the recipe's folder.

    Raises:
        UserError: the file cannot be read, is not YAML, or does not fit the schema. Names the line and the nearest name.
    """
    try:
        # Limited as what is in it: a character takes up to four bytes.
        text = read_limited(path, 4 * YAML_CHARACTERS).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"cannot read the recipe {path}",
            expected="a YAML file in UTF-8",
            got=_reason(error),
            remedy="check the path",
        ) from error
    try:
        document = parse_yaml(text)
    except YamlError as error:
        where = f"{path}:{error.line}" if error.line else str(path)
        raise UserError(
            f"{where}: {error.problem}", expected=error.expected, got=error.got, remedy=error.remedy
        ) from error
    if not isinstance(document, dict):
        raise UserError(
            f"{path}: a recipe is a mapping of sections",
            expected=f"sections {', '.join(Recipe.model_fields)}",
            got=_kind(document) if document is not None else "an empty file",
            remedy="let `trtconvert init` write one",
        )
    try:
        recipe = Recipe.model_validate(_plain(path, document))
    except ValidationError as error:
        raise UserError("\n".join(_problems(path, document, error.errors()))) from error
    _refuse_unseen_bins(path, document, recipe)
    _refuse_unfit_targets(path, document, recipe)
    look_in(path.parent)
    return _anchored(recipe, path.parent)


def json_schema() -> dict[str, Any]:
    """JSON schema of recipes, for editors."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema"} | Recipe.model_json_schema()


def _reason(error: Exception) -> str:
    return error.strerror or type(error).__name__ if isinstance(error, OSError) else "bytes that are not UTF-8"


def _refuse_unseen_bins(path: Path, document: Any, recipe: Recipe) -> None:
    """
    Raises:
        UserError: the search of a plan would take fewer steps than there are timestep bins, and measure nothing in some.
    """
    steps, bins = recipe.plan.steps, recipe.calibration.bins
    if recipe.attention.modes == "auto" and steps < bins:
        raise UserError(
            f"{path}:{_line(document, ('plan', 'steps'))}: 'plan.steps' does not fit 'calibration.bins'",
            expected=f"at least {bins} steps, so that the search measures every timestep bin",
            got=str(steps),
            remedy="raise plan.steps, or lower calibration.bins",
        )


def _refuse_unfit_targets(path: Path, document: Any, recipe: Recipe) -> None:
    """
    Raises:
        UserError: the recipe asks for an engine for Turing, where TensorRT-RTX computes in float16 alone. By default there is
            none.
    """
    engine, dtype = recipe.engine, recipe.model.dtype
    asked = "targets" in engine.model_fields_set and engine.backend in ("auto", "tensorrt_rtx")
    if asked and any(not computes(target, dtype) for target in engine.targets):
        raise UserError(
            f"{path}:{_line(document, ('engine', 'targets'))}: 'engine.targets' does not fit 'model.dtype'",
            expected="model.dtype float16 for sm75, which has no products of other types in TensorRT-RTX",
            got=f"{dtype} and {', '.join(engine.targets)}",
            remedy="take sm75 out of engine.targets, or set model.dtype to float16",
        )


def _plain(path: Path, node: Any) -> Any:
    """The document without ruamel's types."""
    if isinstance(node, dict):
        for key in node:
            if not isinstance(key, str):
                raise UserError(
                    f"{path}:{_line(node, (key,))}: a field's name is not text",
                    expected="text",
                    got=repr(key),
                    remedy="put it in quotes, or correct it",
                )
        return {key: _plain(path, value) for key, value in node.items()}
    if isinstance(node, list):
        return [_plain(path, value) for value in node]
    return node


def _anchored(recipe: Recipe, folder: Path) -> Recipe:
    return with_paths(recipe, lambda path: folder / path)


def changed_paths(paths: Path | list[Path], change: Callable[[Path], Path]) -> Path | list[Path]:
    """One path or several, each changed."""
    return [change(path) for path in paths] if isinstance(paths, list) else change(paths)


def with_paths(recipe: Recipe, change: Callable[[Path], Path]) -> Recipe:
    """The recipe with every path in it changed."""

    def changed(section: _Section) -> _Section:
        paths: dict[str, Any] = {name: change(value) for name, value in section if isinstance(value, Path)}
        if isinstance(section, ModelSection):
            paths["images"] = {argument: changed_paths(path, change) for argument, path in section.images.items()}
        return section.model_copy(update=paths)

    sections: dict[str, Any] = {name: changed(section) for name, section in recipe if isinstance(section, _Section)}
    if recipe.loras:
        sections["loras"] = [changed(lora) for lora in recipe.loras]
    return recipe.model_copy(update=sections)


def _problems(path: Path, document: Any, errors: list[Any]) -> Iterator[str]:
    """What pydantic found, as expected, got and remedy, with the line in the file."""
    found: dict[tuple, list[Any]] = {}
    for error in errors[:_ERRORS]:
        found.setdefault(_place(document, error), []).append(error)
    for keys, here in found.items():
        # A union complains once per branch: the branch that got deeper is the one that was meant.
        if not any(len(other) > len(keys) and other[: len(keys)] == keys for other in found):
            yield _describe(f"{path}:{_line(document, keys)}", keys, here)


def _place(document: Any, error: Any) -> tuple:
    """The keys that lead to an error. Pydantic's location also has names of union branches and of validators."""
    if error["type"] == "missing":
        return error["loc"]
    keys, node = [], document
    for part in error.get("ctx", {}).get("place") or error["loc"]:
        if (isinstance(node, dict) and part in node) or (isinstance(node, list) and isinstance(part, int)):
            keys.append(part)
            node = node[part]
    return tuple(keys)


def _line(document: Any, keys: tuple) -> int:
    """Line of the last key that the file has; ruamel keeps [line, column, …] of keys and of items, but of no merged ones."""
    node, line = document, 1
    for key in keys:
        places = getattr(getattr(node, "lc", None), "data", None) or {}
        place = places.get(key)
        line = place[0] + 1 if place else line
        try:
            node = node[key]
        except (KeyError, IndexError):
            break
    return line


_ERRORS = 100
"""Of pydantic's that are told. A long list of wrong entries has several for each."""

_SHOWN = 200
"""Characters of a value that messages repeat."""

_EXPECTED = {
    "model_type": "a mapping of fields",
    "dict_type": "a mapping",
    "list_type": "a list",
    "string_type": "text",
    "string_pattern_mismatch": "package.module:function",
    "path_type": "a path",
    "int_type": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "too_short": "at least one entry",
    "too_long": "at most {max_length} entries",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "invalid-json-value": "text, a number, true or false, a list or a mapping",
}
"""Kinds of pydantic's errors in words of YAML."""


def _describe(where: str, keys: tuple, errors: list[Any]) -> str:
    field, error = ".".join(map(str, keys)) or "recipe", errors[0]
    if error["type"] == "missing":
        return str(UserError(f"{where}: '{field}' is missing", expected="a value", got="none", remedy="add it"))
    if error["type"] == "extra_forbidden":
        valid = sorted(_fields_at(keys[:-1]))
        return str(
            UserError(
                f"{where}: unknown field '{field}'",
                expected=f"one of {', '.join(valid)}",
                got=str(keys[-1]),
                remedy=did_you_mean(str(keys[-1]), valid, "remove it"),
            )
        )
    got = error.get("ctx", {}).get("got", error["input"])
    expected = list(
        dict.fromkeys(_EXPECTED.get(e["type"], "").format_map(e.get("ctx", {})) or e["msg"] for e in errors)
    )
    expected = [text.removeprefix("Value error, ").removeprefix("Input should be ") for text in expected]
    names = [
        name for e in errors if e["type"] == "literal_error" for name in re.findall("'(.*?)'", e["ctx"]["expected"])
    ]
    return str(
        UserError(
            f"{where}: '{field}' does not fit",
            expected=", or ".join(expected),
            got=_shown(got) if keys else "",
            remedy=did_you_mean(str(got), names, "correct it; `trtconvert schema` describes every field"),
        )
    )


def _shown(value: Any) -> str:
    text = repr(value) if isinstance(value, (str, int, float, list)) else _kind(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "…"


def _kind(value: Any) -> str:
    """What a YAML value is, in words."""
    kinds = {
        dict: "a mapping",
        list: "a list",
        str: "text",
        bool: "true or false",
        int: "a number",
        float: "a number",
        datetime.date: "a date",
    }
    return next((words for kind, words in kinds.items() if isinstance(value, kind)), "nothing")


def _fields_at(keys: tuple) -> Iterator[str]:
    """Names of the fields of a section, or of what a section's mapping holds by names of the user's."""
    section: Any = Recipe
    for key in keys:
        field = section.model_fields.get(key)
        annotation = field.annotation if field else None
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            section = annotation
        elif field:  # of several: components, LoRAs, or the ranges of engine.shapes and engine.profiles
            section = {"components": ComponentSection, "loras": LoraSection}.get(key, Range)
    yield from (field.alias or name for name, field in section.model_fields.items())
