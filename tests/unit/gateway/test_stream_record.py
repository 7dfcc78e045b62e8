"""What the journal has of a stream's output, and what is found of it again."""

import asyncio

import msgpack
import pytest

from antiphon.services.gateway.guests.resume.journal import Journal, JournaledStream
from antiphon.services.gateway.guests.resume.record import (
    Accepted,
    JournalEntry,
    StreamRecord,
    accepted_of,
    decoded_entries,
)
from antiphon.services.gateway.path.generation import ResumedOutput
from antiphon.services.gateway.path.sequence_state import Address, SequenceState
from antiphon.shared import limits
from antiphon.shared.bus.durable_log import LogUnavailableError
from antiphon.shared.codec import pack_ids
from antiphon.shared.messages import TextEvent

RECORD = StreamRecord(
    request_id="r",
    path="/v1/completions",
    body=b"{}",
    key_name="",
    client_request_id="",
    timeout="",
    created=0,
    seed=None,
    owner_id="g",
    owner_instance_id="i",
    fence=1,
    renewed_at=0.0,
    outlives_client=True,
    journal_from=1,
)
NUM = 20
FIRST, SECOND = Address("engine-1", "a"), Address("engine-2", "b")


def sequence(engine: Address = FIRST) -> SequenceState:
    found = SequenceState(sequence_id="r-0")
    found.start_placement(engine, None, 0.0)
    found.accepted(0.0)
    return found


def say(state: SequenceState, number: int, reason: str | None = None, logprob: float = 0.0) -> None:
    assert state.engine is not None
    event = TextEvent(
        sequence_id="r-0", attempt=state.attempt, position=len(state.token_ids), token_ids=(number,),
        text_offset=state.text_length, text="a", finish_reason=reason, num_cached_tokens=5, cumulative_logprob=logprob,  # type: ignore[arg-type]
    )  # fmt: skip
    state.apply_event(event, state.engine, 0.0)


def journaled(*outputs: SequenceState, resumed: ResumedOutput | None = None) -> JournaledStream:
    stream = JournaledStream(RECORD, tuple(Accepted() for _ in outputs), on_lost=lambda: None)
    stream.follow(outputs, resumed)
    return stream


def test_the_engine_is_written_when_it_changes_and_the_last_one_is_found() -> None:
    state = sequence()
    stream = journaled(state)
    entries: list[JournalEntry] = []
    for number in range(4):
        if number == 2:
            state.lost()
            state.start_placement(SECOND, None, 0.0)
        say(state, number)
        news = stream.news()
        entries.append(JournalEntry("r", 1, news))
        stream.written(news)
    assert [entry.progress[0].engine for entry in entries] == [FIRST, None, SECOND, None]
    (found,) = accepted_of(RECORD, entries)
    assert (found.token_ids, found.engine) == ([0, 1, 2, 3], SECOND)
    state.accepted(0.0)
    state.lost()
    (progress,) = stream.progress()  # of a renewed record, from which on the journal is read
    assert progress.engine == SECOND
    assert accepted_of(RECORD, entries[:2])[0].engine == FIRST


def test_entries_of_gateways_that_write_no_engines_are_read() -> None:
    written: bytes = msgpack.packb([["r", 1, [[0, 0, pack_ids([7]), 0.0, 0, False, 0, 0.0]]]])  # pyright: ignore[reportAssignmentType]
    (found,) = accepted_of(RECORD, list(decoded_entries(written)))
    assert (found.token_ids, found.engine) == ([7], None)


def test_what_is_accepted_is_the_output_of_the_sequences() -> None:
    silent, state = sequence(), sequence()
    stream = journaled(silent, state)
    for number in range(NUM):
        say(state, number, "stop" if number == NUM - 1 else None, -number / 2)
    first, second = stream.accepted
    assert (first.token_ids, first.ended) == ([], False)
    assert second.token_ids == [*range(NUM)]
    assert (second.ended, second.num_cached) == (True, 5)
    assert (second.last_from, second.last_from_logprob) == (NUM - 1, 1 - NUM / 2)
    assert second.cumulative_logprob == (1 - NUM) / 2
    assert [one.index for one in stream.news()] == [1]
    stream.written(stream.news())
    assert not stream.has_news


def test_before_the_first_output_what_is_accepted_is_that_of_the_former_run() -> None:
    replayed = Accepted()
    replayed.token_ids = [4, 5]
    stream = JournaledStream(RECORD, (replayed,), on_lost=lambda: None)
    assert (stream.accepted, stream.has_news) == ([replayed], False)
    (progress,) = stream.progress()
    assert (progress.first, progress.end) == (0, 2)


def test_a_stream_that_is_resumed_twice_has_the_number_of_cached_tokens_of_its_first_run() -> None:
    state = sequence()
    stream = journaled(
        state,
        resumed=ResumedOutput(
            token_ids=((),), cumulative_logprobs=(0.0,), num_cached_tokens=(1,), fence=2, engines=(None,)
        ),
    )
    say(state, 0)
    assert (state.num_cached_tokens, stream.accepted[0].num_cached, stream.news()[0].num_cached) == (5, 1, 1)


def test_a_sequence_that_has_failed_has_not_ended() -> None:
    state = sequence()
    stream = journaled(state)
    say(state, 0)
    stream.written(stream.news())
    event = TextEvent(
        sequence_id="r-0", attempt=1, position=1, token_ids=(), text_offset=1, text="", finish_reason="error"
    )
    state.apply_event(event, FIRST, 0.0)
    assert not stream.has_news
    assert not stream.accepted[0].ended


class Store:
    """A store of which the first `failures` writes fail."""

    def __init__(self, failures: int) -> None:
        self.failures = failures
        self.entries: list[JournalEntry] = []

    async def open(self) -> None:
        pass

    async def note(self, entries: tuple[JournalEntry, ...]) -> int:
        if self.failures:
            self.failures -= 1
            raise LogUnavailableError("away")
        self.entries += entries
        return len(self.entries)


@pytest.mark.parametrize("failures", [0, 2])
async def test_the_last_tokens_of_an_ended_stream_are_written_once(
    failures: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "STREAM_JOURNAL_S", 0.001)
    monkeypatch.setattr(limits, "STREAM_STORE_TIMEOUT_S", 0.001)
    store = Store(failures)
    journal = Journal(store)  # type: ignore[arg-type]
    state = sequence()
    stream = journaled(state)
    journal.add(stream)
    say(state, 0)
    say(state, 1, "stop")
    journal.remove(stream)
    assert not journal.running
    running = asyncio.create_task(journal.run())
    while not store.entries:
        await asyncio.sleep(0.001)
    await asyncio.sleep(0.02)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    (entry,) = store.entries
    assert [(one.first, one.end, one.ended) for one in entry.progress] == [(0, 2, True)]
