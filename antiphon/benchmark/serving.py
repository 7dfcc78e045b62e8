"""Benchmarks a server with OpenAI's completions API: sends requests at a rate or all at once and measures them."""

import asyncio
import http.client
import json
from dataclasses import dataclass
from urllib.parse import urlsplit

from antiphon.benchmark.client import run_open
from antiphon.benchmark.figures import Figures, spread
from antiphon.benchmark.workload import arrivals, prompts
from shared.config import SettingsError

VOCAB_SIZE = 1000
"""Prompts consist of token ids below this number, which every model has."""
ASK_S = 30.0


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
    url = urlsplit(load.base_url if "//" in load.base_url else f"http://{load.base_url}")
    if url.scheme != "http" or not url.hostname:
        raise SettingsError(f"--base-url: {load.base_url!r} is no URL like http://127.0.0.1:8000")
    host, port = url.hostname, url.port or 80
    model = load.model or _first_model(host, port, load.token)
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


def _first_model(host: str, port: int, token: str | None) -> str:
    connection = http.client.HTTPConnection(host, port, timeout=ASK_S)
    try:
        connection.request("GET", "/v1/models", headers={"Authorization": f"Bearer {token}"} if token else {})
        response = connection.getresponse()
        data = response.read()
        if response.status != 200:
            raise SettingsError(
                f"--base-url: the server answers {response.status}: {data[:200].decode(errors='replace')}"
            )
        return str(json.loads(data)["data"][0]["id"])
    except (OSError, http.client.HTTPException) as error:
        raise SettingsError(f"--base-url: no connection to {host}:{port}: {error}") from error
    except (ValueError, LookupError, TypeError) as error:
        raise SettingsError("--base-url: the server lists no model: name one with --model") from error
    finally:
        connection.close()
