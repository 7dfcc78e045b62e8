"""The parts of a log that several gateways fill, in virtual time, on a bus within the process."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.services.gateway.edge.access.log_part import GatewayLogs, LogPart
from antiphon.shared.actors.host import Host
from antiphon.shared.bus.durable_log import LogConfig
from antiphon.shared.subjects import Subjects
from tests.support.memory import MemoryBus
from tests.support.simulation import SimClock, run_simulation

SUBJECTS = Subjects("test")
MAX_BYTES, MAX_AGE_S, SIZE = 32_000, 600.0, 872
"""With what is added to each message, an entry has 1000 bytes, so that one gateway alone keeps 14 of them."""


class Gateways:
    """Gateways that share a log; `num` of them are told to live."""

    def __init__(self, num: int, clears: bool = False) -> None:
        self.bus, self.num = MemoryBus(1, (0.0001, 0.001)), num
        self.config = LogConfig(
            name="log", subject="test.*", storage="memory", max_age_s=MAX_AGE_S, max_bytes=MAX_BYTES,
            per_subject=0 if clears else 1, clears=clears,
        )  # fmt: skip
        self.parts = [self._one(f"g{number}") for number in range(num)]

    def _one(self, name: str) -> LogPart:
        host = Host(transport=self.bus.connect(name), subjects=SUBJECTS, clock=SimClock(), id=name, instance_id="boot")
        return GatewayLogs(host, "memory", lambda: self.num).part(self.config)

    async def append(self, number: int, key: str, name: str, size: int = SIZE) -> None:
        assert await self.parts[number].append(key, f"test.{name}", bytes(size) or b"x") is not None

    async def stored(self) -> dict[str, int]:
        """Bytes by subject, once everything is dropped that must go."""
        await asyncio.sleep(1)
        found = [one for one in self.bus.logs["log"] if one.payload]
        return {name: sum(len(one.payload or b"") for one in found if one.subject == name) for name, _ in found}


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 3),
    st.booleans(),
    st.lists(st.tuples(st.integers(0, 2), st.sampled_from("ab"), st.integers(0, 9), st.integers(1, 3000)), max_size=80),
)
def test_the_log_is_never_full_and_a_key_below_its_share_loses_nothing(
    num: int, clears: bool, calls: list[tuple[int, str, int, int]]
) -> None:
    async def main() -> None:
        gateways = Gateways(num, clears)
        await gateways.append(0, "carol", "c")
        for number, key, name, size in calls:
            await gateways.append(number % num, key, f"{key}{name}", size)
            now = sum(len(one.payload or b"") for one in gateways.bus.logs["log"])
            assert now - size <= MAX_BYTES * num // (num + 1), "writers wait until there is room"
        stored = await gateways.stored()
        assert sum(stored.values()) <= MAX_BYTES * num // (num + 1)
        assert stored["test.c"] == SIZE

    run_simulation(main)


def test_entries_that_are_too_old_do_not_count() -> None:
    async def main() -> None:
        gateways = Gateways(1)
        for number in range(10):
            await gateways.append(0, "alice", f"a{number}")
        await asyncio.sleep(MAX_AGE_S + 1)
        for number in range(14):
            await gateways.append(0, "bob", f"b{number}")
        stored = await gateways.stored()
        assert len([name for name in stored if name.startswith("test.b")]) == 14

    run_simulation(main)


def test_with_more_gateways_each_has_a_smaller_part() -> None:
    async def main() -> None:
        gateways = Gateways(1)
        for number in range(14):
            await gateways.append(0, "bob", f"b{number}")
        assert len(await gateways.stored()) == 14
        gateways.num = 3
        await asyncio.sleep(2)
        await gateways.append(0, "alice", "a")
        stored = await gateways.stored()
        assert sorted(stored) == ["test.a", *(f"test.b{number}" for number in (10, 11, 12, 13, 8, 9))]

    run_simulation(main)


def test_what_could_not_be_dropped_is_dropped_when_the_bus_is_back(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        gateways = Gateways(1)
        for number in range(14):
            await gateways.append(0, "bob", f"b{number}")
        writing = asyncio.create_task(gateways.append(0, "bob", "b14"))
        while not writing.done():
            await asyncio.sleep(0)
        gateways.bus.has_store = False
        await asyncio.sleep(10)
        gateways.bus.has_store = True
        assert len(await gateways.stored()) == 15
        assert "has more of this gateway than it should" in caplog.text
        await gateways.append(0, "bob", "b15")
        stored = await gateways.stored()
        assert len(stored) == 14
        assert "test.b0" not in stored
        assert "test.b1" not in stored

    run_simulation(main)
