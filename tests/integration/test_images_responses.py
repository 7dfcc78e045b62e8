"""Images in the Responses API with the official OpenAI client. The backend is scripted: see `edge`."""

import asyncio
import random
from typing import Any

import pytest

from antiphon.services.gateway.edge.access.kept_images import kept_image
from antiphon.services.gateway.guests.responses import images, input_items
from antiphon.shared.errors import ServiceError
from antiphon.shared.messages import StreamTaken
from antiphon.shared.security.api_keys import ANONYMOUS
from tests.integration.edge import ScriptedBackend, call, serving, text_batches
from tests.integration.seen_images import ONE, TWO, URL, data_url, eye, seen
from tests.integration.test_background_responses import (
    PIECES,
    Deployment,
    again,
    deployment,  # noqa: F401  # pyright: ignore[reportUnusedImport]
    has_text,
    is_in,
)
from tests.integration.test_openai_client import client
from tests.integration.test_stored_responses import images_of

PATH = "/v1/responses"
IMAGE: Any = {"type": "input_image", "detail": "auto"}
WORDS: Any = {"type": "input_text", "text": "What is this"}


def asked(*parts: Any) -> list[Any]:
    return [{"role": "user", "content": list(parts)}]


async def test_images_are_seen_and_shown_as_they_were_sent():
    backend = eye()
    async with serving(backend) as port, client(port) as api:
        inline, remote = {**IMAGE, "image_url": data_url(ONE)}, {**IMAGE, "image_url": URL}
        made = await api.responses.create(input=asked(WORDS, inline, remote), instructions="Be brief.")
        assert made.output_text == "Good day"
        first = [("system", "Be brief."), ("user", ["What is this", ONE, TWO])]
        assert seen(backend.requests[0]) == first
        listed = (await api.responses.input_items.list(made.id, include=["message.input_image.image_url"])).data
        shown: Any = listed[0]
        assert [part.type for part in shown.content] == ["input_text", "input_image", "input_image"]
        assert [part.image_url for part in shown.content[1:]] == [data_url(ONE), URL]
        backend.remote.clear()  # A response that continues it has the image that was there then.
        more = await api.responses.create(input="and?", previous_response_id=made.id)
        conversation = [*first[1:], ("assistant", "Good day"), ("user", "and?")]
        assert seen(backend.requests[1]) == conversation
        again: Any = asked({**IMAGE, "image_url": data_url(ONE, "jpeg")})
        stream = await api.responses.create(input=again, previous_response_id=more.id, stream=True)
        assert [event.type async for event in stream][-1] == "response.completed"
        assert seen(backend.requests[2]) == [*conversation, ("assistant", "Good day"), ("user", [ONE])]


async def test_the_result_of_a_function_may_be_a_image():
    backend = eye()
    made: Any = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}
    result: Any = {
        "type": "function_call_output",
        "call_id": "a",
        "output": [WORDS, {"type": "input_image", "image_url": data_url(ONE)}],
    }
    async with serving(backend) as port, client(port) as api:
        response = await api.responses.create(
            input=[{"role": "user", "content": "Look."}, made, result], include=["message.input_image.image_url"]
        )
        listed: Any = (await api.responses.input_items.list(response.id, order="asc")).data
        assert listed[-1].output[1].image_url == data_url(ONE)
    assert seen(backend.requests[0])[-1] == ("tool", ["What is this", ONE])


async def test_a_image_may_be_an_uploaded_file():
    backend = eye()
    async with serving(backend) as port, client(port) as api:
        ids = [
            (await api.files.create(file=("one.png", ONE), purpose=purpose)).id
            for purpose in ("vision", "user_data", "batch")
        ]
        response = await api.responses.create(input=asked(*[{**IMAGE, "file_id": name} for name in ids[:2]]))
        assert seen(backend.requests[0]) == [("user", [ONE, ONE])]
        shown: Any = (await api.responses.input_items.list(response.id)).data[0]
        assert [part.file_id for part in shown.content] == ids[:2]
        assert (await api.files.content(ids[0])).content == ONE
        await api.files.delete(ids[0])
        await api.responses.create(input="and?", previous_response_id=response.id)
        assert seen(backend.requests[1])[0] == ("user", [ONE, ONE])
        for name, told in (
            (ids[0], "No such file"),
            (ids[2], "a file with the purpose 'vision' or 'user_data'"),
        ):
            reply = await call(port, "POST", PATH, {"input": asked(WORDS, {"type": "input_image", "file_id": name})})
            assert (reply.status, reply.error["param"]) == (400, "input[0].content[1].file_id")
            assert told in reply.error["message"]


@pytest.mark.parametrize(
    ("part", "param"),
    [
        ({"image_url": "data:image/png;base64,%%"}, "image_url"),
        ({"image_url": "data:image/svg+xml;base64,AAAA"}, "image_url"),
        ({"image_url": "file:///etc/passwd"}, "image_url"),
        ({"image_url": "image:aa:1:data"}, "image_url"),
        ({"image_url": {"url": data_url(ONE)}}, "image_url"),
        ({}, "image_url"),
        ({"image_url": data_url(ONE), "file_id": "file-a"}, "file_id"),
        ({"file_id": "file-a"}, "file_id"),
        ({"file_id": 5}, "file_id"),
        ({"image_url": data_url(ONE), "detail": 5}, "detail"),
        ({"image_url": data_url(ONE), "width": 5}, ""),
    ],
)
@pytest.mark.parametrize("place", ["content", "output"])
async def test_what_is_no_image_is_refused_by_its_name(part: Any, param: str, place: str):
    block = [WORDS, {"type": "input_image", **part}]
    item = {"role": "user", "content": block}
    if place == "output":
        item = {"type": "function_call_output", "call_id": "a", "output": block}
    async with serving(eye(), unknown_parameters="refuse") as port:
        reply = await call(port, "POST", PATH, {"input": ["x", item][1:]})
    name = f"input[0].{place}[1]"
    assert (reply.status, reply.error["param"]) == (400, f"{name}.{param}" if param else name)


async def test_images_are_refused_where_no_model_takes_them():
    inline: Any = {"type": "input_image", "image_url": data_url(ONE)}
    async with serving(ScriptedBackend()) as port:
        reply = await call(port, "POST", PATH, {"input": asked(WORDS, inline)})
        assert (reply.status, reply.error["param"]) == (400, "input[0].content[1].type")
        assert "--enable-mm" in reply.error["message"]
    async with serving(eye(), limit_mm_per_prompt="image=2") as port:
        for role in ("system", "developer", "assistant"):
            reply = await call(port, "POST", PATH, {"input": [{"role": role, "content": [inline]}, *asked(WORDS)]})
            assert (reply.status, reply.error["param"]) == (400, "input[0].content[0].type")
        made = (await call(port, "POST", PATH, {"input": asked(inline, inline)})).json["id"]
        many = await call(port, "POST", PATH, {"input": asked(inline), "previous_response_id": made})
        assert (many.status, many.error["param"]) == (400, "input[0].content[0].image_url")
        assert "at most 2 images" in many.error["message"]


async def test_without_files_a_image_that_names_one_is_refused():
    named = input_items.read(asked(WORDS, {"type": "input_image", "file_id": "file-a"}), "id").turns
    with pytest.raises(ServiceError, match="has none") as refused:
        await images.read_files(named, None)
    assert refused.value.param == "input[0].content[1].file_id"


@pytest.mark.nats
async def test_the_bus_keeps_a_image_once_for_all_responses(nats_connect: Any, nats_server: Any, subjects: Any):
    one, two = [images_of(await nats_connect(nats_server, name), subjects) for name in ("one", "two")]
    large = random.Random(1).randbytes(1_300_000)
    inline: Any = {"type": "input_image", "image_url": data_url(large, "webp")}
    backend = eye()
    async with serving(eye(), offers=[one]) as first, serving(backend, offers=[two]) as second:
        made = (await call(first, "POST", PATH, {"input": asked(WORDS, inline)})).json
        items = (await call(second, "GET", f"{PATH}/{made['id']}/input_items")).json["data"]
        assert items[0]["content"][1]["image_url"] == data_url(large, "webp")
        for _ in range(3):
            more = await call(second, "POST", PATH, {"input": "and?", "previous_response_id": made["id"]})
            assert more.status == 200
            assert seen(backend.requests[-1])[0] == ("user", ["What is this", large])
            made = more.json
        parts = await one.part.log.all_following(subjects.response("*"), 1)
        assert len(large) < sum(len(part.payload) for part in parts) < 1.1 * len(large)
        # A log that is full drops messages: the response is still known, but cannot be continued.
        await one.part.log.clear(one.subjects(ANONYMOUS.name, kept_image(large))[1])
        assert (await call(first, "GET", f"{PATH}/{made['id']}")).json == made
        lost = await call(first, "POST", PATH, {"input": "and?", "previous_response_id": made["id"]})
        assert (lost.status, lost.error["param"]) == (400, "previous_response_id")
        assert "is not stored any more" in lost.error["message"]


@pytest.mark.nats
async def test_a_background_response_whose_image_the_bus_has_dropped_fails(deployment: Deployment):  # noqa: F811
    body = {"input": asked({"type": "input_image", "image_url": data_url(ONE)}), "background": True}
    async with deployment.gateway("one", eye(manual=True)) as one, deployment.gateway("two", eye(manual=True)) as two:
        name = (await one.ask("POST", "", body)).json["id"]
        generation = await one.backend.generations.get()
        kept = two.streams.store.images
        await kept.part.log.clear(kept.subjects(ANONYMOUS.name, kept_image(ONE))[0])
        deployment.living = {("two", "boot")}
        failed = await is_in(two, name, "failed")
        assert "dropped an image" in failed["error"]["message"]
        one.streams.on_taken(StreamTaken(name.removeprefix("resp_"), 9))
        await asyncio.wait_for(generation.stopped.wait(), 60)
        assert (await two.ask("GET", f"/{name}/input_items")).status == 200


@pytest.mark.nats
async def test_a_background_response_with_a_large_image_goes_on_at_another_gateway(deployment: Deployment):  # noqa: F811
    large = random.Random(2).randbytes(1_300_000)
    body = {
        "input": asked(
            WORDS, {"type": "input_image", "image_url": data_url(large)}, {"type": "input_image", "image_url": URL}
        ),
        "background": True,
        "seed": 1,
    }
    async with deployment.gateway("one", eye(manual=True)) as one, deployment.gateway("two", eye(manual=True)) as two:
        two.backend.remote[URL] = ONE  # Another image by now.
        name = (await one.ask("POST", "", body)).json["id"]
        generation = await one.backend.generations.get()
        generation.put(*text_batches(*PIECES)[:2])
        await has_text(two, name, "Good day ")
        shown = (await two.ask("GET", f"/{name}/input_items")).json["data"][0]["content"]
        assert [part.get("image_url") for part in shown] == [None, data_url(large), URL]
        deployment.living = {("two", "boot")}
        resumed = await two.backend.generations.get()
        assert seen(resumed.request) == [("user", ["What is this", large, TWO])]
        resumed.put(*again(resumed.request, 9), None)
        await is_in(two, name, "completed")
        more = await two.ask("POST", "", {"input": "and?", "previous_response_id": name, "background": True})
        assert more.status == 200, more.body
        assert seen((await two.backend.generations.get()).request)[0] == ("user", ["What is this", large, TWO])
