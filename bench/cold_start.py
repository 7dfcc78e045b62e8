"""Cold start: from the command `antiphon serve` to the first token of a streamed answer."""

import argparse
import asyncio
import compileall
import json
import statistics
import time

from antiphon.benchmark.client import Result, stream
from bench.serving import ROOT, Serving
from services.engine.cpu.packed import START_S

WRITING_S = 10.0
"""For a gigabyte of packed weights."""
BODY = {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 8, "temperature": 0}


def once(model: str) -> dict[str, float]:
    """One start. Seconds. `model`: a directory, empty for the demo model."""
    with Serving(f"--model={model}") as serving:
        result, body = Result(), {**BODY, "model": serving.model_name()}
        sent = time.perf_counter()
        asyncio.run(stream(serving.host, serving.port, "/v1/chat/completions", body, result))
        if result.errors:
            raise SystemExit(result.errors[0])
        return {"ready_s": serving.ready_s, "first_token_s": sent - serving.started + result.first_token_s[0]}


def leave_weights(model: str) -> None:
    """One start that lasts until it has kept its packed weights; see `services/engine/cpu/packed.py`."""
    with Serving(f"--model={model}"):
        time.sleep(START_S + WRITING_S)


def measure(runs: int, model: str = "") -> dict[str, float]:
    """Medians, with everything as any start but a machine's very first finds it."""
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
    print(json.dumps(measure(options.runs, options.model)))
