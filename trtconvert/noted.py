"""Notes of observers about the calls of a forward, in the order of the calls."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate, groupby, islice
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


@dataclass(frozen=True)
class Noted(Generic[Entry]):
    """The entry of a module in some calls.

    Attributes:
        places: of the calls among those of all modules, ascending.
        entry: its tensors have the calls as a first dimension; its plain values hold for all of the calls.
    """

    places: Sequence[int]
    entry: Entry


class Notes(Generic[Entry]):
    """Entries by the name of the called module. An entry is a dataclass of tensors, dicts of tensors and plain values.

    A forward that a CUDA graph replays runs no Python. The code that replays the forward takes the entries of the recorded
    forward by `cut`, and adds copies of the entries after each replay, see `PackedEntries`.
    """

    def __init__(self) -> None:
        self._items: deque[tuple[str, Entry] | _Replay] = deque()

    def __len__(self) -> int:
        return len(self._items)

    def add(self, name: str, entry: Entry) -> None:
        self._items.append((name, entry))

    def add_replay(self, packed: PackedEntries, numbers: list[Tensor]) -> None:
        """Adds the entries of a replay, see `PackedEntries.add_copies`."""
        self._items.append(_Replay(packed, numbers))

    def take(self) -> dict[str, list[Noted[Entry]]]:
        """Returns the entries since the last `take` by name, in the order of the calls."""
        found: dict[str, list[Noted[Entry]]] = {}
        items, self._items = self._items, deque()
        drained = (items.popleft() for _ in range(len(items)))  # frees the numbers of replays on the way
        place = 0
        for packed, group in groupby(drained, lambda item: item.packed if isinstance(item, _Replay) else None):
            if packed is None:
                for name, entry in group:  # type: ignore[misc]  # no replay is among them
                    alone = _with_tensors(entry, lambda x: x.unsqueeze(0))
                    found.setdefault(name, []).append(Noted(range(place, place + 1), alone))
                    place += 1
                continue
            for entries, calls in packed.entries_of(replay.numbers for replay in group):  # type: ignore[union-attr]
                for index, (name, entry) in enumerate(entries):
                    places = range(place + index, place + calls * len(entries), len(entries))
                    found.setdefault(name, []).append(Noted(places, entry))
                place += calls * len(entries)
        return found

    def cut(self, start: int) -> list[tuple[str, Entry]]:
        """Removes and returns the entries from place `start` on, none of which is a replay's."""
        return [self._items.pop() for _ in range(len(self._items) - start)][::-1]  # type: ignore[misc]


def _with_tensors(entry: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Returns an entry with changed tensors."""

    def changed(x: Any) -> Any:
        if isinstance(x, Tensor):
            return change(x)
        return {name: changed(y) for name, y in x.items()} if isinstance(x, dict) else x

    return replace(entry, **{name: changed(x) for name, x in vars(entry).items()})


_TOGETHER = 8
"""Replays whose numbers are joined at once, which takes as much memory again for a while."""


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

        names = [name for name, _ in entries]
        self._together = _TOGETHER if len({*names}) == len(names) else 1  # the calls of a name stay in order

    def add_copies(self, notes: Notes[Any]) -> None:
        """Adds the entries to notes, with copies of the numbers that the last replay left."""
        notes.add_replay(self, [packed.clone() for packed in self._packed.values()])

    def entries_of(self, replays: Iterable[list[Tensor]]) -> Iterator[tuple[list[tuple[str, Any]], int]]:
        """Joins replays, given the numbers that each left.

        Yields:
            The entries of some replays, as in `Noted`, and the number of these replays.
        """
        replays = iter(replays)
        while some := [*islice(replays, self._together)]:
            calls, joined = len(some), self._joined(some)
            some.clear()  # frees the copies
            yield [(name, _with_tensors(entry, lambda x, of=joined: of[id(x)])) for name, entry in self._entries], calls

    def _joined(self, replays: Sequence[list[Tensor]]) -> dict[int, Tensor]:
        """Returns each tensor of the entries, [calls, …], by its identity."""
        found: dict[int, Tensor] = {}
        for members, copies in zip(self._members.values(), zip(*replays, strict=True), strict=True):
            parts = torch.stack(copies).split([shape.numel() for shape in members.values()], 1)
            for (key, shape), part in zip(members.items(), parts, strict=True):
                found[key] = part.view(len(replays), *shape)
        return found


@dataclass(frozen=True)
class _Replay:
    """A replay of a recorded forward, and copies of the numbers that it left."""

    packed: PackedEntries
    numbers: list[Tensor]


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


def samples_of(seen: Sequence[Noted[Any]], tensor: Callable[[Any], Tensor]) -> Tensor:
    """Returns a tensor [B, …] of a module's entries over the samples of all calls; tensor: takes the tensor from an entry."""
    found = [tensor(noted.entry) for noted in seen]
    if len({x.shape[1:] for x in found}) > 1:  # calls with other numbers of samples
        return torch.cat([x.flatten(0, 1) for x in found])
    return torch.cat(found).flatten(0, 1)  # flattening the parts of a replay would copy them


def in_calls(seen: Sequence[Noted[Any]], number: Callable[[Any], int]) -> list[int]:
    """Returns a number of a module's entry for each call; number: takes the number from an entry."""
    return [number(noted.entry) for noted in seen for _ in noted.places]


def rows_of_groups(
    taken: Mapping[str, Sequence[Noted[Any]]],
    finite: Mapping[str, Tensor],
    groups: GroupsOfCalls,
    rows: Callable[[str, Sequence[Noted[Any]], Groups], _Rows],
    refusal: Callable[[str, int, float], Exception],
) -> dict[str, _Rows]:
    """Computes the rows of each name from its entries, or raises the refusal of the first call with NaN or Inf.

    Args:
        taken: see `Notes.take`; the entries have a `timestep` [B]; finite: [N] true for samples without NaN and Inf.
        rows: of a name, its entries and their groups; refusal: of a name, a sample's number and its timestep.
    """
    of_names = [samples_of(seen, lambda entry: entry.timestep) for seen in taken.values()]
    # All names share one transfer from the GPU, as every transfer synchronises.
    timesteps = torch.cat(of_names).cpu().split([len(x) for x in of_names]) if of_names else ()
    good = torch.stack([x.all() for x in finite.values()]).cpu() if finite else torch.ones(0)
    found: dict[str, _Rows] = {}
    damaged: list[tuple[int, Exception]] = []
    for (name, seen), timestep, is_good in zip(taken.items(), timesteps, good.tolist(), strict=True):
        sizes = in_calls(seen, lambda entry: entry.timestep.shape[1])
        if is_good:
            found[name] = rows(name, seen, groups(sizes, timestep))
        else:
            sample = int((~finite[name]).long().argmax())
            places = [place for noted in seen for place in noted.places]
            call = bisect_right([*accumulate(sizes)], sample)
            damaged.append((places[call], refusal(name, sample, timestep[sample].item())))
    if damaged:
        raise min(damaged, key=lambda item: item[0])[1]
    return found
