"""How many tokens a second one core can carry in each part: gateway, tokenizer, detokenizer and NATS server.

    python -m bench.scale [--streams 64 256] [--output 256] [--prompt 1024] [--json FILE]

The system has one process of each service, and an engine that computes nothing (`bench.harness.emulated_engine`), so
that the engine is not the limit. Every stream gets a token in each step. From the processor time of each process during
the load follows what the process would carry with a core of its own: tokens a second, streams at 20 tokens a second,
and for the tokenizer prompt tokens a second. The result does not depend on how busy the machine is, except that other
programs also use the processor's caches.
"""

import argparse
import asyncio
import contextlib
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from antiphon.benchmark.load import run
from antiphon.launch import nats_server
from bench.harness import loads
from bench.harness.output import save
from bench.harness.serving import HOST, Server, end_in_order, free_port
from bench.limits_of_machine import machine
from bench.run import DEMO

READER_TOKENS_PER_S = 20
"""Tokens a second of a stream at the speed at which a person reads."""
STEP_MS = 50
PARTS = ("gateway", "tokenizer", "detokenizer", "nats-server")
PROGRAM = """
import os, subprocess, sys
children = [subprocess.Popen(words, env={**os.environ, **extra}) for words, extra in eval(sys.argv[1])]
try:
    os.wait()
finally:
    for child in children: child.terminate()
    for child in children: child.wait(20)
"""
"""The program that starts all processes. It ends them when it ends or when one of them ends."""


class Parts(Server):
    """One process of each part."""

    def __init__(self, folder: Path) -> None:
        bus, port = nats_server.prepare(folder), free_port()
        commands = [([nats_server.find_binary(), "-c", str(bus.config)], nats_server.environment({}))]
        model = (f"--model={DEMO}", "--served-model-name=emulated")
        flags = {
            "gateway": ("antiphon", "service", "gateway", f"--host={HOST}", f"--port={port}"),
            "tokenizer": ("antiphon", "service", "tokenizer", *model),
            "detokenizer": ("antiphon", "service", "detokenizer", *model),
            "engine": ("bench.harness.emulated_engine", f"--step-ms={STEP_MS}", *model, "--max-num-seqs=1024"),
        }
        for role, words in flags.items():
            environ = {"ANTIPHON_NATS": bus.url, "ANTIPHON_NATS_CREDENTIALS": bus.join(role, f"{role}-1")}  # type: ignore[arg-type]
            commands.append(([sys.executable, "-m", *words, f"--service-id={role}-1"], environ))
        bus.write()
        super().__init__("parts", [sys.executable, "-c", PROGRAM, repr(commands)], port, "/readyz")

    def part_of(self, command: str) -> str:
        """See Server."""
        for name in ("gateway", "detokenizer", "tokenizer", "engine"):
            if f"--service-id={name}-1" in command and "bash" not in command and "-c" not in command.split():
                return name
        return "nats-server" if command.split()[0].endswith("nats-server") else "starter"


@contextlib.contextmanager
def started() -> Iterator[Parts]:
    """All parts, ready, until the end of the block."""
    with tempfile.TemporaryDirectory(prefix="antiphon-scale-") as folder, Parts(Path(folder)) as parts:
        yield parts


def bodies(count: int, prompt: int, output: int, seed: int) -> list[dict[str, Any]]:
    """Returns requests with different prompts of the same length."""
    load = loads.Load("scale", clients=1, prompt=prompt, output=output, requests=count, warmup=0)
    drawn = loads.Prompts(DEMO).draw(load, seed).measured
    fixed = {"model": "emulated", "max_tokens": output, "ignore_eos": True, "temperature": 0}
    return [{**fixed, "prompt": each.text} for each in drawn]


def measure(parts: Parts, streams: int, prompt: int, output: int) -> dict[str, Any]:
    """Runs a load and returns the tokens, and for each part its CPU seconds and what a core carries."""
    requests = bodies(streams, prompt, output, streams)
    before = parts.cpu_seconds()
    result = asyncio.run(run(HOST, parts.port, requests, streams))
    used = parts.cpu_seconds() - before
    if result.errors:
        raise SystemExit(f"{len(result.errors)} requests failed: {result.errors[0]}")
    carried = {part: round(result.output_tokens / max(used[part], 0.01)) for part in PARTS if part != "tokenizer"}
    return {
        "streams": streams,
        "tokens": result.output_tokens,
        "prompt_tokens": result.prompt_tokens,
        "seconds": round(result.wall_s, 2),
        "cpu_s": {part: round(used[part], 2) for part in (*PARTS, "engine")},
        "tokens_per_core_s": carried,
        "prompt_tokens_per_core_s": {"tokenizer": round(result.prompt_tokens / max(used["tokenizer"], 0.01))},
    }


def text(results: dict[str, Any]) -> str:
    """Returns the figures as lines for the terminal."""
    lines = ["one core carries, of               tokens/s   streams at 20 tokens/s"]
    for load in results["loads"]:
        lines.append(f"{load['streams']} streams, {load['tokens']} tokens in {load['seconds']} s")
        for part, rate in load["tokens_per_core_s"].items():
            lines.append(f"  {part:<30} {rate:>10,} {rate // READER_TOKENS_PER_S:>12,}")
        rate = load["prompt_tokens_per_core_s"]["tokenizer"]
        lines.append(f"  {'tokenizer, of prompts':<30} {rate:>10,}")
    return "\n".join(lines)


def main() -> int:
    """Measures, prints and saves."""
    parser = argparse.ArgumentParser(description="What one core carries of each part of the system.")
    parser.add_argument("--streams", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of each prompt")
    parser.add_argument("--output", type=int, default=256, help="tokens of each stream")
    parser.add_argument("--json", type=Path, help="file for the results")
    options = parser.parse_args()
    end_in_order()
    with started() as parts:
        measure(parts, 8, options.prompt, 8)
        found = [measure(parts, streams, options.prompt, options.output) for streams in options.streams]
    results = {"machine": machine.facts(), "step_ms": STEP_MS, "loads": found}
    print(text(results))
    save(results, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
