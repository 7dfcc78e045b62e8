"""Receipts of a real server are proven by running its model, whatever else it computed and whoever died meanwhile."""

import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from antiphon.client import Client
from antiphon.receipts.claims import Claim, claim_of, read_keys
from antiphon.receipts.verdict import Verifier
from antiphon.shared.receipts.signing import encode_base64
from tests.system.served import Served, fetch, serve_tiny, slowed, until_the_end, wait_until

pytestmark = [pytest.mark.system, pytest.mark.nats]

HEADER = "X-Antiphon-Receipt"
CHAT, COMPLETIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
TALK = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "tell me"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 9}}, "required": ["a"]}
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": SCHEMA}}
LONG: dict[str, Any] = {"max_tokens": 60, "ignore_eos": True, "temperature": 0.9}
ASKED: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": TALK, **LONG}),
    (CHAT, {"messages": TALK, **LONG, "n": 3, "seed": 5, "frequency_penalty": 0.8, "repetition_penalty": 1.2}),
    (CHAT, {"messages": TALK, "max_tokens": 80, "guided_json": SCHEMA}),
    (CHAT, {"messages": TALK, "max_tokens": 80, "tools": [TOOL], "tool_choice": "required"}),
    (CHAT, {"messages": [*TALK, {"role": "assistant", "content": "I"}], **LONG, "continue_final_message": True,
            "add_generation_prompt": False}),
    (COMPLETIONS, {"prompt": ["one", "two"], **LONG, "temperature": 0}),
    (COMPLETIONS, {"prompt": "an echo", **LONG, "echo": True}),
    (COMPLETIONS, {"prompt": "to stop", **LONG, "max_tokens": 300, "stop": ["e"]}),
    (COMPLETIONS, {"prompt": [30, 31, 32], **LONG, "top_k": 5, "top_p": 0.8, "bad_words": ["the"]}),
    (RESPONSES, {"input": "tell me", "max_output_tokens": 40, "temperature": 0.9}),
    (MESSAGES, {"messages": TALK[1:], "max_tokens": 40}),
]  # fmt: skip


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("keys") / "keys.json"


@pytest.fixture(scope="module")
def served(model: Path, key_file: Path) -> Iterator[Served]:
    flags = ("--dtype=float32", "--gateways=2", "--max-num-seqs=16", f"--receipt-keys={key_file}")
    with until_the_end(serve_tiny(model, *flags), reconnects=True) as started:
        yield started


@pytest.fixture(scope="module")
def verifier(model: Path, served: Served) -> Iterator[Verifier]:
    keys = read_keys(f"http://127.0.0.1:{served.port}")
    made = Verifier(str(model), keys, dtype="float32", kv_cache_memory_gb=0.05, threads=1)
    yield made
    made.close()


def asked(served: Served, path: str, body: dict[str, Any], receipt: str = "full") -> bytes:
    answer = fetch(served, "POST", path, {"model": "tiny", **body}, **{HEADER: receipt})
    assert answer.status == 200, answer.body
    return answer.body


def test_honest_receipts_of_all_apis_made_in_one_batch_are_equal(served: Served, verifier: Verifier) -> None:
    streams = [(path, {**body, "stream": True}) for path, body in ASKED]
    with ThreadPoolExecutor(2 * len(ASKED)) as threads:
        answers = [*threads.map(lambda one: asked(served, *one), [*ASKED, *streams])]
    for (path, body), answer in zip([*ASKED, *streams], answers, strict=True):
        claim = claim_of(answer)
        request = json.dumps(body).encode() if path in (CHAT, COMPLETIONS) else None
        found = verifier.verify(claim, request)
        assert found.verdict == "equal", (path, body, found)
        assert found.signature == "valid"
        assert all(one["num_tokens"] for one in found.outputs)


def test_the_receipt_is_where_clients_of_each_api_expect_it(served: Served) -> None:
    named = {"type": "antiphon.receipt"}
    for path, body in (ASKED[0], ASKED[5], ASKED[9], ASKED[10]):
        text = asked(served, path, {**body, "stream": True}, "1").decode()
        events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
        [place] = [number for number, event in enumerate(events) if "antiphon_receipt" in event]
        assert "antiphon_evidence" not in text
        if path in (CHAT, COMPLETIONS):
            assert place == len(events) - 1
            assert events[place]["choices"] == []
            assert text.endswith("data: [DONE]\n\n")
        elif path == MESSAGES:
            assert events[place].items() >= named.items()
            assert [one["type"] for one in events[place:]] == ["antiphon.receipt", "message_stop"]
        else:
            assert events[place].items() >= named.items()
            assert [one["sequence_number"] for one in events] == [*range(len(events))]
        without = asked(served, path, {**body, "stream": True}, "0")
        assert b"antiphon_receipt" not in without


def test_what_cannot_have_a_receipt_is_refused_before_it_runs(served: Served) -> None:
    for path, body, reason in (
        (COMPLETIONS, {"prompt": "a", "n": 1, "best_of": 2}, "'best_of'"),
        (COMPLETIONS, {"prompt": "a", "use_beam_search": True, "best_of": 2, "temperature": 0}, "a beam search"),
        (RESPONSES, {"input": "a", "background": True}, "in the background"),
        ("/v1/embeddings", {"input": "a"}, ""),
    ):
        answer = fetch(served, "POST", path, {"model": "tiny", **body}, **{HEADER: "1"})
        if not reason:
            assert b"antiphon_receipt" not in answer.body
            continue
        assert (answer.status, reason in answer.body.decode()) == (400, True), answer
    answer = fetch(served, "POST", COMPLETIONS, {"model": "tiny", "prompt": "a"}, **{HEADER: "yes"})
    assert answer.status == 400


def test_a_stream_whose_engine_and_gateways_die_has_the_receipt_of_all_its_tokens(
    served: Served, verifier: Verifier
) -> None:
    body = {"model": "tiny", "messages": TALK, "max_tokens": 300, "ignore_eos": True, "temperature": 0.9, "seed": 4}
    client = Client(f"http://127.0.0.1:{served.port}", headers={HEADER: "full"})
    chunks = client.stream(CHAT, body)
    names = ("engine-1", "gateway-1", "gateway-2")
    pids = served.pids()
    with slowed(pids["engine-1"]) as slow:
        got = [next(chunks) for _ in range(30)]
        with slow.frozen():
            for name in names:
                os.kill(pids[name], signal.SIGKILL)
    got += chunks
    claim = claim_of(json.dumps(got[-1]).encode())
    receipt = claim.receipt(None)
    assert sum(len(chunk["choices"]) for chunk in got) > 10
    assert receipt.outputs[0].num_tokens == 300
    assert receipt.outputs[0].resumed > 0
    found = verifier.verify(Claim(claim.token, claim.evidence), json.dumps(body).encode())
    assert found.verdict == "equal", found
    wait_until(lambda: set(names) <= served.pids().keys(), 60)


def test_the_command_says_what_is_proven(served: Served, model: Path, key_file: Path, tmp_path: Path) -> None:
    assert stat.S_IMODE(key_file.stat().st_mode) == 0o600
    wait_until(lambda: fetch(served, "GET", "/health").status == 200, 60)
    path, body = ASKED[0]
    answer = json.loads(asked(served, path, body))
    files = {"answer": answer, "request": body, "false": {**answer, "antiphon_receipt": forged(answer)}}
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    command = [sys.executable, "-m", "antiphon", "verify", f"--model={model}", "--dtype=float32", f"--keys={key_file}"]

    def run(name: str, *more: str) -> tuple[int, str]:
        done = subprocess.run([*command, str(tmp_path / name), *more], capture_output=True, text=True, check=False)
        return done.returncode, done.stdout + done.stderr

    assert run("answer", f"--request={tmp_path / 'request'}") == (0, "equal\noutput 0: equal, 60 tokens\n")
    code, told = run("false")
    assert (code, told.startswith("refused: The signature is wrong")) == (1, True), told
    assert run("missing")[0] == 2


def forged(answer: dict[str, Any]) -> str:
    head, _, signature = answer["antiphon_receipt"].split(".")
    payload = json.dumps({"version": 1}).encode()
    return f"{head}.{encode_base64(payload)}.{signature}"
