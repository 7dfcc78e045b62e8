"""Thinking budgets as clients see them, with drafts, and after the engine of a stream was killed."""

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.system.served import Answer, Served, fetch, until_the_end, wait_until

CHAT = "/v1/chat/completions"
ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "Tell me a story"}], "temperature": 0, "max_tokens": 60}
"""The demo model does not reason; with this format everything before `</think>` is reasoning."""
FLAGS = ("--reasoning-parser=deepseek_r1", "--engines=2", "--use-lookahead", "--use-v2-block-manager")


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with until_the_end(Served(*FLAGS)) as started:
        yield started


def ask(served: Served, **fields: Any) -> Any:
    answer = fetch(served, "POST", CHAT, {**ASK, "return_token_ids": True, **fields})
    assert answer.status == 200, answer.body
    return answer.json["choices"][0]


def test_the_reasoning_ends_with_its_budget_and_the_answer_follows(served: Served) -> None:
    free = ask(served)
    assert not free["message"]["content"]
    for budget in (1, 7):
        limited = ask(served, thinking_token_budget=budget)
        assert limited["token_ids"][:budget] == free["token_ids"][:budget]
        assert limited["token_ids"][budget] != free["token_ids"][budget]
        assert free["message"]["reasoning"].startswith(limited["message"]["reasoning"])
        assert limited["message"]["content"]
    for budget in (-1, 10**30):
        assert ask(served, thinking_token_budget=budget)["token_ids"] == free["token_ids"]
    # The number of tokens is known only after the words have been converted.
    no_maximum = ask(served, thinking_token_budget=2, max_tokens=None, bad_words=["zebra"])
    assert no_maximum["token_ids"][:2] == free["token_ids"][:2]
    assert no_maximum["message"]["content"]
    assert ask(served, thinking_budget=7)["token_ids"] == limited["token_ids"]


def test_anthropics_budget_does_the_same(served: Served) -> None:
    body = {**ASK, "thinking": {"type": "enabled", "budget_tokens": 7}}
    answer = fetch(served, "POST", "/v1/messages", body)
    assert answer.status == 200, answer.body
    thought, text = answer.json["content"]
    said = ask(served, thinking_token_budget=7)["message"]
    assert (thought["thinking"], text["text"]) == (said["reasoning"], said["content"])
    assert "x-antiphon-ignored" not in answer.headers


@pytest.mark.parametrize(
    ("fields", "status"),
    [({"thinking_token_budget": -2}, 400), ({"thinking_token_budget": 5, "use_beam_search": True, "n": 2}, 400)],
)
def test_a_budget_that_cannot_be_is_refused(served: Served, fields: dict[str, Any], status: int) -> None:
    answer = fetch(served, "POST", CHAT, {**ASK, **fields})
    assert (answer.status, answer.json["error"]["param"]) == (status, "thinking_token_budget")


def test_a_budget_is_told_as_ignored_where_no_reasoning_is_separated(served: Served) -> None:
    answer = fetch(served, "POST", CHAT, {**ASK, "guided_regex": "[ab]{3}", "thinking_token_budget": 5})
    assert (answer.status, answer.headers["x-antiphon-ignored"]) == (200, "thinking_token_budget")


def test_streams_of_a_killed_engine_keep_their_budget(served: Served) -> None:
    fields = {"max_tokens": 900, "ignore_eos": True, "thinking_token_budget": 400}
    expected = ask(served, **fields)["token_ids"]

    def streamed(_: int) -> list[int]:
        answer: Answer = fetch(served, "POST", CHAT, {**ASK, **fields, "stream": True, "return_token_ids": True})
        chunks = [json.loads(line[6:]) for line in answer.body.splitlines() if line.startswith(b"data: {")]
        return [token for chunk in chunks for choice in chunk["choices"] for token in choice.get("token_ids") or []]

    with ThreadPoolExecutor(4) as threads:
        found = [threads.submit(streamed, number) for number in range(4)]
        # One of the engines is killed while it runs streams.
        killed = served.pids()["engine-1"]
        wait_until(lambda: b" 0.0" not in _running(served), 30)
        os.kill(killed, signal.SIGKILL)
        assert [one.result() for one in found] == [expected] * 4
    wait_until(lambda: served.pids().get("engine-1", killed) != killed, 60)


def _running(served: Served) -> bytes:
    lines = fetch(served, "GET", "/metrics").body.splitlines()
    return b"".join(line for line in lines if line.startswith(b"vllm:num_requests_running{") and b"engine-1" in line)
