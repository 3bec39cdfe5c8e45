"""Calibrations of modulated layers: rounded weights and quantisers, with their file."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from trtconvert.documents import parse_json, safetensors_header
from trtconvert.errors import UserError, several
from trtconvert.files import whole_file
from trtconvert.modiff.layers import ModulatedLayer, dynamic_table
from trtconvert.modiff.reference import COLUMNS
from trtconvert.modiff.settings import Settings
from trtconvert.weights.finite import is_finite
from trtconvert.weights.tensor_files import raw_bytes

FORMAT = "trtconvert-modiff-1"
AT_RUN_TIME = ("modulation", "scales", "granularity", "cache_dtype", "min_rows", "shared_outputs", "check_timesteps")
"""Settings that may differ from the calibration."""

KINDS = ("codes", "scale", "changes", "activations")
"""Tensors of a layer in the file."""

Kind = TypeVar("Kind", bound=ModulatedLayer)


@dataclass(frozen=True)
class LayerCalibration:
    """A layer with N output channels, and C input channels in P parts.

    Attributes:
        widths: channels of each part. codes: INT8 [N, C, …]. scale: [P, N] FP32.
        changes: [P, T + 1, 6] FP32 quantisers of deltas in T timestep bins, and of the first step.
        activations: the same of whole activations, for layers without modulation.
    """

    widths: tuple[int, ...]
    codes: Tensor
    scale: Tensor
    changes: Tensor
    activations: Tensor

    def layer(self, kind: type[Kind], full: Any, settings: Settings) -> Kind:
        """Makes the modulated layer, on the device of the one in full precision."""
        table = self.changes if settings.modulation else self.activations
        if settings.scales == "dynamic":
            table = dynamic_table(len(self.widths), settings)
        order = (0, 2, 3, 1) if self.codes.dim() == 4 else (0, 1)
        device = full.weight.device
        codes = self.codes.permute(order).contiguous().to(device)
        return kind(full, codes, self.scale.to(device), self.widths, table.to(device), settings)


@dataclass(frozen=True)
class Calibration:
    """The calibration of a model at some bits.

    Attributes:
        settings: calibrated for. digest: of the model's weights, see `digest`.
        timestep_input, timestep_max: see `modulate`. timesteps: of the trajectories, the largest first.
        rounding: method in words.
        layers: by name.
    """

    settings: Settings
    digest: str
    timestep_input: str | None
    timestep_max: float
    timesteps: tuple[float, ...]
    rounding: str
    layers: Mapping[str, LayerCalibration]

    def save(self, path: Path | str) -> None:
        """Writes a safetensors file, whole or not at all.

        Raises:
            UserError: the place cannot be written, or the disk is full.
        """
        tensors = {
            f"{name}:{kind}": getattr(layer, kind).cpu().contiguous()
            for name, layer in self.layers.items()
            for kind in KINDS
        }
        said = {
            "format": FORMAT,
            "settings": dataclasses.asdict(self.settings),
            "digest": self.digest,
            "timestep_input": self.timestep_input,
            "timestep_max": self.timestep_max,
            "timesteps": list(self.timesteps),
            "rounding": self.rounding,
            "widths": {name: list(layer.widths) for name, layer in self.layers.items()},
        }
        with whole_file(Path(path)) as file:
            save_file(tensors, file, {"trtconvert": json.dumps(said)})

    @staticmethod
    def load(path: Path | str) -> Calibration:
        """Reads a file of `save`.

        Raises:
            UserError: the file is missing, damaged, or no calibration; it holds an invalid number.
        """
        path = Path(path)
        try:
            header = safetensors_header(path)
            said = parse_json(header.get("__metadata__", {}).get("trtconvert", "{}"))
            if said.get("format") != FORMAT:
                raise ValueError(f"a file of the format {said.get('format')!r}, not {FORMAT}")
            with safe_open(path, framework="pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
            found = _from_file(said, tensors)
        except UserError as error:
            raise _unreadable(path, error.problem) from error
        except (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            raise _unreadable(path, f"{type(error).__name__}: {error}") from error
        return found

    def require_fitting(self, model: nn.Module, settings: Settings | None) -> Settings:
        """Returns the settings to modulate a model with.

        Raises:
            UserError: weights or bits differ from the calibration.
        """
        if settings is not None:
            for field in dataclasses.fields(Settings):
                own, given = getattr(self.settings, field.name), getattr(settings, field.name)
                if field.name not in AT_RUN_TIME and own != given:
                    raise UserError(
                        f"the calibration is for another {field.name}",
                        expected=f"{field.name}={own!r}, as in the calibration",
                        got=f"{field.name}={given!r}",
                        remedy="calibrate the model with these settings; or use dataclasses.replace(calibration.settings, …) "
                        f"with another {', '.join(AT_RUN_TIME[:3])}, …",
                    )
        weights = {name: getattr(module, "weight", None) for name, module in model.named_modules()}
        shapes = {name: weight.shape for name, weight in weights.items() if isinstance(weight, Tensor)}
        odd = [name for name, layer in self.layers.items() if shapes.get(name) != layer.codes.shape]
        if odd or digest(model) != self.digest:
            raise UserError(
                "the calibration is of another model",
                expected=f"weights with the digest {self.digest[:16]}…",
                got=f"other shapes of {several(odd, 3)}" if odd else f"{digest(model)[:16]}…",
                remedy="calibrate this model; or load the weights that were calibrated, and modulate them before they are "
                "changed, as by a LoRA or by rounding: modulate(model, calibration=…).to(torch.bfloat16)",
            )
        return settings or self.settings


def digest(model: nn.Module) -> str:
    """Returns the SHA-256 of a model's weights rounded to FP16: FP32 and FP16 copies have the same."""
    found = hashlib.sha256()
    for name, x in sorted(model.state_dict().items()):
        value = x.detach().to("cpu", torch.float16 if x.is_floating_point() else x.dtype)
        found.update(f"{name} {list(value.shape)} {value.dtype}\n".encode())
        found.update(raw_bytes(value))
    return found.hexdigest()


def _from_file(said: Any, tensors: Mapping[str, Tensor]) -> Calibration:
    """
    Raises:
        ValueError, KeyError, TypeError, OverflowError, UserError: the content is no calibration.
    """
    chosen: dict[str, Any] = {name: tuple(x) if isinstance(x, list) else x for name, x in said["settings"].items()}
    settings, timestep_max = Settings(**chosen), float(said["timestep_max"])
    if not 0 < timestep_max < math.inf:
        raise ValueError(f"timestep_max: expected a finite number above zero, got {timestep_max}")
    layers: dict[str, LayerCalibration] = {}
    for name, widths in said["widths"].items():
        kinds = {kind: tensors[f"{name}:{kind}"] for kind in KINDS}
        layer = LayerCalibration(tuple(map(int, widths)), **kinds)
        parts, outputs, channels = len(layer.widths), *layer.codes.shape[:2]
        table = (parts, settings.bins + 1, COLUMNS)
        if layer.codes.dtype != torch.int8 or layer.codes.dim() not in (2, 4) or sum(layer.widths) != channels:
            raise ValueError(f"codes of {name} that are no INT8 weight of {channels} channels")
        for kind, shape in (("scale", (parts, outputs)), ("changes", table), ("activations", table)):
            x = kinds[kind]
            if tuple(x.shape) != shape or x.dtype != torch.float32 or not is_finite(x):
                raise ValueError(f"{kind} of {name}: expected finite FP32 {list(shape)}, got {list(x.shape)} {x.dtype}")
            if not bool((x if kind == "scale" else x[..., 0]).gt(0).all()):
                raise ValueError(f"{kind} of {name} that is not above zero")
        layers[name] = layer
    return Calibration(
        settings,
        str(said["digest"]),
        said["timestep_input"],
        timestep_max,
        tuple(map(float, said["timesteps"])),
        str(said["rounding"]),
        layers,
    )


def _unreadable(path: Path, got: str) -> UserError:
    return UserError(
        f"{path} is no calibration of modulated layers",
        expected="a file that Calibration.save wrote",
        got=got,
        remedy="give another file, or calibrate anew (trtconvert.modiff.calibrate)",
    )
