"""Quantised rows on a GPU against float64."""

from __future__ import annotations

import math

import pytest
import torch
from int8_rows import (
    DYNAMIC,
    STATIC,
    WEIGHT_ONLY,
    Rows,
    Table,
    are_steps_of,
    blank,
    dynamic_scale,
    equalised,
    params,
    quantised,
    run,
    table,
)
from torch import Tensor

pytestmark = pytest.mark.gpu

INVALID_ARGUMENT = 1
NAN, INF = math.nan, math.inf


def draw(rows: int, channels: int, dtype: torch.dtype = torch.float16) -> tuple[Tensor, Tensor, Tensor]:
    """x, factor and offset."""
    generator = torch.Generator("cuda").manual_seed(rows * channels)
    x = torch.randn(rows, channels, generator=generator, device="cuda")
    factor = torch.rand(channels, generator=generator, device="cuda") + 0.5
    return x.to(dtype), factor, torch.randn(channels, generator=generator, device="cuda")


def untouched(out: Rows, channels: int) -> bool:
    """True if the memory behind INT8 rows is unchanged."""
    return bool((out.payload.flatten()[len(out.scale) * channels :] == 0x80).all())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "channels", [16, 48, 320, 512, 528, 1280, 2048, 2064, 3072, 5120, 8192, 12288, 16384, 16400, 20480, 49152, 65536]
)
@pytest.mark.parametrize("rows", [1, 3, 129])
def test_rows_by_their_own_scale(rows, channels, dtype):
    """Every number of threads and vectors of a row."""
    x, factor, offset = draw(rows, channels, dtype)
    for of in ((None, None), (factor, None), (None, offset), (factor, offset)):
        out, xhat = quantised(x, None, *of), equalised(x, *of)
        assert torch.allclose(out.scale, dynamic_scale(xhat), rtol=1e-6, atol=0)
        assert are_steps_of(out.int8(channels), xhat, out.scale)
        assert (out.int8(channels).abs().amax(1) == 127).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("channels", [48, 3072, 20480])
def test_the_timestep_selects_mode_and_scale(channels, dtype):
    """Three samples of a call; the mode is the most careful one."""
    x, factor, offset = draw(3 * 5, channels, dtype)
    xhat, scales = equalised(x, factor, offset), [0.01, 0.02, 0.04, 0.08]
    modes = [WEIGHT_ONLY, DYNAMIC, STATIC, STATIC]

    def of(*timestep: float) -> Rows:
        return quantised(x, table(modes, list(timestep), scales), factor, offset)

    static = of(999.0, 500.0, 1e9)
    expected = torch.tensor([0.08, 0.04, 0.08], device="cuda").repeat_interleave(5)
    assert torch.equal(static.scale, expected) and untouched(static, channels)
    assert are_steps_of(static.int8(channels), xhat, expected)
    dynamic = of(999.0, 250.0, 500.0)
    assert torch.allclose(dynamic.scale, dynamic_scale(xhat), rtol=1e-6, atol=0)
    assert are_steps_of(dynamic.int8(channels), xhat, dynamic.scale) and untouched(dynamic, channels)
    for timestep in ((249.9, 999.0, 500.0), (-5.0, 250.0, 999.0), (0.0, 0.0, 0.0)):
        wide = of(*timestep)
        assert (wide.scale == -1).all()
        assert torch.equal(wide.wide(dtype), xhat.to(dtype))


@pytest.mark.parametrize("mode", [WEIGHT_ONLY, DYNAMIC, STATIC])
def test_one_mode_needs_no_table_of_modes(mode):
    x, _, _ = draw(4, 320)
    scale = torch.tensor([0.03], device="cuda")
    out = quantised(x, Table(1 << mode, x_scale=scale if mode == STATIC else None))
    if mode == WEIGHT_ONLY:
        assert torch.equal(out.wide(x.dtype), x) and (out.scale == -1).all()
    else:
        assert torch.allclose(out.scale, dynamic_scale(x.float()) if mode == DYNAMIC else scale.expand(4))
        assert are_steps_of(out.int8(320), x.float(), out.scale)


@pytest.mark.parametrize("channels", [64, 3072])
def test_unusable_timesteps_scales_and_modes_give_nan(channels):
    """Samples by NaN timesteps or scales of mode STATIC, all of them by a mode that the set has not; the sign tells the width."""
    x, _, _ = draw(4, channels)
    modes, scales = [WEIGHT_ONLY, DYNAMIC, STATIC, STATIC], [1.0, 1.0, 0.05, NAN]

    def scale_of(*timestep: float, mode_set: int = 0) -> Tensor:
        return quantised(x, table(modes, list(timestep), scales, mode_set)).scale

    wide = scale_of(NAN, 300.0)  # a NaN has bin 0
    assert wide[:2].isnan().all() and wide[:2].signbit().all() and (wide[2:] == -1).all()
    assert scale_of(700.0, 999.0).isnan().tolist() == [False, False, True, True]
    for bad in (0.0, -1.0, INF):
        scales[3] = bad
        assert scale_of(999.0, 700.0).isnan().tolist() == [True, True, False, False]
    without = scale_of(100.0, 700.0, mode_set=1 << DYNAMIC | 1 << STATIC)
    assert without.isnan().all() and not without.signbit().any()
    modes[0] = 0
    assert scale_of(100.0, 700.0, mode_set=14).isnan().all()
    modes[0] = -5
    assert scale_of(100.0, 700.0, mode_set=14).isnan().all()


@pytest.mark.parametrize("channels", [64, 5120, 20480])
def test_rows_of_zeros_and_of_what_is_not_finite(channels):
    x, _, _ = draw(6, channels)
    x[1], x[2, 3], x[3, channels - 1], x[4, 0] = 0, NAN, INF, -INF
    out = quantised(x)
    assert out.scale[1] == 2.0**-100 and (out.int8(channels)[1] == 0).all()
    assert out.scale.isnan().tolist() == [False, False, True, True, True, False]
    static = quantised(x, Table(1 << STATIC, x_scale=torch.tensor([0.05], device="cuda")))
    assert static.scale.isnan().tolist() == [False, False, True, True, True, False]
    rows = static.int8(channels)
    assert rows[3, channels - 1] == 127 and rows[4, 0] == -127


def test_many_samples_and_timesteps_at_the_edges_of_bins():
    """More samples than a warp has threads; bins are those of attention."""
    timestep = torch.arange(0, 1000, 10, device="cuda", dtype=torch.float32)
    x, _, _ = draw(100, 64)
    scales = torch.linspace(0.02, 0.2, 100, device="cuda")
    out = quantised(x, Table(1 << STATIC, timestep, None, scales))
    assert torch.equal(out.scale, scales)
    modes = torch.full((100,), STATIC, dtype=torch.int32, device="cuda")
    modes[77] = DYNAMIC
    out = quantised(x, Table(12, timestep, modes, scales))
    assert torch.allclose(out.scale, dynamic_scale(x.float()))


def test_beyond_the_rows_nothing_is_written():
    x, _, _ = draw(9, 640)
    out = blank(9, 640, 1 << DYNAMIC)
    assert run(params(x, Table(1 << DYNAMIC), out, rows=7)) == (0, "")
    assert (out.payload[7:] == 0x80).all() and out.scale[7:].isnan().all()
    assert out.scale[:7].isfinite().all()


@pytest.mark.parametrize("starts_early", [0, 1])
def test_in_a_graph_behind_what_it_reads(starts_early):
    x = torch.empty(2048, 1280, device="cuda").half()
    start, out = torch.empty_like(x), blank(2048, 1280, 1 << DYNAMIC)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        torch.neg(start, out=x)
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(3):
                torch.neg(start, out=x)
                assert run(params(x, Table(1 << DYNAMIC), out, starts_early=starts_early)) == (0, "")
    for _ in range(3):
        start.normal_()
        torch.cuda.synchronize()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.allclose(out.scale, dynamic_scale(start.float()), rtol=1e-6, atol=0)
        assert are_steps_of(out.int8(1280), -start.float(), out.scale)


@pytest.mark.parametrize(
    ("changed", "of", "said"),
    [
        ({"struct_size": 8}, {}, "params: expected version 1 of"),
        ({"version": 2}, {}, "got version 2"),
        ({"rows": 0}, {}, "rows: expected 1..2^31 - 1, got 0"),
        ({"channels": 24}, {}, "channels: expected 16..65536 in steps of 16, got 24"),
        ({"data_type": 2}, {}, "data_type: expected 0 (float16) or 1 (bfloat16), got 2"),
        ({"starts_early": 2}, {}, "starts_early: expected 0 or 1, got 2"),
        ({}, {"mode_set": 1}, "mode_set: expected a sum of 2 (weights only), 4 (dynamic) and 8 (static), got 1"),
        ({}, {"timestep_max": 0.0}, "timestep_max: expected the positive finite timestep"),
        ({}, {"mode_set": 8}, "x_scale: expected a device pointer, got null"),
        ({}, {"mode_set": 12}, "modes: expected a device pointer, got null"),
        ({"x": 8}, {}, "x: expected a pointer aligned to 16 bytes, got 0x8"),
        ({"factor": 8}, {}, "factor: expected a pointer aligned to 16 bytes, got 0x8"),
        ({"payload": 0}, {}, "payload: expected a device pointer, got null"),
    ],
    ids=str,
)
def test_refusals_say_what_is_wrong(changed, of, said):
    x, _, _ = draw(2, 64)
    out = blank(2, 64, 1 << DYNAMIC)
    status, message = run(params(x, Table(**{"mode_set": 1 << DYNAMIC} | of), out, **changed))
    assert status == INVALID_ARGUMENT and said in message
    assert (out.payload == 0x80).all() and out.scale.isnan().all()
