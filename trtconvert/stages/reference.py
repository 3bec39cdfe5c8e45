"""The stage that draws the full-precision samples that INT8 is compared with."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from trtconvert.cache import Stage
from trtconvert.stages.build import Build
from trtconvert.stages.common import FULL, VERIFY

if TYPE_CHECKING:
    from trtconvert.progress import Bar


def reference_stage(build: Build) -> Stage:
    """Draws samples in full precision for comparison with INT8. Writes the images, and a denoiser call of every timestep bin."""
    recipe, place = build.recipe, build.place
    section, bins = recipe.verify, recipe.calibration.bins
    drawn = section.model_dump(mode="json", include={"samples", "steps", "sampler", "seed"})
    reads = {"weights": build.weights, "dtype": recipe.model.dtype, "verify": drawn, "bins": bins} | place.reads()

    def make(folder: Path, bar: Bar) -> None:
        from safetensors.torch import save_file

        from trtconvert.calib.data import batches_of
        from trtconvert.evaluate import verify
        from trtconvert.evaluate.recorded_calls import CallRecorder
        from trtconvert.models.cuda_graphs import graphed
        from trtconvert.models.placed import denoiser_in_float32

        source = build.source.placed()
        bar.total(len(batches_of(section.samples, verify.BATCH)) + 1)
        batch = source.inputs[0].shape[0]
        rows = source.dims[batch][1] if isinstance(batch, str) else batch
        recorder = CallRecorder(source, bins, rows)
        images = verify.draw(source, recorder.around(graphed(source, source.denoiser)), section, bar)
        # Offloading leaves no room for a whole copy in FP32.
        in_float32 = place.on_gpu and place.dtype != "float32" and not place.offload
        calls = recorder.calls(lambda: denoiser_in_float32(build.source.model()) if in_float32 else None)
        calls.save(folder / VERIFY)
        save_file({"images": images.contiguous()}, folder / FULL)
        bar.step()

    return build.stage("reference", reads, make)
