"""Anthropic's client. Prints what it got as one JSON object. Run by `test_clients`."""

import json
import sys

from anthropic import Anthropic
from asked import QUESTION

TOOL = {
    "name": "get_weather",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


def main(url: str, model: str) -> None:
    """Makes one call of each kind."""
    client = Anthropic(base_url=url.removesuffix("/v1"), api_key="none", max_retries=0)
    common = {"model": model, "messages": QUESTION, "max_tokens": 240, "extra_body": {"temperature": 0}}
    whole = client.messages.create(**common)
    with client.messages.stream(**common) as stream:
        streamed = "".join(stream.text_stream)
    called = client.messages.create(
        tools=[TOOL], tool_choice={"type": "any", "disable_parallel_tool_use": True}, **common
    )
    call = next(block for block in called.content if block.type == "tool_use")
    found = {
        "whole": whole.content[0].text,
        "usage": whole.usage.output_tokens,
        "streamed": streamed,
        "call": call.name,
        "arguments": sorted(call.input),
        "stop_reason": called.stop_reason,
        "counted": client.messages.count_tokens(model=model, messages=QUESTION).input_tokens
        == whole.usage.input_tokens,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
