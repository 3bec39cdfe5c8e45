"""Seconds that a loaded engine takes to change its LoRAs, with INT8 layers and without.

    python bench/loras.py [--model sdxl] [--layers plugin exact] [--rank 16] [--exports FOLDER] [--optimization-level 1]
                          [--parts 64 256 1024]
    python bench/loras.py --bundle BUNDLE

The script sets a LoRA with random numbers for every linear layer of a denoiser in a refittable engine, sets it at another
strength, and removes it. Before, it measures the host's part: reading the weights, and adding to them. Without TensorRT it
measures only this part. The goal is 2 s for SDXL's U-Net. Below each row is the division of its time
(`trtconvert.runtime.reading.Spent`): opening, checking, waiting, giving and refitting are consecutive; another thread reads and
computes at the same time. `--parts` compares sizes of the parts that TensorRT receives.

Without a bundle, the denoiser is one of bench/architectures.py with random weights that FP16 holds, calibrated by one call on the
GPU, and not verified by sampling; `--exports` keeps its ONNX model for further runs. The engine's speed does not matter here,
so TensorRT tries few kernels for it (`--optimization-level`). The output's error is against torch in FP32, with the LoRA
merged there. After the removal of the LoRA the engine should give its first output again, bit for bit. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import datetime
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar

import torch
from architectures import ARCHITECTURES, TIMESTEP_MAX, describe
from machine import processor
from safetensors.torch import save_file
from torch import Tensor

from trtconvert import runtime
from trtconvert.attention.modes import Mode
from trtconvert.attention.reference import AttentionTables, tables_from_data
from trtconvert.attention.sites import SiteCall
from trtconvert.bundle import ComponentRecord, LayerRecord, TensorRecord, read_manifest, unquantised_file
from trtconvert.diffusion_model import DiffusionModel
from trtconvert.engine import tensorrt
from trtconvert.export import storage
from trtconvert.export.trace import SiteOptions, trace
from trtconvert.linear.modes import LayerMode
from trtconvert.linear.reference import LEVELS, LayerTables, layer_weight, short_scale
from trtconvert.linear.sites import ConvertedLayer, Layer, LayerCall, LayerFinder, model_tensors, select_layers
from trtconvert.models.denoiser import intercepted
from trtconvert.recipe import EngineSection, LayersSection
from trtconvert.runtime import loras as runtime_loras
from trtconvert.runtime.loras import Additions, BuiltWeights, additions_of
from trtconvert.runtime.reading import Spent, one_ahead
from trtconvert.runtime.scratch import Scratch
from trtconvert.runtime.tensorrt import TensorRTComponent
from trtconvert.weights.unquantised import save_unquantised

TIMESTEP = 500.0
_T = TypeVar("_T")


def timed(name: str, work: Callable[[], _T]) -> _T:
    started = time.perf_counter()
    result = work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    print(f"| {name} | {time.perf_counter() - started:.2f} s |", flush=True)
    return result


# A denoiser without a bundle --------------------------------------------------------------------------------------------


def rounded(name: str, device: str) -> DiffusionModel:
    """Returns a denoiser of FP32 numbers that FP16 holds exactly, like published weights."""
    model = describe(name, device)
    for parameter in model.denoiser.parameters():
        parameter.copy_(parameter.half().float())
    return model


def inputs_of(model: DiffusionModel, dtype: torch.dtype, device: str) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs = {name: torch.randn(s, generator=generator) for name, s in ARCHITECTURES[model.name].shapes.items()}
    inputs["timestep"].fill_(TIMESTEP)
    return {name: x.to(device, torch.float32 if name == "timestep" else dtype) for name, x in inputs.items()}


def calibrated(
    model: DiffusionModel, inputs: dict[str, Tensor]
) -> tuple[dict[str, AttentionTables], dict[str, ConvertedLayer]]:
    """Returns tables of one call's own data, one timestep bin: scales from maxima, nothing equalised or moved."""
    attention, maxima = dict[str, AttentionTables](), dict[str, float]()
    finder, section = LayerFinder(model.denoiser), LayersSection()

    def attend(call: SiteCall) -> Tensor:
        attention[call.name] = tables_from_data(call.q, call.k, call.v, Mode.PRECISION).to("cpu")
        return call.exact()

    def find(call: LayerCall) -> Tensor:
        maxima[call.name] = float(call.x.abs().amax())
        return finder(call)

    intercepted(model, attend, find)(**inputs)
    layers, _ = select_layers(finder.layers(), ["*"], [], section.min_rows, section.kinds, few_rows=section.few_rows)
    tensors = model_tensors(model.denoiser)
    return attention, {layer.name: ConvertedLayer(layer, tables_of(layer, tensors, maxima)) for layer in layers}


def tables_of(layer: Layer, tensors: dict[str, Tensor], maxima: dict[str, float]) -> LayerTables:
    ones = torch.ones(layer.in_channels)
    weight = layer.weight.of(tensors)
    stored, scale = (x.cpu() for x in layer_weight(weight, ones.to(weight.device)))
    bias = torch.zeros(layer.out_channels) if layer.bias is None else layer.bias.of(tensors).cpu()
    x_scale = short_scale(torch.tensor([maxima[layer.input_group] / LEVELS]))
    mode = LayerMode.WEIGHT_ONLY if layer.weight_only else LayerMode.STATIC
    return LayerTables(stored, scale, bias, ones, 0 * ones, x_scale, torch.tensor([int(mode)], dtype=torch.int32))


def record_of(model: DiffusionModel, onnx: Path, layers: Sequence[ConvertedLayer]) -> ComponentRecord:
    """Returns the manifest's record of such a denoiser in FP16."""

    def tensor(name: str, shape: Sequence[int | str]) -> TensorRecord:
        return TensorRecord(name=name, dtype="float32" if name == "timestep" else "float16", shape=list(shape))

    return ComponentRecord(
        onnx=onnx.name,
        inputs=[tensor(x.name, x.shape) for x in model.inputs],
        outputs=[tensor(model.output.name, model.output.shape)],
        timestep_input="timestep",
        timestep_max=TIMESTEP_MAX,
        dims={},
        layers=[
            LayerRecord(
                name=x.layer.name, kind=x.layer.kind, in_channels=x.layer.in_channels, out_channels=x.layer.out_channels,
                rows=x.layer.rows, weight=x.layer.weight.name, modes=x.tables.modes.tolist(),
            )
            for x in layers
        ],
        engines=[],
    )  # fmt: skip


class Notices:
    """Prints the messages of a build."""

    def share(self, detail: str, done: float) -> None:
        pass

    def notice(self, text: str) -> None:
        print(f"notice: {text}", flush=True)


def exported(name: str, folder: Path, device: str) -> Path:
    """Returns a folder with the denoiser's ONNX model, the unquantised weights, and the record; the first call writes it."""
    onnx = folder / f"{name}-refittable.onnx"
    record = onnx.with_suffix(".json")
    if record.exists():
        return onnx
    model = timed("random weights", lambda: rounded(name, device))
    tables, layers = timed("calibrated", lambda: calibrated(model, inputs_of(model, torch.float32, device)))
    model.denoiser.cpu()

    def write() -> None:
        options = SiteOptions(TIMESTEP_MAX, "calibrated", True)
        traced = trace(model, tables, options, layers=layers, dims={}, dtype=torch.float16)
        storage.save(traced, onnx)

    timed("exported", write)
    timed("kept", lambda: save_unquantised(model.denoiser, [x.layer for x in layers.values()], onnx))
    record.write_text(record_of(model, onnx, list(layers.values())).model_dump_json())
    return onnx


# Measuring --------------------------------------------------------------------------------------------------------------


def lora_file(shapes: dict[str, tuple[int, ...]], rank: int, folder: Path) -> Path:
    """Writes a LoRA of random numbers for all linear layers, and returns its file."""
    tensors: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        if name.endswith(".weight") and len(shape) == 2:
            module, (rows, columns) = name.removesuffix(".weight"), shape
            tensors[f"{module}.lora_A.weight"] = torch.randn(rank, columns).half()
            tensors[f"{module}.lora_B.weight"] = torch.randn(rows, rank).half() / 1000
    file = folder / "lora.safetensors"
    save_file(tensors, file)
    return file


def host_rows(onnx: Path, rank: int, folder: Path, device: torch.device) -> Path:
    """Measures the work of the host and of torch; returns the file of the LoRA."""
    built = timed("open the weights", lambda: BuiltWeights(onnx, {}))
    file = lora_file(built.shapes, rank, folder)
    wanted = timed("read the LoRA", lambda: additions_of([(file, 1.0)], "denoiser", built.shapes, "the denoiser"))
    for name, additions in (("add it to", wanted), ("add it again to", wanted), ("take it away from", {})):
        spent = Spent()

        def change(additions: Additions = additions, spent: Spent = spent) -> None:
            with closing(one_ahead(built.anew(wanted.keys(), additions, device, spent=spent), device)) as parts:
                while next(parts, None) is not None:  # earlier parts are freed
                    spent.parts += 1

        timed(f"{name} {len(wanted)} weights, in 16 bits", change)
        print_spent(spent)
    return file


def print_spent(spent: Spent) -> None:
    seconds = ", ".join(f"{what} {taken:.2f} s" for what, taken in spent.seconds.items())
    print(
        f"| … {spent.read / 2**20:.0f} MiB read, {spent.given / 2**20:.0f} given in {spent.parts} parts | {seconds} |"
    )


def engine_rows(denoiser: Any, file: Path, sizes: Sequence[int]) -> None:
    layers = {layer for layer, _ in denoiser.record.int8_constants.values()}
    print(f"| INT8 layers that plugins compute | {len(layers)} |")
    for name, loras in (
        ("first set_loras", [(file, 1.0)]),
        ("another strength", [(file, 0.5)]),
        ("two of them", [(file, 0.5), (file, 0.25)]),
        ("none", []),
    ):
        set_row(denoiser, name, loras)
    usual = runtime_loras.LARGEST_PART
    for size in sizes:
        runtime_loras.LARGEST_PART = size * 2**20
        set_row(denoiser, f"in parts of {size} MiB", [(file, 1.0)])
        set_row(denoiser, "… and none", [])
    runtime_loras.LARGEST_PART = usual


def set_row(denoiser: Any, name: str, loras: Sequence[tuple[Path, float]]) -> None:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    count = timed(name, lambda: denoiser.set_loras(loras))
    taken, kept = torch.cuda.max_memory_allocated() - before, torch.cuda.max_memory_reserved() - reserved
    print(f"| … weights of the engine | {count} |")
    print(
        f"| … device memory meanwhile, and what torch has taken for it | {taken / 2**20:.0f}, {kept / 2**20:.0f} MiB |"
    )
    print_spent(denoiser.last_change)


def error_rows(denoiser: Any, name: str, file: Path, device: torch.device) -> None:
    """Outputs of the engine with the LoRA and without, against torch."""
    model = rounded(name, str(device))
    half, full = (inputs_of(model, dtype, str(device)) for dtype in (torch.float16, torch.float32))

    def error(expected: Tensor) -> float:
        return float((denoiser(**half).float() - expected).norm() / expected.norm())

    before, plain = denoiser(**half), model.denoiser(*full.values())
    print(f"| error without a LoRA | {error(plain):.4f} |")
    denoiser.set_loras([(file, 1.0)])
    tensors = model_tensors(model.denoiser)
    shapes = {weight: tuple(x.shape) for weight, x in tensors.items()}
    for weight, additions in additions_of([(file, 1.0)], "denoiser", shapes, "the denoiser").items():
        for addition in additions:
            addition.update.add_to(tensors[weight], 1.0)
    merged = model.denoiser(*full.values())
    print(f"| error with it | {error(merged):.4f} |")
    print(f"| what it changes | {float((merged - plain).norm() / plain.norm()):.4f} |")
    denoiser.set_loras([])
    print(f"| as before without it, bit for bit | {torch.equal(denoiser(**half), before)} |")


def built_engine(onnx: Path, layers: str, level: int, device: torch.device, folder: Path) -> TensorRTComponent:
    component = ComponentRecord.model_validate_json(onnx.with_suffix(".json").read_text())
    options = EngineSection.model_validate(
        {"attention": "plugin", "layers": layers, "refittable": True, "optimization_level": level}
    )
    engine = timed(
        f"engine built, layers {layers}",
        lambda: tensorrt.build_engine("denoiser", component, onnx, options, Notices()),
    )
    plan = folder / "engine.plan"
    plan.write_bytes(engine.plan)
    print(f"| plan | {len(engine.plan) / 2**20:.0f} MiB |")
    where = {"device": device, "scratch": Scratch(device)}
    return TensorRTComponent(plan, engine.record, component, onnx=onnx, **where)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--bundle", type=Path, help="with an engine that is refittable, of a denoiser; else one is made"
    )
    parser.add_argument("--model", choices=list(ARCHITECTURES), default="sdxl")
    parser.add_argument("--layers", nargs="+", choices=["plugin", "exact"], default=["plugin", "exact"])
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--exports", type=Path, help="keep the exported model here")
    parser.add_argument("--optimization-level", type=int, default=1)
    parser.add_argument(
        "--parts", type=int, nargs="*", default=[], help="MiB that TensorRT is given at once, to compare"
    )
    arguments = parser.parse_args()
    torch.backends.cudnn.allow_tf32 = False  # the reference of errors is FP32
    has_engines, has_gpu = tensorrt.status().available, torch.cuda.is_available()
    device = torch.device("cuda", 0) if has_gpu else torch.device("cpu")
    where = torch.cuda.get_device_name() if has_gpu else processor()
    print(f"{datetime.date.today()}, {where}, {arguments.bundle or arguments.model}\n\n| | |\n| --- | --- |")
    with torch.no_grad(), tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if arguments.bundle:
            component = read_manifest(arguments.bundle).components["denoiser"]
            file = host_rows(arguments.bundle / component.onnx, arguments.rank, folder, device)
            if has_engines:
                with runtime.load(arguments.bundle, backend="tensorrt") as bundle:
                    engine_rows(bundle["denoiser"], file, arguments.parts)
            return
        exports = arguments.exports or folder
        exports.mkdir(parents=True, exist_ok=True)
        onnx = exported(arguments.model, exports, str(device))
        kept = unquantised_file(onnx).stat().st_size
        print(f"| unquantised weights kept for INT8 layers | {kept / 2**20:.0f} MiB |")
        file = host_rows(onnx, arguments.rank, folder, device)
        for layers in arguments.layers if has_engines else ():
            denoiser = built_engine(onnx, layers, arguments.optimization_level, device, folder)
            engine_rows(denoiser, file, arguments.parts)
            error_rows(denoiser, arguments.model, file, device)
            denoiser.close()
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
