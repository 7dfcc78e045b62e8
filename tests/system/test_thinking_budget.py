"""Thinking budgets as clients see them, with drafts, and after the engine of a stream was killed."""

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.structured.corpus import demo_tokenizer
from tests.system.served import Answer, Served, fetch, until_the_end, wait_until

CHAT = "/v1/chat/completions"
ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "Tell me a story"}], "temperature": 0, "max_tokens": 60}
"""The demo model does not reason; with this format everything before `</think>` is reasoning."""
CLOSING = demo_tokenizer().tokenize_str("</think>")
STRICT: dict[str, Any] = {
    "tools": [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}, "strict": True}}]
}
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
    assert ask(served, reasoning={"max_tokens": 7})["token_ids"] == limited["token_ids"]


def test_each_of_several_answers_has_the_budget(served: Served) -> None:
    fields = {**ASK, "temperature": 1.0, "seed": 3, "n": 3, "return_token_ids": True}
    free = fetch(served, "POST", CHAT, fields).json["choices"]
    limited = fetch(served, "POST", CHAT, {**fields, "thinking_token_budget": 7}).json["choices"]
    marks = {tuple(one["token_ids"][7:][: len(CLOSING)]) for one in limited}
    assert len({tuple(one["token_ids"]) for one in limited}) == 3
    assert len(marks) == 1
    for one, other in zip(free, limited, strict=True):
        assert one["token_ids"][:7] == other["token_ids"][:7]
        assert other["message"]["content"]


def test_strict_functions_follow_the_reasoning_that_a_budget_ends(served: Served) -> None:
    limited = ask(served, thinking_token_budget=7, **STRICT)
    assert limited["token_ids"][:7] == ask(served, **STRICT)["token_ids"][:7]
    assert limited["token_ids"][7 : 7 + len(CLOSING)] == CLOSING
    assert limited["message"]["reasoning"]


def test_anthropics_budget_does_the_same(served: Served) -> None:
    body = {**ASK, "thinking": {"type": "enabled", "budget_tokens": 7}}
    answer = fetch(served, "POST", "/v1/messages", body)
    assert answer.status == 200, answer.body
    thought, text = answer.json["content"]
    said = ask(served, thinking_token_budget=7)["message"]
    assert (thought["thinking"], text["text"]) == (said["reasoning"], said["content"])
    assert "x-antiphon-ignored" not in answer.headers


def test_the_budget_of_the_responses_api_does_the_same(served: Served) -> None:
    fields = {"input": ASK["messages"], "temperature": 0, "max_output_tokens": 60}
    answer = fetch(served, "POST", "/v1/responses", {**fields, "reasoning": {"max_tokens": 7, "summary": "auto"}})
    assert answer.status == 200, answer.body
    thought, message = answer.json["output"]
    said = ask(served, thinking_token_budget=7)["message"]
    assert (thought["summary"][0]["text"], message["content"][0]["text"]) == (said["reasoning"], said["content"])
    assert "x-antiphon-ignored" not in answer.headers
    for wrong in ("7", True, -5):
        answer = fetch(served, "POST", "/v1/responses", {**fields, "reasoning": {"max_tokens": wrong}})
        assert (answer.status, answer.json["error"]["param"]) == (400, "reasoning.max_tokens")


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


@pytest.mark.parametrize(
    "more", [{}, {"n": 2, "temperature": 1.0, "seed": 5}, STRICT], ids=["one", "several", "strict"]
)
def test_streams_of_an_engine_that_is_killed_while_it_thinks_keep_their_budget(
    served: Served, more: dict[str, Any]
) -> None:
    fields = {
        **ASK,
        "max_tokens": 900,
        "ignore_eos": True,
        "thinking_token_budget": 600,
        "return_token_ids": True,
        **more,
    }
    whole = fetch(served, "POST", CHAT, fields)
    assert whole.status == 200, whole.body
    expected = [one["token_ids"] for one in whole.json["choices"]]
    assert all(one[600 : 600 + len(CLOSING)] == CLOSING for one in expected)

    def streamed(_: int) -> list[list[int]]:
        answer: Answer = fetch(served, "POST", CHAT, {**fields, "stream": True})
        chunks = [json.loads(line[6:]) for line in answer.body.splitlines() if line.startswith(b"data: {")]
        found = [list[int]() for _ in expected]
        for choice in (choice for chunk in chunks for choice in chunk["choices"]):
            found[choice["index"]] += choice.get("token_ids") or []
        return found

    with ThreadPoolExecutor(4) as threads:
        found = [threads.submit(streamed, number) for number in range(4)]
        # One of the engines is killed while it runs streams.
        killed = served.pids()["engine-1"]
        wait_until(lambda: b" 0.0" not in _running(served), 60)
        os.kill(killed, signal.SIGKILL)
        assert [one.result() for one in found] == [expected] * 4
    wait_until(lambda: served.pids().get("engine-1", killed) != killed, 60)


def _running(served: Served) -> bytes:
    lines = fetch(served, "GET", "/metrics").body.splitlines()
    return b"".join(line for line in lines if line.startswith(b"vllm:num_requests_running{") and b"engine-1" in line)
