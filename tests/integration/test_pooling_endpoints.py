"""Embeddings, score and rerank at the HTTP edge: the official client, and what happens when vectors do not come."""

import asyncio
from array import array
from dataclasses import replace
from typing import Any

import openai
import pytest

from antiphon.services.gateway.ops.timeline.recorder import Recorder
from antiphon.services.gateway.path.generation import GenerationRequest, SequenceUpdate
from antiphon.shared.errors import ServiceError
from tests.integration.edge import CARD, ScriptedBackend, Step, call, endings, serving, text_batches
from tests.integration.test_openai_client import client

POOLING_CARD = replace(CARD, embedding_size=2)


def vector_of(index: int) -> tuple[float, float]:
    return (float(index), 0.5)


def backwards(request: GenerationRequest) -> list[Step]:
    """A vector for each prompt, the last one first."""
    assert request.pooling is not None
    return [
        [SequenceUpdate(index=index, text="", finish_reason="stop", vector=array("f", vector_of(index)).tobytes())]
        for index in reversed(range(request.inputs.num_prompts))
    ]


def pooling_backend(**fields: Any) -> ScriptedBackend:
    return ScriptedBackend(cards=[POOLING_CARD], reply=fields.pop("reply", backwards), **fields)


@pytest.mark.parametrize("encoding", ["float", "base64", None])
async def test_the_official_client_gets_every_vector_in_its_place(encoding: Any):
    texts = [f"text {index}" for index in range(64)]
    fields: dict[str, Any] = {} if encoding is None else {"encoding_format": encoding}
    async with serving(pooling_backend()) as port, client(port) as api:
        answer = await api.embeddings.create(model="org/toy", input=texts, **fields)
    assert [one.index for one in answer.data] == list(range(64))
    if encoding == "base64":
        assert all(isinstance(one.embedding, str) for one in answer.data)
    else:
        assert [tuple(one.embedding) for one in answer.data] == [vector_of(index) for index in range(64)]
    assert (answer.object, answer.model) == ("list", "org/toy")
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (192, 192)


async def test_errors_have_openai_s_form():
    async with serving(pooling_backend()) as port, client(port) as api:
        with pytest.raises(openai.BadRequestError) as error:
            await api.embeddings.create(model="org/toy", input="hello", dimensions=3)
        assert error.value.param == "dimensions"
        with pytest.raises(openai.NotFoundError):
            await api.embeddings.create(model="other", input="hello")


async def test_a_request_that_ends_without_its_vectors_is_an_error():
    async with serving(pooling_backend(reply=lambda _: [])) as port, client(port) as api:
        with pytest.raises(openai.InternalServerError):
            await api.embeddings.create(model="org/toy", input="hello")


async def test_a_failure_of_the_engine_reaches_the_client_and_the_metrics():
    backend = pooling_backend(reply=lambda _: [ServiceError("engine_failure", "It broke.")])
    async with serving(backend) as port, client(port) as api:
        with pytest.raises(openai.InternalServerError, match="It broke"):
            await api.embeddings.create(model="org/toy", input=["a", "b"])
        metrics = (await call(port, "GET", "/metrics")).body.decode()
    assert 'vllm:request_success_total{finished_reason="error",model_name="org/toy"} 2.0' in metrics
    assert backend.generations.get_nowait().cancelled == ["error"]


async def test_a_client_that_leaves_cancels_its_request():
    backend, recorder = pooling_backend(manual=True), Recorder(8)
    async with serving(backend, recorder=recorder) as port, client(port) as api:
        asking = asyncio.create_task(api.embeddings.create(model="org/toy", input="hello"))
        generation = await backend.generations.get()
        asking.cancel()
        await asyncio.wait_for(generation.stopped.wait(), 60)
        assert generation.cancelled == ["abort"]
        assert await endings(recorder) == [("cancelled", "client_closed_request")]


async def test_prompt_tokens_are_counted_in_the_metrics():
    async with serving(pooling_backend()) as port, client(port) as api:
        await api.embeddings.create(model="org/toy", input=["a", "b"])
        metrics = (await call(port, "GET", "/metrics")).body.decode()
    assert 'vllm:prompt_tokens_total{model_name="org/toy"} 6.0' in metrics
    assert 'vllm:request_success_total{finished_reason="stop",model_name="org/toy"} 2.0' in metrics


async def test_pooling_has_the_vectors_in_vllm_s_form():
    async with serving(pooling_backend()) as port:
        reply = await call(port, "POST", "/pooling", {"model": "org/toy", "input": ["a", "b"]})
        other = await call(port, "POST", "/pooling", {"model": "org/toy", "input": "a", "task": "token_embed"})
    assert [(one["object"], one["data"]) for one in reply.json["data"]] == [
        ("pooling", [0.0, 0.5]),
        ("pooling", [1.0, 0.5]),
    ]
    assert (other.status, other.error["param"]) == (400, "task")


@pytest.mark.parametrize("names", [("queries", "documents"), ("data_1", "data_2"), ("queries", "items")])
async def test_the_two_sides_of_a_score_have_several_names(names: tuple[str, str]):
    first, second = names
    async with serving(pooling_backend()) as port:
        reply = await call(port, "POST", "/v1/score", {first: "a", second: ["b", "c"]})
        expected = await call(port, "POST", "/v1/score", {"text_1": "a", "text_2": ["b", "c"]})
    assert len(reply.json["data"]) == 2
    assert reply.json["data"] == expected.json["data"]
    assert "x-antiphon-ignored" not in reply.headers


async def test_an_invocation_is_the_request_whose_main_field_it_has():
    def reply(request: GenerationRequest) -> list[Step]:
        return backwards(request) if request.pooling else [*text_batches("Good ", "day")]

    async with serving(pooling_backend(reply=reply)) as port:
        asked = {"messages": [{"role": "user", "content": "hi"}]}
        chat = await call(port, "POST", "/invocations", asked)
        streamed = await call(port, "POST", "/invocations", {**asked, "stream": True})
        completion = await call(port, "POST", "/invocations", {"prompt": "hi"})
        embedding = await call(port, "POST", "/invocations", {"input": "hi"})
        nothing = await call(port, "POST", "/invocations", {"model": "org/toy"})
    assert chat.json["choices"][0]["message"]["content"] == "Good day"
    assert streamed.events[-1] == "[DONE]"
    assert completion.json["choices"][0]["text"] == "Good day"
    assert embedding.json["data"][0]["embedding"] == [0.0, 0.5]
    assert (nothing.status, nothing.error["code"]) == (400, "missing_required_parameter")
