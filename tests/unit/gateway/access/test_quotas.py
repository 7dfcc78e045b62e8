"""Limits of keys at several gateways that share a store, in virtual time."""

import asyncio
import logging

import pytest

from antiphon.services.gateway.edge.access.call import Call
from antiphon.services.gateway.edge.access.guard import GuardedGeneration
from antiphon.services.gateway.edge.access.quotas import Quotas, duration_text
from antiphon.services.gateway.edge.access.usage import UsageLedger
from antiphon.services.gateway.path.generation import GenerationRequest, PromptInputs
from antiphon.shared import limits
from antiphon.shared.deployment import stores
from antiphon.shared.errors import ServiceError
from antiphon.shared.parameters.sampling import SamplingParams
from antiphon.shared.security.api_keys import ApiKey
from antiphon.shared.subjects import Subjects
from tests.integration.edge import ScriptedBackend
from tests.support.memory import MemoryBus
from tests.support.simulation import SimClock, run_simulation


def key(**more) -> ApiKey:
    return ApiKey(name="team", **more)


class Gateways:
    """Gateways with one store on one bus."""

    def __init__(self, count: int) -> None:
        self.bus = MemoryBus(1, (0.0001, 0.001))
        self.all = [self._one(f"g{number}") for number in range(count)]

    def _one(self, name: str) -> Quotas:
        transport = self.bus.connect(name)
        store = transport.key_value_store(stores.quotas(Subjects()), timeout_s=limits.QUOTA_STORE_TIMEOUT_S)
        return Quotas(clock=SimClock(), gateway=name, store=store)

    @property
    def operations(self) -> int:
        return sum(bucket.operations for bucket in self.bus.buckets.values())


async def admitted(quotas: Quotas, limited: ApiKey, tokens: int = 1) -> bool:
    try:
        admission = await quotas.of(limited).admit(tokens)
    except ServiceError as error:
        return error.code != "rate_limit_exceeded"
    quotas.of(limited).finish(admission, tokens)
    return True


def test_several_gateways_admit_together_what_the_limit_allows():
    limited = key(requests_per_minute=120)

    async def main() -> None:
        gateways = Gateways(3)
        began = asyncio.get_running_loop().time()
        count = 0
        while asyncio.get_running_loop().time() - began < 60:
            count += sum(await asyncio.gather(*(admitted(each, limited) for each in gateways.all * 2)))
            await asyncio.sleep(0.2)
        # A full bucket, and what it gets in a minute; at the end some may still be in the gateways' shares.
        assert 240 - 3 * 2 <= count <= 241

    run_simulation(main)


def test_most_requests_need_no_round_trip():
    limited = key(requests_per_minute=6000, tokens_per_minute=600_000)

    async def main() -> None:
        gateways = Gateways(1)
        for _ in range(1000):
            assert await admitted(gateways.all[0], limited, 20)
            await asyncio.sleep(0.02)
        assert gateways.operations < 4 * 20 / limits.QUOTA_LEASE_S

    run_simulation(main)


def test_what_was_reserved_and_not_used_comes_back_and_what_was_used_beyond_is_owed():
    limited = key(tokens_per_minute=6000)

    async def main() -> None:
        quotas = Gateways(1).all[0]
        quota = quotas.of(limited)
        quota.finish(await quota.admit(6000), 1000)
        assert await admitted(quotas, limited, 4900)
        await asyncio.sleep(60)
        quota.finish(await quota.admit(10), 9000)
        with pytest.raises(ServiceError, match="'team' has reached its limit of 6000 tokens per minute") as raised:
            await quota.admit(1000)
        assert raised.value.status == 429
        assert raised.value.retry_after_s == pytest.approx(40, abs=2)
        await asyncio.sleep(raised.value.retry_after_s)
        assert await admitted(quotas, limited, 1000)

    run_simulation(main)


def test_an_admission_that_is_taken_back_counts_for_nothing():
    limited = key(requests_per_minute=1, tokens_per_minute=100, concurrent_requests=1)

    async def main() -> None:
        quota = Gateways(1).all[0].of(limited)
        for _ in range(5):
            quota.withdraw(await quota.admit(100))
        quota.finish(await quota.admit(100), 100)
        with pytest.raises(ServiceError):
            await quota.admit(1)

    run_simulation(main)


def test_a_cancelled_admission_reserves_nothing_at_whatever_moment_it_is_cancelled():
    limited = key(requests_per_minute=3, tokens_per_minute=300, concurrent_requests=1)

    async def main() -> None:
        for turns in range(40):
            quotas = Gateways(1).all[0]
            admitting = asyncio.create_task(quotas.of(limited).admit(300))
            for _ in range(turns):
                await asyncio.sleep(0.0001)
            if admitting.done():
                break
            admitting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await admitting
            await asyncio.sleep(0.1)
            assert await admitted(quotas, limited, 300), turns
            await asyncio.sleep(3 * limits.QUOTA_LEASE_S)
            assert not quotas.of(limited).is_in_use
        assert turns > 3

    run_simulation(main)


def test_a_generation_that_is_cancelled_while_it_is_admitted_gives_its_place_back():
    limited = key(concurrent_requests=1)

    async def main() -> None:
        quota = Gateways(1).all[0].of(limited)
        request = GenerationRequest(
            request_id="r", model="m", params=SamplingParams(), inputs=PromptInputs(texts=("hi",))
        )
        generation = GuardedGeneration(ScriptedBackend(), request, Call(key=limited), quota, UsageLedger())

        async def updates() -> int:
            return len([batch async for batch in generation.updates()])

        running = asyncio.create_task(updates())
        await asyncio.sleep(0)
        await generation.cancel("abort")
        assert await running == 0
        quota.withdraw(await quota.admit(1))

    run_simulation(main)


def test_a_request_above_a_whole_minute_needs_a_full_bucket():
    limited = key(tokens_per_minute=600)

    async def main() -> None:
        quotas = Gateways(1).all[0]
        assert await admitted(quotas, limited, 10_000)
        assert not await admitted(quotas, limited, 10_000)

    run_simulation(main)


def test_requests_in_progress_are_limited_over_all_gateways():
    limited = key(concurrent_requests=3)

    async def main() -> None:
        one, two = (quotas.of(limited) for quotas in Gateways(2).all)
        running = [(quota, await quota.admit(1)) for quota in (one, two, one)]
        for quota in (one, two):
            with pytest.raises(ServiceError, match="3 requests at the same time"):
                await quota.admit(1)
        await asyncio.sleep(3 * limits.QUOTA_HOLD_S)
        with pytest.raises(ServiceError):
            await two.admit(1)
        quota, admission = running.pop()
        quota.finish(admission, 1)
        running.append((one, await one.admit(1)))
        for quota, admission in running:
            quota.finish(admission, 1)
        await asyncio.sleep(2 * limits.QUOTA_LEASE_S)
        assert not one.is_in_use
        assert not two.is_in_use
        running = [await two.admit(1) for _ in range(3)]

    run_simulation(main)


def test_at_one_gateway_a_hundred_at_once_are_admitted_up_to_the_limit():
    limited = key(concurrent_requests=7)

    async def main() -> None:
        quota = Gateways(1).all[0].of(limited)
        results = await asyncio.gather(*(quota.admit(1) for _ in range(100)), return_exceptions=True)
        assert sum(not isinstance(result, ServiceError) for result in results) == 7

    run_simulation(main)


def test_without_the_store_each_gateway_counts_alone_and_says_so_once(caplog):
    limited = key(requests_per_minute=60)
    caplog.set_level(logging.INFO)

    async def main() -> None:
        gateways = Gateways(2)
        gateways.bus.has_store = False
        began = asyncio.get_running_loop().time()
        counts = [sum([await admitted(quotas, limited) for _ in range(100)]) for quotas in gateways.all]
        assert counts == [60, 60]
        assert asyncio.get_running_loop().time() - began < 4 * limits.QUOTA_STORE_TIMEOUT_S, "no request waits again"
        assert caplog.text.count("counted by each gateway alone") == 2
        await asyncio.sleep(60)
        gateways.bus.has_store = True
        for quotas in gateways.all:
            await admitted(quotas, limited)
        assert caplog.text.count("together again") == 2
        assert sum([await admitted(quotas, limited) for quotas in gateways.all for _ in range(60)]) <= 60

    run_simulation(main)


def test_headers_tell_what_is_left():
    limited = key(requests_per_minute=60, tokens_per_minute=6000)

    async def main() -> None:
        quota = Gateways(1).all[0].of(limited)
        await quota.admit(500)
        assert quota.headers() == {
            "x-ratelimit-limit-requests": "60",
            "x-ratelimit-remaining-requests": "59",
            "x-ratelimit-reset-requests": "999ms",  # the round trip took a moment
            "x-ratelimit-limit-tokens": "6000",
            "x-ratelimit-remaining-tokens": "5500",
            "x-ratelimit-reset-tokens": "4.999s",
        }
        assert Quotas(clock=SimClock()).of(key(concurrent_requests=1)).headers() == {}

    run_simulation(main)


def test_a_changed_key_has_its_new_limits_at_once():
    async def main() -> None:
        quotas = Gateways(1).all[0]
        assert sum([await admitted(quotas, key(requests_per_minute=60)) for _ in range(80)]) == 60
        assert not await admitted(quotas, key(requests_per_minute=10))
        assert await admitted(quotas, key())
        assert await admitted(quotas, key(tokens_per_minute=500), 500), "a new limit begins with a full bucket"
        assert not await admitted(quotas, key(tokens_per_minute=500), 500)

    run_simulation(main)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0ms"), (0.0201, "21ms"), (1, "1s"), (1.5, "1.5s"), (59.9999, "60s"), (360, "6m0s"), (3723, "1h2m3s")],
)
def test_durations_are_written_as_clients_read_them(seconds: float, text: str):
    assert duration_text(seconds) == text


def test_a_request_may_need_several_of_the_places_that_all_gateways_share():
    limited = key(concurrent_requests=4)

    async def main() -> None:
        gateways = Gateways(2)
        first, second = (each.of(limited) for each in gateways.all)
        three = await first.admit(0, places=3)
        with pytest.raises(ServiceError):
            await second.admit(0, places=2)
        one = await second.admit(0)
        for each in (first, second):
            with pytest.raises(ServiceError):
                await each.admit(0)
            # Tokens for a request that has its place already need no further one.
            each.withdraw(await each.admit(5, requests=0, places=0))
        first.finish(three, 0)
        await asyncio.sleep(2 * limits.QUOTA_LEASE_S)
        second.finish(await second.admit(0, places=3), 0)
        second.withdraw(one)
        await asyncio.sleep(3 * limits.QUOTA_LEASE_S)
        assert not first.is_in_use
        assert not second.is_in_use

    run_simulation(main)
