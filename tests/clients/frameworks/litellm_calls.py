"""LiteLLM: each of its names for servers that speak one of the APIs."""

import json
from typing import Any

import litellm

from tests.clients.checks import ANSWER, ASK, HOST, KEY, MODEL, QUESTION, TOOL, URL, WEATHER, Answer, check, raised

LIKE_OPENAI = ("openai", "hosted_vllm", "lm_studio", "llamafile")


def plain(provider: str, base: str = URL) -> dict[str, Any]:
    common = {"temperature": 0, "max_tokens": 240, "num_retries": 0}
    return {"model": f"{provider}/{MODEL}", "api_base": base, "api_key": KEY, **common}


def said(completion: Any) -> str:
    return completion.choices[0].message.content


def answers(provider: str, base: str = URL) -> None:
    """Asks for a whole answer, a streamed one, one with a schema, and a call."""
    common = plain(provider, base)
    assert said(litellm.completion(messages=QUESTION, **common)).strip() == ANSWER
    chunks = litellm.completion(messages=QUESTION, stream=True, **common)
    assert "".join(one.choices[0].delta.content or "" for one in chunks).strip() == ANSWER
    Answer.model_validate_json(said(litellm.completion(messages=QUESTION, response_format=Answer, **common)))


def calls(provider: str, base: str = URL) -> None:
    found = litellm.completion(messages=WEATHER, tools=[TOOL], tool_choice="required", **plain(provider, base))
    call = found.choices[0].message.tool_calls[0].function
    assert (call.name, [*json.loads(call.arguments)]) == ("get_weather", ["city"])


@check
def servers_like_openais_answer():
    for provider in LIKE_OPENAI:
        answers(provider)


@check
def servers_like_openais_call_functions():
    for provider in LIKE_OPENAI:
        calls(provider)


@check
def usage_is_counted_in_a_stream():
    asked = {**plain("openai"), "stream": True, "stream_options": {"include_usage": True}}
    assert [*litellm.completion(messages=QUESTION, **asked)][-1].usage.completion_tokens > 5


@check
def a_call_is_streamed():
    asked = {**plain("openai"), "tools": [TOOL], "tool_choice": "required", "stream": True}
    whole = litellm.stream_chunk_builder([*litellm.completion(messages=WEATHER, **asked)])
    assert whole.choices[0].message.tool_calls[0].function.name == "get_weather"


@check
async def the_asynchronous_call_answers():
    assert said(await litellm.acompletion(messages=QUESTION, **plain("openai"))) == ANSWER


@check
def anthropics_server_answers():
    answers("anthropic", HOST)


@check
def anthropics_server_calls_functions():
    calls("anthropic", HOST)


@check
def ollamas_server_answers():
    answers("ollama_chat", HOST)


@check
def ollamas_server_generates():
    found = litellm.completion(messages=QUESTION, **plain("ollama", HOST))
    assert found.usage.completion_tokens > 0


@check
def texts_are_completed():
    found = litellm.text_completion(prompt=ASK, **{**plain("text-completion-openai"), "max_tokens": 3})
    assert found.usage.completion_tokens == 3


@check
def responses_are_made():
    common = {"model": f"openai/{MODEL}", "api_base": URL, "api_key": KEY, "temperature": 0}
    assert litellm.responses(input=ASK, **common).output_text == ANSWER
    events = [*litellm.responses(input=ASK, stream=True, **common)]
    assert events[-1].type == "response.completed"


@check
def texts_are_embedded():
    for provider in ("openai", "hosted_vllm"):
        common = {"model": f"{provider}/{MODEL}", "api_base": URL, "api_key": KEY}
        assert len(litellm.embedding(input=["one", "two"], **common).data) == 2


@check
def texts_are_ranked():
    common = {"model": f"hosted_vllm/{MODEL}", "api_base": HOST, "api_key": KEY}
    found = litellm.rerank(query="one", documents=["one", "two"], top_n=1, **common)
    assert [one["index"] for one in found.results] == [0]


@check
def errors_have_their_kind():
    unknown = {**plain("openai"), "model": "openai/other"}
    raised(litellm.NotFoundError, lambda: litellm.completion(messages=QUESTION, **unknown))
    wrong = {**plain("openai"), "api_key": "wrong"}
    raised(litellm.AuthenticationError, lambda: litellm.completion(messages=QUESTION, **wrong))
