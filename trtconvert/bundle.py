"""Bundles: folders that a build writes, each with a manifest that names and hashes every file."""

from __future__ import annotations

import glob
import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    field_validator,
    model_serializer,
    model_validator,
)

from trtconvert import __version__
from trtconvert.documents import JSON_BYTES, read_json
from trtconvert.errors import TrtconvertError, UserError, first_line, first_problem
from trtconvert.files import PART_BYTES, digests, is_partial, link_files, read_limited
from trtconvert.manifest_checks import contradiction
from trtconvert.noise_input import NoiseInput
from trtconvert.recipe import LayerModeName, ModelSection, ModeName, Recipe, changed_paths

FORMAT = 1
MANIFEST = "manifest.json"

IMAGES = "images"
"""Folder in a bundle with the images of the recipe, each named after its argument."""

TRANSPOSED = ".T"
"""Suffix of ONNX initialisers that are transposed weights. Other initialisers have the weight's name in the state dict."""

NAMESAKE = ":weight"
"""Suffix of an initialiser whose name an input or output has already."""

IN_CONSTANTS = ":in constants"
"""Last suffix of an initialiser whose weight the export also folded into constants: a refit cannot replace the weight alone."""


def weight_of(initialiser: str) -> tuple[str, bool]:
    """Returns the name of an initialiser's weight in the state dict, and whether the initialiser is transposed."""
    name = initialiser.removesuffix(IN_CONSTANTS).removesuffix(NAMESAKE)
    return name.removesuffix(TRANSPOSED), name.endswith(TRANSPOSED)


UNQUANTISED = ".unquantised.safetensors"
"""Suffix of the file with the unquantised weights of an ONNX model's INT8 layers."""

NEXT = ".next"
"""Suffix of the outputs of caches, see `ComponentRecord.caches`."""

LINE = re.compile(r"(\d+)\*([A-Za-z_]\w*)([+-]\d+)?")
"""An output dimension that is a linear function of a symbolic dimension: "8*height", "4*frames-3"."""

Dims = dict[str, tuple[int, int, int]]
"""Symbolic dimension: (min, opt, max)."""


def _require_ordered(dims: Dims) -> Dims:
    if bad := [name for name, (low, opt, high) in dims.items() if not 1 <= low <= opt <= high]:
        raise ValueError(f"1 <= min <= opt <= max for {', '.join(bad)}")
    return dims


def is_inside(name: str) -> bool:
    """Returns whether a path, in normal form, names a file inside a bundle other than the manifest."""
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
"""`Mode`, in the order of `ModeName`."""

_LayerMode = Annotated[int, Field(ge=1, le=len(get_args(LayerModeName)))]
"""`LayerMode`, in the order of `LayerModeName` from 1; unconverted layers have an empty list in place of mode 0."""

SparseShares = list[Annotated[float, Field(ge=0, lt=1)]]
"""Share of a site's attention that may be lost, per timestep bin; 0 in dense bins."""

_WEIGHT_ONLY = 1 + get_args(LayerModeName).index("weight_only")


def opt_sizes(profiles: Sequence[Dims]) -> list[dict[str, int]]:
    """Returns the opt sizes of each profile."""
    return [{name: opt for name, (_, opt, _) in dims.items()} for dims in profiles]


def covering(profiles: Sequence[Dims]) -> Dims:
    """Returns (min, opt, max) of each dimension over all profiles, with the opt of the first."""
    return {
        name: (min(p[name][0] for p in profiles), opt, max(p[name][2] for p in profiles))
        for name, (_, opt, _) in profiles[0].items()
    }


_SHOWN = 300
"""Largest number of characters of a manifest's error in messages."""


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class FileRecord(_Record):
    """Size in bytes and SHA-256 of one file.

    Attributes:
        part_bytes: see `trtconvert.files.FileDigest`. Absent from the manifest for a plain SHA-256, as in older bundles.
    """

    size: Annotated[int, Field(ge=0)]
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    part_bytes: Annotated[int, Field(ge=2**20)] | None = None

    @model_serializer(mode="wrap")
    def _without_none(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for name, value in dump(self).items() if value is not None}


class TensorRecord(_Record):
    """One input or output: numpy's name of its type, and a size or symbolic dimension per axis; outputs also have `LINE`s."""

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
    """A site with TensorRT's own attention, which was faster on the engine's GPU, alone or in the whole engine.

    Attributes:
        name: the site; query_tokens, key_tokens: its lengths at the opt shape of the first profile.
        native_us, plugin_us: device time of one call of the attention alone in microseconds, summed over the profiles' opt
            shapes. The plugin's time includes quantisation and is the mean over the site's timestep bins. None if no engine of
            this attention alone could be built or run.
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
        target: the GPU architecture of the engine; gpu: the name of the GPU that built the engine, if a GPU did.
        attention: "plugin" (INT8) or "native" (the model's own precision, at every site).
        file: path in the bundle.
        plugin: version of the plugin library inside the plan; empty if the plan holds none.
        profiles: the optimisation profiles in the engine's order, each symbolic dimension: [min, opt, max]. Empty in older
            bundles: one profile, the component's dims.
        native_sites: the sites whose native attention was measured faster, in the order of the search.
        plugin_us, native_us: device time of one call in microseconds, summed over the profiles' opt shapes, of the whole engine
            with the plugin at the other sites (mean over the timestep bins), and with native attention at every site. The
            faster engine was kept. None if they were not compared.
        with_plugins_us, plain_us: the same times of the fastest engine with plugins, for attention or for group norms, and of
            TensorRT's engine without plugins; the faster was kept. None if they were not compared: without plugins for group
            norms, the engine with native attention at every site has no plugin.
        layers: kernels of INT8 layers: "native" TensorRT's own (Q/DQ), "plugin" ours, "exact" 16-bit products of the
            dequantised weights; empty if there are no INT8 layers.
        layers_us: the same times of whole engines by `layers`; the fastest was kept. Empty if they were not compared.
        refittable: weights can be replaced; weights: shapes of the weights with more than one dimension, by name.
        int8_constants: of a refittable engine: the constants that plugins of INT8 layers read, by name: the layer and the field
            of its `LayerTables`.
        prediction_error: [T] of a denoiser: relative L2 error of the prediction against full precision, measured on the GPU that
            built the engine; None for timestep bins without a recorded call. Empty if not measured.
        error: of another component: the largest relative L2 error of its outputs against FP32 in torch; None if not measured.
        version_compatible: later TensorRT versions load the engine. hardware_compatible: any GPU from sm80 on runs it.
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
        """Makes the record of a component's engine, with the file name for its backend, target and GPU."""
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
    """One attention site.

    Attributes:
        modes: `Mode` per timestep bin, from low noise up; empty if the site was not converted.
        scaling: of queries and keys; empty for unconverted sites, and in older bundles, whose recipe holds one for all sites.
        reason: why the site was not converted.
        sparse: the share of the attention that may be lost in each bin; empty without a block mask.
        density: the share of the blocks that is computed in each bin; empty without a block mask.
        dense: why the site has no block mask although the recipe asked for block masks.
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
        """True if the site quantises in some timestep bin. A plan may leave a converted site in FP16, mode 0."""
        return any(self.modes)


class LayerRecord(_Record):
    """One linear layer or convolution.

    Attributes:
        in_channels, out_channels, kernel: sizes of the weight.
        rows: tokens or pixels per sample, at the opt sizes.
        weight: name of the weight in the state dict.
        modes: `LayerMode` per timestep bin, from low noise up; empty if the layer was not converted.
        reason: why the layer was not converted; empty if the plan left it out.
        modulated: the layer quantises the deltas of its input between steps, and has caches.
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
        """True if the layer is converted: its weights are INT8, its activations in any type."""
        return bool(self.modes)

    @property
    def is_mixed(self) -> bool:
        """True if activations are INT8 in some timestep bins and have 16 bits in others."""
        return _WEIGHT_ONLY in self.modes and len(set(self.modes)) > 1


class DiffusersRecord(_Record):
    """How a diffusers pipeline calls one of its models.

    Attributes:
        pipeline: class of the pipeline; component: the pipeline's attribute: "transformer", "text_encoder", …
        model: class of the model; config: its configuration.
        method: the method that the pipeline calls: "forward", "decode", "encode".
        output: class of the method's result, as `package.module:Class`.
        parameters: names of the method's parameters, in order; "**kwargs" if the method takes any keyword.
        arguments: the pipeline's arguments, by parameter. {"tensor": NAME} is an input of the signature; its "dtype" is the type
            for the model, if the signature has another. {"dict": …} and {"list": …} hold such values; a "dict" with "numbered"
            has integer keys, a "list" with "tuple" is a tuple. {"value": X} is a constant in the exported model. {"rows": NAME}
            is a list with one tensor per sample, all of one size, which the input holds concatenated; with "least" the tensors
            differ in length and are padded to the longest, and at least to that many rows, and the input NAME.mask marks the
            given rows. A tensor with "least" is padded likewise. {"share": NAME, "of": TIMESTEP} holds a timestep for each token
            or frame, the product of both inputs; TIMESTEP is that of the sample's noisiest token.
        timestep_factor: of a denoiser: the model's timestep over the signature's.
        predictions: of a denoiser with several predictions, such as video and sound: the sizes of a sample's prediction by field
            of the output. The signature's output [B, N] holds them flat and concatenated. Empty for one prediction.
        results: of other models: the method's result by field, in the same terms. {"unused": SHAPE} is a tensor that the
            pipeline does not read, and the component does not output.
        attributes: attributes of the model that pipelines read: {"value": X}; of other models small tensors {"tensor": NUMBERS};
            {"module": …} such values of a submodule; {"part": true} a submodule without weights, made from the configuration.
        padded_by: argument of the pipeline's call that sets the padded length of prompts, if it may vary; else empty.
        scheduler: of a denoiser: class of the pipeline's scheduler; empty in older bundles.
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
        """Inputs with the timesteps of tokens or frames as shares of the sample's timestep."""
        return [node["share"] for node in self.arguments.values() if "share" in node]

    @model_validator(mode="before")
    @classmethod
    def _of_before(cls, fields: Any) -> Any:
        """Drops the field `timestep_sizes` of older bundles if it is empty: one timestep per sample."""
        if isinstance(fields, dict) and not fields.get("timestep_sizes", True):
            return {name: value for name, value in fields.items() if name != "timestep_sizes"}
        return fields


class GuidanceRecord(_Record):
    """Classifier-free guidance inside a denoiser, whose output is u + scale · (c − u) in FP32, with the conditional prediction c
    and the unconditional prediction u.

    Attributes:
        scale: name of the input with the scale of each sample, FP32; scale 1 gives c.
        negative: the input of the unconditional half for each input that is a condition.
    """

    scale: _Name
    negative: dict[str, _Name]

    @property
    def added(self) -> frozenset[str]:
        """The inputs that guidance adds to the denoiser's."""
        return frozenset({self.scale, *self.negative.values()})


class TriedPlan(_Record):
    """A plan that the search combined with skipped denoising steps.

    Attributes:
        speed: time of attention and layers in one step without INT8, divided by the plan's time.
        computed: number of computed steps; speed_of_all: `speed` times all steps over computed steps.
    """

    name: str
    speed: float
    computed: _Count
    speed_of_all: float


class ReuseRecord(_Record):
    """Skipped denoising steps, see `trtconvert.reuse`.

    Attributes:
        file: the statistics of trajectories.
        objective, limit: of the schedules that the runtime makes.
        steps, computed: number of steps of the search, and the indices of the computed ones; samples: number of its samples.
        psnr, psnr_worst: dB of these samples against full precision with all steps; psnr_all: the same for INT8 with all steps.
        tried: the plans that the search tried; empty if there was one plan, and in older bundles.
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
        timestep_input: name of the timestep input; timestep_max: end of the last timestep bin. Empty and 0 for components other
            than the denoiser, which have no `Int8Attention` nodes.
        noise_input: content of the timestep input, if it holds no timestep; bins are then even in its places.
        dims: symbolic dimension: [min, opt, max], over all profiles.
        steps: symbolic dimension: its step from min, if that is not 1; empty in older bundles.
        input_ranges: of a denoiser: largest magnitude of each floating-point input in the calibration, by timestep bin; empty if
            the calibration does not hold them.
        profiles: optimisation profiles of the engines; empty in older bundles: one profile, dims.
        layers: layers in the order of their calls; empty if the recipe turns layers off, and in older bundles.
        diffusers: the calls of the pipeline, if the model comes from a pipeline.
        caches: caches of MoDiff layers: further inputs of the ONNX model and of the engines, and further outputs of the same
            shapes with the suffix `NEXT`. The runtime holds them.
        guidance: guidance inside the denoiser; the batch is then the number of samples.
        reuse: skipped steps of a denoiser.
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
        """Inputs of the ONNX model and of engines."""
        return [*self.inputs, *self.caches]

    @property
    def has_int8_layers(self) -> bool:
        return any(layer.in_int8 for layer in self.layers)

    @property
    def is_denoiser(self) -> bool:
        """True if the component has a timestep input, and may have sites."""
        return bool(self.timestep_input)


class QualityRecord(_Record):
    """Results of the gates.

    Attributes:
        samples, steps, sampler: of the drawn images, in the recipe's terms; see `Manifest.sampler_name`.
        psnr: dB over all samples against full precision; psnr_worst: dB of the worst sample, of seed psnr_worst_seed.
        lpips: mean over the samples; lpips_worst: of the worst sample. None without LPIPS weights.
        site_sqnr: dB per timestep bin of each site against exact attention; null for bins without calls.
        layer_sqnr: the same of layers against full precision.
        measured: the INT8 samples were drawn by the exported model ("onnxruntime"), by the engine of the bundle ("tensorrt"), or
            by the kernels in the torch model ("torch") if this machine's GPU runs no engine of the bundle.
        computed: device and type of full precision.
        error: relative L2 error of the exported denoiser against the torch reference of the same arithmetic; None if the
            exported model did not run.
        lowering_difference: mean absolute difference of the outputs of the function and the native lowering; None likewise.
        lowering_limit: limit of lowering_difference.
        type_error: [T] relative L2 error of the prediction in the model's own type against FP32, if both were computed.
        component_errors: the largest relative L2 error of each component's outputs against float32 in torch, of the TensorRT
            engine if one was built, else of the exported model.
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
        """Returns the smallest SQNR in dB with its site and timestep bin; NaN counts as smallest."""
        return _worst(self.site_sqnr)

    def worst_layer(self) -> tuple[float, str, int] | None:
        """Returns the same of layers; None without layers."""
        return _worst(self.layer_sqnr) if self.layer_sqnr else None


def _worst(sqnr: Mapping[str, Sequence[float | None]]) -> tuple[float, str, int]:
    seen = [(db, name, index) for name, row in sqnr.items() for index, db in enumerate(row) if db is not None]
    return min(seen, key=lambda found: (not math.isnan(found[0]), *found))


class Manifest(_Record):
    """The content of a bundle.

    Attributes:
        weights: `models.identity` of the denoiser's weights and code; code: hash of the code of a user's function alone.
        backend: the backend that the build chose, or `trtconvert compile` added; backend_reason: why.
        pipeline: folder with the further files of a diffusers pipeline; empty without a pipeline.
        files: every file of the bundle except the manifest and files that users added, by path.
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
        """Returns the name of a solver in reports; for a pipeline, the class of its scheduler."""
        record = next((of.diffusers for of in self.components.values() if of.is_denoiser), None)
        return solver if record is None else record.scheduler or "the pipeline's scheduler"

    @property
    def scalings(self) -> dict[str, str]:
        """The scaling of each converted site; older bundles take the recipe's."""
        return {site.name: site.scaling or self.recipe.attention.scaling for site in self.sites if site.modes}

    @field_validator("components")
    @classmethod
    def _named(cls, components: dict[str, ComponentRecord]) -> dict[str, ComponentRecord]:
        """Checks the names of components: files are named after them."""
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
        """Returns whether a path belongs to the bundle, so that it must be in `files`.

        Readers of a model or of the pipeline also read the files beside them.
        """
        beside = name.startswith(tuple(component.onnx for component in self.components.values()))
        in_pipeline = bool(self.pipeline) and PurePosixPath(name).is_relative_to(self.pipeline)
        return beside or in_pipeline or name in self.files


def unquantised_file(onnx: Path) -> Path:
    """Returns the path of the unquantised weights of a model's INT8 layers, which may be absent."""
    return onnx.with_name(onnx.name + UNQUANTISED)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Writes the manifest with the hashes of all files of the folder and its own digest."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file() and path != folder / MANIFEST]
    files = {
        str(path.relative_to(folder)): FileRecord(**vars(found))
        for path, found in zip(paths, digests((path, PART_BYTES) for path in paths), strict=True)
    }
    write_sealed(folder / MANIFEST, manifest.model_copy(update={"files": files}))


def file_record(path: Path) -> FileRecord:
    """Returns the size and hash of a file."""
    (found,) = digests([(path, PART_BYTES)])
    return FileRecord(**vars(found))


def write_sealed(path: Path, manifest: Manifest) -> None:
    """Writes the manifest with its own digest and unchanged `files`."""
    content = manifest.model_dump(mode="json")
    path.write_text(json.dumps(content | {"digest": _digest(content)}, indent=1))


def _digest(content: dict[str, Any]) -> str:
    rest = {name: value for name, value in content.items() if name != "digest"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


_OF_OTHER_VERSIONS = ("extra_forbidden", "missing", "literal_error", "enum")
"""Pydantic's types of errors in manifests of versions with other fields, or other values of a field."""


def read_manifest(folder: Path) -> Manifest:
    """Reads the manifest of a bundle, without the other files.

    Raises:
        UserError: the folder is not a bundle, has another format, or the manifest is damaged.
    """
    path = folder / MANIFEST
    try:
        content = read_json(path)
    except (OSError, ValueError) as error:
        no_json = f"a {MANIFEST} that is not JSON: {first_line(error)}"
        raise UserError(
            f"{folder} is not a bundle",
            expected=f"a folder with {MANIFEST}, made by `trtconvert build`",
            got=f"{MANIFEST}: {error.strerror}" if isinstance(error, OSError) else no_json,
            remedy="check the path, or build the bundle again",
        ) from error
    found = content.get("format") if isinstance(content, dict) else None
    if found != FORMAT:
        raise UserError(
            f"{folder} has a bundle format that this trtconvert cannot read",
            expected=str(FORMAT),
            got=str(found),
            remedy="build the bundle again, or install the trtconvert that made the bundle",
        )
    try:
        manifest = Manifest.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        # The program that wrote the fields has written the digest too.
        if first["type"] in _OF_OTHER_VERSIONS and content.get("digest") == _digest(content):
            got = first_problem(error)[:_SHOWN]
            if first["type"] == "extra_forbidden":
                got = f"the unknown field {'.'.join(map(str, first['loc']))}"
            raise UserError(
                f"{folder} was made by another version of trtconvert",
                expected=f"a bundle that trtconvert {__version__} reads",
                got=got,
                remedy="install the trtconvert that made the bundle, or build the bundle again",
            ) from error
        raise _damaged(folder, "the fields of a bundle manifest", first_problem(error)[:_SHOWN]) from error
    if manifest.digest != (digest := _digest(content)):
        raise _damaged(folder, f"contents with the SHA-256 {manifest.digest[:12]}…", f"{digest[:12]}…")
    if found := contradiction(manifest):
        raise _damaged(folder, "fields that fit together", found[:_SHOWN])
    return manifest


Result = TypeVar("Result")

_READINGS = 100
"""Largest number of attempts to read a bundle that other processes change."""


def read_unchanged(
    folder: Path, use: Callable[[Manifest], Result], discard: Callable[[Result], object] = lambda result: None
) -> Result:
    """Returns the result of `use`, called with a bundle's manifest; calls again if the bundle was replaced or changed meanwhile.

    Args:
        use: may read the bundle's files.
        discard: called with each result of `use` that is dropped.
    Raises:
        UserError: the folder is not a bundle, `use` raised for an unchanged bundle, or the bundle changed at every reading.
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
        f"the bundle {folder} changes while it is read",
        expected=f"a bundle that does not change during one of {_READINGS} attempts to read it",
        got="a change in each",
        remedy="stop the builds or compiles of this bundle, or read a copy of the bundle",
    )


def _as_it_lies(folder: Path) -> bytes:
    """Returns the bytes of a bundle's manifest; empty if the manifest cannot be read."""
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
    """Formats a range of sizes."""
    return f"{low}..{high}" + (f" in steps of {step}" if step else "")


def model_section(folder: Path, manifest: Manifest) -> ModelSection:
    """Returns the recipe's model section, with the paths of the bundle's images."""
    section = manifest.recipe.model
    images = {name: changed_paths(path, lambda path: folder / path) for name, path in section.images.items()}
    return section.model_copy(update={"images": images})


def lost_plans(folder: Path, manifest: Manifest) -> list[str]:
    """Returns files of engines that the manifest does not name: a killed `trtconvert compile` left them."""
    return sorted(
        name
        for component in manifest.components
        for path in folder.glob(f"engines/{component}-tensorrt-*.plan")
        if (name := str(path.relative_to(folder))) not in manifest.files
    )


def keep_others(old: Path, new: Path) -> None:
    """Copies files that users added to a bundle, such as a report, into the bundle that replaces it.

    Files of the new bundle are not overwritten, and the manifest does not list the copies: users may change and remove them.

    Raises:
        UserError: the old folder is not a bundle.
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
    """Compares every file of a bundle with the manifest.

    Raises:
        UserError: names the first file that is missing or has another size, else the first file that differs, else a file that
            lies beside the bundle's files without being listed.
    """
    for name, record in manifest.files.items():  # before gigabytes are hashed
        with _reported(folder, name, record):
            if (size := (folder / name).stat().st_size) != record.size:
                raise _damaged_file(folder, name, record, f"{size} bytes")
    files = [(folder / name, record.part_bytes) for name, record in manifest.files.items()]
    with closing(digests(files)) as found:
        for name, record in manifest.files.items():
            with _reported(folder, name, record):
                got = next(found)
            if (got.size, got.sha256) != (record.size, record.sha256):
                raise _damaged_file(folder, name, record, f"{got.size} bytes, SHA-256 {got.sha256[:12]}…")
    if unlisted := next((name for name in _lying_among_own(folder, manifest) if name not in manifest.files), None):
        raise UserError(
            f"{unlisted} in the bundle {folder} is not listed in the manifest",
            expected="listed files only, beside the models and in the folder of the pipeline",
            got="an unlisted file",
            remedy="move the file elsewhere, or build the bundle again",
        )


def _lying_among_own(folder: Path, manifest: Manifest) -> Iterator[str]:
    """Yields existing files that belong to the bundle, see `Manifest.is_own`, except hidden ones, which no reader opens."""
    places = {folder / component.onnx for component in manifest.components.values()}
    found = [path for place in places for path in place.parent.glob(f"{glob.escape(place.name)}*")]
    if manifest.pipeline:
        # Follows links, because readers of the pipeline do.
        found += (Path(here, name) for here, _, names in os.walk(folder / manifest.pipeline) for name in names)
    for path in sorted(found):
        inside = path.relative_to(folder)
        if not any(part.startswith(".") for part in inside.parts):
            yield str(inside)


@contextmanager
def _reported(folder: Path, name: str, record: FileRecord) -> Iterator[None]:
    """Turns the failure to read a file into the error of a damaged file."""
    try:
        yield
    except OSError as error:
        raise _damaged_file(folder, name, record, error.strerror or type(error).__name__) from error


def _damaged_file(folder: Path, name: str, record: FileRecord, got: str) -> UserError:
    return UserError(
        f"{name} in the bundle {folder} is damaged",
        expected=f"{record.size} bytes, SHA-256 {record.sha256[:12]}…",
        got=got,
        remedy="copy the bundle again, or build it again",
    )
