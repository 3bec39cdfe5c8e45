"""The stages that build engines, one for each component and GPU architecture."""

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
    """The options, the backend and the cache that all engine builds share.

    Attributes:
        options: the recipe's engine section.
        backend: the backend that builds here.
        cache: holds the outputs of stages.
        report: receives progress and notices.
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
    """Builds one serialized engine of a component per target of the backend; none for ONNX Runtime, which builds nothing.

    Args:
        exported: stage with the component's ONNX.
        recheck: called after an engine is built, if the folder may change meanwhile. An exception keeps the engine out of the
            cache.
    """
    options, backend, cache, report = build.options, build.backend, build.cache, build.report
    chosen = options.model_dump(mode="json", exclude={"backend", "targets", "guidance"})  # the ONNX contains guidance
    reads = {"onnx": exported.key, "engine": chosen, "library": backend.detail}
    if backend.name == "tensorrt":  # engines depend on the GPU and on the kernels in the plugin
        reads |= {"gpu": tensorrt.device_name(), "plugin": sha256(library) if (library := library_path()) else None}
    of_rtx = [target for target in options.targets if computes(target, component.outputs[0].dtype)]
    if backend.name == "tensorrt_rtx" and (left := [target for target in options.targets if target not in of_rtx]):
        report.notice(f"no engine of {name} for {', '.join(left)}, which supports only float16")
    targets = {"tensorrt_rtx": of_rtx, "tensorrt": [tensorrt.device_architecture()], "onnxruntime": []}
    built = []
    for target in targets[backend.name]:

        def make(folder: Path, bar: Bar, target: str = str(target)) -> None:
            size, free = _size(exported, component), free_space(folder)
            if free < size:  # a warning only: the size of the engine is unknown until it is built
                report.notice(
                    f"the ONNX of {name} takes {size / 2**20:.0f} MiB, but {cache.folder} has only {free / 2**20:.0f} MiB free: "
                    f"the engine may not fit and would be lost. Free some space, or {cache.instead}"
                )
            if backend.name == "tensorrt_rtx":
                # A component without trtconvert's nodes has no native form.
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
    """Returns the bytes of a component's ONNX, including its external weights."""
    return sum(file.stat().st_size for file in exported.folder.glob(f"{component.onnx}*"))
