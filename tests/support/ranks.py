"""Ranks on threads of one process, for tests of what each rank computes: the exchanges of real ranks without processes.

`RankThreads` is a `ModelWorker` whose plans run on every rank's worker at once, each on a thread of its own.
`StagedRanks` has several plans in flight.
"""

import random
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import TypeVar
from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from antiphon.services.engine.core.plan import EngineFacts, StepPlan, StepResult
from antiphon.services.engine.executor import Executor
from antiphon.services.engine.executor.channel import Channel, Collect, Computed, RunPlan, digest_of
from antiphon.services.engine.executor.image_parts import parts_of, without_embeddings
from antiphon.services.engine.executor.rank import plans_of, serve
from antiphon.services.engine.parallel.communicator import Communicator, Number
from antiphon.services.engine.parallel.shard import Shard
from antiphon.services.engine.worker.interface import ModelWorker

TIMEOUT_S = 60.0
PART_BYTES = 1000
"""Small, so that embeddings of images have several parts."""
T = TypeVar("T")


class _Meeting:
    """Where the ranks of one group exchange values: each passes one and gets all, in the order of the ranks."""

    def __init__(self, size: int) -> None:
        self._values: list[object] = [None] * size
        self._barrier = threading.Barrier(size)

    def exchange(self, place: int, value: object) -> list[object]:
        self._values[place] = value
        self._barrier.wait(TIMEOUT_S)
        found = list(self._values)
        # Nobody may pass the next value before all have read this one.
        self._barrier.wait(TIMEOUT_S)
        return found

    def abort(self) -> None:
        self._barrier.abort()


class ThreadCommunicator(Communicator):
    """A `Communicator` of one rank."""

    def __init__(
        self,
        shard: Shard,
        all_ranks: _Meeting,
        stage: _Meeting,
        column: _Meeting,
        pipes: list[SimpleQueue[Tensor]],
    ) -> None:
        self.shard, self._all, self._stage, self._column, self._pipes = shard, all_ranks, stage, column, pipes
        self.local_rank, self.local_size = shard.rank, shard.size
        self.is_first, self.is_last = shard.pp_rank == 0, shard.pp_rank == shard.pp_size - 1
        self.stage = self if shard.pp_size > 1 else None

    def all_sum(self, x: Tensor) -> Tensor:
        parts = self._stage.exchange(self.shard.tp_rank, x.clone())
        total = parts[0].float().clone()  # type: ignore[attr-defined]
        for part in parts[1:]:
            total += part
        return total.to(x.dtype)

    def smallest(self, number: int) -> int:
        return min(self._all.exchange(self.shard.rank, number))  # type: ignore[type-var, return-value]

    def smallest_of_each(self, numbers: NDArray[Number]) -> NDArray[Number]:
        every = self._all.exchange(self.shard.rank, numbers)
        return np.minimum.reduce(every)  # type: ignore[arg-type, no-any-return]

    def receive(self, num_tokens: int, like: Tensor) -> Tensor:
        hidden = self._pipes[self.shard.pp_rank - 1].get(timeout=TIMEOUT_S)
        assert hidden.shape == (num_tokens, like.shape[1])
        assert hidden.dtype == like.dtype
        return hidden

    def send(self, hidden: Tensor) -> None:
        self._pipes[self.shard.pp_rank].put(hidden.clone())

    def from_last(self, hidden: Tensor) -> Tensor:
        if self.shard.pp_size == 1:
            return hidden
        last = self._column.exchange(self.shard.pp_rank, hidden.clone())[-1]
        assert isinstance(last, Tensor)
        assert last.shape == hidden.shape
        return last.clone()


_OPEN: "WeakSet[RankThreads]" = WeakSet()


def end_ranks() -> None:
    """Ends the threads of all ranks that were not closed. Called at the end of each test."""
    for ranks in list(_OPEN):
        ranks.end_threads()


class RankThreads:
    """A `ModelWorker` of several ranks. Their results must be equal."""

    def __init__(self, make: Callable[[Communicator], ModelWorker], tp_size: int, pp_size: int) -> None:
        shards = [Shard.of_rank(rank, tp_size, pp_size) for rank in range(tp_size * pp_size)]
        everybody = _Meeting(len(shards))
        stages = [_Meeting(tp_size) for _ in range(pp_size)]
        columns = [_Meeting(pp_size) for _ in range(tp_size)]
        pipes: list[list[SimpleQueue[Tensor]]] = [[SimpleQueue() for _ in range(pp_size)] for _ in range(tp_size)]
        self._meetings = (everybody, *stages, *columns)
        self._threads = ThreadPoolExecutor(len(shards))
        communicators = [
            ThreadCommunicator(s, everybody, stages[s.pp_rank], columns[s.tp_rank], pipes[s.tp_rank]) for s in shards
        ]
        _OPEN.add(self)
        self.workers = self._on_all(lambda rank: make(communicators[rank]), len(shards))
        self._shards = shards

    def facts(self) -> EngineFacts:
        """See ModelWorker."""
        facts = [worker.facts() for worker in self.workers]
        assert len({(f.num_blocks, f.max_model_len, f.num_host_blocks) for f in facts}) == 1
        return facts[0]

    def run(self, plan: StepPlan) -> StepResult:
        """See ModelWorker."""
        results = self._on_all(lambda rank: self.workers[rank].run(plan), len(self.workers))
        assert all(result.token_ids == results[0].token_ids for result in results)
        return results[0]

    def close(self) -> None:
        """See ModelWorker."""
        self.end_threads()
        for worker in self.workers:
            worker.close()

    def end_threads(self) -> None:
        """Ends the threads; the workers stay as they are."""
        _OPEN.discard(self)
        self._threads.shutdown()

    def on_all(self, work: Callable[[ModelWorker], T]) -> list[T]:
        """Returns what `work` returns for each rank's worker, at the same time."""
        return self._on_all(lambda rank: work(self.workers[rank]), len(self.workers))

    def _on_all(self, work: Callable[[int], T], count: int) -> list[T]:
        futures = [self._threads.submit(self._guarded, work, rank) for rank in range(count)]
        return [future.result(TIMEOUT_S) for future in futures]

    def _guarded(self, work: Callable[[int], T], rank: int) -> T:
        try:
            return work(rank)
        except BaseException:
            # The others wait for this one.
            for meeting in self._meetings:
                meeting.abort()
            raise


class StagedRanks(RankThreads):
    """A `PipelinedWorker` of ranks that have several plans in flight and carry out commands as real ranks do (`serve`).

    The first rank's worker runs on the caller's thread.
    """

    def __init__(self, make: Callable[[Communicator], ModelWorker], tp_size: int, pp_size: int) -> None:
        self._channels: list[Channel] = []
        super().__init__(make, tp_size, pp_size)
        self._first = Executor(self.workers[0])
        self.most_in_flight = 0
        for rank in range(1, len(self.workers)):
            ours, theirs = socket.socketpair()
            self._channels.append(Channel(ours))
            executor = Executor(self.workers[rank])
            # A daemon: it waits for commands until the channel closes, or the process ends.
            arguments = executor, Channel(theirs), plans_of(executor, self._shards[rank])
            threading.Thread(target=self._serve, args=arguments, daemon=True).start()

    def _serve(self, executor: Executor, channel: Channel, plans_max: int) -> None:
        with channel.socket:
            self._guarded(lambda _: serve(executor, channel, plans_max), 0)

    def takes_another(self) -> bool:
        """See PipelinedWorker."""
        return self._first.has_room()

    def launch(self, plan: StepPlan) -> None:
        """See PipelinedWorker."""
        for shard, channel in zip(self._shards[1:], self._channels, strict=True):
            for part in parts_of(plan, PART_BYTES) if not shard.pp_rank else ():
                channel.send(part)
            channel.send(RunPlan(without_embeddings(plan)))
        self._first.launch(plan)
        self.most_in_flight = max(self.most_in_flight, self._first.num_in_flight)

    def collect(self) -> StepResult:
        """See PipelinedWorker."""
        for channel in self._channels:
            channel.send(Collect())
        result = self._first.collect()
        assert all(channel.reply() == Computed(result.step, digest_of(result)) for channel in self._channels)
        return result

    def run(self, plan: StepPlan) -> StepResult:
        """See ModelWorker."""
        self.launch(plan)
        return self.collect()

    def end_threads(self) -> None:
        """See RankThreads."""
        for channel in self._channels:
            channel.close()
        super().end_threads()


def results_ahead(executor: Executor, num_plans: int, draw: random.Random) -> Iterator[StepResult]:
    """Yields the results of empty plans, of which now and then as many are in flight as the executor has room for."""
    launched = collected = 0
    while collected < num_plans:
        has_room = executor.has_room() and launched < num_plans
        if has_room and (executor.num_in_flight == 0 or draw.random() < 0.7):
            launched += 1
            executor.launch(StepPlan(step=launched))
        elif executor.num_in_flight:
            collected += 1
            yield executor.collect()
