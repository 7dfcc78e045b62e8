"""Kills one of two engines on the GPU under streams, and compares what the clients get with undisturbed runs.

    python -m bench.gpu.faults MODEL_DIRECTORY [--streams 8] [--device cuda]

Both engines use the same device. Half of the streams are greedy, half are sampled with a seed. They run in float32:
the GPU's library of matrix products sums in an order that depends on the number of tokens of a step, and in 16
bits this alone makes the texts of two undisturbed runs differ.
"""

import argparse
import json
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from antiphon.client import Client
from bench.harness.serving import Serving, end_in_order
from bench.limits_of_machine import processes

MAX_TOKENS = 400
BLOCKS = 4000
"""Blocks of each engine's KV cache; by default one engine would take the whole device."""


@dataclass
class Answer:
    """The text of a stream, when its parts came, and why it ended."""

    text: str = ""
    times: list[float] = field(default_factory=list)
    ended: str = ""

    @property
    def longest_gap_s(self) -> float:
        """The longest time between two parts, in seconds."""
        return max((b - a for a, b in zip(self.times, self.times[1:], strict=False)), default=0.0)


def ask(serving: Serving, number: int) -> Answer:
    """Streams one completion to its end."""
    body: dict[str, Any] = {
        "prompt": f"Once upon a time, number {number},", "max_tokens": MAX_TOKENS, "ignore_eos": True, "stream": True,
        **({"temperature": 0} if number % 2 else {"seed": number}),
    }  # fmt: skip
    answer = Answer()
    client = Client(f"http://{serving.host}:{serving.port}", timeout_s=90)
    with client.exchange("POST", "/v1/completions", json.dumps(body).encode()) as response:
        for line in response:
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                if "error" in event:
                    answer.ended = str(event["error"])
                    continue
                for choice in event["choices"]:
                    answer.text += choice["text"]
                    answer.times.append(time.monotonic())
                    answer.ended = choice.get("finish_reason") or answer.ended
    return answer


def answers(serving: Serving, count: int, kill_after_s: float | None = None) -> list[Answer]:
    """Streams `count` completions at once; after `kill_after_s` an engine is killed."""
    with ThreadPoolExecutor(count) as pool:
        found = [pool.submit(ask, serving, number) for number in range(count)]
        if kill_after_s is not None:
            time.sleep(kill_after_s)
            engines = [
                each for each in processes.tree(serving.process.pid) if "antiphon.services.engine" in each.command
            ]
            os.kill(engines[0].pid, signal.SIGKILL)
        return [each.result() for each in found]


def differing(some: list[Answer], others: list[Answer]) -> list[int]:
    """Returns the numbers of the streams whose texts differ."""
    return [number for number, (one, other) in enumerate(zip(some, others, strict=True)) if one.text != other.text]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    end_in_order()
    os.environ["CUDA_VISIBLE_DEVICES"] = "0,0"
    flags = (
        f"--model={options.model}", f"--device={options.device}", "--engines=2", "--max-model-len=1024",
        "--max-num-seqs=16", f"--num-gpu-blocks-override={BLOCKS}", "--swap-space=0", "--dtype=float32",
    )  # fmt: skip
    with Serving(*flags) as serving:
        before = answers(serving, options.streams)
        undisturbed = answers(serving, options.streams)
        took = max(each.times[-1] for each in undisturbed) - min(each.times[0] for each in undisturbed)
        killed = answers(serving, options.streams, kill_after_s=took / 2)
    found = {
        "ready_s": round(serving.ready_s, 1),
        "streams": options.streams,
        "undisturbed_s": round(took, 2),
        "longest_gap_ms": {
            "undisturbed": round(1e3 * max(each.longest_gap_s for each in undisturbed), 1),
            "engine killed": round(1e3 * max(each.longest_gap_s for each in killed), 1),
        },
        "ends": sorted({each.ended for each in killed}),
        "different undisturbed": differing(before, undisturbed),
        "different": differing(killed, undisturbed),
    }
    wrong = [name for name in ("different undisturbed", "different") if found[name]]
    wrong += ["ends"] if found["ends"] != ["length"] else []
    print(json.dumps({**found, "wrong": wrong}))


if __name__ == "__main__":
    main()
