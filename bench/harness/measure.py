"""Measures one load on one running server, and the machine's limits before, during and after the load.

The limits before and after are measured on an idle machine, those during the load in short pauses
(`bench.limits_of_machine.moments`). CPU time is accounted for each part of the server.

Called by `bench.peer_systems.peers` and `bench.run`, which decide the order of the loads; `report` evaluates the
samples.
"""

import asyncio
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

from antiphon.benchmark.load import Result, run
from antiphon.services.engine.models.description import DecoderDescription
from antiphon.services.engine.models.registry import find_family
from bench.harness.loads import Load, Prompt, Prompts
from bench.harness.sample import Sample, latencies, rounded
from bench.harness.serving import Server
from bench.limits_of_machine import cpu_accounting, probe, roofline
from bench.limits_of_machine.moments import Moments

P = TypeVar("P")
T = TypeVar("T")
LOAD_S_MAX = 1800.0
SETTLE_S = 5.0
"""Pause in seconds after a probe: the kernel is busy for a while with gigabytes of freed memory, which slows a load."""


class LoadFailed(Exception):
    """A request failed, or the server returned other numbers of tokens than were requested."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One load in one round, with the machine's limits measured around it. Its samples are one for each server."""

    round: int
    load: Load
    decoder: DecoderDescription
    retry_policy: cpu_accounting.RetryPolicy
    limits: tuple[tuple[probe.Probe, cpu_accounting.Cpu], ...]
    """The limits, and the CPU use during their measurement: before the load and, if `ended` was called, after it."""

    def ended(self, limits: tuple[probe.Probe, cpu_accounting.Cpu]) -> "Turn":
        """Returns the turn with the limits measured after the load added: a shared machine changes within a minute."""
        return replace(self, limits=(*self.limits, limits))

    def settled(self, samples: Iterable[Sample]) -> list[Sample]:
        """Returns the samples with the floor computed from all limits of this turn."""
        floor_s, sum_floor_s = self.floors
        return [replace(sample, floor_s=floor_s, sum_floor_s=sum_floor_s) for sample in samples]

    @property
    def floor(self) -> roofline.Floor:
        """The floor of the load with the mean of the measured limits and the best way to read memory."""
        return roofline.floor(self.decoder, self.load, self._limits(self._best_read()))

    @property
    def sum_floor(self) -> roofline.Floor:
        """The floor of the load with the read bandwidth of a plain sum."""
        return roofline.floor(self.decoder, self.load, self._limits(self._mean("read_sum_gb_s")))

    @property
    def floors(self) -> tuple[float, float]:
        """The seconds of `floor` and `sum_floor`."""
        return self.floor.total_s, self.sum_floor.total_s

    def floors_with(self, own: roofline.Limits) -> tuple[float, float, float]:
        """Returns the seconds of `floor`, `sum_floor`, and the floor with the limits `own`, measured in pauses."""
        return (*self.floors, roofline.floor(self.decoder, self.load, own).total_s)

    def record(self) -> dict[str, Any]:
        """Returns the limits and floors of this turn as a record for a results file."""
        names = ("read_model_gb_s", "read_large_gb_s", "read_sum_gb_s", "gemm_gflop_s")
        rates = {name: self._mean(name) for name in names}
        floor = {"floor_prompts_s": self.floor.prompts_s, "floor_decode_s": self.floor.decode_s}
        floor["sum_floor_decode_s"] = self.sum_floor.decode_s
        foreign = {"foreign_cores": max(cpu.foreign for _, cpu in self.limits)}
        return {"round": self.round, "load": self.load.name, **rounded({**rates, **floor, **foreign})}

    def _best_read(self) -> float:
        # Weights are read from memory or, if they fit, from a cache, so the faster of the two buffers is the limit.
        return fmean(max(found.read_model_gb_s, found.read_large_gb_s) for found, _ in self.limits)

    def _limits(self, read_gb_s: float) -> roofline.Limits:
        return roofline.Limits(read_gb_s * 1e9, self._mean("gemm_gflop_s") * 1e9)

    def _mean(self, name: str) -> float:
        return fmean(getattr(found, name) for found, _ in self.limits)


def describe(model: Path) -> DecoderDescription:
    """Returns the decoder description of a model directory."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    return find_family(config).describe(config)


def turns(
    loads: Iterable[tuple[int, Load]],
    decoder: DecoderDescription,
    retry_policy: cpu_accounting.RetryPolicy,
    threads: int,
    act: Callable[[Turn], list[Sample]],
) -> Iterator[tuple[Turn, list[Sample]]]:
    """Calls `act` once for each round and load, and yields the turn and its samples.

    The machine's limits are measured once between two loads and count for both.
    """
    found = limits(decoder, retry_policy, threads)
    for number, load in loads:
        turn = Turn(number, load, decoder, retry_policy, (found,))
        samples = act(turn)
        found = limits(decoder, retry_policy, threads)
        turn = turn.ended(found)
        yield turn, turn.settled(samples)


def limits(
    decoder: DecoderDescription, retry_policy: cpu_accounting.RetryPolicy, threads: int
) -> tuple[probe.Probe, cpu_accounting.Cpu]:
    """Measures the machine's limits for a model of this size, and the CPU use during this measurement."""
    size = roofline.weight_bytes(decoder)
    found = cpu_accounting.run_when_idle(
        retry_policy, cpu_accounting.children, lambda: size, lambda wanted: probe.measure(wanted, threads)
    )
    time.sleep(SETTLE_S)
    return found


def sample(server: Server, turn: Turn, prompts: Prompts, seeds: Iterator[int], moments: Moments) -> Sample:
    """Runs a load on a server and returns the sample. The warm-up is not measured. Raises `LoadFailed`."""
    load, model = turn.load, server.model_name()

    def warm_up() -> tuple[int, list[Prompt]]:
        seed = next(seeds)
        draw = prompts.draw(load, seed)
        for part in (draw.prime, draw.warmup):
            _send(server, model, load, part)
        return seed, draw.measured

    def send(drawn: tuple[int, list[Prompt]]) -> tuple[int, Result]:
        with moments.of(server.process.pid):
            return drawn[0], _send(server, model, load, drawn[1], moments.clock)

    (seed, result), cpu = beside(moments, turn, server.cpu_seconds, warm_up, send)
    tokens = (result.prompt_tokens, result.output_tokens)
    place = (turn.round, load.name, server.name, seed)
    floors = turn.floors_with(moments.limits())
    return Sample(*place, result.wall_s, *floors, *tokens, cpu, **latencies(result))


def beside(
    moments: Moments,
    turn: Turn,
    parts: Callable[[], Mapping[str, float]],
    prepare: Callable[[], P],
    act: Callable[[P], T],
) -> tuple[T, cpu_accounting.Cpu]:
    """Calls `cpu_accounting.run_when_idle` for an action during which `moments` measures.

    The CPU time of the measuring program counts neither as foreign nor as a part of the server.
    """
    taken = "moments"
    value, cpu = cpu_accounting.run_when_idle(
        turn.retry_policy, lambda: {**parts(), taken: moments.cpu_s()}, prepare, act, moments.clock
    )
    return value, replace(cpu, parts={name: used for name, used in cpu.parts.items() if name != taken})


def bodies(model: str, load: Load, prompts: list[Prompt]) -> list[dict[str, Any]]:
    """Returns the request bodies: greedy sampling, and a fixed output length regardless of the model's end token."""
    fixed = {"model": model, "max_tokens": load.output, "temperature": 0, "ignore_eos": True}
    return [{**fixed, "prompt": prompt.text} for prompt in prompts]


def check(result: Result, load: Load, requests: int) -> None:
    """Raises `LoadFailed` if there are errors or the numbers of tokens differ from the requested ones."""
    wanted = (requests * load.prompt_length, requests * load.output)
    got = (result.prompt_tokens, result.output_tokens)
    if result.errors:
        raise LoadFailed(f"{load.name}: {len(result.errors)} errors, the first: {result.errors[0]}")
    if got != wanted:
        raise LoadFailed(f"{load.name}: {got} prompt and output tokens instead of {wanted}")


def _send(
    server: Server, model: str, load: Load, prompts: list[Prompt], clock: cpu_accounting.Clock = time.perf_counter
) -> Result:
    sending = run(server.host, server.port, bodies(model, load, prompts), load.clients, clock=clock)
    result = asyncio.run(asyncio.wait_for(sending, LOAD_S_MAX))
    check(result, load, len(prompts))
    return result
