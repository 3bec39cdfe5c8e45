"""Calibration, evaluation and the kernels' times on a GPU: what the CPU finds, or what a plan can read."""

from __future__ import annotations

import pytest
import torch
from found_sites import sites_to_convert
from support import WEIGHTS, Quiet, tiny_recipe, torchrun
from tolerances import SAME_ARITHMETIC, SAME_IMAGES_PSNR

from trtconvert.attention.modes import MEASURED_SCALES, Mode
from trtconvert.attention.ranges import RangeObserver
from trtconvert.attention.sites import SiteCall
from trtconvert.calib import measure
from trtconvert.calib.calibrate import calibrate
from trtconvert.calib.cost import AttentionShape, KernelCost
from trtconvert.calib.histogram import Histogram
from trtconvert.calib.probes import dot_products
from trtconvert.evaluate.metrics import psnr
from trtconvert.library import has_group_norm_kernel
from trtconvert.linear.modes import LayerMode
from trtconvert.linear.sites import Layer, TensorRef
from trtconvert.models.denoiser import on_device
from trtconvert.models.digits import digits_model
from trtconvert.recipe import AttentionSection, CalibrationSection

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("bits", [4, 6])
def test_histograms_count_the_same(bits: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 3, 70, 40, generator=generator) * 10 ** torch.randn(4, 3, 1, 40, generator=generator)
    x[0, 0, 0, :3] = torch.tensor([0.0, 1e-30, 1e30])
    row = torch.randint(0, 5, (4, 3, 1, 1), generator=generator)
    here, there = Histogram(5, bits), Histogram(5, bits)
    for part in (x, x.half().float().transpose(2, 3)):
        here.add(part, row)
        there.add(part.cuda(), row.cuda())
    assert torch.equal(here.counts, there.counts.cpu()) and int(here.counts.sum()) == 2 * x.numel()


def test_ranges_are_the_same() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(4, 2, 33, 40, generator=generator) for _ in "qkv")
    timestep = torch.tensor([1.0, 9.0, 2.0, 8.0])
    found = []
    for device in ("cpu", "cuda"):
        observer = RangeObserver(["site"], 10.0, 2)
        there = [x.to(device) for x in (q, k, v)]
        observer(SiteCall("site", *there, None, 1.0, timestep.to(device), "", lambda there=there: there[0]))
        found.append(observer.finish()["site"].tensors())
    for name, expected in found[0].items():
        if name.endswith("total"):
            torch.testing.assert_close(found[1][name], expected, rtol=SAME_ARITHMETIC, atol=1e-4)
        else:
            assert torch.equal(found[1][name], expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("numbers", [1024, 5 * 1024, 640 * 4096, 1000, 3 * 2**25], ids=str)
def testdot_products_are_summed_in_float32(dtype: torch.dtype, numbers: int) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    x, y = (torch.randn(2, numbers, generator=generator, device="cuda").to(dtype) for _ in "xy")
    y += x  # so that the products do not cancel each other
    expected = torch.stack([a.double() @ b.double() for a, b in zip(x, y, strict=True)])
    torch.testing.assert_close(dot_products(x, y).double(), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("statistic", ["batch-max", "elements", "mse"])
def test_a_model_on_the_gpu_is_calibrated_as_on_the_cpu(statistic: str, tmp_path) -> None:
    section = CalibrationSection(samples=8, batch=4, steps=6, bins=3, statistic=statistic)
    tables = []
    for device in ("cpu", "cuda"):
        model = on_device(digits_model(WEIGHTS), device)
        sites, _ = sites_to_convert(model, AttentionSection())
        tables.append(calibrate(model, section, "", sites, tmp_path / device, Quiet()).tables)
    for site, named in tables[0].items():
        for name, expected in named.items():
            # A range may fall into the neighbouring step of a histogram.
            torch.testing.assert_close(tables[1][site][name], expected, rtol=0.07, atol=1e-3)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_ranks_on_two_gpus_make_what_one_makes(tmp_path) -> None:
    recipe = tiny_recipe(tmp_path, calibration={"samples": 16, "steps": 3, "statistic": "elements"})

    def calibration(ranks: int) -> bytes:
        output = tmp_path / f"{ranks}.safetensors"
        torchrun(ranks, "calibrate", recipe, "-o", output, "--device", "cuda", "--cache", tmp_path / str(ranks))
        return output.read_bytes()

    assert calibration(2) == calibration(1)


def test_a_model_on_the_gpu_draws_the_same_samples() -> None:
    model = digits_model(WEIGHTS)
    expected = model.sample(model.denoiser, range(8), steps=10, solver="ddim")
    moved = on_device(model, "cuda")
    found = moved.sample(moved.denoiser, range(8), steps=10, solver="ddim")
    assert found.device.type == "cpu" and psnr(found, expected) > SAME_IMAGES_PSNR


def test_measured_times_are_a_table_of_costs(tmp_path) -> None:
    shapes = [AttentionShape(1, 4, n, n, 64) for n in (256, 4096)]
    done: list[int] = []
    of_layers = [(256, 512, 512), (4096, 2048, 2048)]
    of_convs = [(2, side, side, 320, 320, 3) for side in (16, 64)]
    text = measure.measure_kernels(shapes, lambda: done.append(1), of_layers, shapes[1:], of_convs)
    (tmp_path / "cost.json").write_text(text)
    in_modes = (LayerMode.EXACT, LayerMode.DYNAMIC, LayerMode.STATIC)
    cost = KernelCost.load(tmp_path / "cost.json", layer_candidates=in_modes, masks=True, caches=True, of_convs=True)
    conv_modes = (LayerMode.EXACT, LayerMode.STATIC) if has_group_norm_kernel() else (LayerMode.EXACT,)
    of_masks = len(Mode) * len(measure.DENSITIES)
    calls = len(shapes) * len(measure.CALLS) + of_masks + len(of_layers) * 3 + len(of_convs) * len(conv_modes)
    assert cost.gpu == torch.cuda.get_device_name() and len(done) == calls
    for mode in Mode:
        quarter, half, whole = (cost.masked_ratio(shapes[1], mode, density) for density in measure.DENSITIES)
        assert 0.1 < quarter < half < whole < 3
    for mode in in_modes:
        small, large = (
            cost.layer_seconds(Layer("a", "linear", k, n, rows, "a", TensorRef("a", 0, (n, k), (k, 1))), 1, mode)
            for rows, n, k in of_layers
        )
        assert 1e-6 < small < large < 1e-2
    for mode in conv_modes:
        small, large = (
            cost.layer_seconds(
                Layer(
                    "a", "conv", 320, 320, side**2, "a", TensorRef("a", 0, (320, 320, 3, 3), (2880, 9, 3, 1)),
                    kernel=(3, 3), stride=(1, 1), padding=(1, 1), normed=True,
                ),
                2,
                mode,
            )
            for side in (16, 64)
        )  # fmt: skip
        assert 1e-6 < small < large < 1e-2
    for mode in Mode:
        short, long = (cost.seconds(shape, mode) for shape in shapes)
        assert 1e-6 < short < long < 1e-2
    scalings = {cost.scaling(shape, [mode]) for shape in shapes for mode in MEASURED_SCALES}
    assert scalings <= {"calibrated", "dynamic"}
    both = [cost.seconds(shapes[1], Mode.PRECISION, scaling) for scaling in ("calibrated", "dynamic")]
    assert max(both) < 2 * min(both)
