"""Loads bundles and runs their components."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import torch

from trtconvert.bundle import ComponentRecord, EngineRecord, Manifest, check_files, read_unchanged
from trtconvert.engine import tensorrt as builder
from trtconvert.engine.driver import fork_problem
from trtconvert.errors import BackendUnavailable, UserError, unknown_name, warn
from trtconvert.library import library_version
from trtconvert.runtime.component import Component
from trtconvert.runtime.devices import DataParallel, device_of, parse_devices
from trtconvert.runtime.reuse import load_reuse
from trtconvert.runtime.session import OnnxRuntimeComponent
from trtconvert.runtime.watch import InputWatch

if TYPE_CHECKING:
    from trtconvert.runtime.diffusers import DiffusersComponent, DiffusersDenoiser
    from trtconvert.runtime.scratch import Scratch


@dataclass(frozen=True)
class DeviceMemory:
    """Device memory of a bundle in bytes, on all its devices.

    Attributes:
        weights: memory of the loaded engines.
        per_stream: scratch memory of each calling stream, shared by all engines of the bundle on a device.
        streams: scratch memory allocated now.
        graphs: inputs and outputs of CUDA graphs.
        caches: caches of MoDiff layers, on all streams that have called them.
    """

    weights: int
    per_stream: int
    streams: int
    graphs: int
    caches: int = 0


@dataclass(frozen=True)
class LoadedBundle:
    """A loaded bundle with checked files. As a context manager it closes itself.

    Attributes:
        components: callables by name. `bundle["denoiser"]`, `in` and iteration work on the names.
        backend: description of the backend.
    """

    folder: Path
    manifest: Manifest
    components: Mapping[str, Component]
    backend: str
    _scratches: Sequence[Scratch] = ()
    _watches: Sequence[InputWatch] = ()

    def __getitem__(self, name: str) -> Component:
        if name not in self.components:
            problem = f"the bundle {self.folder} has no component '{name}'"
            raise unknown_name(problem, name, self.components, "take one of the expected names")
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
        """Wait for running calls and free the engines. Further calls are refused."""
        with ExitStack() as closing:  # closes all of them, even if one raises
            for component in self.components.values():
                closing.callback(component.close)
            for watch in self._watches:
                closing.callback(watch.close)

    def as_diffusers(self, name: str = "denoiser") -> DiffusersDenoiser | DiffusersComponent:
        """Wrap a component for a diffusers pipeline, in place of its `unet`, `transformer`, text encoder or `vae`.

        Args:
            name: name of the component; "vae" for the encoder and the decoder together.
        Raises:
            UserError: the component does not exist or did not come from a diffusers pipeline.
            BackendUnavailable: diffusers is not installed.
        """
        from trtconvert.runtime.diffusers import DiffusersComponent, DiffusersDenoiser
        from trtconvert.runtime.signature import dtype_of

        halves = {
            component.diffusers.method: (self.components[half], component)
            for half, component in self.manifest.components.items()
            if component.diffusers is not None and component.diffusers.component == "vae"
        }
        if name == "vae" and "decode" in halves:
            component = halves["decode"][1]
            dtype, device = dtype_of(component.inputs[0]), halves["decode"][0].device
            return DiffusersComponent(halves, dtype=dtype, device=device)
        called, component = self[name], self.manifest.components[name]
        if component.diffusers is None or component.diffusers.method != "forward":
            raise UserError(
                f"'{name}' of {self.folder} is not a model of diffusers",
                expected="a component of a recipe with model.source: diffusers; 'vae' for encoder and decoder together",
                got=self.manifest.model,
                remedy=f"call bundle['{name}'] with its inputs by name",
            )
        if not component.is_denoiser:
            dtype = dtype_of(component.outputs[0])
            return DiffusersComponent({"forward": (called, component)}, dtype=dtype, device=called.device)
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
        """Make the whole diffusers pipeline from the bundle's components, without the weights of the original denoiser.

        Args:
            parts: models that the bundle lacks, and replacements of the pipeline's own, by the pipeline's names: `vae=…`,
                `scheduler=…`; None leaves a part out.
        Raises:
            UserError: the bundle was built without components, lacks a model of the saved pipeline, or a part does not fit the
                pipeline or its place.
            BackendUnavailable: the installed diffusers or transformers does not have the pipeline.
        """
        from trtconvert.runtime.diffusers import refuse_misplaced
        from trtconvert.runtime.pipeline import make_pipeline

        for name, part in parts.items():
            refuse_misplaced(part, name)

        if not self.manifest.pipeline:
            raise UserError(
                f"{self.folder} holds no pipeline",
                expected="a bundle of a recipe with model.source: diffusers and a section components",
                got="a denoiser alone",
                remedy="put bundle.as_diffusers() into your own pipeline, or build with components: {all: {}}",
            )
        names = {
            component.diffusers.component: "vae" if component.diffusers.component == "vae" else name
            for name, component in self.manifest.components.items()
            if component.diffusers is not None
        }
        if "vae" in names and "vae_decoder" not in self.components:
            del names["vae"]  # an encoder alone is not a VAE
        own = {part: self.as_diffusers(name) for part, name in names.items() if part not in parts}
        return make_pipeline(self.folder / self.manifest.pipeline, own | parts)

    @property
    def device_memory(self) -> DeviceMemory:
        """The bundle's memory on GPUs; zeros on the CPU."""
        if not self._scratches:
            return DeviceMemory(0, 0, 0, 0)
        parts = list(self.components.values())
        return DeviceMemory(
            weights=sum(part.weights_memory for part in parts),
            per_stream=sum(scratch.size for scratch in self._scratches),
            streams=sum(scratch.allocated for scratch in self._scratches),
            graphs=sum(part.graphs_memory for part in parts),
            caches=sum(part.caches_memory for part in parts),
        )


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
        backend: "auto" takes TensorRT if this machine has TensorRT and the bundle has engines, else ONNX Runtime on the CPU,
            which is for checking. A bundle with engines for another machine is refused.
        device: the GPU; default: the current one. A named GPU that cannot run the bundle is refused; "cpu" takes ONNX Runtime.
        devices: several GPUs that share the samples of each call of the denoiser, see `DataParallel`. The other components run
            on the first. The bundle needs an engine for each GPU.
        graphs: number of CUDA graphs per stream, one per shape; 0 for none. Calls of further shapes run without a graph, until a
            graph was not launched for 256 calls.
        streams: number of streams that may call a component by turns and keep their memory.
        weight_budget: bytes of each engine's weights that stay on the GPU.
        check: warn once of denoiser inputs far outside of the calibrated ranges, and of timesteps beyond the schedule. Costs a
            reduction over each input, without synchronisation.
        all_steps: compute all denoising steps, even if the bundle was built to skip some.
    Raises:
        UserError: the folder is not a bundle, a file is missing or damaged, an argument is out of range, or a device is named
            twice.
        BackendUnavailable: the engines are for another GPU, TensorRT or plugin, TensorRT cannot load them, or the named GPU
            cannot run the bundle.
    """
    for name, value, least in (
        ("graphs", graphs, 0),
        ("streams", streams, 1),
        ("weight_budget", weight_budget or 0, 0),
    ):
        if not hasattr(value, "__index__") or value < least:
            raise UserError(
                f"a bundle cannot be loaded with {name}={value!r}",
                expected=f"{least} or more",
                got=repr(value),
                remedy=f"correct the argument {name}",
            )
    if backend not in ("auto", "tensorrt", "onnxruntime"):
        known = ("auto", "tensorrt", "onnxruntime")
        raise unknown_name(f"there is no backend '{backend}'", str(backend), known, "correct the argument backend")
    places = parse_devices(device, devices)
    folder = Path(folder)
    with suppress(FileNotFoundError):  # the current folder was removed
        folder = folder.absolute()  # files are read later, after the process may have changed its folder

    def read(manifest: Manifest) -> LoadedBundle:
        check_files(folder, manifest)
        skipping = {} if all_steps else {n: c for n, c in manifest.components.items() if c.reuse is not None}
        reuses = {name: load_reuse(folder, component) for name, component in skipping.items()}
        loaded = _loaded(folder, manifest, backend, places, graphs, streams, weight_budget)
        for name, reuse in reuses.items():
            loaded[name].reuse = reuse
        return loaded

    loaded = read_unchanged(folder, read, LoadedBundle.close)
    watches = list[InputWatch]()
    for name, component in loaded.manifest.components.items() if check else ():
        if component.is_denoiser:
            watches.append(InputWatch(component))
            loaded[name].signature.watch = watches[-1]
            if not component.input_ranges:
                warn(
                    f"{folder} holds no ranges of the denoiser's inputs, so that only timesteps are checked; remedy: build the "
                    "bundle again, without calibration.from or with a calibration of this version"
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
    """See `load`, for checked files; the device None means the current GPU, or the CPU without a GPU."""
    device, *further = devices
    components = manifest.components
    engines = {name: [e for e in c.engines if e.backend == "tensorrt"] for name, c in components.items()}
    on_cpu_only = device is not None and (given := device_of(device)) is not None and given.type == "cpu"
    state = builder.status() if backend == "auto" and not on_cpu_only else None
    if backend == "tensorrt" or (state and all(engines.values()) and state.available):
        return _on_gpus(folder, manifest, engines, [gpu_of(one) for one in devices], graphs, streams, weight_budget)
    if state is None:
        why, remedy = ("ONNX Runtime, which runs on the CPU", "leave out one of the arguments backend and device")
    elif state.available:
        without = ", ".join(name for name, of in engines.items() if not of)
        why, remedy = f"no engine of {without}", "run `trtconvert compile` on this machine"
    else:
        why, remedy = state.detail, state.remedy
    if device is not None and not on_cpu_only:
        raise BackendUnavailable(
            f"the bundle {folder} cannot run on '{device}'",
            expected="TensorRT, and an engine of each component",
            got=why,
            remedy=remedy,
        )
    layers = " and layers" if any(component.has_int8_layers for component in components.values()) else ""
    words = f"ONNX Runtime on the CPU, INT8 attention{layers} as the op's function body"
    if state and any(engines.values()):
        words += f"; its TensorRT engines cannot run here: {why}"
        # Without a GPU ONNX Runtime is expected.
        if fork_problem() or builder.device_architecture() is not None:
            warn(f"{folder} runs on {words}; remedy: {remedy}")
    on_cpu: dict[str, Component] = {name: OnnxRuntimeComponent(folder / c.onnx, c) for name, c in components.items()}
    for name, component in components.items():
        if component.is_denoiser and further:
            others = [OnnxRuntimeComponent(folder / component.onnx, component) for _ in further]
            on_cpu[name] = DataParallel([on_cpu[name], *others])
            words += f"; samples shared by {len(devices)} sessions"
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
    """Load a bundle onto the first GPU, and its denoiser onto all GPUs."""
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
            expected=f"an engine for {first.architecture}",
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
        opened.pop_all()  # all are loaded, and stay open
    records = chosen[0]
    kinds = {"plugin": "INT8 attention in our plugin", "native": "attention in the model's precision"}
    denoisers = [record for name, record in records.items() if manifest.components[name].is_denoiser]
    of_layers = {
        "": "",
        "native": "INT8 layers in TensorRT's kernels",
        "plugin": "INT8 layers in our plugin",
        "exact": "16-bit layers with dequantised INT8 weights",
    }
    words = (kinds[record.attention] for record in denoisers), (of_layers[record.layers] for record in records.values())
    said = ", ".join(dict.fromkeys(text for part in words for text in part if text))
    shared = f"; samples shared by {', '.join(map(str, devices))}" if len(devices) > 1 else ""
    return LoadedBundle(folder, manifest, on_gpus, f"TensorRT {version}, {said}{shared}", scratches)


def engine_component(path: Path, record: EngineRecord, component: ComponentRecord) -> Component:
    """Load a TensorRT engine outside of a bundle onto the current GPU.

    Args:
        path: path of the plan; record: record of the plan's build; component: its signature.
    Raises:
        BackendUnavailable: there is no GPU, or TensorRT refuses the engine.
    """
    from trtconvert.runtime.scratch import Scratch
    from trtconvert.runtime.tensorrt import TensorRTComponent

    device = gpu_of(None)
    return TensorRTComponent(path, record, component, device=device, scratch=Scratch(device))


def gpu_of(device: str | int | torch.device | None) -> torch.device:
    """Return a GPU with its index.

    Raises:
        BackendUnavailable: torch does not see the GPU.
    """
    if problem := fork_problem():
        got, remedy = problem
        raise BackendUnavailable(
            "TensorRT cannot be used in this process",
            expected="a process that starts CUDA itself",
            got=got,
            remedy=remedy,
        )
    if not torch.cuda.is_available():
        raise BackendUnavailable(
            "TensorRT needs an NVIDIA GPU",
            expected="a GPU that torch sees",
            got="none",
            remedy="install a torch for CUDA and the driver, or load the bundle with backend='onnxruntime'",
        )
    given = device_of("cuda" if device is None else device)
    index = -1 if given is None else torch.cuda.current_device() if given.index is None else given.index
    if given is None or given.type != "cuda" or not 0 <= index < torch.cuda.device_count():
        raise BackendUnavailable(
            f"there is no GPU '{device}'",
            expected=f"cuda:0 to cuda:{torch.cuda.device_count() - 1}",
            got=str(device),
            remedy="pass one of these as device",
        )
    return torch.device("cuda", index)
