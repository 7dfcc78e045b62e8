"""OpenAI's client for Python: chats, completions, embeddings and models."""

import json

from openai import OpenAI, pydantic_function_tool
from openai.types.chat import ParsedChatCompletion
from pydantic import BaseModel, Field

from tests.clients.checks import (
    ANSWER,
    ASK,
    EYE,
    IMAGE,
    KEY,
    MODEL,
    QUESTION,
    STORY,
    THINKER,
    TOOL,
    URL,
    WEATHER,
    Answer,
    check,
    refused,
)

client = OpenAI(base_url=URL, api_key=KEY, max_retries=0)
chat = client.chat.completions
PLAIN = {"model": MODEL, "messages": QUESTION, "temperature": 0, "max_tokens": 240}
CALLS = {**PLAIN, "messages": WEATHER, "tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}


class GetWeather(BaseModel):
    """Returns the weather of a city."""

    city: str = Field(max_length=12)


def text_of(completion: ParsedChatCompletion) -> str:
    return completion.choices[0].message.content


@check
def a_chat_is_answered():
    found = chat.create(**PLAIN)
    assert (text_of(found), found.choices[0].finish_reason) == (ANSWER, "stop")
    assert found.usage.total_tokens == found.usage.prompt_tokens + found.usage.completion_tokens > 10


@check
def a_chat_is_streamed_with_its_usage():
    chunks = list(chat.create(**PLAIN, stream=True, stream_options={"include_usage": True}))
    assert "".join(one.choices[0].delta.content or "" for one in chunks[:-1]) == ANSWER
    assert chunks[-1].usage.completion_tokens > 5


@check
def an_answer_is_parsed():
    assert isinstance(chat.parse(**PLAIN, response_format=Answer).choices[0].message.parsed, Answer)


@check
def the_stream_helper_sends_events():
    with chat.stream(**PLAIN) as stream:
        kinds = {event.type for event in stream}
        assert text_of(stream.get_final_completion()) == ANSWER
    assert {"chunk", "content.delta", "content.done"} <= kinds


@check
def the_stream_helper_parses():
    with chat.stream(**PLAIN, response_format=Answer) as stream:
        [done] = [event for event in stream if event.type == "content.done"]
    assert isinstance(done.parsed, Answer)


@check
def a_function_is_called():
    [call] = chat.create(**CALLS).choices[0].message.tool_calls
    assert (call.function.name, [*json.loads(call.function.arguments)]) == ("get_weather", ["city"])


@check
def the_arguments_of_a_function_are_parsed():
    found = chat.parse(**{**CALLS, "tools": [pydantic_function_tool(GetWeather)]})
    assert isinstance(found.choices[0].message.tool_calls[0].function.parsed_arguments, GetWeather)


@check
def the_stream_helper_sends_the_events_of_a_call():
    with chat.stream(**CALLS) as stream:
        kinds = {event.type for event in stream}
        call = stream.get_final_completion().choices[0].message.tool_calls[0]
    assert call.function.name == "get_weather"
    assert {"tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= kinds


@check
def the_result_of_a_function_is_read():
    called = chat.create(**CALLS).choices[0].message
    result = {"role": "tool", "tool_call_id": called.tool_calls[0].id, "content": "sunny"}
    found = chat.create(**{**PLAIN, "messages": [*WEATHER, called, result]}, tools=[TOOL], tool_choice="auto")
    assert "sunny" in text_of(found)


@check
def a_named_function_is_called():
    wanted = {"type": "function", "function": {"name": "get_weather"}}
    assert chat.create(**{**CALLS, "tool_choice": wanted}).choices[0].message.tool_calls


@check
def one_of_the_allowed_functions_is_called():
    tools = [{"type": "function", "function": {"name": "get_weather"}}]
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": tools}}
    assert chat.create(**{**CALLS, "tool_choice": allowed}).choices[0].message.tool_calls


@check
def no_function_is_called():
    assert chat.create(**{**CALLS, "tool_choice": "none"}).choices[0].message.tool_calls is None


@check
def a_chat_has_log_probabilities():
    found = chat.create(**PLAIN, logprobs=True, top_logprobs=2).choices[0].logprobs.content
    assert "".join(one.token for one in found).startswith(ANSWER)
    assert all(len(one.top_logprobs) == 2 and one.logprob <= 0 for one in found)


@check
def the_stream_helper_sends_log_probabilities():
    with chat.stream(**PLAIN, logprobs=True) as stream:
        tokens = [one.token for event in stream if event.type == "logprobs.content.delta" for one in event.content]
    assert "".join(tokens).startswith(ANSWER)


@check
def a_chat_has_several_choices():
    found = chat.create(**{**PLAIN, "temperature": 1, "max_tokens": 5}, n=3)
    assert [one.index for one in found.choices] == [0, 1, 2]


@check
def a_chat_ends_at_a_stop_string():
    assert text_of(chat.create(**PLAIN, stop=["="])) == ANSWER.partition("=")[0]


@check
def a_chat_ends_at_its_maximum():
    found = chat.create(model=MODEL, messages=QUESTION, max_completion_tokens=2, temperature=0)
    assert (found.choices[0].finish_reason, found.usage.completion_tokens) == ("length", 2)


@check
def an_answer_follows_a_json_schema():
    schema = {"name": "answer", "strict": True, "schema": Answer.model_json_schema()}
    found = chat.create(**PLAIN, response_format={"type": "json_schema", "json_schema": schema})
    Answer.model_validate_json(text_of(found))


@check
def an_answer_is_a_json_object():
    found = chat.create(**{**PLAIN, "max_tokens": 60}, response_format={"type": "json_object"})
    assert text_of(found).startswith("{")


@check
def a_seed_repeats_an_answer():
    one, two = (chat.create(**{**PLAIN, "temperature": 1, "max_tokens": 20}, seed=7) for _ in range(2))
    assert text_of(one) == text_of(two)
    assert one.system_fingerprint == two.system_fingerprint


@check
def a_image_is_read():
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{IMAGE}"}}
    message = {"role": "user", "content": [{"type": "text", "text": ASK}, image]}
    assert chat.create(model=EYE, messages=[message], max_tokens=3, temperature=0).usage.completion_tokens == 3


@check
def reasoning_is_separated():
    asked = {**PLAIN, "model": THINKER, "messages": STORY, "max_tokens": 40}
    own = {"thinking_token_budget": 5, "ignore_eos": True}
    found = chat.create(**asked, reasoning_effort="low", extra_body=own)
    assert text_of(found)
    assert found.usage.completion_tokens_details.reasoning_tokens >= 5
    assert found.choices[0].message.model_extra["reasoning"]


@check
def hints_are_told():
    found = chat.with_raw_response.create(**PLAIN, store=True, metadata={"a": "b"}, verbosity="low", user="me")
    assert text_of(found.parse()) == ANSWER
    assert {"store", "metadata", "verbosity"} <= {*found.headers["x-antiphon-ignored"].split(", ")}


@refused("| a chat's tools of the type `custom`", "custom")
def a_custom_tool_is_called_in_a_chat():
    chat.create(**{**PLAIN, "tools": [{"type": "custom", "custom": {"name": "shell"}}]})


@refused("| audio, videos, files that are not images |", "audio")
def an_answer_is_spoken():
    chat.create(**PLAIN, modalities=["text", "audio"], audio={"voice": "alloy", "format": "wav"})


@refused("stored chats", "Use POST")
def stored_chats_are_listed():
    chat.list()


@refused("stored chats", "Unknown request URL")
def a_stored_chat_is_retrieved():
    chat.retrieve("chatcmpl-1")


@refused("stored chats", "Unknown request URL")
def a_stored_chat_is_changed():
    chat.update("chatcmpl-1", metadata={"a": "b"})


@refused("stored chats", "Unknown request URL")
def a_stored_chat_is_deleted():
    chat.delete("chatcmpl-1")


@refused("stored chats", "Unknown request URL")
def the_messages_of_a_stored_chat_are_listed():
    chat.messages.list("chatcmpl-1")


@check
def a_text_is_completed():
    found = client.completions.create(model=MODEL, prompt=ASK, max_tokens=5, temperature=0, echo=True, logprobs=2)
    assert found.choices[0].text.startswith(ASK)
    assert len(found.choices[0].logprobs.tokens) == found.usage.total_tokens


@check
def a_completion_is_streamed():
    asked = {"model": MODEL, "prompt": [ASK, "Hello"], "max_tokens": 5, "temperature": 0}
    whole = client.completions.create(**asked)
    streamed = ["", ""]
    for chunk in client.completions.create(**asked, stream=True):
        for one in chunk.choices:
            streamed[one.index] += one.text
    assert streamed == [one.text for one in whole.choices]


@check
def texts_are_embedded():
    found = client.embeddings.create(model=MODEL, input=["one", "two"]).data
    floats = client.embeddings.create(model=MODEL, input=["one", "two"], encoding_format="float").data
    assert (
        [len(one.embedding) for one in found] == [len(one.embedding) for one in floats] == [len(found[0].embedding)] * 2
    )
    assert max(abs(a - b) for a, b in zip(found[1].embedding, floats[1].embedding, strict=True)) < 1e-6


@check
def an_embedding_has_fewer_dimensions():
    [found] = client.embeddings.create(model=MODEL, input="one", dimensions=8).data
    assert len(found.embedding) == 8
    assert abs(sum(one * one for one in found.embedding) - 1) < 1e-4


@check
def models_are_listed():
    assert [one.id for one in client.models.list()] == [MODEL, EYE, THINKER]


@check
def a_model_is_shown():
    assert client.models.retrieve(THINKER).id == THINKER


@refused("`DELETE /v1/models/{id}`", "Use GET")
def a_model_is_deleted():
    client.models.delete(MODEL)


@refused("`/v1/moderations`", "Unknown request URL")
def a_text_is_moderated():
    client.moderations.create(input=ASK)
