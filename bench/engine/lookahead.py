"""Gain and cost of draft tokens (`--use-lookahead`): decode times with and without drafts, for core and worker alone.

    python -m bench.engine.lookahead [--model DIRECTORY] [--batches 1 8 32] [--tokens 128] [--pairs 9]

The model computes every step in full, but the sampled tokens are replaced by a text of a known kind, so that every run
computes the same. A pair is one run without and one with drafts, in alternating order. The output is the share of
accepted drafts, and the median and quartiles of the pairs' ratios (above 1: drafts are slower), for wall time and for
CPU time, which is more reliable on a shared machine.

    noise      nothing ever repeats: no drafts can be made
    trap       few different tokens in random order: there is always a draft, and it is nearly always wrong
    half       phrases of eight tokens in random order: drafts are right inside a phrase and wrong at its end
    repeat     the same sixteen tokens repeated: every draft is right
"""

import argparse
import functools
import gc
import statistics
import time
from collections.abc import Callable

import numpy as np

from antiphon.services.engine.backends.cpu.answer import StepAnswer
from antiphon.services.engine.backends.load import load_worker
from antiphon.services.engine.backends.torch import results
from antiphon.services.engine.core.core import Core
from antiphon.services.engine.core.plan import CoreLimits
from antiphon.services.engine.core.request import SequenceSpec
from antiphon.services.engine.worker.batch.sampler import Sampled, SamplingBatch, sample
from antiphon.services.engine.worker.interface import ModelWorker
from antiphon.shared.config import EngineSettings
from antiphon.shared.parameters.sampling import SamplingParams

PROMPT_TOKENS = 96
answer_sampled = StepAnswer.sampled
Text = Callable[[int, int], int]
"""Returns the token at a position of the output of the sequence with a seed: `text(seed, position)`."""


def noise(seed: int, position: int) -> int:
    return 100 + (seed * 7919 + position * 31) % 3989


def trap(seed: int, position: int) -> int:
    return 100 + scramble(seed, position) % 12


def half(seed: int, position: int) -> int:
    return 200 + 8 * (scramble(seed, position // 8) % 12) + position % 8


def repeat(seed: int, position: int) -> int:
    return 100 + (seed + position % 16) % 3000


@functools.cache
def scramble(seed: int, number: int) -> int:
    return int(np.random.default_rng([seed, number + 2**16]).integers(2**31))


TEXTS: dict[str, Text] = {"noise": noise, "trap": trap, "half": half, "repeat": repeat}


def main() -> None:
    parser = argparse.ArgumentParser(description="Decode times with and without guesses.")
    parser.add_argument("--model", default="")
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--guesses", type=int, default=8)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--texts", nargs="*", default=list(TEXTS))
    options = parser.parse_args()
    settings = EngineSettings(
        model=options.model,
        threads=options.threads,
        cpu_backend=options.backend,
        max_num_seqs=max(options.batches),
        device="cpu",
    )
    worker = load_worker(settings)
    print(f"{'text':<8}{'batch':>6}{'time':>8}{'quartiles':>16}{'CPU':>8}{'quartiles':>16}{'right':>8}{'ms/token':>10}")
    for name in options.texts:
        for batch in options.batches:
            compare(worker, name, batch, options.tokens, options.pairs, options.guesses)


def compare(worker: ModelWorker, name: str, batch: int, tokens: int, pairs: int, guesses: int) -> None:
    write(TEXTS[name])
    cores = {most: make_core(worker, batch, most) for most in (0, guesses)}
    wall: list[float] = []
    cpu: list[float] = []
    plain_s: list[float] = []
    for pair in range(-1, pairs):
        runs = {most: decode(worker, cores[most], name, batch, tokens) for most in sorted(cores, reverse=pair % 2 == 0)}
        if pair >= 0:
            wall.append(runs[guesses][0] / runs[0][0])
            cpu.append(runs[guesses][1] / runs[0][1])
            plain_s.append(runs[0][0])
    counters = cores[guesses].counters()
    right = counters.accepted_tokens / max(1, counters.drafted_tokens)
    milliseconds = statistics.median(plain_s) / tokens * 1e3
    print(f"{name:<8}{batch:>6}{summary(wall)}{summary(cpu)}{right:>8.0%}{milliseconds:>10.2f}", flush=True)


def summary(ratios: list[float]) -> str:
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"{middle:>8.3f} ({low:.3f} {high:.3f})"


def make_core(worker: ModelWorker, batch: int, guesses: int) -> Core:
    limits = CoreLimits(
        max_num_seqs=batch, max_num_batched_tokens=8192, enable_prefix_caching=False, num_speculative_tokens=guesses
    )
    return Core(limits, worker.facts())


def write(text: Text) -> None:
    """Patches both CPU backends so that they return the tokens of `text` instead of the sampled tokens."""

    def replaced(sampled: Sampled, batch: SamplingBatch) -> Sampled:
        places = zip(batch.columns.seeds.tolist(), batch.output_positions.tolist(), strict=True)
        return Sampled(np.array([text(*place) for place in places], dtype=np.int64), sampled.logprobs)

    results.sample = lambda logits, batch: replaced(sample(logits, batch), batch)  # type: ignore[assignment]
    StepAnswer.sampled = lambda answer, batch: replaced(answer_sampled(answer, batch), batch)  # type: ignore


def decode(worker: ModelWorker, core: Core, name: str, batch: int, tokens: int) -> tuple[float, float]:
    """Runs `batch` sequences. Returns wall seconds and CPU seconds from the end of the prompts to the end of all."""
    for seed in range(batch):
        prompt = tuple(TEXTS[name](seed, position) for position in range(-PROMPT_TOKENS, 0))
        params = SamplingParams(max_tokens=tokens, temperature=0.0, seed=seed, ignore_eos=True)
        core.add(SequenceSpec(sequence_id=str(seed), prompt_token_ids=prompt, params=params))
    step(core, worker)
    gc.collect()
    started, started_cpu = time.perf_counter(), time.process_time()
    while core.sequences:
        step(core, worker)
    return time.perf_counter() - started, time.process_time() - started_cpu


def step(core: Core, worker: ModelWorker) -> None:
    plan = core.schedule(time.monotonic())
    core.apply(plan, worker.run(plan), time.monotonic())


if __name__ == "__main__":
    main()
