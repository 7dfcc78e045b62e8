"""The whole system, with NATS, gateway and detokenizer, and a model of the shape of Llama 3.1 8B.

    load       256 streams with prompts of 1,000 tokens and outputs of 300, in a closed loop; one stream; eight
    arrivals   the same requests as a Poisson process, half as many in a second as the closed loop ended
    kill       64 streams with prompts of 1,000 tokens on two engines that share the device, of which one is killed

The gap is the time between two pieces of text of a stream. Weights are drawn by each engine on its device.
"""

import asyncio
import atexit
import json
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from antiphon.benchmark.load import Result, arrivals, prompts, run, run_open
from antiphon.client import Client
from bench.gpu.models import LARGE, SHAPES, make
from bench.gpu.parts import DEVICE, Found, Given, compute_parts
from bench.gpu.timing import rounded
from bench.harness.serving import Serving, end_in_order
from bench.limits_of_machine import processes

_KILL_BLOCKS_SPARE = 1.25
_BLOCK_SIZE = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Numbers of streams, requests and tokens."""

    streams: int = 256
    requests: int = 512
    prompt: int = 1000
    output: int = 300
    arriving: int = 256
    killed: int = 64
    killed_output: int = 500


TINY = Sizes(streams=3, requests=4, prompt=20, output=6, arriving=3, killed=4, killed_output=300)


def sizes_of(given: Given) -> Sizes:
    """Returns the sizes of this run."""
    return TINY if given.tiny else Sizes()


class Running:
    """The server of the parts `load` and `arrivals`, and the directory of the model."""

    def __init__(self) -> None:
        self._scratch = tempfile.TemporaryDirectory()
        self._serving: Serving | None = None
        atexit.register(self.stop)

    def flags(self, given: Given, max_model_len: int) -> list[str]:
        """Returns the flags of a server."""
        directory = make(LARGE, Path(self._scratch.name), tiny=given.tiny)
        fixed = [f"--model={directory}", "--load-format=dummy", f"--device={DEVICE.type}", "--swap-space=0"]
        return [*fixed, f"--max-model-len={max_model_len}", *([] if given.on_device else ["--kv-cache-memory-gb=0.1"])]

    def serving(self, given: Given) -> Serving:
        """Returns the server, which is started if it does not run."""
        if self._serving is None:
            sizes = sizes_of(given)
            flags = self.flags(given, sizes.prompt + sizes.output + 64)
            self._serving = Serving(*flags, f"--max-num-seqs={sizes.streams}")
        return self._serving

    def stop(self) -> None:
        """Ends the server."""
        if self._serving is not None:
            self._serving.stop()
            self._serving = None


RUNNING = Running()


def bodies(count: int, length: int, output: int, given: Given) -> list[dict[str, Any]]:
    """Returns requests with prompts of random tokens."""
    vocab = 300 if given.tiny else SHAPES[LARGE]["vocab_size"]
    fixed = {"max_tokens": output, "ignore_eos": True, "temperature": 0}
    return [{"prompt": prompt, **fixed} for prompt in prompts(count, length, vocab, seed=1)]


def load(given: Given) -> Found:
    """Returns throughput, times to the first token and gaps of a closed loop."""
    sizes, serving = sizes_of(given), RUNNING.serving(given)
    work = bodies(sizes.requests, sizes.prompt, sizes.output, given)
    some = bodies(9, sizes.prompt, max(4, sizes.output // 3), given)
    # The first requests compile what was not compiled yet.
    asyncio.run(run(serving.host, serving.port, some[:1], 1))
    found: Found = {"ready_s": rounded(serving.ready_s)}
    found["1 stream"] = summary(asyncio.run(run(serving.host, serving.port, some[:1], 1)))
    found["8 streams"] = summary(asyncio.run(run(serving.host, serving.port, some[1:], 8)))
    found["closed loop"] = {
        "streams": sizes.streams,
        **summary(asyncio.run(run(serving.host, serving.port, work, sizes.streams))),
    }
    return found | {"wrong": wrong_of(found)}


def open_loop(given: Given) -> Found:
    """Returns the same for requests that arrive at random."""
    sizes, serving = sizes_of(given), RUNNING.serving(given)
    closed = given.earlier.get("system: load", {}).get("closed loop", {})
    rate = closed.get("requests_s", 10.0) / 2
    work = bodies(sizes.arriving, sizes.prompt, sizes.output, given)
    starts = arrivals(len(work), rate, seed=2)
    found: Found = {"requests_s": rounded(rate)}
    found["open loop"] = summary(asyncio.run(run_open(serving.host, serving.port, work, starts)))
    return found | {"wrong": wrong_of(found)}


def wrong_of(found: Found) -> list[str]:
    """Returns the names of the loads with errors."""
    return [name for name, each in found.items() if isinstance(each, dict) and "error" in each]


def summary(result: Result) -> Found:
    """Returns the figures of a load, or its first error."""
    if result.errors:
        return {"error": result.errors[0][:500], "num_errors": len(result.errors)}
    return {
        "output_tokens_s": rounded(result.tokens_per_s),
        "requests_s": rounded(len(result.first_token_s) / result.wall_s),
        "wall_s": rounded(result.wall_s),
        "ttft_ms": percentiles(result.first_token_s),
        "gap_ms": percentiles(result.chunk_gaps_s),
    }


def percentiles(seconds: Sequence[float]) -> Found:
    """Returns median, 99th percentile and maximum in milliseconds."""
    if not seconds:
        return {}
    ordered = sorted(seconds)
    picked = {
        "p50": statistics.median(ordered), "p99": ordered[len(ordered) * 99 // 100], "max": ordered[-1],
    }  # fmt: skip
    return {name: rounded(1e3 * value) for name, value in picked.items()}


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


def ask(serving: Serving, body: dict[str, Any]) -> Answer:
    """Streams one completion to its end."""
    answer = Answer()
    client = Client(f"http://{serving.host}:{serving.port}", timeout_s=90)
    data = json.dumps({**body, "stream": True}).encode()
    with client.exchange("POST", "/v1/completions", data) as response:
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


def answers(serving: Serving, work: list[dict[str, Any]], kill_after_s: float | None = None) -> list[Answer]:
    """Streams all completions at once; after `kill_after_s` an engine is killed."""
    with ThreadPoolExecutor(len(work)) as pool:
        found = [pool.submit(ask, serving, body) for body in work]
        if kill_after_s is not None:
            time.sleep(kill_after_s)
            family = processes.tree(serving.process.pid)
            engines = [each for each in family if "-m antiphon.services.engine --" in each.command]
            os.kill(engines[0].pid, signal.SIGKILL)
        return [each.result() for each in found]


def kill(given: Given) -> Found:
    """Returns the longest gap of streams of which half lose their engine, and whether all of them ended.

    Texts are compared with those of undisturbed streams, but may differ: in 16 bits the sums of a token depend on how
    many others a step computes.
    """
    RUNNING.stop()
    sizes = sizes_of(given)
    context = sizes.prompt + sizes.killed_output
    blocks = int(_KILL_BLOCKS_SPARE * sizes.killed * -(-context // _BLOCK_SIZE))
    flags = RUNNING.flags(given, context + 64)
    if given.on_device:
        os.environ["CUDA_VISIBLE_DEVICES"] = "0,0"
    with Serving(*flags, "--engines=2", f"--max-num-seqs={sizes.killed}", f"--num-gpu-blocks-override={blocks}") as one:
        work = bodies(sizes.killed, sizes.prompt, sizes.killed_output, given)
        undisturbed = answers(one, work)
        took = max(each.times[-1] for each in undisturbed) - min(each.times[0] for each in undisturbed)
        killed = answers(one, work, kill_after_s=took / 2)
        ready_s = one.ready_s
    found: Found = {
        "ready_s": rounded(ready_s),
        "streams": sizes.killed,
        "context": context,
        "undisturbed_s": rounded(took),
        "longest_gap_ms": {
            "undisturbed": rounded(1e3 * max(each.longest_gap_s for each in undisturbed)),
            "engine killed": rounded(1e3 * max(each.longest_gap_s for each in killed)),
        },
        "ends": sorted({each.ended for each in killed}),
        "different texts": sum(one.text != other.text for one, other in zip(undisturbed, killed, strict=True)),
    }
    return found | {"wrong": ["ends"] if found["ends"] != ["length"] else []}


PARTS = {"system: load": load, "system: arrivals": open_loop, "system: an engine is killed": kill}

if __name__ == "__main__":
    end_in_order()
    compute_parts(PARTS)
