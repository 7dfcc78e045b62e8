"""Real ranks over gloo, in processes of their own: the order of sums, and numbers that they agree on."""

import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from antiphon.services.engine.parallel.communicator import TorchCommunicator
from antiphon.services.engine.parallel.meeting import Meeting
from antiphon.services.engine.parallel.shard import Shard

PARTS = (1e8, 1.0, -1e8, 0.5)
"""Their sum in float32 depends on the order: 1 is lost beside 1e8."""


def exchanged(rank: int, path: str, replies: Any) -> None:
    meeting = Meeting(path=path, local_rank=rank, local_size=len(PARTS))
    ranks = TorchCommunicator(Shard.of_rank(rank, len(PARTS), 1), meeting, torch.device("cpu"), in_order=False)
    total = ranks.all_sum(torch.tensor([[PARTS[rank]], [PARTS[(rank + 1) % 4]]]))
    times = ranks.smallest_of_each(np.array([-float(rank), np.inf, -np.inf if rank == 2 else 0.5]))
    replies.put((rank, total.flatten().tolist(), times.tolist(), ranks.smallest(7 - rank)))
    ranks.close()


def test_sums_have_the_order_of_the_ranks(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    replies: Any = context.Queue()
    started: Callable[..., Any] = context.Process
    processes = [started(target=exchanged, args=(rank, str(tmp_path / "meeting"), replies)) for rank in range(4)]
    for process in processes:
        process.start()
    found = sorted(replies.get(timeout=120) for _ in processes)
    for process in processes:
        process.join(60)
    shifted = (*PARTS[1:], PARTS[0])
    expected = [float(np.add.accumulate(np.array(each, dtype=np.float32))[-1]) for each in (PARTS, shifted)]
    assert expected == [0.5, 0.0]
    assert found == [(rank, expected, [-3.0, np.inf, -np.inf], 4) for rank in range(4)]
