"""`trtconvert compile`: give a bundle the engine of the GPU that it has reached. Needs no model code and no calibration."""

from __future__ import annotations

import shutil
from pathlib import Path

from trtconvert.bundle import MANIFEST, EngineRecord, Manifest, check_files, read_manifest, write_manifest
from trtconvert.engine import tensorrt
from trtconvert.engine.builder import PlanInput
from trtconvert.files import whole_folder
from trtconvert.progress import Reporter


def compile_bundle(folder: Path, report: Reporter) -> Manifest:
    """Build a TensorRT engine for this machine's GPU from each component's ONNX, into the bundle.

    The bundle is replaced once it is whole; until then, and after a failure, the old one stands.

    Returns:
        The new manifest.
    Raises:
        UserError: not a bundle, or an altered one.
        BackendUnavailable: no GPU, no TensorRT, or no plugin library here.
        TrtconvertError: the engine cannot be built.
    """
    manifest = read_manifest(folder)
    check_files(folder, manifest)
    trt = tensorrt.load()
    components = {}
    with whole_folder(folder) as partial, report.live():
        shutil.copytree(folder, partial, dirs_exist_ok=True)
        for name, component in manifest.components.items():
            target = str(tensorrt.device_architecture())
            record = EngineRecord.of(name, "tensorrt", trt.__version__, target)
            inputs = [PlanInput(spec.name, spec.shape) for spec in component.inputs]
            with report.stage(f"engine {record.target}") as bar:
                plan = tensorrt.build_from_function(partial / component.onnx, inputs, component.dims, bar.share)
            (partial / record.file).parent.mkdir(exist_ok=True)
            (partial / record.file).write_bytes(plan)
            others = [engine for engine in component.engines if engine.file != record.file]
            components[name] = component.model_copy(update={"engines": [*others, record]})
        (partial / MANIFEST).unlink()
        write_manifest(partial, manifest.model_copy(update={"components": components}))
    return read_manifest(folder)
