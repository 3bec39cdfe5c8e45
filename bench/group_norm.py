"""Group norms of images with channels last, with SiLU, on one GPU: our kernel beside torch and torch.compile.

    python bench/group_norm.py [--output FOLDER]

Shapes are those of Stable Diffusion 1.5 at 512² and SDXL at 1024², with the two halves of guidance, and channels are shifted as
by the timestep. Calls are recorded in a CUDA graph, over inputs that together fit into the L2 cache if one input does, as
behind a convolution, and the graphs of a shape take turns. Latency is that of a graph over its calls, the median of the
turns; its spread is half the distance between the quartiles. The last column is the memory traffic, each byte read or written
once, divided by our time. Writes group_norm.md; nothing is asserted, tests/gpu/test_group_norm.py compares the results.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch
from linear import Call, measured, write_table
from torch import Tensor
from torch.nn import functional as F

from trtconvert.errors import BackendUnavailable
from trtconvert.library import has_group_norm_kernel
from trtconvert.linear.conv_kernel import group_norm

GROUPS, EPSILON = 32, 1e-5
CACHED_BYTES = 25e6  # inputs and results of a shape; an H100's L2 cache is 50 MB


@dataclass(frozen=True)
class Image:
    """channels × side × side, twice."""

    channels: int
    side: int
    batch: int = 2

    def __str__(self) -> str:
        return f"{self.batch} × {self.channels:,} × {self.side}²"

    @property
    def nbytes(self) -> int:
        return 2 * self.batch * self.channels * self.side**2


IMAGES = [Image(320, 64), Image(640, 64), Image(960, 64), Image(640, 32), Image(1280, 32), Image(1920, 32)]
IMAGES += [Image(1280, 16), Image(2560, 16), Image(1280, 8), Image(2560, 8)]
IMAGES += [Image(320, 128), Image(640, 128), Image(960, 128), Image(1280, 64), Image(1920, 64), Image(2560, 32)]


def ours(x: Tensor, shift: Tensor, weight: Tensor, bias: Tensor, normed: Tensor) -> None:
    """x and normed [B, C, H, W] with channels last in memory, shift [B, C], weight and bias [C], all FP16."""
    image, out = (tensor.permute(0, 2, 3, 1) for tensor in (x, normed))
    group_norm(image, weight, bias, out, groups=GROUPS, epsilon=EPSILON, shift=shift)


def in_torch(x: Tensor, shift: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.silu(F.group_norm(x + shift[:, :, None, None], GROUPS, weight, bias, EPSILON))


def calls_of(image: Image) -> dict[str, Call]:
    """Returns the functions that take turns, by name; each rotates over its own tensors."""
    sets = max(1, int(CACHED_BYTES / (2 * image.nbytes)))
    shape = (image.batch, image.channels, image.side, image.side)
    x, normed = (
        [torch.randn(shape, device="cuda").half().to(memory_format=torch.channels_last) for _ in range(sets)]
        for _ in range(2)
    )
    shift = torch.randn(shape[:2], device="cuda").half()
    weight, bias = (torch.randn(image.channels, device="cuda").half() for _ in range(2))
    torch.compiler.reset()  # dynamo compiles at most eight shapes
    compiled = torch.compile(in_torch, dynamic=False)
    return {
        "torch": lambda i: in_torch(x[i % sets], shift, weight, bias),
        "torch.compile": lambda i: compiled(x[i % sets], shift, weight, bias),
        "ours": lambda i: ours(x[i % sets], shift, weight, bias, normed[i % sets]),
    }


def row(image: Image, found: dict[str, tuple[float, float]]) -> str:
    cells = [f"{median:.1f} ± {spread:.1f}" for median, spread in found.values()]
    time = found["ours"][0]
    return f"| {image} | {' | '.join(cells)} | {found['torch.compile'][0] / time:.2f}× | {2e-6 * image.nbytes / time:.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("out/bench"), metavar="FOLDER")
    arguments = parser.parse_args()
    if not has_group_norm_kernel():
        raise BackendUnavailable(
            "there is nothing to measure",
            expected="a GPU of compute capability 9.0 or later, and a library compiled for it",
            got="no kernel for group norms here",
            remedy="run it on an H100 or H200",
        )
    lines = ["| image | torch, µs | torch.compile, µs | ours, µs | against torch.compile | TB/s |"]
    lines.append("| --- |" + " ---: |" * 5)
    with torch.no_grad():
        for image in IMAGES:
            lines.append(row(image, measured(calls_of(image))))
            print(lines[-1], flush=True)
            torch.cuda.empty_cache()
    write_table(lines, arguments.output / "group_norm.md")


if __name__ == "__main__":
    main()
