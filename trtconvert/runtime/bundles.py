"""Bundles that are loaded: their components on the devices that they run on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import torch

from trtconvert.bundle import ComponentRecord, EngineRecord, Manifest, check_files, read_unchanged
from trtconvert.engine import tensorrt as builder
from trtconvert.errors import BackendUnavailable, UserError, warn
from trtconvert.library import library_version
from trtconvert.runtime.component import Component
from trtconvert.runtime.devices import DataParallel, parse_devices
from trtconvert.runtime.reuse import load_reuse
from trtconvert.runtime.session import OnnxRuntimeComponent
from trtconvert.runtime.watch import InputWatch

if TYPE_CHECKING:
    from trtconvert.runtime.diffusers import DiffusersAutoencoder, DiffusersDenoiser, DiffusersTextEncoder
    from trtconvert.runtime.scratch import Scratch


@dataclass(frozen=True)
class DeviceMemory:
    """Device memory of a bundle in bytes, on all its devices.

    Attributes:
        weights: what loading the engines took.
        per_stream: what each stream that calls them takes to compute in, once for all engines of the bundle on a device.
        streams: what the streams that have called them hold of it now.
        graphs: the inputs and outputs that CUDA graphs have to themselves.
        caches: what layers that quantise deltas keep from step to step, on the streams that have called them.
    """

    weights: int
    per_stream: int
    streams: int
    graphs: int
    caches: int = 0


@dataclass(frozen=True)
class LoadedBundle:
    """A bundle whose files were checked. As a context manager it closes itself.

    Attributes:
        folder, manifest: what was loaded.
        components: callables by name; `bundle["denoiser"]` is short for one, and a bundle has and goes through their names.
        backend: what runs them, in words.
    """

    folder: Path
    manifest: Manifest
    components: Mapping[str, Component]
    backend: str
    _scratches: Sequence[Scratch] = ()
    _watches: Sequence[InputWatch] = ()

    def __getitem__(self, name: str) -> Component:
        if name not in self.components:
            raise UserError(
                f"the bundle {self.folder} has no component '{name}'",
                expected=", ".join(self.components),
                got=name,
                remedy="take one of the expected names",
            )
        return self.components[name]

    def __contains__(self, name: object) -> bool:
        return name in self.components

    def __iter__(self) -> Iterator[str]:
        return iter(self.components)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Wait for what is running, and let go of the engines and their memory. Further calls are refused."""
        with ExitStack() as closing:  # all of them, whatever one says
            for component in self.components.values():
                closing.callback(component.close)
            for watch in self._watches:
                closing.callback(watch.close)

    def as_diffusers(self, name: str = "denoiser") -> DiffusersDenoiser | DiffusersTextEncoder | DiffusersAutoencoder:
        """A component for a diffusers pipeline, in the place of its `unet` or `transformer`, of a text encoder, or of its `vae`.

        Args:
            name: of the component; "vae" for its halves together.
        Raises:
            UserError: there is no such component, or it did not come from a diffusers pipeline.
            BackendUnavailable: diffusers is not installed.
        """
        from trtconvert.runtime.diffusers import DiffusersAutoencoder, DiffusersDenoiser, DiffusersTextEncoder
        from trtconvert.runtime.signature import dtype_of

        halves = {
            component.diffusers.method: (self.components[half], component)
            for half, component in self.manifest.components.items()
            if component.diffusers is not None and component.diffusers.component == "vae"
        }
        if name == "vae" and "decode" in halves:
            component = halves["decode"][1]
            dtype, device = dtype_of(component.inputs[0]), halves["decode"][0].device
            return DiffusersAutoencoder(halves, dtype=dtype, device=device)
        called, component = self[name], self.manifest.components[name]
        if component.diffusers is None or component.diffusers.method != "forward":
            raise UserError(
                f"'{name}' of {self.folder} is no model of diffusers",
                expected="a component of a recipe with model.source: diffusers; 'vae' for the halves of one",
                got=self.manifest.model,
                remedy=f"call bundle['{name}'] with its inputs by name",
            )
        if not component.is_denoiser:
            return DiffusersTextEncoder(called, component, dtype=dtype_of(component.outputs[0]), device=called.device)
        sample = component.inputs[0]
        of_samples = [spec.name for spec in component.inputs if spec.shape[:1] == sample.shape[:1]]
        return DiffusersDenoiser(
            called,
            component.diffusers,
            component.timestep_input,
            of_samples=of_samples,
            dtype=dtype_of(sample),
            device=called.device,
        )

    def pipeline(self, **parts: Any) -> Any:
        """The whole diffusers pipeline with the bundle's components in it: prompts to images without the weights of the model.

        Args:
            parts: models that the bundle does not have, and others instead of the pipeline's own, by the pipeline's names:
                `vae=…`, `scheduler=…`; None to go without.
        Raises:
            UserError: the bundle was built without components, lacks a model that the pipeline was saved with, or the pipeline
                takes no such part, or has another of its parts in the place of one.
            BackendUnavailable: the installed diffusers or transformers has no such pipeline.
        """
        from trtconvert.runtime.diffusers import follow_scheduler, refuse_misplaced
        from trtconvert.runtime.pipeline import make_pipeline

        for name, part in parts.items():
            refuse_misplaced(part, name)

        if not self.manifest.pipeline:
            raise UserError(
                f"{self.folder} holds no pipeline",
                expected="a bundle of a recipe with model.source: diffusers and a section components",
                got="a denoiser alone",
                remedy="put bundle.as_diffusers() into a pipeline of your own, or build with components: {all: {}}",
            )
        names = {
            component.diffusers.component: "vae" if component.diffusers.component == "vae" else name
            for name, component in self.manifest.components.items()
            if component.diffusers is not None
        }
        if "vae" in names and "vae_decoder" not in self.components:
            del names["vae"]  # an encoder alone is no VAE
        own = {part: self.as_diffusers(name) for part, name in names.items() if part not in parts}
        pipe = make_pipeline(self.folder / self.manifest.pipeline, own | parts)
        for model in own.values():
            follow_scheduler(model, pipe)
        return pipe

    @property
    def device_memory(self) -> DeviceMemory:
        """What the bundle takes on the GPU; zeros where it runs on the CPU."""
        if not self._scratches:
            return DeviceMemory(0, 0, 0, 0)
        weights = sum(component.weights_memory for component in self.components.values())
        graphs = sum(component.graphs_memory for component in self.components.values())
        caches = sum(component.caches_memory for component in self.components.values())
        per_stream, streams = (
            sum(sizes) for sizes in zip(*((s.size, s.allocated) for s in self._scratches), strict=True)
        )
        return DeviceMemory(weights, per_stream, streams, graphs, caches)


def load(
    folder: str | Path,
    *,
    backend: Literal["auto", "tensorrt", "onnxruntime"] = "auto",
    device: str | int | torch.device | None = None,
    devices: Sequence[str | int | torch.device] | None = None,
    graphs: int = 4,
    streams: int = 4,
    weight_budget: int | None = None,
    check: bool = False,
    all_steps: bool = False,
) -> LoadedBundle:
    """Load a bundle.

    Args:
        backend: "auto" takes TensorRT where this machine has it and the bundle has engines for it, else ONNX Runtime on the
            CPU, which is for checking. A bundle whose engines are for another machine is refused, not run on the CPU.
        device: the GPU; the current one by default. Where one is named the bundle runs there or is refused; "cpu" takes ONNX
            Runtime. The further arguments are for GPUs too, see `TensorRTComponent`.
        devices: several GPUs instead, among which the samples of each call of the denoiser are shared out, see `DataParallel`.
            The other components are on the first. The bundle needs an engine for each.
        graphs: CUDA graphs kept per stream, one per shape; calls of further shapes run without, until one of the graphs was not
            launched for 256 calls. 0 for none.
        streams: streams that may call a component by turns and keep their memory.
        weight_budget: bytes of each engine's weights that stay on the GPU.
        check: look at what the denoiser is given, by the bundle or in a pipeline, and warn once of inputs that are far outside of
            what it was calibrated on, or of timesteps beyond its schedule. Costs a reduction over each input, and nothing waits.
        all_steps: compute all denoising steps, also where the bundle was built to leave some out.
    Raises:
        UserError: not a bundle, or a file of it is missing, truncated or altered; or an argument is out of range, or a device is
            there twice.
        BackendUnavailable: the engines are for another GPU, TensorRT or plugin, TensorRT cannot load them, or a GPU was named
            and nothing runs the bundle there.
    """
    for name, value, least in (
        ("graphs", graphs, 0),
        ("streams", streams, 1),
        ("weight_budget", weight_budget or 0, 0),
    ):
        if not hasattr(value, "__index__") or value < least:
            raise UserError(
                f"a bundle is not loaded with {name}={value!r}",
                expected=f"{least} or more",
                got=repr(value),
                remedy=f"correct the argument {name}",
            )
    if backend not in ("auto", "tensorrt", "onnxruntime"):
        raise UserError(
            f"there is no backend '{backend}'",
            expected="auto, tensorrt or onnxruntime",
            got=str(backend),
            remedy="correct the argument backend",
        )
    places = parse_devices(device, devices)
    folder = Path(folder)
    with suppress(FileNotFoundError):  # the current folder has gone
        folder = folder.absolute()  # what is read later is there, wherever the process goes
    loaded = read_unchanged(
        folder,
        lambda manifest: _loaded(folder, manifest, backend, places, graphs, streams, weight_budget),
        LoadedBundle.close,
    )
    if not all_steps:
        for name, component in loaded.manifest.components.items():
            if component.reuse is not None:
                loaded[name].reuse = load_reuse(folder, component)
    watches = list[InputWatch]()
    for name, component in loaded.manifest.components.items() if check else ():
        if component.is_denoiser:
            watches.append(InputWatch(component))
            loaded[name].signature.watch = watches[-1]
            if not component.input_ranges:
                warn(
                    f"{folder} does not say what its denoiser was calibrated on, so that timesteps alone are checked; remedy: "
                    "build it again, without calibration.from or with a calibration of this version"
                )
    return replace(loaded, _watches=watches)


def _loaded(
    folder: Path,
    manifest: Manifest,
    backend: Literal["auto", "tensorrt", "onnxruntime"],
    devices: Sequence[str | int | torch.device | None],
    graphs: int,
    streams: int,
    weight_budget: int | None,
) -> LoadedBundle:
    """See `load`; None among the devices stands for the current GPU, or the CPU where there is none."""
    check_files(folder, manifest)
    device, *further = devices
    components = manifest.components
    engines = {name: [e for e in c.engines if e.backend == "tensorrt"] for name, c in components.items()}
    on_cpu_only = device is not None and _is_cpu(device)
    state = builder.status() if backend == "auto" and not on_cpu_only else None
    if backend == "tensorrt" or (state and all(engines.values()) and state.available):
        return _on_gpus(folder, manifest, engines, [_gpu(one) for one in devices], graphs, streams, weight_budget)
    if state is None:
        why, remedy = (
            "ONNX Runtime was asked for, which runs on the CPU",
            "leave out one of the arguments backend and device",
        )
    elif state.available:
        without = ", ".join(name for name, of in engines.items() if not of)
        why, remedy = f"there is none of {without}", "run `trtconvert compile` on this machine"
    else:
        why, remedy = state.detail, state.remedy
    if device is not None and not on_cpu_only:
        raise BackendUnavailable(
            f"the bundle {folder} does not run on '{device}'",
            expected="TensorRT, and an engine of each component",
            got=why,
            remedy=remedy,
        )
    layers = " and layers" if any(component.has_int8_layers for component in components.values()) else ""
    words = f"ONNX Runtime on the CPU, INT8 attention{layers} as the op's function body"
    if state and any(engines.values()):
        words += f"; its TensorRT engines cannot run here: {why}"
        if builder.device_architecture() is not None:  # without a GPU nobody expects them to
            warn(f"{folder} runs on {words}; remedy: {remedy}")
    on_cpu: dict[str, Component] = {name: OnnxRuntimeComponent(folder / c.onnx, c) for name, c in components.items()}
    for name, component in components.items():
        if component.is_denoiser and further:
            others = [OnnxRuntimeComponent(folder / component.onnx, component) for _ in further]
            on_cpu[name] = DataParallel([on_cpu[name], *others])
            words += f"; samples shared out among {len(devices)} sessions"
    return LoadedBundle(folder, manifest, on_cpu, words)


def _on_gpus(
    folder: Path,
    manifest: Manifest,
    engines: Mapping[str, list[EngineRecord]],
    devices: Sequence[torch.device],
    graphs: int,
    streams: int,
    weight_budget: int | None,
) -> LoadedBundle:
    """A bundle on the first of some GPUs, its denoiser on all of them."""
    from trtconvert.runtime.compatibility import Machine, fitting_engine
    from trtconvert.runtime.scratch import Scratch
    from trtconvert.runtime.tensorrt import TensorRTComponent

    version = builder.bindings().__version__

    def machine(device: torch.device) -> Machine:
        major, minor = torch.cuda.get_device_capability(device)
        name = torch.cuda.get_device_name(device)
        return Machine(f"sm{major}{minor}", version, library_version(), name, device.index)

    first, *others = map(machine, devices)
    if without := [name for name, records in engines.items() if not records]:
        raise BackendUnavailable(
            f"the bundle {folder} has no TensorRT engine of {', '.join(without)}",
            expected=f"one for {first.architecture}",
            got="none",
            remedy="run `trtconvert compile` on this machine",
        )
    of_denoisers = {name: of for name, of in engines.items() if manifest.components[name].is_denoiser}
    wanted = [(first, engines), *((other, of_denoisers) for other in others)]
    chosen = [{name: fitting_engine(name, of, here) for name, of in some.items()} for here, some in wanted]
    scratches = [Scratch(device) for device in devices]
    loaded: dict[str, list[Component]] = {}
    with ExitStack() as opened:
        for device, scratch, records in zip(devices, scratches, chosen, strict=True):
            for name, record in records.items():
                component = TensorRTComponent(
                    folder / record.file,
                    record,
                    manifest.components[name],
                    onnx=folder / manifest.components[name].onnx,
                    device=device,
                    scratch=scratch,
                    graphs=graphs,
                    streams=streams,
                    weight_budget=weight_budget,
                )
                opened.callback(component.close)
                loaded.setdefault(name, []).append(component)
        on_gpus = {name: DataParallel(parts) if len(parts) > 1 else parts[0] for name, parts in loaded.items()}
        opened.pop_all()  # all are loaded: they stay open
    records = chosen[0]
    kinds = {"plugin": "INT8 attention in our plugin", "native": "attention in the model's precision"}
    denoisers = [record for name, record in records.items() if manifest.components[name].is_denoiser]
    of_layers = {
        "": "",
        "native": "INT8 layers in TensorRT's kernels",
        "plugin": "INT8 layers in our plugin",
        "exact": "layers in 16 bits, with the weights that INT8 holds",
    }
    words = (kinds[record.attention] for record in denoisers), (of_layers[record.layers] for record in records.values())
    said = ", ".join(dict.fromkeys(text for part in words for text in part if text))
    shared = f"; samples shared out among {', '.join(map(str, devices))}" if len(devices) > 1 else ""
    return LoadedBundle(folder, manifest, on_gpus, f"TensorRT {version}, {said}{shared}", scratches)


def engine_component(path: Path, record: EngineRecord, component: ComponentRecord) -> Component:
    """A TensorRT engine that lies beside no bundle yet, on the current GPU.

    Args:
        path: of the plan; record: what its build said of it; component: its signature.
    Raises:
        BackendUnavailable: there is no GPU, or TensorRT refuses the engine here.
    """
    from trtconvert.runtime.scratch import Scratch
    from trtconvert.runtime.tensorrt import TensorRTComponent

    device = _gpu(None)
    return TensorRTComponent(path, record, component, device=device, scratch=Scratch(device))


def _is_cpu(device: str | int | torch.device) -> bool:
    try:
        return torch.device(device).type == "cpu"
    except (RuntimeError, TypeError):  # torch knows no such device
        return False


def _gpu(device: str | int | torch.device | None) -> torch.device:
    """A GPU with its index.

    Raises:
        BackendUnavailable: torch sees no such GPU.
    """
    if not torch.cuda.is_available():
        raise BackendUnavailable(
            "TensorRT needs an NVIDIA GPU",
            expected="a GPU that torch sees",
            got="none",
            remedy="install a torch for CUDA and the driver, or load the bundle with backend='onnxruntime'",
        )
    try:
        given = torch.device("cuda", device) if isinstance(device, int) else torch.device(device or "cuda")
    except (RuntimeError, TypeError):  # torch knows no such device
        given = torch.device("cpu")
    index = torch.cuda.current_device() if given.index is None else given.index
    if given.type != "cuda" or not 0 <= index < torch.cuda.device_count():
        raise BackendUnavailable(
            f"there is no GPU '{device}'",
            expected=f"cuda:0 to cuda:{torch.cuda.device_count() - 1}",
            got=str(device),
            remedy="give one of those as device",
        )
    return torch.device("cuda", index)
