"""The body of `trtconvert::Int8Attention`: the op's arithmetic in standard ONNX operators.

The body is an executable specification for ONNX Runtime: it shows the INT8 numerics without a GPU. TensorRT never runs it: the
`plugin` lowering removes it. The body follows `trtconvert.attention.reference` line by line; change both together. All arithmetic
is FP32, which is exact for INT8 products of up to 256 elements and u8·s8 sums over 128 keys. E4M3 is a cast there and back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import onnx
import onnx.parser

from trtconvert.attention.reference import (
    BLOCK,
    FP8_EXPONENT,
    LOG2_E,
    MIN_TOKEN_SCALE,
    SMALL_TOKEN,
    TILE,
    TINY_SCALE,
)
from trtconvert.export.nodes.common import DOMAIN, OPSET, TIMESTEP_BIN

OP = "Int8Attention"
INPUTS = ("q", "k", "v", "timestep", "q_scale", "k_scale", "v_scale", "k_offset", "v_offset", "modes")
MASK = "mask"
BLOCK_MASK = "block_mask"
KEY_INDEX = "key_index"
ATTRIBUTES = ("layout", "softmax_scale", "timestep_max", "scaling", "smooth_k")


@dataclass(frozen=True)
class Variant:
    """The properties that change the body's structure. Variants share the op type and differ in the overload."""

    layout: Literal["BHND", "BNHD"] = "BHND"
    scaling: Literal["calibrated", "dynamic"] = "calibrated"
    smooth_k: bool = True
    mask: Literal["none", "boolean", "additive"] = "none"
    block_mask: bool = False
    key_index: bool = False

    @property
    def overload(self) -> str:
        smooth = "smooth" if self.smooth_k else "plain"
        return "_".join([self.layout.lower(), self.scaling, smooth, self.mask, *self.flags])

    @property
    def flags(self) -> tuple[str, ...]:
        """Returns the optional inputs after the mask. The node has an attribute of the same name, 1, for each."""
        return tuple(name for name in (BLOCK_MASK, KEY_INDEX) if getattr(self, name))


def function_body(variant: Variant) -> onnx.FunctionProto:
    """Returns the FunctionProto of a variant."""
    masked = variant.mask != "none"
    inputs = ", ".join((*INPUTS, *([MASK] if masked else []), *variant.flags))
    k, v = ("k_given", "v_given") if variant.key_index else ("k_bhnd", "v_bhnd")
    text = f"""
    <opset_import: ["": {OPSET}], domain: "{DOMAIN}">
    {OP} <{", ".join((*ATTRIBUTES, *variant.flags))}> ({inputs}) => (out) {{
        {_CONSTANTS}
        {_HEADS_FIRST[variant.layout].format(k=k, v=v)}
        {_GATHER if variant.key_index else ""}
        {_SHAPES}
        {_BROKEN}
        {_TABLES}
        k_centred = {"Sub(k_heads, k_offset_row)" if variant.smooth_k else "Identity(k_heads)"}
        {_SCALES[variant.scaling]}
        {_FIRST_PRODUCT}
        {_MASK_SHAPE if masked or variant.block_mask else ""}
        {_MASKS[variant.mask]}
        {_BLOCKS if variant.block_mask else "z = Identity(z_masked)"}
        {_REACHED_IN_BLOCKS if variant.block_mask else _REACHED}
        {_SECOND_PRODUCT}
        {_LAYOUT_OF_RESULT[variant.layout]}
        out = CastLike(out_float, q)
    }}"""
    function = onnx.parser.parse_function(text)
    function.overload = variant.overload
    return function


_CONSTANTS = f"""
        tile = Constant<value = int64[1] {{{TILE}}}>()
        minus_one = Constant<value = int64[1] {{-1}}>()
        zero_i = Constant<value = int64[1] {{0}}>()
        one_i = Constant<value = int64[1] {{1}}>()
        two_i = Constant<value = int64[1] {{2}}>()
        zero = Constant<value = float {{0.0}}>()
        one = Constant<value = float {{1.0}}>()
        two = Constant<value = float {{2.0}}>()
        three = Constant<value = float {{3.0}}>()
        four = Constant<value = float {{4.0}}>()
        top = Constant<value = float {{127.0}}>()
        bottom = Constant<value = float {{-127.0}}>()
        u8_top = Constant<value = float {{255.0}}>()
        log2_e = Constant<value = float {{{LOG2_E!r}}}>()
        ln_2 = Reciprocal(log2_e)
        fp8_exponent = Constant<value = float {{{float(FP8_EXPONENT)!r}}}>()
        lowest = Constant<value = float {{-1e30}}>()
        infinite = Reciprocal(zero)
        hidden = Neg(infinite)
        nan = Sub(infinite, infinite)
        token_floor = Constant<value = float {{{MIN_TOKEN_SCALE!r}}}>()
        small_token = Constant<value = float {{{SMALL_TOKEN!r}}}>()
        tiny = Constant<value = float {{{TINY_SCALE!r}}}>()
        softmax_factor = Constant<value_float: float = @softmax_scale>()
        last_timestep = Constant<value_float: float = @timestep_max>()
"""

_HEADS_FIRST = {
    "BHND": """
        q_bhnd = Cast<to = 1>(q)
        {k} = Cast<to = 1>(k)
        {v} = Cast<to = 1>(v)
""",
    "BNHD": """
        q_float = Cast<to = 1>(q)
        k_float = Cast<to = 1>(k)
        v_float = Cast<to = 1>(v)
        q_bhnd = Transpose<perm = [0, 2, 1, 3]>(q_float)
        {k} = Transpose<perm = [0, 2, 1, 3]>(k_float)
        {v} = Transpose<perm = [0, 2, 1, 3]>(v_float)
""",
}

# The given rows of k and v.
_GATHER = """
        key_rows = Cast<to = 7>(key_index)
        key_places = Unsqueeze(key_rows, minus_one)
        k_bhnd = GatherND<batch_dims = 2>(k_given, key_places)
        v_bhnd = GatherND<batch_dims = 2>(v_given, key_places)
"""

# Heads have the shape [B, Hkv, G, N, D], G query heads for each key and value head.
_SHAPES = """
        q_shape = Shape(q_bhnd)
        batch = Shape<start = 0, end = 1>(q_bhnd)
        queries = Shape<start = 2, end = 3>(q_bhnd)
        dim = Shape<start = 3, end = 4>(q_bhnd)
        kv_heads = Shape<start = 1, end = 2>(k_bhnd)
        keys = Shape<start = 2, end = 3>(k_bhnd)
        grouped = Concat<axis = 0>(batch, kv_heads, minus_one, queries, dim)
        q_all = Reshape(q_bhnd, grouped)
        k_all = Unsqueeze(k_bhnd, two_i)
        v_all = Unsqueeze(v_bhnd, two_i)
        over = Mod(keys, tile)
        short = Sub(tile, over)
        missing = Mod(short, tile)
        padded = Add(keys, missing)
        no_pads = Constant<value = int64[9] {0, 0, 0, 0, 0, 0, 0, 0, 0}>()
        last_axis_pads = Concat<axis = 0>(no_pads, missing)
        token_pads_head = Constant<value = int64[8] {0, 0, 0, 0, 0, 0, 0, 0}>()
        token_axis_pads = Concat<axis = 0>(token_pads_head, missing, zero_i)
        tiles = Concat<axis = 0>(zero_i, zero_i, zero_i, zero_i, minus_one, tile)
        untiled = Concat<axis = 0>(zero_i, zero_i, zero_i, zero_i, minus_one)
"""

# Non-finite numbers become 0, and are marked by 1.
_BROKEN = "".join(
    f"""
        {x}_nan = IsNaN({x}_all)
        {x}_infinite = IsInf({x}_all)
        {x}_broken = Or({x}_nan, {x}_infinite)
        {x}_heads = Where({x}_broken, zero, {x}_all)
        {x}_marked = Cast<to = 1>({x}_broken)
"""
    for x in "qkv"
)
_BROKEN += """
        q_row_marked = ReduceMax<keepdims = 1>(q_marked, minus_one)
        k_token_marked = ReduceMax<keepdims = 1>(k_marked, minus_one)
        v_token_marked = ReduceMax<keepdims = 1>(v_marked, minus_one)
"""

_REACHED = """
        token_axis = Constant<value = int64[1] {3}>()
        rows_of_keys = ReduceMax<keepdims = 1>(k_token_marked, token_axis)
        rows_of_values = ReduceMax<keepdims = 1>(v_token_marked, token_axis)
        channels_of_values = ReduceMax<keepdims = 1>(v_marked, token_axis)
"""

# Only keys in a query's blocks count.
_REACHED_IN_BLOCKS = """
        computed = Cast<to = 1>(block_grouped)
        rows_of_keys = MatMul(computed, k_token_marked)
        rows_of_values = MatMul(computed, v_token_marked)
        channels_of_values = MatMul(computed, v_marked)
"""

_TABLES = f"""
        {TIMESTEP_BIN}
        mode_rows = Gather<axis = 0>(modes, bin)
        mode_float = Cast<to = 1>(mode_rows)
        per_batch = Constant<value = int64[5] {{-1, 1, 1, 1, 1}}>()
        mode = Reshape(mode_float, per_batch)
        is_int8 = Greater(mode, zero)
        scaled_values = GreaterOrEqual(mode, two)
        is_balanced = Equal(mode, two)
        is_aggressive = Equal(mode, three)
        is_fp8 = Equal(mode, four)
        int8_values = Or(is_balanced, is_aggressive)
        rounded_sum = Or(is_aggressive, is_fp8)
        per_query_head = Concat<axis = 0>(batch, kv_heads, minus_one, one_i, one_i)
        per_kv_head = Concat<axis = 0>(batch, kv_heads, one_i, one_i, one_i)
        per_channel = Concat<axis = 0>(batch, kv_heads, one_i, one_i, dim)
        q_scale_rows = Gather<axis = 0>(q_scale, bin)
        k_scale_rows = Gather<axis = 0>(k_scale, bin)
        v_scale_rows = Gather<axis = 0>(v_scale, bin)
        k_offset_rows = Gather<axis = 0>(k_offset, bin)
        v_offset_rows = Gather<axis = 0>(v_offset, bin)
        q_static = Reshape(q_scale_rows, per_query_head)
        k_static = Reshape(k_scale_rows, per_kv_head)
        v_scale_row = Reshape(v_scale_rows, per_channel)
        k_offset_row = Reshape(k_offset_rows, per_channel)
        v_offset_row = Reshape(v_offset_rows, per_channel)
"""

_SCALES = {
    "calibrated": """
        q_step = Identity(q_static)
        k_step = Identity(k_static)
        k_step_t = Identity(k_static)
""",
    # Queries per token, keys per tile, in modes 1, 2 and 4.
    "dynamic": """
        careful = Not(is_aggressive)
        q_abs = Abs(q_heads)
        q_amax = ReduceMax<keepdims = 1>(q_abs, minus_one)
        q_measured_raw = Div(q_amax, top)
        q_measured = Max(q_measured_raw, tiny)
        q_step = Where(careful, q_measured, q_static)
        k_abs = Abs(k_centred)
        k_amax = ReduceMax<keepdims = 0>(k_abs, minus_one)
        k_amax_pads_head = Constant<value = int64[7] {0, 0, 0, 0, 0, 0, 0}>()
        k_amax_pads = Concat<axis = 0>(k_amax_pads_head, missing)
        k_amax_padded = Pad(k_amax, k_amax_pads, zero)
        k_amax_shape = Concat<axis = 0>(zero_i, zero_i, zero_i, minus_one, tile)
        k_amax_tiles = Reshape(k_amax_padded, k_amax_shape)
        k_tile_amax = ReduceMax<keepdims = 1>(k_amax_tiles, minus_one)
        k_tile_shape = Shape(k_amax_tiles)
        k_tile_rows = Expand(k_tile_amax, k_tile_shape)
        k_row_shape = Concat<axis = 0>(zero_i, zero_i, zero_i, minus_one)
        k_padded_rows = Reshape(k_tile_rows, k_row_shape)
        three_i = Constant<value = int64[1] {3}>()
        k_rows = Slice(k_padded_rows, zero_i, keys, three_i)
        k_column = Unsqueeze(k_rows, minus_one)
        k_measured_raw = Div(k_column, top)
        k_measured = Max(k_measured_raw, tiny)
        k_step = Where(careful, k_measured, k_static)
        k_step_t = Transpose<perm = [0, 1, 2, 4, 3]>(k_step)
""",
}

# Mode 0 multiplies the inputs, the others INT8 codes, with one product for both.
_FIRST_PRODUCT = """
        q_over = Div(q_heads, q_step)
        q_round = Round(q_over)
        q_int8 = Clip(q_round, bottom, top)
        q_used = Where(is_int8, q_int8, q_heads)
        k_over = Div(k_centred, k_step)
        k_round = Round(k_over)
        k_int8 = Clip(k_round, bottom, top)
        k_used = Where(is_int8, k_int8, k_heads)
        k_used_t = Transpose<perm = [0, 1, 2, 4, 3]>(k_used)
        products = MatMul(q_used, k_used_t)
        qk_step = Mul(q_step, k_step_t)
        step = Where(is_int8, qk_step, one)
        factor = Mul(step, softmax_factor)
        logits = Mul(products, factor)
"""

_MASK_SHAPE = """
        heads = Shape<start = 1, end = 2>(q_bhnd)
        mask_full = Concat<axis = 0>(batch, heads, queries, keys)
        mask_grouped_shape = Concat<axis = 0>(batch, kv_heads, minus_one, queries, keys)
"""

_GROUP_MASK = """
        mask_rows = Expand(mask, mask_full)
        mask_grouped = Reshape(mask_rows, mask_grouped_shape)
"""

_MASKS = {
    "none": "z_masked = Identity(logits)",
    "boolean": _GROUP_MASK + "        z_masked = Where(mask_grouped, logits, hidden)",
    "additive": _GROUP_MASK
    + "        mask_float = Cast<to = 1>(mask_grouped)\n        z_masked = Add(logits, mask_float)",
}

# Expands a block mask to every query and key.
_BLOCKS = f"""
        block = Constant<value = int64 {{{BLOCK}}}>()
        first_place = Constant<value = int64 {{0}}>()
        next_place = Constant<value = int64 {{1}}>()
        last_query = Squeeze(queries)
        query_places = Range(first_place, last_query, next_place)
        query_blocks = Div(query_places, block)
        last_key = Squeeze(keys)
        every_key = Range(first_place, last_key, next_place)
        key_blocks = Div(every_key, block)
        block_rows = Gather<axis = 2>(block_mask, query_blocks)
        block_columns = Gather<axis = 3>(block_rows, key_blocks)
        block_full = Expand(block_columns, mask_full)
        block_grouped = Reshape(block_full, mask_grouped_shape)
        z = Where(block_grouped, z_masked, hidden)
"""

# Modes 2 and 3 multiply u8 weights by INT8 values by tile. Value tokens have scales in mode 2, and in mode 3 in tiles with a
# small token. Mode 4 multiplies E4M3 by E4M3, with weights relative to a power of two per row. Modes 3 and 4 sum the quantised
# weights, except of tokens with a scale; the other modes sum the unquantised weights.
_SECOND_PRODUCT = """
        v_moved = Sub(v_heads, v_offset_row)
        v_equal = Div(v_moved, v_scale_row)
        v_abs = Abs(v_equal)
        v_amax = ReduceMax<keepdims = 1>(v_abs, minus_one)
        v_token_raw = Div(v_amax, top)
        v_token_floored = Max(v_token_raw, token_floor)
        v_size = Div(v_heads, v_scale_row)
        v_size_abs = Abs(v_size)
        v_size_amax = ReduceMax<keepdims = 1>(v_size_abs, minus_one)
        v_size_raw = Div(v_size_amax, top)
        v_size_t = Transpose<perm = [0, 1, 2, 4, 3]>(v_size_raw)
        v_size_padded = Pad(v_size_t, last_axis_pads, top)
        v_size_tiles = Reshape(v_size_padded, tiles)
        v_smallest = ReduceMin<keepdims = 1>(v_size_tiles, minus_one)
        v_has_small = Less(v_smallest, small_token)
        v_tiles_shape = Shape(v_size_tiles)
        v_has_small_tiles = Expand(v_has_small, v_tiles_shape)
        v_has_small_padded = Reshape(v_has_small_tiles, untiled)
        key_axis = Constant<value = int64[1] {4}>()
        v_has_small_t = Slice(v_has_small_padded, zero_i, keys, key_axis)
        v_scaled_if_small = And(v_has_small_t, is_aggressive)
        has_scale_t = Or(v_scaled_if_small, is_balanced)
        v_floored_t = Transpose<perm = [0, 1, 2, 4, 3]>(v_token_floored)
        v_token_t = Where(has_scale_t, v_floored_t, one)
        v_token = Transpose<perm = [0, 1, 2, 4, 3]>(v_token_t)
        v_over = Div(v_equal, v_token)
        v_round = Round(v_over)
        v_int8 = Clip(v_round, bottom, top)
        v_fp8_stored = Cast<to = 17>(v_equal)
        v_fp8 = Cast<to = 1>(v_fp8_stored)
        v_scaled = Where(is_fp8, v_fp8, v_int8)
        v_used_keys = Where(scaled_values, v_scaled, v_heads)
        v_used = Pad(v_used_keys, token_axis_pads, zero)
        v_bias = Log(v_token_t)
        w_keys = Add(z, v_bias)
        w_row = ReduceMax<keepdims = 1>(w_keys, minus_one)
        row_max = Max(w_row, lowest)
        w_less = Sub(w_keys, row_max)
        p = Exp(w_less)
        p_unscaled = Div(p, v_token_t)
        p_unscaled_padded = Pad(p_unscaled, last_axis_pads, zero)
        w_padded = Pad(w_keys, last_axis_pads, hidden)
        w_tiles = Reshape(w_padded, tiles)
        w_tile_max = ReduceMax<keepdims = 1>(w_tiles, minus_one)
        tile_max = Max(w_tile_max, lowest)
        w_tiles_less = Sub(w_tiles, tile_max)
        p_tiles = Exp(w_tiles_less)
        p_255 = Mul(p_tiles, u8_top)
        p_u8 = Round(p_255)
        row_max_tiles = Unsqueeze(row_max, minus_one)
        tile_less = Sub(tile_max, row_max_tiles)
        tile_weight = Exp(tile_less)
        tile_factor = Div(tile_weight, u8_top)
        p_weighted = Mul(p_u8, tile_factor)
        p_int8 = Reshape(p_weighted, untiled)
        row_octaves = Mul(row_max, log2_e)
        row_ceiling = Ceil(row_octaves)
        fp8_reference = Sub(row_ceiling, fp8_exponent)
        w_octaves = Mul(w_keys, log2_e)
        w_octaves_less = Sub(w_octaves, fp8_reference)
        w_less_reference = Mul(w_octaves_less, ln_2)
        p_lifted = Exp(w_less_reference)
        p_fp8_stored = Cast<to = 17>(p_lifted)
        p_fp8 = Cast<to = 1>(p_fp8_stored)
        p_float = Where(is_fp8, p_fp8, p)
        p_padded = Pad(p_float, last_axis_pads, zero)
        p_used = Where(int8_values, p_int8, p_padded)
        has_no_scale_t = Not(has_scale_t)
        is_rounded_t = And(has_no_scale_t, rounded_sum)
        is_rounded_marked = Cast<to = 1>(is_rounded_t)
        is_rounded_padded = Pad(is_rounded_marked, last_axis_pads, zero)
        is_rounded = Greater(is_rounded_padded, zero)
        p_summed = Where(is_rounded, p_used, p_unscaled_padded)
        row_sum = ReduceSum<keepdims = 1>(p_summed, minus_one)
        weighted = MatMul(p_used, v_used)
        none = Equal(row_sum, zero)
        divisor = Where(none, one, row_sum)
        mean = Div(weighted, divisor)
        mean_scaled = Mul(mean, v_scale_row)
        mean_moved = Add(mean_scaled, v_offset_row)
        mean_used = Where(scaled_values, mean_moved, mean)
        visible = Where(none, zero, mean_used)
        t_nan_rows = Reshape(t_nan, per_batch)
        known = Where(t_nan_rows, nan, visible)
        reached_by_values = Where(int8_values, rows_of_values, channels_of_values)
        reached_by_tokens = Max(q_row_marked, rows_of_keys, reached_by_values)
        reached = Greater(reached_by_tokens, zero)
        result = Where(reached, nan, known)
        result_bhnd = Reshape(result, q_shape)
"""

_LAYOUT_OF_RESULT = {
    "BHND": "out_float = Identity(result_bhnd)",
    "BNHD": "out_float = Transpose<perm = [0, 2, 1, 3]>(result_bhnd)",
}
