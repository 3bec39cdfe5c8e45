"""The tables of the report that commissioned this project (docs/design/seeds.md), measured on this GPU, with each claim.

    python bench/seeds.py [--seconds 3] [--evaluation evaluation.json …] [--output FOLDER]

Numbers such as 4.1 are sections of the report. The report gives figures for an A100 that were never run; only its ratios can be
confirmed or refuted elsewhere. Peers, inputs
and timing are those of bench/attention.py: every time includes quantisation. `--seconds` is the duration of power sampling for
each kernel. Quality comes from `trtconvert evaluate` (4.4 of the report), given as files. Several GPUs (6.2) are the subject of
bench/sequence_parallel.py. Writes seeds.md; nothing is asserted.
"""

from __future__ import annotations

import argparse
import datetime
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from attention import REPEATS, ROTATION, ROUNDS, Shape, exact, inputs_of, joules_per_call, ours, peers, time_calls
from torch import Tensor

from trtconvert.attention.modes import Mode
from trtconvert.evaluate.records import read_evaluation

BATCH, HEADS, DIM, TOKENS = 16, 32, 128, 4096  # the report's setup
FLASH = "FlashAttention-2"
LATENCY_CLAIMS = {512: 1.1, 1024: 1.3, 2048: 1.6, 4096: 1.7, 8192: 1.9, 16384: 2.0}
"""Section 4.1: tokens, and the claimed speed of INT8 relative to FlashAttention."""

BATCH_CLAIMS = {1: 1.0, 8: 6.75, 16: 13.5}
"""Section 6.1: numbers of samples, and the claimed time as a multiple of the time of one sample."""

QUALITY_CLAIMS = {"uniform": 2.7, "adaptive": 0.3, "late-fp16": 0.1}
"""Section 4.4: the claimed increase of FP16's FID by INT8: with one scale for all timesteps, with scales by timestep, and with
the last steps in FP16."""
CLAIMED_NOISE = 0.3
"""The increase that the report calls noise. A claim is confirmed if both differences, or neither, are noise."""

LONG = 32768

int_mm: Callable[[Tensor, Tensor], Tensor] = getattr(torch, "_int_mm")  # noqa: B009 (it has no public name)


@dataclass(frozen=True)
class Timed:
    """A kernel at a shape: seconds of a call, and its call."""

    name: str
    seconds: float
    call: Callable[[], Tensor]


def timed(shape: Shape, modes: tuple[Mode, ...] = tuple(Mode)) -> list[Timed]:
    """Returns our modes and the peers that take the shape, by turns."""
    sets = [inputs_of(shape) for _ in range(ROTATION)]
    attends = {name: [attend] * ROTATION for name, attend in peers().items()}
    attends |= {mode.name.lower(): [ours(mode, inputs) for inputs in sets] for mode in modes}
    calls: dict[str, list[Callable[[], Tensor]]] = {}
    for name, each in attends.items():
        calls[name] = [lambda a=a, x=x: a(*x) for a, x in zip(each, sets, strict=True)]
        try:
            calls[name][0]()
        except Exception as refusal:  # peers refuse a shape by any exception
            print(f"{shape} {name}: {str(refusal).splitlines()[0]}", flush=True)
            del calls[name]
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, each in calls.items():
            times[name] += time_calls(list(each))
    return [Timed(name, statistics.median(times[name]) / 1e6, each[0]) for name, each in calls.items()]


def verdict(measured: float, claimed: float) -> str:
    return "confirmed" if measured >= claimed else "refuted"


def of(found: list[Timed], name: str) -> Timed | None:
    return next((one for one in found if one.name == name), None)


def latency() -> list[str]:
    """Returns the table of section 4.1: milliseconds by tokens. The claim is held against our fastest INT8 mode."""
    lines = ["## Latency (4.1)", ""]
    head: list[str] = []
    for tokens, claim in LATENCY_CLAIMS.items():
        found = timed(Shape(BATCH, HEADS, tokens, DIM))
        if not head:
            head = [one.name for one in found]
            lines.append(f"| N | {' | '.join(head)} | INT8 to {FLASH} | claimed | |")
            lines.append("| --- |" + " ---: |" * (len(head) + 2) + " --- |")
        cells = [f"{one.seconds * 1e3:.2f}" if (one := of(found, name)) else "" for name in head]
        flash = of(found, FLASH)
        best = min(one.seconds for one in found if one.name in ("aggressive", "balanced", "precision"))
        ratio = flash.seconds / best if flash else 0.0
        lines.append(f"| {tokens} | {' | '.join(cells)} | {ratio:.2f}× | {claim}× | {verdict(ratio, claim)} |")
        torch.cuda.empty_cache()
    return lines


def components() -> list[str]:
    """Returns the table of section 4.2: the parts of attention by themselves, at the rate of cuBLAS and of torch's softmax."""
    flops = 2.0 * BATCH * HEADS * TOKENS * TOKENS * DIM
    heads = [(torch.randn(HEADS, TOKENS, DIM, device="cuda").half(),) * 2 for _ in range(ROTATION)]
    codes = [torch.randint(-127, 128, (TOKENS, DIM), device="cuda", dtype=torch.int8) for _ in range(ROTATION)]
    logits = [torch.randn(HEADS, TOKENS, TOKENS, device="cuda").half() for _ in range(ROTATION)]
    values = torch.randn(HEADS, TOKENS, DIM, device="cuda").half()
    share = HEADS / (BATCH * HEADS)

    def rate(calls: list[Callable[[], object]], part: float) -> float:
        return flops * part / (statistics.median(time_calls(calls)) * 1e-6) / 1e12

    qk = rate([lambda x=x: x[0] @ x[1].mT for x in heads], share)
    qk8 = rate([lambda x=x: int_mm(x, x.T) for x in codes], 1 / (BATCH * HEADS))
    pv = rate([lambda x=x: x @ values for x in logits], share)
    exps = HEADS * TOKENS * TOKENS / (statistics.median(time_calls([lambda x=x: x.softmax(-1) for x in logits])) * 1e-6)
    return [
        "## Parts of attention by themselves (4.2)",
        "",
        "Products of one head's, or one sample's, size through cuBLAS, which writes every logit to memory; fused kernels do not, "
        "so these are not their parts' rates.",
        "",
        "| | TFLOP/s here | claimed | ratio INT8 to FP16 | claimed | |",
        "| --- | ---: | ---: | ---: | ---: | --- |",
        f"| QKᵀ in FP16 | {qk:.0f} | 85 | | | |",
        f"| QKᵀ in INT8 (torch._int_mm) | {qk8:.0f} | 165 | {qk8 / qk:.2f}× | 1.94× | {verdict(qk8 / qk, 1.94)} |",
        f"| PV in FP16 | {pv:.0f} | 72 | | | |",
        f"| softmax | {exps / 1e12:.2f} · 10¹² logits/s | | | | |",
    ]


def memory() -> list[str]:
    """Returns the table of section 4.3: bytes beyond the inputs, and of Q and K as they are read by the products."""
    shape = Shape(BATCH, HEADS, TOKENS, DIM)
    inputs = inputs_of(shape)
    lines = ["## Memory (4.3)", "", "| | MB |", "| --- | ---: |"]
    tensor = inputs[0].nbytes / 1e6
    lines.append(f"| Q, K, V in FP16 | {3 * tensor:.0f} |")
    lines.append(f"| Q and K in INT8, V in FP16 | {2 * tensor:.0f}: −33 %, Q and K −50 %; claimed −38 % |")
    for name, attend in {FLASH: peers()[FLASH], "precision": ours(Mode.PRECISION, inputs)}.items():
        attend(*inputs)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = attend(*inputs)
        torch.cuda.synchronize()
        lines.append(
            f"| {name}, peak beyond inputs and output | {(torch.cuda.max_memory_allocated() - before - out.nbytes) / 1e6:.0f} |"
        )
        del out
    lines += [
        "",
        "No kernel here holds the N × N matrix, FlashAttention neither: the report's 134 MB saved are not there to save.",
    ]
    return lines


def energy(seconds: float) -> list[str]:
    """Returns the table of sections 4.5 and 8.1: FLOP per joule."""
    shape = Shape(BATCH, HEADS, TOKENS, DIM)
    flops = 4.0 * BATCH * HEADS * TOKENS * TOKENS * DIM
    found = timed(shape)
    per_joule: dict[str, float] = {}
    lines = ["## Energy (4.5, 8.1)", "", "| | TFLOP/s | W | GFLOP/J |", "| --- | ---: | ---: | ---: |"]
    for one in found:
        joules = joules_per_call(one.call, seconds)
        if joules is None:
            return [*lines[:2], "NVML cannot be read here."]
        per_joule[one.name] = flops / joules
        # The power limit may throttle a kernel in a loop, but not kernels that take turns.
        lines.append(
            f"| {one.name} | {flops / one.seconds / 1e12:.0f} | {joules / one.seconds:.0f} | {flops / joules / 1e9:.0f} |"
        )
    if FLASH in per_joule:
        ratio = max(per_joule[name] for name in ("aggressive", "balanced", "precision")) / per_joule[FLASH]
        lines += ["", f"INT8 to {FLASH}: {ratio:.2f}×; claimed 1.82×: {verdict(ratio, 1.82)}."]
    return lines


def roofline() -> list[str]:
    """Returns the table of section 5.1: the chip's measured ceilings, and attention below them."""
    size = 8192
    a, b = (torch.randn(size, size, device="cuda").half() for _ in range(2))
    a8, b8 = (torch.randint(-127, 128, (size, size), device="cuda", dtype=torch.int8) for _ in range(2))
    flops = 2.0 * size**3
    fp16 = flops / statistics.median(time_calls([lambda: a @ b])) / 1e6
    int8 = flops / statistics.median(time_calls([lambda: int_mm(a8, b8.T)])) / 1e6
    big = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    other = torch.empty_like(big)
    bandwidth = 2 * big.nbytes / statistics.median(time_calls([lambda: other.copy_(big)])) / 1e6  # TB/s
    work = 4.0 * BATCH * HEADS * TOKENS * TOKENS * DIM
    moved = 4 * BATCH * HEADS * TOKENS * DIM * 2
    found = timed(Shape(BATCH, HEADS, TOKENS, DIM), (Mode.PRECISION, Mode.BALANCED))
    lines = [
        "## Roofline (5.1)",
        "",
        f"Ceilings measured here: FP16 {fp16:.0f} and INT8 {int8:.0f} TFLOP/s ({size}³ through cuBLAS), memory {bandwidth:.2f} "
        f"TB/s (copy). Attention of {TOKENS} tokens reads and writes Q, K, V and O once: {work / moved:.0f} FLOP/byte, where the "
        f"report has 110; memory alone would allow {bandwidth * work / moved:.0f} TFLOP/s. So tensor cores and exponentials "
        "bound it, not memory: the report's reason for a gain is refuted, its gain is not.",
        "",
        "| | TFLOP/s | of FP16's ceiling | of INT8's |",
        "| --- | ---: | ---: | ---: |",
    ]
    for one in found:
        rate = work / one.seconds / 1e12
        lines.append(f"| {one.name} | {rate:.0f} | {rate / fp16:.0%} | {rate / int8:.0%} |")
    return lines


def scaling() -> list[str]:
    """Returns the tables of sections 6.1 and 6.3: times by samples, and many tokens."""
    lines = [
        "## Batches and long sequences (6.1, 6.3)",
        "",
        "| B | precision, ms | to B 1 | claimed |",
        "| --- | ---: | ---: | ---: |",
    ]
    times = {
        batch: statistics.median(
            [
                one.seconds
                for one in timed(Shape(batch, HEADS, TOKENS, DIM), (Mode.PRECISION,))
                if one.name == "precision"
            ]
        )
        for batch in BATCH_CLAIMS
    }
    for batch, claim in BATCH_CLAIMS.items():
        lines.append(f"| {batch} | {times[batch] * 1e3:.2f} | {times[batch] / times[1]:.2f}× | {claim}× |")
    found = timed(Shape(1, HEADS, LONG, DIM), (Mode.PRECISION,))
    each = ", ".join(f"{one.name} {one.seconds * 1e3:.1f} ms" for one in found)
    lines += ["", f"N {LONG}, one sample of {HEADS} heads: {each}; claimed some 50 ms and no lack of memory."]
    return lines


def errors() -> list[str]:
    """Returns a table for section 4.4 without a model: relative L2 of each mode against FP32 attention of N(0, 1) inputs."""
    shape = Shape(1, 8, TOKENS, DIM)
    inputs = inputs_of(shape)
    expected = exact(*inputs)
    lines = ["## Errors of the modes", "", "| | relative L2 error |", "| --- | ---: |"]
    for name, attend in {**peers(), **{mode.name.lower(): ours(mode, inputs) for mode in Mode}}.items():
        try:
            error = ((attend(*inputs).float() - expected).norm() / expected.norm()).item()
        except Exception as refusal:
            print(f"{name}: {str(refusal).splitlines()[0]}", flush=True)
            continue
        lines.append(f"| {name} | {error:.4f} |")
    return lines


def quality(paths: list[Path]) -> list[str]:
    """Returns the table of section 4.4, from files of `trtconvert evaluate --dtype float16` named after shipped models."""
    lines = [
        "## Images (4.4)",
        "",
        "PSNR against full precision of the same seeds; FID less its own. Noise: how far that is from itself with other seeds.",
        "",
        "| | PSNR, dB | SSIM | FID | full precision | difference | noise | claimed difference | |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    for path in paths:
        found = read_evaluation(path)
        title = f"{found.model}, {path.stem}, {found.samples} samples of {found.steps} steps"
        full, other, paired = found.full, found.other, found.paired
        if not (full and other and paired) or None in (found.int8.fid, full.fid, other.fid):
            lines.append(f"| {title} | | | {found.int8.fid or ''} | | | | | |")
            continue
        difference, noise = found.int8.fid - full.fid, abs(full.fid - other.fid)
        claim = QUALITY_CLAIMS.get(path.stem)
        same = claim is not None and (abs(claim) > CLAIMED_NOISE) == (abs(difference) > noise)
        lines.append(
            f"| {title} | {paired.psnr:.1f} | {paired.ssim or 0:.4f} | {found.int8.fid:.3f} | {full.fid:.3f} in {found.dtype} "
            f"| {difference:+.3f} | {noise:.3f} "
            + ("| | |" if claim is None else f"| {claim:+.1f} | {'confirmed' if same else 'refuted'} |")
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0, help="of sampling power, for each kernel")
    parser.add_argument("--evaluation", type=Path, nargs="*", default=[], help="files of trtconvert evaluate")
    parser.add_argument("--output", type=Path, default=Path("out/bench"), metavar="FOLDER")
    arguments = parser.parse_args()
    title = (
        f"{torch.cuda.get_device_name()}, {datetime.date.today()}, torch {torch.__version__}, median of {ROUNDS * REPEATS}. "
        f"B {BATCH}, H {HEADS}, D {DIM} where nothing else is said."
    )
    parts = [[title], latency(), components(), memory(), energy(arguments.seconds), roofline(), scaling(), errors()]
    if arguments.evaluation:
        parts.append(quality(arguments.evaluation))
    text = "\n\n".join("\n".join(part) for part in parts) + "\n"
    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / "seeds.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
