"""Q-Diff's calibration: results, file, restart after a kill, and refusals."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from modulated_models import Block, mean_error, tiny, trajectory
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from trtconvert.documents import safetensors_header
from trtconvert.errors import UserError
from trtconvert.modiff import AdaRound, Calibration, Settings, calibrate, modulate, record
from trtconvert.modiff.reference import HIGH, RESET, SCALE, ZERO
from trtconvert.modiff.rounding import Example, adaround
from trtconvert.modiff.scales import Seen, least_error
from trtconvert.modiff.weights import round_to_nearest, search_grid

NEAREST = AdaRound(iterations=0)
FAST = AdaRound(iterations=30)
SETTINGS = Settings(activation_bits=4, bins=4)


@pytest.fixture(scope="module")
def calibration() -> Calibration:
    return calibrate(tiny(), [trajectory(2, seed) for seed in (1, 2)], SETTINGS, rounding=NEAREST)


def test_calibrated_modulation_is_closer_than_the_same_scales_without(calibration: Calibration):
    model, calls = tiny(), trajectory()
    with_it = mean_error(model, modulate(tiny(), calibration=calibration), calls)
    naive = dataclasses.replace(SETTINGS, modulation=False)
    without = mean_error(model, modulate(tiny(), naive, calibration=calibration), calls)
    dynamic = dataclasses.replace(SETTINGS, scales="dynamic")
    measured = mean_error(model, modulate(tiny(), dynamic, calibration=calibration), calls)
    assert with_it < without / 2 and with_it < 1.5 * measured, (with_it, without, measured)


def test_tables_have_what_each_step_needs(calibration: Calibration):
    layer = calibration.layers["blocks.0.conv1"]
    assert layer.changes.shape == layer.activations.shape == (1, 5, 6)
    assert layer.changes[0, :, RESET].tolist() == [0, 0, 0, 0, 1] and bool(layer.activations[..., RESET].all())
    assert layer.changes[0, :, HIGH].tolist() == [7, 7, 7, 7, 127]
    assert bool((layer.changes[0, :4, SCALE] < layer.activations[0, :4, SCALE] / 2).all())
    assert calibration.rounding == "nearest" and calibration.timesteps[0] == 950 and len(calibration.timesteps) == 12
    assert "embed" not in calibration.layers  # of one row, and one channel


def test_skip_connections_have_scales_of_their_own(calibration: Calibration):
    for name in ("blocks.1.conv1", "blocks.1.shortcut"):
        assert calibration.layers[name].widths == (16, 16)
        first, second = calibration.layers[name].activations[:, 0, SCALE]
        assert float(second) > 3 * float(first)
    assert {layer.widths for name, layer in calibration.layers.items() if not name.startswith("blocks.1.")} == {(16,)}


@pytest.mark.parametrize("symmetric", [True, False])
def test_scales_have_the_least_error_on_what_they_are_for(symmetric: bool):
    """Compares with a brute-force search along a smooth path of deltas."""
    generator = torch.Generator().manual_seed(0)
    directions = torch.randn(2000, generator=generator) * torch.rand(2000, generator=generator).square()
    changes = directions + 0.1 * torch.randn(8, 2000, generator=generator)
    seen = Seen()
    for change in changes:
        seen.add(change, generator, 500)

    def followed(quantiser: Tensor) -> float:
        known, a, errors = torch.zeros(2000), torch.zeros(2000), []
        for change in changes:
            a = a + change
            codes = ((a - known) / quantiser[SCALE]).round() + quantiser[ZERO]
            known = known + (codes.clamp(quantiser[1], quantiser[HIGH]) - quantiser[ZERO]) * quantiser[SCALE]
            errors.append((a - known).square().mean())
        return float(torch.stack(errors).mean())

    found = least_error(seen, 3, symmetric, False, True, generator)
    assert followed(found) < 1.1 * min(followed(_scaled(found, factor)) for factor in (0.6, 1.6))


def _scaled(quantiser: Tensor, factor: float) -> Tensor:
    changed = quantiser.clone()
    changed[SCALE] *= factor
    return changed


@pytest.mark.parametrize("kind", ["layer", "block"])
def test_adaround_is_closer_than_the_nearest(kind: str):
    torch.manual_seed(0)
    unit = nn.Linear(32, 32) if kind == "layer" else Block(16, 16)
    unit.requires_grad_(False)
    layers = {"": unit} if kind == "layer" else {n: m for n, m in unit.named_modules() if hasattr(m, "weight")}
    mixed = torch.randn(16, 16)  # correlated channels, like activations
    if kind == "layer":
        inputs = [torch.randn(64, 4) @ torch.randn(4, 32) for _ in range(4)]
    else:
        images = torch.randn(4, 4, 16, 6, 6) * torch.linspace(0, 3, 16)[:, None, None]
        inputs = list(torch.einsum("ibchw,cd->ibdhw", images, mixed))
    extra = () if kind == "layer" else (torch.zeros(4, 16),)
    examples = [Example((x, *extra), {}, unit(x, *extra)) for x in inputs]
    widths = {name: (layer.weight.shape[1],) for name, layer in layers.items()}
    grids = {name: search_grid(layer.weight, widths[name], 4) for name, layer in layers.items()}
    how = AdaRound(iterations=300, rate=0.03)
    rounded = adaround(unit, layers, grids, widths, examples, how, torch.Generator().manual_seed(0))
    nearest = {name: round_to_nearest(layer.weight, grids[name], widths[name]) for name, layer in layers.items()}

    def error(codes: dict[str, Tensor]) -> float:
        weights = {f"{n}.weight".lstrip("."): grids[n].values(codes[n], widths[n]) for n in codes}
        outputs = [torch.func.functional_call(unit, weights, example.args) for example in examples]
        return sum(float((y - example.wanted).square().mean()) for y, example in zip(outputs, examples, strict=True))

    assert error(rounded) < 0.75 * error(nearest)
    for name, codes in rounded.items():
        assert int((codes.int() - nearest[name].int()).abs().max()) == 1


def test_a_killed_calibration_goes_on(tmp_path: Path):
    settings = dataclasses.replace(SETTINGS, weight_bits=4)
    calls = [trajectory(2, 1)]

    def stop(what: str, done: int, of: int) -> None:
        if (what, done) == ("weights", 1):
            raise KeyboardInterrupt

    model = tiny()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    with pytest.raises(KeyboardInterrupt):
        calibrate(model, calls, settings, rounding=FAST, work=tmp_path, on_progress=stop)
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    kept = load_file(tmp_path / "unit-0000.safetensors")
    assert set(kept) == {f"blocks.0.{name}" for name in ("conv1", "mix", "conv2")}
    # Finished work is reused: a mark in it is found in the result.
    kept["blocks.0.mix"][0, 0] = 5
    save_file(kept, tmp_path / "unit-0000.safetensors")
    resumed = calibrate(model, calls, settings, rounding=FAST, work=tmp_path)
    assert int(resumed.layers["blocks.0.mix"].codes[0, 0]) == 5
    whole = calibrate(model, calls, settings, rounding=FAST)
    assert torch.equal(whole.layers["blocks.0.conv1"].codes, resumed.layers["blocks.0.conv1"].codes)
    assert whole.rounding == "AdaRound by block, 30 iterations"
    with pytest.raises(UserError, match="another settings"):
        calibrate(model, calls, SETTINGS, rounding=FAST, work=tmp_path)


def test_the_file_holds_all_of_it(calibration: Calibration, tmp_path: Path):
    calibration.save(tmp_path / "c.safetensors")
    loaded = Calibration.load(tmp_path / "c.safetensors")
    assert dataclasses.replace(loaded, layers={}) == dataclasses.replace(calibration, layers={})
    call = trajectory()[0]
    assert torch.equal(
        modulate(tiny(), calibration=loaded)(*call.args), modulate(tiny(), calibration=calibration)(*call.args)
    )
    half = modulate(tiny().half(), calibration=loaded)  # one model in another type
    assert half(call.args[0].half(), call.args[1]).dtype == torch.float16
    with pytest.raises(UserError, match=r"\.to\(torch\.bfloat16\)"):
        modulate(tiny().bfloat16(), calibration=loaded)
    later = modulate(tiny(), calibration=loaded).to(torch.bfloat16)
    x, t = call.args
    y, wanted = later(x.bfloat16(), t), tiny()(x, t)
    assert y.dtype == torch.bfloat16 and float((y.float() - wanted).norm() / wanted.norm()) < 0.05


def test_other_files_are_refused(calibration: Calibration, tmp_path: Path):
    path = tmp_path / "c.safetensors"
    with pytest.raises(UserError, match="is no calibration"):
        Calibration.load(path)
    save_file({"x": torch.ones(2)}, path)
    with pytest.raises(UserError, match="is no calibration"):
        Calibration.load(path)
    spoils: dict[str, Callable[[Tensor], Tensor]] = {
        "changes": lambda x: x * torch.nan,
        "scale": lambda x: -x,
        "codes": lambda x: x.float(),
        "activations": lambda x: x[:, :2],
    }
    for kind, spoil in spoils.items():
        calibration.save(path)
        metadata = safetensors_header(path)["__metadata__"]
        tensors = load_file(path)
        tensors[f"blocks.0.mix:{kind}"] = spoil(tensors[f"blocks.0.mix:{kind}"]).contiguous()
        save_file(tensors, path, metadata)
        with pytest.raises(UserError, match=r"blocks\.0\.mix"):
            Calibration.load(path)
    calibration.save(path)
    said = json.loads(safetensors_header(path)["__metadata__"]["trtconvert"])
    for number in (10**400, math.nan, 0.0):
        save_file(load_file(path), path, {"trtconvert": json.dumps(said | {"timestep_max": number})})
        with pytest.raises(UserError, match="is no calibration"):
            Calibration.load(path)


def test_another_model_or_other_bits_are_refused(calibration: Calibration):
    other = tiny()
    other.blocks[0].mix.weight[3, 3] += 0.01  # type: ignore[index,union-attr]
    with pytest.raises(UserError, match="another model"):
        modulate(other, calibration=calibration)
    with pytest.raises(UserError, match="other shapes"):
        modulate(nn.Sequential(nn.Linear(16, 16)), calibration=calibration)
    with pytest.raises(UserError, match="another activation_bits"):
        modulate(tiny(), dataclasses.replace(SETTINGS, activation_bits=6), calibration=calibration)


def test_models_that_cannot_be_calibrated_are_reported():
    with pytest.raises(UserError, match="nothing to calibrate with"):
        calibrate(tiny(), [])
    with pytest.raises(UserError, match="no layers to calibrate"):
        calibrate(tiny(), [trajectory()], dataclasses.replace(SETTINGS, include=("embed",)))
    spoilt = trajectory()
    spoilt[3].args[0][0, 0, 0, 0] = torch.nan
    with pytest.raises(UserError, match="reads NaN or Inf"):
        calibrate(tiny(), [spoilt], SETTINGS, rounding=NEAREST)


def test_trajectories_are_recorded_from_any_sampler():
    model, calls = tiny(), trajectory(steps=3)
    found = record(model, lambda denoiser: [denoiser(*call.args[:1], timestep=call.args[1]) for call in calls])
    assert len(found) == 3 and torch.equal(found[1].args[0], calls[1].args[0]) and list(found[1].kwargs) == ["timestep"]
    pairs = [found[:2], found[1:]]
    assert calibrate(model, pairs, SETTINGS, rounding=NEAREST).timesteps == tuple(
        float(call.args[1][0]) for call in calls
    )
