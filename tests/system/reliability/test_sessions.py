"""Sessions that travel between servers in encrypted files, with their KV where it fits, and go on as the rule says."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from antiphon import cli
from antiphon.client import Client
from antiphon.services.engine.kv.disk.segment import ENTRY_BYTES
from tests.models import make_model
from tests.system.served import Answer, Served, fetch, serve_tiny, until_the_end, wait_until

pytestmark = [pytest.mark.system, pytest.mark.nats, pytest.mark.timeout(300)]
FILE_KEY = "0123456789abcdef of the tests"
KEYS = {"alice": "secret-of-alice", "bob": "secret-of-bob"}
PROMPT = "All of this is one long prompt, of which the KV fills many blocks. " * 8
"""More tokens than `limits.KV_TIER_TOKENS_MIN`."""
SAMPLED = {
    "prompt": PROMPT,
    "temperature": 1.1,
    "seed": 11,
    "ignore_eos": True,
    "return_token_ids": True,
    "max_tokens": 60,
}
BLOCK_SIZE = 64
NUM_BLOCKS = 6
CUT_MAX = 1500


@pytest.fixture(scope="module")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "tiny", "llama", max_position_embeddings=2048)


@dataclass(frozen=True)
class Servers:
    """Two equal servers with disks of their own, and one that computes with another backend in another precision."""

    here: Served
    there: Served
    other: Served
    disk: Path
    """The KV of the first one."""


@pytest.fixture(scope="module")
def servers(long_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    path = tmp_path_factory.mktemp("keys") / "keys.json"
    keys = [{"name": name, "key": key, "scopes": ["inference"]} for name, key in KEYS.items()]
    path.write_text(json.dumps({"keys": keys}))
    path.chmod(0o600)
    disk = tmp_path_factory.mktemp("kv")
    flags = ("--threads=1", "--record-content-mb=8", f"--api-keys-file={path}", "--kv-disk-gb=0.1", "--swap-space=0.1")
    with (
        until_the_end(serve_tiny(long_model, *flags, "--dtype=bfloat16", f"--kv-disk-path={disk / 'a'}")) as here,
        until_the_end(serve_tiny(long_model, *flags, "--dtype=bfloat16", f"--kv-disk-path={disk / 'b'}")) as there,
        until_the_end(
            serve_tiny(long_model, *flags, "--cpu-backend=torch", "--dtype=float32", f"--kv-disk-path={disk / 'c'}")
        ) as other,
    ):
        yield Servers(here, there, other, disk / "a")


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANTIPHON_SESSION_KEY", FILE_KEY)


def ask(served: Served, path: str, body: dict[str, Any], key: str = "alice") -> Answer:
    return fetch(served, "POST", path, body, Authorization=f"Bearer {KEYS[key]}")


def get(served: Served, path: str, key: str = "alice") -> Answer:
    return fetch(served, "GET", path, Authorization=f"Bearer {KEYS[key]}")


def antiphon(served: Served, *words: str, key: str = "alice") -> int:
    return cli.main(["session", *words, "--server", served.url, "--api-key", KEYS[key]])


def complete(served: Served, **fields: Any) -> Any:
    answer = ask(served, "/v1/completions", {"model": "tiny", **SAMPLED, **fields})
    assert answer.status == 200, answer.body
    return answer.json


def go_on(served: Served, session: str, **fields: Any) -> Any:
    answer = ask(served, f"/v1/sessions/{session}/continue", {"return_token_ids": True, **fields})
    assert answer.status == 200, answer.body
    return answer.json


def cut(served: Served, num_tokens: int, **fields: Any) -> str:
    """Leaves a stream in the middle, which is long enough to go on for a while. Returns the id of its request."""
    seen, body = 0, {"model": "tiny", **SAMPLED, "max_tokens": CUT_MAX, **fields}
    for chunk in Client(served.url, KEYS["alice"]).stream("/v1/completions", body):
        seen += sum(len(one["token_ids"]) for one in chunk["choices"])
        if seen >= num_tokens:
            return str(chunk["id"])
    raise AssertionError("the stream has ended")


def stored(servers: Servers, count: int) -> None:
    """Waits until as many blocks are on the disk of the first server."""

    def num_entries() -> int:
        return sum(path.stat().st_size for path in servers.disk.rglob("*.idx")) // ENTRY_BYTES

    wait_until(lambda: num_entries() >= count, 30, lambda: servers.here.output)


def called(served: Served, capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    capsys.readouterr()
    assert antiphon(served, *words, "--json") == 0, capsys.readouterr()
    return json.loads(capsys.readouterr().out)


def test_a_cut_stream_goes_on_at_an_equal_server_with_its_kv(
    servers: Servers, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    complete(servers.here)
    stored(servers, NUM_BLOCKS)
    path = tmp_path / "one.session"
    called(servers.here, capsys, "export", cut(servers.here, 20), str(path))
    assert PROMPT.encode()[:40] not in path.read_bytes()
    session = called(servers.there, capsys, "import", str(path))
    (output,) = session["outputs"]
    assert (output["finish_reason"], 20 <= output["tokens"] < CUT_MAX) == (None, True)
    assert session["kv"]["blocks"] == session["kv"]["taken"] >= NUM_BLOCKS
    length = output["tokens"] + 40
    right = complete(servers.here, max_tokens=length)["choices"][0]
    found = go_on(servers.there, session["id"], max_tokens=length)
    assert found["choices"][0]["token_ids"] == right["token_ids"][output["tokens"] :]
    assert found["choices"][0]["text"] == right["text"]
    assert found["usage"]["prompt_tokens_details"]["cached_tokens"] >= NUM_BLOCKS * BLOCK_SIZE
    capsys.readouterr()
    assert antiphon(servers.there, "continue", session["id"], "--max-tokens", str(length)) == 0
    assert capsys.readouterr().out.rstrip("\n") == right["text"].rstrip("\n")
    # The session itself travels on, with the KV that was imported.
    again = tmp_path / "two.session"
    called(servers.there, capsys, "export", session["id"], str(again))
    back = called(servers.here, capsys, "import", str(again))
    assert back["kv"]["taken"] >= NUM_BLOCKS
    assert go_on(servers.here, back["id"], max_tokens=length)["choices"][0]["text"] == right["text"]


def test_nobody_else_reads_the_kv_of_an_imported_session(
    servers: Servers, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt = "Only the importer reads this. " + PROMPT
    name = complete(servers.here, prompt=prompt)["id"]
    stored(servers, 2 * NUM_BLOCKS)
    called(servers.here, capsys, "export", name, str(tmp_path / "file"))
    assert called(servers.there, capsys, "import", str(tmp_path / "file"))["kv"]["taken"] >= NUM_BLOCKS
    usage = complete(servers.there, prompt=prompt, max_tokens=1)["usage"]
    assert not (usage.get("prompt_tokens_details") or {}).get("cached_tokens")


def test_another_backend_keeps_the_tokens_and_computes_the_rest_itself(
    servers: Servers, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "one.session"
    called(servers.here, capsys, "export", cut(servers.here, 10, temperature=0), str(path))
    capsys.readouterr()
    assert antiphon(servers.other, "import", str(path)) == 0
    shown = capsys.readouterr().out
    assert "0 of " in shown
    assert "blocks of KV fit: the engines here have another precision, backend" in shown
    session = json.loads(get(servers.other, "/v1/sessions").body)["data"][0]
    num_before = session["outputs"][0]["tokens"]
    before = complete(servers.here, temperature=0, max_tokens=num_before)["choices"][0]["token_ids"]
    found = go_on(servers.other, session["id"], max_tokens=num_before + 40)["choices"][0]["token_ids"]
    ids = tokens_of(servers.other, PROMPT) + before
    assert found == complete(servers.other, prompt=ids, temperature=0, max_tokens=40)["choices"][0]["token_ids"]


def tokens_of(served: Served, text: str) -> list[int]:
    return ask(served, "/tokenize", {"model": "tiny", "prompt": text}).json["tokens"]


def test_a_next_turn_follows_with_the_tokens_of_the_first(servers: Servers) -> None:
    first = complete(servers.here, temperature=0)
    session = ask(servers.here, "/v1/sessions", {"id": first["id"]}).json
    found = go_on(servers.here, session["id"], prompt=" Then", max_tokens=12)["choices"][0]["token_ids"]
    ids = tokens_of(servers.here, PROMPT) + first["choices"][0]["token_ids"]
    ids += ask(servers.here, "/tokenize", {"model": "tiny", "prompt": " Then", "add_special_tokens": False}).json[
        "tokens"
    ]
    assert found == complete(servers.here, prompt=ids, temperature=0, max_tokens=12)["choices"][0]["token_ids"]


def test_a_next_turn_of_a_chat_is_rendered_by_the_template(
    servers: Servers, capsys: pytest.CaptureFixture[str]
) -> None:
    said = [{"role": "user", "content": "One"}]
    body = {"model": "tiny", "messages": said, "max_tokens": 8, "temperature": 0, "return_token_ids": True}
    first = ask(servers.here, "/v1/chat/completions", body).json
    session = ask(servers.here, "/v1/sessions", {"id": first["id"]}).json
    body = {"messages": [{"role": "user", "content": "Two"}], "max_tokens": 8}
    answer = go_on(servers.here, session["id"], **body)
    assert answer["object"] == "chat.completion"
    assert len(answer["choices"][0]["token_ids"]) <= 8
    assert answer["usage"]["prompt_tokens"] > session["prompt_tokens"][0] + session["outputs"][0]["tokens"]
    assert antiphon(servers.here, "continue", session["id"], "--message", "Two", "--max-tokens", "8") == 0
    assert capsys.readouterr().out.rstrip("\n") == answer["choices"][0]["message"]["content"].rstrip("\n")


def test_a_running_request_becomes_a_session(servers: Servers) -> None:
    stream = Client(servers.here.url, KEYS["alice"]).stream(
        "/v1/completions", {"model": "tiny", **SAMPLED, "max_tokens": 1200}
    )
    name = str(next(stream)["id"])
    session = ask(servers.here, "/v1/sessions", {"id": name}).json
    assert session["outputs"][0]["finish_reason"] is None
    text = "".join(one["text"] for chunk in stream for one in chunk["choices"])
    assert 0 < session["outputs"][0]["tokens"] < 1200
    found = go_on(servers.here, session["id"], max_tokens=session["outputs"][0]["tokens"] + 20)["choices"][0]["text"]
    assert text.startswith(found.rstrip("\ufffd"))


def test_what_is_wrong_with_a_file_is_said(
    servers: Servers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "one.session"
    called(servers.here, capsys, "export", complete(servers.here, prompt="Short", max_tokens=5)["id"], str(path))
    data = path.read_bytes()
    middle = len(data) // 2
    wrong = {
        "it is truncated": data[:-1],
        "is damaged or was changed": data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :],
        "has data after its end": data + b"x",
        "no file of `antiphon session export`": b"PK" + data,
        "it has version 2": data[:16] + b"\x02\x00" + data[18:],
    }
    for reason, changed in wrong.items():
        path.write_bytes(changed)
        assert antiphon(servers.there, "import", str(path)) == 1
        assert reason in capsys.readouterr().err
    path.write_bytes(data)
    monkeypatch.setenv("ANTIPHON_SESSION_KEY", FILE_KEY + "!")
    assert antiphon(servers.there, "import", str(path)) == 1
    assert "made with another key" in capsys.readouterr().err
    monkeypatch.setenv("ANTIPHON_SESSION_KEY", "short")
    assert antiphon(servers.there, "import", str(path)) == 1
    assert "12 to 1024 printable ASCII characters" in capsys.readouterr().err
    monkeypatch.delenv("ANTIPHON_SESSION_KEY")
    assert antiphon(servers.there, "import", str(path)) == 2
    for served in (servers.here, servers.there):
        assert FILE_KEY not in served.output


def test_a_session_belongs_to_its_key(servers: Servers, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = complete(servers.here, prompt="Short", max_tokens=5)["id"]
    assert ask(servers.here, "/v1/sessions", {"id": name}, "bob").status == 404
    session = ask(servers.here, "/v1/sessions", {"id": name}).json["id"]
    assert get(servers.here, f"/v1/sessions/{session}").json["id"] == session
    assert get(servers.here, f"/v1/sessions/{session}", "bob").status == 404
    assert get(servers.here, "/v1/sessions", "bob").json["data"] == []
    assert ask(servers.here, f"/v1/sessions/{session}/continue", {"max_tokens": 9}, "bob").status == 404
    assert antiphon(servers.here, "export", session, str(tmp_path / "x"), key="bob") == 4
    assert not list(tmp_path.iterdir())
    assert antiphon(servers.here, "delete", session) == 0
    assert get(servers.here, f"/v1/sessions/{session}").status == 404
    assert session not in get(servers.here, "/v1/sessions").body.decode()
    assert get(servers.here, "/v1/responses/" + session).status == 404
