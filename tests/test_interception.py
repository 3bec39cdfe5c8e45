"""Hooks on a model's calls: the calling module, nested calls, and the removal of hooks."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tiny_layers import Called, given, random
from torch import nn
from torch.nn import functional
from torch.nn.functional import scaled_dot_product_attention

from trtconvert.interception import InterceptedDenoiser, first_tensor, samples_of


def noting(function, kind="layer"):
    """Return hooks of one function that note callers and compute the call, and the notes."""
    notes = []

    def hook(caller, args, named):
        notes.append(caller.name(kind))
        return function(*args, **named)

    return {function: hook}, notes


def inputs():
    return given(random(2, 6, 64))


def run(model, hooks, feeds=None):
    feeds = feeds or inputs()
    with torch.no_grad():
        return InterceptedDenoiser(model.eval(), feeds, "timestep", hooks)(*feeds.values())


def test_a_call_is_named_by_the_innermost_module_and_counted_by_kind():
    shared = nn.Linear(64, 64)
    model = Called(
        lambda self, x: self.later(functional.linear(self.block(x), self.later.weight)),
        block=nn.Sequential(shared, nn.ReLU(), shared),
        later=nn.Linear(64, 64),
    )
    of_linear, linears = noting(functional.linear)
    of_relu, relus = noting(functional.relu, "relu")
    run(model, {**of_linear, **of_relu})
    # A module that lies in two places has the name of the first.
    assert linears == ["block.0", "block.0#2", "denoiser", "later"]
    assert relus == ["block.1"]


def test_kinds_of_calls_are_counted_apart():
    names = []
    model = Called(lambda self, x: functional.relu(functional.relu(x)) + functional.silu(x))
    hooks = {
        function: lambda caller, args, named, kind=kind: (names.append(caller.name(kind)), args[0])[1]
        for kind, function in (("relu", functional.relu), ("silu", functional.silu))
    }
    run(model, hooks)
    assert names == ["denoiser", "denoiser#2", "denoiser"]


def test_the_result_of_a_hook_replaces_the_call():
    model = Called(lambda self, x: self.a(x) + 1, a=nn.Linear(64, 64))
    got = run(model, {functional.linear: lambda caller, args, named: torch.zeros_like(args[0])})
    assert torch.equal(got, torch.ones_like(got))


def test_a_hook_sees_the_timestep_of_each_sample_as_numbers():
    seen = []
    model = Called(lambda self, x: self.a(x), a=nn.Linear(64, 64))
    hooks = {functional.linear: lambda caller, args, named: (seen.append(caller.timestep), args[0])[1]}
    for timestep in (torch.tensor([3, 4]), torch.tensor(7), torch.tensor([7.0])):
        run(model, hooks, inputs() | {"timestep": timestep})
    assert [t.tolist() for t in seen] == [[3.0, 4.0], [7.0, 7.0], [7.0, 7.0]]
    assert all(t.dtype == torch.float32 for t in seen)


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_torchs_own_multi_head_attention_is_seen_through(need_weights, batch_first, training):
    """A function of torch like `linear`, inside which a mode sees no calls; in evaluation it may be one kernel."""
    attention = nn.MultiheadAttention(64, 2, batch_first=batch_first)
    model = Called(lambda self, x: self.attn(x, x, x, need_weights=need_weights)[0], attn=attention).train(training)
    of_linear, linears = noting(functional.linear)
    of_attention, attended = noting(scaled_dot_product_attention, "attention")
    feeds = inputs()
    denoiser = InterceptedDenoiser(model, feeds, "timestep", {**of_linear, **of_attention})
    with torch.no_grad():
        got, expected = denoiser(*feeds.values()), model(*feeds.values())
    assert linears == ["attn", "attn#2"]
    assert attended == ["attn"]  # with weights they are computed beside it
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("average", [True, False])
def test_the_weights_of_torchs_own_multi_head_attention_are_its_own(average):
    attention = nn.MultiheadAttention(64, 2, batch_first=True)
    model = Called(
        lambda self, x: x + self.attn(x, x, x, average_attn_weights=average)[1].flatten(1).mean(1)[:, None, None],
        attn=attention,
    )
    hooks, attended = noting(scaled_dot_product_attention, "attention")
    feeds = inputs()
    denoiser = InterceptedDenoiser(model, feeds, "timestep", hooks)
    with torch.no_grad():
        torch.testing.assert_close(denoiser(*feeds.values()), model(*feeds.values()))
    assert attended == ["attn"]


def test_projections_of_other_widths_are_seen_one_by_one():
    attention = nn.MultiheadAttention(64, 2, kdim=32, vdim=32, batch_first=True)
    model = Called(lambda self, x: self.attn(x, x[..., :32], x[..., :32], need_weights=False)[0], attn=attention)
    hooks, names = noting(functional.linear)
    run(model, hooks)
    assert names == ["attn", "attn#2", "attn#3", "attn#4"]


def test_a_whole_encoder_layer_is_seen_through():
    model = Called(lambda self, x: self.block(x), block=nn.TransformerEncoderLayer(64, 2, 128, batch_first=True))
    hooks, names = noting(functional.linear)
    run(model, hooks)
    assert names == ["block.self_attn", "block.self_attn#2", "block.linear1", "block.linear2"]


def test_torch_itself_asks_as_before_who_handles_its_functions():
    """A copy makes it transparent: another mode sees multi-head attention as one call."""
    seen = []

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    attention = nn.MultiheadAttention(64, 2).eval()
    x = inputs()["x"]
    with torch.no_grad(), Watch():
        attention(x, x, x)
    assert functional.multi_head_attention_forward in seen and functional.linear not in seen


def test_names_begin_anew_in_each_forward_after_one_that_failed():
    model = Called(lambda self, x: self.a(self.a(x)), a=nn.Linear(64, 64))
    names, limit = [], 1

    def hook(caller, args, named):
        names.append(caller.name("layer"))
        if len(names) > limit:
            raise RuntimeError("in the hook")
        return functional.linear(*args, **named)

    with pytest.raises(RuntimeError, match="in the hook"):
        run(model, {functional.linear: hook})
    limit = 10
    run(model, {functional.linear: hook})
    assert names == ["a", "a#2"] * 2
    # And nobody hooks what is called outside.
    functional.linear(torch.ones(1, 64), model.a.weight)
    assert len(names) == 4


def test_threads_of_one_model_have_hooks_of_their_own():
    together = threading.Barrier(2, timeout=10)
    model = Called(lambda self, x: self.b(self.a(x)), a=nn.Linear(64, 64), b=nn.Linear(64, 64)).eval()
    names: dict[int, list[str]] = {0: [], 1: []}

    def forward(number):
        def hook(caller, args, named):
            together.wait()  # both are inside the model
            names[number].append(caller.name("layer"))
            return functional.linear(*args, **named)

        run(model, {functional.linear: hook})

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(forward, names))
    assert names == {0: ["a", "b"], 1: ["a", "b"]}


def test_inputs_go_by_place_or_by_name():
    model = Called(lambda self, x: self.a(x), a=nn.Linear(64, 64)).eval()
    feeds = inputs()
    denoiser = InterceptedDenoiser(model, feeds, "timestep", {})
    with torch.no_grad():
        assert torch.equal(denoiser(*feeds.values()), denoiser(feeds["x"], timestep=feeds["timestep"]))


def test_samples_are_those_of_the_first_input_that_is_no_timestep():
    feeds = {"timestep": torch.zeros(()), "x": torch.zeros(3, 4), "table": torch.zeros(7, 2)}
    assert samples_of(feeds, "timestep") == 3


def test_the_prediction_is_the_first_tensor_of_what_is_returned():
    class Output:
        sample = torch.ones(1)

    for output in (torch.ones(1), (torch.ones(1), torch.zeros(1)), [torch.ones(1)], Output()):
        assert torch.equal(first_tensor(output), torch.ones(1))
