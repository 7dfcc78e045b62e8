"""torch.distributed between threads, which records what each rank exchanges and in which order.

`RecordedExchanges` has the functions of torch.distributed that `TorchCommunicator` calls; ranks are as on GPUs, with
NCCL for groups without a backend of their own. What an exchange on a device carries is on CPU tensors all the same.
"""

import threading
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Exchange:
    """An operation among ranks. `number` counts those of a kind in a group among the same ranks."""

    group: str
    kind: str
    ranks: tuple[int, ...]
    number: int


@dataclass(slots=True)
class Entry:
    """An exchange of a rank, on its device or on its thread, and how many it had begun before on each of the two."""

    exchange: Exchange
    on_device: bool
    num_before: dict[bool, int]


@dataclass(slots=True)
class Group:
    """A group as one rank sees it."""

    rank: int
    ranks: tuple[int, ...]
    on_device: bool
    name: str


class Sending:
    """A `Work`; `sent` has the ranks whose devices do not wait yet for what they send."""

    def __init__(self, rank: int, sent: Counter[int]) -> None:
        self._rank, self._sent = rank, sent

    def wait(self) -> None:
        """See torch.distributed."""
        self._sent[self._rank] -= 1


@dataclass
class RecordedExchanges:
    """See the module. `entries`: the exchanges of each rank, in the order in which it began them."""

    entries: dict[int, list[Entry]] = field(default_factory=lambda: defaultdict[int, list[Entry]](list))
    ReduceOp = torch.distributed.ReduceOp
    ProcessGroup = torch.distributed.ProcessGroup

    def __post_init__(self) -> None:
        self._here, self._size, self.group = threading.local(), 0, self
        self._counts: dict[int, Counter[object]] = defaultdict(Counter)
        self._pipes: dict[object, SimpleQueue[Tensor]] = defaultdict(SimpleQueue)
        self._sent, self._lock = Counter[int](), threading.Lock()

    # --- groups -------------------------------------------------------------------------------------------------------

    def FileStore(self, *_: object) -> None:
        """See torch.distributed."""

    def init_process_group(self, _backend: str, *, rank: int, world_size: int, **_: Any) -> None:
        """See torch.distributed. Called for each rank on a thread of its own, on which its groups are made too."""
        self._here.rank, self._here.num_groups, self._size = rank, 0, world_size

    @property
    def WORLD(self) -> Group:
        """See torch.distributed."""
        return Group(self._here.rank, tuple(range(self._size)), True, "all")

    def new_group(self, ranks: list[int], backend: str = "") -> Group:
        """See torch.distributed."""
        self._here.num_groups += 1
        return Group(self._here.rank, tuple(ranks), backend != "gloo", f"group {self._here.num_groups}")

    # --- exchanges ----------------------------------------------------------------------------------------------------

    def all_reduce(self, _tensor: Tensor, *, group: Group, op: object = None) -> None:
        """See torch.distributed; nothing is added. With `op`, the tensor is the host's."""
        self._record(group, "all_reduce", group.ranks, on_device=group.on_device and op is None)

    def all_gather(self, parts: list[Tensor], tensor: Tensor, *, group: Group) -> None:
        """See torch.distributed; every part is this rank's."""
        self._record(group, "all_gather", group.ranks, on_device=group.on_device)
        for part in parts:
            part.copy_(tensor)

    def isend(self, tensor: Tensor, dst: int, *, group: Group) -> Sending:
        """See torch.distributed."""
        exchange = self._record(group, "send", (group.rank, dst), on_device=group.on_device)
        self._pipe(exchange).put(tensor.clone())
        self._sent[group.rank] += 1
        return Sending(group.rank, self._sent)

    def recv(self, tensor: Tensor, src: int, *, group: Group) -> None:
        """See torch.distributed."""
        exchange = self._record(group, "send", (src, group.rank), on_device=group.on_device)
        tensor.copy_(self._pipe(exchange).get(timeout=TIMEOUT_S))

    def broadcast(self, tensor: Tensor, src: int, *, group: Group, async_op: bool) -> Sending:
        """See torch.distributed."""
        assert async_op
        exchange = self._record(group, "broadcast", group.ranks, on_device=group.on_device)
        if group.rank == src:
            for rank in group.ranks:
                self._pipe((exchange, rank)).put(tensor.clone())
        else:
            tensor.copy_(self._pipe((exchange, group.rank)).get(timeout=TIMEOUT_S))
        return Sending(group.rank, Counter())

    def _pipe(self, key: object) -> "SimpleQueue[Tensor]":
        with self._lock:
            return self._pipes[key]

    def _record(self, group: Group, kind: str, ranks: tuple[int, ...], *, on_device: bool) -> Exchange:
        assert not (on_device and self._sent[group.rank]), "the device may begin this before what it sends has arrived"
        key = (group.name, kind, ranks)
        exchange = Exchange(*key, self._counts[group.rank][key])
        self._counts[group.rank][key] += 1
        before = Counter(entry.on_device for entry in self.entries[group.rank])
        self.entries[group.rank].append(Entry(exchange, on_device, {side: before[side] for side in (False, True)}))
        return exchange


def left_over(entries: dict[int, list[Entry]]) -> list[Exchange]:
    """Carries out all exchanges and returns those that wait for each other at the end; none if all can be carried out.

    Devices and threads carry out theirs one by one. An exchange begins when all its ranks have come to it, and a device
    comes to none that its thread has not queued. A thread waits for all that it has queued before each of its own
    exchanges, except for the last one that it has queued if that sends: the device's kernels do not wait for it yet.
    """
    sides = {
        (rank, side): [entry for entry in entries[rank] if entry.on_device == side]
        for rank in entries
        for side in (False, True)
    }
    done: Counter[tuple[int, bool]] = Counter()

    def comes(rank: int, side: bool, entry: Entry) -> bool:
        before = entry.num_before[not side]
        if not side and before:
            last = sides[rank, True][before - 1].exchange
            before -= last.kind == "send" and last.ranks[0] == rank
        return done[rank, not side] >= before

    while True:
        nexts = {key: own[done[key]] for key, own in sides.items() if done[key] < len(own)}
        there = Counter(entry.exchange for (rank, side), entry in nexts.items() if comes(rank, side, entry))
        complete = {exchange for exchange, count in there.items() if count == len(set(exchange.ranks))}
        if not complete:
            return [entry.exchange for entry in nexts.values()]
        for key, entry in nexts.items():
            done[key] += entry.exchange in complete
