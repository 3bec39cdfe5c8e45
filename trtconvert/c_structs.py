"""Structs and integer macros of the C API, written by `python tools/c_structs.py`. The headers document the fields."""

from ctypes import Structure, c_float, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p

CHANNELS_LAST_ADD_VERSION = 1
ALL_MODES = 14
IMAGE_MARKS = 32
MOST_COPIES = 32
GROUP_NORM_VERSION = 2
GROUP_NORM_MOST_CHANNELS = 4096
ATTENTION_VERSION = 6
INT8_CONV_VERSION = 2
INT8_LINEAR_VERSION = 2
MOST_PARTS = 8
MORE_PARTS = 7
LINEAR_VERSION = 1
QUANTISE_VERSION = 1
QUANTISE_CHANGE_VERSION = 1
RESIDUAL_NORM_VERSION = 3
RESIDUAL_NORM_MOST_CHANNELS = 4096
WEIGHTED_SUM_VERSION = 1
MOST_TERMS = 4


class ChannelsLastAddParams(Structure):
    """TrtConvertChannelsLastAddParams of channels_last_add.h."""

    _fields_ = [
        ("struct_size", c_uint32),
        ("version", c_uint32),
        ("pixels", c_int64),
        ("channels", c_int32),
        ("data_type", c_int32),
        ("x", c_void_p),
        ("y", c_void_p),
        ("sum", c_void_p),
        ("stream", c_void_p),
    ]


class ModeTable(Structure):
    """TrtConvertModeTable of layer_modes.h."""

    _fields_ = [
        ("mode_set", c_int32),
        ("num_bins", c_int32),
        ("batch", c_int32),
        ("timestep_max", c_float),
        ("timestep", c_void_p),
        ("modes", c_void_p),
        ("x_scale", c_void_p),
    ]


class Copy(Structure):
    """TrtConvertCopy of graph_copies.h."""

    _fields_ = [
        ("buffer", c_void_p),
        ("outer", c_void_p),
        ("bytes", c_uint64),
    ]


class CopyNode(Structure):
    """TrtConvertCopyNode of graph_copies.h."""

    _fields_ = [
        ("struct_size", c_uint32),
        ("outwards", c_int32),
        ("count", c_int32),
        ("blocks", c_int32),
        ("node", c_void_p),
        ("copies", Copy * MOST_COPIES),
    ]


class CopyingGraph(Structure):
    """TrtConvertCopyingGraph of graph_copies.h."""

    _fields_ = [
        ("exec", c_void_p),
        ("stream", c_void_p),
        ("nodes", c_void_p),
        ("addresses", c_void_p),
        ("num_nodes", c_int32),
    ]


class GroupNormParams(Structure):
    """TrtConvertGroupNormParams of group_norm.h."""

    _fields_ = [
        ("struct_size", c_uint32),
        ("version", c_uint32),
        ("batch", c_int64),
        ("pixels", c_int64),
        ("channels", c_int32),
        ("groups", c_int32),
        ("data_type", c_int32),
        ("silu", c_int32),
        ("epsilon", c_float),
        ("x", c_void_p),
        ("shift", c_void_p),
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("normed", c_void_p),
        ("stream", c_void_p),
        ("table", ModeTable),
        ("factor", c_void_p),
        ("payload", c_void_p),
        ("marks", c_void_p),
    ]


class Strides(Structure):
    """TrtConvertStrides of int8_attention.h."""

    _fields_ = [
        ("batch", c_int64),
        ("token", c_int64),
        ("head", c_int64),
    ]


class AttentionParams(Structure):
    """TrtConvertAttentionParams of int8_attention.h."""

    _fields_ = [
        ("struct_size", c_uint32),
        ("version", c_uint32),
        ("batch", c_int32),
        ("num_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("num_queries", c_int32),
        ("num_keys", c_int32),
        ("head_dim", c_int32),
        ("num_bins", c_int32),
        ("data_type", c_int32),
        ("scaling", c_int32),
        ("smooth_k", c_int32),
        ("mask_kind", c_int32),
        ("target_arch", c_int32),
        ("softmax_scale", c_float),
        ("timestep_max", c_float),
        ("q", c_void_p),
        ("k", c_void_p),
        ("v", c_void_p),
        ("out", c_void_p),
        ("q_strides", Strides),
        ("k_strides", Strides),
        ("v_strides", Strides),
        ("out_strides", Strides),
        ("timestep", c_void_p),
        ("q_scale", c_void_p),
        ("k_scale", c_void_p),
        ("v_scale", c_void_p),
        ("k_offset", c_void_p),
        ("v_offset", c_void_p),
        ("modes", c_void_p),
        ("mask", c_void_p),
        ("mask_strides", c_int64 * 4),
        ("key_lengths", c_void_p),
        ("workspace", c_void_p),
        ("workspace_size", c_size_t),
        ("stream", c_void_p),
        ("rotary", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("norm_epsilon", c_float),
        ("norm_across_heads", c_int32),
        ("norm_split", c_int32),
        ("token_split", c_int32),
        ("second_q", c_void_p),
        ("second_k", c_void_p),
        ("second_v", c_void_p),
        ("second_out", c_void_p),
        ("second_q_strides", Strides),
        ("second_k_strides", Strides),
        ("second_v_strides", Strides),
        ("second_out_strides", Strides),
        ("block_mask", c_void_p),
        ("key_index", c_void_p),
        ("lse", c_void_p),
        ("block_mask_batch", c_int32),
        ("block_mask_heads", c_int32),
        ("source_keys", c_int32),
    ]


class Int8ConvParams(Structure):
    """TrtConvertInt8ConvParams of int8_conv.h."""

    _fields_ = [
        ("struct_size", c_uint32),
        ("version", c_uint32),
        ("batch", c_int64),
        ("height", c_int32),
        ("width", c_int32),
        ("in_channels", c_int32),
        ("out_channels", c_int32),
        ("kernel_h", c_int32),
        ("kernel_w", c_int32),
        ("stride_y", c_int32),
        ("stride_x", c_int32),
        ("pad_y", c_int32),
        ("pad_x", c_int32),
        ("data_type", c_int32),
        ("table", ModeTable),
        ("x", c_void_p),
        ("weight", c_void_p),
        ("weight_scale", c_void_p),
        ("bias", c_void_p),
        ("residual", c_void_p),
        ("y", c_void_p),
        ("stream", c_void_p),
        ("target_arch", c_int32),
        ("marks", c_void_p),
    ]


class Int8LinearParams(Structure):
    """TrtConvertInt8LinearParams of int8_linear.h."""

    _fields_ = [
        ("struct_size", c_uint32),
        ("version", c_uint32),
        ("rows", c_int64),
        ("in_channels", c_int32),
        ("out_channels", c_int32),
        ("data_type", c_int32),
        ("activation", c_int32),
        ("mode_set", c_int32),
        ("x", c_void_p),
        ("row_scale", c_void_p),
        ("weight", c_void_p),
        ("weight_scale", c_void_p),
        ("bias", c_void_p),
        ("residual", c_void_p),
        ("y", c_void_p),
        ("stream", c_void_p),
        ("out_table", ModeTable),
        ("out_factor", c_void_p),
        ("out_offset", c_void_p),
        ("out_payload", c_void_p),
        ("out_row_scale", c_void_p),
        ("target_arch", c_int32),
        ("changes", c_int32),
        ("parts", c_int32),
        ("more_y", c_void_p * MORE_PARTS),
    ]


class LinearParams(Structure):
    """TrtConvertLinearParams of linear.h."""

    _fields_ = [
        ("struct_size", c_uint32),
        ("version", c_uint32),
        ("rows", c_int64),
        ("in_channels", c_int32),
        ("out_channels", c_int32),
        ("data_type", c_int32),
        ("geglu", c_int32),
        ("x", c_void_p),
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("y", c_void_p),
        ("stream", c_void_p),
    ]


class QuantiseParams(Structure):
    """TrtConvertQuantiseParams of quantise.h."""

    _fields_ = [
        ("struct_size", c_uint32),
        ("version", c_uint32),
        ("rows", c_int64),
        ("channels", c_int32),
        ("data_type", c_int32),
        ("table", ModeTable),
        ("x", c_void_p),
        ("factor", c_void_p),
        ("offset", c_void_p),
        ("payload", c_void_p),
        ("row_scale", c_void_p),
        ("stream", c_void_p),
        ("starts_early", c_int32),
    ]


class QuantiseChangeParams(Structure):
    """TrtConvertQuantiseChangeParams of quantise_change.h."""

    _fields_ = [
        ("struct_size", c_uint32),
        ("version", c_uint32),
        ("rows", c_int64),
        ("channels", c_int32),
        ("data_type", c_int32),
        ("activation", c_int32),
        ("batch", c_int32),
        ("places", c_int32),
        ("place", c_int32),
        ("x", c_void_p),
        ("factor", c_void_p),
        ("a_hat", c_void_p),
        ("scales", c_void_p),
        ("payload", c_void_p),
        ("row_scale", c_void_p),
        ("a_next", c_void_p),
        ("stream", c_void_p),
    ]


class ResidualNormParams(Structure):
    """TrtConvertResidualNormParams of residual_norm.h."""

    _fields_ = [
        ("struct_size", c_uint32),
        ("version", c_uint32),
        ("rows", c_int64),
        ("channels", c_int32),
        ("data_type", c_int32),
        ("epsilon", c_float),
        ("x", c_void_p),
        ("residual", c_void_p),
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("sum", c_void_p),
        ("normed", c_void_p),
        ("stream", c_void_p),
        ("starts_early", c_int32),
        ("table", ModeTable),
        ("factor", c_void_p),
        ("offset", c_void_p),
        ("payload", c_void_p),
        ("row_scale", c_void_p),
    ]


class Term(Structure):
    """TrtConvertTerm of weighted_sum.h."""

    _fields_ = [
        ("x", c_void_p),
        ("factor", c_float),
        ("data_type", c_int32),
    ]


class WeightedSumParams(Structure):
    """TrtConvertWeightedSumParams of weighted_sum.h."""

    _fields_ = [
        ("struct_size", c_uint32),
        ("version", c_uint32),
        ("count", c_int64),
        ("num_terms", c_int32),
        ("data_type", c_int32),
        ("terms", Term * MOST_TERMS),
        ("sum", c_void_p),
        ("stream", c_void_p),
    ]
