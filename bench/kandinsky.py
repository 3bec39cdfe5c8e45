"""Kandinsky in INT8: size of a video model after `trtconvert quantize --strategy kandinsky`, and the time of its blocks.

    python bench/kandinsky.py --table                 # from shapes alone, on any machine
    python bench/kandinsky.py [--blocks 2] [--frames 13] [--height 48] [--width 80]      # a GPU, some ten seconds

`Kandinsky5Transformer3DModel` of diffusers. No published model has 5 or 8 billion parameters (they have 2 and 19): the class
with a width of 3,072 and 30 blocks has 5.2 billion; with 4,096 and 25 blocks, which read an image beside the latents, 8.1
billion. The table is for BF16 files, and counts the INT8 weights if no weight has too many outliers.

Times are of some blocks of the first model (`--blocks 30`: all blocks) with everything around them, random weights, one forward
after another: in FP16, and with the linear layers of blocks in INT8 by `load_quantized`, with scales of blocks (Triton) and of
channels (our CUDA kernel). Sizes are those of latents: 13 × 48 × 80 is two seconds of 384 × 640.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import statistics
from pathlib import Path

import diffusers
import torch
from int8_linear import BlockLayer
from torch import Tensor, nn

from trtconvert.linear.reference import quantise_weight
from trtconvert.weights import Int8Linear
from trtconvert.weights.analysis import Rules, Verdict, by_name, bytes_of, structure_for
from trtconvert.weights.sources import Part, Source, StoredTensor
from trtconvert.weights.structure import Structure

SHARED = {"in_visual_dim": 16, "out_visual_dim": 16, "in_text_dim": 3584, "in_text_dim2": 768, "num_text_blocks": 2,
          "axes_dims": (32, 48, 48)}  # fmt: skip
CONFIGURATIONS = {
    "T2V, 5B": {"model_dim": 3072, "ff_dim": 12288, "time_dim": 512, "num_visual_blocks": 30},
    "I2V, 8B": {"model_dim": 4096, "ff_dim": 16384, "time_dim": 1024, "num_visual_blocks": 25, "visual_cond": True},
}
RULES = Rules(strategy="kandinsky")
WORDS, ROUNDS, WARM_UP = 256, 10, 3


def made(name: str, **other: int) -> nn.Module:
    return diffusers.Kandinsky5Transformer3DModel(**SHARED | CONFIGURATIONS[name] | other)


def source_of(model: nn.Module, name: str) -> Source:
    """Returns a model's tensors as in a BF16 file."""
    tensors = [
        StoredTensor(key, "", tuple(x.shape), torch.bfloat16, 2 * x.numel(), functools.partial(torch.empty, 0))
        for key, x in model.state_dict().items()
    ]
    return Source(Path(name), (Part("", (), (), (), tuple(tensors), {}),))


def verdict_of(tensor: StoredTensor, structure: Structure | None) -> Verdict:
    """Returns the decision about a tensor, if its numbers are no obstacle."""
    return by_name(tensor, RULES, structure, floating=True) or Verdict(stored="int8", reason="")


def print_table() -> None:
    print(
        "| Kandinsky 5 | parameters | in INT8 | others | FP32, GB | BF16, GB | INT8, GB | less than FP32 | than BF16 |"
    )
    print("| --- |" + " ---: |" * 8)
    for name in CONFIGURATIONS:
        with torch.device("meta"):
            source = source_of(made(name), name)
        structure = structure_for(source, RULES)
        tensors = list(source.tensors)
        verdicts = [verdict_of(tensor, structure) for tensor in tensors]
        total = sum(tensor.nbytes // 2 for tensor in tensors)
        in_int8 = sum(t.nbytes // 2 for t, verdict in zip(tensors, verdicts, strict=True) if verdict.stored == "int8")
        after = sum(bytes_of(t, verdict, RULES) for t, verdict in zip(tensors, verdicts, strict=True))
        print(
            f"| {name} | {total:,} | {in_int8:,} ({in_int8 / total:.1%}) | {total - in_int8:,} | {4 * total / 1e9:.1f} | "
            f"{2 * total / 1e9:.1f} | {after / 1e9:.1f} | {1 - after / 4 / total:.1%} | {1 - after / 2 / total:.1%} |"
        )


def prepared(model: nn.Module, dtype: torch.dtype) -> None:
    """Converts a model to 16 bits, except for modules that `from_pretrained` leaves in FP32. Zero weights become random: zeros in
    modulations would hide the blocks."""
    in_fp32 = set(type(model)._keep_in_fp32_modules)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 and not parameter.any():
            nn.init.normal_(parameter, std=0.02)
        parameter.data = parameter.to(torch.float32 if in_fp32 & set(name.split(".")) else dtype)


def quantised(model: nn.Module, granularity: str) -> None:
    """Replaces the layers that `trtconvert quantize --granularity` quantises by INT8 layers."""
    source = source_of(model, "blocks")
    structure = structure_for(source, RULES)
    for tensor in source.tensors:
        if verdict_of(tensor, structure).stored != "int8":
            continue
        parent, _, last = tensor.name.removesuffix(".weight").rpartition(".")
        layer = getattr(model.get_submodule(parent), last)
        if granularity == "block":
            of_blocks = BlockLayer.of(layer.weight.detach(), layer.bias)
            stored, scale = of_blocks.weight, of_blocks.scale
        else:
            stored, scale = quantise_weight(layer.weight.detach().float())
        setattr(model.get_submodule(parent), last, Int8Linear(stored, scale, layer.bias, layer.weight.dtype))


def inputs(frames: int, height: int, width: int) -> dict[str, object]:
    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda").half()

    return {
        "hidden_states": drawn(1, frames, height, width, SHARED["in_visual_dim"]),
        "encoder_hidden_states": drawn(1, WORDS, SHARED["in_text_dim"]),
        "pooled_projections": drawn(1, SHARED["in_text_dim2"]),
        "timestep": torch.full((1,), 500.0, device="cuda").half(),
        "visual_rope_pos": [torch.arange(size, device="cuda") for size in (frames, height // 2, width // 2)],
        "text_rope_pos": torch.arange(WORDS, device="cuda"),
        "return_dict": False,
    }


def milliseconds(model: nn.Module, given: dict[str, object]) -> tuple[float, Tensor]:
    """Returns the median time of a forward, and its output."""
    times = []
    output = torch.empty(0)
    for turn in range(WARM_UP + ROUNDS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        output = model(**given)[0]
        end.record()
        torch.cuda.synchronize()
        if turn >= WARM_UP:
            times.append(start.elapsed_time(end))
    return statistics.median(times), output.float()


@torch.inference_mode()
def print_times(blocks: int, frames: int, height: int, width: int) -> None:
    torch.manual_seed(1)
    given = inputs(frames, height, width)
    print(f"{torch.cuda.get_device_name()}, {datetime.date.today()}, torch {torch.__version__}, FP16")
    print(
        f"{blocks} blocks of {CONFIGURATIONS['T2V, 5B']['num_visual_blocks']}, {frames * height * width // 4:,} tokens\n"
    )
    print("| eager | step, ms | weights, GB | memory of a step, GB | error |\n| --- | ---: | ---: | ---: | ---: |")
    wanted, slow = torch.empty(0), 0.0
    for name, granularity in (
        ("FP16", ""),
        ("INT8, scales of blocks", "block"),
        ("INT8, scales of channels", "channel"),
    ):
        torch.manual_seed(0)
        with torch.device("cuda"):
            model = made("T2V, 5B", num_visual_blocks=blocks).eval()
        prepared(model, torch.float16)
        if granularity:
            quantised(model, granularity)
        torch.cuda.empty_cache()
        weights = sum(x.nbytes for x in (*model.parameters(), *model.buffers()))
        milliseconds(model, given)  # the first call measures tiles
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        time, output = milliseconds(model, given)
        peak = torch.cuda.max_memory_allocated() - held
        error = float((output - wanted).norm() / wanted.norm()) if wanted.numel() else 0.0
        faster = f" ({slow / time:.2f}×)" if slow else ""
        print(f"| {name} | {time:.2f}{faster} | {weights / 1e9:.2f} | {peak / 1e9:.2f} | {error:.4f} |", flush=True)
        wanted, slow = (wanted, slow) if wanted.numel() else (output, time)
        del model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="store_true", help="print the sizes of the whole models, from shapes alone")
    for name, default in (("blocks", 2), ("frames", 13), ("height", 48), ("width", 80)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    if given.table:
        print_table()
    else:
        print_times(given.blocks, given.frames, given.height, given.width)


if __name__ == "__main__":
    main()
