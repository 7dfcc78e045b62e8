"""Ollama's client for Python."""

from ollama import AsyncClient, Client, ResponseError

from tests.clients.checks import (
    ANSWER,
    ASK,
    EYE,
    HOST,
    IMAGE,
    KEY,
    MODEL,
    QUESTION,
    STORY,
    THINKER,
    TOOL,
    WEATHER,
    Answer,
    check,
    raised,
    refused,
)

HEADERS = {"Authorization": f"Bearer {KEY}"}
client = Client(HOST, headers=HEADERS)
OPTIONS = {"temperature": 0}
SCHEMA = Answer.model_json_schema()
CHOSEN = "Models are chosen when the server starts"


def get_weather(city: str) -> str:
    """Returns the weather of a city."""
    return f"sunny in {city}"


@check
def a_chat_is_answered():
    found = client.chat(MODEL, QUESTION, options={**OPTIONS, "num_ctx": 1_000_000}, keep_alive="5m")
    assert (found.message.content, found.done_reason) == (ANSWER, "stop")
    assert found.eval_count > 5


@check
def a_chat_is_streamed():
    parts = list(client.chat(MODEL, QUESTION, options=OPTIONS, stream=True))
    assert "".join(one.message.content for one in parts) == ANSWER
    assert [one.done for one in parts] == [False] * (len(parts) - 1) + [True]


@check
def a_chat_has_log_probabilities():
    found = client.chat(MODEL, QUESTION, options=OPTIONS, logprobs=True, top_logprobs=2).logprobs
    assert "".join(one.token for one in found).startswith(ANSWER)
    assert {len(one.top_logprobs) for one in found} == {2}


@check
def an_answer_follows_a_schema():
    Answer.model_validate_json(client.chat(MODEL, QUESTION, options=OPTIONS, format=SCHEMA).message.content)


@check
def an_answer_is_a_json_object():
    found = client.chat(MODEL, QUESTION, options={**OPTIONS, "num_predict": 60}, format="json")
    assert found.message.content.startswith("{")


@check
def a_function_is_called_and_its_result_read():
    called = client.chat(MODEL, WEATHER, options=OPTIONS, tools=[get_weather]).message
    [call] = called.tool_calls
    result = {"role": "tool", "tool_name": call.function.name, "content": get_weather(**call.function.arguments)}
    found = client.chat(MODEL, [*WEATHER, called, result], options=OPTIONS, tools=[TOOL])
    assert "sunny" in found.message.content


@check
def a_call_is_streamed():
    parts = client.chat(MODEL, WEATHER, options=OPTIONS, tools=[TOOL], stream=True)
    assert [call.function.name for one in parts for call in one.message.tool_calls or ()] == ["get_weather"]


@check
def thinking_is_separated():
    found = client.chat(THINKER, STORY, options={**OPTIONS, "num_predict": 20}, think=True)
    assert found.message.thinking


@check
def a_image_is_read():
    message = {"role": "user", "content": ASK, "images": [IMAGE]}
    assert client.chat(EYE, [message], options={**OPTIONS, "num_predict": 3}).eval_count == 3


@check
def a_prompt_is_answered():
    found = client.generate(MODEL, ASK, system="", options=OPTIONS)
    assert (found.response, found.done) == (ANSWER, True)


@check
def a_prompt_is_streamed():
    assert "".join(one.response for one in client.generate(MODEL, ASK, options=OPTIONS, stream=True)) == ANSWER


@check
def a_raw_prompt_is_continued():
    assert client.generate(MODEL, ASK, raw=True, options={**OPTIONS, "num_predict": 3}).eval_count == 3


@check
def texts_are_embedded():
    found = client.embed(MODEL, ["one", "two"]).embeddings
    assert len(found) == 2
    assert abs(sum(one * one for one in found[0]) - 1) < 1e-4
    assert len(client.embed(MODEL, "one", dimensions=8).embeddings[0]) == 8


@check
def a_text_is_embedded_by_the_older_call():
    assert len(client.embeddings(MODEL, "one").embedding) == len(client.embed(MODEL, "one").embeddings[0])


@check
def models_are_listed():
    listed, loaded = client.list().models, client.ps().models
    assert [one.model for one in listed] == [one.model for one in loaded] == [MODEL, EYE, THINKER]
    assert listed[0].size == loaded[0].size > 10_000_000
    assert (listed[0].digest, listed[0].details.format) == (loaded[0].digest, "safetensors")


@check
def a_model_is_shown():
    shown = client.show(MODEL)
    assert shown.details.parameter_size == "5.8M"
    assert shown.modelinfo[f"{shown.details.family}.context_length"] == client.ps().models[0].context_length
    assert "completion" in shown.capabilities
    assert "vision" in client.show(EYE).capabilities
    assert "thinking" in client.show(THINKER).capabilities


@check
def a_served_model_is_pulled():
    assert client.pull(MODEL).status == "success"
    assert [one.status for one in client.pull(MODEL, stream=True)][-1] == "success"


@check
def a_model_is_loaded_by_an_empty_request():
    assert client.generate(MODEL).done
    assert client.chat(MODEL).done_reason == "load"


@refused("`/api/pull` succeeds for a model that is served", CHOSEN.lower())
def another_model_is_pulled():
    client.pull("llama3.2")


@refused("`/api/create`, `/api/copy`, `/api/push`", "cannot be pushed")
def a_model_is_pushed():
    client.push("other")


@refused("`/api/create`, `/api/copy`, `/api/push`", "--served-model-alias")
def a_model_is_copied():
    client.copy(MODEL, "other")


@refused("`DELETE /api/delete` are errors that say what to do", "antiphon models set")
def a_model_is_deleted():
    client.delete(MODEL)


@refused("`/api/create`, `/api/copy`, `/api/push`", "antiphon models set")
def a_model_is_created():
    client.create("other", from_=MODEL, system="Be brief.")


@refused("`/api/blobs`", "Unknown request URL")
def a_file_of_a_model_is_sent():
    client.create_blob(__file__)


@refused("`/v1/systemone`", "Unknown request URL")
def questions_are_scored():
    client.systemone(MODEL, "state", {"a": {"type": "noul", "instructions": "Is it?"}})


@refused("refused | `template`, `context`", "context")
def an_older_context_is_continued():
    client.generate(MODEL, ASK, context=[1, 2])


@check
def an_unknown_model_is_not_found():
    error = raised(ResponseError, lambda: client.chat("other", QUESTION))
    assert (error.status_code, MODEL in error.error) == (404, True)


@check
async def the_asynchronous_client_streams():
    other = AsyncClient(HOST, headers=HEADERS)
    parts = [one async for one in await other.chat(MODEL, QUESTION, options=OPTIONS, stream=True)]
    assert "".join(one.message.content for one in parts) == ANSWER
