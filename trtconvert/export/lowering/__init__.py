"""Rewrites of a model in place, each with the count of nodes that it changed: the three ways in which an `Int8Attention`
node meets a runtime, the folding of transposes into its layout, and what TensorRT computes sooner in another form."""

from trtconvert.export.lowering.changed_rows import can_take_changes, take_changes
from trtconvert.export.lowering.changes import has_changes, lower_changes
from trtconvert.export.lowering.function import lower_to_function
from trtconvert.export.lowering.group_norms import has_group_norms, take_group_norms
from trtconvert.export.lowering.int8_convs import left_convs, take_int8_convs
from trtconvert.export.lowering.int8_layers import (
    refittable_layers,
    refitted_constants,
    take_few_row_layers,
    take_mixed_layers,
    take_refittable_layers,
)
from trtconvert.export.lowering.layers import exact_names, expand_layers, quantise_products, timesteps_kept
from trtconvert.export.lowering.layout import fold_transposes
from trtconvert.export.lowering.modulations import split_modulations
from trtconvert.export.lowering.native import lower_to_native
from trtconvert.export.lowering.patches import multiply_patches
from trtconvert.export.lowering.plugin import lower_to_plugin
from trtconvert.export.lowering.products import split_products

__all__ = [
    "can_take_changes",
    "exact_names",
    "expand_layers",
    "fold_transposes",
    "has_changes",
    "has_group_norms",
    "left_convs",
    "lower_changes",
    "lower_to_function",
    "lower_to_native",
    "lower_to_plugin",
    "multiply_patches",
    "quantise_products",
    "refittable_layers",
    "refitted_constants",
    "split_modulations",
    "split_products",
    "take_changes",
    "take_few_row_layers",
    "take_group_norms",
    "take_int8_convs",
    "take_mixed_layers",
    "take_refittable_layers",
    "timesteps_kept",
]
