"""The record of requests: what is kept, what is not, and how a timeline adds up."""

from typing import Any

import msgspec
import pytest

from antiphon.services.gateway.ops.timeline.recorder import ENGINES_MAX, Recorder
from antiphon.services.gateway.ops.timeline.request_record import RequestRecord
from antiphon.services.gateway.ops.timeline.timeline import phases_of, timeline_of
from antiphon.services.gateway.ops.timeline.trace_events import trace_events_of
from antiphon.services.gateway.path.record import NOT_RECORDED, RequestFacts
from antiphon.shared import limits
from antiphon.shared.messages import KvOrigin, SequenceRef, StepEvent, StepEvents, UsageOutcome
from tests.unit.gateway.step_events import Told, told


class Hand:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def begin(recorder: Recorder, name: str, clock: Hand, key: str = "anonymous") -> RequestRecord:
    record = recorder.begin(RequestFacts(request_id=name, model="toy", key=key), clock())
    assert isinstance(record, RequestRecord)
    return record


def end(record: RequestRecord, outcome: UsageOutcome = "completed", code: str = "") -> None:
    record.ended(outcome, code, 3, 0, 2, ("stop",))


def step(number: int, age_us: int, duration_us: int, start: int, num_tokens: int, num_output: int, name="r-0"):
    shares = {(name, 1): (age_us, start, num_tokens, num_output), ("other-0", 1): (5, 9, 1, 1)}
    return Told(
        StepEvent(
            step=number,
            duration_us=duration_us,
            num_tokens=num_tokens + 1,
            num_running=2,
            num_waiting=7,
            num_free_blocks=40,
            num_sequences=2,
        ),
        shares,
    )


def test_nothing_is_recorded_without_capacity():
    recorder = Recorder(0)
    assert not recorder.is_on
    assert recorder.begin(RequestFacts(request_id="r", model="toy", key="k"), 0.0) is NOT_RECORDED
    NOT_RECORDED.arrived(0, 3)
    assert recorder.all() == []


def assert_trace_events_agree(found: dict[str, Any]) -> None:
    events = trace_events_of(found)["traceEvents"]
    slices = {(one["pid"], one["name"]): (one["ts"], one["dur"]) for one in events if one["ph"] == "X"}
    assert slices == {
        (1, "request r"): (0, 365_000),
        (1, "admission"): (0, 10_000),
        (1, "tokenization"): (10_000, 20_000),
        (1, "gateway queue"): (30_000, 30_000),
        (1, "engine queue"): (60_000, 50_000),
        (1, "prefill"): (110_000, 150_000),
        (1, "decode"): (260_000, 100_000),
        (1, "delivery"): (360_000, 5_000),
        (1, "token 0 to the client"): (260_000, 1_000),
        (1, "token 1 to the client"): (360_000, 1_000),
        (2, "placed"): (60_000, 240_000),
        (2, "prefill"): (110_000, 100_000),
        (2, "decode"): (270_000, 30_000),
    }
    threads = {(one["pid"], one["tid"]) for one in events if one["ph"] == "M" and one["name"] == "thread_name"}
    assert {(one["pid"], one["tid"]) for one in events if one["ph"] == "X"} <= threads


def test_a_timeline_adds_up_to_the_time_that_the_client_waited():
    clock = Hand()
    recorder = Recorder(4, clock)
    record = begin(recorder, "r", clock)
    for seconds, event in (
        (0.010, lambda: record.admitted()),
        (0.020, lambda: record.tokenized(5)),
        (0.030, lambda: record.placed(0, 1, "engine-1", "detokenizer-1")),
        (0.002, lambda: record.accepted(0, 1)),
        (0.198, lambda: record.arrived(0, 1)),
        (0.001, lambda: record.written(0, 1)),
        (0.099, lambda: record.arrived(0, 1)),
        (0.001, lambda: record.written(0, 1)),
    ):
        clock.now += seconds
        event()
    steps = (step(1, 150_000, 100_000, 0, 5, 1), step(2, 240_000, 30_000, 5, 1, 1))
    recorder.add_steps(told("engine-1", *steps))
    end(record)
    clock.now += 0.004
    record.closed()
    found = timeline_of(record)
    assert found["phases"] == {
        "admission": 0.01,
        "tokenization": 0.02,
        "gateway_queue": 0.03,
        "engine_queue": 0.05,
        "prefill": 0.15,
        "decode": 0.1,
        "delivery": 0.005,
    }
    assert sum(found["phases"].values()) == pytest.approx(found["duration_s"])
    assert found["longest_phase"] == "prefill"
    [sequence] = found["sequences"]
    [attempt] = sequence["attempts"]
    assert (attempt["placed_s"], attempt["accepted_s"], attempt["lost_s"]) == (0.06, 0.062, None)
    first, second = attempt["steps"]
    assert (first["kind"], first["start_s"], first["end_s"], first["gap_s"]) == ("prefill", 0.11, 0.21, 0.05)
    assert (second["kind"], second["gap_s"], second["batch_size"], second["batch_tokens"]) == ("decode", 0.09, 2, 2)
    assert (second["num_waiting"], second["num_free_blocks"]) == (7, 40)
    assert sequence["pieces"] == [
        {"position": 0, "num_tokens": 1, "arrived_s": 0.26, "written_s": 0.261},
        {"position": 1, "num_tokens": 1, "arrived_s": 0.36, "written_s": 0.361},
    ]
    assert_trace_events_agree({**found, "gateway": "gateway-1"})


def test_a_request_in_progress_shows_the_phase_that_it_is_in():
    clock = Hand()
    record = begin(Recorder(4, clock), "r", clock)
    clock.now += 0.5
    assert phases_of(record) == {"admission": 0.5}
    record.admitted()
    clock.now += 2
    assert phases_of(record) == {"admission": 0.5, "tokenization": 2.0}


def test_moves_and_preemptions_show():
    clock = Hand()
    recorder = Recorder(4, clock)
    record = begin(recorder, "r", clock)
    record.placed(0, 1, "engine-1", "d")
    again = step(8, 900, 90, 0, 5, 1)
    again = Told(msgspec.structs.replace(again.event, preempted=(SequenceRef("r-0", 1),)), again.shares)
    recorder.add_steps(told("engine-1", step(7, 800, 80, 0, 5, 0), again))
    clock.now += 1
    record.lost(0, 1, "the engine stopped responding")
    record.placed(0, 2, "engine-2", "d")
    found = timeline_of(record)
    assert (found["moves"], found["preemptions"], found["engines"]) == (1, 1, ["engine-1", "engine-2"])
    first, second = found["sequences"][0]["attempts"]
    assert (first["lost_s"], first["reason"], second["engine"]) == (1.0, "the engine stopped responding", "engine-2")
    assert [each["preempted_before"] for each in first["steps"]] == [False, True]


def test_a_move_has_its_own_time_which_does_not_count_as_generating():
    clock = Hand()
    record = begin(Recorder(4, clock), "r", clock)
    record.admitted()
    record.tokenized(3)
    record.placed(0, 1, "engine-1", "d")
    for _ in range(8):
        clock.now += 1.0
        record.arrived(0, 1)
    clock.now += 0.4
    record.lost(0, 1, "the engine stopped responding")
    clock.now += 0.1
    record.placed(0, 2, "engine-1", "d")
    assert "move" not in phases_of(record), "it has not ended"
    clock.now += 0.145
    record.arrived(0, 1)
    clock.now += 5.0
    record.arrived(0, 1)
    end(record)
    found = timeline_of(record)
    assert found["phases"]["move"] == 0.645
    assert found["phases"]["decode"] == 7.0 + 5.0
    assert found["longest_phase"] == "decode"
    assert sum(found["phases"].values()) == pytest.approx(found["duration_s"])
    assert [one["duration_s"] for one in found["causes"] if one["cause"] == "move"] == [0.645]


def test_a_preemption_has_its_own_time_too():
    clock = Hand()
    recorder = Recorder(4, clock)
    record = begin(recorder, "r", clock)
    record.placed(0, 1, "engine-1", "d")
    clock.now += 0.001
    record.arrived(0, 1)
    again = step(9, 500_000, 90, 0, 5, 1)
    again = Told(msgspec.structs.replace(again.event, preempted=(SequenceRef("r-0", 1),)), again.shares)
    recorder.add_steps(told("engine-1", step(8, 1_000, 80, 0, 5, 1), again))
    clock.now += 0.5
    record.arrived(0, 1)
    end(record)
    phases = phases_of(record)
    assert phases["preemption"] == pytest.approx(0.499, abs=1e-3)
    assert phases["decode"] == pytest.approx(0.5 - phases["preemption"])


def test_parts_of_a_large_message_give_the_same_record_as_the_whole():
    found = list[Any]()
    for in_parts in (False, True):
        recorder = Recorder(4, Hand())
        records = [begin(recorder, name, Hand()) for name in ("r", "q")]
        for record in records:
            record.placed(0, 1, "engine-1", "d", 4, 16)
        first, second = step(8, 900, 90, 0, 5, 1), step(9, 950, 50, 0, 5, 1, "q-0")
        gone = msgspec.structs.replace(second.event, preempted=(SequenceRef("r-0", 1),))
        message = told("engine-1", load(6, 4, 2), load(7, 4, 3), first, Told(gone, second.shares))
        for one in message.sequences if in_parts else (None,):
            recorder.add_steps(message if one is None else msgspec.structs.replace(message, sequences=(one,)))
        found.append([timeline_of(record)["sequences"] for record in records])
    assert found[0] == found[1]


def test_the_latest_requests_are_kept_and_failed_and_slow_ones_longer(monkeypatch):
    monkeypatch.setattr(limits, "RECORD_PINNED_MAX", 1)
    clock = Hand()
    recorder = Recorder(3, clock)
    outcomes: list[tuple[str, float, UsageOutcome]] = [("bad", 0.1, "failed"), ("slow", 9.0, "completed")]
    for name, seconds, outcome in outcomes:
        record = begin(recorder, name, clock)
        clock.now += seconds
        end(record, outcome)
    for number in range(10):
        record = begin(recorder, f"r{number}", clock)
        clock.now += 0.001
        end(record)
    running = begin(recorder, "running", clock)
    assert {one.facts.request_id for one in recorder.all()} == {"bad", "slow", "r7", "r8", "r9", "running"}
    assert recorder.find("chatcmpl-slow") is recorder.find("slow") is not None
    assert recorder.find("r1") is None
    assert recorder.all()[0] is running or running.created >= recorder.all()[0].created


def test_a_record_is_bounded(monkeypatch):
    for name in ("RECORD_STEPS_MAX", "RECORD_PIECES_MAX", "RECORD_MARKS_MAX", "RECORD_RUNNING_MAX"):
        monkeypatch.setattr(limits, name, 3)
    clock = Hand()
    recorder = Recorder(4, clock)
    record = begin(recorder, "r", clock)
    record.placed(0, 1, "engine-1", "d")
    recorder.add_steps(told("engine-1", *(step(n, n, 1, 5 + n, 1, 1) for n in range(10))))
    for _ in range(10):
        record.arrived(0, 1)
    for attempt in range(2, 12):
        record.placed(0, attempt, "engine-1", "d")
    found = timeline_of(record)
    assert len(found["sequences"][0]["attempts"]) == 3
    assert len(found["sequences"][0]["attempts"][0]["steps"]) == 3
    assert found["dropped_events"] == (10 - 3) + (10 - 6) + (11 - 3)
    assert found["completion_tokens"] == 10
    for name in ("a", "b"):
        begin(recorder, name, clock)
    assert recorder.begin(RequestFacts(request_id="c", model="toy", key="k"), clock()) is NOT_RECORDED
    assert recorder.num_unrecorded == 1


def test_a_request_may_take_hours():
    clock = Hand()
    recorder = Recorder(4, clock)
    record = begin(recorder, "r", clock)
    record.placed(0, 1, "engine-1", "d")
    clock.now += 10 * 3600
    record.arrived(0, 1)
    recorder.add_steps(
        told(
            "engine-1",
            step(2**33, 36_000_000_000, 5_000_000_000, 2**20, 1, 1),
        )
    )
    [found] = timeline_of(record)["sequences"][0]["attempts"][0]["steps"]
    assert (found["step"], found["end_s"], found["start_s"]) == (2**33, 36000.0, 31000.0)


def test_contents_are_kept_within_their_bytes_and_go_with_their_records():
    recorder = Recorder(2, content_bytes=10)
    records = [recorder.begin(RequestFacts(request_id=f"r{number}", model="m", key=""), 0.0) for number in range(3)]
    for record in records:
        assert record.keeps_content
        record.content(b"12345")
    kept = [record.data for record in records if isinstance(record, RequestRecord)]
    assert kept == [b"", b"12345", b"12345"]
    assert not Recorder(2).begin(RequestFacts(request_id="r", model="m", key=""), 0.0).keeps_content
    recorder.begin(RequestFacts(request_id="large", model="m", key=""), 0.0).content(b"12345678901")
    assert not any(record.data for record in records if isinstance(record, RequestRecord))


def test_a_key_with_much_content_loses_its_own_and_a_resumed_stream_counts_once():
    recorder = Recorder(8, content_bytes=20)
    alice, first, *rest = [
        recorder.begin(RequestFacts(request_id=name, model="m", key=key), 0.0)
        for name, key in (("a", "alice"), ("s", "bob"), ("s", "bob"), ("b", "bob"), ("c", "bob"), ("d", "bob"))
    ]
    for record in (alice, first, *rest):
        record.content(b"12345")
    kept = [record.data for record in (alice, first, *rest) if isinstance(record, RequestRecord)]
    assert kept == [b"12345", b"", b"", b"12345", b"12345", b"12345"]


def waited(recorder: Recorder, clock: Hand, *messages: StepEvents) -> dict[str, Any]:
    """Returns the placement of a sequence on engine-1 of which these steps tell."""
    record = begin(recorder, "r", clock)
    record.placed(0, 1, "engine-1", "d", 4, 16)
    for message in messages:
        recorder.add_steps(message)
    return timeline_of(record)["sequences"][0]["attempts"][0]


def load(number: int, running: int, free: int) -> Told:
    return Told(
        StepEvent(
            step=number,
            duration_us=50,
            num_tokens=running,
            num_running=running,
            num_waiting=1,
            num_free_blocks=free,
            num_sequences=running,
        )
    )


def test_the_load_of_an_engine_before_the_first_step_of_a_sequence_is_kept():
    found = waited(
        Recorder(4, Hand()),
        Hand(),
        told("engine-1", load(6, 9, 1), load(7, 4, 12)),
        told("engine-2", load(8, 9, 0)),
        told("engine-1", load(8, 3, 20), load(9, 8, 2), step(10, 900, 90, 0, 5, 1), load(11, 7, 7)),
        told("engine-1", step(12, 990, 90, 5, 1, 1)),
    )
    assert (found["batch_size_before"], found["free_blocks_before"], found["block_size"]) == (4, 12, 16)
    assert found["batch_places"] == 4


@pytest.mark.parametrize(
    "before",
    [
        (),
        (load(9, 4, 0),),
        (load(2, 4, 0), load(3, 4, 0), load(4, 4, 0)),
    ],
)
def test_without_the_steps_just_before_it_the_load_is_unknown(before: tuple[Told, ...]):
    steps = (*before, step(10, 900, 90, 0, 5, 1))
    found = waited(Recorder(4, Hand()), Hand(), told("engine-1", *steps))
    assert (found["batch_size_before"], found["free_blocks_before"]) == (None, None)


def test_where_the_kv_of_a_prompt_came_from_is_told():
    recorder, hand = Recorder(4, Hand()), Hand()
    steps = told("engine-1", step(10, 900, 90, 0, 5, 1))
    origin = KvOrigin(num_cached=64, num_stored=1024, num_computed=300, why="new")
    sequences = tuple(msgspec.structs.replace(one, origin=origin) for one in steps.sequences)
    found = waited(recorder, hand, msgspec.structs.replace(steps, sequences=sequences))
    assert found["kv"] == {"cache": 64, "disk": 1024, "prefill_engine": 0, "computed": 300, "why": "new"}


def test_the_last_steps_of_few_engines_are_remembered():
    recorder = Recorder(4, Hand())
    for number in range(ENGINES_MAX):
        recorder.add_steps(told(f"engine-{number}", load(7, 4, 3), load(8, 4, 3), load(9, 4, 3)))
    recorder.add_steps(
        told(
            "engine-0",
            load(10, 4, 3),
        )
    )
    recorder.add_steps(
        told(
            "another",
            load(1, 1, 1),
        )
    )
    clock, found = Hand(), list[Any]()
    for number in (0, 1):
        record = begin(recorder, f"q{number}", clock)
        record.placed(0, 1, f"engine-{number}", "d")
        event = step(11 - number, 900, 90, 0, 5, 1, f"q{number}-0")
        recorder.add_steps(
            told(
                f"engine-{number}",
                event,
            )
        )
        found.append(timeline_of(record)["sequences"][0]["attempts"][0]["batch_size_before"])
    assert found == [4, None], "the engine that has told of no step for longest is forgotten"
