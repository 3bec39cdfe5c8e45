"""Linear layers and convolutions that quantise the deltas of their inputs between steps. The caller holds the caches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trtconvert.errors import UserError
from trtconvert.modiff import products
from trtconvert.modiff.reference import PRODUCT, ZERO, Geometry, Weight, quantiser, spread
from trtconvert.modiff.settings import CACHE_DTYPES, Settings
from trtconvert.modiff.weights import Grid, round_to_nearest, search_grid


class State(NamedTuple):
    """A layer's caches after a step.

    Attributes:
        a_hat: the quantised input: x's shape, of a convolution [B, H, W, C].
        o_hat: the output before it is rounded to x's type: [..., N], of a convolution [B, H', W', N].
    """

    a_hat: Tensor
    o_hat: Tensor


class ModulatedLayer(nn.Module):
    """Base of `ModulatedLinear` and `ModulatedConv2d`, which are made by their method `of`.

    Args:
        full: the layer in full precision, which is kept.
        codes: INT8 [N, K] or [N, KH, KW, C]; scale: [P, N] FP32; bias: [N] or None.
        widths: channels of each part of the input.
        table: [P, T + 1, 6] FP32 quantisers of T timestep bins, and of the first step.

    Attributes:
        codes, scale, table: as given. Scales stay FP32 in models of any type.
        quantises_weights, quantises_activations: see `Modulated.set_quant_state`.
        simulated: whether products are computed in x's type, for comparisons.
    """

    full: Any
    codes: Tensor
    scale: Tensor
    sums: Tensor
    table: Tensor
    bias: Tensor | None

    def __init__(
        self, full: nn.Module, codes: Tensor, scale: Tensor, widths: Sequence[int], table: Tensor, settings: Settings
    ) -> None:
        super().__init__()
        self.full = full
        self.settings, self.widths = settings, tuple(widths)
        self.register_buffer("codes", codes)
        self.register_buffer("scale", scale)
        parts = codes.flatten(1, -2).int().sum(1) if codes.dim() == 4 else codes.int()
        sums = torch.stack([part.sum(1) for part in parts.split(list(widths), 1)]).int()
        self.register_buffer("sums", sums, persistent=False)
        self.register_buffer("table", table)
        bias = full.bias
        self.register_buffer("bias", bias.detach().float() if isinstance(bias, Tensor) else None)
        self.quantises_weights = self.quantises_activations = True
        self.simulated = False

    @classmethod
    def of(
        cls,
        full: Any,
        settings: Settings | None = None,
        *,
        widths: Sequence[int] | None = None,
        grid: Grid | None = None,
        codes: Tensor | None = None,
        table: Tensor | None = None,
    ) -> Self:
        """Makes a modulated layer of one in full precision.

        Args:
            full: a `torch.nn.Linear`, or a `torch.nn.Conv2d` without groups and with zero padding.
            widths: channels of the parts of a concatenated input, each with scales of its own.
            grid, codes: of the weight [N, C, …], from a calibration; by default of least squared error.
            table: [P, T + 1, 6] quantisers of the input. Required unless scales are dynamic.
        Raises:
            UserError: the layer cannot be quantised, or the table is missing.
        """
        settings = settings or Settings(scales="dynamic")
        if reason := obstacle(full):
            raise UserError(
                "a layer cannot be modulated",
                expected="a linear layer, or a convolution of images without groups and with zero padding",
                got=reason,
                remedy="name the layer in Settings.exclude",
            )
        channels = full.weight.shape[1]
        widths = tuple(widths or (channels,))
        if sum(widths) != channels or min(widths) < 1:
            raise UserError(
                "the widths do not add up to the input's channels",
                expected=f"widths whose sum is {channels}",
                got=str(widths),
                remedy="give the channels of each tensor that is concatenated",
            )
        weight = full.weight.detach()
        if grid is None:
            by_channel = settings.weight_granularity == "channel"
            grid = search_grid(
                weight, widths, settings.weight_bits, symmetric=settings.weight_symmetric, by_channel=by_channel
            )
        if codes is None:
            codes = round_to_nearest(weight, grid, widths)
        if table is None:
            if settings.scales == "calibrated":
                raise UserError(
                    "a layer with calibrated scales has no calibration",
                    expected="quantisers of its input",
                    got="none",
                    remedy="calibrate the model (trtconvert.modiff.calibrate), or Settings(scales='dynamic')",
                )
            table = dynamic_table(len(widths), settings).to(weight.device)
        order = (0, 2, 3, 1) if codes.dim() == 4 else (0, 1)
        return cls(full, codes.permute(order).contiguous(), grid.scale.contiguous(), widths, table, settings)

    @property
    def weight(self) -> Tensor:
        """Returns Ŵ [N, C, …] in the full layer's type."""
        parts = self.codes.split(list(self.widths), -1)
        ones = [1] * (self.codes.dim() - 1)
        scaled = [part.float() * scale.view(-1, *ones) for part, scale in zip(parts, self.scale, strict=True)]
        found = torch.cat(scaled, -1)
        return (found.permute(0, 3, 1, 2) if found.dim() == 4 else found).to(self.full.weight.dtype)

    def rows_at(self, timestep_bin: Tensor | None, reset: Tensor | None, batch: int) -> Tensor:
        """Returns a copy of the quantisers [P, B, 6] of samples.

        Args:
            timestep_bin: [B] INT64. None: the first bin. reset: [B] bool. None: no sample.
        """
        index = torch.zeros(batch, dtype=torch.long, device=self.table.device) if timestep_bin is None else timestep_bin
        first = self.table.shape[1] - 1
        return self.table[:, index if reset is None else torch.where(reset, first, index)]

    def forward(
        self,
        x: Tensor,
        state: State | None = None,
        *,
        timestep_bin: Tensor | None = None,
        reset: Tensor | None = None,
        batch: int | None = None,
    ) -> tuple[Tensor, State | None]:
        """Computes a step. Changes nothing in place.

        Args:
            x: […, K], of a convolution [B, C, H, W]; any floating-point type.
            state: of the step before. None: the first step of all samples.
            timestep_bin: [B] bins of the table. None: the first.
            reset: [B] bool, samples in their first step; their caches are not read.
            batch: number of samples B if x has several rows per sample; by default x.shape[0].
        Returns:
            […, N] or [B, N, H', W'] in x's type, and the caches, None without modulation. If caches have x's type the output
            shares
            memory with them: do not write into it. NaN for samples with NaN or Inf in x or their caches.
        Raises:
            UserError: the caches have another shape.
        """
        count = x.shape[0] if batch is None else batch
        if not self.settings.modulation:
            return self.step(x, self.rows_at(timestep_bin, None, count), None), None
        if state is None:
            reset = torch.ones(count, dtype=torch.bool, device=x.device)
        rows = self.rows_at(timestep_bin, reset, count)
        if state is None:
            state = self.empty_state(x)
        else:
            self.require_fitting(x, state)
            state = State(state.a_hat.clone(), state.o_hat.clone())
        return self.step(x, rows, state), state

    def step(self, x: Tensor, rows: Tensor, state: State | None) -> Tensor:
        """Computes a step. Changes the caches and the last column of the quantisers in place.

        Args:
            rows: [P, B, 6], see `rows_at`. state: None without modulation.
        Returns:
            The output, see `forward`.
        """
        if not self.quantises_activations:
            weight = self.weight if self.quantises_weights else self.full.weight
            return self.product_in_full(x, weight.to(x.dtype))
        pixels = self.as_pixels(x)
        flat = pixels.reshape(-1, pixels.shape[-1])
        a_hat = None if state is None else state.a_hat.view(flat.shape)
        settings = self.settings
        if settings.scales == "dynamic":
            if settings.granularity == "token" and self.geometry == Geometry():
                rows = rows.repeat_interleave(len(flat) // rows.shape[1], 1)
            rows = products.measured(
                flat, a_hat, rows, self.widths, settings.granularity == "tensor", settings.symmetric
            )
        codes = products.quantise_delta(flat, a_hat, rows, self.widths)
        if self.simulated or not self.quantises_weights:
            return self._simulated(x, codes, rows, state)
        shape = self.output_shape(pixels)
        o_hat = None if state is None else state.o_hat.view(shape)
        shares = o_hat is not None and o_hat.dtype == x.dtype and settings.shared_outputs
        y = None if shares else torch.empty(shape, dtype=x.dtype, device=x.device)
        weight = Weight(self._kernel(), self.scale, self.sums, self.bias)
        codes = codes.view(pixels.shape)
        products.add_product(codes, rows, self.widths, weight, o_hat, y, self.geometry, not settings.symmetric)
        given = o_hat if y is None else y
        assert given is not None
        return self.as_outputs(given, x)

    def _kernel(self) -> Tensor:
        return self.codes if self.codes.dim() == 4 else self.codes[:, None, None]

    def _simulated(self, x: Tensor, codes: Tensor, rows: Tensor, state: State | None) -> Tensor:
        """Simulates the product of â and the weight in x's type."""
        if state is None:
            scale, zero = (spread(rows[..., i], codes.shape, self.widths) for i in (PRODUCT, ZERO))
            known = (codes.float() - zero) * scale
        else:
            known = state.a_hat.view(codes.shape).float()
        weight = self.weight if self.quantises_weights else self.full.weight
        as_x = self.from_pixels(known.to(x.dtype).view(self.as_pixels(x).shape), x)
        return self.product_in_full(as_x, weight.to(x.dtype))

    def empty_state(self, x: Tensor) -> State:
        """Returns new caches for inputs like x. A sample's caches are not read before its reset."""
        dtype = self.cache_dtype(x.dtype)
        pixels = self.as_pixels(x)
        shape = x.shape if self.codes.dim() == 2 else pixels.shape
        a_hat = torch.zeros(shape, dtype=dtype, device=x.device)
        outputs = (*x.shape[:-1], len(self.codes)) if self.codes.dim() == 2 else self.output_shape(pixels)
        return State(a_hat, torch.zeros(outputs, dtype=dtype, device=x.device))

    def cache_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Returns the type of caches for inputs of a type. BF16 has too few bits for sums over many steps."""
        named = self.settings.cache_dtype
        if named is not None:
            return CACHE_DTYPES[named]
        return torch.float16 if dtype == torch.float16 else torch.float32

    def require_fitting(self, x: Tensor, state: State, name: str = "a layer") -> None:
        """
        Raises:
            UserError: the caches belong to inputs of another shape, type or device.
        """
        wanted = self.empty_state(x.to("meta"))
        for what, cache, like in zip(State._fields, state, wanted, strict=True):
            if cache.shape != like.shape or cache.dtype != like.dtype or cache.device != x.device:
                raise UserError(
                    f"the cache {what} of {name} belongs to another input",
                    expected=f"{list(like.shape)} {like.dtype} on {x.device}",
                    got=f"{list(cache.shape)} {cache.dtype} on {cache.device}",
                    remedy="call reset_cache() before the first step of a batch, or of another size, type or device; for a "
                    "single layer, give state=None",
                )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        kept = {name: buffer for name, buffer in self._buffers.items() if buffer is not None}
        super()._apply(fn, recurse)
        for name, before in kept.items():
            moved = self._buffers[name]
            assert moved is not None
            if moved.dtype != before.dtype:
                self._buffers[name] = before.to(moved.device)
        return self

    # Overridden by both kinds.

    geometry: Geometry

    def as_pixels(self, x: Tensor) -> Tensor:
        """Returns x as contiguous [B, H, W, C]."""
        raise NotImplementedError

    def from_pixels(self, pixels: Tensor, x: Tensor) -> Tensor:
        """Inverts `as_pixels`, in x's shape."""
        raise NotImplementedError

    def output_shape(self, pixels: Tensor) -> tuple[int, int, int, int]:
        """Returns the shape [B, H', W', N] of the output."""
        height, width = self.geometry.output(*pixels.shape[1:3])
        return pixels.shape[0], height, width, len(self.codes)

    def as_outputs(self, o_hat: Tensor, x: Tensor) -> Tensor:
        """Returns [B, H', W', N] in the layer's layout, without a copy."""
        raise NotImplementedError

    def product_in_full(self, x: Tensor, weight: Tensor) -> Tensor:
        """Computes the layer with a weight of x's type."""
        raise NotImplementedError


class ModulatedLinear(ModulatedLayer):
    """A linear layer, see `ModulatedLayer`."""

    geometry = Geometry()

    def as_pixels(self, x: Tensor) -> Tensor:
        return x.contiguous().view(-1, 1, 1, x.shape[-1])

    def from_pixels(self, pixels: Tensor, x: Tensor) -> Tensor:
        return pixels.view(x.shape)

    def as_outputs(self, o_hat: Tensor, x: Tensor) -> Tensor:
        return o_hat.view(*x.shape[:-1], o_hat.shape[-1])

    def product_in_full(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x, weight, None if self.bias is None else self.bias.to(x.dtype))

    def extra_repr(self) -> str:
        return (
            f"{self.codes.shape[1]} to {len(self.codes)}, W{self.settings.weight_bits}A{self.settings.activation_bits}"
        )


class ModulatedConv2d(ModulatedLayer):
    """A convolution of images, see `ModulatedLayer`. Images and caches are channels-last in memory."""

    def __init__(self, full: Any, *given: Any) -> None:
        super().__init__(full, *given)
        self.geometry = Geometry(*(tuple(of) for of in (full.kernel_size, full.stride, full.padding, full.dilation)))

    def as_pixels(self, x: Tensor) -> Tensor:
        return x.contiguous(memory_format=torch.channels_last).permute(0, 2, 3, 1)

    def from_pixels(self, pixels: Tensor, x: Tensor) -> Tensor:
        return pixels.permute(0, 3, 1, 2)

    def as_outputs(self, o_hat: Tensor, x: Tensor) -> Tensor:
        return o_hat.permute(0, 3, 1, 2)

    def product_in_full(self, x: Tensor, weight: Tensor) -> Tensor:
        g = self.geometry
        return F.conv2d(
            x, weight, None if self.bias is None else self.bias.to(x.dtype), g.stride, g.padding, g.dilation
        )

    def extra_repr(self) -> str:
        return (
            f"{self.codes.shape[-1]} to {len(self.codes)}, kernel {self.geometry.kernel}, "
            f"W{self.settings.weight_bits}A{self.settings.activation_bits}"
        )


def obstacle(layer: nn.Module) -> str:
    """Returns why a layer cannot be quantised, "" if it can."""
    if isinstance(layer, nn.Linear):
        return ""
    if not isinstance(layer, nn.Conv2d) or isinstance(layer, nn.LazyConv2d):
        return f"a {type(layer).__name__}"
    if layer.groups != 1:
        return f"a convolution in {layer.groups} groups"
    if layer.padding_mode != "zeros" or isinstance(layer.padding, str):
        return f"a convolution with {layer.padding if isinstance(layer.padding, str) else layer.padding_mode} around images"
    return ""


def dynamic_table(parts: int, settings: Settings) -> Tensor:
    """Returns [P, 2, 6] quantisers whose scales are measured at run time."""
    one = torch.ones(parts)
    usual, first = (
        quantiser(-one, one, bits, settings.symmetric, reset)
        for bits, reset in ((settings.activation_bits, not settings.modulation), (first_bits(settings), True))
    )
    return torch.stack([usual, first], 1)


def first_bits(settings: Settings) -> int:
    """Returns the activation bits of the first step."""
    return settings.first_bits if settings.modulation else settings.activation_bits
