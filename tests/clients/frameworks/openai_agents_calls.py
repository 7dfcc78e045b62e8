"""OpenAI's Agents SDK, over chats and over responses."""

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    SQLiteSession,
    function_tool,
    set_tracing_disabled,
)
from agents.models.interface import Model
from openai import AsyncOpenAI

from tests.clients.checks import ANSWER, ASK, KEY, MODEL, URL, Answer, check

set_tracing_disabled(True)
client = AsyncOpenAI(base_url=URL, api_key=KEY, max_retries=0)
CHAT, RESPONSES = OpenAIChatCompletionsModel(MODEL, client), OpenAIResponsesModel(MODEL, client)
SETTINGS = ModelSettings(temperature=0, max_tokens=240)
WEATHER = "What is the weather in Paris?"


@function_tool
def get_weather(city: str) -> str:
    """Returns the weather of a city."""
    return f"sunny in {city}"


def agent(model: Model, **fields: object) -> Agent:
    return Agent("helper", model=model, model_settings=SETTINGS, **fields)


@check
async def an_agent_answers():
    for model in (CHAT, RESPONSES):
        assert (await Runner.run(agent(model), ASK)).final_output == ANSWER


@check
async def an_agent_streams():
    for model in (CHAT, RESPONSES):
        stream = Runner.run_streamed(agent(model), ASK)
        assert [event async for event in stream.stream_events()]
        assert stream.final_output == ANSWER


@check
async def an_agent_runs_a_tool():
    for model in (CHAT, RESPONSES):
        assert "sunny" in (await Runner.run(agent(model, tools=[get_weather]), WEATHER)).final_output


@check
async def an_agent_fills_a_form():
    for model in (CHAT, RESPONSES):
        assert isinstance((await Runner.run(agent(model, output_type=Answer), ASK)).final_output, Answer)


@check
async def a_session_is_continued():
    session = SQLiteSession("one")
    for _ in range(2):
        assert (await Runner.run(agent(RESPONSES), ASK, session=session)).final_output
    assert len(await session.get_items()) == 4


@check
async def a_stored_response_is_continued():
    first = await Runner.run(agent(RESPONSES), ASK)
    second = await Runner.run(agent(RESPONSES), ASK, previous_response_id=first.last_response_id)
    assert second.raw_responses[-1].usage.input_tokens > first.raw_responses[-1].usage.input_tokens
