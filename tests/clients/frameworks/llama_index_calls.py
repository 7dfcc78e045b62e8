"""LlamaIndex with a server like OpenAI's."""

from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike

from tests.clients.checks import ANSWER, ASK, KEY, MODEL, URL, Answer, check

SETTINGS = {"api_base": URL, "api_key": KEY, "temperature": 0, "max_tokens": 240, "context_window": 2048}
llm = OpenAILike(
    model=MODEL, is_chat_model=True, is_function_calling_model=True, should_use_structured_outputs=True, **SETTINGS
)
SAID = [ChatMessage(role="user", content=ASK)]


def get_weather(city: str) -> str:
    """Returns the weather of a city."""
    return f"sunny in {city}"


@check
def a_chat_is_answered_and_streamed():
    assert llm.chat(SAID).message.content == ANSWER
    assert [*llm.stream_chat(SAID)][-1].message.content == ANSWER


@check
def a_text_is_completed():
    texts = OpenAILike(model=MODEL, is_chat_model=False, **{**SETTINGS, "max_tokens": 3})
    assert texts.complete(ASK).text


@check
def a_function_is_called():
    tool = FunctionTool.from_defaults(get_weather)
    found = llm.predict_and_call([tool], "What is the weather in Paris?")
    assert "sunny" in found.response


@check
def an_answer_is_parsed():
    assert isinstance(llm.as_structured_llm(Answer).chat(SAID).raw, Answer)


@check
def texts_are_embedded():
    made = OpenAILikeEmbedding(model_name=MODEL, api_base=URL, api_key=KEY)
    assert len(made.get_text_embedding_batch(["one", "two"])) == 2


@check
async def the_asynchronous_chat_answers():
    assert (await llm.achat(SAID)).message.content == ANSWER
