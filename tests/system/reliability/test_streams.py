"""Streams that outlive every process: gateways, the bus and everything at once are killed in mid-stream."""

import contextlib
import http.client
import json
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from antiphon.chat.answers import pieces
from antiphon.client import Client
from antiphon.client import stream as resumable_stream
from tests.system.served import Served, fetch, frozen, serve_tiny, slowed, until_the_end, wait_until

pytestmark = [pytest.mark.system, pytest.mark.nats]

FLAGS = ("--dtype=float32", "--block-size=16", "--max-num-seqs=16", "--record-streams=all")
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
NUM_TOKENS = 300
SCHEMA = {
    "type": "object",
    "properties": {"words": {"type": "array", "items": {"type": "string"}, "minItems": 8}},
    "required": ["words"],
}
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": SCHEMA}}


def request(path: str, number: int, **fields: Any) -> tuple[str, dict[str, Any]]:
    given = (
        {"messages": [{"role": "user", "content": f"{number}: tell me"}]} if path == CHAT else {"prompt": f"{number}"}
    )
    base = {"model": "tiny", "stream": True, "max_tokens": NUM_TOKENS, "ignore_eos": True, "temperature": 0.9}
    return path, {**base, **given, "seed": number, "stream_options": {"include_usage": True}, **fields}


MIX = {
    "guided": request(CHAT, 5, guided_json=SCHEMA, ignore_eos=False),
    "tools": request(CHAT, 6, tools=[TOOL], tool_choice="required", ignore_eos=False),
    "greedy": request(COMPLETIONS, 2, temperature=0),
    "choices": request(CHAT, 3, n=3),
    "penalties": request(CHAT, 4, frequency_penalty=1.2, presence_penalty=0.4, repetition_penalty=1.1),
    "logprobs": request(CHAT, 7, logprobs=True, top_logprobs=2),
    "completion logprobs": request(COMPLETIONS, 8, logprobs=2),
    "stop string": request(CHAT, 9, stop=["<|filler_299|>zz"]),
    "token ids": request(CHAT, 10, return_token_ids=True),
    "plain": request(CHAT, 1),
    "responses": (
        RESPONSES,
        {
            **{
                "model": "tiny",
                "stream": True,
                "max_output_tokens": NUM_TOKENS,
                "ignore_eos": True,
                "temperature": 0.9,
            },
            **{"seed": 11, "input": "11: tell me", "include": ["message.output_text.logprobs"], "top_logprobs": 2},
        },
    ),
    "messages": (
        MESSAGES,
        {
            **{"model": "tiny", "stream": True, "max_tokens": NUM_TOKENS, "temperature": 0},
            "messages": [{"role": "user", "content": "12: tell me"}],
        },
    ),
}
"""A stream of each kind whose events depend on more than the latest token. Those with a grammar begin latest."""


ITEM_ID = re.compile(r"(?<=msg_)[A-Za-z0-9]{22}")


class Broken(Exception):
    """The connection has ended before the stream."""


class Events:
    """A stream as its client sees it: its events so far, and the id of the last one."""

    def __init__(self, served: Served, method: str = "", path: str = "", body: Any = None, **headers: str) -> None:
        self.connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=60)
        self.connection.connect()
        self.local_port = self.connection.sock.getsockname()[1]
        self.events: list[bytes] = []
        self.last_id = ""
        self.response: http.client.HTTPResponse | None = None
        OPENED.append(self)
        if method:
            self.ask(method, path, body, **headers)

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> None:
        data = None if body is None else json.dumps(body)
        self.connection.request(method, path, data, {"Content-Type": "application/json", **headers})

    def read(self, count: int = 10**6) -> bool:
        """Reads so many further events. Returns whether the stream has ended."""
        try:
            if self.response is None:
                self.response = self.connection.getresponse()
                assert self.response.status == 200, self.response.read()
            fields: dict[bytes, bytes] = {}
            while count:
                line = self.response.readline()
                if not line:
                    if self.response.isclosed() and is_complete(self.events):
                        return True
                    raise Broken
                name, _, value = line.rstrip(b"\n").partition(b": ")
                if name:
                    fields[name] = value
                elif b"data" in fields:
                    self.events.append(fields[b"data"])
                    self.last_id = fields.get(b"id", self.last_id.encode()).decode()
                    fields, count = {}, count - 1
        except (OSError, http.client.HTTPException) as error:
            raise Broken from error
        return False

    def ends_within(self, seconds: float) -> bool:
        """Reads until the stream ends, or until nothing has come for a time: then nothing more can be read."""
        self.connection.sock.settimeout(seconds)
        try:
            return self.read()
        except Broken:
            return False

    def close(self) -> None:
        if self.response is not None:
            self.response.close()
        self.connection.close()


OPENED: list[Events] = []
ENDS = (b'{"type":"message_stop"', b'{"type":"response.completed"', b'{"type":"response.incomplete"')


def is_complete(events: list[bytes]) -> bool:
    return bool(events) and (events[-1] == b"[DONE]" or events[-1].startswith(ENDS))


@pytest.fixture(autouse=True)
def all_closed() -> Iterator[None]:
    yield
    while OPENED:
        OPENED.pop().close()


def told(events: list[bytes]) -> Any:
    """What the events of one stream say, without how they are divided. There must be one end."""
    if b"[DONE]" not in events:
        return told_by_name(events)
    assert events.count(b"[DONE]") == 1
    assert events[-1] == b"[DONE]"
    found: dict[str, Any] = {}
    ids: set[Any] = set()
    for event in map(json.loads, events[:-1]):
        ids.add((event["id"], event["created"], event["model"], event["system_fingerprint"]))
        if event.get("usage") is not None:
            assert "usage" not in found
            found["usage"] = event["usage"]
            # What an engine finds in its cache depends on whether a former run has computed it there.
            del found["usage"]["prompt_tokens_details"]
        for choice in event["choices"]:
            add(found.setdefault(choice["index"], {}), choice)
    assert len(ids) == 1, ids
    assert all(len(found[index]["finish"]) == 1 for index in found if index != "usage")
    return found


def told_by_name(events: list[bytes]) -> list[Any]:
    """The events of a stream of `/v1/responses` or `/v1/messages`, with what belongs to one text joined."""
    assert sum(is_complete([event]) for event in events) == 1
    assert is_complete(events)
    found: list[Any] = []
    numbers: list[int] = []
    for event in map(json.loads, events):
        numbers += [event.pop("sequence_number")] if "sequence_number" in event else []
        for holder in (event, event.get("message", {}), event.get("response", {})):
            usage = holder.get("usage") or {}
            for name in ("input_tokens_details", "cache_read_input_tokens", "input_tokens"):
                usage.pop(name, None)
            for name in ("id", "item_id", "created_at"):
                holder.pop(name, None)
        delta = event.get("delta")
        if not event["type"].endswith("delta") or (isinstance(delta, dict) and "text" not in delta):
            found.append(event)
            continue
        text, logprobs = delta["text"] if isinstance(delta, dict) else delta, event.pop("logprobs", [])
        del event["delta"]
        if isinstance(found[-1], tuple):
            assert found[-1][0] == event
            found[-1] = (event, found[-1][1] + text, found[-1][2] + logprobs)
        else:
            found.append((event, text, logprobs))
    assert numbers in ([], list(range(len(events))))
    return json.loads(ITEM_ID.sub("_", json.dumps(found)))


def add(one: dict[str, Any], choice: dict[str, Any]) -> None:
    delta = choice.get("delta", {"content": choice.get("text")})
    assert "error" not in choice
    for name in ("role", "content"):
        one[name] = one.get(name, "") + (delta.get(name) or "")
    for call in delta.get("tool_calls", ()):
        function = call["function"]
        if name := function.get("name"):
            one.setdefault("calls", []).append((call["index"], name))
        one["arguments"] = one.get("arguments", "") + (function.get("arguments") or "")
    logprobs = choice.get("logprobs") or {}
    one["logprobs"] = one.get("logprobs", []) + (logprobs.get("content") or logprobs.get("token_logprobs") or [])
    one["offsets"] = one.get("offsets", []) + logprobs.get("text_offset", [])
    one["token_ids"] = one.get("token_ids", []) + (choice.get("token_ids") or [])
    if choice["finish_reason"] is not None:
        one.setdefault("finish", []).append((choice["finish_reason"], choice["stop_reason"]))


def owner_of(served: Served, stream: Events) -> str:
    """The gateway that has accepted the connection of a stream."""
    inode = ""

    def accepted() -> bool:
        nonlocal inode
        for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
            words = line.split()
            ports = [int(word.split(":")[1], 16) for word in words[1:3]]
            if ports == [served.port, stream.local_port]:
                inode = words[9]
        return inode not in ("", "0")

    wait_until(accepted, 60)
    for name, pid in served.pids().items():
        with contextlib.suppress(OSError):
            for link in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    if str(link.readlink()) == f"socket:[{inode}]":
                        return name
    raise AssertionError(inode)


def connected(served: Served, gateway: str) -> Events:
    """A connection to a gateway, on which no stream has begun: the kernel chooses one for each connection."""
    while True:
        stream = Events(served)
        if owner_of(served, stream) == gateway:
            return stream
        stream.close()


def undisturbed(served: Served, path: str, body: Any) -> Any:
    stream = Events(served, "POST", path, body)
    stream.read()
    stream.close()
    return told(stream.events)


def resumed(served: Served, stream: Events, path: str, body: Any) -> list[bytes]:
    """All events of a stream whose connection breaks: those before and those after its client has come back."""
    before: list[bytes] = []
    with contextlib.suppress(Broken):
        stream.read()
    stream.close()
    before += stream.events
    if before and before[-1] == b"[DONE]":
        return before
    for _ in range(100):
        after = Events(served, "POST", path, body, **{"Last-Event-ID": stream.last_id})
        try:
            after.read()
        except Broken:
            assert not after.events
            time.sleep(0.1)
            continue
        finally:
            after.close()
        return before + after.events
    raise AssertionError("no gateway")


@pytest.fixture(scope="module")
def served(model: Path) -> Iterator[Served]:
    # A test freezes the engine for longer than it may reply to a request.
    with until_the_end(serve_tiny(model, *FLAGS, "--gateways=2"), reconnects=True) as started:
        yield started


def test_a_stream_goes_on_behind_each_of_its_events_at_any_gateway(served: Served) -> None:
    path, body = request(CHAT, 20, n=2, max_tokens=8)
    stream = Events(served, "POST", path, body)
    ids: list[str] = []
    while not stream.read(1):
        ids.append(stream.last_id)
        if stream.events[-1] == b"[DONE]":
            break
    right = told(stream.events)
    assert len(set(ids)) == len(ids)
    for number, last in enumerate(ids[:-1], start=1):
        request_id, _, position = last.partition(":")
        rest = Events(served, "GET", f"/v1/streams/{request_id}?from={position}")
        rest.read()
        assert told(stream.events[:number] + rest.events) == right, last


@pytest.mark.matrix("R-16")
def test_streams_of_every_kind_survive_the_death_of_their_gateway(served: Served) -> None:
    whole = {name: Events(served, "POST", *one) for name, one in MIX.items()}
    right = {name: (stream.read(), told(stream.events))[1] for name, stream in whole.items()}
    missing = set(MIX)
    for _ in range(4):
        wait_until(lambda: "gateway-1" in served.pids(), 60)
        streams = {name: connected(served, "gateway-1") for name in MIX if name in missing}
        pids = served.pids()
        with slowed(pids["engine-1"]) as slow:
            for name, stream in streams.items():
                stream.ask("POST", *MIX[name])
            for stream in streams.values():
                stream.read(2)
            with slow.frozen():
                os.kill(pids["gateway-1"], signal.SIGKILL)
        for name, stream in streams.items():
            events = resumed(served, stream, *MIX[name])
            assert told(events) == right[name], name
            # Where so many begin together, one may have ended before the last has begun.
            missing -= {name} if len(stream.events) < len(events) else set()
        if not missing:
            break
    assert not missing, "streams that had ended before their gateway died"


def test_the_terminal_client_and_the_helper_do_not_notice_that_the_gateway_dies(served: Served) -> None:
    path, body = request(CHAT, 21)
    right = undisturbed(served, path, body)[0]["content"]
    url = served.url.removesuffix("/v1")
    wait_until(lambda: "gateway-1" in served.pids() and "gateway-2" in served.pids(), 60)
    for text in (
        (piece.text for piece in pieces(Client(url).stream(path, body))),
        (
            choice["delta"].get("content", "")
            for chunk in resumable_stream(url + path, body)
            for choice in chunk["choices"]
        ),
    ):
        got = [next(text), next(text)]
        pids = served.pids()
        with frozen(pids["engine-1"]):
            for name in ("gateway-1", "gateway-2"):
                os.kill(pids[name], signal.SIGKILL)
        got += text
        assert "".join(got) == right
        wait_until(lambda: len({"gateway-1", "gateway-2"} & served.pids().keys()) == 2, 60)


def test_a_stream_that_is_resumed_elsewhere_ends_its_former_run(served: Served) -> None:
    path, body = request(CHAT, 30)
    right = undisturbed(served, path, body)
    wait_until(lambda: "gateway-1" in served.pids(), 60)
    stream = connected(served, "gateway-2")
    engine = served.pids()["engine-1"]
    with slowed(engine) as slow:
        stream.ask("POST", path, body)
        stream.read(3)
        with slow.frozen():
            number = len(stream.events)
            after = Events(served, "POST", path, body, **{"Last-Event-ID": stream.last_id})
            time.sleep(0.2)
    after.read()
    assert told(stream.events[:number] + after.events) == right
    with pytest.raises(Broken):
        stream.read()
    assert json.loads(stream.events[-1])["error"]["code"] == "stream_taken"


def test_a_resumable_stream_runs_on_without_its_client(served: Served) -> None:
    path, body = request(CHAT, 31)
    right = undisturbed(served, path, body)
    stream = connected(served, "gateway-2")
    time.sleep(0.5)
    before = num_generated(served)
    stream.ask("POST", path, body, **{"X-Antiphon-Resumable": "1"})
    stream.read(3)
    with frozen(served.pids()["engine-1"]):
        stream.close()
        time.sleep(0.1)
    wait_until(lambda: num_generated(served) >= before + NUM_TOKENS, 60)
    request_id, _, position = stream.last_id.partition(":")
    rest = Events(served, "GET", f"/v1/streams/{request_id}?from={position}")
    rest.read()
    assert told(stream.events + rest.events) == right


def test_a_gateway_that_ends_before_its_streams_leaves_them_to_their_clients(served: Served) -> None:
    path, body = request(CHAT, 36, n=4)
    right = undisturbed(served, path, body)
    wait_until(lambda: len({"gateway-1", "gateway-2"} & served.pids().keys()) == 2, 60)
    pids = served.pids()
    # Many connections may be needed until the kernel has chosen this gateway twice: the streams begin after that.
    stream, plain = connected(served, "gateway-2"), connected(served, "gateway-2")
    with slowed(pids["engine-1"]) as slow:
        stream.ask("POST", path, body, **{"X-Antiphon-Resumable": "1"})
        plain.ask("POST", path, body)
        stream.read(2)
        plain.read(2)
        with slow.frozen():
            os.kill(pids["gateway-2"], signal.SIGTERM)
            with pytest.raises(Broken):
                plain.read()
            assert json.loads(plain.events[-1])["error"]["code"] == "draining"
            with pytest.raises(Broken):
                stream.read()
            assert "error" not in json.loads(stream.events[-1])
    assert told(resumed(served, stream, path, body)) == right


def test_connections_to_a_gateway_that_stands_still_are_served_by_another(served: Served) -> None:
    wait_until(lambda: len({"gateway-1", "gateway-2"} & served.pids().keys()) == 2, 60)
    connected(served, "gateway-2").close()  # both serve
    connected(served, "gateway-1").close()
    path, body = request(CHAT, 35, max_tokens=2)
    right = undisturbed(served, path, body)
    with frozen(served.pids()["gateway-2"]):
        streams = [Events(served, "POST", path, body) for _ in range(16)]
        for stream in streams:
            assert stream.read()
            assert told(stream.events) == right
            stream.close()


def in_background(number: int, **fields: Any) -> dict[str, Any]:
    base = {"model": "tiny", "background": True, "max_output_tokens": NUM_TOKENS, "ignore_eos": True, "seed": number}
    return {**base, "input": f"{number}: tell me", "stream": True, **fields}


def response_of(served: Served, response_id: str) -> Any:
    return fetch(served, "GET", f"{RESPONSES}/{response_id}").json


def ended_response(served: Served, response_id: str) -> Any:
    """A response of `NUM_TOKENS` tokens when it has ended."""
    wait_until(lambda: response_of(served, response_id)["status"] == "incomplete", 60)
    return response_of(served, response_id)


def output_of(response: Any) -> Any:
    assert response["status"] == "incomplete", response
    return [part["text"] for item in response["output"] for part in item["content"]], response["usage"]["output_tokens"]


@pytest.mark.matrix("R-17")
def test_a_background_response_goes_on_at_another_gateway_when_its_own_dies(served: Served) -> None:
    wait_until(lambda: len({"gateway-1", "gateway-2"} & served.pids().keys()) == 2, 60)
    body = in_background(33)
    right = undisturbed(served, RESPONSES, body)
    pids = served.pids()
    for _ in range(20):  # until the response runs when its gateway dies: this process may be slower than the engine
        stream = connected(served, "gateway-1")
        stream.ask("POST", RESPONSES, body)
        stream.read(6)
        response_id = json.loads(stream.events[0])["response"]["id"]
        with frozen(pids["engine-1"]):
            if response_of(served, response_id)["status"] != "in_progress":
                continue
            os.kill(pids["gateway-1"], signal.SIGKILL)
            with contextlib.suppress(Broken):
                stream.read()
            running = response_of(served, response_id)
            if running["status"] == "in_progress":
                break
        wait_until(lambda: "gateway-1" in served.pids(), 60)
        pids = served.pids()
    assert running["status"] == "in_progress"
    last = json.loads(stream.events[-1])["sequence_number"]
    rest = Events(served, "GET", f"{RESPONSES}/{response_id}?stream=true&starting_after={last}")
    rest.read()
    assert told([*stream.events, *rest.events]) == right
    wait_until(lambda: len({"gateway-1", "gateway-2"} & served.pids().keys()) == 2, 60)
    final = json.loads(rest.events[-1])["response"]
    for gateway in ("gateway-1", "gateway-2"):
        again = connected(served, gateway)
        again.ask("GET", f"{RESPONSES}/{response_id}?stream=true")
        again.read()
        assert told(again.events) == right
        assert json.loads(again.events[-1])["response"] == final
    assert response_of(served, response_id) == final


def num_generated(served: Served) -> float:
    """Tokens that the engine has generated so far, as any gateway tells it."""
    lines = fetch(served, "GET", "/metrics").body.decode().splitlines()
    found = [line for line in lines if line.startswith("antiphon:engine_generation_tokens_total{")]
    assert found
    return sum(float(line.rpartition(" ")[2]) for line in found)


def test_wrong_ids_bodies_and_positions_are_refused_with_a_reason(served: Served) -> None:
    path, body = request(CHAT, 32, max_tokens=4)
    stream = Events(served, "POST", path, body)
    stream.read()
    request_id = stream.last_id.partition(":")[0]
    time.sleep(0.3)

    def refused(status: int, code: str, path: str, body: Any = None, **headers: str) -> None:
        answer = fetch(served, "GET" if body is None else "POST", path, body, **headers)
        assert (answer.status, answer.json["error"]["code"]) == (status, code), answer.body

    refused(404, "not_found", f"/v1/streams/{'a' * 22}")
    refused(404, "not_found", "/v1/streams/*")
    refused(400, "invalid_value", f"/v1/streams/{request_id}?from=99.400")
    refused(400, "invalid_value", f"/v1/streams/{request_id}?from=1.1,1.1")
    refused(400, "invalid_value", f"/v1/streams/{request_id}?from=now")
    refused(400, "unsupported_parameter", f"/v1/streams/{request_id}?after=1.1")
    refused(400, "invalid_value", CHAT, {**body, "seed": 1}, **{"Last-Event-ID": stream.last_id})
    refused(404, "not_found", COMPLETIONS, body, **{"Last-Event-ID": stream.last_id})


@pytest.mark.matrix("R-17")
def test_streams_responses_and_batches_survive_a_restart_of_everything(model: Path, tmp_path: Path) -> None:
    flags = (
        *FLAGS,
        "--stream-store=file",
        f"--bus-directory={tmp_path / 'bus'}",
        f"--files-directory={tmp_path}/files",
    )
    path, body = request(CHAT, 40, n=12)  # So many that the stream lasts.
    with until_the_end(serve_tiny(model, *flags)) as first:
        right = undisturbed(first, path, body)
        response = fetch(first, "POST", "/v1/responses", {"input": "hi", "max_output_tokens": 4}).json
        unattended = [in_background(41 + number, stream=False, temperature=number % 2) for number in range(4)]
        whole = [fetch(first, "POST", RESPONSES, one).json["id"] for one in unattended]
        finished = [output_of(ended_response(first, one)) for one in whole]
        batch, pids = begin_batch(first), first.pids()
        wait_until(lambda: batch_of(first, batch)["request_counts"]["completed"] > 0, 60)
        while True:
            stream = Events(first, "POST", path, body)
            stream.read(5)
            with frozen(pids["engine-1"]):
                if stream.ends_within(0.5):  # The engine was faster than this test.
                    continue
                begun = [fetch(first, "POST", RESPONSES, one).json["id"] for one in unattended]
                time.sleep(0.3)
                for pid in (*first.descendants(), first.process.pid):
                    os.kill(pid, signal.SIGKILL)
                break
    with until_the_end(serve_tiny(model, *flags)) as second:
        rest = Events(second, "POST", path, body, **{"Last-Event-ID": stream.last_id})
        rest.read()
        assert fetch(second, "GET", f"/v1/responses/{response['id']}").json == response
        assert [output_of(ended_response(second, one)) for one in begun] == finished
        for one in begun:
            again = Events(second, "GET", f"{RESPONSES}/{one}?stream=true")
            again.read()
            assert sum(is_complete([event]) for event in again.events) == 1
        wait_until(lambda: batch_of(second, batch)["status"] == "completed", 60, lambda: str(batch_of(second, batch)))
        ended = batch_of(second, batch)
        answers = fetch(second, "GET", f"/v1/files/{ended['output_file_id']}/content").body.splitlines()
    assert len(rest.events) > 2
    assert told(stream.events + rest.events) == right
    assert sorted(json.loads(line)["custom_id"] for line in answers) == sorted(map(str, range(BATCH_SIZE)))
    assert ended["request_counts"] == {"total": BATCH_SIZE, "completed": BATCH_SIZE, "failed": 0}


BATCH_SIZE = 150


def begin_batch(served: Served) -> str:
    """Starts a batch that has some work to do. Returns its id."""
    asked = {"model": "tiny", "prompt": "hi", "max_tokens": 30, "ignore_eos": True}
    lines = [
        {"custom_id": str(number), "method": "POST", "url": COMPLETIONS, "body": {**asked, "seed": number}}
        for number in range(BATCH_SIZE)
    ]
    data = "\n".join(map(json.dumps, lines)).encode()
    with openai.OpenAI(base_url=served.url, api_key="EMPTY", max_retries=0, timeout=60) as client:
        file = client.files.create(file=("lines.jsonl", data), purpose="batch")
        return client.batches.create(input_file_id=file.id, endpoint=COMPLETIONS, completion_window="24h").id


def batch_of(served: Served, batch_id: str) -> Any:
    return fetch(served, "GET", f"/v1/batches/{batch_id}").json
