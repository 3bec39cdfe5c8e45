"""Models with modulated layers: samplers, refusals, and compilers."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from modulated_models import TinyUNet, mean_error, tiny, trajectory
from torch import Tensor, nn

from trtconvert.errors import UserError
from trtconvert.modiff import Modulated, Settings, modulate

DYNAMIC = Settings(scales="dynamic", granularity="sample", activation_bits=4)
LAYERS = {f"blocks.{block}.{layer}" for block in (0, 1) for layer in ("conv1", "mix", "conv2")} | {"blocks.1.shortcut"}


def modulated(**changed: object) -> Modulated:
    return modulate(tiny(), dataclasses.replace(DYNAMIC, **changed))


def test_modulation_is_closer_at_the_same_bits():
    calls = trajectory()
    found = modulated()
    assert set(found.layers) == LAYERS and set(found.left) == {"embed", "enter", "leave"}
    with_it = mean_error(tiny(), found, calls)
    without = mean_error(tiny(), modulated(modulation=False), calls)
    assert with_it < without / 2  # 6 dB


def test_switches_give_the_model_back_and_what_others_simulate():
    model, found, calls = tiny(), modulated(activation_bits=8), trajectory()
    integers = [found(*call.args) for call in calls]
    found.simulate()
    for call, exact in zip(calls, integers, strict=True):
        torch.testing.assert_close(found(*call.args), exact, rtol=1e-3, atol=1e-3)
    found.simulate(False)
    found.set_quant_state(weights=False, activations=False)
    assert torch.equal(found(*calls[0].args), model(*calls[0].args))
    found.set_quant_state(weights=True, activations=False)
    of_weights = mean_error(model, found, calls)
    found.set_quant_state(weights=False, activations=True)
    of_activations = mean_error(model, found, calls)
    found.set_quant_state()
    both = mean_error(model, found, calls)
    assert min(of_weights, of_activations) > 1e-4 and max(of_weights, of_activations) < 2 * both


def test_a_reset_begins_anew_in_any_batch():
    found, calls = modulated(), trajectory()
    first = [found(*call.args) for call in calls]
    found.reset_cache()
    other = trajectory(3, 1, 12)
    assert all(found(*call.args).isfinite().all() for call in other)
    found.reset_cache()
    assert all(torch.equal(found(*call.args), y) for call, y in zip(calls, first, strict=True))


def test_samples_may_begin_one_by_one():
    """A reset of one sample does not affect the others."""
    calls, later = trajectory(2, 0), trajectory(2, 5)
    found, wanted = modulated(), modulated()
    alone = [wanted(*call.args) for call in calls]
    fresh = modulated()
    of_second = [fresh(*call.args)[1] for call in later]
    for step, call in enumerate(calls):
        x, t = (value.clone() for value in call.args)
        if step >= 4:
            x[1], t[1] = later[step - 4].args[0][1], later[step - 4].args[1][1]
        if step == 4:
            found.reset_cache([1])
        y = found(x, t)
        torch.testing.assert_close(y[0], alone[step][0], rtol=1e-4, atol=1e-4)
        if step >= 4:
            torch.testing.assert_close(y[1], of_second[step - 4], rtol=1e-4, atol=1e-4)
    with pytest.raises(UserError, match="no such samples"):
        found.reset_cache([2])
    with pytest.raises(UserError, match="no such samples"):
        found.reset_cache(torch.tensor([True]))


def test_outputs_of_a_step_outlive_the_next_one():
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"sample": self.layer(x)}

    found = modulate(Bare(), DYNAMIC)
    first = found(torch.randn(2, 4, 16))["sample"]
    kept = first.clone()
    found(torch.randn(2, 4, 16))
    assert torch.equal(first, kept)


class Twice(nn.Module):
    """A layer called twice in a step, or three times on demand; and a model that writes into a layer's output."""

    def __init__(self, writes: bool = False) -> None:
        super().__init__()
        self.layer, self.act = nn.Linear(16, 16), nn.ReLU(inplace=writes)

    def forward(self, x: Tensor, timestep: Tensor, more: bool = False) -> Tensor:
        y = self.act(self.layer(x)) + self.layer(x * 3 + 1)
        return y + self.layer(x) if more else y


def test_layers_that_are_called_twice_have_caches_of_their_own():
    torch.manual_seed(0)
    model, t = Twice().requires_grad_(False), torch.tensor([5.0, 5.0])
    found, x = modulate(copy.deepcopy(model), DYNAMIC), torch.randn(2, 4, 16)
    for _ in range(6):
        y = found(x, t)
    assert float((y - model(x, t)).norm() / y.norm()) < 0.02  # of the weights alone
    assert [name for name, _ in found.named_states()] == [
        "layer.a_hat",
        "layer.o_hat",
        "layer#2.a_hat",
        "layer#2.o_hat",
    ]
    with pytest.raises(UserError, match="more often"):
        found(x, t, more=True)


def test_models_that_write_into_outputs_are_found_out():
    torch.manual_seed(0)
    model, t, x = Twice(writes=True).requires_grad_(False), torch.tensor([5.0, 5.0]), torch.randn(2, 4, 16)
    found = modulate(copy.deepcopy(model), DYNAMIC)
    found(x, t)
    with pytest.raises(UserError, match="shared_outputs=False"):
        found(x, t)
    copies = modulate(copy.deepcopy(model), dataclasses.replace(DYNAMIC, shared_outputs=False))
    for _ in range(6):
        y = copies(x, t)
    assert float((y - model(x, t)).norm() / y.norm()) < 0.02
    with torch.inference_mode():
        again = modulate(copy.deepcopy(model), DYNAMIC)
        again(x, t)
        with pytest.raises(UserError, match="shared_outputs=False"):
            again(x, t)


def test_other_batches_without_a_reset_are_refused():
    found, calls = modulated(), trajectory()
    found(*calls[0].args)
    for odd in (trajectory(3)[1], trajectory(2, size=12)[1]):
        with pytest.raises(UserError, match=r"reset_cache\(\)"):
            found(*odd.args)
    found(*calls[1].args)


def test_a_sampler_that_goes_back_in_time_is_refused():
    found, calls = modulated(), trajectory()
    for step in (0, 2, 2, 5):  # skipped steps and repeated timesteps are allowed
        found(*calls[step].args)
    with pytest.raises(UserError, match="goes back in time"):
        found(*calls[4].args)
    found.reset_cache()
    found(*calls[4].args)
    free = modulated(check_timesteps=False)
    for step in (0, 3, 1):
        free(*calls[step].args)
    found.reset_cache()
    for step in (7, 6, 4):  # rising timesteps are supported
        found(*calls[step].args)
    with pytest.raises(UserError, match="timesteps that rise"):
        found(*calls[5].args)


def test_caches_are_taken_and_checked():
    found, calls = modulated(), trajectory()
    with pytest.raises(UserError, match="no caches yet"):
        list(found.named_states())
    found(*calls[0].args)
    kept = {name: cache.clone() for name, cache in found.named_states()}
    assert len(kept) == 2 * len(LAYERS)
    wanted = found(*calls[1].args)
    found.reset_cache()
    found(*trajectory(2, 9)[0].args)
    found.load_states(kept)
    assert torch.equal(found(*calls[1].args), wanted)
    name = "blocks.0.mix.o_hat"
    for spoilt, said in (
        ({}, "missing"),
        (kept | {"x": kept[name]}, "x unknown"),
        (kept | {name: kept[name][:1]}, "another input"),
        (kept | {name: kept[name] * torch.nan}, "NaN or Inf"),
    ):
        with pytest.raises(UserError, match=said):
            found.load_states(spoilt)
    found.check_caches()
    x, t = calls[2].args
    y = found(x.index_fill(0, torch.tensor([1]), torch.nan), t)
    assert y[0].isfinite().all() and y[1].isnan().all()
    with pytest.raises(UserError, match=r"blocks\.0\.conv1.*\n"):
        found.check_caches()
    found.reset_cache([1])
    assert found(*calls[3].args).isfinite().all()
    found.check_caches()


def test_layers_that_cannot_be_modulated_are_reported():
    found = modulated()
    with pytest.raises(UserError, match="already"):
        modulate(found.model, DYNAMIC)
    with pytest.raises(UserError, match="matches no layer"):
        modulated(exclude=("block.*",))
    with pytest.raises(UserError, match="no layers to modulate"):
        modulated(include=("embed",))
    with pytest.raises(UserError, match="need a calibration"):
        modulate(tiny(), Settings())
    with pytest.raises(UserError, match="which input"):
        modulate(tiny(), DYNAMIC, timestep_input="noise")
    spoilt = tiny()
    spoilt.blocks[0].mix.weight[0, 0] = torch.inf  # type: ignore[index,union-attr]
    with pytest.raises(UserError, match=r"blocks\.0\.mix\.weight"):
        modulate(spoilt, DYNAMIC)
    with pytest.raises(UserError, match="one timestep for each"):
        modulated()(torch.zeros(2, 3, 8, 8), torch.zeros(3))


def test_rows_that_are_not_the_samples_are_refused():
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x.flatten(0, 1)[:5].expand(3, 5, 16))

    with pytest.raises(UserError, match=r"exclude=\('layer',\)"):
        modulate(Odd(), DYNAMIC)(torch.randn(2, 4, 16))


def test_models_keep_what_they_ask_their_layers_for():
    found = modulated()
    held = found.model.blocks[0].conv1  # type: ignore[union-attr,index]
    assert held.in_channels == 16 and held.weight.shape == (16, 16, 3, 3) and held.padding == (1, 1)
    with pytest.raises(AttributeError):
        held.no_such_thing  # noqa: B018


@pytest.mark.soak
def test_compiled_models_compute_the_same():
    torch._dynamo.reset()
    found, wanted, calls = modulated(activation_bits=8), modulated(activation_bits=8), trajectory(steps=4)
    compiled = torch.compile(found, backend="aot_eager")
    for _ in range(2):
        for call in calls:
            torch.testing.assert_close(compiled(*call.args), wanted(*call.args), rtol=1e-4, atol=1e-4)
        found.reset_cache()
        wanted.reset_cache()
    with pytest.raises(UserError, match="goes back in time"):
        for call in (*calls, calls[0]):
            compiled(*call.args)


def test_copies_have_caches_of_their_own():
    found, calls = modulated(), trajectory()
    found(*calls[0].args)
    copied = copy.deepcopy(found)
    wanted = copied(*calls[1].args)
    copied(*calls[2].args)
    assert torch.equal(found(*calls[1].args), wanted)


def test_the_class_of_the_model_does_not_matter():
    assert isinstance(modulated().model, TinyUNet)
    shared = nn.Sequential(layer := nn.Linear(16, 16), nn.GELU(), layer)
    found = modulate(shared, DYNAMIC)
    assert len(found.layers) == 1 and shared[0] is shared[2]
    assert found(torch.randn(2, 4, 16)).shape == (2, 4, 16)
