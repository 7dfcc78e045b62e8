"""LiteLLM, with the system as an OpenAI-compatible host. Prints one JSON object. Run by `test_clients`."""

import json
import sys

import litellm
from asked import QUESTION, TOOL, Answer


def main(url: str, model: str) -> None:
    """Makes one call of each kind: as OpenAI's host, and as vLLM's, which LiteLLM knows by name."""
    found = {}
    for provider in ("openai", "hosted_vllm"):
        common = {
            "model": f"{provider}/{model}",
            "api_base": url,
            "api_key": "none",
            "temperature": 0,
            "max_tokens": 240,
        }
        whole = litellm.completion(messages=QUESTION, **common)
        chunks = litellm.completion(messages=QUESTION, stream=True, stream_options={"include_usage": True}, **common)
        parsed = litellm.completion(messages=QUESTION, response_format=Answer, **common)
        called = litellm.completion(messages=QUESTION, tools=[TOOL], tool_choice="required", **common)
        call = called.choices[0].message.tool_calls[0].function
        found[provider] = {
            "whole": whole.choices[0].message.content,
            "usage": whole.usage.completion_tokens,
            "streamed": "".join(one.choices[0].delta.content or "" for one in chunks if one.choices),
            "parsed": isinstance(Answer.model_validate_json(parsed.choices[0].message.content), Answer),
            "call": call.name,
            "arguments": sorted(json.loads(call.arguments)),
        }
    response = litellm.responses(
        model=f"openai/{model}", input="What is 12 + 7?", api_base=url, api_key="none", temperature=0
    )
    print(json.dumps({**found, "response": response.output_text}))


if __name__ == "__main__":
    main(*sys.argv[1:])
