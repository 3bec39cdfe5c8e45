"""Quality loss of INT4 QKᵀ: samples of a shipped model against full precision, beside INT8 `precision`.

    python bench/int4.py [--model digits-dit | emoji-dit] [--samples 16] [--steps 20] [--batch 16] [--device cuda]

All attention sites of the model have scales that are measured in each call; layers are in full precision. Rows with a part of
the schedule have INT4 from the named timestep up (the noisier steps), and INT8 below. PSNR is of images in [0, 1], the mean
over the samples and the worst of them. Errors are those of attention's output, relative L2, on the first sample in full
precision, from the row's timestep up. INT4 is emulated on every device, so no time is printed; nothing is asserted.
"""

from __future__ import annotations

import argparse
import platform
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch
from machine import processor
from torch import Tensor

from trtconvert.attention import int4_attention, measured
from trtconvert.attention.modes import Mode
from trtconvert.attention.sites import SiteCall
from trtconvert.evaluate.verify import psnr
from trtconvert.models.denoiser import intercepted, on_device
from trtconvert.models.digits import digits_model
from trtconvert.models.emoji import emoji_model
from trtconvert.models.recorded_calls import relative_error

RECIPES = Path(__file__).parents[1] / "recipes"
MODELS = {"digits-dit": digits_model, "emoji-dit": emoji_model}

Attend = Callable[[SiteCall], Tensor]


def int8(call: SiteCall) -> Tensor:
    """Computes a call in mode `precision`. The kernels take 16 bits on a GPU, where these models are in FP32."""
    modes = torch.full((1,), int(Mode.PRECISION), dtype=torch.int32, device=call.q.device)
    q, k, v = ((x.half() if x.is_cuda else x) for x in (call.q, call.k, call.v))
    options: dict[str, Any] = {"mask": call.mask, "softmax_scale": call.scale}
    return measured.attention(q, k, v, call.timestep, modes, [Mode.PRECISION], **options).to(call.q.dtype)


def int4(**options: Any) -> Attend:
    """Returns INT4 attention with these options of `int4_attention`."""

    def attend(call: SiteCall) -> Tensor:
        return int4_attention(call.q, call.k, call.v, softmax_scale=call.scale, mask=call.mask, **options)

    return attend


PLAIN = int4()
ROWS: dict[str, tuple[float, Attend]] = {
    "INT8 (`precision`)": (0.0, int8),
    "INT4": (0.0, PLAIN),
    "INT4 from timestep 500": (500.0, PLAIN),
    "INT4 from timestep 750": (750.0, PLAIN),
    "INT4 from timestep 900": (900.0, PLAIN),
    "INT4, 16 channels a scale": (0.0, int4(group_size=16)),
    "INT4, 16 channels a scale, means of 16 queries": (0.0, int4(group_size=16, query_block=16)),
    "INT4, mean query kept": (0.0, int4(query_block=0)),
    "INT4, 128 keys a scale": (0.0, int4(key_block=128)),
}
"""By name: a timestep, and the arithmetic from this timestep up; lower timesteps are INT8."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(MODELS), default="digits-dit")
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    given = parser.parse_args()
    model = on_device(MODELS[given.model](RECIPES / f"{given.model}.safetensors"), given.device)
    errors: dict[Attend, list[tuple[float, float]]] = {attend: [] for _, attend in ROWS.values()}

    def images(first: float, attend: Attend) -> Tensor:
        seeds = list(range(given.samples))
        batches = [seeds[at : at + given.batch] for at in range(0, given.samples, given.batch)]
        denoiser = intercepted(model, lambda call: (attend if call.timestep[0] >= first else int8)(call))
        return torch.cat([model.sample(denoiser, batch, steps=given.steps, solver="ddim") for batch in batches])

    def watched(call: SiteCall) -> Tensor:
        exact = call.exact()
        for attend, seen in errors.items():
            seen.append((float(call.timestep[0]), relative_error(attend(call), exact)))
        return exact

    with torch.no_grad():
        model.sample(intercepted(model, watched), [0], steps=given.steps, solver="ddim")
        full = images(0.0, lambda call: call.exact())
        where = torch.cuda.get_device_name() if given.device == "cuda" else processor()
        print(f"{date.today()}, {where}, Python {platform.python_version()}, torch {torch.__version__}")
        print(f"{given.model}, {given.samples} samples, ddim {given.steps} steps\n")
        print(
            "| QKᵀ | PSNR, dB | worst sample | error of attention, mean | largest |\n| --- | ---: | ---: | ---: | ---: |"
        )
        for name, (first, attend) in ROWS.items():
            found = psnr(images(first, attend), full)
            seen = [error for timestep, error in errors[attend] if timestep >= first]
            mean = sum(seen) / len(seen)
            print(f"| {name} | {found.mean():.1f} | {found.min():.1f} | {mean:.4f} | {max(seen):.4f} |", flush=True)


if __name__ == "__main__":
    main()
