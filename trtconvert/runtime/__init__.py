"""Running bundles. Imports neither ONNX tooling nor diffusers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from trtconvert.bundle import ComponentRecord, EngineRecord, Manifest, check_files, read_manifest
from trtconvert.engine import tensorrt
from trtconvert.errors import UserError
from trtconvert.runtime.session import OnnxRuntimeDenoiser

__all__ = ["LoadedBundle", "load"]


@dataclass(frozen=True)
class LoadedBundle:
    """A bundle whose files were checked.

    Attributes:
        folder, manifest: what was loaded.
        components: callable denoisers by name; `bundle["denoiser"]` is short for one.
        backend: what runs them, in words.
    """

    folder: Path
    manifest: Manifest
    components: Mapping[str, Callable[..., Tensor]]
    backend: str

    def __getitem__(self, name: str) -> Callable[..., Tensor]:
        if name not in self.components:
            raise UserError(
                f"the bundle {self.folder} has no component '{name}'",
                expected=", ".join(self.components),
                got=name,
                remedy="take one of the expected names",
            )
        return self.components[name]


def load(folder: str | Path) -> LoadedBundle:
    """Load a bundle on the best that this machine can run: its TensorRT engine for this GPU, else ONNX Runtime on the CPU.

    Raises:
        UserError: not a bundle, or a file of it is missing, truncated or altered.
        BackendUnavailable: TensorRT refuses the bundle's engine for this GPU.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    check_files(folder, manifest)
    engines = {name: _engine_for_here(component) for name, component in manifest.components.items()}
    if all(engines.values()):
        from trtconvert.runtime.tensorrt import TensorRTDenoiser

        on_gpu = {
            name: TensorRTDenoiser(folder / record.file, record, manifest.components[name])
            for name, record in engines.items()
            if record
        }
        first = next(record for record in engines.values() if record)
        return LoadedBundle(folder, manifest, on_gpu, f"TensorRT {first.library}, INT8 attention in our plugin")
    on_cpu = {name: OnnxRuntimeDenoiser(folder / c.onnx, c) for name, c in manifest.components.items()}
    return LoadedBundle(folder, manifest, on_cpu, "ONNX Runtime on the CPU, INT8 attention as the op's function body")


def _engine_for_here(component: ComponentRecord) -> EngineRecord | None:
    """The component's TensorRT engine for this machine's GPU, where TensorRT is installed."""
    records = [record for record in component.engines if record.backend == "tensorrt"]
    if not records or not tensorrt.status().available:
        return None
    architecture = tensorrt.device_architecture()
    return next((record for record in records if record.target == architecture), None)
