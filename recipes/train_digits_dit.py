"""Trains the two networks that ship with trtconvert: the digits DiT and the classifier that judges its samples.

    python recipes/train_digits_dit.py --out DIR

writes digits-dit.safetensors, digits-classifier.safetensors and samples.png to DIR, and prints the classifier's accuracy on
held-out and on generated digits. The defaults made the shipped weights, in 75 seconds on one H200; a CPU takes hours, but 700
steps of 128 images already give legible digits. Seeded; bit-equal weights also need the same hardware and torch.
"""

from __future__ import annotations

import argparse
import copy
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trtconvert.attention.schedules import NoiseSchedule, ddpm_betas
from trtconvert.evaluate.classifier import DigitsClassifier, accuracy, digits_data
from trtconvert.evaluate.grid import save_sheet
from trtconvert.models.checkpoint import save_weights
from trtconvert.models.digits_dit import (
    BETA_SCHEDULE,
    CLASSES,
    IMAGE_SHAPE,
    NULL_LABEL,
    PREDICTION,
    TIMESTEPS,
    DigitsDiT,
)
from trtconvert.models.samplers import initial_noise, sample

EMA_DECAY = 0.999
LABEL_DROPOUT = 0.1
LEARNING_RATE, WEIGHT_DECAY, WARMUP_STEPS = 1e-3, 0.05, 200


def augment(images: Tensor) -> Tensor:
    """A random small rotation, scaling and shift of each image, [B, 1, 8, 8] in [0, 1].

    There are 1437 training images for 1.85 million parameters: this keeps the model from learning them by heart.
    """
    batch, device = len(images), images.device
    angle = torch.randn(batch, device=device) * 0.08  # about 5 degrees
    zoom = 1 + torch.randn(batch, device=device) * 0.04
    shift = torch.randn(batch, 2, device=device) * 0.06  # a quarter of a pixel
    cos, sin = angle.cos() * zoom, angle.sin() * zoom
    affine = torch.stack([torch.stack([cos, -sin, shift[:, 0]], 1), torch.stack([sin, cos, shift[:, 1]], 1)], 1)
    grid = F.affine_grid(affine, list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, mode="bicubic", align_corners=False).clamp(0, 1)


def descend(
    loss: Tensor, optimizer: torch.optim.Optimizer, model: nn.Module, ema: nn.Module, step: int, decay: float
) -> None:
    """One step of the optimizer with clipped gradients, and of the exponential average of the weights; step: from 1."""
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    # A short memory at first, or the average would hold on to the initial weights.
    decay = min(decay, step / (step + 10))
    for average, parameter in zip(ema.parameters(), model.parameters(), strict=True):
        average.lerp_(parameter.detach(), 1 - decay)


def train_classifier(images: Tensor, labels: Tensor, steps: int) -> DigitsClassifier:
    classifier = DigitsClassifier().to(images.device)
    optimizer = torch.optim.AdamW(classifier.parameters(), lr=2e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        index = torch.randint(len(images), (128,), device=images.device)
        loss = F.cross_entropy(classifier(augment(images[index])), labels[index])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return classifier.eval()


def v_loss(model: nn.Module, schedule: NoiseSchedule, images: Tensor, labels: Tensor) -> Tensor:
    """Mean squared error of the predicted v at one uniform random timestep per image of [B, 1, 8, 8] in [-1, 1].

    Source: Salimans and Ho 2022, arXiv 2202.00512, section 4 ("SNR+1" weighting).
    """
    timestep = torch.rand(len(images), device=images.device, dtype=torch.float64) * (TIMESTEPS - 1)
    sigma = schedule.sigma(timestep)[:, None, None, None]
    signal = (1 + sigma**2).rsqrt()
    noise = torch.randn_like(images)
    x = (signal * (images + sigma * noise)).float()
    v = (signal * (noise - sigma * images)).float()
    return F.mse_loss(model(x, timestep.float(), labels).float(), v)


def train_dit(train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor], steps: int, batch: int) -> DigitsDiT:
    """Trains on the first pair of images [N, 1, 8, 8] in [0, 1] and labels [N]; prints the loss on the second.

    Returns:
        The model with the exponential average of its weights.
    """
    images, labels = train
    device = images.device
    schedule = NoiseSchedule(ddpm_betas(TIMESTEPS, BETA_SCHEDULE).to(device))
    model = DigitsDiT().to(device)
    ema = copy.deepcopy(model).eval().requires_grad_(False)
    on_gpu = device.type == "cuda"
    compiled = torch.compile(model) if on_gpu else model
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, betas=(0.9, 0.99), fused=on_gpu
    )
    rate = torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, 1 / WARMUP_STEPS, total_iters=WARMUP_STEPS),
            torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, steps - WARMUP_STEPS)),
        ],
        [WARMUP_STEPS],
    )
    start = time.perf_counter()
    for step in range(1, steps + 1):
        index = torch.randint(len(images), (batch,), device=device)
        targets = augment(images[index]) * 2 - 1
        given = labels[index].masked_fill(torch.rand(batch, device=device) < LABEL_DROPOUT, NULL_LABEL)
        with torch.autocast(device.type, torch.bfloat16):
            loss = v_loss(compiled, schedule, targets, given)
        descend(loss, optimizer, model, ema, step, EMA_DECAY)
        rate.step()
        if step % max(1, steps // 10) == 0:
            with torch.random.fork_rng(devices=[device] if on_gpu else []):
                torch.manual_seed(0)
                held_out = v_loss(ema, schedule, test[0].repeat(4, 1, 1, 1) * 2 - 1, test[1].repeat(4)).item()
            seconds = time.perf_counter() - start
            print(f"step {step:6d}  loss {loss.item():.4f}  held-out {held_out:.4f}  {seconds:.1f} s", flush=True)
    return ema


def generate(model: DigitsDiT, count: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """`count` digits, the classes in turn, by 50 steps of DDIM. Images [count, 1, 8, 8] in [0, 1] and labels, on the CPU."""
    labels = torch.arange(count) % CLASSES
    schedule = NoiseSchedule(ddpm_betas(TIMESTEPS, BETA_SCHEDULE))
    images = sample(
        model,
        initial_noise(range(count), IMAGE_SHAPE).to(device),
        schedule,
        prediction=PREDICTION,
        conditions={"label": labels.to(device)},
    )
    return images.cpu(), labels


def nearest(images: Tensor, others: Tensor) -> float:
    """Median over images of the root mean squared distance to the nearest of the others."""
    return (torch.cdist(images.flatten(1), others.flatten(1)).amin(1) / 8).median().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the weights and the samples")
    parser.add_argument("--steps", type=int, default=8000, help="training steps of the DiT")
    parser.add_argument("--batch", type=int, default=256, help="images per training step")
    parser.add_argument("--seed", type=int, default=0, help="of weights, batches and noise")
    parser.add_argument("--count", type=int, default=1000, help="digits to generate and judge")
    parser.add_argument("--device", help="where to train", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    device = torch.device(args.device)
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    train, test = (tuple(part.to(device) for part in digits_data(split)) for split in ("train", "test"))

    classifier = train_classifier(*train, steps=3000).cpu()
    test_images, test_labels = (part.cpu() for part in test)
    print(f"classifier: {accuracy(classifier, test_images, test_labels):.4f} of {len(test_labels)} held-out digits")
    save_weights(classifier, args.out / "digits-classifier.safetensors", {"license": "MIT"})

    model = train_dit(train, test, args.steps, args.batch)
    save_weights(model, args.out / "digits-dit.safetensors", {"license": "MIT"})
    images, labels = generate(model, args.count, device)
    train_images = train[0].cpu()
    print(f"DiT: {accuracy(classifier, images, labels):.4f} of {args.count} generated digits")
    print(
        f"distance to the nearest training digit: {nearest(images, train_images):.4f} of generated ones, "
        f"{nearest(test_images, train_images):.4f} of held-out ones"
    )
    save_sheet(images[:100], args.out / "samples.png")


if __name__ == "__main__":
    main()
