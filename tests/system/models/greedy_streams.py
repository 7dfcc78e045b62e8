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
    """The token ids of greedy streams. `killed`: one of the engines whose names begin so is killed in mid-stream.

    If none had a stream when all had been asked for, they are asked for again.
    """
    body = {"ignore_eos": True, "return_token_ids": True}

    def ids(stream: openai.Stream[openai.types.Completion]) -> list[int]:
        return [token for chunk in stream for token in chunk.choices[0].model_extra["token_ids"]]  # type: ignore[index]

    with openai.OpenAI(base_url=served.url, api_key="EMPTY", max_retries=0, timeout=90) as client:
        while True:
            engines = engines_of(served, killed) if killed else {}
            streams = [
                client.completions.create(
                    model="tiny", prompt=prompt, max_tokens=count, temperature=0, stream=True, extra_body=body
                )
                for prompt in prompts
            ]
            has_died = not killed or kill_one(served, engines)
            with ThreadPoolExecutor(len(prompts)) as pool:
                found = list(pool.map(ids, streams))
            if has_died:
                return found


def engines_of(served: Served, beginning: str) -> dict[str, int]:
    """The process ids of the engines whose names begin so."""
    return {name: pid for name, pid in served.pids().items() if name.startswith(beginning)}


def kill_one(served: Served, engines: dict[str, int]) -> bool:
    """Kills an engine that has a running request, if one has. Meanwhile none can bring a request to its end."""
    for pid in engines.values():
        os.kill(pid, signal.SIGSTOP)
    running = fetch(served, "GET", "/v1/requests?state=running").json["data"]
    found = next((one["engines"][-1] for one in running if one["engines"] and one["engines"][-1] in engines), None)
    for name, pid in engines.items():
        os.kill(pid, signal.SIGKILL if name == found else signal.SIGCONT)
    return found is not None


def counted(served: Served, name: str, engine: str) -> float:
    """A counter at /metrics, summed over the engines whose names begin with `engine`."""
    lines = fetch(served, "GET", "/metrics").body.decode().splitlines()
    found = (line for line in lines if line.startswith(f"{name}_total{{"))
    return sum(float(line.rpartition(" ")[2]) for line in found if f'engine="{engine}' in line)
