"""OpenAI's client for Python: what holds for all its calls, such as errors, ids of requests and timeouts."""

import openai
from openai import AsyncOpenAI, OpenAI

from tests.clients.checks import ANSWER, KEY, MODEL, QUESTION, SLOW_KEY, URL, check, raised

client = OpenAI(base_url=URL, api_key=KEY, max_retries=0)
chat = client.chat.completions
PLAIN = {"model": MODEL, "messages": QUESTION, "temperature": 0}
LONG = {**PLAIN, "max_tokens": 1500, "extra_body": {"ignore_eos": True}}


@check
def a_wrong_value_is_a_bad_request():
    error = raised(openai.BadRequestError, lambda: chat.create(**{**PLAIN, "temperature": 9}))
    assert (error.param, error.type, bool(error.code)) == ("temperature", "invalid_request_error", True)
    assert error.request_id == error.response.headers["x-request-id"]


@check
def an_unknown_model_is_not_found():
    error = raised(openai.NotFoundError, lambda: chat.create(**{**PLAIN, "model": "other"}))
    assert error.code == "model_not_found"


@check
def a_wrong_key_is_an_authentication_error():
    other = OpenAI(base_url=URL, api_key="wrong", max_retries=0)
    assert raised(openai.AuthenticationError, lambda: other.models.list()).code == "invalid_api_key"


@check
def too_many_requests_are_a_rate_limit_error():
    slow = OpenAI(base_url=URL, api_key=SLOW_KEY, max_retries=0)

    def ask_twice():
        for _ in range(2):
            slow.chat.completions.create(**PLAIN)

    error = raised(openai.RateLimitError, ask_twice)
    assert int(error.response.headers["retry-after"]) > 0


@check
def a_used_idempotency_key_is_a_conflict():
    named = {"extra_headers": {"Idempotency-Key": "once"}}
    first, again = (chat.create(**PLAIN, **named) for _ in range(2))
    assert first == again
    raised(openai.ConflictError, lambda: chat.create(**PLAIN, **named, max_tokens=3))


@check
def a_short_timeout_is_a_timeout_error():
    raised(openai.APITimeoutError, lambda: chat.create(**LONG, timeout=0.05))


@check
def a_raw_response_has_headers():
    raw = chat.with_raw_response.create(**PLAIN, extra_headers={"X-Request-Id": "mine"})
    assert raw.headers["x-request-id"] == raw.request_id == raw.parse()._request_id == "mine"


@check
def a_streaming_response_has_lines():
    with chat.with_streaming_response.create(**PLAIN, stream=True) as response:
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"


@check
def a_stream_is_closed_early():
    with chat.create(**LONG, stream=True) as stream:
        assert next(iter(stream)).choices[0].delta.role == "assistant"
    assert chat.create(**PLAIN).choices[0].message.content == ANSWER


@check
async def the_asynchronous_client_answers_and_streams():
    async with AsyncOpenAI(base_url=URL, api_key=KEY, max_retries=0) as other:
        whole = await other.chat.completions.create(**PLAIN)
        stream = await other.chat.completions.create(**PLAIN, stream=True)
        streamed = "".join([one.choices[0].delta.content or "" async for one in stream if one.choices])
    assert whole.choices[0].message.content == streamed == ANSWER


@check
async def the_asynchronous_stream_helper_answers():
    other = AsyncOpenAI(base_url=URL, api_key=KEY, max_retries=0)
    async with other.chat.completions.stream(**PLAIN) as stream:
        found = await stream.get_final_completion()
    assert found.choices[0].message.content == ANSWER
