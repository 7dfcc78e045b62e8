"""Pydantic AI with a server like OpenAI's.

Its model for Anthropic's API does not work with the version of Anthropic's client that is installed here: it fails
before it sends a request.
"""

from pydantic_ai import Agent, ModelSettings, NativeOutput, Tool, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

from tests.clients.checks import ANSWER, ASK, KEY, MODEL, URL, Answer, check

provider = OpenAIProvider(base_url=URL, api_key=KEY)
chat, responses = OpenAIChatModel(MODEL, provider=provider), OpenAIResponsesModel(MODEL, provider=provider)
SETTINGS = ModelSettings(temperature=0, max_tokens=240)
WEATHER = "What is the weather in Paris?"


def get_weather(city: str) -> str:
    """Returns the weather of a city."""
    return f"sunny in {city}"


@check
async def a_chat_is_answered():
    assert (await Agent(chat, model_settings=SETTINGS).run(ASK)).output == ANSWER


@check
async def a_chat_is_streamed():
    async with Agent(chat, model_settings=SETTINGS).run_stream(ASK) as stream:
        assert await stream.get_output() == ANSWER


@check
async def an_agent_runs_a_tool():
    found = await Agent(chat, tools=[Tool(get_weather)], model_settings=SETTINGS).run(WEATHER)
    assert "sunny" in found.output


@check
async def a_tool_fills_a_form():
    found = await Agent(chat, output_type=ToolOutput(Answer), model_settings=SETTINGS).run(ASK)
    assert isinstance(found.output, Answer)


@check
async def a_schema_fills_a_form():
    found = await Agent(chat, output_type=NativeOutput(Answer), model_settings=SETTINGS).run(ASK)
    assert isinstance(found.output, Answer)


@check
async def responses_are_made():
    found = await Agent(responses, tools=[Tool(get_weather)], model_settings=SETTINGS).run(WEATHER)
    assert "sunny" in found.output
