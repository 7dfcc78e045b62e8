"""Exchanges tensors and numbers between the ranks that compute one model.

On a CPU, sums add the ranks' parts in the order of the ranks, so that a row's sum does not depend on the other rows of
the step. On GPUs NCCL adds them. Called by the workers, from the thread that computes.
"""

import datetime
import os
from pathlib import Path
from typing import Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor

from services.engine.parallel.shard import ALONE, Shard

_TIMEOUT = datetime.timedelta(minutes=5)
"""Longest wait for another rank: longer than loading the slowest part of a large model."""
_LOOPBACK = "lo"


class Communicator(Protocol):
    """What a rank knows of the others."""

    @property
    def shard(self) -> Shard:
        """This rank's part of the model."""
        ...

    def all_sum(self, x: Tensor) -> Tensor:
        """Returns the sum of the tensors that the ranks of this pipeline stage pass. May overwrite `x`."""
        ...

    @property
    def stage(self) -> "Communicator | None":
        """This communicator if there are several pipeline stages, for the decoder; None otherwise."""
        ...

    @property
    def is_first(self) -> bool:
        """Whether this rank is in the first pipeline stage."""
        ...

    @property
    def is_last(self) -> bool:
        """Whether this rank is in the last pipeline stage."""
        ...

    def smallest(self, number: int) -> int:
        """Returns the smallest of the numbers that all ranks pass."""
        ...

    def receive(self, num_tokens: int, like: Tensor) -> Tensor:
        """Returns hidden states [num_tokens, hidden] from the stage before. `like` has the width, type and device."""
        ...

    def send(self, hidden: Tensor) -> None:
        """Sends hidden states to the stage behind this one."""
        ...

    def from_last(self, hidden: Tensor) -> Tensor:
        """Returns the last stage's tensor on every stage. The others pass one of the same shape."""
        ...


class Alone:
    """The communicator of a model that one process computes. Pipeline stages do not exist."""

    shard = ALONE
    stage = None
    is_first = is_last = True

    def all_sum(self, x: Tensor) -> Tensor:
        """See `Communicator`."""
        return x

    def smallest(self, number: int) -> int:
        """See `Communicator`."""
        return number

    def receive(self, num_tokens: int, like: Tensor) -> Tensor:
        """See `Communicator`."""
        raise AssertionError("there is no other stage")

    def send(self, hidden: Tensor) -> None:
        """See `Communicator`."""
        raise AssertionError("there is no other stage")

    def from_last(self, hidden: Tensor) -> Tensor:
        """See `Communicator`."""
        return hidden


ALONE_RANK = Alone()


class TorchCommunicator:
    """A communicator over torch.distributed: gloo between CPUs, NCCL between GPUs."""

    def __init__(self, shard: Shard, meeting_file: Path, on_gpu: bool) -> None:
        """Waits until all ranks are there. They meet over `meeting_file`, which must not exist before."""
        self.shard, self._on_gpu = shard, on_gpu
        # Ranks of one machine: the loopback device needs no name service. A user's own choice stays.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", _LOOPBACK)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
            init_method=f"file://{meeting_file}",
            rank=shard.rank,
            world_size=shard.size,
            timeout=_TIMEOUT,
        )
        # Every rank makes all groups, in the same order.
        stages = [self._group(range(s * shard.tp_size, (s + 1) * shard.tp_size)) for s in range(shard.pp_size)]
        columns = [self._group(range(t, shard.size, shard.tp_size)) for t in range(shard.tp_size)]
        self._stage, self._column = stages[shard.pp_rank], columns[shard.tp_rank]
        self.is_first, self.is_last = shard.pp_rank == 0, shard.pp_rank == shard.pp_size - 1
        self.stage = self if shard.pp_size > 1 else None
        self._last = (shard.pp_size - 1) * shard.tp_size + shard.tp_rank

    def all_sum(self, x: Tensor) -> Tensor:
        """See `Communicator`."""
        if self.shard.tp_size == 1:
            return x
        if self._on_gpu:
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
        dist.all_reduce(box, op=dist.ReduceOp.MIN)
        return int(box.item())

    def receive(self, num_tokens: int, like: Tensor) -> Tensor:
        """See `Communicator`."""
        hidden = torch.empty((num_tokens, like.shape[1]), dtype=like.dtype, device=like.device)
        dist.recv(hidden, self.shard.rank - self.shard.tp_size)
        return hidden

    def send(self, hidden: Tensor) -> None:
        """See `Communicator`."""
        dist.send(hidden.contiguous(), self.shard.rank + self.shard.tp_size)

    def from_last(self, hidden: Tensor) -> Tensor:
        """See `Communicator`."""
        if self.shard.pp_size == 1:
            return hidden
        hidden = hidden.contiguous()
        dist.broadcast(hidden, self._last, group=self._column)
        return hidden

    def close(self) -> None:
        """Leaves the group of ranks."""
        dist.destroy_process_group()

    @staticmethod
    def _group(ranks: range) -> dist.ProcessGroup:
        # Ranks outside of the group get a number, which they never use.
        return cast(dist.ProcessGroup, dist.new_group(list(ranks)))
