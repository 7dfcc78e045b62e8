"""Every program in `examples/` runs with the demo model, most against a real server, and prints what it promises."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.system.served import ROOT, Served, fetch, until_the_end

EXAMPLES = ROOT / "examples"
pytestmark = [pytest.mark.system, pytest.mark.nats, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with until_the_end(Served()) as started:
        yield started


def run(served: Served | None, name: str) -> str:
    path = EXAMPLES / name
    argv = [sys.executable, str(path)] if path.suffix == ".py" else ["bash", str(path)]
    environ = {**os.environ, "OPENAI_BASE_URL": served.url if served is not None else "http://127.0.0.1:9/v1"}
    environ.pop("OPENAI_API_KEY", None)
    done = subprocess.run(argv, env=environ, capture_output=True, text=True, check=False, timeout=90)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_conversation_has_two_answers_and_counts_their_tokens(served: Served) -> None:
    output = run(served, "chat.py")
    assert output.count("Assistant: ") == 2
    assert output.count(" completion tokens)") == 2


def test_a_stream_is_printed_with_its_first_tokens_time(served: Served) -> None:
    text, _, summary = run(served, "streaming.py").rpartition("\n  (first token after ")
    assert text
    assert summary.endswith(" tokens)\n")


def test_a_resumable_stream_is_printed(served: Served) -> None:
    assert run(served, "resumable_stream.py").strip()


def test_each_token_of_a_completion_has_its_alternatives(served: Served) -> None:
    lines = run(served, "completion_logprobs.py").splitlines()
    assert lines[0].startswith("Once upon a time")
    assert lines[1:]
    assert all("instead of" in line for line in lines[1:])


def test_requests_at_once_all_get_their_answers(served: Served) -> None:
    lines = run(served, "concurrent_requests.py").splitlines()
    assert [line.partition(":")[0] for line in lines[:-1]] == [f"{n} + {n}" for n in range(16)]
    assert lines[-1].startswith("16 answers, ")


def test_a_message_is_printed_with_its_token_counts(served: Served) -> None:
    text, _, summary = run(served, "messages.py").rpartition("\n  (")
    assert text
    assert summary.startswith("end_turn; ")
    assert summary.endswith(" output tokens)\n")


def test_a_function_is_called_and_its_result_is_answered(served: Served) -> None:
    call, answer = run(served, "tools.py").splitlines()
    assert call == 'get_weather({"city": "Rome"}) -> It is sunny in Rome.'
    assert answer.startswith("Assistant: ")


def test_the_demo_model_chooses_whether_it_calls_a_tool(served: Served) -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": schema}}

    def asked(question: str, **fields: Any) -> dict[str, Any]:
        body = {"messages": [{"role": "user", "content": question}], "tools": [tool], "max_tokens": 64, **fields}
        reply = fetch(served, "POST", "/v1/chat/completions", {**body, "temperature": 0})
        assert reply.status == 200, reply.body
        return reply.json["choices"][0]["message"]

    def called(message: dict[str, Any]) -> tuple[str, Any]:
        [call] = message["tool_calls"]
        return call["function"]["name"], json.loads(call["function"]["arguments"])

    for strict in (False, True):
        tool["function"]["strict"] = strict  # type: ignore[index]
        assert called(asked("What is the weather in Rome?")) == ("get_weather", {"city": "Rome"})
        message = asked("What is 2 + 2?")
        assert not message.get("tool_calls")
        assert "4" in message["content"]
    # A forced call is in the format that the model has learnt, so that it is as good as one that it chooses.
    named = {"type": "function", "function": {"name": "get_weather"}}
    for choice in ("required", named):
        message = asked("What is the weather in Rome?", tool_choice=choice)
        assert called(message) == ("get_weather", {"city": "Rome"})


def test_a_dropped_stream_of_a_background_response_is_continued(served: Served) -> None:
    streamed, _, stored = run(served, "background_response.py").partition("\n")
    before, _, after = streamed.partition("|")
    assert before
    assert f"{before}{after}\n" == stored


def test_a_batch_answers_every_request(served: Served) -> None:
    lines = run(served, "batch.py").splitlines()
    assert "completed: 8 of 8 requests" in lines
    assert [line.partition(":")[0] for line in lines[-8:]] == [f"{number} + {number}" for number in range(8)]


def test_curl_alone_reaches_every_part_of_the_api(served: Served) -> None:
    answers = [line for line in run(served, "curl.sh").splitlines() if line and not line.startswith("#")]
    health, models, chat = map(json.loads, answers[:3])
    assert health["status"] == "ready"
    assert models["data"][0]["id"] == "antiphon-demo"
    assert chat["choices"][0]["message"]["content"]
    assert "data: [DONE]" in answers
    assert json.loads(answers[-1])["count"] > 0


def test_prompts_are_answered_without_a_server() -> None:
    lines = run(None, "offline_generate.py").splitlines()
    assert [line.partition(" -> ")[0][-1] for line in lines] == ["?", ".", "?"]
    assert all(line.partition(" -> ")[2] for line in lines)


def test_every_example_is_tested_and_listed() -> None:
    programs = {path.name for path in EXAMPLES.iterdir() if path.suffix in {".py", ".sh"}}
    listed = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in listed for name in programs)
    source = Path(__file__).read_text(encoding="utf-8")
    assert programs == {name for name in programs if f'"{name}"' in source}


def test_texts_are_ordered_by_their_vectors(served: Served) -> None:
    head, *lines = run(served, "embeddings.py").splitlines()
    assert " dimensions, " in head
    cosines = [float(line.split()[0]) for line in lines]
    assert len(cosines) == 3
    assert cosines == sorted(cosines, reverse=True)
