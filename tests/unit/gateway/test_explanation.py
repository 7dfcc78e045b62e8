"""What a timeline says in plain words of where a request's time went."""

import itertools
from typing import Any

import pytest

from antiphon.services.gateway.ops.timeline import queries
from antiphon.services.gateway.ops.timeline.recorder import Recorder
from antiphon.services.gateway.ops.timeline.request_record import RequestRecord
from antiphon.services.gateway.ops.timeline.timeline import timeline_of
from antiphon.services.gateway.path.record import RequestFacts
from antiphon.shared.messages import RecordQuery, SequenceRef, StepEvent
from tests.unit.gateway.step_events import Told, told


class Story:
    """One request, told in seconds since its arrival."""

    def __init__(self, turn_s: float = 0.0) -> None:
        self.now, self._numbers = 100.0, itertools.count(1)
        self._recorder = Recorder(4, lambda: self.now)
        record = self._recorder.begin(RequestFacts(request_id="r", model="toy", key="k", turn_s=turn_s), self.now)
        assert isinstance(record, RequestRecord)
        self.record = record

    def at(self, seconds: float) -> RequestRecord:
        self.now = 100.0 + seconds
        return self.record

    def begins(self, prompt_tokens: int = 5) -> None:
        self.at(0.01).admitted()
        self.at(0.02).tokenized(prompt_tokens)

    def step(
        self, engine: str, attempt: int, began_s: float, ended_s: float, size: int = 1, waiting: int = 0, **more: Any
    ) -> None:
        """Times since the sequence was with the engine."""
        kind: tuple[int, int, int] = more.get("kind", (0, 5, 1))
        gone = (SequenceRef("r-0", attempt),) if more.get("preempted") else ()
        event = StepEvent(
            step=next(self._numbers),
            duration_us=round((ended_s - began_s) * 1e6),
            num_tokens=9,
            num_running=size,
            num_waiting=waiting,
            num_free_blocks=40,
            num_sequences=size,
            preempted=gone,
        )
        share = {("r-0", attempt): (round(ended_s * 1e6), *kind)}
        self._recorder.add_steps(told(engine, Told(event, share)))

    def steps_of_others(self, engine: str, *loads: tuple[int, int]) -> None:
        """Steps with this many sequences and, at their end, free KV blocks."""
        events = [
            StepEvent(
                step=next(self._numbers),
                duration_us=50_000,
                num_tokens=size,
                num_running=size,
                num_waiting=1,
                num_free_blocks=free,
                num_sequences=size,
            )
            for size, free in loads
        ]
        self._recorder.add_steps(told(engine, *map(Told, events)))

    def ends(self, seconds: float, outcome: Any = "completed", code: str = "") -> None:
        self.at(seconds).ended(outcome, code, 5, 0, 2, ("length",))
        self.record.closed()

    def told(self) -> dict[str, Any]:
        found = timeline_of(self.record)
        assert sum(one["duration_s"] for one in found["causes"]) == pytest.approx(found["duration_s"])
        return found


def test_a_wait_in_the_queue_of_an_engine():
    story = Story()
    story.begins()
    story.at(0.02).placed(0, 1, "engine-1", "d")
    story.step("engine-1", 1, 2.3, 2.4, size=5, waiting=3)
    story.at(2.5).arrived(0, 1)
    story.at(2.9).arrived(0, 4)
    story.ends(2.9)
    first, *more = story.told()["explanation"]
    assert first == "Most of the time: waiting in the queue of engine-1 (2.3 s of 2.9 s)."
    assert more == ["Its batch had no place, or too few KV blocks were free."]


@pytest.mark.parametrize(
    ("places", "told"),
    [
        (5, "5 of the 5 places of its batch were taken."),
        (6, "Its batch had no place, or too few KV blocks were free."),
    ],
)
def test_a_wait_for_a_full_batch(places: int, told: str):
    story = Story()
    story.begins()
    story.at(0.02).placed(0, 1, "engine-1", "d", places)
    story.step("engine-1", 1, 2.3, 2.4, size=min(places, 5))
    story.at(2.5).arrived(0, 1)
    story.ends(2.6)
    assert story.told()["explanation"][1:] == [told]


NO_LACK = (
    "The batch had a place and enough KV blocks were free: the prompts of others came first, or the engine stood still."
)


@pytest.mark.parametrize(
    ("loads", "size", "told"),
    [
        # The step that ended last before the first one had room already, as had the one before if two are in flight.
        ([(4, 20), (4, 20), (3, 28)], 2, "4 of the 4 places of its batch were taken."),
        ([(4, 20), (3, 28), (4, 20)], 2, "4 of the 4 places of its batch were taken."),
        ([(2, 1), (2, 1), (1, 30)], 2, "Too few KV blocks were free: its prompt needs 3, and 1 were free."),
        ([(2, 2), (1, 30), (2, 27)], 4, "Too few KV blocks were free: its prompt needs 3, and 2 were free."),
        ([(3, 40), (3, 40), (4, 2)], 4, NO_LACK),
        ([], 2, "Its batch had no place, or too few KV blocks were free."),
    ],
)
def test_a_wait_for_a_place_is_told_from_one_for_kv_blocks(loads: list[tuple[int, int]], size: int, told: str):
    story = Story()
    story.begins(40)
    story.at(0.02).placed(0, 1, "engine-1", "d", 4, 16)
    story.steps_of_others("engine-1", *loads)
    story.step("engine-1", 1, 2.3, 2.4, size=size, kind=(0, 24, 0))
    story.step("engine-1", 1, 2.4, 2.5, size=size, kind=(24, 16, 1))
    story.at(2.6).arrived(0, 1)
    story.ends(2.7)
    assert story.told()["explanation"][1:] == [told]


def test_steps_before_the_sequence_came_to_the_engine_do_not_tell_what_it_waited_for():
    story = Story()
    story.begins()
    story.steps_of_others("engine-1", (4, 0), (4, 0), (4, 0))
    story.at(7.0).placed(0, 1, "engine-1", "d", 4, 16)
    story.step("engine-1", 1, 9.3, 9.4)
    story.at(16.5).arrived(0, 1)
    story.ends(16.6)
    [attempt] = story.told()["sequences"][0]["attempts"]
    assert (attempt["batch_size_before"], attempt["free_blocks_before"]) == (None, None)
    assert "Its batch had no place, or too few KV blocks were free." in story.told()["explanation"]


def test_a_wait_for_places_that_other_keys_may_take():
    story = Story()
    story.begins()
    story.at(0.02).placed(0, 1, "engine-1", "d", 64, 16)
    story.steps_of_others("engine-1", (62, 500), (62, 500), (61, 510))
    story.step("engine-1", 1, 2.3, 2.4, size=62)
    story.at(2.5).arrived(0, 1)
    story.ends(2.6)
    assert story.told()["explanation"][1:] == [
        "62 of the 64 places of its batch were taken; the rest is kept for API keys that have none."
    ]


@pytest.mark.parametrize(
    ("outcome", "code", "told"),
    [
        ("cancelled", "client_closed_request", "the client closed the connection (client_closed_request)"),
        ("cancelled", "client_stopped_reading", "the client did not read the answer (client_stopped_reading)"),
        ("cancelled", "cancelled_by_api", "a call of the API cancelled it (cancelled_by_api)"),
        ("cancelled", "draining", "the gateway was shutting down (draining)"),
        ("cancelled", "internal_error", "internal_error"),
        ("failed", "deadline_exceeded", "it did not end within its timeout (deadline_exceeded)"),
    ],
)
def test_who_ended_a_request_early_is_told_with_the_time(outcome: str, code: str, told: str):
    story = Story()
    story.begins()
    story.ends(3.0, outcome, code)
    found = story.told()
    how = "failed" if outcome == "failed" else "was cancelled"
    assert found["explanation"][-1] == f"It {how} after 3.0 s: {told}."
    assert found["error_code"] == code


def test_the_usual_time_for_each_token_is_told():
    story = Story()
    story.begins()
    story.at(0.02).placed(0, 1, "engine-1", "d")
    for number in range(5):
        story.step("engine-1", 1, 0.1 * number, 0.1 * number + 0.1, kind=(4 + number, 1, 1))
        story.at(0.1 * number + 0.15).arrived(0, 1)
    story.ends(0.55)
    told = timeline_of(story.record, 0.0055)
    assert told["usual_token_s"] == 0.0055
    assert "That is 100 ms for each token (usual: 5.5 ms), alone in its batch." in told["explanation"]
    assert "That is 100 ms for each token, alone in its batch." in story.told()["explanation"]


def test_a_wait_in_the_gateway():
    story = Story()
    story.begins()
    story.at(3.0).placed(0, 1, "engine-1", "d")
    story.step("engine-1", 1, 0.0, 0.1)
    story.at(3.1).arrived(0, 1)
    story.ends(3.2)
    told = story.told()["explanation"]
    assert told[0] == "Most of the time: waiting in the gateway for an engine with room (3.0 s of 3.2 s)."


def test_a_long_prompt():
    story = Story()
    story.begins(1800)
    story.at(0.02).placed(0, 1, "engine-2", "d")
    story.step("engine-2", 1, 0.0, 0.9, kind=(0, 1024, 0))
    story.step("engine-2", 1, 0.9, 1.7, kind=(1024, 776, 1))
    story.at(1.75).arrived(0, 1)
    story.at(1.9).arrived(0, 3)
    story.ends(1.9)
    assert story.told()["explanation"] == [
        "Most of the time: computing the prompt of 1800 tokens on engine-2 (1.7 s of 1.9 s)."
    ]


def test_an_engine_that_responds_again_is_named_once():
    story = Story()
    story.begins()
    story.at(0.02).placed(0, 1, "engine-1", "d")
    story.at(0.5).arrived(0, 10)
    story.at(1.5).lost(0, 1, "the engine stopped responding")
    story.at(1.6).placed(0, 2, "engine-1", "d")
    story.at(2.4).arrived(0, 10)
    story.ends(2.4)
    assert story.told()["explanation"][0] == (
        "Most of the time: placing it on engine-1 again (the engine stopped responding) (1.9 s of 2.4 s)."
    )


def test_a_move_counts_from_the_last_token_on_one_engine_to_the_first_on_the_other():
    story = Story()
    story.begins()
    story.at(0.02).placed(0, 1, "engine-1", "d")
    story.step("engine-1", 1, 0.0, 0.05)
    story.at(0.1).arrived(0, 1)
    story.at(0.5).arrived(0, 10)
    story.at(1.5).lost(0, 1, "the engine stopped responding")
    story.at(1.6).placed(0, 2, "engine-2", "d")
    story.at(2.0).arrived(0, 1)
    story.at(2.4).arrived(0, 10)
    story.ends(2.4)
    found = story.told()
    assert found["explanation"][0] == (
        "Most of the time: moving from engine-1 to engine-2 (the engine stopped responding) (1.5 s of 2.4 s)."
    )
    assert {(one["cause"], one["where"]): one["duration_s"] for one in found["causes"]}[
        "decode", "engine-2"
    ] == pytest.approx(0.4)
    # A short move among long output is told, too.
    story.at(12.4).arrived(0, 90)
    story.ends(12.4)
    told = story.told()["explanation"]
    assert told[0].startswith("Most of the time: generating 100 tokens on engine-2 (10.4 s of 12.4 s)")
    assert "Moving from engine-1 to engine-2 (the engine stopped responding) took 1.5 s." in told


def test_an_engine_that_is_lost_before_the_first_token_leaves_its_queue_as_the_cause():
    story = Story()
    story.begins()
    story.at(0.02).placed(0, 1, "engine-1", "d")
    story.at(2.0).lost(0, 1, "the engine stopped responding")
    story.at(2.1).placed(0, 2, "engine-2", "d")
    story.step("engine-2", 2, 0.1, 0.2)
    story.at(2.4).arrived(0, 1)
    story.ends(2.5)
    found = story.told()
    assert found["explanation"][0] == "Most of the time: waiting in the queue of engine-1 (2.0 s of 2.5 s)."
    assert found["longest_phase"] == "engine_queue"


def test_a_preemption_is_told_apart_from_generating():
    story = Story()
    story.begins()
    story.at(0.02).placed(0, 1, "engine-1", "d")
    story.step("engine-1", 1, 0.0, 0.1)
    story.at(0.15).arrived(0, 1)
    story.step("engine-1", 1, 1.9, 2.1, kind=(0, 6, 1), preempted=True)
    story.at(2.2).arrived(0, 1)
    story.ends(2.2)
    told = story.told()["explanation"]
    assert told[0] == "Most of the time: waiting on engine-1, which needed the KV blocks for others (2.0 s of 2.2 s)."


def test_a_request_in_progress_a_failed_one_and_one_without_a_dominant_cause():
    story = Story()
    story.at(1.0)
    assert story.told()["explanation"][0].startswith("So far, most of the time: reading and checking the request")
    story.begins()
    story.at(0.1).placed(0, 1, "engine-1", "d")
    story.at(4.0)
    assert story.told()["explanation"][0].startswith(
        "So far, most of the time: waiting in the queue of engine-1 (3.9 s"
    )
    story.ends(5.0, "failed", "request_timeout")
    assert story.told()["explanation"][-1] == "It failed after 5.0 s: request_timeout."
    even = Story()
    even.at(0.4).admitted()
    even.at(0.8).tokenized(3)
    even.at(1.1).placed(0, 1, "engine-1", "d")
    even.ends(1.2, "cancelled")
    told = even.told()["explanation"]
    assert told[0].startswith("The longest part of the time: ")
    assert any(one.endswith(" took 300 ms.") for one in told)
    assert told[-1] == "It was cancelled after 1.2 s."


def test_the_output_that_ended_last_counts():
    story = Story()
    story.begins()
    for index in (0, 1):
        story.at(0.02).placed(index, 1, f"engine-{index + 1}", "d")
    story.at(0.1).arrived(0, 1)
    story.at(3.0).arrived(1, 1)
    story.ends(3.0)
    assert "engine-2" in story.told()["explanation"][0]


def test_few_tokens_that_took_long_were_not_the_reason():
    story = Story()
    story.at(0.01).admitted()
    story.at(2.5)
    assert story.told()["explanation"][1] == "No tokenizer has answered."
    story.at(2.5).tokenized(4)
    first, second = story.told()["explanation"][:2]
    assert first == "So far, most of the time: turning the text into tokens (2.5 s of 2.5 s)."
    assert second == "4 tokens need far less: the tokenizers stood still or had other work."
    long = Story()
    long.at(0.01).admitted()
    long.at(2.5).tokenized(100_000)
    assert len(long.told()["explanation"]) == 1


def test_a_second_long_wait_is_explained_too():
    story = Story()
    story.begins()
    story.at(7.0).placed(0, 1, "engine-1", "d", 4)
    story.step("engine-1", 1, 3.8, 3.9, size=4, waiting=2)
    story.at(11.0).arrived(0, 1)
    story.ends(11.1)
    first, *more = story.told()["explanation"]
    assert first == "Most of the time: waiting in the gateway for an engine with room (7.0 s of 11.1 s)."
    assert more == [
        "Waiting in the queue of engine-1 took 3.8 s.",
        "4 of the 4 places of its batch were taken.",
    ]


@pytest.mark.parametrize(
    ("silent", "answered", "text", "detail"),
    [
        ([], "t-1", " on t-1", ["t-1 stood still or had other work."]),
        (
            [("", 0.1), ("t-1", 0.2), ("t-1", 1.0)],
            "t-1",
            " on t-1",
            [
                "t-1 stood still or had other work.",
                "No answer came from one of the tokenizers for 100 ms, t-1 for 1.2 s.",
            ],
        ),
        (
            [("t-1", 0.1), ("t-3", 0.2)],
            "t-2",
            "",
            ["the tokenizers stood still or had other work.", "No answer came from t-1 for 100 ms, t-3 for 200 ms."],
        ),
        (
            [("", 0.1)],
            "t-2",
            "",
            ["the tokenizers stood still or had other work.", "No answer came from one of the tokenizers for 100 ms."],
        ),
    ],
)
def test_the_tokenizers_that_stood_still_are_named(
    silent: list[tuple[str, float]], answered: str, text: str, detail: list[str]
):
    story = Story()
    story.at(0.01).admitted()
    for name, waited_s in silent:
        story.at(1.0).tokenizer_silent(name, waited_s)
    if ("t-1", 1.0) in silent:
        told = story.at(2.0) and story.told()["explanation"]
        assert told[0].startswith("So far, most of the time: turning the text into tokens on t-1 (")
        assert told[1:] == ["No tokenizer has answered.", *detail[1:]]
    story.at(2.5).tokenizer_answered(answered)
    story.at(2.5).tokenized(5)
    story.ends(2.6)
    found = story.told()
    assert found["explanation"][0] == f"Most of the time: turning the text into tokens{text} (2.5 s of 2.6 s)."
    first, *more = detail
    assert found["explanation"][1:] == [f"5 tokens need far less: {first}", *more]
    assert found["tokenizer"] == answered
    assert found["silent_tokenizers"] == [{"tokenizer": name or None, "waited_s": value} for name, value in silent]


def test_an_engine_that_is_lost_before_the_first_token_is_told():
    story = Story()
    story.begins()
    story.at(0.02).placed(0, 1, "engine-1", "d")
    story.at(2.0).lost(0, 1, "the engine stopped responding")
    story.at(2.1).placed(0, 2, "engine-2", "d")
    story.at(2.4).arrived(0, 1)
    story.ends(2.5)
    assert story.told()["explanation"][-1] == "It had to leave engine-1 after 2.0 s: the engine stopped responding."


def test_the_wait_for_a_turn_is_a_cause_and_a_phase_of_its_own():
    story = Story(turn_s=1.5)
    story.at(1.51).admitted()
    story.at(1.6).tokenized(3)
    story.ends(1.7)
    found = story.told()
    assert found["explanation"][0] == (
        "Most of the time: waiting until the gateway began with the request (1.5 s of 1.7 s)."
    )
    assert (found["phases"]["turn"], found["phases"]["admission"], found["longest_phase"]) == (1.5, 0.01, "turn")
    assert "turn" not in Story(turn_s=0.0002).told()["phases"]


def test_every_moment_belongs_to_one_span():
    story = Story(turn_s=0.005)
    story.begins()
    story.at(1.0).placed(0, 1, "engine-1", "d")
    story.step("engine-1", 1, 0.4, 0.5)
    story.at(1.6).arrived(0, 1)
    story.step("engine-1", 1, 0.9, 1.0, kind=(5, 1, 1))
    story.at(2.1).arrived(0, 1)
    story.step("engine-1", 1, 2.9, 3.0, kind=(0, 7, 1), preempted=True)
    story.at(4.1).arrived(0, 1)
    story.at(5.0).lost(0, 1, "the engine is gone")
    story.at(5.5).placed(0, 2, "engine-2", "d")
    story.at(6.0).arrived(0, 1)
    story.at(6.5).arrived(0, 1)
    story.ends(6.6)
    found = story.told()
    spans = found["spans"]
    assert [one["start_s"] for one in spans] == [0.0, *(one["end_s"] for one in spans[:-1])]
    assert spans[-1]["end_s"] == found["duration_s"]
    assert [(one["cause"], one["where"]) for one in spans] == [
        ("turn", None),
        ("admission", None),
        ("tokenization", None),
        ("gateway_queue", None),
        ("engine_queue", "engine-1"),
        ("prefill", "engine-1"),
        ("decode", "engine-1"),
        ("preemption", "engine-1"),
        ("decode", "engine-1"),
        ("move", "engine-1 to engine-2"),
        ("decode", "engine-2"),
        ("delivery", None),
    ]
    preemption = next(one for one in spans if one["cause"] == "preemption")
    assert (preemption["start_s"], preemption["end_s"]) == (2.0, 4.0), "from the step before to the end of the next one"


def test_the_usual_time_comes_from_the_latest_requests_only(monkeypatch: pytest.MonkeyPatch):
    now = [100.0]
    recorder = Recorder(8, lambda: now[0])
    for number in range(6):
        now[0] += 1
        recorder.begin(RequestFacts(request_id=f"r{number}", model="toy", key="k"), now[0])
    asked: list[list[str]] = []
    monkeypatch.setattr(queries, "SIMILAR_MAX", 3)
    monkeypatch.setattr(queries, "usual_token_s", lambda found: asked.append([one["id"] for one in found]))
    assert queries.find_record(recorder, "g1", RecordQuery("r0", "k", "timeline"))
    assert asked == [["r5", "r4", "r3"]]
