"""Measures the whole system on the GPU, including NATS: a closed-loop load through the gateway with random prompts.

python -m bench.gpu.system MODEL_DIRECTORY [--streams 256] [--requests 512] [--input 1000] [--output 1000]
"""

import argparse
import asyncio
import json
import random
import statistics
from pathlib import Path

from antiphon.benchmark.load import Result, run
from bench.harness.serving import Serving, end_in_order


def bodies(options: argparse.Namespace, vocab_size: int) -> list[dict]:
    draw = random.Random(1)
    return [
        {
            "prompt": [draw.randrange(300, vocab_size) for _ in range(options.input)],
            "max_tokens": options.output,
            "ignore_eos": True,
            "temperature": 0,
        }
        for _ in range(options.requests)
    ]


def summary(result: Result) -> dict[str, object]:
    if result.errors:
        return {"error": result.errors[0][:500], "num_errors": len(result.errors)}
    first = sorted(result.first_token_s)
    return {
        "output_tokens_s": round(result.tokens_per_s, 1),
        "wall_s": round(result.wall_s, 1),
        "ttft_ms": {"p50": round(1e3 * statistics.median(first)), "p99": round(1e3 * first[len(first) * 99 // 100])},
        "chunk_gap_ms_p50": round(1e3 * statistics.median(result.chunk_gaps_s), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--input", type=int, default=1000)
    parser.add_argument("--output", type=int, default=1000)
    options = parser.parse_args()
    end_in_order()
    vocab_size = json.loads((options.model / "config.json").read_text())["vocab_size"]
    flags = (
        f"--model={options.model}",
        "--device=cuda",
        f"--max-num-seqs={options.streams}",
        f"--max-model-len={options.input + options.output + 64}",
        "--max-num-batched-tokens=8192",
        "--swap-space=0",
    )
    work = bodies(options, vocab_size)
    with Serving(*flags) as serving:
        few = asyncio.run(run(serving.host, serving.port, [{**body, "max_tokens": 64} for body in work[:8]], 8))
        alone = asyncio.run(run(serving.host, serving.port, [{**work[0], "max_tokens": 200}], 1))
        full = asyncio.run(run(serving.host, serving.port, work, options.streams))
        found = {"ready_s": round(serving.ready_s, 1), "8 streams": summary(few), "1 stream": summary(alone)}
        print(json.dumps({**found, f"{options.streams} streams": summary(full)}))


if __name__ == "__main__":
    main()
