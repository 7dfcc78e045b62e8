"""The request flow between gateway, engines and detokenizers with more sequences than rows, in virtual time."""

import asyncio
from collections import Counter
from collections.abc import Iterator

import pytest

from antiphon.services.gateway.path.actor import GatewayActor
from antiphon.services.gateway.path.generation import GenerationRequest, PromptInputs
from antiphon.services.gateway.path.sequence_state import Phase
from antiphon.shared import limits
from antiphon.shared.bus import transport
from antiphon.shared.bus.transport import Delivery
from antiphon.shared.codec import Decoder
from antiphon.shared.messages import Cancel, CloseStream, Done, Message, OpenBatch, SubmitBatch
from antiphon.shared.parameters.sampling import SamplingParams
from tests.sim import doubles
from tests.sim.society import Answer, Society, make_tokenizer, next_token
from tests.support.simulation import run_simulation

PREFIX = f"antiphon.v{limits.PROTOCOL_VERSION}."
MAX_TOKENS = 4


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> str:
    return make_tokenizer(tmp_path_factory.mktemp("model"))


class Tap:
    """Sees every message of the bus: counts them by kind of subject, and keeps the largest size of each."""

    def __init__(self, society: Society) -> None:
        self.counts: Counter[str] = Counter()
        self.largest: Counter[str] = Counter()
        self.placed: list[str] = []
        self._batches: Decoder[Message] = Decoder([SubmitBatch, OpenBatch])
        society.bus.drop(f"{PREFIX}>", self._see)

    def _see(self, delivery: Delivery) -> bool:
        parts = delivery.subject.removeprefix(PREFIX).split(".")
        kind = parts[0] if parts[0] in ("hb", "inbox") else f"{parts[0]}.{parts[-1]}"
        self.counts[kind] += 1
        self.largest[kind] = max(self.largest[kind], len(delivery.payload))
        if kind == "eng.ctl" and delivery.payload[2:].startswith(b"SubmitBatch"):
            batch = self._batches.decode(delivery.payload)
            assert isinstance(batch, SubmitBatch)
            self.placed += [submit.sequence_id for submit in batch.submits]
        return False

    def num_without_heartbeats(self) -> int:
        return sum(count for kind, count in self.counts.items() if kind != "hb")


def tokens_of(number: int) -> tuple[int, ...]:
    return tuple(f"p{number}".encode())


def request(number: int, max_tokens: int = MAX_TOKENS, **kwargs) -> GenerationRequest:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    return GenerationRequest(
        request_id=f"r{number}", model="", params=params, inputs=PromptInputs(token_ids=(tokens_of(number),)), **kwargs
    )


def check(answer: Answer, number: int, max_tokens: int = MAX_TOKENS) -> None:
    assert answer.error is None, answer.error
    tokens = list(tokens_of(number))
    for _ in range(max_tokens):
        tokens.append(next_token(tokens, 0))
    assert answer.token_ids == {0: tokens[-max_tokens:]}
    assert answer.finish == {0: "length"}


async def start(
    model_dir: str, seed: int = 0, flags: dict | None = None, step_s: float = doubles.STEP_S, **counts: int
) -> Society:
    society = Society(model_dir, seed, **(flags or {}))
    society.step_s = step_s
    for kind in ("gateway", "tokenizer", "detokenizer", "engine"):
        for _ in range(counts.get(kind, 1)):
            await society.start(kind)
    await society.ready()
    await asyncio.sleep(3 * limits.GATEWAY_HEARTBEAT_INTERVAL_S)
    return society


def gateway_actor(society: Society, name: str = "gateway0") -> GatewayActor:
    return society.members[name].service.actor


async def nothing_left(society: Society) -> None:
    await asyncio.sleep(3 * limits.ORPHAN_S)
    for engine in society.engines():
        assert len(engine.actor.sequences) == 0
        assert engine.engine.load().num_running == engine.engine.load().num_waiting == 0
    for member in society.members.values():
        if member.kind == "detokenizer":
            assert member.service.status().num_streams == 0
        if member.kind == "gateway":
            assert member.service.status().num_waiting == 0
            assert gateway_actor(society, member.name).parts.watch.engines() == []


def numbers(names: list[str]) -> Iterator[int]:
    return (int(name.removeprefix("r").partition("-")[0]) for name in names)


@pytest.mark.matrix("G-04")
def test_two_thousand_requests_at_one_small_engine_are_placed_in_their_order_with_few_messages(model_dir):
    count, rows = 2000, 8

    async def main() -> None:
        society = await start(model_dir, flags={"max_num_seqs": rows})
        tap = Tap(society)
        answers = await asyncio.gather(*(society.ask(request(number)) for number in range(count)))
        for number, answer in enumerate(answers):
            check(answer, number)
        assert list(numbers(tap.placed)) == list(range(count)), "each once, in the order of arrival"
        # Submit and open with their answers, a token and a text message a step, Done and CloseStream: each is shared
        # by several sequences or sent once.
        assert tap.num_without_heartbeats() < (6 + 2 * MAX_TOKENS) * count
        assert tap.counts["eng.ctl"] <= 2.2 * count
        assert tap.counts["det.ctl"] <= 2.2 * count
        await nothing_left(society)

    run_simulation(main)


def test_a_queue_that_takes_minutes_costs_nothing_and_nobody_is_refused(model_dir):
    """Waiting for a turn is not waiting for an engine: QUEUE_WAIT_S does not apply while engines work."""

    async def main() -> None:
        society = await start(model_dir, flags={"max_num_seqs": 2}, step_s=1.0)
        tap, asked_at = Tap(society), asyncio.get_running_loop().time()
        answers = await asyncio.gather(*(society.ask(request(number)) for number in range(60)))
        assert asyncio.get_running_loop().time() - asked_at > 3 * limits.QUEUE_WAIT_S
        for number, answer in enumerate(answers):
            check(answer, number)
        assert list(numbers(tap.placed)) == list(range(60)), "what waits is neither lost nor placed twice"

    run_simulation(main)


def test_more_urgent_requests_go_first(model_dir):
    async def main() -> None:
        society = await start(model_dir, flags={"max_num_seqs": 2})
        tap = Tap(society)
        asked = [society.ask(request(number, priority=-number)) for number in range(40)]
        await asyncio.gather(*asked)
        at_once = 4  # rows and as many ahead
        assert list(numbers(tap.placed)) == [*range(at_once), *reversed(range(at_once, 40))]

    run_simulation(main)


def test_a_client_that_leaves_the_queue_costs_no_message(model_dir):
    async def main() -> None:
        society = await start(model_dir, flags={"max_num_seqs": 2})
        actor = gateway_actor(society)
        running = [asyncio.create_task(society.ask(request(number, 100))) for number in range(4)]
        await asyncio.sleep(0.1)
        waiting = [actor.backend.generate(request(number)) for number in range(10, 210)]
        await asyncio.sleep(0.1)
        assert actor.backend.status().num_waiting == 200
        tap = Tap(society)
        for generation in waiting[1:]:
            await generation.cancel("the client left")
        assert (actor.backend.status().num_waiting, len(actor.backend.requests)) == (1, 5)
        await asyncio.sleep(0.1)
        assert tap.counts["eng.ctl"] == tap.counts["det.ctl"] == 0
        await asyncio.gather(*running)
        async for _ in waiting[0].updates():
            pass
        assert tap.placed == ["r10-0"]
        await nothing_left(society)

    run_simulation(main)


@pytest.mark.parametrize("seed", range(2))
def test_sequences_of_a_dead_engine_go_before_those_that_have_not_run_yet(model_dir, seed):
    count = 60

    async def main() -> None:
        society = await start(model_dir, seed, {"max_num_seqs": 4}, engine=2)
        tap = Tap(society)
        asked = [asyncio.create_task(society.ask(request(number, 20))) for number in range(count)]
        await asyncio.sleep(0.1)
        before = len(tap.placed)
        society.kill("engine0")
        for number, answer in enumerate(await asyncio.gather(*asked)):
            check(answer, number, 20)
        again = [number for number in numbers(tap.placed[before:]) if number in set(numbers(tap.placed[:before]))]
        assert again, "something ran on the engine that died"
        later = list(numbers(tap.placed[before:]))
        after_loss = later[later.index(again[0]) :]
        assert sorted(after_loss[: len(again)]) == sorted(again), "before all others"
        await nothing_left(society)

    run_simulation(main, seed)


@pytest.mark.parametrize("seed", range(2))
def test_gateways_share_an_engine_and_none_starves(model_dir, seed):
    async def main() -> None:
        society = await start(model_dir, seed, {"max_num_seqs": 8}, gateway=2)
        crowd = [asyncio.create_task(society.ask(request(number, 20))) for number in range(400)]
        await asyncio.sleep(0.5)
        others = await asyncio.gather(*(society.ask(request(1000 + i), "gateway1") for i in range(5)))
        for number, answer in enumerate(others):
            check(answer, 1000 + number)
        assert sum(task.done() for task in crowd) < 200, "the newcomers did not wait for all of the others"
        await asyncio.gather(*crowd)
        await nothing_left(society)

    run_simulation(main, seed)


@pytest.mark.matrix("B-06")
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    "subject", ["eng.*.*.ctl", "det.*.*.ctl", "gw.*.*.ctl", "inbox.>", "det.*.*.tok", "gw.*.*.txt", "hb.>"]
)
def test_with_a_full_queue_any_lost_message_is_repaired(model_dir, subject, seed):
    async def main() -> None:
        society = await start(model_dir, seed, {"max_num_seqs": 4}, engine=2, detokenizer=2)
        fault = society.bus.drop(PREFIX + subject, 0.2)
        answers = await asyncio.gather(*(society.ask(request(number, 8)) for number in range(40)))
        for number, answer in enumerate(answers):
            check(answer, number, 8)
        fault.remove()
        await nothing_left(society)

    run_simulation(main, seed)


def is_a(delivery: Delivery, *kinds: type[Message]) -> bool:
    return any(delivery.payload[2:].startswith(kind.__name__.encode()) for kind in kinds)


def test_what_a_living_gateway_released_is_dropped_although_every_message_that_says_so_is_lost(model_dir):
    async def main() -> None:
        society = await start(model_dir)
        fault = society.bus.drop(f"{PREFIX}>", lambda delivery: is_a(delivery, Done, Cancel, CloseStream))
        check(await society.ask(request(1)), 1)
        generation = gateway_actor(society).backend.generate(request(2, 100))
        await anext(generation.updates())
        await generation.cancel("the client left")
        assert len(society.engines()[0].actor.sequences) == 2
        await asyncio.sleep(limits.OWNERSHIP_CHECK_S + 3 * limits.HEARTBEAT_INTERVAL_S)
        assert len(society.engines()[0].actor.sequences) == 0
        await nothing_left(society)
        assert fault.hits > 2

    run_simulation(main)


def test_an_engine_that_is_alive_but_takes_nothing_ends_in_an_error(model_dir):
    async def main() -> None:
        society = await start(model_dir)
        society.bus.drop(PREFIX + "eng.*.*.ctl")
        began = asyncio.get_running_loop().time()
        answers = await asyncio.gather(*(society.ask(request(number)) for number in range(20)))
        assert {answer.error.code for answer in answers if answer.error} == {"server_is_overloaded"}
        assert all(answer.ends == 1 for answer in answers)
        assert asyncio.get_running_loop().time() - began < 2 * limits.QUEUE_WAIT_S

    run_simulation(main)


def test_without_a_detokenizer_running_and_waiting_requests_end_with_an_error(model_dir):
    async def main() -> None:
        society = await start(model_dir, flags={"max_num_seqs": 2})
        asked = [asyncio.create_task(society.ask(request(number, 100))) for number in range(10)]
        await asyncio.sleep(0.1)
        society.kill("detokenizer0")
        for answer in await asyncio.gather(*asked):
            assert answer.error is not None
            assert answer.error.code == "no_detokenizer"
        await nothing_left(society)

    run_simulation(main)


@pytest.mark.slow
def test_forty_thousand_live_sequences_fit_the_bus(model_dir, monkeypatch):
    """No message grows with the number of sequences beyond its bound, and nobody is taken for dead or lost."""
    monkeypatch.setattr(doubles, "check_core", lambda core: None)
    requests, choices = 2500, 16

    async def main() -> None:
        society = await start(
            model_dir,
            flags={"max_num_seqs": 2048, "max_num_batched_tokens": 2048},
            step_s=0.5,
            engine=10,
            detokenizer=5,
        )
        actor, tap, oversized = gateway_actor(society), Tap(society), transport.num_refused()
        params = SamplingParams(max_tokens=100, temperature=1.0, seed=3)
        generations = [
            actor.backend.generate(
                GenerationRequest(
                    request_id=f"r{i}",
                    model="",
                    params=params,
                    inputs=PromptInputs(token_ids=(tokens_of(i),)),
                    n=choices,
                )
            )
            for i in range(requests)
        ]
        await asyncio.sleep(4.0)
        astray = [
            (generation.error, sequence)
            for generation in generations
            for sequence in generation.sequences
            if generation.over or sequence.phase is not Phase.RUNNING or sequence.losses
        ]
        assert not astray, astray[:3]
        live = sum(engine.actor.sequences.num_live for engine in society.engines())
        assert live == requests * choices
        assert actor.backend.status().num_waiting == 0
        assert len(tap.placed) == live, "none was taken for lost and placed again"
        assert {beat.id for beat in actor.engines()} == {f"engine{i}" for i in range(10)}
        assert tap.largest["hb"] < 1000
        assert max(tap.largest.values()) <= limits.BATCH_BYTES_MAX
        assert transport.num_refused() == oversized
        assert not any(society.bus.counters[name] for name in ("dropped", "slow_consumer", "lost_partition"))
        assert sum(engine.actor.publisher.unsent for engine in society.engines()) == 0
        for generation in generations:
            await generation.cancel("the test is over")
        await asyncio.sleep(limits.OWNERSHIP_CHECK_S + 2.0)
        assert sum(len(engine.actor.sequences) for engine in society.engines()) == 0

    run_simulation(main)
