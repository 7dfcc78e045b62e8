"""Conversations, and the responses that belong to them: with OpenAI's client, and at two gateways with a real bus."""

import asyncio
import functools
from typing import Any

import openai
import pytest

from antiphon.services.gateway.edge.http.auth import ApiKeys
from antiphon.services.gateway.guests.responses.conversations.record import Conversation, turns_before, with_items
from antiphon.services.gateway.guests.responses.stored.records import MemoryRecords
from antiphon.shared import limits
from antiphon.shared.security.api_keys import keys_of_text
from tests.integration.edge import ScriptedBackend, call, serving, text_batches
from tests.integration.seen_images import ONE, TWO, URL, data_url, eye, seen
from tests.integration.test_background_responses import (
    PIECES,
    Deployment,
    again,
    deployment,  # noqa: F401  # pyright: ignore[reportUnusedImport]
    has_text,
    is_in,
    manual,
)
from tests.integration.test_openai_client import client
from tests.integration.test_responses_socket import opened, response
from tests.integration.test_stored_responses import images_of
from tests.integration.test_streams import KEY_FILE

PATH, RESPONSES = "/v1/conversations", "/v1/responses"
USER: Any = {"type": "message", "role": "user", "content": "hi"}


def said(backend: ScriptedBackend) -> list[str]:
    return [message.content for message in backend.requests[-1].inputs.messages]


def texts(items: list[Any]) -> list[str]:
    return [item["content"][0]["text"] for item in items]


async def test_openais_client_has_a_conversation():
    backend = ScriptedBackend()
    async with serving(backend) as port, client(port) as api:
        system: Any = {**USER, "role": "system", "content": "Be kind."}
        made = await api.conversations.create(items=[system], metadata={"a": "b"})
        assert made.metadata == {"a": "b"}
        first = await api.responses.create(input="hi", conversation=made.id)
        assert first.conversation is not None
        assert first.conversation.id == made.id
        stream = await api.responses.create(input="and?", conversation={"id": made.id}, store=False, stream=True)
        assert [event.type async for event in stream][-1] == "response.completed"
        assert said(backend) == ["Be kind.", "hi", "Good day", "and?"]
        listed: list[Any] = [item async for item in api.conversations.items.list(made.id, order="asc", limit=2)]
        assert [(item.role, item.content[0].text) for item in listed] == [
            ("system", "Be kind."),
            ("user", "hi"),
            ("assistant", "Good day"),
            ("user", "and?"),
            ("assistant", "Good day"),
        ]
        assert len({item.id for item in listed}) == 5
        newest = await api.conversations.items.list(made.id, limit=1)
        assert (newest.data[0].id, newest.has_more) == (listed[-1].id, True)
        found = await api.conversations.items.retrieve(listed[1].id, conversation_id=made.id)
        assert found == listed[1]
        assert (await api.conversations.items.delete(listed[1].id, conversation_id=made.id)).id == made.id
        with pytest.raises(openai.NotFoundError):
            await api.conversations.items.retrieve(listed[1].id, conversation_id=made.id)
        more: list[Any] = [USER, {**USER, "content": "there"}]
        added = await api.conversations.items.create(made.id, items=more)
        assert [item.type for item in added.data] == ["message", "message"]
        assert (await api.conversations.update(made.id, metadata={"c": "d"})).metadata == {"c": "d"}
        assert (await api.conversations.retrieve(made.id)).metadata == {"c": "d"}
        await api.responses.create(input="go on", conversation=made.id)
        assert said(backend) == ["Be kind.", "Good day", "and?", "Good day", "hi", "there", "go on"]
        assert (await api.conversations.delete(made.id)).deleted
        for lost in (api.conversations.retrieve(made.id), api.responses.create(input="x", conversation=made.id)):
            with pytest.raises(openai.NotFoundError):
                await lost


async def test_a_response_that_fails_leaves_its_conversation_as_it_was():
    backend = ScriptedBackend(reply=lambda request: [RuntimeError("broken")])
    async with serving(backend) as port:
        name = (await call(port, "POST", PATH, {})).json["id"]
        assert (await call(port, "POST", RESPONSES, {"input": "hi", "conversation": name})).status == 500
        assert (await call(port, "GET", f"{PATH}/{name}/items")).json["data"] == []


async def test_calls_and_their_results_belong_to_the_conversation():
    backend = ScriptedBackend()
    called: Any = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}
    async with serving(backend) as port:
        name = (await call(port, "POST", PATH, {"items": [USER, called]})).json["id"]
        foreign = {"type": "function_call_output", "call_id": "b", "output": "7"}
        refused = await call(port, "POST", RESPONSES, {"input": [foreign], "conversation": name})
        assert (refused.status, refused.error["param"]) == (400, "input")
        result = {**foreign, "call_id": "a"}
        assert (await call(port, "POST", RESPONSES, {"input": [result], "conversation": name})).status == 200
        assert [message.role for message in backend.requests[-1].inputs.messages] == ["user", "assistant", "tool"]
        items = (await call(port, "GET", f"{PATH}/{name}/items?order=asc")).json["data"]
        assert [item["type"] for item in items] == ["message", "function_call", "function_call_output", "message"]


async def test_a_conversation_goes_on_on_a_socket():
    backend = ScriptedBackend()
    async with serving(backend) as port, opened(port) as socket:
        name = (await call(port, "POST", PATH, {"items": [USER]})).json["id"]
        assert (await response(socket, input="one", conversation=name, store=False))["conversation"] == {"id": name}
        await response(socket, input="two", conversation=name, store=False)
        assert said(backend) == ["hi", "one", "Good day", "two"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("", {"items": [{}]}, "items[0].type"),
        ("", {"items": [USER] * (limits.CONVERSATION_ADDED_MAX + 1)}, "items"),
        ("", {"items": [{**USER, "content": [{"type": "input_audio"}]}]}, "items[0].content[0].type"),
        ("", {"metadata": {"a": "b" * 1000}}, "metadata"),
        ("", {"metadata": {"a": 1}}, "metadata[...]"),
        ("/{}", {}, "metadata"),
        ("/{}/items", {}, "items"),
        ("/{}/items", {"items": []}, "items"),
        ("/{}/items?what=1", {"items": [USER]}, "what"),
    ],
)
async def test_what_is_wrong_is_refused_by_name(path: str, body: Any, param: str):
    async with serving(ScriptedBackend()) as port:
        name = (await call(port, "POST", PATH)).json["id"]
        refused = await call(port, "POST", PATH + path.format(name), body)
        assert (refused.status, refused.error["param"]) == (400, param), refused.body


async def test_a_conversation_has_a_largest_number_of_items(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(limits, "MESSAGES_MAX", 5)
    async with serving(ScriptedBackend()) as port:
        name = (await call(port, "POST", PATH, {"items": [USER] * 4})).json["id"]
        for path, body in (
            (f"{PATH}/{name}/items", {"items": [USER] * 2}),
            (RESPONSES, {"input": "x", "conversation": name}),
        ):
            refused = await call(port, "POST", path, body)
            assert (refused.status, refused.error["param"]) == (400, "conversation")
            assert "more than 5 items" in refused.error["message"]


@pytest.mark.nats
async def test_no_other_key_finds_a_conversation(nats_connect: Any, nats_server: Any, subjects: Any):
    images = images_of(await nats_connect(nats_server, "one"), subjects)
    keys = ApiKeys("", keys_of_text(KEY_FILE, is_json=False, source=""))
    async with serving(ScriptedBackend(), keys=keys, offers=[images]) as port:
        own, foreign = ({"authorization": f"Bearer sk-{name}"} for name in ("one", "two"))
        name = (await call(port, "POST", PATH, {"items": [USER]}, own)).json["id"]
        item = (await call(port, "GET", f"{PATH}/{name}/items", headers=own)).json["data"][0]["id"]
        for method, path, body in (
            ("GET", f"{PATH}/{name}", b""),
            ("POST", f"{PATH}/{name}", {"metadata": {}}),
            ("GET", f"{PATH}/{name}/items", b""),
            ("POST", f"{PATH}/{name}/items", {"items": [USER]}),
            ("GET", f"{PATH}/{name}/items/{item}", b""),
            ("DELETE", f"{PATH}/{name}/items/{item}", b""),
            ("POST", RESPONSES, {"input": "hi", "conversation": name}),
            ("DELETE", f"{PATH}/{name}", b""),
        ):
            reply = await call(port, method, path, body, foreign)
            assert (reply.status, reply.error["code"]) == (404, "not_found"), (method, path)
        for odd in ("conv_*", "conv_", "resp_x", "conv_" + "a" * 22):
            assert (await call(port, "GET", f"{PATH}/{odd}", headers=own)).status == 404
        assert (await call(port, "GET", f"{RESPONSES}/{name}", headers=own)).status == 404
        assert (await call(port, "GET", f"{PATH}/{name}", headers=own)).status == 200


@pytest.mark.nats
async def test_gateways_share_conversations_and_lose_no_item(nats_connect: Any, nats_server: Any, subjects: Any):
    one, two = [images_of(await nats_connect(nats_server, name), subjects) for name in ("one", "two")]
    async with (
        serving(ScriptedBackend(), offers=[one]) as first,
        serving(ScriptedBackend(), offers=[two]) as second,
    ):
        name = (await call(first, "POST", PATH, {})).json["id"]
        ports = [first, second] * 3
        replies = await asyncio.gather(
            *(
                call(port, "POST", RESPONSES, {"input": f"{number}", "conversation": name})
                for number, port in enumerate(ports)
            )
        )
        assert [reply.status for reply in replies] == [200] * len(ports)
        items = (await call(second, "GET", f"{PATH}/{name}/items?order=asc&limit=100")).json["data"]
        assert sorted(texts(items)) == sorted([*"012345", *["Good day"] * 6])
        assert set(texts(items)[1::2]) == {"Good day"}, "input and output are appended together"
        assert (await call(second, "DELETE", f"{PATH}/{name}")).status == 200
        assert (await call(first, "GET", f"{PATH}/{name}")).status == 404


@pytest.mark.nats
async def test_images_stay_in_the_conversation(nats_connect: Any, nats_server: Any, subjects: Any):
    backend = eye()
    images = images_of(await nats_connect(nats_server, "one"), subjects)
    async with serving(backend, offers=[images]) as port:
        one, two = ({"type": "input_image", "image_url": url} for url in (data_url(ONE), URL))
        name = (await call(port, "POST", PATH, {"items": [{**USER, "content": [one]}]})).json["id"]
        asked = [{"role": "user", "content": [two]}]
        assert (await call(port, "POST", RESPONSES, {"input": asked, "conversation": name})).status == 200
        backend.remote.clear()
        assert (await call(port, "POST", RESPONSES, {"input": "and?", "conversation": name})).status == 200
        assert seen(backend.requests[-1]) == [
            ("user", [ONE]),
            ("user", [TWO]),
            ("assistant", "Good day"),
            ("user", "and?"),
        ]
        items = (await call(port, "GET", f"{PATH}/{name}/items?order=asc")).json["data"]
        assert [item["content"][0]["image_url"] for item in items[:2]] == [data_url(ONE), data_url(TWO, "jpeg")]


@pytest.mark.nats
async def test_a_background_response_that_goes_on_elsewhere_is_appended_once(deployment: Deployment):  # noqa: F811
    async with deployment.gateway("one", manual()) as one, deployment.gateway("two", manual()) as two:
        name = (await call(one.port, "POST", PATH, {"items": [USER]})).json["id"]
        body = {"input": "more", "conversation": name, "background": True, "seed": 1}
        made = (await one.ask("POST", "", body)).json
        assert made["conversation"] == {"id": name}
        generation = await one.backend.generations.get()
        generation.put(*text_batches(*PIECES)[:2])
        await has_text(two, made["id"], "Good day ")
        deployment.living = {("two", "boot")}
        resumed = await two.backend.generations.get()
        assert [message.content for message in resumed.request.inputs.messages] == ["hi", "more"]
        resumed.put(*again(resumed.request, 9), None)
        await is_in(two, made["id"], "completed")
        async with asyncio.timeout(60):
            while True:
                items = (await call(two.port, "GET", f"{PATH}/{name}/items?order=asc")).json["data"]
                if len(items) > 1:
                    break
                await asyncio.sleep(0.01)
        assert texts(items) == ["hi", "more", "Good day to you"]


def test_a_request_that_runs_again_does_not_see_what_it_has_appended():
    own = [{**USER, "id": "msg_abc_0"}, {**USER, "id": "msg_abc_out0", "content": "said"}]
    conversation = Conversation(id="conv_x", created_at=0, metadata={}, items=[{**USER, "id": "msg_x_0"}], key_name="")
    after = with_items(with_items(conversation, own), own)
    assert [item["id"] for item in after.items] == ["msg_x_0", "msg_abc_0", "msg_abc_out0"]
    assert [turn.content for turn in turns_before(after, "abc")] == ["hi"]
    assert [turn.content for turn in turns_before(after, "other")] == ["hi", "hi", "said"]


async def test_a_conversation_without_room_is_refused(monkeypatch: pytest.MonkeyPatch):
    small = functools.partialmethod(MemoryRecords.__init__, max_bytes=2000)
    monkeypatch.setattr(MemoryRecords, "__init__", small)
    async with serving(ScriptedBackend()) as port:
        name = (await call(port, "POST", PATH, {})).json["id"]
        too_large = await call(port, "POST", f"{PATH}/{name}/items", {"items": [{**USER, "content": "a" * 3000}]})
        assert too_large.status == 413
