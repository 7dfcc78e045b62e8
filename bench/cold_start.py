"""Cold start: the time from the command `antiphon serve` to the first token of a streamed answer."""

import argparse
import asyncio
import compileall
import json
import statistics
import time

from antiphon.benchmark.load import Result, stream
from antiphon.services.engine.backends.cpu.packed import START_S
from bench.harness.serving import ROOT, Serving, end_in_order

WRITING_S = 10.0
"""Seconds allowed for writing a gigabyte of packed weights."""
BODY = {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 8, "temperature": 0}


def once(model: str) -> dict[str, float]:
    """Starts the server once. Returns the seconds until it is ready and until the first token.

    `model` is a directory; empty means the demo model.
    """
    with Serving(f"--model={model}") as serving:
        result, body = Result(), {**BODY, "model": serving.model_name()}
        sent = time.perf_counter()
        asyncio.run(stream(serving.host, serving.port, "/v1/chat/completions", body, result))
        if result.errors:
            raise SystemExit(result.errors[0])
        return {"ready_s": serving.ready_s, "first_token_s": sent - serving.started + result.first_token_s[0]}


def leave_weights(model: str) -> None:
    """Starts the server once and waits until it has stored its packed weights; see `backends/cpu/packed.py`."""
    with Serving(f"--model={model}"):
        time.sleep(START_S + WRITING_S)


def measure(runs: int, model: str = "") -> dict[str, float]:
    """Returns the median times of `runs` starts.

    Compiled Python modules and packed weights exist already, as for every start except the first one on a machine.
    """
    for package in ("antiphon", "services", "shared"):
        compileall.compile_dir(ROOT / package, quiet=1)
    leave_weights(model)
    samples = [once(model) for _ in range(runs)]
    return {key: round(statistics.median(sample[key] for sample in samples), 3) for key in samples[0]}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--model", default="")
    options = parser.parse_args()
    end_in_order()
    print(json.dumps(measure(options.runs, options.model)))
