"""Restarting what has crashed, more slowly each time, and giving up."""

import asyncio
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.actors.actor import Actor, Envelope, handles
from shared.actors.memory import MemoryBus
from shared.actors.simulation import DeadlockError, SimClock, run_simulation
from shared.actors.supervise import Backoff, supervise
from shared.messages import Done


def test_the_wait_doubles_up_to_its_maximum():
    backoff = Backoff(first_s=0.1, max_s=1.0, crashes_max=6, window_s=60)
    assert [backoff.crashed(0.0) for _ in range(7)] == [0.1, 0.2, 0.4, 0.8, 1.0, 1.0, None]


def test_crashes_older_than_the_window_are_forgotten():
    backoff = Backoff(first_s=0.1, crashes_max=2, window_s=10)
    assert [backoff.crashed(now) for now in (0, 1, 11, 30)] == [0.1, 0.2, 0.1, 0.1]
    assert backoff.crashes == 1


@given(st.lists(st.sampled_from([0.0, 1.0, 7.0, 25.0]), max_size=30), st.integers(1, 5))
def test_it_gives_up_exactly_when_the_window_holds_too_many(gaps, crashes_max):
    backoff, now, times = Backoff(crashes_max=crashes_max, window_s=20.0), 0.0, []
    for gap in gaps:
        now += gap
        times.append(now)
        recent = [at for at in times if at > now - 20.0]
        assert (backoff.crashed(now) is None) == (len(recent) > crashes_max)


class Fragile(Actor):
    @handles(Done)
    def on_done(self, envelope: Envelope) -> None:
        raise AssertionError("broken")


def supervised(scenario):
    async def main():
        transport, made = MemoryBus().connect("host"), []

        async def make() -> Actor:
            made.append((asyncio.get_running_loop().time(), Fragile(f"fragile{len(made)}", transport)))
            return made[-1][1]

        backoff = Backoff(first_s=1.0, max_s=8.0, crashes_max=3, window_s=60)
        running = asyncio.create_task(supervise(make, backoff=backoff, clock=SimClock()))
        await scenario(running, made)
        return [at for at, _ in made]

    return run_simulation(main)


async def break_it(made) -> None:
    count = len(made)
    made[-1][1].put(Envelope(Done("r", 1), "x"))
    while len(made) == count:
        await asyncio.sleep(0.1)


def test_a_crashed_actor_is_replaced_after_ever_longer_waits_and_then_its_error_is_raised():
    async def scenario(running, made):
        await asyncio.sleep(0)
        for _ in range(3):
            await break_it(made)
        made[-1][1].put(Envelope(Done("r", 1), "x"))
        with pytest.raises(AssertionError, match="broken"):
            await running

    starts = supervised(scenario)
    assert [later - earlier for earlier, later in itertools.pairwise(starts)] == pytest.approx(
        [1.0, 2.0, 4.0], abs=0.21
    )


def test_an_actor_that_stops_in_good_order_is_not_replaced():
    async def scenario(running, made):
        await asyncio.sleep(0)
        await made[0][1].stop()
        await running

    assert supervised(scenario) == [0.0]


def test_cancelling_the_supervision_ends_the_actor():
    async def scenario(running, made):
        await asyncio.sleep(0)
        running.cancel()
        await asyncio.wait({running})
        assert running.cancelled()

    assert supervised(scenario) == [0.0]


def test_an_actor_that_cannot_be_made_is_not_tried_again():
    async def make() -> Actor:
        raise OSError("no such file")

    with pytest.raises(OSError, match="no such file"):
        run_simulation(lambda: supervise(make))


def test_a_supervised_actor_without_messages_shows_as_a_deadlock_in_a_simulation():
    async def main():
        bus = MemoryBus()

        async def make() -> Actor:
            return Fragile("idle", bus.connect("idle"))

        await supervise(make)

    with pytest.raises(DeadlockError, match="every task waits"):
        run_simulation(main)
