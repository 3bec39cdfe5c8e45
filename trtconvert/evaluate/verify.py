"""Measures the figures that the gates of a build check: samples, sites, layers and the exported arithmetic."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trtconvert.attention.reference import timestep_bin
from trtconvert.attention.sites import SiteCall, own_channels
from trtconvert.bars import Steps
from trtconvert.bundle import ComponentRecord, TensorRecord
from trtconvert.calib import shared_drawing
from trtconvert.calib.data import SITE_STEPS_PER_BIN, batches_of
from trtconvert.calib.distributed import ALONE, Ranks
from trtconvert.diffusion_model import Denoiser, DiffusionModel
from trtconvert.evaluate.metrics import decibels
from trtconvert.linear.sites import LayerCall
from trtconvert.models.cuda_graphs import graphed
from trtconvert.models.denoiser import intercepted
from trtconvert.models.drawings import with_progress
from trtconvert.noise_input import at_place, place_of
from trtconvert.quant.forward import Int8Layers, Int8Sites
from trtconvert.recipe import VerifySection
from trtconvert.wrapped import begin

BATCH = 16
"""Samples drawn at once. Samples do not depend on it."""

_MOST_NUMBERS = 2**25
"""Numbers that are summed at once."""


def draw(model: DiffusionModel, denoiser: Denoiser, section: VerifySection, bar: Steps, ranks: Ranks = ALONE) -> Tensor:
    """Draws the samples of the recipe's verify section, [samples, C, H, W] in [0, 1], see `shared_drawing.draw`. Each batch is a
    step of the bar."""
    seeds = range(section.seed, section.seed + section.samples)
    return shared_drawing.draw(
        model, denoiser, seeds, bar, ranks, batch=BATCH, steps=section.steps, solver=section.sampler
    )


def psnr(images: Tensor, expected: Tensor) -> Tensor:
    """Returns the PSNR in dB of each image in [0, 1]. [N, C, H, W] twice → [N]."""
    return decibels((images - expected).square().flatten(1).mean(1))


Sqnr = dict[str, list[float | None]]
"""By site or layer, dB of each timestep bin."""


def output_sqnr(
    model: DiffusionModel, sites: Int8Sites, layers: Int8Layers, bins: int, seed: int, samples: int, bar: Steps
) -> tuple[Sqnr, Sqnr]:
    """Measures the signal to quantisation noise of each site and layer in dB, by timestep bin.

    Each site and layer sees the exact inputs of the full-precision model. None for bins without a step, NaN where the INT8 or the
    exact output is not finite. Each batch is a step of the bar.
    """
    model = with_progress(model, bar)
    of_sites, of_layers = _Noise(sites.tables, bins), _Noise(layers.tables, bins)

    def attend(call: SiteCall) -> Tensor:
        exact = call.exact()
        if call.name in sites.tables:
            index = timestep_bin(call.timestep, sites.timestep_max, bins)
            of_sites.add(call.name, index, own_channels(sites.attention(call), exact), exact)
        return exact

    def compute(call: LayerCall) -> Tensor:
        exact = call.exact()
        if call.name in layers.tables:
            index = timestep_bin(call.timestep, layers.timestep_max, bins)
            rows = (x.reshape(len(index), -1) for x in (layers.output(call), exact))
            of_layers.add(call.name, index, *rows)
        return exact

    steps = min(SITE_STEPS_PER_BIN * bins, len(model.sigmas))  # short schedules have fewer
    denoiser: Denoiser = intercepted(model, attend, compute if layers.tables else None)
    if not layers.delta_scales:
        denoiser = graphed(model, denoiser, counts=True)
    with torch.no_grad():
        for batch in batches_of(samples, BATCH):
            seeds = [seed + i for i in batch]
            layers.reset_cache()
            model.sample(denoiser, seeds, steps=steps, solver="ddim")
            bar.step()
    return of_sites.decibels(), of_layers.decibels()


class _Noise:
    """Sums of squared outputs and errors, by name and timestep bin."""

    def __init__(self, names: Iterable[str], bins: int) -> None:
        self._signal = {name: torch.zeros(bins, dtype=torch.float64) for name in names}
        self._noise = {name: torch.zeros(bins, dtype=torch.float64) for name in self._signal}

    def add(self, name: str, index: Tensor, got: Tensor, exact: Tensor) -> None:
        """Adds a call.

        Args:
            index: [B] bins; got, exact: [B, …].
        """
        index, width = index.to(exact.device), max(1, _MOST_NUMBERS // len(exact))
        for sums in (self._noise, self._signal):
            sums[name] = sums[name].to(exact.device)  # copies only once
        for part, of_exact in zip(got.flatten(1).split(width, 1), exact.flatten(1).split(width, 1), strict=True):
            for sums, x in ((self._signal, of_exact), (self._noise, part.float() - of_exact)):
                norms = torch.linalg.vector_norm(x, dim=1, dtype=torch.float32)
                sums[name].index_add_(0, index, norms.double().square())

    def decibels(self) -> Sqnr:
        def of(signal: float, noise: float) -> float | None:
            if not signal:
                return None
            if not math.isfinite(signal + noise):
                return math.nan
            return 10 * math.log10(signal / max(noise, signal * 1e-12))

        return {
            name: [of(*both) for both in zip(signal.tolist(), self._noise[name].tolist(), strict=True)]
            for name, signal in self._signal.items()
        }


def widened(component: ComponentRecord) -> ComponentRecord:
    """Returns the record of a component's copy in FP32."""

    def wide(specs: list[TensorRecord]) -> list[TensorRecord]:
        return [s.model_copy(update={"dtype": "float32"}) if s.dtype == "float16" else s for s in specs]

    return component.model_copy(
        update={part: wide(getattr(component, part)) for part in ("inputs", "outputs", "caches")}
    )


def next_step(model: DiffusionModel, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns inputs of the step after `inputs`: a little less noise."""
    x, timestep = model.inputs[0].name, inputs[model.timestep_input]
    place = place_of(model.noise_input, timestep)
    moved = place * 0.9 if model.timesteps_fall else place + (model.timestep_max - place) * 0.1
    moved = at_place(model.noise_input, moved)
    return {**inputs, x: inputs[x] * 0.98, model.timestep_input: moved.to(timestep.dtype)}


def in_steps(denoiser: Denoiser, steps: Sequence[Mapping[str, Tensor]]) -> Tensor:
    """Runs consecutive steps from reset caches, and concatenates the outputs."""
    begin(denoiser)
    return torch.cat([denoiser(**inputs) for inputs in steps])


def lowering_difference(
    function: Path, native: Path, inputs: Mapping[str, Tensor], min_sqnr: float
) -> tuple[float, float]:
    """Compares two lowerings of a model on ONNX Runtime by Polygraphy.

    Returns:
        The mean absolute difference of the outputs, and the limit that keeps `min_sqnr` dB below the output's own mean.
    """
    import onnx_ir as ir
    import onnxruntime
    from polygraphy.backend.onnxrt import OnnxrtRunner, SessionFromOnnx
    from polygraphy.comparator import Comparator, SimpleCompareFunc
    from polygraphy.logger import G_LOGGER

    from trtconvert.export.float32 import holds_bfloat16, in_float32
    from trtconvert.runtime.session import as_numpy

    onnxruntime.set_default_logger_severity(3)  # hides warnings about constant folding
    paths, wide = [function, native], holds_bfloat16(ir.load(function))
    feed = {name: as_numpy(x, wide) for name, x in inputs.items()}
    with ExitStack() as stack, G_LOGGER.verbosity(G_LOGGER.CRITICAL):
        if wide:
            paths = [stack.enter_context(in_float32(path)) for path in paths]
        results: Any = Comparator.run(
            [OnnxrtRunner(SessionFromOnnx(str(path)), name=path.stem) for path in paths], data_loader=[feed]
        )
        output = next(iter(results[1][1][0].values()))
        limit = float(abs(output.astype("float64")).mean()) * 10 ** (-min_sqnr / 20)
        compared = Comparator.compare_accuracy(
            results, compare_func=SimpleCompareFunc(atol=limit, rtol=0, check_error_stat="mean")
        )
    (pairs,) = compared
    ((per_output,),) = pairs.values()
    outcome = next(iter(per_output.values()))  # others are caches
    return float(outcome.mean_absdiff), limit
