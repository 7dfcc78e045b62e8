"""OpenAI's client of an older major version. Prints what it got as one JSON object. Run by `test_clients`."""

import json
import sys

from asked import QUESTION, TOOL, Answer
from openai import OpenAI


def main(url: str, model: str) -> None:
    """Makes one call of each kind."""
    client = OpenAI(base_url=url, api_key="none", max_retries=0)
    chat = client.chat.completions
    whole = chat.create(model=model, messages=QUESTION, temperature=0)
    chunks = list(chat.create(model=model, messages=QUESTION, temperature=0, stream=True))
    parsed = chat.parse(model=model, messages=QUESTION, response_format=Answer, max_tokens=240, temperature=0)
    called = chat.create(
        model=model,
        messages=QUESTION,
        tools=[TOOL],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=240,
        temperature=0,
    )
    with chat.stream(
        model=model,
        messages=QUESTION,
        tools=[TOOL],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=240,
        temperature=0,
    ) as stream:
        kinds = sorted({event.type for event in stream})
        streamed_call = stream.get_final_completion().choices[0].message.tool_calls[0]
    response = client.responses.create(model=model, input="What is 12 + 7?", temperature=0)
    events = list(client.responses.create(model=model, input="What is 12 + 7?", temperature=0, stream=True))
    structured = client.responses.parse(
        model=model, input="A number?", temperature=0, text_format=Answer, max_output_tokens=240
    )
    found = {
        "whole": whole.choices[0].message.content,
        "usage": whole.usage.completion_tokens,
        "streamed": "".join(one.choices[0].delta.content or "" for one in chunks if one.choices),
        "parsed": isinstance(parsed.choices[0].message.parsed, Answer),
        "call": called.choices[0].message.tool_calls[0].function.name,
        "arguments": sorted(json.loads(called.choices[0].message.tool_calls[0].function.arguments)),
        "streamed_call": streamed_call.function.name,
        "call_events": [kind for kind in kinds if kind.startswith("tool_calls")],
        "response": response.output_text,
        "response_streamed": "".join(one.delta for one in events if one.type == "response.output_text.delta"),
        "last_event": events[-1].type,
        "response_parsed": isinstance(structured.output_parsed, Answer),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
