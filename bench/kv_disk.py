"""What KV on a disk saves: a long prompt after a restart, and streams whose engine is killed.

    python -m bench.kv_disk MODEL_DIRECTORY [--prompt 15000] [--streams 64] [--length 1500] [--json FILE]

    restart   time to the first token of a prompt on a new server, and on a server that starts again with its disk
    killed    streams of two engines, of which one is killed: the longest pause of each stream, with a disk and without
    cost      tokens/s of streams with prompts that nothing has in common, with a disk and without, in turn

Prints the figures with their goals. The tokens of all streams are compared with those of an undisturbed run.
"""

import argparse
import asyncio
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai

from bench.harness.output import print_and_save
from bench.harness.serving import HOST, Serving, end_in_order
from bench.limits_of_machine import processes

VOCABULARY = range(1000, 20_000)
GOALS = {"restart": 0.1, "killed": 0.25, "cost": 0.97}
KILLED_TOKENS, COST_TOKENS = 300, 40


@dataclass
class Stream:
    """A stream's token ids, and when each came, in seconds."""

    tokens: list[int] = field(default_factory=list)
    at: list[float] = field(default_factory=list)
    runs: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when it has some tokens."""

    @property
    def pause_s(self) -> float:
        """The longest time between two tokens."""
        return max(then - first for first, then in zip(self.at, self.at[1:], strict=False))


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--prompt", type=int, default=15_000)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--length", type=int, default=1500)
    parser.add_argument("--only", choices=list(GOALS), help="one of the measurements")
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args()
    end_in_order()
    measured = {"restart": restart, "killed": killed, "cost": cost}
    results: dict[str, Any] = {}
    for name, measure in measured.items():
        if options.only in (None, name):
            with tempfile.TemporaryDirectory(prefix="antiphon-kv-") as directory:
                results[name] = {**measure(options, directory), "goal": GOALS[name]}
            print(f"{name}: {results[name]}", file=sys.stderr, flush=True)
    print_and_save(results, options.json)


def serving(options: argparse.Namespace, directory: str | None, *flags: str) -> Serving:
    """Starts a server, with a disk if a directory is given."""
    disk = () if directory is None else ("--kv-disk-gb=16", f"--kv-disk-path={directory}")
    return Serving(f"--model={options.model}", *disk, *flags)


def restart(options: argparse.Namespace, directory: str) -> dict[str, float]:
    """Returns seconds to the first token of a prompt: computed, and read by a later server."""
    prompt, found = _prompt(0, options.prompt), list[float]()
    flags = (f"--max-model-len={options.prompt + 100}", "--kv-cache-memory-gb=1")
    for _ in range(2):
        with serving(options, directory, *flags) as server:
            asyncio.run(_all(server, [_prompt(1, 64)], 4))  # the first request of a server
            started = time.perf_counter()
            [stream] = asyncio.run(_all(server, [prompt], 4))
            found.append(stream.at[0] - started)
            time.sleep(2.0)  # until the last blocks are written
    return {"cold_s": found[0], "again_s": found[1], "ratio": found[1] / found[0]}


def killed(options: argparse.Namespace, directory: str) -> dict[str, Any]:
    """Returns the 99th percentile of the streams' longest pauses, with the disk and without."""
    prompts = [_prompt(number, options.length) for number in range(options.streams)]
    flags = ("--engines=2", "--kv-cache-memory-gb=4", "--max-model-len=4096", f"--max-num-seqs={options.streams}")
    pauses, right, differing = dict[str, float](), list[list[int]](), 0
    for name, path in (("with", directory), ("without", None)):
        with serving(options, path, *flags) as server:
            streams = asyncio.run(_all(server, prompts, KILLED_TOKENS, kill=server))
            pauses[name] = statistics.quantiles([stream.pause_s for stream in streams], n=100)[98]
            if not right:
                right = [stream.tokens for stream in streams]
            differing += sum(stream.tokens != tokens for stream, tokens in zip(streams, right, strict=True))
        print(f"killed, {name} disk: p99 {pauses[name]:.2f} s", file=sys.stderr, flush=True)
    return {**pauses, "ratio": pauses["with"] / pauses["without"], "differing": differing}


def cost(options: argparse.Namespace, directory: str) -> dict[str, float]:
    """Returns tokens/s with the disk divided by tokens/s without, of prompts that nothing has in common."""
    rates: dict[str, list[float]] = {"with": [], "without": []}
    flags = ("--kv-cache-memory-gb=1", "--max-model-len=4096")
    with serving(options, directory, *flags) as disk, serving(options, None, *flags) as plain:
        for number in range(5):
            for name, server, other in (("with", disk, plain), ("without", plain, disk)):
                other.pause()
                prompts = [_prompt(1000 * number + place, 400) for place in range(8)]
                started = time.perf_counter()
                streams = asyncio.run(_all(server, prompts, COST_TOKENS))
                rates[name].append(sum(len(each.tokens) for each in streams) / (time.perf_counter() - started))
                other.resume()
    ratios = [one / other for one, other in zip(rates["with"][1:], rates["without"][1:], strict=True)]
    return {"ratio": statistics.median(ratios), "least": min(ratios), "most": max(ratios)}


def _prompt(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(VOCABULARY, k=length)


async def _all(
    server: Serving, prompts: Sequence[list[int]], max_tokens: int, kill: Serving | None = None
) -> list[Stream]:
    """Streams all prompts at once. `kill`: its engine with most work is killed when all streams have tokens."""
    client = openai.AsyncOpenAI(base_url=f"http://{HOST}:{server.port}/v1", api_key="none", timeout=1200)
    streams = [Stream() for _ in prompts]
    async with client:
        model = server.model_name()
        tasks = [
            asyncio.create_task(_run(client, model, prompt, max_tokens, stream))
            for prompt, stream in zip(prompts, streams, strict=True)
        ]
        if kill is not None:
            await asyncio.gather(*(stream.runs.wait() for stream in streams))
            family = processes.tree(kill.process.pid)
            engines = [each.pid for each in family if "-m antiphon.services.engine --" in each.command]
            os.kill(engines[0], signal.SIGKILL)
        await asyncio.gather(*tasks)
    return streams


async def _run(client: openai.AsyncOpenAI, model: str, prompt: list[int], max_tokens: int, stream: Stream) -> None:
    asked = client.completions.create(
        model=model,
        prompt=prompt,
        max_tokens=max_tokens,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    async for chunk in await asked:
        now = time.perf_counter()
        ids = getattr(chunk.choices[0], "token_ids", None) or [] if chunk.choices else []
        stream.tokens += ids
        stream.at += [now] * len(ids)
        if len(stream.tokens) >= 4:
            stream.runs.set()


if __name__ == "__main__":
    main()
