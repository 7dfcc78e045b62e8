"""In which order the ranks of a pipeline carry out plans: with as many in flight as stages, and with fewer."""

import random
import time
import weakref
from collections import deque

import pytest
import torch

from antiphon.services.engine.core.plan import EngineFacts, StepPlan, StepResult
from antiphon.services.engine.executor import Executor
from antiphon.services.engine.executor.rank import forget_worker
from antiphon.services.engine.parallel.communicator import Communicator
from antiphon.shared.errors import ServiceError
from tests.support.ranks import StagedRanks, results_ahead


class Stage:
    """A worker whose hidden state is the step's number; each stage adds one, the last adds its own count of steps."""

    def __init__(self, ranks: Communicator, num_stages: int) -> None:
        self._ranks, self._draw = ranks, random.Random(ranks.shard.rank)
        self._facts = EngineFacts(num_blocks=8, block_size=4, max_model_len=100, vocab_size=1000, num_stages=num_stages)
        self._under_way: deque[tuple[int, torch.Tensor]] = deque()
        self.most_under_way = 0

    def facts(self) -> EngineFacts:
        return self._facts

    def takes_another(self) -> bool:
        return True

    def launch(self, plan: StepPlan) -> None:
        start = torch.tensor([[float(plan.step)]])
        hidden = start if self._ranks.is_first else self._ranks.receive(1, start)
        time.sleep(self._draw.choice([0.0, 0.001]))
        hidden = hidden + 1
        if not self._ranks.is_last:
            self._ranks.send(hidden)
        self._under_way.append((plan.step, hidden))
        self.most_under_way = max(self.most_under_way, len(self._under_way))

    def collect(self) -> StepResult:
        step, hidden = self._under_way.popleft()
        return StepResult(step=step, token_ids=((int(self._ranks.from_last(hidden)),),))

    def run(self, plan: StepPlan) -> StepResult:
        raise AssertionError("it is asked to launch and to collect")

    def close(self) -> None:
        pass


@pytest.mark.parametrize(("tp_size", "pp_size"), [(1, 2), (1, 3), (2, 2), (1, 4), (2, 3)])
def test_each_plan_passes_all_stages_whatever_the_number_in_flight(tp_size: int, pp_size: int) -> None:
    draw = random.Random(pp_size)
    ranks = StagedRanks(lambda communicator: Stage(communicator, pp_size), tp_size, pp_size)
    executor = Executor(ranks)
    assert executor.max_in_flight == pp_size
    for number, result in enumerate(results_ahead(executor, 40, draw), 1):
        assert result == StepResult(step=number, token_ids=((number + pp_size,),))
    assert ranks.most_in_flight == pp_size
    executor.close()


def test_ranks_of_one_stage_have_as_many_plans_in_flight_as_the_first() -> None:
    ranks = StagedRanks(lambda communicator: Stage(communicator, 1), 2, 1)
    executor = Executor(ranks)
    for step in (1, 2):
        executor.launch(StepPlan(step=step))
    for step in range(1, 8):
        assert executor.collect() == StepResult(step=step, token_ids=((step + 1,),))
        if step < 6:
            executor.launch(StepPlan(step=step + 2))
    for worker in ranks.workers:
        assert isinstance(worker, Stage)
        assert worker.most_under_way == 2
    executor.close()


def test_a_worker_that_failed_is_freed_before_the_ranks_part() -> None:
    class Graphs:
        pass

    kept: list[weakref.ref[Graphs]] = []

    def load() -> None:
        graphs = Graphs()
        kept.append(weakref.ref(graphs))
        raise torch.OutOfMemoryError("none is left")

    def load_and_explain() -> None:
        try:
            load()
        except torch.OutOfMemoryError as error:
            raise ServiceError("invalid_value", "The model does not fit.") from error

    with pytest.raises(ServiceError) as failed:
        load_and_explain()
    assert kept[0]() is not None
    forget_worker(failed.value)
    assert kept[0]() is None
