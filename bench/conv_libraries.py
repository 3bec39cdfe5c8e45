"""Group norms and INT8 convolutions of several builds of the library, compared on one GPU.

    python bench/conv_libraries.py LIBRARY... [--output FOLDER]

The first library is the reference of the others. Each shape has a group norm that gives INT8 alone, the convolution alone, and
both. Calls are recorded in CUDA graphs, and the graphs of a shape take turns, so that all libraries meet the same clocks. A
time is the median of the turns; its spread is half the distance between the quartiles. Shapes are those of bench/int8_conv.py,
and a window of one pixel. A library of version 1 of the two C APIs has no marks of images. All libraries compute the same
images, and the script fails where their results differ by a bit. Writes conv_libraries.md.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from linear import Call, measured, write_table
from torch import Tensor

from trtconvert.c_structs import IMAGE_MARKS, GroupNormParams, Int8ConvParams
from trtconvert.calib.measure import CONV_SHAPES
from trtconvert.linear.conv_kernel import one_scale
from trtconvert.linear.reference import quantise_weight

GROUPS, SCALE = 32, 0.03
BYTES = 100e6  # of a shape's tensors, more than the L2 cache has
SHAPES = (*CONV_SHAPES, (2, 32, 32, 1280, 640, 1))


class GroupNormParams1(ctypes.Structure):
    """TrtConvertGroupNormParams of version 1, which ends before the marks."""

    _fields_ = GroupNormParams._fields_[:-1]


class Int8ConvParams1(ctypes.Structure):
    """TrtConvertInt8ConvParams of version 1, which ends before the marks."""

    _fields_ = Int8ConvParams._fields_[:-1]


class Library:
    """A build of the library, with any version of the C APIs."""

    def __init__(self, path: Path) -> None:
        self._loaded = ctypes.CDLL(str(path.resolve()))
        self.name = f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()[:8]}"
        told = self._call("trtconvert_group_norm_check", GroupNormParams(version=2, batch=0))
        self._marks = "batch: expected" in told
        if not self._marks and "version 1 of" not in told:
            raise SystemExit(f"{path}: expected version 1 or 2 of group_norm.h, got a library that says: {told}")

    def _call(self, function: str, params: ctypes.Structure) -> str:
        params.struct_size = ctypes.sizeof(params)
        message = ctypes.create_string_buffer(512)
        getattr(self._loaded, function)(ctypes.byref(params), message, 512)
        return message.value.decode()

    def _run(self, function: str, params: ctypes.Structure) -> None:
        if told := self._call(function, params):
            raise RuntimeError(f"{self.name}: {told}")

    def norm(self, case: Case, i: int) -> None:
        at = i % case.count
        given = {
            "batch": case.batch, "pixels": case.height * case.width, "channels": case.channels, "groups": GROUPS, "silu": 1,
            "epsilon": 1e-5, "x": case.x[at].data_ptr(), "weight": case.gamma.data_ptr(), "bias": case.beta.data_ptr(),
            "stream": torch.cuda.current_stream().cuda_stream, "table": one_scale(case.scale),
            "payload": case.payload[at].data_ptr(),
        }  # fmt: skip
        with_marks = GroupNormParams(version=2, marks=case.marks.data_ptr(), **given)
        self._run("trtconvert_group_norm_run", with_marks if self._marks else GroupNormParams1(version=1, **given))

    def conv(self, case: Case, i: int) -> Tensor:
        at = i % case.count
        given = {
            "batch": case.batch, "height": case.height, "width": case.width, "in_channels": case.channels,
            "out_channels": case.outputs, "kernel_h": case.size, "kernel_w": case.size, "stride_y": 1, "stride_x": 1,
            "pad_y": case.size // 2, "pad_x": case.size // 2, "table": one_scale(case.scale), "x": case.payload[at].data_ptr(),
            "weight": case.weight[at].data_ptr(), "weight_scale": case.weight_scale.data_ptr(), "bias": case.bias.data_ptr(),
            "y": case.y.data_ptr(), "stream": torch.cuda.current_stream().cuda_stream,
        }  # fmt: skip
        with_marks = Int8ConvParams(version=2, marks=case.marks.data_ptr(), **given)
        self._run("trtconvert_int8_conv_run", with_marks if self._marks else Int8ConvParams1(version=1, **given))
        return case.y

    def both(self, case: Case, i: int) -> Tensor:
        self.norm(case, i)
        return self.conv(case, i)


@dataclass
class Case:
    """A convolution of [batch, height, width, channels] with windows of size × size, and its tensors."""

    batch: int
    height: int
    width: int
    channels: int
    outputs: int
    size: int

    def __post_init__(self) -> None:
        generator = torch.Generator("cuda").manual_seed(0)

        def normal(*of: int) -> Tensor:
            return torch.randn(of, generator=generator, device="cuda")

        image, depth = (self.batch, self.height, self.width, self.channels), self.channels * self.size**2
        nbytes = self.batch * self.height * self.width * (3 * self.channels + 2 * self.outputs) + depth * self.outputs
        self.count = max(1, round(BYTES / nbytes))
        self.x = [normal(*image).half() for _ in range(self.count)]
        self.payload = [torch.empty(image, dtype=torch.int8, device="cuda") for _ in range(self.count)]
        self.marks = torch.empty(self.batch, IMAGE_MARKS, dtype=torch.uint8, device="cuda")
        self.gamma, self.beta, self.bias = (
            normal(self.channels).half(),
            normal(self.channels).half(),
            normal(self.outputs),
        )
        stored, scale = quantise_weight(normal(self.outputs, self.channels, self.size, self.size) / depth**0.5)
        self.weight = [stored.permute(0, 2, 3, 1).contiguous() for _ in range(self.count)]
        self.weight_scale, self.scale = scale.contiguous(), torch.tensor([SCALE], device="cuda")
        self.y = torch.empty(*image[:3], self.outputs, dtype=torch.float16, device="cuda")

    def __str__(self) -> str:
        return f"{self.batch} × {self.height}², {self.channels:,} → {self.outputs:,}, {self.size} × {self.size}"


def calls_of(case: Case, libraries: Sequence[Library]) -> dict[str, Call]:
    """Returns the calls that take turns, by kind and number of the library."""
    found: dict[str, Call] = {}
    for number, library in enumerate(libraries):
        for kind in ("norm", "conv", "both"):
            found[f"{kind} {number}"] = partial(getattr(library, kind), case)
    return found


def rows(case: Case, libraries: Sequence[Library]) -> list[str]:
    expected = libraries[0].both(case, 0).clone()
    for library in libraries:
        if not torch.equal(library.both(case, 0), expected):
            raise SystemExit(f"{case}: expected the bits of {libraries[0].name}, got others of {library.name}")
    found, lines = measured(calls_of(case, libraries)), []
    for kind, called in (("norm", "norm"), ("conv", "convolution"), ("both", "both")):
        times = [found[f"{kind} {number}"] for number in range(len(libraries))]
        cells = [f"{median:.2f} ± {spread:.2f}" for median, spread in times]
        changes = [f"{100 * (median / times[0][0] - 1):+.1f} %" for median, _ in times[1:]]
        lines.append(f"| {case} | {called} | {' | '.join(cells + changes)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("libraries", nargs="+", type=Path, metavar="LIBRARY")
    parser.add_argument("--output", type=Path, default=Path("out/bench"), metavar="FOLDER")
    arguments = parser.parse_args()
    libraries = [Library(path) for path in arguments.libraries]
    names = [library.name for library in libraries]
    heads = [*(f"{name}, µs" for name in names), *(f"{name} against the first" for name in names[1:])]
    lines = [f"| image, channels, window | | {' | '.join(heads)} |", "| --- | --- |" + " ---: |" * len(heads)]
    with torch.no_grad():
        for shape in SHAPES:
            lines += rows(Case(*shape), libraries)
            print("\n".join(lines[-3:]), flush=True)
            torch.cuda.empty_cache()
    write_table(lines, arguments.output / "conv_libraries.md")


if __name__ == "__main__":
    main()
