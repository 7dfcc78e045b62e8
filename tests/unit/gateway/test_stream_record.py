"""What the journal of a stream has of its engines."""

import msgpack

from services.gateway.generation import SequenceUpdate
from services.gateway.streams.journal import Journal, JournaledStream
from services.gateway.streams.record import Accepted, JournalEntry, StreamRecord, accepted_of, decoded_entries
from shared.codec import pack_ids

RECORD = StreamRecord("r", "/v1/completions", b"{}", "", "", "", 0, None, "g", "i", 1, 0.0, True, 1)
NUM = 20
FIRST, SECOND = ("engine-1", "a"), ("engine-2", "b")


def test_the_engine_is_written_when_it_changes_and_the_last_one_is_found() -> None:
    stream = JournaledStream(RECORD, (Accepted(),), Journal(store=None), on_lost=lambda: None)  # type: ignore[arg-type]
    entries: list[JournalEntry] = []
    for number, engine in enumerate((FIRST, FIRST, SECOND, SECOND)):
        stream.saw(SequenceUpdate(0, "", (number,), engine=engine))
        news = stream.news()
        entries.append(JournalEntry("r", 1, news))
        stream.written(news)
    assert [entry.progress[0].engine for entry in entries] == [FIRST, None, SECOND, None]
    (found,) = accepted_of(RECORD, entries)
    assert (found.token_ids, found.engine) == ([0, 1, 2, 3], SECOND)
    (progress,) = stream.progress()  # of a renewed record, from which on the journal is read
    assert progress.engine == SECOND
    assert accepted_of(RECORD, entries[:2])[0].engine == FIRST


def test_entries_of_gateways_that_write_no_engines_are_read() -> None:
    written: bytes = msgpack.packb([["r", 1, [[0, 0, pack_ids([7]), 0.0, 0, False, 0, 0.0]]]])  # pyright: ignore[reportAssignmentType]
    (found,) = accepted_of(RECORD, list(decoded_entries(written)))
    assert (found.token_ids, found.engine) == ([7], None)


def test_output_is_added_to_what_is_accepted_of_its_sequence() -> None:
    stream = JournaledStream(RECORD, (Accepted(), Accepted()), Journal(store=None), on_lost=lambda: None)  # type: ignore[arg-type]
    for number in range(NUM):
        reason = "stop" if number == NUM - 1 else None
        stream.saw(
            SequenceUpdate(1, "", (number,), finish_reason=reason, num_cached_tokens=5, cumulative_logprob=-number / 2)
        )
    first, second = stream.accepted
    assert (first.token_ids, first.ended) == ([], False)
    assert second.token_ids == [*range(NUM)]
    assert (second.ended, second.num_cached) == (True, 5)
    assert (second.last_from, second.last_from_logprob) == (NUM - 1, 1 - NUM / 2)
    assert second.cumulative_logprob == (1 - NUM) / 2
