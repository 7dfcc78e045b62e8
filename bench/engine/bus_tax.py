"""The bus tax: how many output tokens/s the gateway, NATS and the detokenizer cost, compared with the engine alone.

Both sides get the same requests, a given number at a time, with the same number of threads, in alternating order
(A B B A …), so that a machine that becomes slower affects both. The bus tax is the loss of tokens/s relative to
the engine alone, as the median over the pairs. The CPU time of each process per token is reported too.
"""

import argparse
import asyncio
import json
import random
import statistics
from collections.abc import Mapping
from pathlib import Path

from antiphon.benchmark.load import NO_HEADERS, run
from bench.engine.engine_stream import EngineAlone, Work
from bench.harness.serving import ROOT, Serving, end_in_order


def workload(options: argparse.Namespace, vocab: int, seed: int, side: str = "") -> Work:
    """Returns requests with random prompt ids, so that no two share a prefix, and with mixed output lengths.

    Workloads of one seed have the same lengths. Those of different sides have different prompts, so that a server that
    gets both does not find the prompts of the first in its prefix cache.
    """
    lengths, ids = random.Random(seed), random.Random(f"{seed} {side}")
    low, high = options.output // 2, options.output * 3 // 2
    return [
        ([ids.randrange(16, vocab) for _ in range(options.input)], lengths.randrange(low, high))
        for _ in range(options.requests)
    ]


def through_the_bus(
    serving: Serving,
    options: argparse.Namespace,
    seed: int,
    vocab: int,
    *,
    side: str = "",
    headers: Mapping[str, str] = NO_HEADERS,
) -> tuple[float, dict[str, float]]:
    """Runs the load through the whole system. Returns tokens/s, and CPU microseconds per token for each process.

    `side`: see `workload`. `headers`: of each request, besides the usual ones.
    """
    bodies = [
        {"prompt": ids, "max_tokens": length, "ignore_eos": True, "temperature": 0}
        for ids, length in workload(options, vocab, seed, side)
    ]
    before = serving.cpu_seconds()
    result = asyncio.run(run(serving.host, serving.port, bodies, options.streams, headers=headers))
    if result.errors:
        raise SystemExit(result.errors[0])
    used = serving.cpu_seconds()
    return result.tokens_per_s, {name: 1e6 * (used[name] - before[name]) / result.output_tokens for name in used}


def measure(options: argparse.Namespace) -> dict[str, object]:
    """Measures the pairs, after one pair that is not counted. While one side runs, the other is idle."""
    config = Path(options.model or ROOT / "antiphon" / "demo") / "config.json"
    vocab = json.loads(config.read_text(encoding="utf-8"))["vocab_size"]
    bus, alone, profiles = [], [], []
    flags = [f"--model={options.model}", f"--threads={options.threads}"]
    with EngineAlone(options.model, options.threads) as engine, Serving(*flags) as serving:
        for seed in range(options.pairs + 1):
            bus_first = bool(seed % 2)
            for through in (bus_first, not bus_first):
                if through:
                    rate, profile = through_the_bus(serving, options, seed, vocab)
                    bus.append(rate)
                    profiles.append(profile)
                else:
                    alone.append(engine.turn(workload(options, vocab, seed), options.streams).tokens_per_s)
    return summary(options, bus[1:], alone[1:], profiles[1:])


def summary(
    options: argparse.Namespace, bus: list[float], alone: list[float], profiles: list[dict[str, float]]
) -> dict[str, object]:
    """Returns the median rates and CPU times, and median and quartiles of the tax of each pair."""
    taxes = sorted(100 * (1 - b / a) for b, a in zip(bus, alone, strict=True))
    names = sorted({name for profile in profiles for name in profile})
    return {
        "streams": options.streams,
        "bus_tokens_per_s": round(statistics.median(bus), 1),
        "engine_tokens_per_s": round(statistics.median(alone), 1),
        "tax_percent": round(statistics.median(taxes), 1),
        "tax_percent_quartiles": [round(taxes[len(taxes) // 4], 1), round(taxes[-1 - len(taxes) // 4], 1)],
        "cpu_us_per_token": {n: round(statistics.median(p.get(n, 0.0) for p in profiles), 1) for n in names},
    }


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the options of the load."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="", help="model directory (default: the demo model)")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--input", type=int, default=64)
    parser.add_argument("--output", type=int, default=128, help="mean length; each request has half to one and a half")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--pairs", type=int, default=9)
    return parser


if __name__ == "__main__":
    end_in_order()
    print(json.dumps(measure(parser().parse_args()), indent=1))
