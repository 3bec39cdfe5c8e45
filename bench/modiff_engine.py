"""Steps of the emoji DiT in TensorRT on one GPU: 16-bit layers, INT8 layers, and INT8 layers that quantise changes (MoDiff).

    python bench/modiff_engine.py [--batch 64] [--patterns '*' 'blocks.*.mlp.*'] [--attention plugin|native] [--json FILE]

Calibrates on the GPU, exports and builds one engine of each kind, and calls them as our runtime does, in turns: the time is that
of the steps of a whole image, nothing waited for between them, divided by their number; the median of the rounds and the spread
of the middle half. Layers that quantise changes are those of each pattern by itself. PSNR is of samples against FP32 in torch.
Prints Markdown with the date and the GPU. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from trtconvert.attention.modes import Mode
from trtconvert.bundle import ComponentRecord, TensorRecord
from trtconvert.calib.calibrate import calibrate, parts_to_convert
from trtconvert.calib.layer_plan import layer_modes
from trtconvert.calib.layer_scales import is_modulated, layer_tables
from trtconvert.diffusion_model import DiffusionModel
from trtconvert.engine import tensorrt
from trtconvert.evaluate.verify import psnr
from trtconvert.export import storage
from trtconvert.export.changes import caches_of
from trtconvert.export.trace import SiteOptions, trace
from trtconvert.linear.sites import ConvertedLayer, with_sources_among
from trtconvert.models.denoiser import on_device
from trtconvert.models.emoji import emoji_model
from trtconvert.recipe import AttentionSection, CalibrationSection, EngineSection, LayersSection
from trtconvert.runtime.scratch import Scratch
from trtconvert.runtime.tensorrt import TensorRTComponent
from trtconvert.shipped import shipped_folder

STEPS, ROUNDS, BINS = 50, 7, 5
FIRST_SEED = 100_000
"""Far from those that scales are calibrated on."""


@dataclass(frozen=True)
class Row:
    """Milliseconds of a step, dB of samples, MiB of caches and of the plan."""

    what: str
    ms: float
    spread: float
    psnr: float
    caches: float
    plan: float


class Quiet:
    """Progress and notices that are printed where they matter."""

    def total(self, steps: int) -> None: ...
    def step(self) -> None: ...
    def share(self, detail: str, done: float) -> None: ...

    def notice(self, text: str) -> None:
        print(f"notice: {text}", flush=True)


class Bench:
    """The calibrated model.

    Args:
        batch: of all engines, even; attention: see `EngineSection`.
        patterns: of layers that quantise changes.
    """

    def __init__(self, batch: int, attention: str, patterns: Sequence[str]) -> None:
        self.model = emoji_model(shipped_folder() / "emoji-dit.safetensors")
        self.batch, self.attention = batch, attention
        self.folder = Path(tempfile.mkdtemp())
        self.section = LayersSection(modes="static", modiff=list(patterns))
        self.parts = parts_to_convert(self.model, AttentionSection(), self.section)
        on_gpu = on_device(self.model, "cuda")
        # Guidance takes two rows for a sample.
        self.seeds = range(FIRST_SEED, FIRST_SEED + batch // 2)
        self.full = on_gpu.sample(on_gpu.denoiser, self.seeds, steps=STEPS, solver="ddim")
        data = CalibrationSection(samples=18, batch=9, steps=20, bins=BINS, percentile=99.9)
        self.calibration = calibrate(
            on_gpu, data, "bench", self.parts.sites, self.folder / "observed", Quiet(), layers=self.parts.layers,
            of_layers=self.section,
        )  # fmt: skip
        self.model.denoiser.cpu()

    def layers(self, pattern: str) -> dict[str, ConvertedLayer]:
        """INT8 layers, of which those of a pattern quantise changes."""
        section = self.section.model_copy(update={"modiff": [pattern] if pattern else False})
        layers, scales = self.parts.layers, self.calibration.layers
        tables = layer_tables(self.model.denoiser, layers, scales, layer_modes(self.section, layers, BINS))
        return {
            layer.name: ConvertedLayer(
                layer, tables[layer.name], scales[layer.source].change_scale if is_modulated(layer, section) else None
            )
            for layer in with_sources_among(layers)
        }

    def engine(self, what: str, layers: dict[str, ConvertedLayer]) -> TensorRTComponent:
        """An engine of the model with some layers in INT8."""
        modes = torch.full((BINS,), int(Mode.PRECISION), dtype=torch.int32)
        tables = self.calibration.with_modes({site.name: modes for site in self.parts.sites})
        dims = {"batch": (self.batch, self.batch, self.batch), "height": (64, 64, 64), "width": (64, 64, 64)}
        options = SiteOptions(self.model.timestep_max, "calibrated", True)
        exported = trace(self.model, tables, options, layers=layers, dims=dims, dtype=torch.float16)
        path = self.folder / f"{what}.onnx"
        storage.save(exported, path)
        of_type = {"x": "float16", "timestep": "float32", "label": "int64"}
        caches = caches_of(self.model, layers, dims, torch.float16)
        component = ComponentRecord(
            onnx=path.name,
            inputs=[TensorRecord(name=i.name, dtype=of_type[i.name], shape=list(i.shape)) for i in self.model.inputs],
            outputs=[TensorRecord(name=self.model.output.name, dtype="float16", shape=list(self.model.output.shape))],
            timestep_input=self.model.timestep_input,
            timestep_max=self.model.timestep_max,
            dims=dims,
            engines=[],
            caches=[TensorRecord(name=c.name, dtype=c.dtype, shape=list(c.shape)) for c in caches],
        )
        section = EngineSection.model_validate({"attention": self.attention, "layers": "native"})
        built = tensorrt.build_engine("denoiser", component, path, section, Quiet())
        plan = path.with_suffix(".plan")
        plan.write_bytes(built.plan)
        device = torch.device("cuda", torch.cuda.current_device())
        return TensorRTComponent(plan, built.record, component, device=device, scratch=Scratch(device))


def image_ms(engine: TensorRTComponent, model: DiffusionModel, batch: int) -> float:
    """Milliseconds of a step, over those of an image."""
    x = torch.randn(batch, 3, 64, 64, device="cuda", dtype=torch.float16)
    label = torch.zeros(batch, device="cuda", dtype=torch.int64)
    timesteps = torch.linspace(model.timestep_max - 1, 0, STEPS, device="cuda")
    inputs = [(x * (0.99**i), timesteps[i].expand(batch).contiguous(), label) for i in range(STEPS)]
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    for given in inputs:
        engine(*given)
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / STEPS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--patterns", nargs="+", default=["*", "blocks.*.mlp.*"])
    parser.add_argument("--attention", choices=["plugin", "native"], default="plugin")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    bench = Bench(arguments.batch, arguments.attention, arguments.patterns)
    kinds = {"16-bit layers": {}, "INT8 layers": bench.layers("")}
    kinds |= {f"INT8 layers, changes of {pattern}": bench.layers(pattern) for pattern in arguments.patterns}
    engines: dict[str, TensorRTComponent] = {}
    for number, (what, layers) in enumerate(kinds.items()):
        engines[what] = bench.engine(f"engine-{number}", layers)
        print(f"{what}: built", flush=True)
    times: dict[str, list[float]] = {what: [] for what in engines}
    for _ in range(ROUNDS + 1):
        for what, engine in engines.items():
            times[what].append(image_ms(engine, bench.model, arguments.batch))
    rows = []
    for what, engine in engines.items():
        low, middle, high = statistics.quantiles(times[what][1:], n=4)  # the first one records graphs
        found = bench.model.sample(engine, bench.seeds, steps=STEPS, solver="ddim")
        db = float(psnr(found.flatten()[None], bench.full.flatten()[None]))
        plan = (bench.folder / f"engine-{len(rows)}.plan").stat().st_size
        rows.append(Row(what, middle, high - low, db, engine.caches_memory / 2**20, plan / 2**20))
    today, gpu = datetime.date.today(), torch.cuda.get_device_name()
    print(f"\n{today}, {gpu}, TensorRT {tensorrt.status().detail}, batch {arguments.batch}, {STEPS} steps, FP16\n")
    print("| emoji DiT | step, ms | spread | against INT8 | PSNR, dB | caches, MiB | plan, MiB |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    int8 = rows[1].ms
    for row in rows:
        print(
            f"| {row.what} | {row.ms:.3f} | {row.spread:.3f} | {row.ms / int8 - 1:+.0%} | {row.psnr:.1f} | {row.caches:.0f} | "
            f"{row.plan:.1f} |"
        )
    if arguments.json:
        figures = {"date": str(today), "gpu": gpu, "rows": [asdict(row) for row in rows]}
        arguments.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
