"""Lockstep in virtual time: whatever one engine computes and whatever is lost, the client gets the right tokens."""

import asyncio
from dataclasses import replace

import pytest
from msgspec import structs

from antiphon.services.gateway.guests.lockstep.guest import Lockstep
from antiphon.services.gateway.path.generation import GuestOptions
from antiphon.services.gateway.path.sequence_state import Address
from antiphon.shared import limits
from tests.sim.model import HashModel
from tests.sim.society import SimulatedEngine, Society, worker_of
from tests.sim.test_society import BUS, check, greedy, model_dir, simulate
from tests.support.simulation import run_simulation

__all__ = ["model_dir"]


class LyingModel(HashModel):
    """Gives another token now and then: always the same one (`steady`), or only the first time that it is asked."""

    steady: bool
    asked: set[bytes]

    def __init__(self, steady: bool) -> None:
        super().__init__()
        object.__setattr__(self, "steady", steady)
        object.__setattr__(self, "asked", set())

    def next_token(self, tokens: list[int], salt: int) -> int:
        right = super().next_token(tokens, salt)
        known = bytes(tokens) in self.asked
        self.asked.add(bytes(tokens))
        lies = sum(tokens) % 5 == 0 and (self.steady or not known)
        return 32 + (right - 31) % 90 if lies else right


def lie(society: Society, name: str, *, steady: bool) -> None:
    """From now on the engine computes wrong tokens."""
    engine = society.members[name].service
    assert isinstance(engine, SimulatedEngine)
    worker_of(engine)._model = LyingModel(steady)


def lockstep_of(society: Society) -> Lockstep:
    return society.members["gateway0"].service.guests[Lockstep]


async def known(society: Society) -> Lockstep:
    """Waits until the gateway has heard of all engines."""
    actor = society.members["gateway0"].service.actor
    while len(actor.engines()) < len(society.engines()):
        await asyncio.sleep(0.01)
    return lockstep_of(society)


async def compared(society: Society, count: int = 12, first: int = 0) -> None:
    await known(society)
    requests = [
        structs.replace(greedy(number), guests=GuestOptions(lockstep=True)) for number in range(first, first + count)
    ]
    answers = await asyncio.gather(*(society.ask(request) for request in requests))
    for number, answer in enumerate(answers, first):
        check(answer, number)


def quiet(society: Society) -> None:
    """Nothing of a comparison is left."""
    assert not lockstep_of(society).copies.running
    assert not lockstep_of(society).running


@pytest.mark.parametrize("seed", range(2))
def test_two_sound_engines_agree_on_every_token(model_dir, seed):
    async def scenario(society: Society) -> None:
        await compared(society)
        counts = lockstep_of(society).counts
        assert (counts.requests, counts.compared_tokens, counts.differences) == (12, 12 * 20, 0)
        quiet(society)

    simulate(model_dir, scenario, seed, engine=2, detokenizer=2)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("steady", [True, False], ids=["steady", "once"])
def test_a_third_engine_decides_and_no_wrong_token_is_shown(model_dir, seed, steady):
    async def scenario(society: Society) -> None:
        await known(society)
        lie(society, f"engine{seed % 3}", steady=steady)
        await compared(society)
        counts = lockstep_of(society).counts
        assert counts.differences > 0
        assert counts.votes["third"] > 0
        assert counts.undecided == 0
        assert [address.id for address in lockstep_of(society).trust.quarantined] == [f"engine{seed % 3}"]
        await compared(society, first=12)
        quiet(society)

    simulate(model_dir, scenario, seed, engine=3, detokenizer=2)


@pytest.mark.parametrize("seed", range(2))
def test_of_two_engines_the_one_that_changes_its_mind_is_wrong(model_dir, seed):
    async def scenario(society: Society) -> None:
        await known(society)
        lie(society, f"engine{seed % 2}", steady=False)
        requests = [structs.replace(greedy(number), guests=GuestOptions(lockstep=True)) for number in range(8)]
        asked = asyncio.gather(*(society.ask(request) for request in requests))
        while not lockstep_of(society).trust.quarantined:
            await asyncio.sleep(0.01)
        await society.start("engine")
        for number, answer in enumerate(await asked):
            check(answer, number)
        assert lockstep_of(society).counts.votes["repetition"] > 0
        assert [address.id for address in lockstep_of(society).trust.quarantined] == [f"engine{seed % 2}"]
        quiet(society)

    simulate(model_dir, scenario, seed, engine=2)


def test_a_difference_waits_for_a_third_engine_that_is_starting(model_dir):
    async def scenario(society: Society) -> None:
        await known(society)
        lie(society, "engine0", steady=True)
        asked = asyncio.create_task(compared(society))
        while not lockstep_of(society).counts.votes["self_test"]:
            await asyncio.sleep(0.01)
        await society.start("engine")
        await asked
        assert lockstep_of(society).counts.undecided == 0
        assert [address.id for address in lockstep_of(society).trust.quarantined] == ["engine0"]
        quiet(society)

    simulate(model_dir, scenario, engine=2)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    "subject", [f"{BUS}.gw.*.*.tok", f"{BUS}.det.*.*.tok", f"{BUS}.gw.*.*.txt", f"{BUS}.eng.*.*.ctl"]
)
def test_lost_messages_are_repaired_while_engines_are_compared(model_dir, subject, seed):
    async def scenario(society: Society) -> None:
        fault = society.bus.drop(subject, 0.1)
        await compared(society)
        assert fault.hits
        fault.remove()
        quiet(society)

    simulate(model_dir, scenario, seed, engine=3)


@pytest.mark.parametrize("seed", range(2))
def test_an_engine_dies_while_engines_are_compared_and_another_one_lies(model_dir, seed):
    async def scenario(society: Society) -> None:
        if seed % 2:
            lie(society, "engine3", steady=True)
        asked = asyncio.create_task(compared(society))
        await asyncio.sleep(0.05 + 0.03 * seed)
        society.kill(f"engine{seed % 3}")
        await asked
        quiet(society)

    simulate(model_dir, scenario, seed, engine=4)


def test_while_the_second_engine_restarts_a_request_that_asks_for_it_waits(model_dir):
    async def scenario(society: Society) -> None:
        await society.start("engine", "second")
        await known(society)
        await asyncio.sleep(0.5)
        society.kill("second")
        await asyncio.sleep(1)  # its lease has run out
        assert not lockstep_of(society)._trusted()[1:]
        asked = asyncio.create_task(society.ask(structs.replace(greedy(0), guests=GuestOptions(lockstep=True))))
        await asyncio.sleep(1)
        assert not asked.done()
        await society.start("engine", "third")
        check(await asked, 0)
        society.kill("third")
        await asyncio.sleep(1 + limits.LOCKSTEP_GRACE_S)
        refused = await society.ask(structs.replace(greedy(0), guests=GuestOptions(lockstep=True)))
        assert refused.error is not None
        assert refused.error.code == "no_engine"
        assert refused.refused
        quiet(society)

    simulate(model_dir, scenario)


def test_a_request_that_asked_for_it_fails_without_a_second_engine_and_a_sampled_one_goes_on(model_dir):
    async def scenario(society: Society) -> None:
        refused = await society.ask(structs.replace(greedy(0), guests=GuestOptions(lockstep=True)))
        assert refused.error is not None
        assert refused.error.code == "no_engine"
        lockstep_of(society)._share, lockstep_of(society).asked_by = 1.0, None
        await society.ask(greedy(1))
        assert lockstep_of(society).counts.unavailable == 1
        await society.start("engine", "second")
        await asyncio.sleep(0.5)
        asked = [
            society.ask(structs.replace(greedy(2, 100), guests=GuestOptions(lockstep=True))),
            society.ask(greedy(3, 100)),
        ]
        running = asyncio.gather(*asked)
        await asyncio.sleep(0.1)
        society.kill("second")
        required, sampled = await running
        check(sampled, 3, 100)
        assert lockstep_of(society).counts.dropped >= 1
        assert required.error is not None
        assert required.error.code == "no_engine"
        assert required.ended_s >= limits.QUEUE_WAIT_S
        quiet(society)

    simulate(model_dir, scenario)


# --- engines that find their own faults, and deterministic ones ---


def test_an_engine_whose_canary_gives_another_value_ends_and_its_streams_go_on(model_dir, monkeypatch):
    monkeypatch.setattr(SimulatedEngine, "tests_itself", True)

    async def scenario(society: Society) -> None:
        await known(society)
        engine = society.members["engine0"].service
        assert engine.status().golden_digest == society.members["engine1"].service.status().golden_digest != ""
        await asyncio.sleep(1.0)
        assert not society.crashes
        worker_of(engine)._model = HashModel(name="other")
        await asyncio.sleep(4.0)
        assert [name for name, _ in society.crashes] == ["engine0"]
        assert "the test sequence gave" in str(society.crashes[0][1])
        assert engine.fault
        answers = await asyncio.gather(*(society.ask(greedy(number)) for number in range(6)))
        for number, answer in enumerate(answers):
            check(answer, number)
        society.crashes.clear()

    simulate(model_dir, scenario, engine=2)


@pytest.mark.parametrize("fits", [True, False], ids=["same numerics", "other numerics"])
def test_a_deterministic_output_continues_only_with_the_same_numerics(model_dir, fits):
    async def main() -> None:
        society = Society(model_dir, deterministic=True)
        for kind in ("gateway", "tokenizer", "detokenizer", "engine"):
            await society.start(kind)
        await society.ready()
        request = asyncio.create_task(society.ask(greedy(1, 100)))
        await asyncio.sleep(0.1)
        await society.start("engine")
        if not fits:
            other = society.members["engine1"].service
            other.engine.facts = replace(other.engine.facts, configuration="other")
        await asyncio.sleep(0.5)
        assert society.members["engine0"].service.status().configuration == "-deterministic"
        society.kill("engine0")
        answer = await request
        if fits:
            check(answer, 1, 100)
        else:
            assert answer.error is not None
            assert answer.error.code == "engine_failure"
            assert "the numerics that this output began with" in answer.error.message
        check(await society.ask(greedy(2)), 2)

    run_simulation(main, 1)


@pytest.mark.matrix("G-10")
def test_a_gateway_whose_engines_are_all_distrusted_or_lost_says_so(model_dir):
    async def scenario(society: Society) -> None:
        lockstep = await known(society)
        gateway = society.members["gateway0"].service.actor.backend
        first, second = (Address(f"engine{i}", society.members[f"engine{i}"].host.instance_id) for i in range(2))
        lockstep.quarantine(first, "a test")
        assert gateway.ready() == ""
        lockstep.quarantine(second, "a test")
        assert gateway.ready() == ("Waiting for: engine. 2 ready engines get no work: found to compute wrong results.")
        await society.start("engine", "engine2")
        while gateway.ready():
            await asyncio.sleep(0.01)
        check(await society.ask(greedy(1)), 1)
        for number in range(3):
            society.kill(f"engine{number}")
        while not gateway.ready():
            await asyncio.sleep(0.01)
        assert gateway.ready() == "Waiting for: engine."
        await society.start("engine", "engine3")
        while gateway.ready():
            await asyncio.sleep(0.01)
        check(await society.ask(greedy(2)), 2)

    simulate(model_dir, scenario, 0, engine=2)
