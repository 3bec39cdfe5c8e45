"""Finds layers: calls of linear layers and convolutions in a model, named by the calling module.

Intercepts calls of `linear`, `matmul`, `addmm` and convolutions with weights of the model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.weak import WeakIdKeyDictionary

from trtconvert.data_flow import LAYER, UNUSED, DataFlow
from trtconvert.errors import UserError, several
from trtconvert.interception import Caller, Hook, Hooks
from trtconvert.linear.reference import LayerTables
from trtconvert.mixed_types import autocast_type

IN_STEP, OUT_STEP = 16, 8
"""Channels per vector of the kernels: 16 bytes of INT8, and of 16-bit numbers."""

MOST_CHANNELS = 65_536

FEWEST_WEIGHTS = 2**22
"""Least weights of a layer of few rows for INT8 weights: its time is that of reading them, 3 µs for 8 MB on an H100."""


@dataclass(frozen=True)
class LayerCall:
    """One call of one layer.

    Attributes:
        name: path of the calling module, with `#2`, `#3`, … for its further calls in a forward.
        kind: of a layer.
        x: [..., K], of a convolution [B, K, *sizes].
        weight: [N, K], of a convolution [N, K / groups, *kernel].
        bias: [N] or None.
        timestep: [B] FP32 of the denoiser.
        exact: computes the original call.
        stride, padding: of a convolution, by size.
        obstacle: why the call cannot become an INT8 layer by its options, "" if it can.
    """

    name: str
    kind: Literal["linear", "conv"]
    x: Tensor
    weight: Tensor
    bias: Tensor | None
    timestep: Tensor
    exact: Callable[[], Tensor]
    stride: tuple[int, ...] = ()
    padding: tuple[int, ...] = ()
    obstacle: str = ""

    @property
    def dtype(self) -> torch.dtype:
        """Type of the result, also under `torch.autocast`."""
        return autocast_type(self.x)

    @property
    def channel_axis(self) -> int:
        """Axis of the channels in x."""
        return self.x.dim() - 1 if self.kind == "linear" else 1


@dataclass(frozen=True)
class TensorRef:
    """A parameter or buffer of a model, or a view of it.

    Attributes:
        name: in the state dict; the first name of a shared tensor.
        offset, shape, stride: of the view, in elements of the tensor.
    """

    name: str
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def state_name(self, tensors: Mapping[str, Tensor]) -> str:
        """Returns the name in the state dict if the view is the whole tensor, else ""."""
        whole = tensors[self.name]
        is_whole = (self.offset, self.shape, self.stride) == (0, tuple(whole.shape), tuple(whole.stride()))
        return self.name if is_whole else ""

    def of(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Returns the view of a model's tensors by name."""
        whole = tensors[self.name]
        return whole.as_strided(self.shape, self.stride, whole.storage_offset() + self.offset)


@dataclass(frozen=True)
class Layer:
    """The static properties of a layer.

    Attributes:
        name, kind, stride, padding, obstacle: as in `LayerCall`.
        in_channels, out_channels: K and N.
        kernel: sizes of a convolution's kernel, else empty.
        rows: rows of x, or pixels of the result, per sample, at the sizes of the discovery.
        input_group: the first layer that reads the same tensor. The layers of a group share scales: x is quantised once.
        weight: reference to [N, K, *kernel] in the model; equal for tied layers. bias: likewise.
        weight_only: whether activations stay in 16 bits in all bins, since the rows are few.
        normed: whether a norm computes its input: of a convolution a group norm, possibly with `silu`; of a linear layer a layer
            norm.
        gated: whether GEGLU computes its input. geglu: whether its output is the input of GEGLU.
        behind_gelu: whether its input is the GELU of another layer's output.
        behind_attention: whether its input holds results of attention, which no other operator computes with.
        beside_plugins: whether it is a linear layer of a model with convolutions behind group norms. Our plugins compute such a
            model's norms, and its linear layers beside them.
    """

    name: str
    kind: Literal["linear", "conv"]
    in_channels: int
    out_channels: int
    rows: int
    input_group: str
    weight: TensorRef
    bias: TensorRef | None = None
    kernel: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    padding: tuple[int, ...] = ()
    obstacle: str = ""
    weight_only: bool = False
    normed: bool = False
    gated: bool = False
    geglu: bool = False
    behind_gelu: bool = False
    behind_attention: bool = False
    beside_plugins: bool = False


@dataclass(frozen=True)
class ConvertedLayer:
    """A layer that becomes an INT8 layer.

    Attributes:
        layer: with an input group among the converted layers.
        tables: of its arithmetic.
        delta_scale: [T] FP32 scales of deltas by timestep bin, see `trtconvert.linear.deltas`. None: deltas are not used.
    """

    layer: Layer
    tables: LayerTables
    delta_scale: Tensor | None = None


LayerHandler = Callable[[LayerCall], Tensor]


def layer_hooks(handler: LayerHandler) -> Hooks:
    """Returns hooks that pass calls of layers to a handler, which returns their output.

    Products of two activations are passed too: a handler must compute calls of unknown names exactly.
    """

    def matmul(caller: Caller, x: Tensor, weight: Tensor, bias: Tensor | None, exact: Callable[[], Tensor]) -> Tensor:
        return handler(LayerCall(caller.name("layer"), "linear", x, weight.T, bias, caller.timestep, exact))

    def of_linear(caller: Caller, args: tuple[Any, ...], named: dict[str, Any]) -> Tensor:
        x, weight, bias = _taken(args, named, "input", "weight", "bias")
        name, samples = caller.name("layer"), caller.tokens_first
        if samples is None:
            exact = _exact(functional.linear, args, named)
            return handler(LayerCall(name, "linear", x, weight, bias, caller.timestep, exact))
        # Layers need the rows of a sample together: their scales follow one timestep.
        rows = x.reshape(-1, samples, x.shape[-1]).transpose(0, 1)
        exact = _exact(functional.linear, (rows, weight, bias), {})
        result = handler(LayerCall(name, "linear", rows, weight, bias, caller.timestep, exact))
        # Contiguous, as torch's layer returns it: multi-head attention takes views.
        return result.transpose(0, 1).reshape(*x.shape[:-1], result.shape[-1]).contiguous()

    def of_matmul(function: Callable[..., Tensor]) -> Hook:
        def hook(caller: Caller, args: tuple[Any, ...], named: dict[str, Any]) -> Tensor:
            x, weight = (*args, *(named[name] for name in _FACTORS if name in named), None)[:2]
            # A result that is written into `out` is not the handler's.
            if "out" in named or not isinstance(weight, Tensor) or weight.dim() != 2 or not isinstance(x, Tensor):
                return function(*args, **named)
            return matmul(caller, x, weight, None, _exact(function, args, named))

        return hook

    def of_addmm(function: Callable[..., Tensor]) -> Hook:
        def hook(caller: Caller, args: tuple[Any, ...], named: dict[str, Any]) -> Tensor:
            bias, x, weight = _taken(args, named, "input", "mat1", "mat2")
            if "out" in named or bias.dim() != 1 or named.get("beta", 1) != 1 or named.get("alpha", 1) != 1:
                return function(*args, **named)
            return matmul(caller, x, weight, bias, _exact(function, args, named))

        return hook

    def of_conv(function: Callable[..., Tensor], sizes: int, transposed: bool = False) -> Hook:
        def hook(caller: Caller, args: tuple[Any, ...], named: dict[str, Any]) -> Tensor:
            names = ("input", "weight", "bias", "stride", "padding", *(("output_padding", "groups", "dilation")
                     if transposed else ("dilation", "groups")))  # fmt: skip
            given = dict(zip(names, args, strict=False)) | named
            stride, dilation = (_each(given.get(name, 1), sizes) for name in ("stride", "dilation"))
            obstacle = "it is a transposed convolution" if transposed else _obstacle_of_conv(given, dilation)
            call = LayerCall(
                caller.name("layer"),
                "conv",
                given["input"],
                given["weight"],
                given.get("bias"),
                caller.timestep,
                _exact(function, args, named),
                stride,
                _padding(given, sizes),
                obstacle,
            )
            return handler(call)

        return hook

    hooks: dict[Callable[..., Any], Hook] = {functional.linear: of_linear}
    for function in (torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__):
        hooks[function] = of_matmul(function)
    for function in (torch.addmm, Tensor.addmm):
        hooks[function] = of_addmm(function)
    for sizes, function in enumerate((functional.conv1d, functional.conv2d, functional.conv3d), 1):
        hooks[function] = of_conv(function, sizes)
    for sizes, function in enumerate(
        (functional.conv_transpose1d, functional.conv_transpose2d, functional.conv_transpose3d), 1
    ):
        hooks[function] = of_conv(function, sizes, transposed=True)
    return {**hooks, **handler.norm_hooks()} if isinstance(handler, LayerFinder) else hooks


_FACTORS = ("input", "other", "mat2")
"""Names of the factors of products, in order."""


def _taken(args: tuple[Any, ...], named: Mapping[str, Any], *names: str) -> list[Any]:
    given = dict(zip(names, args, strict=False)) | dict(named)
    return [given.get(name) for name in names]


def _exact(function: Callable[..., Tensor], args: tuple[Any, ...], named: dict[str, Any]) -> Callable[[], Tensor]:
    return lambda: function(*args, **named)


def _each(value: int | Sequence[int], sizes: int) -> tuple[int, ...]:
    return (value,) * sizes if isinstance(value, int) else tuple(value) * (sizes if len(value) == 1 else 1)


def _padding(given: Mapping[str, Any], sizes: int) -> tuple[int, ...]:
    """Returns the padding on both sides of each size; "same" of odd kernels."""
    padding = given.get("padding", 0)
    if padding == "same":
        return tuple(size // 2 for size in given["weight"].shape[2:])
    return (0,) * sizes if padding == "valid" else _each(padding, sizes)


def _obstacle_of_conv(given: Mapping[str, Any], dilation: tuple[int, ...]) -> str:
    if given.get("groups", 1) != 1:
        return f"it has {given['groups']} groups"
    if any(size != 1 for size in dilation):
        return "it is dilated"
    if given.get("padding") == "same" and any(size % 2 == 0 for size in given["weight"].shape[2:]):
        return "its padding differs from side to side"
    return ""


class LayerFinder:
    """A handler that records the layers of one forward, in the order of their calls.

    Args:
        model: only products with its parameters and buffers are layers.
        moving: whether weights move in memory during the forward, as with offloading.
        flow: follows the forward.
    """

    def __init__(self, model: nn.Module, moving: bool = False, flow: DataFlow | None = None) -> None:
        self.found: dict[str, Layer] = {}
        self._input_groups = WeakIdKeyDictionary()
        self._model, self._moving, self._flow = model, moving, flow
        self._storages = self._found_storages()
        self._computed = {name: x for name, x in self._model.named_buffers() if _COMPUTED in name}
        self._calls: dict[tuple[Any, ...], str] = {}
        self._normed = WeakIdKeyDictionary()  # results of group norms, and `silu` of them
        self._normed_rows = WeakIdKeyDictionary()  # results of layer norms
        self._gelus = WeakIdKeyDictionary()  # `gelu` of a layer's output or of a part of it
        self._gated = WeakIdKeyDictionary()  # the other part times the gate
        self._written: dict[int, str] = {}  # the last layer that wrote a storage, by its address
        self._geglu: set[str] = set()

    def _found_storages(self) -> dict[int, list[tuple[str, Tensor]]]:
        """Returns the model's tensors with names, by address of their storage."""
        found: dict[int, list[tuple[str, Tensor]]] = {}
        for name, tensor in model_tensors(self._model).items():
            found.setdefault(tensor.untyped_storage().data_ptr(), []).append((name, tensor))
        return found

    def __call__(self, call: LayerCall) -> Tensor:
        output = call.exact()
        if self._moving:
            self._storages = self._found_storages()
        weight = self._reference(call.weight, call.name, "weight")
        if weight is not None and call.x.dim() > 0:
            if self._flow is not None:
                self._flow.name((LAYER, call.name), output)
            read = self._input_group(call)
            batch = len(call.timestep)
            places = output.numel() // max(1, output.shape[call.channel_axis])
            bias = None if call.bias is None else self._reference(call.bias, call.name, "bias")
            computed = "its bias is computed" if call.bias is not None and bias is None else ""
            if self._reference(call.x) is not None:  # merged weights, or learned tokens
                computed = "it reads a weight of the model, the same for all samples"
            first = self._calls.setdefault((read, weight, bias, call.stride, call.padding), call.name)
            if first != call.name:  # exporters merge equal nodes
                computed = f"it computes what {first} has computed"
            self.found[call.name] = Layer(
                call.name,
                call.kind,
                call.x.shape[call.channel_axis],
                call.weight.shape[0],
                max(1, places // batch),
                read if call.kind == "linear" else call.name,
                weight,
                bias,
                tuple(call.weight.shape[2:]),
                call.stride,
                call.padding,
                call.obstacle or computed or _obstacle(call, batch),
                normed=call.x in (self._normed_rows if call.kind == "linear" else self._normed),
                gated=call.x in self._gated,
                behind_gelu=call.x in self._gelus,
                behind_attention=self._flow is not None and self._flow.is_of_attention(call.x),
            )
            self._written[output.untyped_storage().data_ptr()] = call.name
        return output

    def norm_hooks(self) -> Hooks:
        """Returns hooks that record the outputs of norms, `silu` of group norms, and GEGLU."""

        def noted(function: Callable[..., Tensor], note: Callable[[Tensor, Tensor], None]) -> Hook:
            def hook(caller: Caller, args: tuple[Any, ...], named: dict[str, Any]) -> Tensor:
                result = function(*args, **named)
                (x,) = _taken(args, named, "input")
                note(x, result)
                return result

            return hook

        def of_silu(x: Tensor, result: Tensor) -> None:
            if x in self._normed:
                self._normed[result] = True

        def of_gelu(x: Tensor, result: Tensor) -> None:
            if (layer := self._written.get(x.untyped_storage().data_ptr())) is not None:
                self._gelus[result] = layer

        def of_product(function: Callable[..., Tensor]) -> Hook:
            def hook(caller: Caller, args: tuple[Any, ...], named: dict[str, Any]) -> Tensor:
                result = function(*args, **named)
                factors = [x for x in args if isinstance(x, Tensor)]
                for gate, other in (factors, factors[::-1]) if len(factors) == 2 else ():
                    layer = self._gelus.get(gate)
                    if layer is not None and self._written.get(other.untyped_storage().data_ptr()) == layer:
                        self._gated[result] = True
                        self._geglu.add(layer)
                return result

            return hook

        return {
            functional.group_norm: noted(functional.group_norm, lambda x, result: self._normed.update({result: True})),
            functional.silu: noted(functional.silu, of_silu),
            functional.layer_norm: noted(
                functional.layer_norm, lambda x, result: self._normed_rows.update({result: True})
            ),
            functional.gelu: noted(functional.gelu, of_gelu),
            **{function: of_product(function) for function in (torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__)},
        }

    def _input_group(self, call: LayerCall) -> str:
        """Returns the first layer that read the same tensor. A tensor changed in place is another one."""
        version = 0 if call.x.is_inference() else call.x._version
        versions: dict[int, str] = self._input_groups.setdefault(call.x, {})  # pyright: ignore[reportAssignmentType]
        return versions.setdefault(version, call.name)

    def _reference(self, tensor: Tensor, call: str = "", what: str = "") -> TensorRef | None:
        """Returns the reference to a tensor or view of the model, else None.

        Args:
            call, what: a layer's name, and "weight" or "bias": the tensor may be computed from weights, see `computed_name`.
        """
        shape, stride = tuple(tensor.shape), tuple(tensor.stride())
        for name, whole in self._storages.get(tensor.untyped_storage().data_ptr(), ()):
            offset = int(tensor.storage_offset()) - int(whole.storage_offset())
            if 0 <= offset < max(1, whole.numel()) and tensor.dtype == whole.dtype:
                return TensorRef(name, offset, shape, stride)
        name = computed_name(self._model, call, what) if call else ""
        kept = self._computed.get(name)
        if kept is None or kept.shape != tensor.shape or not torch.allclose(kept.to(tensor), tensor, 1e-4, 1e-6):
            return None
        return TensorRef(name, 0, shape, tuple(kept.stride()))

    def layers(self) -> list[Layer]:
        unused = () if self._flow is None else self._flow.unused
        beside = any(layer.kind == "conv" and layer.normed for layer in self.found.values())
        return [
            replace(
                layer,
                obstacle=layer.obstacle or (UNUSED if (LAYER, name) in unused else ""),
                geglu=name in self._geglu,
                beside_plugins=beside and layer.kind == "linear",
            )
            for name, layer in self.found.items()
        ]


_COMPUTED = "computed_for_trtconvert_"
"""Start of the names of buffers with computed weights."""


def computed_name(model: nn.Module, call: str, what: str) -> str:
    """Returns the name of the buffer that holds a weight or bias which a model computes from other weights in each call.

    Args:
        call: name of the layer, see `LayerCall`.
        what: "weight" or "bias".
    """
    path, _, number = call.partition("#")
    if path == "denoiser" and not hasattr(model, path):
        path = ""
    return f"{path}.{_COMPUTED}{what}{number}".removeprefix(".")


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Returns all parameters and buffers by name, including non-persistent ones."""
    return {name: x.detach() for name, x in (*model.named_parameters(), *model.named_buffers())}


def _obstacle(call: LayerCall, batch: int) -> str:
    if not call.x.is_floating_point():
        return f"it reads {str(call.x.dtype).removeprefix('torch.')}"
    if call.x.dim() < 2 or call.x.shape[0] % batch:  # samples have timesteps of their own
        return "the first axis of its input is not that of the samples or a multiple of it"
    if call.kind == "conv" and call.x.dim() != call.weight.dim():
        return "its images have no axis of samples"
    for what, channels, step in (
        ("input", call.x.shape[call.channel_axis], IN_STEP),
        ("output", call.weight.shape[0], OUT_STEP),
    ):
        if channels % step or channels > MOST_CHANNELS:
            return f"its {channels} {what} channels are not a multiple of {step} up to {MOST_CHANNELS:,}"
    return ""


def select_layers(
    layers: Sequence[Layer],
    include: Sequence[str],
    exclude: Sequence[str],
    min_rows: int,
    kinds: Collection[str] = ("linear", "conv"),
    few_rows: Literal["auto", "weight_only", "exact"] = "exact",
) -> tuple[list[Layer], list[Layer]]:
    """Splits layers into those to convert and the others, with the reason in `obstacle`.

    The first and the last layer of many rows (patchify and unpatchify, for example) stay unless a pattern other than `*` names
    them. Layers of few rows stay too, or get INT8 weights only.

    Args:
        min_rows: least rows per sample of layers with INT8 activations.
        few_rows: mode of layers with fewer rows, at least `FEWEST_WEIGHTS` weights, and no pattern other than `*`.
        kinds: of converted layers. Patterns other than `*` add other kinds.
    Raises:
        UserError: a pattern matches nothing, or `kinds` leaves no layer.
    """
    names = [layer.name for layer in layers]
    for pattern in [*include, *exclude]:
        if pattern != "*" and not any(fnmatchcase(name, pattern) for name in names):
            raise UserError(
                f"the layer pattern '{pattern}' matches no layer",
                expected="a pattern of one of: " + (", ".join(names) or "none: the model calls no linear layer"),
                got=f"'{pattern}'",
                remedy="correct layers.include or layers.exclude in the recipe",
            )
    chosen, left = [], []
    many = [layer.name for layer in layers if layer.rows > 1]
    ends = {many[0]: "it is the first layer", many[-1]: "it is the last layer"} if many else {}
    for layer in layers:
        named = any(fnmatchcase(layer.name, p) for p in include if p != "*")
        reason = layer.obstacle
        if not (named or "*" in include) or any(fnmatchcase(layer.name, p) for p in exclude):
            reason = "the recipe excludes it"
        elif not reason and not named and layer.kind not in kinds:
            reason = f"layers.kinds leaves {_KINDS[layer.kind]} out"
        elif not reason and not named and layer.name in ends:
            reason = f"{ends[layer.name]}; name it in layers.include to convert it"
        elif not reason and not named and layer.rows < min_rows:
            reason = f"it has {layer.rows} rows for each sample, layers.min_rows asks for {min_rows}"
            if few_rows != "exact" and layer.in_channels * layer.out_channels >= FEWEST_WEIGHTS:
                chosen.append(replace(layer, weight_only=True))
                continue
        if reason:
            left.append(replace(layer, obstacle=reason))
        else:
            chosen.append(layer)
    if not chosen and "linear" not in kinds:
        refuse_unfit_kinds(left, kinds)
    return with_input_groups_among(chosen), left


_KINDS = {"linear": "linear layers", "conv": "convolutions"}


def refuse_unfit_kinds(left: Sequence[Layer], kinds: Collection[str]) -> None:
    """Explains that `kinds` excludes all layers that could be converted.

    Args:
        left: all layers of a model, see `select_layers`; none is converted.
    Raises:
        UserError: only the kinds prevent a conversion.
    """
    others = {f"layers.kinds leaves {words} out" for words in _KINDS.values()}
    if left_out := [layer for layer in left if layer.obstacle in others]:
        asked = [layer for layer in left if layer.kind in kinds]
        named = " or ".join(_KINDS[kind] for kind in _KINDS if kind in kinds)
        found = several([f"{layer.name}: {layer.obstacle}" for layer in asked], 4)
        missing = dict.fromkeys(layer.kind for layer in left_out)
        every = ", ".join(kind for kind in _KINDS if kind in kinds or kind in missing)
        raise UserError(
            "layers.kinds leaves no layer that can be INT8",
            expected=f"{named} that can be, as layers.kinds names them",
            got=found or f"none among {len(left):,} layers, but {' and '.join(_KINDS[kind] for kind in missing)}",
            remedy=f"set layers.kinds to [{every}] in the recipe, or layers.modes to off",
        )


def with_input_groups_among(layers: Sequence[Layer]) -> list[Layer]:
    """Renames input groups after the first layer of each group among the given layers."""
    first: dict[str, str] = {}
    return [replace(layer, input_group=first.setdefault(layer.input_group, layer.name)) for layer in layers]


def flops(layer: Layer, batch: int) -> float:
    """Returns the operations of a call with a batch."""
    return 2.0 * batch * layer.rows * layer.out_channels * layer.in_channels * math.prod(layer.kernel)
