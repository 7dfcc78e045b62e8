"""The bus tax: output tokens/s through gateway, NATS and detokenizer against the same engine driven in process.

Both sides get the same prompts, lengths and number of streams, on the same threads, in turn (A B A B …); the figure is
the median of the ratios pair by pair. Beside it, the CPU time that each process took for a token: where the tax goes.
"""

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
from pathlib import Path

from bench.client import run
from bench.serving import ROOT, Serving


def prompts(count: int, length: int, vocab: int, seed: int) -> list[list[int]]:
    """Random token ids: no two runs share a prefix."""
    draw = random.Random(seed)
    return [[draw.randrange(16, vocab) for _ in range(length)] for _ in range(count)]


def through_the_bus(
    serving: Serving, options: argparse.Namespace, seed: int, vocab: int
) -> tuple[float, dict[str, float]]:
    """Tokens/s, and CPU microseconds a token by process."""
    shared = {"max_tokens": options.output, "ignore_eos": True, "temperature": 0}
    bodies = [{**shared, "prompt": ids} for ids in prompts(options.streams, options.input, vocab, seed)]
    before = serving.cpu_seconds()
    result = asyncio.run(run(serving.host, serving.port, bodies, options.streams))
    if result.errors:
        raise SystemExit(result.errors[0])
    used = serving.cpu_seconds()
    return result.tokens_per_s, {name: 1e6 * (used[name] - before[name]) / result.output_tokens for name in used}


def in_process(options: argparse.Namespace, seed: int) -> float:
    """Tokens/s of the core and the worker alone, in a process of their own."""
    command = [
        sys.executable, "-m", "bench.engine_stream", "--streams", str(options.streams), "--input", str(options.input),
        "--output", str(options.output), "--seed", str(seed), *(["--model", options.model] if options.model else []),
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])["tokens_per_s"]


def measure(options: argparse.Namespace) -> dict[str, object]:
    """Pairs in turn."""
    config = Path(options.model or ROOT / "antiphon" / "demo") / "config.json"
    vocab = json.loads(config.read_text(encoding="utf-8"))["vocab_size"]
    ratios, bus, alone, profiles = [], [], [], []
    for pair in range(options.pairs):
        # The server is stopped while the engine runs alone, so that neither side shares the cores with the other.
        with Serving(*(["--model", options.model] if options.model else [])) as serving:
            through_the_bus(serving, options, 1000 + pair, vocab)
            rate, profile = through_the_bus(serving, options, pair, vocab)
        bus.append(rate)
        profiles.append(profile)
        alone.append(in_process(options, pair))
        ratios.append(bus[-1] / alone[-1])
    names = sorted({name for profile in profiles for name in profile})
    return {
        "streams": options.streams,
        "bus_tokens_per_s": round(statistics.median(bus), 1),
        "engine_tokens_per_s": round(statistics.median(alone), 1),
        "tax_percent": round(100 * (1 - statistics.median(ratios)), 1),
        "tax_percent_range": [round(100 * (1 - max(ratios)), 1), round(100 * (1 - min(ratios)), 1)],
        "cpu_us_per_token": {n: round(statistics.median(p.get(n, 0.0) for p in profiles), 1) for n in names},
    }


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Options."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="", help="model directory (default: the demo model)")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--input", type=int, default=64)
    parser.add_argument("--output", type=int, default=128)
    parser.add_argument("--pairs", type=int, default=3)
    return parser.parse_args(argv)


if __name__ == "__main__":
    print(json.dumps(measure(parse()), indent=1))
