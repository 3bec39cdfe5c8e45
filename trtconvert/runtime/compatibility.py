"""Chooses the engine that runs on this machine by the manifest, before TensorRT reads a plan."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from trtconvert.bundle import EngineRecord
from trtconvert.engine import version_numbers
from trtconvert.errors import BackendUnavailable, warn

_PORTABLE_SINCE = 80
"""Hardware-compatible engines run on Ampere and newer GPUs (TensorRT's `HardwareCompatibilityLevel.AMPERE_PLUS`)."""


@dataclass(frozen=True)
class Machine:
    """The GPU's architecture such as "sm90", the versions of TensorRT and the plugin library, and the GPU's name and index."""

    architecture: str
    tensorrt: str
    plugin: str
    gpu: str = ""
    index: int = 0


def fitting_engine(name: str, records: Sequence[EngineRecord], machine: Machine) -> EngineRecord:
    """Return the first of a component's TensorRT engines that runs on this machine, preferably one built on this kind of GPU.

    Warns if the engine was built on another GPU of the same architecture: that GPU's times decided about kernels and attention.

    Args:
        name: name of the component.
        records: its engines, at least one.
    Raises:
        BackendUnavailable: no engine runs on this machine; the message has the requirements of each.
    """
    obstacles = [_obstacle(record, machine) for record in records]
    fitting = [record for record, obstacle in zip(records, obstacles, strict=True) if not obstacle]
    compile_here = f"run `{_seen_alone(machine.index)}trtconvert compile` on this machine"
    if fitting:
        best = next((record for record in fitting if record.gpu == machine.gpu), fitting[0])
        if best.gpu and machine.gpu and best.gpu != machine.gpu and not best.hardware_compatible:
            warn(
                f"{best.file} was built and timed on {best.gpu}, but this is {machine.gpu}: results are the same, but an engine "
                f"built here may be faster; {compile_here}"
            )
        return best
    raise BackendUnavailable(
        f"the bundle's TensorRT engines of '{name}' are for another machine",
        expected="; or ".join(
            f"{obstacle} ({record.file})" for record, obstacle in zip(records, obstacles, strict=True)
        ),
        got=f"{machine.architecture}, TensorRT {machine.tensorrt}, plugin library {machine.plugin}",
        remedy=f"{compile_here}, or load the bundle with backend='onnxruntime' to check it",
    )


def _seen_alone(index: int) -> str:
    """Return the setting with which commands see one of this process's GPUs alone; empty for the first, which they take."""
    if not index:
        return ""
    names = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return f"CUDA_VISIBLE_DEVICES={names[index].strip() if index < len(names) else index} "


def _obstacle(record: EngineRecord, machine: Machine) -> str:
    """Return what the engine needs and the machine lacks; empty if nothing."""
    portable = record.hardware_compatible and int(machine.architecture.removeprefix("sm")) >= _PORTABLE_SINCE
    if record.target != machine.architecture and not portable:
        return "a GPU of sm80 or newer" if record.hardware_compatible else f"a GPU of {record.target}"
    built, here = version_numbers(record.library), version_numbers(machine.tensorrt)
    if record.version_compatible:
        if built[:1] != here[:1] or here < built:
            return f"TensorRT {record.library} or newer, {built[0]}.x"
    elif built != here:
        return f"TensorRT {record.library}"
    # The plan holds its plugin, but the library that reads the bundle must be at least as new.
    if record.plugin and version_numbers(machine.plugin) < version_numbers(record.plugin):
        return f"the plugin library {record.plugin} or newer"
    return ""
