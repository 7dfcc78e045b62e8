"""Benchmarks a server with OpenAI's completions API: sends requests at a rate or all at once and measures them."""

import asyncio
from dataclasses import dataclass

from antiphon.benchmark.figures import Figures, spread
from antiphon.benchmark.load import arrivals, prompts, run_open
from antiphon.client import Client, server_url

VOCAB_SIZE = 1000
"""Prompts consist of token ids below this number, which every model has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingLoad:
    """The load. Lengths in tokens; `request_rate`: requests per second, infinite: all at once."""

    base_url: str
    model: str = ""
    token: str | None = None
    num_prompts: int = 100
    input_len: int = 256
    output_len: int = 64
    request_rate: float = float("inf")
    max_concurrency: int | None = None
    seed: int = 0


def measure(load: ServingLoad) -> Figures:
    """Sends the load. Raises SettingsError if the server cannot be reached, ValueError if requests failed."""
    url = server_url(load.base_url, "--base-url", ["http"])
    host, port = url.hostname or "", url.port or 80
    model = load.model or Client(load.base_url, load.token, flag="--base-url").first_model()
    fields = {"model": model, "max_tokens": load.output_len, "temperature": 0, "ignore_eos": True}
    bodies = [{**fields, "prompt": ids} for ids in prompts(load.num_prompts, load.input_len, VOCAB_SIZE, load.seed)]
    timestamps = arrivals(load.num_prompts, load.request_rate, load.seed)
    result = asyncio.run(run_open(host, port, bodies, timestamps, concurrency=load.max_concurrency, token=load.token))
    if result.errors:
        raise ValueError(f"{len(result.errors)} of {load.num_prompts} requests failed. The first: {result.errors[0]}")
    return {
        "model": model,
        "requests": load.num_prompts,
        "duration_s": result.wall_s,
        "requests_per_s": load.num_prompts / result.wall_s,
        "output_tokens_per_s": result.tokens_per_s,
        "total_tokens_per_s": (result.prompt_tokens + result.output_tokens) / result.wall_s,
        **spread("ttft", result.first_token_s),
        **spread("tpot", result.token_s),
        **spread("itl", result.chunk_gaps_s),
    }
