"""LangChain's ChatOpenAI. Prints what it got as one JSON object. Run by `test_clients`."""

import json
import sys
from typing import Annotated

from asked import Answer
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import Field


@tool
def get_weather(city: Annotated[str, Field(max_length=12)]) -> str:
    """Returns the weather of a city."""
    return f"sunny in {city}"


def main(url: str, model: str) -> None:
    """Makes one call of each kind."""
    chat = ChatOpenAI(base_url=url, api_key="none", model=model, temperature=0, max_tokens=240, max_retries=0)
    question = "What is 12 + 7?"
    whole = chat.invoke(question)
    called = chat.bind_tools([get_weather], tool_choice="required", strict=True).invoke("The weather in Paris?")
    responses = ChatOpenAI(
        base_url=url, api_key="none", model=model, temperature=0, max_tokens=240, use_responses_api=True, max_retries=0
    )
    embeddings = OpenAIEmbeddings(
        base_url=url, api_key="none", model=model, check_embedding_ctx_length=False, max_retries=0
    )
    found = {
        "whole": whole.content,
        "usage": whole.usage_metadata["output_tokens"],
        "streamed": "".join(one.content for one in chat.stream(question)),
        "parsed": isinstance(chat.with_structured_output(Answer, method="json_schema").invoke(question), Answer),
        "parsed_by_call": isinstance(
            chat.with_structured_output(Answer, method="function_calling").invoke(question), Answer
        ),
        "call": called.tool_calls[0]["name"],
        "arguments": sorted(called.tool_calls[0]["args"]),
        "response": responses.invoke(question).text,
        "batch": [one.content for one in chat.batch([question, question])],
        "embedding": len(embeddings.embed_query("hello")) > 0,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
