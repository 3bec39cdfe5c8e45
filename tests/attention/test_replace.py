"""Attention of real diffusers classes replaced in place: close to exact, reported truly, undone exactly, and together with
other changes of pipelines."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

pytest.importorskip("diffusers", reason="needs diffusers")
import diffusers
import further_pipelines
import tiny_models
import tiny_pipelines
import tolerances
from accelerate import hooks

from trtconvert.attention import attention_report, replace_attention_with_int8, restore_attention
from trtconvert.attention.modes import Mode
from trtconvert.attention.ranges import RangeObserver, offsets, ranges_of_maxima, tables_of_ranges
from trtconvert.attention.sites import SiteCall, attention_hooks
from trtconvert.bundle import read_manifest
from trtconvert.calib.calibration import Calibration
from trtconvert.errors import UserError
from trtconvert.evaluate.torch_int8 import TorchInt8
from trtconvert.interception import Interception
from trtconvert.models.recorded_calls import relative_error as error
from trtconvert.provenance import Provenance

MAKERS = {name: make for name, (make, _) in tiny_pipelines.PIPELINES.items()} | {
    "hunyuan_dit": further_pipelines.hunyuan_dit
}
SITES = {
    "stable_diffusion": 8,
    "stable_diffusion_xl": 8,
    "stable_diffusion_3": 2,
    "flux": 2,
    "pixart": 4,
    "wan": 4,
    "hunyuan_dit": 4,
}
"""Attention modules of each denoiser: a block of U-Nets and PixArt has self- and cross-attention, SD 3 and Flux join both."""

CALL = {"num_inference_steps": 2, "output_type": "latent"}


def draw(pipe: Any, name: str) -> Tensor:
    """Latents after two steps."""
    pipe.set_progress_bar_config(disable=True)
    if name == "hunyuan_dit":
        generator = torch.Generator().manual_seed(7)
        text = {
            f"{sign}prompt_embeds{rest}": torch.randn(1, 8, tiny_pipelines.WIDTH, generator=generator)
            for sign in ("", "negative_")
            for rest in ("", "_2")
        }
        masks = {
            f"{sign}prompt_attention_mask{rest}": torch.ones(1, 8, dtype=torch.int64)
            for sign in ("", "negative_")
            for rest in ("", "_2")
        }
        sizes = {"height": 256, "width": 256, "use_resolution_binning": False}
        return pipe(**text, **masks, **sizes, **CALL, generator=torch.Generator().manual_seed(7))[0]
    return pipe(**tiny_pipelines.arguments(pipe, name) | CALL)[0]


@pytest.fixture
def unet() -> Any:
    return tiny_pipelines.unet()


def noise_of(model: Any, timestep: Any = 500, batch: int = 2, **named: Any) -> Tensor:
    """A U-Net's prediction."""
    generator = torch.Generator().manual_seed(3)
    sample = torch.randn(batch, 4, 8, 8, generator=generator)
    text = torch.randn(batch, 8, tiny_pipelines.WIDTH, generator=generator)
    with torch.no_grad():
        return model(sample, timestep, text, **named)[0]


# The classes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(SITES))
def test_pipelines_draw_with_int8_attention(name: str) -> None:
    pipe = MAKERS[name]()
    exact = draw(pipe, name)
    assert replace_attention_with_int8(pipe, precision_mode="fp16") is pipe
    assert error(draw(pipe, name), exact) < 1e-4  # another order of sums, over two steps
    restore_attention(pipe)
    replace_attention_with_int8(pipe)
    quantised = error(draw(pipe, name), exact)
    assert 1e-5 < quantised < 3 * tolerances.MODE_ERROR[Mode.PRECISION]
    report = attention_report(pipe)
    assert len(report.replaced) == SITES[name] and not report.left and not report.exceptions
    assert str(report) == f"{SITES[name]} attention modules compute in INT8, 0 do not"
    assert restore_attention(pipe) is pipe
    assert torch.equal(draw(pipe, name), exact)


@pytest.mark.parametrize("mode", ["balanced", "aggressive", "fp8", "auto"])
def test_modes_are_what_is_computed(mode: str, unet) -> None:
    exact = noise_of(unet)
    pipe = tiny_pipelines.stable_diffusion()
    pipe.unet = unet
    replace_attention_with_int8(pipe, precision_mode=mode)
    found = noise_of(unet)
    assert 1e-4 < error(found, exact) < 0.1
    restore_attention(pipe)
    replace_attention_with_int8(pipe, precision_mode="precision")
    assert not torch.equal(noise_of(unet), found)


# Timesteps ------------------------------------------------------------------------------------------------------------


def modes_seen(model: Any, monkeypatch) -> list[int]:
    """Modes of the first site in each call of attention, as the operator gets them."""
    from trtconvert.attention import kernel

    seen: list[int] = []
    original = kernel.attention

    def watched(q, k, v, timestep, tables, **options):
        index = (timestep * len(tables.modes) / options["timestep_max"]).long().clamp(0, len(tables.modes) - 1)
        seen.extend(tables.modes[index].tolist())
        return original(q, k, v, timestep, tables, **options)

    monkeypatch.setattr(kernel, "attention", watched)
    return seen


@pytest.mark.parametrize(
    "timestep",
    [990, 990.0, torch.tensor(990), torch.tensor([990.0]), torch.tensor([990, 990]), torch.tensor([10, 990])],
)
def test_the_timestep_is_captured(unet, timestep, monkeypatch) -> None:
    pipe = tiny_pipelines.stable_diffusion()
    pipe.unet = unet
    replace_attention_with_int8(pipe, precision_mode="auto")
    seen = modes_seen(unet, monkeypatch)
    noise_of(unet, timestep)
    first = Mode.PRECISION if isinstance(timestep, Tensor) and timestep.flatten()[0] == 10 else Mode.AGGRESSIVE
    assert seen == [first, Mode.AGGRESSIVE] * SITES["stable_diffusion"]
    seen.clear()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():  # by name
        unet(
            sample=torch.randn(1, 4, 8, 8, generator=generator),
            encoder_hidden_states=torch.randn(1, 8, tiny_pipelines.WIDTH, generator=generator),
            timestep=5,
        )
    assert set(seen) == {Mode.PRECISION}


def test_timesteps_of_flux_are_shares_of_the_schedule(monkeypatch) -> None:
    pipe = tiny_pipelines.flux()
    replace_attention_with_int8(pipe, precision_mode="auto")
    seen = modes_seen(pipe.transformer, monkeypatch)
    pipe.set_progress_bar_config(disable=True)
    pipe(**tiny_pipelines.arguments(pipe, "flux") | CALL | {"num_inference_steps": 6})
    assert seen[0] == Mode.AGGRESSIVE and seen[-1] < Mode.AGGRESSIVE
    seen.clear()
    wan = tiny_pipelines.wan()
    replace_attention_with_int8(wan, precision_mode="auto")
    tokens = torch.full((1, 16), 30.0)
    tokens[:, 8:] = 990.0  # a timestep per token: the noisiest counts
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        wan.transformer(
            torch.randn(1, 16, 1, 8, 8, generator=generator),
            tokens,
            torch.randn(1, 8, tiny_pipelines.WIDTH, generator=generator),
        )
    assert set(seen) == {Mode.AGGRESSIVE}


# Together with other changes of pipelines -------------------------------------------------------------------------------


@pytest.fixture
def pipe(unet) -> Any:
    made = tiny_pipelines.stable_diffusion()
    made.unet = unet
    return made


class Adapted(nn.Module):
    """A linear layer with a LoRA, as peft replaces layers."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.base = base
        self.down = nn.Parameter(torch.randn(4, base.in_features, generator=generator) * 0.2)
        self.up = nn.Parameter(torch.randn(base.out_features, 4, generator=generator) * 0.2)

    def forward(self, x: Tensor, *args: Any, **named: Any) -> Tensor:
        return self.base(x) + x @ self.down.T @ self.up.T


def adapt(model: nn.Module) -> None:
    for module in list(model.modules()):
        if hasattr(module, "to_q"):
            module.to_q = Adapted(module.to_q)  # type: ignore[assignment]


def adapters(model: Any) -> dict[str, Any]:
    """Weights of an IP-Adapter for a U-Net, and its arguments of the call."""
    generator = torch.Generator().manual_seed(6)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * shape[-1] ** -0.5

    width = model.config.cross_attention_dim
    layers: dict[str, Tensor] = {}
    crossing = [name for name in model.attn_processors if name.endswith("attn2.processor")]
    for number, name in zip(itertools.count(1, 2), crossing, strict=False):
        size = model.get_submodule(name.removesuffix(".processor")).inner_dim
        layers |= {f"{number}.to_{part}_ip.weight": draw(size, width) for part in "kv"}
    image = {
        "proj.weight": draw(4 * width, 16),
        "proj.bias": torch.zeros(4 * width),
        "norm.weight": torch.ones(width),
        "norm.bias": torch.zeros(width),
    }
    return {"image_proj": image, "ip_adapter": layers}


@pytest.mark.parametrize("first", [True, False])
def test_loras_and_ip_adapters_before_and_after(pipe, first: bool) -> None:
    unet = pipe.unet
    generator = torch.Generator().manual_seed(8)
    named = {"added_cond_kwargs": {"image_embeds": [torch.randn(2, 1, 16, generator=generator)]}}
    if first:
        replace_attention_with_int8(pipe)
    plain = noise_of(unet)
    adapt(unet)
    unet._load_ip_adapter_weights([adapters(unet)])
    if not first:
        replace_attention_with_int8(pipe)
    found = noise_of(unet, **named)
    report = attention_report(pipe)
    assert len(report.replaced) == SITES["stable_diffusion"] and not report.exceptions
    restore_attention(pipe)
    exact = noise_of(unet, **named)
    assert error(exact, plain) > 0.05  # the adapters have an effect
    assert 1e-5 < error(found, exact) < 0.05


@pytest.mark.parametrize("first", [True, False])
def test_hooks_of_offloading_come_and_go(pipe, first: bool) -> None:
    unet, exact = pipe.unet, noise_of(pipe.unet)

    def offload() -> None:
        hooks.add_hook_to_module(unet, hooks.AlignDevicesHook("cpu", io_same_device=True))
        for layer in unet.modules():
            if isinstance(layer, nn.Linear):  # as sequential offloading does
                hooks.add_hook_to_module(layer, hooks.AlignDevicesHook("cpu", offload=True))

    if first:
        replace_attention_with_int8(pipe)
        offload()
    else:
        offload()
        replace_attention_with_int8(pipe)
    found = noise_of(unet)
    assert 1e-5 < error(found, exact) < 0.05
    if first:
        restore_attention(pipe)
        assert torch.equal(noise_of(unet), exact)
        hooks.remove_hook_from_module(unet, recurse=True)
    else:
        hooks.remove_hook_from_module(unet, recurse=True)
        assert torch.equal(noise_of(unet), found)
        restore_attention(pipe)
    assert torch.equal(noise_of(unet), exact)


def test_pipelines_do_not_meet(pipe) -> None:
    other = tiny_pipelines.stable_diffusion()
    exact, others = noise_of(pipe.unet), noise_of(other.unet)
    replace_attention_with_int8(pipe)
    found = noise_of(pipe.unet)
    assert torch.equal(noise_of(other.unet), others)
    replace_attention_with_int8(other, precision_mode="aggressive")
    assert torch.equal(noise_of(pipe.unet), found) and not torch.equal(noise_of(other.unet), others)
    restore_attention(pipe)
    assert torch.equal(noise_of(pipe.unet), exact) and not torch.equal(noise_of(other.unet), others)
    q = torch.randn(1, 2, 9, 32)  # no hook remains for other code
    assert torch.equal(
        functional.scaled_dot_product_attention(q, q, q), functional.scaled_dot_product_attention(q, q, q)
    )


def test_failed_calls_leave_nothing_behind(pipe) -> None:
    exact = noise_of(pipe.unet)
    replace_attention_with_int8(pipe)
    found = noise_of(pipe.unet)
    with pytest.raises(RuntimeError):
        pipe.unet(torch.randn(1, 3, 8, 8), 5, torch.randn(1, 8, tiny_pipelines.WIDTH))
    assert torch.equal(noise_of(pipe.unet), found)
    block = pipe.unet.mid_block.attentions[0].transformer_blocks[0]
    block.attn1(torch.randn(1, 4, 64))  # without a denoiser there is no timestep
    assert "outside of its denoiser" in str(attention_report(pipe))
    restore_attention(pipe)
    assert torch.equal(noise_of(pipe.unet), exact)


def test_models_are_saved_loaded_and_copied_as_they_were(pipe, tmp_path) -> None:
    names, kind = set(pipe.unet.state_dict()), type(pipe.unet)
    replace_attention_with_int8(pipe)
    assert set(pipe.unet.state_dict()) == names and isinstance(pipe.unet, kind)
    found = noise_of(pipe.unet)
    pipe.unet.save_pretrained(tmp_path)
    loaded = diffusers.UNet2DConditionModel.from_pretrained(tmp_path)
    copied = copy.deepcopy(pipe.unet)
    assert torch.equal(noise_of(copied), found)
    restore_attention(pipe)
    assert type(pipe.unet) is kind
    assert torch.equal(noise_of(loaded), noise_of(pipe.unet)) and torch.equal(noise_of(copied), found)
    restore_attention(copied)
    assert torch.equal(noise_of(copied), noise_of(pipe.unet))


@pytest.fixture
def counted() -> Iterator[Any]:
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    yield CompileCounter()
    torch._dynamo.reset()


@pytest.mark.parametrize("first", [True, False])
def test_compiled_denoisers_compute_in_int8(counted, first: bool) -> None:
    pipe = tiny_pipelines.pixart()
    pipe.transformer.transformer_blocks = pipe.transformer.transformer_blocks[:1]

    def noise(*timesteps: float) -> Tensor:
        generator = torch.Generator().manual_seed(3)
        sample, text = torch.randn(2, 4, 8, 8, generator=generator), torch.randn(2, 8, 32, generator=generator)
        with torch.no_grad():
            return pipe.transformer(
                sample, text, torch.tensor(timesteps), added_cond_kwargs={"resolution": None, "aspect_ratio": None}
            )[0]

    exact = noise(500, 500)
    replace_attention_with_int8(pipe, precision_mode="auto")
    found = [noise(t, 500) for t in (10, 990)]
    if not first:
        restore_attention(pipe)
    pipe.transformer = torch.compile(pipe.transformer, backend=counted, fullgraph=True)
    if not first:
        assert error(noise(500, 500), exact) < tolerances.SAME_FLOAT
        replace_attention_with_int8(pipe, precision_mode="auto")
    for timestep, expected in zip((10, 990), found, strict=True):
        assert error(noise(timestep, 500), expected) < tolerances.SAME_FLOAT
    assert counted.frame_count == 1 + (not first)
    if first:
        restore_attention(pipe)
        assert error(noise(500, 500), exact) < tolerances.SAME_FLOAT


def test_repeated_blocks_are_compiled_once(pipe, counted) -> None:
    replace_attention_with_int8(pipe)
    found = noise_of(pipe.unet)
    pipe.unet.compile_repeated_blocks(backend=counted, fullgraph=True)
    assert error(noise_of(pipe.unet), found) < tolerances.SAME_FLOAT
    # Four blocks of two widths.
    assert counted.frame_count <= 2


# Calibrated -----------------------------------------------------------------------------------------------------------


def test_a_bundle_has_scales_and_modes(digits, digits_build) -> None:
    model = replace(digits, denoiser=copy.deepcopy(digits.denoiser))  # the fixture is shared
    manifest = read_manifest(digits_build.bundle)
    inputs = model.example(0, {"batch": 4, "height": 8, "width": 8})
    inputs["timestep"] = torch.tensor([10.0, 300.0, 600.0, 990.0])
    expected = TorchInt8(model, digits_build.bundle, manifest)(**inputs)
    with torch.no_grad():
        exact = model.denoiser(**inputs)
        replace_attention_with_int8(model.denoiser, calibration=digits_build.bundle)
        found = model.denoiser(**inputs)
        restore_attention(model.denoiser)
        replace_attention_with_int8(model.denoiser, calibration=digits_build.bundle, precision_mode="aggressive")
        other = model.denoiser(**inputs)
    assert error(found, expected) < tolerances.SAME_FLOAT < error(found, exact)
    assert not torch.equal(other, found)
    assert len(attention_report(model.denoiser).replaced) == len(manifest.sites)


def calibrate(pipe: Any, path: Any, *, prefix: str = "unet.", bins: int = 4) -> Calibration:
    """A calibration of a U-Net, as `trtconvert calibrate` writes it."""
    names: set[str] = set()
    observer: RangeObserver | None = None

    def seen(call: SiteCall) -> Tensor:
        names.add(call.name)
        return call.exact() if observer is None else observer(call)

    for last in (False, True):
        for timestep in (50.0, 600.0):
            steps = torch.full((2,), timestep)
            with Interception(pipe.unet, attention_hooks(seen), steps):
                noise_of(pipe.unet, steps)
        if not last:
            observer = RangeObserver(names, 1000.0, bins)
    assert observer is not None
    rows = observer.finish()
    means = offsets(rows, bins)
    tables = {
        prefix + site: tables_of_ranges(ranges_of_maxima(rows[site], means[site], 1.0, bins), means[site])
        for site in rows
    }
    numbers = dict.fromkeys(("samples", "batch", "steps", "seed"), 1)
    provenance = Provenance(
        model="tiny", weights="", data="denoise", data_hash="", percentile=100, statistic="batch-max", bins=bins,
        timestep_max=1000.0, observed=[1] * bins, versions={}, **numbers,
    )  # fmt: skip
    made = Calibration(tables, provenance)
    made.save(path)
    return made


def test_a_calibration_file_has_scales(pipe, tmp_path, monkeypatch) -> None:
    path = tmp_path / "calibration.safetensors"
    made = calibrate(pipe, path)
    exact = noise_of(pipe.unet)
    replace_attention_with_int8(pipe, calibration=path, precision_mode="aggressive")
    from trtconvert.attention import measured

    monkeypatch.setattr(measured, "attention", None)  # nothing is measured
    assert 1e-5 < error(noise_of(pipe.unet), exact) < 0.1
    restore_attention(pipe)
    alone = replace_attention_with_int8(pipe.unet, calibration=path, precision_mode="aggressive")
    assert alone is pipe.unet and len(attention_report(pipe.unet).replaced) == len(made.tables)
    restore_attention(pipe.unet)
    # With some of the sites, the others stay and are reported.
    site = next(iter(made.tables))
    Calibration({site: made.tables[site]}, made.provenance).save(path)
    replace_attention_with_int8(pipe, calibration=path)
    assert attention_report(pipe).replaced == (site,)
    assert set(attention_report(pipe).left.values()) == {"the calibration has no scales for it"}


def test_calibrations_of_other_models_are_refused(pipe, tmp_path, digits_build) -> None:
    path = tmp_path / "calibration.safetensors"
    made = calibrate(pipe, path, prefix="transformer.")
    kind, exact = type(pipe.unet), noise_of(pipe.unet)
    for given, named in (
        (path, "calibrated on another model"),
        (digits_build.bundle, "calibrated on another model"),
        (tmp_path, "is not a bundle"),
        (tmp_path / "none.safetensors", "is not a calibration"),
    ):
        with pytest.raises(UserError, match=named):
            replace_attention_with_int8(pipe, calibration=given)
        assert type(pipe.unet) is kind and torch.equal(noise_of(pipe.unet), exact)
    site = next(iter(made.tables))
    halved = {name: x[:, :1].repeat(1, 3, *[1] * (x.dim() - 2)).contiguous() for name, x in made.tables[site].items()}
    Calibration({site.replace("transformer.", "unet."): halved}, made.provenance).save(path)
    with pytest.raises(UserError, match="3 heads"):
        replace_attention_with_int8(pipe, calibration=path)


# Refused pipelines and sites that are left ----------------------------------------------------------------------------


def test_a_second_replacement_is_refused(pipe) -> None:
    replace_attention_with_int8(pipe)
    found = noise_of(pipe.unet)
    shared = tiny_pipelines.stable_diffusion()
    shared.unet = pipe.unet
    for again in (pipe, pipe.unet, shared):
        with pytest.raises(UserError, match="is INT8 already") as refusal:
            replace_attention_with_int8(again, precision_mode="aggressive")
    assert torch.equal(noise_of(pipe.unet), found)
    assert "restore_attention" in refusal.value.remedy
    restore_attention(pipe)
    replace_attention_with_int8(pipe, precision_mode="aggressive")


class Plain(nn.Module):
    """A denoiser without attention."""

    def forward(self, x: Tensor, timestep: Tensor) -> Tensor:
        return x * timestep


@pytest.mark.parametrize("given", [nn.Linear(3, 3), object(), "pipeline", None])
def test_models_without_attention_are_refused(given) -> None:
    for act in (replace_attention_with_int8, restore_attention, attention_report):
        with pytest.raises(UserError, match="no attention to replace"):
            act(given)
    with pytest.raises(UserError, match="no attention that can be INT8"):
        replace_attention_with_int8(Plain())


@pytest.mark.parametrize("attention", ["fused", "unfused"])
def test_a_forward_that_calls_attention_itself_or_writes_it_out_is_replaced(attention: str) -> None:
    model = tiny_models.Tiny(attention).eval()
    x = torch.randn(2, *tiny_models.SHAPE, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        exact = model(x, torch.tensor([5.0, 900.0]))
        replace_attention_with_int8(model)
        found = model(x, timestep=torch.tensor([5.0, 900.0]))
        assert attention_report(model).replaced == ("model",)
        assert 0 < error(found, exact) < 0.05
        with torch.autocast("cpu", torch.bfloat16):
            cast = model(x, torch.tensor([5.0, 900.0]))
        assert not attention_report(model).exceptions
        restore_attention(model)
        assert torch.equal(model(x, torch.tensor([5.0, 900.0])), exact)
        with torch.autocast("cpu", torch.bfloat16):
            expected = model(x, torch.tensor([5.0, 900.0]))
        assert cast.dtype == expected.dtype and 0 < error(cast, expected) < 0.05


def test_other_refusals_change_nothing(pipe) -> None:
    kind = type(pipe.unet)
    with pytest.raises(UserError, match="was not replaced"):
        restore_attention(pipe)
    with pytest.raises(UserError, match="was not replaced"):
        attention_report(pipe)
    for options, named in (
        ({"precision_mode": "int3"}, "no such precision mode"),
        ({"include": ["*.attn7"]}, "matches no attention"),
        ({"exclude": ["*"]}, "no attention that can be INT8"),
    ):
        with pytest.raises(UserError, match=named):
            replace_attention_with_int8(pipe, **options)
        assert type(pipe.unet) is kind
    pipe.scheduler = diffusers.ScoreSdeVeScheduler()
    with pytest.raises(UserError, match="noise of the timesteps is not known"):
        replace_attention_with_int8(pipe, precision_mode="auto")


def test_patterns_choose_modules(pipe) -> None:
    exact = noise_of(pipe.unet)
    replace_attention_with_int8(pipe, include=["*.attn1"], exclude=["unet.mid_block.*"])
    noise_of(pipe.unet)
    report = attention_report(pipe)
    assert len(report.replaced) == 3 and all(name.endswith("attn1") for name in report.replaced)
    assert set(report.left.values()) == {"it is not included"} and len(report.left) == 5
    assert error(noise_of(pipe.unet), exact) > 0
    restore_attention(pipe)


@pytest.mark.parametrize(("heads", "replaced"), [(2, 8), (1, 6)])
def test_heads_of_other_sizes_are_filled_up_or_left_and_told_of(heads: int, replaced: int) -> None:
    """16 and 32 channels; or 320, which the kernels do not take."""
    widths = (32, 64) if heads == 2 else (32, 320)
    made = tiny_pipelines.randomised(
        diffusers.UNet2DConditionModel(
            block_out_channels=widths, layers_per_block=1, sample_size=8, norm_num_groups=8, cross_attention_dim=32,
            down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
            attention_head_dim=heads,
        )
    )  # fmt: skip
    exact = noise_of(made)
    replace_attention_with_int8(made)
    assert 0 < error(noise_of(made), exact) < 0.05
    report = attention_report(made)
    assert len(report.replaced) == replaced and not report.exceptions
    assert set(report.left.values()) <= {"head_dim 320 is more than 256"} and len(report.left) == 8 - replaced


class Second(nn.Module):
    """Two attentions; the second has options."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def forward(self, x: Tensor, timestep: Tensor) -> Tensor:
        y = functional.scaled_dot_product_attention(x, x, x)
        return functional.scaled_dot_product_attention(y, y, y, **self.options)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"is_causal": True}, "it is causal"),
        ({"scale": 0.0}, "its scores have the factor 0, positive ones are needed"),
        ({"scale": -0.2}, "its scores have the factor -0.2, positive ones are needed"),
    ],
    ids=str,
)
def test_calls_that_cannot_be_int8_are_computed_as_before_and_told_of(options: dict[str, Any], reason: str) -> None:
    model = Second(**options)
    x = torch.randn(1, 2, 40, 32, generator=torch.Generator().manual_seed(0))
    exact = model(x, torch.tensor(5))
    replace_attention_with_int8(model)
    assert 0 < error(model(x, torch.tensor(5)), exact) < 0.05
    assert attention_report(model).exceptions == {"model": reason}
    assert f"some calls: {reason}" in str(attention_report(model))


def test_modules_that_never_call_attention_are_told_of(pipe) -> None:
    """Processors of other kinds."""

    def mean(attn, hidden_states, **_):
        return hidden_states - hidden_states.mean(1, keepdim=True)

    pipe.unet.mid_block.attentions[0].transformer_blocks[0].attn1.processor = mean
    replace_attention_with_int8(pipe)
    assert len(attention_report(pipe).replaced) == SITES["stable_diffusion"]
    noise_of(pipe.unet)
    report = attention_report(pipe)
    assert list(report.left.values()) == ["it has computed no attention"]
    assert len(report.replaced) == SITES["stable_diffusion"] - 1


def test_attention_that_processors_write_out_is_replaced(unet) -> None:
    """diffusers' processors from before torch's function."""
    from diffusers.models.attention_processor import AttnProcessor

    replace_attention_with_int8(unet)
    fused = noise_of(unet)
    restore_attention(unet)
    unet.set_attn_processor(AttnProcessor())
    exact = noise_of(unet)
    replace_attention_with_int8(unet)
    assert error(noise_of(unet), fused) < 1e-3 < error(fused, exact)
    report = attention_report(unet)
    assert len(report.replaced) == SITES["stable_diffusion"] and not report.left and not report.exceptions


class Talking(nn.Module):
    """Two written-out attentions. The first mixes the probabilities of its heads."""

    def forward(self, x: Tensor, timestep: Tensor) -> Tensor:
        weights = (x @ x.mT).softmax(-1)
        x = functional.conv2d(weights, torch.full((2, 2, 1, 1), 0.5)) @ x
        return (x @ x.mT).softmax(-1) @ x


def test_attention_that_is_written_out_in_another_way_is_told_of() -> None:
    model = Talking()
    x = torch.randn(1, 2, 40, 32, generator=torch.Generator().manual_seed(0))
    exact = model(x, torch.tensor(5))
    replace_attention_with_int8(model)
    assert 0 < error(model(x, torch.tensor(5)), exact) < 0.05
    reason = "conv2d stands between its softmax and the product with values"
    assert attention_report(model).exceptions == {"model": reason}
