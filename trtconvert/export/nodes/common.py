"""Constants and helpers of all nodes of our own domain."""

from __future__ import annotations

import onnx_ir as ir

DOMAIN, VERSION = "trtconvert", 1
PLUGIN = {"plugin_version": str(VERSION), "plugin_namespace": ""}
"""Attributes for TensorRT's parser to find the plugin."""

OPSET = 20
"""Standard opset of bodies and exported models: the newest that TensorRT 10.6 reads."""

SITE_METADATA = "trtconvert.site"
"""Metadata key of a node: name of its attention site."""
HALF = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
"""16-bit types of kernels."""

TIMESTEP_BIN = """
        bins_i = Shape(modes)
        bins = Cast<to = 1>(bins_i)
        t = Cast<to = 1>(timestep)
        t_bins = Mul(t, bins)
        t_over = Div(t_bins, last_timestep)
        t_floor = Floor(t_over)
        last_bin = Sub(bins, one)
        t_nan = IsNaN(t)
        t_low = Max(t_floor, zero)
        t_clamped = Min(t_low, last_bin)
        t_known = Where(t_nan, zero, t_clamped)
        bin = Cast<to = 7>(t_known)
"""
"""Lines of a body that compute `bin` [B], the timestep bins, and `t_nan`. NaN counts as 0.

The body must define `zero`, `one` and `last_timestep`.
"""


def has_own_nodes(model: ir.Model) -> bool:
    """Return whether the graph has a node of our domain."""
    return any(node.domain == DOMAIN for node in ir.traversal.RecursiveGraphIterator(model.graph))


def marked_windows(result: str) -> str:
    """Returns lines of a convolution's body that set `result` to 1 or more where a window has a marked element.

    The body must define `marked` [B, K, *sizes], 1 or 0, and `one_i`, the integer 1.
    """
    return f"""
        marked_pixels = ReduceMax<keepdims = 1>(marked, one_i)
        kernel = Shape<start = 2>(weight)
        of_window = Concat<axis = 0>(one_i, one_i, kernel)
        window = ConstantOfShape<value = float[1] {{1.0}}>(of_window)
        {result} = Conv<strides: ints = @strides, pads: ints = @pads>(marked_pixels, window)
"""
