"""Hugging Face's smolagents with a server like OpenAI's."""

from typing import ClassVar

from smolagents import OpenAIServerModel, Tool

from tests.clients.checks import ANSWER, ASK, KEY, MODEL, URL, Answer, check

model = OpenAIServerModel(MODEL, api_base=URL, api_key=KEY, temperature=0, max_tokens=240)
SAID = [{"role": "user", "content": [{"type": "text", "text": ASK}]}]


class GetWeather(Tool):
    name = "get_weather"
    description = "Returns the weather of a city."
    inputs: ClassVar = {"city": {"type": "string", "description": "its name"}}
    output_type = "string"

    def forward(self, city: str) -> str:
        return f"sunny in {city}"


@check
def a_chat_is_answered_and_streamed():
    assert model.generate(SAID).content == ANSWER
    assert "".join(one.content or "" for one in model.generate_stream(SAID)) == ANSWER


@check
def a_tool_is_called():
    said = [{"role": "user", "content": [{"type": "text", "text": "What is the weather in Paris?"}]}]
    [call] = model.generate(said, tools_to_call_from=[GetWeather()]).tool_calls
    assert call.function.name == "get_weather"


@check
def an_answer_follows_a_schema():
    schema = {"name": "answer", "schema": Answer.model_json_schema()}
    found = model.generate(SAID, response_format={"type": "json_schema", "json_schema": schema})
    Answer.model_validate_json(found.content)
