"""Running bundles. Imports neither ONNX tooling nor diffusers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from trtconvert.bundle import Manifest, check_files, read_manifest
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
    components: Mapping[str, OnnxRuntimeDenoiser]
    backend: str

    def __getitem__(self, name: str) -> OnnxRuntimeDenoiser:
        if name not in self.components:
            raise UserError(
                f"the bundle {self.folder} has no component '{name}'",
                expected=", ".join(self.components),
                got=name,
                remedy="take one of the expected names",
            )
        return self.components[name]


def load(folder: str | Path) -> LoadedBundle:
    """Load a bundle on what this machine can run.

    Raises:
        UserError: not a bundle, or a file of it is missing, truncated or altered.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    check_files(folder, manifest)
    components = {
        name: OnnxRuntimeDenoiser(folder / record.onnx, record) for name, record in manifest.components.items()
    }
    return LoadedBundle(
        folder, manifest, components, "ONNX Runtime on the CPU, INT8 attention as the op's function body"
    )
