"""What a custom node sees of ComfyUI: the few modules that ours imports, which call a network, sample with it and hold it as
ComfyUI does. In our own words, after its interfaces (comfy/model_base, model_sampling and model_patcher, folder_paths)."""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn


class ModelType(Enum):
    EPS = 1
    V_PREDICTION = 2
    FLOW = 6
    FLUX = 8


class Sampling:
    """Noise by σ: variance exploding of the usual 1,000 betas, or the straight paths of flow matching."""

    def __init__(self, kind: ModelType, multiplier: float = 1000.0) -> None:
        self.kind, self.multiplier = kind, multiplier
        betas = torch.linspace(0.00085**0.5, 0.012**0.5, 1000, dtype=torch.float64) ** 2
        kept = torch.cumprod(1 - betas, 0)
        self.sigmas = ((1 - kept) / kept).sqrt().float()

    def timestep(self, sigma: Tensor) -> Tensor:
        if self.kind in (ModelType.FLOW, ModelType.FLUX):
            return sigma * (self.multiplier if self.kind is ModelType.FLOW else 1)
        return (sigma.log()[:, None] - self.sigmas.log()[None]).abs().argmin(1)

    def calculate_input(self, sigma: Tensor, x: Tensor) -> Tensor:
        if self.kind in (ModelType.FLOW, ModelType.FLUX):
            return x
        return x / (sigma.view(-1, 1, 1, 1) ** 2 + 1) ** 0.5

    def calculate_denoised(self, sigma: Tensor, output: Tensor, x: Tensor) -> Tensor:
        sigma = sigma.view(-1, 1, 1, 1)
        if self.kind is ModelType.V_PREDICTION:
            return x / (sigma**2 + 1) - output * sigma / (sigma**2 + 1) ** 0.5
        return x - output * sigma


class Timestep(nn.Module):
    """Cosines and sines of a number, as SDXL's sizes are given to networks."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, t: Tensor) -> Tensor:
        angles = t[:, None] * torch.exp(-math.log(10000) * torch.arange(self.dim // 2) / (self.dim // 2))
        return torch.cat([angles.cos(), angles.sin()], -1)


class BaseModel(nn.Module):
    def __init__(self, model_config: Any, model_type: ModelType = ModelType.EPS) -> None:
        super().__init__()
        assert model_config.unet_config["disable_unet_model_creation"]
        self.model_config, self.model_type, self.model_sampling = (
            model_config,
            model_type,
            Sampling(model_type, model_config.multiplier),
        )
        self.concat_keys: tuple[str, ...] = ()

    def set_inpaint(self) -> None:
        self.concat_keys = ("mask", "masked_image")

    def encode_adm(self, **_: Any) -> Tensor | None:
        return None

    def apply_model(self, x, t, c_concat=None, c_crossattn=None, control=None, transformer_options=None, **kwargs):
        dtype = self.diffusion_model.dtype
        given = self.model_sampling.calculate_input(t, x)
        if c_concat is not None:
            given = torch.cat([given, c_concat], 1)
        extra = {name: value.to(dtype) if isinstance(value, Tensor) else value for name, value in kwargs.items()}
        output = self.diffusion_model(
            given.to(dtype),
            self.model_sampling.timestep(t).float(),
            context=None if c_crossattn is None else c_crossattn.to(dtype),
            control=control,
            transformer_options=dict(transformer_options or {}),
            **extra,
        )
        return self.model_sampling.calculate_denoised(t, output.float(), x)


class SDXL(BaseModel):
    def __init__(self, model_config: Any, model_type: ModelType = ModelType.EPS) -> None:
        super().__init__(model_config, model_type)
        self.embedder: nn.Module = Timestep(256)

    def numbers(self, **named: Any) -> list[float]:
        width, height = named.get("width", 768), named.get("height", 768)
        crops = [named.get("crop_h", 0), named.get("crop_w", 0)]
        return [height, width, *crops, named.get("target_height", height), named.get("target_width", width)]

    def encode_adm(self, **named: Any) -> Tensor:
        pooled = named["pooled_output"]
        out = [self.embedder(torch.Tensor([number])) for number in self.numbers(**named)]
        return torch.cat((pooled, torch.flatten(torch.cat(out)).unsqueeze(0).repeat(len(pooled), 1)), 1)


class SDXLRefiner(SDXL):
    def numbers(self, **named: Any) -> list[float]:
        return [*super().numbers(**named)[:4], named.get("aesthetic_score", 6)]


class _Supported:
    kind: ModelType = ModelType.EPS
    multiplier = 1000.0

    def __init__(self, unet_config: dict[str, Any]) -> None:
        self.unet_config = dict(unet_config)

    def get_model(self, state_dict: dict[str, Any]) -> BaseModel:
        return BaseModel(self, self.kind)


def _supported(kind: ModelType = ModelType.EPS, **more: Any) -> type[_Supported]:
    return type("Supported", (_Supported,), {"kind": kind, **more})


def _flux(self: _Supported, state_dict: dict[str, Any]) -> BaseModel:
    """Flux asks the configuration whether an image is given beside the latents, where the network has no weights to ask."""
    assert self.unet_config["in_channels"] <= self.unet_config["out_channels"]
    return BaseModel(self, self.kind)


class ModelPatcher:
    def __init__(self, model: nn.Module, load_device: torch.device, offload_device: torch.device) -> None:
        self.model, self.load_device, self.offload_device = model, load_device, offload_device
        self.size = sum(p.numel() for p in model.parameters())
        self.wrappers: dict[str, dict[str, list[Any]]] = {}

    def add_wrapper_with_key(self, kind: str, key: str, wrapper: Any) -> None:
        self.wrappers.setdefault(kind, {}).setdefault(key, []).append(wrapper)


class Executor:
    """What a wrapper calls to go on; `class_obj` is whose method it wraps."""

    def __init__(self, original: Any, class_obj: Any, wrappers: list[Any]) -> None:
        self._original, self.class_obj, self._wrappers = original, class_obj, wrappers

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._wrappers:
            return self._original(*args, **kwargs)
        return self._wrappers[0](Executor(self._original, self.class_obj, self._wrappers[1:]), *args, **kwargs)


class Guider:
    """Calls the model once for each conditioning, or once for all; samplers call it."""

    def __init__(
        self, patcher: ModelPatcher, conditions: dict[Any, Tensor], together: bool, scale: float = 2.0
    ) -> None:
        self.patcher, self.inner_model, self.conditions = patcher, patcher.model, conditions
        self.together, self.scale = together, scale

    def wrapped(self, kind: str, method: Any, owner: Any) -> Executor:
        return Executor(method, owner, [w for of in self.patcher.wrappers.get(kind, {}).values() for w in of])

    def __call__(self, x: Tensor, sigma: Tensor, model_options: dict[str, Any], seed: int | None = None) -> Tensor:
        return self.wrapped("predict_noise", self.predict_noise, self)(x, sigma, model_options, seed)

    def predict_noise(self, x: Tensor, sigma: Tensor, model_options: dict[str, Any], seed: int | None) -> Tensor:
        groups = [list(self.conditions)] if self.together else [[uuid] for uuid in self.conditions]
        outputs: list[Tensor] = []
        for uuids in groups:
            options = model_options.get("transformer_options", {}) | {"uuids": uuids}
            text = torch.cat([self.conditions[uuid].expand(len(x), -1, -1) for uuid in uuids])
            count = len(uuids)
            found = self.inner_model.apply_model(
                torch.cat([x] * count), torch.cat([sigma] * count), c_crossattn=text, transformer_options=options
            )
            outputs += found.chunk(count)
        first, *others = outputs
        return first if not others else others[0] + self.scale * (first - others[0])

    def sample(self, sampler: KSampler, noise: Tensor, sigmas: Tensor, **model_options: Any) -> Tensor:
        extra = {"model_options": model_options, "seed": 1}
        run = self.wrapped("sampler_sample", sampler.sample, sampler)
        return run(self, sigmas, extra, None, noise, None, None, True)


class KSampler:
    def __init__(self, sampler_function: Any, **extra_options: Any) -> None:
        self.sampler_function, self.extra_options = sampler_function, extra_options

    def sample(self, guider, sigmas, extra_args, callback, noise, latent_image, denoise_mask, disable_pbar):
        return self.sampler_function(guider, noise * sigmas[0], sigmas, extra_args, **self.extra_options)


def _sampler(function: Any) -> Any:
    """A function as it stands in ComfyUI's module of samplers."""
    function.__module__ = "comfy.k_diffusion.sampling"
    return function


@_sampler
def sample_euler(model, x, sigmas, extra_args, s_churn=0.0):
    for sigma, target in pairwise(sigmas):
        hat = sigma * (1 + s_churn)
        x = x + torch.randn_like(x) * (hat**2 - sigma**2).sqrt() if s_churn else x
        denoised = model(x, hat.expand(len(x)), **extra_args)
        x = x + (x - denoised) / hat * (target - hat)
    return x


@_sampler
def sample_heun(model, x, sigmas, extra_args):
    for sigma, target in pairwise(sigmas):
        slope = (x - model(x, sigma.expand(len(x)), **extra_args)) / sigma
        ahead = x + slope * (target - sigma)
        if target > 0:
            slope = (slope + (ahead - model(ahead, target.expand(len(x)), **extra_args)) / target) / 2
        x = x + slope * (target - sigma)
    return x


def _module(name: str, **content: Any) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(content)
    return module


@contextmanager
def comfy_ui(models: Path) -> Iterator[ModuleType]:
    """Our node, loaded as ComfyUI loads a folder of custom nodes, in a ComfyUI with such a folder of models."""
    cpu = torch.device("cpu")
    kinds = {name: _supported() for name in ("SD15", "SD20", "SDXL", "SDXLRefiner")}
    kinds |= {
        "SD3": _supported(ModelType.FLOW),
        "Flux": _supported(ModelType.FLUX, get_model=_flux),
        "FluxSchnell": _supported(ModelType.FLOW, multiplier=1.0, get_model=_flux),
    }
    parts = {
        "model_base": _module(
            "comfy.model_base", ModelType=ModelType, BaseModel=BaseModel, SDXL=SDXL, SDXLRefiner=SDXLRefiner
        ),
        "supported_models": _module("comfy.supported_models", **kinds),
        "model_patcher": _module("comfy.model_patcher", ModelPatcher=ModelPatcher),
        "model_management": _module(
            "comfy.model_management", get_torch_device=lambda: cpu, unet_offload_device=lambda: cpu
        ),
    }
    folders: dict[str, tuple[list[str], set[str]]] = {}
    modules: dict[str, Any] = {
        "comfy": _module("comfy", **parts),
        **{f"comfy.{name}": part for name, part in parts.items()},
        "folder_paths": _module(
            "folder_paths",
            folder_names_and_paths=folders,
            models_dir=str(models),
            get_folder_paths=lambda kind: folders[kind][0],
        ),
    }
    source = Path(__file__).parents[2] / "integrations" / "comfyui"
    before = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(modules)
    try:
        spec = importlib.util.spec_from_file_location("comfyui_node_of_trtconvert", source / "__init__.py")
        assert spec is not None and spec.loader is not None
        node = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = node
        spec.loader.exec_module(node)
        yield node
    finally:
        for name in [name for name in sys.modules if name.startswith("comfyui_node_of_trtconvert")]:
            del sys.modules[name]
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


def in_memory(model: Any, denoiser: nn.Module, reuse: Any = None) -> SimpleNamespace:
    """Something like a loaded bundle, whose denoiser is a `DiffusionModel`'s own in torch.

    Args:
        reuse: which steps it leaves out.
    """
    from trtconvert.bundle import ComponentRecord, TensorRecord
    from trtconvert.runtime.signature import Signature

    record = ComponentRecord(
        onnx="x.onnx",
        inputs=[TensorRecord(name=s.name, dtype=s.dtype, shape=list(s.shape)) for s in model.inputs],
        outputs=[TensorRecord(name="prediction", dtype="float32", shape=list(model.output.shape))],
        timestep_input=model.timestep_input,
        timestep_max=model.timestep_max,
        dims=dict(model.dims),
        engines=[],
        diffusers=model.diffusers,
    )
    signature = Signature(record)

    class Component:
        device = torch.device("cpu")
        calls = 0

        def __call__(self, *inputs: Tensor, **named: Tensor) -> Tensor:
            self.calls += 1
            tensors = signature.ordered(inputs, named)
            signature.check(tensors)
            with torch.no_grad():
                return denoiser(**dict(zip(signature.names, signature.typed(tensors), strict=True)))

    component = Component()
    component.signature, component.reuse = signature, reuse  # type: ignore[attr-defined]
    manifest = SimpleNamespace(components={"denoiser": record}, model=model.name)
    return type("Bundle", (SimpleNamespace,), {"__getitem__": lambda self, name: component})(
        folder=Path("bundle"), manifest=manifest
    )
