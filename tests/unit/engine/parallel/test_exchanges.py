"""In which order ranks on GPUs exchange tensors: whatever they compute, no exchange waits for one that waits for it."""

import random
from collections import Counter, deque

import numpy as np
import pytest
import torch

from antiphon.services.engine.core.plan import EngineFacts, StepPlan, StepResult
from antiphon.services.engine.executor import Executor
from antiphon.services.engine.parallel import communicator
from antiphon.services.engine.parallel.communicator import Communicator, TorchCommunicator
from antiphon.services.engine.parallel.meeting import Meeting
from tests.support.ranks import StagedRanks, results_ahead
from tests.support.recorded_exchanges import Entry, Exchange, RecordedExchanges, left_over

DEVICE = torch.device("meta")
"""Stands for a GPU: what is made on it is not there."""
SHAPES = [(2, 1), (1, 2), (2, 2), (1, 3), (3, 2), (2, 4)]


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> RecordedExchanges:
    exchanges = RecordedExchanges()
    monkeypatch.setattr(communicator, "dist", exchanges)
    for variable in communicator._INTERFACES:
        monkeypatch.setenv(variable, "lo")
    return exchanges


def joined(shard_of: Communicator, *, in_order: bool) -> TorchCommunicator:
    return TorchCommunicator(shard_of.shard, Meeting(path="nowhere"), DEVICE, in_order=in_order)


class Worker:
    """What a stage exchanges: hidden states, sums of each layer, the last stage's states, the states of masks.

    A plan has as many layers and tokens as the number of its step tells, and only some have masks.
    """

    def __init__(self, ranks: Communicator, num_stages: int, *, in_order: bool) -> None:
        self._ranks = joined(ranks, in_order=in_order)
        self._facts = EngineFacts(num_blocks=8, block_size=4, max_model_len=100, vocab_size=1000, num_stages=num_stages)
        self._under_way: deque[tuple[int, torch.Tensor]] = deque()

    def facts(self) -> EngineFacts:
        return self._facts

    def takes_another(self) -> bool:
        return True

    def launch(self, plan: StepPlan) -> None:
        draw, like = random.Random(plan.step), torch.zeros((1, 2))
        num_tokens = draw.randint(1, 4)
        hidden = torch.full((num_tokens, 2), float(plan.step))
        if not self._ranks.is_first:
            hidden = self._ranks.receive(num_tokens, like)
        for _ in range(draw.randint(0, 3)):
            self._ranks.all_sum(hidden.clone())
        hidden = hidden + 1
        if not self._ranks.is_last:
            self._ranks.send(hidden)
        self._under_way.append((plan.step, hidden))

    def collect(self) -> StepResult:
        step, hidden = self._under_way.popleft()
        if random.Random(step).random() < 0.8:
            hidden = self._ranks.from_last(hidden)
            token = int(hidden[0, 0])
            if random.Random(step).random() < 0.5:
                self._ranks.smallest_of_each(np.zeros(1, dtype=np.int8))
            return StepResult(step=step, token_ids=((token,),))
        return StepResult(step=step)

    def run(self, plan: StepPlan) -> StepResult:
        raise AssertionError("it is asked to launch and to collect")

    def close(self) -> None:
        pass


@pytest.mark.parametrize("in_order", [False, True])
@pytest.mark.parametrize(("tp_size", "pp_size"), SHAPES)
def test_no_exchange_waits_for_one_that_waits_for_it(
    tp_size: int, pp_size: int, in_order: bool, recorded: RecordedExchanges
) -> None:
    draw = random.Random(10 * tp_size + pp_size)
    ranks = StagedRanks(lambda each: Worker(each, pp_size, in_order=in_order), tp_size, pp_size)
    executor = Executor(ranks)
    for number, result in enumerate(results_ahead(executor, 60, draw), 1):
        # Each stage has added one; a plan from which nothing is sampled has no token.
        assert result.token_ids in ((), ((number + pp_size,),))
    executor.close()
    assert left_over(recorded.entries) == []
    kinds = Counter(entry.exchange.kind for own in recorded.entries.values() for entry in own if entry.on_device)
    assert kinds["send"] == 2 * 60 * tp_size * (pp_size - 1)
    assert kinds["broadcast"] == 0


def sequence(*exchanges: Exchange) -> list[Entry]:
    """Exchanges of one device, all queued at once."""
    return [Entry(exchange, True, {False: 0, True: number}) for number, exchange in enumerate(exchanges)]


def test_a_way_back_over_the_device_would_wait_for_itself() -> None:
    sends = [Exchange("all", "send", (0, 1), number) for number in range(2)]
    back = Exchange("column", "broadcast", (0, 1), 0)
    # The first stage launches two plans before it collects one; the last stage collects each at once.
    assert left_over({0: sequence(*sends, back), 1: sequence(sends[0], back, sends[1])}) == [sends[1], back]
    assert left_over({0: sequence(sends[0], back, sends[1]), 1: sequence(sends[0], back, sends[1])}) == []


@pytest.mark.parametrize("in_order", [False, True])
def test_sums_on_gpus_are_in_the_order_of_the_ranks_where_that_is_asked_for(
    in_order: bool, recorded: RecordedExchanges
) -> None:
    ranks = StagedRanks(lambda each: Worker(each, 1, in_order=in_order), 2, 1)
    first = ranks.workers[0]
    assert isinstance(first, Worker)
    summed = first._ranks.all_sum(torch.tensor([[1.5]]))
    assert recorded.entries[0][-1].exchange.kind == ("all_gather" if in_order else "all_reduce")
    assert summed.item() == (3.0 if in_order else 1.5)
    ranks.close()
