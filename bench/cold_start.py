"""Cold start: from the command `antiphon serve` to the first token of a streamed answer, with the demo model."""

import argparse
import asyncio
import json
import statistics
import time

from bench.client import Result, stream
from bench.serving import Serving

BODY = {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 8}


def once() -> dict[str, float]:
    """One start. Seconds."""
    with Serving() as serving:
        result = Result()
        sent = time.perf_counter()
        asyncio.run(stream(serving.host, serving.port, "/v1/chat/completions", BODY, result))
        if result.errors:
            raise SystemExit(result.errors[0])
        return {"ready_s": serving.ready_s, "first_token_s": sent - serving.started + result.first_token_s[0]}


def measure(runs: int) -> dict[str, float]:
    """Medians."""
    samples = [once() for _ in range(runs)]
    return {key: round(statistics.median(sample[key] for sample in samples), 3) for key in samples[0]}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3)
    print(json.dumps(measure(parser.parse_args().runs)))
