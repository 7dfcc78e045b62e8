"""Whom a gateway asks: the tokenizers of the request's model and no others."""

import asyncio

import pytest

from antiphon.services.gateway.path.service_clients import RETRY_PAUSE_S, ServiceClients
from antiphon.shared import limits
from antiphon.shared.actors.host import Host
from antiphon.shared.actors.presence import Members
from antiphon.shared.bus.transport import Delivery
from antiphon.shared.codec import encode
from antiphon.shared.errors import ServiceError
from antiphon.shared.messages import PoolStatus, TokenizeReply, TokenizeRequest
from antiphon.shared.subjects import Subjects
from tests.support.heartbeats import heartbeat
from tests.support.memory import MemoryBus
from tests.support.simulation import SimClock, run_simulation


def test_a_retry_goes_to_a_tokenizer_of_the_same_model_and_never_to_another_one_s() -> None:
    async def main() -> None:
        bus, subjects, clock = MemoryBus(0), Subjects(), SimClock()
        own, pool = bus.connect("gateway"), bus.connect("pool")
        members, heard = Members(), list[str]()
        clients = ServiceClients(
            Host(transport=own, subjects=subjects, clock=clock, id="gateway", instance_id="b0"), members
        )

        async def answer(delivery: Delivery) -> None:
            heard.append(delivery.subject)
            await pool.publish(delivery.reply, encode(TokenizeReply(request_id="r", prompts=())))

        async def listen(subject: str) -> None:
            await pool.subscribe(subject, lambda delivery: tasks.append(loop.create_task(answer(delivery))))

        loop, tasks = asyncio.get_running_loop(), list[asyncio.Task[None]]()
        for name, model in (("t-a", "org/a"), ("t-b", "b")):
            status = PoolStatus(model=model)
            members.observe(heartbeat("tokenizer", name, "b1", status, interval_s=100.0), clock.monotonic())
        # Nobody listens to the pool of the first model: the replica that heartbeats tell of is asked directly.
        for subject in (
            subjects.tokenize("b"),
            subjects.tokenizer_direct("t-a", "b1"),
            subjects.tokenizer_direct("t-b", "b1"),
        ):
            await listen(subject)
        await clients.tokenizer(TokenizeRequest(request_id="r", model="org/a", prompts=("text",)), 4, None)
        await clients.tokenizer(TokenizeRequest(request_id="r", model="b", prompts=("text",)), 4, None)
        assert heard == [subjects.tokenizer_direct("t-a", "b1"), subjects.tokenize("b")]
        began = clock.monotonic()
        with pytest.raises(ServiceError, match="No tokenizer of the model 'c' answers"):
            await clients.tokenizer(TokenizeRequest(request_id="r", model="c", prompts=("text",)), 4, None)
        assert clock.monotonic() - began >= limits.QUEUE_WAIT_S
        assert len(heard) == 2

    run_simulation(main, 0)


def test_every_try_without_an_answer_in_time_is_told_with_the_tokenizer_that_was_asked() -> None:
    async def main() -> None:
        bus, subjects, clock = MemoryBus(0), Subjects(), SimClock()
        own, pool = bus.connect("gateway"), bus.connect("pool")
        members, silent, heard = Members(), list[tuple[str, float]](), list[str]()
        clients = ServiceClients(
            Host(transport=own, subjects=subjects, clock=clock, id="gateway", instance_id="b0"), members
        )

        def ignore(delivery: Delivery) -> None:
            heard.append(delivery.subject)
            if len(heard) == 3:
                tasks.append(
                    loop.create_task(pool.publish(delivery.reply, encode(TokenizeReply(request_id="r", prompts=()))))
                )

        loop, tasks = asyncio.get_running_loop(), list[asyncio.Task[None]]()
        status = PoolStatus(model="m")
        members.observe(heartbeat("tokenizer", "t-1", "b1", status, interval_s=100.0), clock.monotonic())
        for subject in (subjects.tokenize("m"), subjects.tokenizer_direct("t-1", "b1")):
            await pool.subscribe(subject, ignore)
        began, request = clock.monotonic(), TokenizeRequest(request_id="r", model="m", prompts=("text",))
        await clients.tokenizer(request, 4, None, lambda name, waited_s: silent.append((name, waited_s)))
        assert [name for name, _ in silent] == ["", "t-1"]
        waited_s = sum(waited_s for _, waited_s in silent) + 2 * RETRY_PAUSE_S
        assert clock.monotonic() - began == pytest.approx(waited_s, abs=0.01)
        assert len(heard) == 3

    run_simulation(main, 0)
