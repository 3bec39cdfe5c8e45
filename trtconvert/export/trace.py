"""Tracing to ONNX: a denoiser with an `Int8Attention` node at every converted site, and other models as they are."""

from __future__ import annotations

import io
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, fields
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx.experimental.symbolic_shapes import ConstraintViolationError
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from trtconvert.attention.modes import Mode, Scaling, scaling_at
from trtconvert.attention.reference import AttentionTables, timestep_bin
from trtconvert.attention.sites import Handler, SiteCall, attention_hooks
from trtconvert.bundle import NEXT
from trtconvert.diffusion_model import DiffusionModel, InputSpec, ModelComponent, copied_with, resized
from trtconvert.errors import UserError, first_line
from trtconvert.export.delta_caches import DeltaEmitter, caches_of
from trtconvert.export.lowering import fold_transposes, lower_to_function
from trtconvert.export.nodes.attention import attention_nodes
from trtconvert.export.nodes.attention_body import BLOCK_MASK, OP
from trtconvert.export.nodes.common import DOMAIN, OPSET, SITE_METADATA, VERSION
from trtconvert.export.nodes.deltas import modulated_layers
from trtconvert.export.nodes.layers import (
    BIAS_METADATA,
    CONV,
    INPUT_GROUP_METADATA,
    LAYER_METADATA,
    LINEAR,
    WEIGHT_METADATA,
    check_modes,
    layer_nodes,
    table_names,
)
from trtconvert.export.optimisation import optimise
from trtconvert.export.passes import AFTER_OPTIMISATION, BEFORE_OPTIMISATION
from trtconvert.export.passes.autocast_regions import inline_regions_without_autocast
from trtconvert.export.passes.complex_pairs import complex_as_pairs
from trtconvert.export.weights import name_weights, weights_apart
from trtconvert.fake_tensors import without_tracebacks
from trtconvert.guidance import guided_prediction
from trtconvert.interception import InterceptedDenoiser, Interception, samples_of
from trtconvert.linear.reference import LayerTables
from trtconvert.linear.sites import ConvertedLayer, LayerCall, layer_hooks, model_tensors
from trtconvert.noise_input import place_of

OF_COMPONENTS = "model."
"""What components put before the names of their models' state dicts."""


@dataclass(frozen=True)
class SiteOptions:
    """What the node's attributes hold beside the logits' factor.

    Attributes:
        timestep_max: see `DiffusionModel`.
        scaling, smooth_k: see the recipe's attention section; a scaling of all sites, or by site.
    """

    timestep_max: float
    scaling: Scaling
    smooth_k: bool


def trace(
    model: DiffusionModel,
    tables: Mapping[str, AttentionTables],
    options: SiteOptions,
    *,
    layers: Mapping[str, ConvertedLayer] | None = None,
    dims: Mapping[str, tuple[int, int, int]],
    dtype: torch.dtype = torch.float32,
    masks: Mapping[str, Tensor] | None = None,
) -> ir.Model:
    """The denoiser as an ONNX model whose converted sites are `Int8Attention` nodes with their function bodies.

    Layers with a scale of deltas read and write caches: behind the denoiser's own, the model has the inputs of `caches_of`, and
    for each an output of its name and `NEXT`.

    Args:
        tables: per attention site to convert, layers: per layer; others stay what they are in the model.
        dims: symbolic dimension: (min, opt, max). Dimensions with min < max are dynamic.
        dtype: type of weights and floating-point inputs; the timestep and the scale of guidance stay FP32.
        masks: [T, H, Bq, Bk] block masks by timestep bin, of the sites that have some. For one number of tokens.
    Raises:
        UserError: the model cannot be exported, a site was lost on the way, or a table cannot be used.
    """
    for site, site_tables in tables.items():
        _check_tables(site, site_tables)
    layers = layers or {}
    for name, layer in layers.items():
        _check_layer(name, layer.tables, layer.delta_scale)
    caches = caches_of(model, layers, dims, dtype)
    traced = _TracedDenoiser(in_type(model.denoiser, dtype), model, tables, layers, options, caches, masks or {}).eval()
    sizes = {name: _trace_size(size) for name, size in dims.items()}
    inputs = {
        name: x.to(dtype) if x.is_floating_point() and name not in model.always_float32 else x
        for name, x in model.example(0, sizes).items()
    }
    inputs |= {
        cache.name: torch.zeros(
            [sizes[size] if isinstance(size, str) else size for size in cache.shape], dtype=getattr(torch, cache.dtype)
        )
        for cache in caches
    }
    exported = _exported(
        traced,
        inputs,
        (*model.inputs, *caches),
        [model.output.name, *(cache.name + NEXT for cache in caches)],
        dims,
        title=model.name,
        prefix="intercepted.denoiser.",
        remedy="fix the size of a dimension in engine.shapes, or avoid data-dependent control flow in forward, and operations "
        "that ONNX lacks",
    )
    nodes = attention_nodes(exported)
    if nodes.keys() != tables.keys():
        raise UserError(
            "the exported model does not hold the attention that was calibrated",
            expected=", ".join(sorted(tables)),
            got=", ".join(sorted(nodes)) or "no attention node",
            remedy="exclude the sites whose calls depend on the shape of the input, or whose results are not used",
        )
    _require_layers(exported, layers)
    fold_transposes(exported)
    lower_to_function(exported)
    return exported


def _require_layers(exported: ir.Model, layers: Mapping[str, ConvertedLayer]) -> None:
    """
    Raises:
        UserError: some were lost on the way.
    """
    if (found := layer_nodes(exported) | modulated_layers(exported)).keys() != layers.keys():
        raise UserError(
            "the exported model does not hold the layers that were calibrated",
            expected=", ".join(sorted(layers)),
            got=", ".join(sorted(found)) or "no INT8 layer",
            remedy="exclude the layers whose calls depend on the shape of the input, or whose results are not used",
        )


def trace_component(
    component: ModelComponent,
    dtype: torch.dtype = torch.float32,
    layers: Mapping[str, ConvertedLayer] | None = None,
) -> ir.Model:
    """A text encoder or a half of a VAE as an ONNX model. Weights have their names in the model's state dict.

    Args:
        dtype: type of weights and floating-point inputs.
        layers: to convert; others stay what they are in the model.
    Raises:
        UserError: the model cannot be exported.
    """
    sizes = {name: _trace_size(size) for name, size in component.dims.items()}
    inputs = {
        spec.name: resized(component.example[spec.name], spec, sizes).to(
            dtype if spec.dtype == "float32" else torch.int64
        )
        for spec in component.inputs
    }
    module = in_type(component.module, dtype)
    if layers:
        for name, layer in layers.items():
            _check_layer(name, layer.tables)
        module = _TracedComponent(module, layers)
    exported = _exported(
        module,
        inputs,
        component.inputs,
        [spec.name for spec in component.outputs],
        component.dims,
        title=component.title,
        prefix=f"module.{OF_COMPONENTS}" if layers else OF_COMPONENTS,
        remedy=f"give model.options one size instead of a range, or take {component.name} out of the recipe",
    )
    _require_layers(exported, layers or {})
    if layers:
        lower_to_function(exported)
    return exported


def in_type(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A module in full precision with its weights in a type: itself where they are of it, or it is FP32; else a copy."""
    weights = [x for x in (*module.parameters(), *module.buffers()) if x.is_floating_point()]
    if dtype == torch.float32 or all(x.dtype == dtype for x in weights):
        return module

    # Not Module.to, which would take complex numbers along, to real ones.
    return copied_with(module, lambda _, x: x.to(dtype) if x.is_floating_point() else x.clone())


def _exported(
    module: nn.Module,
    inputs: Mapping[str, Tensor],
    specs: Sequence[InputSpec],
    outputs: Sequence[str],
    dims: Mapping[str, tuple[int, int, int]],
    *,
    title: str,
    prefix: str,
    remedy: str,
) -> ir.Model:
    """A module that takes tensors by position, exported, with constants folded.

    Args:
        inputs: example of each; specs: of them; outputs: names.
        title: of the model, for messages; remedy: where it cannot be exported.
        prefix: what the module puts before the names of the model's state dict.
    Raises:
        UserError: it cannot be exported.
    """
    # Of 1 to 2 torch.export, for which no dynamic size is 1, makes 2, and is silent where a model does so too.
    symbols = {
        name: torch.export.Dim(name, min=low, max=max(high, 3)) for name, (low, _, high) in dims.items() if low < high
    }
    shapes = tuple({axis: symbols[d] for axis, d in enumerate(spec.shape) if d in symbols} for spec in specs)
    values = tuple(inputs.values())

    def to_onnx(what: nn.Module | ExportedProgram) -> torch.onnx.ONNXProgram:
        program = torch.onnx.export(
            what,
            values,
            input_names=list(inputs),
            output_names=list(outputs),
            opset_version=OPSET,
            dynamo=True,
            dynamic_shapes=(shapes,),
            optimize=False,  # once the weights have their names
            verbose=False,
        )
        assert program is not None  # only None where it writes to a file
        return program

    try:
        with (
            torch.no_grad(),
            _AsExportersTakeIt(),
            warnings.catch_warnings(),
            _stderr_of_success(),
            without_tracebacks(),
        ):
            # One symbol for a dimension that several inputs share is what is wanted here.
            warnings.filterwarnings("ignore", message="# The axis name: .* will not be used")
            try:
                program = to_onnx(module.eval())
            except torch.onnx.errors.OnnxExporterError:
                in_pairs = _with_complex_as_pairs(module, values, shapes)
                if in_pairs is None:
                    raise
                program = to_onnx(in_pairs)
    except (torch.onnx.errors.OnnxExporterError, ConstraintViolationError) as error:
        raise UserError(
            f"{title} cannot be exported to ONNX",
            expected="a forward that torch.export can trace, with " + (", ".join(symbols) or "nothing") + " dynamic",
            got=_cause_of(error),
            remedy=remedy,
        ) from error
    # Of a size that torch.export suggests to fix, the exporter makes a constant, and does not say so.
    fixed = {
        f"{dim} = {size}"
        for value, spec in zip(program.model.graph.inputs, specs, strict=True)
        for dim, size in zip(spec.shape, value.shape or (), strict=True)
        if dim in symbols and isinstance(size, int)
    }
    if fixed:
        raise UserError(
            f"{title} can be exported to ONNX for one size only",
            expected="a forward that takes " + ", ".join(symbols) + " as they come",
            got=", ".join(sorted(fixed)) + ", of which it makes a number, as in range(x.shape[0])",
            remedy=remedy,
        )
    weights = name_weights(program.model, prefix)
    for rewrite in BEFORE_OPTIMISATION:
        rewrite(program.model)
    with warnings.catch_warnings(), weights_apart(program.model, weights):
        # Constants are folded with numpy, and T5's buckets of positions take the logarithm of 0 where they are not looked at.
        warnings.filterwarnings("ignore", category=RuntimeWarning, module="onnx.reference")
        optimise(program)
    for rewrite in AFTER_OPTIMISATION:
        rewrite(program.model)
    return program.model


@contextmanager
def _stderr_of_success() -> Iterator[None]:
    """What the block writes to stderr, once it ends well.

    Of a model that it cannot trace torch.export prints the whole graph, and nobody finds the message behind it.
    """
    with redirect_stderr(io.StringIO()) as written:
        yield
    sys.stderr.write(written.getvalue())


class _AsExportersTakeIt(TorchFunctionMode):
    """Calls of torch in a form that every version of it can export, with the results that they have.

    Attention of tensors [B, N, D] is that of [1, B, N, D]: the exporter takes no other than those of four axes. What is repeated
    a number of times is not told how many that gives, of which torch 2.11 makes a constant. What is written to `.data`, as
    CogVideoX does with positions, would not be traced, and what is copied into more rows than it has not be repeated.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        named = dict(kwargs or {})
        if func is scaled_dot_product_attention:
            named = dict(zip(("query", "key", "value"), args, strict=False)) | named
            tensors = [named.pop(name) for name in ("query", "key", "value")]
            if all(x.dim() == 3 for x in tensors):
                return func(*(x.unsqueeze(0) for x in tensors), *args[3:], **named).squeeze(0)
            return func(*tensors, *args[3:], **named)
        if func == Tensor.data.__get__:  # pyright: ignore[reportAttributeAccessIssue]
            return args[0].detach()
        if func is Tensor.copy_ and len(args) > 1:
            return func(args[0], args[1].expand_as(args[0]), *args[2:], **named)
        if func in (torch.repeat_interleave, Tensor.repeat_interleave):
            repeats = named.get("repeats", args[1] if len(args) > 1 else None)
            if isinstance(repeats, (int, torch.SymInt)):
                named.pop("output_size", None)
        return func(*args, **named)


def _with_complex_as_pairs(
    module: nn.Module, values: tuple[Tensor, ...], shapes: tuple[dict[int, torch.export.Dim], ...]
) -> ExportedProgram | None:
    """What computes with complex numbers, which the ONNX exporter mostly cannot, in pairs of real ones; None for others."""
    try:
        captured = torch.export.export(
            module,
            values,
            dynamic_shapes=(shapes,),
            strict=False,
            prefer_deferred_runtime_asserts_over_guards=True,  # as the exporter does: not to fix halves of sizes
        )
        inline_regions_without_autocast(captured)
        return captured if complex_as_pairs(captured) else None
    except Exception:  # what torch.export raises is not documented; the exporter has told of it already
        return None


def _cause_of(error: BaseException) -> str:
    """The first line of what lies behind an error: the exporter's own message tells only at which step it failed."""
    while error.__cause__ is not None:
        error = error.__cause__
    return first_line(error)


class _TracedDenoiser(nn.Module):
    """Forward emits a node at each site and layer. The tables are buffers, so that they become initialisers."""

    def __init__(
        self,
        denoiser: nn.Module,
        model: DiffusionModel,
        tables: Mapping[str, AttentionTables],
        layers: Mapping[str, ConvertedLayer],
        options: SiteOptions,
        caches: Sequence[InputSpec],
        masks: Mapping[str, Tensor],
    ) -> None:
        super().__init__()
        self._bins = {site: len(of_site) for site, of_site in masks.items()}
        for site, of_site in masks.items():
            # Bins that need the same blocks share them.
            different, of_bin = of_site.unique(dim=0, return_inverse=True)
            self.register_buffer(_blocks_of(site), different)
            self.register_buffer(_rows_of(site), of_bin)
        self._buffers_of = {site: registered(self, site, of_site) for site, of_site in tables.items()}
        hooks = dict(attention_hooks(self._attention(options)))
        self._caches, self._deltas = caches, None
        if caches:
            self._deltas = DeltaEmitter(self, layers, options.timestep_max, model.timesteps_fall)
        if layers:
            hooks |= layer_hooks(
                LayerEmitter(self, layers, model_tensors(model.denoiser), options.timestep_max, self._deltas)
            )
        self._names = [spec.name for spec in model.inputs]
        self._timestep_input, self._guidance = model.timestep_input, model.guidance
        own = [name for name in self._names if model.guidance is None or name not in model.guidance.added]
        self.intercepted = InterceptedDenoiser(denoiser, own, model.timestep_input, hooks, model.noise_input)

    def forward(self, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        if self._guidance is not None:
            return guided_prediction(
                self.intercepted, dict(zip(self._names, inputs, strict=True)), self._timestep_input, self._guidance
            )
        if self._deltas is None:
            return self.intercepted(*inputs)
        own = dict(zip(self._names, inputs, strict=False))
        given = {cache.name: x for cache, x in zip(self._caches, inputs[len(own) :], strict=True)}
        timestep = own[self._timestep_input].float().reshape(-1).expand(samples_of(own, self._timestep_input))
        timestep = place_of(self.intercepted.noise_input, timestep)
        self._deltas.begin(timestep, given)
        output = self.intercepted(*own.values())
        return (output, *self._deltas.caches(list(given)))

    def _attention(self, options: SiteOptions) -> Handler:
        def handler(call: SiteCall) -> Tensor:
            if call.name not in self._buffers_of:
                return call.exact()
            named = self._buffers_of[call.name]
            buffers = [getattr(self, named[field.name]) for field in fields(AttentionTables)]
            mask = [] if call.mask is None else [call.mask]
            blocks = self._blocks(call, options.timestep_max)
            return torch.onnx.ops.symbolic(
                f"{DOMAIN}::{OP}",
                (call.q, call.k, call.v, call.timestep, *buffers, *mask, *blocks),
                {
                    "layout": "BHND",
                    "softmax_scale": float(call.scale),
                    "timestep_max": float(options.timestep_max),
                    "scaling": scaling_at(options.scaling, call.name),
                    "smooth_k": int(options.smooth_k),
                    **dict.fromkeys([BLOCK_MASK] if blocks else [], 1),
                },
                dtype=call.q.dtype,
                shape=call.q.shape,
                version=VERSION,
                metadata_props={SITE_METADATA: call.name},
            )

        return handler

    def _blocks(self, call: SiteCall, timestep_max: float) -> list[Tensor]:
        """The block mask of a call, [B or 1, H, Bq, Bk], if its site has one."""
        if (bins := self._bins.get(call.name)) is None:
            return []
        different, of_bin = getattr(self, _blocks_of(call.name)), getattr(self, _rows_of(call.name))
        if len(different) == 1:
            return [different]
        row = of_bin.index_select(0, timestep_bin(call.timestep, timestep_max, bins))
        return [different.index_select(0, row)]


def _blocks_of(site: str) -> str:
    """The buffer of the block masks of a site, each once."""
    return f"{site.replace('.', '/')}:block_masks"


def _rows_of(site: str) -> str:
    """The buffer that tells which of them a timestep bin has."""
    return f"{site.replace('.', '/')}:block_mask_of_bin"


class _TracedComponent(nn.Module):
    """Forward emits a node at each layer. There is no timestep."""

    def __init__(self, module: nn.Module, layers: Mapping[str, ConvertedLayer]) -> None:
        super().__init__()
        self._hooks = layer_hooks(LayerEmitter(self, layers, model_tensors(module), 1.0, prefix=OF_COMPONENTS))
        self.module = module

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        with Interception(self.module, self._hooks, torch.zeros(1)):
            return self.module(*inputs)


class LayerEmitter:
    """A handler that emits a node for each layer that is converted, and computes the others as they are.

    Args:
        module: gets the tables as buffers; what is exported.
        layers: to convert.
        tensors: the model's parameters and buffers by name.
        timestep_max: see `DiffusionModel`.
        deltas: emits the nodes of layers with a scale of deltas; needed where there are some.
        prefix: of the names of tensors, which the state dict has not.
    """

    def __init__(
        self,
        module: nn.Module,
        layers: Mapping[str, ConvertedLayer],
        tensors: Mapping[str, Tensor],
        timestep_max: float,
        deltas: DeltaEmitter | None = None,
        prefix: str = "",
    ) -> None:
        self._module, self._layers, self._timestep_max, self._deltas = module, layers, timestep_max, deltas
        self._tensors, self._prefix = tensors, prefix
        tied: dict[int, str] = {}
        self._buffers = {name: registered(module, name, layer.tables, tied) for name, layer in layers.items()}

    def __call__(self, call: LayerCall) -> Tensor:
        layer = self._layers.get(call.name)
        if layer is None:
            return call.exact()
        op = LINEAR if call.kind == "linear" else CONV
        attributes: dict[str, Any] = {"timestep_max": float(self._timestep_max)}
        outputs = len(layer.tables.bias)
        shape = (*call.x.shape[:-1], outputs)
        if call.kind == "conv":
            attributes |= {"strides": list(call.stride), "pads": [*call.padding, *call.padding]}
            sizes = zip(call.x.shape[2:], layer.tables.weight.shape[2:], call.stride, call.padding, strict=True)
            shape = (
                call.x.shape[0],
                outputs,
                *((size + 2 * pad - kernel) // step + 1 for size, kernel, step, pad in sizes),
            )
        named = self._buffers[call.name]
        if layer.delta_scale is not None:
            assert self._deltas is not None
            return self._deltas.emit(call, layer, named, shape)
        inputs = [getattr(self._module, named[name]) for name in table_names(op)]
        timestep = [call.timestep] if len(layer.tables.modes) > 1 else []
        return torch.onnx.ops.symbolic(
            f"{DOMAIN}::{op}",
            (call.x, *inputs, *timestep),
            attributes,
            dtype=call.x.dtype,
            shape=shape,
            version=VERSION,
            metadata_props={
                LAYER_METADATA: call.name,
                INPUT_GROUP_METADATA: layer.layer.input_group,
                **{
                    key: reference.state_name(self._tensors).removeprefix(self._prefix)
                    for key, reference in ((WEIGHT_METADATA, layer.layer.weight), (BIAS_METADATA, layer.layer.bias))
                    if reference is not None
                },
            },
        )


def registered(
    module: nn.Module, name: str, tables: AttentionTables | LayerTables, there: dict[int, str] | None = None
) -> dict[str, str]:
    """Register tables as buffers of a module, for the site or layer of a name.

    Args:
        there: buffers of tensors that are registered already, by their id; they are not registered again.
    Returns:
        The buffer of each table.
    """
    buffers = {}
    for field in fields(tables):
        table = getattr(tables, field.name)
        # Buffers have no dots in their names. With a slash none is called as another one, nor as a weight. A module may be a site
        # and a layer, which both have modes.
        of_layer = "layer_" if isinstance(tables, LayerTables) and field.name == "modes" else ""
        buffer = f"{name.replace('.', '/')}:{of_layer}{field.name}"
        if there is not None and (first := there.setdefault(id(table), buffer)) != buffer:
            buffer = first
        else:
            module.register_buffer(buffer, table.clone())
        buffers[field.name] = buffer
    return buffers


def _trace_size(size: tuple[int, int, int]) -> int:
    low, opt, high = size
    # torch.export takes a size of 1 for a constant.
    return opt if low == high or opt > 1 else max(2, low)


def _check_tables(site: str, tables: AttentionTables) -> None:
    for field in fields(tables):
        table = getattr(tables, field.name)
        problem = ""
        if field.name == "modes":
            problem = "" if set(table.tolist()) <= set(Mode) else f"a mode outside 0 to {max(Mode)}"
        elif not torch.isfinite(table).all():
            problem = "NaN or Inf"
        elif field.name.endswith("scale") and not (table > 0).all():
            problem = "a scale that is not positive"
        if problem:
            raise UserError(
                f"the table {field.name} of {site} cannot be used",
                expected=f"finite numbers, positive scales, modes 0 to {max(Mode)}",
                got=problem,
                remedy="calibrate again",
            )


def _check_layer(name: str, tables: LayerTables, delta_scale: Tensor | None = None) -> None:
    problem = check_modes(tables)
    for field in ("weight_scale", "bias", "x_factor", "x_offset", "x_scale"):
        table = getattr(tables, field)
        if not problem and not torch.isfinite(table).all():
            problem = f"NaN or Inf in {field}"
        elif not problem and field not in ("bias", "x_offset") and not (table > 0).all():
            problem = f"a {field} that is not positive"
    if delta_scale is not None and not (delta_scale.isfinite() & (delta_scale > 0)).all():
        problem = problem or "a delta_scale that is not finite and positive"
    if problem:
        raise UserError(
            f"the tables of the layer {name} cannot be used",
            expected="finite numbers, positive scales and factors, INT8 modes",
            got=problem,
            remedy="check the layer's weights, and calibrate again",
        )
