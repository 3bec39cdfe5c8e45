"""Sites: properties and names of a model's attention, and refusals."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from trtconvert.attention.sites import Handler, attention_hooks, filled_up, find_sites, select_sites
from trtconvert.data_flow import DataFlow
from trtconvert.errors import UserError
from trtconvert.interception import InterceptedDenoiser
from trtconvert.linear.sites import LayerFinder, layer_hooks


class Attention(nn.Module):
    def __init__(self, dim=32, calls=1, **options):
        super().__init__()
        self.dim, self.calls, self.options = dim, calls, options

    def forward(self, x):
        heads = x.view(x.shape[0], -1, 2, self.dim).transpose(1, 2)
        for _ in range(self.calls):
            heads = scaled_dot_product_attention(heads, heads, heads, **self.options)
        return heads.transpose(1, 2).reshape(x.shape)


class Wide(nn.Module):
    """Heads of a size that the kernels do not take."""

    def forward(self, x):
        heads = x[..., :1].expand(*x.shape[:2], 264)[:, None]
        return scaled_dot_product_attention(heads, heads, heads)[:, 0, :, : x.shape[-1]]


class Model(nn.Module):
    def __init__(self, *attentions):
        super().__init__()
        self.blocks = nn.ModuleList(attentions)

    def forward(self, x, timestep):
        for block in self.blocks:
            x = x + block(x) * timestep.view(-1, 1, 1)
        return (x,)


INPUTS = {"x": torch.randn(2, 6, 64, generator=torch.Generator().manual_seed(0)), "timestep": torch.tensor([0.25, 0.5])}


def intercept(model: nn.Module, handler: Handler) -> InterceptedDenoiser:
    return InterceptedDenoiser(model, INPUTS, "timestep", attention_hooks(handler))


def test_sites_are_named_by_module_and_call():
    sites = find_sites(Model(Attention(), Attention(calls=2)), INPUTS, "timestep")
    assert [site.name for site in sites] == ["blocks.0", "blocks.1", "blocks.1#2"]
    assert [(s.heads, s.head_dim, s.query_tokens, s.scale) for s in sites] == [(2, 32, 6, 32**-0.5)] * 3


class Branches(nn.Module):
    """Computes attention whose results are used after operators in place, by a view, by their shape alone, and not at all."""

    def __init__(self):
        super().__init__()
        names = ("written", "viewed", "measured", "left", "read_by_left")
        self.of = nn.ModuleDict({name: Attention() for name in names})
        self.linear = nn.ModuleDict({name: nn.Linear(64, 64) for name in ("used", "left")})

    def forward(self, x, timestep):
        kept = torch.zeros_like(x)
        kept[:, 2:] += self.of["written"](x)[:, 2:]
        result = self.linear["used"](x) + kept.flatten().view_as(x)
        result[:, :1].copy_(self.of["viewed"](x).transpose(0, 1)[:1].transpose(0, 1))
        self.linear["left"](self.of["left"](x + self.of["read_by_left"](x)))
        return result * timestep.view(-1, 1, 1) * self.of["measured"](x).shape[1]


def test_calls_without_effect_on_the_prediction_are_left():
    model, flow = Branches(), DataFlow()
    finder = LayerFinder(model, flow=flow)
    find_sites(model, INPUTS, "timestep", layer_hooks(finder), flow)
    sites = find_sites(model, INPUTS, "timestep", layer_hooks(finder), flow)  # names the same calls
    chosen, left = select_sites(sites, ["*"], [])
    assert [site.name for site in chosen] == ["of.written", "of.viewed"]
    assert {site.name: site.obstacle for site in left} == {
        f"of.{name}": "the prediction does not depend on its result" for name in ("left", "read_by_left", "measured")
    }
    assert {layer.name: bool(layer.obstacle) for layer in finder.layers()} == {
        "linear.used": False,
        "linear.left": True,
    }


class Readers(nn.Module):
    """Layers that read results of attention: moved, split, joined with others, added to others, scaled in place."""

    def __init__(self):
        super().__init__()
        self.attention = Attention()
        self.linear = nn.ModuleDict(
            {name: nn.Linear(64, 64) for name in ("moved", "split", "added", "scaled", "other")}
        )
        self.linear["joined"] = nn.Linear(128, 64)

    def forward(self, x, timestep):
        found = self.attention(x)
        read = {
            "moved": found,
            "split": found[:, 2:],
            "added": x + found,
            "joined": torch.cat([found, x], -1),
            "other": x,
        }
        results = [self.linear[name](value).mean(1) for name, value in read.items()]
        return sum(results) * timestep.view(-1, 1) + self.linear["scaled"](found.mul_(2)).mean(1)


def test_layers_know_that_they_read_what_attention_computed():
    model, flow = Readers(), DataFlow()
    finder = LayerFinder(model, flow=flow)
    find_sites(model, INPUTS, "timestep", layer_hooks(finder), flow)
    behind = {layer.name.removeprefix("linear."): layer.behind_attention for layer in finder.layers()}
    assert behind == {"moved": True, "split": True, "joined": True, "added": False, "scaled": False, "other": False}


def test_names_do_not_drift_over_forwards():
    model = Model(Attention(calls=2))
    names = []
    denoiser = InterceptedDenoiser(
        model, INPUTS, "timestep", attention_hooks(lambda call: (names.append(call.name), call.exact())[1])
    )
    for _ in range(2):
        denoiser(**INPUTS)
    assert names == ["blocks.0", "blocks.0#2"] * 2


def test_the_handlers_result_takes_the_place_of_the_call():
    model = Model(Attention())
    doubled = intercept(model, lambda call: 2 * call.exact())(**INPUTS)
    plain = model(**INPUTS)[0]
    torch.testing.assert_close(doubled - INPUTS["x"], 2 * (plain - INPUTS["x"]))


def test_a_scalar_timestep_reaches_every_element():
    seen = []

    class Scalar(Model):
        def forward(self, x, timestep):
            return self.blocks[0](x)

    inputs = INPUTS | {"timestep": torch.tensor(7)}
    InterceptedDenoiser(
        Scalar(Attention()), inputs, "timestep", attention_hooks(lambda c: (seen.append(c.timestep), c.exact())[1])
    )(**inputs)
    assert seen[0].tolist() == [7.0, 7.0]


def test_a_failure_leaves_the_model_and_the_names_as_they_were():
    def fail(call):
        raise RuntimeError("in the handler")

    model = Model(Attention())
    failing = intercept(model, fail)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="in the handler"):
            failing(**INPUTS)
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
    assert [site.name for site in find_sites(model, INPUTS, "timestep")] == ["blocks.0"]


def test_attention_after_a_child_belongs_to_the_parent():
    class Parent(Attention):
        def __init__(self):
            super().__init__()
            self.child = Attention()

        def forward(self, x):
            try:
                self.child(x[:, :, :10])  # not a multiple of the heads' size
            except RuntimeError:
                x = self.child(x)
            return super().forward(x)

    sites = find_sites(Model(Parent()), INPUTS, "timestep")
    assert [site.name for site in sites] == ["blocks.0.child", "blocks.0"]


def test_forwards_of_one_model_run_side_by_side():
    together = threading.Barrier(2, timeout=10)
    model = Model(Attention(), Attention())
    names = {0: [], 1: []}

    def forward(number):
        def handler(call):
            together.wait()  # both are inside the model at every site
            names[number].append(call.name)
            return call.exact()

        intercept(model, handler)(**INPUTS)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(forward, names))
    assert names == {0: ["blocks.0", "blocks.1"], 1: ["blocks.0", "blocks.1"]}


@pytest.mark.parametrize(
    ("attention", "reason"),
    [
        (Wide(), "head_dim 264"),
        (Attention(is_causal=True), "causal"),
        (Attention(dropout_p=0.5), "dropout"),
        (Attention(scale=0.0), "have the factor 0"),
        (Attention(scale=-0.5), "have the factor -0.5"),
    ],
)
def test_sites_that_kernels_do_not_support_stay_with_a_reason(attention, reason):
    chosen, left = select_sites(find_sites(Model(Attention(), attention), INPUTS, "timestep"), ["*"], [])
    assert [site.name for site in chosen] == ["blocks.0"]
    assert reason in left[0].obstacle


class Chosen(nn.Module):
    """Attention of the queries, keys and values that a function makes of heads [B, 2, N, 32]."""

    def __init__(self, choose):
        super().__init__()
        self.choose = choose

    def forward(self, x):
        heads = x.view(x.shape[0], -1, 2, 32).transpose(1, 2)
        attended = scaled_dot_product_attention(*self.choose(heads))
        return x + attended.sum((1, 2)).repeat(1, 2)[:, None]


@pytest.mark.parametrize(
    ("choose", "reason"),
    [
        (lambda x: (x, x, x[:, :1]), "values have 1 heads, keys 2"),
        (lambda x: (x, x[:, :1], x), "values have 2 heads, keys 1"),
        (lambda x: (x, x[:, :, :0], x[:, :, :0]), "it has no queries or no keys"),
        (lambda x: (x[:, :, :0], x, x), "it has no queries or no keys"),
    ],
)
def test_tensors_that_torch_broadcasts_or_finds_empty_stay(choose, reason):
    (site,) = find_sites(Model(Chosen(choose)), INPUTS, "timestep")
    assert site.obstacle == reason


class Windows(nn.Module):
    def forward(self, x):
        windows = x.view(2 * x.shape[0], -1, 2, 32).transpose(1, 2)
        return scaled_dot_product_attention(windows, windows, windows).transpose(1, 2).reshape(x.shape)


class SharedKeys(nn.Module):
    def forward(self, x):
        heads = x.view(x.shape[0], -1, 2, 32).transpose(1, 2)
        return scaled_dot_product_attention(heads, heads[:1], heads[:1]).transpose(1, 2).reshape(x.shape)


class SomeOfEach(nn.Module):
    """Three batch elements for two samples."""

    def forward(self, x):
        heads = x.reshape(3, -1, 2, 32).transpose(1, 2)
        return scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).reshape(x.shape)


class FramesFirst(nn.Module):
    def forward(self, x):
        frames = x.unflatten(1, (2, -1)).transpose(0, 1)
        heads = frames.flatten(0, 1).unflatten(2, (2, 32)).transpose(1, 2)
        out = scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).flatten(2)
        return out.unflatten(0, (2, -1)).transpose(0, 1).flatten(1, 2)


@pytest.mark.parametrize(
    ("attention", "reason"),
    [
        (SharedKeys(), "not that of the timestep"),
        (SomeOfEach(), "not that of the timestep"),
        (FramesFirst(), "do not lie side by side"),
    ],
)
def test_a_site_whose_elements_belong_to_no_one_sample_is_left(attention, reason):
    _, left = select_sites(find_sites(Model(Attention(), attention), INPUTS, "timestep"), ["*"], [])
    assert [site.name for site in left] == ["blocks.1"] and reason in left[0].obstacle


def test_windows_take_the_timestep_of_their_sample():
    model, seen = Model(Attention(), Windows()), []
    chosen, left = select_sites(find_sites(model, INPUTS, "timestep"), ["*"], [])
    assert [(site.name, site.folds, site.query_tokens) for site in chosen] == [("blocks.0", 1, 6), ("blocks.1", 2, 3)]
    assert not left
    InterceptedDenoiser(
        model, INPUTS, "timestep", attention_hooks(lambda c: (seen.append((c.timestep, c.folds)), c.exact())[1])
    )(**INPUTS)
    assert [(timestep.tolist(), folds) for timestep, folds in seen] == [([0.25, 0.5], 1), ([0.25, 0.25, 0.5, 0.5], 2)]


def test_more_places_than_kernels_take_are_left():
    class Places(nn.Module):
        def forward(self, x):
            heads = x.reshape(-1, 1, 2, 32).transpose(1, 2)
            return scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).reshape(x.shape)

    inputs = {"x": torch.randn(1, 2**16, 64), "timestep": torch.tensor([0.25])}
    assert "65536 elements" in find_sites(Model(Places()), inputs, "timestep")[0].obstacle


def test_frames_of_one_sample_lie_side_by_side_whatever_the_model_does():
    one = {name: x[:1] for name, x in INPUTS.items()}
    assert [site.obstacle for site in find_sites(Model(FramesFirst()), one, "timestep")] == [""]


class MoreKeysThanValues(nn.Module):
    def forward(self, x):
        heads = x.view(x.shape[0], -1, 2, 32).transpose(1, 2)
        return scaled_dot_product_attention(heads, heads, heads[:, :, :4]).transpose(1, 2).reshape(x.shape)


def test_unequal_numbers_of_keys_and_values_are_the_models_error():
    with pytest.raises(UserError, match=r"blocks\.1 calls attention with unequal numbers of keys and values") as caught:
        find_sites(Model(Attention(), MoreKeysThanValues()), INPUTS, "timestep")
    assert "6" in str(caught.value) and "4 values" in str(caught.value)


def test_patterns_choose():
    sites = find_sites(Model(Attention(), Attention(), Attention()), INPUTS, "timestep")
    chosen, left = select_sites(sites, ["blocks.*"], ["*.1"])
    assert [site.name for site in chosen] == ["blocks.0", "blocks.2"]
    assert [(site.name, site.obstacle) for site in left] == [("blocks.1", "the recipe excludes it")]


@pytest.mark.parametrize(
    ("model", "include", "exclude", "message"),
    [
        (Model(), ["*"], [], "no attention was found"),
        (Model(Attention()), ["mid.*"], [], "'mid.*' matches no attention site"),
        (Model(Attention()), ["*"], ["*"], "no attention site can be converted"),
    ],
)
def test_nothing_to_convert_is_an_error_that_lists_the_modules(model, include, exclude, message):
    with pytest.raises(UserError, match=message.replace("*", r"\*")) as raised:
        select_sites(find_sites(model, INPUTS, "timestep"), include, exclude)
    assert raised.value.expected and raised.value.remedy


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("need_weights", [False, True])
def test_torchs_multi_head_attention_is_a_site(need_weights, training):
    class Weighted(nn.Module):
        def __init__(self):
            super().__init__()
            self.attn = nn.MultiheadAttention(64, 2, batch_first=True)

        def forward(self, x, timestep):
            return x + self.attn(x, x, x, need_weights=need_weights)[0]

    (site,) = find_sites(Weighted().train(training), INPUTS, "timestep")
    assert (site.name, site.heads, site.head_dim, site.query_tokens, site.key_tokens) == ("attn", 2, 32, 6, 6)
    assert not site.obstacle


@pytest.mark.parametrize(("dim", "taken"), [(4, 32), (31, 32), (33, 40), (72, 72), (100, 104), (250, 256)])
def test_heads_of_other_sizes_are_filled_up(dim, taken):
    """Padded with zeros: the handler computes padded heads, and the model receives its own result."""
    inputs = INPUTS | {"x": torch.randn(2, 6, 2 * dim, generator=torch.Generator().manual_seed(0))}
    (site,) = find_sites(Model(Attention(dim=dim)), inputs, "timestep")
    assert not site.obstacle and (site.head_dim, site.scale) == (taken, dim**-0.5)

    def whole(call):
        assert call.q.shape[-1] == call.k.shape[-1] == call.v.shape[-1] == taken
        return torch.nn.functional.scaled_dot_product_attention(call.q, call.k, call.v, call.mask, scale=call.scale)

    model = Model(Attention(dim=dim))
    given = InterceptedDenoiser(model, inputs, "timestep", attention_hooks(whole))(*inputs.values())
    torch.testing.assert_close(given, model(**inputs)[0])


def test_values_of_another_size_are_filled_up_too():
    q, k, v = torch.randn(2, 2, 6, 48), torch.randn(2, 2, 6, 48), torch.randn(2, 2, 6, 20)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    wide = filled_up(q, k, v)
    assert {x.shape[-1] for x in wide} == {48}
    torch.testing.assert_close(sdpa(*wide, scale=48**-0.5)[..., :20], sdpa(q, k, v))
