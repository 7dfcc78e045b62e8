"""Greedy streams of a system under test, and the tokens that they must have by transformers."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai

from tests.models import greedy_reference
from tests.system.served import Served, fetch


def expected(model: Path, prompt: str, count: int) -> list[int]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    return greedy_reference(model, tokenizer.encode(prompt).ids, count)


def read(served: Served, prompts: list[str], count: int, killed: str = "") -> list[list[int]]:
    """The token ids of greedy streams. `killed`: an engine that is killed when all of them have been asked for."""
    body = {"ignore_eos": True, "return_token_ids": True}

    def ids(stream: openai.Stream[openai.types.Completion]) -> list[int]:
        return [token for chunk in stream for token in chunk.choices[0].model_extra["token_ids"]]  # type: ignore[index]

    with openai.OpenAI(base_url=served.url, api_key="EMPTY", max_retries=0, timeout=90) as client:
        streams = [
            client.completions.create(
                model="tiny", prompt=prompt, max_tokens=count, temperature=0, stream=True, extra_body=body
            )
            for prompt in prompts
        ]
        if killed:
            os.kill(served.pids()[killed], signal.SIGKILL)
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(ids, streams))


def counted(served: Served, name: str, engine: str) -> float:
    """A counter at /metrics, summed over the engines whose names begin with `engine`."""
    lines = fetch(served, "GET", "/metrics").body.decode().splitlines()
    found = (line for line in lines if line.startswith(f"{name}_total{{"))
    return sum(float(line.rpartition(" ")[2]) for line in found if f'engine="{engine}' in line)
