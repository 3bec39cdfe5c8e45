"""Arithmetic of adapters: the difference that a layer of a LoRA file adds to a weight, before alpha / rank.

| kind | difference | source |
| --- | --- | --- |
| LoRA | up · down; up_b of a bias | Hu et al. 2021, arXiv 2106.09685 |
| LoHa | (w1_a · w1_b) ⊙ (w2_a · w2_b) | Hyeon-Woo et al. 2021, arXiv 2108.06098 |
| LoKr | w1 ⊗ w2, each a matrix or a product _a · _b | Yeh et al. 2023, arXiv 2309.14859 |
| difference | itself, of a weight (diff) or a bias (diff_b) | |

DoRA (Liu et al. 2024, arXiv 2402.09353) scales the sum W' of a weight and a difference: each row, or column, gets a length m. At
a scale s, W' is multiplied by 1 + s·(m / ‖W'‖ - 1), as lycoris does. peft has m / ‖W'‖ at any scale. W has the differences of
the files before, so that the order of files counts. peft takes ‖W'‖ without those.

A tensor with the kernel may stand between two factors of a convolution: mid, hada_t1, hada_t2, lokr_t2 (Tucker decomposition).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

MAGNITUDES = "dora"
"""DoRA's lengths among the tensors of a layer: [rows] or [rows, 1, …] of rows, [1, columns, …] of columns."""

_LOHA = {"hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b"}

PARTS = {"down", "up", "up_b", "mid", "diff", "diff_b", "hada_t1", "hada_t2", "lokr_t2", MAGNITUDES} | _LOHA
PARTS |= {f"lokr_w{side}{end}" for side in "12" for end in ("", "_a", "_b")}
"""Names of the tensors of a layer, whatever the file's layout calls them."""


def kind_of(part: str) -> str:
    """The kind of adapter that a tensor of a layer is of: "lora", "hada", "lokr", or "diff" for differences."""
    kind = part.partition("_")[0]
    return "lora" if kind in ("down", "up", "mid") else kind


def missing_parts(have: Collection[str]) -> set[str]:
    """The tensors that a layer lacks of those that it needs. A layer without tensors is taken for a LoRA."""
    kinds = {kind_of(part) for part in have}
    needed = set[str]()
    if "lora" in kinds or not have:
        needed |= {"down", "up"}
    if "hada" in kinds:
        needed |= _LOHA | ({"hada_t1", "hada_t2"} if {"hada_t1", "hada_t2"} & {*have} else set())
    if "lokr" in kinds:
        for side in ("lokr_w1", "lokr_w2"):
            needed |= set() if side in have else {f"{side}_a", f"{side}_b"}
    return needed - {*have}


def rank_of(parts: Mapping[str, Tensor]) -> int | None:
    """The rank that alpha is divided by; None for differences, and for a LoKr of two whole matrices."""
    # The second factor's comes first, as in lycoris and diffusers.
    return next((len(parts[name]) for name in ("down", "hada_w1_b", "lokr_w2_b", "lokr_w1_b") if name in parts), None)


def difference(parts: Mapping[str, Tensor]) -> Tensor:
    """What a layer adds to a weight at alpha = rank, [rows, …], for `reshape`: a kernel may be flattened into the columns.

    Args:
        parts: tensors of one kind and of one type, by `PARTS`.
    Raises:
        RuntimeError: their shapes do not fit each other.
    """
    if "up" in parts:
        up, down = _matrix(parts["up"]), parts["down"]
        if "mid" in parts:
            return torch.einsum("om...,mi->oi...", torch.tensordot(up, parts["mid"], 1), _matrix(down))
        return (up @ _matrix(down)).unflatten(1, down.shape[1:])
    if "hada_w1_a" in parts:
        return _factor(parts, "hada_w1", "hada_t1") * _factor(parts, "hada_w2", "hada_t2")
    if "lokr_w1" in parts or "lokr_w1_a" in parts:
        first, second = _factor(parts, "lokr_w1"), _factor(parts, "lokr_w2", "lokr_t2")
        return torch.kron(first.reshape(*first.shape, *[1] * (second.dim() - first.dim())), second.contiguous())
    return parts["diff"]


def of_columns(magnitudes: Tensor, rows: int) -> bool:
    """Return whether DoRA's lengths are those of columns. One number is the length of the row where a weight has one row."""
    return magnitudes.dim() > 1 and len(magnitudes) == 1 and (rows > 1 or magnitudes.numel() > 1)


def _matrix(x: Tensor) -> Tensor:
    return x.flatten(1)


def _factor(parts: Mapping[str, Tensor], name: str, kernel: str = "") -> Tensor:
    """One factor of a LoHa or LoKr: itself, or the product of its two matrices."""
    if name in parts:
        return parts[name]
    a, b = parts[f"{name}_a"], parts[f"{name}_b"]
    return torch.einsum("ij...,ip,jr->pr...", parts[kernel], a, b) if kernel in parts else a @ b


@dataclass(frozen=True)
class Update:
    """What a LoRA file adds to a weight, at a scale of 1.

    Attributes:
        weight: its name in the state dict; shape: of the weight.
        factor: alpha / rank.
        parts: see `difference`.
        rows: of the difference, those that belong to the weight, in this order: a layer of the file may be several of the model.
    """

    weight: str
    shape: tuple[int, ...]
    factor: float
    parts: Mapping[str, Tensor]
    rows: tuple[slice, ...] = (slice(None),)

    @property
    def tensors(self) -> list[Tensor]:
        return list(self.parts.values())

    def of(self, tensors: Iterator[Tensor]) -> Update:
        """The same update with the next tensors in place of its own, as on another device."""
        return replace(self, parts={name: next(tensors) for name in self.parts})

    def add_to(self, weight: Tensor, scale: float) -> None:
        """Add the difference, multiplied by a scale, to a weight in place.

        Args:
            weight: FP32 of `shape`, contiguous, or a matrix that lies transposed.
        """
        parts = {name: x.to(weight.device, torch.float32) for name, x in self.parts.items()}
        magnitudes = parts.pop(MAGNITUDES, None)
        # The smaller factor is scaled, and not the product.
        first = next(name for name in ("up", "hada_w1_a", "lokr_w1", "lokr_w1_a", "diff") if name in parts)
        parts[first] = parts[first] * (scale * self.factor)
        matrix = weight if weight.dim() == 2 else weight.view(len(weight), -1)
        # cuBLAS misreads the strides of a row that lies transposed.
        if parts.keys() == {"up", "down"} and 1 not in matrix.shape:
            matrix.addmm_(_rows(_matrix(parts["up"]), self.rows), _matrix(parts["down"]))
        else:
            weight += _rows(difference(parts), self.rows).reshape(self.shape)
        if magnitudes is not None:
            self._scale(weight, magnitudes, scale)

    def _scale(self, weight: Tensor, magnitudes: Tensor, scale: float) -> None:
        """Give the rows or columns of a weight their lengths by DoRA, in place."""
        if of_columns(magnitudes, len(weight)):
            lengths, wanted, shape = weight.transpose(0, 1).flatten(1).norm(dim=1), magnitudes, (1, -1)
        else:
            lengths, wanted, shape = weight.flatten(1).norm(dim=1), _rows(magnitudes, self.rows), (-1,)
        # A row of zeros stays so, and the squares of a row near zero underflow.
        factors = 1 + scale * (wanted.flatten() / lengths.clamp_min(torch.finfo(torch.float32).eps) - 1)
        weight *= factors.reshape(*shape, *[1] * (weight.dim() - len(shape)))


def _rows(x: Tensor, rows: Sequence[slice]) -> Tensor:
    return x[rows[0]] if len(rows) == 1 else torch.cat([x[part] for part in rows])
