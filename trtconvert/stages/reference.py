"""The stage that draws the full-precision samples that INT8 is compared with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from trtconvert.cache import Stage
from trtconvert.stages.build import Build, Source
from trtconvert.stages.common import FULL_PRECISION, RECORDED_CALLS

if TYPE_CHECKING:
    from torch import Tensor

    from trtconvert.bars import Steps
    from trtconvert.diffusion_model import Denoiser
    from trtconvert.models.recorded_calls import CallRecorder
    from trtconvert.progress import Bar


def reference_stage(build: Build, meanwhile: Callable[[], None] = lambda: None) -> Stage:
    """Draws samples in full precision for comparison with INT8. Writes the images, and a denoiser call of every timestep bin.

    Args:
        meanwhile: starts work that may run beside this stage; not called if the cache has the stage.
    """
    recipe, place = build.recipe, build.place
    section, bins = recipe.verify, recipe.calibration.bins
    drawn = section.model_dump(mode="json", include={"samples", "steps", "sampler", "seed"})
    reads = {"weights": build.weights, "dtype": recipe.model.dtype, "verify": drawn, "bins": bins} | place.reads()

    def make(folder: Path, bar: Bar) -> None:
        from safetensors.torch import save_file

        from trtconvert.calib.data import batches_of
        from trtconvert.calib.finite_calls import require_finite_samples
        from trtconvert.evaluate import verify

        meanwhile()
        bar.total(len(batches_of(section.samples, verify.BATCH)) + 1)
        with build.crew.sharing(_drawn):
            images, recorder = _drawn(build, bar)
        require_finite_samples(images)
        # Offloading leaves no room for a whole copy in FP32.
        in_float32 = place.on_gpu and place.dtype != "float32" and not place.offload
        calls = recorder.calls(lambda: _in_float32(build.source) if in_float32 else None)
        calls.save(folder / RECORDED_CALLS)
        save_file({"images": images.contiguous()}, folder / FULL_PRECISION)
        bar.step()

    return build.stage("reference", reads, make)


def _drawn(build: Build, bar: Steps) -> tuple[Tensor, CallRecorder]:
    """Returns the images, and the recorder of their calls. The recorder of rank 0 counts, because rank 0 draws the first samples.

    The recorder holds the model on the CPU, so that `Source.leave_gpu` frees the copy on the GPU.
    """
    from trtconvert.evaluate import verify
    from trtconvert.models.cuda_graphs import graphed
    from trtconvert.models.recorded_calls import CallRecorder

    source = build.source.placed()
    batch = source.inputs[0].shape[0]
    rows = source.dims[batch][1] if isinstance(batch, str) else batch
    recorder = CallRecorder(build.source.model(), build.recipe.calibration.bins, rows)
    denoiser = recorder.around(graphed(source, source.denoiser))
    return verify.draw(source, denoiser, build.recipe.verify, bar, build.ranks), recorder


def _in_float32(source: Source) -> Denoiser | None:
    """Returns the denoiser in FP32 on the GPU, alone there if the copy in the model's own type leaves too little memory."""
    from trtconvert.models.placed import denoiser_in_float32, fits_in_float32

    if not fits_in_float32(source.model()):
        source.leave_gpu()
    return denoiser_in_float32(source.model())
