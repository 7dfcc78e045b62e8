"""The same workload on real processes: `antiphon serve --engines 4 --gateways 2` with the demo model.

    python -m bench.prefix_routing.real [--prompts 600] [--rate 12] [--kv-gb 0.02] [--json FILE]

Prints the share of the prompt tokens that was cached, by the answers, and the time to the first token.
"""

import argparse
import asyncio
import random
import re
import time
from collections import Counter
from pathlib import Path
from typing import Any

import openai

from bench.harness.output import print_and_save
from bench.harness.serving import Serving, end_in_order

GROUPS, PREFIX_TOKENS, TAIL_TOKENS, OUTPUT_TOKENS = 24, 1024, 64, 8
PROMPT = re.compile(r'^antiphon:engine_prompt_tokens_total\{engine="([^"]+)".* (\S+)$', re.MULTILINE)


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=600)
    parser.add_argument("--rate", type=float, default=12.0, help="prompts in a second")
    parser.add_argument("--kv-gb", type=float, default=0.02, help="KV cache of an engine, GiB")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="file for the figures")
    args = parser.parse_args()
    end_in_order()
    flags = ["--engines=4", "--gateways=2", "--standby=off", f"--kv-cache-memory-gb={args.kv_gb}"]
    with Serving(*flags) as server:
        print_and_save(asyncio.run(_measure(server, args)), args.json)


async def _measure(server: Serving, args: argparse.Namespace) -> dict[str, Any]:
    rng = random.Random(args.seed)
    weights = [1 / (rank + 1) for rank in range(GROUPS)]
    prefixes = [[rng.randrange(5, 250) for _ in range(PREFIX_TOKENS)] for _ in weights]
    cached, total, times, failed = Counter[str](), 0, list[float](), 0
    tasks = list[asyncio.Task[None]]()

    async def one(prompt: list[int], counts: bool) -> None:
        nonlocal total, failed
        # A connection for each prompt, so that both gateways get some.
        async with openai.AsyncOpenAI(
            base_url=f"http://{server.host}:{server.port}/v1", api_key="-", max_retries=0, timeout=60
        ) as client:
            began, first = time.perf_counter(), 0.0
            stream = await client.completions.create(
                model=name, prompt=prompt, max_tokens=OUTPUT_TOKENS, stream=True, stream_options={"include_usage": True}
            )
            async for chunk in stream:
                first = first or time.perf_counter() - began
                if chunk.usage is not None and counts:
                    details = chunk.usage.prompt_tokens_details
                    cached["tokens"] += (details.cached_tokens or 0) if details is not None else 0
                    total += chunk.usage.prompt_tokens
            if counts:
                times.append(first)

    name = server.model_name()
    for number in range(args.prompts):
        prompt = rng.choices(prefixes, weights)[0] + [rng.randrange(5, 250) for _ in range(TAIL_TOKENS)]
        tasks.append(asyncio.create_task(one(prompt, number >= args.prompts // 2)))
        await asyncio.sleep(rng.expovariate(args.rate))
    done = await asyncio.gather(*tasks, return_exceptions=True)
    failed = sum(isinstance(result, BaseException) for result in done)
    times.sort()
    engines = [float(value) for _, value in PROMPT.findall(server.get("/metrics")[1].decode())]
    return {
        "cached": round(cached["tokens"] / max(total, 1), 3),
        "failed": failed,
        "p50 ms": round(times[len(times) // 2] * 1e3),
        "p99 ms": round(times[len(times) * 99 // 100] * 1e3),
        "prompt tokens max/mean": round(max(engines) * len(engines) / sum(engines), 3) if engines else None,
    }


if __name__ == "__main__":
    main()
