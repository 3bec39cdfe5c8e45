"""Runs a denoiser on several devices, which share the samples of each call."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from trtconvert.errors import BackendUnavailable, UserError
from trtconvert.runtime.component import Component, was_closed
from trtconvert.runtime.signature import Ranges, Signature, rows_each
from trtconvert.runtime.trajectory import Trajectory

if TYPE_CHECKING:
    from trtconvert.runtime.loras import Loras


_KNOWN_CALLS = 256
"""Number of combinations of shapes and types that are remembered as checked."""


class DataParallel(Component):
    """A component with a session on each of several devices.

    The samples of a call are split in order into one part per device, with sizes that differ by one at most; with fewer samples
    than devices, some devices idle. On two devices, each gets one half of a guided call. The split depends on the number of
    samples alone, so that MoDiff caches stay with their samples; if the number changes, caches reset.

    Inputs are copied to the devices, and outputs back, in the order of the caller's current stream. The joined output lies on the
    device of the first input. Each device but the first has its own host thread, and a stream for each of the caller's streams. A
    call cannot be captured into the caller's CUDA graph; each session captures its own graphs.

    Args:
        parts: the component on each device, at least two.

    Attributes:
        signature: signature of all devices together.
        device: the first device.

    Raises:
        UserError: the component takes a fixed number of samples.
    """

    def __init__(self, parts: Sequence[Component]) -> None:
        component = parts[0].signature.component
        batch = component.inputs[0].shape[0]
        if not isinstance(batch, str):
            raise UserError(
                "devices cannot share the denoiser's batch",
                expected="a model for any number of samples",
                got=f"a model for exactly {batch}",
                remedy="load the bundle on one device, or convert the model with a range for the batch",
            )
        self._parts, self._batch, self._rows = list(parts), batch, parts[0].signature.of_samples()
        self._dims = {spec.shape[0] for spec, own in zip(component.inputs, self._rows, strict=True) if own}
        # The samples that some of the devices take together: two engines for exactly four samples do not take six.
        together = [
            _together(profile, self._dims, devices)
            for devices in range(1, len(parts) + 1)
            for profile in parts[0].signature.profiles
        ]
        self.signature = Signature(component, together)
        self.device = parts[0].device
        # Streams of the other devices, by the caller's stream on the first.
        self._streams: dict[int, list[torch.cuda.Stream | None]] = {}
        self._threads = [
            ThreadPoolExecutor(1, thread_name_prefix=f"trtconvert-{part.device}") for part in parts[1:]
        ]  # one thread each, so that work runs in order
        self._own = Trajectory()
        self._last: WeakKeyDictionary[Trajectory, int] = WeakKeyDictionary()  # samples of the last call
        self._known: dict[tuple, list[int]] = {}  # by shapes and types

    @property
    def weights_memory(self) -> int:
        return sum(part.weights_memory for part in self._parts)

    @property
    def graphs_memory(self) -> int:
        return sum(part.graphs_memory for part in self._parts)

    @property
    def graphs_recorded(self) -> int:
        return sum(part.graphs_recorded for part in self._parts)

    @property
    def caches_memory(self) -> int:
        return sum(part.caches_memory for part in self._parts)

    def call(self, trajectory: Trajectory | None, inputs: tuple[Tensor, ...], named: Mapping[str, Tensor]) -> Any:
        """Run the component on all devices. An error names its device, and is raised after the other devices are done."""
        tensors = self.signature.ordered(inputs, named)
        counts = self._counts_of(tensors)
        if self.signature.watch is not None:
            self.signature.watch(tensors)
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise UserError(
                "a component on several devices cannot be captured into a CUDA graph",
                expected="plain calls: each device's session captures its own graphs",
                got="a capture",
                remedy="call the component outside of torch.cuda.graph, or load the bundle on one device",
            )
        own, whole = trajectory or self._own, sum(counts)
        if self._last.setdefault(own, whole) != whole:
            self._last[own] = whole
            self.reset_cache(trajectory)
        return self._joined(tensors, counts, trajectory)

    def _counts_of(self, tensors: Sequence[Tensor]) -> list[int]:
        """Check inputs, once per shapes and types, and return the number of samples of each device that gets some."""
        try:
            return self._known[tuple([(x.shape, x.dtype, x.layout) for x in tensors])]
        except (KeyError, AttributeError, TypeError):  # not seen before, or not a tensor
            _, sizes = self.signature.check(tensors)
        if len(self._known) >= _KNOWN_CALLS:
            self._known.clear()
        counts = self._known[tuple([(x.shape, x.dtype, x.layout) for x in tensors])] = self._share_out(sizes)
        return counts

    def _share_out(self, sizes: Mapping[str, int]) -> list[int]:
        """Return the number of samples of each device, for as many devices as possible.

        Raises:
            UserError: no split fits the profiles of the devices.
        """
        count = sizes[self._batch]
        for devices in range(min(len(self._parts), count), 0, -1):
            least, more = divmod(count, devices)
            counts = [least + (place < more) for place in range(devices)]
            if all(self._fits(part, sizes, of_part) for part, of_part in zip(self._parts, counts, strict=False)):
                return counts
        listed = ", ".join(
            f"{low} to {high} on {part.device}"
            for part in self._parts
            for low, high in [_widest(part.signature.profiles, self._batch)]
        )
        raise UserError(
            f"the devices cannot share {count} samples",
            expected=f"parts that differ by one sample at most: {listed}",
            got=str(count),
            remedy="call the component with another number of samples, or build with a wider range of engine.shapes",
        )

    def _fits(self, part: Component, sizes: Mapping[str, int], count: int) -> bool:
        """Return whether an engine has a profile for `count` of the samples."""
        whole = sizes[self._batch]
        own = {name: size * count // whole if name in self._dims else size for name, size in sizes.items()}
        return any(
            all(profile[name][0] <= size <= profile[name][2] for name, size in own.items())
            for profile in part.signature.profiles
        )

    def _streams_here(self) -> list[torch.cuda.Stream | None]:
        """Return a stream on each device for the caller's current stream; None for the first device, and for the CPU."""
        if self.device.type != "cuda":
            return [None] * len(self._parts)
        here = torch.cuda.current_stream(self.device).cuda_stream
        if (streams := self._streams.get(here)) is None:
            # `setdefault`: other threads may call on the same stream.
            streams = self._streams.setdefault(here, [None, *(torch.cuda.Stream(p.device) for p in self._parts[1:])])
        return streams

    def _joined(self, tensors: Sequence[Tensor], counts: Sequence[int], trajectory: Trajectory | None) -> Any:
        whole, starts = sum(counts), [sum(counts[:place]) for place in range(len(counts))]

        named = zip(self.signature.names, tensors, self._rows, strict=True)
        rows = [rows_each(name, x, whole) if own else 0 for name, x, own in named]
        cut = [
            [x[start * n : (start + count) * n] if n else x for x, n in zip(tensors, rows, strict=True)]
            for start, count in zip(starts, counts, strict=True)
        ]
        streams, first = self._streams_here(), tensors[0].device
        moved = list[tuple[Tensor, ...]]()  # all copies are enqueued before any part runs
        for part, stream, inputs in zip(self._parts[1:], streams[1:], cut[1:], strict=False):
            with _on(stream, part.device), _naming(part):
                # In the order of the caller's stream and of the other device's. Copies from the CPU block, so that the caller
                # may overwrite pinned memory after the call.
                moved.append(tuple([x.to(part.device, non_blocking=x.is_cuda) for x in inputs]))
        further = zip(self._threads, self._parts[1:], streams[1:], moved, strict=False)
        try:
            running = [thread.submit(_run, part, stream, trajectory, of) for thread, part, stream, of in further]
        except RuntimeError:  # the pool was shut down
            raise was_closed() from None
        calls = [partial(_run, self._parts[0], None, trajectory, tuple(cut[0])), *(future.result for future in running)]
        outputs, failed = list[tuple[Tensor, ...]](), list[tuple[Component, BaseException]]()
        for part, result in zip(self._parts, calls, strict=False):
            try:
                found = result()
                outputs.append(found if isinstance(found, tuple) else (found,))
            except BaseException as error:  # raised after the other devices are done with the caller's tensors
                failed.append((part, error))
        if failed:
            wait(running)  # a signal may have interrupted `result`
            raise _named(*failed[0])
        joined = [
            torch.empty((x.shape[0] // counts[0] * whole, *x.shape[1:]), dtype=x.dtype, device=first)
            for x in outputs[0]
        ]
        for of_part, stream, start, count in zip(outputs, streams, starts, counts, strict=False):
            with _on(stream, first):
                for output, x in zip(joined, of_part, strict=True):
                    each = len(output) // whole
                    output[start * each : (start + count) * each].copy_(x, non_blocking=first.type == "cuda")
        return joined[0] if len(joined) == 1 else tuple(joined)

    def reset_cache(self, trajectory: Trajectory | None = None) -> None:
        for part in self._parts:
            part.reset_cache(trajectory)

    def check_caches(self) -> None:
        for part, stream in zip(self._parts, self._streams_here(), strict=True):
            with _on(stream, part.device), _naming(part):
                part.check_caches()

    def refit(self, weights: Mapping[str, Tensor] | str | Path) -> int:
        """Replace weights on every device, and return the number of replaced weights of an engine.

        Raises:
            UserError: see the component; no weight was replaced.
            BackendUnavailable: TensorRT failed half way, and the component was closed; load the bundle again.
        """
        return self._on_all(lambda part: part.refit(weights))

    def set_loras(self, loras: Loras) -> int:
        return self._on_all(lambda part: part.set_loras(loras))

    def _on_all(self, change: Callable[[Component], int]) -> int:
        # Engines that may refuse come first; refittable engines all take the same weights.
        ordered = sorted(self._parts, key=lambda part: getattr(getattr(part, "record", None), "refittable", False))
        counts = list[int]()
        for part in ordered:
            try:
                with _naming(part):
                    counts.append(change(part))
            except BaseException:
                if counts:  # the engines have different weights now
                    self.close()
                raise
        return counts[0]

    def close(self) -> None:
        """Wait for running calls and close all sessions. Further calls are refused."""
        for thread in self._threads:
            thread.shutdown(wait=True)
        with ExitStack() as closing:  # closes all of them, even if one raises
            for part in self._parts:
                closing.callback(part.close)


def _run(
    part: Component, stream: torch.cuda.Stream | None, trajectory: Trajectory | None, inputs: tuple[Tensor, ...]
) -> Any:
    with torch.no_grad(), nullcontext() if stream is None else torch.cuda.stream(stream):
        return part.call(trajectory, inputs, {})


@contextmanager
def _on(stream: torch.cuda.Stream | None, device: torch.device) -> Iterator[None]:
    """Run the block on a stream, after the current work of the caller's stream on a device, and before its later work."""
    if stream is None:
        yield
        return
    callers = [torch.cuda.current_stream(of) for of in {device, stream.device} if of.type == "cuda"]
    for caller in callers:
        stream.wait_stream(caller)
    with torch.cuda.stream(stream):
        yield
    for caller in callers:
        caller.wait_stream(stream)


def _together(profile: Ranges, dims: Collection[int | str], devices: int) -> dict[str, tuple[int, int, int]]:
    """Return a profile for the samples of several devices."""
    return {
        name: (low * devices, opt * devices, high * devices) if name in dims else (low, opt, high)
        for name, (low, opt, high) in profile.items()
    }


def _widest(profiles: Sequence[Ranges], dim: str) -> tuple[int, int]:
    return min(profile[dim][0] for profile in profiles), max(profile[dim][2] for profile in profiles)


@contextmanager
def _naming(part: Component) -> Iterator[None]:
    """Add the component's device to errors of the block."""
    try:
        yield
    except Exception as error:
        raise _named(part, error) from error.__cause__


def _named(part: Component, error: BaseException) -> BaseException:
    """Return an error with the component's device in its message."""
    if isinstance(error, (UserError, BackendUnavailable)):
        made = error.about(f"on {part.device}")
        made.__cause__ = error
        return made
    error.add_note(f"on {part.device}")
    return error


def device_of(given: str | int | torch.device) -> torch.device | None:
    """Return a device of torch, where a number is a GPU's; None for something else."""
    try:
        return torch.device("cuda", given) if isinstance(given, int) else torch.device(given)
    except (RuntimeError, TypeError):
        return None


def parse_devices(
    device: str | int | torch.device | None, devices: Sequence[str | int | torch.device] | None
) -> list[str | int | torch.device | None]:
    """Return the devices of a bundle.

    Raises:
        UserError: both arguments were given, `device` is unknown or holds several devices, or `devices` is empty, names an
            unknown device, a GPU twice, or GPUs and the CPU.
    """
    if devices is None:
        if isinstance(device, str) or not isinstance(device, Collection):
            if device is None or device_of(device) is not None:
                return [device]
            raise UserError(
                f"there is no device {device!r}",
                expected='"cpu", or a GPU, such as "cuda", "cuda:1" or 1',
                got=f"device={device!r}",
                remedy="correct the argument device, or leave it out for the current GPU",
            )
        raise UserError(
            "the argument device takes a single device",
            expected='one device, such as device="cuda:0"; or several, as devices=["cuda:0", "cuda:1"]',
            got=f"device={device!r}",
            remedy="correct the argument device",
        )

    def refused(problem: str, got: object) -> UserError:
        return UserError(
            problem,
            expected='different GPUs, such as devices=["cuda:0", "cuda:1"]; for trials "cpu" may be given several times',
            got=str(got),
            remedy="correct the argument devices, or the option --devices",
        )

    if device is not None:
        raise refused("device and devices exclude each other", f"device={device!r} and devices={devices!r}")
    if not isinstance(devices, Sequence) or isinstance(devices, (str, bytes)) or not devices:
        raise refused("devices must be a list of one or more devices", repr(devices))
    found = list[torch.device]()
    for given in devices:
        if (one := device_of(given)) is None:
            raise refused(f"there is no device {given!r}", list(devices))
        if one.type == "cuda" and one.index is None and torch.cuda.is_available():
            one = torch.device("cuda", torch.cuda.current_device())
        found.append(one)
    if len({one.type for one in found}) > 1:
        raise refused("devices must be all GPUs or all the CPU", list(devices))
    if found[0].type != "cpu" and len(set(found)) < len(found):
        twice = next(one for one in found if found.count(one) > 1)
        raise refused(f"the device {twice} was given twice", list(devices))
    return list(found)
