"""Recipes: the model, its calibration, the engines to build, and the quality that they must keep.

A recipe is YAML. Every field except `model` has a default. Errors name the line, and unknown fields the nearest valid name.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

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
"""`model.source` of an ONNX file, and the suffix of ONNX files; `model.weights` names the file."""

ModeName = Literal["fp16", "precision", "balanced", "aggressive", "fp8"]
LayerModeName = Literal["weight_only", "dynamic", "static"]
EntryPoint = Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")]
Target = Literal["sm75", "sm80", "sm86", "sm89", "sm120"]


def computes(target: str, dtype: str) -> bool:
    """Returns whether TensorRT-RTX supports a type on a target: on Turing it has no matrix products in BF16 and FP32."""
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
"""Seeds of further samples count up from this one, and torch takes 64 bits."""
Number = Annotated[float, Field(strict=True)]
"""Strict, because `true` read as 1 would open a gate."""
Share = Annotated[Number, Field(gt=0, lt=1)]


def _refuse_misfits(*checks: tuple[bool, tuple[str, str], object, str]) -> None:
    """Raises pydantic's error for the first field that does not fit other fields.

    Args:
        checks: whether the field does not fit; its section and name; its value; the expected value.
    """
    for wrong, place, got, expected in checks:
        if wrong:
            raise PydanticCustomError("misfit", "{expected}", {"expected": expected, "place": place, "got": got})


class _Section(BaseModel):
    # NaN would pass or fail every gate, and bundles keep the recipe in JSON, which has neither NaN nor infinity.
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class ModelSection(_Section):
    """The model to convert."""

    source: str = Field(
        description="`digits-dit` or `emoji-dit`, models that ship with the project; `diffusers`, the denoiser of a pipeline "
        "saved by `save_pretrained`; an ONNX file, relative to the recipe; or `package.module:function`, a function that returns "
        "a trtconvert.models.DiffusionModel."
    )
    weights: Path | None = Field(
        default=None,
        description="Pipeline folder, or file of weights (safetensors, .bin, .ckpt, GGUF), relative to the recipe.",
    )
    config: Path | None = Field(
        default=None,
        description="For a single file of weights of a diffusers pipeline: a folder with model_index.json and the models that "
        "the file does not hold. For models in the file, config.json is enough. Default: the folder of the file.",
    )
    images: dict[str, Path | list[Path]] = Field(
        default_factory=dict,
        description="Images for the pipeline's call by its arguments, such as `image` and `mask_image`, or lists of images for "
        "several ControlNets; relative to the recipe. The model is calibrated and verified on them; the converted pipeline takes "
        "other images too.",
    )
    options: dict[str, JsonValue] = Field(
        default_factory=dict,
        description="Keyword arguments of a `package.module:function`; of trtconvert.models.diffusers.diffusers_model: `height`, "
        "`width`, `frames`, `prompts`, …; or, for an ONNX file, of trtconvert.models.onnx.model.onnx_model: `sizes`, "
        "`conditions`, `schedule`, …",
    )
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = Field(
        default="auto",
        description="Type of the engine's weights and inputs. `auto`: the saved type of a diffusers pipeline's denoiser, and "
        "float32 for other models. bfloat16 has the range of float32, which many current models need, and an eighth of "
        "float16's precision; ONNX Runtime computes bfloat16 models in float32.",
    )

    @model_validator(mode="before")
    @classmethod
    def _of_onnx(cls, section: Any) -> Any:
        """Moves an ONNX file from `source` to `weights`."""
        source = section.get("source") if isinstance(section, dict) else None
        if not isinstance(source, str) or not source.endswith(ONNX_SUFFIX):
            return section
        if section.get("weights") is not None:
            raise ValueError("an ONNX file holds its weights: remove model.weights")
        return {**section, "source": ONNX, "weights": source}

    @field_validator("images")
    @classmethod
    def _by_argument(cls, images: dict[str, Path | list[Path]]) -> dict[str, Path | list[Path]]:
        """Checks the arguments: files of bundles are named after them."""
        if bad := [name for name in images if not name.isidentifier()]:
            raise ValueError(f"arguments of the pipeline's call, not {', '.join(map(repr, bad))}")
        return images


class LoraSection(_Section):
    """A LoRA that is merged into the model before the calibration."""

    file: Path = Field(
        description="Safetensors file in the layout of diffusers, of peft or of kohya's scripts, relative to the recipe."
    )
    scale: Number = Field(default=1.0, description="Factor of the LoRA's weight difference.")
    target: LoraTarget = Field(
        default="denoiser",
        description="The model to merge into: `denoiser`, `text_encoder`, `text_encoder_2`, …; the file's parts for other models "
        "are ignored. A file for several models gets an entry for each.",
    )


class AttentionSection(_Section):
    """Attention sites that run in INT8, and their modes."""

    include: list[str] = Field(default=["*"], min_length=1, description="Patterns (fnmatch) of site names to convert.")
    exclude: list[str] = Field(default=[], description="Patterns of site names that stay unconverted.")
    modes: Literal["auto", "sigma-rule"] | ModeName | list[ModeName] = Field(
        default="auto",
        description="One mode for every timestep, or one per timestep bin from low noise up. `sigma-rule`: aggressive "
        "for σ/σ_mid > 5, precision for σ/σ_mid < 0.1, and balanced between. `auto`: the fastest modes per site and bin "
        "that keep the budget of the plan section. `fp8`: like precision, with the second product in FP8 on Hopper.",
    )
    scaling: Literal["auto", "calibrated", "dynamic"] = Field(
        default="auto",
        description="`calibrated`: static per-head scales. `dynamic`: modes precision, balanced and fp8 measure the scales "
        "of queries (per token) and keys (per 128 tokens) at run time, which is closer on inputs that differ from the "
        "calibration. `auto`: dynamic at every site unless plan.kernel_cost, or the program's own times, show that it is slower.",
    )
    smooth_k: bool = Field(
        default=True, description="Subtract the calibrated mean key before quantising; softmax is invariant to this."
    )
    sparse: Literal["off", "auto"] | Share = Field(
        default="off",
        description="Skip blocks of 128 queries × 128 keys with almost no attention; the calibration finds them for each site, "
        "timestep bin and head. A number is the share of each query block's attention that may be lost, for example 0.01, in all "
        "bins. `auto`: the plan's search chooses one of plan.sparse_candidates, or none, per site and bin, together with the "
        "modes. For self-attention over 385 tokens or more, and one size of each dimension except the batch.",
    )


class LayersSection(_Section):
    """Linear layers and convolutions that run in INT8, and their modes."""

    include: list[str] = Field(
        default=["*"],
        min_length=1,
        description="Patterns (fnmatch) of layer names to convert. `*` excludes the first and the last layer; patterns of their "
        "names include them.",
    )
    exclude: list[str] = Field(default=[], description="Patterns of layer names that stay unconverted.")
    kinds: list[Literal["linear", "conv"]] = Field(
        default=["linear"],
        min_length=1,
        description="`linear` layers, and convolutions (`conv`). Our kernels compute a U-Net's convolutions after group norms on "
        "Hopper; other convolutions are INT8 in ONNX Runtime and Q/DQ engines only.",
    )
    min_rows: Count = Field(
        default=2,
        description="Layers with fewer rows (tokens, pixels) per sample keep activations in 16 bits, see few_rows. 1 includes "
        "modulations and embeddings of the timestep: their errors reach every token.",
    )
    few_rows: Literal["auto", "weight_only", "exact"] = Field(
        default="auto",
        description="Layers with fewer rows. `weight_only`: layers of at least four million weights, such as modulations of "
        "large transformers, get INT8 weights, which take half the memory. `exact`: these layers stay unconverted. `auto`: with "
        "layers.modes auto the plan's search decides about each, as errors of modulations reach every token; else weight_only.",
    )
    modes: Literal["auto", "off"] | LayerModeName | list[LayerModeName] = Field(
        default="auto",
        description="One mode for every timestep, or one per timestep bin from low noise up. `static`: INT8 weights and "
        "activations, calibrated scales. `dynamic`: activation scales measured per token. `weight_only`: "
        "INT8 weights, activations in 16 bits. `off`: no layer. `auto`: the plan's search decides together "
        "with attention if attention.modes is auto; else static.",
    )
    equalise: bool = Field(
        default=True,
        description="SmoothQuant: scale channels of activations, and weights inversely, if that lowers the error.",
    )
    offsets: bool = Field(
        default=False,
        description="Subtract the middle of each channel's range from activations if that lowers the error, as after a GELU, "
        "and add its product with the weights to the bias. For ONNX Runtime and our kernels; TensorRT's own kernels (Q/DQ) take "
        "a wider scale instead.",
    )
    scales: Literal["least-error", "maxima"] = Field(
        default="least-error",
        description="Activation scales: of least squared error, or from the calibration's percentile of the calls' maxima.",
    )
    modiff: StrictBool | Literal["auto"] | Annotated[list[str], Field(min_length=1)] = Field(
        default=False,
        description="MoDiff: layers with static scales in all timestep bins quantise the deltas of their inputs between steps, "
        "and add the products to caches, which the runtime holds. true: all such layers; or patterns of layer names; "
        "`auto`, with layers.modes auto: the plan's search chooses layers by the time that caches cost and the error that they "
        "save. Needs calibration.data that is denoised step by step (denoise, prompts), and one height and width in "
        "engine.shapes.",
    )

    @property
    def off(self) -> bool:
        return self.modes == "off"

    @model_validator(mode="after")
    def _modulated_are_static(self) -> LayersSection:
        if self.modiff is False:
            return self
        modes = {self.modes} if isinstance(self.modes, str) else set(self.modes)
        _refuse_misfits(
            (not {"auto", "static"} & modes, ("layers", "modes"), self.modes,
             "static or auto with layers.modiff; or layers.modiff: false"),
            (isinstance(self.modes, list) and modes != {"static"}, ("layers", "modes"), self.modes,
             "static in all timestep bins with layers.modiff"),
            (self.modiff == "auto" and self.modes != "auto", ("layers", "modiff"), self.modiff,
             "true or patterns with stated layers.modes: modiff: auto needs layers.modes: auto"),
            (self.offsets, ("layers", "offsets"), True, "false with layers.modiff: deltas have no offsets"),
        )  # fmt: skip
        return self


class CalibrationSection(_Section):
    """The calibration data, and how observed ranges become scales."""

    model_config = ConfigDict(serialize_by_alias=True)

    from_: Path | None = Field(
        default=None,
        alias="from",
        description="A file of `trtconvert calibrate` for this model, in place of a calibration; `bins` must be the file's.",
    )
    data: Literal["denoise"] | EntryPoint | Path = Field(
        default="denoise",
        description="`denoise`: seeded denoising runs of the model. Or denoiser inputs (.safetensors, .npz, .pt), a folder of "
        "images with or without captions, prompts (.txt), a dataset saved by datasets.save_to_disk, or "
        "`package.module:function`, a function that yields dictionaries of denoiser inputs.",
    )
    samples: Count = Field(default=64, description="Samples to denoise, or images, prompts or recorded inputs to use.")
    batch: Count = Field(default=16, description="Samples per batch; percentiles are taken over batches.")
    steps: Count = Field(default=20, description="Denoising steps of each run, or timesteps of each image.")
    seed: Seed = Field(
        default=0, description="First seed of the denoising runs, or of the noise that is added to images."
    )
    percentile: Annotated[Number, Field(gt=0, le=100)] = Field(
        default=99.0, description="Percentile of `statistic`; larger values are clipped."
    )
    statistic: Literal["batch-max", "elements", "mse"] = Field(
        default="batch-max",
        description="The percentile is taken over the maxima of batches, or over the magnitudes of all elements. `mse`: ranges "
        "of least squared error, without a percentile. `elements` and `mse` run the data twice.",
    )
    bins: Annotated[Count, Field(le=64)] = Field(
        default=10, description="Timestep bins; each has its own scales and mode."
    )

    @model_validator(mode="after")
    def _made_or_taken(self) -> CalibrationSection:
        fields = type(self).model_fields.items()
        also = [n for n, f in fields if n not in ("from_", "bins") and getattr(self, n) != f.default]
        if self.from_ is not None and also:
            raise ValueError(f"'from' alone, without {', '.join(also)}: the file's calibration was made with its own")
        return self


class PlanSection(_Section):
    """The quality budget of `modes: auto`, and the samples of the search."""

    min_psnr: Number = Field(
        default=36.0, description="PSNR in dB against full precision; 3 dB above the gate leave room for other seeds."
    )
    min_ssim: Annotated[Number, Field(gt=0, le=1)] | None = Field(
        default=None, description="Mean structural similarity to full precision, for images of 5 pixels and more."
    )
    lpips_weights: Path | None = Field(
        default=None,
        description="torchvision's AlexNet weights, relative to the recipe: measures the LPIPS of plans.",
    )
    max_lpips: Annotated[Number, Field(gt=0)] | None = Field(
        default=None, description="Mean LPIPS against full precision; needs lpips_weights."
    )
    features: Literal["digits-classifier", "emoji-classifier", "inception"] | EntryPoint | None = Field(
        default=None,
        description="A feature extractor as of `trtconvert evaluate --features`: measures the feature distance of plans.",
    )
    features_weights: Path | None = Field(
        default=None, description="Weights of the feature extractor, relative to the recipe."
    )
    max_feature_distance: Annotated[Number, Field(gt=0)] | None = Field(
        default=None,
        description="Mean squared distance between unit vectors of features of INT8 and of full-precision samples, 0 to 4. "
        "This is not LPIPS, which weights layers to agree with people. Needs features.",
    )
    max_prediction_error: Annotated[Number, Field(gt=0)] | None = Field(
        default=0.025,
        description="Relative L2 error of a plan's predictions against full precision, in every timestep bin, on inputs of "
        "full-precision trajectories; 0.005 below the gate leave room for the engine and other seeds. null: no limit.",
    )
    kernel_cost: Path | None = Field(
        default=None,
        description="Kernel times on the plan's target GPU, a file of `trtconvert measure`, relative to the recipe; read by "
        "attention.scaling: auto too. Default: the program's own times of an H200.",
    )
    candidates: list[ModeName] | None = Field(
        default=None,
        min_length=1,
        description="Modes that the search may choose, beside fp16. Default: precision and aggressive; on a Hopper GPU precision "
        "and fp8, one of which is as fast as aggressive or faster at every measured shape. balanced is for GPUs where "
        "`trtconvert measure` shows that it is faster than precision; on an H100 it is slower and less exact. fp8 is for long "
        "sequences with heads of 128 on Hopper, where it is the fastest mode. The relative error of fp8 is 0.04, of aggressive "
        "0.02, of precision 0.01, also if all queries attend to one token. A "
        "kernel_cost without fp8 must be measured again for fp8.",
    )
    layer_candidates: list[LayerModeName] | None = Field(
        default=None,
        min_length=1,
        description="Layer modes that the search may choose with layers.modes auto, beside the layer's own type. Default: "
        "static; dynamic for linear layers of a U-Net on a Hopper GPU, where the engine's kernels give each row its own scale.",
    )
    sparse_candidates: list[Share] = Field(
        default=[0.01, 0.03, 0.1],
        min_length=1,
        max_length=8,
        description="Shares of attention that the search may skip with attention.sparse auto.",
    )
    point: str | None = Field(
        default=None,
        description="Build this plan of an earlier search in place of the fastest one; the bundle's frontier.json and report "
        "list the names. The plan of a mode of attention, such as `precision everywhere`, is also built if no search took the "
        "mode. The plan must keep the budget too.",
    )
    samples: Count = Field(default=8, description="Seeds sampled with every tried plan.")
    steps: Count = Field(
        default=20, description="Denoising steps; at least calibration.bins, so that the search measures every bin."
    )
    seed: Seed = Field(default=500, description="First seed; must differ from the seeds of calibration and verify.")
    sensitivity: Literal["auto", "exact", "probes"] = Field(
        default="auto",
        description="How the search measures the error of each choice. `exact`: the model runs once for each choice in every "
        "step. `probes`: random projections of the prediction are propagated back to all choices at once, so that the cost does "
        "not grow with the number of sites. `auto`: exact for up to 64 choices. The found plans are sampled in any case.",
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
                raise ValueError(f"{needed} as well, which {limit} needs")
        if self.features_weights is not None and self.features is None:
            raise ValueError("features as well, which features_weights belong to")
        return self

    @property
    def searched_modes(self) -> Sequence[ModeName]:
        """The candidates, or the defaults for any GPU."""
        return self.candidates or ("precision", "aggressive")

    @property
    def searched_layer_modes(self) -> Sequence[LayerModeName]:
        """The candidates, or the default for any model and GPU."""
        return self.layer_candidates or ("static",)


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
    """The device and precision of calibration, search and verification."""

    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto",
        description="`auto` takes the GPU if there is one and the model fits, and prints the choice with its reason. On a GPU "
        "the engine's kernels compute INT8; on a CPU the reference in FP32 does, which takes hours for published models.",
    )
    offload: Literal["auto", "on", "off"] = Field(
        default="auto",
        description="Keep the model's weights in host memory and copy them to the GPU block by block, by diffusers' group "
        "offloading. Results are the same, and the build takes longer. `auto` offloads models that do not fit the GPU otherwise. "
        "With `off` such a model computes on the CPU, unless device is cuda.",
    )
    precision: Literal["model", "float32"] = Field(
        default="model",
        description="Type of full precision on a GPU: model.dtype, with FP32 in modules that demand it, or float32. On a CPU it "
        "is always float32.",
    )


class EngineSection(_Section):
    """The engines to build."""

    backend: Literal["auto", "tensorrt", "tensorrt_rtx", "onnxruntime"] = Field(
        default="auto",
        description="`auto` takes the first of tensorrt, tensorrt_rtx and onnxruntime that this machine can use.",
    )
    shapes: dict[str, Range] = Field(
        default_factory=dict,
        description="Symbolic dimension: [min, opt, max]. Other dimensions take the model's own range.",
    )
    profiles: list[dict[str, Range]] = Field(
        default=[],
        description="In place of shapes: several such mappings, one optimisation profile each. One engine serves all profiles "
        "and is tuned for the opt sizes of each.",
    )
    targets: list[Target] = Field(
        default=["sm75", "sm80", "sm86", "sm89", "sm120"],
        min_length=1,
        description="GPU architectures; TensorRT-RTX builds one engine for each.",
    )
    attention: Literal["auto", "plugin", "native"] = Field(
        default="auto",
        description="tensorrt: `auto` times our plugin and TensorRT's own attention on the build's GPU at each distinct shape, "
        "and keeps the faster. `auto` then builds and times up to four whole engines, also with TensorRT's own attention at "
        "every site, with other mixes of the two, with other layers and without any plugin, and keeps the fastest. `plugin` and "
        "`native` use one of them at every site without timing.",
    )
    layers: Literal["auto", "plugin", "native", "exact"] = Field(
        default="auto",
        description="tensorrt: kernels of INT8 layers. `native`: TensorRT's own (Q/DQ). `plugin`: ours, for layers that we have "
        "kernels for. `exact`: 16-bit products of the dequantised INT8 weights. `auto` takes the faster, by measured rules for "
        "each size, and by whole engines if attention is auto too. MoDiff layers (`layers.modiff`) are computed by Q/DQ or, with "
        "FP16 caches, by plugins; without timing by plugins.",
    )
    workspace_mb: Annotated[Count, Field(le=2**20)] | None = Field(
        default=None, description="Largest scratch memory of a layer in MiB; default: the library's own limit."
    )
    optimization_level: Annotated[int, Field(ge=0, le=5, strict=True)] = Field(
        default=3, description="tensorrt: how many kernels the builder tries, 0 to 5; higher levels take longer."
    )
    refittable: bool = Field(
        default=False,
        description="tensorrt: the engine's weights can be replaced. The bundle then keeps the unquantised weights of INT8 "
        "layers.",
    )
    version_compatible: bool = Field(
        default=False, description="tensorrt: later TensorRT versions load the engine too."
    )
    hardware_compatible: bool = Field(
        default=False, description="tensorrt: every GPU from sm80 on runs the engine, at a lower speed."
    )
    weight_streaming: bool = Field(
        default=False, description="tensorrt: weights may stay in host memory and are copied while the engine runs."
    )
    guidance: Literal["separate", "fused"] = Field(
        default="separate",
        description="Classifier-free guidance. `separate`: the sampler or pipeline calls the denoiser with both halves and adds "
        "them. `fused`: the denoiser takes samples once, the conditions of both halves, and `guidance_scale`, a scale for each "
        "sample, and returns one prediction. The batch in shapes and profiles is then the number of samples.",
    )
    channels_last: bool = Field(
        default=True,
        description="tensorrt: group norms of U-Nets, patchify and unpatchify are plugins in the channels-last layout of "
        "convolutions, on Hopper and later, with either attention.",
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
                "false with engine.layers: native, which has fixed INT8 weights; or engine.layers: auto, plugin or exact"
            )
        return refittable

    def ranges(self) -> list[dict[str, Range]]:
        """Returns the stated ranges of each optimisation profile, at least one."""
        return self.profiles or [self.shapes]


class VerifyOnGpu(_Section):
    """Samples of the gates in builds that compute on a GPU."""

    samples: Count = Field(default=16, description="Seeds, in place of verify.samples.")
    steps: Count = Field(default=20, description="Denoising steps, in place of verify.steps.")


class VerifySection(_Section):
    """The gates: a build fails if its images or outputs miss one of them."""

    samples: Count = Field(default=64, description="Seeds sampled by the full-precision and by the INT8 model.")
    steps: Count = Field(default=50, description="Denoising steps.")
    on_gpu: VerifyOnGpu | None = Field(
        default=None,
        description="Other samples and steps for builds that compute on a GPU, which draws faster.",
    )
    sampler: Literal["ddim", "heun", "euler"] = Field(
        default="ddim", description="Sampler; for a pipeline, `ddim` means the pipeline's own scheduler."
    )
    seed: Seed = Field(default=1000, description="First seed; must differ from the seeds of the calibration.")
    min_psnr: Number = Field(
        default=33.0, description="PSNR in dB of the final samples against full precision, over all seeds."
    )
    lpips_weights: Path | None = Field(
        default=None,
        description="torchvision's AlexNet weights, relative to the recipe: makes LPIPS of the samples a gate.",
    )
    max_lpips: Annotated[Number, Field(gt=0)] | None = Field(
        default=0.1,
        description="Mean LPIPS of the final samples against full precision; needs lpips_weights. People seldom see a difference "
        "below 0.1. null: no such gate.",
    )
    min_site_sqnr: Number = Field(
        default=15.0, description="SQNR in dB of each site's output in each timestep bin against exact attention."
    )
    max_error: Annotated[Number, Field(gt=0)] | None = Field(
        default=None,
        description="Relative L2 error of the exported denoiser against the torch reference of the same arithmetic. Default: "
        "0.01, or 0.03 if a site runs in fp8 or a layer multiplies in INT8, because values near a rounding edge may round "
        "differently.",
    )
    max_prediction_error: Annotated[Number, Field(gt=0)] | None = Field(
        default=0.03,
        description="Relative L2 error of the engine's prediction against full precision in every timestep bin, on inputs of "
        "full-precision trajectories. Measured on engines for this machine's GPU, by `trtconvert compile` too. null: no such "
        "gate.",
    )
    max_component_error: Annotated[Number, Field(gt=0)] = Field(
        default=0.02,
        description="Relative L2 error of each output of a text encoder or VAE, in its engine's type, against float32 in torch.",
    )


class StepsSection(_Section):
    """Denoising steps that are skipped: their predictions are extrapolated from the last two computed ones."""

    computed: Literal["all", "auto"] | Annotated[Number, Field(gt=0, le=1)] = Field(
        default="all",
        description="`all` computes every step. `auto` skips as many steps as the budget of the plan section allows. A number "
        "is the largest share of computed steps, for example 0.4. The choice, made at `calibrated` steps, transfers to other "
        "numbers of steps and other schedulers by its modelled error: with few steps no step is skipped.",
    )
    calibrated: Annotated[int, Field(ge=4, strict=True)] = Field(
        default=50,
        description="Denoising steps of the measurement: the usual number for the model, or more.",
    )
    samples: Count = Field(default=8, description="Seeds of the measurement.")
    seed: Seed = Field(default=700, description="First seed; must differ from the seeds of the other sections.")


class ComponentSection(_Section):
    """The conversion of another model of the pipeline. Its attention stays unconverted."""

    dtype: Literal["float32", "float16", "bfloat16"] | None = Field(
        default=None,
        description="Type of the engine's weights and inputs. Default: model.dtype for text encoders, float32 for the VAE.",
    )
    layers: Literal["int8", "exact"] | None = Field(
        default=None,
        description="`int8`: linear layers and convolutions run in INT8 with the settings of `layers`, calibrated on the "
        "pipeline's calls. Default: exact.",
    )


class OutputSection(_Section):
    """Further files of the bundle."""

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
        description="With model.source diffusers: further models of the pipeline to convert: `text_encoder`, `text_encoder_2`, "
        "…, `vae_decoder`, `vae_encoder`. `all` means the text encoders, the VAE decoder, and the VAE encoder if the pipeline "
        "encodes images of the recipe; it sets their defaults.",
    )
    compute: ComputeSection = ComputeSection()
    engine: EngineSection = EngineSection()
    verify: VerifySection = VerifySection()
    output: OutputSection = OutputSection()

    @model_validator(mode="after")
    def _a_mode_per_bin(self) -> Recipe:
        bins, sections = self.calibration.bins, {"attention": self.attention.modes, "layers": self.layers.modes}
        stated = {name: modes for name, modes in sections.items() if isinstance(modes, list)}
        _refuse_misfits(
            *(
                (len(modes) != bins, (name, "modes"), modes,
                 f"one entry of {name}.modes per timestep bin: calibration.bins is {bins}, the modes are {len(modes)}")
                for name, modes in stated.items()
            )
        )  # fmt: skip
        return self

    @model_validator(mode="after")
    def _shares_are_chosen_or_stated(self) -> Recipe:
        """Checks that block masks are searched with searched modes, and stated with stated modes."""
        sparse, searched = self.attention.sparse, self.attention.modes == "auto"
        _refuse_misfits(
            (sparse == "auto" and not searched, ("attention", "sparse"), sparse,
             "a share such as 0.01, or off, with stated attention.modes: sparse: auto needs attention.modes: auto"),
            (not isinstance(sparse, str) and searched, ("attention", "sparse"), sparse,
             f"auto with attention.modes: auto, and plan.sparse_candidates: [{sparse}]"),
        )  # fmt: skip
        return self

    @property
    def sparse_shares(self) -> tuple[float, ...]:
        """The rising shares of attention that need block masks; empty if attention stays dense."""
        sparse = self.attention.sparse
        if isinstance(sparse, str):
            return tuple(self.plan.sparse_candidates) if sparse == "auto" else ()
        return (sparse,)

    @property
    def plan_follows_steps(self) -> bool:
        """True if the search chooses the plan together with the computed steps."""
        return self.steps.computed == "auto" and self.attention.modes == "auto" and self.plan.point is None

    @model_validator(mode="after")
    def _changes_can_be_seen(self) -> Recipe:
        """Checks that MoDiff gets steps in order, and layers that the engine computes in INT8."""
        if self.layers.modiff is False:
            return self
        calibration, engine = self.calibration, self.engine
        _refuse_misfits(
            (calibration.from_ is None and calibration.steps < 2, ("calibration", "steps"), calibration.steps,
             "2 steps or more: layers.modiff is calibrated on deltas from step to step"),
            (self.layers.modiff == "auto" and self.attention.modes != "auto", ("layers", "modiff"), "auto",
             "true or patterns with stated attention.modes: modiff: auto needs attention.modes: auto"),
            (self.layers.modiff == "auto" and "static" not in self.plan.searched_layer_modes, ("layers", "modiff"), "auto",
             "static among plan.layer_candidates with layers.modiff: auto"),
            (engine.refittable, ("engine", "refittable"), True,
             "false with layers.modiff: MoDiff layers have fixed INT8 weights"),
            (engine.layers == "exact", ("engine", "layers"), engine.layers,
             "auto or native with layers.modiff: 16-bit layers have no caches"),
            (engine.guidance == "fused", ("engine", "guidance"), engine.guidance,
             "separate with layers.modiff: caches have one row per row of the denoiser, and both halves are two rows"),
            (self.steps.computed != "all", ("steps", "computed"), self.steps.computed,
             "all with layers.modiff: its scales hold for deltas from one step to the next"),
        )  # fmt: skip
        return self


def load_recipe(path: Path) -> Recipe:
    """Reads and checks a recipe. Relative paths are resolved against the recipe's folder.

    Raises:
        UserError: the file cannot be read, is not YAML, or does not fit the schema. Names the line and the nearest name.
    """
    try:
        # A character takes up to four bytes.
        text = read_limited(path, 4 * YAML_CHARACTERS).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"cannot read the recipe {path}",
            expected="a YAML file in UTF-8",
            got=error.strerror or type(error).__name__ if isinstance(error, OSError) else "bytes that are not UTF-8",
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
    return with_paths(recipe, lambda inner: path.parent / inner)


def json_schema() -> dict[str, Any]:
    """Returns the JSON schema of recipes, for editors."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema"} | Recipe.model_json_schema()


def _refuse_unseen_bins(path: Path, document: Any, recipe: Recipe) -> None:
    """Refuses a search with fewer steps than timestep bins, which measures nothing in some bins."""
    steps, bins = recipe.plan.steps, recipe.calibration.bins
    if recipe.attention.modes == "auto" and steps < bins:
        raise UserError(
            f"{path}:{_line(document, ('plan', 'steps'))}: 'plan.steps' does not fit 'calibration.bins'",
            expected=f"at least {bins} steps, so that the search measures every timestep bin",
            got=str(steps),
            remedy="raise plan.steps, or lower calibration.bins",
        )


def _refuse_unfit_targets(path: Path, document: Any, recipe: Recipe) -> None:
    """Refuses a stated Turing target unless model.dtype is float16. The default targets skip Turing instead."""
    engine, dtype = recipe.engine, recipe.model.dtype
    asked = "targets" in engine.model_fields_set and engine.backend in ("auto", "tensorrt_rtx")
    if asked and any(not computes(target, dtype) for target in engine.targets):
        raise UserError(
            f"{path}:{_line(document, ('engine', 'targets'))}: 'engine.targets' does not fit 'model.dtype'",
            expected="model.dtype float16 for sm75: TensorRT-RTX has no matrix products of other types there",
            got=f"{dtype} and {', '.join(engine.targets)}",
            remedy="take sm75 out of engine.targets, or set model.dtype to float16",
        )


def _plain(path: Path, node: Any) -> Any:
    """Converts ruamel's mappings and lists into dictionaries and lists."""
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


def changed_paths(paths: Path | list[Path], change: Callable[[Path], Path]) -> Path | list[Path]:
    """Applies `change` to a path, or to each path of a list."""
    return [change(path) for path in paths] if isinstance(paths, list) else change(paths)


def with_paths(recipe: Recipe, change: Callable[[Path], Path]) -> Recipe:
    """Returns the recipe with `change` applied to every path."""

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
    """Describes pydantic's errors, each with the line in the file."""
    found: dict[tuple, list[Any]] = {}
    for error in errors[:_ERRORS]:
        found.setdefault(_place(document, error), []).append(error)
    for keys, here in found.items():
        # A union reports errors of every branch: the branch that validated deepest is the intended one.
        if not any(len(other) > len(keys) and other[: len(keys)] == keys for other in found):
            yield _describe(f"{path}:{_line(document, keys)}", keys, here)


def _place(document: Any, error: Any) -> tuple:
    """Returns the keys that lead to an error, without the union branches and validators in pydantic's location."""
    if error["type"] == "missing":
        return error["loc"]
    keys, node = [], document
    for part in error.get("ctx", {}).get("place") or error["loc"]:
        if (isinstance(node, dict) and part in node) or (isinstance(node, list) and isinstance(part, int)):
            keys.append(part)
            node = node[part]
    return tuple(keys)


def _line(document: Any, keys: tuple) -> int:
    """Returns the line of the last key that the file has. ruamel knows the lines of keys and items, except merged ones."""
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
"""Largest number of reported errors. A wrong entry of a list causes several."""

_SHOWN = 200
"""Largest number of characters of a value in messages."""

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
"""Expected values for pydantic's error types, in terms of YAML."""


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
    kinds = {
        dict: "a mapping",
        list: "a list",
        str: "text",
        bool: "true or false",
        int: "a number",
        float: "a number",
        datetime.date: "a date",
    }
    return next(
        (words for kind, words in kinds.items() if isinstance(value, kind)),
        "nothing" if value is None else "a tagged value",
    )


def _fields_at(keys: tuple) -> Iterator[str]:
    """Yields the names of a section's fields, or of the entries of a mapping with names of the user's."""
    section: Any = Recipe
    for key in keys:
        if (field := section.model_fields.get(key)) is not None:
            section = _section_in(field.annotation) or section
    yield from (field.alias or name for name, field in section.model_fields.items())


def _section_in(annotation: Any) -> type[BaseModel] | None:
    """Returns the section in a field's type, such as the values of a mapping, or the other type of an optional section."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for part in get_args(annotation) if (found := _section_in(part)) is not None), None)
