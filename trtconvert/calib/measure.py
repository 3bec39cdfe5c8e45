"""`trtconvert measure`: measures times of attention, layers and convolutions on this machine's GPU, for `plan.kernel_cost`."""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from trtconvert.attention import kernel
from trtconvert.attention.device_time import device_microseconds
from trtconvert.attention.modes import MEASURED_SCALES, Mode
from trtconvert.attention.reference import BLOCK, tables_from_data
from trtconvert.c_structs import IMAGE_MARKS
from trtconvert.calib.cost import AttentionShape
from trtconvert.convolutions import cudnn_convolutions
from trtconvert.errors import BackendUnavailable
from trtconvert.library import has_group_norm_kernel
from trtconvert.linear import conv_kernel
from trtconvert.linear import kernel as linear_kernel
from trtconvert.linear.modes import LayerMode
from trtconvert.linear.reference import LEVELS, LayerTables, quantise_weight

_HEADS = ((1, 24, 128), (2, 10, 64), (2, 8, 40))
_PROMPT = 77
"""Tokens of a CLIP prompt."""

SHAPES = (
    *(AttentionShape(b, heads, n, n, dim) for b, heads, dim in _HEADS for n in (256, 1024, 4096, 16384)),
    *(AttentionShape(b, heads, n, _PROMPT, dim) for b, heads, dim in _HEADS for n in (1024, 4096, 16384)),
)
"""Sizes of common diffusion models, of self-attention and attention to prompts; sizes in between are interpolated."""

LAYER_SHAPES = (
    (2048, 1280, 1280), (2048, 3840, 1280), (2048, 10240, 1280), (2048, 1280, 5120), (8192, 320, 320), (8192, 640, 640),
    (8192, 1920, 640), (8192, 640, 2560), (8192, 1152, 1152), (8192, 4608, 1152), (8192, 1152, 4608), (4608, 3072, 3072),
    (4608, 12288, 3072), (4608, 3072, 12288), (17160, 1536, 1536), (17160, 8960, 1536), (17160, 1536, 8960),
)  # fmt: skip
"""Rows, output channels and input channels of layers of common diffusion models."""

CONV_SHAPES = tuple(
    (2, side, side, channels, outputs, 3)
    for side, channels, outputs in (
        (64, 320, 320), (64, 640, 320), (32, 640, 640), (32, 1280, 640), (16, 1280, 1280), (16, 2560, 1280), (8, 1280, 1280),
        (128, 320, 320), (128, 640, 320), (64, 640, 640), (64, 1280, 640), (32, 1280, 1280), (32, 2560, 1280),
    )
)  # fmt: skip
"""Batch, height, width, input channels, output channels and kernel size of convolutions of Stable Diffusion 1.5 and SDXL."""

_LAYER_MODES = (LayerMode.EXACT, LayerMode.DYNAMIC, LayerMode.STATIC)

CALLS = tuple(
    (mode, scaling)
    for mode in Mode
    for scaling in ("dynamic", "calibrated")
    if scaling == "dynamic" or mode in MEASURED_SCALES
)
"""Modes and scalings to measure, those of one mode in succession. The other modes take no scales from the data."""

MASKED_SHAPES = tuple(shape for shape in SHAPES if shape.key_tokens >= 1024)
DENSITIES = (0.25, 0.5, 1.0)
"""Shapes that are measured with block masks, and the shares of computed blocks, which are random."""

COPIED_BYTES = 2**29
"""Bytes read, and bytes written, by the measurement of the memory's bandwidth."""

INPUTS = 3
"""Sets of inputs that alternate, so that no call finds its inputs in the cache."""


def measure_kernels(
    shapes: Sequence[AttentionShape] = SHAPES,
    done: Callable[[], None] = lambda: None,
    layer_shapes: Sequence[tuple[int, int, int]] = LAYER_SHAPES,
    masked_shapes: Sequence[AttentionShape] = MASKED_SHAPES,
    conv_shapes: Sequence[tuple[int, int, int, int, int, int]] = CONV_SHAPES,
) -> str:
    """Measures attention in every mode, block masks relative to dense attention, layers, convolutions after group norms in 16
    bits (torch) and in INT8, and the memory's bandwidth, by `device_microseconds`. Activations are FP16 and times include
    quantisation. Scales of queries and keys are measured; modes that may measure them are timed with calibrated scales, too.
    Returns JSON text, see `KernelCost.load`.

    Args:
        done: called after each shape and mode, for calibrated scales, too, and after each density of block masks.
        conv_shapes: without INT8 times if the GPU has no kernel for group norms with INT8 outputs.
    Raises:
        BackendUnavailable: there is no GPU.
    """
    if not torch.cuda.is_available():
        raise BackendUnavailable(
            "there is no GPU to measure the attention kernels on",
            expected="an NVIDIA GPU of compute capability 8.0 or newer, and a torch that sees it",
            got="none",
            remedy="run this command on the machine that the engine is for, and give its file to plan.kernel_cost",
        )
    rows = []
    for shape in shapes:
        for mode, scaling in CALLS:
            seconds = device_microseconds([_call(shape, mode, scaling, seed) for seed in range(INPUTS)]) * 1e-6
            sizes = list(vars(shape).values())
            rows.append({"mode": int(mode), "shape": sizes, "scaling": scaling, "seconds": round(seconds, 9)})
            done()
    masked = []
    for shape in masked_shapes:
        for mode in Mode:
            dense, *found = (
                device_microseconds([_call(shape, mode, "dynamic", seed, density) for seed in range(INPUTS)])
                for density in (None, *DENSITIES)
            )
            for density, microseconds in zip(DENSITIES, found, strict=True):
                sizes, ratio = list(vars(shape).values()), round(microseconds / dense, 4)
                masked.append({"mode": int(mode), "shape": sizes, "density": density, "ratio": ratio})
                done()
    layers = []
    for shape in layer_shapes:
        for mode in _LAYER_MODES:
            seconds = device_microseconds([_layer_call(shape, mode, seed) for seed in range(INPUTS)]) * 1e-6
            layers.append({"mode": int(mode), "shape": list(shape), "seconds": round(seconds, 9)})
            done()
    convs = []
    for shape in conv_shapes:
        for mode in _conv_modes():
            with torch.no_grad(), cudnn_convolutions(tf32=False, benchmark=True):
                seconds = device_microseconds([_conv_call(shape, mode, seed) for seed in range(INPUTS)]) * 1e-6
            convs.append({"mode": int(mode), "shape": list(shape), "seconds": round(seconds, 9)})
            done()
    table = {
        "gpu": torch.cuda.get_device_name(),
        "date": datetime.date.today().isoformat(),
        "bandwidth": round(_bandwidth()),
    }
    parts = [
        f' "{name}": [\n' + ",\n".join("  " + json.dumps(row) for row in of_name) + "\n ]"
        for name, of_name in (("rows", rows), ("masked", masked), ("layers", layers), ("convs", convs))
    ]
    return json.dumps(table, indent=1)[:-2] + ",\n" + ",\n".join(parts) + "\n}\n"


def _bandwidth() -> float:
    """Returns bytes per second that the GPU's memory reads and writes in a kernel on more than its cache; the driver's copies
    are slower."""
    given, negated = (torch.zeros(COPIED_BYTES // 2, dtype=torch.float16, device="cuda") for _ in range(2))
    return 2 * COPIED_BYTES / (device_microseconds([lambda: torch.neg(given, out=negated)]) * 1e-6)


def steps() -> int:
    """Returns how often `done` is called for the usual shapes."""
    of_masks = len(MASKED_SHAPES) * len(Mode) * len(DENSITIES)
    of_layers = len(LAYER_SHAPES) * len(_LAYER_MODES) + len(CONV_SHAPES) * len(_conv_modes())
    return len(SHAPES) * len(CALLS) + of_masks + of_layers


def write_kernel_cost(path: Path, done: Callable[[], None]) -> None:
    """Measures the usual shapes and writes the table."""
    path.write_text(measure_kernels(done=done))


def _call(
    shape: AttentionShape, mode: Mode, scaling: str, seed: int, density: float | None = None
) -> Callable[[], Tensor]:
    generator = torch.Generator("cuda").manual_seed(seed)
    tokens = {"q": shape.query_tokens, "k": shape.key_tokens, "v": shape.key_tokens}
    q, k, v = (
        torch.randn(shape.batch, shape.heads, n, shape.head_dim, device="cuda", generator=generator).half()
        for n in tokens.values()
    )
    tables = tables_from_data(q, k, v, mode)
    timestep = torch.zeros(shape.batch, device="cuda")
    mask = None
    if density is not None:  # as in calibrations: the same number of blocks in each row, and a mask for each head
        counts = [math.ceil(tokens[x] / BLOCK) for x in "qk"]
        drawn = torch.rand(1, shape.heads, *counts, device="cuda", generator=generator)
        kept = drawn.topk(max(1, round(density * counts[1])), dim=-1).indices
        mask = torch.zeros_like(drawn, dtype=torch.bool).scatter(-1, kept, True)
    return lambda: kernel.attention(q, k, v, timestep, tables, scaling=scaling, block_mask=mask)


def _layer_call(shape: tuple[int, int, int], mode: LayerMode, seed: int) -> Callable[[], Tensor]:
    rows, outputs, channels = shape
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(rows, channels, device="cuda", generator=generator).half()
    weight = torch.randn(outputs, channels, device="cuda", generator=generator) * channels**-0.5
    if mode == LayerMode.EXACT:
        half, bias = weight.half(), torch.zeros(outputs, device="cuda", dtype=torch.float16)
        return lambda: functional.linear(x, half, bias)
    stored, scale = quantise_weight(weight)
    nothing, ones = torch.zeros(channels, device="cuda"), torch.ones(channels, device="cuda")
    modes = torch.tensor([int(mode)], dtype=torch.int32)
    tables = LayerTables(
        stored, scale, torch.zeros(outputs, device="cuda"), ones, nothing, x.abs().amax().float()[None] / 127, modes
    )
    return lambda: linear_kernel.linear(x, None, tables)


_NORM_GROUPS = 32


def _conv_modes() -> tuple[LayerMode, ...]:
    return (LayerMode.EXACT, LayerMode.STATIC) if _has_norms() else (LayerMode.EXACT,)


def _has_norms() -> bool:
    return torch.cuda.is_available() and has_group_norm_kernel()


def _conv_call(shape: tuple[int, int, int, int, int, int], mode: LayerMode, seed: int) -> Callable[[], Tensor]:
    """A group norm with SiLU, by trtconvert's kernel if there is one, and a convolution of its output."""
    batch, height, width, channels, outputs, size = shape
    generator = torch.Generator("cuda").manual_seed(seed)

    def normal(*of: int) -> Tensor:
        return torch.randn(of, device="cuda", generator=generator)

    x, padding = normal(batch, height, width, channels).half(), size // 2
    gamma, beta, bias = normal(channels).half(), normal(channels).half(), normal(outputs)
    weight = normal(outputs, channels, size, size) / (channels * size**2) ** 0.5
    image = x.permute(0, 3, 1, 2)  # channels last in memory

    def in_torch() -> Tensor:
        return functional.silu(functional.group_norm(image, _NORM_GROUPS, gamma, beta))

    if mode == LayerMode.EXACT:
        half, half_bias = weight.half().to(memory_format=torch.channels_last), bias.half()
        if not _has_norms():
            return lambda: functional.conv2d(in_torch(), half, half_bias, padding=padding)
        normed = torch.empty_like(x)

        def in_16_bits() -> Tensor:
            conv_kernel.group_norm(x, gamma, beta, normed, groups=_NORM_GROUPS)
            return functional.conv2d(normed.permute(0, 3, 1, 2), half, half_bias, padding=padding)

        return in_16_bits
    stored, weight_scale = quantise_weight(weight)
    stored = stored.permute(0, 2, 3, 1).contiguous()
    scale = in_torch().abs().amax().float()[None] / LEVELS
    payload = torch.empty_like(x, dtype=torch.int8)
    marks = torch.empty(batch, IMAGE_MARKS, device="cuda", dtype=torch.uint8)
    y = torch.empty(batch, height, width, outputs, device="cuda", dtype=torch.float16)

    def in_int8() -> Tensor:
        conv_kernel.group_norm(x, gamma, beta, payload, groups=_NORM_GROUPS, scale=scale, marks=marks)
        conv_kernel.int8_conv(payload, marks, stored, weight_scale, bias, scale, y, padding=padding)
        return y

    return in_int8
