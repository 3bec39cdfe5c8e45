"""Discovery of layers in models, their properties, the selection, and refusals."""

import dataclasses
import json

import pytest
import torch
from pydantic import TypeAdapter
from tiny_layers import CHOSEN, LEFT, Called, Layered, given, layers_of, random
from torch import nn
from torch.nn import functional as F

from trtconvert.errors import UserError
from trtconvert.interception import InterceptedDenoiser, Interception
from trtconvert.linear.sites import (
    Layer,
    LayerFinder,
    flops,
    layer_hooks,
    model_tensors,
    select_layers,
    with_input_groups_among,
)

TOKENS, IMAGES = random(2, 6, 64), random(2, 32, 8, 8)


def weight(*shape):
    return nn.Parameter(random(*shape, seed=1))


# Calls that are layers ------------------------------------------------------------------------------------------------

LINEAR = {
    "a module": lambda self, x: self.module(x),
    "linear": lambda self, x: F.linear(x, self.module.weight),
    "linear by names": lambda self, x: F.linear(input=x, weight=self.module.weight, bias=None),
    "a view of a weight": lambda self, x: F.linear(x, self.packed[32:]),
    "one of several in a tensor": lambda self, x: F.linear(x, self.packed.view(3, 32, 64)[2]),
    "matmul": lambda self, x: torch.matmul(x, self.turned),
    "@": lambda self, x: x @ self.turned,
    "@ with a transposed weight": lambda self, x: x @ self.module.weight.T,
    "matmul by names": lambda self, x: torch.matmul(other=self.turned, input=x),
    "mm by names": lambda self, x: torch.mm(mat2=self.turned, input=x.flatten(0, 1)),
    "method": lambda self, x: x.matmul(self.turned),
    "mm": lambda self, x: torch.mm(x.flatten(0, 1), self.turned),
    "method mm": lambda self, x: x.flatten(0, 1).mm(self.turned),
    "addmm": lambda self, x: torch.addmm(self.module.bias, x.flatten(0, 1), self.turned),
    "addmm by names": lambda self, x: torch.addmm(input=self.module.bias, mat1=x.flatten(0, 1), mat2=self.turned),
    "method addmm": lambda self, x: self.module.bias.addmm(x.flatten(0, 1), self.turned),
    "a buffer": lambda self, x: F.linear(x, self.fixed.kernel),
}
"""Ways to write a linear layer of 64 to 32 or 64 channels."""


class Buffer(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("kernel", random(32, 64, seed=2), persistent=False)


@pytest.mark.parametrize("how", LINEAR)
def test_every_way_to_write_a_linear_layer_is_one(how):
    parts = {"module": nn.Linear(64, 32), "packed": weight(96, 64), "turned": weight(64, 32), "fixed": Buffer()}
    model = Called(LINEAR[how], **parts)
    (layer,) = layers_of(model, TOKENS)
    assert (layer.kind, layer.in_channels, layer.rows, layer.obstacle) == ("linear", 64, 6, "")
    # References give the multiplied weights [N, K] and biases.
    tensors = model_tensors(model)
    rows = F.linear(TOKENS.flatten(0, 1), layer.weight.of(tensors), layer.bias and layer.bias.of(tensors))
    with torch.no_grad():
        torch.testing.assert_close(rows, model(TOKENS, torch.zeros(2)).reshape(12, -1))
    assert (layer.bias is not None) == (how == "a module" or "addmm" in how)


NO_LAYERS = {
    "activations": lambda self, x: x @ x.transpose(1, 2),
    "activations of two axes": lambda self, x: x[0] @ x[1].T + x[0].mm(x[1].T),
    "a weight that is computed": lambda self, x: F.linear(x, self.weight * 2),
    "a copy of a weight": lambda self, x: F.linear(x, self.weight.clone()),
    "a weight of three axes": lambda self, x: torch.matmul(x, self.weight[None]),
    "a weight on the left": lambda self, x: torch.matmul(self.weight, x.transpose(1, 2)),
    "a scaled sum": lambda self, x: torch.addmm(self.weight[0], x[0], self.weight, beta=2),
    "a sum with a matrix": lambda self, x: torch.addmm(x[0], x[0], self.weight),
    "a vector": lambda self, x: x @ self.weight[0],
    "a result that is written elsewhere": lambda self, x: torch.mm(x[0], self.weight, out=torch.empty(6, 64)),
    "a sum that is written elsewhere": lambda self, x: torch.addmm(x[0, 0], x[0], self.weight, out=torch.empty(6, 64)),
}


@pytest.mark.parametrize("how", NO_LAYERS)
def test_other_products_are_none(how):
    assert layers_of(Called(NO_LAYERS[how], weight=weight(64, 64)), TOKENS) == []


def test_a_layer_knows_its_rows_for_each_sample():
    model = Called(
        lambda self, x: self.tokens(x).sum() + self.pooled(x.mean(1)).sum() + self.folded(x.flatten(0, 1)).sum() + x,
        tokens=nn.Linear(64, 32),
        pooled=nn.Linear(64, 32),
        folded=nn.Linear(64, 32),
    )
    assert [(layer.name, layer.rows) for layer in layers_of(model, TOKENS)] == [
        ("tokens", 6),
        ("pooled", 1),
        ("folded", 6),
    ]


# Convolutions ---------------------------------------------------------------------------------------------------------


def conv_of(module, x=IMAGES):
    (layer,) = layers_of(Called(lambda self, x: self.conv(x), conv=module), x)
    return layer


@pytest.mark.parametrize("sizes", [1, 2, 3])
def test_convolutions_of_one_to_three_sizes(sizes):
    kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[sizes - 1]
    layer = conv_of(kind(32, 16, 3, stride=2, padding=1), random(2, 32, *[8] * sizes))
    assert (layer.kind, layer.in_channels, layer.out_channels, layer.obstacle) == ("conv", 32, 16, "")
    assert (layer.kernel, layer.stride, layer.padding) == ((3,) * sizes, (2,) * sizes, (1,) * sizes)
    assert layer.rows == 4**sizes  # pixels of the result
    assert flops(layer, 2) == 2 * 2 * 4**sizes * 16 * 32 * 3**sizes


@pytest.mark.parametrize(
    ("options", "padding"),
    [
        ({"padding": (0, 1)}, (0, 1)),
        ({"padding": "valid"}, (0, 0)),
        ({"padding": "same"}, (1, 2)),
        ({"padding": 1, "padding_mode": "circular"}, (0, 0)),  # padded before it is convolved
    ],
)
def test_padding_is_numbers_whatever_it_is_written_as(options, padding):
    module = nn.Conv2d(32, 16, (3, 5), **options)
    layer = conv_of(module)
    assert (layer.padding, layer.obstacle) == (padding, "")
    given = IMAGES if "padding_mode" not in options else F.pad(IMAGES, (1, 1, 1, 1), mode="circular")
    with torch.no_grad():
        torch.testing.assert_close(F.conv2d(given, module.weight, module.bias, padding=padding), module(IMAGES))


def test_numbers_of_a_functional_call_are_of_every_size():
    model = Called(lambda self, x: F.conv2d(x, self.kernel, None, [2], 1, groups=1), kernel=weight(16, 32, 3, 3))
    (layer,) = layers_of(model, IMAGES)
    assert (layer.name, layer.stride, layer.padding) == ("denoiser", (2, 2), (1, 1))


@pytest.mark.filterwarnings("ignore:Using padding='same' with even")
@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (nn.Conv2d(32, 32, 3, groups=2), "it has 2 groups"),
        (nn.Conv2d(32, 32, 3, groups=32), "it has 32 groups"),
        (nn.Conv2d(32, 32, 3, dilation=2), "it is dilated"),
        (nn.Conv2d(32, 32, 4, padding="same"), "its padding differs from side to side"),
        (nn.ConvTranspose2d(32, 16, 2, stride=2), "it is a transposed convolution"),
        (nn.Conv2d(32, 12, 3), "its 12 output channels are not a multiple of 8"),
    ],
)
def test_convolutions_that_stay_say_why(module, reason):
    assert reason in conv_of(module).obstacle


def test_an_image_without_an_axis_of_samples_stays():
    model = Called(lambda self, x: self.conv(x[0])[None], conv=nn.Conv2d(32, 16, 3))
    (layer,) = layers_of(model, IMAGES[:1])
    assert layer.obstacle == "its images have no axis of samples"


# Weights, sources and obstacles ---------------------------------------------------------------------------------------


def test_tied_layers_have_one_weight_and_names_of_their_own():
    shared, other = nn.Linear(64, 64), nn.Linear(64, 64)
    other.weight = shared.weight
    model = Called(lambda self, x: self.c(self.b(self.a(self.a(x)))), a=shared, b=shared, c=other)
    layers = layers_of(model, TOKENS)
    assert [layer.name for layer in layers] == ["a", "a#2", "a#3", "c"]
    assert {layer.weight for layer in layers} == {layers[0].weight} and layers[0].weight.name == "a.weight"
    assert layers[0].bias == layers[1].bias != layers[3].bias


def test_layers_that_read_one_tensor_share_a_source():
    parts = {name: nn.Linear(64, 64) for name in "qkvo"}
    model = Called(lambda self, x: self.o(self.q(x) + self.k(x) * self.v(x * 1)), **parts)
    assert {layer.name: layer.input_group for layer in layers_of(model, TOKENS)} == {
        "q": "q",
        "k": "q",
        "v": "v",
        "o": "o",
    }


def test_a_tensor_that_was_changed_in_place_is_another_source():
    def forward(self, x):
        x = x.clone()
        return self.a(x) + self.b(x) + self.c(F.relu_(x)) + self.d(x)

    model = Called(forward, **{name: nn.Linear(64, 64) for name in "abcd"})
    assert [layer.input_group for layer in layers_of(model, TOKENS)] == ["a", "a", "c", "c"]


def test_sources_are_told_apart_although_memory_is_used_again():
    """A new tensor may reuse the address and the id of a freed one."""

    def forward(self, x):
        for layer in self.layers:
            layer(x + 1)
        return x

    model = Called(forward, layers=nn.ModuleList(nn.Linear(64, 64) for _ in range(8)))
    assert len({layer.input_group for layer in layers_of(model, TOKENS)}) == 8


def test_the_source_among_those_that_are_converted_is_the_first_of_them():
    parts = {name: nn.Linear(64, 64) for name in "qkv"}
    layers = layers_of(Called(lambda self, x: self.q(x) + self.k(x) + self.v(x), **parts), TOKENS)
    assert [layer.input_group for layer in layers] == ["q", "q", "q"]
    assert [layer.input_group for layer in with_input_groups_among(layers[1:])] == ["k", "k"]
    chosen, _ = select_layers(layers, ["*", "v"], ["q"], 2)
    assert [(layer.name, layer.input_group) for layer in chosen] == [("k", "k"), ("v", "k")]


@pytest.mark.parametrize(
    ("forward", "reason"),
    [
        (lambda self, x: F.linear(x[..., :62], self.weight[:, :62]), "its 62 input channels are not a multiple of 16"),
        (lambda self, x: F.linear(x, self.weight[:63]), "its 63 output channels are not a multiple of 8"),
        (lambda self, x: F.linear(x, self.weight, self.weight[0] * 1), "its bias is computed"),
        (lambda self, x: F.linear(x[0, 0], self.weight) + x, "the first axis of its input is not that of the samples"),
        (lambda self, x: F.linear(x.mean((0, 1))[None], self.weight) + x, "the first axis of its input"),
        (lambda self, x: F.linear(x.flatten(0, 1)[:5], self.weight).sum() + x, "the first axis of its input"),
        (lambda self, x: F.linear(self.learned, self.weight) + x, "it reads a weight of the model"),
        (lambda self, x: x + (self.weight @ self.weight)[:6], "it reads a weight of the model"),
        (lambda self, x: x + F.linear(x.long(), self.whole).sum(), "it reads int64"),
    ],
)
def test_linear_layers_that_stay_say_why(forward, reason):
    whole = nn.Parameter(torch.ones(64, 64, dtype=torch.int64), requires_grad=False)
    model = Called(forward, weight=weight(64, 64), learned=weight(2, 6, 64), whole=whole)
    assert reason in layers_of(model, TOKENS)[0].obstacle


def test_the_handlers_result_takes_the_place_of_the_call_and_knows_all_of_it():
    calls = []

    def handler(call):
        calls.append(call)
        return 2 * call.exact()

    model = Called(lambda self, x: self.a(x), a=nn.Linear(64, 32)).eval()
    feeds = given(TOKENS)
    with torch.no_grad():
        got = InterceptedDenoiser(model, feeds, "timestep", layer_hooks(handler))(*feeds.values())
        torch.testing.assert_close(got, 2 * model(*feeds.values()))
    (call,) = calls
    assert call.x is feeds["x"] and call.weight is model.a.weight and call.bias is model.a.bias
    assert call.timestep.tolist() == [1.0, 2.0] and call.channel_axis == 2


def test_finder_computes_the_models_own_results():
    model, x = Layered().eval(), random(2, 1, 4, 4)
    finder = LayerFinder(model)
    with torch.no_grad():
        got = InterceptedDenoiser(model, given(x), "timestep", layer_hooks(finder))(*given(x).values())
        assert torch.equal(got, model(*given(x).values()))


# Which are chosen -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def layers():
    return layers_of(Layered(), random(2, 1, 4, 4))


def names(found):
    return tuple(layer.name for layer in found)


def test_ends_and_layers_of_few_rows_stay_by_default(layers):
    chosen, left = select_layers(layers, ["*"], [], 2)
    assert (names(chosen), names(left)) == (CHOSEN, LEFT)
    assert all(layer.obstacle for layer in left) and not any(layer.obstacle for layer in chosen)
    assert "it has 1 rows for each sample, layers.min_rows asks for 2" in left[1].obstacle


def ended():
    parts = {name: nn.Linear(64, 64) for name in ("embedding", "first", "middle", "last")}
    forward = lambda self, x: self.last(self.middle(self.first(x) + self.embedding(x.mean(1))[:, None]))  # noqa: E731
    return layers_of(Called(forward, **parts), TOKENS)


@pytest.mark.parametrize(
    ("include", "exclude", "min_rows", "expected"),
    [
        (["*"], [], 2, ["middle"]),
        (["*"], [], 1, ["embedding", "middle"]),
        (["*"], [], 7, []),
        (["*", "first"], [], 2, ["first", "middle"]),
        (["*", "embedding"], [], 2, ["embedding", "middle"]),  # named layers are chosen for any number of rows
        (["*st"], [], 7, ["first", "last"]),
        (["middle"], [], 2, ["middle"]),
        (["m*", "last"], ["*dle"], 2, ["last"]),
        (["*"], ["*"], 2, []),
    ],
)
def test_patterns_choose_layers(include, exclude, min_rows, expected):
    chosen, left = select_layers(ended(), include, exclude, min_rows)
    assert list(names(chosen)) == expected and len(chosen) + len(left) == 4


def test_layers_of_few_rows_keep_16bit_activations(monkeypatch):
    chosen, _left = select_layers(ended(), ["*"], [], 2, few_rows="weight_only")
    assert list(names(chosen)) == ["middle"]  # the other has few weights as well
    monkeypatch.setattr("trtconvert.linear.sites.FEWEST_WEIGHTS", 32 * 32)
    for include, expected in ((["*"], {"embedding": True, "middle": False}), (["embedding"], {"embedding": False})):
        chosen, _ = select_layers(ended(), include, [], 2, few_rows="weight_only")
        assert {layer.name: layer.weight_only for layer in chosen} == expected
    chosen, _ = select_layers(ended(), ["*"], [], 7, few_rows="weight_only")
    assert [layer.weight_only for layer in chosen] == [True, True]


def test_unconverted_layers_have_a_reason():
    reasons = {layer.name: layer.obstacle for layer in select_layers(ended(), ["*"], ["middle"], 2)[1]}
    assert reasons == {
        "first": "it is the first layer; name it in layers.include to convert it",
        "embedding": "it has 1 rows for each sample, layers.min_rows asks for 2",
        "middle": "the recipe excludes it",
        "last": "it is the last layer; name it in layers.include to convert it",
    }


def test_layers_excluded_by_kinds_are_reported_by_kind(layers):
    for kind, words in (("conv", "linear layers"), ("linear", "convolutions")):
        chosen, left = select_layers(layers, ["*"], [], 2, kinds=(kind,))
        assert {layer.kind for layer in chosen} == {kind}
        reasons = {layer.obstacle for layer in left if layer.kind != kind}
        assert f"layers.kinds leaves {words} out" in reasons
        assert not any("layers.kinds" in layer.obstacle for layer in left if layer.kind == kind)


def test_kinds_that_leave_no_layer_are_refused():
    with pytest.raises(UserError) as refused:
        select_layers(ended(), ["*"], [], 2, kinds=("conv",))
    told = str(refused.value)
    assert "convolutions that can be" in told and "none among 4 layers, but linear layers" in told
    assert "layers.kinds to [linear, conv]" in told
    patches = Called(
        lambda self, x: self.last(self.conv(x).flatten(2).mT), conv=nn.Conv2d(3, 64, 1), last=nn.Linear(64, 64)
    )
    with pytest.raises(UserError, match="conv: its 3 input channels"):
        select_layers(layers_of(patches, random(2, 3, 4, 4)), ["*"], [], 2, kinds=("conv",))
    # A named layer is taken whatever its kind. An excluded layer is no fault of layers.kinds. The default kinds demand nothing.
    assert names(select_layers(ended(), ["*", "middle"], [], 2, kinds=("conv",))[0]) == ("middle",)
    assert select_layers(ended(), ["*"], ["*"], 2, kinds=("conv",))[0] == []
    convs = Called(lambda self, x: self.b(self.a(x)), a=nn.Conv2d(16, 16, 1), b=nn.Conv2d(16, 16, 1))
    assert select_layers(layers_of(convs, random(2, 16, 4, 4)), ["*"], [], 2, kinds=("linear",))[0] == []


def test_a_name_takes_in_no_layer_that_cannot_be_converted(layers):
    chosen, left = select_layers(layers, ["conv_in", "out"], [], 2)
    assert chosen == []
    assert "its 1 input channels" in left[0].obstacle and "its 1 output channels" in left[-1].obstacle


@pytest.mark.parametrize(("include", "exclude"), [(["no.*"], []), (["*"], ["no.*"])])
def test_a_pattern_that_matches_nothing_is_refused_with_what_there_is(layers, include, exclude):
    with pytest.raises(UserError, match=r"'no\.\*' matches no layer") as refused:
        select_layers(layers, include, exclude, 2)
    assert "mlp.0" in refused.value.expected and "layers.include" in refused.value.remedy


def test_a_model_without_layers_has_none_to_choose():
    assert select_layers([], ["*"], [], 2) == ([], [])
    with pytest.raises(UserError, match="matches no layer") as refused:
        select_layers([], ["a"], [], 2)
    assert "the model calls no linear layer" in refused.value.expected


def test_layers_are_what_they_were_after_json(layers):
    extra = conv_of(nn.Conv3d(32, 16, (1, 3, 3), padding=(0, 1, 1)), random(2, 32, 2, 4, 4))
    for layer in (*layers, extra):
        assert TypeAdapter(Layer).validate_json(json.dumps(dataclasses.asdict(layer))) == layer


class Gated(nn.Module):
    """A layer norm, GEGLU in one of the usual spellings, and a layer behind it; in a U-Net a group norm and a convolution."""

    def __init__(self, spelling: str, unet: bool) -> None:
        super().__init__()
        self.spelling, self.norm = spelling, nn.LayerNorm(32)
        self.wide, self.deep, self.apart = nn.Linear(32, 128), nn.Linear(64, 32), nn.Linear(32, 32)
        self.group_norm, self.conv = (nn.GroupNorm(4, 32), nn.Conv2d(32, 32, 3, padding=1)) if unet else (None, None)

    def forward(self, x, timestep):
        tokens = x.flatten(2).transpose(1, 2)
        wide = self.wide(self.norm(tokens))
        a, b = wide.chunk(2, -1) if self.spelling != "slices" else (wide[..., :64], wide[..., 64:])
        gated = {
            "chunk": lambda: a * F.gelu(b),
            "first": lambda: F.gelu(a) * b,
            "mul": lambda: torch.mul(F.gelu(b), a),
            "slices": lambda: a.mul(F.gelu(b)),
            "plain": lambda: F.gelu(a) * tokens.repeat(1, 1, 2),
        }[self.spelling]()
        tokens = self.deep(F.dropout(gated, training=False)) + self.apart(tokens)
        x = tokens.transpose(1, 2).reshape(x.shape)
        return x if self.conv is None else self.conv(F.silu(self.group_norm(x)))


@pytest.mark.parametrize("unet", [True, False])
@pytest.mark.parametrize("spelling", ["chunk", "first", "mul", "slices", "plain"])
def test_layers_know_the_norm_and_geglu_around_them(spelling, unet):
    model = Gated(spelling, unet)
    finder = LayerFinder(model)
    with torch.no_grad(), Interception(model, layer_hooks(finder), torch.ones(2)):
        model(torch.rand(2, 32, 4, 4), torch.ones(2))
    found = {layer.name: layer for layer in finder.layers()}
    is_geglu = spelling != "plain"
    linear = {"wide": (True, False, is_geglu), "deep": (False, is_geglu, False), "apart": (False, False, False)}
    for name, expected in linear.items():
        layer = found[name]
        assert (layer.normed, layer.gated, layer.geglu, layer.beside_plugins) == (*expected, unet)
    assert not unet or (found["conv"].normed and not found["conv"].beside_plugins)
    assert not any(layer.behind_gelu for layer in found.values())


def test_layers_know_the_gelu_in_front():
    model = nn.Sequential(
        nn.Linear(32, 64), nn.GELU(), nn.Dropout(), nn.Linear(64, 32), nn.SiLU(), nn.Linear(32, 32)
    ).eval()
    finder = LayerFinder(model)
    with torch.no_grad(), Interception(model, layer_hooks(finder), torch.ones(2)):
        model(torch.rand(2, 4, 32))
    assert {layer.name: layer.behind_gelu for layer in finder.layers()} == {"0": False, "3": True, "5": False}
