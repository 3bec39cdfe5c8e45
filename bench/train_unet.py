"""Trains a DDPM U-Net without classes, for measurements such as `bench/reuse.py --model DIR/unet.yaml`.

    npm pack emoji-datasource-google && tar xzf emoji-datasource-google-*.tgz
    python bench/train_unet.py --data package --out DIR
    python bench/train_unet.py --data digits --out DIR

`--data` is the unpacked package, for emoji at 32 × 32 pixels, or `digits`, scikit-learn's digits at 8 × 8. Writes to DIR
unet.safetensors (averaged weights), unet.yaml (a recipe) and unet.png (samples). Sizes are those of the published CIFAR-10 model
for emoji, for a GPU, and small ones for digits: half an hour on one core. Seeded; bit-equal weights also need the same hardware
and torch.
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

sys.path.append(str(Path(__file__).parents[1] / "recipes"))

from emoji_data import emoji_data
from train_digits_dit import augment
from train_emoji import diffusion_loss, moved, shrunk, trainings

EMOJI = {
    "channels": 128,
    "multipliers": [1, 2, 2, 2],
    "blocks": 2,
    "attention": [1],
    "steps": 4000,
    "batch": 256,
    "rate": 3e-4,
}
DIGITS = {
    "channels": 64,
    "multipliers": [1, 2],
    "blocks": 1,
    "attention": [1],
    "steps": 1500,
    "batch": 128,
    "rate": 1e-3,
}
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


def emoji_batches(package: Path, size: int, device: torch.device) -> Batch:
    data = emoji_data(package).part(held_out=False)
    images, weights = shrunk(data.images.float() / 255, size).to(device), data.weights.to(device)
    return lambda count: moved(images[torch.multinomial(weights, count, replacement=True)], 1)


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
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        # A short memory at first, or the average would hold on to the initial weights.
        decay = min(EMA_DECAY, step / (step + 10))
        for average, parameter in zip(ema.parameters(), model.parameters(), strict=True):
            average.lerp_(parameter.detach(), 1 - decay)
        if step % max(1, steps // 20) == 0:
            print(f"step {step:6d}  loss {loss.item():.4f}  {time.perf_counter() - start:.0f} s", flush=True)
    return ema


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="folder of the npm package emoji-datasource-google, or `digits`")
    parser.add_argument("--out", type=Path, required=True, help="folder for weights, recipe and samples")
    parser.add_argument("--channels", type=int, help="of the first level, a multiple of 32")
    parser.add_argument("--multipliers", type=int, nargs="+", help="of the channels, for each level")
    parser.add_argument("--blocks", type=int, help="residual blocks of a level")
    parser.add_argument("--attention", type=int, nargs="*", help="levels with attention, 0 the first")
    parser.add_argument("--steps", type=int, help="training steps")
    parser.add_argument("--rate", type=float, help="learning rate")
    parser.add_argument("--batch", type=int, help="images per training step")
    parser.add_argument("--seed", type=int, default=0, help="of weights, batches and noise")
    parser.add_argument("--device", help="where to train", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    parser.set_defaults(**(DIGITS if args.data == "digits" else EMOJI))
    args = parser.parse_args()
    device = torch.device(args.device)
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    size, channels = (8, 1) if args.data == "digits" else (ddpm_unet.IMAGE_SHAPE[1], ddpm_unet.IMAGE_SHAPE[0])
    batches = digits_batches(device) if args.data == "digits" else emoji_batches(Path(args.data), size, device)
    model = ddpm_unet.build(
        channels=args.channels,
        multipliers=args.multipliers,
        blocks=args.blocks,
        attention=args.attention,
        image_channels=channels,
    ).to(device)
    weights = args.out / "unet.safetensors"
    args.out.mkdir(parents=True, exist_ok=True)
    save_weights(train(model, batches, args.steps, args.batch, args.rate), weights, {"license": "MIT"})
    (args.out / "unet.yaml").write_text(RECIPE.format(size=size))
    drawn = on_device(ddpm_model(weights, size=size), device.type)
    with torch.no_grad():
        images = drawn.sample(drawn.denoiser, range(100), steps=50, solver="ddim")
    save_sheet(images.float(), args.out / "unet.png")


if __name__ == "__main__":
    main()
