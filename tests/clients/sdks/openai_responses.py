"""OpenAI's client for Python: responses, whole, streamed, stored, in the background, and on a WebSocket."""

import json

import openai
from openai import OpenAI

from tests.clients.checks import (
    ANSWER,
    ASK,
    EYE,
    IMAGE,
    KEY,
    MODEL,
    PARAMETERS,
    THINKER,
    URL,
    Answer,
    check,
    raised,
    refused,
)

client = OpenAI(base_url=URL, api_key=KEY, max_retries=0)
responses = client.responses
PLAIN = {"model": MODEL, "input": ASK, "temperature": 0, "max_output_tokens": 240}
TOOL = {"type": "function", "name": "get_weather", "strict": True, "parameters": PARAMETERS}
CALLS = {**PLAIN, "input": "What is the weather in Paris?", "tools": [TOOL], "tool_choice": "required"}
REASONS = {**PLAIN, "model": THINKER, "max_output_tokens": 20, "reasoning": {"effort": "low", "summary": "auto"}}
LONG = {**PLAIN, "max_output_tokens": 1500, "background": True, "extra_body": {"ignore_eos": True}}


@check
def a_response_is_answered():
    found = responses.create(**PLAIN)
    assert (found.output_text, found.status) == (ANSWER, "completed")
    assert found.usage.total_tokens == found.usage.input_tokens + found.usage.output_tokens


@check
def a_response_is_streamed():
    events = list(responses.create(**PLAIN, stream=True))
    assert "".join(one.delta for one in events if one.type == "response.output_text.delta") == ANSWER
    assert (events[0].type, events[-1].type) == ("response.created", "response.completed")
    assert [one.sequence_number for one in events] == [*range(len(events))]


@check
def the_stream_helper_gives_the_response():
    with responses.stream(**PLAIN) as stream:
        kinds = {event.type for event in stream}
        assert stream.get_final_response().output_text == ANSWER
    assert "response.output_text.done" in kinds


@check
def a_response_is_parsed():
    assert isinstance(responses.parse(**PLAIN, text_format=Answer).output_parsed, Answer)


@check
def the_stream_helper_parses():
    with responses.stream(**PLAIN, text_format=Answer) as stream:
        assert isinstance(stream.get_final_response().output_parsed, Answer)


@check
def a_function_is_called_and_its_result_read():
    first = responses.create(**CALLS)
    [call] = first.output
    assert (call.name, [*json.loads(call.arguments)]) == ("get_weather", ["city"])
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    found = responses.create(**{**PLAIN, "input": [result]}, tools=[TOOL], previous_response_id=first.id)
    assert "sunny" in found.output_text


@check
def a_call_is_streamed():
    events = list(responses.create(**CALLS, stream=True))
    [done] = [one for one in events if one.type == "response.function_call_arguments.done"]
    assert (
        "".join(one.delta for one in events if one.type == "response.function_call_arguments.delta") == done.arguments
    )


@check
def a_call_may_have_a_format_beside_it():
    with responses.stream(**CALLS, text_format=Answer) as stream:
        assert stream.get_final_response().output[0].type == "function_call"


@check
def one_of_the_allowed_functions_is_called():
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "get_weather"}]}
    [call] = responses.create(**{**CALLS, "tool_choice": allowed}).output
    assert call.name == "get_weather"


@check
def a_custom_tool_is_called():
    tool = {"type": "custom", "name": "shell", "description": "Runs a command."}
    [call] = responses.create(**{**CALLS, "tools": [tool], "max_output_tokens": 60}).output
    assert (call.type, call.name) == ("custom_tool_call", "shell")


@check
def a_response_has_log_probabilities():
    found = responses.create(**PLAIN, include=["message.output_text.logprobs"], top_logprobs=2)
    tokens = found.output[0].content[0].logprobs
    assert "".join(one.token for one in tokens).startswith(ANSWER)
    assert all(len(one.top_logprobs) == 2 for one in tokens)


@check
def a_image_is_read():
    parts = [
        {"type": "input_text", "text": ASK},
        {"type": "input_image", "image_url": f"data:image/png;base64,{IMAGE}"},
    ]
    found = responses.create(model=EYE, input=[{"role": "user", "content": parts}], max_output_tokens=3, temperature=0)
    assert (found.status, found.incomplete_details.reason) == ("incomplete", "max_output_tokens")


@check
def reasoning_is_an_item_that_is_sent_back():
    found = responses.create(**REASONS, include=["reasoning.encrypted_content"], store=False)
    [item] = [one for one in found.output if one.type == "reasoning"]
    assert item.summary[0].text
    assert item.encrypted_content
    again = responses.create(
        **{**PLAIN, "input": [{"role": "user", "content": ASK}, item, {"role": "user", "content": ASK}]}
    )
    assert again.output_text


@check
def reasoning_is_streamed():
    kinds = {event.type for event in responses.create(**REASONS, stream=True)}
    assert {"response.reasoning_summary_text.delta", "response.reasoning_summary_text.done"} <= kinds


@check
def a_response_is_stored():
    made = responses.create(**PLAIN, metadata={"a": "b"})
    found = responses.retrieve(made.id)
    assert (found.output_text, found.metadata) == (ANSWER, {"a": "b"})


@check
def the_input_of_a_response_is_listed():
    made = responses.create(**PLAIN)
    [item] = responses.input_items.list(made.id)
    assert item.content[0].text == ASK


@check
def a_response_is_deleted():
    made = responses.create(**PLAIN)
    responses.delete(made.id)
    raised(openai.NotFoundError, lambda: responses.retrieve(made.id))


@check
def a_response_is_not_stored():
    made = responses.create(**PLAIN, store=False)
    raised(openai.NotFoundError, lambda: responses.retrieve(made.id))


@check
def a_response_continues_another_one():
    first = responses.create(**PLAIN)
    second = responses.create(**PLAIN, previous_response_id=first.id)
    assert second.previous_response_id == first.id
    assert second.usage.input_tokens > 2 * first.usage.input_tokens


@check
def an_unknown_response_cannot_be_continued():
    error = raised(openai.BadRequestError, lambda: responses.create(**PLAIN, previous_response_id="resp_none"))
    assert error.code == "previous_response_not_found"


@check
def a_background_response_is_resumed():
    queued = responses.create(**PLAIN, background=True)
    assert queued.status in ("queued", "in_progress")
    events = list(responses.retrieve(queued.id, stream=True))
    assert events[-1].response.output_text == ANSWER
    assert list(responses.retrieve(queued.id, stream=True, starting_after=3)) == events[4:]


@check
def the_stream_helper_resumes_a_response():
    queued = responses.create(**PLAIN, background=True)
    with responses.stream(response_id=queued.id, starting_after=0) as stream:
        assert stream.get_final_response().output_text == ANSWER


@check
def a_background_response_is_cancelled():
    queued = responses.create(**LONG)
    assert responses.cancel(queued.id).status == "cancelled"
    assert responses.retrieve(queued.id).status == "cancelled"


@check
def a_conversation_is_compacted():
    found = responses.compact(model=MODEL, input=[{"role": "user", "content": ASK}])
    assert [item.type for item in found.output] == ["message", "compaction"]
    again = [*found.output, {"role": "user", "content": ASK}]
    assert responses.create(**{**PLAIN, "input": again}).output_text


@check
def the_tokens_of_an_input_are_counted():
    counted = responses.input_tokens.count(model=MODEL, input=ASK, instructions="Be brief.")
    assert counted.input_tokens == responses.create(**PLAIN, instructions="Be brief.").usage.input_tokens


@check
def a_long_input_is_truncated():
    long = [{"role": "user", "content": "one two three " * 300} for _ in range(6)]
    asked = {**PLAIN, "input": [*long, {"role": "user", "content": ASK}]}
    error = raised(openai.BadRequestError, lambda: responses.create(**asked))
    assert error.code == "context_length_exceeded"
    assert responses.create(**asked, truncation="auto").truncation == "auto"


@check
def hints_are_told():
    raw = responses.with_raw_response.create(**PLAIN, max_tool_calls=1, text={"verbosity": "low"}, prompt_cache_key="a")
    assert raw.parse().output_text == ANSWER
    assert {"max_tool_calls", "text.verbosity"} <= {*raw.headers["x-antiphon-ignored"].split(", ")}


@check
def a_tool_of_the_server_is_told():
    raw = responses.with_raw_response.create(**PLAIN, tools=[{"type": "web_search"}])
    assert raw.parse().output_text == ANSWER
    assert "web_search" in raw.headers["x-antiphon-ignored"]


@refused("told, or 400 where they are forced", "web_search")
def a_tool_of_the_server_is_forced():
    responses.create(**PLAIN, tools=[{"type": "web_search"}], tool_choice={"type": "web_search"})


@refused("`prompt` of a response", "prompt")
def a_stored_prompt_is_used():
    responses.create(model=MODEL, prompt={"id": "pmpt_1"})


@refused("content of other types (`input_file`", "input_file")
def a_document_is_read():
    part = {"type": "input_file", "filename": "a.pdf", "file_data": "data:application/pdf;base64,JVBERi0="}
    responses.create(**{**PLAIN, "input": [{"role": "user", "content": [part]}]})


@check
def responses_are_made_on_a_web_socket():
    with responses.connect() as socket:
        made = ""
        for _ in range(2):
            continued = {"previous_response_id": made} if made else {}
            socket.response.create(**PLAIN, store=False, **continued)
            events = []
            while not events or events[-1].type not in ("response.completed", "error"):
                events.append(socket.recv())
            assert events[-1].type == "response.completed"
            made = events[-1].response.id


@check
async def the_asynchronous_client_makes_a_response():
    other = openai.AsyncOpenAI(base_url=URL, api_key=KEY, max_retries=0)
    async with other.responses.stream(**PLAIN) as stream:
        assert (await stream.get_final_response()).output_text == ANSWER
