"""Traces models to ONNX: denoisers with `Int8Attention` nodes at converted sites, and components."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields

import onnx_ir as ir
import torch
from torch import Tensor, nn

from trtconvert.attention.modes import Mode
from trtconvert.attention.reference import AttentionTables
from trtconvert.bundle import NEXT
from trtconvert.diffusion_model import DiffusionModel, ModelComponent, copied_with, resized, weights_in_float32
from trtconvert.errors import UserError
from trtconvert.export.delta_caches import caches_of
from trtconvert.export.lowering.function import lower_to_function
from trtconvert.export.lowering.layout import fold_transposes
from trtconvert.export.nodes.attention import attention_nodes
from trtconvert.export.nodes.deltas import modulated_layers
from trtconvert.export.nodes.layers import layer_nodes
from trtconvert.export.torch_export import exported_to_onnx
from trtconvert.export.traced_modules import OF_COMPONENTS, SiteOptions, TracedComponent, TracedDenoiser
from trtconvert.linear.modes import LayerMode
from trtconvert.linear.reference import LayerTables
from trtconvert.linear.sites import ConvertedLayer

_LAYER_MODES = {*LayerMode} - {LayerMode.EXACT}


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
    """Traces a denoiser to ONNX. Converted sites become `Int8Attention` nodes with function bodies.

    Layers with a delta scale read and write caches. The inputs of `caches_of` follow the denoiser's inputs. Each of them has an
    output with the suffix `NEXT`.

    Args:
        tables: by converted attention site. layers: by converted layer. Other sites and layers stay in the model.
        dims: (min, opt, max) by symbolic dimension. Dimensions with min < max are dynamic.
        dtype: of weights and floating-point inputs. The timestep and the guidance scale stay FP32.
        masks: [T, H, Bq, Bk] block masks by site, for one number of tokens.
    Raises:
        UserError: the model cannot be exported, a site or layer was lost, or a table is invalid.
    """
    for site, site_tables in tables.items():
        _require_usable(f"the site {site}", site_tables, Mode)
    layers = layers or {}
    for name, layer in layers.items():
        _require_usable(f"the layer {name}", layer.tables, _LAYER_MODES, layer.delta_scale)
    caches = caches_of(model, layers, dims, dtype)
    denoiser = in_type(model.denoiser, dtype, weights_in_float32(model, dtype))
    traced = TracedDenoiser(denoiser, model, tables, layers, options, caches, masks or {}).eval()
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
    exported = exported_to_onnx(
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
            remedy=_exclude("attention", tables.keys() - nodes.keys()),
        )
    _require_layers(exported, layers)
    fold_transposes(exported)
    lower_to_function(exported)
    return exported


def _require_layers(exported: ir.Model, layers: Mapping[str, ConvertedLayer]) -> None:
    """
    Raises:
        UserError: the export lost some layers.
    """
    if (found := layer_nodes(exported) | modulated_layers(exported)).keys() != layers.keys():
        raise UserError(
            "the exported model does not hold the layers that were calibrated",
            expected=", ".join(sorted(layers)),
            got=", ".join(sorted(found)) or "no INT8 layer",
            remedy=_exclude("layers", layers.keys() - found.keys()),
        )


def _exclude(section: str, lost: Collection[str]) -> str:
    names = ", ".join(sorted(lost))
    return (
        f"add {names} to {section}.exclude: such calls depend on the shape of the input, or their results are not used"
    )


def trace_component(
    component: ModelComponent,
    dtype: torch.dtype = torch.float32,
    layers: Mapping[str, ConvertedLayer] | None = None,
) -> ir.Model:
    """Traces a text encoder or a part of a VAE to ONNX. Weights keep their names in the state dict.

    Args:
        dtype: of weights and floating-point inputs.
        layers: to convert.
    Raises:
        UserError: the model cannot be exported, a layer was lost, or a table is invalid.
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
            _require_usable(f"the layer {name}", layer.tables, _LAYER_MODES)
        module = TracedComponent(module, layers)
    exported = exported_to_onnx(
        module,
        inputs,
        component.inputs,
        [spec.name for spec in component.outputs],
        component.dims,
        title=component.title,
        prefix=f"module.{OF_COMPONENTS}" if layers else OF_COMPONENTS,
        remedy=f"give model.options one size instead of a range, or remove {component.name} from the recipe",
    )
    _require_layers(exported, layers or {})
    if layers:
        lower_to_function(exported)
    return exported


def in_type(module: nn.Module, dtype: torch.dtype, wide: Collection[str] = ()) -> nn.Module:
    """Returns the module, or a copy, with its weights in a type. FP32 never copies.

    Args:
        wide: names of weights that keep their type.
    """
    weights = [x for x in (*module.parameters(), *module.buffers()) if x.is_floating_point()]
    if dtype == torch.float32 or all(x.dtype == dtype for x in weights):
        return module

    # Module.to would make complex numbers real.
    return copied_with(module, lambda name, x: x.to(dtype) if x.is_floating_point() and name not in wide else x.clone())


def _trace_size(size: tuple[int, int, int]) -> int:
    low, opt, high = size
    # torch.export makes a size of 1 a constant.
    return opt if low == high or opt > 1 else max(2, low)


def _require_usable(
    owner: str, tables: AttentionTables | LayerTables, modes: Collection[int], delta_scale: Tensor | None = None
) -> None:
    """
    Args:
        owner: of the tables, in words. modes: that the tables may have.
    Raises:
        UserError: a table holds NaN, Inf, a scale or factor that is not positive, or another mode.
    """
    named: dict[str, Tensor | None] = {field.name: getattr(tables, field.name) for field in fields(tables)}
    for name, table in (named | {"delta_scale": delta_scale}).items():
        problem = ""
        if name == "modes" and table is not None and not set(table.tolist()) <= {int(mode) for mode in modes}:
            problem = f"a mode that is not one of {sorted(map(int, modes))}"
        elif table is None or not table.is_floating_point():
            continue
        elif not torch.isfinite(table).all():
            problem = f"NaN or Inf in {name}"
        elif name.endswith(("scale", "factor")) and not (table > 0).all():
            problem = f"a {name} that is not positive"
        if problem:
            raise UserError(
                f"the tables of {owner} cannot be used",
                expected="finite numbers, positive scales and factors, modes that the node has",
                got=problem,
                remedy="check the model's weights, and calibrate again",
            )
