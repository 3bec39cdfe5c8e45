"""Attention of one long sequence on several GPUs: each process holds a part of the tokens."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trtconvert.attention.module import Int8Attention, Timestep
from trtconvert.errors import UserError

METHODS = ("ulysses", "ring")
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_SHOWN = 8
"""Timesteps that processes exchange one by one; of all timesteps they exchange a checksum."""


class SequenceParallelAttention(nn.Module):
    """`Int8Attention` over a process group; each rank holds consecutive tokens, in the order of the ranks.

    Methods of exchange:
    - "ulysses": all-to-all, so that each process has all tokens of some heads, and back (Jacobs et al., arXiv 2309.14509). The
      heads must be a multiple of the processes. The result equals that of one process exactly.
    - "ring": keys and values circulate while each process attends with its own queries; results are merged by their
      log-sum-exp (Liu et al., arXiv 2310.01889). Takes any number of heads, and overlaps communication and computation.

    For inference: exchanges carry no gradient.

    Args:
        attention: dense and without pruning; calibrated or not, but the same in every process. It moves with this module.
        method: "ulysses" or "ring".
        group: the processes; None: all.
        check_shapes: compare the shapes, types and timesteps of all processes in each call, by one exchange that synchronises
            with the device. Without the check a difference hangs, mixes tokens, or uses another step's scales and precision.
    Raises:
        UserError: there is no process group, or the attention or the method is not supported.
    """

    def __init__(
        self, attention: Int8Attention, method: str = "ulysses", group: Any = None, *, check_shapes: bool = True
    ) -> None:
        super().__init__()
        if method not in METHODS:
            raise _misfit("method", " or ".join(METHODS), repr(method), 'method="ulysses"')
        if not dist.is_initialized():
            raise _misfit(
                "the process group",
                "an initialised one",
                "none",
                'call torch.distributed.init_process_group("nccl") first, under torchrun',
            )
        if attention.attention_type != "dense" or attention.enable_pruning:
            raise _misfit(
                "attention", "dense attention without pruning", attention.extra_repr(), "leave these options out"
            )
        if method == "ring" and attention.softmax_eps:
            raise _misfit("softmax_eps", "0 in a ring", str(attention.softmax_eps), 'method="ulysses" takes it')
        self.processes, self.rank = dist.get_world_size(group), dist.get_rank(group)
        shared = [attention.num_heads, attention.num_kv_heads]
        if method == "ulysses" and any(count % self.processes for count in shared):
            raise _misfit(
                "the number of heads",
                f"a multiple of {self.processes} processes",
                f"{shared[0]} heads of queries, {shared[1]} of keys",
                'method="ring" takes any number',
            )
        self.attention, self.method, self.group, self.check_shapes = attention, method, group, check_shapes

    def forward(self, Q: Tensor, K: Tensor, V: Tensor, timestep: Timestep) -> Tensor:
        """Computes attention of this process's queries to the keys of all processes.

        Args:
            Q: [B, H, n, D], this process's queries; K, V: [B, Hkv, m, D]. The same shapes in every process.
            timestep: as in `Int8Attention.forward`, the same in every process; `check_shapes` verifies this.
        Returns:
            [B, H, n, D].
        Raises:
            UserError: tensors or the timestep do not fit the attention or those of other processes, or a tensor requires
                gradients. With `check_shapes` every process raises.
        """
        try:
            self.attention.check(Q, K, V)
            if torch.is_grad_enabled() and any(x.requires_grad for x in (Q, K, V)):
                raise _misfit(
                    "Q, K and V", "tensors without gradients", "requires_grad", "call it within torch.no_grad()"
                )
            steps, present = self.attention.timesteps(timestep, Q)
        except UserError:
            if self.check_shapes:  # the other processes wait for this exchange
                self._gather(torch.zeros(_ROW, dtype=torch.int64, device=Q.device))
            raise
        if self.check_shapes:
            self._compare(Q, K, steps)
        if self.method == "ring":
            return self._ring(Q, K, V, steps, present)
        q, k, v = (self._heads_of_all(x) for x in (Q, K, V))
        out = self.attention.attend(q, k, v, steps, present, part=(self.rank, self.processes))
        return self._tokens_of_all(out)

    def _heads_of_all(self, x: Tensor) -> Tensor:
        """[B, H, n, D] → [B, H / P, P · n, D]."""
        parts = torch.stack(x.chunk(self.processes, 1))
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=self.group)
        return torch.cat(received.unbind(), 2)

    def _tokens_of_all(self, x: Tensor) -> Tensor:
        """[B, H / P, P · n, D] → [B, H, n, D]."""
        parts = torch.stack(x.chunk(self.processes, 2))
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=self.group)
        return torch.cat(received.unbind(), 1)

    def _ring(self, Q: Tensor, K: Tensor, V: Tensor, steps: Tensor, present: Any) -> Tensor:
        here = torch.stack([K, V])
        ahead, behind = (
            dist.get_global_rank(self.group, (self.rank + step) % self.processes) if self.group is not None
            else (self.rank + step) % self.processes
            for step in (1, -1)
        )  # fmt: skip
        out, lse = torch.zeros_like(Q, dtype=torch.float32), None
        for turn in range(self.processes):
            moving, coming = [], torch.empty_like(here)
            if turn + 1 < self.processes:
                operations = [
                    dist.P2POp(dist.isend, here, ahead, self.group),
                    dist.P2POp(dist.irecv, coming, behind, self.group),
                ]
                moving = dist.batch_isend_irecv(operations)
            part, part_lse = self.attention.attend(Q, here[0], here[1], steps, present, return_lse=True)
            out, lse = merged(out, lse, part, part_lse)
            for work in moving:
                work.wait()
            here = coming
        return out.to(Q.dtype)

    def _compare(self, Q: Tensor, K: Tensor, steps: Tensor) -> None:
        """Raises a UserError in every process if shapes or timesteps [B] differ, or a process refused its arguments."""
        told = torch.tensor([1, *Q.shape, *K.shape, _DTYPES.index(Q.dtype)], dtype=torch.int64).to(Q.device)
        rows = self._gather(torch.cat([told, _told(steps)]))
        if refused := [rank for rank, row in enumerate(rows) if not row[0]]:
            raise _misfit(
                "the arguments of the processes",
                "valid tensors and a valid timestep in each process",
                f"invalid ones on rank {', '.join(map(str, refused))}",
                f"correct the arguments of rank {refused[0]}; that rank's error names them",
            )
        for rank, row in enumerate(rows):
            if row[:_SHAPES] != rows[0][:_SHAPES]:
                of_q, of_k = row[1:5], row[5:9]
                raise _misfit(
                    "the tokens of the processes",
                    f"the shapes of rank 0, Q {rows[0][1:5]} and K {rows[0][5:9]} in {_DTYPES[rows[0][9]]}",
                    f"Q {of_q} and K {of_k} in {_DTYPES[row[9]]} on rank {rank}",
                    "give each process the same number of tokens; pad or shorten the sequence",
                )
        if any(row != rows[0] for row in rows):
            given = [_shown(row, len(steps)) for row in rows]
            raise _misfit(
                "the timesteps of the processes",
                "the same timesteps in every process, for the same samples",
                "; ".join(f"{text} on rank {rank}" for rank, text in enumerate(given)),
                "give each process the timesteps of the same step of the sampler",
            )

    def _gather(self, own: Tensor) -> list[list[int]]:
        """[_ROW] INT64 of each process."""
        found = [torch.empty_like(own) for _ in range(self.processes)]
        dist.all_gather(found, own, group=self.group)
        return torch.stack(found).tolist()


_SHAPES = 10  # numbers of a row before the timesteps: 1 if the process refused nothing, shapes and a type
_ROW = _SHAPES + 1 + _SHOWN


def _told(steps: Tensor) -> Tensor:
    """[1 + _SHOWN] INT64 of timesteps [B] FP32: a sum of their bits, each times another odd number, and the first timesteps."""
    bits = (steps + 0.0).view(torch.int32).long()  # -0 becomes 0
    odd = torch.arange(1, 2 * len(bits), 2, device=bits.device)
    first = torch.nn.functional.pad(bits[:_SHOWN], (0, max(0, _SHOWN - len(bits))))
    return torch.cat([(bits * odd).sum()[None], first])


def _shown(row: Sequence[int], count: int) -> str:
    """Formats the timesteps of a row; count: of the batch."""
    bits = row[_SHAPES + 1 :][:count]
    numbers = ", ".join(f"{struct.unpack('<f', struct.pack('<i', number))[0]:.9g}" for number in bits)
    return f"[{numbers}]" if count <= _SHOWN else f"[{numbers}, …] with the sum {row[_SHAPES]} of all bits"


def merged(out: Tensor, lse: Tensor | None, part: Tensor, part_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merges attention to two disjoint sets of keys.

    Args:
        out: [B, H, N, D] FP32; lse: [B, H, N] FP32 natural logarithm of the sum of its weights; None: no keys yet.
        part, part_lse: the same for the other keys.
    """
    if lse is None:
        return part.float(), part_lse
    both = torch.logaddexp(lse, part_lse)
    return torch.lerp(out, part.float(), (part_lse - both).exp()[..., None]), both


def _misfit(what: str, expected: str, got: str, remedy: str) -> UserError:
    return UserError(f"sequence-parallel attention cannot take {what}", expected=expected, got=got, remedy=remedy)
