"""Anthropic's client for Python."""

from anthropic import (
    Anthropic,
    AsyncAnthropic,
    AuthenticationError,
    BadRequestError,
    NotFoundError,
    RateLimitError,
    beta_tool,
)

from tests.clients.checks import (
    ANSWER,
    ASK,
    EYE,
    HOST,
    IMAGE,
    KEY,
    MODEL,
    PARAMETERS,
    QUESTION,
    SLOW_KEY,
    STORY,
    THINKER,
    WEATHER,
    Answer,
    check,
    raised,
    refused,
)

client = Anthropic(base_url=HOST, api_key=KEY, max_retries=0)
messages, beta = client.messages, client.beta.messages
PLAIN = {"model": MODEL, "messages": QUESTION, "max_tokens": 240, "extra_body": {"temperature": 0}}
TOOL = {"name": "get_weather", "input_schema": PARAMETERS}
CALLS = {**PLAIN, "messages": WEATHER, "tools": [TOOL]}
FORCED = {**CALLS, "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}
THINKS = {**PLAIN, "model": THINKER, "messages": STORY, "max_tokens": 1100}


@beta_tool
def get_weather(city: str) -> str:
    """Returns the weather of a city.

    Args:
        city: its name
    """
    return f"sunny in {city}"


@check
def a_message_is_answered():
    found = messages.create(**PLAIN)
    assert (found.content[0].text, found.stop_reason) == (ANSWER, "end_turn")
    assert found.usage.output_tokens > 5


@check
def a_message_is_streamed_as_events():
    kinds = [event.type for event in messages.create(**PLAIN, stream=True)]
    assert (kinds[:2], kinds[-2:]) == (["message_start", "content_block_start"], ["message_delta", "message_stop"])


@check
def the_stream_helper_gives_text_and_message():
    with messages.stream(**PLAIN) as stream:
        assert "".join(stream.text_stream) == ANSWER
        assert stream.get_final_message().usage.output_tokens > 5


@check
def a_system_prompt_is_read():
    parts = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    raw = messages.with_raw_response.create(**PLAIN, system=parts)
    assert raw.headers["x-antiphon-ignored"] == "system[].cache_control"
    used = raw.parse().usage
    assert (
        used.input_tokens + used.cache_read_input_tokens
        > messages.count_tokens(model=MODEL, messages=QUESTION).input_tokens
    )


@check
def a_message_ends_at_a_stop_sequence():
    found = messages.create(**PLAIN, stop_sequences=["="])
    assert (found.stop_reason, found.stop_sequence) == ("stop_sequence", "=")


@check
def a_tool_is_called():
    [call] = [one for one in messages.create(**FORCED).content if one.type == "tool_use"]
    assert (call.name, [*call.input]) == ("get_weather", ["city"])


@check
def a_call_is_streamed():
    with messages.stream(**FORCED) as stream:
        kinds = {event.type for event in stream}
        found = stream.get_final_message()
    assert (found.stop_reason, found.content[-1].type) == ("tool_use", "tool_use")
    assert "input_json" in kinds


@check
def the_result_of_a_tool_is_read():
    called = messages.create(**FORCED)
    result = {"type": "tool_result", "tool_use_id": called.content[-1].id, "content": "sunny"}
    turns = [*WEATHER, {"role": "assistant", "content": called.content}, {"role": "user", "content": [result]}]
    assert "sunny" in messages.create(**{**CALLS, "messages": turns}).content[0].text


@check
def the_tool_runner_runs_a_conversation():
    first, last = beta.tool_runner(**{**CALLS, "tools": [get_weather]})
    assert (first.stop_reason, last.stop_reason) == ("tool_use", "end_turn")
    assert last.usage.input_tokens + last.usage.cache_read_input_tokens > first.usage.input_tokens
    assert "sunny" in last.content[0].text


@check
def the_tool_runner_streams():
    *_, last = [
        stream.get_final_message() for stream in beta.tool_runner(**{**CALLS, "tools": [get_weather]}, stream=True)
    ]
    assert "sunny" in last.content[0].text


@refused("`thread`, a conversation that a server keeps", "Send the whole conversation")
def a_thread_is_continued():
    beta.thread(model=MODEL, max_tokens=20).send({"role": "user", "content": ASK})


@check
def tokens_are_counted():
    counted = messages.count_tokens(model=MODEL, messages=WEATHER, tools=[TOOL])
    used = messages.create(**CALLS).usage
    assert counted.input_tokens == used.input_tokens + used.cache_read_input_tokens


@check
def models_are_listed_and_shown():
    assert [one.id for one in client.models.list()] == [MODEL, EYE, THINKER]
    assert client.models.retrieve(MODEL).id == MODEL


@check
def beta_headers_are_accepted():
    found = beta.create(**PLAIN, betas=["context-1m-2025-08-07", "interleaved-thinking-2025-05-14"])
    assert found.content[0].text == ANSWER


@check
def thinking_is_signed_and_sent_back():
    found = messages.create(**THINKS, thinking={"type": "enabled", "budget_tokens": 1024})
    thought = found.content[0]
    assert (thought.type, bool(thought.thinking), bool(thought.signature)) == ("thinking", True, True)
    turns = [*STORY, {"role": "assistant", "content": [thought, {"type": "text", "text": "Yes."}]}, *QUESTION]
    assert messages.create(**{**PLAIN, "messages": turns}).content


@check
def thinking_is_streamed():
    with messages.stream(**{**THINKS, "max_tokens": 30}, thinking={"type": "adaptive"}) as stream:
        kinds = {event.type for event in stream}
    assert {"thinking", "signature"} <= kinds


@check
def an_answer_is_parsed():
    assert isinstance(messages.parse(**PLAIN, output_format=Answer).parsed_output, Answer)


@check
def an_answer_is_parsed_while_it_streams():
    with messages.stream(**PLAIN, output_format=Answer) as stream:
        assert isinstance(stream.get_final_message().parsed_output, Answer)


@check
def an_answer_follows_a_schema_with_effort():
    schema = Answer.model_json_schema()
    form = {"effort": "low", "format": {"type": "json_schema", "schema": schema}}
    Answer.model_validate_json(messages.create(**PLAIN, output_config=form).content[0].text)


@check
def management_of_the_context_is_told():
    edits = {"edits": [{"type": "clear_tool_uses_20250919"}]}
    raw = beta.with_raw_response.create(**PLAIN, context_management=edits, betas=["context-management-2025-06-27"])
    assert raw.headers["x-antiphon-ignored"] == "context_management"


@check
def a_document_of_text_is_read():
    source = {"type": "text", "media_type": "text/plain", "data": "The kettle is blue."}
    parts = [{"type": "document", "source": source, "title": "Kettles"}, {"type": "text", "text": ASK}]
    found = messages.create(**{**PLAIN, "messages": [{"role": "user", "content": parts}]})
    alone = messages.count_tokens(model=MODEL, messages=QUESTION).input_tokens
    assert found.usage.input_tokens + found.usage.cache_read_input_tokens > alone + 5


@refused("documents and images that are files", "A document that is a file")
def a_document_that_is_a_file_is_read():
    source = {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="}
    messages.create(**{**PLAIN, "messages": [{"role": "user", "content": [{"type": "document", "source": source}]}]})


@refused("documents and images that are files", "'purpose'")
def a_file_is_uploaded():
    client.beta.files.upload(file=("a.txt", b"The kettle is blue.", "text/plain"))


@check
def a_image_is_read():
    source = {"type": "base64", "media_type": "image/png", "data": IMAGE}
    parts = [{"type": "text", "text": ASK}, {"type": "image", "source": source}]
    asked = {**PLAIN, "model": EYE, "messages": [{"role": "user", "content": parts}], "max_tokens": 3}
    assert messages.create(**asked).stop_reason == "max_tokens"


@check
def a_started_answer_is_continued():
    begun = [*QUESTION, {"role": "assistant", "content": ANSWER[:8]}]
    assert ANSWER[:8] + messages.create(**{**PLAIN, "messages": begun}).content[0].text == ANSWER


@refused("`/v1/messages/batches`", "Unknown request URL")
def a_batch_is_made():
    messages.batches.create(requests=[{"custom_id": "a", "params": PLAIN}])


@refused("`/v1/messages/batches`", "Unknown request URL")
def batches_are_listed():
    messages.batches.list()


@check
def errors_have_types_and_ids_of_requests():
    other = Anthropic(base_url=HOST, api_key="wrong", max_retries=0)
    wrong = raised(BadRequestError, lambda: messages.create(**{**PLAIN, "max_tokens": 0}))
    assert wrong.body["error"]["type"] == "invalid_request_error"
    unknown = raised(NotFoundError, lambda: messages.create(**{**PLAIN, "model": "other"}))
    stranger = raised(AuthenticationError, lambda: other.messages.create(**PLAIN))
    for error in (wrong, unknown, stranger):
        assert error.request_id == error.response.headers["request-id"]


@check
def too_many_requests_are_a_rate_limit_error():
    slow = Anthropic(base_url=HOST, api_key=SLOW_KEY, max_retries=0)

    def ask_twice():
        for _ in range(2):
            slow.messages.create(**PLAIN)

    assert raised(RateLimitError, ask_twice).body["error"]["type"] == "rate_limit_error"


@check
def a_message_has_the_id_of_its_request():
    assert messages.create(**PLAIN)._request_id


@check
async def the_asynchronous_client_streams():
    other = AsyncAnthropic(base_url=HOST, api_key=KEY, max_retries=0)
    async with other.messages.stream(**PLAIN) as stream:
        assert (await stream.get_final_message()).content[0].text == ANSWER
