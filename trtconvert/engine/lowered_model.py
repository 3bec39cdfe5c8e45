"""Lowers an exported model to the nodes that TensorRT on this GPU runs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from trtconvert.bundle import Dims, opt_sizes
from trtconvert.engine.driver import device_architecture
from trtconvert.library import compiled_architectures, has_group_norm_kernel, has_linear_kernel, serves
from trtconvert.recipe import EngineSection

if TYPE_CHECKING:
    import onnx_ir as ir


def against_plugins(options: EngineSection) -> str:
    """Returns the compiled kernels in words if none serves the engine's GPUs, else ""."""
    compiled, here = compiled_architectures(), device_architecture()
    wanted = "sm80" if options.hardware_compatible else here
    if wanted is not None and serves(wanted, compiled):
        return ""
    return f"kernels for {', '.join(f'sm_{name}' for name in compiled)}"


def against_channels_last(options: EngineSection) -> str:
    """Returns why the engine cannot have plugins for group norms, "" if it can."""
    if options.refittable:
        return "engine.refittable needs weights under their own names"
    if options.hardware_compatible:
        return "not every GPU that engine.hardware_compatible asks for has a kernel for them"
    return "" if has_group_norm_kernel() else "the plugin library has no kernel for them on this GPU"


def convs_in_16_bits(model: ir.Model, options: EngineSection, profiles: Sequence[Dims]) -> dict[str, str]:
    """Returns the INT8 convolutions that an engine with plugin layers computes in 16 bits, with the reasons."""
    from trtconvert.export.lowering.int8_convs import left_convs
    from trtconvert.export.nodes.attention import attention_nodes
    from trtconvert.export.nodes.layers import CONV, layer_nodes

    names = [name for name, node in layer_nodes(model).items() if node.op_type == CONV]
    if not names:
        return {}
    if not attention_nodes(model) or not options.channels_last:
        return dict.fromkeys(names, "in an engine with TensorRT's own group norms")
    if against := against_channels_last(options) or ("" if has_linear_kernel() else "no INT8 kernel on this GPU"):
        return dict.fromkeys(names, f"without INT8 group norms: {against}")
    return left_convs(model, opt_sizes(profiles))


def linear_in_16_bits(model: ir.Model) -> int:
    """Returns the number of products of INT8 layers that an engine of a `lowered` model computes in 16 bits."""
    from trtconvert.export.lowering.int8_weights import int8_weight_of

    products = [node for node in model.graph if node.op_type in ("MatMul", "Gemm") and not node.domain]
    weights = [int8_weight_of(node.inputs[1]) for node in products]
    return sum(weight is not None and weight.activation.is_int8 for weight in weights)


def lowered(model: ir.Model, native: Collection[str], options: EngineSection, profiles: Sequence[Dims]) -> ir.Model:
    """Returns a copy of an exported model for TensorRT on this GPU.

    Refittable engines keep their projections: weights are replaced by their names in the state dict. Their INT8 layers are
    plugins where `refittable_layers` finds them, else 16-bit products.

    Args:
        native: names of the sites with TensorRT's own attention; the others get the plugin. A model without sites is no denoiser
            and keeps its group norms.
    Raises:
        UserError: the model lacks a named site.
    """
    from trtconvert.export.lowering.layers import timesteps_kept

    model = model.clone()
    with timesteps_kept(model):
        _lower(model, native, options, profiles)
    # New nodes may stand before the node that computes the timestep that they read.
    model.graph.sort()
    return model


def _lower(model: ir.Model, native: Collection[str], options: EngineSection, profiles: Sequence[Dims]) -> None:
    from trtconvert.export.lowering.delta_plugins import fuse_deltas
    from trtconvert.export.lowering.delta_qdq import has_deltas, lower_deltas
    from trtconvert.export.lowering.group_norms import fuse_group_norms
    from trtconvert.export.lowering.int8_convs import fuse_int8_convs
    from trtconvert.export.lowering.int8_layers import (
        fuse_few_row_layers,
        fuse_mixed_layers,
        fuse_refittable_layers,
        refittable_layers,
    )
    from trtconvert.export.lowering.joined_few_rows import join_few_row_layers
    from trtconvert.export.lowering.layers import expand_layers, quantise_products
    from trtconvert.export.lowering.modulations import split_modulations
    from trtconvert.export.lowering.native import lower_to_native
    from trtconvert.export.lowering.patches import multiply_patches
    from trtconvert.export.lowering.plugin import lower_to_plugin
    from trtconvert.export.lowering.products import split_products
    from trtconvert.export.nodes.attention import attention_nodes
    from trtconvert.export.nodes.layers import layer_nodes

    of_deltas = has_deltas(model)
    # Layers first: later rewrites match products.
    if options.refittable and options.layers == "plugin" and not against_plugins(options):
        ours = refittable_layers(model, opt_sizes(profiles))
        others = layer_nodes(model).keys() - ours
        in_int8 = expand_layers(model, exact=others, offsets=True, refittable=True)
    else:
        exact: bool | Collection[str] = options.layers == "exact" or options.refittable
        if not exact and options.layers == "plugin":
            exact = convs_in_16_bits(model, options, profiles).keys()
        in_int8 = expand_layers(model, exact=exact, offsets=options.layers == "plugin" and not of_deltas)
    # Kernels of group norms and linear layers exist for some GPUs only.
    if attention_nodes(model) and options.channels_last and not against_channels_last(options):
        fuse_group_norms(model)
        if options.layers == "plugin" and has_linear_kernel():
            fuse_int8_convs(model, opt_sizes(profiles))
    if native:
        lower_to_native(model, native)
    if attention_nodes(model):
        with_linear = not options.hardware_compatible and has_linear_kernel()
        lower_to_plugin(
            model,
            refittable=options.refittable,
            linear_profiles=opt_sizes(profiles) if with_linear else (),
            int8_layers=options.layers == "plugin",
        )
    if not options.refittable:
        split_products(model)
        split_modulations(model)
        multiply_patches(model)
    elif in_int8:
        fuse_refittable_layers(model, opt_sizes(profiles))
    if in_int8 and not options.refittable and options.layers != "exact" and not against_plugins(options):
        fuse_few_row_layers(model, opt_sizes(profiles))
        join_few_row_layers(model, [{name: most for name, (*_, most) in dims.items()} for dims in profiles])
        fuse_mixed_layers(model)
    if options.layers == "plugin" and not against_plugins(options):
        fuse_deltas(model)
    # Q/DQ beside plugins gains nothing: other layers stay in 16 bits. Models with deltas are the exception.
    if options.layers != "plugin" or of_deltas:
        quantise_products(model)
    lower_deltas(model)
