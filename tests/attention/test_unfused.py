"""Attention that models write out: every form is found, bit-identical if left alone, and the same attention if handed over;
forms that cannot be handed over are named with the reason."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, einsum, nn
from torch.nn import functional

from trtconvert.attention.sites import Handler, Site, SiteCall, attention_hooks, find_sites
from trtconvert.interception import InterceptedDenoiser

BATCH, TOKENS, HEADS, DIM = 3, 10, 2, 32
WIDTH = HEADS * DIM

Form = Callable[[Tensor, Tensor], Tensor]
"""Tokens [B, N, HEADS · DIM], context [B, M, HEADS · DIM] → like the tokens."""


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


WEIGHTS = [random(WIDTH, WIDTH, seed=seed) * WIDTH**-0.5 for seed in (1, 2, 3)]


class Attention(nn.Module):
    def __init__(self, form: Form) -> None:
        super().__init__()
        self.form = form

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        return self.form(x, context)


class Model(nn.Module):
    """Attentions in a row."""

    def __init__(self, *forms: Form) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(map(Attention, forms))

    def forward(self, x: Tensor, timestep: Tensor, context: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x, context) * timestep.view(-1, 1, 1).to(x.dtype)
        return x


def inputs(batch: int = BATCH) -> dict[str, Tensor]:
    return {
        "x": random(batch, TOKENS, WIDTH, seed=4),
        "timestep": torch.linspace(0.25, 1, batch),
        "context": random(batch, TOKENS + 3, WIDTH, seed=5),
    }


def found(*forms: Form, batch: int = BATCH) -> list[Site]:
    return find_sites(Model(*forms), inputs(batch), "timestep")


def computed(handler: Handler, *forms: Form, dtype: torch.dtype = torch.float32) -> Tensor:
    given = {name: x if name == "timestep" else x.to(dtype) for name, x in inputs().items()}
    with torch.no_grad():
        return InterceptedDenoiser(Model(*forms), given, "timestep", attention_hooks(handler))(**given)


def fused(call: SiteCall) -> Tensor:
    """The call's attention by another implementation."""
    grouped = call.q.shape[1] != call.k.shape[1]
    return functional.scaled_dot_product_attention(
        call.q, call.k, call.v, call.mask, scale=call.scale, enable_gqa=grouped
    )


# Forms in models --------------------------------------------------------------------------------------------------------


def qkv(x: Tensor, context: Tensor) -> list[Tensor]:
    """[B, H, N, D] each."""
    return [
        (y @ weight.to(y.dtype)).unflatten(-1, (HEADS, DIM)).transpose(1, 2)
        for y, weight in zip((x, context, context), WEIGHTS, strict=True)
    ]


def tokens(heads: Tensor) -> Tensor:
    return heads.transpose(1, 2).flatten(2)


def rows(x: Tensor, context: Tensor) -> list[Tensor]:
    """[B · H, N, D] each, as diffusers' `head_to_batch_dim` makes them."""
    return [y.reshape(-1, *y.shape[2:]) for y in qkv(x, context)]


def from_rows(output: Tensor) -> Tensor:
    return tokens(output.unflatten(0, (-1, HEADS)))


def by_matmul(x: Tensor, context: Tensor) -> Tensor:
    q, k, v = qkv(x, context)
    return tokens((q @ k.transpose(-2, -1) / math.sqrt(DIM)).softmax(dim=-1) @ v)


def to_itself(x: Tensor, context: Tensor) -> Tensor:
    return by_matmul(x, x)


def with_scaled_queries(x: Tensor, context: Tensor) -> Tensor:
    q, k, v = qkv(x, context)
    return tokens(torch.matmul(torch.softmax(torch.matmul(q * DIM**-0.5, k.mT), -1), v))


def as_old_diffusers(x: Tensor, context: Tensor) -> Tensor:
    """`Attention.get_attention_scores` without a mask, and `AttnProcessor`."""
    q, k, v = rows(x, context)
    empty = torch.empty(q.shape[0], q.shape[1], k.shape[1], dtype=q.dtype)
    scores = torch.baddbmm(empty, q, k.transpose(-1, -2), beta=0, alpha=DIM**-0.5)
    return from_rows(torch.bmm(scores.softmax(dim=-1).to(q.dtype), v))


def as_old_diffusers_with_a_mask(x: Tensor, context: Tensor) -> Tensor:
    q, k, v = rows(x, context)
    mask = (torch.arange(k.shape[1]) > 8).to(q.dtype)[None, None] * -10000.0
    mask = mask.expand(BATCH, -1, -1).repeat_interleave(HEADS, dim=0).expand(-1, q.shape[1], -1)
    scores = torch.baddbmm(mask, q, k.transpose(-1, -2), beta=1, alpha=DIM**-0.5)
    return from_rows(torch.bmm(scores.softmax(dim=-1), v))


def as_guided_diffusion(x: Tensor, context: Tensor) -> Tensor:
    """`QKVAttentionLegacy`: channels before tokens, samples and heads on one axis, softmax in FP32."""
    qkv_of_all = torch.cat([x @ weight.to(x.dtype) for weight in WEIGHTS], -1).transpose(1, 2)  # [B, 3 · H · D, N]
    samples, width, length = qkv_of_all.shape
    channels = width // (3 * HEADS)
    q, k, v = qkv_of_all.reshape(samples * HEADS, channels * 3, length).split(channels, dim=1)
    scale = 1 / math.sqrt(math.sqrt(channels))
    weight = torch.einsum("bct,bcs->bts", q * scale, k * scale)
    weight = torch.softmax(weight.float(), dim=-1).type(weight.dtype)
    a = torch.einsum("bts,bcs->bct", weight, v)
    return a.reshape(samples, -1, length).transpose(1, 2)


def as_latent_diffusion(x: Tensor, context: Tensor) -> Tensor:
    """`AttnBlock` of its autoencoder: one head, values before probabilities."""
    q, k, v = (y[:, 0] for y in qkv(x, context))
    v = v.permute(0, 2, 1)
    weight = torch.bmm(q, k.permute(0, 2, 1)) * (int(DIM) ** (-0.5))
    weight = functional.softmax(weight, dim=2).permute(0, 2, 1)
    return torch.cat([torch.bmm(v, weight).transpose(1, 2)] * HEADS, -1)


def as_cross_attention(x: Tensor, context: Tensor) -> Tensor:
    """CompVis' `CrossAttention`: einsum of rows, in place masks."""
    q, k, v = rows(x, context)
    scores = einsum("b i d, b j d -> b i j", q, k) * DIM**-0.5
    mask = (torch.arange(k.shape[1]) < 9).expand(BATCH, -1).repeat_interleave(HEADS, 0)[:, None]
    scores.masked_fill_(~mask, -torch.finfo(scores.dtype).max)
    return from_rows(einsum("b i j, b j d -> b i d", scores.softmax(dim=-1), v))


def as_lucidrains(x: Tensor, context: Tensor) -> Tensor:
    """A bias of positions, a triangular mask, the largest score subtracted, dropout in evaluation mode."""
    q, k, v = qkv(x, context)
    scores = einsum("b h i d, b h j d -> b h i j", q * DIM**-0.5, k)
    scores = scores + random(HEADS, q.shape[2], k.shape[2], seed=7).to(q.dtype)
    later = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(k.shape[2] - q.shape[2] + 1)
    scores = scores.masked_fill(later, -torch.finfo(scores.dtype).max)
    scores = scores - scores.amax(dim=-1, keepdim=True).detach()
    weights = scores.softmax(dim=-1, dtype=torch.float32).to(scores.dtype)
    weights = functional.dropout(weights, 0.1, training=False)
    return tokens(einsum("b h i j, b h j d -> b h i d", weights, v))


def with_shared_keys_of_heads(x: Tensor, context: Tensor) -> Tensor:
    """Multi-query attention."""
    q, k, v = qkv(x, context)
    scores = einsum("b h i d, b j d -> b h i j", q, k[:, 0]) * DIM**-0.5
    return tokens(einsum("b h i j, b j d -> b h i d", scores.softmax(-1), v[:, 0]))


def with_broadcast_keys(x: Tensor, context: Tensor) -> Tensor:
    q, k, v = qkv(x, context)
    return tokens((q @ k[:, :1].mT * DIM**-0.5).softmax(-1) @ v[:, :1])


def with_grouped_keys(x: Tensor, context: Tensor) -> Tensor:
    """Two key heads for two groups of two query heads."""
    q, k, v = qkv(x, context)
    q = torch.stack([q, q.flip(2)], 1)
    scores = einsum("b g h i d, b h j d -> b g h i j", q, k) * DIM**-0.5
    return tokens(einsum("b g h i j, b h j d -> b g h i d", scores.softmax(-1), v)[:, 1])


def with_tokens_before_heads(x: Tensor, context: Tensor) -> Tensor:
    q, k, v = (y.transpose(1, 2) for y in qkv(x, context))
    scores = torch.einsum("bqhc,bkhc->bhqk", q, k).div(math.sqrt(DIM))
    return torch.einsum("bhqk,bkhc->bqhc", scores.softmax(dim=-1), v).flatten(2)


def with_channels_before_tokens(x: Tensor, context: Tensor) -> Tensor:
    """Softmax over the axis before the last."""
    q, k, v = (y.transpose(2, 3) for y in qkv(x, context))
    scores = einsum("b h d j, b h d i -> b h j i", k, q * DIM**-0.5)
    return tokens(einsum("b h d j, b h j i -> b h i d", v, scores.softmax(dim=-2)))


def with_learned_temperatures(x: Tensor, context: Tensor) -> Tensor:
    """Cosines times a factor per head."""
    q, k, v = qkv(x, context)
    q, k = (functional.normalize(y, dim=-1) for y in (q, k))
    scores = (q @ k.mT) * torch.tensor([4.0, 9.0]).view(1, HEADS, 1, 1).to(q.dtype)
    return tokens(scores.softmax(-1) @ v)


def with_masks_of_samples(x: Tensor, context: Tensor) -> Tensor:
    q, k, v = qkv(x, context)
    kept = torch.arange(k.shape[2])[None] < torch.arange(8, 8 + len(x))[:, None]
    scores = torch.where(kept[:, None, None], q @ k.mT, float("-inf")) * DIM**-0.5
    scores += (1.0 - kept[:, None, None].to(q.dtype)) * -10000.0
    return tokens(scores.softmax(-1) @ v)


def in_groups_of_tokens(x: Tensor, context: Tensor) -> Tensor:
    """Tensors of five axes, as in attention over video frames."""
    q, k, v = (y.unflatten(2, (2, -1)).transpose(1, 2) for y in qkv(x, x))
    scores = einsum("... h i d, ... h j d -> ... h i j", q, k) * DIM**-0.5
    output = einsum("... h i j, ... h j d -> ... h i d", scores.softmax(-1), v)
    return tokens(output.transpose(1, 2).flatten(2, 3))


def with_named_arguments(x: Tensor, context: Tensor) -> Tensor:
    q, k, v = rows(x, context)
    scores = torch.mul(torch.bmm(input=q, mat2=k.transpose(dim0=1, dim1=2)), other=DIM**-0.5)
    bias = random(q.shape[1], k.shape[1], seed=7).to(q.dtype)
    scores = torch.add(input=bias, other=scores, alpha=0.5).sub(bias, alpha=2)
    return from_rows(torch.bmm(torch.softmax(input=scores, dim=-1), mat2=v))


def with_exponentials(x: Tensor, context: Tensor) -> Tensor:
    q, k, v = qkv(x, context)
    scores = q @ k.mT * DIM**-0.5
    weights = (scores - scores.max(dim=-1, keepdim=True).values).exp()
    return tokens(weights / weights.sum(dim=-1, keepdim=True) @ v)


def with_positions(x: Tensor, context: Tensor) -> Tensor:
    """Scores of a table of relative positions are a mask, not a second product."""
    q, k, v = qkv(x, context)
    table = random(TOKENS, k.shape[2], DIM, seed=7).to(q.dtype)
    scores = einsum("b h i d, i j d -> b h i j", q, table) + q @ k.mT
    return tokens((scores * DIM**-0.5).softmax(-1) @ v)


def with_zeros_for_rows_without_keys(x: Tensor, context: Tensor) -> Tensor:
    q, k, v = qkv(x, context)
    scores = (q @ k.mT * DIM**-0.5).masked_fill(torch.arange(k.shape[2]) > 8, float("-inf"))
    weights = scores.softmax(-1)
    return tokens(torch.where(weights.isnan(), 0.0, weights) @ v)


FORMS = (
    by_matmul,
    to_itself,
    with_scaled_queries,
    as_old_diffusers,
    as_old_diffusers_with_a_mask,
    as_guided_diffusion,
    as_latent_diffusion,
    as_cross_attention,
    as_lucidrains,
    with_shared_keys_of_heads,
    with_broadcast_keys,
    with_grouped_keys,
    with_tokens_before_heads,
    with_channels_before_tokens,
    with_learned_temperatures,
    with_masks_of_samples,
    in_groups_of_tokens,
    with_named_arguments,
    with_exponentials,
    with_positions,
    with_zeros_for_rows_without_keys,
)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_every_form_is_a_site_with_the_same_attention(form: Form) -> None:
    (site,) = found(form)
    assert not site.obstacle and site.name == "blocks.0" and site.unfused
    one_head = form is as_latent_diffusion
    assert site.heads == (4 if form is with_grouped_keys else 1 if one_head else HEADS) and site.head_dim == DIM
    exact = Model(form)(**inputs())
    assert torch.equal(computed(lambda call: call.exact(), form), exact)
    torch.testing.assert_close(computed(fused, form), exact, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(computed(lambda call: torch.zeros_like(call.exact()), form), exact)


@pytest.mark.parametrize("form", [as_guided_diffusion, as_lucidrains, as_old_diffusers], ids=lambda form: form.__name__)
def test_a_softmax_in_fp32_of_a_model_in_16_bits_is_the_same_attention(form: Form) -> None:
    given = {name: x if name == "timestep" else x.half() for name, x in inputs().items()}
    (site,) = find_sites(Model(form), given, "timestep")
    assert not site.obstacle

    def half(call: SiteCall) -> Tensor:
        assert {x.dtype for x in (call.q, call.k, call.v)} == {torch.float16}
        return fused(call)

    exact = computed(lambda call: call.exact(), form, dtype=torch.float16)
    torch.testing.assert_close(computed(half, form, dtype=torch.float16), exact, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    ("form", "kv_heads"), [(with_shared_keys_of_heads, 1), (with_broadcast_keys, 1), (with_grouped_keys, 2)]
)
def test_heads_that_share_keys_stay_so(form: Form, kv_heads: int) -> None:
    assert found(form)[0].kv_heads == kv_heads


def test_frames_on_an_axis_of_their_own_belong_to_their_samples() -> None:
    (site,) = found(in_groups_of_tokens)
    assert (site.folds, site.heads, site.query_tokens) == (2, HEADS, TOKENS // 2)


def test_frames_and_heads_that_share_an_axis_are_told_apart_by_how_they_came_there() -> None:
    def framed(x: Tensor, context: Tensor) -> Tensor:
        parts = [y.unflatten(2, (2, -1)).transpose(1, 2).flatten(0, 1) for y in qkv(x, x)]  # [B · 2, H, N / 2, D]
        q, k, v = (y.reshape(-1, *y.shape[2:]) for y in parts)
        output = torch.bmm((torch.bmm(q, k.mT) * DIM**-0.5).softmax(-1), v)
        return tokens(output.unflatten(0, (-1, 2, HEADS)).transpose(1, 2).flatten(2, 3))

    (site,) = found(framed)
    assert (site.obstacle, site.folds, site.heads) == ("", 2, HEADS)


def test_sites_of_both_kinds_are_counted_together() -> None:
    def twice(x: Tensor, context: Tensor) -> Tensor:
        q, k, v = qkv(x, context)
        return by_matmul(x, context) + tokens(functional.scaled_dot_product_attention(q, k, v))

    sites = found(twice, by_matmul)
    assert [(site.name, site.unfused) for site in sites] == [
        ("blocks.0", True),
        ("blocks.0#2", False),
        ("blocks.1", True),
    ]


# Attention that is left -----------------------------------------------------------------------------------------------


def over_heads(x: Tensor, context: Tensor) -> Tensor:
    q, k, v = qkv(x, context)
    return tokens((q @ k.mT).softmax(1) @ v)


def over_queries(x: Tensor, context: Tensor) -> Tensor:
    q, k, v = qkv(x, context)
    return tokens((q @ k.mT).softmax(-2) @ v)


def read_besides(x: Tensor, context: Tensor) -> Tensor:
    q, k, v = qkv(x, context)
    weights = (q @ k.mT).softmax(-1)
    return tokens(weights @ v) * weights.amax((1, 2, 3), keepdim=True)[:, 0]


def with_talking_heads(x: Tensor, context: Tensor) -> Tensor:
    q, k, v = qkv(x, context)
    weights = (q @ k.mT).softmax(-1)
    return tokens(functional.conv2d(weights, torch.eye(HEADS)[:, :, None, None] + 0.1) @ v)


def with_another_function(x: Tensor, context: Tensor) -> Tensor:
    q, k, v = qkv(x, context)
    return tokens((q @ k.mT).tanh().softmax(-1) @ v)


def with_reshaped_scores(x: Tensor, context: Tensor) -> Tensor:
    q, k, v = rows(x, context)
    scores = torch.bmm(q, k.mT).view(BATCH, HEADS, TOKENS, -1) + 1
    return from_rows(torch.bmm(scores.view(BATCH * HEADS, TOKENS, -1).softmax(-1), v))


def with_some_probabilities(x: Tensor, context: Tensor) -> Tensor:
    q, k, v = qkv(x, context)
    return tokens((q @ k.mT).softmax(-1)[..., 1:] @ v[:, :, 1:])


def linear(x: Tensor, context: Tensor) -> Tensor:
    """Attention of linear cost with softmaxes over queries and keys."""
    q, k, v = qkv(x, context)
    return tokens(einsum("b h n d, b h d e -> b h n e", q, einsum("b h m d, b h m e -> b h d e", k.softmax(-2), v)))


def with_a_soft_mask(x: Tensor, context: Tensor) -> Tensor:
    q, k, v = qkv(x, context)
    return tokens((q @ k.mT).masked_fill(torch.ones(k.shape[2], dtype=torch.bool), -1.0).softmax(-1) @ v)


def of_two_products(x: Tensor, context: Tensor) -> Tensor:
    q, k, v = qkv(x, context)
    return tokens((q @ k.mT + q.flip(-1) @ k.mT).softmax(-1) @ v)


def with_dropout(x: Tensor, context: Tensor) -> Tensor:
    q, k, v = qkv(x, context)
    return tokens(functional.dropout((q @ k.mT).softmax(-1), 0.5, training=True) @ v)


def with_late_sums(x: Tensor, context: Tensor) -> Tensor:
    q, k, v = qkv(x, context)
    weights = (q @ k.mT * DIM**-0.5).exp()
    return tokens((weights @ v) / weights.sum(-1, keepdim=True))


def never_multiplied(x: Tensor, context: Tensor) -> Tensor:
    q, k, _ = qkv(x, context)
    return x * (q @ k.mT).softmax(-1).argmax(-1).sum()


def with_heads_first(x: Tensor, context: Tensor) -> Tensor:
    """Rows of the first head of all samples, then those of the second, …"""
    q, k, v = (torch.cat(y.unbind(1)) for y in qkv(x, context))
    return tokens((q @ k.mT).softmax(-1).bmm(v).unflatten(0, (HEADS, -1)).transpose(0, 1))


def with_heads_before_samples(x: Tensor, context: Tensor) -> Tensor:
    q, k, v = (y.transpose(0, 1) for y in qkv(x, context))
    return tokens(((q @ k.mT).softmax(-1) @ v).transpose(0, 1))


def of_one_memory(x: Tensor, context: Tensor) -> Tensor:
    """Keys and values that all samples share."""
    q, _, _ = qkv(x, context)
    k, v = random(1, HEADS, 4, DIM, seed=8), random(1, HEADS, 4, DIM, seed=9)
    return tokens((q @ k.mT).softmax(-1) @ v)


_OF_SAMPLES = (
    "its batch is not that of the timestep or a multiple of it, as frames or windows are, or its samples share keys"
)

LEFT = {
    over_heads: "its softmax is over samples or heads, not over keys",
    over_queries: "the product after its softmax does not sum over the axis of the softmax",
    read_besides: "its scores or probabilities are also read by amax",
    with_talking_heads: "conv2d stands between its softmax and the product with values",
    with_another_function: "tanh stands between its product of queries and keys and its softmax",
    with_reshaped_scores: "view stands between its product of queries and keys and its softmax",
    with_some_probabilities: "__getitem__ stands between its softmax and the product with values",
    linear: "no product of queries and keys of one sample comes before its softmax, as in linear attention",
    with_a_soft_mask: "its mask puts -1 in the place of scores, which is no large negative number",
    of_two_products: "its scores are made of two products",
    with_dropout: "it uses dropout",
    with_late_sums: "its exponentials are not divided by their sums before the product with values",
    never_multiplied: "no product with values follows its softmax, but argmax",
    with_heads_first: "heads of its samples do not lie side by side in its batch",
    with_heads_before_samples: _OF_SAMPLES,
    of_one_memory: _OF_SAMPLES,
}


@pytest.mark.parametrize(("form", "reason"), LEFT.items(), ids=lambda x: getattr(x, "__name__", ""))
def test_unsupported_attention_is_named_and_left(form: Form, reason: str) -> None:
    first, site = found(by_matmul, form)
    assert (first.name, first.obstacle) == ("blocks.0", "")
    assert (site.name, site.obstacle) == ("blocks.1", reason)
    torch.manual_seed(0)
    exact = Model(form)(**inputs())
    torch.manual_seed(0)
    assert torch.equal(computed(lambda call: call.exact(), form), exact)


def test_models_with_a_soft_choice_that_is_no_attention_have_no_site_for_it() -> None:
    assert not found(lambda x, context: x * x.softmax(-1))


def test_later_writes_to_scores_are_seen() -> None:
    def written_to(x: Tensor, context: Tensor) -> Tensor:
        q, k, v = qkv(x, context)
        scores = q @ k.mT
        scores[:, :, :, 0] = 3.0
        return tokens(scores.softmax(-1) @ v)

    (site,) = found(written_to)
    assert site.obstacle == "__setitem__ stands between its product of queries and keys and its softmax"


@pytest.mark.parametrize("what", ["q", "k", "mask"])
def test_later_writes_to_what_scores_were_made_of_are_seen(what: str) -> None:
    def written_to(x: Tensor, context: Tensor) -> Tensor:
        q, k, v = (y.clone() for y in qkv(x, context))
        mask = torch.linspace(-1, 1, k.shape[2]).expand(q.shape[2], -1).clone()
        probabilities = (q @ k.mT + mask).softmax(-1)
        {"q": q, "k": k, "mask": mask}[what][..., 0] *= 3
        return tokens(probabilities @ v)

    (site,) = found(written_to)
    assert site.obstacle == "the model writes into its queries, keys or mask before the product with values"


def test_probabilities_that_are_kept_elsewhere_are_not_written_to() -> None:
    def keeping(x: Tensor, context: Tensor) -> Tensor:
        q, k, v = qkv(x, context)
        weights = (q @ k.mT).softmax(-1)
        store = torch.zeros(2, *weights.shape)
        store[0] = weights
        return tokens(weights @ v)

    (site,) = found(keeping)
    assert site.obstacle == "its scores or probabilities are also read by __setitem__"


def test_forward_keeps_no_memory() -> None:
    """Scores are freed when the model frees them."""
    alive = []

    def form(x: Tensor, context: Tensor) -> Tensor:
        q, k, v = qkv(x, context)
        scores = q @ k.mT
        alive.append(torch.utils.weak.TensorWeakRef(scores))
        weights = scores.softmax(-1)
        del scores
        assert alive[0]() is None
        return tokens(weights @ v)

    computed(lambda call: call.exact(), form)
