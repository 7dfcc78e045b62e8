"""Ollama's client. Prints what it got as one JSON object. Run by `test_clients`."""

import json
import sys

from asked import QUESTION, TOOL, Answer
from ollama import Client, ResponseError


def main(url: str, model: str) -> None:
    """Makes one call of each kind."""
    client, options = Client(url.removesuffix("/v1")), {"temperature": 0, "repeat_last_n": 64, "num_ctx": 1_000_000}
    whole = client.chat(model, QUESTION, options=options, keep_alive="5m", logprobs=True, top_logprobs=2)
    streamed = list(client.chat(model, QUESTION, options=options, stream=True))
    schema = {**Answer.model_json_schema(), "additionalProperties": False}
    parsed = client.chat(model, QUESTION, options={**options, "num_predict": 240}, format=schema)
    told = [{"role": "system", "content": "Call get_weather."}, *QUESTION]
    tools = client.chat(model, told, options=options, tools=[TOOL])
    generated = client.generate(model, QUESTION[0]["content"], options=options)
    embedded = client.embed(model, ["one", "two"])
    former = client.embeddings(model, "one")
    [listed], [loaded] = client.list().models, client.ps().models
    pulled = [one.status for one in client.pull(model, stream=True)]
    try:
        client.pull("llama3.2")
        missing = 200
    except ResponseError as error:
        missing = error.status_code
    shown = client.show(model)
    found = {
        "whole": whole.message.content,
        "logprobs": "".join(one.token for one in whole.logprobs),
        "tops": [len(one.top_logprobs) for one in whole.logprobs],
        "streamed": "".join(one.message.content for one in streamed),
        "usage": streamed[-1].eval_count,
        "parsed": bool(Answer.model_validate_json(parsed.message.content)),
        "with_tools": tools.done_reason,
        "generated": generated.response,
        "embedded": [len(one) for one in embedded.embeddings],
        "embedded_former": len(former.embedding),
        "size": [listed.size, loaded.size],
        "digest": listed.digest == loaded.digest,
        "details": listed.details.model_dump(),
        "context": [loaded.context_length, shown.modelinfo[f"{shown.details.family}.context_length"]],
        "capabilities": shown.capabilities,
        "pulled": pulled[-1],
        "missing": missing,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
