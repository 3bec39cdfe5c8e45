"""Bundles: the folder that a build leaves, described by a manifest that names and hashes every file in it."""

from __future__ import annotations

import glob
import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from trtconvert import __version__
from trtconvert.documents import JSON_BYTES, read_json
from trtconvert.errors import TrtconvertError, UserError, first_line, first_problem
from trtconvert.files import is_partial, link_files, read_limited, sha256
from trtconvert.manifest_checks import contradiction
from trtconvert.noise_input import NoiseInput
from trtconvert.recipe import LayerModeName, ModelSection, ModeName, Recipe, changed_paths

FORMAT = 1
MANIFEST = "manifest.json"

IMAGES = "images"
"""Folder of a bundle with the images of its recipe, each named after the argument that it is."""

TRANSPOSED = ".T"
"""What the name of an ONNX initialiser ends with that is a transposed weight; else it is the weight's in the state dict."""

NAMESAKE = ":weight"
"""What follows that name where an input or an output of the model has it already: one graph has one value of a name."""

UNQUANTISED = ".unquantised.safetensors"
"""What follows the name of an ONNX model in that of the file with what its INT8 layers were quantised from."""

NEXT = ".next"
"""What the name of a cache ends with as an output, see `ComponentRecord.caches`."""

LINE = re.compile(r"(\d+)\*([A-Za-z_]\w*)([+-]\d+)?")
"""A dimension of an output that is a line through a symbolic one: "8*height", "4*frames-3"."""

Dims = dict[str, tuple[int, int, int]]
"""Symbolic dimension: (min, opt, max)."""


def _require_ordered(dims: Dims) -> Dims:
    if bad := [name for name, (low, opt, high) in dims.items() if not 1 <= low <= opt <= high]:
        raise ValueError(f"1 <= min <= opt <= max for {', '.join(bad)}")
    return dims


def is_inside(name: str) -> bool:
    """Whether a path is one of a file in a bundle beside the manifest, in the only form that manifests have it in."""
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts and str(path) == name and name not in (".", MANIFEST)


def _require_inside(name: str) -> str:
    if not is_inside(name):
        raise ValueError(f"a path in the bundle, not {name!r}")
    return name


_Ordered = Annotated[Dims, AfterValidator(_require_ordered)]
_Inside = Annotated[str, AfterValidator(_require_inside)]
_Name = Annotated[str, Field(min_length=1)]
_Count = Annotated[int, Field(ge=1)]
_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Magnitude = Annotated[float, Field(ge=0, allow_inf_nan=False)]

_SiteMode = Annotated[int, Field(ge=0, lt=len(get_args(ModeName)))]
"""`Mode`, which counts as recipes name them."""

_LayerMode = Annotated[int, Field(ge=1, le=len(get_args(LayerModeName)))]
"""`LayerMode`, which counts as recipes name them after 0 for layers that are left as they are, whose list is empty."""

SparseShares = list[Annotated[float, Field(ge=0, lt=1)]]
"""Of a site's attention that may be lost, per timestep bin; 0 in bins that have all its blocks."""

_WEIGHT_ONLY = 1 + get_args(LayerModeName).index("weight_only")


def opt_sizes(profiles: Sequence[Dims]) -> list[dict[str, int]]:
    """The sizes that the engine is tuned for, in each profile."""
    return [{name: opt for name, (_, opt, _) in dims.items()} for dims in profiles]


def covering(profiles: Sequence[Dims]) -> Dims:
    """From the least to the largest size of each dimension in any of the profiles, and the opt of the first."""
    return {
        name: (min(p[name][0] for p in profiles), opt, max(p[name][2] for p in profiles))
        for name, (_, opt, _) in profiles[0].items()
    }


_SHOWN = 300
"""Characters of what is wrong with a manifest that messages repeat."""


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class FileRecord(_Record):
    """Size in bytes and SHA-256 of one file."""

    size: Annotated[int, Field(ge=0)]
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class TensorRecord(_Record):
    """One input or output: numpy's name of its type, and sizes or symbolic dimensions, in outputs lines through them too."""

    name: _Name
    dtype: str
    shape: list[int | str]

    @field_validator("shape")
    @classmethod
    def _readable(cls, shape: list[int | str]) -> list[int | str]:
        if bad := [str(dim) for dim in shape if not _is_dimension(dim)]:
            raise ValueError(f"a size, a name, or a line through one: {', '.join(bad)}")
        return shape


def _is_dimension(dim: int | str) -> bool:
    if isinstance(dim, int):
        return dim >= 0
    return dim.isidentifier() or LINE.fullmatch(dim) is not None


class NativeSite(_Record):
    """A site that keeps TensorRT's own attention: on the engine's GPU that was the faster, alone or in the whole engine.

    Attributes:
        name: the site; query_tokens, key_tokens: its lengths at the opt shape of the first profile.
        native_us, plugin_us: device time of one call in microseconds, each attention alone, summed over the profiles' opt
            shapes. The plugin's is the mean over the site's timestep bins, quantisation included. None where no engine of this
            attention alone could be built or run.
    """

    name: _Name
    query_tokens: _Count
    key_tokens: _Count
    native_us: _Positive | None
    plugin_us: _Positive | None


class EngineRecord(_Record):
    """One serialized engine.

    Attributes:
        backend, library: the builder and its version.
        target: the GPU architecture that it was built for; gpu: the name of the GPU that it was built on, if on one.
        attention: "plugin" (INT8) or "native" (the model's own precision, at every site).
        file: path in the bundle.
        plugin: version of the plugin library that the plan holds; empty where it holds none.
        profiles: the optimisation profiles in the engine's order, each symbolic dimension: [min, opt, max]. Empty in bundles
            of before: one profile, the component's dims.
        native_sites: the sites that keep native attention because it was measured faster, in the order in which they were found.
        plugin_us, native_us: device time of one call in microseconds, summed over the profiles' opt shapes, of the whole engine
            with the plugin at the other sites (the mean over the timestep bins) and with native attention at every site. The
            faster is the one that was kept. None where they were not compared.
        with_plugins_us, plain_us: the same of the fastest engine with plugins, for attention or for group norms, and of
            TensorRT's own without any; the faster was kept. None where they were not compared: without plugins for group norms
            the engine with native attention at every site has none.
        layers: how INT8 layers are computed: "native" by TensorRT's own kernels (Q/DQ), "plugin" by ours where there is
            one, "exact" in 16 bits with their INT8 weights; empty where there are none.
        layers_us: the same times of whole engines that were compared for it, by these names; the fastest was kept.
        refittable: weights can be replaced; weights: their shapes by name, of those with more than one dimension.
        int8_constants: of a refittable engine, the constants that INT8 layers in plugins read, by name: the layer, and which of
            its tables it is (see `LayerTables`).
        prediction_error: [T] of the denoiser's, relative L2 error of its prediction against full precision, as it was measured on
            the GPU that built it; None for timestep bins without a recorded call. Empty where it was not measured.
        error: of another component's, the largest relative L2 error of its outputs against FP32 in torch, likewise.
        version_compatible: later TensorRT versions load it. hardware_compatible: any GPU from sm80 on runs it.
        weight_streaming: weights may stay in host memory.
    """

    backend: Literal["tensorrt", "tensorrt_rtx"]
    library: str
    target: _Name
    attention: Literal["plugin", "native"]
    file: _Inside
    gpu: str = ""
    plugin: str = ""
    profiles: list[_Ordered] = Field(default_factory=list)
    native_sites: list[NativeSite] = Field(default_factory=list)
    plugin_us: _Positive | None = None
    native_us: _Positive | None = None
    with_plugins_us: _Positive | None = None
    plain_us: _Positive | None = None
    layers: Literal["", "native", "plugin", "exact"] = ""
    layers_us: dict[Literal["native", "plugin", "exact"], _Positive] = Field(default_factory=dict)
    prediction_error: list[float | None] = Field(default_factory=list)
    error: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    refittable: bool = False
    weights: dict[str, list[_Count]] = Field(default_factory=dict)
    int8_constants: dict[str, tuple[_Name, Literal["weight", "weight_scale", "bias"]]] = Field(default_factory=dict)
    version_compatible: bool = False
    hardware_compatible: bool = False
    weight_streaming: bool = False

    @staticmethod
    def of(
        component: str, backend: Literal["tensorrt", "tensorrt_rtx"], library: str, target: str, gpu: str = ""
    ) -> EngineRecord:
        """The record of a component's engine, its file where every bundle keeps it: one for each GPU that it was built on."""
        name = "-".join([component, backend, target, *re.findall(r"[a-z0-9]+", gpu.lower())])
        return EngineRecord(
            backend=backend,
            library=library,
            target=target,
            attention="plugin" if backend == "tensorrt" else "native",
            file=f"engines/{name}.plan",
            gpu=gpu,
        )


class SiteRecord(_Record):
    """One attention site. `modes` per timestep bin, from low noise up; empty when the site was left as it is, for `reason`.
    `scaling` of its queries and keys; empty then, and in bundles of before, whose recipe says it for all.

    Attributes:
        sparse: the share of its attention that may be lost in each bin, and density: the share of its blocks that is computed;
            empty where it has no block mask. dense: why it has none, where the recipe asked for some.
    """

    name: _Name
    heads: _Count
    head_dim: _Count
    modes: list[_SiteMode]
    scaling: Literal["", "calibrated", "dynamic"] = ""
    reason: str = ""
    sparse: SparseShares = Field(default_factory=list)
    density: list[Annotated[float, Field(gt=0, le=1)]] = Field(default_factory=list)
    dense: str = ""

    @property
    def in_int8(self) -> bool:
        """Whether it quantises in some timestep bin: a plan may leave a converted site in FP16, mode 0."""
        return any(self.modes)


class LayerRecord(_Record):
    """One linear layer or convolution. `modes` (`LayerMode`) per timestep bin, from low noise up; empty when the layer was
    left as it is, for `reason`, or by the plan where there is none.

    Attributes:
        kind: "linear" or "conv".
        in_channels, out_channels, kernel: of its weight.
        rows: tokens or pixels for each sample, at the opt sizes.
        weight: the name of its weight in the state dict.
        modulated: it quantises the deltas of its input between steps, and has caches.
    """

    name: _Name
    kind: Literal["linear", "conv"]
    in_channels: _Count
    out_channels: _Count
    kernel: list[_Count] = Field(default_factory=list)
    rows: _Count
    weight: _Name
    modes: list[_LayerMode] = Field(default_factory=list)
    reason: str = ""
    modulated: bool = False

    @property
    def in_int8(self) -> bool:
        """Whether it is converted: its weights are INT8, whatever its activations are."""
        return bool(self.modes)

    @property
    def is_mixed(self) -> bool:
        """Whether its activations are INT8 in some timestep bins and of 16 bits in others."""
        return _WEIGHT_ONLY in self.modes and len(set(self.modes)) > 1


class DiffusersRecord(_Record):
    """How a diffusers pipeline calls one of its models.

    Attributes:
        pipeline: class of the pipeline; component: its attribute that the model stands for: "transformer", "text_encoder", …
        model: class of the model; config: its configuration.
        method: what the pipeline calls: "forward", "decode", "encode".
        output: class of what it returns, as `package.module:Class`.
        parameters: names of the method's parameters, in order; "**kwargs" where it takes any keyword.
        arguments: what the pipeline passes, by parameter. {"tensor": NAME} is an input of the signature (with "dtype", the
            type that the model wants where the signature has another), {"dict": …} and {"list": …} hold such values, and
            {"value": X} is a constant that the exported model has taken in. {"rows": NAME} is a list with a tensor for each
            sample, of one size, which the input holds one behind the other; with "least" they have different lengths, and are
            padded to the longest, and at least so many rows, and the input NAME.mask tells which rows are given; a tensor with
            "least" is padded likewise. A "dict" with "numbered" has whole numbers as keys, a "list" with "tuple" is a tuple.
            {"share": NAME, "of": TIMESTEP} holds a timestep for each token or frame, which is the product of both inputs; the
            timestep is that of each sample's noisiest.
        timestep_factor: of a denoiser, whose timestep is so many times the signature's.
        predictions: of a denoiser that gives several, as of a video and of its sound: by field of the output, the sizes of a
            sample's. The signature's output [B, N] holds them flat, one behind the other; empty where there is one prediction.
        results: of other models: what the method returns, by field, in the same terms. {"unused": SHAPE} is a tensor that the
            pipeline did not look into, and that is no output of the component.
        attributes: numbers, lists and, of other models, small tensors among the model's own attributes, which pipelines read, as
            {"value": X} and {"tensor": NUMBERS}, and as {"module": …} such tensors of its parts; {"part": true} is a part
            without weights, which is made anew of the configuration.
        padded_by: argument of the pipeline's call that says how many tokens it pads prompts to, where that may vary; empty else.
        scheduler: of a denoiser, class of the pipeline's scheduler; empty in bundles of before.
    """

    pipeline: str
    component: str
    model: str
    config: dict[str, Any]
    method: Literal["forward", "decode", "encode"] = "forward"
    output: str
    parameters: list[str]
    arguments: dict[str, dict[str, Any]]
    timestep_factor: _Positive = 1.0
    predictions: dict[str, list[_Count]] = Field(default_factory=dict)
    results: dict[str, dict[str, Any]] = Field(default_factory=dict)
    attributes: dict[str, Any] = Field(default_factory=dict)
    padded_by: str = ""
    scheduler: str = ""

    @property
    def timestep_shares(self) -> list[str]:
        """Inputs that hold what timesteps of tokens or frames are of their sample's."""
        return [node["share"] for node in self.arguments.values() if "share" in node]

    @model_validator(mode="before")
    @classmethod
    def _of_before(cls, fields: Any) -> Any:
        """Bundles of before say of every model how many timesteps a sample has, and of most that there is one."""
        if isinstance(fields, dict) and not fields.get("timestep_sizes", True):
            return {name: value for name, value in fields.items() if name != "timestep_sizes"}
        return fields


class GuidanceRecord(_Record):
    """Classifier-free guidance that a denoiser applies inside: its output is u + scale · (c − u), in FP32, of the predictions u
    and c with both halves of the conditions.

    Attributes:
        scale: input of the scale of each sample, FP32; 1 is the conditional prediction alone.
        negative: by each input that is a condition, the input that has what guidance leads away from.
    """

    scale: _Name
    negative: dict[str, _Name]

    @property
    def added(self) -> frozenset[str]:
        """The inputs that the denoiser has beside its own."""
        return frozenset({self.scale, *self.negative.values()})


class TriedPlan(_Record):
    """A plan that denoising steps were left out with.

    Attributes:
        name: of the plan.
        speed: time of attention and layers without INT8 over the plan's, of one step.
        computed: steps that are computed; speed_of_all: `speed` times all steps over those.
    """

    name: str
    speed: float
    computed: _Count
    speed_of_all: float


class ReuseRecord(_Record):
    """Steps that a denoiser leaves out, see `trtconvert.reuse`.

    Attributes:
        file: of what was measured of its trajectories.
        objective, limit: of the schedules that the runtime makes.
        steps, computed: how many there were where it was searched, and which of them are computed; samples: it was sampled on.
        psnr, psnr_worst: dB of these samples against full precision with all steps; psnr_all: with all steps, in INT8 as well.
        tried: plans of the search that steps were left out with; empty where there was one plan, and in bundles of before.
    """

    file: _Inside
    objective: Literal["mean", "worst"]
    limit: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    steps: _Count
    computed: list[Annotated[int, Field(ge=0)]]
    samples: _Count
    psnr: float
    psnr_worst: float
    psnr_all: float
    tried: list[TriedPlan] = Field(default_factory=list)


class ComponentRecord(_Record):
    """One model of the bundle.

    Attributes:
        onnx: path of the ONNX file with `Int8Attention`, `Int8Linear` and `Int8Conv` nodes and their function bodies.
        inputs, outputs: signature of the ONNX model and of the engines.
        timestep_input: which input is the timestep; timestep_max: where the last timestep bin ends. Empty and 0 for what is no
            denoiser: it has no `Int8Attention` nodes, and its attention stays in its own precision.
        noise_input: what that input holds, where it is no timestep; bins are those of its places then.
        dims: symbolic dimension: [min, opt, max], over all profiles.
        steps: symbolic dimension: the step from its min in which it may vary, where that is not 1; empty in bundles of before.
        input_ranges: of a denoiser: largest magnitude of each floating-point input in its calibration, by timestep bin; empty
            where the calibration does not say.
        profiles: the optimisation profiles that engines get; empty in bundles of before: one, dims.
        layers: of the model, in the order of their calls; empty where the recipe has them off, and in bundles of before.
        diffusers: how pipelines call it, where it comes from one.
        caches: what layers that quantise deltas (MoDiff) keep from step to step: further inputs of the ONNX model and of the
            engines, and, with `NEXT` behind their names, further outputs of the same shapes. The runtime holds them.
        guidance: of a denoiser that applies it inside; its batch is that of samples then.
        reuse: of a denoiser that leaves steps out.
    """

    onnx: _Inside
    inputs: list[TensorRecord]
    outputs: list[TensorRecord]
    timestep_input: str = ""
    timestep_max: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    noise_input: NoiseInput | None = None
    dims: _Ordered
    steps: dict[str, _Count] = Field(default_factory=dict)
    input_ranges: dict[str, list[_Magnitude]] = Field(default_factory=dict)
    profiles: list[_Ordered] = Field(default_factory=list)
    sites: list[SiteRecord] = Field(default_factory=list)
    layers: list[LayerRecord] = Field(default_factory=list)
    engines: list[EngineRecord]
    diffusers: DiffusersRecord | None = None
    caches: list[TensorRecord] = Field(default_factory=list)
    guidance: GuidanceRecord | None = None
    reuse: ReuseRecord | None = None

    @property
    def all_inputs(self) -> list[TensorRecord]:
        """Of the ONNX model and of engines."""
        return [*self.inputs, *self.caches]

    @property
    def has_int8_layers(self) -> bool:
        return any(layer.in_int8 for layer in self.layers)

    @property
    def is_denoiser(self) -> bool:
        """Whether it follows the timestep, and may have sites."""
        return bool(self.timestep_input)


class QualityRecord(_Record):
    """What the gates measured.

    Attributes:
        samples, steps, sampler: how the images were drawn, in the recipe's words; see `Manifest.sampler_name`.
        psnr: dB over all samples against the full-precision model; psnr_worst: of the worst sample, seed psnr_worst_seed.
        lpips: mean over the samples; lpips_worst: of the worst sample. None without weights for it.
        site_sqnr: site: dB per timestep bin against exact attention; NaN-free once the gates have passed, absent bins are null.
        layer_sqnr: layer: likewise against the layer in full precision.
        measured: what drew the INT8 samples: "onnxruntime" the exported model, "tensorrt" the engine that ships, "torch" the
            kernels in the torch model, where this machine's GPU runs no engine of the bundle. computed: where full precision
            computed, and in which type.
        error: relative L2 error of the exported denoiser against the torch reference of the same arithmetic; None where the
            exported model did not run.
        lowering_difference: mean absolute difference of the outputs of the function and the native lowering; likewise.
        lowering_limit: the most that the gate allows it.
        type_error: [T] relative L2 error of the prediction in the model's own type against FP32, where both computed.
        component_errors: component: the largest relative L2 error of its outputs against float32 in torch, of the TensorRT engine
            where one was built, else of the exported model.
    """

    samples: _Count
    steps: _Count
    sampler: str
    psnr: float
    psnr_worst: float
    psnr_worst_seed: int
    lpips: float | None = None
    lpips_worst: float | None = None
    site_sqnr: dict[str, list[float | None]]
    layer_sqnr: dict[str, list[float | None]] = Field(default_factory=dict)
    measured: Literal["onnxruntime", "tensorrt", "torch"] = "onnxruntime"
    computed: str = ""
    error: float | None = None
    lowering_difference: float | None = None
    lowering_limit: float | None = None
    type_error: list[float | None] = Field(default_factory=list)
    component_errors: dict[str, float] = Field(default_factory=dict)

    def worst_site(self) -> tuple[float, str, int]:
        """Signal to quantisation noise in dB, site and timestep bin where it is smallest; NaN is smaller than any."""
        return _worst(self.site_sqnr)

    def worst_layer(self) -> tuple[float, str, int] | None:
        """The same of layers, where there are any."""
        return _worst(self.layer_sqnr) if self.layer_sqnr else None


def _worst(sqnr: Mapping[str, Sequence[float | None]]) -> tuple[float, str, int]:
    seen = [(db, name, index) for name, row in sqnr.items() for index, db in enumerate(row) if db is not None]
    return min(seen, key=lambda found: (not math.isnan(found[0]), *found))


class Manifest(_Record):
    """What a bundle holds.

    Attributes:
        weights: `models.identity` of what the denoiser was made from, its code among it; code: the hash of that alone, where a
            function of the user's made it.
        backend: the one that the build chose, or `trtconvert compile` added; backend_reason: why.
        pipeline: folder with what a diffusers pipeline needs beside the components; empty where the denoiser stands alone.
        files: every file of the bundle beside the manifest, by its path; not what users put beside them.
        digest: SHA-256 of the other fields; empty until the manifest is written.
    """

    format: Literal[1] = FORMAT
    model: str
    weights: str
    code: str = ""
    versions: dict[str, str]
    backend: Literal["tensorrt", "tensorrt_rtx", "onnxruntime"]
    backend_reason: str
    recipe: Recipe
    calibration: _Inside
    components: dict[str, ComponentRecord]
    pipeline: Literal[""] | _Inside = ""
    quality: QualityRecord
    files: dict[str, FileRecord] = Field(default_factory=dict)
    digest: str = ""

    @property
    def sites(self) -> list[SiteRecord]:
        """The attention sites of all components."""
        return [site for component in self.components.values() for site in component.sites]

    def sampler_name(self, solver: str) -> str:
        """What a solver is called for people: of a pipeline, whose own scheduler is meant, the scheduler's class."""
        record = next((of.diffusers for of in self.components.values() if of.is_denoiser), None)
        return solver if record is None else record.scheduler or "the pipeline's scheduler"

    @property
    def scalings(self) -> dict[str, str]:
        """How each converted site gets the scales of queries and keys; the recipe says it of bundles of before."""
        return {site.name: site.scaling or self.recipe.attention.scaling for site in self.sites if site.modes}

    @field_validator("components")
    @classmethod
    def _named(cls, components: dict[str, ComponentRecord]) -> dict[str, ComponentRecord]:
        """Files are named after components."""
        if bad := [name for name in components if not re.fullmatch(r"[A-Za-z]\w*", name)]:
            raise ValueError(f"names of letters, digits and _, not {', '.join(map(repr, bad))}")
        return components

    @field_validator("files", mode="before")
    @classmethod
    def _all_inside(cls, files: Any) -> Any:
        if isinstance(files, dict) and (bad := [name for name in files if not is_inside(name)]):
            raise ValueError(f"paths in the bundle, not {', '.join(map(repr, bad))}")
        return files

    def is_own(self, name: str) -> bool:
        """Whether a file of such a path counts as one of the bundle's own, and has to be among `files`: what reads a model or the
        pipeline reads what lies beside it too."""
        beside = name.startswith(tuple(component.onnx for component in self.components.values()))
        in_pipeline = bool(self.pipeline) and PurePosixPath(name).is_relative_to(self.pipeline)
        return beside or in_pipeline or name in self.files


def unquantised_file(onnx: Path) -> Path:
    """Where a bundle keeps what the INT8 layers of a model were quantised from, if it does (`trtconvert.weights.unquantised`)."""
    return onnx.with_name(onnx.name + UNQUANTISED)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Hash all files of the folder, then the manifest itself, into the manifest and write it."""
    files = {
        str(path.relative_to(folder)): file_record(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path != folder / MANIFEST
    }
    write_sealed(folder / MANIFEST, manifest.model_copy(update={"files": files}))


def file_record(path: Path) -> FileRecord:
    """What a manifest says of a file."""
    return FileRecord(size=path.stat().st_size, sha256=sha256(path))


def write_sealed(path: Path, manifest: Manifest) -> None:
    """Hash the manifest itself into the manifest and write it, with the files as they are in it."""
    content = manifest.model_dump(mode="json")
    path.write_text(json.dumps(content | {"digest": _digest(content)}, indent=1))


def _digest(content: dict[str, Any]) -> str:
    rest = {name: value for name, value in content.items() if name != "digest"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a bundle, without looking at its other files.

    Raises:
        UserError: not a bundle, or one of another format.
    """
    path = folder / MANIFEST
    try:
        content = read_json(path)
    except (OSError, ValueError) as error:
        strange = f"a {MANIFEST} that is not JSON: {first_line(error)}"
        raise UserError(
            f"{folder} is not a bundle",
            expected=f"a folder with {MANIFEST}, made by `trtconvert build`",
            got=f"{MANIFEST}: {error.strerror}" if isinstance(error, OSError) else strange,
            remedy="check the path, or build the bundle again",
        ) from error
    found = content.get("format") if isinstance(content, dict) else None
    if found != FORMAT:
        raise UserError(
            f"{folder} has a bundle format that this trtconvert does not read",
            expected=str(FORMAT),
            got=str(found),
            remedy="build the bundle again, or install the trtconvert that made it",
        )
    try:
        manifest = Manifest.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        if first["type"] == "extra_forbidden" and content.get("digest") == _digest(content):
            raise UserError(
                f"{folder} was made by a trtconvert that writes more into bundles than this one knows",
                expected=f"a bundle that trtconvert {__version__} reads",
                got=f"the field {'.'.join(map(str, first['loc']))}",
                remedy="install the trtconvert that made it, or build the bundle again",
            ) from error
        raise _damaged(folder, "the fields of a bundle manifest", first_problem(error)[:_SHOWN]) from error
    if manifest.digest != (digest := _digest(content)):
        raise _damaged(folder, f"contents with the SHA-256 {manifest.digest[:12]}…", f"{digest[:12]}…")
    if found := contradiction(manifest):
        raise _damaged(folder, "fields that fit together", found[:_SHOWN])
    return manifest


Result = TypeVar("Result")

_READINGS = 100
"""Of a bundle that changes meanwhile: builds take far longer than one of them."""


def read_unchanged(
    folder: Path, use: Callable[[Manifest], Result], discard: Callable[[Result], object] = lambda result: None
) -> Result:
    """What `use` makes of a bundle's manifest and files, which are those of one build: where another bundle takes the place of
    this one meanwhile, or `trtconvert compile` changes it, again.

    Args:
        use: may read the bundle's files.
        discard: called with what `use` gave where it is not taken.
    Raises:
        UserError: not a bundle; what `use` raises of one that stayed what it was; or it changed again and again.
    """
    for _ in range(_READINGS):
        before = _as_it_lies(folder)
        try:
            result = use(read_manifest(folder))
        except (TrtconvertError, OSError):
            if _as_it_lies(folder) == before:
                raise
            continue
        if _as_it_lies(folder) == before:
            return result
        discard(result)
    raise UserError(
        f"the bundle {folder} does not stay as it is",
        expected=f"one that nothing replaces while it is read, in one of {_READINGS} times",
        got="another one each time",
        remedy="end what builds or compiles it over and over, or read a copy of it",
    )


def _as_it_lies(folder: Path) -> bytes:
    """The bytes of a bundle's manifest; none where it cannot be read."""
    try:
        return read_limited(folder / MANIFEST, JSON_BYTES)
    except OSError:
        return b""


def _damaged(folder: Path, expected: str, got: str) -> UserError:
    return UserError(
        f"the manifest of {folder} is damaged",
        expected=expected,
        got=got,
        remedy="copy the bundle again, or build it again",
    )


def in_steps(low: int, high: int, step: int | None) -> str:
    """A range of sizes in words."""
    return f"{low}..{high}" + (f" in steps of {step}" if step else "")


def model_section(folder: Path, manifest: Manifest) -> ModelSection:
    """Where the denoiser of a bundle came from: the weights as the recipe names them, the images where the bundle has them."""
    section = manifest.recipe.model
    images = {name: changed_paths(path, lambda path: folder / path) for name, path in section.images.items()}
    return section.model_copy(update={"images": images})


def lost_plans(folder: Path, manifest: Manifest) -> list[str]:
    """Plans of `trtconvert compile` that the manifest does not name: it was killed before it had put them into one, or before it
    had removed those that it replaced."""
    return sorted(
        name
        for component in manifest.components
        for path in folder.glob(f"engines/{component}-tensorrt-*.plan")
        if (name := str(path.relative_to(folder))) not in manifest.files
    )


def keep_others(old: Path, new: Path) -> None:
    """Take along what users have put into a bundle that another one replaces, such as a report.

    The new bundle's own files come first. They are no part of its manifest: users may change and remove them. What lies where
    a bundle has files of its own alone is not taken along.

    Raises:
        UserError: the old folder is no bundle.
    """
    manifest = read_manifest(old)
    owners = [manifest, read_manifest(new)] if (new / MANIFEST).exists() else [manifest]
    own = {MANIFEST, *lost_plans(old, manifest)}
    names = {
        str(path.relative_to(old))
        for path in old.rglob("*")
        if not any(map(is_partial, path.relative_to(old).parts)) and (path.is_symlink() or not path.is_dir())
    }
    theirs = (name for name in names - own if not any(manifest.is_own(name) for manifest in owners))
    link_files(sorted(name for name in theirs if not os.path.lexists(new / name)), old, new)


def check_files(folder: Path, manifest: Manifest) -> None:
    """Compare every file of a bundle with the manifest.

    Raises:
        UserError: names the first file that is missing, truncated or altered, or that lies among the bundle's own and is none.
    """
    for name, record in manifest.files.items():
        path = folder / name
        try:
            got = _found(path, record)
        except OSError as error:
            got = error.strerror or type(error).__name__
        if got:
            raise UserError(
                f"{name} in the bundle {folder} is not what was built",
                expected=f"{record.size} bytes, SHA-256 {record.sha256[:12]}…",
                got=got,
                remedy="copy the bundle again, or build it again",
            )
    if unlisted := next((name for name in _lying_among_own(folder, manifest) if name not in manifest.files), None):
        raise UserError(
            f"{unlisted} in the bundle {folder} is none of its files",
            expected="files of the build alone beside the models and in the folder of the pipeline, which are read as they lie",
            got="a file that the manifest does not list",
            remedy="move it elsewhere, or build the bundle again",
        )


def _lying_among_own(folder: Path, manifest: Manifest) -> Iterator[str]:
    """Files that count as the bundle's own, see `Manifest.is_own`. Hidden ones are left out: temporary folders of this program's
    and what file managers leave, which nothing reads."""
    places = {folder / component.onnx for component in manifest.components.values()}
    found = [path for place in places for path in place.parent.glob(f"{glob.escape(place.name)}*")]
    if manifest.pipeline:
        # Through links, as what is read goes; the pipeline's own folder has a few levels.
        found += (Path(here, name) for here, _, names in os.walk(folder / manifest.pipeline) for name in names)
    for path in sorted(found):
        inside = path.relative_to(folder)
        if not any(part.startswith(".") for part in inside.parts):
            yield str(inside)


def _found(path: Path, record: FileRecord) -> str:
    """What stands at a path instead of the file that was recorded; empty when it is that file."""
    if (size := path.stat().st_size) != record.size:
        return f"{size} bytes"
    digest = sha256(path)
    return "" if digest == record.sha256 else f"{size} bytes, SHA-256 {digest[:12]}…"
