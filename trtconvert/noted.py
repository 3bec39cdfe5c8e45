"""Notes of observers about the calls of a forward, in the order of the calls."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate
from typing import Any, Generic, Self, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

Entry = TypeVar("Entry")


class TensorFields:
    """Base of dataclasses of tensors. `cat` and `select` need tensors with entries along dimension 0."""

    def tensors(self) -> dict[str, Tensor]:
        return {f.name: getattr(self, f.name) for f in fields(self)}  # type: ignore[arg-type]

    @classmethod
    def cat(cls, parts: Sequence[Self]) -> Self:
        """Concatenates the entries of the parts."""
        return cls(**{name: torch.cat([part.tensors()[name] for part in parts]) for name in parts[0].tensors()})

    def select(self, chosen: Tensor | slice) -> Self:
        """Returns some of the entries."""
        return type(self)(**{name: x[chosen] for name, x in self.tensors().items()})


class Notes(Generic[Entry]):
    """Entries by the name of the called module. An entry is a dataclass of tensors, dicts of tensors and plain values.

    A forward that a CUDA graph replays runs no Python. The code that replays the forward takes the entries of the recorded
    forward by `cut`, and adds copies of the entries after each replay, see `PackedEntries`.
    """

    def __init__(self) -> None:
        self._entries: list[tuple[str, Entry]] = []

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, name: str, entry: Entry) -> None:
        self._entries.append((name, entry))

    def take(self) -> dict[str, list[tuple[int, Entry]]]:
        """Returns the entries since the last `take` by name, each with its place among the entries of all names."""
        found: dict[str, list[tuple[int, Entry]]] = {}
        for place, (name, entry) in enumerate(self._entries):
            found.setdefault(name, []).append((place, entry))
        self._entries = []
        return found

    def cut(self, start: int) -> list[tuple[str, Entry]]:
        """Removes and returns the entries from place `start` on."""
        cut = self._entries[start:]
        del self._entries[start:]
        return cut


class PackedEntries:
    """Entries of a forward that a CUDA graph records. One tensor for each type and device holds all numbers of the entries, so
    that a replay is followed by few copies. Make it during the recording: the graph then fills these tensors.

    Args:
        entries: of the recorded forward.
    """

    def __init__(self, entries: Sequence[tuple[str, Any]]) -> None:
        self._entries = entries
        leaves = tree_leaves([vars(entry) for _, entry in entries])
        tensors = {id(x): x for x in leaves if isinstance(x, Tensor)}
        self._members: dict[tuple[torch.dtype, torch.device], dict[int, torch.Size]] = {}
        for key, x in tensors.items():
            self._members.setdefault((x.dtype, x.device), {})[key] = x.shape
        self._packed = {
            kind: torch.cat([tensors[key].reshape(-1) for key in members]) for kind, members in self._members.items()
        }

    def add_copies(self, notes: Notes[Any]) -> None:
        """Adds the entries to notes, with copies of the numbers that the last replay left."""
        copies: dict[int, Tensor] = {}
        for kind, members in self._members.items():
            parts = self._packed[kind].clone().split([shape.numel() for shape in members.values()])
            copies |= {key: part.view(shape) for (key, shape), part in zip(members.items(), parts, strict=True)}

        def copied(x: Any) -> Any:
            if isinstance(x, Tensor):
                return copies[id(x)]
            return {name: copied(y) for name, y in x.items()} if isinstance(x, dict) else x

        for name, entry in self._entries:
            notes.add(name, replace(entry, **{f.name: copied(getattr(entry, f.name)) for f in fields(entry)}))


@dataclass(frozen=True)
class Groups:
    """The samples of several calls, by call and timestep bin. All tensors are on the CPU.

    Attributes:
        call, bin: [G] of each group, ordered by call, then by bin.
        counts: [G] number of samples.
        order: [N] indices of the samples, group after group.
    """

    call: Tensor
    bin: Tensor
    counts: Tensor
    order: Tensor
    _orders: dict[torch.device, Tensor] = field(default_factory=dict, repr=False, compare=False)

    @staticmethod
    def of(sizes: Iterable[int], index: Tensor, bins: int) -> Groups:
        """Groups samples by call and timestep bin; sizes: samples of each call; index: [N] bin of each sample."""
        samples = torch.tensor(list(sizes))
        group = torch.repeat_interleave(torch.arange(len(samples)), samples) * bins + index
        groups, counts = group.unique(return_counts=True)
        return Groups(groups // bins, groups % bins, counts, group.argsort(stable=True))

    def on(self, device: torch.device) -> Tensor:
        """Returns the order on a device."""
        if device not in self._orders:
            self._orders[device] = self.order.to(device)
        return self._orders[device]

    def over(self, x: Tensor, reduce: Callable[[Tensor, int], Tensor]) -> Tensor:
        """Reduces the samples of each group, on x's device: [N, …] → [G, …]; reduce: such as torch.sum, of (tensor, dim)."""
        ordered, sizes = x.index_select(0, self.on(x.device)), self.counts.tolist()
        if len(set(sizes)) == 1:
            return reduce(ordered.unflatten(0, (len(sizes), sizes[0])), 1)
        return torch.stack([reduce(members, 0) for members in ordered.split(sizes)])


class GroupsOfCalls:
    """Groups of calls. Operations with the same calls share one computation of the groups."""

    def __init__(self, bin_of: Callable[[Tensor], Tensor], bins: int) -> None:
        self._bin_of, self._bins = bin_of, bins
        self._known: dict[tuple[tuple[int, ...], bytes], Groups] = {}

    def __call__(self, sizes: Iterable[int], timestep: Tensor) -> Groups:
        """Returns the groups of calls; sizes: samples of each call; timestep: [N] of each sample, on the CPU."""
        key = tuple(sizes), timestep.numpy().tobytes()
        if key not in self._known:
            self._known[key] = Groups.of(key[0], self._bin_of(timestep), self._bins)
        return self._known[key]


_Rows = TypeVar("_Rows")


def rows_of_groups(
    taken: Mapping[str, Sequence[tuple[int, Any]]],
    finite: Mapping[str, Tensor],
    groups: GroupsOfCalls,
    rows: Callable[[str, Sequence[Any], Groups], _Rows],
    refusal: Callable[[str, int, float], Exception],
) -> dict[str, _Rows]:
    """Computes the rows of each name from its entries, or raises the refusal of the first call with NaN or Inf.

    Args:
        taken: see `Notes.take`; the entries have a `timestep` [B]; finite: [N] true for samples without NaN and Inf.
        rows: of a name, its entries and their groups; refusal: of a name, a sample's number and its timestep.
    """
    of_names = [torch.cat([entry.timestep for _, entry in seen]) for seen in taken.values()]
    # All names share one transfer from the GPU, as every transfer synchronises.
    timesteps = torch.cat(of_names).cpu().split([len(x) for x in of_names]) if of_names else ()
    good = torch.stack([x.all() for x in finite.values()]).cpu() if finite else torch.ones(0)
    found: dict[str, _Rows] = {}
    damaged: list[tuple[int, Exception]] = []
    for (name, seen), timestep, is_good in zip(taken.items(), timesteps, good.tolist(), strict=True):
        sizes = [len(entry.timestep) for _, entry in seen]
        if is_good:
            found[name] = rows(name, [entry for _, entry in seen], groups(sizes, timestep))
        else:
            sample = int((~finite[name]).long().argmax())
            damaged.append(
                (seen[bisect_right([*accumulate(sizes)], sample)][0], refusal(name, sample, timestep[sample].item()))
            )
    if damaged:
        raise min(damaged, key=lambda item: item[0])[1]
    return found
