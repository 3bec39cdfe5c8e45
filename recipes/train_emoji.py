"""Trains on emoji: the DiT in colour that ships with trtconvert, the classifier that judges its samples, and a DDPM U-Net.

    npm pack emoji-datasource-google && tar xzf emoji-datasource-google-*.tgz
    python recipes/train_emoji.py classifier --data package --out DIR
    python recipes/train_emoji.py dit --data package --out DIR
    python recipes/train_emoji.py unet --data package --out DIR

`classifier` and `dit` write emoji-classifier.safetensors and emoji-dit.safetensors (FP16). `unet` writes emoji-unet.safetensors,
in the layout of the CIFAR-10 DDPM and at 32 × 32, which does not ship, and a folder of the held-out emoji at that size, which
`bench/modiff_study.py --reference` takes. `dit` and `unet` draw samples, which the classifier of the
same folder judges. Both write a checkpoint every two minutes: `--minutes 25` stops in time for a lease, and the same command goes
on later. On several GPUs of one machine start it by `torchrun --nproc-per-node N`; the batch is shared out. Seeded; bit-equal
weights also need the same hardware, torch, and pieces.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from emoji_data import CATEGORY_OF, EmojiData, category_accuracy, emoji_data
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn import functional as F
from train_digits_dit import descend

from trtconvert.attention.schedules import NoiseSchedule, ddpm_betas
from trtconvert.errors import UserError
from trtconvert.evaluate.emoji import EmojiClassifier, held_out_emoji
from trtconvert.evaluate.grid import picture, save_sheet
from trtconvert.models import ddpm_unet, emoji_dit
from trtconvert.models.checkpoint import load_weights, save_weights
from trtconvert.models.emoji import label_of_seed
from trtconvert.models.samplers import initial_noise, sample

LABEL_DROPOUT = 0.1
EMA_DECAY = 0.9995
WARMUP_STEPS = 500
DECAY = 0.25  # share of the steps, at the end, while the learning rate falls to zero
LICENCE = {"license": "MIT", "data": "Noto Emoji, Apache 2.0"}


@dataclass(frozen=True)
class Training:
    """What differs between the two diffusion models."""

    name: str
    build: Callable[[], nn.Module]
    image_size: int
    beta_schedule: str
    prediction: str
    labelled: bool
    learning_rate: float
    shift: int  # largest random shift of images, in pixels

    def noise_schedule(self, device: torch.device) -> NoiseSchedule:
        return NoiseSchedule(ddpm_betas(emoji_dit.TIMESTEPS, self.beta_schedule).to(device))


def trainings() -> dict[str, Training]:
    return {
        "dit": Training(
            "emoji-dit",
            emoji_dit.EmojiDiT,
            emoji_dit.IMAGE_SHAPE[1],
            emoji_dit.BETA_SCHEDULE,
            emoji_dit.PREDICTION,
            labelled=True,
            learning_rate=8e-4,
            shift=2,
        ),
        "unet": Training(
            "emoji-unet",
            ddpm_unet.build,
            ddpm_unet.IMAGE_SHAPE[1],
            ddpm_unet.BETA_SCHEDULE,
            ddpm_unet.PREDICTION,
            labelled=False,
            learning_rate=3e-4,
            shift=1,
        ),
    }


def moved(images: Tensor, most: int) -> Tensor:
    """Each image by a whole number of pixels, white where nothing was. [B, 3, S, S] → the same shape."""
    size = images.shape[-1]
    padded = F.pad(images, [most] * 4, value=1.0)
    steps = torch.arange(size, device=images.device)
    row, column = (
        torch.randint(2 * most + 1, (len(images), 1), device=images.device) + steps for _ in range(2)
    )  # each [B, S]
    which = torch.arange(len(images), device=images.device)[:, None, None]
    return padded.permute(0, 2, 3, 1)[which, row[:, :, None], column[:, None, :]].permute(0, 3, 1, 2)


def diffusion_loss(
    model: nn.Module, training: Training, schedule: NoiseSchedule, images: Tensor, labels: Tensor
) -> Tensor:
    """Mean squared error of the prediction at one uniform random timestep per image of [B, 3, S, S] in [-1, 1]."""
    timestep = torch.rand(len(images), device=images.device, dtype=torch.float64) * (schedule.timesteps - 1)
    sigma = schedule.sigma(timestep)[:, None, None, None]
    signal = (1 + sigma**2).rsqrt()
    noise = torch.randn_like(images)
    x = (signal * (images + sigma * noise)).float()
    target = noise if training.prediction == "epsilon" else (signal * (noise - sigma * images)).float()
    conditions = (labels,) if training.labelled else ()
    return F.mse_loss(model(x, timestep.float(), *conditions).float(), target)


def train_diffusion(training: Training, data: EmojiData, args: argparse.Namespace) -> nn.Module:
    """Returns the model with the exponential average of its weights. Goes on from, and leaves, a checkpoint in `args.out`."""
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    device = data.images.device
    images = shrunk(data.images.float() / 255, training.image_size)
    schedule = training.noise_schedule(device)
    torch.manual_seed(args.seed)
    model = training.build().to(device).to(memory_format=torch.channels_last)
    ema = copy.deepcopy(model).eval().requires_grad_(False)
    on_gpu = device.type == "cuda"
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=training.learning_rate, weight_decay=0.01, betas=(0.9, 0.99), fused=on_gpu
    )
    path, done = args.out / f"{training.name}.ckpt", 0
    if path.is_file():
        state: dict[str, Any] = torch.load(path, device, weights_only=True)
        model.load_state_dict(state["model"])
        ema.load_state_dict(state["ema"])
        optimizer.load_state_dict(state["optimizer"])
        done = state["step"]
        print(f"goes on from step {done}", flush=True)
    # Numbers of its own for each rank, and for each piece.
    torch.manual_seed(args.seed * 1_000_003 + done * 64 + rank)
    wrapped = nn.parallel.DistributedDataParallel(model, [device]) if ranks > 1 else model
    compiled = cast(nn.Module, torch.compile(wrapped)) if on_gpu else wrapped
    start = saved = time.perf_counter()

    def save(step: int) -> None:
        if rank == 0:
            state = {
                "model": model.state_dict(),
                "ema": ema.state_dict(),
                "optimizer": optimizer.state_dict(),
                "step": step,
            }
            partial = path.with_suffix(".part")
            torch.save(state, partial)
            partial.replace(path)

    step = done
    while step < args.steps:
        step += 1
        for group in optimizer.param_groups:
            rest = (args.steps - step) / (DECAY * args.steps)
            group["lr"] = training.learning_rate * min(1.0, step / WARMUP_STEPS, rest)
        index = torch.multinomial(data.weights, args.batch // ranks, replacement=True)
        labels = data.labels[index]
        labels = labels.masked_fill(torch.rand(len(labels), device=device) < LABEL_DROPOUT, emoji_dit.NULL_LABEL)
        with torch.autocast(device.type, torch.bfloat16):
            loss = diffusion_loss(compiled, training, schedule, moved(images[index], training.shift) * 2 - 1, labels)
        descend(loss, optimizer, model, ema, step, EMA_DECAY)
        if step % 200 == 0:
            seconds = time.perf_counter() - start
            rate = (step - done) * args.batch / seconds
            if rank == 0:
                print(f"step {step:6d}  loss {loss.item():.4f}  {seconds:.0f} s  {rate:.0f} images/s", flush=True)
            # All ranks stop at the same step: rank 0's clock counts.
            out_of_time = torch.tensor(float(seconds > args.minutes * 60), device=device)
            if ranks > 1:
                dist.broadcast(out_of_time, 0)
            if out_of_time:
                break
            if time.perf_counter() - saved > 120:
                save(step)
                saved = time.perf_counter()
    save(step)
    print(f"{step} of {args.steps} steps", flush=True)
    return ema


def shrunk(images: Tensor, size: int) -> Tensor:
    """[B, 3, S, S] in [0, 1] → [B, 3, size, size], means of squares of pixels."""
    return F.avg_pool2d(images, images.shape[-1] // size) if size < images.shape[-1] else images


def write_held_out(size: int, folder: Path) -> None:
    """The held-out emoji without their skin tones, one PNG image each."""
    folder.mkdir(exist_ok=True)
    for number, image in enumerate(shrunk(held_out_emoji(), size)):
        picture(image).save(folder / f"{number:03d}.png")


@torch.no_grad()
def judge(model: nn.Module, training: Training, args: argparse.Namespace, device: torch.device) -> None:
    """Draws samples, the seeds' labels by turns, with and without guidance; the classifier of the same folder judges them."""
    denoiser = torch.compile(model) if device.type == "cuda" else model
    schedule = training.noise_schedule(torch.device("cpu"))
    shape = (3, training.image_size, training.image_size)
    labels = torch.tensor([label_of_seed(seed) for seed in range(args.count)])
    figures: dict[str, Any] = {}
    for guidance in (1.0, 1.5, 2.5) if training.labelled else (1.0,):
        parts: list[Tensor] = []
        for seeds in torch.arange(args.count).split(100):
            given = labels[seeds].to(device)
            with torch.autocast(device.type, torch.bfloat16):
                parts.append(
                    sample(
                        denoiser,
                        initial_noise(seeds.tolist(), shape).to(device),
                        schedule,
                        prediction=training.prediction,
                        conditions={"label": given} if training.labelled else None,
                        null_conditions={"label": torch.full_like(given, emoji_dit.NULL_LABEL)},
                        guidance=guidance,
                    ).cpu()
                )
        images = torch.cat(parts)
        save_sheet(images[:108], args.out / f"{training.name}-guidance-{guidance}.png", columns=18)
        classifier_weights = args.out / "emoji-classifier.safetensors"
        if training.labelled and classifier_weights.is_file():
            classifier = EmojiClassifier().half()
            load_weights(classifier, classifier_weights)
            figures[f"category accuracy, guidance {guidance}"] = category_accuracy(classifier.float(), images, labels)
    (args.out / f"{training.name}.json").write_text(json.dumps(figures))
    print(json.dumps(figures), flush=True)


def train_classifier(data: EmojiData, args: argparse.Namespace) -> EmojiClassifier:
    """On all but the held-out emoji; prints the accuracy on both."""
    device = data.images.device
    train, test = data.part(held_out=False), data.part(held_out=True)
    images, categories = train.images.float() / 255, CATEGORY_OF.to(device)[train.labels]
    torch.manual_seed(args.seed)
    model = EmojiClassifier().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, args.steps)
    for _ in range(args.steps):
        index = torch.multinomial(train.weights, 128, replacement=True)
        batch = moved(images[index], 6)
        # Drawn things keep what they are in other colours, mirrored, and with a part of them hidden.
        batch = torch.where(torch.rand(len(batch), 1, 1, 1, device=device) < 0.5, batch, batch.flip(3))
        batch = (batch * (1 + 0.2 * torch.randn(len(batch), 3, 1, 1, device=device))).clamp(0, 1)
        row, column = (torch.randint(48, (2,)).tolist() for _ in range(2))
        batch[:, :, row[0] : row[0] + 16, column[0] : column[0] + 16] = 1.0
        loss = F.cross_entropy(model(batch), categories[index], label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    model.eval()
    figures = {
        name: category_accuracy(model, part.images.float() / 255, part.labels)
        for name, part in (("train", train), ("held out", test))
    }
    (args.out / "emoji-classifier.json").write_text(json.dumps(figures))
    print(f"classifier: {figures}, {len(test.images)} images held out", flush=True)
    return model


def positive(text: str) -> int:
    """Returns an argument's number; refuses 0, because 0 steps would mean all steps."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"expected 1 or more, got {number}")
    return number


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=["classifier", "dit", "unet"])
    parser.add_argument("--data", type=Path, required=True, help="the unpacked npm package emoji-datasource-google")
    parser.add_argument("--out", type=Path, required=True, help="folder for weights, checkpoint and samples")
    parser.add_argument("--steps", type=positive, help="training steps: 4000 of the classifier, 40000 of the others")
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), help="stop after so long; the same command goes on"
    )
    parser.add_argument("--batch", type=positive, default=256, help="images per training step, of all GPUs")
    parser.add_argument("--seed", type=int, default=0, help="of weights, batches and noise")
    parser.add_argument("--count", type=positive, default=900, help="samples to draw and judge")
    parser.add_argument("--device", help="where to train", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    args.steps = args.steps or (4000 if args.model == "classifier" else 40000)
    args.out.mkdir(parents=True, exist_ok=True)
    device = torch.device(args.device)
    if "LOCAL_RANK" in os.environ:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl")
    torch.set_float32_matmul_precision("high")
    everything = emoji_data(args.data)
    data = EmojiData(*(tensor.to(device) for tensor in vars(everything).values()))

    if args.model == "classifier":
        save_weights(train_classifier(data, args).half(), args.out / "emoji-classifier.safetensors", LICENCE)
        return
    training = trainings()[args.model]
    model = train_diffusion(training, data.part(held_out=False), args)
    if not dist.is_initialized() or dist.get_rank() == 0:
        save_weights(copy.deepcopy(model).half(), args.out / f"{training.name}.safetensors", LICENCE)
        if training.image_size < emoji_dit.IMAGE_SHAPE[1]:
            write_held_out(training.image_size, args.out / f"emoji-held-out-{training.image_size}")
        judge(model, training, args, device)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
