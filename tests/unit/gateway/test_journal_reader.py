"""How a gateway reads the journal of another one for many streams at once."""

import asyncio

import pytest

from antiphon.services.gateway.guests.resume import journal_reader
from antiphon.services.gateway.guests.resume.journal_reader import JournalReader
from antiphon.services.gateway.guests.resume.record import JournalEntry, Progress, encoded
from antiphon.shared.bus.durable_log import Logged, LogUnavailableError

JOURNAL = "journal of g1"
NAMES = [f"r{number}" for number in range(32)]


def entry(name: str, first: int, tokens: bytes = b"\1\0\0\0") -> JournalEntry:
    return JournalEntry(name, 1, (Progress(index=0, first=first, tokens=tokens),))


class CountedLog:
    """A log of which only reads are needed."""

    def __init__(self, messages: list[list[JournalEntry]]) -> None:
        self.messages = messages
        self.reads: list[int] = []
        self.fails = False

    async def all_following(self, subject: str, sequence: int) -> list[Logged]:
        assert subject == JOURNAL
        self.reads.append(sequence)
        seen = len(self.messages)
        await asyncio.sleep(0.001)
        if self.fails:
            raise LogUnavailableError("it does not answer")
        numbered = enumerate(self.messages[:seen], start=1)
        return [Logged(number, encoded(tuple(one))) for number, one in numbered if number >= sequence]


def reader_of(log: CountedLog) -> JournalReader:
    return JournalReader(log)  # pyright: ignore[reportArgumentType]


async def test_streams_that_are_taken_over_together_share_reads_and_get_their_own_entries() -> None:
    log = CountedLog([[entry(name, position) for name in NAMES] for position in range(5)])
    reader = reader_of(log)
    found = await asyncio.gather(*(reader.entries(JOURNAL, 1 + index % 3, name) for index, name in enumerate(NAMES)))
    assert log.reads == [1]
    for index, (name, entries) in enumerate(zip(NAMES, found, strict=True)):
        assert entries == [entry(name, position) for position in range(index % 3, 5)]


async def test_a_stream_that_asks_during_a_read_gets_what_was_written_before_it_asked() -> None:
    log = CountedLog([[entry("r0", 0)]])
    reader = reader_of(log)
    first = asyncio.create_task(reader.entries(JOURNAL, 1, "r0"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert log.reads == [1]
    log.messages.append([entry("r1", 0)])
    assert await reader.entries(JOURNAL, 1, "r1") == [entry("r1", 0)]
    assert await first == [entry("r0", 0)]


async def test_a_later_stream_reads_only_what_has_been_added_since() -> None:
    log = CountedLog([[entry(name, position) for name in NAMES] for position in range(5)])
    reader = reader_of(log)
    assert len(await reader.entries(JOURNAL, 2, "r0")) == 4
    assert len(await reader.entries(JOURNAL, 3, "r1")) == 3
    log.messages.append([entry("r1", 5)])
    assert await reader.entries(JOURNAL, 5, "r1") == [entry("r1", 4), entry("r1", 5)]
    assert log.reads == [2, 6, 6]
    assert len(await reader.entries(JOURNAL, 1, "r2")) == 5  # it needs what was not read
    assert log.reads == [2, 6, 6, 1]


async def test_a_journal_is_forgotten_after_some_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_reader, "KEPT_S", 0.0)
    log = CountedLog([[entry("r0", 0)]])
    reader = reader_of(log)
    for _ in range(2):
        assert await reader.entries(JOURNAL, 1, "r0") == [entry("r0", 0)]
        await asyncio.sleep(0.01)
    assert log.reads == [1, 1]


async def test_a_failed_read_fails_the_streams_that_waited_for_it_and_no_later_ones() -> None:
    log = CountedLog([[entry("r0", 0), entry("r1", 0)]])
    log.fails = True
    reader = reader_of(log)
    results = await asyncio.gather(*(reader.entries(JOURNAL, 1, name) for name in ("r0", "r1")), return_exceptions=True)
    assert [type(one) for one in results] == [LogUnavailableError, LogUnavailableError]
    log.fails = False
    assert await reader.entries(JOURNAL, 1, "r1") == [entry("r1", 0)]


async def test_a_stream_whose_client_goes_does_not_disturb_the_others() -> None:
    log = CountedLog([[entry("r0", 0), entry("r1", 0)]])
    reader = reader_of(log)
    gone = asyncio.create_task(reader.entries(JOURNAL, 1, "r0"))
    other = asyncio.create_task(reader.entries(JOURNAL, 1, "r1"))
    await asyncio.sleep(0)
    gone.cancel()
    assert await other == [entry("r1", 0)]
    with pytest.raises(asyncio.CancelledError):
        await gone
    assert await reader.entries(JOURNAL, 1, "r0") == [entry("r0", 0)]
