"""Trains a small DDPM U-Net without classes on scikit-learn's digits, 8 × 8, for `bench/reuse.py --model DIR/unet.yaml`.

    python bench/train_unet.py --out DIR

Writes to DIR unet.safetensors (averaged weights), unet.yaml (a recipe) and unet.png (samples). Half an hour on one core. Seeded;
bit-equal weights also need the same hardware and torch. `recipes/train_emoji.py unet` trains the published U-Net on emoji.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from trtconvert.evaluate.classifier import digits_data
from trtconvert.evaluate.grid import save_sheet
from trtconvert.models import ddpm_unet
from trtconvert.models.checkpoint import save_weights
from trtconvert.models.ddpm import ddpm_model
from trtconvert.models.denoiser import on_device
from trtconvert.models.digits_dit import IMAGE_SHAPE

sys.path.append(str(Path(__file__).parents[1] / "recipes"))

from train_digits_dit import augment, descend
from train_emoji import diffusion_loss, trainings

EMA_DECAY = 0.9995
WARMUP, FALL = 0.05, 0.25
"""Shares of the steps, at the start and at the end, while the learning rate rises and falls."""

RECIPE = """model:
  source: trtconvert.models.ddpm:ddpm_model
  weights: unet.safetensors
  options: {{size: {size}}}
"""

Batch = Callable[[int], Tensor]
"""Returns so many training images, [B, C, S, S] in [0, 1]."""


def digits_batches(device: torch.device) -> Batch:
    images = digits_data("train")[0].to(device)
    return lambda count: augment(images[torch.randint(len(images), (count,), device=device)])


def train(model: nn.Module, batches: Batch, steps: int, count: int, rate: float) -> nn.Module:
    """Returns the model with the exponential average of its weights."""
    device = next(model.parameters()).device
    on_gpu, training = device.type == "cuda", trainings()["unet"]
    ema = copy.deepcopy(model).eval().requires_grad_(False)
    compiled = torch.compile(model.to(memory_format=torch.channels_last)) if on_gpu else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.01, betas=(0.9, 0.99), fused=on_gpu)
    schedule, start = training.noise_schedule(device), time.perf_counter()
    for step in range(1, steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, step / (WARMUP * steps), (steps + 1 - step) / (FALL * steps))
        images = batches(count) * 2 - 1
        with torch.autocast(device.type, torch.bfloat16, enabled=on_gpu):
            loss = diffusion_loss(compiled, training, schedule, images, images.new_empty(0))
        descend(loss, optimizer, model, ema, step, EMA_DECAY)
        if step % max(1, steps // 20) == 0:
            print(f"step {step:6d}  loss {loss.item():.4f}  {time.perf_counter() - start:.0f} s", flush=True)
    return ema


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for weights, recipe and samples")
    parser.add_argument("--channels", type=int, default=64, help="of the first level, a multiple of 32")
    parser.add_argument("--multipliers", type=int, nargs="+", default=[1, 2], help="of the channels, for each level")
    parser.add_argument("--blocks", type=int, default=1, help="residual blocks of a level")
    parser.add_argument("--attention", type=int, nargs="*", default=[1], help="levels with attention, 0 the first")
    parser.add_argument("--steps", type=int, default=1500, help="training steps")
    parser.add_argument("--rate", type=float, default=1e-3, help="learning rate")
    parser.add_argument("--batch", type=int, default=128, help="images per training step")
    parser.add_argument("--seed", type=int, default=0, help="of weights, batches and noise")
    parser.add_argument("--device", help="where to train", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    device = torch.device(args.device)
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    channels, size, _ = IMAGE_SHAPE
    model = ddpm_unet.build(
        channels=args.channels,
        multipliers=args.multipliers,
        blocks=args.blocks,
        attention=args.attention,
        image_channels=channels,
    ).to(device)
    weights = args.out / "unet.safetensors"
    args.out.mkdir(parents=True, exist_ok=True)
    save_weights(train(model, digits_batches(device), args.steps, args.batch, args.rate), weights, {"license": "MIT"})
    (args.out / "unet.yaml").write_text(RECIPE.format(size=size))
    drawn = on_device(ddpm_model(weights, size=size), device.type)
    with torch.no_grad():
        images = drawn.sample(drawn.denoiser, range(100), steps=50, solver="ddim")
    save_sheet(images.float(), args.out / "unet.png")


if __name__ == "__main__":
    main()
