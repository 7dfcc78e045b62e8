"""Exchanges tensors and numbers between the ranks that compute one model.

On a CPU, and with `--deterministic`, sums add the ranks' parts in the order of the ranks, so that a row's sum does not
depend on the other rows of the step. Else NCCL adds them on GPUs. Called by the workers, from the thread that computes.
"""

import contextlib
import datetime
import os
import socket
import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from antiphon.services.engine.parallel.meeting import Meeting
from antiphon.services.engine.parallel.shard import ALONE, Shard
from antiphon.shared.distributed.machines import interface_of

_TIMEOUT = datetime.timedelta(minutes=5)
"""Maximum wait for another rank: longer than loading the slowest part of a large model."""
_LOOPBACK = "lo"
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Variables that select the network interface of gloo and NCCL. Values set by the user are not changed."""
_DESCRIPTORS = Path("/proc/self/fd")
Number = TypeVar("Number", np.int8, np.float64)


class Communicator:
    """Communication of one rank with the others: here, of a model that runs in one process."""

    shard: Shard = ALONE
    """This rank's part of the model."""
    local_rank = 0
    """Number of this rank on its machine, which is the number of its device."""
    local_size = 1
    """Number of ranks of this machine, which share its memory."""
    stage: "Communicator | None" = None
    """This communicator if there are several pipeline stages, for the decoder; None otherwise."""
    is_first = is_last = True
    """Whether this rank is in the first and in the last pipeline stage."""

    def all_sum(self, x: Tensor) -> Tensor:
        """Returns the sum of `x` over the ranks of this pipeline stage (all-reduce). May overwrite `x`."""
        return x

    def smallest(self, number: int) -> int:
        """Returns the minimum of `number` over all ranks."""
        return number

    def smallest_of_each(self, numbers: NDArray[Number]) -> NDArray[Number]:
        """Returns the minimum of each element over all ranks."""
        return numbers

    def receive(self, num_tokens: int, like: Tensor) -> Tensor:
        """Returns hidden states [num_tokens, hidden] from the previous stage.

        `like` has their width, data type and device.
        """
        raise AssertionError("there is no other stage")

    def send(self, hidden: Tensor) -> None:
        """Sends hidden states to the next stage without waiting for it. `hidden` must not be changed afterwards."""
        raise AssertionError("there is no other stage")

    def from_last(self, hidden: Tensor) -> Tensor:
        """Returns the last stage's tensor on every stage.

        The other stages pass a tensor of the same shape, and wait.
        """
        return hidden


ALONE_RANK = Communicator()


class TorchCommunicator(Communicator):
    """A communicator over torch.distributed: gloo between CPUs, NCCL between GPUs.

    A GPU has two communicators of NCCL: that of its stage, for sums, and that of all ranks, for hidden states on their
    way to the next stage. Their operations have one order on each rank, in which no ranks can wait for each other even
    if a GPU carries them out one by one (ADR 101): what a plan sends has arrived before an operation of the next plan
    begins. The way back from the last stage would break that order: it goes through host memory, over gloo.
    """

    def __init__(self, shard: Shard, meeting: Meeting, device: torch.device, *, in_order: bool) -> None:
        """Waits until all ranks have joined. A meeting file must not exist before. Raises RuntimeError.

        `device`: where this rank computes. `in_order`: GPUs add in the order of the ranks too.
        """
        self.shard, self._in_order = shard, in_order or device.type == "cpu"
        self.local_rank, self.local_size = meeting.local_rank, meeting.local_size
        self._on_device = device.type != "cpu"
        earlier = _sockets()
        with _interface(meeting):
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if self._on_device else "gloo",
                store=_store(meeting, shard.size),
                rank=shard.rank,
                world_size=shard.size,
                timeout=_TIMEOUT,
                device_id=device if self._on_device else None,
            )
            self._all = cast(dist.ProcessGroup, dist.group.WORLD)
            # Every rank must create all groups, in the same order.
            stages = [_group(range(s * shard.tp_size, (s + 1) * shard.tp_size)) for s in range(shard.pp_size)]
            columns = [_group(range(t, shard.size, shard.tp_size), backend="gloo") for t in range(shard.tp_size)]
            self._stage, self._column = stages[shard.pp_rank], columns[shard.tp_rank]
            # NCCL connects a group, and reads the variables of the interface, in its first operation.
            for group, where in ((self._all, device), (self._stage, device), (self._column, "cpu")):
                dist.all_reduce(torch.zeros(1, device=where), group=group)
        self._sent: deque[tuple[dist.Work, Tensor]] = deque()
        """Tensors that are being sent to other stages."""
        self._connections = _sockets() - earlier
        self.is_first, self.is_last = shard.pp_rank == 0, shard.pp_rank == shard.pp_size - 1
        self.stage = self if shard.pp_size > 1 else None
        self._last = (shard.pp_size - 1) * shard.tp_size + shard.tp_rank

    def all_sum(self, x: Tensor) -> Tensor:
        """See `Communicator`."""
        if self.shard.tp_size == 1:
            return x
        self._in_turn()
        if not self._in_order:
            dist.all_reduce(x, group=self._stage)
            return x
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.shard.tp_size)]
        dist.all_gather(parts, x, group=self._stage)
        total = parts[0].to(torch.float32, copy=True)
        for part in parts[1:]:
            total += part
        return total.to(x.dtype)

    def smallest(self, number: int) -> int:
        """See `Communicator`."""
        box = torch.tensor([number])
        dist.all_reduce(box, op=dist.ReduceOp.MIN, group=self._all)
        return int(box.item())

    def smallest_of_each(self, numbers: NDArray[Number]) -> NDArray[Number]:
        """See `Communicator`."""
        box = torch.from_numpy(numbers.copy())
        dist.all_reduce(box, op=dist.ReduceOp.MIN, group=self._all)
        return box.numpy()

    def receive(self, num_tokens: int, like: Tensor) -> Tensor:
        """See `Communicator`."""
        self._in_turn()
        hidden = torch.empty((num_tokens, like.shape[1]), dtype=like.dtype, device=like.device)
        dist.recv(hidden, self.shard.rank - self.shard.tp_size, group=self._all)
        return hidden

    def send(self, hidden: Tensor) -> None:
        """See `Communicator`."""
        self._in_turn()
        hidden = hidden.contiguous()
        self._keep(dist.isend(hidden, self.shard.rank + self.shard.tp_size, group=self._all), hidden)

    def from_last(self, hidden: Tensor) -> Tensor:
        """See `Communicator`. On a GPU, the last stage waits until it has computed `hidden`."""
        if self.shard.pp_size == 1:
            return hidden
        # Pinned, because a copy from other memory would wait for all that this stage has queued.
        shared = (
            hidden.contiguous().cpu()
            if self.is_last
            else torch.empty(hidden.shape, dtype=hidden.dtype, pin_memory=hidden.is_cuda)
        )
        work = dist.broadcast(shared, self._last, group=self._column, async_op=True)
        if self.is_last:
            self._keep(work, shared)
            return hidden
        assert work is not None
        work.wait()
        return shared.to(hidden.device, non_blocking=True)

    def _keep(self, work: dist.Work | None, sent: Tensor) -> None:
        """Keeps a tensor until it has been sent.

        If there are more of them than plans in flight, the oldest has arrived and is dropped.
        """
        assert work is not None
        self._sent.append((work, sent))
        while len(self._sent) > self.shard.pp_size:
            self._sent.popleft()[0].wait()

    def _in_turn(self) -> None:
        """On a GPU, lets the device, not this thread, wait until what it sends has arrived (see the class)."""
        while self._on_device and not self.is_last and self._sent:
            self._sent.popleft()[0].wait()

    def hang_up(self) -> None:
        """Ends the connections to all other ranks: an operation that waits for one of them raises RuntimeError.

        Used if a rank's machine no longer answers, which the operations would notice only after minutes, and those of a
        captured graph never. On a GPU their kernels end, with wrong results. May be called from any thread.
        """
        for group in (self._all, self._stage) if self._on_device else ():
            # Each returns when its kernels have ended, which may be queued behind those of the other group.
            threading.Thread(target=group.abort, name="abort", daemon=True).start()
        for descriptor, _ in self._connections & _sockets():
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
                connection.getpeername()  # gloo ends the process if its listening socket is shut down
                connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Leaves the group of ranks."""
        dist.destroy_process_group()


def _group(ranks: range, **options: Any) -> dist.ProcessGroup:
    # Ranks outside of the group get a placeholder, which they never use.
    return cast(dist.ProcessGroup, dist.new_group(list(ranks), **options))


def _store(meeting: Meeting, size: int) -> dist.Store:  # pyright: ignore[reportPrivateImportUsage]
    """Returns the torch.distributed store through which ranks exchange their addresses."""
    if meeting.path:
        return dist.FileStore(meeting.path, size)  # pyright: ignore[reportPrivateImportUsage]
    listener = meeting.listener if meeting.listener >= 0 else None
    return dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
        meeting.host,
        meeting.port,
        size,
        is_master=listener is not None,
        timeout=_TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=listener,
    )


@contextlib.contextmanager
def _interface(meeting: Meeting) -> Iterator[None]:
    """Selects the network interface with this machine's address, or the loopback device on a single machine."""
    name = interface_of(meeting.address) if meeting.address else _LOOPBACK
    chosen = [variable for variable in _INTERFACES if variable not in os.environ]
    os.environ.update(dict.fromkeys(chosen, name))
    try:
        yield
    finally:
        for variable in chosen:
            del os.environ[variable]


def _sockets() -> set[tuple[int, str]]:
    """Returns the open sockets of this process: descriptor and `socket:[inode]`. Inodes are not reused."""
    found: set[tuple[int, str]] = set()
    for path in _DESCRIPTORS.iterdir():
        with contextlib.suppress(OSError):
            name = str(path.readlink())
            if name.startswith("socket:"):
                found.add((int(path.name), name))
    return found
