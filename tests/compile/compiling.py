"""Compiles small bundles, on a machine that pretends to have a GPU."""

from __future__ import annotations

import fcntl
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from rich.console import Console

from trtconvert.bundle import MANIFEST, EngineRecord, read_manifest, write_manifest
from trtconvert.cache import Cache
from trtconvert.compile import compile_bundle
from trtconvert.engine import BuiltEngine
from trtconvert.files import temporary_folder
from trtconvert.progress import Reporter
from trtconvert.recipe import EngineSection

pytest.importorskip("tensorrt_rtx_bindings", reason="needs the extra 'rtx'")


PLAN = "engines/denoiser-tensorrt-sm90.plan"


FLOCK = fcntl.flock


VAE = "vae_decoder"


@dataclass
class Builder:
    """A builder whose plans are not engines; all plans differ.

    Attributes:
        meanwhile: called with a component's name while its engine is built.
        gpu: the name of the target GPU.
        built: names and options of the built engines.
    """

    meanwhile: Callable[[str], None] = lambda _: None
    gpu: str = "NVIDIA H200"
    built: list[tuple[str, EngineSection]] = field(default_factory=list)

    def __call__(self, name, component, onnx, options, watch):
        self.meanwhile(name)
        self.built.append((name, options))
        record = EngineRecord.of(name, "tensorrt", "10.6.0", "sm90")
        record = record.model_copy(update={"gpu": self.gpu, "profiles": component.profiles})
        return BuiltEngine(os.urandom(5000), record)

    @property
    def names(self):
        return [name for name, _ in self.built]


def with_vae(bundle):
    """Return the bundle with a second component."""
    manifest = read_manifest(bundle)
    denoiser = manifest.components["denoiser"]
    vae = denoiser.model_copy(update={"timestep_input": "", "timestep_max": 0.0, "sites": [], "input_ranges": {}})
    (bundle / MANIFEST).unlink()
    write_manifest(bundle, manifest.model_copy(update={"components": {"denoiser": denoiser, VAE: vae}}))
    return bundle


def compiled(folder, **options):
    return compile_bundle(folder, Reporter(Console(quiet=True)), **options)


def fresh(folder):
    """Compile with a new engine, independent of the cache."""
    with temporary_folder() as place:
        return compiled(folder, cache=Cache(place / "cache"))


def without_engines(manifest):
    return {name: of.model_copy(update={"engines": []}) for name, of in manifest.components.items()}


def killed(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def killed_half_way(_, target):
    Path(target).write_bytes(b"half")
    killed()
