"""One usage record for each request, with true numbers, whatever happens to engines and clients. In virtual time."""

import asyncio
from collections import Counter

import pytest

from antiphon.services.gateway.edge.access.guard import GuardedBackend
from antiphon.services.gateway.edge.access.quotas import Quotas
from antiphon.services.gateway.edge.access.usage import Receiver, UsageLedger
from antiphon.services.gateway.path.generation import GenerationRequest, PromptInputs
from antiphon.shared.errors import ServiceError
from antiphon.shared.messages import UsageRecord
from antiphon.shared.parameters.sampling import SamplingParams
from tests.sim.society import Society, make_tokenizer
from tests.support.simulation import SimClock, run_simulation

COUNT, MAX_TOKENS = 30, 20


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> str:
    return make_tokenizer(tmp_path_factory.mktemp("model"))


def request(number: int) -> GenerationRequest:
    prompt = tuple(f"{number:>03}-{'x' * 12}".encode())
    params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True)
    return GenerationRequest(request_id=f"r{number}", model="", params=params, inputs=PromptInputs(token_ids=(prompt,)))


class Gateway:
    """A society with the backend that the HTTP edge has, and what it recorded."""

    def __init__(self, society: Society) -> None:
        self.records: list[UsageRecord] = []
        actor = society.members["gateway0"].service.actor
        ledger = UsageLedger("gateway0", [Receiver("test", self._take)])
        self.backend = GuardedBackend(actor.backend, Quotas(clock=SimClock()), ledger)

    async def _take(self, records) -> None:
        self.records += records

    async def ask(self, number: int, leave_after: int = 10**6) -> int:
        """Returns how many tokens the client got. It leaves when it has got `leave_after`."""
        generation, count = self.backend.generate(request(number)), 0
        try:
            async for batch in generation.updates():
                count += sum(len(update.token_ids) for update in batch)
                if count >= leave_after:
                    break
        except ServiceError:
            pass
        finally:
            await generation.cancel("the client left")
            await generation.cancel("again")
        return count


async def start(model_dir: str, seed: int, engines: int) -> tuple[Society, Gateway]:
    society = Society(model_dir, seed, max_num_seqs=8, enable_prefix_caching=False)
    for kind, count in (("gateway", 1), ("tokenizer", 1), ("detokenizer", 1), ("engine", engines)):
        for _ in range(count):
            await society.start(kind)
    await society.ready()
    return society, Gateway(society)


def test_without_faults_what_is_computed_is_prompt_and_output(model_dir):
    async def main() -> None:
        _, gateway = await start(model_dir, 0, 1)
        assert await asyncio.gather(*map(gateway.ask, range(COUNT))) == [MAX_TOKENS] * COUNT
        await asyncio.sleep(0.1)
        assert Counter(record.request_id for record in gateway.records) == {f"r{n}": 1 for n in range(COUNT)}
        for record in gateway.records:
            assert (record.outcome, record.finish_reasons, record.model) == ("completed", ("length",), "")
            assert (record.prompt_tokens, record.completion_tokens) == (16, MAX_TOKENS)
            assert (record.cached_tokens, record.computed_tokens, record.discarded_tokens) == (0, 16 + MAX_TOKENS, 0)

    run_simulation(main)


@pytest.mark.matrix("R-02")
@pytest.mark.parametrize("seed", range(2))
def test_what_a_dead_engine_had_computed_counts_again(model_dir, seed):
    async def main() -> None:
        society, gateway = await start(model_dir, seed, 2)
        asked = [asyncio.create_task(gateway.ask(number)) for number in range(COUNT)]
        await asyncio.sleep(0.12)
        society.kill("engine0")
        assert await asyncio.gather(*asked) == [MAX_TOKENS] * COUNT
        await asyncio.sleep(0.1)
        assert Counter(record.request_id for record in gateway.records) == {f"r{n}": 1 for n in range(COUNT)}
        again = [record.computed_tokens - 16 - MAX_TOKENS for record in gateway.records]
        assert all(record.outcome == "completed" for record in gateway.records)
        assert any(again)
        # Moved once: the prompt and the tokens so far were computed a second time.
        assert all(tokens == 0 or 16 <= tokens < 16 + MAX_TOKENS for tokens in again), again

    run_simulation(main, seed)


def test_clients_that_leave_and_engines_that_are_gone_leave_one_record_each(model_dir):
    async def main() -> None:
        society, gateway = await start(model_dir, 0, 1)
        counts = await asyncio.gather(*(gateway.ask(number, leave_after=1 + number % 7) for number in range(COUNT)))
        await asyncio.sleep(0.1)
        assert {record.outcome for record in gateway.records} == {"cancelled"}
        shown = {record.request_id: record.completion_tokens for record in gateway.records}
        assert shown == {f"r{number}": count for number, count in enumerate(counts)}
        gateway.records.clear()
        asked = [asyncio.create_task(gateway.ask(number)) for number in range(COUNT)]
        await asyncio.sleep(0.1)
        society.kill("engine0")
        await asyncio.gather(*asked)
        await asyncio.sleep(0.1)
        assert Counter(record.request_id for record in gateway.records) == {f"r{n}": 1 for n in range(COUNT)}
        assert {record.outcome for record in gateway.records} == {"failed"}
        assert {record.error_code for record in gateway.records} == {"no_engine"}

    run_simulation(main)
