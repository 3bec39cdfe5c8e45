"""Steps of two models in TensorRT on one GPU: 16-bit layers, INT8 layers, and INT8 layers that quantise deltas (MoDiff).

    python bench/modiff_engine.py [--batches 64 2] [--patterns '*' '*.mlp.2'] [--layers native plugin] [--json FILE]
    python bench/modiff_engine.py --batches --wide 3072 [--wide-batches 4]
    python bench/modiff_engine.py --batches --unet [FILE] [--unet-batches 64] [--unet-patterns '*' '*.attn*']

The first model is the emoji DiT; its batches count both rows of guidance; `--batches` without a number skips it. `--unet` adds
the U-Net in the layout of the CIFAR-10 DDPM, whose convolutions are INT8 too, from a checkpoint or with random weights, which
give times but no quality.

`--wide` adds two blocks of the DiT with this number of channels and random weights: the cost of caches depends on the width.

The script calibrates once on the GPU, exports and builds one engine of each kind, batch and pattern, and calls the engines of a
batch like our runtime, in turns. The time of a step is the time of a whole image's steps, without waits between them, divided by
their number: the median of the rounds and the spread of the middle half. Each pattern alone selects the layers that quantise
deltas, by TensorRT's own kernels (Q/DQ) or by our plugins. The plugins support linear layers only, so the U-Net has Q/DQ only.
INT8 layers are counted in TensorRT's input: beside plugins others may stay in 16 bits. Times are compared with
the fastest engine of INT8 layers without deltas. PSNR is of samples of the same seeds against FP32 in torch. Prints Markdown
with the date and the GPU, a table for each model and batch. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import onnx_ir as ir
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from trtconvert.attention.modes import Mode
from trtconvert.bars import NoBar
from trtconvert.bundle import ComponentRecord, TensorRecord
from trtconvert.calib.calibrate import calibrate, parts_to_convert
from trtconvert.calib.layer_plan import stated_layers
from trtconvert.calib.layer_scales import is_modulated, layer_tables
from trtconvert.diffusion_model import DiffusionModel
from trtconvert.engine import tensorrt
from trtconvert.evaluate.verify import psnr
from trtconvert.export import storage
from trtconvert.export.delta_caches import caches_of
from trtconvert.export.matching import producer_of
from trtconvert.export.nodes.attention import attention_nodes
from trtconvert.export.trace import SiteOptions, trace
from trtconvert.linear.sites import ConvertedLayer, with_input_groups_among
from trtconvert.models import ddpm_unet
from trtconvert.models.ddpm import ddpm_model
from trtconvert.models.denoiser import on_device
from trtconvert.models.emoji import emoji_model
from trtconvert.models.emoji_dit import EmojiDiT
from trtconvert.recipe import AttentionSection, CalibrationSection, EngineSection, LayersSection
from trtconvert.runtime.scratch import Scratch
from trtconvert.runtime.tensorrt import TensorRTComponent
from trtconvert.shipped import shipped_folder

STEPS, ROUNDS, BINS = 50, 7, 5
FIRST_SEED = 100_000
"""Seeds far from the calibration's seeds."""

PATTERNS = ("*", "blocks.*.mlp.*", "*.attn.qkv", "*.attn.out", "*.mlp.0", "*.mlp.2")
"""Of the DiT: all layers, the MLPs, and each kind of layer by itself."""

UNET_PATTERNS = ("*", "*.[23].block.*", "*.attn*")
"""All layers; the blocks of 8 × 8 and 4 × 4 pixels, which have small caches; the layers around attention."""

WIDE_BLOCKS, WIDE_HEAD = 2, 64
"""Blocks, and channels of a head, of the wide DiT."""

DATA = CalibrationSection(samples=18, batch=9, steps=20, bins=BINS, percentile=99.9)

Kind = Literal["native", "plugin"]
KINDS: dict[Kind, str] = {"native": "by Q/DQ", "plugin": "by plugins"}


@dataclass(frozen=True)
class Subject:
    """A model, and its settings in this bench.

    Attributes:
        rows: of a batch, for each sample. patterns: of layers that quantise deltas.
        int8_by: ways to compute INT8 layers; deltas_by: ways to compute layers that quantise deltas, which need other engines.
        trained: True if the samples of the model have a quality to measure.
    """

    title: str
    model: DiffusionModel
    rows: int
    layers: Sequence[Literal["linear", "conv"]]
    batches: Sequence[int]
    patterns: Sequence[str]
    int8_by: Sequence[Kind]
    deltas_by: Sequence[Kind]
    trained: bool = True


@dataclass(frozen=True)
class Row:
    """An engine, its number of INT8 layers, milliseconds of a step, dB of samples, MiB of caches and of the plan."""

    model: str
    batch: int
    what: str
    kind: str
    pattern: str
    in_int8: int
    ms: float
    spread: float
    psnr: float | None
    caches: float
    plan: float


@dataclass(frozen=True)
class Variant:
    """An engine's INT8 layers: none, or all; layers of the pattern quantise deltas."""

    kind: Kind
    in_int8: bool = True
    pattern: str = ""

    def __str__(self) -> str:
        if not self.in_int8:
            return "16-bit layers"
        return f"INT8 layers, {f'changes of `{self.pattern}`, ' if self.pattern else ''}{KINDS[self.kind]}"


class Quiet(NoBar):
    """Prints progress and important notices."""

    def share(self, detail: str, done: float) -> None: ...

    def notice(self, text: str) -> None:
        print(f"notice: {text}", flush=True)


class Bench:
    """The calibrated model.

    Args:
        attention: see `EngineSection`. device: where it is calibrated. data: what is observed. steps: of samples.
    """

    def __init__(
        self,
        subject: Subject,
        attention: str,
        device: str = "cuda",
        data: CalibrationSection = DATA,
        steps: int = STEPS,
    ) -> None:
        self.subject, self.model, self.attention, self.steps = subject, subject.model, attention, steps
        self.folder = Path(tempfile.mkdtemp())
        self.section = LayersSection(kinds=list(subject.layers), modes="static", modiff=list(subject.patterns))
        on_its_device = on_device(self.model, device)
        self.parts = parts_to_convert(on_its_device, AttentionSection(), self.section)
        self.full = None
        if subject.trained:
            self.full = self.samples(on_its_device, on_its_device.denoiser, max(subject.batches))
        self.bins = data.bins
        self.calibration = calibrate(
            on_its_device, data, "bench", self.parts.sites, self.folder / "observed", Quiet(), layers=self.parts.layers,
            of_layers=self.section,
        )  # fmt: skip
        self.model.denoiser.cpu()

    def samples(self, model: DiffusionModel, denoiser: Any, batch: int) -> Tensor:
        """Draws with calls of this batch; the number of samples fits the largest batch."""
        at_once = batch // self.subject.rows
        seeds = range(FIRST_SEED, FIRST_SEED + max(self.subject.batches) // self.subject.rows)
        drawn = [
            model.sample(denoiser, seeds[first : first + at_once], steps=self.steps, solver="ddim")
            for first in range(0, len(seeds) // at_once * at_once, at_once)
        ]
        return torch.cat(drawn)

    def psnr(self, engine: TensorRTComponent, batch: int) -> float | None:
        """Returns the PSNR of an engine's samples, dB; None for an untrained model."""
        if self.full is None:
            return None
        found = self.samples(self.model, engine, batch)
        return float(psnr(found.flatten()[None], self.full[: len(found)].flatten()[None]))

    def variants(self, kinds: Sequence[Kind]) -> list[Variant]:
        """Returns the variants in order; variants of one export are adjacent."""
        of_int8, of_deltas = (
            [kind for kind in kinds if kind in able] for able in (self.subject.int8_by, self.subject.deltas_by)
        )
        return [
            Variant("native", in_int8=False),
            *(Variant(kind) for kind in of_int8 or self.subject.int8_by),  # times are compared with one
            *(Variant(kind, pattern=pattern) for pattern in self.subject.patterns for kind in of_deltas),
        ]

    def layers(self, variant: Variant) -> dict[str, ConvertedLayer]:
        """Returns the INT8 layers of a variant. The layers of its pattern quantise deltas."""
        if not variant.in_int8:
            return {}
        section = self.section.model_copy(update={"modiff": [variant.pattern] if variant.pattern else False})
        layers, scales = self.parts.layers, self.calibration.layers
        stated = stated_layers(self.section, layers, self.bins)
        modes = {name: decision.modes for name, decision in stated.items()}
        tables = layer_tables(self.model.denoiser, layers, scales, modes)
        return {
            layer.name: ConvertedLayer(
                layer,
                tables[layer.name],
                scales[layer.input_group].change_scale if is_modulated(layer, section) else None,
            )
            for layer in with_input_groups_among(layers)
        }

    def exported(self, variant: Variant, batch: int) -> tuple[Path, ComponentRecord]:
        """Returns the ONNX model with a variant's layers, and its record; both kinds of engines share the model."""
        model, layers = self.model, self.layers(variant)
        modes = torch.full((self.bins,), int(Mode.PRECISION), dtype=torch.int32)
        tables = self.calibration.with_modes({site.name: modes for site in self.parts.sites})
        sizes = {name: size for name, (_, size, _) in model.dims.items()} | {"batch": batch}
        dims = {name: (size, size, size) for name, size in sizes.items()}
        options = SiteOptions(model.timestep_max, "calibrated", True)
        exported = trace(model, tables, options, layers=layers, dims=dims, dtype=torch.float16)
        path = self.folder / f"{len(list(self.folder.glob('*.onnx')))}.onnx"
        storage.save(exported, path)
        caches = caches_of(model, layers, dims | {"batch": (1, 2, batch)}, torch.float16)  # any batch, computed quickly
        of_type = {spec.name: "float16" if spec.dtype == "float32" else spec.dtype for spec in model.inputs}
        of_type |= dict.fromkeys(model.always_float32, "float32")
        component = ComponentRecord(
            onnx=path.name,
            inputs=[TensorRecord(name=i.name, dtype=of_type[i.name], shape=list(i.shape)) for i in model.inputs],
            outputs=[TensorRecord(name=model.output.name, dtype="float16", shape=list(model.output.shape))],
            timestep_input=model.timestep_input,
            timestep_max=model.timestep_max,
            dims=dims,
            engines=[],
            caches=[TensorRecord(name=c.name, dtype=c.dtype, shape=list(c.shape)) for c in caches],
        )
        return path, component

    def engine(
        self, path: Path, component: ComponentRecord, kind: Kind, scratch: Scratch
    ) -> tuple[TensorRTComponent, int]:
        """Returns an engine of the exported model, with INT8 layers of one kind, and the number of these layers."""
        section = EngineSection.model_validate({"attention": self.attention, "layers": kind})
        built = tensorrt.build_engine("denoiser", component, path, section, Quiet())
        plan = self.plan(path, kind)
        plan.write_bytes(built.plan)
        model, record = storage.load(path), built.record
        native = attention_nodes(model) if record.attention == "native" else [site.name for site in record.native_sites]
        in_int8 = int8_products(tensorrt.lowered(model, native, section, [component.dims]))
        device = torch.device("cuda", torch.cuda.current_device())
        return TensorRTComponent(plan, record, component, device=device, scratch=scratch), in_int8

    @staticmethod
    def plan(path: Path, kind: Kind) -> Path:
        return path.with_suffix(f".{kind}.plan")


def int8_products(model: ir.Model) -> int:
    """Returns the number of products with INT8 activations in a model for TensorRT: by plugins, or behind a DQ."""
    return sum(
        node.op_type in ("Int8Linear", "Int8Conv")
        or (node.op_type in ("MatMul", "Gemm", "Conv") and producer_of(node.inputs[0], "DequantizeLinear") is not None)
        for node in ir.traversal.RecursiveGraphIterator(model.graph)
    )


def emoji(batches: Sequence[int], patterns: Sequence[str]) -> Subject:
    """Returns the model that ships."""
    model = emoji_model(shipped_folder() / "emoji-dit.safetensors")
    return Subject("emoji DiT", model, 2, ["linear"], batches, patterns, ["native"], list(KINDS))


def wide(width: int, batches: Sequence[int]) -> Subject:
    """Returns the same architecture with other sizes, and random weights in place of initial zeros."""
    torch.manual_seed(0)
    denoiser = EmojiDiT(width, width // WIDE_HEAD, WIDE_BLOCKS).eval().requires_grad_(False)
    for module in (denoiser.modulation, denoiser.modulation_out, denoiser.project_out):
        nn.init.normal_(module.weight, std=0.02)
    model = replace(emoji_model(shipped_folder() / "emoji-dit.safetensors"), denoiser=denoiser)
    title = f"DiT of {width:,} channels, {WIDE_BLOCKS} blocks, random weights"
    return Subject(title, model, 2, ["linear"], batches, ["*"], ["native"], list(KINDS), trained=False)


def unet(weights: Path | None, batches: Sequence[int], patterns: Sequence[str]) -> Subject:
    """Returns the U-Net of a checkpoint, or with random weights."""
    title = "U-Net of CIFAR-10's DDPM" + ("" if weights else ", random weights")
    model = ddpm_model(weights or random_weights())
    kinds: list[Literal["linear", "conv"]] = ["linear", "conv"]
    return Subject(title, model, 1, kinds, batches, patterns, list(KINDS), ["native"], trained=weights is not None)


def random_weights() -> Path:
    """Writes a file of seeded weights that keep the magnitude of activations."""
    torch.manual_seed(0)
    model = ddpm_unet.build()
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(module.weight)
            nn.init.zeros_(module.bias)  # pyright: ignore[reportArgumentType]  # all have one
    path = Path(tempfile.mkdtemp()) / "random.safetensors"
    save_file(model.state_dict(), path)
    return path


def image_ms(engine: TensorRTComponent, model: DiffusionModel, batch: int) -> float:
    """Returns the milliseconds of a step, as the mean over the steps of an image."""
    sizes = {name: size for name, (_, size, _) in model.dims.items()} | {"batch": batch}
    example = {name: x.cuda() for name, x in model.example(0, sizes).items()}
    noise, timestep = model.inputs[0].name, model.timestep_input
    timesteps = torch.linspace(model.timestep_max - 1, 0, STEPS, device="cuda")
    inputs = [
        example | {noise: (example[noise] * 0.99**i).half(), timestep: timesteps[i].expand(batch).contiguous()}
        for i in range(STEPS)
    ]
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    for given in inputs:
        engine(*given.values())
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / STEPS


def measured(bench: Bench, batch: int, kinds: Sequence[Kind]) -> list[Row]:
    """Returns the engines of a batch, beside each other."""
    subject, model = bench.subject, bench.model
    exports: dict[tuple[bool, str], tuple[Path, ComponentRecord]] = {}
    with ExitStack() as stack:
        engines, in_int8 = dict[Variant, TensorRTComponent](), dict[Variant, int]()
        scratch = Scratch(torch.device("cuda", torch.cuda.current_device()))
        for variant in bench.variants(kinds):
            began, key = time.monotonic(), (variant.in_int8, variant.pattern)
            if key not in exports:
                exports[key] = bench.exported(variant, batch)
            engine, in_int8[variant] = bench.engine(*exports[key], variant.kind, scratch)
            engines[variant] = stack.enter_context(closing(engine))
            print(f"{subject.title}, batch {batch}, {variant}: {time.monotonic() - began:.0f} s", flush=True)
        times: dict[Variant, list[float]] = {variant: [] for variant in engines}
        for _ in range(ROUNDS + 1):
            for variant, engine in engines.items():
                times[variant].append(image_ms(engine, model, batch))
        rows = []
        for variant, engine in engines.items():
            low, middle, high = statistics.quantiles(times[variant][1:], n=4)  # the first one records graphs
            path = bench.plan(exports[variant.in_int8, variant.pattern][0], variant.kind)
            db, plan = bench.psnr(engine, batch), path.stat().st_size / 2**20
            memory = engine.caches_memory / 2**20
            kind = variant.kind if variant.in_int8 else ""
            about = subject.title, batch, str(variant), kind, variant.pattern, in_int8[variant]
            rows.append(Row(*about, middle, high - low, db, memory, plan))
    return rows


def table(rows: Sequence[Row], heading: str) -> str:
    """Returns Markdown of the engines of a batch."""
    columns = "layers in INT8 | step, ms | spread | against INT8 | PSNR, dB | caches, MiB | plan, MiB"
    lines = [
        heading,
        "",
        f"| {rows[0].model} | {columns} |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    int8 = min(row.ms for row in rows if row.kind and not row.pattern)
    for row in rows:
        db = "" if row.psnr is None else f"{row.psnr:.1f}"
        against = f"{row.ms:.3f} | {row.spread:.3f} | {row.ms / int8 - 1:+.0%}"
        lines.append(f"| {row.what} | {row.in_int8} | {against} | {db} | {row.caches:.0f} | {row.plan:.1f} |")
    return "\n".join(lines)


def write(path: Path, about: Mapping[str, str], rows: Sequence[Row]) -> None:
    path.write_text(json.dumps({**about, "rows": [asdict(row) for row in rows]}, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="*", default=[64], help="of the DiT, even; none leaves it out")
    parser.add_argument("--patterns", nargs="+", default=PATTERNS)
    parser.add_argument("--wide", type=int, help="channels of the wide DiT, in steps of 256")
    parser.add_argument("--wide-batches", type=int, nargs="+", default=[4])
    parser.add_argument("--unet", type=Path, nargs="?", const="", help="a checkpoint; random weights without one")
    parser.add_argument("--unet-batches", type=int, nargs="+", default=[64])
    parser.add_argument("--unet-patterns", nargs="+", default=UNET_PATTERNS)
    parser.add_argument(
        "--layers", choices=list(KINDS), nargs="+", default=list(KINDS), help="the kernels of INT8 layers"
    )
    parser.add_argument("--attention", choices=["plugin", "native", "auto"], default="plugin")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if any(batch < 2 or batch % 2 for batch in arguments.batches):
        parser.error("--batches are even: guidance takes two rows of a sample")
    torch.backends.cudnn.allow_tf32 = False  # the reference samples are FP32
    subjects = [emoji(arguments.batches, arguments.patterns)] if arguments.batches else []
    if arguments.wide is not None:
        subjects.append(wide(arguments.wide, arguments.wide_batches))
    if arguments.unet is not None:
        weights = arguments.unet if arguments.unet != Path() else None
        subjects.append(unet(weights, arguments.unet_batches, arguments.unet_patterns))
    about = {
        "date": str(datetime.date.today()),
        "gpu": torch.cuda.get_device_name(),
        "tensorrt": tensorrt.status().detail,
    }
    rows, tables = [], []
    for subject in subjects:
        bench = Bench(subject, arguments.attention)
        for batch in subject.batches:
            here = measured(bench, batch, arguments.layers)
            rows += here
            heading = (
                f"{about['date']}, {about['gpu']}, TensorRT {about['tensorrt']}, {subject.title}, batch {batch}, "
                f"{STEPS} steps, FP16, attention: {arguments.attention}"
            )
            tables.append(table(here, heading))
            print(f"\n{tables[-1]}\n", flush=True)
            if arguments.json:  # after each batch, so that results survive a time limit
                write(arguments.json, about, rows)


if __name__ == "__main__":
    main()
