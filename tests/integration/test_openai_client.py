"""The official OpenAI client against the HTTP edge. The backend is scripted: see `edge`."""

import asyncio
from typing import Any

import anyio
import openai
import pytest

from antiphon.services.gateway.path.generation import GenerationRequest, SequenceUpdate
from antiphon.shared.errors import ServiceError
from antiphon.shared.messages import PositionLogprobs, TokenText
from tests.integration.edge import Batch, ScriptedBackend, serving, text_batches

MESSAGES: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello?"}]


def client(port: int, **options: Any) -> openai.AsyncOpenAI:
    settings = {"api_key": "EMPTY", "max_retries": 0, **options}
    return openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", **settings)


@pytest.mark.spec("S-API-001", "S-API-002", "S-API-007", "S-API-070", "S-API-075a", "S-API-075b", "S-API-075c")
async def test_whole_answers_parse():
    backend = ScriptedBackend()
    async with serving(backend) as port, client(port) as api:
        chat = await api.chat.completions.create(model="org/toy", messages=MESSAGES, max_tokens=9, temperature=0.5)
        assert chat.choices[0].message.content == "Good day"
        assert chat.choices[0].finish_reason == "stop"
        assert chat.usage is not None
        assert (chat.usage.prompt_tokens, chat.usage.completion_tokens, chat.usage.total_tokens) == (3, 2, 5)
        assert chat.id.startswith("chatcmpl-")
        text = await api.completions.create(model="org/toy", prompt="Hello", seed=5, stop=["x"])
        assert text.choices[0].text == "Good day"
    first, second = backend.requests
    assert (first.params.max_tokens, first.params.temperature) == (9, 0.5)
    assert [message.role for message in first.inputs.messages] == ["system", "user"]
    assert (second.inputs.texts, second.params.seed, second.output.stop) == (("Hello",), 5, ("x",))


@pytest.mark.spec("S-API-034", "S-API-088", "S-API-090", "S-API-091")
async def test_streams_parse_with_usage_at_the_end():
    async with serving(ScriptedBackend()) as port, client(port) as api:
        stream = await api.chat.completions.create(
            model="org/toy", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(one.delta.content or "" for chunk in chunks for one in chunk.choices) == "Good day"
        assert chunks[0].choices[0].delta.role == "assistant"
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == 2
        text = await api.completions.create(model="org/toy", prompt="Hello", stream=True)
        assert "".join([chunk.choices[0].text async for chunk in text]) == "Good day"


@pytest.mark.spec("S-DEP-042:sdk")
async def test_the_synchronous_client_works_as_the_sample_uses_it():
    def sample(port: int) -> list[str]:
        with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="EMPTY") as api:
            settings: Any = {"messages": MESSAGES, "temperature": 0.7, "top_p": 1.0, "max_tokens": 128}
            whole = api.chat.completions.create(model="org/toy", **settings)
            chunks = api.chat.completions.create(model="org/toy", stream=True, **settings)
            deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
            assert [model.id for model in api.models.list()] == ["org/toy"]
            assert api.models.retrieve("org/toy").object == "model"
            return [whole.choices[0].message.content or "", "".join(delta.content for delta in deltas if delta.content)]

    async with serving(ScriptedBackend()) as port:
        assert await asyncio.to_thread(sample, port) == ["Good day", "Good day"]


@pytest.mark.spec("S-API-018")
async def test_several_choices_come_with_their_index():
    def choices(request: GenerationRequest) -> list[Any]:
        return [batch for index in range(request.n) for batch in text_batches("choice ", str(index), index=index)]

    async with serving(ScriptedBackend(reply=choices)) as port, client(port) as api:
        whole = await api.chat.completions.create(model="org/toy", messages=MESSAGES, n=3)
        assert [one.message.content for one in whole.choices] == ["choice 0", "choice 1", "choice 2"]
        texts = {0: "", 1: "", 2: ""}
        async for chunk in await api.chat.completions.create(model="org/toy", messages=MESSAGES, n=3, stream=True):
            texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
        assert texts == {0: "choice 0", 1: "choice 1", 2: "choice 2"}


@pytest.mark.spec("S-API-026")
async def test_logprobs_parse_whole_and_streamed():
    def token(text: str, logprob: float) -> TokenText:
        return TokenText(1, text, text.encode(), logprob)

    def reply(request: GenerationRequest) -> list[Batch]:
        one = PositionLogprobs(token("hi", -0.5), (token("hi", -0.5), token("ho", -1.5)))
        return [
            [SequenceUpdate(index=0, text="hi", token_ids=(1,), logprobs=(one,))],
            [SequenceUpdate(index=0, text="", token_ids=(), finish_reason="stop")],
        ]

    async with serving(ScriptedBackend(reply=lambda request: [*reply(request)])) as port, client(port) as api:
        asked: Any = {"model": "org/toy", "messages": MESSAGES, "logprobs": True, "top_logprobs": 2}
        whole = await api.chat.completions.create(**asked)
        assert whole.choices[0].logprobs is not None
        assert whole.choices[0].logprobs.content is not None
        assert [one.token for one in whole.choices[0].logprobs.content[0].top_logprobs] == ["hi", "ho"]
        chunks = [chunk async for chunk in await api.chat.completions.create(stream=True, **asked)]
        found = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices[0].logprobs]
        assert [one.token for one in found[0].content or ()] == ["hi"]
        text = await api.completions.create(model="org/toy", prompt="x", logprobs=2)
        assert text.choices[0].logprobs is not None
        assert text.choices[0].logprobs.top_logprobs == [{"hi": -0.5, "ho": -1.5}]


@pytest.mark.spec("S-API-080", "S-API-081", "S-API-082")
async def test_errors_become_the_client_s_own_exceptions():
    backend = ScriptedBackend()
    async with serving(backend, api_keys="secret") as port:
        async with client(port) as api:
            with pytest.raises(openai.AuthenticationError):
                await api.models.list()
        async with client(port, api_key="secret") as api:
            with pytest.raises(openai.NotFoundError) as missing:
                await api.chat.completions.create(model="gpt", messages=MESSAGES)
            assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
            with pytest.raises(openai.BadRequestError) as bad:
                await api.chat.completions.create(model="org/toy", messages=MESSAGES, temperature=3)
            assert (bad.value.code, bad.value.param) == ("invalid_value", "temperature")
            backend.refusal = ServiceError("rate_limit_exceeded", "Slow down.")
            with pytest.raises(openai.RateLimitError):
                await api.chat.completions.create(model="org/toy", messages=MESSAGES)


async def test_the_client_comes_back_after_the_time_it_was_told(monkeypatch: pytest.MonkeyPatch):
    backend = ScriptedBackend(refusal=ServiceError("server_is_overloaded", "Busy.", retry_after_s=0.05))
    waits: list[float] = []
    async with serving(backend) as port, client(port, max_retries=1) as api:
        sleep = anyio.sleep

        async def slept(delay: float) -> None:
            waits.append(delay)
            await sleep(delay)

        monkeypatch.setattr(anyio, "sleep", slept)
        with pytest.raises(openai.InternalServerError):
            await api.chat.completions.create(model="org/toy", messages=MESSAGES)
    [wait] = waits
    assert 0.05 <= wait < 0.1
    assert len(backend.requests) == 2


async def test_an_error_in_mid_stream_raises_in_the_client():
    backend = ScriptedBackend(reply=lambda _: [*text_batches("a", "b")[:1], ServiceError("engine_failure", "Broken.")])
    async with serving(backend) as port, client(port) as api:
        stream = await api.chat.completions.create(model="org/toy", messages=MESSAGES, stream=True)
        assert (await anext(stream)).choices[0].delta.role == "assistant"
        assert (await anext(stream)).choices[0].delta.content == "a"
        with pytest.raises(openai.APIError, match="Broken"):
            await anext(stream)


async def test_a_client_that_closes_its_stream_cancels_the_generation():
    backend = ScriptedBackend(manual=True)
    async with serving(backend) as port, client(port) as api:
        asking = asyncio.create_task(api.chat.completions.create(model="org/toy", messages=MESSAGES, stream=True))
        generation = await backend.generations.get()
        generation.put(text_batches("a", "b")[0])
        stream = await asking
        assert (await anext(stream)).choices[0].delta.role == "assistant"
        await stream.close()
        await asyncio.wait_for(generation.stopped.wait(), 60)
        assert generation.cancelled == ["abort"]
