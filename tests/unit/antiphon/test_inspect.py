"""The commands that show a running system: what they print, and what they never print."""

import json
import os
from pathlib import Path

import msgspec
import pytest

from antiphon.inspect import top, trace
from antiphon.inspect.rendering import concerns, rendered
from antiphon.inspect.tap import Place, find_bus
from antiphon.shared.flags import SettingsError
from antiphon.shared.messages import Cancel, TextEvent, TextEvents, TokenEvent, TokenEvents, TokenizeRequest
from tests.samples import message_types, sample

SECRET = "the secret text"


def test_prompts_tokens_and_texts_are_shown_only_when_asked_for():
    request = TokenizeRequest(request_id="r1", model="toy", prompts=(SECRET,))
    assert rendered("tok.toy.req", request, whole=False) == {
        "subject": "tok.toy.req",
        "type": "TokenizeRequest",
        "request_id": "r1",
        "model": "toy",
        "prompts": "<1 items>",
    }
    assert rendered("tok.toy.req", request, whole=True)["prompts"] == (SECRET,)
    event = TextEvent(
        sequence_id="r1-0",
        attempt=1,
        position=0,
        token_ids=(7, 8),
        text_offset=0,
        text=SECRET,
        finish_reason="stop",
        stop_reason=SECRET,
    )
    shown = rendered(
        "gw.g.b.txt",
        TextEvents(
            detokenizer_id="d",
            detokenizer_instance_id="b",
            engine_id="e",
            engine_instance_id="b",
            step=3,
            events=(event,),
        ),
        whole=False,
    )
    assert SECRET not in json.dumps(shown)
    assert shown["events"][0]["token_ids"] == "<2 items>"
    assert shown["events"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("kind", message_types(), ids=lambda kind: kind.__name__)
def test_every_message_can_be_written_as_json(kind):
    message = sample(kind)
    for whole in (False, True):
        assert json.loads(json.dumps(rendered("s", message, whole=whole)))["type"] == type(message).__name__


def test_only_the_items_of_one_request_are_kept():
    message = TokenEvents(
        "e",
        "b",
        3,
        (
            TokenEvent(sequence_id="r1-0", attempt=1, position=0, token_ids=(1,)),
            TokenEvent(sequence_id="r10-0", attempt=1, position=0, token_ids=(2,)),
        ),
    )
    assert concerns(message, "r1")
    assert not concerns(message, "r2")
    assert [one["sequence_id"] for one in rendered("s", message, whole=False, request="r1")["events"]] == ["r1-0"]
    assert concerns(Cancel("r1-3", 1), "r1")


def test_the_bus_of_the_server_on_this_machine_is_found(tmp_path: Path):
    with pytest.raises(SettingsError, match="--nats"):
        find_bus("", "", {}, tmp_path)
    assert find_bus("nats://x:1", "c", {}, tmp_path) == Place("nats://x:1", "c")
    assert find_bus("", "", {"ANTIPHON_NATS": "nats://y:1"}, tmp_path) == Place("nats://y:1", "")
    folder = tmp_path / f"antiphon-{os.getpid()}-x"
    folder.mkdir()
    (folder / "bus.url").write_text("nats://127.0.0.1:4221")
    found = Place((folder / "bus.url").as_uri(), str(folder / "observer.credentials"))
    assert find_bus("", "", {}, tmp_path) == found


def test_the_directory_of_another_user_is_not_that_of_a_server_of_this_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    target, planted = tmp_path / "elsewhere", tmp_path / f"antiphon-{os.getpid()}-planted"
    target.mkdir()
    (target / "bus.url").write_text("nats://127.0.0.1:1")
    planted.symlink_to(target)
    with pytest.raises(SettingsError, match="no `antiphon serve` of this user"):
        find_bus("", "", {}, tmp_path)
    planted.unlink()
    target.rename(planted)
    assert find_bus("", "", {}, tmp_path).url == (planted / "bus.url").as_uri()
    if os.getuid() == 0:
        os.chown(planted, 65534, 65534)
    else:
        monkeypatch.setattr("os.getuid", lambda: 65534)
    with pytest.raises(SettingsError, match="no `antiphon serve` of this user"):
        find_bus("", "", {}, tmp_path)


STEP = {"step": 7, "kind": "prefill", "end_s": 0.2, "gap_s": 0.1, "num_tokens": 5, "num_output": 1, "batch_size": 2}
STEP |= {"num_waiting": 3, "preempted_before": False}
TIMELINE = {
    "id": "r1",
    "state": "completed",
    "error_code": None,
    "model": "toy",
    "duration_s": 1.5,
    "prompt_tokens": 5,
    "cached_tokens": 0,
    "completion_tokens": 6,
    "time_to_first_token_s": 0.2,
    "phases": {"gateway_queue": 1.0, "prefill": 0.25, "decode": 0.25},
    "longest_phase": "gateway_queue",
    "explanation": ["Most of the time: waiting (1.0 s of 1.5 s)."],
    "sequences": [
        {
            "index": 0,
            "attempts": [
                {
                    "attempt": 1,
                    "engine": "engine-1",
                    "placed_s": 1.0,
                    "lost_s": None,
                    "reason": None,
                    "steps": [{**STEP, "step": number} for number in range(1, 8)],
                }
            ],
        }
    ],
    "dropped_events": 2,
}


def test_a_trace_names_the_longest_phase_and_the_longest_gaps():
    text = "\n".join(trace.lines(TIMELINE, steps=False))
    [longest] = [line for line in text.splitlines() if "<- longest" in line]
    assert longest.split()[:3] == ["gateway_queue", "1000.0", "ms"]
    assert "Most of the time: waiting (1.0 s of 1.5 s)." in text
    assert text.count("prefill  ") == 6  # the phase, and five steps
    assert "--steps" in text
    assert "2 events were not kept" in text
    assert "\n".join(trace.lines(TIMELINE, steps=True)).count("prefill  ") == 8


def test_a_trace_names_requests_that_had_the_engines_meanwhile():
    others = [{"id": f"r{number}", "client_request_id": "order-7" if number else None} for number in range(9)]
    meanwhile = {"text": "Meanwhile, the engines were computing 9 other requests.", "requests": others}
    text = "\n".join(trace.lines({**TIMELINE, "meanwhile": meanwhile}, steps=False))
    assert "9 other requests. Among them: r0, order-7, order-7, order-7, order-7.\n" in text
    hidden = {"text": "1 of other API keys.", "requests": []}
    assert "1 of other API keys.\n" in "\n".join(trace.lines({**TIMELINE, "meanwhile": hidden}, steps=False))
    assert "Meanwhile" not in "\n".join(trace.lines({**TIMELINE, "meanwhile": None}, steps=False))


def test_top_shows_rates_between_two_looks():
    engine = {"num_running": 2, "num_waiting": 1, "num_blocks": 10, "num_free_blocks": 5, "generation_tokens": 100}
    member = {"service": "engine", "id": "engine-1", "instance_id": "b", "state": "ready", "heartbeat_age_s": 0.1}
    member |= {"messages_received": 10, "messages_sent": 20, "load": engine}
    before = {"now_s": 10.0, "members": [member]}
    later = {**member, "messages_sent": 60, "load": {**engine, "generation_tokens": 300}}
    text = "\n".join(top.lines(before, {"now_s": 12.0, "members": [later]}, []))
    assert "20.0  2 running, 1 waiting, 100 tokens/s, KV 50%" in text
    assert "(none in progress)" in text
    assert msgspec.json.encode(text)
