"""Haystack's generators and embedders with a server like OpenAI's."""

from haystack import Document
from haystack.components.embedders import OpenAIDocumentEmbedder, OpenAITextEmbedder
from haystack.components.generators.chat import OpenAIChatGenerator, OpenAIResponsesChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import Tool
from haystack.utils import Secret

from tests.clients.checks import ANSWER, ASK, KEY, MODEL, PARAMETERS, URL, Answer, check

SERVER = {"api_key": Secret.from_token(KEY), "api_base_url": URL}
PLAIN = {"temperature": 0}
SAID = [ChatMessage.from_user(ASK)]
WEATHER = [ChatMessage.from_user("What is the weather in Paris?")]
tool = Tool("get_weather", "Returns the weather of a city.", PARAMETERS, function=lambda city: f"sunny in {city}")


@check
def a_chat_is_answered_and_streamed():
    chat = OpenAIChatGenerator(model=MODEL, generation_kwargs=PLAIN, **SERVER)
    parts = []
    assert chat.run(SAID)["replies"][0].text == ANSWER
    assert chat.run(SAID, streaming_callback=parts.append)["replies"][0].text == ANSWER
    assert len(parts) > 1


@check
def a_tool_is_called_and_its_result_read():
    chat = OpenAIChatGenerator(model=MODEL, generation_kwargs=PLAIN, tools=[tool], **SERVER)
    [called] = chat.run(WEATHER)["replies"]
    result = ChatMessage.from_tool(tool.invoke(**called.tool_calls[0].arguments), origin=called.tool_calls[0])
    assert "sunny" in chat.run([*WEATHER, called, result])["replies"][0].text


@check
def an_answer_follows_a_schema():
    chat = OpenAIChatGenerator(model=MODEL, generation_kwargs={**PLAIN, "response_format": Answer}, **SERVER)
    Answer.model_validate_json(chat.run(SAID)["replies"][0].text)


@check
def responses_are_made():
    chat = OpenAIResponsesChatGenerator(model=MODEL, generation_kwargs=PLAIN, **SERVER)
    assert chat.run(SAID)["replies"][0].text == ANSWER


@check
def texts_are_embedded():
    assert OpenAITextEmbedder(model=MODEL, **SERVER).run(ASK)["embedding"]
    documents = [Document(content="one"), Document(content="two")]
    found = OpenAIDocumentEmbedder(model=MODEL, progress_bar=False, **SERVER).run(documents)["documents"]
    assert all(one.embedding for one in found)
