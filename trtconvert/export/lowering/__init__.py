"""Rewrites of a model in place. Each returns the number of its changes.

Nodes of our domain are lowered in three ways: `function`, `native` and `plugin`. Other rewrites fuse nodes into plugins, or
change into forms that TensorRT computes faster.
"""

from trtconvert.export.lowering.delta_plugins import can_fuse_deltas, fuse_deltas
from trtconvert.export.lowering.delta_qdq import has_deltas, lower_deltas
from trtconvert.export.lowering.function import lower_to_function
from trtconvert.export.lowering.group_norms import fuse_group_norms, has_group_norms
from trtconvert.export.lowering.int8_convs import fuse_int8_convs, left_convs
from trtconvert.export.lowering.int8_layers import (
    fuse_few_row_layers,
    fuse_mixed_layers,
    fuse_refittable_layers,
    refittable_layers,
    refitted_constants,
)
from trtconvert.export.lowering.layers import exact_names, expand_layers, quantise_products, timesteps_kept
from trtconvert.export.lowering.layout import fold_transposes
from trtconvert.export.lowering.modulations import split_modulations
from trtconvert.export.lowering.native import lower_to_native
from trtconvert.export.lowering.patches import multiply_patches
from trtconvert.export.lowering.plugin import lower_to_plugin
from trtconvert.export.lowering.products import split_products

__all__ = [
    "can_fuse_deltas",
    "exact_names",
    "expand_layers",
    "fold_transposes",
    "fuse_deltas",
    "fuse_few_row_layers",
    "fuse_group_norms",
    "fuse_int8_convs",
    "fuse_mixed_layers",
    "fuse_refittable_layers",
    "has_deltas",
    "has_group_norms",
    "left_convs",
    "lower_deltas",
    "lower_to_function",
    "lower_to_native",
    "lower_to_plugin",
    "multiply_patches",
    "quantise_products",
    "refittable_layers",
    "refitted_constants",
    "split_modulations",
    "split_products",
    "timesteps_kept",
]
