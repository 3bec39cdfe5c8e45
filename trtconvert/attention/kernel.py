"""`torch.ops.trtconvert.int8_attention`: the CUDA kernels as a torch operator, through the C API and ctypes.

The shared library depends on neither torch nor Python, so that one build serves every version of both. On a CPU the operator
runs the specification, `trtconvert.attention.reference`.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from trtconvert.attention import reference
from trtconvert.attention.masks import block_shape, broadcasts, fits_blocks
from trtconvert.attention.reference import AttentionTables
from trtconvert.c_structs import ATTENTION_VERSION, AttentionParams, Strides
from trtconvert.library import load_library
from trtconvert.mixed_types import without_autocast

_MESSAGE_BYTES = 512
_INVALID_ARGUMENT = 1  # TRTCONVERT_INVALID_ARGUMENT

_DATA_TYPES = {torch.float16: 0, torch.bfloat16: 1}
_SCALINGS = {"calibrated": 0, "dynamic": 1}
_LAYOUTS = ("BHND", "BNHD")
_NO_MASK, _BOOL_MASK, _ADDITIVE_MASK = 0, 1, 2


@functools.cache
def _library() -> ctypes.CDLL:
    library = load_library()
    text = [ctypes.c_char_p, ctypes.c_size_t]
    params = ctypes.POINTER(AttentionParams)
    library.trtconvert_attention_workspace_size.argtypes = [params, ctypes.POINTER(ctypes.c_size_t), *text]
    library.trtconvert_attention_run.argtypes = [params, *text]
    return library


@torch.library.custom_op("trtconvert::int8_attention", mutates_args=())
def int8_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    timestep: Tensor,
    q_scale: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
    k_offset: Tensor,
    v_offset: Tensor,
    modes: Tensor,
    mask: Tensor | None = None,
    key_lengths: Tensor | None = None,
    layout: str = "BHND",
    softmax_scale: float | None = None,
    timestep_max: float = 1000.0,
    scaling: str = "calibrated",
    smooth_k: bool = True,
    block_mask: Tensor | None = None,
    key_index: Tensor | None = None,
) -> Tensor:
    """Computes attention in the precision that the timestep selects; `reference.attention` is the specification.

    A GPU without a kernel for `Mode.FP8` computes `Mode.PRECISION`, see `Mode.FP8`.

    Args:
        q: [B, H, Nq, D] (`layout` "BHND") or [B, Nq, H, D] ("BNHD"). On a GPU FP16 or BF16 and D in 32…256 in steps of 8,
            on a CPU any.
        k, v: as q, with Hkv heads (Hkv divides H) and Nk tokens.
        timestep: [B] FP32, the denoiser's timesteps; read on the device, without a synchronisation.
        q_scale, k_scale, v_scale, k_offset, v_offset, modes: the fields of `reference.AttentionTables`.
        mask: broadcastable to [B, H, Nq, Nk]; boolean (true attends) or additive.
        key_lengths: [B] INT32; keys from this length on are ignored.
        layout, softmax_scale, timestep_max, scaling, smooth_k: as in `reference.attention`.
        block_mask: [B or 1, H or 1, ⌈Nq/128⌉, ⌈Nk/128⌉] bool, the blocks to compute; time is linear in their number. A CPU
            refuses a row without a block; a GPU computes zeros, as a check would synchronise.
        key_index: [B, Hkv, K] INT32, the rows of k and v to attend to; Nk of the other arguments is then K. A CPU refuses indices
            outside k, a GPU clamps them. The kernels gather while they quantise, without an extra pass over memory.
    Returns:
        The output in q's shape and type, contiguous.
    Raises:
        ValueError: shapes, types or attributes do not fit each other.
        BackendUnavailable: a GPU tensor, and the library is not built.
        RuntimeError: the GPU is older than sm_80, or CUDA failed.

    Differentiable in q, k, v and an additive mask with a straight-through estimator: the backward is that of unquantised
    attention at the same tensors in q's type, as quantisation's true derivative is zero almost everywhere (Bengio et al., arXiv
    1308.3432). With a block mask the backward computes all blocks, some rows at a time, and saves no time. NaN and ±Inf in q, k
    or v make all dependent gradients NaN, as NaN does in torch's attention; a non-finite key reaches the gradients of all queries
    of its head, whatever masks hide it.
    """
    tables = AttentionTables(q_scale, k_scale, v_scale, k_offset, v_offset, modes)
    return _compute(
        q, k, v, timestep, tables, layout=layout, softmax_scale=softmax_scale, timestep_max=timestep_max,
        scaling=scaling, smooth_k=smooth_k, mask=mask, key_lengths=key_lengths, block_mask=block_mask, key_index=key_index,
    )  # fmt: skip


@torch.library.custom_op("trtconvert::int8_attention_lse", mutates_args=())
def int8_attention_lse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    timestep: Tensor,
    q_scale: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
    k_offset: Tensor,
    v_offset: Tensor,
    modes: Tensor,
    mask: Tensor | None = None,
    key_lengths: Tensor | None = None,
    layout: str = "BHND",
    softmax_scale: float | None = None,
    timestep_max: float = 1000.0,
    scaling: str = "calibrated",
    smooth_k: bool = True,
    block_mask: Tensor | None = None,
    key_index: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`int8_attention` that also returns each row's log-sum-exp, [B, H, Nq] FP32: `return_lse` of `reference.attention`.

    A separate operator, as torch operators have a fixed number of results. Differentiable through both results.
    """
    tables = AttentionTables(q_scale, k_scale, v_scale, k_offset, v_offset, modes)
    return _compute(
        q, k, v, timestep, tables, layout=layout, softmax_scale=softmax_scale, timestep_max=timestep_max,
        scaling=scaling, smooth_k=smooth_k, mask=mask, key_lengths=key_lengths, block_mask=block_mask, key_index=key_index,
        return_lse=True,
    )  # fmt: skip


def _compute(q: Tensor, k: Tensor, v: Tensor, timestep: Tensor, tables: AttentionTables, **options: Any) -> Any:
    """Checks the arguments, then runs the kernels on a GPU or the reference on a CPU. Options are the reference's."""
    _check(q, k, v, timestep, tables, options)
    run = _run_cuda if q.is_cuda else reference.attention
    return run(q, k, v, timestep, tables, **options)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    timestep: Tensor,
    tables: AttentionTables,
    *,
    return_lse: bool = False,
    **options: Any,
) -> Any:  # as `reference.attention`
    """Calls `int8_attention` with the signature of `reference.attention`; with `return_lse` also returns the log-sum-exp."""
    run = int8_attention_lse if return_lse else int8_attention
    # torch.compile cannot trace vars() of a frozen dataclass.
    named = {name: getattr(tables, name) for name in (*_TABLES[1:], "modes")}
    return run(q, k, v, timestep, **named, **options)


@int8_attention.register_fake
def _(q: Tensor, *_: object, **__: object) -> Tensor:
    return torch.empty_like(q, memory_format=torch.contiguous_format)


@int8_attention_lse.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    timestep: Tensor,
    q_scale: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
    k_offset: Tensor,
    v_offset: Tensor,
    modes: Tensor,
    mask: Tensor | None = None,
    key_lengths: Tensor | None = None,
    layout: str = "BHND",
    *_: object,
    **__: object,
) -> tuple[Tensor, Tensor]:
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    return out, q.new_empty(_sizes(q, layout)[:3], dtype=torch.float32)


def _setup_context(ctx, inputs, output: Tensor | tuple[Tensor, Tensor]) -> None:
    q, k, v = inputs[:3]
    mask, key_lengths, layout, softmax_scale = inputs[10:14]
    block_mask, key_index = inputs[17:]
    ctx.save_for_backward(q, k, v, mask, key_lengths, block_mask, key_index)
    ctx.layout, ctx.softmax_scale = layout, softmax_scale
    ctx.set_materialize_grads(False)


_MASK = 10
"""Place of the mask among the operators' arguments."""

_BACKWARD_QUERIES = 1024
"""Queries per chunk of the backward, which expands a block mask chunk by chunk."""


def _backward(ctx, grad: Tensor | None, lse_grad: Tensor | None = None):
    q, k, v, mask, key_lengths, block_mask, key_index = ctx.saved_tensors
    others: list[Tensor | None] = [None] * 16
    if grad is None and lse_grad is None:
        return None, None, None, *others
    scale = q.shape[-1] ** -0.5 if ctx.softmax_scale is None else ctx.softmax_scale
    swapped = ctx.layout == "BNHD"
    # An infinite key may have a logit of -inf and so no weight in torch, although its query has a gradient: NaN instead.
    q, k, v = (x.nan_to_num(math.nan, math.nan, math.nan) for x in (q, k, v))
    q, k, v = (x.transpose(1, 2) if swapped else x for x in (q, k, v))
    if grad is not None and swapped:
        grad = grad.transpose(1, 2)
    keys, values, rows = k, v, None
    if key_index is not None:
        rows = key_index.long().clamp(0, k.shape[2] - 1)[..., None].expand(-1, -1, -1, k.shape[3])
        keys, values = k.gather(2, rows), v.gather(2, rows)
    given, exists, mask_grad = mask, None, None
    if any(ctx.needs_input_grad[_MASK : _MASK + 1]):  # arguments that were left out have no place
        mask_grad = torch.zeros([1] * (4 - mask.dim()) + list(mask.shape), device=q.device)
    if key_lengths is not None:
        exists = (torch.arange(keys.shape[2], device=q.device) < key_lengths[:, None])[:, None, None]
        # Memory beyond the length may hold NaN, and NaN times zero is NaN under any mask.
        keys, values = (x.masked_fill(~exists.transpose(2, 3), 0) for x in (keys, values))
        mask = _and_mask(mask, exists)
    if mask is not None:
        mask = _typed_mask(mask, q.dtype)
        mask = mask.view(*[1] * (4 - mask.dim()), *mask.shape)

    queries = q.shape[2]
    step = queries if block_mask is None else _BACKWARD_QUERIES
    q_grad, keys_grad, values_grad = torch.empty_like(q), torch.zeros_like(keys), torch.zeros_like(values)
    for first in range(0, queries, step):
        chunk = slice(first, first + step)
        here = mask if mask is None or mask.shape[2] == 1 else mask[:, :, chunk]
        if block_mask is not None:
            blocks = block_mask[:, :, first // reference.BLOCK : (first + step) // reference.BLOCK]
            count = q[:, :, chunk].shape[2]
            here = _and_mask(here, reference.expand_blocks(blocks, count, keys.shape[2]))
        grads = _unquantised_gradients(
            q[:, :, chunk], keys, values, here, scale,
            None if grad is None else grad[:, :, chunk], None if lse_grad is None else lse_grad[:, :, chunk],
            of_mask=mask_grad is not None,
        )  # fmt: skip
        q_grad[:, :, chunk] = grads[0]
        keys_grad += grads[1]
        values_grad += grads[2]
        if mask_grad is not None and grads[3] is not None:
            part = mask_grad if mask_grad.shape[2] == 1 else mask_grad[:, :, chunk]
            part += grads[3].float().sum_to_size(part.shape)
    if exists is not None:
        keys_grad, values_grad = (x.masked_fill(~exists.transpose(2, 3), 0) for x in (keys_grad, values_grad))
    if rows is not None:
        keys_grad, values_grad = (
            torch.zeros_like(whole).scatter_add(2, rows, part) for whole, part in ((k, keys_grad), (v, values_grad))
        )
    if mask_grad is not None:
        others[_MASK - 3] = mask_grad.view(given.shape).to(given.dtype)
    return *((x.transpose(1, 2) if swapped else x) for x in (q_grad, keys_grad, values_grad)), *others


int8_attention.register_autograd(_backward, setup_context=_setup_context)
int8_attention_lse.register_autograd(_backward, setup_context=_setup_context)


@without_autocast
def _unquantised_gradients(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, grad: Tensor | None, lse_grad: Tensor | None,
    of_mask: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Returns gradients of q, k and v, heads first, and of the mask if wanted, through unquantised attention and its
    log-sum-exp."""

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = mask) -> Tensor:
        shared = bool(q.shape[1] != k.shape[1])  # enable_gqa without need restricts torch's choice of kernels
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=shared)

    q_grad, k_grad, v_grad = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    mask_grad = None
    if grad is not None:
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in (q, k, v, *([mask] if of_mask and mask is not None else []))]
            q_grad, k_grad, v_grad, *rest = torch.autograd.grad(attend(*leaves), leaves, grad)
            mask_grad = rest[0] if rest else None
    if lse_grad is not None:
        # With P the weights and g the gradient of the log-sum-exp: g P K scale and (g P)^T Q scale, which are an output of
        # attention with the keys as values, and the gradient of these values.
        weight = lse_grad[..., None].to(q.dtype) * scale
        with torch.enable_grad():
            as_values = k.detach().requires_grad_()
            mean_key = attend(q.detach(), k.detach(), as_values)
            (through_weights,) = torch.autograd.grad(mean_key, as_values, weight * q.detach())
        q_grad = q_grad + weight * mean_key.detach()
        k_grad = k_grad + through_weights
        if of_mask and mask is not None:
            logits = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(2, 3) * scale + mask
            of_lse = (logits.softmax(-1) * lse_grad[..., None].to(q.dtype)).sum_to_size(mask.shape)
            mask_grad = of_lse if mask_grad is None else of_lse + mask_grad
    return q_grad, k_grad, v_grad, mask_grad


def _and_mask(mask: Tensor | None, visible: Tensor) -> Tensor:
    """Returns a mask that hides the masked and the invisible keys."""
    if mask is None:
        return visible
    return mask & visible if mask.dtype == torch.bool else mask.masked_fill(~visible, float("-inf"))


def _run_cuda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    timestep: Tensor,
    tables: AttentionTables,
    *,
    layout: str = "BHND",
    softmax_scale: float | None = None,
    timestep_max: float = 1000.0,
    scaling: str = "calibrated",
    smooth_k: bool = True,
    mask: Tensor | None = None,
    key_lengths: Tensor | None = None,
    block_mask: Tensor | None = None,
    key_index: Tensor | None = None,
    return_lse: bool = False,
    target_arch: int = 0,
    rotary: Tensor | None = None,
    norm: tuple[Tensor, Tensor, float] | None = None,
    norm_split: int = 0,
    token_split: int = 0,
) -> Any:  # as `reference.attention`
    """Runs the kernels: `reference.attention`, with further options that TensorRT's plugin and tests use.

    Args:
        target_arch: 80 runs the portable kernel on a GPU that has a better one.
        rotary: [N, D / 2, 2] FP32, cosine and sine that rotate adjacent channels of q and k before attention.
        norm: FP32 weights of the RMS norms of q and of k before the rotation, and their epsilon. Weights [D] normalise each head;
            [H, D] and [Hkv, D] normalise each token across its heads.
        norm_split: s > 0: the weights of `norm` are [2, D] for norms of each head, row 0 for tokens before s, row 1 for tokens
            from s on. 0: one norm for all tokens.
        token_split: s > 0: pass tokens before s and tokens from s on to the kernels in separate tensors.
    """
    library = _library()
    q, k, v = (_aligned(x) for x in (q, k, v))
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    (batch, heads, queries, dim), (_, kv_heads, keys, _) = _sizes(q, layout), _sizes(k, layout)
    source_keys = 0
    if key_index is not None:
        source_keys, keys = keys, key_index.shape[2]
    # Held until the launch is enqueued. After that the caching allocator keeps their memory for this stream's later work.
    given = {"timestep": timestep} | vars(tables)
    read = {name: _table(given[name]) for name in _TABLES}
    modes = tables.modes.contiguous().int()
    params = AttentionParams(
        struct_size=ctypes.sizeof(AttentionParams),
        version=ATTENTION_VERSION,
        batch=batch,
        num_heads=heads,
        num_kv_heads=kv_heads,
        num_queries=queries,
        num_keys=keys,
        head_dim=dim,
        num_bins=modes.shape[0],
        data_type=_DATA_TYPES[q.dtype],
        scaling=_SCALINGS[scaling],
        smooth_k=int(smooth_k),
        mask_kind=_NO_MASK,
        target_arch=target_arch,
        softmax_scale=dim**-0.5 if softmax_scale is None else softmax_scale,
        timestep_max=timestep_max,
        **{name: x.data_ptr() for name, x in read.items()},
        modes=modes.data_ptr(),
        token_split=token_split,
        source_keys=source_keys,
    )
    token_axis = layout.index("N")
    parts = [(q, k, v, out)]
    if token_split > 0:
        sizes = [token_split, queries - token_split]
        cut = [x.split(sizes, token_axis) for x in (q, k, v, out)]
        parts = [tuple(x.contiguous() for x in part) for part in zip(*cut, strict=True)]
    for prefix, part in zip(("", "second_"), parts, strict=False):
        for name, x in zip(("q", "k", "v", "out"), part, strict=True):
            setattr(params, f"{prefix}{name}", x.data_ptr())
            setattr(params, f"{prefix}{name}_strides", _strides(x, layout))
    full_mask = None if mask is None else _typed_mask(mask, q.dtype).expand(batch, heads, queries, keys)
    if full_mask is not None:
        params.mask_kind = _BOOL_MASK if full_mask.dtype == torch.bool else _ADDITIVE_MASK
        params.mask = full_mask.data_ptr()
        params.mask_strides[:] = full_mask.stride()
    lengths = None if key_lengths is None else key_lengths.contiguous().int()
    if lengths is not None:
        params.key_lengths = lengths.data_ptr()

    blocks = None if block_mask is None else block_mask.contiguous()
    if blocks is not None:
        params.block_mask = blocks.data_ptr()
        params.block_mask_batch, params.block_mask_heads = blocks.shape[:2]
    rows = None if key_index is None else key_index.contiguous().int()
    if rows is not None:
        params.key_index = rows.data_ptr()
    lse = q.new_empty((batch, heads, queries), dtype=torch.float32) if return_lse else None
    if lse is not None:
        params.lse = lse.data_ptr()

    if rotary is not None:
        params.rotary = rotary.data_ptr()
    if norm is not None:
        params.q_norm, params.k_norm, params.norm_epsilon = norm[0].data_ptr(), norm[1].data_ptr(), norm[2]
        params.norm_across_heads = int(norm_split == 0 and norm[0].dim() == 2)
    params.norm_split = norm_split

    message = ctypes.create_string_buffer(_MESSAGE_BYTES)
    size = ctypes.c_size_t()
    with torch.cuda.device(q.device):
        _raise(library.trtconvert_attention_workspace_size(params, size, message, _MESSAGE_BYTES), message)
        workspace = torch.empty(size.value, dtype=torch.uint8, device=q.device)
        params.workspace, params.workspace_size = workspace.data_ptr(), size.value
        params.stream = torch.cuda.current_stream().cuda_stream
        _raise(library.trtconvert_attention_run(params, message, _MESSAGE_BYTES), message)
    if token_split > 0:
        out = torch.cat([part[-1] for part in parts], token_axis)
    return out if lse is None else (out, lse)


_TABLES = ("timestep", "q_scale", "k_scale", "v_scale", "k_offset", "v_offset")


def _raise(status: int, message: ctypes.Array[ctypes.c_char]) -> None:
    if status != 0:
        error = ValueError if status == _INVALID_ARGUMENT else RuntimeError
        raise error(f"int8_attention: {message.value.decode(errors='replace')}")


def _sizes(x: Tensor, layout: str) -> tuple[int, int, int, int]:
    """(batch, heads, tokens, head_dim) of either layout."""
    batch, first, second, dim = x.shape
    return (batch, first, second, dim) if layout == "BHND" else (batch, second, first, dim)


def _strides(x: Tensor, layout: str) -> Strides:
    batch, first, second, _ = x.stride()
    head, token = (first, second) if layout == "BHND" else (second, first)
    return Strides(batch=batch, token=token, head=head)


def _typed_mask(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the mask in a type that the kernels read: bool, or q's type."""
    return mask if mask.dtype == torch.bool else mask.to(dtype)


def _aligned(x: Tensor) -> Tensor:
    """Returns x if its rows start at multiples of 16 bytes, as the kernels require; otherwise a copy."""
    rows_aligned = x.stride(-1) == 1 and all(stride % 8 == 0 for stride in x.stride()[:-1])
    return x if rows_aligned and x.data_ptr() % 16 == 0 else x.clone(memory_format=torch.contiguous_format)


def _table(x: Tensor) -> Tensor:
    """Returns x as contiguous FP32 that starts at a multiple of 16 bytes."""
    x = x.contiguous().float()
    return x if x.data_ptr() % 16 == 0 else x.clone()


def _check(
    q: Tensor, k: Tensor, v: Tensor, timestep: Tensor, tables: AttentionTables, options: Mapping[str, Any]
) -> None:
    """Checks everything that would cause reads outside a tensor or wrong results. Raises ValueError."""
    mask, block_mask, key_lengths, key_index = (options[x] for x in ("mask", "block_mask", "key_lengths", "key_index"))
    layout, scaling = options["layout"], options["scaling"]
    softmax_scale, timestep_max = options["softmax_scale"], options["timestep_max"]
    if softmax_scale is not None and not 0 < softmax_scale < math.inf:  # NaN fails both comparisons
        raise ValueError(
            f"softmax_scale: expected a positive finite number, got {softmax_scale}; leave it out for 1/√D"
        )
    if not 0 < timestep_max < math.inf:
        raise ValueError(
            f"timestep_max: expected the positive finite end of the schedule, got {timestep_max}; diffusers' is 1000"
        )
    if layout not in _LAYOUTS:
        raise ValueError(f"layout: expected one of {', '.join(_LAYOUTS)}, got '{layout}'")
    if scaling not in _SCALINGS:
        raise ValueError(f"scaling: expected one of {', '.join(_SCALINGS)}, got '{scaling}'")
    for name, x in (("q", q), ("k", k)):
        if x.dim() != 4:
            raise ValueError(f"{name}: expected 4 dimensions {layout}, got shape {list(x.shape)}")
    batch, heads, queries, dim = _sizes(q, layout)
    _, kv_heads, keys, _ = _sizes(k, layout)
    if kv_heads == 0 or heads % kv_heads != 0:
        raise ValueError(f"k: expected a number of heads that divides q's {heads}, got {kv_heads}")
    if tables.modes.dim() != 1 or tables.modes.shape[0] == 0:
        raise ValueError(f"modes: expected one mode per timestep bin, got shape {list(tables.modes.shape)}")
    bins = tables.modes.shape[0]
    shapes = {
        "k": (k, (batch, kv_heads, keys, dim) if layout == "BHND" else (batch, keys, kv_heads, dim)),
        "v": (v, tuple(k.shape)),
        "timestep": (timestep, (batch,)),
        "q_scale": (tables.q_scale, (bins, heads)),
        "k_scale": (tables.k_scale, (bins, kv_heads)),
        "v_scale": (tables.v_scale, (bins, kv_heads, dim)),
        "k_offset": (tables.k_offset, (bins, kv_heads, dim)),
        "v_offset": (tables.v_offset, (bins, kv_heads, dim)),
        "modes": (tables.modes, (bins,)),
    }
    if key_lengths is not None:
        shapes["key_lengths"] = (key_lengths, (batch,))
    if key_index is not None:
        if key_index.dim() != 3 or key_index.shape[2] == 0:
            raise ValueError(
                f"key_index: expected shape [{batch}, {kv_heads}, K], K at least 1, got {list(key_index.shape)}; keep "
                "at least one key of every head"
            )
        keys = key_index.shape[2]
        shapes["key_index"] = (key_index, (batch, kv_heads, keys))
    for name, (x, shape) in shapes.items():
        if tuple(x.shape) != shape:
            raise ValueError(f"{name}: expected shape {list(shape)}, got {list(x.shape)}")
    _check_masks(mask, block_mask, (batch, heads, queries, keys))
    if key_index is not None and key_index.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"key_index: expected int32, got {key_index.dtype}; convert it with .int()")
    if not q.dtype == k.dtype == v.dtype or not q.is_floating_point():
        raise ValueError(f"q, k, v: expected one floating-point type, got {q.dtype}, {k.dtype}, {v.dtype}")
    if q.is_cuda and q.dtype not in _DATA_TYPES:
        raise ValueError(f"q, k, v: expected float16 or bfloat16 on a GPU, got {q.dtype}; convert them with .half()")
    others = [x for x, _ in shapes.values()] + [x for x in (mask, block_mask) if x is not None]
    if any(x.device != q.device for x in others):
        found = ", ".join(sorted({str(x.device) for x in others}))
        raise ValueError(f"expected every tensor on q's device {q.device}, got {found}; move them with .to()")


def _check_masks(mask: Tensor | None, block_mask: Tensor | None, full: tuple[int, int, int, int]) -> None:
    if mask is not None:
        if not broadcasts(mask, full):
            raise ValueError(f"mask: expected a shape that broadcasts to {list(full)}, got {list(mask.shape)}")
        if mask.dtype != torch.bool and not mask.is_floating_point():
            raise ValueError(f"mask: expected bool or a floating-point type, got {mask.dtype}")
    if block_mask is not None:
        if not fits_blocks(block_mask, full):
            raise ValueError(
                f"block_mask: expected shape {block_shape(full)}, one entry for each {reference.BLOCK} queries and "
                f"{reference.BLOCK} keys, got {list(block_mask.shape)}"
            )
        if block_mask.dtype != torch.bool:
            raise ValueError(f"block_mask: expected bool, got {block_mask.dtype}; compare it with 0")
