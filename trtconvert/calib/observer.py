"""Observation of a model's attention: `RangeObserver` at every site while a denoiser runs on calibration data."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from trtconvert.attention.ranges import RangeObserver, Rows
from trtconvert.diffusion_model import Denoiser, DiffusionModel
from trtconvert.errors import UserError
from trtconvert.models.denoiser import intercepted

Drive = Callable[[Denoiser], None]
"""Calls a denoiser on calibration data, all of it or a part."""


def observe(model: DiffusionModel, drive: Drive, *, sites: Sequence[str], bins: int) -> dict[str, Rows]:
    """Returns the rows of the named sites while `drive` runs the model once.

    Raises:
        UserError: no call was made, or NaN or Inf at a site; the message names the first.
    """
    observer = RangeObserver(sites, model.timestep_max, bins)
    with torch.no_grad():
        drive(intercepted(model, observer))
    rows = observer.finish()
    if not rows:
        raise nothing_observed()
    return rows


def nothing_observed(left_out: Sequence[str] = ()) -> UserError:
    """Returns the error for a calibration in which no site was called.

    Args:
        left_out: the skipped bad samples.
    """
    return UserError(
        "there is nothing to calibrate on",
        expected="at least one batch of denoiser inputs",
        got=f"{len(left_out)} bad samples, the first: {left_out[0]}" if left_out else "none",
        remedy="raise calibration.samples, or set calibration.data to data that the model accepts",
    )
