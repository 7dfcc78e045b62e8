"""One load on one running server, and the machine's limits beside it: each on an idle machine, with its CPU booked.

Called by `bench.peers` and `bench.run`; they decide in what order, `bench.report` what it means.
"""

import asyncio
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import books, probe, roofline
from bench.client import Result, run
from bench.loads import Load, Prompt, Prompts
from bench.sample import Sample, latencies, rounded
from bench.serving import Server
from services.engine.models.description import DecoderDescription
from services.engine.models.registry import find_family

LOAD_S_MAX = 1800.0
SETTLE_S = 5.0
"""The system is busy for a while with the gigabytes that a probe gave back, which would slow the first server down."""


class LoadFailed(Exception):
    """A server did not give every request exactly the tokens that were asked for."""


@dataclass(frozen=True, slots=True)
class Turn:
    """Which measurement a sample belongs to: the round, the load, and the machine's limits in that moment."""

    round: int
    load: Load
    floor: roofline.Floor
    probe: probe.Probe
    cpu: books.Cpu
    """While the limits were measured."""
    patience: books.Patience

    def record(self) -> dict[str, Any]:
        """For a results file."""
        rates = {name: getattr(self.probe, name) for name in ("read_model_gb_s", "read_large_gb_s", "gemm_gflop_s")}
        floor = {"floor_prompts_s": self.floor.prompts_s, "floor_decode_s": self.floor.decode_s}
        foreign = {"foreign_cores": self.cpu.foreign}
        return {"round": self.round, "load": self.load.name, **rounded({**rates, **floor, **foreign})}


def describe(model: Path) -> DecoderDescription:
    """The decoder of a model directory."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    return find_family(config).describe(config)


def begin(number: int, load: Load, decoder: DecoderDescription, threads: int, patience: books.Patience) -> Turn:
    """Measures the machine's limits, and what they allow for a load."""
    size = roofline.weight_bytes(decoder)
    found, cpu = books.quietly(patience, books.children, lambda: size, lambda wanted: probe.measure(wanted, threads))
    time.sleep(SETTLE_S)
    # Weights come from memory or, where they fit, from a cache: whichever of the two buffers was faster bounds them.
    read = max(found.read_model_gb_s, found.read_large_gb_s)
    limits = roofline.Limits(read * 1e9, found.gemm_gflop_s * 1e9)
    return Turn(number, load, roofline.floor(decoder, load, limits), found, cpu, patience)


def sample(server: Server, turn: Turn, prompts: Prompts, seeds: Iterator[int]) -> Sample:
    """A server under a load; its warm-up is not booked. Raises `LoadFailed`."""
    load, model = turn.load, server.model_name()

    def warm_up() -> tuple[int, list[Prompt]]:
        seed = next(seeds)
        draw = prompts.draw(load, seed)
        for part in (draw.prime, draw.warmup):
            _send(server, model, load, part)
        return seed, draw.measured

    def send(drawn: tuple[int, list[Prompt]]) -> tuple[int, Result]:
        return drawn[0], _send(server, model, load, drawn[1])

    (seed, result), cpu = books.quietly(turn.patience, server.cpu_seconds, warm_up, send)
    tokens = (result.prompt_tokens, result.output_tokens)
    place = (turn.round, load.name, server.name, seed)
    return Sample(*place, result.wall_s, turn.floor.total_s, *tokens, cpu, **latencies(result))


def bodies(model: str, load: Load, prompts: list[Prompt]) -> list[dict[str, Any]]:
    """Requests: greedy, and as long as asked for whatever the model says."""
    fixed = {"model": model, "max_tokens": load.output, "temperature": 0, "ignore_eos": True}
    return [{**fixed, "prompt": prompt.text} for prompt in prompts]


def check(result: Result, load: Load, requests: int) -> None:
    """Raises `LoadFailed` unless all tokens are there and no others."""
    wanted = (requests * load.prompt_length, requests * load.output)
    got = (result.prompt_tokens, result.output_tokens)
    if result.errors:
        raise LoadFailed(f"{load.name}: {len(result.errors)} errors, the first: {result.errors[0]}")
    if got != wanted:
        raise LoadFailed(f"{load.name}: {got} prompt and output tokens instead of {wanted}")


def _send(server: Server, model: str, load: Load, prompts: list[Prompt]) -> Result:
    sending = run(server.host, server.port, bodies(model, load, prompts), load.clients)
    result = asyncio.run(asyncio.wait_for(sending, LOAD_S_MAX))
    check(result, load, len(prompts))
    return result
