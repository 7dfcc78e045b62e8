"""LangChain's chat models and embeddings for OpenAI's, Anthropic's and Ollama's servers."""

from typing import Annotated, Any

from langchain_anthropic import ChatAnthropic
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_ollama import ChatOllama, OllamaEmbeddings
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import Field

from tests.clients.checks import ANSWER, ASK, HOST, KEY, MODEL, URL, Answer, check

OPENAI: Any = {"base_url": URL, "api_key": KEY, "model": MODEL, "temperature": 0, "max_retries": 0}
HEADERS = {"headers": {"Authorization": f"Bearer {KEY}"}}
openai_chat = ChatOpenAI(**OPENAI, max_tokens=240)
responses = ChatOpenAI(**OPENAI, max_tokens=240, use_responses_api=True)
anthropic = ChatAnthropic(base_url=HOST, api_key=KEY, model=MODEL, temperature=0, max_tokens=240, max_retries=0)
ollama = ChatOllama(base_url=HOST, model=MODEL, temperature=0, num_predict=240, client_kwargs=HEADERS)
WEATHER = "What is the weather in Paris?"


@tool
def get_weather(city: Annotated[str, Field(max_length=12)]) -> str:
    """Returns the weather of a city."""
    return f"sunny in {city}"


def answers(chat: BaseChatModel) -> None:
    whole = chat.invoke(ASK)
    assert (whole.text, "".join(one.text for one in chat.stream(ASK))) == (ANSWER, ANSWER)
    assert whole.usage_metadata["output_tokens"] > 5
    assert [one.text for one in chat.batch([ASK, ASK])] == [ANSWER, ANSWER]


def runs_tools(chat: BaseChatModel) -> None:
    asked = [HumanMessage(WEATHER)]
    called = chat.bind_tools([get_weather]).invoke(asked)
    [call] = called.tool_calls
    result = ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"])
    assert "sunny" in chat.bind_tools([get_weather]).invoke([*asked, called, result]).text


def streams_a_call(chat: BaseChatModel) -> None:
    first, *rest = chat.bind_tools([get_weather]).stream(WEATHER)
    [call] = sum(rest, first).tool_calls
    assert (call["name"], [*call["args"]]) == ("get_weather", ["city"])


def parses(chat: BaseChatModel, method: str) -> None:
    assert isinstance(chat.with_structured_output(Answer, method=method).invoke(ASK), Answer)


@check
def openais_chat_answers():
    answers(openai_chat)


@check
def openais_chat_runs_tools():
    runs_tools(openai_chat)


@check
def openais_chat_parses():
    parses(openai_chat, "json_schema")
    parses(openai_chat, "function_calling")


@check
def openais_responses_answer():
    answers(responses)


@check
def openais_responses_run_tools():
    runs_tools(responses)


@check
def openais_responses_parse():
    parses(responses, "json_schema")


@check
def openais_completions_answer():
    found = OpenAI(base_url=URL, api_key=KEY, model=MODEL, max_tokens=3, temperature=0).invoke(ASK)
    assert found


@check
def openais_embeddings_are_made():
    made = OpenAIEmbeddings(base_url=URL, api_key=KEY, model=MODEL, check_embedding_ctx_length=False)
    assert len(made.embed_documents(["one", "two"])) == 2


@check
def anthropics_chat_answers():
    answers(anthropic)


@check
def anthropics_chat_runs_tools():
    runs_tools(anthropic)


@check
def anthropics_chat_parses():
    parses(anthropic, "json_schema")
    parses(anthropic, "function_calling")


@check
def ollamas_chat_answers():
    answers(ollama)


@check
def ollamas_chat_runs_tools():
    runs_tools(ollama)


@check
def ollamas_chat_parses():
    parses(ollama, "json_schema")


@check
def ollamas_embeddings_are_made():
    made = OllamaEmbeddings(base_url=HOST, model=MODEL, client_kwargs=HEADERS)
    assert len(made.embed_documents(["one", "two"])) == 2


@check
def a_call_is_streamed():
    for chat in (openai_chat, responses, anthropic, ollama):
        streams_a_call(chat)


@check
async def the_asynchronous_chats_answer():
    for chat in (openai_chat, anthropic, ollama):
        assert (await chat.ainvoke(ASK)).text == ANSWER
