"""Bundles: the folder that a build leaves, described by a manifest that names and hashes every file in it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from trtconvert.errors import UserError
from trtconvert.files import sha256
from trtconvert.recipe import Recipe

FORMAT = 1
MANIFEST = "manifest.json"


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class FileRecord(_Record):
    """Size in bytes and SHA-256 of one file."""

    size: int
    sha256: str


class TensorRecord(_Record):
    """One input or output: numpy's name of its type, and sizes or names of symbolic dimensions."""

    name: str
    dtype: str
    shape: list[int | str]


class EngineRecord(_Record):
    """One serialized engine.

    Attributes:
        backend, library: the builder and its version.
        target: the GPU architecture that it runs on.
        attention: "plugin" (INT8) or "native" (the model's own precision).
        file: path in the bundle.
    """

    backend: Literal["tensorrt", "tensorrt_rtx"]
    library: str
    target: str
    attention: Literal["plugin", "native"]
    file: str


class SiteRecord(_Record):
    """One attention site. `modes` per timestep bin, from low noise up; empty when the site was left as it is, for `reason`."""

    name: str
    heads: int
    head_dim: int
    modes: list[int]
    reason: str = ""


class ComponentRecord(_Record):
    """One model of the bundle.

    Attributes:
        onnx: path of the ONNX file with `Int8Attention` nodes and their function bodies.
        inputs, outputs: signature of the ONNX model and of the engines.
        timestep_input: which input is the timestep; timestep_max: where the last timestep bin ends.
        dims: symbolic dimension: [min, opt, max].
    """

    onnx: str
    inputs: list[TensorRecord]
    outputs: list[TensorRecord]
    timestep_input: str
    timestep_max: float
    dims: dict[str, tuple[int, int, int]]
    sites: list[SiteRecord]
    engines: list[EngineRecord]


class QualityRecord(_Record):
    """What the gates measured.

    Attributes:
        samples, steps, sampler: how the images were drawn.
        psnr: dB over all samples against the full-precision model; psnr_worst: of the worst sample, seed psnr_worst_seed.
        site_sqnr: site: dB per timestep bin against exact attention; NaN-free, absent bins are null.
        error: relative L2 error of the exported denoiser against the torch reference of the same arithmetic.
        lowering_difference: mean absolute difference of the outputs of the function and the native lowering.
        lowering_limit: the most that the gate allows it.
    """

    samples: int
    steps: int
    sampler: str
    psnr: float
    psnr_worst: float
    psnr_worst_seed: int
    site_sqnr: dict[str, list[float | None]]
    error: float
    lowering_difference: float
    lowering_limit: float

    def worst_site(self) -> tuple[float, str, int]:
        """Signal to quantisation noise in dB, site and timestep bin where it is smallest."""
        return min(
            (db, site, index) for site, row in self.site_sqnr.items() for index, db in enumerate(row) if db is not None
        )


class Manifest(_Record):
    """What a bundle holds. `backend` is the one that the build chose, `backend_reason` why."""

    format: Literal[1] = FORMAT
    model: str
    weights: str
    versions: dict[str, str]
    backend: Literal["tensorrt", "tensorrt_rtx", "onnxruntime"]
    backend_reason: str
    recipe: Recipe
    calibration: str
    components: dict[str, ComponentRecord]
    quality: QualityRecord
    files: dict[str, FileRecord] = Field(default_factory=dict)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Hash all files of the folder into the manifest and write it."""
    files = {
        str(path.relative_to(folder)): FileRecord(size=path.stat().st_size, sha256=sha256(path))
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    (folder / MANIFEST).write_text(manifest.model_copy(update={"files": files}).model_dump_json(indent=1))


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a bundle, without looking at its other files.

    Raises:
        UserError: not a bundle, or one of another format.
    """
    path = folder / MANIFEST
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(
            f"{folder} is not a bundle",
            expected=f"a folder with {MANIFEST}, made by `trtconvert build`",
            got=f"no {MANIFEST}" if isinstance(error, OSError) else f"a {MANIFEST} that is not JSON",
            remedy="check the path, or build the bundle again",
        ) from error
    found = content.get("format") if isinstance(content, dict) else None
    if found != FORMAT:
        raise UserError(
            f"{folder} has a bundle format that this trtconvert does not read",
            expected=str(FORMAT),
            got=str(found),
            remedy="build the bundle again, or install the trtconvert that made it",
        )
    try:
        return Manifest.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(
            f"the manifest of {folder} is damaged",
            expected="the fields of a bundle manifest",
            got=f"{'.'.join(map(str, first['loc']))}: {first['msg']}",
            remedy="copy the bundle again, or build it again",
        ) from error


def check_files(folder: Path, manifest: Manifest) -> None:
    """Compare every file of a bundle with the manifest.

    Raises:
        UserError: names the first file that is missing, truncated or altered.
    """
    for name, record in manifest.files.items():
        path = folder / name
        expected, got = f"{record.size} bytes, SHA-256 {record.sha256[:12]}…", ""
        if not path.is_file():
            got = "no such file"
        elif path.stat().st_size != record.size:
            got = f"{path.stat().st_size} bytes"
        elif (digest := sha256(path)) != record.sha256:
            got = f"{record.size} bytes, SHA-256 {digest[:12]}…"
        if got:
            raise UserError(
                f"{name} in the bundle {folder} is not what was built",
                expected=expected,
                got=got,
                remedy="copy the bundle again, or build it again",
            )
