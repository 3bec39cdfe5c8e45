"""INT8 convolutions of images with channels last, on one GPU: our kernels beside cuDNN's in FP16.

    python bench/int8_conv.py [--output FOLDER]

Shapes are those of the ResNets of Stable Diffusion 1.5 at 512² and SDXL at 1024², with the two halves of guidance. As in these
models, a group norm with SiLU precedes the convolution: in 16 bits for cuDNN, in INT8 for ours, both by our kernel, so the time
includes quantisation. Calls are recorded in a CUDA graph, over inputs and weights that together exceed the L2 cache, and the
graphs of a shape take turns, as in linear.py. Latency is that of a graph over its calls, the median of the turns; its spread is
half the distance between the quartiles. The last column is the relative L2 error of both against FP32, of N(0, 1) images and
weights. Writes int8_conv.md; nothing is asserted, tests/gpu/test_int8_conv.py compares the results.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch
from group_norm import EPSILON, GROUPS
from linear import Call, measured, write_table
from torch import Tensor
from torch.nn import functional as F

from trtconvert.c_structs import IMAGE_MARKS
from trtconvert.calib.measure import CONV_SHAPES
from trtconvert.errors import BackendUnavailable
from trtconvert.library import has_group_norm_kernel
from trtconvert.linear.conv_kernel import group_norm, int8_conv
from trtconvert.linear.reference import LEVELS, quantise_weight
from trtconvert.models.recorded_calls import relative_error

BATCH = 2
BYTES = 100e6  # of inputs, weights and results of a shape, more than an H100's L2 cache has


@dataclass(frozen=True)
class Layer:
    """A 3 × 3 convolution of images with as many pixels on a side."""

    side: int
    inputs: int
    outputs: int

    def __str__(self) -> str:
        return f"{BATCH} × {self.side}², {self.inputs:,} → {self.outputs:,}"

    @property
    def nbytes(self) -> int:
        return 2 * (BATCH * self.side**2 * (2 * self.inputs + self.outputs) + 9 * self.inputs * self.outputs)


LAYERS = [Layer(side, inputs, outputs) for _, side, _, inputs, outputs, _ in CONV_SHAPES]


class Case:
    """Tensors of a layer: `count` images and results that rotate with as many weights."""

    def __init__(self, layer: Layer) -> None:
        self.layer, self.count = layer, max(1, round(BYTES / layer.nbytes))
        shape = (BATCH, layer.side, layer.side)
        generator = torch.Generator("cuda").manual_seed(0)

        def normal(*of: int) -> Tensor:
            return torch.randn(of, generator=generator, device="cuda")

        self.x = [normal(*shape, layer.inputs).half() for _ in range(self.count)]
        self.normed = [torch.empty_like(x) for x in self.x]
        self.payload = [torch.empty_like(x, dtype=torch.int8) for x in self.x]
        self.marks = torch.empty(BATCH, IMAGE_MARKS, dtype=torch.uint8, device="cuda")
        self.gamma, self.beta = normal(layer.inputs).half(), normal(layer.inputs).half()
        weights = [normal(layer.outputs, layer.inputs, 3, 3) / (3 * layer.inputs**0.5) for _ in range(self.count)]
        self.exact = [w.half().to(memory_format=torch.channels_last) for w in weights]
        stored = [quantise_weight(w) for w in weights]
        self.stored = [q.permute(0, 2, 3, 1).contiguous() for q, _ in stored]
        self.scales = [scale.contiguous() for _, scale in stored]
        self.bias = normal(layer.outputs)
        self.half_bias = self.bias.half()
        self.y = [torch.empty(*shape, layer.outputs, dtype=torch.float16, device="cuda") for _ in range(self.count)]
        self.run_norm(0)
        largest = float(self.normed[0].abs().max())
        self.x_scale = torch.tensor([largest / LEVELS], device="cuda")

    def run_norm(self, i: int, in_int8: bool = False) -> None:
        out, scale = (self.payload[i], self.x_scale) if in_int8 else (self.normed[i], None)
        marks = self.marks if in_int8 else None
        group_norm(self.x[i], self.gamma, self.beta, out, groups=GROUPS, epsilon=EPSILON, scale=scale, marks=marks)

    def in_fp16(self, i: int) -> Tensor:
        self.run_norm(i)
        image = self.normed[i].permute(0, 3, 1, 2)  # channels last
        return F.conv2d(image, self.exact[i], self.half_bias, padding=1)

    def in_int8(self, i: int, arch: int = 0) -> Tensor:
        self.run_norm(i, in_int8=True)
        stored, scales = self.stored[i], self.scales[i]
        int8_conv(self.payload[i], self.marks, stored, scales, self.bias, self.x_scale, self.y[i], padding=1, arch=arch)
        return self.y[i].permute(0, 3, 1, 2)

    def right(self) -> Tensor:
        """Returns the first call's result in FP32."""
        image = self.x[0].float().permute(0, 3, 1, 2)
        normed = F.silu(F.group_norm(image, GROUPS, self.gamma.float(), self.beta.float(), EPSILON))
        return F.conv2d(normed, self.exact[0].float(), self.bias, padding=1)


def calls_of(case: Case) -> dict[str, Call]:
    return {
        "cuDNN FP16": lambda i: case.in_fp16(i % case.count),
        "INT8": lambda i: case.in_int8(i % case.count),
        "INT8, mma.sync": lambda i: case.in_int8(i % case.count, arch=80),
        "norm alone": lambda i: case.run_norm(i % case.count),
    }


def row(case: Case, found: dict[str, tuple[float, float]]) -> str:
    cells = " | ".join(f"{median:.1f} ± {spread:.1f}" for median, spread in found.values())
    errors = [relative_error(y.float(), case.right()) for y in (case.in_fp16(0), case.in_int8(0))]
    return f"| {case.layer} | {cells} | {found['cuDNN FP16'][0] / found['INT8'][0]:.2f}× | {errors[0]:.4f}, {errors[1]:.4f} |"


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
    torch.backends.cudnn.benchmark = True
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    lines = [
        "| image, channels | cuDNN FP16, µs | INT8, µs | INT8 by mma.sync, µs | norm alone, µs | against FP16 | errors |"
    ]
    lines.append("| --- |" + " ---: |" * 6)
    with torch.no_grad():
        for layer in LAYERS:
            case = Case(layer)
            lines.append(row(case, measured(calls_of(case))))
            print(lines[-1], flush=True)
            del case
            torch.cuda.empty_cache()
    write_table(lines, arguments.output / "int8_conv.md")


if __name__ == "__main__":
    main()
