"""The stages that build engines, each for one GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trtconvert.bundle import ComponentRecord, EngineRecord
from trtconvert.cache import Cache, Stage
from trtconvert.engine import BackendStatus, tensorrt, tensorrt_rtx
from trtconvert.files import free_space, sha256
from trtconvert.library import library_path
from trtconvert.recipe import EngineSection, computes
from trtconvert.stages.common import COMPONENT, ENGINE, NATIVE, RECORD, Engines, run_stage

if TYPE_CHECKING:
    from trtconvert.progress import Bar, Reporter


@dataclass(frozen=True)
class EngineBuild:
    """How engines are built.

    Attributes:
        options: what is asked for.
        backend: what builds them here.
        cache: where stages are kept.
        report: told how they go.
    """

    options: EngineSection
    backend: BackendStatus
    cache: Cache
    report: Reporter


def engine_stages(
    build: EngineBuild,
    name: str,
    component: ComponentRecord,
    exported: Stage,
    recheck: Callable[[], None] | None = None,
) -> Engines:
    """One serialized engine of a component per target of the chosen backend; none for ONNX Runtime, which builds nothing.

    Args:
        exported: a folder with the component's ONNX, and the hash of what decides it.
        recheck: called when an engine is built, where the folder may change meanwhile. What it raises keeps the engine out of the
            cache.
    """
    options, backend, cache, report = build.options, build.backend, build.cache, build.report
    chosen = options.model_dump(mode="json", exclude={"backend", "targets", "guidance"})  # which the ONNX has inside
    reads = {"onnx": exported.key, "engine": chosen, "library": backend.detail}
    if backend.name == "tensorrt":  # what is measured and built depends on the GPU and on the kernels in the plugin
        reads |= {"gpu": tensorrt.device_name(), "plugin": sha256(library) if (library := library_path()) else None}
    of_rtx = [target for target in options.targets if computes(target, component.outputs[0].dtype)]
    if backend.name == "tensorrt_rtx" and (left := [target for target in options.targets if target not in of_rtx]):
        report.notice(f"no engine of {name} for {', '.join(left)}, which computes in float16 alone")
    targets = {"tensorrt_rtx": of_rtx, "tensorrt": [tensorrt.device_architecture()], "onnxruntime": []}
    built = []
    for target in targets[backend.name]:

        def make(folder: Path, bar: Bar, target: str = str(target)) -> None:
            size, free = _size(exported, component), free_space(folder)
            if free < size:  # the engine is written after hours, perhaps; how large it is nobody knows before
                report.notice(
                    f"the ONNX of {name} takes {size / 2**20:.0f} MiB, and {cache.folder} has {free / 2**20:.0f} MiB "
                    f"free: the engine may not fit. If so, it is lost: free some space, or {cache.instead}",
                )
            if backend.name == "tensorrt_rtx":
                # A component without nodes of ours is what it is.
                has_native = component.is_denoiser or component.has_int8_layers
                onnx = exported.folder / (NATIVE if has_native else component.onnx)
                engine = tensorrt_rtx.build_engine(name, component, onnx, options, target, bar)
            else:
                engine = tensorrt.build_engine(name, component, exported.folder / component.onnx, options, bar)
            if recheck is not None:
                recheck()
            (folder / ENGINE).write_bytes(engine.plan)
            (folder / RECORD).write_text(engine.record.model_dump_json(indent=1))

        title = f"engine {target}" if name == COMPONENT else f"engine {name} {target}"
        stage = run_stage(title, reads | {"target": target}, make, cache, report)
        built.append((EngineRecord.model_validate_json((stage.folder / RECORD).read_text()), stage))
    return built


def _size(exported: Stage, component: ComponentRecord) -> int:
    """Bytes of a component's ONNX, and of its weights where they lie beside it."""
    return sum(file.stat().st_size for file in exported.folder.glob(f"{component.onnx}*"))
