"""Benchmarks a server with OpenAI's completions API: sends requests at a rate or all at once and measures them."""

import asyncio
from dataclasses import dataclass

from antiphon.benchmark.figures import Figures, spread
from antiphon.benchmark.load import arrivals, prompts, run_open
from antiphon.client import Client, server_url
from antiphon.terminal.address import Address
from antiphon.terminal.exit_codes import CommandError

VOCAB_SIZE = 1000
"""Prompts consist of token ids below this number, which every model has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingLoad:
    """The load. Lengths in tokens; `request_rate`: requests per second, infinite: all at once."""

    address: Address
    model: str = ""
    num_prompts: int = 100
    input_len: int = 256
    output_len: int = 64
    request_rate: float = float("inf")
    max_concurrency: int | None = None
    seed: int = 0


def measure(load: ServingLoad) -> Figures:
    """Sends the load. Raises SettingsError if the server cannot be reached, CommandError if requests failed.

    `ttft`: from the moment when a request is sent; `wait`: before it, from its arrival until there is a place for it
    among `max_concurrency` requests.
    """
    url = server_url(load.address.server, load.address.source, ["http"])
    host, port, key = url.hostname or "", url.port or 80, load.address.api_key
    model = load.model or Client(load.address.server, key, flag=load.address.source).first_model()
    fields = {"model": model, "max_tokens": load.output_len, "temperature": 0, "ignore_eos": True}
    bodies = [{**fields, "prompt": ids} for ids in prompts(load.num_prompts, load.input_len, VOCAB_SIZE, load.seed)]
    timestamps = arrivals(load.num_prompts, load.request_rate, load.seed)
    result = asyncio.run(run_open(host, port, bodies, timestamps, concurrency=load.max_concurrency, token=key))
    if result.errors:
        raise CommandError(f"{len(result.errors)} of {load.num_prompts} requests failed. The first: {result.errors[0]}")
    return {
        "model": model,
        "requests": load.num_prompts,
        "duration_s": result.wall_s,
        "requests_per_s": load.num_prompts / result.wall_s,
        "output_tokens_per_s": result.tokens_per_s,
        "total_tokens_per_s": (result.prompt_tokens + result.output_tokens) / result.wall_s,
        **spread("ttft", result.first_token_s),
        **(spread("wait", result.wait_s) if load.max_concurrency else {}),
        **spread("tpot", result.token_s),
        **spread("itl", result.chunk_gaps_s),
    }
