"""Files and batches with the official OpenAI client against the HTTP edge. The backend is scripted: see `edge`."""

import asyncio
import errno
import json
import os
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types import Batch

from antiphon.services.gateway.ops.timeline.recorder import Recorder
from antiphon.shared import limits
from antiphon.shared.errors import ServiceError
from antiphon.shared.files import limits as file_limits
from antiphon.shared.security.api_keys import listed_keys
from tests.integration.edge import ScriptedBackend, call, endings, serving, text_batches
from tests.integration.test_openai_client import client
from tests.integration.test_pooling_endpoints import pooling_backend
from tests.unit.gateway.http.test_multipart import form

URL = "/v1/completions"
FORM = {"content-type": "multipart/form-data; boundary=edge"}


def lines(*bodies: Any, url: str = URL) -> bytes:
    """An input file; the custom ids are c0, c1, …"""
    requests = [
        {"custom_id": f"c{number}", "method": "POST", "url": url, "body": body} for number, body in enumerate(bodies)
    ]
    return "".join(json.dumps(one) + "\n" for one in requests).encode()


def names(directory: Path) -> list[str]:
    """What is in a directory."""
    return sorted(path.name for path in directory.iterdir())


async def upload(api: openai.AsyncOpenAI, data: bytes) -> str:
    return (await api.files.create(file=("in.jsonl", data), purpose="batch")).id


async def start(api: openai.AsyncOpenAI, data: bytes, url: Any = URL) -> Batch:
    file_id = await upload(api, data)
    return await api.batches.create(input_file_id=file_id, endpoint=url, completion_window="24h")


async def ended(api: openai.AsyncOpenAI, batch_id: str) -> Batch:
    while (batch := await api.batches.retrieve(batch_id)).status not in ("completed", "failed", "cancelled", "expired"):
        await asyncio.sleep(0.02)
    return batch


async def answers(api: openai.AsyncOpenAI, file_id: str | None) -> dict[str, Any]:
    assert file_id is not None
    text = (await api.files.content(file_id)).text
    found = [json.loads(line) for line in text.splitlines()]
    return {line["custom_id"]: line for line in found}


async def test_files_are_uploaded_listed_read_and_deleted(tmp_path: Path):
    async with serving(ScriptedBackend(), files_directory=str(tmp_path / "files")) as port, client(port) as api:
        data = b"x\r\n--y\n" * 100_000
        made = await api.files.create(file=("päth/in.jsonl", data), purpose="batch")
        assert (made.bytes, made.filename, made.purpose, made.object) == (len(data), "päth/in.jsonl", "batch", "file")
        assert made.expires_at == made.created_at + file_limits.FILE_TTL_S
        expiring = await api.files.create(
            file=b"", purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
        )
        assert expiring.expires_at == expiring.created_at + 3600
        assert await api.files.retrieve(made.id) == made
        assert (await api.files.content(made.id)).content == data
        assert {one.id async for one in await api.files.list()} == {made.id, expiring.id}
        assert [one.id async for one in await api.files.list(purpose="other")] == []
        assert (await api.files.delete(made.id)).deleted
        for missing in (api.files.retrieve(made.id), api.files.delete(made.id), api.files.retrieve("../../etc/passwd")):
            with pytest.raises(openai.NotFoundError):
                await missing
    assert names(tmp_path / "files") == [expiring.id, f"{expiring.id}.json"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ([("file", "a", b"x")], "purpose"),
        ([("purpose", None, b"batch")], "file"),
        ([("purpose", None, b"batch"), ("file", None, b"x")], "file"),
        ([("purpose", None, b"fine-tune"), ("file", "a", b"x")], "purpose"),
        ([("purpose", None, b"batch"), ("purpose", None, b"batch")], "purpose"),
        ([("file", "a", b"x"), ("file", "a", b"x")], "file"),
        ([("purpose", None, b"x" * 1000)], "purpose"),
        ([("model", None, b"x")], "model"),
        ([("purpose", None, b"batch"), ("file", "a", b""), ("expires_after[seconds]", None, b"9999")], None),
    ],
)
async def test_a_wrong_upload_is_refused_and_leaves_nothing(fields: Any, param: str | None, tmp_path: Path):
    async with serving(ScriptedBackend(), files_directory=str(tmp_path)) as port:
        reply = await call(port, "POST", "/v1/files", form(fields), FORM)
        assert (reply.status, reply.error["param"]) == (400, param or "expires_after[anchor]")
        assert (await call(port, "POST", "/v1/files", b"{}")).status == 400
    assert names(tmp_path) == []


async def test_a_file_that_is_too_large_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(file_limits, "UPLOAD_BYTES_MAX", 1000)
    async with serving(ScriptedBackend(), files_directory=str(tmp_path)) as port:
        body = form([("purpose", None, b"batch"), ("file", "a", b"x" * 1000)])
        reply = await call(port, "POST", "/v1/files", body, FORM)
        assert (reply.status, reply.error["code"]) == (413, "request_too_large")
    assert names(tmp_path) == []


async def test_bytes_behind_a_form_are_not_kept(tmp_path: Path):
    body = form([("purpose", None, b"batch"), ("file", "a", b"x")])
    async with serving(ScriptedBackend(), files_directory=str(tmp_path)) as port:
        reply = await call(port, "POST", "/v1/files", body + b"x" * 100_000, FORM)
        assert (reply.status, reply.error["code"]) == (400, "invalid_value")
        assert "bytes follow its end" in reply.error["message"]
        assert names(tmp_path) == []
        assert (await call(port, "POST", "/v1/files", body + b"The end.", FORM)).status == 200


@pytest.mark.parametrize(
    ("filename", "shown"),
    [("utf-8''%E2%82%AC%0d%0a", "€\r\n"), ("utf-7''%2B2AA-", None), ("unicode_escape''%5cud800", None)],
)
async def test_a_name_that_cannot_be_kept_leaves_no_file(filename: str, shown: str | None, tmp_path: Path):
    body = form([("purpose", None, b"batch"), ("file", "a", b"x")]).replace(b'="a"', b"*=" + filename.encode())
    async with serving(ScriptedBackend(), files_directory=str(tmp_path)) as port:
        reply = await call(port, "POST", "/v1/files", body, FORM)
        if shown is None:
            assert (reply.status, names(tmp_path)) == (400, [])
            return
        assert reply.json["filename"] == shown
        content = await call(port, "GET", f"/v1/files/{reply.json['id']}/content")
        assert "\n" not in content.headers["content-disposition"]


async def test_an_upload_without_room_says_whether_to_delete_files_or_to_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    body = form([("purpose", None, b"batch"), ("file", "a", b"x" * 1000)])
    async with serving(ScriptedBackend(), files_directory=str(tmp_path)) as port:
        monkeypatch.setattr(file_limits, "FILES_BYTES_MAX", 500)
        reply = await call(port, "POST", "/v1/files", body, FORM)
        assert (reply.status, reply.error["code"]) == (413, "request_too_large")
        assert "Delete files" in reply.error["message"]
        monkeypatch.undo()
        for function in ("posix_fallocate", "pwrite", "fsync"):
            monkeypatch.setattr(os, function, full)
            reply = await call(port, "POST", "/v1/files", body, FORM)
            assert (reply.status, reply.error["code"]) == (503, "server_is_overloaded")
            assert reply.headers["retry-after"]
            monkeypatch.undo()
        assert names(tmp_path) == []
        assert (await call(port, "POST", "/v1/files", body, FORM)).status == 200


async def test_a_batch_of_embeddings_gives_a_vector_for_each_input():
    backend = pooling_backend()
    async with serving(backend) as port, client(port) as api:
        url = "/v1/embeddings"
        bodies = [{"model": "org/toy", "input": "one"}, {"input": ["two", "three"]}, {"input": "four", "dimensions": 9}]
        batch = await ended(api, (await start(api, lines(*bodies, url=url), url)).id)
        assert batch.status == "completed"
        good, bad = await answers(api, batch.output_file_id), await answers(api, batch.error_file_id)
    found = {custom_id: line["response"]["body"] for custom_id, line in good.items()}
    assert {custom_id: [one["index"] for one in body["data"]] for custom_id, body in found.items()} == {
        "c0": [0],
        "c1": [0, 1],
    }
    assert found["c0"]["object"] == "list"
    assert bad["c2"]["response"]["body"]["error"]["param"] == "dimensions"
    assert all(request.guests.idle_s > limits.IDLE_S for request in backend.requests)


async def test_a_batch_runs_behind_other_requests_with_its_key_and_without_the_deadline_of_requests():
    backend = ScriptedBackend()
    async with serving(backend, api_keys="secret", request_timeout=5.0) as port, client(port, api_key="secret") as api:
        data = lines({"prompt": "one"}, {"prompt": "two", "temperature": 9}, {"prompt": "three", "model": "other"})
        batch = await start(api, data)
        assert (batch.status, batch.object, batch.completion_window) == ("validating", "batch", "24h")
        batch = await ended(api, batch.id)
        assert batch.status == "completed"
        assert batch.request_counts is not None
        assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (3, 1, 2)
        good = await answers(api, batch.output_file_id)
        assert set(good) == {"c0"}
        assert good["c0"]["response"]["status_code"] == 200
        assert good["c0"]["response"]["body"]["choices"][0]["text"] == "Good day"
        assert good["c0"]["response"]["body"]["id"] == "cmpl-" + good["c0"]["response"]["request_id"]
        bad = await answers(api, batch.error_file_id)
        assert {name: line["response"]["status_code"] for name, line in bad.items()} == {"c1": 400, "c2": 404}
        [request] = backend.requests
        assert request.origin.client.name == listed_keys("secret")[0].name
        longest = file_limits.BATCH_WINDOW_S - file_limits.BATCH_ORDINARY_S
        assert longest - 60 < request.guests.idle_s <= longest, "it gives way until the end of the batch is near"
        assert request.timeout_s == 0
        assert [one.id async for one in await api.batches.list()] == [batch.id]
        with pytest.raises(openai.BadRequestError, match="it is completed"):
            await api.batches.cancel(batch.id)
        forged = await call(port, "GET", "/v1/models", headers={"internal": "true", "state": "internal"})
        assert forged.status == 401


async def test_files_and_batches_are_those_of_their_key():
    async with (
        serving(ScriptedBackend(), api_keys="mine,other") as port,
        client(port, api_key="mine") as api,
        client(port, api_key="other") as other,
    ):
        batch = await ended(api, (await start(api, lines({"prompt": "one"}))).id)
        assert batch.output_file_id is not None
        assert [one.id async for one in await api.batches.list()] == [batch.id]
        assert len([one async for one in await api.files.list()]) == 2
        assert [one async for one in await other.batches.list()] == []
        assert [one async for one in await other.files.list()] == []
        for hidden in (
            other.files.retrieve(batch.output_file_id),
            other.files.content(batch.input_file_id),
            other.files.delete(batch.input_file_id),
            other.batches.retrieve(batch.id),
            other.batches.cancel(batch.id),
            other.batches.create(input_file_id=batch.input_file_id, endpoint=URL, completion_window="24h"),
        ):
            with pytest.raises(openai.NotFoundError):
                await hidden
        file = await api.files.retrieve(batch.input_file_id)
        assert "owner" not in file.to_dict()


@pytest.mark.parametrize("url", ["/v1/chat/completions", "/v1/responses"])
async def test_other_endpoints_in_batches(url: str):
    body = {"messages": [{"role": "user", "content": "Hi"}]} if "chat" in url else {"input": "Hi"}
    async with serving(ScriptedBackend()) as port, client(port) as api:
        batch = await ended(api, (await start(api, lines(body, url=url), url)).id)
        good = await answers(api, batch.output_file_id)
        answer = good["c0"]["response"]["body"]
        assert "Good day" in json.dumps(answer)
        assert batch.error_file_id is None
        if "responses" in url:
            # It is in the output file, and in no gateway's memory unless the request says so.
            assert answer["store"] is False
            with pytest.raises(openai.NotFoundError):
                await api.responses.retrieve(answer["id"])
            batch = await ended(api, (await start(api, lines({**body, "store": True}, url=url), url)).id)
            stored = (await answers(api, batch.output_file_id))["c0"]["response"]["body"]
            assert (await api.responses.retrieve(stored["id"])).output_text == "Good day"


async def test_requests_of_an_overloaded_server_are_sent_again():
    backend = ScriptedBackend(refusal=ServiceError("server_is_overloaded", "Too much.", retry_after_s=0.01))
    async with serving(backend) as port, client(port) as api:
        batch = await start(api, lines({"prompt": "one"}))
        while not backend.requests:
            await asyncio.sleep(0.01)
        backend.refusal = None
        batch = await ended(api, batch.id)
        assert (batch.status, len(backend.requests)) == ("completed", 2)


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"", "has no requests"),
        (b"{\n", "Line 1: the line is not JSON"),
        (b"\n" + lines({"prompt": "x"}, url="/v1/responses"), "Line 2: 'method' must be POST and 'url' one of"),
        (lines({"prompt": "x"}) * 2, "Line 2: the custom_id 'c0' is used twice"),
        (lines({"prompt": "x", "stream": True}), "'stream' is not possible in a batch"),
        (lines({"prompt": "x", "priority": -1}), "'priority' is not possible in a batch"),
    ],
)
async def test_an_invalid_input_makes_the_batch_fail(data: bytes, told: str):
    backend = ScriptedBackend()
    async with serving(backend) as port, client(port) as api:
        batch = await ended(api, (await start(api, data)).id)
        assert batch.status == "failed"
        assert batch.errors is not None
        assert batch.errors.data is not None
        assert told in (batch.errors.data[0].message or "")
    assert backend.requests == []


@pytest.mark.parametrize(
    ("change", "code", "param"),
    [
        ({"input_file_id": None}, "missing_required_parameter", "input_file_id"),
        ({"endpoint": None}, "missing_required_parameter", "endpoint"),
        ({"completion_window": None}, "missing_required_parameter", "completion_window"),
        ({"endpoint": "/v1/messages"}, "invalid_value", "endpoint"),
        ({"endpoint": 3}, "invalid_value", "endpoint"),
        ({"completion_window": "1h"}, "invalid_value", "completion_window"),
        ({"metadata": {"a": "b" * 513}}, "invalid_value", "metadata"),
        ({"output_expires_after": {"anchor": "created_at"}}, "unsupported_parameter", "output_expires_after"),
        ({"file": "x"}, "unsupported_parameter", "file"),
    ],
)
async def test_a_wrong_batch_is_refused_by_name(change: dict[str, Any], code: str, param: str):
    async with serving(ScriptedBackend(), unknown_parameters="refuse") as port:
        body = {"input_file_id": "file-x", "endpoint": URL, "completion_window": "24h"}
        reply = await call(port, "POST", "/v1/batches", {**body, **change})
        assert (reply.status, reply.error["code"], reply.error["param"]) == (400, code, param)
        assert f"'{param}'" in reply.error["message"]
        # With the change taken back it is refused for its file alone, so nothing else was wrong with it.
        [listed, unknown] = [await call(port, "GET", "/v1/batches"), await call(port, "POST", "/v1/batches", body)]
        assert listed.json["data"] == []
        assert (unknown.status, unknown.error["code"], unknown.error["param"]) == (404, "not_found", "file_id")


async def test_a_batch_or_an_input_file_that_is_not_there_is_not_found():
    async with serving(ScriptedBackend()) as port, client(port) as api:
        output = (await ended(api, (await start(api, lines({"prompt": "one"}))).id)).output_file_id
        for path in ("batch_x", "batch_" + "x" * 22, "..%2Ffile-x"):
            reply = await call(port, "GET", f"/v1/batches/{path}")
            assert (reply.status, reply.error["code"]) == (404, "not_found")
        body = {"input_file_id": output, "endpoint": URL, "completion_window": "24h"}
        reply = await call(port, "POST", "/v1/batches", body)
        assert (reply.status, reply.error["param"]) == (400, "input_file_id")
        assert "must name a file with the purpose 'batch'" in reply.error["message"]


async def test_a_cancelled_batch_keeps_its_answers():
    backend, recorder = ScriptedBackend(manual=True), Recorder(8)
    async with serving(backend, recorder=recorder) as port, client(port) as api:
        batch = await start(api, lines({"prompt": "one"}, {"prompt": "two"}))
        first, second = await backend.generations.get(), await backend.generations.get()
        first.put(*text_batches("Good ", "day"), None)
        while (await api.batches.retrieve(batch.id)).request_counts.completed == 0:  # type: ignore[union-attr]
            await asyncio.sleep(0.01)
        assert (await api.batches.cancel(batch.id)).status == "cancelling"
        batch = await ended(api, batch.id)
        assert batch.status == "cancelled"
        assert second.cancelled == ["abort"]
        assert sorted(await endings(recorder)) == [("cancelled", "batch_stopped"), ("completed", "")]
        assert len(await answers(api, batch.output_file_id)) == 1
        assert batch.error_file_id is None


async def test_gateways_with_one_directory_have_the_same_batches(tmp_path: Path):
    shared_directory: dict[str, Any] = {"files_directory": str(tmp_path)}
    backend = ScriptedBackend(manual=True)
    async with serving(backend, **shared_directory) as port, client(port) as api:
        batch = await start(api, lines({"prompt": "one"}, {"prompt": "two"}))
        first = await backend.generations.get()
        first.put(*text_batches("Good ", "day"), None)
        while (await api.batches.retrieve(batch.id)).request_counts.completed == 0:  # type: ignore[union-attr]
            await asyncio.sleep(0.01)
        async with serving(ScriptedBackend(), **shared_directory) as other_port, client(other_port) as other:
            # Both know the batch; only the first one runs it, and cancels it when the other one is asked to.
            assert (await other.batches.retrieve(batch.id)).status == "in_progress"
            assert (await other.batches.cancel(batch.id)).status == "cancelling"
            batch = await ended(other, batch.id)
            assert batch.status == "cancelled"
            assert len(await answers(other, batch.output_file_id)) == 1
