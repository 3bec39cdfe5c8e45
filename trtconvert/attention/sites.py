"""Attention sites: calls of `scaled_dot_product_attention` in a model, and attention that the model writes out in several
operators (see `trtconvert.unfused`). Sites are named by the module that makes the call.

A handler decides what happens at each site: observe the call, run INT8 attention, or emit a node of an exported graph.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention

from trtconvert.data_flow import ATTENTION, UNUSED, DataFlow
from trtconvert.errors import UserError, several
from trtconvert.interception import Caller, Hooks, InterceptedDenoiser, samples_of
from trtconvert.mixed_types import as_autocast
from trtconvert.unfused import Attention, Softmax, left_softmax, unfused_attention

HEAD_DIMS = range(32, 257, 8)
"""Head sizes that the kernels take."""

MAX_BATCH = 65_535
"""Batch elements that the kernels take: CUDA's limit of thread blocks along an axis."""

_ROUNDING = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Largest relative difference between written-out attention and `scaled_dot_product_attention`, which sums in another order and
rounds scores and probabilities less."""


@dataclass(frozen=True)
class SiteCall:
    """One call at one site.

    Attributes:
        name: path of the calling module, with `#2`, `#3`, … for further calls of the same module in one forward.
        q, k, v: [B, H, Nq, D], [B, Hkv, Nk, D], [B, Hkv, Nk, D]. Heads of sizes that the kernels do not take are padded with
            zeros, which change neither the logits nor the other channels of the output.
        mask, scale, obstacle, exact, softmax, split: as in `Attention`.
        timestep: [B] FP32, for each batch element the denoiser's timestep of its sample.
        folds: number of adjacent batch elements that belong to one sample: its frames, windows or places.
    """

    name: str
    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    scale: float
    timestep: Tensor
    obstacle: str
    exact: Callable[[], Tensor]
    folds: int = 1
    softmax: Softmax | None = None
    split: bool = False


@dataclass(frozen=True)
class Site:
    """Properties of a site. `obstacle` and `folds` as in `SiteCall`; unfused: the model writes the attention out."""

    name: str
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    masked: bool
    query_tokens: int
    key_tokens: int
    obstacle: str = ""
    folds: int = 1
    unfused: bool = False


Handler = Callable[[SiteCall], Tensor]


def attention_hooks(handler: Handler) -> Hooks:
    """Returns hooks that pass calls of attention to a handler and return the handler's output."""

    def attend(caller: Caller, attention: Attention) -> Tensor:
        return own_channels(handler(_site_call(caller, attention)), attention.value)

    return {
        scaled_dot_product_attention: lambda caller, args, named: attend(caller, fused_attention(*args, **named)),
        unfused_attention: lambda caller, args, _: attend(caller, args[0].attention),
    }


def filled_up(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Pads heads with zeros to the nearest size that the kernels take; returns the inputs unchanged if none is large enough."""
    size = max(q.shape[-1], v.shape[-1])
    padded = next((dim for dim in HEAD_DIMS if dim >= size), size)
    if q.dim() != 4 or q.shape[-1] == v.shape[-1] == padded or k.shape[-1] != q.shape[-1]:
        return q, k, v
    q, k, v = (pad(x, (0, padded - x.shape[-1])) for x in (q, k, v))
    return q, k, v


def own_channels(output: Tensor, model: Tensor) -> Tensor:
    """Removes the padding of `filled_up` from an output; model: a tensor of the model's head size, such as the values."""
    own = model.shape[-1]
    return output if output.shape[-1] == own else output[..., :own]


def taken(q: Tensor, k: Tensor, v: Tensor, folds: int, scale: float) -> tuple[Tensor, Tensor, Tensor, str]:
    """Returns tensors that the kernels take, padded if needed and in the type of `torch.autocast`, and the obstacle if there is
    one.

    Args:
        folds: see `folds_of`. scale: factor of the logits.
    """
    if not 0 < scale < math.inf:  # torch takes any
        return q, k, v, f"its scores have the factor {scale:g}, positive ones are needed"
    q, k, v = (as_autocast(x) for x in (q, k, v))
    obstacle = obstacle_to(q, k, v, folds)
    if obstacle:
        filled = filled_up(q, k, v)
        if filled[0] is not q and not obstacle_to(*filled, folds):
            return *filled, ""
    return q, k, v, obstacle


def fused_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Attention:
    """Returns a call of `scaled_dot_product_attention`, by the function's arguments."""
    exact = partial(
        scaled_dot_product_attention,
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa,
    )  # fmt: skip
    softmax_scale = query.shape[-1] ** -0.5 if scale is None else scale
    obstacle = "it is causal" if is_causal else "it uses dropout" if dropout_p else ""
    return Attention(query, key, value, attn_mask, softmax_scale, obstacle, exact)


def _site_call(caller: Caller, attention: Attention) -> SiteCall:
    q, k, v, mask, scale, obstacle, exact, softmax, split = attention
    folds = 1
    if not obstacle:
        folds = folds_of(q, k, v, caller.timestep.shape[0])
        q, k, v, obstacle = taken(q, k, v, folds, scale)
    steps = of_elements(caller.timestep, folds)
    name = caller.name("attention")
    return SiteCall(name, q, k, v, mask, scale, steps, obstacle, exact, max(folds, 1), softmax, split)


def of_elements(timestep: Tensor, folds: int) -> Tensor:
    """Repeats [B] timesteps of samples for the batch elements of an attention, [B · folds]."""
    return timestep if folds <= 1 else timestep[:, None].expand(-1, folds).reshape(-1)


def folds_of(q: Tensor, k: Tensor, v: Tensor, batch: int) -> int:
    """Returns the number of batch elements per sample; 0 if the batch is no multiple of `batch`, or samples share keys."""
    elements = q.shape[0]
    if elements == batch == k.shape[0] == v.shape[0]:
        return 1
    # In an export each comparison constrains the model's sizes: compare no more than needed.
    if q.dim() != 4 or any(x.shape[0] != elements for x in (k, v)) or elements % batch:
        return 0
    return elements // batch


def obstacle_to(q: Tensor, k: Tensor, v: Tensor, folds: int) -> str:
    """Returns why tensors cannot become INT8 attention; empty if they can. folds: see `folds_of`."""
    if q.dim() != 4:
        return f"its tensors have {q.dim()} dimensions, [batch, heads, tokens, head_dim] is needed"
    if not folds:  # the timestep of each batch element is unknown
        return "its batch is not that of the timestep or a multiple of it, as frames or windows are, or its samples share keys"
    if q.shape[-1] not in HEAD_DIMS:
        return f"head_dim {q.shape[-1]} is not one of 32, 40, 48, …, 256"
    if v.shape[-1] != q.shape[-1]:
        return f"values have head_dim {v.shape[-1]}, queries {q.shape[-1]}"
    if q.shape[1] % k.shape[1]:
        return f"{k.shape[1]} key heads do not divide {q.shape[1]} query heads"
    if v.shape[1] != k.shape[1]:
        return f"values have {v.shape[1]} heads, keys {k.shape[1]}"
    # Sizes that are symbols are not compared: in an export, comparisons constrain them.
    if any(isinstance(x.shape[2], int) and x.shape[2] == 0 for x in (q, k)):
        return "it has no queries or no keys"
    return ""


def find_sites(
    denoiser: nn.Module,
    inputs: Mapping[str, Tensor],
    timestep_input: str,
    also: Hooks | None = None,
    flow: DataFlow | None = None,
) -> list[Site]:
    """Finds all attention sites of one forward, in the order of their calls.

    If samples have several batch elements in an attention, a second forward with another last sample checks that the elements of
    a sample are adjacent. With a batch of one they always are.

    Args:
        inputs: example inputs by name.
        timestep_input: name of the timestep input.
        also: hooks of other functions, for the first forward.
        flow: follows the first forward.
    Raises:
        UserError: a site has unequal numbers of keys and values.
    """
    found: dict[str, Site] = {}
    seen: dict[str, Tensor] = {}
    softmaxes: dict[str, Softmax] = {}
    left: list[Softmax] = []
    flow = flow or DataFlow()

    def handler(call: SiteCall) -> Tensor:
        output = computed(call)
        flow.name((ATTENTION, call.name), output)
        return output

    def computed(call: SiteCall) -> Tensor:
        found[call.name] = _site_of(call)
        if (call.folds > 1 or call.split) and not call.obstacle:
            seen[call.name] = _signature(call)
        if call.softmax is None:
            return call.exact()
        softmaxes[call.name] = call.softmax
        if not call.softmax.reason and not found[call.name].obstacle:
            call.softmax.reason = _difference(call, output := call.exact())
            return output
        return call.exact()

    def compare(call: SiteCall) -> Tensor:
        if call.name in seen:
            difference = (_signature(call) - seen[call.name]).abs().amax(1)
            if (difference[: -call.folds] > 1e-3 * seen[call.name].abs().max()).any():
                what = "heads" if call.split else "frames or windows"
                mixed = f"{what} of its samples do not lie side by side in its batch"
                found[call.name] = replace(found[call.name], obstacle=mixed)
        return call.exact()

    with torch.no_grad():
        note_left = {left_softmax: lambda caller, args, named: left.extend(args)}
        hooks = {**attention_hooks(handler), **note_left, **(also or {})}
        watched = InterceptedDenoiser(denoiser, inputs, timestep_input, hooks, around=lambda _: flow)
        flow.end(watched(*inputs.values()))
        for name, site in found.items():
            if (ATTENTION, name) in flow.unused:
                found[name] = replace(site, obstacle=site.obstacle or UNUSED)
        for name, softmax in softmaxes.items():
            found[name] = replace(found[name], obstacle=found[name].obstacle or softmax.obstacle)
        if seen and samples_of(inputs, timestep_input) > 1:
            others = _with_another_last_sample(inputs, timestep_input)
            InterceptedDenoiser(denoiser, inputs, timestep_input, attention_hooks(compare))(*others.values())
    return [*found.values(), *_left_sites(left, found)]


def _site_of(call: SiteCall) -> Site:
    keys, values = call.k.shape[-2], call.v.shape[-2]
    if keys != values:  # torch may read beyond the values without an error
        raise UserError(
            f"{call.name} calls attention with unequal numbers of keys and values",
            expected=f"as many values as keys, {keys}",
            got=f"{values} values",
            remedy="correct the model; its result depends on memory beside its tensors",
        )
    heads, kv_heads = (x.shape[1] if x.dim() == 4 else 1 for x in (call.q, call.k))
    return Site(
        call.name,
        heads,
        kv_heads,
        call.q.shape[-1],
        call.scale,
        call.mask is not None,
        call.q.shape[-2],
        keys,
        call.obstacle or too_many(call.q.shape[0]),
        call.folds,
        call.softmax is not None,
    )


def _left_sites(left: Sequence[Softmax], found: Collection[str]) -> Iterator[Site]:
    """Yields sites for written-out attention that could not be followed, named by the module of the softmax."""
    names = Counter(name.partition("#")[0] for name in found)
    for softmax in left:
        name = softmax.module or "denoiser"
        names[name] += 1
        *lead, queries, keys = softmax.shape
        heads = lead[-1] if len(lead) > 1 else 1
        site = name if names[name] == 1 else f"{name}#{names[name]}"
        yield Site(site, heads, heads, 1, 1.0, False, queries, keys, softmax.reason, unfused=True)


def _difference(call: SiteCall, output: Tensor) -> str:
    """Returns how written-out attention differs from INT8's call; empty if equal up to rounding of the model's type."""
    grouped = call.q.shape[1] != call.k.shape[1]
    fused = scaled_dot_product_attention(call.q, call.k, call.v, call.mask, scale=call.scale, enable_gqa=grouped)
    fused = own_channels(fused, output)
    if call.mask is not None and call.mask.dtype == torch.bool:  # rows without keys are undefined: not compared
        some = call.mask.any(-1, keepdim=True)
        fused, output = (torch.where(some, x, 0) for x in (fused, output))
    error = torch.linalg.vector_norm(fused.double() - output.double()) / torch.linalg.vector_norm(output.double())
    if error <= _ROUNDING.get(output.dtype, 0.0) or not output.any():
        return ""
    return f"it differs from softmax(q·kᵀ)·v by {error:.2g} of its norm"


def too_many(elements: int) -> str:
    """Returns the obstacle of a batch that is too large for the kernels; empty if it is not."""
    return f"its batch has {elements} elements, kernels take {MAX_BATCH}" if elements > MAX_BATCH else ""


def _signature(call: SiteCall) -> Tensor:
    """Returns [B, D + D] means of queries and keys over heads and tokens. The means identify a batch element."""
    return torch.cat([x.float().mean((1, 2)) for x in (call.q, call.k)], 1)


def _with_another_last_sample(inputs: Mapping[str, Tensor], timestep_input: str) -> dict[str, Tensor]:
    batch, others = samples_of(inputs, timestep_input), {}
    for name, x in inputs.items():
        of_samples = name != timestep_input and x.is_floating_point() and x.dim() > 0 and x.shape[0] == batch
        others[name] = torch.cat([x[:-1], 1 - x[-1:]]) if of_samples else x
    return others


def is_selected(name: str, include: Iterable[str], exclude: Iterable[str]) -> bool:
    """True if a pattern of `include`, but none of `exclude`, matches the name."""
    return any(fnmatchcase(name, p) for p in include) and not any(fnmatchcase(name, p) for p in exclude)


def unmatched_pattern(patterns: Iterable[str], names: Collection[str]) -> str | None:
    """Returns the first pattern that matches none of the names; None if all match."""
    return next((p for p in patterns if not any(fnmatchcase(name, p) for name in names)), None)


_EXCLUDED = "the recipe excludes it"


def select_sites(sites: list[Site], include: list[str], exclude: list[str]) -> tuple[list[Site], list[Site]]:
    """Splits sites into those to convert and those to leave; the latter carry the reason in `obstacle`.

    Raises:
        UserError: the model has no attention, no site is left to convert, or a pattern matches nothing.
    """
    if not sites:
        raise UserError(
            "no attention was found in the model",
            expected="calls of torch.nn.functional.scaled_dot_product_attention in its forward, or softmax(q·kᵀ)·v by matmul, "
            "bmm, baddbmm or einsum",
            got="none",
            remedy="use the model's SDPA attention (diffusers: AttnProcessor2_0), not a kernel of another library; a model "
            "without attention, such as a U-Net of convolutions, is not converted: export it to TensorRT itself",
        )
    names = [site.name for site in sites]
    if (pattern := unmatched_pattern([*include, *exclude], names)) is not None:
        raise UserError(
            f"the site pattern '{pattern}' matches no attention site",
            expected="a pattern of one of: " + ", ".join(names),
            got=f"'{pattern}'",
            remedy="correct attention.include or attention.exclude in the recipe",
        )
    chosen, left = [], []
    for site in sites:
        if not is_selected(site.name, include, exclude):
            left.append(replace(site, obstacle=_EXCLUDED))
        else:
            (left if site.obstacle else chosen).append(site)
    if not chosen:
        excluded = any(site.obstacle == _EXCLUDED for site in left)
        raise UserError(
            "no attention site can be converted",
            expected="at least one",
            got=_by_reason(left),
            remedy="change attention.include and attention.exclude in the recipe"
            if excluded
            else "compute the attention by scaled_dot_product_attention or in a form of docs/written-out.md; a model without "
            "such attention is not converted",
        )
    return chosen, left


def _by_reason(left: list[Site]) -> str:
    """Lists sites by the reason against their conversion, each reason once."""
    groups: dict[str, list[str]] = {}
    for site in left:
        groups.setdefault(site.obstacle, []).append(site.name)
    return "; ".join(f"{several(names, 3)}: {reason}" for reason, names in groups.items())
