"""Virtual time, and the faults of the in-process bus."""

import asyncio
import random
import time

import pytest

from antiphon.shared import limits
from antiphon.shared.bus.transport import NoRespondersError, RequestTimeoutError
from antiphon.shared.errors import ServiceError
from tests.support.memory import MemoryBus
from tests.support.simulation import EPOCH_NS, DeadlockError, SimClock, TimeLimitError, run_simulation

# --- virtual time -----------------------------------------------------------------------------------------------------


def test_an_hour_passes_in_no_time():
    async def main():
        clock = SimClock()
        await asyncio.sleep(3599)
        return clock.monotonic(), clock.time_ns()

    start = time.perf_counter()
    assert run_simulation(main) == (3599.0, EPOCH_NS + 3599 * 10**9)
    assert time.perf_counter() - start < 60


def test_timers_fire_in_the_order_of_their_times():
    async def main():
        order = []

        async def note(after_s):
            await asyncio.sleep(after_s)
            order.append(after_s)

        await asyncio.gather(*map(note, (3.0, 1.0, 2.0, 1.5)))
        return order, asyncio.get_running_loop().time()

    assert run_simulation(main) == ([1.0, 1.5, 2.0, 3.0], 3.0)


def test_a_deadlock_is_an_error_that_names_who_waits():
    async def main():
        waiting = asyncio.create_task(asyncio.Event().wait(), name="the one that waits")
        await waiting

    with pytest.raises(DeadlockError, match="the one that waits"):
        run_simulation(main)


def test_a_simulation_that_never_ends_is_an_error():
    async def main():
        while True:
            await asyncio.sleep(1)

    with pytest.raises(TimeLimitError, match="after 50 virtual seconds"):
        run_simulation(main, limit_s=50)


def test_after_a_deadlock_every_task_was_cancelled():
    ended = []

    async def hold():
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    async def main():
        other = asyncio.create_task(hold())
        await asyncio.sleep(1)
        await asyncio.Event().wait()
        await other

    with pytest.raises(DeadlockError):
        run_simulation(main)
    assert ended == [True]


def test_the_seed_decides_what_random_draws_and_the_outside_is_left_alone():
    async def main():
        return random.random()

    state = random.getstate()
    assert run_simulation(main, 1) == run_simulation(main, 1) != run_simulation(main, 2)
    assert random.getstate() == state


def test_executors_run_in_place():
    async def main():
        with pytest.raises(ZeroDivisionError):
            await asyncio.to_thread(lambda: 1 // 0)
        return await asyncio.to_thread(sum, [1, 2]), asyncio.get_running_loop().time()

    assert run_simulation(main) == (3, 0.0)


# --- the bus ----------------------------------------------------------------------------------------------------------


def on_bus(scenario, seed: int = 0, **options):
    """Runs `scenario(bus, one, two, heard)`: `two` listens on `a.>`; returns what the scenario returns."""

    async def main():
        bus = MemoryBus(seed, **options)
        one, two, heard = bus.connect("one"), bus.connect("two"), []
        loop = asyncio.get_running_loop()
        await two.subscribe("a.>", lambda delivery: heard.append((loop.time(), delivery.payload)))
        await two.barrier()
        return await scenario(bus, one, two, heard)

    return run_simulation(main, seed)


async def send(transport, count: int, subject: str = "a.b") -> list[bytes]:
    payloads = [str(number).encode() for number in range(count)]
    for payload in payloads:
        await transport.publish(subject, payload)
    return payloads


def test_messages_take_their_time_and_keep_their_order():
    async def scenario(bus, one, two, heard):
        start = asyncio.get_running_loop().time()
        sent = await send(one, 100)
        await asyncio.sleep(1)
        assert [payload for _, payload in heard] == sent
        assert all(0.01 <= at - start <= 0.05 for at, _ in heard)
        assert len({at for at, _ in heard}) > 3

    on_bus(scenario, delay_s=(0.01, 0.05))


def test_messages_overtake_each_other_when_reordering_is_on():
    async def scenario(bus, one, two, heard):
        bus.reordering = True
        sent = await send(one, 100)
        await asyncio.sleep(1)
        received = [payload for _, payload in heard]
        assert received != sent
        assert sorted(received) == sorted(sent)

    on_bus(scenario, delay_s=(0.01, 0.05))


def test_a_subscription_counts_only_after_a_while_so_that_a_missing_barrier_shows():
    async def scenario(bus, one, two, heard):
        late = []
        await two.subscribe("b", lambda delivery: late.append(delivery.payload))
        await one.publish("b", b"lost")
        await two.barrier()
        await one.publish("b", b"heard")
        await asyncio.sleep(1)
        assert late == [b"heard"]

    on_bus(scenario, delay_s=(0.01, 0.05))


@pytest.mark.parametrize("rule", [0.3, lambda delivery: delivery.payload.endswith(b"7")])
def test_dropped_messages_are_lost_and_counted(rule):
    async def scenario(bus, one, two, heard):
        fault = bus.drop("a.*", rule)
        await send(one, 200)
        await send(one, 5, "c.d")
        await asyncio.sleep(1)
        assert 0 < fault.hits < 200
        assert len(heard) == 200 - fault.hits
        assert bus.counters["dropped"] == fault.hits
        fault.remove()
        await send(one, 10)
        await asyncio.sleep(1)
        assert len(heard) == 210 - fault.hits

    on_bus(scenario)


def test_duplicated_messages_come_twice_and_are_counted():
    async def scenario(bus, one, two, heard):
        fault = bus.duplicate("a.>", 0.5)
        await send(one, 100)
        await asyncio.sleep(1)
        assert len(heard) == 100 + fault.hits
        assert bus.counters["duplicated"] == fault.hits > 20

    on_bus(scenario)


def test_delayed_messages_come_late_and_are_counted():
    async def scenario(bus, one, two, heard):
        fault = bus.delay("a.slow", 2.0, 3.0)
        await send(one, 1, "a.fast")
        await send(one, 1, "a.slow")
        await asyncio.sleep(5)
        assert heard[0][0] == 0.0
        assert 2.0 <= heard[1][0] <= 3.0
        assert bus.counters["delayed"] == fault.hits == 1

    on_bus(scenario)


def test_a_crash_takes_subscriptions_and_messages_under_way_with_it():
    async def scenario(bus, one, two, heard):
        await send(one, 3)
        bus.crash("one")
        await send(one, 2)
        await asyncio.sleep(1)
        assert heard == []
        assert not one.connected
        assert bus.counters["lost_crash"] == 5
        bus.crash("two")
        again = bus.connect("one")
        with pytest.raises(NoRespondersError):
            await again.request("a.b", b"", timeout_s=1)

    on_bus(scenario, delay_s=(0.01, 0.01))


def test_a_frozen_receiver_gets_what_it_missed_when_it_thaws():
    async def scenario(bus, one, two, heard):
        bus.freeze("two")
        sent = await send(one, 5)
        await asyncio.sleep(10)
        assert heard == []
        assert bus.counters["held"] == 5
        with pytest.raises(RequestTimeoutError):
            await one.request("a.b", b"asked", timeout_s=0.1)
        bus.thaw("two")
        await asyncio.sleep(1)
        assert [payload for _, payload in heard] == [*sent, b"asked"]

    on_bus(scenario)


def test_a_frozen_sender_speaks_when_it_thaws():
    async def scenario(bus, one, two, heard):
        bus.freeze("one")
        sent = await send(one, 5)
        await asyncio.sleep(10)
        assert heard == []
        bus.thaw("one")
        await asyncio.sleep(1)
        assert [payload for _, payload in heard] == sent

    on_bus(scenario)


def test_a_partition_loses_what_comes_in_keeps_what_goes_out_and_is_noticed():
    async def scenario(bus, one, two, heard):
        events = []
        two.on_disconnect, two.on_reconnect = (lambda: events.append("lost")), (lambda: events.append("back"))
        answers = []
        await one.subscribe("back", lambda delivery: answers.append(delivery.payload))
        await one.barrier()
        bus.partition("two")
        assert not two.connected
        await send(one, 3)
        await two.publish("back", b"kept")
        with pytest.raises(NoRespondersError):
            await one.request("a.b", b"", timeout_s=1)
        barrier = asyncio.create_task(two.barrier())
        await asyncio.sleep(1)
        assert (heard, answers, barrier.done()) == ([], [], False)
        bus.heal("two")
        await barrier
        await send(one, 1)
        await asyncio.sleep(1)
        assert [payload for _, payload in heard] == [b"0"]
        assert answers == [b"kept"]
        assert events == ["lost", "back"]
        assert bus.counters["lost_partition"] >= 3

    on_bus(scenario)


def test_the_outbound_buffer_of_a_partitioned_member_is_bounded():
    async def scenario(bus, one, two, heard):
        bus.partition("one")
        for _ in range(limits.OUTBOUND_BYTES_MAX // 2**20):
            await one.publish("a.b", bytes(2**20))
        with pytest.raises(ServiceError) as failure:
            await one.publish("a.b", b"x")
        assert failure.value.code == "bus_unavailable"

    on_bus(scenario)


def test_a_receiver_that_lags_loses_messages_and_is_told():
    async def scenario(bus, one, two, heard):
        told = []
        two.on_error = lambda kind, error: told.append(kind)
        bus.freeze("two")
        await send(one, 15)
        await asyncio.sleep(1)
        bus.thaw("two")
        assert len(heard) == 10
        assert told == ["slow_consumer"] * 5
        assert bus.counters["slow_consumer"] == two.counters["slow_consumer"] == 5

    on_bus(scenario, pending_max=10)


def test_the_same_seed_gives_the_same_run_and_another_seed_another():
    async def scenario(bus, one, two, heard):
        bus.drop("a.>", 0.2)
        bus.duplicate("a.>", 0.2)
        for number in range(3):
            await bus.connect(f"worker{number}").subscribe("a.job", lambda delivery: None, queue="pool")
        await asyncio.sleep(1)
        await asyncio.gather(*(send(one, 50, "a.job") for _ in range(3)))
        await asyncio.sleep(random.random())
        return bus.fingerprint, heard

    first, same, other = (on_bus(scenario, seed, delay_s=(0.0, 0.1)) for seed in (1, 1, 2))
    assert first == same
    assert first[0] != other[0]
