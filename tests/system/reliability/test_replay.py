"""Recorded requests that run again bit for bit, on the server and in this process, and from the middle of an output."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from antiphon import cli
from tests.system.served import Answer, Served, fetch, serve_tiny, until_the_end, wait_until

pytestmark = [pytest.mark.system, pytest.mark.nats, pytest.mark.timeout(300)]
NOT_FOUND = 4
ENGINES = ("engine-1", "engine-2")
KEYS = {"alice": "secret-of-alice", "bob": "secret-of-bob", "root": "secret-of-root"}
SAMPLED = {"prompt": "Once", "max_tokens": 40, "temperature": 1.2, "ignore_eos": True}


@pytest.fixture(scope="module")
def served(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Two engines and two gateways, and a key file with two users and an operator."""
    path = tmp_path_factory.mktemp("keys") / "keys.json"
    scopes = {"alice": ["inference"], "bob": ["inference"], "root": ["inference", "admin"]}
    path.write_text(json.dumps({"keys": [{"name": n, "key": k, "scopes": scopes[n]} for n, k in KEYS.items()]}))
    path.chmod(0o600)
    flags = ("--engines=2", "--gateways=2", "--threads=1", "--record-content-mb=8", f"--api-keys-file={path}")
    with until_the_end(serve_tiny(model, *flags)) as started:
        wait_until(lambda: all(engine_state(started, name) == "ready" for name in ENGINES), 60, lambda: started.output)
        yield started


def engine_state(served: Served, name: str) -> str | None:
    reply = fetch(served, "GET", f"/admin/engines/{name}", Authorization=f"Bearer {KEYS['root']}")
    return reply.json.get("state")


def ask(served: Served, path: str, body: dict[str, Any], key: str = "alice") -> Answer:
    return fetch(served, "POST", path, body, Authorization=f"Bearer {KEYS[key]}")


def complete(served: Served, **fields: Any) -> Any:
    answer = ask(served, "/v1/completions", {"model": "tiny", **SAMPLED, **fields})
    assert answer.status == 200, answer.body
    return answer.json


def antiphon(served: Served, *words: str, key: str = "alice") -> int:
    return cli.main([*words, "--server", served.url, "--api-key", KEYS[key]])


def replayed(served: Served, name: str, engine: str) -> int:
    """The exit code. On a machine that is too busy an engine may count as lost, and is not found at the moment."""
    codes = list[int]()

    def is_found() -> bool:
        codes.append(antiphon(served, "replay", name, "--engine", engine))
        return codes[-1] != NOT_FOUND

    wait_until(is_found, 30, lambda: served.output)
    return codes[-1]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"n": 3, "best_of": 4, "logprobs": 2},
        {"prompt": ["Once", "Twice"], "seed": 7, "frequency_penalty": 0.5},
        {"ignore_eos": False, "stop": ["e"], "max_tokens": 200},
        {"guided_regex": "[a-z]{1,20}", "ignore_eos": False},
        {"use_beam_search": True, "best_of": 3, "temperature": 0},
    ],
)
def test_a_recorded_request_runs_again_bit_for_bit(
    served: Served, fields: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    name = complete(served, **fields)["id"]
    capsys.readouterr()
    for engine in ENGINES:
        assert replayed(served, name, engine) == 0, capsys.readouterr()
        assert capsys.readouterr().out.splitlines()[0].endswith(f" is equal on {engine}")


def test_a_chat_runs_again_with_the_end_tokens_of_its_template(served: Served) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 60}
    assert antiphon(served, "replay", ask(served, "/v1/chat/completions", body).json["id"]) == 0


def test_a_file_runs_elsewhere_and_a_difference_is_shown_with_its_gap(
    served: Served, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "one.json"
    name = complete(served, n=2, top_a=0.1, presence_penalty=0.3, logit_bias={"70": 1.0})["id"]
    assert antiphon(served, "record", "save", name, str(path)) == 0
    assert antiphon(served, "replay", str(path), key="bob") == 0
    assert antiphon(served, "replay", str(path), "--model", str(model)) == 0
    record = json.loads(path.read_bytes())
    token_ids = record["sequences"][1]["token_ids"]
    token_ids[5] = token_ids[5] - 1 if token_ids[5] else 1  # a token id of the vocabulary
    path.write_text(json.dumps(record))
    for more in ((), ("--model", str(model))):
        capsys.readouterr()
        assert antiphon(served, "replay", str(path), *more) == 1
        shown = capsys.readouterr().out
        assert "output 0: 40 tokens, equal" in shown
        assert "output 1: the first difference is at position 5" in shown
        assert f"recorded: token {record['sequences'][1]['token_ids'][5]} " in shown
        assert "gap of the log probabilities: " in shown
    path.write_text("{}")
    assert antiphon(served, "replay", str(path)) == 2
    assert "This is no recorded request" in capsys.readouterr().err


def test_a_fork_goes_on_as_the_request_did_until_something_is_changed(
    served: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    original = complete(served, n=2, return_token_ids=True)
    name, choice = original["id"], original["choices"][1]
    for position in (0, 17, 39):
        fork = ask(
            served, f"/v1/requests/{name}/fork", {"position": position, "index": 1, "return_token_ids": True}
        ).json
        assert fork["choices"][0]["text"] == choice["text"]
        assert fork["choices"][0]["token_ids"] == choice["token_ids"][position:]
        assert fork["usage"]["completion_tokens"] == 40 - position
    capsys.readouterr()
    assert antiphon(served, "fork", name, "--at", "17", "--index", "1") == 0
    assert capsys.readouterr().out.rstrip("\n") == choice["text"].rstrip("\n")
    other = ask(served, f"/v1/requests/{name}/fork", {"position": 17, "token_id": 65, "return_token_ids": True}).json
    assert other["choices"][0]["text"] != original["choices"][0]["text"]
    assert len(other["choices"][0]["token_ids"]) == 40 - 18
    longer = ask(served, f"/v1/requests/{name}/fork", {"position": 40, "max_tokens": 44}).json
    # Further tokens may complete a character that the original's last tokens began.
    assert longer["choices"][0]["text"].startswith(original["choices"][0]["text"].rstrip("\ufffd"))
    for wrong, param in (({"position": 41}, "position"), ({"position": 40}, "max_tokens")):
        refused = ask(served, f"/v1/requests/{name}/fork", wrong)
        assert (refused.status, refused.json["error"]["param"]) == (400, param)


def test_the_output_has_each_token_with_its_text(served: Served) -> None:
    original = complete(served, n=2, temperature=0.5, seed=3, return_token_ids=True)

    def output(key: str) -> Answer:
        return fetch(served, "GET", f"/v1/requests/{original['id']}/output", Authorization=f"Bearer {KEYS[key]}")

    found = output("alice").json
    assert (found["temperature"], found["max_tokens"], found["refusal"]) == (0.5, 40, None)
    for one, choice in zip(found["sequences"], original["choices"], strict=True):
        assert one["token_ids"] == choice["token_ids"]
        assert one["engines"][0] in ("engine-1", "engine-2")
        assert len(one["texts"]) == 40
        # A token may be a part of a character; what ends an output is not in its text.
        whole = [text for text in one["texts"] if "\ufffd" not in text and not text.startswith("<")]
        assert whole
        assert all(text in choice["text"] for text in whole)
    assert output("bob").status == 404


def test_only_the_key_of_a_request_and_operators_reach_it(
    served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = complete(served)["id"]
    assert antiphon(served, "replay", name, key="bob") == 4
    assert antiphon(served, "fork", name, "--at", "3", key="bob") == 4
    assert antiphon(served, "record", "save", name, str(tmp_path / "file"), key="bob") == 4
    assert capsys.readouterr().err.count("is recorded") == 3
    assert antiphon(served, "replay", name, key="root") == 0
    assert antiphon(served, "replay", name, "--engine", "engine-9") == 1
    assert "No engine 'engine-9' of the model 'tiny' takes requests." in capsys.readouterr().err
