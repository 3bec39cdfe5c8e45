"""Group offloading of diffusers, for models larger than the GPU: weights stay in host memory and come to the GPU block by block.

Its hooks bring a block's weights to the GPU before the block's forward, prefetch the next block's meanwhile, and free them after
it. They are made for inference. Two additions here make backward passes work:

- Autograd keeps a weight by its parameter, which is on the host again after the forward. Functions therefore get tensors
  that share the parameter's memory of that moment (`_SharedMemory`). This alone would keep all weights on the GPU, so blocks keep
  their inputs alone, and backward passes compute the blocks again (`computed_again`).
- The hooks prefetch in the order of the forward. In a backward pass, which goes the other way, they would bring blocks to the GPU
  that are never freed: there each block brings its own weights alone (`in_backward`).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from trtconvert.diffusion_model import DiffusionModel
from trtconvert.interception import Interception
from trtconvert.linear.sites import Layer

LARGE = 2**30
"""Other models of the pipeline are offloaded if they have as many bytes of weights. Smaller models stay on the GPU."""

PINNED_SHARE = 0.8
"""Share of the available host memory that pinned weights may take."""

TABLES_SHARE = 0.6
"""Share of the GPU's free memory that the weights of INT8 layers may take. Larger weights stay in host memory, and each comes to
the GPU for its layer's call."""

_GROUP_OFFLOADING = "group_offloading"

_large: WeakSet[nn.Module] = WeakSet()
"""The models that `move` offloads."""


def offload(module: nn.Module, device: torch.device, *, leaves: bool = False) -> None:
    """Leaves a module's weights in host memory, where they are now, and brings them to a device while they are needed.

    Args:
        leaves: offload layer by layer, for modules without blocks near their top, such as text encoders. Otherwise block by
            block; weights outside of the part that has blocks then stay on the device.
    """
    from diffusers.hooks.group_offloading import apply_group_offloading

    # It warns of layers that the first forward does not call, such as T5's embedding, which has two names. These bring their own
    # weights when they are called.
    logging.getLogger(apply_group_offloading.__module__).setLevel(logging.ERROR)
    part = module if leaves else _with_blocks(module)
    apply_group_offloading(
        part,
        onload_device=device,
        offload_device=torch.device("cpu"),
        offload_type="leaf_level" if leaves else "block_level",
        num_blocks_per_group=None if leaves else 1,
        use_stream=device.type == "cuda",
        low_cpu_mem_usage=True,  # weights that are not pinned yet are pinned while they are copied
    )
    inside = {id(x) for x in _tensors(part)}
    for x in _tensors(module):
        if id(x) not in inside:
            x.data = x.data.to(device)


def _with_blocks(module: nn.Module) -> nn.Module:
    """Returns the outermost part of a module that has lists or rows of blocks among its children, as diffusers needs it; the
    module itself where there is none. Denoisers may be wrapped."""
    part = module
    while not any(isinstance(child, (nn.ModuleList, nn.Sequential)) for child in part.children()):
        children = list(part.children())
        if not children:
            return module
        part = max(children, key=lambda child: sum(x.nbytes for x in _tensors(child)))
    return part


def _tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def resident_bytes(module: nn.Module) -> int:
    """Returns the most bytes of an offloaded module that are on the device at once: a block, a prefetched block, and everything
    outside of blocks."""
    blocks = sorted(sum(x.nbytes for x in _tensors(block)) for block in _blocks(module))
    return sum(x.nbytes for x in _tensors(module)) - sum(blocks[:-2])


def offload_large_parts(parts: Iterable[Any], pinning: bool, notice: Callable[[str], None]) -> None:
    """Makes `move` offload those of a pipeline's other models that are `LARGE`, layer by layer.

    Args:
        parts: of the pipeline, on the CPU.
        pinning: pin their weights where host memory has room.
        notice: gets a message where it has none.
    """
    for part in parts:
        if not isinstance(part, nn.Module) or part in _large:
            continue
        weights = _tensors(part)
        if sum(x.nbytes for x in weights) < LARGE:
            continue
        part.to("cpu")
        if pinning and pins((x.nbytes for x in weights), type(part).__name__, notice):
            for x in weights:
                x.data = x.data.pin_memory()
        _large.add(part)


def move(part: nn.Module, device: torch.device | str) -> None:
    """Moves one of a pipeline's other models to a device, or offloads it if `offload_large_parts` chose it."""
    device = torch.device(device)
    if part not in _large:
        part.to(device)
    elif device.type == "cpu":
        _remove_hooks(part)
    elif not _hooks(part):
        offload(part, device, leaves=True)


def _remove_hooks(module: nn.Module) -> None:
    from diffusers.hooks.hooks import HookRegistry

    if not _hooks(module):
        return
    registry = HookRegistry.check_if_exists_or_initialize(module)
    for name in (_GROUP_OFFLOADING, "lazy_prefetch_group_offloading", "layer_execution_tracker"):
        registry.remove_hook(name, recurse=True)
    module.to("cpu")  # a call that failed may have left weights on the device


def pins(sizes: Iterable[int], who: str, notice: Callable[[str], None]) -> bool:
    """Whether host memory has room for pinned weights; sends a notice where it has not.

    Args:
        sizes: bytes of each tensor.
        who: name of their model.
    """
    need = sum(1 << (size - 1).bit_length() for size in sizes if size)  # torch rounds up to powers of two
    free = host_memory_free()
    if need <= PINNED_SHARE * free:
        return True
    notice(
        f"the weights of {who} are not pinned as a whole: this needs {need / 2**30:.1f} GiB of host memory, and "
        f"{free / 2**30:.1f} GiB are available. Each block is pinned while it is copied to the GPU, which takes longer"
    )
    return False


def host_memory_free() -> int:
    """Returns the bytes of host memory that this process may still take, by the limits of the machine and of its container."""
    of_machine = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(of_machine["MemAvailable"].split()[0]) * 1024
    group = Path("/sys/fs/cgroup")
    try:
        limit, used = ((group / name).read_text().strip() for name in ("memory.max", "memory.current"))
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except OSError:  # no container, or no limits of its own
        return free
    return free if limit == "max" else min(free, int(limit) - int(used) + int(stat["inactive_file"]))


def tables_device(model: DiffusionModel, layers: Sequence[Layer]) -> torch.device:
    """Returns the device for the tables of a model's INT8 layers: the model's device; host memory for an offloaded model whose
    INT8 weights are too large for the GPU.

    Args:
        layers: in INT8.
    """
    if model.onload is None or model.onload.type != "cuda":
        return model.device
    size = sum(math.prod(weight.shape) for weight in {layer.weight for layer in layers})
    fits = size <= TABLES_SHARE * torch.cuda.mem_get_info(model.onload)[0]
    return model.onload if fits else torch.device("cpu")


# Backward passes ------------------------------------------------------------------------------------------------------


@contextmanager
def computed_again(module: nn.Module, forward: Interception) -> Iterator[None]:
    """Surrounds a forward of an offloaded module that records gradients: blocks keep their inputs alone, and backward passes
    compute the blocks again under the same hooks.

    Args:
        forward: the interception of the forward.
    """
    # A recomputed block must run to its end, where the offloading frees its weights.
    with ExitStack() as stack, set_checkpoint_early_stop(False), _SharedMemory(module):
        for block in _blocks(module):
            own = block.forward
            block.forward = partial(_checkpointed, block, own, module, forward)
            stack.callback(setattr, block, "forward", own)
        yield


@contextmanager
def in_backward(module: nn.Module) -> Iterator[None]:
    """Surrounds backward passes through a forward under `computed_again`."""
    hooks = [hook for _, hook in _hooks(module)]
    before = [(hook.next_group, hook.group.onload_self, hook.group.non_blocking) for hook in hooks]
    for hook in hooks:
        hook.next_group, hook.group.onload_self, hook.group.non_blocking = None, True, False
    try:
        yield
    finally:
        for hook, (following, alone, non_blocking) in zip(hooks, before, strict=True):
            hook.next_group, hook.group.onload_self, hook.group.non_blocking = following, alone, non_blocking
        _wait()


def _hooks(module: nn.Module) -> list[tuple[nn.Module, Any]]:
    """Returns the parts of an offloaded module that bring weights to the device, each with diffusers' hook."""
    found = []
    for part in module.modules():
        registry = getattr(part, "_diffusers_hook", None)
        if registry is not None and (hook := registry.get_hook(_GROUP_OFFLOADING)) is not None:
            found.append((part, hook))
    return found


def _blocks(module: nn.Module) -> list[nn.Module]:
    """Returns the outermost parts of an offloaded module that come to the device one after the other."""
    root = _with_blocks(module)
    found, inside = list[nn.Module](), set[int]()
    for part, _ in _hooks(root):
        if part is not root and id(part) not in inside:
            found.append(part)
            inside |= {id(one) for one in part.modules()}
    return found


def _checkpointed(
    block: nn.Module, own: Callable[..., Any], module: nn.Module, forward: Interception, *args: Any, **named: Any
) -> Any:
    """Runs a block's own forward, which has the hooks of the offloading, without keeping its activations."""

    def compute(*args: Any, **named: Any) -> Any:
        before, block.forward = block.forward, own
        try:
            return block(*args, **named)  # called as a module, so that interceptions see it
        finally:
            block.forward = before

    contexts = (nullcontext(), _Recomputation(module, forward.restart()))
    return checkpoint(
        compute, *args, use_reentrant=False, preserve_rng_state=False, context_fn=lambda: contexts, **named
    )


class _Recomputation:
    def __init__(self, module: nn.Module, restart: Callable[[], Interception]) -> None:
        self._module, self._restart, self._stack = module, restart, ExitStack()

    def __enter__(self) -> None:
        # The host has freed the weights of the block before, and the device may still read them. The next weights come by another
        # stream, which would take the freed memory at once.
        _wait()
        self._stack.enter_context(self._restart())
        self._stack.enter_context(_SharedMemory(self._module))

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.current_stream().synchronize()


class _SharedMemory(TorchFunctionMode):
    """Passes tensors that share the memory of a module's weights to torch's functions instead of the weights, so that autograd
    keeps this memory when the weights get other memory."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._buffers = {id(x) for x in module.buffers()}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if getattr(func, "__name__", "") not in ("__get__", "__set__"):  # the offloading exchanges memory by these
            args, kwargs = tree_map_only(Tensor, self._alias, (args, kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _alias(self, x: Tensor) -> Tensor:
        return x.detach() if isinstance(x, nn.Parameter) or id(x) in self._buffers else x
